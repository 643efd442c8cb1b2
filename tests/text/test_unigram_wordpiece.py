"""Vocabularies of the kinds `t5` (SentencePiece unigram, with rules for replacing characters) and `bert` (WordPiece).

golden/unigram.model is SentencePiece 0.2.3's `SentencePieceTrainer.train(input=README.md and docs/architecture.md,
vocab_size=300, model_type="unigram", user_defined_symbols=["<|im_end|>"], normalization_rule_tsv=FILE)`, whose rules make
"fi" of U+FB01, "e" of U+00C9 and of e and U+0301, "..." of U+2026, and a space of U+3000 and of a newline. unigram.json is what
its `encode` makes of texts. The large vocabularies are compared by tests/parity/vocabularies.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.text.charsmap import check_charsmap
from penstock.text.gguf_vocab import build_backend, check_vocab
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tokenizer_files import read_vocab
from penstock.types.errors import ModelError
from penstock.types.vocab import GgufVocab

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "unigram.json").read_text(encoding="utf-8"))
VOCAB = read_vocab(GOLDEN / "unigram.model")


def test_a_unigram_model_encodes_as_sentencepiece_itself():
    tokenizer = load_tokenizer(VOCAB)
    assert len(CASES) > 40
    for case in CASES:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
    assert tokenizer.decode(CASES[-1]["ids"]).startswith("first et")


def test_the_rules_are_whole():
    assert VOCAB.model == "t5"
    assert check_charsmap(VOCAB.charsmap) == len("...")


@pytest.mark.parametrize(
    "data",
    [
        bytes([8, 0, 0, 0]) + b"abcdefghijk\0",
        VOCAB.charsmap[:3],
        VOCAB.charsmap[:-1],
        VOCAB.charsmap[:4] + b"\xff" * (len(VOCAB.charsmap) - 5) + b"\0",
        b"\0\0\0\0abc\0",
    ],
)
def test_damaged_rules_are_refused_before_a_text_comes(data):
    with pytest.raises(ModelError, match="precompiled_charsmap is damaged"):
        check_vocab(replace(VOCAB, charsmap=data))


@given(st.lists(st.tuples(st.integers(0, len(VOCAB.charsmap) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_rules_that_pass_the_check_never_fail_a_text(changes):
    data = bytearray(VOCAB.charsmap)
    for at, value in changes:
        data[at] = value
    try:
        tokenizer = load_tokenizer(replace(VOCAB, charsmap=bytes(data)))
    except ModelError:
        return
    for case in CASES[-4:]:
        tokenizer.encode(case["text"] + "\u0301\u00c9\ufb01\x01\x7f\U0010ffff", add_special_tokens=False)


def wordpiece(**changes):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581un", "aff", "able", "\u2581the", "\u2581,", "a", "\u2581\u4eac"]
    vocab = GgufVocab(
        model="bert",
        pre="bert-bge",
        tokens=pieces,
        token_types=[3, 3, 3, 3] + [1] * 7,
        merges=[],
        scores=[],
        bos_token_id=2,
        eos_token_id=3,
        unknown_token_id=1,
        add_bos_token=True,
        add_eos_token=True,
        add_space_prefix=False,
    )
    return replace(vocab, **changes)


def test_wordpiece_takes_the_longest_pieces_of_each_word():
    tokenizer = load_tokenizer(wordpiece())
    assert tokenizer.encode("Unaffable, th\u00e9 \u4eac", add_special_tokens=True) == [2, 4, 5, 6, 8, 7, 10, 3]
    assert tokenizer.encode("unaffablex", add_special_tokens=False) == [1]
    assert tokenizer.encode("a", add_special_tokens=False) == [1]  # it continues a word only
    assert tokenizer.encode("[SEP] the", add_special_tokens=False) == [3, 7]
    assert tokenizer.decode([2, 4, 5, 6, 7, 3]) == "unaffable the"


def test_case_and_accents_stay_if_the_file_says_so():
    tokenizer = load_tokenizer(wordpiece(lowercase=False, strip_accents=False))
    assert tokenizer.encode("The th\u00e9 the", add_special_tokens=False) == [1, 1, 7]


def test_a_tokenizer_json_of_wordpiece_spells_words(tmp_path):
    encoder = build_backend(wordpiece()).encoder
    encoder.decoder = decoders.WordPiece()
    path = tmp_path / "tokenizer.json"
    path.write_text(encoder.to_str(), encoding="utf-8")
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("Unaffable the", add_special_tokens=True)
    assert ids == [2, 4, 5, 6, 7, 3]
    assert tokenizer.decode(ids) == "unaffable the"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [7, 7, 10, 7, 7]),
        ({"do_lower_case": False}, [7, 1, 10, 7, 7]),
        ({"strip_accents": False}, [7, 7, 10, 7, 1]),
        ({"do_lower_case": False, "strip_accents": None}, [7, 1, 10, 7, 1]),
        ({"tokenize_chinese_chars": False}, [7, 7, 1, 7]),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, [7, 7, 10, 7, 7]),
    ],
)
def test_a_bert_tokenizers_case_accents_and_ideographs_are_those_of_its_configuration(tmp_path, config, ids):
    encoder = build_backend(wordpiece()).encoder
    encoder.decoder = decoders.WordPiece()
    (tmp_path / "tokenizer.json").write_text(encoder.to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30} | config))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("the The \u4eacthe th\u00e9", add_special_tokens=False) == ids


@pytest.mark.parametrize("vocab", [wordpiece(unknown_token_id=None), replace(VOCAB, unknown_token_id=None)])
def test_without_an_unknown_token_they_are_refused(vocab):
    with pytest.raises(ModelError, match="names no unknown token"):
        check_vocab(vocab)
