"""Host memory as a tier: what was written is read, under its name alone, until it is closed."""

from __future__ import annotations

import errno

import pytest

from penstock.storage.host_memory import HostMemory
from penstock.types.errors import CorruptBlock

CONTENT_BYTES = 1000


def name(idx: int) -> bytes:
    return bytes([idx]) * 16


def content(idx: int) -> memoryview:
    return memoryview(bytes((idx + position) % 251 for position in range(CONTENT_BYTES)))


def read(store: HostMemory, slot: int, idx: int) -> bytes:
    out = bytearray(CONTENT_BYTES)
    store.read(slot, name(idx), memoryview(out))
    return bytes(out)


@pytest.fixture
def store() -> HostMemory:
    return HostMemory(4, content_bytes=CONTENT_BYTES)


def test_what_was_written_is_read(store: HostMemory) -> None:
    assert store.num_slots == 4
    for slot in (3, 0):
        store.write(slot, name(slot), content(slot))
    assert [read(store, slot, slot) for slot in (0, 3)] == [content(0), content(3)]
    assert store.entries() == (), "nothing is there from an earlier time"


def test_a_slot_has_its_last_name_alone(store: HostMemory) -> None:
    store.write(1, name(1), content(1))
    store.write(1, name(2), content(2))
    assert read(store, 1, 2) == content(2)
    for slot, idx in ((1, 1), (2, 2)):
        with pytest.raises(CorruptBlock, match=f"Slot {slot}"):
            read(store, slot, idx)


def test_what_fails_leaves_no_content_behind(store: HostMemory) -> None:
    store.write(1, name(1), content(1))
    with pytest.raises(ValueError, match="broadcast"):
        store.write(1, name(2), memoryview(b"short"))
    for idx in (1, 2):
        with pytest.raises(CorruptBlock):
            read(store, 1, idx)


def test_the_next_engine_finds_it_empty_and_the_last_one_closed(store: HostMemory) -> None:
    store.write(1, name(1), content(1))
    fresh = store.emptied()
    with pytest.raises(CorruptBlock):
        read(fresh, 1, 1)
    fresh.write(1, name(3), content(3))
    assert read(fresh, 1, 3) == content(3)
    with pytest.raises(OSError, match=r".") as caught:
        store.write(1, name(1), content(1))
    assert caught.value.errno == errno.EBADF
    store.close()
    assert read(fresh, 1, 3) == content(3), "closing the old one takes nothing from the new one"
    fresh.close()
    fresh.close()
    with pytest.raises(OSError, match=r"."):
        read(fresh, 1, 3)


def test_one_that_is_being_written_is_not_taken_over(store: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.host_memory.LOCK_TIMEOUT_S", 0.01)
    with store._lock, pytest.raises(OSError, match="does not end"):
        store.emptied()
