"""The hash executor: a fake device whose KV slots hold hashes, and which checks every plan.

The "KV" of a position is a hash of all tokens up to it, so any wrong block, stale table, early re-use or lost token changes
the answer. A plan that breaks a rule raises AssertionError, a token outside the vocabulary ValueError.
"""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.kv.block_pool import NULL_BLOCK_ID
from penstock.types.adapter import BASE, AdapterRef, PackedAdapter
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import AdmitRow, Capacity, PaddingId, RowPlan, StateSave, StepPlan, Ticket, scored_positions
from penstock.types.request import FinishReason
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import Matcher, SamplingParams

MASK_64 = 2**64 - 1
ROOT = 0x9E3779B97F4A7C15
"""The value "before" position 0."""


def mix(value: int, word: int) -> int:
    """Return a 64-bit hash of two numbers, not symmetric (finaliser of SplitMix64; Steele et al., OOPSLA 2014)."""
    z = (value * 0xD1342543DE82EF95 + word + ROOT) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class HashAdapter:
    root: int
    num_pages: int = 1

    @property
    def num_bytes(self) -> int:
        return self.num_pages * SLOT_BYTES

    def pages(self, num_slots: int) -> tuple[list[int], ...]:
        return tuple([mix(mix(self.root, idx), slot) for slot in range(num_slots)] for idx in range(self.num_pages))


def root_of(adapter: AdapterRef | None) -> int:
    return ROOT if adapter is None else mix(ROOT, int.from_bytes(adapter.fingerprint[:8], "little"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HashModel:
    """A fake model. It samples from tokens [first_token_id, vocab_size); prompts may have any token of the vocabulary."""

    vocab_size: int = 1000
    first_token_id: int = 0
    eos_token_id: int | None = None
    """Sampled with probability 1 / `eos_period`. None: all tokens have equal chances."""
    eos_period: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id < self.vocab_size - 1:
            raise ValueError(f"at least two tokens must be left of [{self.first_token_id}, {self.vocab_size})")

    def sample(self, value: int, sampling: SamplingParams, num_generated: int, mask: bytes | None = None) -> int:
        """Return the token after a prefix with hash `value`. Stop tokens wait for `min_tokens` if the mask allows others."""
        state = mix(value, sampling.seed if sampling.temperature > 0 else 0)
        banned = sampling.stop_token_ids if num_generated < sampling.min_tokens else ()
        if mask is not None:
            allowed = [token_id for token_id in range(self.vocab_size) if mask[token_id // 8] >> token_id % 8 & 1]
            free = [token_id for token_id in allowed if token_id not in banned] or allowed
            return free[state % len(free)]
        token_id = self._draw(state)
        while token_id in banned:
            state = mix(state, 1)
            token_id = self._draw(state)
        return token_id

    def _draw(self, state: int) -> int:
        if self.eos_token_id is not None and (state >> 32) % self.eos_period == 0:
            return self.eos_token_id
        return self.first_token_id + state % (self.vocab_size - self.first_token_id)

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Pretend that the sampled token had probability 1/2, the next one by id 1/4, and so on."""
        span = self.vocab_size - self.first_token_id
        others = [self.first_token_id + (token_id - self.first_token_id + idx) % span for idx in range(min(num_top, span))]
        top = tuple((other, -0.6931471805599453 * (idx + 1)) for idx, other in enumerate(others))
        return TokenLogprobs(token_id, -0.6931471805599453, 1, top)

    def prompt_logprobs(self, value: int, token_id: int, num_top: int) -> TokenLogprobs:
        state = mix(value, token_id)
        top = tuple((self._draw(mix(value, idx)), -(idx + 1) / 4) for idx in range(num_top))
        return TokenLogprobs(token_id, -(state % 10_000) / 1000, 1 + state % 100, top)


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None


def expected_tokens(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    model: HashModel,
    max_model_len: int,
    matcher: Matcher | None = None,
    adapter: AdapterRef | None = None,
) -> Expected:
    """Return the correct answer, computed from the whole prefix, without cache, blocks or steps. `matcher` is advanced."""
    value = root_of(adapter)
    for token_id in prompt_token_ids:
        value = mix(value, token_id)
    generated: list[int] = []
    while True:
        token_id = model.sample(value, sampling, len(generated), None if matcher is None else matcher.mask())
        generated.append(token_id)
        if token_id in sampling.stop_token_ids and (len(generated) > sampling.min_tokens or matcher is not None):
            return Expected(tuple(generated), FinishReason.STOP, token_id)
        if len(generated) == sampling.max_tokens or len(prompt_token_ids) + len(generated) == max_model_len:
            return Expected(tuple(generated), FinishReason.LENGTH, None)
        value = mix(value, token_id)
        if matcher is not None:
            matcher.accept((token_id,))


def expected_prompt_logprobs(
    prompt_token_ids: Sequence[int], num_top: int, *, model: HashModel, adapter: AdapterRef | None = None
) -> list[TokenLogprobs]:
    value, entries = root_of(adapter), []
    for token_id, following in pairwise(prompt_token_ids):
        value = mix(value, token_id)
        entries.append(model.prompt_logprobs(value, following, num_top))
    return entries


STATE_WIDTH = 4


def expected_state(token_ids: Sequence[int], second_at: int = 0) -> bytes:
    """Return the correct result for an encoder's input: depends on each token, and on where the second text begins.

    float32 [STATE_WIDTH]
    """
    value = mix(ROOT, second_at)
    for token_id in token_ids:
        value = mix(value, token_id)
    return struct.pack(f"={STATE_WIDTH}f", *((value >> 16 * idx & 0xFFFF) / 2**16 - 0.5 for idx in range(STATE_WIDTH)))


POISON = -1


SLOT_BYTES = 8

DEFAULT_CAPACITY = Capacity(num_blocks=257, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=4096, max_scored=100)


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    root: int
    block_ids: tuple[int, ...]
    pages: tuple[list[int], ...]


@dataclass(slots=True)
class HashRow:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed_tokens: int
    num_tokens: int
    """Tokens that steps in flight sample are included."""
    block_ids: list[int] = field(default_factory=list)
    second_at: int = 0
    num_scored: int = 0
    adapter: int = BASE
    placed: PlacedAdapter | None = None
    """Its adapter as placed when the row was admitted."""
    state_block_ids: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    """Where the next step reads the row's state."""
    saves: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Position -> blocks for the state that this step saves."""
    num_unread: int = 0
    """Number of first blocks that no later step reads, since they lie before the window. Other rows may take them."""

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.num_unread :]


@dataclass(slots=True)
class HashStep:
    plan: StepPlan
    rows: list[HashRow]
    block_ids: frozenset[int]
    followers: Collection[str]
    """Ids of sampling rows that follow a grammar."""
    awaits_masks: bool
    masks: Mapping[str, bytes] = field(default_factory=dict)


class HashExecutor:
    """An executor that checks each step in `submit`. A step takes `step_ns` of virtual time.

    - With a depth of 2, a step is computed at a random time (`seed`) before it is collected.
    - With a window, a row reads and checks the whole window.
    - With `Capacity.has_state`, a block is readable only at its last computed position.
    - With `Capacity.num_state_blocks`, the hash before a row's tokens is also read from its state, and has to be the same.
    - A row with an adapter reads all its pages in each step.
    """

    max_adapter_rank = 1

    def __init__(
        self,
        capacity: Capacity = DEFAULT_CAPACITY,
        *,
        model: HashModel | None = None,
        step_ns: int = 1_000_000,
        depth: int = 1,
        seed: int = 0,
    ) -> None:
        self.depth = depth
        self.model = model or HashModel()
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_padding_tokens = 0
        checks_guesses = capacity.checks_guesses and depth == 1
        self.capacity = replace(capacity, checks_guesses=checks_guesses, vocab_size=self.model.vocab_size)
        self.block_bytes = capacity.block_size * SLOT_BYTES
        self._step_ns = step_ns
        self._slots = [POISON] * (capacity.num_blocks * capacity.block_size)
        self._ends = [0] * capacity.num_blocks
        """Positions of each block up to the last computed one."""
        self._rows: dict[str, HashRow] = {}
        self._holders: Counter[int] = Counter()
        """Block id -> rows that have it in their table."""
        self._written: set[int] = set()
        """Blocks filled or overwritten since the last step. Rows that had them must be released with the next."""
        self.adapters: dict[int, PlacedAdapter] = {}
        self._random = random.Random(seed)  # noqa: S311  # repeatable on purpose
        self._in_flight: deque[HashStep] = deque()
        self._to_compute: deque[HashStep] = deque()
        self._results: dict[int, StepResult] = {}
        self._is_closed = False

    @property
    def num_known_requests(self) -> int:
        return len(self._rows)

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        if number in self.adapters:
            raise ValueError(f"adapter {number} is placed already")
        assert isinstance(packed, HashAdapter), f"{packed} was packed by another executor"
        assert number != BASE, "the base is no adapter"
        assert len(set(block_ids)) == len(block_ids) == packed.num_pages, f"{packed.num_pages} pages are put into {block_ids}"
        pages = packed.pages(self.capacity.block_size)
        for block_id, page in zip(block_ids, pages, strict=True):
            self._overwrite(block_id, page, self.capacity.block_size)
        self.adapters[number] = PlacedAdapter(packed.root, tuple(block_ids), pages)

    def drop_adapter(self, number: int) -> None:
        placed = self.adapters.pop(number, None)
        for step in self._in_flight:
            assert placed is None or all(row.placed is not placed for row in step.rows), f"adapter {number} is in flight"

    def _overwrite(self, block_id: int, content: Sequence[int], end: int, what: str = "changes hands") -> None:
        self._check_block_id(block_id)
        self._check_not_in_flight(block_id, what)
        self._check_no_adapter(block_id)
        self._written.add(block_id)
        self._slots[self._at(block_id)] = content
        self._ends[block_id] = end

    def _at(self, block_id: int) -> slice:
        return slice(block_id * self.capacity.block_size, (block_id + 1) * self.capacity.block_size)

    def _check_no_adapter(self, block_id: int) -> None:
        for number, placed in self.adapters.items():
            assert block_id not in placed.block_ids, f"block {block_id} is given out, and adapter {number} lies in it"

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._check_block_id(source)
            self._overwrite(destination, self._slots[self._at(source)], self._ends[source])

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        self._check_may_move()
        for block_id, target in zip(block_ids, out, strict=True):
            self._check_block_id(block_id)
            self._check_not_in_flight(block_id, "is read")
            assert POISON not in self._slots[self._at(block_id)], f"block {block_id} is not full"
            target[:] = self.pack(block_id)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self._check_may_move()
        size = self.capacity.block_size
        for block_id, content in zip(block_ids, contents, strict=True):
            self._overwrite(block_id, struct.unpack(f"<{size}Q", content), size, "is written")

    def pack(self, block_id: int) -> bytes:
        content = self._slots[self._at(block_id)]
        return struct.pack(f"<{len(content)}Q", *[MASK_64 if slot == POISON else slot for slot in content])

    def fill(self, block_id: int, content: bytes | bytearray) -> None:
        """Write a block's content from any thread, while no step has it."""
        self._check_not_in_flight(block_id, "is filled")
        slots = [POISON if slot == MASK_64 else slot for slot in struct.unpack(f"<{self.capacity.block_size}Q", content)]
        self._slots[self._at(block_id)] = slots
        self._ends[block_id] = sum(slot != POISON for slot in slots)

    @property
    def block_memory(self) -> HashBlocks:
        return HashBlocks(self)

    @property
    def num_in_flight(self) -> int:
        """Steps that were submitted and not yet collected."""
        return len(self._in_flight)

    def submit(self, plan: StepPlan) -> Ticket:
        if self._is_closed:
            raise ExecutorFailure("the executor is closed")
        self._check_limits(plan)
        for request_id in plan.releases:
            self._release(request_id)
        for known in self._rows.values():
            self._forget_unread(known)
        for block_id in self._written:
            assert self._holders[block_id] == 0, f"block {block_id} is held by a row and was overwritten"
        self._written.clear()
        for request_id, known in self._rows.items():
            assert self.adapters.get(known.adapter) is known.placed, f"the adapter of {request_id!r} was dropped"
        for admit in plan.admits:
            self._admit(admit)
        assert len(self._rows) <= self.capacity.max_rows, f"{len(self._rows)} requests of at most {self.capacity.max_rows}"
        for row in plan.rows:
            self._append_blocks(row)
        for save in plan.saves:
            self._note_save(save, {row.request_id: row for row in plan.rows}[save.request_id])
        assert plan.guesses.keys() <= {row.request_id for row in plan.rows}, f"{plan.guesses} without rows"
        rows = [self._advance(row, plan.guesses.get(row.request_id, ())) for row in plan.rows]
        held = frozenset(block_id for row in rows for block_id in row.held) if self.depth > 1 else frozenset[int]()
        pairs = zip(plan.rows, rows, strict=True)
        followers = {planned.request_id for planned, row in pairs if planned.samples and row.sampling.follows_grammar}
        step = HashStep(plan, rows, held, followers, bool(followers))
        self._check_scored(step)
        self._in_flight.append(step)
        self._to_compute.append(step)
        if self.depth == 1 or self._random.random() < 0.5:
            self._compute_all()
        return Ticket(plan.step_id)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        assert [step.plan.step_id for step in self._in_flight] == [ticket.step_id], (
            f"masks of step {ticket.step_id} come after all before it were collected, and before another is submitted"
        )
        step = self._in_flight[0]
        if not step.awaits_masks:
            raise ValueError(f"step {ticket.step_id} waits for no masks")
        self._check_masks(step, masks)
        step.awaits_masks, step.masks = False, masks
        if self.depth == 1 or self._random.random() < 0.5:
            self._compute_all()

    def _check_masks(self, step: HashStep, masks: Mapping[str, bytes]) -> None:
        for request_id, mask in masks.items():
            if request_id not in step.followers:
                raise ValueError(f"{request_id!r} does not sample in step {step.plan.step_id}, or follows no grammar")
            num_masks = 1 + len(step.plan.guesses.get(request_id, ()))
            if len(mask) != -(-self.model.vocab_size // 32) * 4 * num_masks:
                raise ValueError(f"the mask of {request_id!r} has {len(mask)} bytes, for {self.model.vocab_size} tokens")

    def collect(self, ticket: Ticket) -> StepResult:
        assert self._in_flight, "no step is in flight"
        assert ticket.step_id == self._in_flight[0].plan.step_id, "steps are collected once each, in the order of submission"
        step = self._in_flight.popleft()
        if step.awaits_masks:
            raise ValueError(f"step {ticket.step_id} waits for masks")
        if self._to_compute and self._to_compute[0] is step:
            self._compute(self._to_compute.popleft())
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._is_closed = True

    def _check_limits(self, plan: StepPlan) -> None:
        assert not any(step.awaits_masks for step in self._in_flight), "a step in flight waits for masks"
        assert len(self._in_flight) < self.depth, f"{len(self._in_flight)} steps are in flight already"
        assert all(plan.step_id != step.plan.step_id for step in self._in_flight), f"step {plan.step_id} was submitted already"
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a request has two rows"
        assert plan.num_tokens <= self.capacity.max_step_tokens, (
            f"{plan.num_tokens} tokens of at most {self.capacity.max_step_tokens}"
        )

    def _check_scored(self, step: HashStep) -> None:
        num_scored = sum(len(_scored(plan, row)) for plan, row in zip(step.plan.rows, step.rows, strict=True))
        num_scored += sum(map(len, step.plan.guesses.values()))
        assert num_scored <= self.capacity.max_scored, f"{num_scored} positions of at most {self.capacity.max_scored} tell"

    def _check_block_id(self, block_id: int) -> None:
        assert NULL_BLOCK_ID < block_id < self.capacity.num_blocks, f"block {block_id} is the null block or does not exist"

    def _check_may_move(self) -> None:
        assert self.depth > 1 or not self._in_flight, "a backend of depth 1 is asked for contents during a step"

    def _check_not_in_flight(self, block_id: int, what: str = "changes hands") -> None:
        for step in tuple(self._in_flight):
            assert block_id not in step.block_ids, f"block {block_id} {what} while step {step.plan.step_id} is in flight"

    def _release(self, request_id: str) -> None:
        assert request_id in self._rows, f"release of {request_id!r}, which is unknown"
        row = self._rows.pop(request_id)
        self._holders.subtract((*row.held, *row.state_block_ids))

    def _num_unread(self, num_computed_tokens: int) -> int:
        window = self.capacity.window
        return max(0, num_computed_tokens - window + 1) // self.capacity.block_size if window else 0

    def _forget_unread(self, row: HashRow) -> None:
        """Let other rows take the blocks that the row's next step does not read. `HashStep.block_ids` keeps those in flight."""
        num_unread = self._num_unread(row.num_computed_tokens)
        if num_unread > row.num_unread:
            self._holders.subtract(row.block_ids[row.num_unread : num_unread])
            row.num_unread = num_unread

    def _admit(self, admit: AdmitRow) -> None:
        assert admit.request_id not in self._rows, f"{admit.request_id!r} is admitted twice"
        assert 0 <= admit.num_computed_tokens < len(admit.token_ids), f"{admit.request_id!r} has nothing to compute"
        assert 0 < admit.num_prompt_tokens <= len(admit.token_ids), f"{admit.request_id!r} has no prompt"
        for token_id in admit.token_ids:
            if not 0 <= token_id < self.model.vocab_size:
                raise ValueError(f"token {token_id} is outside the vocabulary of {self.model.vocab_size}")
        num_computed, num_tokens = admit.num_computed_tokens, len(admit.token_ids)
        row = HashRow(list(admit.token_ids), admit.num_prompt_tokens, admit.sampling, num_computed, num_tokens)
        row.second_at, row.num_scored = admit.second_at, admit.num_scored
        assert admit.adapter == BASE or admit.adapter in self.adapters, f"the adapter of {admit.request_id!r} is not placed"
        row.adapter, row.placed = admit.adapter, self.adapters.get(admit.adapter)
        self._rows[admit.request_id] = row
        if isinstance(admit.request_id, PaddingId):
            self._append_null_blocks(row, admit.block_ids)
            return
        self._hold_state(row, admit)
        num_filled = -(-admit.num_computed_tokens // self.capacity.block_size)
        row.num_unread = self._num_unread(admit.num_computed_tokens)
        row.block_ids += admit.block_ids[: row.num_unread]
        self._hold(row, admit.block_ids[row.num_unread : num_filled])
        self._hold_fresh(row, admit.block_ids[num_filled:])

    def _hold_state(self, row: HashRow, admit: AdmitRow) -> None:
        num_blocks, block_ids, source = self.capacity.num_state_blocks, admit.state_block_ids, admit.state_source
        assert len(set(block_ids)) == len(block_ids) == num_blocks, f"a state of {num_blocks} blocks is put into {block_ids}"
        assert len(source) == (num_blocks if admit.num_computed_tokens else 0), f"a state is read from {source}"
        row.state_block_ids, row.source = block_ids, source
        self._holders.update(block_ids)
        if source != block_ids:
            self._spoil(block_ids)
        for block_id in block_ids:
            self._check_no_adapter(block_id)
            assert self._holders[block_id] == 1, f"block {block_id} is given out while another row holds it"

    def _spoil(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._check_block_id(block_id)
            self._slots[self._at(block_id)] = [POISON] * self.capacity.block_size

    def _note_save(self, save: StateSave, plan: RowPlan) -> None:
        assert self.depth == 1, "states are saved by backends of depth 1"
        assert plan.context_len < save.position <= plan.context_len + plan.query_len, f"{save} of {plan}"
        assert len(save.block_ids) == self.capacity.num_state_blocks, f"a state is saved to {save.block_ids}"
        self._spoil(save.block_ids)
        for block_id in save.block_ids:
            self._check_no_adapter(block_id)
            assert self._holders[block_id] == 0, f"a state is saved to block {block_id}, which a row holds"
        self._rows[save.request_id].saves[save.position] = save.block_ids

    def _read_state(self, block_ids: Sequence[int]) -> int:
        pages = [self._slots[self._at(block_id)] for block_id in block_ids]
        value = pages[0][0]
        assert pages == [self._state_page(value, idx) for idx in range(len(pages))], f"blocks {block_ids} hold no state"
        return value

    def _state_page(self, value: int, idx: int) -> list[int]:
        return [value, *[mix(value, idx)] * (self.capacity.block_size - 1)]

    def _write_state(self, block_ids: Sequence[int], value: int) -> None:
        for idx, block_id in enumerate(block_ids):
            self._slots[self._at(block_id)] = self._state_page(value, idx)

    def _append_blocks(self, row: RowPlan) -> None:
        assert row.request_id in self._rows, f"a row of {row.request_id!r}, which is unknown"
        if isinstance(row.request_id, PaddingId):
            self._append_null_blocks(self._rows[row.request_id], row.new_block_ids)
            return
        self._hold_fresh(self._rows[row.request_id], row.new_block_ids)

    def _append_null_blocks(self, row: HashRow, block_ids: Sequence[int]) -> None:
        assert set(block_ids) <= {NULL_BLOCK_ID}, f"padding has {block_ids}, and would spoil what is not its own"
        row.block_ids += block_ids

    def _hold(self, row: HashRow, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._check_block_id(block_id)
            assert block_id not in row.held, f"block {block_id} is twice in one table"
            self._check_no_adapter(block_id)
            row.block_ids.append(block_id)
            self._holders[block_id] += 1

    def _hold_fresh(self, row: HashRow, block_ids: Sequence[int]) -> None:
        self._hold(row, block_ids)
        for block_id in block_ids:
            assert self._holders[block_id] == 1, f"block {block_id} is given out while another row holds it"
            self._check_not_in_flight(block_id)
            self._slots[self._at(block_id)] = [POISON] * self.capacity.block_size

    def _advance(self, plan: RowPlan, guesses: Sequence[int]) -> HashRow:
        row = self._rows[plan.request_id]
        end = plan.context_len + plan.query_len
        self._check_row(plan, row, end, guesses)
        row.num_computed_tokens = end
        row.num_tokens += plan.samples > 0 and not self.capacity.is_one_pass
        self.num_computed_tokens += plan.query_len
        self.num_padding_tokens += plan.query_len * isinstance(plan.request_id, PaddingId)
        return row

    def _check_row(self, plan: RowPlan, row: HashRow, end: int, guesses: Sequence[int]) -> None:
        name, size = plan.request_id, self.capacity.block_size
        num_tokens = row.num_tokens + len(guesses)
        if guesses:
            assert self.capacity.checks_guesses, f"{name!r} has guesses that nobody can check"
            assert self.depth == 1, f"{name!r} has guesses, and its tokens are not known when the next step is planned"
            assert all(0 <= token_id < self.model.vocab_size for token_id in guesses), f"{guesses} are no tokens"
        assert plan.context_len == row.num_computed_tokens, (
            f"{name!r} has {row.num_computed_tokens} computed, not {plan.context_len}"
        )
        assert plan.query_len > 0, f"{name!r} has an empty row"
        assert end <= num_tokens, f"{name!r} has {row.num_tokens} tokens, and {end} are to be computed"
        assert (plan.samples > 0) == (end == num_tokens), f"{name!r} must sample exactly when it has caught up"
        assert plan.samples in (0, 1 + len(guesses)), f"{name!r} samples {plan.samples} tokens of {len(guesses)} guesses"
        assert plan.samples or not guesses, f"{name!r} guesses and samples nothing"
        if self.capacity.is_one_pass:
            assert plan.samples or isinstance(name, PaddingId), f"{name!r} is computed in part, or twice"
            assert plan.query_len == row.num_tokens or isinstance(name, PaddingId), f"{name!r} is not computed whole"
            assert end <= self.capacity.max_model_len, f"{name!r} is longer than max_model_len"
        else:
            assert end < self.capacity.max_model_len, f"{name!r} would grow beyond max_model_len"
        assert len(row.block_ids) * size >= end, f"{name!r} writes beyond its blocks"
        for block_id in row.block_ids[plan.context_len // size : (end - 1) // size + 1]:
            assert block_id == NULL_BLOCK_ID or self._holders[block_id] == 1, "a row writes to a block that others hold"

    def _compute_all(self) -> None:
        while self._to_compute and not self._to_compute[0].awaits_masks:
            self._compute(self._to_compute.popleft())

    def _compute(self, step: HashStep) -> None:
        token_ids: dict[str, tuple[int, ...]] = {}
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        states: dict[str, bytes] = {}
        for plan, row in zip(step.plan.rows, step.rows, strict=True):
            if not self.capacity.is_one_pass:
                guesses = step.plan.guesses.get(plan.request_id, ())
                self._run(plan, row, guesses, step.masks.get(plan.request_id), token_ids, logprobs)
                if scored := _scored(plan, row):
                    prompt_logprobs[plan.request_id] = self._score(row, scored)
            elif plan.samples:
                states[plan.request_id] = expected_state(row.token_ids, row.second_at)
        timing = StepTiming(self.num_steps * self._step_ns, (self.num_steps + 1) * self._step_ns)
        self.num_steps += 1
        self._results[step.plan.step_id] = StepResult(
            step.plan.step_id, token_ids, timing, logprobs, prompt_logprobs, states=states
        )

    def _run(
        self,
        plan: RowPlan,
        row: HashRow,
        guesses: Sequence[int],
        mask: bytes | None,
        token_ids: dict[str, tuple[int, ...]],
        logprobs: dict[str, tuple[TokenLogprobs, ...]],
    ) -> None:
        end = plan.context_len + plan.query_len
        is_padding = isinstance(plan.request_id, PaddingId)
        root = self._read_adapter(row)
        value = root if is_padding or not plan.context_len else self._read_window(row, plan.context_len)
        if row.source:
            state = self._read_state(row.source)
            assert state == value, f"the state of {plan.request_id!r} is not the one after {plan.context_len} tokens"
        known = [*row.token_ids[plan.context_len :], *guesses] if guesses else row.token_ids[plan.context_len : end]
        for position, token_id in enumerate(known, plan.context_len):
            value = mix(value, token_id)
            self._write(row, position, value)
            if position + 1 in row.saves:
                self._write_state(row.saves.pop(position + 1), value)
        self._write_state(row.state_block_ids, value)
        row.source = row.state_block_ids
        if plan.samples:
            sampled = self._sample(row, end - len(guesses), guesses, mask)
            row.num_computed_tokens -= plan.samples - len(sampled)
            row.num_tokens += len(sampled) - 1
            token_ids[plan.request_id] = tuple(sampled)
            if (num_top := row.sampling.logprobs) is not None:
                logprobs[plan.request_id] = tuple([self.model.logprobs(token_id, num_top) for token_id in sampled])

    def _sample(self, row: HashRow, num_tokens: int, guesses: Sequence[int], mask: bytes | None) -> list[int]:
        """Append tokens to a row with `num_tokens` until one is not the next guess. Return them."""
        sampled: list[int] = []
        for idx in range(len(guesses) + 1):
            # Read back through the table, so that later writes to the row show.
            value, size = self._read(row, num_tokens - 1 + idx), -(-self.model.vocab_size // 32) * 4
            own = None if mask is None else mask[idx * size : (idx + 1) * size]
            token_id = self.model.sample(value, row.sampling, num_tokens + idx - row.num_prompt_tokens, own)
            row.token_ids.append(token_id)
            sampled.append(token_id)
            if token_id not in guesses[idx : idx + 1]:
                break
        return sampled

    def _score(self, row: HashRow, positions: range) -> tuple[TokenLogprobs, ...]:
        num_top, token_ids = row.sampling.prompt_logprobs or 0, row.token_ids
        return tuple([self.model.prompt_logprobs(self._content(row, at), token_ids[at + 1], num_top) for at in positions])

    def _read_adapter(self, row: HashRow) -> int:
        if row.placed is None:
            return ROOT
        for block_id, page in zip(row.placed.block_ids, row.placed.pages, strict=True):
            assert self._slots[self._at(block_id)] == page, f"block {block_id} of adapter {row.adapter} is another's"
        return row.placed.root

    def _slot(self, row: HashRow, position: int) -> int:
        size = self.capacity.block_size
        return row.block_ids[position // size] * size + position % size

    def _write(self, row: HashRow, position: int, value: int) -> None:
        slot = self._slot(row, position)
        self._slots[slot] = value
        self._ends[slot // self.capacity.block_size] = slot % self.capacity.block_size + 1

    def _read_window(self, row: HashRow, position: int) -> int:
        first = max(0, position - self.capacity.window + 1) if self.capacity.window else position - 1
        value = self._content(row, first)
        for idx in range(first + 1, position):
            value = mix(value, row.token_ids[idx])
            assert self._content(row, idx) == value, f"position {idx} is read, and is another row's"
        return self._read(row, position - 1)

    def _content(self, row: HashRow, position: int) -> int:
        value = self._slots[self._slot(row, position)]
        assert value != POISON, f"position {position} is read and was never written"
        return value

    def _read(self, row: HashRow, position: int) -> int:
        """Return the hash at a position, after checking the block's recurrent state if it has any."""
        block_id, offset = divmod(self._slot(row, position), self.capacity.block_size)
        if self.capacity.has_state and block_id != NULL_BLOCK_ID:
            end = self._ends[block_id]
            assert end == offset + 1, f"block {block_id} has the state after {end} positions, and {offset + 1} are wanted"
        return self._content(row, position)


def _scored(plan: RowPlan, row: HashRow) -> range:
    if row.sampling.prompt_logprobs is None or isinstance(plan.request_id, PaddingId):
        return range(0)
    return scored_positions(plan.context_len, plan.query_len, row.num_prompt_tokens, row.num_scored)


class HashBlocks:
    """The `BlockMemory` of a hash executor."""

    def __init__(self, executor: HashExecutor) -> None:
        self.block_bytes = executor.block_bytes
        self.fd: int | None = None
        self._executor = executor
        self._targets: dict[int, bytearray] = {}

    def content(self, block_id: int) -> memoryview:
        return memoryview(self._executor.pack(block_id))

    def target(self, block_id: int) -> memoryview:
        return memoryview(self._targets.setdefault(block_id, bytearray(self.block_bytes)))

    def fill(self, block_id: int) -> None:
        self._executor.fill(block_id, self._targets.pop(block_id))
