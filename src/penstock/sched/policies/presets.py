"""Presets (named bundles of policies), and the function that makes policies from names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.kv.eviction import EVICTIONS, EvictionPolicy
from penstock.sched.policies.base import Budget, Gate, Guesser, Order, Policies, Predictor, Reserve, Victim
from penstock.sched.policies.budgets import BUDGETS
from penstock.sched.policies.gates import GATES
from penstock.sched.policies.guessers import GUESSERS
from penstock.sched.policies.orders import ORDERS
from penstock.sched.policies.own import OwnPolicyError, guarded, is_own, load, make, parameters_of
from penstock.sched.policies.predictors import PREDICTORS
from penstock.sched.policies.reserves import RESERVES
from penstock.sched.policies.victims import VICTIMS
from penstock.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One policy name for each seam, imitating the named system. All preempt by recomputing."""

    gate: str
    order: str
    budget: str
    reserve: str
    victim: str
    predictor: str = "online"
    eviction: str = "lru"
    guesser: str = "off"
    shares_parts: bool = True
    """See `Policies`."""
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By seam: fields of its policy that differ from their defaults."""


PRESETS: Mapping[str, Preset] = {
    # A batch is a rectangle that lasts until its longest answer ends: FasterTransformer, and `generate` of transformers.
    # Prompts are computed in steps of the usual size.
    "static": Preset(gate="static", order="fcfs", budget="decode-first", reserve="no-evict", victim="latest"),
    # Triton Inference Server's dynamic batcher (`preferred_batch_size`, `max_queue_delay_microseconds`) in front of such an
    # engine.
    "dynamic": Preset(gate="dynamic", order="fcfs", budget="decode-first", reserve="no-evict", victim="latest"),
    # Iteration-level scheduling; prompts whole; `max_tokens` reserved for each request (Yu et al., OSDI 2022).
    "orca": Preset(gate="continuous", order="fcfs", budget="whole-prompts", reserve="no-evict", victim="latest"),
    # vLLM 1 (v1/core/sched/scheduler.py): chunked prefill within max_num_batched_tokens; `scheduler_reserve_full_isl` and no
    # watermark; the last running request is preempted and goes to the head of the queue. Only whole blocks are shared
    # (v1/core/kv_cache_manager.py), those of the same step too, where a request here waits for the step's end.
    "vllm": Preset(
        gate="continuous", order="fcfs", budget="decode-first", reserve="prompt", victim="latest", shares_parts=False
    ),
    # Sarathi-Serve (OSDI 2024; core/scheduler/sarathi_scheduler.py): decodes, then running prefills, then new ones, up to a
    # fixed chunk size; a watermark of 1 %, as in vLLM at the time.
    "sarathi": Preset(
        gate="continuous",
        order="fcfs",
        budget="decode-first",
        reserve="watermark",
        victim="latest",
        settings={"reserve": {"growth_tokens": 0}},
    ),
    # SGLang (managers/schedule_policy.py, schedule_batch.py): room for a share of the tokens left (`new_token_ratio`); the
    # request with the shortest answer is retracted. The decay of that share, and 'lpm', its order, are not reproduced.
    "sglang": Preset(
        gate="continuous",
        order="fcfs",
        budget="prefill-first",
        reserve="predicted",
        victim="least-output",
        settings={"reserve": {"unknown_share": 0.7, "growth_tokens": 0}},
    ),
    # The best in our measurements: docs/budgets.md.
    "penstock": Preset(
        gate="continuous",
        order="fcfs",
        budget="itl",
        reserve="watermark",
        victim="cheapest",
        guesser="suffix",
        settings={"budget": {"long_prefill_token_threshold": 512}},
    ),
    # For `penstock batch run`, where nobody waits for a token: full steps, and no prompt passes a longer one, which would break
    # the order of a job.
    "offline": Preset(
        gate="continuous", order="fcfs", budget="decode-first", reserve="watermark", victim="cheapest", guesser="suffix"
    ),
    # For models that only read texts: docs/batching.md. A text needs a row and nothing else, so no memory is kept for growth.
    "texts": Preset(gate="continuous", order="calls", budget="hold-step", reserve="chunk", victim="latest", predictor="none"),
}

USUAL_PRESET = "penstock"
TEXTS_PRESET = "texts"
"""The default for models that only read texts."""

TABLES: Mapping[str, Mapping[str, str]] = {
    "gate": GATES,
    "order": ORDERS,
    "budget": BUDGETS,
    "reserve": RESERVES,
    "victim": VICTIMS,
    "predictor": PREDICTORS,
    "eviction": EVICTIONS,
    "guesser": GUESSERS,
}


def make_policies(
    preset: str = "penstock",
    *,
    gate: str | Gate | None = None,
    order: str | Order | None = None,
    budget: str | Budget | None = None,
    reserve: str | Reserve | None = None,
    victim: str | Victim | None = None,
    predictor: str | Predictor | None = None,
    eviction: str | EvictionPolicy | None = None,
    guesser: str | Guesser | None = None,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    arguments: Mapping[str, Mapping[str, object]] | None = None,
    background_share: float = 0.0,
) -> Policies:
    """Return a preset's policies, with those given as arguments in their place: by name, as `module:Class`, or as objects.

    `settings` and `arguments` set fields of policies that are not objects, by seam and field, and override the preset's.
    `settings` come from the server's settings, and None leaves a field as it is. `arguments` are what the user wrote for this
    policy. Raises OwnPolicyError for a field in both, and for a class that can't be made; LacksSetting if the policy does not
    have a field of `settings`; ConfigError for an unknown name.
    """
    if preset not in PRESETS:
        raise _unknown("preset", preset, PRESETS)
    overrides = {
        "gate": gate,
        "order": order,
        "budget": budget,
        "reserve": reserve,
        "victim": victim,
        "predictor": predictor,
        "eviction": eviction,
        "guesser": guesser,
    }
    for seam in {**(settings or {}), **(arguments or {})}:
        if seam not in TABLES:
            raise _unknown("seam", seam, TABLES)
    chosen: dict[str, Any] = {}
    words: dict[str, str] = {}
    for seam, override in overrides.items():
        if override is not None and not isinstance(override, str):
            chosen[seam], words[seam] = guarded(seam, override), type(override).__qualname__
            continue
        usual = getattr(PRESETS[preset], seam)
        name = usual if override is None else override
        given = {key: value for key, value in (settings or {}).get(seam, {}).items() if value is not None}
        known = PRESETS[preset].settings.get(seam, {}) if name == usual else {}
        written = (arguments or {}).get(seam, {})
        for key in given.keys() & written.keys():
            remedy = "Leave the argument out, or that setting."
            raise OwnPolicyError(seam, name, f"gets {key} twice: as an argument, and by a setting of its own.", remedy=remedy)
        chosen[seam] = _make(seam, name, {**known, **given}, written)
        shown = ", ".join(f"{key} = {value!r}" for key, value in {**known, **given, **written}.items())
        words[seam] = f"{name} ({shown})" if shown else name
    shares_parts = PRESETS[preset].shares_parts
    return Policies(**chosen, shares_parts=shares_parts, background_share=background_share, words=words)


class LacksSetting(ConfigError):
    """The policy chosen for a seam does not have the given setting."""

    def __init__(self, seam: str, name: str, setting: str, *, seam_words: str = "", setting_words: str = "") -> None:
        """`seam_words` and `setting_words`: the user's spelling of them, for the message."""
        self.seam, self.name, self.setting = seam, name, setting
        super().__init__(
            f"The {seam} {name!r} has no {setting_words or setting}.",
            remedy=f"Choose another {seam_words or seam}, or leave that setting out.",
        )


def _make(seam: str, name: str, settings: Mapping[str, object], arguments: Mapping[str, object]) -> object:
    if not is_own(name) and name not in TABLES[seam]:
        raise _unknown(seam, name, TABLES[seam])
    factory = load(seam, TABLES[seam].get(name, name))
    for setting in settings:
        if setting not in parameters_of(factory):
            raise LacksSetting(seam, name, setting)
    return guarded(seam, make(seam, name, factory, {**settings, **arguments}), name)


def _unknown(kind: str, name: str, table: Mapping[str, object]) -> ConfigError:
    own = "" if kind not in TABLES else " Or name a class of your own: package.module:Class, ./file.py:Class."
    return ConfigError(f"There is no {kind} called {name!r}.", remedy=f"Valid: {', '.join(sorted(table))}.{own}")
