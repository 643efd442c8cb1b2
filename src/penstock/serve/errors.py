"""Status, type and code of every error that the server answers with. docs/http-api.md has the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NotRequired

from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.call import joined
from penstock.types.errors import Rejected, RejectReason, counted
from penstock.types.errors import shorten as shorten

UNAVAILABLE_RETRY_AFTER_S = 5
"""`Retry-After` while starting, draining or failed."""

STATUS_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request that the client cancelled. No client library retries it."""

BUSY_STATUSES = (429, 502, 503, 504)
"""Statuses of a busy or failing server: a batch retries the line, and a route tries its next model."""

NO_RETRY = {"x-should-retry": "false"}
"""Header that stops OpenAI's and Anthropic's clients from retrying where another try would not change the answer."""

RULE = "rule"
"""Type of a validation error by our own rules. Its text follows the field's name: "must be an object"."""

UNKNOWN_FIELDS = "unknown_fields"
"""Type of our own validation error for unknown fields."""

_RULES: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "must be true or false",
        "dict_type": "must be an object",
        "float_type": "must be a number",
        "int_type": "must be an integer",
        "list_type": "must be a list",
        "model_type": "must be an object",
        "string_type": "must be a string",
        "greater_than_equal": "must be at least {ge}, not {input}",
        "less_than_equal": "must be at most {le}, not {input}",
        "greater_than": "must be greater than {gt}, not {input}",
        "literal_error": "must be {expected}",
        "too_long": "must have at most {items}",
        "too_short": "must have at least {items}",
        "string_too_long": "must have at most {characters}",
        "string_too_short": "must have at least {characters}",
        "string_pattern_mismatch": "must match {pattern}",
        RULE: "{msg}",
    }
)
"""Our texts for pydantic's types of validation errors."""

_MAX_LIKENED_CHARS = 64
"""For longer unknown names, no similar name is suggested."""


class ApiError(HTTPException):
    """An error to answer with, raised anywhere below an endpoint.

    `takes_json` turns it into a response. For routes without a body, the app's exception handler does.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        """`sizes`: tokens of a prompt that is too long, and tokens of the context."""
        super().__init__(status, detail=message, headers=headers)
        self.sizes = sizes
        self.message = message
        self.code = code
        self.error_type = error_type
        self.param = param

    def body(self) -> bytes:
        """Return the error as JSON: the whole body, or the data of a server-sent event."""
        return fast_json.dumps(openai_words(self))

    def response(self, words: ErrorWords | None = None) -> Response:
        """Return the response. `words` writes the body in the form of another API than OpenAI's."""
        body = fast_json.dumps((words or openai_words)(self))
        return Response(body, self.status_code, headers=self.headers, media_type="application/json")


ErrorWords = Callable[[ApiError], Mapping[str, Any]]
"""Turns an error into an API's JSON data. Its return type goes into the OpenAPI document."""


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


Error = TypedDict("Error", {"error": ErrorDetail})


def openai_words(error: ApiError) -> Error:
    detail: ErrorDetail = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    if error.sizes is not None:
        detail["n_prompt_tokens"], detail["n_ctx"] = error.sizes
    return {"error": detail}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return a 400 for a value that is malformed, out of range, unknown or not supported."""
    return ApiError(400, message, code="invalid_request_error", param=param)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a hint with the most similar known name, or an empty text."""
    if len(name) > _MAX_LIKENED_CHARS:
        return ""
    from difflib import get_close_matches  # only a wrong name needs it

    close = get_close_matches(name, sorted(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def refuse_unknown(value: Mapping[str, Any], known: Collection[str], at: str) -> None:
    """Raise 400 for an unknown field of the object at the path `at`."""
    for name, content in value.items():
        if name not in known and content is not None:
            param = shorten(f"{at}.{name}")
            raise invalid(f"Unknown parameter: '{param}'.{did_you_mean(name, known)}", param)


def too_long(message: str, param: str | None = None, sizes: tuple[int, int] | None = None) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param=param, sizes=sizes)


def invalid_api_key(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", error_type="authentication_error", headers=headers)


MODEL_NOT_FOUND = "model_not_found"


def model_not_found(model: str | None, served: Sequence[str], *, is_no_adapter: bool = False) -> ApiError:
    """Return the 404 for a model that is unknown, or None: the default one, which the key may not use.

    `is_no_adapter`: no adapter has this name either.
    """
    names = ", ".join(repr(name) for name in served) or "nothing that this key may use"
    sought = ", and no adapter of that name is in --lora-dir" if is_no_adapter else ""
    told = "This key may not use the default model" if model is None else f"The model {shorten(model)!r} is not served here"
    message = f"{told}{sought}. Served: {names}."
    return ApiError(404, message, code=MODEL_NOT_FOUND, param="model")


def request_too_large(max_body_bytes: int, setting: str = "--max-body-size") -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413,
        f"The request body is larger than {max_body_bytes} bytes ({setting}).",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def request_head_too_large(max_head_bytes: int) -> ApiError:
    message = f"The request's address and headers are larger than {max_head_bytes} bytes."
    return ApiError(431, message, code="request_header_fields_too_large")


def version_not_supported() -> ApiError:
    return ApiError(505, "This server supports only HTTP/1.0 and HTTP/1.1.", code="http_version_not_supported")


_LIMITS = {
    RejectReason.DEADLINE: "The request did not finish within its deadline of {} ms (X-Deadline-Ms or --request-timeout). ",
    RejectReason.QUEUE_TIMEOUT: (
        "The request was not started within the {} ms that it may wait (X-Queue-Timeout-Ms or --queue-timeout). "
    ),
    RejectReason.FIRST_TOKEN_TIMEOUT: (
        "No token was generated within {} ms (X-First-Token-Timeout-Ms or --first-token-timeout). "
    ),
}


def deadline_exceeded(reason: RejectReason, allowed_ms: float, queue_ms: float, run_ms: float, num_tokens: int) -> ApiError:
    """Return a 408 with the allowed time, and the times of waiting and running."""
    return past_deadline(
        _LIMITS[reason].format(f"{allowed_ms:g}")
        + f"The request was queued for {queue_ms:.0f} ms and ran for {run_ms:.0f} ms; tokens generated: {num_tokens}. "
        "Allow more time, request fewer tokens, or retry when the server is less busy."
    )


def past_deadline(message: str) -> ApiError:
    return ApiError(408, message, code="deadline_exceeded", error_type="timeout_error", headers=NO_RETRY)


REQUEST_CANCELLED = "request_cancelled"


def cancelled(message: str) -> ApiError:
    return ApiError(STATUS_CLIENT_CLOSED_REQUEST, message, code=REQUEST_CANCELLED)


def overloaded(message: str, retry_after_s: float | None) -> ApiError:
    """Return a 429. The message says when to try again, unless `retry_after_s` is None: then only the header has a default."""
    headers = _retry_after(retry_after_s)
    if retry_after_s is not None:
        message = f"{message.removesuffix('.')}. Try again in {headers['Retry-After']} s."
    return ApiError(429, message, code="overloaded", error_type="rate_limit_error", headers=headers)


def no_room(message: str) -> ApiError:
    """Return the error for a batch beyond a limit of the client's files or batches. Only the client can make room."""
    return ApiError(429, message, code="overloaded", error_type="rate_limit_error", headers=NO_RETRY)


def unavailable(message: str, retry_after_s: float | None = None) -> ApiError:
    headers = _retry_after(retry_after_s)
    return ApiError(503, message, code="unavailable", error_type="service_unavailable_error", headers=headers)


def stays_here(name: str) -> ApiError:
    """Return the 403 for a request that must not go to another server. `name`: of its route"""
    message = f"The request can't be sent to another server, and the route {name} has no local model that may answer it."
    return ApiError(403, message, code="stays_here")


def internal(request_id: str) -> ApiError:
    """Return a 500 without the cause, which only the log has."""
    message = f"An internal error occurred. Its cause is in the server's log under request id {request_id}."
    return ApiError(500, message, code="internal_error", error_type="server_error")


def as_api_error(raised: ApiError | Rejected) -> ApiError:
    """Return an `ApiError` for either. Drops the traceback, because it forms a cycle with the frame that caught the error."""
    raised.__traceback__ = None
    return from_rejected(raised) if isinstance(raised, Rejected) else raised


def misconfigured(message: str) -> ApiError:
    """Return the error for a wrong setting. Only the operator can mend it, so clients should not try again."""
    return ApiError(500, message, code="misconfigured", error_type="server_error", headers=NO_RETRY)


def status_of(error: ApiError | Rejected) -> int:
    return (from_rejected(error) if isinstance(error, Rejected) else error).status_code


def from_rejected(rejected: Rejected) -> ApiError:
    """Return the error for a request that was refused before it generated anything."""
    message, param = rejected.detail, rejected.param
    match rejected.reason:
        case RejectReason.INVALID:
            return invalid(message, param)
        case RejectReason.CONTEXT_LENGTH | RejectReason.NEVER_FITS:
            return too_long(message, param, rejected.sizes)
        case (
            RejectReason.QUEUE_FULL
            | RejectReason.QUEUE_DELAY
            | RejectReason.KV_HEADROOM
            | RejectReason.TENANT_CONCURRENCY
            | RejectReason.TENANT_TOKENS
            | RejectReason.TENANT_REQUESTS
        ):
            return overloaded(f"Overloaded ({rejected.reason}): {message}", rejected.retry_after_s)
        case RejectReason.DEADLINE | RejectReason.QUEUE_TIMEOUT | RejectReason.FIRST_TOKEN_TIMEOUT:
            return past_deadline(message)
        case RejectReason.DRAINING | RejectReason.UNAVAILABLE:
            return unavailable(message, rejected.retry_after_s)


def failed(detail: str, request_id: str) -> ApiError:
    """Return the 500 for one failed request, which would probably fail again. The engine continues."""
    message = f"The request failed: {detail.removesuffix('.')}. The server's log may say more under request id {request_id}."
    return ApiError(500, message, code="internal_error", error_type="server_error", headers=NO_RETRY)


def from_http_exception(error: HTTPException, method: str, path: str) -> ApiError:
    """Return the error for Starlette's exceptions, such as an unknown route or method."""
    if isinstance(error, ApiError):
        return error
    if error.status_code == 404:
        return ApiError(404, f"There is nothing at {method} {shorten(path)}.", code="not_found")
    if error.status_code == 405:
        message = f"{method} is not allowed at {shorten(path)}."
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), code="invalid_request_error", headers=error.headers)


def not_an_object() -> ApiError:
    return invalid("The body must be a JSON object, sent as application/json.")


def from_finding(finding: Mapping[str, Any]) -> ApiError:
    """Return the error for one of pydantic's validation errors of a body."""
    place = tuple(finding["loc"])
    if finding["type"] == UNKNOWN_FIELDS:
        place += (finding["ctx"]["names"][0],)
    if not place:
        return not_an_object()
    param = param_path(place)
    return invalid(_explain(finding, param), param)


def _explain(finding: Mapping[str, Any], param: str) -> str:
    kind, limits = finding["type"], finding.get("ctx", {})
    if kind == UNKNOWN_FIELDS and limits["has_more"]:
        return f"Unknown parameters: {', '.join(repr(shorten(name)) for name in limits['names'])} and more."
    if kind == UNKNOWN_FIELDS:
        return f"Unknown parameter: '{param}'.{limits['remedy']}"
    if kind == "missing":
        return f"Missing required parameter: '{param}'."
    if kind == "int_type" and _is_beyond_64_bits(finding["input"]):
        return f"'{param}' must be an integer of at most 64 bits."
    if kind not in _RULES:
        return f"'{param}' is invalid: {finding['msg'][:1].lower()}{finding['msg'][1:]}."
    length = limits.get("max_length", limits.get("min_length", 0))
    told = {**finding, **limits, "items": counted(length, "item"), "characters": counted(length, "character")}
    return f"'{param}' {_RULES[kind].format(**told)}."


def _is_beyond_64_bits(value: object) -> bool:
    """Return whether the value is an integer beyond 64 bits, which `load_json` makes a float."""
    return isinstance(value, float) and value.is_integer() and abs(value) >= 2**63


def param_path(place: Sequence[str | int]) -> str:
    """Return `messages[0].role` for `("messages", 0, "role")`."""
    return shorten(joined(place))


def _retry_after(seconds: float | None) -> dict[str, str]:
    """Return `Retry-After` in whole seconds (RFC 9110, 10.2.3), and milliseconds for OpenAI's and Anthropic's clients."""
    seconds = UNAVAILABLE_RETRY_AFTER_S if seconds is None else seconds
    return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, math.ceil(1000 * seconds)))}
