"""The registry of a model's LoRA adapters: names that clients use, their files, and the adapters that are packed in memory.

The server looks up names here, and the scheduler uses the registry as an `AdapterSource`. Threads read and pack adapters. When
memory is full, an adapter is evicted (`_make_room` says which), and read again when needed. An `AdapterRef` means the content
that was read first. If a later reading finds other content, it fails, and the next request gets a new adapter.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import Clock, WallClock
from penstock.config.units import format_size
from penstock.types.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterOutlook, AdapterRef, AdapterState, PackedAdapter
from penstock.types.errors import ConfigError, ModelError, PenstockError, Rejected, RejectReason
from penstock.types.stats import AdapterStats

if TYPE_CHECKING:  # this imports NumPy, which would delay a server's start
    from penstock.models.adapter_files import AdapterFiles

    AdapterReader = Callable[[Path, AdapterFiles], PackedAdapter]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Names that are looked up in the folder of adapters, up to one level deep."""
MAX_NAMES = 100_000
"""Most names, some 300 bytes each. A further name replaces an unused one that was found in the folder."""
MAX_ASKED = 64
"""Most calls of `load` that have not ended."""
_MAX_NAME = 200
_FAILURE_NS = 10_000_000_000
"""Time until a failed adapter is read again, so that clients can't make us read a damaged file all the time."""
_MAX_BEFORE = 256
"""Most queue entries that are searched to estimate an adapter's wait. Beyond them, the adapter counts as the last one."""
_STUCK_NS = 5_000_000_000
"""A thread that reads one adapter for longer counts as stuck at its disk. Another thread then reads the next adapter, and
`close` does not wait."""
_MAX_THREADS = 4

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Adapter:
    """An adapter in the registry, with or without a name. The registry's lock guards all but the first four fields."""

    number: int
    path: Path
    is_trusted: bool
    """Whether the files may lie anywhere: the settings name the path, or another process has checked it."""
    is_found: bool
    """The name was found in the folder, or given by another process. Such a name makes room for others."""
    fingerprint: bytes = b""
    """The hash of its files, empty before the first reading."""
    reference: Callable[[], AdapterRef | None] = lambda: None
    """Returns the requests' shared reference, or None if no request has it."""
    packed: PackedAdapter | None = None
    is_retired: bool = False
    """The name was unloaded, or means another adapter now."""
    was_used: bool = False
    """The scheduler has used the adapter since it was loaded."""
    failure: str = ""
    reason: RejectReason = RejectReason.INVALID
    failed_at_ns: int = 0
    has_changed: bool = False
    """The files have other content now, so the adapter can never be loaded again."""
    is_doubted: bool = False
    """Another process could not load it, or the model was unloaded. `find` checks whether its files are there and the same."""
    stamp: object = None
    """`_stamp` of the files at the last reading."""
    num_pages: int = 0
    """Blocks of the KV pool that the adapter takes; 0 before the first load."""

    @property
    def is_held(self) -> bool:
        return self.reference() is not None

    @property
    def frees_name(self) -> bool:
        """Whether the adapter can't be read, so that its name may be given to another. Never for a name in the settings."""
        return self.is_found and bool(self.failure)

    def refer(self) -> AdapterRef:
        ref = self.reference()
        if ref is None:
            ref = AdapterRef(self.number, self.fingerprint)
            self.reference = weakref.ref(ref)
        return ref


@dataclass(slots=True)
class _LoadCall:
    """A client's call of `Adapters.load`: the name to register, the adapter, and the future that the client waits for."""

    name: str
    adapter: _Adapter
    may_replace: bool
    ref: AdapterRef
    done: Future[AdapterRef] = field(default_factory=Future)


@dataclass(slots=True)
class _Reading:
    """A thread's reading of one adapter's files, and the result: the packed adapter and its files' hash, or a failure."""

    adapter: _Adapter
    stamp: object
    """`_stamp` of the files when the reading began."""
    began_ns: int
    num_bytes: int = 0
    """Memory for the reading, beside the packed adapters."""
    packed: PackedAdapter | None = None
    content: bytes = b""
    failure: str = ""
    reason: RejectReason = RejectReason.UNAVAILABLE


class Adapters:
    """A registry of adapters by name. Any thread may call any method. Only `find`, `look_up` and `close` wait for a disk."""

    def __init__(
        self,
        *,
        modules: Mapping[str, Path] | None = None,
        folder: Path | None = None,
        max_in_memory: int = 64,
        clock: Clock | None = None,
    ) -> None:
        """`modules`: names and paths in the settings. Other names are looked up in `folder`. None is read before `connect`."""
        if max_in_memory < 1:
            raise ConfigError(f"--max-cpu-loras is {max_in_memory}.", remedy="Set it to at least 1: one adapter must fit.")
        self._read: AdapterReader | None = None
        """None while the registry is closed."""
        self._max_bytes = 0
        self._folder = None if folder is None else _resolved(folder)
        self._max_in_memory = max_in_memory
        self._clock = clock or WallClock()
        self._numbers = count(1)
        self._by_number: dict[int, _Adapter] = {}
        self._names = {name: self._add(path, is_trusted=True) for name, path in (modules or {}).items()}
        self._modules = [adapter.path for adapter in self._names.values()]
        self._retired: dict[int, _Adapter] = {}
        """Adapters that had a reference when they lost their name."""
        self._in_memory: OrderedDict[int, _Adapter] = OrderedDict()
        """Packed adapters, the most recently used last."""
        self._num_bytes = 0
        """Bytes of the packed adapters."""
        self._urgent: dict[int, None] = {}
        """Numbers of adapters to load first, in order."""
        self._others: dict[int, None] = {}
        """Numbers of adapters to load after the urgent ones, in order."""
        self._asked: dict[int, _LoadCall] = {}
        self._reading: dict[int, _Reading] = {}
        self._counts = AdapterStats()
        self._num_pages = 0
        """Sum of `num_pages` over all loads, for their mean."""
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._threads: set[threading.Thread] = set()
        self._session = 0
        """Grows when the registry is closed. Threads of an earlier session drop what they read."""

    def connect(self, read: AdapterReader, *, max_bytes: int) -> None:
        """Begin to load adapters, for a model that was loaded just now. They may take `max_bytes`, including those being read.

        `read` reads an adapter and packs it. It raises ModelError for one that the model or its executor can't compute.
        """
        with self._changed:
            self._read, self._max_bytes = read, max_bytes

    # --- names ---

    def known(self, name: str) -> AdapterRef | None:
        """Return the adapter with this name without reading the disk, or None if only `find` can decide."""
        with self._changed:
            adapter = self._names.get(name)
            return None if adapter is None or adapter.failure or adapter.is_doubted else adapter.refer()

    def may_find(self, name: str) -> bool:
        """Return whether `find` may succeed for a name that is not `known`, for example because its file is new."""
        return name in self._names or (self._folder is not None and len(name) <= _MAX_NAME and bool(NAME.fullmatch(name)))

    def find(self, name: str) -> AdapterRef | None:
        """Return the adapter whose name is registered or in the folder, or None. Looks at the disk, but opens no file.

        Waits for the disk unless the adapter is `known`. Raises ConfigError for too many names, and OSError.
        """
        if (known := self.known(name)) is not None:
            return known
        with self._changed:
            before = self._names.get(name)
        path = self.look_up(name) if before is None or before.is_found else before.path  # outside the lock
        if path is None:
            with self._changed:
                if before is not None and self._names.get(name) is before:
                    self.unload(name)
            return None
        stamp = _stamp(path)
        with self._changed:
            adapter = self._names.get(name)
            if adapter is None:
                if before is not None and not before.is_found:  # it was unloaded meanwhile
                    return None
                self._make_room_for_name(name)
                adapter = self._names[name] = self._add(path, is_found=True)
            elif self._is_replaceable(adapter, stamp):
                adapter = self._renew(name, adapter, path if adapter.is_found else adapter.path)
            adapter.is_doubted = False
            return adapter.refer()

    def look_up(self, name: str) -> Path | None:
        """Return the path of an adapter in the folder, or None. A link that leaves the folder does not count.

        Reads the disk. Raises OSError.
        """
        if self._folder is None or len(name) > _MAX_NAME or not NAME.fullmatch(name):
            return None
        for path in (self._folder / name, self._folder / f"{name}.gguf"):
            is_adapter = (path / CONFIG_FILE).is_file() or (path.suffix == ".gguf" and path.is_file())
            if is_adapter and _resolved(path).is_relative_to(self._folder):
                return path
        return None

    def with_content(self, fingerprint: bytes, path: Path) -> AdapterRef:
        """Return the adapter whose files have this hash, as another process of the same cluster read them at `path`.

        Reads nothing yet. Raises ConfigError for too many adapters.
        """
        name = fingerprint.hex()
        with self._changed:
            adapter = self._names.get(name)
            if adapter is not None:
                may_retry = bool(adapter.failure) and self._clock.now_ns() - adapter.failed_at_ns >= _FAILURE_NS
                if may_retry or adapter.is_doubted:
                    self.unload(name)
                    adapter = None
            if adapter is None:
                self._make_room_for_name(name)
                # Trusted, because the other process has checked the path.
                adapter = self._names[name] = self._add(path, is_trusted=True, is_found=True)
                adapter.fingerprint = fingerprint
            return adapter.refer()

    def doubt(self, ref: AdapterRef) -> None:
        """Note that another process could not load the adapter. If its files have changed, the next `find` has them read."""
        with self._changed:
            self._by_number[ref.number].is_doubted = True

    def has(self, name: str) -> bool:
        """Return whether the name is registered, or was found in the folder before."""
        return name in self._names

    def failure(self, name: str) -> Rejected | None:
        """Return why the adapter with this name can't be loaded, or None if its loading has not failed."""
        with self._changed:
            adapter = self._names.get(name)
            if adapter is None or not self._has_failed(adapter):
                return None
            return Rejected(adapter.reason, adapter.failure, param="model")

    def path(self, ref: AdapterRef) -> Path:
        with self._changed:
            return self._by_number[ref.number].path

    def registered(self) -> dict[str, Path]:
        """Return the folder or GGUF file of each name. A name in the adapters' folder counts once a request has used it.

        There it does not count while its adapter can't be read.
        """
        with self._changed:
            names = self._names.copy()
        return {name: adapter.path for name, adapter in names.items() if not adapter.frees_name}

    def load(self, name: str, path: Path, *, may_replace: bool = False) -> Future[AdapterRef]:
        """Begin to load an adapter, and register its name when that succeeds. Return at once.

        `path` must be in the folder or in a path of the settings. If the caller cancels the future, the name is not registered.
        Raises ConfigError for an unusable name, and `Rejected` if too many loads wait. The future fails with these too, and
        with ModelError for a bad adapter.
        """
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"{name[:_MAX_NAME]!r} can't be the name of an adapter.", remedy=f"Use 1 to {_MAX_NAME} printable characters."
            )
        with self._changed:
            self._check_free(name, may_replace=may_replace)
            if self._read is None:
                raise _leaving(path)
            if len(self._asked) >= MAX_ASKED:
                detail = f"{MAX_ASKED} adapters are being loaded by name already."
                raise Rejected(RejectReason.QUEUE_FULL, detail, retry_after_s=1.0)
            adapter = self._add(path)
            asked = self._asked[adapter.number] = _LoadCall(name, adapter, may_replace, adapter.refer())
            self._want(adapter.number, is_urgent=True)
            return asked.done

    def unload(self, name: str) -> bool:
        """Forget a name, and return whether it was known. Requests keep its adapter until they end."""
        with self._changed:
            adapter = self._names.pop(name, None)
            if adapter is not None:
                self._retire(adapter)
            return adapter is not None

    # --- the scheduler's `AdapterSource` ---

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        with self._changed:
            self._want(ref.number, is_urgent=is_urgent)

    def state(self, number: int) -> AdapterState:
        with self._changed:
            adapter = self._by_number[number]
            if adapter.packed is not None:
                if not adapter.was_used:
                    adapter.was_used = True
                    self._changed.notify_all()  # a load that waited for room can go on
                self._in_memory.move_to_end(number)
                return AdapterState(packed=adapter.packed)
            return AdapterState(None, adapter.failure, adapter.reason) if self._has_failed(adapter) else AdapterState()

    def outlook(self, number: int) -> AdapterOutlook:
        with self._changed:
            adapter, counts = self._by_number[number], self._counts
            num_loads = max(1, counts.num_loads)
            likely_pages = adapter.num_pages or round(self._num_pages / num_loads)
            num_left = 0 if adapter.packed is not None else self._num_loads_until(number)
            return AdapterOutlook(adapter.num_pages, likely_pages, num_left * counts.load_ns // num_loads)

    def listen(self, wake: Callable[[], None]) -> None:
        with self._changed:
            self._wake = wake

    @property
    def stats(self) -> AdapterStats:
        with self._changed:
            self._sweep()
            return replace(
                self._counts, num_registered=len(self._names), num_in_memory=len(self._in_memory), num_bytes=self._num_bytes
            )

    def names_of(self, numbers: Collection[int]) -> list[str]:
        """Return the names of these adapters. O(names)."""
        with self._changed:
            names = self._names.copy()
        return [name for name, adapter in names.items() if adapter.number in numbers]

    def close(self) -> None:
        """Stop loading, and drop the model and all adapters in memory. Idempotent.

        Names stay, and `connect` can be called again.
        """
        with self._changed:
            self._session += 1
            self._changed.notify_all()
            threads, self._threads = self._threads, set()
            self._read, self._wake = None, lambda: None
            self._urgent, self._others, self._reading = {}, {}, {}
            asked, self._asked = self._asked, {}
            for one in asked.values():
                self._retire(one.adapter)
            for adapter in list(self._in_memory.values()):
                self._drop_packed(adapter)
            for name, named in list(self._names.items()):
                if not (named.is_held or named.failure):  # the files may have changed when the model is loaded again
                    self._renew(name, named, named.path).is_doubted = named.is_found
        for one in asked.values():
            if one.done.set_running_or_notify_cancel():
                one.done.set_exception(_leaving(one.adapter.path))
        until_ns = self._clock.now_ns() + _STUCK_NS
        for thread in threads:
            thread.join(timeout=max(0.0, (until_ns - self._clock.now_ns()) / 1e9))

    @cached_property
    def _roots(self) -> list[Path]:
        return [*([] if self._folder is None else [self._folder]), *map(_resolved, self._modules)]

    # --- for callers that hold the lock ---

    def _check_free(self, name: str, *, may_replace: bool) -> None:
        adapter = self._names.get(name)
        if adapter is not None and not (may_replace or adapter.frees_name):
            raise ConfigError(f"An adapter is called {name!r} already.", remedy="Unload it, or set load_inplace.")

    def _make_room_for_name(self, name: str) -> None:
        """If there are `MAX_NAMES`, forget one from the folder whose adapter is neither in memory nor in use."""
        if name in self._names or len(self._names) < MAX_NAMES:
            return
        for other, adapter in self._names.items():
            if adapter.is_found and not (adapter.is_held or adapter.packed):
                self.unload(other)
                return
        raise ConfigError(f"There are already {MAX_NAMES} names of adapters.", remedy="Unload some of them.")

    def _add(self, path: Path, *, is_trusted: bool = False, is_found: bool = False) -> _Adapter:
        adapter = _Adapter(next(self._numbers), path, is_trusted, is_found)
        self._by_number[adapter.number] = adapter
        return adapter

    def _renew(self, name: str, old: _Adapter, path: Path) -> _Adapter:
        """Give the name to a new adapter, whose files are read anew."""
        self._retire(old)
        adapter = self._names[name] = self._add(path, is_trusted=old.is_trusted, is_found=old.is_found)
        return adapter

    def _retire(self, adapter: _Adapter) -> None:
        """Mark an adapter that has lost its name. It stays until no request refers to it."""
        adapter.is_retired = True
        self._retired[adapter.number] = adapter
        self._sweep()

    def _sweep(self) -> None:
        """Forget adapters that have lost their name and that no request refers to."""
        for adapter in [one for one in self._retired.values() if not one.is_held]:
            self._drop_packed(adapter)
            del self._by_number[adapter.number], self._retired[adapter.number]

    def _drop_packed(self, adapter: _Adapter) -> None:
        if adapter.packed is not None:
            del self._in_memory[adapter.number]
            self._num_bytes -= adapter.packed.num_bytes
        adapter.packed, adapter.was_used = None, False

    def _has_failed(self, adapter: _Adapter) -> bool:
        is_fresh = self._clock.now_ns() - adapter.failed_at_ns < _FAILURE_NS
        return bool(adapter.failure) and (adapter.has_changed or is_fresh)

    def _is_replaceable(self, adapter: _Adapter, stamp: object) -> bool:
        """Return whether a new adapter should replace a failed or doubted one: its files changed, or it may be read again."""
        if adapter.is_doubted and adapter.stamp != stamp:
            return True
        return bool(adapter.failure) and bool(adapter.fingerprint or not self._has_failed(adapter) or adapter.stamp != stamp)

    def _want(self, number: int, *, is_urgent: bool) -> None:
        adapter = self._by_number[number]
        if adapter.packed is not None or self._has_failed(adapter) or self._read is None:
            return
        if number not in self._reading and number not in self._urgent:
            if is_urgent:
                self._others.pop(number, None)
            (self._urgent if is_urgent else self._others)[number] = None
        self._start_thread()
        self._changed.notify_all()

    def _num_loads_until(self, number: int) -> int:
        if number in self._reading:
            return 1
        wanted = islice(chain(self._urgent, self._others), _MAX_BEFORE)
        num_wanted = len(self._urgent) + len(self._others)
        num_before = next((place for place, one in enumerate(wanted) if one == number), num_wanted)
        return num_before + 1 + bool(self._reading)

    def _start_thread(self) -> None:
        """Start another loading thread if adapters wait and all threads are reading."""
        if not self._is_wanted or len(self._reading) < len(self._threads) or len(self._threads) == _MAX_THREADS:
            return
        # A daemon: if its disk hangs, the process ends without it.
        thread = threading.Thread(target=self._run, args=(self._session,), name="adapters", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # at a limit of threads: those that there are read on
            _log.warning("no further thread to read adapters: %s", error)
            return
        self._threads.add(thread)

    @property
    def _is_wanted(self) -> bool:
        return bool(self._urgent or self._others)

    def _until_stuck_s(self) -> float:
        """Return the seconds until every reading thread counts as stuck. At 0, another thread may read."""
        began_ns = max((one.began_ns for one in self._reading.values()), default=None)
        return 0.0 if began_ns is None else max(0, began_ns + _STUCK_NS - self._clock.now_ns()) / 1e9

    def _next(self) -> _Adapter | None:
        """Take the next adapter to load from the queues, or return None.

        Adapters that are not urgent wait while memory is full of adapters that the scheduler has not used yet. Adapters that no
        request refers to are skipped, so that a refused request evicts nothing.
        """
        if self._until_stuck_s():
            return None
        has_room = len(self._in_memory) < self._max_in_memory or any(one.was_used for one in self._in_memory.values())
        for queue in (self._urgent, self._others if has_room else {}):
            while queue:
                number = next(iter(queue))
                del queue[number]
                adapter = self._by_number.get(number)
                if adapter is not None and adapter.is_held:
                    return adapter
        return None

    def _make_room(self, num_bytes: int, num_adapters: int = 0) -> None:
        """Evict adapters until there is room. Which of two adapters goes first is decided in this order:

        1. One that no request refers to.
        2. One that has a name. The files of one without a name may have changed.
        3. One that was used since it was loaded.
        4. The least recently used one.
        """
        self._sweep()
        while self._in_memory and (
            len(self._in_memory) + num_adapters > self._max_in_memory
            or self._num_bytes + sum(one.num_bytes for one in self._reading.values()) + num_bytes > self._max_bytes
        ):
            # `min` returns the first of equals.
            self._drop_packed(min(self._in_memory.values(), key=lambda one: (one.is_held, one.is_retired, not one.was_used)))
            self._counts = replace(self._counts, num_evictions=self._counts.num_evictions + 1)

    def _store(self, adapter: _Adapter, packed: PackedAdapter, content: bytes) -> None:
        self._make_room(packed.num_bytes, num_adapters=1)
        if adapter.number not in self._by_number:  # forgotten meanwhile, because it had neither a name nor requests
            return
        adapter.packed, adapter.was_used, adapter.failure = packed, False, ""
        adapter.fingerprint = content
        ref = adapter.reference()
        if ref is not None:
            ref.fingerprint = content
        adapter.num_pages = packed.num_pages
        self._in_memory[adapter.number] = adapter
        self._num_bytes += packed.num_bytes

    def _complete(self, asked: _LoadCall) -> Callable[[], None] | None:
        """Complete a `load`: register the name, or fail. Return a function that resolves the future, to be called unlocked."""
        adapter, done = asked.adapter, asked.done
        if not done.set_running_or_notify_cancel():
            self._retire(adapter)
            return None
        try:
            if adapter.failure:
                is_fault = adapter.reason is RejectReason.INVALID
                raise ModelError(adapter.failure) if is_fault else Rejected(adapter.reason, adapter.failure)
            self._check_free(asked.name, may_replace=asked.may_replace)
            self._make_room_for_name(asked.name)
        except PenstockError as error:
            self._retire(adapter)
            return partial(done.set_exception, error.with_traceback(None))  # the traceback has the reference
        replaced = self._names.get(asked.name)
        self._names[asked.name] = adapter
        if replaced is not None:
            self._retire(replaced)
        return partial(done.set_result, asked.ref)

    # --- the thread ---

    def _run(self, session: int) -> None:
        while True:
            with self._changed:
                adapter = None
                while session == self._session and (adapter := self._next()) is None:
                    if len(self._threads) > 1 and not self._is_wanted:
                        self._threads.discard(threading.current_thread())
                        return
                    self._changed.wait(self._until_stuck_s() or None)
                if adapter is None:
                    return
                if self._reading:
                    _log.warning("%d threads that read adapters have been stuck for 5 s or more", len(self._reading))
                reading = self._reading[adapter.number] = _Reading(adapter, b"", self._clock.now_ns())
                self._start_thread()
                read = self._read
            assert read is not None, "a registry that is not closed is connected"
            reading.stamp = _stamp(adapter.path)
            self._load(reading, read)
            with self._changed:
                if session != self._session:
                    return
                resolve, wake = self._finish(reading), self._wake
                self._changed.notify_all()
            if resolve is not None:
                resolve()
            wake()
            del adapter, reading, resolve

    def _finish(self, reading: _Reading) -> Callable[[], None] | None:
        """Record the result of a reading. Return the result of `_complete`, if a `load` waits. The caller holds the lock."""
        adapter, packed, counts, now_ns = reading.adapter, reading.packed, self._counts, self._clock.now_ns()
        del self._reading[adapter.number]
        adapter.stamp = reading.stamp
        if packed is not None and adapter.fingerprint not in (b"", reading.content):
            packed, adapter.has_changed = None, True
            reading.failure = f"{adapter.path.name}: the adapter's files changed while it was used. Ask again for the new one."
        if packed is None:
            adapter.failure, adapter.failed_at_ns = reading.failure, now_ns
            # A client can't be to blame for an adapter that was read before.
            adapter.reason = RejectReason.UNAVAILABLE if adapter.fingerprint else reading.reason
            self._counts = replace(counts, num_failures=counts.num_failures + 1)
        else:
            load_ns = counts.load_ns + now_ns - reading.began_ns
            self._counts = replace(counts, num_loads=counts.num_loads + 1, load_ns=load_ns)
            self._num_pages += packed.num_pages
            self._store(adapter, packed, reading.content)
        asked = self._asked.pop(adapter.number, None)
        return None if asked is None else self._complete(asked)

    def _load(self, reading: _Reading, read: AdapterReader) -> None:
        """Read an adapter and pack it. Errors go into `reading`, because the thread must go on."""
        from penstock.models.adapter_files import AdapterFiles

        path = reading.adapter.path
        roots = None if reading.adapter.is_trusted else self._roots
        files = AdapterFiles(roots=roots, timeout_s=30.0, take=partial(self._take, path, reading))
        try:
            packed = read(path, files)
            if packed.num_bytes > self._max_bytes:
                raise _too_large(path, packed.num_bytes, self._max_bytes)
            reading.packed, reading.content = packed, files.digest
        except PenstockError as error:
            _log.warning("an adapter can't be loaded: %s", error)
            reading.failure = error.without_folders()[:1000]
            is_of_disk = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
            if isinstance(error, Rejected):
                reading.reason = error.reason
            elif not is_of_disk:
                reading.reason = RejectReason.INVALID
        except MemoryError:
            _log.exception("%s: there is no memory for the adapter", path)
            reading.failure = f"{path.name}: there is no memory for the adapter."
        except Exception as error:
            _log.exception("%s: the adapter can't be loaded", path)
            reading.failure = f"{path.name}: {type(error).__name__}. The log has the cause."

    def _take(self, path: Path, reading: _Reading, num_bytes: int) -> None:
        """Reserve `num_bytes` for reading an adapter's files, and evict adapters for them. Raises ModelError or `Rejected`."""
        with self._changed:
            if self._reading.get(reading.adapter.number) is not reading:  # the registry was closed meanwhile
                raise _leaving(path)
            reading.num_bytes = 0
            if num_bytes > self._max_bytes:
                raise _too_large(path, num_bytes, self._max_bytes)
            if num_bytes + sum(one.num_bytes for one in self._reading.values()) > self._max_bytes:
                detail = f"{path}: other adapters are being read, and leave no memory for this one. Try again."
                raise Rejected(RejectReason.UNAVAILABLE, detail)
            self._make_room(num_bytes)
            reading.num_bytes = num_bytes


def _leaving(path: Path) -> Rejected:
    return Rejected(RejectReason.UNAVAILABLE, f"{path}: the adapter was not loaded: the model leaves.")


def _too_large(path: Path, num_bytes: int, max_bytes: int) -> ModelError:
    return ModelError(
        f"{path}: reading the adapter takes up to {format_size(num_bytes)}, and adapters may take {format_size(max_bytes)}.",
        remedy="Raise --max-cpu-loras or --max-lora-rank, which decide that limit, or use a smaller adapter.",
    )


def _stamp(path: Path) -> object:
    found: list[tuple[int, ...] | None] = []
    for file in (path,) if path.suffix == ".gguf" else (path / CONFIG_FILE, path / WEIGHTS_FILE):
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except (OSError, ValueError):  # a null, or what no path can hold
            found.append(None)
    return found


def _resolved(path: Path) -> Path:
    """Return the path with links resolved. `Path.resolve` would raise for a link to itself."""
    return Path(os.path.realpath(path))
