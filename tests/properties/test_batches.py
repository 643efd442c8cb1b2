"""Each line of a batch has exactly one answer, whatever comes in between: refusals, full disks, kills, restarts, cancels, time.

A runner without a server: the test answers its lines, in any order.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.jobs.lines import Lines
from penstock.jobs.store import UPLOAD, Batch, Store, new_id
from penstock.serve.errors import STATUS_CLIENT_CLOSED_REQUEST
from penstock.serve.jobs import runner as module
from penstock.serve.jobs.runner import BatchRunner
from penstock.serve.own_requests import Answered
from penstock.types.request import Owner
from support.server.jobs import CHAT, impatient, line

OWNERS = [Owner("ann", "ann"), Owner("bob", "bob")]
GOOD, WRONG, REFUSED, GONE = Answered(200, None, b"{}"), Answered(400, None, b"{}"), Answered(429, 0.001, b"{}"), None
WINDOW_S = 3600
ANSWERS = st.tuples(st.just("answer"), st.sampled_from([GOOD, GOOD, WRONG, REFUSED, GONE]), st.integers(0, 40))
"""An answer, and which of the lines under way gets it."""
FALLIBLE = [(Lines, "write"), (Lines, "take"), (Lines, "__init__"), (Lines, "close"), (Store, "put"), (Store, "end")]
FAULTS = st.tuples(st.just("fail"), st.sampled_from(FALLIBLE), st.integers(1, 3))
EVENTS = (
    ANSWERS
    | ANSWERS
    | FAULTS
    | st.tuples(st.sampled_from(["restart", "kill", "wait", "wait"]))
    | st.tuples(st.sampled_from(["cancel", "expire"]), st.integers(0, 1))
)


class Disk:
    """Methods that fail the next few times."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: Counter[str] = Counter()
        self.opened: list[Lines] = []
        for owner, name in [
            (Lines, "write"),
            (Lines, "take"),
            (Lines, "__init__"),
            (Lines, "close"),
            (Store, "put"),
            (Store, "end"),
        ]:
            patch.setattr(owner, name, self._failing(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _failing(self, name, real):
        def work(*given, **named):
            if self.left[name] > 0:
                self.left[name] -= 1
                if name == "Lines.close":
                    real(*given)
                raise sqlite3.OperationalError("disk I/O error") if self.left[name] % 2 else OSError(5, "I/O error")
            real_result = real(*given, **named)
            if name == "Lines.__init__":
                self.opened.append(given[0])
            return real_result

        return work


class Requests:
    """Lines that are under way, until the test answers them."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future] = []
        self.answers_all = False

    async def ask(self, owner, url, body, request_id, left, marks):
        if self.answers_all:
            return GOOD
        future = asyncio.get_running_loop().create_future()
        self.under_way.append(future)
        leaving = asyncio.ensure_future(left.wait())
        await asyncio.wait([future, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if future in self.under_way:
            self.under_way.remove(future)
        return future.result() if future.done() else Answered(STATUS_CLIENT_CLOSED_REQUEST, None, b"")

    def answer(self, answered, nth) -> None:
        if self.under_way:
            self.under_way.pop(nth % len(self.under_way)).set_result(answered)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.late_s = folder, 0
        self.requests = Requests()
        self.begin()

    def begin(self) -> None:
        self.requests.under_way.clear()
        self.store = Store(self.folder, max_bytes=1 << 30)
        self.runner = BatchRunner(
            self.store,
            SimpleNamespace(running=[], off_loop=None),
            self.requests,
            max_line_bytes=1 << 20,
            now=lambda: 1000.0 + self.late_s,
        )
        self.runner.start()

    async def create(self, owner, num) -> Batch:
        with closing(self.store.upload(owner)) as upload:
            upload.write(b"\n".join(json.dumps(line(str(nth))).encode() for nth in range(num)))
            file = upload.keep("in", UPLOAD, 1000)
        made = Batch(
            id=new_id("batch_"), owner=owner, kind="k", url=CHAT, input_file=file.id, window_s=WINDOW_S, created_s=1000
        )
        return await self.runner.create(made)

    async def kill(self, disk: Disk) -> None:
        """End as a process does that is killed: nothing is written any more, and answers that were not noted are lost."""
        tasks = [one.task for one in self.runner._running.values()]
        tasks += [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.runner._threads.shutdown)
        for lines in disk.opened:
            lines.close()
        disk.opened.clear()
        self.store.close()

    def find(self, batch: Batch) -> Batch:
        return self.store.batch(batch.id, batch.owner, "k")

    def answers(self, batch: Batch) -> list[list[dict]]:
        ids = (batch.output_file, batch.error_file)
        return [[json.loads(one) for one in self.store.content(one).read_text().splitlines()] if one else [] for one in ids]


async def run(folder: Path, nums: Sequence[int], events: Sequence[tuple], disk: Disk) -> None:
    world = World(folder)
    batches = [await world.create(owner, num) for owner, num in zip(OWNERS, nums, strict=True)]
    cancelled = set()
    for name, *given_ in events:
        if name == "answer":
            world.requests.answer(*given_)
        elif name == "fail":
            (owner, method), num = given_
            disk.left[f"{owner.__name__}.{method}"] += num
        elif name == "restart":
            await world.runner.close()
            await world.runner.close_store()
            world.begin()
        elif name == "kill":
            disk.left.clear()  # else a kill could not close what is open
            await world.kill(disk)
            world.begin()
        elif name == "cancel":
            batch = batches[given_[0]]
            try:
                found = await world.runner.cancel(world.find(batch))
            except (sqlite3.Error, OSError):
                continue  # the client was told
            if found.status in ("cancelling", "cancelled"):
                cancelled.add(batch.id)
        elif name == "expire":
            world.late_s += WINDOW_S // 2 + 1
        await asyncio.sleep(0.003)
    disk.left.clear()
    world.requests.answers_all = True
    while world.store.unfinished():
        world.requests.answer(GOOD, 0)
        await asyncio.sleep(0.001)
    for batch, num in zip(batches, nums, strict=True):
        check(world, world.find(batch), num, batch.id in cancelled)
    files = {file.id for owner in OWNERS for file in world.store.files(owner, limit=99)}
    await world.runner.close()
    await world.runner.close_store()
    assert {path.name for path in (folder / "files").iterdir()} == files
    assert [*(folder / "lines").iterdir()] == []


def check(world: World, batch: Batch, num: int, is_cancelled: bool) -> None:
    outputs, errors = world.answers(batch)
    counted = Counter(one["custom_id"] for one in outputs + errors)
    if is_cancelled and not batch.num_lines:  # before its lines were checked
        num = 0
    assert counted == Counter(str(nth) for nth in range(num))
    assert (batch.num_lines, batch.num_completed, batch.num_failed) == (num, len(outputs), len(errors))
    assert (batch.status == "cancelled") == is_cancelled
    codes = {(one["error"] or {}).get("code") for one in errors}
    assert ("batch_cancelled" in codes) <= is_cancelled
    if not is_cancelled:
        assert batch.status == ("expired" if "batch_expired" in codes else "completed")


@given(st.tuples(st.integers(1, 40), st.integers(1, 12)), st.lists(EVENTS, max_size=25))
@example((3, 1), [("answer", GOOD, 0), ("expire", 0), ("expire", 0), ("fail", (Lines, "write"), 3), ("kill",), ("wait",)])
@example((40, 1), [("fail", (Store, "end"), 2), ("cancel", 0), ("fail", (Lines, "close"), 3), ("restart",), ("cancel", 1)])
@settings(suppress_health_check=list(HealthCheck))
def test_every_line_has_one_answer(nums, events):
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        impatient(patch)
        patch.setattr(module, "GATHERED_S", 0.001)
        patch.setattr(module, "TRIED_AGAIN_S", 0.002)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        asyncio.run(run(folder, nums, events, Disk(patch)))
