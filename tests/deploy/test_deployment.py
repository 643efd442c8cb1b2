"""Several models in one process: found by name, on one budget of memory and one team of threads, closed together."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import Backend, BackendConfig, Config, KvConfig, Load, ModelConfig, SchedulerConfig, SharingConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.factory import plan_share, start_deployment, start_model
from penstock.deploy.resources import MemoryBudget, MemoryShare, Resources
from penstock.deploy.running import RunningModel
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.engine.state import EngineState
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine
from penstock.machine import claim_cpus
from penstock.models.catalog import resolve
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from penstock.types.stats import EngineLoad
from support.reading import chunks_of
from support.tiny_models import TinyLlama, write_gguf

MIB = 1 << 20
WAIT_S = 30.0
SMALL = MemoryShare(num_weight_bytes=20 * MIB, num_kv_bytes=30 * MIB, num_reserve_bytes=0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_gguf(folder / f"{name}.gguf", TinyLlama()) for name in ("one", "two")]


def config_of(path: Path, backend: Backend = Backend.NATIVE, **model_fields: object) -> Config:
    return Config(
        model=replace(ModelConfig(model=str(path)), **model_fields),  # type: ignore[arg-type]
        backend=BackendConfig(backend=backend, threads=2 if backend is Backend.NATIVE else None),
        kv=KvConfig(kv_cache_memory_bytes=MIB),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


async def answer(running: RunningModel, request_id: str = "r") -> str:
    prompt = running.tokenizer.encode("in the", add_special_tokens=False)
    stream = chunks_of(running.bridge, make_request(request_id, prompt, max_tokens=8))
    text = "".join([chunk.text async for chunk in stream])
    assert text, "the engine answers"
    return text


def test_a_name_finds_its_model_and_no_name_the_first(paths: list[Path]) -> None:
    with_names = config_of(paths[1], served_model_names=("second", "another"))
    deployment = start_deployment([config_of(paths[0]), with_names])
    try:
        one, two = deployment.served
        assert deployment.names == ("one", "second", "another")
        assert deployment.default is deployment.find(None) is deployment.find("one") is deployment.find(str(paths[0])) is one
        assert deployment.find("another") is two
        assert deployment.find("two") is None, "it goes by the names that it was given"
    finally:
        assert deployment.close(30.0)
    assert {running.engine.state for running in deployment.running} == {EngineState.STOPPED}
    assert deployment.close(), "closing again does nothing"


@pytest.mark.parametrize("load_on", Load)
def test_models_that_all_weights_leave_room_for_are_loaded_beside_each_other(paths: list[Path], load_on: Load) -> None:
    configs = [replace(config_of(path), kv=KvConfig()) for path in paths]
    share = plan_share(configs[0], resolve(str(paths[0]), paths[0].parent), Resources())
    assert share.num_kv_bytes < share.num_reserve_bytes // 4, "it would fit a quarter of what the first model's weights leave"
    memory_bytes = 2 * share.num_bytes - 1
    configs[0] = replace(configs[0], sharing=SharingConfig(memory_bytes=memory_bytes))
    configs[1] = replace(configs[1], sharing=SharingConfig(load_on=load_on))
    deployment = start_deployment(configs)
    try:
        assert deployment.want(deployment.served[1]).result(WAIT_S).name == "two"
        assert [one.num_loads for one in deployment.served] == [1, 1]
        assert [running.name for running in deployment.running] == ["one", "two"]
    finally:
        deployment.close()


def test_models_that_share_a_team_answer_as_each_does_alone(paths: list[Path]) -> None:
    async def both(deployment: Deployment) -> list[str]:
        return await asyncio.gather(*[answer(running) for running in deployment.running])

    deployment = start_deployment([config_of(path) for path in paths])
    try:
        together = asyncio.run(both(deployment))
    finally:
        deployment.close()
    alone = start_model(config_of(paths[0]), resolve(str(paths[0]), paths[0].parent))
    try:
        assert together == [asyncio.run(answer(alone))] * 2
    finally:
        alone.close()


def test_lines_of_one_model_begin_when_the_people_of_another_have_their_answers(paths: list[Path]) -> None:
    async def play(one: RunningModel, two: RunningModel) -> tuple[int, int]:
        people = [make_request(f"person-{idx}", [idx + 1] * 9, max_tokens=200) for idx in range(6)]
        line, last_ns = make_request("line", [5, 6, 7], max_tokens=3, background=True), 0
        with one.bridge.open(people) as asked, two.bridge.open((line,)) as behind:
            while chunks := await asked.next_chunks():
                last_ns = chunks[-1].at_ns
            first = (await asyncio.wait_for(behind.next_chunks(), WAIT_S))[0]
            return last_ns, first.at_ns

    resources, running = Resources(), list[RunningModel]()
    try:
        for path in paths:
            running.append(start_model(config_of(path), resolve(str(path), path.parent), resources))
        last_ns, begun_ns = asyncio.run(play(*running))
        assert begun_ns > last_ns
        assert resources.others_serve("two", last_ns)
        running[0].close()
        assert not resources.others_serve("two", last_ns), "a model that has left serves nobody"
    finally:
        for one in running:
            one.close()


def test_two_models_with_one_name_are_refused_and_none_is_left_running(paths: list[Path]) -> None:
    before = set(threading.enumerate())  # an engine of another test may be about to end
    with pytest.raises(ConfigError, match=r"Two models are served as 'one'.*--served-model-name"):
        start_deployment([config_of(paths[0]), config_of(paths[1], served_model_names=("one",))])
    assert not [
        thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("penstock-engine")
    ]


def test_all_models_have_the_same_number_of_threads(paths: list[Path]) -> None:
    other = replace(config_of(paths[1]), backend=BackendConfig(backend=Backend.NATIVE, threads=1))
    with pytest.raises(ConfigError, match=r"threads is 1, and the models .* share 2 threads.*--threads"):
        start_deployment([config_of(paths[0]), other])


def test_a_team_that_a_step_holds_for_ever_is_left_and_the_next_one_shared() -> None:
    resources = Resources()
    first, _ = resources.team("one", 2)
    assert resources.team("two", 2)[0] is first
    resources.leave_team("one")
    second, _ = resources.team("one", 2)
    assert second is not first
    resources.leave_team("two")  # which waited for the first, too
    assert resources.team("two", 2)[0] is second


@pytest.mark.parametrize("is_stuck", [False, True])
def test_an_engine_after_one_whose_step_never_ends_has_other_threads(
    paths: list[Path], is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The team may be held for ever; the one after a plain failure goes on with the others' threads."""
    resources = Resources()
    running = start_model(config_of(paths[0]), resolve(str(paths[0]), paths[0].parent), resources)
    try:
        team, _ = resources.team("two", 2)
        monkeypatch.setattr(Engine, "executor_call", lambda _: object() if is_stuck else None)
        assert isinstance(running.engine, Supervisor)
        running.engine._make_engine(lambda: None).close(0.0)
        assert (resources.team("two", 2)[0] is team) is not is_stuck
    finally:
        monkeypatch.undo()
        running.close()


def test_a_quota_that_changes_keeps_no_engine_from_being_made_anew(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of a deployment share a team, which has as many threads as when the first one came."""
    resources = Resources()
    config = replace(config_of(paths[0]), backend=BackendConfig(backend=Backend.NATIVE))
    monkeypatch.setattr("penstock.machine._cpu_quota", lambda *_: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    running = start_model(config, resolve(str(paths[0]), paths[0].parent), resources)
    try:
        monkeypatch.setattr("penstock.machine._cpu_quota", lambda *_: 1.0)
        assert isinstance(running.engine, Supervisor)
        running.engine._make_engine(lambda: None).close(0.0)
    finally:
        running.close()


def test_threads_that_the_system_does_not_give_are_told_with_a_remedy() -> None:
    resources = Resources()
    with pytest.raises(ConfigError, match=r"does not give 2 threads: thread 1 can't be pinned to CPU 1023.*--pin-threads"):
        resources.team("one", 2, (1022, 1023))
    for claim in claim_cpus([1022, 1023]):  # which nobody holds
        claim.close()
    assert resources.team("one", 2)[0].num_threads == 2


@pytest.mark.parametrize(("num_cpus", "num_lines"), [(1, 1), (2, 0)])
def test_more_threads_than_cpus_are_taken_and_warned_of_once(
    num_cpus: int, num_lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.deploy.resources.usable_cpus", lambda: num_cpus)
    resources = Resources()
    assert resources.team("one", 2)[0] is resources.team("two", 2)[0]
    warnings = [record.message for record in caplog.records if "--threads" in record.message]
    assert len(warnings) == num_lines
    assert not warnings or warnings[0].startswith("2 threads compute, and this process may use 1 CPU: ")


def test_memory_that_a_model_was_promised_is_not_given_to_the_next() -> None:
    free = [100 * MIB]
    budget = MemoryBudget(lambda: free[0], read_private_bytes=lambda: 0)
    assert budget.available_bytes("one") == 100 * MIB
    budget.take("one", SMALL)
    free[0] = 80 * MIB  # the weights are there, and the KV cache has not filled yet
    assert budget.available_bytes("two") == 50 * MIB
    assert budget.available_bytes("one") == 80 * MIB, "its own share is not taken from it"
    budget.take("two", SMALL)
    with pytest.raises(NotEnoughMemory, match=r"three takes 50 MiB \(weights 20 MiB, KV cache 30 MiB\), and 0 B are left"):
        budget.take("three", SMALL)
    budget.give_back("one")
    budget.take("three", SMALL)
    free[0] = 10 * MIB
    assert budget.available_bytes("four") == 0


def test_what_an_earlier_load_left_behind_counts_as_free_up_to_the_reserve() -> None:
    free, private = 1000 * MIB, 50 * MIB
    budget = MemoryBudget(lambda: free, read_private_bytes=lambda: private)
    assert budget.available_bytes("one") == 1000 * MIB
    free, private = 880 * MIB, 170 * MIB
    assert budget.available_bytes("one") == 1000 * MIB
    free -= 100 * MIB  # for another process
    assert budget.available_bytes("one") == 900 * MIB
    private += 500 * MIB
    assert budget.available_bytes("one") == 1000 * MIB, "never more than the whole budget"
    free = 500 * MIB
    assert budget.available_bytes("one") == 500 * MIB + RESERVE_BYTES
    budget.take("two", MemoryShare(num_weight_bytes=500 * MIB, num_reserve_bytes=0))
    assert budget.available_bytes("one") == 500 * MIB
    free = 300 * MIB
    assert budget.available_bytes("one") == 420 * MIB, "the weights of another model are not left behind"


def test_the_empty_blocks_of_models_still_take_memory() -> None:
    resources = Resources(MemoryBudget(lambda: 100 * MIB))
    assert resources.unfilled_bytes() == 0
    resources.memory.take("one", SMALL)
    assert resources.unfilled_bytes() == 30 * MIB, "it loads"
    resources.loads["one"] = lambda: EngineLoad(num_blocks_total=3, num_blocks_free=1, num_blocks_cached=1)
    assert resources.unfilled_bytes() == 10 * MIB
    resources.memory.give_back("one")
    assert resources.unfilled_bytes() == 0


def test_threads_that_take_memory_at_once_are_not_promised_more_than_there_is() -> None:
    interval_s = sys.getswitchinterval()
    share = MemoryShare(num_kv_bytes=1, num_reserve_bytes=0)

    def take(budget: MemoryBudget, together: threading.Barrier, name: str) -> None:
        together.wait(WAIT_S)
        with contextlib.suppress(NotEnoughMemory):
            budget.take(name, share)

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            budget, together = MemoryBudget(lambda: 4), threading.Barrier(8)
            threads = [threading.Thread(target=take, args=(budget, together, str(number))) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert budget.left_bytes() == 0
    finally:
        sys.setswitchinterval(interval_s)


def test_a_model_that_does_not_fit_the_limit_of_memory_is_told_the_limit(paths: list[Path]) -> None:
    source = resolve(str(paths[0]), paths[0].parent)
    resources = Resources(MemoryBudget(lambda: 2048 * MIB, limit_bytes=256 * MIB))
    with pytest.raises(NotEnoughMemory, match="--memory is 256 MiB, and a model takes 256 MiB beside its weights") as caught:
        start_model(config_of(paths[0]), source, resources)
    assert caught.value.remedy.endswith("or raise --memory.")
    resources = Resources(MemoryBudget(lambda: 2048 * MIB, limit_bytes=1024 * MIB))
    with pytest.raises(NotEnoughMemory, match=r"needs .* of KV cache") as caught:
        start_model(
            replace(config_of(paths[0], max_model_len=64), kv=KvConfig(kv_cache_memory_bytes=8 << 10)), source, resources
        )
    assert caught.value.remedy == "Raise --kv-cache-memory or lower --max-model-len."
    assert "--memory is" not in caught.value.message


@pytest.mark.parametrize("room_bytes", [-MIB, 16 << 10])
def test_the_model_that_does_not_fit_beside_another_is_told_what_holds_the_memory(paths: list[Path], room_bytes: int) -> None:
    """Room for no weights, or for weights and no KV cache."""
    num_weight_bytes = 0
    resources = Resources(MemoryBudget(lambda: 2048 * MIB))
    one = start_model(config_of(paths[0]), resolve(str(paths[0]), paths[0].parent), resources)
    try:
        num_weight_bytes = one.metrics.num_weight_bytes
        left_bytes = 256 * MIB + (num_weight_bytes + room_bytes if room_bytes > 0 else 0)
        other = MemoryShare(num_kv_bytes=resources.memory.available_bytes("two") - left_bytes, num_reserve_bytes=0)
        resources.memory.take("other", other)
        with pytest.raises(NotEnoughMemory, match=r"Of the machine's memory one holds .*weights.*KV cache.*, other holds"):
            start_model(config_of(paths[1]), resolve(str(paths[1]), paths[1].parent), resources)
        resources.memory.give_back("other")
        start_model(config_of(paths[1]), resolve(str(paths[1]), paths[1].parent), resources).close()
        assert asyncio.run(answer(one)), "the first goes on"
    finally:
        one.close()


def test_a_closed_model_gives_its_memory_back(paths: list[Path]) -> None:
    resources = Resources(MemoryBudget(lambda: 2048 * MIB))
    before = resources.memory.available_bytes("another")
    for _ in range(2):
        running = start_model(config_of(paths[0]), resolve(str(paths[0]), paths[0].parent), resources)
        assert resources.memory.available_bytes("another") < before
        running.close()
    assert resources.memory.available_bytes("another") == before


def test_a_model_that_can_not_be_loaded_leaves_its_share(paths: list[Path], tmp_path: Path) -> None:
    resources = Resources(MemoryBudget(lambda: 2048 * MIB))
    before = resources.memory.available_bytes("another")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(paths[0].read_bytes()[:1000])
    with pytest.raises(ModelError) as failure:
        start_model(config_of(broken), resolve(str(broken), tmp_path), resources)
    assert not isinstance(failure.value, NotEnoughMemory)
    assert resources.memory.available_bytes("another") == before


def test_every_model_is_closed_once_also_if_one_can_not_be(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hangs delays the end by the grace of one engine, and not by two."""
    deployment = start_deployment([config_of(path) for path in paths])
    closed: list[tuple[str, float]] = []

    def close(self: RunningModel, timeout_s: float = 0.0) -> bool:
        closed.append((self.name, timeout_s))
        if self.name == "one":
            raise OSError("its device is gone")
        return True

    with monkeypatch.context() as broken:
        broken.setattr(RunningModel, "close", close)
        with pytest.raises(OSError, match="its device is gone"):
            deployment.close(30.0)
    assert [name for name, _ in closed] == ["one", "two"]
    assert all(timeout_s > 20 for _, timeout_s in closed), "each may finish its requests"
    assert deployment.close()
