"""Compares a backend with a directory of golden files in full, and prints what it found. Run by `run.sh`; needs no torch.

    python -m tests.parity.full build/parity [--backend native] [--variant avx2] [--kv-cache-dtype bf16] [--model smollm2:135m]

Prints a table, then one JSON object. Exit code 1 if any criterion fails. Without a directory it takes the committed golden
files, which have no windows, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.types.kv_dtype import KvDtype
from support.parity.compare import (
    CLEAR_MARGIN,
    MAX_PERPLEXITY_RATIO,
    MAX_SMALL_TEXT_RATIO,
    MIN_CLEAR_SHARE,
    TextComparison,
    compare_greedy,
    compare_text,
    summarise_greedy,
    summarise_perplexity,
)
from support.parity.executors import FACTORIES, ParityExecutor, find_model, open_executor
from support.parity.free_running import free_running_mismatch, generate_greedily, own_path_mismatch
from support.parity.golden import (
    GOLDEN_DIR,
    GreedyCase,
    TextCase,
    WindowSums,
    load_greedy,
    load_manifest,
    load_texts,
    load_window_sums,
    tokens_sha256,
)
from support.parity.windows import MIN_PREDICTED_TOKENS

MIN_CASES = 20


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of the table."""

    name: str
    measured: str
    wanted: str
    passes: bool
    values: dict[str, Any]
    details: tuple[str, ...] = ()


def greedy_criterion(executor: ParityExecutor, cases: Sequence[GreedyCase], *, min_cases: int) -> Criterion:
    summary = summarise_greedy([compare_greedy(executor, case) for case in cases])
    return Criterion(
        "greedy choice along the reference's path",
        f"{len(summary.mismatches)} of {summary.num_clear} clear steps differ ({summary.num_equal}/{summary.num_steps} equal)",
        f"0, of >= {MIN_CLEAR_SHARE:.0%} clear, >= {min_cases} prompts",
        not summary.mismatches and summary.clear_share >= MIN_CLEAR_SHARE and len(cases) >= min_cases,
        {
            "num_prompts": len(cases),
            "num_steps": summary.num_steps,
            "num_clear": summary.num_clear,
            "num_equal": summary.num_equal,
            "num_clear_mismatches": len(summary.mismatches),
            "clear_margin": CLEAR_MARGIN,
            "worst_unequal_margin": round(summary.worst_unequal_margin, 4),
            "margin_error_rms": round(summary.margin_error_rms, 4),
        },
        summary.mismatches,
    )


def free_running_criterion(executor: ParityExecutor, cases: Sequence[GreedyCase]) -> Criterion:
    outputs = generate_greedily(executor, cases)
    pairs = list(zip(cases, outputs, strict=True))
    lines = [line for case, ids in pairs if (line := free_running_mismatch(case, ids))]
    lines += [line for case, ids in pairs if (line := own_path_mismatch(executor, case, ids))]
    num_whole = sum(bool((ids == case.path_ids).all()) for case, ids in pairs)
    return Criterion(
        "free-running text, all rows in one batch",
        f"{len(lines)} leave the path too early; {num_whole}/{len(cases)} are wholly equal",
        "0, up to the first unclear step",
        not lines,
        {"num_mismatches": len(lines), "num_wholly_equal": num_whole},
        tuple(lines),
    )


def perplexity_criterion(name: str, comparisons: Sequence[TextComparison]) -> Criterion:
    """Within the limit that the amount of text allows."""
    summary = summarise_perplexity(comparisons)
    limit = MAX_PERPLEXITY_RATIO if summary.num_tokens >= MIN_PREDICTED_TOKENS else MAX_SMALL_TEXT_RATIO
    return Criterion(
        f"perplexity of {name}",
        f"{summary.executor:.4f} / bf16 {summary.bf16:.4f} = {summary.ratio_to_bf16:.5f} (f32 {summary.f32:.4f}), "
        f"{summary.num_tokens} tokens",
        f"within {limit - 1:.0%} of bf16",
        1 / limit <= summary.ratio_to_bf16 <= limit,
        {
            "num_tokens": summary.num_tokens,
            "executor": round(summary.executor, 5),
            "f32": round(summary.f32, 5),
            "bf16": round(summary.bf16, 5),
            "ratio_to_bf16": round(summary.ratio_to_bf16, 6),
            "ratio_to_f32": round(summary.ratio_to_f32, 6),
        },
    )


def perplexity_criteria(executor: ParityExecutor, windows: Sequence[TextCase]) -> list[Criterion]:
    """Each kind of text by itself, and all of it together, which has to be long enough for the strict limit."""
    if sum(len(window.logprobs_f32) for window in windows) < MIN_PREDICTED_TOKENS:
        raise ValueError(f"the windows predict fewer than {MIN_PREDICTED_TOKENS} tokens")
    comparisons = [compare_text(executor, window) for window in windows]
    kinds = sorted({window.name.rpartition("-")[0] for window in windows})
    parts = [(kind, [c for c in comparisons if c.case.name.rpartition("-")[0] == kind]) for kind in kinds]
    criteria = [perplexity_criterion(kind, chosen) for kind, chosen in parts]
    return [*criteria, perplexity_criterion("all windows", comparisons)]


def freshness_criterion(cases: Sequence[GreedyCase], windows: Sequence[TextCase]) -> Criterion:
    """The committed golden files are what the reference answers now."""
    committed = {case.name: case for case in load_greedy(GOLDEN_DIR)}
    sums = load_window_sums()
    stale = [case.name for case in cases if case.name not in committed or not _same_path(case, committed[case.name])]
    stale += [window.name for window in windows if window.name not in sums or not _same_sums(window, sums[window.name])]
    return Criterion(
        "committed golden files",
        f"{len(stale)} of {len(cases)} paths and {len(windows)} windows differ from the reference's now",
        "0",
        not stale,
        {"num_stale": len(stale)},
        tuple(stale),
    )


def _same_path(case: GreedyCase, committed: GreedyCase) -> bool:
    return np.array_equal(case.text.token_ids, committed.text.token_ids) and np.allclose(
        case.top_logits, committed.top_logits, atol=1e-2
    )


def _same_sums(window: TextCase, committed: WindowSums) -> bool:
    nll = -float(window.logprobs_f32.sum(dtype=np.float64))
    return tokens_sha256(window.token_ids) == committed.tokens_sha256 and abs(nll / committed.nll_f32 - 1) < 1e-4


def run(executor: ParityExecutor, directory: Path, *, is_default: bool) -> list[Criterion]:
    """Every comparison that the directory has golden files for; only those of the default model are committed, too."""
    cases, windows = load_greedy(directory), load_windows(directory)
    criteria = [freshness_criterion(cases, windows)] if is_default else []
    min_cases = MIN_CASES if is_default else 1
    criteria += [greedy_criterion(executor, cases, min_cases=min_cases), free_running_criterion(executor, cases)]
    if windows:
        return criteria + perplexity_criteria(executor, windows)
    texts = [compare_text(executor, text) for text in load_texts(directory / "texts.npz")]
    return [*criteria, perplexity_criterion("the committed excerpt", texts)]


def load_windows(directory: Path) -> list[TextCase]:
    """Empty if there are none."""
    path = directory / "windows.npz"
    return load_texts(path) if path.is_file() else []


def report(criteria: Sequence[Criterion]) -> str:
    lines: list[str] = []
    for criterion in criteria:
        lines.append(
            f"{'ok  ' if criterion.passes else 'FAIL'} {criterion.name}: {criterion.measured}  [wanted: {criterion.wanted}]"
        )
        lines += [f"       {detail}" for detail in criterion.details]
    return "\n".join(lines)


def num_kv_tokens(directory: Path) -> int:
    """Tokens that have to be in the cache at once."""
    num_greedy = sum(len(case.text.token_ids) for case in load_greedy(directory))
    texts = load_windows(directory) + load_texts(directory / "texts.npz")
    return max(num_greedy, *(len(text.token_ids) for text in texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=GOLDEN_DIR, help="default: the committed golden files")
    parser.add_argument("--backend", choices=sorted(FACTORIES), default="native")
    parser.add_argument("--kv-cache-dtype", type=KvDtype, choices=list(KvDtype), help="default: the backend's own")
    parser.add_argument("--variant", default="", help="instruction set of the native backend (default: the best one)")
    parser.add_argument("--model", default=None, help="catalogue name or path (default: the default model)")
    args = parser.parse_args()
    source = find_model(args.model) if args.model else find_model()
    start = time.monotonic()
    with open_executor(
        args.backend, source, num_tokens=num_kv_tokens(args.directory), variant=args.variant, kv_dtype=args.kv_cache_dtype
    ) as executor:
        criteria = run(executor, args.directory, is_default=source.path == find_model().path)
    tools = load_manifest(args.directory)["tools"]
    print(f"{args.backend} on {source.path.name} against transformers {tools['transformers']} with torch {tools['torch']}")
    print(report(criteria))
    is_full = bool(load_windows(args.directory))
    if not is_full:
        print("There are no perplexity windows: only the committed excerpt was scored. This is not the full comparison.")
    passes = all(criterion.passes for criterion in criteria)
    values = {criterion.name: {"passes": criterion.passes, **criterion.values} for criterion in criteria}
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"backend": args.backend, "passes": passes, "full": is_full, "seconds": seconds, "criteria": values}))
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
