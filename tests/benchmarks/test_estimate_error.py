"""The benchmark divides measured by estimated times, step by step."""

from __future__ import annotations

import estimate_error
import hardware_steps
import pytest

from penstock.lab.hardware import known_hardware
from penstock.lab.sizing import roofline, speeds


def test_steps_that_all_take_twice_the_estimate_are_two() -> None:
    size = hardware_steps.llama_8b()
    estimated = roofline(size, speeds(size, known_hardware()["L4"]))
    found = estimate_error.ratios(estimated.scaled(2.0), estimated)
    assert len(found) == 60
    assert list(found.values()) == [pytest.approx(2.0, rel=1e-6)] * 60
