"""Requests that the clients of tests/clients sent are sent again: no field is refused, and no field of an answer is missing.

`RECORD=1 make test-clients` writes the files anew.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clients.recorder import lacking, shape_of, shape_of_answer
from penstock.testing import HashExecutor, HashModel
from support.server.harness import CAPACITY, END_ID, VOCAB_SIZE, make_client, make_runtime, make_text_runtime, make_tokenizer

FOLDER = Path(__file__).parents[1] / "clients" / "recorded"
EXCHANGES = [json.loads(line) for path in sorted(FOLDER.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
BYTES_PER_TOKEN = 10
"""The toy has a token for each byte, so limits of tokens that sufficed for an answer become larger."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
ROOMY = replace(CAPACITY, max_model_len=65536, num_blocks=8193)


def test_recordings_tell_nothing_of_the_machine_they_were_made_on():
    """Neither its folders nor the random names that programs gave to it."""
    for path in FOLDER.glob("*.jsonl"):
        assert not re.search(r"/tmp/(?!work\b)|/home/|/root/|[0-9a-f]{64}", path.read_text("utf-8")), path.name


def ids_of(text):
    return make_tokenizer().encode(text, add_special_tokens=False)


ENDING = (END_ID, *ids_of('"}]0:,{['), *range(VOCAB_SIZE))
"""Tokens that end an answer in JSON, the soonest first, and then the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief(HashModel):
    """Says some tokens and no more. Where a grammar forbids that, it takes what ends soonest."""

    vocab_size: int = VOCAB_SIZE
    said: tuple[int, ...]

    def sample(self, value, sampling, num_generated, mask=None):
        wanted = (*self.said[num_generated : num_generated + 1], *ENDING)
        return next(each for each in wanted if mask is None or mask[each // 8] >> each % 8 & 1)


def for_toy(value):
    """A body with limits and token ids that suit the toy."""
    if isinstance(value, list):
        return [for_toy(part) for part in value]
    if not isinstance(value, dict):
        return value
    limits = {key: part * BYTES_PER_TOKEN for key, part in value.items() if key in LIMITS and isinstance(part, int)}
    body = {key: for_toy(part) for key, part in value.items()} | limits
    if isinstance(prompt := body.get("prompt"), list):
        body["prompt"] = [[token_id % VOCAB_SIZE for token_id in ids] if isinstance(ids, list) else ids for ids in prompt]
    return body


def words_for(body, answer):
    """A call's beginning where the recorded model called a tool, maybe of its own accord: the grammar says the rest. A text
    goes before it where the recorded model said one. Else a text that goes up to a stop string."""
    events = json.dumps(answer)
    if "tools" not in body or not re.search(r'"(tool_calls": \[|input": \{|call_id": ")', events):
        return "".join(["Hello.", *(body.get("stop_sequences") or body.get("stop") or ())][:2])
    tool = body["tools"][0]
    text = "Hello.\n" if '"response.output_text.delta"' in events else ""
    return f'{text}<tool_call>\n{{"name": "{tool.get("function", tool)["name"]}", "arguments": {{'


def test_what_is_missing_is_told():
    wanted = shape_of({"a": [{"b": 1, "c": None}], "d": "x"})
    assert list(lacking(wanted, shape_of({"a": [{"b": 2.5, "c": 1, "e": 2}, {"b": 3, "c": 1}], "d": "y", "f": None}))) == []
    assert list(lacking(wanted, shape_of({"a": [{"b": "1"}]}))) == [
        ".a[].b is str, not number",
        ".a[].c is missing",
        ".d is missing",
    ]
    assert shape_of_answer("text/event-stream", b'data: {"type": "one", "x": 1}\n\ndata: [DONE]\n\n').keys() == {
        "one",
        "[DONE]",
    }


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: f"{exchange['client']} {exchange['request']}")
async def test_a_recorded_request_is_answered_as_it_was(exchange):
    method, path = exchange["request"].split()
    body, wanted = exchange.get("body"), exchange["answer"]
    model = Brief(said=ids_of(words_for(body or {}, wanted)))
    chat = make_runtime(HashExecutor(ROOMY, model=model), served_names=("smollm2:135m", "qwen2.5-coder:1.5b"), aliases=())
    texts = make_text_runtime(served_names=("minilm",), aliases=())
    try:
        # The first model is the default, which `POST /` asks.
        async with make_client(*((chat, texts) if "parameters" in (body or {}) else (texts, chat))) as client:
            response = await client.request(method, path, json=for_toy(body), headers=exchange.get("headers"))
    finally:
        chat.close()
        texts.close()
    assert response.status_code == 200, response.text
    found = shape_of_answer(response.headers["content-type"], response.content)
    assert not list(lacking(wanted, found)), response.text
