"""`suffix` of completions: the model fills in the middle."""

import pytest

from penstock.text import fim
from support.server.completions import TOKENIZER, ask, oracle
from support.server.harness import SPECIAL_TOKENS, VOCAB_SIZE, make_client, make_runtime

END, BEGIN, TURN = SPECIAL_TOKENS


@pytest.fixture
def _has_fim(monkeypatch):
    """The toy's special tokens are those that ask for a middle."""
    monkeypatch.setattr(fim, "NAMES", ((BEGIN, TURN, END),))


@pytest.mark.usefixtures("_has_fim")
@pytest.mark.parametrize("prompt", ["a = ", "", TOKENIZER.encode("a = ", add_special_tokens=False)])
async def test_the_middle_is_what_follows_the_model_s_own_form(client, prompt):
    before = prompt if isinstance(prompt, str) else "a = "
    answer = await ask(client, prompt=prompt, suffix=" + 1", temperature=0, return_token_ids=True)
    [choice] = answer["choices"]
    text = f"{BEGIN}{before}{TURN} + 1{END}"
    assert choice["prompt_token_ids"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert choice["text"] == oracle(choice["prompt_token_ids"])


@pytest.mark.usefixtures("_has_fim")
async def test_an_empty_suffix_asks_for_nothing(client):
    assert (await ask(client, prompt="Hello", suffix="", temperature=0))["choices"][0]["text"] == oracle("Hello")


@pytest.mark.usefixtures("_has_fim")
async def test_tokens_that_begin_another_file_end_the_middle(client, monkeypatch):
    body = {"prompt": "a", "suffix": "b", "temperature": 0}
    [choice] = (await ask(client, **body, return_token_ids=True))["choices"]
    third = choice["token_ids"][2]
    monkeypatch.setattr(fim, "ENDS", (TOKENIZER.token_text(third),))
    [ended] = (await ask(client, **body))["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", third)
    for fields in ({}, {"stop_token_ids": [max(choice["token_ids"]) + 1]}):
        [free] = (await ask(client, **body, ignore_eos=True, **fields))["choices"]
        assert free["text"] == choice["text"]


async def test_a_model_without_such_tokens_is_named(client):
    response = await client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert "toy has no tokens for filling in the middle" in error["message"]


@pytest.mark.usefixtures("_has_fim")
@pytest.mark.parametrize("prompt", ["a", [5]])
async def test_a_token_that_the_model_lacks_is_refused(prompt):
    runtime = make_runtime(vocab_size=VOCAB_SIZE - 1)
    async with make_client(runtime) as client:
        response = await client.post("/v1/completions", json={"prompt": prompt, "suffix": "~"})
    runtime.close()
    assert response.status_code == 400
    assert "contains '~'" in response.json()["error"]["message"]


@pytest.mark.usefixtures("_has_fim")
@pytest.mark.parametrize(("field", "value"), [("echo", True), ("truncate_prompt_tokens", 3)])
async def test_what_would_spoil_the_form_is_refused(client, field, value):
    response = await client.post("/v1/completions", json={"prompt": "a", "suffix": "b", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/models", "/embeddings"])
async def test_routes_answer_without_v1(client, path):
    if path == "/models":
        assert (await client.get(path)).json() == (await client.get("/v1/models")).json()
        return
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    body = {name: body[name] for name in {"/completions": ["prompt"], "/embeddings": ["input"]}.get(path, ["messages"])}
    answers = [await client.post(prefix + path, json=body | {"request_id": "same"}) for prefix in ("", "/v1")]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].status_code == (400 if path == "/embeddings" else 200), "the toy writes text"
