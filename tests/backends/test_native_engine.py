"""The engine when something is wrong: arrays that name what does not exist, no memory, no threads."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import Engine, RowOp, RowOpKind, RowTable, SourceFormat, Team, spreading_error
from penstock.backends.native.executor import KV_FORMATS
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.sampling import SamplingParams
from support.backends.native_probe import Probe

SIZES: dict[str, Any] = {
    "kv_shapes": [(1, 16)],
    "vocab_size": 64,
    "num_blocks": 4,
    "block_size": 16,
    "max_rows": 4,
    "max_step_tokens": 8,
    "team": Team(2),
}


def open_engine(**sizes: Any) -> Engine:
    """An engine whose logits are all 0."""
    engine = Engine(**(SIZES | sizes))
    vocab_size = (SIZES | sizes)["vocab_size"]
    zeros = np.zeros((64, vocab_size // 32 * 18), np.uint8)
    matrix = engine.add_matrix(SourceFormat.Q4_0, 64, vocab_size, zeros)
    buffer, logits = engine.add_buffer(vocab_size, per_sample=False), engine.add_buffer(vocab_size, per_sample=True)
    engine.add_rows([RowOp(RowOpKind.EMBED, out=buffer, weight=matrix, value=1.0)], samples=False)
    engine.add_rows([RowOp(RowOpKind.GATHER, x=buffer, out=logits)], samples=True)
    engine.set_logits(logits)
    return engine


@pytest.mark.parametrize("dtype", KvDtype)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
def test_the_kv_cache_takes_what_was_planned_for_it(dtype: KvDtype, head_dim: int) -> None:
    sizes = SIZES | {"kv_shapes": [(2, head_dim)] * 3, "block_size": 32}
    if dtype is KvDtype.INT4 and head_dim % 32:
        with pytest.raises(ValueError, match="whole groups of 32 columns"):
            Engine(**sizes, kv_format=KV_FORMATS[dtype])
        return
    engine = Engine(**sizes, kv_format=KV_FORMATS[dtype])
    assert engine.kv_bytes == 3 * 2 * 4 * 32 * dtype.head_bytes(head_dim)


def step_arrays(**changes: Any) -> list[Any]:
    """A step of two rows, two tokens and one token long. The logits after their last tokens are wanted."""
    arrays: dict[str, Any] = {
        "row_slots": [0, 2],
        "query_start_loc": [0, 2, 3],
        "context_lens": [16, 0],
        "token_ids": [1, 2, 3],
        "positions": [16, 17, 0],
        "slot_mapping": [32, 33, 48],
        "block_tables": [[1, 2], [0, 0], [3, 0], [0, 0]],
        "logit_tokens": [1, 2],
    }
    assert set(changes) <= set(arrays)
    types = {"slot_mapping": np.int64}
    return [np.array(value, types.get(name, np.int32)) for name, value in (arrays | changes).items()]


def logits_of(engine: Engine, **changes: Any) -> NDArray[np.float32]:
    out = np.full((2, 64), np.nan, np.float32)
    engine.logits_step(*step_arrays(**changes), out)
    return out


@pytest.mark.parametrize("sizes", [{}, {"kv_shapes": []}, {"kv_shapes": [], "team": Team(1)}])
def test_a_step_computes_logits(sizes: dict[str, Any]) -> None:
    """Without a layer, too."""
    assert not logits_of(open_engine(**sizes)).any()


def test_an_engine_without_logits_computes_none() -> None:
    engine = Engine(**SIZES)
    with pytest.raises(ValueError, match="no logits"):
        engine.logits_step(*step_arrays(), np.zeros((2, 0), np.float32))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("row_slots", [0, 4], "no such block table"),
        ("row_slots", [-1, 2], "no such block table"),
        ("query_start_loc", [0, 2, 4], "are not all the tokens"),
        ("query_start_loc", [1, 2, 3], "are not all the tokens"),
        ("query_start_loc", [0, 4, 3], "a negative number of tokens"),
        ("context_lens", [31, 0], "more tokens than its block table"),
        ("context_lens", [2**31 - 1, 0], "more tokens than its block table"),
        ("context_lens", [-1, 0], "a negative number of tokens"),
        ("token_ids", [1, 64, 3], "outside the vocabulary"),
        ("token_ids", [1, -1, 3], "outside the vocabulary"),
        ("slot_mapping", [32, 33, 64], "outside the KV cache"),
        ("slot_mapping", [32, -1, 48], "outside the KV cache"),
        ("block_tables", [[1, 4], [0, 0], [3, 0], [0, 0]], "no such block$"),
        ("block_tables", [[-1, 2], [0, 0], [3, 0], [0, 0]], "no such block$"),
        ("logit_tokens", [1, 3], "not in the step"),
        ("logit_tokens", [-1, 2], "not in the step"),
        ("logit_tokens", [2, 1], "not wanted in the order"),
    ],
)
def test_a_step_that_names_what_does_not_exist_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        logits_of(open_engine(), **{name: value})


def test_what_a_row_does_not_use_of_its_block_table_is_not_looked_at() -> None:
    assert not logits_of(open_engine(), block_tables=[[1, 2], [-7, 99], [3, 99], [99, 99]]).any()


def planned_rows(vocab_size: int) -> RowTable:
    """A step of two rows, in slots 0 and 1, that both sample."""
    rows = RowTable(
        num_blocks=4, block_size=16, max_rows=4, max_step_tokens=8, max_model_len=16, vocab_size=vocab_size, window=0
    )
    for name, block_id in (("a", 1), ("b", 2)):
        rows.admit(AdmitRow(name, (1, 2), 2, (block_id,), 0, SamplingParams()))
    rows.plan((RowPlan("a", 0, 2, (), True), RowPlan("b", 0, 2, (), True)))
    return rows


def test_logits_of_another_width_than_the_vocabulary_are_not_sampled() -> None:
    engine = open_engine()
    engine.set_logits(engine.add_buffer(32, per_sample=True))
    with pytest.raises(ValueError, match="vocabulary"):
        planned_rows(64).run(engine)


@pytest.mark.parametrize("name", sorted(set(SIZES) - {"team"}))
def test_an_engine_without_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least"):
        Engine(**(SIZES | {name: [(0, 16)] if name == "kv_shapes" else 0}))


@pytest.mark.parametrize("head_dim", [-16, 0, 24, 592])
def test_heads_that_the_kernels_do_not_take_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Engine(**(SIZES | {"kv_shapes": [(1, 16), (1, head_dim)]}))


@pytest.mark.parametrize(("layer", "num_heads"), [(-1, 2), (1, 2), (0, 0), (0, 3)])
def test_attention_of_no_layer_or_of_heads_that_share_none_evenly_is_refused(layer: int, num_heads: int) -> None:
    engine = Engine(**(SIZES | {"kv_shapes": [(2, 16)]}))
    buffer = engine.add_buffer(64, per_sample=False)
    with pytest.raises(ValueError, match="keys and values"):
        engine.add_attention(buffer, buffer, layer, num_heads, 1.0, 0, 0.0)
    if layer != 0:
        with pytest.raises(ValueError, match="keys and values"):
            engine.add_rows([RowOp(RowOpKind.KV_WRITE, x=buffer, y=buffer, n=layer)], samples=False)


@pytest.mark.parametrize(("columns", "x_columns", "out_columns"), [(3, 3, 16), (6, 4, 16), (4, 4, 15), (4, 5, 16)])
def test_heads_that_do_not_fit_their_columns_are_refused(columns: int, x_columns: int, out_columns: int) -> None:
    """Columns are read in pairs: the last head's odd one would be read with a column of the next row."""
    engine = Engine(**SIZES)
    weights = np.zeros((32, 2 * columns), np.uint8)
    heads = {
        "weight": engine.add_matrix(SourceFormat.BF16, 32, columns, weights),
        "activation": engine.add_activation(8 if x_columns == 4 else 6, False, per_sample=False),
        "out": engine.add_buffer(32, per_sample=False),
    }
    with pytest.raises(ValueError, match="matrices of heads do not fit"):
        engine.add_heads(**heads, num_heads=2, x_columns=x_columns, out_columns=out_columns, samples=False)


def run_alone(code: str) -> str:
    """The output of code in a process of its own, which must end well."""
    prelude = f"import sys\nsys.path[:] = {sys.path!r}\nimport resource\nfrom backends.test_native_engine import *\n"
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_more_threads_is_an_error_not_the_end_of_the_process() -> None:
    """Stacks of 8 MiB each find no room in the address space."""
    out = run_alone(
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try:\n    Team(5000)\nexcept RuntimeError as error:\n    print(error)\n"
        "print(open_engine().num_threads)\n"
    )
    assert out.splitlines()[1:] == ["2"]


def test_a_sampler_without_memory_fails_the_step_and_the_next_one_runs() -> None:
    """Whichever thread it happens on, the others must not wait for it."""
    out = run_alone(
        "from penstock.backends.native import _native\n"
        "engine = open_engine(vocab_size=1 << 22)\n"
        "def sample(temperature):\n"
        "    for slot in range(2): engine.set_sampling(slot, _native.RowSampling(temperature=temperature, seed=slot))\n"
        "    return planned_rows(1 << 22).run(engine)\n"
        "sample(0.0)\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 20), resource.RLIM_INFINITY))\n"
        "try:\n    sample(1.0)\nexcept MemoryError:\n    print('no memory')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "tokens, failed = sample(1.0)\n"
        "print(sorted(tokens), failed)\n"
    )
    assert out.splitlines() == ["no memory", "['a', 'b'] []"]


def test_a_closed_engine_gives_its_memory_back_every_time() -> None:
    """From the second engine on malloc would keep it: it takes the sizes that were freed for ones that come again."""
    out = run_alone(
        "def resident_mib(): return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() >> 20\n"
        "weights = np.ones((512, 1024 // 32 * 34), np.uint8)\n"
        "for _ in range(3):\n"
        "    engine = Engine(**SIZES)\n"
        "    before = resident_mib()\n"
        "    for _ in range(200):\n"
        "        engine.add_matrix(SourceFormat.Q8_0, 512, 1024, weights)\n"
        "        engine.add_vector(np.ones(576, np.float32))\n"
        "    used = resident_mib() - before\n"
        "    del engine\n"
        "    print(used > 90, resident_mib() - before < 10)\n"
    )
    assert out.splitlines() == ["True True"] * 3


def test_weights_keep_their_values_while_their_pages_become_huge() -> None:
    values = np.random.default_rng(2).integers(0, 256, (4096, 1024), dtype=np.uint8)  # 4 MiB, 64 times
    values[:, 1::2] &= 0x3F  # bf16 without infinities
    num_between = 0
    for _ in range(5):  # the thread may be done before the first step begins, if this one loses its core
        num_between = max(num_between, steps_while_pages_move(values, 64))
        if num_between >= 3:
            return
    pytest.fail(f"only {num_between} steps ran while pages moved")


def steps_while_pages_move(values: NDArray[np.uint8], num_matrices: int) -> int:
    """How many steps ended while pages had moved and others were still to: each adds up some rows of every matrix."""
    probe = Probe(len(values), 512, variant="")
    probe.engine.use_small_pages()
    out, row = probe.buffer(512), probe.buffer(512)
    for index in range(num_matrices):
        matrix = probe.engine.add_matrix(SourceFormat.BF16, len(values), 512, values)
        probe.row(RowOpKind.EMBED, out=row if index else out, weight=matrix, value=1.0)
        if index:
            probe.row(RowOpKind.ADD, out=out, x=out, y=row, value=1.0)
    probe.finish(out)
    tokens = range(0, len(values), 128)
    wanted, small = probe.run(tokens), probe.engine.small_page_bytes
    assert small >= num_matrices * values.nbytes
    probe.engine.settle()
    give_up, num_between = time.monotonic() + 30, 0
    while probe.engine.small_page_bytes > 0 and time.monotonic() < give_up:
        assert np.array_equal(probe.run(tokens), wanted)
        num_between += 0 < probe.engine.small_page_bytes < small
    assert probe.engine.small_page_bytes == 0
    assert np.array_equal(probe.run(tokens), wanted)
    return num_between


def settle_all(engine: Engine) -> None:
    engine.settle()
    give_up = time.monotonic() + 30
    while engine.small_page_bytes > 0 and time.monotonic() < give_up:
        os.sched_yield()
    assert engine.small_page_bytes == 0


def spread_ranges() -> int:
    """Ranges of this process's memory whose pages the system spreads over nodes."""
    return sum(" interleave" in line for line in Path("/proc/self/numa_maps").read_text().splitlines())


@pytest.mark.parametrize("has_small_pages", [False, True])
def test_weights_and_kv_lie_on_the_nodes_that_are_named(has_small_pages: bool) -> None:
    """On this machine's first node, which every machine has; a page that becomes huge is on a node as the one before."""
    if not Path("/proc/self/numa_maps").exists() or spreading_error([0]) != 0:
        pytest.skip("this system spreads no memory over nodes")
    values = np.full((4096, 1024), 1, np.uint8)
    before = spread_ranges()
    plain, spread = (Probe(4096, 512, variant="", memory_nodes=nodes) for nodes in ([], [0]))
    for probe in (plain, spread):
        if has_small_pages:
            probe.engine.use_small_pages()
        out = probe.buffer(512)
        probe.row(RowOpKind.EMBED, out=out, weight=probe.engine.add_matrix(SourceFormat.BF16, 4096, 512, values), value=1.0)
        probe.finish(out)
        settle_all(probe.engine)
        assert (spread_ranges() >= before + 2) == (probe is spread), "the weights and the KV cache"
    assert np.array_equal(plain.run([0, 4095]), spread.run([0, 4095]))


def test_where_the_system_spreads_no_memory_the_engine_works_as_without() -> None:
    """A node that is not there stands for a container that may not choose."""
    assert spreading_error([]) == 0
    if spreading_error([63]) == 0:
        pytest.skip("this machine has so many nodes")
    values = np.full((16, 1024), 1, np.uint8)
    found = []
    for nodes in ([], [63]):
        probe = Probe(16, 512, variant="", memory_nodes=nodes)
        out = probe.buffer(512)
        probe.row(RowOpKind.EMBED, out=out, weight=probe.engine.add_matrix(SourceFormat.BF16, 16, 512, values), value=1.0)
        probe.finish(out)
        found.append(probe.run([3, 15]))
    assert np.array_equal(*found)
    with pytest.raises(ValueError, match="one of 0 to 63"):
        spreading_error([64])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls have other numbers")
def test_a_policy_that_the_user_chose_for_memory_stays() -> None:
    """A thread chooses what `numactl --interleave=0` chooses for a process; the policy ends with the thread."""
    set_mempolicy, interleave, found = 238, 3, list[int]()

    def ask() -> None:
        mask = ctypes.c_ulong(1)
        if ctypes.CDLL(None).syscall(set_mempolicy, interleave, ctypes.byref(mask), 65) == 0:
            found.append(spreading_error([0]))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    if not found:
        pytest.skip("this system lets nobody choose")
    assert found == [errno.EEXIST]


def test_weights_that_come_after_the_last_are_refused() -> None:
    engine = open_engine()
    for _ in range(2):
        engine.settle()
        with pytest.raises(RuntimeError, match="weights are complete"):
            engine.add_matrix(SourceFormat.BF16, 16, 16, np.zeros((16, 32), np.uint8))
        with pytest.raises(RuntimeError, match="weights are complete"):
            engine.use_small_pages()


def test_an_engine_that_is_dropped_while_its_pages_become_huge_ends_cleanly() -> None:
    for _ in range(20):
        engine = open_engine()
        engine.use_small_pages()
        engine.add_matrix(SourceFormat.BF16, 4096, 2048, np.zeros((4096, 4096), np.uint8))
        engine.settle()
        del engine


LARGE_KV = {"kv_shapes": [(8, 256)] * 4, "num_blocks": 300}
"""80 MB."""


def test_the_first_blocks_have_their_memory_before_a_step_wants_them() -> None:
    before, give_up = resident_bytes(), time.monotonic() + 30
    engine = Engine(**(SIZES | LARGE_KV))
    engine.settle()
    while resident_bytes() < before + 0.9 * engine.kv_bytes:
        assert time.monotonic() < give_up
    content = np.ones(engine.block_bytes, np.uint8)
    engine.read_block(299, content)
    assert not content.any()


def test_an_engine_that_is_dropped_while_its_cache_gets_memory_ends_cleanly() -> None:
    for _ in range(20):
        engine = Engine(**(SIZES | LARGE_KV))
        engine.settle()
        del engine


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_partial_results_of_split_attention_take_a_bounded_memory() -> None:
    """The last queries of a long prompt, on many threads: without a bound, 60 tiles would leave 193 MB of partial results."""
    num_queries, num_blocks, num_heads, head_dim = 60, 2_048, 48, 128
    shape = {"num_blocks": num_blocks + 1, "kv_shapes": [(1, head_dim)]}
    probe = Probe(num_queries, num_heads * head_dim, variant="", num_threads=16, **shape)
    queries, keys = (probe.input(np.zeros((num_queries, heads * head_dim), np.float32)) for heads in (num_heads, 1))
    probe.row(RowOpKind.KV_WRITE, x=keys, y=keys, n=0)
    probe.flush()
    out = probe.buffer(num_heads * head_dim)
    probe.engine.add_attention(queries, out, 0, num_heads, head_dim**-0.5, 0, 0.0)
    probe.finish(out)
    for block in range(1, num_blocks + 1):  # takes the memory of the KV cache
        probe.engine.poison_block(block)
    tables = np.arange(1, num_blocks + 1, dtype=np.int32)[None]

    def memory_after(context_len: int) -> int:
        probe.run(range(num_queries), query_lens=[num_queries], context_lens=[context_len], block_tables=tables)
        return resident_bytes()

    before = memory_after(0)
    assert memory_after(16 * num_blocks - num_queries) - before < 100e6
