"""Models that come and go: loads are fakes, time stands still until it is told to move, and the test is the keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.clock import VirtualClock, WallClock
from penstock.deploy import deployment
from penstock.deploy.deployment import RETRY_NS, Deployment
from penstock.deploy.resources import MemoryBudget, MemoryShare
from penstock.deploy.room import FIRST_USE_NS, MIN_STAY_NS, PEOPLE_STAY_NS
from penstock.deploy.running import ModelState, RunningModel, ServedModel
from penstock.engine.state import SHUTTING_DOWN, UNLOADED, EngineState
from penstock.obs.metrics import Metrics
from penstock.types.errors import (
    ConfigError,
    ModelAway,
    ModelError,
    NotEnoughMemory,
    PenstockError,
    PutOff,
    Rejected,
    RejectReason,
)

SECOND = 1_000_000_000
LOAD_NS = SECOND // 2
WAIT_S = 10.0


class World:
    """Three models of one size each and a budget, in which two of them have room unless a test says otherwise."""

    def __init__(self, budget_bytes: int = 2, names: Sequence[str] = "abc", **fields: Any) -> None:
        self.clock = VirtualClock(SECOND)
        self.memory = MemoryBudget(lambda: 1000, limit_bytes=budget_bytes)
        self.loads: list[str] = []
        self.closed: list[tuple[str, int]] = []
        """Names, and how many people used the model when it was closed."""
        self.details: list[str] = []
        """Texts for the requests that each of them cut."""
        self.on_closed: Callable[[], None] = lambda: None
        self.errors: dict[str, Exception] = {}
        """Errors that the models' next loads raise."""
        self.sizes = dict.fromkeys(names, 1)
        served = [
            ServedModel(
                names=(name,),
                metrics=Metrics(name),
                load=lambda name=name: self.load(name),  # type: ignore[misc]
                plan=lambda name=name: self.share(name),  # type: ignore[misc]
                **fields,
            )
            for name in names
        ]
        self.deployment = Deployment(served, self.memory, clock=self.clock)
        self.of = {one.name: one for one in served}

    def share(self, name: str) -> MemoryShare:
        return MemoryShare(num_weight_bytes=self.sizes[name], num_reserve_bytes=0)

    def load(self, name: str) -> RunningModel:
        self.loads.append(name)
        self.clock.advance(LOAD_NS)
        if name in self.errors:
            raise self.errors.pop(name)
        self.memory.take(name, self.share(name))
        engine = SimpleNamespace(close=lambda _, detail: self.close(name, detail), drain=lambda: None, state=EngineState.READY)
        part: Any = SimpleNamespace()
        return RunningModel(
            engine=cast(Any, engine),
            bridge=part,
            tokenizer=part,
            chat_template=None,
            grammars=part,
            dialect=part,
            admission=part,
            metrics=self.of[name].metrics,
            model=cast(Any, SimpleNamespace(name=name)),
            clock=self.clock,
            release=lambda: self.memory.give_back(name),
        )

    def close(self, name: str, detail: str) -> bool:
        running = self.of[name].running
        assert running is not None
        self.closed.append((name, running.people.num_users))
        self.details.append(detail)
        self.on_closed()
        return not running.uses.num_users

    def want(self, *names: str) -> list[Future[RunningModel]]:
        return [self.deployment.want(self.of[name]) for name in names]

    def loaded(self, *names: str) -> list[RunningModel]:
        """These models, each loaded and used once."""
        futures = self.want(*names)
        self.deployment.tend()
        running = [future.result(0) for future in futures]
        for one in running:
            with one.using():
                pass
        return running

    @property
    def states(self) -> str:
        """The first letters of the states, in the order of the names; `-` for unloaded."""
        letters = {ModelState.UNLOADED: "-", ModelState.LOADED: "L", ModelState.LEAVING: "v", ModelState.FAILED: "F"}
        return "".join(letters[one.state] for one in self.deployment.served)


def test_all_who_wait_get_the_same_model_from_one_load() -> None:
    world = World()
    one, two = world.want("a", "a")
    assert one is two
    with pytest.raises(ModelAway):
        world.of["a"].answerer()
    assert world.deployment.tend() is None
    assert one.result(0) is world.of["a"].answerer() is world.want("a")[0].result(0)
    assert world.loads == ["a"]
    assert world.of["a"].load_ns == LOAD_NS


def test_an_unused_model_leaves_for_one_that_is_wanted_and_the_one_used_last_stays() -> None:
    world = World()
    a, _ = world.loaded("a", "b")
    world.clock.advance(SECOND)
    with a.using():
        pass
    world.loaded("c")
    assert (world.states, world.closed) == ("L-L", [("b", 0)])
    assert world.memory.left_bytes() == 0


def test_a_model_that_leaves_is_closed_when_its_last_user_has_gone_and_takes_no_new_ones() -> None:
    world = World(budget_bytes=1)
    (a,) = world.loaded("a")
    with a.using():
        world.clock.advance(MIN_STAY_NS)
        (b,) = world.want("b")
        world.deployment.tend()
        assert world.states == "v--"
        with pytest.raises(ModelAway), a.using():
            pass
        a.begin_use(is_user=True)  # a part of what the user does
        a.end_use()
        assert not world.closed
        world.deployment._woken.clear()
    assert world.deployment._woken.is_set(), "nothing woke the keeper"
    world.deployment.tend()
    assert (world.states, world.closed) == ("-L-", [("a", 0)])
    assert b.done()


def test_a_request_that_read_a_model_before_it_left_is_told_so_at_the_door() -> None:
    world = World(budget_bytes=1)
    (a,) = world.loaded("a")
    world.loaded("b")
    with pytest.raises(ModelAway), a.using():
        pass
    (again,) = world.loaded("a")
    assert again is not a


def test_a_model_in_use_stays_for_its_time() -> None:
    world = World(budget_bytes=1)
    (a,) = world.loaded("a")
    with a.using():
        (b,) = world.want("b")
        due_ns = world.deployment.tend()
        assert (world.states, due_ns) == ("L--", world.of["a"].loaded_ns + MIN_STAY_NS)
        assert world.deployment.expected_wait_s(world.of["b"]) > MIN_STAY_NS / SECOND - 1
        world.clock.advance_to(due_ns or 0)
        world.deployment.tend()
        assert world.states == "v--"
    world.deployment.tend()
    assert b.done()


def test_a_model_that_was_just_loaded_is_not_unloaded_before_those_who_waited_could_use_it() -> None:
    world = World(budget_bytes=1)
    a, b = world.want("a", "b")
    due_ns = world.deployment.tend()
    assert (world.states, a.done(), b.done()) == ("L--", True, False)
    assert due_ns == world.of["a"].loaded_ns + FIRST_USE_NS
    with a.result(0).using():
        pass
    world.deployment.tend()
    assert world.states == "-L-", "it was used, and is not any more"


def test_background_requests_unload_no_model_that_people_used_lately() -> None:
    world = World(budget_bytes=1)
    (a,) = world.loaded("a")
    world.clock.advance(PEOPLE_STAY_NS)
    with a.using():
        world.clock.advance(PEOPLE_STAY_NS)
        refused = world.deployment.want(world.of["b"], is_background=True)
        world.deployment.tend()
        with pytest.raises(Rejected, match="b can't be loaded while other models"):
            refused.result(0)
    world.clock.advance(PEOPLE_STAY_NS - 1)
    refused = world.deployment.want(world.of["b"], is_background=True)
    world.deployment.tend()
    assert (world.states, type(refused.exception(0))) == ("L--", PutOff), "the next may be asked soon"
    world.clock.advance(1)
    loaded = world.deployment.want(world.of["b"], is_background=True)
    world.deployment.tend()
    assert (world.states, loaded.done()) == ("-L-", True)


def in_background(world: World, name: str) -> RunningModel:
    """This model, loaded for background requests."""
    future = world.deployment.want(world.of[name], is_background=True)
    world.deployment.tend()
    return future.result(0)


def test_background_requests_keep_no_model_that_people_want_the_memory_of() -> None:
    world = World()
    world.loaded("c")
    with in_background(world, "a").using(is_background=True):
        world.clock.advance(SECOND)
        (b,) = world.want("b")
        world.deployment.tend()
        assert (world.states, b.done()) == ("-LL", True), "that which people used last stays, if it is idle"
    assert world.details == [UNLOADED]


def test_background_requests_keep_no_model_that_leaves_from_people() -> None:
    world = World(budget_bytes=1)
    (a,) = world.loaded("a")
    with a.using(is_background=True):
        with a.using():
            world.clock.advance(MIN_STAY_NS)
            for name in "ba":
                (wanted,) = world.want(name)
                world.deployment.tend()
                assert (world.states, wanted.done()) == ("v--", False)
            world.deployment._woken.clear()
        assert world.deployment._woken.is_set(), "nothing woke the keeper"
        world.deployment.tend()
        assert world.closed == [("a", 0)]


def test_a_model_that_people_want_gets_room_before_one_for_background_requests() -> None:
    world = World()
    (c,) = world.loaded("c")
    with c.using(), in_background(world, "a").using(is_background=True):
        world.clock.advance(MIN_STAY_NS)
        world.deployment.want(world.of["b"], is_background=True)
        world.deployment.tend()
        assert world.states == "v-L"
        (a,) = world.want("a")
        world.deployment.tend()
        assert (world.states, a.done()) == ("L-L", True)


def test_people_who_waited_for_a_model_use_it_first_also_beside_background_requests() -> None:
    world = World(budget_bytes=1)
    world.want("a")
    with in_background(world, "a").using(is_background=True):
        world.want("b")
        assert world.deployment.tend() == world.of["a"].loaded_ns + FIRST_USE_NS
        assert world.states == "L--"


def test_models_of_background_requests_take_turns() -> None:
    world = World(budget_bytes=1)
    with in_background(world, "a").using(is_background=True):
        b = world.deployment.want(world.of["b"], is_background=True)
        due_ns = world.deployment.tend()
        assert (world.states, b.done(), due_ns) == ("L--", False, world.of["a"].loaded_ns + MIN_STAY_NS)
        world.clock.advance_to(due_ns or 0)
        world.deployment.tend()
    world.deployment.tend()
    assert (world.states, b.done()) == ("-L-", True)


def test_a_load_for_background_requests_becomes_that_of_a_person_who_joins_them() -> None:
    world = World(budget_bytes=1)
    world.loaded("a")
    one = world.deployment.want(world.of["b"], is_background=True)
    (other,) = world.want("b")
    world.deployment.tend()
    assert world.states == "-L-"
    assert one.result(0) is other.result(0)


def test_background_requests_without_room_hold_up_no_model_that_fits() -> None:
    world = World(budget_bytes=3)
    world.sizes |= {"a": 2, "b": 2}
    world.loaded("a")
    b, c = [world.deployment.want(world.of[name], is_background=True) for name in "bc"]
    world.deployment.tend()
    assert (world.states, type(b.exception(0)), c.done()) == ("L-L", PutOff, True)


def test_three_models_in_use_take_turns_in_room_for_two() -> None:
    world = World()
    num_turns: dict[str, int] = dict.fromkeys("abc", 0)
    stays: dict[str, int] = {}
    for _ in range(2000):
        for name in "abc":
            world.want(name)
            served = world.of[name]
            if served.state is ModelState.LOADED and name not in stays:
                assert served.running is not None
                served.running.begin_use()
                stays[name] = world.clock.now_ns()
                num_turns[name] += 1
            elif served.state is ModelState.LEAVING and name in stays:
                assert served.running is not None
                assert stays.pop(name)
                assert world.clock.now_ns() - served.loaded_ns >= MIN_STAY_NS
                served.running.end_use()
        world.deployment.tend()
        world.clock.advance(SECOND // 10)
    assert min(num_turns.values()) > 5
    assert max(num_turns.values()) <= min(num_turns.values()) + 1
    assert all(num_users == 0 for _, num_users in world.closed)


def test_a_large_model_takes_the_place_of_several_and_those_that_need_not_leave_stay() -> None:
    world = World(budget_bytes=4, names="abcd")
    world.sizes["c"] = 2
    world.loaded("a", "b", "c")
    world.sizes["d"] = 2
    world.loaded("d")
    assert world.states == "LL-L" or world.states == "--LL"
    assert len(world.closed) in (1, 2)


def test_a_model_is_loaded_before_another_that_waits_for_room_if_both_will_fit() -> None:
    world = World(budget_bytes=4, names="abc")
    world.sizes |= {"a": 3, "b": 3, "c": 1}
    (a,) = world.loaded("a")
    with a.using():
        world.clock.advance(MIN_STAY_NS)
        b, c = world.want("b", "c")
        world.deployment.tend()
        assert (world.states, c.done()) == ("v-L", True)
    world.deployment.tend()
    assert (world.states, b.done()) == ("-LL", True)


def test_a_model_that_would_take_the_room_that_another_waits_for_does_not_overtake_it() -> None:
    world = World(budget_bytes=4, names="abc")
    world.sizes |= {"a": 3, "b": 4, "c": 1}
    (a,) = world.loaded("a")
    with a.using():
        world.clock.advance(MIN_STAY_NS)
        b, c = world.want("b", "c")
        world.deployment.tend()
        assert world.states == "v--"
    world.deployment.tend()
    assert (world.states, b.done(), c.done()) == ("-L-", True, False)


def test_a_kept_model_never_leaves_and_a_model_without_room_beside_it_is_refused() -> None:
    world = World(budget_bytes=2)
    world.of["a"].is_kept = True
    world.loaded("a", "b")
    world.loaded("c")
    assert world.states == "L-L"
    world.sizes["b"] = 2  # its files were replaced meanwhile
    (b,) = world.want("b")
    world.deployment.tend()
    with pytest.raises(Rejected, match=r"b takes 2 B .*kept models have 1 B of it.* --memory is 2 B, .*, or raise --memory\."):
        b.result(0)
    assert world.states == "LFL"


def test_a_model_that_is_idle_leaves() -> None:
    world = World(idle_unload_ns=5 * SECOND)
    (a,) = world.loaded("a")
    world.clock.advance(3 * SECOND)
    with a.using():
        world.clock.advance(60 * SECOND)
        world.deployment.tend()
        assert world.states == "L--", "it is in use"
    due_ns = world.deployment.tend()
    assert due_ns == world.clock.now_ns() + 5 * SECOND
    world.clock.advance_to(due_ns)
    assert world.deployment.tend() is None
    assert (world.states, world.closed) == ("---", [("a", 0)])


@pytest.mark.parametrize(("idle_ns", "leaves_after_ns"), [(60 * SECOND, 60 * SECOND), (0, FIRST_USE_NS), (-1, None)])
def test_a_model_may_be_kept_for_another_time_than_its_setting_says(idle_ns: int, leaves_after_ns: int | None) -> None:
    world = World(idle_unload_ns=5 * SECOND)
    world.loaded("a")
    world.clock.advance(4 * SECOND)
    world.deployment.keep(world.of["a"], idle_ns)
    due_ns = world.deployment.tend()
    if leaves_after_ns is None:
        assert due_ns is None
        world.clock.advance(3600 * SECOND)
        world.deployment.tend()
        assert world.states == "L--"
        return
    assert world.states == "L--"
    assert due_ns == world.clock.now_ns() + leaves_after_ns, "the time begins with the request that sets it"
    world.clock.advance_to(due_ns)
    assert world.deployment.tend() is None
    assert world.states == "---"
    world.deployment.keep(world.of["a"], idle_ns)
    world.loaded("a")
    due_ns = world.deployment.tend()
    assert due_ns == world.clock.now_ns() + 5 * SECOND, "it counted until the model had left"


def test_a_model_without_the_setting_stays_whatever_a_request_says() -> None:
    world = World()
    world.loaded("a")
    world.deployment.keep(world.of["a"], 0)
    world.clock.advance(60 * SECOND)
    assert world.deployment.tend() is None
    assert world.states == "L--"


def test_a_model_that_was_loaded_on_request_leaves_when_it_is_idle_though_nobody_asks_anything_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "FIRST_USE_NS", 0)
    world = World(idle_unload_ns=SECOND // 20)
    has_closed = threading.Event()
    world.on_closed = has_closed.set
    world.deployment.start()
    try:
        with world.want("a")[0].result(WAIT_S).using():
            pass
        world.clock.advance(SECOND)
        assert has_closed.wait(WAIT_S), "the keeper sleeps until somebody asks for a model"
    finally:
        world.deployment.close()


def test_a_model_in_use_that_could_not_be_loaded_again_is_told_so_once_it_has_left() -> None:
    world = World()
    world.sizes["a"] = 2
    (a,) = world.loaded("a")
    with a.using():
        gone = world.deployment.unload(world.of["a"])
        world.deployment.tend()
        world.memory.hold_stuck("a", lambda: True)
        (again,) = world.want("a")
        world.deployment.tend()
        assert (world.states, again.done()) == ("v--", False), "it has users, and its memory"
    world.deployment.tend()
    assert (gone.result(0), world.closed) == (None, [("a", 0)])
    with pytest.raises(Rejected, match="steps that have not come back hold 2 B"):
        again.result(0)
    assert world.states == "F--"


@pytest.mark.parametrize(
    ("error", "words"), [(ModelError("the file is cut short"), "file is cut short"), (OSError(5, "disk"), "the server's log")]
)
def test_a_model_that_can_not_be_loaded_says_why_and_is_tried_again_later(error: Exception, words: str) -> None:
    world = World()
    world.errors["a"] = error
    a, b = world.want("a", "b")
    world.deployment.tend()
    world.deployment.tend()
    assert (world.states, b.done()) == ("FL-", True), "the other was loaded"
    for future in (a, *world.want("a")):
        with pytest.raises(Rejected, match=f"The model a could not be loaded: .*{words}") as refused:
            future.result(0)
        assert refused.value.reason is RejectReason.UNAVAILABLE
    assert refused.value.retry_after_s == RETRY_NS / SECOND - LOAD_NS / SECOND
    world.clock.advance(RETRY_NS)
    assert world.loaded("a")
    assert (world.states, world.of["a"].failure) == ("LL-", "")


def test_a_model_whose_engine_can_not_be_made_anew_is_loaded_again_when_it_is_asked_for() -> None:
    world = World()
    a, b = world.loaded("a", "b")
    cast(Any, a.engine).state = EngineState.FAILED
    world.deployment.tend()
    (again,) = world.loaded("a")
    assert again is not a
    assert (world.states, world.of["b"].running, world.loads) == ("LL-", b, ["a", "b", "a"])


def test_a_model_that_was_asked_to_leave_waits_for_its_users_up_to_a_time() -> None:
    world = World()
    (a,) = world.loaded("a")
    patient = world.deployment.unload(world.of["a"])
    with a.using():
        assert world.deployment.tend() is None
        assert (world.states, patient.done()) == ("v--", False)
    world.deployment.tend()
    assert (world.states, patient.done()) == ("---", True)
    (a,) = world.loaded("a")
    a.begin_use()
    hurried = world.deployment.unload(world.of["a"], timeout_s=1.0)
    due_ns = world.deployment.tend()
    assert (world.states, due_ns, hurried.done()) == ("v--", world.clock.now_ns() + SECOND, False)
    world.clock.advance(SECOND)
    world.deployment.tend()
    assert (world.states, hurried.done(), world.closed[-1]) == ("---", True, ("a", 1))
    a.end_use()
    (a,) = world.loaded("a")
    assert not a.uses.num_users, "the new one has nothing of the old one's"


def test_the_end_refuses_all_who_wait() -> None:
    world = World()
    world.loaded("b")
    (a,) = world.want("a")
    gone = world.deployment.unload(world.of["c"])
    assert world.deployment.close()
    for future in (a, *world.want("c")):
        with pytest.raises(Rejected, match="shutting down"):
            future.result(0)
    with pytest.raises(PenstockError):
        gone.result(0)
    assert world.closed == [("b", 0)]


def test_who_is_cut_is_told_that_the_server_ends_also_if_its_model_was_leaving() -> None:
    world = World()
    for model in world.loaded("a", "b"):
        model.begin_use()
    world.deployment.unload(world.of["a"], timeout_s=0.0)
    world.deployment.unload(world.of["b"])
    world.deployment.tend()
    assert world.states == "-v-"
    world.deployment.close()
    assert (world.closed, world.details) == ([("a", 1), ("b", 1)], [UNLOADED, SHUTTING_DOWN])


@pytest.mark.parametrize("begins_with", ["unload", "want"])
@pytest.mark.parametrize("is_used", [False, True])
def test_an_unload_and_a_load_that_are_asked_for_at_once_both_happen(begins_with: str, is_used: bool) -> None:
    """The later word counts: whoever asked for a load has the model in the end."""
    world = World()
    (old,) = world.loaded("a")
    if is_used:
        old.begin_use()
    if begins_with == "want":  # which is loaded already, so that there is nothing to do
        assert world.want("a")[0].result(0) is old
    gone = world.deployment.unload(world.of["a"])
    (again,) = world.want("a")
    assert not again.done(), "the model that is there leaves"
    world.deployment.tend()
    if is_used:
        assert (world.states, gone.done(), again.done()) == ("v--", False, False)
        old.end_use()
        world.deployment.tend()
    assert (gone.result(0), again.result(0)) == (None, world.of["a"].running)
    assert (world.states, world.loads, world.closed) == ("L--", ["a", "a"], [("a", 0)])
    assert world.deployment.tend() is None
    assert world.states == "L--", "nobody asks it to leave any more"


def test_a_model_that_is_asked_to_leave_and_wanted_within_a_pass_is_not_loaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.loaded("a")
    close_unused, asked = world.deployment._close_unused, list[Future[Any]]()

    def ask_meanwhile() -> None:
        if not asked:
            asked.extend([world.deployment.unload(world.of["a"]), *world.want("a")])
        close_unused()

    monkeypatch.setattr(world.deployment, "_close_unused", ask_meanwhile)
    world.deployment.tend()
    assert world.loads == ["a"]
    world.deployment.tend()
    assert all(future.done() for future in asked)
    assert (world.loads, world.closed) == (["a", "a"], [("a", 0)])


def test_a_fault_of_the_keeper_is_logged_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.deploy.deployment.TEND_AGAIN_NS", 1_000_000)
    world = World()
    tend, faults = world.deployment.tend, [OSError(5, "a fault of ours"), KeyError("another")]

    def tends() -> int | None:
        if faults:
            raise faults.pop()
        return tend()

    monkeypatch.setattr(world.deployment, "tend", tends)
    world.deployment.clock = WallClock()
    (a,) = world.want("a")
    world.deployment.start()
    assert a.result(20).name == "a", "also if nobody tells the keeper"
    assert not faults
    told = [record for record in caplog.records if "could not be tended" in record.message]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["'another'", "[Errno 5] a fault of ours"]
    assert world.deployment.close()


def test_models_of_the_start_are_loaded_as_far_as_they_fit() -> None:
    world = World()
    world.deployment.start(world.deployment.served)
    assert (world.loads, world.states) == (["a", "b"], "LL-")
    assert world.deployment.close()


@pytest.mark.parametrize("error", [ModelError("the file is cut short"), NotEnoughMemory("It never fits."), OSError(5, "disk")])
def test_a_model_that_can_not_be_loaded_at_the_start_is_told_and_the_others_answer(error: Exception) -> None:
    world = World(budget_bytes=3)
    world.errors["b"] = error
    world.deployment.start(world.deployment.served)
    assert (world.states, world.closed) == ("LFL", [])
    (b,) = world.want("b")
    with pytest.raises(Rejected, match=r"The model b could not be loaded"):
        b.result(0)
    world.clock.advance(RETRY_NS)
    assert world.want("b")[0].result(20).name == "b"
    assert world.deployment.close()


def test_a_start_fails_if_no_model_can_be_loaded_or_the_configuration_is_wrong() -> None:
    for names, errors, closed in (
        ("a", {"a": ModelError("the file is cut short")}, []),
        ("abc", {name: ModelError(f"{name} is cut short") for name in "abc"}, []),
        ("abc", {"b": ConfigError("no such device")}, [("a", 0)]),
    ):
        world = World(budget_bytes=3, names=names)
        world.errors |= errors
        with pytest.raises(type(next(iter(errors.values()))), match=str(next(iter(errors.values())))):
            world.deployment.start(world.deployment.served)
        assert world.closed == closed


def test_the_keeper_s_thread_loads_what_is_wanted() -> None:
    world = World()
    world.deployment.start()
    (a,) = world.want("a")
    assert a.result(20).name == "a"
    assert world.deployment.unload(world.of["a"]).result(20) is None
    assert world.deployment.close()


def test_a_model_whose_load_outlasts_the_server_is_closed_and_ended() -> None:
    ends: list[list[tuple[str, int]]] = []
    world = World(names="a", end=lambda: ends.append([*world.closed]))

    def load() -> RunningModel:
        running = world.load("a")
        world.deployment.close()
        return running

    world.of["a"].load = load
    world.want("a")
    world.deployment.tend()
    assert ends == [[], [("a", 0)]]


def test_a_model_has_no_room_beside_a_step_that_does_not_come_back() -> None:
    world = World(budget_bytes=2)
    world.loaded("a")
    is_held = [True]
    world.memory.hold_stuck("a", lambda: is_held[0])
    world.deployment.unload(world.of["a"])
    world.sizes["b"] = 2
    (b,) = world.want("b")
    world.deployment.tend()
    with pytest.raises(Rejected, match=r"b takes 2 B .* may take 2 B and steps that have not come back hold 1 B"):
        b.result(0)
    assert world.loaded("c"), "there is room for this one"
    is_held[0] = False
    world.clock.advance(RETRY_NS)
    assert world.loaded("b")


def test_a_plan_that_fails_is_the_model_s_failure_alone() -> None:
    world = World()

    def plan() -> MemoryShare:
        raise NotEnoughMemory("It never fits.")

    world.of["a"].plan = plan
    a, b = world.want("a", "b")
    while not b.done():
        world.deployment.tend()
    with pytest.raises(Rejected, match="It never fits"):
        a.result(0)


# Any order: memory is never promised twice, and every wait ends.

NAMES = "abcd"
SIZES = {"a": 1, "b": 2, "c": 3, "d": 1}
BUDGET_BYTES = 4
names = st.sampled_from(NAMES)


def successor(world: World, name: str, load_name: str) -> ServedModel:
    """Another model to be served by this name."""
    world.sizes[load_name] = 0
    made = world.of[load_name] = ServedModel(
        names=(name,),
        metrics=world.of[name].metrics,
        load=lambda: world.load(load_name),
        plan=lambda: world.share(load_name),
    )
    return made


def test_a_replaced_model_keeps_its_users_and_its_name_goes_to_the_new_one() -> None:
    world = World()
    (old,) = world.loaded("a")
    new, deployment = successor(world, "a", "A"), world.deployment
    with old.using():
        before = world.of["a"]
        deployment.change([new, world.of["b"]])
        assert deployment.find("a") is deployment.default is new
        assert deployment.find("c") is None, "it was left out, and was not loaded"
        deployment.tend()
        with pytest.raises(ModelAway):
            before.answerer()
        assert deployment.want(before).result(0) is new.running, "who had found the old one gets the new one"
        assert (world.closed, old in deployment.running) == ([], True)
    deployment.tend()
    assert world.closed == [("a", 0)]
    assert deployment.running == (new.running,)


def test_a_request_for_a_model_that_was_left_out_is_refused() -> None:
    world = World()
    world.loaded("a", "b")
    gone = world.of["a"]
    with gone.answerer().using():
        world.deployment.change([world.of["b"]])
        with pytest.raises(Rejected, match="not served any more"):
            world.deployment.want(gone).result(0)


def test_who_found_the_old_model_long_ago_gets_the_new_one() -> None:
    world = World()
    world.loaded("a")
    old, new, deployment = world.of["a"], successor(world, "a", "A"), world.deployment
    deployment.change([new])
    deployment.tend()
    assert old.running is None, "it has been closed"
    assert deployment.want(old).result(0) is new.running
    assert world.loads == ["a", "A"]


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_change_that_fails_leaves_all_as_it_was(is_closing: bool) -> None:
    world = World()
    world.loaded("a")
    served, deployment = world.deployment.served, world.deployment
    first, second = successor(world, "a", "A"), successor(world, "b", "B")
    if is_closing:
        deployment.drain()
    else:
        world.errors["B"] = ModelError("broken")
    with pytest.raises(Rejected if is_closing else ModelError):
        deployment.change([first, second])
    assert deployment.served == served
    assert deployment.find("a") is served[0]
    assert ("A", 0) in world.closed, "what was loaded for it is closed"


def test_a_change_to_two_models_of_one_name_is_refused() -> None:
    world = World()
    with pytest.raises(ConfigError, match="Two models are served as 'a'"):
        world.deployment.change([world.of["a"], successor(world, "a", "A")])


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(budget_bytes=BUDGET_BYTES, names=NAMES, idle_unload_ns=3 * MIN_STAY_NS)
        self.world.sizes |= SIZES
        self.waiting: list[Future[RunningModel]] = []
        self.unloads: list[Future[None]] = []
        self.used: list[Callable[[], None]] = []
        """Functions that end a use."""
        self.is_ended_by_force = False

    @rule(name=names, is_background=st.booleans())
    def want(self, name: str, is_background: bool) -> None:
        self.waiting.append(self.world.deployment.want(self.world.of[name], is_background=is_background))

    @rule(name=names, is_background=st.booleans())
    def use(self, name: str, is_background: bool) -> None:
        try:
            running = self.world.of[name].answerer()
            running.begin_use(is_background=is_background)
        except ModelAway:
            return
        self.used.append(partial(running.end_use, is_background=is_background))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))()

    @rule(name=names, timeout_s=st.sampled_from([None, 5.0]))
    def unload(self, name: str, timeout_s: float | None) -> None:
        self.is_ended_by_force |= timeout_s is not None
        self.unloads.append(self.world.deployment.unload(self.world.of[name], timeout_s))

    @rule(name=names)
    def break_next_load(self, name: str) -> None:
        self.world.errors[name] = ModelError("broken")

    @rule(seconds=st.sampled_from([0, 1, 4, 11, 40]))
    def tend(self, seconds: int) -> None:
        self.world.clock.advance(seconds * 10**9)
        self.world.deployment.tend()

    @invariant()
    def memory_is_promised_once(self) -> None:
        world = self.world
        held = sum(SIZES[one.name] for one in world.deployment.served if one.running is not None)
        assert world.memory.left_bytes() == BUDGET_BYTES - held >= 0
        for one in world.deployment.served:
            assert (one.running is not None) == (one.state in (ModelState.LOADED, ModelState.LEAVING))

    @invariant()
    def nobody_loses_a_model_in_use(self) -> None:
        if not self.is_ended_by_force:
            assert all(num_users == 0 for _, num_users in self.world.closed)

    def teardown(self) -> None:
        """When all users go and time passes, every wait ends."""
        for end_use in self.used:
            end_use()
        for _ in range(4 * len(NAMES)):
            self.world.deployment.tend()
            self.world.clock.advance(RETRY_NS + MIN_STAY_NS)
        assert all(future.done() for future in (*self.waiting, *self.unloads))
        self.world.deployment.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
