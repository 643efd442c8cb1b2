"""`penstock cluster`, without Ray."""

from __future__ import annotations

import importlib.util

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.cluster import _read
from penstock.cli.main import cli
from penstock.cluster.front import check
from penstock.config import KvConfig, ServerConfig
from penstock.config.setting import Kind, settings_of
from penstock.types.errors import ConfigError
from support.server.harness import running


def invoke(*words: str) -> str:
    result = CliRunner().invoke(cli, ["cluster", *words])
    assert result.exit_code == 0, result.output
    return result.output


def render(*words: str) -> list[dict]:
    return list(yaml.safe_load_all(invoke("render", "--image", "an/image:1", *words)))


def test_a_manifest_has_a_worker_for_each_replica_and_the_settings() -> None:
    settings, ray, service = render("qwen2.5-coder:1.5b", "--replicas", "3", "--cpus", "8", "--max-num-seqs", "16")
    assert [one["kind"] for one in (settings, ray, service)] == ["ConfigMap", "RayCluster", "Service"]
    lines = settings["data"]["cluster.toml"].splitlines()
    assert {'model = "qwen2.5-coder:1.5b"', "max_num_seqs = 16", "threads = 8", "replicas = 3"} <= set(lines)
    [workers] = ray["spec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["rayStartParams"]["num-cpus"]) == (3, "8")
    for spec in (ray["spec"]["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        assert spec["initContainers"][0]["command"] == ["penstock", "pull", "qwen2.5-coder:1.5b"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in spec["containers"][0]["args"][0]
    head = ray["spec"]["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    assert {one["name"] for one in head["spec"]["containers"][0]["env"]} >= {"PENSTOCK_API_KEY", "PENSTOCK_REPLICA_HOST"}


def test_a_model_in_the_image_is_not_pulled() -> None:
    _, ray, _ = render("/opt/model.gguf")
    for pod in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        assert "initContainers" not in pod["template"]["spec"]


def test_its_settings_are_a_config_file_of_a_cluster(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(render("--replicas", "2", "--no-resume", "--router", "least-work")[0]["data"]["cluster.toml"])
    again = render("--config", str(path))
    assert again[0] == render("--replicas", "2", "--no-resume", "--router", "least-work")[0]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("words", [["up"], ["down"]])
def test_without_ray_the_error_names_the_extra(words: list[str]) -> None:
    result = CliRunner().invoke(cli, ["cluster", *words])
    assert "penstock[ray]" in str(result.exception) or ".[ray]" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--replicas", "0"], "replicas is 0"),
        (["--replicas", "3", "--max-replicas", "2"], "max_replicas 2"),
        (["a", "b"], "A manifest is of one model, and 2 are named"),
        (["--keep-loaded"], "A cluster does not support --keep-loaded"),
        (["--device", "cuda"], "A cluster does not support --device cuda yet"),
        (["--backend", "cuda"], "A cluster does not support --backend cuda yet"),
        (["--pin-threads"], "A cluster does not support --pin-threads yet"),
        *(
            (["--kv-disk-size", "1GiB", item.flag, "/a"], item.flag)
            for part in (KvConfig, ServerConfig)
            for item in settings_of(part)
            if item.kind is Kind.PATH
        ),
    ],
)
def test_wrong_settings_name_the_cause(words: list[str], cause: str) -> None:
    result = CliRunner().invoke(cli, ["cluster", "render", "--image", "an/image", *words])
    assert cause in f"{result.output}{result.exception}"


def test_the_status_of_a_single_server_is_an_error() -> None:
    with running() as server:
        result = CliRunner().invoke(cli, ["cluster", "status", server.url])
    assert "This is a single server" in str(result.exception)


def test_a_manifest_has_the_limits_of_clients_and_no_secrets() -> None:
    words = ["--max-queue", "10", "--request-timeout", "5s", "--log-format", "json", "--alias", "gpt-4"]
    secrets = ["--api-key", "not-written-1", "--admin-api-key", "not-written-2", "--webhook-secret", "not-written-3"]
    settings, ray, _ = render(*words, *secrets)
    written = settings["data"]["cluster.toml"].splitlines()
    assert {"max_queue = 10", 'log_format = "json"', "request_timeout = 5.0", 'alias = ["gpt-4"]'} <= set(written)
    assert "not-written" not in invoke("render", "--image", "an/image:1", *words, *secrets)
    [head] = ray["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    of_secret = {one["name"]: one["valueFrom"].get("secretKeyRef") for one in head["env"] if "valueFrom" in one}
    assert of_secret["PENSTOCK_ADMIN_API_KEY"] == {"name": "penstock", "key": "admin-api-key"}
    assert of_secret["PENSTOCK_WEBHOOK_SECRET"] == {"name": "penstock", "key": "webhook-secret"}


def test_settings_of_a_file_and_of_the_environment_are_read_or_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('alias = ["gpt-4"]\n')
    assert 'alias = ["gpt-4"]' in render("--config", str(path))[0]["data"]["cluster.toml"]
    [config], _ = _read.main(["--config", str(path)], standalone_mode=False)
    assert config.sharing.aliases == ("gpt-4",)
    monkeypatch.setenv("PENSTOCK_MODELS_DIR", "/models")
    [config], _ = _read.main(["--config", str(path)], standalone_mode=False)
    with pytest.raises(ConfigError, match="A cluster does not support --models-dir yet"):
        check(config)


def test_pods_may_drain_before_they_are_killed() -> None:
    _, ray, _ = render("--shutdown-timeout", "2m")
    pods = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    assert [pod["template"]["spec"]["terminationGracePeriodSeconds"] for pod in pods] == [135, 135]


def test_services_of_the_namespace_are_no_settings() -> None:
    """Kubernetes would set PENSTOCK_PORT for a service called penstock."""
    _, ray, _ = render()
    pods = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    assert [pod["template"]["spec"]["enableServiceLinks"] for pod in pods] == [False, False]
