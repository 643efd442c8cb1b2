"""Reads recordings of `serve --record` (docs/recording.md), for workloads, fits and profiles. `obs/recording.py` writes them.

The files of one recording are read as one stream of events, in the order in which they happened. A step happens when it
finishes: the end of a request that was cancelled while the step ran comes before the step, and the end of a request whose last
token the step computed comes after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.obs.recording import BEGINNING, FORMAT, NOBODY, VERSION, part_path
from penstock.types.adapter import BASE
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity, StepShape
from penstock.types.request import NO_WAITS, FinishReason, WaitTimes
from penstock.types.stats import WaitReason

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_PARTS = 64
MAX_LINE_BYTES = 64 << 20

_REASONS = {reason.name.lower(): reason for reason in FinishReason}


_LARGEST = 1 << 62
"""Larger numbers mean a damaged file: a century has fewer nanoseconds."""


class RecordingError(PenstockError):
    """Error for a file that is not a recording, or is damaged."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """Identity of the tokens in a KV block. Two blocks with equal ids have equal tokens, and so have all blocks before them."""

    id: int
    like: int = 0
    """Set where an id appears first: another block with the same first `num_like` tokens, or 0."""
    num_like: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    recording: str
    part: int
    """Number of this file in the recording. If above 0 in the oldest remaining file, earlier ones are lost."""
    began: str
    block_size: int
    capacity: Capacity
    depth: int
    model: str
    machine: Mapping[str, Any]
    config: str
    settings: Mapping[str, Any]
    """Settings of KV cache, scheduling and compute that differ from the defaults."""
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Event of a recording: a request was queued, or refused for good. Instants are nanoseconds from the recording's start."""

    id: int
    arrival_ns: int
    """When the server had read the request."""
    queued_ns: int | None
    """When the engine accepted the request, or None if it was refused."""
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    priority: int
    deadline_ns: int | None
    beam_width: int
    blocks: tuple[BlockId, ...]
    """Blocks of the prompt, the incomplete last one included. Empty if unknown."""
    is_repeated: bool
    """Whether an earlier file of the recording has this event, too. That file may be lost."""
    adapter: int = BASE
    """Number that identifies the LoRA adapter."""
    waits: WaitTimes = NO_WAITS
    """Waits before it was queued. Older recordings have neither this nor the next field."""
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    id: int
    at_ns: int
    reason: FinishReason
    is_by_text: bool
    """Whether a stop string ended the request. False for a stop token."""
    reject_reason: str
    first_token_ns: int | None
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    blocks: tuple[BlockId, ...]
    """Blocks of prompt and output, from the last full block of the prompt on."""


@dataclass(frozen=True, slots=True)
class Row:
    id: int
    query_len: int
    context_len: int
    samples: int
    num_accepted: int = 0
    """How many of its `samples - 1` guesses were right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    step_id: int
    planned_ns: int
    ended_ns: int
    rows: tuple[Row, ...]
    parts_ns: Mapping[str, int]
    """Part -> time: `execute`, its parts as the executor names them, and the engine's `schedule`, `commit`, `output`."""
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int | None = None
    num_repeated: int = 0  # as in `StepPlan`
    waited_ns: int = 0
    waits_for: WaitReason = WaitReason.NOTHING
    """The resource that the first waiting request lacked. Older recordings do not have it."""

    @property
    def shape(self) -> StepShape:
        rows = tuple([(row.query_len, row.context_len) for row in self.rows])
        return StepShape(rows, sum([row.samples for row in self.rows]), self.num_repeated)


@dataclass(frozen=True, slots=True)
class Lost:
    count: int


@dataclass(frozen=True, slots=True)
class Restart:
    pass


Event = Arrival | Departure | StepDone | Lost | Restart


@dataclass(slots=True)
class RecordedRequest:
    arrival: Arrival
    departure: Departure | None = None


@dataclass(slots=True)
class Recording:
    paths: Sequence[Path]
    header: Header

    def events(self) -> Iterator[Event]:
        """Yield the events of all files. Ignore an incomplete last line. Raises RecordingError, which names a damaged line."""
        for path in self.paths:
            yield from _Part(path).events()

    def steps(self) -> Iterator[StepDone]:
        return (event for event in self.events() if isinstance(event, StepDone))

    def requests(self) -> list[RecordedRequest]:
        requests: dict[int, RecordedRequest] = {}
        for event in self.events():
            if isinstance(event, Arrival):
                if event.id not in requests:
                    requests[event.id] = RecordedRequest(event)
            elif isinstance(event, Departure) and event.id in requests:
                requests[event.id].departure = event
        return list(requests.values())


_Parsed = TypeVar("_Parsed", bound="DataclassInstance")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _may_be_negative(name: str) -> bool:
    return name in ("id", "priority") or name.endswith("_ns")


_RULES: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_number,
    "int | None": lambda value: value is None or _is_number(value),
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "Mapping[str, int]": lambda value: all(map(_is_number, value.values())),
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
    "tuple[BlockId, ...]": lambda value: all(map(_checked, value)),
    "tuple[Row, ...]": lambda value: all(map(_checked, value)),
}


@cache
def _rules_of(kind: type[DataclassInstance]) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    return tuple((one.name, _RULES[str(one.type)]) for one in fields(kind) if str(one.type) in _RULES)


def _checked(parsed: _Parsed) -> _Parsed:
    """Return `parsed` unchanged if all of its fields have the right types. Raises ValueError, which names a wrong field."""
    for name, is_right in _rules_of(type(parsed)):
        value = getattr(parsed, name)
        if not is_right(value) and not (_may_be_negative(name) and type(value) is int and abs(value) < _LARGEST):
            raise ValueError(f"{name} is {str(value)[:80]}")
    return parsed


def is_recording(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def open_recording(path: Path) -> Recording:
    """Open a recording by the name of its newest file. Older files (FILE.1, FILE.2, ...) are read first, if they still exist.

    Raises RecordingError if the file is not a recording, or has another version.
    """
    newest = _read_header(path)
    parts = [(newest, path)]
    for idx in range(1, MAX_PARTS):
        older = part_path(path, idx)
        if not older.is_file() or not is_recording(older):
            break
        header = _read_header(older)
        if (header.recording, header.part) != (newest.recording, parts[-1][0].part - 1):
            break
        parts.append((header, older))
    parts.reverse()
    return Recording([part for _, part in parts], parts[0][0])


def _read_header(path: Path) -> Header:
    remedy = "Name a readable file that `penstock serve --record FILE` wrote."
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
    except OSError as error:
        raise RecordingError(f"{path} can't be read: {error.strerror or error}.", remedy=remedy) from None
    try:
        about = json.loads(first)
        if about["format"] != FORMAT:
            raise ValueError(about["format"])
        version = about["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RecordingError(f"{path} is not a recording.", remedy=remedy) from None
    if version != VERSION:
        detail = f"{path} is a recording of version {version}; this Penstock reads version {VERSION}."
        raise RecordingError(detail, remedy="Read it with the Penstock that wrote it.")
    try:
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in about["settings"].items()}
        known = {one.name for one in fields(Capacity)}
        capacity = Capacity(**{key: value for key, value in about["capacity"].items() if key in known})
        derived = {"capacity": capacity, "settings": settings, "about": about}
        header = Header(**{one.name: about[one.name] for one in fields(Header) if one.name not in derived}, **derived)
        _checked(_checked(header).capacity)
        if not header.block_size:
            raise ValueError("block_size is 0")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = "lacks" if isinstance(error, KeyError) else "is damaged:"
        raise RecordingError(f"{path}, line 1: the header {what} {error}.", remedy=remedy) from None
    return header


class _Part:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._contexts: dict[int, int] = {}
        """Request id -> the position after its last row."""
        self._part_names: tuple[str, ...] = ()

    def events(self) -> Iterator[Event]:
        with self._path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE_BYTES:
                        raise RecordingError(f"{self._path}, line {number} has more than {MAX_LINE_BYTES} bytes.")
                    return  # the server was killed while it wrote
                try:
                    event = self._event(json.loads(line))
                    if event is not None:
                        _checked(event)
                except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                    raise RecordingError(f"{self._path}, line {number} is damaged: {error!r}.") from None
                if event is not None:
                    yield event

    def _event(self, line: dict[str, Any]) -> Event | None:
        match line["kind"]:
            case "step":
                return self._step(line)
            case "request":
                return _arrival(line)
            case "end":
                return _departure(line)
            case "lost":
                return Lost(int(line["count"]))
            case "restart":
                self._contexts.clear()
                return Restart()
            case "parts":
                self._part_names = tuple(line["names"])
        return None  # the header, the end, and kinds of other versions

    def _step(self, line: dict[str, Any]) -> StepDone:
        contexts = self._contexts
        rows = [Row(number, 1, contexts[number], 1) for number in line.get("on", ())]
        accepted = iter(line.get("accepted", ()))
        rows += [Row(*row, *([next(accepted, 0)] if row[3] > 1 else [])) for row in line.get("rows", ())]
        for row in rows:
            if row.id != NOBODY:
                contexts[row.id] = row.context_len + row.query_len
        running, waiting, free, cached = line["state"]
        return StepDone(
            step_id=line["id"],
            planned_ns=line["at"],
            ended_ns=line["end"],
            rows=tuple(rows),
            parts_ns=dict(zip(self._part_names, line["parts"], strict=True)),
            num_running=running,
            num_waiting=waiting,
            num_blocks_free=free,
            num_blocks_cached=cached,
            num_blocks_held=line.get("held"),
            num_repeated=line.get("repeated", 0),
            waited_ns=line.get("waited", 0),
            waits_for=WaitReason(line.get("lacks", "")),
        )


def _arrival(line: dict[str, Any]) -> Arrival:
    return Arrival(
        id=line["id"],
        arrival_ns=line["arrival"],
        queued_ns=line.get("queued"),
        num_prompt_tokens=line["prompt"],
        max_tokens=line.get("max", 0),
        tenant=str(line["tenant"]),
        priority=line.get("priority", 0),
        deadline_ns=line.get("deadline"),
        beam_width=line.get("beams", 0),
        blocks=_blocks(line),
        is_repeated=line.get("again", False),
        adapter=line.get("adapter", BASE),
        waits=WaitTimes(**line.get("waits", {})),
        background=line.get("background", False),
    )


def _departure(line: dict[str, Any]) -> Departure:
    return Departure(
        id=line["id"],
        at_ns=line["at"],
        reason=_REASONS[line["reason"]],
        is_by_text=line.get("by") == "text",
        reject_reason=line.get("why", ""),
        first_token_ns=line["first"],
        num_output_tokens=line["output"],
        num_cached_tokens=line["cached"],
        num_preemptions=line["preempted"],
        blocks=_blocks(line),
    )


def _blocks(line: dict[str, Any]) -> tuple[BlockId, ...]:
    return tuple([BlockId(*parsed) if isinstance(parsed, list) else BlockId(parsed) for parsed in line.get("blocks", ())])
