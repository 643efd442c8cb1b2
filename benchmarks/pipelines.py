"""A pipeline over 10,000 documents, asked by 50 clients at once: throughput and p99 beside stages that batch by themselves.

Each document has the facts of a made-up product, and each question asks for one of them.

    python benchmarks/pipelines.py

- `pipeline`: the server's. Each stage works on whatever has arrived, across requests.
- `in lockstep`: the same server and index, but a client takes 50 questions through one stage after another: all are embedded in
  one request, searched for at once, and then answered together; the next 50 follow when the last of these has ended.
- `dynamic`: a server whose stages batch each for itself, by `--batching dynamic` at its defaults: no answer joins a batch that
  has begun.
- `alone`: one question at a time.

Needs the models in the cache (`penstock pull`). The last line is a JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from printed import origin, table
from processes import Contender, started

from penstock.config.pipelines import PipelineConfig
from penstock.search.index import Reader
from penstock.serve.pipelines import fill_template

WRITER, EMBEDDER, PIPELINE = "smollm2:135m", "minilm", "products"
PENSTOCK = Path(sys.executable).with_name("penstock")
CONFIG = """
batching = "{batching}"
[[models]]
model = "{writer}"
[[models]]
model = "{embedder}"
[[pipelines]]
name = "{pipeline}"
index = "{index}"
model = "{writer}"
"""
PLACES = ["Lyon", "Oslo", "Madrid", "Porto", "Vienna", "Prague", "Dublin", "Athens", "Lisbon", "Warsaw", "Geneva", "Milan"]
KINDS = ["lamp", "chair", "kettle", "drill", "tent", "clock", "radio", "bicycle", "camera", "backpack", "table", "heater"]
SYLLABLES = ["ba", "ko", "li", "ren", "tas", "mu", "vel", "dor", "pin", "gar", "shi", "no", "fex", "zul", "qua", "wim"]


@dataclass(frozen=True)
class Question:
    text: str
    document: str
    """The file that has the answer."""


@dataclass(frozen=True)
class Answer:
    text: str
    sources: Sequence[str]
    took_s: float


def write_documents(folder: Path, num: int, seed: int) -> list[Question]:
    """Write the documents, and return a question about each."""
    rng, questions = random.Random(seed), []
    names: set[str] = set()
    while len(names) < num:
        names.add("".join(rng.choices(SYLLABLES, k=4)).capitalize())
    for number, name in enumerate(sorted(names)):
        kind, place, price, weight = rng.choice(KINDS), rng.choice(PLACES), rng.randrange(10, 500), rng.randrange(1, 40)
        text = (
            f"# {name}\n\nThe {kind} {name} is made in {place}. It costs {price} euros, weighs {weight} kg and comes with a "
            f"warranty of {rng.randrange(1, 11)} years. Spare parts for the {name} are kept in {rng.choice(PLACES)}."
        )
        file = f"{number // 100:03}/{name}.md"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        asks = rng.choice(("Where is the {} {} made?", "What does the {} {} cost?", "How heavy is the {} {}?"))
        questions.append(Question(asks.format(kind, name), file))
    rng.shuffle(questions)
    return questions


def post(port: int, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the answer, and the header `X-Sources`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(data.decode())
    return json.loads(data), answer.headers.get("X-Sources", "")


def chat(port: int, model: str, text: str, max_tokens: int, began_s: float) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    value, sources = post(port, "/v1/chat/completions", body)
    names = [unquote(source.partition("=")[2]) for source in sources.split("; ") if source]
    return Answer(value["choices"][0]["message"]["content"], names, time.perf_counter() - began_s)


def by_pipeline(port: int, questions: Sequence[Question], max_tokens: int, concurrency: int) -> list[Answer]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda one: chat(port, PIPELINE, one.text, max_tokens, time.perf_counter()), questions))


def in_lockstep(port: int, questions: Sequence[Question], max_tokens: int, concurrency: int, reader: Reader) -> list[Answer]:
    config = PipelineConfig(name=PIPELINE, index="", model=WRITER)
    answers: list[Answer] = []
    with ThreadPoolExecutor(concurrency) as pool:
        for first in range(0, len(questions), concurrency):
            some, began_s = questions[first : first + concurrency], time.perf_counter()
            vectors, _ = post(port, "/v1/embeddings", {"model": EMBEDDER, "input": [one.text for one in some]})
            found = reader.nearest(np.array([one["embedding"] for one in vectors["data"]], np.float32), config.top)
            prompts = [fill_template(config.template, one.text, hits) for one, hits in zip(some, found, strict=True)]
            answers += pool.map(lambda prompt, began_s=began_s: chat(port, WRITER, prompt, max_tokens, began_s), prompts)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, index = Path(name) / "docs", Path(name) / "docs.index"
        questions = write_documents(folder, words.documents, seed=1)
        began_s = time.perf_counter()
        subprocess.run([PENSTOCK, "index", folder, "-o", index, "--embedder", EMBEDDER], check=True)
        index_s = time.perf_counter() - began_s
        reader = Reader(index)
        runs: dict[str, list[tuple[float, list[Answer]]]] = {"pipeline": [], "in lockstep": [], "dynamic": [], "alone": []}
        with ExitStack() as servers:
            ports = {}
            for batching in ("continuous", "dynamic"):
                config = Path(name) / f"{batching}.toml"
                text = CONFIG.format(writer=WRITER, embedder=EMBEDDER, pipeline=PIPELINE, index=index, batching=batching)
                config.write_text(text)
                contender = Contender(batching, [PENSTOCK, "serve", "--config", config, "--port", "{port}"], health="/ready")
                _, ports[batching] = servers.enter_context(started(contender, config.with_suffix(".log")))
                by_pipeline(ports[batching], questions[:20], 32, 4)
            for number in range(words.rounds):
                for order, (way, found) in enumerate(runs.items()):
                    # No question is asked twice: its prompt would be in the prefix cache.
                    first = 20 + (number * len(runs) + order) * words.questions
                    asked = questions[first:][: words.questions if way != "alone" else words.questions // 10]
                    began_s, port = time.perf_counter(), ports["dynamic" if way == "dynamic" else "continuous"]
                    if way == "in lockstep":
                        answers = in_lockstep(port, asked, words.max_tokens, words.concurrency, reader)
                    else:
                        answers = by_pipeline(port, asked, words.max_tokens, 1 if way == "alone" else words.concurrency)
                    found.append((len(asked) / (time.perf_counter() - began_s), answers))
                    if way == "pipeline":
                        show_quality(asked, answers)
    rows, figures = [], {}
    for way, found in runs.items():
        rate = statistics.median(rate for rate, _ in found)
        p99_s = statistics.median(float(np.quantile([one.took_s for one in answers], 0.99)) for _, answers in found)
        rows.append((way, f"{rate:.1f}", f"{p99_s:.2f}"))
        figures[way] = {"questions_per_s": [rate for rate, _ in found], "p99_s": p99_s}
    print(origin(f"{words.documents:,} documents indexed in {index_s:.0f} s"))
    print(table(("", "questions/s", "p99 (s)"), rows))
    print(json.dumps(figures))


def show_quality(questions: Sequence[Question], answers: Sequence[Answer]) -> None:
    found = statistics.mean(one.document in answer.sources for one, answer in zip(questions, answers, strict=True))
    cited = [[int(number) for number in re.findall(r"\[(\d+)\]", answer.text)] for answer in answers]
    is_cited = statistics.mean(bool(numbers) for numbers in cited)
    is_true = all(
        1 <= number <= len(answer.sources) for numbers, answer in zip(cited, answers, strict=True) for number in numbers
    )
    print(f"The document is among the sources of {found:.1%}; {is_cited:.1%} cite; all that they cite are sources: {is_true}.")


if __name__ == "__main__":
    main()
