"""The API of text-generation-inference, and `POST /`, over the hash executor."""

import json

import pytest

from penstock.deploy.running import Sources
from support.server.harness import make_client, make_runtime
from support.server.tools import says

PROMPT = {"inputs": "Hi", "parameters": {"max_new_tokens": 12}}


async def completion(client, **fields):
    body = {"prompt": "Hi", "max_tokens": 12, "temperature": 0} | fields
    return (await client.post("/v1/completions", json=body)).json()["choices"][0]


def events(response):
    return [json.loads(event.removeprefix("data:")) for event in response.text.strip().split("\n\n") if event[0] != ":"]


async def test_an_answer_is_the_completion_of_the_prompt(client):
    expected = (await completion(client))["text"]
    assert (await client.post("/generate", json=PROMPT)).json() == {"generated_text": expected}
    assert (await client.post("/", json=PROMPT)).json() == [{"generated_text": expected}]
    full = {"inputs": "Hi", "parameters": {"max_new_tokens": 12, "return_full_text": True}}
    assert (await client.post("/generate", json=full)).json() == {"generated_text": "Hi" + expected}


async def test_parameters_do_what_their_openai_names_do(client):
    parameters = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.3}
    expected = (await completion(client, **parameters))["text"]
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 12, "do_sample": True, **parameters}}
    assert (await client.post("/generate", json=body)).json()["generated_text"] == expected


async def test_details_have_the_tokens_and_the_end(client):
    chosen = await completion(client, return_token_ids=True)
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 12, "details": True}}
    details = (await client.post("/generate", json=body)).json()["details"]
    assert [token["id"] for token in details["tokens"]] == chosen["token_ids"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 12)


async def test_a_drawn_seed_can_be_sent_back():
    runtime = make_runtime(sources=Sources(draw_seed=lambda: 2**64 - 1))
    body = {"inputs": "Hi", "parameters": {"do_sample": True, "details": True}}
    async with make_client(runtime) as client:
        answer = (await client.post("/generate", json=body)).json()
        body["parameters"]["seed"] = answer["details"]["seed"]
        assert (await client.post("/generate", json=body)).json() == answer
    runtime.close()


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/"])
async def test_a_stream_has_an_event_for_each_token_and_the_text_in_the_last(client, path):
    expected = (await completion(client))["text"]
    body = PROMPT if path == "/generate_stream" else PROMPT | {"stream": True}
    told = events(await client.post(path, json=body))
    assert len(told) == 12
    assert "".join(event["token"]["text"] for event in told) == told[-1]["generated_text"] == expected
    assert told[-1]["details"]["finish_reason"] == "length"
    assert all(event["generated_text"] is None for event in told[:-1])


@pytest.mark.parametrize("text", ["ab", "xab", ""])
async def test_text_of_a_stream_is_on_tokens_that_are_not_special(text):
    """Text that might begin a stop string comes with the end token, which is special."""
    runtime = says(text)
    async with make_client(runtime) as client:
        told = events(await client.post("/generate_stream", json={"inputs": "Hi", "parameters": {"stop": ["abc"]}}))
    runtime.close()
    assert "".join(event["token"]["text"] for event in told if not event["token"]["special"]) == text
    assert told[-1]["token"]["special"]
    assert told[-1]["generated_text"] == text


async def test_a_grammar_is_followed(client):
    grammar = {"type": "regex", "value": "(yes|no)"}
    body = {"inputs": "Hi", "parameters": {"grammar": grammar, "details": True}}
    answer = (await client.post("/generate", json=body)).json()
    assert answer["generated_text"] in ("yes", "no")
    assert answer["details"]["finish_reason"] == "eos_token"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 5000}, "the answer may have 5000"),
        ({"do_sample": False, "temperature": 0.5}, "'parameters.do_sample' is false"),
        ({"watermark": True}, "'parameters.watermark' is not supported yet"),
        ({"grammar": {"type": "regex", "value": "("}}, "'parameters.grammar.value' is refused"),
        ({"adapter_id": "other"}, "The model 'other'"),
        ({"colour": 1}, "Unknown parameter: 'parameters.colour'"),
    ],
)
async def test_errors_name_the_parameter_in_this_api_s_shape(client, parameters, message):
    response = await client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]
    assert response.json()["error_type"] == "validation"


async def test_the_root_asks_for_a_key_where_the_page_does_not():
    runtime = make_runtime()
    try:
        async with make_client(runtime, api_keys=("secret",)) as client:
            assert (await client.get("/")).status_code == 200
            refused = await client.post("/", json=PROMPT)
            assert (refused.status_code, list(refused.json())) == (401, ["error", "error_type"])
            allowed = await client.post("/", json=PROMPT, headers={"Authorization": "Bearer secret"})
            assert allowed.status_code == 200
    finally:
        runtime.close()
