"""Settings: notations, ranges, files."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configuration_page import render
from penstock.config import Config, KvConfig, SchedulerConfig, ServerConfig
from penstock.config.components import COMPONENTS, config_from
from penstock.config.setting import Kind, settings_of
from penstock.config.several import config_of_found, configs_of
from penstock.config.sources import all_settings, read_config_file, unknown_variables
from penstock.config.units import figure, format_size, parse_count, parse_counts, parse_duration, parse_share, parse_size
from penstock.types.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("512", 512), ("4k", 4000), ("2Mi", 2 << 20), ("1.5k", 1500), (" 8 Ki ", 8192), ("1_000", 1000), ("0", 0)],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("4GiB", 4 << 30), ("512MB", 512_000_000), ("0.5KiB", 512), ("100", 100), ("7B", 7)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("250ms", 0.25), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("1.5", 1.5)])
def test_durations_are_seconds(text: str, value: float) -> None:
    assert parse_duration(text) == value


def test_counts_may_be_a_list() -> None:
    assert parse_counts("128,1k, 2Ki") == (128, 1000, 2048)
    with pytest.raises(ValueError, match="'' is not a count"):
        parse_counts("128,")


def test_every_entry_of_a_list_is_in_range() -> None:
    assert SchedulerConfig(length_buckets=(1, 2)).length_buckets == (1, 2)
    with pytest.raises(ConfigError, match="length_buckets: 0 is less than 1"):
        SchedulerConfig(length_buckets=(1, 0))


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.25", 0.25), ("50 %", 0.5), ("99.9%", 0.999)])
def test_shares(text: str, value: float) -> None:
    assert parse_share(text) == value


@pytest.mark.parametrize("parse", [parse_count, parse_size, parse_duration, parse_share])
@pytest.mark.parametrize("text", ["", "k", "-1", "1 2", "4x", "nan", "inf", "0x10", "1e3", "٣"])
def test_what_is_no_number_is_named(parse: object, text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a"):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize("parse", [parse_count, parse_size])
def test_fractions_of_one_are_refused(parse: object) -> None:
    with pytest.raises(ValueError, match="whole"):
        parse("1.5")  # type: ignore[operator]


@given(st.integers(min_value=0, max_value=1 << 50))
def test_counts_and_sizes_read_plain_digits(value: int) -> None:
    assert parse_count(str(value)) == value
    assert parse_size(str(value)) == value


@given(st.text(max_size=12))
def test_parsers_raise_nothing_but_value_error(text: str) -> None:
    for parse in (parse_count, parse_size, parse_duration, parse_share):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


def test_figures_have_three_digits_and_no_exponent() -> None:
    values = (0.01234, 9.876, 99.95, 999.4, 999.6, 1998.4, 1e6)
    assert [figure(value) for value in values] == ["0.0123", "9.88", "100", "999", "1000", "1998", "1000000"]
    assert [figure(value, digits=2) for value in (0.123, 99.4, 99.6, 130.0)] == ["0.12", "99", "100", "130"]


def test_sizes_are_shown_with_binary_units() -> None:
    assert [format_size(n) for n in (12, 1536, 98362432, 4 << 30)] == ["12 B", "1.5 KiB", "93.81 MiB", "4 GiB"]


def test_every_setting_has_a_line_of_documentation_and_a_key_of_its_own() -> None:
    settings = all_settings()
    assert len({item.key for item in settings}) == len(settings)
    for item in settings:
        assert item.doc.endswith("."), item.key
        assert "\n" not in item.doc
        assert item.default is not None or item.default_doc, f"{item.key}: say what None means"


def test_every_field_is_a_setting() -> None:
    for _, component in COMPONENTS:
        assert [item.field for item in settings_of(component)] == [f.name for f in dataclasses.fields(component)]  # type: ignore[arg-type]


def test_config_holds_every_component_with_its_defaults() -> None:
    assert [f.name for f in dataclasses.fields(Config)] == [name for name, _ in COMPONENTS]
    for name, component in COMPONENTS:
        assert getattr(Config(), name) == component()


def test_ranges_hold_however_a_config_is_made() -> None:
    with pytest.raises(ConfigError, match="port: 70000 is more than 65535"):
        ServerConfig(port=70000)
    with pytest.raises(ConfigError, match="block_size: 0 is less than 1"):
        KvConfig(block_size=0)
    with pytest.raises(ConfigError, match="api_key: '' is empty"):
        ServerConfig(api_keys=("a", ""))


def test_an_unavailable_choice_lists_what_is_available() -> None:
    with pytest.raises(ConfigError, match="policy: 'lifo' is not available; available: fcfs, "):
        SchedulerConfig(policy="lifo")


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_values_are_parsed_as_flags_are(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        'max_num_batched_tokens = "1k"\nkv_cache_memory = "1GiB"\nshutdown_timeout = "250ms"\nkv_headroom = 0.05\n'
        'prefix_caching = false\nport = 8080\napi_key = ["a", "b"]\nserved_model_name = "x"\n',
    )
    assert read_config_file(path).values == {
        "max_num_batched_tokens": 1000,
        "kv_cache_memory": 1 << 30,
        "shutdown_timeout": 0.25,
        "kv_headroom": 0.05,
        "prefix_caching": False,
        "port": 8080,
        "api_key": ("a", "b"),
        "served_model_name": ("x",),
    }


def test_an_unknown_key_names_the_nearest_and_where_all_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'max-num-seq'") as caught:
        read_config_file(_write(tmp_path, "max-num-seq = 3\n"))
    assert caught.value.remedy == "Did you mean max_num_seqs? docs/configuration.md lists all keys."


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("port = true", "port: True is a boolean, not a port"),
        ("port = 80.5", "port: 80.5 is a decimal number, not a port"),
        ("length_buckets = [128, 'x']", r"length_buckets: \[128, 'x'\] is not a list of counts"),
        ("length_buckets = '128;256'", "length_buckets: '128;256' is not a count"),
        ("host = 7", "host: 7 is an integer, not text"),
        ("prefix_caching = 'perhaps'", "prefix_caching: 'perhaps' is not true or false"),
        ("block_size = []", r"block_size: \[\] is a list, not a count"),
        ("device = 'tpu'", "device: 'tpu' is not available; available: auto, cpu, cuda"),
        ("port = 99999", "port: 99999 is more than 65535"),
        ("request_timeout = inf", "request_timeout: inf is not a finite number"),
        ("kv_headroom = nan", "kv_headroom: nan is not a finite number"),
        ("[[models]]", r"\[\[models\]\] 1: there is no key 'model'\. Say which model"),
        ("[models]\nmodel = 'a'", r"models are tables\. Begin each with a line \[\[models\]\]"),
        ("models = ['a']", r"models are tables\. Begin each"),
        ("[[models]]\nmodel='a'\n[[models]]\nport = 1", r"\[\[models\]\] 2: port is set for all models, not for one"),
        ("[[models]]\nmodel='a'\nthreads = 1", "threads is set for all models, not for one"),
        ("[[models]]\nmodel='a'\nblok_size = 1", r"\[\[models\]\] 1: unknown key 'blok_size'\. Did you mean block_size\?"),
        ("[[models]]\nmodel='a'\nblock_size = 0", r"\[\[models\]\] 1: block_size: 0 is less than 1"),
        ("[[models]]\nmodel='a'\n[models.server]\nport = 1", "unknown key 'server'"),
        ("[server]\nport = 1", r"no tables such as \[server\]\. Put all keys at the top level"),
        ("[[route]]\nname = 'a'", r"no tables such as \[route\]\. .* routes, upstreams"),
        ("host = ''", "host: '' is empty"),
        ("port = ", "is not TOML"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(tmp_path: Path, line: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        read_config_file(_write(tmp_path, line + "\n"))


def test_a_file_has_tables_for_models_that_set_what_models_have_for_themselves(tmp_path: Path) -> None:
    file = read_config_file(
        _write(
            tmp_path,
            "port = 1\n[[models]]\nmodel = 'a'\nserved_model_name = 'x'\nidle_unload = '2m'\nkv_cache_memory = '1GiB'\n"
            "policy = 'edf'\n[models.policy_args]\nweight = 2\n[[models]]\nmodel = 'b'\nmachine_share = 2\n",
        )
    )
    first = {"model": "a", "served_model_name": ("x",), "idle_unload": 120.0, "kv_cache_memory": 1 << 30, "policy": "edf"}
    assert file.values == {"port": 1}
    assert file.models == (first | {"policy_args": {"weight": 2}}, {"model": "b", "machine_share": 2})


def _models(**parts: Any) -> list[tuple[str, tuple[str, ...], str]]:
    """(model, names, when it is loaded) of each."""
    return [
        (one.model.model, one.model.served_model_names, one.sharing.load_on)
        for one in configs_of(parts.pop("values", {}), **parts)
    ]


def test_nothing_named_is_the_default_model() -> None:
    assert configs_of({}) == [Config()]


def test_words_are_first_and_one_that_names_a_table_or_a_file_stands_for_it() -> None:
    tables = [{"model": "m1", "served_model_name": ("one", "eins")}, {"model": "m2", "load_on": "request"}]
    folder = [("three", "/models/three.gguf"), ("two", "m2")]
    assert _models(tables=tables, folder=folder) == [
        ("m1", ("one", "eins"), "start"),
        ("m2", (), "request"),
        ("/models/three.gguf", ("three",), "request"),
    ]
    assert _models(words=["m2", "three", "other", "eins"], tables=tables, folder=folder) == [
        ("m2", (), "request"),
        ("/models/three.gguf", ("three",), "start"),
        ("other", (), "start"),
        ("m1", ("one", "eins"), "start"),
    ]


def test_a_table_with_a_part_of_a_model_s_requests_is_another_model_of_its_file() -> None:
    for main, name in (
        ("tiny:1b", "tiny:1b"),
        ("/models/tiny.gguf", "tiny"),
        ("/models/tiny-1.5", "tiny-1.5"),
        ("hf:org/tiny-1.5", "org/tiny-1.5"),
        ("hf:org/repo:tiny.gguf", "tiny"),
    ):
        tables = [{"model": main, "served_model_name": ("canary",), "split_of": name, "split_share": 0.1}]
        canary = (main, ("canary",), "start")
        assert _models(words=[main], tables=tables) == [(main, (), "start"), canary]
        assert _models(tables=tables, folder=[(name, main)]) == [canary, (main, (name,), "request")]
        assert _models(words=["canary"], tables=tables) == [canary]
        tables.append({"model": main, "served_model_name": ("chat",)})
        assert _models(words=[main], tables=tables) == [(main, ("chat",), "start"), canary]
    for one, other in (("a", "b"), ("llama-3", "llama-3.1")):
        tables = [{"model": other, "split_of": one, "split_share": 0.1}]
        assert _models(words=[one, other], tables=tables) == [(one, (), "start"), (other, (), "start")]


def test_a_file_is_one_model_however_its_path_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tables = [{"model": "~/notes.gguf", "max_num_seqs": 2}]
    folder = [("notes", f"{tmp_path}/notes.gguf"), ("other", f"{tmp_path}/other.gguf")]
    assert [one.model.model for one in configs_of({}, tables=tables, folder=folder)] == [
        "~/notes.gguf",
        f"{tmp_path}/other.gguf",
    ]
    (first, _) = configs_of({}, words=["./notes.gguf"], tables=tables, folder=folder)
    assert first.scheduler.max_num_seqs == 2


def test_what_a_table_says_of_a_model_goes_before_what_is_said_of_all() -> None:
    values = {"block_size": 8, "max_num_seqs": 3, "idle_unload": 60.0, "port": 7, "load_on": "request"}
    one, two = configs_of(values, words=["a"], tables=[{"model": "b", "block_size": 32, "load_on": "start"}])
    assert (one.kv.block_size, two.kv.block_size) == (8, 32)
    assert (one.sharing.load_on, two.sharing.load_on) == ("request", "start")
    assert one.scheduler == two.scheduler
    assert one.server == two.server


def test_a_policy_of_a_table_has_no_arguments_of_another() -> None:
    values = {"policy": "fair", "policy_args": {"x": 1}, "budget_args": {"y": 2}}
    tables = [{"model": "b", "policy": "edf"}, {"model": "c", "policy": "fair", "policy_args": {"x": 3}}]
    told = [one.scheduler for one in configs_of(values, words=["a"], tables=tables)]
    assert [one.policy_args for one in told] == [{"x": 1}, None, {"x": 3}]
    assert [one.budget_args for one in told] == [{"y": 2}] * 3


@pytest.mark.parametrize("key", ["served_model_name", "alias", "split_tenant"])
def test_several_models_have_no_name_in_common_and_no_split(key: str) -> None:
    values = {key: ("x",)}
    assert len(configs_of(values, words=["a"])) == 1
    with pytest.raises(ConfigError, match=f"--{key.replace('_', '-')} is .*of one model, and 2 are served"):
        configs_of(values, words=["a", "b"])


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("chat_template", "[[models]]"),
        ("kv_disk_path", "[[models]]"),
        ("lora_dir", "[[models]]"),
        ("record", "alone"),
        ("split_of", "[[models]]"),
    ],
)
def test_what_is_of_one_model_is_refused_for_several_with_the_remedy(key: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        configs_of({key: "x"}, words=["a"], folder=[("b", "b.gguf")])


def test_what_is_of_one_model_is_refused_for_one_of_a_folder_to_which_others_may_come() -> None:
    with pytest.raises(ConfigError, match="--kv-disk-path is of one model, and those of a folder are served"):
        configs_of({"kv_disk_path": "x"}, folder=[("b", "b.gguf")])


def test_a_model_that_is_found_later_has_the_config_of_one_that_was_there() -> None:
    values = {"block_size": 8, "max_num_seqs": 3, "budget_args": {"y": 2}}
    assert [config_of_found(values, "b", "/m/b.gguf")] == configs_of(values, folder=[("b", "/m/b.gguf")])


def test_a_file_that_is_missing_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        read_config_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_config_file(tmp_path / "binary.toml")


@given(st.dictionaries(st.sampled_from([item.key for item in all_settings()]), st.integers() | st.booleans() | st.text()))
def test_any_value_is_parsed_or_refused(values: dict[str, object]) -> None:
    settings = {item.key: item for item in all_settings()}
    for key, raw in values.items():
        with contextlib.suppress(ValueError):
            value = settings[key].parse(raw)
            assert settings[key].parse(value) == value, "parsing is idempotent"
            assert isinstance(value, bool) == (settings[key].kind is Kind.FLAG)


def test_variables_that_nothing_reads_are_named_with_what_was_meant() -> None:
    environ = {"PENSTOCK_MAX_NUM_SEQ": "1", "PENSTOCK_XYZ": "", "PENSTOCK_DEBUG": "1", "PENSTOCK_CONFIG": "x", "PORT": "1"}
    environ |= {item.env: "1" for item in all_settings()}
    first, second = unknown_variables(environ)
    assert first.endswith("PENSTOCK_MAX_NUM_SEQ is unknown and has no effect. Did you mean PENSTOCK_MAX_NUM_SEQS?")
    assert second.endswith("PENSTOCK_XYZ is unknown and has no effect.")


def test_variables_of_a_kubernetes_service_are_not_unknown() -> None:
    environ = {"PENSTOCK_SERVICE_HOST": "10.96.0.12", "PENSTOCK_SERVICE_PORT_HTTP": "80", "PENSTOCK_PORT_80_TCP_PROTO": "tcp"}
    assert unknown_variables(environ) == []


def test_the_page_in_docs_is_what_make_docs_writes() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == render(), "run `make docs`"


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_a_format_that_is_not_known_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"no.*auto"):
        config_from({setting: "no"})
