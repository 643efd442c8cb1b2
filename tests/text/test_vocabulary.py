"""The bytes and texts of tokens: known after their first use, whoever asks, in little memory however many are used."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import pytest

from penstock.text import vocabulary
from penstock.text.tokenizer import detokenizer_factory, load_tokenizer
from penstock.text.vocabulary import MAX_TEXTS, ByteTable, Spelling, TextTable, byte_of_piece, piece_decoder

NUM_TOKENS = 40_000


@contextmanager
def hasty_threads() -> Iterator[None]:
    """Threads that start here take turns after every line of the table's."""

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != vocabulary.__file__:
            return None
        time.sleep(0)  # whoever waits for the interpreter gets it
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(cast(Any, before))


def test_a_whole_vocabulary_that_was_shown_once_takes_little_memory(byte_level_vocab) -> None:
    vocab = byte_level_vocab()
    words = [f"word{number}" for number in range(NUM_TOKENS)]
    tokens = [*vocab.tokens, *words]
    tokenizer = load_tokenizer(byte_level_vocab(tokens=tokens, token_types=[*vocab.token_types, *[1] * NUM_TOKENS]))
    first = len(vocab.tokens)
    detokenizer = detokenizer_factory(tokenizer)(())
    tracemalloc.start()
    try:
        for token_id, word in enumerate(words, first):
            assert detokenizer.push([token_id]) == word
        tokenizer.decode(range(first, len(tokens)), skip_special_tokens=False)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 20 * NUM_TOKENS + 250 * MAX_TEXTS


def test_each_token_is_looked_up_once_and_others_each_time() -> None:
    asked = []

    def look_up(token_id: int) -> bytes:
        asked.append(token_id)
        return b"x" * token_id

    table = ByteTable(look_up, 5)
    ids = [3, 0, 4, 3, 0, 4, 7, 7, -1, -1]
    assert [table[token_id] for token_id in ids] == [b"x" * token_id for token_id in ids]
    assert asked == [3, 0, 4, 7, 7, -1, -1]


def test_hidden_tokens_are_empty_and_the_rest_is_shared() -> None:
    asked = []
    table = ByteTable(lambda token_id: asked.append(token_id) or b"%d" % token_id, 5)
    hiding = table.hiding(frozenset([1, 9]))
    assert [hiding[token_id] for token_id in range(5)] == [b"0", b"", b"2", b"3", b"4"]
    assert hiding[9] == b""
    assert [table[token_id] for token_id in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert asked == [0, 2, 3, 4, 1]


def test_threads_that_meet_read_what_they_should() -> None:
    values = [b"%d," % number * (number % 7) for number in range(300)]
    table = ByteTable(values.__getitem__, len(values))
    other = table.hiding(frozenset())
    wrong: list[int] = []
    together = threading.Barrier(4)

    def read(one: ByteTable) -> None:
        together.wait()
        wrong.extend(number for number, value in enumerate(values) if one[number] != value)

    with hasty_threads():
        threads = [threading.Thread(target=read, args=(one,)) for one in (table, other, table, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert [table[number] for number in range(len(values))] == values


@pytest.mark.parametrize("rounds", [1, 3])
def test_texts_stay_right_beyond_what_is_kept(rounds: int) -> None:
    texts = TextTable(ByteTable(lambda token_id: b"\xc3" if token_id % 3 == 0 else b"%d" % token_id, 3 * MAX_TEXTS))
    for _ in range(rounds):
        for token_id in range(3 * MAX_TEXTS):
            assert texts[token_id] == (None if token_id % 3 == 0 else str(token_id))
            assert len(texts) <= MAX_TEXTS


@pytest.mark.parametrize(
    ("piece", "byte"), [("<0xAB>", 0xAB), ("<0x0a>", 0x0A), ("<0x-A>", None), ("<0x A>", None), ("<0xA>", None), ("a", None)]
)
def test_only_two_hexadecimal_digits_are_a_byte(piece: str, byte: int | None) -> None:
    assert byte_of_piece(piece) == byte
    assert piece_decoder(Spelling.SENTENCEPIECE)(piece) == (piece.encode() if byte is None else bytes([byte]))
