"""`penstock simulate`: predicts how a configuration serves a workload."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import cache, partial
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from penstock.cli.files import output_file, plots_folder, write_plots, write_text
from penstock.cli.options import (
    EPILOG,
    FILE,
    FOLDER,
    NOT_IN_THE_LAB,
    OF_TENANTS,
    GroupedCommand,
    NumberRange,
    check_named,
    config_options,
    is_given,
    is_named,
    model_argument,
    option_text,
    router_option,
    settings_of_file,
    slo_option,
    tables_of_file,
    with_table,
)
from penstock.cli.simulated_routes import OF_ROUTES, route_options, simulate_route
from penstock.cli.workload_options import token_counter, workload_options
from penstock.config.components import BackendConfig, Device, ServerConfig, config_from
from penstock.config.setting import settings_of
from penstock.config.several import find_table
from penstock.lab.variants import combinations, title
from penstock.lab.workload_choice import WorkloadChoice, check_closed_loop, make_workload
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.lab.cost_model import CostModel
    from penstock.lab.results import Json
    from penstock.lab.simulation import Simulation

_NO_EFFECT = (
    *NOT_IN_THE_LAB,
    "task",
    "pooling",
    "kv_disk_path",
    "background_share",
    "gpu_memory_utilization",
    *(item.key for item in settings_of(BackendConfig) if item.key not in ("device", "steps_in_flight")),
    *(
        item.key
        for item in settings_of(ServerConfig)
        if item.key not in ("request_timeout", "queue_timeout", "first_token_timeout", *OF_TENANTS)
    ),
)
"""Settings without effect in the simulation, which takes step times from the cost model."""
_OUTPUTS = ("json_file", "html", "plots", "every_run")
_OF_ALL = (*_OUTPUTS, "config_file", "vary", "without", "route", *OF_ROUTES)
"""Options that can't be varied."""
MAX_REPLICAS = 1024
_CHOICES = frozenset(field.name for field in fields(WorkloadChoice))


class _Bounds(NamedTuple):
    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}..{self.most}"


class _Replicas(click.ParamType[_Bounds]):
    """Click type of a number of replicas, or of the least and the most: `4` or `1..6`."""

    name = "N|LEAST..MOST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Bounds:
        least, dots, most = str(value).partition("..")
        if least.isdecimal() and (most.isdecimal() or not dots):
            bounds = _Bounds(int(least), int(most if dots else least))
            if bounds.least <= bounds.most and 1 <= bounds.most <= MAX_REPLICAS:
                return bounds
        self.fail(f"{value!r} is neither a number from 1 to {MAX_REPLICAS} nor a range such as 1..6 or 0..6.", param, ctx)


@click.command(cls=GroupedCommand, epilog=EPILOG)
@partial(model_argument, is_optional=True)
@workload_options
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop with this many users; arrival times are ignored.")
@click.option("--load", type=NumberRange(min=0, min_open=True), help="Rate as a share of what the first variant can serve.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Limit that clients send. Default: the tokens of each answer.")
@click.option(
    "--returns", type=click.IntRange(min=0), default=0, help="How often a refused client retries, after the Retry-After wait."
)
@click.option(
    "--cost",
    default="default",
    show_default=True,
    metavar="default|FILE",
    help="Cost model of a step. With --route: MODEL=FILE,MODEL=FILE.",
)
@click.option("--acceptance", metavar="FILE|CHANCE", help="Tokens guessed right: as in a recording, or the chance of each.")
@route_options
@click.option("--blocks", type=click.IntRange(min=1), help="KV blocks; then no model file is needed.")
@click.option("--replicas", type=_Replicas(), default="1", show_default=True, help="Servers; in a split those that decode.")
@click.option(
    "--start-s", type=NumberRange(0, 1e6), default=30.0, show_default=True, help="Seconds that a replica takes to start."
)
@router_option
@click.option(
    "--prefill-replicas", type=click.IntRange(0, MAX_REPLICAS), default=0, help="Servers that compute prompts for the others."
)
@click.option("--kv-bytes-per-token", type=click.IntRange(min=1), help="Bytes that replicas copy. Default: the model's.")
@click.option(
    "--link-gbytes-per-s",
    type=NumberRange(1e-6, 1e6),
    help="GB/s that a replica can send to others. Default: no KV transfers, or 1 with --prefill-replicas.",
)
@click.option(
    "--link-latency-ms", type=NumberRange(0, 1e6), default=1.0, show_default=True, help="Fixed time added to each transfer."
)
@click.option("--vary", multiple=True, metavar="NAME=VALUE,...", help="Values of an option to compare, as policy=fcfs,sjf.")
@click.option("--without", metavar="NAME", help="Compare with the default of this option and of its arguments.")
@slo_option
@click.option("--price-per-hour", type=NumberRange(0, min_open=True), help="Of one replica, for the cost of tokens.")
@click.option("--every-run", is_flag=True, help="Show all figures of each simulation, where there are several.")
@click.option("--json", "json_file", type=FILE, callback=output_file, help="Write the result, as of penstock bench.")
@click.option("--html", type=FILE, callback=output_file, help="Write one HTML file that opens offline.")
@click.option("--plots", type=FOLDER, callback=plots_folder, metavar="FOLDER", help="Write the plots as PNG.")
@config_options("model", "kv", "scheduler", "admission", "backend", "server", without=_NO_EFFECT)
def simulate(choice: WorkloadChoice, vary: tuple[str, ...], without: str | None, **values: Any) -> None:
    """Simulate how a configuration of MODEL serves a workload: real scheduler and admission, modelled step times."""
    from penstock.lab import plots, report, simulation_report
    from penstock.lab.cost_files import cost_of_option
    from penstock.lab.figures import Samples, parse_slos
    from penstock.lab.pacing import Pace
    from penstock.lab.results import AskedTarget, Result, Run, any_ok, load_of, write_result

    context = click.get_current_context()
    if values["route"] is not None:
        simulate_route(choice, given(context, {}), values)
        return
    if wrong := next(filter(is_given, OF_ROUTES), None):
        raise ConfigError(f"--{wrong.replace('_', '-')} is for a route.", remedy="Name one with --route.")
    slos = parse_slos(values["slo"])
    begun_at = datetime.now(UTC).isoformat(timespec="seconds")
    capacity: float | None = None
    runs: list[Run] = []
    simulated: list[simulation_report.SimulatedRun] = []
    workload_of, counter = cache(make_workload), cache(token_counter)  # most variants have the same requests
    sides = _sides(context, vary, without)
    _check_model(values, [changes for _, changes in sides])
    asked_of_sides = [_asked(values, changes) for _, changes in sides]
    _check(asked_of_sides, {name for _, changes in sides for name in changes})
    for (name, changes), asked in zip(sides, asked_of_sides, strict=True):
        own = {key: asked[key] for key in values if asked[key] != values[key]}
        chosen = replace(choice, **{key: value for key, value in changes.items() if key in _CHOICES})
        cost, words = cost_of_option(asked["cost"])
        simulation = _simulation(asked, cost, seed=chosen.seed)
        count = counter(chosen.workload, asked["model"], asked["cache"]) if asked["blocks"] is None else None
        if asked["load"] is not None:
            _check_load(chosen, asked["concurrency"])
            capacity = capacity or simulation.capacity_per_s(make_workload(replace(chosen, rate=1.0), count))
            chosen = replace(chosen, rate=asked["load"] * capacity)
        if (users := asked["concurrency"]) is not None:
            check_closed_loop(chosen)
        workload = workload_of(chosen, count)
        began_s = process_time()
        outcome = simulation.run(workload, pace=Pace(concurrency=users))
        wall_s = process_time() - began_s
        label = ", ".join(filter(None, [name, f"seed {chosen.seed}" if "seed" in changes else ""]))  # also tells repeats apart
        simulated.append(simulation_report.SimulatedRun(name=label, workload=workload, outcome=outcome, wall_s=wall_s))
        price = asked["price_per_hour"]
        runs.append(
            Run(
                workload=workload.name,
                name=name,
                options=given(context, own, without=changes),
                seed=chosen.seed,
                load=load_of(chosen.mean_rate, users),
                how="simulated",
                target=AskedTarget(model=asked["model"] if asked["blocks"] is None else "", server=f"cost model: {words}"),
                begun_at=begun_at,
                slos=slos,
                price_per_hour=None if price is None else price * outcome.mean_replicas,
                warnings=tuple(simulation_report.warnings_of(outcome)),
                samples=Samples.of(outcome.records),
            )
        )
    result = Result(runs=runs)
    sections = [*report.sections_of(result, every_run=values["every_run"]), simulation_report.section_of(simulated)]
    click.echo(report.as_text(sections))
    if values["json_file"] is not None:
        write_result(result, values["json_file"])
    if values["html"] is not None:
        drawn = [*plots.plots_of(result), *simulation_report.plots_of(simulated)] if plots.is_installed() else None
        write_text(values["html"], report.as_html(f"Penstock simulate: {runs[0].workload}", sections, drawn))
    if values["plots"] is not None:
        write_plots(values["plots"], [*plots.plots_of(result), *simulation_report.plots_of(simulated)])
    if not any_ok(runs):
        sys.exit(1)


def _check(runs: Sequence[Mapping[str, Any]], compared: Collection[str]) -> None:
    """Raise ConfigError for options without effect on any of the simulations. `compared`: names of options that differ."""
    has_link = any(map(_has_link, runs))
    has_several = any(one["prefill_replicas"] or one["replicas"].most > 1 for one in runs)
    has_choice = any((one["prefill_replicas"] or one["replicas"].most) > 1 for one in runs)
    is_scaled = any(one["replicas"].least < one["replicas"].most for one in runs)
    for name, has_effect, where, remedy in (
        ("kv_bytes_per_token", has_link, "without a link", "--link-gbytes-per-s"),
        ("link_latency_ms", has_link, "without a link", "--link-gbytes-per-s"),
        ("link_gbytes_per_s", has_several, "with one server", "--replicas"),
        ("start_s", is_scaled, "with a fixed number of replicas", "--replicas 1..6"),
        ("router", has_choice, "with one server", "--replicas"),
    ):
        if not has_effect and (is_given(name) or name in compared):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect {where}.", remedy=f"Set {remedy}, or leave it out.")


def _has_link(asked: Mapping[str, Any]) -> bool:
    return bool(asked["prefill_replicas"] or asked["link_gbytes_per_s"])


def _check_model(values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a model, or the type of its KV cache, is given, and no variant reads its files.

    Raises UsageError if a variant reads those of the default model, and the --config file has [[models]].
    """
    readers = []
    for changed in changes:
        asked = {**values, **changed}
        if asked["blocks"] is None or (asked["kv_bytes_per_token"] is None and _has_link(asked)):
            readers.append(changed)
    if any("model" not in changed for changed in readers):
        check_named()
    if readers:
        return
    tables = tables_of_file()
    if (is_given("model") or is_given("model_word")) and not find_table(values["model"], tables):
        cause = f", and {values['model']} has no table [[models]]" if tables else ""
        remedy = "Leave out the model, and set --max-model-len to its longest context."
        raise ConfigError(f"With --blocks the model's files are not read{cause}.", remedy=remedy)
    if is_given("kv_cache_dtype") or any("kv_cache_dtype" in changed for changed in changes):
        remedy = "Leave one of them out; --blocks may be as many as fit with that type."
        raise ConfigError("--kv-cache-dtype has no effect with --blocks.", remedy=remedy)


def _check_load(choice: WorkloadChoice, users: int | None) -> None:
    """Raise ConfigError for options that set when requests come, as --load does."""
    others = {
        "--rate": choice.rate,
        "--rate-to": choice.rate_to is not None,
        "--speed": choice.speed != 1,
        "--stages": choice.stages,
        "--arrivals closed": choice.arrivals == "closed",
        "--concurrency": users,
    }
    for option, is_set in others.items():
        if is_set:
            raise ConfigError(f"--load and {option} both say when requests come.", remedy="Leave one of them out.")


def _sides(context: click.Context, vary: Sequence[str], without: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, changed options) of each run to compare. Runs with different seeds are repeats. Raises ConfigError."""
    if without is None:
        return [
            (
                title({name: text for name, text in one.items() if name != "seed"}),
                dict(_changed(context, name, text) for name, text in one.items()),
            )
            for one in combinations(vary)
        ]
    if vary:
        raise ConfigError("--vary and --without both say what is compared.", remedy="Leave one of them out.")
    name = without.removeprefix("--").replace("-", "_")
    names = (_option(context, name).name, f"{name}_args")
    params = [param for param in context.command.params if param.name in names]
    # `param.default` is a sentinel of click for options without a default.
    defaults = {str(param.name): param.process_value(context, param.to_info_dict()["default"]) for param in params}
    return [("as given", {}), (f"without {name}", defaults)]


def _asked(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one run. Compared options win over the model's [[models]] table."""
    asked = {**values, **changes}
    has_table = "model" in changes or is_named()
    settings = settings_of_file(asked["model"] if has_table else None)
    if has_table:
        asked = {**with_table(asked), **{key: value for key, value in changes.items() if key != "model"}}
    of_cluster = {key: value for key, value in settings.items() if key in ("replicas", "max_replicas")}
    if of_cluster and "replicas" not in changes and not is_given("replicas"):
        cluster = config_from(of_cluster).cluster
        asked["replicas"] = _Bounds(cluster.replicas, cluster.most)
    return asked


def _changed(context: click.Context, name: str, text: str) -> tuple[str, Any]:
    """Return the parameter of an option, which may have another name, and its value."""
    option = _option(context, name)
    return str(option.name), option.process_value(context, text)


def _option(context: click.Context, name: str) -> click.Option:
    known = [param for param in context.command.params if isinstance(param, click.Option) and param.name not in _OF_ALL]
    flag = f"--{name.replace('_', '-')}"
    found = next((param for param in known if name == param.name or flag in param.opts), None)
    if found is None or found.multiple or found.nargs != 1:
        remedy = "Take one with a single value from `penstock simulate --help`."
        raise ConfigError(f"{name} is not an option to compare.", remedy=remedy)
    return found


def _simulation(asked: Mapping[str, Any], cost: CostModel, *, seed: int) -> Simulation:
    from penstock.deploy.forecast import kv_bytes_per_token, refuse_own_guesser, simulation_of
    from penstock.lab.acceptance import acceptance_of
    from penstock.lab.links import Link
    from penstock.lab.scaling import Scaling
    from penstock.sched.routing.routers import find_router

    # These are also settings of a cluster, in another form.
    config = config_from({key: value for key, value in asked.items() if key not in ("replicas", "router")})
    refuse_own_guesser(config)
    least, most = asked["replicas"]
    scaling = Scaling(least=least, most=most, start_ns=round(asked["start_s"] * 1e9)) if least < most else None
    link = None
    if _has_link(asked):
        link = Link(
            bytes_per_token=asked["kv_bytes_per_token"] or kv_bytes_per_token(config),
            bytes_per_s=(asked["link_gbytes_per_s"] or 1.0) * 1e9,
            latency_ns=round(asked["link_latency_ms"] * 1e6),
        )
    if asked["device"] == Device.CUDA and asked["cost"] == "default":
        raise ConfigError("The default cost model is of a CPU.", remedy="Name a GPU's with --cost, such as h100-llama-8b.")
    return replace(
        simulation_of(config, cost, num_blocks=asked["blocks"]),
        num_replicas=least,
        scaling=scaling,
        num_prefill_replicas=asked["prefill_replicas"],
        link=link,
        make_router=find_router(asked["router"]),
        max_tokens=asked["max_tokens"],
        max_returns=asked["returns"],
        acceptance=None if asked["acceptance"] is None else acceptance_of(asked["acceptance"], seed=seed),
        seed=seed,
    )


def given(context: click.Context, own: Mapping[str, Any], *, without: Collection[str] = ()) -> dict[str, Json]:
    """Return the options of a run for the report, without outputs and secrets.

    `own`: the run's values that differ from the command's. `without`: compared options, with values in the run's name.
    """
    hidden = {*_OUTPUTS, "api_key", *without}
    if "model" in without:
        hidden.add("model_word")
    params = {
        name: own.get(name, value)
        for name, value in context.params.items()
        if name in own or context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    shown = [(name, value) for name, value in params.items() if value is not None and name not in hidden]
    return {"model" if name == "model_word" else name: option_text(value) for name, value in shown}
