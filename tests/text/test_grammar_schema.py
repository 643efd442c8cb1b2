"""A JSON schema before it is compiled is refused in time, or loses the parts that ask for nothing."""

import contextlib
import itertools
import json
import tracemalloc
from urllib.parse import quote

import pytest

from penstock.text import json_schema
from penstock.text.dialects import BY_NAME
from penstock.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind, Grammars
from penstock.text.grammar_source import of_schema
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tool_grammar import Tool, of_tools, tool_source
from penstock.types.errors import GrammarFailure, Rejected
from support.work_time import thread_s


@pytest.fixture(scope="module")
def tokenizer(byte_level_vocab):
    return load_tokenizer(byte_level_vocab(), eos_token_ids=(1,))


@pytest.fixture
def grammars(tokenizer):
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size), tokenizer


def compiled(grammars, value):
    return grammars[0].matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)))


def takes(grammars, value, text):
    """Whether a text is a whole answer."""
    tokenizer = grammars[1]
    ids = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(n)) == 1}
    try:
        compiled(grammars, value).accept([*(ids[bytes([byte])] for byte in text.encode()), tokenizer.eos_token_ids[0]])
    except GrammarFailure:
        return False
    return True


def doubling(depth, part):
    """Each schema names the next one twice."""
    defs = {f"d{n}": {"properties": {name: part(f"#/$defs/d{n + 1}", name) for name in "ab"}} for n in range(depth)}
    return {"$defs": defs | {f"d{depth}": {}}, "$ref": "#/$defs/d0"}


LARGE = doubling(60, lambda ref, name: {"$ref": ref, "required": [name]})


@pytest.mark.parametrize(
    "part",
    [
        lambda ref, name: {"$ref": ref, "required": [name]},
        lambda ref, name: {"$ref": ref, "x-unknown": name},
        lambda ref, name: {"allOf": [{"$ref": ref}], "type": "object"},
        lambda ref, name: {"allOf": [{"$ref": ref}, {"required": [name]}]},
        lambda ref, name: {"anyOf": [{"$ref": ref}, {"type": "null"}], "type": ["object", "null"]},
        lambda ref, name: {"anyOf": [{"anyOf": [{"$ref": ref}]}], "required": [name]},
    ],
    ids=["siblings", "unknown sibling", "allOf", "allOf of two", "anyOf", "nested"],
)
def test_references_that_would_double_all_memory_are_refused_at_once(grammars, part):
    """The schema has 3 KB and a depth of 26: llguidance asks for more than 5 GB, and ends the process if there is no more."""
    with pytest.raises(Rejected, match=r"a \$ref with other keywords beside it"):
        compiled(grammars, doubling(60, part))
    compiled(grammars, doubling(5, part))


@pytest.mark.parametrize(
    "part",
    [
        lambda ref, _name: {"$ref": ref},
        lambda ref, _name: {"$ref": ref, "title": "T", "description": "d", "default": {}, "examples": [1], "deprecated": True},
        lambda ref, _name: {"$ref": ref, "nullable": True, "example": 3},
        lambda ref, _name: {"allOf": [{"$ref": ref}], "description": "d"},
        lambda ref, _name: {"anyOf": [{"$ref": ref}, {"type": "null"}], "title": "T", "default": None},
    ],
    ids=["alone", "described", "openapi", "allOf of one", "optional"],
)
def test_references_with_nothing_but_a_description_beside_them_are_followed_however_deep(grammars, part):
    assert takes(grammars, doubling(60, part), '{"a": {"b": {}}}')


def test_recursion_with_a_keyword_beside_it_is_refused_with_a_remedy(grammars):
    with pytest.raises(Rejected, match=r"is recursive.*an anyOf alone"):
        compiled(grammars, {"properties": {"a": {"$ref": "#", "required": ["a"]}}})


@pytest.mark.parametrize(
    "parts",
    [
        {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]},
        {"type": "integer", "multipleOf": 997, "anyOf": [{"multipleOf": 991}]},
        {"type": "integer", "multipleOf": 9.97, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 991}}},
    ],
    ids=["allOf", "anyOf", "$ref"],
)
def test_multiples_that_are_put_together_are_refused_if_their_common_one_is_large(grammars, parts):
    """716,539 takes llguidance seven seconds and 350 MB."""
    with pytest.raises(Rejected, match="multipleOf"):
        compiled(grammars, parts)


def test_many_small_multiples_are_followed(grammars):
    value = {"prefixItems": [{"type": "number", "multipleOf": number} for number in (0.01, 0.5, 97, 89, 83)], "type": "array"}
    assert takes(grammars, value, "[0.01, 1.5, 194, 89, 0]")
    assert takes(grammars, {"allOf": [{"type": "integer", "multipleOf": 12}, {"multipleOf": 90}]}, "180")


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 1000.0, "exclusiveMaximum": 1000.5},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": -1.5, "exclusiveMaximum": -1},
    ],
    ids=str,
)
def test_exclusive_bound_that_would_be_taken_is_refused(grammars, bounds):
    with pytest.raises(Rejected, match=r"does not support exclusiveM.* beside .* Give m"):
        compiled(grammars, {"type": "number"} | bounds)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "#/allOf/0"),
        ({"$ref": "#/$defs/a", "maximum": 3.5, "$defs": {"a": {"type": "number", "exclusiveMinimum": 3}}}, r"#/\$defs/a"),
        ({"properties": {"a": {"exclusiveMaximum": -1, "anyOf": [{"maximum": -2}, {"minimum": -1.5}]}}}, "#/properties/a"),
        ({"allOf": [{"items": {"exclusiveMinimum": 0}}, {"items": {"maximum": 0.5}}]}, "#/allOf/0/items"),
    ],
    ids=["allOf", "$ref", "anyOf", "items"],
)
def test_exclusive_bound_is_refused_if_another_schema_has_the_opposite_bound(grammars, value, place):
    with pytest.raises(Rejected, match=rf"does not support exclusiveM.* beside .* Give m.* It stands at {place}\."):
        compiled(grammars, value)


@pytest.mark.parametrize(
    ("value", "outside", "inside"),
    [
        ({"allOf": [{"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 0.2}]}, "0", "0.2"),
        ({"allOf": [{"exclusiveMinimum": 0, "maximum": 1.5}, {"type": ["integer", "null"]}, {"maximum": 0.5}]}, "0", "null"),
        ({"type": "string", "anyOf": [{"exclusiveMinimum": 0, "maximum": 0.5}]}, "0", '"a"'),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": -0.5}]}, "0", "-0.5"),
    ],
    ids=["stricter bound", "integer", "string", "apart"],
)
def test_exclusive_bound_is_followed_if_no_range_of_fractions_begins_with_it(grammars, value, outside, inside):
    assert takes(grammars, value, inside)
    assert not takes(grammars, value, outside)


@pytest.mark.parametrize(
    ("bounds", "outside", "inside"),
    [
        ({"minimum": 0.5, "exclusiveMaximum": 1}, "1", "0.75"),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, "-1", "-0.75"),
        ({"exclusiveMinimum": 0, "maximum": 1}, "0", "0.001"),
        ({"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.75}, "0.5", "0.51"),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, "-1", "-0.9"),
        ({"exclusiveMinimum": 0, "maximum": 1.5}, "0", "0.1"),
        ({"minimum": 0, "exclusiveMaximum": 100}, "100", "99.9"),
    ],
    ids=str,
)
def test_exclusive_bounds_are_left_out(grammars, bounds, outside, inside):
    assert takes(grammars, {"type": "number"} | bounds, inside)
    assert not takes(grammars, {"type": "number"} | bounds, outside)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}'),
        ({"type": "object", "propertyNames": True}, "{}"),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False}, "0"),
    ],
    ids=["names of zod 4", "any names", "not unique", "draft 4"],
)
@pytest.mark.parametrize("draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"])
def test_keywords_that_ask_for_nothing_are_taken(grammars, value, text, draft):
    assert takes(grammars, {"$schema": draft} | value, text)
    whole = {"$schema": draft, "$defs": {"a": value}, "type": "array", "items": {"$ref": "#/$defs/a"}}
    assert takes(grammars, whole, f"[{text}, {text}]")


@pytest.mark.parametrize("keyword", ["not", "dependentRequired", "unevaluatedProperties"])
def test_what_is_not_supported_is_refused_where_a_reference_names_it(grammars, keyword):
    value = {"$ref": "#/components/schemas/a~1b", "components": {"schemas": {"a/b": {keyword: {}}}}}
    with pytest.raises(Rejected, match=keyword):
        compiled(grammars, {"$schema": "http://json-schema.org/draft-07/schema#"} | value)


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "https://e.org/a#/$defs/x", "$defs": {"x": {"$id": "https://e.org/a"}}},
        {"$ref": "#x", "$defs": {"x": {"$anchor": "x"}}},
        {"$ref": "#/y/z", "y": {"$id": "https://e.org/x", "z": {"$ref": "#/y"}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$id": "https://e.org/x", "$ref": "#/y", "required": ["b"], "y": {}}}},
    ],
    ids=["by address", "by name", "through another", "in another"],
)
def test_reference_whose_size_can_not_be_told_is_refused(grammars, value):
    with pytest.raises(Rejected, match=r"place inside it|\$id inside"):
        compiled(grammars, value)


BEYOND_64_BITS = {"type": "integer", "minimum": -(2**70), "maximum": -(2**69)}
"""llguidance ends the process over it, so it must not get there unchecked."""


@pytest.mark.parametrize("ref", ["#/$defs/x%2Fy", "#/$defs%2fx/y", "#/%24defs/x/y"])
def test_a_reference_is_followed_to_the_schema_that_was_checked(grammars, ref):
    """A slash that is written as %2F divides names: it is decoded first (RFC 6901, section 6)."""
    with pytest.raises(Rejected, match=r"minimum.* at #/\$defs/x/y\.$"):
        compiled(grammars, {"$ref": ref, "$defs": {"x/y": {}, "x": {"y": BEYOND_64_BITS}}})
    assert takes(grammars, {"$ref": ref, "$defs": {"x/y": {"type": "null"}, "x": {"y": {"const": 1}}}}, "1")


@pytest.mark.parametrize("name", ["a/b", "a~b", "a%2Fb", "a b", "\u00e9", "#", '"', ""])
def test_names_of_any_characters_can_be_referred_to(grammars, name):
    pointer = quote(name.replace("~", "~0").replace("/", "~1"))
    assert takes(grammars, {"$ref": f"#/$defs/{pointer}", "$defs": {name: {"const": 1}}}, "1")


@pytest.mark.parametrize("address", ["json-schema:///", "https://e.org/a"])
def test_a_schema_that_says_nothing_can_not_take_the_place_of_another(grammars, address):
    """contentSchema is a schema for llguidance's references, and asks for nothing."""
    hidden = {"contentSchema": {"$id": address, **BEYOND_64_BITS, "$defs": {"a": BEYOND_64_BITS}}}
    value = {"$id": "https://e.org/a", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}, "u": hidden}}
    assert takes(grammars, value, "1")


def test_references_by_the_address_of_the_whole_count_like_others(grammars):
    with pytest.raises(Rejected, match="is recursive or expands"):
        compiled(grammars, LARGE | {"$id": "https://e.org/a#", "$ref": "https://e.org/a#/$defs/d0"})
    value = {"$id": "https://e.org/a", "$ref": "https://e.org/a#/$defs/x", "$defs": {"x": {"const": 1}}}
    assert takes(grammars, value, "1")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"type": "string", "format": "binary"}, "format binary is not supported. Leave it out"),
        ({"type": "string", "pattern": "^(?!a)b"}, "look-around or a word boundary.* Say it without"),
        ({"type": "string", "pattern": r"\bfoo\b"}, "look-around or a word boundary.* Say it without"),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, "No string can have all.* Check"),
        ({"type": "string", "pattern": "^(a{97})+$", "minLength": 9000}, "simpler"),
    ],
    ids=["format", "look-ahead", "boundary", "contradiction", "large pattern"],
)
def test_refusal_names_a_remedy(grammars, value, says):
    with pytest.raises(Rejected, match=says) as caught:
        compiled(grammars, value)
    assert "SearchRegex" not in str(caught.value)


def pattern(*numbers):
    return {
        "type": "string",
        "pattern": "".join(f"{letter}{number}" for letter, number in zip("abcdef", numbers, strict=False)),
    }


def choices(num_parts, num_choices, inside=lambda part: part):
    """An allOf of anyOf of patterns: num_choices to the power of num_parts ways to put them together."""
    either = [{"anyOf": [pattern(part, choice) for choice in range(num_choices)]} for part in range(num_parts)]
    return {"allOf": [inside(part) for part in either]}


INSIDE = {
    "strings": lambda part: part,
    "properties": lambda part: {"type": "object", "properties": {"x": part}, "required": ["x"]},
    "items": lambda part: {"type": "array", "items": part},
    "first items": lambda part: {"type": "array", "prefixItems": [part]},
    "other properties": lambda part: {"type": "object", "additionalProperties": part},
    "some properties": lambda part: {"type": "object", "patternProperties": {"^x": part}},
    "either": lambda part: {"oneOf": part["anyOf"]},
    "references": lambda part: {"allOf": [part]},
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_choices_that_multiply_are_refused_before_they_are_compiled(inside):
    """The schema has 1 KB and would take seconds, as llguidance compiles each way before it looks at any limit."""
    with pytest.raises(Rejected, match="an allOf of several anyOf"):
        of_schema(json.dumps(choices(5, 6, inside)))


@pytest.mark.parametrize("inside", [INSIDE["strings"], INSIDE["properties"], INSIDE["items"]])
def test_few_choices_that_multiply_are_followed(grammars, inside):
    compiled(grammars, choices(3, 3, inside))


def test_formats_of_what_is_no_string_cost_nothing(grammars):
    def of_all(one):
        return {"type": "object", "properties": {f"p{n}": one for n in range(450)}}

    assert not takes(grammars, of_all({"type": "integer", "format": "int32"}), '{"p0": "a"}')
    with pytest.raises(Rejected, match="more than 2000 schemas"):
        compiled(grammars, of_all({"type": "string", "format": "email"}))


def test_a_property_that_only_one_of_several_names_is_put_together_with_nothing(grammars):
    """So it may name what it is in."""
    value = {"allOf": [{"type": "object", "properties": {"next": {"$ref": "#"}}}, {"type": "object", "properties": {"v": {}}}]}
    assert takes(grammars, value, '{"next": {"next": {}}}')


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"allOf": [pattern(number) for number in range(30)]}, "patterns and formats together"),
        ({"type": "object", "patternProperties": {f"^{n}x": {} for n in range(500)}}, "different patterns"),
        ({"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}, "more than 2000 schemas"),
        ({"type": "object", "properties": {f"p{n}": {"format": "email"} for n in range(1500)}}, "more than 2000 schemas"),
        ({"anyOf": [{"allOf": [{"anyOf": [True] * 100}] * 20}]}, "more than 2000 schemas"),
    ],
    ids=["patterns together", "names of properties", "properties", "formats", "anything"],
)
def test_what_would_take_long_is_refused_before_it_is_compiled(value, says):
    """Each takes a second or far more to compile."""
    with pytest.raises(Rejected, match=says):
        of_schema(json.dumps(value))


def keys(num):
    return {f"k{n}": 1 for n in range(num)}


def spellings(name):
    """In a $ref: each letter as itself or by its code."""
    return map("".join, itertools.product(*((letter, f"%{ord(letter):02x}") for letter in name)))


def inside_const(depth, value):
    for _ in range(depth):
        value = {"const": value}
    return value


def products(part):
    """Schemas that say many things of many others. `part`: one in so many of what fits into a request."""
    ways = [{"allOf": [{"$ref": "#/$defs/a"}, 1]}] * (600 // part)
    return {
        "anyOf times allOf": {"anyOf": [1] * (16_000 // part), "allOf": [1] * (16_000 // part)},
        "prefixItems times items": {
            "allOf": [{"prefixItems": [1] * (12_000 // part)}, *[{"items": {"a": 1}}] * (1_500 // part)]
        },
        "$ref to properties in each way": {"$defs": {"a": {"properties": keys(3_000 // part)}}, "anyOf": ways},
    }


HOSTILE = products(1) | {
    "properties times others": {"allOf": [{"properties": keys(2_500)}, *[{"additionalProperties": {"a": 1}}] * 1_000]},
    "$ref to anyOf, many times": {"$defs": {"a": {"anyOf": [1] * 15_000}}, "allOf": [{"$ref": "#/$defs/a"}] * 1_600},
    "$ref to properties, many times": {"$defs": {"a": {"properties": keys(3_000)}}, "allOf": [{"$ref": "#/$defs/a"}] * 990},
    "many said in each way": {"allOf": [*[{"a": 1}] * 1_000, {"anyOf": [1] * 990}]},
    "one place, many spellings": {
        "abcdefghijk": {"allOf": [{}] * 8_000},
        "items": {"anyOf": [{"$ref": f"#/{name}"} for name in itertools.islice(spellings("abcdefghijk"), 850)]},
    },
    "long $ref, many times": {
        "A" * 10_000: {},
        "$defs": {"a": {"$ref": "#/" + "%41" * 10_000}},
        "allOf": [{"$ref": "#/$defs/a"}] * 980,
    },
    "const in const": inside_const(900, [1] * 20_000),
}
"""None is compiled here: the check before that has to end soon, too, whether it refuses them or not."""


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_the_check_is_quick_however_the_schema_is_made(value):
    """0.05 to 0.4 s on two busy cores of an Intel Xeon; each took 1.6 s or far more when it built before it counted."""
    source = json.dumps(value, separators=(",", ":"))
    assert len(source) <= MAX_SOURCE_CHARS

    def check():
        with contextlib.suppress(Rejected):
            of_schema(source)

    assert thread_s(check) < 1


@pytest.mark.parametrize("value", products(2).values(), ids=products(2))
def test_the_check_counts_before_it_builds(value):
    """Up to 3.5 GB for the whole of them, where it built first. Tracing memory is slow, and half of them is enough."""
    source = json.dumps(value)
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="more than 2000 schemas"):
            of_schema(source)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_as_many_schemas_as_are_taken_are_taken():
    of_schema(json.dumps({"properties": keys(1_999)}))
    of_schema(json.dumps({"allOf": [{"anyOf": [True] * 43}, {"anyOf": [True] * 43}]}))
    with pytest.raises(Rejected, match="more than 2000 schemas"):
        of_schema(json.dumps({"properties": keys(2_000)}))


def test_item_of_thousands_of_digits_names_nothing():
    value = {"prefixItems": [{}], "allOf": [{"$ref": "#/prefixItems/" + "1" * 5_000}, {"type": "array"}]}
    with pytest.raises(Rejected, match="place inside it"):
        of_schema(json.dumps(value))


def strings(*lengths, **more):
    properties = {f"f{nth}": {"type": "string", "maxLength": length} | more for nth, length in enumerate(lengths)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize("more", [{}, {"pattern": r"^\S+$"}], ids=["plain", "pattern"])
def test_long_strings_are_followed_to_their_last_character(grammars, more):
    """Masks make up to 13 states for each character, and different lengths share none."""
    grammar_tokens, tokenizer = grammars
    lengths = (1500, 1000, 1001)
    matcher = compiled(grammars, strings(*lengths, **more))
    ids = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(n)) == 1}
    whole = json.dumps({f"f{nth}": "é" * length for nth, length in enumerate(lengths)}, ensure_ascii=False)
    for byte in whole.encode():
        matcher.mask()
        matcher.accept([ids[bytes([byte])]])
    matcher.accept([tokenizer.eos_token_ids[0]])
    assert grammar_tokens.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(strings(*lengths, **more))))
    assert not takes(grammars, strings(*lengths, **more), whole.replace("éé", "ééé", 1))


LONG_ANSWER = json_schema.MAX_SHORT_TOKENS + 1
LOOSE_TOOL = tool_source([Tool("t", strings(10**6))], BY_NAME["hermes"], is_parallel=True, has_trigger=True)
STRICT_TOOL = tool_source([Tool("t", strings(10**6), True)], BY_NAME["hermes"], is_parallel=True, has_trigger=True)
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": strings(10**6)}}


@pytest.mark.parametrize(
    ("grammar", "max_tokens", "is_taken"),
    [
        (strings(10_000, 5_000, 4_000, 2_000), 10**6, True),
        (strings(*range(471, 531)), 10**6, True),
        (strings(*[30_000] * 60), 10**6, True),
        (strings(524_288), LONG_ANSWER - 1, True),
        (strings(524_288), LONG_ANSWER, False),
        (strings(*range(30_000, 30_002)), LONG_ANSWER, False),
        ({"type": "string", "minLength": 40_000}, LONG_ANSWER, False),
        ({"type": "string", "maxLength": 4e5}, LONG_ANSWER, False),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"maxLength": 1e0005}'), LONG_ANSWER, False),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"\\u006daxLength": 100000}'), LONG_ANSWER, False),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"\\u006daxLength": 1000}'), LONG_ANSWER, True),
        ({"properties": {"maxLength": {"type": "string", "maxLength": 30_000}, "minLength": {}}}, LONG_ANSWER, True),
        (Grammar(GrammarKind.TOOLS, LOOSE_TOOL), LONG_ANSWER, True),
        (Grammar(GrammarKind.TOOLS, STRICT_TOOL), LONG_ANSWER, False),
        (Grammar(GrammarKind.TOOLS, LOOSE_TOOL, other=Grammar(GrammarKind.TOOLS, STRICT_TOOL)), LONG_ANSWER, False),
        (Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)), LONG_ANSWER, False),
        (Grammar(GrammarKind.REGEX, '"maxLength": 99999'), LONG_ANSWER, True),
        # These are refused as they are compiled, off the event loop.
        (Grammar(GrammarKind.JSON_SCHEMA, '{"maxLength": 99999'), LONG_ANSWER, True),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"maxLength": 1.2.3}'), LONG_ANSWER, True),
        (strings(*range(40_000, 44_000)), LONG_ANSWER, True),
    ],
)
def test_lengths_that_a_long_answer_could_exceed_the_automaton_with_are_refused_at_once(grammar, max_tokens, is_taken):
    if isinstance(grammar, dict):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(grammar))
    if is_taken:
        grammar.check_lengths(max_tokens)
        return
    with pytest.raises(Rejected, match=r"different minLength and maxLength of the \w+ add up to \d+, and at most 36000.*Lower"):
        grammar.check_lengths(max_tokens)


def test_a_tool_that_is_not_strict_may_have_longer_strings_than_can_be_counted():
    lark, is_followed = of_tools(LOOSE_TOOL, json.dumps)
    assert is_followed
    assert "maxLength" not in lark
    assert "1000000" in of_tools(STRICT_TOOL, json.dumps)[0]


def test_grammars_with_long_strings_leave_no_room_for_many_others(grammars):
    keeper = grammars[0]
    asked = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(strings(30_000, nth))) for nth in range(1, 5)]
    for grammar in asked:
        keeper.prepare(grammar)
    assert [keeper.known(grammar) is not None for grammar in asked] == [False, False, True, True]
