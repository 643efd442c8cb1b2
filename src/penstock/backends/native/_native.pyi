"""What the compiled module offers: native/bind_*.cpp.

Fields are explained in native/instructions.h, probes in native/probe.h.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from penstock.types.plan import AdmitRow, RowPlan, StateSave

I32 = NDArray[np.int32]

class RowSampling:
    def __init__(
        self,
        *,
        num_logprobs: int = -1,
        num_prompt_logprobs: int = 0,
        allowed_ids: Sequence[int] | None = None,
        bias: Sequence[tuple[int, float]] = ...,
        banned_sequences: Sequence[Sequence[int]] = ...,
        stop_ids: Sequence[int] = ...,
        penalty_window: int | None = None,
        **numbers: float,
    ) -> None:
        """`numbers`: those of `PARAMETERS` that are fields of `SamplingParams`."""

class SamplerScratch:
    def __init__(self) -> None: ...

def sample(
    logits: NDArray[np.float32],
    row: RowSampling,
    tokens: I32,
    num_prompt_tokens: int,
    scratch: SamplerScratch | None = None,
    mask: Sequence[int] | None = None,
) -> tuple[int, float, int, list[tuple[int, float]]]: ...
def score(logits: NDArray[np.float32], token: int, num_top: int) -> tuple[int, float, int, list[tuple[int, float]]]: ...
def uniform(seed: int, position: int) -> float: ...
def usable_variants() -> list[str]: ...
def emulated_variants() -> list[str]: ...
def why_no_tiles() -> str: ...

class KvFormat(Enum):
    INT8 = 0
    INT16 = 1
    INT4 = 2

class ProbeKind(Enum):
    INT8 = 0
    BF16 = 1
    FLOAT32 = 2
    BF16_TILES = 3

def tile_product(
    rows: int,
    k: int,
    a: NDArray[np.uint8],
    b: NDArray[np.uint8],
    c: NDArray[np.uint8],
    *,
    variant: str,
) -> None: ...
def peak_gops(
    kind: ProbeKind,
    *,
    num_threads: int,
    variant: str = "",
    seconds: float = 0.06,
    repeat: int = 5,
    cpu_time: bool = False,
) -> float: ...
def peak_read_gbs(
    *,
    num_threads: int,
    num_bytes: int = ...,
    variant: str = "",
    seconds: float = 0.06,
    repeat: int = 5,
    cpu_time: bool = False,
) -> float: ...

class SourceFormat(Enum):
    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    BF16 = 3
    Q5_0 = 4
    Q5_1 = 5
    Q4_K = 6
    Q5_K = 7
    Q6_K = 8
    IQ4_NL = 9
    IQ4_XS = 10
    F16 = 11
    F32 = 12
    Q2_K = 13
    Q3_K = 14
    Q1_0 = 15
    Q2_0 = 16
    TQ1_0 = 17
    TQ2_0 = 18
    IQ1_S = 19
    IQ1_M = 20
    IQ2_XXS = 21
    IQ2_XS = 22
    IQ2_S = 23
    IQ3_XXS = 24
    IQ3_S = 25
    MXFP4 = 26
    NVFP4 = 27

class RowOpKind(Enum):
    EMBED = 0
    ANGLES = 1
    RMS_NORM = 2
    QUANTIZE = 3
    TO_BF16 = 4
    ROPE = 5
    KV_WRITE = 6
    GATED = 7
    ADD = 8
    GATHER = 9
    LOOKUP = 10
    RESIZE_HEADS = 11
    GATHER_COLUMNS = 12
    SUM_EXPERTS = 14
    LAYER_NORM = 15
    ACTIVATE = 16
    LOOKUP_POSITION = 17
    SHORT_CONV = 18
    KEEP_STATE = 19
    ADD_TYPE = 20
    GATHER_FIRST = 21
    MEAN = 22
    NORMALISE = 23
    ROUND = 24
    SHRINK = 25
    ADAPT_EMBEDDING = 26
    SCALE = 27
    PREPARE_STATE = 28
    COLUMNS = 29
    PLACE_HEADS = 30
    SPARSE = 31

class RowOp:
    def __init__(
        self,
        kind: RowOpKind,
        *,
        out: int = -1,
        x: int = -1,
        y: int = -1,
        weight: int = -1,
        n: int = 0,
        head_dim: int = 0,
        value: float = 0.0,
    ) -> None: ...

class AdapterImage:
    @property
    def num_pages(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class AdapterFormat:
    def pack(self, factors: Sequence[tuple[int, NDArray[np.float32], NDArray[np.float32]]]) -> AdapterImage: ...

def spreading_error(memory_nodes: Sequence[int]) -> int: ...

class Team:
    def __init__(self, num_threads: int, cpus: Sequence[int] = ()) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def is_contested(self, account: Account, window_ns: int) -> bool: ...

class Account:
    def __init__(self, share: float = 1.0) -> None: ...
    @property
    def used_ns(self) -> int: ...

class Turns:
    def ask(self, account: Account, now_ns: int) -> int: ...
    def take(self, account: Account, now_ns: int) -> bool: ...
    def call(self, now_ns: int) -> bool: ...
    def leave(self, now_ns: int) -> None: ...
    def is_contested(self, account: Account, since_ns: int) -> bool: ...
    @property
    def holder(self) -> int: ...
    @property
    def kept_until_ns(self) -> int: ...

class Engine:
    def __init__(
        self,
        *,
        kv_shapes: Sequence[tuple[int, int] | tuple[int, int, int]],
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_step_tokens: int,
        team: Team,
        variant: str = "",
        kv_format: KvFormat = ...,
        num_states: int = 0,
        state_columns: int = 0,
        state_width: int = 0,
        account: Account | None = None,
        max_scored: int = 0,
        memory_nodes: Sequence[int] = (),
        num_state_lines: int = 0,
        state_line: int = 0,
        kv_fd: int = -1,
    ) -> None: ...
    def keep_partly_read_in(self, fd: int) -> None: ...
    def add_matrix(
        self,
        format: SourceFormat,
        rows: int,
        cols: int,
        data: NDArray[np.uint8] | None = None,
        is_partly_read: bool = False,
        by_row: bool = False,
        apart: Sequence[int] = (),
    ) -> int: ...
    def pack_rows(self, matrix: int, first_row: int, data: NDArray[np.uint8]) -> None: ...
    def map_file(self, fd: int) -> None: ...
    def map_matrix(
        self, format: SourceFormat, rows: int, cols: int, offset: int, bytes: int, by_row: bool = False, has_apart: bool = False
    ) -> int: ...
    def packed_arrays(self, matrix: int) -> list[NDArray[np.uint8]]: ...
    def add_table(self, format: SourceFormat, rows: int, cols: int, data: NDArray[np.uint8]) -> int: ...
    def add_vector(self, values: NDArray[np.float32], /) -> int: ...
    def add_order(self, columns: NDArray[np.int32], /) -> int: ...
    def add_integers(self, values: NDArray[np.int16], /) -> int: ...
    def add_rope(
        self, inv_freq: NDArray[np.float32], factor: float, growth: float = 0.0, growth_len: int = 1, samples: bool = False
    ) -> int: ...
    def add_buffer(self, width: int, per_sample: bool) -> int: ...
    def buffer(self, id: int) -> NDArray[np.float32]: ...
    @property
    def has_tiles(self) -> bool: ...
    def add_activation(self, cols: int, quantised: bool, per_sample: bool, by_row: bool = False) -> int: ...
    def add_rows(self, ops: Sequence[RowOp], samples: bool) -> None: ...
    def add_linear(
        self, ops: Sequence[tuple[int, int, int, int, int]], samples: bool, has_gelu: bool = False, sites: Sequence[int] = ()
    ) -> None: ...
    def add_heads(
        self, *, weight: int, activation: int, out: int, num_heads: int, x_columns: int, out_columns: int, samples: bool
    ) -> None: ...
    def add_gated(
        self,
        gate: int,
        up: int,
        activation: int,
        out: int,
        kind: int,
        samples: bool,
        gate_site: int = -1,
        up_site: int = -1,
    ) -> None: ...
    def enable_adapters(self, max_rank: int) -> None: ...
    def add_adapter_site(self, matrix: int, order: int, samples: bool, slot: int) -> int: ...
    def add_embedding_site(self, width: int, vocab_size: int) -> int: ...
    @property
    def adapter_format(self) -> AdapterFormat: ...
    def place_adapter(self, number: int, image: AdapterImage, blocks: Sequence[int]) -> None: ...
    def drop_adapter(self, number: int) -> None: ...
    def add_attention(
        self,
        q: int,
        out: int,
        layer: int,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: int = -1,
        of_samples: bool = False,
        samples: bool = False,
    ) -> None: ...
    def add_text_attention(
        self,
        *,
        q: int,
        k: int,
        v: int,
        out: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        is_causal: bool,
        window: int,
        distances: int,
        num_distances: int,
        relative: tuple[int, int, int, int, int] = (-1, -1, -1, 0, 0),
        sinks: int = -1,
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def kv_memory(self) -> NDArray[np.uint8]: ...
    def read_block(self, block: int, out: NDArray[np.uint8]) -> None: ...
    def write_block(self, block: int, content: NDArray[np.uint8]) -> None: ...
    def add_causal_conv(self, *, x: int, out: int, weight: int, bias: int, taps: int, width: int, first_line: int) -> None: ...
    def define_linear_attention(
        self,
        *,
        x: int,
        steps: int,
        gates: int,
        out: int,
        prepared: int,
        step_bias: int,
        decay: int,
        skip: int,
        num_heads: int,
        num_key_heads: int,
        key_dim: int,
        value_dim: int,
        q_at: int,
        k_at: int,
        v_at: int,
        scale: float,
        q_factor: int,
        k_factor: int,
        min_step: float,
        max_step: float,
        first_line: int,
        is_tiled: bool,
    ) -> int: ...
    def add_linear_attention(self, id: int) -> None: ...
    def add_experts(
        self,
        *,
        num_experts: int,
        num_chosen: int,
        width: int,
        x: int,
        input: int,
        router: int,
        router_bias: int,
        selection_bias: int,
        inner: int,
        outer: int,
        inner_bias: int,
        outer_bias: int,
        activation: int,
        is_sigmoid: bool,
        is_renormalised: bool,
        share_factor: float,
        share_scale: int,
        samples: bool,
        num_groups: int = 0,
        num_chosen_groups: int = 0,
        num_group_scores: int = 1,
    ) -> int: ...
    def settle(self) -> None: ...
    def use_small_pages(self) -> None: ...
    @property
    def small_page_bytes(self) -> int: ...
    def set_logits(self, buffer: int, scale: float = 1.0, cap: float = 0.0) -> None: ...
    def name_logits(self, tokens: NDArray[np.int32]) -> None: ...
    def set_states(self, buffer: int, per_sample: bool) -> None: ...
    def poison_buffers(self) -> None: ...
    def set_sampling(self, slot: int, sampling: RowSampling) -> None: ...
    def logits_step(
        self,
        row_slots: I32,
        query_start_loc: I32,
        context_lens: I32,
        token_ids: I32,
        positions: I32,
        slot_mapping: NDArray[np.int64],
        block_tables: I32,
        logit_tokens: I32,
        out: NDArray[np.float32],
        adapter: int = 0,
        state_blocks: NDArray[np.int32] | None = None,
    ) -> None: ...
    def logprobs(self, index: int) -> tuple[int, float, int, list[tuple[int, float]]]: ...
    def copy_block(self, source: int, destination: int, /) -> None: ...
    def use_all_members(self) -> None: ...
    def poison_block(self, block: int, first: int = 0) -> None: ...
    def poison_state(self, block: int) -> None: ...
    def times(self) -> tuple[int, int, int, int]: ...
    @property
    def is_computing(self) -> bool: ...
    def abandon_step(self) -> None: ...
    @property
    def waited_ns(self) -> int: ...
    @property
    def variant(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_members(self) -> int: ...
    @property
    def num_strands(self) -> int: ...
    @property
    def stages(self) -> list[tuple[int, str, int, int, int, int]]: ...
    def fetched_blocks(self, strand: int, layer: int) -> list[int]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def experts_bytes(self) -> int: ...
    @property
    def num_state_blocks(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...

class RowTable:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        vocab_size: int,
        window: int,
        is_one_pass: bool = False,
        max_scored: int = 0,
        num_state_blocks: int = 0,
    ) -> None: ...
    def release(self, request_id: str) -> None: ...
    def admit(self, row: AdmitRow) -> int: ...
    def plan(
        self, rows: tuple[RowPlan, ...], saves: tuple[StateSave, ...] = (), guesses: Mapping[str, tuple[int, ...]] = {}
    ) -> None: ...
    def begin(self, engine: Engine) -> None: ...
    def restrict(self, engine: Engine, masks: dict[str, bytes]) -> None: ...
    def run(self, engine: Engine) -> tuple[dict[str, tuple[int, ...]], list[str]]: ...
    def read(self, engine: Engine) -> tuple[dict[str, bytes], list[str]]: ...
    def sampled(self) -> list[str]: ...
    def sampled_logits(self) -> list[tuple[int, int]]: ...
    def scored(self) -> list[tuple[str, int, int]]: ...
    def arrays(self) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int], list[int], list[int]]: ...
    def append(self, tokens: Sequence[int]) -> None: ...
