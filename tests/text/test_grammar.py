"""Masks of small vocabularies against brute force."""

import pytest

from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import GrammarFailure, Rejected, RejectReason


@pytest.fixture
def tokenizer(byte_level_vocab):
    return load_tokenizer(byte_level_vocab(), eos_token_ids=())


@pytest.fixture
def grammars(tokenizer):
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size + 40)


def allowed_ids(matcher):
    mask = matcher.mask()
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def test_regex_allows_what_continues_it(grammars, tokenizer):
    matcher = grammars.matcher(Grammar(GrammarKind.REGEX, "the|that"))
    assert {tokenizer.token_text(token_id) for token_id in allowed_ids(matcher)} == {"t", "th", "the"}


def test_forbidden_token_is_a_failure(grammars, tokenizer):
    matcher = grammars.matcher(Grammar(GrammarKind.REGEX, "the|that"))
    with pytest.raises(GrammarFailure):
        matcher.accept(tokenizer.encode("x", add_special_tokens=False))


def test_unsupported_keyword_is_refused(grammars):
    with pytest.raises(Rejected, match="not") as caught:
        grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}'))
    assert caught.value.reason is RejectReason.INVALID


@pytest.mark.parametrize("num_more", range(33))
def test_mask_is_a_whole_number_of_words(tokenizer, num_more):
    vocab_size = tokenizer.vocab_size + num_more
    matcher = Grammars(tokenizer, vocab_size=vocab_size).matcher(Grammar(GrammarKind.REGEX, "a"))
    assert len(matcher.mask()) == (vocab_size + 31) // 32 * 4
