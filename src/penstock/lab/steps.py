"""Measures steps for fits and `penstock profile`: of given shapes on an executor, or from a recording.

Each round has another order, so that a slow phase of the machine affects all shapes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, pairwise
from random import Random
from statistics import median
from typing import NamedTuple

from penstock.clock import Clock
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import DetokenizerFactory, Executor, NullObserver
from penstock.engine.stepper import Stepper
from penstock.lab.cost_model import coldness_after, shape_of_rows
from penstock.lab.recording import Arrival, Recording, StepDone
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.types.errors import PenstockError
from penstock.types.events import Add, TokenEvent
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan, StepShape
from penstock.types.request import NO_WAITS, Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import HOST_PARTS, StepStats

DECODE_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
REFERENCE = StepShape(((1, 128),), 1)
"""Shape of the step run between measured steps. Its time shows how much other processes slow the machine."""
NUM_TO_WARM = 10
"""Successive reference steps. The last, with warm caches, is the machine's speed."""
STRETCH = 100


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    shape: StepShape
    execute_ns: int
    parts_ns: Mapping[str, int] = field(default_factory=dict)
    host_ns: int | None = None
    """Time of the engine's thread between this step and the next, or None if unknown."""
    is_for_host: bool = False
    """Whether only the host time is used, because no reference step ran beside this step."""
    coldness: float = 0.0
    """Share of the weights evicted from the caches before the step; see `cost_model.coldness_after`."""
    slowness: float = 1.0
    """Time of the neighbouring reference steps / median of all reference steps."""
    group: int = 0
    """Steps of one group are left out together in cross-validation."""


def fits(shape: StepShape, capacity: Capacity) -> bool:
    """Return whether an executor can compute a step of this shape, with separate blocks for each row."""
    num_blocks = sum(_num_blocks(row, capacity.block_size) + capacity.num_state_blocks for row in shape.rows)
    return (
        len(shape.rows) <= capacity.max_rows
        and sum(query_len for query_len, _ in shape.rows) <= capacity.max_step_tokens
        and max(query_len + context_len for query_len, context_len in shape.rows) < capacity.max_model_len
        and num_blocks < capacity.num_blocks
    )


class StepRunner:
    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._ids = count()

    def fill(self) -> None:
        """Write KV into every block before timing. Memory never written maps to one page of zeros, which is read too fast."""
        capacity = self._executor.capacity
        size = capacity.block_size
        # A row also needs a place for its next token.
        room = min(capacity.num_blocks - 1 - capacity.num_state_blocks, capacity.max_model_len // size) - 1
        num_filled = max(1, min(room, capacity.max_step_tokens // size))
        for begin in range(0, num_filled * size, capacity.max_step_tokens):
            self.run(StepShape(((min(capacity.max_step_tokens, num_filled * size - begin), begin),), 1))
        pairs = [(1 + block % num_filled, 1 + block) for block in range(num_filled, capacity.num_blocks - 1)]
        self._executor.copy_blocks(pairs)
        if num_state_blocks := capacity.num_state_blocks:  # rows resume from states, so these must have content
            num_rows = min(capacity.max_rows, capacity.max_step_tokens, (capacity.num_blocks - 1) // (1 + num_state_blocks))
            self.run(StepShape(((1, 0),) * num_rows, num_rows))

    def run(self, shape: StepShape) -> tuple[int, Mapping[str, int]]:
        step_id, executor = next(self._ids), self._executor
        names = [f"{step_id}-{row}" for row in range(len(shape.rows))]
        samples = [1] * shape.num_samples + [0] * (len(shape.rows) - shape.num_samples)
        plan = StepPlan(
            step_id,
            0,
            tuple(self._admit(shape, names, samples, step_id)),
            tuple(
                RowPlan(name, context_len, query_len, (), num)
                for name, (query_len, context_len), num in zip(names, shape.rows, samples, strict=True)
            ),
            (),
        )
        timing = executor.collect(executor.submit(plan)).timing
        executor.collect(executor.submit(StepPlan(next(self._ids), 0, (), (), tuple(names))))
        return timing.end_ns - timing.start_ns, timing.parts

    def _admit(self, shape: StepShape, names: Sequence[str], samples: Sequence[int], step_id: int) -> Iterator[AdmitRow]:
        capacity = self._executor.capacity
        first, size, num_state_blocks = 1, capacity.block_size, capacity.num_state_blocks
        num_others = sum([query_len == 1 for query_len, _ in shape.rows]) - 1
        num_common = shape.num_repeated // num_others // size if num_others > 0 else 0  # blocks of all rows of one token
        common: tuple[int, ...] = ()
        for place, (name, row, num_samples) in enumerate(zip(names, shape.rows, samples, strict=True)):
            length, num_blocks = (
                sum(row) + (not num_samples),
                _num_blocks(row, size),
            )  # unsampled: the prompt goes on
            # Different tokens for each row: a mixture of experts routes equal tokens to the same experts.
            tokens = tuple((1000 + step_id * 31 + place * 613 + idx * 7) % self._vocab_size for idx in range(length))
            blocks = tuple(range(first, first + num_blocks))
            first += num_blocks
            if row[0] == 1:
                common = common or blocks[:num_common]
                blocks = common + blocks[len(common) :]
            admit = AdmitRow(name, tokens, length, blocks, row[1], SamplingParams(temperature=0.0))
            # States lie at the pool's end, each row's in the same blocks in every step.
            end = capacity.num_blocks - place * num_state_blocks
            admit.state_block_ids = tuple(range(end - num_state_blocks, end))
            admit.state_source = admit.state_block_ids if row[1] else ()
            yield admit


class Measured(NamedTuple):
    of_shapes: list[MeasuredStep]
    """Each shape once per round. The steps of a shape are a group."""
    after_them: list[MeasuredStep]
    """The reference step after each step in `of_shapes`. Those of a round are a group."""


def measure(
    runner: StepRunner,
    shapes: Sequence[StepShape],
    *,
    num_rounds: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Measured:
    rng = Random(1)  # noqa: S311  # repeatable on purpose
    of_shapes: list[MeasuredStep] = []
    after_them: list[MeasuredStep] = []
    references_ns: list[int] = []
    coldness = 0.0

    def run(shape: StepShape, group: int) -> MeasuredStep:
        nonlocal coldness
        execute_ns, parts_ns = runner.run(shape)
        step = MeasuredStep(shape, execute_ns, dict(parts_ns), coldness=coldness, group=group)
        coldness = coldness_after(coldness, execute_ns)
        return step

    order = list(enumerate(shapes))
    for round_no in range(num_rounds + 1):
        rng.shuffle(order)
        for group, shape in order:
            step, after = run(shape, group), run(REFERENCE, len(shapes) + round_no)
            warm_ns = [run(REFERENCE, 0).execute_ns for _ in range(NUM_TO_WARM)][-1]
            if round_no:
                of_shapes.append(step)
                after_them.append(after)
                references_ns.append(warm_ns)
            else:
                references_ns = [warm_ns]
        progress(round_no + 1, num_rounds + 1)
    usual_ns = median(references_ns)
    slowness = [(before_ns + after_ns) / 2 / usual_ns for before_ns, after_ns in pairwise(references_ns)]

    def corrected(steps: list[MeasuredStep]) -> list[MeasuredStep]:
        return [replace(step, slowness=slow) for step, slow in zip(steps, slowness, strict=True)]

    return Measured(corrected(of_shapes), corrected(after_them))


def measure_with_host(
    executor: Executor,
    make_detokenizer: DetokenizerFactory,
    vocab_size: int,
    clock: Clock,
    *,
    num_tokens: int = 48,
    first_group: int = 0,
) -> list[MeasuredStep]:
    """Run decodes of 1 to 64 requests through the engine, with text but without HTTP, to measure the host's time per step.

    Steps with the same number of requests are a group of the fit.
    """
    collector = _StepCollector()
    core = EngineCore(Scheduler(executor.capacity, make_policies(guesser="off")), observer=collector)
    output = OutputStage(make_detokenizer)

    def report(events: Sequence[TokenEvent], now_ns: int) -> None:
        del now_ns
        output.push(events)

    stepper = Stepper(core, executor, clock, report=report)
    steps: list[MeasuredStep] = []
    rows = [num for num in DECODE_ROWS if num <= core.scheduler.max_rows and num * (num_tokens + 64) < _num_positions(executor)]
    for group, num_rows in enumerate(rows, start=first_group):
        collector.steps.clear()
        requests = [
            Request(
                request_id=f"{num_rows}-{row}",
                prompt_token_ids=tuple((1000 + row * 31 + idx * 7) % vocab_size for idx in range(32)),
                sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0),
                arrival_ns=clock.now_ns(),
            )
            for row in range(num_rows)
        ]
        for request in requests:
            output.add(request)
        stepper.turn([Add(request) for request in requests])
        while core.has_work or stepper.has_flights:
            stepper.turn()
        for stats, after in pairwise(collector.steps):
            execute_ns = stats.parts_ns["execute"]
            host_ns = after.planned_ns - stats.planned_ns - execute_ns if executor.depth == 1 else None
            own = {name: ns for name, ns in stats.parts_ns.items() if name not in ENGINE_PARTS}
            steps.append(MeasuredStep(shape_of_rows(stats.rows), execute_ns, own, host_ns, is_for_host=True, group=group))
    return steps


class _StepCollector(NullObserver):
    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)


def _num_positions(executor: Executor) -> int:
    return (executor.capacity.num_blocks - 1) * executor.capacity.block_size


def steps_of(
    recording: Recording,
    *,
    num_groups: int = 20,
    max_steps: int = 20_000,
    is_taken: Callable[[StepDone], bool] = lambda _: True,
) -> list[MeasuredStep]:
    """Return about `max_steps` steps of a recording, in stretches of `STRETCH`, with their times.

    For cross-validation, each of `num_groups` parts of the recording is a group. The host's time is known after a step that
    left requests running, if the server had one step in flight at a time. Raises PenstockError if there are no steps.
    """
    num_steps = sum(1 for _ in recording.steps())
    if not num_steps:
        raise PenstockError("The recording has no steps.", remedy="Record a server while it answers requests.")
    has_gaps = recording.header.depth == 1
    stride = -(-num_steps // max_steps)
    steps: list[MeasuredStep] = []
    before: StepDone | None = None
    coldness = 0.0
    for idx, step in enumerate(chain(recording.steps(), (None,))):
        if before is not None:
            execute_ns = before.parts_ns.get("execute", 0)
            if (idx - 1) // STRETCH % stride == 0 and execute_ns > 0 and is_taken(before):
                after = step if has_gaps and before.num_running else None
                steps.append(_measured(before, after, coldness, (idx - 1) * num_groups // num_steps))
            coldness = coldness_after(coldness, execute_ns)
        before = step
    return steps


def _measured(step: StepDone, after: StepDone | None, coldness: float, group: int) -> MeasuredStep:
    execute_ns = step.parts_ns["execute"]
    host_ns = None
    if after is not None and after.step_id == step.step_id + 1:
        host_ns = after.planned_ns - step.planned_ns - execute_ns
    own = {name: ns for name, ns in step.parts_ns.items() if name not in ENGINE_PARTS}
    return MeasuredStep(step.shape, execute_ns, own, host_ns, coldness=coldness, group=group)


def texts_of(recording: Recording, *, is_taken: Callable[[Arrival], bool] = lambda _: True) -> list[tuple[int, int]]:
    """Return the number of prompt tokens and the time until it was queued, of each request that waited for nothing else.

    A busy engine reads its queue between steps, so only requests that came to an idle one are taken.
    """
    texts: list[tuple[int, int]] = []
    busy_until_ns = 0
    for event in recording.events():
        if isinstance(event, StepDone):
            busy_until_ns = event.ended_ns
        if not isinstance(event, Arrival) or event.is_repeated or event.waits != NO_WAITS:
            continue
        if event.queued_ns is not None and event.arrival_ns >= busy_until_ns and is_taken(event):
            texts.append((event.num_prompt_tokens, event.queued_ns - event.arrival_ns))
    return texts


ENGINE_PARTS = frozenset({"execute", *HOST_PARTS})


def _num_blocks(row: tuple[int, int], block_size: int) -> int:
    return -(-(sum(row) + 1) // block_size)
