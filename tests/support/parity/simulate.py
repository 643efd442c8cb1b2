"""Owns a simulation, in torch, of the arithmetic that a backend may choose: int8 inputs of every Linear, a bfloat16 cache.

`measure_noise.py` measures with it how far such arithmetic moves the margins between tokens, which is what the threshold
of a clear step in `compare.py` rests on. It simulates no kernel of ours in particular.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_BF16_CACHE = "eager_bf16_cache"


def fake_int8(values: torch.Tensor, group_size: int, stretch: float = 1.0) -> torch.Tensor:
    """Values rounded to 255 symmetric steps of their group's largest magnitude, a group being consecutive columns.

    The steps are `stretch` times as wide as they need to be: slightly above 1, it rounds as well but otherwise.
    """
    groups = values.reshape(*values.shape[:-1], -1, group_size)
    scales = (groups.abs().amax(-1, keepdim=True) / 127 * stretch).clamp_min(torch.finfo(values.dtype).tiny)
    return ((groups / scales).round() * scales).reshape(values.shape)


def _attend_to_bf16(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    """Calls the eager attention of the model's own file: only that has what the model adds, as caps and sinks."""
    key, value = key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, *rest, **options)


class _Bf16Cache(DynamicCache):
    """A cache that rounds what it is given."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), *rest, **options)


@contextmanager
def bf16_cache(model: PreTrainedModel) -> Iterator[None]:
    """Keys and values are rounded to bfloat16 before they are attended to, as a bfloat16 cache does.

    So are the inputs of LFM2's convolutions, of which the KV blocks hold the last ones, and the latents of latent attention.
    """
    has_latents = getattr(model.config, "kv_lora_rank", None) is not None
    if has_latents or not model._can_set_attn_implementation():  # Falcon has no other attention than its own
        name = "cache" if has_latents else "past_key_values"
        hook = model.register_forward_pre_hook(
            lambda _, args, named: (args, {**named, name: _Bf16Cache(config=model.config)}), with_kwargs=True
        )
        try:
            yield
        finally:
            hook.remove()
        return
    AttentionInterface.register(_BF16_CACHE, _attend_to_bf16)
    AttentionMaskInterface.register(_BF16_CACHE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.set_attn_implementation(_BF16_CACHE)
    file: Any = sys.modules[type(model).__module__]
    convolve = getattr(file, "causal_conv1d_fn", None) if ".lfm2" in file.__name__ else None
    if convolve is not None:
        file.causal_conv1d_fn = lambda v, *rest, **options: convolve(v.bfloat16().to(v.dtype), *rest, **options)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if convolve is not None:
            file.causal_conv1d_fn = convolve


@contextmanager
def int8_inputs(model: PreTrainedModel, group_size: int, stretch: float = 1.0) -> Iterator[None]:
    """The inputs of every Linear, the output matrix included, pass through `fake_int8`."""
    handles = [
        module.register_forward_pre_hook(lambda _, args: (fake_int8(args[0], group_size, stretch),))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
