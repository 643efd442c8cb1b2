"""The part that all keys share: taking it off changes no softmax, and leaves less of the bias in a key."""

from __future__ import annotations

import numpy as np

from penstock.models import architectures
from penstock.models.program import KvWrite
from penstock.models.rope import key_centre, still_pairs
from penstock.types.model_spec import spec_of_equal_layers

INV_FREQ = tuple(10_000.0 ** -(i / 8) for i in range(8))
SPEC = spec_of_equal_layers(
    architecture="qwen2",
    vocab_size=100,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=18,
    intermediate_size=40,
    norm_eps=1e-6,
    rope_inv_freq=INV_FREQ,
    rope_attention_factor=1.2,
    max_model_len=50,
    tie_word_embeddings=True,
    has_qkv_bias=True,
)


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    """Pairs (i, i + 8) of a head of 18 columns; the last two never turn."""
    angles = position * np.array(INV_FREQ)
    a, b = x[:8], x[8:16]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), x[16:]]
    ) * np.array([1.2] * 16 + [1.0] * 2)


def test_pairs_that_turn_by_less_than_a_radian():
    assert still_pairs(INV_FREQ, 50) == [4, 5, 6, 7]
    assert still_pairs(INV_FREQ, 1) == [1, 2, 3, 4, 5, 6, 7]


def test_only_keys_with_a_bias_are_centred():
    writes = [op for op in architectures.describe(SPEC).ops if isinstance(op, KvWrite)]
    assert [op.bias for op in writes] == ["layers.0.k_bias", "layers.1.k_bias"]
    assert writes[0].inv_freq == INV_FREQ
    assert writes[0].attention_factor == 1.2


def test_softmax_does_not_see_it_and_less_of_the_bias_is_left():
    rng = np.random.default_rng(2)
    bias = rng.standard_normal(18) * 100
    write = KvWrite(0, "k", "v", "bias", INV_FREQ, 1.2)
    centre = key_centre(write, bias.astype(np.float32), 18, 50)
    raw = rng.standard_normal((50, 18))
    keys = np.array([rotate(raw[i] + bias, i) for i in range(50)])
    query = rng.standard_normal(18) / 50

    def weights(k: np.ndarray) -> np.ndarray:
        scores = k @ query
        p = np.exp(scores - scores.max())
        return p / p.sum()

    np.testing.assert_allclose(weights(keys - centre), weights(keys), rtol=1e-4)
    columns = [4, 5, 6, 7, 12, 13, 14, 15, 16, 17]
    turned = np.array([rotate(bias, i) for i in range(50)])
    assert (np.linalg.norm((turned - centre)[:, columns], axis=1) <= np.linalg.norm(turned[:, columns], axis=1)).all()
    assert not np.delete(centre, columns).any()


def test_every_head_has_its_own():
    write = KvWrite(0, "k", "v", "bias", (1.0, 0.01), 2.0)
    bias = np.arange(1, 11, dtype=np.float32)
    assert key_centre(write, bias, 5, 10).tolist() == [0, 4, 0, 8, 5, 0, 14, 0, 18, 10]
