"""The recorder writes what happened and nothing that was said, within its bounds, and never in the engine's way."""

from __future__ import annotations

import json
import os
import random
import stat
import threading
from collections import defaultdict
from dataclasses import asdict, replace
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.lab.perfetto import write_trace
from penstock.lab.profiling import recording_lines
from penstock.lab.recording import (
    Arrival,
    Departure,
    Lost,
    RecordingError,
    Restart,
    Row,
    StepDone,
    is_recording,
    open_recording,
)
from penstock.lab.steps import steps_of
from penstock.obs import recording
from penstock.obs.recording import NUM_PARTS, PrefixIds, Recorder, check_path, part_path
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.driver import Driver
from penstock.types.errors import ConfigError
from penstock.types.events import Add
from penstock.types.plan import Capacity, PaddingId, RowPlan
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats
from support.half_right import HalfRight
from support.strategies import MODEL

CAPACITY = Capacity(num_blocks=65, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=64)
ABOUT = {
    "model": "hash",
    "machine": {},
    "config": "",
    "settings": {},
    "capacity": asdict(CAPACITY),
    "depth": 1,
}


def make_recorder(path: Path, **fields: Any) -> Recorder:
    fields = {"max_bytes": 1 << 30, "clock": VirtualClock(), "block_size": 4, "about": ABOUT} | fields
    return Recorder(path, **fields)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step_stats(step_id: int, rows: list[RowPlan], at_ns: int = 0) -> StepStats:
    return StepStats(step_id, at_ns, at_ns + 5, 1, 0, 64, 60, 2, parts_ns={"execute": 4}, planned_ns=at_ns, rows=rows)


def ended(request_id: str, at_ns: int = 9, **fields: Any) -> RequestStats:
    values = {"tenant": "", "arrival_ns": 0, "first_scheduled_ns": 1, "first_token_ns": 5, "num_prompt_tokens": 8}
    values |= {"num_cached_tokens": 0, "num_generated_tokens": 0, "num_preemptions": 0, "finish_reason": FinishReason.ABORT}
    return RequestStats(request_id=request_id, ended_ns=at_ns, **(values | fields))


def serve(recorder: Recorder, requests: list[Any], policies: Policies | None = None, capacity: Capacity = CAPACITY) -> None:
    """With a real core, a step after another."""
    core = make_core(capacity, policies, journal=recorder)
    driver = Driver(core, HashExecutor(capacity, model=MODEL))
    driver.stepper._turn_observer = recorder
    driver.turn(*map(Add, requests))
    while core.has_work:
        driver.turn()


def test_blocks_of_a_request_that_begins_and_ends_in_one_step_are_told(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    serve(recorder, [make_request("short", 9, max_tokens=1)])
    recorder.close()
    (step,) = [line for line in lines_of(tmp_path / "r") if line["kind"] == "step"]
    assert step["held"] == 3
    assert sum(step["state"][2:]) == CAPACITY.num_blocks - 1, "none is held afterwards"


def test_positions_that_several_requests_hold_are_told(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    prompt = [*range(10, 20)]
    serve(recorder, [make_request(name, [*prompt, idx], max_tokens=4) for idx, name in enumerate("abc")])
    recorder.close()
    steps = [*open_recording(tmp_path / "r").steps()]
    assert max(step.shape.num_repeated for step in steps) == 2 * 8, "two of three requests read two blocks again"
    assert [step.num_repeated for step in steps if len(step.rows) == 1] == [0], "the first"


# ids of prefixes


def rebuilt(told: list[list[int | list[int]]], lens: list[int], block_size: int) -> list[list[tuple[int, int]]]:
    """Stand-ins for the tokens of texts, of the ids of their blocks alone."""
    known: dict[int, list[tuple[int, int]]] = {}
    texts = []
    for blocks, length in zip(told, lens, strict=True):
        text: list[tuple[int, int]] = []
        for idx, block in enumerate(blocks):
            number, like, num_like = block if isinstance(block, list) else (block, 0, 0)
            size = min(block_size, length - idx * block_size)
            if number not in known:
                known[number] = known[like][:num_like] if num_like else []
                known[number] += [(number, pos) for pos in range(len(known[number]), size)]
            text += known[number]
        texts.append(text)
    return texts


def common(one: list[Any], other: list[Any]) -> int:
    return next((idx for idx, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_ids_tell_to_the_token_how_far_texts_are_alike() -> None:
    rng = random.Random(2)
    texts: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(texts)[: rng.randrange(1, 30)] if texts and rng.random() < 0.8 else []
        texts.append(base + [rng.randrange(5, 9) for _ in range(rng.randrange(1, 20))])
    ids = PrefixIds(4)
    told = [ids.chain(ids.root(b""), text)[0] for text in texts]
    stand_ins = rebuilt(told, [len(text) for text in texts], 4)
    for idx, text in enumerate(texts):
        assert len(stand_ins[idx]) == len(text)
        longest = max((common(text, other) for other in texts[:idx]), default=0)
        assert max((common(stand_ins[idx], other) for other in stand_ins[:idx]), default=0) == longest
        for earlier in range(idx):
            assert common(stand_ins[idx], stand_ins[earlier]) == common(text, texts[earlier])


def test_another_salt_has_other_ids() -> None:
    ids = PrefixIds(4)
    one, two = (ids.chain(ids.root(salt), range(8))[0] for salt in (b"", b"x"))
    assert not {*one} & {*two}
    assert ids.chain(ids.root(b"x"), range(8))[0] == two


def test_few_blocks_are_remembered() -> None:
    ids = PrefixIds(1, max_blocks=100)
    first, _ = ids.chain(ids.root(b""), range(100, 110))
    for start in range(1000, 5000, 10):
        ids.chain(ids.root(b""), range(start, start + 10))
    assert len(ids._young) + len(ids._old) <= 100
    again, _ = ids.chain(ids.root(b""), range(100, 110))
    assert first[0] != again[0], "it was forgotten, so it looks new"


# what the file says


def test_the_reader_finds_what_happened(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    requests = [make_request(f"id{idx}", 9 + idx, max_tokens=3 + idx, tenant="ab"[idx % 2], priority=idx) for idx in range(6)]
    serve(recorder, requests)
    recorder.close()
    found = open_recording(tmp_path / "r").requests()
    assert [one.arrival.num_prompt_tokens for one in found] == [9, 10, 11, 12, 13, 14]
    assert [one.arrival.max_tokens for one in found] == [3, 4, 5, 6, 7, 8]
    assert [one.arrival.tenant for one in found] == ["0", "1"] * 3
    assert [one.arrival.priority for one in found] == [0, 1, 2, 3, 4, 5]
    for one in found:
        assert one.departure is not None
        assert (one.departure.reason, one.departure.num_output_tokens) == (FinishReason.LENGTH, one.arrival.max_tokens)
    assert len({one.arrival.blocks[0].id for one in found}) == 1, "they begin alike"
    rows: defaultdict[int, list[Row]] = defaultdict(list)
    for step in open_recording(tmp_path / "r").steps():
        assert {*step.parts_ns} >= {"schedule", "execute", "commit", "output"}
        for row in step.rows:
            rows[row.id].append(row)
    for one in found:
        own = rows[one.arrival.id]
        assert own[-1].context_len + own[-1].query_len == one.arrival.num_prompt_tokens + one.arrival.max_tokens - 1
        assert all(after.context_len == row.context_len + row.query_len for row, after in pairwise(own))


def test_nothing_that_was_said_is_in_the_file(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    prompt = [987_601, 987_602, 987_603, 987_604, 987_605]
    request = make_request("secret-id", prompt, tenant="secret-tenant", cache_salt=b"secret-salt")
    recorder.on_queued(request, 0)
    request.output_token_ids.append(987_606)
    recorder.on_finish(ended("secret-id", num_generated_tokens=1))
    recorder.close()
    text = (tmp_path / "r").read_text()
    assert "secret" not in text
    assert "9876" not in text


def test_names_of_tenants_if_they_are_asked_for(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r", has_tenant_names=True)
    recorder.on_queued(make_request("a", tenant="acme"), 0)
    recorder.close()
    (event,) = open_recording(tmp_path / "r").events()
    assert isinstance(event, Arrival)
    assert event.tenant == "acme"


def test_rows_that_go_on_are_told_by_their_number_alone(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    for name in "ab":
        recorder.on_queued(make_request(name), 0)
    plans = [
        [RowPlan("a", 0, 8, (), 1), RowPlan("b", 0, 4, (), 0)],
        [RowPlan("a", 8, 1, (), 1), RowPlan("b", 4, 4, (), 1)],
        [RowPlan("a", 9, 1, (), 1), RowPlan("b", 8, 1, (), 1), RowPlan(PaddingId("p"), 3, 1, (), 1)],
        [RowPlan("b", 9, 1, (), 1), RowPlan("a", 4, 1, (), 1)],  # after a preemption
        [RowPlan("b", 10, 1, (), 2), RowPlan("a", 5, 1, (), 1)],
    ]
    for idx, rows in enumerate(plans):
        recorder.on_step(step_stats(idx, rows, idx * 10))
        recorder.on_turn({"schedule": 1})
    recorder.close()
    on = [line.get("on") for line in lines_of(tmp_path / "r") if line["kind"] == "step"]
    assert on == [None, [1], [1, 2], [2], None]
    steps = open_recording(tmp_path / "r").steps()
    numbers = {"a": 1, "b": 2, "p": -1}
    for step, rows in zip(steps, plans, strict=True):
        assert step.rows == tuple(Row(numbers[row.request_id[:]], row.query_len, row.context_len, row.samples) for row in rows)


def test_how_many_guesses_were_right_is_told(tmp_path: Path) -> None:
    capacity = replace(CAPACITY, max_step_tokens=32, max_scored=16, checks_guesses=True)
    policies = make_policies(guesser=HalfRight(MODEL, capacity))
    recorder = make_recorder(tmp_path / "r")
    serve(recorder, [make_request(f"id{idx}", 9 + idx, max_tokens=30) for idx in range(3)], policies, capacity)
    recorder.close()
    recording = open_recording(tmp_path / "r")
    rows: defaultdict[int, list[Row]] = defaultdict(list)
    for step in recording.steps():
        assert step.shape.num_samples == sum(row.samples for row in step.rows)
        for row in step.rows:
            rows[row.id].append(row)
    for own in rows.values():
        assert sum(1 + row.num_accepted for row in own if row.samples) == 30
        decodes = list(dropwhile(lambda row: row.query_len > row.samples, own))
        assert all(row.query_len <= row.samples for row in decodes)
        assert all(after.context_len == row.context_len + 1 + row.num_accepted for row, after in pairwise(decodes))
    every = [row for own in rows.values() for row in own if row.samples > 1]
    assert {row.num_accepted == row.samples - 1 for row in every} == {True, False}
    num_guesses, num_right = sum(row.samples - 1 for row in every), sum(row.num_accepted for row in every)
    assert any(f"are guesses, {num_right / num_guesses:.1%} of them right" in line for line in recording_lines(recording))
    write_trace(recording, tmp_path / "t")
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    begun = [event["name"] for event in events if event["ph"] == "b" and event["id"] == "1"]
    assert begun == ["request", "waits", "prefill", "decodes"]
    assert any("guesses" in event["name"] for event in events)


def test_the_time_of_a_small_model_is_the_hosts(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    stats = step_stats(0, [RowPlan("a", 0, 8, (), 1)])
    recorder.on_step(replace(stats, started_ns=0, planned_ns=0, ended_ns=80, parts_ns={"execute": 50, "linear": 40}))
    recorder.on_turn({"schedule": 10, "commit": 5, "draft": 20})
    recorder.on_step(step_stats(1, [RowPlan("a", 8, 1, (), 1)], 95))
    recorder.on_turn({"schedule": 1})
    recorder.close()
    recording = open_recording(tmp_path / "r")
    shares = [line.split()[:2] for line in list(recording_lines(recording))[-6:]]
    assert shares == [
        ["execute", "54.0%"],
        ["linear", "40.0%"],
        ["schedule", "11.0%"],
        ["draft", "20.0%"],
        ["commit", "5.0%"],
        ["other", "10.0%"],
    ]
    step, _ = steps_of(recording)
    assert step.parts_ns == {"linear": 40}
    write_trace(recording, tmp_path / "t")
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    slices = [(event["name"], event["ts"] * 1000, event["dur"] * 1000) for event in events if event["ph"] == "X"]
    assert slices[1:4] == [("schedule", 0, 10), ("draft", 10, 20), ("commit", 80, 5)]


def test_masks_beside_a_step_leave_the_idle_time_as_it_is(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    for step_id, at_ns in enumerate((0, 100, 400)):  # between the last two, nothing runs for 200 ns
        stats = step_stats(step_id, [RowPlan("a", step_id, 1, (), 1)], at_ns)
        recorder.on_step(replace(stats, ended_ns=at_ns + 95, parts_ns={"execute": 90}))
        recorder.on_turn({"schedule": 5, "commit": 5, "grammar": 80, "output": 10})
    recorder.close()
    *_, grammar, output, other = recording_lines(open_recording(tmp_path / "r"))
    assert grammar.split() == ["grammar", "48.5%", "may", "overlap", "execute"]
    assert output.split()[2:] == ["may", "overlap", "execute"]
    assert other.split()[:2] == ["other", "22.2%"], "205 ns less the parts that may have run in them"


def test_ends_come_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    for name in "abc":
        recorder.on_queued(make_request(name), 0)
    recorder.on_finish(ended("a", 5))
    recorder.on_step(step_stats(0, [RowPlan("b", 0, 8, (), 1)]))
    recorder.on_finish(ended("b", 5))
    recorder.on_turn({"schedule": 1})
    recorder.on_finish(ended("c", 6))
    recorder.on_finish(ended("refused", 7, finish_reason=FinishReason.REJECTED, reject_reason="never_fits"))
    recorder.close()
    *_, refused = events = [event for event in open_recording(tmp_path / "r").events() if not isinstance(event, Arrival)]
    assert [event.id if isinstance(event, Departure) else type(event) for event in events] == [1, StepDone, 2, 3, 4]
    assert isinstance(refused, Departure)
    assert refused.reject_reason == "never_fits"


def test_a_new_engine_is_told(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    recorder.on_step(step_stats(0, []))
    recorder.on_engine()
    recorder.close()
    assert [type(event) for event in open_recording(tmp_path / "r").events()] == [StepDone, Restart]


# bounds


def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(tmp_path / "r", max_queued_rows=0)
    serve(recorder, [make_request("a", max_tokens=2)])
    recorder.close()
    (lost,) = open_recording(tmp_path / "r").events()
    assert isinstance(lost, Lost)
    assert lost.count == recorder.num_lost == 6  # it came, two steps with their turns, it ended
    assert lines_of(tmp_path / "r")[-1] == {"kind": "close", "lost": 6}
    assert "the recording misses 6 reports in all" in caplog.text


def test_parts_are_turned_over_within_the_size(tmp_path: Path) -> None:
    path = tmp_path / "r"
    max_bytes = NUM_PARTS * (recording.LINE_BYTES + 4000)
    recorder = make_recorder(path, max_bytes=max_bytes)
    recorder.on_queued(make_request("stays", 40), 0)
    for idx in range(1500):
        recorder.on_step(step_stats(idx, [RowPlan("stays", idx + 1, 1, (), 1)], idx * 10))
        recorder.on_turn({"schedule": 1})
    recorder.close()
    parts = [part_path(path, idx) for idx in range(NUM_PARTS)]
    assert sorted(tmp_path.iterdir()) == sorted(parts)
    assert sum(part.stat().st_size for part in parts) < max_bytes
    found = open_recording(path)
    assert list(found.paths) == parts[::-1]
    assert found.header.part > 0
    steps = list(found.steps())
    first = steps[0].step_id
    assert [step.step_id for step in steps] == list(range(first, 1500))
    assert [step.rows for step in steps] == [(Row(1, 1, idx + 1, 1),) for idx in range(first, 1500)]
    (request,) = found.requests()
    assert request.arrival.is_repeated, "each part says of whom it speaks"
    assert len(list(open_recording(part_path(path, 2)).steps())) < len(steps), "an older part ends where it ends"
    assert any(line.startswith("1 requests, 0 of them ended") for line in recording_lines(found))


def test_the_queue_is_bounded_by_rows_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "POLL_S", 1e6)  # the writer sleeps until the end
    recorder = make_recorder(tmp_path / "r", max_queued_rows=100)
    rows = [RowPlan("a", 0, 1, (), 1)] * 40
    for idx in range(5):
        recorder.on_step(step_stats(idx, rows))
    assert (len(recorder._queue), recorder.num_lost) == (3, 2)
    recorder._settle()
    for idx in range(5):
        recorder.on_queued(make_request(f"b{idx}", 160), 0)
    assert (len(recorder._queue), recorder.num_lost) == (3, 4), "the writer took the first three"
    recorder.close()


def test_a_request_whose_end_is_lost_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "POLL_S", 1e6)
    recorder = make_recorder(tmp_path / "r", max_queued_rows=100)
    writer = recorder._writer
    recorder.on_queued(make_request("a"), 0)
    recorder.on_step(step_stats(0, [RowPlan("a", 0, 1, (), 1)] * 100))
    recorder.on_queued(make_request("b"), 0)
    recorder.on_finish(ended("a", 5))
    recorder._settle()
    assert (writer._lives, writer._numbers) == ({}, {})
    recorder.on_step(step_stats(1, [RowPlan("b", 0, 1, (), 1)] * 100))
    recorder.on_finish(ended("b", 5))
    recorder._settle()
    assert (writer._lives, writer._numbers, len(recorder._lost_ends)) == ({}, {}, 0)
    assert recorder.num_lost == 3
    recorder.on_queued(make_request("hangs"), 0)
    recorder.on_engine()
    recorder._settle()
    assert (writer._lives, writer._numbers) == ({}, {})
    recorder.close()


def test_a_part_has_as_much_news_as_repetition(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = make_recorder(path, max_bytes=NUM_PARTS * (recording.LINE_BYTES + 4000))
    for idx in range(1000):  # their lines alone are more than a part
        recorder.on_queued(make_request(f"id{idx}", 8), 0)
    for idx in range(3000):
        recorder.on_step(step_stats(idx, [RowPlan("id1", idx + 1, 1, (), 1)], idx * 10))
        recorder.on_turn({"schedule": 1})
    recorder.close()
    assert part_path(path, 1).exists()
    for part in open_recording(path).paths[:-1]:
        lines = part.read_bytes().splitlines()
        num_old = sum(len(line) for line in lines if b'"again"' in line)
        assert sum(map(len, lines)) > 1.9 * num_old
    assert len(list(open_recording(path).steps())) == 3000, "nothing was dropped for repetitions"


@pytest.mark.parametrize("num_bytes", [0, 9])
def test_what_a_power_loss_left_of_a_beginning_is_taken(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "r"
    make_recorder(path).close()
    path.write_bytes(path.read_bytes()[:num_bytes])
    make_recorder(path).close()
    assert part_path(path, 1).stat().st_size == num_bytes
    assert len(open_recording(path).paths) == 1


def test_the_header_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "POLL_S", 1e6)
    recorder = make_recorder(tmp_path / "r")
    assert is_recording(tmp_path / "r")
    recorder.close()


def test_a_file_that_came_in_between_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r"
    recorder = make_recorder(path, max_bytes=NUM_PARTS * (recording.LINE_BYTES + 4000))
    part_path(path, 2).write_text("all I have\n")
    for idx in range(1500):
        recorder.on_step(step_stats(idx, [RowPlan("a", idx + 1, 1, (), 1)], idx * 10))
        recorder.on_turn({"schedule": 1})
    recorder.close()
    assert part_path(path, 2).read_text() == "all I have\n"
    assert "the recording ends here: " in caplog.text
    assert "r.2 is not a recording, so it is not overwritten" in caplog.text
    assert is_recording(path)
    assert not part_path(path, 1).exists()


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, write = threading.Event(), os.write

    def late(fd: int, data: bytes) -> int:
        hangs.wait()
        return write(fd, data)

    recorder = make_recorder(tmp_path / "r")
    monkeypatch.setattr(recording.os, "write", late)
    recorder.close(timeout_s=0.01)
    assert "the end of the recording is not written yet after 0.01 s" in caplog.text
    hangs.set()
    recorder.close()
    assert lines_of(tmp_path / "r")[-1]["kind"] == "close"


def test_a_recording_is_not_overwritten_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for _ in range(2):
        recorder = make_recorder(path)
        recorder.on_queued(make_request("a"), 0)
        recorder.close()
    assert is_recording(part_path(path, 1))
    assert len(open_recording(path).paths) == 1, "they are two recordings"


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        make_recorder(tmp_path / "r").close()
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_a_file_that_is_no_recording_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("all I have\n")
    with pytest.raises(ConfigError, match="is not a recording, so it is not overwritten"):
        make_recorder(path)
    assert path.read_text() == "all I have\n"
    older = part_path(tmp_path / "new", 2)
    older.write_text("{}")
    with pytest.raises(ConfigError, match=r"new\.2 is not a recording"):
        make_recorder(tmp_path / "new")


def test_other_paths_that_can_not_be_taken(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name, says in (("folder", "not a regular file"), ("link", "not a regular file"), ("a/b", "There is no folder")):
        with pytest.raises(ConfigError, match=says):
            check_path(tmp_path / name)


def test_two_servers_do_not_share_a_file(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "r")
    with pytest.raises(ConfigError, match="Another server writes its recording"):
        make_recorder(tmp_path / "r")
    recorder.close()
    make_recorder(tmp_path / "r").close()


def test_a_disk_that_is_full_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    recorder = make_recorder(tmp_path / "r")
    monkeypatch.setattr(recording.os, "write", write)
    serve(recorder, [make_request("a")])
    recorder.close()
    recorder.on_turn({})
    assert "the recording ends here, it can't be written: [Errno 28]" in caplog.text
    assert not recorder._queue
    monkeypatch.undo()
    make_recorder(tmp_path / "r").close()  # nobody holds the file


# damaged files


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = make_recorder(path)
    serve(recorder, [make_request("a")])
    recorder.close()
    whole = list(open_recording(path).events())
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'{"kind":"end"') + 9])
    assert list(open_recording(path).events()) == whole[:-1]


@pytest.mark.parametrize("line", ["{}", "[1]", '{"kind":"step"}', "nonsense", '{"kind":"end","id":1,"reason":"why"}'])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    make_recorder(path).close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordingError, match="line 3 is damaged"):
        list(open_recording(path).events())


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for text, says in (
        ("", "is not a recording"),
        ("[]\n", "is not a recording"),
        ('{"kind":"header","format":"penstock-recording","version":2}\n', "of version 2; this Penstock reads version 1"),
        ('{"kind":"header","format":"penstock-recording","version":1}\n', "the header lacks '"),
    ):
        path.write_text(text)
        with pytest.raises(RecordingError, match=says):
            open_recording(path)
    with pytest.raises(RecordingError, match="can't be read"):
        open_recording(tmp_path / "absent")
