"""A process with one replica over a hash executor that takes time: `python -m support.chaos.replica PORT NAME BEAT_S`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time

from penstock.clock import WallClock
from penstock.cluster import replica as replica_module
from penstock.cluster.replica import Replica
from penstock.cluster.tap import Tap
from penstock.engine.bridge import Bridge
from penstock.engine.output import OutputStage
from penstock.engine.ports import ObserverGroup
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine
from penstock.testing import HashExecutor, make_core
from penstock.text.tokenizer import detokenizer_factory
from support.chaos.console import listen, say
from support.cluster import SECRET
from support.server.harness import CAPACITY, PRINTABLE_MODEL, make_runtime

STEP_S = (0.002, 0.005)
STEP_TIMEOUT_S = 2.0
"""A step that takes longer counts as hung, and the engine is made anew."""


class SlowExecutor(HashExecutor):
    def __init__(self) -> None:
        super().__init__(CAPACITY, model=PRINTABLE_MODEL)
        self.hang_s = 0.0
        """Time that the next step takes, instead of a usual one. 0: a usual one."""

    def submit(self, plan):
        hang_s, self.hang_s = self.hang_s, 0.0
        time.sleep(hang_s or random.uniform(*STEP_S))
        return super().submit(plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("name")
    parser.add_argument("beat_s", type=float)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    replica_module.BEAT_S = arguments.beat_s

    tap, bridge = Tap(), Bridge()
    runtime = make_runtime()
    runtime.engine.close(0.0)
    executors: list[SlowExecutor] = []

    def make_engine(on_failed) -> Engine:
        executors[:] = [SlowExecutor()]
        observer = ObserverGroup([runtime.metrics, tap])
        core = make_core(CAPACITY, observer=observer)
        output = OutputStage(detokenizer_factory(runtime.tokenizer))
        clock, sink = WallClock(), bridge.deliver
        engine = Engine(core, executors[0], output, clock=clock, sink=sink, observer=observer, on_failed=on_failed)
        tap.watch(core.scheduler, engine.blocks)
        return engine

    engine = Supervisor(make_engine, clock=WallClock(), step_timeout_s=STEP_TIMEOUT_S)
    bridge.attach(engine)
    engine.start()
    runtime.engine, runtime.bridge = engine, bridge

    async def serve() -> None:
        replica = Replica(runtime, tap, name=arguments.name, secret=SECRET)

        def status() -> dict:
            return {
                "requests": len(replica._requests),
                "preparing": len(replica._preparing),
                "chunks": len(replica._chunks),
                "readers": bridge.num_open_requests,
                "running": engine.load().num_running,
                "waiting": engine.load().num_waiting,
            }

        def hang(seconds: float) -> dict:
            executors[0].hang_s = seconds
            return {}

        listen({"status": status, "hang": hang})
        say(is_ready=True)
        await replica.serve("127.0.0.1", arguments.port)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
