"""The arms of a recording side by side: figures of requests that are known, and what is noise and what is not."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.bench_results import compare
from penstock.lab.arms import ArmsCompared, compare_arms, sections_of_arms
from penstock.lab.recording import RecordingError, open_recording
from penstock.lab.report import as_text
from penstock.testing.hash_executor import DEFAULT_CAPACITY

MS = 1_000_000
TEST: dict[str, Any] = {"share": 0.5, "by": "request", "tenants": 0, "differences": {"reserve": [None, "predicted"]}}


def write(path: Path, lines: list[dict[str, Any]], test: dict[str, Any] | None = TEST, part: int = 0) -> Path:
    header = {
        "kind": "header",
        "format": "penstock-recording",
        "version": 1,
        "recording": "abc",
        "part": part,
        "began": "2026-11-22T00:00:00.000+00:00",
        "block_size": 16,
        "model": "toy",
        "machine": {},
        "config": "c0ffee",
        "settings": {},
        "capacity": asdict(DEFAULT_CAPACITY),
        "depth": 1,
        "has_prefix_caching": True,
        "has_tier": False,
    } | ({} if test is None else {"arms": test})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *lines))
    path.write_text(text)
    return path


def life(
    number: int,
    arm: str,
    at_ms: float,
    first_ms: float,
    end_ms: float,
    *,
    reason: str = "stop",
    output: int = 11,
    why: str = "",
) -> list[dict[str, Any]]:
    """The lines of one request; `first_ms` and `end_ms` from its arrival."""
    arrival = int(at_ms * MS)
    begin = {"kind": "request", "id": number, "arrival": arrival, "queued": arrival, "prompt": 5, "max": 99, "tenant": 0}
    end = {
        "kind": "end",
        "id": number,
        "at": arrival + int(end_ms * MS),
        "reason": reason,
        "first": arrival + int(first_ms * MS),
        "output": 11,
        "cached": 0,
        "preempted": 0,
    }
    return [begin | {"arm": arm}, end | ({"why": why} if why else {})]


def traffic(factor: float, num: int = 1200, seed: int = 1, refused_b: float = 0.0, swing: float = 0.0) -> list[dict[str, Any]]:
    """Requests of both arms by chance; those of arm B take `factor` as long, and all by `swing` more or less over the run."""
    rng = random.Random(seed)  # repeatable on purpose
    lines: list[dict[str, Any]] = []
    for number in range(num):
        arm, scale = rng.choice([("A", 1.0), ("B", factor)])
        scale *= 1 + swing * math.sin(math.tau * number / num)
        if arm == "B" and rng.random() < refused_b:
            lines.append({"kind": "door", "at": number * 50 * MS, "tenant": 0, "arm": "B", "why": "queue_delay"})
            continue
        first = scale * rng.lognormvariate(4, 0.3)
        lines += life(number + 1, arm, number * 50, first, first + scale * 10 * rng.lognormvariate(3, 0.2))
    return lines


def compared_of(path: Path, lines: list[dict[str, Any]], **test: Any) -> ArmsCompared:
    return compare_arms(open_recording(write(path, lines, {**TEST, **test})))


def test_figures_are_those_of_the_requests(tmp_path: Path) -> None:
    """Arm A: TTFT 1, 2, ..., 100 ms and TPOT 10 ms; arm B: three times that."""
    lines = []
    for number in range(200):
        scale, nth = (1, number // 2 + 1) if number % 2 == 0 else (3, number // 2 + 1)
        lines += life(number + 1, "AB"[number % 2], number, scale * nth, scale * nth + scale * 100)
    step = {
        "kind": "step",
        "id": 0,
        "at": 4 * MS,
        "end": 5 * MS,
        "rows": [[1, 5, 0, 1]],
        "parts": [],
        "state": [1, 0, 9, 0],
    }
    found = compared_of(tmp_path / "r", [lines[0], step, *lines[1:]])
    assert found.compared is not None
    [comparison] = found.compared.comparisons
    figures = {one.figure: (one.before, one.after) for one in comparison.differences}
    assert figures["ttft p50"] == pytest.approx((50, 150), rel=0.011)  # between the 50th and the 51st
    assert figures["ttft p90"] == pytest.approx((90, 270), rel=0.011)
    assert figures["ttft p99"] == pytest.approx((99, 297), rel=0.011)
    assert figures["ttft mean"] == pytest.approx((50.5, 151.5))
    assert figures["tpot p50"] == pytest.approx((10, 30))
    assert figures["e2e p50"] == pytest.approx((150.5, 451.5))
    assert not any(one.is_rate for one in comparison.differences)
    assert found.arms[0].records[0].queue_ns == 4 * MS
    assert {one.end: one.counts for one in found.ends} == {"answered": (100, 100)}


def test_a_difference_is_found(tmp_path: Path) -> None:
    found = compared_of(tmp_path / "r", traffic(0.8))
    assert found.compared is not None
    shown = {one.figure: one for one in found.compared.comparisons[0].differences}
    assert all(shown[name].is_more_than_noise and not shown[name].is_worse for name in ("ttft p50", "tpot mean", "e2e p50"))
    change = shown["ttft mean"].change
    assert change is not None
    assert change.low is not None
    assert change.high is not None
    assert change.low < -0.2 < change.high


def test_a_quantile_of_few_requests_is_not_judged(tmp_path: Path) -> None:
    """Two of the 200 requests of an arm are above p99."""
    found = compared_of(tmp_path / "r", traffic(3.0, num=400))
    assert found.compared is not None
    words = {one.figure: one.words for one in found.compared.comparisons[0].differences}
    assert words["ttft p99"] == "too few requests to say"
    assert words["ttft p90"].startswith("slower by ")


def test_equal_arms_rarely_differ(tmp_path: Path) -> None:
    """With the correction for all figures, one test in twenty may show anything."""
    num_false = 0
    for seed in range(20):
        found = compared_of(tmp_path / "r", traffic(1.0, num=300, seed=seed))
        assert found.compared is not None
        num_false += any(one.is_more_than_noise for one in found.compared.comparisons[0].differences)
    assert num_false <= 3


def test_more_refusals_are_found(tmp_path: Path) -> None:
    found = compared_of(tmp_path / "r", traffic(1.0, refused_b=0.2))
    refused = next(one for one in found.ends if one.end == "refused")
    assert refused.counts[0] == 0
    assert refused.is_more_than_noise
    assert refused.difference.low is not None
    assert refused.difference.high is not None
    assert refused.difference.low < 0.2 < refused.difference.high
    few = compared_of(tmp_path / "r", traffic(1.0, num=60, refused_b=0.03))
    assert not any(one.is_more_than_noise for one in few.ends)


def test_a_rush_in_both_arms_hides_no_difference_that_chance_can_not_make(tmp_path: Path) -> None:
    """Few draws by their order, as all refusals come together; requests of arm B alone are refused, and arms are by chance."""
    lines = [line for number in range(70) for line in life(number + 1, "A", number, 5, 50)]
    lines += [line for number in range(4) for line in life(number + 100, "B", number, 5, 50)]
    lines += [{"kind": "door", "at": (9 + number) * MS, "tenant": 0, "arm": "B", "why": "queue_delay"} for number in range(60)]
    refused = next(one for one in compared_of(tmp_path / "r", lines).ends if one.end == "refused")
    assert refused.is_more_than_noise
    assert refused.words.startswith("+94 points [")
    by_tenant = next(one for one in compared_of(tmp_path / "r", lines, tenants=1).ends if one.end == "refused")
    assert by_tenant.words == "too few requests to say"


def test_every_end_is_told_by_its_name(tmp_path: Path) -> None:
    ends = [("stop", ""), ("length", ""), ("abort", ""), ("abort", "queue_timeout"), ("error", ""), ("rejected", "invalid")]
    lines = [line for i, (reason, why) in enumerate(ends) for line in life(i + 1, "A", i, 1, 2, reason=reason, why=why)]
    lines += life(7, "B", 9, 1, 2)
    lines.append(life(8, "B", 9, 1, 2)[0])
    lines += life(9, "", 9, 1, 2)  # no client's: it has no arm
    found = compared_of(tmp_path / "r", [*lines, {"kind": "lost", "count": 3}])
    counts = {one.end: one.counts for one in found.ends}
    assert counts == {"answered": (2, 1), "refused": (1, 0), "timed out": (1, 0), "cancelled": (1, 0), "failed": (1, 0)}
    told = " ".join(found.warnings)
    assert "In arm B, 1 request had not ended" in told
    assert "lacks 3 reports" in told


def test_what_makes_a_comparison_doubtful_is_told(tmp_path: Path) -> None:
    lines = traffic(1.0, num=40)
    assert "share one queue, one KV cache" in compared_of(tmp_path / "r", lines).warnings[0]
    assert any("different tenants" in one for one in compared_of(tmp_path / "r", lines, tenants=2).warnings)
    assert any("with few users" in one for one in compared_of(tmp_path / "r", lines, by="user").warnings)
    alone = compared_of(tmp_path / "r", [line for line in lines if line.get("arm") != "B"])
    assert alone.compared is None
    assert any("No request of arm B ended" in one for one in alone.warnings)
    assert "A/B test" in as_text(list(sections_of_arms(alone)))


def test_a_recording_without_a_test_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"has no A/B test\. Record one with `penstock serve --ab FILE --record FILE`"):
        compare_arms(open_recording(write(tmp_path / "r", [], None)))


def test_a_broken_header_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="line 1"):
        open_recording(write(tmp_path / "r", [], {**TEST, "differences": {"reserve": "predicted"}}))


def test_the_command_prints_both_arms(tmp_path: Path) -> None:
    path = write(tmp_path / "r", traffic(2.0, num=400, refused_b=0.1))
    result = CliRunner().invoke(compare, ["--arms", str(path)])
    assert result.exit_code == 0, result.output
    assert "Arm A: the server's settings. Arm B: the settings of the test." in result.output
    for words in ("reserve", "predicted", "arm a", "arm b", "ttft p99", "refused", "slower by"):
        assert words in result.output.lower()
    assert CliRunner().invoke(compare, ["--arms", str(path), "--fail-if-worse", "5%"]).exit_code == 1
    both = CliRunner().invoke(compare, ["--arms", str(path), str(path)])
    assert both.exit_code == 2
    assert "leave the other files out" in both.output


def gated(path: Path, lines: list[dict[str, Any]], **test: Any) -> str:
    """The cause that `--fail-if-worse 5%` fails with; empty if it passes."""
    result = CliRunner().invoke(compare, ["--arms", str(write(path, lines, {**TEST, **test})), "--fail-if-worse", "5%"])
    assert result.exit_code == (1 if result.exception else 0)
    return str(result.exception or "")


@pytest.mark.parametrize("tenants", [0, 1])
def test_an_arm_that_refuses_everything_is_worse(tmp_path: Path, tenants: int) -> None:
    assert "requests answered (-100 points" in gated(tmp_path / "r", traffic(1.0, refused_b=1.0), tenants=tenants)


def test_an_arm_that_answers_fewer_is_worse(tmp_path: Path) -> None:
    assert "1 figure worse by more than 5%: requests answered (-" in gated(tmp_path / "r", traffic(1.0, refused_b=0.2))
    assert not gated(tmp_path / "r", traffic(1.0, refused_b=0.02)), "by less than 5 %"
    other = {"A": "B", "B": "A"}
    swapped = [line | {"arm": other[line["arm"]]} if "arm" in line else line for line in traffic(1.0, refused_b=0.2)]
    assert not gated(tmp_path / "r", swapped), "it is arm A that answers fewer"


def test_what_can_not_be_compared_does_not_pass(tmp_path: Path) -> None:
    lines = traffic(1.0, num=60)
    assert "too few requests were answered" in gated(tmp_path / "r", [line for line in lines if line.get("arm") != "B"])
    assert "too few requests were answered" in gated(tmp_path / "r", life(1, "A", 0, 1, 2) + life(2, "B", 0, 1, 2))


def test_queue_times_of_requests_whose_begin_is_lost_are_not_known(tmp_path: Path) -> None:
    """Their first step in the file is a later one of theirs."""
    [begin, end], [late, late_end] = life(1, "A", 0, 5, 900), life(2, "A", 600, 5, 50)
    step = {"kind": "step", "end": 701 * MS, "rows": [[1, 1, 9, 1], [2, 5, 0, 1]], "parts": [], "state": [2, 0, 9, 0]}
    steps = [{**step, "id": 7, "at": 700 * MS}, {**step, "id": 8, "at": 702 * MS}]
    lines = [{**begin, "again": True}, late, *steps, late_end, end]
    found = compare_arms(open_recording(write(tmp_path / "r", lines, part=3)))
    assert [record.queue_ns for record in found.arms[0].records] == [100 * MS, None]
    assert "The begin of the recording is lost (3 parts): only what came later is compared." in found.warnings
