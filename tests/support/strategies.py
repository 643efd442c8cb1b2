"""Hypothesis strategies: whole workloads, small enough that everything collides. Called by property tests.

Needs the `test` extra. A workload has few distinct tokens and few prefixes, so that caches hit; a pool that holds any one
request but seldom all, so that memory runs out; budgets from one token up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from penstock.clock import Clock, VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import BlockStore, Executor
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.sched.policies.base import Budget, Gate, Policies, Reserve
from penstock.sched.policies.budgets import DecodeFirst, HoldLatency
from penstock.sched.policies.gates import Continuous, Dynamic, Static
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing.builders import make_core, make_request
from penstock.testing.driver import STEP_NS, LateWorker, Outcome
from penstock.testing.hash_executor import HashExecutor, HashModel, expected_prompt_logprobs, expected_tokens
from penstock.types.adapter import BASE, AdapterSource
from penstock.types.events import Abort, Add, Command, Stop
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams
from support.fake_adapters import FakeAdapters, make_adapter
from support.half_right import HalfRight
from support.hash_matcher import HashMatcher
from support.memory_store import Faults, MemoryStore

EOS_TOKEN_ID = 3
MODEL = HashModel(vocab_size=40, eos_token_id=EOS_TOKEN_ID, eos_period=12)
MAX_GROWTH_TOKENS = 6
MAX_SHARE = 0.3
"""The most that drawn watermarks keep back: a share of the pool, and tokens for each running request."""
NO_FAULTS = Faults()
JOB = "job"
"""The tenant whose requests are background ones."""
MAX_ADAPTERS = 4
"""Adapters of requests have numbers up to this."""
MAX_TURN = 25
"""Requests and aborts arrive in turns [0, MAX_TURN]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTier:
    """A tier below the pool: how large, how slow and how unreliable."""

    num_slots: int
    num_staged_blocks: int
    max_load_blocks: int = 64
    promptness: float = 1.0
    faults: Faults = NO_FAULTS
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Where adapters come from: how many run, how slowly they come, how many stay in memory, and which never come."""

    max_running: int
    max_in_memory: int
    max_pages: int
    """Adapter k has k pages, at most so many."""
    promptness: float = 1.0
    failing: tuple[int, ...] = ()
    seed: int = 0

    def make(self) -> tuple[FakeAdapters, LateWorker]:
        worker = LateWorker(self.promptness, self.seed)
        source = FakeAdapters(
            worker=worker,
            num_pages=lambda number: min(number, self.max_pages),
            max_in_memory=self.max_in_memory,
            failing=self.failing,
        )
        return source, worker


@dataclass(frozen=True, slots=True)
class Engine:
    """A configuration, from which any number of equal engines can be made."""

    capacity: Capacity
    policies: Policies
    enable_prefix_caching: bool
    lower: LowerTier | None = None
    depth: int = 1
    """Steps in flight."""
    seed: int = 0
    """When the executor computes a step, with a depth of 2."""
    lora: Lora | None = None

    @property
    def fills_steps(self) -> bool:
        """True if tokens of a step are left over only where nobody could use them."""
        budget = self.policies.budget
        return isinstance(budget, DecodeFirst) and not budget.max_long_partial_prefills

    @property
    def is_continuous(self) -> bool:
        return isinstance(self.policies.gate, Continuous)

    def make(self, adapters: AdapterSource | None = None) -> tuple[EngineCore, HashExecutor]:
        """`adapters`: those of its `lora`."""
        policies = deepcopy(self.policies)  # some keep accounts
        tier = None if self.lower is None else Tier(self.lower.num_slots, max_load_blocks=self.lower.max_load_blocks)
        core = make_core(
            self.capacity,
            policies,
            enable_prefix_caching=self.enable_prefix_caching,
            tier=tier,
            adapters=adapters,
            max_adapters=1 if self.lora is None else self.lora.max_running,
        )
        return core, HashExecutor(self.capacity, model=MODEL, depth=self.depth, seed=self.seed)

    def make_transfers(
        self, core: EngineCore, executor: Executor, clock: Clock, store: BlockStore | None = None
    ) -> tuple[Transfers, LateWorker] | tuple[None, None]:
        """The carrier of blocks between the two, if there is a tier below the pool; `store` takes the place of its own."""
        lower = self.lower
        if lower is None:
            return None, None
        worker = LateWorker(lower.promptness, lower.seed)
        store = store or MemoryStore(lower.num_slots, lower.faults, lower.seed)
        kv = core.scheduler.kv
        return Transfers(kv, executor, store, clock=clock, worker=worker, num_staged_blocks=lower.num_staged_blocks), worker


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as values (a `Request` is written to, so each run makes its own) and who ends early."""

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    salts: tuple[bytes, ...]
    ranks: tuple[tuple[int, str, int | None], ...]
    """(priority, tenant, predicted new tokens), which change who is served first and nothing else."""
    arrival_turns: tuple[int, ...]
    early_ends: tuple[tuple[int, int, bool], ...]
    """(turn, request index, is a Stop rather than an Abort); may come before the request, or after its end."""
    adapters: tuple[int, ...] = ()
    """Numbers of the requests' adapters, 0 for none; nothing: none has one."""

    def requests(self, clock: VirtualClock | None = None) -> list[Request]:
        """With a clock, masks take time: none, or up to four steps, by the request."""
        numbers = self.adapters or (BASE,) * len(self.prompts)
        parts = zip(self.prompts, self.samplings, self.salts, self.ranks, self.arrival_turns, numbers, strict=True)
        return [
            make_request(
                f"r{idx}",
                prompt,
                arrival_ns=turn,
                sampling=sampling,
                priority=priority,
                tenant=tenant,
                background=tenant == JOB,
                cache_salt=salt,
                predicted_new_tokens=predicted,
                matcher=matcher_of(sampling, clock, idx % 3 * 2 * STEP_NS),
                adapter=make_adapter(number) if number else None,
            )
            for idx, (prompt, sampling, salt, (priority, tenant, predicted), turn, number) in enumerate(parts)
        ]

    def ended_early(self, *, is_stop: bool) -> set[str]:
        """Return the ids of requests that get an Abort, or a Stop, after they were added."""
        ends = [(turn, idx) for turn, idx, is_one in self.early_ends if is_one is is_stop]
        return {f"r{idx}" for turn, idx in ends if turn >= self.arrival_turns[idx]}

    def script(self, requests: list[Request]) -> dict[int, list[Command]]:
        """Commands by turn."""
        script: dict[int, list[Command]] = {}
        for request in requests:
            script.setdefault(request.arrival_ns, []).append(Add(request))
        for turn, idx, is_stop in self.early_ends:
            command = Stop(f"r{idx}", "stop string") if is_stop else Abort(f"r{idx}")
            script.setdefault(turn, []).append(command)
        return script


def gates(max_batch_size: int) -> st.SearchStrategy[Gate | str]:
    """Every gate that has a name, and those that batch with batches, windows and buckets so small that all of them matter."""
    delays_ns = st.sampled_from([0, 5, 3 * STEP_NS])
    sizes = st.integers(0, max_batch_size)
    buckets = st.sampled_from([(), (4,), (3, 9, 20)])
    static = st.builds(Static, sizes, delays_ns)
    dynamic = st.builds(Dynamic, st.just(0), st.sampled_from([(), (2,)]), delays_ns, buckets)
    return st.one_of(st.just("continuous"), st.sampled_from(sorted(TABLES["gate"])), static, dynamic)


def lower_tiers() -> st.SearchStrategy[LowerTier]:
    """From one that keeps everything to one in which all that can break does."""
    rarely = st.sampled_from([0.0, 0.0, 0.1, 0.5])
    faults = st.one_of(
        st.just(NO_FAULTS),
        st.builds(Faults, write_fails=rarely, read_fails=rarely, no_memory=rarely, corrupts=rarely, loses=rarely),
    )
    return st.builds(
        LowerTier,
        num_slots=st.sampled_from([1, 3, 30, 500]),
        num_staged_blocks=st.sampled_from([4, 8, 200]),
        max_load_blocks=st.sampled_from([1, 3, 64]),
        promptness=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        faults=faults,
        seed=st.integers(0, 3),
    )


def loras() -> st.SearchStrategy[Lora]:
    """From adapters that are always there to ones that come late, fail, and are forgotten at once."""
    return st.builds(
        Lora,
        max_running=st.sampled_from([1, 2, 32]),
        max_in_memory=st.sampled_from([1, 2, 64]),
        max_pages=st.sampled_from([1, 2, MAX_ADAPTERS]),
        promptness=st.sampled_from([0.1, 0.5, 1.0]),
        failing=st.sampled_from([(), (), (2,)]),
        seed=st.integers(0, 3),
    )


@st.composite
def engines(draw: st.DrawFn, max_model_len: int = 40, *, has_lower_tier: bool = False, has_adapters: bool = False) -> Engine:
    """Any request of up to `max_model_len` tokens fits alone, beside its adapter. Every policy that has a name is drawn."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    max_rows = draw(st.integers(1, 6))
    max_batch_size = max_rows // 2
    num_state_blocks = 0 if has_lower_tier else draw(st.sampled_from([0, 0, 1, 3]))
    unlimited = Capacity(
        num_blocks=0,
        block_size=block_size,
        max_rows=max_rows,
        max_step_tokens=draw(st.integers(max(1, max_batch_size), max_model_len)),
        max_model_len=max_model_len,
        has_state=not num_state_blocks and draw(st.booleans()),
        num_state_blocks=num_state_blocks,
        max_scored=draw(st.integers(1, 9)),
        window=0 if num_state_blocks else draw(st.sampled_from([0, 0, 2, 5, 9, 20])),
    )
    lora = draw(loras()) if has_adapters else None
    num_needed = unlimited.most_blocks(max_model_len - 1) + (0 if lora is None else lora.max_pages)
    depth = 1 if num_state_blocks else draw(st.sampled_from([1, 2, 2]))
    checks_guesses = depth == 1 and not (num_state_blocks or unlimited.has_state) and draw(st.booleans())
    num_blocks = 1 + num_needed + draw(st.integers(0, num_needed))
    capacity = replace(unlimited, num_blocks=num_blocks, checks_guesses=checks_guesses)
    policies = make_policies(
        gate=draw(gates(max_batch_size)) if max_batch_size else "continuous",
        order=draw(st.sampled_from(sorted(TABLES["order"]))),
        budget=draw(budgets()),
        reserve=draw(reserves()),
        victim=draw(st.sampled_from(sorted(TABLES["victim"]))),
        eviction=draw(st.sampled_from(sorted(TABLES["eviction"]))),
        guesser=HalfRight(MODEL, capacity) if draw(st.booleans()) else "suffix",
        background_share=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    is_caching = draw(st.sampled_from([True, True, False]))
    lower = draw(lower_tiers()) if has_lower_tier else None
    return Engine(capacity, policies, is_caching, lower, depth, draw(st.integers(0, 3)), lora)


def budgets() -> st.SearchStrategy[Budget | str]:
    capped = st.builds(
        DecodeFirst,
        long_prefill_token_threshold=st.sampled_from([0, 1, 5]),
        max_long_partial_prefills=st.sampled_from([0, 0, 1, 2]),
    )
    held = st.builds(
        HoldLatency,
        slo_itl_ns=st.sampled_from([0, 1_500_000]),
        min_chunk_tokens=st.sampled_from([1, 4]),
        long_prefill_token_threshold=st.sampled_from([0, 1, 5]),
        max_long_partial_prefills=st.sampled_from([0, 1, 2]),
    )
    return st.one_of(capped, capped, held, st.sampled_from(sorted(TABLES["budget"])))


def reserves() -> st.SearchStrategy[Reserve | str]:
    watermark = st.builds(
        Watermark,
        share=st.sampled_from([0.0, 0.01, MAX_SHARE]),
        growth_tokens=st.sampled_from([0, 0, MAX_GROWTH_TOKENS]),
    )
    return st.one_of(watermark, watermark, st.sampled_from(sorted(TABLES["reserve"])))


def prompts(max_tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
    """One of two prefixes, of one of four lengths, then a short tail over two tokens; so equal beginnings are common."""
    prefix = st.sampled_from([(1,) * max_tokens, (1, 2) * max_tokens])
    cut = st.sampled_from([0, max_tokens // 4, max_tokens // 2, max_tokens - 6])
    tail = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6)
    return st.builds(lambda tokens, length, rest: (*tokens[:length], *rest), prefix, cut, tail)


def samplings(max_tokens: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.one_of(st.just(max_tokens), st.integers(1, max_tokens)),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 2),
        stop_token_ids=st.sampled_from([(), (), (EOS_TOKEN_ID,)]),
        follows_grammar=st.sampled_from([False, False, True]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
    )


class SlowMatcher(HashMatcher):
    """Takes time for each token, on a clock that stands still otherwise."""

    def __init__(self, vocab_size: int, clock: VirtualClock, token_ns: int, **fields: int | None) -> None:
        super().__init__(vocab_size, **fields)
        self._clock = clock
        self._token_ns = token_ns

    def accept(self, token_ids: Sequence[int]) -> None:
        self._clock.advance(self._token_ns)
        super().accept(token_ids)


def matcher_of(sampling: SamplingParams, clock: VirtualClock | None = None, token_ns: int = 0) -> HashMatcher | None:
    """For a request of these parameters. Some grammars have an end, and then allow nothing but the end token; some force most
    of their tokens."""
    if not sampling.follows_grammar:
        return None
    max_tokens = 5 if EOS_TOKEN_ID in sampling.stop_token_ids else None
    num_forced = (0, 4, 7)[sampling.seed]
    fields = {"seed": sampling.seed, "max_tokens": max_tokens, "end_token_id": EOS_TOKEN_ID, "num_forced": num_forced}
    if clock is None:
        return HashMatcher(MODEL.vocab_size, **fields)
    return SlowMatcher(MODEL.vocab_size, clock, token_ns, **fields)


def ranks() -> st.SearchStrategy[tuple[int, str, int | None]]:
    """Priority, tenant, predicted new tokens."""
    return st.tuples(st.integers(-1, 1), st.sampled_from(["", "a", "b", JOB]), st.one_of(st.none(), st.integers(1, 40)))


@st.composite
def workloads(
    draw: st.DrawFn,
    max_model_len: int = 40,
    max_requests: int = 8,
    *,
    has_early_ends: bool = True,
    has_adapters: bool = False,
) -> Workload:
    """Some requests reach `max_model_len` before their own limit."""
    num_requests = draw(st.integers(1, max_requests))

    def each(strategy: st.SearchStrategy[object]) -> tuple[object, ...]:
        return tuple(draw(strategy) for _ in range(num_requests))

    early_end = st.tuples(st.integers(0, MAX_TURN), st.integers(0, num_requests - 1), st.booleans())
    return Workload(
        prompts=each(prompts(max_model_len - 1)),  # type: ignore[arg-type]
        samplings=each(samplings(max_model_len)),  # type: ignore[arg-type]
        salts=each(st.sampled_from([b"", b"", b"salt"])),  # type: ignore[arg-type]
        ranks=each(ranks()),  # type: ignore[arg-type]
        arrival_turns=each(st.one_of(st.just(0), st.integers(0, MAX_TURN))),  # type: ignore[arg-type]
        early_ends=tuple(draw(st.lists(early_end, max_size=4))) if has_early_ends else (),
        adapters=each(st.integers(BASE, MAX_ADAPTERS)) if has_adapters else (),  # type: ignore[arg-type]
    )


def expected_scores(request: Request) -> list[TokenLogprobs]:
    """The entries that a request has to be given for its prompt."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return []
    return expected_prompt_logprobs(request.prompt_token_ids, num_top, model=MODEL, adapter=request.adapter)


def check_answers(engine: Engine, workload: Workload, requests: Sequence[Request], outcomes: Mapping[str, Outcome]) -> None:
    """Raise AssertionError unless every request got what the hash model says. A part is enough only for a request that the
    workload ends early."""
    assert outcomes.keys() == {request.request_id for request in requests}
    aborted, stopped = workload.ended_early(is_stop=False), workload.ended_early(is_stop=True)
    for request in requests:
        outcome = outcomes[request.request_id]
        expected = expected_tokens(
            request.prompt_token_ids,
            request.sampling,
            model=MODEL,
            max_model_len=engine.capacity.max_model_len,
            matcher=matcher_of(request.sampling),
            adapter=request.adapter,
        )
        is_failing = engine.lora is not None and request.adapter_number in engine.lora.failing
        if is_failing and outcome.finish_reason is FinishReason.REJECTED:
            assert "is broken" in outcome.last.detail
            assert not outcome.token_ids
        elif outcome.finish_reason is FinishReason.ABORT or outcome.last.stop_reason == "stop string":
            assert request.request_id in (aborted if outcome.finish_reason is FinishReason.ABORT else stopped)
            assert tuple(outcome.token_ids) == expected.token_ids[: len(outcome.token_ids)]
        else:
            answer = (tuple(outcome.token_ids), outcome.finish_reason, outcome.last.stop_reason)
            assert answer == (expected.token_ids, expected.finish_reason, expected.stop_reason)
            assert request.prompt_logprobs == expected_scores(request)
