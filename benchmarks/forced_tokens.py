"""What does it save to compute forced tokens at once? Steps and time of answers to a JSON schema, with the default model.

    python benchmarks/forced_tokens.py

The answers follow a schema of six fields and an object inside (`SCHEMA`) and are greedy. They are the same with and without:
where nothing is forced, the masks of these places allow one token each. Both kinds of run alternate, in pairs; `time_ratio` is
the median of their ratios, which other work on the machine changes little, and `steps_ratio` does not depend on the machine. In
process, without a prefix cache. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from peaks import context, usable_threads

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.sched.scheduler import Scheduler

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 24},
        "date_of_order": {"type": "string", "format": "date"},
        "payment_method": {"enum": ["credit card", "bank transfer", "cash on delivery"]},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street_and_number", "postal_code"],
            "additionalProperties": False,
        },
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_gift_wrapped": {"type": "boolean"},
    },
    "required": [
        "customer_name",
        "date_of_order",
        "payment_method",
        "shipping_address",
        "number_of_items",
        "is_gift_wrapped",
    ],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Run:
    """Some answers at a time."""

    seconds: float
    num_steps: int
    num_tokens: int
    answers: list[tuple[int, ...]]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The ids of the steps that are committed meanwhile."""
    step_ids: list[int] = []
    commit = Scheduler.commit

    def count(scheduler: Scheduler, plan, *args):
        step_ids.append(plan.step_id)
        return commit(scheduler, plan, *args)

    with patch.object(Scheduler, "commit", count):
        yield step_ids


def run(llm: LLM, num_answers: int, *, forces: bool) -> Run:
    asked = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=asked)
    prompts = [f"Order number {number} of a customer, as JSON:\n" for number in range(num_answers)]
    max_forced = Scheduler.max_forced if forces else lambda _scheduler, _request_id: 0
    with counted() as steps, patch.object(Scheduler, "max_forced", max_forced):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    return Run(seconds, len(steps), sum(map(len, answers)), answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    found = {}
    with LLM(args.model, prefix_caching=False) as llm:
        for num_answers in (1, 8, 32):
            run(llm, num_answers, forces=True)
            pairs = [[run(llm, num_answers, forces=forces) for forces in (True, False)] for _ in range(args.pairs)]
            assert all(one.answers == other.answers for one, other in pairs), "the answers are the same"
            ratios = [one.seconds / other.seconds for one, other in pairs]
            one, other = pairs[0]
            found[num_answers] = {
                "tokens": one.num_tokens,
                "steps": [one.num_steps, other.num_steps],
                "seconds": [statistics.median(pair[nth].seconds for pair in pairs) for nth in (0, 1)],
                "time_ratio": statistics.median(ratios),
                "time_ratios": [min(ratios), max(ratios)],
                "steps_ratio": one.num_steps / other.num_steps,
            }
            print(num_answers, found[num_answers], flush=True)
    print(json.dumps({"benchmark": "forced_tokens", "model": args.model, "answers": found, **context(usable_threads(), "")}))


if __name__ == "__main__":
    main()
