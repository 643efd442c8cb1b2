"""Lowers a model's `Program` to a list of kernel launches. A step only launches kernels, so it can be a CUDA graph.

Linear operations with the same input become one product; rotations and the KV cache write become one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.backends.cuda.adapters import AdaptedProduct, AdapterFormat, AdapterScratch
from penstock.backends.cuda.attention import AttentionShape
from penstock.backends.cuda.buffers import Buffers, Rows, lie_side_by_side, together
from penstock.backends.cuda.experts import Mixture, Scratch
from penstock.backends.cuda.kernels import activation, dequantise, norm, rope_kv, texts
from penstock.backends.cuda.kernels.online_softmax import LOG2_E
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.linear import Linear as LinearProduct
from penstock.backends.cuda.linear import Workspace
from penstock.backends.cuda.patterns import Gather, gated_at, linear_run, normed_sum_at, written_keys_at
from penstock.backends.cuda.step import StepTensors
from penstock.backends.cuda.supported import REMEDY, check_program
from penstock.backends.cuda.triton_attention import TritonAttention
from penstock.backends.cuda.weights import Matrix, load_matrices, load_vector
from penstock.models.adapter import site_of
from penstock.models.program import (
    Act,
    Add,
    Attention,
    Embed,
    EmbedPositions,
    EmbedTypes,
    Experts,
    FirstRows,
    GatedActivation,
    GatherRows,
    KvWrite,
    LayerNorm,
    Linear,
    Logits,
    MeanRows,
    Op,
    Program,
    RMSNorm,
    Rope,
    Softcap,
    States,
    TextAttention,
)
from penstock.models.rope import key_centre
from penstock.models.weights import WeightTensor, weight_of
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype

Launch = Callable[[StepTensors], object]


class CompiledProgram:
    """A model's program and weights on the GPU. Raises `ModelError` if it is unsupported, or a weight is missing or damaged.

    All positions must be below `num_positions`. With `deterministic`, logits do not depend on the batch. `round_to_fp8` does
    not round embeddings and logits. Adapters need an `adapter_format`.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, WeightTensor],
        cache: PagedKvCache,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_tokens: int,
        max_samples: int,
        num_positions: int,
        round_to_fp8: bool = False,
        deterministic: bool = False,
        adapter_format: AdapterFormat | None = None,
    ) -> None:
        parts = (program, weights, cache, dtype, torch.device(device), _Limits(max_tokens, max_samples, num_positions))
        lowering = _Lowering(*parts, adapter_format, round_to_fp8=round_to_fp8, deterministic=deterministic)
        lowering.run()
        self._on_tokens = lowering.on_tokens
        self._on_samples = lowering.on_samples
        self.result: torch.Tensor = lowering.result
        """Memory for the output of `run` in the largest step. float32"""
        self.has_state_of_each_token = program.is_one_pass and not lowering.is_on_samples
        """Whether `run` returns a row per token instead of a row per sample."""
        self.attention: TritonAttention | None = lowering.attention
        """Our attention kernels, or None for programs that read texts."""
        self.attention_shapes: Sequence[AttentionShape] = lowering.attention_shapes
        """The distinct shapes of the program's attention."""
        self.weight_bytes: int = lowering.weight_bytes

    def run(self, step: StepTensors) -> torch.Tensor:
        """Queue a step. Return float32 logits [num_samples, vocab_size].

        An encoder returns states of samples or tokens, [., width]. Results are valid until the next step.
        """
        if (attention := step.attention or self.attention) is not None:
            attention.begin(step)
        for launch in self._on_tokens:
            launch(step)
        if step.num_samples:
            for launch in self._on_samples:
                launch(step)
        return self.result[: step.num_tokens if self.has_state_of_each_token else step.num_samples]


@dataclass(frozen=True, slots=True)
class _Limits:
    max_tokens: int
    max_samples: int
    num_positions: int


class _Lowering:
    def __init__(
        self,
        program: Program,
        weights: Mapping[str, WeightTensor],
        cache: PagedKvCache,
        dtype: torch.dtype,
        device: torch.device,
        limits: _Limits,
        adapter_format: AdapterFormat | None,
        *,
        round_to_fp8: bool,
        deterministic: bool,
    ) -> None:
        self._program = program
        self._ops = program.ops
        self._weights = weights
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._limits = limits
        self._round_to_fp8 = round_to_fp8
        self._deterministic = deterministic
        self._workspace = Workspace(device, dtype)
        self._adapters = None if adapter_format is None else AdapterScratch(adapter_format, cache, device)
        self.attention: TritonAttention | None = None
        self.attention_shapes: list[AttentionShape] = []
        self._products: list[LinearProduct] = []
        self._tables: dict[tuple[tuple[float, ...], float, float, int], torch.Tensor] = {}
        self._buffers = Buffers(program, dtype, device, max_tokens=limits.max_tokens, max_samples=limits.max_samples)
        self._scratches: dict[tuple[int, int, int, int], Scratch] = {}
        self._matrices: dict[tuple[str, ...], list[Matrix]] = {}
        """Loaded matrices by the names of their weights, because an embedding and the logits may share one."""
        self.is_on_samples = False
        self.on_tokens: list[Launch] = []
        self.on_samples: list[Launch] = []
        self.result = torch.empty(0, device=device)
        self.weight_bytes = 0

    def run(self) -> None:
        check_program(self._program)
        at = 0
        while at < len(self._ops):
            at += self._emit(at)
        for product in self._products:
            product.reserve(self._limits.max_tokens)
        self._workspace.allocate()
        if self._adapters is not None:
            self._adapters.allocate()

    def _emit(self, at: int) -> int:
        """Add launches for the operation at index `at` and those that fuse with it. Return how many operations."""
        op = self._ops[at]
        of_tokens = Embed | EmbedPositions | EmbedTypes | Rope | KvWrite | Attention | TextAttention
        if self.is_on_samples and isinstance(op, of_tokens):
            raise ModelError(f"the cuda backend can't compute {type(op).__name__} after GatherRows.", remedy=REMEDY)
        match op:
            case Linear():
                return self._emit_gated(at) or self._emit_normed_sum(at) or self._emit_linears(linear_run(self._ops, at))
            case Rope():
                return self._emit_written_keys(at) or self._emit_rope(op)
            case Logits():
                self._emit_logits(op)
            case States():
                self._emit_states(op)
            case GatherRows() | FirstRows() | MeanRows():
                self._emit_gather(op)
            case KvWrite():
                self._emit_kv_write(op)
            case Attention():
                self._emit_attention(op)
            case TextAttention():
                self._emit_text_attention(op)
            case Experts():
                self._emit_experts(op)
            case Embed():
                self._emit_embed(op)
            case EmbedPositions():
                self._emit_positions(op)
            case EmbedTypes():
                self._emit_types(op)
            case _:
                self._emit_row_op(op)
        return 1

    def _launch(self, launch: Launch) -> None:
        (self.on_samples if self.is_on_samples else self.on_tokens).append(launch)

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers.of(name, of_samples=self.is_on_samples)

    def _rows(self, name: str) -> Rows:
        return self._buffers.rows_of(self._buffer(name))

    def _count(self) -> Callable[[StepTensors], int]:
        return _num_samples if self.is_on_samples else _num_tokens

    # Operations

    def _emit_embed(self, op: Embed) -> None:
        out, matrix, scale = self._buffer(op.out), self._table_of_rows(op.weight), op.scale
        self._launch(lambda step: dequantise.look_up(out[: step.num_tokens], matrix, step.token_ids, scale))
        if (adapted := self._adapted([op], self._program.vocab_size)) is not None:
            self._launch(lambda step: adapted.look_up(step, out, scale))

    def _emit_positions(self, op: EmbedPositions) -> None:
        if (most := self._limits.num_positions) > op.num_positions:
            raise ModelError(
                f"texts of {most} tokens have more positions than the {op.num_positions} that were learned.",
                remedy=f"Set --max-model-len to {op.num_positions} or less.",
            )
        out, x, matrix, first = self._buffer(op.out), self._buffer(op.x), self._table_of_rows(op.weight), op.first

        def launch(step: StepTensors) -> None:
            row_ids = step.positions + first if first else step.positions
            dequantise.look_up(out[: step.num_tokens], matrix, row_ids, added=x[: step.num_tokens])

        self._launch(launch)

    def _emit_types(self, op: EmbedTypes) -> None:
        out, x, matrix, last = self._buffer(op.out), self._buffer(op.x), self._table_of_rows(op.weight), op.num_types - 1

        def launch(step: StepTensors) -> None:
            assert step.types is not None, "steps of texts have types"
            dequantise.look_up(out[: step.num_tokens], matrix, step.types.clamp(max=last), added=x[: step.num_tokens])

        self._launch(launch)

    def _emit_row_op(self, op: Op) -> None:
        count = self._count()
        match op:
            case RMSNorm(weight=str(name)):
                x, out, weight, eps, group = self._rows(op.x), self._rows(op.out), self._vector(name), op.eps, op.group
                self._launch(lambda step: norm.rms_norm(out(count(step)), x(count(step)), weight, eps, group))
            case LayerNorm():
                x, out, eps = self._rows(op.x), self._rows(op.out), op.eps
                weight, bias = self._vector(op.weight), None if op.bias is None else self._vector(op.bias)
                self._launch(lambda step: norm.layer_norm(out(count(step)), x(count(step)), weight, bias, eps))
            case GatedActivation():
                gate, up, out, kind = self._rows(op.gate), self._rows(op.up), self._rows(op.out), op.activation
                self._launch(lambda step: activation.gated(out(count(step)), gate(count(step)), up(count(step)), kind))
            case Act():
                x, out, kind = self._rows(op.x), self._rows(op.out), op.activation
                self._launch(lambda step: activation.act(out(count(step)), x(count(step)), kind))
            case Add():
                a, b, out, factor = self._rows(op.a), self._rows(op.b), self._rows(op.out), op.factor
                self._launch(lambda step: torch.add(a(count(step)), b(count(step)), alpha=factor, out=out(count(step))))
            case Softcap():
                x, cap = self._rows(op.x), op.cap
                self._launch(lambda step: activation.softcap(x(count(step)), cap))
            case _:
                raise AssertionError(f"{type(op).__name__} is in COMPUTED without a case")

    def _emit_gather(self, op: Gather) -> None:
        x, out = self._buffers.of(op.x, of_samples=False), self._buffers.of(op.out, of_samples=True)
        if not self._program.is_one_pass and not isinstance(op, GatherRows):
            raise ModelError(
                f"the cuda backend can't compute {type(op).__name__} of a program that reads a KV cache.", remedy=REMEDY
            )
        self.is_on_samples = True
        if isinstance(op, MeanRows):
            self._launch(lambda step: texts.mean_rows(out[: step.num_samples], x, step))
            return
        is_first = isinstance(op, FirstRows)

        def launch(step: StepTensors) -> None:
            tokens = step.sample_tokens
            if is_first:
                tokens = tokens - torch.index_select(step.positions, 0, tokens)
            torch.index_select(x[: step.num_tokens], 0, tokens, out=out[: step.num_samples])

        self._launch(launch)

    def _emit_linears(self, run: Sequence[Linear]) -> int:
        outs = [self._buffer(op.out) for op in run]
        x, count = self._buffer(run[0].x), self._count()
        if len(run) > 1 and not lie_side_by_side(outs):
            return sum(self._emit_linears([op]) for op in run)
        residual_rows = None if run[0].residual is None else self._rows(run[0].residual)
        if any(op.out == op.x for op in run):
            raise ModelError("the cuda backend can't put a product where its input is.", remedy=REMEDY)
        product = self._product(run)
        out = together(outs)
        out_rows, x_rows = self._buffers.rows_of(out), self._buffers.rows_of(x)

        def launch(step: StepTensors) -> None:
            n = count(step)
            product(out_rows(n), x_rows(n), None if residual_rows is None else residual_rows(n))

        self._launch(launch)
        if (adapted := self._adapted(run, x.shape[1])) is not None:
            self._launch(lambda step: adapted.add(step, out, x))
        return len(run)

    def _emit_gated(self, at: int) -> int:
        found = gated_at(self._ops, at)
        if found is None:
            return 0
        run, act = found
        gate, up, out, x = (self._buffer(name) for name in (act.gate, act.up, act.out, run[0].x))
        if not lie_side_by_side([gate, up]) or gate.shape != up.shape:
            return 0
        product, both, count, kind = self._product(run), together([gate, up]), self._count(), act.activation
        adapted = self._adapted(run, x.shape[1])
        out_rows, both_rows, x_rows = map(self._buffers.rows_of, (out, both, x))

        def launch(step: StepTensors) -> None:
            n = count(step)
            if adapted is None or adapted.rows_of(step) is None:
                product.and_gate(out_rows(n), both_rows(n), x_rows(n), kind)
            else:
                product(both_rows(n), x_rows(n))
                adapted.add(step, both, x)
                activation.gated(out_rows(n), gate[:n], up[:n], kind)

        self._launch(launch)
        return 3

    def _emit_normed_sum(self, at: int) -> int:
        found = normed_sum_at(self._ops, at)
        if found is None or found[0].residual is None:
            return 0
        op, norm_op = found
        assert norm_op.weight is not None, "`run` refuses norms without a weight"
        out, normed, x, residual = (self._buffer(name) for name in (op.out, norm_op.out, op.x, found[0].residual))
        product, weight, eps, count = self._product([op]), self._vector(norm_op.weight), norm_op.eps, self._count()
        adapted = self._adapted([op], x.shape[1])
        out_rows, normed_rows, x_rows, residual_rows = map(self._buffers.rows_of, (out, normed, x, residual))

        def launch(step: StepTensors) -> None:
            n = count(step)
            if adapted is None or adapted.rows_of(step) is None:
                product.and_norm(out_rows(n), normed_rows(n), x_rows(n), residual_rows(n), weight, eps)
            else:
                product(out_rows(n), x_rows(n), residual_rows(n))
                adapted.add(step, out, x)
                norm.rms_norm(normed_rows(n), out_rows(n), weight, eps)

        self._launch(launch)
        return 2

    def _adapted(self, ops: Sequence[Linear | Embed | Logits], num_cols: int) -> AdaptedProduct | None:
        if self._adapters is None:
            return None
        widths = [self._program.vocab_size if isinstance(op, Logits) else self._buffers.width(op.out) for op in ops]
        return AdaptedProduct(
            self._adapters,
            [(site_of(op), width) for op, width in zip(ops, widths, strict=True)],
            num_cols,
            max_rows=self._limits.max_samples if self.is_on_samples else self._limits.max_tokens,
            of_samples=self.is_on_samples,
            is_embedding=isinstance(ops[0], Embed),
        )

    def _product(self, run: Sequence[Linear]) -> LinearProduct:
        bias = None
        if any(op.bias is not None for op in run):
            bias = torch.cat([self._bias(op) for op in run])
        return self._new_product([op.weight for op in run], bias, round_to_fp8=self._round_to_fp8)

    def _new_product(self, names: Sequence[str], bias: torch.Tensor | None, *, round_to_fp8: bool = False) -> LinearProduct:
        matrices = self._matrices_of(*names, round_to_fp8=round_to_fp8)
        product = LinearProduct(matrices, bias, self._workspace, deterministic=self._deterministic)
        self._products.append(product)
        return product

    def _emit_experts(self, op: Experts) -> None:
        width, count = self._buffers.width(op.out), self._count()
        key = (op.num_experts, op.num_experts_per_token, op.intermediate_size, width)
        if key not in self._scratches:
            max_tokens = max(self._limits.max_tokens, self._limits.max_samples)
            self._scratches[key] = Scratch.allocate(op, width, max_tokens, self._dtype, self._device)
        modes = {"deterministic": self._deterministic, "round_to_fp8": self._round_to_fp8}
        mixture = Mixture(op, self._tensor_in_order, self._scratches[key], self._dtype, self._device, **modes)
        self.weight_bytes += mixture.num_bytes
        out_rows, x_rows = self._rows(op.out), self._rows(op.x)
        self._launch(lambda step: mixture(out_rows(count(step)), x_rows(count(step))))

    def _emit_logits(self, op: Logits) -> None:
        if not self.is_on_samples:
            raise ModelError("the cuda backend computes logits of gathered rows only.", remedy=REMEDY)
        x = self._buffer(op.x)
        product = self._new_product([op.weight], None)
        self.result = out = self._buffers.make_result(op.out, product.num_rows, of_samples=True)
        self._launch(lambda step: product(out[: step.num_samples], x[: step.num_samples]))
        if (adapted := self._adapted([op], x.shape[1])) is not None:
            self._launch(lambda step: adapted.add(step, out, x))
        if (scale := op.scale) != 1.0:
            self._launch(lambda step: out[: step.num_samples].mul_(scale))

    def _emit_states(self, op: States) -> None:
        x, count = self._buffer(op.x), self._count()
        self.result = out = self._buffers.make_result(f"states of {op.x}", x.shape[1], of_samples=self.is_on_samples)
        if op.is_normalised:
            self._launch(lambda step: norm.unit_rows(out[: count(step)], x[: count(step)]))
        else:
            self._launch(lambda step: out[: count(step)].copy_(x[: count(step)]))

    # Attention

    def _emit_text_attention(self, op: TextAttention) -> None:
        out, q, k, v = (self._rows(name) for name in (op.out, op.q, op.k, op.v))
        distances = None
        if op.distances is not None:
            biases = self._tensor_in_order(op.distances).dequantize() * np.float32(LOG2_E)
            distances = torch.from_numpy(biases).to(self._device)
            self.weight_bytes += distances.nbytes

        def launch(step: StepTensors) -> None:
            n = step.num_tokens
            texts.text_attention(out(n), q(n), k(n), v(n), step, op, distances)

        self._launch(launch)

    def _emit_rope(self, op: Rope) -> int:
        x, table, num_heads, head_dim = self._rows(op.x), self._rope_table(op), op.num_heads, op.head_dim
        self._launch(lambda step: rope_kv.rope(x(step.num_tokens), step.positions, table, num_heads, head_dim))
        return 1

    def _emit_written_keys(self, at: int) -> int:
        found = written_keys_at(self._ops, at)
        shape = self._program.kv_shapes[0]
        if found is None or (found[1].num_heads, found[1].head_dim) != (shape.num_kv_heads, shape.head_dim):
            return 0
        queries, _, write = found
        q, k, v = (self._rows(name) for name in (queries.x, write.k, write.v))
        layer, table, centre = self._cache.layer(write.layer), self._rope_table(queries), self._centre(write)
        num_heads = queries.num_heads

        def launch(step: StepTensors) -> None:
            n = step.num_tokens
            rope_kv.rope_q_k_and_write(
                q(n), k(n), v(n), layer, step, table, num_heads=num_heads, num_kv_heads=shape.num_kv_heads, centre=centre
            )

        self._launch(launch)
        return 3

    def _emit_kv_write(self, op: KvWrite) -> None:
        k, v, layer, centre = self._rows(op.k), self._rows(op.v), self._cache.layer(op.layer), self._centre(op)
        self._launch(
            lambda step: rope_kv.kv_write(k(step.num_tokens), v(step.num_tokens), layer, step.slot_mapping, centre=centre)
        )

    def _emit_attention(self, op: Attention) -> None:
        q, out, layer, shape = self._rows(op.q), self._rows(op.out), self._cache.layer(op.layer), AttentionShape.of(op)
        own = self._own_attention(shape)
        sinks = None if op.sinks is None else self._vector(op.sinks) * LOG2_E
        self._launch(
            lambda step: (step.attention or own).attend(out(step.num_tokens), q(step.num_tokens), layer, step, shape, sinks)
        )

    def _own_attention(self, shape: AttentionShape) -> TritonAttention:
        if shape not in self.attention_shapes:
            self.attention_shapes.append(shape)
        if self.attention is None:
            sizes = {"max_rows": self._limits.max_samples, "num_positions": self._limits.num_positions}
            self.attention = TritonAttention.allocate(shape, **sizes, device=self._device, deterministic=self._deterministic)
        return self.attention

    def _rope_table(self, op: Rope) -> torch.Tensor:
        if op.growth and 2 * len(op.inv_freq) < op.head_dim:
            raise ModelError("the cuda backend can't compute Rope.growth of columns that do not turn.", remedy=REMEDY)
        key = (op.inv_freq, op.attention_factor, op.growth, op.growth_len)
        if key not in self._tables:
            angles = op.inv_freq, op.attention_factor, self._limits.num_positions, self._device
            self._tables[key] = rope_kv.rope_table(*angles, growth=op.growth, growth_len=op.growth_len)
        return self._tables[key]

    def _centre(self, op: KvWrite) -> torch.Tensor | None:
        """Return the vector to subtract from keys before rounding them to int8, or None."""
        if op.bias is None or self._cache.kv_dtype is not KvDtype.INT8:
            return None
        bias = self._tensor(op.bias).dequantize().reshape(-1)
        return torch.from_numpy(key_centre(op, bias, self._program.kv_shapes[0].head_dim, self._limits.num_positions)).to(
            self._device
        )

    # Weights

    def _tensor(self, name: str) -> WeightTensor:
        return weight_of(self._weights, name)

    def _tensor_in_order(self, name: str) -> WeightTensor:
        tensor = self._tensor(name)
        if tensor.column_order is not None:
            raise ModelError(
                f"the columns of {name!r} are in another order (act-order), which is not supported for this matrix.",
                remedy="Use a checkpoint without act-order (desc_act), or the bf16 original.",
            )
        return tensor

    def _vector(self, name: str) -> torch.Tensor:
        return load_vector(self._tensor(name), torch.float32, self._device)

    def _bias(self, op: Linear) -> torch.Tensor:
        if op.bias is None:
            return torch.zeros(self._buffers.width(op.out), dtype=self._dtype, device=self._device)
        return load_vector(self._tensor(op.bias), self._dtype, self._device)

    def _table_of_rows(self, name: str) -> Matrix:
        self._tensor_in_order(name)  # refuses any other
        return self._matrices_of(name)[0]

    def _matrices_of(self, *names: str, round_to_fp8: bool = False) -> list[Matrix]:
        if names not in self._matrices:
            tensors = [self._tensor(name) for name in names]
            self._matrices[names] = load_matrices(tensors, self._dtype, self._device, round_to_fp8=round_to_fp8)
            self.weight_bytes += sum(matrix.num_bytes for matrix in self._matrices[names])
        return self._matrices[names]


def _num_tokens(step: StepTensors) -> int:
    return step.num_tokens


def _num_samples(step: StepTensors) -> int:
    return step.num_samples
