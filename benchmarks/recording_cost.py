"""How much CPU time does `serve --record` take, on the engine's thread and on the writer's?

    python benchmarks/recording_cost.py

Passes steps of 32 decoding rows, and requests of 500 + 100 tokens, to a recorder with a manually called writer. The last
line printed is one JSON object: microseconds of CPU time, and bytes of the file.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from penstock import machine
from penstock.clock import WallClock
from penstock.obs import recording
from penstock.testing import DEFAULT_CAPACITY, make_request
from penstock.types.plan import RowPlan
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats

NUM_STEPS, NUM_ROWS, NUM_REQUESTS = 3000, 32, 500
PARTS = {"execute": 30_000_000, "rows": 1_000_000, "linear": 20_000_000, "attention": 8_000_000, "sampling": 10_000}
TURN = {"schedule": 150_000, "commit": 120_000, "output": 200_000}


def main() -> None:
    recording.POLL_S = 3600.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        about = {"capacity": asdict(DEFAULT_CAPACITY)}
        recorder = recording.Recorder(path, max_bytes=1 << 30, clock=WallClock(), block_size=16, about=about)
        names = [f"cmpl-{row:032x}" for row in range(NUM_ROWS)]
        for name in names:
            recorder.on_queued(make_request(name, [idx * 7919 % 49_000 for idx in range(300)]), 0)
        steps = [step(step_id, names) for step_id in range(NUM_STEPS)]
        begin_ns = time.thread_time_ns()
        for stats in steps:
            recorder.on_step(stats)
            recorder.on_turn(TURN)
        told_ns = time.thread_time_ns()
        recorder._settle()
        written_ns = time.thread_time_ns()
        num_bytes = path.stat().st_size
        for number in range(NUM_REQUESTS):
            request = make_request(f"r{number}", [(number * 104_729 + idx * 7919) % 49_000 for idx in range(500)])
            request.output_token_ids.extend(range(100))
            recorder.on_queued(request, 0)
            ended = RequestStats(request.request_id, "", 0, 1, 5, 9, 500, 0, 100, 0, FinishReason.LENGTH)
            recorder.on_finish(ended)
        requests_ns = time.thread_time_ns()
        recorder._settle()
        summary = {
            "benchmark": "recording_cost",
            "cpu": machine.cpu_name(),
            "rows": NUM_ROWS,
            "engine_us_per_step": round((told_ns - begin_ns) / NUM_STEPS / 1e3, 2),
            "writer_us_per_step": round((written_ns - told_ns) / NUM_STEPS / 1e3, 1),
            "bytes_per_step": round(num_bytes / NUM_STEPS),
            "writer_us_per_request": round((time.thread_time_ns() - requests_ns) / NUM_REQUESTS / 1e3),
        }
        print(json.dumps(summary), flush=True)
        recorder._is_closing.set()


def step(step_id: int, names: list[str]) -> StepStats:
    rows = tuple(RowPlan(name, 200 + 7 * row + step_id, 1, (), 1) for row, name in enumerate(names))
    at_ns = step_id * 30_000_000
    return StepStats(
        step_id, at_ns, at_ns + 29_000_000, NUM_ROWS, 0, 4000, 1000, 500, parts_ns=PARTS, planned_ns=at_ns, rows=rows
    )


if __name__ == "__main__":
    main()
