"""`/v1/requests`: lists, explains and cancels requests for their owner, a client with the same key and tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.calls.in_flight import CallExplanation, InFlight
from penstock.obs.explain.explanation import END_WORDS, ExplainedPause, Explanation, gap_cause, summary
from penstock.obs.explain.lives import Gap
from penstock.serve.answering import answer_in_thread
from penstock.serve.errors import ApiError, shorten
from penstock.serve.paging import count
from penstock.serve.shapes import Count
from penstock.serve.terms import read_owner

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "rerank-", "score-", "classify-", "pool-")


TimesMs = dict[str, float]


Waited = TypedDict("Waited", {"for_ms": TimesMs, "now_for": str | None, "came_before": Count, "went_first": Count})


class Prefix(TypedDict):
    hit_tokens: Count
    stopped_at: Count
    because: str
    same_after: NotRequired[Count]
    evicted_ms_before: NotRequired[float]


Steps = TypedDict("Steps", {"steps": Count, "tokens": Count})
DecodeSteps = TypedDict(
    "DecodeSteps",
    {
        "steps": Count,
        "forced_tokens": Count,
        "guessed_tokens": Count,
        "accepted_tokens": Count,
        "with_prompts_ms": float,
        "with_prompts_steps": Count,
        "rested_ms": float,
    },
)
SatOut = TypedDict("SatOut", {"steps": Count, "ms": float})
BatchSize = TypedDict("BatchSize", {"mean": float, "max": Count})
GapStep = TypedDict("GapStep", {"ms": float, "requests": Count, "prompts": Count, "prompt_tokens": Count})
LongestGap = TypedDict("LongestGap", {"ms": float, "because": str, "step": NotRequired[GapStep]})


class Preemption(TypedDict):
    after_ms: float
    because: str
    method: Literal["swap", "recompute"]
    waited_ms: float
    waited_for_ms: TimesMs
    lost_tokens: Count
    is_over: bool


class Routed(TypedDict):
    replica: str
    cached_tokens: Count
    tokens_ahead: Count
    fewest_tokens_ahead: Count
    moves: Count
    move_ms: float
    fetched_tokens: Count
    fetch_ms: float


class RequestChoice(TypedDict):
    index: Count
    state: str
    finish_reason: str | None
    summary: str
    prompt_tokens: Count
    completion_tokens: Count
    time_ms: TimesMs
    waited: Waited
    prefix: Prefix | None
    prefill: Steps
    resume: Steps
    decode: DecodeSteps
    sat_out: SatOut
    batch: BatchSize
    longest_gap: LongestGap | None
    preemptions: list[Preemption]
    route: NotRequired[Routed]


Chosen = TypedDict("Chosen", {"route": str, "sources": str, "check": str, "held_ms": float})
Cost = TypedDict("Cost", {"usd": float, "saved_usd": float})


class Request(TypedDict):
    id: str
    object: Literal["request"]
    model: str
    created: int
    age_ms: float
    summary: str
    choices: list[RequestChoice]
    forgotten_choices: Count
    chosen: NotRequired[Chosen]
    cost: NotRequired[Cost]


RequestList = TypedDict("RequestList", {"object": Literal["list"], "tenant": str, "data": list[Request]})
RequestCancelled = TypedDict("RequestCancelled", {"id": str, "object": Literal["request"], "cancelled": bool})


ENDED = count("ended", 0, 0, 100)


class RequestsEndpoint:
    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight

    async def list(self, http: HttpRequest) -> Response:
        """List the caller's unfinished requests, oldest first, then its last `ended` requests, latest first."""
        owner = read_owner(http.scope)
        max_ended = ENDED.read(http)
        tell, tell_ended = self._in_flight.explain_running(owner), self._in_flight.explain_ended(owner, max_ended)

        def make() -> RequestList:
            return {"object": "list", "tenant": owner.tenant, "data": [_call(told) for told in (*tell(), *tell_ended())]}

        return await answer_in_thread(make)

    async def explain(self, http: HttpRequest) -> Response:
        """Explain the time that a request takes or took. Its id is its `X-Request-Id`, or the `id` of its answer."""
        owner = read_owner(http.scope)
        request_id = http.path_params["request_id"]
        asks = [self._in_flight.explain(candidate, owner) for candidate in _candidates(request_id)]

        def make() -> Request:
            for tell in asks:
                if told := tell():
                    return _call(told)
            raise ApiError(
                404,
                f"The server remembers no request {shorten(request_id)!r} of yours. It ended too long ago (see "
                "--explained-requests), was a line of a batch (explained only until it ends), was computed elsewhere (by an "
                "upstream), was refused before it reached the engine, or never arrived.",
                code="request_not_found",
            )

        return await answer_in_thread(make)

    async def cancel(self, http: HttpRequest) -> RequestCancelled:
        """Cancel a running request, by its `X-Request-Id` or by the `id` of its answer."""
        owner, request_id = read_owner(http.scope), http.path_params["request_id"]
        # The first candidate with a call only: cancelling "cmpl-x" must not also cancel another call "x".
        if not any(self._in_flight.cancel(candidate, owner) for candidate in _candidates(request_id)):
            raise ApiError(
                404,
                f"You have no running request {shorten(request_id)!r}. To cancel one that still waits for its model or "
                "grammar, close its connection.",
                code="request_not_found",
            )
        return {"id": request_id, "object": "request", "cancelled": True}


def _call(told: CallExplanation) -> Request:
    choices = [choice_of(choice, index) for index, choice in told.choices]
    request: Request = {
        "id": told.request_id,
        "object": "request",
        "model": told.model,
        "created": told.created_unix_s,
        "age_ms": _ms(told.age_ns),
        "summary": told.summary,
        "choices": choices,
        "forgotten_choices": told.num_forgotten,
    }
    if (how := told.chosen) is not None:
        request["chosen"] = {"route": how.route, "sources": how.sources, "check": how.check, "held_ms": _ms(how.held_ns)}
    if told.cost is not None:
        request["cost"] = {"usd": told.cost.paid, "saved_usd": told.cost.saved}
    return request


def _candidates(request_id: str) -> list[str]:
    """Return the id itself, and the id without an answer's prefix such as `chatcmpl-`."""
    return [request_id, *(request_id.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if request_id.startswith(prefix))]


def choice_of(told: Explanation, index: int) -> RequestChoice:
    """Return the explanation of one choice as JSON. Times are milliseconds."""
    choice: RequestChoice = {
        "index": index,
        "state": told.phase.value,
        "finish_reason": None if told.finish_reason is None else END_WORDS[told.finish_reason],
        "summary": summary(told),
        "prompt_tokens": told.num_prompt_tokens,
        "completion_tokens": told.num_generated_tokens,
        "time_ms": {
            "total": _ms(told.total_ns),
            "queue": _ms(told.queue_ns),
            "prefill": _ms(told.prefill_ns),
            "decode": _ms(told.decode_ns),
            "other_models": _ms(told.other_models_ns),
        },
        "waited": {
            "for_ms": _parts(told.waited_for_ns),
            "now_for": told.waits_for or None,
            "came_before": told.num_before,
            "went_first": told.num_passed_by,
        },
        "prefix": _prefix(told),
        "prefill": {"steps": told.num_prefill_steps, "tokens": told.num_prefill_tokens},
        "resume": {"steps": told.num_resume_steps, "tokens": told.num_resume_tokens},
        "decode": {
            "steps": told.num_decode_steps,
            "forced_tokens": told.num_forced_tokens,
            "guessed_tokens": told.num_guesses,
            "accepted_tokens": told.num_accepted,
            "with_prompts_ms": _ms(told.decode_with_prompts_ns),
            "with_prompts_steps": told.num_steps_with_prompts,
            "rested_ms": _ms(told.rested_ns),
        },
        "sat_out": {"steps": told.num_sat_out_steps, "ms": _ms(told.sat_out_ns)},
        "batch": {"mean": round(told.mean_batch, 2), "max": told.max_batch},
        "longest_gap": None if told.longest_gap is None else _gap(told.longest_gap),
        "preemptions": [_pause(pause) for pause in told.pauses],
    }
    if (route := told.route) is not None:
        choice["route"] = {
            "replica": route.replica,
            "cached_tokens": route.num_held_tokens,
            "tokens_ahead": route.num_tokens_ahead,
            "fewest_tokens_ahead": route.fewest_tokens_ahead,
            "moves": len(route.before),
            "move_ms": _ms(route.move_ns),
            "fetched_tokens": route.num_fetched_tokens,
            "fetch_ms": _ms(route.fetch_ns),
        }
    return choice


def _prefix(told: Explanation) -> Prefix | None:
    """Return the prefix found in the cache, or None while the choice waits."""
    if told.stop is None:
        return None
    found: Prefix = {
        "hit_tokens": told.num_hit_tokens,
        "stopped_at": told.stop.position,
        "because": told.stop.reason.value,
    }
    if told.stop.num_same_after:
        found["same_after"] = told.stop.num_same_after
    if told.evicted_ago_ns is not None:
        found["evicted_ms_before"] = _ms(told.evicted_ago_ns)
    return found


def _gap(gap: Gap) -> LongestGap:
    """Return a gap between two tokens of an answer. Other requests in the same step appear only as counts."""
    told: LongestGap = {"ms": _ms(gap.gap_ns), "because": gap_cause(gap)}
    if gap.step is not None:
        told["step"] = {
            "ms": _ms(gap.step.duration_ns),
            "requests": gap.step.num_rows,
            "prompts": gap.step.num_prefills,
            "prompt_tokens": gap.step.num_prefill_tokens,
        }
    return told


def _pause(pause: ExplainedPause) -> Preemption:
    return {
        "after_ms": _ms(pause.began_ns),
        "because": pause.reason.value,
        "method": "swap" if pause.is_swap else "recompute",
        "waited_ms": _ms(pause.waited_ns),
        "waited_for_ms": _parts(pause.waited_for_ns),
        "lost_tokens": pause.num_lost_tokens,
        "is_over": pause.is_over,
    }


def _parts(parts_ns: Mapping[str, int]) -> TimesMs:
    return {name: _ms(part_ns) for name, part_ns in parts_ns.items()}


def _ms(num_ns: int) -> float:
    return round(num_ns / 1e6, 3)
