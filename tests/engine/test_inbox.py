"""The inbox: order, aborts that may overtake and those that may not, sleeping and waking."""

from __future__ import annotations

import threading

from penstock.clock import VirtualClock, WallClock
from penstock.engine.inbox import Inbox
from penstock.types.events import Abort, Add, Drain
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams


def add(request_id: str) -> Add:
    return Add(Request(request_id, (1, 2), SamplingParams(), arrival_ns=0))


def test_commands_come_out_once_in_order():
    inbox = Inbox(WallClock())
    commands = [add("a"), Abort("a"), Drain()]
    assert all(inbox.put(command) for command in commands)
    assert inbox.poll() == commands
    assert inbox.poll() == []
    assert inbox.is_empty


def test_aborts_overtake_other_commands():
    inbox = Inbox(WallClock())
    for command in (add("new"), Abort("old"), Drain()):
        inbox.put(command)
    assert inbox.poll_aborts() == [Abort("old")]
    assert [type(command) for command in inbox.poll()] == [Add, Drain]


def test_an_abort_never_overtakes_its_own_add():
    inbox = Inbox(WallClock())
    inbox.put(add("a"))
    inbox.put(Abort("a"))
    assert inbox.poll_aborts() == []
    assert [type(command) for command in inbox.poll()] == [Add, Abort]


def test_an_abort_that_had_to_wait_is_not_lost_or_doubled():
    inbox = Inbox(WallClock())
    inbox.put(add("a"))
    inbox.put(Abort("a"))
    inbox.poll_aborts()
    inbox.poll()
    inbox.put(Abort("a", "again"))
    assert inbox.poll_aborts() == [Abort("a", "again")]
    assert inbox.poll_aborts() == []


def test_a_closed_inbox_refuses_and_returns_what_nobody_polled():
    inbox = Inbox(WallClock())
    inbox.put(Drain())
    assert inbox.close() == [Drain()]
    assert not inbox.put(Drain())
    assert inbox.close() == []
    assert inbox.is_empty


def test_wait_returns_at_once_when_there_is_something_or_the_time_is_over():
    inbox = Inbox(VirtualClock(100))
    inbox.wait(until_ns=100)
    inbox.wait(until_ns=0)
    inbox.put(Drain())
    inbox.wait(until_ns=None)
    inbox.poll()
    inbox.close()
    inbox.wait(until_ns=None)


def test_put_wakes_a_sleeper():
    inbox = Inbox(WallClock())
    woken = threading.Event()

    def sleep() -> None:
        inbox.wait(until_ns=None)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    inbox.put(Drain())
    assert woken.wait(10)
    thread.join()


def test_no_command_is_lost_between_many_writers_and_one_reader():
    inbox = Inbox(WallClock())
    num_writers, num_each = 4, 200

    def write(writer: int) -> None:
        for idx in range(num_each):
            assert inbox.put(Abort(f"{writer}", str(idx)))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(num_writers)]
    for thread in threads:
        thread.start()
    seen: list[Abort] = []
    while len(seen) < num_writers * num_each:
        inbox.wait(until_ns=None)
        seen += inbox.poll_aborts() + inbox.poll()
    for thread in threads:
        thread.join()
    for writer in range(num_writers):
        assert [command.detail for command in seen if command.request_id == str(writer)] == [str(i) for i in range(num_each)]
