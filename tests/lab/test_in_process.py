"""A workload without HTTP: the records of a model that is made up."""

from __future__ import annotations

import asyncio

import pytest

from penstock.lab.driving import drive
from penstock.lab.in_process import Progress, notes_of, sender
from penstock.lab.pacing import Pace, WarmUp
from penstock.lab.records import End
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError

MS = 1_000_000


def job(prompt="hi", num_output_tokens=3, arrival_ns=0, **changes):
    return Job(arrival_ns=arrival_ns, num_prompt_tokens=2, num_output_tokens=num_output_tokens, prompt=prompt, **changes)


def workload(*jobs):
    return Workload(name="test", jobs=jobs)


class Model:
    """Says "x" as often as asked; each prompt that is in `gates` waits for its event before the second token."""

    def __init__(self, **gates):
        self.gates = gates
        self.asked = []
        self.is_waiting = asyncio.Event()
        self.num_running = self.max_running = self.num_closed = 0

    async def ask(self, prompt, num_output_tokens):
        self.asked.append(prompt)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        last = prompt[-1]
        try:
            for nth in range(1, num_output_tokens + 1):
                await asyncio.sleep(0)
                if last == "bad" and nth == 2:
                    raise PenstockError("out of memory")
                if last == "bug":
                    raise ZeroDivisionError
                if last == "short" and nth == 2:
                    return
                if last in self.gates and nth == 2:
                    self.is_waiting.set()
                    await self.gates[last].wait()
                yield Progress(num_prompt_tokens=2, num_cached_tokens=1, num_output_tokens=nth, new_text="x")
        finally:
            self.num_running -= 1
            self.num_closed += 1


@pytest.mark.parametrize("changes", [{"tenant": "a"}, {"priority": 1}, {"deadline_ns": 5 * MS}])
def test_what_the_model_does_not_know_is_said(changes):
    assert "tenants, priorities and deadlines" in notes_of(workload(job(), job(**changes)))[0]
    assert not notes_of(workload(job()))


async def test_records_are_as_those_of_http():
    model = Model()
    sent = await drive(workload(*[job()] * 9), sender(model.ask), pace=Pace(concurrency=2), keeps_text=True)
    assert [record.index for record in sent.records] == list(range(9))
    for record in sent.records:
        assert (record.end, record.num_output_tokens, record.num_prompt_tokens, record.num_cached_tokens) == (End.OK, 3, 2, 1)
        assert record.intended_ns <= record.sent_ns <= record.first_ns <= record.ended_ns <= sent.duration_ns
        assert len(record.gaps_ns) == 2
        assert record.text == "xxx"
        assert record.http_status == 0
    assert model.max_running == 2
    assert model.asked == [["hi"]] * 9


async def test_an_open_loop_sends_when_it_is_due():
    sent = await drive(workload(job(), job(arrival_ns=30 * MS)), sender(Model().ask))
    assert [record.intended_ns for record in sent.records] == [0, 30 * MS]
    assert sent.records[1].sent_ns >= 30 * MS


async def test_a_failure_is_a_record_and_takes_its_later_turns_with_it():
    jobs = workload(job("bad"), job("next", after=0), job("short"), job("good"))
    bad, lost, short, good = (await drive(jobs, sender(Model().ask))).records
    assert (bad.end, bad.error) == (End.FAILED, "out of memory")
    assert (lost.end, lost.error) == (End.FAILED, "The turn before it had no answer.")
    assert (short.end, short.error) == (End.FAILED, "1 token instead of 3.")
    assert good.end is End.OK


async def test_a_turn_has_what_was_said_before():
    model = Model()
    jobs = workload(job("a", 1), job("b", 2, after=0), job("c", 1, after=1))
    await drive(jobs, sender(model.ask))
    assert model.asked == [["a"], ["a", "x", "b"], ["a", "x", "b", "xx", "c"]]


async def test_token_ids_are_asked_as_they_are():
    model = Model()
    ids = Job(arrival_ns=0, num_prompt_tokens=2, num_output_tokens=3, prompt_token_ids=(5, 6))
    await drive(workload(ids), sender(model.ask))
    assert model.asked == [(5, 6)]


@pytest.mark.parametrize("change", [{"cancelled_ns": 20 * MS}, {"cancelled_after_tokens": 1}])
async def test_a_client_that_goes_away_ends_its_request(change):
    model = Model(hi=asyncio.Event())
    (record,) = (await drive(workload(job(**change)), sender(model.ask))).records
    assert (record.end, record.num_output_tokens) == (End.CANCELLED, 1)
    assert model.num_closed == 1


async def test_the_warm_up_has_no_records():
    sent = await drive(workload(*[job()] * 5), sender(Model().ask), pace=Pace(concurrency=1), warm_up=WarmUp(num_jobs=3))
    assert ([record.index for record in sent.records], sent.num_warm_up) == ([3, 4], 3)


async def test_an_interruption_ends_it_with_what_there_is():
    model = Model(stuck=asyncio.Event())
    jobs = workload(job("a"), job("stuck"), job("c"))
    driving = asyncio.create_task(drive(jobs, sender(model.ask), pace=Pace(concurrency=1)))
    await model.is_waiting.wait()
    driving.cancel()
    sent = await driving
    assert [record.index for record in sent.records] == [0]
    (record,) = sent.unfinished
    assert (record.index, record.end, record.num_output_tokens) == (1, End.CANCELLED, 1)
    assert sent.num_unsent == 1
    assert model.num_running == 0


async def test_a_fault_of_the_model_s_side_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        await drive(workload(job("hi"), job("bug")), sender(Model().ask))
