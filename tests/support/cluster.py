"""A cluster in one process: a front, and replicas in threads, each a whole runtime over the hash executor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.clock import WallClock
from penstock.cluster.fleet import Fleet
from penstock.cluster.front import connect
from penstock.cluster.recipes import RecipeBook
from penstock.cluster.replica import Replica
from penstock.cluster.tap import Tap
from penstock.config import ServerConfig
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import Bridge
from penstock.sched.routing.routers import PrefixAware, Router
from penstock.serve.http.listener import bind_socket
from penstock.types.encoder import EncoderInfo
from support.server.harness import VOCAB_SIZE, GatedExecutor, LiveServer, make_runtime, wait_until

SECRET = b"a secret of tests"


class Apart:
    """A `Split` in which half of the replicas always take answers and no prompts."""

    most_answers = 1000

    def __init__(self, slo_itl_ns: int) -> None: ...

    def learn(self, stats) -> None: ...

    def num_answering(self, num_replicas: int, num_answers: int) -> int:
        return num_replicas // 2


class ThreadedReplica:
    """A replica in a thread. `kill` ends it as a crash would."""

    def __init__(self, port: int, name: str, executor=None, *, secret: bytes = SECRET, **fields) -> None:
        self.name, self.executor, self._port = name, executor, port
        self.tap = Tap()
        self.running = make_runtime(executor, tap=self.tap, **fields)
        self.replica = Replica(self.running, self.tap, name=name, secret=secret)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"test-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.replica.serve("127.0.0.1", self._port))
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        others = asyncio.all_tasks(self._loop)
        for task in others:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0.01))  # its connection is closed meanwhile
        self._loop.close()

    def call(self, function, *args) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def hang_up(self) -> None:
        """Lose the connection. The replica dials again."""
        self.call(lambda: self.replica._link is not None and self.replica._link.close("a test"))

    def kill(self) -> None:
        if self._thread.is_alive():
            self.hang_up()
            with contextlib.suppress(RuntimeError):
                self.call(self._task.cancel)
            self._thread.join(30)
            assert not self._thread.is_alive()
        if isinstance(self.executor, GatedExecutor):
            self.executor.open()
        self.running.close()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()


@dataclass
class Cluster:
    front: RunningModel
    fleet: Fleet
    port: int
    server: LiveServer
    replicas: dict[str, ThreadedReplica] = field(default_factory=dict)

    def add(self, name: str, executor=None, **fields) -> ThreadedReplica:
        self.replicas[name] = ThreadedReplica(self.port, name, executor, **fields)
        return self.replicas[name]


def make_front(fleet: Fleet, bridge: Bridge, **fields) -> RunningModel:
    """Return the model of a front over a fleet that has started. The fleet's sink is `bridge.deliver`."""
    front = make_runtime(**fields)
    front.engine.close(0.0)
    front.engine, front.bridge, front.journal, fleet.max_ended = fleet, bridge, fleet, 100
    front.grammars = RecipeBook(front.tokenizer, vocab_size=VOCAB_SIZE)
    capacity = front.model.capacity
    limits = {"max_running": capacity.max_rows, "max_step_tokens": capacity.max_step_tokens}
    connect(fleet, bridge, front.admission, front.metrics, **limits)
    return front


@contextlib.contextmanager
def cluster(
    *executors,
    encoder: EncoderInfo | None = None,
    router: Router | None = None,
    resumes: bool = True,
    slo_itl_ns: int | None = None,
    num_replicas: int = 2,
    **config,
) -> Iterator[Cluster]:
    """A live server in front of replicas `r0`, `r1`, ..."""
    listener = bind_socket("127.0.0.1", 0)
    port, bridge = listener.getsockname()[1], Bridge()
    fleet = Fleet(
        listener,
        secret=SECRET,
        router=router or PrefixAware(),
        clock=WallClock(),
        sink=bridge.deliver,
        resumes=resumes,
        slo_itl_ns=slo_itl_ns,
    )
    fleet.start()
    executors = executors or (None,) * num_replicas
    fields = {} if encoder is None else {"encoder": encoder, "chat_template": None}
    replicas = {
        f"r{number}": ThreadedReplica(port, f"r{number}", executor, **fields) for number, executor in enumerate(executors)
    }
    try:
        wait_until(lambda: fleet.num_replicas, 30)
        front = make_front(fleet, bridge, executor=type(executors[0])(encoder.width) if encoder else None, **fields)
        with LiveServer(front, ServerConfig(port=0, shutdown_timeout_s=0.0, **config)) as server:
            made = Cluster(front, fleet, port, server, replicas)
            yield made
            replicas = made.replicas
    finally:
        fleet.close(0.0)
        for replica in replicas.values():
            replica.kill()
