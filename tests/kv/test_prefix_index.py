"""Names of prefixes, and the map from them to blocks."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.block_table import HASH_BYTES, extend_chain, pack, root_hash
from penstock.kv.prefix_cache import MAX_CHILDREN, PrefixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def chain(token_ids: list[int], salt: bytes = b"", block_size: int = 2) -> list[bytes]:
    return extend_chain(root_hash(salt), token_ids, block_size)[0]


def publish(index: PrefixIndex, block_id: int, token_ids: list[int], block_size: int = 2) -> None:
    """The last full block of a text."""
    names = [root_hash(b""), *chain(token_ids, block_size=block_size)]
    index.publish([block_id], names[-2], [names[-1]], [pack(token_ids[-block_size:])])


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
    tail, _ = extend_chain(head[-1] if head else root_hash(b""), token_ids[2 * len(head) :], 2)
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
    publish(index, 7, [1, 2])
    publish(index, 9, [1, 2, 3, 4, 5, 6])
    assert index.lookup(names) == [7]
    publish(index, 8, [1, 2, 3, 4])
    assert index.lookup(names) == [7, 8, 9]
    index.check()


def test_the_first_of_equal_blocks_stays() -> None:
    index = PrefixIndex()
    (name,) = chain([1, 2])
    publish(index, 7, [1, 2])
    publish(index, 8, [1, 2])
    assert index.lookup([name]) == [7]
    assert 8 not in index.block_ids
    index.forget([8])
    assert index.lookup([name]) == [7]


def test_a_forgotten_block_is_not_found() -> None:
    index = PrefixIndex()
    publish(index, 7, [1, 2])
    index.forget([7])
    assert index.lookup(chain([1, 2])) == []
    assert index.lookup_child(root_hash(b""), pack([1])) == (0, 0)
    assert len(index) == 0
    index.check()


def test_a_block_has_one_name() -> None:
    index = PrefixIndex()
    publish(index, 7, [1, 2])
    publish(index, 7, [1, 2])
    with pytest.raises(ValueError, match="block 7 is published already"):
        publish(index, 7, [1, 2, 3, 4])
    index.check()


class TestChildren:
    def test_the_one_that_is_alike_for_longest_is_found(self) -> None:
        index = PrefixIndex()
        publish(index, 7, [1, 2, 3, 4], block_size=4)
        publish(index, 8, [1, 2, 9, 9], block_size=4)
        root = root_hash(b"")
        assert index.lookup_child(root, pack([1, 2, 3, 7])) == (7, 3)
        assert index.lookup_child(root, pack([1, 2, 9])) == (8, 3)
        assert index.lookup_child(root, pack([1])) == (8, 1), "of equals the newest"
        assert index.lookup_child(root, pack([2])) == (0, 0)
        assert index.lookup_child(root_hash(b"salt"), pack([1, 2])) == (0, 0)

    def test_a_tail_is_found_as_far_as_it_is_filled(self) -> None:
        index = PrefixIndex()
        index.publish_tail(7, root_hash(b""), pack([1, 2]))
        assert index.lookup_child(root_hash(b""), pack([1, 2, 3])) == (7, 2)
        assert index.lookup(chain([1, 2])) == [], "it has no name"
        index.publish_tail(7, root_hash(b""), pack([1, 2, 3]))
        assert index.lookup_child(root_hash(b""), pack([1, 2, 3])) == (7, 3)
        index.check()

    def test_a_tail_that_is_known_is_not_kept_twice(self) -> None:
        index = PrefixIndex()
        index.publish_tail(7, root_hash(b""), pack([1, 2, 3]))
        index.publish_tail(8, root_hash(b""), pack([1, 2]))
        assert 8 not in index.block_ids

    def test_a_tail_becomes_a_full_block(self) -> None:
        index = PrefixIndex()
        index.publish_tail(7, root_hash(b""), pack([1]))
        publish(index, 7, [1, 2])
        assert index.lookup(chain([1, 2])) == [7]
        index.check()

    def test_a_tail_that_becomes_what_another_is_goes(self) -> None:
        index = PrefixIndex()
        publish(index, 7, [1, 2])
        index.publish_tail(8, root_hash(b""), pack([1, 3]))
        publish(index, 8, [1, 2])
        assert 8 not in index.block_ids
        index.check()

    @pytest.mark.parametrize("order", list(permutations((7, 8, 9))))
    def test_those_that_are_left_are_found(self, order: tuple[int, ...]) -> None:
        index = PrefixIndex()
        for block_id in (7, 8, 9):
            publish(index, block_id, [1, block_id])
        left = {7, 8, 9}
        for block_id in order:
            assert index.forget([block_id]) == chain([1, block_id])
            left.remove(block_id)
            index.check()
            for other in left:
                assert index.lookup_child(root_hash(b""), pack([1, other])) == (other, 2)
        assert not index.has_children(root_hash(b""))

    def test_only_the_newest_are_compared(self) -> None:
        index = PrefixIndex()
        for block_id in range(1, MAX_CHILDREN + 2):
            publish(index, block_id, [1, block_id])
        assert index.lookup_child(root_hash(b""), pack([1, 1])) == (MAX_CHILDREN + 1, 1)
        assert index.lookup(chain([1, 1])) == [1], "a whole block is found by its name"
        index.check()
        index.forget(range(1, MAX_CHILDREN + 2))
        index.check()
