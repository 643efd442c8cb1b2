"""The part of `penstock simulate` for routes and pipelines: compares strategies by recorded scores."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.files import write_text
from penstock.cli.options import NumberRange, add_options, is_given, routing_of_file, tables_of_file
from penstock.config.several import configs_of
from penstock.lab.workload_choice import WorkloadChoice, check_closed_loop, make_workload
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.lab.cost_model import CostModel
    from penstock.lab.report import Section
    from penstock.lab.results import Json
    from penstock.lab.route_simulation import RouteOutcome
    from penstock.routes.scores import Question

OF_ROUTES = ("shares", "embed_ms", "search_ms", "upstream_ms", "upstream_tokens_per_s")
"""Options that only a route or a pipeline has."""
_ALLOWED = (
    *("route", *OF_ROUTES, "workload", "requests", "rate", "arrivals", "cv", "rate_to", "burst_s", "stages", "speed", "seed"),
    *("tenants", "cancel_share", "concurrency", "returns", "cost", "blocks", "slo", "price_per_hour", "every_run"),
    *("json_file", "html"),
)
_SHARES = "0.1,0.3,0.5,0.7"


def _parse_shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in value.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise click.BadParameter(f"{value!r} are not shares from 0 to 1, as {_SHARES}.", ctx, param)
    return shares


route_options = add_options(
    click.option("--route", metavar="NAME", help="A route or a pipeline of --config; --workload is a file of scores."),
    click.option(
        "--shares", default=_SHARES, show_default=True, callback=_parse_shares, help="Route's shares for the large model."
    ),
    click.option("--embed-ms", type=NumberRange(0, 1e6), default=5.0, show_default=True, help="Time to embed a question here."),
    click.option("--search-ms", type=NumberRange(0, 1e6), default=5.0, show_default=True, help="A pipeline's search."),
    click.option("--upstream-ms", type=NumberRange(0, 1e6), default=500.0, show_default=True, help="An upstream's TTFT."),
    click.option(
        "--upstream-tokens-per-s",
        type=NumberRange(1e-3, 1e6),
        default=50.0,
        show_default=True,
        help="Speed of each upstream answer.",
    ),
)


def simulate_route(choice: WorkloadChoice, given: Mapping[str, Json], values: Mapping[str, Any]) -> None:
    """Simulate a route of the config file, and each of its models alone, and print figures of all."""
    from penstock.deploy.forecast import simulation_among
    from penstock.deploy.simulated_routes import route_simulation_of, strategies_of, wanted_of
    from penstock.lab import report
    from penstock.lab.distant import Distant
    from penstock.lab.figures import Samples, parse_slos
    from penstock.lab.pacing import Pace
    from penstock.lab.results import AskedTarget, Result, Run, any_ok, load_of, write_result
    from penstock.lab.simulation_report import warnings_of
    from penstock.lab.workload import Job, Workload
    from penstock.routes.scores import read_scores

    for name in click.get_current_context().params:
        if is_given(name) and name not in _ALLOWED and _is_of_simulation(name):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on a route.", remedy="Leave it out.")
    if (users := values["concurrency"]) is not None:
        check_closed_loop(choice)
    slos, begun_at = parse_slos(values["slo"]), datetime.now(UTC).isoformat(timespec="seconds")
    routing = routing_of_file()
    wanted = wanted_of(values["route"], routing)
    tables = tables_of_file()
    configs = configs_of({key: value for key, value in values.items() if key not in ("replicas", "router")}, tables=tables)
    costs, words = _costs(
        values["cost"], [name for name in wanted.models if name not in {one.name for one in routing.upstreams}]
    )
    path = Path(choice.workload)
    questions = read_scores(path, choice.requests)
    _check_scores(questions, path, wanted.scores)
    simulation = route_simulation_of(
        wanted,
        partial(simulation_among, configs=configs, costs=costs, num_blocks=values["blocks"]),
        routing.upstreams,
        far=Distant(
            latency_ns=round(values["upstream_ms"] * 1e6),
            token_ns=round(1e9 / values["upstream_tokens_per_s"]),
            max_concurrent=1,
        ),
        embed_ns=round(values["embed_ms"] * 1e6),
        max_returns=values["returns"],
        seed=choice.seed,
    )
    jobs = [
        Job(
            arrival_ns=0,
            num_prompt_tokens=max(one.weak.num_prompt_tokens, one.strong.num_prompt_tokens),
            num_output_tokens=max(one.weak.num_tokens, one.strong.num_tokens),
        )
        for one in questions
    ]
    size = min(one.capacity.block_size for one in simulation.here.values())
    workload = make_workload(choice, source=Workload(name=path.name, jobs=jobs, prefix_block_tokens=size))
    outcomes: list[RouteOutcome] = []
    runs: list[Run] = []
    for strategy in strategies_of(wanted, questions, values["shares"], round(values["search_ms"] * 1e6)):
        outcome = simulation.run(strategy, questions, workload, pace=Pace(concurrency=users))
        outcomes.append(outcome)
        runs.append(
            Run(
                workload=workload.name,
                name=strategy.name,
                options=given,
                seed=choice.seed,
                load=load_of(choice.mean_rate, users),
                how="simulated",
                target=AskedTarget(server=f"cost models: {words}"),
                begun_at=begun_at,
                slos=slos,
                price_per_hour=values["price_per_hour"],
                notes=(_words(outcome, wanted.models),),
                warnings=tuple(warnings_of(outcome)),
                samples=Samples.of(outcome.records),
            )
        )
    result = Result(runs=runs)
    section = _section_of(outcomes, wanted.models, have_one_cost=len(costs) > 1 and "=" not in values["cost"])
    sections = [*report.sections_of(result, every_run=values["every_run"]), section]
    click.echo(report.as_text(sections))
    if values["json_file"] is not None:
        write_result(result, values["json_file"])
    if values["html"] is not None:
        write_text(values["html"], report.as_html(f"Penstock simulate: {values['route']}", sections, []))
    if not any_ok(runs):
        sys.exit(1)


def _is_of_simulation(name: str) -> bool:
    """Return whether an option is the command's own. Settings, in contrast, apply to every model of the route."""
    from penstock.config.sources import all_settings

    return name not in {item.key for item in all_settings()} or name in ("replicas", "router")


def _check_scores(questions: Sequence[Question], path: Path, names: Sequence[str]) -> None:
    for name in names:
        if any(getattr(one, name) is None for one in questions):
            raise ConfigError(
                f"{path}: a question has no {name}.",
                remedy="Make the scores with `penstock route eval`, and the route's file or a --confidence.",
            )


def _costs(text: str, names: Sequence[str]) -> tuple[dict[str, CostModel], str]:
    """Parse `MODEL=FILE,MODEL=FILE`, or one file for all. Return each model's cost model, and a description."""
    from penstock.lab.cost_files import cost_of_option

    files = dict.fromkeys(names, text)
    if "=" in text:
        files = dict(part.rpartition("=")[::2] for part in text.split(","))
        if {*files} != {*names}:
            raise ConfigError(f"--cost names {', '.join(files)}.", remedy=f"Name the cost model of each of {', '.join(names)}.")
    found = {name: cost_of_option(file) for name, file in files.items()}
    return {name: cost for name, (cost, _) in found.items()}, "; ".join(
        f"{name}: {words}" for name, (_, words) in found.items()
    )


def _share(outcome: RouteOutcome, kinds: Mapping[str, str]) -> float:
    return sum(kinds[name] == "strong" for name in outcome.answerers.values()) / max(1, len(outcome.answerers))


def _machine_s(outcome: RouteOutcome) -> float:
    return sum(outcome.used_ns.values()) / 1e9


def _words(outcome: RouteOutcome, kinds: Mapping[str, str]) -> str:
    used = ", ".join(f"{name or 'embedding'} {ns / 1e9:.2f} s" for name, ns in outcome.used_ns.items())
    return (
        f"The large model answered {_share(outcome, kinds):.1%}; quality {outcome.quality:.1%}; "
        f"{outcome.num_begun} answers begun by the small model, to be judged. Time of the machine: {used}."
    )


def _section_of(outcomes: Sequence[RouteOutcome], kinds: Mapping[str, str], *, have_one_cost: bool) -> Section:
    from penstock.lab.report import Cell, Section, Table

    whole_s = next((_machine_s(one) for one in outcomes if [kinds[name] for name in one.strategy.models] == ["strong"]), 0.0)
    rows = [
        (
            Cell(one.strategy.name),
            Cell(f"{_share(one, kinds):.1%}"),
            Cell(str(one.num_begun or "")),
            Cell(f"{one.quality:.1%}"),
            Cell(f"{_machine_s(one):.2f}"),
            Cell(f"{_machine_s(one) / whole_s:.0%}" if whole_s else ""),
        )
        for one in outcomes
    ]
    head = ("", "large model's share", "begun", "quality", "model time s", "time vs. large alone")
    warning = "All models have the same step times. To compare them, give each its own: --cost MODEL=FILE,..."
    notes = [
        "Large model's share: of the answers. Begun: answers that the small model began before the choice was made.",
        "Quality: mean recorded result of the answers. Model time: of all steps on this machine, with embedding.",
    ]
    return Section("Route", notes, [Table(head, rows)], [warning] if have_one_cost else [])
