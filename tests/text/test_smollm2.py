"""The default model's real vocabulary against what transformers makes of it (golden/smollm2.json, see make_golden.py)."""

import json
from pathlib import Path

import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.models.gguf import load_gguf
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import detokenizer_factory, load_tokenizer
from support.work_time import thread_s

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text(encoding="utf-8"))
MAX_LOAD_S = 0.3


@pytest.fixture(scope="module")
def model():
    source = resolve("smollm2:135m", default_cache_dir())
    if not source.is_present:
        pytest.skip(f"the default model is not at {source.path}: penstock pull {source.name}")
    return load_gguf(source.path)


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model.tokenizer_source, eos_token_ids=model.eos_token_ids)


def test_vocabulary_is_complete(tokenizer):
    assert tokenizer.vocab_size == GOLDEN["vocab_size"] == 49_152
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.bos_token_id == 1


def test_every_encoding_is_the_golden_one(tokenizer):
    for case in GOLDEN["encodings"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], add_special_tokens=True) == case["ids"]


def test_every_decoding_is_the_golden_one_at_once_and_by_token(tokenizer):
    make = detokenizer_factory(tokenizer)
    for case in GOLDEN["encodings"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        detokenizer = make(())
        pieces = [detokenizer.push((token_id,)) for token_id in case["ids"]]
        assert "".join(pieces) + detokenizer.flush() == case["decoded"]


def test_chats_are_the_golden_ones(model, tokenizer):
    template = ChatTemplate(model.chat_templates["default"], special_tokens=tokenizer.special_tokens)
    for case in GOLDEN["chats"]:
        assert template.render(case["messages"]) == case["open"]
        assert template.render(case["messages"], add_generation_prompt=False) == case["closed"]
        continued = template.render(case["messages"], add_generation_prompt=False, continue_final_message=True)
        assert continued == case["continued"]


def test_every_token_s_bytes_are_its_text(tokenizer, model):
    """Against the definition: printable Latin-1 for itself, the other bytes as U+0100 onwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}
    for token_id, piece in enumerate(model.tokenizer_source.tokens):
        expected = piece.encode() if token_id < 17 else bytes(alphabet[character] for character in piece)
        assert tokenizer.token_bytes(token_id) == expected


def test_tokenizer_is_ready_quickly(model):
    assert thread_s(lambda: load_tokenizer(model.tokenizer_source).encode("hello", add_special_tokens=False)) < MAX_LOAD_S
