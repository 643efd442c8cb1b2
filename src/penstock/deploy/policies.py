"""Makes the scheduler's policies and the admission limits from the names and settings in a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import AdmissionConfig, Config, KvConfig
from penstock.config.keys import has_several_tenants
from penstock.config.sources import all_settings
from penstock.config.units import nanoseconds
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.admission.door import AdmissionLimits
    from penstock.sched.policies.base import Policies

SETTING_FLAGS: Mapping[str, str] = {
    "max_batch_size": "--max-batch-size",
    "preferred_batch_sizes": "--preferred-batch-size",
    "max_queue_delay_ns": "--batch-window",
    "length_buckets": "--length-buckets",
    "is_preemptive": "--priority-preemption",
    "slo_itl_ns": "--slo-itl",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "max_long_partial_prefills": "--max-long-partial-prefills",
    "share": "--kv-watermark",
    "rest_ns": "--kv-rest",
}
"""The flag that sets each field of a policy."""
_OF_ANSWERS = ("reserve", "victim", "length_predictor", "speculation", "speculation_model")
"""Settings without effect on encoders: their requests generate no tokens."""


@dataclass(frozen=True, slots=True)
class PolicyRecipe:
    """The scheduler policies that a config chooses, already checked. `make` returns new ones, because policies keep state."""

    make: Callable[[], Policies]
    words: Mapping[str, str]
    """Name and settings of each policy, by its seam, such as `order`."""
    reads_priority: bool
    """Whether the waiting order uses `Request.priority`."""

    def max_running(self, capacity: Capacity) -> int:
        """Return how many requests may run at once. Raises ConfigError for a batch size that does not fit."""
        return self.make().gate.max_running(capacity)

    def check(self, max_rows: int, max_step_tokens: int) -> None:
        """Raise ConfigError for a batch size that does not fit into a step, whatever the size of the KV cache."""
        self.max_running(Capacity(2, 1, max_rows, max_step_tokens, 1))


def choose_policies(config: Config, *, is_one_pass: bool = False) -> PolicyRecipe:
    """Return the policies of the config's preset, replaced where the config names others.

    `is_one_pass`: the model only embeds or scores texts. Raises ConfigError for settings that would change nothing.
    """
    from penstock.sched.policies.own import SEAM_FLAGS, OwnPolicyError
    from penstock.sched.policies.presets import LacksSetting

    chosen = config.scheduler
    if is_one_pass:
        for setting in _OF_ANSWERS:
            if getattr(chosen, setting) is not None:
                flag = f"--{setting.replace('_', '-')}"
                raise ConfigError(
                    "The model only reads texts: a text is read in one step, and no answer grows. "
                    f"{flag} would change nothing.",
                    remedy=f"Leave {flag} out.",
                )
    try:
        make = _choose(config, _preset(config, is_one_pass=is_one_pass))
        policies = make()
    except LacksSetting as lack:
        seam, setting = SEAM_FLAGS[lack.seam], SETTING_FLAGS[lack.setting]
        raise LacksSetting(lack.seam, lack.name, lack.setting, seam_words=seam, setting_words=setting) from None
    except OwnPolicyError as error:
        remedy = error.remedy
        if error.argument:
            flag = f"{SEAM_FLAGS[error.seam]}-args"
            remedy += f" Arguments are those of {flag}, or a table of the file: leave {error.argument} out."
        if error.argument in {item.key for item in all_settings()}:
            remedy += f" If the setting {error.argument} is meant: in a file it stands above the tables, such as [policy_args]."
        raise ConfigError(f"{SEAM_FLAGS[error.seam]}: {error.message}", remedy=remedy) from error
    for flag, is_set, why in (
        ("--priority-preemption", chosen.priority_preemption, "runs to completion"),
        ("--speculation", chosen.speculation not in (None, "off"), "advances every row by one token per step"),
        ("--speculation-model", chosen.speculation_model is not None, "advances every row by one token per step"),
        ("--background-share", chosen.background_share, "takes background requests only when nobody else waits"),
    ):
        if is_set and not policies.gate.is_continuous:
            raise ConfigError(
                f"A static or dynamic batch {why}, so {flag} would change nothing.",
                remedy=f"Set --batching continuous, or leave {flag} out.",
            )
    _check_eviction(config.kv, reads_priority=policies.order.reads_priority)
    return PolicyRecipe(make, policies.words, policies.order.reads_priority)


def _preset(config: Config, *, is_one_pass: bool) -> str:
    """Return the name of the preset. Models that only embed or score texts have presets that never split a text."""
    from penstock.sched.policies.presets import TEXTS_PRESET, USUAL_PRESET

    chosen = config.scheduler
    if chosen.preset is not None or not is_one_pass:
        return chosen.preset or USUAL_PRESET
    return chosen.batching if chosen.batching in ("static", "dynamic") else TEXTS_PRESET


def _choose(config: Config, preset: str) -> Callable[[], Policies]:
    from penstock.sched.policies.orders import ORDERS
    from penstock.sched.policies.own import load
    from penstock.sched.policies.presets import make_policies

    chosen = config.scheduler
    suits = getattr(load("order", ORDERS.get(chosen.policy, chosen.policy)), "suits", {}) if chosen.policy else {}
    slo_itl_ns = nanoseconds(chosen.slo_itl_s)
    return partial(
        make_policies,
        preset,
        gate=chosen.batching,
        order=chosen.policy,
        predictor=chosen.length_predictor,
        budget=chosen.budget or ("itl" if slo_itl_ns else None),
        reserve=chosen.reserve or (None if config.kv.kv_watermark is None else "watermark"),
        victim=chosen.victim or suits.get("victim"),
        eviction=config.kv.kv_eviction
        or suits.get("eviction")
        or ("tenant-fair" if has_several_tenants(config.server) else None),
        guesser=chosen.speculation,
        background_share=chosen.background_share,
        settings={
            "gate": {
                "max_batch_size": chosen.max_batch_size,
                "preferred_batch_sizes": chosen.preferred_batch_sizes,
                "max_queue_delay_ns": nanoseconds(chosen.batch_window_s),
                "length_buckets": chosen.length_buckets,
            },
            "order": {"is_preemptive": chosen.priority_preemption},
            "budget": {
                "slo_itl_ns": slo_itl_ns,
                "long_prefill_token_threshold": chosen.long_prefill_token_threshold,
                "max_long_partial_prefills": chosen.max_long_partial_prefills,
            },
            "reserve": {"share": config.kv.kv_watermark},
            "eviction": {"rest_ns": nanoseconds(config.kv.kv_rest_s)},
        },
        arguments={
            "gate": chosen.batching_args or {},
            "order": chosen.policy_args or {},
            "predictor": chosen.length_predictor_args or {},
            "budget": chosen.budget_args or {},
            "reserve": chosen.reserve_args or {},
            "victim": chosen.victim_args or {},
            "eviction": config.kv.kv_eviction_args or {},
            "guesser": chosen.speculation_args or {},
        },
    )


def _check_eviction(kv: KvConfig, *, reads_priority: bool) -> None:
    if kv.kv_eviction is not None and not kv.prefix_caching:
        raise ConfigError("Without prefix caching nothing is cached that could be evicted.", remedy="Leave --kv-eviction out.")
    if kv.kv_rest_s is not None and not kv.prefix_caching:
        raise ConfigError("Without prefix caching no conversation is cached.", remedy="Leave --kv-rest out.")
    if kv.kv_eviction == "priority" and not reads_priority:
        raise ConfigError(
            "There are no priorities by which to evict: a request may only have one under --policy priority.",
            remedy="Set --policy priority, or choose another --kv-eviction.",
        )


def admission_limits(config: AdmissionConfig) -> AdmissionLimits:
    from penstock.admission.door import AdmissionLimits

    return AdmissionLimits(
        max_queue=config.max_queue,
        slo_ttft_ns=nanoseconds(config.slo_ttft_s),
        kv_headroom=config.kv_headroom,
        tenant=config.tenant_limits,
    )
