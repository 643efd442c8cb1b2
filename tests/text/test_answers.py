"""Answers taken apart: every format, written by its own pattern, read whole and in pieces."""

import json

import pytest

from penstock.text.answers import (
    Answer,
    AnswerForm,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    ToolCall,
    gather,
)
from penstock.text.dialects import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.parameters import held_back, match_literal
from support.work_time import growth

FORMATS = {one.name: one for one in TOOL_FORMATS}
REASONING = {one.name: one for one in REASONING_FORMATS}
MARKED = [(one.name, nth) for one in TOOL_FORMATS if one.name != "openai" for nth in range(len(one.ways))]
CALLS = [("get", '{"a": "}\\"]{", "b": [{}, 1.5]}'), ("get_x", "{}"), ("a.b-c", '{"ü":\n"€"}')]


NAMES = frozenset(name for name, _ in CALLS)


def written(way, calls):
    texts = []
    for name, arguments in calls:
        before, middle, after = way.parts
        text = arguments if way.parameter is None else way.parameter.written(json.loads(arguments))
        texts.append(before + name + middle + text + after)
    return way.begin + (way.between or "").join(texts) + way.end


def read(form, pieces):
    reader = form.reader(lambda index: f"id{index}")
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish()


def at_every_split(form, text):
    """The answer, which is the same wherever the text is cut once, and character by character."""
    answer = gather(read(form, [text]))
    for pieces in [list(text), *([text[:at], text[at:]] for at in range(len(text)))]:
        assert gather(read(form, pieces)) == answer
    return answer


def form_of(name, **fields):
    """The form of answers that may call the tools in `CALLS`."""
    return AnswerForm(tools=FORMATS[name], tool_names=NAMES, **fields)


def as_calls(calls, way=None):
    """The calls as they are read. Tagged parameters have no white space of JSON."""
    if way is not None and way.parameter is not None:
        calls = [(name, json.dumps(json.loads(arguments), ensure_ascii=False)) for name, arguments in calls]
    return [ToolCall(f"id{index}", name, arguments) for index, (name, arguments) in enumerate(calls)]


@pytest.mark.parametrize(("name", "nth"), MARKED)
def test_calls_are_read_as_they_are_written(name, nth):
    form, way = form_of(name), FORMATS[name].ways[nth]
    calls = CALLS if way.between is not None else CALLS[:1]
    assert at_every_split(form, written(way, calls)) == Answer(calls=as_calls(calls, way))
    if not FORMATS[name].only_at_start and not way.has_no_mark:
        text = "I look <at> [it]. \n"
        answer = at_every_split(form, text + written(way, calls) + "\n")
        assert answer == Answer(content=text.rstrip(), calls=as_calls(calls, way))


@pytest.mark.parametrize(("name", "nth"), MARKED)
def test_white_space_may_be_left_out_or_added(name, nth):
    form, way = form_of(name), FORMATS[name].ways[nth]
    text = written(way, [("get", '{"a":1}')])
    for other in (text.replace(" ", "").replace("\n", ""), text.replace(" ", "\n  ")):
        answer = at_every_split(form, other.replace('{"a":1}', '{"a": 1}'))
        if other.lstrip().startswith(way.trigger):
            assert answer == Answer(calls=as_calls([("get", '{"a": 1}')]))


@pytest.mark.parametrize(("name", "nth"), MARKED)
def test_a_call_that_is_cut_is_content_and_those_before_it_are_calls(name, nth):
    form, way = form_of(name), FORMATS[name].ways[nth]
    text = written(way, [("get", '{"a": [1, 2]}')])
    mark = "}" if way.parameter is None else way.parts[2].split()[0]
    end = text.rindex(mark) + len(mark) if way.parameter else text.index(mark) + 1
    for cut in range(1, len(text)):
        answer = gather(read(form, [text[:cut]]))
        if cut < end:
            assert answer.calls == []
            assert answer.content.lstrip("\n") == text[:cut].lstrip("\n")
        else:
            assert answer == Answer(calls=as_calls([("get", '{"a": [1, 2]}')]))


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_looks_like_a_call_and_is_none_stays_as_it_is(name):
    form = form_of(name)
    for text in (
        "<tool_call> is a tag.",
        "  <tool_call> is a tag.",
        '{"note": "Use <tool_call> tags"}',
        "Use\n<tool_call>",
        "Write <function=name> and </function> around it.",
        "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>",
        "Write <function=get>\n<parameter=a>\n1\n</parameter>\n</function>",
        "Use [TOOL_CALLS] \n of \n\n[TOOL_CALLS] the wild",
        '{"name": 3}',
        '{"name"',
        "[TOOL_CALLS] of the wild",
        "functools is a module",
        "a < b",
        "  ",
        '```json {"name": "Ada", "age": 3}```',
        '```json\n{"name": "Ada", "arguments": {"a": 1}}\n```',
        '```json\n{"name": "get", "age": 3}\n``` <tool_call>',
        '```json\n{"name": "get_"',
        "```json\n[1, 2]\n```",
        '{"name": "get", "age": {"arguments": 3}}',
        '{"name": "getx", "arguments": {}}',
        '{{"name": "getx", "arguments": {}}}',
        '{{"name": "get"}}',
        "{{ x }} is a variable",
        "{{{",
        '{"type": "function", "function": {"name": "get", "parameters": {}}}',
        '{"name":' + " " * 300 + '"get", "arguments": {}}',
        'So:\n```json\n{"name": "get", "arguments": {}}\n```',
    ):
        assert at_every_split(form, text).content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"type": "function", "name": "get", "parameters": {"a": 1}}'),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}'),
        ("qwen3_coder", "<function=get>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=get>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("granite", '<tool_call>[{"name": "get", "arguments": {"a": 1}}]'),
    ],
)
def test_calls_come_in_other_ways_than_the_template_s(name, text):
    assert at_every_split(form_of(name), text) == Answer(calls=as_calls([("get", '{"a": 1}')]))


BLANK = "\n " * 150


@pytest.mark.parametrize("name", FORMATS)
def test_little_of_long_white_space_is_left_out_before_a_mark(name):
    if name == "openai":
        return
    way, think = FORMATS[name].ways[0], REASONING["think"]
    call = written(way, [("get", '{"a": 1}')])
    answer = at_every_split(form_of(name), BLANK + call)
    if FORMATS[name].only_at_start:
        assert answer == Answer(content=BLANK + call)
    else:
        assert answer == Answer(content=BLANK[:-256], calls=as_calls([("get", '{"a": 1}')]))
        assert at_every_split(form_of(name), f"Hi{BLANK}{call}").content == "Hi" + BLANK[:-256]
    assert at_every_split(form_of(name), f"Hi{BLANK}").content == f"Hi{BLANK}"
    thought = at_every_split(form_of(name, reasoning=think, is_reasoning=True), f"hm{BLANK}</think>{BLANK}so")
    assert thought == Answer(reasoning="hm" + BLANK[:-256], content="so")
    assert at_every_split(form_of(name, reasoning=think), f"{BLANK}<think>hm</think>").reasoning == ""
    assert at_every_split(form_of(name, reasoning=think), f"{BLANK[:256]}<think>hm</think>").reasoning == "hm"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json"])
@pytest.mark.parametrize(
    ("before", "is_reasoning"), [("", False), ("x", False), ("x", True)], ids=["beginning", "content", "reasoning"]
)
def test_an_answer_of_white_space_takes_little_time(name, before, is_reasoning):
    def read_blank(num_pieces):
        reader = form_of(name, reasoning=REASONING["think"], is_reasoning=is_reasoning).reader(str)
        reader.push(before)
        for _ in range(num_pieces):
            reader.push("\n" * 64)

    assert growth(read_blank, 3_000) < 8


def test_a_call_without_a_mark_is_one_at_the_beginning_alone_and_of_a_tool_that_was_given():
    form, no_names = form_of("hermes", reasoning=REASONING["think"]), AnswerForm(tools=FORMATS["hermes"])
    call = as_calls([("get", '{"a": 1}')])
    for text in (
        '```json\n{\n  "name": "get",\n  "arguments": {"a": 1}\n}\n```',
        '{"name": "get", "arguments": {"a": 1}}',
        '```json{"name":"get","arguments":{"a": 1}}```',
        '{{"name": "get", "arguments": {"a": 1}}}',
        '{ {\n"name": "get", "arguments": {"a": 1} }\n}',
        '```json\n{{"name": "get", "arguments": {"a": 1}}}\n```',
    ):
        for before in ("", " \n", "<think>Hm.</think>", "\n<think>Hm.</think>\n\n"):
            answer = at_every_split(form, before + text + "\n")
            assert (answer.content, answer.calls) == ("", call)
        assert at_every_split(form, f"So: {text}") == Answer(content=f"So: {text}")
        assert at_every_split(no_names, text) == Answer(content=text)
        assert at_every_split(form, text.replace("get", "ge")) == Answer(content=text.replace("get", "ge"))
        assert at_every_split(form, f"{text}\nIt is so.").content.strip() == "It is so."
    marked = '<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'
    assert at_every_split(form, f'{{"name": "Ada"}} {marked}') == Answer(content='{"name": "Ada"}', calls=call)


def test_text_is_held_back_only_as_long_as_it_may_become_a_call():
    reader = form_of("hermes").reader(lambda index: f"id{index}")
    assert reader.push(' ```json\n{ "name": "ge') == []
    assert reader.push("n") == [Content(' ```json\n{ "name": "gen')]
    assert reader.push('```json {"name": "get"') == [Content('```json {"name": "get"')]
    reader = form_of("hermes").reader(lambda index: f"id{index}")
    assert reader.push("```") == []
    assert reader.push("py") == [Content("```py")]
    reader = form_of("hermes").reader(lambda index: f"id{index}")
    assert reader.push('```json\n{"name": "get", ') == []
    assert reader.push('"arguments": {') == [CallBegin(0, "id0", "get"), CallArguments(0, "{")]


def test_parts_come_as_soon_as_they_are_certain():
    reader = AnswerForm(tools=FORMATS["hermes"]).reader(lambda index: f"id{index}")
    assert reader.push("Yes. <to") == [Content("Yes.")]
    assert reader.push("p> ") == [Content(" <top>")]
    assert reader.push('<tool_call>{"name": "ge') == []
    assert reader.push('t", "arguments": {"a') == [CallBegin(0, "id0", "get"), CallArguments(0, '{"a')]
    assert reader.push('": 1}') == [
        CallArguments(0, '": 1}'),
        CallEnd(0, True, '<tool_call>{"name": "get", "arguments": {"a": 1}'),
    ]
    assert reader.push("}</tool_call>") == []
    assert reader.finish() == []


@pytest.mark.parametrize("name", ["think", "seed_oss", "gemma4", "mistral"])
def test_reasoning_is_read_apart(name):
    marks = REASONING[name]
    for tools in (None, FORMATS["hermes"]):
        form = AnswerForm(tools=tools, reasoning=marks)
        text = f"{marks.open}\nOne <b>\n\nand two.\n{marks.close}\n\nThe answer "
        assert at_every_split(form, text) == Answer(content="The answer ", reasoning="One <b>\n\nand two.")
        assert at_every_split(form, "<thought> No block. ") == Answer(content="<thought> No block. ")
        assert at_every_split(form, f"{marks.open} unended ") == Answer(reasoning="unended")
        begun = AnswerForm(tools=tools, reasoning=marks, is_reasoning=True)
        assert at_every_split(begun, f"\nHm.{marks.close}Yes") == Answer(content="Yes", reasoning="Hm.")
        assert at_every_split(begun, f"\n\n{marks.close}\n\nYes") == Answer(content="Yes")
    call = written(FORMATS["hermes"].ways[0], CALLS)
    form = AnswerForm(tools=FORMATS["hermes"], reasoning=marks)
    text = f"{marks.open}<tool_call>{marks.close}\n\n{call}"
    assert at_every_split(form, text) == Answer(reasoning="<tool_call>", calls=as_calls(CALLS))


HARMONY = (
    "<|channel|>analysis<|message|>Think <hard>.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}"
)
OTHER_HARMONY = "<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}<|call|>"
CODE_HARMONY = "<|channel|>analysis to=functions.get code<|message|>{}<|call|>"


@pytest.mark.parametrize("arguments", [arguments for _, arguments in CALLS])
def test_channels_are_read_apart(arguments):
    form = form_of("openai", reasoning=REASONING["openai"])
    expected = Answer(content="Let me look.", reasoning="Think <hard>.", calls=as_calls([("get", arguments)]))
    assert at_every_split(form, HARMONY.replace("{}", arguments)) == expected
    for text in (OTHER_HARMONY, OTHER_HARMONY.removeprefix("<|start|>assistant"), CODE_HARMONY):
        assert at_every_split(form, text.replace("{}", arguments)) == Answer(calls=expected.calls)
    cut = HARMONY.replace("{}", '{"a": ')
    assert at_every_split(form, cut).calls == []
    assert not read(form, [cut])[-1].is_whole
    final = "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B.<|return|>"
    assert at_every_split(form, final) == Answer(content="B.", reasoning="A.")
    twice = HARMONY.partition("<|start|>assistant<|channel|>commentary to=")[0] + "<|start|>assistant" + final
    assert at_every_split(form, twice) == Answer(content="Let me look.\nB.", reasoning="Think <hard>.\nA.")


def test_a_message_to_a_tool_that_is_not_given_is_no_call():
    form = form_of("openai", reasoning=REASONING["openai"])
    assert at_every_split(form, OTHER_HARMONY.replace("get", "getx")) == Answer(content="{}")
    assert at_every_split(form, CODE_HARMONY.replace("get", "getx")) == Answer(reasoning="{}")


def test_a_header_that_is_cut_is_not_shown_unless_it_is_a_calls():
    form, call = form_of("openai", reasoning=REASONING["openai"]), "to=functions.get"
    before, _, header = HARMONY.rpartition("<|start|>")
    for cut in ("assistant", "assistant<|channel|>commentary"):
        assert at_every_split(form, f"{before}<|start|>{cut}") == Answer(content="Let me look.", reasoning="Think <hard>.")
    header = f"<|start|>{header.partition(call)[0]}{call}"
    answer = Answer(content=f"Let me look.{header}", reasoning="Think <hard>.")
    assert at_every_split(form, before + header) == answer
    assert not read(form, [before + header])[-1].is_whole
    assert at_every_split(form, "<|channel|>analysis") == Answer()


def test_channels_without_tools_call_none():
    form = AnswerForm(reasoning=REASONING["openai"])
    answer = at_every_split(form, HARMONY)
    assert (answer.calls, answer.reasoning) == ([], "Think <hard>.")
    assert at_every_split(form, "not a header").content == "not a header"


@pytest.mark.parametrize(
    ("text", "literal", "num"),
    [("{ \n}x", "{ }", 4), ("{}", "{ }", 2), ("{ ", "{ }", None), ("{ x", "{ }", -1), ("", "a", None), ("ab", "a", 1)],
)
def test_a_literal_is_matched_with_any_white_space(text, literal, num):
    assert match_literal(text, literal) == num


def test_what_may_begin_a_mark_is_held_back():
    assert held_back("a <", ["<b>", "<cd>"]) == 1
    assert held_back("a <c", ["<b>", "<cd>"]) == 2
    assert held_back("a <x", ["<b>", "<cd>"]) == 0


def test_gathered_arguments_are_json():
    way = FORMATS["mistral"].ways[0]
    for call in gather(read(AnswerForm(tools=FORMATS["mistral"]), [written(way, CALLS)])).calls:
        assert isinstance(json.loads(call.arguments), dict)
