"""What a client sends as prompt, in its four forms: checked, told apart, and shortened as the client asked.

Called by the endpoints. Never tokenises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.serve.openai.errors import invalid
from penstock.serve.openai.schemas import MAX_CHOICES
from penstock.serve.openai.validation import check_token_ids


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    param: str
    """Where it stands in the body."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]
    param: str


PromptInput = TextPrompt | TokenPrompt


def parse_prompts(value: Any, vocab_size: int) -> list[PromptInput]:
    """`str | list[str] | list[int] | list[list[int]]`, at most `MAX_CHOICES` prompts, none empty. Raises 400."""
    if isinstance(value, str):
        return [TextPrompt(_not_empty(value, "prompt"), "prompt")]
    if not isinstance(value, list):
        raise invalid("'prompt' must be a string, a list of strings, a list of token ids or a list of those.", "prompt")
    if not value:
        raise invalid("'prompt' is empty.", "prompt")
    if type(value[0]) is int:
        return [_token_prompt(value, "prompt", vocab_size)]
    if len(value) > MAX_CHOICES:
        raise invalid(f"'prompt' has {len(value)} prompts; at most {MAX_CHOICES} are taken at once.", "prompt")
    return [_prompt_item(item, f"prompt[{index}]", type(value[0]), vocab_size) for index, item in enumerate(value)]


def truncate(token_ids: Sequence[int], limit: int | None, max_model_len: int, max_tokens: int) -> Sequence[int]:
    """The last `limit` tokens; with -1, the last that fit beside `max_tokens`; with None, all. Raises 400 for 0."""
    if limit is None:
        return token_ids
    if limit == 0:
        raise invalid("'truncate_prompt_tokens' must be at least 1, or -1 for as many as fit.", "truncate_prompt_tokens")
    keep = limit if limit > 0 else max(1, max_model_len - max_tokens)
    return token_ids[-keep:]


def _prompt_item(item: Any, param: str, kind: type, vocab_size: int) -> PromptInput:
    if type(item) is kind and isinstance(item, str):
        return TextPrompt(_not_empty(item, param), param)
    if type(item) is kind and isinstance(item, list):
        return _token_prompt(item, param, vocab_size)
    raise invalid(f"'{param}' must be like the prompts before it: all strings, or all lists of token ids.", param)


def _token_prompt(token_ids: list[Any], param: str, vocab_size: int) -> TokenPrompt:
    if not token_ids:
        raise invalid(f"'{param}' is empty.", param)
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise invalid(f"'{param}[{index}]' must be a token id.", param)
    check_token_ids(token_ids, vocab_size, param)
    return TokenPrompt(tuple(token_ids), param)


def _not_empty(text: str, param: str) -> str:
    if not text:
        raise invalid(f"'{param}' is empty.", param)
    return text
