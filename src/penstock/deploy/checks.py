"""Checks of settings, and of whether the chosen backend can compute a model. Used at a server's start and by forecasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends import native
from penstock.config import KvConfig
from penstock.deploy.blueprint import Compute
from penstock.models.program import KvShape
from penstock.types.errors import ConfigError
from penstock.types.model_spec import ShortConvSpec

if TYPE_CHECKING:
    from penstock.models.weights import LoadedModel


def check_block_size(compute: Compute) -> None:
    """Raise ConfigError for a block size that the native kernels can't divide into tiles."""
    size, tile = compute.block_size, native.KV_TILE
    if compute.is_native and size % tile:
        raise ConfigError(
            f"block_size {size} is not a multiple of {tile}: the native backend keeps keys in tiles of {tile} positions.",
            remedy=f"Set --block-size to {max(1, round(size / tile)) * tile}.",
        )


def check_model(compute: Compute, model: LoadedModel) -> None:
    """Raise ConfigError for a model that these settings can't compute, or that one of them would not change."""
    _check_head_dim(compute, model)
    check_state(compute, model)
    _check_weight_dtype(compute, model)


def _check_head_dim(compute: Compute, model: LoadedModel) -> None:
    """Raise ConfigError for attention heads that are too wide: the native kernels keep them on the stack."""
    head_dim = max((KvShape.of(attention).padded().head_dim for attention in model.spec.attentions), default=0)
    if compute.is_native and head_dim > native.LARGEST_HEAD_DIM:
        raise ConfigError(
            f"head_dim of {model.name} is {head_dim}, and the native backend takes up to {native.LARGEST_HEAD_DIM}.",
            remedy="Set --backend reference, which is slow, or take another model.",
        )


def check_state(compute: Compute, model: LoadedModel) -> None:
    """Raise ConfigError if KV blocks are too small for recurrent state, which is stored in each block."""
    needed = max((layer.mixer.kernel - 1 for layer in model.spec.layers if isinstance(layer.mixer, ShortConvSpec)), default=0)
    if compute.block_size < needed:
        raise ConfigError(
            f"block_size {compute.block_size} is too small for {model.name}: its state covers {needed} positions.",
            remedy=f"Set --block-size to {size}." if (size := -(-needed // 16) * 16) <= 256 else "Take another model.",
        )


def _check_weight_dtype(compute: Compute, model: LoadedModel) -> None:
    """Raise ConfigError if --weight-dtype would not change any weight."""
    from penstock.models.formats import BLOCKS, WeightFormat

    dtype = compute.options.weight_dtype
    if dtype is None:
        return
    if not compute.is_on_gpu and (model.encoder is None or not compute.is_native):
        raise ConfigError(
            f"weight_dtype is {dtype}: on the CPU it is for models that read texts, which the native backend computes.",
            remedy="Leave out --weight-dtype.",
        )
    quantised = {*BLOCKS, WeightFormat.F8_E4M3}
    if all(tensor.format in quantised for name, tensor in model.weights.items() if is_of_product(name, tensor.num_rows)):
        raise ConfigError(
            f"weight_dtype is {dtype}, and the weights of {model.name} are quantised already.",
            remedy="Leave out --weight-dtype, or take the model in 16 bits.",
        )


def is_of_product(weight: str, num_rows: int) -> bool:
    """Return whether a weight is a matrix that rows are multiplied with inside the layers."""
    return num_rows > 1 and weight not in ("embed", "output")


def check_cache(kv: KvConfig) -> None:
    if kv.prefix_sharing == "tenant" and not kv.prefix_caching:
        raise ConfigError(
            "prefix_sharing says who shares prefixes, and --no-prefix-caching keeps none.",
            remedy="Leave out --prefix-sharing or --no-prefix-caching.",
        )
    if kv.kv_disk_path is not None and not kv.kv_disk_size_bytes:
        raise ConfigError(
            f"kv_disk_path is {kv.kv_disk_path}, and kv_disk_size is 0: nothing would be written there.",
            remedy="Give --kv-disk-size, for example 10GiB, or leave out --kv-disk-path.",
        )
