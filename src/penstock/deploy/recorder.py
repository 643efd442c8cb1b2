"""The recorder of a running model: opens the recording that the settings ask for, and says in its header what made it. The
factory calls it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__, machine
from penstock.config import Config
from penstock.config.setting import Component, Kind, settings_of
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.engine.ports import Executor
    from penstock.obs.recording import Recorder


NOT_RECORDED = "not recorded"


def check_recording(config: Config) -> None:
    """Raise ConfigError, before a model is loaded, if the recording can't be begun."""
    if config.server.record is not None:
        from penstock.obs.recording import check_path

        check_path(Path(config.server.record))


def open_recorder(config: Config, name: str, executor: Executor, clock: Clock) -> Recorder | None:
    """The recorder of the model with this name; None if none is asked for. `config` has device and backend decided.

    Raises ConfigError if the file can't be written.
    """
    if config.server.record is None:
        return None
    from penstock.obs.recording import Recorder

    has_names = config.server.record_tenant_names
    try:
        return Recorder(
            Path(config.server.record),
            max_bytes=config.server.record_size_bytes,
            clock=clock,
            block_size=executor.capacity.block_size,
            about=about(config, name, executor),
            has_tenant_names=has_names,
        )
    except OSError as error:
        remedy = "Name another file with --record."
        raise ConfigError(f"The recording {config.server.record} can't be written: {error}.", remedy=remedy) from error


def about(config: Config, name: str, executor: Executor) -> dict[str, object]:
    """Return the facts of model, machine and settings, as JSON."""
    parts: tuple[Component, ...] = (config.kv, config.scheduler, config.backend)
    told = {
        item.key: _told(item.key, value, config.server.record_tenant_names)
        for part in parts
        for item in settings_of(type(part))
        if item.kind is not Kind.PATH and (value := getattr(part, item.field)) != item.default
    }
    return {
        "penstock": __version__,
        "model": name,
        "machine": {"cpu": machine.cpu_name(), "cpus": machine.usable_cpus()},
        "backend": config.backend.backend,
        "threads": getattr(executor, "num_threads", None),
        "variant": getattr(executor, "variant", None),
        "config": blake2b(json.dumps([name, told], sort_keys=True, default=str).encode(), digest_size=6).hexdigest(),
        "settings": told,
        "capacity": asdict(executor.capacity),
        "depth": executor.depth,
    }


def _told(key: str, value: object, has_names: bool) -> object:
    """Return the value of a setting, unless it may name tenants or files: a policy's arguments, or a policy of one's own."""
    from penstock.sched.policies.own import is_own

    if has_names or not (key.endswith("_args") or (isinstance(value, str) and is_own(value))):
        return value
    return NOT_RECORDED
