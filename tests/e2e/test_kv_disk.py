"""The disk tier from outside: a server with a small KV cache and a file below it answers as one with room for all, whatever
becomes of the file; and what it was told before its end, even a sudden one, it need not compute again.

Takes half a minute: a server of its own for each test, and answers so long that memory runs out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.storage.block_file import FILE_NAME
from support.e2e.process import COMPLETIONS, RealServer, penstock, serving, stream, stream_async, until

SIZES = ("--kv-cache-memory", "6MB", "--max-model-len", "350", "--kv-disk-size", "200MB", "--kv-headroom", "0")
SMALL = (*SIZES, "--speculation", "off")
"""Thirty blocks: two or three of these stories at a time. With guesses they would end sooner. Answers are so much longer than
what an admission keeps free for them that running requests are preempted."""
NUM_STORIES = 6


def story(idx: int, *, max_tokens: int = 90) -> dict[str, object]:
    """A prompt of about 115 tokens. All stories begin with the same few."""
    text = f"Chapter {idx}. " + f"The {idx}th keeper of the lighthouse wrote a letter to the harbour master. " * 6
    return {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def answers(server: RealServer, count: int = NUM_STORIES) -> list[list[int]]:
    """All at once."""
    with ThreadPoolExecutor(count) as threads:
        return [
            answer.token_ids for answer in threads.map(lambda idx: stream(server.url, COMPLETIONS, story(idx)), range(count))
        ]


@pytest.fixture(scope="module")
def expected(server: RealServer) -> list[list[int]]:
    """The answers of the server that has room for all."""
    return answers(server)


def moved(server: RealServer, direction: str) -> float:
    return server.metric("kv_disk_blocks_total", direction=direction)


@pytest.fixture
def small(weights: None, tmp_path: Path) -> Iterator[RealServer]:
    with serving(tmp_path, *SMALL, "--kv-disk-path", str(tmp_path)) as running:
        yield running


def test_swapped_is_not_swapped(small: RealServer, tmp_path: Path, expected: list[list[int]]) -> None:
    """Also with a file that is removed meanwhile."""
    assert answers(small) == expected
    (tmp_path / FILE_NAME).unlink()
    assert answers(small) == expected
    assert small.metric("preemptions_total") > 0
    assert moved(small, "spilled") > 0
    assert moved(small, "loaded") > 0
    assert small.is_ready()
    code, _ = small.end()
    assert code == 0


@pytest.mark.parametrize("damage", ["overwritten", pytest.param("emptied", marks=pytest.mark.slow)])
def test_a_file_that_is_damaged_makes_no_wrong_token(
    small: RealServer, tmp_path: Path, expected: list[list[int]], damage: str
) -> None:
    file = tmp_path / FILE_NAME
    assert answers(small) == expected
    if damage == "emptied":
        os.truncate(file, 0)
    else:
        with file.open("r+b") as data:
            for position in range(6000, file.stat().st_size, 50_000):
                data.seek(position)
                data.write(b"damage")
    assert answers(small) == expected
    assert small.metric("kv_disk_failures_total", reason="corrupt") > 0
    assert "will be computed again" in small.log.read_text()
    assert httpx.get(f"{small.url}/health").status_code == 200


def test_a_full_disk_makes_no_wrong_token(weights: None, tmp_path: Path, expected: list[list[int]]) -> None:
    """No file of this server may get larger than 3 MB."""
    limits = ("--kv-disk-path", str(tmp_path))
    with serving(tmp_path, *SMALL, *limits, prefix=("bash", "-c", 'ulimit -f 3000; exec "$@"', "limited")) as server:
        assert answers(server) == expected
        assert server.metric("kv_disk_failures_total", reason="full") > 0
        assert server.is_ready()


def test_a_session_goes_on_after_a_restart(weights: None, tmp_path: Path, expected: list[list[int]]) -> None:
    folder = ("--kv-disk-path", str(tmp_path))
    with serving(tmp_path, *SMALL, *folder) as first:
        assert stream(first.url, COMPLETIONS, story(3)).token_ids == expected[3]
        busy = penstock("serve", "--port", "0", *SMALL, *folder)
        assert busy.returncode != 0
        assert "in use by another server" in busy.stderr
        code, _ = first.end()
        assert code == 0
    with serving(tmp_path, *SMALL, *folder) as second:
        answer = stream(second.url, COMPLETIONS, story(3))
        assert answer.token_ids == expected[3]
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= answer.usage["prompt_tokens"] - 16
        second.end()


@pytest.mark.parametrize("num_kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_killed_in_the_middle_of_a_swap_starts_again(
    weights: None, tmp_path: Path, expected: list[list[int]], num_kills: int
) -> None:
    folder = ("--kv-disk-path", str(tmp_path))
    for turn in range(num_kills):
        with serving(tmp_path, *SMALL, *folder) as server:
            asyncio.run(_kill_while_busy(server, range(turn * NUM_STORIES, (turn + 1) * NUM_STORIES)))
    with serving(tmp_path, *SMALL, *folder) as last:
        assert "blocks of an earlier server were found" in last.log.read_text()
        assert answers(last) == expected
        assert moved(last, "loaded") > 0
        code, _ = last.end()
        assert code == 0


async def _kill_while_busy(server: RealServer, stories: range) -> None:
    """Without a warning, as soon as some blocks have been spilled, while others are on their way."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [asyncio.create_task(stream_async(client, COMPLETIONS, story(idx))) for idx in stories]
        await asyncio.to_thread(until, lambda: moved(server, "spilled") >= 10, timeout_s=60.0)
        server.process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
