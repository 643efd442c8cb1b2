"""Fake adapters for the hash executor, and a source that loads late, fails, and forgets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from hashlib import blake2b

from penstock.testing.hash_executor import HashAdapter, root_of
from penstock.types.adapter import AdapterOutlook, AdapterRef, AdapterState


def make_adapter(number: int) -> AdapterRef:
    return AdapterRef(number, blake2b(b"adapter %d" % number, digest_size=16).digest())


def at_once(job: Callable[[], None], is_urgent: bool) -> None:
    del is_urgent
    job()


class FakeAdapters:
    """An `AdapterSource` whose loads run on a worker; `LateWorker` of `penstock.testing.driver` runs them some turns later."""

    def __init__(
        self,
        *,
        worker: Callable[[Callable[[], None], bool], None] = at_once,
        num_pages: Callable[[int], int] = lambda number: 1 + number % 3,
        max_in_memory: int = 64,
        failing: Collection[int] = (),
        load_ns: int = 0,
    ) -> None:
        self.num_loads = 0
        self.load_ns = load_ns
        self.failing = set(failing)
        self._worker = worker
        self._num_pages = num_pages
        self._max_in_memory = max_in_memory
        self._wanted: dict[int, bool] = {}
        """Number of an adapter that is loading -> whether the load is urgent."""
        self._states: OrderedDict[int, AdapterState] = OrderedDict()
        self._wake: Callable[[], None] = lambda: None

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        number = ref.number
        is_coming = number in self._wanted and (self._wanted[number] or not is_urgent)
        if number not in self._states and not is_coming:
            self._wanted[number] = is_urgent
            self._worker(lambda: self._load(ref), is_urgent)

    def state(self, number: int) -> AdapterState:
        if number in self._states:
            self._states.move_to_end(number)
        return self._states.get(number, AdapterState())

    def outlook(self, number: int) -> AdapterOutlook:
        state, num_pages = self._states.get(number), self._num_pages(number)
        is_there = state is not None and state.packed is not None
        return AdapterOutlook(num_pages, num_pages, 0 if is_there else self.load_ns)

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def forget_all(self) -> None:
        self._states.clear()

    def _load(self, ref: AdapterRef) -> None:
        if self._wanted.pop(ref.number, None) is None:
            return
        if ref.number in self.failing:
            self._states[ref.number] = AdapterState(failure=f"adapter {ref.number} is broken, as it was told to be")
        else:
            self._states[ref.number] = AdapterState(HashAdapter(root_of(ref), self._num_pages(ref.number)))
            self.num_loads += 1
        if len(self._states) > self._max_in_memory:
            self._states.popitem(last=False)
        self._wake()
