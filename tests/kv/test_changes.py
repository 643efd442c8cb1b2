"""Changes of a prefix cache: whoever adds them up knows which blocks can be found."""

from __future__ import annotations

import random

import pytest

from penstock.kv.changes import ChangeLog, Changes, names_of
from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.driver import Driver, run_to_completion
from penstock.types.events import Add
from penstock.types.plan import Capacity

CAPACITY = Capacity(num_blocks=30, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)
ONE, TWO = (bytes([number]) * 16 for number in (1, 2))


def test_names_are_numbers_of_64_bits() -> None:
    assert names_of([ONE, bytes(16)]) == [0x0101010101010101, 0]


def test_what_came_and_went_between_two_questions_is_not_told() -> None:
    log = ChangeLog()
    log.note(ONE, True)
    log.note(TWO, True)
    assert log.take() == Changes(names_of([ONE, TWO]), [])
    log.note(ONE, False)
    log.note(TWO, False)
    log.note(TWO, True)
    log.note(bytes(16), True)
    log.note(bytes(16), False)
    assert log.take() == Changes([], names_of([ONE]))
    assert log.take() == Changes([], [])


@pytest.mark.parametrize("every", [1, 7, 50])
def test_changes_add_up_to_what_can_be_found(every: int) -> None:
    """Requests of common prefixes in a pool so small that blocks are evicted, asked after each `every` turns."""
    rng = random.Random(every)
    core = make_core(CAPACITY)
    index = core.scheduler.kv.prefix.index
    log = index.log = ChangeLog()
    known: set[int] = set()
    num_turns = num_removed = 0

    def ask(driver: Driver) -> None:
        nonlocal num_turns, num_removed
        del driver
        num_turns += 1
        if num_turns % every:
            return
        added, removed = log.take()
        assert known.isdisjoint(added)
        assert known.issuperset(removed)
        known.update(added)
        known.difference_update(removed)
        assert known == set(names_of(block_hash for block_hash, _ in index.items()))
        num_removed += len(removed)

    prompts = [
        [rng.randrange(3)] * rng.choice((8, 16)) + [rng.randrange(9) for _ in range(rng.randrange(1, 20))] for _ in range(150)
    ]
    later = {
        3 * number: [Add(make_request(f"r{number}", prompt, max_tokens=rng.randrange(1, 12)))]
        for number, prompt in enumerate(prompts)
    }
    run_to_completion(core, HashExecutor(CAPACITY), later=later, after_turn=ask)
    assert num_removed > 50, "blocks were evicted"
