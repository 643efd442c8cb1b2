"""The recorder of a running model: opens the recording that the settings ask for, and says in its header what made it. The
factory calls it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__, machine
from penstock.config import Config
from penstock.config.setting import Component, Kind, settings_of
from penstock.deploy.policies import build_policies, preset_of
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.deploy.arms import Arms
    from penstock.engine.ports import Executor
    from penstock.obs.recording import Recorder


NOT_RECORDED = "not recorded"


def check_recording(config: Config) -> None:
    """Raise ConfigError, before a model is loaded, if the recording can't be begun."""
    if config.server.record is not None:
        from penstock.obs.recording import check_path

        check_path(Path(config.server.record))


def open_recorder(config: Config, name: str, executor: Executor, clock: Clock, arms: Arms | None = None) -> Recorder | None:
    """The recorder of the model with this name; None if none is asked for. `config` has device and backend decided.

    Raises ConfigError if the file can't be written.
    """
    if config.server.record is None:
        return None
    from penstock.obs.recording import Recorder

    has_names = config.server.record_tenant_names
    header = about(config, name, executor)
    if arms is not None:
        header["arms"] = arms.about() | {
            "differences": {
                key: (a, b) if has_names else (_unnamed(key, a, config), _unnamed(key, b, arms.b))
                for key, (a, b) in arms.differences.items()
            }
        }
    try:
        return Recorder(
            Path(config.server.record),
            max_bytes=config.server.record_size_bytes,
            clock=clock,
            block_size=executor.capacity.block_size,
            about=header,
            has_tenant_names=has_names,
            tenants=() if has_names else tuple(_shares(config)),
        )
    except OSError as error:
        remedy = "Name another file with --record."
        raise ConfigError(f"The recording {config.server.record} can't be written: {error}.", remedy=remedy) from error


def about(config: Config, name: str, executor: Executor) -> dict[str, object]:
    """Model, machine and settings, as JSON: all that steps and plans depend on."""
    if executor.capacity.is_one_pass:  # whoever replays it does not know what the model does
        preset = preset_of(config, is_one_pass=True)
        config = replace(config, scheduler=replace(config.scheduler, preset=preset))
    settings = _settings(config)
    return {
        "penstock": __version__,
        "model": name,
        "machine": {"cpu": machine.cpu_name(), "cpus": machine.usable_cpus()},
        "backend": config.backend.backend,
        "threads": getattr(executor, "num_threads", None),
        "variant": getattr(executor, "variant", None),
        "config": blake2b(json.dumps([name, settings], sort_keys=True, default=str).encode(), digest_size=6).hexdigest(),
        "settings": settings,
        "policies": _words(config),
        "capacity": asdict(executor.capacity),
        "depth": executor.depth,
        "max_adapters": config.lora.max_loras if config.lora.is_on else 0,
        "has_prefix_caching": config.kv.prefix_caching,
        "has_tier": bool(config.kv.kv_disk_size_bytes or config.kv.kv_host_size_bytes),
    }


def _settings(config: Config) -> dict[str, object]:
    """Settings of KV cache, scheduling and compute that are not the defaults, by key; no file or folder of this machine."""
    has_names = config.server.record_tenant_names
    parts: tuple[Component, ...] = (config.kv, config.scheduler, config.backend)
    return {
        item.key: value if has_names else _unnamed(item.key, value, config)
        for part in parts
        for item in settings_of(type(part))
        if item.kind is not Kind.PATH and (value := getattr(part, item.field)) != item.default
    }


def _unnamed(key: str, value: object, config: Config) -> object:
    """The value of a setting without names that the operator gave.

    Tenants with a share have their numbers in the recording. A policy of the operator's own is told by its class alone: what it
    is given may name anything.
    """
    from penstock.sched.policies.own import UNNAMED, is_own

    policy = key.removesuffix("_args")
    name = getattr(config.kv if policy == "kv_eviction" else config.scheduler, policy, None)
    if isinstance(name, str) and is_own(name):
        return UNNAMED + name.rpartition(":")[2] if key == policy else NOT_RECORDED
    if key == "policy_args":
        return _numbered(config).scheduler.policy_args
    return value


def _shares(config: Config) -> Mapping[str, object]:
    """Tenant -> its share, under a policy that has such."""
    shares = (config.scheduler.policy_args or {}).get("shares")
    return shares if isinstance(shares, Mapping) else {}


def _numbered(config: Config) -> Config:
    """The settings, with the number in the recording in place of each tenant that has a share."""
    if not (shares := _shares(config)):
        return config
    numbered = {str(number): share for number, share in enumerate(shares.values())}
    arguments = {**(config.scheduler.policy_args or {}), "shares": numbered}
    return replace(config, scheduler=replace(config.scheduler, policy_args=arguments))


def _words(config: Config) -> Mapping[str, str]:
    """The policies in words, by seam."""
    from penstock.sched.policies.own import UNNAMED, is_own
    from penstock.sched.policies.presets import TABLES

    if config.server.record_tenant_names:
        return build_policies(config).words
    is_known = not is_own(config.scheduler.policy or "")
    words = build_policies(_numbered(config) if is_known else config).words
    return {seam: told if told.split(" (")[0] in TABLES[seam] else f"{UNNAMED}class" for seam, told in words.items()}
