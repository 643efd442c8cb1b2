"""Asks a model of another server: one that speaks OpenAI's API, over HTTP.

A request's body goes there as it came, but for the model's name. The answer comes back as it is, whole or event by event. Until
its first event has come, whatever fails is an `ApiError`, and a route may ask another model; after that it ends the stream.
What the other server says of an error never contains this server's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock import fast_json
from penstock.admission.tenants import Demand, Tenants
from penstock.calls.call import Terms
from penstock.clock import Clock
from penstock.config.upstreams import UpstreamConfig
from penstock.routes.questions import texts_in
from penstock.serve.bodies import load_json
from penstock.serve.breaker import Breaker
from penstock.serve.errors import ApiError, internal, overloaded, past_deadline, shorten, unavailable
from penstock.serve.events import Event, EventReader, Garbage, as_object
from penstock.serve.http.checks import identity_of, key_name, unless_gone
from penstock.serve.streams import whole_lines
from penstock.types.errors import Rejected
from penstock.types.stats import UpstreamStats

_log = logging.getLogger(__name__)

PATHS = ("/v1/chat/completions", "/v1/completions")
LOCAL_ONLY = "x-local-only"
"""Header of a request that must stay here."""
CONNECT_TIMEOUT_S = 5.0
GUESSED_TOKENS, CHARS_PER_TOKEN = 256, 4
"""Sizes with which a key's limits reckon, until the answer tells."""
MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_BYTES = 1 << 16
MAX_TOLD_CHARS = 500
MAX_RETRY_AFTER_S = 3600.0
_AGAIN = (502, 503, 504)
"""Statuses after which the request is sent once more, if the budget allows it."""
_SILENT = "silent"
_OF_CLIENT = (400, 413, 422)
"""Statuses that tell what is wrong with the request."""


@dataclass(slots=True)
class Charge:
    """Tokens that a request's key pays for."""

    num_tokens: int = 0


class Upstream:
    """For one event loop."""

    def __init__(self, config: UpstreamConfig, clock: Clock) -> None:
        self.config = config
        self.results: Counter[str] = Counter()
        """Requests by how they ended."""
        self.tokens: Counter[str] = Counter()
        """Tokens of prompts and answers, as it counts them."""
        self._clock = clock
        self._breaker = Breaker(clock)
        self._tenants = Tenants(None, None)
        self._num_open = 0
        self._when_idle: asyncio.Event | None = None
        """Set when the last request has ended, once no new ones are taken."""
        self._client: httpx2.AsyncClient | None = None

    def stats(self) -> UpstreamStats:
        return UpstreamStats(
            name=self.config.name, results=dict(self.results), tokens=dict(self.tokens), is_resting=self._breaker.is_open
        )

    def keeps_out(self, http: HttpRequest, texts: Sequence[str]) -> bool:
        """Return whether a request with these texts must not go there, or is of an API that is not spoken there."""
        config = self.config
        if http.url.path not in PATHS:
            return True
        if http.headers.get(LOCAL_ONLY, "false").lower() not in ("", "0", "false") or key_name(http.scope) in config.never_keys:
            return True
        return any(pattern.search(text) for pattern in config.never_matching for text in texts)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return self._num_open

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for those that are open."""
        self._when_idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._num_open:
                    await self._when_idle.wait()

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def answer(self, data: bytes, http: HttpRequest, terms: Terms) -> Response:
        """Return the answer, of which at least the first event has come. Raises `ApiError`."""
        body = load_json(data)
        body["model"] = self.config.model
        with contextlib.ExitStack() as held:
            held.enter_context(self._place())
            charge = held.enter_context(self._charged(terms, body))
            answer = await unless_gone(http, self._begin(http.url.path, body, terms, charge))
            if isinstance(answer, UpstreamStream):
                answer.hold(held.pop_all())
            return answer

    @contextlib.contextmanager
    def _charged(self, terms: Terms, body: dict[str, Any]) -> Iterator[Charge]:
        """Charge the request to its key, whose limits hold as for a model. Raises `Rejected`."""
        charge, began_ns = Charge(), self._clock.now_ns()
        if terms.limits is None:
            yield charge
            return
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        num_tokens = asked if isinstance(asked, int) and 0 < asked < 1 << 20 else GUESSED_TOKENS
        num_tokens += sum(map(len, texts_in(body))) // CHARS_PER_TOKEN
        demand = Demand(terms.owner.tenant, terms.limits, 1, num_tokens, began_ns)
        if (refusal := self._tenants.refusal(demand)) is not None:
            wait_s = None if refusal.wait_ns is None else refusal.wait_ns / 1e9
            raise Rejected(refusal.reason, refusal.detail, retry_after_s=wait_s)
        account = self._tenants.hold(demand)
        try:
            yield charge
        finally:
            self._tenants.release(account, demand)
            now_ns, name = self._clock.now_ns(), str(id(charge))
            self._tenants.enter(demand.tenant, name, charge.num_tokens, now_ns)
            self._tenants.on_finish(name, charge.num_tokens, now_ns - began_ns)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        most = self.config.max_concurrent
        if self._when_idle is not None:
            raise unavailable("The server is shutting down.")
        if self._num_open >= most:
            self.results["refused"] += 1
            raise overloaded(f"{self.config.name} has {most} requests of this server already (max_concurrent).", 1.0)
        if (wait_ns := self._breaker.wait_ns()) > 0:
            self.results["refused"] += 1
            raise unavailable(f"{self.config.name} failed just now, and is left alone for a while.", wait_ns / 1e9)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._breaker.forget()
            if self._when_idle is not None and not self._num_open:
                self._when_idle.set()

    async def _begin(self, path: str, body: dict[str, Any], terms: Terms, charge: Charge) -> Response:
        limits = [at_ns for at_ns in (terms.deadline_ns, terms.first_token_deadline_ns) if at_ns is not None]
        left_s = (min(limits) - self._clock.now_ns()) / 1e9 if limits else None
        try:
            async with asyncio.timeout(left_s):
                return await self._exchange(path, body, terms, charge)
        except TimeoutError:
            self.results["late"] += 1
            raise past_deadline(f"{self.config.name} did not answer within the time that the request allows.") from None

    async def _exchange(self, path: str, body: dict[str, Any], terms: Terms, charge: Charge) -> Response:
        content = fast_json.dumps(body)
        for is_last in (False, True):
            try:
                response = await self._send(path, content)
            except (httpx2.HTTPError, OSError) as error:
                failure = self.failed(error)
                # One that was silent may be at work.
                if is_last or isinstance(error, httpx2.ReadTimeout) or not self._breaker.may_retry():
                    raise failure from None
                continue
            if response.status_code in _AGAIN and not is_last and self._breaker.may_retry():
                await response.aclose()
                continue
            break
        stays_open = False
        try:
            if response.status_code != 200:
                raise await self._refusal(response)
            if not body.get("stream"):
                return await self._whole(response, charge)
            stream = UpstreamStream(self, response, terms, charge)
            await stream.begin()
            stays_open = True
            return stream
        except (Garbage, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise self.failed(error) from None
        finally:
            if not stays_open:
                await response.aclose()

    async def _send(self, path: str, content: bytes) -> httpx2.Response:
        client = self._connected()
        request = client.build_request(
            "POST", self.config.url + path.removeprefix("/v1"), content=content, headers={"Content-Type": "application/json"}
        )
        return await client.send(request, stream=True)

    def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            config = self.config
            timeout = httpx2.Timeout(config.max_silence_s, connect=CONNECT_TIMEOUT_S)
            headers = {"User-Agent": "penstock", "Accept-Encoding": "identity"}
            if config.key:
                headers["Authorization"] = f"Bearer {config.key}"
            limits = httpx2.Limits(max_connections=config.max_concurrent)
            self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)
        return self._client

    async def _whole(self, response: httpx2.Response, charge: Charge) -> Response:
        data = await _read(response, MAX_ANSWER_BYTES)
        value = as_object(data)
        if not isinstance(value.get("choices"), list):
            raise Garbage("its answer has no choices")
        self.succeeded(value, charge)
        return Response(data, media_type="application/json")

    async def _refusal(self, response: httpx2.Response) -> ApiError:
        """Return the error for an answer with another status than 200."""
        name, status = self.config.name, response.status_code
        told = self._told(await _read(response, MAX_ERROR_BYTES))
        if status in _OF_CLIENT:
            self._breaker.succeed()
            self.results["invalid"] += 1
            return ApiError(status, f"{name} refuses the request{told}", code="invalid_request_error")
        if status == 429:
            self._breaker.succeed()
            self.results["busy"] += 1
            return overloaded(f"{name} is busy.", _retry_after_s(response))
        self._breaker.fail()
        self.results["failed"] += 1
        if status in (401, 403):
            _log.error("the upstream %s refuses its key (status %d)", name, status)
            return _bad_gateway(f"{name} refuses this server's key.")
        _log.warning("the upstream %s answered with status %d%s", name, status, told)
        return (
            unavailable(f"{name} is unavailable.", _retry_after_s(response))
            if status == 503
            else _bad_gateway(f"{name} answered with status {status}{told}")
        )

    def _told(self, data: bytes) -> str:
        """Return what an error's body says, without what might be a key."""
        with contextlib.suppress(Garbage):
            value = as_object(data)
            error = value.get("error", value)
            message = error.get("message") if isinstance(error, dict) else error
            if isinstance(message, str):
                if self.config.key:
                    message = message.replace(self.config.key, "***")
                return f": {shorten(_LIKE_A_KEY.sub('***', message)[:MAX_TOLD_CHARS])}"
        return "."

    def succeeded(self, value: dict[str, Any], charge: Charge) -> None:
        """Count an answer that has ended well. `value`: it, or its last event with a usage."""
        self._breaker.succeed()
        self.results["ok"] += 1
        usage = value.get("usage")
        if isinstance(usage, dict):
            for kind in ("prompt_tokens", "completion_tokens"):
                if isinstance(number := usage.get(kind), int) and 0 <= number < 2**53:
                    self.tokens[kind.removesuffix("_tokens")] += number
                    charge.num_tokens += number

    def failed(self, error: Exception) -> ApiError:
        """Count a failure, and return what to tell the client."""
        self._breaker.fail()
        self.results["failed"] += 1
        name, why = self.config.name, _why(error)
        _log.warning("the upstream %s failed: %s", name, why)
        if why == _SILENT:
            return ApiError(
                504,
                f"{name} was silent for {self.config.max_silence_s:g} s.",
                code="upstream_timeout",
                error_type="server_error",
            )
        return _bad_gateway(f"{name} failed: {why}.")


class UpstreamStream(Response):
    """Passes the events of an answer on, as they come."""

    def __init__(self, upstream: Upstream, response: httpx2.Response, terms: Terms, charge: Charge) -> None:
        super().__init__()
        self._upstream = upstream
        self._response = response
        self._terms = terms
        self._charge = charge
        self._pieces: AsyncIterator[bytes] = response.aiter_raw()
        self._reader = EventReader()
        self._events: list[Event] = []
        self._last: dict[str, Any] = {}
        """The last event with a usage."""
        self._is_done = False
        self._has_ended = False
        """Whether a choice has said why it ended: some servers close without a last event."""
        self._held = contextlib.ExitStack()

    def hold(self, held: contextlib.ExitStack) -> None:
        """Close this at the end of the stream."""
        self._held = held

    async def begin(self) -> None:
        """Wait for the first event with data. Raises Garbage and the client's errors."""
        if not self._response.headers.get("content-type", "").startswith("text/event-stream"):
            raise Garbage("it sent no stream")
        while not any(event.data is not None or event.is_done for event in self._events):
            if not await self._read():
                raise Garbage("it closed the connection without an answer")

    async def _read(self) -> bool:
        """Wait for the next events, and return whether some may follow."""
        piece = await anext(self._pieces, None)
        if piece is None:
            return False
        for event in self._reader.push(piece):
            if event.data is not None:
                self._look(event.data)
            self._is_done |= event.is_done
            self._events.append(event)
        return not self._is_done

    def _look(self, data: dict[str, Any]) -> None:
        if "error" in data and "choices" not in data:
            raise Garbage(f"it ended the answer with an error{self._upstream._told(fast_json.dumps(data))}".removesuffix("."))
        choices = data.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise Garbage("it sent an event without choices")
        self._has_ended |= any(choice.get("finish_reason") for choice in choices)
        if data.get("usage"):
            self._last = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http, left = HttpRequest(scope, receive), False
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
            end = await unless_gone(http, self._pass_on(send))
            await send({"type": "http.response.body", "body": end, "more_body": False})
        except ApiError:  # the client has left
            left = True
            self._upstream.results["left"] += 1
        except Exception:
            request_id = identity_of(scope).request_id
            _log.exception("request %s failed while it was streamed", request_id)
            await send({"type": "http.response.body", "body": _error_event(internal(request_id)), "more_body": False})
        finally:
            with contextlib.suppress(Exception):
                await self._response.aclose()
            self._held.close()
        if left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, send: Send) -> bytes:
        """Send all events but for the last bytes, which are returned."""
        deadline_ns, clock = self._terms.deadline_ns, self._upstream._clock
        left_s = None if deadline_ns is None else (deadline_ns - clock.now_ns()) / 1e9
        try:
            async with asyncio.timeout(left_s):
                goes_on = not self._is_done
                while goes_on:
                    await self._send_events(send)
                    goes_on = await self._read()
        except TimeoutError:
            self._upstream.results["late"] += 1
            return self._rest() + _error_event(past_deadline("The deadline has passed while the answer was streamed."))
        except (Garbage, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return self._rest() + _error_event(self._upstream.failed(error))
        if not self._is_done and not self._has_ended:
            return self._rest() + _error_event(self._upstream.failed(Garbage("it closed the connection before the end")))
        self._upstream.succeeded(self._last, self._charge)
        return self._rest() + (b"" if self._is_done else b"data: [DONE]\n\n")

    async def _send_events(self, send: Send) -> None:
        if data := self._rest():
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _rest(self) -> bytes:
        events, self._events = self._events, []
        return whole_lines(b"".join([event.raw for event in events]))


_LIKE_A_KEY = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][\w*.-]{4,}")


def _why(error: Exception) -> str:
    """Return why an exchange failed, without addresses."""

    if isinstance(error, Garbage):
        return str(error)
    if isinstance(error, httpx2.ConnectTimeout):
        return "it can't be reached"
    if isinstance(error, (httpx2.ReadTimeout, httpx2.WriteTimeout, httpx2.PoolTimeout)):
        return _SILENT
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return "its certificate is not trusted" if isinstance(cause, ssl.SSLCertVerificationError) else "TLS failed"
        cause = cause.__cause__ or cause.__context__
    return "it can't be reached" if isinstance(error, httpx2.ConnectError) else "the connection broke"


async def _read(response: httpx2.Response, most: int) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise Garbage(f"its answer has more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None


def _bad_gateway(message: str) -> ApiError:
    return ApiError(502, message, code="upstream_failed", error_type="server_error")


def _error_event(error: ApiError) -> bytes:
    return b"data: %s\n\n" % error.body()
