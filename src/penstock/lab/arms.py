"""The arms of an A/B test side by side: reads the recording of a server that made one, and compares the two. Called by
`penstock bench compare --arms`; measures nothing.

compare_arms       recording -> ArmsCompared: ends, and the latencies as two results are compared
sections_of_arms   ArmsCompared -> what the report shows

Latencies are the server's own: from the arrival of a call, as the server had read it, to its tokens. The two arms were served
at the same time, so what other work the machine had is in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from penstock.lab.compare import Compared, compare_results
from penstock.lab.figures import Samples
from penstock.lab.intervals import LEVEL, Estimate, share_estimate
from penstock.lab.recording import Arrival, AtDoor, Departure, Lost, Recording, RecordingError, StepDone
from penstock.lab.records import End, Record
from penstock.lab.report import Cell, Section, Table, sections_of_compared
from penstock.lab.results import Result, Run, Target
from penstock.types.errors import counted
from penstock.types.request import ARM_A, ARM_B, FinishReason

ENDS = ("answered", "refused", "timed out", "cancelled", "failed")
_RECORD_ENDS = {"answered": End.OK, "refused": End.REFUSED, "cancelled": End.CANCELLED}
"""A timed-out request is a failed one there."""


@dataclass(slots=True)
class Arm:
    """The requests of one arm that ended, and the calls that the door refused, as they came."""

    name: str
    records: list[Record] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """One of `ENDS` for each record."""
    num_open: int = 0
    """Requests that had not ended when the recording did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsCompared:
    """The share of requests that ended in one way, of all that ended in each arm."""

    end: str
    counts: tuple[int, int]
    shares: tuple[Estimate, Estimate]
    difference: Estimate
    """Share in arm B less share in arm A, with the interval of this figure alone."""

    @property
    def is_more_than_noise(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and not low <= 0 <= high

    def is_worse(self, by: float) -> bool:
        """Whether arm B answers fewer, by more than this share of what arm A answers, and that is more than noise."""
        return self.end == "answered" and self.is_more_than_noise and -self.difference.value > by * self.shares[0].value

    @property
    def words(self) -> str:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None:
            return "too few requests to say"
        value, *ends = (f"{100 * share:+.{2 if abs(share) < 0.995 else 3}g}" for share in (self.difference.value, low, high))
        shown = f"{value} points [{ends[0]}, {ends[1]}]"
        return shown if self.is_more_than_noise else f"no difference that shows: {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsCompared:
    differences: Mapping[str, tuple[object, object]]
    """Setting -> its value in arm A, and in arm B."""
    arms: tuple[Arm, Arm]
    ends: Sequence[EndsCompared]
    compared: Compared | None
    """Latencies of requests that were answered; None if an arm has no request."""
    warnings: Sequence[str]


def compare_arms(recording: Recording) -> ArmsCompared:
    """The two arms of the test that a recording has. Raises RecordingError if it has none."""
    about = recording.header.arms
    if about is None:
        remedy = "Record one with `penstock serve --ab FILE --record FILE`."
        raise RecordingError("The recording has no A/B test.", remedy=remedy)
    (a, b), num_lost = _read(recording)
    is_by_chance = not about["tenants"]
    has_both = bool(a.records and b.records)
    compared = None
    if has_both:
        results = [_result(arm, recording) for arm in (a, b)]
        [found] = compare_results(results[0], [results[1]], has_rates=False)
        compared = replace(found, notes=())
    return ArmsCompared(
        differences=about["differences"],
        arms=(a, b),
        ends=list(_ends(a, b, is_by_chance=is_by_chance)) if has_both else (),
        compared=compared,
        warnings=list(_warnings(about, (a, b), num_lost, recording.header.part)),
    )


def _read(recording: Recording) -> tuple[tuple[Arm, Arm], int]:
    """The arms, and the number of reports that are missing."""
    arms = {ARM_A: Arm(ARM_A), ARM_B: Arm(ARM_B)}
    open_requests: dict[int, tuple[str, Record]] = {}
    unstarted: dict[int, Record] = {}
    """Requests whose first step is still to come. One whose begin is lost is none: nobody knows when it left the queue."""
    num_lost = num_read = 0
    for event in recording.events():
        match event:
            case Arrival(arm=arm) if arm in arms and event.id not in open_requests:
                record = Record(
                    index=num_read,
                    intended_ns=event.arrival_ns,
                    sent_ns=event.arrival_ns,
                    num_prompt_tokens=event.num_prompt_tokens,
                    tenant=event.tenant,
                )
                open_requests[event.id] = arm, record
                if not event.is_repeated:
                    unstarted[event.id] = record
                num_read += 1
            case StepDone():
                for row in event.rows:
                    if started := unstarted.pop(row.id, None):
                        started.queue_ns = event.planned_ns - started.intended_ns
            case Departure() if event.id in open_requests:
                arm, record = open_requests.pop(event.id)
                unstarted.pop(event.id, None)
                record.first_ns, record.ended_ns = event.first_token_ns, event.at_ns
                record.num_cached_tokens, record.num_output_tokens = event.num_cached_tokens, event.num_output_tokens
                _add(arms[arm], record, _end_of(event), event.reject_reason)
            case AtDoor(arm=arm) if arm in arms:
                record = Record(index=num_read, intended_ns=event.at_ns, sent_ns=event.at_ns, ended_ns=event.at_ns)
                record.tenant = event.tenant
                num_read += 1
                _add(arms[arm], record, "refused", event.reject_reason)
            case Lost():
                num_lost += event.count
    for arm, _ in open_requests.values():
        arms[arm].num_open += 1
    return (arms[ARM_A], arms[ARM_B]), num_lost


def _end_of(departure: Departure) -> str:
    if departure.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return "answered"
    if departure.reason is FinishReason.REJECTED:
        return "refused"
    if departure.reason is FinishReason.ERROR:
        return "failed"
    return "timed out" if departure.reject_reason else "cancelled"


def _add(arm: Arm, record: Record, end: str, reason: str) -> None:
    record.end = _RECORD_ENDS.get(end, End.FAILED)
    record.error = reason or ("" if record.end in (End.OK, End.CANCELLED) else end)
    arm.records.append(record)
    arm.ends.append(end)


def _result(arm: Arm, recording: Recording) -> Result:
    header = recording.header
    run = Run(workload=f"recording {header.recording}", target=Target(model=header.model), samples=Samples.of(arm.records))
    return Result(runs=[run])


def _ends(a: Arm, b: Arm, *, is_by_chance: bool) -> Iterator[EndsCompared]:
    share = _share_by_chance if is_by_chance else _share
    for end in ENDS:
        counts = (a.ends.count(end), b.ends.count(end))
        if any(counts):
            shares = (share(a, end), share(b, end))
            yield EndsCompared(end=end, counts=counts, shares=shares, difference=_difference(*shares))


def _share_by_chance(arm: Arm, end: str) -> Estimate:
    """The share has E. B. Wilson's interval (JASA 22, 1927). Requests were put into arms by chance, so that an hour in which
    many are refused is in both, and tells no arm from the other.
    """
    of, share, z = len(arm.ends), arm.ends.count(end) / len(arm.ends), NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def _share(arm: Arm, end: str) -> Estimate:
    """The share has an interval that knows that requests close in time are alike."""
    order = sorted(range(len(arm.records)), key=lambda i: (arm.records[i].intended_ns, arm.records[i].index))
    holds = np.array([arm.ends[i] == end for i in order], np.bool_)
    lasted = np.array([arm.records[i].ended_ns - arm.records[i].intended_ns for i in order], np.float64)
    return share_estimate(holds, lasted)


def _difference(a: Estimate, b: Estimate) -> Estimate:
    """`b` less `a`, with the interval that follows from theirs (method 10 of R. G. Newcombe, Stat. Med. 17, 1998)."""
    value = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    low = value - math.hypot(b.value - b.low, a.high - a.value)
    return Estimate(value, low, value + math.hypot(b.high - b.value, a.value - a.low))


def _warnings(about: Mapping[str, object], arms: tuple[Arm, Arm], num_lost: int, num_parts_lost: int) -> Iterator[str]:
    yield "Both arms share one queue, one KV cache and the steps: what one arm uses, the other waits for."
    if about["tenants"]:
        yield "The arms are different tenants: what differs may be their traffic, and not the settings."
    elif about["by"] == "user":
        yield "Arms were drawn by user. The intervals take requests for independent: with few users they are too narrow."
    for arm in arms:
        if not arm.records:
            yield f"No request of arm {arm.name} ended, so nothing is compared."
        if arm.num_open:
            yield f"In arm {arm.name}, {counted(arm.num_open, 'request')} had not ended, and is left out."
    if num_parts_lost:
        yield f"The begin of the recording is lost ({counted(num_parts_lost, 'part')}): only what came later is compared."
    if num_lost:
        yield f"The recording lacks {counted(num_lost, 'report')}."


def sections_of_arms(arms: ArmsCompared) -> Iterator[Section]:
    """Ends first, then latencies."""
    rows = [(Cell(key), Cell(_shown(a)), Cell(_shown(b))) for key, (a, b) in arms.differences.items()]
    settings = Table(("setting", "arm A", "arm B"), rows)
    sizes = [counted(len(arm.records), "request") for arm in arms.arms]
    yield Section("A/B test", [f"Arm A: {sizes[0]}. Arm B: {sizes[1]}."], [settings], arms.warnings)
    if arms.ends:
        yield Section(
            "How requests ended",
            ["Of all that ended in each arm, those refused at the door included. In square brackets are plain 95 % intervals."],
            [
                Table(
                    ("end", "arm A", "arm B", "B less A"),
                    [(Cell(one.end), *(_cell(one, i) for i in (0, 1)), Cell(one.words)) for one in arms.ends],
                    words_last=True,
                )
            ],
        )
    if arms.compared is not None:
        heads = (f"arm {ARM_A}", f"arm {ARM_B}")
        yield from sections_of_compared(arms.compared, "the server's settings", "the settings of the test", heads)


def _cell(one: EndsCompared, side: int) -> Cell:
    return Cell(f"{one.counts[side]} ({100 * one.shares[side].value:.1f} %)")


def _shown(value: object) -> str:
    return "default" if value is None else str(value)
