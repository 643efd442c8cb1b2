"""Reads a Hugging Face tokenizer.json into a `Backend`. The file's decoder shows how tokens spell bytes."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from penstock import fast_json
from penstock.text.charsmap import check_charsmap
from penstock.text.vocabulary import LINEAR, MAX_EXPANDED_BYTES, Backend, Expansion, Spelling
from penstock.types.errors import ModelError

_log = logging.getLogger(__name__)

MAX_EXPANSION = 64
"""Bytes that the steps before splitting may make of one byte. U+2581 for a space makes 3."""
MAX_EXTRA_BYTES = 1024
MAX_PARTS = 64
MAX_ENDS = 1024
MAX_IDS = 1 << 24
"""No model has more. Each id takes 8 bytes in tables."""
_BERT_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""Keys of tokenizer_config.json -> attributes of the library's BertNormalizer."""
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""transformers' classes that leave tokenizer.json as it is."""


def load_backend(
    path: Path,
    *,
    bos_token_id: int | None,
    eos_token: str | None,
    markers: Sequence[str] = (),
) -> Backend:
    """Load a tokenizer.json. Raises `ModelError`. The file does not say which tokens are bos and eos.

    The file's truncation and padding are disabled, since they would change prompts silently. `markers`: tokens of the
    vocabulary that texts begin with.
    """
    encoder, expansion = _read(path)
    for marker in markers:
        if encoder.token_to_id(marker) is None:
            remedy = "Fetch the file again, or correct the marks of queries and documents in the model's files."
            raise ModelError(
                f"{path}: the vocabulary lacks the token {marker[:80]!r}, which marks queries or documents.", remedy=remedy
            )
        encoder.add_tokens([tokenizers.AddedToken(marker, normalized=False)])
    encoder.no_truncation()
    encoder.no_padding()
    steps = [] if encoder.decoder is None else _flat(json.loads(encoder.decoder.__getstate__()), "decoders")
    added = encoder.get_added_tokens_decoder()
    eos_token_id = None if eos_token is None else encoder.token_to_id(eos_token)
    if eos_token is not None and eos_token_id is None:
        _log.warning("%s: there is no token %r, which tokenizer_config.json calls the eos_token", path, eos_token)
    special = [token_id for token_id in (bos_token_id, eos_token_id) if token_id is not None]
    spelling = _spelling(steps, path)
    return Backend(
        encoder=encoder,
        vocab_size=min(max(encoder.get_vocab().values(), default=-1) + 1, MAX_IDS),  # ids may have holes
        piece=_piece_lookup(encoder, {token_id: token.content for token_id, token in added.items()}),
        spelling=spelling,
        # Special tokens spell their name. Others are decoded like pieces: Gemma's runs of spaces are added tokens of U+2581.
        literal_ids=frozenset(
            token_id for token_id, token in added.items() if token.special or spelling is not Spelling.SENTENCEPIECE
        ),
        special_ids=frozenset([*(token_id for token_id, token in added.items() if token.special), *special]),
        silent_ids=frozenset(),
        starts_with_space=any(_strips_a_space(step) for step in steps),
        bos_token_id=bos_token_id,
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        unknown_token_id=None,
        padding_token_id=None,
        expansion=expansion,
    )


def _read(path: Path) -> tuple[tokenizers.Tokenizer, Expansion | None]:
    try:
        text = path.read_text(encoding="utf-8")
        # Check before the library reads it, which normalises the added tokens.
        expansion = _expansion(fast_json.loads(text), path)
        encoder = tokenizers.Tokenizer.from_str(text)
        _hasten(encoder)
        _configure(encoder, path.with_name("tokenizer_config.json"))
        return encoder, expansion
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", remedy="Fetch it again.") from error
    except ModelError:
        raise
    except BaseException as error:  # the library raises bare Exception, and JSON of another kind can raise anything
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # the library's, of a corrupt file
            raise
        raise ModelError(
            f"{path} is not a valid tokenizer.json: {error}.",
            remedy="Fetch it again, or use a newer version of the package tokenizers.",
        ) from error


def _hasten(encoder: tokenizers.Tokenizer) -> None:
    """Replace regexes that take quadratic time (`LINEAR`)."""
    splitter = encoder.pre_tokenizer
    if splitter is None:
        return
    state = json.loads(splitter.__getstate__())
    is_changed = False
    for step in _flat(state, "pretokenizers"):
        match step:
            case {"pattern": {"Regex": str(slow)}, "behavior": "Isolated", "invert": False} if slow in LINEAR:
                step["pattern"] = {"Regex": LINEAR[slow]}
                is_changed = True
    if is_changed:
        splitter.__setstate__(json.dumps(state).encode())
        encoder.pre_tokenizer = splitter


def _configure(encoder: tokenizers.Tokenizer, path: Path) -> None:
    """Set a BERT normalizer by tokenizer_config.json, which replaces the settings of tokenizer.json in transformers, too."""
    normalizer = encoder.normalizer
    if not isinstance(normalizer, tokenizers.normalizers.BertNormalizer) or not path.is_file():
        return
    config = fast_json.loads(path.read_bytes())
    if config.get("tokenizer_class") in _PLAIN_CLASSES:
        return
    for key in _BERT_KEYS.keys() & config.keys():
        setattr(normalizer, _BERT_KEYS[key], config[key])
    encoder.normalizer = normalizer


def _expansion(file: dict[str, Any], path: Path) -> Expansion | None:
    """Return how much longer the normalizer and pre-tokenizer can make a text, or None for at most twice as long.

    Raises `ModelError` if it is too much.
    """
    parts = [*_flat(file.get("normalizer"), "normalizers"), *_flat(file.get("pre_tokenizer"), "pretokenizers")]
    factor, extra_bytes = 1.0, 0.0
    for part in parts:
        of_part = _part_expansion(part)
        factor, extra_bytes = factor * of_part.factor, extra_bytes * of_part.factor + of_part.extra_bytes
        if factor > MAX_EXPANSION or extra_bytes > MAX_EXTRA_BYTES or len(parts) > MAX_PARTS:
            raise ModelError(
                f"The normalizer and pre_tokenizer of {path} can turn each byte into {factor:.3g}, and add {extra_bytes:.3g}, "
                f"in {len(parts)} steps: {part.get('type', 'a step without type')} exceeds the limit.",
                remedy=f"At most {MAX_EXPANSION} bytes for each byte, {MAX_EXTRA_BYTES} added bytes and {MAX_PARTS} steps "
                "are allowed. Correct the file, or use another model.",
            )
    longest = sum([len(token["content"].encode()) for token in file.get("added_tokens") or ()])
    if longest * factor > MAX_EXPANDED_BYTES:
        raise ModelError(f"{path} would make more than {MAX_EXPANDED_BYTES} bytes of its added tokens.")
    for part in _flat(file.get("post_processor"), "processors"):
        _check_ends(part, path)
    return Expansion(factor, int(extra_bytes)) if factor > 2 else None


def _flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    steps, pending = [], [part] if part else []
    while pending:
        step = pending.pop()
        if members in step:
            pending += reversed(step[members])
        else:
            steps.append(step)
    return steps


def _part_expansion(part: dict[str, Any]) -> Expansion:
    """Return how much longer one normaliser or pre-tokenizer can make a text. NFC and NFD count as 1, since they rarely do.

    Steps are recognised by their fields, as in the library, since `type` may be missing. Raises `ModelError` for a damaged
    charsmap.
    """
    if "pattern" in part and "content" in part:  # Replace
        # The library fails where a pattern matches nothing, so a match has a byte at least.
        num_matched = max(1, len(part["pattern"].get("String", "").encode()))
        return Expansion(max(1.0, len(part["content"].encode()) / num_matched), 0)
    if "prepend" in part:
        return Expansion(1, len(part["prepend"].encode()))
    if part.get("precompiled_charsmap"):
        return Expansion(max(1, check_charsmap(base64.b64decode(part["precompiled_charsmap"]))), 0)
    if "replacement" in part:  # Metaspace: of each space, and in front of each piece
        return Expansion(1 + len(part["replacement"].encode()), 0)
    if part.get("type") == "ByteLevel":  # half of the bytes become characters of two; a space in front of each piece
        return Expansion(4 if part.get("add_prefix_space") else 2, 0)
    # https://unicode.org/faq/normalization.html has the forms; BERT's puts a space on each side of an ideograph.
    return Expansion({"NFKC": 11, "NFKD": 11, "BertNormalizer": 3}.get(part.get("type", ""), 1), 0)


def _check_ends(part: dict[str, Any], path: Path) -> None:
    """Raise `ModelError` if a post-processor puts too many tokens around a text, or repeats the text."""
    num_tokens = sum([len(token["ids"]) for token in (part.get("special_tokens") or {}).values()])
    for name, num_texts in (("single", 1), ("pair", 2)):
        pieces = part.get(name, ())
        num_added = num_tokens if pieces else 0
        is_repeated = sum(["Sequence" in piece or str(piece).startswith("$") for piece in pieces]) > num_texts
        if is_repeated or len(pieces) * num_added > MAX_ENDS:
            raise ModelError(
                f"{path} repeats a text, or puts more than {MAX_ENDS} tokens around it.",
                remedy="Correct its post_processor, or use another model.",
            )


def _piece_lookup(encoder: tokenizers.Tokenizer, names: Mapping[int, str]) -> Callable[[int], str | None]:
    """Return a function from a token id to its piece. `names`: of added tokens, which newer libraries return normalised."""

    def piece(token_id: int) -> str | None:
        return names.get(token_id) or (encoder.id_to_token(token_id) if token_id >= 0 else None)

    return piece


def _spelling(steps: list[dict[str, Any]], path: Path) -> Spelling:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    if "WordPiece" in kinds:
        return Spelling.WORDPIECE
    raise ModelError(
        f"{path} decodes with {', '.join(sorted(kinds)) or 'nothing'}, which is not supported.",
        remedy="Supported are ByteLevel, ByteFallback, Metaspace and WordPiece decoders.",
    )


def _strips_a_space(step: dict[str, Any]) -> bool:
    if step["type"] == "WordPiece":
        return True
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
