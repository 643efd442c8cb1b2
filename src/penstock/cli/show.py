"""`penstock show`: describes a model's files, what a server would refuse, and the memory and speed on this machine.

Nothing is fetched, and no weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.candidates import find_machines
from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    model_argument,
    printable,
    setting_option,
    warn_of_unknown_variables,
)
from penstock.config.components import config_from
from penstock.config.units import format_size
from penstock.types.errors import ModelError, counted

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.deploy.forecast import Appraisal
    from penstock.lab.sizing import ModelSize
    from penstock.models.catalog import ModelSource
    from penstock.models.facts import ModelFacts

_WITHOUT = (
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "prefix_caching",
    "prefix_sharing",
    "kv_eviction",
    "kv_eviction_args",
    "kv_rest",
    "kv_watermark",
    "kv_host_size",
    "kv_disk_size",
    "kv_disk_path",
    "gpu_memory_utilization",
)


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.option("--speed/--no-speed", default=True, show_default=True, help="Probe this machine's peaks, for seconds.")
@config_options("model", "kv", without=_WITHOUT)
@setting_option("merge_lora")
@setting_option("weight_dtype")
@setting_option("speculation_model")
def show(is_json: bool, speed: bool, **values: Any) -> None:
    """Describe MODEL: architecture, parameters, bits, context, template, refusals, memory and speed here.

    \b
      penstock show smollm2:135m
      penstock show ./Llama-3-8B --json | jq .refused

    The speed is an upper bound from this machine's peaks, measured under its current load. `penstock plan` estimates what a
    server reaches.
    """
    from penstock.deploy.forecast import appraise
    from penstock.models.adapter_files import is_adapter

    warn_of_unknown_variables()
    config = config_from(values)
    source = _find(config)
    if is_adapter(source.path):
        _show_adapter(source, is_json=is_json)
        return
    appraisal = appraise(config, source)
    size = _size(config, appraisal)
    sized = size if speed else None
    if is_json:
        print(json.dumps(_as_json(source, appraisal, size, sized), indent=2, allow_nan=False))
        return
    _print(_rows(config, source, appraisal, size, sized))


def _print(rows: Iterable[tuple[str, str]]) -> None:
    """Print each row as soon as it is computed, because the last ones take seconds."""
    for name, value in rows:
        print(printable(f"{name:12}  {value}".replace("\n", " ")), flush=True)


def _show_adapter(source: ModelSource, *, is_json: bool) -> None:
    from penstock.config import LoraConfig
    from penstock.models.peft import read_adapter_facts

    facts = read_adapter_facts(source.path, max_rank=LoraConfig().max_lora_rank)
    refusal = facts.refusal
    if is_json:
        told = {"rank": facts.rank, "alpha": facts.alpha, "base": facts.base or None, "targets": list(facts.targets)}
        refused = [] if refusal is None else [{"check": "adapter", "cause": refusal.message, "remedy": refusal.remedy}]
        about = {"version": 1, "adapter": source.name, "path": str(source.path), "kind": facts.kind}
        print(json.dumps(about | told | {"refused": refused}, indent=2))
        return
    unsaid = "the files do not say"
    rank, alpha = (unsaid if value is None else value for value in (facts.rank, facts.alpha))
    _print(
        [
            ("adapter", f"{source.name} (not a model: serve it beside its model, --lora-modules NAME={source.path})"),
            ("kind", facts.kind or unsaid),
            ("base model", facts.base or unsaid),
            ("rank", f"{rank}, lora_alpha {alpha}"),
            ("targets", ", ".join(facts.targets) or unsaid),
            ("refused", "nothing in its settings and names of tensors" if refusal is None else str(refusal)),
        ]
    )


def _find(config: Config) -> ModelSource:
    from penstock.deploy.factory import find_source

    source = find_source(config)
    if not source.is_present:
        size = f" It takes {format_size(source.entry.size_bytes)}." if source.entry else ""
        remedy = f"Fetch it with `penstock pull {config.model.model}`."
        raise ModelError(f"The files of {source.name} are not here.{size}", remedy=remedy)
    return source


def _size(config: Config, appraisal: Appraisal) -> ModelSize | None:
    """Return the model's size for the arithmetic, or None for an encoder or if the files are refused."""
    from penstock.deploy.resolve import decide

    outline = appraisal.outline
    if outline is None or outline.spec.ending is not None:
        return None
    return outline.size(decide(config, is_gpu=False).kv_dtype)


def _rows(
    config: Config, source: ModelSource, appraisal: Appraisal, size: ModelSize | None, sized: ModelSize | None
) -> Iterator[tuple[str, str]]:
    from penstock.lab.sizing import BOUND_ROWS, bounds, format_number

    facts = appraisal.facts
    yield "model", source.name
    yield "files", f"{facts.path} ({facts.container}, {format_size(facts.num_file_bytes)})"
    if title := _title(source, facts):
        yield "name", title
    yield "licence", _license(source, appraisal) or "the files do not say"
    layers = "" if facts.num_layers is None else f", {counted(facts.num_layers, 'layer')}"
    yield "architecture", f"{facts.architecture or 'the files do not say'}{layers}"
    yield "parameters", _parameters(appraisal, size)
    for one in facts.formats:
        bits = f"{8 * one.num_bytes / max(1, one.num_values):.3g} bits each"
        values = format_number(one.num_values)
        yield f"  {one.name}", f"{counted(one.num_tensors, 'tensor')}, {values} values, {format_size(one.num_bytes)}, {bits}"
    yield "context", "the files do not say" if facts.max_model_len is None else counted(facts.max_model_len, "token")
    if appraisal.model is not None:
        rotations = [attention.rotation for attention in appraisal.model.spec.attentions]
        yield from (("positions", words) for words in dict.fromkeys(turn.length_note for turn in rotations if turn) if words)
    tokens = "" if facts.num_tokens is None else f", {counted(facts.num_tokens, 'token')}"
    yield "vocabulary", f"{facts.vocabulary or 'none'}{tokens}"
    encoder = None if appraisal.model is None else appraisal.model.encoder
    if encoder is None:
        yield "templates", ", ".join(facts.chat_templates) or "none: chats are refused without --chat-template"
    else:
        yield (
            "task",
            f"{encoder.task}: {counted(encoder.width, 'number')} for each {'token' if encoder.is_per_token else 'text'}",
        )
        yield "longest text", counted(appraisal.longest_text or encoder.max_tokens, "token")
    if appraisal.model is not None and encoder is None:
        yield "sampling", appraisal.model.sampling.words() or "the files name no defaults"
    if size is not None:
        yield "memory", _memory(appraisal, size)
    if appraisal.model is not None:
        yield "packed", _packed(config, source)
    if sized is not None:
        [hardware] = find_machines("this", None)
        ops_per_s = hardware.ops_per_s(is_quantised=sized.is_quantised)
        peaks = f"{format_number(hardware.read_bytes_per_s, 'B/s')} from memory, {format_number(ops_per_s, 'op/s')}"
        prompt, alone, many = (f"{value:,.0f}" for value in bounds(sized, hardware))
        yield (
            "speed",
            f"at most {alone} tokens/s in one conversation, {many} in {BOUND_ROWS} together, {prompt} of a prompt: upper "
            f"bounds by the peaks measured just now ({peaks}; {hardware.description})",
        )
    for number, refusal in enumerate(appraisal.refusals):
        yield "" if number else "refused", f"{refusal.check}: {refusal.cause} {refusal.remedy}".rstrip()
    if not appraisal.refusals:
        yield "refused", "nothing"


def _title(source: ModelSource, facts: ModelFacts) -> str:
    """Return the model's title: the catalogue's first, because files often name the base model or a training run."""
    return source.entry.title if source.entry else facts.title


def _license(source: ModelSource, appraisal: Appraisal) -> str:
    return source.entry.license if source.entry else appraisal.facts.license


def _parameters(appraisal: Appraisal, size: ModelSize | None) -> str:
    from penstock.lab.sizing import format_number

    facts = appraisal.facts
    if size is None:
        return f"{format_number(facts.num_values)} values in the files"
    bits = 8 * sum(one.num_bytes for one in facts.formats) / size.num_parameters
    words = f"{format_number(size.num_parameters)}, {bits:.3g} bits each on average" if facts.formats else ""
    if size.expert_share:
        words += f"; {format_number(size.num_token_products + size.num_logit_products)} of them for each token"
    return words or format_number(size.num_parameters)


def _packed(config: Config, source: ModelSource) -> str:
    from penstock.deploy.resolve import packed_weights
    from penstock.models.packed_file import PackedError

    if config.model.experts_on_disk:
        return "not used: --experts-on-disk keeps experts in another file"
    packed = packed_weights(config, source.path)
    try:
        with packed.open() as file:
            return f"{format_size(file.num_bytes)} in {file.path}"
    except FileNotFoundError:
        return "no: `penstock pack` writes them"
    except PackedError as error:
        return f"not used: {error}"


def _memory(appraisal: Appraisal, size: ModelSize) -> str:
    from penstock.deploy.experts import disk_words
    from penstock.deploy.sizing import RESERVE_BYTES

    per_token = f"{size.kv_dtype.value} keys and values {format_size(size.kv_bytes_per_token)} a token"
    if size.state_bytes_per_block:
        per_token += f", recurrent state {format_size(size.state_bytes_per_block)} a block of tokens"
    if size.state_bytes:
        per_token += f", recurrent state {format_size(size.state_bytes)} a request"
    words = f"weights {format_size(size.num_weight_bytes)}, {per_token}"
    if appraisal.forecast is None:
        return f"{words}; {format_size(appraisal.num_free_bytes)} are free"
    kv = appraisal.forecast.kv
    longest = f"longest request {counted(kv.capacity.max_model_len, 'token')}"
    free = format_size(appraisal.num_free_bytes)
    words = f"{words}; a server takes {format_size(kv.num_bytes)} for them, of {free} free: {longest}"
    if appraisal.num_draft_bytes:
        words += f"; {format_size(appraisal.num_draft_bytes)} more for the model that drafts"
    if appraisal.model is not None and appraisal.outline is not None and appraisal.outline.num_disk_bytes:
        taken_bytes = (
            size.num_weight_bytes - appraisal.outline.num_disk_bytes + kv.num_bytes + kv.num_step_bytes + RESERVE_BYTES
        )
        taken_bytes += appraisal.num_draft_bytes
        words += f"; {disk_words(appraisal.model, appraisal.num_free_bytes - taken_bytes)}"
    return words


def _as_json(source: ModelSource, appraisal: Appraisal, size: ModelSize | None, sized: ModelSize | None) -> dict[str, object]:
    from penstock.lab.sizing import BOUND_ROWS, bounds

    facts, forecast, upper_bounds = appraisal.facts, appraisal.forecast, None
    if sized is not None:
        [hardware] = find_machines("this", None)
        prompt, alone, many = bounds(sized, hardware)
        upper_bounds = {
            "one_conversation_tokens_per_s": alone,
            f"{BOUND_ROWS}_conversations_tokens_per_s": many,
            "prompt_tokens_per_s": prompt,
            "read_bytes_per_s": hardware.read_bytes_per_s,
            "ops_per_s": hardware.ops_per_s(is_quantised=sized.is_quantised),
        }
    return {
        "version": 1,
        "model": source.name,
        "path": str(facts.path),
        "container": facts.container,
        "name": _title(source, facts) or None,
        "license": _license(source, appraisal) or None,
        "architecture": facts.architecture or None,
        "quantization": facts.quantisation or None,
        "num_layers": facts.num_layers,
        "num_parameters": None if size is None else size.num_parameters,
        "file_bytes": facts.num_file_bytes,
        "formats": [
            {"name": one.name, "tensors": one.num_tensors, "values": one.num_values, "bytes": one.num_bytes}
            for one in facts.formats
        ],
        "context_tokens": facts.max_model_len,
        "vocabulary": facts.vocabulary or None,
        "vocabulary_tokens": facts.num_tokens,
        "chat_templates": list(facts.chat_templates),
        "sampling": None if appraisal.model is None else appraisal.model.sampling.named(),
        "memory": size
        and {
            "weight_bytes": size.num_weight_bytes,
            "disk_bytes": 0 if appraisal.outline is None else appraisal.outline.num_disk_bytes,
            "kv_bytes_per_token": size.kv_bytes_per_token,
            "state_bytes_per_block": size.state_bytes_per_block,
            "state_bytes_per_request": size.state_bytes,
            "kv_dtype": size.kv_dtype.value,
            "kv_cache_bytes": None if forecast is None else forecast.kv.num_bytes,
            "draft_bytes": appraisal.num_draft_bytes,
            "longest_request_tokens": None if forecast is None else forecast.kv.capacity.max_model_len,
            "free_bytes": appraisal.num_free_bytes,
        },
        "upper_bounds": upper_bounds,
        "refused": [
            {"check": refusal.check, "cause": refusal.cause, "remedy": refusal.remedy} for refusal in appraisal.refusals
        ],
    }
