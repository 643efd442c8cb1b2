"""How long can one mask take at worst, and how long compiling? Grammars made to be slow, followed by tokens drawn at random.

    python benchmarks/grammar_worst.py
    python benchmarks/grammar_worst.py --model ./Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf

Each is followed again and again, until it becomes too large or its answer has `--tokens` tokens, for `--seconds`. Masks and
tokens delay a step: their CPU time is reported. Compiling delays a request: its wall time is reported. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field

import numpy as np
from peaks import context

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.gguf import load_gguf
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.types.errors import GrammarFailure, Rejected
from penstock.types.sampling import Matcher

LARK, REGEX, SCHEMA = GrammarKind.LARK, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA


def either(parts: list[str]) -> str:
    return f"start: ({' | '.join(parts)})*\n"


def listed(options: list[dict[str, object]]) -> str:
    return json.dumps({"type": "array", "items": {"anyOf": options}})


CASES = {
    "two readings": (LARK, 'start: s\ns: s s | "a" | "b" | "c"'),
    "three readings": (LARK, 'start: s\ns: s s s | s s | "a" | "b"'),
    "empty readings": (LARK, 'start: s\ns: s s t | t\nt: "a"? "b"? "c"? "d"?'),
    "right recursion": (LARK, 'start: W start | "."\nW: /[a-z]+ /'),
    "chain of terminals": (LARK, "start: T699\nT0: /a/\n" + "".join(f'T{nth}: T{nth - 1} "b"?\n' for nth in range(1, 700))),
    "terminals that overlap": (
        LARK,
        either([f"A{nth}" for nth in range(150)])
        + "".join(f"A{nth}: /\\p{{L}}{{{nth % 7 + 1}}}[0-9]{{0,{nth % 11}}}.{{{nth % 5}}}/\n" for nth in range(150)),
    ),
    "far behind anything": (REGEX, ".*a.{30}b"),
    "all letters": (REGEX, r"\p{L}{1,1000}"),
    "all words": (REGEX, r"(\w{1,50} ){1,200}"),
    "optional fields": (
        SCHEMA,
        json.dumps({"properties": {f"f{nth}": {"type": "string"} for nth in range(480)}, "type": "object"}),
    ),
    "lengths": (
        SCHEMA,
        json.dumps({"properties": {f"p{nth}": {"minLength": nth, "maxLength": 1000 + nth} for nth in range(1350)}}),
    ),
    "enum": (SCHEMA, json.dumps({"enum": [{"name": f"n{nth}"} for nth in range(2600)]})),
    "numbers": (SCHEMA, listed([{"type": "number", "minimum": nth * 1.37, "maximum": nth * 1e4 + 7} for nth in range(400)])),
    "patterns": (SCHEMA, listed([{"type": "string", "pattern": f"^.*{chr(97 + nth)}.{{{nth + 5}}}$"} for nth in range(26)])),
}


@dataclass(slots=True)
class Times:
    """Nanoseconds."""

    compiling: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_too_large: int = 0

    def summary(self) -> dict[str, float]:
        """Milliseconds: of compiling and of the masks, the median and the worst."""
        masks = sorted(self.masks) or [0]
        return {
            "compiling_ms": round(max(self.compiling) / 1e6, 1),
            "mask_median_ms": round(masks[len(masks) // 2] / 1e6, 3),
            "mask_worst_ms": round(masks[-1] / 1e6, 2),
            "token_worst_ms": round(max(self.tokens, default=0) / 1e6, 2),
            "masks": len(self.masks),
            "too_large": self.num_too_large,
        }


class Walk:
    """Answers of one grammar, by chance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._random = random.Random(1)

    def follow(self, matcher: Matcher, times: Times) -> None:
        """Every other token is the longest of four, so that answers get long in characters, too."""
        for nth in range(self._max_tokens):
            begin_ns = time.thread_time_ns()
            mask = matcher.mask()
            times.masks.append(time.thread_time_ns() - begin_ns)
            assert mask is not None, "the answer follows its grammar from the beginning"
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocab_size]
            allowed = [int(token_id) for token_id in bits.nonzero()[0]]
            drawn = [one for one in self._random.choices(allowed, k=4) if one not in self._tokenizer.eos_token_ids]
            if not drawn:
                return
            token_id = drawn[0] if nth % 2 else max(drawn, key=lambda one: len(self._tokenizer.token_bytes(one)))
            begin_ns = time.thread_time_ns()
            matcher.accept((token_id,))
            times.tokens.append(time.thread_time_ns() - begin_ns)


def measure(grammar: Grammar, walk: Walk, tokenizer: Tokenizer, vocab_size: int, seconds: float) -> Times:
    grammars, times = Grammars(tokenizer, vocab_size=vocab_size), Times()
    grammars.matcher(Grammar(REGEX, "a"))  # reads the vocabulary
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        begin_ns = time.perf_counter_ns()
        try:
            matcher = grammars.matcher(grammar)
        except Rejected:
            times.num_too_large += 1
            times.compiling.append(time.perf_counter_ns() - begin_ns)
            break
        times.compiling.append(time.perf_counter_ns() - begin_ns)
        try:
            walk.follow(matcher, times)
        except GrammarFailure:
            times.num_too_large += 1
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=4000)
    args = parser.parse_args()
    model = load_gguf(resolve(args.model, default_cache_dir()).path)
    tokenizer = load_tokenizer(model.tokenizer_source, eos_token_ids=model.eos_token_ids)
    walk = Walk(tokenizer, model.spec.vocab_size, args.tokens)
    found = {}
    for name, (kind, source) in CASES.items():
        times = measure(Grammar(kind, source), walk, tokenizer, model.spec.vocab_size, args.seconds)
        found[name] = times.summary()
        print(f"{name:24}", ", ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
    print(json.dumps({"benchmark": "grammar_worst", **context(1, ""), "model": args.model, "cases": found}))


if __name__ == "__main__":
    main()
