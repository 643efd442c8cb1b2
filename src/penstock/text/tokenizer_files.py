"""Reads a SentencePiece `tokenizer.model` or Mistral's `tekken.json`, for models without a tokenizer.json.

tokenizer.model is the Protocol Buffer `ModelProto` of https://github.com/google/sentencepiece
(`src/sentencepiece_model.proto`). tekken.json is defined by https://github.com/mistralai/mistral-common
(`tokens/tokenizers/tekken.py`). Tokens added later are in tokenizer_config.json or added_tokens.json.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock import fast_json

# Types of pieces have the same numbers in SentencePiece and GGUF files.
from penstock.text.gguf_vocab import CONTROL, NORMAL, RECIPES, UNKNOWN, UNUSED, USER_DEFINED
from penstock.text.vocabulary import SPACE_MARK, byte_level_alphabet
from penstock.types.errors import ModelError
from penstock.types.vocab import GgufVocab

MAX_FILE_BYTES = 256 << 20
MAX_TOKENS = 1 << 21
_UNIGRAM, _BPE = 1, 2
TEKKEN_PATTERN = RECIPES["tekken"].splits[0]
"""The only pattern of any tekken.json."""


def read_vocab(path: Path) -> GgufVocab:
    """Read a tokenizer.model or a tekken.json. Raises `ModelError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _unreadable(path, f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
        return _tekken(path, data) if path.suffix == ".json" else _sentencepiece(path, data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, cause: str) -> ModelError:
    return ModelError(f"{path} is not a readable tokenizer: {cause}.", remedy="Fetch it again, or add a tokenizer.json.")


def _unsupported(path: Path, cause: str) -> ModelError:
    return ModelError(
        f"{path}: {cause}, which is not supported.",
        remedy="Add a tokenizer.json: transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one.",
    )


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = fast_json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


# SentencePiece


def _sentencepiece(path: Path, data: bytes) -> GgufVocab:
    tokens: list[str] = []
    types: list[int] = []
    scores: list[float] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {}
    charsmap = b""
    for field, value in _fields(data, MAX_TOKENS):
        if field == 1 and isinstance(value, bytes):
            piece = dict(_fields(value, 16))
            tokens.append(_bytes(piece[1]).decode())
            scores.append(struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0)
            types.append(_int(piece.get(3, NORMAL)))
        elif field in (2, 3) and isinstance(value, bytes):
            inner = dict(_fields(value, MAX_TOKENS))
            numbers = {key: item for key, item in inner.items() if isinstance(item, int)}
            if field == 2:
                trainer = numbers
            else:
                normalizer, charsmap = numbers, _bytes(inner.get(2, b""))
    if not tokens:
        raise ValueError("it has no pieces")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise _unsupported(path, f"it is a model of type {kind}")
    if charsmap and kind == _BPE:
        raise _unsupported(path, "it replaces characters (precompiled_charsmap)")
    if trainer.get(24, 0):
        raise _unsupported(path, "it has spaces as suffixes (treat_whitespace_as_suffix)")
    config = _json_object(path.parent / "tokenizer_config.json")
    _add_tokens(path.parent, config, tokens, types)
    if not (normalizer.get(3, 1) or normalizer.get(4, 1)):
        # Spaces stay where they are, so user-defined pieces are text, as in GGUF files: Gemma's runs of spaces.
        tokens = [
            text.replace(SPACE_MARK, " ") if kind == USER_DEFINED else text for text, kind in zip(tokens, types, strict=True)
        ]
    scores += [0.0] * (len(tokens) - len(scores))
    ends = {
        name: _special_id(trainer.get(field, default))
        for name, field, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2))
    }
    return GgufVocab(
        model="llama" if kind == _BPE else "t5",
        pre="",
        tokens=tokens,
        token_types=types,
        merges=[],
        scores=scores,
        bos_token_id=ends["bos"],
        eos_token_id=ends["eos"],
        unknown_token_id=ends["unk"],
        add_bos_token=config.get("add_bos_token") is not False and ends["bos"] is not None,
        add_eos_token=config.get("add_eos_token") is True and ends["eos"] is not None,
        add_space_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=charsmap,
    )


def _fields(data: bytes, limit: int) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field in a Protocol Buffer message. Fields with a length or fixed size have bytes.

    Raises ValueError, also for more than `limit` fields.
    """
    position, end, num_fields = 0, len(data), 0

    def varint() -> int:
        nonlocal position
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                raise ValueError("it ends in the middle of a field")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number in it is too long")

    while position < end:
        num_fields += 1
        if num_fields > limit:
            raise ValueError(f"it has a message of more than {limit} fields")
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) if wire != 2 else varint()
        if size is None or size > end - position:
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[position : position + size]
        position += size


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a text in it is a number")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number in it is a text")
    return value


def _special_id(value: int) -> int | None:
    """Return the token id, or None for -1, which is written as 64 bits."""
    return value if value < 1 << 31 else None


def _add_tokens(folder: Path, config: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """Add the tokens of added_tokens.json and `config` to `tokens`, and mark special ones in `types`."""
    added = {int(token_id): (text, False) for text, token_id in _json_object(folder / "added_tokens.json").items()}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(token_id)] = (token["content"], bool(token.get("special")))
    for token_id, (text, is_special) in sorted(added.items()):
        if not 0 <= token_id < MAX_TOKENS or not isinstance(text, str):
            raise ValueError(f"the added token {token_id} is invalid")
        while len(tokens) <= token_id:
            types.append(UNUSED)
            tokens.append(f"<unused {len(tokens)}>")
        if types[token_id] != UNKNOWN:
            types[token_id] = CONTROL if is_special or types[token_id] == CONTROL else USER_DEFINED
        tokens[token_id] = text


# Tekken


def _tekken(path: Path, data: bytes) -> GgufVocab:
    file = fast_json.loads(data)
    config = file["config"]
    if config["pattern"] != TEKKEN_PATTERN:
        raise _unsupported(path, f"its pattern is {str(config['pattern'])[:60]!r}")
    num_special, size = config["default_num_special_tokens"], config["default_vocab_size"]
    if type(num_special) is not int or type(size) is not int or not 0 < num_special < size <= MAX_TOKENS:
        raise ValueError(f"it has {size} tokens, and {num_special} of them special")
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    tokens = [f"<SPECIAL_{token_id}>" for token_id in range(num_special)]
    for token in file.get("special_tokens") or _OLD_SPECIAL_TOKENS:
        tokens[_rank(token, num_special)] = str(token["token_str"])
    words = [""] * (size - num_special)
    for word in file["vocab"][: len(words)]:
        try:
            text = base64.b64decode(word["token_bytes"], validate=True)
        except binascii.Error:
            raise ValueError("a word in it is not in base64") from None
        words[_rank(word, len(words))] = "".join([spelled[byte] for byte in text])
    if "" in words:
        raise ValueError(f"it has no word of rank {words.index('')}")
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    return GgufVocab(
        model="gpt2",
        pre="tekken",
        tokens=[*tokens, *words],
        token_types=[CONTROL] * num_special + [NORMAL] * len(words),
        merges=[],
        scores=[0.0] * num_special + [-float(rank) for rank in range(len(words))],
        bos_token_id=ids.get("<s>"),
        eos_token_id=ids.get("</s>"),
        unknown_token_id=ids.get("<unk>"),
        add_bos_token="<s>" in ids,
        add_eos_token=False,
        add_space_prefix=False,
    )


_OLD_SPECIAL_NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_OLD_SPECIAL_TOKENS = [{"rank": rank, "token_str": text} for rank, text in enumerate(_OLD_SPECIAL_NAMES.split())]
"""The special tokens of old files, which do not list them (`DEPRECATED_SPECIAL_TOKENS` of mistral-common)."""


def _rank(item: dict[str, Any], limit: int) -> int:
    rank = item["rank"]
    if type(rank) is not int or not 0 <= rank < limit:
        raise ValueError(f"it has the rank {rank!r}, not below {limit}")
    return rank
