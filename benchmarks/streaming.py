"""What does a streamed token cost the server beside the model's work? CPU time of its threads, per token and per step.

The server runs with an executor that sleeps for `--step-ms` and then says the next words of a poem: nothing but the server's
own work is left. All else is as with a model: tokenizer, scheduler, rows in C++, text, events, metrics. One closed loop for
each of `--streams`; the client is the lab's. The HTTP thread's CPU time has requests, prompts and connections in it.

    python benchmarks/streaming.py

Linux only (/proc). Needs the default model in the cache (`penstock pull`) for its tokenizer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from printed import origin, table
from processes import Contender
from sessions import SERVED_NAME, ServerSession, running
from usage import metric

from penstock.backends.native._native import RowTable
from penstock.config import Config, KvConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.deploy import build, factory
from penstock.deploy.blueprint import Blueprint
from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.weights import LoadedModel
from penstock.serve.server import run_server
from penstock.testing import sizes_of
from penstock.text.tokenizer import load_tokenizer
from penstock.types.adapter import NoAdapters
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult, StepTiming

POEM = Path(__file__).parents[1] / "tests" / "golden" / "sonnet_excerpt.txt"
PROMPT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. " * 4
STEPS = "penstock_steps_total"
PARTS = {"rows": 0, "linear": 0, "attention": 0, "sampling": 0}


class Sleeper(NoAdapters):
    """An executor with the native one's row table and without its kernels."""

    def __init__(self, capacity: Capacity, words: list[int], vocab_size: int, step_s: float) -> None:
        self.capacity, self.depth = capacity, 1
        self._rows = RowTable(**sizes_of(capacity), vocab_size=vocab_size, window=capacity.window)
        self.words = words
        self._step_s = step_s
        self._num_said = 0

    def copy_blocks(self, _pairs: object) -> None: ...

    def submit(self, plan: StepPlan) -> Ticket:
        for request_id in plan.releases:
            self._rows.release(request_id)
        for row in plan.admits:
            self._rows.admit(row)
        self._rows.plan(plan.rows)
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        start_ns = time.monotonic_ns()
        time.sleep(self._step_s)
        end_ns = time.monotonic_ns()
        names = self._rows.sampled()
        tokens = self.next_words(names)
        self._rows.append(tokens)
        said = {name: (token,) for name, token in zip(names, tokens, strict=True)}
        return StepResult(ticket.step_id, said, StepTiming(start_ns, end_ns, PARTS))

    def next_words(self, names: Sequence[str]) -> list[int]:
        self._num_said += 1
        return [self.words[(self._num_said + idx) % len(self.words)] for idx in range(len(names))]

    def close(self) -> None: ...


def serve(port: int, step_s: float, executor: type[Sleeper] = Sleeper) -> None:
    """In the server's process: as `penstock serve`, but for the executor. The first line printed is the engine's thread."""

    def make(blueprint: Blueprint, model: LoadedModel, _seat_of: object) -> tuple[Blueprint, Sleeper]:
        words = load_tokenizer(model.tokenizer_source).encode(POEM.read_text(), add_special_tokens=False)
        return blueprint, executor(blueprint.measured_plan.capacity, words, model.spec.vocab_size, step_s)

    build.first_executor = make  # type: ignore[assignment]
    config = Config(
        model=ModelConfig(served_model_names=(SERVED_NAME,)),
        kv=KvConfig(prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=256),
        server=ServerConfig(port=port),
    )
    runtime = factory.start_model(config, resolve(DEFAULT_MODEL, default_cache_dir()))
    print(next(thread.native_id for thread in threading.enumerate() if thread.name == "penstock-engine"), flush=True)
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.deployments import deployment_of

    run_server(deployment_of(runtime), config.server)


def thread_cpu_s(pid: int, thread: int) -> float:
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def measure(session: ServerSession, engine: int, streams: int, tokens: int, rounds: int) -> dict[str, float]:
    pid = session.process.pid
    job = Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=tokens, prompt=PROMPT)
    session.replay([job] * streams, streams)
    steps = metric(session.url, STEPS)
    http_s, engine_s = thread_cpu_s(pid, pid), thread_cpu_s(pid, engine)
    sent = session.replay([job] * (streams * rounds), streams)
    http_s, engine_s = thread_cpu_s(pid, pid) - http_s, thread_cpu_s(pid, engine) - engine_s
    num_tokens, num_steps = tokens * streams * rounds, metric(session.url, STEPS) - steps
    return {
        "HTTP thread, us a token": http_s / num_tokens * 1e6,
        "engine thread, us a step": engine_s / num_steps * 1e6,
        "client, us a token": sent.client_cpu_s / num_tokens * 1e6,
        "tokens/s": num_tokens * 1e9 / sent.duration_ns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=150, help="of each reply")
    parser.add_argument("--rounds", type=int, default=3, help="replies of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server (for the benchmark's own use)")
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.step_ms / 1e3)
        return
    command = [sys.executable, __file__, "--step-ms", str(args.step_ms), "--serve", "{port}"]
    server = Contender("sleeper", command, health="/ready")
    with tempfile.NamedTemporaryFile("r") as log, running(server, Path(log.name)) as session:
        assert isinstance(session, ServerSession)
        engine = int(log.readline())
        results = [measure(session, engine, streams, args.tokens, args.rounds) for streams in args.streams]
    print(origin(f"a step takes {args.step_ms:g} ms"))
    print(table(["streams", *args.streams], [[name, *(f"{found[name]:.1f}" for found in results)] for name in results[0]]))


if __name__ == "__main__":
    main()
