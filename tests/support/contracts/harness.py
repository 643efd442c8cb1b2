"""The parts of an executor's test that the contract suite needs: plans made by hand, or whole requests run by a core. Knows no
backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.engine.ports import Executor
from penstock.sched.policies.base import Policies
from penstock.sched.policies.gates import Dynamic
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import Outcome, make_core, make_request, run_to_completion
from penstock.types.adapter import BASE
from penstock.types.events import Add
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.request import Request
from penstock.types.result import StepResult
from penstock.types.sampling import Matcher, SamplingParams
from support.contracts.factories import Factory

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
WITHOUT_GUESSES = make_policies(guesser="off")
PADDED = make_policies(
    gate=Dynamic(3, max_queue_delay_ns=0, length_buckets=(9,)), reserve=Watermark(share=0.0, growth_tokens=0)
)
"""Batches of three, padded to nine tokens or the longest, whose rows run until the last has ended."""
MAX_ROWS = 6
MAX_BLOCKS_PER_ROW = 8
FIRST_PAGE = 1 + 3 * MAX_BLOCKS_PER_ROW
MAX_PAGES = 300


class Harness:
    """Makes executors of one kind and closes them all in the end."""

    def __init__(self, factory: Factory) -> None:
        self.vocab_size = factory.vocab_size
        self.block_size = factory.block_size
        self.computes_logits = factory.computes_logits
        self.capacity = Capacity(
            num_blocks=FIRST_PAGE,
            block_size=self.block_size,
            max_rows=MAX_ROWS,
            max_step_tokens=MAX_BLOCKS_PER_ROW * self.block_size,
            max_model_len=MAX_BLOCKS_PER_ROW * self.block_size,
            max_scored=9,
            checks_guesses=True,
        )
        self._factory = factory
        self._made: list[Executor] = []

    def make(self) -> Executor:
        executor = self._factory.make(self.capacity)
        self._made.append(executor)
        return executor

    def make_adapted(self) -> Executor:
        """One whose rows may have adapters, and with blocks for these from `FIRST_PAGE` on."""
        assert self._factory.make_adapted is not None, "the factory says how"
        executor = self._factory.make_adapted(replace(self.capacity, num_blocks=FIRST_PAGE + MAX_PAGES))
        self._made.append(executor)
        return executor

    def place(self, executor: Executor, number: int, first_block: int = FIRST_PAGE, *, content: int = 0) -> int:
        """Place an adapter of a number, with that content or its own, in blocks that lie backwards. The block behind them."""
        packed = self._factory.pack(executor, content or number)
        end = first_block + packed.num_pages
        executor.place_adapter(number, packed, range(first_block, end)[::-1])
        return end

    def close(self) -> None:
        for executor in self._made:
            executor.close()

    def prompt(self, num_tokens: int, seed: int = 1) -> tuple[int, ...]:
        """Tokens that look random; those of different seeds differ from the first on."""
        return tuple(
            10 + (seed * 7919 + idx * idx * 31 + idx * seed * 17) % (self.vocab_size - 10) for idx in range(num_tokens)
        )

    def run(
        self,
        *requests: Request,
        executor: Executor | None = None,
        caching: bool = False,
        policies: Policies | None = None,
        **limits: int,
    ) -> list[Outcome]:
        """Run requests together, by default without memory kept back, so that small pools lead to preemptions.

        `limits` narrow the capacity that the scheduler sees. Outcomes as the requests came.
        """
        executor = executor or self.make()
        own = executor.capacity
        capacity = replace(self.capacity, max_scored=own.max_scored, checks_guesses=own.checks_guesses)
        policies = policies or make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
        core = make_core(replace(capacity, **limits), policies, enable_prefix_caching=caching)
        outcomes = run_to_completion(core, executor, *map(Add, requests))
        return [outcomes[request.request_id] for request in requests]

    def answer(self, prompt: Sequence[int], **sampling: object) -> list[int]:
        """The tokens that a fresh executor gives to one request alone, in the simplest way."""
        (outcome,) = self.run(request("alone", prompt, **sampling), policies=WITHOUT_GUESSES)
        assert outcome.token_ids
        return outcome.token_ids


def request(
    request_id: str, prompt: Sequence[int], *, arrival_ns: int = 0, matcher: Matcher | None = None, **sampling: object
) -> Request:
    """Greedy, eight tokens, unless told otherwise."""
    return make_request(request_id, prompt, arrival_ns=arrival_ns, matcher=matcher, sampling=GREEDY, **sampling)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Allows these and no others."""
    return sum(1 << token_id for token_id in set(token_ids)).to_bytes(-(-vocab_size // 32) * 4, "little")


class Feed:
    """Submits plans made by hand to one executor, step after step."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_steps = 0

    def step(
        self,
        rows: Sequence[RowPlan] = (),
        admits: Sequence[AdmitRow] = (),
        releases: Sequence[str] = (),
        *,
        masks: Mapping[str, bytes] | None = None,
        guesses: Mapping[str, tuple[int, ...]] | None = None,
    ) -> StepResult:
        """`masks` are given to a step that waits for them."""
        plan = StepPlan(self.num_steps, self.num_steps, tuple(admits), tuple(rows), tuple(releases), guesses=guesses or {})
        self.num_steps += 1
        ticket = self.executor.submit(plan)
        assert ticket.step_id == plan.step_id
        if masks is not None:
            self.executor.restrict(ticket, masks)
        result = self.executor.collect(ticket)
        assert result.step_id == plan.step_id
        return result

    def decode(self, request_id: str, context_len: int, count: int) -> list[int]:
        """Sample `count` more tokens of a row whose blocks have room for them."""
        tokens: list[int] = []
        for idx in range(count):
            tokens += self.step([RowPlan(request_id, context_len + idx, 1, (), True)]).token_ids[request_id]
        return tokens


def admit(
    request_id: str,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_computed_tokens: int = 0,
    sampling: SamplingParams = GREEDY,
    adapter: int = BASE,
) -> AdmitRow:
    """A row of which all tokens are prompt."""
    sizes = len(token_ids), tuple(block_ids), num_computed_tokens
    return AdmitRow(request_id, tuple(token_ids), *sizes, sampling, adapter=adapter)
