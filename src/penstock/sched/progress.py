"""How far each request has been computed: the only code that writes a request's progress (fields: `types/request.py`).

    WAITING --admit--> RUNNING --preempt--> PREEMPTED --admit--> RUNNING --end--> FINISHED

Loops over all rows of a step make no call per row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.types.events import TokenEvent
from penstock.types.plan import RowPlan
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.result import StepResult, TokenLogprobs
from penstock.types.stats import StepCounts

# one request


def limit(request: Request, max_total_tokens: int) -> None:
    request.max_total_tokens = max_total_tokens


def admit(request: Request, num_hit_tokens: int, now_ns: int, members: Iterable[Request]) -> bool:
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = num_hit_tokens
    if request.first_scheduled_ns is not None:
        return False
    for member in members:
        if member.first_scheduled_ns is None:
            member.first_scheduled_ns, member.num_cached_tokens = now_ns, num_hit_tokens
    return True


def plan(request: Request, query_len: int) -> None:
    request.num_inflight_tokens = query_len


def score(request: Request, row: RowPlan, entries: Sequence[TokenLogprobs]) -> None:
    """Add the log-probabilities of prompt tokens that a row computed. They survive a preemption. Raises ValueError for a wrong
    number of them."""
    num_expected = len(request.positions_to_score(row.context_len, row.query_len))
    if len(entries) != num_expected:
        raise ValueError(f"{request.request_id!r} got log-probabilities of {len(entries)} prompt tokens, not of {num_expected}")
    request.prompt_logprobs += entries


def preempt(request: Request) -> None:
    request.status = RequestStatus.PREEMPTED
    request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
    request.num_computed_tokens = request.num_inflight_tokens = 0
    request.forced_from = 0  # its tokens are recomputed as a prefill
    request.num_preemptions += 1


def follow(
    request: Request,
    token_ids: Sequence[int],
    first_scheduled_ns: int | None,
    first_token_ns: int | None,
    num_cached_tokens: int,
) -> None:
    """Note how far a request has come in another process."""
    request.status = RequestStatus.RUNNING
    request.output_token_ids += token_ids
    request.num_tokens += len(token_ids)
    request.first_scheduled_ns = request.first_scheduled_ns or first_scheduled_ns
    if first_token_ns is not None and request.first_token_ns is None:
        request.first_token_ns, request.num_cached_tokens = first_token_ns, num_cached_tokens


def end(request: Request, reason: FinishReason, stop_reason: int | str | None = None, num_cut: int = 0) -> None:
    """End a request, without the last `num_cut` tokens of its output."""
    if num_cut:
        replace_output(request, request.output_token_ids[:-num_cut])
    request.status = RequestStatus.FINISHED
    request.num_inflight_tokens = 0
    request.finish_reason = reason
    request.stop_reason = stop_reason
    request.call = ()  # breaks a reference cycle


# the beams of a search


def fork(child: Request, num_tokens: int) -> None:
    child.status = RequestStatus.RUNNING
    child.num_computed_tokens = num_tokens


def fold(request: Request) -> None:
    """Set a beam's request back to waiting, without KV: its search has fewer beams than requests."""
    request.status, request.num_computed_tokens = RequestStatus.WAITING, 0


def note_first_token(request: Request, now_ns: int) -> None:
    request.first_token_ns = now_ns


def replace_output(request: Request, token_ids: Sequence[int]) -> None:
    request.output_token_ids = list(token_ids)
    request.num_tokens = request.num_prompt_tokens + len(token_ids)


# all requests of a step


def plan_decodes(
    requests: Iterable[Request], num_slots: Mapping[str, int], rows: list[RowPlan], extend: Callable[[Request], None]
) -> tuple[list[Request], int]:
    """Plan a row for each decode. Return the requests with more than one token to compute, and the number of rows added here.

    `num_slots`: positions that each request may write without a new block. `extend` plans the decodes that need one.
    """
    prefills: list[Request] = []
    add_row, num_rows = rows.append, 0
    for request in requests:
        request_id, context_len = request.request_id, request.num_computed_tokens
        if request.num_tokens - context_len > 1:
            prefills.append(request)
        elif context_len < num_slots.get(request_id, 0):  # its last block has room
            add_row(RowPlan(request_id, context_len, 1, (), 1))
            request.num_inflight_tokens = 1
            num_rows += 1
        else:
            extend(request)
    return prefills, num_rows


@dataclass(slots=True)
class StepOutcome:
    counts: StepCounts
    void: Collection[str]
    events: list[TokenEvent] = field(default_factory=list)
    """One per row that sampled, in the order of the plan; then one per request that failed or ended its search."""
    ended: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Advance:
    request: Request
    row: RowPlan
    reason: FinishReason | None = None
    stop_reason: int | None = None
    is_apart: bool = False
    """Its token is not the executor's sample: the row failed, or belongs to a beam search."""


def advance(
    running: Mapping[str, Request],
    rows: Iterable[RowPlan],
    result: StepResult,
    now_ns: int,
    outcome: StepOutcome,
    *,
    block_size: int,
    is_last: bool,
    apart: Collection[str],
) -> list[Advance]:
    """Count the tokens of a computed step, append those that were sampled, and report them to `outcome`.

    `is_last`: no other step is in flight. `apart`: ids of requests whose sample the caller handles (beams, failed rows).

    Returns, in order, the rows of prefills, rows that filled a block, rows whose requests end, and rows of `apart` that sample.
    Raises KeyError or ValueError if a sampling row lacks its token or states.
    """
    tokens, logprobs, states = result.token_ids, result.logprobs, result.states
    advances: list[Advance] = []
    num_accepted = 0
    add_event, add_advance = outcome.events.append, advances.append
    for row in rows:
        request_id, query_len = row.request_id, row.query_len
        request = running.get(request_id)
        if request is None:  # padding
            continue
        num_computed = request.num_computed_tokens = row.context_len + query_len
        if is_last:  # cheaper than a subtraction, and the usual case
            request.num_inflight_tokens = 0
        else:
            request.num_inflight_tokens -= query_len
        reason, stop_reason = None, None
        if row.samples:
            if apart and request_id in apart:
                add_advance(Advance(request, row, is_apart=True))
                continue
            if states:
                event = TokenEvent(request_id, (), now_ns, finish_reason=FinishReason.STOP, states=states[request_id])
                add_event(event)
                request.first_token_ns = now_ns
                add_advance(Advance(request, row, FinishReason.STOP))
                continue
            token_ids = tokens[request_id]
            entries = logprobs.get(request_id, ()) if logprobs else ()
            if row.samples > 1:
                token_ids, reason, stop_reason = append(request, token_ids)
                request.num_computed_tokens = request.num_tokens - 1
                entries = entries[: len(token_ids)]
                num_accepted += len(token_ids) - 1
                outcome.counts.guesses[request_id] = row.samples - 1, len(token_ids) - 1
            else:
                (token_id,) = token_ids
                request.output_token_ids.append(token_id)
                num_tokens = request.num_tokens = num_computed + 1
                if token_id in request.sampling.stop_token_ids or num_tokens >= request.max_total_tokens:
                    reason, stop_reason = _why_ended(request, token_id)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            add_event(TokenEvent(request_id, token_ids, now_ns, entries, reason, stop_reason, request.num_cached_tokens))
            if query_len == 1 and reason is None and num_computed % block_size:  # the usual case
                continue
        add_advance(Advance(request, row, reason, stop_reason))
    outcome.counts.num_sampled_tokens = 0 if states else len(outcome.events) + num_accepted
    return advances


def force(request: Request, token_ids: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Append tokens that a grammar forces, which have no KV yet. Returns what `append` does."""
    request.forced_from = request.num_tokens
    return append(request, token_ids)


def append(request: Request, token_ids: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Append tokens until one ends the request. Return (tokens kept, finish reason or None, stop token or None)."""
    num_kept, reason, stop_reason = 0, None, None
    while reason is None and num_kept < len(token_ids):
        request.output_token_ids.append(token_ids[num_kept])
        request.num_tokens += 1
        reason, stop_reason = _why_ended(request, token_ids[num_kept])
        num_kept += 1
    return tuple(token_ids[:num_kept]), reason, stop_reason


def _why_ended(request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
    sampling = request.sampling
    if token_id in sampling.stop_token_ids and (
        len(request.output_token_ids) > sampling.min_tokens or sampling.follows_grammar  # the grammar allowed no other token
    ):
        return FinishReason.STOP, token_id
    return (FinishReason.LENGTH if request.num_tokens >= request.max_total_tokens else None), None


# planning ahead


def assume(requests: Iterable[Request]) -> tuple[list[tuple[Request, int]], list[Request]]:
    """Count tokens in flight as computed and their samples as present, until `unassume`.

    Returns pairs (request, its tokens in flight), and the requests that reach their limits.
    """
    assumed: list[tuple[Request, int]] = []
    ending: list[Request] = []
    for request in requests:
        num_inflight = request.num_inflight_tokens
        if num_inflight:
            assumed.append((request, num_inflight))
            num_computed = request.num_computed_tokens = request.num_computed_tokens + num_inflight
            request.num_inflight_tokens = 0
            if num_computed == request.num_tokens:  # it samples
                if num_computed + 1 >= request.max_total_tokens:
                    ending.append(request)
                else:
                    request.num_tokens = num_computed + 1
                    request.num_pending_samples = 1
    return assumed, ending


def unassume(assumed: Iterable[tuple[Request, int]]) -> None:
    for request, num_inflight in assumed:
        request.num_computed_tokens -= num_inflight
        request.num_inflight_tokens += num_inflight
        request.num_tokens -= request.num_pending_samples
        request.num_pending_samples = 0
