"""How much memory the KV cache gets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.cuda.memory import Usage
from penstock.backends.native import footprint
from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, SchedulerConfig
from penstock.deploy.factory import plan_share
from penstock.deploy.forecast import Outline, forecast
from penstock.deploy.resolve import adapter_room, decide, plan_on_cpu
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.deploy.sizing import (
    DEFAULT_CAP_BYTES,
    LEAST_TOKENS_BESIDE,
    RESERVE_BYTES,
    SLOT_BOOKS_BYTES,
    AdapterRoom,
    KvPlan,
    Room,
    check_adapter_room,
    check_address_space,
    longest_text,
    plan_gpu_kv,
    plan_kv,
    wanted_len,
)
from penstock.machine import AddressSpace
from penstock.models.adapter import sites
from penstock.models.architectures import describe
from penstock.models.catalog import num_file_bytes, resolve
from penstock.models.load import load_model
from penstock.types.errors import ConfigError, NotEnoughFreeMemory, NotEnoughMemory
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ExpertsMlp, ModelSpec, ShortConvSpec, spec_of_equal_layers
from penstock.types.plan import Capacity
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf, write_hf

GIB, MIB = 1 << 30, 1 << 20


def make_spec(max_model_len: int = 2048, head_dim: int = 64) -> ModelSpec:
    return spec_of_equal_layers(
        architecture="llama",
        vocab_size=100,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=head_dim,
        intermediate_size=1536,
        norm_eps=1e-5,
        rope_inv_freq=(1.0,) * (head_dim // 2),
        max_model_len=max_model_len,
        tie_word_embeddings=True,
    )


BLOCK_BYTES = footprint.block_bytes(make_spec(), KvDtype.INT8, 16)


def plan(kv: KvConfig | None = None, spec: ModelSpec | None = None, **changes: Any) -> KvPlan:
    spec, kv = spec or make_spec(), kv or KvConfig()
    arguments: dict[str, Any] = {
        "block_bytes": footprint.block_bytes(spec, changes.pop("dtype", KvDtype.INT8), kv.block_size),
        "step_bytes": footprint.expert_bytes(spec, changes.get("max_step_tokens", 512)),
        "num_weight_bytes": 100 << 20,
        "available_bytes": 64 * GIB,
        **changes,
    }
    wanted = wanted_capacity(spec, kv, {"max_num_seqs": 64, "max_step_tokens": 512} | arguments)
    for name in ("max_model_len", "max_num_seqs", "max_step_tokens", "window"):
        arguments.pop(name, None)
    room = Room(**{name: arguments.pop(name) for name in Room.__slots__ if name in arguments})
    return plan_kv(wanted, kv, room=room, is_exact=changes.get("max_model_len") is not None, **arguments)


def wanted_capacity(spec: ModelSpec, kv: KvConfig, sizes: dict[str, Any]) -> Capacity:
    longest = wanted_len(spec, sizes.get("max_model_len"))
    rows, tokens = sizes["max_num_seqs"], sizes["max_step_tokens"]
    return Capacity(0, kv.block_size, rows, tokens, longest, window=sizes.get("window", 0))


def test_no_more_than_all_rows_together_can_use() -> None:
    assert plan().num_tokens == 64 * 2048


def test_no_more_than_the_cap_unasked() -> None:
    result = plan(max_num_seqs=4096)
    assert DEFAULT_CAP_BYTES - BLOCK_BYTES < result.num_bytes <= DEFAULT_CAP_BYTES


def test_half_of_what_is_free_after_the_weights() -> None:
    result = plan(available_bytes=(100 << 20) + RESERVE_BYTES + GIB)
    assert GIB // 2 - BLOCK_BYTES < result.num_bytes <= GIB // 2
    assert not result.is_shortened


def test_models_beside_each_other_share_half_of_what_all_weights_leave_or_take_turns() -> None:
    weights = {"num_weight_bytes": GIB, "beside_bytes": GIB + RESERVE_BYTES, "num_models": 2}
    all_bytes = 2 * (GIB + RESERVE_BYTES)
    result = plan(available_bytes=all_bytes + 400 * MIB, **weights)
    assert 100 * MIB - BLOCK_BYTES < result.num_bytes <= 100 * MIB
    in_turns = (GIB + RESERVE_BYTES) // 4 // BLOCK_BYTES
    assert plan(available_bytes=all_bytes, **weights).capacity.num_blocks == in_turns
    least = LEAST_TOKENS_BESIDE // 16 + 1
    long_spec = make_spec(max_model_len=2 * LEAST_TOKENS_BESIDE)
    for num_blocks, expected in ((least, least), (least - 1, in_turns + least - 1)):
        available_bytes = all_bytes + 4 * num_blocks * BLOCK_BYTES
        assert plan(available_bytes=available_bytes, spec=long_spec, **weights).capacity.num_blocks == expected
    request = {"available_bytes": all_bytes + 400 * BLOCK_BYTES, "spec": long_spec, **weights}
    assert plan(max_model_len=99 * 16, **request).capacity.num_blocks == 100
    assert plan(max_model_len=100 * 16, **request).capacity.num_blocks == in_turns + 100


def test_an_asked_for_size_is_used_whole() -> None:
    result = plan(KvConfig(kv_cache_memory_bytes=8 * GIB), max_num_seqs=1)
    assert 8 * GIB - BLOCK_BYTES < result.num_bytes <= 8 * GIB


def test_the_longest_request_shrinks_to_what_fits_unless_asked_for() -> None:
    kv = KvConfig(kv_cache_memory_bytes=11 * BLOCK_BYTES)
    result = plan(kv)
    assert (result.capacity.num_blocks, result.capacity.max_model_len, result.is_shortened) == (11, 160, True)
    with pytest.raises(ConfigError, match=r"max_model_len 161 tokens needs .* holds 160"):
        plan(kv, max_model_len=161)
    assert plan(kv, max_model_len=160).capacity.max_model_len == 160


def test_the_longest_request_has_room_for_its_state() -> None:
    def planned(num_blocks: int) -> KvPlan:
        kv = KvConfig(kv_cache_memory_bytes=num_blocks * BLOCK_BYTES)
        wanted = wanted_capacity(make_spec(), kv, {"max_num_seqs": 64, "max_step_tokens": 512})
        sizes = {"block_bytes": BLOCK_BYTES, "step_bytes": 0, "room": Room(available_bytes=64 * GIB, num_weight_bytes=0)}
        return plan_kv(replace(wanted, num_state_blocks=300), kv, is_exact=False, **sizes)

    assert planned(400).capacity.max_model_len == 99 * 16
    with pytest.raises(NotEnoughMemory, match="and a request's recurrent state of 300"):
        planned(301)


def test_so_many_requests_of_a_length_are_in_the_cache_at_once() -> None:
    result = plan(KvConfig(kv_cache_memory_bytes=101 * BLOCK_BYTES))
    assert result.num_requests_of(512) == 3, "32 blocks each, of 100"
    assert result.num_requests_of(17) == 50, "a block is not divided"
    assert result.num_requests_of(result.capacity.max_model_len) == 1


def test_with_a_window_a_request_may_be_longer_than_the_cache() -> None:
    """20 blocks hold a window of 100 positions and what a step of 200 computes behind it, and so do those of all rows."""
    kv, sizes = KvConfig(kv_cache_memory_bytes=21 * BLOCK_BYTES), {"window": 100, "max_step_tokens": 200}
    result = plan(kv, **sizes)
    assert (result.num_tokens, result.capacity.max_model_len, result.is_shortened) == (320, 2048, False)
    assert [result.num_requests_of(length) for length in (160, 320, 2048)] == [2, 1, 1]
    assert plan(kv, **sizes, max_model_len=2048).capacity.max_model_len == 2048
    assert plan(max_num_seqs=7, **sizes).capacity.num_blocks == 7 * 20 + 1
    smaller = KvConfig(kv_cache_memory_bytes=20 * BLOCK_BYTES)
    assert (plan(smaller, **sizes).capacity.max_model_len, plan(smaller, **sizes).is_shortened) == (304, True)
    with pytest.raises(ConfigError, match=r"max_model_len 2048 tokens needs .* holds 304"):
        plan(smaller, **sizes, max_model_len=2048)


@pytest.mark.parametrize(
    ("backend", "windows", "expected"),
    [
        ("reference", (6, 6), 6),
        ("reference", (6, 0), 0),
        ("native", (6, 9), 9),
        ("native", (0, 0), 0),
    ],
)
def test_the_window_is_the_largest_where_every_layer_has_one(backend: str, windows: tuple[int, ...], expected: int) -> None:
    spec = make_spec()
    spec = replace(spec, layers=spec.layers[:2]).with_attention(lambda i, layer: replace(layer, window=windows[i]))
    config = Config(backend=BackendConfig(backend=backend))
    found = plan_on_cpu(config, decide(config), spec, Room(available_bytes=GIB, num_weight_bytes=0))
    assert found.capacity.window == expected


def test_a_gpu_keeps_the_blocks_behind_a_window() -> None:
    spec = make_spec().with_attention(lambda _, layer: replace(layer, window=6))
    outline = Outline(name="", spec=spec, num_weight_bytes=0, num_disk_bytes=0, num_read_bytes=0, is_quantised=False)
    assert forecast(Config(), outline, is_gpu=True, memory_bytes=80 * GIB).kv.capacity.window == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_eight_bits_hold_nearly_twice_the_tokens(head_dim: int) -> None:
    """The scales take the rest."""
    spec = make_spec(head_dim=head_dim)
    int8, bf16 = (
        plan(KvConfig(kv_cache_memory_bytes=GIB // 4), spec, dtype=dtype, max_num_seqs=4096).num_tokens
        for dtype in (KvDtype.INT8, KvDtype.BF16)
    )
    assert int8 / bf16 == pytest.approx(1.94, abs=0.005)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_four_bits_hold_more_than_one_and_three_quarters_of_the_tokens_of_eight(head_dim: int) -> None:
    """Four bits of a value, five of a key, and two scales of a byte."""
    int8, int4 = (dtype.head_bytes(head_dim) for dtype in (KvDtype.INT8, KvDtype.INT4))
    assert int4 == head_dim * 9 / 8 + 2
    assert int8 / int4 > (1.8 if head_dim >= 64 else 1.78)


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 4096 is longer than the model's own 2048"):
        plan(max_model_len=4096)


def test_more_than_is_free_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory 2 GiB is more than the 668 MiB that are free"):
        plan(KvConfig(kv_cache_memory_bytes=2 * GIB), available_bytes=GIB)


def test_the_books_of_the_disk_tier_are_counted() -> None:
    available = (100 << 20) + RESERVE_BYTES + GIB
    without = plan(available_bytes=available).num_bytes
    num_slots = 500_000
    result = plan(KvConfig(kv_disk_size_bytes=num_slots * BLOCK_BYTES), available_bytes=available).num_bytes
    assert without - result == pytest.approx(num_slots * SLOT_BOOKS_BYTES / 2, abs=BLOCK_BYTES)


def test_books_that_take_most_of_the_memory_are_refused_with_the_numbers() -> None:
    disk = KvConfig(kv_disk_size_bytes=1 << 40)
    with pytest.raises(ConfigError, match=r"index of kv_disk_size 1 TiB, 5\d{6} blocks, takes up to 2.39 GiB .* 668 MiB"):
        plan(disk, available_bytes=GIB)
    assert plan(disk).capacity.num_blocks > 2


def test_the_experts_of_the_largest_step_are_counted() -> None:
    """A pair of a token and an expert takes 2 x 1536 + 576 floats, and the rounded inputs of both products."""
    mlp = ExpertsMlp(num_experts=32, num_experts_per_token=8, intermediate_size=1536)
    spec = make_spec().with_layers(lambda _, layer: replace(layer, mlp=mlp))
    free = GIB + (100 << 20) + RESERVE_BYTES
    found, dense = plan(spec=spec, available_bytes=free), plan(available_bytes=free)
    assert 512 * 8 * 4 * (2 * 1536 + 576) < found.num_step_bytes < 512 * 8 * 6 * (2 * 1536 + 576)
    assert dense.num_step_bytes == 0
    assert dense.num_bytes - found.num_bytes == pytest.approx(found.num_step_bytes / 2, abs=BLOCK_BYTES)
    with pytest.raises(NotEnoughMemory, match=r"what a step of 8192 tokens takes, 1\.\d+ GiB, leave no KV cache") as refused:
        plan(spec=spec, available_bytes=free, max_step_tokens=8192)
    for option in ("--max-num-batched-tokens", "(penstock serve --experts-on-disk)"):  # plan shows it, too
        assert option in refused.value.remedy


def test_activations_of_a_large_step_are_counted_and_those_of_a_default_one_are_in_the_reserve() -> None:
    def found(**sizes: int) -> KvPlan:
        config = Config(kv=KvConfig(kv_cache_memory_bytes=GIB), scheduler=SchedulerConfig(**sizes))
        room = Room(available_bytes=2 * GIB, num_weight_bytes=100 * MIB)
        spec = replace(make_spec(), vocab_size=50_000)
        return plan_on_cpu(config, decide(config, is_gpu=False), spec, room)

    assert found().num_step_bytes == 0
    of_token = 4 * (2 * 576 + 2 * 576 + 2 * 192 + 1536) + 2 * (2 * 576 + 1536)  # gate and up are one product
    assert found(max_num_batched_tokens=8192).num_step_bytes == pytest.approx(8192 * of_token - 78 * MIB, abs=4 * MIB)
    assert found(max_num_seqs=1024).num_step_bytes > 4 * 1024 * 50_000 - 128 * MIB
    with pytest.raises(NotEnoughMemory, match="what a step of 65536 tokens takes"):
        found(max_num_batched_tokens=65_536, max_num_seqs=4096)


def test_texts_beside_other_models_take_as_much_as_a_kv_cache() -> None:
    def longest(num_mib: int, wanted: int = 32_768, **beside: int) -> int:
        room = Room(available_bytes=RESERVE_BYTES + (1024 + num_mib) * MIB, num_weight_bytes=GIB, **beside)
        return longest_text(room, wanted, 512, lambda num_tokens: (num_tokens - 512) * MIB)

    assert [longest(num_mib) for num_mib in (32_256, 32_255, 16_000, 2000, 1, -100)] == [32_768, 16_384, 16_384, 2048, 512, 512]
    assert [longest(num_mib, 300) for num_mib in (1000, -100)] == [300, 300]
    beside = {"num_models": 2, "beside_bytes": GIB}
    assert [longest(1024 + 4 * num_mib, **beside) for num_mib in (32_256, 8000, 3584)] == [32_768, 8192, 4096]
    assert longest(1024 + 4 * 3584 - 1, **beside) == 4096, "a quarter of all that is free, since the models take turns"
    assert longest(1024, **beside) == 512


def test_recurrent_state_is_counted() -> None:
    conv = ShortConvSpec(kernel=3)
    spec = make_spec().with_layers(lambda i, layer: replace(layer, mixer=conv) if i % 3 else layer)
    found = plan(KvConfig(kv_cache_memory_bytes=GIB), spec=spec)
    assert footprint.state_bytes(spec) == 20 * 2 * 576 * 2
    assert found.num_bytes == found.capacity.num_blocks * (BLOCK_BYTES // 3 + footprint.state_bytes(spec))
    assert found.capacity.num_blocks == GIB // (BLOCK_BYTES // 3 + footprint.state_bytes(spec))


def test_fewer_than_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than the minimum: two blocks"):
        plan(KvConfig(kv_cache_memory_bytes=2 * BLOCK_BYTES - 1))
    with pytest.raises(ConfigError, match="less than the minimum: two blocks"):
        plan(available_bytes=0)


@given(
    available=st.integers(0, 64 * GIB),
    weights=st.integers(0, 16 * GIB),
    seqs=st.integers(1, 4096),
    block_size=st.sampled_from([1, 16, 256]),
    length=st.integers(1, 200_000),
)
def test_what_is_planned_fits_the_machine_and_one_longest_request(
    available: int, weights: int, seqs: int, block_size: int, length: int
) -> None:
    try:
        result = plan(
            KvConfig(block_size=block_size),
            make_spec(length),
            max_num_seqs=seqs,
            num_weight_bytes=weights,
            available_bytes=available,
        )
    except ConfigError:
        assert available - weights - RESERVE_BYTES < 4 * footprint.block_bytes(make_spec(), KvDtype.INT8, block_size)
        return
    assert result.num_bytes + weights + RESERVE_BYTES <= available
    assert 1 <= result.capacity.max_model_len <= min(length, result.num_tokens)
    assert result.is_shortened == (result.capacity.max_model_len < length)


def gpu_plan(
    kv: KvConfig | None = None, *, free: int = 79 * GIB, used: int = 20 * GIB, block: int = 2 << 20, **changes: Any
) -> KvPlan:
    memory, kv, adapters = Usage(80 * GIB, free, used), kv or KvConfig(), changes.pop("adapters", AdapterRoom())
    wanted = wanted_capacity(make_spec(8192), kv, {"max_num_seqs": 256, "max_step_tokens": 2048} | changes)
    is_exact = "max_model_len" in changes
    return plan_gpu_kv(wanted, kv, is_exact=is_exact, block_bytes=block, memory=memory, adapters=adapters)


def test_a_gpu_gives_what_weights_and_the_largest_step_leave() -> None:
    assert gpu_plan().num_bytes == 52 * GIB, "nine tenths of 80, less 20"
    assert gpu_plan(KvConfig(gpu_memory_utilization=0.5)).num_bytes == 20 * GIB


def test_but_no_more_than_all_rows_can_use() -> None:
    assert gpu_plan(max_num_seqs=2).num_tokens == 2 * 8192


def test_a_gpu_has_adapters_in_its_blocks_and_in_the_machines_memory() -> None:
    room = AdapterRoom(image_bytes=32 << 20, read_bytes=3 << 20, num_in_pool=4, num_in_memory=10)
    plan = gpu_plan(max_num_seqs=2, adapters=room)
    assert plan.num_bytes == gpu_plan(max_num_seqs=2).num_bytes + 4 * room.image_bytes
    check_adapter_room(room, 323 << 20)
    with pytest.raises(NotEnoughMemory, match=r"10 adapters of up to 32 MiB each, and 3 MiB .* the 322 MiB .* --max-lora-rank"):
        check_adapter_room(room, 322 << 20)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3", "q k v o"),
        ("gemma4_shared", "q k v o"),
        ("deepseek_v3", "q_a q q_rope latent k_rope o"),
        ("lfm2", "q k v o conv_in"),
        ("mamba2", "mix_in mix_gate mix_steps mix_out"),
        ("qwen3_5_moe", "q q_gate k v o mix_in mix_gate mix_steps mix_rates mix_out"),
    ],
)
def test_adapters_have_room_for_all_projections_but_the_feed_forward_s(tmp_path: Path, name: str, kinds: str) -> None:
    model = load_model(resolve(str(write_case(CASES[name], tmp_path)), tmp_path))
    shapes = sites(describe(model.spec))
    num_values = sum(sum(shape) for site, shape in shapes.items() if site.rpartition(".")[2] in kinds.split())
    config = Config(lora=LoraConfig(lora_dir=str(tmp_path), max_lora_rank=8))
    assert adapter_room(config, model).image_bytes == 2 * 8 * num_values


def test_an_asked_for_size_is_what_a_gpu_gives() -> None:
    assert gpu_plan(KvConfig(kv_cache_memory_bytes=8 * GIB)).num_bytes == 8 * GIB
    assert gpu_plan(KvConfig(kv_cache_memory_bytes=59 * GIB)).num_bytes == 59 * GIB, "also beyond the default share"
    with pytest.raises(ConfigError, match=r"take 20 GiB .* of 79 GiB 59 GiB are left .* kv_cache_memory is 60 GiB"):
        gpu_plan(KvConfig(kv_cache_memory_bytes=60 * GIB))


def test_a_gpu_that_others_use_is_told_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"0\.9 is 72 GiB of the GPU's 80 GiB, of which 40 GiB were free.* Lower --gpu-memory-ut"
    ):
        gpu_plan(free=40 * GIB)
    assert gpu_plan(KvConfig(gpu_memory_utilization=0.4), free=40 * GIB).num_bytes == 12 * GIB


def test_a_model_that_leaves_a_gpu_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"take 75 GiB .* so of 72 GiB 0 B are left .* two blocks of 2 MiB.* smaller model"):
        gpu_plan(used=75 * GIB)


def test_a_request_that_a_gpu_cannot_hold_is_refused_if_it_was_asked_for() -> None:
    small = KvConfig(kv_cache_memory_bytes=11 * (2 << 20))
    assert gpu_plan(small).capacity.max_model_len == 160
    assert gpu_plan(small).is_shortened
    with pytest.raises(ConfigError, match="holds 160"):
        gpu_plan(small, max_model_len=161)


@pytest.mark.parametrize("stored", ["TQ2_0 in a GGUF file", "F32 in a directory"])
def test_loading_takes_no_more_than_was_counted(tmp_path: Path, stored: str) -> None:
    """Nor twice the weights on the way: what is converted, and what is read of the file, goes as soon as it is packed."""
    shape = TinyLlama(hidden_size=1024, intermediate_size=2560, num_layers=4, num_heads=16, num_kv_heads=16, head_dim=64)
    if stored.startswith("TQ2_0"):
        path = write_gguf(tmp_path / "large.gguf", replace(shape, num_layers=8), matrix_type="TQ2_0")
    else:
        path = write_hf(tmp_path / "large", shape, dtype="f32")
    found = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    beyond_bytes, weight_bytes = map(int, found.stdout.split())
    assert weight_bytes > 48 * MIB
    assert beyond_bytes < 24 * MIB


PEAK = """
import sys
from pathlib import Path
from penstock.backends.native.executor import NativeExecutor
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.models import gguf, hf, architectures

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

sizes = dict(num_blocks=2, block_size=16, max_rows=1, max_step_tokens=1, max_model_len=16)
before = kib("VmRSS")
model = load_model(resolve(sys.argv[1], Path(sys.argv[1]).parent))
executor = NativeExecutor(model, architectures.describe(model.spec), num_threads=2, **sizes)
print((kib("VmHWM") - before) * 1024 - model.num_weight_bytes, model.num_weight_bytes)
"""
"""Bytes that were resident at the most, beyond what was before and what was counted; and the latter."""


def test_a_limit_of_the_address_space_holds_the_program_and_the_plan() -> None:
    check_address_space(AddressSpace(3 * GIB, GIB), 2 * GIB)


def test_a_lower_limit_of_the_address_space_is_refused_with_the_number_that_suffices() -> None:
    with pytest.raises(ConfigError, match=r"limited to 3145727 KiB, and 3145728 KiB are needed.*`ulimit -v 3145728`"):
        check_address_space(AddressSpace(3 * GIB - 1024, GIB), 2 * GIB)


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_limit_of_the_address_space_holds_the_files_that_the_load_maps(
    is_directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyLlama(max_model_len=1 << 20, vocab_size=20_000)
    path = write_hf(tmp_path / "tiny", tiny) if is_directory else write_gguf(tmp_path / "tiny.gguf", tiny)
    assert num_file_bytes(path) > MIB
    most_bytes = load_model(resolve(str(path), tmp_path)).num_weight_bytes + num_file_bytes(path) + RESERVE_BYTES

    def planned_bytes(limit_bytes: int, config: Config) -> int:
        space = AddressSpace(limit_bytes, GIB)
        monkeypatch.setattr("penstock.deploy.resolve.address_space", lambda: space)
        resources = Resources(MemoryBudget(lambda: space.left_bytes))
        return plan_share(config, resolve(str(path), tmp_path), resources, space.left_bytes).num_kv_bytes

    config = Config(kv=KvConfig(kv_cache_memory_bytes=8 * MIB))
    needed_kib = -(-(GIB + most_bytes + 8 * MIB) // 1024)
    with pytest.raises(ConfigError, match=f"`ulimit -v {needed_kib}`"):
        planned_bytes(GIB + most_bytes, config)
    assert 7 * MIB < planned_bytes(1024 * needed_kib, config) <= 8 * MIB
    assert 49 * MIB < planned_bytes(GIB + most_bytes + 100 * MIB, Config()) <= 50 * MIB


def test_a_cache_without_room_is_told_what_to_raise() -> None:
    """Its setting, or free memory if its size follows from that."""
    wanted = Capacity(num_blocks=2, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=2048)
    kv = KvConfig(kv_cache_memory_bytes=BLOCK_BYTES)
    sizes = {"is_exact": False, "block_bytes": BLOCK_BYTES, "step_bytes": 0}
    with pytest.raises(NotEnoughFreeMemory, match="smaller model, or free some memory"):
        plan_kv(wanted, KvConfig(), room=Room(available_bytes=RESERVE_BYTES + BLOCK_BYTES, num_weight_bytes=0), **sizes)
    with pytest.raises(NotEnoughMemory, match=r"Raise --kv-cache-memory\.$") as caught:
        plan_kv(wanted, kv, room=Room(available_bytes=GIB, num_weight_bytes=0), **sizes)
    assert not isinstance(caught.value, NotEnoughFreeMemory)
