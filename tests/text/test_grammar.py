"""Grammars over small vocabularies: masks against brute force, limits, refusals."""

import json
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from random import Random

import pytest

from penstock.text import grammar as grammar_module
from penstock.text import grammar_matcher
from penstock.text.grammar import ANSWERS_PER_COMPILATION, MAX_LARK_CHARS, STACK_BYTES, Grammar, GrammarKind, Grammars
from penstock.text.grammar_source import of_lark
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import GrammarFailure, Rejected, RejectReason
from support.work_time import thread_s

UNUSED_IDS = 40
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"\n'


@pytest.fixture(params=["byte_level", "sentencepiece"], scope="module")
def tokenizer(request, byte_level_vocab, sentencepiece_vocab):
    vocab = byte_level_vocab() if request.param == "byte_level" else sentencepiece_vocab()
    return load_tokenizer(vocab, eos_token_ids=(1,))


@pytest.fixture
def grammars(tokenizer):
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size + UNUSED_IDS)


def regex(source):
    return Grammar(GrammarKind.REGEX, source)


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def lark(source):
    return Grammar(GrammarKind.GRAMMAR, source)


def choice(*values):
    return Grammar(GrammarKind.CHOICE, json.dumps(values))


def allowed_ids(matcher):
    mask = matcher.mask()
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def rests(language, text):
    """The texts that may follow one, by looking at every answer of a finite language."""
    return [answer[len(text) :] for answer in language if answer.startswith(text)]


def brute_force(tokenizer, rest):
    """Ids that may come next where the rest of the answer is one of these. [ascending]"""
    ids = set(tokenizer.eos_token_ids) if b"" in rest else set()
    for token_id in range(tokenizer.vocab_size):
        token = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
        if token and any(answer.startswith(token) for answer in rest):
            ids.add(token_id)
    return sorted(ids)


def check_every_state(grammars, tokenizer, grammar, language):
    """Check the masks of all texts that tokens can lead to."""
    waiting, seen = [()], set()
    while waiting:
        path = waiting.pop()
        text = b"".join(tokenizer.token_bytes(token_id) for token_id in path)
        matcher = grammars.matcher(grammar)
        matcher.accept(path)
        ids, rest, forced = allowed_ids(matcher), rests(language, text), matcher.forced()
        if not forced:
            assert ids == brute_force(tokenizer, rest), text
        elif rest == [b""]:
            assert ids == [*forced] == [tokenizer.eos_token_ids[0]]
        else:
            assert ids == [forced[0]]
            spelled = b"".join(map(tokenizer.token_bytes, forced))
            assert all(answer.startswith(spelled) for answer in rest), text
        for token_id in ids:
            longer = text + tokenizer.token_bytes(token_id)
            if token_id not in tokenizer.eos_token_ids and longer not in seen:
                seen.add(longer)
                waiting.append((*path, token_id))


@cache
def language_of(pattern, alphabet, max_chars):
    texts = ("".join(chars) for length in range(max_chars + 1) for chars in product(alphabet, repeat=length))
    return [text.encode() for text in texts if re.fullmatch(pattern, text)]


@pytest.mark.parametrize(
    ("pattern", "alphabet", "max_chars"),
    [
        ("the|then|in( the)?|and", "tehinad ", 6),
        ("a{2,4}b?|(ab){0,2}c{1,2}", "abc", 6),
        ("[é東ð]{1,2}", "é東ð", 2),
        ("1(2|23|/){1,2}", "123/", 5),
        ("^(a|b)$", "ab", 1),
        ('"\n#', '"\n#', 3),
    ],
)
def test_mask_of_a_regex_is_that_of_brute_force(grammars, tokenizer, pattern, alphabet, max_chars):
    check_every_state(grammars, tokenizer, regex(pattern), language_of(pattern, alphabet, max_chars))


@pytest.mark.parametrize(
    "choices",
    [
        ("the", "then", "the cat", "a (b|c)*"),
        ('say "the"', "\\d+\n", "#", "/the/", "// the", "'"),
        ("東京", "東京都", "été", "ét\u0301", "👋", "👋🏽"),
        (" the", "the ", "  "),
    ],
)
def test_mask_of_a_choice_is_that_of_brute_force(grammars, tokenizer, choices):
    check_every_state(grammars, tokenizer, choice(*choices), [text.encode() for text in choices])


def test_only_end_tokens_among_the_special_ones_and_no_unused_id_are_ever_allowed(grammars, tokenizer):
    ids = allowed_ids(grammars.matcher(regex(r"(?s:.*)")))
    spelled = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if not tokenizer.is_special(token_id) and _is_utf8_part(tokenizer.token_bytes(token_id))
    }
    assert set(ids) == spelled | set(tokenizer.eos_token_ids)
    assert len(tokenizer.eos_token_ids) == 2


def _is_utf8_part(text):
    """Could it be the beginning of a text?"""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return bool(text)


@pytest.mark.parametrize("num_more", range(33))
def test_mask_is_a_whole_number_of_words(tokenizer, num_more):
    vocab_size = tokenizer.vocab_size + num_more
    matcher = Grammars(tokenizer, vocab_size=vocab_size).matcher(regex("a"))
    assert len(matcher.mask()) == (vocab_size + 31) // 32 * 4


def test_forbidden_token_is_a_failure(grammars, tokenizer):
    for token_id in (*tokenizer.encode("x", add_special_tokens=False)[-1:], tokenizer.vocab_size, tokenizer.eos_token_ids[0]):
        matcher = grammars.matcher(regex("the|that"))
        with pytest.raises(GrammarFailure):
            matcher.accept((token_id,))
        with pytest.raises(GrammarFailure):
            matcher.mask()


def test_special_token_is_a_failure(grammars, tokenizer):
    special = next(n for n in range(tokenizer.vocab_size) if tokenizer.is_special(n) and n not in tokenizer.eos_token_ids[:1])
    matcher = grammars.matcher(regex("the"))
    with pytest.raises(GrammarFailure):
        matcher.accept((special,))


def test_every_end_token_ends_an_answer_and_nothing_else_follows(grammars, tokenizer):
    for end_id in tokenizer.eos_token_ids:
        for text in ("the", "then"):
            matcher = grammars.matcher(regex("the|then"))
            matcher.accept(spell(tokenizer, text))
            matcher.accept((end_id,))
            assert allowed_ids(matcher) == sorted(tokenizer.eos_token_ids)


def spell(tokenizer, text):
    """A token for each byte."""
    ids = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(n)) == 1}
    return [ids[bytes([byte])] for byte in text.encode()]


def random_answer(grammars, tokenizer, grammar, random, max_tokens=3000):
    """Each token drawn from those that the mask allows; ends when it may. None if it did not come to an end."""
    matcher, ids = grammars.matcher(grammar), []
    for _ in range(max_tokens):
        allowed = allowed_ids(matcher)
        if set(allowed) & set(tokenizer.eos_token_ids):
            return b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
        ids.append(random.choice(allowed))
        matcher.accept(ids[-1:])
    return None


def is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS = {
    "object": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 2, "maxLength": 5},
                "age": {"type": "integer", "minimum": 17, "maximum": 130},
                "kind": {"enum": ["a", 1, None, {"x": [True]}]},
                "nick": {"type": "string", "maxLength": 3},
            },
            "required": ["name", "age", "kind"],
            "additionalProperties": False,
        },
        lambda value: (
            {"name", "age", "kind"} <= set(value) <= {"name", "age", "kind", "nick"}
            and 2 <= len(value["name"]) <= 5
            and is_int(value["age"])
            and 17 <= value["age"] <= 130
            and value["kind"] in ["a", 1, None, {"x": [True]}]
            and len(value.get("nick", "")) <= 3
        ),
    ),
    "arrays": (
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "minItems": 2,
            "maxItems": 3,
        },
        lambda value: 2 <= len(value) <= 3 and all(len(item) <= 2 and all(x in (True, False) for x in item) for item in value),
    ),
    "pattern": (
        {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
        lambda value: re.fullmatch("[A-C]{2}-[0-9]{1,3}", value),
    ),
    "formats": (
        {
            "type": "array",
            "prefixItems": [{"format": "date"}, {"format": "uuid"}, {"format": "ipv4"}],
            "items": False,
            "minItems": 3,
        }
        | {"prefixItems": [{"type": "string", "format": name} for name in ("date", "uuid", "ipv4")]},
        lambda value: (
            re.fullmatch(r"\d{4}-\d\d-\d\d", value[0])
            and re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value[1])
            and all(int(part) < 256 for part in value[2].split("."))
        ),
    ),
    "union": (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": "n"}, "n": {"multipleOf": 5, "type": "integer"}}},
                {"type": "object", "properties": {"t": {"const": "b"}, "b": {"type": "boolean"}}},
            ]
        },
        None,
    ),
    "list": ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, lambda value: is_int(value["v"])),
    "number": ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2}, lambda value: 0.5 < value <= 2),
}
for option in SCHEMAS["union"][0]["oneOf"]:
    option |= {"required": list(option["properties"]), "additionalProperties": False}
SCHEMAS["union"] = (
    SCHEMAS["union"][0],
    lambda value: (value["t"] == "n" and value["n"] % 5 == 0) or (value["t"] == "b" and value["b"] in (True, False)),
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_mask_allows_ends_as_json_of_the_schema(grammars, tokenizer, name):
    random, (value, is_valid), num_ended = Random(name), SCHEMAS[name], 0
    for _ in range(20):
        text = random_answer(grammars, tokenizer, schema(value), random)
        if text is not None:
            num_ended += 1
            assert is_valid(json.loads(text)), text
    assert num_ended >= 10


def test_json_object_is_an_object_with_anything_inside(grammars, tokenizer):
    matcher = grammars.matcher(Grammar(GrammarKind.JSON_OBJECT))
    assert {tokenizer.token_bytes(token_id)[:1] for token_id in allowed_ids(matcher)} == {b"{"}
    matcher.accept(spell(tokenizer, '{"a": [1, -2.5e3, null, {"b": "\\u0007"}],\n  "": true}'))
    assert allowed_ids(matcher) == [tokenizer.eos_token_ids[0]]


@pytest.mark.parametrize("indent", ["  ", "    ", "\t"])
def test_pretty_printed_and_compact_json_are_both_allowed(grammars, tokenizer, indent):
    value = {"a": [{"b": {"c": [[], {}, [1, 2]]}}], "d": "é", "e": {}}
    for text in (
        json.dumps(value, indent=indent, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    ):
        grammars.matcher(Grammar(GrammarKind.JSON_OBJECT)).accept(spell(tokenizer, text))


@pytest.mark.parametrize("value", [{"type": "object"}, SCHEMAS["object"][0], SCHEMAS["arrays"][0]])
def test_white_space_between_tokens_comes_to_an_end(grammars, tokenizer, value):
    """By whoever writes as much of it as is allowed: no run is longer than a deep indentation."""
    white = {
        n for n in range(tokenizer.vocab_size) if tokenizer.token_bytes(n) and not tokenizer.token_bytes(n).strip(b" \t\r\n")
    }
    for seed in range(5):
        random, matcher, text = Random(seed), grammars.matcher(schema(value)), b""
        for _ in range(300):
            allowed = allowed_ids(matcher)
            if set(allowed) <= set(tokenizer.eos_token_ids):
                break
            is_inside_string = text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2 == 1
            spaces = [] if is_inside_string else sorted(white & set(allowed))
            token_id = random.choice(spaces or [n for n in allowed if n not in tokenizer.eos_token_ids])
            text += tokenizer.token_bytes(token_id)
            matcher.accept((token_id,))
            if not is_inside_string:
                assert len(text) - len(text.rstrip()) <= 33


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *[(name, {}) for name in ("not", "if", "contains", "dependencies", "dependentSchemas", "x-guidance")],
        *[(name, {"a": ["b"]}) for name in ("dependentRequired",)],
        *[(name, True) for name in ("uniqueItems", "unevaluatedItems", "exclusiveMinimum", "exclusiveMaximum")],
        ("$dynamicRef", "#"),
        ("propertyNames", {"pattern": "a"}),
        ("minContains", 1),
        ("multipleOf", 99_999_989),
    ],
)
@pytest.mark.parametrize("draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"])
def test_what_is_not_supported_is_refused_wherever_it_stands(grammars, keyword, value, draft):
    for whole in (
        {keyword: value},
        {"properties": {"a": {"items": {keyword: value}}}},
        {"$defs": {"a": {"anyOf": [{keyword: value}]}}, "$ref": "#/$defs/a"},
    ):
        with pytest.raises(Rejected, match=re.escape(keyword)) as caught:
            grammars.matcher(schema({"$schema": draft} | whole))
        assert caught.value.reason is RejectReason.INVALID


@pytest.mark.parametrize(
    "value",
    [
        {"type": "integer", "minimum": -1e30, "maximum": -1e29},  # ended the process
        {"type": "integer", "minimum": 2**64 - 6, "maximum": 2**64 - 1},  # answered with 2**63 - 1
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "number", "exclusiveMaximum": -(10**25)},
        {"type": "number", "minimum": 5e-324},
        {"type": "number", "multipleOf": -3},
        {"type": "string", "maxLength": 2**32},
        {"const": 12345678901234567},  # answered with 12345678901234568
        {"enum": [1, {"a": [2**60]}]},
    ],
)
def test_numbers_that_are_not_followed_to_the_digit_are_refused(grammars, value):
    for whole in (value, {"properties": {"a": value}}, {"$defs": {"a": value}, "$ref": "#/$defs/a"}):
        with pytest.raises(Rejected, match=r"A json_schema takes .* not .*") as caught:
            grammars.matcher(schema(whole))
        assert caught.value.reason is RejectReason.INVALID


@pytest.mark.parametrize("number", [0, 2**53 - 1, -(2**53), 0.5])
def test_other_numbers_are_followed(grammars, tokenizer, number):
    for value in ({"const": number}, {"type": "number", "minimum": number, "maximum": number + 1}):
        matcher = grammars.matcher(schema(value))
        matcher.accept(spell(tokenizer, json.dumps(number)))
        assert set(tokenizer.eos_token_ids) & set(allowed_ids(matcher))


def test_unique_items_that_need_not_be_are_nothing_asked(grammars, tokenizer):
    value = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
    grammars.matcher(schema(value)).accept(spell(tokenizer, "[1,1]"))


def test_what_was_refused_is_not_compiled_again(grammars):
    """`known` compiles nothing."""
    wrong = regex("(a+")
    assert grammars.known(wrong) is None
    with pytest.raises(Rejected) as first:
        grammars.matcher(wrong)
    for ask in (grammars.matcher, grammars.known):
        with pytest.raises(Rejected) as again:
            ask(wrong)
        assert again.value.detail == first.value.detail


def test_properties_and_values_may_be_called_like_what_is_not_supported(grammars, tokenizer):
    names = ["not", "if", "contains", "x-guidance"]
    value = {"properties": {name: {"const": {"not": 1}} for name in names}, "required": names, "type": "object"}
    text = json.dumps({name: {"not": 1} for name in names})
    grammars.matcher(schema(value)).accept(spell(tokenizer, text))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 50_000), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 2000 + "{}" + "}" * 2000), "not JSON|nested too deeply|2000 schemas"),
        (Grammar(GrammarKind.JSON_SCHEMA, "3"), "must be a JSON object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "\\ud800"}'), "can't be followed"),
        (schema({"type": "strin"}), "strin"),
        (schema({"enum": []}), "can't be followed"),
        (schema({"type": "string", "format": "colour"}), "colour"),
        (schema({"$ref": "https://example.org/schema"}), "example.org"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "anyOf"),
        (schema({"type": "string", "pattern": "^(?=a)b"}), "look-around"),
        (Grammar(GrammarKind.CHOICE, "[]"), "at least one"),
        (Grammar(GrammarKind.CHOICE, '["a", ""]'), "none of them empty"),
        (Grammar(GrammarKind.CHOICE, '["a", 1]'), "strings?"),
        (regex("[a"), "unclosed"),
        (regex("[^\\s\\S]"), "No answer"),
        (regex(r"\Aü\Z"), r"not known: \\Z\. Write \$ for \\Z"),
        (schema({"type": "string", "pattern": r"^a\h+"}), r"not known: \\h\."),
        (regex("a" * 10_000), "10000 characters"),
        (regex("\ud800"), "surrogate"),
        (lark('start: "a'), "line 1, column 10"),
        (lark('start: a\n a: "b" c\n'), "line 2"),
        (lark("start: <[1]>"), "special tokens"),
        (lark('start: <|end|> "a"'), "special tokens"),
        (lark('start: a\na[temperature=0.5]: "a"'), "temperature"),
        (lark('start: a\na[lazy, max_tokens=5]: "a"'), "max_tokens"),
        (lark('start: %json {"type": "integer"}'), "JSON schema inside"),
        (lark('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'), "can't be followed"),
        (lark("start: A\nA: " + " & ".join(f"/.*{n}.*/" for n in range(30))), "29 operators"),
        (lark('start: "' + "a" * 20_000 + '"'), "characters"),
    ],
)
def test_wrong_grammar_is_refused_in_few_words(grammars, grammar, says):
    with pytest.raises(Rejected, match=says) as caught:
        grammars.matcher(grammar)
    assert caught.value.reason is RejectReason.INVALID
    assert len(str(caught.value)) < 600
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["[" * MAX_LARK_CHARS, '"' + r"\"" * (MAX_LARK_CHARS // 2 - 1), "/" + r"\/" * (MAX_LARK_CHARS // 2 - 1)],
    ids=["brackets", "quotes", "slashes"],
)
def test_lark_is_searched_in_time_with_its_length(source):
    """Milliseconds; 1 to 5 s when each of them began a search to the end."""
    assert thread_s(lambda: of_lark(source)) < 0.3


@pytest.mark.parametrize("source", [r'start: \<a> "x"', r'start: "a" \[ "b"', 'start: "a" \\" "b"', r'\// start: "a"'])
def test_backslash_outside_of_literals_is_refused(grammars, source):
    """It is not searched, so that it must not pass."""
    with pytest.raises(Rejected, match="lexer error"):
        grammars.matcher(lark(source))


def test_what_looks_unsupported_inside_a_literal_of_lark_is_text(grammars, tokenizer):
    text = '<|end|> %json [temperature=1] \\ " // </a> &&&&&~~~~~~'
    source = f"start: {json.dumps(text)} /<b>\\/\\//  // <[5]> stop\n"
    grammars.matcher(lark(source)).accept(spell(tokenizer, text + "<b>//"))


def write(tokenizer, matcher, num_tokens):
    """Some of what is allowed, and no end while there is something else."""
    random = Random(1)
    for _ in range(num_tokens):
        allowed = allowed_ids(matcher)
        matcher.accept((random.choice([n for n in allowed if n not in tokenizer.eos_token_ids] or allowed),))


def chain(length, node):
    return {"$defs": {f"d{n}": node(f"#/$defs/d{n + 1}") for n in range(length)} | {f"d{length}": {}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "grammar",
    [
        schema(chain(1800, lambda ref: {"$ref": ref})),
        schema(chain(800, lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}})),
        schema(chain(650, lambda ref: {"allOf": [{"$ref": ref}, {"type": "object"}]})),
        lark("start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(900)) + 'r900: "b"\n'),
        lark("start: R0\n" + "".join(f'R{n}: "a" R{n + 1}\n' for n in range(900)) + 'R900: "b"\n'),
    ],
    ids=["refs", "properties", "allOf", "rules", "terminals"],
)
def test_long_chain_of_rules_does_not_end_the_process(grammars, tokenizer, grammar):
    matcher, random = grammars.matcher(grammar), Random(1)
    for _ in range(50):
        matcher.accept(
            (random.choice([n for n in allowed_ids(matcher) if n not in tokenizer.eos_token_ids] or allowed_ids(matcher)),)
        )


@pytest.mark.parametrize(
    "grammar",
    [
        lark(AMBIGUOUS),
        regex("((a{0,100}){0,100}){0,100}"),
        schema({"enum": [{"a": n, "b": [n]} for n in range(2300)]}),
    ],
    ids=["ambiguous", "repetitions", "enum"],
)
def test_grammar_that_becomes_too_large_fails_its_answer_with_a_remedy(grammars, tokenizer, grammar):
    with pytest.raises(GrammarFailure, match=r"too large.*Make it simpler"):
        write(tokenizer, grammars.matcher(grammar), 1000)


def test_failure_of_one_answer_is_not_that_of_the_next(grammars, tokenizer):
    failed = grammars.matcher(lark(AMBIGUOUS))
    with pytest.raises(GrammarFailure):
        failed.accept(spell(tokenizer, "ab" * 1000))
    assert grammars.known(lark(AMBIGUOUS)) is None
    grammars.matcher(lark(AMBIGUOUS)).accept(spell(tokenizer, "abba"))
    assert grammars.known(lark(AMBIGUOUS)) is not None


def test_a_grammar_that_became_too_large_is_not_kept(grammars, tokenizer):
    """It has tens of megabytes; another one is asked for, and not this one again."""
    failed = grammars.matcher(lark(AMBIGUOUS))
    with pytest.raises(GrammarFailure):
        failed.accept(spell(tokenizer, "ab" * 1000))
    compiled = weakref.ref(failed._compiled)
    del failed
    grammars.matcher(regex("another"))
    assert compiled() is None


@pytest.mark.parametrize("inside", ['"b"){1,2}', "/[a-z]/)+", '"c")?'])
def test_terminals_inside_terminals_take_little_of_what_there_is(grammars, inside):
    """Time and memory go with the square of their number, and llguidance's limits do not count them: 5 s in 64 KiB."""
    source = "start: R0\n" + "".join(f"R{n}: (R{n + 1} {inside}\n" for n in range(2000)) + 'R2000: "b"\n'
    with pytest.raises(Rejected, match="at most 16384"):
        grammars.matcher(lark(source))


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+$", "(a?){50}a{50}", "([a-z]+)+[0-9]", ".*.*.*=.*"])
def test_catastrophic_regex_is_followed_like_any_other(grammars, tokenizer, pattern):
    grammars.matcher(regex(pattern)).accept(spell(tokenizer, "a" * 60))


def test_matchers_of_one_grammar_are_independent(grammars, tokenizer):
    first, second = (grammars.matcher(regex("the|and")) for _ in range(2))
    first.accept(spell(tokenizer, "the"))
    assert {tokenizer.token_bytes(n)[:1] for n in allowed_ids(second)} == {b"t", b"a"}
    assert allowed_ids(first) == [tokenizer.eos_token_ids[0]]


def test_grammar_is_compiled_once_and_anew_after_many_answers(grammars):
    for _ in range(ANSWERS_PER_COMPILATION):
        grammars.matcher(regex("a"))
    assert grammars.known(regex("a")) is None
    grammars.matcher(regex("a"))
    assert grammars.known(regex("a")) is not None


def test_a_call_that_needs_more_answers_than_are_left_takes_none(grammars):
    grammars.prepare(regex("a"))
    few, most = 4, ANSWERS_PER_COMPILATION - 3
    assert len(grammars.known(regex("a"), None, most)) == most
    assert grammars.known(regex("a"), None, few) is None
    assert len(grammars.known(regex("a"), None, few - 1)) == few - 1
    assert grammars.known(regex("a")) is None


def test_a_grammar_is_prepared_anew_for_more_answers_than_are_left(grammars):
    grammars.prepare(regex("a"))
    grammars.known(regex("a"), None, ANSWERS_PER_COMPILATION - 2)
    grammars.prepare(regex("a"), None, 4)
    assert len(grammars.known(regex("a"), None, 4)) == 4


def test_few_grammars_are_kept_the_latest_used(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_KEPT", 3)
    for source in ("a", "b", "c", "a", "d"):
        grammars.matcher(regex(source))
    assert [grammars.known(regex(source)) is not None for source in "abcd"] == [True, False, True, True]


def test_few_characters_of_grammars_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_KEPT_CHARS", 100)
    for source in ("a" * 40, "b" * 40, "b" * 40, "c" * 40):
        grammars.matcher(regex(source))
    assert [grammars.known(regex(source * 40)) is not None for source in "abc"] == [False, True, True]


def test_threads_that_ask_at_once_get_the_same(tokenizer):
    wanted = [
        regex("the|and"),
        choice("a", "the cat"),
        schema(SCHEMAS["object"][0]),
        Grammar(GrammarKind.JSON_OBJECT),
        lark(AMBIGUOUS),
    ]
    alone = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
    expected = [alone.matcher(grammar).mask() for grammar in wanted]
    together = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(lambda n: together.matcher(wanted[n % len(wanted)]).mask(), range(200)))
    assert masks == expected * (200 // len(wanted))


def test_two_models_that_compile_at_once_leave_the_usual_stack(tokenizer, monkeypatch):
    """Its size is the process's. Each has to find the one that was there before either."""
    sizes, first_set, second_set = [0], threading.Event(), threading.Event()

    def stack_size(size):
        sizes.append(size)
        if first_set.is_set():
            second_set.set()
        else:
            first_set.set()
            second_set.wait(0.2)  # in vain where the second has to wait for the first
        return sizes[-2]

    monkeypatch.setattr(threading, "stack_size", stack_size)
    models = [Grammars(tokenizer, vocab_size=tokenizer.vocab_size) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(models[0].matcher, regex("a"))
        assert first_set.wait(20)
        pool.submit(models[1].matcher, regex("a")).result()
        first.result()
    assert sizes == [0, STACK_BYTES, 0, STACK_BYTES, 0]


def test_model_without_an_end_token_is_told_so(byte_level_vocab):
    tokenizer = load_tokenizer(byte_level_vocab(eos_token_id=None))
    with pytest.raises(Rejected, match="no end token"):
        Grammars(tokenizer, vocab_size=tokenizer.vocab_size).matcher(regex("a"))


def test_nothing_is_imported_before_the_first_grammar():
    code = "import sys, penstock.deploy.factory, penstock.text.grammar; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def forced_after(grammars, grammar, *texts):
    """The forced tokens after these tokens of an answer."""
    matcher = grammars.matcher(grammar)
    for token_ids in texts:
        assert matcher.mask() is not None
        matcher.accept(token_ids)
    return matcher.forced()


def test_forced_text_is_cut_as_the_tokenizer_cuts_it(grammars, tokenizer):
    """But for its end, where a longer token could still come."""
    text = "the cat and the 123 in"
    first, *others = tokenizer.encode(text, add_special_tokens=False, is_continuation=True)
    forced = forced_after(grammars, regex(f"{text}[a-z]"), (first,))
    assert forced == tuple(others[: len(forced)])
    assert len(forced) >= len(others) - 2
    assert forced_after(grammars, choice("the", "then", "tab"), spell(tokenizer, "t")) == ()


def test_few_short_texts_are_cut_once_and_kept(tokenizer, monkeypatch):
    cut = []

    class Counting:
        @staticmethod
        def encode(text, **how):
            cut.append(text)
            return tokenizer.encode(text, **how)

    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    vocabulary = grammar_matcher._Vocabulary(tokens, 1, Counting(), lambda: None)
    monkeypatch.setattr(grammar_matcher, "MAX_CUTS", 2)
    for text in ("the", "cat", "the", "a", "a", "the", "long" * 20, "long" * 20):
        spelled = [tokens[token_id] for token_id in vocabulary(text.encode())]
        assert b"".join(spelled) == text.encode()
    assert cut == ["the", "cat", "a", "the", "long" * 20, "long" * 20]


def test_forced_tokens_are_the_same_one_by_one_and_at_once(grammars, tokenizer):
    first = spell(tokenizer, "a")
    forced = forced_after(grammars, regex("a the 123 the cat"), first)
    assert len(forced) > 2
    matcher = grammars.matcher(regex("a the 123 the cat"))
    matcher.accept(first)
    for nth, token_id in enumerate(forced):
        assert matcher.forced() == forced[nth:]
        assert allowed_ids(matcher) == [token_id]
        matcher.accept((token_id,))


def test_a_sampled_token_that_the_tokenizer_would_not_write_leaves_the_rest_to_it(grammars, tokenizer):
    """A byte of "the" came alone; forced tokens spell the rest."""
    forced = forced_after(grammars, regex("the cat"), spell(tokenizer, "t"))
    assert b"he cat".startswith(b"".join(map(tokenizer.token_bytes, forced)))
    assert forced


def test_the_tokenizer_s_own_end_is_forced_behind_a_complete_answer(grammars, tokenizer):
    assert forced_after(grammars, regex("the"), spell(tokenizer, "the")) == tokenizer.eos_token_ids[:1]
    assert forced_after(grammars, regex("the(n)?"), spell(tokenizer, "the")) == ()


def test_the_end_is_forced_once(grammars, tokenizer):
    matcher = grammars.matcher(regex("the"))
    matcher.accept(spell(tokenizer, "the"))
    matcher.accept(matcher.forced())
    assert matcher.forced() == matcher.copy().forced() == ()
    assert allowed_ids(matcher) == sorted(tokenizer.eos_token_ids)
    matcher.accept(tokenizer.eos_token_ids[:1])
    assert matcher.forced() == ()


def test_forced_text_that_looks_like_a_special_token_is_spelled(grammars, tokenizer):
    name = next(tokenizer.token_text(n) for n in range(tokenizer.vocab_size) if tokenizer.is_special(n))
    assert len(name) > 2
    forced = forced_after(grammars, regex(f"a {re.escape(name)}!"), spell(tokenizer, "a"))
    assert not any(map(tokenizer.is_special, forced))
    assert f" {name}!".encode().startswith(b"".join(map(tokenizer.token_bytes, forced)))
    assert len(forced) > 2


def test_text_that_is_part_of_a_character_is_forced(grammars, tokenizer):
    first, *others = spell(tokenizer, "東")
    forced = forced_after(grammars, regex("東x"), (first,))
    assert "東x".encode()[1:].startswith(b"".join(map(tokenizer.token_bytes, forced)))
    assert others


def test_a_grammar_may_leave_every_token_to_the_model(grammars, tokenizer):
    source = 'start: "the cat"\n%llguidance {"no_forcing": true}\n'
    assert forced_after(grammars, lark(source), spell(tokenizer, "t")) == ()
