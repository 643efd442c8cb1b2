"""Replicas as an application of Ray Serve, which places, checks and restarts them. The only file that imports Ray.

Requests do not go through Serve: replicas dial the front, so a token takes one hop (`fleet`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.config import Config
from penstock.machine import settle_on_node
from penstock.types.errors import PenstockError

_log = logging.getLogger(__name__)

PREFIX = "penstock-"
"""Beginning of the names of applications in Ray Serve, one for each model, and of actors."""
HEALTH_CHECK_S = 5.0
CONNECT_TIMEOUT_S = 60.0
LOOK_S = 0.2


class PenstockReplica:
    """A replica as a Ray Serve actor. Serve checks its health, and starts another one if it dies."""

    def __init__(self, config: Config, front: tuple[str, int], secret: bytes, num_beside: int) -> None:
        """The arguments are those of `ReplicaThread`."""
        from penstock.cluster.process import ReplicaThread

        assert config.backend.threads is not None, "the front has shared the cores out"
        self._seat = settle_on_node(config.backend.threads)
        if self._seat is not None:
            _log.info("this replica stays on memory node %d", self._seat[0])
        self._leave_s = config.server.shutdown_timeout_s
        name = serve.get_replica_context().replica_id.unique_id
        self._thread = ReplicaThread(config, name=name, front=front, secret=secret, num_beside=num_beside)

    def check_health(self) -> None:
        self._thread.check()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._thread.leave(self._leave_s)


@contextmanager
def connected(address: str | None, num_cpus: int, *, waits: bool = True) -> Iterator[None]:
    """Start a Ray on this machine, or connect to the one at `address`, until the block ends.

    `waits`: try again while Ray is still starting. Raises PenstockError if there is none.
    """
    local: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False} if address is None else {}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    while not ray.is_initialized():
        try:
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **local)
        except ConnectionError:  # its head may still be starting, as in a pod
            if not waits or time.monotonic() > end_s:
                remedy = "Start one with `ray start --head`, or name its address."
                raise PenstockError(f"No Ray can be reached at {address}.", remedy=remedy) from None
            time.sleep(1.0)
    try:
        yield
    finally:
        ray.shutdown()


class Target:
    """An actor that holds the number of replicas that the front wants. `AsWanted` reads it."""

    def __init__(self, num: int) -> None:
        self._num = num

    def set(self, num: int) -> None:
        self._num = num

    def get(self) -> int:
        return self._num


class AsWanted:
    """An autoscaling policy that returns the number in `Target`. It must not block: Serve's controller calls it."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._num: int | None = None
        self._answer: Any = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        try:
            if self._answer is None:
                self._answer = ray.get_actor(self._app, namespace=PREFIX).get.remote()
            elif ray.wait([self._answer], timeout=0)[0]:
                answer, self._answer = self._answer, None
                self._num = ray.get(answer)
        except (ValueError, ray.exceptions.RayError):  # the front has ended
            self._answer = None
        # A controller that Ray has restarted makes a new policy: until it has an answer, the number stays as it is.
        return context.target_num_replicas if self._num is None else self._num, {}


_numbers = itertools.count()


class Crew:
    """A `models.Crew` that runs a model's replicas in Ray Serve."""

    def __init__(self, config: Config, *, front: tuple[str, int], secret: bytes, num_beside: int) -> None:
        self._app, least = f"{PREFIX}{next(_numbers)}", config.cluster.replicas
        self._is_stopped = threading.Event()
        self.first = max(1, least)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # it must not be lost alone
        options = {"name": self._app, "namespace": PREFIX, "num_cpus": 0, "scheduling_strategy": here}
        self._target = ray.remote(Target).options(**options).remote(self.first)
        policy = AutoscalingPolicy(policy_function=AsWanted, policy_kwargs={"app": self._app})
        deployment = serve.deployment(
            PenstockReplica,
            autoscaling_config=AutoscalingConfig(
                min_replicas=least,
                initial_replicas=self.first,
                max_replicas=config.cluster.most,
                upscale_delay_s=0,
                downscale_delay_s=0,
                policy=policy,
            ),
            ray_actor_options={"num_cpus": config.backend.threads},
            health_check_period_s=HEALTH_CHECK_S,
            graceful_shutdown_timeout_s=config.server.shutdown_timeout_s + HEALTH_CHECK_S,
        )
        self._made = deployment.bind(config, front, secret, num_beside)

    def start(self) -> None:
        """Start the first replicas, and return when they are ready. Raises RuntimeError if they can't start."""
        # `serve.run` would go on for a while after `stop`, and start a new Ray if this one has ended.
        target = serve.RunTarget(self._made, name=self._app, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        while not self._is_stopped.wait(LOOK_S):
            found = serve.status().applications.get(self._app)
            if found is not None and found.status == ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError(found.message)
            if found is not None and found.status == ApplicationStatus.RUNNING:
                return

    def want(self, num_replicas: int) -> None:
        """Change the number of replicas. Returns at once."""
        self._target.set.remote(num_replicas)

    def stop(self) -> None:
        """Stop the replicas, once their requests have ended. Idempotent."""
        self._is_stopped.set()
        if self._app in apps():
            serve.delete(self._app)

    def room(self) -> str:
        return f"Ray has {ray.available_resources().get('CPU', 0.0):g} free"


def start_serve() -> None:
    """Start Ray Serve unless it runs. Raises PenstockError if it already runs a cluster of Penstock."""
    serve.start(proxy_location="Disabled")
    if apps():
        raise PenstockError("This Ray runs a cluster of Penstock already.", remedy="`penstock cluster down` stops it.")


def apps() -> list[str]:
    """Return the applications of clusters that Serve runs, one for each model."""
    return [app for app in serve.status().applications if app.startswith(PREFIX)]


def num_machines() -> int:
    return max(1, len([node for node in ray.nodes() if node["Alive"]]))


def stop() -> int:
    """Stop all replicas, once their requests have ended. Return the number of models that had some."""
    found = apps()
    for app in found:
        serve.delete(app)
    return len(found)
