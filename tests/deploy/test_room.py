"""The models that leave for another one: always enough, never one that stays, never one too many."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from penstock.deploy.resources import MemoryShare
from penstock.deploy.room import LOADS_PER_STAY, MAX_STAY_NS, MIN_STAY_NS, leavers, room_at_ns
from penstock.deploy.running import ModelState, ServedModel, Uses

NOW_NS = 100 * MIN_STAY_NS


def model(
    name: str,
    num_bytes: int = 1,
    *,
    is_used: bool = False,
    was_used: bool = True,
    used_s: float = 0.0,
    loaded_s: float = 0.0,
) -> ServedModel:
    """A model that was loaded and used so many seconds ago."""
    one = ServedModel(names=(name,), metrics=SimpleNamespace(), load=lambda: None, plan=lambda: None)
    one.state, one.loaded_ns, one.load_ns = ModelState.LOADED, NOW_NS - int(loaded_s * 1e9), 1
    one.share = MemoryShare(num_weight_bytes=num_bytes, num_reserve_bytes=0)
    uses = Uses(int(is_used), int(was_used), NOW_NS - int(used_s * 1e9))
    one.running = SimpleNamespace(uses=uses, people=uses)
    return one


def names(left: tuple[Sequence[ServedModel], int | None]) -> list[str]:
    return [one.name for one in left[0]]


@st.composite
def models(draw: st.DrawFn) -> list[ServedModel]:
    found = []
    for index in range(draw(st.integers(0, 6))):
        loaded_ns = NOW_NS - draw(st.integers(0, 3 * MIN_STAY_NS))
        one = model(f"model {index}", draw(st.integers(1, 5)), is_used=draw(st.booleans()), was_used=draw(st.booleans()))
        one.running.uses.used_ns = draw(st.integers(loaded_ns, NOW_NS))
        one.loaded_ns = loaded_ns
        one.load_ns = draw(st.integers(0, 3 * MIN_STAY_NS // LOADS_PER_STAY))
        one.is_kept = draw(st.booleans())
        found.append(one)
    return found


@given(loaded=models(), lacking_bytes=st.integers(1, 20))
def test_those_that_leave_make_enough_room_and_none_leaves_in_vain(loaded: list[ServedModel], lacking_bytes: int) -> None:
    chosen, retry_ns = leavers(lacking_bytes, loaded, NOW_NS)
    stays_ns = {one: room_at_ns(1, [one], 0) for one in loaded if not one.is_kept}
    may_leave = [one for one, until_ns in stays_ns.items() if until_ns <= NOW_NS]
    if chosen:
        freed_bytes = sum(one.num_bytes for one in chosen)
        assert freed_bytes >= lacking_bytes
        assert all(one in may_leave for one in chosen)
        assert all(freed_bytes - one.num_bytes < lacking_bytes for one in chosen), "each of them is needed"
    else:
        assert sum(one.num_bytes for one in may_leave) < lacking_bytes
        later_ns = [until_ns for until_ns in stays_ns.values() if until_ns > NOW_NS]
        assert retry_ns == min(later_ns, default=None), "the next instant at which there is another choice"
    assert (chosen, retry_ns) == leavers(lacking_bytes, loaded[::-1], NOW_NS), "the order of the models does not matter"


def test_the_one_that_was_used_longest_ago_leaves_and_one_in_use_only_when_it_must() -> None:
    loaded = [
        model("busy", is_used=True, loaded_s=1000),
        model("old", used_s=50, loaded_s=60),
        model("older", used_s=70, loaded_s=80),
    ]
    assert names(leavers(1, loaded, NOW_NS)) == ["older"]
    assert names(leavers(2, loaded, NOW_NS)) == ["older", "old"]
    assert names(leavers(3, loaded, NOW_NS)) == ["older", "old", "busy"]
    assert leavers(4, loaded, NOW_NS) == ((), None)


def test_of_models_in_use_the_one_that_came_first_leaves_after_its_stay() -> None:
    loaded = [model("one", is_used=True, loaded_s=30), model("two", is_used=True, loaded_s=40)]
    assert names(leavers(1, loaded, NOW_NS)) == ["two"]
    young = [model("young", is_used=True, loaded_s=4)]
    assert leavers(1, young, NOW_NS) == ((), NOW_NS + 6_000_000_000)


def test_small_ones_stay_if_a_large_one_has_to_leave_anyway() -> None:
    loaded = [model("small", 1, used_s=9), model("large", 5, used_s=1)]
    assert names(leavers(4, loaded, NOW_NS)) == ["large"]


def test_a_slow_load_keeps_nobody_out_for_long() -> None:
    slow = model("slow", is_used=True)
    slow.load_ns = 10 * MAX_STAY_NS
    assert leavers(1, [slow], NOW_NS) == ((), NOW_NS + MAX_STAY_NS)


@given(loaded=models(), lacking_bytes=st.integers(-3, 20))
def test_the_instant_that_is_told_is_one_at_which_there_is_room(loaded: list[ServedModel], lacking_bytes: int) -> None:
    at_ns = room_at_ns(lacking_bytes, loaded, NOW_NS)
    movable_bytes = sum(one.num_bytes for one in loaded if not one.is_kept)
    if 0 < lacking_bytes <= movable_bytes:
        assert leavers(lacking_bytes, loaded, at_ns)[0]
        assert at_ns == NOW_NS or not leavers(lacking_bytes, loaded, at_ns - 1)[0]
