"""The server that a config would make on a machine that need not be here: its memory and its capacity. No weight is read, no
kernel runs. Called by `cli.plan`, so that a plan says what the server would do; the decisions are those of `sizing`.

A GPU's steps are measured at a start (`backends.cuda.memory`). Here they are assumed to take `ASSUMED_GPU_STEP_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.deploy import device
from penstock.deploy.executor import check_weight_dtype
from penstock.deploy.experts import check_experts, disk_bytes
from penstock.deploy.sizing import KvPlan, plan_gpu_kv, plan_kv
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ModelSpec
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.models.catalog import ModelSource
    from penstock.models.weights import LoadedModel

ASSUMED_GPU_STEP_BYTES = 2 << 30
"""Activations of the largest step, graphs, kernels and workspaces of libraries."""
ASSUMED_SYSTEM_BYTES = 1 << 30
"""Memory of a machine from the table that its system and other processes take."""
ASSUMED_BYTES_PER_PARAMETER = 2
"""For a directory that has a config.json and no weights: bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's description, and what its weights take in the memory of a backend."""

    name: str
    spec: ModelSpec
    num_weight_bytes: int
    num_disk_bytes: int
    """Those of them that lie in a file: experts with --experts-on-disk."""
    num_read_bytes: int
    """Weights that a step reads: without an embedding of which it looks up rows."""
    is_quantised: bool
    """Most bytes of its products are of weights with 8 bits or less."""
    is_assumed: bool
    """There are no weights: they are assumed to be bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    config: Config
    """With the device and the backend decided."""
    outline: Outline
    kv_dtype: KvDtype
    kv: KvPlan

    @property
    def capacity(self) -> Capacity:
        return self.kv.capacity


def forecast(config: Config, outline: Outline, *, is_gpu: bool, memory_bytes: int) -> Forecast:
    """The memory plan of a server for a model, on a machine with so many free bytes, or a GPU of that size.

    Raises ConfigError as a start would.
    """
    config = device.settled_elsewhere(config, is_gpu=is_gpu)
    device.check_block_size(config)
    dtype = device.kv_dtype(config)
    if is_gpu:
        from penstock.backends.cuda.memory import Usage

        used_bytes = outline.num_weight_bytes + ASSUMED_GPU_STEP_BYTES
        kv = plan_gpu_kv(
            outline.spec,
            config.kv,
            max_model_len=config.model.max_model_len,
            max_num_seqs=device.max_rows(config),
            max_step_tokens=device.max_step_tokens(config),
            block_bytes=outline.spec.block_bytes(dtype, config.kv.block_size),
            memory=Usage(total_bytes=memory_bytes, free_bytes=memory_bytes, used_bytes=used_bytes),
        )
    else:
        kv = plan_kv(
            outline.spec,
            config.kv,
            dtype=dtype,
            max_model_len=config.model.max_model_len,
            max_num_seqs=device.max_rows(config),
            max_step_tokens=device.max_step_tokens(config),
            num_weight_bytes=outline.num_weight_bytes - outline.num_disk_bytes,
            window=device.kv_window(config, outline.spec),
            available_bytes=memory_bytes,
        )
    return Forecast(config=config, outline=outline, kv_dtype=dtype, kv=kv)


def read_outline(config: Config, source: ModelSource, *, is_gpu: bool) -> Outline:
    """The model of a source, from its headers. Raises ModelError as `load_model` does, and ConfigError as a start would."""
    from penstock.models.catalog import SourceKind
    from penstock.models.load import load_model

    if source.kind is SourceKind.DIRECTORY and source.is_present and not any(source.path.glob("*.safetensors")):
        from penstock.models.hf import read_hf_spec

        if config.model.experts_on_disk:
            raise ConfigError(
                f"experts_on_disk is set, and there are no weights of {source.name}.",
                remedy="Leave out --experts-on-disk, or fetch them.",
            )
        return _assumed_outline(source.name, read_hf_spec(source.path))
    settled = device.settled_elsewhere(config, is_gpu=is_gpu)
    model = load_model(source, floats=device.held_floats(settled))
    check_experts(settled, model)
    check_weight_dtype(settled, model)
    return outline_of(config, model, is_gpu=is_gpu)


def outline_of(config: Config, model: LoadedModel, *, is_gpu: bool) -> Outline:
    """The same of a model that is loaded, which reads no weight either."""
    held = _held_bytes(device.settled_elsewhere(config, is_gpu=is_gpu), model)
    read_bytes = sum(held.values()) - (0 if model.spec.tie_word_embeddings else held["embed"])
    return Outline(
        name=model.name,
        spec=model.spec,
        num_weight_bytes=sum(held.values()) if is_gpu else model.num_weight_bytes,
        num_disk_bytes=0 if is_gpu else disk_bytes(config, model),
        num_read_bytes=read_bytes,
        is_quantised=_is_quantised(model),
        is_assumed=False,
    )


def _held_bytes(config: Config, model: LoadedModel) -> Mapping[str, int]:
    """Bytes of each weight in the memory of the backend, by name."""
    from penstock.models.formats import held_bytes
    from penstock.models.weights import held_floats

    floats = device.held_floats(config)
    return {
        name: held_bytes(tensor.format, tensor.num_rows, tensor.num_cols, held_floats(name, floats))
        for name, tensor in model.weights.items()
    }


def _is_quantised(model: LoadedModel) -> bool:
    from penstock.models.formats import BLOCKS

    matrices = [tensor for name, tensor in model.weights.items() if tensor.num_rows > 1 and name not in ("embed", "output")]
    return 2 * sum(one.num_bytes for one in matrices if one.format in BLOCKS) > sum(one.num_bytes for one in matrices)


def _assumed_outline(name: str, spec: ModelSpec) -> Outline:
    from penstock.models.architectures import describe
    from penstock.models.checks import weight_shapes

    sizes = {weight: rows * cols for weight, (rows, cols) in weight_shapes(describe(spec)).items()}
    num_bytes = ASSUMED_BYTES_PER_PARAMETER * sum(sizes.values())
    embedding = 0 if spec.tie_word_embeddings else ASSUMED_BYTES_PER_PARAMETER * sizes["embed"]
    return Outline(
        name=name,
        spec=spec,
        num_weight_bytes=num_bytes,
        num_disk_bytes=0,
        num_read_bytes=num_bytes - embedding,
        is_quantised=False,
        is_assumed=True,
    )
