"""Helpers that `server/test_completions.py` shares with other tests."""

from penstock import fast_json
from penstock.testing import expected_tokens
from penstock.types.sampling import SamplingParams
from support.server.harness import PRINTABLE_MODEL, make_tokenizer

URL = "/v1/completions"

TOKENIZER = make_tokenizer()


def oracle(prompt, **sampling):
    """The answer's text, computed without engine or server."""
    token_ids = TOKENIZER.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    defaults = {"max_tokens": 16, "temperature": 0.0, "seed": 7, "stop_token_ids": TOKENIZER.eos_token_ids}
    params = SamplingParams(**(defaults | sampling))
    return TOKENIZER.decode(expected_tokens(token_ids, params, model=PRINTABLE_MODEL, max_model_len=2048).token_ids)


def events(text):
    """The parsed events of a stream, and whether it ended with [DONE]."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(": ")]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    is_done = payloads[-1] == "[DONE]"
    return [fast_json.loads(payload) for payload in payloads[: -1 if is_done else None]], is_done


async def ask(client, **body):
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def ask_streaming(client, **body):
    response = await client.post(URL, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response.text)
