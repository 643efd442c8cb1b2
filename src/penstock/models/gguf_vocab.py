"""The tokenizer's part of a GGUF file's metadata, as plain data. Called by `models.gguf`; builds no tokenizer."""

from __future__ import annotations

import logging
from typing import TypeVar

from penstock.models.checks import token_ids, unsupported
from penstock.models.gguf_file import GgufFile
from penstock.types.vocab import GgufVocab

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
_PRE_WITH_BOS = frozenset(
    {
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
    }
)
"""Pre-tokenisers whose models begin a text with the bos token, if the file does not say."""
_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "</s>",
    }
)
"""Tokens that end a turn or a document, whatever the file calls its `eos`: of chat models, many files name one of them only.

As in llama.cpp (`special_eog_ids` in `llama-vocab.cpp`), without those that end a part of an answer: calls of tools and files
of a repository.
"""


def read_vocab(file: GgufFile, vocab_size: int) -> GgufVocab:
    """The vocabulary; defaults for absent keys are llama.cpp's. Raises ModelError if its parts contradict each other, or ask
    for what Penstock does not do."""
    model = file.require("tokenizer.ggml.model", str)
    pre = file.get("tokenizer.ggml.pre", str) or ""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        raise file.error(f"the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    _refuse_unsupported(file, model)
    is_sentencepiece = model == "llama"
    ids = _ids(file, len(tokens), "bos", "eos", "unknown")
    return GgufVocab(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=_per_token(file, "tokenizer.ggml.token_type", int, len(tokens)) or [1] * len(tokens),
        merges=file.get_list("tokenizer.ggml.merges", str),
        scores=_per_token(file, "tokenizer.ggml.scores", float, len(tokens)),
        bos_token_id=ids.get("bos"),
        eos_token_id=ids.get("eos"),
        unknown_token_id=ids.get("unknown"),
        padding_token_id=_padding_id(file, len(tokens)),
        add_bos_token=_flag(file, "add_bos_token", default="bos" in ids and (is_sentencepiece or pre in _PRE_WITH_BOS)),
        add_eos_token=_flag(file, "add_eos_token", default=False),
        add_space_prefix=_flag(file, "add_space_prefix", default=is_sentencepiece),
        remove_extra_whitespaces=_flag(file, "remove_extra_whitespaces", default=False),
    )


def read_eos_ids(file: GgufFile, vocab: GgufVocab) -> tuple[int, ...]:
    """Tokens that end a reply: the file's `eos`, `eot` and `eom`, then added tokens that are known to."""
    named = [] if vocab.eos_token_id is None else [vocab.eos_token_id]
    named += _ids(file, len(vocab.tokens), "eot", "eom").values()
    by_text = [
        token_id
        for token_id, text in enumerate(vocab.tokens)
        if text in _ENDS and vocab.token_types[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    return tuple(dict.fromkeys([*named, *by_text]))


def _refuse_unsupported(file: GgufFile, model: str) -> None:
    """Keys that change which tokens a text has, or which ones an answer may have."""
    for name in ("suppress_tokens", "precompiled_charsmap"):
        if num := len(file.get_list(f"tokenizer.ggml.{name}", int)):
            raise unsupported(file.path, f"tokenizer.ggml.{name} has {num} entries", "only an empty one is")
    if model == "gpt2" and _flag(file, "remove_extra_whitespaces", default=False):
        setting = "tokenizer.ggml.remove_extra_whitespaces is true in a 'gpt2' vocabulary"
        raise unsupported(file.path, setting, "it has a meaning in SentencePiece vocabularies")


def _ids(file: GgufFile, num_tokens: int, *names: str) -> dict[str, int]:
    """Token ids of the metadata by name, without those that are absent or name no token."""
    ids = {f"tokenizer.ggml.{name}_token_id": file.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    found = token_ids(ids, num_tokens, file.path)
    return {name: found[key] for name, key in zip(names, ids, strict=True) if key in found}


def _padding_id(file: GgufFile, num_tokens: int) -> int | None:
    """Nothing is padded here, so one that fine-tuning added, and the converter left out, is no reason to refuse a file."""
    value = file.get("tokenizer.ggml.padding_token_id", int)
    if value is not None and not 0 <= value < num_tokens:
        _log.info("%s: tokenizer.ggml.padding_token_id is %d and passed over: it is not in the vocabulary", file.path, value)
        return None
    return value


def _per_token(file: GgufFile, key: str, kind: type[T], num_tokens: int) -> list[T]:
    values = file.get_list(key, kind)
    if values and len(values) != num_tokens:
        raise file.error(f"{key} has {len(values)} entries for {num_tokens} tokens")
    return values


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{name}", bool)
    return default if value is None else value
