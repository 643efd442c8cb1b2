"""Mixtures of experts on the device against the reference interpreter, for every layout of weights, router and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.experts import Mixture, Scratch
from penstock.backends.cuda.kernels.experts import sort_by_expert
from penstock.backends.cuda.supported import ACTIVATIONS
from penstock.backends.reference.interpreter import Interpreter, RowRun
from penstock.backends.reference.kv_cache import KvCache
from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.program import Embed, Experts, GatherRows, KvShape, Logits, Program, States
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Activation
from support.backends.cuda.float8_weights import float8_blocks, float8_rows, rounded
from support.backends.cuda.twins import compile_program
from support.backends.cuda.weights import quantised
from support.interpreted import DEVICE

F32 = NDArray[np.float32]
NUM_IDS = 40
ODD = Experts("y", "x", "r", "g", "u", "d", num_experts=7, num_experts_per_token=3, intermediate_size=40, activation="silu")
EVEN = replace(ODD, num_experts=6, num_experts_per_token=2, intermediate_size=96)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def floats(rng: np.random.Generator, rows: int, cols: int, size: float = 0.3) -> WeightTensor:
    values = (size * rng.standard_normal((rows, cols))).astype(np.float32)
    return WeightTensor("w", rows, cols, WeightFormat.F32, values)


def matrix(kind: str, rows: int, cols: int, seed: int) -> WeightTensor:
    """One of small numbers: `kind` is a format, or fp8 with scales of rows or of blocks."""
    if kind == "fp8 rows":
        return float8_rows(rows, cols, seed)
    if kind == "fp8 blocks":
        return float8_blocks(rows, cols, 16, 32, seed)
    if kind == "F32":
        return floats(np.random.default_rng(seed), rows, cols)
    fmt = WeightFormat[kind]
    return quantised(fmt, rows, cols // BLOCKS[fmt][0], seed)


@dataclass
class Layer:
    """Experts alone; every token id has an input of its own."""

    op: Experts
    hidden: int
    kinds: tuple[str, str, str] = ("F32", "F32", "F32")
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        op, rng = self.op, np.random.default_rng(3)
        inner = op.num_experts * op.intermediate_size
        self.weights = {
            "embed": floats(rng, NUM_IDS, self.hidden, size=1.0),
            "r": floats(rng, op.num_experts, self.hidden),
            "g": matrix(self.kinds[0], inner, self.hidden, 4),
            "u": matrix(self.kinds[1], inner, self.hidden, 5),
            "d": matrix(self.kinds[2], op.num_experts * self.hidden, op.intermediate_size, 6),
            **{name: floats(rng, 1, op.num_experts) for name in ("s", "rb")},
            **{name: floats(rng, op.num_experts, op.intermediate_size) for name in ("gb", "ub")},
            "db": floats(rng, op.num_experts, self.hidden),
        }

    def values(self, name: str) -> F32:
        """The numbers of a weight of floats, to be changed."""
        stored = self.weights[name].stored
        assert isinstance(stored, np.ndarray)
        return stored

    @property
    def program(self) -> Program:
        ops = (Embed("x", "embed"), self.op, GatherRows("p", "y"), States("p"))
        return Program(ops, tuple((name, self.hidden) for name in "xyp"), (KvShape(1, 16),), NUM_IDS)

    def expected(self, ids: range) -> F32:
        """The reference's result. [ids, hidden]"""
        cache = KvCache(shapes=(KvShape(1, 16),), num_blocks=2, block_size=16, dtype=KvDtype.BF16)
        each = np.arange(len(ids))
        row = RowRun(cache, np.array(ids, np.int32), 0, each, np.ones(1, np.int32), each)
        return Interpreter(self.program, self.weights).run(row)

    def mixture(self, *, deterministic: bool = False, round_to_fp8: bool = False) -> Mixture:
        scratch = Scratch.allocate(self.op, self.hidden, NUM_IDS, self.dtype, torch.device(DEVICE))
        for part in (scratch.shares, scratch.inner, scratch.outer):
            part.fill_(torch.nan)
        device = torch.device(DEVICE)
        modes = {"deterministic": deterministic, "round_to_fp8": round_to_fp8}
        return Mixture(self.op, self.weights.__getitem__, scratch, self.dtype, device, **modes)

    def run(self, mixture: Mixture, ids: range) -> F32:
        """The result, in place of the input, which lies in wider rows. [ids, hidden]"""
        wide = torch.full((len(ids), self.hidden + 8), torch.nan, dtype=self.dtype, device=DEVICE)
        x = wide[:, : self.hidden]
        x.copy_(torch.from_numpy(self.values("embed")[ids.start : ids.stop]))
        mixture(x, x)
        assert wide[:, self.hidden :].isnan().all()
        return x.float().cpu().numpy()


LAYOUTS = {
    "odd floats": (ODD, 72, ("F32", "F32", "F32")),
    "4 and 8 bits": (EVEN, 64, ("Q4_0", "Q8_0", "Q4_1")),
    "more rows than a tile has": (replace(EVEN, num_experts=3, intermediate_size=160), 32, ("Q5_1", "F32", "Q4_1")),
    "groups of 16": (replace(EVEN, num_experts=3, intermediate_size=256), 256, ("Q6_K", "Q2_K", "Q3_K")),
    "fp8": (EVEN, 64, ("fp8 rows", "fp8 blocks", "fp8 rows")),
    "one of one": (replace(ODD, num_experts=1, num_experts_per_token=1), 24, ("F32", "F32", "F32")),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_are_those_of_the_reference(name: str, deterministic: bool) -> None:
    """One token, fewer pairs than there are experts, and a prompt."""
    layer = Layer(*LAYOUTS[name])
    mixture = layer.mixture(deterministic=deterministic)
    for ids in (range(1), range(2), range(NUM_IDS)):
        np.testing.assert_allclose(layer.run(mixture, ids), layer.expected(ids), **CLOSE)
    assert mixture.num_bytes > 0
    assert layer.run(mixture, range(0)).shape == (0, layer.hidden)


@pytest.mark.parametrize(("name", "dtype"), [("odd floats", torch.bfloat16), ("4 and 8 bits", torch.float16)])
def test_half_precision_is_close(name: str, dtype: torch.dtype) -> None:
    """Inputs are exact, as the router would choose other experts for rounded ones. The interpreter unpacks nothing to bf16."""
    op, hidden, kinds = LAYOUTS[name]
    layer = Layer(replace(op, gate_bias="gb", up_bias="ub", down_bias="db"), hidden, kinds, dtype)
    inputs = layer.values("embed")
    inputs[:] = torch.from_numpy(inputs).to(dtype).float().numpy()
    found, wanted = layer.run(layer.mixture(), range(12)), layer.expected(range(12))
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


ROUTERS: dict[str, dict[str, Any]] = {
    "all of a softmax": {"is_renormalised": False, "share_factor": 2.5},
    "sigmoid": {"scoring": "sigmoid", "selection_bias": "s"},
    "sigmoid as it is": {"scoring": "sigmoid", "is_renormalised": False, "router_bias": "rb"},
    "softmax with biases": {"selection_bias": "s", "router_bias": "rb"},
    "biases": {"gate_bias": "gb", "up_bias": "ub", "down_bias": "db"},
    "every expert": {"num_experts_per_token": 7},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_every_kind_of_router_and_every_bias(name: str) -> None:
    layer = Layer(replace(ODD, **ROUTERS[name]), 72)
    found = layer.run(layer.mixture(), range(9))
    np.testing.assert_allclose(found, layer.expected(range(9)), **CLOSE)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation(kind: Activation) -> None:
    layer = Layer(replace(ODD, activation=kind, gate_bias="gb", up_bias="ub", down_bias="db"), 72)
    layer.values("embed")[:] *= 2  # some products are cut by `swiglu_clamped`
    np.testing.assert_allclose(layer.run(layer.mixture(), range(9)), layer.expected(range(9)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("favoured", [0, 4, 6])
def test_all_rows_go_to_one_expert_and_none_to_the_others(favoured: int) -> None:
    layer = Layer(replace(ODD, num_experts_per_token=1, router_bias="rb"), 72)
    layer.values("rb")[0, favoured] = 1000
    np.testing.assert_allclose(layer.run(layer.mixture(), range(NUM_IDS)), layer.expected(range(NUM_IDS)), **CLOSE)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    layer = Layer(ODD, 72)
    layer.values("r")[:] = 0
    np.testing.assert_allclose(layer.run(layer.mixture(), range(5)), layer.expected(range(5)), **CLOSE)


@pytest.mark.parametrize("name", ["odd floats", "4 and 8 bits"])
def test_a_rows_bits_do_not_depend_on_the_batch(name: str) -> None:
    layer = Layer(*LAYOUTS[name])
    mixture = layer.mixture(deterministic=True)
    together = layer.run(mixture, range(NUM_IDS))
    for ids in (range(1), range(NUM_IDS - 1, NUM_IDS), range(5, 39)):
        assert np.array_equal(layer.run(mixture, ids), together[ids.start : ids.stop])


def test_a_broken_row_breaks_no_other() -> None:
    layer = Layer(ODD, 72)
    whole = layer.run(layer.mixture(deterministic=True), range(12))
    for broken in (np.nan, np.inf):
        layer.values("embed")[7, 3] = broken
        with np.errstate(invalid="ignore"):
            found = layer.run(layer.mixture(deterministic=True), range(12))
        assert not np.isfinite(found[7]).any()
        assert np.array_equal(np.delete(found, 7, axis=0), np.delete(whole, 7, axis=0))


def test_matrices_of_experts_are_rounded_to_fp8_and_the_router_is_not() -> None:
    layer = Layer(ODD, 72)
    found = layer.run(layer.mixture(round_to_fp8=True), range(9))
    plain = layer.expected(range(9))
    layer.weights |= {name: rounded(layer.weights[name]) for name in "gud"}
    np.testing.assert_allclose(found, layer.expected(range(9)), **CLOSE)
    assert np.abs(found - plain).max() > 10 * CLOSE["atol"]


@pytest.mark.parametrize("num_pairs", [1, 5, 2500])
def test_pairs_are_sorted_by_expert(num_pairs: int) -> None:
    """More than a program looks at together are sorted, too; the third expert has none."""
    chosen = np.random.default_rng(0).integers(0, 6, num_pairs).astype(np.int32)
    chosen[chosen == 2] = 3
    order, starts = (torch.full((size,), -1, dtype=torch.int32, device=DEVICE) for size in (num_pairs, 7))
    sort_by_expert(order, starts, torch.from_numpy(chosen).to(DEVICE))
    assert np.array_equal(order.cpu().numpy(), np.argsort(chosen, kind="stable"))
    assert np.array_equal(starts.cpu().numpy(), np.searchsorted(np.sort(chosen), np.arange(7)))


def test_matrices_of_experts_in_act_order_are_refused() -> None:
    layer = Layer(ODD, 72)
    ops = (*layer.program.ops[:-1], Logits("logits", "p", "embed"))
    program = replace(layer.program, ops=ops, buffers=(*layer.program.buffers, ("logits", NUM_IDS)))
    compile_program(program, layer.weights)
    ordered = replace(layer.weights["u"], column_order=np.arange(72)[::-1])
    with pytest.raises(ModelError, match="act-order"):
        compile_program(program, layer.weights | {"u": ordered})
