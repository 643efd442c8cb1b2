"""From the messages of a chat to the prompt text: roles and contents are checked, then the model's template writes it.

Called by `chat` and `tokenize`. Only text so far: other parts and roles are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.serve.openai.errors import invalid
from penstock.serve.openai.schemas import ChatMessage, ChatTemplateFields
from penstock.serve.openai.unsupported import refuse_value
from penstock.text.chat import ChatTemplate, require_chat_template

_ROLES = ("system", "developer", "user", "assistant")
_ROLES_NOT_YET = ("tool", "function")
_PARTS_NOT_YET = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal", "thinking")
_PART_HINTS = ("cache_control", "prompt_cache_breakpoint")
"""How far a prompt shall be cached, in Anthropic's word and OpenAI's."""
_RESERVED_KWARGS = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As templates expect them: `role` and `content` strings. `developer`, OpenAI's newer word, becomes `system`."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def render_prompt(template: ChatTemplate | None, fields: ChatTemplateFields, messages: list[dict[str, Any]]) -> str:
    """The prompt text. Raises 400 if there is no template, or `Rejected` if it refuses these messages."""
    continue_final = bool(fields.continue_final_message)
    # Asking to continue the last message means that no new turn is opened, so saying nothing about it is enough.
    add_generation_prompt = not continue_final if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continue_final and add_generation_prompt:
        raise invalid("'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message")
    return require_chat_template(template).render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        **_kwargs(fields),
    )


def _kwargs(fields: ChatTemplateFields) -> dict[str, Any]:
    kwargs = fields.chat_template_kwargs or {}
    for name in _RESERVED_KWARGS:
        if name in kwargs:
            raise invalid(f"'chat_template_kwargs' must not set '{name}'; use the field of that name.", "chat_template_kwargs")
    return kwargs


def _template_message(message: ChatMessage, param: str) -> dict[str, Any]:
    rendered: dict[str, Any] = {
        "role": _role(message.role, f"{param}.role"),
        "content": _text(message.content, f"{param}.content"),
    }
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _role(role: Any, param: str) -> str:
    if role in _ROLES_NOT_YET:
        raise invalid(f"'{param}' {role!r} is not supported yet.", param)
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"'{param}' must be one of {', '.join(_ROLES)}.", param)
    return "system" if role == "developer" else role


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"'{param}' must be a string, or a list of text parts that is not empty.", param)
    return "".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"'{param}' must be an object.", param)
    kind = part.get("type")
    if kind in _PARTS_NOT_YET:
        raise invalid(f"'{param}.type' {kind!r} is not supported yet; only text is.", f"{param}.type")
    if kind != "text":
        raise invalid(f"'{param}.type' must be 'text'.", f"{param}.type")
    for name, value in part.items():
        if name in _PART_HINTS:
            refuse_value(name, value, f"{param}.{name}")
        elif name not in ("type", "text"):
            raise invalid(f"Unknown parameter: '{param}.{name}'."[:300], param)
    if not isinstance(part.get("text"), str):
        raise invalid(f"'{param}.text' must be a string.", f"{param}.text")
    return str(part["text"])
