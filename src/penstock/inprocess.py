"""Parameters and outputs of `LLM` and `AsyncLLM`. Turns calls into engine requests and the engine's chunks into outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeGuard, TypeVar

from penstock.engine.state import EngineState
from penstock.types.encoder import TextTokens
from penstock.types.errors import ConfigError, PenstockError, Rejected, RejectReason
from penstock.types.request import FinishReason, Request

if TYPE_CHECKING:
    from penstock.calls.call import Conversation, TextPrompt
    from penstock.deploy.running import RunningModel
    from penstock.engine.bridge import Stream
    from penstock.engine.ports import OutputChunk
    from penstock.serve.bodies import PythonFields
    from penstock.types.adapter import AdapterRef
    from penstock.types.result import TokenLogprobs

_Output = TypeVar("_Output")

Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""
Message = Mapping[str, object]
"""One turn of a conversation: `role` (system, user or assistant) and `content`, a text or a list of text parts."""


class ChatOptions(TypedDict, total=False):
    """Options for turning a conversation into a prompt with the model's chat template."""

    add_generation_prompt: bool | None
    """Whether to open the model's turn. By default True, unless `continue_final_message` is set."""
    continue_final_message: bool
    """Have the model continue the last message."""
    chat_template_kwargs: Mapping[str, object] | None
    """Further variables of the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The required format of an answer. Set exactly one of json, regex, choice, grammar, structural_tag and json_object."""

    json: str | Mapping[str, object] | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """Matches the whole answer."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark's notation, or in GBNF, whose rules are written with `::=`."""
    grammar_syntax: str | None = None
    """`lark` or `gbnf`. None: detect the notation."""
    structural_tag: str | Mapping[str, object] | None = None
    """xgrammar's structural tag, which constrains parts of free text, as an object or as JSON text."""
    json_object: bool | None = None
    """True: any JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How answers are sampled. Raises `PenstockError` for a value out of range."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = 16
    """Most tokens of one answer. None: the limit in the model's files, or up to the end of the context."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0: always take the likeliest token."""
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
    """The same seed gives the same answer, whatever else runs. None: draw one for each prompt."""
    stop: str | Sequence[str] | None = None
    """Texts that end an answer and are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens, such as the end of a turn, out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each token and of this many likeliest tokens. None: no log-probabilities."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only this many last tokens of a prompt. -1: as many as fit beside `max_tokens`; None: all."""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _fields_of(self)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, in the model's distribution before sampling parameters."""

    logprob: float
    rank: int
    """1 is the likeliest token."""
    decoded_token: str
    """The token's text; incomplete characters are U+FFFD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer, complete or as far as it has been generated."""

    index: int
    """Number of the answer, from 0 to `n` - 1."""
    text: str
    new_text: str
    """The part of `text` since the previous output. For a complete answer, all of it."""
    token_ids: list[int]
    """All generated tokens, including hidden ones."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of all tokens, or None if the request has no `logprobs`."""
    logprobs: list[dict[int, Logprob]] | None
    """For each of `token_ids`: that token and the likeliest ones, by token id."""
    finish_reason: str | None = None
    """`stop`, `length`, or None while the answer grows."""
    stop_reason: int | str | None = None
    """The stop token or stop text that ended the answer. None: an end token of the model or the length limit did, or it
    goes on."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times when a request arrived and got tokens, in seconds on a monotonic clock."""

    arrival_time_s: float
    first_token_time_s: float | None
    """When the first token of any answer came, or None."""
    last_token_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text, or the text that the chat template made of a conversation. None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` answers, by index."""
    finished: bool
    num_cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class _TextOutput(Generic[_Output]):
    request_id: str
    prompt_token_ids: list[int]
    outputs: _Output


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]
    """The text's vector, of `dimensions` values. Its length is 1, unless modules.json has no `Normalize`."""


class EmbeddingRequestOutput(_TextOutput[EmbeddingOutput]):
    pass


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]
    """A score for each label, after the function that the model's files name."""
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The label with the highest score."""
        return self.labels[self.probs.index(max(self.probs))]


class ClassificationRequestOutput(_TextOutput[ClassificationOutput]):
    pass


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


class ScoringRequestOutput(_TextOutput[ScoringOutput]):
    """The score of a pair of texts. The token ids are the pair's or, from an embedding model, those of the second text."""


class _Choice:
    """One of a prompt's `n` answers while it is generated."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.last: OutputChunk | None = None
        """The newest chunk."""
        self._text = ""
        self._num_shown = 0
        """Characters of the text that earlier outputs contained."""
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
    """All `n` answers to one prompt while they are generated, with their engine requests."""

    def __init__(
        self,
        running: RunningModel,
        prompt: str | None,
        requests: Sequence[Request],
        end_token_ids: frozenset[int],
        *,
        has_logprobs: bool,
    ) -> None:
        """`end_token_ids`: the model's end tokens, which outputs do not report as `stop_reason`."""
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
    """Reads the engine's output chunks into the answers of one call. Leaving the `with` block aborts unfinished requests."""

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
        """Wait for the engine. Return the answers that have grown, or an empty set if all are finished.

        After an answer has failed, the next call raises PenstockError.
        """
        if self._failure is not None:
            raise self._failure
        touched = set()
        for chunk in await self._stream.next_chunks():
            answer, choice = self._of[chunk.request_id]
            if chunk.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._failure = ended_early(chunk, "answer", answer.running)
                chunk.finish_reason = None  # what it says is shown, but does not finish the answer
            choice.add(chunk, answer.running)
            touched.add(answer)
        return touched


_REMEDIES = {
    EngineState.RESTARTING: "The engine restarts after a failure: ask again in a few seconds.",
    EngineState.FAILED: "The engine can't be restarted: load the model again.",
}


def ended_early(chunk: OutputChunk, what: str, running: RunningModel) -> PenstockError:
    """Return the error for a request that the engine ended. The remedy for an engine that does not run depends on its state.
    Otherwise the remedy is to retry, unless the engine refused the request."""
    detail = (chunk.detail or f"The engine ended the {what}").removesuffix(".")
    remedy = "" if chunk.finish_reason is FinishReason.REJECTED else "Ask again."
    if chunk.reject_reason == RejectReason.UNAVAILABLE:
        remedy = _REMEDIES.get(running.engine.state, remedy)
    return PenstockError(f"{detail}.", remedy=remedy)


def _logprobs_of(entry: TokenLogprobs, running: RunningModel) -> dict[int, Logprob]:
    text = running.tokenizer.token_text
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a call of `generate` or `chat`. If `template` is set, the prompts are conversations."""

    prompts: Sequence[Prompt | Sequence[Message]]
    params: SamplingParams | Sequence[SamplingParams] | None
    template: ChatOptions | None = None
    adapters: str | Sequence[str | None] | None = None
    """The name of an adapter for all, or one for each."""

    def answers(self, running: RunningModel, seeds: Sequence[int]) -> list[Answer]:
        """Return an `Answer` with engine requests for each prompt. Tokenising long prompts is slow. Raises PenstockError.

        `seeds`: one for each prompt, for those whose parameters have none.
        """
        from penstock.calls.call import TextPrompt
        from penstock.calls.prompts import check_encoded

        if (encoder := running.model.encoder) is not None:
            remedy = f"Load a model that writes text, or {encoder.task} texts with this one."
            raise ConfigError(f"{running.name} reads texts and writes none.", remedy=remedy)
        params = SamplingParams(**running.defaults.named()) if self.params is None else self.params
        all_params = self._each(params, SamplingParams, "sampling_params", "a SamplingParams")
        names = self._each(self.adapters, str | None, "adapter", "a name")
        adapters = [None if name is None else _adapter(running, name) for name in names]
        read = [self._text(running, prompt, self._name(index)) for index, prompt in enumerate(self.prompts)]
        prompts = [prompt for prompt, _ in read]
        whole = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt) and not prompt.cuts]
        encoded = iter(running.tokenizer.encode_batch(whole, add_special_tokens=self.template is None))
        arrival_ns, answers = running.clock.now_ns(), []
        for index, (prompt, params, adapter) in enumerate(zip(prompts, all_params, adapters, strict=True)):
            name, text = self._name(index), None
            token_ids: Sequence[int]
            if isinstance(prompt, TextPrompt):
                text, token_ids = prompt.text, prompt.encode(running.tokenizer) if prompt.cuts else next(encoded)
                check_encoded(token_ids, running, name)
            else:
                token_ids = prompt
            requests = _requests(running, token_ids, params, seeds[index], arrival_ns, name, adapter, read[index][1])
            end_token_ids = frozenset(running.tokenizer.eos_token_ids) - frozenset(params.stop_token_ids or ())
            has_logprobs = params.logprobs is not None
            answers.append(Answer(running, text, requests, end_token_ids, has_logprobs=has_logprobs))
        return answers

    def _each(self, given: Any, kind: Any, what: str, words: str) -> Sequence[Any]:
        is_one = isinstance(given, kind | Mapping) or not isinstance(given, Collection)
        values = [given] * len(self.prompts) if is_one else given
        if len(values) != len(self.prompts):
            raise ConfigError(
                f"There are {len(self.prompts)} prompts and {len(values)} {what}.", remedy="Give one for all, or one for each."
            )
        for index, value in enumerate(values):
            if not isinstance(value, kind):
                name = what if is_one else f"{what}[{index}]"
                raise ConfigError(f"'{name}' is of type {type(value).__name__}.", remedy=f"Give {words}, or one for each.")
        return values

    def _name(self, index: int) -> str:
        name = "prompt" if self.template is None else "messages"
        return name if len(self.prompts) == 1 else f"{name}[{index}]"

    def _text(
        self, running: RunningModel, prompt: Prompt | Sequence[Message], name: str
    ) -> tuple[TextPrompt | Sequence[int], Conversation | None]:
        from penstock.calls.call import TextPrompt

        if self.template is None:
            if isinstance(prompt, str):
                return TextPrompt(prompt, name), None
            return _token_ids(prompt, name), None
        if running.chat_template is None:
            remedy = "Set chat_template (--chat-template), or have a text continued (generate; penstock run --raw)."
            raise ConfigError(f"{running.name} has no chat template, or only named ones.", remedy=remedy)
        from penstock.calls.prompts import render_here
        from penstock.serve.bodies import check_part
        from penstock.serve.messages import ChatTemplateFields, read_conversation_with_tools

        messages = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
        fields = {name: _plain(value) for name, value in self.template.items()}
        with own_errors():
            conversation = read_conversation_with_tools(check_part({**fields, "messages": messages}, ChatTemplateFields))
        return render_here(conversation, running), conversation


def _token_ids(prompt: object, name: str) -> list[int]:
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        token_ids = [item for item in prompt if type(item) is int]
        if len(token_ids) == len(prompt):
            return token_ids
    raise ConfigError(f"'{name}' is neither a text nor token ids.", remedy="Give a str, or a list of int.")


def _adapter(running: RunningModel, name: str) -> AdapterRef:
    """Find a LoRA adapter by name and begin to load it. Raises ConfigError."""
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
    seed: int,
    arrival_ns: int,
    name: str,
    adapter: AdapterRef | None = None,
    conversation: Conversation | None = None,
) -> list[Request]:
    """Return an engine request for each of the `n` answers to a prompt. Raises PenstockError."""
    from penstock.calls.call import CompletionRequest, Names, Terms, TokenPrompt
    from penstock.calls.check import make_call
    from penstock.calls.prompts import tokenise
    from penstock.calls.run import make_requests, plan_of_begun
    from penstock.serve.bodies import fields_of, structured_grammar

    fields, prompt = _fields_of(params), TokenPrompt(tuple(token_ids), name)
    with own_errors():
        request = CompletionRequest(
            **fields_of(fields),
            names=Names("python"),
            prompts=(prompt,),
            logprobs=params.logprobs,
            grammar=structured_grammar(fields.structured_outputs),
        )
    parent_id = running.sources.new_request_id()
    call = make_call(request, running, Terms(request_id=parent_id, arrival_ns=arrival_ns, queued_ns=arrival_ns), adapter)
    limit, num_tokens = running.admission.max_len(adapter), len(token_ids)
    if not token_ids:
        raise ConfigError(f"'{name}' has no tokens.", remedy="Give a text.")
    if params.truncate_prompt_tokens is None and num_tokens + max(1, params.min_tokens) > limit:
        raise Rejected(
            RejectReason.CONTEXT_LENGTH,
            f"'{name}' has {num_tokens} tokens; {running.name} takes {limit}"
            f"{' beside this adapter' * (limit < running.model.capacity.max_model_len)}, the answer included. Shorten it.",
        )
    tokenised = tokenise(call, [prompt])
    matchers = None
    if call.grammar is not None:
        call.grammar.check_lengths(max(tokenised.max_tokens))
        plan = plan_of_begun(conversation, call.grammar, running.dialect)
        matchers = [running.grammars.matcher(call.grammar, plan) for _ in range(params.n)]
        if plan is not None:
            from penstock.text.answer_matcher import begin_all

            matchers = begin_all(matchers)
    own_seed = call.request.sampling.get("seed")
    seed = seed if own_seed is None else int(own_seed)
    return make_requests(call, tokenised, parent_id, seed, matchers, waits=call.terms.waits)


def _fields_of(params: SamplingParams) -> PythonFields:
    from penstock.serve.bodies import PythonFields

    fields = {name: _plain(getattr(params, name)) for name in params.__slots__}
    if isinstance(params.logit_bias, Mapping):
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    asked = params.structured_outputs
    if isinstance(asked, StructuredOutputsParams):  # else a dict of its fields, or refused below
        fields["structured_outputs"] = {name: _plain(getattr(asked, name)) for name in asked.__slots__}
    with own_errors():
        return PythonFields.model_validate(fields)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Turn errors of the HTTP server about invalid requests, raised in the block, into `Rejected`."""
    from pydantic import ValidationError

    from penstock.serve.errors import ApiError, from_finding

    try:
        yield
    except (ValidationError, ApiError) as error:
        told = error if isinstance(error, ApiError) else from_finding(error.errors(include_url=False)[0])
        raise Rejected(RejectReason.INVALID, told.message, param=told.param) from None


def several_of(name: str, asked: Sequence[Any], part: type) -> Sequence[Any]:
    """Return a list of prompts or conversations. A single one (a str, or a sequence of `part`) becomes a list of one.

    Raises ConfigError for anything else.
    """
    if not isinstance(asked, Collection) or isinstance(asked, Mapping | bytes):
        raise ConfigError(f"'{name}' is of type {type(asked).__name__}.", remedy="Give a list.")
    is_one = isinstance(asked, str) or (len(asked) > 0 and all(isinstance(item, part) for item in asked))
    return [asked] if is_one else asked


def is_pair(text: Prompt | tuple[str, str]) -> TypeGuard[tuple[str, str]]:
    """Return whether this is a pair of texts for a reranker, and not a tuple of token ids."""
    return isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str)


def check_texts(name: str, texts: Sequence[Prompt], kind: type = Sequence) -> None:
    """Raise PenstockError for an empty text, and for an item of another type than `kind`.

    Call this before adding the model's own prompt to the texts.
    """
    remedy = "Give a str." if kind is str else "Give a str, or a list of token ids."
    for index, text in enumerate(texts):
        if not isinstance(text, kind) or is_pair(text):
            raise ConfigError(f"'{name}[{index}]' is of type {type(text).__name__}.", remedy=remedy)
        if text == "":
            raise Rejected(RejectReason.INVALID, f"'{name}[{index}]' is empty.", param=f"{name}[{index}]")


def text_tokens(texts: Sequence[Prompt | tuple[str, str]], keep: int | None, running: RunningModel) -> list[TextTokens]:
    """Tokenise texts and pairs of texts. `keep`: most tokens of each. Raises PenstockError for an empty or too long one."""
    from penstock.calls.check import check_token_ids
    from penstock.serve.texts.read import read_truncation

    with own_errors():
        cut = read_truncation(keep, None, running)
    most, limit = None if cut is None else cut.max_tokens, running.model.capacity.max_model_len
    to_encode = [text for text in texts if isinstance(text, str) or is_pair(text)]
    encoded = iter(running.tokenizer.encode_texts(to_encode, max_tokens=most))
    found: list[TextTokens] = []
    for index, text in enumerate(texts):
        name = f"texts[{index}]"
        if isinstance(text, str) or is_pair(text):
            tokens = next(encoded)
        else:
            ids = _token_ids(text, name)
            check_token_ids(ids, running.model.vocab_size, name)
            tokens = TextTokens(tuple(ids[:most]), 0)
        num_tokens = len(tokens.token_ids)
        if not text or not 1 <= num_tokens <= limit:
            cause = f"has {num_tokens} tokens, and {running.name} takes 1 to {limit}" if text else "is empty"
            remedy = " Shorten it, or set truncate_prompt_tokens." if text else ""
            raise Rejected(RejectReason.CONTEXT_LENGTH, f"'{name}' {cause}.{remedy}", param=name)
        found.append(tokens)
    return found
