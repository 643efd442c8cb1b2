"""The reference backend's `Executor`: computes each step row by row. Slow; the specification of the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.backends.batch import (
    NO_TOKEN,
    NO_USABLE_LOGIT,
    NO_USABLE_STATE,
    NULL_BLOCK,
    BatchBuilder,
    StepBatch,
    capacity_of,
    check_block_id,
)
from penstock.backends.reference.adapters import PagedFactors, pack_factors
from penstock.backends.reference.interpreter import Interpreter, RowRun
from penstock.backends.reference.kv_cache import KvCache
from penstock.backends.reference.sampling import NoCandidateError, Sample, sample, token_logprobs
from penstock.models.adapter import AdapterFactors, AdapterPacker
from penstock.models.program import PagedState, Program
from penstock.models.weights import LoadedModel
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.errors import ExecutorFailure, ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity, StateSave, StepPlan, Ticket, scored_positions
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class _Awaits:
    batch: StepBatch
    start_ns: int
    request_ids: set[str]


class ReferenceExecutor:
    """Computes steps with NumPy, each row independently.

    With `poison`, positions without KV are NaN, so that a stale read makes its row fail.
    """

    def __init__(
        self,
        model: LoadedModel,
        program: Program,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        kv_dtype: KvDtype = KvDtype.INT8,
        poison: bool = False,
        max_adapter_rank: int = 0,
    ) -> None:
        is_one_pass = program.is_one_pass
        if is_one_pass and max_adapter_rank:
            raise ModelError("the model reads texts and writes none.", remedy="Use adapters with models that write text.")
        self._program = program
        self._state = program.paged_state or PagedState(())
        self._interpreter = Interpreter(program, model.weights, num_positions=max_model_len)
        self._kv_dtype = kv_dtype
        # Text encoders store nothing in blocks.
        self._cache = self._make_cache(1 if is_one_pass else num_blocks, 1 if is_one_pass else block_size, poison=poison)
        self._capacity = capacity_of(
            program,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            num_state_blocks=-(-4 * self._state.num_floats // max(1, self.block_bytes)),
        )
        self._max_adapter_rank = max_adapter_rank
        self._adapters: dict[int, tuple[PagedFactors, tuple[int, ...]]] = {}
        """Number -> the adapter, and the blocks with its pages."""
        self._batches = BatchBuilder(self._capacity, vocab_size=program.vocab_size, placed=self._adapters.keys())
        self._sampling: dict[int, SamplingParams] = {}  # parameters by slot
        self._num_scored: dict[int, int] = {}  # prompt tokens that were scored before the row was admitted, by slot
        self._state_blocks: dict[int, tuple[int, ...]] = {}  # by slot
        self._sources: dict[int, tuple[int, ...]] = {}  # where the states of this step's new rows are read, by slot
        self._saves: Sequence[StateSave] = ()
        self._features_in = np.zeros((0, 0), np.float32)
        """`StepPlan.features` of the submitted step."""
        self._features_out: list[NDArray[np.float32]] = []
        """`StepResult.features` of the rows computed so far."""
        self._awaits: _Awaits | None = None
        self._results: deque[StepResult] = deque()
        self._is_closed = False

    @property
    def depth(self) -> int:
        return 1

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            if not (NULL_BLOCK <= source < self._capacity.num_blocks and NULL_BLOCK < destination < self._capacity.num_blocks):
                raise ValueError(f"can't copy block {source} to block {destination} of {self._capacity.num_blocks}")
            self._cache.copy_block(source, destination)

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, out, strict=True):
            check_block_id(block_id, self._capacity)
            self._cache.read_block(block_id, target)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            check_block_id(block_id, self._capacity)
            self._cache.write_block(block_id, content)

    @property
    def max_adapter_rank(self) -> int:
        return self._max_adapter_rank

    @property
    def adapter_packer(self) -> AdapterPacker:
        program, page_bytes, max_rank = self._program, self.block_bytes, self._max_adapter_rank
        return lambda factors: pack_factors(factors, program, page_bytes=page_bytes, max_rank=max_rank)

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        if number == BASE or number in self._adapters:
            raise ValueError(f"adapter {number} is placed already, or is none")
        if not isinstance(packed, PagedFactors) or len(block_ids) != packed.num_pages:
            raise ValueError(f"adapter {number} was packed for another executor, or has another number of pages than blocks")
        for block_id, page in zip(block_ids, packed.pages, strict=True):
            check_block_id(block_id, self._capacity)
            self._cache.write_block(block_id, page)
        self._adapters[number] = packed, tuple(block_ids)

    def drop_adapter(self, number: int) -> None:
        if number in self._adapters:
            _, block_ids = self._adapters.pop(number)
            self._cache.forget(block_ids, 0)

    def _adapter(self, number: int) -> AdapterFactors | None:
        if number == BASE:
            return None
        if number not in self._adapters:
            raise ExecutorFailure(f"adapter {number} was dropped while a row had it")
        paged, block_ids = self._adapters[number]
        pages = [bytearray(self.block_bytes) for _ in block_ids]
        self.read_blocks(block_ids, [memoryview(page) for page in pages])
        return paged.factors(b"".join(pages))

    def submit(self, plan: StepPlan) -> Ticket:
        """Compute the step, unless it waits for grammar masks. Raises ValueError if the plan is invalid."""
        if self._is_closed:
            raise ExecutorFailure("the reference executor is closed")
        if self._awaits is not None:
            raise ValueError(f"step {plan.step_id} was submitted while step {self._awaits.batch.step_id} waits for masks")
        start_ns = time.monotonic_ns()
        batch = self._batches.apply(plan)
        own = batch.slot_mapping[batch.slot_mapping >= self._capacity.block_size]  # not the null block's
        if len(np.unique(own)) != len(own):
            raise ValueError(f"step {plan.step_id} writes one KV slot twice")
        for slot in batch.released:
            del self._sampling[slot]
            self._num_scored.pop(slot, None)
            self._state_blocks.pop(slot, None)
        self._sampling.update((slot, row.sampling) for slot, row in batch.admitted)
        self._num_scored.update(
            (slot, row.num_scored) for slot, row in batch.admitted if row.sampling.prompt_logprobs is not None
        )
        self._sources = {slot: row.state_source for slot, row in batch.admitted}
        self._state_blocks.update((slot, row.state_block_ids) for slot, row in batch.admitted)
        self._saves = plan.saves
        if self._program.given:
            self._features_in = np.frombuffer(plan.features, np.float32).reshape(plan.num_tokens, -1)
        self._forget_stale_blocks(plan)
        follow = {request_id for request_id, slot in _samplers(batch) if self._sampling[slot].follows_grammar}
        if follow:
            self._awaits = _Awaits(batch, start_ns, follow)
        else:
            self._compute(batch, start_ns, {})
        return Ticket(plan.step_id)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        awaits = self._awaits
        if awaits is None or awaits.batch.step_id != ticket.step_id:
            raise ValueError(f"step {ticket.step_id} waits for no masks")
        for request_id, mask in masks.items():
            if request_id not in awaits.request_ids:
                raise ValueError(f"request {request_id!r} does not sample in this step, or follows no grammar")
            num_guesses = int(awaits.batch.num_guesses[awaits.batch.request_ids.index(request_id)])
            num_bytes = self._mask_bytes * (1 + num_guesses)
            if len(mask) != num_bytes:
                raise ValueError(f"the mask of request {request_id!r} has {len(mask)} bytes, not {num_bytes}")
        self._awaits = None
        self._compute(awaits.batch, awaits.start_ns, masks)

    def _compute(self, batch: StepBatch, start_ns: int, masks: Mapping[str, bytes]) -> None:
        if self._capacity.is_one_pass:
            self._read_texts(batch, start_ns)
            return
        self._features_out = []
        samples, prompt_logprobs = self._run_rows(batch, masks)
        for request_id, drawn in samples.items():
            self._batches.append(self._batches.slot(request_id), [one.token_id for one in drawn] or [NO_TOKEN])
        told = {request_id: [one.logprobs for one in drawn if one.logprobs] for request_id, drawn in samples.items()}
        self._results.append(
            StepResult(
                step_id=batch.step_id,
                token_ids={
                    request_id: tuple([one.token_id for one in drawn]) for request_id, drawn in samples.items() if drawn
                },
                timing=StepTiming(start_ns, time.monotonic_ns()),
                logprobs={request_id: tuple(entries) for request_id, entries in told.items() if entries},
                prompt_logprobs=prompt_logprobs,
                failures={request_id: NO_USABLE_LOGIT for request_id, drawn in samples.items() if not drawn},
                features=b"".join([rows.tobytes() for rows in self._features_out]),
            )
        )

    def _read_texts(self, batch: StepBatch, start_ns: int) -> None:
        states: dict[str, bytes] = {}
        failures: dict[str, str] = {}
        sampling_rows = set(batch.sample_rows.tolist())
        for i, request_id in enumerate(batch.request_ids):
            state = self._run_row(batch, i, range(0), samples=i in sampling_rows)
            if i not in sampling_rows:  # padding
                continue
            if np.isfinite(state).all():
                states[request_id] = state.tobytes()
            else:
                failures[request_id] = NO_USABLE_STATE
        timing = StepTiming(start_ns, time.monotonic_ns())
        self._results.append(StepResult(batch.step_id, {}, timing, failures=failures, states=states))

    def collect(self, ticket: Ticket) -> StepResult:
        """Return the result of the oldest step. Raises ValueError for any other ticket."""
        if not self._results or self._results[0].step_id != ticket.step_id:
            raise ValueError(f"step {ticket.step_id} is not the next one to collect")
        return self._results.popleft()

    def close(self) -> None:
        self._is_closed = True

    def forward_logits(self, token_ids: Sequence[int], *, adapter: int = BASE) -> NDArray[np.float32]:
        """Return the logits at every position of a prompt, without the KV cache. [num_tokens, vocab_size]"""
        num_tokens = len(token_ids)
        state = self._program.state
        cache = self._make_cache(1, max(num_tokens, state.num_columns if state else 0), poison=False)
        indices = np.arange(num_tokens)
        row = RowRun(cache, np.array(token_ids, np.int32), 0, indices, np.zeros(1, np.int32), gathered=indices)
        row.adapter, row.state = self._adapter(adapter), self._no_state()
        return self._interpreter.run(row)

    def _no_state(self) -> list[NDArray[np.float32]]:
        return [np.zeros(shape, np.float32) for shape in self._state.matrices]

    def _read_state(self, block_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        numbers, state = self._cache.read_numbers(block_ids, self._state.num_floats), self._no_state()
        for matrices in state:
            matrices[:] = numbers[: matrices.size].reshape(matrices.shape)
            numbers = numbers[matrices.size :]
        return state

    def _write_state(self, block_ids: Sequence[int], state: Sequence[NDArray[np.float32]]) -> None:
        self._cache.write_numbers(block_ids, np.concatenate([matrices.reshape(-1) for matrices in state]))

    def _make_cache(self, num_blocks: int, block_size: int, *, poison: bool) -> KvCache:
        return KvCache(
            shapes=self._program.kv_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._kv_dtype,
            state=self._program.state,
            poison=poison,
        )

    def _forget_stale_blocks(self, plan: StepPlan) -> None:
        if self._capacity.is_one_pass:
            return
        for admit in plan.admits:
            self._cache.forget(admit.block_ids, admit.num_computed_tokens)
        for row in plan.rows:
            self._cache.forget(row.new_block_ids, 0)

    def _run_rows(
        self, batch: StepBatch, masks: Mapping[str, bytes]
    ) -> tuple[dict[str, list[Sample]], dict[str, tuple[TokenLogprobs, ...]]]:
        """Return sampled tokens (none if no logit was usable) and log-probabilities of prompt tokens, by request id."""
        samples: dict[str, list[Sample]] = {}
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        sampling_rows = set(batch.sample_rows.tolist())
        for i, request_id in enumerate(batch.request_ids):
            slot, scored = int(batch.row_slots[i]), self._scored(batch, i)
            logits = self._run_row(batch, i, scored, samples=i in sampling_rows)
            if scored:
                num_top, token_ids = self._sampling[slot].prompt_logprobs or 0, self._batches.tokens[slot]
                prompt_logprobs[request_id] = tuple(
                    [token_logprobs(row, int(token_ids[at + 1]), num_top) for row, at in zip(logits, scored, strict=False)]
                )
            if i in sampling_rows:
                samples[request_id] = self._sample(slot, logits[len(scored) :], masks.get(request_id))
        return samples, prompt_logprobs

    def _scored(self, batch: StepBatch, i: int) -> range:
        """Return the positions of row `i` at which the log-probability of the next prompt token was requested."""
        slot = int(batch.row_slots[i])
        if slot not in self._num_scored:
            return range(0)
        query_len = int(batch.query_start_loc[i + 1] - batch.query_start_loc[i])
        num_prompt_tokens = int(self._batches.num_prompt_tokens[slot])
        return scored_positions(int(batch.context_lens[i]), query_len, num_prompt_tokens, self._num_scored[slot])

    def _run_row(self, batch: StepBatch, i: int, scored: range, *, samples: bool) -> NDArray[np.float32]:
        """Return row i's logits at the `scored` positions, then, if it samples, at its last known token and at each guess; or a
        text encoder's states."""
        start, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        gathered = [at - int(batch.context_lens[i]) for at in scored]
        if samples:
            gathered += range(end - start - 1 - int(batch.num_guesses[i]), end - start)
        slot = int(batch.row_slots[i])
        row = RowRun(
            cache=self._cache,
            token_ids=batch.token_ids[start:end],
            context_len=int(batch.context_lens[i]),
            slots=batch.slot_mapping[start:end],
            block_table=self._batches.block_tables[slot],
            gathered=np.array(gathered, np.int64),
            second_at=int(self._batches.second_at[slot]),
            adapter=self._adapter(int(self._batches.adapters[slot])),
        )
        if self._program.given:
            row.buffers[self._program.given] = self._features_in[start:end]
        if not self._state.matrices:
            return self._run(row)
        own = self._state_blocks[slot]
        source = self._sources.get(slot, own)
        row.state = self._read_state(source) if source else self._no_state()
        saves = [save for save in self._saves if save.request_id == batch.request_ids[i]]
        row.saves = {save.position: self._no_state() for save in saves}
        result = self._run(row)
        if own:  # else it is padding
            self._write_state(own, row.state)
        for save in saves:
            self._write_state(save.block_ids, row.saves[save.position])
        return result

    def _run(self, row: RowRun) -> NDArray[np.float32]:
        result = self._interpreter.run(row)
        if self._program.kept:
            self._features_out.append(row.buffers[self._program.kept])
        return result

    def _sample(self, slot: int, logits: NDArray[np.float32], mask: bytes | None) -> list[Sample]:
        """Sample a token from each row of logits, up to the first token that is not the next guess."""
        num_tokens, num_prompt = int(self._batches.num_tokens[slot]), int(self._batches.num_prompt_tokens[slot])
        token_ids: list[int] = self._batches.tokens[slot, : num_tokens + len(logits) - 1].tolist()
        drawn: list[Sample] = []
        for idx, row in enumerate(logits):
            own = None if mask is None else mask[idx * self._mask_bytes : (idx + 1) * self._mask_bytes]
            try:
                drawn.append(sample(row, self._sampling[slot], token_ids[: num_tokens + idx], num_prompt, mask=own))
            except NoCandidateError:
                break
            if token_ids[num_tokens + idx : num_tokens + idx + 1] != [drawn[-1].token_id]:
                break
        return drawn

    @property
    def _mask_bytes(self) -> int:
        return -(-self._program.vocab_size // 32) * 4


def _samplers(batch: StepBatch) -> Iterator[tuple[str, int]]:
    for row in batch.sample_rows.tolist():
        yield batch.request_ids[row], int(batch.row_slots[row])
