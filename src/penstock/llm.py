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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from penstock.config import Config, ServerConfig
from penstock.config.components import COMPONENTS, DEFAULT_MODEL, config_from
from penstock.config.setting import Setting, settings_of
from penstock.config.sources import parse_settings
from penstock.deploy.factory import locate, start_model
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.inprocess import (
    Answer,
    Asked,
    ChatOptions,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Message,
    Prompt,
    Reading,
    RequestOutput,
    SamplingParams,
    ScoringOutput,
    ScoringRequestOutput,
    check_texts,
    ended_early,
    is_pair,
    own_errors,
    several_of,
    text_tokens,
)
from penstock.machine import available_memory_bytes
from penstock.types.encoder import EncoderInfo, Task, TextTokens
from penstock.types.errors import ConfigError, PenstockError
from penstock.types.request import FinishReason, Request

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel
    from penstock.serve.texts.call import TextResult

_Result = TypeVar("_Result")
_Output = TypeVar("_Output")
_COMPONENTS = ("model", "kv", "lora", "scheduler", "backend")
_NOT_HERE = ("model", "served_model_name")
"""Settings of these components that are not keywords."""
_TEXTS_AT_ONCE = 256
_open: weakref.WeakKeyDictionary[Resources, None] = weakref.WeakKeyDictionary()
"""Resources of this process's models. A model that was closed, or did not load, has no share of memory there."""
_load_turn = threading.Lock()
"""Held by the model that loads. How much memory it leaves to the next one is known when it has loaded."""


def _forget_others() -> None:
    """Forget, in a forked process, the models that its parent has or was loading."""
    _open.clear()
    if _load_turn.locked():  # by a thread that does not exist here
        _load_turn.release()


os.register_at_fork(after_in_child=_forget_others)


class _Facts:
    """Properties of a loaded model, for `LLM` and `AsyncLLM`."""

    _running: RunningModel

    @property
    def model_name(self) -> str:
        return self._running.name

    @property
    def fingerprint(self) -> str:
        """A hash of what answers depend on besides the request: the model's files, settings and kernels."""
        return self._running.model.fingerprint

    @property
    def prompts(self) -> Mapping[str, str]:
        """An encoder's prompts by name: what it reads before each text of a kind, such as `query`. Empty: there are none."""
        encoder = self._running.model.encoder
        return {} if encoder is None else encoder.prompts

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together. For an encoder, most tokens of an input text."""
        return self._running.model.capacity.max_model_len

    def num_tokens(self, texts: str | Sequence[str], *, prompt_name: str | None = None) -> list[int]:
        """Return how many tokens the model reads of each text: special ones and an encoder's prompt, as in `embed`, included.

        Raises PenstockError.
        """
        from penstock.serve.texts.read import prompt_text
        from penstock.serve.texts.tokens import pieces_of

        encoder, encode = self._running.model.encoder, self._running.tokenizer.encode_batch
        if encoder is None and prompt_name is not None:
            raise ConfigError(f"{self.model_name} has no prompts: it writes text.", remedy="Leave prompt_name out.")
        with own_errors():
            prefix = "" if encoder is None else prompt_text(encoder, prompt_name)
        several = several_of("texts", texts, int)
        check_texts("texts", several, str)
        pieces = pieces_of([prefix + text for text in several])
        return [len(ids) for piece in pieces for ids in encode(piece, add_special_tokens=True)]

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model's files set. They apply to calls without `sampling_params`."""
        return self._running.defaults.named()


class AsyncLLM(_Facts):
    """A model in this process, for one event loop. `async for` reads an answer as it grows. Concurrent requests are batched.

        async with AsyncLLM("smollm2:135m") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].new_text, end="")

    Leaving the loop early ends the request. The constructor blocks until the model is loaded.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """Load a model. The parameters are those of `LLM`."""
        config = _config(model, settings)
        source = locate(config)
        with _load_turn:
            self._running = start_model(config, source, _own_resources())
        asked = SimpleQueue[None]()
        self._closer = _Closer(self, partial(_close_when_asked, asked, self._running), partial(asked.put, None))

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt. Yield its answers so far whenever they have grown. The last output is `finished`.

        `adapter` is a name from `lora_modules` or in `lora_dir`. The first `await` raises PenstockError if the prompt does not
        fit or the adapter is unknown. A later one raises it if the engine fails.
        """
        return self._stream(Asked([prompt], sampling_params, adapters=adapter))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the model's next message in a conversation as it grows. Otherwise as `generate`."""
        return self._stream(Asked([messages], sampling_params, options, adapter))

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding vectors of texts, in their order. The model must be an encoder that embeds.

        Vectors have length 1, unless the model has a modules.json that lists no `Normalize`, or its files cut vectors
        (`truncate_dim`).

        - `prompt_name`: a prompt in the model's files to put before each text (`query`, `passage`). None: the files' default.
        - `dimensions`: cut vectors to this many values. Vectors of length 1 are scaled to length 1 again.
        - `truncate_prompt_tokens`: keep this many tokens of each text; -1: as many as the model reads. None: a text that is too
          long is an error.
        - `use_tqdm`: show the progress on stderr, if that is a terminal.

        Raises PenstockError.
        """
        from penstock.serve.texts.numbers import embedding
        from penstock.serve.texts.read import check_dimensions, prompt_text

        encoder = self._encoder(Task.EMBED)
        with own_errors():
            check_dimensions(dimensions, encoder)
            prefix = prompt_text(encoder, prompt_name)
        answers = await self._read_texts(_prompted(prefix, texts), truncate_prompt_tokens, use_tqdm=use_tqdm)
        vectors = [embedding(one[2], encoder, dimensions, is_unit=not encoder.has_own_lengths) for one in answers]
        return _outputs(EmbeddingRequestOutput, answers, [EmbeddingOutput(vector.tolist()) for vector in vectors])

    async def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = False
    ) -> list[ClassificationRequestOutput]:
        """Return a classifier's score of each label, for each text. Other parameters are as in `embed`."""
        from penstock.serve.texts.numbers import scores
        from penstock.serve.texts.read import prompt_for

        encoder = self._encoder(Task.CLASSIFY, Task.RERANK)
        asked = _prompted(prompt_for(encoder), texts)
        answers = await self._read_texts(asked, truncate_prompt_tokens, use_tqdm=use_tqdm)
        found = [ClassificationOutput(scores(result, encoder.scores), encoder.labels) for _, _, result in answers]
        return _outputs(ClassificationRequestOutput, answers, found)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts: a reranker's, or the cosine of an embedding model's vectors.

        With vectors of tokens: the sum of the largest cosine of each token of `text_1` with one of `text_2`.

        A single `text_1` is paired with each `text_2`. Other parameters are as in `embed`.
        """
        from penstock.serve.texts.pairs import Pairs

        encoder = self._encoder(Task.RERANK, Task.EMBED, may_be_per_token=True)
        firsts, seconds = several_of("text_1", text_1, int), several_of("text_2", text_2, int)
        if len(firsts) not in (1, len(seconds)):
            remedy = "Give one text_1, or as many."
            raise ConfigError(f"There are {len(firsts)} of text_1 and {len(seconds)} of text_2.", remedy=remedy)
        check_texts("text_1", firsts, str)
        check_texts("text_2", seconds, str)
        pairs = Pairs(firsts, seconds, "text_1[{}]".format, "text_2[{}]".format)
        answers = await self._read_texts(pairs.texts(encoder), truncate_prompt_tokens, use_tqdm=use_tqdm)
        found = [ScoringOutput(score) for score in pairs.scores(encoder, [result for _, _, result in answers])]
        return _outputs(ScoringRequestOutput, answers[len(answers) - len(seconds) :], found)

    async def aclose(self) -> None:
        """End all requests and free the model. Idempotent."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Do the same as `aclose`, without an event loop."""
        self._closer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def _stream(self, asked: Asked) -> AsyncGenerator[RequestOutput, None]:
        with await self._open(asked) as reading:
            while await self._more(reading):
                yield reading.answers[0].output()

    async def _all(self, asked: Asked, *, use_tqdm: bool) -> list[RequestOutput]:
        with await self._open(asked) as reading, _progress(use_tqdm, len(reading.answers), "Answers", " prompt") as count:
            while touched := await self._more(reading):
                count(sum(answer.is_finished for answer in touched))
            return [answer.output() for answer in reading.answers]

    async def _open(self, asked: Asked) -> Reading:
        self._check_open()
        with self._raising_if_closed():
            # Drawn before any wait, so that `seed` gives calls seeds in the order of their arrival.
            seeds = [self._running.sources.draw_seed() for _ in asked.prompts]
            answers = await asyncio.to_thread(asked.answers, self._running, seeds)
            return Reading(self._running.bridge.open([request for one in answers for request in one.requests]), answers)

    async def _more(self, reading: Reading) -> set[Answer]:
        with self._raising_if_closed():
            return await reading.more()

    @contextlib.contextmanager
    def _raising_if_closed(self) -> Iterator[None]:
        """If the model is closed, raise that error instead of the one from the block."""
        try:
            yield
        except PenstockError:
            self._check_open()
            raise

    def _check_open(self) -> None:
        if not self._closer.is_open:
            raise _closed() from None

    def _encoder(self, *tasks: Task, may_be_per_token: bool = False) -> EncoderInfo:
        """Return the encoder's description. Raises ConfigError unless it is for one of `tasks`, and answers per text."""
        encoder = self._running.model.encoder
        if encoder is None:
            raise ConfigError(f"{self.model_name} writes text.", remedy="Load an encoder, such as minilm.")
        if encoder.task not in tasks:
            what = f"{self.model_name} is for --task {encoder.task}."
            raise ConfigError(what, remedy=f"Load a model for {' or '.join(tasks)}.")
        if encoder.is_per_token and not may_be_per_token:
            kind, remedy = "a vector", "Set pooling (--pooling) to first, last or mean."
            if encoder.labels:
                kind, remedy = "labels", "Load a model that classifies whole texts."
            raise ConfigError(f"{self.model_name} has {kind} for each token, not for the text.", remedy=remedy)
        return encoder

    async def _read_texts(
        self, texts: Sequence[Prompt | tuple[str, str]], keep: int | None, *, use_tqdm: bool
    ) -> list[tuple[str, TextTokens, TextResult]]:
        """Run texts, or pairs, through an encoder. Return id, tokens and result of each. `keep`: most tokens of each."""
        from penstock.serve.texts.call import TextResult
        from penstock.serve.texts.desk import SAMPLING

        self._check_open()
        running, found = self._running, dict[str, bytes]()
        encoder = running.model.encoder
        assert encoder is not None, "callers have checked it"
        size = sum([sum(map(len, text)) if is_pair(text) else len(text) for text in texts])
        # Never refused, unlike `run`: the caller is this process itself.
        tokens = await running.off_loop.finish(size, partial(text_tokens, texts, keep, running))
        parent_id = running.sources.new_request_id()
        names = [f"{parent_id}.{index}" for index in range(len(texts))]
        starts = iter(range(0, len(texts), _TEXTS_AT_ONCE))

        async def read(count: Callable[[int], object]) -> None:
            for start in starts:
                arrival_ns, end = running.clock.now_ns(), start + _TEXTS_AT_ONCE
                requests = [
                    Request(name, text.token_ids, SAMPLING, arrival_ns, parent_id=parent_id, second_at=text.second_at)
                    for name, text in zip(names[start:end], tokens[start:end], strict=True)
                ]
                with running.bridge.open(requests) as stream:
                    while chunks := await stream.next_chunks():
                        for chunk in chunks:
                            if chunk.finish_reason is not FinishReason.STOP:
                                raise ended_early(chunk, "text", running)
                            found[chunk.request_id] = encoder.kept(chunk.states)
                        count(len(chunks))

        with _progress(use_tqdm, len(texts), "Texts", " text") as count:
            readers = [asyncio.ensure_future(read(count)) for _ in range(2)]  # two, so that the engine always has texts
            try:
                with self._raising_if_closed():
                    await asyncio.gather(*readers)
            finally:
                for reader in readers:
                    reader.cancel()
        return [(name, text, TextResult(found[name], len(text.token_ids))) for name, text in zip(names, tokens, strict=True)]


def _prompted(prompt: str, texts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return texts with the model's prompt before each that is not token ids. Raises PenstockError for one of another type."""
    several = several_of("texts", texts, int)
    check_texts("texts", several)
    return [prompt + text if isinstance(text, str) else text for text in several]


def _outputs(
    kind: Callable[[str, list[int], _Output], _Result],
    answers: Sequence[tuple[str, TextTokens, object]],
    outputs: list[_Output],
) -> list[_Result]:
    return [kind(name, list(text.token_ids), one) for (name, text, _), one in zip(answers, outputs, strict=True)]


class LLM(_Facts):
    """A model in this process, for scripts and notebooks. Thread-safe: requests of several threads are batched.

    Leaving the `with` block frees the model. Ctrl-C ends the requests that the caller waits for.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: object) -> None:
        """Load a model. Download it first if necessary.

        - `model`: a catalogue name, a .gguf file, a Hugging Face directory or `hf:org/repo[:file]`.
        - `settings`: those of `penstock serve` for model, KV cache, adapters, scheduling and computing, with the keys and the
          notation of docs/configuration.md (`kv_cache_memory="1GiB"`, `policy="fair"`). `seed` makes the requests' seeds
          repeatable.

        Raises PenstockError for an unknown setting, and for a model that can't be loaded or does not fit.
        """
        self._async = AsyncLLM(model, **settings)
        self._running = self._async._running
        self._loop = asyncio.new_event_loop()
        self._asking = threading.RLock()
        """Held while work is handed to the loop, so that `close` waits. Reentrant: garbage collection may enter it."""
        self._closer = _Closer(self, partial(_run, self._loop, self._async), partial(_stop, self._loop, self._asking))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts. Return the complete answers, in the order of the prompts.

        - `sampling_params`: one for all prompts, or a sequence with one for each.
        - `adapter`: a name from `lora_modules` or in `lora_dir`, or a sequence with one for each prompt. None: no adapter.
        - `use_tqdm`: show the progress on stderr, if that is a terminal.

        Raises PenstockError if a prompt does not fit, before any prompt runs, and if an answer fails.
        """
        asked = Asked(several_of("prompts", prompts, int), sampling_params, adapters=adapter)
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

        The model's chat template makes the prompt, with the fields of `ChatOptions` as `options`.
        """
        asked = Asked(several_of("messages", messages, Mapping), sampling_params, options, adapter)
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
        """Return the embedding vectors of texts, in their order. The parameters are those of `AsyncLLM.embed`."""
        work = self._async.embed(
            texts,
            prompt_name=prompt_name,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )
        return self._wait(work)

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return a classifier's score of each label, for each text. Other parameters are as in `AsyncLLM.embed`."""
        return self._wait(self._async.classify(texts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts, as `AsyncLLM.score` does."""
        work = self._async.score(text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)
        return self._wait(work)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        """Continue a prompt. Yield its answers so far whenever they have grown. Leaving the loop early ends the request."""
        return self._iterate(self._async.generate(prompt, sampling_params, adapter=adapter))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """Yield the model's next message in a conversation as it grows. Otherwise as `stream`."""
        return self._iterate(self._async.chat(messages, sampling_params, adapter=adapter, **options))

    def close(self) -> None:
        """End all requests and free the model. Idempotent. Ctrl-C ends the wait, and the model is freed all the same."""
        self._closer.close()

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
            with self._asking:
                if self._closer.is_open:
                    asyncio.run_coroutine_threadsafe(outputs.aclose(), self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` on the loop's thread and return its result. An interrupt such as Ctrl-C cancels `work`."""
        # A queue, because Ctrl-C may interrupt a `concurrent.futures.Future` while its lock is held.
        tasks: list[asyncio.Task[_Result]] = []
        done: SimpleQueue[asyncio.Task[_Result]] = SimpleQueue()

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(done.put)

        with self._asking:
            if not self._closer.is_open:
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


@contextlib.contextmanager
def _progress(use_tqdm: bool, total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
    if not (use_tqdm and sys.stderr.isatty()):
        yield lambda _number: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit) as bar:
        yield bar.update


# Beginning and end


def _config(model: str | os.PathLike[str], settings: Mapping[str, object]) -> Config:
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    named = [item for name, component in COMPONENTS if name in _COMPONENTS for item in settings_of(component)]
    named += [item for item in settings_of(ServerConfig) if item.key == "seed"]
    keywords: list[Setting] = [item for item in named if item.key not in _NOT_HERE]
    values = parse_settings({key: value for key, value in given.items() if value is not None}, keywords)
    if "cache" not in values and (folder := os.environ.get("PENSTOCK_CACHE")):
        values["cache"] = folder
    config = config_from({**values, "model": os.fspath(model)})
    return replace(config, server=replace(config.server, explained_requests=0))  # nobody asks why a request takes long


def _own_resources() -> Resources:
    """Return resources for one model. Memory that the KV caches of other models here will still take is not free for it."""

    def read_available_bytes() -> int:
        opened = [ref() for ref in _open.keyrefs()]  # a list made at once, as other threads may open models
        others = [other for other in opened if other is not None and other is not own()]
        return available_memory_bytes() - sum(other.unfilled_bytes() for other in others)

    resources = Resources(MemoryBudget(read_available_bytes))
    own = weakref.ref(resources)  # a cycle would stay in `_open` until the garbage collector runs
    _open[resources] = None
    return resources


def _closed() -> PenstockError:
    cause = "The model is closed, or was loaded before this process was forked."
    return PenstockError(cause, remedy="Make another LLM.")


class _Closer:
    """Closes a model in a thread of its own, so that Ctrl-C ends the wait for it and nothing else.

    Also closes a model that was garbage-collected, or is still open when the interpreter exits: its threads must end first.
    """

    def __init__(self, model: _Facts, run: Callable[[], None], ask: Callable[[], object]) -> None:
        """`run` has that thread, and closes the model after `ask` was called for the first time."""
        self._is_asked, self._ask = False, ask
        self._ended = ended = threading.Lock()  # unlike `Thread.join` of Python 3.11, it can be waited for after Ctrl-C
        ended.acquire()

        def run_to_end() -> None:
            try:
                run()
            finally:
                ended.release()

        self._finalizer = weakref.finalize(model, _close_unasked, ask, ended)
        os.register_at_fork(after_in_child=self._finalizer.detach)  # the model's threads don't exist there
        # From the beginning, because Python starts no thread when it exits.
        threading.Thread(target=run_to_end, name="penstock-llm", daemon=True).start()

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive and not self._is_asked

    def close(self) -> None:
        if self._finalizer.alive:
            self._is_asked = True
            self._ask()
            with self._ended:
                self._finalizer.detach()


def _close_unasked(ask: Callable[[], object], ended: threading.Lock) -> None:
    """Close a model. Do not wait for it in one of its own threads, where the garbage collector may run."""
    ask()

    def wait() -> None:
        with ended:
            pass

    if threading.current_thread() is threading.main_thread():
        wait()
    else:
        with contextlib.suppress(RuntimeError):  # the interpreter exits already; else its exit waits for this thread
            threading.Thread(target=wait, name="penstock-close").start()


def _close_when_asked(asked: SimpleQueue[None], running: RunningModel) -> None:
    asked.get()
    running.close()


def _run(loop: asyncio.AbstractEventLoop, model: AsyncLLM) -> None:
    """Run the loop of an `LLM` until it is stopped. Then end its tasks, and close the model."""
    with ThreadPoolExecutor(thread_name_prefix="penstock-llm") as threads:
        loop.set_default_executor(threads)
        loop.run_forever()
        loop.run_until_complete(_cancel_others())
    model.close()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, asking: threading.RLock) -> None:
    with asking:  # every thread that found the model open has given its work to the loop
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(loop.stop)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
