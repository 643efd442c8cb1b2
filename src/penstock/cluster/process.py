"""A replica's process: a model, and a thread that serves the front with it."""

from __future__ import annotations

import asyncio
import threading

from penstock.cluster.replica import Replica
from penstock.cluster.tap import Tap
from penstock.config import Config
from penstock.deploy.factory import locate, start_model
from penstock.deploy.resources import Resources
from penstock.engine.state import EngineState


class ReplicaThread:
    """A loaded model, served to a front from a thread of its own."""

    def __init__(self, config: Config, *, name: str, front: tuple[str, int], secret: bytes, num_beside: int) -> None:
        """Load the model. `front`: where to dial. `num_beside`: replicas that share this machine's memory.

        Raises the errors of `start_model`.
        """
        tap = Tap()
        self.running = start_model(config, locate(config), Resources(num_models=num_beside), tap=tap)
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
