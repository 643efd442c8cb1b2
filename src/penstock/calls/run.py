"""Turns a `Call` into running requests: admission, then the chat template, the tokenizer and the grammar.

Costly work runs off the event loop. An endpoint cancels `run` when its client disconnects.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.admission.ask import Ask, Conditions
from penstock.admission.door import Place
from penstock.calls.call import (
    Call,
    Conversation,
    InfillPrompt,
    MixedPrompt,
    Prompt,
    Terms,
    TextPrompt,
    TokenPrompt,
)
from penstock.calls.in_flight import Arrival, InFlight, RunningCall
from penstock.deploy.off_loop import INLINE_MAX_SIZE
from penstock.deploy.running import RunningModel
from penstock.obs.explain.explanation import GRAMMAR
from penstock.text.answers import AnswerForm
from penstock.text.chat import require_chat_template
from penstock.text.dialects import Message, for_template
from penstock.text.grammar import ANSWERS_PER_COMPILATION, Grammar, Lead, num_at_once
from penstock.text.parameters import Types
from penstock.types.errors import MAX_TOLD_CHARS, Rejected, RejectReason, counted, wrong
from penstock.types.request import Request, WaitTimes
from penstock.types.sampling import Matcher

if TYPE_CHECKING:
    from penstock.text.answer_matcher import AnswerPlan
    from penstock.text.fim import FillInTheMiddle

MAX_TEXT_CHARS = 2**20
"""Most characters of one text, unless the context has room for more. Tokenising them takes about a second."""
MAX_SCORED = 2**19
"""Most log-probabilities of prompts in one answer, alternatives included: 80 MB of memory."""
MAX_SCORED_IN_STREAM = 2**14
"""Most log-probabilities of prompts in a stream. The event loop takes 30 ms to write them."""
_MAX_NAMES = 16
"""Tokens reserved for the default names of a repository and a file, and for the special tokens around them."""
_DEFAULT_ROOM = 16
"""Tokens for the answer to a truncated prompt, if the client names no limit."""
_MAX_INLINE_GRAMMAR_CHARS = 1 << 15
"""Most characters of compiled grammars, summed over choices, to copy on the event loop: 0.1 ms."""
_MAX_COMPILATIONS = 4
"""Attempts to share a compiled grammar, since other calls may use it up or evict it."""
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: \w+=[^;\s]*;)*\n?")


@dataclasses.dataclass(frozen=True, slots=True)
class Tokenised:
    prompts: list[tuple[int, ...]]
    max_tokens: list[int]
    """For each prompt, the most tokens to generate."""
    echoes: list[str]
    """For each prompt, the text to put before its answers."""
    banned: tuple[tuple[int, ...], ...]
    """Token sequences banned by the call and by the model's files."""
    end_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answers."""


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
    with at_the_door(running, _ask(call)) as place, in_flight.arriving(Arrival.of(call)) as arrival:
        tokenised, form = await _tokenised(call)
        matchers, grammar_wait_ns = None, 0
        if call.sampling.follows_grammar:
            num_requests = len(tokenised.prompts) * call.request.n
            grammar, plan = _planned(call, form)
            arrival.since_ns = asked_ns = running.clock.now_ns()
            arrival.waits_for = GRAMMAR
            try:
                matchers = await _matchers(grammar, plan, num_requests, max(tokenised.max_tokens), running, call.terms)
            finally:
                grammar_wait_ns = running.clock.now_ns() - asked_ns
                running.metrics.count_grammar_wait(grammar_wait_ns)
        salt = call.terms.cache_salt
        if in_flight.isolates_tenants(running):
            salt = call.terms.owner.tenant.encode() + b"\0" + salt  # no tenant's name contains a zero byte
        engine_id = in_flight.new_engine_id(call.terms.request_id)
        waits = call.terms.waits._replace(grammar=grammar_wait_ns)
        requests = make_requests(call, tokenised, engine_id, seed, matchers, salt=salt, waits=waits)
        return in_flight.open(call, requests, tokenised.echoes, form, place)


@contextmanager
def at_the_door(running: RunningModel, ask: Ask) -> Iterator[Place]:
    """Ask admission for a place in the queue, kept until the block ends. Raises `Rejected`, or `ModelAway` if unloaded."""
    engine, admission = running.engine, running.admission
    with running.using():
        try:
            place = admission.decide(ask, engine.load(), running.clock.now_ns(), refuses_with=engine.state.refuses_with)
        except Rejected as rejected:
            running.metrics.count_rejected(rejected.reason, ask.tenant)
            raise
        try:
            yield place
        finally:
            admission.leave(place)


def ask_of(terms: Terms, claim: bytes) -> Ask:
    """Return what admission must know of a call with these terms, except its size."""
    conditions = {one.name: getattr(terms, one.name) for one in dataclasses.fields(Conditions)}
    return Ask(tenant=terms.owner.tenant, claim=claim, **conditions)


def _ask(call: Call) -> Ask:
    """Return what admission must know of a call that is not tokenised yet, so its size is in characters."""
    terms, sampling, prompts = call.terms, call.sampling, call.prompts
    if isinstance(prompts, Conversation):
        num_prompts, num_token_ids = 1, 0
        num_chars = sum([message.num_chars for message in prompts.messages]) + sum([len(str(tool)) for tool in prompts.tools])
    else:
        num_prompts = len(prompts)
        sizes = [_size(prompt) for prompt in prompts]
        num_chars = sum([size for size, _ in sizes]) + len(call.request.suffix) * num_prompts
        num_token_ids = sum([size for _, size in sizes])
    max_tokens = _asked_tokens(call)
    # An answer that nothing can stop reaches its limit.
    is_endless = not (sampling.stop_token_ids or sampling.stop or sampling.follows_grammar)
    return dataclasses.replace(
        ask_of(terms, call.claim),
        num_requests=num_prompts * call.request.n,
        num_chars=num_chars,
        num_token_ids=num_token_ids,
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
        prompt = await render(prompts, running, call.terms.owner.tenant, call.num_bytes)
        form = _form(call, prompts, prompt.text)
        prompts, size = (prompt,), len(prompt.text) + sum([len(word) for word in call.request.bad_words])
    return await running.off_loop.run(size, partial(tokenise, call, prompts)), form


def _form(call: Call, conversation: Conversation, prompt: str) -> AnswerForm | None:
    """Return the format of answers to a chat, or None for plain text. The prompt may already open or close their reasoning."""
    dialect = call.running.dialect
    tools = None if call.tools is None else dialect.tools
    reasoning, is_reasoning = dialect.reasoning, False
    if reasoning is not None:
        if conversation.continue_final_message:
            begun = conversation.messages[-1].content
            is_reasoning = begun.rfind(reasoning.open) > begun.rfind(reasoning.close)
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
    names = call.tools or frozenset()
    return AnswerForm(tools=tools, tool_names=names, types=types, reasoning=reasoning, is_reasoning=is_reasoning)


def _planned(call: Call, form: AnswerForm | None) -> tuple[Grammar | None, AnswerPlan | None]:
    """Return the grammar of the answers, and the plan of the text that precedes it. At least one is not None."""
    from penstock.text.answer_matcher import AnswerPlan

    grammar, reasoning = call.grammar, None if form is None else form.reasoning
    trigger_of = call.running.dialect.tools if call.tools else None
    if grammar is not None and reasoning is None and trigger_of is None:
        return grammar, None
    if grammar is not None and reasoning is not None and trigger_of is None:
        grammar = dataclasses.replace(grammar, lead=Lead(reasoning.open, reasoning.close, reasoning.lead))
    plan = AnswerPlan(
        reasoning=reasoning,
        is_reasoning=form is not None and form.is_reasoning,
        max_reasoning_tokens=call.max_reasoning_tokens,
        trigger_of=trigger_of,
        tool_names=call.tools or frozenset(),
    )
    return grammar, plan


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
        return await _in_time(_matchers_compiled(number, grammar, plan, running, terms.owner.tenant), running, terms)
    except Rejected as rejected:
        if rejected.reason is not RejectReason.INVALID:
            raise
        subject = f"'{grammar.param}'" if grammar.other is None else f"'{grammar.param}' beside 'tools'"
        raise wrong(f"{subject} is refused. {rejected.detail}", grammar.param) from rejected


async def _in_time(compiling: Awaitable[list[Matcher]], running: RunningModel, terms: Terms) -> list[Matcher]:
    """Return the matchers, or raise `Rejected` at the first time limit. A compilation without a waiter is not begun."""
    if not terms.time_limits:
        return await compiling
    limit_ns, reason = min(terms.time_limits)
    try:
        async with asyncio.timeout(max(0.0, (limit_ns - running.clock.now_ns()) / 1e9)):
            return await compiling
    except TimeoutError:
        running.metrics.count_rejected(reason, terms.owner.tenant)
        allowed_ms = (limit_ns - terms.arrival_ns) / 1e6
        detail = (
            f"Its grammar was not compiled within the {allowed_ms:g} ms that the request allows. Allow more, or send it again."
        )
        raise Rejected(reason, detail) from None


async def _matchers_compiled(
    number: int, grammar: Grammar, plan: AnswerPlan | None, running: RunningModel, tenant: str
) -> list[Matcher]:
    grammars, off_loop, size = running.grammars, running.off_loop, number * len(grammar.source)
    can_share = size <= _MAX_INLINE_GRAMMAR_CHARS and num_at_once(plan, number) <= ANSWERS_PER_COMPILATION
    for _ in range(_MAX_COMPILATIONS if can_share else 0):
        await off_loop.compile(tenant, len(grammar.source), lambda: grammars.prepare(grammar, plan, number), key=grammar)
        if matchers := grammars.known(grammar, plan, number):
            return matchers
    return await off_loop.compile(tenant, size, lambda: [grammars.matcher(grammar, plan) for _ in range(number)])


async def render(conversation: Conversation, running: RunningModel, tenant: str, num_bytes: int) -> TextPrompt:
    """Return a chat's prompt. Raises `Rejected` if the template is missing, refuses, or has too many calls waiting.

    `num_bytes` is the size of the request's body.
    """
    work = partial(render_here, conversation, running)
    require_chat_template(running.chat_template)
    return await running.off_loop.render(tenant, num_bytes, work)


def render_here(conversation: Conversation, running: RunningModel) -> TextPrompt:
    """Like `render`, but on the calling thread. Raises `Rejected`."""
    template = require_chat_template(running.chat_template)
    now = template.now()

    def write(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        told, own = for_template(messages, tools, running.dialect)
        return template.render(
            told,
            now,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **own,
            **variables,
        )

    parts = without_billing_line(conversation.messages), conversation.tools, conversation.variables
    text = write(*parts)
    return TextPrompt(text, conversation.param, running.control_tokens.cuts(text, *parts, write))


def without_billing_line(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the billing line that Claude Code puts before its system prompt.

    The line changes with each request and would defeat the prefix cache. Proxies send it through any API.
    """
    kept: list[Message] = []
    for message in messages:
        found = _BILLING_LINE.match(message.content) if message.role == "system" else None
        content = message.content[found.end() :] if found else message.content
        if content or not found:
            kept.append(dataclasses.replace(message, content=content) if found else message)
    return kept


def tokenise(call: Call, prompts: Sequence[Prompt]) -> Tokenised:
    """Return the tokens of a call's prompts. Raises `Rejected` if a prompt does not fit or the tokenizer refuses it."""
    running, banned = call.running, _banned_sequences(call)
    fim = _fill_in_the_middle(call)
    all_ids = [_token_ids(prompt, call, fim) for prompt in prompts]
    max_tokens = [_room(len(ids), prompt.param, call) for ids, prompt in zip(all_ids, prompts, strict=True)]
    _check_scored(sum([len(ids) for ids in all_ids]), call)
    echoes = [""] * len(prompts)
    if call.answer.echo:  # the part that the model sees
        is_whole = call.request.truncate_prompt_tokens is None
        echoes = [
            prompt.text
            if is_whole and isinstance(prompt, TextPrompt)
            else running.tokenizer.decode(ids, skip_special_tokens=isinstance(prompt, TextPrompt | TokenPrompt))
            for ids, prompt in zip(all_ids, prompts, strict=True)
        ]
    adds_ends = fim is not None and call.sampling.stop_token_ids and call.sampling.beams is None
    return Tokenised(all_ids, max_tokens, echoes, banned, fim.end_token_ids if fim is not None and adds_ends else ())


def _fill_in_the_middle(call: Call) -> FillInTheMiddle | None:
    """Return the tokens to fill in the middle, or None if the call needs none. Raises INVALID if the model lacks any."""
    param = call.request.names("suffix")
    if not call.request.suffix:
        if isinstance(call.prompts, Conversation) or not isinstance(call.prompts[0], InfillPrompt):
            return None
        param = call.prompts[0].param
    from penstock.text.fim import NAMES, find_fim

    fim = find_fim(call.running.tokenizer)
    if fim is None:
        raise wrong(
            f"{call.running.name} has no tokens for filling in the middle, such as {NAMES[0][0]}: '{param}' needs a model that "
            "was trained for it, such as Qwen2.5-Coder.",
            param,
        )
    return fim


def _token_ids(prompt: Prompt, call: Call, fim: FillInTheMiddle | None) -> tuple[int, ...]:
    """Return the prompt's tokens, truncated as the client asked. With `fim`, they include the text after the gap."""
    running = call.running
    if isinstance(prompt, MixedPrompt):
        return mixed_ids(prompt, running, adds_special_tokens=call.request.adds_special_tokens)
    if isinstance(prompt, InfillPrompt):
        assert fim is not None, "_fill_in_the_middle refuses the call otherwise"
        prompt = TextPrompt(_infill_text(prompt, call, fim), prompt.param)
    elif fim is not None:
        check_text_size(call.request.suffix, running, call.request.names("suffix"))
        if isinstance(prompt, TokenPrompt):
            return tuple(fim.token_ids(prompt.token_ids, call.request.suffix, running.tokenizer))
        prompt = TextPrompt(fim.text(prompt.text, call.request.suffix), prompt.param)
    max_model_len, keep = running.model.capacity.max_model_len, call.request.truncate_prompt_tokens
    token_ids: Sequence[int]
    if isinstance(prompt, TokenPrompt):
        token_ids = prompt.token_ids
    else:
        if len(prompt.text) > INLINE_MAX_SIZE and keep is None:
            # Even the longest tokens would be too many, or one for each part of a cut prompt.
            least = max(len(prompt.text) // running.tokenizer.max_token_bytes, len(prompt.cuts))
            if least > max_model_len:
                limit = f"{running.name}'s context is {counted(max_model_len, 'token')} on this server"
                raise _too_long(f"{limit}; the prompt has at least {least}.", prompt.param)
        check_text_size(prompt.text, running, prompt.param)
        token_ids = prompt.encode(running.tokenizer, add_special_tokens=call.request.adds_special_tokens)
        if not token_ids:
            raise wrong(f"'{prompt.param}' has no tokens.", prompt.param)
        check_encoded(token_ids, running, prompt.param)
    if keep is not None:
        # -1 keeps as many tokens as fit beside the answer.
        max_len = running.admission.max_len(call.adapter)
        token_ids = token_ids[-(keep if keep > 0 else max(1, max_len - (call.max_tokens or _DEFAULT_ROOM))) :]
    return tuple(token_ids)


def mixed_ids(prompt: MixedPrompt, running: RunningModel, *, adds_special_tokens: bool) -> tuple[int, ...]:
    """Return the tokens of a mixed prompt. `adds_special_tokens` applies only to a text at its start."""
    token_ids: list[int] = []
    for index, part in enumerate(prompt.parts):
        if isinstance(part, int):
            token_ids.append(part)
            continue
        param = f"{prompt.param}[{index}]" if len(prompt.parts) > 1 else prompt.param
        check_text_size(part, running, param)
        encoded = running.tokenizer.encode(part, add_special_tokens=adds_special_tokens and index == 0)
        check_encoded(encoded, running, param)
        token_ids += encoded
    return tuple(token_ids)


def _infill_text(prompt: InfillPrompt, call: Call, fim: FillInTheMiddle) -> str:
    """Return the prompt for a gap in a file, after as many of the last other files as fit into the context."""
    running, files = call.running, [fim.file_text(name, text) for name, text in prompt.files]
    while any(_exceeded_size(file, running) for file in files):
        del files[0]
    rest = fim.text(prompt.first, prompt.last)
    check_text_size(rest, running, prompt.param)
    room = running.admission.max_len(call.adapter) - (call.max_tokens or _DEFAULT_ROOM) - _MAX_NAMES
    *sizes, rest_size = map(len, running.tokenizer.encode_batch([*files, rest], add_special_tokens=True))
    num_left_out, size = 0, sum(sizes) + rest_size
    while num_left_out < len(files) and size > room:
        size -= sizes[num_left_out]
        num_left_out += 1
    return fim.text_after_files(files[num_left_out:], prompt.first, prompt.last)


def _room(num_prompt_tokens: int, param: str, call: Call) -> int:
    """Return the most tokens to generate after this prompt.

    Raises CONTEXT_LENGTH, naming `max_tokens`, or the prompt if that alone leaves no room.
    """
    max_model_len, max_len = call.running.model.capacity.max_model_len, call.running.admission.max_len(call.adapter)
    room = max_len - num_prompt_tokens
    asked = _asked_tokens(call)
    max_tokens = max(1, room) if asked is None else asked
    if call.max_tokens is None or call.request.ends_with_context:
        max_tokens = min(max_tokens, max(1, room))  # the client did not set this limit
    if max_tokens > room:
        beside = " beside this adapter, and more with more KV cache" if max_len < max_model_len else ""
        raise _too_long(
            f"{call.running.name}'s context is {counted(max_len, 'token')} on this server{beside}. "
            f"The prompt has {num_prompt_tokens} and the answer may have {max_tokens}: {max_tokens - room} too many.",
            call.request.names("max_tokens") if call.request.max_tokens is not None and room > 0 else param,
            (num_prompt_tokens, max_len) if room <= 0 else None,
        )
    if call.sampling.min_tokens > max_tokens:
        name = call.request.names("sampling", "min_tokens")
        raise wrong(
            f"'{name}' ({call.sampling.min_tokens}) is larger than the tokens that may be generated ({max_tokens}).", name
        )
    return max_tokens


def _check_scored(num_prompt_tokens: int, call: Call) -> None:
    num_top = call.sampling.prompt_logprobs
    if num_top is None:
        return
    num_entries = num_prompt_tokens * (1 + num_top) * (call.request.n if _each_scores(call) else 1)
    limit, kind = (MAX_SCORED_IN_STREAM, "a stream") if call.answer.is_streamed else (MAX_SCORED, "one answer")
    if num_entries > limit:
        raise wrong(
            f"Prompts of {num_prompt_tokens} tokens with {num_top} alternatives each are {num_entries} log-probabilities; at "
            f"most {limit} fit into {kind}. Ask for fewer alternatives, send fewer prompts at once, or do not stream.",
            call.request.names("logprobs" if call.request.prompt_logprobs is None else "prompt_logprobs"),
        )


def _each_scores(call: Call) -> bool:
    """Return whether each choice computes the prompt's log-probabilities, instead of the first choice for all.

    In a stream each does, so that no choice waits for another. In a beam search only the first does.
    """
    return call.answer.is_streamed and call.sampling.beams is None


def _asked_tokens(call: Call) -> int | None:
    """Return the client's token limit, or that of the model's files. None means the rest of the context."""
    default = call.running.defaults.max_tokens
    if call.max_tokens is not None or default is None:
        return call.max_tokens
    return max(default, call.sampling.min_tokens)


def _banned_sequences(call: Call) -> tuple[tuple[int, ...], ...]:
    """Return all token sequences banned by the call and by the model's files.

    A bad word is banned as it is tokenised at the beginning of a text, and after a space.
    """
    running, sampling = call.running, call.sampling
    is_free = sampling.allowed_token_ids is None  # an allowed list overrides the model's bans
    of_model = running.defaults.banned_token_sequences if is_free else ()
    sequences: dict[tuple[int, ...], None] = dict.fromkeys((*sampling.banned_token_sequences, *of_model))
    for index, word in enumerate(call.request.bad_words):
        stripped = word.lstrip(" ")
        for text in (stripped, " " + stripped):
            token_ids = running.tokenizer.encode(text, add_special_tokens=False)
            check_encoded(token_ids, running, call.request.names("bad_words", index))
            sequences[tuple(token_ids)] = None
    return tuple(sequence for sequence in sequences if sequence)


def check_text_size(text: str, running: RunningModel, param: str) -> None:
    """Raise CONTEXT_LENGTH for a text longer than `MAX_TEXT_CHARS` that cannot fit into the context."""
    if (limit := _exceeded_size(text, running)) is not None:
        raise _too_long(f"The text has {len(text)} characters; at most {limit} are tokenised at once.", param)


def _exceeded_size(text: str, running: RunningModel) -> int | None:
    if len(text) <= MAX_TEXT_CHARS:
        return None
    limit = max(MAX_TEXT_CHARS, running.model.capacity.max_model_len * running.tokenizer.max_token_bytes)
    return limit if len(text) > limit else None


def check_encoded(token_ids: Sequence[int], running: RunningModel, param: str) -> None:
    """Raise INVALID for a token of the tokenizer that is outside the model's vocabulary."""
    vocab_size = running.model.vocab_size
    if token_ids and max(token_ids) >= vocab_size:
        token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
        text = running.tokenizer.token_text(token_id)[:MAX_TOLD_CHARS]
        raise wrong(
            f"'{param}' contains {text!r}, token {token_id} of the tokenizer, "
            f"which the model does not have: its vocabulary is [0, {vocab_size}).",
            param,
        )


def make_requests(
    call: Call,
    tokenised: Tokenised,
    engine_id: str,
    seed: int,
    matchers: Sequence[Matcher] | None,
    *,
    salt: bytes = b"",
    waits: WaitTimes,
) -> list[Request]:
    """Return the engine's requests: `n` for each prompt, in the order of the prompts. Their ids begin with `engine_id`."""
    terms, running, is_seeded = call.terms, call.running, "seed" in call.request.sampling
    slo_ttft_ns = terms.slo_ttft_ns or running.admission.limits.slo_ttft_ns
    slo_itl_ns = terms.slo_itl_ns or running.slo_itl_ns
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
                prompt_logprobs=call.sampling.prompt_logprobs if nth == 0 or _each_scores(call) else None,
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
                    slo_ttft_ns=slo_ttft_ns,
                    slo_itl_ns=slo_itl_ns,
                    tenant=terms.owner.tenant,
                    cache_salt=salt,
                    conversation=terms.conversation,
                    adapter=call.adapter,
                    matcher=None if matchers is None else matchers[len(requests)],
                )
            )
    return requests


def _too_long(detail: str, param: str, sizes: tuple[int, int] | None = None) -> Rejected:
    return Rejected(RejectReason.CONTEXT_LENGTH, detail, param=param, sizes=sizes)
