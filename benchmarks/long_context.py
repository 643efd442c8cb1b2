"""How long does one long prompt take, and each token after it? Servers in turn, each alone on the machine.

    python benchmarks/long_context.py --setup
    python benchmarks/long_context.py --peers penstock openvino --tokens 8000 32000 --repeat 3

The prompt is made of ShareGPT's replies, one after the other; the answer is greedy. The table has the time to its first token
and the mean of the gaps after it: medians of the rounds with the range, in bold that server's time over Penstock's. Servers and
their settings are those of `peers.py`, with one request at a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from contenders import CONTENDERS, MODELS, OURS, Setting, prepared
from peaks import usable_threads
from peer_setup import Environments
from peers import ENVIRONMENTS, compete
from printed import origin, table
from processes import Contender
from sessions import LoadError, running, warm_up
from workloads import DEFAULT_TRACES, Source, read_tokenizer

from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve

WARM_UP_PROMPT_TOKENS = 64


def measure(contender: Contender, warm: Job, jobs: Sequence[Job], log: Path) -> list[tuple[float, float]]:
    """Return (seconds to the first token, milliseconds of each token after it) of each job, computed one by one."""
    with running(contender, log) as session:
        warm_up(session, [warm], 1)
        records = session.replay(jobs, 1).records
    for job, record in zip(jobs, records, strict=True):
        if 0 < record.num_prompt_tokens < 0.9 * job.num_prompt_tokens:  # cut, and nobody was told
            raise LoadError(f"it read {record.num_prompt_tokens} of a prompt's {job.num_prompt_tokens} tokens")
    return [((one.first_ns - one.sent_ns) / 1e9, statistics.mean(one.gaps_ns) / 1e6) for one in records]


def cell(times: Sequence[float], ours: Sequence[float]) -> str:
    ratio = f" **{statistics.median(times) / statistics.median(ours):.2f}**" if ours and times is not ours else ""
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f}){ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(CONTENDERS), help=", ".join(CONTENDERS))
    parser.add_argument("--setup", action="store_true", help="make the environments that are missing")
    parser.add_argument("--model", choices=MODELS, default="qwen")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_000], help="of a prompt")
    parser.add_argument("--reply", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    args = parser.parse_args()
    gguf = resolve(MODELS[args.model].file, default_cache_dir()).path.resolve()
    source = Source(args.traces, read_tokenizer(gguf))
    lengths = [WARM_UP_PROMPT_TOKENS, *args.tokens]
    warm, *jobs = (
        Job(
            arrival_ns=0,
            num_prompt_tokens=num,
            num_output_tokens=args.reply,
            prompt=text,
            prompt_token_ids=tuple(source.ids(text)),  # for a worker whose own tokenizer cuts a text
        )
        for text, num in source.pieces(lengths)
    )
    setting = Setting(Environments(ENVIRONMENTS), gguf, MODELS[args.model], {1: len(jobs)}, jobs)

    def measure_one(contender: Contender, turn: int) -> list[tuple[float, float]]:
        times = measure(contender, warm, jobs, setting.environments.log(f"long-{turn + 1}"))
        print(contender.name, times, file=sys.stderr, flush=True)
        return times

    found = compete(list(prepared(args.peers, setting, setup=args.setup)), args.repeat, measure_one)
    results = {
        name: [[[one[idx][part] for one in rounds.values()] for part in (0, 1)] for idx in range(len(jobs))]
        for name, rounds in found.items()
    }
    ours = results.get(OURS, [[[], []]] * len(jobs))
    columns = [column for job in jobs for column in (f"prompt of {job.num_prompt_tokens}, s", "ms a token")]
    lines = [
        [name, *(cell(times, ours[idx][part]) for idx, both in enumerate(cells) for part, times in enumerate(both))]
        for name, cells in results.items()
    ]
    print(origin(gguf.name, f"{usable_threads()} threads", f"{args.reply} tokens out"))
    print(table(["server", *columns], lines))
    print(json.dumps({"benchmark": "long_context", "model": args.model, "tokens": args.tokens, "results": results}))


if __name__ == "__main__":
    main()
