"""SentencePiece vocabularies, against the algorithm as SentencePiece runs it: join the best-scored neighbours."""

import dataclasses
import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from penstock.text.gguf_vocab import build_backend, merges_from_scores
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import ModelError
from penstock.types.vocab import GgufVocab
from support.work_time import growth


@dataclasses.dataclass
class Joined:
    symbols: list[str]
    was_ambiguous: bool
    """Two candidates had the same score but were split differently, so that their order is not given by scores."""


def join_by_score(text: str, scores: dict[str, float]) -> Joined:
    """The oracle: quadratic, no ranks, no queue."""
    symbols, was_ambiguous = list(text), False
    while True:
        pairs = [(at, symbols[at], symbols[at + 1]) for at in range(len(symbols) - 1)]
        pairs = [pair for pair in pairs if pair[1] + pair[2] in scores]
        if not pairs:
            return Joined(symbols, was_ambiguous)
        best = max(scores[left + right] for _, left, right in pairs)
        ties = [pair for pair in pairs if scores[pair[1] + pair[2]] == best]
        was_ambiguous |= len({pair[1:] for pair in ties}) > 1
        at = ties[0][0]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def oracle_ids(text: str, vocab: GgufVocab) -> list[int]:
    ids = {token: token_id for token_id, token in enumerate(vocab.tokens)}
    normal = zip(vocab.tokens, vocab.scores, vocab.token_types, strict=True)
    scores = {token: score for token, score, token_type in normal if token_type == 1}
    marked = text.replace(" ", "▁")
    if text and vocab.add_space_prefix:
        marked = "▁" + marked
    out = []
    for symbol in join_by_score(marked, scores).symbols:
        out += [ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


@pytest.fixture(scope="module")
def vocab(sentencepiece_vocab):
    return sentencepiece_vocab()


@pytest.fixture(scope="module")
def tokenizer(vocab):
    return load_tokenizer(vocab)


WORDS = st.lists(
    st.sampled_from(["the", "cat", "banana", "cabana", "tested", "   ", " ", "été", "東京都", "\n", "x", "👍", "<0x41>", "a"]),
    max_size=12,
).map("".join)


@given(text=WORDS | st.text(alphabet="abnthe s", max_size=30) | st.text(max_size=20))
def test_encoding_equals_joining_by_score(tokenizer, vocab, text):
    assume(not any(name in text for name in ("<s>", "</s>", "<unk>")))
    assert tokenizer.encode(text, add_special_tokens=False) == oracle_ids(text, vocab)


@pytest.mark.parametrize("count", range(1, 40))
def test_runs_of_spaces_whose_pieces_all_score_the_same_grow_from_the_left(tokenizer, vocab, count):
    text = " " * count + "x"
    assert tokenizer.encode(text, add_special_tokens=False) == oracle_ids(text, vocab)


@given(
    pieces=st.lists(st.text(alphabet="abc", min_size=2, max_size=5), max_size=14, unique=True),
    order=st.randoms(use_true_random=False),
    text=st.text(alphabet="abc", min_size=1, max_size=16),
)
def test_ranked_merges_equal_joining_by_score_for_any_vocabulary(pieces, order, text):
    everything = [*"abc", *pieces]
    order.shuffle(everything)
    scores = {piece: -float(rank) for rank, piece in enumerate(everything)}
    expected = join_by_score(text, scores)
    assume(not expected.was_ambiguous)
    ranks = {pair: rank for rank, pair in enumerate(merges_from_scores(scores))}
    symbols = list(text)
    while any(pair in ranks for pair in pairwise(symbols)):
        at = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), 10**9))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    assert symbols == expected.symbols


@given(text=st.text())
def test_any_text_comes_back_but_for_the_space_mark(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ") or "<" in text


def test_bos_is_added_and_the_first_space_is_taken_away_again(tokenizer):
    ids = tokenizer.encode("the cat", add_special_tokens=True)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids[1:], is_continuation=True) == " the cat"


def test_only_one_leading_space_is_taken_away(tokenizer):
    assert tokenizer.decode(tokenizer.encode("  the", add_special_tokens=True)) == "  the"


def test_a_model_without_space_prefix_keeps_its_first_space(sentencepiece_vocab):
    tokenizer = load_tokenizer(sentencepiece_vocab(add_space_prefix=False))
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the"
    assert tokenizer.decode(tokenizer.encode("the", add_special_tokens=False)) == "the"


def test_a_space_goes_before_what_follows_a_special_token(tokenizer, vocab):
    """As in llama.cpp and transformers' `legacy` tokenizers, which made the chat data of models such as TinyLlama."""
    ids = tokenizer.encode("the</s>the <s>\n", add_special_tokens=False)
    assert [vocab.tokens[token_id] for token_id in ids] == ["▁the", "</s>", "▁the", "▁", "<s>", "▁", "<0x0A>"]


def test_a_tokenizer_json_decides_itself_about_that_space(tmp_path, vocab):
    """Newer files put one in front of the whole text only."""
    encoder = build_backend(vocab).encoder
    encoder.normalizer, encoder.decoder = None, decoders.Metaspace(prepend_scheme="first")
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    path = tmp_path / "tokenizer.json"
    path.write_text(encoder.to_str(), encoding="utf-8")
    ids = load_tokenizer(path).encode("the</s>the", add_special_tokens=False)
    assert [vocab.tokens[token_id] for token_id in ids] == ["▁the", "</s>", "t", "h", "e"]


@given(text=WORDS)
def test_extra_spaces_go_if_the_file_says_so(sentencepiece_vocab, tokenizer, text):
    assume("<" not in text)
    other = load_tokenizer(sentencepiece_vocab(remove_extra_whitespaces=True))
    wanted = re.sub(" +", " ", text).removeprefix(" ").removesuffix(" ")
    assert other.encode(text, add_special_tokens=False) == tokenizer.encode(wanted, add_special_tokens=False)


def test_pieces_spell_bytes(tokenizer, vocab):
    assert tokenizer.token_bytes(3 + 0xAB) == b"\xab"
    assert tokenizer.token_text(3 + 0xAB) == "�"
    assert tokenizer.token_bytes(vocab.tokens.index("▁the")) == b" the"
    assert tokenizer.token_bytes(1) == b"<s>"


def test_a_byte_piece_s_name_in_the_text_is_only_text(tokenizer):
    ids = tokenizer.encode("<0x41>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "<0x41>"
    assert 3 + 0x41 not in ids


def test_without_byte_pieces_unknown_characters_become_the_unknown_token(vocab):
    keep = [token_id for token_id, token_type in enumerate(vocab.token_types) if token_type != 6]
    small = dataclasses.replace(
        vocab,
        tokens=[vocab.tokens[token_id] for token_id in keep],
        token_types=[vocab.token_types[token_id] for token_id in keep],
        scores=[vocab.scores[token_id] for token_id in keep],
    )
    tokenizer = load_tokenizer(small)
    ids = tokenizer.encode("a\U0001f44d\U0001f44db", add_special_tokens=False)
    assert ids.count(0) == 1
    assert tokenizer.is_special(0)


def test_a_file_s_own_merges_are_used_if_it_has_some(vocab):
    normal = zip(vocab.tokens, vocab.scores, vocab.token_types, strict=True)
    scores = {token: score for token, score, token_type in normal if token_type == 1}
    merges = [f"{left} {right}" for left, right in merges_from_scores(scores)]
    tokenizer = load_tokenizer(dataclasses.replace(vocab, merges=merges, scores=[]))
    for text in ("the banana", "    x", "東京都 été"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle_ids(text, vocab)


def test_missing_scores_are_refused(vocab):
    with pytest.raises(ModelError, match="0 scores"):
        load_tokenizer(dataclasses.replace(vocab, scores=[]))


def test_the_time_for_a_long_piece_is_linear():
    def merges(size: int) -> list[tuple[str, str]]:
        return merges_from_scores({"a": 0.0, "b": 0.0, "ab": -1.0, "ab" * size: -2.0})

    assert merges(1_000) == [("a", "b")]
    assert growth(merges, 12_500) < 8
