"""Helpers that `server/test_tools.py` shares with other tests."""

from dataclasses import dataclass
from functools import cache

from penstock.testing import HashExecutor, HashModel
from support.server.harness import CAPACITY, CHAT_TEMPLATE, END_ID, VOCAB_SIZE, make_runtime, make_tokenizer

TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "<|turn|>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)

THINKING_TEMPLATE = (
    CHAT_TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
        },
    },
}

NOW = {"type": "function", "function": {"name": "now"}}

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}\n</tool_call>'

CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@cache
def ids_of(text: str) -> tuple[int, ...]:
    """The tokens of a whole answer with this text. Cached, since a model asks for them at each token."""
    return (*make_tokenizer().encode(text, add_special_tokens=False), END_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted(HashModel):
    """Says a text, as far as masks let it: else the first token that they allow."""

    vocab_size: int = VOCAB_SIZE
    text: str = ""
    ids: tuple[int, ...] = ()
    """Tokens to say instead of the text's own, such as ordinary ones that spell a special token."""

    def sample(self, value, sampling, num_generated, mask=None):
        ids = self.ids or ids_of(self.text)
        token_id = ids[min(num_generated, len(ids) - 1)]
        if mask is None or mask[token_id // 8] >> token_id % 8 & 1:
            return token_id
        return next(each for each in range(VOCAB_SIZE) if mask[each // 8] >> each % 8 & 1)


def says(text, **fields):
    return make_runtime(HashExecutor(CAPACITY, model=Scripted(text=text)), **fields)
