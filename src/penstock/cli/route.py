"""`penstock route`: learns from answered questions which of them need the large model, and says what that saves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.files import check_writable, output_file, write_text
from penstock.cli.options import (
    EPILOG,
    FILE,
    GroupedCommand,
    NumberRange,
    add_options,
    config_options,
    models_argument,
    printable,
    routing_of_file,
)
from penstock.config.several import configs_of
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with NumPy
    from penstock.config import Config
    from penstock.deploy.routes import Route
    from penstock.routes.answers import F64, Answers, Chat, Rows
    from penstock.routes.curve import Figures, Interval
    from penstock.routes.learned import LearnedRoute
    from penstock.routes.unseen import Starts

LEAST_QUESTIONS = 50
MAX_TRANSFERRED = 4
"""Most groups that are also judged by fits to each other."""
_NO_INTERVAL = "(-)"
_HEAD = ("", "questions", "weak", "strong", "half of the calls", "APGR", "calls for 80 % of the gain", "for all but a point")

_answers = add_options(
    click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--weak", default="weak", show_default=True, metavar="KEY", help="Key of the small model's result."),
    click.option("--strong", default="strong", show_default=True, metavar="KEY", help="Key of the large model's result."),
    click.option("--group", metavar="KEY", help="Key of a question's group, up to its first `/`, for figures of each."),
)


@click.group()
def route() -> None:
    """Learn which questions need the large model, and what it saves to ask it only those.

    FILE has a JSON object in each line (.jsonl, or .jsonl.gz): `prompt` or `messages`, and the results of two models, each
    true, false or a number from 0 to 1.
    """


@route.command()
@_answers
@click.option("--embedder", default="minilm", show_default=True, metavar="MODEL", help="Embedding model.")
@click.option("--cascade", default="", metavar="MODEL", help="The small model, if the first tokens of its answers decide too.")
@click.option("--window", type=click.IntRange(1, 1024), default=16, show_default=True, help="How many tokens those are.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE.route.json.")
def fit(
    file: Path,
    weak: str,
    strong: str,
    group: str | None,
    embedder: str,
    cascade: str,
    window: int,
    output: Path | None,
) -> None:
    """Fit a route to the questions in FILE, and write it.

    The figures come from five-fold cross-validation. With up to four groups, each is also judged by the fits to the
    other groups.
    """
    import numpy as np

    from penstock.routes.answers import read_answers
    from penstock.routes.unseen import fit_route

    path = output or file.with_name(f"{file.name}.route.json")
    check_writable(path)
    answers = read_answers(file, weak=weak, strong=strong, group=group)
    if len(answers) < LEAST_QUESTIONS:
        raise ConfigError(f"{file} has {len(answers)} questions.", remedy=f"A fit needs {LEAST_QUESTIONS}, better a thousand.")
    check_gain(answers)
    vectors = embed(embedder, answers.prompts)
    starts = begin(cascade, answers.chats, window) if cascade else None

    def fitted_to(rows: Rows | slice) -> tuple[LearnedRoute, F64]:
        some = None if starts is None else [starts[row] for row in np.arange(len(answers))[rows]]
        part = answers if isinstance(rows, slice) else answers.part(rows)
        return fit_route(part, vectors[rows], embedder, some, starter=cascade, window=window)

    found, gains = fitted_to(slice(None))
    lines = [("all", answers, gains)]
    parts = parts_of(answers)
    large = [name for name, rows in parts.items() if len(rows) >= LEAST_QUESTIONS and len(parts) > 1]
    fits = {name: fitted_to(parts[name]) for name in large}
    lines += [(name, answers.part(parts[name]), fits[name][1]) for name in large]
    for one, other in itertools.permutations(large, 2) if len(large) <= MAX_TRANSFERRED else ():
        rows, (route, _) = parts[other], fits[one]
        part = answers.part(rows)
        some = None if starts is None else [starts[row] for row in rows]
        lines.append((f"{other}, fitted to {one}", part, gains_of(route, vectors[rows], part, some)))
    show(lines)
    replace(found, digests={name: digest(name) for name in filter(None, (embedder, cascade))}).write(path)
    print(f"Wrote {path}.")


@route.command("eval")
@_answers
@click.option("--route", "path", type=click.Path(dir_okay=False, path_type=Path), help="What `fit` wrote.")
@click.option("--confidence", metavar="KEY", help="Without a fit: key of the small model's confidence, from 0 to 1.")
@click.option("--share", type=NumberRange(0, 1), help="Of a fit: calls for the large model.  [default: 0.5]")
@click.option("--scores", type=FILE, callback=output_file, help="Write the gains for `penstock simulate`.")
def evaluate(
    file: Path,
    weak: str,
    strong: str,
    group: str | None,
    path: Path | None,
    confidence: str | None,
    share: float | None,
    scores: Path | None,
) -> None:
    """Say what a route does for the questions in FILE, which its fit should not have seen.

    A route by agreement, verifier or judge has no fit, but a confidence, which X-Route reports. For --scores, FILE needs
    the `usage` of both answers to each question, under the key of their results.
    """
    from penstock.routes.answers import read_answers
    from penstock.routes.scores import read_usage, scores_text

    if (path is None) == (confidence is None):
        raise ConfigError("A route is judged by its fit, or by a confidence.", remedy="Give --route or --confidence.")
    if path is None and share is not None:
        raise ConfigError("--share has no effect with --confidence.", remedy="Leave it out: all levels are printed.")
    answers = read_answers(file, weak=weak, strong=strong, confidence=confidence, group=group)
    check_gain(answers)
    usage = [] if scores is None else read_usage(file, (weak, strong))
    told = _by_confidence(answers) if path is None else _by_fit(path, answers, 0.5 if share is None else share, weak, strong)
    if scores is not None:
        write_text(scores, scores_text(usage, (answers.weak, answers.strong), told))


def _by_fit(path: Path, answers: Answers, share: float, weak: str, strong: str) -> dict[str, F64]:
    """Print what a fit does for these questions, and return its scores."""
    import numpy as np

    from penstock.routes.learned import inputs_of, read_route

    found = read_route(path)
    vectors, cascade = embed(found.embedder, answers.prompts), found.cascade
    starts = None if cascade is None else begin(cascade.starter, answers.chats, cascade.window)
    gains = gains_of(found, vectors, answers, starts)
    show(_with_parts(answers, gains))
    threshold = found.threshold(share)
    scores = {"gain": found.by_question.gains(inputs_of(vectors, answers.prompts))}
    if cascade is not None:
        scores["start_gain"] = gains
        is_tried = np.array([found.tries(gain, threshold) for gain in scores["gain"]])
        gains = np.where(is_tried, gains, scores["gain"])
        print(f"{weak} begins {is_tried.mean():.1%} of the answers; of the others, the question decides.")
    if (fitted := found.fitted_gains(threshold)) is not None:
        from penstock.routes.drift import distance

        print(f"Their gains are {distance(gains, fitted):.3f} from those of the fit (Kolmogorov-Smirnov distance).")
    is_strong = gains >= threshold
    sent, quality = is_strong.mean(), (answers.strong * is_strong + answers.weak * ~is_strong).mean()
    print(f"Its threshold for {share:.0%} of the calls sends {sent:.1%} of these to {strong}: quality {quality:.1%}.")
    return scores


def _by_confidence(answers: Answers) -> dict[str, F64]:
    """Print each confidence threshold's effect on these questions, and return their confidence."""
    from penstock.routes.curve import kept_from

    confidence = answers.confidence
    assert confidence is not None
    show(_with_parts(answers, 1 - confidence))
    rows = [("least", "kept", "right, of the kept", "of all")]
    rows += [
        (f"{math.floor(1000 * one.least) / 1000:.3f}", f"{one.share:.1%}", f"{one.quality_of_kept:.1%}", f"{one.quality:.1%}")
        for one in kept_from(answers, confidence)
    ]
    print_table(rows)
    return {"confidence": confidence}


def _with_parts(answers: Answers, gains: F64) -> list[tuple[str, Answers, F64]]:
    """Return the rows for `show`: all answers, then each group's if there are several groups."""
    parts = parts_of(answers)
    more = [(name, answers.part(rows), gains[rows]) for name, rows in parts.items()] if len(parts) > 1 else []
    return [("all", answers, gains), *more]


@route.command(cls=GroupedCommand, epilog=EPILOG)
@models_argument
@click.option("--question", default="", metavar="TEXT", help="Example question: show which model each route would choose.")
@config_options("model", "kv", "lora", "scheduler", "admission", "backend", "server", "sharing", "log")
def check(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], question: str, **values: Any) -> None:
    """Say whether the routes and pipelines of a configuration can work, without serving it.

    Takes what `penstock serve` takes: MODEL, --config and the settings. Nothing is fetched, and no upstream is asked. For a
    --question, the embedding model of a learned route runs.
    """
    from penstock.cli.route_check import check as check_routes
    from penstock.cli.serve import models_in

    configs = configs_of(values, words=words, tables=tables, folder=models_in(values["models_dir"]))
    routing = routing_of_file()
    if not routing.routes and not routing.pipelines:
        raise ConfigError("The configuration has no routes.", remedy="Name a file with [[routes]] by --config.")
    found = check_routes(configs, routing, question, partial(_gain, question))
    width = max((len(subject) for subject, _ in found.facts), default=0)
    for subject, told in found.facts:
        print(printable(f"{subject:{width}}  {told}"))
    for fault in found.faults:
        print(printable(f"error: {fault}"))
    if found.faults:
        click.get_current_context().exit(1)


def _gain(question: str, route: Route, embedder: Config) -> float:
    import numpy as np

    learned = route.learned
    assert learned is not None
    of_model = embedder.model
    settings = {"cache": of_model.cache_dir, "task": of_model.task, "pooling": of_model.pooling}
    [vector] = embed(of_model.model, [question], **settings)
    return learned.gain(vector.astype(np.float32).tobytes(), question)


def digest(model: str) -> str:
    """Return the hash that `penstock route check` uses to detect a changed model."""
    from penstock.deploy.routes import digest_of
    from penstock.models import catalog
    from penstock.models.cache import cache_dir

    return digest_of(catalog.resolve(model, cache_dir(None)))


def gains_of(route: LearnedRoute, vectors: F64, answers: Answers, starts: Starts | None) -> F64:
    """Return the gain of each question, by its first tokens too if the route is a cascade."""
    from penstock.routes.learned import inputs_of

    fit = route.by_question if route.cascade is None else route.cascade.fit
    return fit.gains(inputs_of(vectors, answers.prompts, starts))


def check_gain(answers: Answers) -> None:
    """Raise ConfigError if the strong model is not the better one."""
    strong, weak = answers.strong.mean(), answers.weak.mean()
    if not strong > weak:
        raise ConfigError(
            f"The quality of the strong model is {strong:.1%}, and that of the weak one {weak:.1%}.",
            remedy="Ask the weak one alone, or swap --weak and --strong.",
        )


def embed(model: str, prompts: Sequence[str], **settings: object) -> F64:
    """Return vectors of length 1. [prompts, width]. `settings`: of `LLM`."""
    import numpy as np

    from penstock.llm import LLM

    with LLM(model, **settings) as llm:
        answers = llm.embed(list(prompts), truncate_prompt_tokens=-1)
    vectors = np.array([answer.outputs.embedding for answer in answers], dtype=np.float64)
    found: F64 = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return found


def begin(model: str, chats: Sequence[Chat], num_tokens: int) -> list[list[float]]:
    """Return the log-probabilities of the first tokens of the model's most likely answers."""
    from penstock.inprocess import SamplingParams
    from penstock.llm import LLM

    with LLM(model) as llm:
        answers = llm.chat([list(chat) for chat in chats], SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0))
    starts = []
    for answer in answers:
        output = answer.outputs[0]
        starts.append([known[token].logprob for token, known in zip(output.token_ids, output.logprobs or (), strict=False)])
    return starts


def parts_of(answers: Answers) -> dict[str, Rows]:
    """Return the rows of each group with a name."""
    import numpy as np

    names = sorted(set(filter(None, answers.groups)))
    groups = np.array(answers.groups)
    return {name: np.flatnonzero(groups == name) for name in names}


def show(lines: Iterable[tuple[str, Answers, F64]]) -> None:
    from penstock.routes.curve import figures_of

    rows: list[tuple[str, ...]] = [_HEAD]
    for name, answers, gains in lines:
        rows.append(_row(name, figures_of(answers, gains)))
    print_table(rows)
    if any(row[-1].endswith(_NO_INTERVAL) for row in rows):
        print(f"{_NO_INTERVAL}: no interval, because the strong model is not better in many samples of the questions.")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))


def _row(name: str, told: Figures) -> tuple[str, ...]:
    by_lot = (told.weak + told.strong) / 2
    alone = (
        name,
        f"{told.num_questions:,}",
        f"{told.weak:.1%}",
        f"{told.strong:.1%}",
        f"{told.half:.1%} (by lot {by_lot:.1%})",
    )
    if math.isnan(told.apgr):  # the strong model gains nothing
        return (*alone, "-", "-", "-")
    return (
        *alone,
        _with_interval(told.apgr, told.apgr_interval, ".3f"),
        _with_interval(told.share_for_80, told.share_for_80_interval, ".0%"),
        _with_interval(told.share_for_point, told.share_for_point_interval, ".0%"),
    )


def _with_interval(value: float, interval: Interval, spec: str) -> str:
    low, high = interval
    return f"{value:{spec}} {_NO_INTERVAL}" if math.isnan(low) else f"{value:{spec}} ({low:{spec}} to {high:{spec}})"
