"""A result survives its file, and a file that is not one is refused with the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.lab.figures import COLUMNS, parse_slos
from penstock.lab.records import End
from penstock.lab.result_files import read_result
from penstock.lab.results import AskedTarget, Load, Result, this_machine, write_result
from penstock.types.errors import ConfigError
from support.bench_records import random_records, record, result_of, run_of


@pytest.fixture
def result() -> Result:
    records = random_records(3, 120, tenants="ab")
    records[5] = record(5, due_ms=3, end=End.REFUSED, http_status=429, error="queue_full <b>")
    records[6] = record(6, due_ms=4, end=End.CANCELLED, cached=None)
    options = {"temperature": 0.0, "url": ["a", "b"], "warmup": None}
    full = run_of(
        records,
        options=options,
        slos=parse_slos(["ttft=123.456ms", "itl=50ms"]),
        price_per_hour=1.25,
        name="policy=sjf",
        notes=("The server does not take ignore_eos.",),
        warnings=("Interrupted.",),
        target=AskedTarget(url="http://127.0.0.1:1/v1", model="m", server="penstock 0"),
        begun_at="2026-11-22T10:00:00+00:00",
    )
    bare = run_of([record()], load=Load("concurrency", 8), seed=None, how="simulated")
    return result_of(full, bare)


def test_what_was_written_is_read(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_result(result, path)
    found = read_result(path)
    assert found.machine == result.machine
    assert found.made_by == result.made_by
    for before, after in zip(result.runs, found.runs, strict=True):
        assert all(np.array_equal(getattr(before.samples, name), getattr(after.samples, name)) for name in COLUMNS)
        assert after.figures == before.figures
        assert (after.name, after.workload) == (before.name, before.workload)
        assert (after.options, after.seed) == (before.options, before.seed)
        assert (after.load, after.how, after.target) == (before.load, before.how, before.target)
        assert (after.begun_at, after.slos, after.price_per_hour) == (before.begun_at, before.slos, before.price_per_hour)
        assert (after.notes, after.warnings) == (before.notes, before.warnings)


def test_the_same_result_gives_the_same_bytes(result: Result, tmp_path: Path) -> None:
    write_result(result, tmp_path / "a.json")
    write_result(read_result(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_the_file_says_what_it_is(result: Result, tmp_path: Path) -> None:
    write_result(result, tmp_path / "a.json")
    top = json.loads((tmp_path / "a.json").read_text())
    assert next(iter(top)) == "penstock_bench"
    assert top["penstock_bench"] == 1
    run = top["runs"][0]
    ttft = run["figures"]["latency_ms"]["ttft"]["quantiles"]
    assert ttft["p99"].keys() == {"value", "low", "high"}
    assert ttft["p99.9"]["low"] is None, "the sample is too small for it"
    assert run["requests"]["columns"]["first_ns"][run["requests"]["columns"]["end"].index(2)] is None
    assert run["figures"]["reasons"] == {"429 queue_full <b>": 1}


def test_an_option_of_another_kind_is_written_as_text(tmp_path: Path) -> None:
    write_result(result_of(run_of([record()], options={"file": tmp_path, "slo": ("a", "b")})), tmp_path / "a.json")
    assert read_result(tmp_path / "a.json").runs[0].options == {"file": str(tmp_path), "slo": ["a", "b"]}


def test_this_machine_is_described() -> None:
    found = this_machine()
    assert found.num_cpus >= 1
    assert found.available_memory_bytes > 0


def columns_of(top: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = top["runs"][0]["requests"]["columns"]
    return found


def add_to_a_group(top: dict[str, Any], **entries: int) -> None:
    for name, value in entries.items():
        top["runs"][0]["requests"]["gaps"]["groups"][0][name].append(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda top: top.update(penstock_bench=2), "version 2, from a newer Penstock"),
        (lambda top: top.update(penstock_bench="1"), "penstock_bench: Input should be a valid integer"),
        (lambda top: top.pop("penstock_bench"), "not a result of `penstock bench`: penstock_bench: Field required"),
        (lambda top: top.pop("runs"), "runs: Field required"),
        (lambda top: top.update(runs=[]), "runs: List should have at least 1 item"),
        (lambda top: top.update(runs=[3]), r"runs\[0\]: "),
        (lambda top: top["runs"][1].pop("workload"), r"runs\[1\]\.workload: Field required"),
        (lambda top: top["runs"][0].update(how="guessed"), r"runs\[0\]\.how: Input should be 'http'"),
        (lambda top: top["runs"][0].update(slos=["ttft"]), r"runs\[0\]: slos can't be used: The SLO 'ttft' has no limit"),
        (lambda top: top["runs"][1]["load"].update(kind="weight"), r"runs\[1\]: the load is weight 8"),
        (lambda top: top["runs"][1]["load"].update(value=-1), r"runs\[1\]: the load is concurrency -1"),
        (lambda top: columns_of(top)["sent_ns"].pop(), "sent_ns has 119 entries, and index has 120"),
        (lambda top: columns_of(top)["sent_ns"].__setitem__(3, 1.5), r"columns\.sent_ns\[3\]: "),
        (lambda top: columns_of(top)["sent_ns"].__setitem__(3, True), r"columns\.sent_ns\[3\]: "),
        (lambda top: columns_of(top)["sent_ns"].__setitem__(3, None), "sent_ns has a null"),
        (lambda top: columns_of(top)["sent_ns"].__setitem__(3, 2**63), r"columns\.sent_ns\[3\]: "),
        (lambda top: columns_of(top)["ended_ns"].__setitem__(3, -1), r"columns\.ended_ns\[3\]: .* greater than or equal to 0"),
        (lambda top: columns_of(top).pop("ended_ns"), "ended_ns has 0 entries"),
        (lambda top: columns_of(top)["end"].__setitem__(0, 4), "end has 4, and there are 4"),
        (lambda top: columns_of(top)["tenant"].__setitem__(0, 3), "tenant has 3, and there are 3"),
        (lambda top: top["runs"][0]["requests"].update(ends=["ok"]), "this version knows"),
        (lambda top: top["runs"][0]["requests"]["gaps"]["buckets"].reverse(), "buckets do not ascend"),
        (lambda top: add_to_a_group(top, at=10**6, counts=1), "the bucket 1000000 of"),
        (lambda top: add_to_a_group(top, counts=1), "entries for"),
        (lambda top: top["runs"][0]["requests"]["tenant_gaps"][0].update(tenant=9), "there are 3 tenants"),
    ],
)
def test_a_broken_file_names_the_place(
    result: Result, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    path = tmp_path / "a.json"
    write_result(result, path)
    top = json.loads(path.read_text())
    change(top)
    path.write_text(json.dumps(top))
    with pytest.raises(ConfigError, match=words) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Invalid JSON"),
        (b'{"penstock_be', "Invalid JSON: .* at line 1"),
        (b"[1]", "Input should be an object"),
        (b"\xff", "Invalid JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_result(path)


def test_a_file_that_is_not_there_and_a_folder_that_is_not_there(result: Result, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_result(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be written"):
        write_result(result, tmp_path / "none" / "a.json")
