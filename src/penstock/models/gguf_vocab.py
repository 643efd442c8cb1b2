"""The tokenizer's part of a GGUF file's metadata, as plain data. Called by `models.gguf`; builds no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from penstock.models.checks import check_token_ids
from penstock.models.gguf_file import GgufFile
from penstock.types.vocab import GgufVocab

T = TypeVar("T")

_CONTROL = 3
_PRE_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Pre-tokenisers whose models begin a text with the bos token, if the file does not say."""
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"})
"""Control tokens that end a reply. Older files of chat models name only the end of a document as their `eos`."""
_END_OF_DOCUMENT: Mapping[str, str] = {"qwen2": "<|endoftext|>"}
"""By pre-tokeniser, a control token that ends a reply as well: Qwen's generation_config.json has it beside `<|im_end|>`."""


def read_vocab(file: GgufFile, vocab_size: int) -> GgufVocab:
    """The vocabulary; defaults for absent keys are llama.cpp's. Raises ModelError if its parts contradict each other."""
    model = file.require("tokenizer.ggml.model", str)
    pre = file.get("tokenizer.ggml.pre", str) or ""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        raise file.error(f"the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    is_sentencepiece = model == "llama"
    has_bos = file.get("tokenizer.ggml.bos_token_id", int) is not None
    vocab = GgufVocab(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=_per_token(file, "tokenizer.ggml.token_type", int, len(tokens)) or [1] * len(tokens),
        merges=file.get_list("tokenizer.ggml.merges", str),
        scores=_per_token(file, "tokenizer.ggml.scores", float, len(tokens)),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        eos_token_id=file.get("tokenizer.ggml.eos_token_id", int),
        unknown_token_id=file.get("tokenizer.ggml.unknown_token_id", int),
        add_bos_token=_flag(file, "add_bos_token", default=has_bos and (is_sentencepiece or pre in _PRE_WITH_BOS)),
        add_eos_token=_flag(file, "add_eos_token", default=False),
        add_space_prefix=_flag(file, "add_space_prefix", default=is_sentencepiece),
    )
    ids = {"bos_token_id": vocab.bos_token_id, "eos_token_id": vocab.eos_token_id, "unknown_token_id": vocab.unknown_token_id}
    check_token_ids(ids, len(tokens), file.path)
    return vocab


def read_eos_ids(file: GgufFile, vocab: GgufVocab) -> tuple[int, ...]:
    """Tokens that end a reply: the file's `eos`, `eot` and `eom`, then control tokens that are known to end a turn."""
    named = {key: file.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")}
    check_token_ids(named, len(vocab.tokens), file.path)
    ends = _END_OF_TURN | {_END_OF_DOCUMENT.get(vocab.pre, "")}
    by_text = [
        token_id for token_id, text in enumerate(vocab.tokens) if text in ends and vocab.token_types[token_id] == _CONTROL
    ]
    found = [token_id for token_id in named.values() if token_id is not None]
    return tuple(dict.fromkeys(found + by_text))


def _per_token(file: GgufFile, key: str, kind: type[T], num_tokens: int) -> list[T]:
    values = file.get_list(key, kind)
    if values and len(values) != num_tokens:
        raise file.error(f"{key} has {len(values)} entries for {num_tokens} tokens")
    return values


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{name}", bool)
    return default if value is None else value
