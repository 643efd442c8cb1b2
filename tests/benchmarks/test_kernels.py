"""The benchmark of the kernels: what it counts, what it calls a cliff, and that it runs on every kind of weights."""

import argparse
import json
import sys
from types import SimpleNamespace

import kernel_engines
import kernels
import numpy as np
import pytest
from kernel_engines import WEIGHT_KINDS, AttentionCase, AttentionEngine, AttentionShape, Product, ProductEngine

from penstock.backends.native._native import Engine, SourceFormat, Team


def test_row_counts_may_be_ranges():
    assert kernels.parse_rows("8,1-3,3,16") == [1, 2, 3, 8, 16]
    for text in ("0", "", "4-2", "a"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            kernels.parse_rows(text)


def test_the_bound_is_memory_for_one_row_and_multiply_adds_for_many():
    product, kind = Product("p", 1024, (1024,)), WEIGHT_KINDS["q4_0"]
    one, many = kernels.product_work(product, kind, 1), kernels.product_work(product, kind, 512)
    assert one.num_bytes == many.num_bytes == 1024 * 1024 * 4.5 / 8
    assert one.bound_s(gops=2000, gbs=50) == one.num_bytes / 50e9
    assert many.bound_s(gops=2000, gbs=50) == 512 * 2 * 1024 * 1024 / 2000e9


def test_attention_counts_what_a_query_sees():
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16)
    work = kernels.attention_work(shape, AttentionCase(rows=3, query_len=2, context_len=10))
    assert work.operations == 3 * (11 + 12) * 2 * 16 * 4
    assert work.num_bytes == 3 * 12 * (16 * 2 + 2 + 2)  # a scale of the key and one of the value


def test_a_cliff_is_where_more_rows_take_longer_each():
    assert kernels.worst_neighbours([1, 2, 4], [1.0, 1.0, 4.0]) == {"ratio": 0.5, "rows": [2, 4]}


@pytest.mark.parametrize("kind", WEIGHT_KINDS.values(), ids=WEIGHT_KINDS)
@pytest.mark.parametrize(
    "product",
    [
        Product("several", 64, (32, 16)),
        Product("gated", 64, (48, 48), is_gated=True),
        Product("residual", 64, (64,), has_residual=True),
    ],
    ids=lambda product: product.name,
)
def test_every_product_runs_on_every_kind_of_weights(product, kind):
    engine = ProductEngine(product, kind, num_copies=3, max_rows=40, num_threads=2, variant="")
    assert all(engine.run(rows) > 0.0 for rows in (1, 7, 40))
    assert engine.engine.weight_bytes == 3 * product.num_bytes(kind) + 40 * 64 * 2 + 8 * 64 * 2  # and the padded inputs


def test_tables_are_no_packed_weights():
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 4, "num_blocks": 2, "block_size": 16}
    engine = Engine(**sizes, max_rows=1, max_step_tokens=1, team=Team(1))
    engine.add_matrix(SourceFormat.Q4_0, 16, 32, np.zeros((16, 18), np.uint8))
    packed = engine.weight_bytes
    assert packed > 0
    engine.add_table(SourceFormat.Q4_0, 16, 32, np.zeros((16, 18), np.uint8))
    assert engine.weight_bytes == packed


def test_weights_that_never_settle_are_an_error(monkeypatch):
    monkeypatch.setattr(kernel_engines, "SETTLING_S", 0.0)
    kernel_engines.wait_for_huge_pages(SimpleNamespace(small_page_bytes=0))
    with pytest.raises(TimeoutError, match="4096 bytes"):
        kernel_engines.wait_for_huge_pages(SimpleNamespace(small_page_bytes=4096))


def test_attention_runs_with_rows_of_several_lengths():
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
    engine = AttentionEngine(shape, num_layers=2, num_positions=1024, max_tokens=32, num_threads=2, variant="")
    assert all(engine.run(case) > 0.0 for case in (AttentionCase(4, 1, 100), AttentionCase(1, 32, 300), AttentionCase(2, 5, 0)))


def test_last_line_is_the_result(monkeypatch, capsys):
    small = kernels.Model((Product("down", 64, (32,)),), AttentionShape(2, 1, 16))
    monkeypatch.setitem(kernels.MODELS, "smollm2", small)
    monkeypatch.setattr(kernels, "COPIES_BYTES", 4096)
    monkeypatch.setattr(kernels, "ATTENTION", (AttentionCase(2, 1, 40),))
    words = "--models smollm2 --kinds q4_1 --rows 1,4 --seconds 0 --threads 1"
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words.split()])
    kernels.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (found,) = result["variants"].values()
    assert result["benchmark"] == "kernels"
    assert found["products"][0]["rows"].keys() == {"1", "4"}
    assert found["attention"][0]["cases"][0]["context_len"] == 40
