"""The composition root: what a config says arrives where it counts."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.config.setting import settings_of
from penstock.deploy.executor import EXECUTORS, loading_bar
from penstock.deploy.factory import plan_share, start_model
from penstock.deploy.policies import SETTING_FLAGS, choose_policies
from penstock.deploy.resources import Resources
from penstock.engine.state import EngineState
from penstock.kv.eviction import LeastRecentlyUsed, LowestPriorityFirst, TenantFair
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.gguf import load_gguf
from penstock.obs.prometheus import expose
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.gates import Dynamic, Static
from penstock.sched.policies.own import SEAM_FLAGS
from penstock.sched.policies.reserves import Watermark
from penstock.sched.policies.victims import LatestArrived, LeastComputed, LowestPriority
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ExecutorFailure, ModelError, NotEnoughMemory
from penstock.types.request import FinishReason
from penstock.types.sampling import SamplingDefaults
from support.executors import executor_class
from support.reading import chunks_of
from support.recorded import recorded
from support.tiny_models import TinyLlama, write_gguf, write_hf

CPU_BACKENDS = (Backend.NATIVE, Backend.REFERENCE)
REFERENCE = Config(
    backend=BackendConfig(backend=Backend.REFERENCE),
    kv=KvConfig(kv_cache_memory_bytes=1 << 20),
    scheduler=SchedulerConfig(max_num_seqs=4),
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


def _build(path: Path, config: Config = REFERENCE) -> Any:
    return start_model(config, resolve(str(path), path.parent))


def test_every_backend_of_the_config_has_an_executor() -> None:
    assert set(EXECUTORS) == set(Backend)
    for backend in CPU_BACKENDS:
        module, _, attribute = EXECUTORS[backend].partition(":")
        assert callable(getattr(import_module(module), attribute))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_runtime_is_whole(gguf: Path, backend: Backend) -> None:
    runtime = _build(gguf, replace(REFERENCE, backend=BackendConfig(backend=backend)))
    try:
        assert runtime.model.name == "tiny"
        assert runtime.model.capacity.max_model_len == 256
        assert runtime.tokenizer.decode(runtime.tokenizer.encode("in the", add_special_tokens=False)) == "in the"
        assert runtime.chat_template is not None
        assert runtime.engine.load().num_running == 0
        assert b"penstock_weight_bytes" in expose(runtime.metrics)
        assert (runtime.metrics.num_weight_bytes > 0) == (backend == "native")
    finally:
        assert runtime.close(30.0)


def test_a_machine_without_free_memory_has_no_room_for_a_model(gguf: Path) -> None:
    source = resolve(str(gguf), gguf.parent)
    assert plan_share(REFERENCE, source, Resources()).num_kv_bytes > 0
    with pytest.raises(NotEnoughMemory):
        plan_share(REFERENCE, source, Resources(), available_bytes=0)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_terminal_sees_how_far_loading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool, is_terminal: bool
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("penstock.deploy.executor.BAR_DELAY_S", 0.0)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else its thread outlives the test
    model = load_gguf(write_gguf(tmp_path / "my.gguf", TinyLlama(is_tied=is_tied)))
    with loading_bar(model) as on_packed:
        assert (on_packed is not None) == is_terminal
        if on_packed is not None:
            NativeExecutor(
                model,
                describe(model.spec),
                num_blocks=2,
                block_size=16,
                max_rows=1,
                max_step_tokens=1,
                max_model_len=16,
                on_packed=lambda num_bytes: (on_packed(num_bytes), on_packed.__self__.refresh()),
            )
    assert ("Loading my: 100%" in shown.getvalue()) == is_terminal
    assert is_terminal or not shown.getvalue()


def test_the_log_says_how_many_requests_the_cache_holds(gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert _build(gguf).close(30.0)
    [line] = [record.getMessage() for record in caplog.records if "KV cache holds" in record.getMessage()]
    assert " of 256 tokens (prompt and answer) at once; at most " in line  # which are the longest
    assert _build(gguf, replace(REFERENCE, kv=KvConfig(block_size=1))).close(30.0)
    assert " blocks of 1 token, " in caplog.text
    assert "policies: gate continuous, order fcfs, budget itl (long_prefill_token_threshold = 512), reserve" in caplog.text


@pytest.mark.parametrize(
    ("kv", "remedy"),
    [
        (KvConfig(prefix_caching=False, prefix_sharing="tenant"), "Leave out --prefix-sharing"),
        (KvConfig(kv_disk_path="/somewhere"), "Give --kv-disk-size"),
    ],
)
def test_settings_of_what_is_off_are_refused(gguf: Path, kv: KvConfig, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        _build(gguf, replace(REFERENCE, kv=kv))


def test_a_block_size_that_the_kernels_lack_is_refused(gguf: Path) -> None:
    config = replace(REFERENCE, backend=BackendConfig(), kv=KvConfig(block_size=24))
    with pytest.raises(ConfigError, match=r"multiple of 16.*--block-size to 32"):
        _build(gguf, config)


def test_heads_that_the_kernels_lack_are_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.weights.WeightTensor.rows", lambda *_: pytest.fail("a weight is read"))
    path = write_gguf(tmp_path / "wide.gguf", TinyLlama(head_dim=592, num_heads=1, num_kv_heads=1), matrix_type="F16")
    with pytest.raises(ConfigError, match=r"head_dim of wide is 592, and the native .* up to 576.*--backend reference"):
        _build(path, replace(REFERENCE, backend=BackendConfig()))


def test_no_memory_is_told_with_the_numbers(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("penstock.deploy.build.first_executor", no_memory)
    with pytest.raises(ConfigError, match=r"the KV cache 1023\.75 KiB.*--kv-cache-memory"):
        _build(gguf)


def test_a_hugging_face_directory_will_do_as_well(tmp_path: Path) -> None:
    runtime = _build(write_hf(tmp_path / "tiny-hf", TinyLlama()))
    assert runtime.model.name == "tiny-hf"
    runtime.close()


def test_sampling_defaults_come_from_the_model_s_files_unless_that_is_switched_off(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "tiny-hf", TinyLlama())
    said = {"eos_token_id": 2, "temperature": 0.25, "suppress_tokens": [9]}
    (directory / "generation_config.json").write_text(json.dumps(said))
    prints = []
    obeyed = SamplingDefaults(temperature=0.25, banned_token_sequences=((9,),))
    for choice, expected in (("auto", obeyed), ("none", SamplingDefaults())):
        runtime = _build(directory, replace(REFERENCE, model=ModelConfig(generation_config=choice)))
        assert runtime.defaults == expected
        assert runtime.tokenizer.eos_token_ids == (2,)
        prints.append(runtime.model.fingerprint)
        runtime.close()
    assert prints[0] != prints[1]  # their answers differ


def test_a_chatml_fine_tune_ends_at_its_tokenizer_s_end_token(tmp_path: Path) -> None:
    """Its config.json is still that of the base model, which ends documents with another token."""
    directory = write_hf(tmp_path / "chatml", TinyLlama(), extra={"eos_token_id": 0})
    (directory / "generation_config.json").unlink()
    names = {
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}{{ additional_special_tokens[0] }}")
    runtime = _build(directory)
    assert runtime.tokenizer.eos_token_ids == (2, 0)
    assert runtime.chat_template.render([{"role": "user", "content": ""}]) == "<|im_end|><|endoftext|><|im_start|>"
    runtime.close()


def test_a_vocabulary_without_a_tokenizer_is_refused_before_weights_are_converted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.models.gguf.load_tensor", lambda *_: pytest.fail("a weight was read"))
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(), extra={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ModelError, match=r"tiny\.gguf: tokenizer\.ggml\.pre is 'klingon'"):
        _build(path)


def test_names_and_lengths_are_those_of_the_config(gguf: Path) -> None:
    config = replace(REFERENCE, model=ModelConfig(served_model_names=("a", "b"), max_model_len=100))
    runtime = _build(gguf, config)
    assert (runtime.model.served_names, runtime.model.capacity.max_model_len) == (("a", "b"), 100)
    assert runtime.model.aliases == ()
    runtime.close()


@pytest.mark.parametrize(("policy", "is_looked_at"), [("priority", True), ("fair", False), (None, False)])
def test_priorities_are_taken_where_the_order_looks_at_them(gguf: Path, policy: str | None, is_looked_at: bool) -> None:
    runtime = _build(gguf, replace(REFERENCE, scheduler=SchedulerConfig(policy=policy)))
    assert runtime.model.is_priority_scheduled is is_looked_at
    runtime.close()


def test_the_same_start_has_the_same_fingerprint_and_another_one_has_not(gguf: Path) -> None:
    other = replace(REFERENCE, model=replace(REFERENCE.model, chat_template="{{ messages }}"))
    fingerprints = []
    for config in (REFERENCE, REFERENCE, other):
        runtime = _build(gguf, config)
        fingerprints.append(runtime.model.fingerprint)
        runtime.close()
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_a_model_is_also_known_as_it_was_given(gguf: Path) -> None:
    runtime = _build(gguf, replace(REFERENCE, model=ModelConfig(model=str(gguf))))
    assert (runtime.model.served_names, runtime.model.aliases) == (("tiny",), (str(gguf),))
    runtime.close()


def test_a_cache_that_is_short_shortens_the_requests_and_says_so(gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        runtime = _build(gguf, replace(REFERENCE, kv=KvConfig(kv_cache_memory_bytes=32 << 10)))
    runtime.close()
    assert runtime.model.capacity.max_model_len < 256
    assert f"holds {runtime.model.capacity.max_model_len}" in caplog.text


def test_a_template_that_fails_leaves_no_executor_behind(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    executor = import_module("penstock.backends.reference.executor").ReferenceExecutor
    monkeypatch.setattr(executor, "close", lambda self: closed.append(True))
    with pytest.raises(ConfigError, match="template"):
        _build(gguf, replace(REFERENCE, model=ModelConfig(chat_template="{% if %}")))
    assert closed == [True]


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.resources.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ModelError, match="MiB are available"):
        _build(gguf)


def test_seeds_repeat_if_one_is_given(gguf: Path) -> None:
    seeds = []
    for seed in (5, 5, None):
        runtime = _build(gguf, replace(REFERENCE, server=ServerConfig(seed=seed)))
        seeds.append([runtime.sources.draw_seed() for _ in range(3)])
        runtime.close()
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 3


def test_the_scheduler_has_the_policies_of_the_config(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedulers = recorded(monkeypatch, "penstock.sched.scheduler.Scheduler")
    named = SchedulerConfig(batching="continuous", policy="fcfs", victim="latest")
    runtime = _build(gguf, replace(REFERENCE, scheduler=named, kv=replace(REFERENCE.kv, kv_watermark=0.5)))
    runtime.close()
    [((_, policies, *_), _)] = schedulers
    assert isinstance(policies.victim, LatestArrived)
    assert policies.reserve.share == 0.5


def test_a_batch_has_the_settings_of_the_config() -> None:
    config = SchedulerConfig(
        batching="dynamic", max_batch_size=8, preferred_batch_sizes=(2, 4), batch_window_s=0.005, length_buckets=(64, 256)
    )
    assert choose_policies(Config(scheduler=config)).make().gate == Dynamic(8, (2, 4), 5_000_000, (64, 256))
    assert choose_policies(Config(scheduler=SchedulerConfig(batching="static", max_batch_size=4))).make().gate == Static(4)


def test_texts_have_policies_of_their_own_unless_others_are_named() -> None:
    def words(**named: Any) -> dict[str, str]:
        policies = choose_policies(Config(scheduler=SchedulerConfig(**named)), is_one_pass=True).make()
        return {seam: words.split()[0] for seam, words in policies.words.items()}

    usual = words()
    assert (usual["gate"], usual["order"], usual["budget"]) == ("continuous", "calls", "hold-step")
    assert words(policy="priority") == usual | {"order": "priority", "victim": "lowest-priority", "eviction": "priority"}
    assert words(preset="vllm")["budget"] == "decode-first"
    batch = words(batching="dynamic", length_buckets=(64, 256))  # as it is known, and not in short steps
    assert (batch["gate"], batch["order"], batch["budget"]) == ("dynamic", "fcfs", "decode-first")


def test_arguments_of_the_policies_of_texts_are_taken_for_texts_only() -> None:
    config = Config(scheduler=SchedulerConfig(budget_args={"step_ns": 5_000_000}))
    with pytest.raises(ConfigError, match="budget 'itl' takes no argument step_ns"):
        choose_policies(config)
    assert "step_ns = 5000000" in choose_policies(config, is_one_pass=True).make().words["budget"]
    with pytest.raises(ConfigError, match="budget 'itl' takes no argument nothing"):
        choose_policies(Config(scheduler=SchedulerConfig(budget_args={"nothing": 5})))


@pytest.mark.parametrize("setting", ["reserve", "victim", "length_predictor"])
def test_texts_have_no_answers_to_set_anything_for(setting: str) -> None:
    value = {"reserve": "prompt", "victim": "latest", "length_predictor": "online"}[setting]
    with pytest.raises(ConfigError, match=f"no answer grows. --{setting.replace('_', '-')} would change nothing"):
        choose_policies(Config(scheduler=SchedulerConfig(**{setting: value})), is_one_pass=True)


def test_a_setting_that_the_gate_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gate 'static' has no --length-buckets\. Choose another --batching"):
        choose_policies(Config(scheduler=SchedulerConfig(batching="static", length_buckets=(64,))))
    with pytest.raises(ConfigError, match=r"gate 'continuous' has no --max-batch-size"):
        choose_policies(Config(scheduler=SchedulerConfig(max_batch_size=4)))


def test_a_batch_that_has_not_enough_rows_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(batching="static", max_batch_size=33)
    with pytest.raises(ConfigError, match=r"batch of 33 needs 66 rows.*--max-num-seqs to 66 .*--max-batch-size to 32 "):
        _build(write_gguf(tmp_path / "tiny.gguf", TinyLlama()), replace(REFERENCE, scheduler=scheduler, kv=KvConfig()))


def test_policies_get_the_settings_of_the_config() -> None:
    scheduler = SchedulerConfig(preset="vllm", slo_itl_s=0.03, long_prefill_token_threshold=700)
    policies = choose_policies(Config(scheduler=scheduler, kv=KvConfig(kv_watermark=0.25))).make()
    assert isinstance(policies.budget, HoldLatency), "the one that holds a latency"
    assert (policies.budget.slo_itl_ns, policies.budget.long_prefill_token_threshold) == (30_000_000, 700)
    assert policies.reserve == Watermark(0.25)


@pytest.mark.parametrize("is_preemptive", [True, False])
def test_with_priorities_the_lowest_is_preempted(is_preemptive: bool) -> None:
    scheduler = SchedulerConfig(policy="priority", priority_preemption=is_preemptive)
    policies = choose_policies(Config(scheduler=scheduler)).make()
    assert isinstance(policies.victim, LowestPriority)
    assert policies.order.is_preemptive is is_preemptive


def test_priorities_pause_others_unless_that_is_switched_off() -> None:
    assert choose_policies(Config(scheduler=SchedulerConfig(policy="priority"))).make().order.is_preemptive


def test_an_order_of_ones_own_says_which_victim_and_eviction_suit_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from penstock.sched.policies.orders import FirstComeFirstServed\n"
        "class Mine(FirstComeFirstServed):\n"
        "    suits = {'victim': 'least-computed', 'eviction': 'tenant-fair'}\n"
    )
    order = f"{file}:Mine"
    policies = choose_policies(Config(scheduler=SchedulerConfig(policy=order))).make()
    assert isinstance(policies.victim, LeastComputed)
    assert isinstance(policies.eviction, TenantFair)
    asked = SchedulerConfig(policy=order, victim="latest")
    assert isinstance(choose_policies(Config(scheduler=asked)).make().victim, LatestArrived)


@pytest.mark.parametrize("is_preemptive", [True, False])
@pytest.mark.parametrize("policy", [None, "fcfs", "edf"])
def test_whether_priorities_pause_others_is_an_error_where_there_are_none(policy: str | None, is_preemptive: bool) -> None:
    scheduler = SchedulerConfig(policy=policy, priority_preemption=is_preemptive)
    with pytest.raises(ConfigError, match=r"The order .* has no --priority-preemption"):
        choose_policies(Config(scheduler=scheduler))


@pytest.mark.parametrize("batches", [{"batching": "static"}, {"preset": "dynamic"}])
def test_the_background_has_no_share_of_a_batch_and_asking_for_it_is_an_error(batches: dict[str, str]) -> None:
    assert choose_policies(Config(scheduler=SchedulerConfig(background_share=0.1))).make().background_share == 0.1
    with pytest.raises(ConfigError, match="--background-share would change nothing"):
        choose_policies(Config(scheduler=SchedulerConfig(background_share=0.1, **batches)))


@pytest.mark.parametrize(
    "batches", [{"batching": "static"}, {"batching": "dynamic"}, {"preset": "static"}, {"preset": "dynamic"}]
)
def test_in_a_batch_nobody_is_paused_and_asking_for_it_is_an_error(batches: dict[str, str]) -> None:
    for is_preemptive in (None, False):
        scheduler = SchedulerConfig(policy="priority", priority_preemption=is_preemptive, **batches)
        assert choose_policies(Config(scheduler=scheduler)).make().order.reads_priority
    with pytest.raises(ConfigError, match="runs to completion"):
        choose_policies(Config(scheduler=SchedulerConfig(policy="priority", priority_preemption=True, **batches)))


@pytest.mark.parametrize(
    "scheduler",
    [SchedulerConfig(budget="decode-first", slo_itl_s=0.03), SchedulerConfig(preset="orca", max_long_partial_prefills=1)],
)
def test_a_setting_that_the_budget_does_not_read_is_an_error(scheduler: SchedulerConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"The budget .* has no --(slo-itl|max-long-partial-prefills)\. Choose another --budget"
    ):
        choose_policies(Config(scheduler=scheduler))


@pytest.mark.parametrize(("argument", "hints"), [("policy", True), ("dely", False)])
def test_a_setting_below_a_table_of_arguments_is_hinted_at(argument: str, hints: bool) -> None:
    with pytest.raises(ConfigError, match=f"'fcfs' takes no argument {argument}") as caught:
        choose_policies(Config(scheduler=SchedulerConfig(policy_args={argument: "sjf"})))
    assert ("stands above the tables" in caught.value.remedy) == hints


def test_the_flags_that_are_named_exist() -> None:
    flags = {item.flag for component in (SchedulerConfig, KvConfig) for item in settings_of(component)}
    assert {*SEAM_FLAGS.values(), *SETTING_FLAGS.values()} <= flags


def test_a_watermark_is_an_error_where_the_reserve_has_none() -> None:
    with pytest.raises(ConfigError, match="The reserve 'no-evict' has no --kv-watermark"):
        choose_policies(Config(scheduler=SchedulerConfig(reserve="no-evict"), kv=KvConfig(kv_watermark=0.25)))


@pytest.mark.parametrize(
    ("policy", "named", "expected"),
    [
        (None, None, LeastRecentlyUsed),
        ("edf", None, LeastRecentlyUsed),
        ("fair", None, TenantFair),
        ("fair", "lru", LeastRecentlyUsed),
        ("fcfs", "tenant-fair", TenantFair),
        ("priority", None, LowestPriorityFirst),
        ("priority", "tenant-fair", TenantFair),
    ],
)
def test_who_is_favoured_in_the_queue_is_favoured_in_the_cache(policy: str | None, named: str | None, expected: type) -> None:
    config = Config(scheduler=SchedulerConfig(policy=policy), kv=KvConfig(kv_eviction=named))
    assert isinstance(choose_policies(config).make().eviction, expected)


def test_several_keys_are_treated_fairly_in_the_cache() -> None:
    for server, expected in (
        (ServerConfig(api_keys=("a",)), LeastRecentlyUsed),
        (ServerConfig(api_keys=("a", "b")), TenantFair),
        (ServerConfig(api_keys=("a",), trust_tenant_header=True), TenantFair),
    ):
        assert isinstance(choose_policies(Config(server=server)).make().eviction, expected)


def test_an_eviction_that_would_change_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no priorities.* Set --policy priority"):
        choose_policies(Config(kv=KvConfig(kv_eviction="priority")))
    with pytest.raises(ConfigError, match=r"nothing is cached.* Leave --kv-eviction out"):
        choose_policies(Config(kv=KvConfig(kv_eviction="lru", prefix_caching=False)))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_failed_executor_is_built_again_from_the_files(gguf: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _build(gguf, replace(REFERENCE, backend=BackendConfig(backend=backend)))

    async def answer(request_id: str) -> Any:
        request = make_request(request_id, runtime.tokenizer.encode("in the", add_special_tokens=False), max_tokens=4)
        chunks = [chunk async for chunk in chunks_of(runtime.bridge, request)]
        return chunks[-1].finish_reason, "".join(chunk.text for chunk in chunks)

    try:
        good = asyncio.run(answer("before"))
        with monkeypatch.context() as broken:
            broken.setattr(executor_class(backend), "collect", _fail)
            assert asyncio.run(answer("broken"))[0] is FinishReason.ERROR
        end = time.monotonic() + 30.0
        while runtime.engine.state is not EngineState.READY:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert asyncio.run(answer("after")) == good
        assert b"penstock_engine_restarts_total{" in expose(runtime.metrics)
        assert runtime.metrics.num_restarts == 1
    finally:
        runtime.close(30.0)


def _fail(*_: Any) -> None:
    raise ExecutorFailure("the device failed, as it was told to")
