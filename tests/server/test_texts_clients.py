"""The official `openai` package against a real server of an encoder: what its users write works unchanged."""

import math

import openai
import pytest

from support.server.harness import EMBEDDER, LiveServer, make_text_runtime
from support.server.texts import near, numbers, unit


@pytest.fixture(scope="module")
def live():
    runtime = make_text_runtime(encoder=EMBEDDER)
    with LiveServer(runtime) as server:
        yield server
    runtime.close()


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_embeddings(client):
    # Without an encoding_format the client asks for base64, and decodes it with NumPy or without.
    answer = client.embeddings.create(model="toy", input=["hello", "you"])
    assert [one.embedding for one in answer.data] == [near(unit(numbers(text))) for text in ("hello", "you")]
    assert [one.index for one in answer.data] == [0, 1]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("toy", 12, 12)


def test_floats_and_dimensions(client):
    [one] = client.embeddings.create(model="toy", input="hello", encoding_format="float", dimensions=3).data
    assert one.embedding == near(unit(numbers("hello")[:3]))
    assert math.hypot(*one.embedding) == pytest.approx(1)


def test_token_ids(client):
    assert len(client.embeddings.create(model="toy", input=[[3, 4, 5], [6]]).data) == 2
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length"):
        client.embeddings.create(model="toy", input=[[100_257]])


def test_wrong_questions_are_errors_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="empty string") as raised:
        client.embeddings.create(model="toy", input="")
    assert raised.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="cannot generate text"):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


async def test_many_at_once(live):
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        answers = [client.embeddings.create(model="toy", input=[f"text {index}"] * 3) for index in range(40)]
        for index, answer in enumerate(answers):
            found = await answer
            assert [one.embedding for one in found.data] == [near(unit(numbers(f"text {index}")))] * 3
