"""Models that share a machine in virtual time: one with nothing but lines of batches leaves it to those that serve people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from penstock.backends.native._native import Account, Turns
from penstock.clock import VirtualClock
from penstock.lab.agenda import Agenda
from penstock.lab.cost_model import CostModel
from penstock.lab.machine import SharedMachine
from penstock.lab.virtual_server import ServerSettings, VirtualServer
from penstock.sched.background import PAUSE_NS, serve_people
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_request
from penstock.types.events import TokenEvent
from penstock.types.plan import Capacity

MS = 1_000_000
LINE_NS, CHAT_NS, TEXT_NS = 20 * MS, 10 * MS, 3 * MS
"""Steps of lines, and of two models for people."""
CAPACITY = Capacity(num_blocks=4001, block_size=16, max_rows=8, max_step_tokens=256, max_model_len=8000)


class Town:
    """Servers at one machine. A client asks its next request some time after the answer to the last one."""

    def __init__(self, *step_ns: int, share: float = 0.0) -> None:
        self.clock, self.agenda = VirtualClock(), Agenda()
        machine = SharedMachine(Turns(), self.agenda, self.clock)
        self.accounts = [Account(1.0) for _ in step_ns]
        self.servers: list[VirtualServer] = []
        for number, duration_ns in enumerate(step_ns):
            cost = CostModel(step_ns=duration_ns, decode_row_ns=0, prefill_token_ns=0, decode_read_ns=0, prefill_read_ns=0)
            policies = partial(make_policies, background_share=share)
            settings = ServerSettings(capacity=CAPACITY, make_policies=policies, cost=replace(cost, host_step_ns=MS))
            seat = replace(machine.seat(self.accounts[number]), others_serve=partial(self._others_serve, number))
            self.servers.append(VirtualServer(settings, self.clock, report=self._report, seat=seat))
        self.latencies_ns: list[int] = []
        self._gaps_ns: dict[str, int] = {}
        self._names = map(str, range(1 << 30))

    def _others_serve(self, own: int, now_ns: int) -> bool:
        return serve_people([server.load() for number, server in enumerate(self.servers) if number != own], now_ns)

    def ask_lines(self, number: int, *, num: int = 8, max_tokens: int = 4000) -> None:
        for _ in range(num):
            request = make_request(f"line-{next(self._names)}", 4, max_tokens=max_tokens, background=True)
            self.servers[number].submit(request, max_tokens)

    def ask(self, number: int, *, max_tokens: int, gap_ns: int | None = None) -> None:
        """One person's request, and the next one after each answer and a gap; without a gap, no other."""
        name = f"{number}-{next(self._names)}"
        if gap_ns is not None:
            self._gaps_ns[name] = gap_ns
        request = make_request(name, 4, max_tokens=max_tokens, arrival_ns=self.clock.now_ns())
        self.servers[number].submit(request, max_tokens)

    def _report(self, events: list[TokenEvent], now_ns: int) -> None:
        for event in events:
            if event.finish_reason is not None and (gap_ns := self._gaps_ns.pop(event.request_id, None)) is not None:
                number = int(event.request_id.partition("-")[0])
                self.agenda.note(now_ns, partial(self._note, number, event.request_id, now_ns))
                again = partial(self.ask, number, max_tokens=1, gap_ns=gap_ns)
                self.agenda.note(now_ns + gap_ns, again)

    def _note(self, number: int, name: str, now_ns: int) -> None:
        self.latencies_ns.append(now_ns - self.servers[number].ended[name].arrival_ns)

    def run(self, until_ns: int) -> Iterator[int]:
        """Yield after each event."""
        while (now_ns := min(self.agenda.due_ns, *[server.player.next_ns for server in self.servers])) <= until_ns:
            self.clock.advance_to(max(now_ns, self.clock.now_ns()))
            if self.agenda.due_ns <= now_ns:
                self.agenda.act()
            else:
                next(server for server in self.servers if server.player.next_ns <= now_ns).act()
            yield now_ns
        self.clock.advance_to(until_ns)

    def play(self, until_ns: int) -> None:
        for _ in self.run(until_ns):
            pass


def test_lines_have_no_step_until_people_have_their_answers_and_then_all_of_them() -> None:
    town = Town(LINE_NS, CHAT_NS)
    people, lines = town.servers[1], town.servers[0]
    for _ in range(4):
        town.ask(1, max_tokens=200)
    town.ask_lines(0)
    for _ in town.run(10_000 * MS):
        if len(people.ended) == 4:
            break
        assert lines.num_steps == 0
    ended_ns = town.clock.now_ns()
    assert ended_ns < 2300 * MS, "as if nobody else was there: 200 steps of 10 ms, with 1 ms of the host after each"
    town.play(ended_ns + 1000 * MS)
    assert lines.num_steps >= (1000 * MS - 2 * PAUSE_NS) // (LINE_NS + MS) - 1


def test_lines_that_nobody_is_beside_never_wait() -> None:
    town = Town(LINE_NS, CHAT_NS)
    town.ask_lines(0)
    town.play(2000 * MS)
    assert town.servers[0].num_steps == 2000 // 21


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_lines_have_their_share_of_the_time_beside_people_that_want_all_of_it(share: float) -> None:
    town = Town(LINE_NS, CHAT_NS, share=share)
    for _ in range(4):
        town.ask(1, max_tokens=3000)
    town.ask_lines(0)
    town.play(10_000 * MS)
    assert town.servers[0].num_steps * LINE_NS == pytest.approx(share * 10_000 * MS, abs=2 * LINE_NS)


@pytest.mark.parametrize("gap_ns", [1 * MS, 5 * MS, 13 * MS])
def test_a_model_between_two_requests_loses_no_turn_to_a_long_step_of_lines(gap_ns: int) -> None:
    """Short steps, and milliseconds between them: lines that began in each of these would have most of the machine."""
    town = Town(LINE_NS, TEXT_NS)
    town.ask(1, max_tokens=1, gap_ns=gap_ns)
    town.ask_lines(0)
    town.play(5_000 * MS)
    assert town.servers[0].num_steps == 0
    assert len(town.latencies_ns) >= 5_000 // (4 + gap_ns // MS) - 1
    assert max(town.latencies_ns) <= TEXT_NS + MS


def test_lines_have_what_longer_pauses_leave_and_people_wait_for_one_step_of_them() -> None:
    town = Town(LINE_NS, TEXT_NS)
    town.ask(1, max_tokens=1, gap_ns=200 * MS)
    town.ask_lines(0)
    town.play(10_000 * MS)
    assert town.servers[0].num_steps * LINE_NS > 0.7 * 10_000 * MS
    assert max(town.latencies_ns) <= LINE_NS + TEXT_NS + 2 * MS


def test_two_models_with_nothing_but_lines_take_turns() -> None:
    town = Town(LINE_NS, LINE_NS)
    for number in range(2):
        town.ask_lines(number)
    town.play(4_000 * MS)
    counts = [server.num_steps for server in town.servers]
    assert sum(counts) >= 190
    assert abs(counts[0] - counts[1]) <= 2


def test_people_of_a_model_with_lines_have_their_turns_beside_another_model() -> None:
    """Lines fill their steps, as without the other model."""
    town = Town(CHAT_NS, CHAT_NS)
    town.ask_lines(0, num=2)
    for number in range(2):
        town.ask(number, max_tokens=100)
    town.play(3_000 * MS)
    ended = [server.ended[name] for server in town.servers for name in server.ended if not name.startswith("line")]
    assert len(ended) == 2
    assert max(one.ended_ns for one in ended) <= 2 * 101 * (CHAT_NS + MS)
