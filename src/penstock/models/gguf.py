"""Loads a GGUF file as a `LoadedModel`. Matrices stay as they are, memory-mapped; vectors become F32.

Names of metadata keys and tensors: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures, checks, endings, rope
from penstock.models.architectures import Architecture, Head
from penstock.models.assembly import Sizes, find_pieces, put_together, shape_of, without_layers, without_shared_keys
from penstock.models.changed_rows import Factors, changed
from penstock.models.formats import Floats, WeightFormat, dequantize
from penstock.models.gguf_file import GgufFile, TensorEntry, matrix_shape, open_gguf
from penstock.models.layers import rope_base
from penstock.models.safetensors_file import FLOATS
from penstock.models.sentence import SentenceFiles
from penstock.models.weights import Generation, LoadedModel, WeightTensor, held_weight_bytes
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, Pooling, TextEnding, spec_of_equal_layers
from penstock.types.vocab import GgufVocab

BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OF_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ROPE_KINDS: Mapping[str, rope.Kind] = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
_CONTROL, _USER_DEFINED = 3, 4
_PRE_WITH_BOS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
"""Pre-tokenisers whose models begin a text with the bos token by default."""
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<|endoftext|>"),
        *("<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "<eos>", "</s>"),
    }
)
"""Tokens that end a turn or a document; many files name only one of them as `eos`. Source: `special_eog_ids` of llama.cpp."""
_ENDS_OF_REPLIES = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
"""If a vocabulary has all tokens of a set (gpt-oss, Solar), `<|end|>` ends a message and not the reply."""
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
T = TypeVar("T")
_log = logging.getLogger(__name__)


def load_gguf(
    path: Path,
    *,
    name: str = "",
    max_weight_bytes: int | None = None,
    floats: Floats = Floats.BF16,
    check_vocab: Callable[[GgufVocab], None] | None = None,
    served_len: int | None = None,
    experts_on_disk: bool = False,
    task: str = "auto",
    pooling: Pooling | None = None,
) -> LoadedModel:
    """Load the model of a GGUF file, or of a split one by its first file. `name` defaults to the file's stem.

    `load.LoadOptions` describes the other options. Raises ModelError before any weight is read.
    """
    _refuse_other_formats(path)
    file = open_gguf(path)
    architecture_name, architecture = _find_architecture(file)
    head = architecture.gguf_head(file)
    ending = _choose_ending(file, architecture, head, task, pooling)
    top = endings.top_names(architecture.gguf_top, head, ending)
    unread = () if ending is None or architecture.is_encoder else ("output.weight",)
    tensors = _with_scales({name: _flattened(entry) for name, entry in file.tensors.items()}, architecture)
    stored = {name: entry for name, entry in tensors.items() if name not in (*_OF_ROPE, *unread)}
    pieces = find_pieces(stored, top=top, block=BLOCK, layer=architecture.gguf_layer)
    entries = {name: stored[found[0].tensor] for name, found in pieces.items()}
    spec = endings.with_ending(
        architecture.of_gguf(file, _read_spec(file, architecture_name, architecture, entries, served_len)), ending
    )
    checks.check_spec(spec, path)
    pieces = without_shared_keys(pieces, spec)
    pieces = without_layers(pieces, "blk.", range(spec.num_layers, file.require(f"{file.architecture}.block_count", int)))
    entries = {name: entries[name] for name in pieces}
    program = architecture.describe(spec)
    shapes = {name: matrix_shape(entry) for name, entry in stored.items()}
    sizes = Sizes(shapes, checks.weight_shapes(program), spec)
    found_shapes = {name: shape_of(name, found, sizes) for name, found in pieces.items()}
    if head is not None and head.is_difference:
        found_shapes["dense.0"] = 1, found_shapes["dense.0"][1]
    checks.check_weights(program, found_shapes, path)
    for key, found in pieces.items():
        if found[0].layout is not None:
            rows, cols = found_shapes[key]
            shape = (cols,) if key.endswith("_bias") else (rows, cols)
            entries[key] = replace(entries[key], shape=shape, num_bytes=entries[key].num_bytes // len(found[0].names))
    held = {
        name: held_weight_bytes(name, WeightFormat.F32 if len(entry.shape) == 1 else entry.format, matrix_shape(entry), floats)
        for name, entry in entries.items()
    } | dict.fromkeys(spec.looked_up, 0)  # their rows are read from the file
    checks.check_memory(held, max_weight_bytes, path, experts_on_disk=experts_on_disk)
    vocab = read_vocab(file, spec.vocab_size)
    eos_token_ids = read_eos_ids(file, vocab)
    if check_vocab is not None:
        try:
            check_vocab(vocab)
        except ModelError as error:
            raise ModelError(f"{path}: {error.message}", remedy=error.remedy) from error
    _warn_if_larger_in_memory(path, entries, held)
    weights = {
        key: load_tensor(
            file, entries[key], key, rope.half_split_rows(key, spec) if architecture.is_interleaved_in_gguf else None
        )
        if found[0].layout is None
        else put_together(key, found, sizes, lambda piece: [load_tensor(file, stored[piece.tensor], piece.tensor)])
        for key, found in pieces.items()
    }
    if head is not None and head.is_difference:
        yes, no = weights["dense.0"].dequantize()
        weights["dense.0"] = WeightTensor("dense.0", 1, len(yes), WeightFormat.F32, (yes - no)[None])
    return LoadedModel(
        name=name or path.stem,
        spec=spec,
        weights=weights,
        tokenizer_source=vocab,
        chat_templates=read_chat_templates(file),
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=eos_token_ids,
        path=path,
        generation=_read_generation(file),
        encoder=endings.encoder_info(spec, endings.usual_scores(spec), SentenceFiles()),
    )


_POOLINGS: Mapping[int, Pooling] = {0: "each", 1: "mean", 2: "first", 3: "last"}


def _choose_ending(
    file: GgufFile, architecture: Architecture, head: Head | None, task: str, pooling: Pooling | None
) -> TextEnding | None:
    key = file.architecture
    kind = file.get(f"{key}.pooling_type", int)
    if kind is not None and kind not in _POOLINGS and head is None:
        raise checks.unsupported(file.path, f"{key}.pooling_type is {kind}", f"{', '.join(map(str, _POOLINGS))} are")
    if kind == 0 and not architecture.is_encoder:  # a decoder without pooling writes text
        kind = None
    labels: tuple[str, ...] = ()
    if head is not None:
        last = file.tensors[f"{head.layers[-1].name}.weight"]
        labels = tuple(file.get_list(f"{key}.classifier.output_labels", str))
        labels = labels or tuple(f"LABEL_{number}" for number in range(matrix_shape(last)[0]))
        labels = labels[:1] if head.is_difference else labels
    return endings.choose_ending(
        file.path,
        architecture,
        files=SentenceFiles(pooling=None if kind is None else _POOLINGS.get(kind), is_normalised=True),
        cannot_generate=architecture.is_encoder or head is not None,
        head=head,
        labels=labels,
        hidden_size=file.require(f"{key}.embedding_length", int),
        task=task,
        pooling=pooling,
    )


def _with_scales(tensors: Mapping[str, TensorEntry], architecture: Architecture) -> dict[str, TensorEntry]:
    """Return the tensors, those in NVFP4 with the scales beside them. Scales of activations are left out."""
    found = dict(tensors)
    for name, entry in tensors.items():
        if entry.format is WeightFormat.NVFP4 and len(entry.shape) > 1:
            stem = name.removesuffix("weight")
            found.pop(f"{stem}input_scale", None)
            scale = BLOCK.fullmatch(f"{stem}scale")
            if scale is None or scale[2] not in architecture.gguf_layer:  # Gemma 4 scales the experts' shares by it
                found[name] = replace(entry, scale=found.pop(f"{stem}scale", None))
    return found


def _flattened(entry: TensorEntry) -> TensorEntry:
    """Return the entry, reshaped to a vector if it is a Mamba-2 vector that llama.cpp stores as a matrix."""
    is_vector = entry.name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight"))
    return replace(entry, shape=(math.prod(entry.shape),)) if is_vector else entry


def load_tensor(file: GgufFile, entry: TensorEntry, name: str, order: NDArray[np.intp] | None = None) -> WeightTensor:
    """Return a tensor as the weight `name`. Its row i (in a vector: value i) is row `order[i]` of the tensor."""
    num_rows, num_cols = matrix_shape(entry)
    stored = file.tensor_bytes(entry).view(FLOATS.get(entry.format.name, np.uint8)).reshape(num_rows, -1)
    if len(entry.shape) > 1:
        tensor = WeightTensor(name, num_rows, num_cols, entry.format, stored, order=order)
        return tensor if entry.scale is None else changed(tensor, [_factors(file, entry, entry.scale)])
    values = dequantize(stored, entry.format, num_cols)
    return WeightTensor(name, num_rows, num_cols, WeightFormat.F32, values if order is None else values[:, order])


def _factors(file: GgufFile, entry: TensorEntry, scale: TensorEntry) -> Factors:
    num_matrices = math.prod(entry.shape[:-2])
    if scale.shape not in ((1,), (num_matrices,)):
        raise file.error(f"{scale.name} has the shape {list(scale.shape)}, not [{num_matrices}]")
    (values,) = load_tensor(file, scale, scale.name).dequantize()
    if not np.isfinite(values).all():
        raise file.error(f"{scale.name} has numbers that are not finite")
    return Factors(np.repeat(values, matrix_shape(entry)[0] // len(values)))


def _warn_if_larger_in_memory(path: Path, entries: Mapping[str, TensorEntry], held: Mapping[str, int]) -> None:
    num_stored, num_held = sum(entry.num_bytes for entry in entries.values()), sum(held.values())
    if num_held > 1.1 * num_stored:
        words = "%s: %d MiB of weights take %d MiB in memory, where each has 4, 8 or 16 bits (docs/kernels.md)"
        _log.warning(words, path.name, num_stored >> 20, num_held >> 20)


def _refuse_other_formats(path: Path) -> None:
    if path.suffix == ".gguf" or not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            remedy = "Penstock reads .gguf files and Hugging Face directories (config.json, safetensors, tokenizer.json)."
            raise ModelError(f"{path}: this is not a GGUF file.", remedy=remedy)


def _find_architecture(file: GgufFile) -> tuple[str, Architecture]:
    if file.get("general.type", str) == "adapter":
        raise ModelError(
            f"{file.path}: this is an adapter (LoRA), not a model.",
            remedy="Serve its base model with --lora-modules NAME=PATH, or merge the adapter with --merge-lora PATH.",
        )
    name = architectures.our_name(file.architecture, architectures.GGUF_NAMES, file.path)
    return name, architectures.find(name)


def _read_spec(
    file: GgufFile, name: str, architecture: Architecture, entries: Mapping[str, TensorEntry], served_len: int | None
) -> ModelSpec:
    """Read the keys that most models share. `Architecture.of_gguf` applies the others."""
    key = file.architecture
    if "embed" not in entries:
        raise file.error("the tensor token_embd.weight is missing")
    if file.get(f"{key}.attention.causal", bool) is False and not architecture.is_encoder:
        raise checks.unsupported(file.path, f"{key}.attention.causal is false", "models that generate text are")
    sizes = _read_sizes(file, key, matrix_shape(entries["embed"])[0], architecture)
    checks.check_sizes(sizes, file.path)
    parameters = _read_rope(file, key, sizes, architecture)
    served_len = served_len or sizes["max_model_len"]
    rotation = checks.rotation(parameters, sizes["head_dim"], served_len, file.path)
    sizes["max_model_len"] = checks.longest_text(sizes["max_model_len"], served_len, rotation.stretched_len)
    return spec_of_equal_layers(
        architecture=name,
        rope_inv_freq=(),
        has_qkv_bias="layers.0.q_bias" in entries,
        norm_eps=file.get(f"{key}.attention.layer_norm_epsilon", float)
        or file.require(f"{key}.attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings="output" not in entries,
        **sizes,
    ).with_layers(lambda _, layer: checks.with_facts(layer, entries, rotation))


def _read_sizes(file: GgufFile, key: str, vocab_size: int, architecture: Architecture) -> dict[str, int]:
    """Return the sizes. For a list with a number per layer, which `of_gguf` may read, return the largest one."""
    hidden_size = file.require(f"{key}.embedding_length", int)
    num_heads = file.require(f"{key}.attention.head_count", int)
    head_dim = file.get(f"{key}.attention.key_length", int) or (hidden_size // num_heads if num_heads else 0)
    if architecture.has_latents_in_gguf:
        head_dim = file.require(f"{key}.rope.dimension_count", int)
    elif file.get(f"{key}.attention.value_length", int, head_dim) != head_dim:
        setting = f"{key}.attention.value_length is {file.metadata[f'{key}.attention.value_length']}"
        raise checks.unsupported(file.path, setting, f"values as wide as keys, {head_dim}, are")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": _num_layers(file, key, architecture),
        "num_heads": num_heads,
        "num_kv_heads": _largest(file, f"{key}.attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "intermediate_size": _largest(file, f"{key}.feed_forward_length")
        or file.get(f"{key}.expert_feed_forward_length", int)
        or file.require(f"{key}.feed_forward_length", int),
        "max_model_len": file.require(f"{key}.context_length", int),
    }


def _num_layers(file: GgufFile, key: str, architecture: Architecture) -> int:
    """Return the number of layers without those of multi-token prediction, which come last."""
    num_layers, num_more = file.require(f"{key}.block_count", int), 0
    if architecture.has_further_layers:
        num_more = file.get(f"{key}.nextn_predict_layers", int) or 0
    if num_more and not 0 < num_more < num_layers:
        raise file.error(f"{key}.nextn_predict_layers is {num_more}")
    return num_layers - num_more


def _largest(file: GgufFile, key: str) -> int | None:
    """Return a number, or the largest of a list with one per layer, in which layers without attention have 0."""
    return max(file.get_list(key, int), default=None) if isinstance(file.metadata.get(key), list) else file.get(key, int)


def _read_rope(file: GgufFile, key: str, sizes: Mapping[str, int], architecture: Architecture) -> rope.RopeParameters:
    head_dim, trained_len = sizes["head_dim"], sizes["max_model_len"]
    dim = file.get(f"{key}.rope.dimension_count", int) or head_dim
    if dim != head_dim and not (architecture.has_partial_rope and 0 < dim < head_dim and dim % 2 == 0):
        raise checks.unsupported(file.path, f"{key}.rope.dimension_count is {dim}", f"whole heads, {head_dim}, are")
    base = rope_base(file, f"{key}.rope.freq_base", 10000.0)
    local_base = file.get(f"{key}.rope.freq_base_swa", float, base)
    if local_base != base and not architecture.has_local_base_in_gguf:
        raise checks.unsupported(file.path, f"{key}.rope.freq_base_swa is {local_base}", f"that of all layers, {base}, is")
    at = f"{key}.rope.scaling"
    scaling = file.get(f"{at}.type", str) or "linear"
    if scaling not in _ROPE_KINDS:
        raise checks.unsupported(file.path, f"{at}.type is {scaling!r}", f"{', '.join(_ROPE_KINDS)} are")
    factor_key = f"{at}.factor"
    if factor_key not in file.metadata:
        factor_key = f"{key}.rope.scale_linear"  # the name before 2023-11; as in llama.cpp, the new one wins
    kind, factor = _ROPE_KINDS[scaling], _positive(file, factor_key)
    divisors, long, short = (_read_factors(file, name, dim // 2) for name in _OF_ROPE)
    if long and short:  # as in llama.cpp, whatever the type says
        kind = "longrope"
    elif kind == "longrope":
        raise file.error("the tensors rope_factors_long.weight and rope_factors_short.weight are missing")
    original_len = file.get(f"{at}.original_context_length", int) or trained_len
    if not 1 <= original_len <= checks.MAX_MODEL_LEN:
        raise file.error(f"{at}.original_context_length is {original_len}")
    return rope.RopeParameters(
        kind=kind,
        theta=base,
        dim=dim,
        trained_len=trained_len,
        original_len=original_len,
        factor=factor,
        attention_factor=_attention_factor(file, at, factor, is_yarn=kind == "yarn"),
        beta_fast=_positive(file, f"{at}.yarn_beta_fast", 32.0),
        beta_slow=_positive(file, f"{at}.yarn_beta_slow", 1.0),
        truncate=architecture.is_yarn_truncated_in_gguf,
        short_factor=short,
        long_factor=long,
        divisors=divisors,
        query_growth=file.get(f"{key}.attention.temperature_scale", float) or 0.0,
    )


def _attention_factor(file: GgufFile, at: str, factor: float, *, is_yarn: bool) -> float:
    for name, unset in (("alpha", 0.0), ("yarn_ext_factor", -1.0)):
        if (found := file.get(f"{at}.{name}", float)) not in (None, unset, 1.0):
            raise checks.unsupported(file.path, f"{at}.{name} is {found}", "only 1 is")
    growth = 0.1 * math.log(max(1.0, factor)) if is_yarn else 0.0
    attention_factor, given = _positive(file, f"{at}.attn_factor"), file.get(f"{at}.yarn_attn_factor", float) or 1.0
    # Converters write config.json's `attention_factor`, usually the computed one, or its `attn_factor`, which cancels that.
    if math.isclose(given * (1.0 + growth), 1.0, rel_tol=1e-6):
        attention_factor *= given
    elif given != 1.0 and not math.isclose(given, 1.0 + growth, rel_tol=1e-6):
        raise checks.unsupported(file.path, f"{at}.yarn_attn_factor is {given}", "only 1 is")
    if is_yarn:  # as in llama.cpp's llama-context.cpp
        multiplier = f"{at}.yarn_log_multiplier"
        scaled = growth * _positive(file, multiplier) if file.get(multiplier, float) else 0.0
        attention_factor *= (1.0 + growth) / (1.0 + scaled)
    return attention_factor


def _positive(file: GgufFile, key: str, default: float = 1.0) -> float:
    """Return a number, or `default` if it is missing or 0, which converters write for an unset one."""
    value = file.get(key, float) or default
    if not math.isfinite(value) or value <= 0.0:
        raise file.error(f"{key} is {value}, not a positive number")
    return value


def _read_factors(file: GgufFile, name: str, num_pairs: int) -> tuple[float, ...]:
    """Return the numbers of a tensor, which are positive, or none without it."""
    if (entry := file.tensors.get(name)) is None:
        return ()
    if matrix_shape(entry) != (1, num_pairs):
        raise file.error(f"{entry.name} has the shape {entry.shape}, not ({num_pairs},)")
    factors = tuple(load_tensor(file, entry, entry.name).dequantize()[0].tolist())
    if not all(math.isfinite(factor) and factor > 0.0 for factor in factors):
        raise file.error(f"{entry.name} has values that are not positive")
    return factors


def read_vocab(file: GgufFile, vocab_size: int) -> GgufVocab:
    """Return the tokenizer's vocabulary, with llama.cpp's values for missing keys. Raises ModelError."""
    model = file.require("tokenizer.ggml.model", str)
    pre = file.get("tokenizer.ggml.pre", str) or ""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        raise file.error(f"the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    _refuse_unsupported(file, model)
    is_sentencepiece, is_bert = model == "llama", model == "bert"
    needs_bos = model == "gemma4" or pre in ("gemma4", "granite-embed-multi-311m")  # as in llama.cpp, whatever the file says
    ids = _ids(file, len(tokens), "bos", "eos", "unknown")
    if is_bert:  # cls and sep enclose a text
        named = {"cls": "bos", "seperator": "eos"}
        ids = {named[name]: token_id for name, token_id in _ids(file, len(tokens), *named).items()} | ids
    return GgufVocab(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=_per_token(file, "tokenizer.ggml.token_type", int, len(tokens)) or [1] * len(tokens),
        merges=file.get_list("tokenizer.ggml.merges", str),
        scores=_per_token(file, "tokenizer.ggml.scores", float, len(tokens)),
        bos_token_id=ids.get("bos"),
        eos_token_id=ids.get("eos"),
        unknown_token_id=ids.get("unknown"),
        padding_token_id=_padding_id(file, len(tokens)),
        add_bos_token=("bos" in ids and needs_bos)
        or _flag(file, "add_bos_token", default="bos" in ids and (is_sentencepiece or is_bert or pre in _PRE_WITH_BOS)),
        add_eos_token=_flag(file, "add_eos_token", default="eos" in ids and model in ("bert", "t5")),
        add_space_prefix=_flag(file, "add_space_prefix", default=is_sentencepiece),
        strips_after_added=is_sentencepiece and file.architecture == "phi3",  # no key says so; llama.cpp looks at the name
        remove_extra_whitespaces=_flag(file, "remove_extra_whitespaces", default=False),
        charsmap=bytes([value & 0xFF for value in file.get_list(_CHARSMAP, int)]),
        lowercase=_flag(file, "normalizer.lowercase", default=True),
        strip_accents=_flag(file, "normalizer.strip_accents", default=True),
    )


def read_chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by name. The one without a name is `default`."""
    prefix = "tokenizer.chat_template"
    keys = [key for key in file.metadata if key == prefix or key.startswith(f"{prefix}.")]
    return {key.removeprefix(prefix).removeprefix(".") or "default": file.require(key, str) for key in keys}


def _read_generation(file: GgufFile) -> Generation | None:
    keys = [key for key in file.metadata if key.startswith("general.sampling.") or key == "tokenizer.ggml.suppress_tokens"]
    return Generation(str(file.path), {key: file.metadata[key] for key in keys}) if keys else None


def read_eos_ids(file: GgufFile, vocab: GgufVocab) -> tuple[int, ...]:
    """Return the ids of tokens that end a reply: `eos`, `eot` and `eom`, then known ones such as `<|im_end|>`."""
    named = [] if vocab.eos_token_id is None else [vocab.eos_token_id]
    named += _ids(file, len(vocab.tokens), "eot", "eom").values()
    by_text = [
        token_id
        for token_id, text in enumerate(vocab.tokens)
        if text in _ENDS and vocab.token_types[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    others = [token_id for token_id in by_text if vocab.tokens[token_id] != "<|end|>"]
    if others != by_text and any(texts.issubset(vocab.tokens) for texts in _ENDS_OF_REPLIES):
        by_text = others
    return tuple(dict.fromkeys([*named, *by_text]))


def _refuse_unsupported(file: GgufFile, model: str) -> None:
    num = len(file.get_list(_CHARSMAP, int))
    if num and model != "t5":
        raise checks.unsupported(file.path, f"{_CHARSMAP} has {num} entries", "only the model 't5' can have one")
    if model == "gpt2" and _flag(file, "remove_extra_whitespaces", default=False):
        setting = "tokenizer.ggml.remove_extra_whitespaces is true in a 'gpt2' vocabulary"
        raise checks.unsupported(file.path, setting, "only SentencePiece vocabularies can have it")


def _ids(file: GgufFile, num_tokens: int, *names: str) -> dict[str, int]:
    ids = {f"tokenizer.ggml.{name}_token_id": file.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    found = checks.token_ids(ids, num_tokens, file.path)
    return {name: found[key] for name, key in zip(names, ids, strict=True) if key in found}


def _padding_id(file: GgufFile, num_tokens: int) -> int | None:
    """Return the padding token's id. An id out of range, as in some fine-tuned models, counts as None: we never pad."""
    value = file.get("tokenizer.ggml.padding_token_id", int)
    if value is not None and not 0 <= value < num_tokens:
        _log.info("%s: tokenizer.ggml.padding_token_id is %d, which is not in the vocabulary: ignored", file.path, value)
        return None
    return value


def _per_token(file: GgufFile, key: str, kind: type[T], num_tokens: int) -> list[T]:
    values = file.get_list(key, kind)
    if values and len(values) != num_tokens:
        raise file.error(f"{key} has {len(values)} entries for {num_tokens} tokens")
    return values


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    return bool(file.get(f"tokenizer.ggml.{name}", bool, default))
