"""A deployment: the models of one process by name, and the keeper, the thread that loads and unloads them.

    request --> find --> LOADED: its running model, at once
                         else:   want --> keeper: room, load --> the running model

If memory is short for a model, `room` chooses others to unload. These take no new requests, and are closed when their last
request has ended. Requests that wait for a model are in `serve`, not here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from penstock.clock import Clock, WallClock
from penstock.config.units import format_size
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.pipelines import Pipeline, check_pipelines
from penstock.deploy.resources import MemoryBudget, MemoryShare
from penstock.deploy.room import FIRST_USE_NS, leavers, room_at_ns
from penstock.deploy.routes import Route, check_routes
from penstock.deploy.running import ModelState, RunningModel, ServedModel, Sources, UnloadReason
from penstock.deploy.splits import Split, check_splits, part_of
from penstock.engine.state import UNLOADED
from penstock.machine import give_back_free_memory
from penstock.types.errors import (
    ConfigError,
    ModelAway,
    ModelError,
    NotEnoughFreeMemory,
    NotEnoughMemory,
    PenstockError,
    PutOff,
    Rejected,
    RejectReason,
)

if TYPE_CHECKING:  # importing them would delay the loading of the first model's weights
    from penstock.deploy.off_loop import OffLoop

_log = logging.getLogger(__name__)

RETRY_NS = 10_000_000_000
"""Time after a failed load in which requests for the model are refused."""
PUT_OFF_S = 60.0
"""Time until background requests try again to have their model loaded."""
TEND_AGAIN_NS = 1_000_000_000
"""Time until the keeper tries again after an unexpected error."""


@dataclass(slots=True)
class _Wish:
    """A load that requests wait for."""

    future: Future[RunningModel]
    is_background: bool
    """Only background requests wait for it."""


class Deployment:
    """The models of a server, loaded or not. Any thread may call any method. Only `tend` and `close` block."""

    def __init__(
        self,
        served: Sequence[ServedModel],
        memory: MemoryBudget,
        *,
        clock: Clock | None = None,
        find_new: Callable[[], Sequence[ServedModel]] | None = None,
        splits: Sequence[Split] = (),
        routes: Sequence[Route] = (),
        upstreams: Sequence[UpstreamConfig] = (),
        pipelines: Sequence[Pipeline] = (),
    ) -> None:
        """The first model is the default one. `find_new` returns models that were added to a folder since its last call.

        Raises ConfigError if two models or adapters have a name in common, or for a split of an unknown model.
        """
        self.served = tuple(served)
        self._gone: tuple[ServedModel, ...] = ()
        """Models that `change` removed, until they are closed."""
        self._find_new = find_new
        self._refused: list[ServedModel] = []
        """Models in the folder whose names are taken. They are served once these names are free."""
        self._looking = threading.Lock()
        self.memory = memory
        self.clock = clock or WallClock()
        self.routes = {route.name: route for route in routes}
        self.upstreams = {upstream.name: upstream for upstream in upstreams}
        self.pipelines = {pipeline.name: pipeline for pipeline in pipelines}
        self._by_name = self._names_of(self.served)
        self.splits = tuple(splits)
        check_splits(self.splits, self.names)
        check_routes(routes, self._by_name, self.upstreams)
        check_pipelines(pipelines, self._by_name, self.routes, {*self.upstreams})
        for name, one in self._by_name.items():
            if (owner := self._owner_of_adapter(name, one)) is not None:
                raise ConfigError(
                    f"An adapter of {owner.name} is called {name!r}, as is a model in --models-dir.",
                    remedy="Rename one of them.",
                )
        self.update: Callable[[], Sequence[str]] | None = None
        """Rereads and applies the configuration, and describes the changes. Blocks, and raises PenstockError. None if this
        server can't be updated."""
        self._woken = threading.Event()
        """Set when the keeper has something to do."""
        self._lock = threading.Lock()
        """Guards the next three fields."""
        self.is_closing = False
        self._wanted: dict[ServedModel, _Wish] = {}
        """Models to load, in the order of the requests."""
        self._unwanted: dict[ServedModel, tuple[Future[None], int | None]] = {}
        """Models that an admin unloads, with the time at which their remaining requests are ended, or None."""
        self._keeper = threading.Thread(target=self._run_keeper, name="penstock-models", daemon=True)

    def _names_of(self, served: Sequence[ServedModel]) -> dict[str, ServedModel]:
        """Return the models by their names and aliases. Raises ConfigError if two models or adapters have a name in common."""
        assert served, "a deployment has at least one model"
        pairs = [(name, one) for one in served for name in dict.fromkeys(one.names + one.aliases)]
        refuse_twice([name for name, _ in pairs])
        found = dict(pairs)
        taken = {*found, *self.routes, *self.pipelines}  # requests do not name upstreams
        for owner in served:
            for adapter in owner.adapters.registered() if owner.adapters is not None else ():
                if adapter in taken:
                    raise ConfigError(
                        f"An adapter of {owner.name} is called {adapter!r}, as is another adapter, a model, route or pipeline.",
                        remedy="Give it another name in --lora-modules.",
                    )
                taken.add(adapter)
        return found

    def is_taken(self, name: str) -> bool:
        """Return whether a model, a route or a pipeline has this name."""
        return any(name in names for names in (self._by_name, self.routes, self.pipelines))

    def adapter_owner(self, name: str) -> ServedModel | None:
        """Return the model with an adapter of this name, among the names known without reading the disk, or None."""
        return next((one for one in self.served if one.adapters is not None and one.adapters.has(name)), None)

    def knows(self, name: str) -> bool:
        """Return whether a model, route, pipeline, upstream or adapter has this name. May read the folders of adapters."""
        if self.is_taken(name) or name in self.upstreams or self.adapter_owner(name) is not None:
            return True
        for one in self.served:
            with contextlib.suppress(OSError):
                if one.adapters is not None and one.adapters.look_up(name) is not None:
                    return True
        return False

    def _owner_of_adapter(self, name: str, model: ServedModel) -> ServedModel | None:
        """Return the model with an adapter that has the name of `model`, a model in the models' folder, or None.

        Also looks into the folders of adapters on disk. The file of `model` does not count: the folder may be the same.
        """
        if model.path is None:
            return None
        if (owner := self.adapter_owner(name)) is not None:
            return owner
        for one in self.served:
            with contextlib.suppress(OSError):  # an adapter that can't be read does not answer either
                path = None if one.adapters is None else one.adapters.look_up(name)
                if path is not None and path.resolve() != model.path.resolve():
                    return one
        return None

    def start(self, at_once: Sequence[ServedModel] = ()) -> None:
        """Load the models `at_once`, as far as they fit beside each other, and start the keeper.

        A failed load of several is logged, and tried again when a request wants the model. If no model can be loaded, or the
        configuration is wrong, close all models and raise the error.
        """
        first_error: Exception | None = None
        with contextlib.ExitStack() as started:
            for served in at_once:
                started.callback(served.end)
                try:
                    if self.running and self._plan(served).num_bytes > self.memory.left_bytes():
                        _log.warning(
                            "%s does not fit beside the others yet: it is loaded when a request asks for it", served.name
                        )
                        continue
                    self._load(served)
                except Exception as error:
                    is_wrong = isinstance(error, ConfigError) and not isinstance(error, ModelError)
                    if is_wrong or len(at_once) == 1:  # the caller reports it
                        raise
                    self._fail(served, error)
                    first_error = first_error or error
                else:
                    assert served.running is not None
                    started.callback(served.running.close)
            if first_error is not None and not self.running:
                raise first_error
            started.pop_all()
        self._keeper.start()

    @cached_property
    def off_loop(self) -> OffLoop:
        """Threads that parse large request bodies, before it is known which model they are for."""
        from penstock.deploy.off_loop import OffLoop

        return OffLoop(self.default.metrics.count_rejected)

    @cached_property
    def sources(self) -> Sources:
        """Generators of ids and times for requests that are not for a certain model."""
        return Sources()

    @property
    def default(self) -> ServedModel:
        """The model for requests that name no model."""
        return self.served[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models that can be served, without aliases."""
        return tuple(name for one in self.served if one.is_there for name in one.names)

    @property
    def may_grow(self) -> bool:
        """Whether there is a folder in which users can add models while the server runs (`--models-dir`)."""
        return self._find_new is not None

    def look(self) -> None:
        """Look for added and removed models in the models' folder on disk. Returns at once if another thread does so."""
        if self._find_new is None or not self._looking.acquire(blocking=False):
            return
        try:
            for served in (*self.served, *self._refused):
                served.look()
            found = self._find_new()  # may fail
            refused, self._refused = self._refused, []
            for served in (*refused, *found):
                taken = [name for name in served.names if self.is_taken(name) or self._owner_of_adapter(name, served)]
                if taken:
                    self._refused.append(served)
                    if served not in refused:
                        what = "a model, adapter, route or pipeline has the name"
                        _log.error("%s is not served: %s %r", served.path, what, taken[0])
                    continue
                served.metrics.tenants = self.default.metrics.tenants  # all models have the same keys
                self.served += (served,)
                self._by_name |= dict.fromkeys(served.names + served.aliases, served)
        finally:
            self._looking.release()

    @property
    def running(self) -> tuple[RunningModel, ...]:
        """The loaded models, including those about to be unloaded."""
        return tuple(running for one in (*self.served, *self._gone) if (running := one.running) is not None)

    @property
    def staying(self) -> tuple[RunningModel, ...]:
        """The loaded models that take new requests."""
        return tuple(one.running for one in self.served if one.state is ModelState.LOADED and one.running is not None)

    def change(self, served: Sequence[ServedModel], splits: Sequence[Split] = ()) -> None:
        """Serve these models from now on, the first one by default. Blocks until the new models are loaded.

        Models that are not among them take no new requests, and are closed after their last one. Raises the errors of a load,
        and ConfigError as the constructor. The deployment is then unchanged.
        """
        by_name = self._names_of(served)
        check_splits(splits, [name for one in served for name in one.names])
        with contextlib.ExitStack() as started:
            for one in served:
                if one not in self.served:
                    one.metrics.tenants = self.default.metrics.tenants  # all models have the same keys
                    self._load(one)
                    assert one.running is not None, "it was loaded"
                    started.callback(one.running.close)
            with self._lock:
                if self.is_closing:
                    raise _shutting_down()
                self._gone += tuple([one for one in self.served if one not in served])
                self.served, self._by_name, self.splits = tuple(served), by_name, tuple(splits)
                self._woken.set()
            started.pop_all()

    def find(self, name: str | None) -> ServedModel | None:
        """Return the model with this name or alias, or None. The name None stands for the default model."""
        served = self.default if name is None else self._by_name.get(name)
        return served if served is None or served.is_there else None

    def part_of(self, name: str | None, tenant: str, unit: str) -> ServedModel | None:
        """Return the model that answers a request. If the name is split, `tenant` and `unit` choose among several models."""
        return self.find(part_of(self.splits, self.default.name if name is None else name, tenant, unit))

    def want(self, served: ServedModel, *, is_background: bool = False) -> Future[RunningModel]:
        """Load the model if necessary. Callers share the returned future, so do not cancel it. It fails with `Rejected`.

        A load for background requests alone fails with `PutOff` rather than unload a model that people use.
        """
        with self._lock:
            if served not in self.served:
                served = self._by_name.get(served.name, served)
            if served not in self.served:
                return _failed(Rejected(RejectReason.UNAVAILABLE, f"The model {served.name} is not served any more."))
            failure = self.refusal(served)
            if failure is not None:
                return _failed(failure)
            if served not in self._unwanted:  # otherwise the keeper unloads the model first, and then loads it again
                with contextlib.suppress(ModelAway):
                    loaded: Future[RunningModel] = Future()
                    loaded.set_result(served.answerer())
                    return loaded
            wish = self._wanted.setdefault(served, _Wish(Future(), is_background))
            wish.is_background &= is_background
            self._woken.set()
            return wish.future

    def expected_wait_s(self, served: ServedModel) -> float:
        """Return the expected seconds until the model is loaded: earlier loads, unloading others for room, and its own load.

        Running requests of a model that makes room may take longer than expected.
        """
        line = list(dict.fromkeys([*self._wanted, served]))
        line = line[: line.index(served) + 1]
        now_ns = self.clock.now_ns()
        leaving = [one for one in self.served if one.state is ModelState.LEAVING]
        lacking_bytes = sum(one.num_bytes for one in line if one.running is None or one in leaving)
        lacking_bytes -= self.memory.left_bytes() + sum(one.num_bytes for one in leaving)
        room_ns = room_at_ns(lacking_bytes, self.served, now_ns) - now_ns
        return room_ns / 1e9 + sum(_load_s(one) for one in line if one.state is not ModelState.LOADED)

    def unload(self, served: ServedModel, timeout_s: float | None = None) -> Future[None]:
        """Unload a model for an admin. The future is done when its memory is free. A later request loads the model again.

        The model must not be `is_fixed`. `timeout_s`: time after which running requests are aborted. None: wait for them. The
        future fails with `Rejected` if the server shuts down.
        """
        until_ns = None if timeout_s is None else self.clock.now_ns() + int(timeout_s * 1e9)
        with self._lock:
            if self.is_closing:
                return _failed(_shutting_down())
            future, _ = self._unwanted.get(served, (Future(), None))
            self._unwanted[served] = future, until_ns
            self._woken.set()
        return future

    def keep(self, served: ServedModel, idle_ns: int) -> None:
        """Replace the idle time after which the loaded model is unloaded, until it is unloaded. Below 0: never unload it.

        The time begins now. Has no effect on a model without `idle_unload_ns`, or one that is not loaded.
        """
        with contextlib.suppress(ModelAway), served.answerer().using():
            served.kept_idle_ns = idle_ns
            self._woken.set()

    def drain(self) -> None:
        """Refuse new requests, and let running ones end."""
        with self._lock:
            self.is_closing = True
            wanted, self._wanted = self._wanted, {}
            unwanted, self._unwanted = self._unwanted, {}
            self._woken.set()
        for wish in wanted.values():
            wish.future.set_exception(_shutting_down())
        for gone, _ in unwanted.values():
            gone.set_exception(_shutting_down())
        for running in self.running:
            running.engine.drain()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Drain all models for up to `timeout_s` together, and close them. Idempotent.

        Returns whether all requests ended by themselves. A load that takes longer ends with the process.
        """
        self.drain()
        end_s = time.monotonic() + timeout_s
        if self._keeper.is_alive():
            self._keeper.join(max(timeout_s, 1.0))
        are_clean: list[bool] = []
        with contextlib.ExitStack() as closing:  # also if one can't be closed
            closing.callback(self.off_loop.close)
            for pipeline in self.pipelines.values():
                closing.callback(pipeline.reader.close)
            for served in self.served:
                closing.callback(served.end)
            for running in reversed(self.running):
                closing.callback(lambda one: are_clean.append(one.close(max(0.0, end_s - time.monotonic()))), running)
        return all(are_clean)

    # --- the keeper ---

    def _run_keeper(self) -> None:
        while not self.is_closing:
            try:
                due_ns = self.tend()
            except Exception:  # the thread must survive: all models need it
                _log.exception("the models could not be tended; this is tried again soon")
                due_ns = self.clock.now_ns() + TEND_AGAIN_NS
            self._woken.wait(None if due_ns is None else max(0, due_ns - self.clock.now_ns()) / 1e9)
            self._woken.clear()

    def tend(self) -> int | None:
        """Load and unload the models that are due. Return the time for the next call, or None to wait for an event.

        The keeper's thread calls this. Tests without that thread call it directly.
        """
        due_ns = [self._unload_unwanted(), self._unload_idle()]
        self._close_unused()
        self._resolve_unloads()
        due_ns.append(self._load_wanted())
        return min([at_ns for at_ns in due_ns if at_ns is not None], default=None)

    def _unload_unwanted(self) -> int | None:
        now_ns, due_ns = self.clock.now_ns(), list[int]()
        for served in self.served:
            if served.state is ModelState.LOADED and served.is_broken:
                _log.error("%s is unloaded: its engine failed and could not be restarted", served.name)
                self._begin_unload(served, UnloadReason.FAILED)
        for served in self._gone:
            if served.state is ModelState.LOADED:
                self._begin_unload(served, UnloadReason.REPLACED)
        with self._lock:
            unwanted = {served: until_ns for served, (_, until_ns) in self._unwanted.items()}
        for served, until_ns in unwanted.items():
            if served.state is ModelState.LOADED:
                self._begin_unload(served, UnloadReason.ASKED)
            if until_ns is not None and until_ns > now_ns:
                due_ns.append(until_ns)
            elif until_ns is not None and served.state is ModelState.LEAVING:
                self._close(served)
        return min(due_ns, default=None)

    def _resolve_unloads(self) -> None:
        with self._lock:
            gone = [self._unwanted.pop(one)[0] for one in list(self._unwanted) if one.running is None]
        for future in gone:
            future.set_result(None)

    def _unload_idle(self) -> int | None:
        now_ns, due_ns = self.clock.now_ns(), list[int]()
        for served in self.served:
            running = served.running
            unload_ns = served.unload_after_ns
            if served.state is ModelState.LOADED and running is not None and unload_ns is not None:
                unload_ns = max(unload_ns, FIRST_USE_NS)
                idle_ns = running.uses.used_ns + unload_ns
                if running.uses.num_users:
                    due_ns.append(now_ns + unload_ns)
                elif idle_ns > now_ns:
                    due_ns.append(idle_ns)
                else:
                    _log.info("%s leaves: nobody has used it for %g s", served.name, unload_ns / 1e9)
                    self._begin_unload(served, UnloadReason.IDLE)
        return min(due_ns, default=None)

    def _load_wanted(self) -> int | None:
        """Load the models that requests wait for, and unload others to make room. Return when to try again, or None.

        Models that people wait for come before those that only background requests wait for, and get room first. A model
        further behind is loaded sooner if both will fit, or if only background requests wait for the one before it.
        """
        with self._lock:
            wanted = [(served, wish.is_background) for served, wish in self._wanted.items()]
        wanted.sort(key=lambda wish: wish[1])  # stable
        due_ns = list[int]()
        room_bytes = self.memory.left_bytes() + sum([one.num_bytes for one in self.served if one.state is ModelState.LEAVING])
        """Bytes left after all pending unloads and the loads of earlier models in line."""
        for served, is_background in wanted:
            if served.state is ModelState.LOADED:  # it was unloaded, or broke, since this pass began
                continue
            try:
                share = self._plan(served)
                room_bytes -= share.num_bytes
                if room_bytes < 0:
                    chosen, retry_ns = leavers(-room_bytes, self.served, self.clock.now_ns(), for_background=is_background)
                    if not chosen:
                        if retry_ns is not None:
                            due_ns.append(retry_ns)
                        elif is_background:
                            self._put_off(served)
                        if not is_background:
                            break
                        room_bytes += share.num_bytes
                        continue
                    room_bytes += self._make_room(served, chosen)
                if not (is_background or self._has_room(served, share)):
                    self._close_unused(for_people=True)
                if self._has_room(served, share):
                    self._load(served)
            except Exception as error:
                if served.running is not None:  # still being unloaded: plan the load afterwards
                    continue
                self._fail(served, error)
                return self.clock.now_ns()  # recompute the free memory before planning the others
        return min(due_ns, default=None)

    def _has_room(self, served: ServedModel, share: MemoryShare) -> bool:
        return share.num_bytes <= self.memory.left_bytes() and served.state is not ModelState.LEAVING

    def _plan(self, served: ServedModel) -> MemoryShare:
        """Return the memory that a model will take. Raises NotEnoughMemory if it can never fit, and the errors of `plan`."""
        try:
            return self._share_of(served)
        except NotEnoughMemory as error:
            raise self.memory.explained(served.name, error) from error

    def _share_of(self, served: ServedModel) -> MemoryShare:
        if served.share is None:
            served.share = served.plan()
        kept = [one.num_bytes for one in self.served if one.is_kept and one.running is not None and one is not served]
        stuck_bytes = self.memory.stuck_bytes()
        if served.share.num_bytes > self.memory.total_bytes() - sum(kept) - stuck_bytes:
            beside = f" and kept models have {format_size(sum(kept))} of it" if kept else ""
            beside += f" and steps that have not come back hold {format_size(stuck_bytes)}" if stuck_bytes else ""
            raise NotEnoughFreeMemory(
                f"{served.name} takes {served.share}, all models together may take "
                f"{format_size(self.memory.total_bytes())}{beside}.",
                instead="Lower --kv-cache-memory, take a smaller model",
            )
        return served.share

    def _make_room(self, served: ServedModel, leaving: Sequence[ServedModel]) -> int:
        """Begin to unload the chosen models, and close unused ones at once. Return the bytes that this will free."""
        num_bytes = sum(one.num_bytes for one in leaving)
        for one in leaving:
            _log.info("%s leaves to make room for %s", one.name, served.name)
            self._begin_unload(one, UnloadReason.ROOM)
        self._close_unused()
        return num_bytes

    def _load(self, served: ServedModel) -> None:
        served.state = ModelState.LOADING
        began_ns = self.clock.now_ns()
        running = served.load()
        self._set_loaded(served, running, self.clock.now_ns() - began_ns)
        _log.info("%s was loaded in %.1f s", served.name, served.load_ns / 1e9)
        with self._lock:
            wish = self._wanted.pop(served, None)
        self._woken.set()  # the next pass computes when to unload the model if idle
        if wish is None or not wish.is_background:
            running.people.used_ns = served.loaded_ns
        if wish is not None:
            wish.future.set_result(running)
        if self.is_closing:
            running.engine.drain()  # `close` may have missed it
            running.close()
            served.end()

    def _set_loaded(self, served: ServedModel, running: RunningModel, load_ns: int) -> None:
        running.on_unused = partial(self._on_unused, served)
        served.running, served.info, served.failure = running, running.model, ""
        served.share = self.memory.share(served.name)
        served.loaded_ns = running.uses.used_ns = self.clock.now_ns()
        served.load_ns = load_ns
        served.num_loads += 1
        served.total_load_ns += load_ns
        served.state = ModelState.LOADED

    def _fail(self, served: ServedModel, error: Exception) -> None:
        known = error if isinstance(error, PenstockError) else None
        _log.error("%s can't be loaded: %s", served.name, error, exc_info=None if known else error)
        served.state, served.failed_ns = ModelState.FAILED, self.clock.now_ns()
        served.failure = known.without_folders() if known else "the server's log has the cause"
        served.share = None
        served.num_load_failures += 1
        with self._lock:
            wish = self._wanted.pop(served, None)
        if wish is not None:
            wish.future.set_exception(self.refusal(served) or _shutting_down())

    def _put_off(self, served: ServedModel) -> None:
        """Refuse the background requests that wait for a model, unless others have joined them."""
        with self._lock:
            wish = self._wanted.get(served)
            if wish is None or not wish.is_background:
                return
            del self._wanted[served]
        detail = f"{served.name} can't be loaded while other models, which people use, need the memory."
        wish.future.set_exception(PutOff(RejectReason.UNAVAILABLE, detail, retry_after_s=PUT_OFF_S))

    def _begin_unload(self, served: ServedModel, reason: UnloadReason) -> None:
        assert served.running is not None
        served.num_unloads[reason] += 1
        served.state = ModelState.LEAVING
        served.kept_idle_ns = None
        served.running.leave()

    def _close_unused(self, *, for_people: bool = False) -> None:
        """Close the models that leave and have no users. `for_people`: background requests do not count, and come again."""
        for served in (*self.served, *self._gone):
            running = served.running
            if served.state is ModelState.LEAVING and running is not None:
                uses = running.people if for_people else running.uses
                if not uses.num_users:
                    self._close(served)
        with self._lock:
            self._gone = tuple([one for one in self._gone if one.running is not None])

    def _close(self, served: ServedModel) -> None:
        assert served.running is not None
        running = served.running
        try:
            timeout_s = 0.0 if running.uses.num_users else 10.0  # without requests, it may still write to its disk tier
            running.close(timeout_s, UNLOADED)
        except Exception:
            _log.exception("%s could not be closed in order; its memory may be lost", served.name)
        served.metrics.disconnect()
        served.running, served.share, served.state = None, None, ModelState.UNLOADED
        give_back_free_memory()
        self._resolve_unloads()  # before this pass may load the model again
        _log.info("%s was unloaded", served.name)

    # --- for both sides ---

    def _on_unused(self, served: ServedModel) -> None:
        """Wake the keeper after a model's last request, or people's last one, if the keeper waits for that to unload it."""
        if self._wanted or served.state is ModelState.LEAVING:
            self._woken.set()

    def refusal(self, served: ServedModel) -> Rejected | None:
        """Return why the model can't be loaded for a request: its last load failed, or the server shuts down; else None."""
        if self.is_closing:
            return _shutting_down()
        retry_ns = served.failed_ns + RETRY_NS - self.clock.now_ns()
        if served.state is not ModelState.FAILED or retry_ns <= 0:
            return None
        return Rejected(
            RejectReason.UNAVAILABLE,
            f"The model {served.name} could not be loaded: {served.failure}",
            retry_after_s=retry_ns / 1e9,
        )


def refuse_twice(names: Sequence[str]) -> None:
    """Raise ConfigError if two models have a name in common. `names`: those of all models, each model's once."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"Two models are served as {name!r}.", remedy="Give one of them another --served-model-name.")


def _load_s(served: ServedModel) -> float:
    """Return the duration of the model's last load in seconds, or a guess: one second, plus the weights at 400 MB/s."""
    if served.load_ns:
        return served.load_ns / 1e9
    return 1.0 + (0 if served.share is None else served.share.num_weight_bytes / 400e6)


def _shutting_down() -> Rejected:
    return Rejected(RejectReason.DRAINING, "The server is shutting down.", retry_after_s=5.0)


def _failed(error: Rejected) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
