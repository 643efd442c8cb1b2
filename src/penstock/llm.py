"""The Python API: a model in this process, without a server. `LLM` for scripts and notebooks, `AsyncLLM` for event loops.

    from penstock import LLM, SamplingParams

    with LLM("smollm2:135m") as llm:
        [answer] = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=40))
        print(answer.outputs[0].text)

An encoder answers with numbers: `embed`, `score` and `classify`. Names are vLLM's where it has them. A request is checked by
the rules of the server, and runs on the same engine: what comes at once is batched. All errors are `PenstockError`s that name
a remedy. `docs/python-api.md` is the guide.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypedDict, TypeGuard, TypeVar, Unpack, cast

from penstock.config import Config, ServerConfig
from penstock.config.components import COMPONENTS, DEFAULT_MODEL, config_from
from penstock.config.setting import Setting, settings_of
from penstock.config.sources import parse_settings
from penstock.deploy.factory import locate, start_model
from penstock.types.encoder import EncoderInfo, Task, TextTokens
from penstock.types.errors import ConfigError, PenstockError, Rejected, RejectReason
from penstock.types.request import FinishReason, Request

if TYPE_CHECKING:
    from tqdm import tqdm

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
_OTHER_KEYS = ("seed",)
_NOT_HERE = ("model", "served_model_name")
"""Settings of these components that are no keyword: the model is an argument, and it has no clients to be named for."""


class ChatOptions(TypedDict, total=False):
    """How the model's chat template makes a prompt of a conversation."""

    add_generation_prompt: bool | None
    """False: do not open the model's turn. By default it is opened, unless the last message is continued."""
    continue_final_message: bool
    """Have the model go on with the last message."""
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
    """`lark` or `gbnf`, if the grammar shall be read as that alone."""
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
    """Tokens of one answer at most; None: what the context leaves. An answer ends where the context does, too."""
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
    """The penalties count only the last so many tokens. -1: all; 0: no penalties."""
    seed: int | None = None
    """The same seed gives the same answer, whatever else runs; None draws one for each prompt."""
    stop: str | Sequence[str] | None = None
    """Texts that end an answer, and are no part of it."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens, such as the end of a turn, out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each token, and of as many of the likeliest; None: none."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    """Keep the last so many tokens of a prompt; -1: as many as fit beside `max_tokens`; None: all."""
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
    """One answer, or as much of it as there is yet."""

    index: int
    """Number of the answer among the `n` to its prompt."""
    text: str
    new_text: str
    """The part of `text` that came since the output before; of a whole answer all of it."""
    token_ids: list[int]
    """All generated tokens, also those that are not shown."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of all tokens; None if none were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """By token id, for each of `token_ids`: that token, and the likeliest. None if none were asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, or None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop text that ended it; None at the model's own end."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds on a monotonic clock."""

    arrival_time_s: float
    first_token_time_s: float | None
    """The first token of any of its answers; None if there is none yet."""
    last_token_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text: of a conversation what the chat template made of it. None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` answers, by index."""
    finished: bool
    num_cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
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
    """Those of a pair; those of the second text if an embedding model compares two vectors."""
    outputs: ScoringOutput


class AsyncLLM:
    """A model for one event loop. `async for` reads an answer as it grows; what is asked at once is batched.

        async with AsyncLLM("smollm2:135m") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].new_text, end="")

    Leaving the loop early ends the request. The constructor loads the model, which takes a moment and blocks.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """As `LLM`."""
        config = _config(model, settings)
        self._running = start_model(config, locate(config))
        # Also at the interpreter's end: its threads must not outlive it.
        self._closer = weakref.finalize(self, _close_unasked, self._running.close)

    @property
    def model_name(self) -> str:
        return self._running.name

    @property
    def fingerprint(self) -> str:
        """A short text that changes with what the answers depend on beside the request: files, settings, kernels."""
        return self._running.model.fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens; of an encoder the longest text."""
        return self._running.model.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model's files name: those of a call without `sampling_params`."""
        return self._running.defaults.named()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a text. Yields the answers so far, whenever there is more, and last when they are `finished`.

        `adapter` is the name of one of `lora_modules`, or in `lora_dir`; None: the model alone. Raises PenstockError, when it
        is first awaited, if the prompt does not fit or there is no such adapter, and later if the engine fails.
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
        """The vectors of texts; `LLM.embed` says what the arguments mean."""
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
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ClassificationRequestOutput]:
        """The scores of labels; `LLM.classify` says what the arguments mean."""
        from penstock.serve.texts.numbers import scores

        encoder = self._encoder(Task.CLASSIFY, Task.RERANK)
        answers = await self._read_texts(_several(texts, int), truncate_prompt_tokens, use_tqdm=use_tqdm)
        return [
            ClassificationRequestOutput(
                name, list(text.token_ids), ClassificationOutput(scores(result, encoder.scores), encoder.labels)
            )
            for name, text, result in answers
        ]

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """The scores of pairs; `LLM.score` says what the arguments mean."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _stream(self, asked: _Asked) -> AsyncGenerator[RequestOutput, None]:
        reading = await self._open(asked)
        with reading.stream:
            while await self._more(reading):
                yield reading.answers[0].output()

    async def _all(self, asked: _Asked, *, use_tqdm: bool) -> list[RequestOutput]:
        reading = await self._open(asked)
        has_bar = use_tqdm and sys.stderr.isatty()
        with reading.stream, _bar(len(reading.answers)) if has_bar else contextlib.nullcontext() as bar:
            while touched := await self._more(reading):
                if bar is not None:
                    bar.update(sum(answer.is_finished for answer in touched))
        return [answer.output() for answer in reading.answers]

    async def _more(self, reading: _Reading) -> set[_Answer]:
        try:
            return await reading.more()
        except PenstockError:
            if self._closer.alive:
                raise
            raise _closed() from None  # the engine speaks of a server that stops

    def _encoder(self, *tasks: Task) -> EncoderInfo:
        """The facts of the model, which must be an encoder for one of these tasks, with one answer for each text. Raises
        ConfigError."""
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
        """The id, the tokens and the numbers of each text. The engine has some of a long list at a time."""
        from penstock.serve.texts.call import TextResult
        from penstock.serve.texts.desk import SAMPLING

        if not self._closer.alive:
            raise _closed()
        size = sum([sum(map(len, text)) if _is_pair(text) else len(text) for text in texts])
        # Never refused, unlike `run`: the caller is this process itself.
        tokens = await self._running.off_loop.finish(size, partial(_text_tokens, texts, keep, self._running))
        parent_id, found = self._running.sources.new_request_id(), dict[str, bytes]()
        names = [f"{parent_id}.{index}" for index in range(len(texts))]
        starts = iter(range(0, len(texts), _TEXTS_AT_ONCE))
        has_bar = use_tqdm and sys.stderr.isatty()

        async def read() -> None:
            for start in starts:
                arrival_ns = self._running.clock.now_ns()
                requests = [
                    Request(name, text.token_ids, SAMPLING, arrival_ns, parent_id=parent_id, second_at=text.second_at)
                    for name, text in zip(names[start : start + _TEXTS_AT_ONCE], tokens[start:], strict=False)
                ]
                with self._running.bridge.open(requests) as stream:
                    while chunks := await stream.next_chunks():
                        for chunk in chunks:
                            if chunk.finish_reason is not FinishReason.STOP:
                                raise _ended_early(chunk, "text")
                            found[chunk.request_id] = chunk.states
                        if bar is not None:
                            bar.update(len(chunks))

        with _bar(len(texts), "Texts", " text") if has_bar else contextlib.nullcontext() as bar:
            readers = [asyncio.ensure_future(read()) for _ in range(2)]  # while one's texts end, the other's are there
            try:
                await asyncio.gather(*readers)
            except PenstockError:
                if self._closer.alive:
                    raise
                raise _closed() from None
            finally:
                for reader in readers:
                    reader.cancel()
        return [(name, text, TextResult(found[name], len(text.token_ids))) for name, text in zip(names, tokens, strict=True)]

    async def _open(self, asked: _Asked) -> _Reading:
        """Submit what is asked. Everything is checked before anything runs."""
        if not self._closer.alive:
            raise _closed()
        answers = await asyncio.to_thread(asked.answers, self._running)
        return _Reading(self._running.bridge.open([choice.request for one in answers for choice in one.choices]), answers)


class LLM:
    """A model for scripts and notebooks. Thread-safe; what several threads ask at once is batched.

    A context manager: leaving it frees the model. Ctrl-C ends the requests that are waited for.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """Load a model, fetched first if it is one that can be and is not here.

        `model` is a catalogue name, a .gguf file, a Hugging Face directory or `hf:org/repo[:file]`. `settings` are those of
        `penstock serve` about model, KV cache, adapters, scheduling and computing, by their keys in docs/configuration.md and
        in its notation (`kv_cache_memory="1GiB"`, `policy="fair"`), and `seed`, from which those of requests are drawn.

        Raises PenstockError for an unknown setting, with the list, and for a model that can't be loaded or does not fit.
        """
        self._async = AsyncLLM(model, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()
        self._asking = threading.RLock()
        """Held from the look whether the model is open until the loop has the work. A generator may be collected meanwhile."""
        end = partial(_end, self._async, self._loop, self._thread, self._asking)
        self._closer = weakref.finalize(self, _close_unasked, end)

    @property
    def model_name(self) -> str:
        return self._async.model_name

    @property
    def fingerprint(self) -> str:
        """A short text that changes with what the answers depend on beside the request: files, settings, kernels."""
        return self._async.fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens; of an encoder the longest text."""
        return self._async.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model's files name: those of a call without `sampling_params`."""
        return self._async.default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue texts: the whole answers, in the order of the prompts.

        `sampling_params` are for all prompts, or a sequence with one for each. `adapter` likewise: it is the name of one of
        `lora_modules`, or in `lora_dir`; None: the model alone. `use_tqdm` shows the progress on stderr, if that is a
        terminal. Raises PenstockError if a prompt does not fit, before any runs, and if an answer fails.
        """
        return self._wait(
            self._async._all(_Asked(_several(prompts, int), sampling_params, adapters=adapter), use_tqdm=use_tqdm)
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """The model's next message of a conversation, or of each of several. Otherwise as `generate`.

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
        """The vectors of texts, in their order. The model must be an encoder that embeds.

        Vectors have length 1, unless the model's modules.json lists no `Normalize` module.

        `prompt_name` is a prompt of the model's files that is put before each text (`query`, `passage`); None: the files'
        default. Vectors are cut to `dimensions`; those of length 1 get it again. A text that is too long is an error, unless
        `truncate_prompt_tokens` says how many tokens to keep; -1: as many as the model reads. Raises PenstockError.
        """
        return self._wait(
            self._async.embed(
                texts,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_prompt_tokens=truncate_prompt_tokens,
                use_tqdm=use_tqdm,
            )
        )

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """The scores of a classifier's labels for each text. Otherwise as `embed`."""
        return self._wait(self._async.classify(texts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair of texts: of a reranker, or the cosine of an embedding model's vectors.

        One `text_1` is paired with each `text_2`. Otherwise as `embed`.
        """
        return self._wait(self._async.score(text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        """Continue a text: the answers so far, whenever there is more. Leaving the loop early ends the request."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _iterate(self, outputs: AsyncGenerator[RequestOutput, None]) -> Iterator[RequestOutput]:
        try:
            while (output := self._wait(_next(outputs))) is not None:
                yield output
        finally:
            if self._closer.alive:
                asyncio.run_coroutine_threadsafe(outputs.aclose(), self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of work on the loop's thread. The end of the wait, such as by Ctrl-C, ends the work."""
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


# From what is asked to requests.


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Prompts, or conversations if there is a template, as the caller gave them."""

    prompts: Sequence[Prompt | Sequence[Message]]
    params: SamplingParams | Sequence[SamplingParams] | None
    template: ChatOptions | None = None
    adapters: str | Sequence[str | None] | None = None
    """The name of an adapter for all, or one for each."""

    def answers(self, running: RunningModel) -> list[_Answer]:
        """An answer for each prompt, with its requests. May take a while. Raises PenstockError for what is wrong."""
        from penstock.calls.check import check_token_ids
        from penstock.calls.run import check_encoded

        if running.model.encoder is not None:
            raise ConfigError(f"{running.name} reads texts and writes none.", remedy="Call embed, classify or score.")
        adapters = self._adapters(running)
        prompts = [self._text(running, prompt, self._name(index)) for index, prompt in enumerate(self.prompts)]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(running.tokenizer.encode_batch(texts, add_special_tokens=self.template is None))
        arrival_ns = running.clock.now_ns()
        answers = []
        for index, (prompt, params, adapter) in enumerate(zip(prompts, self._params(running), adapters, strict=True)):
            token_ids = next(encoded) if isinstance(prompt, str) else prompt
            with _own_errors():
                if isinstance(prompt, str):
                    check_encoded(token_ids, running, self._name(index))
                else:
                    check_token_ids(token_ids, running.model.vocab_size, self._name(index))
            requests = _requests(running, token_ids, params, arrival_ns, self._name(index), adapter)
            answers.append(_Answer(running, prompt if isinstance(prompt, str) else None, params, requests))
        return answers

    def _params(self, running: RunningModel) -> Sequence[SamplingParams]:
        """Those of each prompt: without any, the model's own."""
        if self.params is None or isinstance(self.params, SamplingParams):
            return [self.params or SamplingParams(**running.defaults.named())] * len(self.prompts)
        if len(self.params) != len(self.prompts):
            raise ConfigError(
                f"There are {len(self.prompts)} prompts and {len(self.params)} sampling_params.",
                remedy="Give one for all, or one for each.",
            )
        return self.params

    def _adapters(self, running: RunningModel) -> list[AdapterRef | None]:
        """The adapter of each prompt, which begins to be loaded."""
        one = self.adapters
        names = [one] * len(self.prompts) if one is None or isinstance(one, str) else one
        if len(names) != len(self.prompts):
            raise ConfigError(
                f"There are {len(self.prompts)} prompts and {len(names)} adapters.", remedy="Give one for all, or one for each."
            )
        return [None if name is None else _adapter(running, name) for name in names]

    def _name(self, index: int) -> str:
        name = "prompt" if self.template is None else "messages"
        return name if len(self.prompts) == 1 else f"{name}[{index}]"

    def _text(self, running: RunningModel, prompt: Prompt | Sequence[Message], name: str) -> str | Sequence[int]:
        """The prompt's text, or the ids of its tokens."""
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


_TEXTS_AT_ONCE = 256


def _is_pair(text: Prompt | tuple[str, str]) -> TypeGuard[tuple[str, str]]:
    """Whether these are two texts that a reranker reads together: token ids are numbers."""
    return isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str)


def _check_not_empty(name: str, texts: Sequence[Prompt]) -> None:
    """Raises PenstockError for an empty text, before a prompt of the model's is put before it."""
    for index, text in enumerate(texts):
        if text == "":
            raise Rejected(RejectReason.INVALID, f"'{name}[{index}]' is empty.", param=f"{name}[{index}]")


def _text_tokens(texts: Sequence[Prompt | tuple[str, str]], keep: int | None, running: RunningModel) -> list[TextTokens]:
    """The tokens of texts and of pairs, as the model reads them. Raises PenstockError for what it can't read."""
    from penstock.calls.check import check_token_ids
    from penstock.serve.texts.read import read_truncation

    with _own_errors():
        cut = read_truncation(keep, None, running)
    most = None if cut is None else cut.max_tokens
    to_encode: list[str | tuple[str, str]] = []
    given: list[tuple[int, ...] | None] = []
    for index, text in enumerate(texts):
        if isinstance(text, str) or _is_pair(text):
            to_encode.append(text)
            given.append(None)
            continue
        with _own_errors():
            ids = list(cast("Sequence[int]", text))
            check_token_ids(ids, running.model.vocab_size, f"texts[{index}]")
        given.append(tuple(ids))
    encoded = iter(running.tokenizer.encode_texts(to_encode, max_tokens=most))
    found = [next(encoded) if ids is None else TextTokens(ids[:most], 0) for ids in given]
    limit = running.model.max_model_len
    for index, (text, tokens) in enumerate(zip(texts, found, strict=True)):
        if not text or not 1 <= len(tokens.token_ids) <= limit:
            name, num_tokens = f"texts[{index}]", len(tokens.token_ids)
            cause = "is empty" if not text else f"has {num_tokens} tokens, and {running.name} takes 1 to {limit}"
            detail = f"'{name}' {cause}. Shorten it, or set truncate_prompt_tokens." if text else f"'{name}' {cause}."
            raise Rejected(RejectReason.CONTEXT_LENGTH, detail, param=name)
    return found


# From chunks to outputs.


class _Choice:
    """One of a prompt's answers, as far as it has come."""

    def __init__(self, index: int, request: Request, *, has_logprobs: bool) -> None:
        self.request = request
        self._index = index
        self._text = ""
        self._num_told = 0
        """Characters of the text in the outputs so far."""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self._cumulative_logprob = 0.0
        self.last: OutputChunk | None = None
        """The newest chunk."""

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

    def output(self, end_token_ids: frozenset[int]) -> CompletionOutput:
        last = self.last
        finish_reason = None if last is None else last.finish_reason
        stop_reason = None if last is None or last.stop_reason in end_token_ids else last.stop_reason
        new_text, self._num_told = self._text[self._num_told :], len(self._text)
        return CompletionOutput(
            index=self._index,
            text=self._text,
            new_text=new_text,
            token_ids=list(self._token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=None if finish_reason is None else finish_reason.name.lower(),
            stop_reason=stop_reason,
        )


class _Answer:
    """A prompt's answers, as far as they have come."""

    def __init__(self, running: RunningModel, prompt: str | None, params: SamplingParams, requests: list[Request]) -> None:
        self.running = running
        self._prompt = prompt
        self._end_token_ids = frozenset(running.model.eos_token_ids) - frozenset(params.stop_token_ids or ())
        has_logprobs = params.logprobs is not None
        self.choices = [_Choice(index, request, has_logprobs=has_logprobs) for index, request in enumerate(requests)]

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0].request
        chunks = [choice.last for choice in self.choices if choice.last is not None]
        first_token_ns = min((chunk.first_token_ns for chunk in chunks if chunk.first_token_ns is not None), default=None)
        return RequestOutput(
            request_id=first.parent_id,
            prompt=self._prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[choice.output(self._end_token_ids) for choice in self.choices],
            finished=self.is_finished,
            num_cached_tokens=chunks[0].num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time_s=first.arrival_ns / 1e9,
                first_token_time_s=None if first_token_ns is None else first_token_ns / 1e9,
                last_token_time_s=max(chunk.at_ns for chunk in chunks) / 1e9,
            ),
        )


class _Reading:
    """Answers, and the stream that they come from: leaving that ends the requests that have not finished."""

    def __init__(self, stream: Stream, answers: Sequence[_Answer]) -> None:
        self.stream = stream
        self.answers = answers
        self._of = {choice.request.request_id: (answer, choice) for answer in answers for choice in answer.choices}
        self._failure: PenstockError | None = None

    async def more(self) -> set[_Answer]:
        """Wait until there is more. Answers that have got something; empty after the end.

        Raises PenstockError if an answer failed, after what it had said before.
        """
        if self._failure is not None:
            raise self._failure
        touched = set()
        for chunk in await self.stream.next_chunks():
            answer, choice = self._of[chunk.request_id]
            choice.add(chunk, answer.running)
            touched.add(answer)
            if chunk.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._failure = _ended_early(chunk, "answer")
        return touched


def _ended_early(chunk: OutputChunk, what: str) -> PenstockError:
    """The error of a request that the engine ended. One that it refused would be refused again."""
    remedy = "" if chunk.finish_reason is FinishReason.REJECTED else "Ask again."
    return PenstockError(chunk.detail or f"The engine ended the {what}.", remedy=remedy)


def _bar(total: int, what: str = "Answers", unit: str = " prompt") -> tqdm[NoReturn]:
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit)


def _logprobs_of(entry: TokenLogprobs, running: RunningModel) -> dict[int, Logprob]:
    text = running.tokenizer.token_text
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return found


# Beginning and end.


def _config(model: str | os.PathLike[str], settings: Mapping[str, object]) -> Config:
    """Raises ConfigError for what is no setting here, with the list."""
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    values = parse_settings({key: value for key, value in given.items() if value is not None}, _keywords())
    if "cache" not in values and (folder := os.environ.get("PENSTOCK_CACHE")):
        values["cache"] = folder
    config = config_from({**values, "model": os.fspath(model)})
    return replace(config, server=replace(config.server, explained_requests=0))  # there is nobody to ask for them


def _keywords() -> list[Setting]:
    named = [item for name, component in COMPONENTS if name in _COMPONENTS for item in settings_of(component)]
    others = [item for item in settings_of(ServerConfig) if item.key in _OTHER_KEYS]
    return [item for item in (*named, *others) if item.key not in _NOT_HERE]


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
