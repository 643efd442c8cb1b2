"""A core and an executor of depth two, each step of which is begun and finished by hand, for tests of what is planned ahead."""

from __future__ import annotations

from penstock.engine.core import EngineCore
from penstock.testing import HashExecutor, HashModel, expected_tokens, make_request
from penstock.types.events import Command, TokenEvent
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request

CAPACITY = Capacity(num_blocks=21, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=60)
EOS = 3
MODEL = HashModel(vocab_size=40, eos_token_id=EOS, eos_period=4)


class Device:
    """A core and an executor of depth two, each step of which is begun and finished by hand."""

    def __init__(self, core: EngineCore, *, seed: int = 0) -> None:
        self.core = core
        self.executor = HashExecutor(core.scheduler.capacity, model=MODEL, depth=2, seed=seed)
        self.now_ns = 0
        self.events: list[TokenEvent] = []
        self.flights: list[tuple[StepPlan, Ticket]] = []

    def begin(self, *commands: Command) -> list[tuple[str, int, int]] | None:
        """(request id, context length, query length) of each row."""
        self.now_ns += 1
        self.events += self.core.apply(commands, self.now_ns)
        plan = self.core.begin(self.now_ns)
        self.executor.copy_blocks(self.core.scheduler.kv.take_block_copies())
        self.core.check()
        if plan is None:
            return None
        self.flights.append((plan, self.executor.submit(plan)))
        return [(row.request_id, row.context_len, row.query_len) for row in plan.rows]

    def finish(self) -> list[TokenEvent]:
        self.now_ns += 1
        plan, ticket = self.flights.pop(0)
        events = self.core.finish(plan, self.executor.collect(ticket), self.now_ns)
        self.events += events
        self.core.check()
        return events

    def run(self) -> None:
        while self.core.has_work or self.flights:
            if len(self.flights) == 2 or self.begin() is None:
                self.finish()

    def tokens_of(self, request: Request) -> tuple[int, ...]:
        """Told under its id."""
        return sum((event.token_ids for event in self.events if event.request_id == request.request_id), ())

    @property
    def num_available(self) -> int:
        return self.core.scheduler.kv.pool.num_available


def answer(request: Request) -> tuple[int, ...]:
    return expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=60).token_ids


def ends_with_stop(num_tokens: int, name: str = "a", num_prompt: int = 6) -> Request:
    """A request whose answer is so long, and ends with a stop token."""
    for first in range(4, 40):
        for second in range(4, 40):
            prompt = [first, second, *range(10, 8 + num_prompt)]
            request = make_request(name, prompt, max_tokens=20, stop_token_ids=(EOS,))
            if len(answer(request)) == num_tokens:
                return request
    raise AssertionError("there is none")
