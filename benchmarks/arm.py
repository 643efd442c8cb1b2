"""Is Penstock as fast on 64-bit Arm as it should be? Runs the relevant benchmarks and prints goals beside results.

    python benchmarks/arm.py                    # an hour on few cores, which should have nothing else to do
    python benchmarks/arm.py --dry-run          # prints the commands, on any machine
    python benchmarks/arm.py --without llamacpp # needs no CMake

No Arm kernel was timed before, so the goals are llvm-mca's predictions (docs/notes/2026-11-25-arm.md), less a whole step's
costs besides products. The output of a run goes to stderr and to build/arm-bench/NAME.md. Exits at once without an Arm
processor with dot products. A run that fails leaves its goals unmeasured. Exits with 1 if a goal is missed or not measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amx import MODELS, ROOT, figures_of, judge, load, run
from amx_goals import PROMPT, ROW, Goal
from workloads import DEFAULT_TRACES, trace_file

from penstock.backends.native._native import usable_variants

FOLDER = ROOT / "build" / "arm-bench"
TESTS = ("tests/contracts", "tests/backends/test_choice.py", "tests/backends/test_native_kernels.py")
TESTS += tuple(f"tests/backends/test_native_{name}.py" for name in ("formats", "row8", "limits"))
PEER = "llamacpp"


def commands(variants: Sequence[str], traces: Path, *, has_peer: bool) -> dict[str, list[str]]:
    """The runs by their names, in order."""
    found = {f"pull-{model}": ["-m", "penstock", "pull", file] for model, file in MODELS.items()}
    found["tests"] = ["-m", "pytest", "-q", *TESTS]
    found["peaks"] = ["benchmarks/peaks.py"]
    for model, file in MODELS.items():
        for variant in variants:
            steps = ["--model", file, "--variant", variant, "--steps", PROMPT, "8x1@128", ROW]
            found[f"step-{model}-{variant}"] = ["benchmarks/step.py", *steps]
    for variant in variants:
        found[f"answers-{variant}"] = ["tests/arm/answers.py", "record", str(FOLDER / f"{variant}.json"), "--kernels", variant]
    if len(variants) > 1:
        found["same-answers"] = ["tests/arm/answers.py", "compare", *(str(FOLDER / f"{variant}.json") for variant in variants)]
    for model in MODELS if has_peer else ():
        found[f"peers-{model}"] = load(traces, model, ["penstock", PEER])
    return {name: [sys.executable, *words] for name, words in found.items()}


def goals(variants: Sequence[str], *, has_peer: bool) -> list[Goal]:
    best = variants[0]
    found = [Goal("tests of the kernels", 1.0, "tests", ("passed",))]
    if len(variants) > 1:
        found.append(Goal("answers of both variants are the same", 1.0, "same-answers", ("passed",)))
    for model in MODELS:
        run = f"step-{model}-{best}"
        found.append(Goal(f"{model}, prompt of 512: share of the peak", 0.4, run, ("steps", PROMPT, "compute_share")))
        found.append(Goal(f"{model}, one row: share of the speed of memory", 0.85, run, ("steps", ROW, "read_share")))
        if has_peer:
            found += [
                Goal(f"{model}, ShareGPT, {clients}, over llama.cpp", 1.2, f"peers-{model}", ("ratios", PEER, clients))
                for clients in ("1", "8")
            ]
    return found


def measure(name: str, command: Sequence[str]) -> Any:
    """The figures of a run; None if it failed or has none."""
    done = run(name, command, FOLDER)
    if name.startswith(("pull", "answers", "same-answers")):
        return {"passed": float(done.returncode == 0)}
    return figures_of("tiles" if name == "tests" else name, done)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--without", choices=(PEER,), help="do without the peer")
    args = parser.parse_args(words)
    has_peer = args.without is None
    variants = [variant for variant in usable_variants() if variant.startswith("neon")]
    runs = commands(variants or ["neon-i8mm", "neon"], args.traces, has_peer=has_peer)
    if args.dry_run:
        print(*map(shlex.join, runs.values()), sep="\n")
        return
    if not variants:
        sys.exit(f"No Arm processor with dot products here, but {', '.join(usable_variants())}.")
    if has_peer:
        trace_file(args.traces)
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = {name: found for name, command in runs.items() if (found := measure(name, command)) is not None}
    sys.exit(not judge(goals(variants, has_peer=has_peer), results))


if __name__ == "__main__":
    main()
