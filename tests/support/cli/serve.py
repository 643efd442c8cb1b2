"""Helpers that `cli/test_serve.py` shares with other tests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Served:
    """A server that is ready, and what it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.ready_text = process.stdout.readline() + process.stdout.readline()
        assert self.ready_text, "it ended before it was ready"
        self.url = re.findall(r"https?://[^\s/]+", self.ready_text)[0]

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is refused."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(path, body)
        with refused.value as answer:
            return answer.code, json.load(answer)["error"]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what it said on stderr."""
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error


@contextmanager
def serving(
    environment: dict[str, str],
    *arguments: str | Path,
    start: Sequence[str] = ("-m", "penstock"),
    cwd: Path | None = None,
) -> Iterator[Served]:
    """`start`: the words with which Python begins the command line."""
    command = [sys.executable, *start, "serve", *map(str, arguments), "--backend", "reference", "--port", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    ) as process:
        try:
            yield Served(process)
        finally:
            process.kill()
