"""Grammars over the default model's real vocabulary."""

import json
from random import Random

import numpy as np
import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.models.gguf import load_gguf
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad", "neither"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
ANSWER = {"name": 'Zoë "Z" 京', "age": 41, "mood": "neither", "tags": ["a", "tab\tand\\", ""]}


@pytest.fixture(scope="module")
def tokenizer():
    source = resolve("smollm2:135m", default_cache_dir())
    if not source.is_present:
        pytest.skip(f"the default model is not at {source.path}: penstock pull {source.name}")
    model = load_gguf(source.path)
    return load_tokenizer(model.tokenizer_source, eos_token_ids=model.eos_token_ids)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size)


def allows(mask, token_id):
    return mask[token_id // 8] >> token_id % 8 & 1


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_as_the_model_writes_it_is_allowed_token_by_token(grammars, tokenizer, indent):
    matcher = grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)))
    text = json.dumps(ANSWER, indent=indent, ensure_ascii=False)
    for token_id in (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]):
        assert allows(matcher.mask(), token_id), tokenizer.token_text(token_id)
        matcher.accept((token_id,))


def test_whatever_the_mask_allows_is_json_of_the_schema(grammars, tokenizer):
    random = Random(1)
    for _ in range(10):
        matcher, ids = grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))), []
        while not any(allows(matcher.mask(), token_id) for token_id in tokenizer.eos_token_ids):
            bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
            ids.append(random.choice(np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()))
            matcher.accept(ids[-1:])
        value = json.loads(b"".join(map(tokenizer.token_bytes, ids)))
        assert set(value) == set(PERSON["required"])
        assert len(value["name"]) <= 40
        assert 0 <= value["age"] <= 150
        assert value["mood"] in PERSON["properties"]["mood"]["enum"]
        assert len(value["tags"]) <= 3


def test_no_special_token_is_ever_allowed_but_the_end(grammars, tokenizer):
    mask = grammars.matcher(Grammar(GrammarKind.REGEX, "(?s:.*)")).mask()
    special = {token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)}
    assert {token_id for token_id in special if allows(mask, token_id)} == set(tokenizer.eos_token_ids)
    assert len(special) > len(tokenizer.eos_token_ids)


def test_tags_in_free_text_as_the_model_cuts_them(grammars, tokenizer):
    """Also where a token has the end of a tag and more."""
    call = {"begin": "<call=add>", "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "end": "</call>"}
    tags = Grammar(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps({"type": "structural_tag", "structures": [call], "triggers": ["<call="]}),
    )

    def first_refused(text):
        matcher, said = grammars.matcher(tags), b""
        for token_id in (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]):
            if not allows(matcher.mask(), token_id):
                return said.decode()
            said += tokenizer.token_bytes(token_id)
            matcher.accept((token_id,))
        return None

    assert first_refused("I add: <call=add>[1, 23]</call>\n\nNow <call=add>[]</call>. <b>Größe</b> <call") is None
    assert first_refused("I add: <call=add>[1, 2, 3]</call>") == "I add: <call=add>[1, 2"
    assert first_refused("I <call=sub>[1]</call>") in ("I <call=", "I <call")
    assert first_refused("I add: <call=add>[1]") == "I add: <call=add>[1]"
