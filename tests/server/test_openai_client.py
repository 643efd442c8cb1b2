"""The official `openai` package against a real server: what its users write works unchanged."""

import asyncio
import json

import openai
import pytest

from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.openai_client import Answer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def sync_client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(live):
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_chat(sync_client):
    answer = sync_client.chat.completions.create(model="toy", messages=HI, temperature=0, max_tokens=10)
    assert answer.choices[0].message.content == oracle(HI_PROMPT, max_tokens=10)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens in (0, 16)


def test_chat_stream(sync_client):
    stream = sync_client.chat.completions.create(
        model="toy", messages=HI, temperature=0, max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == oracle(HI_PROMPT, max_tokens=10)
    assert chunks[-1].usage.completion_tokens == 10


def test_completion(sync_client):
    answer = sync_client.completions.create(model="toy", prompt=["a", "b"], temperature=0, max_tokens=5, logprobs=1)
    assert [choice.text for choice in answer.choices] == [oracle("a", max_tokens=5), oracle("b", max_tokens=5)]
    assert answer.choices[0].logprobs.tokens == list(oracle("a", max_tokens=5))


def test_completion_stream(sync_client):
    stream = sync_client.completions.create(model="toy", prompt="a", temperature=0, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == oracle("a", max_tokens=5)


def test_chat_logprobs(sync_client):
    answer = sync_client.chat.completions.create(
        model="toy", messages=HI, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list(oracle(HI_PROMPT, max_tokens=3))
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_extra_body_fields_of_vllm(sync_client):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "return_token_ids": True}
    answer = sync_client.chat.completions.create(model="toy", messages=HI, temperature=0, max_tokens=3, extra_body=extra)
    assert len(answer.choices[0].model_extra["token_ids"]) == 3


def test_an_answer_that_follows_a_schema(sync_client):
    schema = Answer.model_json_schema()
    answer = sync_client.chat.completions.create(
        model="toy",
        messages=HI,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    Answer.model_validate_json(answer.choices[0].message.content, strict=True)
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_is_parsed_by_the_client(sync_client):
    """`parse` writes the schema of the class by itself."""
    answer = sync_client.chat.completions.parse(model="toy", messages=HI, response_format=Answer)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_a_parsed_answer_comes_back_as_a_message(sync_client):
    """The client sends along what it keeps of an answer: `parsed`, `refusal`, `tool_calls`."""
    message = sync_client.chat.completions.parse(model="toy", messages=HI, response_format=Answer).choices[0].message
    kept = message.to_dict(warnings=False)
    assert kept["parsed"]

    def go_on(message):
        messages = [*HI, message, *HI]
        answer = sync_client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=5)
        return answer.choices[0].message.content

    plain = go_on({"role": "assistant", "content": message.content})
    assert go_on(kept) == plain
    litellm_keeps = {"function_call": None, "provider_specific_fields": {"refusal": None}}
    assert go_on({"role": "assistant", "content": message.content} | litellm_keeps) == plain
    with pytest.warns(UserWarning, match="parsed|Answer"):  # of the client's own, when it turns its class into JSON
        assert go_on(message) == plain


async def test_a_stream_is_parsed_by_the_client(async_client):
    ask = {"model": "toy", "messages": HI, "temperature": 1, "seed": 3}
    async with async_client.chat.completions.stream(**ask, response_format=Answer) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)


def test_vllms_field_comes_as_an_extra(sync_client):
    choices = ["yes", "no"]
    extra = {"structured_outputs": {"choice": choices}}
    answer = sync_client.chat.completions.create(model="toy", messages=HI, extra_body=extra)
    assert answer.choices[0].message.content in choices
    extra = {"structured_outputs": {"json": json.dumps({"const": "yes"})}}
    assert sync_client.completions.create(model="toy", prompt="a", extra_body=extra).choices[0].text == '"yes"'


def test_models(sync_client):
    assert [model.id for model in sync_client.models.list()] == ["toy", "org/toy"]
    assert sync_client.models.retrieve("org/toy").id == "org/toy"


def test_errors_become_the_clients_exceptions(sync_client):
    with pytest.raises(openai.BadRequestError) as caught:
        sync_client.chat.completions.create(model="toy", messages=HI, temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as caught:
        sync_client.chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"


def test_request_id_is_told(sync_client):
    answer = sync_client.chat.completions.create(model="toy", messages=HI, max_tokens=1, extra_headers={"X-Request-Id": "abc"})
    assert answer._request_id == "abc"
    assert answer.id == "chatcmpl-abc"


async def test_async_chat_and_stream(async_client):
    answer = await async_client.chat.completions.create(model="toy", messages=HI, temperature=0, max_tokens=10)
    assert answer.choices[0].message.content == oracle(HI_PROMPT, max_tokens=10)
    stream = await async_client.chat.completions.create(model="toy", messages=HI, temperature=0, max_tokens=10, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == oracle(HI_PROMPT, max_tokens=10)


async def test_many_streams_at_once_keep_apart(async_client):
    async def ask(index):
        stream = await async_client.completions.create(
            model="toy", prompt=f"prompt {index}", temperature=0, max_tokens=50, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*[ask(index) for index in range(48)])
    assert texts == [oracle(f"prompt {index}", max_tokens=50) for index in range(48)]


async def test_the_clients_stream_helper_works(async_client):
    whole = oracle(HI_PROMPT, max_tokens=10)
    ask = {"model": "toy", "messages": HI, "temperature": 0, "max_tokens": 10, "stop": whole[9]}
    async with async_client.chat.completions.stream(**ask) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.index(whole[9])]
    assert final.choices[0].finish_reason == "stop"
