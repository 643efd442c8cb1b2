"""`penstock cluster`: replicas of a model on Ray, behind one server."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    models_argument,
    setting_keys,
    warn_of_unknown_variables,
)
from penstock.cli.serve import check_access, set_up_logging
from penstock.config import Config
from penstock.config.several import configs_of
from penstock.types.errors import ConfigError, PenstockError

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from penstock.cluster.fleet import Fleet
    from penstock.deploy.deployment import Deployment

_COMPONENTS = ("model", "kv", "scheduler", "admission", "backend", "server", "cluster", "log")
_OF_REPLICAS = (*setting_keys("model", "kv", "scheduler", "backend"), "explained_requests", "shutdown_timeout")

address_option = click.option("--address", metavar="ADDRESS", help="A running Ray, such as auto. Default: one started here.")


@click.group()
def cluster() -> None:
    """Run replicas of a model on Ray, behind one server: on this machine, or on those of a Ray cluster."""


@cluster.command(cls=GroupedCommand, epilog=EPILOG)
@models_argument
@config_options(*_COMPONENTS)
@address_option
def up(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], address: str | None, **values: Any) -> None:
    """Start replicas of MODEL and a server before them, until Ctrl-C or SIGTERM."""
    _check_ray()
    config = _only(configs_of(values, words=words, tables=tables))
    set_up_logging(config.log)
    check_access(config.server, os.environ)
    warn_of_unknown_variables()
    settings = {key: values[key] for key in _OF_REPLICAS if key in values} | {"model": config.model.model}
    from penstock.serve.http.listener import bind_socket
    from penstock.serve.server import run_server

    with bind_socket(config.server.host, config.server.port) as listener, ExitStack() as stack:
        code = run_server(_deployment(config, settings, address, stack), config.server, listener=listener)
    # Exit at once, as `serve` does.
    sys.stdout.flush()
    os._exit(code)


@cluster.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server asks for.")
def status(url: str, api_key: str | None) -> None:
    """Show the replicas of the cluster at URL: what they run, what they have yet to compute, how full their caches are."""
    from penstock.cli.top import Reader, replica_lines

    load = Reader(url.rstrip("/"), api_key).load()
    if "replicas" not in load:
        raise PenstockError(f"{url} is a single server.", remedy="`penstock top` shows it.")
    print("\n".join(replica_lines(load["replicas"])))
    for one in load["scaling"]:
        print(f"{one['age_s']:.0f} s ago: {one['replicas']} wanted. {one['reason']}")


@cluster.command()
@address_option
def down(address: str | None) -> None:
    """Stop the replicas of a cluster on a running Ray, once their requests have ended. One started by `up` ends with it."""
    _check_ray()
    from penstock.cluster import on_ray

    with on_ray.connected(address or "auto", 0):
        on_ray.stop()


@cluster.command(cls=GroupedCommand, epilog=EPILOG)
@models_argument
@config_options(*_COMPONENTS, without=("threads",))
@click.option("--image", required=True, metavar="IMAGE", help="Container image with Penstock and its extra ray.")
@click.option("--cpus", type=click.IntRange(1), default=4, show_default=True, help="CPUs of a replica.")
@click.option("--pod-memory", default="8Gi", show_default=True, metavar="QUANTITY", help="Memory of a replica's pod.")
@click.option("--name", default="penstock", show_default=True, metavar="NAME", help="Name of all that is made.")
@click.option("--ray-version", default="2.60.0", show_default=True, metavar="VERSION", help="Version of Ray in the image.")
def render(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], **values: Any) -> None:
    """Write the Kubernetes manifest of such a cluster, for KubeRay's operator."""
    from penstock.cluster.manifest import Pods, manifest

    own = ("image", "cpus", "pod_memory", "name", "ray_version")
    image, cpus, memory, name, ray_version = [values.pop(key) for key in own]
    config = _only(configs_of(values, words=words, tables=tables))
    print(manifest(config, Pods(name=name, image=image, cpus=cpus, memory=memory, ray_version=ray_version)), end="")


def _only(configs: Sequence[Config]) -> Config:
    if len(configs) > 1:
        raise ConfigError(f"A cluster serves one model, and {len(configs)} are named.", remedy="Start a cluster for each.")
    return configs[0]


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed.", remedy="Install Penstock with the extra ray: pip install '.[ray]'.")


def _deployment(config: Config, settings: Mapping[str, object], address: str | None, stack: ExitStack) -> Deployment:
    """Start replicas, and return the front's deployment once the first has come. The stack ends them all."""
    from penstock.cluster.front import check, start_front
    from penstock.deploy.factory import locate
    from penstock.deploy.resolve import resolve
    from penstock.deploy.resources import Resources
    from penstock.engine.bridge import Bridge

    check(config)
    source, bridge, secret = locate(config), Bridge(), secrets.token_bytes(32)
    first, most = max(1, config.cluster.replicas), config.cluster.most
    machine = Resources(num_models=most).machine("")
    resolve(config, source, machine)  # what is wrong is told before Ray is started
    fleet, front = _fleet(config, secret, bridge.deliver)
    stack.callback(fleet.close, 0.0)
    if address is not None and config.backend.threads is None:
        raise ConfigError("The replicas' machines are not known here.", remedy="Give the --threads of each replica.")
    num_threads = config.backend.threads or max(1, machine.cores.num_threads // most)
    from penstock.cluster import on_ray
    from penstock.sched.scaling import Scaler

    stack.enter_context(on_ray.connected(address, num_threads * most))
    stack.callback(on_ray.stop)
    crew = on_ray.Crew(
        {**settings, "threads": num_threads},
        front=front,
        secret=secret,
        least=config.cluster.replicas,
        most=most,
        num_cpus=num_threads,
        leave_s=config.server.shutdown_timeout_s,
    )
    starting = _Background(crew.start)
    while fleet.wait_for_model(0.1) is None:
        starting.check()
    if config.cluster.replicas < most:
        fleet.scale(Scaler(config.cluster.replicas, most, first), crew.want)
    deployment = start_front(config, source, fleet, bridge, machine)
    stack.callback(deployment.close)
    return deployment


def _fleet(config: Config, secret: bytes, sink: Any) -> tuple[Fleet, tuple[str, int]]:
    """Return a started fleet, and where its replicas dial in."""
    from penstock.clock import WallClock
    from penstock.cluster.fleet import Fleet
    from penstock.sched.routing.routers import find_router
    from penstock.serve.http.listener import bind_socket

    router = find_router(config.cluster.router)()
    listener = bind_socket(config.cluster.replica_host, 0)
    fleet = Fleet(
        listener,
        secret=secret,
        router=router,
        clock=WallClock(),
        sink=sink,
        has_prefix_caching=config.kv.prefix_caching,
        resumes=config.cluster.resume,
    )
    fleet.start()
    return fleet, (config.cluster.replica_host, listener.getsockname()[1])


class _Background:
    """A job in a thread, whose error `check` raises."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="penstock-ray", daemon=True).start()

    def _run(self) -> None:
        try:
            self._job()
        except Exception as error:
            _log.error("Ray could not start the replicas: %s", error)
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise PenstockError(f"Ray could not start the replicas: {self._error}") from self._error
