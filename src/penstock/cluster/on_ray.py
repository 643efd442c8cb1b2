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

from penstock.config.components import config_from

APP = "penstock"
"""Name of the application in Ray Serve."""
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


def num_machines() -> int:
    return max(1, len([node for node in ray.nodes() if node["Alive"]]))


def run(
    values: Mapping[str, object],
    *,
    front: tuple[str, int],
    secret: bytes,
    num_replicas: int,
    num_cpus: float,
    num_beside: int,
    leave_s: float,
) -> None:
    """Start the replicas, and return when all are ready. Raises RuntimeError if they do not start."""
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        PenstockReplica,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": num_cpus},
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=leave_s + HEALTH_CHECK_S,
    )
    serve.run(deployment.bind(dict(values), front, secret, num_beside), name=APP, route_prefix=None)


def stop() -> None:
    """Stop the replicas, once their requests have ended."""
    with suppress(Exception):  # Ray may have gone already
        serve.delete(APP)
