"""Follows a grammar through one answer: implements `types.sampling.Matcher` with llguidance.

llguidance gets the model's vocabulary with the first grammar. Special and unused tokens have no bytes there, so no grammar can
allow them. Forced text is tokenised as the model's tokenizer does it, except for an end that a longer token could still extend.
Nothing is logged: grammars and answers are private.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from penstock.text.dialects import SPELLED_PARTS
from penstock.text.grammar_source import failure, refusal
from penstock.types.errors import GrammarFailure, wrong

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from penstock.text.tokenizer import Tokenizer


_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
PIECES = (r"[\x20\x0A\x0D\x09]+", *[_IN_STRINGS + most for most in ("{1,10}", "{1,15}", "{1,30}", "+")], "[A-Za-z0-9]{1,10}")
"""Regexes of tokens that a mask handles as one set: white space, contents of JSON strings, and words.

A string with a `maxLength` uses the longest piece that fits. In a string of 20 characters a mask takes 14 us, and 150 us
without the piece of 15; in an e-mail address 16 us, and 100 us without the words (`python benchmarks/grammar_masks.py
--pieces`, one core of an AMD EPYC, 2026-11-23).
"""
MAX_CUTS = 4096
"""Most forced texts cached with their tokens, for all grammars together."""
MAX_CUT_BYTES = 64
"""Longer texts are not cached."""
READ_TOKENS_PER_MASK = 256
"""A text is read with a mask after so many tokens: only masks notice that a grammar grows too large, and later ones take
seconds."""


class GrammarTokens:
    """The model's vocabulary for grammars: its tokens in llguidance's form, and masks of tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.end_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._all = np.packbits(np.arange((vocab_size + 31) // 32 * 32) < vocab_size, bitorder="little")
        self._across: dict[str, Mapping[str, list[tuple[int, list[int]]]]] = {}
        self._ready: tuple[LLTokenizer, NDArray[np.uint8]] | None = None

    def ready(self) -> tuple[LLTokenizer, NDArray[np.uint8]]:
        """Return llguidance's vocabulary, and the mask of all tokens that an answer may have: [ceil(vocab / 32) * 4].

        Raises `Rejected` if the model has no end token.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._build()
            return self._ready

    def _build(self) -> tuple[LLTokenizer, NDArray[np.uint8]]:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self.end_ids:
            raise wrong(
                "This model has no end token, so an answer that follows a grammar could not end. Ask without one.",
            )
        tokens = [self._bytes_of(token_id) for token_id in range(self._vocab_size)]
        usable = np.zeros((self._vocab_size + 31) // 32 * 32, np.bool_)
        usable[: self._vocab_size] = [bool(token) for token in tokens]
        usable[list(self.end_ids)] = True
        cutter = _Vocabulary(tokens, self.end_id, self._tokenizer, WeakMethod(self.cut_greedily))
        vocabulary = LLTokenizer(TokenizerWrapper(cutter), eos_token=list(self.end_ids), slices=list(PIECES))
        return vocabulary, np.packbits(usable, bitorder="little")

    def cut_greedily(self, text: str) -> list[int]:
        """Tokenise a text as llguidance does, each time taking the longest token."""
        return [] if self._ready is None else self._ready[0].greedy_tokenize(text)

    @property
    def end_id(self) -> int:
        """Id of the token that ends a complete answer."""
        return self.end_ids[0]

    def spell(self, text: str) -> str:
        """Return Lark for a text: quoted strings, and special tokens by their ids, such as `<[151657]>`."""
        parts = [part for part in re.split(SPELLED_PARTS, text) if part]
        ids = [self._special_id(part) for part in parts]
        return " ".join(
            json.dumps(part) if token_id is None else f"<[{token_id}]>" for part, token_id in zip(parts, ids, strict=True)
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another. Names of special tokens become those tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False, is_continuation=True)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return ordinary tokens with these bytes, which may end within a character. Call `ready` first."""
        assert self._ready is not None
        ids: list[int] = self._ready[0].tokenize_bytes(data)
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token. A special token spells its name."""
        return self._tokenizer.token_bytes(token_id)

    def only(self, token_id: int) -> bytes:
        """Return the mask that allows one token."""
        mask = bytearray((self._vocab_size + 31) // 32 * 4)
        mask[token_id // 8] = 1 << token_id % 8
        return bytes(mask)

    def across(self, mark: str) -> Mapping[str, list[tuple[int, list[int]]]]:
        """Return the tokens that are longer than an end of the mark and begin with it: "k>A" for the end "k>" of "<think>".

        Each is its id, and the ids of tokens that spell the text after the mark.
        """
        with self._lock:
            if mark not in self._across:
                rests = [mark[at:] for at in range(1, len(mark))]
                by_rest: dict[str, list[tuple[int, list[int]]]] = {}
                ends = tuple(rest.encode() for rest in rests)
                for token_id in range(min(self._vocab_size, self._tokenizer.vocab_size)):
                    data = self.bytes_of(token_id)
                    if data.startswith(ends):
                        for rest, end in zip(rests, ends, strict=True):
                            if data.startswith(end) and len(data) > len(end):
                                by_rest.setdefault(rest, []).append((token_id, self.encode_bytes(data[len(end) :])))
                self._across[mark] = by_rest
            return self._across[mark]

    def any_but(self, barred: Sequence[bytes], *, may_end: bool) -> bytes:
        """Return the mask of all tokens, except those in the masks `barred` and, unless `may_end`, the end tokens."""
        mask = self._all.copy()
        for bar in barred:
            mask &= ~np.frombuffer(bar, np.uint8)
        if not may_end:
            for token_id in self.end_ids:
                mask[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return mask.tobytes()

    def _special_id(self, text: str) -> int | None:
        if not SPELLED_PARTS.fullmatch(text):
            return None
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        is_one = len(token_ids) == 1 and self._tokenizer.is_special(token_ids[0]) and token_ids[0] < self._vocab_size
        return token_ids[0] if is_one else None

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id >= self._tokenizer.vocab_size or self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


class _Vocabulary:
    """The tokenizer with the interface that llguidance expects."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_token_id: int,
        tokenizer: Tokenizer,
        cut_greedily: WeakMethod[Callable[[str], list[int]]],
    ) -> None:
        """`cut_greedily` handles texts that the tokenizer can't spell. It is a weak reference because llguidance keeps this
        object, and the garbage collector can't see cycles through Rust."""
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer
        self._cut_greedily = cut_greedily
        self._cuts: dict[bytes, list[int]] = {}
        """Tokens of short texts: names of fields are forced again and again."""

    def __call__(self, data: bytes) -> list[int]:
        """Tokenise a text that continues another. Names of special tokens count as ordinary text."""
        if (token_ids := self._cuts.get(data)) is None:
            token_ids = self._cut(data)
            if token_ids and len(data) <= MAX_CUT_BYTES:
                if len(self._cuts) >= MAX_CUTS:
                    self._cuts.clear()
                self._cuts[data] = token_ids
        return token_ids

    def _cut(self, data: bytes) -> list[int]:
        text = data.decode()
        token_ids = self._tokenizer.encode(text, add_special_tokens=False, is_continuation=True)
        spelled = [self.tokens[token_id] if token_id < len(self.tokens) else b"" for token_id in token_ids]
        if b"".join(spelled) == data:
            return token_ids
        cut_greedily = self._cut_greedily()
        return [] if cut_greedily is None else cut_greedily(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one grammar, in llguidance's units. Most grammars of `benchmarks/grammar_cases.json` need a tenth of them.

    25,000 lexer states take 10 to 45 MB, and 50,000 fuel up to 13 ms. An object of 500 optional fields needs the full
    `max_items_in_row` and `step_max_items`.
    """

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 50_000
    max_lexer_states: int = 25_000
    max_grammar_size: int = 100_000
    max_items_in_row: int = 2_000
    step_max_items: int = 100_000


JSON_LIMITS = Limits()
LARK_LIMITS = replace(JSON_LIMITS, max_items_in_row=300, step_max_items=20_000)
"""Ambiguous rules cost the square of the items in a row: a mask takes up to 20 ms, and 220 ms with llguidance's defaults. The
function calls of `benchmarks/grammar_cases.json` need 8,000 to 12,000 items in a step, with a vocabulary of 152,000 tokens."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A text after which a grammar begins, such as `<tool_call>`."""

    text: str
    before: str = ""
    """Text that the grammar has before the mark."""


class CompiledGrammar:
    """A compiled grammar, which makes a matcher for each answer. `matcher` is thread-safe."""

    def __init__(self, start: LLMatcher, usable: NDArray[np.uint8], tokens: GrammarTokens) -> None:
        self._start = start
        self._starting = threading.Lock()
        """Held while a thread uses `_start`: llguidance raises RuntimeError if two do."""
        self._first_mask: bytes | None = None
        self._usable = usable
        self._nothing = bytes(len(usable))
        self.tokens = tokens
        self.num_answers = 0
        self.has_failed = False
        self.max_extra_states = 0
        """`Grammar.max_extra_states` of its source."""
        self._bars: dict[tuple[str, str], bytes] = {}

    @property
    def first_mask(self) -> bytes:
        """The mask of tokens that can begin an answer. Raises `GrammarFailure` if there are none."""
        with self._starting:
            if self._first_mask is None:
                self._first_mask = self.mask_of(self._start)
            return self._first_mask

    def bar(self, mark: Mark, tokens: GrammarTokens) -> None:
        """Find, for `barred`, the tokens that complete a mark and add text that the grammar forbids."""
        begun = self._start.deep_copy()
        begun.consume_tokens(tokens.encode(mark.before + mark.text))
        for rest, longer in tokens.across(mark.text).items():
            barred = [token_id for token_id, behind in longer if begun.validate_tokens(behind) < len(behind)]
            if barred:
                self._bars[mark.text, rest] = _with_ids(np.zeros_like(self._usable), barred).tobytes()

    def barred(self, mark: str, rest: str) -> bytes | None:
        """Return the mask of the tokens that `bar` found for a mark that lacks only its end `rest`, or None."""
        return self._bars.get((mark, rest))

    def matcher(self) -> GrammarMatcher:
        with self._starting:
            self.num_answers += 1
            return GrammarMatcher(self._start.deep_copy(), self)

    def mask_of(self, matcher: LLMatcher) -> bytes:
        """Return the mask of tokens that may come next. Raises `GrammarFailure`."""
        words = np.empty_like(self._usable)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # as bytes it would be copied word by word
        mask = np.bitwise_and(words, self._usable, out=words).tobytes()
        if matcher.is_error():
            raise self.failure(matcher)
        if mask == self._nothing:
            raise GrammarFailure("No allowed token can continue the answer.", remedy="Leave special tokens out.")
        return mask

    def failure(self, matcher: LLMatcher) -> GrammarFailure:
        """Return why a matcher failed. From then on, no new answer uses this grammar."""
        self.has_failed = True
        return failure(matcher.get_error())


def compile_grammar(
    start: str,
    larks: Mapping[str, str],
    name: str,
    tokens: GrammarTokens,
    limits: Limits,
    marks: Sequence[Mark],
    is_free: bool,
) -> CompiledGrammar:
    """Compile Lark. `name` is the grammar's name in errors. Raises `Rejected`. Recurses as deeply as the grammar.

    `start` is the outer grammar, which refers to `larks` by name (`@main`). Empty if `larks["main"]` is the whole grammar.
    `is_free`: the grammar begins after one of the marks.
    """
    from llguidance import LLMatcher, LLParserLimits

    vocabulary, usable = tokens.ready()
    all_limits = LLParserLimits(verbose_errors=False, **asdict(limits))
    # Wrapped, since llguidance would take a Lark text that begins with a brace for this JSON.
    named = [{"name": part, "lark_grammar": lark} for part, lark in larks.items()]
    wrapped = json.dumps({"grammars": [{"lark_grammar": start}, *named] if start else [{"lark_grammar": larks["main"]}]})
    matcher = LLMatcher(vocabulary, wrapped, log_level=0, limits=all_limits)
    if matcher.is_error():
        raise refusal(name, failure(matcher.get_error()))
    named_ids = [int(token_id) for token_id in re.findall(r"<\[(\d+)\]>", "".join([start, *larks.values()]))]
    try:
        compiled = CompiledGrammar(matcher, _with_ids(usable, named_ids), tokens)
        for mark in marks:
            compiled.bar(mark, tokens)
        if not is_free:
            compiled.first_mask  # noqa: B018  # an error becomes a refusal here
        return compiled
    except GrammarFailure as error:
        raise refusal(name, error) from error


def _with_ids(mask: NDArray[np.uint8], token_ids: Sequence[int]) -> NDArray[np.uint8]:
    changed = mask.copy()
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            changed[token_id // 8] |= 1 << token_id % 8
    return changed


class GrammarMatcher:
    """Computes which tokens can come next in one answer. Not thread-safe."""

    __slots__ = ("_compiled", "_forced", "_inner", "_is_first", "_mask")

    def __init__(self, inner: LLMatcher, compiled: CompiledGrammar) -> None:
        self._is_first = True
        self._inner = inner
        self._compiled = compiled
        self._mask: bytes | None = None
        self._forced: deque[int] | None = None
        """Forced tokens still to come, or None if not computed yet. They are computed once, so that accepting some of them does
        not change the others."""

    def may_accept(self, token_ids: Sequence[int]) -> bool:
        return self._inner.validate_tokens(list(token_ids)) == len(token_ids)

    def read(self, text: str) -> None:
        """Advance by a text. Changes nothing if the grammar forbids part of it, or becomes too large to follow."""
        inner = self._inner.deep_copy()
        # Token by token: llguidance limits each of these steps, but not the time to validate many tokens at once.
        for idx, token_id in enumerate(self._compiled.tokens.encode_bytes(text.encode()), 1):
            if not inner.consume_token(token_id):
                return
            if idx % READ_TOKENS_PER_MASK == 0 and not inner.is_stopped():
                try:
                    self._compiled.mask_of(inner)
                except GrammarFailure:
                    return
        self._inner, self._mask, self._forced, self._is_first = inner, None, None, False

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by sampled tokens. After an end token, further end tokens are ignored, and others raise."""
        self._mask, self._is_first = None, False
        for token_id in token_ids:
            if not self._inner.consume_token(token_id):
                raise self._compiled.failure(self._inner)
            if self._forced and self._forced.popleft() == token_id and self._forced:
                continue
            # After the end nothing is forced: the inner matcher would force the end again and again.
            self._forced = deque() if token_id in self._compiled.tokens.end_ids else None

    def copy(self) -> GrammarMatcher:
        other = GrammarMatcher(self._inner.deep_copy(), self._compiled)
        other._is_first, other._mask = self._is_first, self._mask
        other._forced = None if self._forced is None else self._forced.copy()
        return other

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next. Empty before the first token, because answers share the first mask."""
        if self._forced is None:
            self._forced = deque(() if self._is_first else self._find_forced())
        return tuple(self._forced)

    def mask(self) -> bytes:
        if self._mask is None:
            if self._is_first:
                self._mask = self._compiled.first_mask
            elif forced := self.forced():
                self._mask = self._compiled.tokens.only(forced[0])
            else:
                self._mask = self._compiled.mask_of(self._inner)
        return self._mask

    def _find_forced(self) -> Sequence[int]:
        is_complete = self._inner.is_stopped() and not self._inner.is_error()
        return [self._compiled.tokens.end_id] if is_complete else self._inner.compute_ff_tokens()
