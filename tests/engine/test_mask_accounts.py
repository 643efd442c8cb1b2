"""Requests whose masks take long sit out, until a tenth of the steps has paid for them. That rows whose masks cost alike do not
is shown in `test_grammars.py`, with steps that are shorter without them."""

from __future__ import annotations

import pytest

from penstock.engine.mask_accounts import LENT_STEPS, MadeMask, MaskAccounts, equal_parts

MS = 1_000_000
STEP_NS = 10 * MS
ROWS = 32
OWN_NS = STEP_NS // (4 * ROWS)
LENT_NS = LENT_STEPS * OWN_NS
PLAIN = [f"plain{idx}" for idx in range(ROWS)]
"""Rows without a grammar."""


def made(request_id: str, tenant: str, mask_ns: int) -> MadeMask:
    """By a thread that did nothing else."""
    return MadeMask(request_id, tenant, mask_ns, mask_ns)


class Batch:
    """Steps of `ROWS` rows. Those with a grammar have masks of a fixed time each, and a step is shorter without those that sit
    out: half of it is the rows'."""

    def __init__(self, masks_ns: dict[str, int], tenants: dict[str, str] | None = None) -> None:
        self.accounts = MaskAccounts()
        self.masks_ns = masks_ns
        self.tenants = tenants or dict.fromkeys(masks_ns, "")
        self.num_tokens = dict.fromkeys(masks_ns, 0)
        self.steps_ns = 0
        self.spent_ns = 0

    def run(self, num_steps: int) -> None:
        running = [*self.masks_ns, *PLAIN[: ROWS - len(self.masks_ns)]]
        for _ in range(num_steps):
            step_ns = STEP_NS - STEP_NS // 2 * len(self.accounts.sitting_out) // ROWS
            names = [name for name in self.masks_ns if name not in self.accounts.sitting_out]
            masks = [made(name, self.tenants[name], self.masks_ns[name]) for name in names]
            for mask in masks:
                self.num_tokens[mask.request_id] += 1
                self.spent_ns += mask.busy_ns
            self.steps_ns += step_ns
            self.accounts.settle(masks, self.masks_ns, running, step_ns, is_beside=False)


@pytest.mark.parametrize("num_slow", [1, 2, 16, 31])
@pytest.mark.parametrize("mask_ns", [1 * MS, 5 * MS, 50 * MS])
def test_slow_masks_take_a_tenth_of_the_steps_however_many_they_are(num_slow, mask_ns):
    batch = Batch({f"slow{idx}": mask_ns for idx in range(num_slow)})
    num_steps = 40 * num_slow * mask_ns // MS
    batch.run(num_steps)
    once_ns = num_slow * (mask_ns + LENT_NS)  # not paid for yet
    assert batch.steps_ns + batch.spent_ns - once_ns < 1.106 * num_steps * STEP_NS
    assert batch.spent_ns > 0.09 * batch.steps_ns
    counts = batch.num_tokens.values()
    assert max(counts) - min(counts) <= 3  # each goes on


@pytest.mark.parametrize("num_slow", [1, 8, 31])
@pytest.mark.parametrize("mask_ns", [2 * MS, 5 * MS])
def test_slow_masks_take_a_tenth_of_the_first_steps_as_well(num_slow, mask_ns):
    """Fewer rows are left when they sit out, and may not owe more for that."""
    batch = Batch({f"slow{idx}": mask_ns for idx in range(num_slow)})
    batch.run(100)
    once_ns = num_slow * (mask_ns + LENT_NS)
    assert batch.spent_ns - once_ns < 0.106 * 100 * STEP_NS


@pytest.mark.parametrize("num_clients", [1, 4, 8])
@pytest.mark.parametrize("mask_ns", [MS // 2, 4 * MS, 30 * MS])
@pytest.mark.parametrize("num_masks", [1, 3])
def test_masks_of_clients_that_send_short_requests_take_a_tenth_of_the_steps(num_clients, mask_ns, num_masks):
    """Each request ends with a debt for which it does not sit out, and the client sends the next one at once."""
    accounts, spent_ns, num_steps = MaskAccounts(), 0, 3000
    live: dict[str, int] = {}
    num_begun = 0
    for _ in range(num_steps):
        while len(live) < num_clients:
            accounts.begin(f"short{num_begun}", "")
            live[f"short{num_begun}"] = 0
            num_begun += 1
        masks = [made(name, "", mask_ns) for name in live if name not in accounts.sitting_out]
        spent_ns += mask_ns * len(masks)
        accounts.settle(masks, live, [*live, *PLAIN[num_clients:]], STEP_NS, is_beside=False)
        for mask in masks:
            live[mask.request_id] += 1
            if live[mask.request_id] == num_masks:
                del live[mask.request_id]
                accounts.end(mask.request_id)
    once_ns = num_clients * (mask_ns + LENT_NS)
    assert spent_ns - once_ns < 0.106 * num_steps * STEP_NS
    assert num_begun > num_clients


def test_one_that_takes_over_a_debt_sits_out_at_once():
    accounts = MaskAccounts()
    accounts.settle([made("a", "", 30 * MS), made("b", "", MS)], ["a", "b"], PLAIN, STEP_NS, is_beside=False)
    accounts.end("a")
    accounts.end("b")
    accounts.begin("next", "")
    accounts.begin("after", "")
    assert accounts.debts_ns["after"] < LENT_NS
    assert accounts.sitting_out == {"next"}


def test_usual_masks_never_sit_out_though_they_take_more_than_a_tenth_together():
    """The costliest schema of the notes: 45 us a row, of steps of 10 ms."""
    batch = Batch({f"row{idx}": 45_000 for idx in range(ROWS)})
    batch.run(500)
    assert set(batch.num_tokens.values()) == {500}


def test_one_slow_mask_among_usual_ones_is_paid_from_what_was_saved():
    batch = Batch({f"row{idx}": 30_000 for idx in range(ROWS)})
    batch.run(20)
    batch.masks_ns["row0"] = 400_000
    batch.run(1)
    assert not batch.accounts.sitting_out


def test_usual_masks_go_on_beside_slow_ones():
    masks_ns = {f"slow{idx}": 5 * MS for idx in range(8)} | {f"row{idx}": 40_000 for idx in range(8)}
    batch = Batch(masks_ns)
    batch.run(1000)
    assert all(batch.num_tokens[f"row{idx}"] == 1000 for idx in range(8))
    assert all(10 < batch.num_tokens[f"slow{idx}"] < 40 for idx in range(8))


def test_tenants_share_what_pays_debts_equally():
    masks_ns = {f"many{idx}": 5 * MS for idx in range(10)} | {"one": 5 * MS}
    batch = Batch(masks_ns, {name: name[:3] for name in masks_ns})
    batch.run(2000)
    assert batch.num_tokens["one"] >= 5 * batch.num_tokens["many0"]


def test_the_debt_of_one_that_leaves_passes_to_the_next_of_its_tenant():
    accounts = MaskAccounts()
    accounts.settle([made("a", "bad", 30 * MS)], "a", PLAIN, STEP_NS, is_beside=False)
    debt_ns = accounts.debts_ns["a"]
    assert debt_ns > 20 * MS
    accounts.end("a")
    accounts.begin("b", "good")
    assert not accounts.debts_ns
    accounts.begin("c", "bad")
    assert accounts.debts_ns == {"c": debt_ns}
    accounts.begin("d", "bad")
    assert accounts.debts_ns == {"c": debt_ns}


def test_the_mask_by_which_a_request_failed_is_owed_by_the_next_of_its_tenant():
    accounts = MaskAccounts()
    accounts.settle([made("a", "bad", 30 * MS)], (), PLAIN, STEP_NS, is_beside=False)
    assert not accounts.debts_ns
    accounts.begin("b", "bad")
    assert accounts.debts_ns["b"] > 20 * MS


def test_debts_that_were_left_are_paid_while_nobody_owes():
    accounts = MaskAccounts()
    accounts.settle([made("a", "", 30 * MS)], "a", PLAIN, STEP_NS, is_beside=False)
    accounts.end("a")
    for _ in range(31):
        accounts.settle([], (), PLAIN, STEP_NS, is_beside=False)
    accounts.begin("later", "")
    assert not accounts.debts_ns


def test_masks_beside_a_step_cost_what_they_take_longer():
    accounts = MaskAccounts()
    for _ in range(20):  # 32 masks of 0.3 ms, hidden behind layers of 10 ms
        masks = [made(f"row{idx}", "", 300_000) for idx in range(ROWS)]
        accounts.settle(masks, (), PLAIN, STEP_NS, is_beside=True)
        assert not accounts.debts_ns
    accounts.settle([made("slow", "", 60 * MS)], ["slow"], PLAIN, STEP_NS, is_beside=True)
    first_ns = accounts.debts_ns["slow"]
    assert 30 * MS < first_ns < 50 * MS  # what was saved has paid a part
    accounts.settle([], ["slow"], PLAIN, 60 * MS, is_beside=True)  # the step waited for that mask, and is no longer for it
    assert first_ns - accounts.debts_ns["slow"] <= STEP_NS // 10


def test_masks_that_were_not_made_beside_a_step_after_all_cost_it_nothing():
    """Those of the first step, which nothing was in flight before."""
    accounts = MaskAccounts()
    accounts.settle([], (), PLAIN, STEP_NS, is_beside=True)
    accounts.settle([made("slow", "", 60 * MS)], ["slow"], PLAIN, STEP_NS, is_beside=True)
    owed_ns = accounts.debts_ns["slow"]
    accounts.settle([], ["slow"], PLAIN, STEP_NS, is_beside=True)
    assert 0 < owed_ns - accounts.debts_ns["slow"] <= STEP_NS // 10


def test_a_mask_is_charged_what_others_waited_up_to_twice_its_work():
    assert made("a", "", 5).charge_ns == 5
    assert MadeMask("a", "", wall_ns=8, busy_ns=5).charge_ns == 8  # others had the core
    assert MadeMask("a", "", wall_ns=5000, busy_ns=5).charge_ns == 10  # another thread had the interpreter


def test_equal_parts():
    assert equal_parts(90, {"a": 10, "b": 100, "c": 50}) == {"a": 10, "b": 40, "c": 40}
    assert equal_parts(90, {"a": 10, "b": 20}) == {"a": 10, "b": 20}
    assert equal_parts(5, {"a": 10, "b": 20, "c": 30}) == {"a": 1, "b": 2, "c": 2}
    assert equal_parts(5, {}) == {}
