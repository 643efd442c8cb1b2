"""The outputs of the Python API, and how they grow from the engine's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from penstock.types.errors import PenstockError
from penstock.types.request import FinishReason, Request

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel
    from penstock.engine.bridge import Stream
    from penstock.engine.ports import OutputChunk
    from penstock.types.result import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one place, under the model's own distribution."""

    logprob: float
    rank: int
    """1 is the likeliest token."""
    decoded_token: str
    """The token's text; incomplete characters are U+FFFD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer, or what there is of it so far."""

    index: int
    """Number of the answer among the `n` to its prompt."""
    text: str
    new_text: str
    """The part of `text` that came since the output before. For a whole answer, all of it."""
    token_ids: list[int]
    """All generated tokens, also those that are not shown."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of all tokens, or None if the request has no `logprobs`."""
    logprobs: list[dict[int, Logprob]] | None
    """By token id, for each of `token_ids`: that token, and the likeliest."""
    finish_reason: str | None = None
    """`stop`, `length`, or None while the answer grows."""
    stop_reason: int | str | None = None
    """The stop token or stop text that ended the answer. None: the model's own end."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds on a monotonic clock."""

    arrival_time_s: float
    first_token_time_s: float | None
    """The first token of any of its answers, or None so far."""
    last_token_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text; for a conversation, the text that the chat template made. None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` answers, by index."""
    finished: bool
    num_cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]
    """The text's vector: of length 1, unless the model's modules.json lists no `Normalize`. [width, or `dimensions`]"""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]
    """A score for each label, by the function that the model's files name."""
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The likeliest label."""
        return self.labels[self.probs.index(max(self.probs))]


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    """Those of a pair, or of the second text if an embedding model compares two vectors."""
    outputs: ScoringOutput


class _Choice:
    """One of a prompt's answers, as far as it has come."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.last: OutputChunk | None = None
        """The newest chunk."""
        self._text = ""
        self._num_shown = 0
        """Characters of the text in the outputs so far."""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self._cumulative_logprob = 0.0

    @property
    def is_finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    def add(self, chunk: OutputChunk, running: RunningModel) -> None:
        self.last = chunk
        self._text += chunk.text
        self._token_ids += chunk.token_ids
        if self._logprobs is not None:
            self._logprobs += [_logprobs_of(entry, running) for entry in chunk.logprobs]
            self._cumulative_logprob += sum(entry.logprob for entry in chunk.logprobs)

    def output(self, index: int, end_token_ids: frozenset[int]) -> CompletionOutput:
        last = self.last
        finish_reason = None if last is None else last.finish_reason
        new_text, self._num_shown = self._text[self._num_shown :], len(self._text)
        return CompletionOutput(
            index=index,
            text=self._text,
            new_text=new_text,
            token_ids=list(self._token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=None if finish_reason is None else finish_reason.name.lower(),
            stop_reason=None if last is None or last.stop_reason in end_token_ids else last.stop_reason,
        )


class Answer:
    """A prompt's answers, as far as they have come."""

    def __init__(
        self,
        running: RunningModel,
        prompt: str | None,
        requests: Sequence[Request],
        end_token_ids: frozenset[int],
        *,
        has_logprobs: bool,
    ) -> None:
        """`end_token_ids`: those that no `stop_reason` names."""
        self.running = running
        self.requests = requests
        self._prompt = prompt
        self._end_token_ids = end_token_ids
        self.choices = [_Choice(has_logprobs=has_logprobs) for _ in requests]

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.requests[0]
        chunks = [choice.last for choice in self.choices if choice.last is not None]
        first_token_ns = min((chunk.first_token_ns for chunk in chunks if chunk.first_token_ns is not None), default=None)
        return RequestOutput(
            request_id=first.parent_id,
            prompt=self._prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[choice.output(index, self._end_token_ids) for index, choice in enumerate(self.choices)],
            finished=self.is_finished,
            num_cached_tokens=chunks[0].num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time_s=first.arrival_ns / 1e9,
                first_token_time_s=None if first_token_ns is None else first_token_ns / 1e9,
                last_token_time_s=max(chunk.at_ns for chunk in chunks) / 1e9,
            ),
        )


class Reading:
    """Answers and their stream. Leaving the context ends the requests that have not finished."""

    def __init__(self, stream: Stream, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self._stream = stream
        self._of = {
            request.request_id: (answer, choice)
            for answer in answers
            for request, choice in zip(answer.requests, answer.choices, strict=True)
        }
        self._failure: PenstockError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stream.close()

    async def more(self) -> set[Answer]:
        """Wait for more, and return the answers that have grown; none after the end.

        Raises PenstockError if an answer failed, after its last text.
        """
        if self._failure is not None:
            raise self._failure
        touched = set()
        for chunk in await self._stream.next_chunks():
            answer, choice = self._of[chunk.request_id]
            choice.add(chunk, answer.running)
            touched.add(answer)
            if chunk.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._failure = ended_early(chunk, "answer")
        return touched


def ended_early(chunk: OutputChunk, what: str) -> PenstockError:
    """Return the error of a request that the engine ended. A refused request would be refused again."""
    remedy = "" if chunk.finish_reason is FinishReason.REJECTED else "Ask again."
    return PenstockError(chunk.detail or f"The engine ended the {what}.", remedy=remedy)


def _logprobs_of(entry: TokenLogprobs, running: RunningModel) -> dict[int, Logprob]:
    text = running.tokenizer.token_text
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return found
