"""Lines of a batch's output and error files, and the tokens that an answer counts."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock import fast_json
from penstock.jobs.lines import Answer, Line, Request, read_line
from penstock.jobs.store import Batch
from penstock.serve.own_requests import Answered
from penstock.serve.streams import whole_lines


def line_of_answer(line: Line, request: Request, answered: Answered, name: str) -> Answer:
    """Return the line of the output or error file for an answer of the server, whose id is `name`."""
    response = {"status_code": answered.status, "request_id": name, "body": _one_line(answered.body)}
    fields = {"id": f"batch_req_{name}", "custom_id": request.custom_id, "response": response, "error": None}
    is_error = answered.status != 200
    return Answer(line.place, _written(fields), is_error, {} if is_error else _usage(answered.body))


def _written(fields: dict[str, Any]) -> bytes:
    return whole_lines(fast_json.dumps(fields)) + b"\n"


def _one_line(body: bytes) -> Any:
    """Return an answer as JSON without line breaks. Another server may have sent anything."""
    try:
        if b"\n" in body or b"\r" in body:
            body = msgspec.json.format(body, indent=-1)  # takes twice as long as the check below
        return msgspec.json.decode(body, type=fast_json.Raw)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")


def line_of_failure(batch: Batch, line: Line, code: str, message: str) -> Answer:
    """Return the line of the error file for a line that the server did not answer."""
    error = {"code": code, "message": message}
    fields = {
        "id": f"batch_req_{batch.id}-{line.place}",
        "custom_id": _custom_id(line),
        "response": None,
        "error": error,
    }
    return Answer(line.place, _written(fields), is_error=True, usage={})


def _custom_id(line: Line) -> str | None:
    """Return the id of a line, or None if its file is being changed and it is broken."""
    try:
        return read_line(line.data).custom_id
    except msgspec.DecodeError:
        return None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _TokenCounts(msgspec.Struct):
    """The counts of tokens in an answer, in the words of OpenAI's and Anthropic's APIs."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _TokenCounts | None = None


_read_usage = msgspec.json.Decoder(_WithUsage).decode


def _usage(body: bytes) -> dict[str, int]:
    try:
        counts = _read_usage(body).usage
    except msgspec.DecodeError:  # another server's
        counts = None
    if counts is None:
        return {}
    of_prompt = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    of_answer = counts.completion_tokens_details or counts.output_tokens_details or _Details()
    num_prompt = counts.prompt_tokens or counts.input_tokens
    if counts.cache_read_input_tokens is not None:  # Anthropic's input tokens are without those
        num_prompt += counts.cache_read_input_tokens
    return {
        "input_tokens": num_prompt,
        "cached_tokens": of_prompt.cached_tokens or counts.cache_read_input_tokens or 0,
        "output_tokens": counts.completion_tokens or counts.output_tokens,
        "reasoning_tokens": of_answer.reasoning_tokens or 0,
    }
