"""The options that `run` and `chat` share: sampling, the system message, statistics. Declares and collects; never generates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from penstock.cli.options import config_options
from penstock.cli.session import SamplingChoices
from penstock.config import Config
from penstock.config.components import config_from
from penstock.types.sampling import MIN_TEMPERATURE

_Command = TypeVar("_Command", bound=Callable[..., Any])

MAX_TOP_K = 2**31 - 1
"""As in the server."""


class NumberRange(click.FloatRange):
    """A range that "nan" is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return float(number)


class NotEmpty(click.ParamType[str]):
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty, so every answer would end before it begins.", param, ctx)
        return str(value)


_OPTIONS = (
    click.option("--system", metavar="TEXT", help="System message."),
    click.option("--max-tokens", type=click.IntRange(1), show_default="what the context has room for", help="Longest answer."),
    click.option("--temperature", type=NumberRange(0, 2), default=0.7, show_default=True, help="0 always takes the likeliest."),
    click.option(
        "--top-p", type=NumberRange(0, 1, min_open=True), default=1.0, show_default=True, help="Share of probability kept."
    ),
    click.option("--top-k", type=click.IntRange(0, MAX_TOP_K), default=0, show_default=True, help="Tokens kept; 0 keeps all."),
    click.option("--min-p", type=NumberRange(0, 1), default=0.0, show_default=True, help="Least share of the likeliest."),
    click.option("--seed", "answer_seed", type=int, show_default="drawn", help="Same seed, same answer."),
    click.option(
        "--stop", type=NotEmpty(), multiple=True, metavar="TEXT", help="End the answer at this text; may be repeated."
    ),
    click.option("--stats", is_flag=True, help="Tokens and times on stderr."),
)


def talk_options(command: _Command) -> _Command:
    """Adds the options of a talk, then the settings of the engine below it."""
    command = config_options("model", "kv", "backend", without=("served_model_name", "kv_watermark", "kv_eviction"))(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def talk_config(values: Mapping[str, Any]) -> Config:
    """The engine for one reader: a single row, so that the KV cache is no larger than one conversation."""
    from dataclasses import replace

    config = config_from(values)
    return replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))


def sampling_choices(values: Mapping[str, Any]) -> SamplingChoices:
    """What the sampling options say."""
    if 0 < values["temperature"] < MIN_TEMPERATURE:
        raise click.BadParameter(f"0 is greedy; otherwise at least {MIN_TEMPERATURE}.", param_hint="'--temperature'")
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    return SamplingChoices(seed=values["answer_seed"], **{name: values[name] for name in names})
