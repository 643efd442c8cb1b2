"""What does it cost that answers follow a grammar? The same prompts with a grammar and without, in turn, in one process.

    python benchmarks/structured.py
    python benchmarks/structured.py --repeat 7 --max-tokens 128

N streams run at a time, and each asks for its next greedy answer of `--max-tokens` when it has one, without HTTP. No
grammar is complete before that, so all answers are equally long. The table has tokens per second with the grammar over those
without, of neighbouring runs: the median and the range. Needs the default model in the cache (`penstock pull`). The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping

from peaks import context, usable_threads
from printed import origin, table

from penstock.inprocess import SamplingParams, StructuredOutputsParams
from penstock.llm import LLM
from penstock.models.catalog import DEFAULT_MODEL

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "role", "tags"],
    "additionalProperties": False,
}
GRAMMARS: Mapping[str, StructuredOutputsParams] = {
    "people": StructuredOutputsParams(json={"type": "array", "minItems": 200, "items": PERSON}),
    "json": StructuredOutputsParams(json={"type": "array", "minItems": 500}),
    "text": StructuredOutputsParams(regex=r"(.|\n){4000,}"),
}
TOPICS = ("users of a shop", "members of a choir", "authors of a paper", "players of a team", "guests of a hotel", "pupils")


ANSWERS_OF_A_STREAM = 4


def tokens_per_s(llm: LLM, num_streams: int, max_tokens: int, grammar: StructuredOutputsParams | None) -> float:
    """The model computes for so many requests at once."""
    num_answers = num_streams * ANSWERS_OF_A_STREAM
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=grammar is None, structured_outputs=grammar)
    prompts = [f"A list of {TOPICS[number % len(TOPICS)]}, number {number}, as JSON:\n" for number in range(num_answers)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == num_answers * max_tokens, "no answer may end early"
    return num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 8, 1])
    args = parser.parse_args()
    ratios: dict[str, dict[int, list[float]]] = {name: {num: [] for num in args.streams} for name in GRAMMARS}
    for num in args.streams:
        with LLM(args.model, prefix_caching=False, max_num_seqs=num) as llm:
            for grammar in (None, *GRAMMARS.values()):
                tokens_per_s(llm, num, args.max_tokens, grammar)
            for _ in range(args.repeat):
                for name, grammar in GRAMMARS.items():
                    plain = tokens_per_s(llm, num, args.max_tokens, None)
                    ratios[name][num].append(tokens_per_s(llm, num, args.max_tokens, grammar) / plain)
    rows = [
        (name, *(f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" for found in per_num.values()))
        for name, per_num in ratios.items()
    ]
    print(origin(args.model, f"{usable_threads()} threads"))
    print(table(("grammar", *args.streams), rows))
    print(json.dumps({"benchmark": "structured", "model": args.model, "ratios": ratios, **context(usable_threads(), "")}))


if __name__ == "__main__":
    main()
