"""`penstock plan`: sizes a deployment for a workload, SLOs and hardware."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.candidates import all_hardware, find_machines, hardware_options, make_candidate, read_costs, read_model
from penstock.cli.files import output_file, plots_folder, write_text
from penstock.cli.options import (
    EPILOG,
    FILE,
    FOLDER,
    NOT_IN_THE_LAB,
    OF_TENANTS,
    GroupedCommand,
    NumberRange,
    add_options,
    config_options,
    is_given,
    model_argument,
    router_option,
    setting_option,
    slo_option,
    warn_of_unknown_variables,
)
from penstock.cli.workload_options import token_counter, workload_options
from penstock.config.components import BackendConfig, config_from
from penstock.lab.synthetic import NAMED
from penstock.lab.workload_choice import WorkloadChoice
from penstock.types.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.config import Config
    from penstock.deploy.forecast import Outline
    from penstock.lab.acceptance import Acceptance
    from penstock.lab.hardware import Hardware
    from penstock.lab.plan import Requirements, Sized
    from penstock.lab.workload import Workload


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@workload_options
@slo_option
@click.option(
    "--goal", default="99%", show_default=True, metavar="SHARE", help="Share of the requests that must meet every SLO."
)
@click.option(
    "--plots", "folder", type=FOLDER, callback=plots_folder, metavar="FOLDER", help="Draw batch sizes and rates, as PNG."
)
@hardware_options
@click.option("--acceptance", metavar="FILE|CHANCE", help="Tokens guessed right: as in a recording, or the chance of each.")
@click.option("--price-per-hour", type=NumberRange(min=0), metavar="USD", help="Of one replica, instead of the table's.")
@click.option(
    "--headroom",
    default="0%",
    show_default=True,
    metavar="SHARE",
    help="Share of the replicas that stays free: 20% sizes them for 1.25 times the rate.",
)
@router_option
@click.option(
    "--beside", "presets", multiple=True, metavar="PRESET", help="Plan a preset's policies, such as vllm, too. Repeatable."
)
@click.option("--json", "json_path", type=FILE, callback=output_file, help="Write the numbers there, too.")
@config_options(
    "model",
    "kv",
    "scheduler",
    without=(*NOT_IN_THE_LAB, "experts_on_disk", "background_share"),
)
@add_options(*map(setting_option, ("threads", *OF_TENANTS)))
def plan(choice: WorkloadChoice, **values: Any) -> None:
    """Size a deployment: the highest rate that meets the SLOs, its limiting resource, replicas and cost.

    \b
      penstock plan --workload hour.jsonl --slo ttft=2s --slo tpot=100ms
      penstock plan ./Llama-3-8B --workload azure.csv --slo ttft=1s --hardware L4,A10G,H100
      penstock plan ./Llama-3-8B --workload azure.csv --slo ttft=1s --hardware H100 --beside vllm

    Without SLOs it shows only the arithmetic: memory, batch sizes, step times. The rate is searched in the simulator,
    which runs the real scheduler with these settings.
    """
    from penstock.lab import plan_report
    from penstock.lab.acceptance import acceptance_of
    from penstock.lab.workload_choice import make_workload

    if values["hardware"] == "list":
        print(plan_report.hardware_table(list(all_hardware(values["hardware_table"]).values())))
        return
    warn_of_unknown_variables()
    asked = _requirements(choice, values)
    config = config_from({**values, "threads": None})  # those are of this machine
    if values["presets"] and not asked.slos:
        raise ConfigError("--beside compares highest rates.", remedy="Give SLOs: --slo ttft=2s --slo tpot=100ms.")
    configs = {"": config, **{name: _with(config, name) for name in values["presets"]}}
    workload = make_workload(choice, token_counter(choice.workload, values["model"], values["cache"]))
    doubts = _doubts(choice)
    acceptance = None if values["acceptance"] is None else acceptance_of(values["acceptance"], seed=choice.seed)
    machines = _machines(values)  # last: it probes
    some = _sizes(configs, workload, asked, machines, acceptance, values)
    if not some:
        raise ConfigError("No machine is left to plan for.", remedy="Take another model, other settings, or other --hardware.")
    some = [replace(sized, warnings=[*sized.warnings, *doubts]) for sized in some]
    if len(some) > 1:
        print(plan_report.comparison(some) + "\n")
    if values["presets"]:
        print(f"{plan_report.beside(some)}\n")
    print("\n\n".join(plan_report.report(sized) for sized in some))
    if not asked.slos:
        print("\nFor the highest rate, replicas and cost, give SLOs: --slo ttft=2s --slo tpot=100ms")
    if values["json_path"] is not None:
        numbers = json.dumps(plan_report.as_json(some), indent=2, allow_nan=False)
        write_text(values["json_path"], numbers + "\n")
    if values["folder"] is not None:
        for sized in some:
            for name, plot in plan_report.plots(sized):
                plot.save(values["folder"] / f"{sized.hardware.name}-{name}.png")


def _requirements(choice: WorkloadChoice, values: Mapping[str, Any]) -> Requirements:
    from penstock.config.units import parse_share
    from penstock.lab.figures import parse_slos
    from penstock.lab.plan import Requirements

    shares = {}
    for name in ("goal", "headroom"):
        try:
            shares[name] = parse_share(values[name])
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint=f"--{name}") from None
    return Requirements(
        slos=parse_slos(values["slo"]),
        rate=choice.mean_rate,
        speed=choice.speed,
        router=values["router"],
        price_per_hour=values["price_per_hour"],
        seed=choice.seed,
        **shares,
    )


def _doubts(choice: WorkloadChoice) -> list[str]:
    """Return a warning if Poisson arrivals replace those of a file."""
    from penstock.lab.arrivals import mean_rate
    from penstock.lab.workload_choice import make_workload

    is_poisson = choice == replace(choice, arrivals="", rate_to=None, cv=None, burst_s=None)
    is_of_file = choice.rate is not None and is_poisson and choice.workload not in NAMED
    if not is_of_file or mean_rate(make_workload(replace(choice, rate=None, speed=1.0))) is None:
        return []
    return [
        "--rate replaces the arrivals of a file by Poisson ones, and real traffic is burstier. Without it the plan keeps "
        "the file's arrivals, and --speed changes their rate."
    ]


def _machines(values: Mapping[str, Any]) -> Sequence[Hardware]:
    machines = find_machines(values["hardware"], values["hardware_table"], num_threads=values["threads"])
    if values["price_per_hour"] is not None and len(machines) > 1:
        raise ConfigError(
            f"--price-per-hour is of one machine, and --hardware names {len(machines)}.",
            remedy="Leave it out, or give each its price in --hardware-table.",
        )
    if is_given("threads") and all(one.name != "this" for one in machines):
        raise ConfigError("--threads is of this machine, which --hardware does not name.", remedy="Leave it out.")
    return machines


def _sizes(
    configs: Mapping[str, Config],
    workload: Workload,
    asked: Requirements,
    machines: Sequence[Hardware],
    acceptance: Acceptance | None,
    values: Mapping[str, Any],
) -> list[Sized]:
    """Size the deployment for each machine that can hold it. `configs`: the user's, named "", and the presets to compare."""
    from penstock.lab.plan import plan as size_deployment

    saved = read_costs(values["cost"], machines)
    some, outlines = list["Sized"](), dict[bool, "Outline"]()
    for hardware in machines:
        if sys.stderr.isatty():
            print(f"planning for {hardware.name} ...", file=sys.stderr)
        backend = BackendConfig(threads=values["threads"] if hardware.name == "this" else None)
        plans = dict[str, "Sized"]()
        for preset, config in configs.items():
            try:
                if hardware.is_gpu not in outlines:
                    outlines[hardware.is_gpu] = read_model(config, is_gpu=hardware.is_gpu)
                about = (outlines[hardware.is_gpu], hardware, saved.get(hardware.name), acceptance)
                candidate = make_candidate(replace(config, backend=backend), *about, seed=asked.seed)
                # A preset's replicas stand behind a plain load balancer: other servers do not bring a router.
                wanted = replace(asked, router="round-robin") if preset else asked
                plans[preset] = size_deployment(candidate, hardware, workload, wanted, is_brief=bool(preset))
            except PenstockError as error:
                if not preset and len(machines) == 1:
                    raise
                who = f"{hardware.name}, preset {preset}" if preset else hardware.name
                print(f"{who}: left out. {error}\n", file=sys.stderr)
                if not preset:
                    break
        if "" in plans:
            some.append(replace(plans.pop(""), rivals=plans))
    return some


def _with(config: Config, preset: str) -> Config:
    """Return the config with a preset's policies alone, and steps of the same size."""
    from penstock.config.components import SchedulerConfig

    given = config.scheduler
    scheduler = SchedulerConfig(
        preset=preset, max_num_seqs=given.max_num_seqs, max_num_batched_tokens=given.max_num_batched_tokens
    )
    return replace(config, scheduler=scheduler)
