"""Answers to a JSON schema one byte at a time: which are refused, which are accepted, and random ones."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import load_tokenizer
from penstock.text.vocabulary import byte_level_alphabet
from penstock.types.errors import GrammarFailure, Rejected
from penstock.types.sampling import Matcher
from penstock.types.vocab import GgufVocab

_END_ID = 0
_ENDINGS = b'"}]'
_PLAIN = b'"{}[]:,0123456789-.e abtrufalsnT@:/'


class Bytewise:
    """Grammars over a vocabulary of all bytes, and an end."""

    def __init__(self) -> None:
        tokens = ["<|end|>", *byte_level_alphabet()]
        vocab = GgufVocab(
            model="gpt2",
            pre="smollm",
            tokens=tokens,
            token_types=[3] + [1] * (len(tokens) - 1),
            merges=[],
            scores=[],
            bos_token_id=0,
            eos_token_id=0,
            unknown_token_id=None,
            add_bos_token=False,
            add_eos_token=False,
            add_space_prefix=False,
        )
        tokenizer = load_tokenizer(vocab)
        self._ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(1, len(tokens))}
        self._bytes = {token_id: data[0] for data, token_id in self._ids.items()}
        self._grammars = Grammars(tokenizer, vocab_size=len(tokens))

    def matcher(self, schema: Any) -> Matcher:
        """Raises `Rejected`."""
        return self._grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    def refusal(self, schema: Any) -> str | None:
        """Why it is refused; None: it is followed."""
        try:
            self.matcher(schema)
        except Rejected as rejected:
            return rejected.detail
        return None

    def is_answer(self, schema: Any, text: str) -> bool:
        """Whether a text may be the whole answer."""
        return self.follows(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), text)

    def follows(self, grammar: Grammar, text: str) -> bool:
        """As `is_answer`, for any grammar."""
        matcher = self._grammars.matcher(grammar)
        try:
            for byte in text.encode():
                token_id = self._ids[bytes((byte,))]
                if not _is_in(matcher, token_id):
                    return False
                matcher.accept((token_id,))
            return _is_in(matcher, _END_ID)
        except GrammarFailure:
            return False

    def walk(self, schema: Any, random: Random, max_bytes: int = 300) -> bytes | None:
        """A random answer; None: it did not end, or no token could continue it. Strings and lists soon end."""
        matcher = self.matcher(schema)
        text = bytearray()
        while len(text) < max_bytes:
            try:
                ids = [token_id for token_id in (_END_ID, *self._bytes) if _is_in(matcher, token_id)]
            except GrammarFailure:
                return None
            ends = random.random() < (0.5 if len(text) < 40 else 0.95)
            if _END_ID in ids and (ends or len(ids) == 1):
                return bytes(text)
            ids = [token_id for token_id in ids if token_id != _END_ID]
            endings = [token_id for token_id in ids if self._bytes[token_id] in _ENDINGS]
            plain = [token_id for token_id in ids if self._bytes[token_id] in _PLAIN]
            likely = endings if endings and random.random() < (0.2 if len(text) < 40 else 0.7) else plain
            chosen = random.choice(likely if likely and random.random() < 0.95 else ids)
            text.append(self._bytes[chosen])
            try:
                matcher.accept((chosen,))
            except GrammarFailure:
                return None
        return None


def _is_in(matcher: Matcher, token_id: int) -> bool:
    mask = matcher.mask()
    return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)


def spelled(value: Any) -> str:
    """JSON in canonical spacing."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
