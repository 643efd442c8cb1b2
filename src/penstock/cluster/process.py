"""A replica's process: a loaded model, and the thread that connects it to a front."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from penstock.cluster.replica import Replica
from penstock.cluster.tap import Tap
from penstock.config import Config
from penstock.deploy.factory import locate, start_model
from penstock.deploy.resolve import served_names
from penstock.deploy.resources import Resources
from penstock.deploy.tiers import tier_folder
from penstock.engine.state import EngineState
from penstock.models.cache import cache_dir
from penstock.types.errors import ConfigError


class ReplicaThread:
    """A loaded model, and the thread that connects it to a front."""

    def __init__(self, config: Config, *, name: str, front: tuple[str, int], secret: bytes, num_beside: int) -> None:
        """Load the model. `front`: where to dial. `num_beside`: replicas that share this machine's memory.

        Raises the errors of `start_model`.
        """
        tap, source = Tap(), locate(config)
        with ExitStack() as failed:
            if config.kv.kv_disk_size_bytes:
                folder = tier_folder(config.kv.kv_disk_path, cache_dir(config.model.cache_dir), served_names(config, source)[0])
                config = replace(config, kv=replace(config.kv, kv_disk_path=str(_claim(folder, failed))))
            self.running = start_model(config, source, Resources(num_models=num_beside), tap=tap)
            self._claimed = failed.pop_all()
        self._replica = Replica(self.running, tap, name=name, secret=secret)
        self._front = front
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-replica", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._replica.serve(*self._front))

    def check(self) -> None:
        """Raise RuntimeError if this process can't answer any more."""
        state = self.running.engine.state
        if state in (EngineState.FAILED, EngineState.STOPPED) or not self._thread.is_alive():
            raise RuntimeError(f"the engine has {state}" if self._thread.is_alive() else "the connection's thread has ended")

    def leave(self, timeout_s: float) -> None:
        """Let the requests in flight end for up to `timeout_s`, then free everything. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._replica.leave)
            self._thread.join(timeout_s)
        self.running.close()
        self._claimed.close()


def _claim(folder: Path, stack: ExitStack) -> Path:
    """Lock and return the first subfolder of `folder` that no other replica uses, for the disk tier. `stack` unlocks it.

    Replicas that start later reuse the subfolders and the blocks in them. Raises ConfigError.
    """
    numbers = itertools.count()
    while True:
        place = folder / f"replica-{next(numbers)}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"The folder {place} can't be used: {error}.", remedy="Check --kv-disk-path.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            stack.callback(os.close, descriptor)
            return place
