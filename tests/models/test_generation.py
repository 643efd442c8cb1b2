"""A model's files about sampling: which keys count, which are told, and which values are refused."""

import json
import logging
from dataclasses import replace

import pytest

from penstock.models.catalog import CatalogFile, resolve
from penstock.models.generation import MAX_SUPPRESSED, ignored_settings, sampling_defaults
from penstock.models.load import load_model
from penstock.models.weights import Generation
from penstock.types.errors import ConfigError, ModelError
from penstock.types.sampling import SamplingDefaults
from support.tiny_models import TinyLlama, write_gguf, write_hf


def generation(tmp_path, **values):
    return Generation(f"{tmp_path}/generation_config.json", values)


def test_the_keys_of_vllm_and_suppress_tokens_count(tmp_path):
    said = generation(
        tmp_path,
        temperature=0.6,
        top_p=0.95,
        top_k=-1,
        min_p=0,
        repetition_penalty=1.1,
        max_new_tokens=2048,
        suppress_tokens=[7, 3, -1, 7],
    )
    assert sampling_defaults(said, 10) == SamplingDefaults(
        temperature=0.6,
        top_p=0.95,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.1,
        max_tokens=2048,
        banned_token_sequences=((3,), (7,)),
    )
    assert ignored_settings(said) == []


def test_a_temperature_near_0_is_greedy(tmp_path):
    assert sampling_defaults(generation(tmp_path, temperature=1e-6), 10).temperature == 0.0


def test_null_and_absent_are_the_same(tmp_path):
    assert sampling_defaults(generation(tmp_path, temperature=None, suppress_tokens=None), 10) == SamplingDefaults()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -0.1, r"temperature is -0\.1, not a number from 0 to 2"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", "warm", "temperature is 'warm'"),
        ("temperature", True, "temperature is True"),
        ("top_p", -0.1, r"top_p is -0\.1"),
        ("top_k", 1.5, r"top_k is 1\.5"),
        ("top_k", 2**31, "top_k is"),
        ("max_new_tokens", 0, "max_new_tokens is 0"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("suppress_tokens", 3, "suppress_tokens is not a list"),
        ("suppress_tokens", [0.5], "suppress_tokens is not a list"),
        ("suppress_tokens", [10], r"suppress_tokens\[0\] is 10, outside of the vocabulary of 10"),
        ("suppress_tokens", [1] * (MAX_SUPPRESSED + 1), f"has {MAX_SUPPRESSED + 1} tokens"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(tmp_path, key, value, words):
    with pytest.raises(ModelError, match=words):
        sampling_defaults(generation(tmp_path, **{key: value}), 10)


def test_what_is_not_obeyed_is_named_and_what_asks_for_nothing_is_not(tmp_path):
    nothing = {"do_sample": True, "num_beams": 1, "bad_words_ids": [], "forced_eos_token_id": None, "typical_p": 1.0}
    facts = {"eos_token_id": 2, "pad_token_id": 0, "transformers_version": "5.0", "_from_model_config": True, "max_length": 20}
    asked = {"do_sample": False, "typical_p": 0.9, "begin_suppress_tokens": [1], "watermarking_config": {"bias": 2.5}}
    assert ignored_settings(generation(tmp_path, **nothing, **facts)) == []
    told = ["do_sample = False", "typical_p = 0.9", "begin_suppress_tokens", "watermarking_config"]
    assert ignored_settings(generation(tmp_path, **asked)) == told


def test_a_penalty_over_no_tokens_is_none(tmp_path):
    key = "general.sampling.penalty_repeat"
    window = "general.sampling.penalty_last_n"
    assert sampling_defaults(generation(tmp_path, **{key: 1.5, window: 0}), 10).repetition_penalty is None
    assert sampling_defaults(generation(tmp_path, **{key: 1.5, window: 64}), 10).repetition_penalty == 1.5
    assert ignored_settings(generation(tmp_path, **{key: 1.5, window: 64})) == [f"{window} = 64"]


def test_a_gguf_file_names_them_in_its_metadata(tmp_path, caplog):
    extra = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.mirostat": 2,
        "general.sampling.xtc_probability": 0.0,
        "tokenizer.ggml.suppress_tokens": [5],
    }
    path = write_gguf(tmp_path / "m.gguf", TinyLlama(), extra=extra)
    source = resolve(str(path), tmp_path)
    caplog.set_level(logging.INFO)
    model = load_model(source, generation="auto")
    assert model.sampling == SamplingDefaults(temperature=0.5, top_k=20, banned_token_sequences=((5,),))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "settings are ignored" in line] == [
        f"{path}: these settings are ignored: general.sampling.mirostat = 2"
    ]
    assert any(line.endswith("temperature 0.5, top_k 20, without tokens 5") for line in lines)
    assert load_model(source).sampling == SamplingDefaults()


def test_a_folder_is_taken_in_place_of_the_model_s_own_and_adds_its_end_tokens(tmp_path):
    directory = write_hf(tmp_path / "m", TinyLlama())
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"top_k": 5, "eos_token_id": [1, 2]}))
    source = resolve(str(directory), tmp_path)
    own, none = load_model(source, generation="auto"), load_model(source, generation="none")
    taken = load_model(source, generation=str(other))
    assert (own.sampling.temperature, none.sampling.temperature, taken.sampling.temperature) == (0.6, None, None)
    assert taken.sampling.top_k == 5
    assert own.eos_token_ids == none.eos_token_ids  # end tokens count in any case
    assert taken.eos_token_ids == (*own.eos_token_ids, 1)
    with pytest.raises(ConfigError, match=r"which has no generation_config\.json"):
        load_model(source, generation=str(tmp_path))


def test_a_bad_value_does_not_count_where_it_is_not_asked_for(tmp_path):
    directory = write_hf(tmp_path / "m", TinyLlama())
    (directory / "generation_config.json").write_text(json.dumps({"temperature": "warm"}))
    source = resolve(str(directory), tmp_path)
    assert load_model(source, generation="none").sampling == SamplingDefaults()
    with pytest.raises(ModelError, match="--generation-config none"):
        load_model(source, generation="auto")


def test_a_catalogue_model_without_values_has_those_of_its_authors(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", TinyLlama())
    default = resolve("default", tmp_path)
    assert default.entry is not None
    assert default.entry.sampling
    file = CatalogFile("a.gguf", path.stat().st_size, "")
    source = replace(default, path=path, entry=replace(default.entry, files=(file,)))
    assert load_model(source, generation="auto").sampling == SamplingDefaults(**default.entry.sampling)
    assert load_model(source, generation="none").sampling == SamplingDefaults()
