"""How a byte-level vocabulary's text is cut before merging, by the name that GGUF files give it. Used by `gguf_vocab`.

The names are those of llama.cpp (`src/llama-vocab.cpp`); the recipes are those of each model's own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from penstock.types.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Each field that is set cuts the parts that the one before it left, in this order."""

    single_digits: bool = False
    """Every digit is a part of its own."""
    splits: tuple[str, ...] = ()
    """Regular expressions; matches and the gaps between them become parts."""
    gpt2_pattern: bool = False
    """The pattern of GPT-2, as `tokenizers` has it built in."""
    ignore_merges: bool = False
    """A part that is in the vocabulary as a whole is taken without merging."""
    nfc: bool = False
    """Unicode-normalise first."""


_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = Recipe(splits=(_CONTRACTION + _WORD + r"|\p{N}{1,3}" + _TAIL,), ignore_merges=True)
_QWEN2 = Recipe(splits=(_CONTRACTION + _WORD + r"|\p{N}" + _TAIL,), nfc=True)
_TEKKEN = Recipe(
    splits=(
        rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
)
_SINGLE_DIGITS = Recipe(single_digits=True, gpt2_pattern=True)
_GPT2 = Recipe(gpt2_pattern=True)
_DEFAULT = Recipe(
    splits=(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
)

RECIPES: Mapping[str, Recipe] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": _TEKKEN,
}


def recipe_for(name: str) -> Recipe:
    """The recipe of a `tokenizer.ggml.pre` name; an empty name is `default`, as in llama.cpp. Raises `ModelError`."""
    recipe = RECIPES.get(name or "default")
    if recipe is None:
        raise ModelError(
            f"The vocabulary uses the pre-tokeniser {name!r}, which is not supported.",
            remedy=f"Supported are {', '.join(sorted(RECIPES))}. A Hugging Face directory with a tokenizer.json also works.",
        )
    return recipe


def make_normalizer(recipe: Recipe) -> normalizers.Normalizer | None:
    return normalizers.NFC() if recipe.nfc else None


def make_pre_tokenizer(recipe: Recipe) -> pre_tokenizers.PreTokenizer:
    """The cuts, then the mapping of bytes to characters."""
    parts: list[pre_tokenizers.PreTokenizer] = []
    if recipe.single_digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    parts.extend(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in recipe.splits)
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.gpt2_pattern))
    return pre_tokenizers.Sequence(parts)
