"""Settings as a file for `--config`, which `penstock tune` writes, and the hash of the scheduling settings in the metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

from penstock.config.components import COMPONENTS, Config, SchedulerConfig
from penstock.config.setting import settings_of

FORMAT = 1
"""Version of the file and of the hash."""
_WRITTEN = ("model", "kv", "scheduler", "backend")
_OF_THIS_MACHINE = ("cache", "kv_disk_path")
_HASHED = {item.key for item in settings_of(SchedulerConfig)} | {"kv_watermark"}
"""The settings that `penstock tune` may change."""


def settings_hash(config: Config) -> str:
    """Return 12 hexadecimal digits that identify the scheduling settings, whatever file, flag or variable set them.

    Leaving a setting out and setting it to the value of its preset give different hashes.
    """
    hashed = {key: value for key, value in _changed_settings(config).items() if key in _HASHED}
    text = json.dumps([FORMAT, hashed], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def write_config_file(
    config: Config, notes: Sequence[str], *, components: Sequence[str] = _WRITTEN, without: Collection[str] = ()
) -> str:
    """Return the changed settings of model, KV cache, scheduling and compute as TOML text, with the notes as comments.

    `components`: those to write. `without`: keys to leave out. Secrets and folders of this machine are always left out.
    """
    lines = [f"# penstock settings, format {FORMAT}, hash {settings_hash(config)}"]
    lines += [f"# {' '.join(note.split())}" for note in notes]
    lines += [f"{key} = {_toml(value)}" for key, value in _changed_settings(config, components).items() if key not in without]
    return "\n".join(lines) + "\n"


def _changed_settings(config: Config, components: Sequence[str] = _WRITTEN) -> dict[str, object]:
    return {
        item.key: value
        for name, component in COMPONENTS
        if name in components
        for item in settings_of(component)
        if not item.is_secret
        and item.key not in _OF_THIS_MACHINE
        and (value := getattr(getattr(config, name), item.field)) != item.default
    }


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # dates and times
