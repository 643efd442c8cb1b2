"""Changes of a prefix cache: whoever adds them up knows which blocks can be found."""

from __future__ import annotations

import random

import pytest

from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.changes import ChangeLog, Changes, ContentLog, Run, names_of
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


@pytest.mark.parametrize("every", [1, 7])
def test_contents_of_blocks_add_up_to_what_can_be_found(every: int) -> None:
    """A reader that knows the blocks before a run, and its tokens, knows the whole prefix. None has a salt."""
    rng = random.Random(every)
    core = make_core(CAPACITY)
    index = core.scheduler.kv.prefix.index
    root = root_hash(b"")
    log = index.log = ContentLog(root, index.content_of)
    prefixes: dict[int, list[int]] = {}
    num_turns = num_removed = num_secret = 0

    def ask(driver: Driver) -> None:
        nonlocal num_turns, num_removed, num_secret
        del driver
        num_turns += 1
        if num_turns % every:
            return
        runs, gone = log.take_runs()
        for parent, names, token_ids in runs:
            before = [] if parent is None else prefixes[parent]
            assert len(token_ids) == 4 * len(names)
            for idx, name in enumerate(names, 1):
                assert name not in prefixes
                prefixes[name] = before + token_ids[: 4 * idx]
        for name in gone:
            del prefixes[name]
        for name, tokens in prefixes.items():
            assert names_of(extend_chain(root, tokens, 4)[0])[-1] == name
        found = set(names_of(block_hash for block_hash, _ in index.items()))
        assert found.issuperset(prefixes)
        num_secret += len(found) - len(prefixes)
        num_removed += len(gone)

    later = {}
    for number in range(150):
        prompt = [rng.randrange(3)] * rng.choice((8, 16)) + [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
        salt = b"salt" if number % 10 == 9 else b""
        request = make_request(f"r{number}", prompt, max_tokens=rng.randrange(1, 12), cache_salt=salt)
        later[3 * number] = [Add(request)]
    run_to_completion(core, HashExecutor(CAPACITY), later=later, after_turn=ask)
    assert num_removed > 50, "blocks were evicted"
    assert num_secret > 50, "some had a salt"


def test_a_block_of_which_only_the_hash_is_known_is_left_out_with_what_follows_it() -> None:
    root = root_hash(b"")
    hashes, contents = extend_chain(root, range(12), 4)
    parents = [root, *hashes]
    known = {hashes[idx]: (parents[idx], contents[idx]) for idx in (0, 2)}
    log = ContentLog(root, known.get)
    for block_hash in hashes:
        log.note(block_hash, True)
    assert log.take_runs() == ([Run(None, names_of(hashes[:1]), [0, 1, 2, 3])], [])
    for block_hash in hashes:
        log.note(block_hash, False)
    assert log.take_runs() == ([], names_of(hashes[:1]))
