"""Builds a tokenizer from a GGUF file's vocabulary, as a `Backend`.

`tokenizer.ggml.model` names the kind: `gpt2` and `gemma4` are BPE with the file's merges, `llama` is SentencePiece BPE, `t5`
SentencePiece unigram and `bert` WordPiece. For BPE, `tokenizer.ggml.pre` names the recipe that splits text before merging. The
names are llama.cpp's (https://github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`). Recipes are those of the models' own
tokenizer.json, or llama.cpp's patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from penstock.text.charsmap import check_charsmap
from penstock.text.vocabulary import LINEAR, SPACE_MARK, Backend, Expansion, Spelling, byte_of_piece, put_ends
from penstock.types.errors import ModelError
from penstock.types.vocab import GgufVocab

MODELS = ("gpt2", "llama", "gemma4", "t5", "bert")
"""Values of `tokenizer.ggml.model`."""
_CUT = ("gpt2", "gemma4")
"""Kinds that split text by a recipe before merging."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that leave the white space behind them, as in llama.cpp."""


def build_backend(vocab: GgufVocab) -> Backend:
    """Return the tokenizer of a GGUF vocabulary. Raises `ModelError` if its kind is unknown or it is inconsistent."""
    check_vocab(vocab)
    recipe = recipe_for(_pre_name(vocab)) if vocab.model in _CUT else None
    encoder = _encoder(vocab) if recipe is None else _bpe_encoder(vocab, recipe)
    special = {*_ids_of_type(vocab, CONTROL), *_ids_of_type(vocab, UNKNOWN), *_end_ids(vocab)}
    user_defined = [token_id for token_id in _ids_of_type(vocab, USER_DEFINED) if token_id not in special]
    encoder.add_special_tokens(_added(vocab, sorted(special), special=True))
    encoder.add_tokens(_added(vocab, user_defined, special=False))
    put_ends(
        encoder,
        bos_token_id=vocab.bos_token_id if vocab.add_bos_token else None,
        eos_token_id=vocab.eos_token_id if vocab.add_eos_token else None,
        between=("eos",) if vocab.model == "bert" or vocab.pre == "modern-bert" else ("eos", "eos"),  # the others: RoBERTa's
    )
    return Backend(
        encoder=encoder,
        vocab_size=len(vocab.tokens),
        piece=_piece_lookup(encoder, vocab),
        spelling=Spelling.SENTENCEPIECE if recipe is None or recipe.is_raw else Spelling.BYTE_LEVEL,
        literal_ids=frozenset([*special, *user_defined]),
        special_ids=frozenset(special),
        silent_ids=frozenset(_ids_of_type(vocab, UNUSED)) - special,
        starts_with_space=recipe is None and (vocab.add_space_prefix or vocab.model == "bert"),
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=() if vocab.eos_token_id is None else (vocab.eos_token_id,),
        unknown_token_id=vocab.unknown_token_id,
        padding_token_id=vocab.padding_token_id,
        expansion=_expansion(vocab),
    )


def check_vocab(vocab: GgufVocab) -> None:
    """Raise `ModelError` if `build_backend` could not use the vocabulary. Called before weights are loaded."""
    if vocab.model not in MODELS:
        raise ModelError(
            f"tokenizer.ggml.model is {vocab.model!r}; supported are {', '.join(map(repr, MODELS))}.",
            remedy="Use the model's Hugging Face directory, if it has a tokenizer.json.",
        )
    if vocab.model in _CUT:
        recipe_for(_pre_name(vocab))
    _expansion(vocab)
    num_tokens = len(vocab.tokens)
    if num_tokens == 0:
        raise _contradiction("has no tokens")
    if len(vocab.token_types) not in (0, num_tokens):
        raise _contradiction(f"has {num_tokens} tokens but {len(vocab.token_types)} token types")
    if vocab.model == "gpt2" and not vocab.merges and not _has_ranks(vocab):
        types = vocab.token_types or [NORMAL] * num_tokens
        if any(len(token) > 1 and kind == NORMAL for token, kind in zip(vocab.tokens, types, strict=True)):
            raise _contradiction("has tokens of several characters, and no merges that would make them")
    needs_scores = vocab.model == "t5" or (vocab.model == "llama" and not vocab.merges)
    if needs_scores and len(vocab.scores) != num_tokens:
        raise _contradiction(f"has {num_tokens} tokens but {len(vocab.scores)} scores")
    for name, token_id, is_needed in (
        ("bos", vocab.bos_token_id, vocab.add_bos_token),
        ("eos", vocab.eos_token_id, vocab.add_eos_token),
        ("unknown", vocab.unknown_token_id, False),
    ):
        if name == "unknown" and token_id is None and vocab.model in ("t5", "bert"):
            raise _contradiction("names no unknown token for text that its pieces do not cover")
        if token_id is None and is_needed:
            raise _contradiction(f"asks for its {name} token before or after a text, but names none")
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise _contradiction(f"has {num_tokens} tokens, and its {name} token is {token_id}")


def _contradiction(cause: str) -> ModelError:
    return ModelError(f"The vocabulary {cause}.", remedy="Fetch the file again; if this persists, its converter is at fault.")


def _has_ranks(vocab: GgufVocab) -> bool:
    """Return whether scores, instead of a list of merges, give the order of merges, as in a tekken.json."""
    return not vocab.merges and len(vocab.scores) == len(vocab.tokens) and any(vocab.scores)


def _pre_name(vocab: GgufVocab) -> str:
    return "gemma4" if vocab.model == "gemma4" else vocab.pre


def _bpe_encoder(vocab: GgufVocab, recipe: Recipe) -> tokenizers.Tokenizer:
    options = _unknown_options(vocab) if recipe.is_raw else {}
    merges = merges_from_scores(_joinable(vocab)) if _has_ranks(vocab) else _split_merges(vocab.merges)
    model = _bpe(vocab, merges, ignore_merges=recipe.ignore_merges, **options)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = make_pre_tokenizer(recipe)
    normalizer = make_normalizer(recipe)
    if normalizer is not None:
        encoder.normalizer = normalizer
    return encoder


def _sentencepiece_encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    merges = _split_merges(vocab.merges) if vocab.merges else merges_from_scores(_joinable(vocab))
    encoder = tokenizers.Tokenizer(_bpe(vocab, merges, **_unknown_options(vocab)))
    encoder.normalizer = normalizers.Sequence(list(_sentencepiece_steps(vocab)))
    return encoder


def _encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    return {"llama": _sentencepiece_encoder, "t5": _unigram_encoder, "bert": _wordpiece_encoder}[vocab.model](vocab)


def _unigram_encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    pieces = list(zip(vocab.tokens, vocab.scores, strict=True))
    has_bytes = bool(_unknown_options(vocab)["byte_fallback"])
    try:
        model = models.Unigram(pieces, vocab.unknown_token_id, has_bytes)
    except Exception as error:  # the library raises bare Exception
        raise _contradiction(f"makes no unigram model: {error}") from error
    encoder = tokenizers.Tokenizer(model)
    steps = list(_sentencepiece_steps(vocab))
    encoder.normalizer = normalizers.Sequence([normalizers.Precompiled(vocab.charsmap), *steps] if vocab.charsmap else steps)
    return encoder


def _wordpiece_encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    """Return an encoder that cuts each word from the left, each time taking the longest piece that matches.

    GGUF files mark pieces that begin a word. The `tokenizers` library marks all others.
    """
    added = {*_ids_of_type(vocab, CONTROL), *_ids_of_type(vocab, UNKNOWN), *_end_ids(vocab), vocab.unknown_token_id}
    pieces: dict[str, int] = {}
    for token_id, token in enumerate(vocab.tokens):
        inner = token if token_id in added else f"##{token}"
        pieces[token[1:] if token.startswith(SPACE_MARK) else inner] = token_id
    unknown = vocab.tokens[vocab.unknown_token_id or 0]
    encoder = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=100))
    encoder.normalizer = normalizers.BertNormalizer(strip_accents=vocab.strip_accents, lowercase=vocab.lowercase)
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return encoder


def _expansion(vocab: GgufVocab) -> Expansion | None:
    """Return how much longer normalisation can make a text, or None if trivial. Raises `ModelError` for a damaged charsmap."""
    if vocab.model == "bert":
        return Expansion(3, 0)
    return Expansion(3 * max(1, check_charsmap(vocab.charsmap)), 3) if vocab.charsmap else None


def _unknown_options(vocab: GgufVocab) -> dict[str, str | bool | None]:
    """Return the encoder options for characters without a piece. They become bytes if all 256 have pieces, else unknown."""
    unknown = None if vocab.unknown_token_id is None else vocab.tokens[vocab.unknown_token_id]
    has_bytes = len({byte_of_piece(vocab.tokens[token_id]) for token_id in _ids_of_type(vocab, BYTE)} - {None}) == 256
    return {"unk_token": unknown, "fuse_unk": True, "byte_fallback": has_bytes}


def _sentencepiece_steps(vocab: GgufVocab) -> Iterator[normalizers.Normalizer]:
    """Yield the normalisers of SentencePiece, in its order (`normalizer.cc`). They run on each stretch of text between special
    tokens, so each gets a space in front, as in llama.cpp and transformers' `legacy` tokenizers.
    """
    if vocab.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(r"\A | \z"), "")
    if vocab.add_space_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _bpe(vocab: GgufVocab, merges: list[tuple[str, str]], **options: str | bool | None) -> models.BPE:
    ids = {token: token_id for token_id, token in enumerate(vocab.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise _contradiction(f"has merges that do not fit its tokens: {error}") from error


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if any(not right for _, right in pairs):
        raise _contradiction("has a merge that does not consist of two pieces separated by a space")
    return pairs


def _joinable(vocab: GgufVocab) -> dict[str, float]:
    """Return piece -> score of the pieces that merging can produce: the normal ones, or all without token types."""
    if not vocab.token_types:
        return dict(zip(vocab.tokens, vocab.scores, strict=True))
    rows = zip(vocab.tokens, vocab.scores, vocab.token_types, strict=True)
    return {token: score for token, score, token_type in rows if token_type == NORMAL}


def _ids_of_type(vocab: GgufVocab, wanted: int) -> list[int]:
    return [token_id for token_id, token_type in enumerate(vocab.token_types) if token_type == wanted]


def _end_ids(vocab: GgufVocab) -> list[int]:
    return [token_id for token_id in (vocab.bos_token_id, vocab.eos_token_id) if token_id is not None]


def _added(vocab: GgufVocab, ids: Iterable[int], *, special: bool) -> list[AddedToken]:
    texts = [vocab.tokens[token_id] for token_id in ids if vocab.tokens[token_id]]
    strips = vocab.strips_after_added
    return [AddedToken(text, normalized=False, special=special, rstrip=strips and text not in _UNSTRIPPED) for text in texts]


def _piece_lookup(encoder: tokenizers.Tokenizer, vocab: GgufVocab) -> Callable[[int], str | None]:
    """Return a function from a token id to its piece.

    The encoder's pieces save 25 MB for 150,000 tokens. The encoder lacks duplicate pieces, and spells WordPiece differently.
    """
    tokens, num_tokens = vocab.tokens, len(vocab.tokens)
    has_same = vocab.model != "bert" and encoder.get_vocab_size() == num_tokens
    find: Callable[[int], str | None] = encoder.id_to_token if has_same else tokens.__getitem__

    def piece(token_id: int) -> str | None:
        return find(token_id) if 0 <= token_id < num_tokens else None

    return piece


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return BPE merges (left, right), best score first. `scores`: piece -> score, in order of token id."""
    ranked: list[tuple[float, int, str, str]] = []
    lengths = {*map(len, scores)}
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            if cut not in lengths or len(piece) - cut not in lengths:  # avoids quadratic time for long pieces
                continue
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a BPE tokenizer splits text before merging. Each field splits the parts that the previous field made."""

    single_digits: bool = False
    """Each digit is a part."""
    splits: tuple[str, ...] = ()
    """Oniguruma regexes (https://github.com/kkos/oniguruma). Matches, and the gaps between them, become parts."""
    gpt2_pattern: bool = False
    """Use GPT-2's pattern, which `tokenizers` has built in."""
    ignore_merges: bool = False
    """A part that is a piece is not split into smaller ones."""
    nfc: bool = False
    """Normalise to NFC first."""
    is_raw: bool = False
    """Pieces are text, with U+2581 for a space; otherwise each character is a byte."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_NEWLINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_TAIL = _PUNCTUATION + _NEWLINES
# A match never ends in a space before a newline of the same run, so newlines are not looked for again after a space.
_JAIS2_RUNS = "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1))
_JAIS2_SPACES = rf"|(?<![^\S\r\n])\s*[\r\n]+|{_JAIS2_RUNS}\s{{1,2}}(?!\S)|\s{{1}}"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CJK = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _cased_words(end: str, digits: str) -> str:
    """Return a regex for words that end before a capital, as in camelCase. `end` is a regex for the end of a word."""
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
"""Cased letters except of some scripts: the ranges in the model's tokenizer.json."""
_DEEPSEEK_WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_IDENTIFIERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
_EAST_ASIAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"

_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_SPLIT = (
    rf"[\p{{Han}}]+|{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?|{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}" + _TAIL
)
_AFMOE_EAST_ASIAN = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F\u0E80-\u0EFF"
    r"\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)
_LINES = r"[^\n]+|\n+"

_BLOOM_SPLIT = r" ?[^(\s|[.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C])]+"
_YOUTU_EAST_ASIAN = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
    r"|[\u3105-\u312F]+|" + _CJK
)

_RECIPES: Mapping[str, Recipe] = {
    "default": Recipe(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum modern-bert granite-docling "
    "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe": Recipe(gpt2_pattern=True),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Recipe(single_digits=True, gpt2_pattern=True),
    "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Recipe(
        splits=(_LLAMA3_SPLIT,), ignore_merges=True
    ),
    "smaug-bpe dbrx glm4 glm5 chatglm-bpe": Recipe(splits=(_LLAMA3_SPLIT,)),
    "jais-2": Recipe(splits=(f"{_CONTRACTION}|{_WORD}" + r"|\p{N}{1,3}" + _PUNCTUATION + _JAIS2_SPACES,)),
    "minicpm5": Recipe(splits=(r"\p{N}{1,3}", f"{_CONTRACTION}|{_WORD}" + r"|\p{N}+" + _TAIL), ignore_merges=True),
    "qwen2 deepseek-r1-qwen": Recipe(splits=(_QWEN2_SPLIT,), nfc=True),
    "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2": Recipe(splits=(_QWEN2_SPLIT,)),
    "qwen35": Recipe(
        splits=(_CONTRACTION + rf"|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _NEWLINES,),
        nfc=True,
    ),
    "ufakzeka": Recipe(splits=(_WORD + r"|\p{N}" + _TAIL,)),
    "seed-coder": Recipe(splits=(f"{_CONTRACTION}|{_WORD}" + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _NEWLINES,)),
    "bailingmoe bailingmoe2 llada-moe": Recipe(
        splits=(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "deepseek-llm": Recipe(
        splits=(
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Recipe(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Recipe(
        splits=(r"\p{N}{1,3}", _CJK, _DEEPSEEK_IDENTIFIERS + _DEEPSEEK_WORDS + r"[\r\n]*" + _NEWLINES)
    ),
    "spark2_5": Recipe(
        splits=(
            r"\p{N}{1,3}",
            _CJK,
            _DEEPSEEK_IDENTIFIERS + _DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "tekken": Recipe(splits=(_TEKKEN_SPLIT,), ignore_merges=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Recipe(splits=(_GPT4O_SPLIT,)),
    "granite-embed-multi-97m": Recipe(splits=(_GPT4O_SPLIT,), ignore_merges=True),
    "kimi-k2": Recipe(splits=(_KIMI_SPLIT,)),
    "tiny_aya cohere2moe": Recipe(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_SPLIT)),
    "superbpe": Recipe(splits=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": Recipe(
        splits=(
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            _AFMOE_EAST_ASIAN,
            _DEEPSEEK_IDENTIFIERS + _DEEPSEEK_WORDS + r"[\r\n]*" + _NEWLINES,
        )
    ),
    "laguna": Recipe(splits=(_LINES, _QWEN2_SPLIT)),
    "gemma4 granite-embed-multi-311m sarvam-moe": Recipe(splits=(_LINES,), is_raw=True),
    "whitespace": Recipe(splits=(r"\S+",), is_raw=True),
    "youtu": Recipe(splits=(_YOUTU_EAST_ASIAN, _cased_words(_CONTRACTION + "?", r"\p{N}")), ignore_merges=True),
    "exaone-moe": Recipe(
        splits=(
            _CONTRACTION + rf"|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "bloom poro-chat gpt3-finnish": Recipe(splits=(_BLOOM_SPLIT,)),
    "viking": Recipe(splits=(_BLOOM_SPLIT, r"\p{N}")),
    "falcon": Recipe(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_SPLIT, r"[0-9][0-9][0-9]")),
}
"""Names separated by spaces -> the recipe of them all."""

RECIPES: Mapping[str, Recipe] = {name: recipe for names, recipe in _RECIPES.items() for name in names.split()}


def recipe_for(name: str) -> Recipe:
    """Return the recipe for splitting text of a `tokenizer.ggml.pre`. An empty name means `default`. Raises `ModelError`."""
    recipe = RECIPES.get(name or "default")
    if recipe is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokeniser that Penstock does not know.",
            remedy="Use the model's Hugging Face directory: its tokenizer.json says how to cut text.",
        )
    return recipe


def make_normalizer(recipe: Recipe) -> normalizers.Normalizer | None:
    if recipe.is_raw:
        return normalizers.Replace(" ", SPACE_MARK)
    return normalizers.NFC() if recipe.nfc else None


def make_pre_tokenizer(recipe: Recipe) -> pre_tokenizers.PreTokenizer:
    """Return the recipe as a pre-tokenizer: its splits, then, unless `is_raw`, the mapping of bytes to characters."""
    parts: list[pre_tokenizers.PreTokenizer] = []
    if recipe.single_digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    parts.extend(pre_tokenizers.Split(Regex(LINEAR.get(pattern, pattern)), "isolated") for pattern in recipe.splits)
    if not recipe.is_raw:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.gpt2_pattern))
    return pre_tokenizers.Sequence(parts)
