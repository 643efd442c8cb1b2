"""How much of an offline job's prompts is found in the cache, by line order, and how long does the job take?

    python benchmarks/batch_order.py                             # simulated: a quarter of an hour
    python benchmarks/batch_order.py --workloads spread --orders key ratio "both ends" --cost h100-llama-8b --rows 128
    python benchmarks/batch_order.py --real --workloads few-shot tree "nothing shared" --orders arrival key --lines 300

The real scheduler and KV manager over a modelled executor, under a virtual clock. Lines are texts; four bytes make a token.
`--rows` run at once, and as many more wait. Orders:

- `arrival`: shuffled
- `system`: sorted by a hash of the first message
- `longest match`: shuffled; of the first `WINDOW` waiting lines, the one with the longest cached prefix joins next
- `key`: sorted by `penstock.jobs.order.prefix_key`
- `exact`: sorted by the tokens
- `ratio`: as `key`, but first messages with the most decodes per prompt token come first (BatchLLM)
- `both ends`: as `ratio`, but in turn from the first and the last

`saved` is the share of the prompts' tokens that were not computed, and `possible` its limit for any order and unlimited
memory. Tokens recomputed after a preemption count against `saved`. The full pool is the most that lines in `key` order
hold.

`--real` runs smollm2:135m on this machine through the Python API. A job starts with an empty cache. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

from printed import origin, table
from workloads import DEFAULT_TRACES, trace_file

from penstock.clock import VirtualClock
from penstock.config.components import DEFAULT_MODEL
from penstock.jobs.order import prefix_key
from penstock.kv.block_table import extend_chain, root_hash
from penstock.lab.cost_files import load_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.prompts import WORDS
from penstock.lab.simulated_executor import EOS_TOKEN_ID
from penstock.lab.traces import read_workload
from penstock.lab.virtual_server import ServerSettings, VirtualServer
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

BLOCK_SIZE = 16
WINDOW = 128
"""SGLang does not look for prefixes beyond this."""
COMPARED = ("arrival", "system", "longest match", "key", "exact")
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the memory that the job would use."""


@dataclass(frozen=True)
class Line:
    messages: tuple[str, ...]
    num_output_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        roles = ("system", "user")
        return {"messages": [{"role": roles[k > 0], "content": text} for k, text in enumerate(self.messages)]}

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        text = "\n".join(self.messages).encode("ascii")
        return tuple(array("I", text + b" " * (-len(text) % 4)))


class Texts:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def of(self, least: int, most: int) -> str:
        """Return a text of some tokens, four characters each."""
        words = " ".join(self.rng.choices(WORDS, k=most))
        return words[: 4 * self.rng.randint(least, most)]


def few_shot(count: int, seed: int = 1) -> list[Line]:
    """System prompts with examples, some used far more often than others; a question of its own each."""
    texts = Texts(seed)
    prompts = [(texts.of(100, 600), "\n".join(texts.of(30, 90) for _ in range(8))) for _ in range(max(1, count // 20))]
    weights = [1 / (1 + rank) for rank in range(len(prompts))]
    drawn = texts.rng.choices(prompts, weights, k=count)
    return [Line((*prompt, texts.of(10, 120)), texts.rng.randint(8, 128)) for prompt in drawn]


def tree(count: int, seed: int = 2) -> list[Line]:
    """Four levels in two messages: an instruction, then a document, its section and a question in one text."""
    texts = Texts(seed)
    lines: list[Line] = []
    while len(lines) < count:
        system = texts.of(50, 400)
        for _ in range(texts.rng.randint(1, 8)):
            document = texts.of(100, 800)
            for _ in range(texts.rng.randint(1, 6)):
                section = document + texts.of(20, 300)
                num = texts.rng.randint(1, 8)
                lines += [Line((system, section + texts.of(10, 60)), texts.rng.randint(8, 128)) for _ in range(num)]
    return lines[:count]


def spread(count: int, seed: int = 5) -> list[Line]:
    """Prompts and answers of any lengths, alike in a group of 20: from nearly all prompt to nearly all answer."""
    texts = Texts(seed)
    lines: list[Line] = []
    while len(lines) < count:
        system, most = texts.of(20, 1200), round(2 ** texts.rng.uniform(2, 8.6))
        lines += [Line((system, texts.of(10, 300)), texts.rng.randint(most // 2, most)) for _ in range(20)]
    return lines[:count]


def mooncake(count: int, traces: Path) -> list[Line]:
    """Mooncake's synthetic trace with blocks of 16 tokens instead of 512, and answers as they are, so that many run at once."""
    jobs = read_workload(trace_file(traces, "mooncake_synthetic.jsonl"), max_requests=count).jobs
    blocks = (" ".join(f"{name:015d}" for name in job.prefix for _ in range(4)) for job in jobs)
    return [Line((text,), job.num_output_tokens) for text, job in zip(blocks, jobs, strict=True)]


def nothing_shared(count: int, seed: int = 3) -> list[Line]:
    texts = Texts(seed)
    return [Line((texts.of(100, 400), texts.of(10, 120)), texts.rng.randint(8, 128)) for _ in range(count)]


JOBS: dict[str, Callable[[int, Path], list[Line]]] = {
    "few-shot": lambda count, _: few_shot(count),
    "tree": lambda count, _: tree(count),
    "mooncake": mooncake,
    "spread": lambda count, _: spread(count),
    "nothing shared": lambda count, _: nothing_shared(count),
}


def num_blocks_of(line: Line) -> int:
    return -(-(len(line.token_ids) + line.num_output_tokens) // BLOCK_SIZE)


def by_key(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: prefix_key("/v1/chat/completions", line.body))


def by_ratio(lines: Sequence[Line]) -> list[list[Line]]:
    """Return groups of lines with the same first message, those with most decodes for each token of their prompts first."""
    groups = [list(group) for _, group in groupby(by_key(lines), key=lambda line: line.messages[0])]
    return sorted(groups, key=lambda group: sum(line.num_output_tokens for line in group) / num_new(group), reverse=True)


def from_both_ends(lines: Sequence[Line]) -> list[Line]:
    groups, ordered = deque(by_ratio(lines)), list[Line]()
    while groups:
        ordered += groups.popleft()
        if groups:
            ordered += groups.pop()
    return ordered


ORDERS: dict[str, Callable[[list[Line]], list[Line]]] = {
    "arrival": list,
    "system": lambda lines: sorted(lines, key=lambda line: crc32(line.messages[0].encode())),
    "longest match": list,
    "key": by_key,
    "exact": lambda lines: sorted(lines, key=lambda line: line.token_ids),
    "ratio": lambda lines: [line for group in by_ratio(lines) for line in group],
    "both ends": from_both_ends,
}


def ordered(lines: Sequence[Line], order: str) -> list[Line]:
    """Return the lines in an order, equal ones as they were in the shuffled file."""
    shuffled = list(lines)
    random.Random(4).shuffle(shuffled)
    return ORDERS[order](shuffled)


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens of the second prompt the first one may save; the last is always computed."""
    most = min(len(one), len(other) - 1)
    return next((idx for idx in range(most) if one[idx] != other[idx]), most)


def num_new(lines: Sequence[Line]) -> int:
    """Return how many tokens of the prompts have to be computed, whatever the order and the memory."""
    prompts = sorted(line.token_ids for line in lines)
    return sum(map(len, prompts)) - sum(num_shared(*pair) for pair in pairwise(prompts))


def possible(lines: Sequence[Line]) -> float:
    return 1 - num_new(lines) / sum(len(line.token_ids) for line in lines)


@dataclass(frozen=True, slots=True)
class Ran:
    saved: float
    seconds: float
    num_steps: int
    max_held: int
    mean_running: float
    num_preemptions: int


class Waiting:
    """Lines that have not joined: gives the next in order, or the one with most tokens cached."""

    def __init__(self, requests: Sequence[Request], server: VirtualServer, *, by_match: bool) -> None:
        self._requests = list(reversed(requests))
        self._index = server.core.scheduler.kv.prefix.index
        self._by_match = by_match
        self._hashes: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def take(self) -> Request:
        return self._requests.pop(-1 - (self._longest() if self._by_match else 0))

    def _longest(self) -> int:
        window = self._requests[: -1 - WINDOW : -1]
        found = [len(self._index.lookup(self._hashes_of(request))) for request in window]
        return found.index(max(found))

    def _hashes_of(self, request: Request) -> list[bytes]:
        if request.request_id not in self._hashes:
            self._hashes[request.request_id], _ = extend_chain(root_hash(b""), request.prompt_token_ids, BLOCK_SIZE)
        return self._hashes[request.request_id]


def run(
    lines: Sequence[Line],
    num_rows: int,
    num_blocks: int | None,
    *,
    by_match: bool = False,
    cost: CostModel | None = None,
    step_tokens: int = 512,
    budget: str | None = None,
    reserve: str | None = None,
) -> Ran:
    """Run the lines one after another, as they are. `num_blocks`: None means enough for all."""
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=line.token_ids,
            sampling=SamplingParams(max_tokens=line.num_output_tokens, temperature=0.0, stop_token_ids=(EOS_TOKEN_ID,)),
            arrival_ns=0,
        )
        for number, line in enumerate(lines)
    ]
    longest = max(len(line.token_ids) + line.num_output_tokens for line in lines)
    if num_blocks is None:
        num_blocks = sum(map(num_blocks_of, lines))
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, num_rows, step_tokens, max_model_len=longest)
    clock = VirtualClock()
    settings = ServerSettings(
        capacity=capacity, make_policies=lambda: make_policies(budget=budget, reserve=reserve), cost=cost or CostModel()
    )
    server = VirtualServer(settings, clock, report=lambda *_: None)
    waiting = Waiting(requests, server, by_match=by_match)
    num_wait = 8 if by_match else num_rows
    num_computed = 0
    while waiting or server.num_in_flight:
        while waiting and server.num_in_flight - server.core.num_running < num_wait:
            request = waiting.take()
            server.submit(request, lines[int(request.request_id)].num_output_tokens)
        clock.advance_to(server.player.next_ns)
        server.act()
        if server.player.begun is not None:
            num_computed += sum(row.query_len for row in server.player.begun.rows)
    num_prompt = sum(request.num_prompt_tokens for request in requests)
    num_answer = sum(line.num_output_tokens - 1 for line in lines)
    return Ran(
        saved=1 - (num_computed - num_answer) / num_prompt,
        seconds=clock.now_ns() / 1e9,
        num_steps=server.num_steps,
        max_held=server.timeline.max_held,
        mean_running=server.timeline.means(clock.now_ns())[0],
        num_preemptions=sum(stats.num_preemptions for stats in server.ended.values()),
    )


def compare(
    name: str, lines: Sequence[Line], num_rows: int, orders: Sequence[str], shares: Sequence[float], **settings: Any
) -> Iterator[dict[str, Any]]:
    most = possible(lines)
    need = run(ordered(lines, "key"), num_rows, None, **settings).max_held
    least = max(map(num_blocks_of, lines))
    sizes = {max(round(share * need), least): share for share in sorted(shares)}  # of equal sizes, the largest share
    for num_blocks in sorted(sizes, reverse=True):
        for order in orders:
            ran = run(ordered(lines, order), num_rows, num_blocks, by_match=order == "longest match", **settings)
            yield {
                "workload": name,
                "lines": len(lines),
                "rows": num_rows,
                "memory": sizes[num_blocks],
                "blocks": num_blocks,
                "order": order,
                "possible": round(most, 4),
                "saved": round(ran.saved, 4),
                "of_possible": round(ran.saved / most, 4),
                "simulated_s": round(ran.seconds, 1),
                "mean_running": round(ran.mean_running, 1),
                "preemptions": ran.num_preemptions,
            }


def print_figures(found: Sequence[dict[str, Any]], orders: Sequence[str]) -> None:
    """Print a table with two cells for each order: the share of what is possible, and the time as a multiple of the key's."""
    by_case: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for one in found:
        case = tuple(one[name] for name in ("workload", "rows", "memory", "blocks", "possible"))
        by_case.setdefault(case, {})[one["order"]] = one
    rows = []
    for (name, num_rows, share, num_blocks, most), figures in by_case.items():
        seconds = figures["key"]["simulated_s"]
        cells = (
            f"{100 * one['of_possible']:.1f} %, {one['simulated_s'] / seconds:.2f}" for one in map(figures.get, orders) if one
        )
        rows.append((name, num_rows, f"{share:g} ({num_blocks})", f"{100 * most:.1f} %", *cells))
    print(origin("shares of what is possible, and simulated time / that of `key`"))
    print(table(("job", "rows", "memory (blocks)", "possible", *orders), rows), end="\n\n")


def time_real(
    lines: Sequence[Line], orders: Sequence[str], kv_cache_memory: str, num_rows: int, repeat: int
) -> dict[str, dict[str, float]]:
    """Run a job in several orders in turn, each in a new engine. Return medians; times include computing the order."""
    from penstock import LLM, SamplingParams

    arrived = ordered(lines, "arrival")
    runs: dict[str, list[tuple[float, float, float]]] = {order: [] for order in orders}
    for _ in range(repeat):
        for order, some in runs.items():
            with LLM(DEFAULT_MODEL, kv_cache_memory=kv_cache_memory, max_num_seqs=num_rows) as llm:
                llm.generate("One, two,", SamplingParams(max_tokens=8))
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                due = ORDERS[order](arrived)
                params = [SamplingParams(max_tokens=one.num_output_tokens, ignore_eos=True, temperature=0.0) for one in due]
                outputs = llm.chat([one.body["messages"] for one in due], params, use_tqdm=False)
                took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
            found = sum(output.num_cached_tokens for output in outputs)
            some.append((took_s, cpu_s, found / sum(len(output.prompt_token_ids) for output in outputs)))
            print(order, some[-1], file=sys.stderr, flush=True)
    columns = {order: [median(column) for column in zip(*some, strict=True)] for order, some in runs.items()}
    return {order: dict(zip(("wall_s", "cpu_s", "found"), one, strict=True)) for order, one in columns.items()}


def print_times(found: Mapping[str, Mapping[str, Mapping[str, float]]], about: str) -> None:
    rows = []
    for name, figures in found.items():
        first = next(iter(figures.values()))
        for order, one in figures.items():
            ratios = (f"{first[key] / one[key]:.3f}" for key in ("wall_s", "cpu_s"))
            rows.append((name, order, f"{100 * one['found']:.1f} %", f"{one['wall_s']:.1f}", f"{one['cpu_s']:.1f}", *ratios))
    print(origin(about))
    head = ("job", "order", "found in the cache", "wall (s)", "CPU (s)", "times as fast: wall", "CPU")
    print(table(head, rows), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(JOBS), default=("few-shot", "tree", "mooncake"))
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=COMPARED)
    parser.add_argument("--lines", type=int, default=1000, help="of each job (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--memory", type=float, nargs="+", default=SHARES)
    parser.add_argument("--cost", type=Path, help="a cost model (default: smollm2:135m on one thread)")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--budget", help="policy of the scheduler (default: the server's)")
    parser.add_argument("--reserve", help="likewise")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--real", action="store_true", help="run smollm2:135m instead of the simulation")
    parser.add_argument("--kv-cache-memory", default="96MiB")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    made = {name: make(args.lines, args.traces) for name, make in JOBS.items() if name in args.workloads}
    if args.real:
        real = {
            name: time_real(lines, args.orders, args.kv_cache_memory, args.rows[0], args.repeat) for name, lines in made.items()
        }
        print_times(real, f"{args.kv_cache_memory} of KV cache, {args.rows[0]} rows, medians of {args.repeat}")
        print(json.dumps({"benchmark": "batch_order real"} | real))
        return
    if "key" not in args.orders:
        parser.error("--orders needs `key`, with whose time others are compared")
    cost = None if args.cost is None else load_cost(args.cost).cost
    settings = {"cost": cost, "step_tokens": args.step_tokens, "budget": args.budget, "reserve": args.reserve}
    found: list[dict[str, Any]] = []
    for name, lines in made.items():
        for num_rows in args.rows:
            for figures in compare(name, lines, num_rows, args.orders, args.memory, **settings):
                found.append(figures)
                print(figures, file=sys.stderr, flush=True)
    print_figures(found, args.orders)
    print(json.dumps({"benchmark": "batch_order", "figures": found}))


if __name__ == "__main__":
    main()
