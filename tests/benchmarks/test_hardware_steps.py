"""The tables of GPUs that come with Penstock are what the benchmark writes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import hardware_steps
import pytest

from penstock.lab.cost_files import load_cost
from penstock.lab.hardware import known_hardware
from penstock.lab.sizing import roofline, speeds
from penstock.types.plan import StepShape


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_tables_that_come_with_penstock_are_the_rooflines(gpu: str) -> None:
    """Labelled as estimates, and near the roofline between the steps that are listed, too."""
    found = load_cost(Path(f"{gpu.lower()}-llama-8b"))
    assert found.is_estimated
    assert found.model == hardware_steps.llama_8b().name, "a plan for this model does not doubt it"
    assert "estimated, not measured" in found.words
    size, hardware = hardware_steps.llama_8b(), known_hardware()[gpu]
    assert (
        hardware_steps.lines(hardware, size)[-1]
        == files("penstock.lab").joinpath(f"{gpu.lower()}-llama-8b.csv").read_text().splitlines()[-1]
    ), "made anew: python benchmarks/hardware_steps.py"
    exact = roofline(size, speeds(size, hardware))
    for shape in (
        StepShape(((1, 500),) * 20, 20),
        StepShape(((1, 3000),) * 100, 100),
        StepShape(((1, 700),) * 300, 300),
        StepShape(((700, 100),), 1),
        StepShape((*(((1, 1500),) * 40), (1500, 0)), 40),
    ):
        assert found.cost.duration_ns(shape) == pytest.approx(exact.duration_ns(shape), rel=0.1)
