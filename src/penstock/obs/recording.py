"""Writes recordings of a server's requests, plans and timings, without texts or tokens (docs/recording.md).

The engine thread only appends to a bounded queue. A thread here writes the file, and counts reports that did not fit. Prompts
are lists of block ids: equal ids mean equal tokens after equal prefixes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.clock import Clock
from penstock.types.errors import ConfigError
from penstock.types.plan import PaddingId
from penstock.types.request import FinishReason, Request
from penstock.types.stats import PlanNews, RequestStats, StepStats

_logger = logging.getLogger(__name__)

FORMAT = "penstock-recording"
VERSION = 1
NUM_PARTS = 4
"""Files that share the size limit: FILE, and FILE.1 to FILE.3 with older parts."""
MAX_QUEUED_ROWS = 1 << 19
"""Queue limit in rows of about 128 bytes: 64 MB, or minutes of steps. A report costs one extra row, four prompt tokens cost
one."""
CLOSE_TIMEOUT_S = 10.0
POLL_S = 0.05
"""Time between two looks at the queue: short, so that little is written at once and the engine thread does not wait for the
GIL."""
MAX_BLOCKS = 1 << 16
"""Block contents that are remembered, about 25 MB at 16 tokens. A forgotten block that comes again gets a new id."""
MAX_ALIKE = 64
"""Newest blocks with the same parent and first token that are compared: more than the prefix cache compares."""
MAX_ENDED = 1024
"""Ended requests that are remembered, because a step planned earlier may still have their rows."""
MAX_TENANTS = 1 << 16
TOKEN_BYTES = 4
LINE_BYTES = 1 << 16
"""Room kept for the next line of a part. A prompt of a million tokens takes more."""
NOBODY = -1
"""The number of a padding row, and of each tenant beyond `MAX_TENANTS`."""

BEGINNING = f'{{"kind":"header","format":"{FORMAT}",'.encode()
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class PrefixIds:
    """Numbers block contents for the recording: the same prefix with the same salt and adapter gets the same numbers."""

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_young = max(1, max_blocks // 2)
        self._young: dict[tuple[int, bytes], int] = {}
        self._old: dict[tuple[int, bytes], int] = {}
        self._young_alike: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}
        self._old_alike: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}
        """(parent, first token) -> id and packed tokens of such children, the newest last."""
        self._num_ids = 0

    def root(self, salt: bytes, adapter: bytes = b"") -> int:
        """Return the id that stands for "no block before" under a salt and an adapter. It does not appear in the file."""
        key = (NOBODY, b"%d %b%b" % (len(salt), salt, adapter))
        return self._known(key) or self._put(key)

    def chain(self, parent: int, token_ids: Sequence[int]) -> tuple[list[int | list[int]], int]:
        """Return the recorded blocks of `token_ids`, and the id of the last full one. `parent`: id of the block before them.

        A block is an id, or a list [id, other, n] if its content is new and begins with the same n tokens as block `other`. A
        last block that is not full has an id too.
        """
        blocks: list[int | list[int]] = []
        data = array("i", token_ids).tobytes()
        num_bytes = self._block_size * TOKEN_BYTES
        for start in range(0, len(data), num_bytes):
            content = data[start : start + num_bytes]
            known = self._known((parent, content))
            if known is not None:
                blocks.append(known)
                number = known
            else:
                other, num_common = self._most_alike(parent, content)
                number = self._put((parent, content))
                if num_common * TOKEN_BYTES < len(content):
                    self._note_alike(parent, content, number)
                blocks.append([number, other, num_common] if num_common else number)
            if len(content) == num_bytes:
                parent = number
        return blocks, parent

    def _known(self, key: tuple[int, bytes]) -> int | None:
        number = self._young.get(key)
        if number is None and (number := self._old.get(key)) is not None:
            self._young[key] = number
        return number

    def _put(self, key: tuple[int, bytes]) -> int:
        self._num_ids += 1
        self._young[key] = self._num_ids
        if len(self._young) >= self._max_young:
            self._old, self._young = self._young, {}
            self._old_alike, self._young_alike = self._young_alike, {}
        return self._num_ids

    def _most_alike(self, parent: int, content: bytes) -> tuple[int, int]:
        key = (parent, content[:TOKEN_BYTES])
        best = (0, 0)
        for number, other in (*self._old_alike.get(key, ()), *self._young_alike.get(key, ())):
            num_common = _num_common(other, content)
            if num_common >= best[1]:
                best = (number, num_common)
        return best

    def _note_alike(self, parent: int, content: bytes, number: int) -> None:
        """Remember new content, so that later blocks that begin alike are found."""
        alike = self._young_alike.setdefault((parent, content[:TOKEN_BYTES]), [])
        alike[:] = [*(one for one in alike if not content.startswith(one[1])), (number, content)][-MAX_ALIKE:]


def _num_common(one: bytes, other: bytes) -> int:
    num_bytes = min(len(one), len(other))
    difference = int.from_bytes(one[:num_bytes], "little") ^ int.from_bytes(other[:num_bytes], "little")
    if not difference:
        return num_bytes // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class Recorder:
    """Records a server to a file: a `RequestJournal` and `TurnObserver` of the engine."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        clock: Clock,
        block_size: int,
        about: Mapping[str, object],
        has_tenant_names: bool = False,
        max_queued_rows: int = MAX_QUEUED_ROWS,
    ) -> None:
        """Open the file and start the thread. `about` describes model, machine and settings, for the file's first line.

        `max_bytes` limits all parts together. Raises ConfigError or OSError if the file can't be written.
        """
        self._queue: deque[tuple[Any, ...]] = deque()
        """Size in rows, a method of the writer, and its arguments."""
        self._max_queued_rows = max_queued_rows
        self._num_rows_queued = 0
        """Rows ever queued. Written by the engine thread."""
        self._num_rows_taken = 0
        """Rows that the writer has taken. Written by its thread."""
        self.num_lost = 0
        """Dropped reports. Written by the engine thread."""
        self._lost_ends: deque[str] = deque()
        """Ids of requests whose ends were dropped, for the writer to forget."""
        start_ns = clock.now_ns()
        header = {
            "kind": "header",
            "format": FORMAT,
            "version": VERSION,
            "recording": secrets.token_hex(8),
            "began": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "block_size": block_size,
            **about,
        }
        self._parts = _Parts(path, max_bytes // NUM_PARTS)
        try:
            self._writer = _Writer(self._parts, header, block_size, start_ns, has_tenant_names)
        except BaseException:
            self._parts.close()
            raise
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-recording", daemon=True)
        self._thread.start()

    # For the engine thread.

    def on_queued(self, request: Request, now_ns: int) -> None:
        self._enqueue(1 + request.num_prompt_tokens // 4, _Writer.queued, request, now_ns)

    def on_news(self, news: PlanNews) -> None:
        """Do nothing: admissions and preemptions show in the rows of a step."""

    def on_step(self, stats: StepStats) -> None:
        self._enqueue(1 + len(stats.rows), _Writer.step, stats)

    def on_finish(self, stats: RequestStats) -> None:
        if not self._enqueue(1, _Writer.finish, stats) and len(self._lost_ends) < self._max_queued_rows:
            self._lost_ends.append(stats.request_id)

    def on_turn(self, parts_ns: Mapping[str, int]) -> None:
        self._enqueue(1, _Writer.turn, parts_ns)

    def on_engine(self) -> None:
        """Record a new engine, after a restart or another load: it has no requests, and counts its steps from 0."""
        self._enqueue(1, _Writer.restart)

    def _enqueue(self, num_rows: int, *report: object) -> bool:
        """Queue a report. Return False if it was dropped, since the queue is full."""
        if self._num_rows_queued - self._num_rows_taken >= self._max_queued_rows:
            self.num_lost += 1
            return False
        self._num_rows_queued += num_rows
        self._queue.append((num_rows, *report))
        return True

    # For any thread.

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write all reports and close the file. Idempotent. Gives up with a warning after `timeout_s`."""
        self._is_closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.warning("the end of the recording is not written yet after %g s: its disk is slow or hangs", timeout_s)

    # The writer's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing.wait(POLL_S):
                self._settle()
            self._settle()
            self._writer.close(self.num_lost)
        except ConfigError as error:
            _logger.error("the recording ends here: %s", error)
        except OSError as error:
            _logger.error("the recording ends here, it can't be written: %s", error)
        except Exception:
            _logger.exception("the recording ends here")
        finally:
            self._max_queued_rows = 0
            self._queue.clear()
            self._parts.close()

    def _settle(self) -> None:
        queue, writer = self._queue, self._writer
        num_lost_ends = len(self._lost_ends)  # before the queue's length, so that the loop writes all that came before them
        for _ in range(len(queue)):
            writer.turn_over_if_full()
            num_rows, write, *arguments = queue.popleft()
            write(writer, *arguments)
            self._num_rows_taken += num_rows
        for _ in range(num_lost_ends):
            writer.forget(self._lost_ends.popleft())
        writer.note_lost(self.num_lost)
        writer.flush()


class _Writer:
    """Turns reports into lines of the recording."""

    def __init__(
        self,
        parts: _Parts,
        header: Mapping[str, object],
        block_size: int,
        start_ns: int,
        has_tenant_names: bool,
    ) -> None:
        self._parts = parts
        self._header = header
        self._start_ns = start_ns
        self._has_tenant_names = has_tenant_names
        self._block_size = block_size
        self._ids = PrefixIds(block_size)
        self._num_requests = 0
        self._numbers: dict[str, int] = {}
        """Request id -> its number in the file, until it ends."""
        self._ended: OrderedDict[str, int] = OrderedDict()
        """The same for requests that ended recently."""
        self._lives: dict[str, tuple[Request, int, dict[str, object]]] = {}
        """Request id -> the request, the parent of its first block with generated tokens, and its line."""
        self._tenants: dict[str, int] = {}
        self._next_context: dict[int, int] = {}
        """Number of a request -> `context_len` after its last row in this part."""
        self._part_names: tuple[str, ...] = ()
        self._pending: tuple[dict[str, object], Mapping[str, int]] | None = None
        """The line of a step whose turn has not ended, and its parts so far."""
        self._later: list[dict[str, object]] = []
        """Lines that must follow the pending one."""
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_beginning_bytes = 0
        """Size of this part's header and of the requests repeated in it."""
        self._num_lost = 0
        self._begin_part()

    # Reports, in order.

    def queued(self, request: Request, now_ns: int) -> None:
        number = self._new_number(request.request_id)
        ref = request.adapter
        adapter = b"" if ref is None else ref.fingerprint or b"%d" % ref.number  # not read yet: shares no prefix
        blocks, parent = self._ids.chain(self._ids.root(request.cache_salt, adapter), request.prompt_token_ids)
        sampling = request.sampling
        line: dict[str, object] = {
            "kind": "request",
            "id": number,
            "arrival": request.arrival_ns - self._start_ns,
            "queued": now_ns - self._start_ns,
            "prompt": request.num_prompt_tokens,
            "max": sampling.max_tokens,
            "tenant": self._tenant(request.tenant),
            "priority": request.priority,
            "blocks": blocks,
        }
        if any(request.waits):
            line["waits"] = {name: wait_ns for name, wait_ns in request.waits._asdict().items() if wait_ns}
        if request.background:
            line["background"] = True
        if request.deadline_ns is not None:
            line["deadline"] = request.deadline_ns - self._start_ns
        if sampling.beams is not None:
            line["beams"] = sampling.beams.width
        if ref is not None:
            line["adapter"] = ref.number
        self._lives[request.request_id] = (request, parent, line)
        self._say(line)

    def finish(self, stats: RequestStats) -> None:
        life = self._lives.get(stats.request_id)
        number = self.forget(stats.request_id)
        if number is None:
            number = self._refused(stats)
        first_ns = stats.first_token_ns
        line: dict[str, object] = {
            "kind": "end",
            "id": number,
            "at": stats.ended_ns - self._start_ns,
            "reason": stats.finish_reason.name.lower(),
            "first": None if first_ns is None else first_ns - self._start_ns,
            "output": stats.num_generated_tokens,
            "cached": stats.num_cached_tokens,
            "preempted": stats.num_preemptions,
        }
        if stats.reject_reason:
            line["why"] = stats.reject_reason
        if life is not None:
            request, parent, _ = life
            if stats.finish_reason is FinishReason.STOP:
                line["by"] = "text" if isinstance(request.stop_reason, str) else "token"
            if stats.num_generated_tokens and not stats.is_beam:
                begin = request.num_prompt_tokens // self._block_size * self._block_size
                tokens = (*request.prompt_token_ids[begin:], *request.output_token_ids)
                line["blocks"], _ = self._ids.chain(parent, tokens)
        self._say(line)

    def forget(self, name: str) -> int | None:
        """Forget an ended request. Return its number, or None if it is not in the recording."""
        self._lives.pop(name, None)
        number = self._numbers.pop(name, None)
        if number is not None:
            self._next_context.pop(number, None)
            self._ended[name] = number
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        return number

    def step(self, stats: StepStats) -> None:
        self._end_step({})
        line: dict[str, object] = {
            "kind": "step",
            "id": stats.step_id,
            "at": stats.planned_ns - self._start_ns,
            "end": stats.ended_ns - self._start_ns,
        }
        goes_on, rows = self._rows(stats)
        if goes_on:
            line["on"] = goes_on
        if rows:
            line["rows"] = rows
        if guesses := stats.counts.guesses:
            line["accepted"] = [guesses.get(row.request_id, (0, 0))[1] for row in stats.rows if row.samples > 1]
        line["state"] = (stats.num_running, stats.num_waiting, stats.num_blocks_free, stats.num_blocks_cached)
        line["held"] = stats.counts.num_blocks_held
        if stats.counts.num_repeated:
            line["repeated"] = stats.counts.num_repeated
        if stats.counts.waits_for:
            line["lacks"] = stats.counts.waits_for.value
        if stats.waited_ns:
            line["waited"] = stats.waited_ns
        self._pending = (line, stats.parts_ns)

    def turn(self, parts_ns: Mapping[str, int]) -> None:
        self._end_step(parts_ns)

    def restart(self) -> None:
        self._end_step({})
        for requests in (self._lives, self._numbers, self._next_context):
            requests.clear()
        self._say({"kind": "restart"})

    def note_lost(self, num_lost: int) -> None:
        if num_lost == self._num_lost:
            return
        if not self._num_lost:
            _logger.warning("the recording misses reports: its writer does not keep up, or the machine is busy")
        self._say({"kind": "lost", "count": num_lost - self._num_lost})
        self._num_lost = num_lost

    def close(self, num_lost: int) -> None:
        self._end_step({})
        self._say({"kind": "close", "lost": num_lost})
        self.flush()
        self._parts.close()
        if num_lost:
            _logger.warning("the recording misses %d reports in all", num_lost)

    # Lines.

    def _end_step(self, parts_ns: Mapping[str, int]) -> None:
        if self._pending is None:
            return
        (line, own_parts_ns), self._pending = self._pending, None
        parts = {**own_parts_ns, **parts_ns}
        names = tuple(parts)
        if names != self._part_names:
            self._part_names = names
            self._say({"kind": "parts", "names": names})
        line["parts"] = tuple(parts.values())
        later, self._later = self._later, []
        for one in (line, *later):
            self._say(one)

    def _rows(self, stats: StepStats) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Return the request numbers of the first rows, which only continue a decode, and (request number, query_len,
        context_len, samples) of all other rows."""
        goes_on: list[int] = []
        others: list[tuple[int, int, int, int]] = []
        next_context, void = self._next_context, stats.void
        for row in stats.rows:
            is_void = bool(void) and row.request_id in void
            number = self._number(row.request_id, is_void=is_void)
            context_len, query_len = row.context_len, row.query_len
            if query_len == 1 == row.samples and not others and next_context.get(number) == context_len:
                goes_on.append(number)
            else:
                others.append((number, query_len, context_len, row.samples))
            if number != NOBODY and not is_void:
                next_context[number] = context_len + query_len
        return goes_on, others

    def _number(self, name: str, *, is_void: bool) -> int:
        if isinstance(name, PaddingId):
            return NOBODY
        if is_void:
            return self._ended.get(name, NOBODY)
        number = self._numbers.get(name)
        return self._new_number(name) if number is None else number  # its arrival was lost

    def _refused(self, stats: RequestStats) -> int:
        self._num_requests += 1
        line: dict[str, object] = {
            "kind": "request",
            "id": self._num_requests,
            "arrival": stats.arrival_ns - self._start_ns,
            "prompt": stats.num_prompt_tokens,
            "tenant": self._tenant(stats.tenant),
        }
        self._say(line)
        return self._num_requests

    def _new_number(self, name: str) -> int:
        self._num_requests += 1
        self._numbers[name] = self._num_requests
        return self._num_requests

    def _tenant(self, tenant: str) -> int | str:
        if self._has_tenant_names:
            return tenant
        if tenant not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants[tenant] = len(self._tenants)
        return self._tenants.get(tenant, NOBODY)

    def _say(self, line: dict[str, object]) -> None:
        if self._pending is not None:
            self._later.append(line)
            return
        data = _encode(line).encode() + b"\n"
        self._lines.append(data)
        self._num_bytes += len(data)

    # Parts.

    def flush(self) -> None:
        if self._lines:
            self._parts.write(b"".join(self._lines))
            self._lines.clear()
            self._num_bytes = 0

    def turn_over_if_full(self) -> None:
        """Begin another file if the next line may not fit. Each file can be read without the earlier ones.

        A new file repeats at most as many bytes as it adds, even if that makes it larger than its limit.
        """
        if self._pending is not None or self._parts.has_room(self._num_bytes + LINE_BYTES):
            return
        if self._parts.size_bytes + self._num_bytes < 2 * self._num_beginning_bytes:
            return
        self.flush()
        self._parts.turn_over()
        self._begin_part()

    def _begin_part(self) -> None:
        self._next_context.clear()
        self._part_names = ()
        self._lines.append(_encode({**self._header, "part": self._parts.num_begun - 1}).encode() + b"\n")
        for _, _, line in self._lives.values():
            again = {key: value for key, value in line.items() if key != "blocks"}
            self._lines.append(_encode({**again, "again": True}).encode() + b"\n")
        self.flush()
        self._num_beginning_bytes = self._parts.size_bytes


class _Parts:
    """The files of a recording: FILE, which is being written, and FILE.1 and so on, the full parts before it."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        """Raises OSError, or ConfigError for a file that is not a recording or belongs to another server."""
        check_path(path)
        self._path = path
        self._part_bytes = part_bytes
        self.num_begun = 0
        self.size_bytes = 0
        """Size of the current part."""
        self._fd = self._open()

    def has_room(self, num_bytes: int) -> bool:
        return self.size_bytes + num_bytes <= self._part_bytes

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.size_bytes += len(data)

    def turn_over(self) -> None:
        """Rename the files, dropping the oldest, and open a new one. Raises OSError or ConfigError."""
        self.close()
        check_path(self._path)
        self._fd = self._open()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        for idx in range(NUM_PARTS - 1, 0, -1):
            older, newer = part_path(self._path, idx), part_path(self._path, idx - 1)
            if newer.exists():
                newer.replace(older)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND
        fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another server's `check_path` looks for it
        except OSError:
            os.close(fd)
            raise
        self.num_begun += 1
        self.size_bytes = 0
        return fd


def part_path(path: Path, idx: int) -> Path:
    """Return the path of the part begun `idx` parts ago, such as FILE.1. For 0 it is FILE."""
    return path.with_name(f"{path.name}.{idx}") if idx else path


def check_path(path: Path) -> None:
    """Raise ConfigError if a recording can't be started at this path. Called before a model is loaded."""
    for idx in range(NUM_PARTS):
        _check_part(part_path(path, idx))
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} for the recording.", remedy="Make it, or name another with --record.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"The folder {folder} of the recording can't be written to.", remedy="Name another with --record.")


def _check_part(path: Path) -> None:
    """Raise ConfigError unless the path is free or an old recording. A power loss may have cut off its first line."""
    if not os.path.lexists(path):
        return
    remedy = "Name another file with --record, or move this one away."
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError(f"{path} is not a regular file.", remedy=remedy)
    try:
        with path.open("rb") as file:
            first = file.readline(LINE_BYTES)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"Another server writes its recording to {path}.", remedy=remedy) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}.", remedy=remedy) from None
    if not first.startswith(BEGINNING) and not BEGINNING.startswith(first):
        raise ConfigError(f"{path} is not a recording, so it is not overwritten.", remedy=remedy)
