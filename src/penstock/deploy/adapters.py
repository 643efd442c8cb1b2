"""The registry of a model's adapters: names that clients use, the files behind them, and those that are in memory, packed.

`RunningModel` has one for each model that is served with adapters. The server asks it for names, and has adapters loaded and
unloaded; the scheduler sees it as an `AdapterSource`. One thread of its own reads files and packs them, in the order in which
they were wanted. A name costs an entry until somebody asks for it, and nothing is read before. Memory has room for a number of
adapters: the one that was asked for least recently leaves it, and is read again when it is wanted.

An adapter's content never changes under its number: files that changed since its first use fail to load, and the next request
for the name gets another number.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import Clock, WallClock
from penstock.types.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterOutlook, AdapterRef, AdapterState, PackedAdapter
from penstock.types.errors import ConfigError, ModelError, PenstockError
from penstock.types.stats import AdapterStats

if TYPE_CHECKING:  # with NumPy, which a server starts without
    from penstock.models.adapter import AdapterFactors, AdapterPacker

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Names that are looked up in the folder of adapters: a folder there, or one in it."""
MAX_NAMES = 100_000
"""Names that there may be before requests may add none, some 300 bytes each."""
_MAX_NAME = 200
_FAILURE_NS = 10_000_000_000
"""A failure holds for so long: a client that asks again and again makes nobody read a damaged file all the time, and one who
mends it need not wait."""
_MAX_FAILURE = 1000
_MAX_UNLOADED = 1024
"""Unloaded adapters that requests which have them can still ask for."""
_LOAD_TIMEOUT_S = 60.0
_MAX_BEFORE = 256
"""Loads that are counted one by one to say how long another will take."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """A name that clients may use."""

    name: str
    path: Path
    """The folder of PEFT, or the GGUF file."""


@dataclass(slots=True)
class _Adapter:
    """An adapter by its number. Everything but `ref` and `path` belongs to the registry's lock."""

    ref: AdapterRef
    path: Path
    packed: PackedAdapter | None = None
    is_taken: bool = False
    """Somebody has asked for it since it came to memory."""
    failure: str = ""
    failed_at_ns: int = 0
    num_loads: int = 0
    num_pages: int = 0
    """Blocks of the KV pool that it takes; 0 until it was loaded once."""


@dataclass(slots=True)
class _Name:
    path: Path
    adapter: _Adapter | None = None
    """None until somebody asks for the name."""


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


class Adapters:
    """An `AdapterSource`, and what the server does with names. All methods are for any thread."""

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
        self._read: Callable[[Path], AdapterFactors] | None = None
        self._pack: AdapterPacker | None = None
        self._max_bytes = 0
        self._folder = None if folder is None else _resolved(folder)
        self._modules = tuple((modules or {}).values())
        self._max_in_memory = max_in_memory
        self._clock = clock or WallClock()
        self._names = {name: _Name(path) for name, path in (modules or {}).items()}
        self._numbers = count(1)
        self._by_number: dict[int, _Adapter] = {}
        self._unloaded: deque[int] = deque()
        self._in_memory: OrderedDict[int, _Adapter] = OrderedDict()
        """Those that are packed; the one that was asked for last is the last."""
        self._num_bytes = 0
        """Bytes of all of them."""
        self._wanted = _Wanted()
        self._loading = 0
        """Number of the adapter that is read now; 0: none."""
        self._counts = _Counts()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._is_closed = True

    def connect(self, read: Callable[[Path], AdapterFactors], pack: AdapterPacker, *, max_bytes: int) -> None:
        """The model is loaded, and adapters may be: those in memory take `max_bytes` at most, or it is one alone.

        `read` and `pack` raise ModelError for adapters that the model, or its executor, does not compute.
        """
        with self._changed:
            self._read, self._pack, self._max_bytes = read, pack, max_bytes
            self._is_closed = False

    # --- names ---

    def find(self, name: str) -> AdapterRef | None:
        """The adapter of a name that is registered, or lies in the folder; None if there is none. It reads no weights."""
        with self._changed:
            entry = self._names.get(name)
            known = entry.adapter if entry else None
            if known is not None and not known.failure:
                return known.ref
        path = self._look_up(name) if entry is None else entry.path  # the disk is asked without the lock
        if path is None:
            return None
        content = fingerprint(path)
        with self._changed:
            entry = self._names.setdefault(name, _Name(path))
            adapter = entry.adapter
            is_over = adapter is not None and adapter.failure and not self._has_failed(adapter)
            if adapter is not None and (is_over or (adapter.failure and adapter.ref.fingerprint != content)):
                self._retire(adapter)
                adapter = None
            if adapter is None:
                adapter = entry.adapter = self._add(path, content)
            return adapter.ref

    def has(self, name: str) -> bool:
        """Whether the name is registered, or was found in the folder before."""
        return name in self._names

    def failure(self, name: str) -> str:
        """Why the adapter of a name can't be had; empty if nothing is known against it."""
        with self._changed:
            entry = self._names.get(name)
            adapter = entry.adapter if entry else None
            return adapter.failure if adapter and self._has_failed(adapter) else ""

    def path(self, ref: AdapterRef) -> Path | None:
        """Where an adapter lies; None for one that was unloaded long ago."""
        with self._changed:
            adapter = self._by_number.get(ref.number)
            return adapter.path if adapter else None

    def registered(self) -> list[Registered]:
        """The names that were registered, or asked for; never all that the folder has."""
        with self._changed:
            return [Registered(name, entry.path) for name, entry in self._names.items()]

    def is_within(self, path: Path) -> bool:
        """Whether a path lies in the folder of adapters, or is one that the settings name, or lies in it. It asks the disk."""
        try:
            resolved = _resolved(path)
        except ValueError:  # a null in it
            return False
        roots = chain([] if self._folder is None else [self._folder], map(_resolved, self._modules))
        return any(resolved.is_relative_to(root) for root in roots)

    def load(self, name: str, path: Path, *, may_replace: bool = False) -> AdapterRef:
        """Register a name and load its adapter; returns once it is in memory. Not for the event loop.

        Raises ConfigError for a name that can't be had, and ModelError for an adapter that can't.
        """
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"{name[:_MAX_NAME]!r} is no name of an adapter.",
                remedy=f"Use 1 to {_MAX_NAME} characters that can be printed.",
            )
        content = fingerprint(path)
        with self._changed:
            if len(self._names) >= MAX_NAMES and name not in self._names:
                raise ConfigError(f"{MAX_NAMES} adapters have names already.", remedy="Unload some of them.")
            self._check_free(name, may_replace=may_replace)
            adapter = self._add(path, content)
            try:
                self._want(adapter.ref.number, is_urgent=True)
                self._changed.wait_for(lambda: adapter.num_loads or adapter.failure or self._is_closed, _LOAD_TIMEOUT_S)
                if not adapter.num_loads:
                    away = "the model leaves" if self._is_closed else f"loading took more than {_LOAD_TIMEOUT_S:.0f} s"
                    raise ModelError(adapter.failure or f"{path}: the adapter was not loaded: {away}.")
                self._check_free(name, may_replace=may_replace)
            except PenstockError:
                self._forget(adapter)
                raise
            replaced = self._names.get(name)
            self._names[name] = _Name(path, adapter)
            if replaced is not None and replaced.adapter is not None:
                self._retire(replaced.adapter)
            return adapter.ref

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
            adapter = self._by_number.get(number)
            if adapter is None:
                return AdapterState(failure="The adapter was unloaded some time ago.")
            if adapter.packed is not None:
                if not adapter.is_taken:
                    adapter.is_taken = True
                    self._changed.notify_all()  # a load that waited for room can go on
                self._in_memory.move_to_end(number)
                return AdapterState(packed=adapter.packed)
            return AdapterState(failure=adapter.failure if self._has_failed(adapter) else "")

    def outlook(self, number: int) -> AdapterOutlook:
        with self._changed:
            adapter, counts = self._by_number.get(number), self._counts
            num_loads = max(1, counts.num_loads)
            num_pages = adapter.num_pages if adapter else 0
            likely_pages = num_pages or round(counts.num_pages / num_loads)
            num_left = 0 if adapter is None or adapter.packed is not None else self._num_loads_until(number)
            return AdapterOutlook(num_pages, likely_pages, num_left * counts.load_ns // num_loads)

    def listen(self, wake: Callable[[], None]) -> None:
        with self._changed:
            self._wake = wake

    @property
    def stats(self) -> AdapterStats:
        with self._changed:
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
        """End the thread after the load that it is at, and let go of the model and all that is in memory. Names stay: the
        registry can be connected again. Idempotent.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=_LOAD_TIMEOUT_S)
        with self._changed:
            self._read, self._pack, self._wake = None, None, lambda: None
            self._wanted = _Wanted()
            for adapter in list(self._in_memory.values()):
                self._let_go(adapter)

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

    def _add(self, path: Path, content: bytes) -> _Adapter:
        ref = AdapterRef(next(self._numbers), content)
        adapter = self._by_number[ref.number] = _Adapter(ref, path)
        return adapter

    def _retire(self, adapter: _Adapter) -> None:
        """Nobody can ask for an adapter by its name any more. It is the first one to leave memory."""
        number = adapter.ref.number
        adapter.is_taken = True
        if number in self._in_memory:
            self._in_memory.move_to_end(number, last=False)
        self._unloaded.append(number)
        if len(self._unloaded) > _MAX_UNLOADED:
            self._forget(self._by_number[self._unloaded.popleft()])

    def _forget(self, adapter: _Adapter) -> None:
        self._let_go(adapter)
        del self._by_number[adapter.ref.number]

    def _let_go(self, adapter: _Adapter) -> None:
        """Take an adapter out of memory, if it is there."""
        if adapter.packed is not None:
            del self._in_memory[adapter.ref.number]
            self._num_bytes -= adapter.packed.num_bytes
        adapter.packed, adapter.is_taken = None, False

    def _has_failed(self, adapter: _Adapter) -> bool:
        return bool(adapter.failure) and self._clock.now_ns() - adapter.failed_at_ns < _FAILURE_NS

    def _want(self, number: int, *, is_urgent: bool) -> None:
        adapter = self._by_number.get(number)
        is_coming = number == self._loading or number in self._wanted.urgent
        if adapter is None or adapter.packed is not None or is_coming or self._has_failed(adapter) or self._is_closed:
            return
        if is_urgent:
            self._wanted.others.pop(number, None)
            self._wanted.urgent[number] = None
        else:
            self._wanted.others[number] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _num_loads_until(self, number: int) -> int:
        """Loads that end before an adapter is in memory, its own included; of one that nobody wants yet, if that comes last."""
        if number == self._loading:
            return 1
        wanted = islice(chain(self._wanted.urgent, self._wanted.others), _MAX_BEFORE)
        num_before = next(
            (place for place, one in enumerate(wanted) if one == number), len(self._wanted.urgent) + len(self._wanted.others)
        )
        return num_before + 1 + bool(self._loading)

    def _next(self) -> _Adapter | None:
        """The adapter to be loaded now. One that is not urgent waits while memory is full of others that nobody had yet."""
        has_room = len(self._in_memory) < self._max_in_memory or any(one.is_taken for one in self._in_memory.values())
        for queue in (self._wanted.urgent, self._wanted.others if has_room else {}):
            while queue:
                number = next(iter(queue))
                del queue[number]
                if number in self._by_number:
                    return self._by_number[number]
        return None

    def _keep(self, adapter: _Adapter, packed: PackedAdapter) -> None:
        """Put an adapter into memory, in place of the one that was asked for least recently, if there is no room."""
        room_bytes = self._max_bytes - packed.num_bytes
        while self._in_memory and (len(self._in_memory) >= self._max_in_memory or self._num_bytes > room_bytes):
            taken = (number for number, one in self._in_memory.items() if one.is_taken)
            self._let_go(self._in_memory[next(taken, next(iter(self._in_memory)))])
            self._counts.num_evictions += 1
        adapter.packed, adapter.is_taken, adapter.failure = packed, False, ""
        adapter.num_loads += 1
        adapter.num_pages = packed.num_pages
        self._in_memory[adapter.ref.number] = adapter
        self._num_bytes += packed.num_bytes

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                adapter = self._next()
                while adapter is None and not self._is_closed:
                    self._changed.wait()
                    adapter = self._next()
                if adapter is None or self._is_closed:
                    return
                self._loading = adapter.ref.number
                read, pack = self._read, self._pack
            assert read is not None, "a registry that is not closed is connected"
            assert pack is not None, "both or none"
            began_ns = self._clock.now_ns()
            packed, failure = self._load(adapter, read, pack)
            with self._changed:
                self._loading = 0
                now_ns = self._clock.now_ns()
                if packed is None:
                    adapter.failure, adapter.failed_at_ns = failure, now_ns
                    self._counts.num_failures += 1
                else:
                    if adapter.ref.number in self._by_number and not self._is_closed:
                        self._keep(adapter, packed)
                    self._counts.num_loads += 1
                    self._counts.num_pages += packed.num_pages
                    self._counts.load_ns += now_ns - began_ns
                wake = self._wake
                self._changed.notify_all()
            wake()

    def _load(
        self, adapter: _Adapter, read: Callable[[Path], AdapterFactors], pack: AdapterPacker
    ) -> tuple[PackedAdapter | None, str]:
        """The adapter's image, or why there is none. The thread goes on after any error."""
        try:
            packed = pack(read(adapter.path))
            if fingerprint(adapter.path) != adapter.ref.fingerprint:
                raise ModelError(f"{adapter.path}: the adapter's files changed since it was first used.", remedy="Ask again.")
        except PenstockError as error:
            _log.warning("an adapter can't be loaded: %s", error)
            return None, str(error)[:_MAX_FAILURE]
        except MemoryError:
            _log.exception("%s: no memory for the adapter", adapter.path)
            return None, f"{adapter.path}: there is no memory for the adapter."
        except Exception as error:  # a fault of ours must not end the thread that all adapters need
            _log.exception("%s: the adapter can't be loaded", adapter.path)
            return None, f"{adapter.path}: {type(error).__name__}: {error}"[:_MAX_FAILURE]
        return packed, ""


def fingerprint(path: Path) -> bytes:
    """16 bytes of an adapter's place, its settings, and the size and time of its weights, which are not read.

    A file that is missing counts as an empty one: loading will say so.
    """
    is_file = path.suffix == ".gguf"
    digest = blake2b(digest_size=16)
    try:
        digest.update(os.fsencode(_resolved(path)))
        status = (path if is_file else path / WEIGHTS_FILE).stat()
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        if not is_file:
            with (path / CONFIG_FILE).open("rb") as file:
                digest.update(file.read(1 << 20))
    except (OSError, ValueError):  # a null, or what no path can hold
        digest.update(b"\0missing")
    return digest.digest()


def _resolved(path: Path) -> Path:
    """The path without links; a link to itself stays, where `Path.resolve` fails."""
    return Path(os.path.realpath(path))
