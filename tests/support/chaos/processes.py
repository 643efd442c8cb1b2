"""The processes of a chaos test: started, asked, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.soak.memory import resident_bytes

TESTS = Path(__file__).parent.parent.parent
READY_S = 120.0


@dataclass(frozen=True)
class Sample:
    at_s: float
    num_bytes: int
    num_files: int


class Member:
    """A front or a replica: one process after another, of the same command."""

    def __init__(self, name: str, folder: Path, *command: str) -> None:
        self.name = name
        self._command, self._log = command, folder / f"{name}.log"
        self._asking = asyncio.Lock()
        self.busy = asyncio.Lock()
        """Taken while something is done to it."""
        self.process: asyncio.subprocess.Process
        self.samples: list[Sample] = []
        """Those of the process that runs now."""

    async def start(self) -> None:
        """Start the process. Use `wait_until_ready` before commands are sent."""
        self.samples = []
        with self._log.open("a") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )

    async def wait_until_ready(self) -> None:
        facts = await self._read()
        assert facts == {"is_ready": True}, facts

    async def _read(self) -> dict:
        async with asyncio.timeout(READY_S):
            line = await self.process.stdout.readline()
        assert line, f"{self.name} has ended: {self._log.read_text()[-4000:]}"
        return json.loads(line)

    async def ask(self, *command: object) -> dict:
        """Send a command and return its answer. The process must run."""
        async with self._asking:
            facts: dict = {"again": True}
            while facts.get("again"):
                self.process.stdin.write(" ".join(map(str, command)).encode() + b"\n")
                facts = await self._read()
            return facts

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if hasattr(self, "process") and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                await self.kill()

    def sample(self) -> None:
        """Note the memory and the open files of the process, if it runs."""
        pid = self.process.pid
        with contextlib.suppress(OSError, IndexError):  # it has just been killed
            num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append(Sample(time.monotonic(), resident_bytes(pid), num_files))

    @property
    def growth(self) -> float:
        """Growth of the resident memory, as a share, since a third of the time that the process has run."""
        samples = self.samples
        return samples[-1].num_bytes / samples[len(samples) // 3].num_bytes - 1
