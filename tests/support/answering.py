"""Two small tokenizers, and answers token by token: what a matcher allows, says, and writes at random."""

from __future__ import annotations

from penstock.text.dialects import REASONING_FORMATS
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import load_tokenizer
from penstock.text.vocabulary import byte_level_alphabet
from penstock.types.vocab import GgufVocab

ALPHABET = list(byte_level_alphabet())
END_ID = 0
MARKS = [
    "<|eos|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
]
ACROSS = [">\n", '>{"', "l>", "_call>x", "<tool", '{"', "name", '":', "</", "k>\n\n", "k>{", "><"]
REASONING = {one.name: one for one in REASONING_FORMATS}


def make_tokenizer(specials=("<|eos|>",)):
    pieces = [*specials, *ALPHABET, *ACROSS]
    vocab = GgufVocab(
        model="gpt2",
        pre="gpt-2",
        tokens=pieces,
        token_types=[3] * len(specials) + [1] * len(ALPHABET) + [4] * len(ACROSS),
        merges=[],
        scores=[],
        bos_token_id=None,
        eos_token_id=END_ID,
        unknown_token_id=None,
        add_bos_token=False,
        add_eos_token=False,
        add_space_prefix=False,
    )
    return load_tokenizer(vocab)


PLAIN, SPECIAL = make_tokenizer(), make_tokenizer(tuple(MARKS))
TAGS = make_tokenizer(("<|eos|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"))
ALL = {id(tokenizer): Grammars(tokenizer, vocab_size=tokenizer.vocab_size) for tokenizer in (PLAIN, SPECIAL, TAGS)}


def allowed(matcher, tokenizer):
    mask = matcher.mask()
    ids = range(tokenizer.vocab_size)
    return set(ids) if mask is None else {token_id for token_id in ids if mask[token_id // 8] >> token_id % 8 & 1}


def say(matcher, tokenizer, text):
    """Say a text; every token is allowed."""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert token_id in allowed(matcher, tokenizer), (text, tokenizer.token_text(token_id))
        matcher.accept((token_id,))


def wander(matcher, tokenizer, random, text=""):
    """Go on with tokens at random until the end is allowed; the whole text."""
    data = text.encode()
    while END_ID not in (ids := allowed(matcher, tokenizer)):
        token_id = random.choice(sorted(ids))
        data += tokenizer.token_bytes(token_id)
        matcher.accept((token_id,))
        assert len(data) < 8000
    return data.decode(errors="replace")
