"""Is Penstock as fast on a machine with AMX as it should be? Runs the relevant benchmarks and prints goals beside results.

    python benchmarks/amx.py               # hours on few cores, which should have nothing else to do
    python benchmarks/amx.py --dry-run     # prints the commands, on any machine

Fetches the models and makes the peers, then runs the tests of tiles, `peaks.py`, `step.py` and `peers.py` as they are. The
output of a run goes to stderr and to build/amx/NAME.md. Exits at once, with the reason, if there is no AMX or if a
trace, a model, a peer or pytest is missing; `--without vllm` skips a peer. A later run that fails leaves its goals
unmeasured, and the others continue. Exits with 1 if a goal is missed or not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amx_goals import GOALS, PROMPT, ROW, Goal, Results
from peaks import KINDS, usable_threads
from printed import origin, table
from workloads import DEFAULT_TRACES, trace_file

from penstock.backends.native._native import usable_variants, why_no_tiles

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "amx"
MODELS = {"smollm2": "smollm2:135m", "qwen": "qwen2.5-coder:1.5b"}
PEERS = ("openvino", "vllm")
TESTS = ("test_tiles", "test_native_kernels", "test_native_formats", "test_native_experts")
TESTS += ("test_adapters", "test_native_adapter_bits")


def load(traces: Path, model: str, peers: Sequence[str], *options: str) -> list[str]:
    return ["benchmarks/peers.py", "--traces", str(traces.resolve()), "--model", model, *options, "--peers", *peers]


def preparations(traces: Path, peers: Sequence[str]) -> dict[str, list[str]]:
    """The commands for what all runs need, by their names, in order."""
    found = {f"pull-{model}": ["-m", "penstock", "pull", file] for model, file in MODELS.items()}
    if peers:
        found["setup-peers"] = load(traces, "smollm2", peers, "--workload", "long", "--setup", "--repeat", "0")
    return {name: [sys.executable, *words] for name, words in found.items()}


def commands(traces: Path, peers: Sequence[str]) -> dict[str, list[str]]:
    """The runs by their names, in order."""
    found = {"tiles": ["-m", "pytest", "-q", *(f"tests/backends/{name}.py" for name in TESTS)]}
    found["peaks"] = ["benchmarks/peaks.py"]
    for model, file in MODELS.items():
        for variant in ("amx", "avx512"):
            step = ["--model", file, "--variant", variant, "--steps", PROMPT, ROW]
            found[f"step-{model}-{variant}"] = ["benchmarks/step.py", *step]
    for model in MODELS:
        # vLLM is compared on the smaller model alone.
        contenders = ["penstock", *(peer for peer in peers if model == "smollm2" or peer != "vllm")]
        found[f"peers-{model}-sharegpt"] = load(traces, model, contenders)
        found[f"peers-{model}-long"] = load(traces, model, contenders, "--workload", "long")
    return {name: [sys.executable, *words] for name, words in found.items()}


def result_of(name: str, output: str) -> Any:
    """Parse a benchmark's last line, which is JSON; for tests, return the share that passed. Skipped tests don't count:
    they check what no variant with tiles does. Raises ValueError.
    """
    last = (output.splitlines() or [""])[-1]
    if name != "tiles":
        return json.loads(last)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    if not counts:
        raise ValueError("no test ran")
    return {"passed": counts.get("passed", 0) / sum(counts.values())}


def run(name: str, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    print(f"== {name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    (folder / f"{name}.md").write_text(done.stdout)
    print(done.stdout, file=sys.stderr, flush=True)
    return done


def prepare(name: str, command: Sequence[str]) -> None:
    """Raises SystemExit if it fails, or a peer is left out."""
    done = run(name, command, FOLDER)
    lacking = [line for line in done.stdout.splitlines() if " is left out: " in line]
    if lacking or done.returncode != 0:
        told = lacking or [f"{name} exited with {done.returncode}."]
        sys.exit("\n".join([*told, "Nothing was measured. To do without a peer: --without NAME."]))


def figures_of(name: str, done: subprocess.CompletedProcess[str]) -> Any:
    """Return a run's figures, or None on failure."""
    try:
        return result_of(name, done.stdout)
    except ValueError as error:
        print(f"{name} exited with {done.returncode} and has no result: {error}", file=sys.stderr, flush=True)
        return None


def peaks_of(results: Results) -> list[list[str]]:
    peaks = results["peaks"]["peaks"]["amx"] if "peaks" in results else {}
    return [[f"peak, {name}", f"{rate:.0f} {'GOP/s' if name in KINDS else 'GB/s'}"] for name, rate in peaks.items()]


def judge(goals: Sequence[Goal], results: Results, others: Sequence[Sequence[str]] = ()) -> bool:
    """Print the goals beside what was measured, and the figures without goals. Return whether all goals are met."""
    steps = {name: result["steps"] for name, result in results.items() if name.startswith("step")}
    times = [[f"{name}, {step}", f"{found['ms']:.2f} ms"] for name in steps for step, found in steps[name].items()]
    rows = [goal.row(results) for goal in goals]
    print(origin(f"{usable_threads()} threads"))
    print(table(["goal", "wanted", "measured", "met"], rows), table(["", "measured"], [*others, *times]), sep="\n\n")
    return all(row[-1] == "yes" for row in rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], help="peers to do without")
    args = parser.parse_args(words)
    peers = [peer for peer in PEERS if peer not in args.without]
    before, runs = preparations(args.traces, peers), commands(args.traces, peers)
    if args.dry_run:
        print(*map(shlex.join, [*before.values(), *runs.values()]), sep="\n")
        return
    if "amx" not in (variants := usable_variants()):
        sys.exit(f"No AMX here, but {', '.join(variants)}: {why_no_tiles() or 'the processor has none'}.")
    if importlib.util.find_spec("pytest") is None:
        sys.exit("pytest is missing: `pip install '.[test]'` brings it.")
    trace_file(args.traces)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, command in before.items():
        prepare(name, command)
    done = {name: figures_of(name, run(name, command, FOLDER)) for name, command in runs.items()}
    results = {name: found for name, found in done.items() if found is not None}
    are_met = judge(GOALS, results, peaks_of(results))
    print("\nAnswers are compared with those of transformers by `make test-parity`.")
    sys.exit(not are_met)


if __name__ == "__main__":
    main()
