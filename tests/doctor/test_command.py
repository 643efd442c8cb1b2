"""`penstock doctor`: what it reads of a server and of a recording, its words, its JSON and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.lab.cost_files import SavedCost, save_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.doctor import RULES, Diagnosis, Finding, Verdict
from penstock.lab.evidence import Scrape
from penstock.lab.recording import open_recording
from penstock.lab.replayed import show
from penstock.lab.traces import read_workload
from penstock.obs.explain.explanation import Explanation
from penstock.obs.prometheus import expose
from penstock.types.request import WaitTimes
from support.doctor.stage import MODEL, Stage, Visitor, poisson
from support.server.harness import MODEL_NAME, running


def doctor(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["doctor", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def record(path: Path, visitors: list[Visitor], **settings: object) -> Stage:
    return Stage(visitors, settings, record=path)


@pytest.fixture(scope="module")
def one_row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a server that has too few rows."""
    path = tmp_path_factory.mktemp("recordings") / "one row"
    record(path, poisson(10, 3, prompt=50, answer=[60, 120]), max_num_seqs=1)
    return path


def times(told: Explanation) -> tuple[object, ...]:
    return (told.total_ns, told.queue_ns, told.prefill_ns, told.decode_ns, told.num_decode_steps, dict(told.waited_for_ns))


def test_a_recording_explains_its_requests_as_the_server_did(tmp_path: Path) -> None:
    stage = record(tmp_path / "r", poisson(10, 6, prompt=[50, 300], answer=[20, 90]), max_num_seqs=4)
    shown = show(open_recording(tmp_path / "r"))
    live = stage.journal.explain_all(stage.ids, stage.clock.now_ns)
    assert [times(told) for told in shown.explanations] == [times(told) for told in live]
    assert any("rows" in told.waited_for_ns for told in live)


def test_waits_before_the_queue_and_the_background_are_recorded(tmp_path: Path) -> None:
    grammars = poisson(5, 4, answer=30, waits=WaitTimes(grammar=40_000_000))
    lines = [Visitor(at_s=0, answer=200, background=True) for _ in range(20)]
    stage = record(tmp_path / "r", [*grammars, *lines])
    shown = show(open_recording(tmp_path / "r"))
    live = stage.journal.explain_all(stage.ids, stage.clock.now_ns)
    assert [times(told) for told in shown.explanations] == [times(told) for told in live]
    assert all(told.waited_for_ns["grammar"] == 40_000_000 for told in shown.explanations)
    assert len(shown.explanations) == len(grammars)
    series = Scrape(shown.after, MODEL)
    live_series = Scrape(expose(stage.metrics).decode(), MODEL)
    assert series.sum("background_tokens_total") == live_series.sum("background_tokens_total") > 0
    assert series.sum("grammar_rows_sat_out_total") == 0, "lines rest beside people"
    workload = read_workload(tmp_path / "r")
    assert workload.name == "r without 20 background requests"
    assert len(workload.jobs) == len(grammars)


def test_a_recording_of_the_background_alone_has_too_few_requests(tmp_path: Path) -> None:
    record(tmp_path / "r", [Visitor(at_s=0, answer=200, background=True) for _ in range(3)])
    code, text = doctor(str(tmp_path / "r"))
    assert (code, "Requests seen: 0" in text) == (2, True), text


def test_preempted_requests_of_a_recording_are_told_from_those_that_rest(tmp_path: Path) -> None:
    settings = {"reserve": "chunk", "max_num_seqs": 16}
    visitors = poisson(10, 3, prompt=[60, 100], answer=[150, 300])
    stage = Stage(visitors, settings, blocks=60, record=tmp_path / "r")
    shown = show(open_recording(tmp_path / "r"))
    live = stage.journal.explain_all(stage.ids, stage.clock.now_ns)
    assert sum(len(told.pauses) for told in live) > 3
    assert sum(len(told.pauses) for told in shown.explanations) == sum(len(told.pauses) for told in live)


@pytest.mark.parametrize("line", [{"kind": "lost", "count": 1}, {"kind": "restart"}], ids=lambda line: line["kind"])
def test_a_request_whose_end_is_lost_is_left_out(line: dict[str, object], tmp_path: Path) -> None:
    stage = record(tmp_path / "r", [Visitor(at_s=at_s) for at_s in (0, 10, 20)])
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    lines[next(idx for idx, one in enumerate(lines) if one["kind"] == "end")] = line
    (tmp_path / "r").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = show(open_recording(tmp_path / "r"))
    live = stage.journal.explain_all(stage.ids[1:], stage.clock.now_ns)
    assert [times(told) for told in shown.explanations] == [times(told) for told in live]
    assert Scrape(shown.after, MODEL).sum("grammar_rows_sat_out_total") == 0


def test_a_recording_is_diagnosed(one_row: Path) -> None:
    code, text = doctor(str(one_row))
    assert code == 1
    assert "few rows" in text
    assert "Try: --max-num-seqs 2" in text
    assert "Simulated with and without it" in text


def test_options_of_a_server_are_refused_for_a_recording(one_row: Path) -> None:
    code, text = doctor(str(one_row), "--seconds", "5")
    assert code == 2
    text = " ".join(text.split())
    assert f"--seconds is for a server, and {one_row} is taken for a file: leave it out. The URL of a server begins" in text


def test_a_recording_with_guesses_does_not_say_who_made_them(tmp_path: Path) -> None:
    record(tmp_path / "r", poisson(10, 3, prompt=50, answer=20))
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    step = next(line for line in lines if line["kind"] == "step" and line.get("rows"))
    step["rows"] = [[*row[:3], 3] for row in step["rows"]]
    step["accepted"] = [1 for _ in step["rows"]]
    (tmp_path / "r").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = show(open_recording(tmp_path / "r"))
    assert sum(told.num_guesses for told in shown.explanations) == 2 * len(step["rows"])
    assert 'source="unknown"' in shown.after


def test_a_flag_is_never_broken_at_the_end_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding(rule=rule, symptom=rule.symptom, lost_s=1.0, share=0.5, evidence="", change={}, gain=None) for rule in RULES
    ]
    every = Diagnosis(verdict=Verdict.ILL, findings=findings, summary="")
    monkeypatch.setattr("penstock.cli.doctor.diagnose", lambda *_: every)
    record(tmp_path / "r", poisson(6, 1, prompt=20, answer=5))
    _, text = doctor(str(tmp_path / "r"))
    flags = set(re.findall(r"--[a-z-]+", text))
    assert flags == {flag for rule in RULES for flag in re.findall(r"--[a-z-]+", rule.remedy)}


def test_json_has_the_figures(one_row: Path) -> None:
    code, text = doctor(str(one_row), "--json")
    told = json.loads(text)
    assert (code, told["verdict"]) == (1, "ill")
    first = told["findings"][0]
    assert (first["name"], first["change"]) == ("few rows", {"max_num_seqs": 2})
    assert first["gain"]["after"]["mean_s"] < 0.9 * first["gain"]["before"]["mean_s"]
    assert 0.1 < first["share"] <= 1


def test_a_healthy_recording_ends_with_0(tmp_path: Path) -> None:
    record(tmp_path / "r", poisson(20, 1, prompt=100, answer=50))
    assert doctor(str(tmp_path / "r"))[0] == 0


def test_a_simulator_that_is_far_off_predicts_nothing(one_row: Path, tmp_path: Path) -> None:
    fast = CostModel(step_ns=1e3, decode_row_ns=1e3, prefill_token_ns=1e3)
    save_cost(tmp_path / "cost", SavedCost(cost=fast, source="profile"))
    assert "Try (not simulated): --max-num-seqs 2." in doctor(str(one_row), "--cost", str(tmp_path / "cost"))[1]
    told = json.loads(doctor(str(one_row), "--cost", str(tmp_path / "cost"), "--json")[1])
    assert told["findings"][0]["gain"] is None
    assert told["doubt"].startswith("No gain is predicted: simulated as they were, requests take ")


def test_a_server_with_too_few_requests_can_not_be_judged() -> None:
    with running() as server:
        code, text = doctor(server.url, "--seconds", "0.1", "--json")
    assert (code, json.loads(text)["verdict"]) == (2, "unknown")


def test_a_server_that_is_not_there_can_not_be_judged() -> None:
    code, text = doctor("http://127.0.0.1:1")
    assert code == 2
    assert "can't be reached" in text


def test_a_wrong_file_of_costs_is_told_before_a_server_is_watched() -> None:
    code, text = doctor("http://127.0.0.1:1", "--cost", "absent.json")
    assert code == 2
    assert "absent.json can't be read as a cost model" in text
    assert "take one that comes with Penstock: h100-llama-8b, h200-llama-8b" in text


def ask(url: str, count: int) -> None:
    for _ in range(count):
        body = {"model": MODEL_NAME, "prompt": "once upon a time", "max_tokens": 9}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_a_servers_pages_are_read() -> None:
    with running() as server:
        ask(server.url, 6)
        code, text = doctor(server.url, "--seconds", "0.1", "--json")
    assert json.loads(text)["summary"].startswith("6 requests took ")
    assert code in (0, 1)


def test_without_explanations_it_says_so() -> None:
    with running(max_explained=0) as server:
        ask(server.url, 6)
        code, text = doctor(server.url, "--seconds", "0.1")
    assert code == 2
    assert "Requests seen: 0" in text
