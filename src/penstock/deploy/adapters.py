"""The registry of a model's adapters: names that clients use, the files behind them, and those that are in memory, packed.

`RunningModel` has one for each model that is served with adapters. The server asks it for names, and has adapters loaded and
unloaded; the scheduler sees it as an `AdapterSource`. A thread of its own reads files and packs them, in the order in which
they were wanted. A name costs an entry until somebody asks for it, and nothing is read before. Memory has room for a number of
adapters: the one that was asked for least recently leaves it, and is read again when it is wanted.

A request that has an `AdapterRef` has the content that was read first for it, whatever becomes of the name and of the files:

    nobody has the reference         the adapter leaves memory first; without a name it is forgotten at once
    somebody has it                  it leaves memory after those, and is read again
    somebody has it, without a name  it leaves memory last: its files may have been replaced

An adapter's content never changes under its number. One that is read again and is another fails to load, and the next request
for the name gets another number.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import Clock, WallClock
from penstock.config.units import format_size
from penstock.types.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterOutlook, AdapterRef, AdapterState, PackedAdapter
from penstock.types.errors import ConfigError, ModelError, PenstockError, Rejected, RejectReason
from penstock.types.stats import AdapterStats

if TYPE_CHECKING:  # with NumPy, which a server starts without
    from penstock.models.adapter import AdapterFactors, AdapterPacker
    from penstock.models.adapter_files import AdapterFiles

    AdapterReader = Callable[[Path, AdapterFiles], AdapterFactors]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Names that are looked up in the folder of adapters: a folder there, or one in it."""
MAX_NAMES = 100_000
"""Names that there may be, some 300 bytes each. Another one takes the place of one that was found in the folder."""
MAX_ASKED = 64
"""Loads by name that may be under way at once."""
_MAX_NAME = 200
_FAILURE_NS = 10_000_000_000
"""A failure holds for so long: a client that asks again and again makes nobody read a damaged file all the time, and one who
mends it need not wait."""
_MAX_FAILURE = 1000
_MAX_BEFORE = 256
"""Loads that are counted one by one to say how long another will take."""
_READ_TIMEOUT_S = 30.0
_STUCK_NS = 5_000_000_000
"""A thread that is at one adapter for longer may be at a disk that does not answer: another one, which waits for that from the
beginning, reads what is wanted next."""
_MAX_THREADS = 4
_CLOSE_TIMEOUT_S = 5.0
"""The end of a model waits so long for a thread that reads; one that hangs is left alone, and its adapter is dropped."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """A name that clients may use."""

    name: str
    path: Path
    """The folder of PEFT, or the GGUF file."""


@dataclass(slots=True)
class _Adapter:
    """An adapter by its number. Everything but `number`, `path` and `is_free` belongs to the registry's lock."""

    number: int
    path: Path
    is_free: bool
    """The settings name its path, so its files may lie anywhere."""
    fingerprint: bytes = b""
    """The hash of its files; empty until they were read for the first time."""
    reference: Callable[[], AdapterRef | None] = lambda: None
    """The object that requests have of it, as long as one has it."""
    packed: PackedAdapter | None = None
    is_retired: bool = False
    """It has no name any more."""
    is_taken: bool = False
    """Somebody has asked for it since it came to memory."""
    failure: str = ""
    reason: RejectReason = RejectReason.INVALID
    """The kind of failure."""
    failed_at_ns: int = 0
    is_lost: bool = False
    """Its files are another adapter's now: it fails for good."""
    stamp: object = None
    """The files as they were when they were read last."""
    num_loads: int = 0
    num_pages: int = 0
    """Blocks of the KV pool that it takes; 0 until it was loaded once."""

    @property
    def is_held(self) -> bool:
        """Somebody has the reference, such as a request that waits or runs."""
        return self.reference() is not None

    def refer(self) -> AdapterRef:
        """The reference."""
        ref = self.reference()
        if ref is None:
            ref = AdapterRef(self.number, self.fingerprint)
            self.reference = weakref.ref(ref)
        return ref


@dataclass(slots=True)
class _Name:
    path: Path
    is_free: bool = False
    """The settings name its path, so its files may lie anywhere."""
    is_found: bool = False
    """It was looked up in the folder, and can be again."""
    adapter: _Adapter | None = None
    """None until somebody asks for the name."""


@dataclass(slots=True)
class _Asked:
    """A load by name, which somebody waits for."""

    name: str
    adapter: _Adapter
    may_replace: bool
    ref: AdapterRef
    done: Future[AdapterRef] = field(default_factory=Future)


@dataclass(slots=True)
class _Counts:
    num_loads: int = 0
    load_ns: int = 0
    num_pages: int = 0
    """Blocks of the KV pool that all that were loaded take together."""
    num_failures: int = 0
    num_evictions: int = 0


@dataclass(slots=True)
class _Wanted:
    """Numbers whose loads have not begun, urgent ones first, otherwise in their order."""

    urgent: dict[int, None] = field(default_factory=dict)
    others: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Reading:
    """An adapter that a thread is at."""

    began_ns: int
    num_bytes: int = 0
    """Memory that it takes beside the adapters that are there."""


class Adapters:
    """An `AdapterSource`, and what the server does with names. All methods are for any thread, and none waits for a disk but
    `find`, which asks where a name lies that it does not know, and `close`.
    """

    def __init__(
        self,
        *,
        modules: Mapping[str, Path] | None = None,
        folder: Path | None = None,
        max_in_memory: int = 64,
        clock: Clock | None = None,
    ) -> None:
        """`modules` are registered names and their paths; names that are not are looked up in `folder`.

        Nothing is loaded before `connect`.
        """
        if max_in_memory < 1:
            raise ConfigError("No adapter fits into no memory.", remedy="Set --max-cpu-loras to 1 at least.")
        self._read: AdapterReader | None = None
        self._pack: AdapterPacker | None = None
        self._max_bytes = 0
        self._folder = None if folder is None else _resolved(folder)
        self._modules = tuple((modules or {}).values())
        self._max_in_memory = max_in_memory
        self._clock = clock or WallClock()
        self._names = {name: _Name(path, is_free=True) for name, path in (modules or {}).items()}
        self._numbers = count(1)
        self._by_number: dict[int, _Adapter] = {}
        self._retired: dict[int, _Adapter] = {}
        """Those without a name that somebody had when they lost it."""
        self._in_memory: OrderedDict[int, _Adapter] = OrderedDict()
        """Those that are packed; the one that was asked for last is the last."""
        self._num_bytes = 0
        """Bytes of all of them."""
        self._wanted = _Wanted()
        self._asked: dict[int, _Asked] = {}
        """By the adapter's number."""
        self._reading: dict[int, _Reading] = {}
        """The loads that threads are at, by the adapter's number."""
        self._counts = _Counts()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._threads: set[threading.Thread] = set()
        self._session = 0
        """Grows when the registry is closed: what a thread of an earlier session brings is dropped."""
        self._is_closed = True

    def connect(self, read: AdapterReader, pack: AdapterPacker, *, max_bytes: int) -> None:
        """The model is loaded, and adapters may be: those in memory and the reading of others take `max_bytes` at most.

        `read` and `pack` raise ModelError for adapters that the model, or its executor, does not compute.
        """
        with self._changed:
            self._read, self._pack, self._max_bytes = read, pack, max_bytes
            self._is_closed = False

    # --- names ---

    def known(self, name: str) -> AdapterRef | None:
        """The adapter of a name that the disk need not be asked for; None: there is none, or none before `find`."""
        with self._changed:
            entry = self._names.get(name)
            if entry is None:
                return None
            if entry.adapter is None and not entry.is_found:
                entry.adapter = self._add(entry.path, is_free=entry.is_free)
            return None if entry.adapter is None or entry.adapter.failure else entry.adapter.refer()

    def may_find(self, name: str) -> bool:
        """Whether `find` may have an adapter for a name that is not `known`: in the folder, or one that failed before."""
        return name in self._names or (self._folder is not None and len(name) <= _MAX_NAME and bool(NAME.fullmatch(name)))

    def find(self, name: str) -> AdapterRef | None:
        """The adapter of a name that is registered, or lies in the folder; None if there is none. It opens no file.

        It waits for the disk unless the adapter is `known`. Raises ConfigError if there are too many names, and OSError.
        """
        if (known := self.known(name)) is not None:
            return known
        with self._changed:
            entry = self._names.get(name)
        is_found = entry is None or entry.is_found
        path = self._look_up(name) if is_found else entry.path if entry else None  # the disk is asked without the lock
        if path is None:
            with self._changed:
                if entry is not None and self._names.get(name) is entry:
                    self.unload(name)
            return None
        stamp = _stamp(path)
        with self._changed:
            entry = self._names.get(name)
            if entry is None and not is_found:  # it was unloaded meanwhile
                return None
            if entry is None:
                self._make_place(name)
                entry = self._names[name] = _Name(path, is_found=is_found)
            adapter = entry.adapter
            if adapter is not None and self._may_be_another(adapter, stamp):
                self._retire(adapter)
                adapter = None
            if adapter is None:
                adapter = entry.adapter = self._add(entry.path, is_free=entry.is_free)
            return adapter.refer()

    def has(self, name: str) -> bool:
        """Whether the name is registered, or was found in the folder before."""
        return name in self._names

    def failure(self, name: str) -> Rejected | None:
        """Why the adapter of a name can't be had; None if nothing is known against it."""
        with self._changed:
            entry = self._names.get(name)
            adapter = entry.adapter if entry else None
            if adapter is None or not self._has_failed(adapter):
                return None
            return Rejected(adapter.reason, adapter.failure, param="model")

    def path(self, ref: AdapterRef) -> Path:
        """Where an adapter lies."""
        with self._changed:
            return self._by_number[ref.number].path

    def registered(self) -> list[Registered]:
        """The names that were registered, or asked for; never all that the folder has."""
        with self._changed:
            names = list(self._names.items())
        return [Registered(name, entry.path) for name, entry in names]

    def load(self, name: str, path: Path, *, may_replace: bool = False) -> Future[AdapterRef]:
        """Register a name once its adapter was read anew from its files, which lie in the folder or in paths of the settings.

        Returns at once. A caller that does not wait any more cancels the result; the name stays as it is then. Raises
        ConfigError for a name that can't be had, and `Rejected` if too many wait; the result raises these, and ModelError for
        an adapter that can't be had.
        """
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"{name[:_MAX_NAME]!r} is no name of an adapter.",
                remedy=f"Use 1 to {_MAX_NAME} characters that can be printed.",
            )
        with self._changed:
            self._check_free(name, may_replace=may_replace)
            if self._is_closed:
                raise Rejected(RejectReason.UNAVAILABLE, f"{path}: the adapter was not loaded: the model leaves.")
            if len(self._asked) >= MAX_ASKED:
                detail = f"{MAX_ASKED} adapters are being loaded by name already."
                raise Rejected(RejectReason.QUEUE_FULL, detail, retry_after_s=1.0)
            adapter = self._add(path, is_free=False)
            asked = self._asked[adapter.number] = _Asked(name, adapter, may_replace, adapter.refer())
            self._want(adapter.number, is_urgent=True)
            return asked.done

    def unload(self, name: str) -> bool:
        """Forget a name; False if it was not known. Requests that have its adapter end with it."""
        with self._changed:
            entry = self._names.pop(name, None)
            if entry is None:
                return False
            if entry.adapter is not None:
                self._retire(entry.adapter)
            return True

    # --- the source of the scheduler ---

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        with self._changed:
            self._want(ref.number, is_urgent=is_urgent)

    def state(self, number: int) -> AdapterState:
        with self._changed:
            adapter = self._by_number[number]
            if adapter.packed is not None:
                if not adapter.is_taken:
                    adapter.is_taken = True
                    self._changed.notify_all()  # a load that waited for room can go on
                self._in_memory.move_to_end(number)
                return AdapterState(packed=adapter.packed)
            return AdapterState(None, adapter.failure, adapter.reason) if self._has_failed(adapter) else AdapterState()

    def outlook(self, number: int) -> AdapterOutlook:
        with self._changed:
            adapter, counts = self._by_number[number], self._counts
            num_loads = max(1, counts.num_loads)
            num_pages = adapter.num_pages
            likely_pages = num_pages or round(counts.num_pages / num_loads)
            num_left = 0 if adapter.packed is not None else self._num_loads_until(number)
            return AdapterOutlook(num_pages, likely_pages, num_left * counts.load_ns // num_loads)

    def listen(self, wake: Callable[[], None]) -> None:
        with self._changed:
            self._wake = wake

    @property
    def stats(self) -> AdapterStats:
        with self._changed:
            self._sweep()
            counts = self._counts
            return AdapterStats(
                num_registered=len(self._names),
                num_in_memory=len(self._in_memory),
                num_bytes=self._num_bytes,
                num_loads=counts.num_loads,
                load_ns=counts.load_ns,
                num_failures=counts.num_failures,
                num_evictions=counts.num_evictions,
            )

    def close(self) -> None:
        """End the threads after the loads that they are at, and let go of the model and all that is in memory. Names stay: the
        registry can be connected again. Idempotent.
        """
        with self._changed:
            self._is_closed = True
            self._session += 1
            self._changed.notify_all()
            threads, self._threads = self._threads, set()
            self._read, self._pack, self._wake = None, None, lambda: None
            self._wanted, self._reading = _Wanted(), {}
            asked, self._asked = self._asked, {}
            for one in asked.values():
                self._retire(one.adapter)
            for adapter in list(self._in_memory.values()):
                self._let_go(adapter)
        for one in asked.values():
            if one.done.set_running_or_notify_cancel():
                detail = f"{one.adapter.path}: the adapter was not loaded: the model leaves."
                one.done.set_exception(Rejected(RejectReason.UNAVAILABLE, detail))
        until_ns = self._clock.now_ns() + int(_CLOSE_TIMEOUT_S * 1e9)
        for thread in threads:
            thread.join(timeout=max(0.0, (until_ns - self._clock.now_ns()) / 1e9))

    @cached_property
    def _roots(self) -> list[Path]:
        """Where the files of adapters lie that clients name. It asks the disk, once."""
        return [*([] if self._folder is None else [self._folder]), *map(_resolved, self._modules)]

    def _look_up(self, name: str) -> Path | None:
        """The path of an adapter in the folder that a client's name stands for; None if it lies elsewhere, or is none."""
        if self._folder is None or len(name) > _MAX_NAME or not NAME.fullmatch(name):
            return None
        for path in (self._folder / name, self._folder / f"{name}.gguf"):
            is_adapter = (path / CONFIG_FILE).is_file() or (path.suffix == ".gguf" and path.is_file())
            if is_adapter and _resolved(path).is_relative_to(self._folder):
                return path
        return None

    # --- what follows belongs to the lock ---

    def _check_free(self, name: str, *, may_replace: bool) -> None:
        if name in self._names and not may_replace:
            raise ConfigError(f"An adapter is called {name!r} already.", remedy="Unload it, or set load_inplace.")

    def _make_place(self, name: str) -> None:
        """Room for a name. The first that was found in the folder, and whose adapter nobody has, is forgotten for it."""
        if name in self._names or len(self._names) < MAX_NAMES:
            return
        for other, entry in self._names.items():
            if entry.is_found and not (entry.adapter and (entry.adapter.is_held or entry.adapter.packed)):
                self.unload(other)
                return
        raise ConfigError(f"{MAX_NAMES} adapters have names already.", remedy="Unload some of them.")

    def _add(self, path: Path, *, is_free: bool) -> _Adapter:
        number = next(self._numbers)
        adapter = self._by_number[number] = _Adapter(number, path, is_free)
        return adapter

    def _retire(self, adapter: _Adapter) -> None:
        """Nobody can ask for an adapter by its name any more. It stays for those who have it."""
        adapter.is_retired = True
        self._retired[adapter.number] = adapter
        self._sweep()

    def _sweep(self) -> None:
        """Forget the adapters without a name that nobody has any more."""
        for adapter in [one for one in self._retired.values() if not one.is_held]:
            self._let_go(adapter)
            del self._by_number[adapter.number], self._retired[adapter.number]

    def _let_go(self, adapter: _Adapter) -> None:
        """Take an adapter out of memory, if it is there."""
        if adapter.packed is not None:
            del self._in_memory[adapter.number]
            self._num_bytes -= adapter.packed.num_bytes
        adapter.packed, adapter.is_taken = None, False

    def _has_failed(self, adapter: _Adapter) -> bool:
        is_fresh = self._clock.now_ns() - adapter.failed_at_ns < _FAILURE_NS
        return bool(adapter.failure) and (adapter.is_lost or is_fresh)

    def _may_be_another(self, adapter: _Adapter, stamp: object) -> bool:
        """It failed, and its name stands for another now: time has passed, its files are others, or it was read before that."""
        return bool(adapter.failure) and bool(adapter.fingerprint or not self._has_failed(adapter) or adapter.stamp != stamp)

    def _want(self, number: int, *, is_urgent: bool) -> None:
        adapter = self._by_number[number]
        is_coming = number in self._reading or number in self._wanted.urgent
        if adapter.packed is not None or self._has_failed(adapter) or self._is_closed:
            return
        if not is_coming and is_urgent:
            self._wanted.others.pop(number, None)
            self._wanted.urgent[number] = None
        elif not is_coming:
            self._wanted.others[number] = None
        self._start_thread()
        self._changed.notify_all()

    def _num_loads_until(self, number: int) -> int:
        """Loads that end before an adapter is in memory, its own included; of one that nobody wants yet, if that comes last."""
        if number in self._reading:
            return 1
        wanted = islice(chain(self._wanted.urgent, self._wanted.others), _MAX_BEFORE)
        num_before = next(
            (place for place, one in enumerate(wanted) if one == number), len(self._wanted.urgent) + len(self._wanted.others)
        )
        return num_before + 1 + bool(self._reading)

    def _start_thread(self) -> None:
        """Have a thread for what is wanted: the first, or another one if all are at adapters and may be stuck."""
        if not self._is_wanted or len(self._reading) < len(self._threads) or len(self._threads) == _MAX_THREADS:
            return
        # A daemon: if its disk hangs, the process ends without it.
        thread = threading.Thread(target=self._run, args=(self._session,), name="adapters", daemon=True)
        thread.start()
        self._threads.add(thread)

    @property
    def _is_wanted(self) -> bool:
        return bool(self._wanted.urgent or self._wanted.others)

    def _free_s(self) -> float:
        """Seconds until all readings that are under way are known to be stuck; 0: another one may begin."""
        began_ns = max((one.began_ns for one in self._reading.values()), default=None)
        return 0.0 if began_ns is None else max(0, began_ns + _STUCK_NS - self._clock.now_ns()) / 1e9

    def _next(self) -> _Adapter | None:
        """The adapter to be loaded now. One that is not urgent waits while memory is full of others that nobody had yet.

        One that nobody has any more is passed over: a refused call would else push out an adapter that is of use.
        """
        if self._free_s():
            return None
        has_room = len(self._in_memory) < self._max_in_memory or any(one.is_taken for one in self._in_memory.values())
        for queue in (self._wanted.urgent, self._wanted.others if has_room else {}):
            while queue:
                number = next(iter(queue))
                del queue[number]
                adapter = self._by_number.get(number)
                if adapter is not None and adapter.is_held:
                    return adapter
        return None

    def _is_idle(self) -> bool:
        """Is this thread one of several, and nothing wanted? Else waits until something may be, and says no."""
        if len(self._threads) > 1 and not self._is_wanted:
            return True
        self._changed.wait(self._free_s() or None)
        return False

    def _make_room(self, num_bytes: int, num_adapters: int = 0) -> None:
        """Let adapters leave memory until so many bytes, and adapters, fit beside the others."""
        self._sweep()
        while self._in_memory and (
            len(self._in_memory) + num_adapters > self._max_in_memory
            or self._num_bytes + sum(one.num_bytes for one in self._reading.values()) + num_bytes > self._max_bytes
        ):
            # Of equals the first: it was asked for least recently.
            self._let_go(min(self._in_memory.values(), key=lambda one: (one.is_held, one.is_retired, not one.is_taken)))
            self._counts.num_evictions += 1

    def _keep(self, adapter: _Adapter, packed: PackedAdapter, content: bytes) -> None:
        """Put an adapter into memory."""
        self._make_room(packed.num_bytes, num_adapters=1)
        if adapter.number not in self._by_number:  # nobody has it any more
            return
        adapter.packed, adapter.is_taken, adapter.failure = packed, False, ""
        adapter.fingerprint = content
        ref = adapter.reference()
        if ref is not None:
            ref.fingerprint = content
        adapter.num_loads += 1
        adapter.num_pages = packed.num_pages
        self._in_memory[adapter.number] = adapter
        self._num_bytes += packed.num_bytes

    def _settle(self, asked: _Asked) -> Callable[[], None] | None:
        """A load by name has ended. Returns what is to be told, without the lock, to whoever still waits."""
        adapter, done = asked.adapter, asked.done
        if not done.set_running_or_notify_cancel():
            self._retire(adapter)
            return None
        try:
            if adapter.failure:
                is_fault = adapter.reason is RejectReason.INVALID
                raise ModelError(adapter.failure) if is_fault else Rejected(adapter.reason, adapter.failure)
            self._check_free(asked.name, may_replace=asked.may_replace)
            self._make_place(asked.name)
        except PenstockError as error:
            self._retire(adapter)
            return partial(done.set_exception, error.with_traceback(None))  # which has this frame, and so the reference
        replaced = self._names.get(asked.name)
        self._names[asked.name] = _Name(adapter.path, adapter=adapter)
        if replaced is not None and replaced.adapter is not None:
            self._retire(replaced.adapter)
        return partial(done.set_result, asked.ref)

    # --- the thread ---

    def _run(self, session: int) -> None:
        while True:
            with self._changed:
                adapter = None
                while session == self._session and (adapter := self._next()) is None:
                    if self._is_idle():
                        self._threads.discard(threading.current_thread())
                        return
                if adapter is None:
                    return
                if self._reading:
                    _log.warning("reading adapters does not go on: threads have been at %d for 5 s or more", len(self._reading))
                reading = self._reading[adapter.number] = _Reading(self._clock.now_ns())
                self._start_thread()
                read, pack = self._read, self._pack
            assert read is not None, "a registry that is not closed is connected"
            assert pack is not None, "both or none"
            stamp = _stamp(adapter.path)
            packed, content, failure, reason = self._load(adapter, reading, read, pack)
            told: Callable[[], None] | None = None
            with self._changed:
                if session != self._session:
                    return
                del self._reading[adapter.number]
                now_ns = self._clock.now_ns()
                adapter.stamp = stamp
                if packed is not None and adapter.fingerprint not in (b"", content):
                    packed, adapter.is_lost = None, True
                    failure = f"{adapter.path.name}: the adapter's files changed while it was used. Ask again for the new one."
                if packed is None:
                    adapter.failure, adapter.failed_at_ns = failure, now_ns
                    # What could be read once is no fault of who asked for it then.
                    adapter.reason = RejectReason.UNAVAILABLE if adapter.fingerprint else reason
                    self._counts.num_failures += 1
                else:
                    self._keep(adapter, packed, content)
                    self._counts.num_loads += 1
                    self._counts.num_pages += packed.num_pages
                    self._counts.load_ns += now_ns - reading.began_ns
                asked = self._asked.pop(adapter.number, None)
                if asked is not None:
                    told = self._settle(asked)
                del packed, asked
                wake = self._wake
                self._changed.notify_all()
            if told is not None:
                told()
            wake()
            del adapter, told

    def _load(
        self, adapter: _Adapter, reading: _Reading, read: AdapterReader, pack: AdapterPacker
    ) -> tuple[PackedAdapter | None, bytes, str, RejectReason]:
        """The adapter's image and the hash of its files, or why there is none. The thread goes on after any error."""
        from penstock.models.adapter_files import AdapterFiles

        take = partial(self._take, adapter.path, reading)
        files = AdapterFiles(roots=None if adapter.is_free else self._roots, timeout_s=_READ_TIMEOUT_S, take=take)
        try:
            packed = pack(read(adapter.path, files))
            if packed.num_bytes > self._max_bytes:
                raise _too_large(adapter.path, packed.num_bytes, self._max_bytes)
            return packed, files.digest, "", RejectReason.INVALID
        except PenstockError as error:
            _log.warning("an adapter can't be loaded: %s", error)
            is_of_disk = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
            otherwise = RejectReason.UNAVAILABLE if is_of_disk else RejectReason.INVALID
            reason = error.reason if isinstance(error, Rejected) else otherwise
            return None, b"", error.without_folders()[:_MAX_FAILURE], reason
        except MemoryError:
            _log.exception("%s: no memory for the adapter", adapter.path)
            return None, b"", f"{adapter.path.name}: there is no memory for the adapter.", RejectReason.UNAVAILABLE
        except Exception as error:  # a fault of ours must not end the thread that all adapters need
            _log.exception("%s: the adapter can't be loaded", adapter.path)
            failure = f"{adapter.path.name}: {type(error).__name__}. The server's log has the cause."
            return None, b"", failure, RejectReason.UNAVAILABLE

    def _take(self, path: Path, reading: _Reading, num_bytes: int) -> None:
        """The reading of an adapter needs so many bytes in all: others leave memory for it. Raises ModelError."""
        with self._changed:
            reading.num_bytes = 0
            if num_bytes > self._max_bytes:
                raise _too_large(path, num_bytes, self._max_bytes)
            if num_bytes + sum(one.num_bytes for one in self._reading.values()) > self._max_bytes:
                detail = f"{path}: others are being read, and leave no memory for this one. Try again."
                raise Rejected(RejectReason.UNAVAILABLE, detail)
            self._make_room(num_bytes)
            reading.num_bytes = num_bytes


def _too_large(path: Path, num_bytes: int, max_bytes: int) -> ModelError:
    return ModelError(
        f"{path}: reading the adapter takes up to {format_size(num_bytes)}, and adapters may take {format_size(max_bytes)}.",
        remedy="Raise --max-cpu-loras or --max-lora-rank, by which that is planned, or use a smaller adapter.",
    )


def _stamp(path: Path) -> object:
    """Tells files that changed from those that were tried before, and opens none. Their hash alone says what they are."""
    found: list[tuple[int, ...] | None] = []
    for file in (path,) if path.suffix == ".gguf" else (path / CONFIG_FILE, path / WEIGHTS_FILE):
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except (OSError, ValueError):  # a null, or what no path can hold
            found.append(None)
    return found


def _resolved(path: Path) -> Path:
    """The path without links; a link to itself stays, where `Path.resolve` fails."""
    return Path(os.path.realpath(path))
