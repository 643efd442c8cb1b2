"""Imports are inside functions, so that importing this file is fast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.deploy import device
from penstock.deploy.blueprint import Blueprint
from penstock.deploy.draft import open_draft
from penstock.deploy.executor import SeatOf, build_executor
from penstock.deploy.lasting import Lasting
from penstock.deploy.resources import MemoryShare, Resources
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.deploy.tiers import build_tier, cleared
from penstock.machine import give_back_free_memory
from penstock.types.errors import ModelAway

if TYPE_CHECKING:
    from penstock.engine.blocks import Blocks
    from penstock.engine.draft_model import DraftModel
    from penstock.engine.ports import BlockMover, BlockStore, Executor, RequestJournal
    from penstock.engine.thread import Engine
    from penstock.engine.transfers import Transfers
    from penstock.kv.manager import KVManager
    from penstock.sched.scheduler import Scheduler
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.stats import RequestStats, StepStats


class EngineTap(Protocol):
    """An observer of every engine that a model gets, one after another."""

    def watch(self, scheduler: Scheduler, blocks: Blocks) -> None:
        """Observe an engine that has not begun yet."""
        ...

    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, stats: RequestStats) -> None: ...


class EngineMaker:
    """Everything of a running model but its weights: bridge, admission, signals, observers.

    Makes the first engine, and another after each failure. Each engine gets its own executor and an emptied disk or host tier.
    All share the observers, so that counters go on.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        resources: Resources,
        lasting: Lasting,
        *,
        executor: Executor,
        store: BlockStore | None,
        tokenizer: Tokenizer,
        tap: EngineTap | None = None,
    ) -> None:
        """`executor` and `store` (the tier below the KV pool) are for the first engine. `blueprint` has its memory plan."""
        from penstock.clock import WallClock
        from penstock.engine.bridge import Bridge
        from penstock.engine.ports import ObserverGroup
        from penstock.obs.signals import Signals

        self.blueprint, self._resources = blueprint, resources
        self._first_executor: Executor | None = executor
        self._stores = [store]
        """The store of each engine so far. The last one is in use."""
        self._engine: Engine | None = None
        self._draft: DraftModel | None = None
        self._making = threading.Lock()
        """Held while an engine is being made."""
        self._is_released = False
        self.tokenizer = tokenizer
        self.clock, self.bridge = WallClock(), Bridge()
        self.metrics, self.journal, self.sources = lasting.metrics, lasting.journal, lasting.sources
        self.adapters = lasting.adapters
        self.metrics.settings_hash = blueprint.settings_hash
        self.metrics.max_adapters = blueprint.lora.max_loras
        self.metrics.tier.medium = "host" if blueprint.cache.kv_host_size_bytes else "disk"
        self.admission = lasting.make_admission(blueprint, executor.capacity)
        self.signals = Signals(blueprint.policies.max_running(executor.capacity), self.admission.drain.rate)
        self.admission.on_call = self.signals.on_call
        if self.journal is not None:
            self.journal.speaks_for_calls = executor.capacity.is_one_pass
        self._recorder = lasting.recorder_of(blueprint, executor, self.clock)
        self._taps: list[EngineTap] = [] if tap is None else [tap]
        with ExitStack() as opened:
            if blueprint.open_kv_events is not None:
                kv_events = blueprint.open_kv_events()
                opened.callback(kv_events.close)
                self._taps.append(kv_events)
            self._opened = opened.pop_all()
        self._observer = ObserverGroup([self.metrics, self.admission, self.signals, *self._taps])
        self._token_observer = ObserverGroup([self.metrics, self.admission])

    def make(self, on_failed: Callable[[], None]) -> Engine:
        """Return a new engine, not started yet. The caller closes it.

        Raises the errors of loading a model, and ModelAway if `release` was called during the load.
        """
        with self._making:
            try:
                return self._first_or_next(on_failed)
            finally:
                if self._is_released:  # `release` did not see the new draft, store and engine
                    self._engine = None
                    self._resources.loads.pop(self.blueprint.name, None)
                    self._close_parts()

    def _first_or_next(self, on_failed: Callable[[], None]) -> Engine:
        executor, self._first_executor = self._first_executor, None
        self._close_draft()
        if executor is None:
            self._stores.append(cleared(self._stores[-1]))
            if self._engine is not None and self._engine.executor_call():  # the failed engine's step still runs
                engine, self._engine = self._engine, None  # give up each engine only once
                self._give_up(lambda: engine.is_alive)
            for one in (self.blueprint, self.blueprint.draft):
                if one is not None:
                    one.loading.check_unchanged()
            executor = self._executor_from_files()
            if self._recorder is not None:
                self._recorder.on_engine()
        try:
            self._engine = self._wire(executor, on_failed)
        except BaseException:  # the next attempt needs its memory
            executor.close()
            raise
        return self._engine

    def _close_draft(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None and not draft.close():
            share = MemoryShare(num_draft_bytes=self.blueprint.share.num_draft_bytes, num_reserve_bytes=0)
            self._give_up(lambda: draft.is_alive, share)

    def _give_up(self, is_alive: Callable[[], bool], share: MemoryShare | None = None) -> None:
        """Move models to new threads, away from a stuck step, and keep that step's memory reserved until it returns."""
        self._resources.leave_team(self.blueprint.name)
        self._resources.memory.hold_stuck(self.blueprint.name, is_alive, share)

    def release(self) -> None:
        """Close the model's files and connections, and free its memory. Call this after the engine has ended.

        A stuck step keeps its memory until it returns, and so does a load of a new engine. Cyclic references are cut, because
        the garbage collector ignores objects from before the server began.
        """
        self._is_released = True
        self._opened.close()
        self.bridge.detach()
        engine, self._engine = self._engine, None
        if self.adapters is not None:
            self.adapters.close()
        self._close_parts()
        self._resources.loads.pop(self.blueprint.name, None)
        if engine is not None and engine.is_alive:
            self._give_up(lambda: engine.is_alive)
        if self._making.locked():
            self._resources.memory.hold_stuck(self.blueprint.name, self._making.locked)
        self._resources.memory.give_back(self.blueprint.name)

    def _close_parts(self) -> None:
        """Close the draft model and the stores."""
        self._close_draft()
        for store in self._stores:
            if store is not None:
                store.close()

    def _executor_from_files(self) -> Executor:
        blueprint, plan = self.blueprint, self.blueprint.measured_plan
        free_bytes = self._resources.memory.available_bytes(blueprint.name, is_restart=True) - RESERVE_BYTES
        room_bytes = device.weight_room_bytes(blueprint.compute, free_bytes - plan.num_bytes - plan.num_step_bytes)
        model = blueprint.loading.load(max_weight_bytes=room_bytes)
        executor = build_executor(blueprint, model, seat_of(blueprint, self._resources))
        give_back_free_memory()
        return executor

    def _wire(self, executor: Executor, on_failed: Callable[[], None]) -> Engine:
        from penstock.engine.core import EngineCore
        from penstock.engine.output import OutputStage
        from penstock.engine.ports import ObserverGroup
        from penstock.engine.thread import Engine
        from penstock.sched.scheduler import Scheduler
        from penstock.text.tokenizer import detokenizer_factory

        journals: list[RequestJournal] = [one for one in (self.journal, self._recorder) if one is not None]
        blueprint, small = self.blueprint, self.blueprint.draft
        if small is not None:
            self._draft = open_draft(small, seat_of(blueprint, self._resources), self.tokenizer.vocab_size, self.clock)
        if self._is_released:  # an engine would take over the adapters and metrics, which the next load may use already
            raise ModelAway(blueprint.name)
        scheduler = Scheduler(
            executor.capacity,
            blueprint.policies.make(),
            enable_prefix_caching=blueprint.has_prefix_caching,
            tier=build_tier(self._stores[-1]),
            most_step_ns=partial(self._resources.most_step_ns, blueprint.name),
            others_serve=partial(self._resources.others_serve, blueprint.name),
            adapters=self.adapters,
            max_adapters=blueprint.lora.max_loras,
            drafter=self._draft,
        )
        journal = ObserverGroup(journals) if len(journals) > 1 else next(iter(journals), None)
        engine = Engine(
            EngineCore(scheduler, observer=self._observer, journal=journal),
            executor,
            OutputStage(detokenizer_factory(self.tokenizer), observer=self._token_observer),
            clock=self.clock,
            sink=self.bridge.deliver,
            observer=self._observer,
            # A group of one would be one more call for each report.
            turn_observer=self.metrics if self._recorder is None else ObserverGroup([self.metrics, self._recorder]),
            on_failed=on_failed,
            make_transfers=partial(self._make_transfers, scheduler.kv),
        )
        for tap in self._taps:
            tap.watch(scheduler, engine.blocks)
        self._resources.loads[blueprint.name] = engine.load
        return engine

    def _make_transfers(self, kv: KVManager, blocks: BlockMover, wake: Callable[[], None]) -> Transfers | None:
        from penstock.engine.transfers import Transfers

        tier, store = self.metrics.tier, self._stores[-1]
        if store is None:
            tier.is_open = False
            return None
        return Transfers(kv, blocks, store, clock=self.clock, stats=tier, wake=wake)


def seat_of(blueprint: Blueprint, resources: Resources) -> SeatOf:
    """Return the function that a native executor calls to get its share of the machine's threads."""
    return partial(resources.team, blueprint.name, share=blueprint.machine_share)
