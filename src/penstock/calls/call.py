"""A `Call`: one client's question, checked. Made by a reader from what the client sent, answered by `run`, told by a writer.

Knows neither JSON nor HTTP. An API with other shapes needs a reader and a writer of its own, and the same `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.admission.checks import TenantLimits
from penstock.deploy.running import RunningModel
from penstock.text.dialects import Message
from penstock.text.grammar import Grammar
from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason
from penstock.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The key and the tenant that a request came with. A client with the same two may see the request and cancel it."""

    key: str
    """Short name of the API key; empty if none was asked for."""
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Id, owner and urgency of one call."""

    request_id: str
    owner: Owner
    arrival_ns: int
    deadline_ns: int | None
    queue_deadline_ns: int | None
    first_token_deadline_ns: int | None
    slo_ttft_ns: int | None
    """As the client says; None: the server's."""
    slo_itl_ns: int | None
    is_retry: bool
    """The client says that it sends this again."""
    priority: int
    cache_salt: bytes
    model_wait_ns: int
    """The time after the arrival in which it waited for its model to be loaded."""
    limits: TenantLimits | None = None
    """The tenant's own."""
    conversation: bytes = b""
    """Identifies the conversation for the prefix cache, as `Request.conversation`. Empty if the client names none."""

    @property
    def time_limits(self) -> list[tuple[int, RejectReason]]:
        """The instants in ns at which the call is given up if it has not come far enough, and why: those that are set."""
        limits = [
            (self.deadline_ns, RejectReason.DEADLINE),
            (self.queue_deadline_ns, RejectReason.QUEUE_TIMEOUT),
            (self.first_token_deadline_ns, RejectReason.FIRST_TOKEN_TIMEOUT),
        ]
        return [(at_ns, reason) for at_ns, reason in limits if at_ns is not None]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    param: str
    """Where it stands in the body."""


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
    """Names and texts of other files. The first ones are left out where the context has no room for them."""
    param: str


Prompt = TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that the model's chat template turns into one prompt."""

    messages: Sequence[Message]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    """Further variables of the template: plain JSON data."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model is told of, as Hugging Face gives them to templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The answer may call tools. Which, and how, `Call.grammar` says."""

    is_free: bool
    """Any text may come before a call; else the grammar says what the answer is from its first token on."""
    names: frozenset[str] = frozenset()
    """Tools that an answer which is free may call."""


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    grammar: Grammar
    param: str
    """Where it stands in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer looks, apart from what is in it."""

    answer_id: str
    model_name: str
    created_unix_s: int
    system_fingerprint: str
    """The model's."""
    adapter: AdapterRef | None = None
    """Its content is a part of the answer's fingerprint, and known when there is an answer."""
    is_streamed: bool
    includes_usage: bool
    """A stream ends with an event of token counts."""
    has_continuous_usage: bool
    has_timings: bool = False
    """llama.cpp's `timings`, in every event of a stream."""
    has_progress: bool = False
    """llama.cpp's `prompt_progress`, in the first event of a stream that has something of the answer."""
    has_logprobs: bool
    num_prompt_logprobs: int | None = None
    """vLLM's `prompt_logprobs`: so many alternatives to each token of the prompt; None: it is not told of."""
    num_echo_logprobs: int | None = None
    """The same of a prompt that is echoed with `logprobs`."""
    is_empty: bool = False
    """`max_tokens` is 0. The engine makes one token all the same, of which nothing is told."""
    has_token_ids: bool
    has_prompt: bool
    """Each answer begins with its prompt (`echo`)."""
    skips_special_tokens: bool
    shows_stop: bool
    """The stop string or stop token that ended a choice is part of its text."""
    end_token_ids: frozenset[int]
    """The model's own end tokens: `stop_reason` names only what the client asked for (as in vLLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    running: RunningModel
    """The model that answers."""
    adapter: AdapterRef | None = None
    """The adapter that it answers with."""
    terms: Terms
    prompts: Conversation | tuple[Prompt, ...]
    adds_special_tokens: bool
    suffix: str = ""
    """The text behind the completion, which fills in the middle then."""
    truncate_prompt_tokens: int | None
    """Keep the last so many tokens of a prompt; -1: as many as fit; None: all."""
    num_choices: int
    """Answers to each prompt."""
    sampling: SamplingParams
    """Parameters that all answers have in common: without `max_tokens` and `seed`, and of `banned_token_sequences` those that
    need no tokenizer."""
    bad_words: tuple[str, ...]
    grammar: AskedGrammar | None
    """The grammar that the answer follows, or its calls of tools do."""
    tools: ToolUse | None = None
    """None: it calls none."""
    max_reasoning_tokens: int | None = None
    """Tokens of the reasoning block, after which its end is forced. With this or a grammar `sampling.follows_grammar`."""
    has_reasoning: bool = True
    """The answer shows what the model reasoned."""
    seed: int | None
    max_tokens: int | None
    """None: what the model's files name, or the context leaves."""
    max_tokens_param: str | None
    """The field to name in an error if the prompt leaves less room; None if the limit is the API's default."""
    ends_with_context: bool = False
    """An answer may have fewer tokens than `max_tokens` because the context is full. Otherwise such a call is refused."""
    answer: AnswerOptions
    num_bytes: int
    """Size of the body."""
    claim: bytes
    """A hash by which the door knows the call when it is sent again."""
