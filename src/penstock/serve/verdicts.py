"""Asks a model of this server which of a few words continues a conversation, and how likely each is.

Verifiers, judges and checks of pipelines use it. A grammar makes the model write one of the words, without reasoning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from penstock.calls.call import Call, ChatRequest, Conversation, Terms
from penstock.calls.check import make_call
from penstock.calls.in_flight import InFlight, RunningCall
from penstock.calls.run import run
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.obs.trace_context import Span
from penstock.serve.asking import Reader
from penstock.serve.course import course_of
from penstock.serve.errors import misconfigured, unavailable
from penstock.serve.http.entries import entry_of
from penstock.serve.trials import whole_answer
from penstock.text.grammar import Grammar, GrammarKind
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import NO_WAITS
from penstock.types.sampling import MAX_LOGPROBS

MAX_TOKENS = 32
"""A word has a few tokens; a model that must close its reasoning first needs some more."""


class Verdicts:
    def __init__(self, reader: Reader, in_flight: InFlight) -> None:
        self._reader, self._in_flight = reader, in_flight

    def check_there(self, name: str) -> RunningModel:
        """Return the model of this name. Raises `ModelAway` if it is not loaded, and `ApiError`."""
        served = self._reader.deployment.find(name)
        if served is None:
            raise unavailable(f"{name}, which judges answers, is no longer served.")
        running = served.answerer()
        if running.model.encoder is not None:
            raise misconfigured(f"{name} can't judge answers: it is an encoder. Name another model in the route or pipeline.")
        return running

    async def odds(
        self,
        name: str,
        http: HttpRequest,
        asked: Call,
        conversation: Conversation,
        words: Sequence[str],
        *,
        truncates: bool = True,
    ) -> list[float]:
        """Return how likely the model answers with each of the words; they sum to 1. Cancel it if the client leaves.

        `asked`: the client's call, whose answer is judged. `truncates`: drop the beginning of a conversation that is too long,
        instead of failing. Raises `ModelAway`, `ApiError` and `Rejected`.
        """
        running = self.check_there(name)
        request = ChatRequest(
            model=name,
            conversation=conversation,
            sampling={"temperature": 0.0},
            logprobs=MAX_LOGPROBS,
            max_tokens=MAX_TOKENS,
            reasoning_effort="none",
            truncate_prompt_tokens=-1 if truncates else None,
            grammar=Grammar(GrammarKind.CHOICE, json.dumps(words), param="model"),
        )
        began_ns = running.clock.now_ns()
        terms = _terms(asked.terms, running, began_ns)
        num_bytes = sum([message.num_chars for message in conversation.messages])
        try:
            call = make_call(request, running, terms, num_bytes=num_bytes)
            opened = await run(call, self._in_flight)
        except Rejected as rejected:
            if rejected.reason not in (RejectReason.INVALID, RejectReason.CONTEXT_LENGTH):
                raise
            raise misconfigured(f"{name} can't judge answers: {rejected.detail}") from None  # not the client's doing
        with closing(opened):
            chunk = await whole_answer(opened, asked.terms)
            _pay(name, opened, http)
        if (entry := entry_of(http.scope)) is not None:
            entry.spans.append(Span(name="judge", began_ns=began_ns, ended_ns=running.clock.now_ns()))
        return odds_in(chunk, words, running)


def _terms(terms: Terms, running: RunningModel, now_ns: int) -> Terms:
    """Return the terms for judging the answer to a client's request.

    The time in the queue counts from now, and the tenant's limits do not apply. If admission refuses, it keeps no place,
    because the client does not repeat the judging itself.
    """
    deadline_ns = None if terms.queue_deadline_ns is None else now_ns + terms.queue_deadline_ns - terms.queued_ns
    return replace(
        terms,
        arrival_ns=now_ns,
        queued_ns=now_ns,
        queue_deadline_ns=deadline_ns,
        first_token_deadline_ns=None,
        slo_ttft_ns=None,
        slo_itl_ns=None,
        priority=terms.priority if running.model.is_priority_scheduled else 0,
        waits=NO_WAITS,
        is_limited=False,
        is_retry=False,
        returns=False,
        conversation=b"",
    )


def _pay(name: str, call: RunningCall, http: HttpRequest) -> None:
    """Count the tokens as begun in vain, if the request's route has prices: no client sees them."""
    course = course_of(http.scope)
    routed = course.routed
    if routed is not None and routed.bill is not None and name in routed.bill.prices:
        course.routed = routed.pay_discarded(call.num_prompt_tokens, call.num_counted_tokens, model=name)


def odds_in(chunk: OutputChunk, words: Sequence[str], running: RunningModel) -> list[float]:
    """Return the probability of each word where the model wrote one; they sum to 1. Raises `ApiError`.

    Tokens that close a reasoning block may precede the word.
    """
    texts = ["" if running.tokenizer.is_special(one) else running.tokenizer.token_text(one) for one in chunk.token_ids]
    for first in reversed(range(len(texts))):
        if "".join(texts[first:]).strip().casefold() in words and texts[first].strip():
            token = chunk.logprobs[first]
            break
    else:
        raise unavailable(f"{running.name} was asked to judge an answer and wrote none of the expected words.")
    found = [0.0] * len(words)
    for token_id, logprob in (dict(token.top) | {token.token_id: token.logprob}).items():
        begun = running.tokenizer.token_text(token_id).strip().casefold()
        for nth, word in enumerate(words):
            if begun and word.startswith(begun):
                found[nth] += math.exp(logprob)
    return [one / sum(found) for one in found]
