"""Calls whose arguments are tagged parameters: read with the types of their schema, and held to it."""

import contextlib
import json
from random import Random

import pytest

from penstock.text.answers import AnswerForm, CallArguments, CallEnd, gather
from penstock.text.dialects import BY_NAME
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.parameters import ANY_TYPE, as_json, parameter_types, types_of
from penstock.text.tool_grammar import Tool, of_tools, tool_source, types_in
from penstock.types.errors import GrammarFailure, Rejected
from support.answering import END_ID, PLAIN, allowed, make_tokenizer, say, wander
from support.work_time import thread_s

TAGGED = [name for name, one in BY_NAME.items() if one.ways[0].parameter is not None]
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "line": {"type": "integer", "minimum": 0},
        "unit": {"enum": ["c", "cm", "f"]},
        "until": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "all": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["path", "line"],
    "$defs": {"tag": {"type": "object", "properties": {"n": {"type": "string", "maxLength": 3}}, "required": ["n"]}},
}
TOOLS = [Tool("edit", SCHEMA), Tool("now", None)]
CODE = 'def f():\n\tif a < b:\n\t\treturn "ü\\n" </b>\n'
# Written by hand after the models' published chat templates: two calls, behind words.
RECORDED = {
    "qwen3_coder": f"""I edit.

<tool_call>
<function=edit>
<parameter=path>
src/a.py
</parameter>
<parameter=text>
{CODE}
</parameter>
<parameter=line>
12
</parameter>
<parameter=tags>
[{{"n": "x"}}]
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>""",
    "glm45": f"""I edit.
<tool_call>edit
<arg_key>path</arg_key>
<arg_value>src/a.py</arg_value>
<arg_key>text</arg_key>
<arg_value>{CODE}</arg_value>
<arg_key>line</arg_key>
<arg_value>12</arg_value>
<arg_key>tags</arg_key>
<arg_value>[{{"n": "x"}}]</arg_value>
</tool_call>
<tool_call>now
</tool_call>""",
    "seed_oss": f"""I edit.
<seed:tool_call>
<function=edit>
<parameter=path>src/a.py</parameter>
<parameter=text>{CODE}</parameter>
<parameter=line>12</parameter>
<parameter=tags>[{{"n": "x"}}]</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=now>
</function>
</seed:tool_call>""",
    "minimax_m2": f"""I edit.
<minimax:tool_call>
<invoke name="edit">
<parameter name="path">src/a.py</parameter>
<parameter name="text">{CODE}</parameter>
<parameter name="line">12</parameter>
<parameter name="tags">[{{"n": "x"}}]</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>""",
}
GLM_4_7 = (
    f"I edit.<tool_call>edit<arg_key>path</arg_key><arg_value>src/a.py</arg_value><arg_key>text</arg_key><arg_value>{CODE}"
    '</arg_value><arg_key>line</arg_key><arg_value>12</arg_value><arg_key>tags</arg_key><arg_value>[{"n": "x"}]</arg_value>'
    "</tool_call><tool_call>now</tool_call>"
)
ARGUMENTS = {"path": "src/a.py", "text": CODE, "line": 12, "tags": [{"n": "x"}]}


def grammar_of(name, *tools, has_trigger=False):
    return Grammar(GrammarKind.TOOLS, tool_source(tools or TOOLS, BY_NAME[name], is_parallel=True, has_trigger=has_trigger))


def form_of(name, *tools):
    return AnswerForm(tools=BY_NAME[name], types=types_in(grammar_of(name, *tools).source))


def read(form, pieces):
    reader = form.reader(str)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return [*parts, *reader.finish()]


@pytest.mark.parametrize(("name", "text"), [*RECORDED.items(), ("glm45", GLM_4_7)])
def test_recorded_answers_are_read_however_they_are_cut(name, text):
    whole = gather(read(form_of(name), [text]))
    assert whole.content == "I edit."
    assert [call.name for call in whole.calls] == ["edit", "now"]
    assert [json.loads(call.arguments) for call in whole.calls] == [ARGUMENTS, {}]
    for pieces in [list(text), *([text[:at], text[at:]] for at in range(len(text)))]:
        assert gather(read(form_of(name), pieces)) == whole


@pytest.mark.parametrize("name", TAGGED)
def test_recorded_answers_follow_the_grammar(name):
    grammars = Grammars(PLAIN, vocab_size=PLAIN.vocab_size)
    text = RECORDED[name].partition("I edit.")[2].lstrip()
    matcher = grammars.matcher(grammar_of(name))
    say(matcher, PLAIN, text)
    assert END_ID in allowed(matcher, PLAIN)


def test_strings_are_streamed_as_they_come():
    text = RECORDED["qwen3_coder"]
    pieces = [part.text for part in read(form_of("qwen3_coder"), list(text)) if isinstance(part, CallArguments)]
    assert max(map(len, pieces)) < 20
    assert len(pieces) > len(CODE)


def has_cut_call(parts):
    return any(isinstance(part, CallEnd) and not part.is_whole for part in parts)


@pytest.mark.parametrize("name", TAGGED)
def test_a_cut_call_keeps_its_text_and_what_is_no_parameter_ends_it(name):
    text = RECORDED[name]
    form, begin = form_of(name), text.index("src/a.py")
    for cut in range(begin, text.index("12")):
        parts = read(form, [text[:cut]])
        answer = gather(parts)
        assert has_cut_call(parts)
        assert answer.calls == []
        assert (answer.content.replace("I edit.", "", 1).strip()) == text[:cut].replace("I edit.", "", 1).strip()
    odd = text.replace(BY_NAME[name].ways[0].parameter.before + "line", "oh")
    parts = read(form, list(odd))
    answer = gather(parts)
    assert answer.calls == []
    assert has_cut_call(parts)
    assert "oh" in answer.content


def special(name):
    """The marks of the format are special tokens of the model."""
    return make_tokenizer(("<|eos|>", *sorted(AnswerForm(tools=BY_NAME[name]).marks)))


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", TAGGED)
def test_whatever_the_grammar_allows_is_read_as_arguments_of_the_schema(name, is_special):
    tokenizer = special(name) if is_special else PLAIN
    short = {**SCHEMA["properties"], "path": {"type": "string", "minLength": 1, "maxLength": 4}}
    short |= {"text": {"type": "string", "maxLength": 5}, "until": {"type": ["string", "null"], "enum": ["x", None, ""]}}
    short["tags"] = {**short["tags"], "maxItems": 2}
    tools = [Tool("edit", SCHEMA | {"properties": short}), Tool("now", None)]
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
    for seed in range(8):
        text = wander(grammars.matcher(grammar_of(name, *tools)), tokenizer, Random(seed))
        answer = gather(read(form_of(name, *tools), list(text)))
        assert answer.content == ""
        assert answer.calls
        for call in answer.calls:
            found = json.loads(call.arguments)
            if call.name == "now":
                assert found == {}
                continue
            assert {"path", "line"} <= found.keys() <= short.keys()
            assert isinstance(found["path"], str)
            assert len(found["path"]) <= 4
            assert type(found["line"]) is int
            assert found.get("unit", "c") in ("c", "cm", "f")
            assert found.get("until", "x") in ("x", None, "")
            assert type(found.get("all", True)) is bool
            assert all(len(tag["n"]) <= 3 for tag in found.get("tags", []))


def texts_of(tool, text):
    grammars = Grammars(PLAIN, vocab_size=PLAIN.vocab_size)
    matcher = grammars.matcher(grammar_of("seed_oss", tool))
    say(matcher, PLAIN, f"<seed:tool_call>\n<function={tool.name}>\n{text}")
    return {PLAIN.token_text(token_id) for token_id in allowed(matcher, PLAIN)}


def test_other_parameters_are_those_that_the_schema_allows():
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    for tool, has_more in (
        (Tool("f", schema), False),
        (Tool("f", schema, is_strict=True), True),
        (Tool("f", schema | {"additionalProperties": True}), True),
        (Tool("f", {"type": "object"}), True),
        (Tool("f", {"anyOf": [schema]}), True),
    ):
        assert ("b" in texts_of(tool, "<parameter=")) == has_more
        if has_more:
            assert "<" in texts_of(tool, "<parameter=b>x</parameter>\n<parameter=c>\ny\n</parameter>\n")
    assert "2" not in texts_of(Tool("f", schema), "<parameter=a>")


@pytest.mark.parametrize(
    "odd",
    [
        {"properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"properties": {"a": {"type": "string", "maxLength": 3000}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}}},
        {"properties": {"a": {"allOf": [{"type": "string", "minLength": 2}]}}},
        {"properties": {"a": {"type": "integer", "not": {}}}},
        {"properties": {"a<b": {"type": "string"}}, "required": ["a<b"]},
        {"$ref": "#/no"},
    ],
)
def test_a_strict_schema_that_tags_can_t_follow_is_refused_and_another_is_followed_in_part(odd):
    with pytest.raises(Rejected, match="The tool 'f'"):
        texts_of(Tool("f", odd, is_strict=True), "")
    assert "<" in texts_of(Tool("f", odd), "")


@pytest.mark.parametrize(
    "odd",
    [
        {"anyOf": 3},
        {"anyOf": []},
        {"enum": 3},
        {"enum": []},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "string", "maxLength": "many"},
        {"type": "odd"},
        {"type": []},
        {"$ref": 3},
        {"const": {"a": [1]}},
        3,
        True,
    ],
)
def test_a_schema_that_is_none_breaks_nothing(odd):
    for is_strict in (False, True):
        tool = Tool("f", {"type": "object", "properties": {"a": odd, "b": {"type": "integer"}}}, is_strict=is_strict)
        with contextlib.suppress(Rejected):
            assert "<" in texts_of(tool, "")


def test_definitions_that_name_others_often_cost_no_more():
    definitions = {f"d{nth}": {"anyOf": [{"$ref": f"#/$defs/d{nth + 1}"}] * 40} for nth in range(14)}
    schema = {"$defs": {**definitions, "d14": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    assert parameter_types(schema) == {"a": {"null"}}
    schema["$defs"]["d14"] = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}
    assert parameter_types(schema) == {"a": ANY_TYPE}


def with_definitions(num, size):
    """A schema whose parameters refer to a definition each, which refers to another."""
    definitions = {f"d{nth}": {"type": "array", "items": {"$ref": f"#/$defs/e{nth}"}} for nth in range(num)}
    definitions |= {f"e{nth}": {"enum": list(range(nth, nth + size))} for nth in range(num)}
    return {"$defs": definitions, "properties": {f"p{nth}": {"$ref": f"#/$defs/d{nth}"} for nth in range(num)}}


def test_a_parameter_s_grammar_has_only_the_definitions_that_it_needs():
    source = grammar_of("seed_oss", Tool("f", with_definitions(50, 5))).source
    lark, are_followed = of_tools(source, json.dumps)
    assert are_followed
    assert len(lark) < 10 * len(source)
    assert '"e7"' in lark
    assert texts_of(Tool("f", with_definitions(50, 5)), "<parameter=p7>[") & {"7", '"'} == {"7"}


@pytest.mark.parametrize(
    ("ref", "next_text"),
    [
        ("#/$defs/x", "1"),
        ("#/definitions/y/items", "1"),
        ("#/properties/x", "1"),
        ("u#/$defs/x", "1"),
        ("#", "{"),
        ("#/$defs/z", "["),
    ],
)
def test_a_ref_in_a_parameter_begins_at_the_tool_s_schema_or_else_at_its_own(ref, next_text):
    number, text = {"type": "integer"}, {"type": "string"}
    inside = {"type": "object", "properties": {"x": text, "a": {"$ref": ref}}, "$defs": {"x": text, "z": {"type": "array"}}}
    schema = {"type": "object", "properties": {"x": number, "o": inside}, "$defs": {"x": number}}
    schema |= {"definitions": {"y": {"type": "array", "items": number}}} | ({"$id": "u"} if ref[0] == "u" else {})
    for is_strict in (False, True):
        found = texts_of(Tool("f", schema, is_strict=is_strict), '<parameter=o>{"a": ')
        assert found & {"1", "{", "[", '"'} == {next_text}


def test_definitions_are_copied_to_few_parameters():
    schema = {"$defs": {"d": {"enum": list(range(4000))}}, "properties": {}}
    schema["properties"] = {f"p{nth}": {"type": "array", "minItems": nth, "items": {"$ref": "#/$defs/d"}} for nth in range(300)}
    with pytest.raises(Rejected, match="from fewer parameters"):
        of_tools(grammar_of("seed_oss", Tool("f", schema)).source, json.dumps)
    lark, are_followed = of_tools(grammar_of("seed_oss", Tool("f", schema)).source, json.dumps, lambda _: None)
    assert not are_followed
    assert len(lark) < 500_000


def test_equal_parameters_of_a_schema_that_can_t_be_followed_are_compiled_once(monkeypatch):
    compiled, compile_lark = [], Grammars._of_lark
    monkeypatch.setattr(Grammars, "_of_lark", lambda self, *args: compiled.append(args) or compile_lark(self, *args))
    texts_of(
        Tool(
            "f", {"properties": {f"p{nth}": {"type": "integer"} for nth in range(50)} | {"odd": {"type": "integer", "not": {}}}}
        ),
        "",
    )
    assert len(compiled) < 5


def arguments_of(name, schema, text, *, is_special=False, is_strict=True):
    """Arguments that the grammar allows, as they are read."""
    tool, tokenizer = Tool("f", schema, is_strict=is_strict), special(name) if is_special else PLAIN
    matcher = Grammars(tokenizer, vocab_size=tokenizer.vocab_size).matcher(grammar_of(name, tool))
    say(matcher, tokenizer, text)
    assert END_ID in allowed(matcher, tokenizer)
    [call] = gather(read(form_of(name, tool), list(text))).calls
    return json.loads(call.arguments)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("key", ["a b", 'a"b', "a=b", " ü/\\.*", "x" * 100])
def test_a_parameter_may_have_any_name_that_a_tag_can_have(key, name, is_special):
    way, schema = BY_NAME[name].ways[0], {"type": "object", "properties": {key: {"type": "integer"}}}
    text = way.begin + way.written("f", {key: 1}) + way.end
    for is_strict, more in ((True, {}), (False, {}), (False, {"additionalProperties": True})):
        found = arguments_of(name, schema | more, text, is_special=is_special, is_strict=is_strict)
        assert found == {key: 1}


def call_of(*parameters):
    texts = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters)
    return f"<tool_call>\n<function=f>\n{texts}</function>\n</tool_call>"


def only(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("types", [ANY_TYPE, {"object"}])
@pytest.mark.parametrize(
    ("begun", "piece", "count"), [("", " ", 8_000), ("<parameter=p>", "a", 32_000), ("<parameter=p>", "<", 32_000)]
)
def test_long_values_and_white_space_in_small_pieces_take_little_time(types, begun, piece, count):
    form = AnswerForm(tools=BY_NAME["qwen3_coder"], tool_names=frozenset({"f"}), types={"f": {"p": frozenset(types)}})

    def read():
        reader = form.reader(str)
        reader.push("<tool_call>\n<function=f>" + begun)
        for _ in range(count):
            reader.push(piece)

    assert thread_s(read) < 0.4


def test_json_may_have_the_closing_tag_in_a_string():
    schema = only({"type": "array", "items": {"type": "string"}})
    text = call_of(("a", r'["</parameter>", "\"</parameter>", "\\"]'))
    assert arguments_of("qwen3_coder", schema, text) == {"a": ["</parameter>", '"</parameter>', "\\"]}


@pytest.mark.parametrize("is_special", [False, True])
def test_a_string_never_misses_its_length(is_special):
    schema = only({"type": "string", "minLength": 3, "maxLength": 30})

    def text_of(value):
        return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"

    assert arguments_of("glm45", schema, text_of("a\n\n"), is_special=is_special) == {"a": "a\n\n"}
    for value in ("", "ab"):
        with pytest.raises((AssertionError, GrammarFailure)):
            arguments_of("glm45", schema, text_of(value), is_special=is_special)


def test_no_string_spells_the_closing_tag_in_letters():
    """A reader would take it for the token."""
    tokenizer = special("glm45")
    matcher = Grammars(tokenizer, vocab_size=tokenizer.vocab_size).matcher(grammar_of("glm45"))
    say(matcher, tokenizer, "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>x")
    for char in "</arg_value":
        say(matcher, tokenizer, char)
    assert ">" not in {tokenizer.token_text(token_id) for token_id in allowed(matcher, tokenizer)}


def test_the_line_break_before_the_closing_tag_is_no_character_of_a_string():
    schema = only({"type": "string", "minLength": 3})
    for value in ("a\n\n", "abc"):
        assert arguments_of("qwen3_coder", schema, call_of(("a", value))) == {"a": value}
    assert arguments_of("qwen3_coder", schema, call_of(("a", "abc")).replace("c\n", "c")) == {"a": "abc"}
    with pytest.raises(AssertionError):
        arguments_of("qwen3_coder", schema, call_of(("a", "ab")))
    assert arguments_of("qwen3_coder", only({"enum": ["x\n", 1]}), call_of(("a", "x\n"))) == {"a": "x\n"}


def test_further_parameters_have_no_names_of_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b|c": {}}, "required": ["a"]}
    assert arguments_of("qwen3_coder", schema, call_of(("a", 1), ("b", 2), ("ab", "x"))) == {"a": 1, "b": 2, "ab": "x"}
    for name in ("a", "b|c"):
        with pytest.raises(AssertionError):
            arguments_of("qwen3_coder", schema, call_of(("a", 1), ("d", 1), (name, "x")))


@pytest.mark.parametrize("values", [["x</parameter>", "y"], ["1", 2]])
def test_values_of_an_enum_that_tags_can_t_tell_are_refused_for_strict_tools(values):
    with pytest.raises(Rejected, match="two values that look the same"):
        arguments_of("qwen3_coder", only({"enum": values}), "")
    assert arguments_of("qwen3_coder", only({"enum": values}), call_of(("a", values[1])), is_strict=False) == {"a": values[1]}


def test_strict_strings_may_have_lengths_an_enum_or_other_types_beside_them():
    for schema in (
        {"type": "string", "maxLength": 9},
        {"enum": ["x", None]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": ["string", "boolean"]},
        {},
    ):
        tool = Tool("f", {"type": "object", "properties": {"a": schema}, "additionalProperties": False}, is_strict=True)
        assert "x" in texts_of(tool, "<parameter=a>")
    assert "1" not in texts_of(Tool("f", {"properties": {"a": {"type": "string", "enum": ["x", 1]}}}), "<parameter=a>")


def test_an_integer_of_an_enum_is_a_number():
    schema = only({"type": ["number", "string"], "enum": [1, 2.5, "auto"]})
    for value in (1, 2.5, "auto"):
        assert arguments_of("qwen3_coder", schema, call_of(("a", value))) == {"a": value}


def test_a_string_ends_with_its_tag_and_has_its_length():
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}}
    assert "<" in texts_of(Tool("f", schema), "<parameter=a>xy")
    assert texts_of(Tool("f", schema), "<parameter=a>xyz") == {"</"}
    with pytest.raises((AssertionError, GrammarFailure)):
        texts_of(Tool("f", schema), "<parameter=a>x</parameter>\n</function>")


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5", {"number"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("5", {"string", "number", "integer"}, "5"),
        ("null", {"string", "null"}, "null"),
        ("None", {"null"}, "null"),
        ("True", {"boolean"}, "true"),
        (' [1, "a"]\n', {"array"}, '[1, "a"]'),
        ('"a"', {"integer"}, '"a"'),
        ('"a"', ANY_TYPE, r'"\"a\""'),
        ("NaN", {"number"}, '"NaN"'),
        ("{1}", {"object"}, '"{1}"'),
        ("[" * 100_000, ANY_TYPE, f'"{"[" * 100_000}"'),
        ("a\nü", ANY_TYPE, r'"a\nü"'),
    ],
)
def test_a_value_is_of_a_type_that_is_allowed(text, types, expected):
    assert as_json(text, frozenset(types)) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, ANY_TYPE),
        ({}, ANY_TYPE),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": 3}, ANY_TYPE),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number", "integer"}),
        ({"type": ["number", "string"]}, {"number", "integer", "string"}),
        ({"type": ["number", "string"], "enum": [1, 2, "auto"]}, {"integer", "string"}),
        ({"type": ["integer", "string"], "enum": [1, 1.5, "auto"]}, {"integer", "string"}),
        ({"type": "integer", "anyOf": [{"type": "number"}, {"type": "string"}]}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"const": {}}]}, {"string", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"array"}),
        ({"$ref": "#/$defs/b"}, ANY_TYPE),
        ({"$ref": "#/$defs/c/d"}, ANY_TYPE),
        ({"$ref": "#/$defs/e~1f%20g"}, {"string"}),
        ({"$ref": "#/$defs/h/anyOf/0"}, {"null"}),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "https://example.org/own#/$defs/a"}, {"array"}),
        ({"$ref": "other.json"}, ANY_TYPE),
    ],
)
def test_types_are_those_that_a_schema_allows(schema, expected):
    definitions = {"a": {"type": "array"}, "b": {"$ref": "#/$defs/b"}, "e/f g": {"type": "string"}}
    root = {"$id": "https://example.org/own", "type": "object", "$defs": {**definitions, "h": {"anyOf": [{"type": "null"}]}}}
    assert types_of(schema, root, {}) == expected
