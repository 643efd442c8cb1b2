"""Ideal caches against slow ones, the KV manager against the ideal, and the benchmark of prefixes over made-up prompts."""

import random
from functools import cache
from itertools import combinations

import prefix_cache
import prefix_tenants
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal_caches import belady, infinite, least_recently_used, num_found
from prefix_cache import BLOCK_SIZE, Prompt

from penstock.kv.eviction import LeastRecentlyUsed
from penstock.kv.manager import KVManager
from penstock.testing import make_request


def walks(max_requests: int, max_depth: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Prompts as walks down a tree of two branches, the nodes numbered as in a heap: equal numbers are equal prefixes."""

    def walk(turns: list[int]) -> tuple[int, ...]:
        nodes = [1]
        for turn in turns:
            nodes.append(2 * nodes[-1] + turn)
        return tuple(nodes)

    turns = st.lists(st.integers(0, 1), max_size=max_depth - 1)
    roots = st.integers(0, 1)
    one = st.builds(lambda root, rest: tuple(node + (root << 20) for node in walk(rest)), roots, turns)
    return st.lists(one, min_size=1, max_size=max_requests)


def best(requests: list[tuple[int, ...]], num_blocks: int) -> int:
    """The most that any cache finds: every choice of what to keep is tried."""

    @cache
    def most(idx: int, cached: frozenset[int]) -> int:
        if idx == len(requests):
            return 0
        present = cached | set(requests[idx])
        others = present - set(requests[idx])
        num_kept = min(len(others), num_blocks - len(requests[idx]))
        kept = [frozenset(choice) | set(requests[idx]) for choice in combinations(sorted(others), num_kept)]
        return num_found(requests[idx], cached) + max(most(idx + 1, choice) for choice in kept)

    return most(0, frozenset())


@settings(max_examples=60)
@given(requests=walks(max_requests=6, max_depth=3), num_blocks=st.integers(3, 6))
def test_no_cache_finds_more_than_belady_s(requests, num_blocks):
    assert belady(requests, num_blocks) == best(requests, num_blocks)


@given(requests=walks(max_requests=30, max_depth=5), num_blocks=st.integers(5, 40))
def test_caches_are_between_nothing_and_infinity(requests, num_blocks):
    assert 0 <= least_recently_used(requests, num_blocks) <= belady(requests, num_blocks) <= infinite(requests)
    assert least_recently_used(requests, 1000) == belady(requests, 1000) == infinite(requests)


def test_a_request_that_does_not_fit_is_refused():
    for ideal in (least_recently_used, belady):
        with pytest.raises(ValueError, match="a request of 3 blocks can't be served from 2"):
            ideal([(1, 2, 3)], 2)


@given(requests=walks(max_requests=30, max_depth=5), num_blocks=st.integers(6, 40))
def test_one_after_another_the_kv_manager_is_the_ideal_lru(requests, num_blocks):
    """The token that is not saved takes a block more, which has no content and so is the next to be used."""
    manager, found = KVManager(1 + num_blocks, 4, eviction=LeastRecentlyUsed(rest_ns=0)), 0
    for idx, blocks in enumerate(requests):
        request = make_request(f"r{idx}", [*(name for name in blocks for _ in range(4)), 99])
        hit = manager.lookup_prefix(request)
        found += len(hit.block_ids)
        manager.allocate(request, hit, 4 * len(blocks))
        request.num_computed_tokens = 4 * len(blocks)
        manager.publish(request)
        manager.free(request.request_id)
    assert found == least_recently_used(requests, num_blocks)


@pytest.fixture
def made_up(monkeypatch):
    """Conversations that come back longer, one of them every second."""
    rng = random.Random(1)
    names = iter(range(1, 1 << 20))
    talks = [[next(names) for _ in range(rng.randint(2, 10))] for _ in range(12)]
    prompts = []
    for idx in range(150):
        talk = rng.choice(talks)
        prompts.append(Prompt(idx * 1_000_000_000, tuple(talk), 1 + idx % 4))
        talk += [next(names)] * (len(talk) < 30)
    monkeypatch.setattr(prefix_cache, "read_mooncake", lambda traces: prompts)
    monkeypatch.setattr(prefix_cache, "SIZES", (64, 128, 1024))
    monkeypatch.setattr(prefix_tenants, "read_mooncake", lambda traces: prompts)
    monkeypatch.setattr(prefix_tenants, "SIZES", (600,))
    return prompts


def test_with_enough_memory_as_much_is_found_as_in_an_infinite_cache(made_up):
    report = prefix_cache.run_sizes(None)
    *small, large = report["hit_rate"]
    assert large["of_infinite"] == 1.0
    assert all(row["penstock"] <= row["belady"] for row in small)
    assert small[0]["penstock"] < 0.9 * large["penstock"]


def test_the_plot_names_every_cache():
    pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")
    row = {"blocks": 64, "belady": 0.5, "lru": 0.3, "penstock": 0.4}
    picture = prefix_cache.draw({"hit_rate": [row, row | {"blocks": 128}], "infinite": 0.6})
    assert all(name in picture for name in ("Belady", "LRU in sequence", "Penstock", "infinite", "blocks in the pool"))


def test_a_heavy_tenant_takes_less_from_a_light_one_under_the_others_than_under_lru(made_up):
    (row,) = prefix_tenants.run_tenants(None)["light_hit_rate"]
    assert row["lru"] < 0.6 * row["alone"]
    assert row["tenant-fair"] > 0.9 * row["alone"], "half of the pool is more than the light one uses"
    assert row["priority"] > 0.9 * row["alone"]


def test_equal_names_are_equal_blocks_of_tokens():
    first, second = (Prompt(0, blocks, 1).job() for blocks in ((5, 6), (5, 7)))
    assert first.num_prompt_tokens == len(first.prompt_token_ids) == 2 * BLOCK_SIZE + 1
    assert first.prompt_token_ids[:BLOCK_SIZE] == second.prompt_token_ids[:BLOCK_SIZE]
    assert first.prompt_token_ids[BLOCK_SIZE] != second.prompt_token_ids[BLOCK_SIZE]
