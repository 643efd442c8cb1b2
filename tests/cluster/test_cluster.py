"""A front and replicas over the hash executor: answers are those of one server, whatever happens to the replicas."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.cli.top import replica_lines
from penstock.clock import WallClock
from penstock.cluster import fleet as fleet_module
from penstock.cluster.fleet import MAX_STRANGERS, Fleet
from penstock.cluster.flights import PROGRESS
from penstock.cluster.messages import FORMAT, Greeting, Submit, encode, request_of
from penstock.cluster.replica import Replica
from penstock.deploy.off_loop import MAX_SIZE_IN_FLIGHT
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.engine.state import EngineState
from penstock.engine.thread import ENGINE_FAILED, ENGINE_STUCK
from penstock.sched.routing.routers import Arrival, LeastWork, RoundRobin
from penstock.sched.scaling import Scaler
from penstock.serve.http.listener import bind_socket
from penstock.testing import HashExecutor, make_request
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import FinishReason
from penstock.types.stats import EngineLoad
from support.cluster import Apart, Cluster, ThreadedReplica, cluster
from support.server.completions import URL, events, oracle
from support.server.harness import (
    CAPACITY,
    EMBEDDER,
    PRINTABLE_MODEL,
    GatedExecutor,
    LiveServer,
    NarrowExecutor,
    make_text_runtime,
    running,
    wait_until,
)

PROMPTS = [f"{letter * (20 + 7 * number)} {number}" for number, letter in enumerate("abcdefghijkl")]


def post(made: Cluster, prompt: str, **body) -> httpx.Response:
    return httpx.post(made.server.url + URL, json={"prompt": prompt, "temperature": 0, **body}, timeout=60)


def ask(made: Cluster, prompt: str, **body) -> dict:
    response = post(made, prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(made: Cluster, prompt: str, **body) -> str:
    return ask(made, prompt, **body)["choices"][0]["text"]


def stream(made: Cluster, prompt: str, **body) -> str:
    response = post(made, prompt, stream=True, **body)
    assert response.status_code == 200, response.text
    told, is_done = events(response.text)
    assert is_done
    return "".join(choice["text"] for event in told for choice in event["choices"])


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        yield pool


def working(made: Cluster) -> ThreadedReplica:
    """The replica that has a request."""
    wait_until(lambda: any(replica.running.engine.load().num_running for replica in made.replicas.values()))
    return next(replica for replica in made.replicas.values() if replica.running.engine.load().num_running)


def gated(number: int = 2) -> list[GatedExecutor]:
    return [GatedExecutor() for _ in range(number)]


def test_answers_are_those_of_one_server(pool) -> None:
    with cluster(num_replicas=3) as made:
        wait_until(lambda: made.fleet.num_replicas == 3)
        for ask_one in (text_of, stream):
            assert list(pool.map(partial(ask_one, made), PROMPTS)) == [oracle(prompt) for prompt in PROMPTS]
        num_ended = [num_answers(replica.running) for replica in made.replicas.values()]
        assert all(num_ended), "each replica has computed some"
        assert sum(num_ended) == num_answers(made.front) == 2 * len(PROMPTS)
        assert made.front.metrics.num_generated_tokens == 2 * len(PROMPTS) * 16


def test_the_parts_of_latencies_add_up_at_the_front(pool) -> None:
    with cluster(num_replicas=2) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        list(pool.map(partial(text_of, made), PROMPTS))
        wait_until(lambda: num_answers(made.front) == len(PROMPTS))
        metrics = made.front.metrics
        for parts_ns, whole in ((metrics.wait_ns, metrics.queue_ns), (metrics.request_ns, metrics.e2e_ns)):
            buckets, sum_ns = whole.snapshot()
            assert buckets[-1][1] == len(PROMPTS)
            assert sum(parts_ns.values()) == pytest.approx(sum_ns)
        assert sum(metrics.steps.values()) == sum(num for num, _ in metrics.steps_by_size.values()) > 0
        assert {has_prompts for _, has_prompts in metrics.steps_by_size} == {True, False}


def test_gaps_of_background_answers_do_not_count() -> None:
    with cluster(num_replicas=1) as made:
        arrival_ns = made.fleet.clock.now_ns()
        made.fleet.submit(make_request("line", max_tokens=8, arrival_ns=arrival_ns, slo_itl_ns=1, background=True))
        wait_until(lambda: num_answers(made.front) == 1)
        metrics = made.front.metrics
        assert metrics.num_generated_tokens == 8
        assert (metrics.itl_ns.snapshot()[1], dict(metrics.slo)) == (0, {})


def num_answers(running: RunningModel) -> int:
    with running.metrics.lock:
        running.metrics.settle()
        return running.metrics.success[FinishReason.LENGTH]


def test_a_prompt_goes_where_its_beginning_is() -> None:
    with cluster() as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for _ in range(6):
            cached = ask(made, "x" * 400)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 384


def test_a_prompt_that_goes_elsewhere_takes_its_kv_along() -> None:
    with cluster(router=RoundRobin()) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        prompt, answers = "x" * 400, []
        for number in range(3):
            response = httpx.post(
                made.server.url + URL,
                json={"prompt": prompt, "temperature": 0, "max_tokens": 4},
                headers={"X-Request-Id": f"id{number}"},
                timeout=60,
            )
            assert response.status_code == 200, response.text
            answers.append(response.json())
        assert {answer["choices"][0]["text"] for answer in answers} == {oracle(prompt, max_tokens=4)}
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert min(cached[1:]) >= 384
        [choice] = httpx.get(f"{made.server.url}/v1/requests/id1").json()["choices"]
        assert (choice["route"]["cached_tokens"], choice["route"]["fetched_tokens"]) == (0, cached[1])
        assert choice["route"]["fetch_ms"] > 0
        assert f"{cached[1]} more prompt tokens came from another replica's cache" in choice["summary"]


class WaitingExecutor(HashExecutor):
    """Takes a while for each step, so that an answer lasts longer than a message to the front and back."""

    def __init__(self) -> None:
        super().__init__(CAPACITY, model=PRINTABLE_MODEL)

    def submit(self, plan):
        time.sleep(0.01)
        return super().submit(plan)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two replicas takes answers and no prompts."""
    monkeypatch.setattr("penstock.sched.routing.dispatcher.Split", Apart)


def test_answers_move_to_the_replica_that_takes_them(pool, apart: None) -> None:
    with cluster(WaitingExecutor(), WaitingExecutor(), slo_itl_ns=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        some = PROMPTS[:3]
        assert [stream(made, prompt) for prompt in some] == [oracle(prompt) for prompt in some]
        assert list(pool.map(partial(text_of, made), PROMPTS)) == [oracle(prompt) for prompt in PROMPTS]
        num_ended = {name: num_answers(replica.running) for name, replica in made.replicas.items()}
        assert sorted(num_ended.values()) == [0, len(some) + len(PROMPTS)]
        headers = {"X-Request-Id": "one"}
        response = httpx.post(made.server.url + URL, json={"prompt": "y" * 100, "temperature": 0}, headers=headers, timeout=60)
        assert response.json()["choices"][0]["text"] == oracle("y" * 100)
        [choice] = httpx.get(f"{made.server.url}/v1/requests/one").json()["choices"]
        route = choice["route"]
        assert (num_ended[route["replica"]] > 0, route["moves"], route["tokens_ahead"]) == (True, 1, 0)
        assert route["fetched_tokens"] == choice["prompt_tokens"], "whole blocks, and what fills a part of one"
        assert choice["prefill"] == {"steps": 1, "tokens": choice["prompt_tokens"]}, "at the first replica"
        num_steps = choice["resume"]["steps"] + choice["decode"]["steps"]
        assert num_steps == choice["completion_tokens"] - 1, "at the second"
        assert choice["time_ms"]["prefill"] >= 10
        assert route["move_ms"] > 0
        assert "after 1 other replica and" in choice["summary"]


def test_choices_grammars_scores_and_beams_are_right_where_answers_move(apart: None) -> None:
    bodies = [
        *({"prompt": prompt, "n": 3, "seed": 5, "temperature": 0.9, "logprobs": 2} for prompt in PROMPTS[:2]),
        {"prompt": PROMPTS[0], "n": 2, "use_beam_search": True, "max_tokens": 6},
        {"prompt": PROMPTS[1], "prompt_logprobs": 1, "max_tokens": 6},
        {"prompt": PROMPTS[2], "structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    ]
    with cluster(WaitingExecutor(), WaitingExecutor(), slo_itl_ns=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        told = [ask(made, **body) for body in bodies]
        routes = [httpx.get(f"{made.server.url}/v1/requests/{one['id']}").json()["choices"] for one in told]
        moves = [[choice["route"]["moves"] for choice in one] for one in routes]
        assert moves == [[1, 1, 1], [1, 1, 1], [0, 0], [0], [1]], "beam searches and scores stay"
    with cluster(num_replicas=1) as alone:
        assert [ask(alone, **body)["choices"] for body in bodies] == [one["choices"] for one in told]


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("body", [{}, {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60}])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_moved_answer_may_lose_its_replica_before_the_first_one_knows(body: dict, leaves: bool, pool, apart: None) -> None:
    """It waits until the first one has ended it, or another replica is there."""
    with cluster(*gated(), slo_itl_ns=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        prompts = [PROMPTS[3], *PROMPTS[:2]]
        pending = [pool.submit(text_of, made, prompt, **body) for prompt in prompts]
        first = working(made)
        wait_until(lambda: len(first.replica._requests) == len(prompts))
        first.executor.allow(3)
        second = next(replica for replica in made.replicas.values() if replica is not first)
        wait_until(lambda: any(flight.replica and flight.replica.name == second.name for flight in flights(made)))
        if leaves:
            second.call(second.replica.leave)
        else:
            second.hang_up()
        wait_until(lambda: not any(flight.replica and flight.replica.name == second.name for flight in flights(made)))
        for replica in (first, second):
            replica.executor.open()
        texts = [answer.result(60) for answer in pending]
        if not body:
            assert texts == [oracle(prompt) for prompt in prompts]
        assert made.fleet.num_replicas >= 1
    with cluster(num_replicas=1) as alone:
        assert [text_of(alone, prompt, **body) for prompt in prompts] == texts


def test_without_resuming_no_answer_moves(apart: None) -> None:
    with cluster(WaitingExecutor(), WaitingExecutor(), slo_itl_ns=1, resumes=False) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for prompt in PROMPTS[:4]:
            assert text_of(made, prompt) == oracle(prompt)
        assert all(num_answers(replica.running) for replica in made.replicas.values())


def test_an_explanation_names_the_replica(pool) -> None:
    """While the request runs, after its end, and after it was moved."""
    with cluster(*gated()) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(httpx.post, made.server.url + URL, json={"prompt": PROMPTS[0]}, headers={"X-Request-Id": "one"})
        url = f"{made.server.url}/v1/requests/one"
        first = working(made)
        first.executor.allow(3)
        wait_until(lambda: any(len(flight.request.output_token_ids) == 3 for flight in flights(made)))
        [choice] = httpx.get(url).json()["choices"]
        schemas = httpx.get(f"{made.server.url}/openapi.json").json()["components"]["schemas"]
        assert choice.keys() == schemas["RequestChoice"]["properties"].keys()
        assert (choice["state"], choice["route"]) == ("decode", route_of(first.name, moves=0))
        first.hang_up()
        wait_until(lambda: any(flight.replica and flight.replica.name != first.name for flight in flights(made)))
        for replica in made.replicas.values():
            replica.executor.open()
        answer.result(60)
        [choice] = httpx.get(url).json()["choices"]
        last = next(name for name in made.replicas if name != first.name)
        assert (choice["state"], choice["completion_tokens"]) == ("ended", 16)
        assert choice["route"] == route_of(last, moves=1)
        assert f"Replica {last} computed it, after 1 other replica" in choice["summary"]


def test_running_requests_and_the_last_ones_of_people_to_end_are_explained() -> None:
    with cluster(*gated(), router=LeastWork()) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        made.fleet.max_ended, read_clock = 2, made.fleet.clock.now_ns

        def submit(name: str, max_tokens: int = 1, *, background: bool = False) -> None:
            made.fleet.submit(make_request(name, max_tokens=max_tokens, arrival_ns=read_clock(), background=background))

        def explained(*names: str) -> set[str]:
            return {one.request_id for one in made.fleet.explain_all(names, read_clock)}

        submit("long", 100)
        slow = working(made)
        next(replica for replica in made.replicas.values() if replica is not slow).executor.open()
        shorts, lines = [[f"{kind} {number}" for number in range(5)] for kind in ("short", "line")]
        for number, name in enumerate(shorts, 1):
            submit(name)
            wait_until(lambda number=number: num_answers(made.front) == number)
        assert explained("long", *shorts) == {"long", *shorts[-2:]}
        slow.executor.open()
        wait_until(lambda: num_answers(made.front) == 6)
        for number, name in enumerate(lines, 7):
            submit(name, background=True)
            wait_until(lambda number=number: num_answers(made.front) == number)
        assert explained("long", *shorts, *lines) == {"long", shorts[-1]}


def route_of(name: str, *, moves: int) -> dict:
    zeros = dict.fromkeys(("cached_tokens", "tokens_ahead", "fewest_tokens_ahead", "fetched_tokens"), 0)
    return {"replica": name, "moves": moves, "move_ms": 0.0, "fetch_ms": 0.0, **zeros}


@pytest.mark.parametrize("lose", [ThreadedReplica.kill, ThreadedReplica.hang_up])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_an_answer_goes_on_elsewhere(lose: Callable[[ThreadedReplica], None], num_steps: int, pool) -> None:
    """Also with stop strings, penalties, a temperature and log-probabilities: nothing is told twice, and nothing missing."""
    executors = gated()
    settings = {"max_tokens": 12, "temperature": 0.9, "seed": 11, "frequency_penalty": 0.5, "logprobs": 2, "stop": ["zzz"]}
    with running() as alone, cluster(*executors) as made:
        body = {"prompt": PROMPTS[3], **settings}
        expected = httpx.post(alone.url + URL, json=body, timeout=60).json()["choices"]
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(ask, made, PROMPTS[3], **settings)
        lost = working(made)
        if num_steps:
            lost.executor.allow(num_steps)
            wait_until(lambda: any(len(flight.request.output_token_ids) == num_steps for flight in flights(made)))
        if lose is ThreadedReplica.hang_up:
            other = next(replica for replica in made.replicas.values() if replica is not lost)
            lost.hang_up()
            wait_until(lambda: other.running.engine.load().num_running)
        else:
            lost.kill()
        for executor in executors:
            executor.open()
        assert answer.result(60)["choices"] == expected


def flights(made: Cluster) -> list:
    return list(made.fleet._flights.values())


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
def test_the_others_go_on_whichever_replica_is_lost(name: str) -> None:
    with cluster(num_replicas=3) as made:
        wait_until(lambda: made.fleet.num_replicas == 3)
        made.replicas[name].kill()
        wait_until(lambda: made.fleet.num_replicas == 2)
        assert [text_of(made, prompt) for prompt in PROMPTS[:4]] == [oracle(prompt) for prompt in PROMPTS[:4]]


def test_an_abort_is_not_lost_with_its_replica(pool) -> None:
    executors = gated()
    with cluster(*executors) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(post, made, PROMPTS[0])
        lost = working(made)
        (flight,) = flights(made)
        made.fleet.abort(flight.request.request_id, "a test")
        lost.kill()
        response = answer.result(60)
        assert response.status_code != 200
        assert "a test" in response.text
        for replica in made.replicas.values():
            assert replica is lost or not replica.running.engine.load().num_running


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front has a beat each tenth of a second, and replicas too."""
    monkeypatch.setattr(fleet_module, "SILENCE_NS", 1_000_000_000)
    monkeypatch.setattr("penstock.cluster.replica.BEAT_S", 0.1)


def test_a_request_that_ends_each_replica_ends_itself(pool) -> None:
    with cluster(num_replicas=2) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for replica in made.replicas.values():
            replica.replica._take = partial(break_at, 666, replica.replica._take)
        poisoned = pool.submit(post, made, PROMPTS[0], max_tokens=666)
        response = poisoned.result(60)
        assert response.status_code == 500
        assert "3 replicas failed with it, the last one: it was lost" in response.text
        wait_until(lambda: made.fleet.num_replicas == 2)
        assert text_of(made, PROMPTS[1]) == oracle(PROMPTS[1])


def break_at(max_tokens: int, take: Callable, submit) -> None:
    assert all(work.sampling.max_tokens != max_tokens for work in submit.works), "it breaks a replica"
    take(submit)


def test_without_resuming_an_answer_that_has_begun_ends_with_an_error(pool) -> None:
    with cluster(*gated(), resumes=False) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(post, made, PROMPTS[0])
        lost = working(made)
        lost.executor.allow(2)
        wait_until(lambda: any(flight.request.output_token_ids for flight in flights(made)))
        lost.hang_up()
        response = answer.result(60)
        assert response.status_code == 503
        assert "does not resume answers" in response.text
        lost.executor.open()


@pytest.mark.parametrize("begun", ["", '{"na'])
def test_a_schema_is_followed_on_the_other_replica(pool, begun: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    body = {
        "messages": [{"role": "user", "content": "Hello"}, *[{"role": "assistant", "content": begun}] * bool(begun)],
        "continue_final_message": bool(begun),
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    url = "/v1/chat/completions"
    executors = gated()
    with running() as alone, cluster(*executors) as made:
        expected = httpx.post(alone.url + url, json=body, timeout=60).json()["choices"]
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(httpx.post, made.server.url + url, json=body, timeout=60)
        lost = working(made)
        lost.executor.allow(2)
        wait_until(lambda: any(flight.request.output_token_ids for flight in flights(made)))
        lost.hang_up()
        for executor in executors:
            executor.open()
        assert answer.result(60).json()["choices"] == expected
        said = begun + expected[0]["message"]["content"]
        assert said.startswith('{"name"' if begun else "{")


def test_no_choice_of_a_continued_answer_is_refused_by_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.replica.READ_COST", MAX_SIZE_IN_FLIGHT // 2)
    body = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "12"}],
        "continue_final_message": True,
        "structured_outputs": {"regex": "[0-9]{3}"},
        "n": 32,
    }
    with cluster(num_replicas=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 1)
        choices = httpx.post(made.server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert [len(choice["message"]["content"]) for choice in choices] == [1] * 32


def test_choices_beams_and_scores() -> None:
    bodies = [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"n": 3, "use_beam_search": True},
        {"prompt_logprobs": 1, "max_tokens": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 2},
    ]
    with running() as alone, cluster() as made:
        for body in bodies:
            body = {"prompt": "The quick brown fox", "temperature": 0, **body}
            expected = httpx.post(alone.url + URL, json=body, timeout=60).json()
            found = httpx.post(made.server.url + URL, json=body, timeout=60).json()
            assert found["choices"] == expected["choices"]
            assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_choices_share_their_limits_of_waiting_at_a_replica() -> None:
    with cluster(num_replicas=1) as made:
        replica, shared = made.replicas["r0"].replica, []
        begin = replica._begin
        replica._begin = lambda requests: (shared.extend(one.call == requests for one in requests), begin(requests))
        assert len(ask(made, "abc", n=2, max_tokens=4)["choices"]) == 2
        assert shared == [True, True]


def test_the_scores_of_a_prompt_are_sent_once() -> None:
    with cluster(num_replicas=1) as made:
        take, sent = made.fleet._take_report, []
        made.fleet._take_report = lambda replica, report: (sent.extend(report.scores), take(replica, report))
        scores = ask(made, "abcdef", prompt_logprobs=1, max_tokens=4)["choices"][0]["prompt_logprobs"]
        assert (len(scores), len(sent)) == (6, 1)


def test_texts_are_embedded(pool) -> None:
    body = {"input": [f"the text number {number}" for number in range(30)]}
    alone = make_text_runtime()
    try:
        with LiveServer(alone) as server:
            expected = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"]
    finally:
        alone.close()
    with cluster(*(NarrowExecutor(EMBEDDER.width) for _ in range(2)), encoder=EMBEDDER) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        assert httpx.post(f"{made.server.url}/v1/embeddings", json=body, timeout=60).json()["data"] == expected


def test_a_replica_that_leaves_is_drained_and_others_go_on(pool) -> None:
    with cluster(*gated()) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        answers = [pool.submit(text_of, made, prompt) for prompt in PROMPTS[:4]]
        wait_until(lambda: len(flights(made)) == 4 and all(flight.replica for flight in flights(made)))
        wait_until(lambda: made.replicas["r0"].running.engine.load().num_running)  # else it may have none to drain
        made.replicas["r0"].call(made.replicas["r0"].replica.leave)
        wait_until(lambda: made.replicas["r0"].running.engine.state is EngineState.DRAINING)
        wait_until(lambda: made.fleet.num_replicas == 1)
        told = httpx.get(f"{made.server.url}/load").json()["replicas"]
        assert [(one["name"], one["ready"]) for one in told] == [("r0", False), ("r1", True)]
        assert ["takes no requests" in line for line in replica_lines(told)] == [False, True, False]
        late = [pool.submit(text_of, made, prompt) for prompt in PROMPTS[4:]]
        for replica in made.replicas.values():
            replica.executor.open()
        assert [answer.result(60) for answer in answers + late] == [oracle(prompt) for prompt in PROMPTS]
        wait_until(lambda: made.replicas["r0"].has_ended and made.fleet.num_replicas == 1)


def test_requests_wait_for_a_replica_to_come_back(pool) -> None:
    with cluster(GatedExecutor()) as made:
        answer = pool.submit(text_of, made, PROMPTS[0])
        working(made).executor.allow(3)
        wait_until(lambda: any(flight.request.output_token_ids for flight in flights(made)))
        made.replicas["r0"].kill()
        wait_until(lambda: made.fleet.num_replicas == 0)
        refused = post(made, PROMPTS[1])
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        made.add("r1")
        assert answer.result(60) == oracle(PROMPTS[0])


def test_what_no_replica_computes_ends_in_time(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PATIENCE_NS", 0)
    with cluster(GatedExecutor()) as made:
        answer = pool.submit(post, made, PROMPTS[0])
        working(made)
        made.replicas["r0"].executor.allow(1)
        made.replicas["r0"].kill()
        response = answer.result(60)
        assert response.status_code == 503
        assert "no replica" in response.text


@pytest.mark.parametrize("limit", ["queue_timeout", "first_token_timeout", "request_timeout"])
def test_limits_of_time_hold_without_a_replica(limit: str, pool, quick_beats: None) -> None:
    with cluster(GatedExecutor(), **{f"{limit}_s": 30.0}) as made:
        clock = made.fleet.clock = JumpingClock()
        answer = pool.submit(post, made, PROMPTS[0])
        working(made)
        made.replicas["r0"].kill()
        wait_until(lambda: made.fleet.num_replicas == 0)
        assert not answer.done()
        clock.offset_ns = 31_000_000_000
        response = answer.result(30)
        assert response.status_code == 408, response.text


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": PROMPTS[:2]}])
@pytest.mark.parametrize("limit", ["queue_timeout", "first_token_timeout"])
def test_limits_of_a_wait_are_those_of_a_calls_first_choice(limit: str, body: dict[str, Any], pool) -> None:
    with cluster(num_replicas=1, **{f"{limit}_s": 20.0}) as made:
        made.replicas["r0"].kill()
        clock, executor = JumpingClock(), GatedExecutor(replace(CAPACITY, max_rows=1))
        replica = made.add("r1", executor, clock=clock)
        wait_until(lambda: made.fleet.num_replicas == 1)
        answer = pool.submit(post, made, **{"prompt": "abc", "max_tokens": 4} | body)
        wait_until(lambda: len(replica.replica._requests) == 2)
        executor.allow()
        wait_until(lambda: replica.running.engine.load().served_ns > 0)
        clock.offset_ns = 30_000_000_000
        executor.open()
        assert answer.result(60).status_code == 200, answer.result().text


def test_requests_end_after_the_fleet_has() -> None:
    chunks: list[OutputChunk] = []
    fleet = Fleet(
        bind_socket("127.0.0.1", 0), secret=b"", router=LeastWork(), clock=WallClock(), sink=lambda told: chunks.extend(told)
    )
    fleet.start()
    fleet.close(0.0)
    fleet.submit(make_request("late"))
    assert [(chunk.request_id, chunk.finish_reason) for chunk in chunks] == [("late", FinishReason.REJECTED)]
    assert fleet.load().num_waiting == 0


def test_a_fleet_that_is_closed_while_it_begins_to_listen_ends(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    fleet = Fleet(bind_socket("127.0.0.1", 0), secret=b"", router=LeastWork(), clock=WallClock(), sink=lambda _: None)
    create_server = fleet._loop.create_server

    async def late(*given: Any, **named: Any) -> asyncio.Server:
        await fleet._closing.wait()
        return await create_server(*given, **named)

    monkeypatch.setattr(fleet._loop, "create_server", late)
    fleet.start()
    assert fleet.close(0.0)
    assert (fleet._is_over, caplog.records) == (True, [])


def test_a_silent_replica_is_lost(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_NS", 300_000_000)
    monkeypatch.setattr("penstock.cluster.replica.BEAT_S", 0.05)
    executors = gated()
    with cluster(*executors) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        answer = pool.submit(text_of, made, PROMPTS[0])
        silent = working(made)
        silent.replica._report = lambda: None
        for executor in executors:
            executor.open()
        assert answer.result(60) == oracle(PROMPTS[0])


@pytest.mark.parametrize("greeting", [b"", encode(Greeting(FORMAT, b""))], ids=["from the start", "after its greeting"])
def test_a_silent_front_is_lost(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its machine or the network has gone, so that no end of the connection is told."""
    for name, value in (("FRONT_SILENCE_S", 0.1), ("BEAT_S", 0.02), ("REDIAL_S", 0.01)):
        monkeypatch.setattr(f"penstock.cluster.replica.{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        listener.settimeout(30)
        replica = ThreadedReplica(listener.getsockname()[1], "r0")
        stack.callback(replica.kill)
        for _ in range(3):
            connection, _ = listener.accept()
            stack.enter_context(connection)
            if greeting:
                connection.sendall(struct.pack("<I", len(greeting)) + greeting)


def test_a_front_that_has_nothing_to_send_is_heard(monkeypatch: pytest.MonkeyPatch, caplog, quick_beats: None) -> None:
    monkeypatch.setattr("penstock.cluster.replica.FRONT_SILENCE_S", 0.5)
    with cluster(num_replicas=1) as made:
        end_ns = made.front.clock.now_ns() + 1_000_000_000
        wait_until(lambda: made.front.clock.now_ns() > end_ns)
        assert made.fleet.num_replicas == 1
        assert "was lost" not in caplog.text


def test_a_front_that_stood_still_does_not_take_its_replicas_for_lost(caplog, quick_beats: None) -> None:
    """As after SIGSTOP, or a pause of its virtual machine: the clock jumps, and nothing was read meanwhile."""
    with cluster(num_replicas=2) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        clock = made.fleet.clock = JumpingClock()
        clock.offset_ns = 10 * fleet_module.SILENCE_NS
        wait_until(lambda: clock.num_looks > 15)
        assert made.fleet.num_replicas == 2
        assert "was lost" not in caplog.text


class JumpingClock(WallClock):
    offset_ns = num_looks = 0

    def now_ns(self) -> int:
        self.num_looks += 1
        return super().now_ns() + self.offset_ns


def test_clients_that_leave_end_their_requests(pool) -> None:
    with cluster(GatedExecutor()) as made:
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", made.server.url + URL, json={"prompt": "a", "stream": True}, timeout=0.2) as response,
        ):
            list(response.iter_lines())
        made.replicas["r0"].executor.open()
        wait_until(lambda: not flights(made) and not made.replicas["r0"].running.engine.load().num_running)


@pytest.mark.parametrize(
    ("fields", "told"), [({"secret": b"another"}, "secret"), ({"fingerprint": "fp_other"}, "answers would differ")]
)
def test_strangers_are_not_taken(fields: dict, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(num_replicas=1) as made:
        made.add("r1", **fields)
        wait_until(lambda: told in caplog.text)
        assert made.fleet.num_replicas == 1
        assert text_of(made, "Hello") == oracle("Hello")


def test_a_replica_and_a_front_of_other_versions_do_not_work_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(num_replicas=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 1)
        monkeypatch.setattr(fleet_module, "FORMAT", FORMAT + 1)
        made.add("r1")
        wait_until(lambda: f"it speaks version {FORMAT + 1} of the messages, this replica {FORMAT}" in caplog.text)
        assert made.fleet.num_replicas == 1
        assert text_of(made, "Hello") == oracle("Hello")


def test_a_replica_that_is_not_taken_waits_before_it_dials_again(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("penstock.cluster.replica.REDIAL_S", 1000)
    with cluster(num_replicas=1) as made:
        made.add("r1", secret=b"another")
        wait_until(lambda: "secret" in caplog.text)
        for prompt in PROMPTS:
            assert text_of(made, prompt) == oracle(prompt)
        assert caplog.text.count("does not know the cluster's secret") == 1


def test_nonsense_and_crowds_at_the_replicas_port_do_no_harm() -> None:
    with cluster(num_replicas=1) as made:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff"):
            with socket.create_connection(("127.0.0.1", made.port)) as stranger, suppress(ConnectionResetError):
                stranger.sendall(nonsense)
                stranger.settimeout(30)
                while stranger.recv(4096):
                    pass
        crowd = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(MAX_STRANGERS + 10)]
        assert text_of(made, "Hello") == oracle("Hello")
        wait_until(lambda: len(made.fleet._replicas) == MAX_STRANGERS + 1)
        wait_until(lambda: sum(map(is_closed, crowd)) == 10)
        assert text_of(made, "Hello") == oracle("Hello")
        assert sum(map(is_closed, crowd)) == 10, "the others are still there"
        for stranger in crowd:
            stranger.close()


def is_closed(stranger: socket.socket) -> bool:
    """Return whether the front has closed the connection, after its greeting if it sent one."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_a_grammar_that_a_replica_compiles_no_more_is_followed_elsewhere() -> None:
    """As one that is closing: it must neither try for ever nor fail the request."""
    with cluster() as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        first: list[str] = []

        async def refuse_first(name: str, matcher: Callable, *arguments):
            first.append(name)
            if len(first) == 1:
                raise Rejected(RejectReason.DRAINING, "closing")
            return await matcher(*arguments)

        for name, one in made.replicas.items():
            one.replica._matcher = partial(refuse_first, name, one.replica._matcher)
        body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{4}"}}
        answer = httpx.post(made.server.url + URL, json=body, timeout=60)
        assert (answer.status_code, len(first)) == (200, 2)


GRAMMAR = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{4}"}}


async def compile_for_long(*_arguments, **_more) -> None:
    await asyncio.sleep(60)


def test_a_request_whose_grammar_is_compiled_obeys_its_deadline_and_a_client_that_leaves() -> None:
    with cluster(num_replicas=1) as made:
        replica = made.replicas["r0"]
        replica.running.off_loop.compile = compile_for_long
        answer = httpx.post(made.server.url + URL, json=GRAMMAR, headers={"X-Deadline-Ms": "300"}, timeout=20)
        assert (answer.status_code, "deadline" in answer.text) == (408, True), answer.text
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(made.server.url + URL, json={**GRAMMAR, "n": 2}, timeout=0.3)
        wait_until(lambda: not replica.replica._preparing)
        wait_until(lambda: not made.fleet._flights)
        del replica.running.off_loop.compile
        assert post(made, **GRAMMAR).status_code == 200


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("broken")])
def test_a_request_whose_grammar_fails_to_compile_is_answered(error: Exception, caplog) -> None:
    async def fail(*_arguments, **_more) -> None:
        raise error

    with cluster(num_replicas=1) as made:
        replica = made.replicas["r0"]
        replica.running.off_loop.compile = fail
        answer = post(made, **GRAMMAR)
        assert (answer.status_code, repr(error) in answer.text) == (500, True), answer.text
        assert "can't be begun" in caplog.text
        assert not replica.replica._preparing
        del replica.running.off_loop.compile
        assert post(made, **GRAMMAR).status_code == 200


def test_a_request_begins_though_copying_its_kv_failed(caplog) -> None:
    async def fail(*_arguments) -> None:
        raise RuntimeError("broken")

    with cluster(num_replicas=1) as made:
        made.replicas["r0"].replica._fetch = fail
        assert post(made, **GRAMMAR).status_code == 200
    assert "KV of another replica was not copied" in caplog.text


def test_a_replica_that_loses_its_front_does_not_wait_for_grammars(pool) -> None:
    with cluster(num_replicas=1) as made:
        replica = made.replicas["r0"]
        replica.running.off_loop.compile = compile_for_long
        answer = pool.submit(post, made, **GRAMMAR)
        wait_until(lambda: replica.replica._preparing)
        del replica.running.off_loop.compile
        replica.hang_up()
        assert answer.result(20).status_code == 200


def test_the_number_of_replicas_follows_the_load_from_zero_and_back(pool) -> None:
    """The scaler's decisions are carried out by threads here. Its clock is real, so only the way from zero is asserted."""
    with cluster(num_replicas=1) as made:
        wanted: list[int] = []
        made.fleet.scale(Scaler(0, 3, 1), 2, wanted.append)
        wait_until(lambda: wanted == [1])
        made.replicas["r0"].call(made.replicas["r0"].replica.leave)
        wait_until(lambda: made.fleet.num_replicas == 0)
        made.fleet.scale(Scaler(0, 3, 0), 1, wanted.append)
        wait_until(lambda: wanted[-1] == 0)
        answer = pool.submit(text_of, made, PROMPTS[0])
        wait_until(lambda: wanted[-1] == 1)
        made.add("r1")
        assert answer.result(60) == oracle(PROMPTS[0])
        assert "without a replica" in made.fleet.decisions()[0].reason
        task = made.fleet._scaling
    assert task is not None
    assert task.done(), "it ends with the fleet"


def test_a_replica_that_is_refused_dials_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.replica.REDIAL_S", 0.01)
    monkeypatch.setattr("penstock.cluster.replica.MAX_REDIAL_S", 0.07)
    pauses_s = [0.01]
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(True)
        refused = ThreadedReplica(listener.getsockname()[1], "r0")
        for _ in range(5):
            listener.accept()[0].close()
            wait_until(lambda: refused.replica._pause_s > pauses_s[-1] or refused.replica._pause_s == 0.07)
            pauses_s.append(refused.replica._pause_s)
        refused.kill()
    assert pauses_s == [0.01, 0.02, 0.04, 0.07, 0.07, 0.07]


def test_a_replica_that_waits_to_dial_again_leaves_at_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("penstock.cluster.replica.REDIAL_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    alone = ThreadedReplica(port, "r0")
    wait_until(lambda: "can't be reached yet" in caplog.text)
    alone.call(alone.replica.leave)
    wait_until(lambda: alone.has_ended)
    alone.kill()


def test_a_replica_whose_dial_hangs_leaves(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    async def hang(*_arguments) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("penstock.cluster.replica.DIAL_S", 0.1)
    monkeypatch.setattr("asyncio.BaseEventLoop.create_connection", hang)
    alone = ThreadedReplica(1, "r0")
    wait_until(lambda: "can't be reached yet: no connection within 0.1 s" in caplog.text)
    alone.call(alone.replica.leave)
    wait_until(lambda: alone.has_ended)
    alone.kill()


def test_replicas_stay_when_a_beat_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quick_beats: None
) -> None:
    with cluster(num_replicas=1) as made:
        wait_until(lambda: made.fleet.num_replicas == 1)
        monkeypatch.setattr(made.fleet, "_look_after_waiting", lambda now_ns: 1 / 0)
        wait_until(lambda: caplog.text.count("the front failed in its beat") >= 2)
        assert text_of(made, PROMPTS[0]) == oracle(PROMPTS[0])


@pytest.mark.parametrize("method", ["on_step", "on_finish"])
def test_no_token_is_lost_when_an_observer_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that goes on elsewhere goes on after the tokens that the front has read, so the client must get these."""
    with cluster(num_replicas=2) as made:
        observer, calls = made.fleet._observer, []

        def failing(stats: object) -> None:
            calls.append(stats)
            if len(calls) == 1:
                raise RuntimeError("a test")
            getattr(observer, method)(stats)

        failing_observer = SimpleNamespace(on_step=observer.on_step, on_finish=observer.on_finish)
        setattr(failing_observer, method, failing)
        monkeypatch.setattr(made.fleet, "_observer", failing_observer)
        assert stream(made, PROMPTS[0]) == oracle(PROMPTS[0])
        assert calls


def test_a_request_that_breaks_engines_as_it_decodes_ends_itself(pool) -> None:
    """It gets a token or two from each replica, and then the connection is lost."""
    with cluster(*(SlowExecutor(CAPACITY, model=PRINTABLE_MODEL) for _ in range(2))) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for replica in made.replicas.values():
            replica.replica.flush = partial(hang_up_after, replica, replica.replica.flush)
        response = pool.submit(post, made, PROMPTS[0], max_tokens=200).result(60)
        assert (response.status_code, "3 replicas failed with it, the last one: it was lost" in response.text) == (500, True)
        wait_until(lambda: made.fleet.num_replicas == 2)  # none dials while the front ends


class SlowExecutor(HashExecutor):
    def submit(self, plan):
        time.sleep(0.02)
        return super().submit(plan)


def hang_up_after(replica: ThreadedReplica, flush: Callable[[], None]) -> None:
    flush()
    if replica.replica._link is not None and replica.replica._requests:
        replica.replica._link.close("a test")


def test_where_the_router_failed_the_client_may_try_again() -> None:
    class Fails:
        def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
            raise KeyError(arrival.tenant)

    with cluster(router=Fails()) as made:
        response = post(made, PROMPTS[0])
        assert (response.status_code, response.headers.get("x-should-retry")) == (503, None)
        assert int(response.headers["Retry-After"]) > 0
        assert "the router failed; the server's log says why" in response.text


def test_those_beside_a_request_that_breaks_replicas_are_answered(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.replica.REDIAL_S", 0.01)
    with cluster(*gated()) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for replica in made.replicas.values():
            replica.replica._take = partial(break_at, 666, replica.replica._take)
        answers = [pool.submit(text_of, made, prompt) for prompt in PROMPTS[:8]]
        wait_until(lambda: len(flights(made)) == 8 and all(flight.replica for flight in flights(made)))
        poison = pool.submit(post, made, PROMPTS[8], max_tokens=666)
        wait_until(lambda: any(flight.num_failures == 2 for flight in flights(made)))
        for replica in made.replicas.values():
            replica.executor.open()
        assert [answer.result(60) for answer in answers] == [oracle(prompt) for prompt in PROMPTS[:8]]
        response = poison.result(60)
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert "3 replicas failed with it, the last one: it was lost" in response.text
        wait_until(lambda: made.fleet.num_replicas == 2)  # none dials while the front ends


def test_a_suspect_waits_until_the_one_before_has_made_progress(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.replica.REDIAL_S", 0.01)
    with cluster(GatedExecutor()) as made:
        replica, taken = made.replicas["r0"], []
        take, replica.replica._take = replica.replica._take, taken.append
        answers = [pool.submit(text_of, made, prompt, max_tokens=40) for prompt in PROMPTS[:2]]
        for num_taken in (2, 4):
            wait_until(lambda num=num_taken: len(taken) == num)
            flights(made)[0].request.background = True
            replica.hang_up()
        wait_until(lambda: len(taken) == 5)
        assert [flight.replica is not None for flight in flights(made)] == [False, True], "the background waits"
        replica.replica._take = take
        replica.call(take, taken[-1])
        replica.executor.allow(PROGRESS + 1)
        wait_until(lambda: all(flight.replica for flight in flights(made)))
        replica.executor.open()
        assert [answer.result(60) for answer in answers] == [oracle(prompt, max_tokens=40) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(
    ("why", "status"), [(ENGINE_FAILED, 500), (ENGINE_STUCK, 500), ("no engine is running that could answer", 503)]
)
def test_refusals_do_not_go_round_for_ever_and_blame_only_a_request_that_engines_failed_with(why: str, status: int) -> None:
    with cluster(num_replicas=2) as made:
        wait_until(lambda: made.fleet.num_replicas == 2)
        for replica in made.replicas.values():
            replica.replica._take = partial(refuse, replica.replica, why=why)
        assert post(made, PROMPTS[0]).status_code == status


def test_a_request_that_a_replica_refused_goes_to_another_although_the_first_one_holds_its_prefix(pool) -> None:
    with cluster(num_replicas=3) as made:
        wait_until(lambda: made.fleet.num_replicas == 3)
        prompt = "x" * 400
        assert text_of(made, prompt) == oracle(prompt)
        [holder] = [one.replica for one in made.replicas.values() if num_answers(one.running)]
        holder._take = partial(refuse, holder)
        assert text_of(made, prompt) == oracle(prompt)
        assert made.fleet.num_moved["lost"] == 1


def test_a_request_that_one_engine_failed_with_is_not_retried_after_refusals() -> None:
    with cluster(num_replicas=1) as made:
        replica, causes = made.replicas["r0"].replica, iter([ENGINE_FAILED])
        replica._take = lambda submit: refuse(replica, submit, next(causes, "no engine is running that could answer"))
        response = post(made, PROMPTS[0])
        assert response.status_code == 500
        assert "3 replicas refused it" in response.text


def refuse(replica: Replica, submit: Submit, why: str = "no engine is running that could answer") -> None:
    for work in submit.works:
        request = request_of(work, submit.prompt_token_ids, 0)
        replica._refuse(request, FinishReason.ERROR, why, "unavailable")


def test_a_cold_replica_compiles_a_grammar_once_for_a_burst(pool) -> None:
    """More requests than may compile at once, with as many schemas, arrive at a replica that knows none of them."""
    with cluster(GatedExecutor()) as made:
        schemas = [{"type": "object", "properties": {f"x{number % 40}": {"type": "integer"}}} for number in range(80)]
        bodies = [
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 4,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            }
            for schema in schemas
        ]
        url = f"{made.server.url}/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(80) as many:
            asked = [many.submit(httpx.post, url, json=body, timeout=60) for body in bodies]
            wait_until(lambda: len(flights(made)) + sum(one.done() for one in asked) == 80)
            refused_at_the_door = sum(one.done() for one in asked)
            made.replicas["r0"].kill()
            made.add("r1")
            statuses = [one.result().status_code for one in asked]
        assert statuses.count(200) == 80 - refused_at_the_door
