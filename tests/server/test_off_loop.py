"""Long texts are worked on beside the event loop, a bounded number of them; what ends the server does not wait for them."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from penstock.calls import prompts
from penstock.config import ServerConfig
from penstock.deploy import off_loop
from penstock.deploy.off_loop import INLINE_MAX_SIZE, LARGE_SIZE, MAX_GRAMMARS, OffLoop, in_daemon, lane_of
from penstock.deploy.running import ServedModel
from penstock.obs.metrics import Metrics
from penstock.serve import bodies
from penstock.serve.cards import FactsCache
from penstock.serve.course import Course
from penstock.serve.http.checks import Sender
from penstock.serve.http.watch import Watched
from penstock.serve.own_requests import OwnRequests
from penstock.serve.waiting import FolderWatch
from penstock.text.chat import ChatTemplate
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import Owner
from support.server.errors import COMPLETIONS, check
from support.server.harness import CAPACITY, LiveServer, fixed_sources, make_client, make_runtime, running, until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "a" * (LARGE_SIZE + 1)


class Held:
    """Work that ends when the test says so."""

    def __init__(self):
        self.num_begun = 0
        self._may_end = threading.Event()

    def __call__(self, *_args, **_kwargs):
        self.num_begun += 1
        assert self._may_end.wait(20)
        return [70]

    def release(self):
        self._may_end.set()


@pytest.fixture
def held():
    held = Held()
    yield held
    held.release()


class Pool(OffLoop):
    """Takes names of tenants, or what `lane_of` returns."""

    def run(self, size, work, name):
        return super().run(size, work, of(name))

    def render(self, name, size, work):
        return super().render(of(name), size, work)

    def compile(self, name, size, work, **options):
        return super().compile(of(name), size, work, **options)


def of(name):
    return Owner(f"key of {name}", name) if isinstance(name, str) else name


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


async def test_only_threads_give_way(monkeypatch):
    sleepers = []
    monkeypatch.setattr(off_loop.time, "sleep", lambda _s: sleepers.append(threading.current_thread()))
    off_loop.give_way()
    assert sleepers == []
    await asyncio.to_thread(off_loop.give_way)
    assert len(sleepers) == 1


async def begin(pool, sizes, work):
    tasks = [asyncio.create_task(pool.run(size, work, "a")) for size in sizes]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("size", [LARGE_SIZE, LARGE_SIZE + 1])
async def test_more_than_the_bounds_is_refused_until_work_ends(size, held, monkeypatch):
    monkeypatch.setattr(off_loop, "MAX_JOBS", 3)
    pool = Pool()
    with contextlib.closing(pool):
        texts = await begin(pool, [size] * 4, held)
        with pytest.raises(Rejected) as refusal:
            await pool.run(size, held, "a")
        assert refusal.value.reason is RejectReason.QUEUE_FULL
        assert refusal.value.retry_after_s
        assert await pool.run(INLINE_MAX_SIZE, lambda: "at once", "a") == "at once"
        held.release()
        await asyncio.gather(*texts)
        assert await pool.run(size, lambda: "again", "a") == "again"


async def test_an_answer_waits_for_no_text_and_is_never_refused(pool, held):
    texts = await begin(pool, [LARGE_SIZE, LARGE_SIZE + 1] * 2, held)
    assert await pool.finish(LARGE_SIZE, lambda: "complete") == "complete"
    answers = [asyncio.create_task(pool.finish(20 * LARGE_SIZE, held)) for _ in range(4)]
    held.release()
    await asyncio.gather(*texts, *answers)


async def test_small_texts_of_a_tenant_leave_a_thread_to_others(pool, held):
    texts = await begin(pool, [LARGE_SIZE] * 4, held)
    async with asyncio.timeout(20):
        assert await pool.run(LARGE_SIZE, lambda: "read", "b") == "read"
    held.release()
    await asyncio.gather(*texts)


async def test_large_texts_of_a_tenant_hold_up_those_of_others_for_one_turn(monkeypatch, held):
    monkeypatch.setattr(off_loop, "MAX_SIZE_IN_FLIGHT", 4 * LARGE_SIZE)
    order = []

    def reading(tenant, work):
        return asyncio.create_task(pool.run(LARGE_SIZE + 1, lambda: (order.append(tenant), work()), tenant))

    pool = Pool()
    with contextlib.closing(pool):
        tasks = [reading("a", held) for _ in range(4)]
        await until(lambda: held.num_begun)
        with pytest.raises(Rejected, match="too many long texts"):
            await reading("a", held)
        tasks += [reading("b", held), reading("b", held)]
        assert await pool.finish(LARGE_SIZE + 1, lambda: "complete") == "complete"
        held.release()
        await asyncio.gather(*tasks)
    assert "".join(order) == "ababaa"


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {}), (COMPLETIONS, {"truncate_prompt_tokens": 5})])
async def test_the_large_texts_of_one_key_do_not_hold_up_those_of_another(path, fields, held, monkeypatch):
    read = []
    with running(config=ServerConfig(port=0, api_keys=("first", "second"))) as server:
        monkeypatch.setattr(server.runtime.tokenizer, "encode", lambda text, **_: (read.append(text[:6]), held())[1])
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:

            def post(key, text):
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post(path, json={"prompt": text + TEXT, **fields}, headers=headers))

            tasks = [post("first", "first ") for _ in range(3)]
            await until(lambda: num_waiting(server.runtime.off_loop._large) == 2)
            tasks.append(post("second", "second"))
            await until(lambda: num_waiting(server.runtime.off_loop._large) == 3)
            held.release()
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert read == ["first ", "second", "first ", "first "]


async def test_the_long_text_of_a_client_that_leaves_is_not_read(held, monkeypatch):
    read = []
    with running() as server:
        monkeypatch.setattr(server.runtime.tokenizer, "encode", lambda text, **_: (read.append(text[:6]), held())[1])
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:

            def post(text):
                return asyncio.create_task(client.post("/tokenize", json={"prompt": text + TEXT}))

            first = post("first ")
            await until(lambda: read)
            leaving, staying = post("leaves"), post("stays ")
            await until(lambda: num_waiting(server.runtime.off_loop._large) == 2)
            leaving.cancel()
            await until(lambda: num_waiting(server.runtime.off_loop._large) == 1)
            held.release()
            assert [(await task).status_code for task in (first, staying)] == [200] * 2
    assert read == ["first ", "stays "]


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/v1/responses",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    ],
)
async def test_the_large_bodies_of_one_key_do_not_fill_the_line_of_another(path, held, monkeypatch):
    monkeypatch.setattr(off_loop, "MAX_JOBS", 1)
    load_json = bodies.load_json
    monkeypatch.setattr(bodies, "load_json", lambda data: (held(), load_json(data))[1])
    with running(config=ServerConfig(port=0, api_keys=("first", "second"))) as server:
        line = server.server._deployment.off_loop._large
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:

            def post(key):
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post(path, json={"model": "toy", "text": TEXT}, headers=headers))

            tasks = [post("first")]
            await until(lambda: held.num_begun)
            tasks.append(post("first"))
            await until(lambda: num_waiting(line) == 1)
            assert (await post("first")).status_code == 429
            tasks.append(post("second"))
            await until(lambda: num_waiting(line) == 2)
            held.release()
            await asyncio.gather(*tasks)


async def test_large_texts_of_many_tenants_are_bounded_together(monkeypatch, held):
    monkeypatch.setattr(off_loop, "MAX_SIZE_IN_FLIGHT", 4 * LARGE_SIZE)
    pool = Pool()
    with contextlib.closing(pool):
        tasks = [asyncio.create_task(pool.run(2 * LARGE_SIZE, held, f"name-{number}")) for number in range(9)]
        await until(lambda: held.num_begun)
        late = partial(pool.run, 2 * LARGE_SIZE, held, "another name")
        async with asyncio.timeout(20):
            with pytest.raises(Rejected, match="too many long texts"):
                await late()
        tasks.pop().cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(late()))
        held.release()
        await asyncio.gather(*tasks)
        assert await pool.run(20 * LARGE_SIZE, held, "a") == [70]


async def compiling(pool, tenant, works, **options):
    """Tasks that wait for the works of a tenant, in this order."""
    tasks = [asyncio.create_task(pool.compile(tenant, 1, work, **options)) for work in works]
    await asyncio.sleep(0)
    return tasks


async def test_a_tenants_grammars_do_not_hold_up_anothers(pool, held):
    """Thirty wait, and the one at work takes as long as it likes."""
    many = await compiling(pool, "a", [held] * 30)
    async with asyncio.timeout(20):
        for _ in range(3):
            assert await pool.compile("b", 1, lambda: "done") == "done"
    assert held.num_begun == 1
    held.release()
    await asyncio.gather(*many)
    assert held.num_begun == 30


async def test_tenants_take_turns_when_all_threads_are_busy(pool):
    order, held = [], {name: Held() for name in "ab"}

    def note(name):
        return lambda: order.append(name)

    tasks = [task for name in "ab" for task in await compiling(pool, name, [held[name], *[note(name)] * 3])]
    await until(lambda: held["a"].num_begun == held["b"].num_begun == 1)
    tasks += await compiling(pool, "c", [note("c")] * 2)
    tasks += await compiling(pool, "d", [note("d")] * 2)
    held["a"].release()  # one thread, which serves whoever is not at work
    await until(lambda: len(order) == 7)
    held["b"].release()
    await asyncio.gather(*tasks)
    assert "".join(order) == "cdacdaabbb"


async def test_a_tenants_queue_is_bounded_and_others_come_in(pool, held, monkeypatch):
    counted = []
    monkeypatch.setattr(pool, "_count_rejected", lambda *told: counted.append(told))
    begun = await compiling(pool, "a", [held])
    waiting = await compiling(pool, "a", [held] * MAX_GRAMMARS)
    with pytest.raises(Rejected, match="too many grammars") as refusal:
        await pool.compile("a", 1, held)
    assert refusal.value.reason is RejectReason.QUEUE_FULL
    assert counted == [(RejectReason.QUEUE_FULL, "key of a")]
    assert refusal.value.retry_after_s
    assert await pool.run(LARGE_SIZE, threading.current_thread, "a") is not threading.current_thread()
    assert await pool.compile("b", 1, threading.current_thread) is not threading.current_thread()
    held.release()
    await asyncio.gather(*begun, *waiting)
    await pool.compile("a", 1, held)


async def test_a_tenants_queue_has_a_bounded_size(pool, held, monkeypatch):
    begun = await compiling(pool, "a", [held])
    half = off_loop.MAX_SIZE_IN_FLIGHT // 2
    waiting = [asyncio.create_task(pool.compile("a", half + 1, held))]
    await asyncio.sleep(0)
    with pytest.raises(Rejected):
        await pool.compile("a", half, held)
    assert await pool.compile("b", 4 * half, lambda: "alone") == "alone"
    held.release()
    await asyncio.gather(*begun, *waiting)


async def test_work_for_batches_is_never_refused_and_takes_nobodys_room(monkeypatch, held):
    monkeypatch.setattr(off_loop, "MAX_JOBS", 2)
    monkeypatch.setattr(off_loop, "MAX_SIZE_IN_FLIGHT", 4 * LARGE_SIZE)
    monkeypatch.setattr(off_loop, "MAX_RENDER_S", 0.0)
    batch, pool = lane_of(of("a"), is_background=True), Pool()
    with contextlib.closing(pool):
        tasks = await compiling(pool, batch, [held] * (MAX_GRAMMARS + 2))
        tasks += await rendering(pool, batch, [held] * 4)
        for size in (LARGE_SIZE, 20 * LARGE_SIZE):
            tasks += [asyncio.create_task(pool.run(size, held, batch)) for _ in range(3)]
        await until(lambda: held.num_begun == 4)  # one thread for each kind of work
        assert await pool.run(LARGE_SIZE, lambda: "small", "a") == "small"
        tasks += [asyncio.create_task(pool.run(4 * LARGE_SIZE, held, name)) for name in "abcd"]
        await asyncio.sleep(0)
        with pytest.raises(Rejected, match="too many long texts"):
            await pool.run(4 * LARGE_SIZE, held, "e")
        held.release()
        assert await asyncio.gather(*tasks) == [[70]] * len(tasks)


async def test_who_gives_up_leaves_the_queue(pool, held):
    begun = await compiling(pool, "a", [held])
    waiting = await compiling(pool, "a", [held] * MAX_GRAMMARS)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    held.release()
    assert await pool.compile("a", 1, lambda: "next") == "next"
    await asyncio.gather(*begun)
    assert held.num_begun == 1


async def test_who_asks_for_the_same_grammar_waits_for_the_same_work(pool, held):
    grammars = await compiling(pool, "a", [held] * 5 * MAX_GRAMMARS, key="one")
    grammars[0].cancel()  # its client leaves, and the others go on
    await asyncio.sleep(0)
    grammars += await compiling(pool, "b", [held], key="one")
    assert not any(task.done() for task in grammars[1:])
    held.release()
    results = await asyncio.gather(*grammars, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [[70]] * (5 * MAX_GRAMMARS)
    assert held.num_begun == 1
    await pool.compile("a", 1, held, key="one")
    assert held.num_begun == 2


async def test_shared_work_is_done_in_the_first_turn_of_all_who_wait_for_it(pool, held):
    """Also if whoever came first is far behind, or gives up."""
    shared = Held()
    shared.release()
    first = await compiling(pool, "a", [held] * 10)
    first += await compiling(pool, "a", [shared], key="one")
    assert await pool.compile("b", 1, shared, key="one") == [70]
    assert shared.num_begun == held.num_begun == 1
    [result] = await asyncio.gather(first.pop())
    assert result == [70]

    busy = Held()
    other = await compiling(pool, "b", [busy])
    left = await compiling(pool, "a", [shared] * 2, key="two")
    stays = await compiling(pool, "b", [shared], key="two")
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    busy.release()
    assert await asyncio.gather(*other, *stays) == [[70]] * 2
    assert shared.num_begun == 2
    held.release()
    await asyncio.gather(*first)
    assert (held.num_begun, shared.num_begun) == (10, 2)


async def test_grammars_that_wait_when_it_closes_are_told(pool, held):
    """Also those whose work has begun, as it may take long."""
    tasks = await compiling(pool, "a", [held] * 3) + await compiling(pool, "b", [held] * 2, key="one")
    await until(lambda: held.num_begun == 2)
    tasks += await compiling(pool, "a", [held], key="two")
    pool.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.reason for error in results] == [RejectReason.DRAINING] * 6
    with pytest.raises(Rejected) as refusal:
        await pool.compile("c", 1, held)
    assert refusal.value.reason is RejectReason.DRAINING
    with pytest.raises(Rejected):
        await pool.compile("c", 1, held, key="one")
    assert held.num_begun == 2


async def test_work_that_fails_says_so_and_the_next_is_done(pool):
    def fail():
        raise Rejected(RejectReason.INVALID, "wrong")

    failing, *others = await compiling(pool, "a", [fail, lambda: 1, lambda: 2])
    with pytest.raises(Rejected, match="wrong"):
        await failing
    assert await asyncio.gather(*others) == [1, 2]


async def rendering(pool, tenant, works):
    """As `compiling`."""
    tasks = [asyncio.create_task(pool.render(tenant, 1, work)) for work in works]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("number", [1, 2])
async def test_a_thread_that_is_refused_costs_one_request(number, pool, monkeypatch):
    start, asked = threading.Thread.start, []

    def start_unless_refused(thread: threading.Thread) -> None:
        asked.append(thread)
        if len(asked) == number:
            raise RuntimeError("can't start new thread")  # as at the limit of a container's processes
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await pool.compile("a", 1, lambda: 1)
    answers = await asyncio.wait_for(asyncio.gather(*[pool.compile("a", 1, partial(int, one)) for one in range(3)]), 20)
    assert answers == [0, 1, 2]


async def test_templates_have_a_line_of_their_own_and_wait_no_longer_than_told(pool, held, monkeypatch):
    tasks = await rendering(pool, "a", [held] * 5)
    await until(lambda: held.num_begun == 1)
    assert await pool.run(LARGE_SIZE, lambda: "small", "a") == "small"
    assert await pool.run(LARGE_SIZE + 1, lambda: "large", "a") == "large"
    assert await pool.compile("a", 1, lambda: "grammar") == "grammar"
    monkeypatch.setattr(off_loop, "MAX_RENDER_S", 0.05)
    with pytest.raises(Rejected, match="too many conversations") as refusal:
        await pool.render("a", 1, held)
    assert refusal.value.reason is RejectReason.QUEUE_FULL
    assert refusal.value.retry_after_s
    held.release()
    await asyncio.gather(*tasks)
    assert held.num_begun == 5  # what was refused never began
    assert await pool.render("a", 1, threading.current_thread) is not threading.current_thread()


async def test_a_tenants_conversations_wait_for_one_of_each_other_tenant(pool, held):
    order = []
    first = await rendering(pool, "a", [held])
    await until(lambda: held.num_begun == 1)
    tasks = [task for name in "aab" for task in await rendering(pool, name, [lambda name=name: order.append(name)])]
    tasks += await rendering(pool, "c", [lambda: order.append("c")])
    held.release()
    await asyncio.gather(*first, *tasks)
    assert "".join(order) == "bcaa"


async def test_a_tenants_conversations_are_bounded_and_others_come_in(pool, held):
    begun = await rendering(pool, "a", [held])
    half = off_loop.MAX_SIZE_IN_FLIGHT // 2
    waiting = [asyncio.create_task(pool.render("a", half + 1, held))]
    await asyncio.sleep(0)
    with pytest.raises(Rejected, match="too many conversations"):
        await pool.render("a", half, held)
    others = await rendering(pool, "b", [held])
    held.release()
    assert await asyncio.gather(*begun, *waiting, *others) == [[70]] * 3


class HeldTemplate:
    """Renders what the messages say, and waits at `slow` until the test says so."""

    source = ""
    now = datetime.now

    def __init__(self):
        self.rendered = []
        self.may_go_on = threading.Event()

    def render(self, messages, _now, **_variables):
        self.rendered.append(messages[0]["content"])
        assert not self.rendered[-1].startswith("slow") or self.may_go_on.wait(20)
        return self.rendered[-1]


@contextlib.asynccontextmanager
async def slow_templates(*keys):
    """A live server. Yields its template, its line of conversations, and a function that posts (key, path, content)."""
    template = HeldTemplate()
    config = ServerConfig(port=0, shutdown_timeout_s=0.0, api_keys=keys)
    with running(config=config) as server:
        server.runtime.chat_template = template
        line = server.runtime.off_loop._templates

        def post(key, path, content, **headers):
            body = {"messages": [{"role": "user", "content": content}]}
            body |= {"max_tokens": 1} if path == CHAT else {}
            headers |= {"Authorization": f"Bearer {key}"} if key else {}
            return asyncio.create_task(client.post(path, json=body, headers=headers))

        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                yield server, template, line, post
        finally:
            template.may_go_on.set()


def num_waiting(line):
    return sum(len(jobs) for jobs in list(line._queues.values()))


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_the_templates_of_one_key_do_not_hold_up_those_of_another(path):
    async with slow_templates("first", "second") as (_, template, line, post):
        tasks = [post("first", path, "slow")]
        await until(lambda: template.rendered)
        tasks += [post("first", path, f"slow {number}") for number in range(3)]
        await until(lambda: num_waiting(line) == 3)
        tasks.append(post("second", path, "hi"))
        await until(lambda: num_waiting(line) == 4)
        template.may_go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert template.rendered[1] == "hi"


async def test_the_templates_of_a_batch_do_not_hold_up_those_of_its_tenant():
    template, runtime = HeldTemplate(), make_runtime()
    runtime.chat_template = template
    try:
        async with make_client(runtime) as client:
            own = OwnRequests(lambda _name: Sender(is_admin=True))
            own.app = client.app

            def body(content):
                return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

            def line(content):
                data, course = json.dumps(body(content)).encode(), Course(is_background=True)
                return asyncio.create_task(own.ask(Owner(), CHAT, data, content, asyncio.Event(), course))

            lines = [line("slow")]
            await until(lambda: template.rendered)
            lines += [line(f"slow-{number}") for number in range(3)]
            await until(lambda: num_waiting(runtime.off_loop._templates) == 3)
            chat = asyncio.create_task(client.post(CHAT, json=body("hi")))
            await until(lambda: num_waiting(runtime.off_loop._templates) == 4)
            template.may_go_on.set()
            assert {answer.status for answer in await asyncio.gather(*lines)} == {(await chat).status_code} == {200}
            assert template.rendered[1] == "hi"
    finally:
        template.may_go_on.set()
        runtime.close()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_the_conversation_of_a_client_that_leaves_is_not_rendered(path):
    async with slow_templates() as (_, template, line, post):
        first = post(None, path, "slow")
        await until(lambda: template.rendered)
        leaving, staying = post(None, path, "leaves"), post(None, path, "stays")
        await until(lambda: num_waiting(line) == 2)
        leaving.cancel()
        await until(lambda: num_waiting(line) == 1)
        template.may_go_on.set()
        assert [(await task).status_code for task in (first, staying)] == [200] * 2
        assert template.rendered == ["slow", "stays"]


@pytest.mark.parametrize("header", ["X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms"])
async def test_who_may_not_wait_so_long_is_told_while_others_conversations_are_rendered(header):
    async with slow_templates() as (_, template, line, post):
        first = post(None, CHAT, "slow")
        await until(lambda: template.rendered)
        error = check(await post(None, CHAT, "late", **{header: "150"}), 408, "deadline_exceeded")
        assert "prompt was not read within the 150 ms" in error["message"]
        assert not num_waiting(line)
        template.may_go_on.set()
        assert (await first).status_code == 200
    assert template.rendered == ["slow"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_who_waits_for_a_template_when_the_server_ends_is_told(path):
    """At once, though the template still works."""
    async with slow_templates() as (server, template, line, post):
        tasks = [post(None, path, "slow")]
        await until(lambda: template.rendered)
        tasks.append(post(None, path, "waits"))
        await until(lambda: num_waiting(line) == 1)
        server.server.request_shutdown()
        for answer in await asyncio.gather(*tasks):
            check(answer, 503, "unavailable")
        await until(lambda: not server.thread.is_alive())
        assert not template.may_go_on.is_set()


async def test_a_template_that_never_ends_holds_up_nobody_else(monkeypatch):
    """Its limit is CPU time of its own process: on a busy machine, others get as many answers meanwhile, only later."""
    endless = (
        "{% set l = range(9999) | list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}"
    )

    async def answers_of(paths):
        """Post a conversation to each path. Return the answers, and how often others were answered meanwhile."""
        chats = [asyncio.create_task(client.post(path, json={"messages": MESSAGES})) for path in paths]
        num_probes = 0
        while not all(chat.done() for chat in chats):
            begin_s = time.process_time()
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 200
            assert time.process_time() - begin_s < 2  # threads that wait for each other take some on a busy machine
            num_probes += 1
        return await asyncio.gather(*chats), num_probes

    with running() as server:
        server.runtime.chat_template = ChatTemplate(endless, special_tokens={}, max_s=0.2)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            answers, num_probes = await answers_of([CHAT, "/tokenize"])
            assert num_probes > 5
            for answer in answers:
                assert "more than 0.2 s" in check(answer, 400, "invalid_request_error", "messages")["message"]
            monkeypatch.setattr(off_loop, "MAX_RENDER_S", 0.6)
            answers, _ = await answers_of([CHAT, "/tokenize"] * 8)
    refused = [answer for answer in answers if answer.status_code != 400]
    assert len(refused) >= 16 - 4  # at most three end in that time, and one is being rendered: the others were in the queue
    for answer in refused:
        check(answer, 429, "overloaded")


async def test_small_work_does_not_wait_for_large(pool, held):
    tasks = await begin(pool, [LARGE_SIZE + 1] * 20, held)
    async with asyncio.timeout(20):
        assert await pool.run(LARGE_SIZE, lambda: "done", "a") == "done"
    held.release()
    await asyncio.gather(*tasks)


async def test_what_waits_when_it_closes_is_told(pool, held):
    tasks = await begin(pool, [LARGE_SIZE] * 5, held)
    await until(lambda: held.num_begun)
    pool.close()
    held.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == [70]
    assert [error.reason for error in results[1:]] == [RejectReason.DRAINING] * 4
    with pytest.raises(Rejected):
        await pool.run(LARGE_SIZE, held, "a")


async def test_an_answer_that_is_complete_is_put_together_though_the_server_ends(pool, held):
    answers = [asyncio.create_task(pool.finish(LARGE_SIZE, held)) for _ in range(3)]  # for two threads
    await until(lambda: held.num_begun == 2)
    pool.close()
    assert await pool.finish(LARGE_SIZE, lambda: "came later") == "came later"
    held.release()
    assert await asyncio.gather(*answers) == [[70]] * 3


@pytest.mark.parametrize("kind", ["folder of models", "facts of a model", "file of keys"])
def test_a_server_ends_while_a_disk_hangs(kind, held):
    served = ServedModel(names=("a",), metrics=Metrics("a"), load=held, plan=held, read_facts=held)
    looks = {
        "folder of models": FolderWatch(SimpleNamespace(may_grow=True, look=held)).look,
        "facts of a model": partial(FactsCache().of, served),
        "file of keys": partial(Watched("the file", [], read=held, use=held).look, at_once=True),
    }

    async def serve():
        look = asyncio.create_task(looks[kind]())
        await until(lambda: held.num_begun)
        look.cancel()

    serving = threading.Thread(target=lambda: asyncio.run(serve()))
    serving.start()
    serving.join(5)
    has_ended = not serving.is_alive()
    held.release()
    serving.join()
    assert has_ended


async def test_a_panic_in_a_daemon_thread_reaches_its_caller():
    class Panic(BaseException):
        """Extensions in Rust raise one."""

    def panic():
        raise Panic

    with pytest.raises(Panic):
        await asyncio.wait_for(in_daemon(panic), 20)


async def test_what_its_work_refuses_is_not_done_again(pool):
    done_by = []

    def refuse():
        done_by.append(threading.current_thread())
        raise Rejected(RejectReason.INVALID, "too long")

    with pytest.raises(Rejected, match="too long"):
        await pool.finish(LARGE_SIZE, refuse)
    assert len(done_by) == 1
    assert done_by[0] is not threading.current_thread()


async def test_the_server_drains_and_tells_about_itself_while_texts_are_read(held, monkeypatch):
    runtime = make_runtime()
    monkeypatch.setattr(runtime.tokenizer, "encode", held)
    with LiveServer(runtime, ServerConfig(port=0, shutdown_timeout_s=0.2)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            tasks = [asyncio.create_task(client.post("/tokenize", json={"prompt": TEXT})) for _ in range(20)]
            await until(lambda: held.num_begun and num_waiting(runtime.off_loop._large) == 19)
            assert (await client.get("/metrics")).status_code == 200
            assert runtime.engine.state == "ready"
            server.server.request_shutdown()
            await until(lambda: runtime.engine.state == "stopped" and sum(task.done() for task in tasks) == 19)
            held.release()
            answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200] + [503] * 19
        check(next(answer for answer in answers if answer.status_code == 503), 503, "unavailable")


async def test_too_many_long_texts_are_a_429(held, monkeypatch):
    monkeypatch.setattr(off_loop, "MAX_JOBS", 2)
    with running() as server:
        monkeypatch.setattr(server.runtime.tokenizer, "encode", held)
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            tasks = [asyncio.create_task(client.post("/tokenize", json={"prompt": TEXT})) for _ in range(3)]
            await until(lambda: num_waiting(server.runtime.off_loop._large) == 2)
            for path in ("/tokenize", COMPLETIONS):
                refused = await client.post(path, json={"prompt": TEXT})
                check(refused, 429, "overloaded")
                assert int(refused.headers["retry-after"]) >= 1
            assert (await client.post(COMPLETIONS, json={"prompt": [70]})).status_code == 200
            assert server.runtime.metrics.rejected["queue_full"] == 2
            held.release()
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


@pytest.fixture
def few_chars(monkeypatch):
    """A limit of texts that takes less time than the real one: as that one, beyond the toy's context, and large work."""
    monkeypatch.setattr(prompts, "MAX_TEXT_CHARS", LARGE_SIZE + 1)
    monkeypatch.setattr(prompts, "MAX_TOKEN_CHARS", 9)  # the toy's longest
    return prompts.MAX_TEXT_CHARS


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {}), (COMPLETIONS, {"truncate_prompt_tokens": 5})])
async def test_texts_have_a_limit(client, few_chars, path, fields):
    error = check(
        await client.post(path, json={"prompt": "a" * (few_chars + 1), **fields}), 400, "context_length_exceeded", "prompt"
    )
    assert str(few_chars) in error["message"]
    assert (await client.post(path, json={"prompt": "a" * few_chars, **fields})).status_code == 200


async def test_a_long_context_raises_the_limit_of_texts(few_chars):
    runtime = make_runtime(capacity=replace(CAPACITY, max_model_len=2 * few_chars))
    try:
        async with make_client(runtime) as client:
            answer = await client.post("/tokenize", json={"prompt": "a" * (few_chars + 1)})
            assert answer.json()["count"] == few_chars + 1
    finally:
        runtime.close()


async def test_seeds_are_drawn_in_the_order_in_which_calls_come(held, monkeypatch):
    """Also if a later one is read sooner."""
    seeds = iter([1, 2])
    sources = replace(fixed_sources(), draw_seed=lambda: next(seeds))
    short = {"prompt": [70], "max_tokens": 20, "temperature": 1}
    with running(sources=sources) as server:
        monkeypatch.setattr(server.runtime.tokenizer, "encode", held)
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            late = asyncio.create_task(client.post(COMPLETIONS, json={**short, "prompt": "a" * 6000}))
            await until(lambda: held.num_begun)
            second = await client.post(COMPLETIONS, json=short)
            held.release()
            first = await late  # `held` says that its text is token 70, too.
            for answer, seed in ((first, 1), (second, 2)):
                again = await client.post(COMPLETIONS, json={**short, "seed": seed})
                assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
    assert first.json()["choices"] != second.json()["choices"]
