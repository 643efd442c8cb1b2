"""Incremental decoding equals decoding at once, however the tokens arrive, and never shows part of a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tokenizer import detokenizer_factory, load_tokenizer


@pytest.fixture(scope="module")
def tokenizers(byte_level_vocab, sentencepiece_vocab):
    return {"byte-level": load_tokenizer(byte_level_vocab()), "sentencepiece": load_tokenizer(sentencepiece_vocab())}


KINDS = ["byte-level", "sentencepiece"]


@st.composite
def chunked_ids(draw, max_id):
    """Token ids of either kind, weighted towards single bytes, in chunks of any size."""
    token_id = st.integers(0, max_id) | st.integers(0, 260)
    return draw(st.lists(st.lists(token_id, max_size=5), max_size=12))


def run(detokenizer, chunks) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_add_up_to_the_whole_for_any_chunking(tokenizers, kind, data, skip):
    tokenizer = tokenizers[kind]
    chunks = data.draw(chunked_ids(tokenizer.vocab_size - 1))
    ids = [token_id for chunk in chunks for token_id in chunk]
    pieces = run(detokenizer_factory(tokenizer)(() if skip else None), chunks)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip, is_continuation=True)


@given(text=st.text(), chunk_size=st.integers(1, 3))
def test_valid_text_never_shows_a_broken_character(tokenizers, byte_level_vocab, text, chunk_size):
    by_byte = {tokenizers["byte-level"].token_bytes(token_id): token_id for token_id in range(4, 260)}
    ids = [by_byte[bytes([byte])] for byte in text.encode()]
    chunks = [ids[at : at + chunk_size] for at in range(0, len(ids), chunk_size)]
    pieces = run(detokenizer_factory(tokenizers["byte-level"])(()), chunks)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert pieces[-1] == ""


def test_a_character_appears_with_its_last_byte_and_not_before(tokenizers):
    tokenizer = tokenizers["sentencepiece"]
    pieces = run(detokenizer_factory(tokenizer)(()), [[3 + byte] for byte in "👍".encode()])
    assert pieces == ["", "", "", "👍", ""]


@pytest.mark.parametrize(
    ("raw", "pieces"),
    [
        (b"\xf0\x9f\x91", ["", "", "", "\ufffd"]),
        (b"\xe2\x82A", ["", "", "\ufffdA", ""]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),
    ],
)
def test_invalid_bytes_are_replaced_and_incomplete_ones_wait(tokenizers, raw, pieces):
    assert run(detokenizer_factory(tokenizers["sentencepiece"])(()), [[3 + byte] for byte in raw]) == pieces


def test_special_tokens_are_shown_or_not(tokenizers):
    make = detokenizer_factory(tokenizers["sentencepiece"])
    assert "".join(run(make(()), [[1], [2]])) == ""
    assert "".join(run(make(None), [[1], [2]])) == "<s></s>"
    assert "".join(run(make((2,)), [[1, 2], [1]])) == "</s>"


def test_a_special_token_inside_a_character_does_not_break_it_when_skipped(tokenizers):
    ids = [3 + 0xC3, 2, 3 + 0xA9]
    make = detokenizer_factory(tokenizers["sentencepiece"])
    assert "".join(run(make(()), [ids])) == "é"
    assert "".join(run(make(None), [ids])) == "\ufffd</s>\ufffd"


def test_an_output_keeps_the_space_that_separates_it_from_its_prompt(tokenizers, sentencepiece_vocab):
    token_id = sentencepiece_vocab().tokens.index("▁the")
    assert run(detokenizer_factory(tokenizers["sentencepiece"])(()), [[token_id]]) == [" the", ""]


def test_detokenizers_of_one_tokenizer_do_not_share_state(tokenizers):
    make = detokenizer_factory(tokenizers["sentencepiece"])
    one, two = make(()), make(())
    one.push([3 + 0xC3])
    assert two.push([3 + 0x41]) == "A"
    assert one.push([3 + 0xA9]) == "é"
