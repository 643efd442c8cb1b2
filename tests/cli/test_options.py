"""Settings on the command line: precedence, files, refusals."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.cli.options import GroupedCommand, config_options, model_argument, models_argument, routing_of_file
from penstock.config import Config
from penstock.config.components import COMPONENTS, DEFAULT_MODEL, config_from
from penstock.config.sources import all_settings
from penstock.config.upstreams import UpstreamConfig
from penstock.kv.eviction import EVICTIONS
from penstock.models import catalog
from penstock.sched.policies.gates import GATES
from penstock.sched.policies.orders import ORDERS
from penstock.sched.policies.predictors import PREDICTORS
from penstock.sched.policies.presets import PRESETS
from penstock.types.errors import ConfigError

ALL = tuple(name for name, _ in COMPONENTS)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@click.command(cls=GroupedCommand)
@model_argument
@config_options(*ALL)
@click.pass_obj
def _command(made: list[Config], **values: Any) -> None:
    made.append(config_from(values))


def _invoke(*arguments: str, env: dict[str, str] | None = None) -> tuple[Result, Config | None]:
    made: list[Config] = []
    result = CliRunner().invoke(_command, arguments, env=env, obj=made, standalone_mode=True)
    return result, made[0] if made else None


def _config(*arguments: str, env: dict[str, str] | None = None) -> Config:
    result, config = _invoke(*arguments, env=env)
    assert config is not None, result.output
    return config


def test_without_anything_it_is_the_default_config() -> None:
    assert _config() == Config()


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('port = 1\nhost = "file"\nmax_num_seqs = 3\nmodel = "from-file"\n')
    env = {"PENSTOCK_PORT": "2", "PENSTOCK_HOST": "environment"}
    config = _config("--config", str(path), "--port", "4000", env=env)
    assert (config.server.port, config.server.host, config.scheduler.max_num_seqs) == (4000, "environment", 3)
    assert config.model.model == "from-file"
    assert config.kv == Config().kv


def test_the_address_of_a_kubernetes_service_is_not_a_port(tmp_path: Path) -> None:
    env = {"PENSTOCK_PORT": "tcp://10.96.0.12:8000"}
    assert _config(env=env) == Config()
    path = tmp_path / "p.toml"
    path.write_text("port = 1\n")
    assert _config("--config", str(path), env=env).server.port == 1


def test_the_file_may_come_from_the_environment_and_the_model_be_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('model = "from-file"\nprefix_caching = false\n')
    config = _config("given", env={"PENSTOCK_CONFIG": str(path), "PENSTOCK_MODEL": "environment"})
    assert config.model.model == "given"
    assert not config.kv.prefix_caching
    assert _config("--prefix-caching", env={"PENSTOCK_CONFIG": str(path)}).kv.prefix_caching


def test_a_file_of_several_models_does_not_mean_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[[models]]\nmodel = "first"\n[[models]]\nmodel = "second"\n')
    result, _ = _invoke("--config", str(path))
    assert (result.exit_code, "[[models]]: name one of them, such as first." in result.output) == (2, True), result.output
    assert _config("second", "--config", str(path)).model.model == "second"
    assert _config(env={"PENSTOCK_CONFIG": str(path), "PENSTOCK_MODEL": "second"}).model.model == "second"


@pytest.mark.parametrize("name", ["simulate", "bench", "tune", "plan"])
def test_an_option_of_a_command_alone_is_not_the_files_setting_of_this_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('seed = 7\nreplicas = 0\nmax_replicas = 2\nrouter = "least-work"\nmax_num_seqs = 5\n')
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    values = command.make_context(name, ["--config", str(path)]).params
    assert (values["seed"], values["max_num_seqs"]) == (0, 5), "a workload's seed"
    assert values.get("router", "least-work") == "least-work", "the same as a cluster's"


def test_texts_are_embedded_by_the_files_model(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('model = "mine"\n')
    command = cli.get_command(click.Context(cli), "embed")
    assert command is not None
    assert command.make_context("embed", [str(path), "--config", str(path)]).params["model"] == "mine"


def test_a_named_model_has_the_settings_of_its_table(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'block_size = 8\nmax_num_seqs = 5\npolicy = "edf"\n[policy_args]\nweight = 2\n'
        '[[models]]\nmodel = "first.gguf"\nserved_model_name = "one"\nmax_num_seqs = 2\npolicy = "sjf"\nreplicas = 3\n'
    )
    for words, env in ((("one",), {}), (("first.gguf",), {}), (("-m", "one"), {}), ((), {"PENSTOCK_MODEL": "one"})):
        config = _config(*words, "--config", str(path), env={**env, "PENSTOCK_MAX_NUM_SEQS": "7"})
        assert (config.model.model, config.model.served_model_names) == ("first.gguf", ("one",))
        assert (config.kv.block_size, config.cluster.replicas) == (8, 3)
        scheduler = config.scheduler
        assert (scheduler.max_num_seqs, scheduler.policy, scheduler.policy_args) == (2, "sjf", None), "as `serve` has it"
    assert _config("other", "--config", str(path)).scheduler.max_num_seqs == 5
    assert _config("one", "--config", str(path), "--max-num-seqs", "9").scheduler.max_num_seqs == 9


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("run._answer", ("run", "one", "Hello")),
        ("run._answer", ("run", "one")),
        ("bench.loaded", ("bench", "one", "--in-process")),
        ("profile._show_steps", ("profile", "one")),
    ],
)
def test_commands_that_may_need_no_model_take_its_table(
    target: str, words: tuple[str, ...], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(f'[[models]]\nmodel = "{tiny_model}"\nserved_model_name = "one"\nblock_size = 8\n')
    asked: list[object] = []

    def stop(*given: object, **_: object) -> None:
        asked.extend(given)
        raise ConfigError("stop")

    monkeypatch.setattr(f"penstock.cli.{target}", stop)
    CliRunner().invoke(cli, [*words, "--config", str(path)], input="Hello")
    [config] = [one if isinstance(one, Config) else config_from(one) for one in asked if isinstance(one, dict | Config)]
    assert config.kv.block_size == 8
    assert str(tiny_model) in (config.model.model, asked[0])


@pytest.mark.parametrize(
    "words",
    [("run", "Hello"), ("embed", "/dev/null"), ("bench", "--in-process"), ("simulate",), ("profile",)],
    ids=" ".join,
)
def test_commands_that_may_need_no_model_ask_which_one_if_they_do(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[[models]]\nmodel = "first"\n')
    result = CliRunner().invoke(cli, [*words, "--config", str(path)])
    assert (result.exit_code, "name one of them, such as first." in result.output) == (2, True), result.output


def test_every_setting_has_a_flag_and_an_environment_variable() -> None:
    """And both change its field alone."""
    samples = {
        "count": "2",
        "counts": "2,3",
        "port": "4000",
        "size": "16MiB",
        "duration": "1s",
        "share": "5%",
        "text": "x",
        "path": "x",
        "table": "{x = 1}",
    }
    for item in all_settings():
        if item.key == "model":
            continue
        value = item.choices[-1] if item.choices else samples.get(item.kind, "x")
        if item.kind == "flag":  # what the default is not
            value = "false" if item.default else "true"
            by_flag = _config(f"--no-{item.flag[2:]}" if item.default else item.flag)
        else:
            by_flag = _config(item.flag, value)
        by_env = _config(env={item.env: value})
        assert by_flag == by_env, item.key
        assert changed_fields(by_flag) == ([] if str(item.default) == value else [item.field]), item.key


def changed_fields(config: Config) -> list[str]:
    pairs = [(getattr(config, name), component()) for name, component in COMPONENTS]
    return [
        field.name for one, other in pairs for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)
    ]


def test_the_model_may_be_an_option_but_not_twice(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('model = "from-file"\n')
    for flag in ("-m", "--model"):
        config = _config("--config", str(path), flag, "flag", env={"PENSTOCK_MODEL": "environment"})
        assert config.model.model == "flag"
    assert _config("--config", str(path), env={"PENSTOCK_MODEL": "environment"}).model.model == "environment"
    result, _ = _invoke("argument", "-m", "flag")
    assert result.exit_code == 2
    assert "given twice" in result.output


def test_several_counts_are_a_tuple_wherever_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for text in ("[64, 256]", '"64,256"'):
        path.write_text(f"length_buckets = {text}\n")
        assert _config("--config", str(path)).scheduler.length_buckets == (64, 256)
    assert _config("--length-buckets", "64,256").scheduler.length_buckets == (64, 256)
    assert _config(env={"PENSTOCK_LENGTH_BUCKETS": "64,256"}).scheduler.length_buckets == (64, 256)


def test_upstreams_have_the_limits_of_tenants_wherever_they_come_from(tmp_path: Path) -> None:
    @click.command(cls=GroupedCommand)
    @models_argument
    @config_options("admission")
    @click.pass_obj
    def command(made: list[UpstreamConfig], **_values: Any) -> None:
        made += routing_of_file().upstreams

    path, made = tmp_path / "p.toml", list[UpstreamConfig]()
    upstreams = '[[upstreams]]\nname = "far"\nurl = "http://x"\n[[models]]\nmodel = "a"\ntenant_max_concurrent = 9\n'
    path.write_text("tenant_tokens_per_minute = 300\n" + upstreams)
    for arguments in ([], ["--tenant-max-concurrent", "2"]):
        result = CliRunner().invoke(command, ["--config", str(path), *arguments], obj=made)
        assert result.exit_code == 0, result.output
    assert [(one.tenant_limits.tokens_per_minute, one.tenant_limits.max_concurrent) for one in made] == [(300, None), (300, 2)]


def test_the_arguments_of_a_policy_are_a_table_wherever_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('policy = "./mine.py:Mine"\n[policy_args]\nshares = {a = 2}\nweight = 1.5\n')
    from_file = _config("--config", str(path)).scheduler
    assert (from_file.policy, from_file.policy_args) == ("./mine.py:Mine", {"shares": {"a": 2}, "weight": 1.5})
    assert _config("--policy-args", "{shares = {a = 2}, weight = 1.5}").scheduler.policy_args == from_file.policy_args
    assert _config(env={"PENSTOCK_POLICY_ARGS": "{weight = 1.5}"}).scheduler.policy_args == {"weight": 1.5}


def test_what_may_be_repeated_is_a_tuple() -> None:
    assert _config("--api-key", "a", "--api-key", "b").server.api_keys == ("a", "b")
    assert _config(env={"PENSTOCK_API_KEY": "a b"}).server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--policy", "lifo"], "Invalid value for '--policy': 'lifo' is not available; available: fcfs,"),
        (["--policy", "lifo"], "or a class of your own, as package.module:Class or ./file.py:Class."),
        (["--policy-args", "3"], "3 is an integer, not a table."),
        (["--device", "tpu"], "'tpu' is not available; available: auto, cpu, cuda."),
        (["--kv-cache-dtype", "fp8"], "available: int8, bf16, int4."),
        (["--port", "x"], "Invalid value for '--port': 'x' is not a port number (0 to 65535)."),
        (["--port", "4k"], "'4k' is not a port number"),
        (["--port", "70000"], "Invalid value for '--port': '70000' is not a port number (0 to 65535)."),
        (["--kv-cache-memory", "4 potatoes"], "the unit 'potatoes' is unknown."),
        (["--config", "/absent.toml"], "/absent.toml: cannot be read"),
        (["--api-key", ""], "Invalid value for '--api-key': '' is empty."),
        (["--host", " "], "Invalid value for '--host': ' ' is empty."),
    ],
)
def test_a_wrong_value_is_wrong_usage_and_named(arguments: list[str], cause: str) -> None:
    result, _ = _invoke(*arguments)
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("PENSTOCK_MAX_NUM_SEQS", "abc", "'abc' is not a count such as 512, 4k or 2Mi."),
        ("PENSTOCK_PREFIX_CACHING", "maybe", "'maybe' is not true or false."),
        ("PENSTOCK_CONFIG", "/absent.toml", "/absent.toml: cannot be read"),
    ],
)
def test_a_wrong_value_in_a_variable_names_the_variable(name: str, value: str, cause: str) -> None:
    result, _ = _invoke(env={name: value})
    assert result.exit_code == 2
    assert f"Invalid value for '{name}': {cause}" in " ".join(result.output.split())


def test_a_wrong_key_in_the_file_is_wrong_usage_and_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("max_num_sequences = 3\n")
    result, _ = _invoke("--config", str(path))
    assert result.exit_code == 2
    assert "unknown key 'max_num_sequences'. Did you mean max_num_seqs?" in " ".join(result.output.split())


def test_help_groups_the_settings() -> None:
    result, _ = _invoke("--help")
    titles = [line for line in result.output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Options:",
        "Model:",
        "KV cache:",
        "Adapters:",
        "Scheduling:",
        "Admission:",
        "Compute:",
        "Server:",
        "Several models:",
        "Cluster:",
        "Log:",
    ]


def test_help_shows_defaults_in_the_notation_in_which_they_are_written() -> None:
    result, _ = _invoke("--help")
    text = " ".join(result.output.split())
    for shown in ("[default: 4MiB]", "[default: 30s]", "[default: 8000]", "[default: info]", "[default: smollm2:135m]"):
        assert shown in text


def test_choices_and_default_model_are_those_of_their_rooms() -> None:
    choices = {item.key: item.choices for item in all_settings()}
    assert set(choices["batching"]) == set(GATES)
    assert set(choices["policy"]) == set(ORDERS)
    assert set(choices["length_predictor"]) == set(PREDICTORS)
    assert set(choices["kv_eviction"]) == set(EVICTIONS)
    assert set(choices["preset"]) == set(PRESETS)
    assert catalog.DEFAULT_MODEL == DEFAULT_MODEL
