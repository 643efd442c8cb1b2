"""Trials: the small model of a route begins to answer, and what it has said decides whether its answer is kept.

No client sees the answer before that decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.calls.call import Call, Conversation, Terms, TextPrompt
from penstock.calls.in_flight import RunningCall
from penstock.config.pipelines import CheckConfig
from penstock.config.routes import AgreementConfig
from penstock.engine.ports import OutputChunk
from penstock.routes.agreement import majority, normalised
from penstock.serve.errors import cancelled
from penstock.serve.streams import error_of
from penstock.text.answers import gather
from penstock.text.dialects import Message
from penstock.types.request import FinishReason
from penstock.types.sampling import PARAMETERS

_ANOTHER_MODEL = "its route asked another model"


class Unsure(Exception):
    """The route asks the large model. The message says why."""


class Trial(Protocol):
    def prepared(self, call: Call) -> Call:
        """Return the call, changed to produce the data that the trial needs. Raises `Unsure`."""
        ...

    async def judge(self, call: Call, opened: RunningCall) -> str:
        """Return why the answer of `opened` is kept. Raises `Unsure`, and `ApiError` if the call fails meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """A cascade: the likelihood of the first tokens decides."""

    num_tokens: int
    gain: Callable[[Sequence[float]], float]
    """Returns the expected gain of asking the large model, from the log-probabilities of the first tokens."""
    threshold: float
    """Least gain for which the large model is asked."""
    note: Callable[[float], None]
    """Remembers the gain that has decided."""

    def prepared(self, call: Call) -> Call:
        """Return the call with log-probabilities, which its client is not shown."""
        sampling = call.sampling
        if sampling.beams is not None:
            raise Unsure("beam search")
        return call if sampling.logprobs is not None else replace(call, sampling=replace(sampling, logprobs=0))

    async def judge(self, call: Call, opened: RunningCall) -> str:
        del call
        chunks = await opened.begin(self.num_tokens)
        _check(opened, chunks)
        # Of several choices, the least sure one counts.
        starts = [[token.logprob for token in chunk.logprobs[: self.num_tokens]] for chunk in chunks]
        gain = max(map(self.gain, starts), default=0.0)
        self.note(gain)
        why = f"gain={gain:.3f}; threshold={self.threshold:.3f}"
        if gain >= self.threshold:
            opened.stream.cancel(_ANOTHER_MODEL)
            raise Unsure(why)
        return why


@dataclass(frozen=True, slots=True)
class Agreement:
    """The small model answers several times at once, and one answer is kept if enough say the same."""

    config: AgreementConfig

    def prepared(self, call: Call) -> Call:
        if not is_one_answer(call):
            raise Unsure("not one answer alone")
        # The client's other limits do not count either: with a `top_k` of 1, all answers would be the same.
        wide: dict[str, Any] = {name: one.neutral for name, one in PARAMETERS.items() if one.narrows}
        sampling = replace(call.sampling, **wide, temperature=self.config.temperature)
        return replace(call, request=replace(call.request, n=self.config.samples), sampling=sampling)

    async def judge(self, call: Call, opened: RunningCall) -> str:
        number, least = self.config.samples, self.config.least
        needed = math.ceil(least * number - 1e-9)

        def good(chunks: Sequence[OutputChunk]) -> list[OutputChunk]:
            return [chunk for chunk in chunks if error_of(call.terms, chunk) is None]

        def said(chunks: Sequence[OutputChunk]) -> dict[str, str]:
            """Return the texts of answers by request id. Failed and empty answers are left out."""
            texts = {chunk.request_id: said_in(opened, chunk) for chunk in good(chunks)}
            return {name: normalised(text, self.config.part) for name, text in texts.items() if text.strip()}

        def is_decided(chunks: Sequence[OutputChunk]) -> bool:
            most = max(Counter(said(chunks).values()).values(), default=0)
            return needed > 0 and (most >= needed or most + number - len(chunks) < needed)

        chunks = await opened.whole(is_decided)
        is_cancelled = any(chunk.finish_reason is FinishReason.ABORT and not chunk.reject_reason for chunk in chunks)
        if is_cancelled or not good(chunks):
            _check(opened, chunks)
        texts = said(chunks)
        at, count = majority([*texts.values()]) if texts else (0, 0)
        why = f"agreement={count / number:.2f}; least={least:.2f}"
        if not texts or count < needed:
            raise Unsure(why)
        opened.keep(opened.index_of[[*texts][at]])
        return why


Odds = Callable[[Call, Conversation, Sequence[str]], Awaitable[list[float]]]
"""Takes a client's call, a conversation and words, and returns how likely a model answers with each of them."""
_VERIFY = "Is the answer above right? Reply with yes or no."
_CHECK = "Do the sources above support this answer? Reply with yes or no."


@dataclass(frozen=True, slots=True)
class Verification:
    """Another model reads the small model's answer, which is kept if that model says yes."""

    odds: Odds
    least: float
    """Least probability of the yes."""

    def prepared(self, call: Call) -> Call:
        if not is_one_answer(call):
            raise Unsure("not one answer alone")
        if conversation_of(call) is None:
            raise Unsure("no text")
        return call

    async def judge(self, call: Call, opened: RunningCall) -> str:
        yes = await _odds_of_yes(call, opened, await whole_answer(opened), _VERIFY, self.odds)
        why = f"verified={yes:.3f}; least={self.least:g}"
        if yes < self.least:
            raise Unsure(why)
        return why


@dataclass(frozen=True, slots=True)
class Check:
    """The client gets a pipeline's answer only if a model says that the passages support it."""

    pipeline: str
    config: CheckConfig
    odds: Odds

    async def judge(self, call: Call, opened: RunningCall) -> str:
        """Replace the answer if it is not supported. Return the probability that it is. Raises as `Odds`."""
        chunk = await whole_answer(opened)
        yes = await _odds_of_yes(call, opened, chunk, _CHECK, self.odds)
        is_kept = yes >= self.config.least
        if not is_kept:
            opened.say(chunk, self.config.otherwise)
        opened.running.metrics.count_checked(self.pipeline, is_kept=is_kept)
        return f"supported={yes:.3f}; least={self.config.least:g}"


async def _odds_of_yes(call: Call, opened: RunningCall, chunk: OutputChunk, question: str, odds: Odds) -> float:
    """Ask about an answer in the next turn of its conversation.

    If the model that wrote it is asked, it has the conversation in its prefix cache.
    """
    conversation = conversation_of(call)
    assert conversation is not None
    messages, said = [*conversation.messages], said_in(opened, chunk)
    if messages[-1].role == "assistant":  # the client has begun the answer
        messages[-1] = replace(messages[-1], content=messages[-1].content + said)
    else:
        messages.append(Message(role="assistant", content=said))
    messages.append(Message(role="user", content=question))
    yes, _ = await odds(call, replace(conversation, messages=messages), ("yes", "no"))
    return yes


def conversation_of(call: Call) -> Conversation | None:
    """Return the messages of a call, as any model takes them. A prompt becomes one message.

    None if the prompt is not text, or has a suffix.
    """
    if isinstance(call.prompts, Conversation):
        return Conversation(call.prompts.messages)
    [prompt] = call.prompts
    if not isinstance(prompt, TextPrompt) or call.request.suffix:
        return None
    return Conversation([Message(role="user", content=prompt.text)])


def can_be_replaced(call: Call) -> bool:
    """Return whether the server can replace the call's answer by a text of its own."""
    is_free = call.grammar is None and not call.tools
    return is_free and is_one_answer(call) and conversation_of(call) is not None


def is_one_answer(call: Call) -> bool:
    """Return whether a call asks for one answer, without beam search or prompt log-probabilities."""
    num_prompts = 1 if isinstance(call.prompts, Conversation) else len(call.prompts)
    has_more = call.sampling.beams is not None or call.sampling.prompt_logprobs is not None
    return call.request.n * num_prompts == 1 and not has_more


async def whole_answer(call: RunningCall, terms: Terms | None = None) -> OutputChunk:
    """Wait for the end of a call's one answer. Raises `ApiError` if it fails or was cancelled.

    `terms`: the terms to describe in the error, if not the call's own.
    """
    chunks = await call.whole()
    _check(call, chunks, terms)
    return chunks[0]


def said_in(call: RunningCall, chunk: OutputChunk) -> str:
    """Return what a whole answer says: its content, and a line for each tool call. Its reasoning is left out."""
    if call.form is None:
        return chunk.text
    reader = call.form.reader(str)
    answer = gather([*reader.push(chunk.text), *reader.finish()])
    return "\n".join(filter(None, [answer.content, *[f"{one.name} {one.arguments}" for one in answer.calls]]))


def _check(call: RunningCall, chunks: Sequence[OutputChunk], terms: Terms | None = None) -> None:
    if not chunks:
        raise cancelled("The request was cancelled.")
    for chunk in chunks:
        if (error := error_of(terms or call.terms, chunk)) is not None:
            raise error
