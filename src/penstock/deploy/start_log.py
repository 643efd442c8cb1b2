"""Logs a model that starts: its weights, its settings and its KV cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.config.units import format_size
from penstock.deploy import device
from penstock.deploy.blueprint import Blueprint
from penstock.types.errors import counted

if TYPE_CHECKING:
    from penstock.models.formats import WeightFormat
    from penstock.models.weights import LoadedModel

_log = logging.getLogger(__name__)


def log_model(blueprint: Blueprint, model: LoadedModel) -> None:
    formats: dict[WeightFormat, int] = {}
    for tensor in model.weights.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.num_bytes
    shares = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(formats.items(), key=lambda item: -item[1]))
    _log.info("model %s (%s), weights %s", model.name, model.spec.architecture, shares)
    if model.encoder is not None:
        capacity = blueprint.measured_plan.capacity
        _log.info(
            "the model only reads texts, of up to %s: %s, pooling %s, %s; up to %d texts and %s in one step",
            counted(capacity.max_model_len, "token"),
            model.encoder.task,
            model.encoder.pooling,
            counted(model.encoder.width, "number"),
            capacity.max_rows,
            counted(capacity.max_step_tokens, "token"),
        )
        if blueprint.measured_plan.is_shortened:
            _log.warning(
                "the model takes texts of up to %d tokens, but the memory is enough for %d; free some for longer ones, or set "
                "--max-model-len to a length between",
                model.encoder.max_tokens,
                capacity.max_model_len,
            )
    lora = blueprint.lora
    if lora.is_on:
        _log.info(
            "adapters of up to rank %d: %d different ones at once, %s for %d in memory and the reading of another",
            lora.max_lora_rank,
            lora.max_loras,
            format_size(blueprint.adapters.num_bytes),
            lora.max_cpu_loras,
        )
    options = blueprint.compute.options
    _log.info("backend %s, %s", options.backend, device.words(options, blueprint.cores))
    _log.info("policies: %s", ", ".join(f"{seam} {words}" for seam, words in blueprint.policies.words.items()))


def log_kv(blueprint: Blueprint, model: LoadedModel) -> None:
    kv = blueprint.measured_plan
    longest = kv.capacity.max_model_len
    _log.info(
        "KV cache of %s, up to %s as it fills: %s of %s, %s in all; longest request %d",
        blueprint.compute.kv_dtype,
        format_size(kv.num_bytes),
        counted(kv.capacity.num_blocks - 1, "block"),
        counted(kv.capacity.block_size, "token"),
        counted(kv.num_tokens, "token"),
        longest,
    )
    # First turns of ShareGPT have 467 tokens on average, with their answers (`benchmarks/kv_waste.py`).
    typical = min(512, longest)
    num_typical, num_longest = kv.num_requests_of(typical), kv.num_requests_of(longest)
    _log.info(
        "KV cache holds %s of %s (prompt and answer) at once%s; at most %d run at once",
        counted(num_typical, "request"),
        counted(typical, "token"),
        f", or {num_longest} of the longest" if typical < longest else "",
        blueprint.compute.max_rows,
    )
    if kv.is_shortened:
        _log.warning(
            "the model takes requests of up to %d tokens, but the KV cache holds %d; raise --kv-cache-memory for longer ones",
            model.spec.max_model_len,
            kv.capacity.max_model_len,
        )
