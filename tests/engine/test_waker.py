"""Waking a loop from another thread: never one time too few, and nothing left open."""

import asyncio
import gc
import os
import sys
from pathlib import Path

import pytest

from penstock.engine.bridge import EventWaker, make_waker
from support.work_time import others_are_no_garbage

MEANS = ["loop", *(["event"] if sys.platform == "linux" else [])]


@pytest.fixture(params=MEANS)
def make(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return make_waker


@pytest.mark.skipif(sys.platform != "linux", reason="eventfd is Linux'")
async def test_linux_wakes_by_an_event():
    assert isinstance(make_waker(asyncio.get_running_loop(), lambda: None).__self__, EventWaker)


async def test_every_wake_is_followed_by_a_call(make):
    num_wakes, seen, is_called = 0, 0, asyncio.Event()

    def note():
        nonlocal seen
        seen = num_wakes
        is_called.set()

    wake_once = make(asyncio.get_running_loop(), note)

    def wake(times):
        nonlocal num_wakes
        for _ in range(times):
            num_wakes += 1
            wake_once()

    for times in (1, 5, 100):
        await asyncio.to_thread(wake, times)
        async with asyncio.timeout(20):
            while seen < num_wakes:
                is_called.clear()
                await is_called.wait()
    assert seen == 106


async def test_a_wake_before_the_loop_comes_to_it_is_not_lost(make):
    is_called = asyncio.Event()
    make(asyncio.get_running_loop(), is_called.set)()
    await asyncio.wait_for(is_called.wait(), 20)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_stays_open_when_the_loop_is_closed(make):
    def num_open():
        return len(list(Path("/proc/self/fd").iterdir()))

    async def use():
        is_called = asyncio.Event()
        make(asyncio.get_running_loop(), is_called.set)()
        await is_called.wait()

    with others_are_no_garbage():
        asyncio.run(use())
        gc.collect()
        before = num_open()
        for _ in range(5):
            asyncio.run(use())
        gc.collect()
        assert num_open() == before


@pytest.mark.skipif(sys.platform != "linux", reason="eventfd is Linux'")
def test_a_late_wake_of_a_closed_loop_does_no_harm():
    async def make():
        return EventWaker(asyncio.get_running_loop(), lambda: None)

    waker = asyncio.run(make())
    files = [os.open("/dev/null", os.O_WRONLY) for _ in range(3)]
    waker.wake()
    assert waker._event not in files
    for file in files:
        os.close(file)
