"""Chat templates and the tokenizer's file of a Hugging Face directory. `models.hf` calls it; `text` gives them a meaning.

Where transformers keeps templates: https://huggingface.co/docs/transformers/chat_templating_multiple_templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.models.hf_config import JsonFile, read_json
from penstock.types.errors import ModelError

TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")
"""Files that a tokenizer can be read from, the most exact first."""
_DEFAULT = "default"


def find_tokenizer(path: Path) -> Path:
    """The file of a directory's tokenizer: the first of `TOKENIZERS` that is there. Raises ModelError."""
    for name in TOKENIZERS:
        if (path / name).is_file():
            return path / name
    raise ModelError(
        f"{path}: there is no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}.",
        remedy="Save the tokenizer in its fast form beside the weights.",
    )


def read_ends(path: Path) -> tuple[bool, bool] | None:
    """`add_bos_token` and `add_eos_token` of tokenizer_config.json; None if it has neither. Raises ModelError.

    As transformers 5 does (`TokenizersBackend`), which makes the tokenizer anew by them where one is named.
    """
    config = read_json(path / "tokenizer_config.json", is_optional=True)
    names = ("add_bos_token", "add_eos_token")
    if not any(name in config.values for name in names):
        return None
    has_bos, has_eos = (config.get(name, bool) or False for name in names)
    return has_bos, has_eos


def read_chat_templates(path: Path) -> Mapping[str, str]:
    """The templates of a directory by name; without a name of its own one is `default`. Raises ModelError.

    chat_template.jinja and the files in additional_chat_templates take the place of what tokenizer_config.json or, of models
    that also see, chat_template.json has.
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
    """The templates under `chat_template`: a text, or a list of objects with a name and a template."""
    found = config.values["chat_template"]
    items = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    templates: dict[str, str] = {}
    for item in items:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if type(name) is not str or type(template) is not str:
            raise config.error("chat_template is no text, and no list of named ones")
        templates[name] = template
    return templates


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: can't be read: {error}.", remedy="Fetch the file again.") from error
