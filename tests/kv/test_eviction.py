"""The cached blocks that are lost first: policies, the pool's groups, and what a tenant can do to another's prefixes."""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.block_pool import BlockPool
from penstock.kv.eviction import EVICTIONS, EvictionPolicy, LeastRecentlyUsed, LowestPriorityFirst, TenantFair
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.testing import make_request
from penstock.types.request import Request

BLOCK = 4


def make(name: str) -> EvictionPolicy:
    module, _, attribute = EVICTIONS[name].partition(":")
    policy: EvictionPolicy = getattr(import_module(module), attribute)()
    return policy


def serve(manager: KVManager, request: Request) -> int:
    """Admit, compute and end a request. Returns how many of its tokens were found."""
    hit = manager.lookup_prefix(request)
    manager.allocate(request, hit, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)
    manager.free(request.request_id)
    check(manager)
    return hit.num_tokens


class TestTenants:
    def flood(self, eviction: EvictionPolicy, num_requests: int = 30) -> int:
        """A light tenant's prompt of 4 blocks, a heavy one's requests of 5 each, all different, then the light one again.

        Returns what that finds.
        """
        manager = KVManager(1 + 16, BLOCK, eviction=eviction)
        serve(manager, make_request("light", 16, tenant="light"))
        for idx in range(num_requests):
            serve(manager, make_request(f"h{idx}", [100 + idx] * 20, tenant="heavy"))
        return serve(manager, make_request("again", [*range(1, 17), 99], tenant="light"))

    def test_under_lru_a_heavy_tenant_flushes_a_light_one(self) -> None:
        assert self.flood(LeastRecentlyUsed()) == 0

    def test_under_tenant_fair_it_does_not(self) -> None:
        assert self.flood(TenantFair()) == 16

    def test_without_others_a_tenant_has_the_whole_cache(self) -> None:
        manager = KVManager(1 + 8, BLOCK, eviction=TenantFair())
        serve(manager, make_request("a", 32, tenant="only"))
        assert serve(manager, make_request("b", [*range(1, 32), 99], tenant="only")) == 31

    def test_what_runs_goes_before_what_is_cached(self) -> None:
        """Also of a heavy tenant: a cache never keeps a request from running."""
        manager = KVManager(1 + 8, BLOCK, eviction=TenantFair())
        serve(manager, make_request("light", 8, tenant="light"))
        manager.allocate(make_request("heavy", [7] * 32, tenant="heavy"), manager.lookup_prefix(make_request("x", 1)), 32)
        assert manager.pool.num_cached == 0

    @given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)), min_size=20, max_size=60))
    def test_who_wants_no_more_than_an_equal_share_loses_nothing(self, asks: list[tuple[str, int]]) -> None:
        """30 blocks, 7 tenants, requests of at most 4 blocks: whatever six of them do, 3 blocks of the seventh stay."""
        manager = KVManager(1 + 30, BLOCK, eviction=TenantFair())
        serve(manager, make_request("mine", 12, tenant="g"))
        for idx, (tenant, num_blocks) in enumerate(asks):
            serve(manager, make_request(f"r{idx}", [1000 + idx] * num_blocks * BLOCK, tenant=tenant))
        assert serve(manager, make_request("again", [*range(1, 13), 99], tenant="g")) == 12


class TestClasses:
    def test_the_lowest_class_loses_first_whatever_is_older(self) -> None:
        manager = KVManager(1 + 8, BLOCK, eviction=LowestPriorityFirst())
        serve(manager, make_request("high", [1] * 12, priority=-1))
        serve(manager, make_request("low", [2] * 12, priority=5))
        serve(manager, make_request("new", [3] * 16))  # two blocks are empty, two of the low one's are lost
        assert serve(manager, make_request("high again", [1] * 13, priority=-1)) == 12

    def test_when_nothing_lower_is_left_the_higher_loses(self) -> None:
        manager = KVManager(1 + 4, BLOCK, eviction=LowestPriorityFirst())
        serve(manager, make_request("high", [1] * 16, priority=-1))
        serve(manager, make_request("low", [2] * 16, priority=5))
        assert serve(manager, make_request("high again", [1] * 16, priority=-1)) == 0

    @pytest.mark.parametrize("priority", [-(10**9), 10**9])
    def test_extreme_classes_count_as_the_outermost(self, priority: int) -> None:
        policy = LowestPriorityFirst()
        group = policy.group_of(make_request("a", priority=priority))
        assert group in (0, 2 * LowestPriorityFirst.MAX_CLASS)
        policy.resized(group, 1)
        assert policy.choose() == group


def test_a_block_belongs_to_who_held_it_last() -> None:
    manager = KVManager(1 + 8, BLOCK, eviction=TenantFair())
    serve(manager, make_request("a", 8, tenant="a"))
    serve(manager, make_request("b", 9, tenant="b"))
    assert {name: len(blocks) for name, blocks in manager.pool.groups().items()} == {"b": 2}


def test_a_fork_s_blocks_belong_to_its_parent_s_tenant() -> None:
    manager = KVManager(1 + 8, BLOCK, eviction=TenantFair())
    parent = make_request("p", 8, tenant="t")
    manager.allocate(parent, manager.lookup_prefix(parent), 8)
    parent.num_computed_tokens = 8
    manager.publish(parent)
    manager.fork("p", "c", 8)
    manager.free("p")
    manager.free("c")
    assert {name: len(blocks) for name, blocks in manager.pool.groups().items()} == {"t": 2}
    check(manager)


def test_a_group_that_lost_everything_leaves_nothing_behind() -> None:
    """Tenants come and go by the thousand."""
    manager = KVManager(1 + 8, BLOCK, eviction=TenantFair())
    for idx in range(1000):
        serve(manager, make_request("r", [idx] * 32, tenant=f"t{idx}"))
    assert len(manager.pool.groups()) == 1


@pytest.mark.parametrize("name", ["priority", "tenant-fair"])
@given(changes=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_a_policy_names_a_group_that_has_blocks(name: str, changes: list[tuple[int, bool]]) -> None:
    policy, sizes = make(name), dict.fromkeys(range(6), 0)
    for group, is_more in changes:
        if not is_more and not sizes[group]:
            continue
        sizes[group] += 1 if is_more else -1
        policy.resized(group, sizes[group])
        if not any(sizes.values()):
            continue
        chosen = policy.choose()
        assert isinstance(chosen, int)
        if name == "priority":
            assert chosen == max(other for other, size in sizes.items() if size)
        else:
            assert sizes[chosen] == max(sizes.values())


class GroupedPoolMachine(RuleBasedStateMachine):
    """The pool against lists: what has no content first, then the head of the group that the policy names."""

    @initialize(num_blocks=st.integers(2, 9), name=st.sampled_from(["priority", "tenant-fair"]))
    def start(self, num_blocks: int, name: str) -> None:
        self.name = name
        self.pool = BlockPool(num_blocks, make(name))
        self.empty = list(range(1, num_blocks))
        self.groups: dict[Hashable, list[int]] = {}
        self.counts = dict.fromkeys(range(1, num_blocks), 0)

    @property
    def num_free(self) -> int:
        return len(self.empty) + sum(map(len, self.groups.values()))

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.num_free:
            with pytest.raises(ValueError, match="available"):
                self.pool.allocate(count)
            return
        for block_id in self.pool.allocate(count):
            assert self.counts[block_id] == 0
            self.counts[block_id] = 1
            if self.empty:
                assert block_id == self.empty.pop(0)
                continue
            (group,) = (name for name, blocks in self.groups.items() if block_id in blocks)
            assert group == max(self.groups) if self.name == "priority" else len(self.groups[group]) == self.largest()
            assert self.groups[group].pop(0) == block_id
            self.forget_if_empty(group)

    def largest(self) -> int:
        return max(map(len, self.groups.values()))

    def forget_if_empty(self, group: Hashable) -> None:
        if not self.groups[group]:
            del self.groups[group]

    @precondition(lambda self: len(self.empty) < len(self.counts))
    @rule(pick=st.integers(0, 100))
    def hold(self, pick: int) -> None:
        with_content = [block_id for block_id in self.counts if block_id not in self.empty]
        block_id = with_content[pick % len(with_content)]
        self.pool.hold(block_id)
        if self.counts[block_id] == 0:
            for group in [name for name, blocks in self.groups.items() if block_id in blocks]:
                self.groups[group].remove(block_id)
                self.forget_if_empty(group)
        self.counts[block_id] += 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(pick=st.integers(0, 100), group=st.one_of(st.none(), st.integers(0, 3)))
    def release(self, pick: int, group: int | None) -> None:
        """Without a group: without content."""
        held = [block_id for block_id, count in self.counts.items() if count]
        block_id = held[pick % len(held)]
        self.pool.release(block_id, keep=group is not None, group=group)
        self.counts[block_id] -= 1
        if self.counts[block_id] == 0:
            if group is None:
                self.empty.insert(0, block_id)
            else:
                self.groups.setdefault(group, []).append(block_id)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.groups() == self.groups
        assert list(self.pool.free_block_ids())[: len(self.empty)] == self.empty
        assert self.pool.num_available == self.num_free
        assert self.pool.num_cached == self.num_free - len(self.empty)
        for block_id, count in self.counts.items():
            assert self.pool.ref_count(block_id) == count
            assert self.pool.is_kept(block_id) == any(block_id in blocks for blocks in self.groups.values())


TestGroupedPoolMachine = GroupedPoolMachine.TestCase
TestGroupedPoolMachine.settings = settings(stateful_step_count=30)
