"""`penstock batch run`: a file of requests in, a file of answers out, without a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.admission.door import AdmissionLimits
from penstock.cli import batch as command
from penstock.cli import serve
from penstock.cli.main import cli
from penstock.deploy import factory
from penstock.deploy.running import ModelState
from penstock.jobs.store import Store
from penstock.testing import HashExecutor
from penstock.types.errors import PenstockError
from support.deployments import deployment_of
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, make_runtime


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    bodies = [{"prompt": f"Say {number}", "max_tokens": 2} for number in range(20)]
    bodies[7]["model"] = "another"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def answer(source: Path, folder: Path):
    runtime = make_runtime()
    try:
        return await command._run(deployment_of(runtime), source, folder)
    finally:
        runtime.close()


def renamed(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


def answered(folder: Path, file_id: str) -> dict[str, int]:
    lines = map(json.loads, (folder / "files" / file_id).read_text().splitlines())
    return {line["custom_id"]: line["response"]["status_code"] for line in lines}


async def test_each_line_is_answered_or_failed(source: Path, tmp_path: Path) -> None:
    ended = await answer(source, tmp_path / "job")
    assert (ended.status, ended.num_lines, ended.num_completed, ended.num_failed) == ("completed", 20, 19, 1)
    assert ended.usage["output_tokens"] == 2 * 19
    right = answered(tmp_path / "job", ended.output_file)
    assert right == {str(number): 200 for number in range(20) if number != 7}
    assert answered(tmp_path / "job", ended.error_file) == {"7": 404}


def test_a_line_may_have_any_size(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text().replace('"Say 3",', '"Say 3",' + " " * (5 << 20)))
    ended = asyncio.run(answer(source, tmp_path / "job"))
    assert (ended.status, ended.num_completed) == ("completed", 19)


def test_models_and_routes_are_those_that_a_server_would_have(source: Path, tmp_path: Path, monkeypatch) -> None:
    def start(configs, *, routing) -> None:
        found.extend([config.model.model for config in configs] + [route.name for route in routing.routes])
        raise PenstockError("that is enough")

    found: list[str] = []
    (tmp_path / "notes.gguf").touch()
    (tmp_path / "penstock.toml").write_text("[[routes]]\nname = 'auto'\nfallback = ['notes', 'in']\n")
    monkeypatch.setattr(factory, "start_deployment", start)
    monkeypatch.setattr(serve, "set_up_logging", lambda _config: None)
    words = ["batch", "run", str(source), "--models-dir", str(tmp_path), "--config", str(tmp_path / "penstock.toml")]
    CliRunner().invoke(cli, words)
    assert found == [str(tmp_path / "notes.gguf"), "auto"]


async def test_an_interrupted_run_goes_on_also_elsewhere(source: Path, tmp_path: Path, capsys) -> None:
    folder, executor = tmp_path / "job", GatedExecutor(replace(CAPACITY, max_rows=2))
    runtime = make_runtime(executor, limits=AdmissionLimits(max_queue=4))
    running = asyncio.create_task(command._run(deployment_of(runtime), source, folder))
    while not any(path.stat().st_size for path in (folder / "files").glob("file-*") if not path.is_symlink()):
        executor.allow()
        await asyncio.sleep(0.05)
    executor.open()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    runtime.close()
    source, folder = renamed(source, "moved.jsonl"), renamed(folder, "moved.job")
    ended = await answer(source, folder)
    assert "Going on where the last run ended." in capsys.readouterr().err
    assert answered(folder, ended.output_file).keys() | answered(folder, ended.error_file).keys() == {*map(str, range(20))}
    assert ended.num_completed + ended.num_failed == len((folder / "files" / ended.output_file).read_text().splitlines()) + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_asked_to_end_is_interrupted(source: Path, tmp_path: Path, number) -> None:
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    runtime = make_runtime(GatedExecutor())
    lines, marks = tmp_path / "job" / "lines", list[bool]()

    async def end_soon() -> None:
        running = asyncio.ensure_future(command._run(deployment_of(runtime), source, tmp_path / "job"))
        while not marks:
            await asyncio.sleep(0.01)
            marks.extend(under_way(lines))
        assert all(marks), "they are under way"
        os.kill(os.getpid(), number)
        await running

    try:
        signal.signal(number, signal.SIG_DFL)  # these tests may run under `nohup`, whose programs ignore SIGHUP
        command._hear_ends_as_interrupts()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(end_soon())
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    runtime.close()
    assert not any(under_way(lines))


def under_way(folder: Path) -> list[bool]:
    """Return, for each line that was asked, whether a killed process would count as failing at it."""
    with suppress(sqlite3.Error, ValueError):
        [path] = folder.glob("batch_*[0-9a-f]")
        with closing(sqlite3.connect(path)) as base:
            return [bool(one) for (one,) in base.execute("SELECT is_under_way FROM asked")]
    return []


@pytest.mark.parametrize("num_moved", [0, 1, 2])
async def test_a_run_killed_at_its_end_asks_nothing_again(source: Path, tmp_path: Path, monkeypatch, num_moved) -> None:
    folder, output, errors = (tmp_path / name for name in ("job", "out", "err"))
    ended = await answer(source, folder)
    replace_file, left = Path.replace, [num_moved]

    def killed(self: Path, target: Path = Path()) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return replace_file(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            command._move_out(ended, folder, output, errors)
    assert command._ended_before(source, folder) == ended
    command._move_out(ended, folder, output, errors)
    assert (len(output.read_text().splitlines()), len(errors.read_text().splitlines())) == (19, 1)
    assert not folder.exists()


async def test_answers_replace_no_file(source: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "job", tmp_path / "out"
    ended = await answer(source, folder)
    output.write_text("mine")
    with pytest.raises(PenstockError, match="there already"):
        command._move_out(ended, folder, output, tmp_path / "err")
    assert output.read_text() == "mine"
    assert command._ended_before(source, folder) == ended


async def test_a_folder_of_somebody_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    assert command._ended_before(source, folder) is None
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(PenstockError, match="other than answers"):
        command._ended_before(source, folder)
    ended = await answer(source, folder)
    (folder / "files" / "notes").write_text("mine")
    command._move_out(ended, folder, tmp_path / "out", tmp_path / "err")
    assert sorted(path.name for path in folder.rglob("*")) == ["files", "notes", "thesis.txt"]


def test_a_pipe_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "in.jsonl")
    result = CliRunner().invoke(cli, ["batch", "run", str(pipe), "no-such-model"])
    assert isinstance(result.exception, PenstockError)
    assert f"{pipe} is not a regular file" in str(result.exception)


async def test_a_run_ends_if_its_engine_can_not_go_on(source: Path, tmp_path: Path) -> None:
    class Broken(HashExecutor):
        def submit(self, plan):
            raise RuntimeError("CUDA error")

    runtime = make_runtime(Broken(CAPACITY, model=PRINTABLE_MODEL))
    with pytest.raises(PenstockError, match="engine has failed"):
        await command._run(deployment_of(runtime), source, tmp_path / "job")
    runtime.close()


async def test_a_model_that_can_not_be_loaded_is_named(source: Path, tmp_path: Path, capsys) -> None:
    runtime = make_runtime()
    deployment = deployment_of(runtime)
    [served] = deployment.served
    served.state, served.failure, served.failed_ns = ModelState.FAILED, "it is broken", deployment.clock.now_ns()
    running, told = asyncio.create_task(command._run(deployment, source, tmp_path / "job")), ""
    while "it is broken" not in told:
        await asyncio.sleep(0.05)
        told += capsys.readouterr().err
    assert "Lines are refused, and asked again." in told
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    runtime.close()


async def test_a_full_disk_is_named(source: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_args) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "add", full)
    with pytest.raises(PenstockError, match="disk is full"):
        await answer(source, tmp_path / "job")


def test_the_folder_of_another_file_is_not_used(source: Path, tmp_path: Path) -> None:
    with source.open("a") as lines:
        lines.write("\n")
    store = Store(tmp_path / "job", max_bytes=1 << 20)
    made, is_new = command._batch_of(source, store, "toy")
    assert is_new
    store.put(made)
    known, is_new = command._batch_of(source, store, "toy")
    assert (known.id, is_new) == (made.id, False)
    with pytest.raises(PenstockError, match="was begun with toy, and this is other"):
        command._batch_of(source, store, "other")
    source.write_text(source.read_text() + "\n")
    with pytest.raises(PenstockError, match="is of another file"):
        command._batch_of(source, store, "toy")
    store.close()
