"""The settings as a page of Markdown: `make docs` writes it to docs/configuration.md. Formats, never decides."""

from __future__ import annotations

from penstock.config.components import COMPONENTS
from penstock.config.setting import Kind, Setting, settings_of

_HEAD = """# Configuration

Written by `make docs` from `src/penstock/config`; do not edit.

Every setting can be given as a flag, as an environment variable or as a key of a TOML file that `--config FILE.toml`
(or `PENSTOCK_CONFIG`) names. A flag goes before the environment, that before the file, that before the default.
An unknown key, a wrong type and a value that is not available are errors, never ignored; an environment variable that begins
with `PENSTOCK_` and is none of these is warned of. All keys stand at the top level of the file, but for what is said
of one model of several: [how-to/several-models.md](how-to/several-models.md).

Counts may be written `4k` (4,000) or `2Mi` (2,097,152), sizes `512MB` or `4GiB`, durations `250ms`, `30s` or `2m`
(a bare number is seconds), shares `1%` or `0.01`; several counts `128,512`, or as a list in the file. What may be repeated
is a list in the file, and separated by spaces in the environment. A table is one of TOML in the file (`[policy_args]`, below
the keys at the top level), and an inline one elsewhere: `--policy-args '{max_delay_ns = 2_000_000_000}'`.

Where the value may be `module:Class`, it may name a class of your own, as `package.module:Class` or `./file.py:Class`;
[how-to/policy.md](how-to/policy.md) shows how to write, try and serve one.

`penstock serve` takes all of them; `penstock run` and `penstock chat` take those of Model, KV cache and Compute that mean
something to a single request (`--help` lists them), `pull` the model and the cache, `models` and `env` the cache; they pass
over the others in a file.

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
    lines = [f"\n## {title}\n", "| flag | environment | key | value | default | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {_flag(item)} | `{item.env}` | `{item.key}` | {_value(item)} | {_default(item)} | {item.doc} |" for item in settings
    ]
    return "\n".join(lines) + "\n"


def _flag(item: Setting) -> str:
    if item.key == "model":
        return "`MODEL` (an argument; `serve` takes several), `-m`, `--model`"
    return f"`{item.flag}`, `--no-{item.flag[2:]}`" if item.kind is Kind.FLAG else f"`{item.flag}`"


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
