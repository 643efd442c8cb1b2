"""Draft heads: the layouts of their files, what they compute, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import program as prog
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.eagle import DraftHead, load_head
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types.errors import ModelError
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.tiny_heads import F32, NUM_LOGITS, HeadInNumpy, config_of, guessable, head_weights, write_head
from support.tiny_models import TinyLlama, encode, write_encoded, write_gguf, write_hf

TARGET = TinyLlama(num_layers=8)
SIZES: dict[str, Any] = {"num_blocks": 40, "block_size": 16, "max_rows": 4, "max_step_tokens": 64, "max_model_len": 256}
TOKENS = tuple(np.random.default_rng(1).integers(0, TARGET.vocab_size, 50).tolist())
GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_hf(tmp_path_factory.mktemp("models") / "model", TARGET)
    return load_model(resolve(str(folder), folder.parent))


def computed(executor: Any, token_ids: tuple[int, ...], features: bytes = b"", parts: tuple[int, ...] = ()) -> tuple[F32, Any]:
    """Return what one step or several kept of a prompt, and the last result."""
    kept: list[F32] = []
    begin, result = 0, None
    ends = [*parts, len(token_ids)]
    width = len(features) // len(token_ids)
    for number, end in enumerate(ends):
        admits = () if number else (AdmitRow("a", token_ids, len(token_ids), (1, 2, 3, 4), 0, GREEDY),)
        row = RowPlan("a", begin, end - begin, (), samples=int(end == len(token_ids)))
        plan = StepPlan(number, 0, admits, (row,), (), features=features[begin * width : end * width])
        result = executor.collect(executor.submit(plan))
        kept.append(np.frombuffer(result.features, np.float32).reshape(-1, TARGET.hidden_size))
        begin = end
    return np.concatenate(kept), result


def guesses(executor: Any, features: F32, num: int) -> tuple[list[int], list[float]]:
    _, result = computed(executor, TOKENS[1:], features.tobytes(), parts=(20,))
    found: list[int] = []
    chances: list[float] = []
    for place in range(num):
        found.append(result.token_ids["a"][0])
        chances.append(float(np.exp(result.logprobs["a"][0].logprob)))
        row = RowPlan("a", len(TOKENS) - 1 + place, 1, (), 1)
        plan = StepPlan(10 + place, 0, (), (row,), (), features=result.features)
        result = executor.collect(executor.submit(plan))
    return found, chances


def sources(head: DraftHead, model: LoadedModel) -> F32:
    """The residual streams that the features are made of, by the model's program cut before each of the three layers."""
    found: list[F32] = []
    for layer in head.layers:
        program = describe(model.spec)
        at = next(at for at, op in enumerate(program.ops) if getattr(op, "weight", None) == f"layers.{layer}.attn_norm")
        gathered = prog.GatherRows("sampled_x", "x")
        before = replace(program, ops=(*program.ops[:at], gathered, *program.ops[-2:]), kept="x")
        executor = ReferenceExecutor(model, before, **SIZES)
        batch = StepPlan(
            0, 0, (AdmitRow("a", TOKENS, len(TOKENS), (1, 2, 3, 4), 0, GREEDY),), (RowPlan("a", 0, len(TOKENS), (), 0),), ()
        )
        result = executor.collect(executor.submit(batch))
        found.append(np.frombuffer(result.features, np.float32).reshape(len(TOKENS), -1))
    return np.concatenate(found, axis=1)


class TestWhatTheyCompute:
    @pytest.mark.parametrize("norms_first", [False, True])
    def test_guesses_follow_the_published_equations(self, model: LoadedModel, tmp_path: Path, norms_first: bool) -> None:
        head = load_head(write_head(tmp_path / "head", TARGET, extra={"norm_before_residual": norms_first}), model)
        in_numpy = HeadInNumpy(TARGET, norms_first=norms_first)
        features = in_numpy.features(sources(head, model))[: len(TOKENS) - 1]
        for make, tolerance in ((ReferenceExecutor, 0.02), (NativeExecutor, 0.04)):
            found, found_chances = guesses(make(head.model, head.program, **SIZES), features, 4)
            judged = in_numpy.judged(TOKENS, features, found)
            assert all(chance > 0.8 * best for chance, best in judged)
            assert found_chances == pytest.approx([chance for chance, _ in judged], abs=tolerance)

    def test_features_are_those_of_three_layers(self, model: LoadedModel, tmp_path: Path) -> None:
        head = load_head(write_head(tmp_path / "head", TARGET), model)
        with_features = head.attached(model)
        assert with_features.program is not None
        wanted = HeadInNumpy(TARGET).features(sources(head, model))
        for make, tolerance in ((ReferenceExecutor, 0.002), (NativeExecutor, 0.1)):
            for parts in ((), (7, 30)):
                found, result = computed(make(with_features, with_features.program, **SIZES), TOKENS, parts=parts)
                error = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
                assert error.max() < tolerance
                assert len(result.token_ids) == 1

    def test_the_model_answers_the_same_bits(self, model: LoadedModel, tmp_path: Path) -> None:
        with_features = load_head(write_head(tmp_path / "head", TARGET), model).attached(model)
        assert with_features.program is not None
        for make in (ReferenceExecutor, NativeExecutor):
            logits = [
                make(one, one.program or describe(one.spec), **SIZES).forward_logits(TOKENS) for one in (model, with_features)
            ]
            assert np.array_equal(*logits)

    def test_it_reads_the_model_s_embeddings_in_its_file(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf", TARGET)
        quantised = load_model(resolve(str(path), tmp_path))
        head = load_head(write_head(tmp_path / "head", TARGET), quantised)
        assert head.model.weights["embed"] is quantised.weights["embed"]
        assert head.num_bytes < head.model.num_weight_bytes + 2 * head.fc.num_rows * head.fc.num_cols + 1


class TestFiles:
    def test_speculators_write_the_layer_apart(self, model: LoadedModel, tmp_path: Path) -> None:
        usual = load_head(write_head(tmp_path / "usual", TARGET), model)
        nested = {key: value for key, value in config_of(TARGET).items() if key not in ("architectures", "draft_vocab_size")}
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": NUM_LOGITS}
        path = write_head(tmp_path / "other", TARGET, renamed={"midlayer.": "layers.0."})
        _rewrite(path, {**config, "transformer_layer_config": nested})
        assert load_head(path, model).program.kept != usual.program.kept, "features are normed first, if it does not say"
        _rewrite(path, {**config, "transformer_layer_config": nested, "norm_before_residual": False})
        other = load_head(path, model)
        assert other.program == usual.program
        assert other.layers == usual.layers == (2, 4, 5)
        assert other.model.weights.keys() == usual.model.weights.keys()

    @pytest.mark.parametrize(
        ("extra", "layers"),
        [
            ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ],
    )
    def test_it_may_name_the_layers(
        self, model: LoadedModel, tmp_path: Path, extra: dict[str, Any], layers: tuple[int, ...]
    ) -> None:
        assert load_head(write_head(tmp_path / "head", TARGET, extra=extra), model).layers == layers

    def test_a_head_may_have_embeddings_and_all_tokens(self, model: LoadedModel, tmp_path: Path) -> None:
        path = write_head(tmp_path / "head", TARGET, extra={"draft_vocab_size": None})
        weights = head_weights(TARGET)
        own = np.full((TARGET.vocab_size, TARGET.hidden_size), 0.5, np.float32)
        weights |= {"embed_tokens.weight": own, "lm_head.weight": own}
        write_encoded(path / "model.safetensors", {n: ("BF16", one.shape, encode(one, "bf16")) for n, one in weights.items()})
        head = load_head(path, model)
        assert head.model.weights["embed"].dequantize()[0, 0] == 0.5
        (logits,) = [op for op in head.program.ops if isinstance(op, prog.Logits)]
        assert logits.tokens is None

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            ({"vocab_size": 300}, "guesses for a model with 300 tokens"),
            ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
            ({"norm_output": True}, "norm_output is True"),
            ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
            ({"quantization_config": {}}, "quantization_config is {}"),
            ({"speculators_model_type": "eagle"}, "of the kind 'eagle'"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "no such three"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "no such three"),
            ({"eagle_aux_hidden_state_layer_ids": [3, 1, 5]}, "no such three"),
            ({"intermediate_size": 64}, "is 96 x 64, but"),
            ({"target_hidden_size": 48}, "fc is 64 x 192, but"),
        ],
    )
    def test_settings_that_do_not_fit(self, model: LoadedModel, tmp_path: Path, extra: dict[str, Any], words: str) -> None:
        with pytest.raises(ModelError, match=words):
            load_head(write_head(tmp_path / "head", TARGET, extra=extra), model)

    @pytest.mark.parametrize(
        ("tensor", "words"),
        [("d2t", "d2t is missing"), ("fc.weight", "fc is"), ("lm_head.weight", "lm_head.weight is missing")],
    )
    def test_tensors_that_are_missing(self, model: LoadedModel, tmp_path: Path, tensor: str, words: str) -> None:
        with pytest.raises(ModelError, match=words):
            load_head(write_head(tmp_path / "head", TARGET, without=(tensor,)), model)

    def test_tensors_that_it_does_not_know(self, model: LoadedModel, tmp_path: Path) -> None:
        path = write_head(tmp_path / "head", TARGET, renamed={"midlayer.hidden_norm.weight": "midlayer.other.weight"})
        with pytest.raises(ModelError, match=r"layers\.0\.attn_norm is missing"):
            load_head(path, model)

    def test_tokens_beyond_the_vocabulary(self, model: LoadedModel, tmp_path: Path) -> None:
        path = write_head(tmp_path / "head", TARGET)
        weights = {n: ("BF16", one.shape, encode(one, "bf16")) for n, one in head_weights(TARGET).items()}
        far = guessable(TARGET) + TARGET.vocab_size
        write_encoded(path / "model.safetensors", {**weights, "d2t": ("I64", far.shape, far.tobytes())})
        with pytest.raises(ModelError, match="d2t does not name 100 of 264 tokens"):
            load_head(path, model)

    @pytest.mark.parametrize(
        ("name", "dtype", "shape", "words"),
        [
            ("norm.weight", "I64", (64,), "tensors of type I64 are not supported"),
            ("norm.weight", "BF16", (2, 1, 64), r"norm has the shape \(2, 1, 64\)"),
            ("fc.weight", "BF16", (64, 96), "fc is 64 x 96, but"),
        ],
    )
    def test_malformed_tensors(
        self, model: LoadedModel, tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...], words: str
    ) -> None:
        path = write_head(tmp_path / "head", TARGET)
        tensors = {n: ("BF16", one.shape, encode(one, "bf16")) for n, one in head_weights(TARGET).items()}
        ids = guessable(TARGET) - np.arange(NUM_LOGITS)
        size = int(np.prod(shape)) * (8 if dtype == "I64" else 2)
        write_encoded(
            path / "model.safetensors", {**tensors, "d2t": ("I64", ids.shape, ids.tobytes()), name: (dtype, shape, bytes(size))}
        )
        with pytest.raises(ModelError, match=words):
            load_head(path, model)

    def test_another_width_of_embeddings(self, tmp_path: Path) -> None:
        wide = TinyLlama(num_layers=8, hidden_size=96)
        model = load_model(resolve(str(write_hf(tmp_path / "wide", wide)), tmp_path))
        with pytest.raises(ModelError, match="reads embeddings of 64 columns, and those of wide have 96"):
            load_head(write_head(tmp_path / "head", TARGET, extra={"target_hidden_size": 64}), model)

    def test_it_is_no_model(self, tmp_path: Path) -> None:
        path = write_head(tmp_path / "head", TARGET)
        with pytest.raises(ModelError, match=r"this is a draft head .* --speculation-model"):
            load_model(resolve(str(path), tmp_path))


def _rewrite(path: Path, config: dict[str, Any]) -> None:
    import json

    (path / "config.json").write_text(json.dumps(config))
