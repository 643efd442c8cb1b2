"""Finds chat templates and the tokenizer's file of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.models.hf_config import JsonFile, read_json
from penstock.types.errors import ModelError

TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")  # files of tokenizers, the most exact first
_DEFAULT = "default"


def find_tokenizer(path: Path) -> Path:
    """Return the first of `TOKENIZERS` that is there. Raises ModelError."""
    for name in TOKENIZERS:
        if (path / name).is_file():
            return path / name
    raise ModelError(
        f"{path}: there is no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}.",
        remedy="Save the tokenizer in its fast form beside the weights.",
    )


def read_ends(path: Path) -> tuple[bool, bool] | None:
    """Return `add_bos_token` and `add_eos_token` of tokenizer_config.json, or None if it has neither.

    transformers 5 lets these override the tokenizer's file.
    """
    config = read_json(path / "tokenizer_config.json", is_optional=True)
    names = ("add_bos_token", "add_eos_token")
    if not any(name in config.values for name in names):
        return None
    has_bos, has_eos = (config.get(name, bool) or False for name in names)
    return has_bos, has_eos


def read_chat_templates(path: Path) -> Mapping[str, str]:
    """Return the templates of a directory by name. One without a name is `default`. Raises ModelError.

    Source: https://huggingface.co/docs/transformers/chat_templating_multiple_templates.
    """
    file = path / "chat_template.jinja"
    others = sorted((path / "additional_chat_templates").glob("*.jinja"))
    if file.is_file() or others:
        named = {other.stem: _read(other) for other in others}
        return {_DEFAULT: _read(file), **named} if file.is_file() else named
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = read_json(path / name, is_optional=True)
        if config.values.get("chat_template") is not None:
            return _named(config)
    return {}


def _named(config: JsonFile) -> Mapping[str, str]:
    found = config.values["chat_template"]
    items = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    templates: dict[str, str] = {}
    for item in items:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if type(name) is not str or type(template) is not str:
            raise config.error("chat_template is neither a text nor a list of named templates")
        templates[name] = template
    return templates


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: can't be read: {error}.", remedy="Fetch the file again.") from error
