"""Answers to JSON schemas byte by byte, and where a refusal says the trouble is. `make test-schemas` has hundreds more."""

import json
import re
from random import Random

import pytest

from support.schemas.bytewise import Bytewise

ANSWERS = Bytewise()
TWO = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        (
            {"format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"2023-12-31"', "1"],
            ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
        ),
        ({"format": "time"}, ['"23:59:59Z"', '"00:00:00.25-08:30"'], ['"23:59:60Z"', '"24:00:00Z"', '"12:00:00"']),
        ({"format": "date-time"}, ['"2024-02-29T12:00:00z"'], ['"2023-02-29T12:00:00Z"', '"2024-02-29T12:00:60Z"']),
        ({"type": "string", "format": "date", "pattern": "^20"}, ['"2024-02-29"'], ['"1999-01-01"', '"20x"']),
        ({"type": "string", "format": "date", "enum": ["2024-02-29", "2023-02-29"]}, ['"2024-02-29"'], ['"2023-02-29"']),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"a"', '"aé"'], ['""', '"abc"']),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[]", "[1]"], ["[2]", "[1,1]"]),
        ({"type": "object", "maxProperties": 1.0}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        (TWO, ['{"a":1}', '{"a":1,"b":[]}'], ["{}", '{"b":1}', '{"a":1.5}', '{"a":1,"c":2}']),
        ({"allOf": [TWO, {"properties": {"a": {"minimum": 3}}}]}, ['{"a":3}'], ['{"a":2}']),
        ({"type": ["integer", "null"], "exclusiveMinimum": 0, "maximum": 3}, ["null", "1", "3"], ["0", "4", '"1"']),
    ],
)
def test_answers_are_those_that_the_schema_has(schema, answers, others):
    assert [text for text in answers + others if ANSWERS.is_answer(schema, text)] == answers


@pytest.mark.parametrize("schema", [TWO, {"format": "date"}, {"type": "array", "items": TWO, "maxItems": 2}])
def test_random_answers_are_json(schema):
    walks = [ANSWERS.walk(schema, Random(seed)) for seed in range(10)]
    assert all(json.loads(walk) is not None for walk in walks if walk is not None)
    assert sum(walk is not None for walk in walks) > 5


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "does not support 'not'. .*It stands at #/properties/a~1b/items.$"),
        ({"anyOf": [{}, {"minimum": 2**60}]}, "takes minimum .*It stands at #/anyOf/1.$"),
        ({"prefixItems": [{"const": [1, 2**60]}]}, "It stands at #/prefixItems/0/const/1.$"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"if": {}}}}, r"It stands at #/\$defs/x.$"),
        ({"items": {"$id": "x"}}, "It stands at #/items.$"),
        ({"properties": {"a": {"format": "iri"}}}, "The format iri .*It stands at #/properties/a.$"),
        ({"items": {"oneOf": [{}, {}]}}, "oneOf .*It stands at #/items.$"),
        ({"anyOf": [{"oneOf": [{}, {}]}, {"items": {"oneOf": [{}]}}]}, "It stands at #/anyOf/0 or #/anyOf/1/items.$"),
        ({"items": {"patternProperties": {"a": {}, "aa": {}}}}, "patternProperties, /a/ and /aa/, .*It stands at #/items.$"),
        ({"items": {"pattern": r"\cC"}}, "escape that is not known.*It stands at #/items.$"),
        ({"items": {"$ref": "http://x.test/y.json#/z"}}, "nothing is fetched.*It stands at #/items.$"),
        ({"not": {}}, "say the same in another way.$"),
        ({"properties": {"x" * 300: {"not": {}}}}, r"It stands at #/properties/x{187}\.\.\.\.$"),
    ],
)
def test_a_refusal_says_where_in_the_schema_it_is(schema, said):
    assert re.search(said, ANSWERS.refusal(schema) or "")
