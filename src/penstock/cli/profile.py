"""`penstock profile`: times steps on this machine or in a recording, and fits the simulator's cost model to them."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock import __version__
from penstock.cli.files import output_file
from penstock.cli.options import (
    EPILOG,
    FILE,
    FOLDER,
    NOT_IN_THE_LAB,
    GroupedCommand,
    NumberRange,
    check_named,
    config_options,
    is_given,
    model_argument,
    setting_keys,
    with_table,
)
from penstock.config.components import Config, config_from
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.ports import Executor
    from penstock.lab.fitting import Fit
    from penstock.lab.kernel_files import Choice
    from penstock.lab.recording import Recording
    from penstock.lab.step_table import Peaks


@click.command(cls=GroupedCommand, epilog=EPILOG)
@partial(model_argument, is_optional=True)
@click.option(
    "--fit", "fit_file", type=FILE, callback=output_file, help="Fit the simulator's cost model, and write it to FILE."
)
@click.option("--from", "source", type=FILE, metavar="RECORDING", help="Steps of a recording, instead of this machine's.")
@click.option(
    "--onto", type=FILE, metavar="COST", help="With --from and --fit: keep the proportions and the range of this fit."
)
@click.option(
    "--import",
    "folder",
    type=FOLDER,
    metavar="FOLDER",
    help="Kernel times that others published: of LLMServingSim, Vidur or AIConfigurator.",
)
@click.option("--model-config", type=FILE, metavar="FILE", help="With --import, of AIConfigurator: the model's config.json.")
@click.option("--engine", metavar="NAME/VERSION", help="With AIConfigurator: the engine, such as vllm/0.19.0.")
@click.option("--weights", help="With AIConfigurator: weight type as in the tables, or fp8_static. Default: bfloat16.")
@click.option("--kv", help="With AIConfigurator: KV cache type. Default: bfloat16.")
@click.option("--layers", type=click.IntRange(1, 10_000), help="With --import: layers of the model, if they are not known.")
@click.option("--hidden-size", type=click.IntRange(1, 1 << 20), help="With --import: hidden size, if not known.")
@click.option("--gpus", type=click.IntRange(1, 64), default=1, help="With --import: GPUs that share each layer.")
@click.option("--link-gbytes-per-s", type=NumberRange(0, min_open=True), help="With --gpus: 10^9 bytes that each sends.")
@click.option("--link-latency-us", type=NumberRange(0), default=0.0, help="With --gpus: fixed time added to each transfer.")
@click.option("--trace", type=FILE, callback=output_file, help="With --from: a trace for ui.perfetto.dev.")
@click.option(
    "--plot",
    "plot_file",
    type=FILE,
    callback=output_file,
    metavar="FILE.png",
    help="Without --fit and --from: the roofline, as a plot.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="How often each step is measured.")
@config_options(
    "model",
    "kv",
    "scheduler",
    "backend",
    without=NOT_IN_THE_LAB,
)
def profile(
    fit_file: Path | None,
    source: Path | None,
    onto: Path | None,
    folder: Path | None,
    layers: int | None,
    hidden_size: int | None,
    gpus: int,
    link_gbytes_per_s: float | None,
    link_latency_us: float,
    model_config: Path | None,
    engine: str | None,
    weights: str | None,
    kv: str | None,
    trace: Path | None,
    plot_file: Path | None,
    rounds: int,
    **values: Any,
) -> None:
    """Show how long steps of MODEL take on this machine.

    \b
      penstock profile
      penstock profile --fit cost.json
      penstock profile --from traffic.rec
      penstock profile --from traffic.rec --fit cost.json
      penstock profile --from traffic.rec --onto cost.json --fit served.json
      penstock profile --from traffic.rec --trace trace.json
      penstock profile --import RTXPRO6000/bf16 --fit cost.json
      penstock profile --import h200_sxm --engine vllm/0.19.0 --model-config config.json --fit cost.json
    """
    if folder is not None or source is not None:
        of_steps_here = ("model_word", "rounds", *setting_keys("model", "kv", "scheduler", "backend"))
        if wrong := next(filter(is_given, of_steps_here), None):
            flag = "MODEL" if wrong == "model_word" else f"--{wrong.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for steps of this machine: leave it out, or --from or --import.")
    if folder is not None:
        if source is not None or onto is not None or trace is not None or plot_file is not None:
            raise click.UsageError("--import reads published kernel times: leave out --from, --onto, --trace and --plot.")
        if gpus == 1 and (link_gbytes_per_s or link_latency_us):
            raise click.UsageError("One GPU has no link: say how many there are with --gpus.")
        from penstock.lab.kernel_files import Choice

        choice = Choice(
            num_layers=layers,
            hidden_size=hidden_size,
            num_gpus=gpus,
            link_bytes_per_s=1e9 * (link_gbytes_per_s or 0.0),
            link_latency_ns=1e3 * link_latency_us,
            model_config=model_config,
            engine=engine or "",
            weights=weights or "bfloat16",
            kv=kv or "bfloat16",
        )
        _import(folder, choice, fit_file)
        return
    if layers or hidden_size or gpus > 1 or link_gbytes_per_s or link_latency_us or model_config or engine or weights or kv:
        raise click.UsageError("These options need published kernel times: name them with --import.")
    if onto is not None and (source is None or fit_file is None):
        raise click.UsageError("--onto adds what a recording's steps took to a fit: name the recording with --from, and --fit.")
    if source is None:
        if trace is not None:
            raise click.UsageError("--trace is about a recording: name one with --from.")
        if fit_file is not None and plot_file is not None:
            raise click.UsageError("--plot draws the table, which --fit does not make: leave one of them out.")
        check_named()
        config = config_from(with_table(values))
        if fit_file is None:
            _show_steps(config, rounds, plot_file)
        else:
            _fit_here(config, rounds, fit_file)
        return
    if plot_file is not None:
        raise click.UsageError("--plot draws steps of this machine: leave out --from.")
    from penstock.lab.recording import open_recording

    _from_recording(open_recording(source), fit_file, trace, onto)


def _import(folder: Path, choice: Choice, fit_file: Path | None) -> None:
    from penstock.lab.cost_files import save_cost
    from penstock.lab.kernel_import import import_folder
    from penstock.lab.profiling import kernel_lines

    saved = import_folder(folder, choice)
    assert saved.cost.kernels is not None, "tables were imported"
    print(saved.words)
    for name, note in saved.notes.items():
        print(f"  {name}: {note}")
    for line in kernel_lines(saved.cost.kernels):
        print(line)
    if fit_file is None:
        print("Add --fit FILE to write a cost model.")
        return
    save_cost(fit_file, replace(saved, penstock=__version__))
    print(f"written to {fit_file}")


def _from_recording(recording: Recording, fit_file: Path | None, trace: Path | None, onto: Path | None) -> None:
    from penstock.lab.cost_files import load_cost
    from penstock.lab.fitting import fit
    from penstock.lab.profiling import recording_lines
    from penstock.lab.steps import steps_of, texts_of

    for line in recording_lines(recording):
        print(line)
    if trace is not None:
        from penstock.lab.perfetto import write_trace

        print(f"{write_trace(recording, trace)} events in {trace}: open it with https://ui.perfetto.dev")
    if fit_file is not None:
        base = None if onto is None else load_cost(onto)
        if base is not None and base.model not in ("", recording.header.model):
            cause = f"{onto} is a fit of {base.model}, and the recording is of {recording.header.model}."
            raise ConfigError(cause, remedy="Name a fit of the same model.")
        steps = steps_of(recording)
        try:
            onto_cost = None if base is None else base.cost
            fitted = fit(steps, are_in_order=True, base=onto_cost, texts=texts_of(recording))
        except ValueError as error:
            raise ConfigError(f"The recording can't be fitted: {error}.", remedy="Record more traffic.") from None
        header = recording.header
        notes = {"config": header.config, "began": header.began} | ({} if base is None else {"onto": base.words})
        machine = {**header.machine, "threads": header.about.get("threads"), "variant": header.about.get("variant")}
        _save(fit_file, fitted, "recording", header.model, machine, notes=notes)


def _show_steps(config: Config, rounds: int, plot_file: Path | None) -> None:
    from penstock.deploy.factory import locate, open_executor
    from penstock.deploy.forecast import read_outline, require_answers
    from penstock.deploy.resolve import decide
    from penstock.lab.plots import check_ending, draw, require
    from penstock.lab.step_table import figures_of, roofline_panel, shapes_of, step_lines
    from penstock.lab.steps import StepRunner, measure

    compute = decide(config)
    backend = compute.options.backend
    if plot_file is not None:  # before measuring for minutes
        require()
        check_ending(plot_file)
        if backend != "native":
            raise ConfigError(
                f"The peaks of the {backend} backend are unknown, so no roofline can be drawn.", remedy="Leave out --plot."
            )
    source = locate(config)
    outline = read_outline(config, source, compute)
    require_answers(outline.name, outline.spec, "a profile")
    blueprint, model, executor = open_executor(config, source)
    size = outline.size(blueprint.compute.kv_dtype, is_gpu=blueprint.compute.is_on_gpu)
    try:
        runner = StepRunner(executor, model.spec.vocab_size)
        runner.fill()
        steps, _ = measure(runner, shapes_of(executor.capacity), num_rounds=rounds, progress=_show_progress)
        peaks = _peaks(backend, executor, is_quantised=size.is_quantised)
    finally:
        executor.close()
    figures = figures_of(steps, size, peaks)
    print(f"{size.name}, {backend} backend; medians of {rounds} rounds")
    for line in step_lines(figures, peaks):
        print(line)
    if plot_file is not None:
        assert peaks is not None, "the backend was checked"
        draw(f"Steps of {size.name}", [roofline_panel(figures, peaks, peaks.words)]).save(plot_file)
        print(f"drawn in {plot_file}")


def _peaks(backend: str | None, executor: Executor, *, is_quantised: bool) -> Peaks | None:
    from penstock.lab.step_table import Peaks

    if backend != "native":
        return None
    from penstock.backends.native import probe_peaks

    threads = getattr(executor, "num_threads", 1)
    probed = probe_peaks(threads, getattr(executor, "variant", ""))
    kind, ops_per_s = (probed.quantised, probed.quantised_ops_per_s) if is_quantised else ("bf16", probed.bf16_ops_per_s)
    return Peaks(
        ops_per_s=ops_per_s, read_bytes_per_s=probed.read_bytes_per_s, words=f"{kind}, {threads} threads, {probed.variant}"
    )


def _fit_here(config: Config, rounds: int, fit_file: Path) -> None:
    from penstock.clock import WallClock
    from penstock.deploy.build import tokenizer_of
    from penstock.deploy.factory import locate, open_executor
    from penstock.deploy.forecast import require_answers
    from penstock.deploy.recorder import processor_name
    from penstock.lab.fitting import fit
    from penstock.lab.step_design import design
    from penstock.lab.steps import StepRunner, measure, measure_with_host
    from penstock.machine import usable_cpus
    from penstock.text.tokenizer import detokenizer_factory

    source = locate(config)
    blueprint, model, executor = open_executor(config, source)
    try:
        require_answers(model.name, model.spec, "a profile")
        tokenizer = tokenizer_of(model)
        vocab_size = min(model.spec.vocab_size, tokenizer.vocab_size)
        runner = StepRunner(executor, vocab_size)
        runner.fill()
        shapes = design(executor.capacity)
        of_shapes, after_them = measure(runner, shapes, num_rounds=rounds, progress=_show_progress)
        steps = of_shapes + after_them
        detokenizers = detokenizer_factory(tokenizer)
        first_group = 1 + max(step.group for step in steps)
        steps += measure_with_host(executor, detokenizers, vocab_size, WallClock(), first_group=first_group)
        backend = str(blueprint.compute.options.backend)
        machine = {
            "cpu": processor_name(backend),
            "cpus": usable_cpus(),
            "threads": getattr(executor, "num_threads", None),
            "variant": getattr(executor, "variant", None),
        }
    finally:
        executor.close()
    _save(fit_file, fit(steps), "profile", source.name, machine, notes={"backend": backend})


def _show_progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rround {done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


def _save(path: Path, fitted: Fit, source: str, model: str, machine: dict[str, Any], *, notes: dict[str, str]) -> None:
    from penstock.lab.cost_files import SavedCost, save_cost
    from penstock.lab.profiling import fit_lines

    saved = SavedCost(
        cost=fitted.cost,
        source=source,
        model=model,
        machine=machine,
        date=datetime.now(UTC).date().isoformat(),
        penstock=__version__,
        num_steps=fitted.num_steps,
        errors=fitted.left_out,
        notes=notes,
    )
    for line in fit_lines(fitted):
        print(line)
    save_cost(path, saved)
    print(f"written to {path}")
