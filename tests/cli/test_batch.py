"""`penstock batch run`: a file of requests in, a file of answers out, without a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.cli import batch as command
from penstock.jobs.store import Store
from penstock.types.errors import PenstockError
from support.deployments import deployment_of
from support.server.harness import CAPACITY, GatedExecutor, make_runtime


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


async def test_an_interrupted_run_goes_on(source: Path, tmp_path: Path, capsys) -> None:
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
    ended = await answer(source, folder)
    assert "Going on where the last run ended." in capsys.readouterr().err
    assert answered(folder, ended.output_file).keys() | answered(folder, ended.error_file).keys() == {*map(str, range(20))}
    assert ended.num_completed + ended.num_failed == len((folder / "files" / ended.output_file).read_text().splitlines()) + 1


def test_the_folder_of_another_file_is_not_used(source: Path, tmp_path: Path) -> None:
    with source.open("a") as lines:
        lines.write("\n")
    store = Store(tmp_path / "job", max_bytes=1 << 20)
    made, is_new = command._batch_of(source, store)
    assert is_new
    store.put(made)
    known, is_new = command._batch_of(source, store)
    assert (known.id, is_new) == (made.id, False)
    source.write_text(source.read_text() + "\n")
    with pytest.raises(PenstockError, match="is of another file"):
        command._batch_of(source, store)
    store.close()
