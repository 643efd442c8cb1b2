"""Limits of each tenant: requests at the same time, tokens per minute, and how many tenants are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.admission.estimates import MAX_PER_CLAIM, SPREAD
from penstock.admission.tenants import MAX_TENANTS, Demand, Tenants
from penstock.types.errors import RejectReason
from penstock.types.tenant_limits import UNLIMITED, TenantLimits

SECOND = 1_000_000_000


def demand(tenant: str = "a", now_s: float = 0.0, num_tokens: int = 100) -> Demand:
    return Demand(tenant, None, num_tokens, int(now_s * SECOND))


def enter(
    tenants: Tenants,
    tenant: str,
    request_id: str,
    num_tokens: int,
    now_ns: int,
    limits: TenantLimits | None = None,
    claim: bytes | None = None,
) -> None:
    """Let a call of one request in."""
    held = tenants.hold(Demand(tenant, limits, num_tokens, now_ns, claim))
    tenants.enter(held, request_id, num_tokens, now_ns)
    tenants.release(held)


def test_one_tenant_may_run_so_many_and_others_are_not_concerned():
    tenants = Tenants(TenantLimits(max_concurrent=2))
    for name in ("r0", "r1"):
        assert tenants.refusal(demand()) is None
        enter(tenants, "a", name, 100, 0)
    refused = tenants.refusal(demand())
    assert refused is not None
    assert refused.reason is RejectReason.TENANT_CONCURRENCY
    assert "2 requests" in refused.detail
    assert tenants.refusal(demand("b")) is None
    tenants.on_finish("r0", 100, SECOND)
    assert tenants.refusal(demand()) is None


def test_a_call_of_many_requests_is_one_until_its_last_has_ended():
    """Also when later ones are submitted after all earlier ones have ended, as for a long list of texts."""
    tenants = Tenants(TenantLimits(max_concurrent=2))
    held = tenants.hold(demand())
    for name in ("r0", "r1", "r2"):
        tenants.enter(held, name, 100, 0)
    tenants.release(held)
    assert tenants.refusal(demand()) is None
    enter(tenants, "a", "other", 100, 0)
    for name in ("r0", "r1"):
        tenants.on_finish(name, 100, SECOND)
        assert "has 2 requests already" in tenants.refusal(demand()).detail
    tenants.forget("r2")
    assert tenants.refusal(demand()) is None
    tenants.enter(held, "r3", 100, 0)
    assert tenants.refusal(demand()) is not None
    for name in ("r3", "other"):
        tenants.on_finish(name, 100, SECOND)
    assert held.account.num_open_calls == 0


def test_a_bucket_holds_a_minute_and_refills_steadily():
    tenants = Tenants(TenantLimits(tokens_per_minute=600))
    enter(tenants, "a", "r0", 500, 0)
    assert tenants.refusal(demand(num_tokens=100)) is None
    refused = tenants.refusal(demand(num_tokens=150))
    assert refused is not None
    assert refused.reason is RejectReason.TENANT_TOKENS
    assert refused.wait_ns == pytest.approx(5 * SECOND)  # 50 tokens at ten per second
    assert refused.detail.endswith("needs about 150, with 100 left")
    assert tenants.refusal(demand(now_s=5.1, num_tokens=150)) is None


def test_asking_again_does_not_put_the_tokens_off():
    tenants = Tenants(TenantLimits(tokens_per_minute=600))
    enter(tenants, "a", "r0", 600, 0)
    waits = [tenants.refusal(demand(num_tokens=100)).wait_ns / SECOND for _ in range(30)]
    assert waits == pytest.approx([10] * 30)


def returning(claim: bytes, now_s: float = 60.0, num_tokens: int = 100, limits: TenantLimits | None = None) -> Demand:
    return Demand("a", limits, num_tokens, int(now_s * SECOND), claim)


def test_calls_refused_for_those_that_run_are_told_times_apart():
    tenants = Tenants(TenantLimits(max_concurrent=2))
    enter(tenants, "a", "before", 10, 0)
    tenants.on_finish("before", 10, 4 * SECOND)
    for name in ("r0", "r1"):
        enter(tenants, "a", name, 10, 0)
    waits = [tenants.refusal(returning(b"%d" % idx)).wait_ns / SECOND for idx in range(20)]
    assert waits == pytest.approx([2 * (1 + SPREAD * idx) for idx in range(20)])  # an end each two seconds


@pytest.mark.parametrize("limits", [TenantLimits(requests_per_minute=60), TenantLimits(tokens_per_minute=6000)])
def test_each_refused_call_is_admitted_at_its_time_and_no_newcomer_before(limits: TenantLimits):
    tenants, due_s = Tenants(UNLIMITED), {}
    for idx in range(80):
        call = returning(b"%d" % idx, limits=limits)
        refused = tenants.refusal(call)
        if refused is None:
            enter(tenants, "a", f"r{idx}", 100, call.now_ns, limits)
        else:
            due_s[call.claim] = 60 + refused.wait_ns / SECOND + 1e-6
    assert [*due_s.values()] == pytest.approx(range(61, 81)), "times are as far apart as tokens or calls come"
    for claim, now_s in due_s.items():
        assert tenants.refusal(Demand("a", limits, 100, int(now_s * SECOND))) is not None
        assert tenants.refusal(returning(claim, now_s, limits=limits)) is None
        enter(tenants, "a", str(claim), 100, int(now_s * SECOND), limits, claim)
    assert tenants.refusal(Demand("a", limits, 100, int(81.1 * SECOND))) is None


def test_a_retry_before_its_time_keeps_it_and_asking_again_takes_few_places():
    tenants, limits = Tenants(UNLIMITED), TenantLimits(requests_per_minute=60)
    for _ in range(60):
        tenants.hold(Demand("a", limits, 1, 60 * SECOND))
    assert tenants.refusal(returning(b"a", limits=limits)).wait_ns == SECOND
    early = replace(returning(b"a", 60.5, limits=limits), is_retry=True)
    assert tenants.refusal(early).wait_ns == SECOND // 2
    waits = [tenants.refusal(returning(b"impatient", 60.5, limits=limits)).wait_ns for _ in range(100)]
    assert max(waits) < (2 + SPREAD * MAX_PER_CLAIM) * SECOND


def test_calls_that_never_return_do_not_shut_others_out():
    tenants, limits = Tenants(UNLIMITED), TenantLimits(requests_per_minute=6)
    admitted = 0
    for now_s in range(600):
        call = returning(b"%d" % now_s, now_s, limits=limits)
        if tenants.refusal(call) is None:
            tenants.release(tenants.hold(call))
            admitted += 1
    assert 50 <= admitted <= 66


def test_what_was_really_used_is_settled_at_the_end():
    tenants = Tenants(TenantLimits(tokens_per_minute=600))
    enter(tenants, "a", "long", 100, 0)
    tenants.on_finish("long", 700, SECOND)
    refused = tenants.refusal(demand(num_tokens=100))
    assert refused is not None
    assert refused.wait_ns == pytest.approx(20 * SECOND)  # 100 in debt, and 100
    tenants = Tenants(TenantLimits(tokens_per_minute=600))
    enter(tenants, "a", "short", 600, 0)
    tenants.on_finish("short", 10, SECOND)
    assert tenants.refusal(demand(num_tokens=500)) is None


def test_a_request_larger_than_the_bucket_comes_in_when_it_is_full():
    tenants = Tenants(TenantLimits(tokens_per_minute=600))
    assert tenants.refusal(demand(num_tokens=5000)) is None
    enter(tenants, "a", "r", 5000, 0)
    assert tenants.refusal(demand(now_s=60, num_tokens=1)) is not None


def test_tenants_are_bounded_and_the_busy_are_not_forgotten():
    tenants = Tenants(TenantLimits(max_concurrent=1))
    enter(tenants, "busy", "r", 1, 0)
    for idx in range(3 * MAX_TENANTS):
        assert tenants.refusal(demand(f"t{idx}")) is None
    assert len(tenants._accounts) <= MAX_TENANTS
    assert tenants.refusal(demand("busy")) is not None


def test_newcomers_share_an_account_when_all_are_busy():
    tenants = Tenants(TenantLimits(max_concurrent=1))
    for idx in range(MAX_TENANTS):
        enter(tenants, f"t{idx}", f"r{idx}", 1, 0)
    enter(tenants, "new", "shared", 1, 0)
    assert tenants.refusal(demand("newer")) is not None
    tenants.on_finish("shared", 1, SECOND)
    assert tenants.refusal(demand("newer")) is None
    assert len(tenants._accounts) <= MAX_TENANTS + 1


def test_a_few_busy_tenants_do_not_keep_idle_ones_from_being_forgotten():
    tenants = Tenants(TenantLimits(max_concurrent=1))
    for idx in range(16):
        enter(tenants, f"busy{idx}", f"r{idx}", 1, 0)
    for idx in range(MAX_TENANTS - 16):
        assert tenants.refusal(demand(f"idle{idx}")) is None
    enter(tenants, "new", "shared", 1, 0)
    assert tenants.refusal(demand("newer")) is None
    assert tenants.refusal(demand("busy0")) is not None


def test_calls_with_other_limits_do_not_refill_a_bucket():
    """Tenants that share an account, or a trusted X-Tenant that is a key's name."""
    tenants, limits = Tenants(TenantLimits(tokens_per_minute=600)), TenantLimits(requests_per_minute=1)
    other = Demand("a", limits, 100, 0)
    assert tenants.refusal(other) is None
    tenants.hold(other)
    enter(tenants, "a", "r", 600, 0)
    for _ in range(2):
        assert tenants.refusal(demand()).reason is RejectReason.TENANT_TOKENS
        assert tenants.refusal(other).reason is RejectReason.TENANT_REQUESTS


def test_an_edit_of_a_keys_limits_gives_no_second_allowance():
    tenants = Tenants(UNLIMITED)
    wide, narrow = (TenantLimits(max_concurrent=most, tokens_per_minute=600, requests_per_minute=60) for most in (8, 2))
    for idx in range(8):
        enter(tenants, "a", f"r{idx}", 75, 0, wide)
    assert tenants.refusal(Demand("a", narrow, 1, 0)).reason is RejectReason.TENANT_CONCURRENCY
    for limits in (wide, narrow) * 4:
        held = tenants.hold(Demand("a", limits, 0, 0))
        tenants.release(held)
    assert (held.account.num_open_calls, held.account.level_tokens, held.account.level_requests) == (8, 0, 60 - 8 - 8)
    for idx in range(8):
        tenants.on_finish(f"r{idx}", 0, SECOND)
    less = TenantLimits(tokens_per_minute=100, max_concurrent=2)
    held = tenants.hold(Demand("a", less, 0, 0))
    assert held.account.level_tokens == 100, "what is left is cut to the new limit"
    held = tenants.hold(Demand("a", wide, 0, 0))
    assert (held.account.level_tokens, held.account.level_requests) == (100, 59), "a new bucket is full"


def test_a_key_with_limits_shares_no_account():
    tenants, limits = Tenants(TenantLimits(max_concurrent=1)), TenantLimits(max_concurrent=2)
    for idx in range(MAX_TENANTS + 1):
        enter(tenants, f"t{idx}", f"r{idx}", 1, 0)
    enter(tenants, "key", "r", 1, 0, limits)
    assert tenants.refusal(demand("key")) is not None
    assert tenants.refusal(Demand("key", limits, 1, 0)) is None
    assert tenants.refusal(Demand("other key", limits, 1, 0)) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30), st.integers(1, 400), st.integers(0, 400)), max_size=40))
def test_over_any_time_no_tenant_uses_more_than_its_rate_and_one_bucket(calls):
    """The wait that is announced is enough, and what is let in beyond prediction is paid back."""
    tenants, now_s = Tenants(TenantLimits(tokens_per_minute=600)), 0.0
    used = {"a": 0, "b": 0}
    for idx, (tenant, gap_s, num_predicted, num_extra) in enumerate(calls):
        now_s += gap_s
        refused = tenants.refusal(demand(tenant, now_s, num_predicted))
        if refused is not None:
            now_s += refused.wait_ns / SECOND + 1e-6
            assert tenants.refusal(demand(tenant, now_s, num_predicted)) is None
        # Before this one, no more than a bucket and the refill was used.
        assert used[tenant] + min(num_predicted, 600) <= 600 + 10 * now_s + 1e-3
        enter(tenants, tenant, str(idx), num_predicted, int(now_s * SECOND))
        tenants.on_finish(str(idx), num_predicted + num_extra, SECOND)
        used[tenant] += num_predicted + num_extra
