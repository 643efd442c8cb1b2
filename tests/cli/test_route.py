"""`penstock route`: fits to a file of answers, says what the route saves, and names what is wrong with the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.cli.route import show
from penstock.routes.answers import Answers
from penstock.routes.learned import read_route
from penstock.routes.scores import Answer, read_scores


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector of a question says how hard it is, as its text does."""

    def embed(model: str, prompts: Sequence[str]) -> np.ndarray:
        assert model == "minilm"
        angles = np.array([float(prompt.split()[-1]) for prompt in prompts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    monkeypatch.setattr("penstock.cli.route.embed", embed)
    monkeypatch.setattr("penstock.cli.route.digest", lambda model: f"digest of {model}")


def write(path: Path, count: int, seed: int, **changes: object) -> Path:
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        angle = rng.uniform(0, 2 * np.pi)
        is_hard = np.cos(angle) > 0
        right = {"small": bool(rng.random() < (0.2 if is_hard else 0.9)), "large": bool(rng.random() < 0.9)}
        lines.append({"prompt": f"question {angle:.6f}", "kind": ("math", "code")[number % 2], **right, **changes})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def invoke() -> Callable[..., Result]:
    def call(*words: object) -> Result:
        return CliRunner().invoke(cli, ["route", *map(str, words)])

    return call


KEYS = ("--weak", "small", "--strong", "large")


def test_a_route_is_fitted_and_holds_for_questions_that_it_has_not_seen(invoke: Callable[..., Result], tmp_path: Path) -> None:
    seen, unseen = write(tmp_path / "seen.jsonl", 400, seed=1), write(tmp_path / "unseen.jsonl", 400, seed=2)
    fitted = invoke("fit", seen, *KEYS, "--group", "kind")
    assert fitted.exit_code == 0, fitted.output
    rows = [line.split("  ")[0] for line in fitted.output.splitlines()]
    assert rows[1:6] == ["all", "code", "math", "math, fitted to code", "code, fitted to math"]
    route = read_route(tmp_path / "seen.jsonl.route.json")
    assert len(set(route.thresholds)) > 10
    told = invoke("eval", unseen, *KEYS, "--route", tmp_path / "seen.jsonl.route.json", "--share", "0.5")
    assert told.exit_code == 0, told.output
    apgr = float(told.output.splitlines()[1].split("(")[1].split()[-1])
    assert apgr > 0.7
    assert "sends 5" in told.output or "sends 4" in told.output
    far = float(re.findall(r"Their gains are ([\d.]+) from those of the fit", told.output)[0])
    assert 0 < far < 0.12  # 1.36 * sqrt(1 / 400 + 1 / 200) = 0.118 in 19 of 20 cases, if nothing has changed


def test_the_table_explains_figures_without_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    strong = (np.arange(50) < 31).astype(float)
    for num_wrong, says in (21, True), (45, False):
        weak = (np.arange(50) >= num_wrong).astype(float)
        show([("all", Answers([""] * 50, [[]] * 50, [""] * 50, weak, strong), strong)])
        out = capsys.readouterr().out
        assert ("(-): no interval, because the strong model is not better" in out) == says, out


def test_a_cascade_is_fitted_to_the_first_tokens_of_the_small_model(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say which questions are hard here, as the text does."""
    asked = []

    def begin(model: str, chats: Sequence[list[dict]], num_tokens: int) -> list[list[float]]:
        asked.append((model, num_tokens, len(chats)))
        return [[np.cos(float(chat[0]["content"].split()[-1])) - 2.0] * num_tokens for chat in chats]

    monkeypatch.setattr("penstock.cli.route.begin", begin)
    seen, unseen = write(tmp_path / "seen.jsonl", 400, seed=1), write(tmp_path / "unseen.jsonl", 100, seed=2)
    fitted = invoke("fit", seen, *KEYS, "--cascade", "tiny", "--window", "5", "-o", tmp_path / "r.json")
    assert fitted.exit_code == 0, fitted.output
    route = read_route(tmp_path / "r.json")
    assert route.cascade is not None
    assert (route.embedder, route.cascade.starter, route.cascade.window) == ("minilm", "tiny", 5)
    assert route.digests == {"minilm": "digest of minilm", "tiny": "digest of tiny"}
    told = invoke("eval", unseen, *KEYS, "--route", tmp_path / "r.json")
    assert told.exit_code == 0, told.output
    assert "small begins " in told.output
    assert asked == [("tiny", 5, 400), ("tiny", 5, 100)]


def test_scores_for_the_simulation_have_gains_tokens_and_results(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.route.begin", lambda _model, chats, num: [[-0.5] * num for _ in chats])
    usage = {
        name: {"prompt_tokens": 7, "completion_tokens": num, "total_tokens": 0} for name, num in (("small", 3), ("large", 4))
    }
    seen = write(tmp_path / "seen.jsonl", 100, seed=1, usage=usage, prefix="all", prefix_tokens=5)
    assert invoke("fit", seen, *KEYS, "--cascade", "tiny", "-o", tmp_path / "r.json").exit_code == 0
    told = invoke("eval", seen, *KEYS, "--route", tmp_path / "r.json", "--scores", tmp_path / "scores.jsonl")
    assert told.exit_code == 0, told.output
    questions = read_scores(tmp_path / "scores.jsonl")
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [one.weak for one in questions] == [Answer(7, 3, float(line["small"])) for line in lines]
    assert [one.strong for one in questions] == [Answer(7, 4, float(line["large"])) for line in lines]
    assert {(one.prefix, one.num_prefix_tokens) for one in questions} == {("all", 5)}
    assert len({one.gain for one in questions}) > 50
    assert all(isinstance(one.start_gain, float) for one in questions)
    bare = write(tmp_path / "bare.jsonl", 100, seed=1)
    monkeypatch.setattr("penstock.cli.route.embed", None)  # before anything is embedded
    told = invoke("eval", bare, *KEYS, "--route", tmp_path / "r.json", "--scores", tmp_path / "other.jsonl")
    assert "line 1: it lacks the tokens of the two answers" in str(told.exception)


def test_questions_that_repeat_teach_nothing(invoke: Callable[..., Result], tmp_path: Path) -> None:
    """Their copies would be seen by the fit that judges them."""
    rng = np.random.default_rng(3)
    angles = rng.uniform(0, 2 * np.pi, 100)
    lines = [
        {"prompt": f"question {angle:.6f}", "small": bool(rng.random() < 0.5), "large": bool(rng.random() < 0.7)}
        for angle in angles
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines * 5)))
    output = invoke("fit", path, *KEYS).output
    assert float(output.splitlines()[1].split("(")[1].split()[-1]) < 0.68, output


def test_a_group_without_a_gain_has_no_figures_and_stops_nothing(invoke: Callable[..., Result], tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", 200, seed=4).read_text().splitlines()
    lines += write(tmp_path / "b.jsonl", 60, seed=5, small=True, large=True, kind="easy").read_text().splitlines()
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(lines))
    fitted = invoke("fit", path, *KEYS, "--group", "kind", "-o", tmp_path / "r.json")
    assert fitted.exit_code == 0, fitted.output
    [easy] = [line for line in fitted.output.splitlines() if line.startswith("easy ")]
    assert easy.split()[-3:] == ["-", "-", "-"]
    assert (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("count", "keys", "cause"),
    [
        (49, KEYS, "has 49 questions"),
        (60, ("--weak", "large", "--strong", "small"), "The quality of the strong model is"),
        (60, ("--weak", "tiny", "--strong", "large"), "line 1: 'tiny' is not true, false or a number"),
    ],
)
def test_a_file_that_teaches_nothing_is_refused(
    count: int, keys: tuple[str, ...], cause: str, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    refused = invoke("fit", write(tmp_path / "a.jsonl", count, seed=6), *keys)
    assert refused.exit_code != 0
    assert cause in f"{refused.output}{refused.exception}"


def test_a_confidence_is_judged_without_a_fit(invoke: Callable[..., Result], tmp_path: Path) -> None:
    """Ten answers have a confidence of n fifths, and 2n of them are right."""
    usage = {name: {"prompt_tokens": 7, "completion_tokens": 3} for name in ("small", "large")}
    lines = [
        {"prompt": f"{fifths} {nth}", "small": nth < 2 * fifths, "large": True, "sure": fifths / 5, "usage": usage}
        for fifths in range(1, 6)
        for nth in range(10)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    told = invoke("eval", path, *KEYS, "--confidence", "sure", "--scores", tmp_path / "scores.jsonl")
    assert told.exit_code == 0, told.output
    rows = [line.split() for line in told.output.splitlines()]
    assert rows[1][0] == "all"
    assert rows[3:] == [
        ["0.200", "100.0%", "60.0%", "60.0%"],
        ["0.400", "80.0%", "70.0%", "76.0%"],
        ["0.600", "60.0%", "80.0%", "88.0%"],
        ["0.800", "40.0%", "90.0%", "96.0%"],
        ["1.000", "20.0%", "100.0%", "100.0%"],
    ]
    assert [one.confidence for one in read_scores(tmp_path / "scores.jsonl")] == [line["sure"] for line in lines]
    for options, cause in (((), "Give --route or --confidence"), (("--confidence", "large?"), "'large?' is not true")):
        refused = invoke("eval", path, *KEYS, *options)
        assert cause in f"{refused.output}{refused.exception}"
