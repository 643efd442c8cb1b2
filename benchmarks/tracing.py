"""What do traces cost? Two servers of the same model, one of which sends them, asked in turn by 32 clients.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --on "--log-requests 1 --metrics-compat vllm" --off "--explained-requests 0"

Both serve the default model (`penstock pull`). The collector is here, and only counts bytes. The last line printed is one JSON
object: medians over the rounds and their range, and the CPU time that making and encoding the spans of one request takes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sessions import serving
from usage import threads_cpu_s

from penstock import machine
from penstock.lab.workload import Job
from penstock.models.catalog import DEFAULT_MODEL
from penstock.obs.explain.explanation import Explanation
from penstock.obs.explain.lives import Phase
from penstock.obs.otlp import SpanSender
from penstock.obs.trace_context import TraceContext, new_span_id, new_trace_id
from penstock.serve.http.entries import Entry
from penstock.serve.tracing import spans_of
from penstock.types.request import FinishReason

CLIENTS, TOKENS = 32, 64
PROMPT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. "
NUM_MADE, BATCH = 2000, 32


class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_bytes = 0

    def do_POST(self) -> None:
        Collector.num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None: ...


def told(number: int) -> Explanation:
    names = Explanation.__dataclass_fields__
    zeros = {name: 0 for name in names if name.startswith("num_") or name.endswith("_ns")}
    fields = zeros | {"waited_for_ns": {"intake": 10**6, "rows": 10**7}, "mean_batch": 30.5, "max_batch": 32}
    fields |= {"num_prefill_steps": 1, "num_generated_tokens": TOKENS, "num_decode_steps": TOKENS - 1}
    fields |= {"num_sat_out_steps": 0, "evicted_ago_ns": None, "stop": None, "longest_gap": None, "pauses": ()}
    fields |= {"total_ns": 10**9, "queue_ns": 11 * 10**6, "prefill_ns": 10**8, "first_step": number, "last_step": number + 99}
    about = {"phase": Phase.ENDED, "finish_reason": FinishReason.LENGTH, "reject_reason": "", "waits_for": ""}
    return Explanation(request_id=f"r{number}", **about, **fields)  # type: ignore[arg-type]


def us_per_request(url: str) -> float:
    """Return the microseconds of CPU time to make, encode and send the spans of one request."""
    sender, begin_ns = SpanSender(url), time.thread_time_ns()
    for first in range(0, NUM_MADE, BATCH):
        traces = []
        for number in range(first, first + BATCH):
            entry = Entry(client="c", method="POST", path="/v1/chat/completions", status=200, ended_ns=10**9, ttft_s=0.1)
            entry.operation, entry.model, entry.request_id, entry.count_tokens = (
                "chat",
                "m",
                f"r{number}",
                lambda: (100, TOKENS),
            )
            entry.trace, explained = TraceContext(new_trace_id(), new_span_id(), is_sampled=True), (told(number),)
            entry.explain = lambda explained=explained: explained  # type: ignore[misc]
            traces.append((entry.trace, spans_of(entry), 0))
        assert sender.send(traces)
    return (time.thread_time_ns() - begin_ns) / NUM_MADE / 1e3


def shown(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96, help="of a round, to each server")
    parser.add_argument("--on", default="", metavar="FLAGS", help="more, for the server that sends traces")
    parser.add_argument("--off", default="", metavar="FLAGS", help="likewise, for the other one")
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    made_us = us_per_request(url)
    traced = {"off": shlex.split(args.off), "on": ["--otlp-endpoint", url, *shlex.split(args.on)]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in traced}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(serving(DEFAULT_MODEL, *words, environ={"NO_PROXY": "127.0.0.1"}))
            for name, words in traced.items()
        }
        jobs = [
            Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=TOKENS, prompt=f"{n} {PROMPT * 4}") for n in range(9999)
        ]
        first = 0
        for number in range(args.rounds + 1):  # the first one warms up
            for name in ("off", "on") if number % 2 else ("on", "off"):
                session = sessions[name]
                before_s = threads_cpu_s(session.process.pid)
                sent = session.replay(jobs[first : first + args.requests], CLIENTS)
                time.sleep(1.0)  # its last spans are sent
                if number:
                    per_request = (threads_cpu_s(session.process.pid) - before_s) / args.requests * 1e3
                    found[name].append((per_request, args.requests * TOKENS * 1e9 / sent.duration_ns))
            first += args.requests
    summary = {
        "benchmark": "tracing",
        "cpu": machine.cpu_name(),
        "made_us_per_request": round(made_us, 1),
        **{f"cpu_ms_per_request_{name}": shown([one for one, _ in of]) for name, of in found.items()},
        **{f"tokens_per_s_{name}": shown([one for _, one in of]) for name, of in found.items()},
        "ratio_of_cpu": shown([on[0] / off[0] for on, off in zip(found["on"], found["off"], strict=True)]),
        "ratio_of_speed": shown([on[1] / off[1] for on, off in zip(found["on"], found["off"], strict=True)]),
        "collected_bytes": Collector.num_bytes,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
