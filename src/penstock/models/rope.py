"""Rotary position embeddings: the frequencies of each kind of scaling, and `key_centre`, the part that all keys share.

Sources: RoFormer, arXiv 2104.09864; linear scaling, 2306.15595; YaRN and dynamic scaling, 2309.00071; LongRoPE, 2402.13753;
Llama 3.1's reference code; transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import KvWrite
from penstock.types.model_spec import ModelSpec, Rotation

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "ntk_alpha"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Settings of rotary positions for a type of layer. `kind` decides which fields are used."""

    kind: Kind = "default"
    theta: float = 10000.0
    dim: int  # columns of a head that rotate; even
    trained_len: int  # maximum context in tokens
    original_len: int = 1  # the same before its context was extended
    factor: float = 1.0
    attention_factor: float | None = None  # factor of cos and sin; None: computed
    attn_factor: float = 1.0  # multiplies YaRN's computed factor
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # YaRN's range is rounded to whole pairs
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()  # of the frequencies, for all kinds
    query_growth: float = 0.0


def frequencies(parameters: RopeParameters, head_dim: int, served_len: int) -> Rotation:
    """Return the rotary frequencies of heads of `head_dim` columns for texts of up to `served_len` tokens.

    Texts of different lengths share cached keys, so all get the frequencies of the longest.
    """
    rope, dim = parameters, parameters.dim
    inv_freq, attention_factor = inverse_frequencies(dim, rope.theta), 1.0
    match rope.kind:
        case "default":
            pass
        case "linear":
            inv_freq = _divided(inv_freq, (rope.factor,) * len(inv_freq))
        case "dynamic":
            length = max(served_len, rope.trained_len) / rope.trained_len
            stretch = rope.factor * length - (rope.factor - 1.0)
            inv_freq = inverse_frequencies(dim, rope.theta * stretch ** (dim / max(1, dim - 2)))
        case "ntk_alpha":
            inv_freq = inverse_frequencies(dim, rope.theta * rope.factor ** (dim / max(1, dim - 2)))
        case "llama3":
            inv_freq = tuple(_llama3(freq, rope) for freq in inv_freq)
        case "yarn":
            inv_freq, attention_factor = _yarn(inv_freq, rope), _yarn_attention_factor(rope) * rope.attn_factor
        case "longrope":
            inv_freq = _divided(inv_freq, rope.long_factor if served_len > rope.original_len else rope.short_factor)
            if rope.factor > 1.0 and rope.original_len > 1:
                attention_factor = math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_len))
        case "proportional":  # frequencies of the whole head; the slow ones are 0
            turning = inverse_frequencies(head_dim, rope.theta)[: dim // 2]
            inv_freq = (*_divided(turning, (rope.factor,) * len(turning)), *(0.0 for _ in range((head_dim - dim) // 2)))
    if rope.divisors:
        inv_freq = _divided(inv_freq, rope.divisors)
    return Rotation(
        inv_freq=inv_freq,
        attention_factor=attention_factor if rope.attention_factor is None else rope.attention_factor,
        query_growth=rope.query_growth,
        growth_len=rope.original_len if rope.query_growth else 1,
    )


def length_note(parameters: RopeParameters, served_len: int) -> str:
    """Say which frequencies all texts get; empty if they do not depend on the length."""
    if parameters.kind == "longrope":
        is_long, border = served_len > parameters.original_len, parameters.original_len
        if is_long:
            return f"LongRoPE's long factors are used for all texts; --max-model-len {border} or less selects the short ones"
        return f"LongRoPE's short factors are used for all texts; --max-model-len above {border} selects the long ones"
    if parameters.kind == "dynamic":
        trained_len, most = parameters.trained_len, stretched_len(parameters)
        if trained_len < served_len <= most:
            words = f"dynamic RoPE: all texts use the frequencies for {served_len} tokens"
            return f"{words}; --max-model-len {trained_len} or less keeps the trained ones"
        words = f"dynamic RoPE: frequencies as trained, for up to {trained_len} tokens"
        if most <= trained_len:
            return f"{words}; scaling by {parameters.factor:g} never acts"
        return f"{words}; --max-model-len up to {most} stretches them"
    return ""


def stretched_len(parameters: RopeParameters) -> int:
    """Return the tokens of the longest text that the frequencies can serve, or 0 for kinds that do not say so.

    YaRN by 4 is often added to a config.json that keeps its own length, as Qwen's model cards advise.
    """
    lengths = {"dynamic": parameters.trained_len, "yarn": parameters.original_len}
    return int(lengths.get(parameters.kind, 0) * parameters.factor)


def inverse_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """Return base ** (-2 i / dim) radians per position for each pair i."""
    return tuple(base ** (-2.0 * pair / dim) for pair in range(dim // 2))


def _divided(inv_freq: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(freq / factor for freq, factor in zip(inv_freq, factors, strict=True))


def _llama3(freq: float, rope: RopeParameters) -> float:
    turns = rope.original_len * freq / (2.0 * math.pi)
    if turns < rope.low_freq_factor:
        return freq / rope.factor
    if turns > rope.high_freq_factor:
        return freq
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1.0 - kept) * freq / rope.factor + kept * freq


def _yarn(inv_freq: Sequence[float], rope: RopeParameters) -> tuple[float, ...]:
    def pair_of(num_turns: float) -> float:
        return rope.dim * math.log(rope.original_len / (num_turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    stretched = [min(1.0, max(0.0, (pair - low) / (high - low))) for pair in range(len(inv_freq))]
    return tuple(freq * (1.0 - share) + freq / rope.factor * share for freq, share in zip(inv_freq, stretched, strict=True))


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def grown(multiplier: float) -> float:
        return 1.0 + 0.1 * multiplier * math.log(max(1.0, rope.factor))

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def half_split_rows(name: str, spec: ModelSpec) -> NDArray[np.intp] | None:
    """Return indices that put rows of q or k (columns of their biases) in half-split order; None for other weights.

    In the file, columns 2 i and 2 i + 1 of a head rotate as a pair; in half-split order, columns i and i + n / 2.
    """
    layer, _, kind = name.rpartition(".")
    if kind.removesuffix("_bias") not in ("q", "k"):
        return None
    attention = spec.layers[int(layer.rpartition(".")[2])].attention
    num_heads = attention.num_heads if kind[0] == "q" else attention.num_kv_heads
    head_dim = attention.head_dim
    num_turning = head_dim if attention.rotation is None else 2 * len(attention.rotation.inv_freq)
    columns = np.arange(head_dim)
    columns[:num_turning] = columns[:num_turning].reshape(-1, 2).T.reshape(-1)
    return (head_dim * np.arange(num_heads)[:, None] + columns).reshape(-1)


F32 = NDArray[np.float32]


def still_pairs(inv_freq: tuple[float, ...], num_positions: int) -> list[int]:
    """Return the indices of the pairs of columns that rotate by less than one radian over `num_positions`."""
    return [i for i, frequency in enumerate(inv_freq) if frequency * num_positions < 1]


def key_centre(op: KvWrite, bias: F32, head_dim: int, num_positions: int) -> F32:
    """Return a vector to subtract from every rotated key before it is stored. [num_kv_heads * head_dim]

    This removes the bias from stored keys: Qwen2.5's is too large for one int8 scale per 32 columns. The vector is the bias in
    columns that rotate by less than one radian over `num_positions`, where the position hardly changes it, and 0 elsewhere.
    Subtracting one vector from all keys adds the same number to all scores of a query, which softmax ignores.
    """
    heads = bias.reshape(-1, head_dim)
    half = len(op.inv_freq)
    pairs = still_pairs(op.inv_freq, num_positions)
    turning = pairs + [half + i for i in pairs]
    centre = np.zeros_like(heads)
    centre[:, turning] = heads[:, turning] * np.float32(op.attention_factor)
    centre[:, 2 * half :] = heads[:, 2 * half :]
    return centre.reshape(-1)
