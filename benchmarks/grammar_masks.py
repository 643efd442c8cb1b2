"""What does it cost to follow a grammar? Time on the host, per token of an answer and per grammar; no model computes anything.

    python benchmarks/grammar_masks.py                                # the default model's vocabulary
    python benchmarks/grammar_masks.py --model ./Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf
    python benchmarks/grammar_masks.py --pieces                       # what each of `PIECES` is worth

Answers that people may ask for (`grammar_cases.json`) are cut into tokens as the model would write them, and followed: a mask,
then the token. `first` is the first answer to a grammar, `again` one to the same grammar later, when what was found on the way
is known. That is what each row with a grammar adds between two steps of the engine. Compiling a grammar includes its first
mask. `vocabulary` is the extra wait of a server's first grammar. Wall time on one thread, in microseconds, over all
rounds, each starting with nothing cached. The last line printed is one JSON object.

`--pieces` only times the second mask of strings, at their first character, with all of `PIECES` and without each: medians of
CPU time. It prints only a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from peaks import context
from printed import origin, table

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.gguf import load_gguf
from penstock.text import grammar_matcher
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.types.sampling import Matcher

ROUNDS = 3
STRINGS = {"up to 20 characters": {"type": "string", "maxLength": 20}, "e-mail address": {"type": "string", "format": "email"}}
PIECE_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar as people ask for it, with answers that follow it."""

    name: str
    grammar: Grammar
    answers: tuple[str, ...]


def read_cases() -> list[Case]:
    """Those of `grammar_cases.json`, where a grammar is JSON or another text."""
    found = json.loads(Path(__file__).with_name("grammar_cases.json").read_text(encoding="utf-8"))
    return [
        Case(
            one["name"],
            Grammar(GrammarKind(one["kind"]), json.dumps(one["json"]) if "json" in one else one["text"]),
            tuple(one["answers"]),
        )
        for one in found
    ]


class Times:
    """Nanoseconds of what was done, by name."""

    def __init__(self) -> None:
        self._ns: dict[str, list[int]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        begin_ns = time.perf_counter_ns()
        yield
        self._ns.setdefault(name, []).append(time.perf_counter_ns() - begin_ns)

    def follow(self, when: str, matcher: Matcher, token_ids: list[int]) -> None:
        for token_id in token_ids:
            with self.of(f"mask, {when}"):
                mask = matcher.mask()
            if not mask[token_id // 8] >> token_id % 8 & 1:
                raise ValueError("the answer does not follow its grammar")
            with self.of(f"accept, {when}"):
                matcher.accept((token_id,))

    def add_all(self, other: Times) -> None:
        for name, values in other._ns.items():
            self._ns.setdefault(name, []).extend(values)

    def summary(self) -> dict[str, dict[str, float]]:
        """Microseconds."""
        return {
            name: {
                "median": round(statistics.median(values) / 1e3, 1),
                "p99": round(sorted(values)[len(values) * 99 // 100] / 1e3, 1),
                "worst": round(max(values) / 1e3, 1),
                "count": len(values),
            }
            for name, values in self._ns.items()
        }


def measure_round(cases: Sequence[Case], times: dict[str, Times], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Measure every case with nothing cached."""
    grammars = Grammars(tokenizer, vocab_size=vocab_size)
    with times["all"].of("vocabulary"):
        grammars.matcher(Grammar(GrammarKind.REGEX, "a"))
    for case in cases:
        mine = times.setdefault(case.name, Times())
        for when, made in (("first", "matcher, new grammar"), ("again", "matcher, known grammar")):
            for answer in case.answers:
                with mine.of(made):
                    matcher = grammars.matcher(case.grammar)
                made = "matcher, known grammar"
                mine.follow(when, matcher, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_ids[0]])


def second_mask_us(schema: Mapping[str, object], tokenizer: Tokenizer, vocab_size: int) -> float:
    """CPU time of the mask behind the quote with which a string begins, in microseconds: the median."""
    grammars, grammar = Grammars(tokenizer, vocab_size=vocab_size), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    quote, times_ns = tokenizer.encode('"', add_special_tokens=False), []
    for _ in range(PIECE_ROUNDS):
        matcher = grammars.matcher(grammar)
        matcher.accept(quote)
        begin_ns = time.thread_time_ns()
        matcher.mask()
        times_ns.append(time.thread_time_ns() - begin_ns)
    return statistics.median(times_ns) / 1e3


def print_pieces(tokenizer: Tokenizer, vocab_size: int) -> None:
    rows = []
    for without in (None, *grammar_matcher.PIECES):
        left = tuple(piece for piece in grammar_matcher.PIECES if piece != without)
        with mock.patch.object(grammar_matcher, "PIECES", left):
            figures = [f"{second_mask_us(schema, tokenizer, vocab_size):.0f}" for schema in STRINGS.values()]
        rows.append([f"`{without}`" if without else "none", *figures])
    print(origin(f"{vocab_size} tokens", "microseconds"))
    print(table(["left out", *STRINGS], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pieces", action="store_true", help="masks of strings, without each of the pieces")
    args = parser.parse_args()
    model = load_gguf(resolve(args.model, default_cache_dir()).path)
    tokenizer = load_tokenizer(model.tokenizer_source, eos_token_ids=model.eos_token_ids)
    if args.pieces:
        print_pieces(tokenizer, model.spec.vocab_size)
        return
    times, cases = {"all": Times()}, read_cases()
    for _ in range(args.rounds):
        measure_round(cases, times, tokenizer, model.spec.vocab_size)
    for case in cases:
        times["all"].add_all(times[case.name])
    summaries = {name: times[name].summary() for name in (*(case.name for case in cases), "all")}
    for name, summary in summaries.items():
        print(name)
        for what, figures in summary.items():
            print(f"  {what:24}", ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    found = {"model": args.model, "vocab_size": model.spec.vocab_size, "us": summaries}
    print(json.dumps({"benchmark": "grammar_masks", **context(1, ""), **found}))


if __name__ == "__main__":
    main()
