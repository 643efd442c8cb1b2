"""A cluster whose configuration changes while it serves: replicas are threads with real kernels, and no Ray is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from penstock.backends import cuda
from penstock.cli.cluster import _read, _read_again
from penstock.cli.main import cli
from penstock.cluster.models import ClusterModels
from penstock.cluster.process import ReplicaThread
from penstock.config import Config
from penstock.config.components import config_from
from penstock.config.routing import Routing
from penstock.deploy.resources import MemoryBudget
from penstock.serve.http.listener import bind_socket
from penstock.types.errors import ConfigError, PenstockError
from support.server.completions import URL
from support.server.harness import wait_until
from support.site import ThreadCrew, site
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    folder = tmp_path_factory.mktemp("models")
    paths = [write_gguf(folder / f"{seed}.gguf", TinyLlama(seed=seed)) for seed in (1, 2)]

    def config(seed: int, **values: object) -> Config:
        common = {"model": str(paths[seed - 1]), "served_model_name": ("toy",), "threads": 1, "kv_cache_memory": 4 << 20}
        return config_from({**common, "shutdown_timeout": 0.0, "port": 0, "replicas": 1, **values})

    return config


def test_a_changed_model_is_replaced_once_its_replicas_are_there(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        before = cluster.ask()
        [old] = cluster.deployment.running
        old.begin_use()  # an answer that takes long
        assert cluster.update(make(2, replicas=2)) == ["toy: replaced"]
        after = cluster.ask()
        assert after != before
        assert cluster.num_answers() == 1, "the new model counts anew"
        assert len(httpx.get(f"{cluster.url}/load").json()["replicas"]) == 2
        first, second = cluster.crews
        assert second._num_beside == 3, "the old one's memory is taken"
        assert (first.num_stops, second.num_stops) == (0, 0), "the old one still has a request"
        old.end_use()
        wait_until(lambda: first.num_stops)
        assert second.num_stops == 0
        assert cluster.ask() == after


@pytest.mark.parametrize("names", [("toy",), ()])
def test_what_has_not_changed_stays(names: tuple[str, ...], make: Callable[..., Config]) -> None:
    with site(make(1, served_model_name=names)) as cluster:
        assert cluster.update(make(1, served_model_name=names)) == []
        assert len(cluster.crews) == 1


def test_a_model_whose_file_has_changed_is_replaced(make: Callable[..., Config], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf", TinyLlama(seed=1))
    config = make(1, model=str(path))
    with site(config) as cluster:
        before = cluster.ask()
        write_gguf(tmp_path / "new.gguf", TinyLlama(seed=2)).replace(path)
        assert cluster.update(config) == ["toy: replaced"]
        assert cluster.ask() != before
        assert cluster.update(config) == []
        path.unlink()  # what runs needs it no more, and other changes are not held up
        assert cluster.update(config) == []


def test_files_that_settings_name_are_a_models_own(make: Callable[..., Config], tmp_path: Path) -> None:
    model = TinyLlama(seed=1)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "own.py").write_text("from penstock.sched.policies.orders import FirstComeFirstServed as Own\n")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    write_adapter(tmp_path / "adapter", factors_of_llama(model))
    write_gguf(tmp_path / "small.gguf", TinyLlama(seed=3))
    config = make(
        1,
        chat_template=str(tmp_path / "chat.jinja"),
        policy=f"{tmp_path}/own.py:Own",
        generation_config=str(tmp_path),
        merge_lora=(f"{tmp_path}/adapter:0.5",),
        speculation_model=str(tmp_path / "small.gguf"),
    )
    models = ClusterModels([config], Routing(), bind_socket, is_elsewhere=False)
    try:
        [member] = models._members
        assert member.is_for(config)
        names = {path.name for path in member._files}
        assert names == {"1.gguf", "chat.jinja", "own.py", "generation_config.json", "adapter", "small.gguf"}
        (tmp_path / "adapter" / "adapter_config.json").touch()
        assert not member.is_for(config)
    finally:
        models.close()


def test_replicas_on_one_machine_have_a_file_each_on_its_disk(make: Callable[..., Config], tmp_path: Path) -> None:
    disk = {"replicas": 2, "kv_disk_size": 16 << 20, "kv_disk_path": str(tmp_path)}
    with site(make(1, **disk)) as cluster:
        assert cluster.update(make(2, **disk)) == ["toy: replaced"]
        assert len(list(tmp_path.glob("replica-[0123]/*"))) == 4
        wait_until(lambda: all(member.has_stopped for member in cluster.models._ended))
        assert cluster.update(make(1, **disk)) == ["toy: replaced"]
    assert not (tmp_path / "replica-4").exists(), "folders are used again"


def test_a_folder_that_a_replica_can_not_use_names_the_setting(make: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make(1, kv_disk_size=16 << 20, kv_disk_path=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"The folder .*/file/replica-0 can't be used: .* Check --kv-disk-path"):
        ReplicaThread(config, name="r0", front=("127.0.0.1", 1), secret=b"", num_beside=1)


def test_a_canary_comes_gets_its_share_and_goes(make: Callable[..., Config]) -> None:
    main, canary = make(1), make(2, served_model_name=("new",), split_of="toy", split_share=0.5)
    with site(main) as cluster:
        usual = cluster.ask()
        assert cluster.update(main, canary) == ["new: added", "new: answers 50% of the requests for toy"]
        assert cluster.names() == ["toy", "new"]
        other = cluster.ask("new")
        answers = [cluster.ask(user=f"user {number}") for number in range(24)]
        assert set(answers) == {usual, other}
        more = make(2, served_model_name=("new",), split_of="toy", split_share=1.0)
        assert cluster.update(main, more) == ["new: answers 100% of the requests for toy"]
        assert {cluster.ask(user=f"user {number}") for number in range(24)} == {other}
        assert len(cluster.crews) == 2, "a changed share restarts nothing"
        assert cluster.update(main) == ["new: removed"]
        assert {cluster.ask(user=f"user {number}") for number in range(24)} == {usual}
        assert httpx.post(cluster.url + URL, json={"model": "new", "prompt": "a"}).status_code == 404
        wait_until(lambda: cluster.crews[1].num_stops)


def test_a_split_may_be_of_any_served_name(make: Callable[..., Config]) -> None:
    main = make(1, served_model_name=("toy", "chat"))
    canary = make(2, served_model_name=("new",), split_of="chat", split_share=1.0)
    with site(main) as cluster:
        usual = cluster.ask("chat")
        cluster.update(main, canary)
        assert cluster.ask("toy") == usual
        assert cluster.ask("chat") == cluster.ask("new") != usual


def test_replicas_that_do_not_start_leave_all_as_it_was(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        before, cluster.error, cluster.next = cluster.ask(), RuntimeError("no room"), [make(2)]
        answer = httpx.post(f"{cluster.url}/cluster/update", timeout=60)
        assert (answer.status_code, "no room" in answer.text) == (400, True)
        assert cluster.ask() == before
        wait_until(lambda: cluster.crews[1].num_stops)
        cluster.error = None
        assert cluster.update(make(2)) == ["toy: replaced"]


def test_a_wrong_split_is_refused_before_a_replica_starts(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        canary = make(2, served_model_name=("new",), split_of="nobody", split_share=0.5)
        with pytest.raises(ConfigError, match="nobody"):
            cluster.models.update([make(1), canary], Routing())
        with pytest.raises(ConfigError, match="Two models are served as 'toy'"):
            cluster.models.update([make(1), make(2)], Routing())
        assert len(cluster.crews) == 1
        lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
        assert 'penstock_model_state{model="toy",state="loaded"} 1.0' in lines


def test_what_changes_without_a_replica_is_told(make: Callable[..., Config]) -> None:
    main, part = make(1), make(2, served_model_name=("new",), split_of="toy", split_share=0.5)
    other = make(2, served_model_name=("new",))
    with site(main, part) as cluster:
        assert cluster.update(main, other) == ["new: answers its own requests alone"]
        assert cluster.update(other, main) == ["new: the default model"]
        assert len(cluster.crews) == 2


def test_a_mistake_in_the_file_is_told_to_who_asks(make: Callable[..., Config], tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with site(make(1)) as cluster:
        cluster.deployment.update = lambda: cluster.models.update(*_read_again(["--config", str(path)]))
        for text, cause in (
            ("kv_cache_memori = 1", "Did you mean kv_cache_memory"),
            ("[[routes]]", "'name' is missing"),
        ):
            path.write_text(text)
            answer = httpx.post(f"{cluster.url}/cluster/update", timeout=60)
            assert (answer.status_code, cause in answer.text) == (400, True), answer.text


def test_requests_of_a_replaced_model_are_explained_no_more_and_nobody_waits(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        for _ in range(3):
            cluster.ask()
        fleet = cluster.deployment.running[0].engine
        cluster.update(make(2))
        wait_until(lambda: cluster.crews[0].num_stops)
        num_jobs = len(fleet._inbox)
        assert fleet.explain_all(["id1"], fleet.clock.now_ns) == []
        assert len(fleet._inbox) == num_jobs, "a thread that has ended is asked nothing"
        assert httpx.get(f"{cluster.url}/v1/requests?ended=20", timeout=60).status_code == 200


def test_replicas_that_never_come_end_the_update(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with site(make(1)) as cluster:
        monkeypatch.setattr("penstock.cluster.models.UPDATE_S", 0.3)
        monkeypatch.setattr(ThreadCrew, "start", lambda self: None)
        before = cluster.ask()
        with pytest.raises(PenstockError, match=r"The replicas of toy have not come within 0\.3 s"):
            cluster.models.update([make(2)], Routing())
        assert cluster.ask() == before


def test_settings_of_the_server_do_not_change(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster, pytest.raises(ConfigError, match="can't change in an update"):
        cluster.models.update([make(1, max_body_size=1 << 20)], Routing())


def test_a_ray_of_this_machine_has_cpus_for_an_update_to_more(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.models.usable_cpus", lambda: 16)
    for num_threads, num_cpus in ((1, 16), (10, 40)):
        models = ClusterModels([make(1, threads=num_threads, replicas=2)], Routing(), bind_socket, is_elsewhere=False)
        assert models.num_cpus == num_cpus
        models.close()


def test_a_front_needs_no_memory_for_models_that_its_replicas_hold(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.models.MemoryBudget", lambda: MemoryBudget(lambda: 1 << 20))
    with site(make(1), make(2, served_model_name=("other",))) as cluster:
        assert cluster.ask("other") != cluster.ask()


def test_beside_a_gpu_the_settings_of_replicas_are_checked_before_these_start(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They compute on the CPU, so nothing may be planned, or accepted, for the GPU."""
    monkeypatch.setattr(cuda, "why_not", lambda: None)
    monkeypatch.setattr(cuda, "find_gpu", lambda: cuda.Gpu("a GPU", (9, 0), 80 << 30, 1))
    with pytest.raises(ConfigError, match="--steps-in-flight has no meaning on the CPU"):
        ClusterModels([make(1, threads=None, steps_in_flight=1)], Routing(), bind_socket, is_elsewhere=False)
    caplog.clear()
    caplog.set_level("INFO")
    with site(make(1, threads=None)) as cluster:
        cluster.ask()
        assert cluster.update(make(2, threads=None)) == ["toy: replaced"]
    assert caplog.text.count("replicas compute on CPUs") == 1


def test_an_address_of_another_machine_is_refused(make: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="Check --replica-host: it must be an address of this machine"):
        ClusterModels([make(1, replica_host="192.0.2.1")], Routing(), bind_socket, is_elsewhere=False)


def test_one_update_at_a_time(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        cluster.models._updating.acquire()
        try:
            with pytest.raises(PenstockError, match="under way"):
                cluster.models.update([make(2)], Routing())
        finally:
            cluster.models._updating.release()


def test_a_command_asks_for_it(make: Callable[..., Config]) -> None:
    with site(make(1)) as cluster:
        cluster.next = [make(2)]
        told = [CliRunner().invoke(cli, ["cluster", "update", cluster.url]) for _ in range(2)]
        assert [one.output for one in told] == ["toy: replaced\n", "Nothing has changed.\n"]
        cluster.next = [make(1, max_body_size=1 << 20)]
        refused = CliRunner().invoke(cli, ["cluster", "update", cluster.url])
        assert "can't change in an update" in str(refused.exception)


def test_commands_take_keys_from_the_environment_as_the_server_does(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(1, api_key=("one", "two"), admin_api_key=("boss", "chief"))
    with site(config) as cluster:
        cluster.next = [config]
        monkeypatch.setenv("PENSTOCK_API_KEY", "one two")
        assert "r0" in CliRunner().invoke(cli, ["cluster", "status", cluster.url]).output
        refused = CliRunner().invoke(cli, ["cluster", "update", cluster.url])
        assert "Give an admin key with --api-key" in str(refused.exception)
        monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "boss chief")
        assert CliRunner().invoke(cli, ["cluster", "update", cluster.url]).output == "Nothing has changed.\n"


def test_the_configuration_is_read_again_with_the_words_of_the_start(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    words = ["--config", str(path), "--replicas", "3"]
    for rows in (8, 16):
        path.write_text(f'model = "smollm2:135m"\nmax_num_seqs = {rows}\n')
        [config], _ = _read.main(list(words), standalone_mode=False)
        assert (config.scheduler.max_num_seqs, config.cluster.replicas) == (rows, 3)
