"""Details of BERT's kin that no tiny model shows."""

from __future__ import annotations

from penstock.models.mpnet import FARTHEST, NUM_BUCKETS, bucket

AHEAD = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 10, 10, 11]
"""Buckets of keys 0 to 23 tokens before the query, by transformers' `MPNetEncoder.relative_position_bucket`."""


def test_buckets_of_distances_are_those_of_transformers():
    assert [bucket(-distance) for distance in range(len(AHEAD))] == AHEAD
    assert [bucket(distance) for distance in range(1, len(AHEAD))] == [number + NUM_BUCKETS // 2 for number in AHEAD[1:]]
    ends = {31: 11, 32: 12, 45: 12, 46: 13, 63: 13, 64: 14, 90: 14, 91: 15, 128: 15}
    assert {distance: bucket(-distance) for distance in ends} == ends


def test_beyond_the_farthest_distance_the_bucket_stays():
    for sign in (-1, 1):
        assert {bucket(sign * distance) for distance in range(FARTHEST, 600)} == {bucket(sign * FARTHEST)}
