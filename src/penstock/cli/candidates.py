"""Makes the simulated server for `penstock plan` and `penstock tune`, with the settings that `penstock serve` would have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.options import add_options
from penstock.types.errors import ConfigError, counted

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.deploy.forecast import Outline
    from penstock.lab.acceptance import Acceptance
    from penstock.lab.cost_files import SavedCost
    from penstock.lab.hardware import Hardware
    from penstock.lab.plan import Candidate

ESTIMATE_ERROR, KERNELS_ERROR = 1.5, 1.1
"""Factor within which most step times are right, by their source (docs/plan.md): estimates from peaks; published kernel times,
and fits that do not know their error."""


hardware_options = add_options(
    click.option(
        "--hardware",
        default="this",
        show_default=True,
        metavar="NAME",
        help="This machine, probed now, or names such as L4 or c7i.4xlarge. `penstock plan --hardware list` lists them.",
    ),
    click.option(
        "--hardware-table",
        type=click.Path(path_type=Path),
        metavar="FILE.csv",
        help="More hardware, as in lab/hardware.csv.",
    ),
    click.option(
        "--cost",
        metavar="FILE|NAME=FILE,...",
        help="Step times from `penstock profile`, for the machine or each by name, instead of estimates from peaks.",
    ),
)


def read_model(config: Config, *, is_gpu: bool) -> Outline:
    """Read a model's outline from the headers of its local files. Raises PenstockError."""
    from penstock.deploy.factory import find_source
    from penstock.deploy.forecast import read_outline, require_answers
    from penstock.deploy.resolve import decide

    source = find_source(config)
    if not source.is_present:
        raise ConfigError(
            f"The files of {source.name} are not here; their headers are needed.",
            remedy=f"Fetch them with `penstock pull {config.model.model}`, or name a folder with the model's config.json.",
        )
    outline = read_outline(config, source, decide(config, is_gpu=is_gpu))
    require_answers(outline.name, outline.spec, "a plan")
    return outline


def find_machines(names: str, table: Path | None, *, num_threads: int | None = None) -> list[Hardware]:
    """Return the machines that --hardware names, without duplicates. Raises ConfigError for an unknown name.

    `num_threads`: threads that probe this machine. None takes `serve`'s default.
    """
    from penstock.lab.hardware import find

    known = all_hardware(table)
    wanted = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if not wanted:
        raise ConfigError(f"--hardware is {names!r}, which names no hardware.", remedy="Leave it out for this machine.")
    return [_this_machine(num_threads) if name.lower() == "this" else find(name, known) for name in wanted]


def all_hardware(table: Path | None) -> dict[str, Hardware]:
    """Return machines by name: Penstock's table of hardware, extended or overridden by the user's. Raises ConfigError."""
    from penstock.lab.hardware import known_hardware, read_table

    own = read_table(table) if table is not None else {}
    taken = {*map(str.lower, own)}
    return {name: one for name, one in known_hardware().items() if name.lower() not in taken} | own


def _this_machine(num_threads: int | None) -> Hardware:
    from penstock.backends.native import probe_peaks
    from penstock.backends.native.choice import chosen
    from penstock.lab.hardware import this_machine
    from penstock.machine import available_memory_bytes, cpu_name, find_cores

    num_threads = num_threads or find_cores().num_threads
    peaks = probe_peaks(num_threads, chosen().variant)
    return this_machine(
        name=f"{cpu_name() or 'a processor'}, {num_threads} threads, {peaks.variant}",
        memory_bytes=available_memory_bytes(),
        read_bytes_per_s=peaks.read_bytes_per_s,
        int8_ops_per_s=peaks.quantised_ops_per_s,
        bf16_ops_per_s=peaks.bf16_ops_per_s,
    )


def read_costs(text: str | None, machines: Sequence[Hardware]) -> dict[str, SavedCost]:
    """Read the cost models that --cost names: machine -> cost. Raises PenstockError for a file of another machine."""
    from penstock.lab.cost_files import load_cost
    from penstock.machine import cpu_name

    if text is None:
        return {}
    names = {machine.name.lower(): machine.name for machine in machines}
    if "=" not in text and len(machines) > 1:
        raise ConfigError(
            "A fitted cost model is of one machine.",
            remedy=f"Name the machine: --cost {machines[0].name}={text}; the others are estimated.",
        )
    found: dict[str, SavedCost] = {}
    for part in text.split(",") if "=" in text else [f"{machines[0].name}={text}"]:
        name, _, path = part.strip().partition("=")
        machine = names.get(name.lower())
        if machine is None or not path:
            raise ConfigError(
                f"--cost {part!r} is not a file for one of {', '.join(names.values())}.", remedy="Write NAME=FILE,NAME=FILE."
            )
        if machine in found:
            raise ConfigError(f"--cost names two files for {machine}.", remedy="Leave one of them out.")
        saved = found[machine] = load_cost(Path(path))
        if machine != "this" and saved.source != "table" and saved.machine.get("cpu") == cpu_name():
            raise ConfigError(
                f"{path} has the step times of this machine, and {machine} is another one.",
                remedy="Leave out --hardware for this machine, or --cost for estimates of the other one.",
            )
    return found


def make_candidate(
    config: Config,
    outline: Outline,
    hardware: Hardware,
    saved: SavedCost | None,
    acceptance: Acceptance | None = None,
    *,
    seed: int = 0,
) -> Candidate:
    """Return a simulation of what `penstock serve` would start on this hardware with this config. Raises PenstockError."""
    from penstock.deploy.forecast import ASSUMED_SYSTEM_BYTES, forecast, refuse_own_guesser, refuse_unsimulated, simulated
    from penstock.lab.plan import Candidate
    from penstock.lab.sizing import roofline, speeds

    refuse_unsimulated(config)
    refuse_own_guesser(config)
    is_other_cpu = not hardware.is_gpu and hardware.name != "this"
    memory_bytes = hardware.memory_bytes - (ASSUMED_SYSTEM_BYTES if is_other_cpu else 0)
    expected = forecast(config, outline, is_gpu=hardware.is_gpu, memory_bytes=memory_bytes)
    size = outline.size(expected.compute.kv_dtype, is_gpu=hardware.is_gpu)
    rates = speeds(size, hardware)
    cost = saved.cost if saved else roofline(size, rates)
    simulation = replace(
        simulated(config, expected.compute, expected.kv.capacity, cost),
        limits=None,
        max_tokens=None,
        acceptance=acceptance,
        seed=seed,
    )
    doubts = list(_doubts(config, outline, hardware, saved))
    if acceptance is None and simulation.may_guess:
        doubts.append("No guesses of tokens (--speculation) are simulated.")
    if acceptance is not None and not simulation.may_guess:
        doubts.append("--acceptance has no effect: this server does not guess tokens.")
    source, error = _step_times(saved)
    if any(_of_others(config, outline, hardware, saved)):
        error = max(error, ESTIMATE_ERROR)
    return Candidate(
        simulation=simulation,
        size=size,
        rates=rates,
        is_fitted=saved is not None,
        step_source=source,
        step_error=error,
        doubts=doubts,
    )


def _step_times(saved: SavedCost | None) -> tuple[str, float]:
    """Return the source of the step times, and the factor within which they are taken to be right."""
    if saved is None:
        return "estimated from peaks", ESTIMATE_ERROR
    if saved.is_estimated:
        return f"estimated: {saved.words}", ESTIMATE_ERROR
    if saved.source == "kernels":
        return f"measured kernels: {saved.words}", KERNELS_ERROR
    missed = saved.errors.get("execute")
    return f"fitted: {saved.words}", KERNELS_ERROR if missed is None else 1 + missed.p90


def _is_of(hardware: Hardware, machine: str) -> bool:
    """Return whether a machine's name contains the hardware's, as `NVIDIA RTX PRO 6000 Server Edition` has `RTXPRO6000`."""
    spelled = r"[\W_]*".join(map(re.escape, hardware.name))
    return re.search(rf"(?<![a-z0-9]){spelled}(?![a-z0-9])", machine, re.IGNORECASE) is not None


def _doubts(config: Config, outline: Outline, hardware: Hardware, saved: SavedCost | None) -> Iterator[str]:
    """Yield the report's warnings about assumptions on the model, its memory and its step times."""
    if saved is None:
        yield (
            f"Step times are estimates from peaks ({hardware.basis}): single ones may be half or twice as long, and a limit "
            "near the best TTFT of a long prompt multiplies that in the rate. `penstock profile --fit cost.json` there, then "
            "--cost cost.json, give the real one."
            + (f" Or import kernel times that {hardware.tables} measured (docs/profile.md)." if hardware.tables else "")
        )
    elif saved.is_estimated:
        yield f"Step times are estimates: {saved.words}."
    yield from _of_others(config, outline, hardware, saved)
    if saved is not None and (num_gpus := saved.machine.get("gpus", 1)) != 1:
        yield (
            f"The step times are those of {num_gpus} GPUs that share each layer: the memory and the price of {hardware.name} "
            "must be those of all of them (--hardware-table)."
        )
    types = [saved.notes.get(name, "bfloat16") for name in ("weights", "kv")] if saved and saved.source == "kernels" else []
    if any(one != "bfloat16" for one in types):
        yield (
            f"The step times are those of {types[0]} weights and {types[1]} keys and values. Memory is planned for those of "
            "the model's files and of --kv-cache-dtype."
        )
    if outline.num_disk_bytes and (saved is None or saved.is_estimated):
        yield "Step times are as if memory held all experts. Those that it does not hold come from the disk, which is slower."
    if outline.assumed_formats:
        yield f"The weights of {outline.name} are missing. Assumed formats: {outline.assumed_formats}."
    if hardware.is_gpu:
        yield "The memory of a GPU's steps is assumed; a server measures it when it starts, and has more or fewer KV blocks."


def _of_others(config: Config, outline: Outline, hardware: Hardware, saved: SavedCost | None) -> Iterator[str]:
    """Yield warnings if the step times are from another machine, number of threads or model.

    The table of hardware lacks the processors' names of CPU instances, and tables of step times name machines in free words, so
    those are not compared.
    """
    from penstock.machine import cpu_name, find_cores

    if saved is None:
        return
    machine, threads, is_this = str(saved.machine.get("cpu", "")), saved.machine.get("threads"), hardware.name == "this"
    name = (cpu_name() or hardware.name) if is_this else hardware.name
    is_other = saved.source != "table" and machine != name if is_this else hardware.is_gpu and not _is_of(hardware, machine)
    if machine and is_other:
        yield f"The step times are those of {machine}, not of {name}."
    elif threads and threads != (asked := config.backend.threads or (find_cores().num_threads if is_this else threads)):
        yield f"The step times are those of {counted(threads, 'thread')}, not of {asked}."
    if saved.model and _last(saved.model) != _last(outline.name):
        yield f"The step times are those of {saved.model}, not of {outline.name}."


def _last(model: str) -> str:
    """Return the last part of a model's name: `llama-3.1-8b` of `meta-llama/Llama-3.1-8B`."""
    return model.rstrip("/").rpartition("/")[2].lower()
