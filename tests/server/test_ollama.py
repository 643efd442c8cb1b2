"""Ollama's API: `/api/chat`, `/api/generate`, embeddings, what it says of models, and its errors. Clients: tests/clients."""

import asyncio
import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.deploy.running import ServedModel
from penstock.models.facts import ModelFacts
from penstock.obs.metrics import Metrics
from penstock.serve.app import create_app
from penstock.serve.cards import FactsCache
from penstock.text import fim
from penstock.types.errors import ModelError
from support.deployments import deployment_of
from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.harness import CHAT_TEMPLATE, SPECIAL_TOKENS, make_client, make_runtime, make_text_runtime, until
from support.server.tools import CALL, CALL_NOW, NOW, THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER, says

ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "options": {"temperature": 0, "num_predict": 5}}
PROMPT = {"model": "toy", "prompt": "Hi", "options": {"temperature": 0, "num_predict": 5}}
NUMBERS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    first, *said = [json.loads(line) for line in response.text.splitlines()]
    assert (first["message"]["content"] if "message" in first else first["response"]) == "", "it came with the headers"
    return said


async def ask(client, path="/api/chat", **fields):
    """The one answer of a request that is not streamed."""
    response = await client.post(path, json=(ASK if path == "/api/chat" else PROMPT) | {"stream": False} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client, path="/api/chat", status=400, **fields):
    response = await client.post(path, json=(ASK if path == "/api/chat" else PROMPT) | fields)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return response.json()["error"]


async def said_by(text, chat_template=TOOLS_TEMPLATE, **fields):
    """The answer of a model that says a text, whole and as it was streamed; they are the same."""
    runtime = says(text, chat_template=chat_template)
    try:
        async with make_client(runtime) as client:
            fields = {"options": {"temperature": 0}} | fields
            whole = await ask(client, **fields)
            *pieces, last = lines(await client.post("/api/chat", json=ASK | fields))
    finally:
        runtime.close()
    told = [piece["message"] for piece in pieces]
    message = whole["message"]
    for name in ("content", "thinking"):
        assert "".join([piece.get(name, "") for piece in told]) == message.get(name, "")
    streamed = [call["function"] for piece in told for call in piece.get("tool_calls", ())]
    assert streamed == [call["function"] for call in message.get("tool_calls", ())]
    assert last["done_reason"] == whole["done_reason"]
    return whole


async def test_a_chat_is_the_same_streamed_and_whole_and_as_openais(client):
    whole = await ask(client)
    assert whole["message"]["role"] == "assistant"
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("toy", True, "length")
    assert whole["created_at"] == "2023-11-14T22:13:20Z"
    openai = {"messages": ASK["messages"], "temperature": 0, "max_tokens": 5}
    other = (await client.post("/v1/chat/completions", json=openai)).json()
    assert whole["message"]["content"] == other["choices"][0]["message"]["content"]
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (other["usage"]["prompt_tokens"], 5)

    *pieces, last = lines(await client.post("/api/chat", json=ASK))
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert not any(piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert {**last, **dict.fromkeys(NUMBERS)} == {**whole, "message": last["message"], **dict.fromkeys(NUMBERS)}


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ({"content": "Well"}, "Well"),
        ({"thinking": "Hm."}, "<think>Hm.</think>"),
        ({"content": ""}, "<think>"),  # begins nothing
        ({"tool_calls": [{"function": {"name": "now"}}]}, f"{CALL_NOW}<|end|>\n<|turn|>assistant: <think>"),
    ],
)
async def test_an_assistants_last_message_is_continued(last, told):
    thought = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    template = CHAT_TEMPLATE.replace("{{ message.content", thought + "{{ message.content")
    runtime = make_runtime(chat_template=template + "{% if add_generation_prompt %}<think>{% endif %}")
    async with make_client(runtime) as client:
        answer = await ask(client, messages=[{"role": "user", "content": "hi"}, {"role": "assistant"} | last])
    runtime.close()
    message = answer["message"]
    assert message.get("thinking", "") + message["content"] == oracle(HI_PROMPT + told, max_tokens=5)


async def test_an_empty_message_of_the_assistant_alone_is_answered(client):
    assert (await ask(client, messages=[{"role": "assistant", "content": ""}]))["message"]["content"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_times_are_of_this_request(client, path):
    answer = await ask(client, path)
    assert all(type(answer[name]) is int for name in NUMBERS)
    assert answer["prompt_eval_duration"] > 0
    assert answer["eval_duration"] > 0
    assert answer["load_duration"] == 0
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]


async def test_a_prompt_goes_through_the_template_unless_it_is_raw(client):
    chat = await ask(client, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    generated = await ask(client, "/api/generate", system="Be brief.")
    assert generated["response"] == chat["message"]["content"]
    assert generated["prompt_eval_count"] == chat["prompt_eval_count"]
    raw = await ask(client, "/api/generate", raw=True)
    assert raw["prompt_eval_count"] == len("Hi")
    completion = {"prompt": "Hi", "temperature": 0, "max_tokens": 5}
    assert raw["response"] == (await client.post("/v1/completions", json=completion)).json()["choices"][0]["text"]
    *pieces, last = lines(await client.post("/api/generate", json=PROMPT | {"raw": True}))
    assert "".join(piece["response"] for piece in pieces) == raw["response"]
    assert (last["response"], last["done_reason"]) == ("", "length")


async def test_a_raw_prompt_has_no_limit_of_its_own(client):
    answer = await ask(client, "/api/generate", raw=True, options={"num_predict": -1, "stop": ["~"], "seed": 4})
    assert answer["eval_count"] > 16
    assert answer["done_reason"] == "stop"
    assert "~" not in answer["response"]


@pytest.mark.parametrize("raw", [True, False])
async def test_an_answer_ends_with_the_context(client, raw):
    answer = await ask(client, "/api/generate", prompt="x" * 2000, raw=raw, options={"num_predict": 100})
    assert answer["prompt_eval_count"] + answer["eval_count"] == 2048
    assert answer["done_reason"] == "length"


async def test_without_a_template_a_prompt_is_taken_as_it_is():
    runtime = make_runtime(chat_template=None)
    try:
        async with make_client(runtime) as client:
            assert (await ask(client, "/api/generate"))["prompt_eval_count"] == len("Hi")
            assert "'system'" in await refused(client, "/api/generate", system="Be brief.")
    finally:
        runtime.close()


async def test_options_do_what_their_openai_names_do(client):
    options = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 11,
        "num_predict": 20,
        "stop": "zz",
        "repeat_penalty": 1.3,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "num_ctx": 2048,
        "num_keep": 4,
        "mirostat": 0,
        "mirostat_tau": 5.0,
    }
    names = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
    passed = {name: value for name, value in options.items() if not name.startswith(("mirostat", "num_k", "num_c", "repeat_l"))}
    openai = {"messages": ASK["messages"]} | {names.get(name, name): value for name, value in passed.items()}
    other = (await client.post("/v1/chat/completions", json=openai)).json()
    assert (await ask(client, options=options))["message"]["content"] == other["choices"][0]["message"]["content"]


async def test_a_seed_of_minus_one_is_drawn(client):
    """Ollama's default, which clients send with its other defaults."""
    options = {"temperature": 1, "num_predict": 20}
    absent, minus_one, one = [
        (await ask(client, options=options | seed))["message"] for seed in ({}, {"seed": -1}, {"seed": 1})
    ]
    assert minus_one == absent != one


async def test_how_a_model_is_loaded_is_not_for_a_request_to_say(client):
    options = {"num_ctx": 4096, "num_gpu": 99, "num_thread": 4, "num_batch": 512, "use_mmap": False, "repeat_last_n": 64}
    plain = await ask(client)
    assert (await ask(client, options=ASK["options"] | options))["message"] == plain["message"]


async def test_a_model_that_is_served_is_pulled_already(client):
    lines = (await client.post("/api/pull", json={"model": "toy:latest"})).text.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["pulling manifest", "success"]
    answer = await client.post("/api/pull", json={"name": "toy", "stream": False})
    assert answer.json() == {"status": "success"}
    other = await client.post("/api/pull", json={"model": "other"})
    assert other.status_code == 501
    assert "penstock pull" in other.json()["error"]
    for path in ("/api/pull", "/api/show"):
        nameless = await client.post(path, json={"model": "", "name": ""})
        assert (nameless.status_code, "'model'" in nameless.text) == (400, True)


@pytest.mark.parametrize(("model", "name"), [("", "toy"), ("toy", "")])
async def test_programs_in_go_send_fields_that_are_not_set(client, model, name):
    """The bodies of `ollama run`, `ollama show` and `ollama pull`."""
    show = {"model": model, "system": "", "template": "", "verbose": False, "options": None, "name": name}
    assert (await client.post("/api/show", json=show)).json()["capabilities"]
    pull = {"model": model, "username": "", "password": "", "name": name}
    assert (await client.post("/api/pull", json=pull)).status_code == 200


async def test_no_window_of_penalties_is_no_penalty(client):
    plain = await ask(client)
    options = ASK["options"] | {"repeat_penalty": 5.0, "repeat_last_n": 0}
    assert (await ask(client, options=options))["message"] == plain["message"]


async def test_a_body_is_json_whatever_its_type_says(client):
    content, typed = json.dumps(PROMPT), {"Content-Type": "application/x-www-form-urlencoded"}  # as `curl -d` says
    assert (await client.post("/api/generate", content=content, headers=typed)).status_code == 200
    from_page = await client.post("/api/generate", content=content, headers=typed | {"Origin": "https://example.org"})
    assert from_page.status_code == 403
    assert (await client.post("/v1/completions", content=content, headers=typed)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": {"temperature": 3}}, "'options.temperature' must be at most 2"),
        ({"options": {"num_predict": 0}}, "'options.num_predict' must be at least 1"),
        ({"options": {"mirostat": 2}}, "'options.mirostat' is not supported yet"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": -2}}, "'options.repeat_last_n' must be at least -1"),
        ({"options": {"temprature": 1}}, "Unknown parameter: 'options.temprature'"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "'messages[0].images' is not supported yet"),
        ({"messages": [{"role": "user", "content": "Hi", "tool_name": "now"}]}, "'messages[0].tool_name' is for messages"),
        ({"messages": [{"role": "robot"}]}, "'messages[0].role' must be 'system'"),
        ({"format": "xml"}, "'format' must be 'json'"),
        ({"format": {"type": "nothing"}}, "'format' is refused"),
        ({"think": True}, "'think' is true, but toy does not reason"),
        ({"think": "high"}, "'think' is 'high', but toy does not reason"),
        ({"think": "much"}, "'think' must be true, false"),
        ({"keep_alive": "5 minutes"}, "'keep_alive' must be a number of seconds"),
        ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs'"),
        ({"truncate": True}, "'truncate' is not supported yet"),
        ({"colour": 1}, "Unknown parameter: 'colour'"),
        ({"model": None}, "'model' must be a string"),
    ],
)
async def test_errors_name_the_field_as_the_client_calls_it(client, fields, told):
    assert told in await refused(client, **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"images": ["aGk="]}, "'images' is not supported yet"),
        ({"template": "{{ .Prompt }}"}, "'template' is not supported yet"),
        ({"context": [1, 2]}, "'context' is not supported yet"),
        ({"raw": True, "system": "Be brief."}, "'system' means nothing with 'raw'"),
        ({"raw": True, "think": True}, "'think' needs the chat template"),
    ],
)
async def test_errors_of_prompts(client, fields, told):
    assert told in await refused(client, "/api/generate", **fields)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(("name", "value"), [("think", -5), ("think", "much"), ("format", "xml"), ("format", [1])])
async def test_a_question_that_only_loads_has_its_fields_looked_at_too(client, path, name, value):
    """No message and no prompt: nothing is generated, but what is sent is not passed over either."""
    answer = await client.post(path, json={"model": "toy", name: value})
    assert (answer.status_code, f"'{name}' must be" in answer.text) == (400, True), answer.text


async def test_refusals_before_the_body_is_read_have_ollamas_shape_too(runtime):
    async with make_client(runtime, api_keys=("k",), max_body_bytes=1024) as client:
        for response, status in (
            (await client.post("/api/chat", json=ASK), 401),
            (await client.post("/api/chat", json=ASK, headers={"Authorization": "Bearer k", "Content-Length": "5000"}), 413),
            (await client.get("/api/chat", headers={"Authorization": "Bearer k"}), 405),
            (await client.post("/api/chat", content=b"{", headers={"Authorization": "Bearer k"}), 400),
        ):
            assert response.status_code == status
            assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("path", ["/api/blobs/sha256:0", "/api/nothing"])
async def test_routes_that_are_not_there_are_refused_in_ollamas_shape(client, path):
    response = await client.post(path, json=ASK)
    assert (response.status_code, response.json()) == (404, {"error": f"There is nothing at POST {path}."})


async def test_unknown_fields_and_settings_are_passed_over_if_the_server_says_so(runtime, caplog):
    async with make_client(runtime, ignore_unknown_parameters=True) as client:
        options = ASK["options"] | {"num_thread": 4, "tempo": 2}
        answer = await ask(client, options=options, colour=1)
        assert answer["message"] == (await ask(client))["message"]
        assert "'options.tempo' is ignored" in caplog.text
        assert "'options.mirostat'" in await refused(client, options={"mirostat": 1})


async def test_names_with_latest_find_the_model(client):
    assert (await ask(client, model="toy:latest"))["model"] == "toy:latest"
    assert "'nothing' is not served" in await refused(client, model="nothing:latest", status=404)


async def test_calls_of_tools_come_whole():
    answer = await said_by(f"Let me see.\n{CALL}\n{CALL_NOW}", tools=[WEATHER, NOW])
    message = answer["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "get_weather", "arguments": {"place": "Rome", "days": 3}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert answer["done_reason"] == "stop"


@pytest.mark.parametrize("value", ["[" * 300 + "]" * 300, "1e999", "123456789012345678901234567890"])
async def test_arguments_are_told_as_the_model_wrote_them(value):
    runtime = says(CALL_NOW.replace("{}", '{"a":\n' + value + "}"))
    free = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    fields = {"tools": [free], "options": {"temperature": 0}}
    try:
        async with make_client(runtime) as client:
            for stream in (False, True):
                response = await client.post("/api/chat", json=ASK | fields | {"stream": stream})
                said = response.text.splitlines()[1 if stream else 0]
                assert f'"name":"now","arguments":{{"a": {value}}}' in said
    finally:
        runtime.close()


async def test_a_call_that_is_cut_is_content():
    answer = await said_by(CALL, tools=[WEATHER], options={"temperature": 0, "num_predict": 60})
    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"] == CALL[:60]
    assert answer["done_reason"] == "length"


async def test_answers_of_tools_belong_to_the_calls_before_them(client):
    """Without ids: the prompt is that of the same messages with ids, in OpenAI's words."""
    question, call = {"role": "user", "content": "?"}, {"name": "now", "arguments": {}}
    history = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "tool_name": "now", "content": "noon"},
    ]
    with_ids = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    openai = {"messages": with_ids, "tools": [NOW], "temperature": 0, "max_tokens": 5, "tool_choice": "none"}
    other = (await client.post("/v1/chat/completions", json=openai)).json()
    assert (await ask(client, messages=history))["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    from_open_webui = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"index": 0, "id": "a", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    assert (await ask(client, messages=from_open_webui))["prompt_eval_count"] == other["usage"]["prompt_tokens"]


async def test_what_a_model_reasons_is_its_thinking():
    for think in (True, "max"):
        answer = await said_by("<think>\nHm.\n</think>\n\nNoon.", chat_template=THINKING_TEMPLATE, think=think)
        assert answer["message"] == {"role": "assistant", "content": "Noon.", "thinking": "Hm."}
    answer = await said_by("Noon.", chat_template=THINKING_TEMPLATE, think=False)
    assert answer["message"] == {"role": "assistant", "content": "Noon."}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_formats_are_followed(client, path):
    schema = {"type": "object", "properties": {"age": {"enum": [1, 2, 3]}}, "required": ["age"]}
    answer = await ask(client, path, format=schema, options={"temperature": 0})
    text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
    assert json.loads(text)["age"] in (1, 2, 3)


async def test_logprobs_are_of_the_text(client):
    whole = await ask(client, logprobs=True, top_logprobs=2)
    assert "".join(entry["token"] for entry in whole["logprobs"]) == whole["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
    pieces = lines(await client.post("/api/chat", json=ASK | {"logprobs": True, "top_logprobs": 2}))
    assert [entry for piece in pieces for entry in piece.get("logprobs", ())] == whole["logprobs"]
    raw = await ask(client, "/api/generate", raw=True, logprobs=True)
    assert "".join(entry["token"] for entry in raw["logprobs"]) == raw["response"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_nothing_asked_is_a_load(client, path):
    response = await client.post(path, json={"model": "toy"})
    assert (response.json()["done"], response.json()["done_reason"]) == (True, "load")
    assert "--idle-unload" in (await client.post(path, json={"model": "toy", "keep_alive": 0})).json()["error"]


async def test_a_client_that_leaves_takes_its_request_back(gated, gate):
    reader, writer = await asyncio.open_connection("127.0.0.1", gated.port)
    body = json.dumps(ASK).encode()
    writer.write(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    gate.allow(2)
    await reader.readuntil(b'"done":false}')
    writer.close()
    engine = gated.runtime.engine
    gate.open()
    async with asyncio.timeout(10):
        while engine.load().num_running:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)


async def test_a_failure_within_a_stream_is_a_line_of_its_own(runtime, client, monkeypatch):
    from penstock.serve import streams

    monkeypatch.setattr(streams.ChoiceReader, "finish_word", None)

    def fail(*_args):
        raise RuntimeError("broken")

    monkeypatch.setattr("penstock.serve.ollama.write.OllamaWriter._end", fail)
    *_, last = lines(await client.post("/api/chat", json=ASK))
    assert list(last) == ["error"]
    assert "internal error" in last["error"]


# Models


async def test_what_is_served_is_listed(client):
    tags = (await client.get("/api/tags")).json()["models"]
    assert [one["name"] for one in tags] == ["toy", "org/toy"]
    assert all(len(one["digest"]) == 64 for one in tags)
    [model, _] = (await client.get("/api/ps")).json()["models"]
    assert (model["name"], model["context_length"], model["expires_at"]) == ("toy", 2048, "2300-01-01T00:00:00Z")
    assert (await client.get("/api/version")).json() == {"version": "0.14.0"}, "Codex demands 0.13.4"


async def test_what_a_model_is():
    runtime = make_runtime(chat_template=CHAT_TEMPLATE)
    try:
        async with make_client(runtime) as client:
            shown = (await client.post("/api/show", json={"model": "toy:latest"})).json()
            assert shown["capabilities"] == ["completion", "tools"]
            assert shown["model_info"][".context_length"] == 2048
            assert (await client.post("/api/show", json={"model": "x"})).status_code == 404
    finally:
        runtime.close()


async def test_a_suffix_is_for_models_that_fill_in_the_middle(client, monkeypatch):
    async def can():
        return (await client.post("/api/show", json={"model": "toy"})).json()["capabilities"]

    assert "insert" not in await can()
    assert "'suffix' needs a model that was trained for it" in await refused(client, "/api/generate", suffix="b")
    monkeypatch.setattr(fim, "NAMES", (SPECIAL_TOKENS,))
    assert "insert" in await can()
    answer = await ask(client, "/api/generate", prompt="a = ", suffix=" + 1")
    openai = {"prompt": "a = ", "suffix": " + 1", "temperature": 0, "max_tokens": 5}
    other = (await client.post("/v1/completions", json=openai)).json()
    assert answer["response"] == other["choices"][0]["text"]
    assert answer["prompt_eval_count"] == other["usage"]["prompt_tokens"] == len("a =  + 1") + 3
    *pieces, _ = lines(await client.post("/api/generate", json=PROMPT | {"prompt": "a = ", "suffix": " + 1"}))
    assert "".join(piece["response"] for piece in pieces) == answer["response"]
    for fields, told in (({"system": "Be brief."}, "'system' means nothing"), ({"think": True}, "'think' needs")):
        assert told in await refused(client, "/api/generate", suffix="b", **fields)


async def test_many_calls_and_answers_are_matched_in_a_moment(client):
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 128}
    body = ASK | {"messages": [calls] * 200 + [{"role": "tool", "content": "x", "tool_name": "b"}] * 4000}
    begin = time.process_time()
    assert (await client.post("/api/chat", json=body)).status_code == 400  # more than the context holds
    assert time.process_time() - begin < 5


async def test_requests_share_the_reading_of_a_models_files(runtime):
    deployment, goes_on, num_reads = deployment_of(runtime), threading.Event(), 0

    def read_facts():
        nonlocal num_reads
        num_reads += 1
        goes_on.wait(20)
        return ModelFacts(architecture="llama")

    deployment.default.read_facts = read_facts
    transport = httpx.ASGITransport(create_app(deployment, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        asked = [asyncio.create_task(client.get("/api/tags")) for _ in range(20)]
        await until(lambda: num_reads)
        asked.pop().cancel()  # who leaves takes nothing from the others
        assert (await client.get("/load")).status_code == 200  # threads are left for that
        goes_on.set()
        for response in await asyncio.gather(*asked):
            assert response.json()["models"][0]["details"]["family"] == "llama"
    assert num_reads == 1


async def test_a_models_files_are_read_again_after_a_load():
    facts = iter([ModelFacts(architecture="old"), ModelFacts(architecture="new")])
    served = ServedModel(names=("a",), metrics=Metrics("a"), load=None, plan=None, read_facts=lambda: next(facts))
    cache = FactsCache()
    assert [(await cache.of(served)).architecture for _ in range(2)] == ["old", "old"]
    served.num_loads += 1
    assert (await cache.of(served)).architecture == "new"


async def test_a_models_files_are_read_again_if_they_have_changed(tmp_path):
    path = tmp_path / "a.gguf"
    served = ServedModel(
        names=("a",),
        metrics=Metrics("a"),
        load=None,
        plan=None,
        read_facts=lambda: ModelFacts(architecture=path.read_text()),
        path=path,
    )
    cache = FactsCache()
    for text in ("old", "newer"):
        path.write_text(text)
        served.look()
        assert (await cache.of(served)).architecture == text


async def test_a_models_files_that_could_not_be_read_are_read_again_later(monkeypatch):
    num_reads = 0

    def read_facts():
        nonlocal num_reads
        num_reads += 1
        raise ModelError("half a file")

    served = ServedModel(names=("a",), metrics=Metrics("a"), load=None, plan=None, read_facts=read_facts)
    cache = FactsCache()
    for retry_s, expected in ((float("inf"), 1), (float("inf"), 1), (0.0, 2)):
        monkeypatch.setattr("penstock.serve.cards.RETRY_S", retry_s)
        assert await cache.of(served) == ModelFacts()
        assert num_reads == expected


async def test_the_digest_of_a_model_does_not_depend_on_its_folder(runtime):
    async def digest(path, architecture):
        deployment = deployment_of(runtime)
        deployment.default.read_facts = lambda: ModelFacts(path=Path(path), architecture=architecture)
        transport = httpx.ASGITransport(create_app(deployment, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return (await client.get("/api/tags")).json()["models"][0]["digest"]

    assert await digest("/home/a/toy", "llama") == await digest("/srv/toy", "llama") != await digest("/srv/toy", "qwen2")


@pytest.mark.parametrize(("verb", "name"), [("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete")])
async def test_what_is_not_done_says_what_to_do(client, verb, name):
    response = await client.request(verb, f"/api/{name}", json={"model": "toy"})
    assert response.status_code == 501
    assert f"{verb} /api/{name} is not supported here." in response.json()["error"]


@pytest.mark.parametrize("page", [True, False])
async def test_clients_find_out_that_somebody_is_there(runtime, page):
    async with make_client(runtime, page=page) as client:
        response = await client.head("/")
        assert (response.status_code, response.content) == (200, b"")


# Embeddings


@pytest.fixture
async def embedder():
    runtime = make_text_runtime()
    async with make_client(runtime) as client:
        yield client
    runtime.close()


async def test_embeddings_are_those_of_openais_api(embedder):
    answer = (await embedder.post("/api/embed", json={"model": "toy", "input": ["a", "b"], "keep_alive": "5m"})).json()
    other = (await embedder.post("/v1/embeddings", json={"input": ["a", "b"]})).json()
    assert answer["embeddings"] == [one["embedding"] for one in other["data"]]
    assert answer["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    assert answer["total_duration"] > 0
    older = (await embedder.post("/api/embeddings", json={"model": "toy", "prompt": "a"})).json()
    assert older == {"embedding": answer["embeddings"][0]}
    short = (await embedder.post("/api/embed", json={"model": "toy", "input": "a", "dimensions": 3})).json()
    assert len(short["embeddings"][0]) == 3
    assert (await embedder.post("/api/show", json={"model": "toy"})).json()["capabilities"] == ["embedding"]


async def test_long_texts_are_cut_unless_that_is_refused(embedder):
    text = {"model": "toy", "input": "x" * 300}
    assert (await embedder.post("/api/embed", json=text)).json()["prompt_eval_count"] == 128
    response = await embedder.post("/api/embed", json=text | {"truncate": False})
    assert (response.status_code, "128" in response.json()["error"]) == (400, True)
    response = await embedder.post("/api/chat", json=ASK)
    assert "is an encoder and cannot generate text" in response.json()["error"]
