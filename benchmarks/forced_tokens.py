"""How much do several tokens a step save where a JSON schema forces many? Steps and time of such answers.

    python benchmarks/forced_tokens.py
    python benchmarks/forced_tokens.py --model qwen2.5-coder:1.5b --rounds 3

The answers follow a schema of six fields and an object inside (`SCHEMA`) and are greedy. Three ways take turns:
one token a step; with forced tokens in the same step as the token before them; and with guesses as well. The answers
are the same: without forcing, the masks at these places allow one token each. `faster` is the median of the rounds'
ratios to one token a step. In process, without a prefix cache; each round has its own prompts, so that no guess comes from
earlier answers to the same prompt. The last line printed is one JSON object.
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

from penstock.inprocess import SamplingParams, StructuredOutputsParams
from penstock.llm import LLM
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

TOPICS = ("a bakery", "a florist", "a book shop", "a chemist", "a toy shop", "a garage")


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


def run(llm: LLM, num_answers: int, topic: str, *, forces: bool) -> Run:
    asked = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=asked)
    prompts = [f"Order number {number} of {topic}, as JSON:\n" for number in range(num_answers)]
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
    parser.add_argument("--rounds", type=int, default=len(TOPICS) - 1)
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    args = parser.parse_args()
    found = {}
    with (
        LLM(args.model, prefix_caching=False, speculation="off") as plain,
        LLM(args.model, prefix_caching=False) as guessing,
    ):
        ways = {"one": (plain, False), "forced": (plain, True), "guesses": (guessing, True)}
        for llm in (plain, guessing):
            run(llm, 8, "a customer", forces=True)
        for num_answers in args.answers:
            rounds: list[dict[str, Run]] = []
            for number in range(args.rounds):
                order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
                topic = TOPICS[number % len(TOPICS)]
                rounds.append({way: run(ways[way][0], num_answers, topic, forces=ways[way][1]) for way in order})
            differ = sum(one[way].answers != one["one"].answers for one in rounds for way in ways)
            found[num_answers] = {
                way: {
                    "steps": sum(one[way].num_steps for one in rounds),
                    "seconds": round(statistics.median(one[way].seconds for one in rounds), 3),
                    "faster": round(statistics.median(one["one"].seconds / one[way].seconds for one in rounds), 2),
                    "range": [round(bound(one["one"].seconds / one[way].seconds for one in rounds), 2) for bound in (min, max)],
                }
                for way in ways
            } | {"tokens": sum(one["one"].num_tokens for one in rounds), "differ": differ}
            print(num_answers, found[num_answers], flush=True)
    print(json.dumps({"benchmark": "forced_tokens", "model": args.model, "answers": found, **context(usable_threads(), "")}))


if __name__ == "__main__":
    main()
