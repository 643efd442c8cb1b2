"""Tokenises a call's texts within limits.

A small body can name one long text 2,048 times, for example as the question of each document. So equal texts are tokenised
once, and the total number of tokens is limited. These functions may run on any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile

from penstock.calls.prompts import check_encoded, check_text_size, limit_words
from penstock.deploy.off_loop import give_way
from penstock.deploy.running import RunningModel
from penstock.serve.texts.call import Text, TextInput, TextsCall, TokenIds, Truncation
from penstock.types.encoder import TextTokens
from penstock.types.errors import Rejected, RejectReason

MAX_TOKENS = 1 << 22
"""Most tokens of a call, counting repeated texts: minutes of work for a small model, and 32 MiB as ids."""
MAX_ANSWER_BYTES = 1 << 25
"""Most bytes of numbers in one answer: 2,048 vectors of 4,096. JSON triples them."""
MAX_VECTOR_BYTES = 4 * MAX_ANSWER_BYTES
"""Most bytes of vectors for the scores of one answer, which are never JSON."""
PIECE_TEXTS = 64
"""Most texts to tokenise at once: Python's share takes half a millisecond."""
MAX_TOLD_TOKENS = 1 << 16
"""Most tokens in an answer of `/tokenize`: 4 MB of JSON."""


def parts_of(text: TextInput) -> tuple[str, ...]:
    """Return the one or two texts to tokenise. Empty for token ids."""
    if isinstance(text, str):
        return (text,)
    return () if isinstance(text, TokenIds) else text


def work_size(call: TextsCall) -> int:
    """Return the work of `tokenise` in characters: equal texts count once, plus a constant for each text."""
    different = {part for text in call.texts for part in parts_of(text)}
    num_ids = sum([len(text.token_ids) for text in call.texts if isinstance(text, TokenIds)])
    # Each text costs as much as 64 characters more.
    return sum(map(len, different)) + num_ids + 64 * len(call.texts)


def tokenise(call: TextsCall) -> list[Text]:
    """Return the tokens of all texts.

    Raises `Rejected` for a text beyond the context without truncation, for too many tokens, or if the tokenizer fails.
    """
    running, cut = call.running, call.truncation
    ids_of = _encoded(call)
    prompts = _prompts_to_keep(call)
    found: list[Text] = []
    num_tokens = 0
    for index, text in enumerate(call.texts):
        parts = [ids_of[part] for part in parts_of(text)]
        if isinstance(text, TokenIds):
            tokens = TextTokens(_kept(text.token_ids, cut), 0)
        elif cut is None:
            tokens = running.tokenizer.with_ends(parts)
        else:
            num_kept = max(
                [_num_equal(ids, parts[0]) for prompt, ids in prompts if parts_of(text)[0].startswith(prompt)], default=0
            )
            tokens = running.tokenizer.with_ends(parts, max_tokens=cut.max_tokens, truncation_side=cut.side, num_kept=num_kept)
        _check_length(tokens, parts, call, index)
        check_encoded(tokens.token_ids, running, call.name_of(index))
        num_tokens += len(tokens.token_ids)
        if num_tokens > MAX_TOKENS:
            raise _too_many(f"The texts have more than {MAX_TOKENS} tokens together, the most that one request may have")
        found.append(named(tokens))
        if index % PIECE_TEXTS == 0:
            give_way()
    _check_answer(call, num_tokens)
    return found


def named(tokens: TextTokens) -> Text:
    """Return a tokenised text, named by a hash of its tokens."""
    digest = blake2b(array("q", (tokens.second_at, *tokens.token_ids)).tobytes(), digest_size=16)
    return Text(digest.digest(), tokens)


def _encoded(call: TextsCall) -> dict[str, list[int]]:
    """Return text -> token ids, without special tokens. Raises `Rejected` for a text beyond the context without truncation."""
    running = call.running
    first_index: dict[str, int] = {}
    for index, text in enumerate(call.texts):
        for part in parts_of(text):
            if first_index.setdefault(part, index) == index:
                check_text_size(part, running, _name_of_part(call, index, part))
    found: dict[str, list[int]] = {}
    for piece in pieces_of(first_index):
        for part, ids in zip(piece, running.tokenizer.encode_batch(piece, add_special_tokens=False), strict=True):
            if call.truncation is None and len(ids) > running.model.capacity.max_model_len:
                name = _name_of_part(call, first_index[part], part)
                raise _too_long(f"'{name}' has", name, len(running.tokenizer.with_ends([ids]).token_ids), running)
            found[part] = ids
        give_way()
    return found


def _prompts_to_keep(call: TextsCall) -> list[tuple[str, list[int]]]:
    """Return the model's prompts and their tokens, if the left side of texts is cut. In a text, the last tokens may differ."""
    encoder = call.running.model.encoder
    if encoder is None or call.truncation is None or call.truncation.side == "right":
        return []
    prompts = [prompt for prompt in encoder.prompts.values() if prompt]
    return list(zip(prompts, call.running.tokenizer.encode_batch(prompts, add_special_tokens=False), strict=True))


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def pieces_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield batches of texts for the tokenizer: several short texts, or one long text."""
    piece: list[str] = []
    num_chars = 0
    for text in texts:
        # The tokenizer needs some 300 bytes of memory for each character until it is done.
        if piece and (len(piece) == PIECE_TEXTS or num_chars + len(text) > 1 << 16):
            yield piece
            piece, num_chars = [], 0
        piece.append(text)
        num_chars += len(text)
    if piece:
        yield piece


def _name_of_part(call: TextsCall, index: int, part: str) -> str:
    if call.first_name_of is not None and part == parts_of(call.texts[index])[0]:
        return call.first_name_of(index)
    return call.name_of(index)


def _check_length(tokens: TextTokens, parts: Sequence[Sequence[int]], call: TextsCall, index: int) -> None:
    num_tokens, name = len(tokens.token_ids), call.name_of(index)
    if not num_tokens:
        raise Rejected(RejectReason.INVALID, f"'{name}' has no tokens.", param=name)
    if num_tokens <= call.running.model.capacity.max_model_len:
        return
    if call.first_name_of is None:
        raise _too_long(f"'{name}' has", name, num_tokens, call.running)
    first = call.first_name_of(index)
    longer = first if len(parts[0]) > len(parts[1]) else name
    raise _too_long(f"'{first}' and '{name}' together have", longer, num_tokens, call.running)


def _too_long(subject: str, param: str, num_tokens: int, running: RunningModel) -> Rejected:
    limit = limit_words(running.name, running.model.capacity.max_model_len)
    return Rejected(
        RejectReason.CONTEXT_LENGTH,
        f"{limit}, special tokens included; {subject} {num_tokens} tokens. Shorten it, divide it, or ask for truncation.",
        param=param,
    )


def _check_answer(call: TextsCall, num_tokens: int) -> None:
    encoder = call.running.model.encoder
    assert encoder is not None, "only encoders compute texts"
    num_rows = num_tokens if encoder.is_per_token else len(call.texts)
    num_bytes = 4 * encoder.width * num_rows
    limit, needs = (MAX_ANSWER_BYTES, "answer would have") if call.has_vectors else (MAX_VECTOR_BYTES, "scores would need")
    if num_bytes > limit:
        raise _too_many(
            f"The {needs} {num_rows} rows of {encoder.width} numbers, {num_bytes} bytes, and one request may have {limit}"
        )


def _too_many(cause: str) -> Rejected:
    return Rejected(RejectReason.INVALID, f"{cause}. Send the texts in several requests.")


def _kept(token_ids: tuple[int, ...], cut: Truncation | None) -> tuple[int, ...]:
    if cut is None:
        return token_ids
    return token_ids[: cut.max_tokens] if cut.side == "right" else token_ids[-cut.max_tokens :]
