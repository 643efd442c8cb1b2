"""The settings as a page of Markdown: `make docs` writes it to docs/configuration.md. Formats, never decides."""

from __future__ import annotations

from textwrap import fill

from penstock.config.components import COMPONENTS
from penstock.config.setting import Setting, settings_of

_HEAD = """# Configuration

All settings of Penstock. Written by `make docs` from `src/penstock/config`; do not edit.

Each setting is a flag (`--max-num-seqs 32`), an environment variable (`PENSTOCK_MAX_NUM_SEQS=32`) and a key
(`max_num_seqs = 32`) of the TOML file that `--config FILE.toml` or `PENSTOCK_CONFIG` names. The flag wins over the
environment, that over the file, that over the default. An unknown key, a wrong type and a value that is not available
are errors; an unknown environment variable that begins with `PENSTOCK_` is a warning. Keys stand at the top level of
the file, except those of [one model of several](how-to/several-models.md).

- Counts: `4k` (4,000), `2Mi` (2,097,152); several: `128,512`, or a list in the file.
- Sizes: `512MB`, `4GiB`. Durations: `250ms`, `30s`, `2m`; a bare number is seconds. Shares: `1%`, `0.01`.
- Flags may be negated: `--no-page`, `page = false`, `PENSTOCK_PAGE=false`.
- Repeatable settings: a list in the file, separated by spaces in the environment.
- Tables: a TOML table in the file (`[policy_args]`, below the keys at the top level), inline elsewhere:
  `--policy-args '{max_delay_ns = 2_000_000_000}'`.
- `module:Class` may name [a class of your own](how-to/policy.md), as `package.module:Class` or `./file.py:Class`.

`penstock serve` takes all settings; `run` and `chat` take those of Model, KV cache and Compute that concern a single
request (see `--help`), `pull` the model and the cache, `models` and `env` the cache. They ignore the others in a file.

```toml
# penstock.toml
model = "smollm2:135m"
port = 8080
max_num_seqs = 32
kv_cache_memory = "2GiB"
shutdown_timeout = "10s"
```
"""


def render() -> str:
    """The page, ending in a newline."""
    sections = [_section(component.title, settings_of(component)) for _, component in COMPONENTS]
    return _HEAD + "".join(sections)


def _section(title: str, settings: tuple[Setting, ...]) -> str:
    items = [f"- **{_flag(item)}** ({_value(item)}; default {_default(item)}): {item.doc}" for item in settings]
    lines = [fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for item in items]
    return "\n".join([f"\n## {title}\n", *lines]) + "\n"


def _flag(item: Setting) -> str:
    if item.key == "model":
        return "`MODEL` (an argument; `serve` takes several), `-m`, `--model`"
    return f"`{item.flag}`"


def _value(item: Setting) -> str:
    if item.choices:
        names = [f"`{choice}`" for choice in item.choices]
        return ", ".join([*names, "`module:Class`"] if item.takes_class else names)
    lower = "" if item.minimum is None else f"from {item.shown(item.minimum)}"
    limits = [lower, f"to {item.shown(item.maximum)}" if item.maximum else ""]
    text = " ".join([item.kind.value, *filter(None, limits)])
    return f"{text}, repeatable" if item.is_multiple else text


def _default(item: Setting) -> str:
    return item.shown_default if item.default_doc else f"`{item.shown_default}`"


if __name__ == "__main__":
    print(render(), end="")
