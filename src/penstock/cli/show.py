"""`penstock show`: what a model's files are, what a server would refuse of them, its memory and its speed here. `deploy` and
`lab` do the work; this prints. Reads no weight, fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.candidates import find_machines, size_of_outline
from penstock.cli.options import EPILOG, GroupedCommand, config_options, model_argument, printable, warn_of_unknown_variables
from penstock.config.components import config_from
from penstock.config.units import format_size
from penstock.types.errors import ModelError, counted

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.deploy.forecast import Appraisal
    from penstock.lab.hardware import Hardware
    from penstock.lab.sizing import Bounds, ModelSize
    from penstock.models.catalog import ModelSource
    from penstock.models.facts import ModelFacts

JSON_VERSION = 1
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
@click.option("--speed/--no-speed", default=True, show_default=True, help="Probe this machine's peaks, which takes a second.")
@config_options("model", "kv", without=_WITHOUT)
def show(is_json: bool, speed: bool, **values: Any) -> None:
    """Say what MODEL is: architecture, parameters, bits, context, template; what would be refused; memory and speed here.

    \b
      penstock show smollm2:135m
      penstock show ./Llama-3-8B --json | jq .refused

    The speed is an upper bound by this machine's peaks, measured just now beside whatever else runs: no server reaches it with
    weights that its caches do not hold. `penstock plan` estimates what one does reach.
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
    [hardware] = find_machines("this", None) if speed and size is not None else [None]
    if is_json:
        print(json.dumps(_as_json(source, appraisal, size, hardware), indent=2, allow_nan=False))
        return
    _print(_rows(source, appraisal, size, hardware))


def _print(found: Iterable[tuple[str, str]]) -> None:
    rows = list(found)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(printable(f"{name:{width}}  {value}".replace("\n", " ")))


def _show_adapter(source: ModelSource, *, is_json: bool) -> None:
    """Print what a folder of PEFT is, and what would be refused of its settings."""
    from penstock.config import LoraConfig
    from penstock.models.peft import read_adapter_facts

    facts = read_adapter_facts(source.path, max_rank=LoraConfig().max_lora_rank)
    refusal = facts.refusal
    if is_json:
        told = {"rank": facts.rank, "alpha": facts.alpha, "base": facts.base or None, "targets": list(facts.targets)}
        refused = [] if refusal is None else [{"check": "adapter", "cause": refusal.message, "remedy": refusal.remedy}]
        about = {"version": JSON_VERSION, "adapter": source.name, "path": str(source.path), "kind": facts.kind}
        print(json.dumps(about | told | {"refused": refused}, indent=2))
        return
    unsaid = "the files do not say"
    _print(
        [
            ("adapter", f"{source.name} (not a model: serve it beside its model, --lora-modules NAME={source.path})"),
            ("kind", facts.kind or unsaid),
            ("base model", facts.base or unsaid),
            (
                "rank",
                f"{unsaid if facts.rank is None else facts.rank}, lora_alpha {unsaid if facts.alpha is None else facts.alpha}",
            ),
            ("targets", ", ".join(facts.targets) or unsaid),
            ("refused", "nothing in its settings" if refusal is None else str(refusal)),
        ]
    )


def _find(config: Config) -> ModelSource:
    """The source, which must be here. Raises ModelError."""
    from penstock.models.catalog import cache_dir, resolve

    source = resolve(config.model.model, cache_dir(config.model.cache_dir))
    if not source.is_present:
        size = f" It takes {format_size(source.entry.size_bytes)}." if source.entry else ""
        remedy = f"Fetch it with `penstock pull {config.model.model}`."
        raise ModelError(f"The files of {source.name} are not here.{size}", remedy=remedy)
    return source


def _size(config: Config, appraisal: Appraisal) -> ModelSize | None:
    """The model in numbers; None if its files are refused, and for an encoder, whose steps are no decodes."""
    from penstock.deploy.resolve import decide

    outline = appraisal.outline
    if outline is None or outline.spec.ending is not None:
        return None
    return size_of_outline(outline, decide(config, is_gpu=False).kv_dtype)


def _rows(
    source: ModelSource, appraisal: Appraisal, size: ModelSize | None, hardware: Hardware | None
) -> Iterator[tuple[str, str]]:
    from penstock.lab.sizing import bounds, format_number

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
        yield "longest text", counted(encoder.max_tokens, "token")
    if appraisal.model is not None and encoder is None:
        yield "sampling", appraisal.model.sampling.words() or "the files name no defaults"
    if size is not None:
        yield "memory", _memory(appraisal, size)
    if size is not None and hardware is not None:
        yield "speed", _speed(bounds(size, hardware), size, hardware)
    for number, refusal in enumerate(appraisal.refusals):
        yield "" if number else "refused", f"{refusal.check}: {refusal.cause} {refusal.remedy}".rstrip()
    if not appraisal.refusals:
        yield "refused", "nothing"


def _title(source: ModelSource, facts: ModelFacts) -> str:
    """Return the model's name, as its makers write it where we know that; files name the base model, or a training run."""
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


def _memory(appraisal: Appraisal, size: ModelSize) -> str:
    from penstock.deploy.experts import disk_words
    from penstock.deploy.sizing import RESERVE_BYTES

    per_token = f"{size.kv_dtype.value} keys and values {format_size(size.kv_bytes_per_token)} a token"
    if size.state_bytes_per_block:
        per_token += f", recurrent state {format_size(size.state_bytes_per_block)} a block of tokens"
    words = f"weights {format_size(size.num_weight_bytes)}, {per_token}"
    if appraisal.forecast is None:
        return f"{words}; {format_size(appraisal.num_free_bytes)} are free"
    kv = appraisal.forecast.kv
    longest = f"longest request {counted(kv.max_model_len, 'token')}"
    free = format_size(appraisal.num_free_bytes)
    words = f"{words}; a server takes {format_size(kv.num_bytes)} for them, of {free} free: {longest}"
    if appraisal.model is not None and appraisal.outline is not None and appraisal.outline.num_disk_bytes:
        taken_bytes = (
            size.num_weight_bytes - appraisal.outline.num_disk_bytes + kv.num_bytes + kv.num_step_bytes + RESERVE_BYTES
        )
        words += f"; {disk_words(appraisal.model, appraisal.num_free_bytes - taken_bytes)}"
    return words


def _speed(most: Bounds, size: ModelSize, hardware: Hardware) -> str:
    from penstock.lab.sizing import BOUND_ROWS, format_number

    peak = format_number(hardware.ops_per_s(is_quantised=size.is_quantised), "op/s")
    reads = format_number(hardware.read_bytes_per_s, "B/s")
    return (
        f"at most {most.one_row_tokens_per_s:,.0f} tokens/s in one conversation, {most.many_rows_tokens_per_s:,.0f} in "
        f"{BOUND_ROWS} together, {most.prompt_tokens_per_s:,.0f} of a prompt: upper bounds by the peaks measured just now "
        f"({reads} from memory, {peak}; {hardware.description})"
    )


def _as_json(source: ModelSource, appraisal: Appraisal, size: ModelSize | None, hardware: Hardware | None) -> dict[str, object]:
    """The rows as numbers: sizes in bytes, rates per second. Null stands for a number that is not known."""
    from penstock.lab.sizing import BOUND_ROWS, bounds

    facts, forecast = appraisal.facts, appraisal.forecast
    most = None if size is None or hardware is None else bounds(size, hardware)
    return {
        "version": JSON_VERSION,
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
        "memory": None
        if size is None
        else {
            "weight_bytes": size.num_weight_bytes,
            "disk_bytes": 0 if appraisal.outline is None else appraisal.outline.num_disk_bytes,
            "kv_bytes_per_token": size.kv_bytes_per_token,
            "state_bytes_per_block": size.state_bytes_per_block,
            "kv_dtype": size.kv_dtype.value,
            "kv_cache_bytes": None if forecast is None else forecast.kv.num_bytes,
            "longest_request_tokens": None if forecast is None else forecast.kv.max_model_len,
            "free_bytes": appraisal.num_free_bytes,
        },
        "upper_bounds": None
        if most is None or hardware is None or size is None
        else {
            "one_conversation_tokens_per_s": most.one_row_tokens_per_s,
            f"{BOUND_ROWS}_conversations_tokens_per_s": most.many_rows_tokens_per_s,
            "prompt_tokens_per_s": most.prompt_tokens_per_s,
            "read_bytes_per_s": hardware.read_bytes_per_s,
            "ops_per_s": hardware.ops_per_s(is_quantised=size.is_quantised),
        },
        "refused": [
            {"check": refusal.check, "cause": refusal.cause, "remedy": refusal.remedy} for refusal in appraisal.refusals
        ],
    }
