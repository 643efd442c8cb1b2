"""The real thing from outside: a `penstock serve` process with the default model, and what a client sees of it.

Used by the tests of this folder. Knows nothing of Penstock's inside; only where the weights are.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL
from support.cli.serve import Served

TIMEOUT_S = 60.0
MAX_GAP_S = 5.0
"""Between two events of a stream that nothing should disturb: a hundred times what a busy machine needs."""
MODEL = DEFAULT_MODEL
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": "The lighthouse keeper wrote in his diary that", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
"""A request of some thirty steps: long enough for others to come and go meanwhile."""


def environment(**changes: str) -> dict[str, str]:
    """The test run's own weights, without other settings of the machine it runs on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PIP_"))}
    kept |= {"CUDA_VISIBLE_DEVICES": ""}  # what is expected here is what the CPU does
    return {**kept, "PENSTOCK_CACHE": str(default_cache_dir()), "PYTHONUNBUFFERED": "1", **changes}


def penstock(*arguments: str | Path, prefix: tuple[str, ...] = (), **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock ARGUMENTS` to its end; with a `prefix`, that command runs it."""
    command = [*prefix, sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False, env=environment(**changes)
    )


class RealServer(Served):
    """A process that serves the default model. Its log is in a file, so that no full pipe can stop it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__(process)
        self.log = log
        self.port = int(self.url.rpartition(":")[2])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series `penstock_<name>` with these labels; a family that isn't there is an error."""
        full_name = f"penstock_{name}"
        families = list(text_string_to_metric_families(self.get("/metrics").decode()))
        assert any(full_name.startswith(family.name) for family in families), f"there is no metric {name}"
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == full_name and labels.items() <= sample.labels.items()
        )

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=TIMEOUT_S).status_code == 200


@contextmanager
def serving(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[RealServer]:
    """A ready server on a free port; killed at the end, if it still runs. With a `prefix`, that command runs it."""
    log = folder / "server.log"
    command = [*prefix, sys.executable, "-m", "penstock", "serve", "--port", "0", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        ) as process,
    ):
        try:
            yield RealServer(process, log)
        finally:
            process.kill()


def until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Ask again until it holds. Every condition here asks the server, so this is no busy loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


@dataclass
class Answer:
    """The text of a stream, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_done: bool = False

    def read(self, line: str) -> None:
        """One line of the stream."""
        assert not self.is_done or not line, "something comes after [DONE]"
        if not line or line.startswith(":"):  # a comment, such as a keepalive
            return
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line.removeprefix("data: "))
        self.error = event.get("error")
        for choice in event.get("choices", ()):
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.token_ids += choice.get("token_ids") or ()
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.usage = event.get("usage") or self.usage


def stream_body(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


def stream(url: str, path: str, body: Mapping[str, Any], *, on_event: Callable[[], None] = lambda: None) -> Answer:
    """The whole stream; `on_event` is called after each of its events."""
    answer = Answer()
    with httpx.stream("POST", url + path, json=stream_body(body), timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            answer.read(line)
            if line.startswith("data: "):
                on_event()
    return answer


async def stream_async(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], *, started: asyncio.Event | None = None
) -> Answer:
    """The whole stream; `started` is set once its first event was read."""
    answer = Answer()
    async with client.stream("POST", path, json=stream_body(body)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            answer.read(line)
            if started is not None and line.startswith("data: "):
                started.set()
    return answer


@contextmanager
def undisturbed(server: RealServer, expected: Answer) -> Iterator[None]:
    """The block runs while a good stream is on its way, which must end as it does alone."""
    started = threading.Event()
    answers: list[Answer] = []
    times_s: list[float] = []

    def on_event() -> None:
        times_s.append(time.monotonic())
        started.set()

    # With a salt of its own, it is not guessed from earlier answers to the same request, and lasts.
    body = GOOD | {"cache_salt": str(time.monotonic_ns())}
    thread = threading.Thread(
        target=lambda: answers.append(stream(server.url, COMPLETIONS, body, on_event=on_event)), daemon=True
    )
    thread.start()
    assert started.wait(TIMEOUT_S)
    assert not answers, "the stream has ended before anything could disturb it"
    try:
        yield
    finally:
        thread.join(TIMEOUT_S)
    assert answers, "the good stream failed"
    assert (answers[0].text, answers[0].finish_reason, answers[0].is_done) == (expected.text, "length", True)
    assert max(later - earlier for earlier, later in pairwise(times_s)) < MAX_GAP_S
    assert server.process.poll() is None
