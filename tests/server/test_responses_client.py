"""`/v1/responses` with the official `openai` package: what its users write works unchanged."""

import contextlib
import json
from itertools import islice

import openai
import pytest
from pydantic import BaseModel

from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, LiveServer, running, wait_until
from support.server.openai_client import Answer
from support.server.responses import FUNCTIONS, ROME
from support.server.tools import CALL, CALL_NOW, THINKING_TEMPLATE, TOOLS_TEMPLATE, says

ASK = {"model": "toy", "input": "hi", "temperature": 0}


@pytest.fixture(scope="module")
def client(live):
    with client_of(live) as client:
        yield client


def client_of(server, key="unused"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def serving(runtime):
    """A server over a runtime, and a client of it."""
    try:
        with LiveServer(runtime) as server, client_of(server) as client:
            yield client
    finally:
        runtime.close()


def test_create(client):
    response = client.responses.create(**ASK, max_output_tokens=10, metadata={"topic": "demo"})
    assert response.output_text == oracle(HI_PROMPT, max_tokens=10)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 10
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.usage.input_tokens_details.cached_tokens in (0, 16)
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert response.metadata == {"topic": "demo"}


def test_stream(client):
    events = list(client.responses.create(**ASK, max_output_tokens=10, stream=True))
    text = oracle(HI_PROMPT, max_tokens=10)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == text
    assert "Unknown" not in {type(event).__name__ for event in events}


def test_the_clients_stream_helper():
    with serving(says("It rains.")) as client, client.responses.stream(**ASK) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "It rains."
    assert final.status == "completed"


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of the client's own, under some releases of pydantic
def test_an_answer_is_parsed_by_the_client(client):
    response = client.responses.parse(model="toy", input="hi", text_format=Answer)
    assert isinstance(response.output_parsed, Answer)
    with client.responses.stream(model="toy", input="hi", text_format=Answer) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Answer)
    kept = [{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "hi"}]
    assert client.responses.create(model="toy", input=kept, max_output_tokens=3).output_text


def test_functions():
    with serving(says(f"One moment.\n{CALL}\n{CALL_NOW}", chat_template=TOOLS_TEMPLATE)) as client:
        response = client.responses.create(**ASK, tools=FUNCTIONS)
        calls = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", ROME), ("now", {})]
        with client.responses.stream(**ASK, tools=FUNCTIONS) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        assert json.loads(snapshots[-1]) == {}
        assert [item.name for item in final.output if item.type == "function_call"] == ["get_weather", "now"]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
        following = client.responses.create(**ASK | {"input": outputs}, previous_response_id=response.id, tools=FUNCTIONS)
        for said in (response.output, [item.model_dump() for item in response.output]):
            history = [{"role": "user", "content": "hi"}, *said, *outputs]
            by_hand = client.responses.create(**ASK | {"input": history}, tools=FUNCTIONS)
            assert by_hand.usage.input_tokens == following.usage.input_tokens > response.usage.input_tokens + 20


def test_a_pydantic_function_is_parsed():
    class GetWeather(BaseModel):
        place: str
        days: int

    call = CALL.replace("get_weather", "GetWeather")
    with serving(says(call, chat_template=TOOLS_TEMPLATE)) as client:
        tool = openai.pydantic_function_tool(GetWeather)
        tool = {"type": "function", **tool["function"]}
        response = client.responses.parse(**ASK, tools=[tool])
        assert response.output[0].parsed_arguments == ROME


def test_reasoning():
    with serving(says("<think>Sun?</think>\nSun.", chat_template=THINKING_TEMPLATE)) as client:
        with client.responses.stream(**ASK, reasoning={"effort": "low"}) as stream:
            events = list(stream)
            final = stream.get_final_response()
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == final.output[0].content[0].text == "Sun?"
        assert final.output_text == "Sun."
        assert final.usage.output_tokens_details.reasoning_tokens == len("<think>Sun?</think>")
        again = client.responses.create(model="toy", input=[*final.output, {"role": "user", "content": "hi"}])
        assert again.output_text == "Sun."


def test_a_conversation_goes_on(client):
    one = client.responses.create(**ASK, max_output_tokens=4, instructions="be brief")
    two = client.responses.create(**ASK | {"input": "more"}, max_output_tokens=4, previous_response_id=one.id)
    three = client.responses.create(**ASK | {"input": "end"}, max_output_tokens=4, previous_response_id=two.id)
    turn = "<|turn|>user: {}<|end|>\n<|turn|>assistant: {}<|end|>\n"
    prompt = turn.format("hi", one.output_text) + turn.format("more", two.output_text)
    prompt += "<|turn|>user: end<|end|>\n<|turn|>assistant: "
    assert three.output_text == oracle(prompt, max_tokens=4)  # without the instructions, which are of one response alone
    assert three.previous_response_id == two.id
    kept = client.responses.retrieve(two.id)
    assert kept.to_dict() == two.to_dict()
    client.responses.delete(two.id)
    with pytest.raises(openai.NotFoundError, match="it was deleted"):
        client.responses.retrieve(two.id)
    with pytest.raises(openai.NotFoundError, match="it was deleted") as caught:
        client.responses.create(**ASK, previous_response_id=three.id)
    assert caught.value.param == "previous_response_id"


def test_an_item_is_named_by_its_id(client):
    one = client.responses.create(**ASK, max_output_tokens=4)
    items = [
        {"role": "user", "content": "hi"},
        {"type": "item_reference", "id": one.output[0].id},
        {"role": "user", "content": "end"},
    ]
    named = client.responses.create(**ASK | {"input": items}, max_output_tokens=4)
    following = client.responses.create(**ASK | {"input": "end"}, max_output_tokens=4, previous_response_id=one.id)
    assert named.output_text == following.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK | {"input": [{"type": "item_reference", "id": "msg_none_0"}]})


def test_input_items(client):
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    response = client.responses.create(**ASK | {"input": said}, max_output_tokens=1)
    items = client.responses.input_items.list(response.id, limit=2)
    assert [item.content[0].text for item in items.data] == ["4", "3"]
    assert [item.content[0].text for item in items] == ["4", "3", "2", "1", "0"]  # the client turns the pages
    assert next(iter(client.responses.input_items.list(response.id, order="asc"))).content[0].text == "0"


def test_an_item_that_was_sent_twice_is_listed_twice(client):
    items = [{"id": f"msg_{name}", "role": "user", "content": name} for name in "abac"]
    response = client.responses.create(model="toy", input=items, max_output_tokens=1)
    for order, texts in (("asc", "abac"), ("desc", "caba")):
        listed = client.responses.input_items.list(response.id, limit=1, order=order)
        assert [item.content[0].text for item in islice(listed, 9)] == [*texts]


def test_what_is_not_stored_is_not_found(client):
    response = client.responses.create(**ASK, max_output_tokens=1, store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError, match="'store': false"):
        client.responses.retrieve(response.id)


def test_a_stream_is_kept_too(client):
    *_, last = client.responses.create(**ASK, max_output_tokens=5, stream=True)
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_in_the_background():
    gate = GatedExecutor(CAPACITY, model=PRINTABLE_MODEL)
    with running(gate) as server, client_of(server) as client:
        response = client.responses.create(**ASK, max_output_tokens=5, background=True)
        assert (response.status, response.background, response.output) == ("queued", True, [])
        with pytest.raises(openai.ConflictError, match="has not ended"):
            client.responses.create(**ASK, previous_response_id=response.id)
        gate.allow(2)
        wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
        gate.open()
        wait_until(lambda: client.responses.retrieve(response.id).status == "incomplete")
        done = client.responses.retrieve(response.id)
        assert done.output_text == oracle(HI_PROMPT, max_tokens=5)
        assert done.usage.output_tokens == 5
        assert client.responses.cancel(response.id).status == "incomplete"
        following = client.responses.create(**ASK | {"input": "end"}, max_output_tokens=4, previous_response_id=response.id)
        assert following.usage.input_tokens > done.usage.input_tokens


def test_cancel():
    gate = GatedExecutor(CAPACITY, model=PRINTABLE_MODEL)
    with running(gate) as server, client_of(server) as client:
        response = client.responses.create(**ASK, background=True)
        gate.allow(3)
        wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
        assert client.responses.cancel(response.id).status == "cancelled"
        assert client.responses.retrieve(response.id).status == "cancelled"
        gate.open()
        wait_until(lambda: not server.runtime.engine.load().num_running)
        other = client.responses.create(**ASK, background=True)
        client.responses.delete(other.id)
        wait_until(lambda: not server.runtime.engine.load().num_running)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(other.id)
        plain = client.responses.create(**ASK, max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="'background': true"):
            client.responses.cancel(plain.id)
