"""Texts and pairs as encoders read them: transformers' tokens around them, and its cuts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import ModelError, Rejected
from penstock.types.vocab import GgufVocab

GOLDEN = {one["name"]: one for one in json.loads((Path(__file__).parent / "golden" / "pairs.json").read_text(encoding="utf-8"))}


def tokenizer_of(tmp_path, name, **changes):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOLDEN[name]["tokenizer"] | changes), encoding="utf-8")
    return load_tokenizer(path)


@pytest.mark.parametrize("name", GOLDEN)
def test_texts_and_pairs_are_those_of_transformers(tmp_path, name):
    tokenizer = tokenizer_of(tmp_path, name)
    cases = GOLDEN[name]["cases"]
    assert len(cases) > 300
    for first, second, size, side, ids, second_at in cases:
        text = first if second is None else (first, second)
        [found] = tokenizer.encode_texts([text], max_tokens=size, truncation_side=side)
        assert found == (tuple(ids), second_at), (text, size, side)
        if second is None:
            whole = tokenizer.encode(first, add_special_tokens=True)
            assert tokenizer.encode_texts([text])[0] == (tuple(whole), 0)


def test_a_list_of_texts_and_pairs_keeps_its_order(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "bert")
    texts = ["a", ("the cat", "on"), "", ("", "")]
    assert tokenizer.encode_texts(texts) == [tokenizer.encode_texts([text])[0] for text in texts]
    assert tokenizer.encode_texts([]) == []


@pytest.mark.parametrize(("text", "size"), [("the", 2), (("the", "cat"), 4)])
def test_a_cut_that_leaves_nothing_of_a_text_is_refused(tmp_path, text, size):
    tokenizer = tokenizer_of(tmp_path, "bert")
    assert len(tokenizer.encode_texts([text], max_tokens=size + 1)[0].token_ids) == size + 1
    with pytest.raises(Rejected, match=f"At most {size} tokens"):
        tokenizer.encode_texts([text], max_tokens=size)


def vocabulary(**changes):
    vocab = GgufVocab(
        model="bert",
        pre="",
        tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581a", "\u2581b"],
        token_types=[3, 3, 3, 3, 1, 1],
        merges=[],
        scores=[0.0] * 6,
        bos_token_id=2,
        eos_token_id=3,
        unknown_token_id=1,
        add_bos_token=True,
        add_eos_token=True,
        add_space_prefix=False,
    )
    return replace(vocab, **changes)


def test_pairs_of_gguf_vocabularies():
    pair = [("a", "b")]
    assert load_tokenizer(vocabulary()).encode_texts(pair)[0] == ((2, 4, 3, 5, 3), 3)
    # Unigram vocabularies of encoders are XLM-RoBERTa's, which has two ends between the texts, and no types.
    unigram = vocabulary(model="t5", add_space_prefix=True)
    assert load_tokenizer(unigram).encode_texts(pair)[0].token_ids == (2, 4, 3, 3, 5, 3)


@pytest.mark.parametrize(("pre", "ids"), [("roberta-bpe", (2, 4, 3, 3, 5, 3)), ("modern-bert", (2, 4, 3, 5, 3))])
def test_pairs_of_byte_level_vocabularies(pre, ids):
    vocab = vocabulary(model="gpt2", pre=pre, tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])
    assert load_tokenizer(vocab).encode_texts([("a", "b")])[0].token_ids == ids


@pytest.mark.parametrize("pair", [["$A"], ["$B", "$A"], ["$A:1", "$B:0"]])
def test_a_pair_in_another_order_is_refused(tmp_path, pair):
    pieces = [{"Sequence": {"id": piece[1], "type_id": int(piece[3:] or 0)}} for piece in pair]
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pieces, "special_tokens": {}}
    tokenizer = tokenizer_of(tmp_path, "bert", post_processor=template)
    assert tokenizer.encode_texts(["a"])[0].second_at == 0
    with pytest.raises(Rejected, match="does not define which special tokens enclose"):
        tokenizer.encode_texts([("a", "b")])


def test_a_pair_that_repeats_its_texts_is_refused(tmp_path):
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "ABAB"]
    template = {"type": "TemplateProcessing", "single": texts[:1], "pair": texts, "special_tokens": {}}
    with pytest.raises(ModelError, match="repeats a text"):
        tokenizer_of(tmp_path, "bert", post_processor=template)
