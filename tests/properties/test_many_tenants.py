"""Thousands of tenants, each of whom is heard of once: what is remembered of them is bounded by pool, rows and settings."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator, Sized
from types import FunctionType, ModuleType

import pytest

from penstock.admission import tenants
from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import VirtualClock
from penstock.engine.ports import ObserverGroup
from penstock.kv import prefix_cache
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.sched.policies.fair import FairShares
from penstock.sched.policies.predictors import OnlinePredictor
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, make_core, make_request, run_to_completion
from penstock.types.events import Add
from penstock.types.plan import Capacity
from penstock.types.stats import EngineLoad
from penstock.types.tenant_limits import TenantLimits

NUM_TENANTS = 10_000
AT_ONCE = 50
CAPACITY = Capacity(num_blocks=120, block_size=4, max_rows=24, max_step_tokens=96, max_model_len=64)
MAX_ACCOUNTS = 4096
"""Default limit of `FairShares` for the accounts of tenants without waiting requests."""
MAX_PREDICTED = 256
"""That `OnlinePredictor` knows."""


def containers(*roots: object) -> Iterator[Sized]:
    """All maps, sets and sequences that can be reached from these, but not through classes, modules or functions."""
    seen, todo = set(map(id, roots)), list(roots)
    while todo:
        found = todo.pop()
        if isinstance(found, dict | list | set | deque):
            yield found
        for other in gc.get_referents(found):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                todo.append(other)


@pytest.mark.parametrize("part", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_tenants_leave_no_more_behind_than_what_is_bounded(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the tenants shows it where the limits are a quarter, too."""
    num_tenants, max_accounts = NUM_TENANTS // part, MAX_ACCOUNTS // part
    max_tenants, max_remembered = tenants.MAX_TENANTS // part, prefix_cache.MAX_REMEMBERED // part
    monkeypatch.setattr(tenants, "MAX_TENANTS", max_tenants)
    monkeypatch.setattr(prefix_cache, "MAX_REMEMBERED", max_remembered)
    rng, clock = random.Random(5), VirtualClock()
    settings = {"order": {"max_tenants": max_accounts}}
    policies = make_policies(order="fair", predictor="online", eviction="tenant-fair", settings=settings)
    admission = Admission(AdmissionLimits(tenant=TenantLimits(max_concurrent=5, tokens_per_minute=60_000)), CAPACITY)
    metrics, journal = Metrics("m"), Journal(1000 // part)
    core = make_core(CAPACITY, observer=ObserverGroup([metrics, admission]), policies=policies, journal=journal)
    executor = HashExecutor(CAPACITY)
    for start in range(0, num_tenants, AT_ONCE):
        requests = []
        for number in range(start, start + AT_ONCE):
            tenant, prompt = f"tenant-{number}", [rng.randrange(200) for _ in range(rng.randint(4, 20))]
            request = make_request(f"r{number}", prompt, tenant=tenant, max_tokens=2, arrival_ns=clock.now_ns())
            request.cache_salt = tenant.encode()
            ask = Ask(num_token_ids=len(prompt), max_new_tokens=2, min_new_tokens=0, tenant=tenant)
            entering = admission.decide(ask, EngineLoad(), clock.now_ns())
            admission.add_requests(entering, [request], clock.now_ns())
            admission.end_entering(entering)
            requests.append(request)
        run_to_completion(core, executor, *map(Add, requests), clock=clock)
        clock.advance(1_000_000_000)
    core.check()

    kv = core.scheduler.kv
    order, predictor = policies.order, policies.predictor
    assert isinstance(order, FairShares)
    assert isinstance(predictor, OnlinePredictor)
    assert MAX_PREDICTED < max_accounts / 2 < len(order._accounts) <= max_accounts + 1
    assert (order._waiting, order._serving, order._decoding, order._joined) == ({}, {}, {}, set())
    assert len(predictor._tenants) == MAX_PREDICTED
    assert 0 < len(admission._tenants._accounts) <= max_tenants
    assert not admission._tenants.entered
    assert 0 < len(kv.prefix._roots) <= max_remembered
    assert 0 < len(kv.prefix._evicted_ns) <= 8 * max_remembered
    assert not kv.tables
    assert not kv.prefix.leaders
    largest = max(containers(core, admission, metrics, journal), key=len)
    assert 1000 < len(largest) < num_tenants, "whatever kept one entry of each tenant, or of each request, would have as many"
