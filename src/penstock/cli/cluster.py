"""`penstock cluster`: replicas of a model on Ray, behind one server."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    models_argument,
    warn_of_unknown_variables,
)
from penstock.cli.serve import check_access, set_up_logging
from penstock.config import Config, ServerConfig
from penstock.config.several import configs_of
from penstock.types.errors import ConfigError, PenstockError, counted

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from penstock.deploy.deployment import Deployment
    from penstock.deploy.resources import Machine
    from penstock.deploy.running import ServedModel

_COMPONENTS = ("model", "kv", "scheduler", "admission", "backend", "server", "cluster", "log")

TELL_AFTER_S = 30.0
JOIN_TIMEOUT_S = 30.0
address_option = click.option("--address", metavar="ADDRESS", help="A running Ray, such as auto. Default: one started here.")


@click.group()
def cluster() -> None:
    """Run replicas of a model on Ray, behind one server: on this machine, or on those of a Ray cluster."""


@cluster.command(cls=GroupedCommand, epilog=EPILOG)
@models_argument
@config_options(*_COMPONENTS)
@address_option
def up(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], address: str | None, **values: Any) -> None:
    """Start replicas of each MODEL and a server before them, until Ctrl-C or SIGTERM."""
    _check_ray()
    configs = configs_of(values, words=words, tables=tables)
    config = configs[0]
    set_up_logging(config.log)
    check_access(config.server, os.environ)
    warn_of_unknown_variables()
    from penstock.serve.http.listener import bind_socket
    from penstock.serve.server import run_server

    with bind_socket(config.server.host, config.server.port) as listener, ExitStack() as stack:
        code = run_server(_deployment(configs, address, stack), config.server, listener=listener)
    # Exit at once, as `serve` does.
    sys.stdout.flush()
    os._exit(code)


@cluster.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server asks for.")
def status(url: str, api_key: str | None) -> None:
    """Show the replicas of the cluster at URL: what they run, what they have yet to compute, how full their caches are."""
    from penstock.cli.top import Reader, replica_lines

    reader = Reader(url.rstrip("/"), api_key)
    for name in reader.names:
        load = reader.load(name)
        if "replicas" not in load:
            raise PenstockError(f"{url} is a single server.", remedy="`penstock top` shows it.")
        print("\n".join([name, *replica_lines(load["replicas"])]))
        for one in load["scaling"]:
            print(f"{one['age_s']:.0f} s ago: {one['replicas']} wanted. {one['reason']}")


@cluster.command()
@click.option("--address", metavar="ADDRESS", help="The running Ray. Default: auto, which is one of this machine.")
def down(address: str | None) -> None:
    """Stop the replicas of a cluster on a running Ray, once their requests have ended. One started by `up` ends with it."""
    _check_ray()
    from penstock.cluster import on_ray

    with on_ray.connected(address or "auto", 0, waits=False):
        num_models = on_ray.stop()
    print(f"Stopped the replicas of {counted(num_models, 'model')}." if num_models else "No cluster runs there.")


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
        raise ConfigError(f"A manifest is of one model, and {len(configs)} are named.", remedy="Write one for each.")
    return configs[0]


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed.", remedy="Install Penstock with the extra ray: pip install '.[ray]'.")


def _deployment(configs: Sequence[Config], address: str | None, stack: ExitStack) -> Deployment:
    """Start the replicas of each model, and return the front's deployment once the first of each have come.

    The stack ends them all.
    """
    from penstock.cluster.front import check
    from penstock.deploy.deployment import Deployment
    from penstock.deploy.resources import MemoryBudget, Resources

    num_replicas = sum(config.cluster.most for config in configs)
    machine = Resources(num_models=num_replicas).machine("")
    for config in configs:
        if config.cluster.replica_host in ("0.0.0.0", "::"):  # noqa: S104
            remedy = "Name an address of this machine at which they reach it."
            raise ConfigError(f"Replicas can't dial {config.cluster.replica_host}.", remedy=remedy)
    if address is not None:  # each replica checks the memory of its own machine
        machine = replace(machine, available_bytes=1 << 60, total_bytes=1 << 60)
    if address is not None and configs[0].backend.threads is None:
        raise ConfigError("The replicas' machines are not known here.", remedy="Give the --threads of each replica.")
    num_threads = configs[0].backend.threads or max(1, machine.cores.num_threads // num_replicas)
    for config in configs:
        check(config)
    fronts = [_Front(config, number, machine, num_threads, stack) for number, config in enumerate(configs)]
    from penstock.cluster import on_ray

    stack.enter_context(on_ray.connected(address, num_threads * num_replicas))
    on_ray.start_serve()
    stack.callback(_stop_quietly, on_ray.stop)
    if on_ray.num_machines() > 1 and any(is_loopback(config.cluster.replica_host) for config in configs):
        remedy = "Set --replica-host to an address of this machine that the others reach."
        raise ConfigError("Replicas on other machines can't reach 127.0.0.1.", remedy=remedy)
    num_beside = -(-num_replicas // on_ray.num_machines())
    for front in fronts:
        front.start(num_beside)
    served = [front.served() for front in fronts]
    deployment = Deployment(served, MemoryBudget())
    stack.callback(deployment.close)
    deployment.start(served)
    return deployment


class _Front:
    """The end of one model's cluster at this process."""

    def __init__(self, config: Config, number: int, machine: Machine, num_threads: int, stack: ExitStack) -> None:
        """Find the model and check its settings: Ray is started only for what can run. `number`: of the model."""
        from penstock.clock import WallClock
        from penstock.cluster.fleet import Fleet
        from penstock.deploy.factory import locate
        from penstock.deploy.resolve import nanoseconds, resolve
        from penstock.engine.bridge import Bridge
        from penstock.sched.routing.routers import find_router
        from penstock.serve.http.listener import bind_socket

        self._config, self._number, self._machine, self._num_threads = config, number, machine, num_threads
        self._stack = stack
        self._source, self._bridge, self._secret = locate(config), Bridge(), secrets.token_bytes(32)
        resolve(config, self._source, machine)
        router = find_router(config.cluster.router)()
        listener = bind_socket(config.cluster.replica_host, 0)
        self._address = (config.cluster.replica_host, listener.getsockname()[1])
        self._fleet = Fleet(
            listener,
            secret=self._secret,
            router=router,
            clock=WallClock(),
            sink=self._bridge.deliver,
            has_prefix_caching=config.kv.prefix_caching,
            resumes=config.cluster.resume,
            slo_itl_ns=nanoseconds(config.scheduler.slo_itl_s),
        )
        self._fleet.start()
        stack.callback(self._fleet.close, 0.0)

    def start(self, num_beside: int) -> None:
        """Begin to start the first replicas. `num_beside`: replicas that share a machine's memory."""
        from penstock.cluster.on_ray import Crew

        config, of_server = self._config, self._config.server
        of_replica = replace(
            config,
            backend=replace(config.backend, threads=self._num_threads),
            # The keys of clients stay here.
            server=ServerConfig(
                explained_requests=of_server.explained_requests, shutdown_timeout_s=of_server.shutdown_timeout_s
            ),
        )
        self._crew = Crew(of_replica, number=self._number, front=self._address, secret=self._secret, num_beside=num_beside)
        self._starting = _Background(self._crew.start)
        self._stack.callback(self._starting.join)  # Ray would be started anew for what is left of it

    def served(self) -> ServedModel:
        """Wait for the first replica, and return the model. Raises PenstockError if Ray can't start it."""
        from penstock.cluster.front import serve_replicas
        from penstock.cluster.on_ray import num_free_cpus
        from penstock.sched.scaling import Scaler

        since_s = time.monotonic()
        while self._fleet.wait_for_model(0.1) is None:
            self._starting.check()
            if time.monotonic() - since_s > TELL_AFTER_S:
                since_s = time.monotonic()
                name, cpus, free = self._config.model.model, self._num_threads, num_free_cpus()
                _log.warning("no replica of %s has come yet: each takes %d CPUs, and Ray has %g free", name, cpus, free)
        least, most = self._config.cluster.replicas, self._config.cluster.most
        if least < most:
            self._fleet.scale(Scaler(least, most, self._crew.first), self._crew.first, self._crew.want)
        return serve_replicas(self._config, self._source, self._fleet, self._bridge, self._machine)


def _stop_quietly(stop: Callable[[], int]) -> None:
    """Stop replicas as this process ends, also if Ray has gone already."""
    try:
        stop()
    except Exception as error:
        _log.debug("the replicas were not stopped: %s", error)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


class _Background:
    """A job in a thread, whose error `check` raises."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-ray", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._job()
        except Exception as error:
            _log.error("Ray could not start the replicas: %s", error)
            self._error = error

    def join(self) -> None:
        self._thread.join(JOIN_TIMEOUT_S)

    def check(self) -> None:
        if self._error is not None:
            raise PenstockError(f"Ray could not start the replicas: {self._error}") from self._error
