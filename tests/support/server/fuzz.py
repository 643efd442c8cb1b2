"""Helpers that `server/test_fuzz.py` shares with other tests."""

import json

from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

NUMBERS = st.integers(-3, 300) | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)

SCALARS = st.none() | st.booleans() | NUMBERS | TEXT

JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)


def as_json(value):
    """JSON as clients write it; numbers beyond 64 bits are legal there."""
    return json.dumps(value).encode()
