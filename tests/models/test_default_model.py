"""The default model itself: what its file says."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.models.weights import WeightFormat
from penstock.types.model_spec import GatedMlp, LayerSpec
from penstock.types.vocab import GgufVocab

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def source():
    source = resolve(DEFAULT_MODEL, default_cache_dir())
    if not source.is_present:
        pytest.skip(f"{source.path} is not there: run `penstock pull {DEFAULT_MODEL}`")
    return source


def test_what_the_file_says(source):
    model = load_model(source)
    spec = model.spec
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert set(spec.layers) == {LayerSpec(mixer=attention, mlp=GatedMlp(intermediate_size=1536))}
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size, spec.max_model_len) == (49152, 30, 576, 8192)
    assert spec.tie_word_embeddings
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2, 0))
    assert isinstance(model.tokenizer_source, GgufVocab)
    assert model.tokenizer_source.tokens[2] == "<|im_end|>"
    assert model.chat_templates["default"]


def test_formats_are_kept(source):
    weights = load_model(source).weights
    formats = {weight.format for name, weight in weights.items() if "norm" not in name and name != "embed"}
    assert formats == {WeightFormat.Q4_1}
    assert weights["embed"].format is WeightFormat.Q8_0
    assert np.isfinite(weights["layers.7.q"].dequantize()).all()
