"""`penstock cluster`: replicas of a model on Ray, behind one server."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from penstock import fast_json
from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    given_words,
    models_argument,
    routing_of_file,
    tls_options,
    warn_of_unknown_variables,
)
from penstock.cli.serve import check_access, exit_at_once, outlive_hangups, set_up_logging
from penstock.config import Config
from penstock.config.routing import Routing
from penstock.config.several import configs_of
from penstock.types.errors import ConfigError, PenstockError, counted

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from penstock.deploy.deployment import Deployment

_COMPONENTS = ("model", "kv", "lora", "scheduler", "admission", "backend", "server", "sharing", "cluster", "log")
UPDATE_TIMEOUT_S = 1200.0
Wanted = tuple[Sequence[Config], Routing]
"""The models of a cluster, and its routes, upstreams and pipelines."""
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
    outlive_hangups()
    configs = configs_of(values, words=words, tables=tables)
    config = configs[0]
    set_up_logging(config.log)
    routing = routing_of_file()
    check_access(config.server, os.environ, routing.upstreams)
    warn_of_unknown_variables()
    from penstock.serve.http.listener import bind_socket
    from penstock.serve.server import run_server

    with bind_socket(config.server.host, config.server.port) as listener, ExitStack() as stack:
        deployment = _deployment(configs, routing, partial(_read_again, given_words()), address, stack)
        code = run_server(deployment, config.server, listener=listener)
    exit_at_once(code)


@click.command(cls=GroupedCommand)
@models_argument
@config_options(*_COMPONENTS)
@address_option
def _read(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], address: str | None, **values: Any) -> Wanted:
    """Read the configuration of `up` without starting anything."""
    del address
    return configs_of(values, words=words, tables=tables), routing_of_file()


def _read_again(words: Sequence[str]) -> Wanted:
    """Read the configuration again from `up`'s arguments. Raises ConfigError."""
    try:
        wanted: Wanted = _read.main(list(words), standalone_mode=False)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
    return wanted


@cluster.command()
@click.argument("url", required=False)
@click.option(
    "--api-key",
    envvar=["PENSTOCK_ADMIN_API_KEY", "PENSTOCK_API_KEY"],
    metavar="KEY",
    help="Key of an admin, if the server has one.",
)
@tls_options
def update(url: str | None, api_key: str | None, cafile: str | None, *, insecure: bool) -> None:
    """Let the cluster at URL read its configuration again, and replace the models whose settings have changed."""
    from penstock.cli.top import target_of
    from penstock.lab.target import Questions

    target = target_of(url, None, api_key, cafile, insecure=insecure)
    with Questions(target, timeout_s=UPDATE_TIMEOUT_S) as questions:
        code, body = questions.ask("POST", "/cluster/update")
    try:
        answer = fast_json.loads(body)
        told = "\n".join(answer["changes"]) if code == 200 else answer["error"]["message"]
    except (LookupError, TypeError, ValueError):
        remedy = "Is it a cluster of Penstock, and of this version?"
        raise PenstockError(f"{target.url} answered {code}.", remedy=remedy) from None
    if code != 200:
        remedy = "Give an admin key with --api-key." if code in (401, 403) else ""
        raise PenstockError(f"{target.url} answered {code}: {told}", remedy=remedy)
    print(told or "Nothing has changed.")


@cluster.command()
@click.argument("url", required=False)
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server requires.")
@tls_options
def status(url: str | None, api_key: str | None, cafile: str | None, *, insecure: bool) -> None:
    """Show the replicas of the cluster at URL: what they run, what they have yet to compute, how full their caches are."""
    from penstock.cli.top import reader_of, replica_lines

    reader = reader_of(url, None, api_key, None, cafile, insecure=insecure)
    for name in reader.names:
        load = reader.load(name)
        if "replicas" not in load:
            raise PenstockError("This is a single server.", remedy="`penstock top` shows it.")
        print("\n".join([name, *replica_lines(load["replicas"])]))
        for one in load["scaling"]:
            print(f"{one['age_s']:.0f} s ago: {one['replicas']} wanted. {one['reason']}")


@cluster.command()
@click.option("--address", metavar="ADDRESS", help="The running Ray. Default: auto, the one on this machine.")
def down(address: str | None) -> None:
    """Stop a cluster's replicas on a running Ray once their requests have ended. A Ray started by `up` ends with it."""
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
@click.option("--name", default="penstock", show_default=True, metavar="NAME", help="Name of all Kubernetes objects.")
@click.option("--ray-version", default="2.60.0", show_default=True, metavar="VERSION", help="Version of Ray in the image.")
def render(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], **values: Any) -> None:
    """Write the Kubernetes manifest of such a cluster, for KubeRay's operator."""
    from penstock.cluster.manifest import Pods, manifest

    own = ("image", "cpus", "pod_memory", "name", "ray_version")
    image, cpus, memory, name, ray_version = [values.pop(key) for key in own]
    config, *others = configs_of(values, words=words, tables=tables)
    if others:
        raise ConfigError(f"A manifest is of one model, and {1 + len(others)} are named.", remedy="Write one for each.")
    if routing_of_file() != Routing():
        raise ConfigError("A manifest has no [[routes]], [[upstreams]] or [[pipelines]].", remedy="Leave them out.")
    print(manifest(config, Pods(name=name, image=image, cpus=cpus, memory=memory, ray_version=ray_version)), end="")


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed.", remedy="Install Penstock with the extra ray: pip install '.[ray]'.")


def _deployment(
    configs: Sequence[Config], routing: Routing, read_again: Callable[[], Wanted], address: str | None, stack: ExitStack
) -> Deployment:
    """Start each model's replicas, and return the front server's deployment once each has its first one.

    `read_again`: reads the configuration for an update. `stack` stops the replicas.
    """
    from penstock.cluster.models import ClusterModels
    from penstock.serve.http.listener import bind_socket

    models = ClusterModels(configs, routing, bind_socket, is_elsewhere=address is not None)
    stack.callback(models.close)
    from penstock.cluster import on_ray

    stack.enter_context(on_ray.connected(address, models.num_cpus))
    on_ray.start_serve()
    stack.callback(_stop_quietly, on_ray.stop)
    stack.callback(models.close)  # while Ray still runs
    deployment = models.start(on_ray.Crew, on_ray.num_machines())
    deployment.update = lambda: models.update(*read_again())
    return deployment


def _stop_quietly(stop: Callable[[], int]) -> None:
    """Stop replicas when this process ends, even if Ray is already gone."""
    try:
        stop()
    except Exception as error:
        _log.debug("the replicas were not stopped: %s", error)
