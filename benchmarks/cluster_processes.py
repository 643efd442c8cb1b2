"""The processes of a cluster without Ray: a front and replicas of a model, or of a stub that computes hashes."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from other_routers import router_of

from penstock.clock import WallClock
from penstock.cluster.fleet import Fleet
from penstock.cluster.front import serve_replicas
from penstock.cluster.process import ReplicaThread
from penstock.config.components import ServerConfig, config_from
from penstock.deploy.deployment import Deployment
from penstock.deploy.factory import locate, start_deployment
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.engine.bridge import Bridge
from penstock.lab.client import send
from penstock.lab.cost_model import CostModel
from penstock.lab.records import End, Sent
from penstock.lab.target import Target
from penstock.lab.workload import Workload
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import run_server
from penstock.testing import HashExecutor, HashModel
from penstock.types.plan import Capacity, StepPlan, StepShape, Ticket
from penstock.types.result import StepResult

HOST, SECRET, START_S, MAX_QUEUE = "127.0.0.1", b"a secret of benchmarks", 120.0, 4096
UNENDING = {"logit_bias": {"0": -100, "1": -100, "2": -100}}
"""Bans SmolLM2's ends of text and turn. An answer of a forced length would go on past them, and the next prompt lack them."""
Values = Mapping[str, Any]
"""Settings by key."""


@dataclass(frozen=True, slots=True)
class Stub:
    """The settings of a replica that computes hashes instead of a model."""

    capacity: Capacity | None = None
    """None: the tests' model."""
    cost: CostModel | None = None
    """How long its steps take. None: as long as the hashes."""

    def executor(self) -> HashExecutor:
        from support.server.harness import CAPACITY, PRINTABLE_MODEL

        capacity = self.capacity or CAPACITY
        if self.cost is None:
            return HashExecutor(capacity, model=PRINTABLE_MODEL)
        return PacedExecutor(capacity, PRINTABLE_MODEL, self.cost)


class PacedExecutor(HashExecutor):
    def __init__(self, capacity: Capacity, model: HashModel, cost: CostModel) -> None:
        super().__init__(capacity, model=model)
        self._cost, self._ready_s = cost, 0.0

    def submit(self, plan: StepPlan) -> Ticket:
        rows = tuple([(row.query_len, row.context_len) for row in plan.rows])
        shape = StepShape(rows, sum([row.samples for row in plan.rows]), plan.num_repeated)
        self._ready_s = time.monotonic() + self._cost.duration_ns(shape) / 1e9
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        time.sleep(max(0.0, self._ready_s - time.monotonic()))
        return super().collect(ticket)


def serve(port: int, replica_port: int, num_replicas: int, router: str, what: Values | Stub) -> None:
    """Serve HTTP until a signal: as a front once all replicas have come, or alone if their number is 0."""
    from support.cluster import make_front
    from support.deployments import deployment_of
    from support.server.harness import make_runtime

    if num_replicas == 0 and isinstance(what, Stub):
        deployment = deployment_of(make_runtime(what.executor(), max_queue=MAX_QUEUE))
    elif num_replicas == 0:
        deployment = start_deployment([config_from(what)])
    else:
        bridge, clock, own = Bridge(), WallClock(), router_of(router)()
        fleet = Fleet(bind_socket(HOST, replica_port), secret=SECRET, router=own, clock=clock, sink=bridge.deliver)
        fleet.start()
        while fleet.num_replicas < num_replicas:
            time.sleep(0.02)
        if isinstance(what, Stub):
            deployment = deployment_of(make_front(fleet, bridge, executor=what.executor(), max_queue=MAX_QUEUE))
        else:
            config, machine = config_from(what), Resources(num_models=num_replicas).machine("")
            served = serve_replicas(config, locate(config), fleet, bridge, machine)
            deployment = Deployment([served], MemoryBudget())
            deployment.start([served])
    http = ServerConfig(port=port, shutdown_timeout_s=1.0)
    run_server(deployment, http, listener=bind_socket(HOST, port), announce=lambda _: None)


def serve_replica(replica_port: int, name: str, num_replicas: int, what: Values | Stub) -> None:
    if isinstance(what, Stub):
        from support.cluster import ThreadedReplica

        ThreadedReplica(replica_port, name, what.executor(), secret=SECRET, max_queue=MAX_QUEUE, chat_template=None)
    else:
        ReplicaThread(config_from(what), name=name, front=(HOST, replica_port), secret=SECRET, num_beside=num_replicas)
    threading.Event().wait()


@contextmanager
def started(num_replicas: int, router: str, what: Values | Stub, own: Sequence[Values] = ()) -> Iterator[tuple[str, int]]:
    """Start a server and replicas. Return its URL and the id of its process. `own`: the replicas' settings, if they differ."""
    with bind_socket(HOST, 0) as one, bind_socket(HOST, 0) as other:
        port, replica_port = one.getsockname()[1], other.getsockname()[1]
    make = multiprocessing.get_context("spawn").Process
    processes = [make(target=serve, args=(port, replica_port, num_replicas, router, what))]
    names = [f"r{number}" for number in range(num_replicas)]
    kinds = own or [what] * num_replicas
    processes += [
        make(target=serve_replica, args=(replica_port, name, num_replicas, kind))
        for name, kind in zip(names, kinds, strict=True)
    ]
    for process in processes:
        process.start()
    url, end_s = f"http://{HOST}:{port}", time.monotonic() + START_S
    try:
        while time.monotonic() < end_s and all(process.is_alive() for process in processes):
            with suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=10):
                break
            time.sleep(0.1)
        else:
            raise SystemExit("a server or a replica did not start")
        yield url, processes[0].pid or 0
        if not all(process.is_alive() for process in processes):
            raise SystemExit("a process ended during the run")
    finally:
        for process in processes:  # the front before its replicas
            process.terminate()
            process.join(10)
            process.kill()


def send_all(workload: Workload, url: str, model: str) -> Sent:
    sent = send(workload, Target(url=url, model=model, extra_body={} if model == "toy" else UNENDING))
    failed = [record for record in sent.records if record.end is not End.OK]
    if failed:
        print(f"{len(failed)} of {len(sent.records)} requests failed: {failed[0].error}", file=sys.stderr, flush=True)
    return sent
