"""The blocks that products fetch for the attention after them: each block that it reads once, and nothing where that does not
pay."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native._native import SourceFormat
from support.backends.native_probe import Probe
from support.native_variants import WITHOUT_TILES

NUM_ROWS = 12  # the fewest that products fetch for
BYTES_PER_GROUP = {SourceFormat.Q8_0: 34, SourceFormat.BF16: 64}
"""Bytes of 32 columns in a file."""


def open_probe(
    *products: tuple[SourceFormat, int, int], window: int = 0, head_dim: int = 16, block_size: int = 16, num_blocks: int = 40
) -> Probe:
    """Products of (format, rows, columns), whose weights are 0, and then attention of one head."""
    sizes = {"kv_shapes": [(1, head_dim)], "block_size": block_size, "num_blocks": num_blocks}
    probe = Probe(NUM_ROWS, head_dim, variant=WITHOUT_TILES[0], num_threads=1, **sizes)
    q, out = probe.input(np.zeros((NUM_ROWS, head_dim), np.float32)), probe.buffer(head_dim)
    linears = []
    for source, rows, cols in products:
        is_quantised = source is not SourceFormat.BF16
        x = probe.input(np.zeros((NUM_ROWS, cols), np.float32))
        activation = probe.activation(x, cols, is_quantised=is_quantised)
        weight = probe.engine.add_matrix(source, rows, cols, np.zeros((rows, cols // 32 * BYTES_PER_GROUP[source]), np.uint8))
        linears.append((weight, activation, probe.buffer(rows), -1, -1))
    probe.flush()
    for linear in linears:
        probe.engine.add_linear([linear], samples=False)
    probe.engine.add_attention(q, out, 0, 1, 1.0, window, 0.0)
    probe.finish(out)
    return probe


def fetched_by(probe: Probe, blocks_of_row: list[list[int]]) -> list[int]:
    """A token of every row, after as many as fill its blocks but for one."""
    tables = np.array(blocks_of_row, np.int32)
    context_len = tables.shape[1] * probe.block_size - 1
    probe.run(range(NUM_ROWS), context_lens=[context_len] * NUM_ROWS, block_tables=tables)
    return list(probe.engine.fetched_blocks(0, 0))


OWN_BLOCKS = [[1 + 3 * row + i for i in range(3)] for row in range(NUM_ROWS)]
IN_ORDER = list(range(1, 1 + 3 * NUM_ROWS))
QUANTISED = (SourceFormat.Q8_0, 64, 64)
FLOATS = (SourceFormat.BF16, 64, 64)


def test_products_share_the_blocks_of_the_rows_in_order() -> None:
    assert fetched_by(open_probe(QUANTISED), OWN_BLOCKS) == IN_ORDER
    assert fetched_by(open_probe(QUANTISED, QUANTISED, QUANTISED), OWN_BLOCKS) == IN_ORDER


def test_a_window_is_not_fetched() -> None:
    """Attention reads only some of its rows' blocks."""
    assert fetched_by(open_probe(QUANTISED, window=20), OWN_BLOCKS) == []


def test_a_layer_that_no_cache_holds_leaves_keys_to_attention() -> None:
    assert fetched_by(open_probe((SourceFormat.Q8_0, 7_600, 1_024)), OWN_BLOCKS) == IN_ORDER
    assert fetched_by(open_probe((SourceFormat.Q8_0, 7_904, 1_024)), OWN_BLOCKS) == []


def test_no_more_is_fetched_than_a_cache_keeps() -> None:
    """4 MiB, of blocks of 270,848 bytes."""
    assert fetched_by(open_probe(QUANTISED, head_dim=512, block_size=256), OWN_BLOCKS) == IN_ORDER[:15]


def test_products_of_floats_fetch_nothing() -> None:
    """So they have no share: the others have it all."""
    assert fetched_by(open_probe(FLOATS), OWN_BLOCKS) == []
    assert fetched_by(open_probe(FLOATS, QUANTISED, FLOATS), OWN_BLOCKS) == IN_ORDER


def test_attention_without_products_before_it_fetches_for_itself() -> None:
    assert fetched_by(open_probe(), OWN_BLOCKS) == []


def test_a_block_that_rows_share_is_fetched_once() -> None:
    """A prefix of all, and those of rows that are no neighbours; by every step anew."""
    shared = [[1, 2, 3 + row % 2, 10 + row] for row in range(NUM_ROWS)]
    expected = [1, 2, 3, 10, 4, *range(11, 10 + NUM_ROWS)]
    probe = open_probe(QUANTISED)
    for _ in range(2):
        assert fetched_by(probe, shared) == expected
    assert fetched_by(probe, shared[::-1]) == [1, 2, 4, 21, 3, *range(20, 9, -1)]


def test_a_layer_or_strand_that_is_not_there_is_told() -> None:
    probe = open_probe(QUANTISED)
    fetched_by(probe, OWN_BLOCKS)
    for strand, layer in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(ValueError, match="no such"):
            probe.engine.fetched_blocks(strand, layer)
