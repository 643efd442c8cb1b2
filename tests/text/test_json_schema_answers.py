"""Answers to JSON schemas byte by byte, and where a refusal says the trouble is. `make test-schemas` has hundreds more."""

import json
import math
import operator
import re
import time
from decimal import Decimal
from random import Random

import pytest

from penstock.text.json_schema import SchemaCount, json_of
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


ACUTE = {"properties": {"é": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        (ACUTE, ['{"é":1,"b":"Zo\\u00e9"}', '{"a\\n":1}'], ['{"\\u00e9":"x"}', '{"é":1,"\\u00e9":"x"}', '{"\\u00e9":1}']),
        (ACUTE | {"additionalProperties": True}, ['{"a":1}'], ['{"\\u00e9":"x"}']),
        (
            ACUTE | {"additionalProperties": {"type": "string"}},
            ['{"a":"é"}'],
            ['{"\\u00e9":"x"}', '{"a":1}', '{"a":"\\u00e9"}'],
        ),
        (ACUTE | {"additionalProperties": False}, ['{"é":1}'], ['{"\\u00e9":1}']),
        ({"required": ["é"]}, ['{"é":1}'], ['{"\\u00e9":1}']),
        (
            {"allOf": [ACUTE, {"properties": {"a": {"const": 1}}}]},
            ['{"é":1,"a":1,"b":2}'],
            ['{"\\u00e9":"x"}', '{"\\u0061":2}'],
        ),
        ({"allOf": [ACUTE, {"patternProperties": {"^é": {"minimum": 3}}}]}, ['{"é":4}'], ['{"é":2}', '{"\\u00e9":"x"}']),
        ({"patternProperties": {"^é": {"type": "integer"}}}, ['{"é":1}', '{"a":"x"}'], ['{"\\u00e9":"x"}']),
        ({"properties": {"a\tb": {"type": "integer"}}}, ['{"a\\tb":1}'], ['{"a\\u0009b":"x"}']),
        (
            {"patternProperties": {"^x": {"type": "integer"}}, "properties": {"a\tb": {"type": "integer"}}},
            [],
            ['{"a\\u0009b":"x"}'],
        ),
        (
            ACUTE | {"additionalProperties": True, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"é":1,"a":2}', '{"b":1,"c":2}'],
            ['{"c":1}', '{"a":1,"\\u00e9":"x"}'],
        ),
        (
            {"properties": {"b": {}, "c": {}}, "allOf": [ACUTE], "additionalProperties": True},
            ['{"b":1,"c":2,"é":3,"d":4}'],
            ['{"é":1,"b":2}'],
        ),
        (
            {"properties": {"é": {"$ref": "#/additionalProperties"}}, "additionalProperties": {}},
            ['{"é":1,"a":2}'],
            ['{"\\u00e9":1}'],
        ),
    ],
    ids=str,
)
def test_no_other_field_has_a_declared_name_in_another_spelling(schema, answers, others):
    assert [text for text in answers + others if ANSWERS.is_answer(schema, text)] == answers


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        ({"type": "string"}, ['"Zo\\u00e9"', '"\\u001b"'], ['"\\ud83d"', '"\\u00"']),
        ({"type": "string", "maxLength": 1}, ['"\\u00e9"', '"\\ud83d\\udc4d"'], ['"\\u00e9\\u00e9"']),
        ({"const": "\x1b"}, ['"\\u001b"'], ['"\\u001c"']),
        ({"type": "object"}, ['{"\\u00e9":"\\u00e9"}'], []),
        ({"properties": {"\u3000\u200d": {"type": "string"}}}, ['{"\u3000\u200d":"\\u00e9"}'], ['{"\\u3000\\u200d":1}']),
        (
            {
                "patternProperties": {"^é": {"type": "string"}},
                "properties": {"a": {"const": "\0"}},
                "additionalProperties": False,
            },
            ['{"a":"\\u0000","éa":"\\u00e9"}'],
            ['{"\\u00e9":"x"}', '{"\\u0061":"x"}'],
        ),
    ],
    ids=str,
)
def test_strings_may_have_escaped_characters(schema, answers, others):
    assert [text for text in answers + others if ANSWERS.is_answer(schema, text)] == answers


@pytest.mark.parametrize(
    "schema",
    [
        {"maxProperties": 2, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"minProperties": 1, "allOf": [{"properties": {"a": {"type": "integer"}, "b": True, "c": True}}]},
    ],
    ids=str,
)
def test_a_closed_object_may_limit_its_fields_beside_open_ones(schema):
    closed = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
    assert ANSWERS.is_answer(closed | schema, '{"a":1}')
    assert not ANSWERS.is_answer(closed | schema, '{"d":1}')


SPELLINGS = [
    f"{sign}{whole}{fraction}"
    for sign in ("", "-")
    for whole in range(3)
    for fraction in ("", *(f".{n}" for n in range(10)), *(f".{n:02}" for n in range(100)))
]
"""Numbers of up to three digits."""
IS_WITHIN = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: value % step == 0,
}


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize(
    "bounds",
    [
        *({name: number} for name in list(IS_WITHIN)[:4] for number in (1.25, -1.25)),
        *({"minimum": 1.2, "maximum": number} for number in (1.25, 2.05)),
        *({"exclusiveMinimum": -number, "exclusiveMaximum": number} for number in (0.05, 1.99)),
        *({"minimum": 1e-3}, {"maximum": 1e-3}, {"maximum": 1.999}, {"minimum": -1.0, "maximum": 2.0}),
        *({"maximum": 1.25, "multipleOf": number} for number in (0.1, 0.05)),
        *({"exclusiveMinimum": 0}, {"exclusiveMaximum": -1}, {"exclusiveMinimum": -1, "maximum": 1}),
    ],
    ids=str,
)
def test_numbers_within_decimal_bounds_are_answers_in_their_shortest_spelling(kind, bounds):
    limits = {name: Decimal(str(number)) for name, number in bounds.items()}
    inside = {
        text
        for text in SPELLINGS
        if all(IS_WITHIN[name](Decimal(text), limit) for name, limit in limits.items())
        and (kind == "number" or "." not in text)
    }
    schema = {"type": kind} | bounds
    if not inside:
        assert "no integer" in ANSWERS.refusal(schema)
        return
    answers = {text for text in SPELLINGS if ANSWERS.is_answer(schema, text)}
    assert answers <= inside
    assert not {text for text in inside - answers if text != "-0" and not ("." in text and text.endswith("0"))}


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"exclusiveMinimum": 0}, "0.50"),
        ({"exclusiveMinimum": 0, "maximum": 1}, "0.010"),
        ({"exclusiveMinimum": 5}, "5.50"),
        ({"exclusiveMaximum": -5}, "-5.50"),
        ({"minimum": -1, "maximum": 1}, "-0.50"),
        ({"maximum": 1.25, "multipleOf": 0.01}, "0.50"),
    ],
    ids=str,
)
def test_zeros_may_end_a_number_near_an_open_bound(bounds, text):
    assert ANSWERS.is_answer({"type": "number"} | bounds, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["number", "null"], "maximum": 1.25, "description": "a price", "format": "float"},
        {"allOf": [{"maximum": 1.25}, {"minimum": 1.15}]},
        {"oneOf": [{"type": "number", "minimum": -3, "maximum": 1.25}, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"maximum": 1.25}}},
        {"enum": [1.2, 1.5, None], "maximum": 1.25},
    ],
    ids=str,
)
def test_decimal_bounds_are_followed_wherever_they_stand(schema):
    assert [text for text in ("1.2", "1.3", "null") if ANSWERS.is_answer(schema, text)] == ["1.2", "null"]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{n}": {"type": "number", "maximum": 1.25} for n in range(1000)}},
        {"allOf": [{"minimum": -1.25 - n, "maximum": 1.25 + n} for n in range(8)]},
        {"properties": {"a": {"minimum": -5, "x-unit": "m"}, "b": {"multipleOf": 113}, "c": {"multipleOf": 97}}},
    ],
    ids=["many", "together", "multiples"],
)
def test_no_schema_is_refused_for_the_short_spellings_of_its_numbers(schema):
    assert ANSWERS.refusal(schema) is None


def test_short_spellings_of_a_tools_numbers_refuse_no_later_tool():
    count, number = SchemaCount(), {"type": "number", "minimum": -90.123456, "maximum": 90.123456}
    texts = [json_of({"properties": {f"p{n}": dict(number) for n in range(20)}}, count) for _ in range(20)]
    assert "90.12345}" in texts[0]
    assert "90.12345}" not in texts[-1]


def test_short_spellings_of_bounds_that_apply_together_are_no_work_for_seconds():
    long = 1.2345678901234567
    schema = {"allOf": [{"type": "number", "minimum": -long - n, "maximum": long + n} for n in range(3)]}
    begin_s = time.process_time()  # llguidance has threads of its own
    assert ANSWERS.refusal(schema) is None
    assert time.process_time() - begin_s < 0.3


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
        ({"items": {"maximum": math.nan}}, "takes maximum .*not nan.*It stands at #/items.$"),
        ({"prefixItems": [{"const": [1, 2**60]}]}, "It stands at #/prefixItems/0/const/1.$"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"if": {}}}}, r"It stands at #/\$defs/x.$"),
        ({"items": {"$id": "x"}}, "It stands at #/items.$"),
        (
            {"patternProperties": {"a": {"enum": [[1, "\0"]]}}},
            "no control characters .*It stands at #/patternProperties/a/enum/0/1.$",
        ),
        ({"properties": {"a": {"format": "iri"}}}, "The format iri .*It stands at #/properties/a.$"),
        ({"items": {"oneOf": [{}, {}]}}, "oneOf .*It stands at #/items.$"),
        ({"anyOf": [{"oneOf": [{}, {}]}, {"items": {"oneOf": [{}]}}]}, "It stands at #/anyOf/0 or #/anyOf/1/items.$"),
        ({"items": {"patternProperties": {"a": {}, "aa": {}}}}, "patternProperties, /a/ and /aa/, .*It stands at #/items.$"),
        ({"items": {"patternProperties": {r"a\/": {}, r"a\/b": {}}}}, r"patternProperties, .*It stands at #/items.$"),
        ({"items": {"pattern": r"\cC"}}, "escape that is not known.*It stands at #/items.$"),
        ({"items": {"$ref": "http://x.test/y.json#/z"}}, "nothing is fetched.*It stands at #/items.$"),
        ({"items": {"type": ["string", "nul"]}}, "type 'nul' is not known. Use string, .*It stands at #/items.$"),
        ({"items": {"pattern": "a{3,1}"}}, r"The pattern /a\{3,1\}/ is wrong: invalid repetition.*It stands at #/items.$"),
        ({"items": {"pattern": "^(fuel|petrol"}}, r"pattern /\^\(fuel\|petrol/ is wrong: unclosed.* It stands at #/items.$"),
        ({"items": {"pattern": "^(look-around"}}, r"pattern /\^\(look-around/ is wrong: unclosed.* It stands at #/items.$"),
        ({"items": {"pattern": "x" * 320 + "("}}, r"pattern /x{100}\.\.\./ is wrong: unclosed.* It stands at #/items.$"),
        ({"items": {"pattern": "a/\nb("}}, r"pattern /a/\\nb\(/ is wrong: unclosed.* It stands at #/items.$"),
        ({"items": {"type": "a b"}}, "type 'a b' is not known. Use .*It stands at #/items.$"),
        ({"items": {"type": ""}}, "type '' is not known. Use .*It stands at #/items.$"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": []}}}, r"enum, .*is empty. .*It stands at #/\$defs/a.$"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "const": 1}}},
            r"No value follows it: incompatible types. Check which parts .* other. It stands at #/\$defs/a.$",
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"items": {"pattern": "("}}}},
            r"The pattern /\(/ is wrong: unclosed group. It stands at #/\$defs/a/items.$",
        ),
        ({"oneOf": []}, "A type, enum, anyOf or oneOf is empty. Name a value"),
        ({"type": []}, "A type, enum, anyOf or oneOf is empty. Name a value"),
        ({"items": "string"}, 'schema in it is not an object. Write .* not "string".$'),
        ({"enum": []}, "A type, enum, anyOf or oneOf is empty. Name a value"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "No value follows it: minimum .* greater than .*Check which"),
        ({"exclusiveMinimum": 5, "enum": [1, 2]}, r"exclusiveMinimum \(5\) is greater than maximum \(2\)"),
        ({"type": "number", "allOf": [{"minimum": 5}, {"maximum": 1.25}]}, r"minimum \(5\) is greater than maximum \(1.25\)"),
        ({"not": {}}, "say the same in another way.$"),
        ({"properties": {"x" * 300: {"not": {}}}}, r"It stands at #/properties/x{187}\.\.\.\.$"),
    ],
)
def test_a_refusal_says_where_in_the_schema_it_is(schema, said):
    assert re.search(said, ANSWERS.refusal(schema) or "")
