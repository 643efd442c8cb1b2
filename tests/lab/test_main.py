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
