"""The engine's `Executor` on a GPU. A step copies one message (all inputs) to the device, queues kernels and copies one result
back. Grammar masks need a second message.

Sampled tokens stay in tables on the device, and the next step reads them there. So `submit` never waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from triton.errors import TritonError

from penstock.backends.batch import NO_TOKEN, NULL_BLOCK, BatchBuilder, check_block_id
from penstock.backends.cuda.adapters import AdapterFormat, PlacedAdapters
from penstock.backends.cuda.attention_choice import AttentionChoice, Wanted
from penstock.backends.cuda.attention_trial import Clock
from penstock.backends.cuda.flight import Flight, TextFlight, UnsampledStep
from penstock.backends.cuda.graphs import Captured, CaptureRun, CudaCapture, DecodeGraphs
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.launcher import StepLauncher
from penstock.backends.cuda.lowering import CompiledProgram
from penstock.backends.cuda.stream import Mark, Stream, open_stream
from penstock.backends.cuda.supported import only_kv_shape
from penstock.backends.cuda.tables import COMPUTED, num_mask_words
from penstock.backends.cuda.text_launcher import TextLauncher
from penstock.backends.cuda.text_logits import text_logits
from penstock.engine.ports import Ready
from penstock.models.adapter import AdapterFactors, AdapterPacker
from penstock.models.program import KvShape, Program
from penstock.models.weights import LoadedModel
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.errors import ExecutorFailure, ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult
from penstock.types.sampling import PARAMETERS


class CudaExecutor:
    """Runs steps on a GPU: see `engine.ports.Executor`.

    - `dtype`: weights, activations and unquantised KV. By default bf16 on a GPU, else float32.
    - `round_to_fp8`: rounds float weights of linear operations.
    - `deterministic`: results do not depend on the batch, bit for bit.
    - `attention`: `auto`, `triton` or `flashinfer`. Triton's kernels run until `choose_attention` is called.
    - `use_graphs`: runs decodes as CUDA graphs, except steps with adapters (rank at most `max_adapter_rank`).
    - `device`: anything but a GPU is for tests, in Triton's interpreter. Enable it before importing Triton.
    - `poison`: for tests, stale KV becomes NaN.

    Raises `ModelError` or ConfigError for an unsupported program, attention or size, ValueError for int4 KV, and MemoryError.
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
        kv_dtype: KvDtype = KvDtype.BF16,
        device: str | torch.device = "cuda",
        dtype: torch.dtype | None = None,
        round_to_fp8: bool = False,
        deterministic: bool = False,
        attention: str = Wanted.TRITON,
        depth: int = 2,
        use_graphs: bool = True,
        poison: bool = False,
        max_adapter_rank: int = 0,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        if program.is_one_pass and max_adapter_rank:
            raise ModelError("the model reads texts and writes none.", remedy="Use adapters with models that write text.")
        kv_shape = only_kv_shape(program)  # before anything is opened that an error would leave open
        sizes = (num_blocks, block_size, max_rows, max_step_tokens, max_model_len)
        unsupported = frozenset() if program.is_one_pass else frozenset(PARAMETERS.keys() - COMPUTED)
        self._capacity = Capacity(
            *sizes, is_one_pass=program.is_one_pass, vocab_size=program.vocab_size, unsupported_parameters=unsupported
        )
        self._num_positions = max_model_len
        self._depth = depth
        self._device = torch.device(device)
        self._stream = open_stream(self._device, spins=depth == 1)
        self._reading = open_stream(self._device, spins=False, goes_first=True)
        """Copies blocks to the host while steps run."""
        self._moved: dict[int, Mark] = {}
        """Block id -> mark after the copy or write that filled the block, until the block is read."""
        self._vocab_size = program.vocab_size
        self._max_adapter_rank = max_adapter_rank
        self._adapters: PlacedAdapters | None = None
        """None if adapters are off."""
        self._flights: deque[Flight | UnsampledStep | TextFlight] = deque()
        """Steps between `submit` and `collect`, oldest first. Only the last can wait for masks."""
        self._is_closed = False
        is_gpu = self._device.type == "cuda"
        self._use_graphs = use_graphs and not program.is_one_pass
        self._graphs = self._make_graphs()
        with self._stream.entered():
            try:
                self._make_device_parts(
                    model,
                    program,
                    kv_shape,
                    kv_dtype=kv_dtype,
                    dtype=dtype or (torch.bfloat16 if is_gpu else torch.float32),
                    round_to_fp8=round_to_fp8,
                    deterministic=deterministic,
                    attention=Wanted(attention),
                    poison=poison,
                )
                self._batches = self._make_batches()
                if self._adapters is not None:
                    self._run_without_factors(self._adapters)
                if is_gpu:
                    torch.cuda.empty_cache()  # steps do not need the temporary memory of loading
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"the GPU has no room for the model and {num_blocks} KV blocks: {error}") from error

    def _run_without_factors(self, adapters: PlacedAdapters) -> None:
        """Run an empty adapter, to compile the LoRA kernels before the first request."""
        number = BASE + 1
        adapters.place(number, adapters.format.pack(AdapterFactors({})), [NULL_BLOCK + 1])
        assert isinstance(self._launcher, StepLauncher), "texts have no adapters"
        self._launcher.run_adapted_padding(number)
        adapters.drop(number)

    def _make_batches(self) -> BatchBuilder:
        placed = () if self._adapters is None else self._adapters
        return BatchBuilder(self._capacity, vocab_size=self._vocab_size, placed=placed)

    def _make_graphs(self) -> DecodeGraphs | None:
        if not self._use_graphs:
            return None
        capture = CudaCapture() if self._device.type == "cuda" else Captured.without_device
        return DecodeGraphs(
            max_rows=self._capacity.max_rows,
            max_model_len=self._capacity.max_model_len,
            programs=self._decode_programs,
            capture=capture,
        )

    def _decode_programs(self, num_rows: int, max_seq_len: int) -> int:
        return self._attention.decode_programs(num_rows, max_seq_len)

    def _make_device_parts(
        self,
        model: LoadedModel,
        program: Program,
        kv_shape: KvShape,
        *,
        kv_dtype: KvDtype,
        dtype: torch.dtype,
        round_to_fp8: bool,
        deterministic: bool,
        attention: Wanted,
        poison: bool,
    ) -> None:
        capacity, device = self._capacity, self._device
        max_tokens = max(capacity.max_step_tokens, capacity.max_rows)  # padding may make a decode longer than `max_step_tokens`
        self._cache = PagedKvCache(
            num_layers=0 if program.is_one_pass else len(program.kv_shapes),
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            num_kv_heads=kv_shape.num_kv_heads,
            head_dim=kv_shape.head_dim,
            kv_dtype=kv_dtype,
            dtype=dtype,
            device=device,
            poison=poison,
        )
        adapter_format = None
        if self._max_adapter_rank:
            adapter_format = AdapterFormat(program, self._cache, dtype, self._max_adapter_rank)
            self._adapters = PlacedAdapters(adapter_format, self._cache, device)
        self._program = CompiledProgram(
            program,
            model.weights,
            self._cache,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            max_samples=capacity.max_rows,
            num_positions=capacity.max_model_len,
            round_to_fp8=round_to_fp8,
            deterministic=deterministic,
            adapter_format=adapter_format,
        )
        self._attention = AttentionChoice(
            attention,
            self._program,
            self._cache,
            num_layers=len(program.kv_shapes),
            dtype=dtype,
            is_int8_kv=kv_dtype is KvDtype.INT8,
            deterministic=deterministic,
            stream=self._stream,
            device=device,
        )
        self._attention.open(capacity, self._graphs)
        self._launcher: StepLauncher | TextLauncher
        if program.is_one_pass:
            self._launcher = TextLauncher(capacity, self._program, depth=self._depth, stream=self._stream, device=device)
            return
        self._launcher = StepLauncher(
            capacity,
            self._program,
            self._attention,
            self._cache,
            vocab_size=program.vocab_size,
            max_tokens=max_tokens,
            adapters=self._adapters,
            depth=self._depth,
            stream=self._stream,
            device=device,
        )

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def num_positions(self) -> int:
        """The sequence length limit at construction, which decides how int8 keys are centred (`models.rope`)."""
        return self._num_positions

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def weight_bytes(self) -> int:
        return self._program.weight_bytes

    @property
    def mask_bytes(self) -> int:
        return 4 * num_mask_words(self._vocab_size)

    # KV blocks.

    def resize(self, num_blocks: int, *, max_model_len: int) -> None:
        """Replace all KV blocks and lower the sequence length limit. Call it while the executor has no request.

        Raises MemoryError if there is no room; then call only `close`.
        """
        if self._flights or max_model_len > self._capacity.max_model_len:
            raise ValueError(f"can't resize {self._capacity} to {num_blocks} blocks and lengths of {max_model_len}")
        self._capacity = replace(self._capacity, num_blocks=num_blocks, max_model_len=max_model_len)
        if self._adapters is not None:
            self._adapters.clear()
        self._batches = self._make_batches()
        self._graphs = self._make_graphs()
        with self._stream.entered():
            try:
                self._cache.resize(num_blocks)
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"the GPU has no room for {num_blocks} KV blocks: {error}") from error

    def choose_attention(self, clock: Clock | None = None) -> dict[str, str]:
        """Choose attention kernels by measuring, before the first request. Return their names by kind of step.

        Raises ConfigError if FlashInfer is required but gives other answers.
        """
        with self._working():
            self._attention.choose(self._capacity, self._graphs, clock)
        self._graphs = self._make_graphs()  # sizes and limits of graphs depend on the choice
        return self._attention.names

    @property
    def num_graphs_left(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_left

    def capture_graphs(self, most: int | None = None, *, max_seconds: float = math.inf) -> CaptureRun:
        """Capture CUDA graphs of the usual decodes, at most `most`, so that no request waits for a capture.

        Call it while no step is in flight. `resize` and `choose_attention` discard graphs. Raises MemoryError.
        """
        if self._flights:
            raise ValueError(f"step {self._flights[0].step_id} is in flight")
        graphs, launcher = self._graphs, self._launcher

        def run(num_rows: int, limit: int) -> None:
            assert isinstance(launcher, StepLauncher), "texts have no graphs"
            launcher.run_padding(num_rows, limit, graphs)

        with self._working():
            return CaptureRun(0, 0, 0.0) if graphs is None else graphs.capture_usual(run, most, max_seconds, time.monotonic)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue copies of KV blocks, given as ids (source, destination). Raises ValueError for an invalid block."""
        for source, destination in pairs:
            if source != NULL_BLOCK:
                check_block_id(source, self._capacity)
            check_block_id(destination, self._capacity)
        if pairs:
            with self._working():
                self._cache.copy_blocks(pairs)
                self._moved |= dict.fromkeys((destination for _, destination in pairs), self._stream.mark())

    @property
    def block_bytes(self) -> int:
        return int(self._cache.block_bytes)

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        for block_id in block_ids:
            check_block_id(block_id, self._capacity)
        if not block_ids:
            return None
        # Steps that wrote these blocks have been collected, but a copy into them may still be queued.
        with self._working(self._reading):
            for mark in dict.fromkeys(self._moved.pop(block_id) for block_id in block_ids if block_id in self._moved):
                self._reading.follow(mark)  # only their marks: later ones would wait for the step in flight
            read = self._cache.read_blocks(block_ids, out, self._reading)
            self._stream.follow(read.left)  # later writes to these blocks wait for the read
        return read.wait

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        for block_id in block_ids:
            check_block_id(block_id, self._capacity)
        with self._working():
            self._cache.write_blocks(block_ids, contents)
            self._moved |= dict.fromkeys(block_ids, self._stream.mark())

    # Adapters.

    @property
    def max_adapter_rank(self) -> int:
        return self._max_adapter_rank

    @property
    def adapter_packer(self) -> AdapterPacker:
        return self._adapters_on.format.pack

    @property
    def _adapters_on(self) -> PlacedAdapters:
        if self._adapters is None:
            raise ValueError("the executor computes no adapters: max_adapter_rank is 0")
        return self._adapters

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            check_block_id(block_id, self._capacity)
        with self._working():
            self._adapters_on.place(number, packed, block_ids)

    def drop_adapter(self, number: int) -> None:
        if self._adapters is not None:
            with self._working():
                self._adapters.drop(number)

    # Steps.

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a step. Raises ValueError for an invalid plan, if `depth` steps are in flight, or if one awaits masks."""
        if len(self._flights) >= self._depth:
            raise ValueError(f"step {plan.step_id} was submitted before step {self._flights[0].step_id} was collected")
        if self._flights and isinstance(last := self._flights[-1], UnsampledStep):
            raise ValueError(f"step {plan.step_id} was submitted before step {last.step_id} got its masks")
        with self._working():
            began_ns = time.monotonic_ns()
            batch = self._batches.apply(plan)
            if isinstance(self._launcher, TextLauncher):
                self._flights.append(self._launcher.launch(batch, self._batches, began_ns))
                return Ticket(plan.step_id)
            self._flights.append(self._launcher.launch(plan, batch, self._batches, self._graphs, began_ns))
        # The row now has one more token. Only the device knows its id.
        self._batches.append_sampled(batch, np.full(len(batch.sample_rows), NO_TOKEN, np.int32))
        return Ticket(plan.step_id)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        step = self._flights[-1] if self._flights else None
        if not isinstance(step, UnsampledStep) or step.step_id != ticket.step_id:
            raise ValueError(f"step {ticket.step_id} waits for no masks")
        by_sample = step.by_sample(masks)
        assert isinstance(self._launcher, StepLauncher), "texts have no masks"
        with self._working():
            self._flights[-1] = self._launcher.restrict(step, by_sample)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the oldest step and return its result. Raises ValueError for another step, or if it awaits grammar masks."""
        if not self._flights or self._flights[0].step_id != ticket.step_id:
            raise ValueError(f"step {ticket.step_id} is not the next one to collect")
        flight = self._flights[0]
        if isinstance(flight, UnsampledStep):
            raise ValueError(f"step {ticket.step_id} was collected before it got its masks")
        self._flights.popleft()
        with self._working():
            return flight.result()

    def close(self) -> None:
        """Finish steps in flight and free the device's memory. Idempotent; call nothing else afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RuntimeError), self._stream.entered():  # a failed device raises again
            self._stream.follow(self._reading.mark())
            self._stream.mark().wait()
        self._flights.clear()
        self._graphs = None
        self._adapters = None
        del self._attention, self._program, self._cache, self._launcher
        with suppress(RuntimeError):
            torch.cuda.empty_cache()  # does nothing without a GPU

    def forward_logits(self, token_ids: Sequence[int], *, adapter: int = BASE) -> NDArray[np.float32]:
        """Return logits after each token of a text, for tests. [len(token_ids), vocab_size]

        It overwrites KV from block 1 on: call it only when idle, with adapters in later blocks. Raises ValueError for encoders.
        """
        if not isinstance(self._launcher, StepLauncher):
            raise ValueError("a program that reads texts has no logits")
        with self._working():
            max_blocks = self._launcher.tables.block_tables.shape[1]
            adapted = None if adapter == BASE else (self._adapters_on, adapter)
            return text_logits(
                self._program, self._capacity, token_ids, max_blocks=max_blocks, device=self._device, adapted=adapted
            )

    @contextmanager
    def _working(self, stream: Stream | None = None) -> Iterator[None]:
        """Enter a CUDA stream (by default the steps'), and turn errors of the GPU or libraries into `ExecutorFailure`."""
        if self._is_closed:
            raise ExecutorFailure("the executor is closed")
        with (stream or self._stream).entered():
            try:
                yield
            except (RuntimeError, TritonError) as error:
                raise ExecutorFailure(f"the GPU failed: {error}") from error
