"""The table of sampling parameters in docs/http-api.md: `make docs` writes it there."""

from __future__ import annotations

import math
from pathlib import Path

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
    """Return the table."""
    lines = ["| parameter | values | default | effect | in |", "|---|---|---|---|---|"]
    for name, one in PARAMETERS.items():
        default = "" if one.neutral is None else f"{one.neutral:g}"
        lines.append(f"| `{name}` | {_range(one, 'openai')} | {default} | {one.text} | {_places(name, one)} |")
    return "\n".join(lines) + "\n"


def _places(name: str, one: Parameter) -> str:
    places = []
    for api, word in APIS.items():
        if api not in one.spellings:
            continue
        notes = [f"`{one.spellings[api].name}`"] if one.spellings[api].name != name else []
        notes += [_range(one, api)] if _range(one, api) != _range(one, "openai") else []
        places.append(f"{word} ({', '.join(notes)})" if notes else word)
    return ", ".join(places)


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
    """Return the page with the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
