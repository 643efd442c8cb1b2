"""Models judge answers over HTTP: a verifier of a route, the judge of an ensemble, the check of a pipeline."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.calls.call import Terms
from penstock.clock import WallClock
from penstock.config.routes import EnsembleConfig, VerifierConfig
from penstock.deploy.routes import Route
from penstock.deploy.running import RunningModel, ServedModel
from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.routes.prices import Bill, Price
from penstock.serve import answering, asking, errors
from penstock.serve.errors import ApiError
from penstock.serve.streams import error_of
from penstock.serve.verdicts import Verdicts, _terms, odds_in
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import HashModel
from penstock.types.errors import ModelAway, Rejected, RejectReason
from penstock.types.request import FinishReason
from penstock.types.result import TokenLogprobs
from penstock.types.tenant_limits import TenantLimits
from support.server import tools
from support.server.harness import (
    CAPACITY,
    PRINTABLE_MODEL,
    RERANKER,
    VOCAB_SIZE,
    GatedExecutor,
    JumpingClock,
    make_client,
    make_runtime,
    make_text_runtime,
    until,
)

CHAT = "/v1/chat/completions"
VERIFIED = Route(
    name="auto",
    models=("small", "large"),
    by=VerifierConfig(weak="small", strong="large", verifier="small", least=0.5),
)
OTHER_WORDS = HashModel(vocab_size=VOCAB_SIZE, first_token_id=VOCAB_SIZE - 30)
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "What is red?"}], "max_tokens": 16, "seed": 3},
    "/v1/completions": {"prompt": "What is red?", "max_tokens": 16, "seed": 3},
    "/v1/responses": {"input": "What is red?", "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is red?"}], "max_tokens": 16, "temperature": 0},
    "/api/generate": {"prompt": "What is red?", "options": {"num_predict": 16, "seed": 3}},
    "/completion": {"prompt": "What is red?", "n_predict": 16, "seed": 3},
}


@pytest.fixture
def models():
    made = [
        make_runtime(HashExecutor(CAPACITY, model=OTHER_WORDS), served_names=("small",), aliases=()),
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("large",), aliases=()),
    ]
    yield made
    for one in made:
        one.close()


def ensemble(**fields: object) -> Route:
    models = ("small", "large")
    return Route(name="auto", models=models, by=EnsembleConfig(models=models, **fields))


def says(monkeypatch: pytest.MonkeyPatch, *odds: float | Exception) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Have each verdict be the next of these, for the first word. Return what is asked: (model, texts, words)."""
    asked, rest = [], list(odds)

    async def told(self, name, http, call, conversation, words):
        asked.append((name, [message.content for message in conversation.messages], tuple(words)))
        first = rest.pop(0)
        if isinstance(first, Exception):
            raise first
        return [first, *[(1 - first) / (len(words) - 1)] * (len(words) - 1)]

    monkeypatch.setattr(Verdicts, "odds", told)
    return asked


def said(answer) -> str:
    if "application/json" not in answer.headers["content-type"]:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        return "".join(text for line in lines if line.startswith("{") for text in texts_in(json.loads(line)))
    return "".join(texts_in(answer.json()))


def texts_in(value: object) -> list[str]:
    if isinstance(value, dict):
        found = [value[key] for key in ("text", "content", "response", "delta") if isinstance(value.get(key), str)]
        return [*found, *(text for inner in value.values() for text in texts_in(inner))]
    return [text for inner in value for text in texts_in(inner)] if isinstance(value, list) else []


# A verifier


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_kept_if_the_verifier_says_yes(models, monkeypatch, path: str, stream: bool) -> None:
    asked = says(monkeypatch, 0.75, 0.25)
    body = BODIES[path] | {"stream": stream}
    async with make_client(*models, routes=[VERIFIED]) as client:
        for name, yes in (("small", "0.750"), ("large", "0.250")):
            answer = await client.post(path, json=body | {"model": "auto"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-route"] == f"auto; model={name}; verified={yes}; least=0.5"
            assert said(answer) == said(await client.post(path, json=body | {"model": name}))
    assert all(one.bridge.num_open_requests == 0 for one in models)
    for model, texts, words in asked:
        assert (model, texts[0], words) == ("small", "What is red?", ("yes", "no"))
        assert "right" in texts[-1]


async def test_the_verifier_reads_the_conversation_and_the_answer(models, monkeypatch) -> None:
    asked = says(monkeypatch, 1.0)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    async with make_client(*models, routes=[VERIFIED]) as client:
        answer = (await client.post(CHAT, json={"model": "auto", "messages": messages, "max_tokens": 4})).json()
    [(_, texts, _)] = asked
    assert texts[:-1] == ["s", "a", "b", "c", answer["choices"][0]["message"]["content"]]


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [(CHAT, {"n": 2}, "not one answer alone"), ("/v1/completions", {"prompt": [5, 6]}, "no text")],
)
async def test_what_a_verifier_can_not_read_goes_to_the_large_model(models, path: str, fields: dict, why: str) -> None:
    async with make_client(*models, routes=[VERIFIED]) as client:
        answer = await client.post(path, json=BODIES[path] | {"model": "auto"} | fields)
        assert (answer.status_code, answer.headers["x-route"]) == (200, f"auto; model=large; {why}")


async def test_the_large_model_answers_if_the_verifier_is_busy(models, monkeypatch) -> None:
    says(monkeypatch, Rejected(RejectReason.QUEUE_FULL, "busy"))
    async with make_client(*models, routes=[VERIFIED]) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; after=small")


async def test_the_large_model_has_the_whole_time_in_the_queue(models, monkeypatch) -> None:
    answerer, tries, offset_s = ServedModel.answerer, Counter(), 0

    def pass_by(seconds: int) -> None:
        nonlocal offset_s
        offset_s += seconds

    def loads_for_20_s(self: ServedModel) -> RunningModel:
        tries[self.name] += 1
        if tries[self.name] == 1:
            raise ModelAway(self.name)
        pass_by(20 * (tries[self.name] == 2))
        return answerer(self)

    async def told(*_) -> list[float]:
        pass_by(60)
        return [0.25, 0.75]

    monkeypatch.setattr(Verdicts, "odds", told)
    monkeypatch.setattr(WallClock, "now_ns", lambda _self: time.monotonic_ns() + offset_s * 1_000_000_000)
    async with make_client(*models, routes=[VERIFIED]) as client:
        monkeypatch.setattr(ServedModel, "answerer", loads_for_20_s)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}, headers={"X-Queue-Timeout-Ms": "30000"})
        assert (answer.status_code, offset_s) == (200, 20 + 60 + 20), answer.text
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}, headers={"X-Deadline-Ms": "30000"})
        assert (answer.status_code, offset_s) == (408, 160), answer.text


def test_times_in_the_queue_count_from_the_choice_of_the_model(models) -> None:
    """A verdict may wait as long as each model."""
    terms = Terms(request_id="r", arrival_ns=10, queued_ns=50_000_010, queue_deadline_ns=80_000_010)
    assert _terms(terms, models[0], 100).time_limits == [(30_000_100, RejectReason.QUEUE_TIMEOUT, 100)]
    ended = OutputChunk("r", "", (), (), 80_000_010, finish_reason=FinishReason.REJECTED, reject_reason="queue_timeout")
    error = error_of(terms, ended)
    assert error is not None
    assert "within the 30 ms that it may wait" in error.message
    assert "was queued for 30 ms" in error.message


async def test_a_verifier_that_can_not_judge_is_an_error_for_all_to_see(models) -> None:
    """The operator's, not the client's."""
    third = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("third",), aliases=(), chat_template=None)
    try:
        async with make_client(*models, third, routes=[replace(VERIFIED, by=replace(VERIFIED.by, verifier="third"))]) as client:
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("third can't judge answers: ")
    finally:
        third.close()
    assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_a_real_verdict_is_computed_charged_and_told(models) -> None:
    bill = Bill({"small": Price(1.0, 4.0), "large": Price(16.0, 64.0)})
    async with make_client(*models, routes=[replace(VERIFIED, by=replace(VERIFIED.by, least=0.0), bill=bill)]) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}, headers={"X-Request-Id": "mine"})
        told = (await client.get("/v1/requests/mine")).json()
        assert not (await client.get("/v1/requests")).json()["data"], "none is left open"
    usage = answer.json()["usage"]
    alone = bill.prices["small"].of(usage["prompt_tokens"], usage["completion_tokens"])
    assert bill.paid["small"] > alone + bill.prices["small"].of(usage["prompt_tokens"], 1), "the verdict's prompt is longer"
    assert told["choices"][0]["completion_tokens"] == 16, "the explanation is that of the answer, not of the verdict"
    assert told["chosen"]["held_ms"] > 0
    assert "Then held back for" in told["summary"]
    assert answer.headers["x-route"].startswith(told["chosen"]["route"])
    assert (told["chosen"]["sources"], told["chosen"]["check"]) == ("", "")
    assert "held;dur=" in answer.headers["server-timing"]
    assert 0 <= float(answer.headers["x-route"].split("verified=")[1][:5]) <= 1


@pytest.mark.parametrize("route", [ensemble(judge="large"), replace(VERIFIED, by=replace(VERIFIED.by, least=0.0))])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_target_counts_a_clients_call_once_by_the_token_that_the_client_gets(monkeypatch, route, stream) -> None:
    clock, odds, slo = JumpingClock(), Verdicts.odds, Counter()

    async def slow(*args, **kwargs):
        clock.offset_ns += 30_000_000_000
        return await odds(*args, **kwargs)

    monkeypatch.setattr(Verdicts, "odds", slow)
    models = [make_runtime(clock=clock, served_names=(name,), aliases=()) for name in route.models]
    for one in models:
        one.metrics.slo, one.metrics.slo_ttft_ns = slo, 20_000_000_000
    try:
        async with make_client(*models, routes=[route]) as client:
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto", "stream": stream})
            assert answer.status_code == 200, answer.text
            assert slo == {("ttft", False): 1}
    finally:
        for one in models:
            one.close()


TEXTS = {1: "</think>", 2: " Yes", 3: "no", 4: "y", 5: "maybe", 6: " ", 7: "<end>", 8: "es"}


def verdict(*entries: TokenLogprobs) -> list[float]:
    """The odds of yes and no in an answer of these tokens."""
    tokenizer = SimpleNamespace(token_text=TEXTS.__getitem__, is_special=lambda token_id: token_id == 7)
    ids = tuple(entry.token_id for entry in entries)
    return odds_in(OutputChunk("a", "", ids, entries, 0), ("yes", "no"), SimpleNamespace(tokenizer=tokenizer, name="m"))


def entry(token_id: int, odds: float = 1.0, **tops: float) -> TokenLogprobs:
    return TokenLogprobs(token_id, math.log(odds), 1, tuple((int(name[1:]), math.log(one)) for name, one in tops.items()))


def test_odds_are_read_where_the_word_begins() -> None:
    token = entry(2, 0.5, t2=0.5, t3=0.2, t4=0.1, t5=0.1, t6=0.1)
    expected = pytest.approx([0.6 / 0.8, 0.2 / 0.8])
    assert verdict(token, entry(7)) == expected
    assert verdict(entry(1, 1.0, t3=0.9), entry(6), token, entry(7)) == expected, "what ends the reasoning does not count"
    assert verdict(entry(4, 0.25, t3=0.75), entry(8)) == pytest.approx([0.25, 0.75]), "a word of two tokens"
    with pytest.raises(ApiError, match="wrote none of the expected words"):
        verdict(entry(5), entry(7))


async def test_a_verdict_has_the_terms_of_the_request_but_counts_for_no_limit(models, monkeypatch, tmp_path) -> None:
    """The cache's salt too: else others could learn from its time what the client has asked."""
    seen, submit = [], Bridge.submit
    monkeypatch.setattr(
        Bridge, "submit", lambda self, requests, reader: seen.append(requests[0]) or submit(self, requests, reader)
    )
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nrequests_per_minute = 1\n')
    route = replace(VERIFIED, by=replace(VERIFIED.by, least=0.0))
    async with make_client(*models, routes=[route], api_keys_file=str(tmp_path / "keys.toml")) as client:
        headers = {"Authorization": "Bearer the-key-of-mine", "X-Deadline-Ms": "60000", "X-First-Token-Timeout-Ms": "50000"}
        body = BODIES[CHAT] | {"model": "auto", "cache_salt": "secret", "chat_template_kwargs": {"enable_thinking": True}}
        answer = await client.post(CHAT, json=body, headers=headers)
    assert answer.headers["x-route"].startswith("auto; model=small; verified="), answer.text
    own, verdict = seen
    assert (verdict.cache_salt, verdict.deadline_ns, verdict.tenant) == (own.cache_salt, own.deadline_ns, own.tenant)
    assert verdict.cache_salt.endswith(b"secret")
    assert verdict.first_token_deadline_ns is None
    assert verdict.arrival_ns > own.arrival_ns


async def test_a_verdict_does_not_reset_the_limits_of_a_key(tmp_path) -> None:
    """The verifier also answers, and the server has limits for keys without their own."""
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nrequests_per_minute = 1\n')
    limits = AdmissionLimits(tenant=TenantLimits(max_concurrent=8, tokens_per_minute=10))
    models = [
        make_runtime(HashExecutor(CAPACITY, model=one), served_names=(name,), aliases=(), limits=limits)
        for name, one in (("small", OTHER_WORDS), ("large", PRINTABLE_MODEL))
    ]
    route = replace(VERIFIED, by=replace(VERIFIED.by, least=0.0))
    try:
        async with make_client(*models, routes=[route], api_keys_file=str(tmp_path / "keys.toml")) as client:
            client.headers["Authorization"] = "Bearer the-key-of-mine"
            first, second = [await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}) for _ in range(2)]
    finally:
        for one in models:
            one.close()
    assert first.status_code == 200, first.text
    assert (second.status_code, "1 requests per minute are used" in second.text) == (429, True), second.text


async def test_a_begun_answer_is_judged_whole(models, monkeypatch) -> None:
    asked = says(monkeypatch, 1.0)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    async with make_client(*models, routes=[VERIFIED]) as client:
        answer = await client.post("/v1/messages", json={"model": "auto", "messages": messages, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
    [(_, texts, _)] = asked
    assert texts[1] == "It is" + answer.json()["content"][0]["text"]
    assert len(texts) == 3


async def test_a_judge_that_the_key_may_not_ask_hides_the_route(models, tmp_path) -> None:
    third = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("third",), aliases=())
    keys = [("models", ["small", "large"]), ("route", ["auto"])]
    text = "".join(f'[[keys]]\nname = "{name}"\nkey = "the-key-of-{name}"\nmodels = {may}\n' for name, may in keys)
    (tmp_path / "keys.toml").write_text(text)
    route = replace(VERIFIED, by=replace(VERIFIED.by, verifier="third", least=0.0))
    try:
        async with make_client(*models, third, routes=[route], api_keys_file=str(tmp_path / "keys.toml")) as client:
            for name, status in (("models", 404), ("route", 200)):
                headers = {"Authorization": f"Bearer the-key-of-{name}"}
                answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}, headers=headers)
                assert answer.status_code == status, answer.text
    finally:
        third.close()


async def test_a_key_that_allows_one_model_needs_no_judge(models, tmp_path) -> None:
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nmodels = ["large"]\n')
    async with make_client(*models, routes=[VERIFIED], api_keys_file=str(tmp_path / "keys.toml")) as client:
        client.headers["Authorization"] = "Bearer the-key-of-mine"
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-route"] == "auto; model=large"
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["large", "auto"]


# An ensemble


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_judge_chooses_one_answer_of_all_models(models, monkeypatch, path: str, stream: bool) -> None:
    asked = says(monkeypatch, 0.75, 0.25)
    body = BODIES[path] | {"stream": stream}
    async with make_client(*models, routes=[ensemble(judge="large")]) as client:
        alone = {name: said(await client.post(path, json=body | {"model": name})) for name in ("small", "large")}
        for name, odds in (("small", "0.750,0.250"), ("large", "0.250,0.750")):
            answer = await client.post(path, json=body | {"model": "auto"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-route"] == f"auto; model={name}; judged={odds}"
            assert said(answer) == alone[name]
    for model, texts, words in asked:
        assert (model, words) == ("large", ("1", "2"))
        assert texts[-1].startswith("What is red?\n\n[1] ")
    assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_most_votes_win_and_all_answers_are_paid_for(models) -> None:
    bill = Bill({"small": Price(1.0, 4.0), "large": Price(16.0, 64.0), "third": Price(2.0, 8.0)})
    third = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("third",), aliases=())
    names = ("small", "large", "third")
    route = Route(name="auto", models=names, by=EnsembleConfig(models=names), bill=bill)
    try:
        async with make_client(*models, third, routes=[route]) as client:
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}, headers={"X-Request-Id": "mine"})
            assert answer.headers["x-route"].startswith("auto; model=large; votes=2 of 3; cost=")
            told = (await client.get("/v1/requests/mine")).json()
    finally:
        third.close()
    assert told["model"] == "large"
    usage = answer.json()["usage"]
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    assert bill.paid == {name: pytest.approx(price.of(*tokens)) for name, price in bill.prices.items()}


async def test_empty_answers_have_no_votes_unless_all_are_empty(models) -> None:
    thinkers = [
        tools.says("<think>A long thought.</think>Red", served_names=(name,), aliases=(), chat_template=tools.THINKING_TEMPLATE)
        for name in ("first", "second")
    ]
    routes = [
        Route(name="auto", models=names, by=EnsembleConfig(models=names))
        for names in (("first", "second", "large"), ("first", "second"))
    ]
    try:
        for route, chosen in zip(routes, ("large; alone", "first; votes=2 of 2"), strict=True):
            async with make_client(*thinkers, models[1], routes=[route]) as client:
                answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
                assert answer.headers["x-route"] == f"auto; model={chosen}"
    finally:
        for one in thinkers:
            one.close()


async def test_a_reranker_scores_answers_to_the_question(models, monkeypatch) -> None:
    reranker = make_text_runtime(served_names=("ranks",), aliases=(), encoder=RERANKER)
    try:
        async with make_client(*models, reranker, routes=[ensemble(reranker="ranks")]) as client:
            texts = [said(await client.post(CHAT, json=BODIES[CHAT] | {"model": name})) for name in ("small", "large")]
            body = {"model": "ranks", "query": "What is red?", "documents": texts}
            ranked = (await client.post("/v1/rerank", json=body)).json()["results"]
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
    finally:
        reranker.close()
    best = max(ranked, key=lambda one: one["relevance_score"])
    name = ("small", "large")[best["index"]]
    assert answer.headers["x-route"] == f"auto; model={name}; score={best['relevance_score']:.3f}"
    assert said(answer) == texts[best["index"]]


async def test_who_fails_does_not_count_and_a_busy_judge_neither(models, monkeypatch) -> None:
    says(monkeypatch, Rejected(RejectReason.QUEUE_FULL, "busy"), ModelAway("large"))
    large = models[1]
    async with make_client(*models, routes=[ensemble(judge="large")]) as client:
        for _ in range(2):
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
            assert answer.headers["x-route"] == "auto; model=small; not judged"

        def refuse(*_args, **_fields):
            raise Rejected(RejectReason.QUEUE_FULL, "full")

        monkeypatch.setattr(large.admission, "decide", refuse)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.headers["x-route"] == "auto; model=small; alone; failed=1"
        monkeypatch.setattr(models[0].admission, "decide", refuse)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.status_code == 429


async def fill(client, running: RunningModel) -> list[asyncio.Task]:
    """Have two requests wait for a model whose executor is gated and whose queue has room for one."""
    body = {"model": running.name, "prompt": "a", "max_tokens": 2}
    held = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
    await until(lambda: running.engine.load().num_running + running.engine.load().num_waiting == 2)
    return held


@pytest.mark.parametrize("fields", [{}, {"n": 2}], ids=["one answer", "several"])
async def test_calls_that_a_full_ensemble_refuses_get_times_apart(fields: dict) -> None:
    full = [
        make_runtime(GatedExecutor(replace(CAPACITY, max_rows=1)), served_names=(name,), aliases=(), max_queue=1)
        for name in ("small", "large")
    ]
    async with make_client(*full, routes=[ensemble()]) as client:
        held = [task for one in full for task in await fill(client, one)]
        refused = [await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto", "seed": seed} | fields) for seed in range(4)]
        assert [one.status_code for one in refused] == [429] * 4
        waits_ms = [int(one.headers["retry-after-ms"]) for one in refused]
        assert all(later > wait for wait, later in itertools.pairwise(waits_ms)), waits_ms
        assert sum(len(one.admission._promises._later) for one in full) == 4, "one place for each call"
        for one in full:
            one.engine._executor.open()
        await asyncio.gather(*held)
    for one in full:
        one.close()


@pytest.mark.parametrize("name", ["small", "large"])
async def test_a_full_member_keeps_no_place_for_a_call_that_another_answers(models, name: str) -> None:
    """Whichever of them is asked first."""
    full = make_runtime(GatedExecutor(replace(CAPACITY, max_rows=1)), served_names=(name,), aliases=(), max_queue=1)
    other = next(one for one in models if one.name != name)
    async with make_client(full, other, routes=[ensemble()]) as client:
        held = await fill(client, full)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.headers["x-route"] == f"auto; model={other.name}; alone; failed=1"
        assert not full.admission._promises._later
        full.engine._executor.open()
        await asyncio.gather(*held)
    full.close()


@pytest.mark.parametrize("order", [("small", "large"), ("large", "small")], ids=["full last", "full first"])
async def test_a_call_too_long_for_one_member_comes_back_to_the_full_one(order: tuple[str, str]) -> None:
    small = make_runtime(HashExecutor(replace(CAPACITY, max_model_len=32)), served_names=("small",), aliases=())
    large = make_runtime(GatedExecutor(replace(CAPACITY, max_rows=1)), served_names=("large",), aliases=(), max_queue=1)
    route = Route(name="auto", models=order, by=EnsembleConfig(models=order))
    async with make_client(small, large, routes=[route]) as client:
        held = await fill(client, large)
        body = {"messages": [{"role": "user", "content": "What is red? " * 6}], "max_tokens": 4}
        statuses = [(await client.post(CHAT, json=body | {"model": name})).status_code for name in ("small", "auto")]
        assert statuses == [400, 429]
        large.engine._executor.open()
        await asyncio.gather(*held)
    small.close()
    large.close()


async def test_a_call_that_a_keys_limit_refuses_at_two_members_gets_the_later_time(models, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nrequests_per_minute = 6\n')
    async with make_client(*models, routes=[ensemble()], api_keys_file=str(tmp_path / "keys.toml")) as client:
        client.headers["Authorization"] = "Bearer the-key-of-mine"
        names = ["small"] * 6 + ["large"] * 8 + ["auto"]
        answers = [await client.post(CHAT, json=BODIES[CHAT] | {"model": name, "seed": at}) for at, name in enumerate(names)]
    assert [one.status_code for one in answers] == [200] * 12 + [429] * 3
    assert int(answers[-1].headers["retry-after"]) == pytest.approx(30, abs=5)


async def test_a_fault_of_one_member_is_not_hidden_by_a_keys_limit_at_another(models, tmp_path: Path, monkeypatch) -> None:
    ask, faults = answering.run, iter([RuntimeError("a fault")])

    async def run(call, in_flight):
        for fault in faults:
            raise fault
        return await ask(call, in_flight)

    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nrequests_per_minute = 6\n')
    async with make_client(*models, routes=[ensemble()], api_keys_file=str(tmp_path / "keys.toml")) as client:
        client.headers["Authorization"] = "Bearer the-key-of-mine"
        for at in range(6):
            assert (await client.post(CHAT, json=BODIES[CHAT] | {"model": "large", "seed": at})).status_code == 200
        monkeypatch.setattr(answering, "run", run)
        assert (await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})).status_code == 500


async def test_a_member_that_can_not_answer_this_request_is_left_out(models, monkeypatch) -> None:
    large = models[1]

    def refuse(request, running, *args, **fields):
        if running is large:
            raise Rejected(RejectReason.INVALID, "not this one")
        return make_call(request, running, *args, **fields)

    make_call = asking.make_call
    monkeypatch.setattr(asking, "make_call", refuse)
    async with make_client(*models, routes=[ensemble()]) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.headers["x-route"] == "auto; model=small; alone; failed=1"


@pytest.mark.parametrize(("away", "there"), [("small", "large"), ("large", "small")])
async def test_a_member_that_can_not_be_loaded_is_left_out(models, monkeypatch, away: str, there: str) -> None:
    answerer = ServedModel.answerer

    def is_away(self: ServedModel) -> RunningModel:
        if self.name == away:
            raise ModelAway(away)
        return answerer(self)

    async with make_client(*models, routes=[ensemble()], load_timeout_s=0.1) as client:
        monkeypatch.setattr(ServedModel, "answerer", is_away)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-route"] == f"auto; model={there}; alone"


async def test_a_member_that_is_loaded_first_answers_in_its_turn(models, monkeypatch) -> None:
    answerer, tries = ServedModel.answerer, []

    def away_at_first(self: ServedModel) -> RunningModel:
        if self.name == "large":
            tries.append(1)
            if len(tries) == 1:
                raise ModelAway("large")
        return answerer(self)

    async with make_client(*models, routes=[ensemble()]) as client:
        monkeypatch.setattr(ServedModel, "answerer", away_at_first)
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
    assert answer.headers["x-route"] == "auto; model=small; votes=1 of 2", answer.text


async def test_a_limit_of_the_tenant_ends_an_ensemble_at_once(monkeypatch) -> None:
    """The other models' answers are cancelled, and their places given back."""
    gate = GatedExecutor(CAPACITY, model=OTHER_WORDS)
    limits = AdmissionLimits(tenant=TenantLimits(max_concurrent=1))
    models = [
        make_runtime(gate, served_names=("small",), aliases=(), limits=limits),
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("large",), aliases=()),
    ]

    def refuse(*_args: object, **_fields: object) -> None:
        raise Rejected(RejectReason.TENANT_REQUESTS, "used up")

    monkeypatch.setattr(models[1].admission, "decide", refuse)
    try:
        async with make_client(*models, routes=[ensemble()]) as client:
            client.headers["X-Tenant"] = "me"
            answer = await asyncio.wait_for(client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}), 10)
            assert (answer.status_code, "used up" in answer.text) == (429, True), answer.text
            gate.open()
            await until(lambda: models[0].bridge.num_open_requests == 0)
            await until(lambda: models[0].engine.load().num_waiting + models[0].engine.load().num_running == 0)
            assert (await client.post(CHAT, json=BODIES[CHAT] | {"model": "small"})).status_code == 200
    finally:
        for one in models:
            one.close()


async def test_answers_of_an_ensemble_whose_client_leaves_are_paid_for(models, monkeypatch) -> None:
    bill = Bill({"small": Price(1.0, 4.0), "large": Price(16.0, 64.0)})
    judging = asyncio.Event()

    async def never(*_args):
        judging.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Verdicts, "odds", never)
    async with make_client(*models, routes=[replace(ensemble(judge="large"), bill=bill)]) as client:
        asked = asyncio.create_task(client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"}))
        await asyncio.wait_for(judging.wait(), 20)
        asked.cancel()
        await until(lambda: len(bill.paid) == 2)
    await until(lambda: all(one.bridge.num_open_requests == 0 for one in models))
    assert bill.full == 0.0


async def test_a_cancelled_request_has_no_answer_though_one_has_ended(models, monkeypatch) -> None:
    """Neither that of an ensemble's other model, nor the large model's."""
    whole = answering.whole_answer

    async def cancelled_for_large(call, *args):
        if call.running is models[1]:
            raise errors.cancelled("the request was cancelled")
        return await whole(call, *args)

    monkeypatch.setattr(answering, "whole_answer", cancelled_for_large)
    async with make_client(*models, routes=[ensemble()]) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto"})
        assert answer.json()["error"]["code"] == "request_cancelled"
    assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_several_choices_come_from_the_first_model(models) -> None:
    async with make_client(*models, routes=[ensemble()]) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": "auto", "n": 2})
        assert answer.headers["x-route"] == "auto; model=small; not one answer alone"
        assert len(answer.json()["choices"]) == 2


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_or_cancels_ends_all_answers(leaves: bool) -> None:
    executors = [GatedExecutor(CAPACITY, model=one) for one in (OTHER_WORDS, PRINTABLE_MODEL)]
    names = ("small", "large")
    models = [make_runtime(one, served_names=(name,), aliases=()) for one, name in zip(executors, names, strict=True)]
    try:
        async with make_client(*models, routes=[ensemble()]) as client:
            body = BODIES[CHAT] | {"model": "auto"}
            asked = asyncio.create_task(client.post(CHAT, json=body, headers={"X-Request-Id": "mine"}))
            for one in models:
                await until(lambda one=one: one.engine.load().num_waiting + one.engine.load().num_running == 1)
            if leaves:
                asked.cancel()
            else:
                assert (await client.delete("/v1/requests/mine")).status_code == 200
            for one in executors:
                one.open()
            if not leaves:
                assert (await asked).json()["error"]["code"] == "request_cancelled"
            for one in models:
                await until(lambda one=one: one.engine.load().num_waiting + one.engine.load().num_running == 0)
                await until(lambda one=one: one.bridge.num_open_requests == 0)
    finally:
        for one in models:
            one.close()
