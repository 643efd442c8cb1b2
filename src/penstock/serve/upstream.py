"""Asks a model of another server: one that speaks OpenAI's API, over HTTP.

A request's body goes there as it came, but for the model's name. The answer comes back as it is, whole or event by event. Until
its first event has come, whatever fails is an `ApiError`, and a route may ask another model; after that it ends the stream
(`upstream_stream`). No error that the client gets contains this server's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import fast_json
from penstock.admission.tenants import Demand, Tenants
from penstock.calls.call import Terms
from penstock.clock import Clock
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.off_loop import OffLoop
from penstock.obs.trace_context import Span
from penstock.routes.questions import texts_in
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.breaker import Breaker, Turn
from penstock.serve.errors import ApiError, overloaded, past_deadline, shorten, unavailable
from penstock.serve.events import Garbage, as_object
from penstock.serve.http.checks import key_name, unless_gone
from penstock.serve.http.entries import asked_elsewhere
from penstock.serve.upstream_stream import UpstreamStream
from penstock.types.errors import Rejected
from penstock.types.stats import UpstreamStats

_log = logging.getLogger(__name__)
for _name in ("httpx2", "httpcore2"):  # they log each request, and might log its headers
    logging.getLogger(_name).setLevel(logging.WARNING)

PATHS = ("/v1/chat/completions", "/v1/completions")
LOCAL_ONLY = "x-local-only"
"""Header of a request that must stay here."""
CONNECT_TIMEOUT_S = 5.0
GUESSED_TOKENS, CHARS_PER_TOKEN = 256, 4
"""Size of an answer, and of a token, until the upstream tells."""
MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_BYTES = 1 << 16
MAX_TOLD_CHARS = 500
MAX_RETRY_AFTER_S = 3600.0
_AGAIN = (502, 503, 504)
"""Statuses after which the request is sent once more, if the budget allows it."""
_OF_CLIENT = (400, 403, 413, 422)
"""Statuses that tell what is wrong with the request."""
_SILENT = "silent"
_LIKE_A_KEY = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][\w*.-]{4,}")


@dataclass(frozen=True, slots=True)
class Question:
    content: bytes
    """The body, with the model's name there."""
    is_streamed: bool
    num_prompt_tokens: int
    """A guess, as the next one."""
    num_new_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that continue the trace of the request."""


def _question(data: bytes, model: str) -> Question:
    body = load_json(data)
    body["model"] = model
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    num_new_tokens = asked if isinstance(asked, int) and 0 < asked < 1 << 20 else GUESSED_TOKENS
    num_choices = body.get("n") if isinstance(body.get("n"), int) else 1
    num_prompt_tokens = sum(map(len, texts_in(body))) // CHARS_PER_TOKEN
    return Question(fast_json.dumps(body), bool(body.get("stream")), num_prompt_tokens, num_new_tokens * max(1, num_choices))


class Upstream:
    """A model of another server. All methods but `keeps_out` are for the event loop."""

    def __init__(self, config: UpstreamConfig, clock: Clock, off_loop: OffLoop) -> None:
        """`off_loop`: threads that parse large bodies and answers."""
        self.config = config
        self.clock = clock
        self.results: Counter[str] = Counter()
        """Requests by how they ended."""
        self.tokens: Counter[str] = Counter()
        """Tokens of prompts and answers, as it counts them."""
        self._off_loop = off_loop
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

    def keeps_out(self, http: HttpRequest, body: object, texts: Sequence[str]) -> bool:
        """Return whether a request must not go there, or can't: it is of another API, or has this server's token ids.

        `texts`: all texts of the body.
        """
        config = self.config
        if http.url.path not in PATHS or _has_token_ids(body):
            return True
        wishes = http.headers.getlist(LOCAL_ONLY)
        if any(wish.lower() not in ("", "0", "false") for wish in wishes) or key_name(http.scope) in config.never_keys:
            return True
        return config.keeps_text(texts)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until those under way have ended. Return whether all of them have."""
        self._when_idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._num_open:
                    await self._when_idle.wait()
        return not self._num_open

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def answer(
        self, data: bytes, http: HttpRequest, terms: Terms, charge: Callable[[int, int], object] | None = None
    ) -> Response:
        """Return the answer; of a stream, the first event has come. Raises `ApiError` and `Rejected`.

        `charge` gets the tokens of prompt and answer at its end, if there is one.
        """
        question = await self._off_loop.run(len(data), partial(_question, data, self.config.model), limit=INLINE_MAX_BYTES)
        with contextlib.ExitStack() as held:
            far = asked_elsewhere(http.scope, self.config.name, self.config.model, self.clock.now_ns)
            span, headers = held.enter_context(far)
            exchange = held.enter_context(self._open(terms, replace(question, headers=headers), span))
            if charge is not None:
                held.callback(_pay, exchange, charge)
            answer = await unless_gone(http, exchange.begin(http.url.path))
            if isinstance(answer, UpstreamStream):
                answer.hold(held.pop_all())
            return answer

    @contextlib.contextmanager
    def _open(self, terms: Terms, question: Question, span: Span) -> Iterator[Exchange]:
        """Let a request through, and count how it ends. Raises `ApiError`, and `Rejected` for a limit of its key."""
        most, began_ns = self.config.max_concurrent, self.clock.now_ns()
        if terms.background:  # lines of batches leave half of the places to others
            most = max(1, most // 2)
        if self._when_idle is not None:
            raise unavailable("The server is shutting down.")
        num_tokens = question.num_prompt_tokens + question.num_new_tokens
        demand = Demand(terms.owner.tenant, terms.limits, 1, num_tokens, began_ns)
        if terms.limits is not None and (refusal := self._tenants.refusal(demand)) is not None:
            wait_s = None if refusal.wait_ns is None else refusal.wait_ns / 1e9
            raise Rejected(refusal.reason, refusal.detail, retry_after_s=wait_s)
        if self._num_open >= most:
            self.results["refused"] += 1
            raise overloaded(f"{self.config.name} has {most} requests of this server already (max_concurrent).", 1.0)
        turn = self._breaker.begin()
        if not isinstance(turn, Turn):
            self.results["refused"] += 1
            raise unavailable(f"{self.config.name} failed just now, and is left alone for a while.", turn / 1e9)
        account = None if terms.limits is None else self._tenants.hold(demand)
        exchange = Exchange(self, question, terms, turn, span)
        self._num_open += 1
        try:
            yield exchange
        finally:
            self._num_open -= 1
            turn.close()
            self.results[exchange.result] += 1
            span.attributes["penstock.result"], span.has_failed = exchange.result, exchange.result == "failed"
            if account is not None:
                self._tenants.release(account, demand)
                now_ns, name = self.clock.now_ns(), str(id(exchange))
                self._tenants.enter(demand.tenant, name, exchange.num_tokens, now_ns)
                self._tenants.on_finish(name, exchange.num_tokens, now_ns - began_ns)
            if self._when_idle is not None and not self._num_open:
                self._when_idle.set()

    def may_retry(self) -> bool:
        return self._breaker.may_retry()

    async def send(self, path: str, question: Question) -> httpx2.Response:
        """Send a request, and return the head of its answer."""
        if self._client is None:
            config = self.config
            headers = {"User-Agent": "penstock", "Accept-Encoding": "identity", "Content-Type": "application/json"}
            if config.key:
                headers["Authorization"] = f"Bearer {config.key}"
            self._client = httpx2.AsyncClient(
                headers=headers,
                limits=httpx2.Limits(max_connections=config.max_concurrent),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # those of one client are not for the next
            )
        silence_s = self.config.max_silence_s if question.is_streamed else self.config.max_answer_s
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        url = self.config.url + path.removeprefix("/v1")
        headers = dict(question.headers)
        request = self._client.build_request("POST", url, content=question.content, headers=headers, timeout=timeout)
        return await self._client.send(request, stream=True)

    async def parse(self, data: bytes) -> dict[str, Any]:
        """Return an answer as an object. Raises Garbage."""
        return await self._off_loop.run(len(data), partial(as_object, data), limit=INLINE_MAX_BYTES)

    def told(self, value: dict[str, Any]) -> str:
        """Return what an error says, without what might be a key."""
        error = value.get("error", value)
        message = error.get("message") if isinstance(error, dict) else error
        if not isinstance(message, str):
            return "."
        if self.config.key:
            message = message.replace(self.config.key, "***")
        return f": {shorten(_LIKE_A_KEY.sub('***', message)[:MAX_TOLD_CHARS])}"


class Exchange:
    """One request to an upstream, and how it ends."""

    def __init__(self, upstream: Upstream, question: Question, terms: Terms, turn: Turn, span: Span) -> None:
        self.upstream = upstream
        self.question = question
        self.terms = terms
        self.result = "left"
        """How it ends, a key of `Upstream.results`: its client leaves, unless something else happens."""
        self.num_prompt_tokens = self.num_new_tokens = 0
        """Tokens that the request's key pays for, guessed until the upstream tells."""
        self._turn = turn
        self._span = span

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_new_tokens

    @property
    def max_silence_s(self) -> float:
        return self.upstream.config.max_silence_s

    def left_s(self) -> float | None:
        """Return the time until the deadline of the whole answer, or None."""
        return self._until_s(self.terms.deadline_ns)

    def _until_s(self, *limits_ns: int | None) -> float | None:
        known = [at_ns for at_ns in limits_ns if at_ns is not None]
        return (min(known) - self.upstream.clock.now_ns()) / 1e9 if known else None

    async def begin(self, path: str) -> Response:
        """Send the request, and return the answer; of a stream, the first event has come. Raises `ApiError`."""
        of_first_token_ns = self.terms.first_token_deadline_ns if self.question.is_streamed else None
        try:
            async with asyncio.timeout(self._until_s(self.terms.deadline_ns, of_first_token_ns)):
                return await self._exchange(path)
        except TimeoutError:
            name = self.upstream.config.name
            raise self.was_late(f"{name} did not answer within the time that the request allows.") from None

    async def _exchange(self, path: str) -> Response:
        response = await self._head(path)
        stays_open = False
        try:
            if response.status_code != 200:
                raise await self._refusal(response)
            if not self.question.is_streamed:
                return await self._whole(response)
            stream = UpstreamStream(self, response)
            await stream.begin()
            stays_open = True
            return stream
        except (Garbage, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise self.failed(error) from None
        finally:
            if not stays_open:
                await response.aclose()

    async def _head(self, path: str) -> httpx2.Response:
        """Return the head of the answer: of the second one if the first attempt fails and another is allowed."""
        upstream = self.upstream
        try:
            response = await upstream.send(path, self.question)
            if response.status_code not in _AGAIN or not upstream.may_retry():
                return response
            await response.aclose()
        except (httpx2.HTTPError, OSError) as error:
            # A server that was silent may be at work on it; one that can't be reached keeps the client waiting.
            if isinstance(error, (httpx2.ReadTimeout, httpx2.ConnectTimeout)) or not upstream.may_retry():
                raise self.failed(error) from None
        try:
            return await upstream.send(path, self.question)
        except (httpx2.HTTPError, OSError) as error:
            raise self.failed(error) from None

    async def _whole(self, response: httpx2.Response) -> Response:
        data = await _read(response)
        value = await self.upstream.parse(data)
        if not isinstance(value.get("choices"), list):
            raise Garbage("its answer has no choices")
        self.num_prompt_tokens, self.num_new_tokens = self.question.num_prompt_tokens, self.question.num_new_tokens
        self.succeeded(value)
        return Response(data, media_type="application/json")

    async def _refusal(self, response: httpx2.Response) -> ApiError:
        """Return the error for an answer with another status than 200."""
        name, status, told = self.upstream.config.name, response.status_code, "."
        with contextlib.suppress(Garbage):
            told = self.upstream.told(as_object(await _read(response, MAX_ERROR_BYTES, cuts=True)))
        if status in _OF_CLIENT:
            self._turn.succeed()
            self.result = "invalid"
            return ApiError(status, f"{name} refuses the request{told}", code="invalid_request_error")
        if status == 429:
            self._turn.succeed()
            self.result = "busy"
            return overloaded(f"{name} is busy.", _retry_after_s(response))
        self._turn.fail()
        self.result = "failed"
        if status == 401:
            _log.error("the upstream %s refuses its key", name)
            return _bad_gateway(f"{name} refuses this server's key.")
        _log.warning("the upstream %s answered with status %d%s", name, status, told)
        if status == 503:
            return unavailable(f"{name} is unavailable.", _retry_after_s(response))
        return _bad_gateway(f"{name} answered with status {status}{told}")

    def works(self) -> None:
        """Note that the upstream answers."""
        self._turn.works()

    def succeeded(self, value: dict[str, Any]) -> None:
        """Count an answer that has ended well. `value`: the answer, or the event of a stream that has its usage."""
        self._turn.succeed()
        self.result = "ok"
        usage = value.get("usage")
        if isinstance(usage, dict):
            told = {kind: usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")}
            known = {kind: number for kind, number in told.items() if isinstance(number, int) and 0 <= number < 2**53}
            self.upstream.tokens.update(known)
            names = {"prompt": "gen_ai.usage.input_tokens", "completion": "gen_ai.usage.output_tokens"}
            self._span.attributes |= {names[kind]: number for kind, number in known.items()}
            if any(known.values()):
                self.num_prompt_tokens, self.num_new_tokens = known.get("prompt", 0), known.get("completion", 0)

    def look(self, event: dict[str, Any]) -> None:
        """Count an event of a stream. Raises Garbage if it is an error."""
        if "error" in event and "choices" not in event:
            raise Garbage(f"it ended the answer with an error{self.upstream.told(event)}".removesuffix("."))
        self.num_prompt_tokens = self.question.num_prompt_tokens
        self.num_new_tokens += 1

    def was_late(self, message: str) -> ApiError:
        """Count a deadline that has passed, and return what to tell the client."""
        self.result = "late"
        return past_deadline(message)

    def failed(self, error: Exception) -> ApiError:
        """Count a failure, and return what to tell the client."""
        self._turn.fail()
        self.result = "failed"
        config, why = self.upstream.config, _why(error)
        _log.warning("the upstream %s failed: %s", config.name, why)
        if why == _SILENT:
            silence_s = config.max_silence_s if self.question.is_streamed else config.max_answer_s
            message = f"{config.name} was silent for {silence_s:g} s."
            return ApiError(504, message, code="upstream_timeout", error_type="server_error")
        return _bad_gateway(f"{config.name} failed: {why}.")


def _pay(exchange: Exchange, charge: Callable[[int, int], object]) -> None:
    if exchange.num_tokens:
        charge(exchange.num_prompt_tokens, exchange.num_new_tokens)


def _has_token_ids(body: object) -> bool:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt)


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


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None


def _bad_gateway(message: str) -> ApiError:
    return ApiError(502, message, code="upstream_failed", error_type="server_error")
