"""The options of a workload, as every command gets them."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from penstock.cli.workload_options import workload_options
from penstock.lab.workload_choice import WorkloadChoice


@click.command()
@click.option("--other", default=1)
@workload_options
def command(other: int, choice: WorkloadChoice) -> None:
    print(other, choice)


def chosen(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    return result.output.strip()


def test_the_defaults_are_those_of_the_choice() -> None:
    assert chosen() == f"1 {WorkloadChoice()}"


def test_each_field_has_an_option() -> None:
    choice = WorkloadChoice(
        workload="chat",
        requests=7,
        arrivals="stages",
        rate=1.0,
        rate_to=2.0,
        cv=3.0,
        burst_s=(4.0, 5.0),
        stages=((2.0, 60.0), (10.0, 30.0)),
        speed=6.0,
        divide_lengths=7,
        max_input_tokens=8,
        max_output_tokens=9,
        input_tokens="10",
        output_tokens="11-12",
        prefix_tokens=13,
        prefix_groups=14,
        tenants="a=1",
        cancel_share=0.5,
        sessions=15,
        think_time_s=16.0,
        seed=17,
    )
    default = WorkloadChoice()
    assert all(getattr(choice, field.name) != getattr(default, field.name) for field in fields(choice)), "tested"
    line = (
        "--other 2 --workload chat --requests 7 --arrivals stages --rate 1 --rate-to 2 --cv 3 --burst-s 4 5 "
        "--stages 2x60,10x30 "
        "--speed 6 --divide-lengths 7 --max-input-tokens 8 --max-output-tokens 9 --input-tokens 10 "
        "--output-tokens 11-12 --prefix-tokens 13 --prefix-groups 14 "
        "--tenants a=1 --cancel-share 0.5 --sessions 15 --think-time 16 --seed 17"
    )
    assert chosen(*line.split()) == f"2 {choice}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--stages", "2"], "'2' is not a stage"), (["--arrivals", "now"], "'now' is not one of"), (["--requests", "0"], "x>=1")],
)
def test_what_can_not_be_read_is_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in chosen(*arguments)


def test_the_help_names_the_kinds_of_arrivals() -> None:
    assert "[closed|constant|poisson|gamma|ramp|bursts|stages]" in chosen("--help")
