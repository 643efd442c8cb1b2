"""Reads a Hugging Face tokenizer.json into a `Backend`. Called by `load_tokenizer`.

The file says how to encode; how its pieces spell bytes is read from its decoder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from penstock.text.backend import Backend
from penstock.text.pieces import Spelling
from penstock.types.errors import ModelError

_log = logging.getLogger(__name__)


def load_backend(path: Path, *, bos_token_id: int | None, eos_token: str | None) -> Backend:
    """The file doesn't name its bos and eos tokens, so the caller does. Raises `ModelError`.

    Truncation and padding that the file may ask for are switched off: they would change prompts silently.
    """
    encoder = _read(path)
    encoder.no_truncation()
    encoder.no_padding()
    steps = list(_decoder_steps(encoder))
    added = encoder.get_added_tokens_decoder()
    eos_token_id = None if eos_token is None else encoder.token_to_id(eos_token)
    if eos_token is not None and eos_token_id is None:
        _log.warning("%s: there is no token %r, which tokenizer_config.json calls the eos_token", path, eos_token)
    ends = [token_id for token_id in (bos_token_id, eos_token_id) if token_id is not None]
    return Backend(
        encoder=encoder,
        vocab_size=encoder.get_vocab_size(with_added_tokens=True),
        piece=_piece_lookup(encoder),
        spelling=_spelling(steps, path),
        literal_ids=frozenset(added),
        special_ids=frozenset([*(token_id for token_id, token in added.items() if token.special), *ends]),
        silent_ids=frozenset(),
        starts_with_space=any(_strips_a_space(step) for step in steps),
        bos_token_id=bos_token_id,
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        unknown_token_id=None,
        padding_token_id=None,
    )


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{path} is not a valid tokenizer.json: {error}.",
            remedy="Fetch it again, or use a newer version of the package tokenizers.",
        ) from error


def _piece_lookup(encoder: tokenizers.Tokenizer) -> Callable[[int], str | None]:
    def piece(token_id: int) -> str | None:
        return encoder.id_to_token(token_id) if token_id >= 0 else None

    return piece


def _decoder_steps(encoder: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    """The decoder's parts, nested sequences laid flat."""
    if encoder.decoder is None:
        return
    pending = [json.loads(encoder.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step


def _spelling(steps: list[dict[str, Any]], path: Path) -> Spelling:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    raise ModelError(
        f"{path} decodes with {', '.join(sorted(kinds)) or 'nothing'}, which is not supported.",
        remedy="Supported are ByteLevel, ByteFallback and Metaspace decoders.",
    )


def _strips_a_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
