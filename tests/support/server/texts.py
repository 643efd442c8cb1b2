"""Helpers that `server/test_texts.py` shares with other tests."""

import math
import struct

import pytest

from penstock.testing import expected_state
from support.server.harness import make_tokenizer

TOKENIZER = make_tokenizer(has_ends=True)


def numbers(text, **options):
    """The hash executor's answer to a text or a pair."""
    [tokens] = TOKENIZER.encode_texts([text], **options)
    return list(struct.unpack("4f", expected_state(tokens.token_ids, tokens.second_at)))


def unit(values):
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def near(values):
    return pytest.approx(values, abs=1e-6)
