"""The parts of a model that outlive its loads."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.config import ServerConfig

if TYPE_CHECKING:
    from penstock.admission.door import Admission, AdmissionLimits
    from penstock.admission.tenants import Tenants
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.blueprint import Blueprint
    from penstock.deploy.running import Sources
    from penstock.obs.explain.journal import Journal
    from penstock.types.plan import Capacity


class Lasting:
    """The parts of a model that are kept when it is unloaded: metrics, adapter names, journal, tenants' use, and seeds.

    The last three are made at first use, because importing them earlier would delay the weights.
    """

    def __init__(self, name: str, adapters: Adapters | None, server: ServerConfig, limits: AdmissionLimits) -> None:
        from penstock.obs.metrics import Metrics

        self._server, self.limits = server, limits
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

        return Tenants(self.limits.tenant_max_concurrent, self.limits.tenant_tokens_per_minute)

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
