"""Reads files of requests (traces, recordings, ShareGPT) into a `Workload`. The format is recognised by the content.

File sizes are limited. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

from penstock.lab.recording import RecordedRequest, is_recording, open_recording
from penstock.lab.synthetic import MAX_TOKENS
from penstock.lab.transforms import at_instants, converse
from penstock.lab.workload import MAX_NS, Job, Workload, whole_ns
from penstock.types.adapter import BASE
from penstock.types.errors import PenstockError, counted
from penstock.types.request import FinishReason

CountTokens = Callable[[str], int]

CHARS_PER_TOKEN = 4
MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_OUTPUT_TOKENS = 128
"""Length of an answer if the file does not give one."""
FORMATS = (
    "a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure); or one JSON object a line with "
    "timestamp, input_length, output_length and hash_ids (Mooncake), with conversations (ShareGPT, also as one JSON array), "
    "or with prompt and max_tokens; or a recording of `penstock serve --record`"
)

MAX_LINES, MAX_LINE_BYTES, MAX_ARRAY_BYTES = 2_000_000, 8 << 20, 256 << 20
_PEEK_BYTES = 1 << 12
_USERS = frozenset({"human", "user"})
_MODELS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class Lines:
    def __init__(self, path: Path) -> None:
        self.number = 0
        """Number of the last line read, or of the last entry of a JSON array; from 1."""
        self._noun = "line"
        self._path = path

    @property
    def is_array(self) -> bool:
        with self._open() as file:
            return file.read(_PEEK_BYTES).removeprefix(BOM_UTF8).lstrip().startswith(b"[")

    def __iter__(self) -> Iterator[str]:
        self.number = 0
        with self._open() as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                self.number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise self.error(f"the line has more than {MAX_LINE_BYTES} bytes", "Write shorter lines.")
                if self.number > MAX_LINES:
                    raise self.error(f"the file has more than {MAX_LINES} lines", "Cut a part of it out.")
                try:
                    text = line.decode("utf-8-sig" if self.number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise self.error(f"the line is not UTF-8: {error.reason}", "Save the file as UTF-8.") from error
                if text:
                    yield text

    def read_array(self) -> Iterator[object]:
        self._noun, self.number = "entry", 0
        if (num_bytes := self._path.stat().st_size) > MAX_ARRAY_BYTES:
            raise self.error(
                f"the file is one JSON array of {num_bytes} bytes, and at most {MAX_ARRAY_BYTES} are read at once",
                f"Write one object a line: jq -c '.[]' {self._path.name} > {self._path.stem}.jsonl",
            )
        try:
            rows = json.loads(self._path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise self.error(f"the file is not a JSON array: {error}", "Mend the file.") from error
        if not isinstance(rows, list):
            raise self.error("the file is not a JSON array", "Mend the file.")
        for row in rows:
            self.number += 1
            yield row

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise PenstockError(
                f"Cannot read {self._path}: {error.strerror}.", remedy="Name a file that can be read."
            ) from error

    def error(self, cause: str, remedy: str) -> PenstockError:
        return PenstockError(f"{self._path}, {self._noun} {self.number}: {cause}.", remedy=remedy)


def read_workload(
    path: Path,
    *,
    count_tokens: CountTokens | None = None,
    max_requests: int | None = None,
    max_turns: int = 1,
) -> Workload:
    """Read the requests of a trace, a recording or another known file into a workload.

    Arrival times count from the first request. If the file has no times, all arrive at 0. Raises PenstockError.

    `count_tokens`: counts the tokens of a text. None estimates, and the workload's name says so.
    `max_requests`: stop reading after this many.
    `max_turns`: longest conversation. If the file has no conversations, successive requests are chained into some.
    """
    lines = Lines(path)
    count = count_tokens or estimate_tokens
    name = path.name if max_requests is None else f"{path.name}, first {max_requests}"
    estimated = "" if count_tokens else f", lengths estimated at {CHARS_PER_TOKEN} characters per token"
    match _format_of(path, lines):
        case "azure":
            workload = _trace(path, name, islice(_azure(lines), max_requests))
        case "mooncake":
            rows = islice(_mooncake(lines), max_requests)
            workload = _trace(path, name, rows, prefix_block_tokens=MOONCAKE_BLOCK_TOKENS)
        case "recording":
            workload = _recorded(path, max_requests)
        case "prompts":
            prompts = list(islice(_prompts(lines, count), max_requests))
            workload = Workload(name=f"{name}{estimated}", jobs=_some(path, prompts))
        case "sharegpt":
            jobs = _conversation_jobs(read_conversations(path), count, max_turns, max_requests)
            turns = "first turns" if max_turns == 1 else f"conversations of at most {max_turns} turns"
            return Workload(name=f"{name}, {turns}{estimated}", jobs=_some(path, jobs))
    return converse(workload, max_turns)


def _format_of(path: Path, lines: Lines) -> Literal["azure", "mooncake", "prompts", "recording", "sharegpt"]:
    if lines.is_array:
        return "sharegpt"
    if is_recording(path):
        return "recording"
    text = next(iter(lines), "")
    columns = {column.strip(' "') for column in text.split(",")}
    first = _object(lines, text) if text.startswith("{") else {}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        return "azure"
    if "input_length" in first:
        return "mooncake"
    if "prompt" in first:
        return "prompts"
    if _turns_of(first) is not None:
        return "sharegpt"
    raise PenstockError(f"{path} has an unknown format.", remedy=f"A workload is {FORMATS}.")


def read_conversations(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield each conversation of a ShareGPT file as pairs (the user's message, the answer).

    Messages before the user's first are dropped, as are all from the first unanswered one on. Raises PenstockError.
    """
    lines = Lines(path)
    for row in lines.read_array() if lines.is_array else (_object(lines, line) for line in lines):
        turns = _turns_of(row) if isinstance(row, dict) else None
        if turns is None:
            raise lines.error(
                "a conversation has no list 'conversations'",
                'Each must be {"conversations": [{"from": "human", "value": ...}, ...]}.',
            )
        if pairs := _pairs(lines, turns):
            yield pairs


def estimate_tokens(text: str) -> int:
    return max(1, round(len(text) / CHARS_PER_TOKEN))


# Azure


def _azure(lines: Lines) -> Iterator[Job]:
    rows = _fields(lines)
    columns = [column.strip(' "') for column in next(rows)]
    at, context, generated = (columns.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    first: datetime | None = None
    for row in rows:
        if len(row) != len(columns):
            raise lines.error(f"the row has {len(row)} fields instead of {len(columns)}", "Mend the row.")
        try:
            instant = datetime.fromisoformat(row[at])
            since = instant - (first := first or instant)
        except (ValueError, TypeError) as error:
            raise lines.error(
                f"{row[at]!r} is not a time like the first row's: {error}", "Write it as 2023-11-16 18:15:46.680590."
            ) from error
        yield Job(
            arrival_ns=since // timedelta(microseconds=1) * 1_000,
            num_prompt_tokens=_parse_length(lines, "ContextTokens", row[context]),
            num_output_tokens=_parse_length(lines, "GeneratedTokens", row[generated]),
        )


def _fields(lines: Lines) -> Iterator[list[str]]:
    try:
        yield from csv.reader(lines)
    except csv.Error as error:
        raise lines.error(f"the line is not a row of a CSV: {error}", "Mend the row.") from error


def _parse_length(lines: Lines, name: str, text: str) -> int:
    try:
        return _length(lines, name, int(text[:20]))
    except ValueError:
        raise lines.error(f"{name} is {text[:40]!r}, which is not a whole number", "Write a number of tokens.") from None


# Mooncake


def _mooncake(lines: Lines) -> Iterator[Job]:
    for line in lines:
        row = _object(lines, line)
        num_prompt_tokens = _length(lines, "input_length", row.get("input_length"))
        yield Job(
            arrival_ns=_milliseconds(lines, row.get("timestamp")),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_length(lines, "output_length", row.get("output_length")),
            prefix=_blocks(lines, row.get("hash_ids", []), num_prompt_tokens),
        )


def _milliseconds(lines: Lines, value: object) -> int:
    largest = MAX_NS // 1_000_000
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= largest:
        raise lines.error(
            f"timestamp is {_shown(value)}, which is not a number of milliseconds", f"Write one of at most {largest}."
        )
    return value * 1_000_000 if isinstance(value, int) else round(value * 1e6)


def _blocks(lines: Lines, value: object, num_prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(entry) is int and 0 <= entry < 1 << 63 for entry in value):
        raise lines.error("hash_ids is not a list of non-negative whole numbers", "Name each block by a number.")
    num_blocks = -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if value and len(value) != num_blocks:
        raise lines.error(
            f"{len(value)} hash_ids do not name the blocks of {num_prompt_tokens} tokens",
            f"Blocks have {MOONCAKE_BLOCK_TOKENS} tokens, so there must be {num_blocks}, or none.",
        )
    return tuple(value)


# Conversations


def _turns_of(row: Mapping[str, object]) -> list[object] | None:
    turns = row.get("conversations", row.get("messages"))
    return turns if isinstance(turns, list) else None


def _pairs(lines: Lines, turns: Sequence[object]) -> list[tuple[str, str]]:
    said = [_message(lines, turn) for turn in turns]
    begin = next((idx for idx, (is_user, _) in enumerate(said) if is_user), len(said))
    pairs: list[tuple[str, str]] = []
    for (asks, prompt), (answers, reply) in zip(said[begin::2], said[begin + 1 :: 2], strict=False):
        if asks is not True or answers is not False or not prompt or not reply:
            break
        pairs.append((prompt, reply))
    return pairs


def _message(lines: Lines, turn: object) -> tuple[bool | None, str]:
    """Return (is_user, text) of a conversation's message. `is_user` is None if neither user nor model wrote it.

    The text is "" for a message without any, such as one that only calls tools.
    """
    row = turn if isinstance(turn, dict) else {}
    author, content = row.get("from", row.get("role")), row.get("value", row.get("content"))
    if isinstance(author, str):
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text = _whole("".join(text for text in texts if isinstance(text, str)))
        return True if author in _USERS else False if author in _MODELS else None, text
    form = '{"role": "user" or "assistant", "content"' if "content" in row else '{"from": "human" or "gpt", "value"'
    raise lines.error(f"a message is {_shown(turn)}", f'Each must be {form}: "its text"}}.')


def _conversation_jobs(
    conversations: Iterator[list[tuple[str, str]]], count_tokens: CountTokens, max_turns: int, max_requests: int | None
) -> list[Job]:
    jobs: list[Job] = []
    for conversation in conversations:
        history = 0
        for turn, (prompt, reply) in enumerate(conversation[:max_turns]):
            num_prompt_tokens, num_output_tokens = history + max(1, count_tokens(prompt)), max(1, count_tokens(reply))
            history = num_prompt_tokens + num_output_tokens
            after = len(jobs) - 1 if turn else None
            jobs.append(
                Job(
                    arrival_ns=0,
                    num_prompt_tokens=num_prompt_tokens,
                    num_output_tokens=num_output_tokens,
                    after=after,
                    prompt=prompt,
                )
            )
            if len(jobs) == max_requests:
                return jobs
    return jobs


# Prompts


def _prompts(lines: Lines, count_tokens: CountTokens) -> Iterator[Job]:
    for line in lines:
        row = _object(lines, line)
        prompt, tenant, priority = row.get("prompt"), row.get("tenant", ""), row.get("priority", 0)
        if not isinstance(prompt, str) or not prompt:
            raise lines.error(
                f"prompt is {_shown(prompt)}, which is not a text", 'Write {"prompt": "a text", "max_tokens": 100}.'
            )
        if not isinstance(tenant, str) or type(priority) is not int:
            raise lines.error("tenant is not a text, or priority is not a whole number", "Mend them, or leave them out.")
        prompt, max_tokens = _whole(prompt), row.get("max_tokens", DEFAULT_OUTPUT_TOKENS)
        yield Job(
            arrival_ns=0,
            num_prompt_tokens=max(1, count_tokens(prompt)),
            num_output_tokens=_length(lines, "max_tokens", max_tokens),
            tenant=tenant,
            priority=priority,
            prompt=prompt,
        )


# Recordings


def _recorded(path: Path, max_requests: int | None) -> Workload:
    """Return the requests of a recording as a workload.

    Requests that did not end, failed, were refused, used beam search or ran in the background are left out. Clients that
    cancelled do so again: after as many tokens, or at the same time if there were none. Adapters are ignored. The workload's
    name says how many requests were left out or had an adapter, and what share of the prompts was cached.
    """
    recording = open_recording(path)
    jobs: list[Job] = []
    num_background = num_left_out = num_adapted = num_cached = 0
    for request in sorted(recording.requests(), key=lambda request: request.arrival.arrival_ns):
        if len(jobs) == max_requests:
            break
        if request.arrival.background:
            num_background += 1
        elif (job := _recorded_job(request)) is None:
            num_left_out += 1
        else:
            jobs.append(job)
            num_adapted += request.arrival.adapter != BASE
            num_cached += 0 if request.departure is None else request.departure.num_cached_tokens
    name = path.name if max_requests is None else f"{path.name}, first {max_requests}"
    without = [counted(num_background, "background request")] if num_background else []
    if num_left_out:
        without.append(f"{counted(num_left_out, 'request')} of unknown answer")
    if without:
        name += f" without {' and '.join(without)}"
    if num_adapted:
        name += f", {num_adapted} of adapters taken as the base's"
    if num_cached:
        name += f", {num_cached / sum(job.num_prompt_tokens for job in jobs):.1%} of prompt tokens cached when recorded"
    return _trace(path, name, jobs, prefix_block_tokens=recording.header.block_size)


def _recorded_job(request: RecordedRequest) -> Job | None:
    arrival, departure = request.arrival, request.departure
    if departure is None or arrival.beam_width or departure.reason in (FinishReason.ERROR, FinishReason.REJECTED):
        return None
    num_generated, is_cut_off = departure.num_output_tokens, departure.reason is FinishReason.ABORT
    has_left = is_cut_off and not departure.reject_reason  # with a reject reason, a deadline ended it
    return Job(
        arrival_ns=arrival.arrival_ns,
        num_prompt_tokens=max(1, arrival.num_prompt_tokens),
        num_output_tokens=max(1, num_generated + is_cut_off),
        tenant=arrival.tenant,
        priority=arrival.priority,
        deadline_ns=arrival.deadline_ns,
        cancelled_ns=departure.at_ns if has_left and not num_generated else None,
        cancelled_after_tokens=num_generated if has_left and num_generated else None,
        prefix=tuple(block.id for block in arrival.blocks),
        alike=tuple((block.id, block.like, block.num_like) for block in arrival.blocks if block.num_like),
        answer=tuple(block.id for block in departure.blocks) if arrival.blocks else (),
    )


# All formats


def _trace(path: Path, name: str, rows: Iterable[Job], *, prefix_block_tokens: int = 0) -> Workload:
    jobs = _some(path, sorted(rows, key=lambda job: job.arrival_ns))
    begin_ns = jobs[0].arrival_ns
    jobs = [at_instants(job, lambda at_ns: whole_ns(at_ns - begin_ns)) for job in jobs]
    has_prefixes = any(job.prefix for job in jobs)
    return Workload(name=name, jobs=jobs, prefix_block_tokens=prefix_block_tokens if has_prefixes else 0)


def _some(path: Path, jobs: list[Job]) -> list[Job]:
    if not jobs:
        raise PenstockError(f"{path} has no request in it.", remedy=f"A workload is {FORMATS}.")
    return jobs


def _object(lines: Lines, line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise lines.error(f"the line is not JSON: {error}", "Write one whole JSON object on each line.") from error
    if not isinstance(row, dict):
        raise lines.error(f"the line is {_shown(row)}, not a JSON object", "Write one whole JSON object on each line.")
    return row


def _whole(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate: half of a character, where someone cut the text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _length(lines: Lines, name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise lines.error(f"{name} is {_shown(value)}, which is not a number of tokens", f"Write one of 0 to {MAX_TOKENS}.")
    return max(1, value)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
