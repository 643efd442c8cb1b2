"""The Python API: a model in this process, without a server. `LLM` for scripts and notebooks, `AsyncLLM` for event loops.

    from penstock import LLM, SamplingParams

    with LLM("smollm2:135m") as llm:
        [answer] = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=40))

Names are vLLM's. Requests are checked and batched as in the server. docs/python-api.md is the guide.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeGuard, TypeVar, Unpack

from penstock.config import Config, ServerConfig
from penstock.config.components import COMPONENTS, DEFAULT_MODEL, config_from
from penstock.config.setting import Setting, settings_of
from penstock.config.sources import parse_settings
from penstock.deploy.factory import locate, start_model
from penstock.types.encoder import EncoderInfo, Task, TextTokens
from penstock.types.errors import ConfigError, PenstockError, Rejected, RejectReason
from penstock.types.request import FinishReason, Request

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel
    from penstock.engine.bridge import Stream
    from penstock.engine.ports import OutputChunk
    from penstock.serve.generation import PythonFields
    from penstock.serve.texts.call import TextResult
    from penstock.types.adapter import AdapterRef
    from penstock.types.result import TokenLogprobs

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "Message",
    "PenstockError",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_Result = TypeVar("_Result")


Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""
Message = Mapping[str, object]
"""One turn of a conversation: `role` (system, user or assistant) and `content`, a text or a list of text parts."""

_COMPONENTS = ("model", "kv", "lora", "scheduler", "backend")
_NOT_HERE = ("model", "served_model_name")
"""Settings of these components that are not keywords."""
_TEXTS_AT_ONCE = 256


class ChatOptions(TypedDict, total=False):
    """How the model's chat template makes a prompt of a conversation."""

    add_generation_prompt: bool | None
    """False: do not open the model's turn. By default it is opened, unless the last message is continued."""
    continue_final_message: bool
    """Have the model continue the last message."""
    chat_template_kwargs: Mapping[str, object] | None
    """Further variables of the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have: exactly one of these fields."""

    json: str | Mapping[str, object] | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """Matches the whole answer."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark's notation, or in GBNF, whose rules are written with `::=`."""
    grammar_syntax: str | None = None
    """`lark` or `gbnf`, to read the grammar only as that."""
    structural_tag: str | Mapping[str, object] | None = None
    """Tags with a form in free text, as an object or as JSON text."""
    json_object: bool | None = None
    """True: any JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How answers are drawn. Raises `PenstockError` for a value that is out of its range."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = 16
    """Most tokens of one answer. None: the rest of the context, where every answer ends."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 always takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    """The penalties count only this many last tokens. -1: all; 0: no penalties."""
    seed: int | None = None
    """The same seed gives the same answer, whatever else runs. None draws one for each prompt."""
    stop: str | Sequence[str] | None = None
    """Texts that end an answer and are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens, such as the end of a turn, out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each token and of this many of the likeliest. None: no log-probabilities."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of a prompt. -1: as many as fit beside `max_tokens`; None: all."""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _fields_of(self)


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


class _Facts:
    """What a user can ask about the model of either class."""

    _running: RunningModel

    @property
    def model_name(self) -> str:
        return self._running.name

    @property
    def fingerprint(self) -> str:
        """A short text that changes with what the answers depend on beside the request: files, settings, kernels."""
        return self._running.model.fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens. For an encoder, the longest text."""
        return self._running.model.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model's files name: those of a call without `sampling_params`."""
        return self._running.defaults.named()


class AsyncLLM(_Facts):
    """A model for one event loop. `async for` reads an answer as it grows. Requests at the same time are batched.

        async with AsyncLLM("smollm2:135m") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].new_text, end="")

    Leaving the loop early ends the request. The constructor loads the model, and blocks meanwhile.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """As `LLM`."""
        config = _config(model, settings)
        self._running = start_model(config, locate(config))
        # Also at the interpreter's end: its threads must not outlive it.
        self._closer = weakref.finalize(self, _close_unasked, self._running.close)

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a text. Yields the answers so far whenever there is more, and last when they are `finished`.

        `adapter` is the name of one of `lora_modules`, or in `lora_dir`. Raises PenstockError when it is first awaited if the
        prompt does not fit or there is no such adapter, and later if the engine fails.
        """
        return self._stream(_Asked([prompt], sampling_params, adapters=adapter))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for the model's next message of a conversation."""
        return self._stream(_Asked([messages], sampling_params, options, adapter))

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """As `LLM.embed`."""
        from penstock.serve.texts.numbers import embedding
        from penstock.serve.texts.read import check_dimensions, prompt_text

        encoder = self._encoder(Task.EMBED)
        with _own_errors():
            check_dimensions(dimensions, encoder)
            prefix = prompt_text(encoder, prompt_name)
        several = _several(texts, int)
        _check_not_empty("texts", several)
        asked = [prefix + text if isinstance(text, str) else text for text in several]
        answers = await self._read_texts(asked, truncate_prompt_tokens, use_tqdm=use_tqdm)
        vectors = [embedding(one[2], encoder, dimensions, is_unit=not encoder.has_own_lengths) for one in answers]
        return [
            EmbeddingRequestOutput(name, list(text.token_ids), EmbeddingOutput(vector.tolist()))
            for (name, text, _), vector in zip(answers, vectors, strict=True)
        ]

    async def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = False
    ) -> list[ClassificationRequestOutput]:
        """As `LLM.classify`."""
        from penstock.serve.texts.numbers import scores

        encoder = self._encoder(Task.CLASSIFY, Task.RERANK)
        answers = await self._read_texts(_several(texts, int), truncate_prompt_tokens, use_tqdm=use_tqdm)
        found = [ClassificationOutput(scores(result, encoder.scores), encoder.labels) for _, _, result in answers]
        return [
            ClassificationRequestOutput(name, list(text.token_ids), output)
            for (name, text, _), output in zip(answers, found, strict=True)
        ]

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """As `LLM.score`."""
        from penstock.serve.texts.pairs import Pairs

        encoder = self._encoder(Task.RERANK, Task.EMBED)
        firsts, seconds = _several(text_1, int), _several(text_2, int)
        if len(firsts) not in (1, len(seconds)):
            remedy = "Give one text_1, or as many."
            raise ConfigError(f"There are {len(firsts)} of text_1 and {len(seconds)} of text_2.", remedy=remedy)
        _check_not_empty("text_1", firsts)
        _check_not_empty("text_2", seconds)
        pairs = Pairs(firsts, seconds, "text_1[{}]".format, "text_2[{}]".format)
        answers = await self._read_texts(pairs.texts(encoder), truncate_prompt_tokens, use_tqdm=use_tqdm)
        found = pairs.scores(encoder, [result for _, _, result in answers])
        return [
            ScoringRequestOutput(name, list(text.token_ids), ScoringOutput(score))
            for (name, text, _), score in zip(answers[-len(seconds) :], found, strict=True)
        ]

    async def aclose(self) -> None:
        """End all requests and free the model. Idempotent."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, for callers without an event loop."""
        _close(self._closer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def _stream(self, asked: _Asked) -> AsyncGenerator[RequestOutput, None]:
        with await self._open(asked) as reading:
            while await self._more(reading):
                yield reading.answers[0].output()

    async def _all(self, asked: _Asked, *, use_tqdm: bool) -> list[RequestOutput]:
        with await self._open(asked) as reading, _progress(use_tqdm, len(reading.answers), "Answers", " prompt") as count:
            while touched := await self._more(reading):
                count(sum(answer.is_finished for answer in touched))
            return [answer.output() for answer in reading.answers]

    async def _open(self, asked: _Asked) -> _Reading:
        """Submit what is asked. Everything is checked before anything runs."""
        self._check_open()
        answers = await asyncio.to_thread(asked.answers, self._running)
        return _Reading(self._running.bridge.open([request for one in answers for request in one.requests]), answers)

    async def _more(self, reading: _Reading) -> set[_Answer]:
        try:
            return await reading.more()
        except PenstockError:
            self._check_open()  # the engine speaks of a server that stops
            raise

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise _closed() from None

    def _encoder(self, *tasks: Task) -> EncoderInfo:
        """Return the facts of the encoder. Raises ConfigError unless it is for one of these tasks, with one answer per text."""
        encoder = self._running.model.encoder
        if encoder is None:
            raise ConfigError(
                f"{self.model_name} writes text.", remedy="Use generate or chat, or load an encoder, such as minilm."
            )
        if encoder.task not in tasks or encoder.is_per_token:
            kind = "answers for each token" if encoder.is_per_token else f"is for --task {encoder.task}"
            raise ConfigError(f"{self.model_name} {kind}.", remedy=f"Load a model for {' or '.join(tasks)}.")
        return encoder

    async def _read_texts(
        self, texts: Sequence[Prompt | tuple[str, str]], keep: int | None, *, use_tqdm: bool
    ) -> list[tuple[str, TextTokens, TextResult]]:
        """Return the id, the tokens and the numbers of each text. The engine has a part of a long list at a time."""
        from penstock.serve.texts.call import TextResult
        from penstock.serve.texts.desk import SAMPLING

        self._check_open()
        running, found = self._running, dict[str, bytes]()
        size = sum([sum(map(len, text)) if _is_pair(text) else len(text) for text in texts])
        # Never refused, unlike `run`: the caller is this process itself.
        tokens = await running.off_loop.finish(size, partial(_text_tokens, texts, keep, running))
        parent_id = running.sources.new_request_id()
        names = [f"{parent_id}.{index}" for index in range(len(texts))]
        starts = iter(range(0, len(texts), _TEXTS_AT_ONCE))

        async def read(count: Callable[[int], object]) -> None:
            for start in starts:
                arrival_ns = running.clock.now_ns()
                requests = [
                    Request(name, text.token_ids, SAMPLING, arrival_ns, parent_id=parent_id, second_at=text.second_at)
                    for name, text in zip(names[start : start + _TEXTS_AT_ONCE], tokens[start:], strict=False)
                ]
                with running.bridge.open(requests) as stream:
                    while chunks := await stream.next_chunks():
                        for chunk in chunks:
                            if chunk.finish_reason is not FinishReason.STOP:
                                raise _ended_early(chunk, "text")
                            found[chunk.request_id] = chunk.states
                        count(len(chunks))

        with _progress(use_tqdm, len(texts), "Texts", " text") as count:
            readers = [asyncio.ensure_future(read(count)) for _ in range(2)]  # while one's texts end, the other's are there
            try:
                await asyncio.gather(*readers)
            except PenstockError:
                self._check_open()
                raise
            finally:
                for reader in readers:
                    reader.cancel()
        return [(name, text, TextResult(found[name], len(text.token_ids))) for name, text in zip(names, tokens, strict=True)]


class LLM(_Facts):
    """A model for scripts and notebooks. Thread-safe: requests of several threads are batched.

    A context manager: leaving it frees the model. Ctrl-C ends the requests that are waited for.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """Load a model. It is fetched first if it is not here and can be.

        `model` is a catalogue name, a .gguf file, a Hugging Face directory or `hf:org/repo[:file]`. `settings` are those of
        `penstock serve` about model, KV cache, adapters, scheduling and computing, by their keys in docs/configuration.md and
        in its notation (`kv_cache_memory="1GiB"`, `policy="fair"`), and `seed`, from which those of requests are drawn.

        Raises PenstockError for an unknown setting, with the list, and for a model that can't be loaded or does not fit.
        """
        self._async = AsyncLLM(model, **settings)
        self._running = self._async._running
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()
        self._asking = threading.RLock()
        """Held from the check that the model is open until the loop has the work. A generator may be collected meanwhile."""
        end = partial(_end, self._async, self._loop, self._thread, self._asking)
        self._closer = weakref.finalize(self, _close_unasked, end)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue texts. Returns the whole answers, in the order of the prompts.

        `sampling_params` are for all prompts, or a sequence with one for each. So is `adapter`: the name of one of
        `lora_modules`, or in `lora_dir`; None: the model alone. `use_tqdm` shows the progress on stderr, if that is a
        terminal. Raises PenstockError if a prompt does not fit, before any runs, and if an answer fails.
        """
        asked = _Asked(_several(prompts, int), sampling_params, adapters=adapter)
        return self._wait(self._async._all(asked, use_tqdm=use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Return the model's next message of a conversation, or of each of several. Otherwise as `generate`.

        The model's chat template makes the prompt; `options` are those of `ChatOptions`.
        """
        asked = _Asked(_several(messages, Mapping), sampling_params, options, adapter)
        return self._wait(self._async._all(asked, use_tqdm=use_tqdm))

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of texts, in their order. The model must be an encoder that embeds.

        Vectors have length 1, unless the model's modules.json lists no `Normalize` module. `prompt_name` is a prompt of the
        model's files to put before each text (`query`, `passage`); None: the files' default. Vectors are cut to `dimensions`;
        those of length 1 get it again. A text that is too long is an error, unless `truncate_prompt_tokens` says how many
        tokens to keep; -1: as many as the model reads. Raises PenstockError.
        """
        options: dict[str, Any] = {"prompt_name": prompt_name, "dimensions": dimensions, "use_tqdm": use_tqdm}
        return self._wait(self._async.embed(texts, truncate_prompt_tokens=truncate_prompt_tokens, **options))

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return the scores of a classifier's labels for each text. Otherwise as `embed`."""
        return self._wait(self._async.classify(texts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts: of a reranker, or the cosine of an embedding model's vectors.

        One `text_1` is paired with each `text_2`. Otherwise as `embed`.
        """
        return self._wait(self._async.score(text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        """Continue a text. Yields the answers so far whenever there is more. Leaving the loop early ends the request."""
        return self._iterate(self._async.generate(prompt, sampling_params, adapter=adapter))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """As `stream`, for the model's next message of a conversation."""
        return self._iterate(self._async.chat(messages, sampling_params, adapter=adapter, **options))

    def close(self) -> None:
        """End all requests and free the model. Idempotent."""
        _close(self._closer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _iterate(self, outputs: AsyncGenerator[RequestOutput, None]) -> Iterator[RequestOutput]:
        async def following() -> RequestOutput | None:
            return await anext(outputs, None)

        try:
            while (output := self._wait(following())) is not None:
                yield output
        finally:
            if self._closer.alive:
                asyncio.run_coroutine_threadsafe(outputs.aclose(), self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of work on the loop's thread. The end of the wait, such as by Ctrl-C, ends the work."""
        # A queue, as Ctrl-C may leave the lock of a `concurrent.futures.Future` locked: it comes between two lines of Python.
        tasks: list[asyncio.Task[_Result]] = []
        done: SimpleQueue[asyncio.Task[_Result]] = SimpleQueue()

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(done.put)

        with self._asking:
            if not self._closer.alive:
                work.close()
                raise _closed()
            self._loop.call_soon_threadsafe(begin)
        try:
            task = done.get()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the work with it
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise
        try:
            return task.result()
        except asyncio.CancelledError:
            raise _closed() from None


# From prompts to requests


@dataclass(frozen=True, slots=True)
class _Asked:
    """Prompts, or conversations if there is a template, as the caller gave them."""

    prompts: Sequence[Prompt | Sequence[Message]]
    params: SamplingParams | Sequence[SamplingParams] | None
    template: ChatOptions | None = None
    adapters: str | Sequence[str | None] | None = None
    """The name of an adapter for all, or one for each."""

    def answers(self, running: RunningModel) -> list[_Answer]:
        """Return an answer for each prompt, with its requests. May take a while. Raises PenstockError for what is wrong."""
        from penstock.calls.run import check_encoded

        if running.model.encoder is not None:
            raise ConfigError(f"{running.name} reads texts and writes none.", remedy="Call embed, classify or score.")
        all_params = self._each(self.params or SamplingParams(**running.defaults.named()), SamplingParams, "sampling_params")
        names = self._each(self.adapters, str | None, "adapters")
        adapters = [None if name is None else _adapter(running, name) for name in names]
        prompts = [self._text(running, prompt, self._name(index)) for index, prompt in enumerate(self.prompts)]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(running.tokenizer.encode_batch(texts, add_special_tokens=self.template is None))
        arrival_ns, answers = running.clock.now_ns(), []
        for index, (prompt, params, adapter) in enumerate(zip(prompts, all_params, adapters, strict=True)):
            name, text = self._name(index), prompt if isinstance(prompt, str) else None
            token_ids: Sequence[int] = next(encoded) if isinstance(prompt, str) else prompt
            if text is not None:
                check_encoded(token_ids, running, name)
            requests = _requests(running, token_ids, params, arrival_ns, name, adapter)
            answers.append(_Answer(running, text, params, requests))
        return answers

    def _each(self, given: Any, kind: Any, what: str) -> Sequence[Any]:
        """Return a value for each prompt. One value is for all."""
        values = [given] * len(self.prompts) if isinstance(given, kind) else given
        if len(values) != len(self.prompts):
            raise ConfigError(
                f"There are {len(self.prompts)} prompts and {len(values)} {what}.", remedy="Give one for all, or one for each."
            )
        return values

    def _name(self, index: int) -> str:
        name = "prompt" if self.template is None else "messages"
        return name if len(self.prompts) == 1 else f"{name}[{index}]"

    def _text(self, running: RunningModel, prompt: Prompt | Sequence[Message], name: str) -> str | Sequence[int]:
        """Return the prompt's text, or the ids of its tokens."""
        if self.template is None:
            if isinstance(prompt, str):
                return prompt
            token_ids = [item for item in prompt if type(item) is int] if isinstance(prompt, Sequence) else []
            if isinstance(prompt, Sequence) and len(token_ids) == len(prompt):
                return token_ids
            raise ConfigError(f"'{name}' is neither a text nor token ids.", remedy="Give a str, or a list of int.")
        if running.chat_template is None:
            remedy = "Set chat_template (--chat-template), or have a text continued (generate; --raw)."
            raise ConfigError(f"{running.name} has no chat template.", remedy=remedy)
        from penstock.calls.run import render_here
        from penstock.serve.generation import ChatTemplateFields, read_told_conversation

        messages = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
        fields = {name: _plain(value) for name, value in self.template.items()}
        with _own_errors():
            conversation = read_told_conversation(ChatTemplateFields.model_validate({**fields, "messages": messages}))
        return render_here(conversation, running)


def _adapter(running: RunningModel, name: str) -> AdapterRef:
    """Raises ConfigError for a name that nothing has, and for an adapter that can't be had."""
    adapter = None if running.adapters is None else running.adapters.find(name)
    if running.adapters is None or adapter is None:
        remedy = "Name it in lora_modules, or the folder that it lies in as lora_dir."
        raise ConfigError(f"There is no adapter {name!r}.", remedy=remedy)
    if (rejected := running.adapters.failure(name)) is not None:
        raise ConfigError(rejected.detail)
    running.adapters.want(adapter)
    return adapter


def _requests(
    running: RunningModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    arrival_ns: int,
    name: str,
    adapter: AdapterRef | None = None,
) -> list[Request]:
    """Return a request for each of the `n` answers to a prompt. Raises `Rejected`."""
    from penstock.calls.call import CompletionRequest, Names, Terms, TokenPrompt
    from penstock.calls.check import make_call
    from penstock.calls.run import make_requests, seed_of, tokenise
    from penstock.serve.generation import fields_of, structured_grammar

    fields, prompt = _fields_of(params), TokenPrompt(tuple(token_ids), name)
    with _own_errors():
        request = CompletionRequest(
            **fields_of(fields),
            names=Names("python"),
            prompts=(prompt,),
            logprobs=params.logprobs,
            grammar=structured_grammar(fields.structured_outputs),
        )
    parent_id = running.sources.new_request_id()
    call = make_call(request, running, Terms(request_id=parent_id, arrival_ns=arrival_ns), adapter)
    limit, num_tokens = running.admission.max_len(adapter), len(token_ids)
    if not token_ids:
        raise ConfigError(f"'{name}' has no tokens.", remedy="Give a text.")
    if params.truncate_prompt_tokens is None and num_tokens + max(1, params.min_tokens) > limit:
        raise Rejected(
            RejectReason.CONTEXT_LENGTH,
            f"'{name}' has {num_tokens} tokens; {running.name} takes {limit}"
            f"{' beside this adapter' * (limit < running.model.max_model_len)}, the answer included. Shorten it.",
        )
    tokenised = tokenise(call, [prompt], running)
    matchers = None if call.grammar is None else [running.grammars.matcher(call.grammar.grammar) for _ in range(params.n)]
    return make_requests(call, tokenised, parent_id, seed_of(call), matchers)


def _fields_of(params: SamplingParams) -> PythonFields:
    """Return the parameters with types and ranges checked. Raises `Rejected`."""
    from penstock.serve.generation import PythonFields

    fields = {name: _plain(getattr(params, name)) for name in params.__slots__}
    if params.logit_bias is not None:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.structured_outputs is not None:
        asked = params.structured_outputs
        fields["structured_outputs"] = {name: _plain(getattr(asked, name)) for name in asked.__slots__}
    with _own_errors():
        return PythonFields.model_validate(fields)


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Turns errors of the server's rules, which are answers over HTTP, into `Rejected`."""
    from pydantic import ValidationError

    from penstock.serve.errors import ApiError, from_finding

    try:
        yield
    except (ValidationError, ApiError) as error:
        told = error if isinstance(error, ApiError) else from_finding(error.errors(include_url=False)[0])
        raise Rejected(RejectReason.INVALID, told.message, param=told.param) from None


def _several(asked: Sequence[Any], part: type) -> Sequence[Any]:
    """The prompts or conversations that were asked, also if it is only one: a text, or a sequence of such parts."""
    is_one = isinstance(asked, str) or (len(asked) > 0 and all(isinstance(item, part) for item in asked))
    return [asked] if is_one else asked


def _is_pair(text: Prompt | tuple[str, str]) -> TypeGuard[tuple[str, str]]:
    """Whether these are two texts that a reranker reads together: token ids are numbers."""
    return isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str)


def _check_not_empty(name: str, texts: Sequence[Prompt]) -> None:
    """Raises PenstockError for an empty text, before a prompt of the model's is put before it."""
    for index, text in enumerate(texts):
        if text == "":
            raise Rejected(RejectReason.INVALID, f"'{name}[{index}]' is empty.", param=f"{name}[{index}]")


def _text_tokens(texts: Sequence[Prompt | tuple[str, str]], keep: int | None, running: RunningModel) -> list[TextTokens]:
    """Return the tokens of texts and of pairs, as the model reads them. Raises PenstockError for what it can't read."""
    from penstock.calls.check import check_token_ids
    from penstock.serve.texts.read import read_truncation

    with _own_errors():
        cut = read_truncation(keep, None, running)
    most, limit = None if cut is None else cut.max_tokens, running.model.max_model_len
    to_encode = [text for text in texts if isinstance(text, str) or _is_pair(text)]
    encoded = iter(running.tokenizer.encode_texts(to_encode, max_tokens=most))
    found: list[TextTokens] = []
    for index, text in enumerate(texts):
        name = f"texts[{index}]"
        if isinstance(text, str) or _is_pair(text):
            tokens = next(encoded)
        else:
            ids: Any = list(text)
            check_token_ids(ids, running.model.vocab_size, name)
            tokens = TextTokens(tuple(ids[:most]), 0)
        num_tokens = len(tokens.token_ids)
        if not text or not 1 <= num_tokens <= limit:
            cause = f"has {num_tokens} tokens, and {running.name} takes 1 to {limit}" if text else "is empty"
            remedy = " Shorten it, or set truncate_prompt_tokens." if text else ""
            raise Rejected(RejectReason.CONTEXT_LENGTH, f"'{name}' {cause}.{remedy}", param=name)
        found.append(tokens)
    return found


# From chunks to outputs


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


class _Answer:
    """A prompt's answers, as far as they have come."""

    def __init__(self, running: RunningModel, prompt: str | None, params: SamplingParams, requests: Sequence[Request]) -> None:
        self.running = running
        self.requests = requests
        self._prompt = prompt
        self._end_token_ids = frozenset(running.model.eos_token_ids) - frozenset(params.stop_token_ids or ())
        self.choices = [_Choice(has_logprobs=params.logprobs is not None) for _ in requests]

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


class _Reading:
    """Answers and their stream. Leaving the context ends the requests that have not finished."""

    def __init__(self, stream: Stream, answers: Sequence[_Answer]) -> None:
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

    async def more(self) -> set[_Answer]:
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
                self._failure = _ended_early(chunk, "answer")
        return touched


def _ended_early(chunk: OutputChunk, what: str) -> PenstockError:
    """Return the error of a request that the engine ended. What it refused, it would refuse again."""
    remedy = "" if chunk.finish_reason is FinishReason.REJECTED else "Ask again."
    return PenstockError(chunk.detail or f"The engine ended the {what}.", remedy=remedy)


@contextlib.contextmanager
def _progress(use_tqdm: bool, total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts what is done, on a bar if one is wanted and stderr is a terminal."""
    if not (use_tqdm and sys.stderr.isatty()):
        yield lambda _number: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit) as bar:
        yield bar.update


def _logprobs_of(entry: TokenLogprobs, running: RunningModel) -> dict[int, Logprob]:
    text = running.tokenizer.token_text
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return found


# Beginning and end


def _config(model: str | os.PathLike[str], settings: Mapping[str, object]) -> Config:
    """Raises ConfigError for an unknown setting, with the list."""
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    named = [item for name, component in COMPONENTS if name in _COMPONENTS for item in settings_of(component)]
    named += [item for item in settings_of(ServerConfig) if item.key == "seed"]
    keywords: list[Setting] = [item for item in named if item.key not in _NOT_HERE]
    values = parse_settings({key: value for key, value in given.items() if value is not None}, keywords)
    if "cache" not in values and (folder := os.environ.get("PENSTOCK_CACHE")):
        values["cache"] = folder
    config = config_from({**values, "model": os.fspath(model)})
    return replace(config, server=replace(config.server, explained_requests=0))  # nobody asks why a request takes long


def _closed() -> PenstockError:
    return PenstockError("The model is closed.", remedy="Make another LLM.")


def _close(closer: weakref.finalize[..., Any]) -> None:
    """Close a model for a caller, which waits for it. Idempotent."""
    if (found := closer.detach()) is not None:
        (end,) = found[2]
        end()


def _close_unasked(end: Callable[[], object]) -> None:
    """Close a model that is garbage, or at the interpreter's end, which is in the main thread.

    The garbage collector runs in any thread, also in one of the model's own, and these can't wait for themselves.
    """
    if threading.current_thread() is threading.main_thread():
        end()
    else:
        threading.Thread(target=end, name="penstock-close").start()


def _end(model: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread, asking: threading.RLock) -> None:
    """Free the model, end what waits for it, and then the loop."""
    with asking:
        pass  # every thread that found the model open has given its work to the loop
    model.close()
    asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
