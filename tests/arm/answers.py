"""Greedy answers of the default model, to compare two processors token for token (run.sh answers).

    python tests/arm/answers.py record FILE --kernels neon-i8mm [--prompts 100] [--tokens 16]
    python tests/arm/answers.py compare FILE OTHER

`record` writes each answer's tokens, and the log-probabilities of both likeliest tokens at each place. `compare` exits with 1
if a token differs, and prints how near the two likeliest were there.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[1] / "golden" / "sonnet_excerpt.txt"
MODEL = "smollm2:135m"
MOST_SHOWN = 10


def prompts(count: int) -> list[str]:
    """Return the first lines of the sonnets, then pairs of neighbours."""
    lines = [line for line in TEXT.read_text().splitlines() if line.strip()]
    return [*lines, *(f"{a}\n{b}" for a, b in pairwise(lines))][:count]


def record(file: Path, kernels: str, count: int, num_tokens: int) -> None:
    from penstock import LLM, SamplingParams

    file.unlink(missing_ok=True)  # so that nothing compares an earlier run's if this one fails
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=2)
    with LLM(MODEL, kernels=kernels, max_num_seqs=4) as llm:  # emulated steps of more rows would exceed the limit of a step
        outputs = llm.generate(prompts(count), params, use_tqdm=False)
    answers = []
    for output in outputs:
        answer = output.outputs[0]
        both = [sorted((one.logprob for one in place.values()), reverse=True) for place in answer.logprobs or []]
        answers.append({"prompt": output.prompt, "tokens": list(answer.token_ids), "logprobs": both})
    file.write_text(json.dumps({"kernels": kernels, "answers": answers}))


def differences(found: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Describe the first token in which each pair of answers differs."""
    told = []
    for mine, other in zip(found, others, strict=True):
        pairs = list(zip(mine["tokens"], other["tokens"], strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            lead = [answer["logprobs"][place][0] - answer["logprobs"][place][1] for answer in (mine, other)]
            told.append(f"{mine['prompt']!r}: token {place} is {pairs[place]}; the leads are {lead[0]:.4f} and {lead[1]:.4f}")
        elif len(mine["tokens"]) != len(other["tokens"]):
            told.append(f"{mine['prompt']!r}: {len(mine['tokens'])} tokens and {len(other['tokens'])}")
    return told


def largest_difference(found: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return the largest difference of log-probabilities at places before which all tokens are the same."""
    most = 0.0
    for mine, other in zip(found, others, strict=True):
        for i, (a, b) in enumerate(zip(mine["logprobs"], other["logprobs"], strict=False)):
            if mine["tokens"][: i + 1] != other["tokens"][: i + 1]:
                break
            most = max(most, abs(a[0] - b[0]))
    return most


def compare(file: Path, other: Path) -> None:
    first, second = json.loads(file.read_text()), json.loads(other.read_text())
    told = differences(first["answers"], second["answers"])
    num_tokens = sum(len(answer["tokens"]) for answer in first["answers"])
    most = largest_difference(first["answers"], second["answers"])
    names = f"{first['kernels']}, {second['kernels']}"
    print(f"{names}: {len(told)} of {len(first['answers'])} answers differ, of {num_tokens} tokens.")
    print(f"Where tokens are the same, log-probabilities differ by at most {most:.3g}.")
    print(*told[:MOST_SHOWN], sep="\n")
    sys.exit(bool(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--kernels", required=True)
    recorder.add_argument("--prompts", type=int, default=100)
    recorder.add_argument("--tokens", type=int, default=16)
    comparer = commands.add_parser("compare")
    comparer.add_argument("file", type=Path)
    comparer.add_argument("other", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        record(args.file, args.kernels, args.prompts, args.tokens)
    else:
        compare(args.file, args.other)


if __name__ == "__main__":
    main()
