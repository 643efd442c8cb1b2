"""Responses that are kept: bounds of the store, fairness between keys, and answers about those that are gone."""

import asyncio
import tracemalloc
from dataclasses import replace

import pytest

from penstock import fast_json
from penstock.clock import VirtualClock
from penstock.serve.errors import ApiError
from penstock.serve.messages import MAX_MESSAGES
from penstock.serve.responses.kept import Kept, as_json
from penstock.serve.responses.read import Past
from penstock.serve.responses.store import MemoryStore, past_of
from penstock.types.request import Owner
from support.server.harness import make_client, make_runtime, until
from support.server.responses import ASK, PATH, ask

ME, YOU = Owner(key="me", tenant="me"), Owner(key="you", tenant="you")
SECOND_NS = 1_000_000_000


def keep(store, name, owner=ME, *, num_bytes=100, previous_id=None, is_running=False):
    kept = Kept(owner, name, b"r" * num_bytes, (), 0, previous_id, is_running=is_running)
    store.put(kept)
    return kept


def is_kept(store, name, owner=ME):
    try:
        store.get(owner, name)
    except ApiError:
        return False
    else:
        return True


def test_a_response_is_its_owners():
    store = MemoryStore(1 << 20, 60, VirtualClock())
    keep(store, "a")
    assert is_kept(store, "a")
    assert not is_kept(store, "a", YOU)


def test_what_nobody_asks_for_is_forgotten_in_time():
    clock = VirtualClock()
    store = MemoryStore(1 << 20, 60, clock)
    keep(store, "a")
    keep(store, "b")
    clock.advance_to(50 * SECOND_NS)
    assert is_kept(store, "a")
    clock.advance_to(70 * SECOND_NS)
    assert is_kept(store, "a")
    with pytest.raises(ApiError, match="nobody asked for it for 60 s"):
        store.get(ME, "b")


def test_the_conversation_before_a_response_counts_until_its_end():
    past = Past([b"i" * 1000], {f"msg_a_{place}": b"r" for place in range(100)}, 1100)
    alone = Kept(ME, "a", b'{"status":"queued"}', (), 0, "b", is_background=True, is_running=True)
    running = replace(alone, past=past)
    assert running.num_bytes > alone.num_bytes + 1000 + 100 * 90, "a short item takes 34 bytes, and its id 56"
    assert [running.ended("failed").past, running.as_of({"status": "completed"}, []).past] == [None, None]


def test_the_owner_who_has_most_makes_room(monkeypatch):
    store = MemoryStore(8000, 60, VirtualClock())
    keep(store, "yours", YOU)
    for number in range(10):
        keep(store, f"mine{number}")
    assert is_kept(store, "yours", YOU)
    assert not is_kept(store, "mine0")
    assert is_kept(store, "mine9")
    with pytest.raises(ApiError, match="others took its room"):
        store.get(ME, "mine0")
    monkeypatch.setattr("penstock.serve.responses.store.MAX_KEPT", 2)
    few = MemoryStore(1 << 20, 60, VirtualClock())
    for name in "abc":
        keep(few, name)
    assert [is_kept(few, name) for name in "abc"] == [False, True, True]


@pytest.mark.parametrize(("num_chars", "max_bytes"), [(5, 4 << 20), (2000, 8 << 20)])
def test_a_full_store_holds_no_more_memory_than_it_may(num_chars, max_bytes, monkeypatch):
    monkeypatch.setattr("penstock.serve.responses.store.MAX_KEPT", 1 << 20)
    store = MemoryStore(max_bytes, 60, VirtualClock())
    tracemalloc.start()
    try:
        for number in range(2 * max_bytes // (800 + 2 * num_chars)):
            name = f"resp_{number:032x}"
            items = [{"id": f"msg_{name}_{place}", "text": "x" * num_chars} for place in range(2)]
            store.put(Kept(ME, name, fast_json.dumps({"id": name, "output": items[1:]}), as_json(items), 1, None))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not is_kept(store, f"resp_{0:032x}")
    assert 0.7 * max_bytes <= held_bytes <= 1.2 * max_bytes


def test_what_runs_is_not_forgotten():
    store = MemoryStore(2000, 60, VirtualClock())
    running = keep(store, "a", is_running=True)
    for name in "bcd":
        keep(store, name)
    assert is_kept(store, "a")
    store.update(running.as_of({}, []))
    keep(store, "e")
    keep(store, "f")
    assert not is_kept(store, "a")


def test_what_runs_fits_into_the_store():
    store = MemoryStore(20_000, 60, VirtualClock())
    running = [keep(store, name, num_bytes=3000, is_running=True) for name in "ab"]
    store.check_room((ME, "new"))
    running.append(keep(store, "c", num_bytes=3000, is_running=True))
    with pytest.raises(ApiError, match=r"3 responses of this tenant of .* bytes run in the background"):
        store.check_room((ME, "new"))
    store.delete(running[0])  # it runs until it has heard of that
    with pytest.raises(ApiError, match="3 responses"):
        store.check_room((ME, "new"))
    for name in "def":
        store.check_room((YOU, "new"))
        keep(store, name, YOU, num_bytes=3000, is_running=True)
    with pytest.raises(ApiError, match="6 responses of"):
        store.check_room((Owner(key="third", tenant="third"), "new"))
    store.update(running[0].as_of({}, []))
    store.check_room((ME, "new"))


def test_asking_for_room_measures_no_response_again(monkeypatch):
    measured = []
    monkeypatch.setattr("penstock.serve.responses.kept.getsizeof", lambda part: measured.append(part) or 100)
    store = MemoryStore(1 << 20, 60, VirtualClock())
    for name in "abc":
        keep(store, name, is_running=True)
    measured.clear()
    store.check_room((ME, "new"))
    assert not measured


def test_one_owners_responses_in_the_background_leave_places_to_others(monkeypatch):
    monkeypatch.setattr("penstock.serve.responses.store.MAX_RUNNING", 4)
    store = MemoryStore(1 << 20, 60, VirtualClock())
    keep(store, "a", is_running=True)
    store.check_room((ME, "new"))
    keep(store, "b", is_running=True)
    with pytest.raises(ApiError, match="2 responses of this tenant"):
        store.check_room((ME, "new"))
    store.check_room((YOU, "new"))


def test_a_conversation_loses_its_beginning_last():
    store = MemoryStore(4400, 60, VirtualClock())
    keep(store, "a")
    keep(store, "b", previous_id="a")
    past_of(store, ME, "b", [])
    for name in "cde":
        keep(store, name)
    assert is_kept(store, "a")
    assert not is_kept(store, "b")


async def test_other_keys_see_nothing(runtime):
    async with make_client(runtime, api_keys=("one", "two")) as client:
        headers = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two")}
        made = (await client.post(PATH, json=ASK, headers=headers["one"])).json()
        path = f"{PATH}/{made['id']}"
        assert (await client.get(path, headers=headers["one"])).status_code == 200
        assert (await client.get(path)).status_code == 401
        for verb, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await client.request(verb, path + suffix, headers=headers["two"])).status_code == 404
        body = ASK | {"previous_response_id": made["id"]}
        assert (await client.post(PATH, json=body, headers=headers["two"])).status_code == 404
        assert (await client.post(PATH, json=body, headers=headers["one"])).status_code == 200


async def test_a_server_that_keeps_none(runtime):
    async with make_client(runtime, response_store_bytes=0) as client:
        assert (await ask(client))["store"] is False
        for body in ({"store": True}, {"background": True}):
            assert "--response-store 0" in (await ask(client, expects=400, **body))["error"]["message"]
        error = (await ask(client, expects=404, previous_response_id="resp_x"))["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_an_item_that_is_named_counts_as_often_as_it_is(runtime):
    async with make_client(runtime, max_body_bytes=1 << 16) as client:
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 30_000}]}
        hi = {"role": "user", "content": "hi"}
        made = await ask(client, input=[hi, thought])
        named = {"type": "item_reference", "id": made["id"].replace("resp", "rs") + "_1"}
        assert (await ask(client, input=[hi, named]))["status"] == "incomplete"
        error = (await ask(client, expects=413, input=[hi, *[named] * 3]))["error"]
        assert (error["code"], error["param"]) == ("request_too_large", "input")


async def test_too_many_items_are_refused_before_any_is_looked_up(runtime):
    async with make_client(runtime) as client:
        many = [{"type": "item_reference", "id": "msg_none_0"}] * (MAX_MESSAGES + 1)
        error = (await ask(client, expects=400, input=many))["error"]
        assert (error["message"], error["param"]) == ("'input' must have at most 4096 items.", "input")


async def test_a_background_request_that_is_sent_twice_at_once_runs_once(gate):
    runtime = make_runtime(gate)
    async with make_client(runtime) as client:
        twice = [client.post(PATH, json=ASK | {"background": True}, headers={"Idempotency-Key": "a"}) for _ in range(2)]
        first, second = [answer.json()["id"] for answer in await asyncio.gather(*twice)]
        assert first == second
        assert runtime.uses.num_users == 1
        assert (await client.get(f"/v1/requests/{first}")).json()["id"] == first.removeprefix("resp_")
        gate.open()
        await until(lambda: not runtime.uses.num_users)
    runtime.close()
