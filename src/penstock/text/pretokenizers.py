"""How a byte-level vocabulary's text is cut before merging, by the name that GGUF files give it. Used by `gguf_vocab`.

The names, and which of them cut alike, are those of llama.cpp (https://github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`). A
recipe is what the model's own tokenizer.json says, where that is known, and llama.cpp's patterns elsewhere: these come near it.
Left out are names that need more than cutting: a splitter of their own (`kimi-k2`, `afmoe`, `superbpe`, `laguna`, `chameleon`),
a vocabulary that is not byte-level (`gemma4`, `sarvam-moe`, `whitespace`), or a separator token (`roberta-bpe`).
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
    """Regular expressions (Oniguruma's, https://github.com/kkos/oniguruma); matches and the gaps between them become parts."""
    gpt2_pattern: bool = False
    """The pattern of GPT-2, as `tokenizers` has it built in."""
    ignore_merges: bool = False
    """A part that is in the vocabulary as a whole is taken without merging."""
    nfc: bool = False
    """Unicode-normalise first."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_NEWLINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _NEWLINES
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CJK = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _cased_words(end: str, digits: str) -> str:
    """Words end where a capital follows, as in camelCase; `end` may be taken with the word."""
    capital_first = rf"{_LEAD}{_UPPER}*{_LOWER}+{end}|{_LEAD}{_UPPER}+{_LOWER}*{end}"
    return rf"{capital_first}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _NEWLINES


_LLAMA3_SPLIT = f"{_CONTRACTION}|{_WORD}" + r"|\p{N}{1,3}" + _TAIL
_QWEN2_SPLIT = f"{_CONTRACTION}|{_WORD}" + r"|\p{N}" + _TAIL
_GPT4O_SPLIT = _cased_words(_CONTRACTION + "?", r"\p{N}{1,3}")
_TEKKEN_SPLIT = _cased_words("", r"\p{N}")

_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8F\u2D00-\u2D2F\uA790-\uA7FF\uAB30-\uAB6F"
    r"\x{10570}-\x{105BF}\x{10D40}-\x{10D8F}\x{16E40}-\x{16EFF}\x{1D400}-\x{1DFFF}]]"
)
"""Letters with a case, but for some scripts: the same code points as the list of ranges in the model's tokenizer.json."""
_DEEPSEEK_WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_IDENTIFIERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
_EAST_ASIAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"

_BLOOM_SPLIT = r" ?[^(\s|[.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C])]+"
_YOUTU_EAST_ASIAN = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
    r"|[\u3105-\u312F]+|" + _CJK
)

_RECIPES: tuple[tuple[str, Recipe], ...] = (
    (
        "default",
        Recipe(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum modern-bert granite-docling "
        "jina-es jina-de jina-v2-es jina-v2-de",
        Recipe(gpt2_pattern=True),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        Recipe(single_digits=True, gpt2_pattern=True),
    ),
    (
        "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Recipe(splits=(_LLAMA3_SPLIT,), ignore_merges=True),
    ),
    ("smaug-bpe dbrx glm4 chatglm-bpe", Recipe(splits=(_LLAMA3_SPLIT,))),
    (
        "minicpm5",
        Recipe(splits=(r"\p{N}{1,3}", f"{_CONTRACTION}|{_WORD}" + r"|\p{N}+" + _TAIL), ignore_merges=True),
    ),
    ("qwen2 deepseek-r1-qwen", Recipe(splits=(_QWEN2_SPLIT,), nfc=True)),
    ("megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2", Recipe(splits=(_QWEN2_SPLIT,))),
    (
        "qwen35",
        Recipe(
            splits=(_CONTRACTION + rf"|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _NEWLINES,),
            nfc=True,
        ),
    ),
    ("ufakzeka", Recipe(splits=(_WORD + r"|\p{N}" + _TAIL,))),
    ("seed-coder", Recipe(splits=(f"{_CONTRACTION}|{_WORD}" + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _NEWLINES,))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        Recipe(
            splits=(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "deepseek-llm",
        Recipe(
            splits=(
                r"[\r\n]",
                rf"\s?{_DEEPSEEK_LETTERS}+",
                r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
                r"\s+$",
                _EAST_ASIAN,
                r"\p{N}",
            )
        ),
    ),
    ("deepseek-coder", Recipe(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"))),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        Recipe(splits=(r"\p{N}{1,3}", _CJK, _DEEPSEEK_IDENTIFIERS + _DEEPSEEK_WORDS + r"[\r\n]*" + _NEWLINES)),
    ),
    (
        "spark2_5",
        Recipe(
            splits=(
                r"\p{N}{1,3}",
                _CJK,
                _DEEPSEEK_IDENTIFIERS + _DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
    ),
    ("tekken", Recipe(splits=(_TEKKEN_SPLIT,), ignore_merges=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Recipe(splits=(_GPT4O_SPLIT,))),
    ("tiny_aya cohere2moe", Recipe(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_SPLIT))),
    ("youtu", Recipe(splits=(_YOUTU_EAST_ASIAN, _cased_words(_CONTRACTION + "?", r"\p{N}")), ignore_merges=True)),
    (
        "exaone-moe",
        Recipe(
            splits=(
                _CONTRACTION + rf"|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("bloom poro-chat gpt3-finnish", Recipe(splits=(_BLOOM_SPLIT,))),
    ("viking", Recipe(splits=(_BLOOM_SPLIT, r"\p{N}"))),
    ("falcon", Recipe(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_SPLIT, r"[0-9][0-9][0-9]"))),
)

RECIPES: Mapping[str, Recipe] = {name: recipe for names, recipe in _RECIPES for name in names.split()}


def recipe_for(name: str) -> Recipe:
    """The recipe of a `tokenizer.ggml.pre` name; an empty name is `default`, as in llama.cpp. Raises `ModelError`."""
    recipe = RECIPES.get(name or "default")
    if recipe is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokeniser that Penstock does not know.",
            remedy="Use the model's Hugging Face directory: its tokenizer.json says how to cut text.",
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
