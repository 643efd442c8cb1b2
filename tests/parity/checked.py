"""The list of docs/notes/checked-models.md, which says what of each architecture was checked: `make docs` writes it.

It reads the cases and which of them `test_tiny.py` and `test_encoders.py` run through the core. Formats, never decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from penstock.models import architectures
from support.parity.encoder_cases import CLASSES, ENCODERS
from support.parity.tiny import TinyCase
from support.parity.tiny_cases import CASES
from support.parity.tiny_runs import runs

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "checked-models.md"
BEGIN, END = "<!-- written by `make docs` from tests/support/parity/tiny_cases.py -->\n", "<!-- until here -->\n"
REAL_WEIGHTS: Mapping[str, str] = {
    "llama": "SmolLM2 135M: `make test`, and `make test-parity` over 20,460 tokens; TinyLlama 1.1B in IQ2_XXS: "
    "[20,460 tokens](../models.md#perplexity)",
    "gemma3": "Gemma 3 270M in Q4_K_M: [20,460 tokens](../models.md#perplexity)",
    "qwen2": "Qwen2.5-Coder 1.5B: [400 tokens](../decisions/int8-activations.md)",
}
"""Architectures of which released weights were compared, by our names, and where that stands. No others were at hand."""
USUAL_CORE = "native, KV in bf16 and int8"
"""The page says this of all architectures, so an item names only what differs."""


def render() -> str:
    """The list, an item for each architecture."""
    items = []
    for name in sorted(architectures.ARCHITECTURES):
        cases = {key: case for key, case in (CASES | ENCODERS).items() if case.architecture == name}
        directories = _with_stars([case.hf_class for case in cases.values() if case.gguf is None])
        files = [case.gguf for case in cases.values() if case.gguf is not None]
        kinds = [file.matrix_type for file in files] + ["MXFP4" for case in cases.values() if case.has_mxfp4_experts]
        types = f" in {', '.join(dict.fromkeys(kinds))}" if set(kinds) - {"BF16"} else ""  # BF16 is what the page says of all
        of_files = _named([file.architecture for file in files]) + types
        parts = [_named(directories), of_files, _core_words(cases), REAL_WEIGHTS.get(name, "")]
        item = f"- {'; '.join(part for part in parts if part)}"
        items.append(fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(items) + "\n"


def _with_stars(names: list[str]) -> list[str]:
    """The names with `Bert*` for each class of BERT's, if all four of an encoder are there."""
    stems = {name.removesuffix("Model") for name in names if name.endswith("Model")}
    whole = {
        f"{stem}{end}": f"{stem}*"
        for stem in stems
        if {f"{stem}{end}" for end in CLASSES.values()} <= set(names)
        for end in CLASSES.values()
    }
    return [whole.get(name, name) for name in names]


def _named(names: list[str]) -> str:
    """Each name once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _core_words(cases: Mapping[str, TinyCase]) -> str:
    """The backends and types of KV with which all cases went through the core; AssertionError for a case that did not."""
    cases = {name: case for name, case in cases.items() if name not in ENCODERS}
    ran = runs(is_through_core=True)
    kinds: dict[str, list[str]] = {}
    for _, backend, kv_dtype in (run for run in ran if run[0] in cases):
        kinds.setdefault(backend, []).append(kv_dtype.value)
    assert {run[0] for run in ran} >= cases.keys()
    words = [f"{backend}, KV in {' and '.join(dict.fromkeys(found))}" for backend, found in kinds.items()]
    return "; ".join(word for word in words if word != USUAL_CORE)


def written_into(page: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written_into(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
