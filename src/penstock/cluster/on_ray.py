"""Replicas as an application of Ray Serve, which places, checks and restarts them. The only file that imports Ray.

Requests do not go through Serve: replicas dial the front, so a token takes one hop (`fleet`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from penstock.config.components import config_from

APP = "penstock"
"""Name of the application in Ray Serve."""
_TARGET = "penstock-target"
HEALTH_CHECK_S = 5.0
CONNECT_TIMEOUT_S = 60.0


class PenstockReplica:
    """A replica. Serve makes it, asks for its health, and makes another if it dies."""

    def __init__(self, values: Mapping[str, object], front: tuple[str, int], secret: bytes, num_beside: int) -> None:
        """`values`: settings by key. The others are as for `ReplicaThread`."""
        from penstock.cluster.process import ReplicaThread

        config = config_from(values)
        self._leave_s = config.server.shutdown_timeout_s
        name = serve.get_replica_context().replica_id.unique_id
        self._thread = ReplicaThread(config, name=name, front=front, secret=secret, num_beside=num_beside)

    def check_health(self) -> None:
        self._thread.check()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._thread.leave(self._leave_s)


@contextmanager
def connected(address: str | None, num_cpus: int) -> Iterator[None]:
    """Start a Ray on this machine, or connect to the one at `address`, until the block ends."""
    local: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False} if address is None else {}
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    while not ray.is_initialized():
        try:
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=address is None, **local)
        except ConnectionError:  # its head may still be starting, as in a pod
            if time.monotonic() > end_s:
                raise
            time.sleep(1.0)
    try:
        yield
    finally:
        ray.shutdown()


class Target:
    """An actor with the number of replicas that the front wants, for Serve's controller."""

    def __init__(self, num: int) -> None:
        self._num = num

    def set(self, num: int) -> None:
        self._num = num

    def get(self) -> int:
        return self._num


class AsWanted:
    """An autoscaling policy of Serve: as many replicas as the front wants. Never waits, since the controller calls it."""

    def __init__(self, first: int) -> None:
        self._num = first
        self._answer: Any = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        del context
        try:
            if self._answer is None:
                self._answer = ray.get_actor(_TARGET, namespace=APP).get.remote()
            elif ray.wait([self._answer], timeout=0)[0]:
                answer, self._answer = self._answer, None
                self._num = ray.get(answer)
        except (ValueError, ray.exceptions.RayError):  # the front has ended
            self._answer = None
        return self._num, {}


class Crew:
    """The replicas as Serve runs them, from `least` to `most`."""

    def __init__(
        self,
        values: Mapping[str, object],
        *,
        front: tuple[str, int],
        secret: bytes,
        least: int,
        most: int,
        num_cpus: int,
        leave_s: float,
    ) -> None:
        """`num_cpus`: those of one replica. `leave_s`: time for requests to end in a replica that is stopped."""
        self._first = max(1, least)
        self._target = ray.remote(Target).options(name=_TARGET, namespace=APP, num_cpus=0).remote(self._first)
        deployment = serve.deployment(
            PenstockReplica,
            autoscaling_config=AutoscalingConfig(
                min_replicas=least,
                initial_replicas=self._first,
                max_replicas=most,
                upscale_delay_s=0,
                downscale_delay_s=0,
                policy=AutoscalingPolicy(policy_function=AsWanted, policy_kwargs={"first": self._first}),
            ),
            ray_actor_options={"num_cpus": num_cpus},
            health_check_period_s=HEALTH_CHECK_S,
            graceful_shutdown_timeout_s=leave_s + HEALTH_CHECK_S,
        )
        num_beside = -(-most // max(1, len([node for node in ray.nodes() if node["Alive"]])))
        self._made = deployment.bind(dict(values), front, secret, num_beside)

    def start(self) -> None:
        """Start the first replicas, and return when they are ready. Raises RuntimeError if they can't start."""
        serve.start(proxy_location="Disabled")
        serve.run(self._made, name=APP, route_prefix=None)

    def want(self, num_replicas: int) -> None:
        """Change the number of replicas. Returns at once."""
        self._target.set.remote(num_replicas)


def stop() -> None:
    """Stop the replicas, once their requests have ended."""
    with suppress(Exception):  # Ray may have gone already
        serve.delete(APP)
