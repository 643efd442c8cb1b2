"""The models of a cluster: each has a fleet at the front, and a crew that runs its replicas.

`update` changes them while clients are served. If a model's settings have changed, new replicas start beside the old ones and
take new requests once they are ready. The old ones stop after their last request.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.clock import WallClock
from penstock.cluster.fleet import Fleet
from penstock.cluster.front import check, serve_replicas, without_splits
from penstock.config import Config, Device, ServerConfig
from penstock.config.routing import Routing
from penstock.config.setting import settings_of
from penstock.config.units import nanoseconds
from penstock.deploy.deployment import Deployment, refuse_twice
from penstock.deploy.device import has_gpu
from penstock.deploy.factory import locate, locate_draft
from penstock.deploy.pipelines import check_pipelines, open_pipelines
from penstock.deploy.resolve import aliases, resolve, served_names
from penstock.deploy.resources import Machine, MemoryBudget, Resources
from penstock.deploy.routes import check_routes, open_routes, warn_of_other_files
from penstock.deploy.running import ServedModel
from penstock.deploy.splits import Split, check_splits, read_splits
from penstock.engine.bridge import Bridge
from penstock.machine import usable_cpus
from penstock.models import generation
from penstock.models.cache import expand_home
from penstock.models.catalog import ModelSource
from penstock.models.load import fingerprint
from penstock.sched.routing.routers import find_router
from penstock.sched.scaling import Scaler
from penstock.types.errors import ConfigError, PenstockError, Rejected, RejectReason, counted

_log = logging.getLogger(__name__)

Bind = Callable[[str, int], socket.socket]
LOG_AFTER_S = 30.0
UPDATE_S = 600.0
"""Time limit for the replicas of an update to connect."""
STOP_S = 30.0
"""How long to repeat `Crew.stop` while a start is still under way, which can add replicas."""
LOOK_S = 0.1


class Crew(Protocol):
    """Starts and stops the replicas of one model, for example on Ray."""

    first: int
    """Initial number of replicas."""

    def start(self) -> None:
        """Start the first replicas. Blocks, and raises RuntimeError if they can't start."""
        ...

    def want(self, num_replicas: int) -> None:
        """Change the number of replicas. Returns at once."""
        ...

    def stop(self) -> None:
        """Stop the replicas, once their requests have ended. Idempotent."""
        ...

    def room(self) -> str:
        """Describe the free room for replicas, for the log."""
        ...


class MakeCrew(Protocol):
    def __call__(self, config: Config, *, front: tuple[str, int], secret: bytes, num_beside: int) -> Crew:
        """`config`: the replicas' settings. `front`: the address that they dial. `num_beside`: replicas that share a machine's
        memory."""
        ...


class ClusterModels:
    def __init__(self, configs: Sequence[Config], routing: Routing, bind: Bind, *, is_elsewhere: bool) -> None:
        """Find the models and check their settings. `start` starts the replicas, so a refused config starts none.

        `bind`: returns a socket that listens at a host and port. `is_elsewhere`: replicas run on machines that are not known
        here. Raises PenstockError.
        """
        if configs[0].backend.device == Device.AUTO and has_gpu():
            _log.info("replicas compute on CPUs: a cluster does not use GPUs yet")
        self._bind, self._is_elsewhere = bind, is_elsewhere
        self._updating = threading.Lock()
        self._deployment: Deployment | None = None
        self._ended: list[Member] = []
        """Former members whose replicas may still be running."""
        self._routing, self._routes = routing, open_routes(routing.routes)
        self._upstreams = {one.name: one for one in routing.upstreams}
        self._pipelines = open_pipelines(routing.pipelines)
        self._configs, self._members = configs, self._members_of(configs)

    @property
    def num_cpus(self) -> int:
        """Twice the CPUs of all replicas, because an update runs old and new ones side by side. At least the machine's CPUs."""
        num_threads = sum(member.num_threads * member.config.cluster.most for member in self._members)
        return max(2 * num_threads, usable_cpus())

    def start(self, make_crew: MakeCrew, num_machines: int) -> Deployment:
        """Start the replicas of each model. Return the deployment once each model has a replica."""
        self._make_crew, self._num_machines = make_crew, num_machines
        splits = self._checked_splits(self._members, self._configs)
        self._begin(self._members)
        for member in self._members:
            member.wait_for(1)
        served = [member.serve() for member in self._members]
        warn_of_other_files(self._routes, {name: member.source for member in self._members for name in member.names})
        self._deployment = Deployment(
            served,
            MemoryBudget(),
            splits=splits,
            routes=self._routes,
            upstreams=self._routing.upstreams,
            pipelines=self._pipelines,
        )
        self._deployment.start(served)
        return self._deployment

    def update(self, configs: Sequence[Config], routing: Routing) -> list[str]:
        """Serve the models of another configuration. Return what changed, a line for each model.

        Blocks until the new models' replicas have connected. Raises PenstockError, and then nothing changes.
        """
        if not self._updating.acquire(blocking=False):
            raise PenstockError("Another update is under way.", remedy="Wait for its end.")
        try:
            return self._update(configs, routing)
        finally:
            self._updating.release()

    def close(self) -> None:
        """End all models, and wait for their replicas to stop."""
        with self._updating:
            if self._deployment is not None:
                self._deployment.close()
            ended = [*self._members, *self._ended]
            for member in ended:
                member.end()
            for member in ended:
                member.join()

    def _update(self, configs: Sequence[Config], routing: Routing) -> list[str]:
        first, first_before = configs[0], self._configs[0]
        if (first.server, first.log, routing) != (first_before.server, first_before.log, self._routing):
            raise ConfigError(
                "Settings of the server and its log, such as --port, routes, and upstreams with their limits of tenants can't "
                "change in an update.",
                remedy="Stop the cluster and start it.",
            )
        assert self._deployment is not None, "it has started"
        before = {member.name for member in self._members}
        members = self._members_of(configs, kept=self._members)
        new = [member for member in members if member not in self._members]
        gone = [member for member in self._members if member not in members]
        end_s = time.monotonic() + UPDATE_S
        try:
            splits = self._checked_splits(members, configs)
            self._begin(new)
            for member in new:
                member.wait_for(member.crew.first, end_s, self._deployment)
            for member in new:
                member.serve()
            before_splits = self._deployment.splits
            self._deployment.change([member.served for member in members], splits)
        except BaseException:
            for member in new:
                member.end()
            self._remember(new)
            raise
        is_other_default = members[0].name != self._members[0].name
        self._configs, self._members = configs, members
        self._remember(gone)  # they end with their last requests
        names = {member.name for member in members}
        whole = names - {split.to for split in splits}
        return [
            *(f"{member.name}: {'replaced' if member.name in before else 'added'}" for member in new),
            *(f"{member.name}: removed" for member in gone if member.name not in names),
            *(f"{one.to}: answers {one.share:.0%} of the requests for {one.of}" for one in splits if one not in before_splits),
            *(f"{one.to}: answers its own requests alone" for one in before_splits if one.to in whole),
            *([f"{members[0].name}: the default model"] if is_other_default else []),
        ]

    def _checked_splits(self, members: Sequence[Member], configs: Sequence[Config]) -> list[Split]:
        """Return the splits, before replicas are started. Raises ConfigError if the models can't be served together."""
        splits = read_splits([(member.name, config.sharing) for member, config in zip(members, configs, strict=True)])
        refuse_twice([name for member in members for name in member.names])
        check_splits(splits, [name for member in members for name in served_names(member.config, member.source)])
        by_name = {name: member for member in members for name in member.names}
        check_routes(self._routes, by_name, self._upstreams)
        check_pipelines(self._pipelines, by_name, {route.name: route for route in self._routes}, {*self._upstreams})
        if self._num_machines > 1 and any(is_loopback(member.config.cluster.replica_host) for member in members):
            remedy = "Set --replica-host to an address of this machine that the others reach."
            raise ConfigError("Replicas on other machines can't reach 127.0.0.1.", remedy=remedy)
        return splits

    def _remember(self, members: Sequence[Member]) -> None:
        """Keep former members until their replicas have stopped, so that `close` waits for them."""
        self._ended = [member for member in [*self._ended, *members] if not member.has_stopped]

    def _members_of(self, configs: Sequence[Config], kept: Sequence[Member] = ()) -> list[Member]:
        num_replicas = sum(config.cluster.most for config in configs)
        machine = Resources(num_models=num_replicas).machine("")
        if self._is_elsewhere:  # each replica checks the memory of its own machine
            machine = replace(machine, available_bytes=1 << 60, total_bytes=1 << 60)
            if configs[0].backend.threads is None:
                raise ConfigError("The replicas' machines are not known here.", remedy="Give the --threads of each replica.")
        num_threads = configs[0].backend.threads or max(1, machine.cores.num_threads // num_replicas)
        for config in configs:
            check(config)
        made: list[Member] = []
        with ExitStack() as failed:
            for config in configs:
                unchanged = [one for one in kept if one.is_for(config)]
                if unchanged:
                    member = unchanged[0]
                else:
                    member = Member(config, machine, num_threads, self._bind)
                    failed.callback(member.end)
                made.append(member)
            failed.pop_all()
        return made

    def _begin(self, members: Sequence[Member]) -> None:
        beside = {*self._members, *members}  # an update runs old and new members side by side
        num_beside = -(-sum(member.config.cluster.most for member in beside) // self._num_machines)
        for member in members:
            member.begin(self._make_crew, num_beside)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _paths_of(config: Config, source: ModelSource) -> Iterator[Path]:
    """Yield the paths of a model's own files, and of those that its settings name."""
    yield source.path
    if (draft := locate_draft(config)) is not None:
        yield draft.path
    named = [Path(adapter.path) for adapter in config.lora.merged]
    named += [expand_home(config.model.generation_config) / generation.FILE]
    if (template := config.model.chat_template) is not None and "{" not in template:  # else it is the template's text
        named += [Path(template)]
    for part in (config.kv, config.scheduler):
        own = [getattr(part, item.field) for item in settings_of(type(part)) if item.takes_class]
        named += [Path(name.rpartition(":")[0]) for name in own if name and ":" in name]
    yield from (path for path in named if path.exists())  # others are names


class Member:
    """One model of a cluster."""

    served: ServedModel
    crew: Crew

    def __init__(self, config: Config, machine: Machine, num_threads: int, bind: Bind) -> None:
        """Check the model's settings and files, and listen for its replicas. Raises PenstockError."""
        self._given, self.num_threads, self._machine = config, num_threads, machine
        # All that follows is checked here with the settings that replicas get.
        config = replace(config, backend=replace(config.backend, device=Device.CPU.value, threads=num_threads))
        self.config = config
        if config.cluster.replica_host in ("0.0.0.0", "::"):  # noqa: S104
            remedy = "Name an address of this machine at which they reach it."
            raise ConfigError(f"Replicas can't dial {config.cluster.replica_host}.", remedy=remedy)
        self.source, self._bridge, self._secret = locate(config), Bridge(), secrets.token_bytes(32)
        self.names = tuple(dict.fromkeys((*served_names(config, self.source), *aliases(config, self.source))))
        try:
            self._files = {path: fingerprint(path) for path in _paths_of(config, self.source)}
        except OSError as error:
            raise ConfigError(f"The model's files can't be read: {error}.", remedy="Check the path.") from error
        resolve(config, self.source, machine)
        router = find_router(config.cluster.router)()
        try:
            listener = bind(config.cluster.replica_host, 0)
        except ConfigError as error:
            raise ConfigError(error.message, remedy="Check --replica-host: it must be an address of this machine.") from error
        self._address = (config.cluster.replica_host, listener.getsockname()[1])
        self._ending = threading.Lock()
        self._starting: _Background | None = None
        self._stopping: _Background | None = None
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

    @property
    def name(self) -> str:
        return self.names[0]

    def is_for(self, config: Config) -> bool:
        """Return whether this member can serve `config`: its settings and the files' content are the same."""
        if without_splits(self._given) != without_splits(config):
            return False
        try:
            return all(fingerprint(path) == known for path, known in self._files.items())
        except OSError as error:
            _log.warning("whether the files of %s have changed is not known: %s", self.name, error)
            return True

    def begin(self, make_crew: MakeCrew, num_beside: int) -> None:
        """Begin to start the first replicas."""
        of_server = self.config.server
        server = ServerConfig(explained_requests=of_server.explained_requests, shutdown_timeout_s=of_server.shutdown_timeout_s)
        of_replica = replace(self.config, server=server)  # the keys of clients stay here
        self.crew = make_crew(of_replica, front=self._address, secret=self._secret, num_beside=num_beside)
        self._starting = _Background(self.crew.start)

    def wait_for(self, num_replicas: int, end_s: float = math.inf, deployment: Deployment | None = None) -> None:
        """Wait for the first replicas. Raises PenstockError if they can't start or do not come in time, or the server ends."""
        assert self._starting is not None, "they have begun to start"
        logged_s = time.monotonic()
        while self._fleet.num_replicas < num_replicas:
            self._starting.check()
            if deployment is not None and deployment.is_closing:
                raise Rejected(RejectReason.DRAINING, "The server is shutting down.")
            now_s = time.monotonic()
            if now_s - logged_s > LOG_AFTER_S:
                logged_s, there = now_s, self._fleet.num_replicas
                wanted, room = counted(num_replicas, "replica"), self.crew.room()
                _log.warning(
                    "%d of %s of %s have come: each takes %d CPUs, and %s", there, wanted, self.name, self.num_threads, room
                )
            if now_s > end_s:
                raise PenstockError(
                    f"The replicas of {self.name} have not come within {UPDATE_S:g} s.",
                    remedy="Those of an update run beside the others: see that there are CPUs and memory for both.",
                )
            time.sleep(LOOK_S)

    def serve(self) -> ServedModel:
        """Return the served model. Call this after the first replica has connected."""
        least, most = self.config.cluster.replicas, self.config.cluster.most
        if least < most:
            self._fleet.scale(Scaler(least, most, self.crew.first), self.crew.first, self.crew.want)
        source, bridge = self.source, self._bridge
        self.served = serve_replicas(self.config, source, self._fleet, bridge, self._machine, on_closed=self.end)
        return self.served

    def end(self) -> None:
        """End the fleet, and begin to stop the replicas. Idempotent."""
        self._fleet.close(0.0)
        with self._ending:
            if self._starting is not None and self._stopping is None:
                self._stopping = _Background(partial(self._stop, self._starting))

    def join(self) -> None:
        """Wait for the replicas to stop, after `end`."""
        if self._stopping is not None:
            self._stopping.join(STOP_S)

    @property
    def has_stopped(self) -> bool:
        return self._starting is None or (self._stopping is not None and self._stopping.join(0.0))

    def _stop(self, starting: _Background) -> None:
        end_s = time.monotonic() + STOP_S
        is_over = False
        while not is_over:
            is_over = starting.join(0.0) or time.monotonic() > end_s  # a start under way can add replicas after `stop`
            try:
                self.crew.stop()
            except Exception as error:
                _log.warning("the replicas of %s could not be stopped: %s", self.name, error)
            starting.join(1.0)


class _Background:
    """A job in a thread. `check` raises the job's error."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-crew", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._job()
        except Exception as error:
            _log.error("replicas could not be started or stopped: %s", error)
            self._error = error

    def join(self, timeout_s: float) -> bool:
        """Wait for the job. Return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        if self._error is not None:
            raise PenstockError(f"The replicas could not be started: {self._error}") from self._error
