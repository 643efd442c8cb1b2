"""The comparison itself: rounds, failures, ratios; with records instead of servers."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import contenders
import origin
import peers
import pytest
from peer_setup import Environments
from peers import Record, common_starts, compete, dates, median_figures, num_rounds, prepare, ratios, read_earlier, table
from sessions import Contender, LoadError


def add_round(record, rate, text="same"):
    record.dates.append(f"2026-01-0{1 + len(record.rounds)}")
    record.rounds.append(len(record.rounds))
    record.ready_s.append(1.0)
    record.resident_mb.append(2.0)
    record.probes.append({"int8_gops": 10.0})
    record.runs.setdefault(8, []).append({"output_tokens_per_s": rate})
    record.starts[8] = [text, "again"]


def records_of(**rates):
    records = {name: Record(5.0) for name in rates}
    for name, values in rates.items():
        for rate in values:
            add_round(records[name], rate)
    return records


def test_rounds_alternate_and_every_second_goes_backwards():
    order = []

    def measure_one(contender, round_idx, record):
        order.append(contender.name)
        add_round(record, 1.0)

    compete([Contender(name, []) for name in "abc"], 3, measure_one, {})
    assert "".join(order) == "abccbaabc"


def test_contender_that_fails_is_left_out_and_the_others_go_on():
    def measure_one(contender, round_idx, record):
        if contender.name == "b" and round_idx == 1:
            raise LoadError("the stream broke off")
        add_round(record, 1.0)

    skipped = {}
    records = compete([Contender(name, []) for name in "abc"], 3, measure_one, skipped)
    assert {name: len(record.runs[8]) for name, record in records.items()} == {"a": 3, "b": 1, "c": 3}
    assert skipped == {"b": "failed in round 2: the stream broke off"}


def test_contender_that_never_ran_has_no_figures():
    def measure_one(contender, round_idx, record):
        raise LoadError("no answer")

    assert compete([Contender("a", [])], 3, measure_one, {}) == {}


def test_ratio_is_the_median_of_the_rounds_ratios():
    assert ratios(records_of(penstock=[10, 40, 90], slow=[10, 10, 45])) == {"slow": {"8": 2.0}}
    assert ratios(records_of(slow=[1.0])) == {}


def test_ratio_is_of_the_same_rounds():
    records = records_of(penstock=[10, 40], late=[20])
    records["late"].rounds = [1]
    assert ratios(records) == {"late": {"8": 2.0}}
    records["late"].rounds = [2]
    assert ratios(records) == {}


def test_rounds_are_added_to_an_earlier_result(tmp_path):
    earlier, rounds = records_of(penstock=[10, 20], slow=[5, 5]), []
    path = tmp_path / "peers-a.txt"
    saved = {name: record.saved() for name, record in earlier.items()}
    path.write_text("lines\n" + json.dumps({"model": "a", "loads": {8: 2}, "records": saved}))

    def measure_one(contender, round_idx, record):
        rounds.append((contender.name, round_idx))
        add_round(record, 40.0)

    read = read_earlier(path, {"model": "a", "loads": {8: 2}})
    skipped = {"slow": "failed in round 3"}
    records = compete([Contender(name, []) for name in ("penstock", "slow")], 1, measure_one, skipped, read)
    assert rounds == [("penstock", 2)]
    assert [run["output_tokens_per_s"] for run in records["penstock"].runs[8]] == [10, 20, 40]
    assert num_rounds(records) == 3
    assert ratios(records) == {"slow": {"8": 3.0}}
    assert common_starts(records) == {"penstock": 4.5, "slow": 4.5}
    assert dates(records) == "2026-01-01 to 2026-01-03"
    assert [line.split("|")[1].strip() for line in table(records, {8: 2}).splitlines()[2:]] == ["penstock (n=3)", "slow (n=2)"]
    with pytest.raises(SystemExit, match="its model is a, here it is b"):
        read_earlier(path, {"model": "b"})


def test_rounds_of_other_contenders_settings_or_builds_are_refused(tmp_path):
    ready = [Contender("penstock", ["serve", "{port}"]), Contender("openvino", ["drive"])]
    told = {"build": {"sha256": "0123"}, "settings": origin.contenders_told(ready)}
    path = tmp_path / "peers-a.txt"
    path.write_text(json.dumps({**told, "records": {}}))
    assert read_earlier(path, told) == {}
    with pytest.raises(SystemExit, match="its build sha256 is 0123, here it is 4567"):
        read_earlier(path, told | {"build": {"sha256": "4567"}})
    with pytest.raises(SystemExit, match=r"its settings openvino is .*, here it is None"):
        read_earlier(path, told | {"settings": origin.contenders_told(ready[:1])})
    with pytest.raises(SystemExit, match=r"its settings openvino command is \['drive'\], here it is \['drive', '2'\]"):
        read_earlier(path, told | {"settings": origin.contenders_told([ready[0], replace(ready[1], command=["drive", "2"])])})


@pytest.mark.parametrize("text", ["", "Traceback", "[1]"])
def test_rounds_are_not_added_to_what_is_no_result(tmp_path, text):
    path = tmp_path / "peers-a.txt"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"peers-a\.txt can't be added to: its last line is no result"):
        read_earlier(path, {})


def test_a_build_is_told_by_its_files():
    told = origin.build_told()
    assert told == origin.build_told()
    assert len(told["sha256"]) == origin.DIGITS


@pytest.fixture
def driver(monkeypatch) -> Iterator[ModuleType]:
    """The driver of OpenVINO, without OpenVINO."""
    names = ("ContinuousBatchingPipeline", "GenerationConfig", "Tokenizer")
    monkeypatch.setitem(sys.modules, "openvino_genai", SimpleNamespace(**dict.fromkeys(names)))
    monkeypatch.syspath_prepend(Path(contenders.__file__).parent / "peers")
    yield import_module("drive_openvino")
    del sys.modules["drive_openvino"]


def test_properties_are_the_schedulers_where_it_knows_them_and_else_the_devices(driver):
    words = [
        "max_num_batched_tokens=256",
        "INFERENCE_NUM_THREADS=1",
        "ENABLE_CPU_PINNING=false",
        "INFERENCE_PRECISION_HINT=f32",
    ]
    scheduler = SimpleNamespace(max_num_batched_tokens=driver.MAX_BATCHED_TOKENS)
    of_device = driver.set_known(scheduler, driver.read_properties(words))
    assert scheduler == SimpleNamespace(max_num_batched_tokens=256)
    assert of_device == {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False, "INFERENCE_PRECISION_HINT": "f32"}


def test_properties_of_openvino_reach_its_command_line(tmp_path):
    environments = Environments(tmp_path)
    (tmp_path / "openvino" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    setting = contenders.Setting(environments, tmp_path / "m.gguf", None, 32, 1024, 2)
    for name, properties in contenders.OPENVINO_PROPERTIES.items():
        command = contenders.CONTENDERS[name][1](setting).command
        assert tuple(command[4:]) == properties


def test_figures_are_medians_with_all_rounds_beside():
    runs = [{"output_tokens_per_s": rate, "seconds": rate} for rate in (3.0, 1.0, 2.0)]
    assert median_figures(runs) == {"output_tokens_per_s": 2.0, "seconds": 2.0, "rounds": [3.0, 1.0, 2.0]}


def test_replies_are_compared_by_how_long_they_are_the_same():
    records = records_of(penstock=[1.0], peer=[1.0])
    add_round(records["peer"], 1.0, "sale")
    assert common_starts(records) == {"penstock": 4.5, "peer": 3.5}


def test_table_has_a_line_for_each_contender():
    lines = table(records_of(penstock=[10.0], peer=[20.0]), {8: 2}).splitlines()
    assert lines[2:] == ["| penstock | 10 | 1.0 | 2.0 | 5.0 |", "| peer | 20 | 1.0 | 2.0 | 5.0 |"]


def test_peer_that_is_not_installed_is_left_out_with_the_remedy(tmp_path):
    setting = contenders.Setting(Environments(tmp_path), tmp_path / "m.gguf", None, 32, 1024, 2)
    skipped = {}
    assert [c.name for c in prepare(["penstock", "openvino"], setting, setup=False, skipped=skipped)] == ["penstock"]
    assert "--setup" in skipped["openvino"]


def test_own_size_counts_the_package_and_what_it_needs():
    files = contenders.own_files()
    assert any("numpy" in str(path) for path in files)
    assert not any("pytest" in path.parts for path in files)


@pytest.mark.parametrize("model", peers.MODELS)
def test_each_model_has_its_loads(monkeypatch, model):
    monkeypatch.setattr("sys.argv", ["peers.py", "--model", model])
    assert peers.read_arguments().model == model
    assert max(peers.MODELS[model].loads) <= max(peers.MODELS[model].loads.values())
