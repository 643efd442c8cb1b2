"""A learned route: it finds what can be learned, its figures are right, and a broken file is named."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from penstock.routes.answers import Answers, read_answers
from penstock.routes.curve import apgr, figures_of
from penstock.routes.learned import SHARES, Fit, LearnedRoute, fit, inputs_of, read_route, thresholds_of
from penstock.routes.unseen import PENALTIES, fit_route, gains_unseen
from penstock.types.errors import ConfigError

WIDTH = 4
THRESHOLDS = tuple(1 - share for share in SHARES)


def answers_of(prompts: list[str], weak: np.ndarray, strong: np.ndarray) -> Answers:
    return Answers(prompts, [[]] * len(prompts), [""] * len(prompts), weak, strong)


def made_up(count: int, seed: int) -> tuple[np.ndarray, Answers]:
    """Questions whose vector says which of them only the strong model answers rightly."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, WIDTH))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    is_hard = vectors[:, 0] > 0
    weak = np.where(is_hard, rng.random(count) < 0.2, rng.random(count) < 0.9).astype(float)
    strong = (rng.random(count) < 0.9).astype(float)
    answers = answers_of([f"question {number}" for number in range(count)], weak, strong)
    return inputs_of(vectors, answers.prompts), answers


def test_it_learns_which_questions_need_the_strong_model() -> None:
    route = fit(*made_up(2000, seed=1), 10.0)
    inputs, answers = made_up(1000, seed=2)
    gains = route.gains(inputs)
    assert gains[inputs[:, 0] > 0.3].min() > gains[inputs[:, 0] < -0.3].max()
    told = figures_of(answers, gains)
    assert told.apgr > 0.7
    assert told.apgr_interval[0] < told.apgr < told.apgr_interval[1]
    assert told.share_for_80 < 0.5
    assert told.share_for_80 < told.share_for_point < 0.8
    assert told.half > (told.weak + told.strong) / 2 + 0.1


def test_without_a_surely_better_strong_model_figures_have_no_interval() -> None:
    strong = (np.arange(50) < 31).astype(float)
    told = figures_of(answers_of(["q"] * 50, (np.arange(50) >= 21).astype(float), strong), strong)
    assert told.strong > told.weak
    assert math.isfinite(told.apgr)
    assert all(map(math.isnan, (*told.apgr_interval, *told.share_for_80_interval, *told.share_for_point_interval)))


def test_lots_gain_half_and_an_oracle_gains_all_with_the_share_that_differs() -> None:
    count = 4000
    weak, strong = np.zeros(count), (np.arange(count) % 4 == 0).astype(float)
    answers = answers_of(["q"] * count, weak, strong)
    by_lot = figures_of(answers, np.random.default_rng(0).random(count))
    assert by_lot.apgr == pytest.approx(0.5, abs=0.02)
    assert by_lot.half == pytest.approx(0.125, abs=0.01)
    oracle = figures_of(answers, strong)
    assert (oracle.apgr, oracle.share_for_80) == (pytest.approx(1 - 0.25 / 2, abs=1e-3), pytest.approx(0.2, abs=1e-3))
    assert oracle.half == 0.25


def test_a_share_of_the_questions_reaches_its_threshold() -> None:
    gains = np.random.default_rng(3).normal(size=2000)
    fitted = Fit(np.zeros(2), np.ones(2), np.zeros(7), np.zeros(7))
    route = LearnedRoute(embedder="toy", by_question=fitted, thresholds=thresholds_of(gains))
    for share in (*SHARES, 0.33):
        assert (gains >= route.threshold(share)).mean() == pytest.approx(share, abs=0.01)
    assert (np.array([-1e9, 1e9]) >= route.threshold(1.0)).all()
    assert not (np.array([-1e9, 1e9]) >= route.threshold(0.0)).any()


def test_equal_gains_say_nothing() -> None:
    count = 4000
    answers = answers_of(["q"] * count, np.zeros(count), (np.arange(count) < count // 2).astype(float))
    assert figures_of(answers, np.zeros(count)).apgr == pytest.approx(0.5, abs=0.03)


def test_a_strong_model_that_gains_nothing_has_no_apgr() -> None:
    told = figures_of(answers_of(["q"] * 60, np.ones(60), np.ones(60)), np.arange(60.0))
    assert np.isnan(told.apgr)
    assert (told.weak, told.strong, told.half) == (1.0, 1.0, 1.0)


def test_a_route_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    inputs, answers = made_up(300, seed=4)
    vectors, starts = inputs[:, :WIDTH], [[-0.1, -0.5]] * len(answers)
    for begun in (None, starts):
        route, _ = fit_route(answers, vectors, "toy", begun, starter="small", window=8)
        route.write(tmp_path / "route.json")
        again = read_route(tmp_path / "route.json")
        assert (again.embedder, again.thresholds, again.by_question.width) == ("toy", route.thresholds, WIDTH)
        assert (again.by_question.gains(inputs) == route.by_question.gains(inputs)).all()
        with pytest.raises(ConfigError, match="The vectors have 3 numbers, and the route was fitted to 4"):
            again.by_question.gains(inputs[:, 1:])
    assert again.cascade is not None
    assert route.cascade is not None
    assert (again.cascade.starter, again.cascade.window, again.cascade.margin) == ("small", 8, route.cascade.margin)
    read = inputs_of(vectors, answers.prompts, starts)
    assert (again.cascade.fit.gains(read) == route.cascade.fit.gains(read)).all()


def test_the_first_tokens_tell_what_the_question_does_not() -> None:
    """Half of the answers begin with a token that the weak model doubts, and are wrong."""
    count, rng = 1000, np.random.default_rng(7)
    is_doubted = rng.random(count) < 0.5
    starts = [[-0.1, -3.0 if doubted else -0.2] for doubted in is_doubted]
    prompts = [f"question {number}" for number in range(count)]
    answers = answers_of(prompts, (~is_doubted).astype(float), np.ones(count))
    vectors = rng.normal(size=(count, WIDTH))
    with_starts = figures_of(answers, fit_route(answers, vectors, "toy", starts)[1])
    without = figures_of(answers, fit_route(answers, vectors, "toy")[1])
    assert with_starts.apgr > 0.74 > 0.6 > without.apgr


def test_an_answer_without_tokens_and_an_impossible_token_have_signs() -> None:
    found = inputs_of(np.zeros((2, 1)), ["a", "b"], [[], [-np.inf, 0.0]])
    assert found[:, -3:].tolist() == [[0.0, 0.0, 0.0], [-25.0, -50.0, pytest.approx(np.log(3))]]


def test_the_penalty_is_the_one_that_suits_the_questions() -> None:
    """Large weights would follow chance where there are few questions."""
    rng = np.random.default_rng(8)
    vectors = rng.normal(size=(60, 40))
    weak = (vectors[:, 0] + rng.normal(size=60) < 0).astype(float)
    answers = answers_of([f"question {number}" for number in range(60)], weak, np.ones(60))
    inputs = inputs_of(vectors, answers.prompts)
    found = [apgr(answers, gains_unseen(inputs, answers, penalty)) for penalty in PENALTIES]
    _, gains = fit_route(answers, vectors, "toy")
    assert apgr(answers, gains) == max(found) > min(found)


def test_the_small_model_begins_where_its_first_tokens_can_change_something() -> None:
    """Half of the questions say by themselves that the small model is wrong."""
    rng, count = np.random.default_rng(9), 1000
    is_hopeless, is_doubted = rng.random((2, count)) < 0.5
    vectors = np.where(is_hopeless[:, None], 1.0, -1.0) * np.ones((count, 1)) + 0.01 * rng.normal(size=(count, 1))
    starts = [[-3.0 if doubted else -0.2] for doubted in is_doubted | is_hopeless]
    weak = (~is_hopeless & ~is_doubted).astype(float)
    answers = answers_of([f"question {number}" for number in range(count)], weak, np.ones(count))
    route, _ = fit_route(answers, vectors, "toy", starts, starter="small", window=1)
    gains = route.by_question.gains(inputs_of(vectors, answers.prompts))
    threshold = 0.3
    tried = np.array([route.tries(gain, threshold) for gain in gains])
    assert tried[~is_hopeless].all()
    assert not tried[is_hopeless].any()


def test_a_share_of_a_cascade_is_the_share_that_it_sends() -> None:
    """The question decides where the first tokens are not tried."""
    rng = np.random.default_rng(10)
    gains = rng.normal(scale=0.2, size=2000)
    moved = gains + rng.normal(scale=0.1, size=2000)
    margin = float(np.quantile(np.abs(moved - gains), 0.95))
    found = thresholds_of(gains, moved, margin)
    for share, threshold in zip(SHARES[1:-1], found[1:-1], strict=True):
        sent = np.where(np.abs(gains - threshold) < margin, moved, gains) >= threshold
        assert sent.mean() == pytest.approx(share, abs=0.01)


def test_a_constant_is_learned_whatever_the_penalty() -> None:
    answers = answers_of([f"question {number}" for number in range(60)], np.zeros(60), np.ones(60))
    inputs = inputs_of(np.random.default_rng(1).normal(size=(60, WIDTH)), answers.prompts)
    assert fit(inputs, answers, 10.0).gains(inputs).min() > 0.95


@pytest.mark.parametrize(
    ("place", "change", "cause"),
    [
        ((), {"format": 1}, "is not a route of format 2"),
        ((), {"embedder": None}, "it names no embedder"),
        ((), {"thresholds": list(SHARES)}, "can't have been fitted"),
        ((), {"thresholds": []}, "thresholds is not a list of 21 numbers"),
        ((), {"by_question": None}, "is not a route"),
        ((), {"digests": {"toy": 1}}, "its digests are not texts"),
        ((), {"quantiles": [[0.5], [0.6]]}, "its quantiles are not pairs of numbers"),
        ((), {"quantiles": []}, "its quantiles are not pairs of numbers"),
        ((), {"quantiles": [[0.5, "x"]]}, "is not a route"),
        (("by_question",), {"weak": [1.0]}, "is not a route"),
        (("by_question",), {"weak": None}, "is not a route"),
        (("by_question",), {"strong": "x"}, "is not a route"),
        (("by_question",), {"strong": [float("nan")] * 7}, "is not a route"),
        (("by_question",), {"scale": [0.0, 1.0]}, "can't have been fitted"),
        (("by_question",), {"scale": [1e-320, 1.0]}, "can't have been fitted"),
        (("by_question",), {"weak": [10**400] * 7}, "is not a route"),
        (("by_question",), {"weak": [1.0] * 8, "strong": [1.0] * 8}, "its two fits are of different vectors"),
        (("cascade",), {"starter": ""}, "it names no small model"),
        (("cascade",), {"window": 0}, "its window is not a number of tokens"),
        (("cascade",), {"window": 10**6}, "its window is not a number of tokens"),
        (("cascade",), {"margin": -1.0}, "its margin can't have been fitted"),
        (("cascade",), {"mean": [0.0] * 2}, "mean is not a list of 5 numbers"),
    ],
)
def test_a_broken_file_is_refused(place: tuple[str, ...], change: dict, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "route.json"
    inputs, answers = made_up(100, seed=5)
    fit_route(answers, inputs[:, :WIDTH], "toy", [[-0.5]] * 100, starter="small", window=8)[0].write(path)
    whole = json.loads(path.read_text())
    part = whole
    for key in place:
        part = part[key]
    part.update(change)
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=cause):
        read_route(path)


def test_a_file_that_can_not_be_written_or_read_is_named(tmp_path: Path) -> None:
    inputs, answers = made_up(100, seed=5)
    route, _ = fit_route(answers, inputs[:, :WIDTH], "toy")
    path = tmp_path / "no" / "route.json"
    with pytest.raises(ConfigError, match=r"no/route\.json can't be written: No such file or directory\."):
        route.write(path)
    with pytest.raises(ConfigError, match=r"no/route\.json can't be read: .*No such file or directory"):
        read_route(path)
    path = tmp_path / "route.json"
    for content, words in ((b"{", "Expecting"), (b"\xff", "can't decode byte"), (b"[" * 100_000, "recursion")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_route(path)


def test_answers_are_read_with_their_groups(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "small": True, "large": 0.5, "kind": "math/easy"}, {"prompt": "b", "small": 0, "large": 1}]
    text = "\n".join(map(json.dumps, lines)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(text)
    for name in ("a.jsonl", "a.jsonl.gz"):
        found = read_answers(tmp_path / name, weak="small", strong="large", group="kind")
        assert (found.prompts, found.groups) == (["a", "b"], ["math", ""])
        assert (found.weak.tolist(), found.strong.tolist()) == ([1.0, 0.0], [0.5, 1.0])


def test_a_question_may_be_a_conversation(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines = [{"messages": chat, "weak": 0, "strong": 1}, {"prompt": "d", "weak": 0, "strong": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_answers(tmp_path / "a.jsonl", weak="weak", strong="strong")
    assert found.prompts == ["c", "d"]
    assert found.chats == [chat, [{"role": "user", "content": "d"}]]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: it is not a JSON object"),
        ("[" * 500_000, "line 2: "),
        ('{"weak": 1, "strong": 1}', "line 2: it has no text"),
        ('{"messages": "x", "weak": 1, "strong": 1}', "line 2: it has no text `prompt`, nor `messages`"),
        ('{"messages": [{"role": "user"}], "weak": 1, "strong": 1}', "line 2: it has no text `prompt`, nor `messages`"),
        ('{"prompt": "x", "weak": 2, "strong": 1}', "line 2: 'weak' is not true, false or a number from 0 to 1"),
        ('{"prompt": "x", "weak": NaN, "strong": 1}', "line 2: 'weak'"),
        ('{"prompt": "x", "weak": 1}', "line 2: 'strong'"),
        ("\x00" * (1 << 20), "line 2: it has more than 1048576 characters"),
    ],
)
def test_a_bad_line_is_named(line: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "weak": 1, "strong": 1}\n' + line)
    with pytest.raises(ConfigError, match=cause):
        read_answers(path, weak="weak", strong="strong")


def test_a_group_that_no_question_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "weak": 1, "strong": 1}')
    with pytest.raises(ConfigError, match="no question has the key 'kind'"):
        read_answers(tmp_path / "a.jsonl", weak="weak", strong="strong", group="kind")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_questions_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="has no questions"):
        read_answers(tmp_path / "a.jsonl", weak="weak", strong="strong")


def test_a_cut_archive_and_other_bytes_are_errors_that_name_the_file(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "x", "weak": 1, "strong": 1}\n' * 1000)
    bent = whole[:40] + bytes(byte ^ 0x55 for byte in whole[40:60]) + whole[60:]
    files = {"a.jsonl.gz": whole[:-20], "b.jsonl.gz": b"not gzip", "c.jsonl": b"\xff\xfe{}", "d.jsonl.gz": bent}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            read_answers(tmp_path / name, weak="weak", strong="strong")
