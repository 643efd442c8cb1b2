"""The arms of an A/B test: reads the settings of arm B, refuses those that can't hold for a share of the requests, and says
which request is in which arm. The factory makes one `Arms`, and the server asks it for each call; without a test there is none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.components import COMPONENTS, config_from
from penstock.config.setting import settings_of
from penstock.config.sources import read_config_file
from penstock.deploy.policies import build_policies
from penstock.types.errors import ConfigError, counted
from penstock.types.request import ARM_A, ARM_B

if TYPE_CHECKING:
    from penstock.sched.policies.base import Policies

DEFAULT_SHARE = 0.5
_HASH_BYTES = 8
_SECRET_OF_START = secrets.token_hex(32)
"""Draws the arms where the settings have no secret; all models of a server share it."""

BY_REQUEST = frozenset(
    (
        "policy",
        "policy_args",
        "length_predictor",
        "length_predictor_args",
        "reserve",
        "reserve_args",
        "kv_watermark",
        "max_queue",
        "slo_ttft",
        "kv_headroom",
        "request_timeout",
        "queue_timeout",
        "first_token_timeout",
    )
)
"""Settings that decide about one request at a time, and so may differ in arm B."""
_SHARED: Mapping[str, str] = {
    "model": "all requests are answered by one model",
    "kv": "all requests share one KV cache",
    "lora": "a request has the adapter that it names, whichever arm it is in",
    "scheduler": "it decides for steps and memory that requests of both arms share",
    "admission": "it counts all calls of a tenant together",
    "backend": "all requests are computed by one backend",
    "server": "it belongs to the server, not to a request",
    "ab": "it is the test itself",
    "log": "it belongs to the server, not to a request",
}
"""Component -> why its other settings can't differ in arm B."""
_DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "policy": ("policy_args",),
    "length_predictor": ("length_predictor_args",),
    "reserve": ("reserve_args", "kv_watermark"),
}
"""Name of a policy -> settings that are made for it: arm B with another policy does not take over arm A's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    b: Config
    """All settings of arm B."""
    differences: Mapping[str, tuple[object, object]]
    """Key of a setting -> its value in arm A, and in arm B; not empty."""
    share: float
    """The share of the requests that is drawn for arm B, [0, 1); 0 where tenants are named."""
    is_by_request: bool
    """Each request is drawn alone; else its user."""
    tenants: frozenset[str]
    """They are arm B with all their requests."""
    key: bytes
    """The key of the hash. It depends on the secret and on what differs: other settings draw anew."""
    _numbers: Iterator[int] = field(default_factory=count)
    """Numbers of requests that are drawn alone. No name that a client sends counts there, or it would choose its arm."""

    def arm_of(self, tenant: str, user: str) -> str:
        """The arm of one call. `user` and `tenant` may be empty. A larger share keeps all that a smaller one had in arm B."""
        if tenant in self.tenants:
            return ARM_B
        if not self.share:
            return ARM_A
        unit = f"{next(self._numbers)}" if self.is_by_request or not (tenant or user) else f"{tenant}\0{user}"
        drawn = int.from_bytes(blake2b(unit.encode(), key=self.key, digest_size=_HASH_BYTES).digest(), "big")
        return ARM_B if drawn < self.share * 2 ** (8 * _HASH_BYTES) else ARM_A

    @property
    def words(self) -> str:
        """The test in words, for the log."""
        named = ", ".join(f"{key} = {b!r} (A: {a!r})" for key, (a, b) in self.differences.items())
        if self.tenants:
            return f"the requests of {counted(len(self.tenants), 'tenant')} are arm B: {named}"
        return f"{self.share:.3g} of the {'requests' if self.is_by_request else 'users'} are arm B: {named}"

    def policies(self, a: Config, *, is_one_pass: bool = False) -> Policies:
        """Those of both arms, of which `a` has the settings of arm A. `is_one_pass` is that of `Capacity`."""
        from penstock.sched.policies.arms import policies_by_arm

        b = build_policies(self.b, is_one_pass=is_one_pass)
        return policies_by_arm(build_policies(a, is_one_pass=is_one_pass), b)

    def about(self) -> dict[str, object]:
        """The test for the header of a recording; no tenant's name."""
        return {
            "share": self.share,
            "by": "request" if self.is_by_request else "user",
            "tenants": len(self.tenants),
            "differences": self.differences,
        }


def read_arms(config: Config) -> Arms | None:
    """The test that the settings ask for, if any. Raises ConfigError for one that can't be done."""
    test = config.ab
    if test.ab is None:
        if test.ab_share is not None or test.ab_tenants:
            raise ConfigError("There is no arm B.", remedy="Name the file with its settings with --ab.")
        return None
    if test.ab_share is not None and test.ab_tenants:
        raise ConfigError("Arm B is a share of the requests, or the requests of some tenants.", remedy="Give one of them.")
    file = read_config_file(Path(test.ab))
    if file.models:
        raise ConfigError(f"{test.ab}: an arm is no model.", remedy="Leave out the tables [[models]].")
    b = with_settings(config, file.values)
    differences = _differences(config, b)
    if not differences:
        raise ConfigError(f"{test.ab}: arm B has the settings that the server has.", remedy="Change a setting there.")
    for key in differences:
        _check(key, config, b)
    try:
        build_policies(b)
    except ConfigError as error:
        raise ConfigError(f"{test.ab}: {error.message}", remedy=error.remedy) from error
    told = json.dumps(differences, sort_keys=True, default=str).encode()
    secret = blake2b((test.ab_secret or _SECRET_OF_START).encode()).digest()
    return Arms(
        b=b,
        differences=differences,
        share=0.0 if test.ab_tenants else test.ab_share or DEFAULT_SHARE,
        is_by_request=test.ab_by == "request",
        tenants=frozenset(test.ab_tenants),
        key=blake2b(told, key=secret, digest_size=32).digest(),
    )


def with_settings(config: Config, given: Mapping[str, object]) -> Config:
    """A config with some settings in place of its own, by their keys."""
    values = _values(config)
    for policy, dependents in _DEPENDENTS.items():
        if policy in given and given[policy] != values[policy]:
            values.update(dict.fromkeys(dependents))
    return config_from({**values, **given})


def _values(config: Config) -> dict[str, object]:
    """Key of each setting -> its value."""
    return {item.key: getattr(getattr(config, name), item.field) for name, kind in COMPONENTS for item in settings_of(kind)}


def _differences(a: Config, b: Config) -> dict[str, tuple[object, object]]:
    values, others = _values(a), _values(b)
    return {key: (values[key], others[key]) for key in values if values[key] != others[key]}


def _check(key: str, a: Config, b: Config) -> None:
    """Raise ConfigError for a setting that can't hold for a share of the requests."""
    remedy = "Start another server with it, send both the same workload, and `penstock bench compare` the results."
    if key not in BY_REQUEST:
        component = next(name for name, kind in COMPONENTS if key in {item.key for item in settings_of(kind)})
        why = "it names policies for all requests, such as the budget" if key == "preset" else _SHARED[component]
        raise ConfigError(f"{a.ab.ab}: {key} can't differ in arm B: {why}.", remedy=remedy)
    if key in ("policy", "policy_args"):
        from penstock.sched.policies.arms import ORDERS_BY_ARM
        from penstock.sched.policies.presets import PRESETS, USUAL_PRESET

        for config in (a, b):
            name = config.scheduler.policy or PRESETS[config.scheduler.preset or USUAL_PRESET].order
            if name not in ORDERS_BY_ARM:
                orders = ", ".join(ORDERS_BY_ARM)
                raise ConfigError(
                    f"{a.ab.ab}: {key} can't differ in arm B: {name} weighs requests of both arms against each other. Each arm "
                    f"may have an order of {orders}.",
                    remedy=remedy,
                )


def recorded_policies(
    settings: Mapping[str, object], arms: Mapping[str, Mapping[str, tuple[object, object]]] | None
) -> Policies:
    """The policies of a server whose recording has these settings, and this test, in its header.

    Raises ConfigError where one is not recorded.
    """
    from penstock.sched.policies.own import UNNAMED

    told = [*settings.values(), *(value for both in (arms or {}).get("differences", {}).values() for value in both)]
    for value in told:
        if isinstance(value, str) and value.startswith(UNNAMED):
            raise ConfigError(
                f"The server had a policy of its own, {value.removeprefix(UNNAMED)}, and the recording does not say where.",
                remedy="Record with --record-tenant-names, and check the plans where Python finds the class.",
            )
    a = config_from(settings)
    if arms is None:
        return build_policies(a)
    from penstock.sched.policies.arms import policies_by_arm

    b = config_from({**_values(a), **{key: value for key, (_, value) in arms["differences"].items()}})
    return policies_by_arm(build_policies(a), build_policies(b))
