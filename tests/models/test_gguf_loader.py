"""GGUF files as models: weights, spec, tokenizer, conversions; every fault a ModelError."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter

from penstock.models import architectures, formats
from penstock.models.checks import weight_shapes
from penstock.models.gguf import load_gguf, read_vocab
from penstock.models.gguf_file import open_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import WeightFormat
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import ModelError
from penstock.types.model_spec import GatedMlp
from penstock.types.vocab import GgufVocab
from support.backends.format_blocks import random_blocks
from support.tiny_models import TinyLlama, vocabulary, write_gguf, write_hf

TINY = TinyLlama()


def edit(path: Path, change: Callable[[GGUFWriter], None], *, drop: tuple[str, ...] = ()) -> Path:
    """A copy of a GGUF file without some metadata and tensors, and with what `change` adds."""
    reader = GGUFReader(path)
    writer = GGUFWriter(path.with_suffix(".edited.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in (*drop, "general.architecture"):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".edited.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TINY)


def test_spec_is_read(tiny):
    spec = load_gguf(tiny).spec
    for field in ("vocab_size", "hidden_size", "num_layers"):
        assert getattr(spec, field) == getattr(TINY, field), field
    (layer,) = set(spec.layers)
    for field in ("num_heads", "num_kv_heads", "head_dim"):
        assert getattr(layer.attention, field) == getattr(TINY, field), field
    assert layer.mlp == GatedMlp(intermediate_size=TINY.intermediate_size)
    assert spec.norm_eps == pytest.approx(TINY.norm_eps)
    assert spec.max_model_len == TINY.max_model_len
    assert spec.tie_word_embeddings
    assert layer.attention.rotation.inv_freq == pytest.approx([10000.0 ** (-idx / 8) for idx in range(8)])


def test_weights_are_those_that_the_program_reads(tiny):
    model = load_gguf(tiny)
    shapes = weight_shapes(architectures.describe(model.spec))
    assert {name: (weight.num_rows, weight.num_cols) for name, weight in model.weights.items()} == shapes

    def in_memory(weight):
        """Whole panels of 16 rows, each of whole pairs of groups of 32 columns with a scale."""
        panels, pairs = -(-weight.num_rows // 16), -(-weight.num_cols // 64)
        return weight.data.nbytes if weight.num_rows == 1 else panels * 16 * pairs * (64 + 2 * 2)

    assert model.num_weight_bytes == sum(in_memory(weight) for weight in model.weights.values())


def test_an_embedding_whose_rows_are_read_in_the_file_takes_no_memory(tiny, tmp_path):
    path = write_gguf(tmp_path / "untied.gguf", dataclasses.replace(TINY, is_tied=False))
    model, tied = load_gguf(path), load_gguf(tiny)
    assert model.weights["embed"].is_mapped
    assert model.num_weight_bytes == tied.num_weight_bytes
    load_gguf(path, max_weight_bytes=model.num_weight_bytes)
    with pytest.raises(ModelError, match="MiB are available"):
        load_gguf(path, max_weight_bytes=model.num_weight_bytes - 1)


@pytest.mark.parametrize(
    ("matrix_type", "fmt", "tolerance"),
    [
        ("F32", WeightFormat.F32, 0.0),
        ("F16", WeightFormat.F16, 2**-11),
        ("BF16", WeightFormat.BF16, 2**-8),
        ("Q8_0", WeightFormat.Q8_0, 0.02),
        ("Q4_0", WeightFormat.Q4_0, 0.3),
        ("Q4_1", WeightFormat.Q4_1, 0.3),
        ("Q5_0", WeightFormat.Q5_0, 0.2),
        ("Q5_1", WeightFormat.Q5_1, 0.2),
        ("MXFP4", WeightFormat.MXFP4, 0.5),
    ],
)
def test_weights_are_unpermuted_and_close_to_the_originals(tmp_path, matrix_type, fmt, tolerance):
    model = TinyLlama(is_tied=False, has_qkv_bias=True, head_dim=32)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model, matrix_type=matrix_type))
    reference = load_hf_directory(write_hf(tmp_path / "hf", model, dtype="f32"))
    assert loaded.weights.keys() == reference.weights.keys()
    for name, weight in loaded.weights.items():
        wanted = reference.weights[name].dequantize()
        assert weight.format is (WeightFormat.F32 if weight.num_rows == 1 else fmt), name
        error = np.abs(weight.dequantize() - wanted).max()
        assert error <= tolerance * np.abs(wanted).max(), name


def test_qwen_rows_are_not_permuted_and_its_document_end_ends_a_reply(tmp_path):
    model = TinyLlama(architecture="qwen2", has_qkv_bias=True)
    path = write_gguf(tmp_path / "m.gguf", model, matrix_type="F32", extra={"tokenizer.ggml.pre": "qwen2"})
    loaded = load_gguf(path)
    stored = model.weights()
    assert loaded.spec.architecture == "qwen2"
    assert loaded.eos_token_ids == (2, 0)
    for kind in "qkv":
        wanted = stored[f"model.layers.1.self_attn.{kind}_proj.weight"]
        assert np.abs(loaded.weights[f"layers.1.{kind}"].dequantize() - wanted).max() < 2**-8
        assert np.array_equal(
            loaded.weights[f"layers.1.{kind}_bias"].data[0], stored[f"model.layers.1.self_attn.{kind}_proj.bias"]
        )


def test_kept_formats_stay_mapped_and_q_rows_move_as_bytes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TINY, matrix_type="Q4_1")
    model, file = load_gguf(path), open_gguf(path)
    raw = {name: file.tensor_bytes(entry) for name, entry in file.tensors.items()}
    assert not model.weights["layers.0.up"].data.flags.owndata
    assert np.array_equal(model.weights["layers.0.up"].data.reshape(-1), raw["blk.0.ffn_up.weight"])
    q, stored = model.weights["layers.0.q"].data, raw["blk.0.attn_q.weight"].reshape(64, -1)
    for head in range(4):
        for pair in range(8):
            assert np.array_equal(q[head * 16 + pair], stored[head * 16 + 2 * pair])
            assert np.array_equal(q[head * 16 + 8 + pair], stored[head * 16 + 2 * pair + 1])


def test_weights_that_grow_are_told_of(tmp_path, caplog, tiny):
    with caplog.at_level("INFO", "penstock"):
        load_gguf(tiny)
        assert not caplog.records
        load_gguf(
            write_gguf(
                tmp_path / "small.gguf",
                dataclasses.replace(TINY, hidden_size=256, head_dim=64, intermediate_size=256),
                matrix_type="TQ2_0",
            )
        )
    (warning,) = caplog.records
    assert re.search(r"small\.gguf: 0 MiB of weights take 0 MiB in memory, where each has 4, 8", warning.getMessage())


def test_a_file_that_is_something_else_is_not_called_corrupt(tmp_path, tiny):
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(1000))
    with pytest.raises(ModelError, match=r"not a GGUF file\. Penstock reads \.gguf files and Hugging Face directories"):
        load_gguf(path)
    path.write_bytes(tiny.read_bytes())
    assert load_gguf(path).name == "model"


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_K, GGMLQuantizationType.I32, GGMLQuantizationType.F64])
def test_a_type_that_no_weight_has_is_refused_by_number(tiny, kind):
    block, num_bytes = GGML_QUANT_SIZES[kind]
    raw = np.zeros((2, num_bytes if block > 1 else 4 * num_bytes), np.uint8)
    with pytest.raises(ModelError, match=rf"'extra' is of type number {kind.value}, which is not a known type of weights"):
        load_gguf(edit(tiny, lambda writer: writer.add_tensor("extra", raw, raw_dtype=kind)))


def test_every_type_that_the_package_knows_is_read_or_no_type_of_weights():
    named = {kind.value: kind.name for kind in GGMLQuantizationType if kind.name not in ("Q8_1", "Q8_K", "F64")}
    ours = {number: fmt.name for number, fmt in formats.GGML_TYPES.items()}
    assert ours == {number: name for number, name in named.items() if not re.fullmatch(r"I\d+", name)} | {42: "Q2_0"}


def test_vocabulary_template_and_special_tokens(tiny):
    model = load_gguf(tiny, name="me")
    vocab = model.tokenizer_source
    assert isinstance(vocab, GgufVocab)
    assert vocab.tokens == vocabulary()
    assert vocab.merges[0] == "t h"
    assert vocab.token_types[:4] == [3, 3, 3, 1]
    assert not vocab.add_bos_token
    assert (model.name, model.bos_token_id, model.eos_token_ids) == ("me", 1, (2, 0))
    assert "add_generation_prompt" in model.chat_templates["default"]
    assert load_gguf(tiny).name == "tiny"


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize(
    ("model", "pre", "has_bos"),
    [("gemma4", "", True), ("gpt2", "granite-embed-multi-311m", True), ("gpt2", "gpt-2", False)],
)
def test_texts_of_gemma_4_begin_with_bos_even_if_the_file_denies_it(tmp_path, model, pre, has_bos, flag):
    writer = GGUFWriter(tmp_path / "vocab.gguf", "gemma4")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<eos>", "<bos>", "H"])
    writer.add_bos_token_id(1)
    if flag is not None:
        writer.add_add_bos_token(flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_vocab(open_gguf(tmp_path / "vocab.gguf"), 3).add_bos_token is (has_bos or flag is True)


@pytest.mark.parametrize(("architecture", "line_of_user"), [("phi3", []), ("llama", [8])])
def test_tokens_of_phi_3_take_the_white_space_behind_them(tmp_path, architecture, line_of_user):
    """Its template writes a line break behind `<|user|>`, which the model was trained without."""
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>", "▁", "H", "i", "\n"]
    writer = GGUFWriter(tmp_path / "vocab.gguf", architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, 3, 3, 1, 1, 1, 1])
    writer.add_token_scores([0.0] * len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(read_vocab(open_gguf(tmp_path / "vocab.gguf"), len(tokens)))
    ids = tokenizer.encode("<|user|>\nHi<|endoftext|>\ni", add_special_tokens=False)
    assert ids == [3, 5, *line_of_user, 6, 7, 4, 5, 8, 7]


def test_tokens_that_end_a_turn_or_a_document_end_a_reply_whatever_the_file_calls_its_eos(tiny):
    ends = {"<|eot_id|>": 3, "<|tool_response>": 4, "<｜end▁of▁sentence｜>": 3, "</s>": 1}
    tokens, types = [*vocabulary(), *ends], [3, 3, 3] + [1] * 261 + [*ends.values()]

    def rename(writer):
        writer.add_token_list(tokens[4:])
        writer.add_token_types(types[4:])

    model = load_gguf(edit(tiny, rename, drop=("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")))
    found = [tokens[4:][token_id] for token_id in model.eos_token_ids[1:]]
    assert found == ["<|eot_id|>", "<|tool_response>", "<｜end▁of▁sentence｜>"]  # "</s>" is ordinary text there


@pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_where_other_tokens_end_a_reply_end_ends_a_message_only(tiny, others):
    """A reply of gpt-oss or Solar has several messages: what it thinks, and what it says."""

    def ends(*texts):
        tokens, types = [*vocabulary(), *texts], [3, 3, 3] + [1] * 261 + [3] * len(texts)

        def rename(writer):
            writer.add_token_list(tokens[5:])
            writer.add_token_types(types[5:])

        path = edit(tiny, rename, drop=("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"))
        return [tokens[5:][token_id] for token_id in load_gguf(path).eos_token_ids[1:]]

    assert ends("<|end|>", others[0]) == ["<|end|>", others[0]]
    assert ends("<|end|>", *others) == [*others]


@pytest.mark.parametrize("number", [-1, 0xFFFFFFFF])
def test_an_id_of_minus_one_names_no_token(tmp_path, caplog, number):
    def write(name):
        writer = GGUFWriter.add_int32 if number < 0 else GGUFWriter.add_uint32
        path = write_gguf(tmp_path / "whole.gguf", TINY)
        return edit(path, lambda made: writer(made, name, number), drop=(name,))

    with caplog.at_level("INFO", "penstock"):
        model = load_gguf(write("tokenizer.ggml.bos_token_id"))
    assert (model.bos_token_id, model.tokenizer_source.bos_token_id) == (None, None)
    assert f"tokenizer.ggml.bos_token_id is {number}, which means no token: ignored" in caplog.text
    assert load_gguf(write("tokenizer.ggml.eos_token_id")).eos_token_ids == (0, 2)


def test_a_padding_token_that_the_vocabulary_lacks_is_passed_over(tmp_path, caplog):
    with caplog.at_level("INFO", "penstock"):
        model = load_gguf(write_gguf(tmp_path / "m.gguf", TINY, extra={"tokenizer.ggml.padding_token_id": 264}))
    assert model.tokenizer_source.padding_token_id is None
    assert "padding_token_id is 264, which is not in the vocabulary: ignored" in caplog.text


def test_end_of_turn_tokens_count_as_eos(tmp_path):
    extra = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1}
    assert load_gguf(write_gguf(tmp_path / "m.gguf", TINY, extra=extra)).eos_token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("metadata", "divisor"),
    [
        ({"llama.rope.scale_linear": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 4.0, "llama.rope.scaling.factor": 2.0}, 2.0),
        ({"llama.rope.scale_linear": 4.0, "llama.rope.scaling.type": "none"}, 1.0),
        ({"llama.rope.scale_linear": 0.0}, 1.0),
    ],
)
def test_the_old_key_of_linear_scaling_counts_where_the_new_one_is_absent(tiny, tmp_path, metadata, divisor):
    plain = load_gguf(tiny).spec.layers[0].attention.rotation.inv_freq
    scaled = load_gguf(write_gguf(tmp_path / "m.gguf", TINY, extra=metadata)).spec.layers[0].attention.rotation.inv_freq
    assert scaled == pytest.approx([freq / divisor for freq in plain])


@pytest.mark.parametrize("scaling", ["linear", "llama3"])
def test_rope_scaling_agrees_with_the_hugging_face_directory(tmp_path, scaling):
    model = TinyLlama(rope_scaling=scaling)
    gguf = load_gguf(write_gguf(tmp_path / "m.gguf", model)).spec.layers[0].attention.rotation.inv_freq
    plain = load_gguf(write_gguf(tmp_path / "p.gguf", TINY)).spec.layers[0].attention.rotation.inv_freq
    assert gguf == pytest.approx(load_hf_directory(write_hf(tmp_path / "hf", model)).spec.layers[0].attention.rotation.inv_freq)
    assert gguf != pytest.approx(plain)


def test_a_sliding_window_is_that_of_all_layers(tmp_path):
    model = load_gguf(write_gguf(tmp_path / "m.gguf", TINY, extra={"llama.attention.sliding_window": 100}))
    assert {layer.attention.window for layer in model.spec.layers} == {100}


REFUSED = {
    "architecture": (
        {"general.architecture": "rwkv7"},
        "rwkv7 is not supported: its recurrent state.*docs/models.md lists all",
    ),
    "split": ({"split.count": 2}, "part 1 of a model that is split into 2"),
    "adapter": ({"general.type": "adapter"}, "is an adapter.*--lora-modules"),
    "rope": ({"llama.rope.scaling.type": "axial"}, r"llama\.rope\.scaling\.type is 'axial'.*another model"),
    "alpha": ({"llama.rope.scaling.alpha": 1.5}, r"llama\.rope\.scaling\.alpha is 1\.5.*another model"),
    "yarn ramp": ({"llama.rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor is 0\.5.*another model"),
    "partial rope": ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8.*another model"),
    "value width": ({"llama.attention.value_length": 8}, r"llama\.attention\.value_length is 8.*another model"),
    "both directions": ({"llama.attention.causal": False}, r"llama\.attention\.causal is false.*another model"),
    "local base": ({"llama.rope.freq_base_swa": 10.0}, r"llama\.rope\.freq_base_swa is 10\.0.*another model"),
    "spaces": ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is true.*SentencePiece"),
    "base": ({"llama.rope.freq_base": -1.0}, "freq_base"),
    "nan base": ({"llama.rope.freq_base": float("nan")}, "freq_base"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": 2.0}, "epsilon"),
    "layers": ({"llama.block_count": 3}, r"layers\.2.* missing"),
    "absurd layers": ({"llama.block_count": (1 << 32) - 1}, "num_layers is"),
    "fewer layers": ({"llama.block_count": 1}, "not part of this architecture"),
    "no heads": ({"llama.attention.head_count": 0}, "num_heads is 0"),
    "heads": ({"llama.attention.head_count": 8}, "128 x 64"),
    "hidden": ({"llama.embedding_length": 128}, "but the model's settings require"),
    "text for a number": ({"llama.embedding_length": "x"}, "is of type str, not int"),
    "eos": ({"tokenizer.ggml.eos_token_id": 70000}, "eos_token_id is 70000"),
    "bos": ({"tokenizer.ggml.bos_token_id": 264}, "bos_token_id is 264"),
    "context": ({"llama.context_length": 0}, "max_model_len is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_or_contradictory_metadata(tmp_path, case):
    extra, cause = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", TINY, extra=extra)
    with pytest.raises(ModelError, match=cause) as caught:
        load_gguf(path)
    assert "m.gguf" in caught.value.message
    assert caught.value.remedy


def test_a_charsmap_is_refused_unless_it_asks_for_nothing(tiny):
    def write(values):
        return edit(tiny, lambda writer: writer.add_array("tokenizer.ggml.precompiled_charsmap", values))

    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.precompiled_charsmap has 2 entries.*another model"):
        load_gguf(write([1, 2]))
    load_gguf(write([]))


def test_templates_have_names(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TINY, extra={"tokenizer.chat_template.rag": "documents"})
    model = load_gguf(path)
    assert model.chat_templates.keys() == {"default", "rag"}
    assert model.chat_templates["rag"] == "documents"


def test_the_vocabulary_is_checked_before_any_weight_is_converted(tiny, monkeypatch):
    def check(vocab: GgufVocab) -> None:
        assert vocab.pre == "gpt-2"
        raise ModelError("No.", remedy="Go.")

    monkeypatch.setattr("penstock.models.gguf.load_tensor", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ModelError, match=r"tiny\.gguf: No\. Go\."):
        load_gguf(tiny, check_vocab=check)


@pytest.mark.parametrize(
    ("dropped", "cause"),
    [
        ("token_embd.weight", "token_embd.weight is missing"),
        ("output_norm.weight", "norm is missing"),
        ("blk.1.attn_k.weight", r"layers\.1\.k is missing"),
        ("tokenizer.ggml.tokens", "vocabulary has 0 tokens"),
        ("tokenizer.ggml.model", "no tokenizer.ggml.model"),
        ("llama.context_length", "no llama.context_length"),
    ],
)
def test_missing_parts(tiny, dropped, cause):
    with pytest.raises(ModelError, match=cause):
        load_gguf(edit(tiny, lambda _: None, drop=(dropped,)))


def test_unknown_tensor_is_refused(tiny):
    extra = np.zeros(64, dtype=np.float32)
    path = edit(tiny, lambda writer: writer.add_tensor("blk.0.attn_sub_norm.weight", extra))
    with pytest.raises(ModelError, match=r"attn_sub_norm\.weight is not part of this architecture"):
        load_gguf(path)


def write_nvfp4(path: Path, scales: dict[str, list[Any]]) -> Path:
    """A mixture of 4 experts with q, gate, up and down in NVFP4, and tensors of one dimension beside them."""
    plain = write_gguf(path, dataclasses.replace(TINY, num_layers=1, intermediate_size=64), matrix_type="BF16")
    rng = np.random.default_rng(5)

    def change(writer: GGUFWriter) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_tensor("blk.0.ffn_gate_inp.weight", rng.standard_normal((4, 64)).astype(np.float32))
        for name, experts in (("attn_q", ()), *((f"ffn_{part}_exps", (4,)) for part in ("gate", "up", "down"))):
            raw = random_blocks(rng, WeightFormat.NVFP4, 64 * math.prod(experts), 64, zeros=False)
            raw = raw.reshape(*experts, 64, -1)
            writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=GGMLQuantizationType.NVFP4)
        for name, values in scales.items():
            writer.add_tensor(f"blk.0.{name}", np.array(values, np.float32))

    return edit(plain, change, drop=tuple(f"blk.0.{name}.weight" for name in ("attn_q", "ffn_gate", "ffn_up", "ffn_down")))


def test_scales_beside_matrices_in_nvfp4_multiply_them(tmp_path: Path) -> None:
    """llama.cpp's converter writes one for a matrix, and one for each expert of a stack."""
    of_experts = [0.02, 0.5, 0.25, 3.0]
    scales = {"attn_q.scale": [0.3], "attn_q.input_scale": [7.0], "ffn_down_exps.scale": of_experts}
    bare, scaled = (load_gguf(write_nvfp4(tmp_path / f"{len(found)}.gguf", found)).weights for found in ({}, scales))
    factors = {"q": np.full((64, 1), 0.3), "expert_down": np.repeat(of_experts, 64)[:, None]}
    for name, factor in factors.items():
        wanted = bare[f"layers.0.{name}"].dequantize() * factor
        moved = np.abs(scaled[f"layers.0.{name}"].dequantize() - wanted)
        assert (moved <= 0.005 * np.abs(wanted).max(axis=1, keepdims=True)).all(), name
    assert scaled["layers.0.expert_up"].format is WeightFormat.NVFP4


@pytest.mark.parametrize(
    ("name", "values", "cause"),
    [
        ("attn_q.scale", [0.3, 0.3], r"shape \[2\], not \[1\]"),
        ("attn_q.scale", [[0.3]], r"shape \[1, 1\], not \[1\]"),
        ("ffn_up_exps.scale", [0.3, 0.3], r"shape \[2\], not \[4\]"),
        ("ffn_up_exps.scale", [1.0, 2.0, math.nan, 1.0], "not finite"),
        ("attn_k.scale", [0.3], "attn_k"),
    ],
)
def test_impossible_scales_are_refused_by_name(tmp_path: Path, name: str, values: list[Any], cause: str) -> None:
    """The matrix of k is in BF16, which has no scale."""
    with pytest.raises(ModelError, match=re.escape(name)) as refused:
        load_gguf(write_nvfp4(tmp_path / "model.gguf", {name: values}))
    assert re.search(cause, refused.value.message)


def test_memory_limit_is_checked_before_loading(tiny):
    num_bytes = load_gguf(tiny).num_weight_bytes
    assert load_gguf(tiny, max_weight_bytes=num_bytes).num_weight_bytes == num_bytes
    with pytest.raises(ModelError, match="MiB are available"):
        load_gguf(tiny, max_weight_bytes=num_bytes - 1)


def outcome(path: Path) -> str:
    """`loaded`, or the message of the ModelError; any other exception fails the test."""
    try:
        load_gguf(path)
    except ModelError as error:
        return error.message
    return "loaded"


SMALL = dataclasses.replace(TINY, num_layers=1, hidden_size=32, intermediate_size=32)


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", SMALL, matrix_type="F16")
    data = path.read_bytes()
    cuts = [*range(0, 2000, 37), *range(2000, len(data), 997), len(data) - 1]
    short = tmp_path / "short.gguf"
    for cut in cuts:
        short.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"short\.gguf"):
            load_gguf(short)


@pytest.mark.parametrize("matrix_type", ["F16", "Q5_0", "MXFP4"])
def test_flipped_bytes_in_the_header_never_end_in_another_error(tmp_path, matrix_type):
    path = write_gguf(tmp_path / "m.gguf", SMALL, matrix_type=matrix_type)
    data = np.fromfile(path, dtype=np.uint8)
    header_end = min(entry.offset for entry in open_gguf(path).tensors.values())
    rng = np.random.default_rng(7)
    victim = tmp_path / "flipped.gguf"
    outcomes: list[str] = []
    for _ in range(600):
        copy = data.copy()
        width = int(rng.choice([1, 1, 4, 8]))
        at = int(rng.integers(0, header_end - width))
        copy[at : at + width] = rng.choice([0, 0xFF, int(rng.integers(0, 256))])
        copy.tofile(victim)
        outcomes.append(outcome(victim))
    assert all(text == "loaded" or "flipped.gguf" in text for text in outcomes)
    assert 0 < outcomes.count("loaded") < 600


def test_mapped_weights_outlive_the_deletion_of_the_file(tmp_path, tiny):
    copy = shutil.copy(tiny, tmp_path / "copy.gguf")
    model = load_gguf(Path(copy))
    before = model.weights["embed"].dequantize()
    Path(copy).unlink()
    assert np.array_equal(model.weights["embed"].dequantize(), before)
