"""Matchers that let an answer pass until its grammar begins, over single bytes and over tokens that reach across marks."""

import json
from dataclasses import replace
from random import Random

import pytest

from penstock.text.answer_matcher import AnswerPlan, begin_all
from penstock.text.answers import Answer, AnswerForm, gather
from penstock.text.dialects import BY_NAME, TOOL_FORMATS
from penstock.text.grammar import ANSWERS_PER_COMPILATION, Grammar, GrammarKind, Grammars, Lead
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tool_grammar import Tool, tool_source
from penstock.types.errors import GrammarFailure, Rejected
from support.answering import ALL, END_ID, PLAIN, REASONING, SPECIAL, TAGS, allowed, say, wander
from support.work_time import growth

TOOLS = [
    Tool("get", {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}),
    Tool("get_x", None),
]


def matcher_of(tokenizer, grammar, plan):
    return ALL[id(tokenizer)].matcher(grammar, plan) if grammar else ALL[id(tokenizer)].free_matcher(plan)


def calls(name, *, has_trigger, is_parallel=True, lead=None, tools=TOOLS):
    source = tool_source(tools, BY_NAME[name], is_parallel=is_parallel, has_trigger=has_trigger)
    return Grammar(GrammarKind.TOOLS, source, lead)


def auto(name, **fields):
    names = frozenset(tool.name for tool in TOOLS)
    return calls(name, has_trigger=True), AnswerPlan(trigger_of=BY_NAME[name], tool_names=names, **fields)


def across(tokenizer, text):
    [token_id] = [each for each in range(tokenizer.vocab_size) if tokenizer.token_bytes(each) == text.encode()]
    return token_id


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", BY_NAME)
def test_calls_are_free_until_the_trigger_and_valid_after_it(name, tokenizer):
    for way in BY_NAME[name].ways:
        for seed in range(3):
            matcher = matcher_of(tokenizer, *auto(name))
            is_first = BY_NAME[name].only_at_start or name == "openai" or way.has_no_mark
            before, begin = "" if is_first else "Hi <there>! ", way.trigger + f"get{way.parts[1][0]}" * way.has_no_mark
            for char in before:
                say(matcher, tokenizer, char)
            if before:
                assert matcher.mask() is None
            say(matcher, tokenizer, begin)
            assert END_ID not in allowed(matcher, tokenizer)
            text = wander(matcher, tokenizer, Random(seed), before + begin)
            reasoning = REASONING["openai"] if name == "openai" else None
            form = AnswerForm(tools=BY_NAME[name], tool_names=frozenset(["get", "get_x"]), reasoning=reasoning)
            reader = form.reader(str)
            answer = gather(reader.push(text) + reader.finish())
            assert answer.content == before.rstrip()
            assert answer.calls
            for call in answer.calls:
                check(call)


def check(call):
    arguments = json.loads(call.arguments)
    if call.name == "get":
        assert set(arguments) == {"a"}
        assert 0 <= arguments["a"] <= 99
    else:
        assert (call.name, arguments) == ("get_x", {})


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("name", BY_NAME)
def test_calls_that_have_to_come_begin_with_the_answer(name, is_parallel):
    for seed in range(3):
        matcher = ALL[id(SPECIAL)].matcher(calls(name, has_trigger=False, is_parallel=is_parallel))
        text = wander(matcher, SPECIAL, Random(seed))
        reasoning = REASONING["openai"] if name == "openai" else None
        names = frozenset(["get", "get_x"])
        reader = AnswerForm(tools=BY_NAME[name], tool_names=names, is_free=False, reasoning=reasoning).reader(str)
        answer = gather(reader.push(text) + reader.finish())
        assert answer.calls
        assert answer.content == ""
        list(map(check, answer.calls))
        say(matcher, SPECIAL, "")
        if not is_parallel:
            assert len(answer.calls) == 1


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGS], ids=["plain", "special"])
def test_a_token_that_reaches_across_a_trigger_is_allowed_if_a_call_may_go_on_with_it(tokenizer):
    matcher = matcher_of(tokenizer, *auto("hermes"))
    say(matcher, tokenizer, "a <tool")
    ids = allowed(matcher, tokenizer)
    assert END_ID in ids  # it may still be text
    assert across(tokenizer, "_call>x") not in ids
    say(matcher, tokenizer, "_call")
    ids = allowed(matcher, tokenizer)
    assert {across(tokenizer, ">\n"), across(tokenizer, '>{"')} <= ids
    matcher.accept((across(tokenizer, '>{"'),))
    assert allowed(matcher, tokenizer) == {across(tokenizer, "name")}


@pytest.mark.parametrize("name", BY_NAME)
def test_marks_that_are_special_tokens_count_if_they_are_spelled_in_others(name):
    for way in BY_NAME[name].marked:
        matcher = matcher_of(SPECIAL, *auto(name))
        for char in way.trigger:
            say(matcher, SPECIAL, char)
        assert END_ID not in allowed(matcher, SPECIAL)


def test_text_that_only_begins_like_a_trigger_is_free_again():
    matcher = matcher_of(PLAIN, *auto("hermes"))
    say(matcher, PLAIN, "a <tool")
    assert matcher.mask() is not None
    say(matcher, PLAIN, "s> ")
    assert matcher.mask() is None


def test_a_program_may_name_the_module_functools():
    matcher = matcher_of(PLAIN, *auto("phi4_mini_json"))
    say(matcher, PLAIN, "import functools")
    assert {END_ID, across(PLAIN, "\n"), across(PLAIN, "[")} <= allowed(matcher, PLAIN)
    say(matcher, PLAIN, "\n@functools.cache")
    assert matcher.mask() is None


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGS], ids=["plain", "special"])
@pytest.mark.parametrize("reasoning", [None, REASONING["think"]])
def test_a_trigger_at_the_start_counts_there_alone(reasoning, tokenizer):
    typed = '{"type": "function", "name": "get"'
    for call in ('{"name": "get"', '<|python_tag|>{"name":', typed, f"<|python_tag|>{typed}"):
        matcher = matcher_of(tokenizer, *auto("llama3_json", reasoning=reasoning))
        say(matcher, tokenizer, f" {call}")
        assert END_ID not in allowed(matcher, tokenizer)
        matcher = matcher_of(tokenizer, *auto("llama3_json", reasoning=reasoning))
        say(matcher, tokenizer, f"So {call}")
        assert matcher.mask() is None
    matcher = matcher_of(tokenizer, *auto("llama3_json", reasoning=reasoning))
    say(matcher, tokenizer, '{"name": "Ada", "age": 3}')
    assert matcher.mask() is None


@pytest.mark.parametrize("text", ["Write <function=get>, or `<function=", "<function=other>\n<function"])
def test_words_may_mention_the_tag_of_a_call(text):
    matcher = matcher_of(PLAIN, *auto("qwen3_coder"))
    for char in text:
        say(matcher, PLAIN, char)
        assert END_ID in allowed(matcher, PLAIN)
    say(matcher, PLAIN, "\n<function=")
    assert END_ID not in allowed(matcher, PLAIN)


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("hermes", '{"name": "get"'),
        ("llama3_json", '{"name": "get"'),
        ("llama3_json", '<|python_tag|>{"name":'),
        ("hermes", "<think>"),
    ],
)
def test_nothing_begins_an_answer_after_long_white_space(name, begin):
    for num_blank, is_free in ((256, False), (257, True)):
        matcher = matcher_of(PLAIN, *auto(name, reasoning=REASONING["think"], max_reasoning_tokens=0))
        for char in "\n" * num_blank + begin:
            say(matcher, PLAIN, char)
        assert (matcher.mask() is None) == is_free


@pytest.mark.parametrize(("num_more", "is_free"), [(254, False), (255, True)])
def test_white_space_in_the_token_that_ends_the_reasoning_counts(num_more, is_free):
    matcher = matcher_of(PLAIN, *auto("llama3_json", reasoning=REASONING["think"], is_reasoning=True))
    say(matcher, PLAIN, "Hm</thin")
    matcher.accept((across(PLAIN, "k>\n\n"),))
    say(matcher, PLAIN, "\n" * num_more + '<|python_tag|>{"name":')
    assert (matcher.mask() is None) == is_free


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_an_answer_of_white_space_takes_little_time(name):
    token_id = across(PLAIN, "\n")

    def follow(num_tokens):
        matcher = matcher_of(PLAIN, *auto(name, reasoning=REASONING["think"]))
        for _ in range(num_tokens):
            matcher = matcher.copy()
            matcher.accept([token_id])

    assert growth(follow, 5_000) < 8


@pytest.mark.parametrize("before", ["", "\n \n", "<think>a {</think>\n\n"])
def test_a_call_without_a_mark_is_held_to_the_grammar_from_the_name_of_a_tool_on(before):
    for text in ('```json\n{\n    "name": "get', '{"name":  "get', '{ "name": "get_x'):
        matcher = matcher_of(PLAIN, *auto("hermes", reasoning=REASONING["think"]))
        for char in before + text:
            say(matcher, PLAIN, char)
            assert END_ID in allowed(matcher, PLAIN)
        say(matcher, PLAIN, '"')
        assert {PLAIN.token_text(token_id) for token_id in allowed(matcher, PLAIN)} == {","}
        matcher = matcher_of(PLAIN, *auto("hermes", reasoning=REASONING["think"]))
        say(matcher, PLAIN, f'{before}{text}z", "arguments": ')
        assert matcher.mask() is None
        say(matcher, PLAIN, "<tool_call>")
        assert END_ID not in allowed(matcher, PLAIN)


def test_a_token_may_have_the_end_of_the_reasoning_and_the_beginning_of_a_call():
    matcher = matcher_of(PLAIN, *auto("hermes", reasoning=REASONING["think"], is_reasoning=True))
    say(matcher, PLAIN, "Hm</thin")
    matcher.accept((across(PLAIN, "k>{"),))
    say(matcher, PLAIN, '"name": "get", "arguments": {"a": 1')
    assert across(PLAIN, "x") not in allowed(matcher, PLAIN)
    say(matcher, PLAIN, "}}")
    assert END_ID in allowed(matcher, PLAIN)


def test_what_no_call_can_be_is_text():
    """A token with a whole trigger and more comes unmasked."""
    matcher = matcher_of(PLAIN, *auto("hermes"))
    matcher.accept(tuple(PLAIN.encode("<tool", add_special_tokens=False)))
    matcher.accept((across(PLAIN, "_call>x"),))  # the mask forbids it
    assert matcher.mask() is None


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", REASONING)
def test_what_has_to_come_comes_behind_the_reasoning(name, tokenizer):
    marks = REASONING[name]
    lead = Lead(marks.open, marks.close, marks.lead, marks.separator)
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{2}", lead)
    plan = AnswerPlan(reasoning=marks)
    for text in (f"{marks.open}Hm <b>, 7\n{marks.close}{marks.separator}{marks.lead}12", f"{marks.lead}12"):
        matcher = matcher_of(tokenizer, grammar, plan)
        say(matcher, tokenizer, text[:-2])
        assert not {END_ID, across(tokenizer, "a")} & allowed(matcher, tokenizer)
        say(matcher, tokenizer, text[-2:])
        assert allowed(matcher, tokenizer) == {END_ID}
    for close in ([marks.close], marks.close):  # its marks as special tokens, or spelled in others
        matcher = matcher_of(tokenizer, grammar, AnswerPlan(reasoning=marks, is_reasoning=True))
        say(matcher, tokenizer, "Hm")
        assert END_ID not in allowed(matcher, tokenizer)  # the answer is still to come
        for piece in (*close, f"{marks.separator}{marks.lead}12"):
            say(matcher, tokenizer, piece)
        assert allowed(matcher, tokenizer) == {END_ID}


STARTS = [" yes", "    yes", "\n- yes", "\n\nyes", "\n\n\n", "yes"]


@pytest.mark.parametrize("with_tools", [False, True], ids=["alone", "beside tools"])
@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", REASONING)
def test_white_space_that_a_grammar_writes_behind_the_reasoning_is_read(name, tokenizer, with_tools):
    marks = REASONING[name]
    lead = Lead(marks.open, marks.close, marks.lead, marks.separator)
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(STARTS))
    if with_tools:
        grammar = replace(calls("openai" if name == "openai" else "hermes", has_trigger=False), other=grammar)
    grammar = replace(grammar, lead=lead)
    form = AnswerForm(reasoning=marks, has_exact_start=grammar.has_exact_start)
    if with_tools:
        form = replace(
            form, tools=BY_NAME["openai" if name == "openai" else "hermes"], tool_names=frozenset(["get"]), is_free=False
        )
    for start in STARTS:
        for block in ("", f"{marks.open}Hm.{marks.close}{marks.separator}"):
            text = f"{block}{marks.lead}{start}"
            matcher = matcher_of(tokenizer, grammar, AnswerPlan(reasoning=marks))
            say(matcher, tokenizer, text)
            assert END_ID in allowed(matcher, tokenizer)
            for pieces in ([text], text):
                reader = form.reader(str)
                answer = gather([part for piece in pieces for part in reader.push(piece)] + reader.finish())
                assert answer == Answer(content=start, reasoning="Hm." if block else "")


@pytest.mark.parametrize("name", [name for name, marks in REASONING.items() if not marks.lead])
def test_a_model_separates_the_reasoning_as_it_is_used_to_if_no_choice_begins_with_white_space(name):
    marks = REASONING[name]
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no, not"]), Lead(marks.open, marks.close, "", marks.separator))
    for lines in ("", "\n", "\n\n"):
        text = f"{marks.open}Hm.{marks.close}{lines}yes"
        matcher = matcher_of(SPECIAL, grammar, AnswerPlan(reasoning=marks))
        say(matcher, SPECIAL, text)
        assert END_ID in allowed(matcher, SPECIAL)
        reader = AnswerForm(reasoning=marks, has_exact_start=grammar.has_exact_start).reader(str)
        assert gather(reader.push(text) + reader.finish()) == Answer(content="yes", reasoning="Hm.")


def test_an_answer_that_is_cut_within_the_separator_has_no_content():
    form = AnswerForm(reasoning=REASONING["think"], is_reasoning=True, has_exact_start=True)
    for cut in ("", "\n", "\n\n"):
        reader = form.reader(str)
        assert gather(reader.push(f"Hm.</think>{cut}") + reader.finish()) == Answer(reasoning="Hm.")


def test_no_space_is_put_before_an_opened_block_of_reasoning(sentencepiece_vocab):
    tokenizer, marks = load_tokenizer(sentencepiece_vocab()), REASONING["think"]
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{2}", Lead(marks.open, marks.close))
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
    matcher = grammars.matcher(grammar, AnswerPlan(reasoning=marks, is_reasoning=True))
    for text in ("Hm</think>", "12"):
        matcher.accept(tuple(tokenizer.encode(text, add_special_tokens=False, is_continuation=True)))
    assert allowed(matcher, tokenizer) == {*tokenizer.eos_token_ids}


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGS], ids=["plain", "special"])
def test_a_token_may_reach_across_the_end_of_the_reasoning(tokenizer):
    marks, token_id = REASONING["think"], across(tokenizer, "k>{")
    lead = Lead(marks.open, marks.close)
    plan = AnswerPlan(reasoning=marks, is_reasoning=True)
    matcher = matcher_of(tokenizer, Grammar(GrammarKind.JSON_OBJECT, "", lead), plan)
    say(matcher, tokenizer, "Hm</thin")
    matcher.accept((token_id,))
    assert across(tokenizer, "}") in allowed(matcher, tokenizer)
    with pytest.raises(GrammarFailure):
        matcher.accept((token_id,))
    matcher = matcher_of(tokenizer, Grammar(GrammarKind.REGEX, "a", lead), plan)
    say(matcher, tokenizer, "Hm</thin")
    assert token_id not in allowed(matcher, tokenizer)


def test_a_token_may_have_the_end_of_one_mark_and_the_beginning_of_the_next():
    marks = REASONING["think"]
    matcher = matcher_of(PLAIN, Grammar(GrammarKind.REGEX, "a", Lead(marks.open, marks.close)), AnswerPlan(reasoning=marks))
    say(matcher, PLAIN, "<think")
    matcher.accept((across(PLAIN, "><"),))
    say(matcher, PLAIN, "/think>a")
    assert allowed(matcher, PLAIN) == {END_ID}


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("name", REASONING)
def test_the_end_of_the_reasoning_is_forced_when_its_budget_is_used_up(name, budget):
    marks = REASONING[name]
    for is_bound in (True, False):
        lead = Lead(marks.open, marks.close, marks.lead)
        grammar = Grammar(GrammarKind.REGEX, "[0-9]{2}", lead) if is_bound else None
        plan = AnswerPlan(reasoning=marks, max_reasoning_tokens=budget)
        matcher = matcher_of(SPECIAL, grammar, plan)
        say(matcher, SPECIAL, marks.open + "a" * budget)
        text, forced = b"", marks.forced + ("" if is_bound else marks.lead)
        for _ in SPECIAL.encode(forced, add_special_tokens=False):
            [token_id] = allowed(matcher, SPECIAL)
            text += SPECIAL.token_bytes(token_id)
            matcher.accept((token_id,))
        assert text.decode() == forced
        say(matcher, SPECIAL, f"{marks.lead * is_bound}12")
        assert (matcher.mask() is None) == (not is_bound)


def test_tokens_accepted_together_may_cross_the_budget():
    plan = AnswerPlan(reasoning=REASONING["think"], is_reasoning=True, max_reasoning_tokens=2)
    matcher = matcher_of(PLAIN, None, plan)
    matcher.accept(PLAIN.encode("ab\n</", add_special_tokens=False))
    assert allowed(matcher, PLAIN) == {across(PLAIN, "t")}


def test_reasoning_then_free_text_then_a_call():
    grammar, plan = auto("hermes", reasoning=REASONING["think"])
    matcher = matcher_of(PLAIN, grammar, plan)
    say(matcher, PLAIN, "<think>a <tool_call>x")
    assert matcher.mask() is None
    say(matcher, PLAIN, "</think> So <tool_call>")
    assert END_ID not in allowed(matcher, PLAIN)
    grammar, plan = auto("openai", reasoning=REASONING["openai"])
    analysis = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    begun = [f"<|channel|>{channel} to=functions." for channel in ("commentary", "analysis")]
    for header in (*begun, " to=functions."):
        for text in (header, analysis + header):
            matcher = matcher_of(SPECIAL, grammar, plan)
            say(matcher, SPECIAL, text)
            assert {SPECIAL.token_text(token_id)[0] for token_id in allowed(matcher, SPECIAL)} == {"g"}, text
    in_text = matcher_of(SPECIAL, grammar, replace(plan, reasoning=None))  # as where a message is continued
    say(in_text, SPECIAL, " to=functions.")
    assert in_text.mask() is None


def test_a_mask_does_not_change_while_nothing_is_accepted():
    matcher = matcher_of(PLAIN, *auto("hermes"))
    say(matcher, PLAIN, "a <tool")
    assert matcher.mask() is matcher.mask()


def test_schemas_of_tools_that_are_not_strict_are_closed_and_those_that_are_strict_stay():
    def texts(tool):
        matcher = ALL[id(PLAIN)].matcher(calls("hermes", has_trigger=False, tools=[tool]))
        say(matcher, PLAIN, '<tool_call>\n{"name": "f", "arguments": {"a": 1')
        return {PLAIN.token_text(token_id) for token_id in allowed(matcher, PLAIN)}

    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    assert "," not in texts(Tool("f", schema))
    assert "," in texts(Tool("f", schema, is_strict=True))
    assert "," in texts(Tool("f", schema | {"additionalProperties": True}))


ITEM = {"type": "object", "properties": {"x": {"const": 1}}}
TREE = {"type": "object", "properties": {"x": {"const": 1}, "more": {"items": {"$ref": "#/$defs/tree"}}}}
NAMED = {"$ref": "#/$defs/item"}
FURTHER = {"properties": {"y": {"const": 2}}, "required": ["y"]}


@pytest.mark.parametrize(
    ("schema", "text", "is_closed"),
    [
        (NAMED, '{"x": 1', True),
        ({"anyOf": [NAMED, {"type": "null"}]}, '{"x": 1', True),
        ({"oneOf": [ITEM, {"type": "integer"}]}, '{"x": 1', True),
        ({"prefixItems": [ITEM]}, '[{"x": 1', True),
        ({"allOf": [NAMED], "description": "an item"}, '{"x": 1', True),
        ({"$ref": "#/$defs/tree"}, '{"x": 1, "more": [{"x": 1, "more": []', True),
        ({"anyOf": [ITEM | {"additionalProperties": True}]}, '{"x": 1', False),
        (NAMED | FURTHER, '{"x": 1', False),
        ({"allOf": [NAMED, FURTHER]}, '{"x": 1', False),
        ({"anyOf": [NAMED]} | FURTHER, '{"x": 1', False),
        (NAMED | {"patternProperties": {"^y": {"const": 2}}}, '{"x": 1', False),
        ({"anyOf": [NAMED], "additionalProperties": {"type": "integer"}}, '{"x": 1', False),
        ({"anyOf": [ITEM | {"required": ["y"]}]}, '{"x": 1', False),
        ({"properties": {"b": ITEM}, "anyOf": [{"properties": {"b": FURTHER}}]}, '{"b": {"x": 1', False),
        ({"properties": {"b": ITEM}, "anyOf": [{"required": ["b"]}]}, '{"b": {"x": 1', True),
    ],
)
def test_schemas_inside_others_are_closed_unless_they_are_combined(schema, text, is_closed):
    tool = Tool("f", {"properties": {"a": schema}, "required": ["a"], "$defs": {"item": ITEM, "tree": TREE}})
    matcher = ALL[id(PLAIN)].matcher(calls("hermes", has_trigger=False, tools=[tool]))
    say(matcher, PLAIN, f'<tool_call>\n{{"name": "f", "arguments": {{"a": {text}')
    found = {PLAIN.token_text(token_id) for token_id in allowed(matcher, PLAIN)}
    assert ("," in found) != is_closed
    if not is_closed:
        say(matcher, PLAIN, f', "y": 2{"}" * text.count("{")}}}}}\n</tool_call>')


def test_beside_calls_without_a_mark_json_of_a_schema_may_begin_as_they_do():
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"const": 7}}, "required": ["name", "age"]}
    form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(person))
    for text in ('{"name": "Bob", "age": 7}', '{"name": "get", "age": 7}', '{"name": "get", "parameters": {"a": 1}}'):
        for tokenizer in (PLAIN, SPECIAL):
            matcher = ALL[id(tokenizer)].matcher(replace(calls("llama3_json", has_trigger=False), other=form))
            say(matcher, tokenizer, text)
            assert END_ID in allowed(matcher, tokenizer)


def test_a_strict_schema_that_can_not_be_followed_is_refused_and_another_is_any_object():
    for odd in (
        {"properties": {"a": {"not": {}}}},
        {"properties": {"a": {"type": "string", "format": "odd"}}},
        {"$ref": "#/no"},
    ):
        with pytest.raises(Rejected, match=r"can't be followed|'f'"):
            ALL[id(PLAIN)].matcher(calls("hermes", has_trigger=False, tools=[Tool("f", odd, is_strict=True), *TOOLS]))
        matcher = ALL[id(PLAIN)].matcher(calls("hermes", has_trigger=False, tools=[Tool("f", odd), *TOOLS]))
        say(matcher, PLAIN, '<tool_call>\n{"name": "f", "arguments": {"a": [{}]}}\n</tool_call>')
        matcher = ALL[id(PLAIN)].matcher(calls("hermes", has_trigger=False, tools=[Tool("f", odd), *TOOLS]))
        say(matcher, PLAIN, '<tool_call>\n{"name": "get", "arguments": {"')
        assert across(PLAIN, "b") not in allowed(matcher, PLAIN)


def test_names_that_begin_alike_are_told_apart():
    tools = [Tool("get", None), Tool("get_", None), Tool("get_x", None), Tool("g", None)]
    for one in TOOL_FORMATS:
        for tool in tools:
            matcher = ALL[id(SPECIAL)].matcher(calls(one.name, has_trigger=False, tools=tools))
            way = one.ways[0]
            say(matcher, SPECIAL, way.begin + way.written(tool.name, {}) + way.end)
            assert END_ID in allowed(matcher, SPECIAL)


def test_tokens_are_forced_inside_a_call_and_nowhere_before():
    matcher = matcher_of(SPECIAL, *auto("hermes"))
    for char in "Hi ":
        assert matcher.forced() == ()
        say(matcher, SPECIAL, char)
    say(matcher, SPECIAL, '<tool_call>{"')
    forced = matcher.forced()
    assert SPECIAL.decode(forced, is_continuation=True).startswith("name")
    for token_id in forced:
        assert allowed(matcher, SPECIAL) == {token_id}
        matcher.accept((token_id,))


def test_the_end_of_the_reasoning_is_forced_token_by_token():
    """A token may complete the mark before the others have come."""
    matcher = matcher_of(PLAIN, None, AnswerPlan(reasoning=REASONING["think"], is_reasoning=True, max_reasoning_tokens=2))
    say(matcher, PLAIN, "ab")
    text = ""
    while forced := matcher.forced():
        assert allowed(matcher, PLAIN) == {*forced}
        text += PLAIN.decode(forced, is_continuation=True)
        matcher.accept(forced)
    assert "</think>" in text


@pytest.mark.parametrize(
    ("plan", "begins_free"),
    [
        (auto("hermes")[1], True),
        (AnswerPlan(reasoning=REASONING["think"], is_reasoning=True), True),
        (AnswerPlan(reasoning=REASONING["think"]), False),
    ],
    ids=["a trigger", "a block that has begun", "a block that may begin"],
)
def test_answers_that_begin_free_need_one_compilation_however_many_they_are(plan, begins_free):
    """The others are in their grammar from the first token, and one compilation has so many answers alone."""
    grammars, number = Grammars(PLAIN, vocab_size=PLAIN.vocab_size), ANSWERS_PER_COMPILATION + 1
    think = REASONING["think"]
    grammar = auto("hermes")[0] if plan.trigger_of else Grammar(GrammarKind.REGEX, "a", Lead(think.open, think.close))
    grammars.prepare(grammar, plan, number)
    matchers = grammars.known(grammar, plan, number)
    assert (matchers is not None and len(matchers) == number) == begins_free


@pytest.mark.parametrize("name", [name for name in BY_NAME if any(not way.parameter for way in BY_NAME[name].unmarked)])
def test_a_beginning_that_is_no_call_leaves_the_grammar_compiled(name):
    grammars = Grammars(PLAIN, vocab_size=PLAIN.vocab_size)
    grammar, plan = auto(name)
    matcher = grammars.matcher(grammar, plan)
    for char in '{"name": "get':
        say(matcher, PLAIN, char)
    matcher.accept((across(PLAIN, '":'),))  # after the name, more than its end
    assert matcher.mask() is None
    assert grammars.known(grammar, plan) is not None


@pytest.mark.parametrize(
    ("kind", "source", "begun", "is_read"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "maxLength": 30000}', '"' + "Hello, this is a text. " * 900, True),
        (GrammarKind.JSON_SCHEMA, '{"type": "string"}', 'Answer: "', False),
        (GrammarKind.GRAMMAR, 'start: s\ns: s s | "a"', "a" * 2000, False),  # becomes too large
    ],
)
def test_a_begun_text_is_read_as_far_as_the_grammar_can_be_followed(kind, source, begun, is_read):
    grammar, plan = Grammar(kind, source), AnswerPlan(begun=begun)
    grammars = Grammars(PLAIN, vocab_size=PLAIN.vocab_size)
    first_mask = grammars.matcher(grammar).mask()
    matchers = begin_all([grammars.matcher(grammar, plan) for _ in range(2)])
    assert [matcher.mask() != first_mask for matcher in matchers] == [is_read] * 2
