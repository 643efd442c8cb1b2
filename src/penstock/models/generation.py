"""A model's own sampling defaults (`--generation-config`): generation_config.json, or `general.sampling.*` of a GGUF file.

We use `suppress_tokens` and the keys of vLLM's `get_diff_sampling_param`, and log all other keys that would change answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.models import checks
from penstock.models.weights import Generation, LoadedModel
from penstock.types.errors import ConfigError, ModelError
from penstock.types.sampling import MIN_TEMPERATURE, SamplingDefaults

FILE = "generation_config.json"
MAX_SUPPRESSED = 1024  # each suppressed token slows down every step a little

_NUMBERS: Mapping[str, tuple[str, type[int] | type[float], float, float]] = {
    "temperature": ("temperature", float, 0.0, 2.0),
    "general.sampling.temp": ("temperature", float, 0.0, 2.0),
    "top_p": ("top_p", float, 0.0, 1.0),
    "general.sampling.top_p": ("top_p", float, 0.0, 1.0),
    "min_p": ("min_p", float, 0.0, 1.0),
    "general.sampling.min_p": ("min_p", float, 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", float, 0.01, 100.0),
    "general.sampling.penalty_repeat": ("repetition_penalty", float, 0.01, 100.0),
    "top_k": ("top_k", int, -1, 2**31 - 1),
    "general.sampling.top_k": ("top_k", int, -1, 2**31 - 1),
    "max_new_tokens": ("max_tokens", int, 1, 2**31 - 1),
}
"""Key of a file -> field of `SamplingDefaults`, type, least and largest value."""
_SUPPRESSED = ("suppress_tokens", "tokenizer.ggml.suppress_tokens")
_PENALTY_LAST_N = "general.sampling.penalty_last_n"
_FACTS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "trust_remote_code"),
    *("use_cache", "cache_implementation", "cache_config", "return_dict_in_generate", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits"),
)
"""Keys without a warning: they do not change answers, or the loaders read them."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "max_length": (20,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    _PENALTY_LAST_N: (0, -1),
}
"""Key -> values without effect. For all other keys these are `_NOTHING`."""
_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})
_log = logging.getLogger(__name__)


def with_sampling_defaults(model: LoadedModel, choice: str) -> LoadedModel:
    """Return the model with sampling defaults. `choice`: `none`, `auto` (the model's own) or a folder.

    End tokens in the folder's generation_config.json are added. Raises ModelError for a value out of range, and ConfigError if
    the file is missing.
    """
    if choice == "none":
        return model
    generation, eos_token_ids = model.generation, model.eos_token_ids
    if choice != "auto":
        generation, added = _of_folder(Path(choice).expanduser(), model.spec.vocab_size)
        eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *added]))
    if generation is None:
        return model
    defaults = sampling_defaults(generation, model.spec.vocab_size)
    if words := defaults.words():
        _log.info("sampling defaults from %s: %s", generation.source, words)
    if names := ignored_settings(generation):
        _log.warning("%s: these settings are ignored: %s", generation.source, ", ".join(names))
    return replace(model, sampling=defaults, eos_token_ids=eos_token_ids)


def _of_folder(folder: Path, vocab_size: int) -> tuple[Generation, tuple[int, ...]]:
    from penstock.models.hf_config import JsonFile, read_eos_ids, read_json

    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"--generation-config names {str(folder)!r}, which has no {FILE}.",
            remedy="Set it to auto, none or a folder that has this file.",
        )
    file = read_json(path)
    return Generation(str(path), file.values), read_eos_ids(JsonFile(path, {}), file, vocab_size)


def sampling_defaults(generation: Generation, vocab_size: int) -> SamplingDefaults:
    """Return the sampling defaults in a model's settings. Raises ModelError for a value that a request may not have.

    A temperature below `MIN_TEMPERATURE` is 0, as in requests.
    """
    values = {key: value for key, value in generation.values.items() if value is not None}
    found: dict[str, Any] = {}
    for key, (name, kind, low, high) in _NUMBERS.items():
        if key in values:
            found[name] = _number(generation, key, kind, low, high)
    if 0.0 < found.get("temperature", 0.0) < MIN_TEMPERATURE:
        found["temperature"] = 0.0  # as in vLLM; Qwen2.5-VL has 1e-6
    if values.get(_PENALTY_LAST_N) == 0:  # the penalty covers no token
        found.pop("repetition_penalty", None)
    found["top_k"] = None if found.get("top_k") is None else max(0, found["top_k"])
    for key in _SUPPRESSED:
        if key in values:
            found["banned_token_sequences"] = _suppressed(generation, key, vocab_size)
    return SamplingDefaults(**found)


def ignored_settings(generation: Generation) -> list[str]:
    """Return the keys that would change answers and that we ignore, each with its value if that is short."""
    known = {*_NUMBERS, *_SUPPRESSED, *_FACTS}
    names = []
    for key, value in generation.values.items():
        neutral = (None, *_NEUTRAL[key]) if key in _NEUTRAL else _NOTHING
        if key not in known and not key.startswith("_") and value not in neutral:
            is_short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 20)
            names.append(f"{key[:60]} = {value!r}" if is_short else key[:60])
    return names


def _error(generation: Generation, cause: str) -> ModelError:
    return ModelError(f"{generation.source}: {cause}.", remedy="Correct the file, or start with --generation-config none.")


def _number(generation: Generation, key: str, kind: type[int] | type[float], low: float, high: float) -> float:
    value = generation.values[key]
    is_right = type(value) is int or (kind is float and type(value) is float)
    if not is_right or not low <= value <= high:
        bounds = f"{low:g} to {high:g}" if kind is float else f"{low} to {high}"
        raise _error(generation, f"{key} is {value!r}, not a number from {bounds}")
    return kind(value)


def _suppressed(generation: Generation, key: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    value = generation.values[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _error(generation, f"{key} is not a list of token ids")
    if len(value) > MAX_SUPPRESSED:
        raise _error(generation, f"{key} has {len(value)} tokens, more than the allowed {MAX_SUPPRESSED}")
    named = {f"{key}[{idx}]": token_id for idx, token_id in enumerate(value)}
    return tuple((token_id,) for token_id in sorted({*checks.token_ids(named, vocab_size, Path(generation.source)).values()}))
