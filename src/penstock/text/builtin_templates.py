"""Chat templates that `--chat-template` takes by name, for models without a template of their own.

Names and formats are those of llama.cpp's server. Each template writes the beginning-of-text token if the model family has one.
None supports tools: `text.dialects` describes tools in the system message instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BOS = "{{ bos_token }}"
_EACH = "{% for message in messages %}"
_ASK = "{% endfor %}{% if add_generation_prompt %}"
_SYSTEM_FIRST = (
    "{% set is_led = messages | length > 1 and messages[0].role == 'system' and messages[1].role == 'user' %}"
    "{% set system = messages[0].content if is_led else '' %}"
    "{% set turns = messages[1:] if is_led else messages %}"
)
"""Sets `system` to a leading system message, and `turns` to the rest, for model families without system messages. Other system
messages, and one that no user message follows, are written as user messages."""

BUILTIN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": (
            _EACH
            + "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
            + _ASK
            + "{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        "deepseek3": (
            _BOS
            + _EACH
            + "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
            + "{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}"
            + "{% else %}{{ '<｜User｜>' + message.content }}{% endif %}"
            + _ASK
            + "{{ '<｜Assistant｜>' }}{% endif %}"
        ),
        "gemma": (
            _BOS
            + _SYSTEM_FIRST
            + "{% for message in turns %}"
            + "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}"
            + "{% if loop.first and system %}{{ system | trim + '\\n\\n' }}{% endif %}"
            + "{{ message.content | trim + '<end_of_turn>\\n' }}"
            + _ASK
            + "{{ '<start_of_turn>model\\n' }}{% endif %}"
        ),
        "llama2": (
            _SYSTEM_FIRST
            + "{% for message in turns %}"
            + "{% if message.role == 'assistant' %}{{ ' ' ~ message.content ~ ' ' ~ eos_token }}"
            + "{% else %}{{ bos_token ~ '[INST] ' }}"
            + "{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
            + "{{ message.content + ' [/INST]' }}{% endif %}{% endfor %}"
        ),
        "llama3": (
            _BOS
            + _EACH
            + "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
            + _ASK
            + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
        ),
        "mistral-v7": (
            _BOS
            + _EACH
            + "{% if message.role == 'system' %}{{ '[SYSTEM_PROMPT] ' + message.content + '[/SYSTEM_PROMPT]' }}"
            + "{% elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ eos_token }}"
            + "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}{% endfor %}"
        ),
        "phi3": (
            _BOS
            + _EACH
            + "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
            + _ASK
            + "{{ '<|assistant|>\\n' }}{% endif %}"
        ),
        "vicuna": (
            _BOS
            + _EACH
            + "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
            + "{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' ~ message.content ~ eos_token ~ '\\n' }}"
            + "{% else %}{{ 'USER: ' + message.content + '\\n' }}{% endif %}"
            + _ASK
            + "{{ 'ASSISTANT:' }}{% endif %}"
        ),
        "zephyr": (
            _BOS
            + _EACH
            + "{{ '<|' + message.role + '|>\\n' ~ message.content ~ eos_token ~ '\\n' }}"
            + _ASK
            + "{{ '<|assistant|>\\n' }}{% endif %}"
        ),
    }
)
