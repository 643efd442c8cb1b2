"""What do metrics cost? CPU time for each step and each request that is counted, and for each `GET /metrics`, without a model.

Steps are made up: 32 rows, and in every fourth the queue waits for rows.

    python benchmarks/metrics_cost.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median

from printed import origin

from penstock.obs.metrics import Metrics
from penstock.obs.prometheus import OPEN_METRICS, expose
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import RequestStats, StepCounts, StepStats, WaitReason

NUM_STEPS, NUM_ROWS, NUM_ROUNDS, STEP_NS = 5_000, 32, 9, 20_000_000
PARTS_NS = {"schedule": 50_000, "commit": 60_000, "output": 40_000}

Step = tuple[StepStats, Request, RequestStats]


def steps() -> list[Step]:
    return [step(number) for number in range(NUM_STEPS)]


def step(number: int) -> Step:
    now_ns = number * STEP_NS
    lacks = [WaitReason.ROWS if idx % 4 == 0 else WaitReason.NOTHING for idx in (number, number - 1)]
    counts = StepCounts(num_rows=NUM_ROWS, num_tokens=NUM_ROWS, num_sampled_tokens=NUM_ROWS)
    counts.waits_for, counts.waited_for = lacks
    stats = StepStats(number, now_ns, now_ns + STEP_NS, NUM_ROWS, 1, 1000, 500, 100, counts, {"execute": STEP_NS})
    stats.planned_ns = now_ns
    request = Request(f"call-{number}/1.0", (1,) * 100, SamplingParams(), now_ns - 5 * STEP_NS)
    request.first_scheduled_ns, request.first_token_ns = now_ns, now_ns + STEP_NS
    end = RequestStats(
        request_id=request.request_id,
        tenant="",
        arrival_ns=request.arrival_ns,
        first_scheduled_ns=now_ns,
        first_token_ns=now_ns + STEP_NS,
        ended_ns=now_ns + 32 * STEP_NS,
        num_prompt_tokens=100,
        num_cached_tokens=0,
        num_generated_tokens=32,
        num_preemptions=0,
        finish_reason=FinishReason.LENGTH,
    )
    return stats, request, end


def count(metrics: Metrics, made: Sequence[Step]) -> None:
    gaps_ns = [STEP_NS] * NUM_ROWS
    for stats, _, _ in made:
        metrics.on_step(stats)
        metrics.on_turn(PARTS_NS)
        metrics.on_tokens((), gaps_ns)
    with metrics.lock:
        metrics.settle()


def count_requests(metrics: Metrics, made: Sequence[Step]) -> None:
    for _, request, end in made:
        metrics.on_tokens([request], ())
        metrics.on_finish(end)
    with metrics.lock:
        metrics.settle()


def cpu_s(work: Callable[[], object]) -> float:
    """Median CPU time of `NUM_ROUNDS` calls."""
    times = []
    for _ in range(NUM_ROUNDS):
        began_s = time.process_time()
        work()
        times.append(time.process_time() - began_s)
    return median(times)


def main() -> None:
    made, metrics = steps(), Metrics("m")
    step_us = cpu_s(lambda: count(metrics, made)) / NUM_STEPS * 1e6
    request_us = cpu_s(lambda: count_requests(metrics, made)) / NUM_STEPS * 1e6
    scrapes_ms = {
        name: round(cpu_s(scrape) * 1e3, 2)
        for name, scrape in (
            ("plain", lambda: expose(metrics)),
            ("with the process", lambda: expose(metrics, process=True)),
            ("OpenMetrics", lambda: expose(metrics, process=True, content_type=OPEN_METRICS)),
            ("with vLLM's names", lambda: expose(metrics, process=True, vllm=True, content_type=OPEN_METRICS)),
        )
    }
    print(origin(f"median of {NUM_ROUNDS}"))
    costs = {"us_per_step": round(step_us, 2), "us_per_request": round(request_us, 2), "ms_per_scrape": scrapes_ms}
    print(json.dumps({**costs, "bytes": len(expose(metrics))}))


if __name__ == "__main__":
    main()
