"""Runs a request's call and returns the response. Also answers requests about a prompt alone, such as token counts.

A route may hold an answer back until it has decided to keep it, so that no client sees a discarded answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock import fast_json
from penstock.calls.call import Call, ChatRequest, Conversation, TextPrompt
from penstock.calls.in_flight import CallInFlight, Chosen, InFlight, RunningCall
from penstock.calls.prompts import render
from penstock.calls.run import run
from penstock.deploy.running import RunningModel
from penstock.serve.asking import Asked, PipelineOpen, Reader
from penstock.serve.bodies import Body, parse_body
from penstock.serve.course import COURSE_KEY, Routed, course_of
from penstock.serve.ensembles import Ensemble
from penstock.serve.errors import BUSY_STATUSES, STATUS_CLIENT_CLOSED_REQUEST, ApiError, status_of
from penstock.serve.http.checks import JsonEndpoint, add_header, added_header, unless_gone
from penstock.serve.http.entries import Entry, entry_of, note_model
from penstock.serve.streams import NewWriter, counting_misses, respond
from penstock.serve.terms import read_lane, read_owner
from penstock.serve.trials import is_one_answer, said_in, whole_answer
from penstock.types.errors import TENANT_REASONS, ModelAway, Rejected

_T = TypeVar("_T")

_Body = TypeVar("_Body", bound=Body)
Made = tuple[Call, NewWriter]
"""A call, and a function that makes the writer of its answer."""
_Failure = ApiError | Rejected | ModelAway


def note_call(scope: Scope, in_flight: InFlight, call: CallInFlight) -> None:
    """Let the request's entry explain this call."""
    if (entry := entry_of(scope)) is not None:
        entry.explain = in_flight.explaining(call)


def finish_entry(scope: Scope, entry: Entry) -> None:
    """Copy to the entry what only the request's course has: its route, and whether it is a line of a batch."""
    course = course_of(scope)
    entry.route = "" if course.routed is None else course.routed.header.decode()
    entry.is_background = course.is_background


async def open_call(
    read: Callable[[Asked], tuple[Call, _T]], asked: Asked, num_bytes: int, in_flight: InFlight, http: HttpRequest
) -> tuple[RunningCall, _T]:
    """Run the call that `read` makes from a request. Return it with `read`'s second result.

    A route may run several, and return the one whose answer it keeps. Raises `ApiError`, `Rejected`, `Unsure` and `ModelAway`.
    """

    async def made(scope: Scope) -> tuple[Call, _T]:
        off_loop = asked.reader.deployment.off_loop
        return await off_loop.parse(num_bytes, lambda: read(replace(asked, scope=scope)), read_lane(scope))

    course = course_of(http.scope)
    if course.routed is None or course.routed.ensemble is None:
        call, more = await made(http.scope)
        _note_model(call, http)
        opened = await _run_until_kept(call, in_flight, http)
    else:
        opened, call, more = await _of_ensemble(made, course.routed, course.routed.ensemble, in_flight, http)
    await _check(call, opened, http)
    if course.routed is not None and course.routed.bill is not None:
        opened.price = partial(course.charge, course.routed)
    held_ns = opened.held_ns
    opened.chosen = _chosen_of(http.scope, held_ns)
    if (entry := entry_of(http.scope)) is not None:
        entry.held_ns = held_ns
    return opened, more


async def _check(call: Call, opened: RunningCall, http: HttpRequest) -> None:
    """Run the pipeline's check on its answer, if it has one. If the check raises, no other model of the route is tried.

    After `ModelAway`, the check's model is loaded and the request begins again, so the route keeps its other models.
    """
    course = course_of(http.scope)
    if course.check is None:
        return
    with opened, counting_misses(call.running, call.terms, is_last=True):
        try:
            why = await unless_gone(http, course.check.judge(call, opened))
        except BaseException as error:
            if course.routed is not None:
                begun = course.routed.pay_discarded(opened.num_prompt_tokens, opened.num_counted_tokens)
                course.routed = begun if isinstance(error, ModelAway) else replace(begun, rest=())
            raise
    add_header(http.scope, b"x-check", why.encode())


def _chosen_of(scope: Scope, held_ns: int) -> Chosen | None:
    """Return how a route or a pipeline came to the answer of a request, if it names one."""
    routed = course_of(scope).routed
    route = "" if routed is None else routed.header.decode()
    sources, check = (added_header(scope, name) for name in (b"x-sources", b"x-check"))
    return Chosen(route, sources, check, held_ns) if route or sources or check else None


def _note_model(call: Call, http: HttpRequest) -> None:
    operation = "chat" if isinstance(call.request, ChatRequest) else "text_completion"
    note_model(http.scope, operation, call.answer.model_name)


async def _of_ensemble(
    made: Callable[[Scope], Awaitable[tuple[Call, _T]]],
    routed: Routed,
    ensemble: Ensemble,
    in_flight: InFlight,
    http: HttpRequest,
) -> tuple[RunningCall, Call, _T]:
    """Run the calls of an ensemble, and return the one whose answer was chosen. Models that refuse or fail do not count."""
    course = course_of(http.scope)
    # A model that had to be loaded was removed from `ensemble.models` by `_calls_of_members`. It is `routed.model` now; if its
    # load failed, `routed.model` is one of the others.
    models = tuple(one for one in ensemble.config.models if one in (routed.model, *ensemble.models))
    ensemble = replace(ensemble, models=models)
    routed = course.routed = replace(routed, rest=(), ensemble=ensemble)
    failures: list[_Failure] = []
    calls = await _calls_of_members(made, routed, ensemble, http, failures)
    first, (call, more) = next(iter(calls.items()))
    _note_model(call, http)
    if not is_one_answer(call):
        course.routed = replace(routed, model=first, why="not one answer alone")
        return await _run_until_kept(call, in_flight, http), call, more
    opened: dict[str, RunningCall] = {}

    async def choose() -> tuple[str, str]:
        texts = await _answers_of({name: call for name, (call, _) in calls.items()}, in_flight, opened, failures)
        return await _choice(ensemble, calls[next(iter(texts))][0], texts)

    kept = ""
    try:
        with counting_misses(call.running, call.terms):
            kept, why = await unless_gone(http, choose())
    finally:
        now = course.routed  # with what the judge has cost
        for name, one in opened.items():
            if name != kept:
                now = now.pay_discarded(one.num_prompt_tokens, one.num_counted_tokens, model=name)
                one.close()
        course.routed = now
    why += f"; failed={len(failures)}" if failures else ""
    course.routed = replace(now, model=kept, why=why)
    call, more = calls[kept]
    note_call(http.scope, in_flight, opened[kept])
    _note_model(call, http)
    return opened[kept], call, more


async def _calls_of_members(
    made: Callable[[Scope], Awaitable[tuple[Call, _T]]],
    routed: Routed,
    ensemble: Ensemble,
    http: HttpRequest,
    failures: list[_Failure],
) -> dict[str, tuple[Call, _T]]:
    """Return the call of each model of an ensemble, by name. Raises `ModelAway`, and one of the failures if none has a call."""
    course = course_of(http.scope)
    calls: dict[str, tuple[Call, _T]] = {}
    for name in ensemble.models:
        others = tuple(one for one in ensemble.models if one != name)
        try:
            alone = replace(course, routed=replace(routed, model=name, ensemble=None))
            calls[name] = await made({**http.scope, COURSE_KEY: alone})
        except PipelineOpen:
            raise
        except ModelAway:  # if it can't be loaded, the others answer
            course.routed = replace(routed, model=name, rest=others, ensemble=replace(ensemble, models=others))
            raise
        except (ApiError, Rejected) as error:
            failures.append(error)
    if not calls:
        raise _told(failures)
    return calls


async def _answers_of(
    calls: Mapping[str, Call], in_flight: InFlight, opened: dict[str, RunningCall], failures: list[_Failure]
) -> dict[str, str]:
    """Run calls together, and return the text of each answer by name, in the order of `calls`. `opened` gets what has begun.

    Raises one of the failures if none has an answer, and an error that ends the whole request.
    """
    texts: dict[str, str] = {}
    left = {*calls}

    async def answer(name: str, call: Call) -> None:
        try:
            # `run` refuses a full model's call before it first waits. If all are full, the client returns to the last one.
            terms = replace(call.terms, returns=left == {name})
            opened[name] = one = await run(replace(call, terms=terms), in_flight)
            texts[name] = said_in(one, await whole_answer(one))
        except (ApiError, Rejected, ModelAway) as error:
            if _ends_all(error):
                raise  # and cancel the others
            left.remove(name)
            failures.append(error)

    try:
        async with asyncio.TaskGroup() as group:
            for name, call in calls.items():
                group.create_task(answer(name, call))
    except ExceptionGroup as errors:
        # A fault or a cancel comes first. If a key's limits refuse several calls, the client returns when all may come.
        raise max(errors.exceptions, key=_rank) from None
    if not texts:
        raise _told(failures)
    return {name: texts[name] for name in calls if name in texts}


async def _choice(ensemble: Ensemble, call: Call, texts: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the chosen answer, and why. If the judge is away or busy, it is the first one.

    Empty answers, such as those cut off while reasoning, count only if all are.
    """
    texts = {name: text for name, text in texts.items() if text.strip()} or texts
    names = list(texts)
    try:
        at, why = await ensemble.choose(call, list(texts.values()))
    except (ApiError, Rejected, ModelAway) as error:
        if not _may_pass(error):
            raise
        at, why = 0, "not judged"
    return names[at], why


def _rank(error: Exception) -> tuple[bool, float]:
    return (False, error.retry_after_s or 0.0) if isinstance(error, Rejected) else (True, 0.0)


def _told(failures: list[_Failure]) -> _Failure:
    """Return the failure to raise if all members failed: the last one that may pass, or else the last."""
    return next(filter(_may_pass, reversed(failures)), failures[-1])


def _may_pass(error: _Failure) -> bool:
    """Return whether the same call may succeed later: the model is away or busy."""
    return isinstance(error, ModelAway) or status_of(error) in BUSY_STATUSES


def _ends_all(error: _Failure) -> bool:
    """Return whether this error ends the whole request: it was cancelled, or its key's limit is reached."""
    if isinstance(error, ApiError):
        return error.status_code == STATUS_CLIENT_CLOSED_REQUEST
    return isinstance(error, Rejected) and error.reason in TENANT_REASONS


async def _run_until_kept(call: Call, in_flight: InFlight, http: HttpRequest) -> RunningCall:
    """Run a call, and wait until its route has decided to keep the answer. Raises `ApiError`, `Rejected` and `Unsure`."""
    with counting_misses(call.running, call.terms):
        opened = await unless_gone(http, run(call, in_flight))
    note_call(http.scope, in_flight, opened)
    course = course_of(http.scope)
    if course.routed is not None and course.routed.trial is not None:
        with opened, counting_misses(call.running, call.terms):
            try:
                why = await unless_gone(http, course.routed.trial.judge(call, opened))
            except BaseException:
                course.routed = course.routed.pay_discarded(opened.num_prompt_tokens, opened.num_counted_tokens)
                raise
            course.routed = replace(course.routed.pay_discarded(0, opened.num_dropped_tokens), why=why)
    return opened


async def answer_in_thread(make: Callable[[], object]) -> Response:
    """Return the result of `make` as JSON. `make` runs in a thread. Raises what `make` raises."""
    content = await asyncio.to_thread(lambda: fast_json.dumps(make()))
    return Response(content, media_type="application/json")


async def answer_off_loop(running: RunningModel, size: int, make: Callable[[], object], http: HttpRequest) -> Response:
    """Return the result of `make` as JSON. If its input is large (`size`), `make` runs off the event loop.

    The caller keeps the model in use. If the client leaves before `make` has begun, it does not run.
    """
    work = running.off_loop.run(size, lambda: fast_json.dumps(make()), read_owner(http.scope))
    return Response(await unless_gone(http, work), media_type="application/json")


async def answer_prompt(
    prompt: TextPrompt | Conversation,
    running: RunningModel,
    data: bytes,
    http: HttpRequest,
    make: Callable[[TextPrompt, RunningModel], object],
) -> Response:
    """Return the result of `make` for a prompt as JSON. The chat template first makes a text of a conversation."""
    with running.using():
        if isinstance(prompt, Conversation):
            prompt = await unless_gone(http, render(prompt, running, read_owner(http.scope), len(data)))
        return await answer_off_loop(running, max(len(data), len(prompt.text)), partial(make, prompt, running), http)


def call_endpoint(body: type[_Body], read: Callable[[_Body, Asked], Made], reader: Reader, in_flight: InFlight) -> JsonEndpoint:
    """Return an endpoint that checks the body and passes it to `read`. Both may raise `ApiError` and `Rejected`."""

    @wraps(read)
    async def answer(data: bytes, http: HttpRequest) -> Response:
        return await answer_call(data, http, lambda one: read(parse_body(data, body, reader.ignored), one), reader, in_flight)

    return answer


async def answer_call(
    data: bytes, http: HttpRequest, read: Callable[[Asked], Made], reader: Reader, in_flight: InFlight
) -> Response:
    """Run the call that `read` makes, and return the response. Raises `ApiError` and `Rejected`."""
    opened, new_writer = await open_call(read, Asked(reader, data, http.scope), len(data), in_flight, http)
    return await respond(http, opened, new_writer)
