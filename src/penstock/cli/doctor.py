"""`penstock doctor`: says why a server is slow, and what to change, from its pages or from a recording.

`lab.evidence` has the evidence, `lab.doctor` the rules. This file reads the pages, and simulates changes of settings.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import NumberRange, is_given, printable, setting_keys, tls_options, warn_of_unknown_variables
from penstock.cli.top import OTHER_SERVER, Reader, reader_of
from penstock.config.components import config_from
from penstock.config.sources import all_settings, parse_settings
from penstock.config.units import figure
from penstock.lab.doctor import Diagnosis, Prediction, RequestTimes, Verdict, diagnose
from penstock.lab.evidence import Evidence, Scrape, visits_of
from penstock.types.errors import PenstockError

if TYPE_CHECKING:
    from penstock.lab.acceptance import Acceptance
    from penstock.lab.cost_model import CostModel
    from penstock.lab.simulation import Simulation
    from penstock.lab.workload import Workload

EXIT_CODES = {Verdict.HEALTHY: 0, Verdict.ILL: 1, Verdict.UNKNOWN: 2}
_RECENT_S = 600.0
_MAX_ENDED = 100
"""The most ended requests that a server lists."""
_WIDTH = 100
_NOT_SIMULATED = ("kv_cache_memory", "gpu_memory_utilization", "kv_disk_size", "kv_host_size", "speculation_model")

_OF_SERVERS = ("port", "api_key", "model", "seconds", "cafile", "insecure")
"""Options without effect on a recording."""


@click.command()
@click.argument("source", required=False, metavar="URL|RECORDING")
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", help="Port of a server on this machine, instead of the URL."
)
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server requires.")
@click.option("--model", metavar="NAME", help="Model to examine, of several.  [default: the first]")
@click.option(
    "--seconds", type=NumberRange(0.1, 1e6), default=30.0, show_default=True, help="Time for which a server is watched."
)
@click.option("--cost", metavar="FILE", help="Cost model for the simulator.  [default: guessed from the requests]")
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as one JSON object.")
@tls_options
def doctor(
    source: str | None,
    port: int | None,
    api_key: str | None,
    model: str | None,
    seconds: float,
    cost: str | None,
    cafile: str | None,
    *,
    as_json: bool,
    insecure: bool,
) -> None:
    """Say why a server is slow, and which setting to change, with the figures that show it.

    URL is http://127.0.0.1:8000 unless given. A RECORDING is a file of `penstock serve --record`.

    \b
    Exit status: 0 healthy, 1 a cause was found, 2 it can't tell.
    """
    warn_of_unknown_variables()
    context = click.get_current_context()
    is_file = source is not None and not source.startswith(("http://", "https://"))
    if is_file and (wrong := next(filter(is_given, _OF_SERVERS), None)):
        raise click.UsageError(
            f"--{wrong.replace('_', '-')} is for a server, and {source} is taken for a file: leave it out. "
            "The URL of a server begins with http:// or https://."
        )
    try:
        if cost is not None:  # before a server is watched
            from penstock.lab.cost_files import load_cost

            fitted = load_cost(Path(cost)).cost
        if source is not None and is_file:
            evidence, predictor = _read_recording(Path(source))
        else:
            evidence = _watch(reader_of(source, port, api_key, model, cafile, insecure=insecure), seconds)
            predictor = predictor_of(evidence)
        if cost is not None:
            predictor.cost = fitted
        diagnosis = diagnose(evidence, predictor.gain)
    except PenstockError as error:
        click.echo(f"error: {printable(str(error))}", err=True)
        context.exit(EXIT_CODES[Verdict.UNKNOWN])
    told = (
        json.dumps(_as_json(diagnosis, predictor.doubt), indent=2) if as_json else "\n".join(_lines(diagnosis, predictor.doubt))
    )
    click.echo(printable(told))
    context.exit(EXIT_CODES[diagnosis.verdict])


# What it reads


def _watch(reader: Reader, seconds: float) -> Evidence:
    """Read a server's pages twice. Raises PenstockError."""
    try:
        began_s, before = time.monotonic(), reader.metrics()
        time.sleep(seconds)
        window_s, after = time.monotonic() - began_s, reader.metrics()
        load, explained = reader.load(), reader.get_json(f"/v1/requests?ended={_MAX_ENDED}")
        return Evidence.of(
            visits_of(explained["data"], reader.model, max(_RECENT_S, seconds)),
            Scrape(before, reader.model),
            Scrape(after, reader.model),
            window_s,
            settings=load.get("settings", {}),
            capacity=load.get("capacity", {}),
            own_tenant=explained["tenant"],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise PenstockError(f"The server sent an answer that can't be read: {error!r}.", remedy=OTHER_SERVER) from error


def _read_recording(path: Path) -> tuple[Evidence, Predictor]:
    from penstock.lab.acceptance import acceptance_of
    from penstock.lab.fitting import fit
    from penstock.lab.recording import open_recording
    from penstock.lab.replayed import show
    from penstock.lab.steps import steps_of
    from penstock.lab.traces import read_workload
    from penstock.serve.ops.requests import choice_of
    from penstock.serve.ops.status import capacity_of

    recording = open_recording(path)
    header, shown = recording.header, show(recording)
    explained = [
        {"model": header.model, "age_ms": (shown.end_ns - told.arrival_ns) / 1e6, "choices": [choice_of(told, 0)]}
        for told in shown.explanations
    ]
    window_s = (shown.end_ns - shown.begin_ns) / 1e9
    evidence = Evidence.of(
        visits_of(explained, header.model, window_s),
        Scrape(shown.before, header.model),
        Scrape(shown.after, header.model),
        window_s,
        settings=header.settings,
        capacity=capacity_of(header.capacity),
    )
    predictor = predictor_of(evidence)
    with suppress(PenstockError):  # only background requests, or no known answer
        predictor = Predictor(evidence, read_workload(path))
    predictor.depth = header.depth
    with suppress(ArithmeticError, ValueError, PenstockError):  # too few steps, or steps without times
        predictor.cost = fit(steps_of(recording), are_in_order=True).cost
    with suppress(PenstockError):  # nothing was guessed
        predictor.acceptance = acceptance_of(str(path))
    return evidence, predictor


# What the simulator says


def predictor_of(evidence: Evidence) -> Predictor:
    """Build a workload from the requests seen: arrival times, lengths, prefix hits and accepted guesses."""
    from penstock.lab.acceptance import NONE, RIGHT, Acceptance
    from penstock.lab.workload import Job, Workload

    visits = sorted(evidence.visits, key=lambda one: -one.age_s)
    ended = [one.num_answer_tokens for one in visits if one.finish_reason is not None]
    usual, oldest_s = sum(ended) // max(1, len(ended)), visits[0].age_s if visits else 0.0
    block_size = evidence.capacity.get("block_size", 16)
    jobs = [
        Job(
            arrival_ns=round((oldest_s - one.age_s) * 1e9),
            num_prompt_tokens=max(1, one.num_prompt_tokens),
            num_output_tokens=max(1, one.num_answer_tokens if one.finish_reason else max(usual, one.num_answer_tokens)),
            prefix=tuple(range(1, one.num_hit_tokens // block_size + 1)),
        )
        for one in visits
    ]
    predictor = Predictor(evidence, Workload(name="seen", jobs=jobs, prefix_block_tokens=block_size))
    if any(one.num_accepted for one in visits):
        marks = [
            bytes([RIGHT]) * one.num_accepted + bytes([NONE]) * (one.num_answer_tokens - one.num_accepted) for one in visits
        ]
        predictor.acceptance = Acceptance([one for one in marks if one])
    return predictor


def _guessed_cost(evidence: Evidence) -> CostModel:
    """Return the default cost model, scaled to the observed steps and prompts."""
    from penstock.lab.cost_model import CostModel
    from penstock.types.plan import StepShape

    default, visits = CostModel(), evidence.visits
    num_rows = max(1, round(sum(one.mean_batch for one in visits) / len(visits)))
    context_len = sum(one.num_prompt_tokens + one.num_answer_tokens // 2 for one in visits) // len(visits)
    plain_s = evidence.plain_step_s
    scale = plain_s * 1e9 / default.duration_ns(StepShape(((1, context_len),) * num_rows, num_rows)) if plain_s else 1.0
    num_tokens = sum(max(0, one.num_prompt_tokens - one.num_hit_tokens) for one in visits)
    work_s = sum(one.parts_s["prefill"] - one.num_prefill_steps * plain_s for one in visits)
    return replace(
        default,
        step_ns=default.step_ns * scale,
        decode_row_ns=default.decode_row_ns * scale,
        decode_read_ns=default.decode_read_ns * scale,
        prefill_token_ns=max(0.0, work_s) * 1e9 / max(1, num_tokens),
        prefill_read_ns=0.0,
    )


class Predictor:
    """Simulates the requests with the server's settings, and with changed ones."""

    def __init__(self, evidence: Evidence, workload: Workload) -> None:
        self._evidence, self._workload = evidence, workload
        self.cost: CostModel | None = None
        """None derives a cost model from the observed requests."""
        self.acceptance: Acceptance | None = None
        self.depth: int | None = None
        """Most steps in flight. None takes the CPU's."""
        self.doubt = ""
        """Why no gain is predicted, or empty."""
        self._before: RequestTimes | None = None

    def gain(self, change: Mapping[str, Any]) -> Prediction | None:
        """Return a change's gain, or None if the simulator can't apply it or does not reproduce the observed times."""
        evidence = self._evidence
        if not evidence.capacity or not any(one.num_answer_tokens for one in evidence.visits) or not self._shows(change):
            return None
        if self.cost is None:
            self.cost = _guessed_cost(evidence)
        try:
            self._before = self._before or self._times({})
            after = self._times(change)
        except (PenstockError, RuntimeError) as error:
            if self._before is None:
                self.doubt = f"No gain is predicted: {error.message if isinstance(error, PenstockError) else error}"
            return None
        before_s, seen_s = self._before.mean_s, evidence.total_s / len(evidence.visits)
        if 0.5 <= before_s / seen_s <= 2:
            return Prediction(self._before, after)
        self.doubt = (
            f"No gain is predicted: simulated as they were, requests take {figure(before_s, digits=2)} s, and they took "
            f"{figure(seen_s, digits=2)} s."
        )
        return None

    def _shows(self, change: Mapping[str, Any]) -> bool:
        """Return whether the simulated workload can show the change's effect. It lacks background requests and `max_tokens`."""
        if change.get("policy") == "fair":
            return len({job.tenant for job in self._workload.jobs}) > 1
        return not {"background_share", "reserve"} & change.keys()

    def _times(self, change: Mapping[str, Any]) -> RequestTimes:
        records = self._simulation(change).run(self._workload).records
        times_s = sorted((one.ended_ns - one.intended_ns) / 1e9 for one in records)
        slowest_s = times_s[-max(1, len(times_s) // 10) :]
        gap_s = max((gap_ns / 1e9 for one in records for gap_ns in one.gaps_ns), default=0.0)
        return RequestTimes(sum(times_s) / len(times_s), sum(slowest_s) / len(slowest_s), gap_s)

    def _simulation(self, change: Mapping[str, Any]) -> Simulation:
        from penstock.deploy.forecast import simulation_of
        from penstock.deploy.recorder import NOT_RECORDED

        assert self.cost is not None, "guessed before"
        capacity = self._evidence.capacity
        known = setting_keys("kv", "scheduler")
        settings = {
            **{key: value for key, value in self._evidence.settings.items() if key in known and value != NOT_RECORDED},
            "block_size": capacity["block_size"],
            "max_num_seqs": capacity["rows"],
            "max_num_batched_tokens": capacity["step_tokens"],
            "max_model_len": capacity["model_len"],
            **change,
        }
        num_blocks = settings.pop("kv_blocks", capacity["blocks"])
        asked = {key: value for key, value in settings.items() if value is not None and key not in _NOT_SIMULATED}
        simulation = simulation_of(config_from(parse_settings(asked, all_settings())), self.cost, num_blocks=num_blocks)
        depth = self.depth or simulation.depth
        return replace(simulation, limits=None, max_tokens=None, acceptance=self.acceptance, depth=depth)


# What it says


def _advice(change: Mapping[str, Any]) -> str:
    """Return the flags of a change."""
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in change.items() if value is not None and key != "kv_blocks"]
    without = [f"--{key.replace('_', '-')}" for key, value in change.items() if value is None]
    return " ".join([*flags, *([f"without {', '.join(without)}"] if without else [])])


def _gain(gain: Prediction) -> str:
    before, after = gain.before, gain.after
    new_s, old_s, slowest_s, slowest_before_s = [
        figure(value, digits=2) for value in (after.mean_s, before.mean_s, after.slowest_s, before.slowest_s)
    ]
    return (
        f"Simulated with and without it, a request takes {new_s} s instead of {old_s} s in the mean, "
        f"{slowest_s} s instead of {slowest_before_s} s among the slowest tenth, and the longest gap between two "
        f"tokens is {after.gap_s * 1e3:.0f} ms instead of {before.gap_s * 1e3:.0f} ms."
    )


def _lines(diagnosis: Diagnosis, doubt: str = "") -> Iterator[str]:
    words = {Verdict.HEALTHY: "Nothing is wrong.", Verdict.ILL: "Found:", Verdict.UNKNOWN: "Can't tell."}
    yield from textwrap.wrap(f"{words[diagnosis.verdict]} {diagnosis.summary}", _WIDTH, break_on_hyphens=False)
    for number, one in enumerate(diagnosis.findings, 1):
        yield ""
        yield f"{number}. {one.rule.name}: {one.share:.0%} of the requests' time; {one.symptom}"
        texts = [one.rule.cause, one.evidence, one.rule.remedy]
        if advice := _advice(one.change):
            texts.append(f"Try{' (not simulated)' if one.gain is None else ''}: {advice}.")
        if one.gain is not None:
            texts.append(_gain(one.gain))
        for text in texts:
            yield from textwrap.wrap(text, _WIDTH, initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False)
    if doubt:
        yield ""
        yield from textwrap.wrap(doubt, _WIDTH, break_on_hyphens=False)


def _as_json(diagnosis: Diagnosis, doubt: str) -> dict[str, object]:
    return {
        "verdict": diagnosis.verdict,
        "summary": diagnosis.summary,
        "doubt": doubt,
        "findings": [
            {
                "name": one.rule.name,
                "symptom": one.symptom,
                "cause": one.rule.cause,
                "share": round(one.share, 4),
                "lost_s": round(one.lost_s, 4),
                "evidence": one.evidence,
                "remedy": one.rule.remedy,
                "change": one.change,
                "gain": None if one.gain is None else {"before": asdict(one.gain.before), "after": asdict(one.gain.after)},
            }
            for one in diagnosis.findings
        ],
    }
