"""Builders of requests, schedulers and engine cores with defaults that suit tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

from penstock.engine.core import EngineCore
from penstock.engine.ports import Observer, RequestJournal
from penstock.kv.tiers import Tier
from penstock.sched.adapters import DEFAULT_MAX_ADAPTERS
from penstock.sched.drafting import Drafter
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing.hash_executor import DEFAULT_CAPACITY
from penstock.types.adapter import AdapterSource
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams


def make_request(
    request_id: str = "r0",
    prompt: Sequence[int] | int = 8,
    *,
    arrival_ns: int = 0,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Request:
    """Return a request. `prompt` is its tokens, or their number (then 1, 2, 3, ...). Other fields are those of `Request`,
    such as `tenant`, `priority` or `deadline_ns`, or of `SamplingParams`. With a `matcher`, its answer follows a grammar."""
    token_ids = range(1, prompt + 1) if isinstance(prompt, int) else prompt
    names = {field.name for field in dataclass_fields(SamplingParams)}
    sampling_fields = {key: value for key, value in fields.items() if key in names}
    if fields.get("matcher") is not None:
        sampling_fields["follows_grammar"] = True
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=replace(sampling or SamplingParams(temperature=0.0), **sampling_fields),
        arrival_ns=arrival_ns,
        **{key: value for key, value in fields.items() if key not in names},
    )


def make_text(request_id: str = "r0", prompt: Sequence[int] | int = 8, **fields: Any) -> Request:
    return make_request(request_id, prompt, max_tokens=1, **fields)


def text_capacity(max_model_len: int = 64, *, max_rows: int = 8, max_step_tokens: int = 128) -> Capacity:
    """Return the capacity of a text encoder's executor: it computes each input in one step, and has blocks for two steps."""
    return Capacity(2 * max_rows + 1, max_model_len, max_rows, max_step_tokens, max_model_len, is_one_pass=True)


def sizes_of(capacity: Capacity) -> dict[str, int]:
    """Return the five sizes in a capacity that an executor's constructor takes, by name."""
    return {
        name: getattr(capacity, name) for name in ("num_blocks", "block_size", "max_rows", "max_step_tokens", "max_model_len")
    }


def make_scheduler(
    capacity: Capacity = DEFAULT_CAPACITY,
    policies: Policies | None = None,
    *,
    enable_prefix_caching: bool = True,
    tier: Tier | None = None,
    adapters: AdapterSource | None = None,
    max_adapters: int = DEFAULT_MAX_ADAPTERS,
    drafter: Drafter | None = None,
    **capacity_fields: Any,
) -> Scheduler:
    return Scheduler(
        replace(capacity, **capacity_fields),
        policies or make_policies(),
        enable_prefix_caching=enable_prefix_caching,
        tier=tier,
        adapters=adapters,
        max_adapters=max_adapters,
        drafter=drafter,
    )


def make_core(
    capacity: Capacity = DEFAULT_CAPACITY,
    policies: Policies | None = None,
    *,
    observer: Observer | None = None,
    journal: RequestJournal | None = None,
    **fields: Any,
) -> EngineCore:
    return EngineCore(make_scheduler(capacity, policies, **fields), observer=observer, journal=journal)
