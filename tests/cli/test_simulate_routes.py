"""`penstock simulate --route`: strategies of a config's route side by side, by recorded scores; errors in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.routes.learned import SHARES, Cascade, Fit, LearnedRoute
from penstock.routes.scores import read_scores

CONFIG = """
[[models]]
model = "small"
[[models]]
model = "large"
[[models]]
model = "vectors"
[[routes]]
name = "auto"
weak = "small"
strong = "large"
file = "route.json"
share = 0.5
[[routes]]
name = "either"
fallback = ["large", "small"]
[[routes]]
name = "far-first"
fallback = ["far", "small"]
[[upstreams]]
name = "far"
url = "http://localhost:9/v1"
[[routes]]
name = "all-far"
fallback = ["far", "farther"]
[[upstreams]]
name = "farther"
url = "http://localhost:9/v1"
[[routes]]
name = "agreed"
weak = "small"
strong = "large"
confidence = "agreement"
agreement = 0.6
[[routes]]
name = "verified"
weak = "small"
strong = "large"
confidence = "verifier"
least = 0.5
[[routes]]
name = "judged"
ensemble = ["small", "large"]
judge = "large"
[[routes]]
name = "by-third"
ensemble = ["small", "large"]
judge = "docs-judge"
[[pipelines]]
name = "checked"
index = "docs.index"
model = "large"
check = "large"
[[pipelines]]
name = "over"
index = "docs.index"
model = "judged"
[[pipelines]]
name = "docs"
index = "docs.index"
model = "large"
[[pipelines]]
name = "reranked"
index = "docs.index"
model = "large"
reranker = "judge"
"""
NUM_QUESTIONS = 40


def line(idx: int, **changes: object) -> dict:
    gain = idx / NUM_QUESTIONS
    answers = {
        "weak": {"result": float(gain < 0.5), "prompt_tokens": 40, "completion_tokens": 12},
        "strong": {"result": 1.0, "prompt_tokens": 36, "completion_tokens": 8},
    }
    return {"gain": gain, "start_gain": gain + 0.01, "prefix": "all", "prefix_tokens": 32} | answers | changes


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command; gives what it prints, or its error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text(CONFIG)
    write_lines(tmp_path, *[line(idx) for idx in range(NUM_QUESTIONS)])
    write_route(tmp_path, margin=0.21)

    def run(*words: str, route: str = "auto") -> str:
        usual = ("--config", "penstock.toml", "--route", route, "--workload", "scores.jsonl", "--blocks", "400")
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *usual, *words])
        out, err = capsys.readouterr()
        return out if ended.value.code == 0 else err

    return run


def write_lines(folder: Path, *lines: dict) -> None:
    (folder / "scores.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_route(folder: Path, margin: float | None) -> None:
    fits = [Fit(np.zeros(num), np.ones(num), np.zeros(4 + num + 1), np.zeros(4 + num + 1)) for num in (2, 5)]
    cascade = None if margin is None else Cascade("small", 4, margin, fits[1])
    thresholds = tuple(1 - share for share in SHARES)
    LearnedRoute(embedder="vectors", by_question=fits[0], cascade=cascade, thresholds=thresholds).write(folder / "route.json")


def rows_of(out: str) -> dict[str, list[str]]:
    lines = [row for row in out[out.index("\nRoute\n") :].splitlines() if not row.startswith(" ")]
    return {cells[0]: cells[1:] for row in lines if len(cells := [one for one in row.split("  ") if one.strip()]) > 3}


def test_all_strategies_of_a_cascade_stand_side_by_side(simulate: Callable[..., str], tmp_path: Path) -> None:
    out = simulate("--concurrency", "4", "--shares", "0.3,0.5", "--slo", "ttft=100s", "--json", "r.json", "--html", "r.html")
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows_of(out).items()}
    assert [*rows] == ["small", "large", "fallback", "question 30%", "question 50%", "cascade 30%", "cascade 50%"]
    assert rows["small"][:2] == ["0.0%", "50.0%"]
    assert rows["large"][:2] == rows["fallback"][:2] == ["100.0%", "100.0%"]
    # The gain of question n is n / 40, and the threshold for a share of 30 % is 0.7. First tokens say 0.01 more.
    assert rows["question 30%"][:2] == ["30.0%", "80.0%"]
    assert rows["cascade 30%"][:3] == ["30.0%", "17", "80.0%"]
    assert rows["question 50%"][:2] == ["50.0%", "100.0%"]
    shares = [float(cells[-1].rstrip("%")) for cells in rows.values()]
    assert shares[1] == 100
    result = json.loads((tmp_path / "r.json").read_text())
    assert "The large model answered 30.0%; quality 80.0%" in result["runs"][3]["notes"][0]
    page = (tmp_path / "r.html").read_text()
    assert "cascade 50%" in page
    assert "Plots" not in page, "it has none"


@pytest.mark.parametrize("name", ["agreed", "verified", "judged"])
def test_answers_that_are_judged_go_by_their_confidence(simulate: Callable[..., str], tmp_path: Path, name: str) -> None:
    lines = [line(idx, confidence=1 - idx / NUM_QUESTIONS) for idx in range(NUM_QUESTIONS)]
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = rows_of(simulate("--route", name, "--concurrency", "4", "--shares", "0.3"))
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    if name == "judged":
        assert [*rows][3:] == ["ensemble"]
        assert rows["ensemble"][:3] == ["47.5%", "40", "97.5%"]  # the 21st has a confidence of 0.5 and a wrong answer
        return
    kind, least, begun = ("agreement", "0.6", "200") if name == "agreed" else ("verifier", "0.5", "40")
    assert [*rows][3:] == [f"{kind} {least}", f"{kind} 30%"]
    assert rows[f"{kind} 30%"][:3] == ["30.0%", begun, "80.0%"]


def test_each_model_has_its_cost(simulate: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "slow.csv").write_text("cost,ns\nstep_ns,500000000\n")
    out = simulate("--cost", "small=default,large=slow.csv")
    rows = rows_of(out)
    small_s, large_s = (float(rows[name][-2]) for name in ("small", "large"))
    assert large_s >= 0.5 * 8
    assert small_s < 0.5 * 8
    same = "All models have the same step times."
    assert same not in out
    assert same in simulate()
    assert "names small" in simulate("--cost", "small=default")


def test_an_upstream_has_the_times_that_are_given(simulate: Callable[..., str]) -> None:
    out = simulate("--upstream-ms", "5000", "--rate", "1", "--requests", "5", "--every-run", route="far-first")
    assert [*rows_of(out)] == ["small", "far", "fallback"]
    assert float(rows_of(out)["far"][-1]) == 0, "it takes no time of this machine"
    assert "5000" in out


def test_a_pipeline_waits_for_its_vector_and_its_search(simulate: Callable[..., str], tmp_path: Path) -> None:
    write_lines(tmp_path, *[{"strong": line(0)["strong"]} for _ in range(3)])
    quick, slow = [
        json.loads((tmp_path / "r.json").read_text())["runs"]
        for search_ms in ("0", "4000")
        if simulate("--search-ms", search_ms, "--embed-ms", "0", "--concurrency", "1", "--json", "r.json", route="docs")
    ]
    (alone_ms, quick_ms), (_, slow_ms) = [
        [run["figures"]["latency_ms"]["ttft"]["mean"]["value"] for run in runs] for runs in (quick, slow)
    ]
    assert quick_ms == alone_ms
    assert slow_ms == pytest.approx(quick_ms + 4000)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--replicas", "2"), "--replicas has no effect on a route"),
        (("--vary", "policy=fcfs,sjf"), "--vary has no effect on a route"),
        (("--shares", "2"), "are not shares from 0 to 1"),
        (("--route", "other"), "no route or pipeline 'other'"),
        (("--route", "all-far"), "The route's weak model is an upstream"),
        (("--route", "reranked"), "reranked has a reranker, which is not simulated"),
        (("--route", "agreed"), "a question has no confidence"),
        (("--route", "by-third"), "by-third asks a third model, docs-judge"),
        (("--route", "checked"), "checked has a check, which is not simulated"),
        (("--route", "over"), "over is over a route"),
        (("--device", "cuda"), "is on a GPU"),
        (("--workload", "away.jsonl"), "away.jsonl"),
        (("--requests", "500"), "scores.jsonl has 40 questions, fewer than 500"),
    ],
)
def test_what_can_not_be_simulated_is_said(simulate: Callable[..., str], words: tuple[str, ...], cause: str) -> None:
    assert cause in simulate(*words)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"gain": None}, "line 1: not a question with scores"),
        ({"weak": {"result": 2, "prompt_tokens": 1, "completion_tokens": 1}}, "result is not a number from 0 to 1"),
        ({"strong": {"result": 1, "prompt_tokens": 0, "completion_tokens": 1}}, "prompt_tokens is not a number of tokens"),
        ({"prefix": 7}, "prefix is not a text"),
    ],
)
def test_wrong_scores_are_named(simulate: Callable[..., str], tmp_path: Path, change: dict, cause: str) -> None:
    write_lines(tmp_path, line(0, **change))
    assert cause in simulate()


def test_a_cascade_needs_the_gains_of_first_tokens(simulate: Callable[..., str], tmp_path: Path) -> None:
    lines = [line(idx) for idx in range(3)]
    for one in lines:
        del one["start_gain"]
    write_lines(tmp_path, *lines)
    assert "a question has no start_gain" in simulate()
    write_route(tmp_path, margin=None)
    assert "cascade 50%" not in simulate()


def test_options_of_routes_are_for_routes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--blocks", "9", "--search-ms", "1"])
    assert "--search-ms is for a route" in capsys.readouterr().err


def test_only_so_many_questions_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path, *[line(idx) for idx in range(3)])
    assert len(read_scores(tmp_path / "scores.jsonl", 2)) == 2
