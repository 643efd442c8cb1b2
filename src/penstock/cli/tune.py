"""`penstock tune`: searches settings in the simulator, verifies them on the real engine, and writes the best.

`lab.tune` searches and compares; this file makes simulated and real servers with given settings.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.candidates import find_machines, hardware_options, make_candidate, read_costs, read_model
from penstock.cli.files import output_file, write_text
from penstock.cli.options import (
    EPILOG,
    FILE,
    NOT_IN_THE_LAB,
    OF_TENANTS,
    GroupedCommand,
    add_options,
    config_options,
    model_argument,
    setting_keys,
    setting_option,
    slo_option,
    warn_of_unknown_variables,
)
from penstock.cli.workload_options import token_counter, workload_options
from penstock.config.components import config_from
from penstock.config.sources import all_settings, parse_settings
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.lab.plan import Candidate
    from penstock.lab.prompts import Tokenizer
    from penstock.lab.records import Record
    from penstock.lab.tune import Evaluate, Settings
    from penstock.lab.workload import Workload

_COMPONENTS = ("model", "kv", "scheduler", "backend")


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@workload_options
@click.option(
    "--objective",
    type=click.Choice(["goodput", "throughput", "ttft_mean", "ttft_p99", "e2e_mean"]),
    default="goodput",
    show_default=True,
    help="Requests per second that meet the SLOs; output tokens per second; or seconds to the first token, or to the end.",
)
@slo_option
@click.option("--max-tokens", type=click.IntRange(min=1), help="Limit that clients send. Default: the tokens of each answer.")
@click.option(
    "--slices",
    "num_slices",
    type=click.IntRange(min=18),
    default=24,
    show_default=True,
    help="Pieces of the workload: a third to search, a third to judge, a third to verify.",
)
@click.option(
    "--finalists",
    "num_finalists",
    type=click.IntRange(1, 10),
    default=3,
    show_default=True,
    help="Best candidates of the search to judge and verify.",
)
@click.option("--verify", is_flag=True, help="Run the best and the default on the real engine, here; in real time.")
@click.option("--output", type=FILE, callback=output_file, metavar="FILE.toml", help="Write the settings for serve.")
@hardware_options
@config_options(*_COMPONENTS, without=NOT_IN_THE_LAB)
@add_options(*map(setting_option, OF_TENANTS))
def tune(choice: WorkloadChoice, **values: Any) -> None:
    """Search settings of batching and scheduling for a workload and an objective.

    \b
      penstock tune --workload hour.rec --cost cost.json --slo ttft=2s --slo tpot=100ms --verify --output tuned.toml
      penstock serve --config tuned.toml

    The gain over the given settings is measured, with an interval, on parts of the workload that the search did not use. If
    nothing is significantly better, nothing is written. docs/tune.md explains the figures.
    """
    from penstock.config.saved import settings_hash, write_config_file
    from penstock.lab.figures import parse_slos
    from penstock.lab.in_process import notes_of
    from penstock.lab.prompts import counter_of
    from penstock.lab.transforms import cut
    from penstock.lab.tune import DEFAULT, Objective, verify
    from penstock.lab.tune import tune as search
    from penstock.lab.tune_report import notes, search_lines, verdict_lines

    warn_of_unknown_variables()
    output: Path | None = values["output"]
    objective, slos = Objective(values["objective"]), parse_slos(values["slo"])
    if objective is Objective.GOODPUT and not slos:
        raise ConfigError("Goodput needs SLOs.", remedy="Give --slo ttft=2s, say.")
    if values["verify"] and values["hardware"] != "this":
        raise ConfigError("The real engine is on this machine.", remedy="Leave out --verify or --hardware.")
    tokenizer = _tokenizer(values)
    count = token_counter(choice.workload, values["model"], values["cache"]) if tokenizer is None else counter_of(tokenizer)
    workload = make_workload(choice, count)
    longest = max(job.num_output_tokens for job in workload.jobs)
    if values["max_tokens"] is not None and values["max_tokens"] < longest:
        raise ConfigError(f"The longest answer has {longest} tokens.", remedy="Raise --max-tokens, or cut answers.")
    cut(workload, values["num_slices"])  # raises for too few requests
    simulator = _Simulator(values, choice.seed)  # last: the machine is probed
    values["device"] = simulator.device
    tuned = search(
        simulator.evaluate,
        workload,
        objective,
        slos,
        num_slices=values["num_slices"],
        num_finalists=values["num_finalists"],
    )
    print(search_lines(tuned), flush=True)
    if tokenizer is not None:
        tuned = verify(tuned, _real_engine(values, tokenizer, choice.seed))
    print(verdict_lines(tuned))
    unknown = notes_of(workload) if tuned.verified else ()
    for doubt in (*simulator.doubts(tuned.best.settings if tuned.best else DEFAULT), *unknown):
        print(f"Note: {doubt}")
    if tuned.best is None:
        return
    config = _config(values, tuned.best.settings)
    print(f"The hash of these settings is {settings_hash(config)}, as penstock_settings_info shows it in /metrics.")
    if output is not None:
        write_text(output, write_config_file(config, [*notes(tuned), *unknown]))
        print(f"Written: penstock serve --config {output}")


def _parsed(settings: Settings) -> dict[str, object]:
    return parse_settings(dict(settings), all_settings())


def _config(values: Mapping[str, Any], settings: Settings) -> Config:
    return config_from({**values, **_parsed(settings)})


class _Simulator:
    def __init__(self, values: Mapping[str, Any], seed: int) -> None:
        machines = find_machines(values["hardware"], values["hardware_table"], num_threads=values["threads"])
        if len(machines) > 1:
            raise ConfigError("Settings are tuned for one machine.", remedy="Name one --hardware.")
        [self._hardware] = machines
        self._saved = read_costs(values["cost"], machines).get(self._hardware.name)
        self.device = "cuda" if self._hardware.is_gpu else "cpu"
        if other := {values["device"], values["backend"]} & (
            {"cpu", "native", "reference"} if self._hardware.is_gpu else {"cuda"}
        ):
            raise ConfigError(
                f"{self._hardware.name} does not run {' and '.join(sorted(other))}.",
                remedy="Leave out --device and --backend, or name other --hardware.",
            )
        self._outline = read_model(config_from(values), is_gpu=self._hardware.is_gpu)
        self._values, self._seed = values, seed
        self._candidates: dict[Settings, Candidate] = {}
        self._num_steps: Counter[Settings] = Counter()
        self._num_outside: Counter[Settings] = Counter()

    def evaluate(self, settings: Settings, workload: Workload) -> Sequence[Record]:
        """Simulate one slice of the workload. Each slice has its own seed, so that the spread includes the noise of steps."""
        seed = zlib.crc32(f"{self._seed} {workload.name}".encode())
        simulation = self._candidate(settings).simulation
        outcome = replace(simulation, max_tokens=self._values["max_tokens"], seed=seed).run(workload)
        self._num_steps[settings] += outcome.num_steps
        self._num_outside[settings] += outcome.num_outside
        return outcome.records

    def doubts(self, settings: Settings) -> Iterator[str]:
        """Yield warnings about assumptions behind the simulated server."""
        yield from self._candidate(settings).doubts
        if num_outside := self._num_outside[settings]:
            share = num_outside / self._num_steps[settings]
            yield f"{share:.1%} of its steps lie outside of the range that the cost model was fitted to."

    def _candidate(self, settings: Settings) -> Candidate:
        if settings not in self._candidates:
            config = _config(self._values, settings)
            self._candidates[settings] = make_candidate(config, self._outline, self._hardware, self._saved)
        return self._candidates[settings]


def _tokenizer(values: Mapping[str, Any]) -> Tokenizer | None:
    if not values["verify"]:
        return None
    from penstock.cli.bench import load_tokenizer_of

    return load_tokenizer_of(values["model"], values["cache"])


def _real_engine(values: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Evaluate:
    """Return a function that serves a workload with the real engine. Each call loads the model anew, with an empty cache."""
    from penstock.cli.bench import loaded
    from penstock.lab.driving import drive
    from penstock.lab.in_process import sender
    from penstock.lab.prompts import write_prompts

    given = {key: values[key] for key in setting_keys(*_COMPONENTS) if key in values and key != "model"}

    def evaluate(settings: Settings, workload: Workload) -> Sequence[Record]:
        written = write_prompts(workload, tokenizer, seed=seed)
        with loaded(values["model"], given | _parsed(settings), max_tokens=values["max_tokens"]) as (_, ask):
            sent = asyncio.run(drive(written, sender(ask)))
        if sent.unfinished or sent.num_unsent:
            raise KeyboardInterrupt
        return sent.records

    return evaluate
