"""Hugging Face directories as models: weights, config of both releases, tokenizer files; every fault a ModelError."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from penstock.deploy.build import tokenizer_of
from penstock.models.catalog import resolve
from penstock.models.hf import load_hf_directory
from penstock.models.load import load_model
from penstock.models.safetensors_file import open_safetensors
from penstock.models.weights import WeightFormat, convert_rows, row_slices
from penstock.types.errors import ModelError
from support.tiny_models import TinyLlama, write_hf, write_safetensors

TINY = TinyLlama()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("hf") / "tiny", TINY)


def change_config(directory: Path, name: str = "config.json", **values: object) -> None:
    config = json.loads((directory / name).read_text()) | values
    (directory / name).write_text(json.dumps(config))


def test_container_agrees_with_the_safetensors_package(tmp_path):
    path = write_hf(tmp_path, TINY, dtype="f32") / "model.safetensors"
    ours = open_safetensors(path)
    with safe_open(path, "np") as reference:
        assert set(ours) == set(reference.keys())
        for name, tensor in ours.items():
            assert np.array_equal(tensor.array(), reference.get_tensor(name))


def test_bf16_stays_mapped_and_norms_become_f32(tiny):
    model = load_hf_directory(tiny)
    up = model.weights["layers.0.up"]
    assert up.format is WeightFormat.BF16
    assert not up.data.flags.owndata
    truncated = (TINY.weights()["model.layers.0.mlp.up_proj.weight"].view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(up.data, truncated)
    assert model.weights["norm"].format is WeightFormat.F32
    assert model.weights["norm"].data.shape == (1, 64)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_other_floats_stay_mapped_and_count_as_the_bf16_that_backends_make_of_them(tmp_path, dtype):
    model = load_hf_directory(write_hf(tmp_path, TINY, dtype=dtype))
    down = model.weights["layers.1.down"]
    assert down.format is WeightFormat[dtype.upper()]
    assert not down.data.flags.owndata
    wanted = TINY.weights()["model.layers.1.mlp.down_proj.weight"]
    assert down.dequantize() == pytest.approx(wanted, rel=2**-10, abs=1e-6)
    vectors = sum(weight.num_bytes for weight in model.weights.values() if weight.num_rows == 1)
    assert model.num_weight_bytes == vectors + 2 * sum(
        -(-w.num_rows // 16) * 16 * w.num_cols for w in model.weights.values() if w.num_rows > 1
    )


def test_an_embedding_whose_rows_are_read_in_the_file_takes_no_memory(tmp_path, tiny):
    path = write_hf(tmp_path, TinyLlama(is_tied=False))
    num_bytes = load_hf_directory(tiny).num_weight_bytes
    assert load_hf_directory(path, max_weight_bytes=num_bytes).num_weight_bytes == num_bytes
    with pytest.raises(ModelError, match="MiB are available"):
        load_hf_directory(path, max_weight_bytes=num_bytes - 1)


def test_shards_give_the_same_model(tmp_path, tiny):
    whole, sharded = load_hf_directory(tiny), load_hf_directory(write_hf(tmp_path, TINY, num_shards=3))
    assert whole.weights.keys() == sharded.weights.keys()
    assert all(np.array_equal(whole.weights[name].data, sharded.weights[name].data) for name in whole.weights)


def test_unaligned_tensors_are_read(tmp_path, tiny):
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    data = (copy / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    (copy / "model.safetensors").write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    wanted = load_hf_directory(tiny).weights["layers.0.q"].data
    assert np.array_equal(load_hf_directory(copy).weights["layers.0.q"].data, wanted)


def test_tokenizer_template_and_special_tokens(tiny):
    model = load_hf_directory(tiny)
    assert model.tokenizer_source == tiny / "tokenizer.json"
    assert model.chat_templates["default"].startswith("{% for")
    assert (model.name, model.bos_token_id, model.eos_token_ids) == ("tiny", 1, (2, 0))


@pytest.mark.parametrize("template", ["old", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "old"}]])
def test_template_of_the_tokenizer_config(tmp_path, template):
    directory = write_hf(tmp_path, TINY)
    (directory / "chat_template.jinja").unlink()
    assert load_hf_directory(directory).chat_templates == {}
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_hf_directory(directory).chat_templates["default"] == "old"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": False}])
def test_tokenizer_json_alone_decides_what_stands_around_a_text(tmp_path, config):
    """Qwen3-Embedding's ends a text with a token, whose vector is the text's, and its settings have add_bos_token false."""
    directory = write_hf(tmp_path, TINY)
    special = {"id": "end", "ids": [2], "tokens": ["</s>"]}
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "end", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"end": special}}
    change_config(directory, "tokenizer.json", post_processor=template)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_of(load_hf_directory(directory))
    assert tokenizer.encode("a", add_special_tokens=True) == [*tokenizer.encode("a", add_special_tokens=False), 2]


def test_templates_have_names(tmp_path):
    """Files of their own take the place of what tokenizer_config.json has, as in transformers."""
    directory = write_hf(tmp_path, TINY)
    listed = [{"name": "default", "template": "old"}, {"name": "rag", "template": "documents"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert set(load_hf_directory(directory).chat_templates) == {"default"}
    (directory / "chat_template.jinja").unlink()
    assert load_hf_directory(directory).chat_templates == {"default": "old", "rag": "documents"}
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    model = load_hf_directory(directory)
    assert model.chat_templates == {"tool_use": "tools"}
    (directory / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"tool_use\.jinja: can't be read"):
        load_hf_directory(directory)


@pytest.mark.parametrize("template", [{}, 3, ["old"], [{"name": "default"}], [{"template": "old"}]])
def test_templates_of_another_form_are_refused(tmp_path, template):
    directory = write_hf(tmp_path, TINY)
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ModelError, match="neither a string nor a list of named templates"):
        load_hf_directory(directory)


def test_generation_config_is_optional(tmp_path):
    directory = write_hf(tmp_path, TINY)
    (directory / "generation_config.json").unlink()
    assert load_hf_directory(directory).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "generation", "bos", "eos"),
    [
        ({"bos_token_id": -1}, {}, None, (2, 0)),
        ({"bos_token_id": None}, {}, None, (2, 0)),
        ({"bos_token_id": [1]}, {}, 1, (2, 0)),
        ({"bos_token_id": [1, 0]}, {}, 1, (2, 0)),
        ({"eos_token_id": -1}, {"eos_token_id": -1}, 1, ()),
        ({"eos_token_id": [1, -1]}, {"eos_token_id": None}, 1, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": [0]}, 1, (0, 1)),
    ],
)
def test_ids_of_special_tokens_are_one_or_a_list_or_none(tmp_path, config, generation, bos, eos):
    directory = write_hf(tmp_path, TINY)
    change_config(directory, **config)
    change_config(directory, "generation_config.json", **generation)
    model = load_hf_directory(directory)
    assert (model.bos_token_id, model.eos_token_ids) == (bos, eos)


def test_the_log_says_which_ids_were_passed_over(tmp_path, caplog):
    directory = write_hf(tmp_path, TINY, extra={"bos_token_id": [1, 0], "eos_token_id": [2, -1]})
    with caplog.at_level("INFO", "penstock"):
        load_hf_directory(directory)
    assert "bos_token_id is [1, 0]: the first is used" in caplog.text
    assert "eos_token_id[1] is -1, which means no token: ignored" in caplog.text


def write_tokenizer_files(directory: Path, config: object, special_map: object = None) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if special_map is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(special_map))


TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "bos_token": None,
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
    "pad_token": "<|endoftext|>",
    "image_token": "<|image|>",
    "additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>"}],
    "extra_special_tokens": {"boi_token": "<|vision_start|>"},
    "model_max_length": 128,
    "odd_token": 5,
}


def test_special_tokens_are_those_that_transformers_hands_to_templates(tmp_path):
    directory = write_hf(tmp_path, TINY)
    assert load_hf_directory(directory).special_tokens == {}
    write_tokenizer_files(directory, TOKENIZER_CONFIG)
    assert load_hf_directory(directory).special_tokens == {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image|>",
        "additional_special_tokens": ("<|im_start|>", "<|im_end|>"),
        "boi_token": "<|vision_start|>",
    }


@pytest.mark.parametrize(("has_decoder", "eos"), [(True, "<|im_end|>"), (False, "<|im_start|>")])
def test_special_tokens_map_fills_in_what_the_newer_tokenizer_config_lacks(tmp_path, has_decoder, eos):
    directory = write_hf(tmp_path, TINY)
    config = {"eos_token": "<|im_end|>"} | ({"added_tokens_decoder": {}} if has_decoder else {})
    write_tokenizer_files(directory, config, {"eos_token": {"content": "<|im_start|>"}, "unk_token": "<|endoftext|>"})
    assert load_hf_directory(directory).special_tokens == {"eos_token": eos, "unk_token": "<|endoftext|>"}


@pytest.mark.parametrize("config", [{"eos_token": 5}, {"pad_token": {"content": 1}}, {"additional_special_tokens": [None, 3]}])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, config):
    directory = write_hf(tmp_path, TINY)
    write_tokenizer_files(directory, config)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: .* not the text of a token"):
        load_hf_directory(directory)


@pytest.mark.parametrize("base", [None, "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_called_one_and_says_of_which_model(tmp_path, base, has_config):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": np.zeros((1, 1), np.float32)}, "f32")
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"is an adapter .* of {base or 'another model'}, not a model.*--lora-modules"):
        load_model(resolve(str(tmp_path), tmp_path))


def test_a_merged_model_may_keep_its_adapter_s_settings(tmp_path):
    directory = write_hf(tmp_path, TINY)
    (directory / "adapter_config.json").write_text("{}")
    assert load_hf_directory(directory).spec.num_layers == TINY.num_layers


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        (None, {}),
        ("linear", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ],
)
def test_rope_of_both_releases(tmp_path, kind, old):
    model = TinyLlama(rope_theta=5000.0, rope_scaling=kind)
    new = load_hf_directory(write_hf(tmp_path / "new", model))
    extra = {"rope_parameters": None, "rope_theta": 5000.0, **old}
    before = load_hf_directory(write_hf(tmp_path / "old", model, extra=extra))
    assert new.spec.layers[0].attention.rotation.inv_freq == before.spec.layers[0].attention.rotation.inv_freq
    assert len(new.spec.layers[0].attention.rotation.inv_freq) == 8


def test_mistral_has_its_window_in_all_layers(tmp_path):
    extra = {"architectures": ["MistralForCausalLM"], "sliding_window": 128}
    spec = load_hf_directory(write_hf(tmp_path, TINY, extra=extra)).spec
    assert (spec.architecture, spec.max_model_len) == ("mistral", 256)
    assert [layer.attention.window for layer in spec.layers] == [128, 128]


QWEN = TinyLlama(architecture="qwen2", has_qkv_bias=True)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"sliding_window": 64}, [0, 0]),
        ({"sliding_window": 64, "use_sliding_window": False}, [0, 0]),
        ({"sliding_window": 64, "use_sliding_window": True}, [0, 0]),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
    ],
)
def test_qwen_has_biases_and_uses_its_window_only_if_told(tmp_path, extra, windows):
    spec = load_hf_directory(write_hf(tmp_path, QWEN, extra=extra)).spec
    assert (spec.architecture, spec.layers[0].attention.has_qkv_bias) == ("qwen2", True)
    assert [layer.attention.window for layer in spec.layers] == windows


@pytest.mark.parametrize(("tied", "is_tied"), [(True, True), (None, True), (False, False)])
def test_tied_output(tmp_path, tied, is_tied):
    model = load_hf_directory(write_hf(tmp_path, TinyLlama(is_tied=is_tied), extra={"tie_word_embeddings": tied}))
    assert model.spec.tie_word_embeddings is is_tied
    assert ("output" in model.weights) is not is_tied


@pytest.mark.parametrize(("change", "is_tied"), [(0.0, True), (0.25, False)])
def test_a_stored_output_is_tied_if_it_is_a_copy(tmp_path, caplog, change, is_tied):
    """Transformers 5 goes by the weights where config.json contradicts them."""
    write_hf(tmp_path, TINY, dtype="f32")
    weights = {name: tensor.array().copy() for name, tensor in open_safetensors(tmp_path / "model.safetensors").items()}
    output = weights["model.embed_tokens.weight"].copy()
    output[-1, -1] += change
    write_safetensors(tmp_path / "model.safetensors", {**weights, "lm_head.weight": output}, "f32")
    model = load_hf_directory(tmp_path)
    assert model.spec.tie_word_embeddings is is_tied
    assert ("output" in model.weights) is not is_tied
    assert ("tie_word_embeddings" in caplog.text) is not is_tied


def test_biases_of_q_k_and_v(tmp_path):
    qwen = TinyLlama(architecture="qwen2", has_qkv_bias=True)
    model = load_hf_directory(write_hf(tmp_path, qwen, extra={"attention_bias": True}))
    assert model.spec.layers[0].attention.has_qkv_bias
    assert model.weights["layers.1.v_bias"].data.shape == (1, 32)


REFUSED = {
    "architecture": (
        {"architectures": ["XGLMForCausalLM"]},
        "XGLMForCausalLM is not supported. The nearest that are supported: .*ForCausalLM",
    ),
    "no architecture": ({"architectures": None}, "architectures is missing"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'.*another model"),
    "bias of attention": ({"attention_bias": True}, "attention_bias is True, but the weights lack layers.0.q_bias"),
    "bias": ({"mlp_bias": True}, "mlp_bias is True, but the weights lack layers.0.down_bias"),
    "quantised": ({"quantization_config": {"quant_method": "aqlm"}}, "the quantisation aqlm is not"),
    "rope": (
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
        r"rope_parameters\.rope_type is 'axial'.*another model",
    ),
    "old rope": ({"rope_parameters": None, "rope_scaling": {"type": "axial"}}, r"rope_scaling\.type is 'axial'.*another model"),
    "rope beside": (
        {"rope_scaling": {"rope_type": "axial"}},  # transformers takes this one, too
        r"rope_scaling\.rope_type is 'axial'.*another model",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5.*only 1\.0 is.*another model"),
    "nested partial rope": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor is 0\.5.*only 1\.0 is.*another model",
    ),
    "ropes by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "layer_types is missing",
    ),
    "theta": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    "factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "llama3": ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5.0}}, "not below"),
    "layers": ({"num_hidden_layers": 10**12}, "num_layers is"),
    "more layers": ({"num_hidden_layers": 4}, "missing"),
    "text": ({"hidden_size": "64"}, "hidden_size is '64', not of type int"),
    "width": ({"intermediate_size": 128}, "96 x 64, but the model's settings require 128 x 64"),
    "vocabulary": ({"vocab_size": 100}, "embed is 264 x 64"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos id": ({"eos_token_id": 999}, "is 999, outside of the vocabulary"),
    "bos": ({"bos_token_id": -3}, "bos_token_id is -3"),
    "untied": ({"tie_word_embeddings": False}, "output is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_or_contradictory_config(tmp_path, case):
    extra, cause = REFUSED[case]
    with pytest.raises(ModelError, match=cause) as caught:
        load_hf_directory(write_hf(tmp_path, TINY, extra=extra))
    assert str(tmp_path) in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(tmp_path, name):
    directory = write_hf(tmp_path, TINY)
    (directory / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_hf_directory(directory)


def test_missing_shard_is_named(tmp_path):
    directory = write_hf(tmp_path, TINY, num_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load_hf_directory(directory)


def test_a_single_file_counts_before_an_older_index(tmp_path):
    directory = write_hf(tmp_path, TINY, num_shards=2)
    write_hf(directory, TinyLlama(num_layers=1))
    assert load_hf_directory(directory).spec.num_layers == 1
    for shard in directory.glob("model-*"):
        shard.unlink()
    assert load_hf_directory(directory).spec.num_layers == 1


def test_index_must_not_lead_out_of_the_directory(tmp_path):
    directory = write_hf(tmp_path, TINY, num_shards=2)
    change_config(directory, "model.safetensors.index.json", weight_map={"model.norm.weight": "../../etc/passwd"})
    with pytest.raises(ModelError, match="weight_map names the file"):
        load_hf_directory(directory)


def test_index_that_promises_too_much(tmp_path):
    directory = write_hf(tmp_path, TINY, num_shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["more.weight"] = "model-00001-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'more\.weight' is missing"):
        load_hf_directory(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_broken_json_is_named(tmp_path, name, text):
    directory = write_hf(tmp_path, TINY)
    (directory / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        load_hf_directory(directory)


def test_truncated_weights_are_refused_wherever_they_end(tmp_path):
    directory = write_hf(tmp_path, TinyLlama(num_layers=1))
    path = directory / "model.safetensors"
    data = path.read_bytes()
    for cut in [*range(0, 2000, 61), *range(2000, len(data), 4999), len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load_hf_directory(directory)


def outcome(directory: Path) -> str:
    """`loaded`, or the message of the ModelError; any other exception fails the test."""
    try:
        load_hf_directory(directory)
    except ModelError as error:
        return error.message
    return "loaded"


def test_flipped_bytes_in_the_header_never_end_in_another_error(tmp_path):
    directory = write_hf(tmp_path, TinyLlama(num_layers=1), dtype="f16")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    header_end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(400):
        copy = bytearray(data)
        copy[int(rng.integers(0, header_end))] = int(rng.integers(0, 256))
        path.write_bytes(copy)
        text = outcome(directory)
        assert text == "loaded" or str(tmp_path) in text


def test_unsupported_type_of_tensor(tmp_path):
    directory = write_hf(tmp_path, TinyLlama(num_layers=1))
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I16" '))
    with pytest.raises(ModelError, match="type I16 are not supported"):
        load_hf_directory(directory)


def test_memory_limit_is_checked_before_loading(tiny):
    num_bytes = load_hf_directory(tiny).num_weight_bytes
    load_hf_directory(tiny, max_weight_bytes=num_bytes)
    with pytest.raises(ModelError, match="MiB are available"):
        load_hf_directory(tiny, max_weight_bytes=num_bytes - 1)


def test_row_slices_cover_all_rows_once():
    for shape in [(1, 1), (7, 1 << 21), (3, 1 << 23), (5, 0)]:
        rows = [idx for part in row_slices(*shape) for idx in range(shape[0])[part]]
        assert rows == list(range(shape[0]))


def test_rows_are_converted_by_several_threads_in_their_places():
    numbers = np.arange(1000 * 3, dtype=np.uint16).view(np.uint8).reshape(1000, 6)
    assert np.array_equal(convert_rows(lambda rows: numbers[rows], np.zeros_like(numbers), 1 << 14), numbers)


def test_an_error_while_rows_are_converted_is_raised():
    def convert(rows):
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        convert_rows(convert, np.zeros((100, 1)), 1 << 17)


def test_writer_of_tiny_models_rounds_trip(tmp_path):
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    write_safetensors(tmp_path / "a.safetensors", values, "f16")
    assert np.array_equal(open_safetensors(tmp_path / "a.safetensors")["a"].array(), values["a"])
