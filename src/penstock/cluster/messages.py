"""The messages between the front and its replicas, as MessagePack. Times are those of the sender's clock.

Clocks of two machines differ, so each message with times carries its send time. The receiver shifts its times by its own
clock minus that send time. They are then late by the transit time, which the client waits, too.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from penstock.cluster.recipes import Recipe
from penstock.deploy.running import ModelInfo
from penstock.engine.ports import OutputChunk
from penstock.kv.changes import Changes
from penstock.obs.explain.explanation import Explanation
from penstock.types.request import Request, WaitTimes
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineLoad, RequestStats, StepStats

FORMAT = 6
"""Version of these messages."""
NONCE_BYTES = 32
FRONT, REPLICA = b"front", b"replica"


class Work(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A request for a replica: a new one, or one that continues after the tokens generated at an earlier replica."""

    request_id: str
    sampling: SamplingParams
    times: dict[str, Any]
    """Time fields of `Request`, except those that are None."""
    fields: dict[str, Any]
    """Other fields of `Request`, except zero and empty ones."""
    waits: WaitTimes
    cache_salt: bytes
    conversation: bytes
    generated: tuple[int, ...]
    recipe: Recipe | None
    """How to make the matcher, if a grammar or a reasoning limit constrains the answer."""
    adapter: bytes
    """Hash of the adapter's files; empty without an adapter."""
    adapter_path: str


class Source(msgspec.Struct, array_like=True, frozen=True):
    """Another replica that has the KV of a prompt's first tokens, and the address at which it serves blocks."""

    host: str
    port: int
    num_tokens: int
    has_request: bool = False
    """The source computed the prompt of this same request, which moves here after its first token."""


class Fetch(msgspec.Struct, array_like=True, frozen=True):
    """A transfer of KV from another replica."""

    num_tokens: int
    duration_ns: int


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compute these requests: choices of one prompt, which begin in the same step."""

    sent_ns: int
    prompt_token_ids: tuple[int, ...]
    works: list[Work]
    source: Source | None


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_id: str
    detail: str


class Explain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Ask for the explanations of these requests. The answer carries the same `number`."""

    number: int
    request_ids: list[str]


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The front's heartbeat."""


class Greeting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The front's first message. The replica answers with its `Hello`, and the front with its `Welcome`."""

    format: int
    nonce: bytes


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A replica's first message. Its model is loaded by then."""

    proof: bytes
    """Result of `prove`, which shows that the sender knows the secret. So does the one in `Welcome`."""
    nonce: bytes
    name: str
    model: ModelInfo
    blocks_port: int
    """Port for KV blocks, at the address from which the replica dials. 0: it serves no blocks."""


class Welcome(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The front accepts the replica, and proves that it knows the secret."""

    proof: bytes


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All news of a replica since its last report. The first report, after `Welcome`, lists all cached blocks."""

    sent_ns: int
    is_ready: bool
    """Its engine takes requests."""
    load: EngineLoad
    changes: Changes
    steps: list[StepStats]
    ended: list[RequestStats]
    chunks: list[OutputChunk]
    scores: dict[str, list[TokenLogprobs]]
    """Request id -> the log-probabilities of its prompt, with the first chunk of requests that ask for them."""
    num_copied_tokens: int
    """Total tokens whose KV was copied from other replicas."""


class Explained(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int
    sent_ns: int
    explanations: list[Explanation]
    fetches: dict[str, Fetch]
    """Request id -> the transfer that it waited for."""


ToReplica = Greeting | Welcome | Submit | Abort | Explain | Beat
ToFront = Hello | Report | Explained

encode = msgspec.msgpack.Encoder().encode
decode_to_replica = msgspec.msgpack.Decoder(ToReplica).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode

_TIMES = ("arrival_ns", "deadline_ns", "queue_deadline_ns", "first_token_deadline_ns", "first_scheduled_ns", "first_token_ns")
_FIELDS = ("parent_id", "priority", "background", "slo_itl_ns", "tenant", "second_at", "num_cached_tokens")


def prove(secret: bytes, sender: bytes, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 of the receiver's nonce. It covers `sender`, so neither end can send back the other's proof."""
    return hmac.digest(secret, sender + nonce, "sha256")


def work_of(request: Request, adapter_path: str) -> Work:
    """Convert a request, with its tokens so far, for a replica. `adapter_path`: the adapter's path, or empty."""
    return Work(
        request_id=request.request_id,
        sampling=request.sampling,
        times={name: at_ns for name in _TIMES if (at_ns := getattr(request, name)) is not None},
        fields={name: value for name in _FIELDS if (value := getattr(request, name))},
        waits=request.waits,
        cache_salt=request.cache_salt,
        conversation=request.conversation,
        generated=tuple(request.output_token_ids),
        recipe=request.matcher if isinstance(request.matcher, Recipe) else None,
        adapter=b"" if request.adapter is None else request.adapter.fingerprint,
        adapter_path=adapter_path,
    )


def request_of(work: Work, prompt_token_ids: tuple[int, ...], shift_ns: int) -> Request:
    """Convert `work` back to a request, without a matcher. `shift_ns`: this clock minus the sender's."""
    request = Request(
        request_id=work.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=work.sampling,
        waits=work.waits,
        cache_salt=work.cache_salt,
        conversation=work.conversation,
        output_token_ids=list(work.generated),
        **{name: at_ns + shift_ns for name, at_ns in work.times.items()},
        **work.fields,
    )
    if request.first_token_ns is not None:  # the answer has begun, so both deadlines were met
        request.queue_deadline_ns = request.first_token_deadline_ns = None
    return request
