"""Metrics and admission as observers of a real engine: the totals must be those of what was served."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import VirtualClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import ObserverGroup
from penstock.engine.thread import Engine
from penstock.obs.metrics import Metrics
from penstock.obs.prometheus import expose
from penstock.obs.signals import Signals
from penstock.sched.policies.base import Policies
from penstock.sched.policies.gates import Static
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, make_core, make_request
from penstock.types.errors import Rejected, RejectReason
from penstock.types.plan import Capacity

CAPACITY = Capacity(num_blocks=33, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)
STEP_NS = 100_000_000
PATIENT = Ask(num_token_ids=1, claim=b"the same", is_retry=True)


class NoText:
    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class SlowExecutor(HashExecutor):
    """Every step takes 0.1 s of virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(CAPACITY)
        self._clock = clock

    def collect(self, ticket):
        self._clock.advance(STEP_NS)
        return super().collect(ticket)


class Server:
    def __init__(self, max_queue: int = 4, policies: Policies | None = None) -> None:
        self.clock = VirtualClock()
        self.metrics, self.admission = Metrics("m"), Admission(AdmissionLimits(max_queue=max_queue), CAPACITY)
        self.signals = Signals(CAPACITY.max_rows, self.admission.drain.rate)
        group = ObserverGroup([self.metrics, self.admission, self.signals])
        self.engine = Engine(
            make_core(CAPACITY, policies, observer=group),
            SlowExecutor(self.clock),
            OutputStage(lambda _shown: NoText(), observer=ObserverGroup([self.metrics, self.admission])),
            clock=self.clock,
            sink=lambda chunks: None,
            observer=group,
            turn_observer=self.metrics,
        )
        self.metrics.connect(
            load=self.engine.load,
            signals=lambda: self.signals.read(self.engine.load(), self.clock.now_ns()),
            waste=self.engine.kv_waste_ratio,
        )

    def submit(self, request_id: str, prompt: int | list[int], max_tokens: int) -> None:
        arrival_ns = self.clock.now_ns()
        self.engine.submit(make_request(request_id, prompt, arrival_ns=arrival_ns, max_tokens=max_tokens))

    def run(self) -> None:
        while self.engine.turn():
            pass

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()

    def read(self) -> dict[str, float]:
        samples = [
            sample for family in text_string_to_metric_families(expose(self.metrics).decode()) for sample in family.samples
        ]
        return {
            sample.name.removeprefix("penstock_")
            + "".join(v for k, v in sorted(sample.labels.items()) if k != "model"): sample.value
            for sample in samples
        }


def test_totals_are_those_of_what_was_served():
    server = Server()
    for idx in range(3):
        server.submit(f"r{idx}", 8, max_tokens=5)
    server.run()
    values = server.read()
    assert values["generation_tokens_total"] == 15
    assert values["request_success_totallength"] == 3
    assert values["prompt_tokens_totalcomputed"] + values["prompt_tokens_totalcached"] == 24
    assert values["prefix_cache_queries_total"] == 24
    assert values["time_to_first_token_seconds_count"] == values["queue_time_seconds_count"] == 3
    assert values["inter_token_latency_seconds_count"] == 12
    assert abs(values["inter_token_latency_seconds_sum"] - 1.2) < 1e-9
    assert abs(values["time_per_output_token_seconds_sum"] - 0.3) < 1e-9
    assert values["step_seconds_counttotal"] == values["step_seconds_countcommit"] == values["batch_size_count"] == 6


def test_cached_prompt_tokens_are_told_apart():
    server = Server()
    for name in ("first", "second"):
        server.submit(name, 9, max_tokens=1)
        server.run()
    values = server.read()
    assert (values["prompt_tokens_totalcomputed"], values["prompt_tokens_totalcached"]) == (10, 8)
    assert values["prefix_cache_hits_total"] == 8


def test_the_states_of_the_blocks_add_up_and_waste_is_told():
    server = Server()
    server.submit("a", 9, max_tokens=20)
    server.submit("b", [5] * 9, max_tokens=20)
    server.run_steps(3)
    values = server.read()
    states = {name.removeprefix("kv_blocks"): value for name, value in values.items() if name.startswith("kv_blocks")}
    assert states == {"free": 26, "cached": 0, "held": 6, "shared": 0, "null": 1}
    assert sum(states.values()) == CAPACITY.num_blocks
    assert values["kv_waste_ratio"] == (2 * (12 - 11)) / 24
    server.submit("c", 9, max_tokens=20)
    server.run_steps(1)
    values = server.read()
    assert (values["kv_blocksheld"], values["kv_blocksshared"]) == (5, 2), "c found two blocks of a's"


def test_gauges_do_not_go_stale_when_the_last_request_is_aborted():
    server = Server()
    server.submit("a", 8, max_tokens=20)
    server.engine.turn()
    assert server.read()["requests_running"] == 1
    assert server.read()["kv_blocksheld"] > 0
    server.engine.abort("a")
    server.engine.turn()
    values = server.read()
    assert values["requests_running"] == values["requests_waitingmemory"] == values["kv_blocksheld"] == 0
    assert values["request_success_totalabort"] == 1


def test_a_refused_request_is_counted_with_its_reason():
    server = Server()
    server.submit("long", CAPACITY.max_model_len + 1, max_tokens=1)
    server.run()
    rejected = {name: value for name, value in server.read().items() if name.startswith("requests_rejected")}
    assert sum(rejected.values()) == 1


def test_an_announced_retry_finds_a_place():
    """Requests of 1 s each on four rows: four per second leave. A client that is refused and waits as told gets in."""
    server = Server(max_queue=4)
    num_submitted = 0

    def fill() -> Rejected:
        nonlocal num_submitted
        while True:
            try:
                entering = server.admission.decide(PATIENT, server.engine.load(), server.clock.now_ns())
            except Rejected as refusal:
                return refusal
            server.submit(f"r{num_submitted}", 1, max_tokens=10)
            server.admission.end_entering(entering)
            num_submitted += 1

    for _ in range(200):  # twenty seconds at the limit
        fill()
        server.engine.turn()
    refusal = fill()
    assert refusal.reason is RejectReason.QUEUE_FULL
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s <= 3.0
    for _ in range(math.ceil(refusal.retry_after_s * 1e9 / STEP_NS)):
        server.engine.turn()
    assert server.admission.decide(PATIENT, server.engine.load(), server.clock.now_ns())
    assert abs(server.read()["drain_rate_requests_per_second"] - 4) < 0.5


def test_the_time_at_a_gate_is_told_apart_from_that_for_a_row():
    """Batches of two: the first request waits at the gate for the second, the third for their end and for a fourth."""
    server = Server(policies=make_policies(gate=Static(max_batch_size=2)))
    server.submit("a", 8, max_tokens=3)
    server.engine.turn()
    server.clock.advance(300_000_000)
    for name in "bc":  # that do not begin like the first, or they would wait for its prefix
        server.submit(name, [ord(name)] * 8, max_tokens=3)
    server.run_steps(4)  # and the attempt after the last
    server.clock.advance(2_000_000_000)
    server.run()
    values = server.read()
    waits = {name.removeprefix("queue_wait_seconds_total"): value for name, value in values.items() if "queue_wait" in name}
    assert values["queue_time_seconds_count"] == 3
    assert abs(sum(waits.values()) - values["queue_time_seconds_sum"]) < 1e-9
    assert {reason: round(wait_s, 9) for reason, wait_s in waits.items() if wait_s} == {"gate": 0.3 + 2.0, "rows": 0.3}


def test_requests_that_find_no_row_wait_for_one():
    server = Server()
    for idx in range(CAPACITY.max_rows + 2):
        server.submit(f"r{idx}", 3, max_tokens=4)
    server.run()
    values = server.read()
    assert abs(values["queue_wait_seconds_totalrows"] - values["queue_time_seconds_sum"]) < 1e-9
    assert abs(values["queue_time_seconds_sum"] - 2 * 0.4) < 1e-9
    assert (values["steps_totalrows"], values["steps_totalstep"]) == (4, 4)
    assert values["request_seconds_totalqueue"] == values["queue_time_seconds_sum"]
