"""`python -m penstock.lab`: what a named policy changes, said for both, and errors in words."""

from __future__ import annotations

import re

import pytest

from penstock.lab.__main__ import main


def figures(text: str, title: str, kind: str) -> list[float]:
    """The three quantiles of one line."""
    part = text[text.index(f"\n{title} ") :]
    return [float(word) for word in re.search(rf"^  {kind} +(.*)$", part, re.MULTILINE)[1].split()]  # type: ignore[index]


def test_a_named_policy_changes_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--policy", "srpf", "--policy-args", "{max_delay_ns = 20_000_000_000}", "--requests", "150", "--load", "1.5"])
    text = capsys.readouterr().out
    assert figures(text, "named", "short prompts")[1] < figures(text, "default", "short prompts")[1]
    assert figures(text, "named", "long prompts")[0] > figures(text, "default", "long prompts")[0]


def test_without_a_name_both_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--requests", "30"])
    _, default, named = capsys.readouterr().out.split("\n\n")
    assert default.partition("\n")[2].rstrip() == named.partition("\n")[2].rstrip()


def test_the_first_policy_of_the_call_is_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--blocks", "300", "--requests", "100"]
    main(["--victim", "latest", "--reserve", "chunk", *tight])
    header, default, _ = capsys.readouterr().out.split("\n\n")
    assert re.search(r"By --victim alone, [1-9]\d* requests", header)
    assert re.search(r"steps, [1-9]\d* preemptions", default), "the other policies hold on both sides"
    main(["--reserve", "chunk", *tight])
    header, _, named = capsys.readouterr().out.split("\n\n")
    assert re.search(r"By --reserve alone, [1-9]\d* requests", header)
    main(["--reserve", "chunk", "--victim", "cheapest", *tight])
    assert capsys.readouterr().out.split("\n\n")[2] == named, "cheapest is the preset's"


def test_a_victim_that_is_not_asked_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--victim", "latest", "--requests", "30"])
    assert "By --victim alone, 0 requests get" in (text := capsys.readouterr().out)
    assert "No victim was asked for. Less memory makes preemptions" in text


def test_requests_that_can_not_fit_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--requests", "30", "--blocks", "40"])
    assert re.search(r"\d+ requests were refused: .* raise --blocks", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "lifo"], "error: There is no order called 'lifo'. Valid: edf"),
        (["--policy", "./absent.py:Order"], "error: The order './absent.py:Order' was not found"),
        (["--budget-args", "{x = 1}"], "error: The budget 'itl' takes no argument x. It takes: slo_itl_ns"),
    ],
)
def test_errors_are_said_in_words(arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        main(arguments)
