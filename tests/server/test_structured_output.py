"""`response_format` and `structured_outputs`: answers that follow a grammar."""

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.deploy.off_loop import MAX_GRAMMARS
from penstock.serve.bodies import MAX_ANSWER_CHARS, MAX_ANSWERS, MAX_CHOICES
from penstock.testing import HashExecutor
from penstock.text.grammar import (
    ANSWERS_PER_COMPILATION,
    MAX_LARK_CHARS,
    MAX_REGEX_CHARS,
    MAX_SOURCE_CHARS,
    Grammar,
    GrammarKind,
    Grammars,
)
from penstock.types.errors import GrammarFailure
from support.server.admission import Held
from support.server.completions import events, oracle
from support.server.errors import CHAT, COMPLETIONS, check
from support.server.harness import CAPACITY, PRINTABLE_MODEL, LiveServer, make_client, make_runtime, running, until

HI = {"messages": [{"role": "user", "content": "hi"}]}
COLOUR = {"enum": ["red", "green", "blue"]}
SCHEMA = {
    "type": "object",
    "properties": {"colour": COLOUR, "sizes": {"type": "array", "items": COLOUR, "maxItems": 2}},
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}


def by_schema(schema, **fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}}


def by_value(kind, value):
    return {"response_format": {"type": kind, "value": value}}


def outputs(**fields):
    return {"structured_outputs": fields}


async def ask(client, path=CHAT, **body):
    """The texts of the answer and its finish reasons."""
    asked = {"temperature": 0, "max_tokens": 300, **(HI if path == CHAT else {"prompt": "Hello"}), **body}
    response = await client.post(path, json=asked)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    return texts, [choice["finish_reason"] for choice in choices]


def follows_schema(text):
    value = json.loads(text)
    colours = [value["colour"], *value["sizes"]]
    return set(value) == {"colour", "sizes"} and len(value["sizes"]) <= 2 and set(colours) <= set(COLOUR["enum"])


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) is not None


TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "tags": [
            {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": COLOUR}, "end": "</c>"},
            {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"},
        ],
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": True,
    },
}
IS_TAGGED = '<c>"(red|green|blue)"</c>|<n>[0-9]{2}</n>'
STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<c>", "schema": COLOUR, "end": "</c>"}],
    "triggers": ["<c>"],
}
ASKED = {
    "json_schema": (by_schema(SCHEMA), follows_schema),
    "json_schema, not strict": (by_schema(SCHEMA, strict=False, description="Which colour?"), follows_schema),
    "json_object with llama.cpp's schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, follows_schema),
    "json_object with huggingface_hub's value": (by_value("json_object", SCHEMA), follows_schema),
    "text-generation-inference's json": (by_value("json", SCHEMA), follows_schema),
    "text-generation-inference's regex": (by_value("regex", "[a-c]{2}-[0-9]{3}"), matches("[a-c]{2}-[0-9]{3}")),
    "json": (outputs(json=SCHEMA), follows_schema),
    "json as text": (outputs(json=json.dumps(SCHEMA)), follows_schema),
    "regex": (outputs(regex="[a-c]{2}-[0-9]{3}"), matches("[a-c]{2}-[0-9]{3}")),
    "choice": (outputs(choice=["yes", "no", "Größe"]), lambda text: text in ("yes", "no", "Größe")),
    "grammar": (outputs(grammar='start: ("ab" | "c") ("-" /[0-9]/)'), matches("(ab|c)-[0-9]")),
    "grammar in GBNF": (outputs(grammar='root ::= "ab" | "c"'), matches("ab|c")),
    "grammar in GBNF, by name": (outputs(grammar='root ::= "ab" | "c"', grammar_syntax="gbnf"), matches("ab|c")),
    "grammar in Lark, by name": (outputs(grammar='start: "ab" | "c"', grammar_syntax="lark"), matches("ab|c")),
    "structural_tag": (outputs(structural_tag=json.dumps(TAGS)), matches(IS_TAGGED)),
    "structural_tag as an object": (outputs(structural_tag=TAGS), matches(IS_TAGGED)),
    "structural_tag as a format": ({"response_format": TAGS}, matches(IS_TAGGED)),
    "structural_tag of structures": ({"response_format": STRUCTURES}, lambda text: "<c>" not in text or "</c>" in text),
    "nothing else": (outputs(regex="x{3}", json_object=False, whitespace_pattern=None), matches("x{3}")),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", ASKED)
async def test_an_answer_follows_what_was_asked_for_and_then_ends(client, kind, path):
    fields, follows = ASKED[kind]
    for temperature, seed in ((0, 0), (1, 1), (1, 2)):
        [text], [reason] = await ask(client, path, temperature=temperature, seed=seed, **fields)
        assert follows(text), text
        assert reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": None}},
        {"response_format": {"type": "json_object", "schema": {}}},
        outputs(json_object=True),
    ],
    ids=str,
)
async def test_any_object_will_do(client, fields):
    """The model of these tests says anything for ever, so that most answers are cut off: all begin as an object does."""
    num_whole = 0
    for seed in (0, 1, 2, 3, 4, 13):
        [text], [reason] = await ask(client, temperature=1, seed=seed, max_tokens=300, **fields)
        assert text.lstrip().startswith("{")
        if reason == "stop":
            num_whole += isinstance(json.loads(text), dict)
        else:
            assert reason == "length"
    assert num_whole


async def test_an_answer_that_is_cut_off_says_so(client):
    texts, reasons = await ask(client, max_tokens=4, **outputs(regex="[a-c]{5}"))
    assert matches("[a-c]{4}")(texts[0])
    assert reasons == ["length"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_choice_follows_the_grammar_for_itself(client, path):
    texts, reasons = await ask(client, path, n=6, temperature=1, seed=3, **outputs(regex="[a-z]{2,9}!"))
    assert all(map(matches("[a-z]{2,9}!"), texts))
    assert len(set(map(len, texts))) > 1
    assert reasons == ["stop"] * 6


async def test_every_prompt_follows_it(client):
    texts, reasons = await ask(client, COMPLETIONS, prompt=["a", "b"], n=2, temperature=1, **outputs(regex="[a-z]{2,9}!"))
    assert all(map(matches("[a-z]{2,9}!"), texts))
    assert reasons == ["stop"] * 4


async def test_what_is_echoed_is_no_part_of_it(client):
    texts, _ = await ask(client, COMPLETIONS, prompt="Hello", echo=True, **outputs(choice=["yes"]))
    assert texts == ["Helloyes"]


async def test_a_continued_message_is_no_part_of_it(client):
    messages = [*HI["messages"], {"role": "assistant", "content": "I say: "}]
    texts, _ = await ask(client, messages=messages, continue_final_message=True, **outputs(choice=["yes"]))
    assert texts == ["yes"]


@pytest.mark.parametrize("num_tokens", [1, 9, 20])
async def test_a_continued_message_that_begins_the_answer_is_part_of_it(client, num_tokens):
    [begun], _ = await ask(client, max_tokens=num_tokens, **by_schema(SCHEMA))
    messages = [*HI["messages"], {"role": "assistant", "content": begun}]
    texts, reasons = await ask(client, messages=messages, continue_final_message=True, n=2, temperature=1, **by_schema(SCHEMA))
    assert all(follows_schema(begun + text) for text in texts)
    assert reasons == ["stop"] * 2


async def test_after_a_message_that_is_too_long_to_be_read_the_answer_begins(client, monkeypatch):
    messages = [*HI["messages"], {"role": "assistant", "content": "ye"}]
    body = {"messages": messages, "continue_final_message": True} | outputs(choice=["yes", "no"])
    assert (await ask(client, **body))[0] == ["s"]
    monkeypatch.setattr("penstock.calls.run.MAX_BEGUN_CHARS", 1)
    assert (await ask(client, **body))[0] != ["s"]


async def test_a_continued_message_that_is_the_whole_answer_ends(client):
    messages = [*HI["messages"], {"role": "assistant", "content": "yes"}]
    answer = await ask(client, messages=messages, continue_final_message=True, **outputs(choice=["yes", "no"]))
    assert answer == ([""], ["stop"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_says_the_same(client, path):
    body = {"temperature": 0, "max_tokens": 300, **by_schema(SCHEMA), "stream": True, **HI}
    if path == COMPLETIONS:
        body["prompt"] = "Hello"
        del body["messages"]
    [whole], _ = await ask(client, path, **by_schema(SCHEMA))
    sent, is_done = events((await client.post(path, json=body)).text)
    choices = [event["choices"][0] for event in sent]
    pieces = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
    assert "".join(pieces) == whole
    assert follows_schema(whole)
    assert choices[-1]["finish_reason"] == "stop"
    assert is_done


async def test_a_stop_string_ends_it_earlier(client):
    [text], [reason] = await ask(client, stop=["a", "b"], temperature=1, seed=1, **outputs(regex="[a-d]{8}!"))
    assert matches("[cd]*")(text)
    assert reason == "stop"


async def test_a_complete_answer_ends_before_min_tokens(client):
    assert await ask(client, min_tokens=20, **outputs(choice=["yes"])) == (["yes"], ["stop"])


async def test_logprobs_are_of_the_tokens_that_were_taken(client):
    body = HI | {"logprobs": True, "top_logprobs": 2, "max_tokens": 50} | outputs(regex="[a-c]{5}")
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    told = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(told[:5]) == choice["message"]["content"]


@pytest.mark.parametrize("first", ["properties", "required", "additionalProperties", "title", "items", "$ref"])
async def test_a_schema_without_its_wrapper_is_told_where_it_belongs(client, first):
    asked = {"response_format": {"type": "json_schema", "json_schema": {first: {}, "type": "object"}}}
    response = await client.post(CHAT, json=HI | asked)
    error = check(response, 400, "invalid_request_error", f"response_format.json_schema.{first}")
    assert "in 'schema', beside its 'name'" in error["message"]


async def test_text_is_no_grammar(client):
    [text], _ = await ask(client, COMPLETIONS, max_tokens=16, response_format={"type": "text"})
    assert text == oracle("Hello")
    [text], _ = await ask(client, COMPLETIONS, max_tokens=16, response_format={"type": "text"}, **outputs(choice=["yes"]))
    assert text == "yes"


def deep(depth):
    schema = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


FORMAT, SCHEMA_PARAM = "response_format", "response_format.json_schema.schema"
BAD = [
    ({"response_format": "json_object"}, FORMAT),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "nothing"}}}, "response_format.schema"),
    ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "response_format.json_schema"),
    (by_value("text", SCHEMA), "response_format.value"),
    (by_value("json", None), "response_format.value"),
    (by_value("json", {"type": "nothing"}), "response_format.value"),
    (by_value("regex", SCHEMA), "response_format.value"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA_PARAM),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": ""}}},
        "response_format.json_schema.name",
    ),
    (by_schema({}, name="a b"), "response_format.json_schema.name"),
    (by_schema({}, name="a" * 65), "response_format.json_schema.name"),
    (by_schema({}, strict="yes"), "response_format.json_schema.strict"),
    (by_schema({}, lax=True), "response_format.json_schema.lax"),
    (by_schema(None), SCHEMA_PARAM),
    (by_schema([]), SCHEMA_PARAM),
    (by_schema("{}"), SCHEMA_PARAM),
    (by_schema({"type": "nothing"}), SCHEMA_PARAM),
    (by_schema({"$ref": "#/$defs/nowhere"}), SCHEMA_PARAM),
    (by_schema(deep(400)), SCHEMA_PARAM),
    (by_schema({"enum": ["x" * MAX_SOURCE_CHARS]}), SCHEMA_PARAM),
    (outputs(), "structured_outputs"),
    (outputs(json_object=False), "structured_outputs"),
    (outputs(json={}, regex="a"), "structured_outputs"),
    (outputs(json_object=True, choice=["a"]), "structured_outputs"),
    (outputs(json_object=1), "structured_outputs.json_object"),
    (outputs(json=[]), "structured_outputs.json"),
    (outputs(json=""), "structured_outputs.json"),
    (outputs(json="{"), "structured_outputs.json"),
    (outputs(json="[]"), "structured_outputs.json"),
    (outputs(json="[" * 100_000), "structured_outputs.json"),
    (outputs(json=deep(400)), "structured_outputs.json"),
    (outputs(regex=""), "structured_outputs.regex"),
    (outputs(regex="(a"), "structured_outputs.regex"),
    (outputs(regex="a" * (MAX_REGEX_CHARS + 1)), "structured_outputs.regex"),
    (outputs(regex=["a"]), "structured_outputs.regex"),
    (outputs(choice="a"), "structured_outputs.choice"),
    (outputs(choice=[]), "structured_outputs.choice"),
    (outputs(choice=["a", ""]), "structured_outputs.choice[1]"),
    (outputs(choice=["a", 1]), "structured_outputs.choice[1]"),
    (outputs(choice=["x" * (MAX_ANSWER_CHARS + 1)]), "structured_outputs.choice[0]"),
    (outputs(choice=["x"] * (MAX_ANSWERS + 1)), "structured_outputs.choice"),
    (outputs(choice=["x" * MAX_ANSWER_CHARS] * MAX_ANSWERS), "structured_outputs.choice"),
    (outputs(grammar="a" * (MAX_LARK_CHARS + 1)), "structured_outputs.grammar"),
    (outputs(grammar=""), "structured_outputs.grammar"),
    (outputs(grammar="root ::= 'a'"), "structured_outputs.grammar"),
    (outputs(grammar="start: nowhere"), "structured_outputs.grammar"),
    (outputs(grammar='start: "a"', grammar_syntax="gbnf"), "structured_outputs.grammar"),
    (outputs(grammar='root ::= "a"', grammar_syntax="lark"), "structured_outputs.grammar"),
    (outputs(grammar='root ::= "a"', grammar_syntax="ebnf"), "structured_outputs.grammar_syntax"),
    (outputs(regex="a", grammar_syntax="lark"), "structured_outputs.grammar_syntax"),
    (outputs(structural_tag="{}"), "structured_outputs.structural_tag"),
    (outputs(structural_tag={"type": "structural_tag", "format": {"type": "token"}}), "structured_outputs.structural_tag"),
    (outputs(structural_tag=[]), "structured_outputs.structural_tag"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}]}},
        "response_format.structures[0].schema",
    ),
    ({"response_format": STRUCTURES | {"triggers": ["<d>"]}}, "response_format"),
    ({"response_format": STRUCTURES | {"type": "text"}}, "response_format.structures"),
    ({"response_format": {"type": "json_object", "format": {}}}, "response_format.format"),
    (outputs(whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
    (outputs(disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
    (outputs(disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
    (outputs(backend="xgrammar"), "structured_outputs.backend"),
    (outputs(regex="a", **{f"z{i}": 1 for i in range(20)}), "structured_outputs.z0"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:70])
async def test_what_is_no_grammar_is_named(client, fields, param, path):
    body = {"prompt": "a"} if path == COMPLETIONS else HI
    error = check(await client.post(path, json=body | fields), 400, "invalid_request_error", param)
    assert param.removeprefix("structured_outputs.z") in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a" (', "It was read as GBNF because a rule has ::=. If it is Lark, set 'grammar_syntax' to 'lark'."),
        ('start: /a/\nb ::= "c"', "'grammar_syntax' to 'lark'"),
        ("start: nowhere", "It was read as Lark because no rule has ::=. If it is GBNF, set 'grammar_syntax' to 'gbnf'."),
    ],
)
async def test_a_grammar_that_is_refused_is_told_how_it_was_read(client, grammar, said):
    answer = await client.post(COMPLETIONS, json={"prompt": "a", **outputs(grammar=grammar)})
    assert said in check(answer, 400, "invalid_request_error", "structured_outputs.grammar")["message"]
    answer = await client.post(COMPLETIONS, json={"prompt": "a", **outputs(grammar=grammar, grammar_syntax="gbnf")})
    message = check(answer, 400, "invalid_request_error", "structured_outputs.grammar")["message"]
    assert "read as GBNF" in message
    assert "grammar_syntax" not in message


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
async def test_vllms_older_fields_are_told_their_new_place(client, name):
    response = await client.post(CHAT, json=HI | {f"guided_{name}": "a"})
    error = check(response, 400, "invalid_request_error", f"guided_{name}")
    assert f"'structured_outputs': {{'{name}': ...}}" in error["message"]


FORMATS = {"response_format": {"response_format": {"type": "json_object"}}, "structured_outputs": outputs(regex="a")}


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("fields", [{"allowed_token_ids": [70]}, {"use_beam_search": True}, {"ignore_eos": True}], ids=str)
async def test_what_a_grammar_excludes_is_named_with_it(client, fields, given):
    [name] = fields
    error = check(await client.post(CHAT, json=HI | FORMATS[given] | fields), 400, "invalid_request_error", name)
    assert f"'{name}' and '{given}' exclude each other" in error["message"]


async def test_two_grammars_are_one_too_many(client):
    response = await client.post(CHAT, json=HI | FORMATS["response_format"] | FORMATS["structured_outputs"])
    error = check(response, 400, "invalid_request_error", "structured_outputs")
    assert "'response_format' and 'structured_outputs'" in error["message"]


async def test_values_of_excluded_fields_that_ask_for_nothing_are_taken(client):
    texts, _ = await ask(client, use_beam_search=False, ignore_eos=False, allowed_token_ids=None, **outputs(choice=["yes"]))
    assert texts == ["yes"]


class Compiling:
    """In place of the runtime's grammars: notes where it is asked for a matcher, and waits until the test lets it go on."""

    def __init__(self, grammars, holds=lambda _grammar: True):
        self._holds = holds
        self.asked: list[Grammar] = []
        self.threads: list[str] = []
        self.may_go_on = threading.Event()
        self._grammars = grammars

    def known(self, grammar, plan, number):
        return self._grammars.known(grammar, plan, number)

    def prepare(self, grammar, plan, number):
        self._note(grammar)
        self._grammars.prepare(grammar, plan, number)

    def matcher(self, grammar, plan=None):
        self._note(grammar)
        return self._grammars.matcher(grammar, plan)

    def _note(self, grammar):
        self.asked.append(grammar)
        self.threads.append(threading.current_thread().name)
        assert not self._holds(grammar) or self.may_go_on.wait(20)


@pytest.fixture
def compiling(runtime):
    runtime.grammars = compiling = Compiling(runtime.grammars)
    yield compiling
    compiling.may_go_on.set()


async def test_others_are_answered_while_a_grammar_is_compiled(client, compiling):
    slow = asyncio.create_task(ask(client, **outputs(regex="[ab]{3}")))
    await until(lambda: compiling.asked)
    assert (await ask(client, COMPLETIONS, prompt="Hello", max_tokens=16))[0] == [oracle("Hello")]
    assert not slow.done()
    compiling.may_go_on.set()
    [text], _ = await slow
    assert matches("[ab]{3}")(text)
    assert [name.rpartition("_")[0] for name in compiling.threads] == ["penstock-grammars"]
    assert compiling.asked == [Grammar(GrammarKind.REGEX, "[ab]{3}")]


async def test_a_request_whose_grammar_is_compiled_is_listed_as_waiting_for_it(client, compiling):
    body = {"prompt": "Hello", "max_tokens": 4} | outputs(regex="[ab]")
    slow = asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "slow"}))
    await until(lambda: compiling.asked)
    [listed] = (await client.get("/v1/requests")).json()["data"]
    told = (await client.get("/v1/requests/slow")).json()
    assert (listed["id"], told["id"], len(told["choices"])) == ("slow", "slow", 1)
    assert (told["choices"][0]["state"], told["choices"][0]["waited"]["now_for"]) == ("waiting", "grammar")
    assert 0 < told["choices"][0]["waited"]["for_ms"]["grammar"] <= told["age_ms"]
    assert told["summary"].endswith("now for its grammar to be compiled.")
    check(await client.get("/v1/requests/slow", headers={"X-Tenant": "other"}), 404, "request_not_found")
    error = check(await client.delete("/v1/requests/slow"), 404, "request_not_found")
    assert "close its connection" in error["message"]
    compiling.may_go_on.set()
    assert (await slow).status_code == 200
    assert (await client.get("/v1/requests")).json()["data"] == []
    assert (await client.get("/v1/requests/slow")).json()["choices"][0]["state"] == "ended"


async def test_a_request_whose_grammar_is_refused_is_forgotten(client, compiling):
    body = {"prompt": "a"} | outputs(regex="(")
    slow = asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "slow"}))
    await until(lambda: compiling.asked)
    assert (await client.get("/v1/requests/slow")).status_code == 200
    compiling.may_go_on.set()
    assert (await slow).status_code == 400
    check(await client.get("/v1/requests/slow"), 404, "request_not_found")


async def test_nobody_is_listed_where_none_is_explained(runtime, compiling):
    async with make_client(runtime, explained_requests=0) as client:
        slow = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4} | outputs(regex="[ab]")))
        await until(lambda: compiling.asked)
        assert (await client.get("/v1/requests")).json()["data"] == []
        compiling.may_go_on.set()
        assert (await slow).status_code == 200


async def test_a_known_grammar_goes_no_long_way(client, compiling):
    compiling.may_go_on.set()
    for n in (1, 3):
        texts, _ = await ask(client, n=n, **outputs(regex="[ab]{3}"))
        assert all(map(matches("[ab]{3}"), texts))
    assert len(compiling.asked) == 1


@pytest.mark.parametrize(
    ("n", "num_compiled"),
    [(ANSWERS_PER_COMPILATION, [1, 1, 1]), (ANSWERS_PER_COMPILATION + 1, [2, 1, 1]), (MAX_CHOICES, [2, 2, 2])],
)
async def test_many_choices_are_compiled_as_often_as_they_need(client, monkeypatch, n, num_compiled):
    """A compilation is for so many answers."""
    compiled, compile_one = [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: compiled.append(1) or compile_one(self, grammar))
    for number in num_compiled:
        compiled.clear()
        texts, _ = await ask(client, n=n, **outputs(regex="[ab]"))
        assert len(texts) == n
        assert len(compiled) == number


async def test_a_large_one_is_copied_elsewhere(client, compiling):
    compiling.may_go_on.set()
    words = [f"{number:05}" + "x" * 900 for number in range(50)]
    for _ in range(2):
        [text], _ = await ask(client, max_tokens=1000, **outputs(choice=words))
        assert text in words
    assert [name.rpartition("_")[0] for name in compiling.threads] == ["penstock-grammars"] * 2


@contextlib.asynccontextmanager
async def slow_grammars(*keys):
    """A live server whose regexes of a's are compiled when the test says so.

    Yields the stand-in of its grammars, a function that asks (key, regex), and one that tells how many requests
    wait for which regex.
    """
    with running(config=ServerConfig(port=0, shutdown_timeout_s=0.0, api_keys=keys)) as server:
        runtime = server.runtime
        runtime.grammars = compiling = Compiling(runtime.grammars, lambda grammar: grammar.source.startswith("a"))

        def post(key, regex, **headers):
            body = {"prompt": "a", "max_tokens": 50, "temperature": 0} | outputs(regex=regex)
            headers |= {"Authorization": f"Bearer {key}"} if key else {}
            return asyncio.create_task(client.post(COMPLETIONS, json=body, headers=headers))

        def waiting():
            jobs = {job for queue in list(runtime.off_loop._grammars._queues.values()) for job in list(queue)}
            return {job.key.source: job.waiting.total() for job in jobs}

        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                yield compiling, post, waiting
        finally:
            compiling.may_go_on.set()


async def beside(response, path):
    """The text of another page of the same server."""
    async with httpx.AsyncClient() as client:
        return (await client.get(response.url.join(path))).text


async def test_the_grammars_of_one_key_do_not_hold_up_those_of_another():
    async with slow_grammars("first", "second") as (compiling, post, waiting):
        many = [post("first", f"a{number}") for number in range(MAX_GRAMMARS + 1)]
        await until(lambda: len(waiting()) == MAX_GRAMMARS)
        error = check(await post("first", "ab"), 429, "overloaded")
        assert "too many grammars" in error["message"]
        answer = await post("second", "b")
        assert answer.json()["choices"][0]["text"] == "b"
        assert [grammar.source == "b" for grammar in compiling.asked] == [False, True]
        compiling.may_go_on.set()
        assert {response.status_code for response in await asyncio.gather(*many)} == {200}


async def test_the_grammar_of_a_client_that_leaves_is_not_compiled():
    async with slow_grammars() as (compiling, post, waiting):
        first = post(None, "a")
        await until(lambda: compiling.asked)
        leaving, *staying = [post(None, regex) for regex in ("aa", "ab", "ac")]
        shared = post(None, "aa")
        await until(lambda: waiting() == {"aa": 2, "ab": 1, "ac": 1})
        leaving.cancel()
        staying.pop().cancel()
        await until(lambda: waiting() == {"aa": 1, "ab": 1})
        compiling.may_go_on.set()
        assert [(await task).status_code for task in (first, *staying, shared)] == [200] * 3
        assert sorted(grammar.source for grammar in compiling.asked) == ["a", "aa", "ab"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("X-Deadline-Ms", "deadline"),
        ("X-Queue-Timeout-Ms", "queue_timeout"),
        ("X-First-Token-Timeout-Ms", "first_token_timeout"),
    ],
)
async def test_who_may_not_wait_so_long_is_told_while_others_grammars_are_compiled(header, reason):
    async with slow_grammars() as (compiling, post, waiting):
        first = post(None, "a")
        await until(lambda: compiling.asked)
        late = await post(None, "ab", **{header: "150", "X-SLO-TTFT-Ms": "60000"})
        error = check(late, 408, "deadline_exceeded")
        assert "not compiled within the 150 ms" in error["message"]
        assert not waiting()
        compiling.may_go_on.set()
        assert (await first).status_code == 200
        metrics = await beside(late, "/metrics")
        assert re.search(f'^penstock_requests_rejected_total.*"{reason}".* 1\\.0$', metrics, re.MULTILINE)
        assert 'penstock_slo_attainment_total{met="false",model="toy",slo="ttft_asked"} 1.0\n' in metrics
    assert [grammar.source for grammar in compiling.asked] == ["a"]


async def test_the_wait_for_a_grammar_is_counted_and_told():
    async with slow_grammars() as (compiling, post, _):
        first = post(None, "a")
        await until(lambda: compiling.asked)
        compiling.may_go_on.set()
        answer = await first
        [told] = json.loads(await beside(answer, f"/v1/requests/{answer.json()['id']}"))["choices"]
        metrics = await beside(answer, "/metrics")
    assert told["waited"]["for_ms"]["grammar"] > 0
    assert sum(told["waited"]["for_ms"].values()) == pytest.approx(told["time_ms"]["queue"], abs=0.01)
    assert re.search(r"^penstock_grammar_wait_seconds_count.* 1\.0$", metrics, re.MULTILINE)


async def test_an_overloaded_server_compiles_nothing():
    async with Held(max_queue=1) as held:
        runtime = held.server.runtime
        runtime.grammars = compiling = Compiling(runtime.grammars)
        waiting = asyncio.create_task(held.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}))
        await until(lambda: runtime.engine.load().num_waiting == 1)
        check(await held.client.post(CHAT, json=HI | outputs(regex="a")), 429, "overloaded")
        assert not compiling.asked
        held.executor.open()
        assert (await waiting).status_code == 200


async def test_a_prompt_that_does_not_fit_costs_no_grammar(client, compiling):
    response = await client.post(COMPLETIONS, json={"prompt": "x" * 3000} | outputs(regex="a"))
    check(response, 400, "context_length_exceeded", "prompt")
    assert not compiling.asked


class FailingMatcher:
    """Can't take the third token, once the test lets it look at it."""

    def __init__(self, inner, may_fail):
        self.mask, self.forced = inner.mask, inner.forced
        self._inner, self._may_fail, self._num_accepted = inner, may_fail, 0

    def accept(self, token_ids):
        self._num_accepted += len(token_ids)
        if self._num_accepted >= 3:
            assert self._may_fail.wait(20)
            raise GrammarFailure("the grammar became too large.")
        self._inner.accept(token_ids)


@pytest.fixture
def may_fail(runtime, monkeypatch):
    """Set when a matcher of the runtime's may fail."""
    may_fail, grammars = threading.Event(), runtime.grammars
    monkeypatch.setattr(runtime, "grammars", Compiling(grammars))
    runtime.grammars.may_go_on.set()
    monkeypatch.setattr(
        runtime.grammars, "known", lambda grammar, _plan, _number: [FailingMatcher(grammars.matcher(grammar), may_fail)]
    )
    yield may_fail
    may_fail.set()


async def test_a_grammar_that_fails_on_the_way_fails_its_own_request_only(client, runtime, may_fail):
    may_fail.set()
    other = asyncio.create_task(ask(client, COMPLETIONS, max_tokens=16))
    error = check(await client.post(CHAT, json=HI | outputs(regex="[ab]{9}")), 400, "invalid_request_error")
    assert error["message"] == "the grammar became too large."
    assert (await other)[0] == [oracle("Hello")]
    await until(lambda: runtime.bridge.num_open_requests == 0)


async def test_a_stream_whose_grammar_fails_says_so(runtime, may_fail):
    body = HI | outputs(regex="[ab]{9}") | {"stream": True}
    text = ""
    with LiveServer(runtime) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20) as client,
            client.stream("POST", CHAT, json=body) as answer,
        ):
            assert answer.status_code == 200
            async for part in answer.aiter_text():
                text += part
                may_fail.set()
    sent, is_done = events(text)
    assert not is_done
    assert "the grammar became too large" in sent[-1]["error"]["message"]
    assert sent[-1]["error"]["code"] == "invalid_request_error"


async def test_the_document_describes_the_fields(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert set(schemas["StructuredOutputs"]["properties"]) >= {"json", "json_object", "regex", "choice", "grammar"}
    assert set(schemas["JsonSchemaFormat"]["properties"]) == {"name", "description", "schema", "strict"}
    assert schemas["JsonSchemaFormat"]["required"] == ["name", "schema"]
    assert schemas["ResponseFormat"]["properties"]["type"]["enum"] == [
        *("text", "json_object", "json_schema", "structural_tag", "json", "regex")
    ]
    for body in ("CompletionBody", "ChatCompletionBody"):
        assert {"$ref": "#/components/schemas/ResponseFormat"} in schemas[body]["properties"]["response_format"]["anyOf"]


PAGE = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^curl \S+(/v1/\S+) .*? -d '(.*?)'$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "content"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
async def test_what_the_page_shows_works(client, path, content):
    body = json.loads(content)
    assert {"response_format", "structured_outputs"} & set(body)
    [text], reasons = await ask(client, path, **body | {"model": "toy", "max_tokens": 1000})
    assert reasons == ["stop"]
    if "response_format" in body:
        assert set(json.loads(text)) == set(body["response_format"]["json_schema"]["schema"]["required"])
    else:
        assert text in body["structured_outputs"]["choice"]


def test_the_page_has_an_example_of_each_route():
    assert {path for path, _ in EXAMPLES} == {COMPLETIONS, CHAT}


async def test_many_grammars_at_once_keep_apart():
    with running() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            letters = "abcdefghijkl"
            bodies = [outputs(regex=f"{letter}{{{3 + number}}}") for number, letter in enumerate(letters)] * 3
            answers = await asyncio.gather(*[ask(client, temperature=1, seed=i, **body) for i, body in enumerate(bodies)])
    expected = [letter * (3 + number) for number, letter in enumerate(letters)] * 3
    assert [text for [text], _ in answers] == expected


async def test_lengths_that_are_too_long_to_be_counted_are_refused_before_the_stream_begins():
    capacity = replace(CAPACITY, num_blocks=2049, max_model_len=32_768)
    with contextlib.closing(make_runtime(HashExecutor(capacity, model=PRINTABLE_MODEL))) as runtime:
        client = make_client(runtime)
        for schema, limits, status in (
            ({"maxLength": 524_288}, {}, 400),
            ({"maxLength": 524_288}, {"max_tokens": 20}, 200),
            ({"maxLength": 20_000}, {"stop": ["a"]}, 200),
        ):
            body = HI | {"stream": True} | by_schema({"type": "string"} | schema) | limits
            response = await client.post(CHAT, json=body)
            assert response.status_code == status, response.text
            if status == 400:
                error = response.json()["error"]
                assert "maxLength of the json_schema add up to 524288" in error["message"]
                assert error["param"] == "response_format.json_schema.schema"
