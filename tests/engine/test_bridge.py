"""The bridge between engine thread and event loop: nothing lost, nothing left behind, nobody blocked."""

import asyncio
import threading

import pytest

from penstock.engine.bridge import Bridge, merge_chunks
from penstock.engine.ports import OutputChunk
from penstock.testing import make_request
from penstock.types.request import FinishReason
from support.reading import chunks_of


class FakeEngine:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[tuple[str, str]] = []

    def submit(self, *requests) -> None:
        self.submitted += [request.request_id for request in requests]

    def abort(self, request_id, detail) -> None:
        self.aborted.append((request_id, detail))


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def bridge(engine):
    bridge = Bridge()
    bridge.attach(engine)
    return bridge


def chunk(request_id="r0", text="x", *, count=1, finish=None):
    return OutputChunk(request_id, text, (5,), (), 0, num_generated_tokens=count, finish_reason=finish)


def deliver_from_thread(bridge, batches):
    """As the engine does, from another thread; returns when all were handed over."""
    thread = threading.Thread(target=lambda: [bridge.deliver(batch) for batch in batches])
    thread.start()
    thread.join()


async def hop():
    """Let the loop hear of what was delivered, and pass it on."""
    for _ in range(3):
        await asyncio.sleep(0)


async def read_all(stream):
    chunks = []
    while batch := await stream.next_chunks():
        chunks += batch
    return chunks


async def test_chunks_arrive_in_order_and_the_stream_ends(bridge, engine):
    texts = []
    reader = asyncio.create_task(collect(bridge, texts))
    await asyncio.sleep(0)
    assert engine.submitted == ["r0"]
    for index in range(100):
        deliver_from_thread(bridge, [[chunk(text=f"{index} ", finish=FinishReason.STOP if index == 99 else None)]])
        await hop()
    await reader
    assert "".join(texts) == "".join(f"{index} " for index in range(100))
    assert engine.aborted == []
    assert bridge.num_open_requests == 0


async def collect(bridge, texts, request_id="r0"):
    async for piece in chunks_of(bridge, make_request(request_id)):
        texts.append(piece.text)


async def test_a_reader_that_lags_gets_merged_chunks_and_loses_nothing(bridge):
    with bridge.open([make_request()]) as stream:
        deliver_from_thread(bridge, [[chunk(text=chr(65 + index % 26), count=index + 1)] for index in range(1000)])
        await hop()
        [merged] = await stream.next_chunks()
        assert merged.text == "".join(chr(65 + index % 26) for index in range(1000))
        assert len(merged.token_ids) == 1000
        assert merged.num_generated_tokens == 1000
        deliver_from_thread(bridge, [[chunk(text="!", finish=FinishReason.LENGTH)]])
        assert [last.text for last in await read_all(stream)] == ["!"]


async def test_what_a_slow_reader_has_not_taken_is_few_objects(bridge):
    with bridge.open([make_request("a"), make_request("b")]) as stream:
        for _ in range(50):
            deliver_from_thread(bridge, [[chunk("a"), chunk("b")] for _ in range(100)])
            await hop()
            assert len(stream._chunks) <= 130
        merged = await stream.next_chunks()
        assert {piece.request_id: len(piece.text) for piece in merged} == {"a": 5000, "b": 5000}


async def test_one_hop_carries_everything_that_waits(bridge):
    with bridge.open([make_request()]) as stream:
        hops, wake = [], bridge._wakeup.wake

        def count():
            hops.append(1)
            wake()

        bridge._wakeup.wake = count
        deliver_from_thread(bridge, [[chunk()]] * 10)
        await stream.next_chunks()
    assert len(hops) == 1


def test_a_late_delivery_for_a_loop_that_is_gone_does_not_silence_the_next(bridge):
    async def leave_early():
        async for _ in aiter_first(bridge):
            pass
        return bridge._wakeup

    async def read():
        with bridge.open([make_request("later")]) as stream:
            gone.is_pending = True  # what the engine's thread does that looked the wake-up up before the loop changed
            deliver_from_thread(bridge, [[chunk("later")]])
            return await asyncio.wait_for(stream.next_chunks(), 5)

    gone = asyncio.run(leave_early())
    assert len(asyncio.run(read())) == 1


async def test_leaving_early_aborts(bridge, engine):
    async for _ in aiter_first(bridge):
        pass
    assert [request_id for request_id, _ in engine.aborted] == ["r0"]
    assert bridge.num_open_requests == 0
    deliver_from_thread(bridge, [[chunk(finish=FinishReason.ABORT)]])
    await hop()  # The late chunk is nobody's, and does no harm.


async def aiter_first(bridge):
    """Reads one chunk, then leaves."""
    stream = chunks_of(bridge, make_request())
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    deliver_from_thread(bridge, [[chunk()]])
    yield await first
    await stream.aclose()


async def test_a_cancelled_reader_aborts(bridge, engine):
    reader = asyncio.create_task(collect(bridge, []))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [request_id for request_id, _ in engine.aborted] == ["r0"]
    assert bridge.num_open_requests == 0


async def test_only_unfinished_requests_are_aborted(bridge, engine):
    with bridge.open([make_request("a"), make_request("b")]) as stream:
        deliver_from_thread(bridge, [[chunk("a", finish=FinishReason.STOP)]])
        await stream.next_chunks()
        assert not stream.is_ended
    assert [request_id for request_id, _ in engine.aborted] == ["b"]


async def test_a_refused_submit_leaves_nothing_behind(bridge, engine, monkeypatch):
    def refuse(*requests):
        raise ValueError("in use")

    monkeypatch.setattr(engine, "submit", refuse)
    with pytest.raises(ValueError, match="in use"):
        bridge.open([make_request("a"), make_request("b")])
    assert bridge.num_open_requests == 0
    assert engine.aborted == []


async def test_an_id_that_is_in_use_does_no_harm_to_the_request_that_has_it(bridge, engine):
    with bridge.open([make_request("a")]) as stream:
        with pytest.raises(AssertionError, match="'a' is in use"):
            bridge.open([make_request("b"), make_request("a")])
        assert (engine.submitted, engine.aborted, bridge.num_open_requests) == (["a"], [], 1)
        deliver_from_thread(bridge, [[chunk("a", finish=FinishReason.STOP)]])
        async with asyncio.timeout(10):
            assert len(await read_all(stream)) == 1


async def test_cancel_ends_a_waiting_reader(bridge, engine):
    with bridge.open([make_request()]) as stream:
        reader = asyncio.create_task(stream.next_chunks())
        await asyncio.sleep(0)
        stream.cancel("gone")
        stream.cancel("gone")
        assert await reader == []
        assert stream.is_cancelled
    assert engine.aborted == [("r0", "gone")]


def test_the_bridge_serves_one_loop_after_another(bridge):
    async def ask():
        texts = []
        reader = asyncio.create_task(collect(bridge, texts))
        await asyncio.sleep(0)
        deliver_from_thread(bridge, [[chunk(finish=FinishReason.STOP)]])
        await reader
        return texts

    assert asyncio.run(ask()) == ["x"]
    bridge.deliver([chunk()])  # No loop listens now.
    assert asyncio.run(ask()) == ["x"]


async def leave_open(bridge, request_id="r0"):
    return bridge.open([make_request(request_id)])


def test_streams_that_a_closed_loop_left_open_are_aborted(bridge, engine):
    left = asyncio.run(leave_open(bridge))
    texts = []

    async def ask():
        reader = asyncio.create_task(collect(bridge, texts, "r1"))
        await asyncio.sleep(0)
        left.close()
        deliver_from_thread(bridge, [[chunk(text="late"), chunk("r1", finish=FinishReason.STOP)]])
        await reader

    asyncio.run(ask())
    assert texts == ["x"]
    assert engine.aborted[0] == ("r0", "its event loop was closed")
    assert bridge.num_open_requests == 0


async def test_streams_open_in_another_loop_are_left_alone(bridge, engine):
    with bridge.open([make_request()]):
        with pytest.raises(RuntimeError, match="streams are open in another event loop"):
            await asyncio.to_thread(asyncio.run, leave_open(bridge, "r1"))
        assert bridge.num_open_requests == 1
        assert engine.aborted == []


def test_a_stream_is_not_read_in_another_loop(bridge):
    with asyncio.run(leave_open(bridge)) as left, pytest.raises(RuntimeError, match="opened in another event loop"):
        asyncio.run(asyncio.wait_for(left.next_chunks(), 20))


def test_merging_keeps_each_requests_order_and_the_last_words():
    merged = merge_chunks(
        [chunk("a", "1"), chunk("b", "2"), chunk("a", "3", count=2, finish=FinishReason.STOP), chunk("b", "4", count=2)]
    )
    assert [(piece.request_id, piece.text, piece.finish_reason) for piece in merged] == [
        ("a", "13", FinishReason.STOP),
        ("b", "24", None),
    ]
    assert all(piece.num_generated_tokens == 2 for piece in merged)


async def test_what_came_before_the_engine_left_is_read(bridge):
    """A server that ends aborts its last requests, and frees the engine at once: their clients are told all the same."""
    with bridge.open([make_request("r0", [1])]) as stream:
        await hop()
        bridge.deliver([chunk(finish=FinishReason.ABORT)])
        bridge.detach()
        async with asyncio.timeout(10):
            [last] = await stream.next_chunks()
    assert last.finish_reason is FinishReason.ABORT
