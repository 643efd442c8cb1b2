"""Staged illnesses: `penstock doctor` names the cause, first or second, and finds nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.lab.doctor import Verdict
from support.doctor.illnesses import HEALTHY, SEEN, UNSEEN
from support.doctor.stage import Stage

ILL = {**SEEN, **UNSEEN}


@pytest.mark.parametrize("name", ILL)
def test_the_cause_is_named(name: str) -> None:
    diagnosis = ILL[name]().diagnose()
    assert diagnosis.verdict is Verdict.ILL
    assert name in [finding.rule.name for finding in diagnosis.findings[:2]]


@pytest.mark.parametrize("stage", HEALTHY)
def test_nothing_is_found_on_a_healthy_server(stage: Callable[[], Stage]) -> None:
    diagnosis = stage().diagnose()
    assert [finding.rule.name for finding in diagnosis.findings] == []
    assert diagnosis.verdict is Verdict.HEALTHY
