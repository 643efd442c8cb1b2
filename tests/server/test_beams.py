"""`use_beam_search` over HTTP: the choices are the hypotheses of one search, the best first."""

from dataclasses import replace

import httpx
import pytest

from penstock.sched.choosing.beam_search import BeamSearch
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import ROOT, mix
from penstock.types.sampling import BeamParams, EarlyStopping, SamplingParams
from support.server.completions import ask, events
from support.server.harness import CAPACITY, END_ID, PRINTABLE_MODEL, make_client, make_runtime, make_tokenizer

CHAT = "/v1/chat/completions"
TOKENIZER = make_tokenizer()


def hypotheses(token_ids, width, max_tokens, *, length_penalty=1.0, early_stopping=False):
    """Texts of a search without engine or server."""
    params = BeamParams(width=width, length_penalty=length_penalty, early_stopping=EarlyStopping.of(early_stopping))
    search = BeamSearch(params, {END_ID}, max_tokens)
    while not search.is_done:
        tops = []
        for beam in search.beams:
            value = ROOT
            for token_id in (*token_ids, *beam.token_ids):
                value = mix(value, token_id)
            sampled = PRINTABLE_MODEL.sample(value, SamplingParams(temperature=0.0), len(beam.token_ids))
            tops.append(PRINTABLE_MODEL.logprobs(sampled, width + 1))
        search.advance(tops)
    return [TOKENIZER.decode(beam.token_ids) for beam in search.finished]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=True)


async def test_completions_are_the_hypotheses(client):
    answer = await ask(client, prompt="Hello", n=4, use_beam_search=True, max_tokens=10)
    assert [choice["text"] for choice in answer["choices"]] == hypotheses(encode("Hello"), 4, 10)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
async def test_the_search_can_be_told_what_to_prefer(client, early_stopping):
    body = {"length_penalty": 0.0, "early_stopping": early_stopping, "temperature": 0, "top_p": 1.0, "top_k": -1}
    answer = await ask(client, prompt="you", n=3, use_beam_search=True, max_tokens=6, **body)
    expected = hypotheses(encode("you"), 3, 6, length_penalty=0.0, early_stopping=early_stopping)
    assert [choice["text"] for choice in answer["choices"]] == expected


async def test_every_prompt_has_its_own_search(client):
    answer = await ask(client, prompt=["Hello", "you"], n=2, use_beam_search=True, max_tokens=5)
    expected = [*hypotheses(encode("Hello"), 2, 5), *hypotheses(encode("you"), 2, 5)]
    assert [choice["text"] for choice in answer["choices"]] == expected


async def test_a_stream_brings_each_hypothesis_at_once(client):
    response = await client.post(
        "/v1/completions", json={"prompt": "Hello", "n": 2, "use_beam_search": True, "max_tokens": 6, "stream": True}
    )
    sent, is_done = events(response.text)
    assert is_done
    assert [event["choices"][0]["text"] for event in sent] == hypotheses(encode("Hello"), 2, 6)


async def test_chat_takes_it_too(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "use_beam_search": True, "max_tokens": 6}
    whole = (await client.post(CHAT, json=body | {"return_token_ids": True})).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == hypotheses(whole["prompt_token_ids"], 2, 6)
    sent, _ = events((await client.post(CHAT, json=body | {"stream": True})).text)
    contents = [event["choices"][0] for event in sent if event["choices"][0]["delta"].get("content")]
    assert [choice["delta"]["content"] for choice in contents] == texts


async def test_logprobs_of_the_chosen_tokens_are_told(client):
    answer = await ask(client, prompt="Hello", n=2, use_beam_search=True, max_tokens=4, logprobs=1)
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert len(choice["logprobs"]["token_logprobs"]) == 4


async def test_more_beams_than_rows_are_refused():
    runtime = make_runtime(HashExecutor(replace(CAPACITY, max_rows=2), model=PRINTABLE_MODEL))
    try:
        async with make_client(runtime) as client:
            body = {"prompt": "a", "n": 3, "use_beam_search": True}
            for stream in (False, True):
                response = await client.post("/v1/completions", json=body | {"stream": stream})
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == "n"
                assert "at most 2, the rows that run at once (--max-num-seqs)" in error["message"]
    finally:
        runtime.close()


async def test_tenants_share_no_prefixes_if_they_are_isolated():
    runtime = make_runtime()
    try:
        for isolates, expected in ((False, [0, 99, 99]), (True, [0, 99, 0])):
            runtime.prefix_sharing = "tenant" if isolates else "all"
            found = []
            async with make_client(runtime) as client:
                for tenant in ("one", "one", "other"):
                    body = {"prompt": str(isolates)[0] * 100, "max_tokens": 1}
                    response: httpx.Response = await client.post("/v1/completions", json=body, headers={"X-Tenant": tenant})
                    found.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert found == expected
    finally:
        runtime.close()
