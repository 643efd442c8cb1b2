"""The small model or draft head of --speculation-model: its checks beside the large model, and its executor."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import LoraConfig
from penstock.config.units import format_size
from penstock.deploy.blueprint import Blueprint, fingerprints
from penstock.deploy.executor import SeatOf, build_executor
from penstock.deploy.resources import MemoryShare
from penstock.deploy.sizing import KvPlan
from penstock.types.errors import ConfigError, ModelError, NotEnoughFreeMemory
from penstock.types.kv_dtype import KvDtype
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.engine.draft_model import DraftModel
    from penstock.models.weights import LoadedModel
    from penstock.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

DRAFT_REMEDY = "Leave out --speculation-model, or take another model."


def with_draft(blueprint: Blueprint, model: LoadedModel, small: Blueprint, small_model: LoadedModel) -> Blueprint:
    """Return the blueprint with a small model, whose KV cache holds no more tokens than the large one's.

    Raises ConfigError if one of the models keeps a recurrent state, which can't go back to the last guess that was right.
    """
    _check_no_state(model)
    _check_no_state(small_model)
    plan, capacity, most = small.measured_plan, small.measured_plan.capacity, blueprint.measured_plan.capacity
    num_blocks = min(capacity.num_blocks, most.num_blocks)
    longest = min(capacity.max_model_len, most.max_model_len, (num_blocks - 1) * capacity.block_size)
    num_kv_bytes = num_blocks * (plan.num_bytes // capacity.num_blocks)
    capacity = replace(capacity, num_blocks=num_blocks, max_model_len=longest)
    # `penstock pack` packs a model that can draft for the task `auto`.
    packed = None if small.packed is None else replace(small.packed, task="auto")
    small = replace(small, plan=replace(plan, capacity=capacity, num_bytes=num_kv_bytes), packed=packed)
    num_bytes = small.share.num_weight_bytes + num_kv_bytes + small.share.num_step_bytes
    return replace(blueprint, draft=small, share=replace(blueprint.share, num_draft_bytes=num_bytes))


def with_head(blueprint: Blueprint, model: LoadedModel, path: Path, left_bytes: int) -> tuple[Blueprint, LoadedModel]:
    """Return the blueprint and the model with a draft head, whose KV cache holds as many tokens as the model's.

    Raises ConfigError for a recurrent state, ModelError for a head of another model, and NotEnoughMemory if it takes more than
    `left_bytes`.
    """
    from penstock.engine.draft_model import MOST_UNREAD
    from penstock.models.eagle import load_head

    _check_no_state(model)
    loading = replace(blueprint.loading, head=path, files={**blueprint.loading.files, **fingerprints(path)})
    head = load_head(path, model)
    (shape,), capacity, compute = head.program.kv_shapes, blueprint.measured_plan.capacity, blueprint.compute
    if compute.kv_dtype is KvDtype.INT4:  # one layer saves little, and not all heads have a width that fits
        compute = replace(compute, kv_dtype=KvDtype.INT8)
    num_kv_bytes = capacity.num_blocks * capacity.block_size * shape.num_bytes(compute.kv_dtype)
    num_unread_bytes = 4 * MOST_UNREAD * head.fc.num_rows * capacity.max_rows
    num_bytes = head.num_bytes + num_kv_bytes + num_unread_bytes + head.num_step_bytes(capacity.max_step_tokens)
    if num_bytes > left_bytes:
        raise NotEnoughFreeMemory(
            f"Beside {blueprint.name}, the draft head {path.name} has no room: it takes {format_size(num_bytes)}, and "
            f"{format_size(max(0, left_bytes))} are left.",
            instead="Leave out --speculation-model, lower --kv-cache-memory",
        )
    small = replace(
        blueprint,
        names=(head.model.name,),
        loading=replace(loading, is_of_head=True),
        compute=compute,
        lora=LoraConfig(),
        plan=KvPlan(capacity, num_kv_bytes, is_shortened=False),
        share=MemoryShare(num_weight_bytes=head.num_bytes),
        expert_folder=None,
        packed=None,
    )
    share = replace(blueprint.share, num_draft_bytes=num_bytes)
    return replace(blueprint, loading=loading, draft=small, share=share), head.attached(model)


def _check_no_state(model: LoadedModel) -> None:
    from penstock.models.architectures import describe

    program = describe(model.spec)
    if program.state or program.paged_state:
        cause = f"{model.name} keeps a recurrent state, which can't go back to the last guess that was right."
        raise ConfigError(cause, remedy=DRAFT_REMEDY)


def check_same_tokens(large: Tokenizer, small: Tokenizer, model: LoadedModel, small_model: LoadedModel) -> None:
    """Raise ConfigError unless each token id means the same to both models."""
    tables = large.bytes_with_special, small.bytes_with_special
    num_tokens, cause = large.vocab_size, ""
    if small.vocab_size != num_tokens:
        cause = f"it has {small.vocab_size} tokens, and {model.name} has {num_tokens}"
    elif num_tokens > min(model.spec.vocab_size, small_model.spec.vocab_size):
        cause = "one of the models has fewer logits than tokens"
    else:
        for token_id in range(num_tokens):
            one, other = (table[token_id] for table in tables)
            if one != other:
                cause = f"token {token_id} is {other!r}, and for {model.name} it is {one!r}"
                break
    if cause:
        raise ConfigError(
            f"{small_model.name} can't guess for {model.name}, since its vocabulary is another: {cause}.", remedy=DRAFT_REMEDY
        )


def open_draft(small: Blueprint, seat_of: SeatOf, vocab_size: int, clock: Clock) -> DraftModel:
    """Load the weights of the small model. It computes with the threads of the large one, in turn."""
    from penstock.engine.draft_model import DraftModel, HeadDrafter

    model, timeout_s = small.loading.load(), small.compute.step_timeout_s
    executor = build_executor(small, model, seat_of)
    request = Request("warm-up", (0, 0), SamplingParams(), 0)
    if small.loading.is_of_head:
        width = model.spec.hidden_size
        draft: DraftModel = HeadDrafter(executor, clock, vocab_size=vocab_size, num_features=width, timeout_s=timeout_s)
        draft.see([(request.request_id, 0, 0, 1)], bytes(4 * width))
    else:
        draft = DraftModel(executor, clock, vocab_size=vocab_size, timeout_s=timeout_s)
    if not draft.read([(request, draft.num_behind(request))]).guesses:
        draft.close()
        raise ModelError(f"{small.name} guesses no token.", remedy=DRAFT_REMEDY)
    took_ns = min([draft.go_on([request]).duration_ns for _ in range(3)])
    draft.ended(request.request_id)
    _log.info(
        "%s guesses tokens in %.1f ms each: weights %s, KV cache %s for %d tokens",
        small.name,
        took_ns / 1e6,
        format_size(small.share.num_weight_bytes),
        format_size(small.measured_plan.num_bytes),
        small.measured_plan.num_tokens,
    )
    return draft
