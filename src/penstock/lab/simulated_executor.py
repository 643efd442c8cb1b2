"""An executor for simulations. It computes nothing: a cost model gives step times, and output lengths are given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

from penstock.lab.cost_model import CostModel, cold_share, coldness_after
from penstock.lab.machine import Seat
from penstock.lab.step_counts import Counts
from penstock.types.adapter import NoAdapters
from penstock.types.plan import Capacity, PaddingId, StepPlan, Ticket
from penstock.types.result import StepResult, StepTiming

EOS_TOKEN_ID = 0
"""Token that ends an output. Requests must have it among their `stop_token_ids`."""
TOKEN_ID = 1
WRONG_TOKEN_ID = 2
"""A guess that never holds."""

_TOKEN, _EOS = (TOKEN_ID,), (EOS_TOKEN_ID,)


class ModelledTimes:
    """Times of simulated steps, by a cost model with noise. Call it once for each step, in the order in which steps begin."""

    def __init__(self, cost: CostModel, *, seed: str = "0") -> None:
        self.num_outside = 0
        self.outside: Counter[str] = Counter()
        """Exceeded limit, such as `rows > 64` -> number of steps that exceed it."""
        self._cost = cost
        rng = Random(f"steps {seed}")  # noqa: S311  # repeatable on purpose
        self._noise = cost.noise(rng)
        self._host_noise = cost.host_noise(rng)
        self._has_host = bool(cost.host_step_ns or cost.host_row_ns or cost.host_prefill_ns)
        self._coldness = 0.0

    def step_ns(self, counts: Counts) -> int:
        if exceeded := self._cost.outside(counts):
            self.num_outside += 1
            self.outside.update(limit.partition(" ")[2] for limit in exceeded)
        cold_ns = self._cost.cold_ns * cold_share(self._coldness, counts.num_tokens)
        duration_ns = self._cost.counted_ns(counts) + cold_ns
        duration_ns *= self._noise.draw(duration_ns)
        self._coldness = coldness_after(self._coldness, duration_ns)
        return round(duration_ns)

    def host_ns(self, counts: Counts) -> int:
        if not self._has_host:
            return 0
        duration_ns = self._cost.host_ns(counts.num_rows, has_prefill=counts.has_prompts)
        return round(duration_ns * self._host_noise.draw(duration_ns))


class SimulatedExecutor(NoAdapters):
    """An executor that computes nothing. `submit` returns a ticket that says when the step ends in virtual time."""

    block_bytes = 1

    def __init__(
        self,
        capacity: Capacity,
        times: ModelledTimes,
        output_lens: Mapping[str, int],
        *,
        depth: int = 1,
        seat: Seat | None = None,
    ) -> None:
        """`seat`: place at a machine that other models share. Requires `depth` 1."""
        self.depth = depth
        self.on_begun: Callable[[int], None] = lambda _: None
        """Called when a step has waited for the machine, with the instant at which it ends."""
        self._seat = seat
        self.capacity = capacity
        self._times = times
        self._output_lens = output_lens
        self._last_positions: dict[str, int] = {}
        self._results: dict[int, tuple[StepResult, int]] = {}
        """Step id -> the result of a step in flight, and the host's time after it."""
        self._ready_ns = 0
        self._host_until_ns = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing, in no simulated time."""

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        """Do nothing, in no simulated time."""

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Do nothing, in no simulated time."""

    def submit(self, plan: StepPlan) -> Ticket:
        last_positions = self._last_positions
        for request_id in plan.releases:
            last_positions.pop(request_id, None)
        for admit in plan.admits:
            if not isinstance(admit.request_id, PaddingId):  # a padding row ends with its batch
                num_tokens = admit.num_prompt_tokens + self._output_lens[admit.request_id]
                last_positions[admit.request_id] = num_tokens - 1
        num_decodes = num_prefill_tokens = num_decode_reads = num_prefill_reads = num_prefill_context = 0
        num_samples = max_context_len = max_decode_reads = 0
        min_decode_reads = math.inf
        token_ids: dict[str, tuple[int, ...]] = {}
        for row in plan.rows:  # a hot loop, for every row of every step: no calls, except for rows with guesses
            context_len, query_len = row.context_len, row.query_len
            end = context_len + query_len
            if query_len == 1:
                num_decodes += 1
                num_decode_reads += end
                if end > max_decode_reads:
                    max_decode_reads = end
                if end < min_decode_reads:
                    min_decode_reads = end
            else:
                num_prefill_tokens += query_len
                num_prefill_reads += query_len * context_len + query_len * (query_len + 1) // 2
                num_prefill_context += context_len
            if end > max_context_len:
                max_context_len = end
            if row.samples:
                num_samples += row.samples
                request_id = row.request_id
                token_ids[request_id] = _EOS if end >= last_positions.get(request_id, math.inf) else _TOKEN
                if row.samples > 1:
                    token_ids[request_id] = _checked(plan.guesses[request_id], last_positions[request_id] - context_len)
        num_rows = len(plan.rows)
        counts = Counts(
            num_decodes + num_prefill_tokens,
            num_decodes,
            num_prefill_tokens,
            num_decode_reads,
            num_prefill_reads,
            num_prefill_context,
            num_samples,
            num_rows,
            max_context_len,
            max_decode_reads,
            int(min_decode_reads) if num_decodes else 0,
            plan.num_repeated,
        )
        start_ns = max(plan.now_ns, self._host_until_ns, self._ready_ns)
        step_ns, host_ns = self._times.step_ns(counts), self._times.host_ns(counts)
        timing = StepTiming(start_ns, start_ns + step_ns)
        self._results[plan.step_id] = StepResult(plan.step_id, token_ids, timing), host_ns
        if self._seat is not None:
            self._seat.run(start_ns, step_ns, partial(self._begin, plan.step_id, timing))
            return Ticket(plan.step_id)
        self._ready_ns = timing.end_ns
        return Ticket(plan.step_id, timing.end_ns)

    def _begin(self, step_id: int, asked: StepTiming, now_ns: int) -> None:
        """Begin a step that had asked for the machine."""
        waited_ns = now_ns - asked.start_ns
        result, host_ns = self._results[step_id]
        timing = StepTiming(now_ns, asked.end_ns + waited_ns, waited_ns=waited_ns)
        self._results[step_id] = StepResult(step_id, result.token_ids, timing), host_ns
        self._ready_ns = timing.end_ns
        self.on_begun(timing.end_ns)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        """Do nothing: outputs have given lengths."""

    def collect(self, ticket: Ticket) -> StepResult:
        result, host_ns = self._results.pop(ticket.step_id)
        self._host_until_ns = result.timing.end_ns + host_ns
        return result

    def close(self) -> None:
        self._last_positions.clear()


def _checked(guesses: Sequence[int], num_left: int) -> tuple[int, ...]:
    """Return the tokens that a row keeps: right guesses, and the one after. `num_left`: tokens until the answer's end."""
    num_right = 0
    while num_right < min(len(guesses), num_left - 1) and guesses[num_right] == TOKEN_ID:
        num_right += 1
    return _TOKEN * num_right + (_EOS if num_right + 1 >= num_left else _TOKEN)
