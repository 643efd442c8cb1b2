"""Sources of settings besides flags: a TOML file, which is parsed here, and the environment, checked for unknown variables."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.components import (
    COMPONENTS,
    AdmissionConfig,
    BackendConfig,
    ClusterConfig,
    KvConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    SharingConfig,
)
from penstock.config.pipelines import PIPELINES, parse_pipelines
from penstock.config.routes import ROUTES, parse_routes
from penstock.config.routing import Routing
from penstock.config.setting import Setting, settings_of
from penstock.config.tables import check_keys
from penstock.config.upstreams import UPSTREAMS, parse_upstreams
from penstock.types.errors import ConfigError

PREFIX = "PENSTOCK_"
_OTHERS = ("PENSTOCK_CONFIG", "PENSTOCK_DEBUG")
_OF_A_SERVICE = ("PENSTOCK_SERVICE_", "PENSTOCK_PORT_")
"""How the variables begin that Kubernetes sets for a Service called penstock."""


MODELS = "models"
"""Key of a file's tables with settings of one model."""
_OF_EACH_MODEL = (
    ModelConfig,
    KvConfig,
    LoraConfig,
    SchedulerConfig,
    AdmissionConfig,
    BackendConfig,
    SharingConfig,
    ClusterConfig,
)
_OF_ALL_MODELS = ("cache", "threads", "pin_threads", "models_dir", "memory", "replica_host")


def model_settings() -> tuple[Setting, ...]:
    """Return the settings that can differ between the models of one server."""
    return tuple(item for kind in _OF_EACH_MODEL for item in settings_of(kind) if item.key not in _OF_ALL_MODELS)


def all_settings() -> tuple[Setting, ...]:
    """Return every setting of every component, in order. Keys are unique."""
    return tuple(item for _, component in COMPONENTS for item in settings_of(component))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The settings of a parsed config file, by key."""

    values: dict[str, object]
    models: tuple[dict[str, object], ...] = ()
    """The file's `[[models]]` tables."""
    routing: Routing = field(default_factory=Routing)
    """Its `[[routes]]`, `[[upstreams]]` and `[[pipelines]]` tables."""


def read_config_file(path: Path) -> ConfigFile:
    """Read and check a TOML config file. Raises ConfigError naming file, key and cause."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}.") from None
    models = table.pop(MODELS, [])
    if not isinstance(models, list) or not all(isinstance(entry, dict) for entry in models):
        raise ConfigError(f"{path}: {MODELS} are tables.", remedy=f"Begin each with a line [[{MODELS}]].")
    routing = Routing(
        routes=parse_routes(table.pop(ROUTES, []), f"{path}: ", path.parent),
        upstreams=parse_upstreams(table.pop(UPSTREAMS, []), f"{path}: "),
        pipelines=parse_pipelines(table.pop(PIPELINES, []), f"{path}: ", path.parent),
    )
    keys = {item.key for item in all_settings()}
    for key, raw in table.items():
        if key not in keys and any(isinstance(one, dict) for one in (raw if isinstance(raw, list) else [raw])):
            raise ConfigError(
                f"{path}: there are no tables such as [{key}].",
                remedy="Put all keys at the top level: only models, routes, upstreams, pipelines and [policy_args] are tables.",
            )
    return ConfigFile(
        parse_settings(table, all_settings(), place=f"{path}: "),
        tuple(_parse_model(entry, f"{path}: [[{MODELS}]] {number}: ") for number, entry in enumerate(models, 1)),
        routing,
    )


def _parse_model(raw: Mapping[str, object], place: str) -> dict[str, object]:
    of_all = {item.key for item in all_settings()} - {item.key for item in model_settings()}
    for key in raw:
        if key in of_all:
            raise ConfigError(f"{place}{key} is set for all models, not for one.", remedy="Put it at the top level.")
    if "model" not in raw:
        raise ConfigError(f"{place}there is no key 'model'.", remedy="Say which model it is.")
    return parse_settings(raw, model_settings(), place=place)


def parse_settings(raw: Mapping[str, object], settings: Sequence[Setting], *, place: str = "") -> dict[str, object]:
    """Return key -> checked value. A `raw` value is text as in the file, or has its final type.

    Raises ConfigError for an unknown key and for a wrong value, with `place` before the message.
    """
    known = {item.key: item for item in settings}
    check_keys(raw, known, place)
    values: dict[str, object] = {}
    for key, value in raw.items():
        try:
            values[key] = _parse_value(known[key], value)
        except ValueError as error:
            raise ConfigError(f"{place}{key}: {error}.") from None
    return values


def _parse_value(item: Setting, raw: object) -> object:
    if not item.is_multiple:
        return item.parse(raw)
    return tuple(item.parse(entry) for entry in (raw if isinstance(raw, list | tuple) else [raw]))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each misspelt environment variable: one that begins with PENSTOCK_ and is unknown."""
    known = [*(item.env for item in all_settings()), *_OTHERS]
    names = [name for name in sorted(environ) if name.startswith(PREFIX) and not name.startswith(_OF_A_SERVICE)]
    return [_warning(name, known) for name in names if name not in known]


def _warning(name: str, known: list[str]) -> str:
    # The common prefix would make all names similar.
    close = difflib.get_close_matches(name.removeprefix(PREFIX), [item.removeprefix(PREFIX) for item in known], n=1)
    guess = f" Did you mean {PREFIX}{close[0]}?" if close else ""
    return f"The environment variable {name} is unknown and has no effect.{guess}"
