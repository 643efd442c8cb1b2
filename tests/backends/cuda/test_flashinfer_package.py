"""The real FlashInfer has what we call, by the names that we give, and so has the stand-in that tests compute with."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.attention import AttentionShape, RowLens
from penstock.backends.cuda.flashinfer_attention import VERSIONS, FlashInferAttention, import_package, is_installed
from penstock.backends.cuda.kv_cache import KvLayer
from penstock.backends.cuda.step import StepTensors
from penstock.backends.cuda.stream import open_stream
from support.backends.cuda import fake_flashinfer
from support.interpreted import HAS_DEVICE

WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
HEADS = ("num_qo_heads", "num_kv_heads")
PLANNED = {"sm_scale", "q_data_type", "kv_data_type", "seq_lens"}
POSITIONAL = {
    "BatchDecodeWithPagedKVCacheWrapper": ["indptr", "indices", "last_page_len", *HEADS, "head_dim", "page_size"],
    "BatchPrefillWithPagedKVCacheWrapper": [
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", *HEADS, "head_dim_qk", "page_size")
    ],
}
"""Arguments of `plan` that we give in this order."""


@pytest.fixture(scope="module", params=["real", "stand-in"])
def package(request: pytest.FixtureRequest) -> Any:
    if request.param == "stand-in":
        return fake_flashinfer
    if not is_installed():
        pytest.skip("the package flashinfer-python is not installed")
    found = import_package()
    assert not isinstance(found, str), found
    return found


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_we_call_is_there(name: str, package: Any) -> None:
    wrapper = getattr(package, name)
    made = names(wrapper.__init__)
    assert made[:2] == ["float_workspace_buffer", "kv_layout"]
    assert names(wrapper.plan)[: len(POSITIONAL[name])] == POSITIONAL[name]
    assert names(wrapper.run)[:2] == ["q", "paged_kv_cache"]
    assert inspect.signature(wrapper.run).parameters["out"].kind is not inspect.Parameter.POSITIONAL_ONLY
    assert names(wrapper.reset_workspace_buffer) == ["float_workspace_buffer", "int_workspace_buffer"]


def test_a_decode_takes_the_buffers_of_a_graph(package: Any) -> None:
    buffers = {f"paged_kv_{name}_buffer" for name in ("indptr", "indices", "last_page_len")}
    assert buffers | {"use_cuda_graph", "use_tensor_cores"} <= set(names(package.BatchDecodeWithPagedKVCacheWrapper.__init__))


def test_all_other_steps_have_kernels_of_a_name(package: Any) -> None:
    assert "backend" in names(package.BatchPrefillWithPagedKVCacheWrapper.__init__)


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_planned_has_its_name(name: str, package: Any) -> None:
    if package is fake_flashinfer:
        pytest.skip("it refuses names that it does not know")
    plan = getattr(package, name).plan
    parameters = inspect.signature(plan).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        assert [name for name in PLANNED if f"{name}:" not in plan.__doc__ and f"{name} :" not in plan.__doc__] == []
    else:
        assert set(parameters) >= PLANNED | {"causal"}


class Compiled:
    """In the place of FlashInfer's kernels, which a machine without a GPU can't have: what its Python gives them."""

    def __init__(self) -> None:
        self.planned: list[Any] = []
        self.given: list[Any] = []

    def plan(self, *args: Any) -> list[int]:
        self.planned = [arg.tolist() if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32 else arg for arg in args]
        return [1]

    def run(self, *args: Any) -> None:
        self.given = list(args)

    paged_run = run


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize(
    ("query_starts", "context_lens", "is_captured"),
    [([0, 1, 2, 3, 4], [20, 0, 31, 0], True), ([0, 3, 4], [5, 40], False), ([0, 1, 2], [15, 16], False)],
)
def test_its_python_takes_what_we_give(
    query_starts: list[int], context_lens: list[int], is_captured: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the package but its kernels, on tensors of the CPU: names, types, shapes and places, and no copy of the cache."""
    if HAS_DEVICE or not is_installed():
        pytest.skip("the package flashinfer-python is not installed" if not HAS_DEVICE else "there is a GPU to run it on")
    package, compiled, empty = import_package(), Compiled(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **rest: empty(*sizes, **rest))
    for module in (package.prefill, package.decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", lambda *_: compiled)
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(package.decode, "get_batch_decode_module", lambda *_: compiled)
    shape, device = AttentionShape(8, num_kv_heads, 64, 0.125), torch.device("cpu")
    attention = FlashInferAttention(
        package,
        shape,
        dtype=torch.bfloat16,
        block_size=16,
        max_rows=8,
        max_blocks=4,
        graph_rows=[4, 8],
        stream=open_stream(device, spins=True),
        device=device,
        backend="fa2",  # `auto` asks the device
    )
    num_rows, num_tokens = len(context_lens), query_starts[-1]
    step = StepTensors(*[empty(0)] * 6, empty(0), empty(0), num_tokens, num_rows, 0, 1, 64)
    step.block_tables = torch.arange(1, 1 + num_rows * 4, dtype=torch.int32).view(num_rows, 4)
    k, v = torch.zeros(2, 40, 16, num_kv_heads, 64, dtype=torch.bfloat16)
    q, out = torch.zeros(num_tokens, 600, dtype=torch.bfloat16)[:, :512], torch.zeros(num_tokens, 512, dtype=torch.bfloat16)
    rows = RowLens(np.array(query_starts, np.int32), np.array(context_lens, np.int32))

    attention.plan(rows, is_captured=is_captured)
    attention.begin(step)
    attention.attend(out, q, KvLayer(k, v, None, None), step, shape)

    num_pages = -(-rows.seq_lens // 16)
    indptr = [0, *num_pages.cumsum().tolist()]
    on_tensor_cores = not is_captured or num_kv_heads == 2
    lists = [query_starts, indptr, rows.seq_lens.tolist()] if on_tensor_cores else [indptr]
    assert compiled.planned[3 : 3 + len(lists)] == lists
    pages = [page for row, count in enumerate(num_pages.tolist()) for page in step.block_tables[row, :count].tolist()]
    tensors = [arg for arg in compiled.given if isinstance(arg, torch.Tensor)]
    assert any(arg[: len(pages)].tolist() == pages for arg in tensors if arg.dtype == torch.int32)
    places = [arg.data_ptr() for arg in tensors]
    assert {x.data_ptr() for x in (q, k, v, out)} <= set(places)
    assert shape.scale in [arg for arg in compiled.given if isinstance(arg, float)]


def test_the_extra_asks_for_the_versions_that_are_used() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    extra = tomllib.loads(text)["project"]["optional-dependencies"]["flashinfer"]
    least, below = (".".join(map(str, bound)) for bound in VERSIONS)
    assert f"flashinfer-python>={least},<{below}" in extra
