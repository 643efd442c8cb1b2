"""Publishes the changes of a model's prefix cache (`--kv-events`), of one engine after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config import ServerConfig
from penstock.config.keys import isolates_tenants
from penstock.config.units import MAX_PORT, parse_port
from penstock.kv.block_table import root_hash
from penstock.kv.changes import ContentLog
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.blocks import Blocks
    from penstock.obs.kv_events import Publisher
    from penstock.sched.scheduler import Scheduler
    from penstock.types.stats import RequestStats, StepStats

_EXAMPLE = "127.0.0.1:5557"


class KvEvents:
    """An observer that publishes which blocks an engine caches, except those with a salt or an adapter."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._log: ContentLog | None = None

    def watch(self, scheduler: Scheduler, blocks: Blocks) -> None:
        """Publish the changes of a new engine, which is not started yet."""
        del blocks
        index = scheduler.kv.prefix.index
        self._log = index.log = ContentLog(root_hash(b""), index.content_of)
        self._publisher.clear(scheduler.capacity.block_size)

    def on_step(self, _stats: StepStats) -> None:
        assert self._log is not None, "an engine is watched before it begins"
        self._publisher.change(*self._log.take_runs())

    def on_finish(self, _stats: RequestStats) -> None:
        pass

    def close(self) -> None:
        self._publisher.close()


def plan_kv_events(
    server: ServerConfig, prefix_sharing: str | None, *, has_prefix_caching: bool
) -> Callable[[], KvEvents] | None:
    """Return a function that opens the ports, or None without `--kv-events`. Both raise ConfigError."""
    if server.kv_events is None:
        if server.kv_events_topic is not None:
            raise ConfigError(
                "--kv-events-topic is set, and --kv-events is not: nothing would be published.",
                remedy=f"Add --kv-events {_EXAMPLE}, or leave out --kv-events-topic.",
            )
        return None
    host, port = _address(server.kv_events)
    if not has_prefix_caching:
        raise ConfigError("--kv-events is set, and the model has no prefix cache.", remedy="Leave it out.")
    if isolates_tenants(server, prefix_sharing):
        raise ConfigError(
            "--kv-events publishes only blocks that all tenants share, and each tenant has its own cached prefixes.",
            remedy="Set --prefix-sharing all, or leave out --kv-events.",
        )
    try:
        from penstock.obs.kv_events import Publisher
    except ImportError as error:
        cause = f"--kv-events needs a package that is not installed: {error.name}."
        raise ConfigError(cause, remedy="Install Penstock with the extra kv-events: pip install '.[kv-events]'.") from None

    def open_kv_events() -> KvEvents:
        try:
            return KvEvents(Publisher(host, port, server.kv_events_topic or ""))
        except OSError as error:
            cause = f"KV events can't be published at {host}, ports {port} and {port + 1}: {error.strerror}."
            raise ConfigError(cause, remedy="Name another address with --kv-events.") from error

    return open_kv_events


def _address(text: str) -> tuple[str, int]:
    """Return host and port. The port after it must exist, too."""
    host, _, last = text.removeprefix("tcp://").rpartition(":")
    try:
        port = parse_port(last)
    except ValueError:
        port = 0
    if not host or not 0 < port < MAX_PORT:
        raise ConfigError(f"--kv-events {text} is not of the form HOST:PORT.", remedy=f"Write it as {_EXAMPLE}.")
    return host.strip("[]"), port
