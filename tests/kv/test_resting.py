"""Conversations between their turns: how long their cached blocks outlast others', and what a history may have lost."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.block_pool import MAX_RESTING_SHARE, BlockPool
from penstock.kv.eviction import EvictionPolicy, LeastRecentlyUsed, TenantFair
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.testing import make_request
from penstock.testing.hash_executor import HashAdapter
from penstock.types.request import Request
from penstock.types.stats import PrefixEnd, PrefixStop
from support.fake_adapters import make_adapter

BLOCK = 4
NUM_ANSWER_TOKENS = 6
REST_NS = 60_000_000_000


class Server:
    """A KV manager that answers one request after another; each answer is tokens that nothing else has."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None, *, has_state: bool = False) -> None:
        self.manager = KVManager(
            1 + num_blocks, BLOCK, eviction=eviction or LeastRecentlyUsed(rest_ns=REST_NS), has_state=has_state
        )
        self.num_found = 0
        """Tokens that the last request found."""
        self.stop: PrefixStop | None = None
        """Why it found no more."""
        self._ids = count()
        self._tokens = count(10_000)

    def ask(self, prompt: list[int], *, tenant: str = "", conversation: bytes = b"") -> list[int]:
        """Return the prompt and its answer. Each request takes a second."""
        self.wait(1_000_000_000)
        request = make_request(f"r{next(self._ids)}", prompt, tenant=tenant, conversation=conversation)
        manager, hit = self.manager, self.manager.lookup_prefix(request)
        self.num_found, self.stop = hit.num_tokens, manager.prefix.why_stopped(request, hit)
        manager.allocate(request, hit, request.num_tokens)
        self._compute(request)
        for token_id in self.fresh(NUM_ANSWER_TOKENS):
            request.output_token_ids.append(token_id)
            request.num_tokens += 1
            manager.extend(request.request_id, request.num_computed_tokens, request.num_tokens)
            self._compute(request)
        manager.free(request.request_id)
        check(manager)
        return [*prompt, *request.output_token_ids]

    def fresh(self, num_tokens: int) -> list[int]:
        """Tokens that nothing else has."""
        return [next(self._tokens) for _ in range(num_tokens)]

    def ask_aside(self, num_requests: int, prefix: list[int] | None = None, conversation: bytes = b"") -> None:
        """One-off requests of 8 new tokens after the prefix."""
        for _ in range(num_requests):
            self.ask([*(prefix or []), *self.fresh(8)], conversation=conversation)

    def wait(self, num_ns: int) -> None:
        self.manager.pool.now_ns += num_ns

    def _compute(self, request: Request) -> None:
        request.num_computed_tokens = request.num_tokens
        self.manager.publish(request)
        self.manager.publish_tail(request)


def num_resting(pool: BlockPool) -> int:
    return sum(len(group.resting) for group in pool._groups.values())


def two_turns(server: Server, tenant: str = "") -> list[int]:
    """A conversation after its second turn, of 34 tokens in 9 blocks."""
    history = server.ask(server.fresh(14), tenant=tenant)
    return server.ask([*history, *server.fresh(8)], tenant=tenant)


def test_a_conversation_outlasts_requests_that_are_asked_once() -> None:
    for rest_ns, num_found in ((0, 0), (REST_NS, 33)):
        server = Server(24, LeastRecentlyUsed(rest_ns=rest_ns))
        history = two_turns(server)
        server.ask_aside(20)
        server.ask(history)
        assert server.num_found == num_found


def test_after_its_rest_it_is_as_old_as_others() -> None:
    server = Server(24)
    history = two_turns(server)
    server.wait(REST_NS + 1)
    server.ask_aside(20)
    server.ask(history)
    assert server.num_found == 0


def test_what_is_older_than_its_rest_goes_first_all_the_same() -> None:
    """A conversation of long ago outlasts requests of still longer ago, as it would if nobody rested."""
    server = Server(24)
    server.ask_aside(2)
    history = two_turns(server)
    server.wait(1000 * REST_NS)
    server.ask_aside(1)
    server.ask(history)
    assert server.num_found == 33


def test_of_a_request_like_an_earlier_one_what_was_found_rests() -> None:
    """The same prompt again, as from a client that tries again, and prompts with a common beginning, continue nothing."""
    server = Server(24)
    prompt = server.fresh(14)
    server.ask(prompt)
    assert num_resting(server.manager.pool) == 0
    server.ask(prompt)
    server.ask([*prompt[:11], *server.fresh(8)])
    assert num_resting(server.manager.pool) == 4


def test_an_adapter_that_is_used_again_does_not_rest() -> None:
    """It is cheap to place again, and the requests that had it are not."""
    server = Server(24)
    manager, adapter = server.manager, make_adapter(1)
    for name in "ab":
        request = make_request(name, server.fresh(4), adapter=adapter)
        manager.allocate(request, manager.lookup_prefix(request), 4, HashAdapter(1, 2))
        manager.free(name)
    assert manager.adapters.residents
    assert num_resting(manager.pool) == 0


def test_a_preempted_request_that_finds_its_own_blocks_does_not_rest() -> None:
    server = Server(24)
    manager, request = server.manager, make_request("a", server.fresh(14))
    for request.num_preemptions in (0, 1):
        manager.allocate(request, manager.lookup_prefix(request), 14)
        request.num_computed_tokens = 14
        manager.publish(request)
        manager.suspend("a")
    assert manager.pool.num_cached
    assert num_resting(manager.pool) == 0


def test_a_prefix_that_others_share_outlasts_them() -> None:
    """A system prompt that one-off requests share with a conversation is the beginning of that, too."""
    server = Server(40)
    system = server.fresh(12)
    history = server.ask([*system, *server.fresh(4)])
    history = server.ask([*history, *server.fresh(8)])
    server.ask_aside(5, system)
    server.ask_aside(40)
    server.ask(history)
    assert server.num_found == len(history) - 1


def test_conversations_leave_others_their_share() -> None:
    """Eight conversations want twice the cache; a system prompt that is in use all the time is not lost to them."""
    server = Server(48)
    system = server.fresh(12)
    histories = [server.fresh(14) for _ in range(8)]
    for _ in range(3):
        for idx, history in enumerate(histories):
            histories[idx] = [*server.ask(history, conversation=str(idx).encode()), *server.fresh(4)]
            server.ask_aside(1, system)
            assert server.num_found in (0, 12)
    server.ask_aside(1, system)
    assert server.num_found == 12
    assert num_resting(server.manager.pool) > server.manager.pool.num_cached / 2


def test_the_first_turn_rests_if_the_client_names_the_conversation() -> None:
    for name, num_found in ((b"", 0), (b"mine", 19)):
        server = Server(24)
        history = server.ask(server.fresh(14), conversation=name)
        server.ask_aside(20)
        server.ask(history)
        assert server.num_found == num_found


def test_requests_of_its_name_that_are_asked_aside_do_not_rest() -> None:
    server = Server(24)
    history = server.ask(server.fresh(14), conversation=b"mine")
    history = server.ask([*history, *server.fresh(8)], conversation=b"mine")
    num_before = num_resting(server.manager.pool)
    server.ask_aside(20, conversation=b"mine")
    assert num_resting(server.manager.pool) == num_before
    server.ask(history)
    assert server.num_found == 33


def test_who_names_a_new_conversation_each_time_wins_nothing_of_another_tenant() -> None:
    server = Server(48, TenantFair(rest_ns=REST_NS))
    history = two_turns(server, tenant="honest")
    for idx in range(200):
        server.ask(server.fresh(14), tenant="greedy", conversation=str(idx).encode())
    server.ask(history, tenant="honest")
    assert server.num_found == 33


@pytest.mark.parametrize("num_prompt", range(14, 14 + BLOCK))
@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_a_history_without_the_reasoning_is_found_up_to_the_answer(num_prompt: int, num_kept: int) -> None:
    """To the token, and the explanation says where the history differs from the answer."""
    server = Server(64)
    prompt = server.fresh(num_prompt)
    answered = server.ask(prompt)
    server.ask([*answered[: num_prompt + num_kept], *server.fresh(9)])
    assert server.stop == PrefixStop(PrefixEnd.ANSWER, num_prompt + num_kept)
    assert server.num_found == num_prompt + num_kept


def test_a_prompt_that_opens_the_reasoning_is_no_other_conversation() -> None:
    server = Server(64)
    answered = server.ask(server.fresh(15))
    server.ask([*answered[:13], *server.fresh(9)])
    assert server.stop == PrefixStop(PrefixEnd.ANSWER, 13)
    server.ask([*answered[:12], *server.fresh(9)])
    assert server.stop == PrefixStop(PrefixEnd.DIFFERS, 12)


def test_a_history_that_has_all_of_the_answer_differs_nowhere() -> None:
    server = Server(64)
    answered = server.ask(server.fresh(15))
    server.ask([*answered, *server.fresh(9)])
    assert server.stop == PrefixStop(PrefixEnd.UNSEEN, len(answered))


@pytest.mark.parametrize("num_prompt", range(14, 14 + BLOCK))
def test_with_recurrent_state_it_is_found_up_to_the_block(num_prompt: int) -> None:
    server = Server(64, has_state=True)
    prompt = server.fresh(num_prompt)
    answered = server.ask(prompt)
    server.ask([*answered[:num_prompt], *server.fresh(9)])
    assert server.num_found == num_prompt - num_prompt % BLOCK
    assert server.stop == PrefixStop(PrefixEnd.ANSWER, num_prompt)


class RestingPoolMachine(RuleBasedStateMachine):
    """The pool against a list of (when it was cached, whether it rests) in which the next one is searched for."""

    @initialize(num_blocks=st.integers(2, 9), rest_ns=st.sampled_from([0, 3]))
    def start(self, num_blocks: int, rest_ns: int) -> None:
        self.pool = BlockPool(num_blocks, LeastRecentlyUsed(rest_ns=rest_ns))
        self.rest_ns = rest_ns
        self.held: list[int] = []
        self.cached: dict[int, tuple[int, bool]] = {}
        """Block -> when it was cached, and whether it rests; in the order in which they were cached."""
        self.resting: set[int] = set()

    @rule(num_ns=st.integers(1, 5))
    def wait(self, num_ns: int) -> None:
        self.pool.now_ns += num_ns

    @precondition(lambda self: self.pool.num_available)
    @rule()
    def allocate(self) -> None:
        expected = None if self.pool.num_available > self.pool.num_cached else self.next_to_go()
        (block_id,) = self.pool.allocate(1)
        if expected is not None:
            assert block_id == expected
            del self.cached[block_id]
        self.resting.discard(block_id)
        self.held.append(block_id)

    def next_to_go(self) -> int:
        plain = next((block_id for block_id in self.cached if block_id not in self.resting), None)
        rests = next((block_id for block_id in self.cached if block_id in self.resting), None)
        if plain is None or rests is None:
            found = rests if plain is None else plain
            assert found is not None
            return found
        num_resting = len(self.resting & self.cached.keys())
        bonus_ns = self.rest_ns if num_resting <= MAX_RESTING_SHARE * len(self.cached) else 0
        return plain if self.cached[plain][0] <= self.cached[rests][0] + bonus_ns else rests

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans(), rests=st.booleans())
    def release(self, data: st.DataObject, keep: bool, rests: bool) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.held.remove(block_id)
        self.pool.release(block_id, keep=keep, rests=rests)
        if keep:
            self.resting |= {block_id} if rests else set()
            self.cached[block_id] = (self.pool.now_ns, block_id in self.resting)
        else:
            self.resting.discard(block_id)

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), rests=st.booleans())
    def revive(self, data: st.DataObject, rests: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.hold(block_id, rests=rests)
        self.resting |= {block_id} if rests else set()
        del self.cached[block_id]
        self.held.append(block_id)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_cached == len(self.cached)
        assert num_resting(self.pool) == len(self.resting & self.cached.keys())
        assert sorted(self.pool.free_block_ids())[-1:] <= [self.pool.num_blocks]


TestRestingPool = RestingPoolMachine.TestCase
TestRestingPool.settings = settings(stateful_step_count=40)
