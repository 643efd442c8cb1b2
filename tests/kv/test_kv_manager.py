"""Block tables, prefix hits, copy-on-write; against a model that knows what every block contains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.block_table import extend_chain
from penstock.kv.eviction import EvictionPolicy, LeastRecentlyUsed, LowestPriorityFirst, TenantFair
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.kv.pool_map import BlockState, draw
from penstock.testing import make_request
from penstock.testing.hash_executor import ROOT, HashAdapter
from penstock.types.adapter import AdapterRef
from penstock.types.request import Request
from penstock.types.sampling import BeamParams
from penstock.types.stats import PrefixEnd
from support.fake_adapters import make_adapter

BLOCK = 4


def make_manager(num_blocks: int = 12, **options: bool) -> KVManager:
    return KVManager(num_blocks, BLOCK, **options)


def compute(manager: KVManager, request: Request, num_tokens: int | None = None) -> None:
    """Admit a request and commit `num_tokens` of it (all, if not said)."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    manager.allocate(request, manager.lookup_prefix(request), num_tokens)
    request.num_computed_tokens = num_tokens
    manager.publish(request)


class TestWindows:
    """A window of 6, so that position p reads p - 5 and later ones."""

    def windowed(self, num_tokens: int = 18, num_blocks: int = 12) -> tuple[KVManager, Request]:
        manager, request = KVManager(num_blocks, BLOCK, window=6), make_request("a", num_tokens)
        compute(manager, request)
        return manager, request

    @pytest.mark.parametrize(("num_tokens", "num_released"), [(5, 0), (8, 0), (9, 1), (12, 1), (13, 2), (18, 3)])
    def test_blocks_that_no_position_reads_any_more_are_given_back(self, num_tokens: int, num_released: int) -> None:
        manager, request = self.windowed(num_tokens)
        held = manager.block_table("a")
        manager.release_unread(request)
        manager.release_unread(request)
        assert manager.block_table("a") == (0,) * num_released + held[num_released:]
        assert (manager.num_held_blocks("a"), manager.num_own_blocks("a")) == (len(held) - num_released,) * 2
        assert manager.num_freed_blocks(["a"]) == len(held) - num_released
        assert manager.pool.num_available == 11 - len(held) + num_released
        check(manager)
        assert manager.extend("a", num_tokens, num_tokens + 4) is not None
        manager.suspend("a")
        assert (manager.block_table("a"), manager.pool.num_available) == ((), 11)
        check(manager)

    def test_what_is_shared_stays_with_the_other(self) -> None:
        manager, first = self.windowed(11)
        second = make_request("b", 18)
        compute(manager, second)
        shared = manager.block_table("a")[:2]
        manager.release_unread(second)
        assert manager.block_table("b")[:3] == (0, 0, 0)
        assert manager.block_table("a")[:2] == shared
        assert manager.num_own_blocks("a") == 3
        manager.release_unread(first)
        check(manager)

    def test_a_hit_needs_what_is_read_behind_it_and_holds_no_more(self) -> None:
        manager, request = self.windowed()
        blocks = manager.block_table("a")
        manager.release_unread(request)
        manager.free("a")
        hit = manager.lookup_prefix(make_request("b", 18))
        assert (hit.num_tokens, hit.block_ids) == (16, (0, 0, *blocks[2:4]))
        assert (hit.held, hit.num_free_blocks) == (blocks[2:4], 2)
        compute(manager, make_request("b", 18))
        assert manager.block_table("b")[:4] == hit.block_ids
        assert manager.num_held_blocks("b") == 3
        check(manager)

    @pytest.mark.parametrize(
        ("lost", "num_tokens"), [((), 16), ((0, 1), 16), ((1,), 16), ((3,), 12), ((1, 3), 4), ((0, 3), 12), ((2,), 8)]
    )
    def test_a_hit_is_the_longest_of_which_nothing_is_missing(self, lost: tuple[int, ...], num_tokens: int) -> None:
        manager, _ = self.windowed()
        blocks = manager.block_table("a")
        manager.free("a")
        for idx in lost:
            manager.pool.hold(blocks[idx])
        manager.prefix.evict([blocks[idx] for idx in lost])
        for idx in lost:
            manager.pool.release(blocks[idx], keep=False)
        assert manager.lookup_prefix(make_request("b", [*range(1, 17), 99, 98])).num_tokens == num_tokens
        check(manager)

    def test_a_beam_keeps_all_and_finds_whole_prefixes_alone(self) -> None:
        manager = KVManager(12, BLOCK, window=6)
        search = make_request("a", 18, beams=BeamParams(width=2))
        compute(manager, search)
        manager.release_unread(search)
        assert 0 not in manager.block_table("a")
        manager.fork("a", "b", 8)
        assert manager.block_table("b") == manager.block_table("a")[:2]
        check(manager)

    def test_what_gave_blocks_back_can_not_be_forked(self) -> None:
        manager, request = self.windowed()
        manager.release_unread(request)
        with pytest.raises(ValueError, match="can't share 18 tokens"):
            manager.fork("a", "b", 18)

    def test_behind_a_fence_and_in_the_picture_null_blocks_count_for_nothing(self) -> None:
        manager, request = self.windowed()
        manager.release_unread(request)
        owner = draw(manager, [request]).owners[0]
        assert (owner.num_blocks, manager.num_held_blocks("a")) == (2, 2)
        manager.fence("a", step_id=1)
        assert draw(manager, []).owners[0].num_blocks == 2
        check(manager)
        manager.lift_fence(1)
        assert manager.pool.num_available == 11
        check(manager)


class TestPrefixHits:
    def test_equal_prompts_share_full_blocks(self) -> None:
        manager = make_manager()
        first, second = make_request("a", 10), make_request("b", 10)
        compute(manager, first)
        hit = manager.lookup_prefix(second)
        assert hit.num_tokens == 8
        assert hit.block_ids == manager.block_table("a")[:2]
        assert hit.tail_block_id == 0
        assert hit.num_free_blocks == 0, "they are in use, so holding them costs nothing"

    @pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 3), (5, 4), (8, 7), (9, 8)])
    def test_hit_is_capped_one_token_short(self, num_tokens: int, expected: int) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 12))
        assert manager.lookup_prefix(make_request("b", num_tokens)).num_tokens == expected

    def test_what_is_not_committed_is_not_found(self) -> None:
        manager = make_manager()
        first = make_request("a", 10)
        manager.allocate(first, manager.lookup_prefix(first), 10)
        assert manager.lookup_prefix(make_request("b", 10)).num_tokens == 0

    def test_freed_blocks_are_found_until_they_are_used_again(self) -> None:
        manager = make_manager(num_blocks=4)
        first = make_request("a", 12)
        compute(manager, first)
        manager.free("a")
        assert (manager.pool.num_available, manager.pool.num_cached) == (3, 3)
        hit = manager.lookup_prefix(make_request("b", 12))
        assert (hit.num_tokens, hit.num_free_blocks) == (11, 2)
        compute(manager, make_request("c", [9] * 4))
        # The tail went first; what is left of the prefix is its beginning.
        assert manager.lookup_prefix(make_request("b", 13)).num_tokens == 8
        check(manager)

    def test_the_own_hit_is_not_evicted_for_the_own_fresh_blocks(self) -> None:
        manager = make_manager(num_blocks=4)
        compute(manager, make_request("a", 8))
        manager.free("a")
        second = make_request("b", 12)
        hit = manager.lookup_prefix(second)
        table = manager.allocate(second, hit, 12)
        assert table[: len(hit.block_ids)] == hit.block_ids
        assert len(set(table)) == 3
        check(manager)

    def test_salts_share_nothing(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 10, cache_salt=b"x"))
        assert manager.lookup_prefix(make_request("b", 10)).num_tokens == 0
        assert manager.lookup_prefix(make_request("c", 10, cache_salt=b"y")).num_tokens == 0
        assert manager.lookup_prefix(make_request("d", 10, cache_salt=b"x")).num_tokens == 8

    def test_generated_tokens_are_found_too(self) -> None:
        manager = make_manager()
        first = make_request("a", 6)
        first.output_token_ids += [41, 42, 43]
        first.num_tokens += 3
        compute(manager, first)
        assert manager.lookup_prefix(make_request("b", [1, 2, 3, 4, 5, 6, 41, 42, 99])).num_tokens == 8

    def test_caching_can_be_switched_off(self) -> None:
        manager = make_manager(enable_prefix_caching=False)
        compute(manager, make_request("a", 10))
        assert manager.lookup_prefix(make_request("b", 10)).num_tokens == 0
        manager.free("a")
        assert manager.pool.num_cached == 0
        check(manager)

    def test_each_block_is_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hashed: list[int] = []

        def counting(parent: bytes, token_ids: list[int], block_size: int) -> object:
            hashed.append(len(token_ids))
            return extend_chain(parent, token_ids, block_size)

        monkeypatch.setattr("penstock.kv.block_table.extend_chain", counting)
        manager = make_manager()
        request = make_request("a", 10)
        for _ in range(3):  # it waits for memory
            manager.lookup_prefix(request)
        compute(manager, request)
        manager.suspend("a")
        compute(manager, request)
        assert sum(hashed) == 8


class TestPartialHits:
    """Blocks that are alike in their first tokens are copied, and computing goes on behind these."""

    def test_a_full_block_that_goes_on_differently_is_copied(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 8))
        second = make_request("b", [1, 2, 3, 4, 5, 6, 99, 99, 99])
        hit = manager.lookup_prefix(second)
        assert (hit.num_tokens, hit.tail_block_id) == (6, manager.block_table("a")[1])
        table = manager.allocate(second, hit, 9)
        assert manager.take_block_copies() == [(hit.tail_block_id, table[1])]
        assert table[0] == manager.block_table("a")[0]
        assert table[1] != hit.tail_block_id
        check(manager)

    @pytest.mark.parametrize("is_running", [True, False])
    def test_the_tail_of_a_prompt_is_copied(self, is_running: bool) -> None:
        manager = make_manager()
        first = make_request("a", 7)
        compute(manager, first)
        manager.publish_tail(first)
        source = manager.block_table("a")[1]
        if not is_running:
            manager.free("a")
        second = make_request("b", 12)
        hit = manager.lookup_prefix(second)
        assert (hit.num_tokens, hit.tail_block_id) == (7, source)
        table = manager.allocate(second, hit, 12)
        assert manager.take_block_copies() == [(source, table[1])]
        assert manager.lookup_prefix(make_request("c", 7)).tail_block_id == source, "it stays known"
        check(manager)

    def test_a_tail_grows_into_a_block(self) -> None:
        manager = make_manager()
        first = make_request("a", 7)
        compute(manager, first)
        manager.publish_tail(first)
        assert manager.extend("a", 7, 9) is not None
        first.output_token_ids, first.num_tokens, first.num_computed_tokens = [8, 9], 9, 9
        manager.publish(first)
        assert manager.lookup_prefix(make_request("b", 9)).block_ids == manager.block_table("a")[:2]
        check(manager)

    def test_without_another_block_the_source_is_used_where_it_lies(self) -> None:
        manager = make_manager(num_blocks=3)
        first = make_request("a", 7)
        compute(manager, first)
        manager.publish_tail(first)
        manager.free("a")
        second = make_request("b", 8)
        hit = manager.lookup_prefix(second)
        assert (hit.num_tokens, hit.num_free_blocks) == (7, 1)
        table = manager.allocate(second, hit, 8)
        assert table[1] == hit.tail_block_id
        assert manager.take_block_copies() == []
        check(manager)

    def test_the_source_may_be_among_the_fresh_blocks(self) -> None:
        """It is copied before anything is written."""
        manager = make_manager(num_blocks=4)
        other = make_request("x", [9])
        compute(manager, other)
        first = make_request("a", 3)
        compute(manager, first)
        manager.publish_tail(first)
        manager.free("a")
        manager.free("x")
        second = make_request("b", 12)
        hit = manager.lookup_prefix(second)
        table = manager.allocate(second, hit, 12)
        assert hit.tail_block_id in table
        copies = manager.take_block_copies()
        assert copies == ([] if table[0] == hit.tail_block_id else [(hit.tail_block_id, table[0])])
        check(manager)

    def test_salts_share_no_tails(self) -> None:
        manager = make_manager()
        first = make_request("a", 3, cache_salt=b"x")
        compute(manager, first)
        manager.publish_tail(first)
        assert manager.lookup_prefix(make_request("b", 4, cache_salt=b"x")).num_tokens == 3
        assert manager.lookup_prefix(make_request("c", 4)).num_tokens == 0

    def test_a_tail_that_is_evicted_is_forgotten(self) -> None:
        manager = make_manager(num_blocks=3)
        first = make_request("a", 3)
        compute(manager, first)
        manager.publish_tail(first)
        manager.free("a")
        compute(manager, make_request("b", [9] * 8))
        assert manager.lookup_prefix(make_request("c", 4)).num_tokens == 0
        check(manager)


class TestState:
    """Blocks hold recurrent state, as it is behind their last computed position."""

    @pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
    def test_hits_end_with_a_block(self, num_tokens: int, expected: int) -> None:
        manager = make_manager(has_state=True)
        compute(manager, make_request("a", 12))
        other = make_request("b", num_tokens)
        hit = manager.lookup_prefix(other)
        assert (hit.num_tokens, hit.tail_block_id) == (expected, 0)
        assert manager.prefix.why_stopped(other, hit).reason is PrefixEnd.WHOLE

    def test_no_part_of_a_block_is_found(self) -> None:
        manager = make_manager(has_state=True)
        first = make_request("a", 10)
        compute(manager, first)
        manager.publish_tail(first)
        other = make_request("b", [1, 2, 3, 4, 5, 6, 99, 99, 99])
        hit = manager.lookup_prefix(other)
        assert (hit.num_tokens, hit.tail_block_id) == (4, 0)
        assert manager.prefix.why_stopped(other, hit).reason is PrefixEnd.DIFFERS
        assert manager.lookup_prefix(make_request("c", 12)).num_tokens == 8
        manager.free("a")
        assert manager.pool.num_cached == 2
        check(manager)

    def test_the_rest_of_a_prompt_is_not_awaited(self) -> None:
        manager = KVManager(12, 16, has_state=True)
        first = make_request("a", 12)
        manager.allocate(first, manager.lookup_prefix(first), 12)
        other = make_request("b", 12)
        assert manager.prefix.find_coming(other, manager.lookup_prefix(other)) is None


class TestComing:
    """Other requests can find a block that a running prefill is about to compute."""

    def start(self, manager: KVManager, request: Request, num_tokens: int) -> None:
        manager.allocate(request, manager.lookup_prefix(request), num_tokens)
        request.num_inflight_tokens = num_tokens

    def commit(self, manager: KVManager, request: Request) -> None:
        request.num_computed_tokens += request.num_inflight_tokens
        manager.publish(request)

    def test_the_next_block_of_a_prefill_is_coming(self) -> None:
        manager = make_manager()
        first, second = make_request("a", 12), make_request("b", 12)
        self.start(manager, first, 4)
        awaited = manager.prefix.find_coming(second, manager.lookup_prefix(second))
        assert awaited is not None
        assert awaited.leader is first
        self.commit(manager, first)
        assert not manager.prefix.is_coming(awaited)
        again = manager.prefix.find_coming(second, manager.lookup_prefix(second))
        assert again is not None, "the block behind it is"
        check(manager)

    @pytest.mark.parametrize("prompt", [[1, 2, 3, 99, 99, 99], [99] * 6])
    def test_another_block_is_not(self, prompt: list[int]) -> None:
        manager = make_manager()
        self.start(manager, make_request("a", 12), 4)
        second = make_request("b", prompt)
        assert manager.prefix.find_coming(second, manager.lookup_prefix(second)) is None

    def test_nothing_comes_from_who_has_no_more_than_a_token_to_compute(self) -> None:
        manager = make_manager()
        first, second = make_request("a", 5), make_request("b", 12)
        self.start(manager, first, 4)
        self.commit(manager, first)
        assert manager.prefix.find_coming(second, manager.lookup_prefix(second)) is None

    @pytest.mark.parametrize("leaves", [KVManager.suspend, KVManager.free])
    def test_nothing_comes_from_who_runs_no_more(self, leaves: Callable[[KVManager, str], None]) -> None:
        manager = make_manager()
        first, second = make_request("a", 12), make_request("b", 12)
        self.start(manager, first, 4)
        awaited = manager.prefix.find_coming(second, manager.lookup_prefix(second))
        assert awaited is not None
        leaves(manager, "a")
        assert not manager.prefix.is_coming(awaited)
        assert manager.prefix.find_coming(second, manager.lookup_prefix(second)) is None
        check(manager)

    def test_who_leads_next_is_another(self) -> None:
        manager = make_manager()
        first, second, third = (make_request(name, 12) for name in "abc")
        self.start(manager, first, 4)
        awaited = manager.prefix.find_coming(second, manager.lookup_prefix(second))
        assert awaited is not None
        manager.free("a")
        self.start(manager, third, 4)
        assert not manager.prefix.is_coming(awaited), "nobody waits for one leader after the other without being asked"

    def test_the_rest_of_a_prompt_is_awaited_if_it_is_long_enough(self) -> None:
        manager = KVManager(12, 16)
        first = make_request("a", 12)
        manager.allocate(first, manager.lookup_prefix(first), 12)
        for num_tokens, is_awaited in ((12, True), (9, True), (8, False)):
            other = make_request(f"b{num_tokens}", num_tokens)
            assert (manager.prefix.find_coming(other, manager.lookup_prefix(other)) is not None) == is_awaited

    def test_common_blocks_are_counted(self) -> None:
        manager = make_manager(num_blocks=30)
        first, second = make_request("a", 40), make_request("b", [*range(1, 23), *[99] * 20])
        for request in (first, second):
            manager.lookup_prefix(request)
        assert manager.prefix.num_common_blocks(first, second) == 5
        assert manager.prefix.num_common_blocks(first, first) == 9


class TestTables:
    def test_extending_within_the_last_block_takes_nothing(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 5))
        before = manager.pool.num_available
        assert manager.extend("a", 5, 8) == ()
        assert manager.pool.num_available == before

    def test_extending_appends(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 5))
        table = manager.block_table("a")
        appended = manager.extend("a", 5, 13)
        assert appended is not None
        assert len(appended) == 2
        assert manager.block_table("a") == (*table, *appended)

    def test_extending_beyond_what_there_is_changes_nothing(self) -> None:
        manager = make_manager(num_blocks=3)
        compute(manager, make_request("a", 5))
        table = manager.block_table("a")
        assert manager.extend("a", 5, 9) is None
        assert manager.block_table("a") == table
        check(manager)

    def test_allocating_beyond_what_there_is_changes_nothing(self) -> None:
        manager = make_manager(num_blocks=3)
        request = make_request("a", 9)
        with pytest.raises(ValueError, match="2 available"):
            manager.allocate(request, manager.lookup_prefix(request), 9)
        check(manager)
        assert manager.pool.num_available == 2

    def test_a_request_has_one_table(self) -> None:
        manager = make_manager()
        request = make_request("a", 5)
        compute(manager, request)
        with pytest.raises(ValueError, match="holds blocks already"):
            manager.allocate(request, manager.lookup_prefix(request), 5)

    def test_freeing_what_never_had_blocks_is_fine(self) -> None:
        manager = make_manager()
        manager.lookup_prefix(make_request("a", 9))
        manager.free("a")
        manager.free("b")
        assert not manager.tables

    def test_a_shared_block_is_free_when_the_last_lets_go(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 9))
        compute(manager, make_request("b", 9))
        manager.free("a")
        assert manager.pool.num_available == manager.num_total_blocks - 3
        manager.free("b")
        assert manager.pool.num_available == manager.num_total_blocks
        check(manager)


class TestCopyOnWrite:
    def test_a_fork_that_shares_no_block_holds_its_parents_adapter(self) -> None:
        manager, parent = make_manager(), make_request("a", 4, adapter=make_adapter(1))
        manager.allocate(parent, manager.lookup_prefix(parent), 4, HashAdapter(ROOT, 1))
        manager.fork("a", "b", 0)
        check(manager)
        manager.free("a")
        assert manager.adapters.is_pinned(1)

    def test_a_fork_takes_no_memory(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 6))
        before = manager.pool.num_available
        manager.fork("a", "b", 6)
        assert manager.block_table("b") == manager.block_table("a")
        assert manager.pool.num_available == before
        check(manager)

    @pytest.mark.parametrize(("writer", "other"), [("a", "b"), ("b", "a")])
    def test_who_writes_first_gets_the_copy(self, writer: str, other: str) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 6))
        manager.fork("a", "b", 6)
        shared = manager.block_table("a")
        assert manager.extend(writer, 6, 7) == ()
        ((source, destination),) = manager.take_block_copies()
        assert source == shared[1]
        assert manager.block_table(writer) == (shared[0], destination)
        assert manager.block_table(other) == shared
        assert manager.extend(other, 6, 7) == ()
        assert manager.take_block_copies() == [], "the other one owns the original now"
        check(manager)

    def test_full_blocks_stay_shared(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 8))
        manager.fork("a", "b", 8)
        assert manager.extend("a", 8, 9) != ()
        assert manager.extend("b", 8, 9) != ()
        assert manager.take_block_copies() == []
        assert manager.block_table("a")[:2] == manager.block_table("b")[:2]
        check(manager)

    def test_no_copy_without_memory(self) -> None:
        manager = make_manager(num_blocks=3)
        compute(manager, make_request("a", 6))
        manager.fork("a", "b", 6)
        assert manager.extend("a", 6, 7) is None
        assert manager.take_block_copies() == []
        manager.free("b")
        assert manager.extend("a", 6, 7) == ()
        check(manager)

    def test_only_what_the_parent_holds_can_be_shared(self) -> None:
        manager = make_manager()
        compute(manager, make_request("a", 6))
        with pytest.raises(ValueError, match="can't share 9 tokens"):
            manager.fork("a", "b", 9)
        manager.fork("a", "b", 6)
        with pytest.raises(ValueError, match="can't share"):
            manager.fork("a", "b", 6)


class ManagerMachine(RuleBasedStateMachine):
    """Rows are run as a scheduler would; `content` is what a device would have in each block: (salt, adapter, tokens of the
    prefix), or of a page of an adapter (its number, [the page]). An adapter has as many pages as its number says."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        eviction=st.sampled_from([LeastRecentlyUsed, LowestPriorityFirst, TenantFair]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, eviction: type[EvictionPolicy]) -> None:
        self.manager = KVManager(num_blocks, block_size, enable_prefix_caching=caching, eviction=eviction())
        self.requests: dict[str, Request] = {}
        self.content: dict[int, tuple[bytes, list[int]]] = {}
        self.placed: dict[int, tuple[int, ...]] = {}
        self.num_made = 0

    @rule(
        prompt=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=12),
        salt=st.sampled_from([b"", b"s"]),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-1, 1),
        adapter=st.sampled_from([None, None, make_adapter(1), make_adapter(2), make_adapter(3)]),
    )
    def admit(self, prompt: list[int], salt: bytes, tenant: str, priority: int, adapter: AdapterRef | None) -> None:
        self.num_made += 1
        ranks = {"tenant": tenant, "priority": priority}
        self.readmit(make_request(f"r{self.num_made}", prompt, cache_salt=salt, adapter=adapter, **ranks))

    def readmit(self, request: Request) -> None:
        manager = self.manager
        hit = manager.lookup_prefix(request)
        assert hit.num_tokens < request.num_tokens
        for idx, block_id in enumerate(hit.block_ids):
            end = (idx + 1) * manager.block_size
            assert self.content[block_id] == (self.name(request), self.tokens(request)[:end]), "a hit on other content"
        if hit.tail_block_id:
            salt, tokens = self.content[hit.tail_block_id]
            own = (self.name(request), self.tokens(request)[: hit.num_tokens])
            assert (salt, tokens[: hit.num_tokens]) == own, "a hit on the beginning of other content"
        num_needed = manager.num_blocks_for(request.num_tokens) - len(hit.block_ids) + hit.num_free_blocks
        packed = HashAdapter(ROOT, request.adapter_number)
        num_needed += manager.adapters.num_missing(request.adapter_number, packed) if request.adapter else 0
        if num_needed > manager.pool.num_available:
            manager.free(request.request_id)
            self.requests.pop(request.request_id, None)
            return
        before = manager.pool.num_available
        manager.allocate(request, hit, request.num_tokens, packed)
        assert manager.pool.num_available == before - num_needed
        self.copy()
        self.requests[request.request_id] = request
        request.num_computed_tokens = hit.num_tokens
        self.write(request, request.num_tokens)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 20), token_ids=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5))
    def grow(self, pick: int, token_ids: list[int]) -> None:
        request = self.pick(pick)
        num_tokens = request.num_tokens + len(token_ids)
        if self.manager.extend(request.request_id, request.num_computed_tokens, num_tokens) is None:
            return
        self.copy()
        request.output_token_ids += token_ids
        request.num_tokens = num_tokens
        self.write(request, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 20))
    def fork(self, pick: int) -> None:
        parent = self.pick(pick)
        self.num_made += 1
        child = make_request(f"r{self.num_made}", self.tokens(parent), cache_salt=parent.cache_salt, adapter=parent.adapter)
        child.num_computed_tokens = parent.num_computed_tokens
        self.manager.fork(parent.request_id, child.request_id, parent.num_computed_tokens)
        self.requests[child.request_id] = child

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 20))
    def free(self, pick: int) -> None:
        request = self.pick(pick)
        self.manager.publish_tail(request)
        del self.requests[request.request_id]
        self.manager.free(request.request_id)
        assert self.manager.block_table(request.request_id) == ()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 20))
    def suspend_and_return(self, pick: int) -> None:
        request = self.pick(pick)
        self.manager.publish_tail(request)
        del self.requests[request.request_id]
        self.manager.suspend(request.request_id)
        self.readmit(request)

    def copy(self) -> None:
        for number in self.manager.adapters.take_drops():
            del self.placed[number]
        for source, destination in self.manager.take_block_copies():
            salt, tokens = self.content[source]
            self.content[destination] = (salt, list(tokens))
        for placement in self.manager.adapters.take_placements():
            assert placement.number not in self.placed, "it is there already"
            self.placed[placement.number] = placement.block_ids
            for idx, block_id in enumerate(placement.block_ids):
                self.content[block_id] = (b"page of %d" % placement.number, [idx])

    def name(self, request: Request) -> bytes:
        """The name under which its prefixes are found."""
        return request.cache_salt + b"%d" % request.adapter_number

    def pick(self, pick: int) -> Request:
        return list(self.requests.values())[pick % len(self.requests)]

    def tokens(self, request: Request) -> list[int]:
        return [*request.prompt_token_ids, *request.output_token_ids]

    def write(self, request: Request, num_tokens: int) -> None:
        """Compute up to `num_tokens`, as a device would, and commit."""
        size = self.manager.block_size
        table = self.manager.block_table(request.request_id)
        for idx in range(request.num_computed_tokens // size, self.manager.num_blocks_for(num_tokens)):
            writable = self.manager.pool.ref_count(table[idx]) == 1
            assert writable or num_tokens == request.num_computed_tokens, "a shared block is written"
            self.content[table[idx]] = (self.name(request), self.tokens(request)[: (idx + 1) * size])
        request.num_computed_tokens = num_tokens
        self.manager.publish(request)

    def states_add_up(self) -> None:
        pool = self.manager.pool
        drawn = draw(self.manager, self.requests.values())
        residents = self.manager.adapters.residents
        numbers = {request.adapter_number for request in self.requests.values()} - {0}
        assert residents.keys() >= numbers, "a request's adapter was evicted"
        pinned = {block_id for number in numbers for block_id in residents[number].block_ids}
        held = [block_id for block_id in range(pool.num_blocks) if pool.ref_count(block_id) and block_id not in pinned]
        assert drawn.states == {
            BlockState.FREE: pool.num_available - pool.num_cached,
            BlockState.CACHED: pool.num_cached,
            BlockState.HELD: len(held) - pool.num_shared,
            BlockState.SHARED: pool.num_shared,
            BlockState.ADAPTER: len(pinned),
            BlockState.NULL: 1,
        }
        assert sum(drawn.states.values()) == sum(run.num_blocks for run in drawn.runs) == pool.num_blocks
        num_filled = dict.fromkeys(held, 0)
        for request in self.requests.values():
            for idx, block_id in enumerate(self.manager.block_table(request.request_id)):
                num_tokens = request.num_computed_tokens - idx * self.manager.block_size
                num_filled[block_id] = max(num_filled[block_id], min(self.manager.block_size, num_tokens))
        num_slots = len(held) * self.manager.block_size
        assert drawn.waste == pytest.approx(1 - sum(num_filled.values()) / num_slots if held else 0)

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        check(self.manager)
        self.states_add_up()
        assert self.manager.tables.keys() == self.requests.keys()
        assert {number: resident.block_ids for number, resident in self.manager.adapters.residents.items()} == self.placed
        for number, block_ids in self.placed.items():
            pages = [self.content[block_id] for block_id in block_ids]
            assert pages == [(b"page of %d" % number, [idx]) for idx in range(number)], "a page of an adapter was overwritten"
        for request in self.requests.values():
            table = self.manager.block_table(request.request_id)
            assert len(table) == self.manager.num_blocks_for(request.num_computed_tokens)
            for idx, block_id in enumerate(table):
                expected = self.tokens(request)[: (idx + 1) * self.manager.block_size]
                assert self.content[block_id] == (self.name(request), expected), "a block was overwritten"


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(stateful_step_count=30)
