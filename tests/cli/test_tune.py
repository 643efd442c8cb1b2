"""`penstock tune`: from a workload to a file that the server takes, and to a run of the real engine."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.bench import loaded
from penstock.cli.tune import _Simulator, tune
from penstock.lab.cost_files import SavedCost, save_cost
from penstock.lab.cost_model import CostModel, Fitted, Residuals
from penstock.lab.driving import drive
from penstock.lab.in_process import sender
from penstock.lab.records import End
from penstock.lab.tune import DEFAULT
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError
from support.cli.serve import Served

Penstock = Callable[..., subprocess.CompletedProcess[str]]
Serving = Callable[..., AbstractContextManager[Served]]
Tune = Callable[..., Result]

TIGHT = ("--input-tokens", "10-400", "--output-tokens", "5-20", "--rate", "8", "--slo", "itl=30ms", "--slo", "ttft=5s")
"""The default spends more than that on a chunk of a prompt."""


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    fitted = Fitted(max_rows=64, max_decodes=64, max_prefill_tokens=512, max_context_len=6)
    save_cost(path, SavedCost(cost=CostModel(fitted=fitted), source="profile", model="tiny", date="2026-11-22"))
    return path


@pytest.fixture
def tune_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed_once: None) -> Tune:
    """Runs `penstock tune ARGUMENTS` in this process. It searches two settings alone, which help where the limits are tight."""
    some = {"slo_itl": ("20ms",), "max_num_batched_tokens": (128,)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("penstock.lab.tune.SPACE", some)
    return lambda *arguments: CliRunner().invoke(tune, [*map(str, arguments), "--slices", "18", "--finalists", "1"])


def test_what_it_writes_is_what_the_server_serves_and_its_metrics_say_so(
    tune_some: Tune, serving: Serving, tiny_model: Path, tmp_path: Path, cost: Path
) -> None:
    words = (tiny_model, *TIGHT, "--requests", "216", "--cost", cost, "--block-size", "32", "--threads", "1")
    done = tune_some(*words, "--output", "tuned.toml")
    assert done.exit_code == 0, done.output
    assert "over the default." in done.stdout
    assert "real engine" not in done.stdout
    told = re.search(r"hash of these settings is ([0-9a-f]{12}),", done.stdout)
    assert told is not None
    text = (tmp_path / "tuned.toml").read_text()
    assert text.startswith(f"# penstock settings, format 1, hash {told[1]}\n# workload: ")
    assert "# gain, simulated: +" in text
    assert "\nblock_size = 32\n" in text
    assert '\ndevice = "cpu"\nthreads = 1\n' in text
    assert re.search(r"^(slo_itl = 0\.0\d+|max_num_batched_tokens = \d+)$", text, re.MULTILINE)
    with serving("--config", tmp_path / "tuned.toml") as served:
        assert f'penstock_settings_info{{hash="{told[1]}",model="tiny"}} 1.0' in served.get("/metrics").decode()


def test_nothing_is_written_if_the_default_is_as_good(penstock: Penstock, tiny_model: Path, tmp_path: Path, cost: Path) -> None:
    """All settings are searched."""
    some = ("--input-tokens", "4-8", "--output-tokens", "2-3", "--rate", "1", "--requests", "36", "--slices", "18")
    done = penstock("tune", tiny_model, *some, "--slo", "ttft=5s", "--cost", cost, "--output", "tuned.toml")
    assert done.returncode == 0, done.stderr
    assert "keep the default" in done.stdout
    assert re.search(r"Note: \d+\.\d% of its steps lie outside of the range", done.stdout)
    assert not (tmp_path / "tuned.toml").exists()


def test_the_best_runs_on_the_real_engine_beside_the_default(
    tune_some: Tune, tiny_model: Path, tmp_path: Path, cost: Path
) -> None:
    """A tiny model's steps take no time, so it is open whether the settings help; if they do not, there is no file."""
    some = ("--requests", "108", "--speed", "20", "--max-tokens", "20", "--tenants", "2", "--verify")
    done = tune_some(tiny_model, *TIGHT, *some, "--cost", cost, "--output", "tuned.toml")
    assert done.exit_code == 0, done.output
    _, verified = done.stdout.split("On the real engine")
    assert re.search(r"slo_itl|max_num_batched_tokens|long_prefill", verified)
    assert ("keep the default" in verified) != (path := tmp_path / "tuned.toml").exists()
    doubt = "The engine in this process got all requests without the workload's tenants"
    assert f"Note: {doubt}" in verified
    assert not path.exists() or f"# {doubt}" in path.read_text()


def test_the_real_engine_has_the_settings_that_are_written(
    monkeypatch: pytest.MonkeyPatch, tune_some: Tune, tiny_model: Path, cost: Path
) -> None:
    """They may be in the environment, as they are here."""
    asked: list[dict[str, object]] = []

    @contextmanager
    def loaded(model: str, settings: dict[str, object], **_: object) -> Iterator[tuple[str, object]]:
        asked.append(settings)
        raise PenstockError("It is not loaded.")
        yield

    monkeypatch.setattr("penstock.cli.bench.loaded", loaded)
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    done = tune_some(tiny_model, *TIGHT, "--requests", "108", "--cost", cost, "--verify")
    assert isinstance(done.exception, PenstockError)
    assert "Simulated, on slices" in done.output
    assert (asked[0]["device"], asked[0]["threads"]) == ("cpu", 1)


def test_each_slice_has_noise_of_its_own(tiny_model: Path, tmp_path: Path, probed_once: None) -> None:
    cost = tmp_path / "noisy.json"
    noise = (Residuals(1e12, (0.5, 1.0, 1.5)),)
    save_cost(cost, SavedCost(cost=CostModel(residuals=noise), source="profile", model="tiny", date="2026-11-22"))
    jobs = [Job(arrival_ns=0, num_prompt_tokens=8, num_output_tokens=40)]
    ended = []
    with tune.make_context("tune", [str(tiny_model), "--cost", str(cost)]) as context:
        values = {**context.params, "model": str(tiny_model)}
        for seed, name in ((1, "slice 1"), (1, "slice 1"), (1, "slice 2"), (2, "slice 1")):
            [record] = _Simulator(values, seed).evaluate(DEFAULT, Workload(name=name, jobs=jobs))
            ended.append(record.ended_ns)
    assert ended[0] == ended[1]
    assert len(set(ended)) == 3


def test_answers_end_by_themselves_where_the_workload_says_so(tiny_model: Path) -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=2, num_output_tokens=count, prompt="in the") for count in (1, 2, 7, 30)]
    with loaded(str(tiny_model), {"backend": "reference"}, max_tokens=30) as (_, ask):
        records = asyncio.run(drive(Workload(name="w", jobs=jobs), sender(ask))).records
    assert [(record.end, record.num_output_tokens) for record in records] == [(End.OK, n) for n in (1, 2, 7, 30)]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--requests", "20", "--hardware", "absent"), "too few for 24 slices"),  # before a machine is found and probed
        (("--hardware", "L4", "--verify", "--slo", "ttft=1s"), "The real engine is on this machine"),
        (("--max-tokens", "5", "--slo", "ttft=1s", "--hardware", "c7i.4xlarge"), "The longest answer has 128 tokens"),
        (("--workload", "absent.csv"), "Goodput needs SLOs"),
        (("--output", "no/where.toml"), "can't be written"),
        (("--device", "cuda", "--slo", "ttft=1s", "--hardware", "c7i.4xlarge"), "does not run cuda"),
    ],
)
def test_what_can_not_be_is_told(penstock_here: Penstock, tiny_model: Path, words: tuple[str, ...], cause: str) -> None:
    slo = ("--slo", "ttft=1s") if "too few" in cause else ()
    done = penstock_here("tune", tiny_model, *words, *slo)
    assert done.returncode == 1
    assert cause in done.stderr
