"""The benchmarks of the kernels: what they count, what they call a cliff, and that they run on every kind of weights."""

import argparse
import sys
from types import SimpleNamespace

import attention
import kernel_engines
import kernels
import numpy as np
import pytest
from kernel_engines import WEIGHT_KINDS, AttentionCase, AttentionEngine, AttentionShape, Product, ProductEngine
from peaks import fastest_s

from penstock.backends.native._native import Engine, SourceFormat, Team


class Meter:
    """Peaks of 2000 GOP/s and 50 GB/s."""

    def __init__(self):
        self.sampled = []

    def best(self, name):
        return {"int8": 2000.0, "read": 50.0}[name]

    def sample(self, names, *, repeat=3):
        self.sampled.append(names)


def test_row_counts_may_be_ranges():
    assert kernels.parse_rows("8,1-3,3,16") == [1, 2, 3, 8, 16]
    for text in ("0", "", "4-2", "a"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            kernels.parse_rows(text)


def test_the_bound_is_memory_for_one_row_and_multiply_adds_for_many():
    product, kind = Product("p", 1024, (1024,)), WEIGHT_KINDS["q4_0"]
    one, many = kernels.product_work(product, kind, 1), kernels.product_work(product, kind, 512)
    assert one.num_bytes == many.num_bytes == 1024 * 1024 * 4.5 / 8
    assert one.share(1.0, Meter(), "int8") == pytest.approx(one.num_bytes / 50e9)
    assert many.share(1.0, Meter(), "int8") == pytest.approx(512 * 2 * 1024 * 1024 / 2000e9)


def test_attention_counts_what_a_query_sees():
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16)
    work = attention.attention_work(shape, AttentionCase(rows=3, query_len=2, context_len=10))
    assert work.operations == 3 * (11 + 12) * 2 * 16 * 4
    assert work.num_bytes == 3 * 12 * (16 * 2 + 2 + 2)  # a scale of the key and one of the value


def test_a_cliff_is_where_more_rows_take_longer_each():
    assert kernels.worst_neighbours({1: 1.0, 2: 1.0, 4: 4.0}) == (0.5, 2, 4)


def test_cases_run_in_turn_and_the_fastest_run_counts():
    times, order, meter = {"a": iter([9.0, 3.0, 1.0, 2.0]), "b": iter([9.0, 5.0, 6.0, 7.0])}, [], Meter()

    def run(case):
        order.append(case)
        return next(times[case])

    assert fastest_s(run, ["a", "b"], meter, "int8", 0.0) == {"a": 1.0, "b": 5.0}
    assert "".join(order) == "ab" * 4, "the first touches the memory"
    assert meter.sampled == [["int8", "read"], *[["int8"]] * 3, ["read"]]


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
    if product.is_gated and kind.by_row:
        with pytest.raises(ValueError, match="a product with a gate lacks weights"):
            ProductEngine(product, kind, num_copies=1, max_rows=1, num_threads=1, variant="")
        return
    engine = ProductEngine(product, kind, num_copies=3, max_rows=40, num_threads=2, variant="")
    assert all(engine.run(rows) > 0.0 for rows in (1, 7, 40))
    per_row = 8 * sum(product.outputs) if kind.by_row else 0  # a scale, and the sum of the row's weights
    inputs = 40 * 64 * 2 + 8 * 64 * 2  # padded
    assert engine.engine.weight_bytes == 3 * (product.num_bytes(kind) + per_row) + inputs


def test_tables_are_no_packed_weights():
    sizes = {"kv_shapes": [(1, 16)], "vocab_size": 4, "num_blocks": 2, "block_size": 16}
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


@pytest.fixture
def little_read(monkeypatch):
    """The speed of memory is measured with less memory, which takes less time. The tests do not look at it."""
    monkeypatch.setattr("peaks.probed_bytes", lambda: 1 << 22)


def test_products_are_printed_as_a_table(monkeypatch, capsys, little_read):
    monkeypatch.setitem(kernels.MODELS, "smollm2", (Product("down", 64, (32,)),))
    monkeypatch.setattr(kernels, "COPIES_BYTES", 4096)
    words = "--models smollm2 --shapes down --kinds q4_1 --rows 1,3,4 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words.split()])
    kernels.main()
    origin, _, head, _, line, _ = capsys.readouterr().out.splitlines()
    assert origin.startswith("`python benchmarks/kernels.py --models smollm2")
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["| % of the bound"] == "| down q4_1"
    assert float(cells["1"]) > 0
    assert cells["2"] == "", "not measured"
    assert cells["GOP/s (most rows)"].endswith("(4)")


def test_attention_is_printed_as_a_table(monkeypatch, capsys, little_read):
    monkeypatch.setattr(attention, "MODELS", {"small": AttentionShape(2, 1, 16)})
    monkeypatch.setattr(attention, "CASES", (AttentionCase(2, 1, 40),))
    attention.main(["--seconds", "0"])
    assert capsys.readouterr().out.splitlines()[4].startswith("| 2x1@40 |")
