"""What does a background job take from other requests, and what does it get? Simulated with the real scheduler.

    python benchmarks/background.py                         # at half of capacity, as served
    python benchmarks/background.py 0.3 0.7 --fill 0.1 0.25 1

Chats arrive at a share of the machine's capacity for them. Behind them a job always has 128 lines waiting, with prompts of
about 300 tokens and answers of about 150. `rest` is the job's tokens per second over what the chats leave: (1 - load) times
the job's rate alone. Ratios compare with the same chats without a job. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial

from penstock.lab.pacing import Pace
from penstock.lab.records import Record
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.workload import NS_PER_S, Job, Workload
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

CAPACITY = Capacity(num_blocks=4097, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=4096)
NUM_LINES_WAITING = 128
NUM_LINES = 20_000
"""The job never finishes."""
FILL = HoldLatency().fill_share
LONG_TOKENS = 512
"""As in the preset."""


def simulation(fill: float = FILL, share: float = 0.0) -> Simulation:
    def policies():
        budget = HoldLatency(fill_share=fill, long_prefill_token_threshold=LONG_TOKENS)
        return make_policies(budget=budget, background_share=share)

    return Simulation(capacity=CAPACITY, make_policies=policies, max_tokens=None)


def chats(num: int) -> Workload:
    return make_workload(WorkloadChoice(workload="chat", requests=num, rate=1.0))


def lines(num: int, *, background: bool) -> list[Job]:
    made = make_workload(WorkloadChoice(input_tokens="300~0.5", output_tokens="150~0.5", requests=num, seed=1))
    return [replace(one, background=background, arrival_ns=0) for one in made.jobs]


def run(rate: float, num_chats: int, settings: Simulation, *, has_job: bool) -> dict[str, float]:
    jobs = [replace(one, arrival_ns=int(one.arrival_ns / rate)) for one in chats(num_chats).jobs]
    until_ns = jobs[-1].arrival_ns
    jobs += lines(NUM_LINES, background=True) if has_job else []
    outcome = settings.run(Workload(name="chats", jobs=jobs), pace=Pace(background=NUM_LINES_WAITING))
    return figures(outcome, jobs, until_ns)


def figures(outcome: Outcome, jobs: list[Job], until_ns: int) -> dict[str, float]:
    people = [one for one in outcome.records if not jobs[one.index].background]
    of_job = [one for one in outcome.records if jobs[one.index].background]
    times = {
        "ttft": [one.first_ns - one.intended_ns for one in people if one.first_ns is not None],
        "itl": [gap for one in people for gap in one.gaps_ns],
        "answer": [one.ended_ns - one.intended_ns for one in people],
    }
    found = {f"{name}_p{at}_ms": quantile(values, at / 100) / 1e6 for name, values in times.items() for at in (50, 99)}
    found["job_tokens_per_s"] = sum(num_tokens(one, until_ns) for one in of_job) / until_ns * NS_PER_S
    found["busy"] = outcome.busy_ns / outcome.duration_ns
    return found


def quantile(values: list[int], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def num_tokens(record: Record, until_ns: int) -> int:
    """Return how many tokens of an answer came before an instant."""
    at_ns, num = record.first_ns, 0
    for gap_ns in (*record.gaps_ns, 0):
        if at_ns is None or at_ns > until_ns:
            break
        at_ns, num = at_ns + gap_ns, num + 1
    return num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", type=float, default=[0.5])
    parser.add_argument("--fill", nargs="*", type=float, default=[FILL])
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--chats", type=int, default=1500)
    asked = parser.parse_args()
    chats_per_s = simulation().capacity_per_s(chats(asked.chats))
    alone = simulation().run(Workload(name="job", jobs=lines(3000, background=False)))
    tokens_per_s = sum(one.num_output_tokens for one in alone.records) / alone.duration_ns * NS_PER_S
    print(f"{chats_per_s:.2f} chats/s at most; the job alone {tokens_per_s:.0f} tokens/s")
    rows: list[dict[str, float]] = []
    for load in asked.loads:
        ask = partial(run, load * chats_per_s, asked.chats)
        without = ask(simulation(), has_job=False)
        print(json.dumps({"load": load, "job": False} | {name: round(value, 3) for name, value in without.items()}))
        for fill in asked.fill:
            behind = ask(simulation(fill, asked.share), has_job=True)
            ratios = {name.replace("_ms", ""): behind[name] / without[name] for name in without if name.endswith("_ms")}
            rest = behind["job_tokens_per_s"] / ((1 - load) * tokens_per_s)
            row = {"load": load, "fill": fill, "busy": behind["busy"], "rest": rest} | ratios
            rows.append({name: round(value, 3) for name, value in row.items()})
            print(json.dumps({"load": load, "job": True} | {name: round(value, 3) for name, value in behind.items()}))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"benchmark": "background", "rows": rows}))


if __name__ == "__main__":
    main()
