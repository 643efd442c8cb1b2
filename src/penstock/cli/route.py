"""`penstock route`: learns from answered questions which of them need the large model, and says what that saves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.options import add_options
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with NumPy
    from penstock.routes.answers import F64, Answers, Rows
    from penstock.routes.curve import Figures

NUM_FOLDS, SEED = 5, 0
LEAST_QUESTIONS = 50
MAX_TRANSFERRED = 4
"""With more groups, none is judged by a fit to another one."""
_HEAD = ("", "questions", "weak", "strong", "half of the calls", "APGR", "calls for 80 % of the gain")

_answers = add_options(
    click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--weak", default="weak", show_default=True, metavar="KEY", help="Key of the small model's result."),
    click.option("--strong", default="strong", show_default=True, metavar="KEY", help="Key of the large model's result."),
    click.option("--group", metavar="KEY", help="Key of a question's group, up to its first `/`, for figures of each."),
)


@click.group()
def route() -> None:
    """Learn which questions need the large model, and what it saves to ask it only those.

    FILE has a JSON object in each line (.jsonl, or .jsonl.gz): `prompt`, and the results of two models, each true, false or a
    number from 0 to 1.
    """


@route.command()
@_answers
@click.option("--embedder", default="minilm", show_default=True, metavar="MODEL", help="Embedding model.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE.route.json.")
def fit(file: Path, weak: str, strong: str, group: str | None, embedder: str, output: Path | None) -> None:
    """Fit a route to the questions in FILE, and write it.

    Its figures are those of questions that the fit did not see: five fits, each without a fifth of them. Up to four
    groups are each judged by a fit to each other one, too.
    """
    from penstock.routes.answers import read_answers
    from penstock.routes.learned import fit as fit_route
    from penstock.routes.learned import thresholds_of

    answers = read_answers(file, weak=weak, strong=strong, group=group)
    if len(answers) < LEAST_QUESTIONS:
        raise ConfigError(f"{file} has {len(answers)} questions.", remedy=f"A fit needs {LEAST_QUESTIONS}, better a thousand.")
    check_gain(answers)
    vectors = embed(embedder, answers.prompts)
    gains = gains_unseen(vectors, answers, embedder)
    parts = parts_of(answers)
    lines = [("all", answers, gains)]
    for name, rows in parts.items() if len(parts) > 1 else ():
        part = answers.part(rows)
        if len(part) >= LEAST_QUESTIONS:
            lines.append((name, part, gains_unseen(vectors[rows], part, embedder)))
    large = [name for name, rows in parts.items() if len(rows) >= LEAST_QUESTIONS]
    for one, other in itertools.permutations(large, 2) if len(large) <= MAX_TRANSFERRED else ():
        fitted = fit_route(vectors[parts[one]], answers.part(parts[one]), embedder)
        part = answers.part(parts[other])
        lines.append((f"{other}, fitted to {one}", part, fitted.gains(vectors[parts[other]], part.prompts)))
    show(lines)
    path = output or file.with_name(f"{file.name}.route.json")
    fit_route(vectors, answers, embedder, thresholds_of(gains)).write(path)
    print(f"Wrote {path}.")


@route.command("eval")
@_answers
@click.option("--route", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="What `fit` wrote.")
@click.option("--share", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Calls for the large model.")
def evaluate(file: Path, weak: str, strong: str, group: str | None, path: Path, share: float) -> None:
    """Say what a route does for the questions in FILE, which its fit should not have seen."""
    from penstock.routes.answers import read_answers
    from penstock.routes.learned import read_route

    found, answers = read_route(path), read_answers(file, weak=weak, strong=strong, group=group)
    check_gain(answers)
    gains = found.gains(embed(found.embedder, answers.prompts), answers.prompts)
    parts = parts_of(answers)
    more = [(name, answers.part(rows), gains[rows]) for name, rows in parts.items()] if len(parts) > 1 else []
    show([("all", answers, gains), *more])
    is_strong = gains >= found.threshold(share)
    sent, quality = is_strong.mean(), (answers.strong * is_strong + answers.weak * ~is_strong).mean()
    print(f"Its threshold for {share:.0%} of the calls sends {sent:.1%} of these to {strong}: quality {quality:.1%}.")


def check_gain(answers: Answers) -> None:
    """Raise ConfigError if the strong model is not the better one."""
    strong, weak = answers.strong.mean(), answers.weak.mean()
    if not strong > weak:
        raise ConfigError(
            f"The quality of the strong model is {strong:.1%}, and that of the weak one {weak:.1%}.",
            remedy="Ask the weak one alone, or swap --weak and --strong.",
        )


def embed(model: str, prompts: Sequence[str]) -> F64:
    """Return vectors of length 1 in this process. [prompts, width]"""
    import numpy as np

    from penstock.llm import LLM
    from penstock.routes import MAX_QUESTION_CHARS

    with LLM(model) as llm:
        answers = llm.embed([prompt[:MAX_QUESTION_CHARS] for prompt in prompts], truncate_prompt_tokens=-1)
    vectors = np.array([answer.outputs.embedding for answer in answers], dtype=np.float64)
    found: F64 = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return found


def gains_unseen(vectors: F64, answers: Answers, embedder: str) -> F64:
    """Return the gains of each question by a fit that did not see it, nor one with the same text."""
    import numpy as np

    from penstock.routes.learned import fit as fit_route

    numbers: dict[str, int] = {}
    texts = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in answers.prompts])
    folds = np.random.default_rng(SEED).permutation(len(numbers))[texts] % NUM_FOLDS
    gains = np.empty(len(answers))
    for fold in range(NUM_FOLDS):
        unseen, seen = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        fitted = fit_route(vectors[seen], answers.part(seen), embedder)
        gains[unseen] = fitted.gains(vectors[unseen], answers.part(unseen).prompts)
    return gains


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))


def _row(name: str, told: Figures) -> tuple[str, ...]:
    low, high = told.apgr_interval
    least, most = told.share_for_80_interval
    by_lot = (told.weak + told.strong) / 2
    alone = (
        name,
        f"{told.num_questions:,}",
        f"{told.weak:.1%}",
        f"{told.strong:.1%}",
        f"{told.half:.1%} (by lot {by_lot:.1%})",
    )
    if math.isnan(told.apgr):  # the strong model gains nothing
        return (*alone, "-", "-")
    return (
        *alone,
        f"{told.apgr:.3f} ({low:.3f} to {high:.3f})",
        f"{told.share_for_80:.0%} ({least:.0%} to {most:.0%})",
    )
