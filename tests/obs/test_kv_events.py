"""KV events as a reader gets them: live, again, and in vLLM's form."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from penstock.obs.kv_events import END, MAX_KEPT_BYTES, NUM_KEPT, Publisher
from support.kv_events import asked, free_ports

TIMEOUT_MS = 20_000


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def publisher(port: int) -> Iterator[Publisher]:
    one = Publisher("127.0.0.1", port, "kv@here")
    yield one
    one.close()


def test_a_subscriber_gets_what_changes(publisher: Publisher, port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.set(zmq.RCVTIMEO, TIMEOUT_MS)
        reader.subscribe("kv@here")
        reader.connect(f"tcp://127.0.0.1:{port}")
        publisher.clear(4)
        while not reader.poll(10):  # a subscription takes effect some time after it
            publisher.change([(None, [11, 12], [*range(8)])], [])
        before = time.time()
        publisher.change([(12, [13], [8, 9, 10, 11])], [11])
        numbers, batches = [], []
        while not batches or batches[-1][1][0][0] != "BlockRemoved":
            topic, number, batch = reader.recv_multipart()
            assert topic == b"kv@here"
            numbers.append(int.from_bytes(number, "big"))
            batches.append(msgspec.msgpack.decode(batch))
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    unix_s, events, rank = batches[-1]
    assert before <= unix_s <= time.time()
    assert events == [["BlockRemoved", [11], "GPU"], ["BlockStored", [13], 12, [8, 9, 10, 11], 4, None, "GPU", None]]
    assert rank == 0


def test_who_missed_something_asks_for_it(publisher: Publisher, port: int) -> None:
    publisher.clear(4)
    for name in range(5):
        publisher.change([(None, [name], [1, 2, 3, 4])], [])
    publisher.change([], [])  # is no message
    numbers, batches = asked(port, 0)
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    events = [batch[1] for batch in batches]
    assert events[0] == [["AllBlocksCleared"]]
    assert events[1:] == [[["BlockStored", [name], None, [1, 2, 3, 4], 4, None, "GPU", None]] for name in range(5)]
    assert asked(port, numbers[4]) == (numbers[4:], batches[4:])
    assert asked(port, numbers[-1] + 1) == ([], [])


def test_numbers_go_on_where_another_publisher_was_before(port: int) -> None:
    """Readers pass over what seems to have come before."""
    before: list[int] = []
    for _ in range(2):
        one = Publisher("127.0.0.1", port, "")
        one.clear(4)
        numbers, _ = asked(port, 0)
        one.close()
        assert numbers > before
        before = numbers


@pytest.mark.parametrize(("size", "num_kept"), [(1, NUM_KEPT), (10_000, MAX_KEPT_BYTES // 90_036)])
def test_the_last_messages_are_kept(publisher: Publisher, port: int, size: int, num_kept: int) -> None:
    """So many, and so many bytes: 9 for each name, and a few for what is around them."""
    names = [(1 << 64) - 1] * size
    for _ in range(num_kept + 10):
        publisher.change([], names)
    numbers, batches = asked(port, 0)
    assert len(batches) == num_kept
    assert all(batch[1] == [["BlockRemoved", names, "GPU"]] for batch in batches)
    publisher.clear(4)
    assert asked(port, numbers[-1])[0] == [numbers[-1], numbers[-1] + 1]


@pytest.mark.parametrize(
    ("frames", "num_answers"), [([b""], 3), ([b"", b"x" * 500], 0), ([b"a", b"b", b"\0"], 3)], ids=["empty", "long", "three"]
)
def test_a_strange_question_is_answered(publisher: Publisher, port: int, frames: list[bytes], num_answers: int) -> None:
    for _ in range(3):
        publisher.clear(4)
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set(zmq.LINGER, 0)
        reader.set(zmq.RCVTIMEO, TIMEOUT_MS)
        reader.connect(f"tcp://127.0.0.1:{port + 1}")
        reader.send_multipart(frames)
        answers = [reader.recv_multipart() for _ in range(num_answers + 1)]
    assert answers[-1] == [b"", END, b""]
    assert len(asked(port, 0)[0]) == 3


def test_a_large_question_ends_its_connection_alone(publisher: Publisher, port: int) -> None:
    publisher.clear(4)
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set(zmq.LINGER, 0)
        with reader.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            reader.connect(f"tcp://127.0.0.1:{port + 1}")
            reader.send_multipart([b"", bytes(1 << 20)])
            assert monitor.poll(TIMEOUT_MS)
    assert len(asked(port, 0)[0]) == 1


def test_the_end_is_told(port: int) -> None:
    one = Publisher("127.0.0.1", port, "")
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.set(zmq.RCVTIMEO, TIMEOUT_MS)
        reader.subscribe("")
        reader.connect(f"tcp://127.0.0.1:{port}")
        while not reader.poll(10):
            one.change([(None, [11], [1, 2, 3, 4])], [])
        one.close()
        events = []
        while events != [["AllBlocksCleared"]]:
            *_, batch = reader.recv_multipart()
            events = msgspec.msgpack.decode(batch)[1]


def test_closing_while_a_reader_is_answered(port: int, caplog: pytest.LogCaptureFixture) -> None:
    one = Publisher("127.0.0.1", port, "")
    for _ in range(NUM_KEPT):
        one.change([], [1])
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set(zmq.LINGER, 0)
        reader.set(zmq.RCVTIMEO, TIMEOUT_MS)
        reader.connect(f"tcp://127.0.0.1:{port + 1}")
        reader.send_multipart([b"", bytes(8)])
        reader.recv_multipart()
        one.close()  # without an error in its thread, which pytest would report
    assert not caplog.records


def test_closing_gives_the_ports_back(port: int) -> None:
    for _ in range(3):
        Publisher("127.0.0.1", port, "").close()
    one = Publisher("127.0.0.1", port, "")
    one.close()
    one.clear(4)  # an engine may end its last step later
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_an_error_and_leaves_the_other_free() -> None:
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(OSError, match="in use"):
        Publisher("127.0.0.1", port, "")
    Publisher("127.0.0.1", port, "").close()
