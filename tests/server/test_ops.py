"""The routes that operators and their machines use, and the small ones about the model."""

import re
from collections import Counter
from html import unescape

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

import penstock
from support.server.completions import events
from support.server.harness import make_client, make_runtime

COUNTED = (
    "penstock_request_success_total",
    "penstock_e2e_request_latency_seconds_count",
    "penstock_time_to_first_token_seconds_count",
    "penstock_generation_tokens_total",
)


async def read_metrics(client) -> Counter[str]:
    """The sum over its labels of every series."""
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Counter({name: sum(sample.value for sample in samples if sample.name == name) for name in {s.name for s in samples}})


async def test_health_ready_version(client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/version")).json() == {"version": penstock.__version__}


async def test_draining_is_alive_and_not_ready(runtime, client):
    runtime.engine.drain()
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    refused = await client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1


async def test_metrics_count_what_was_served(client):
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    [generated] = families["penstock_generation_tokens"].samples
    assert generated.value == 5


async def test_a_scraper_of_open_metrics_gets_examples_that_lead_to_explanations(live):
    accepts = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"}
    async with httpx.AsyncClient(base_url=live.url, timeout=20) as client:
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5}, headers={"X-Request-Id": "an/example"})
        response = await client.get("/metrics", headers=accepts)
        assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        families = {family.name: family for family in open_metrics(response.text)}
        assert families["process_resident_memory_bytes"].samples[0].value > 1e6
        samples = families["penstock_time_to_first_token_seconds"].samples
        assert "an/example" in {sample.exemplar.labels["request_id"] for sample in samples if sample.exemplar}
        assert (await client.get("/v1/requests/an/example")).json()["id"] == "an/example"


async def test_the_names_of_vllm_are_there_if_they_are_asked_for(runtime, client):
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    assert "vllm:" not in (await client.get("/metrics")).text
    async with make_client(runtime, metrics_compat="vllm") as other:
        text = (await other.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="toy"} 5.0' in text


@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"max_tokens": 500, "stop": list("aeio")}], ids=["length", "stop"])
async def test_who_has_an_answer_finds_it_counted(live, limits):
    """The engine's events are counted when the metrics are read, also far below the number at which they are counted anyway."""
    async with httpx.AsyncClient(base_url=live.url, timeout=20) as client:
        before = await read_metrics(client)
        num_tokens = 0
        for num_answers in range(1, 6):
            body = {"prompt": f"count {num_answers}", "temperature": 0, **limits}
            answer = (await client.post("/v1/completions", json=body)).json()
            num_tokens += answer["usage"]["completion_tokens"]
            now = await read_metrics(client)
            grown = {name: now[name] - before[name] for name in COUNTED}
            assert grown == {
                "penstock_request_success_total": num_answers,
                "penstock_e2e_request_latency_seconds_count": num_answers,
                "penstock_time_to_first_token_seconds_count": num_answers,
                "penstock_generation_tokens_total": num_tokens,
            }
            assert now["penstock_requests_running"] == 0


async def test_load_says_how_busy_it_is_now_and_of_late(client):
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    load = (await client.get("/load")).json()
    assert (load["server_load"], load["requests_running"], load["requests_waiting"]) == (0, 0, 0)
    assert load["kv_blocks_free"] == load["kv_blocks"] == 512
    assert load["desired_replicas"] == 1
    assert load["sustained"]["window_s"] == 30
    assert 0 <= load["sustained"]["utilisation"] <= 1
    assert load["sustained"]["arrivals_per_s"] > 0


async def test_load_of_a_model_has_its_settings():
    runtime = make_runtime(settings={"policy": "sjf"})
    try:
        async with make_client(runtime) as client:
            load = (await client.get("/load?model=toy")).json()
            assert "settings" not in (await client.get("/load")).json()
    finally:
        runtime.close()
    assert load["settings"] == {"policy": "sjf"}
    capacity = runtime.model.capacity
    assert load["capacity"]["blocks"] == load["kv_blocks"] == capacity.num_blocks - 1
    assert (load["capacity"]["rows"], load["capacity"]["model_len"]) == (capacity.max_rows, capacity.max_model_len)


async def test_model_cards(client):
    cards = (await client.get("/v1/models")).json()
    assert [card["id"] for card in cards["data"]] == ["toy", "org/toy"]
    assert (cards["data"][0]["max_model_len"], cards["data"][0]["task"]) == (2048, "generate")
    assert (await client.get("/v1/models/org/toy")).json() == cards["data"][1]


async def test_an_alias_is_understood_and_is_no_model_of_its_own(client):
    """A catalogue's model has other names; what is listed are the names under which it is served."""
    assert (await client.get("/v1/models/toy-too")).json() == (await client.get("/v1/models/toy")).json() | {"id": "toy-too"}
    assert "toy-too" not in [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", HI)])
async def test_every_answer_and_every_event_tells_the_fingerprint(client, runtime, path, body):
    assert (await client.post(path, json=body)).json()["system_fingerprint"] == runtime.model.fingerprint
    body = body | {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks, _ = events((await client.post(path, json=body)).text)
    assert len(chunks) > 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {runtime.model.fingerprint}


@pytest.mark.parametrize("name", ["toy", "org/toy", "toy-too"])
async def test_answers_carry_the_name_that_was_asked_for(client, name):
    answer = (await client.post("/v1/completions", json={"prompt": "a", "model": name})).json()
    assert answer["model"] == name


async def test_tokenize_and_back(client):
    answer = (await client.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == 3
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"][0] == "n"
    back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "né", "content": "né"}


async def test_tokenize_of_messages_is_the_chats_prompt(client):
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    chat = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert tokens == chat.json()["prompt_token_ids"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
async def test_tokenize_takes_one_of_both(client, body):
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("field", ["add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"])
async def test_tokenize_of_a_prompt_refuses_what_only_messages_have(client, field):
    value = {"chat_template_kwargs": {"suffix": "!"}, "tools": []}.get(field, False)
    response = await client.post("/tokenize", json={"prompt": "a", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_detokenize_checks_ids(client):
    response = await client.post("/detokenize", json={"tokens": [5, 259]})
    assert response.status_code == 400
    assert "259" in response.json()["error"]["message"]


async def test_docs_page_has_every_route_of_the_document(client):
    page = await client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    rows = [unescape(re.sub("<[^>]*>", " ", row)).split() for row in re.findall("<tr>.*?</tr>", page.text, re.DOTALL)]
    document = (await client.get("/openapi.json")).json()
    assert rows == [
        [method.upper(), path, *operation["summary"].split()]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


async def test_docs_page_sends_a_browser_to_nobody_else(client):
    """The server may stand where there is no internet; and who reads about it is nobody's business."""
    page = await client.get("/docs")
    assert re.findall("""(?:href|src|url)[=(]["']?([^"'>)]*)""", page.text) == ["openapi.json"]
    assert "//" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none';")


async def test_there_is_no_viewer_from_elsewhere(client):
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert (await client.get(path)).status_code == 404


def test_closing_a_runtime_twice_is_fine():
    runtime = make_runtime()
    assert runtime.close(20.0)
    assert runtime.close(20.0)
