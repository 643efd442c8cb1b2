"""Names of prefixes, and the map from them to blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.prefix_index import HASH_BYTES, PrefixIndex, extend_chain, root_hash

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def chain(token_ids: list[int], salt: bytes = b"", block_size: int = 2) -> list[bytes]:
    return list(extend_chain(root_hash(salt), token_ids, block_size))


def test_only_full_blocks_have_a_name() -> None:
    assert len(chain([1, 2, 3, 4, 5])) == 2
    assert chain([1]) == []


def test_names_have_128_bits() -> None:
    assert {len(name) for name in chain([1, 2, 3, 4])} == {HASH_BYTES} == {16}


@given(first=TOKENS, second=TOKENS)
def test_names_are_equal_exactly_where_prefixes_are(first: list[int], second: list[int]) -> None:
    for idx, (name, other) in enumerate(zip(chain(first), chain(second), strict=False)):
        assert (name == other) == (first[: 2 * idx + 2] == second[: 2 * idx + 2])


@given(token_ids=TOKENS, cut=st.integers(0, 6))
def test_a_chain_can_be_continued(token_ids: list[int], cut: int) -> None:
    whole = chain(token_ids)
    head = whole[:cut]
    tail = extend_chain(head[-1] if head else root_hash(b""), token_ids[2 * len(head) :], 2)
    assert [*head, *tail] == whole


def test_salts_share_nothing() -> None:
    assert not set(chain([1, 2, 3, 4], b"a")) & set(chain([1, 2, 3, 4], b"b"))
    assert not set(chain([1, 2, 3, 4], b"a")) & set(chain([1, 2, 3, 4]))


def test_a_salt_can_not_pose_as_tokens() -> None:
    """A salt that spells out a block's input does not name that block."""
    assert root_hash(root_hash(b"") + bytes([1, 0, 0, 0, 2, 0, 0, 0])) != chain([1, 2])[0]


def test_lookup_ends_at_the_first_gap() -> None:
    index = PrefixIndex()
    names = chain([1, 2, 3, 4, 5, 6])
    index.publish([7], [names[0]])
    index.publish([9], [names[2]])
    assert index.lookup(names) == [7]
    index.publish([8], [names[1]])
    assert index.lookup(names) == [7, 8, 9]


def test_the_first_of_equal_blocks_stays() -> None:
    index = PrefixIndex()
    (name,) = chain([1, 2])
    index.publish([7], [name])
    index.publish([8], [name])
    assert index.lookup([name]) == [7]
    assert 8 not in index.block_ids
    index.forget([8])
    assert index.lookup([name]) == [7]


def test_a_forgotten_block_is_not_found() -> None:
    index = PrefixIndex()
    (name,) = chain([1, 2])
    index.publish([7], [name])
    index.forget([7])
    assert index.lookup([name]) == []
    assert len(index) == 0


def test_a_block_has_one_name() -> None:
    index = PrefixIndex()
    first, second = chain([1, 2, 3, 4])
    index.publish([7], [first])
    index.publish([7], [first])
    with pytest.raises(ValueError, match="block 7 is published already"):
        index.publish([7], [second])
