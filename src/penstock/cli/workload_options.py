"""Options that describe a workload, shared by the commands that send or simulate one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.lab.synthetic import NAMED
from penstock.lab.workload_choice import ARRIVALS, WorkloadChoice, parse_stages
from penstock.types.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from penstock.lab.traces import CountTokens

_Command = TypeVar("_Command", bound=Callable[..., Any])
_LENGTHS = "LENGTHS"


def workload_options(command: Callable[..., Any], *, without: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Decorate a command with the workload options, but those in `without`. It gets them as `choice`, a `WorkloadChoice`."""

    @functools.wraps(command)
    def with_choice(**values: Any) -> Any:
        chosen = {field.name: values.pop(field.name) for field in fields(WorkloadChoice) if field.name not in without}
        return command(choice=WorkloadChoice(**chosen), **values)

    decorated: Callable[..., Any] = with_choice
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    params = vars(decorated)["__click_params__"]
    params[:] = [param for param in params if param.name not in without]
    return decorated


def token_counter(workload: str, model: str, cache_folder: str | None) -> CountTokens | None:
    """Return a counter for the texts of a workload, or None if the model's tokenizer is not on this machine."""
    from penstock.config.components import config_from
    from penstock.deploy.factory import find_source
    from penstock.deploy.forecast import tokenizer_source
    from penstock.lab.prompts import counter_of
    from penstock.text.tokenizer import load_tokenizer

    if workload in NAMED:
        return None
    source = find_source(config_from({"model": model, "cache": cache_folder}))
    try:
        # Cached, since simulations of several rates or seeds read the file for each.
        return functools.cache(counter_of(load_tokenizer(tokenizer_source(source)))) if source.is_present else None
    except ModelError:
        return None


def _stages(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[float, float], ...]:
    try:
        return parse_stages(value) if value else ()
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _arrivals(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    del ctx, param
    return value or ""


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--workload",
        default="synthetic",
        show_default=True,
        metavar="NAME|FILE",
        help=f"{', '.join(NAMED)}; or a file: a trace of Azure or Mooncake, conversations of ShareGPT, a recording, prompts.",
    ),
    click.option("--requests", type=click.IntRange(min=1), help="Number of requests. Default: all of a file, else 100."),
    click.option("--rate", type=float, metavar="PER_S", help="Average requests per second; for a ramp, at its start."),
    click.option(
        "--arrivals",
        type=click.Choice(ARRIVALS),
        callback=_arrivals,
        help="When requests arrive. Default: what other options imply; poisson if only --rate is given; else the file's.",
    ),
    click.option("--cv", type=float, help="Coefficient of variation of gamma gaps; above 1 requests come in bursts."),
    click.option("--rate-to", type=float, metavar="PER_S", help="Requests per second at the end of a ramp."),
    click.option(
        "--burst-s", type=(float, float), metavar="ON OFF", help="Seconds with arrivals, then without.  [bursts: 5 15]"
    ),
    click.option(
        "--stages", metavar="RATExS,...", callback=_stages, help="As 2x60,10x30: 2 per second for 60 s, then 10 for 30 s."
    ),
    click.option("--speed", type=float, default=1.0, show_default=True, help="Divide all times: 2 is twice as fast."),
    click.option(
        "--divide-lengths", type=click.IntRange(min=1), default=1, show_default=True, help="Divide prompt and answer lengths."
    ),
    click.option("--max-input-tokens", type=click.IntRange(min=1), help="Cut longer prompts."),
    click.option("--max-output-tokens", type=click.IntRange(min=1), help="Cut longer answers."),
    click.option(
        "--input-tokens",
        default="",
        metavar=_LENGTHS,
        help="Made-up prompts: 512; 100-900; or 512~0.8, lognormal with mean and CV.",
    ),
    click.option("--output-tokens", default="", metavar=_LENGTHS, help="Made-up answers, likewise."),
    click.option(
        "--prefix-tokens",
        type=click.IntRange(min=0),
        default=0,
        help="Tokens before each made-up prompt that its group shares.",
    ),
    click.option(
        "--prefix-groups", type=click.IntRange(min=1), default=1, show_default=True, help="Groups that share such a prefix."
    ),
    click.option("--tenants", default="", metavar="NAME=WEIGHT,...", help="Such as a=7,b=1; or 4: four equal ones."),
    click.option("--cancel-share", type=float, default=0.0, help="Share of clients that go away during the answer, as 0.03."),
    click.option(
        "--sessions",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="TURNS",
        help="Turns of a conversation, at most; each is sent after the answer to the one before.",
    ),
    click.option(
        "--think-time",
        "think_time_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Mean time from an answer to the next turn.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="The same seed gives the same workload. If not given, bench makes up new texts.",
    ),
)
