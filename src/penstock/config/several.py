"""Makes the config of each model that a server serves.

Models come from words of the command line, `[[models]]` tables of the config file, and files of a folder. A model's table
overrides the settings of flags, environment and file for all models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.config.components import Config, Load, config_from
from penstock.config.sources import MODELS, all_settings
from penstock.types.errors import ConfigError

_OF_ONE_MODEL = (
    "served_model_name",
    "alias",
    "chat_template",
    "kv_disk_path",
    "lora_modules",
    "lora_dir",
    "merge_lora",
    "split_of",
    "split_share",
    "split_tenant",
)
"""Settings that several models can't share."""
_ALONE = ("record", "kv_events")
"""Settings that need a server with a single model."""


def configs_of(
    values: Mapping[str, object],
    *,
    words: Sequence[str] = (),
    tables: Sequence[Mapping[str, object]] = (),
    folder: Sequence[tuple[str, str]] = (),
) -> list[Config]:
    """Return a config for each model, the default one first. Without any model, return the config of the default model.

    - `values`: settings of all models by key.
    - `words`: models of the command line, which come first. A word can be the name or the `model` of a table.
    - `folder`: (name, path) of models that load on request. A model that a word names is left out.

    Raises ConfigError for settings that several models can't share.
    """
    found = [
        {"model": path, "served_model_name": (name,)}
        for name, path in folder
        if not any(_is_of(table, path) for table in tables)
    ]
    rest = [*tables, *found]
    models = [_take(word, rest) for word in words]
    models += [{"load_on": Load.REQUEST.value, **table} if table in found else table for table in rest]
    if len(models) > 1 or folder:
        _check_common(values, len(models))
    return [config_from({**values, **own_settings(model)}) for model in models or [{}]]


def config_of_found(values: Mapping[str, object], name: str, path: str) -> Config:
    """Return the config of a model that was added to the models folder while the server runs."""
    return config_from({**values, **own_settings({"load_on": Load.REQUEST.value, "model": path, "served_model_name": (name,)})})


def own_settings(table: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a model's table. If the table changes a policy, reset that policy's common arguments."""
    return {**{f"{key}_args": None for key in table}, **table}


def _take(word: str, rest: list[Mapping[str, object]]) -> Mapping[str, object]:
    """Return the table that a command-line word names, and remove it from `rest`. For any other word, return a new table."""
    table = find_table(word, rest)
    if table is None:
        return {"model": word}
    rest.remove(table)
    return table


def find_table(word: str, tables: Sequence[Mapping[str, object]]) -> Mapping[str, object] | None:
    """Return the table with this name or model, or None."""
    for table in sorted(tables, key=lambda table: "split_of" in table):  # of two tables of one file, not the one with a part
        if word in _names(table) or _is_of(table, word):
            return table
    return None


def _names(table: Mapping[str, object]) -> tuple[object, ...]:
    names = table.get("served_model_name")
    return names if isinstance(names, tuple) else ()


def _is_of(table: Mapping[str, object], model: str) -> bool:
    """Return whether a table is the model of this path. A table that splits the model's requests is another one beside it."""
    place = _place(model)
    file = place.name.rpartition(":")[2]  # of hf:org/repo:file.gguf
    names = (place.name, file.removesuffix(".gguf"), model.removeprefix("hf:"))
    return place == _place(table["model"]) and table.get("split_of") not in names


def _place(model: object) -> Path:
    """Return an absolute path, so that all spellings of a model's path are equal."""
    path = Path(str(model))
    with suppress(RuntimeError):  # an unknown home folder is an error when the model is looked up
        path = path.expanduser()
    return path.absolute()


def _check_common(values: Mapping[str, object], num_models: int) -> None:
    are_served = f"{num_models} are served" if num_models > 1 else "those of a folder are served"
    for item in all_settings():
        is_set = values.get(item.key, item.default) != item.default
        if is_set and item.key in _OF_ONE_MODEL:
            remedy = f"Set {item.key} in the tables [[{MODELS}]] of a file for --config."
            raise ConfigError(f"{item.flag} is of one model, and {are_served}.", remedy=remedy)
        if is_set and item.key in _ALONE:
            raise ConfigError(f"{item.flag} is for a server of one model, and {are_served}.", remedy="Serve that model alone.")
