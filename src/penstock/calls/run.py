"""Turns a `Call` into running requests: admission, then the chat template, the tokenizer and the grammar.

Costly work runs off the event loop. An endpoint cancels `run` when its client disconnects.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.admission.ask import Ask, Conditions
from penstock.admission.door import Entering
from penstock.calls.call import (
    Call,
    ChatRequest,
    Conversation,
    InfillPrompt,
    MixedPrompt,
    Prompt,
    Terms,
    TextPrompt,
    TokenPrompt,
)
from penstock.calls.in_flight import Arrival, InFlight, RunningCall
from penstock.calls.prompts import Tokenised, asked_tokens, each_scores, render, tokenise
from penstock.deploy.running import RunningModel
from penstock.obs.explain.explanation import GRAMMAR
from penstock.text.answers import AnswerForm, without_start
from penstock.text.dialects import Dialect
from penstock.text.grammar import ANSWERS_PER_COMPILATION, Grammar, GrammarKind, Lead, num_at_once
from penstock.text.parameters import Types, match_literal
from penstock.types.errors import Rejected, RejectReason, wrong
from penstock.types.request import Owner, Request, WaitTimes
from penstock.types.sampling import Matcher

if TYPE_CHECKING:
    from penstock.text.answer_matcher import AnswerPlan

_Result = TypeVar("_Result")

_MAX_INLINE_GRAMMAR_CHARS = 1 << 15
"""Most characters of compiled grammars, summed over choices, to copy on the event loop: 0.1 ms."""
MAX_BEGUN_CHARS = 1 << 18
"""After a longer message the answer begins anew. Reading so much takes up to 2 s, and up to one lexer state per character. All
answers of a compiled grammar share at most 500,000 states."""
_MAX_COMPILATIONS = 4
"""Attempts to share a compiled grammar, since other calls may use it up or evict it."""
_CONDITIONS = tuple(one.name for one in dataclasses.fields(Conditions))


def seed_of(call: Call) -> int:
    """Return the client's seed, or a new random one."""
    seed = call.request.sampling.get("seed")
    return call.running.sources.draw_seed() if seed is None else int(seed)


async def run(call: Call, in_flight: InFlight) -> RunningCall:
    """Admit a call, prepare it and submit its requests to the engine. The caller must close the result.

    Raises `Rejected` from admission, for a prompt that does not fit, and from the template, the tokenizer and the grammar.
    """
    running = call.running
    # Before any wait, so that `--seed` gives calls seeds in the order of their arrival.
    seed = seed_of(call)
    with at_the_door(running, _ask(call)) as entering, in_flight.arriving(Arrival.of(call)) as arrival:
        tokenised, form = await in_time(_tokenised(call), "prompt was not read", running, call.terms)
        matchers, grammar_wait_ns = None, 0
        if call.sampling.follows_grammar:
            num_requests = len(tokenised.prompts) * call.request.n
            grammar, plan = _planned(call, form)
            arrival.since_ns = asked_ns = running.clock.now_ns()
            arrival.waits_for = GRAMMAR
            try:
                matchers = await _matchers(grammar, plan, num_requests, max(tokenised.max_tokens), running, call.terms)
                if plan is not None and plan.begun:
                    beginning = _begin(matchers, plan, running, call.terms.lane)
                    matchers = await in_time(beginning, "message was not read", running, call.terms)
            finally:
                grammar_wait_ns = running.clock.now_ns() - asked_ns
                running.metrics.count_grammar_wait(grammar_wait_ns)
        salt = call.terms.cache_salt
        if in_flight.isolates_tenants(running):
            salt = call.terms.owner.tenant.encode() + b"\0" + salt  # no tenant's name contains a zero byte
        engine_id = in_flight.new_engine_id(call.terms.request_id)
        waits = call.terms.waits._replace(grammar=grammar_wait_ns)
        requests = make_requests(call, tokenised, engine_id, seed, matchers, form, salt=salt, waits=waits)
        return in_flight.open(call, requests, tokenised.echoes, form, entering)


@contextmanager
def at_the_door(running: RunningModel, ask: Ask) -> Iterator[Entering]:
    """Ask admission for places in the queue, kept until the block ends. Raises `Rejected`, or `ModelAway` if unloaded.

    Counts the call as rejected if the block raises `Rejected`, too.
    """
    engine, admission = running.engine, running.admission
    entering: Entering | None = None
    with running.using(is_background=ask.background):
        try:
            entering = admission.decide(ask, engine.load(), running.clock.now_ns(), refuses_with=engine.state.refuses_with)
            yield entering
        except Rejected as rejected:
            if entering is None or rejected.reason is not RejectReason.QUEUE_FULL:  # `OffLoop` counts its own
                running.metrics.count_rejected(rejected.reason, ask.key)
            raise
        finally:
            if entering is not None:
                admission.end_entering(entering)


def ask_of(terms: Terms, claim: bytes) -> Ask:
    """Return what admission must know of a call with these terms, except its size."""
    conditions = {name: getattr(terms, name) for name in _CONDITIONS}
    return Ask(tenant=terms.owner.tenant, key=terms.owner.key, claim=claim, **conditions)


def _ask(call: Call) -> Ask:
    """Return what admission must know of a call that is not tokenised yet, so its size is in characters."""
    terms, sampling, prompts = call.terms, call.sampling, call.prompts
    keep, max_model_len = call.request.truncate_prompt_tokens, call.running.model.capacity.max_model_len
    if isinstance(prompts, Conversation):
        num_prompts, num_token_ids = 1, 0
        num_chars = sum([message.num_chars for message in prompts.messages]) + sum([len(str(tool)) for tool in prompts.tools])
    else:
        num_prompts = len(prompts)
        sizes = [_size(prompt) for prompt in prompts]
        num_chars = sum([size for size, _ in sizes]) + len(call.request.suffix) * num_prompts
        num_token_ids = sum([size for _, size in sizes])
    max_tokens = asked_tokens(call)
    # An answer that nothing can stop reaches its limit.
    is_endless = not (sampling.stop_token_ids or sampling.stop or sampling.follows_grammar)
    return dataclasses.replace(
        ask_of(terms, call.claim),
        num_requests=num_prompts * call.request.n,
        num_chars=num_chars,
        num_token_ids=num_token_ids,
        max_prompt_tokens=None if keep is None else num_prompts * (keep if keep > 0 else max_model_len),
        leaves_out_files=isinstance(prompts, Sequence) and isinstance(prompts[0], InfillPrompt) and bool(prompts[0].files),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens if is_endless and max_tokens is not None else max(1, sampling.min_tokens),
        adapter=call.adapter,
    )


def _size(prompt: Prompt) -> tuple[int, int]:
    match prompt:
        case TextPrompt(text):
            return len(text), 0
        case TokenPrompt(token_ids):
            return 0, len(token_ids)
        case MixedPrompt(parts):
            return sum([len(part) for part in parts if isinstance(part, str)]), sum([isinstance(part, int) for part in parts])
        case InfillPrompt(first, last, files):
            return len(first) + len(last) + sum([len(name) + len(text) for name, text in files]), 0


async def _tokenised(call: Call) -> tuple[Tokenised, AnswerForm | None]:
    """Return the tokens of a call, and the format of its answers (None for plain text)."""
    running, prompts, size, form = call.running, call.prompts, call.num_bytes, None
    if isinstance(prompts, Conversation):
        prompt = await render(prompts, running, call.terms.lane, call.num_bytes)
        form = _form(call, prompts, prompt.text)
        prompts, size = (prompt,), len(prompt.text) + sum([len(word) for word in call.request.bad_words])
    return await running.off_loop.run(size, partial(tokenise, call, prompts), call.terms.lane), form


def _form(call: Call, conversation: Conversation, prompt: str) -> AnswerForm | None:
    """Return the format of answers to a chat, or None for plain text. The prompt may already open or close their reasoning."""
    dialect = call.running.dialect
    tools = None if call.tools is None else dialect.tools
    reasoning, is_reasoning, thought = dialect.reasoning, False, ""
    if reasoning is not None:
        if conversation.continue_final_message:
            _, opened, thought = conversation.messages[-1].content.rpartition(reasoning.open)
            is_reasoning = bool(opened) and reasoning.close not in thought
            has_ended = not is_reasoning
        else:
            end = prompt.rstrip()
            is_reasoning, has_ended = end.endswith(reasoning.open), end.endswith(reasoning.close) and not reasoning.lead
        if has_ended:
            reasoning = None
    if not (tools or reasoning):
        return None
    types: Mapping[str, Types] = {}
    if tools is not None and tools.ways[0].parameter is not None and call.grammar is not None:
        from penstock.text.tool_grammar import types_in

        types = types_in(call.grammar.source)
    return AnswerForm(
        tools=tools,
        tool_names=call.tools or frozenset(),
        is_free=isinstance(call.request, ChatRequest) and call.request.calls_are_free,
        types=types,
        reasoning=reasoning,
        is_reasoning=is_reasoning,
        is_continued=is_reasoning and bool(thought.strip()),
        has_exact_start=call.grammar is not None and call.grammar.has_exact_start,
    )


def _planned(call: Call, form: AnswerForm | None) -> tuple[Grammar | None, AnswerPlan | None]:
    """Return the grammar of the answers, and the plan of the text that precedes it. At least one is not None."""
    from penstock.text.answer_matcher import AnswerPlan

    grammar, reasoning = call.grammar, None if form is None else form.reasoning
    trigger_of = form.tools if form is not None and form.is_free else None
    if grammar is not None and reasoning is None and trigger_of is None:
        conversation = call.prompts if isinstance(call.prompts, Conversation) else None
        return grammar, plan_of_begun(conversation, grammar, call.running.dialect)
    if grammar is not None and reasoning is not None and trigger_of is None:
        grammar = dataclasses.replace(grammar, lead=Lead(reasoning.open, reasoning.close, reasoning.lead, reasoning.separator))
    plan = AnswerPlan(
        reasoning=reasoning,
        is_reasoning=form is not None and form.is_reasoning,
        max_reasoning_tokens=call.max_reasoning_tokens,
        trigger_of=trigger_of,
        tool_names=call.tools or frozenset(),
    )
    return grammar, plan


def plan_of_begun(conversation: Conversation | None, grammar: Grammar, dialect: Dialect) -> AnswerPlan | None:
    """Return the plan of an answer that a chat's last message begins, or None.

    An answer that may be a call begins anew, because the rest of a call could not be read as one.
    """
    from penstock.text.answer_matcher import AnswerPlan

    if conversation is None or not conversation.continue_final_message:
        return None
    begun, reasoning, way = conversation.messages[-1].content, dialect.reasoning, dialect.tools.ways[0]
    if reasoning is not None and begun.lstrip().startswith(reasoning.open):
        begun = begun.partition(reasoning.close)[2]
        begun = without_start(begun, reasoning.separator)[0] if grammar.has_exact_start else begun.lstrip()
    may_be_call = grammar.kind is GrammarKind.TOOLS and (
        grammar.other is None or way.has_no_mark or match_literal(begun, way.trigger) != -1
    )
    return AnswerPlan(begun=begun) if 0 < len(begun) <= MAX_BEGUN_CHARS and not may_be_call else None


async def _begin(matchers: Sequence[Matcher], plan: AnswerPlan, running: RunningModel, lane: Owner) -> list[Matcher]:
    from penstock.text.answer_matcher import READ_COST, AnswerMatcher, begin_all

    cost = READ_COST if isinstance(matchers[0], AnswerMatcher) else 0  # a front's recipes are read by replicas
    return await running.off_loop.run(cost * len(plan.begun), lambda: begin_all(matchers), lane)


async def _matchers(
    grammar: Grammar | None, plan: AnswerPlan | None, number: int, max_tokens: int, running: RunningModel, terms: Terms
) -> list[Matcher]:
    """Return a matcher for each of `number` choices of up to `max_tokens`, compiling the grammar if needed.

    Raises `Rejected`: INVALID for a wrong grammar, QUEUE_FULL if the tenant compiles too many, or a time limit.
    """
    if grammar is None:
        assert plan is not None, "a matcher needs a grammar or a plan"
        return [running.grammars.free_matcher(plan) for _ in range(number)]
    try:
        grammar.check_lengths(max_tokens)
        is_small = number * len(grammar.source) <= _MAX_INLINE_GRAMMAR_CHARS
        if is_small and (matchers := running.grammars.known(grammar, plan, number)):
            return matchers
        compiling = _matchers_compiled(number, grammar, plan, running, terms.lane)
        return await in_time(compiling, "grammar was not compiled", running, terms)
    except Rejected as rejected:
        if rejected.reason is not RejectReason.INVALID:
            raise
        subject = f"'{grammar.param}'" if grammar.other is None else f"'{grammar.param}' beside 'tools'"
        raise wrong(f"{subject} is refused. {rejected.detail}", grammar.param) from rejected


async def in_time(work: Awaitable[_Result], failure: str, running: RunningModel, terms: Terms) -> _Result:
    """Return the result of the work, or raise `Rejected` at the first time limit. Work that nobody awaits is not started."""
    if not terms.time_limits:
        return await work
    limit_ns, reason, since_ns = min(terms.time_limits)
    try:
        async with asyncio.timeout(max(0.0, (limit_ns - running.clock.now_ns()) / 1e9)):
            return await work
    except TimeoutError:
        allowed_ms = (limit_ns - since_ns) / 1e6
        detail = f"Its {failure} within the {allowed_ms:g} ms that the request allows. Allow more, or send it again."
        raise Rejected(reason, detail) from None


async def _matchers_compiled(
    number: int, grammar: Grammar, plan: AnswerPlan | None, running: RunningModel, lane: Owner
) -> list[Matcher]:
    grammars, off_loop, size = running.grammars, running.off_loop, number * len(grammar.source)
    can_share = size <= _MAX_INLINE_GRAMMAR_CHARS and num_at_once(plan, number) <= ANSWERS_PER_COMPILATION
    for _ in range(_MAX_COMPILATIONS if can_share else 0):
        await off_loop.compile(lane, len(grammar.source), lambda: grammars.prepare(grammar, plan, number), key=grammar)
        if matchers := grammars.known(grammar, plan, number):
            return matchers
    return await off_loop.compile(lane, size, lambda: [grammars.matcher(grammar, plan) for _ in range(number)])


def make_requests(
    call: Call,
    tokenised: Tokenised,
    engine_id: str,
    seed: int,
    matchers: Sequence[Matcher] | None,
    form: AnswerForm | None = None,
    *,
    salt: bytes = b"",
    waits: WaitTimes,
) -> list[Request]:
    """Return the engine's requests: `n` for each prompt, in the order of the prompts. Their ids begin with `engine_id`."""
    terms, running, is_seeded = call.terms, call.running, "seed" in call.request.sampling
    slo_itl_ns = terms.slo_itl_ns or running.slo_itl_ns
    shown_ids = call.sampling.shown_special_ids
    if form is not None and shown_ids is not None:  # the answer's reader looks for marks in the text
        shown_ids = tuple(sorted({*shown_ids, *running.tokenizer.special_ids(form.marks)}))
    requests: list[Request] = []
    for prompt_index, token_ids in enumerate(tokenised.prompts):
        # Equal prompts in one call get equal answers only if a seed was given.
        prompt_seed = seed if is_seeded else seed + len(requests)
        for nth in range(call.request.n):
            sampling = dataclasses.replace(
                call.sampling,
                max_tokens=tokenised.max_tokens[prompt_index],
                seed=(prompt_seed + nth) % 2**64,  # choices differ, but repeat with the same seed
                banned_token_sequences=tokenised.banned,
                stop_token_ids=tuple(sorted({*call.sampling.stop_token_ids, *tokenised.end_token_ids})),
                shown_special_ids=shown_ids,
                prompt_logprobs=call.sampling.prompt_logprobs if nth == 0 or each_scores(call) else None,
            )
            requests.append(
                Request(
                    request_id=f"{engine_id}.{len(requests)}",
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    arrival_ns=terms.arrival_ns,
                    waits=waits,
                    parent_id=f"{engine_id}.{prompt_index}",
                    shares_prompt=nth > 0,
                    priority=terms.priority,
                    background=terms.background,
                    deadline_ns=terms.deadline_ns,
                    queue_deadline_ns=terms.queue_deadline_ns,
                    first_token_deadline_ns=terms.first_token_deadline_ns,
                    call=requests,
                    slo_itl_ns=slo_itl_ns,
                    tenant=terms.owner.tenant,
                    key=terms.owner.key,
                    cache_salt=salt,
                    conversation=terms.conversation,
                    adapter=call.adapter,
                    matcher=None if matchers is None else matchers[len(requests)],
                )
            )
    return requests
