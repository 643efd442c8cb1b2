"""A client's request in a form common to all APIs, and the `Call`: the request after a check against a model.

The reader of each API makes a `ChatRequest` or a `CompletionRequest`. `check.make_call` makes the `Call`, `run` answers it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.admission.ask import Conditions
from penstock.deploy.off_loop import lane_of
from penstock.deploy.running import RunningModel
from penstock.text.dialects import NAME_CHARS, Message
from penstock.text.grammar import Grammar
from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason
from penstock.types.request import NO_WAITS, Owner, WaitTimes
from penstock.types.sampling import PARAMETERS, LineLimits, SamplingParams

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

TOOL_NAME = re.compile(f"[{NAME_CHARS}]{{1,128}}")
"""Anthropic's limit is 128 characters, OpenAI's 64."""
NAME_RULE = "must be 1 to 128 letters, digits or any of _ . -"


@dataclass(frozen=True, slots=True)
class Names:
    """The names that an API gives the fields of a request, for error messages to its clients.

    names = Names("ollama", "options.", {"max_tokens": "options.num_predict", "tools.*": "tools[{}].function"})
    names("sampling", "top_p"), names("tools", 3, "name")  # options.top_p, tools[3].function.name
    """

    api: str = "openai"
    """Key into `PARAMETERS[...].spellings`."""
    before_sampling: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our path of a field -> the API's. `*` stands for any index, which fills the braces. Other fields keep their names."""

    def __call__(self, *path: str | int) -> str:
        """Return the client's name of a field, given our path to it. The longest prefix of it in `fields` is replaced."""
        if path[0] == "sampling":
            return self.before_sampling + PARAMETERS[str(path[1])].spellings[self.api].name
        for end in range(len(path), 0, -1):
            exact = ".".join(map(str, path[:end]))
            general = ".".join("*" if isinstance(part, int) else part for part in path[:end])
            if (own := self.fields.get(exact, self.fields.get(general))) is not None:
                return joined(path[end:], own.format(*[part for part in path[:end] if isinstance(part, int)]))
        return joined(path)


def joined(place: Sequence[str | int], beginning: str = "") -> str:
    """Return a field's path as text: `messages[0].role` for `("messages", 0, "role")`."""
    for part in place:
        beginning += f"[{part}]" if isinstance(part, int) else f".{part}" if beginning else part
    return beginning


# Prompts. `param` is the field of the client's body that has the prompt.


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    param: str
    cuts: tuple[int, ...] = ()
    """Places that no token crosses, so that clients' texts in a chat make no control tokens (`text.control_tokens`)."""

    def encode(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
        """Return the prompt's token ids. Raises `Rejected`."""
        return tokenizer.encode(self.text, add_special_tokens=add_special_tokens, cuts=self.cuts)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A prompt of texts and token ids, one after the other."""

    parts: tuple[str | int, ...]
    param: str


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The text before and after a gap in a file, for a model that fills in the middle."""

    first: str
    last: str
    files: tuple[tuple[str, str], ...]
    """Names and texts of other files. The first files are left out if they do not fit into the context."""
    param: str


Prompt = TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat's messages, which the model's chat template turns into one prompt."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template: plain JSON data."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the template shows, in Hugging Face's form. Filled by `check.make_call`."""
    param: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function that the client offers to the model as a tool."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments, or None for a function without arguments."""
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an answer may or must call. API readers check their names."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: frozenset[str] | None = None
    """Names of the tools that can be called. None means all tools."""
    is_parallel: bool = True
    """Several calls are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Parameters of a beam search. Its `n` beams become the choices, best first."""

    length_penalty: float = 1.0
    early_stopping: bool | str = False
    """True, False or "never", as `types.sampling.EarlyStopping.of` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The parts of an answer that the client wants to see, such as log-probabilities."""

    is_streamed: bool = False
    includes_usage: bool = False
    """The last event of a stream has the token counts."""
    has_continuous_usage: bool = False
    has_timings: bool = False
    """llama.cpp's `timings`, in every event of a stream."""
    has_token_ids: bool = False
    has_reasoning: bool = True
    include_stop_str_in_output: bool = False
    """The text of a choice includes the stop string or token that ended it."""
    logprobs: int | None = None
    """Number of alternatives shown for each sampled token. None means no log-probabilities."""
    prompt_logprobs: int | None = None
    echo: bool = False
    """Each answer begins with its prompt."""
    scores_echo: bool = False
    """`logprobs` also applies to the tokens of an echoed prompt."""

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def echo_logprobs(self) -> int | None:
        """Number of alternatives for each token of a prompt that the answer repeats, or None."""
        return self.logprobs if self.scores_echo else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Shown):
    """Fields that chat and completion requests share. API readers check types and bounds; `check` checks the other rules."""

    names: Names = Names()
    model: str | None = None
    """The client's name of the model or adapter. None means the default model."""
    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = None
    """0: only compute the prompt. None: the default of the model's files, or the rest of the context."""
    ends_with_context: bool = True
    """If `max_tokens` exceed the context, the answer ends there. If False, the request is refused."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of a prompt to keep. -1: as many as fit; None: all."""
    adds_special_tokens: bool = True
    suffix: str = ""
    """The text after the completion, for a model that fills in the middle."""
    skip_special_tokens: bool = True

    # Which tokens can come
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Name in `PARAMETERS` -> value, for parameters that the client set."""
    beams: BeamSearch | None = None
    logit_bias: Mapping[str, Any] = field(default_factory=dict)
    """Token id as text -> bias."""
    allowed_token_ids: Sequence[int] | None = None
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    bad_words: Sequence[str] = ()
    grammar: Grammar | None = None

    # Where an answer ends
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    lines: LineLimits | None = None

    # Terms
    answer_prefix: str = ""
    """Prefix of the answer's id, before the request's id."""
    priority: int | None = None
    cache_salt: str = ""
    conversation_name: str = ""
    """Identifies the conversation for the prefix cache."""
    user: str = ""
    """Users are split among models by this name (docs/ab.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    prompts: tuple[Prompt, ...]
    default_max_tokens: int | None = None
    """Used if `max_tokens` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    conversation: Conversation
    adds_special_tokens: bool = False
    """False, because the chat template writes special tokens."""
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    """The end of the reasoning block is forced after this many tokens. None means no limit."""

    @property
    def calls_are_free(self) -> bool:
        """Whether text may precede calls of tools. Otherwise the grammar decides from the first token on."""
        return self.tool_choice.mode == "auto" and self.grammar is None


# The call


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Conditions):
    """A call's id, owner, deadlines and priority."""

    request_id: str
    owner: Owner = field(default_factory=Owner)
    arrival_ns: int
    queued_ns: int
    """When its wait in the queue began to count: at its arrival, or when its route chose the model."""
    slo_itl_ns: int | None = None
    """None means the server's."""
    cache_salt: bytes = b""
    waits: WaitTimes = NO_WAITS
    """Its waits so far, after its arrival."""
    conversation: bytes = b""
    """Identifies the conversation for the prefix cache, as `Request.conversation`. Empty if the client names none."""

    @property
    def lane(self) -> Owner:
        return lane_of(self.owner, is_background=self.background)

    @property
    def time_limits(self) -> list[tuple[int, RejectReason, int]]:
        """Deadlines on the clock in ns, each with the reason to reject the call when it passes, and since when it counts."""
        limits = [
            (self.deadline_ns, RejectReason.DEADLINE, self.arrival_ns),
            (self.queue_deadline_ns, RejectReason.QUEUE_TIMEOUT, self.queued_ns),
            (self.first_token_deadline_ns, RejectReason.FIRST_TOKEN_TIMEOUT, self.arrival_ns),
        ]
        return [(at_ns, reason, since_ns) for at_ns, reason, since_ns in limits if at_ns is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(Shown):
    """How to write the answer. Kept in memory, without the prompt, until the answer ends."""

    answer_id: str
    model_name: str
    created_unix_s: int
    system_fingerprint: str
    """Fingerprint of the model."""
    adapter: AdapterRef | None = None
    """Part of the answer's fingerprint. Its content may be unknown until it is loaded."""
    is_empty: bool = False
    """`max_tokens` is 0. The engine still generates one token, which is not shown."""
    shown_special_ids: tuple[int, ...] | None
    """Special tokens that the client sees, or None for all. The engine also writes those that mark tool calls or reasoning."""
    end_token_ids: frozenset[int]
    """The model's own end tokens. As in vLLM, `stop_reason` never names these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that passed the checks of `check.make_call`, with the model that answers it."""

    running: RunningModel
    adapter: AdapterRef | None = None
    terms: Terms
    request: ChatRequest | CompletionRequest
    prompts: Conversation | tuple[Prompt, ...]
    sampling: SamplingParams
    """Parameters common to all answers, without `max_tokens`, `seed` and bans that need a tokenizer."""
    grammar: Grammar | None
    """The grammar of the answer, or of its tool calls."""
    tools: frozenset[str] | None = None
    """Names of the tools that can be called. None: no calls."""
    max_reasoning_tokens: int | None = None
    """If this or `grammar` is set, so is `sampling.follows_grammar`."""
    max_tokens: int | None
    """None: the default of the model's files, or the rest of the context."""
    answer: AnswerOptions
    num_bytes: int = 0
    """Size of the body."""
    claim: bytes = b""
    """Hash of the request. Admission recognises a retry by it."""
