"""Runs batches: feeds their lines to the server as background requests, and writes the answers.

    validating ---> in_progress ---> finalizing ---> completed, expired
        |                |
        v                v
      failed         cancelling ---> cancelled

One task drives each batch. Their lines take turns by owner. Twice as many lines are under way as requests run at once, so that
the engine always has some to choose from. For the event loop; threads of its own read and write files and databases, so a
hanging disk does not block other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sqlite3
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import INLINE_MAX_BODY
from penstock.disk import cause, remove, size_of
from penstock.engine.thread import ENGINE_FAILED, ENGINE_STUCK
from penstock.jobs.lines import (
    ALONE_AFTER,
    GIVEN_UP_AFTER,
    Answer,
    BadLines,
    Line,
    Lines,
    Stopped,
    error_at,
    prepare,
    read_line,
)
from penstock.jobs.store import INTERNAL, OUTPUT, Batch, File, NoRoom, Store, new_id
from penstock.serve.course import Course, Routed
from penstock.serve.errors import BUSY_STATUSES, STATUS_CLIENT_CLOSED_REQUEST
from penstock.serve.jobs.output_lines import line_of_answer, line_of_failure
from penstock.serve.own_requests import OwnRequests
from penstock.types.errors import ConfigError
from penstock.types.request import Owner
from penstock.types.stats import BatchStats

_log = logging.getLogger(__name__)

MIN_UNDER_WAY = 8
NUM_THREADS = 4
TAKEN_AT_ONCE, TAKEN_BYTES = 16, 1 << 20
"""Lines that are read together, and most bytes of theirs."""
GIVEN_UP_AT_ONCE = 1000
GATHERED_S = 0.2
"""Time in which answers gather to be written together."""
TRIED_AGAIN_S = 5.0
"""Time until a full or broken disk, or a server that refused a line without saying when, is tried again."""
MAX_RETRY_AFTER_S = 60.0
MAX_REFUSED = 1000
"""Lines of a batch that wait to be asked again. With about so many, no others are asked."""
ENVELOPE_BYTES = 1 << 11
"""Most bytes of a line beside the body of its request."""
SMALL_BYTES = 1 << 24
"""Files up to this size, a second's work to check, do not wait for larger ones."""
TIDIED_EACH_S = 60.0
EXPIRED, CANCELLED, FAILED = "batch_expired", "batch_cancelled", "batch_failed"
"""Codes of the errors of lines that were not asked."""
LOOKED_EACH_S = 60.0
"""Longest time after which the end of a batch's window is noticed, if the clock was set."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages")
"""Paths that lines may be for."""
Hours = tuple[int, int]
_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class _Running:
    batch: Batch
    """The batch as stored, with new `errors`. `with_counts` has the present counts."""
    lines: Lines | None = None
    """None until the lines are checked."""
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more lines are asked, and those under way are given up."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no line is under way any more."""
    under_way: set[asyncio.Task[None]] = field(default_factory=set)
    refused: set[asyncio.Task[None]] = field(default_factory=set)
    """One for each line that waits until it is asked again."""
    again: deque[int] = field(default_factory=deque)
    """Places of lines that have waited."""
    decided: dict[int, Routed] = field(default_factory=dict)
    """Place of a line that waits -> its route's choice, if a small model was unsure."""
    answers: list[Answer] = field(default_factory=list)
    """Not written yet."""
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the disk takes answers, and the key's files may have more bytes."""
    waits_for: str = ""
    """Why the batch waits: its key has no room, or the disk fails."""
    is_full: bool = False
    """The last wait was for room."""
    refusal: str = ""
    """Why the server refused a line, until it gives one a good answer, or none waits to be asked again."""
    began_s: float = 0.0
    began_with: int = 0
    """Lines that had an answer then."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the status changes."""
    task: asyncio.Task[None] | None = None

    @property
    def with_counts(self) -> Batch:
        """The batch with the counts of its lines and tokens so far."""
        if self.lines is None or self.batch.is_ended:
            return self.batch
        done = self.lines.progress
        return replace(
            self.batch,
            num_lines=done.num_lines,
            num_completed=done.num_completed,
            num_failed=done.num_failed,
            usage=done.usage,
        )

    @property
    def with_progress(self) -> Batch:
        """The batch with its counts so far, and why it waits."""
        if self.batch.is_ended:
            return self.batch
        errors = self.batch.errors
        if self.waits_for:
            errors = [error_at(None, "no_room", self.waits_for)]
        elif self.refusal and not errors:
            errors = [error_at(None, "refused", f"Lines are refused, and asked again. {self.refusal}")]
        return replace(self.with_counts, errors=errors)

    def wait(self, error: Exception) -> None:
        """Note why the batch waits: the disk fails, or its key's files have no room."""
        if not self.waits_for:
            _log.warning("batch %s waits: %s", self.batch.id, error)
        self.is_full = isinstance(error, NoRoom)
        self.waits_for = str(error) if self.is_full else f"The server's folder of files can't be used now: {cause(error)}."


class BatchRunner:
    def __init__(
        self,
        store: Store,
        deployment: Deployment,
        requests: OwnRequests,
        *,
        max_line_bytes: int,
        hours: Hours | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`hours`: of the day, local time, in which lines begin. `now` returns Unix time."""
        self.store = store
        self._requests = requests
        self._max_line_bytes = max_line_bytes
        self._hours = hours
        self._now = now
        self._running: dict[str, _Running] = {}
        self._turns = _Turns(deployment)
        self._off_loop = deployment.off_loop
        self._alone = asyncio.Lock()
        """Held while a line is asked that may break the server, so that two such lines do not fail together."""
        self._lines = {"completed": 0, "failed": 0}
        self._tokens = {"input": 0, "cached": 0, "output": 0}
        self._closing = asyncio.Event()
        self._checking = asyncio.Lock(), asyncio.Lock()
        """Held while a small or a large file is checked, which takes memory: one of each at a time."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-jobs")
        self._tidying: asyncio.Task[None] | None = None

    def now_s(self) -> int:
        return int(self._now())

    async def on_disk(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Do work that waits for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def start(self) -> None:
        """Go on with all unfinished batches."""
        for batch in self.store.unfinished():
            running = self._running[batch.id] = _Running(batch)
            self._drive(running)
        self._tidying = asyncio.create_task(self._tidy())

    async def close(self) -> None:
        """Stop. Lines under way are given up, and run again when the server is started again."""
        self._closing.set()
        if self._tidying is not None:
            self._tidying.cancel()
        running = [*self._running.values()]
        for one in running:
            one.is_stopped.set()
        await asyncio.gather(*[one.task for one in running if one.task is not None])

    async def close_store(self) -> None:
        """Close the folder, when nobody needs it any more."""
        await self.on_disk(self.store.close)

    async def _tidy(self) -> None:
        while True:
            try:
                await self.on_disk(self.store.expire, self.now_s())
            except (sqlite3.Error, OSError) as error:
                _log.warning("expired files can't be deleted now: %s", cause(error))
            await asyncio.sleep(TIDIED_EACH_S)

    # what the APIs call

    async def create(self, batch: Batch) -> Batch:
        """Begin a batch. Raises NoRoom and NoFile."""
        while (running := self._running.get(batch.id)) is not None:  # the client has sent it again at once
            async with running.changing:
                pass
            if self._running.get(batch.id) is running:
                return running.with_progress
        batch = replace(batch, output_file=new_id("file-"), error_file=new_id("file-"))
        running = self._running[batch.id] = _Running(batch)
        async with running.changing:
            try:
                known = await self.on_disk(self.store.create, batch)
            except BaseException:
                del self._running[batch.id]
                raise
            if known is not batch:  # it was sent twice, and the first has ended
                del self._running[batch.id]
                return known
        self._drive(running)
        return batch

    async def cancel(self, batch: Batch) -> Batch:
        """Ask no more lines of a batch. If it has ended, or is about to, nothing changes."""
        running = self._running.get(batch.id)
        if running is None:
            return await self.on_disk(self.store.batch, batch.id, batch.owner, batch.kind) or batch
        async with running.changing:
            if running.batch.status in ("validating", "in_progress"):
                await self._set_status(running, "cancelling")
        if running.batch.status == "cancelling":
            running.is_stopped.set()
        return running.with_progress

    def current(self, batch: Batch) -> Batch:
        """Return a batch with its progress so far."""
        running = self._running.get(batch.id)
        return batch if running is None or batch.is_ended else running.with_progress

    def is_running(self, batch: Batch) -> bool:
        return batch.id in self._running

    def ends_s(self, batch: Batch) -> int | None:
        """Return when a batch ends if its lines go on as they did since the server's start. None: it is not known.

        A line under way counts a quarter: half of these lines run, and they are half done on average.
        """
        running = self._running.get(batch.id)
        if running is None or running.lines is None:
            return None
        progress = running.lines.progress
        num_answered = progress.num_answered - running.began_with
        if not num_answered:
            return None
        in_part, now_s = len(running.under_way) / 4, self._now()
        seconds_per_line = (now_s - running.began_s) / (num_answered + in_part)
        return int(now_s + max(0.0, progress.num_left - in_part) * seconds_per_line)

    def stats(self) -> BatchStats:
        progress = [one.lines.progress for one in self._running.values() if one.lines is not None]
        return BatchStats(len(self._running), sum([one.num_left for one in progress]), {**self._lines}, {**self._tokens})

    # driving a batch

    def _drive(self, running: _Running) -> None:
        running.task = asyncio.create_task(self._run(running), name=f"batch {running.batch.id}")

    async def _run(self, running: _Running) -> None:
        batch_id = running.batch.id
        while not (self._closing.is_set() or running.batch.is_ended):
            try:
                await self._work(running)
                running.waits_for = ""
                continue
            except (sqlite3.OperationalError, OSError, NoRoom) as error:
                running.wait(error)
            except BadLines as bad:
                running.batch = replace(running.batch, errors=bad.errors)
                continue
            except Exception:
                _log.exception("batch %s fails", batch_id)
                internal = error_at(None, "internal_error", "The server's log has the cause.")
                running.batch = replace(running.batch, errors=[internal])
            await _is_set_within(self._closing, TRIED_AGAIN_S)
        await self._let_go(running)
        if running.batch.is_ended:
            del self._running[batch_id]

    async def _work(self, running: _Running) -> None:
        """Take a batch as far as it goes. After an error of the disk, it is called again."""
        if running.lines is None and not running.batch.errors:
            running.lines = await self.on_disk(self._open, running.batch)
            if running.lines is not None:
                running.began_s, running.began_with = self._now(), running.lines.progress.num_answered
            elif not await self._check(running):
                return
        if running.lines is not None and not running.batch.errors:
            async with running.changing:
                if running.batch.status == "validating":
                    await self._set_status(running, "in_progress")
            await self._ask_lines(running, running.lines)
            if running.batch.status == "cancelling":
                await self._give_up(
                    running.batch, running.lines, CANCELLED, "The batch was cancelled before this line was answered."
                )
        if running.lines is not None and running.batch.errors:
            await self._fail_lines(running, running.lines)
        async with running.changing:
            if running.batch.errors:
                await self._end(running, "failed")
            elif running.lines is not None and running.lines.progress.num_left:
                return
            elif running.batch.status == "cancelling":
                await self._end(running, "cancelled")
            else:
                if running.batch.status != "finalizing":
                    await self._set_status(running, "finalizing")
                await self._end(running, "expired" if "expired" in running.batch.times_s else "completed")

    def _open(self, batch: Batch) -> Lines | None:
        """Return the lines of a batch, or None if they are not checked yet."""
        path, content = self.store.lines(batch), self.store.content
        if not path.exists():
            return None
        return Lines(path, content(batch.input_file), content(batch.output_file), content(batch.error_file))

    async def _check(self, running: _Running) -> bool:
        """Check the lines of a batch. Return whether it ends now: cancelled or expired. Raises BadLines.

        Lines that an API has counted already are checked to the end, so that each gets an answer.
        """
        batch = running.batch

        def is_unneeded() -> bool:
            return self._closing.is_set() or (running.batch.status == "cancelling" and not batch.num_lines)

        urls = (batch.url,) if batch.url else URLS
        path, source = self.store.lines(batch), self.store.content(batch.input_file)
        is_large = await self.on_disk(size_of, source) > SMALL_BYTES
        if not await _acquired(self._checking[is_large], running.is_stopped, is_unneeded):
            return not self._closing.is_set()
        is_due = self._now() >= batch.due_s
        try:
            if running.batch.status != "cancelling" and not (is_due and batch.num_lines):  # else the lines are soon gone
                self._check_older(running)
                await self.on_disk(self.store.check_room, batch.owner)
                running.waits_for = ""
            await self.on_disk(prepare, path, source, urls, self._max_line_bytes + ENVELOPE_BYTES, is_unneeded)
        except Stopped:
            return not self._closing.is_set()
        except NoRoom:
            if not is_due:
                raise
            running.batch = self._expired(running.batch)
            return True
        finally:
            self._checking[is_large].release()
        return False

    def _check_older(self, running: _Running) -> None:
        """Raise NoRoom while an older batch of the same key waits for room, which has the first of it."""
        for one in self._running.values():  # in the order of their creation
            if one is running:
                return
            waits = one.is_full and one.waits_for and one.batch.status == "validating"
            if waits and one.batch.owner.key == running.batch.owner.key:
                raise NoRoom(one.waits_for)

    def _expired(self, batch: Batch) -> Batch:
        """Note that the time of a batch is over, which decides how it ends."""
        return replace(batch.with_status("expired", self.now_s()), status=batch.status)

    async def _set_status(self, running: _Running, status: str) -> None:
        """Give a batch another status. The caller holds `changing`."""
        now_s = self.now_s()
        await self.on_disk(self.store.put, running.with_counts.with_status(status, now_s))
        running.batch = running.with_counts.with_status(status, now_s)

    async def _end(self, running: _Running, status: str) -> None:
        """End a batch. The caller holds `changing`."""
        now_s = self.now_s()
        batch = running.with_counts
        sizes = (0, 0)
        if running.lines is not None:
            sizes = (running.lines.progress.num_output_bytes, running.lines.progress.num_error_bytes)
        elif status == "failed":  # keep the answers so far, although the batch's progress is lost
            paths = [self.store.content(file_id) for file_id in (batch.output_file, batch.error_file)]
            sizes = await self.on_disk(lambda: (size_of(paths[0]), size_of(paths[1])))
        asked = await self.on_disk(self.store.file, batch.input_file, batch.owner)
        purpose = OUTPUT if asked is None or asked.purpose != INTERNAL else INTERNAL
        expires_s = None if batch.files_expire_s is None else now_s + batch.files_expire_s
        named = zip((batch.output_file, batch.error_file), ("output", "error"), sizes, strict=True)
        files = [
            File(file_id, batch.owner, f"{batch.id}_{what}.jsonl", purpose, num_bytes, now_s, expires_s)
            for file_id, what, num_bytes in named
            if num_bytes
        ]
        kept = {file.id for file in files}
        output_file, error_file = [one if one in kept else "" for one in (batch.output_file, batch.error_file)]
        ended = batch.with_status(status, now_s, output_file=output_file, error_file=error_file)
        await self.on_disk(self.store.end, ended, files)
        if asked is not None and purpose == INTERNAL:
            with contextlib.suppress(sqlite3.Error, OSError):  # else the next start deletes it
                await self.on_disk(self.store.delete, asked)
        running.batch = ended  # told from now on
        await self._let_go(running)
        await self.on_disk(remove, [self.store.content(one) for one in {batch.output_file, batch.error_file} - kept])

    async def _let_go(self, running: _Running) -> None:
        lines, running.lines = running.lines, None
        if lines is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                await self.on_disk(lines.close)

    # its lines

    async def _ask_lines(self, running: _Running, lines: Lines) -> None:
        """Ask the lines of a batch that have no answer yet. When its time is over, give up those that are left."""
        if running.batch.status == "cancelling" or self._closing.is_set() or not lines.progress.num_left:
            return
        running.is_stopped, running.is_over = asyncio.Event(), asyncio.Event()
        feeding, writing = asyncio.create_task(self._feed(running, lines)), asyncio.create_task(self._write(running, lines))
        waiting = asyncio.create_task(self._is_due(running))
        await asyncio.wait([feeding, writing, waiting], return_when=asyncio.FIRST_COMPLETED)
        running.is_stopped.set()
        feeding.cancel()
        await asyncio.wait([feeding, *running.under_way, *running.refused])
        running.is_over.set()
        await writing
        if not feeding.cancelled():
            feeding.result()  # raises what the disk raised
        if await waiting and lines.progress.num_left:
            async with running.changing:  # noted first, so that a new start knows why lines were given up
                marked = self._expired(running.with_counts)
                await self.on_disk(self.store.put, marked)
                running.batch = marked
            message = "The batch's completion window ended before this line was answered. Send it in another batch."
            message += f" At the end lines were refused. {running.refusal}" if running.refusal else ""
            await self._give_up(running.batch, lines, EXPIRED, message)

    async def _is_due(self, running: _Running) -> bool:
        """Wait until the time of a batch is over, or its lines are given up. Return whether its time is over."""
        while (left_s := running.batch.due_s - self._now()) > 0:
            if await _is_set_within(running.is_stopped, min(left_s, LOOKED_EACH_S)):
                return False
        return True

    async def _feed(self, running: _Running, lines: Lines) -> None:
        """Ask lines as their turns come, until all are answered."""
        async for line in self._to_ask(running, lines):
            if line.num_failures >= GIVEN_UP_AFTER:
                message = f"The server failed {line.num_failures} times while this line was under way."
                running.answers.append(line_of_failure(running.batch, line, "server_failed", message))
                continue
            is_alone = line.num_failures >= ALONE_AFTER
            if is_alone and running.under_way:
                await asyncio.wait(running.under_way)
            await self._wait_for_hours()
            await running.has_room.wait()
            async with self._alone if is_alone else contextlib.nullcontext():
                await self._turns.take(running)
                asking = _start(running.under_way, self._ask(running, lines, line))
                if is_alone:
                    await asyncio.wait([asking])

    async def _to_ask(self, running: _Running, lines: Lines) -> AsyncIterator[Line]:
        """Yield lines in their order and, between some of them and the next, those to be asked again."""
        after = 0
        running.again.clear()
        while True:
            is_full = len(running.refused) >= MAX_REFUSED
            taken = [] if is_full else await self.on_disk(lines.take_to_ask, after, TAKEN_AT_ONCE, TAKEN_BYTES)
            again = [running.again.popleft() for _ in range(min(len(running.again), TAKEN_AT_ONCE))]
            for line in taken:
                yield line
                after = line.place
            for place in again:
                [line] = await self.on_disk(lines.take_to_ask, place - 1, 1, TAKEN_BYTES)
                yield line
            if not (taken or again):
                if not (pending := running.under_way | running.refused):
                    return
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_for_hours(self) -> None:
        while self._hours is not None and not is_within(self._hours, time.localtime(self._now()).tm_hour):  # noqa: ASYNC110
            await asyncio.sleep(TRIED_AGAIN_S)

    async def _ask(self, running: _Running, lines: Lines, line: Line) -> None:
        """Ask a line. If the server refuses it, it is asked again later."""
        batch, is_stopped = running.batch, running.is_stopped
        try:
            if line.num_failures >= ALONE_AFTER:
                await self.on_disk(lines.note_alone, line.place)
            request = read_line(line.data)
            decided, elsewhere = running.decided.pop(line.place, None), partial(self._turns.elsewhere, running)
            course = Course(is_background=True, is_local_only=batch.is_local_only, decided=decided, elsewhere=elsewhere)
            body, name = bytes(request.body), f"{batch.id}-{line.place}"
            answered = await self._requests.ask(running.batch.owner, request.url, body, name, is_stopped, course)
            if answered is None:
                running.answers.append(line_of_failure(batch, line, "invalid_api_key", "The batch's API key was withdrawn."))
            elif answered.status in BUSY_STATUSES:
                running.refusal = answered.why
                wait_s = min(answered.retry_after_s or TRIED_AGAIN_S, MAX_RETRY_AFTER_S)
                has_failed = any(why in running.refusal for why in (ENGINE_FAILED, ENGINE_STUCK))
                if course.decided is not None:
                    running.decided[line.place] = course.decided
                _start(running.refused, self._ask_again(running, lines, line.place, wait_s, has_failed=has_failed))
            elif answered.status != STATUS_CLIENT_CLOSED_REQUEST or not is_stopped.is_set():
                # A bad line is answered whether or not the server takes others.
                if answered.status < HTTPStatus.BAD_REQUEST or not (running.refused or running.again):
                    running.refusal = ""
                make = partial(line_of_answer, line, request, answered, name)
                size = len(answered.body)
                answer = make() if size <= INLINE_MAX_BODY else await self._off_loop.finish(size, make)
                running.answers.append(answer)  # not in one expression: `_write` changes the list during the wait
        except Exception:
            _log.exception("line %d of batch %s failed", line.place, batch.id)
            running.answers.append(line_of_failure(batch, line, "internal_error", "The server's log has the cause."))
        finally:
            self._turns.give_back(running)

    async def _ask_again(self, running: _Running, lines: Lines, place: int, wait_s: float, *, has_failed: bool) -> None:
        await self.on_disk(partial(lines.note_refusal, place, has_failed=has_failed))
        if not await _is_set_within(running.is_stopped, wait_s):
            running.again.append(place)

    async def _write(self, running: _Running, lines: Lines) -> None:
        """Write answers several times a second, until no more come. If there is no room for others, no more lines are asked."""
        while running.answers or not running.is_over.is_set():
            await _is_set_within(running.is_over, GATHERED_S)
            answers, running.answers = running.answers, []
            try:
                if answers:
                    await self.on_disk(lines.write, answers)
                    self._count(answers)
                if answers or not running.has_room.is_set():
                    answers = []
                    await self.on_disk(self.store.check_room, running.batch.owner)
                running.has_room.set()
                running.waits_for = ""
            except (sqlite3.Error, OSError, NoRoom) as error:
                running.answers = answers + running.answers
                running.wait(error)
                running.has_room.clear()
                if await _is_set_within(self._closing, TRIED_AGAIN_S):
                    running.answers = []  # these lines are asked again
                    break
        running.waits_for = ""

    async def _give_up(self, batch: Batch, lines: Lines, code: str, message: str) -> None:
        """Answer the lines that are left with an error."""
        while not self._closing.is_set() and (taken := await self.on_disk(lines.take, 0, GIVEN_UP_AT_ONCE, TAKEN_BYTES)):
            answers = [line_of_failure(batch, line, code, message)._replace(usage={code: 1}) for line in taken]
            await self.on_disk(lines.write, answers)
            self._count(answers)

    async def _fail_lines(self, running: _Running, lines: Lines) -> None:
        """Answer the lines that are left of a batch that fails, if they can still be read."""
        try:
            await self._give_up(running.batch, lines, FAILED, running.batch.errors[0]["message"])
        except (sqlite3.OperationalError, OSError):
            raise
        except BadLines:
            pass  # somebody has changed the file
        except Exception:  # such as a damaged database: the batch ends all the same
            _log.exception("lines of batch %s stay without an answer", running.batch.id)

    def _count(self, answers: Sequence[Answer]) -> None:
        for one in answers:
            self._lines["failed" if one.is_error else "completed"] += 1
            for kind in self._tokens:
                self._tokens[kind] += one.usage.get(f"{kind}_tokens", 0)


class _Turns:
    """How many lines are under way, and whose is next: the owner's with the fewest, then the batch's whose time ends first.

    An owner without any gets a place at once: the others' lines may all wait for a model with interactive requests. Lines at
    upstreams have a limit of their own, so that a slow upstream does not hold up the models here.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._under_way: Counter[Owner] = Counter()
        self._elsewhere: Counter[_Running] = Counter()
        """How many of the lines under way are at upstreams, or wait for them."""
        self._waiting: list[tuple[_Running, asyncio.Future[None]]] = []

    async def take(self, running: _Running) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((running, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been granted
                self.give_back(running)
            raise

    def give_back(self, running: _Running) -> None:
        self._under_way[running.batch.owner] -= 1
        self._under_way += Counter()  # drops owners that have none
        self._grant()

    @contextlib.contextmanager
    def elsewhere(self, running: _Running) -> Iterator[None]:
        """Count a line as elsewhere until the block ends, so that another one may begin."""
        self._elsewhere[running] += 1
        self._grant()
        try:
            yield
        finally:
            self._elsewhere[running] -= 1
            self._elsewhere += Counter()

    def _grant(self) -> None:
        self._waiting = [one for one in self._waiting if not one[1].cancelled()]
        limit, num_elsewhere = self._limit(), self._elsewhere.total()
        is_full = num_elsewhere >= limit  # then batches with lines elsewhere wait: their next line may go there, too
        while asking := [one for one in self._waiting if not (is_full and one[0] in self._elsewhere)]:
            first = min(asking, key=lambda one: (self._under_way[one[0].batch.owner], one[0].batch.due_s))
            if self._under_way[first[0].batch.owner] and self._under_way.total() - num_elsewhere >= limit:
                return
            self._waiting.remove(first)
            running, turn = first
            self._under_way[running.batch.owner] += 1
            turn.set_result(None)

    def _limit(self) -> int:
        loads = [running.engine.load() for running in self._deployment.running]
        return max([MIN_UNDER_WAY, *[2 * (load.num_running + load.num_rows_free) for load in loads]])


def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task, which is in the set until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _acquired(lock: asyncio.Lock, is_stopped: asyncio.Event, is_unneeded: Callable[[], bool]) -> bool:
    """Wait for a lock, which the caller releases. Return whether it has it: it may be stopped before."""
    acquiring, leaving = asyncio.ensure_future(lock.acquire()), asyncio.ensure_future(is_stopped.wait())
    try:
        await asyncio.wait([acquiring, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done() and is_unneeded():
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await acquiring
            return False
        return await acquiring
    finally:
        acquiring.cancel()
        leaving.cancel()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def is_within(hours: Hours, hour: int) -> bool:
    """Return whether an hour of the day is within hours such as (22, 6), which go over midnight."""
    first, last = hours
    return first <= hour < last if first < last else hour >= first or hour < last


def read_hours(text: str) -> Hours:
    """Return the hours of a setting such as `22-6`. Raises ConfigError."""
    found = re.fullmatch(r"([01]?[0-9]|2[0-3])-([01]?[0-9]|2[0-4])", text.strip())
    if found is None or int(found[1]) == int(found[2]) % 24:
        raise ConfigError(f"--batch-hours {text!r} is not a range of hours.", remedy="Write --batch-hours 22-6, for example.")
    return int(found[1]), int(found[2]) % 24
