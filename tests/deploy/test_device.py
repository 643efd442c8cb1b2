"""Where a model is computed: what goes together, what is refused, what a GPU changes. Needs none."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.backends import cuda
from penstock.config import Backend, BackendConfig, Config, KvConfig, SchedulerConfig
from penstock.deploy import device
from penstock.deploy.blueprint import Compute
from penstock.deploy.checks import check_block_size
from penstock.deploy.executor import _gpu_extras
from penstock.deploy.recorder import processor_name
from penstock.deploy.resolve import decide
from penstock.machine import Cores, cpu_name, find_cores
from penstock.models.formats import Floats
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from support.fake_machine import GPU, fake_gpu, fake_kernels


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, "it is out for a walk")


def settle(device_name: str = "auto", backend: str | None = None, kv: KvConfig | None = None, **settings: object) -> Compute:
    chosen = BackendConfig(device=device_name, backend=backend, **settings)  # type: ignore[arg-type]
    return decide(Config(backend=chosen, kv=kv or KvConfig()))


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("device_name", "backend", "expected"),
    [
        ("auto", None, ("cuda", "cuda")),
        ("auto", "native", ("cpu", "native")),
        ("auto", "reference", ("cpu", "reference")),
        ("auto", "cuda", ("cuda", "cuda")),
        ("cpu", None, ("cpu", "native")),
        ("cpu", "reference", ("cpu", "reference")),
        ("cuda", None, ("cuda", "cuda")),
        ("cuda", "cuda", ("cuda", "cuda")),
    ],
)
def test_device_and_backend_go_together(device_name: str, backend: str | None, expected: tuple[str, str]) -> None:
    chosen = settle(device_name, backend).options
    assert (chosen.device, chosen.backend) == expected


@pytest.mark.parametrize("fixture", ["has_gpu", "no_gpu"])
@pytest.mark.parametrize(
    ("device_name", "backend", "words"),
    [
        ("cuda", "native", "The native backend computes on the CPU, and --device is cuda"),
        ("cuda", "reference", "The reference backend"),
        ("cpu", "cuda", "The cuda backend computes on a GPU, and --device is cpu"),
    ],
)
def test_what_contradicts_is_refused(
    fixture: str, device_name: str, backend: str, words: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(fixture)
    with pytest.raises(ConfigError, match=words):
        settle(device_name, backend)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("device_name", "backend"), [("cuda", None), ("cuda", "cuda"), ("auto", "cuda")])
def test_a_gpu_that_is_asked_for_has_to_be_there(device_name: str, backend: str | None) -> None:
    with pytest.raises(ConfigError, match=r"No GPU can be used: it is out for a walk\. Leave out --device"):
        settle(device_name, backend)


@pytest.mark.usefixtures("no_gpu")
def test_without_one_auto_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert settle().options.backend == "native"
    assert [record.getMessage() for record in caplog.records] == ["no GPU is used: it is out for a walk"]


@pytest.mark.parametrize(("gpu", "level"), [("there is no driver", "DEBUG"), (GPU, "INFO")])
def test_without_the_extra_there_is_a_line_of_it_where_there_is_a_gpu(
    gpu: cuda.Gpu | str, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_gpu(monkeypatch, gpu, has_packages=False)
    caplog.set_level(logging.DEBUG)
    settle()
    [record] = caplog.records
    assert record.levelname == level
    assert "torch is not installed (install it in Penstock" in record.getMessage()


@pytest.mark.parametrize(
    "config",
    [
        BackendConfig(device="cpu"),
        BackendConfig(backend="native"),
        BackendConfig(threads=2),
        BackendConfig(pin_threads=True),
        BackendConfig(kernels="avx2"),
    ],
)
def test_who_wants_the_cpu_does_not_wait_for_pytorch(config: BackendConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise AssertionError("the GPU was looked for")

    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is an error
    monkeypatch.setattr(cuda, "why_not", ask)
    assert decide(Config(backend=config)).options.device == "cpu"


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: settle("cuda", threads=2), "--threads, or set --device cpu"),
        (lambda: settle("cuda", kv=KvConfig(kv_cache_dtype="int4")), "--kv-cache-dtype int4, or set --device cpu"),
        (lambda: settle("cuda", pin_threads=True), "--pin-threads, or set --device cpu"),
        (lambda: settle("cuda", kernels="avx2"), "--kernels, or set --device cpu"),
        (
            lambda: settle("cuda", kv=KvConfig(gpu_memory_utilization=0.5, kv_cache_memory_bytes=1 << 30)),
            "both say how large",
        ),
        (
            lambda: settle("cuda", kv=KvConfig(kv_host_size_bytes=1 << 30, kv_disk_size_bytes=1 << 30)),
            "one tier below the KV cache.* Leave out --kv-host-size or --kv-disk-size",
        ),
        (lambda: settle("cpu", kv=KvConfig(gpu_memory_utilization=0.5)), "--gpu-memory-utilization has no meaning on the CPU"),
        (lambda: settle("cpu", kv=KvConfig(kv_host_size_bytes=1 << 30)), "would be the same memory"),
        (
            lambda: settle("cpu", steps_in_flight=1),
            "--steps-in-flight has no meaning on the CPU",
        ),
        (lambda: settle("cpu", weight_dtype="fp8"), "--weight-dtype fp8 has no meaning on the CPU"),
        (lambda: settle("cuda", weight_dtype="int8"), "--weight-dtype int8 is a setting of the CPU"),
        (lambda: settle("cpu", attention="triton"), "--attention has no meaning on the CPU"),
        (
            lambda: settle("cpu", cuda_graphs=False),
            "--cuda-graphs has no meaning on the CPU: it is .* No GPU is used: the CPU is asked for",
        ),
    ],
)
def test_no_setting_is_ignored(given: Callable[[], Compute], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given()


@pytest.mark.usefixtures("no_gpu")
def test_a_setting_of_the_gpu_without_one_says_why_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"--kv-host-size has no meaning .* No GPU is used: it is out for a walk\."):
        settle(kv=KvConfig(kv_host_size_bytes=1 << 30))


@pytest.mark.usefixtures("has_gpu")
def test_the_device_decides_what_is_left_out() -> None:
    gpu, cpu = settle("cuda"), settle("cpu")
    assert (gpu.kv_dtype, gpu.max_rows, gpu.max_step_tokens) == (KvDtype.BF16, 256, 2048)
    assert (cpu.kv_dtype, cpu.max_rows, cpu.max_step_tokens) == (KvDtype.INT8, 64, 512)


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"round_to_fp8": False, "deterministic": False, "attention": "auto", "use_graphs": True, "depth": 2}),
        (
            {"weight_dtype": "fp8", "deterministic": True, "attention": "triton", "cuda_graphs": False, "steps_in_flight": 1},
            {"round_to_fp8": True, "deterministic": True, "attention": "triton", "use_graphs": False, "depth": 1},
        ),
    ],
)
def test_the_executor_of_a_gpu_is_told_what_is_set(settings: dict[str, object], expected: dict[str, object]) -> None:
    assert _gpu_extras(settle("cuda", **settings)) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("settings", "kv", "version", "words"),
    [
        ({"deterministic": True}, KvConfig(), "0.7.2", r"order of its sums .* Leave out --attention or --deterministic\."),
        ({}, KvConfig(kv_cache_dtype="int8"), "0.7.2", r"int8\. Leave out --attention or --kv-cache-dtype\."),
        ({}, KvConfig(), None, r"not installed\. Install it in Penstock's source folder: pip install '\.\[flashinfer\]'"),
    ],
)
def test_flashinfer_is_refused_before_anything_is_loaded(
    settings: dict[str, object], kv: KvConfig, version: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, flashinfer=version)
    with pytest.raises(ConfigError, match=f"FlashInfer can't compute the attention: .*{words}"):
        settle("cuda", kv=kv, attention="flashinfer", **settings)
    assert settle("cuda", kv=kv, attention="auto", **settings).options.attention == "auto"


@pytest.mark.usefixtures("has_gpu")
def test_flashinfer_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, flashinfer="0.7.2")
    assert settle("cuda", attention="flashinfer").options.attention == "flashinfer"
    assert device.gpu_facts().endswith("torch 2.11.0, triton 3.6.0, flashinfer 0.7.2")


@pytest.mark.usefixtures("has_gpu")
def test_weights_take_what_the_device_makes_of_them() -> None:
    assert settle("cpu").floats is Floats.BF16
    assert settle("cuda").floats is Floats.AS_STORED
    assert settle("cuda", weight_dtype="fp8").floats is Floats.FP8


def test_what_is_set_is_kept() -> None:
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7)
    compute = decide(
        Config(backend=BackendConfig(device="cpu", step_timeout_s=5.0), kv=KvConfig(kv_cache_dtype="bf16"), scheduler=scheduler)
    )
    assert compute.kv_dtype is KvDtype.BF16
    assert (compute.max_rows, compute.max_step_tokens, compute.step_timeout_s) == (3, 7, 5.0)


def test_the_slow_backend_may_take_its_time() -> None:
    assert settle(backend="reference").step_timeout_s is None
    assert settle(backend="native").step_timeout_s == 120.0


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("backend", "size", "is_taken"),
    [("native", 24, False), ("native", 32, True), ("cuda", 24, True), ("reference", 5, True)],
)
def test_block_sizes_are_those_of_the_kernels(backend: str, size: int, is_taken: bool) -> None:
    compute = settle(backend=backend, kv=KvConfig(block_size=size))
    if is_taken:
        check_block_size(compute)
        return
    with pytest.raises(ConfigError, match=rf"block_size {size} is not a multiple of 16: the {backend} backend"):
        check_block_size(compute)


TWO_NODES = Cores((0, 1, 2, 3), 4, "", ((0, 2), (1, 2)), ((32 << 20, 2),), (0, 1))


def test_threads_are_counted_unless_named() -> None:
    assert device.num_threads(BackendConfig(), TWO_NODES) == 4
    assert device.num_threads(BackendConfig(threads=2), TWO_NODES) == 2
    assert device.words(BackendConfig(backend=Backend.NATIVE), TWO_NODES).endswith("kernels, 4 threads")
    assert device.words(BackendConfig(backend=Backend.NATIVE, threads=1), TWO_NODES).endswith("kernels, 1 thread")


def test_pinned_threads_have_all_cores() -> None:
    assert device.pinned_cpus(BackendConfig(), TWO_NODES) == ()
    assert device.pinned_cpus(BackendConfig(pin_threads=True), TWO_NODES) == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"may use 4 cores, but would take 3: .*--pin-threads"):
        device.pinned_cpus(BackendConfig(pin_threads=True, threads=3), TWO_NODES)


def test_memory_is_spread_over_the_nodes_unless_the_system_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The two nodes are made up: this machine need not have them."""
    errors = [0]
    monkeypatch.setattr("penstock.backends.native._native.spreading_error", lambda _: errors[-1])
    assert device.memory_nodes(TWO_NODES) == (0, 1)
    told = "node 0 with 2 cores, node 1 with 2 cores, 2 last-level caches of 32 MiB; weights and KV cache are "
    assert device.memory_facts(TWO_NODES) == told + "spread over all"
    assert not caplog.records
    errors.append(errno.EPERM)
    assert device.memory_nodes(TWO_NODES) == ()
    why = "not spread: Operation not permitted; give the container CAP_SYS_NICE (--cap-add SYS_NICE)"
    assert device.memory_facts(TWO_NODES) == told + why
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Operation not permitted" in caplog.text
    errors.append(errno.EEXIST)
    assert device.memory_facts(TWO_NODES) == told + "not spread: the policy that the process was started with stays (numactl)"


def test_one_node_is_told_as_it_is() -> None:
    one = Cores((0,), 1, "", ((0, 1),), (), ())
    assert device.memory_nodes(one) == ()
    assert device.memory_facts(one) == "node 0 with 1 core"


def test_nodes_with_numbers_that_no_mask_holds_are_no_reason_to_fail() -> None:
    many = replace(TWO_NODES, memory_nodes=(0, 64))
    assert device.memory_nodes(many) == ()
    assert "not spread: a memory node is one of 0 to 63" in device.memory_facts(many)


@pytest.mark.usefixtures("has_gpu")
def test_a_gpu_is_described() -> None:
    assert device.gpu_facts() == "NVIDIA Fake, 80 GiB, compute capability 9.0, 2 visible; torch 2.11.0, triton 3.6.0"
    assert device.words(BackendConfig(backend=Backend.CUDA, deterministic=True), TWO_NODES).endswith("9.0, deterministic")
    assert device.words(BackendConfig(backend=Backend.CUDA, weight_dtype="fp8"), TWO_NODES).endswith("9.0, weights in fp8")
    assert device.weight_room_bytes(settle("cuda"), 5) == 80 << 30
    assert device.missing_gpu_packages() is None
    assert (processor_name("cuda"), processor_name("native")) == ("NVIDIA Fake", cpu_name())


@pytest.mark.usefixtures("no_gpu")
def test_so_is_one_that_is_not_there() -> None:
    assert device.gpu_facts() == "not usable: it is out for a walk; torch 2.11.0, triton 3.6.0"
    assert device.weight_room_bytes(settle("cpu"), -5) == 0


def test_a_gpu_without_packages_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, has_packages=False)
    assert device.missing_gpu_packages() == "torch, triton, for the GPU: `pip install '.[cuda]'` in the source folder"


def test_the_reference_backend_says_that_threads_have_no_effect(caplog):
    settle("cpu", "reference", threads=2)
    assert "--threads has no effect" in caplog.text


@pytest.mark.parametrize("setting", [{"pin_threads": True}, {"kernels": "portable"}], ids=str)
def test_the_reference_backend_pins_no_threads_and_has_no_kernels(setting):
    with pytest.raises(ConfigError, match="computes with NumPy") as raised:
        settle("cpu", "reference", **setting)
    assert raised.value.remedy == f"Leave out --{next(iter(setting)).replace('_', '-')}."


def test_kernels_that_the_machine_cannot_run_are_refused_with_those_that_it_can(monkeypatch):
    fake_kernels(monkeypatch, "avx2", "portable", why_no_tiles="the system refuses them")
    assert settle("cpu", kernels="portable").options.kernels == "portable"
    with pytest.raises(ConfigError, match=r"can't run the amx kernels \(the system refuses them\)") as raised:
        settle("cpu", kernels="amx")
    assert raised.value.remedy == "Set --kernels (PENSTOCK_KERNELS) to one of avx2, portable, or leave it unset."
    with pytest.raises(ConfigError, match=r"can't run the avx512 kernels\. "):
        settle("cpu", kernels="avx512")


def test_the_log_says_which_kernels_and_why_not_tiles(monkeypatch):
    fake_kernels(monkeypatch, "avx512", why_no_tiles="the system refuses them")
    refused = "avx512 kernels, 2 threads, without the processor's tiles (AMX): the system refuses them"
    assert device.words(BackendConfig(backend="native", threads=2), find_cores()) == refused
    assert device.words(BackendConfig(backend="native", threads=1, kernels="avx2"), find_cores()) == "avx2 kernels, 1 thread"
