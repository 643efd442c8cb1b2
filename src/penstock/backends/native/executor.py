"""The `Executor` port for the C++ engine. `collect` computes a step in one call, without the GIL.

If rows wait for grammar masks, `submit` begins the step in the background, and `restrict` sends the masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backends.batch import NO_USABLE_LOGIT, NO_USABLE_STATE, NULL_BLOCK, capacity_of
from penstock.backends.native._native import (
    Account,
    AdapterFormat,
    AdapterImage,
    Engine,
    KvFormat,
    RowSampling,
    RowTable,
    Team,
)
from penstock.backends.native.blocks import NativeBlocks, new_file
from penstock.backends.native.footprint import check_format, num_state_lines, state_line
from penstock.backends.native.lowering import lower
from penstock.machine import find_cores
from penstock.models.adapter import AdapterFactors, AdapterPacker
from penstock.models.packed_file import Packed, PackedError, PackedFile
from penstock.models.program import KvShape, Program
from penstock.models.weights import LoadedModel
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import PARAMETERS, SamplingParams

KV_FORMATS = {KvDtype.INT8: KvFormat.INT8, KvDtype.BF16: KvFormat.INT16, KvDtype.INT4: KvFormat.INT4}
TIME_PARTS = ("rows", "linear", "attention", "sampling")


class Stage(NamedTuple):
    """A report on how threads shared one instruction of a step (docs/kernels.md, "Strands")."""

    strand: int  # -1: all strands together
    instruction: str
    num_tasks: int
    grain: int  # rows, panels or tiles of a task
    row_blocks: int
    num_members: int  # threads that share its tasks


class NativeExecutor:
    """Computes steps with C++ kernels on the CPU. See `engine.ports.Executor` for the contract.

    - `team`, `account`: executors of a team share its threads. Accounts decide which executor's step runs next.
    - `num_threads`: threads if there is no `team`; 0 chooses them for this machine.
    - `variant`: an instruction set (`penstock env` lists them); empty: the best.
    - `poison`: for tests, stale KV and buffers become NaN.
    - `on_packed`, `rounds_floats`: see `lower`. By default, only text encoders round floats.
    - `expert_file`: descriptor of an empty file that will store the experts. A failing disk raises OSError.
    - `packed`: an open file with the model's packed weights, which may be closed afterwards.
    - `max_adapter_rank`: the largest rank of an adapter; 0: no adapters.
    - `memory_nodes`: NUMA nodes over which to spread weights and KV cache.
    - `shares_kv`: other processes of this user may read the KV cache, if the system has memfd (`block_memory`).

    Raises ModelError for an operation that the backend can't compute, PackedError if `packed` does not fit, MemoryError, and
    ValueError for an invalid capacity (`block_size` must be a multiple of 16, except for text encoders).
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
        team: Team | None = None,
        account: Account | None = None,
        num_threads: int = 0,
        variant: str = "",
        poison: bool = False,
        on_packed: Callable[[int], object] | None = None,
        expert_file: int | None = None,
        packed: PackedFile | None = None,
        rounds_floats: bool | None = None,
        max_adapter_rank: int = 0,
        memory_nodes: Sequence[int] = (),
        shares_kv: bool = False,
    ) -> None:
        self._capacity = capacity_of(
            program,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
        )
        state, is_one_pass, max_scored = program.state, program.is_one_pass, self._capacity.max_scored
        self._vocab_size = program.vocab_size
        kv_shapes = () if is_one_pass else program.kv_shapes  # text encoders have no KV cache
        check_format(kv_shapes, kv_dtype)
        paged = program.paged_state
        line = state_line(paged) if paged else 0
        self._kv_file = new_file() if shares_kv else None
        self._opened: Engine | None = Engine(
            kv_shapes=[_sizes(shape.padded()) for shape in kv_shapes],
            vocab_size=program.vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            team=team or Team(num_threads or find_cores().num_threads),
            variant=variant,
            kv_format=KV_FORMATS[kv_dtype],
            num_states=state.num_layers if state else 0,
            state_columns=state.num_columns if state else 0,
            state_width=state.width if state else 0,
            account=account,
            max_scored=max_scored,
            memory_nodes=memory_nodes,
            num_state_lines=num_state_lines(paged, line) if paged else 0,
            state_line=line,
            kv_fd=-1 if self._kv_file is None else self._kv_file.fd,
        )
        self._capacity = replace(self._capacity, num_state_blocks=self._engine.num_state_blocks)
        if expert_file is not None:
            self._engine.keep_partly_read_in(expert_file)
        if packed is not None:
            _map(self._engine, packed)
        rounds = is_one_pass if rounds_floats is None else rounds_floats
        if max_adapter_rank:
            _enable_adapters(self._engine, max_adapter_rank, rounds_floats=rounds)
        self._max_adapter_rank = max_adapter_rank
        self._program = program
        self._sites, self._matrices, features_in, features_out = lower(
            program,
            model.weights,
            self._engine,
            num_positions=max_model_len,
            on_packed=on_packed,
            rounds_floats=rounds,
            has_adapters=max_adapter_rank > 0,
            packed=packed,
        )
        self._features_in = self._engine.buffer(features_in) if program.given else None
        self._features_out = self._engine.buffer(features_out) if program.kept else None
        self._num_features_out = 0
        self._placed: dict[int, tuple[int, ...]] = {}  # adapter number -> block ids
        self._engine.settle()
        self._opened_rows: RowTable | None = RowTable(
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            vocab_size=program.vocab_size,
            window=self._capacity.window,
            is_one_pass=is_one_pass,
            max_scored=max_scored,
            num_state_blocks=self._capacity.num_state_blocks,
        )
        self._wants_logprobs: set[str] = set()
        self._scores_prompts: set[str] = set()
        self._with_grammar: set[str] = set()
        self._awaits_masks = False
        self._flight: int | None = None
        self._start_ns = 0
        self._poison = poison
        if poison:
            for block_id in range(1, num_blocks):
                self._engine.poison_block(block_id)

    @property
    def _engine(self) -> Engine:
        if self._opened is None:
            raise ValueError("the executor is closed")
        return self._opened

    @property
    def _rows(self) -> RowTable:
        if self._opened_rows is None:
            raise ValueError("the executor is closed")
        return self._opened_rows

    @property
    def depth(self) -> int:
        return 1

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def variant(self) -> str:
        return str(self._engine.variant)

    @property
    def num_threads(self) -> int:
        return int(self._engine.num_threads)

    @property
    def num_members(self) -> int:
        """Threads that took part in the last step. A small step uses fewer threads than there are."""
        return int(self._engine.num_members)

    @property
    def num_strands(self) -> int:
        """Groups (strands) of tokens that went through the layers separately in the last step; 0 before the first step."""
        return int(self._engine.num_strands)

    @property
    def stages(self) -> list[Stage]:
        return [Stage(*stage) for stage in self._engine.stages]

    def fetched_blocks(self, strand: int, layer: int) -> list[int]:
        """Return the KV blocks that a strand prefetched for a layer's attention in the last step, in order."""
        return list(self._engine.fetched_blocks(strand, layer))

    @property
    def weight_bytes(self) -> int:
        return int(self._engine.weight_bytes)

    @property
    def packed(self) -> Mapping[str, Packed]:
        """Packed matrices by name, in the form that a packed file stores."""
        return {name: Packed(form, self._engine.packed_arrays(matrix)) for name, (form, matrix) in self._matrices.items()}

    @property
    def small_page_bytes(self) -> int:
        """Bytes of weights that were not yet moved to huge pages in the background."""
        return int(self._engine.small_page_bytes)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._engine.copy_block(source, destination)

    @property
    def block_bytes(self) -> int:
        return int(self._engine.block_bytes)

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, out, strict=True):
            self._engine.read_block(block_id, np.frombuffer(target, np.uint8))

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            self._engine.write_block(block_id, np.frombuffer(content, np.uint8))

    @property
    def block_memory(self) -> NativeBlocks:
        return NativeBlocks(self._engine, self._kv_file)

    @property
    def max_adapter_rank(self) -> int:
        return self._max_adapter_rank

    @property
    def adapter_packer(self) -> AdapterPacker:
        return _Packer(self._program, self._engine.adapter_format, self._sites, self._max_adapter_rank)

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        if not isinstance(packed, AdapterImage):
            raise ValueError(f"adapter {number} was packed for another backend")
        self._engine.place_adapter(number, packed, block_ids)
        self._placed[number] = tuple(block_ids)

    def drop_adapter(self, number: int) -> None:
        block_ids = self._placed.pop(number, ())
        if block_ids:
            self._engine.drop_adapter(number)
        if self._poison:
            for block_id in block_ids:
                self._engine.poison_block(block_id)

    def submit(self, plan: StepPlan) -> Ticket:
        if self._flight is not None:
            raise ValueError(f"step {plan.step_id} was submitted before step {self._flight} was collected")
        rows = self._rows
        for request_id in plan.releases:
            rows.release(request_id)
            self._wants_logprobs.discard(request_id)
            self._scores_prompts.discard(request_id)
            self._with_grammar.discard(request_id)
        for row in plan.admits:
            if row.adapter != BASE and row.adapter not in self._placed:
                raise ValueError(f"request {row.request_id!r} has adapter {row.adapter}, which is not placed")
            slot = rows.admit(row)
            if self._capacity.is_one_pass:
                continue
            self._engine.set_sampling(slot, make_row_sampling(row.sampling))
            if row.sampling.logprobs is not None:
                self._wants_logprobs.add(row.request_id)
            if row.sampling.prompt_logprobs is not None:
                self._scores_prompts.add(row.request_id)
            if row.sampling.follows_grammar:
                self._with_grammar.add(row.request_id)
        rows.plan(plan.rows, plan.saves, plan.guesses)
        self._awaits_masks = bool(self._with_grammar) and any(
            row.samples and row.request_id in self._with_grammar for row in plan.rows
        )
        if self._poison:
            self._forget_stale(plan)
        if self._features_in is not None:
            self._features_in[: plan.num_tokens] = np.frombuffer(plan.features, np.float32).reshape(plan.num_tokens, -1)
        if self._features_out is not None:
            self._num_features_out = sum([row.samples for row in plan.rows]) if self._program.keeps_samples else plan.num_tokens
        self._flight, self._start_ns = plan.step_id, time.monotonic_ns()
        if self._awaits_masks:
            rows.begin(self._engine)
        return Ticket(plan.step_id)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        if self._flight != ticket.step_id or not self._awaits_masks:
            raise ValueError(f"step {ticket.step_id} waits for no masks")
        for request_id in masks:
            if request_id not in self._with_grammar:
                raise ValueError(f"request {request_id!r} follows no grammar")
        self._rows.restrict(self._engine, dict(masks))
        self._awaits_masks = False

    def collect(self, ticket: Ticket) -> StepResult:
        if self._flight is None or self._flight != ticket.step_id:
            raise ValueError(f"step {ticket.step_id} is not in flight")
        if self._awaits_masks:
            raise ValueError(f"step {ticket.step_id} waits for masks")
        self._flight = None
        engine, rows = self._engine, self._rows
        start_ns = self._start_ns if engine.is_computing else time.monotonic_ns()
        if self._capacity.is_one_pass:
            states, failed = rows.read(engine)
            failures = dict.fromkeys(failed, NO_USABLE_STATE)
            return StepResult(ticket.step_id, {}, timing=self._timing(start_ns), failures=failures, states=states)
        token_ids, failed = rows.run(engine)
        return StepResult(
            ticket.step_id,
            token_ids,
            timing=self._timing(start_ns),
            logprobs=self._logprobs() if self._wants_logprobs else {},
            prompt_logprobs=self._prompt_logprobs() if self._scores_prompts else {},
            failures=dict.fromkeys(failed, NO_USABLE_LOGIT),
            features=b"" if self._features_out is None else self._features_out[: self._num_features_out].tobytes(),
        )

    def _timing(self, start_ns: int) -> StepTiming:
        waited_ns, parts = self._engine.waited_ns, dict(zip(TIME_PARTS, self._engine.times(), strict=True))
        return StepTiming(start_ns + waited_ns, time.monotonic_ns(), parts, waited_ns)

    def _forget_stale(self, plan: StepPlan) -> None:
        """Fill stale buffers and KV positions with NaN, so that any use of them becomes visible."""
        self._engine.poison_buffers()
        if self._capacity.is_one_pass:
            return
        size = self._capacity.block_size
        for admit in plan.admits:
            for i, block_id in enumerate(admit.block_ids):
                if block_id == NULL_BLOCK:
                    continue
                self._engine.poison_block(block_id, min(size, max(0, admit.num_computed_tokens - i * size)))
            for block_id in set(admit.state_block_ids).difference(admit.state_source):
                self._engine.poison_state(block_id)
        for row in plan.rows:
            for block_id in row.new_block_ids:
                if block_id != NULL_BLOCK:
                    self._engine.poison_block(block_id)
        for save in plan.saves:
            for block_id in save.block_ids:
                self._engine.poison_state(block_id)

    def _logprobs(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        for (first, count), name in zip(self._rows.sampled_logits(), self._rows.sampled(), strict=True):
            if name in self._wants_logprobs:
                logprobs = self._logprobs_at(first, count)
                if logprobs[0].token_id >= 0:  # negative if the row failed; then the other values are from an earlier step
                    found[name] = logprobs
        return found

    def _prompt_logprobs(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        for name, first, count in self._rows.scored():
            found[name] = self._logprobs_at(first, count)
        return found

    def _logprobs_at(self, first: int, count: int) -> tuple[TokenLogprobs, ...]:
        found = [self._engine.logprobs(index) for index in range(first, first + count)]
        return tuple([TokenLogprobs(token_id, logprob, rank, tuple(top)) for token_id, logprob, rank, top in found])

    def forward_logits(self, token_ids: Sequence[int], *, adapter: int = BASE) -> NDArray[np.float32]:
        """Return logits after each token of a prompt, [len(token_ids), vocab_size]; for tests.

        Overwrites KV from block 1 on. Call it only when idle, with adapters placed in other blocks.
        """
        if self._capacity.is_one_pass:
            raise ValueError("the program has no logits: it reads texts")
        size = self._capacity.block_size
        num_blocks, num_state_blocks = -(-len(token_ids) // size), self._capacity.num_state_blocks
        if num_blocks + num_state_blocks >= self._capacity.num_blocks:
            raise ValueError(f"{len(token_ids)} tokens do not fit into {self._capacity.num_blocks - 1} blocks of {size}")
        state_blocks = np.arange(num_blocks + 1, num_blocks + 1 + num_state_blocks, dtype=np.int32)[None, :]
        table = np.arange(1, num_blocks + 1, dtype=np.int32)[None, :]
        logits = np.empty((len(token_ids), self._vocab_size), np.float32)
        chunk = min(self._capacity.max_rows, self._capacity.max_step_tokens)
        for begin in range(0, len(token_ids), chunk):
            end = min(begin + chunk, len(token_ids))
            positions = np.arange(begin, end, dtype=np.int32)
            self._engine.logits_step(
                np.zeros(1, np.int32),
                np.array([0, end - begin], np.int32),
                np.array([begin], np.int32),
                np.array(token_ids[begin:end], np.int32),
                positions,
                table[0, positions // size].astype(np.int64) * size + positions % size,
                table,
                np.arange(end - begin, dtype=np.int32),
                logits[begin:end],
                adapter,
                state_blocks,
            )
        return logits

    def close(self) -> None:
        """Abandon a begun step and drop the engine. Idempotent; call nothing else afterwards.

        Its memory is freed once no view of the KV cache is left. Threads end with the last engine of their team.
        """
        self._flight = None
        if self._opened is not None:
            self._opened.abandon_step()
        self._opened = self._opened_rows = self._kv_file = self._features_in = self._features_out = None


def _sizes(shape: KvShape) -> tuple[int, int, int]:
    return shape.num_kv_heads, shape.head_dim, shape.num_latent


def _map(engine: Engine, packed: PackedFile) -> None:
    try:
        engine.map_file(packed.fd)
    except OSError as error:
        raise PackedError(f"{packed.path}: {error}.") from error


def _enable_adapters(engine: Engine, max_rank: int, *, rounds_floats: bool) -> None:
    if rounds_floats:
        raise ModelError(
            "adapters can't change weights that are rounded to int8, such as those of text encoders.",
            remedy="Use adapters with models that write text.",
        )
    try:
        engine.enable_adapters(max_rank)
    except ValueError as error:
        raise ModelError(f"{error}; it is {max_rank}.", remedy="Set --max-lora-rank to 256 or less.") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Packer:
    program: Program
    format: AdapterFormat
    sites: Mapping[str, Sequence[int]]
    max_rank: int

    def __call__(self, factors: AdapterFactors) -> PackedAdapter:
        assert factors.fits(self.program, self.max_rank)
        found: list[tuple[int, NDArray[np.float32], NDArray[np.float32]]] = []
        for name, pair in factors.by_weight.items():
            if name not in self.sites:
                raise ModelError(
                    f"the adapter changes {name!r}, which the native backend can't compute yet.",
                    remedy="Use an adapter that leaves it alone, or --backend reference.",
                )
            a, b = (np.ascontiguousarray(factor, np.float32) for factor in pair)
            found.extend((site, a, b) for site in self.sites[name])
        try:
            return self.format.pack(found)
        except ValueError as error:
            raise ModelError(
                f"{error}.", remedy="Use another adapter, or a larger --block-size for a part that is too large."
            ) from error


def make_row_sampling(params: SamplingParams) -> RowSampling:
    return RowSampling(
        **{name: getattr(params, name) for name in PARAMETERS if name != "repeat_last_n"},
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        allowed_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bias=list(params.logit_bias),
        banned_sequences=[list(sequence) for sequence in params.banned_token_sequences],
        stop_ids=list(params.stop_token_ids),
        num_prompt_logprobs=params.prompt_logprobs or 0,
        penalty_window=params.penalty_window,
    )
