"""tokenizer.model and tekken.json of directories that have no tokenizer.json.

golden/bpe.model is SentencePiece 0.2.3's `SentencePieceTrainer.train(input=README.md and docs/architecture.md, vocab_size=420,
model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
allow_whitespace_only_pieces=True, user_defined_symbols=["<|im_end|>"])`, and bpe.json what its `encode` makes of texts.
"""

import base64
import contextlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.hf_config import find_tokenizer
from penstock.text import tokenizer_files
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tokenizer_files import TEKKEN_PATTERN, read_vocab
from penstock.types.errors import ModelError

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "bpe.json").read_text(encoding="utf-8"))


def test_a_sentencepiece_file_encodes_as_its_own_library():
    tokenizer = load_tokenizer(GOLDEN / "bpe.model")
    assert len(CASES) > 40
    for case in CASES:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("a", add_special_tokens=True) == [1, *tokenizer.encode("a", add_special_tokens=False)]


def test_tokens_that_were_added_later_are_read_beside_it(tmp_path):
    shutil.copy(GOLDEN / "bpe.model", tmp_path / "tokenizer.model")
    size = read_vocab(tmp_path / "tokenizer.model")
    assert size.add_bos_token
    num_pieces = len(size.tokens)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": num_pieces}))
    config = {"add_bos_token": False, "added_tokens_decoder": {str(num_pieces + 2): {"content": "<|turn|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.vocab_size == num_pieces + 3
    assert tokenizer.encode("<|turn|><pad>", add_special_tokens=True) == [num_pieces + 2, num_pieces]
    assert tokenizer.is_special(num_pieces + 2)
    assert not tokenizer.is_special(num_pieces)
    assert tokenizer.decode([num_pieces + 1]) == ""


@pytest.mark.parametrize("changes", [{"x": 1 << 40}, {"x": -1}, {"x": "many"}, {"x": None}])
def test_added_tokens_that_are_none_are_refused(tmp_path, changes):
    shutil.copy(GOLDEN / "bpe.model", tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text(json.dumps(changes))
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path / "tokenizer.model")


@given(st.data())
def test_damaged_files_end_in_one_kind_of_error(tmp_path_factory, data):
    good = (GOLDEN / "bpe.model").read_bytes()
    cut = data.draw(st.integers(0, len(good)))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("bad") / "tokenizer.model"
    for content in (good[:cut], bytes(bad)):
        path.write_bytes(content)
        with contextlib.suppress(ModelError):
            load_tokenizer(path).encode("The scheduler\u00e9", add_special_tokens=True)


def test_a_file_of_many_fields_is_refused_at_once(tmp_path, monkeypatch):
    """A field takes two bytes and microseconds: hundreds of MiB of them would take many minutes."""
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENS", 1000)
    path = tmp_path / "tokenizer.model"
    piece = b"\x0a\x01a"
    for content, words in ((b"\x10\x01" * 1001, "1000 fields"), (field(1, piece + b"\x18\x01" * 100), "16 fields")):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            load_tokenizer(path)


def varint(number):
    data = b""
    while number > 127:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


def field(number, value):
    """A number, or bytes, as Protocol Buffers have it."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


@pytest.mark.parametrize(
    ("trainer", "normalizer", "words"),
    [
        (field(3, 4), b"", "a model of type 4"),
        (field(3, 2), field(2, b"rules"), "precompiled_charsmap"),
        (field(3, 2) + field(24, 1), b"", "treat_whitespace_as_suffix"),
    ],
)
def test_models_that_would_be_read_wrongly_are_refused(tmp_path, trainer, normalizer, words):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(field(1, field(1, b"a")) + field(2, trainer) + field(3, normalizer))
    with pytest.raises(ModelError, match=words):
        read_vocab(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x08" + b"\xff" * 10 + b"\x01", "a number in it is too long"),
        (b"\x0b", "it ends in the middle of a field"),
        (field(1, field(1, 7)), "a text in it is a number"),
        (field(1, field(1, b"a") + field(3, b"b")), "a number in it is a text"),
    ],
)
def test_fields_of_another_type_are_named(tmp_path, content, words):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_vocab(path)


def test_user_defined_runs_of_spaces_are_tokens(tmp_path):
    """Gemma's files have them."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), ("x", 1), ("▁▁", 4), ("▁▁▁▁", 4)]
    data = b"".join([field(1, field(1, text.encode()) + field(3, kind)) for text, kind in pieces])
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data + field(2, field(3, 2)) + field(3, field(3, 0) + field(4, 0)))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("    x x  x", add_special_tokens=False)
    assert ids == [6, 4, 3, 4, 5, 4]
    assert tokenizer.decode(ids) == "    x x  x"


@pytest.mark.parametrize("flags", [(1, 0), (0, 1)])
def test_runs_of_spaces_are_none_where_spaces_are_added_or_removed(tmp_path, flags):
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), ("x", 1), ("▁x", 1), ("▁▁", 4)]
    data = b"".join([field(1, field(1, text.encode()) + field(3, kind)) for text, kind in pieces])
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data + field(2, field(3, 2)) + field(3, field(3, flags[0]) + field(4, flags[1])))
    tokenizer = load_tokenizer(path)
    assert 6 not in tokenizer.encode("x  x", add_special_tokens=False)


def write_tekken(path, words, **config):
    """Words after the 256 bytes, and three special tokens of ten."""
    texts = [bytes([byte]) for byte in range(256)] + words
    path.write_text(
        json.dumps(
            {
                "config": {
                    "pattern": TEKKEN_PATTERN,
                    "default_vocab_size": 10 + len(texts),
                    "default_num_special_tokens": 10,
                    **config,
                },
                "vocab": [{"rank": rank, "token_bytes": base64.b64encode(text).decode()} for rank, text in enumerate(texts)],
                "special_tokens": [
                    {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
                ],
            }
        )
    )
    return path


def joined_by_rank(text, words):
    """tiktoken's rule: of all neighbours whose joined bytes are a word, the pair of the lowest rank becomes one, the first of
    equals."""
    ranks = {word: 256 + rank for rank, word in enumerate(words)}
    parts = [bytes([byte]) for byte in text.encode()]
    if text.encode() in ranks:
        return [ranks[text.encode()]]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks.get(part, part[0]) for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


WORDS = [b"th", b"he", b"the", b"re", b"there", b" t", b" the", b"\xc3\xa9", b"in", b"ing", b"thing"]


@given(st.text(alphabet="ther ing\u00e9", max_size=12).filter(lambda text: " " not in text[1:]))
def test_tekken_joins_neighbours_by_rank(tmp_path_factory, text):
    """Texts of one word, which the pattern does not cut."""
    tokenizer = load_tokenizer(write_tekken(tmp_path_factory.mktemp("t") / "tekken.json", WORDS))
    if text.strip():
        expected = [10 + rank for rank in joined_by_rank(text, WORDS)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected) == text


def test_tekken_has_its_special_tokens_first(tmp_path):
    tokenizer = load_tokenizer(write_tekken(tmp_path / "tekken.json", WORDS))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("there</s>", add_special_tokens=True) == [1, 10 + 256 + 4, 2]
    assert tokenizer.vocab_size == 10 + 256 + len(WORDS)


@pytest.mark.parametrize(
    "config",
    [{"pattern": "."}, {"default_vocab_size": 1 << 40}, {"default_num_special_tokens": 0}, {"default_vocab_size": "x"}],
)
def test_another_tekken_is_refused(tmp_path, config):
    with pytest.raises(ModelError):
        load_tokenizer(write_tekken(tmp_path / "tekken.json", WORDS, **config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_bytes": "!"}, "a word in it is not in base64"),
        ({"token_bytes": ""}, "it has no word of rank 3"),
        ({"rank": 4}, "it has no word of rank 3"),
        ({"rank": 267}, "it has the rank 267, not below 267"),
        ({"rank": -1}, "it has the rank -1"),
        ({"rank": True}, "it has the rank True"),
    ],
)
def test_a_tekken_with_a_wrong_word_is_refused(tmp_path, change, words):
    path = write_tekken(tmp_path / "tekken.json", WORDS)
    file = json.loads(path.read_text())
    file["vocab"][3] |= change
    path.write_text(json.dumps(file))
    with pytest.raises(ModelError, match=words):
        read_vocab(path)


def test_the_most_exact_file_is_taken(tmp_path):
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json, tekken\.json or tokenizer\.model"):
        find_tokenizer(tmp_path)
    for name in ("tokenizer.model", "tekken.json", "tokenizer.json"):
        (tmp_path / name).touch()
        assert find_tokenizer(tmp_path).name == name
