"""The models that leave for another one: always enough, never one that stays, never one too many."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.deploy.room import LOADS_PER_STAY, MAX_STAY_NS, MIN_STAY_NS, Tenancy, leavers, room_at_ns

NOW_NS = 100 * MIN_STAY_NS


@st.composite
def tenancies(draw: st.DrawFn) -> list[Tenancy]:
    found = []
    for index in range(draw(st.integers(0, 6))):
        loaded_ns = NOW_NS - draw(st.integers(0, 3 * MIN_STAY_NS))
        found.append(
            Tenancy(
                name=f"model {index}",
                num_bytes=draw(st.integers(1, 5)),
                is_used=draw(st.booleans()),
                was_used=draw(st.booleans()),
                used_ns=draw(st.integers(loaded_ns, NOW_NS)),
                loaded_ns=loaded_ns,
                load_ns=draw(st.integers(0, 3 * MIN_STAY_NS // LOADS_PER_STAY)),
                is_kept=draw(st.booleans()),
            )
        )
    return found


@given(loaded=tenancies(), lacking_bytes=st.integers(1, 20))
def test_those_that_leave_make_enough_room_and_none_leaves_in_vain(loaded: list[Tenancy], lacking_bytes: int) -> None:
    chosen = leavers(lacking_bytes, loaded, NOW_NS)
    by_name = {one.name: one for one in loaded}
    may_leave = [one for one in loaded if not one.is_kept and one.stays_until_ns <= NOW_NS]
    if isinstance(chosen, tuple):
        leaving = [by_name[name] for name in chosen]
        freed_bytes = sum(one.num_bytes for one in leaving)
        assert freed_bytes >= lacking_bytes
        assert all(one in may_leave for one in leaving)
        assert all(freed_bytes - one.num_bytes < lacking_bytes for one in leaving), "each of them is needed"
    else:
        assert sum(one.num_bytes for one in may_leave) < lacking_bytes
        later_ns = [one.stays_until_ns for one in loaded if not one.is_kept and one not in may_leave]
        assert chosen == min(later_ns, default=None), "the next instant at which there is another choice"
    assert chosen == leavers(lacking_bytes, loaded[::-1], NOW_NS), "the order of the models does not matter"


def tenancy(name: str, num_bytes: int = 1, *, is_used: bool = False, used_s: float = 0.0, loaded_s: float = 0.0) -> Tenancy:
    """A model that was loaded and used so many seconds ago."""
    return Tenancy(
        name=name,
        num_bytes=num_bytes,
        is_used=is_used,
        was_used=True,
        used_ns=NOW_NS - int(used_s * 1e9),
        loaded_ns=NOW_NS - int(loaded_s * 1e9),
        load_ns=1,
    )


def test_the_one_that_was_used_longest_ago_leaves_and_one_in_use_only_when_it_must() -> None:
    loaded = [
        tenancy("busy", is_used=True, loaded_s=1000),
        tenancy("old", used_s=50, loaded_s=60),
        tenancy("older", used_s=70, loaded_s=80),
    ]
    assert leavers(1, loaded, NOW_NS) == ("older",)
    assert leavers(2, loaded, NOW_NS) == ("older", "old")
    assert leavers(3, loaded, NOW_NS) == ("older", "old", "busy")
    assert leavers(4, loaded, NOW_NS) is None


def test_of_models_in_use_the_one_that_came_first_leaves_after_its_stay() -> None:
    loaded = [tenancy("one", is_used=True, loaded_s=30), tenancy("two", is_used=True, loaded_s=40)]
    assert leavers(1, loaded, NOW_NS) == ("two",)
    young = [tenancy("young", is_used=True, loaded_s=4)]
    assert leavers(1, young, NOW_NS) == NOW_NS + 6_000_000_000


def test_small_ones_stay_if_a_large_one_has_to_leave_anyway() -> None:
    loaded = [tenancy("small", 1, used_s=9), tenancy("large", 5, used_s=1)]
    assert leavers(4, loaded, NOW_NS) == ("large",)


def test_a_slow_load_keeps_nobody_out_for_long() -> None:
    slow = replace(tenancy("slow", is_used=True), load_ns=10 * MAX_STAY_NS)
    assert leavers(1, [slow], NOW_NS) == NOW_NS + MAX_STAY_NS


@given(loaded=tenancies(), lacking_bytes=st.integers(-3, 20))
def test_the_instant_that_is_told_is_one_at_which_there_is_room(loaded: list[Tenancy], lacking_bytes: int) -> None:
    at_ns = room_at_ns(lacking_bytes, loaded, NOW_NS)
    movable_bytes = sum(one.num_bytes for one in loaded if not one.is_kept)
    if 0 < lacking_bytes <= movable_bytes:
        assert isinstance(leavers(lacking_bytes, loaded, at_ns), tuple)
        assert at_ns == NOW_NS or not isinstance(leavers(lacking_bytes, loaded, at_ns - 1), tuple)
