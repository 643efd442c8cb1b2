"""Turns the prompts of a `Call` into tokens: by the chat template and the tokenizer, within the model's context."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.calls.call import Call, Conversation, InfillPrompt, MixedPrompt, Prompt, TextPrompt, TokenPrompt
from penstock.deploy.running import RunningModel
from penstock.text.chat import require_chat_template
from penstock.text.dialects import Message, for_template
from penstock.types.errors import MAX_TOLD_CHARS, Rejected, RejectReason, counted, wrong

if TYPE_CHECKING:
    from penstock.text.fim import FillInTheMiddle
    from penstock.types.request import Owner

MAX_TEXT_CHARS = 2**20
"""Most characters of one text, unless the context has room for more. Tokenising them takes about a second."""
MAX_TOKEN_CHARS = 128
"""Most characters that we expect of a token. Qwen2.5's longest has as many, all of them spaces."""
MAX_SCORED = 2**19
"""Most log-probabilities of prompts in one answer, alternatives included: 80 MB of memory."""
MAX_SCORED_IN_STREAM = 2**14
"""Most log-probabilities of prompts in a stream. The event loop takes 30 ms to write them."""
_MAX_NAMES = 16
"""Tokens reserved for the default names of a repository and a file, and for the special tokens around them."""
_DEFAULT_ROOM = 16
"""Tokens for the answer to a truncated prompt, if the client names no limit."""
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: \w+=[^;\s]*;)*\n?")


@dataclasses.dataclass(frozen=True, slots=True)
class Tokenised:
    prompts: list[tuple[int, ...]]
    max_tokens: list[int]
    """The limit of generated tokens of each prompt."""
    echoes: list[str]
    """The text to put before the answers to each prompt."""
    banned: tuple[tuple[int, ...], ...]
    """Token sequences banned by the call and by the model's files."""
    end_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answers."""


async def render(conversation: Conversation, running: RunningModel, lane: Owner, num_bytes: int) -> TextPrompt:
    """Return a chat's prompt. Raises `Rejected` if the template is missing, refuses, or has too many calls waiting.

    `num_bytes` is the size of the request's body.
    """
    work = partial(render_here, conversation, running)
    try:
        require_chat_template(running.chat_template)
        return await running.off_loop.render(lane, num_bytes, work)
    except Rejected as rejected:
        if rejected.param == "messages":
            rejected.param = conversation.param
        raise


def render_here(conversation: Conversation, running: RunningModel) -> TextPrompt:
    """Like `render`, but on the calling thread. Raises `Rejected`."""
    template = require_chat_template(running.chat_template)
    now = template.now()

    def write(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        rendered, own = for_template(messages, tools, running.dialect)
        return template.render(
            rendered,
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
        is_whole, skips = call.request.truncate_prompt_tokens is None, call.request.skip_special_tokens
        echoes = [
            prompt.text
            if is_whole and isinstance(prompt, TextPrompt)
            else running.tokenizer.decode(ids, skip_special_tokens=skips and isinstance(prompt, TextPrompt | TokenPrompt))
            for ids, prompt in zip(all_ids, prompts, strict=True)
        ]
    ends = () if fim is None or call.request.ignore_eos or call.sampling.beams is not None else fim.end_token_ids
    return Tokenised(all_ids, max_tokens, echoes, banned, ends)


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
    token_ids: Sequence[int]
    if isinstance(prompt, MixedPrompt):
        return mixed_ids(prompt, running, adds_special_tokens=call.request.adds_special_tokens)
    if isinstance(prompt, InfillPrompt):
        assert fim is not None, "_fill_in_the_middle refuses the call otherwise"
        prompt = TextPrompt(_infill_text(prompt, call, fim), prompt.param)
    elif fim is not None:
        check_text_size(call.request.suffix, running, call.request.names("suffix"))
        if isinstance(prompt, TokenPrompt):
            token_ids = fim.token_ids(prompt.token_ids, call.request.suffix, running.tokenizer)
            check_encoded(token_ids, running, call.request.names("suffix"))
            return tuple(token_ids)
        prompt = TextPrompt(fim.text(prompt.text, call.request.suffix), prompt.param)
    max_model_len, keep = running.model.capacity.max_model_len, call.request.truncate_prompt_tokens
    if isinstance(prompt, TokenPrompt):
        token_ids = prompt.token_ids
    else:
        # Even the longest tokens would be too many, or one for each part of a cut prompt.
        least = max(len(prompt.text) // MAX_TOKEN_CHARS, len(prompt.cuts))
        if least > max_model_len and keep is None:
            raise _too_long(f"{limit_words(running.name, max_model_len)}; the prompt has at least {least}.", prompt.param)
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
    asked = asked_tokens(call)
    max_tokens = max(1, room) if asked is None else asked
    if call.max_tokens is None or call.request.ends_with_context:
        max_tokens = min(max_tokens, max(1, room))  # the client did not set this limit
    if max_tokens > room:
        beside = " beside this adapter (more KV cache would raise that)" if max_len < max_model_len else ""
        is_scored_alone = call.request.max_tokens == 0
        answer = "needs room for one more" if is_scored_alone else f"the answer may have {max_tokens}"
        raise _too_long(
            f"{limit_words(call.running.name, max_len)} on this server{beside}. "
            f"The prompt has {num_prompt_tokens} and {answer}: {max_tokens - room} too many.",
            call.request.names("max_tokens") if call.request.max_tokens is not None and room > 0 else param,
            (num_prompt_tokens, max_len) if room <= 0 else None,
        )
    if call.sampling.min_tokens > max_tokens:
        name = call.request.names("sampling", "min_tokens")
        raise wrong(
            f"'{name}' ({call.sampling.min_tokens}) is larger than the number of tokens that may be generated ({max_tokens}).",
            name,
        )
    return max_tokens


def _check_scored(num_prompt_tokens: int, call: Call) -> None:
    num_top = call.sampling.prompt_logprobs
    if num_top is None:
        return
    num_choices = 1 if isinstance(call.prompts, Conversation) else call.request.n  # a chat shows its prompt once
    num_entries = num_prompt_tokens * (1 + num_top) * num_choices
    limit, kind = (MAX_SCORED_IN_STREAM, "a stream") if call.answer.is_streamed else (MAX_SCORED, "one answer")
    if num_entries > limit:
        raise wrong(
            f"Prompts of {num_prompt_tokens} tokens with {num_top} alternatives each are {num_entries} log-probabilities in "
            f"{counted(num_choices, 'choice')}; at most {limit} fit into {kind}. Ask for fewer alternatives or choices, send "
            "fewer prompts at once, or do not stream.",
            call.request.names("logprobs" if call.request.prompt_logprobs is None else "prompt_logprobs"),
        )


def each_scores(call: Call) -> bool:
    """Return whether each choice computes the prompt's log-probabilities, instead of the first choice for all.

    In a stream each computes its own, so that no choice waits for another. In a beam search only the first does.
    """
    return call.answer.is_streamed and call.sampling.beams is None


def asked_tokens(call: Call) -> int | None:
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
        context = limit_words(running.name, running.model.capacity.max_model_len)
        raise _too_long(f"{context}; the text has {len(text)} characters, and at most {limit} are tokenised.", param)


def _exceeded_size(text: str, running: RunningModel) -> int | None:
    if len(text) <= MAX_TEXT_CHARS:
        return None
    limit = max(MAX_TEXT_CHARS, running.model.capacity.max_model_len * MAX_TOKEN_CHARS)
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


def limit_words(model: str, max_tokens: int) -> str:
    """Return a model's limit in OpenAI's words, by which LiteLLM and other clients recognise a CONTEXT_LENGTH refusal."""
    return f"This model's maximum context length is {counted(max_tokens, 'token')} ({model})"


def _too_long(detail: str, param: str, sizes: tuple[int, int] | None = None) -> Rejected:
    return Rejected(RejectReason.CONTEXT_LENGTH, detail, param=param, sizes=sizes)
