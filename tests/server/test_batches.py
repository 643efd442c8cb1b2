"""Batches: OpenAI's API, and that each line has exactly one answer, whatever happens to the server, the disk or the key."""

import asyncio
import gc
import json
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

from penstock.config import ServerConfig
from penstock.config.routes import AgreementConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy import off_loop
from penstock.deploy.off_loop import LARGE_SIZE
from penstock.deploy.routes import Route
from penstock.deploy.running import ServedModel
from penstock.engine.thread import ENGINE_FAILED, ENGINE_STUCK
from penstock.jobs import store as store_module
from penstock.jobs.lines import Lines, Progress
from penstock.jobs.store import Batch, Store
from penstock.machine import is_free_threaded
from penstock.serve.jobs import runner as module
from penstock.serve.jobs.runner import BatchRunner
from penstock.serve.own_requests import Answered
from penstock.serve.upstream import Upstream
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError, Rejected, RejectReason
from penstock.types.request import Owner
from support.failing_disk import open_files
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, make_runtime, make_text_runtime, until, wait_until
from support.server.jobs import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDED,
    RESPONSES,
    JobsServer,
    answers,
    begun,
    counted,
    ended,
    file_of,
    impatient,
    line,
    serving,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    impatient(monkeypatch)


@pytest.fixture
def jobs(tmp_path):
    with serving(tmp_path / "jobs") as server:
        yield server


@pytest.fixture
def client(jobs):
    with jobs.client() as client:
        yield client


def once(num: int) -> Counter[str]:
    return Counter({str(nth): 1 for nth in range(num)})


def lines_of(num: int, url=CHAT) -> list[dict]:
    return [line(str(nth), url) for nth in range(num)]


@contextmanager
def refusing(monkeypatch, server, refusal, num):
    """Let the server answer the first lines with a refusal. Yields the custom ids, one for each time a line was asked."""
    asked, real = [], server.batches._requests.ask

    async def ask(owner, url, body, request_id, *rest):
        asked.append(request_id)
        return refusal if len(asked) <= num else await real(owner, url, body, request_id, *rest)

    monkeypatch.setattr(server.batches._requests, "ask", ask)
    yield asked


# the API


@pytest.mark.parametrize("url", BODIES)
def test_a_batch_answers_as_the_route_does(tmp_path, url):
    runtime = make_text_runtime() if url == EMBEDDINGS else None
    with serving(tmp_path, runtime=runtime) as server, server.client() as client:
        wrong = line("wrong", url, model="nope")
        batch = ended(client, begun(client, [line("right", url), wrong], url, metadata={"for": "tests"}))
        assert (batch.status, batch.endpoint, batch.metadata, batch.completion_window) == (
            "completed",
            url,
            {"for": "tests"},
            "24h",
        )
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 1, 1)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 24 * 3600
        assert batch.failed_at is batch.expired_at is batch.cancelled_at is batch.cancelling_at is batch.errors is None

        (right,) = answers(client, batch.output_file_id)
        assert (right["custom_id"], right["error"], right["response"]["status_code"]) == ("right", None, 200)
        asked = client.post(url.removeprefix("/v1"), body=BODIES[url], cast_to=object)
        varying = {"id", "created", "created_at", "completed_at", "usage", "output"}
        assert {k: v for k, v in right["response"]["body"].items() if k not in varying} == {
            k: v for k, v in asked.items() if k not in varying
        }
        usage = right["response"]["body"]["usage"]
        assert batch.usage.input_tokens == usage.get("prompt_tokens", usage.get("input_tokens")) > 0
        assert batch.usage.output_tokens == usage.get("completion_tokens", usage.get("output_tokens", 0))
        assert batch.usage.total_tokens == usage["total_tokens"]

        (wrong,) = answers(client, batch.error_file_id)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 404)
        assert wrong["response"]["body"]["error"]["code"] == "model_not_found"
        assert len({right["id"], wrong["id"]}) == 2
        output = client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.filename, output.expires_at) == ("batch_output", f"{batch.id}_output.jsonl", None)
        assert output.bytes == len(client.files.content(output.id).read())


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES])
def test_a_line_may_have_a_request_id(jobs, client, url):
    batch = ended(client, begun(client, [line("1", url, request_id="mine")], url))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


def test_without_errors_there_is_no_error_file(jobs, client):
    batch = ended(client, begun(client, lines_of(3)))
    assert (len(answers(client, batch.output_file_id)), batch.error_file_id) == (3, None)
    batch = ended(client, begun(client, [line("a", model="nope")]))
    assert (batch.output_file_id, len(answers(client, batch.error_file_id))) == (None, 1)
    kept = {file.id for file in client.files.list()}
    wait_until(lambda: {path.name for path in (jobs.batches.store.folder / "files").iterdir()} == kept)  # just after the end


def test_batches_are_listed_by_pages(client):
    made = [begun(client, [line("a")]) for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == [batch.id for batch in made[::-1]]
    page = client.batches.list(limit=2, after=made[3].id)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2].id, made[1].id], True)
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.batches.list(limit=limit)
    for ask in (client.batches.retrieve, client.batches.cancel, lambda one: client.batches.list(after=one)):
        with pytest.raises(openai.NotFoundError, match="There is no batch"):
            ask("batch_nothing")


def test_a_batch_that_can_not_be_is_refused(client):
    file = client.files.create(file=file_of(lines_of(1)), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, param in [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {str(nth): "a" for nth in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after"),
        ({"input_file_id": "x" * 65}, "input_file_id"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ]:
        with pytest.raises(openai.BadRequestError, match=param):
            client.batches.create(**good | wrong)
    with pytest.raises(openai.NotFoundError, match="There is no file"):
        client.batches.create(**good | {"input_file_id": "file-nothing"})
    assert client.batches.list().data == []


def test_an_unusable_file_fails_the_batch_with_its_errors(jobs, client):
    file = client.files.create(file=b"{}\n" + json.dumps(line("a", COMPLETIONS)).encode() + b"\n{", purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="30m"))
    assert (batch.status, batch.completion_window) == ("failed", "30m")
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(1, "invalid_request", None), (2, "invalid_url", "url"), (3, "invalid_json_line", None)]
    assert batch.output_file_id is batch.error_file_id is batch.in_progress_at is batch.completed_at is None
    assert batch.failed_at >= batch.created_at
    assert [*(jobs.batches.store.folder / "lines").iterdir()] == []


@pytest.mark.parametrize("depth", [500, 50_000])
def test_a_deep_line_is_no_more_than_an_error(client, depth):
    deep = json.dumps(line("a")).replace('"hello"', "[" * depth + "]" * depth)
    file = client.files.create(file=deep.encode(), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert (batch.status, batch.request_counts.completed) == ("failed" if depth > 10_000 else "completed", 0)


def test_answers_expire(jobs, client):
    batch = ended(client, begun(client, lines_of(1), output_expires_after={"anchor": "created_at", "seconds": 3600}))
    assert client.files.retrieve(batch.output_file_id).expires_at == batch.completed_at + 3600
    jobs.batches.store.expire(batch.completed_at + 3600)
    assert [file.id for file in client.files.list()] == [batch.input_file_id]


def test_files_expire_after_a_restart_too(tmp_path, monkeypatch):
    times = {"anchor": "created_at", "seconds": 3600}
    with serving(tmp_path) as server, server.client() as client:
        file = client.files.create(file=file_of([*lines_of(1), line("b", model="nope")]), purpose="batch", expires_after=times)
        fields = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = ended(client, client.batches.create(**fields, output_expires_after=times))
        kept = {file.id, batch.output_file_id, batch.error_file_id}
        assert {one.id for one in client.files.list()} == kept
    with serving(tmp_path) as server, server.client() as client:
        assert {one.id for one in client.files.list()} == kept, "their time has not come"
    monkeypatch.setattr(BatchRunner, "now_s", lambda _: batch.completed_at + 3601)
    with serving(tmp_path) as server, server.client() as client:
        wait_until(lambda: not client.files.list().data)
        wait_until(lambda: not [*(tmp_path / "files").iterdir()])
        assert client.batches.retrieve(batch.id).status == "completed"


def test_the_log_says_why_expired_files_stay(tmp_path, monkeypatch, caplog):
    def refuse(store, now_s):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "expire", refuse)
    with serving(tmp_path):
        wait_until(lambda: "expired files can't be deleted now: database or disk is full" in caplog.text)


# the end of a batch


def test_lines_that_have_no_answer_in_time_are_given_up(tmp_path, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(30), completion_window="1h")
        gate.allow(3)  # the first answers
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        real = server.batches._now
        server.batches._now = lambda: real() + 3590
        assert client.batches.retrieve(batch.id).status == "in_progress"
        server.batches._now = lambda: real() + 3601
        batch = ended(client, batch)
        gate.open()
        assert (batch.status, batch.expired_at >= batch.expires_at, batch.completed_at) == ("expired", True, None)
        assert counted(client, batch) == once(30)
        counts = batch.request_counts
        assert (counts.completed > 0, counts.failed > 0, counts.completed + counts.failed) == (True, True, 30)
        failed = answers(client, batch.error_file_id)
        assert {(one["error"]["code"], one["response"]) for one in failed} == {("batch_expired", None)}


def test_a_batch_is_cancelled_before_its_lines_are_checked(jobs, client, monkeypatch):
    is_checking, prepare = threading.Event(), module.prepare

    def wait(path, source, urls, most, is_stopped):
        is_checking.set()
        wait_until(is_stopped)
        return prepare(path, source, urls, most, is_stopped)

    monkeypatch.setattr(module, "prepare", wait)
    batches = [begun(client, lines_of(3)) for _ in range(2)]  # the second waits for the first
    assert is_checking.wait(20)
    assert client.batches.cancel(batches[1].id).status == "cancelling"
    assert ended(client, batches[1]).status == "cancelled"
    assert client.batches.retrieve(batches[0].id).status == "validating"
    assert client.batches.cancel(batches[0].id).status == "cancelling"
    for batch in batches:
        batch = ended(client, batch)
        assert (batch.status, batch.output_file_id, batch.cancelled_at >= batch.cancelling_at) == ("cancelled", None, True)
        with pytest.raises(openai.ConflictError, match="cancelled") as refused:
            client.batches.cancel(batch.id)
        assert refused.value.response.headers["x-should-retry"] == "false"
    assert [*(jobs.batches.store.folder / "lines").iterdir()] == []


def test_a_small_file_does_not_wait_for_the_check_of_a_large_one(jobs, client, monkeypatch):
    checked, may_go_on, prepare = [], threading.Event(), module.prepare

    def wait(path, source, *rest):
        if (size := source.stat().st_size) > module.SMALL_BYTES:
            checked.append(size)
            assert may_go_on.wait(60)
        return prepare(path, source, *rest)

    monkeypatch.setattr(module, "prepare", wait)
    monkeypatch.setattr(module, "SMALL_BYTES", 2000)
    large = [begun(client, lines_of(100)) for _ in range(2)]
    for _ in range(2):
        assert ended(client, begun(client, lines_of(5))).status == "completed"
    assert len(checked) == 1, "large ones are checked one at a time"
    assert {client.batches.retrieve(batch.id).status for batch in large} == {"validating"}
    may_go_on.set()
    for batch in large:
        assert counted(client, ended(client, batch)) == once(100)


def test_a_cancelled_batch_keeps_its_answers(tmp_path, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(100))
        gate.allow(3)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch)
        gate.open()
        num = batch.request_counts.completed
        assert 0 < num < 100
        assert len(answers(client, batch.output_file_id)) == num
        assert set(counted(client, batch).values()) == {1}
        wait_until(lambda: server.runtime.engine.load().num_running == 0)


@pytest.mark.parametrize("method", ["put", "end"])
def test_a_cancel_while_a_batch_ends_changes_nothing(jobs, client, monkeypatch, method):
    """`put` notes that it is finalizing, `end` that it has ended."""
    is_ending, may_end, real = threading.Event(), threading.Event(), getattr(Store, method)

    def wait(store, batch, *rest):
        if batch.status in ("finalizing", "completed"):
            is_ending.set()
            assert may_end.wait(20)
        real(store, batch, *rest)

    monkeypatch.setattr(Store, method, wait)
    batch = begun(client, lines_of(3))
    assert is_ending.wait(20)
    is_cancelling, cancel = threading.Event(), BatchRunner.cancel
    monkeypatch.setattr(BatchRunner, "cancel", lambda *given: (is_cancelling.set(), cancel(*given))[1])
    cancelling = threading.Thread(target=lambda: told.append(client.batches.cancel(batch.id)))
    told = []
    cancelling.start()
    assert is_cancelling.wait(20)
    may_end.set()
    cancelling.join(20)
    batch = ended(client, batch)
    assert [one.status for one in told] == ["completed"]
    assert (batch.status, batch.cancelling_at) == ("completed", None)
    assert jobs.batches.store.unfinished() == []
    assert counted(client, batch) == once(3)


def test_a_batch_that_has_ended_on_the_disk_is_told_so_at_once(jobs, client, monkeypatch):
    """Webhooks read the end there, and their clients ask for it."""
    may_end, remove = threading.Event(), store_module.remove

    def wait(paths):
        assert may_end.wait(20)
        remove(paths)

    monkeypatch.setattr(store_module, "remove", wait)
    batch = begun(client, lines_of(3))
    wait_until(lambda: not jobs.batches.store.unfinished())
    assert jobs.batches._running
    told = client.batches.retrieve(batch.id)
    assert (told.status, told.output_file_id is None) == ("completed", False)
    may_end.set()


# who runs when


def test_owners_take_turns(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(module, "TAKEN_AT_ONCE", 1000)
    with serving(tmp_path, gate, api_keys=("ann", "bob")) as server:
        asked, real = [], server.batches._requests.ask

        async def ask(owner, *rest):
            asked.append(owner.key)
            return await real(owner, *rest)

        monkeypatch.setattr(server.batches._requests, "ask", ask)
        with server.client("ann") as ann, server.client("bob") as bob:
            first = [begun(ann, lines_of(150)) for _ in range(3)]
            wait_until(lambda: len(asked) >= 128)  # twice the rows
            second = begun(bob, lines_of(40))
            wait_until(lambda: len(server.batches._turns._waiting) == 4)
            gate.open()
            assert counted(bob, ended(bob, second)) == once(40)
            for one in first:
                assert counted(ann, ended(ann, one)) == once(150)
        bobs = [nth for nth, owner in enumerate(asked) if owner != asked[0]]
        assert (len(asked), len(bobs)) == (490, 40)
        assert asked[bobs[0] : bobs[-1]].count(asked[0]) <= 2 * 40  # though 3 batches of ann's wait, and she was first


def test_lines_that_all_wait_leave_another_owner_a_place(tmp_path, monkeypatch):
    """Ann's may wait for a model that serves people."""
    with serving(tmp_path, api_keys=("ann", "bob")) as server:
        real, asked, others_are_done = server.batches._requests.ask, Counter(), asyncio.Event()

        async def ask(owner, *rest):
            is_first = next(iter(asked), owner.key) == owner.key
            asked[owner.key] += 1
            if is_first:
                await others_are_done.wait()
            elif asked[owner.key] == 20:
                others_are_done.set()
            return await real(owner, *rest)

        monkeypatch.setattr(server.batches._requests, "ask", ask)
        with server.client("ann") as ann, server.client("bob") as bob:
            first = begun(ann, lines_of(200))
            wait_until(lambda: server.batches._turns._under_way.total() == 128)
            assert counted(bob, ended(bob, begun(bob, lines_of(20)))) == once(20)
            assert counted(ann, ended(ann, first)) == once(200)


def test_lines_that_wait_for_an_upstream_hold_up_no_lines_for_models_here(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        real, num_far, others_are_done = server.batches._requests.ask, 0, asyncio.Event()

        async def ask(owner, url, *rest):
            nonlocal num_far
            if url == CHAT:
                with rest[-1].elsewhere():
                    num_far += 1
                    await others_are_done.wait()
            return await real(owner, url, *rest)

        monkeypatch.setattr(server.batches._requests, "ask", ask)
        with server.client() as client:
            first = begun(client, lines_of(300))
            wait_until(lambda: server.batches._turns._waiting)
            second = begun(client, lines_of(200, COMPLETIONS), COMPLETIONS)
            assert counted(client, ended(client, second)) == once(200)
            assert 128 <= num_far <= 2 * 128
            others_are_done.set()
            assert counted(client, ended(client, first)) == once(300)
        assert not server.batches._turns._elsewhere


@pytest.mark.parametrize("why", [ENGINE_FAILED, ENGINE_STUCK])
def test_a_line_that_breaks_the_engine_does_so_three_times_and_others_are_answered(tmp_path, monkeypatch, why):
    with serving(tmp_path) as server, server.client() as client:
        real, under_way, alone = server.batches._requests.ask, {}, []

        async def ask(owner, url, body, request_id, *rest):
            """The engine fails at once with such a line, and with it all that are under way."""
            failing = under_way[request_id] = asyncio.Event()
            if b"poison" in body:
                await until(lambda: len(under_way) > 1 or len(alone) == 2)  # others join it, but for the last time
                alone.append(len(under_way) == 1)
                for one in under_way.values():
                    one.set()
            elif len(alone) < 2:
                await failing.wait()
            else:
                del under_way[request_id]
                return await real(owner, url, body, request_id, *rest)
            del under_way[request_id]
            told = {"error": {"message": f"The request failed: {why}."}}
            return Answered(503, 0.0, json.dumps(told).encode())

        monkeypatch.setattr(server.batches._requests, "ask", ask)
        batch = ended(client, begun(client, [*lines_of(6), line("poison", user="poison"), *lines_of(12)[6:]]))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 12, 1)
        assert batch.errors is None
        assert alone == [False, False, True]
        [failed] = answers(client, batch.error_file_id)
        assert (failed["custom_id"], failed["error"]["code"]) == ("poison", "server_failed")


def test_a_line_that_is_asked_alone_fails_alone_with_the_server(tmp_path, monkeypatch, gate):
    def books(batch) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(tmp_path / "lines" / batch.id))

    def num_marked(batch) -> int:
        """Lines that fail if the process dies now."""
        with books(batch) as base:
            return base.execute("SELECT count(*) FROM asked WHERE is_under_way").fetchone()[0]

    with serving(tmp_path, gate) as server, server.client() as client:
        batches = [begun(client, lines_of(20)) for _ in "ab"]
        wait_until(lambda: server.batches._turns._under_way.total() == 40)
    for batch in batches:
        with books(batch) as base, base:
            base.execute("UPDATE asked SET num_failures = ?", (module.ALONE_AFTER,))
    with serving(tmp_path, GatedExecutor()) as server:
        wait_until(lambda: server.batches._alone._waiters)
        wait_until(lambda: sum(map(num_marked, batches)) == 1)
        assert server.batches._turns._under_way.total() == 1


def test_lines_that_were_refused_to_the_end_say_why(tmp_path, monkeypatch):
    with serving(tmp_path) as server, server.client() as client:
        refusal = Answered(503, 0.0, b'{"error": {"message": "The model can not be loaded. Try again in 30 s."}}')
        with refusing(monkeypatch, server, refusal, 1 << 30) as asked:
            batch = begun(client, lines_of(3), completion_window="1h")
            wait_until(lambda: len(asked) > 6)
            real = server.batches._now
            server.batches._now = lambda: real() + 3601
            batch = ended(client, batch)
        assert (batch.status, batch.errors) == ("expired", None)
        (message,) = {one["error"]["message"] for one in answers(client, batch.error_file_id)}
        assert "Send it in another batch. At the end lines were refused." in message
        assert message.endswith("Status 503: The model can not be loaded."), "nobody tries again in 30 s"


def test_a_bad_line_does_not_hide_that_the_others_are_refused(jobs, client, monkeypatch):
    refusal = Answered(503, 60.0, b'{"error": {"message": "The model can not be loaded."}}')
    with refusing(monkeypatch, jobs, refusal, 2):
        batch = begun(client, [line("a"), line("b"), line("bad", model="another")])
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.failed == 1)
        [error] = client.batches.retrieve(batch.id).errors.data
        assert error.message == "Lines are refused, and asked again. Status 503: The model can not be loaded."
        client.batches.cancel(batch.id)


def test_lines_of_a_key_that_was_withdrawn_fail(tmp_path, gate):
    keys = tmp_path / "keys.toml"
    told = '[[keys]]\nname = "%s"\nkey = "%s"\n'
    keys.write_text(told % ("ann", "ann") + told % ("bob", "bob"))
    with serving(tmp_path / "jobs", gate, api_keys_file=str(keys)) as server, server.client("ann") as ann:
        batch = begun(ann, lines_of(200))
        wait_until(lambda: ann.batches.retrieve(batch.id).status == "in_progress")
        keys.write_text(told % ("bob", "bob"))
        server.server.reload()
        wait_until(lambda: len(server.server._keys.keys) == 1)
        gate.open()
        wait_until(lambda: server.batches.store.unfinished() == [])
        keys.write_text(told % ("ann", "ann"))
        server.server.reload()
        wait_until(lambda: [key.name for key in server.server._keys.keys] == ["ann"])
        batch = ann.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert counted(ann, batch) == once(200)
        failed = answers(ann, batch.error_file_id)
        assert {one["error"]["code"] for one in failed} == {"invalid_api_key"}


@pytest.mark.parametrize(("status", "retry_after_s"), [(429, None), (502, 0.0), (503, 0.01), (504, None)])
def test_lines_that_the_server_refuses_for_now_are_asked_again(jobs, client, monkeypatch, status, retry_after_s):
    with refusing(monkeypatch, jobs, Answered(status, retry_after_s, b"{}"), 20) as asked:
        batch = ended(client, begun(client, lines_of(30)))
    assert (batch.request_counts.completed, len(asked)) == (30, 50)
    assert counted(client, batch) == once(30)


@pytest.mark.parametrize("body", [b'{\n "a":\r\n [1, 2]\n}', b"<html>\n</html>", b"", b"\xff\n", b'{"usage": 3}'])
def test_whatever_another_server_answers_is_one_line(jobs, client, monkeypatch, body):
    with refusing(monkeypatch, jobs, Answered(400, None, body), 1):
        batch = ended(client, begun(client, lines_of(2)))
    (failed,) = answers(client, batch.error_file_id)
    assert failed["response"]["status_code"] == 400
    assert counted(client, batch) == once(2)


def test_a_large_answer_is_written_in_a_thread_and_not_lost_meanwhile(jobs, client, monkeypatch):
    threads, has_written, real, write = [], threading.Event(), module.line_of_answer, Lines.write

    def made(line, *rest):
        if line.place == 1:
            threads.append(threading.current_thread().name)
            assert has_written.wait(30)
        return real(line, *rest)

    def written(lines, some):
        write(lines, some)
        has_written.set()

    monkeypatch.setattr(module, "line_of_answer", made)
    monkeypatch.setattr(Lines, "write", written)
    with refusing(monkeypatch, jobs, Answered(200, None, json.dumps("a" * LARGE_SIZE).encode()), 1) as asked:
        batch = ended(client, begun(client, lines_of(2)))
    assert counted(client, batch) == once(2)
    assert len(asked) == 2
    assert [name.startswith("penstock-answers") for name in threads] == [True]


@pytest.mark.parametrize("status", [200, 400, None])
def test_a_line_has_no_other_line_ends(jobs, client, monkeypatch, status):
    """`str.splitlines` would split there. None: the key was withdrawn."""
    text = "a\x85b\u2028c\u2029d"
    answered = None if status is None else Answered(status, None, json.dumps(text, ensure_ascii=False).encode())
    with refusing(monkeypatch, jobs, answered, 1):
        batch = ended(client, begun(client, [line(text)]))
    content = client.files.content(batch.output_file_id or batch.error_file_id).text
    (told,) = map(json.loads, content.splitlines())
    assert told["custom_id"] == text
    assert told["response"] is None or told["response"]["body"] == text


@pytest.mark.parametrize("body", [b'{"usage": 3}', b'{"usage": {"prompt_tokens": "many"}}', b"no JSON", b'{"usage": null}'])
def test_an_answer_without_a_sound_usage_is_an_answer(jobs, client, monkeypatch, body):
    with refusing(monkeypatch, jobs, Answered(200, None, body), 1):
        batch = ended(client, begun(client, lines_of(1)))
    assert (batch.request_counts.completed, batch.usage.total_tokens) == (1, 0)


@pytest.mark.parametrize("names", [("prompt", "completion"), ("input", "output")])
def test_the_usage_of_all_lines_is_summed(jobs, client, monkeypatch, names):
    asked, answered = names
    usage = {f"{asked}_tokens": 9, f"{answered}_tokens": 5}
    usage |= {f"{asked}_tokens_details": {"cached_tokens": 4, "cache_write_tokens_details": {"ttl_12h_tokens": 1}}}
    usage |= {f"{answered}_tokens_details": {"reasoning_tokens": 3}}
    with refusing(monkeypatch, jobs, Answered(200, None, json.dumps({"usage": usage}).encode()), 2):
        told = ended(client, begun(client, lines_of(2))).usage
    assert (told.input_tokens, told.output_tokens, told.total_tokens) == (18, 10, 28)
    assert (told.input_tokens_details.cached_tokens, told.output_tokens_details.reasoning_tokens) == (8, 6)


def test_lines_begin_only_in_their_hours(tmp_path, monkeypatch):
    with serving(tmp_path, batch_hours="22-6") as server, server.client() as client:
        hour = 21
        monkeypatch.setattr(module.time, "localtime", lambda _: SimpleNamespace(tm_hour=hour))
        with refusing(monkeypatch, server, None, 0) as asked:
            batch = begun(client, lines_of(5))
            wait_until(lambda: server.batches._running[batch.id].has_room.is_set())
            assert (asked, client.batches.retrieve(batch.id).status) == ([], "in_progress")
            hour = 22
            assert counted(client, ended(client, batch)) == once(5)


@pytest.mark.parametrize(
    ("text", "inside", "outside"), [("22-6", (22, 23, 0, 5), (6, 21)), ("1-24", (1, 23), (0,)), ("0-1", (0,), (1, 23))]
)
def test_hours_may_go_over_midnight(text, inside, outside):
    hours = module.read_hours(text)
    assert [module.is_within(hours, hour) for hour in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)


@pytest.mark.parametrize("text", ["", "22", "6-6", "0-24", "25-3", "3-25", "-1-3", "22-6 ."])
def test_hours_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="hours"):
        module.read_hours(text)


def test_a_refused_line_holds_up_nobody(tmp_path, monkeypatch):
    """Lines that are refused again and again take no turns from those of other keys, nor from others of their batch."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{name}"\n' for name in ("ann", "bob")))
    with serving(tmp_path / "jobs", api_keys_file=str(keys)) as server:
        real, asked = server.batches._requests.ask, Counter()

        async def ask(owner, url, body, request_id, *rest):
            asked[request_id] += 1
            return Answered(503, 0.0, b"{}") if b"never" in body else await real(owner, url, body, request_id, *rest)

        monkeypatch.setattr(server.batches._requests, "ask", ask)
        with server.client("ann") as ann, server.client("bob") as bob:
            refused = [line(f"never{nth}", user="never") for nth in range(300)]
            first = begun(ann, [*refused, *lines_of(20)])
            wait_until(lambda: max(asked.values(), default=0) > 1)
            assert ended(bob, begun(bob, lines_of(20))).request_counts.completed == 20
            wait_until(lambda: ann.batches.retrieve(first.id).request_counts.completed == 20)
            ann.batches.cancel(first.id)
            first = ended(ann, first)
            assert {one["error"]["code"] for one in answers(ann, first.error_file_id)} == {"batch_cancelled"}
            assert sum(counted(ann, first).values()) == 320


def test_the_end_is_estimated_from_the_lines_that_were_answered_and_those_under_way(jobs):
    """After 60 s 20 lines were answered, and a quarter of 40 counts, so the other 70 take 140 s."""
    runner, now_s = jobs.batches, 1_000_060
    runner._now = lambda: now_s
    lines = SimpleNamespace(progress=Progress(110, 25, 5, 0, 0, {}))
    batch = Batch(id="x", owner=Owner(), kind="openai", url=CHAT, input_file="file", window_s=3600, created_s=0)
    running = module._Running(batch, lines=lines, began_s=1_000_000, began_with=10, under_way={*range(40)})
    runner._running["x"] = running
    try:
        assert runner.ends_s(batch) == now_s + 140
        running.began_with = 30
        assert runner.ends_s(batch) is None, "none was answered since the start"
    finally:
        del runner._running["x"]


def test_not_all_lines_of_a_batch_are_refused_at_once(jobs, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_REFUSED", 10)
    body = b'{"error": {"message": "The upstream is full."}}'
    with refusing(monkeypatch, jobs, Answered(429, 60.0, body), 1000) as asked:
        batch = begun(client, lines_of(200))
        (running,) = jobs.batches._running.values()
        wait_until(lambda: len(running.refused) >= 10 and not running.under_way)
        assert len(asked) < 10 + 2 * module.TAKEN_AT_ONCE
        [told] = client.batches.retrieve(batch.id).errors.data
        assert told.message == "Lines are refused, and asked again. Status 429: The upstream is full."
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        assert counted(client, batch) == once(200)
        assert not running.refused


def test_answers_stay_when_their_books_are_lost(tmp_path, monkeypatch, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(100))
        gate.allow(3)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        lines = server.batches.store.lines(server.batches.store.unfinished()[0])
    lines.write_bytes(b"no database" * 1000)
    lines.with_name(lines.name + "-wal").unlink(missing_ok=True)
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert batch.status == "failed"
        assert answers(client, batch.output_file_id)


def test_lines_whose_grammars_wait_are_answered_by_the_first_model_of_their_route(tmp_path, monkeypatch):
    monkeypatch.setattr(off_loop, "MAX_GRAMMARS", 1)
    first, second = (make_runtime(served_names=(name,), aliases=()) for name in ("first", "second"))
    queue, have_come, num_joined = first.off_loop._grammars, threading.Event(), 0
    join, prepare = queue.join, first.grammars.prepare

    def noted(*told):
        nonlocal num_joined
        job, num_joined = join(*told), num_joined + 1
        if num_joined == 3:  # one is at work, one has the place, and one more has come
            have_come.set()
        return job

    monkeypatch.setattr(queue, "join", noted)
    monkeypatch.setattr(first.grammars, "prepare", lambda *told: (have_come.wait(20), prepare(*told)))
    told = ServerConfig(port=0, shutdown_timeout_s=0.0, jobs_dir=str(tmp_path))
    parts = {"routes": [Route(name="auto", models=("first", "second"))]}
    with closing(first), closing(second), JobsServer(first, told, (second,), parts) as server, server.client() as client:
        lines = [line(str(nth), model="auto", structured_outputs={"regex": f"[{nth}]"}) for nth in range(3)]
        batch = ended(client, begun(client, lines))
        models = [answer["response"]["body"]["model"] for answer in answers(client, batch.output_file_id)]
        assert models == ["first"] * 3
        assert not first.metrics.rejected["queue_full"]


@contextmanager
def cascading(folder, monkeypatch, **config):
    """A server with a cascade whose small model is unsure.

    Its large model raises the errors in a list first, as if there were no room for it beside models that people use.
    """
    small = make_runtime(served_names=("small",), aliases=())
    large = make_runtime(served_names=("large",), aliases=())
    refusals: list[Rejected] = []
    answerer = ServedModel.answerer

    def refuse(served):
        if served.names == ("large",) and refusals:
            raise refusals.pop()
        return answerer(served)

    monkeypatch.setattr(ServedModel, "answerer", refuse)
    by = AgreementConfig(weak="small", strong="large", samples=4, temperature=5.0, least=1.0)
    route = Route(name="auto", models=("small", "large"), by=by)
    told = ServerConfig(port=0, shutdown_timeout_s=0.0, jobs_dir=str(folder), **config)
    with JobsServer(small, told, (large,), {"routes": [route]}) as server:
        yield server, small, refusals
    small.close()
    large.close()


NO_ROOM = Rejected(RejectReason.UNAVAILABLE, "No room.", retry_after_s=1)


def test_a_small_model_that_was_unsure_is_not_asked_again_while_the_large_one_is_put_off(tmp_path, monkeypatch):
    with cascading(tmp_path, monkeypatch) as (server, small, refusals), server.client() as client:
        uses = []
        for num_refusals in (0, 3):
            refusals += [NO_ROOM] * num_refusals
            num_before = small.uses.num_uses
            batch = ended(client, begun(client, [line("a", model="auto", temperature=1.0)]))
            (answer,) = answers(client, batch.output_file_id)
            assert (answer["response"]["body"]["model"], refusals) == ("large", [])
            uses.append(small.uses.num_uses - num_before)
        assert uses[0] == uses[1] > 0


def test_a_line_is_answered_by_the_small_model_if_its_key_loses_the_large_one(tmp_path, monkeypatch):
    keys, told = tmp_path / "keys.toml", '[[keys]]\nname = "ann"\nkey = "ann"\nmodels = %s\n'
    keys.write_text(told % '["small", "large"]')
    with cascading(tmp_path / "jobs", monkeypatch, api_keys_file=str(keys)) as (server, _, refusals):
        ann = server.client("ann")
        refusals += [NO_ROOM] * 1000
        batch = begun(ann, [line("a", model="auto", temperature=1.0)])
        wait_until(lambda: ann.batches.retrieve(batch.id).errors)
        keys.write_text(told % '["small"]')
        server.server.reload()
        batch = ended(ann, batch)
        assert [one["response"]["body"]["model"] for one in answers(ann, batch.output_file_id)] == ["small"]


def test_what_is_sent_twice_is_one_batch(client, jobs, monkeypatch):
    file = client.files.create(file=("in.jsonl", json.dumps(line("0")).encode()), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "extra_headers": {"Idempotency-Key": "a"}}
    first = client.batches.create(**asked)
    assert client.batches.create(**asked).id == first.id
    assert ended(client, first).status == "completed"
    assert client.batches.create(**asked).id == first.id
    assert client.batches.create(**asked | {"metadata": {"a": "b"}}).id != first.id
    refused, real = threading.Event(), Store.create

    def refuse(store, batch):
        refused.wait(20)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Store, "create", refuse)
    asked["extra_headers"] = {"Idempotency-Key": "b"}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(client.batches.create, **asked) for _ in range(2)]
        refused.set()
        for one in both:
            with pytest.raises(openai.InternalServerError):
                one.result()
    monkeypatch.setattr(Store, "create", real)
    assert client.batches.create(**asked).id != first.id


def test_a_line_that_breaks_the_server_is_an_error(jobs, client, monkeypatch):
    async def ask(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(jobs.batches._requests, "ask", ask)
    batch = ended(client, begun(client, lines_of(20)))
    assert {one["error"]["code"] for one in answers(client, batch.error_file_id)} == {"internal_error"}
    assert counted(client, batch) == once(20)


def test_lines_pass_the_log_of_requests(tmp_path, caplog):
    caplog.set_level("INFO")
    with serving(tmp_path, log_requests=1.0) as server, server.client() as client:
        assert ended(client, begun(client, lines_of(3))).request_counts.completed == 3
    assert caplog.text.count(f'method="POST" path="{CHAT}"') == 3


# stops and faults


def test_a_server_that_is_started_again_goes_on(tmp_path, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(300))
        gate.allow(4)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    store = Store(tmp_path, max_bytes=1)
    assert [(one.id, one.status) for one in store.unfinished()] == [(batch.id, "in_progress")]
    store.close()
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
        assert counted(client, batch) == once(300)


def test_a_batch_has_its_size_before_its_lines_are_opened_again(tmp_path, gate, monkeypatch):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(300))
        gate.allow(4)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    opened, open_lines = threading.Event(), BatchRunner._open

    def open_late(self, batch):
        assert opened.wait(60)
        return open_lines(self, batch)

    monkeypatch.setattr(BatchRunner, "_open", open_late)
    with serving(tmp_path) as server, server.client() as client:
        total = client.batches.retrieve(batch.id).request_counts.total
        opened.set()
        assert total == 300
        assert ended(client, batch).request_counts.completed == 300


@pytest.mark.parametrize("wish", ["false", "true"])
def test_lines_of_a_batch_that_must_stay_here_stay_here_also_after_a_restart(tmp_path, monkeypatch, wish):
    asked = []

    async def answer(self, data, http, terms, charge=None):
        asked.append(data)
        raise upstream_is_full

    upstream_is_full = Rejected(RejectReason.QUEUE_FULL, "full")
    monkeypatch.setattr(Upstream, "answer", answer)
    upstream = UpstreamConfig(name="far", url="http://localhost:9/v1", model="m")
    more = {"routes": [Route(name="auto", models=("far", "toy"))], "upstreams": [upstream]}
    with serving(tmp_path, more=more) as server, server.client(default_headers={"X-Local-Only": wish}) as client:
        monkeypatch.setattr(server.batches, "_drive", lambda batch: None)
        batch = begun(client, [line("a", model="auto")])
    with serving(tmp_path, more=more) as server, server.client() as client:
        assert ended(client, batch).request_counts.completed == 1
    assert len(asked) == (wish == "false")


@pytest.mark.parametrize("status", ["validating", "cancelling", "in_progress"])
def test_a_batch_whose_lines_were_not_checked_begins_anew(tmp_path, monkeypatch, status):
    """As if the process was killed, or the disk lost the lines."""
    with serving(tmp_path) as server, server.client() as client:
        monkeypatch.setattr(server.batches, "_drive", lambda batch: None)
        batch = begun(client, lines_of(5))
        (record,) = server.batches.store.unfinished()
        server.batches.store.put(record.with_status(status, record.created_s) if status != "validating" else record)
        server.batches.store.content(record.output_file).write_bytes(b"half an answ")
        server.batches.store.lines(record).with_name(f"{batch.id}-new").write_bytes(b"half a database")
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert batch.status == ("cancelled" if status == "cancelling" else "completed")
        assert counted(client, batch) == (Counter() if status == "cancelling" else once(5))
        # Empty files are deleted just after the end.
        wait_until(lambda: len([*(tmp_path / "files").iterdir()]) == len(client.files.list().data))


def test_a_server_that_stops_while_a_file_is_checked_checks_it_again(tmp_path, monkeypatch):
    is_checking, prepare = threading.Event(), module.prepare

    def wait(path, source, urls, most, is_stopped):
        is_checking.set()
        wait_until(is_stopped)
        return prepare(path, source, urls, most, is_stopped)

    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare", wait)
        with serving(tmp_path) as server, server.client() as client:
            batches = [begun(client, lines_of(3)) for _ in range(2)]
            assert is_checking.wait(20)
    with serving(tmp_path) as server, server.client() as client:
        for batch in batches:
            assert counted(client, ended(client, batch)) == once(3)


def test_a_stop_leaves_nothing_open(tmp_path, gate):
    before = Counter(open_files())
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(200))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    if is_free_threaded():  # where SQLite closes files when the thread that opened them runs again, or ends
        wait_until(lambda: gc.collect() >= 0 and not Counter(open_files()) - before)
    assert not Counter(open_files()) - before
    assert sorted(path.name for path in (tmp_path / "lines").iterdir()) == [batch.id]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "jobs.db", "lines", "lock"]


FULL, FAILING = OSError(28, "No space left on device"), sqlite3.OperationalError("disk I/O error")


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        *((Lines, "write", FULL), (Lines, "write", FAILING), (Lines, "take", FAILING), (Lines, "__init__", FULL)),
        *((Store, "put", FAILING), (Store, "end", FULL), (Store, "end", FAILING), (module, "prepare", FULL)),
    ],
)
def test_a_disk_that_fails_for_a_while_holds_up_batches_alone(tmp_path, monkeypatch, owner, method, error):
    is_broken, num_failed, real = threading.Event(), [], getattr(owner, method)

    def work(*given, **named):
        is_new = method == "put" and given[1].status == "validating"
        if is_broken.is_set() and not is_new:
            num_failed.append(1)
            raise error
        return real(*given, **named)

    monkeypatch.setattr(owner, method, work)
    with serving(tmp_path) as server, server.client() as client:
        is_broken.set()
        batch = begun(client, lines_of(60))
        wait_until(lambda: len(num_failed) >= 3)
        asked = client.chat.completions.create(model="toy", max_tokens=3, messages=[{"role": "user", "content": "hello"}])
        assert asked.choices[0].message.content
        assert client.batches.retrieve(batch.id).status not in ENDED
        is_broken.clear()
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert counted(client, batch) == once(60)
        assert [*(tmp_path / "lines").iterdir()] == []


ROOM = 125_000
"""Bytes for a batch of 150 lines and their answers (160 and 600 bytes each), but not for all of it beside another file."""


@pytest.fixture
def narrow(monkeypatch):
    """An executor of few rows. Answers are written often, so that few are unwritten when the room ends."""
    monkeypatch.setattr(module, "GATHERED_S", 0.01)
    return HashExecutor(replace(CAPACITY, max_rows=8), model=PRINTABLE_MODEL)


def waiting(client, server) -> tuple[openai.types.FileObject, openai.types.Batch]:
    """Begin a batch for whose answers there is no room beside another file. Return both when it waits."""
    other = client.files.create(file=file_of([line("other", user="a" * 50_000)]), purpose="batch")
    batch = begun(client, lines_of(150))
    wait_until(lambda: client.batches.retrieve(batch.id).errors)
    (running,) = server.batches._running.values()
    wait_until(lambda: not running.under_way and not running.answers)
    told = client.batches.retrieve(batch.id)
    assert (told.status, told.errors.data[0].code) == ("in_progress", "no_room")
    assert f"{ROOM} are kept (--jobs-bytes). Delete files or message batches." in told.errors.data[0].message
    assert server.batches.store.num_bytes(running.batch.owner) >= ROOM
    assert told.request_counts.completed < 150, "no more lines are asked"
    return other, batch


def test_a_batch_waits_until_the_files_of_its_key_have_room_for_its_answers(tmp_path, narrow):
    with serving(tmp_path, narrow, jobs_bytes=ROOM) as server, server.client() as client:
        other, batch = waiting(client, server)
        assert client.files.list().data[0].id == batch.input_file_id, "the server goes on"
        client.files.delete(other.id)
        batch = ended(client, batch)
        assert (batch.status, batch.errors, batch.request_counts.completed) == ("completed", None, 150)
        assert counted(client, batch) == once(150)


def test_a_batch_that_waits_for_room_can_be_cancelled_also_after_a_restart(tmp_path, narrow):
    with serving(tmp_path, narrow, jobs_bytes=ROOM) as server, server.client() as client:
        _, batch = waiting(client, server)
    with serving(tmp_path, jobs_bytes=ROOM) as server, server.client() as client:
        wait_until(lambda: client.batches.retrieve(batch.id).errors)
        num_completed = client.batches.retrieve(batch.id).request_counts.completed
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        assert (batch.status, batch.errors, batch.request_counts.completed) == ("cancelled", None, num_completed)
        assert counted(client, batch) == once(150)


def held_back(monkeypatch) -> threading.Event:
    """Let no file be checked until the event is set."""
    may_go_on, prepare = threading.Event(), module.prepare

    def wait(*given):
        assert may_go_on.wait(20)
        return prepare(*given)

    monkeypatch.setattr(module, "prepare", wait)
    return may_go_on


def test_batches_of_one_file_take_no_more_room_than_its_key_has(tmp_path, gate, monkeypatch):
    """The database of a batch's lines takes room, too, and each of many batches has one."""
    may_go_on = held_back(monkeypatch)
    lines = lines_of(800)
    (_, data), most = file_of(lines), 40_000
    with serving(tmp_path, gate, jobs_bytes=len(data) + most) as server, server.client() as client:
        file = client.files.create(file=file_of(lines), purpose="batch")
        fields = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batches = [client.batches.create(**fields) for _ in range(6)]
        may_go_on.set()

        def told():
            return [client.batches.retrieve(batch.id) for batch in batches]

        wait_until(lambda: all(one.errors or one.status == "in_progress" for one in told()))
        sizes = [path.stat().st_size for path in (tmp_path / "lines").glob("*[0-9a-f]")]
        assert most <= sum(sizes) < most + max(sizes)
        waits = [one for one in told() if one.status == "validating"]
        assert len(waits) == len(batches) - len(sizes)
        assert all("--jobs-bytes" in one.errors.data[0].message for one in waits)
        assert ended(client, client.batches.cancel(waits[-1].id)).status == "cancelled"
        real = server.batches._now
        server.batches._now = lambda: real() + 25 * 3600
        assert {ended(client, batch).status for batch in batches} == {"cancelled", "expired"}
        assert sum(bool(one.error_file_id) for one in told()) == len(sizes), "no lines of a batch that never began"


def test_the_oldest_batch_that_waits_for_room_begins_first(tmp_path, gate, monkeypatch):
    may_go_on = held_back(monkeypatch)
    lines, other = lines_of(200), file_of([line("other", user="a" * 100_000)])
    most = sum(len(data) for _, data in (file_of(lines), other)) + 5_000
    with serving(tmp_path, gate, jobs_bytes=most) as server, server.client() as client:
        other = client.files.create(file=other, purpose="batch")
        file = client.files.create(file=file_of(lines), purpose="batch")
        fields = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batches = [client.batches.create(**fields) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(module, "TRIED_AGAIN_S", 3600.0)
            may_go_on.set()
            wait_until(lambda: client.batches.retrieve(batches[1].id).errors)
            client.files.delete(other.id)
        batches += [client.batches.create(**fields) for _ in range(2)]

        def told():
            return [client.batches.retrieve(batch.id) for batch in batches]

        wait_until(lambda: all(one.errors or one.status == "in_progress" for one in told()))
        assert [one.status for one in told()] == ["in_progress", *["validating"] * 3]
        assert all("--jobs-bytes" in one.errors.data[0].message for one in told()[1:])
    with serving(tmp_path, jobs_bytes=10 * most) as server, server.client() as client:
        assert {ended(client, batch).status for batch in batches} == {"completed"}


def test_a_disk_that_hangs_holds_up_no_other_request(jobs, client, monkeypatch):
    is_hanging, may_go_on, create = threading.Event(), threading.Event(), Store.create

    def hang(store, batch):
        with store._guard:
            is_hanging.set()
            assert may_go_on.wait(60)
            return create(store, batch)

    monkeypatch.setattr(Store, "create", hang)
    told: list[object] = []
    asks = [lambda: begun(client, lines_of(1)), lambda: client.batches.list().data, lambda: client.files.list().data]
    threads = [threading.Thread(target=lambda ask=ask: told.append(ask())) for ask in asks]
    threads[0].start()
    assert is_hanging.wait(20)
    for thread in threads[1:]:
        thread.start()
    for _ in range(5):
        asked = client.chat.completions.create(model="toy", max_tokens=3, messages=[{"role": "user", "content": "hello"}])
        assert asked.choices[0].message.content
    assert told == []
    may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(told) == 3


def test_a_batch_whose_file_was_deleted_fails(tmp_path, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(300))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    (tmp_path / "files" / batch.input_file_id).unlink()
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "file_not_found")


def test_lines_that_are_broken_fail_the_batch(tmp_path, gate):
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, lines_of(300))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    (tmp_path / "lines" / batch.id).write_bytes(b"no database" * 1000)
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "internal_error")


def test_a_fault_of_our_own_fails_the_batch_and_keeps_its_answers(jobs, client, monkeypatch):
    take, end, num_failed, faults = Lines.take, Store.end, [], iter([1])

    def work(lines, after, *rest):
        if after and next(faults, None):
            wait_until(lambda: lines.progress.num_answered == module.TAKEN_AT_ONCE)
            raise ZeroDivisionError
        return take(lines, after, *rest)

    def refuse_at_first(*given):
        if len(num_failed) < 2:
            num_failed.append(1)
            raise OSError(28, "No space left on device")
        end(*given)

    monkeypatch.setattr(Lines, "take", work)
    monkeypatch.setattr(Store, "end", refuse_at_first)
    batch = ended(client, begun(client, lines_of(100)))
    assert (batch.status, batch.errors.data[0].code, len(num_failed)) == ("failed", "internal_error", 2)
    assert counted(client, batch) == once(100), "each line has an answer or an error"
    assert batch.request_counts.completed == module.TAKEN_AT_ONCE
    assert {one["error"]["code"] for one in answers(client, batch.error_file_id)} == {"batch_failed"}
    assert [*(jobs.batches.store.folder / "lines").iterdir()] == []


@pytest.mark.parametrize("when", ["before the lines are given up", "before the end"])
def test_a_batch_whose_time_is_over_stays_expired_over_a_restart(tmp_path, gate, monkeypatch, when):
    method = (BatchRunner, "_give_up") if when == "before the lines are given up" else (BatchRunner, "_end")
    is_over = threading.Event()

    async def hang(self, *_):
        is_over.set()
        await self._closing.wait()

    with monkeypatch.context() as patch:
        patch.setattr(*method, hang)
        with serving(tmp_path, gate) as server, server.client() as client:
            batch = begun(client, lines_of(30))
            wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
            server.batches._now = lambda: batch.expires_at + 1.0
            assert is_over.wait(20)
    monkeypatch.setattr(BatchRunner, "now_s", lambda _: batch.expires_at + 2)
    monkeypatch.setattr(BatchRunner, "_is_due", is_due)
    with serving(tmp_path) as server, server.client() as client:
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.failed) == ("expired", 30)
        assert counted(client, batch) == once(30)


async def is_due(*_):
    return True


def test_many_batches_leave_nothing_behind(jobs, client):
    def run() -> None:
        batches = [begun(client, lines_of(2)) for _ in range(5)] + [begun(client, []), begun(client, lines_of(50))]
        client.batches.cancel(batches[-1].id)
        for batch in batches:
            ended(client, batch)
        wait_until(lambda: not jobs.batches._running)

    run()
    before = open_files()
    for _ in range(3):
        run()
    wait_until(lambda: open_files() == before)
    assert not jobs.batches._turns._waiting
    assert not jobs.batches._turns._under_way
    assert [*(jobs.batches.store.folder / "lines").iterdir()] == []
