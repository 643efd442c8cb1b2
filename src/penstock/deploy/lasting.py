"""The parts of a model that outlive its loads."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.config import ServerConfig

if TYPE_CHECKING:
    from penstock.admission.door import Admission, AdmissionLimits
    from penstock.admission.tenants import Tenants
    from penstock.clock import Clock
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.blueprint import Blueprint
    from penstock.deploy.recorder import OpenRecorder
    from penstock.deploy.running import Sources
    from penstock.engine.ports import Executor
    from penstock.obs.explain.journal import Journal
    from penstock.obs.recording import Recorder
    from penstock.types.plan import Capacity


class Lasting:
    """The parts of a model that are kept when it is unloaded: metrics, adapter names, recording, journal, tenants' use, seeds.

    The last four are made at first use, because importing them earlier would delay the weights.
    """

    def __init__(
        self,
        name: str,
        adapters: Adapters | None,
        server: ServerConfig,
        limits: AdmissionLimits,
        open_recorder: OpenRecorder | None = None,
    ) -> None:
        from penstock.obs.metrics import Metrics

        self._server, self.limits = server, limits
        self._open_recorder = open_recorder
        self._recorder: Recorder | None = None
        self.metrics = Metrics(name)
        self.metrics.slo_ttft_ns = limits.slo_ttft_ns
        self.adapters = adapters
        if adapters is not None:
            self.metrics.read_adapters = lambda: adapters.stats
            self.metrics.read_adapter_names = adapters.names_of

    @cached_property
    def journal(self) -> Journal | None:
        from penstock.obs.explain.journal import Journal

        num_explained = self._server.explained_requests
        return Journal(num_explained) if num_explained else None

    @cached_property
    def tenants(self) -> Tenants:
        from penstock.admission.tenants import Tenants

        return Tenants(self.limits.tenant)

    def recorder_of(self, blueprint: Blueprint, executor: Executor, clock: Clock) -> Recorder | None:
        """Return the recorder of a load's engines, or None if nothing is recorded. All loads have one recording.

        Raises ConfigError if it can't be begun.
        """
        if self._recorder is not None:
            self._recorder.on_engine()
        elif self._open_recorder is not None:
            name, backend = blueprint.loading.source.name, blueprint.compute.options.backend
            self._recorder = self._open_recorder(name, backend, executor, clock)
        return self._recorder

    def close(self) -> None:
        """End the recording. Call this after the last load is closed. Idempotent."""
        if self._recorder is not None:
            self._recorder.close()

    def make_admission(self, blueprint: Blueprint, capacity: Capacity) -> Admission:
        """Make the door before an engine, or before a cluster's replicas."""
        from penstock.admission.door import Admission

        return Admission(
            self.limits,
            capacity,
            reads_priority=blueprint.policies.reads_priority,
            tenants=self.tenants,
            adapters=self.adapters,
            max_adapters=blueprint.lora.max_loras,
        )

    @cached_property
    def sources(self) -> Sources:
        """Generators of seeds, ids and times for requests. With `seed` in the settings, the same seeds come in each run."""
        from penstock.deploy.running import Sources

        if self._server.seed is None:
            return Sources()
        generator = random.Random(self._server.seed)  # noqa: S311  # repeatable on purpose
        return Sources(draw_seed=lambda: generator.getrandbits(64))
