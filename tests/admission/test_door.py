"""The door's checks: each refuses for its own reason, with its numbers, and none of them on an idle server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from penstock.admission.ask import Ask, DoorView
from penstock.admission.door import DEFAULT_RETRY_AFTER_S, UNAVAILABLE_RETRY_AFTER_S, Admission, AdmissionLimits
from penstock.admission.estimates import FIRST_FACTOR, Margin
from penstock.testing import make_request
from penstock.types.errors import Rejected, RejectReason
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import BeamParams
from penstock.types.stats import AdapterCounts, EngineLoad, RequestStats, StepCounts, StepStats, WaitReason
from penstock.types.tenant_limits import TenantLimits
from support.fake_adapters import FakeAdapters, make_adapter
from support.loads import make_load

SECOND = 1_000_000_000
CAPACITY = Capacity(num_blocks=101, block_size=16, max_rows=8, max_step_tokens=128, max_model_len=1024)

FULL = make_load(num_running=8, num_rows_free=0)
LIMITS = AdmissionLimits(slo_ttft_ns=2 * SECOND, tenant=TenantLimits(max_concurrent=2, tokens_per_minute=6000))


def make_door(**limits: Any) -> Admission:
    return Admission(AdmissionLimits(**limits), CAPACITY)


def step(
    door: Admission,
    at_s: float,
    *,
    num_waiting: int = 0,
    waits_for: WaitReason = WaitReason.NOTHING,
    num_tokens: int = 8,
    num_guessed: int = 0,
) -> None:
    """One of 50 ms."""
    at_ns = int(at_s * SECOND)
    counts = StepCounts(num_rows=8, num_tokens=num_tokens, num_decodes=8 + num_guessed, waits_for=waits_for)
    counts.guesses = {"other": (num_guessed, num_guessed)}
    door.on_step(StepStats(0, at_ns - SECOND // 20, at_ns, 8, num_waiting, 100, 50, 0, counts))


def end(door: Admission, at_s: float, request_id: str = "other", num_generated: int = 20, **fields: Any) -> None:
    at_ns = int(at_s * SECOND)
    stats = {"num_prompt_tokens": 10, "num_cached_tokens": 0, "finish_reason": FinishReason.LENGTH} | fields
    door.on_finish(RequestStats(request_id, "", 0, 0, 0, at_ns, num_generated_tokens=num_generated, num_preemptions=0, **stats))


def busy(door: Admission, *, rate: float = 4.0, seconds: float = 10.0) -> int:
    """Rows full, others waiting, ends at a rate. Returns the instant after it."""
    for idx in range(1, int(seconds * 20) + 1):
        step(door, idx / 20, num_waiting=4, waits_for=WaitReason.ROWS)
        if idx % int(20 / rate) == 0:
            end(door, idx / 20)
    return int(seconds * SECOND)


def refusal(door: Admission, load: EngineLoad, now_ns: int = 0, **ask: Any) -> Rejected | None:
    try:
        door.end_entering(door.decide(Ask(**{"num_token_ids": 10} | ask), load, now_ns))
    except Rejected as rejected:
        return rejected
    return None


def enter(door: Admission, name: str, now_ns: int = 0, num_prompt: int = 10, tenant: str = "", **ask: Any) -> Request:
    """Let one in and submit it."""
    entering = door.decide(Ask(num_token_ids=num_prompt, tenant=tenant, **ask), make_load(), now_ns)
    max_tokens, priority = ask.get("max_new_tokens", 16), ask.get("priority", 0)
    request = make_request(
        name, num_prompt, arrival_ns=now_ns, max_tokens=max_tokens, priority=priority, adapter=ask.get("adapter")
    )
    request.tenant = tenant
    door.add_requests(entering, [request], now_ns)
    door.end_entering(entering)
    return request


@pytest.mark.parametrize("reason", [RejectReason.DRAINING, RejectReason.UNAVAILABLE])
def test_an_engine_that_takes_nothing_is_said_before_anything_else(reason):
    with pytest.raises(Rejected) as refused:
        make_door().decide(Ask(), FULL, 0, refuses_with=reason)
    assert (refused.value.reason, refused.value.retry_after_s) == (reason, UNAVAILABLE_RETRY_AFTER_S)


def test_an_idle_server_takes_every_call():
    door = make_door(max_queue=1, slo_ttft_ns=1000, kv_headroom=0.9, tenant=TenantLimits(max_concurrent=1, tokens_per_minute=1))
    busy(door)
    huge = {"num_token_ids": 1000, "min_new_tokens": 1000, "num_requests": 4}
    assert refusal(door, make_load(), 10 * SECOND, **huge) is None


@pytest.mark.parametrize("field", ["deadline_ns", "first_token_deadline_ns"])
def test_one_slow_step_does_not_shut_an_idle_server_for_good(field):
    """Only what runs is measured, and who is refused runs nothing."""
    door = make_door()
    counts = StepCounts(num_rows=1, num_tokens=128, num_sampled_tokens=1)
    door.on_step(StepStats(0, 0, 30 * SECOND, 1, 0, 100, 50, 0, counts))
    ask = {"num_token_ids": 1000, "min_new_tokens": 100, field: 3610 * SECOND}
    assert refusal(door, make_load(), 3600 * SECOND, **ask) is None
    assert refusal(door, make_load(1, 0, 7), 3600 * SECOND, **ask) is not None


def test_an_idle_server_keeps_no_place_from_who_is_there():
    door = make_door(max_queue=4)
    now_ns = busy(door, rate=4.0)
    told_s = [refusal(door, make_load(8, 4, 0), now_ns, claim=b"%d" % idx).retry_after_s for idx in range(60)]
    later_ns = now_ns + int(told_s[15] * SECOND)
    assert refusal(door, make_load(8, 0, 0), later_ns, claim=b"new") is not None
    assert refusal(door, make_load(num_rows_free=0), later_ns, claim=b"new") is None


def test_nothing_is_refused_for_times_that_were_not_measured():
    door = make_door(slo_ttft_ns=1)
    assert refusal(door, make_load(num_running=8, num_waiting=500, num_rows_free=0)) is None


class TestQueueLength:
    def test_so_many_may_wait_and_no_more(self):
        door = make_door(max_queue=2)
        assert refusal(door, make_load(8, 1, 0)) is None
        refused = refusal(door, make_load(8, 2, 0))
        assert refused is not None
        assert refused.reason is RejectReason.QUEUE_FULL
        assert "2 requests are waiting" in refused.detail
        assert refused.retry_after_s == DEFAULT_RETRY_AFTER_S
        alone = refusal(make_door(max_queue=1), make_load(8, 1, 0))
        assert alone is not None
        assert "1 request is waiting" in alone.detail

    def test_what_the_next_step_can_take_does_not_wait(self):
        assert refusal(make_door(max_queue=2), make_load(num_running=0, num_waiting=9, num_rows_free=8)) is None

    def test_calls_on_their_way_in_count(self):
        door = make_door(max_queue=2)
        entering = door.decide(Ask(num_requests=2), FULL, 0)
        assert refusal(door, FULL) is not None
        door.end_entering(entering)
        assert refusal(door, FULL) is None

    def test_the_announced_time_is_the_excess_over_the_measured_rate(self):
        door = make_door(max_queue=10)
        refused = refusal(door, make_load(8, 25, 0), busy(door, rate=4.0))
        assert refused is not None
        assert refused.retry_after_s == pytest.approx(16 / 4.0, rel=0.1)


class TestQueueDelay:
    def test_who_would_wait_longer_than_the_target_is_sent_away_with_the_numbers(self):
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        assert refusal(door, make_load(8, 1, 0), now_ns) is None
        refused = refusal(door, make_load(8, 20, 0), now_ns)
        assert refused is not None
        assert refused.reason is RejectReason.QUEUE_DELAY
        assert "4.88 s" in refused.detail  # 21 ends at a little more than four per second, and a step
        assert "target is 2 s" in refused.detail
        assert 3.3 <= (refused.retry_after_s or 0) <= 5.3

    def test_a_call_may_bring_its_own_target(self):
        door = make_door()
        now_ns = busy(door, rate=4.0)
        assert refusal(door, make_load(8, 20, 0), now_ns) is None
        assert refusal(door, make_load(8, 20, 0), now_ns, slo_ttft_ns=SECOND) is not None

    def test_a_calls_own_target_does_not_undo_the_servers(self):
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        assert refusal(door, make_load(8, 20, 0), now_ns, slo_ttft_ns=86_400 * SECOND) is not None

    @pytest.mark.parametrize("reads_priority", [True, False])
    def test_who_is_served_before_others_does_not_wait_for_them(self, reads_priority):
        limits = AdmissionLimits(slo_ttft_ns=2 * SECOND, kv_headroom=0)
        door = Admission(limits, CAPACITY, reads_priority=reads_priority)
        now_ns = busy(door, rate=4.0)
        for idx in range(20):
            enter(door, f"r{idx}", now_ns, priority=5)
        waiting = make_load(8, 20, 0)
        assert refusal(door, waiting, now_ns, priority=5) is not None
        assert (refusal(door, waiting, now_ns, priority=4) is None) is reads_priority

    def test_rows_that_are_free_are_no_help_while_memory_is_what_lacks(self):
        door = make_door(slo_ttft_ns=2 * SECOND, kv_headroom=0)
        now_ns = busy(door, rate=4.0)
        load = make_load(num_running=3, num_waiting=20, num_rows_free=30)
        step(door, 10, num_waiting=20, waits_for=WaitReason.MEMORY)
        assert refusal(door, load, now_ns) is not None
        step(door, 10, num_waiting=20, waits_for=WaitReason.TOKENS)
        assert refusal(door, load, now_ns) is None

    def test_a_closed_batch_has_to_end_first(self):
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        load = make_load(num_running=7, num_waiting=1, num_rows_free=1)
        step(door, 10, num_waiting=1, waits_for=WaitReason.GATE)
        assert refusal(door, load, now_ns) is not None

    def test_long_prompts_ahead_count_by_their_tokens(self):
        door = make_door(slo_ttft_ns=SECOND, kv_headroom=0)
        for idx in range(4):
            enter(door, f"r{idx}", num_prompt=800)
            step(door, 0.05 * idx, num_waiting=1, waits_for=WaitReason.TOKENS, num_tokens=128)
        refused = refusal(door, make_load(num_running=4, num_rows_free=4), SECOND // 5)
        assert refused is not None
        assert "1.39 s" in refused.detail  # 3,210 tokens, 120 in 50 ms, and a step
        for idx in range(3):
            end(door, 0.2, f"r{idx}")
        assert refusal(door, make_load(num_running=1, num_rows_free=7), SECOND // 5) is None

    def test_a_prompt_that_takes_longer_than_the_target_by_itself_is_judged_by_its_wait(self):
        door = make_door(slo_ttft_ns=SECOND // 4, kv_headroom=0)
        step(door, 0, waits_for=WaitReason.TOKENS, num_waiting=1, num_tokens=128)
        load = make_load(num_running=1, num_waiting=1, num_rows_free=7)
        assert refusal(door, load, num_token_ids=1000) is None  # 0.42 s
        enter(door, "ahead", num_prompt=300)
        assert refusal(door, load, num_token_ids=1000) is not None

    def test_who_comes_back_as_told_may_use_the_room_that_others_must_leave(self):
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        refused = refusal(door, make_load(8, 20, 0), now_ns, claim=b"a")
        assert refused is not None
        later_ns = now_ns + int((refused.retry_after_s or 0) * SECOND)
        for idx in range(1, 100):
            step(door, 10 + idx / 20, num_waiting=4, waits_for=WaitReason.ROWS)
            if idx % 5 == 0:
                end(door, 10 + idx / 20)
        nearly_full = make_load(8, 5, 0)  # 1.5 s expected, 1.9 s with the first margin: below 2 s, and above its four fifths
        assert refusal(door, nearly_full, later_ns, claim=b"b") is not None
        assert refusal(door, nearly_full, later_ns, claim=b"a") is None


TARGET = {"slo_ttft_ns": 10**18, "kv_headroom": 0.2}
"""Any wait meets it, so that memory alone is a reason to refuse."""


class TestKvHeadroom:
    SMALL_RUN = make_load(num_running=5, num_rows_free=3, num_blocks_free=70)
    LARGE: ClassVar = {"num_token_ids": 1000, "max_new_tokens": 16}

    def test_predicted_lengths_count_and_not_max_tokens(self):
        door = make_door(**TARGET)
        for _ in range(300):
            end(door, 1, num_generated=6)
        for idx in range(60):  # a block each
            enter(door, f"r{idx}", max_new_tokens=1000)
        load = make_load(num_running=60, num_rows_free=40, num_blocks_free=40)
        assert refusal(door, load, max_new_tokens=1000) is None
        for idx in range(60, 90):
            enter(door, f"r{idx}", max_new_tokens=1000)
        load = make_load(num_running=90, num_rows_free=10, num_blocks_free=40)
        refused = refusal(door, load, max_new_tokens=1000)
        assert refused is not None
        assert refused.reason is RejectReason.KV_HEADROOM
        assert "91 of 100 blocks" in refused.detail

    def test_what_waits_for_a_row_needs_no_memory_yet(self):
        door = make_door(**TARGET)
        for idx in range(200):
            enter(door, f"r{idx}", max_new_tokens=6)
        assert refusal(door, make_load(num_running=8, num_waiting=192, num_rows_free=0, num_blocks_free=90)) is None

    def test_what_is_held_counts_where_answers_are_longer_than_predicted(self):
        assert refusal(make_door(**TARGET), make_load(num_running=2, num_rows_free=6, num_blocks_free=5)) is not None

    def test_ended_requests_are_forgotten(self):
        door = make_door(**TARGET)
        load = make_load(num_running=1, num_rows_free=7)
        for idx in range(90):
            enter(door, f"r{idx}", num_prompt=200)
            end(door, 1, f"r{idx}", num_prompt_tokens=200)
        assert refusal(door, load) is None

    def test_a_text_beyond_the_context_counts_as_one_that_fills_it(self):
        """That it is too long is said once its tokens are counted, and is not the load's fault."""
        capacity = Capacity(num_blocks=1001, block_size=16, max_rows=8, max_step_tokens=128, max_model_len=1024)
        door = Admission(AdmissionLimits(**TARGET), capacity)
        load = make_load(num_running=2, num_rows_free=6, num_blocks_total=1000, num_blocks_free=900)
        assert refusal(door, load, num_token_ids=0, num_chars=10**6) is None

    def test_the_announced_time_is_that_of_as_many_ends_as_free_what_lacks(self):
        told_s = []
        for num_prompt in (1000, 800):  # 14 blocks too many, and 1; those that run have 6 each
            door = make_door(**TARGET)
            now_ns = busy(door, rate=0.5)
            refused = refusal(door, self.SMALL_RUN, now_ns, num_token_ids=num_prompt, max_new_tokens=16)
            assert refused is not None
            told_s.append(refused.retry_after_s)
        assert told_s[0] == pytest.approx(3 * told_s[1])

    def test_what_becomes_free_is_kept_for_who_was_told_to_come_back(self):
        door = make_door(**TARGET)
        now_ns = busy(door, rate=1.0)
        told = refusal(door, self.SMALL_RUN, now_ns, claim=b"large", **self.LARGE)
        assert refusal(door, self.SMALL_RUN, now_ns, claim=b"small") is None
        due_ns = now_ns + int(told.retry_after_s * SECOND) + 1
        early = refusal(door, self.SMALL_RUN, due_ns, claim=b"small")
        assert early is not None
        assert early.reason is RejectReason.KV_HEADROOM
        told = refusal(door, self.SMALL_RUN, due_ns, claim=b"large", **self.LARGE)
        assert told is not None
        due_ns += int(told.retry_after_s * SECOND) + 1
        assert refusal(door, self.SMALL_RUN, due_ns - SECOND, claim=b"small") is not None  # from the second time on, at once
        drained = make_load(num_running=3, num_rows_free=5, num_blocks_free=82)
        assert refusal(door, drained, due_ns, claim=b"large", **self.LARGE) is None
        assert refusal(door, self.SMALL_RUN, due_ns, claim=b"small") is None

    def test_what_is_kept_for_who_does_not_come_is_freed(self):
        door = make_door(**TARGET)
        now_ns = busy(door, rate=1.0)
        for _ in range(2):
            told = refusal(door, self.SMALL_RUN, now_ns, claim=b"large", **self.LARGE)
            now_ns += int(told.retry_after_s * SECOND) + 1
        assert refusal(door, self.SMALL_RUN, now_ns + 2 * SECOND, claim=b"small") is not None
        assert refusal(door, self.SMALL_RUN, now_ns + 4 * SECOND, claim=b"small") is None

    def test_who_may_wait_is_not_refused_for_memory(self):
        door, full = make_door(kv_headroom=0.2), make_load(num_running=2, num_rows_free=6, num_blocks_free=0)
        assert refusal(door, full) is None
        assert refusal(door, full, deadline_ns=10**18) is None
        refused = refusal(door, full, slo_ttft_ns=10**18)
        assert refused is not None
        assert refused.reason is RejectReason.KV_HEADROOM

    @pytest.mark.parametrize(("window", "num_requests", "is_refused"), [(0, 1, True), (64, 1, False), (64, 4, True)])
    def test_with_a_window_a_long_text_takes_no_more_than_it_holds_at_one_time(self, window, num_requests, is_refused):
        """13 blocks each, for the window and a step of 128 tokens."""
        door = Admission(AdmissionLimits(**TARGET), replace(CAPACITY, window=window))
        large = {**self.LARGE, "num_token_ids": 1000 * num_requests, "num_requests": num_requests}
        assert (refusal(door, self.SMALL_RUN, **large) is not None) is is_refused

    def test_it_can_be_turned_off(self):
        door, full = make_door(slo_ttft_ns=10**18, kv_headroom=0), make_load(num_running=2, num_rows_free=6, num_blocks_free=0)
        assert refusal(door, full) is None


def test_each_request_has_a_recurrent_state() -> None:
    door = Admission(AdmissionLimits(), replace(CAPACITY, num_state_blocks=30))
    entering = door.decide(Ask(num_token_ids=10, max_new_tokens=6), make_load(), 0)
    assert (entering.view.num_blocks_own, entering.view.num_blocks_demanded) == (31, 31)
    door.end_entering(entering)


class TestAdapters:
    """Adapter k has k pages, and no adapter is loaded unless the test says so."""

    ONE, TWENTY, SIXTY = make_adapter(1), make_adapter(20), make_adapter(60)

    @staticmethod
    def door(*, load_ns: int = 0, max_adapters: int = 8, **limits: Any) -> tuple[Admission, FakeAdapters]:
        adapters = FakeAdapters(num_pages=lambda number: number, load_ns=load_ns)
        door = Admission(AdmissionLimits(**limits), CAPACITY, adapters=adapters, max_adapters=max_adapters)
        return door, adapters

    @staticmethod
    def view(door: Admission, load: EngineLoad, now_ns: int = 0, **ask: Any) -> DoorView:
        entering = door.decide(Ask(num_token_ids=10, **ask), load, now_ns)
        door.end_entering(entering)
        return entering.view

    def test_pages_of_adapters_count_once_for_each(self):
        door, _ = self.door()
        base = self.view(door, make_load(), max_new_tokens=6)
        assert (base.num_blocks_own, base.num_blocks_demanded) == (1, 1)
        own = self.view(door, make_load(), max_new_tokens=6, adapter=self.TWENTY)
        assert (own.num_blocks_own, own.num_blocks_demanded) == (21, 21)
        enter(door, "a", adapter=self.TWENTY, max_new_tokens=6)
        second = self.view(door, make_load(num_running=1), max_new_tokens=6, adapter=self.TWENTY)
        assert (second.num_blocks_own, second.num_blocks_demanded) == (1, 1 + 20 + 1)
        other = self.view(door, make_load(num_running=1), max_new_tokens=6, adapter=self.SIXTY)
        assert (other.num_blocks_own, other.num_blocks_demanded) == (61, 1 + 20 + 61)
        end(door, 1, "a")
        assert self.view(door, make_load(), max_new_tokens=6).num_blocks_demanded == 1

    def test_a_call_is_refused_for_the_pages_of_its_adapter(self):
        door, _ = self.door(**TARGET)
        load = make_load(num_running=2, num_blocks_free=70)
        assert refusal(door, load, adapter=self.TWENTY) is None
        refused = refusal(door, load, adapter=make_adapter(80))
        assert refused is not None
        assert refused.reason is RejectReason.KV_HEADROOM

    def test_no_more_adapters_count_than_may_run(self):
        door, _ = self.door(max_adapters=2)
        for number in (20, 21, 22, 23):
            enter(door, f"r{number}", adapter=make_adapter(number), max_new_tokens=6)
        assert self.view(door, make_load(num_running=2), max_new_tokens=6).num_blocks_demanded == 4 + 20 + 21 + 1

    def test_a_load_is_part_of_the_first_tokens_time(self):
        door, adapters = self.door(load_ns=3 * SECOND)
        now_ns = busy(door, rate=4.0)
        soon = self.view(door, make_load(8, 0, 0), now_ns).ttft_ns
        late = self.view(door, make_load(8, 0, 0), now_ns, adapter=self.ONE)
        assert soon < SECOND
        assert late.ttft_ns == 3 * SECOND + late.own_prefill_ns
        queued = make_load(8, 20, 0)  # it is read while it waits for its turn
        assert self.view(door, queued, now_ns, adapter=self.ONE).ttft_ns == self.view(door, queued, now_ns).ttft_ns > 4 * SECOND
        in_pool = make_load(8, 0, 0)._replace(adapters=AdapterCounts(numbers={1}))
        assert self.view(door, in_pool, now_ns, adapter=self.ONE).ttft_ns == soon
        adapters.want(self.ONE)
        assert self.view(door, make_load(8, 0, 0), now_ns, adapter=self.ONE).ttft_ns == soon

    def test_who_would_wait_too_long_for_an_adapter_is_sent_away_unless_nobody_is_there(self):
        door, adapters = self.door(slo_ttft_ns=2 * SECOND, load_ns=3 * SECOND)
        load = make_load(num_running=1, num_rows_free=7)
        assert refusal(door, load) is None
        assert refusal(door, make_load(), adapter=self.ONE) is None, "an idle server refuses nobody"
        refused = refusal(door, load, adapter=self.ONE)
        assert refused is not None
        assert refused.reason is RejectReason.QUEUE_DELAY
        late = refusal(make_door(), load, adapter=self.ONE, first_token_deadline_ns=2 * SECOND)
        assert late is None, "a door without adapters expects nothing of them"
        late = refusal(self.door(load_ns=3 * SECOND)[0], load, adapter=self.ONE, first_token_deadline_ns=2 * SECOND)
        assert late is not None
        assert late.reason is RejectReason.FIRST_TOKEN_TIMEOUT
        adapters.want(self.ONE)
        assert refusal(door, load, adapter=self.ONE) is None

    def test_free_rows_are_no_help_while_as_many_adapters_run_as_may(self):
        door, _ = self.door(slo_ttft_ns=2 * SECOND, kv_headroom=0, max_adapters=2)
        now_ns = busy(door, rate=4.0)
        load = make_load(num_running=3, num_waiting=20, num_rows_free=30)
        step(door, 10, num_waiting=20, waits_for=WaitReason.ADAPTER)
        assert refusal(door, load._replace(adapters=AdapterCounts(num_running=1)), now_ns) is None
        assert refusal(door, load._replace(adapters=AdapterCounts(num_running=2)), now_ns) is not None

    def test_a_request_may_have_the_tokens_that_fit_beside_its_adapter(self):
        door, _ = self.door()
        assert door.max_len(None) == CAPACITY.max_model_len == 1024  # 64 blocks, of 100
        assert door.max_len(self.TWENTY) == 1024
        assert door.max_len(self.SIXTY) == 40 * 16 + 1
        assert door.max_len(make_adapter(100)) == 1


class TestDeadlines:
    def test_what_has_no_chance_is_refused_at_once_and_for_good(self):
        door = make_door()
        now_ns = busy(door, rate=4.0)
        refused = refusal(door, make_load(8, 20, 0), now_ns, deadline_ns=now_ns + SECOND)
        assert refused is not None
        assert refused.reason is RejectReason.DEADLINE
        assert refused.retry_after_s is None
        assert "1000 ms are left" in refused.detail
        assert refusal(door, make_load(8, 20, 0), now_ns, deadline_ns=now_ns + 10 * SECOND) is None

    def test_an_answer_of_known_length_needs_its_steps(self):
        door = make_door()
        for idx in range(20):
            step(door, idx / 20)
        assert refusal(door, make_load(1, 0, 7), SECOND, deadline_ns=2 * SECOND, min_new_tokens=100) is not None
        assert refusal(door, make_load(1, 0, 7), SECOND, deadline_ns=2 * SECOND, max_new_tokens=100) is None

    def test_guesses_that_hold_save_an_answer_steps(self):
        door = make_door()
        for idx in range(100):
            step(door, idx / 20, num_tokens=72, num_guessed=64)
        assert refusal(door, make_load(1, 0, 7), SECOND, deadline_ns=2 * SECOND, min_new_tokens=100) is None
        assert refusal(door, make_load(1, 0, 7), SECOND, deadline_ns=2 * SECOND, min_new_tokens=200) is not None

    def test_a_deadline_that_has_passed_is_refused_on_an_idle_server_too(self):
        assert refusal(make_door(), make_load(), 5, deadline_ns=5) is not None

    @pytest.mark.parametrize(
        ("field", "reason"),
        [
            ("queue_deadline_ns", RejectReason.QUEUE_TIMEOUT),
            ("first_token_deadline_ns", RejectReason.FIRST_TOKEN_TIMEOUT),
        ],
    )
    def test_the_limits_of_the_wait_and_of_the_first_token_are_checked_too(self, field, reason):
        door = make_door()
        now_ns = busy(door, rate=4.0)
        refused = refusal(door, make_load(8, 20, 0), now_ns, **{field: now_ns + SECOND})
        assert refused is not None
        assert refused.reason is reason


def test_a_tenants_calls_on_their_way_in_count_too():
    """Each as one, whatever the number of its choices or texts."""
    door, load = (
        make_door(tenant=TenantLimits(max_concurrent=2, tokens_per_minute=10_000)),
        make_load(num_running=1, num_rows_free=7),
    )
    entering = door.decide(Ask(num_token_ids=10, num_requests=8), make_load(), 0)
    assert refusal(door, load) is None
    other = door.decide(Ask(num_token_ids=10, num_requests=2), load, 0)
    refused = refusal(door, load)
    assert refused is not None
    assert refused.reason is RejectReason.TENANT_CONCURRENCY
    for one in (entering, other):
        door.end_entering(one)
    assert refusal(door, load) is None


def test_the_prompt_of_several_choices_is_counted_once():
    one, four = make_door(tenant=TenantLimits(tokens_per_minute=3000)), make_door(tenant=TenantLimits(tokens_per_minute=3000))
    for door, num_choices in ((one, 1), (four, 4)):
        entering = door.decide(Ask(num_token_ids=1000, num_requests=num_choices, max_new_tokens=16), make_load(), 0)
        requests = [make_request(f"{nth}", 1000, max_tokens=16, shares_prompt=nth > 0) for nth in range(num_choices)]
        door.add_requests(entering, requests, 0)
        door.end_entering(entering)
    assert one._num_prefill_tokens == four._num_prefill_tokens == 1000
    load = make_load(num_running=8, num_rows_free=0)
    assert four._num_blocks_demanded(load) == one._num_blocks_demanded(load) + 3, "16 tokens of each answer"
    for nth in range(4):
        end(four, 0, f"{nth}", 16, num_prompt_tokens=1000, num_cached_tokens=nth and 992, shares_prompt=nth > 0)
    refused = refusal(four, load, num_token_ids=2000, num_requests=2)
    assert refused is not None
    assert "with 1936 left" in refused.detail
    assert four.lengths.computed_share == 1.0, "what later choices find is no hit of a new prompt"


class TestExpectations:
    def test_the_predicted_length_is_that_of_answers_that_ended(self):
        door = make_door()
        for _ in range(300):
            end(door, 1, num_generated=40)
            end(door, 1, num_generated=1, finish_reason=FinishReason.ABORT)
        assert door.decide(Ask(max_new_tokens=500), make_load(), 0).view.num_new_tokens == 40
        assert door.decide(Ask(max_new_tokens=7), make_load(), 0).view.num_new_tokens == 7
        assert door.decide(Ask(max_new_tokens=500, min_new_tokens=90), make_load(), 0).view.num_new_tokens == 90

    def test_the_tokens_of_a_text_are_learned(self):
        door = make_door()
        for _ in range(200):
            entering = door.decide(Ask(num_chars=100), make_load(), 0)
            door.add_requests(entering, [make_request("a", 50)], 0)
            door.end_entering(entering)
            end(door, 0, "a")
        assert door.decide(Ask(num_chars=1000), make_load(), 0).view.num_prompt_tokens == pytest.approx(500, rel=0.05)

    def test_the_margin_grows_with_those_who_come_later_than_expected(self):
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        entering = door.decide(Ask(num_token_ids=10), make_load(8, 3, 0), now_ns)  # a second, half of the target
        request = make_request("r", 10, arrival_ns=now_ns)
        door.add_requests(entering, [request], now_ns)
        door.end_entering(entering)
        request.first_token_ns = now_ns + 3 * entering.view.ttft_ns
        door.on_tokens([request], ())
        assert door.margin.factor == pytest.approx(3.0)

    def test_later_requests_of_a_call_leave_the_margin_as_it_is(self):
        """The expected time is that of the first. Others of a long list may wait for as many ends."""
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        entering = door.decide(Ask(num_token_ids=20, num_requests=3), make_load(8, 3, 0), now_ns)
        requests = [make_request(name, 10, arrival_ns=now_ns) for name in "abc"]
        door.add_requests(entering, requests[:2], now_ns)
        door.add_some_requests(entering, requests[2:], now_ns, is_first=False)
        door.end_entering(entering)
        for idx, request in enumerate(requests):
            request.first_token_ns = now_ns + (1 + 2 * idx) * entering.view.ttft_ns
        door.on_tokens(requests, ())
        assert door.margin.factor == FIRST_FACTOR

    def test_a_beam_search_leaves_the_margin_as_it_is(self):
        """Its first token comes at its end, and the expected time is that of its prompt."""
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        entering = door.decide(Ask(num_token_ids=10, num_requests=2), make_load(8, 3, 0), now_ns)
        beams = [make_request(name, 10, arrival_ns=now_ns, beams=BeamParams(width=2), logprobs=2) for name in "ab"]
        door.add_requests(entering, beams, now_ns)
        door.end_entering(entering)
        for request in beams:
            request.first_token_ns = now_ns + 9 * entering.view.ttft_ns
        door.on_tokens(beams, ())
        assert door.margin.factor == FIRST_FACTOR

    def test_an_accident_does_not_close_the_door(self):
        """With a factor of 100, 16 ms of the target would be left, and nobody who waits would come in to correct it."""
        door = make_door(slo_ttft_ns=2 * SECOND)
        now_ns = busy(door, rate=4.0)
        waits = make_load(8, 0, 0)
        assert refusal(door, waits, now_ns) is None
        door.margin.observe(SECOND, 100 * SECOND)
        assert refusal(door, waits, now_ns) is None

    def test_the_margin_is_the_worst_of_the_last_99_errors(self):
        margin = Margin()
        for late in [3.0, *[1.2] * 98]:
            margin.observe(SECOND, int(late * SECOND))
        assert margin.factor == 3.0
        margin.observe(SECOND, int(1.2 * SECOND))
        assert margin.factor == 1.2
        for _ in range(99):
            margin.observe(SECOND, SECOND // 2)
        assert margin.factor == 1.0, "times that were expected too long do not widen the target"


def test_a_call_of_the_servers_own_leaves_its_tenants_limits_as_they_are() -> None:
    """Though the door has limits for tenants without their own."""
    door, limits = make_door(tenant=TenantLimits(max_concurrent=8, tokens_per_minute=100)), TenantLimits(requests_per_minute=1)
    for is_limited in (True, False, False):
        entering = door.decide(Ask(num_token_ids=90, tenant="a", limits=limits, is_limited=is_limited), make_load(), 0)
        assert (entering.held is not None) is is_limited
        door.end_entering(entering)
    refused = refusal(door, make_load(), tenant="a", limits=limits)
    assert refused is not None
    assert refused.reason is RejectReason.TENANT_REQUESTS


def test_refusals_for_a_tenants_own_limits_are_no_demand_for_replicas() -> None:
    door = make_door(max_queue=4, tenant=TenantLimits(max_concurrent=1))
    calls: list[tuple[int, int]] = []
    door.on_call = lambda now_ns, num_requests: calls.append((now_ns, num_requests))
    enter(door, "a", 1, tenant="greedy")
    for now_ns in (2, 3):
        refused = refusal(door, make_load(), now_ns, tenant="greedy")
        assert refused is not None
        assert refused.reason is RejectReason.TENANT_CONCURRENCY
    assert refusal(door, make_load(num_waiting=50), 4, tenant="other", num_requests=3) is not None
    assert calls == [(1, 1), (4, 3)]


def test_a_job_in_the_background_is_let_in_and_makes_nobody_wait() -> None:
    doors = [make_door(slo_ttft_ns=2 * SECOND, max_queue=4, tenant=TenantLimits(max_concurrent=2)) for _ in range(2)]
    load = make_load(num_running=2, num_rows_free=6)
    for door in doors:
        busy(door)
    alone, beside = doors
    for idx in range(1000):
        ask = Ask(num_token_ids=500, background=True, tenant="a")
        entering = beside.decide(ask, load._replace(num_background=idx, num_blocks_background=60), 10 * SECOND)
        request = make_request(f"line-{idx}", 500, background=True)
        beside.add_requests(entering, [request], 10 * SECOND)
        beside.end_entering(entering)
    end(beside, 10, "line-0", num_generated=1000, background=True)
    crowded = load._replace(num_background=999, num_blocks_background=60, num_blocks_free=load.num_blocks_free - 60)
    one, other = (
        door.decide(Ask(num_token_ids=10, tenant="a"), its_load, 10 * SECOND).view
        for door, its_load in ((alone, load), (beside, crowded))
    )
    assert replace(one, ask=other.ask) == other, "what is expected of a call differs"
