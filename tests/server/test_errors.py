"""Every error that a client can cause: status, code, type, named parameter. Never a 422, never a 500, never a silent change."""

import asyncio

import httpx
import pytest

from penstock import fast_json
from penstock.clock import VirtualClock
from penstock.config import ServerConfig
from penstock.serve.errors import from_rejected
from penstock.testing import HashExecutor
from penstock.types.errors import Rejected, RejectReason
from penstock.types.plan import Capacity
from support.failing_executor import FailingExecutor
from support.server.completions import oracle
from support.server.errors import CHAT, COMPLETIONS, check
from support.server.harness import VOCAB_SIZE, GatedExecutor, make_client, make_runtime, running, until

HI = [{"role": "user", "content": "hi"}]
DEEP = fast_json.loads("[" * 300 + "]" * 300)


def check_failed_stream(response, code):
    """The stream ends with an error object, and says this."""
    assert response.status_code == 200
    event = response.text.removesuffix("\n\n").split("\n\n")[-1]
    error = fast_json.loads(event.removeprefix("data: "))["error"]
    assert error["code"] == code
    return error


BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [[5], [259]]}, "prompt[1]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": "a", "n": "2"}, "n"),
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": "a", "n": 1.0}, "n"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "16"}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "top_p": -0.1}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stop": ""}, "stop[0]"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": "x" * 257}, "stop[0]"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "stop": 1}, "stop"),
    ({"prompt": "a", "stop_token_ids": [259]}, "stop_token_ids"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [1000]}, "allowed_token_ids"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words[0]"),
    ({"prompt": "a", "bad_words": ["  "]}, "bad_words"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"259": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"prompt": "a", "use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"prompt": "a", "use_beam_search": True, "min_tokens": 2}, "min_tokens"),
    ({"prompt": "a", "use_beam_search": True, "stop": "x"}, "stop"),
    ({"prompt": "a", "use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias"),
    ({"prompt": "a", "use_beam_search": True, "n": 20}, "n"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "stop_token_ids": list(range(20, 60))}, "stop_token_ids"),
    ({"prompt": "a", "use_beam_search": True, "seed": 5}, "seed"),
    ({"prompt": "a", "use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"prompt": "a", "use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"prompt": "a", "use_beam_search": True, "early_stopping": 1}, "early_stopping"),
    ({"prompt": "a", "length_penalty": 1.1}, "length_penalty"),
    ({"prompt": "a", "early_stopping": True}, "early_stopping"),
    ({"prompt": "a", "early_stopping": "never"}, "early_stopping"),
    ({"prompt": "a", "use_beam_search": 0}, "use_beam_search"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"nope": True}}, "stream_options.nope"),
    ({"prompt": "a", "priority": 1}, "priority"),
    ({"prompt": "a", "request_id": "a b"}, "request_id"),
    ({"prompt": "a", "request_id": ""}, "request_id"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "tools": []}, "tools"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
async def test_bad_completion_body_names_the_field(client, body, param):
    check(await client.post(COMPLETIONS, json=body), 400, "invalid_request_error", param)


BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "user", "content": "hi", "tool_call_id": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [*HI, {"role": "tool", "content": "hi"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages[0].content[0].x"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "hi", "extra": 1}]}, "messages[0].extra"),
    ({"messages": [*HI, {"role": "system", "content": "late"}]}, "messages"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "functions": [{}]}, "functions"),
    ({"messages": HI, "audio": {}}, "audio"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities"),
    ({"messages": HI, "reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template_kwargs": {"xml_tools": []}}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    ({"messages": HI, "logprobs": 3}, "logprobs"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": HI, "max_tokens": -1.0}, "max_tokens"),
    ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": HI, "prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
async def test_bad_chat_body_names_the_field(client, body, param):
    check(await client.post(CHAT, json=body), 400, "invalid_request_error", param)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt":' + b"[" * 5000,
    ],
    ids=lambda content: repr(content[:30]),
)
async def test_malformed_json_is_a_400(client, content):
    check(await client.post(COMPLETIONS, content=content), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "\xff"}', "The body is not valid JSON: byte 0xff is not UTF-8: line 1 column 13 (char 12)."),
        ('{\n"prompt": "éé'.encode() + b'\xe2\x82"}', "byte 0xe2 is not UTF-8: line 2 column 14 (char 15)."),
        (b'{"prompt": "\xed\xa0\x80"}', "The body is not valid JSON: byte 0xed is not UTF-8: line 1 column 13"),
        ('{"prompt": "a"}'.encode("utf-16"), "byte 0xff is not UTF-8: line 1 column 1 (char 0)."),
        (b'{"prompt": "\\ud800"}', "unpaired surrogate in a \\u escape at line 1 column 13."),
        (b'{"prompt": "x\\udc00"}', "unpaired surrogate in a \\u escape at line 1 column 14."),
        (b'{"prompt" "a"}', "The body is not valid JSON: expected ':'"),
        *[(b'{"seed": %s}' % number, "a number is out of range.") for number in (b"1e400", b"9" * 400, b"9" * 5000)],
        (b'{"prompt": %s1%s}' % (b"[" * 800, b"]" * 800), "it is nested in more than 800 levels."),
    ],
    ids=range(11),
)
async def test_a_body_that_is_no_json_says_why_and_where(client, content, words):
    error = check(await client.post(COMPLETIONS, content=content), 400, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"seed": 2**64}, "'seed' must be an integer of at most 64 bits."),
        (COMPLETIONS, {"seed": -(2**64)}, "'seed' must be an integer of at most 64 bits."),
        (COMPLETIONS, {"seed": 2**63}, f"'seed' must be at most {2**63 - 1}, not {2**63}."),
        (COMPLETIONS, {"seed": 1.5}, "'seed' must be an integer."),
        (COMPLETIONS, {"seed": "1"}, "'seed' must be an integer."),
        (COMPLETIONS, {"temperature": "1"}, "'temperature' must be a number."),
        (COMPLETIONS, {"stream": 1}, "'stream' must be true or false."),
        (COMPLETIONS, {"model": 1}, "'model' must be a string."),
        (COMPLETIONS, {"stream_options": []}, "'stream_options' must be an object."),
        (COMPLETIONS, {"stop_token_ids": {}}, "'stop_token_ids' must be a list."),
        (COMPLETIONS, {"stop": ["x"] * 17}, "'stop' must have at most 16 items."),
        (COMPLETIONS, {"stop": ""}, "'stop[0]' must have at least 1 character."),
        (COMPLETIONS, {"stop": "x" * 257}, "'stop[0]' must have at most 256 characters."),
        (COMPLETIONS, {"use_beam_search": True, "early_stopping": "x"}, "'early_stopping' must be true, false or 'never'."),
        (COMPLETIONS, {"structured_outputs": {"json": 1}}, "'structured_outputs.json' must be an object, or a string of"),
        (COMPLETIONS, {"watermarking": True}, "'watermarking' is not supported yet (accepted: null or false)."),
        (CHAT, {"messages": ["hi"]}, "'messages[0]' must be an object."),
        (CHAT, {"messages": []}, "'messages' must have at least 1 item."),
        (
            CHAT,
            {"chat_template_kwargs": {str(i): 1 for i in range(257)}},
            "'chat_template_kwargs' must have at most 256 entries.",
        ),
        (CHAT, {"web_search_options": {}}, "'web_search_options' is not supported yet."),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_messages_speak_of_json_and_name_the_limit(client, path, fields, message):
    base = {"messages": HI} if path == CHAT else {"prompt": "a"}
    response = await client.post(path, json=base | fields)
    assert check(response, 400, "invalid_request_error", message.split("'")[1])["message"].startswith(message)


async def test_seeds_from_end_to_end_of_their_range_are_taken(client):
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        assert (await client.post(COMPLETIONS, json={"prompt": "a", "seed": seed, "max_tokens": 1})).status_code == 200


async def test_other_content_types_are_refused(client):
    response = await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "application/json" in check(response, 400, "invalid_request_error")["message"]


async def test_unknown_long_names_are_told_back_shortened(client):
    error = (await client.post(COMPLETIONS, json={"prompt": "a", "x" * 100_000: 1})).json()["error"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("url", "body", "param", "numbers"),
    [
        (COMPLETIONS, {"prompt": "x" * 2000, "max_tokens": 100}, "max_tokens", ("2048", "2000", "100", "52")),
        (COMPLETIONS, {"prompt": "x" * 2040}, "prompt", ("2048", "2040", "16", "8")),
        (COMPLETIONS, {"prompt": ["a", "x" * 2050]}, "prompt[1]", ("2048", "2050")),
        (COMPLETIONS, {"prompt": [5] * 2048, "max_tokens": 1}, "prompt", ("2048", "1 too many")),
        (COMPLETIONS, {"prompt": "x" * 3_000_000}, "prompt", ("2048",)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2048}], "max_tokens": 1}, "messages", ("2048",)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2048}]}, "messages", ("2048",)),
    ],
    ids=range(7),
)
async def test_what_exceeds_the_context_is_told_with_numbers(client, url, body, param, numbers):
    error = check(await client.post(url, json=body), 400, "context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 2048 tokens (toy)")  # LiteLLM looks for that
    assert all(number in error["message"] for number in numbers), error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_that_may_be_longer_than_the_context_ends_with_it(client, name):
    answer = (await client.post(CHAT, json={"messages": HI, name: 64_000})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2048


async def test_what_can_never_fit_the_memory_is_a_context_error_with_numbers():
    tiny = Capacity(num_blocks=5, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=2048)
    runtime = make_runtime(GatedExecutor(tiny))
    try:
        async with make_client(runtime) as client:
            error = check(
                await client.post(COMPLETIONS, json={"prompt": "x" * 60, "max_tokens": 60}), 400, "context_length_exceeded"
            )
            assert any(char.isdigit() for char in error["message"])
    finally:
        runtime.close()


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_unknown_model_is_a_404(client, url):
    inputs = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": HI}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": []}}
    error = check(await client.post(url, json=inputs[url] | {"model": "gpt-9"}), 404, "model_not_found", "model")
    assert "toy" in error["message"]


async def test_unknown_model_card_is_a_404(client):
    check(await client.get("/v1/models/nope"), 404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1", 404), ("/v1/assistants", 404), ("/load", 405), ("/v1/models/", 405), ("/v1/completions/", 404)]
)
async def test_unknown_routes_have_plain_answers(client, path, status):
    check(await client.post(path, json={}), status, "not_found" if status == 404 else "method_not_allowed")


async def test_wrong_method_names_the_right_one(client):
    response = await client.get(CHAT)
    check(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert (await client.put("/v1/requests/x")).headers["allow"] == "DELETE, GET, HEAD"
    assert (await client.post("/health", json={})).headers["allow"] == "GET, HEAD"


async def test_chat_without_a_template_says_what_to_do():
    runtime = make_runtime(chat_template=None)
    try:
        async with make_client(runtime) as client:
            error = check(await client.post(CHAT, json={"messages": HI}), 400, "invalid_request_error", "messages")
            assert "--chat-template" in error["message"]
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Deadline-Ms", "soon"),
        ("X-Deadline-Ms", "0"),
        ("X-Deadline-Ms", "1.5"),
        ("X-Priority", "high"),
        ("X-Priority", "99999999999"),
        ("X-Tenant", "a b"),
        ("X-Tenant", ""),
        ("X-SLO-TTFT-Ms", "0"),
        ("X-SLO-ITL-Ms", "fast"),
        ("X-Queue-Timeout-Ms", "-1"),
        ("X-First-Token-Timeout-Ms", "1s"),
        ("X-Request-Id", "a b"),
        ("X-Request-Id", "x" * 129),
        ("X-Request-Id", ""),
    ],
)
async def test_bad_headers_are_named(client, name, value):
    response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers={name: value})
    check(response, 400, "invalid_request_error", name)


@pytest.mark.parametrize("name", ["X-Tenant", "X-Deadline-Ms", "X-SLO-TTFT-Ms"])
async def test_a_header_that_was_sent_twice_is_named(client, name):
    response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=[(name, "10000"), (name, "20000")])
    check(response, 400, "invalid_request_error", name)


async def test_body_and_header_must_not_disagree(client):
    response = await client.post(COMPLETIONS, json={"prompt": "a", "request_id": "x"}, headers={"X-Request-Id": "y"})
    check(response, 400, "invalid_request_error", "request_id")
    response = await client.post(COMPLETIONS, json={"prompt": "a", "priority": 1}, headers={"X-Priority": "2"})
    check(response, 400, "invalid_request_error", "priority")


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})]
)
async def test_the_refusal_of_an_unknown_model_has_the_id_that_the_body_gave(client, path, fields):
    body = {"model": "nope", **fields}
    response = await client.post(path, json={**body, "request_id": "mine"})
    check(response, 404, "model_not_found", "model")
    assert response.headers["x-request-id"] == "mine"
    response = await client.post(path, json={**body, "request_id": "x"}, headers={"X-Request-Id": "y"})
    check(response, 400, "invalid_request_error", "request_id")


async def test_a_priority_without_effect_is_named_as_it_was_sent(client):
    for fields, headers, name in (({"priority": 1}, {}, "priority"), ({}, {"X-Priority": "1"}, "X-Priority")):
        response = await client.post(COMPLETIONS, json={"prompt": "a", **fields}, headers=headers)
        assert name in check(response, 400, "invalid_request_error", name)["message"]


async def test_priority_is_taken_where_the_order_looks_at_it(monkeypatch):
    runtime, priorities = make_runtime(is_priority_scheduled=True), []
    submit = runtime.engine.submit

    def note(*requests):
        priorities.extend(request.priority for request in requests)
        submit(*requests)

    monkeypatch.setattr(runtime.engine, "submit", note)
    try:
        async with make_client(runtime) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a", "priority": -3})
            assert response.status_code == 200
    finally:
        runtime.close()
    assert priorities == [-3]


async def test_passed_deadline_is_a_408():
    executor, clock = GatedExecutor(), VirtualClock()
    with running(executor, clock=clock) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Deadline-Ms": "5"}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            clock.advance(6_000_000)
            executor.allow()
            error = check(await ask, 408, "deadline_exceeded")
            assert (await ask).headers["x-should-retry"] == "false"  # OpenAI's client repeats other 408s.
        executor.open()
    assert "within its deadline of 5 ms (X-Deadline-Ms or --request-timeout)" in error["message"]
    assert "was queued for 0 ms and ran for 6 ms; tokens generated: 0." in error["message"]
    assert "Allow more time" in error["message"]


async def test_request_timeout_is_everyones_deadline():
    executor, clock = GatedExecutor(), VirtualClock()
    with running(executor, clock=clock, config=ServerConfig(port=0, request_timeout_s=0.005)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Deadline-Ms": "50"}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            clock.advance(6_000_000)
            executor.allow()
            check(await ask, 408, "deadline_exceeded")
        executor.open()


async def test_deadline_within_a_stream_ends_it_with_an_error_event():
    executor, clock = GatedExecutor(), VirtualClock()
    with running(executor, clock=clock) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            executor.allow()
            body = {"prompt": "a", "max_tokens": 2000, "stream": True}
            async with client.stream("POST", COMPLETIONS, json=body, headers={"X-Deadline-Ms": "5"}) as response:
                assert response.status_code == 200
                clock.advance(6_000_000)
                executor.open()
                lines = [line async for line in response.aiter_lines() if line]
        assert '"deadline_exceeded"' in lines[-1]
        assert "data: [DONE]" not in lines


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_failed_executor_is_a_503_and_health_says_so(is_streamed):
    runtime = make_runtime(FailingExecutor(HashExecutor(), fail_at_step=0))
    try:
        async with make_client(runtime) as client:
            body = {"prompt": [5, 6], "stream": is_streamed}
            response = await client.post(COMPLETIONS, json=body)
            if is_streamed:
                check_failed_stream(response, "unavailable")
            else:
                check(response, 503, "unavailable")
                assert int(response.headers["retry-after"]) >= 1
            check(await client.get("/health"), 503, "unavailable")
            check(await client.get("/ready"), 503, "unavailable")
            check(await client.post(COMPLETIONS, json=body), 503, "unavailable")
    finally:
        runtime.close()


async def test_failure_within_a_stream_is_an_error_event_after_all_text_and_the_end():
    gate = GatedExecutor()
    with running(FailingExecutor(gate, fail_at_step=3)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            gate.allow()
            body = {"prompt": "Hello", "max_tokens": 50, "stream": True, "temperature": 0}
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                gate.open()
                lines = [line async for line in response.aiter_lines()]
    *pieces, last = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "".join(fast_json.loads(piece)["choices"][0]["text"] for piece in pieces) == oracle("Hello", max_tokens=3)
    assert fast_json.loads(last)["error"]["code"] == "unavailable"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_fails_alone_is_a_500_and_the_next_is_served(is_streamed, monkeypatch):
    runtime = make_runtime()
    try:
        async with make_client(runtime) as client:
            with monkeypatch.context() as broken:
                broken.setattr(runtime.engine._output, "_make_detokenizer", lambda _shown: 1 / 0)
                response = await client.post(
                    COMPLETIONS, json={"prompt": [70], "stream": is_streamed}, headers={"X-Request-Id": "find-me"}
                )
            error = check_failed_stream(response, "internal_error") if is_streamed else check(response, 500, "internal_error")
            assert "find-me" in error["message"]
            assert "retry-after" not in response.headers
            assert (await client.get("/health")).status_code == 200
            assert (await client.post(COMPLETIONS, json={"prompt": [70]})).status_code == 200
    finally:
        runtime.close()


async def test_our_own_bug_is_a_500_with_the_request_id_and_no_stack(runtime, client, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("penstock.calls.check.check_sampling", broken)
    response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "find-me"})
    error = check(response, 500, "internal_error")
    assert "find-me" in error["message"]
    assert "secret" not in response.text
    assert "find-me" in caplog.text
    assert "secret detail" in caplog.text


async def test_our_own_bug_within_a_stream_is_an_error_event(runtime, client, monkeypatch, caplog):
    monkeypatch.setattr("penstock.serve.openai.write.CompletionWriter.end", lambda self: 1 / 0)
    response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert '"internal_error"' in response.text
    assert "[DONE]" not in response.text
    assert runtime.bridge.num_open_requests == 0
    assert "ZeroDivisionError" in caplog.text


async def test_cancelled_request_says_so():
    executor = GatedExecutor()
    with running(executor) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(
                client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 100}, headers={"X-Request-Id": "mine"})
            )
            await until(lambda: server.runtime.engine.load().num_running == 1)
            answer = await client.delete("/v1/requests/mine")
            assert answer.json() == {"id": "mine", "object": "request", "cancelled": True}
            executor.allow(2)
            check(await ask, 499, "request_cancelled")
            check(await client.delete("/v1/requests/mine"), 404, "request_not_found")
        executor.open()


def test_every_reason_to_refuse_has_an_answer():
    for reason in RejectReason:
        error = from_rejected(Rejected(reason, "because"))
        assert 400 <= error.status_code < 600


async def test_tokens_that_only_the_tokenizer_has_are_refused():
    """A model whose tokenizer got a token without a row in the embedding, as fine-tuned ones have."""
    runtime = make_runtime(vocab_size=VOCAB_SIZE - 1)
    try:
        async with make_client(runtime) as client:
            for field, param in (({"prompt": "a~"}, "prompt"), ({"prompt": "a", "bad_words": ["b", "~"]}, "bad_words[1]")):
                error = check(await client.post(COMPLETIONS, json=field), 400, "invalid_request_error", param)
                assert f"'~', token {VOCAB_SIZE - 1} " in error["message"]
            body = {"messages": [{"role": "user", "content": "~"}]}
            check(await client.post(CHAT, json=body), 400, "invalid_request_error", "messages")
            assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    finally:
        runtime.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_fault_before_the_answer_begins_leaves_nothing_behind(runtime, client, monkeypatch, is_streamed, path):
    monkeypatch.setattr("penstock.serve.streams.Usage", lambda _call: 1 / 0)
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    response = await client.post(
        path, json={**body, "stream": is_streamed, "max_tokens": 2000}, headers={"X-Request-Id": "mine"}
    )
    check(response, 500, "internal_error")
    assert runtime.bridge.num_open_requests == 0
    check(await client.delete("/v1/requests/mine"), 404, "request_not_found")


async def test_cancelling_an_id_spares_the_one_that_it_is_an_answer_of():
    executor = GatedExecutor()
    with running(executor) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = {"prompt": "a", "max_tokens": 3}
            asks = [
                asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}))
                for name in ("x", "cmpl-x", "y")
            ]
            await until(lambda: server.runtime.bridge.num_open_requests == 3)
            for name in ("cmpl-x", "cmpl-y"):
                assert (await client.delete(f"/v1/requests/{name}")).status_code == 200
            executor.open()
            assert [(await ask).status_code for ask in asks] == [200, 499, 499]
