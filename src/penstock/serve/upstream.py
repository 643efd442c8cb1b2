"""Sends requests to an upstream: a model on another server, over OpenAI's API.

A request's body is forwarded unchanged but for the model's name, nulls, and token limits of -1, which some servers refuse. The
answer is passed on unchanged, whole or event by event. A failure before its first event is an `ApiError`, and a route may ask
another model. A later one ends the stream (`upstream_stream`). No error that the client gets contains this server's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import fast_json
from penstock.admission.tenants import Demand, Tenants
from penstock.calls.call import Terms
from penstock.calls.in_flight import Charge
from penstock.clock import Clock
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.off_loop import INLINE_MAX_BODY, OffLoop
from penstock.obs.trace_context import Span
from penstock.serve.bodies import load_json
from penstock.serve.breaker import Breaker, Turn
from penstock.serve.errors import overloaded, unavailable
from penstock.serve.events import Garbage, as_object
from penstock.serve.http.checks import key_name, unless_gone
from penstock.serve.http.entries import asked_elsewhere
from penstock.serve.terms import claim_of, is_local_only
from penstock.serve.upstream_exchange import Exchange, Forwarded
from penstock.serve.upstream_stream import UpstreamStream
from penstock.types.errors import Rejected
from penstock.types.stats import UpstreamStats

for _name in ("httpx2", "httpcore2"):  # they log each request, and might log its headers
    logging.getLogger(_name).setLevel(logging.WARNING)

PATHS = ("/chat/completions", "/completions")
"""Paths that upstreams answer, after `/v1` or alone."""
_TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
CONNECT_TIMEOUT_S = 5.0
GUESSED_TOKENS, CHARS_PER_TOKEN = 256, 4
"""Assumed tokens of an answer, and characters of a body per token of a prompt, until the upstream reports its usage."""
MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_BYTES = 1 << 16
_AGAIN = (502, 503, 504)
"""Statuses after which the request is sent once more, if the budget allows it."""


def _forwarded(data: bytes, model: str) -> Forwarded:
    body: Any = {name: value for name, value in load_json(data).items() if value is not None}
    body = {name: value for name, value in body.items() if name not in _TOKEN_LIMITS or value != -1} | {"model": model}
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    num_new_tokens = asked if isinstance(asked, int) and 0 < asked < 1 << 20 else GUESSED_TOKENS
    num_choices = body.get("n") if isinstance(body.get("n"), int) else 1
    content = fast_json.dumps(body)
    num_prompt_tokens = len(content.decode()) // CHARS_PER_TOKEN
    return Forwarded(content, bool(body.get("stream")), num_prompt_tokens, num_new_tokens * max(1, num_choices))


class Upstream:
    """A model of another server. All methods but `keeps_out` are for the event loop."""

    def __init__(self, config: UpstreamConfig, clock: Clock, off_loop: OffLoop, tls: ssl.SSLContext) -> None:
        """`off_loop`: threads that parse large bodies and answers. `tls`: trusted certificates, shared by all."""
        self.config = config
        self.clock = clock
        self.results: Counter[str] = Counter()
        """Requests by how they ended."""
        self.tokens: Counter[str] = Counter()
        """Tokens of prompts and answers, as it counts them."""
        self._off_loop = off_loop
        self._tls = tls
        self._breaker = Breaker(clock)
        self._tenants = Tenants(config.tenant_limits)
        self._num_open = 0
        self._is_draining = False
        self._ended = asyncio.Event()
        """Set when a request ends, to wake all who wait, and cleared at once."""
        self._client: httpx2.AsyncClient | None = None

    def stats(self) -> UpstreamStats:
        return UpstreamStats(
            name=self.config.name, results=dict(self.results), tokens=dict(self.tokens), is_resting=self._breaker.is_open
        )

    def keeps_out(self, http: HttpRequest, body: object, texts: Sequence[str]) -> bool:
        """Return whether the request must not or can't be sent to the upstream. `texts`: all texts of the body.

        It can't if it is for another API or contains token ids.
        """
        config = self.config
        if http.url.path.removeprefix("/v1") not in PATHS or _has_token_ids(body):
            return True
        if is_local_only(http.scope) or key_name(http.scope) in config.never_keys:
            return True
        return config.keeps_text(texts)

    def refuse(self) -> None:
        """Refuse new requests."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until those under way have ended. Return whether all of them have."""
        self.refuse()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until_fewer_than(1)
        return not self._num_open

    async def _until_fewer_than(self, num_open: int) -> None:
        while self._num_open >= num_open:
            await self._ended.wait()

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def answer(self, data: bytes, http: HttpRequest, terms: Terms, charge: Charge | None = None) -> Response:
        """Return the answer, or a stream with its first event. Raises `ApiError` and `Rejected`.

        `charge`, if given, gets the prompt and answer tokens at the end, and whether the answer failed.
        """
        forwarded = await self._off_loop.parse(len(data), partial(_forwarded, data, self.config.model), terms.lane)
        demand = self._demand(data, forwarded, terms)
        if terms.background:  # lines of batches leave half of the places to others, and wait for theirs
            await unless_gone(http, self._until_fewer_than(max(1, self.config.max_concurrent // 2)))
        with contextlib.ExitStack() as held:
            far = asked_elsewhere(http.scope, self.config.name, self.config.model, self.clock.now_ns)
            span, headers = held.enter_context(far)
            exchange = held.enter_context(self._open(terms, demand, replace(forwarded, headers=headers), span))
            if charge is not None:
                held.callback(exchange.pay, charge)
            answer = await unless_gone(http, self._begin(http.url.path, exchange))
            if isinstance(answer, UpstreamStream):
                answer.hold(held.pop_all())
            return answer

    def _demand(self, data: bytes, forwarded: Forwarded, terms: Terms) -> Demand | None:
        """Return what the request takes of its tenant's limits. None without limits, and for lines of batches."""
        if terms.background or not (self._tenants.has_default or terms.limits is not None):
            return None
        tenant, num_tokens = terms.owner.tenant, forwarded.num_prompt_tokens + forwarded.num_new_tokens
        return Demand(tenant, terms.limits, num_tokens, self.clock.now_ns(), claim_of(tenant, data), terms.is_retry)

    @contextlib.contextmanager
    def _open(self, terms: Terms, demand: Demand | None, forwarded: Forwarded, span: Span) -> Iterator[Exchange]:
        """Let a request through, and count how it ends. Raises `ApiError`, and `Rejected` for a limit of its tenant."""
        most, began_ns = self.config.max_concurrent, self.clock.now_ns()
        if self._is_draining:
            self.results["refused"] += 1
            raise unavailable("The server is shutting down.")
        if demand is not None and (refusal := self._tenants.refusal(demand)) is not None:
            self.results["refused"] += 1
            wait_s = None if refusal.wait_ns is None else refusal.wait_ns / 1e9
            raise Rejected(refusal.reason, refusal.detail, retry_after_s=wait_s)
        if self._num_open >= most:
            self.results["refused"] += 1
            raise overloaded(f"{self.config.name} already has {most} requests from this server (max_concurrent).", 1.0)
        turn = self._breaker.begin()
        if not isinstance(turn, Turn):
            self.results["refused"] += 1
            raise unavailable(f"{self.config.name} has failed repeatedly, so requests to it are paused.", turn / 1e9)
        held = None if demand is None else self._tenants.hold(demand)
        exchange = Exchange(self.config, self.clock, forwarded, terms, turn, span)
        self._num_open += 1
        try:
            yield exchange
        finally:
            self._num_open -= 1
            turn.close()
            self.results[exchange.result] += 1
            self.tokens.update(exchange.usage)
            span.attributes["penstock.result"], span.has_failed = exchange.result, exchange.result == "failed"
            if held is not None:
                self._tenants.release(held)
                now_ns, name = self.clock.now_ns(), str(id(exchange))
                self._tenants.enter(held, name, exchange.num_tokens, now_ns)
                self._tenants.on_finish(name, exchange.num_tokens, now_ns - began_ns)
            self._ended.set()
            self._ended.clear()

    async def _begin(self, path: str, exchange: Exchange) -> Response:
        """Send the request, and return the answer; of a stream, the first event has come. Raises `ApiError`."""
        try:
            async with asyncio.timeout(exchange.left_s(has_begun=False)):
                return await self._ask(path, exchange)
        except TimeoutError:
            message = f"{self.config.name} did not answer within the time that the request allows."
            raise exchange.was_late(message) from None

    async def _ask(self, path: str, exchange: Exchange) -> Response:
        response, stays_open = None, False
        try:
            async with asyncio.timeout(exchange.silence_s):  # interim responses and a body of blanks are silence, too
                response = await self._head(path, exchange)
                if response.status_code != 200:
                    raise exchange.refused(response, await _read(response, MAX_ERROR_BYTES, cuts=True))
                if not exchange.forwarded.is_streamed:
                    return await self._whole(response, exchange)
            stream = UpstreamStream(exchange, response)
            async with asyncio.timeout(exchange.silence_s):  # and so are comments alone
                await stream.begin()
            stays_open = True
            return stream
        except (Garbage, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise exchange.failed(error) from None
        finally:
            if response is not None and not stays_open:
                await response.aclose()

    async def _head(self, path: str, exchange: Exchange) -> httpx2.Response:
        """Return the head of the answer: of the second one if the first attempt fails and another is allowed."""
        try:
            response = await self._send(path, exchange)
            if response.status_code not in _AGAIN or not self._breaker.may_retry():
                return response
            await response.aclose()
        except (httpx2.HTTPError, OSError) as error:
            # No retry after a timeout: a silent server may still be working, and reconnecting delays the client.
            if isinstance(error, (httpx2.ReadTimeout, httpx2.ConnectTimeout)) or not self._breaker.may_retry():
                raise
        return await self._send(path, exchange)

    async def _whole(self, response: httpx2.Response, exchange: Exchange) -> Response:
        data = await _read(response)
        is_small = len(data) <= INLINE_MAX_BODY
        value = as_object(data) if is_small else await self._off_loop.finish(len(data), partial(as_object, data))
        if not isinstance(value.get("choices"), list):
            raise Garbage("its answer has no choices")
        exchange.succeeded(value)
        return Response(data, media_type="application/json")

    async def _send(self, path: str, exchange: Exchange) -> httpx2.Response:
        """Send a request, and return the head of its answer."""
        if self._client is None:
            config = self.config
            headers = {"User-Agent": "penstock", "Accept-Encoding": "identity", "Content-Type": "application/json"}
            if config.key:
                headers["Authorization"] = f"Bearer {config.key}"
            self._client = httpx2.AsyncClient(
                headers=headers,
                verify=self._tls,
                limits=httpx2.Limits(max_connections=config.max_concurrent),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # those of one client are not for the next
            )
        forwarded, timeout = exchange.forwarded, httpx2.Timeout(exchange.silence_s, connect=CONNECT_TIMEOUT_S)
        url = self.config.url + path.removeprefix("/v1")
        headers = dict(forwarded.headers)
        request = self._client.build_request(
            "POST", url, content=forwarded.content, headers=headers, timeout=timeout, extensions={"trace": exchange.trace}
        )
        return await self._client.send(request, stream=True)


def _has_token_ids(body: object) -> bool:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt)


async def _read(response: httpx2.Response, most: int = MAX_ANSWER_BYTES, *, cuts: bool = False) -> bytes:
    """Return the body. Raises Garbage if it is larger than `most`, or cuts it off there."""
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > most:
            if cuts:
                break
            raise Garbage(f"its answer has more than {most} bytes")
    return bytes(data)
