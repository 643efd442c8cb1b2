"""`penstock profile`, as a process, with a tiny model: a fit of steps, and what it says of a recording."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.lab.cost_files import SavedCost, load_cost, save_cost
from penstock.lab.cost_model import CostModel, Fitted
from support.lab.kernels import write_tables

Penstock = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    "--backend",
    "native",
    "--threads",
    "1",
    "--kv-cache-memory",
    "1MiB",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "64",
]


def test_steps_are_shown_with_what_bounds_them(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    result = penstock("profile", tiny_model, "--rounds", "1", *SMALL)
    assert result.returncode == 0, result.stderr
    assert re.search(r"Peaks now: \d+ GOP/s, \d+\.\d GB/s", result.stdout)
    assert re.search(r"^ +4x1@128 .* (memory|compute)$", result.stdout, re.MULTILINE)


def test_costs_of_steps_are_fitted(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    result = penstock("profile", tiny_model, "--fit", path, "--rounds", "2", *SMALL)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^  execute +\d+\.\d%", result.stdout, re.MULTILINE)
    assert re.search(r"^  host +\d+\.\d%", result.stdout, re.MULTILINE)
    saved = load_cost(path)
    assert (saved.model, saved.source) == ("tiny", "profile")
    assert saved.machine["threads"] == 1
    assert saved.cost.fitted is not None
    assert saved.cost.fitted.max_rows == 4
    assert saved.cost.host_step_ns > 0
    assert {"linear", "attention", "execute", "host"} <= saved.errors.keys()


@pytest.fixture
def recording(environment: Mapping[str, str], tiny_model: Path, tmp_path: Path) -> Path:
    """The recording of a server that has answered four requests."""
    path = tmp_path / "traffic.rec"
    command = [sys.executable, "-m", "penstock", "serve", str(tiny_model), "--port", "0", "--record", str(path), *SMALL]
    with subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            for idx in range(4):
                asked = {"model": "tiny", "prompt": "in the " * (3 + idx), "max_tokens": 9, "temperature": 0}
                body = json.dumps(asked).encode()
                call = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
                urllib.request.urlopen(call, timeout=30).read()
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.wait(30)
    return path


def test_a_server_is_recorded_and_its_steps_are_drawn_and_fitted(penstock: Penstock, recording: Path, tmp_path: Path) -> None:
    trace, cost = tmp_path / "trace.json", tmp_path / "cost.json"
    result = penstock("profile", "--from", recording, "--trace", trace, "--fit", cost)
    assert result.returncode == 0, result.stderr
    assert "4 requests, 4 of them ended" in result.stdout
    assert load_cost(cost).source == "recording"
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"request", "waits", "prefill", "decodes", "schedule", "commit", "output", "1 decodes"} <= names
    open_phases = sum({"b": 1, "e": -1}.get(event["ph"], 0) for event in events)
    assert open_phases == 0, "every phase that begins ends"
    wide = Fitted(max_rows=32, max_decodes=32, max_prefill_tokens=512, max_context_len=8000)
    save_cost(cost, SavedCost(cost=CostModel(fitted=wide), source="profile"))
    result = penstock("profile", "--from", recording, "--onto", cost, "--fit", tmp_path / "served.json")
    assert result.returncode == 0, result.stderr
    assert load_cost(tmp_path / "served.json").cost.fitted == wide
    save_cost(cost, SavedCost(cost=CostModel(), source="profile", model="another"))
    result = penstock("profile", "--from", recording, "--onto", cost, "--fit", tmp_path / "served.json")
    assert result.returncode == 1
    assert "is a fit of another, and the recording is of" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--trace", "x"], 2, "--trace is about a recording"),
        (["--from", "absent"], 1, "absent can't be read"),
        (["--onto", "x"], 2, "--onto adds what a recording's steps took"),
        (["--from", "absent", "--plot", "x.png"], 2, "--plot draws steps of this machine"),
        (["--from", "absent", "--threads", "2"], 2, "--threads is for steps of this machine"),
        (["--from", "absent", "--rounds", "2"], 2, "--rounds is for steps of this machine"),
        (["tiny", "--from", "absent"], 2, "MODEL is for steps of this machine"),
        (["--fit", "x", "--plot", "x.png"], 2, "--plot draws the table"),
    ],
)
def test_errors_are_said_in_words(penstock_here: Penstock, arguments: list[str], code: int, says: str) -> None:
    result = penstock_here("profile", *arguments)
    assert result.returncode == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_in_the_way_is_told(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("all I have")
    started = time.monotonic()
    result = penstock("serve", tiny_model, "--port", "0", "--record", path)
    assert result.returncode == 1
    assert "is not a recording, so it is not overwritten" in result.stderr
    assert time.monotonic() - started < 60


def test_tables_of_kernels_are_imported(penstock: Penstock, tmp_path: Path) -> None:
    folder, path = write_tables(tmp_path / "tables"), tmp_path / "cost.json"
    shown = penstock("profile", "--import", folder, "--layers", "4")
    assert shown.returncode == 0, shown.stderr
    assert "4 layers; up to 256 tokens of prompts, 64 decodes and 4096 tokens of context" in shown.stdout
    assert "Add --fit FILE" in shown.stdout
    written = penstock("profile", "--import", folder, "--fit", path)
    assert written.returncode == 0, written.stderr
    options = ["--device", "cuda", "--preset", "vllm", "--blocks", "2000", "--workload", "documents", "--requests", "20"]
    simulated = penstock("simulate", "--cost", path, *options, "--json", tmp_path / "a.json")
    assert simulated.returncode == 0, simulated.stderr
    for text in (simulated.stdout, penstock("bench", "report", tmp_path / "a.json").stdout):
        assert "OUTSIDE THE FITTED RANGE" in text, "some prompts are longer than the tables"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "4"], "name them with --import"),
        (["--import", ".", "--link-latency-us", "20"], "One GPU has no link"),
        (["--import", ".", "--from", "traffic.rec"], "leave out --from"),
        (["--import", ".", "--onto", "cost.json"], "leave out --from, --onto"),
        (["--import", "."], "has no tables of kernels"),
    ],
)
def test_an_import_stands_alone(penstock: Penstock, options: list[str], message: str) -> None:
    result = penstock("profile", *options)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())
