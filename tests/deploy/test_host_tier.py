"""The tier in the machine's memory: made as large as asked for, or refused with the numbers."""

from __future__ import annotations

import pytest

from penstock.config import KvConfig
from penstock.deploy.tiers import open_host_memory
from penstock.testing import DEFAULT_CAPACITY, HashExecutor
from penstock.types.errors import ConfigError

MIB = 1 << 20


def test_it_is_as_large_as_asked_for() -> None:
    executor = HashExecutor(DEFAULT_CAPACITY)
    store = open_host_memory(KvConfig(kv_host_size_bytes=10 * executor.block_bytes + 1), executor, available_bytes=512 * MIB)
    assert store.num_slots == 10
    assert not store.outlives_process


class LargeBlocks(HashExecutor):
    def __init__(self) -> None:
        super().__init__(DEFAULT_CAPACITY)
        self.block_bytes = MIB


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (600 * MIB, r"kv_host_size 600 MiB takes 600\.26 MiB with its index, and 256 MiB .* Lower --kv-host-size"),
        (MIB - 1, r"does not hold one block of 1 MiB\. Raise --kv-host-size"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(num_bytes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_host_memory(KvConfig(kv_host_size_bytes=num_bytes), LargeBlocks(), available_bytes=512 * MIB)


def test_memory_that_the_system_does_not_give_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("numpy.empty", refuse)
    with pytest.raises(ConfigError, match="The system gives no 2 MiB"):
        open_host_memory(KvConfig(kv_host_size_bytes=2 * MIB), LargeBlocks(), available_bytes=512 * MIB)
