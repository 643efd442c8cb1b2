"""The list of sampling parameters in docs/http-api.md: `make docs` writes it there."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill

from penstock.types.sampling import PARAMETERS, Parameter

PAGE = Path(__file__).parent.parent / "docs" / "http-api.md"
BEGIN, END = "<!-- sampling: written by make docs -->\n", "<!-- end of sampling -->\n"
APIS = {
    "openai": "OpenAI",
    "responses": "Responses",
    "anthropic": "Anthropic",
    "cohere": "Cohere",
    "ollama": "Ollama",
    "tgi": "TGI",
    "llama_cpp": "llama.cpp",
    "python": "Python",
    "cli": "CLI",
}


def render() -> str:
    """Return the list."""
    items = []
    for name, one in PARAMETERS.items():
        default = "" if one.neutral is None else f"; default {one.neutral:g}"
        item = f"- `{name}` ({_range(one, 'openai')}{default}): {one.text} {_places(name, one)}"
        items.append(fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(items) + "\n"


def _places(name: str, one: Parameter) -> str:
    """Return the APIs that have the parameter, or those that lack it if these are few, and other names and bounds."""
    has = [word for api, word in APIS.items() if api in one.spellings]
    lacks = [word for api, word in APIS.items() if api not in one.spellings]
    notes = []
    for api, word in APIS.items():
        if api not in one.spellings:
            continue
        other = [f"`{one.spellings[api].name}`"] if one.spellings[api].name != name else []
        other += [_range(one, api)] if _range(one, api) != _range(one, "openai") else []
        notes += [f"{word} {' '.join(other)}"] if other else []
    places = f"In {', '.join(has)}" if len(has) < len(lacks) else f"In all but {', '.join(lacks)}" if lacks else "In all"
    return f"{places}; {', '.join(notes)}." if notes else f"{places}."


def _range(one: Parameter, api: str) -> str:
    bounds = one.spellings[api]
    high = _number(bounds.high)
    if bounds.low == -math.inf:
        return f"up to {high}"
    return f"above {_number(bounds.low)}, up to {high}" if bounds.excludes_low else f"{_number(bounds.low)} to {high}"


def _number(value: float) -> str:
    """Return a number, as a power of two if it is large."""
    exponent = round(math.log2(abs(value))) if abs(value) > 10**6 else 0
    if not exponent:
        return f"{value:g}"
    return ("-" if value < 0 else "") + f"2^{exponent}" + (" - 1" if value > 0 else "")


def page() -> str:
    """Return the page with the list."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
