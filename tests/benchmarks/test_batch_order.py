"""The order of keys saves as much as the best of all orders, and the benchmark's bound is one."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from batch_order import Line, few_shot, num_blocks_of, ordered, possible, run, tree

from penstock.lab.prompts import WORDS


def small_tree(seed: int, count: int) -> list[Line]:
    """Prompts of three nodes, each 24 to 40 tokens, with two children per node."""
    rng = random.Random(seed)
    texts = {
        path: " ".join(rng.choices(WORDS, k=40))[: 4 * rng.randint(24, 40)]
        for path in ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), *((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)))
    }
    paths = [tuple(rng.randint(0, 1) for _ in range(3)) for _ in range(count)]
    return [
        Line((texts[path[:1]], texts[path[:2]] + texts[path] + f"{n:04d}"), rng.randint(1, 40)) for n, path in enumerate(paths)
    ]


@pytest.mark.parametrize(("num_rows", "seed", "count"), [(1, 0, 4), (1, 1, 4), (3, 2, 5)])
def test_no_order_saves_more_than_that_of_the_keys(num_rows: int, seed: int, count: int) -> None:
    lines = small_tree(seed, count)
    num_blocks = (1 if num_rows == 1 else 2) * max(map(num_blocks_of, lines))
    saved = [run(order, num_rows, num_blocks).saved for order in permutations(lines)]
    found = run(ordered(lines, "key"), num_rows, num_blocks).saved
    assert found == pytest.approx(max(saved))
    assert found == pytest.approx(possible(lines))
    assert min(saved) < found


@pytest.mark.parametrize("lines", [few_shot(100), tree(100)], ids=["few-shot", "tree"])
def test_with_many_rows_and_a_short_pool_it_saves_nearly_all_that_is_possible(lines: list[Line]) -> None:
    need = run(ordered(lines, "key"), 16, None).max_held
    key, arrival = (run(ordered(lines, order), 16, need // 2).saved / possible(lines) for order in ("key", "arrival"))
    assert key > 0.95
    assert arrival < 0.85 * key
