"""sentence-transformers' files beside a model: read as they are meant, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.llm import LLM
from penstock.models.formats import held_bytes
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.sentence import read_sentence_files
from penstock.types.encoder import EncoderInfo, ScoreFunction, Task
from penstock.types.errors import ModelError, PenstockError
from penstock.types.model_spec import Dense
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.tiny_models import write_safetensors

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.base.modules.pooling.Pooling", "path": "1_Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
SPLADE = {"type": "sentence_transformers.sparse_encoder.models.SpladePooling", "path": "1_SpladePooling"}
PYLATE = {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"}


def write(path: Path, **files: Any) -> Path:
    """JSON files by name, `/` being `__`."""
    for name, content in files.items():
        file = path / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return path


def test_all_files_are_read(tmp_path):
    write(
        tmp_path,
        modules=[TRANSFORMER, POOLING, DENSE, {"type": "sentence_transformers.models.Dropout", "path": "4_Dropout"}, NORMALIZE],
        **{"1_Pooling__config": {"pooling_mode": "lasttoken", "include_prompt": True}},
        **{"2_Dense__config": {"out_features": 7, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}},
        sentence_bert_config={"max_seq_length": 200, "do_lower_case": False},
        config_sentence_transformers={"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"},
        tokenizer_config={"model_max_length": 99},
    )
    found = read_sentence_files(tmp_path)
    assert (found.pooling, found.is_normalised, found.max_tokens) == ("last", True, 200)
    assert found.dense == {"2_Dense": Dense(width=7, activation=None, has_bias=False)}
    assert (found.prompts, found.default_prompt) == ({"query": "query: ", "document": ""}, "query")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_poolings_of_old_and_new_files(tmp_path, config, pooling):
    write(tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": config})
    assert read_sentence_files(tmp_path).pooling == pooling


def test_a_directory_without_such_files_has_defaults(tmp_path):
    write(tmp_path, tokenizer_config={"model_max_length": 1000000000000000019884624838656})
    found = read_sentence_files(tmp_path)
    assert (found.pooling, found.max_tokens, found.prompts) == (None, None, {})


@pytest.mark.parametrize("folder", ["../other", "/etc", "a/b", "..", ".", "1_Pooling/..", "\0", "-", "x" * 65, 3, None])
def test_no_path_leads_out_of_the_directory(tmp_path, folder):
    write(tmp_path / "model", modules=[TRANSFORMER, {**POOLING, "path": folder}])
    write(tmp_path, other__config={"pooling_mode": "cls"})
    with pytest.raises(ModelError, match="not the name of a folder"):
        read_sentence_files(tmp_path / "model")


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"modules": {}}, "not a list of 1 to 16 modules"),
        ({"modules": []}, "not a list of 1 to 16 modules"),
        ({"modules": [TRANSFORMER] * 17}, "not a list of 1 to 16 modules"),
        ({"modules": [POOLING]}, "the first module is a Pooling"),
        ({"modules": [{**TRANSFORMER, "path": "0_Transformer"}]}, "the first module is a Transformer in '0_Transformer'"),
        ({"modules": [TRANSFORMER, {"type": "my_code.Pooling", "path": ""}]}, "the repository's own code"),
        ({"modules": [TRANSFORMER, POOLING, {**POOLING, "type": "sentence_transformers.models.LSTM"}]}, "of the type LSTM"),
        ({"modules": [TRANSFORMER, DENSE]}, "module_input_name is 'sentence_embedding' at this place"),
        ({"modules": [TRANSFORMER, NORMALIZE]}, "of the type Normalize comes at this position"),
        ({"modules": [TRANSFORMER, PYLATE, POOLING]}, "of the type Pooling comes at this position"),
        ({"modules": [TRANSFORMER, POOLING, NORMALIZE, DENSE]}, "of the type Dense comes at this position"),
        ({"modules": [{**TRANSFORMER, "type": "sentence_transformers.models.MLMTransformer"}, POOLING]}, "is a MLMTransformer"),
        ({"modules": [TRANSFORMER, SPLADE, DENSE]}, "of the type Dense comes at this position"),
        (
            {"modules": [TRANSFORMER, SPLADE], "1_SpladePooling__config": {"pooling_strategy": "sum"}},
            "is 'sum'",
        ),
        ({"modules": [TRANSFORMER, SPLADE], "1_SpladePooling__config": {"activation_function": "log1p_relu"}}, "log1p_relu"),
        ({"1_Pooling__config": {"pooling_mode": "max"}}, "the pooling is .'max'."),
        ({"1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "the pooling is .'cls', 'mean'."),
        ({"1_Pooling__config": {"pooling_mode": [1]}}, "the pooling is .1."),
        ({"1_Pooling__config": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        ({"1_Pooling__config": {"include_prompt": False}}, "include_prompt is false"),
        ({"2_Dense__config": {"out_features": 0}}, "hidden_size is 0"),
        ({"2_Dense__config": {"out_features": 7, "use_residual": True}}, "use_residual is True"),
        ({"2_Dense__config": {"out_features": 7, "activation_function": "os.system"}}, "activation_function is 'os.system'"),
        ({"2_Dense__config": {"out_features": 7, "activation_function": "torch.nn.Softmax"}}, "torch.nn.Softmax"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length is 0"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "does not lower the case"),
        ({"sentence_bert_config": {"query_length": 8}}, "query_length is 8"),
        ({"sentence_bert_config": {"query_expansion": {"length": 32}}}, "query_expansion is"),
        (
            {"sentence_bert_config": {"processing_kwargs": {"text": {"max_length": 16}}}},
            "processing_kwargs.text.max_length is 16",
        ),
        (
            {"sentence_bert_config": {"processing_kwargs": {"common": {"add_special_tokens": False}}}},
            "common.add_special_tokens",
        ),
        ({"sentence_bert_config": {"processing_kwargs": {"text": [1]}}}, r"text is \[1\], not of type dict"),
        ({"sentence_bert_config": {"modality_config": {"text": "forward"}}}, "text is 'forward', not of type dict"),
        ({"sentence_bert_config": {"modality_config": {"text": {}, "message": {"format": "flat"}}}}, "chat template"),
        ({"sentence_bert_config": {"module_output_name": "sentence_embedding"}}, "module_output_name is 'sentence_embedding'"),
        (
            {"sentence_bert_config": {"modality_config": {"text": {"method_output_name": "pooler_output"}}}},
            "method_output_name is 'pooler_output'",
        ),
        (
            {"modules": [TRANSFORMER, SPLADE], "config_sentence_transformers": {"max_active_dims": 32}},
            "max_active_dims is 32",
        ),
        ({"config_sentence_transformers": {"truncate_dim": 0}}, "truncate_dim is 0"),
        ({"modules": [TRANSFORMER, PYLATE], "config_sentence_transformers": {"document_length": 0}}, "document_length is 0"),
        ({"config_sentence_transformers": {"prompts": {"a": 1}}}, "a value that is not a text"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "no such prompt"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, files, cause):
    good = {
        "modules": [TRANSFORMER, POOLING, DENSE, NORMALIZE],
        "1_Pooling__config": {},
        "2_Dense__config": {"out_features": 7},
        "1_Dense__config": {"out_features": 7},
        "1_SpladePooling__config": {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": 9},
        "config_sentence_transformers": {"prompts": {"query": "query: "}},
    }
    write(tmp_path, **(good | files))
    with pytest.raises(ModelError, match=cause) as refused:
        read_sentence_files(tmp_path)
    assert refused.value.remedy


@pytest.mark.parametrize(
    "config",
    [
        {"transformer_task": "feature-extraction", "modality_config": {"text": {"method": "forward"}}},
        {"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}},
        {"module_output_name": "token_embeddings", "unpad_inputs": True, "query_length": None},
        {"processing_kwargs": {"text": {"padding": True, "truncation": True}, "chat_template": {"tokenize": True}}},
    ],
)
def test_settings_of_the_first_module_that_change_no_vector_are_taken(tmp_path, config):
    write(tmp_path, sentence_bert_config={"max_seq_length": 9, **config})
    assert read_sentence_files(tmp_path).max_tokens == 9


def test_pylate_has_a_normalised_vector_for_each_token_and_marks_of_queries_and_documents(tmp_path):
    dense = {"activation_function": "torch.nn.modules.linear.Identity"}
    marks = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "attend_to_expansion_tokens": False, "prompts": {}}
    write(
        tmp_path,
        modules=[TRANSFORMER, PYLATE, {**PYLATE, "path": "2_Dense"}],
        **{f"{number}_Dense__config": {"out_features": number, **dense} for number in (1, 2)},
        config_sentence_transformers=marks,
    )
    found = read_sentence_files(tmp_path)
    assert (found.pooling, found.is_normalised) == ("each", True)
    assert [dense.width for dense in found.dense.values()] == [1, 2]
    assert found.prompts == {"query": "[Q] ", "document": "[D] "}
    assert found.markers == ("[Q] ", "[D] ")
    write(tmp_path, config_sentence_transformers={**marks, "attend_to_expansion_tokens": True})
    with pytest.raises(ModelError, match="attend_to_expansion_tokens is True"):
        read_sentence_files(tmp_path)
    write(tmp_path, config_sentence_transformers={**marks, "attend_to_expansion_tokens": True, "do_query_expansion": False})
    assert read_sentence_files(tmp_path).markers == found.markers


@pytest.mark.parametrize(
    ("saved", "prompts"),
    [
        ({"query": "", "document": ""}, {"query": "[Q] ", "document": "[D] "}),  # by sentence-transformers 5
        ({"query": "find: ", "other": "o: "}, {"query": "[Q] find: ", "document": "[D] ", "other": "o: "}),
        ({"query": "[Q] find: "}, {"query": "[Q] find: ", "document": "[D] "}),
    ],
)
def test_pylates_marks_stand_before_the_prompts(tmp_path, saved, prompts):
    write(
        tmp_path,
        modules=[TRANSFORMER, PYLATE],
        **{"1_Dense__config": {"out_features": 7}},
        config_sentence_transformers={"query_prefix": "[Q] ", "document_prefix": "[D] ", "prompts": saved},
    )
    assert read_sentence_files(tmp_path).prompts == prompts


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [
        ({"query_length": 32, "document_length": 300}, 300),
        ({"query_length": 256, "document_length": 128}, 256),
        ({"query_length": None}, 180),
    ],
)
def test_pylates_lengths_limit_texts_whatever_was_encoded_before_saving(tmp_path, lengths, max_tokens):
    write(
        tmp_path,
        modules=[TRANSFORMER, PYLATE],
        **{"1_Dense__config": {"out_features": 7}},
        sentence_bert_config={"max_seq_length": 31},
        config_sentence_transformers={"attend_to_expansion_tokens": False, **lengths},
    )
    assert read_sentence_files(tmp_path).max_tokens == max_tokens


@pytest.fixture
def colbert(tmp_path) -> Path:
    """A directory of Stanford's class, with a dense module's weights among those of the model."""
    path = write_encoder(ENCODERS["bert"], tmp_path / "colbert")
    (path / "modules.json").unlink()
    weights = {f"bert.{name}": values for name, values in ENCODERS["bert"].weights().items()}
    write_safetensors(path / "model.safetensors", weights | {"linear.weight": np.eye(7, 72, dtype=np.float32)}, "f32")
    metadata = {"dim": 7, "similarity": "cosine", "query_token_id": "b", "doc_token_id": "c", "attend_to_mask_tokens": False}
    (path / "artifact.metadata").write_text(json.dumps(metadata))
    return change(path, architectures=["HF_ColBERT"])


def test_stanfords_colbert_is_read_with_its_metadata(colbert):
    model = load_hf_directory(colbert)
    assert model.encoder == EncoderInfo(
        width=7, pooling="each", max_tokens=48, is_normalised=True, prompts={"query": "b", "document": "c"}
    )
    assert model.spec.ending.dense == (Dense(width=7, has_bias=False),)
    assert np.array_equal(model.weights["dense.0"].dequantize(), np.eye(7, 72))
    assert model.special_tokens["markers"] == ("b", "c")


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"dim": 0}, "hidden_size is 0"),
        ({"dim": 8}, "dense.0"),
        ({"similarity": "l2"}, "similarity is 'l2'"),
        ({"attend_to_mask_tokens": True}, "attend_to_mask_tokens is True"),
        ({"query_token_id": None}, "query_token_id"),
    ],
)
def test_what_colberts_metadata_must_not_say(colbert, changed, cause):
    file = colbert / "artifact.metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ModelError, match=cause):
        load_hf_directory(colbert)


def test_the_case_may_be_lowered_by_the_tokenizer(tmp_path):
    write(
        tmp_path,
        sentence_bert_config={"do_lower_case": True, "max_seq_length": 9},
        tokenizer={"normalizer": {"lowercase": True}},
    )
    assert read_sentence_files(tmp_path).max_tokens == 9
    write(tmp_path, tokenizer_config={"do_lower_case": False})
    with pytest.raises(ModelError, match="does not lower the case"):
        read_sentence_files(tmp_path)
    write(tmp_path, tokenizer_config={"do_lower_case": True}, tokenizer={"normalizer": {"lowercase": False}})
    assert read_sentence_files(tmp_path).max_tokens == 9
    write(tmp_path, tokenizer={"normalizer": {"normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}})
    assert read_sentence_files(tmp_path).max_tokens == 9


@pytest.fixture
def embedder(tmp_path) -> Path:
    return write_encoder(ENCODERS["bert"], tmp_path / "embedder")


@pytest.fixture
def classifier(tmp_path) -> Path:
    return write_encoder(ENCODERS["bert_classes"], tmp_path / "classifier")


def change(path: Path, **values: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return path


def test_the_longest_text_is_that_of_the_files_and_never_longer_than_the_positions(embedder):
    assert load_hf_directory(embedder).encoder.max_tokens == 48
    write(embedder, sentence_bert_config={"max_seq_length": 20})
    assert load_hf_directory(embedder).encoder.max_tokens == 20
    write(embedder, sentence_bert_config={"max_seq_length": 500})
    assert load_hf_directory(embedder).encoder.max_tokens == 48


def test_vectors_are_cut_as_the_files_say(embedder, classifier):
    with LLM(embedder) as llm:
        [whole] = llm.embed("a b")
    write(embedder, modules=[TRANSFORMER, POOLING, NORMALIZE], **{"1_Pooling__config": {}})
    write(embedder, config_sentence_transformers={"truncate_dim": 16, "max_active_dims": 3})
    with LLM(embedder) as llm:
        [cut], [shorter] = llm.embed("a b"), llm.embed("a b", dimensions=8)
        with pytest.raises(PenstockError, match="1 to 16"):
            llm.embed("a b", dimensions=17)
    assert cut.outputs.embedding == whole.outputs.embedding[:16], "not scaled to length 1, as in sentence-transformers"
    assert shorter.outputs.embedding == whole.outputs.embedding[:8]
    for path, dim, width in ((embedder, 500, 72), (classifier, 2, 3)):
        write(path, config_sentence_transformers={"truncate_dim": dim})
        assert load_hf_directory(path).encoder.width == width


def test_another_pooling_may_be_asked_for(embedder):
    assert load_hf_directory(embedder).spec.ending.pooling == "mean"
    for task in ("auto", "embed"):
        model = load_hf_directory(embedder, task=task, pooling="first")
        assert (model.spec.ending.pooling, model.encoder.pooling, model.encoder.task) == ("first", "first", Task.EMBED)


def test_a_head_says_what_a_model_is_for(classifier):
    model = load_hf_directory(classifier, task="classify")
    assert model.encoder.task == Task.CLASSIFY
    assert (model.encoder.labels, model.encoder.scores) == (("bad", "fair", "good"), ScoreFunction.SOFTMAX)
    assert model.spec.ending.dense == (Dense(width=72, activation="tanh"), Dense(width=3))
    assert read_hf_spec(classifier) == model.spec


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        ({}, ScoreFunction.SOFTMAX),
        ({"problem_type": "multi_label_classification"}, ScoreFunction.SIGMOID),
        ({"problem_type": "regression"}, ScoreFunction.NONE),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ScoreFunction.NONE),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, ScoreFunction.SIGMOID),
    ],
)
def test_the_function_of_the_scores(classifier, values, scores):
    assert load_hf_directory(change(classifier, **values)).encoder.scores == scores


def test_the_function_of_the_scores_is_that_of_sentence_transformers_own_file_first(classifier):
    """Since version 5.4, config.json has no function, or one that an older version wrote."""
    name = "torch.nn.modules.{}".format
    write(classifier, config_sentence_transformers={"activation_fn": name("linear.Identity")})
    assert load_hf_directory(classifier).encoder.scores == ScoreFunction.NONE
    change(classifier, sentence_transformers={"activation_fn": name("activation.Sigmoid")})
    assert load_hf_directory(classifier).encoder.scores == ScoreFunction.NONE
    write(classifier, config_sentence_transformers={"activation_fn": "my.code"})
    with pytest.raises(ModelError, match=r"config_sentence_transformers.json: activation_fn is 'my.code'"):
        load_hf_directory(classifier)


@pytest.mark.parametrize(("modality", "default"), [("text", "search"), ("message", "")])
def test_a_head_with_a_chat_template_has_no_default_prompt(classifier, modality, default):
    """Clients write the template, this prompt included, into both texts."""
    write(
        classifier,
        config_sentence_transformers={"prompts": {"search": "Find the answer"}, "default_prompt_name": "search"},
        sentence_bert_config={"transformer_task": "sequence-classification", "modality_config": {modality: {}}},
    )
    encoder = load_hf_directory(classifier).encoder
    assert (encoder.default_prompt, encoder.prompts) == (default, {"search": "Find the answer"})


@pytest.mark.parametrize(
    ("task", "pooling", "values", "cause"),
    [
        ("embed", None, {}, "a head of 3 labels"),
        ("rerank", None, {}, "a head of 3 labels"),
        ("generate", None, {}, "can.t generate text"),
        ("auto", "mean", {}, "must pool as its head expects"),
        ("auto", None, {"id2label": {"1": "a"}}, "does not name the columns"),
        ("auto", None, {"id2label": {}}, "does not name the columns"),
        ("auto", None, {"id2label": None, "num_labels": 0}, "num_labels is 0"),
        ("auto", None, {"id2label": None, "num_labels": 4}, "dense.1 is 3 x 72"),
        ("auto", None, {"sentence_transformers": {"activation_fn": "my.code"}}, "activation_fn is 'my.code'"),
    ],
)
def test_what_a_head_can_not_do_is_refused(classifier, task, pooling, values, cause):
    with pytest.raises(ModelError, match=cause):
        load_hf_directory(change(classifier, **values), task=task, pooling=pooling)


@pytest.mark.parametrize(("case", "looked_up"), [("bert", {"embed"}), ("bert_sparse", set())])
def test_an_embedding_takes_memory_if_a_splade_pooling_multiplies_by_it(tmp_path, case, looked_up):
    model = load_hf_directory(write_encoder(ENCODERS[case], tmp_path / "model"))
    held = [weight for name, weight in model.weights.items() if name not in looked_up]
    assert model.num_weight_bytes == sum(held_bytes(weight.format, weight.num_rows, weight.num_cols) for weight in held)


def test_a_splade_pooling_needs_a_head_of_words(tmp_path):
    path = write_encoder(ENCODERS["bert_sparse"], tmp_path / "model")
    model = load_hf_directory(path)
    assert model.encoder == EncoderInfo(width=263, pooling="sparse", max_tokens=48, has_own_lengths=True)
    assert read_hf_spec(path) == model.spec
    before = (path / "config.json").read_text()
    for values, cause in (
        ({"architectures": ["BertModel"]}, "follows BertModel"),
        ({"tie_word_embeddings": False}, "is False"),
    ):
        with pytest.raises(ModelError, match=cause):
            load_hf_directory(change(path, **values))
        (path / "config.json").write_text(before)
    with pytest.raises(ModelError, match="vectors are sparse"):
        load_hf_directory(path, pooling="mean")


@pytest.mark.parametrize("task", ["rerank", "classify"])
def test_a_model_without_a_head_embeds_alone(embedder, task):
    with pytest.raises(ModelError, match=f"no head for --task {task}"):
        load_hf_directory(embedder, task=task)


def test_a_decoder_embeds_if_it_is_asked_to(tmp_path):
    path = write_encoder(ENCODERS["qwen3_embedding"], tmp_path / "model")
    assert load_hf_directory(path).spec.ending.pooling == "last"
    writer = load_hf_directory(path, task="generate")
    assert (writer.spec.ending, writer.encoder) == (None, None)
    (path / "modules.json").unlink()
    assert load_hf_directory(path).spec.ending is None
    assert load_hf_directory(path, task="embed").encoder.task == Task.EMBED
    with pytest.raises(ModelError, match="has no effect on a model that generates text"):
        load_hf_directory(path, pooling="mean")


def test_a_decoder_beside_modules_that_are_not_computed_still_generates(tmp_path):
    path = write_encoder(ENCODERS["qwen3_embedding"], tmp_path / "model")
    write(path, modules=[TRANSFORMER, {"type": "sentence_transformers.cross_encoder.LogitScore", "path": "1_LogitScore"}])
    with pytest.raises(ModelError, match="of the type LogitScore") as refused:
        load_hf_directory(path)
    assert "--task generate" in refused.value.remedy
    assert load_hf_directory(path, task="generate").spec.ending is None


def test_a_dense_module_without_safetensors_is_refused(tmp_path):
    path = write_encoder(ENCODERS["bert_dense"], tmp_path / "model")
    (path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense.model\.safetensors"):
        load_hf_directory(path)
