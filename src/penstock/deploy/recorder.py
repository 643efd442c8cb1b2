"""Opens the recording of a model's requests and steps (`--record`), and writes its header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__, machine
from penstock.backends import cuda
from penstock.config import Backend, ServerConfig
from penstock.config.setting import Component, Kind, settings_of
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.engine.ports import Executor
    from penstock.obs.recording import Recorder

    OpenRecorder = Callable[[str, str | None, Executor, Clock], Recorder]
    """Takes a model's own name, backend and executor and the clock, and begins its recording."""

NOT_RECORDED = "not recorded"


def plan_recording(server: ServerConfig, parts: Sequence[Component]) -> OpenRecorder | None:
    """Check that the recording can be written. Return a function that begins it, or None without `--record`.

    `parts`: the configs to write into the header. Both this and the function raise ConfigError if the file can't be written.
    """
    if server.record is None:
        return None
    from penstock.obs.recording import check_path

    path, has_names = Path(server.record), server.record_tenant_names
    check_path(path)
    settings = shown_settings(parts, has_names=has_names)

    def open_recorder(name: str, backend: str | None, executor: Executor, clock: Clock) -> Recorder:
        from penstock.obs.recording import Recorder

        try:
            return Recorder(
                path,
                max_bytes=server.record_size_bytes,
                clock=clock,
                block_size=executor.capacity.block_size,
                about=_about(settings, name, backend, executor),
                has_tenant_names=has_names,
            )
        except OSError as error:
            remedy = "Name another file with --record."
            raise ConfigError(f"The recording {path} can't be written: {error}.", remedy=remedy) from error

    return open_recorder


def shown_settings(parts: Sequence[Component], *, has_names: bool) -> dict[str, object]:
    """Return the settings of these configs that are not the defaults, without paths, as others may see them."""
    return {
        item.key: _recorded(item.key, value, has_names)
        for part in parts
        for item in settings_of(type(part))
        if item.kind is not Kind.PATH and (value := getattr(part, item.field)) != item.default
    }


def processor_name(backend: str | None) -> str:
    """Return the name of the GPU or CPU that computes with this backend, for cost models. Empty if Linux does not say."""
    gpu = cuda.find_gpu() if backend == Backend.CUDA else None
    return gpu.name if isinstance(gpu, cuda.Gpu) else machine.cpu_name()


def _about(settings: Mapping[str, object], name: str, backend: str | None, executor: Executor) -> dict[str, object]:
    """Return the recording's header: facts of model, machine and settings."""
    capacity = asdict(executor.capacity)
    for key in ("checks_guesses", "vocab_size"):  # a recording has no tokens to draft from; older readers don't know these keys
        del capacity[key]
    return {
        "penstock": __version__,
        "model": name,
        "machine": {"cpu": processor_name(backend), "cpus": machine.usable_cpus()},
        "backend": backend,
        "threads": getattr(executor, "num_threads", None),
        "variant": getattr(executor, "variant", None),
        "config": blake2b(json.dumps([name, settings], sort_keys=True, default=str).encode(), digest_size=6).hexdigest(),
        "settings": settings,
        "capacity": capacity,
        "depth": executor.depth,
    }


def _recorded(key: str, value: object, has_names: bool) -> object:
    """Return a setting's value for the header, hidden if it may name tenants or files and `has_names` is false."""
    from penstock.sched.policies.own import is_own

    may_name = key == "speculation_model" or key.endswith("_args") or (isinstance(value, str) and is_own(value))
    return NOT_RECORDED if may_name and not has_names else value
