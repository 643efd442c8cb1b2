"""KV that comes from another replica: it is what would have been computed, or it is computed."""

from __future__ import annotations

import math
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from penstock.backends.native.blocks import new_file
from penstock.cluster import transfer
from penstock.cluster.messages import Source, prove
from penstock.cluster.transfer import BlockServer, Fetcher
from penstock.engine.blocks import Blocks
from penstock.engine.thread import Engine
from penstock.kv.invariants import check
from penstock.testing import HashExecutor, expected_tokens, make_request
from penstock.types.plan import Capacity
from penstock.types.request import Request
from support.engine.thread import TIMEOUT_S, Rig
from support.server.harness import wait_until

SECRET = b"a secret of tests"
CAPACITY = Capacity(num_blocks=200, block_size=4, max_rows=4, max_step_tokens=64, max_model_len=400)
PROMPT = 201


class Near:
    """Blocks in a file in memory, as those of a kernel. Contents are numbers that a test writes."""

    def __init__(self, num_blocks: int = CAPACITY.num_blocks, block_bytes: int = 1024) -> None:
        self.block_bytes = block_bytes
        self._file = new_file()
        assert self._file is not None
        self.fd: int | None = self._file.fd
        os.ftruncate(self.fd, num_blocks * block_bytes)
        self._memory = memoryview(mmap.mmap(self.fd, 0))

    def content(self, block_id: int) -> memoryview:
        return self._memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def target(self, block_id: int) -> memoryview:
        return self.content(block_id)

    def fill(self, block_id: int) -> None: ...


@pytest.fixture
def rigs() -> Iterator[tuple[Rig, Rig]]:
    """The engine of a giver, which has answered a prompt, and that of a taker."""
    giver, taker = Rig(capacity=CAPACITY), Rig(capacity=CAPACITY)
    for rig in (giver, taker):
        rig.engine.start()
    answer(giver, make_request("first", PROMPT, max_tokens=8))
    yield giver, taker
    for rig in (giver, taker):
        rig.engine.close(TIMEOUT_S)


def answer(rig: Rig, request: Request) -> tuple[int, ...]:
    rig.engine.submit(request)
    rig.sink.wait_for_ends(request.request_id)
    tokens = rig.sink.tokens_of(request.request_id)
    assert tokens == expected(request)
    return tokens


def expected(request: Request) -> tuple[int, ...]:
    model = HashExecutor(CAPACITY).model
    return expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=400).token_ids


def settled(engine: Engine) -> None:
    kv = engine._core.scheduler.kv
    wait_until(lambda: not engine._core_lock.read(lambda: kv.exchange.held))
    engine._core_lock.read(lambda: check(kv))


def serve(blocks: Blocks | None, host: str = "127.0.0.1", secret: bytes = SECRET) -> tuple[BlockServer, Source]:
    server = BlockServer(lambda: blocks, host, secret)
    return server, Source(host, server.port, PROMPT)


def test_what_another_replica_computed_is_not_computed_again(rigs: tuple[Rig, Rig]) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    request = make_request("second", PROMPT, max_tokens=8)
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 200
    assert answer(taker, request)
    assert request.num_cached_tokens == 200
    server.close()
    for rig in rigs:
        settled(rig.engine)


def test_only_what_is_missing_comes(rigs: tuple[Rig, Rig]) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    answer(taker, make_request("a", 81, max_tokens=2))
    request = make_request("second", PROMPT, max_tokens=8)
    fetcher = Fetcher(SECRET)
    assert fetcher.fetch(taker.engine.blocks, request, source) == 200 - 80
    assert fetcher.fetch(taker.engine.blocks, request, source) == 0, "all is there"
    answer(taker, request)
    assert request.num_cached_tokens == 200
    server.close()


def test_another_salt_finds_nothing(rigs: tuple[Rig, Rig]) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    request = make_request("second", PROMPT, max_tokens=8, cache_salt=b"a tenant")
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 0
    answer(taker, request)
    server.close()
    settled(taker.engine)


@pytest.mark.parametrize("case", ["nobody listens", "no engine", "an ended engine", "another secret", "a silent giver"])
def test_what_does_not_come_is_computed(case: str, rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rigs
    monkeypatch.setattr(transfer, "FETCH_S", 0.3)
    silent = socket.create_server(("127.0.0.1", 0))
    if case == "an ended engine":
        giver.engine.close(1.0)
    server, source = serve(None if case == "no engine" else giver.engine.blocks)
    if case == "nobody listens":
        server.close()
    if case == "a silent giver":
        source = Source("127.0.0.1", silent.getsockname()[1], PROMPT)
    request = make_request("second", PROMPT, max_tokens=8)
    fetcher = Fetcher(b"another" if case == "another secret" else SECRET)
    assert fetcher.fetch(taker.engine.blocks, request, source) == 0
    answer(taker, request)
    assert request.num_cached_tokens == 0
    settled(taker.engine)
    silent.close()
    server.close()


@pytest.mark.parametrize("state", [{"has_state": True}, {"num_state_blocks": 2}])
def test_blocks_of_a_model_with_a_recurrent_state_are_not_copied(state: dict[str, int]) -> None:
    assert Rig(capacity=replace(CAPACITY, **state)).engine.blocks.memory is None


def test_a_giver_who_does_not_know_the_secret_is_not_believed(rigs: tuple[Rig, Rig]) -> None:
    """It lets anybody in, to give them wrong KV."""
    taker = rigs[1]

    def give() -> None:
        guest, _ = listener.accept()
        with guest:
            peer = transfer._Peer(guest, time.monotonic() + 5)
            peer.send(transfer._Greeting(bytes(32)))
            peer.send(transfer._Giver(prove(b"another", transfer.GIVER, peer.receive(transfer._Answer).nonce)))
            with pytest.raises(OSError, match="closed"):
                peer.receive(transfer._Request)
            was_asked.append(False)

    was_asked: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=give)
        thread.start()
        source = Source("127.0.0.1", listener.getsockname()[1], PROMPT)
        assert Fetcher(SECRET).fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 0
        thread.join()
    assert was_asked == [False], "it learns nothing of the prompt"


def test_a_slow_link_gives_what_came_in_time(rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    send, read, num_sent, num_asked, is_late = transfer._Peer.send_bytes, transfer._Peer.read_into, 0, 0, False

    def send_until_late(peer: transfer._Peer, data: bytes) -> None:
        nonlocal num_sent, is_late
        num_sent += len(data) == taker.executor.block_bytes
        if num_sent == 20:
            wait_until(lambda: num_asked == 20)
            is_late = True
            peer._connection.sendall(data[:1])  # wakes the taker, which looks at its clock
        send(peer, data)

    def read_into(peer: transfer._Peer, target: memoryview) -> None:
        nonlocal num_asked
        num_asked += len(target) == taker.executor.block_bytes
        read(peer, target)

    monkeypatch.setattr(transfer, "FETCH_S", TIMEOUT_S)
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * is_late))
    monkeypatch.setattr(transfer._Peer, "send_bytes", send_until_late)
    monkeypatch.setattr(transfer._Peer, "read_into", read_into)
    request = make_request("second", PROMPT, max_tokens=8)
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 19 * 4
    answer(taker, request)
    assert request.num_cached_tokens == 19 * 4
    server.close()
    for rig in rigs:
        settled(rig.engine)


def test_a_source_that_is_silent_is_left_alone_for_a_while(rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A giver that drips bytes keeps a taker no longer than one that sends none. Later it is asked again."""
    giver, taker = rigs
    monkeypatch.setattr(transfer, "FETCH_S", 0.3)
    num_dripped = 0

    def drip() -> None:
        nonlocal num_dripped
        guest, _ = listener.accept()
        with guest, suppress(OSError):
            guest.sendall(b"\x00\x03\x00\x00")
            for _ in range(100):
                guest.sendall(b"\x01")
                num_dripped += 1
                time.sleep(0.1)

    fetcher = Fetcher(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, daemon=True).start()
        source = Source("127.0.0.1", listener.getsockname()[1], PROMPT)
        assert fetcher.fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 0
        assert num_dripped < 20
        with monkeypatch.context() as patch:
            patch.setattr(transfer.socket, "create_connection", lambda *args, **words: pytest.fail("it was asked again"))
            assert fetcher.fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 0
    server, source = serve(giver.engine.blocks)
    fetcher._retry_after_s[source.host, source.port] = time.monotonic() - 1
    assert fetcher.fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 200
    server.close()


def test_a_source_is_not_blamed_for_the_time_that_a_request_waited(rigs: tuple[Rig, Rig]) -> None:
    fetcher = Fetcher(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source, end_s = Source("127.0.0.1", silent.getsockname()[1], PROMPT), time.monotonic() + 0.1
        assert fetcher.fetch(rigs[1].engine.blocks, make_request("second", PROMPT), source, end_s) == 0
    assert not fetcher._retry_after_s


def test_a_giver_survives_that_it_can_not_take_somebody(rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    giver, taker = rigs
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "penstock-blocks" and (error := next(failures, None)) is not None:
            raise error
        start(thread)

    server, source = serve(giver.engine.blocks)
    monkeypatch.setattr(threading.Thread, "start", fail_once)
    request = make_request("second", PROMPT)
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 0
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 200
    assert "can't start new thread" in caplog.text
    wait_until(lambda: server._guests._value == transfer.MAX_GUESTS)
    server.close()


def test_a_request_goes_on_when_blocks_are_given_back(rigs: tuple[Rig, Rig]) -> None:
    """All free blocks are on their way to others as it comes."""
    rig = rigs[1]
    engine = rig.engine
    exchange, pool = engine._core.scheduler.kv.exchange, engine._core.scheduler.kv.pool

    def hold_all() -> list[int]:
        taken = exchange._take(pool.num_available)
        exchange.held.update(taken)
        return taken

    held = engine._core_lock.read(hold_all)
    request = make_request("second", 380, max_tokens=16)
    engine.submit(request)
    wait_until(lambda: engine._core.num_waiting == 1)
    assert not rig.sink.ends_of("second")
    engine.blocks.release(held)
    rig.sink.wait_for_ends("second")
    assert rig.sink.tokens_of("second") == expected(request)
    settled(engine)


def test_a_transfer_that_costs_more_than_to_compute_is_left_out(rigs: tuple[Rig, Rig]) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    fetcher = Fetcher(SECRET)
    answer(taker, make_request("a", range(500, 600), max_tokens=2))
    assert taker.engine.blocks.compute_ns_per_block > 0
    fetcher._learn(1e12)
    assert fetcher.fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 0
    fetcher._ns_per_block = 1.0
    assert fetcher.fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 200
    server.close()


def test_many_takers_at_once(rigs: tuple[Rig, Rig]) -> None:
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    fetcher = Fetcher(SECRET)
    requests = [make_request(f"r{idx}", PROMPT, max_tokens=4) for idx in range(8)]

    def fetch_and_answer(request: Request) -> None:
        fetcher.fetch(taker.engine.blocks, request, source)
        taker.engine.submit(request)

    threads = [threading.Thread(target=fetch_and_answer, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taker.sink.wait_for_ends(*(request.request_id for request in requests))
    for request in requests:
        assert taker.sink.tokens_of(request.request_id) == expected(request)
    server.close()
    for rig in rigs:
        settled(rig.engine)


class UnderWay(dict[bytes, threading.Event]):
    def __init__(self) -> None:
        self.waits: list[bytes] = []
        """An entry for each wait for another request's transfer."""

    def setdefault(self, first: bytes, has_ended: threading.Event) -> threading.Event:
        earlier = super().setdefault(first, has_ended)
        if earlier is not has_ended:
            self.waits.append(first)
        return earlier


def test_what_several_lack_is_copied_once(rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of one prompt, and another prompt with the same beginning, are handed over at once."""
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    prompt, other = [*range(1, PROMPT + 1)], [*range(1, 101), *range(500, 601)]
    answer(giver, make_request("other", other, max_tokens=8))
    requests = [make_request(f"r{idx}", tokens, max_tokens=4) for idx, tokens in enumerate([prompt, prompt, prompt, other])]
    fetcher, under_way, make_room, copies = Fetcher(SECRET), UnderWay(), Blocks.make_room, list[int]()

    def make_room_once_all_came(blocks, wanted, num_blocks):
        copies.append(num_blocks)
        wait_until(lambda: len(under_way.waits) + len(copies) >= len(requests))
        return make_room(blocks, wanted, num_blocks)

    fetcher._under_way = under_way
    monkeypatch.setattr(Blocks, "make_room", make_room_once_all_came)
    for name in ("FETCH_S", "GIVE_S"):
        monkeypatch.setattr(transfer, name, TIMEOUT_S)
    with ThreadPoolExecutor(len(requests)) as pool:
        num_copied = list(pool.map(lambda request: fetcher.fetch(taker.engine.blocks, request, source), requests))
    assert sum(num_copied) == 200 + 100
    assert len(copies) == 2
    assert not under_way
    for request in requests:
        answer(taker, request)
        assert request.num_cached_tokens == 200
    server.close()


@pytest.mark.parametrize("error", [transfer._Late(), ConnectionError()])
def test_those_that_wait_for_a_failed_transfer_try_themselves(
    error: OSError, rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not with a source that was late."""
    giver, taker = rigs
    server, source = serve(giver.engine.blocks)
    fetcher, under_way, connect, num_tries, has_ended = Fetcher(SECRET), UnderWay(), Fetcher._connect, 0, threading.Event()

    def connect_once_failed(*arguments) -> socket.socket:
        nonlocal num_tries
        num_tries += 1
        if num_tries > 1:
            return connect(*arguments)
        wait_until(lambda: under_way.waits)
        raise error

    def fetch(name: str) -> int:
        num_copied = fetcher.fetch(taker.engine.blocks, make_request(name, PROMPT), source)
        has_ended.set()
        return num_copied

    fetcher._under_way = under_way
    monkeypatch.setattr(Fetcher, "_connect", connect_once_failed)
    monkeypatch.setattr(transfer, "FETCH_S", TIMEOUT_S)
    monkeypatch.setattr(transfer._log, "warning", lambda *_: has_ended.wait(TIMEOUT_S))  # a slow disk
    with ThreadPoolExecutor(2) as pool:
        num_copied = sorted(pool.map(fetch, "ab"))
    is_late = isinstance(error, transfer._Late)
    assert (num_copied, num_tries) == (([0, 0], 1) if is_late else ([0, 200], 2))
    assert not under_way
    server.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
class TestMemory:
    """On one machine the contents are copied from one process's memory into another's."""

    @pytest.fixture
    def ends(self, rigs: tuple[Rig, Rig]) -> tuple[Blocks, Blocks, Near, Near]:
        giver, taker = (rig.engine.blocks for rig in rigs)
        giver.memory, taker.memory = here, there = Near(), Near()
        for block_id in range(CAPACITY.num_blocks):
            here.content(block_id)[:] = block_id.to_bytes(8, "little") * 128
        return giver, taker, here, there

    @pytest.mark.parametrize("is_near", [True, False])
    def test_contents_arrive(self, is_near: bool, ends, rigs, monkeypatch: pytest.MonkeyPatch) -> None:
        giver, taker, here, there = ends
        if not is_near:
            monkeypatch.setattr(transfer._Place, "is_here", lambda place: False)
        server, source = serve(giver)
        fetcher = Fetcher(SECRET)
        assert fetcher.fetch(taker, make_request("second", PROMPT), source) == 200
        assert len(fetcher._maps._maps) == is_near
        server.close()
        kv = [rig.engine._core.scheduler.kv for rig in rigs]
        found = dict(kv[1].prefix.index.items())
        assert len(found) == 50
        for block_hash, block_id in found.items():
            source_id = kv[0].prefix.index.block_of(block_hash)
            assert there.content(block_id) == here.content(source_id)

    def test_a_giver_that_ended_meanwhile_is_not_believed(self, ends, monkeypatch: pytest.MonkeyPatch) -> None:
        giver, taker, _, _ = ends
        copy = transfer._copy

        def copy_late(*args):
            giver.memory = Near()  # another engine
            return copy(*args)

        monkeypatch.setattr(transfer, "_copy", copy_late)
        server, source = serve(giver)
        assert Fetcher(SECRET).fetch(taker, make_request("second", PROMPT), source) == 0
        server.close()

    def test_blocks_of_another_size_are_not_taken(self, ends) -> None:
        giver, taker, _, _ = ends
        giver.memory = Near(block_bytes=512)
        server, source = serve(giver)
        assert Fetcher(SECRET).fetch(taker, make_request("second", PROMPT), source) == 0
        server.close()

    def test_another_file_is_not_read(self) -> None:
        memory, other = Near(), Near()
        place = transfer._Place(os.getpid(), memory.fd, transfer._name_of(f"/proc/self/fd/{memory.fd}"))
        assert transfer._Maps().find(place) is not None
        for wrong in ({"fd": other.fd}, {"pid": 1 << 30}, {"name": "/memfd:other (deleted)"}):
            assert transfer._Maps().find(msgspec.structs.replace(place, **wrong)) is None

    def test_the_memory_of_a_giver_that_has_ended_is_given_back(self) -> None:
        memory, maps = Near(), transfer._Maps()
        place = transfer._Place(os.getpid(), memory.fd, transfer._name_of(f"/proc/self/fd/{memory.fd}"))
        file = weakref.ref(maps.find(place).obj)
        maps.forget_closed()
        assert file() is not None
        del memory
        maps.forget_closed()
        assert file() is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x00\x00\x10\x00" + bytes(100), b"\x00\x04\x00\x00"]
)
def test_nonsense_does_no_harm(data: bytes, rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rigs
    monkeypatch.setattr(transfer, "GIVE_S", 0.2)
    server, source = serve(giver.engine.blocks)
    with socket.create_connection((source.host, source.port)) as peer:
        peer.sendall(data)
    assert Fetcher(SECRET).fetch(taker.engine.blocks, make_request("second", PROMPT), source) == 200
    server.close()


def test_a_crowd_is_turned_away(rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rigs
    monkeypatch.setattr(transfer, "MAX_GUESTS", 2)
    monkeypatch.setattr(transfer, "FETCH_S", 0.5)
    server, source = serve(giver.engine.blocks)
    crowd = [socket.create_connection((source.host, source.port)) for _ in range(2)]
    for one in crowd:
        transfer._Peer(one, time.monotonic() + 5).receive(transfer._Greeting)
    request = make_request("second", PROMPT)
    assert Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 0
    for one in crowd:
        one.close()
    wait_until(lambda: Fetcher(SECRET).fetch(taker.engine.blocks, request, source) == 200)
    server.close()


def test_a_copy_from_memory_to_memory_ends_when_its_time_is_up() -> None:
    content, filled = bytearray(8), []
    memory = SimpleNamespace(block_bytes=4, target=lambda number: memoryview(content)[4 * number :][:4], fill=filled.append)
    file = memoryview(b"aaaabbbb")
    assert transfer._copy(file, [1, 0], memory, [0, 1], end_s=0.0) == 0
    assert transfer._copy(file, [1, 0], memory, [0, 1], end_s=math.inf) == 2
    assert (bytes(content), filled) == (b"bbbbaaaa", [0, 1])
