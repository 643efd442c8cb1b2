"""Turns text into token ids and back. `load_tokenizer` makes one tokenizer per model.

Encoding recognises added tokens by name (`<|im_start|>` becomes one token), as chat templates and plain prompts require. For
chats, `control_tokens` finds the names that clients wrote.

Output is decoded token by token as a continuation of its prompt, so a SentencePiece model's first space is kept: "The capital
is" + " Paris".
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from penstock.text.vocabulary import MAX_EXPANDED_BYTES, Backend, ByteTable, Ends, TextTable, find_ends, piece_decoder
from penstock.types.encoder import TextTokens, TruncationSide
from penstock.types.errors import Rejected, RejectReason, wrong
from penstock.types.vocab import MARKERS, GgufVocab, SpecialTokens

_Encoded = TypeVar("_Encoded")
_PARTS_AT_ONCE = 4096
"""Parts of a cut text that are encoded together. The library takes about 1 KB for each of them."""
_MAX_TEXT_TABLES = 8
"""Most sets of shown special tokens with a cached `TextTable`, each of up to half a megabyte."""


def load_tokenizer(
    source: Path | GgufVocab,
    *,
    bos_token_id: int | None = None,
    eos_token_ids: Sequence[int] = (),
    special_tokens: SpecialTokens = MappingProxyType({}),
) -> Tokenizer:
    """Load a tokenizer.json, a tokenizer.model, a tekken.json or a GGUF file's vocabulary. Raises `ModelError`.

    `bos_token_id`, `eos_token_ids` and `special_tokens` supply what a tokenizer.json lacks.
    """
    if isinstance(source, GgufVocab) or source.suffix == ".model" or source.name == "tekken.json":
        from penstock.text.gguf_vocab import build_backend

        if isinstance(source, Path):
            from penstock.text.tokenizer_files import read_vocab

            source = read_vocab(source)
        backend = build_backend(source)
    else:
        from penstock.text.tokenizer_json import load_backend

        end = special_tokens.get("eos_token")
        backend = load_backend(
            source,
            bos_token_id=bos_token_id,
            eos_token=end if isinstance(end, str) else None,
            markers=special_tokens.get(MARKERS) or (),
        )
    return Tokenizer(backend, extra_eos_token_ids=eos_token_ids, special_tokens=special_tokens)


class Tokenizer:
    """Encodes and decodes text for one model. Thread-safe. Long texts are encoded without the GIL."""

    def __init__(
        self,
        backend: Backend,
        *,
        extra_eos_token_ids: Sequence[int] = (),
        special_tokens: SpecialTokens = MappingProxyType({}),
    ) -> None:
        self._backend = backend
        self._named_tokens = special_tokens
        self._bytes_of = partial(
            _bytes_of, backend, piece_decoder(backend.spelling)
        )  # not a method, so that tables do not refer to their owner
        self._special_ids = backend.special_ids.union(extra_eos_token_ids)
        self.eos_token_ids = tuple(dict.fromkeys((*backend.eos_token_ids, *extra_eos_token_ids)))
        """Tokens that end a text, the tokenizer's own one first."""
        self.bytes_with_special = ByteTable(self._bytes_of, backend.vocab_size)
        """Token id -> its bytes; special tokens spell their name."""
        self.bytes_without_special = self.bytes_with_special.hiding(self._special_ids)
        """Token id -> its bytes; special tokens are empty."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer. The model may have more logits."""
        return self._backend.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.bos_token_id

    @cached_property
    def special_tokens(self) -> dict[str, str | tuple[str, ...]]:
        """Variables of chat templates, such as `bos_token`, with the text of the token: those of the model's files, and bos,
        eos, unk and pad by their ids.
        """
        ids = {
            "bos_token": self._backend.bos_token_id,
            "eos_token": self.eos_token_ids[0] if self.eos_token_ids else None,
            "unk_token": self._backend.unknown_token_id,
            "pad_token": self._backend.padding_token_id,
        }
        texts: dict[str, str | tuple[str, ...] | None] = {
            name: self._backend.piece(token_id) or "" for name, token_id in ids.items() if token_id is not None
        }
        return {name: text for name, text in (texts | dict(self._named_tokens)).items() if text is not None}

    @cached_property
    def _special_by_name(self) -> dict[str, int]:
        return {self.token_text(token_id): token_id for token_id in sorted(self._special_ids)}

    @cached_property
    def added_names(self) -> dict[str, bool]:
        """Name of each added or special token -> whether it is special."""
        names = {token.content: token.special for token in self._backend.encoder.get_added_tokens_decoder().values()}
        return names | dict.fromkeys(self._special_by_name, True)

    @cached_property
    def normalized(self) -> dict[int, str]:
        """Id -> name of added tokens that are recognised in the normalised text, so that other characters may spell them."""
        added = self._backend.encoder.get_added_tokens_decoder().items()
        has_normalizer = self._backend.encoder.normalizer is not None
        return {token_id: token.content for token_id, token in added if has_normalizer and token.normalized}

    def find_normalized(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield begin, end and name of the `normalized` tokens in a text."""
        self._check_size(_num_bytes(text))
        encode = self._backend.encoder.encode_batch  # `encode` would keep the GIL
        [encoding] = _unless_it_fails(lambda: encode([text], add_special_tokens=False))
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.normalized:
                stripped = text[start:end].lstrip()  # some tokens take the white space around them
                yield end - len(stripped), end - len(stripped) + len(stripped.rstrip()), self.normalized[token_id]

    def encode(
        self, text: str, *, add_special_tokens: bool, is_continuation: bool = False, cuts: Sequence[int] = ()
    ) -> list[int]:
        """Return token ids. `add_special_tokens` adds bos and eos if the model wants them: right for plain prompts, wrong for
        the output of a chat template. `is_continuation`: the text follows another, so no space is put before it. `cuts`:
        places between two characters that no token crosses, in ascending order.

        Bytes that the vocabulary can't spell are dropped, as in transformers (SmolLM2 has none for U+0004). Raises `Rejected`
        if the text has a lone surrogate, could become too long, or makes the tokenizer fail.
        """
        if cuts:
            self._check_size(_num_bytes(text))
            first, *others = [text[begin:end] for begin, end in pairwise((0, *cuts, len(text)))]
            token_ids = self.encode(first, add_special_tokens=False)
            for begin in range(0, len(others), _PARTS_AT_ONCE):
                some = others[begin : begin + _PARTS_AT_ONCE]
                different = list(dict.fromkeys(some))
                found = dict(zip(different, self._encode_continuations(different), strict=True))
                token_ids += chain.from_iterable([found[part] for part in some])
            return list(self.with_ends([token_ids]).token_ids) if add_special_tokens else token_ids
        if is_continuation:
            return self._encode_continuations([text], add_special_tokens)[0]
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _encode_continuations(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        if not self._backend.starts_with_space:
            return self.encode_batch(texts, add_special_tokens=add_special_tokens)
        lists = self.encode_batch([f"\n{text}" for text in texts], add_special_tokens=add_special_tokens)
        return [self._after_line(token_ids) for token_ids in lists]

    def _after_line(self, token_ids: list[int]) -> list[int]:
        before = b""
        for num_before, token_id in enumerate(token_ids, 1):
            before += self.token_bytes(token_id)
            if before.endswith(b"\n"):
                return token_ids[num_before:]
        return token_ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Like `encode`, for several texts on several cores."""
        for text in texts:
            self._check_size(_num_bytes(text))
        # Only the batch call releases the GIL, and the fast one leaves out offsets, which nobody needs here.
        encode = self._backend.encoder.encode_batch_fast
        return [one.ids for one in _unless_it_fails(lambda: encode(list(texts), add_special_tokens=add_special_tokens))]

    def encode_texts(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        max_tokens: int | None = None,
        truncation_side: TruncationSide = "right",
    ) -> list[TextTokens]:
        """Return the tokens of texts, and of pairs of texts, to embed or score, including special tokens.

        Texts beyond `max_tokens` lose tokens at one side. In a pair, the longer text loses tokens first. Raises `Rejected` as
        `encode` does, if special tokens leave no room, and if the tokenizer does not support pairs.
        """
        lists = [(one,) if isinstance(one, str) else one for one in texts]
        different = list(dict.fromkeys([text for parts in lists for text in parts]))
        found = dict(zip(different, self.encode_batch(different, add_special_tokens=False), strict=True))
        return [
            self.with_ends([found[text] for text in parts], max_tokens=max_tokens, truncation_side=truncation_side)
            for parts in lists
        ]

    def with_ends(
        self,
        parts: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        truncation_side: TruncationSide = "right",
        num_kept: int = 0,
    ) -> TextTokens:
        """Like `encode_texts`, for one text (or a pair) that is already token ids, without special tokens.

        A cut of the left side keeps up to `num_kept` tokens at the beginning of the first text, and at least one at its end.
        """
        ends = self._ends_of_one if len(parts) == 1 else self._ends_of_pair
        if ends is None:
            raise wrong("The model's tokenizer does not define which special tokens enclose a text or a pair of texts.")
        if max_tokens is not None and sum(map(len, parts)) + ends.num_tokens > max_tokens:
            parts = _cut(parts, max_tokens, ends.num_tokens, truncation_side, num_kept)
        token_ids, second_at = [*ends.parts[0], *parts[0], *ends.parts[1]], 0
        if len(parts) == 2:
            second_at = len(token_ids) if ends.has_types else 0
            token_ids += [*parts[1], *ends.parts[2]]
        return TextTokens(tuple(token_ids), second_at)

    @cached_property
    def _ends_of_one(self) -> Ends | None:
        return _unless_it_fails(lambda: find_ends(self._backend.encoder, 1))

    @cached_property
    def _ends_of_pair(self) -> Ends | None:
        return _unless_it_fails(lambda: find_ends(self._backend.encoder, 2))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, is_continuation: bool = False) -> str:
        """Return the text of these tokens. Bytes that aren't UTF-8 become U+FFFD.

        The space that SentencePiece models put before a text is removed unless `is_continuation`.
        """
        table = self.bytes_without_special if skip_special_tokens else self.bytes_with_special
        text = b"".join([table[token_id] for token_id in token_ids]).decode("utf-8", "replace")
        if self._backend.starts_with_space and not is_continuation:
            return text.removeprefix(" ")
        return text

    def bytes_showing(self, special_ids: Sequence[int] | None) -> ByteTable:
        """Return a table in which only these special tokens spell their name, or all of them for None."""
        if special_ids is None:
            return self.bytes_with_special
        if not special_ids:
            return self.bytes_without_special
        return self.bytes_with_special.hiding(self._special_ids.difference(special_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, perhaps part of a character. Empty for an unknown id."""
        return self.bytes_with_special[token_id]

    def token_text(self, token_id: int) -> str:
        """Return one token as text; incomplete characters become U+FFFD."""
        return self.bytes_with_special[token_id].decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token, such as the end of a turn."""
        return token_id in self._special_ids

    def special_ids(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of the special tokens with these names, in ascending order. Other names are left out."""
        return tuple(sorted({self._special_by_name[name] for name in names if name in self._special_by_name}))

    def _check_size(self, num_bytes: int) -> None:
        expansion = self._backend.expansion
        if expansion is not None and expansion.factor * num_bytes + expansion.extra_bytes > MAX_EXPANDED_BYTES:
            raise Rejected(
                RejectReason.CONTEXT_LENGTH,
                f"The text has {num_bytes} bytes, and the tokenizer's normalisation can make {expansion.factor:.3g} times as "
                f"many of them; at most {MAX_EXPANDED_BYTES} are allowed. Shorten the text.",
            )


def _bytes_of(backend: Backend, decode_piece: Callable[[str], bytes], token_id: int) -> bytes:
    piece = backend.piece(token_id)
    if piece is None or token_id in backend.silent_ids:
        return b""
    return piece.encode() if token_id in backend.literal_ids else decode_piece(piece)


def _unless_it_fails(encode: Callable[[], _Encoded]) -> _Encoded:
    try:
        return encode()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's, for a regex that takes too many steps, for example
            raise
        raise wrong(f"The model's tokenizer fails on this text: {error}.") from None


def _cut(
    parts: Sequence[Sequence[int]], max_tokens: int, num_ends: int, side: TruncationSide, num_first: int
) -> list[Sequence[int]]:
    """Cut a text or pair to `max_tokens`, including `num_ends` special tokens. Raises `Rejected` if none remain."""
    room = max_tokens - num_ends
    if room < len(parts):
        raise wrong(f"At most {max_tokens} tokens are allowed, and special tokens already take {num_ends}.")
    if len(parts) == 1:
        kept = [room]
    else:
        shorter = min(len(parts[0]), len(parts[1]), room // 2)
        kept = [shorter, room - shorter] if len(parts[0]) <= len(parts[1]) else [room - shorter, shorter]
    cut = [part[:num] if side == "right" else part[-num:] for part, num in zip(parts, kept, strict=True)]
    if side == "left" and num_first:
        num_first = min(num_first, kept[0] - 1)  # never the prompt alone
        cut[0] = [*parts[0][:num_first], *cut[0][num_first:]]
    return cut


def _num_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise wrong(
            f"The text contains a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "which is half of a character and has no UTF-8 form.",
        ) from error


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns an answer's tokens into text as they arrive. Holds back at most three bytes of an incomplete character."""

    __slots__ = ("_bytes", "_decoder", "_is_within_character", "_texts")

    def __init__(self, table: ByteTable, texts: TextTable) -> None:
        self._bytes = table
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        self._is_within_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. Invalid UTF-8 becomes U+FFFD."""
        if len(token_ids) == 1 and not self._is_within_character:
            text = self._texts[token_ids[0]]
            if text is not None:  # nearly every token of nearly every text
                return text
        table, decoder = self._bytes, self._decoder
        text = decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        self._is_within_character = bool(decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD if the answer ends in an incomplete character, else an empty text."""
        self._is_within_character = False
        return self._decoder.decode(b"", True)


def detokenizer_factory(tokenizer: Tokenizer) -> Callable[[tuple[int, ...] | None], IncrementalDetokenizer]:
    """Return a function `shown_special_ids -> IncrementalDetokenizer`, called for each request."""

    @lru_cache(_MAX_TEXT_TABLES)
    def tables(shown_special_ids: tuple[int, ...] | None) -> tuple[ByteTable, TextTable]:
        table = tokenizer.bytes_showing(shown_special_ids)
        return table, TextTable(table)

    return lambda shown_special_ids: IncrementalDetokenizer(*tables(shown_special_ids))
