"""A client's request in no API's words, and the `Call` that it becomes once it was checked against a model.

The reader of each API makes a `ChatRequest` or a `CompletionRequest`. `check.make_call` makes the `Call`, `run` answers it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.admission.checks import TenantLimits
from penstock.deploy.running import RunningModel
from penstock.text.dialects import NAME_CHARS, Message
from penstock.text.grammar import Grammar
from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason
from penstock.types.sampling import PARAMETERS, LineLimits, SamplingParams

TOOL_NAME = re.compile(f"[{NAME_CHARS}]{{1,128}}")
"""128 characters are Anthropic's limit. OpenAI's is 64."""
NAME_RULE = "must be 1 to 128 letters, digits or any of _ . -"


@dataclass(frozen=True, slots=True)
class Names:
    """How an API spells the fields of a request, for errors.

    names = Names("ollama", "options.", {"max_tokens": "options.num_predict", "tools.*": "tools[{}].function"})
    names("sampling", "top_p"), names("tools", 3, "name")  # options.top_p, tools[3].function.name
    """

    api: str = "openai"
    """Which spellings of `PARAMETERS` apply."""
    before_sampling: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields with another name. In a path `*` stands for any index, which goes into the braces. Others keep their name."""

    def __call__(self, *path: str | int) -> str:
        """Return the client's name of a field. The longest beginning of its path that has a spelling of its own counts."""
        if path[0] == "sampling":
            return self.before_sampling + PARAMETERS[str(path[1])].spellings[self.api].name
        for end in range(len(path), 0, -1):
            exact = ".".join(map(str, path[:end]))
            general = ".".join("*" if isinstance(part, int) else part for part in path[:end])
            if (own := self.fields.get(exact, self.fields.get(general))) is not None:
                return joined(path[end:], own.format(*[part for part in path[:end] if isinstance(part, int)]))
        return joined(path)


def joined(place: Sequence[str | int], beginning: str = "") -> str:
    """Return `messages[0].role` for `("messages", 0, "role")`."""
    for part in place:
        beginning += f"[{part}]" if isinstance(part, int) else f".{part}" if beginning else part
    return beginning


# Prompts. `param` says where a prompt stands in the client's body.


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    param: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """Texts and token ids, one after the other."""

    parts: tuple[str | int, ...]
    param: str


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The texts around a hole in a file, for a model that fills in the middle."""

    first: str
    last: str
    files: tuple[tuple[str, str], ...]
    """Names and texts of other files. The first ones are left out if the context has no room for them."""
    param: str


Prompt = TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that the model's chat template turns into one prompt."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template: plain JSON data."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the template shows, in Hugging Face's form. Filled by `check.make_call`."""
    param: str = "messages"


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    grammar: Grammar
    param: str
    """Where the grammar stands in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function that an answer can call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments. None: no arguments."""
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer calls. Readers check that the names are those of tools."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: frozenset[str] | None = None
    """None: all tools."""
    is_parallel: bool = True
    """Several calls are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """The `n` choices are the hypotheses of a search with as many beams, best first."""

    length_penalty: float = 1.0
    early_stopping: bool | str = False
    """As in `types.sampling.EarlyStopping`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The form of the answers that the client sees."""

    is_streamed: bool = False
    includes_usage: bool = False
    """A stream ends with an event of token counts."""
    has_continuous_usage: bool = False
    has_timings: bool = False
    """llama.cpp's `timings`, in every event of a stream."""
    has_progress: bool = False
    """llama.cpp's `prompt_progress`, in the first event of a stream that has a part of the answer."""
    has_token_ids: bool = False
    has_reasoning: bool = True
    include_stop_str_in_output: bool = False
    """The stop string or stop token that ended a choice is part of its text."""
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives to show beside each sampled token. None: no log-probabilities."""
    prompt_logprobs: int | None = None
    echo: bool = False
    """Each answer begins with its prompt."""
    scores_echo: bool = False
    """With `logprobs` the tokens of an echoed prompt have log-probabilities, too."""

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def echo_logprobs(self) -> int | None:
        """Alternatives to each token of an echoed prompt, or None."""
        return self.logprobs if self.scores_echo else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Shown):
    """The fields of chats and completions. Readers have checked types and bounds; `check` knows the other rules."""

    names: Names = Names()
    model: str | None = None
    """As the client calls the model or the adapter. None: the default model."""
    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = None
    """0: compute the prompt and generate nothing. None: what the model's files name, or the rest of the context."""
    ends_with_context: bool = True
    """An answer may end before `max_tokens` because the context is full. Otherwise such a request is refused."""
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of a prompt. -1: as many as fit; None: all."""
    adds_special_tokens: bool = True
    suffix: str = ""
    """The text after the completion, for a model that fills in the middle."""

    # Which tokens can come
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The given values of `PARAMETERS`, by name."""
    beams: BeamSearch | None = None
    logit_bias: Mapping[str, Any] = field(default_factory=dict)
    """By token ids as text."""
    allowed_token_ids: Sequence[int] | None = None
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    bad_words: Sequence[str] = ()
    grammar: AskedGrammar | None = None

    # Where an answer ends
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    lines: LineLimits | None = None

    # Terms
    answer_prefix: str = ""
    """The answer's id is this and the request's id."""
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
    """Holds if `max_tokens` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    conversation: Conversation
    adds_special_tokens: bool = False
    """The template has written them already."""
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    """Tokens of the reasoning block, after which its end is forced. None: no limit."""


# The call


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The key and the tenant of a request. A client with the same two can see the request and cancel it."""

    key: str = ""
    """Short name of the API key; empty if the server asks for none."""
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Id, owner and urgency of one call."""

    request_id: str
    owner: Owner = Owner()
    arrival_ns: int
    deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    """None: the server's."""
    slo_itl_ns: int | None = None
    is_retry: bool = False
    """The client says that it sends this again."""
    priority: int = 0
    cache_salt: bytes = b""
    model_wait_ns: int = 0
    """Time after the arrival in which the call waited for its model to be loaded."""
    limits: TenantLimits | None = None
    """The tenant's own."""
    conversation: bytes = b""
    """Identifies the conversation for the prefix cache, as `Request.conversation`. Empty if the client names none."""

    @property
    def time_limits(self) -> list[tuple[int, RejectReason]]:
        """The instants in ns after which the call is given up, and why."""
        limits = [
            (self.deadline_ns, RejectReason.DEADLINE),
            (self.queue_deadline_ns, RejectReason.QUEUE_TIMEOUT),
            (self.first_token_deadline_ns, RejectReason.FIRST_TOKEN_TIMEOUT),
        ]
        return [(at_ns, reason) for at_ns, reason in limits if at_ns is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(Shown):
    """How the answer is written. Lives as long as the answer, so it holds no prompt."""

    answer_id: str
    model_name: str
    created_unix_s: int
    system_fingerprint: str
    """The model's."""
    adapter: AdapterRef | None = None
    """The adapter's content is part of the answer's fingerprint, and known once there is an answer."""
    is_empty: bool = False
    """`max_tokens` is 0. The engine still makes one token, which is not shown."""
    end_token_ids: frozenset[int]
    """The model's own end tokens: `stop_reason` names only what the client asked for (as in vLLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that was checked against the model that answers it. Made by `check.make_call`."""

    running: RunningModel
    adapter: AdapterRef | None = None
    terms: Terms
    request: ChatRequest | CompletionRequest
    prompts: Conversation | tuple[Prompt, ...]
    sampling: SamplingParams
    """All that the answers have in common: without `max_tokens`, `seed` and the bans that need a tokenizer."""
    grammar: AskedGrammar | None
    """The grammar of the answer, or of its tool calls."""
    tools: frozenset[str] | None = None
    """Tools that can be called after any text. Empty: the grammar of calls holds from the first token on. None: no calls."""
    max_reasoning_tokens: int | None = None
    """With this or a grammar `sampling.follows_grammar`."""
    max_tokens: int | None
    """None: what the model's files name, or the rest of the context."""
    answer: AnswerOptions
    num_bytes: int = 0
    """Size of the body."""
    claim: bytes = b""
    """A hash by which the door recognises the call when it is sent again."""
