"""Rotary frequencies and their scalings, against formulas written out independently."""

from __future__ import annotations

import math

import pytest

from penstock.models import rope


def test_frequencies_fall_geometrically_from_one():
    freqs = rope.inverse_frequencies(8, 10000.0)
    assert freqs == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_linear_scaling_slows_every_pair():
    assert rope.scale_linear((1.0, 0.5), 4.0) == (0.25, 0.125)


def test_divisors_apply_pair_by_pair():
    assert rope.divide((1.0, 0.5), (1.0, 8.0)) == (1.0, 0.0625)


def test_divisors_must_match_the_pairs():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        rope.divide((1.0, 0.5), (1.0,))


def llama3(freq: float, factor: float, low: float, high: float, context: int) -> float:
    """As the reference code of Llama 3.1 puts it, in wavelengths."""
    wavelength = 2 * math.pi / freq
    if wavelength < context / high:
        return freq
    if wavelength > context / low:
        return freq / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    freqs = rope.inverse_frequencies(128, 500000.0)
    scaled = rope.scale_llama3(freqs, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert scaled == pytest.approx([llama3(freq, 8.0, 1.0, 4.0, 8192) for freq in freqs])
    assert scaled[0] == freqs[0]
    assert scaled[-1] == freqs[-1] / 8.0
    blended = [idx for idx, (a, b) in enumerate(zip(freqs, scaled, strict=True)) if a / 8.0 < b < a]
    assert blended
