"""What the executor was given: for how long the engine has waited for it, and what becomes of it when it is given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from penstock.clock import VirtualClock
from penstock.engine.submitted import Abandoned, Submitted
from penstock.testing import HashExecutor


class Slow(HashExecutor):
    """Calls `meanwhile` while it moves contents."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        self.meanwhile()

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self.meanwhile()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.meanwhile()


MOVES = {"read_blocks": ([1], []), "write_blocks": ([1], []), "copy_blocks": ([(1, 2)],)}


@pytest.mark.parametrize("name", MOVES)
def test_a_device_that_hangs_while_contents_move_is_noticed_and_can_be_given_up(name: str) -> None:
    clock = VirtualClock()
    waited_ns: list[int] = []

    def look() -> None:
        clock.advance(5)
        waited_ns.append(submitted.waiting_ns())

    def give_up() -> None:
        assert submitted.abandon()

    executor = Slow(look)
    submitted = Submitted(executor, clock)
    getattr(submitted, name)(*MOVES[name])
    assert waited_ns == [5]
    clock.advance(5)
    assert submitted.waiting_ns() == 0
    assert not submitted.abandon(), "it is not inside the executor"
    executor.meanwhile = give_up
    with pytest.raises(Abandoned):
        getattr(submitted, name)(*MOVES[name])
