"""A cascade of two models here, on questions that a program can check: quality, time of the models, TTFT.

Half of the questions are asked of both models, and a route is fitted to the results with `penstock route fit`. The other half
is asked of the large model alone, of the small one alone and of the cascade, in turn, each time of a new server.

    python benchmarks/cascade.py

- Model time: seconds in which the models' steps used the machine, the encoder's included.
- TTFT of answers that the small model kept, and of the same questions when it is asked alone.

The questions' examples stay in the prefix cache, for all models alike. With --keep, files stay: the route, the answers to the
other half (`unseen.jsonl`), from which `penstock route eval --scores` makes the scores for `penstock simulate --route`, and
recordings of each model alone, from which `penstock profile --from` fits its costs.

Needs the models in the cache (`penstock pull`). The last line is a JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from checkable import Task, make_tasks
from printed import origin, table
from processes import Contender, started
from usage import metric

SMALL, LARGE, EMBEDDER, ROUTE = "smollm2:135m", "qwen2.5-coder:1.5b", "minilm", "auto"
SEED = 1
PENSTOCK = Path(sys.executable).with_name("penstock")
CONFIG = f"""
[[models]]
model = "{SMALL}"
[[models]]
model = "{LARGE}"
[[models]]
model = "{EMBEDDER}"
"""
TABLE = """
[[routes]]
name = "{route}"
weak = "{small}"
strong = "{large}"
file = "{file}"
share = {share}
"""


@dataclass(frozen=True)
class Said:
    by: str
    """The model that answered."""
    is_right: bool
    ttft_s: float
    usage: dict[str, Any]


@dataclass(frozen=True)
class Run:
    said: Sequence[Said]
    took_s: float
    machine_s: float

    @property
    def quality(self) -> float:
        return statistics.mean(one.is_right for one in self.said)


def ask(port: int, model: str, task: Task) -> Said:
    """Ask one question, and read the answer as a stream."""
    body = {"model": model, "messages": task.chat, "max_tokens": task.max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    began_s, ttft_s, text, by, usage = time.perf_counter(), 0.0, "", model, {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            by, usage = event["model"], event.get("usage") or usage
            if not event["choices"]:
                continue
            if piece := event["choices"][0]["delta"].get("content"):
                ttft_s = ttft_s or time.perf_counter() - began_s
                text += piece
    connection.close()
    return Said(by, task.is_right(text), ttft_s, usage)


def machine_s(port: int) -> float:
    return metric(f"http://127.0.0.1:{port}", "penstock_machine_seconds_total")


def measure(config: Path, model: str, tasks: Sequence[Task], concurrency: int, record: Path | None = None) -> Run:
    """Ask a newly started server all questions, `concurrency` at a time. `record`: serve and record this model alone."""
    words = ["--config", config] if record is None else [model, "--record", record]
    contender = Contender("penstock", [PENSTOCK, "serve", *words, "--port", "{port}"], health="/ready")
    with started(contender, config.with_suffix(".log")) as (_, port), ThreadPoolExecutor(concurrency) as pool:
        for kind in {task.kind.partition("/")[0]: task for task in make_tasks(3, 1.0, SEED + 1)}.values():
            ask(port, model, kind)  # puts the examples into the prefix cache, and warms up both models
        before_s, began_s = machine_s(port), time.perf_counter()
        said = list(pool.map(lambda task: ask(port, model, task), tasks))
        return Run(said, time.perf_counter() - began_s, machine_s(port) - before_s)


def fit(folder: Path, tasks: Sequence[Task], window: int, concurrency: int) -> tuple[Path, float]:
    """Fit a route to half of the questions. Return its file, and the least share that costs at most a point of quality."""
    config, answers, route = folder / "two.toml", folder / "answers.jsonl", folder / "route.json"
    config.write_text(CONFIG)
    small, large = [measure(config, model, tasks, concurrency).said for model in (SMALL, LARGE)]
    write_answers(answers, tasks, small, large)
    command = [PENSTOCK, "route", "fit", answers, "--weak", "small", "--strong", "large", "--group", "kind", "-o", route]
    command += ["--cascade", SMALL, "--window", str(window)] if window else []
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(told)
    [line] = [line for line in told.splitlines() if line.startswith("all ")]
    return route, float(line.split("  ")[-1].split("%")[0]) / 100


def write_answers(path: Path, tasks: Sequence[Task], small: Sequence[Said], large: Sequence[Said]) -> None:
    kinds = [task.kind.partition("/")[0] for task in tasks]
    cached: dict[str, list[int]] = {kind: [] for kind in kinds}
    for kind, said in zip(kinds, small, strict=True):
        cached[kind].append(said.usage["prompt_tokens_details"]["cached_tokens"])
    lines = [
        {"messages": task.chat, "kind": task.kind, "small": one.is_right, "large": other.is_right}
        | {"usage": {"small": one.usage, "large": other.usage}}
        | {"prefix": kind, "prefix_tokens": statistics.median_low(cached[kind])}
        for task, kind, one, other in zip(tasks, kinds, small, large, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300, help="of each kind, half of them for the fit")
    parser.add_argument("--easy", type=float, default=0.8, help="share of the easy ones")
    parser.add_argument("--window", type=int, default=16, help="tokens that decide; 0: the question alone")
    parser.add_argument("--share", type=float, help="of the calls for the large model (default: as the fit says, for a point)")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the files")
    words = parser.parse_args()
    tasks = make_tasks(words.questions, words.easy, SEED)
    seen, unseen = tasks[::2], tasks[1::2]
    with tempfile.TemporaryDirectory() as name:
        folder = words.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        route, share = fit(folder, seen, words.window, words.concurrency)
        share = share if words.share is None else words.share
        config = folder / "penstock.toml"
        config.write_text(CONFIG + TABLE.format(route=ROUTE, small=SMALL, large=LARGE, file=route, share=share))
        runs: dict[str, list[Run]] = {model: [] for model in (LARGE, SMALL, ROUTE)}
        for number in range(words.rounds):
            for model, found in runs.items():
                is_recorded = words.keep and model != ROUTE and number == words.rounds - 1
                record = folder / f"{model.partition(':')[0]}.rec" if is_recorded else None
                found.append(measure(config, model, unseen, words.concurrency, record))
                print(f"{model}: {found[-1].quality:.1%} in {found[-1].took_s:.1f} s, models {found[-1].machine_s:.1f} s")
        write_answers(folder / "unseen.jsonl", unseen, runs[SMALL][0].said, runs[LARGE][0].said)
    show(runs, unseen, share)


def show(runs: dict[str, list[Run]], tasks: Sequence[Task], share: float) -> None:
    of = {model: sorted(found, key=lambda run: run.machine_s)[len(found) // 2] for model, found in runs.items()}
    small, large, cascade = of[SMALL], of[LARGE], of[ROUTE]
    kept = [index for index, one in enumerate(cascade.said) if one.by == SMALL]
    ttft_s, alone_s = [statistics.median(run.said[index].ttft_s for index in kept) for run in (cascade, small)]
    needs = [one.is_right > other.is_right for one, other in zip(large.said, small.said, strict=True)]
    print(origin(f"{len(tasks)} questions, share {share:.2f}"))
    head = ("", "right", "model time", "of the large model's", "until all were answered", "answers kept")
    rows = [
        (
            model,
            f"{statistics.median(run.quality for run in runs[model]):.1%}",
            f"{run.machine_s:.1f} s",
            f"{run.machine_s / large.machine_s:.0%}",
            f"{run.took_s:.1f} s",
            f"{len(kept) / len(tasks):.0%}" if model == ROUTE else "",
        )
        for model, run in of.items()
    ]
    print(table(head, rows))
    kinds = Counter(task.kind for task in tasks)
    lines = []
    for kind in sorted(kinds):
        rows_of = [index for index, task in enumerate(tasks) if task.kind == kind]
        right = [statistics.mean(run.said[index].is_right for index in rows_of) for run in (small, large, cascade)]
        keeps = statistics.mean(cascade.said[index].by == SMALL for index in rows_of)
        lines.append((kind, len(rows_of), *(f"{one:.0%}" for one in right), f"{keeps:.0%}"))
    print(table(("", "questions", "small", "large", "cascade", "kept"), lines))
    best = statistics.mean(needs)
    print(f"TTFT of answers kept: median {ttft_s * 1e3:.0f} ms, and {alone_s * 1e3:.0f} ms of the small model alone.")
    print(f"{best:.0%} of the questions need the large model.")
    figures = {
        "quality": {model: statistics.median(run.quality for run in found) for model, found in runs.items()},
        "machine_s": {model: [run.machine_s for run in found] for model, found in runs.items()},
        "took_s": {model: [run.took_s for run in found] for model, found in runs.items()},
        "share": share,
        "kept": len(kept) / len(tasks),
        "ttft_s": [ttft_s, alone_s],
        "need_large": best,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
