"""Anthropic's message batches, on the store of OpenAI's."""

from __future__ import annotations

import json

import httpx
import pytest

from penstock import fast_json
from penstock.serve.anthropic.batches import MAX_REQUESTS
from penstock.serve.jobs import runner
from support.server.harness import wait_until
from support.server.jobs import impatient, serving

PATH = "/v1/messages/batches"
PARAMS = {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    impatient(monkeypatch)


@pytest.fixture
def http(tmp_path):
    with serving(tmp_path / "jobs") as server, httpx.Client(base_url=server.url, headers={"anthropic-version": "1"}) as client:
        client.folder = tmp_path / "jobs"
        yield client


def begin(http: httpx.Client, *requests: dict, **headers: str) -> httpx.Response:
    return http.post(PATH, json={"requests": list(requests)}, headers=headers)


def request(custom_id: str, **params) -> dict:
    return {"custom_id": custom_id, "params": PARAMS | params}


def ended(http: httpx.Client, batch_id: str) -> dict:
    wait_until(lambda: http.get(f"{PATH}/{batch_id}").json()["processing_status"] == "ended")
    return http.get(f"{PATH}/{batch_id}").json()


def results(http: httpx.Client, batch: dict) -> dict[str, dict]:
    lines = map(json.loads, http.get(batch["results_url"]).text.splitlines())
    return {line["custom_id"]: line["result"] for line in lines}


def test_each_message_has_a_result(http) -> None:
    begun = begin(http, request("a"), request("b"), request("c", model="another")).json()
    assert (begun["type"], begun["processing_status"], begun["results_url"]) == ("message_batch", "in_progress", None)
    assert begun["request_counts"] == {"processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    batch = ended(http, begun["id"])
    assert batch["request_counts"] == {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    found = results(http, batch)
    assert {name: one["type"] for name, one in found.items()} == {"a": "succeeded", "b": "succeeded", "c": "errored"}
    assert found["a"]["message"]["usage"]["output_tokens"] == 3
    assert found["c"]["error"]["error"]["type"] == "not_found_error"
    assert http.get("/v1/files").json()["data"] == [], "its files are nobody's business"
    assert http.get("/v1/batches").json()["data"] == []
    assert http.delete(f"{PATH}/{batch['id']}").json() == {"id": batch["id"], "type": "message_batch_deleted"}
    assert http.get(f"{PATH}/{batch['id']}").status_code == 404
    assert [*(http.folder / "files").iterdir()] == []


def test_a_deletion_that_a_full_disk_refuses_has_made_room(tmp_path) -> None:
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, headers={"anthropic-version": "1"}) as http:
        batch, base = ended(http, begin(http, request("a")).json()["id"]), server.batches.store._base
        base.execute("CREATE TRIGGER no BEFORE DELETE ON batches BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        assert http.delete(f"{PATH}/{batch['id']}").status_code == 503
        wait_until(lambda: not [*(tmp_path / "files").iterdir()])  # its end deletes the empty ones, maybe later
        base.execute("DROP TRIGGER no")
        assert http.delete(f"{PATH}/{batch['id']}").status_code == 200


def test_messages_of_a_cancelled_batch_are_cancelled(tmp_path, gate) -> None:
    with serving(tmp_path, gate) as server, httpx.Client(base_url=server.url, headers={"anthropic-version": "1"}) as http:
        begun = begin(http, *[request(str(number)) for number in range(200)]).json()
        assert http.delete(f"{PATH}/{begun['id']}").status_code == 400, "it has not ended"
        assert http.get(f"{PATH}/{begun['id']}/results").status_code == 404
        assert http.post(f"{PATH}/{begun['id']}/cancel").json()["cancel_initiated_at"]
        gate.open()
        batch = ended(http, begun["id"])
        found = results(http, batch)
        assert len(found) == 200
        counts = batch["request_counts"]
        assert counts["canceled"] == sum(one["type"] == "canceled" for one in found.values()) > 0
        assert counts["canceled"] + counts["succeeded"] == 200


def test_messages_expire(tmp_path, gate, monkeypatch) -> None:
    monkeypatch.setattr("penstock.serve.anthropic.batches.WINDOW_S", 1)
    assert runner.LOOKED_EACH_S < 1
    with serving(tmp_path, gate) as server, httpx.Client(base_url=server.url, headers={"anthropic-version": "1"}) as http:
        batch = ended(http, begin(http, *[request(str(number)) for number in range(200)]).json()["id"])
        assert batch["request_counts"]["expired"] == 200
        assert {one["type"] for one in results(http, batch).values()} == {"expired"}


def test_pages_go_both_ways(http) -> None:
    ids = [begin(http, request("a", max_tokens=number + 1)).json()["id"] for number in range(3)][::-1]
    page = http.get(PATH, params={"limit": 2}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"], page["last_id"]) == (ids[:2], True, ids[1])
    after = http.get(PATH, params={"after_id": ids[1]}).json()
    assert ([one["id"] for one in after["data"]], after["has_more"]) == (ids[2:], False)
    before = http.get(PATH, params={"before_id": ids[2], "limit": 1}).json()
    assert ([one["id"] for one in before["data"]], before["has_more"]) == (ids[1:2], True)
    for ended_one in ids:
        ended(http, ended_one)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        ([request("a"), request("a")], "as that of an earlier request"),
        ([request("a", stream=True)], "params.stream' can't be used"),
        ([request("a", background=True)], "params.background' can't be used"),
        ([request("a b")], "custom_id"),
        ([{"custom_id": "a"}], "params"),
        ([request("a") | {"priority": 9}], "Unknown parameter: 'requests[0].priority'"),
    ],
)
def test_what_can_not_run_is_refused(http, requests, words: str) -> None:
    answer = begin(http, *requests)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json()["error"]["message"]
    assert [*(http.folder / "files").iterdir()] == []


def test_a_batch_may_have_as_many_requests_as_its_body_may_have_objects() -> None:
    for num, is_excessive in ((MAX_REQUESTS, False), (MAX_REQUESTS + 1, True)):
        body = fast_json.dumps({"requests": [request("a")] * num})
        assert bool(fast_json.excess(body)) is is_excessive
    assert MAX_REQUESTS == 24_999, "docs/batch.md"


def test_a_batch_that_is_sent_twice_is_one(http) -> None:
    first, second = (begin(http, request("a"), **{"Idempotency-Key": "k"}).json()["id"] for _ in range(2))
    assert first == second
    ended(http, first)
    assert len(http.get(PATH).json()["data"]) == 1
    wait_until(lambda: len([*(http.folder / "files").iterdir()]) == 1)  # what is empty goes after the batch has ended
