"""The answer to any bad request names the cause, the server stays up, and the stream beside it is undisturbed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.e2e.process import CHAT, COMPLETIONS, TIMEOUT_S, Answer, RealServer, undisturbed

pytestmark = pytest.mark.model

JSON = "application/json"
BAD = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
VOCAB_SIZE = 49152
MAX_MODEL_LEN = 8192
MAX_BODY_BYTES = 4 << 20
HI = [{"role": "user", "content": "Hi"}]


class Case:
    """A body, and what must come back: status, code, the parameter at fault, and words that the message must have."""

    def __init__(
        self,
        body: Any,
        *words: str,
        param: str | None = None,
        code: str = BAD,
        status: int = 400,
        path: str = COMPLETIONS,
        content_type: str | None = JSON,
    ) -> None:
        self.content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.wanted = (status, code, param)
        self.words = words
        self.path = path
        self.headers = {} if content_type is None else {"Content-Type": content_type}

    def check(self, client: httpx.Client) -> None:
        response = client.post(self.path, content=self.content, headers=self.headers)
        shown = f"{self.content[:80]!r} -> {response.status_code} {response.text[:500]}"
        assert response.headers["content-type"] == JSON, shown
        assert response.headers["x-request-id"], shown
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == self.wanted, shown
        # A prompt that was counted has both sizes in its refusal.
        assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}, shown
        for word in self.words:
            assert word in error["message"], shown


def prompt(text: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"prompt": text, **fields}


def chat(messages: Any = HI, **fields: Any) -> dict[str, Any]:
    return {"messages": messages, **fields}


NOT_JSON = "not valid JSON"
NOT_UTF_8 = "not UTF-8"
NO_OBJECT = "must be a JSON object"
LONG_TEXT = "word " * 20_000
MANY_MESSAGES = [HI[0], {"role": "assistant", "content": "Hello"}] * 2_000

CASES = {
    "not JSON": [
        Case(b"hello", NOT_JSON),
        Case(b'{"prompt": "Hi"', NOT_JSON),
        Case(b"{'prompt': 'Hi'}", NOT_JSON),
        Case(b'{"prompt": "Hi", "temperature": NaN}', NOT_JSON),
        Case(b'{"prompt": "Hi", "temperature": 1e999}', NOT_JSON),
        Case(b'{"prompt": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", NOT_JSON, "nested too deeply"),
        Case(b'{"messages": ' + b'{"a":' * 90_000 + b"1" + b"}" * 90_001, NOT_JSON, "nested too deeply", path=CHAT),
        Case(b"", NO_OBJECT),
        Case(b"null", NO_OBJECT),
        Case(b"[1]", NO_OBJECT, path=CHAT),
        Case(b'"Hi"', NO_OBJECT),
    ],
    "invalid UTF-8": [
        Case(b'{"prompt": "\xff\xfe"}', NOT_UTF_8, "byte 0xff is not UTF-8: line 1 column 13 (char 12)"),
        Case(b'{"prompt": "\xc3"}', NOT_UTF_8, "byte 0xc3 is not UTF-8: line 1 column 13 (char 12)"),
        Case(b'{"prompt": "\xed\xa0\x80"}', NOT_UTF_8),
        Case(rb'{"prompt": "\ud800"}', NOT_JSON, "surrogate"),
        Case('{"prompt": "Hi"}'.encode("utf-16"), NOT_UTF_8),
        Case(b"\xef\xbb\xbf" + b'{"prompt": "Hi"}', NOT_JSON, "BOM"),
    ],
    "wrong types": [
        Case(prompt(max_tokens="16"), "'max_tokens'", "integer", param="max_tokens"),
        Case(prompt(max_tokens=2.5), "integer", param="max_tokens"),
        Case(prompt(max_tokens=True), "integer", param="max_tokens"),
        Case(prompt(temperature="hot"), "number", param="temperature"),
        Case(prompt(temperature=3), "at most 2", param="temperature"),
        Case(prompt(top_p=-0.1), "at least 0", param="top_p"),
        Case(prompt(stream="yes"), "true or false", param="stream"),
        Case(prompt(stop=7), "'stop'", param="stop"),
        Case(prompt(seed=2**70), "'seed'", param="seed"),
        Case(prompt(n=0), "at least 1", param="n"),
        Case(prompt({"text": "Hi"}), "'prompt' must be", param="prompt"),
        Case(prompt(["Hi", 7]), "prompt[1]", param="prompt[1]"),
        Case(prompt([1, "Hi"]), "prompt[1]", param="prompt"),
        Case(chat("Hi"), "'messages'", param="messages", path=CHAT),
        Case(chat([7]), "messages[0]", param="messages[0]", path=CHAT),
        Case(chat([{"role": "wizard", "content": "Hi"}]), "user", param="messages[0].role", path=CHAT),
        Case(chat([{"role": "user", "content": 7}]), "string", param="messages[0].content", path=CHAT),
        Case(chat([{"role": "user"}]), "string", param="messages[0].content", path=CHAT),
        Case(prompt(logit_bias={"a": 1}), "token ids", param="logit_bias"),
        Case(prompt(stop=["x"] * 100_000), "at most 16", param="stop"),
    ],
    "unknown fields": [
        Case(prompt(temprature=1), "Unknown parameter", "temprature", param="temprature"),
        Case(prompt(**{"x" * 10_000: 1}), "Unknown parameter", param="x" * 200 + "..."),
        Case(chat(top_tokens=1), "Unknown parameter", param="top_tokens", path=CHAT),
        Case(chat([{**HI[0], "mood": "good"}]), "Unknown", param="messages[0].mood", path=CHAT),
        Case(chat(tools=[{"type": "function"}]), "'tools[0].function'", param="tools[0].function", path=CHAT),
        Case(prompt(model="gpt-9"), "'gpt-9'", "Served: 'smollm2:135m'", param="model", code="model_not_found", status=404),
    ],
    "empty prompts": [
        Case({}, "Missing required parameter", param="prompt"),
        Case({}, "Missing required parameter", param="messages", path=CHAT),
        Case(prompt(""), "empty", param="prompt"),
        Case(prompt([]), "empty", param="prompt"),
        Case(prompt([[]]), "empty", param="prompt[0]"),
        Case(prompt(["Hi", ""]), "empty", param="prompt[1]"),
        Case(prompt(None), "'prompt' must be", param="prompt"),
        Case(chat([]), "'messages'", param="messages", path=CHAT),
        Case(chat([{"role": "user", "content": []}]), "not empty", param="messages[0].content", path=CHAT),
    ],
    "enormous prompts": [
        Case(prompt(LONG_TEXT), "8192 tokens", "has 20", "too many", param="prompt", code=TOO_LONG),
        Case(prompt("a" * 4_000_000), "8192 tokens", param="prompt", code=TOO_LONG),
        Case(prompt(["Hi", LONG_TEXT]), "8192 tokens", param="prompt[1]", code=TOO_LONG),
        Case(prompt([1] * (MAX_MODEL_LEN + 1)), "8193", param="prompt", code=TOO_LONG),
        Case(prompt([1] * 500_000), "elements"),
        Case(chat(MANY_MESSAGES * 3), "messages", param="messages", path=CHAT),
        Case(prompt([1] * 200_000), "200000", param="prompt", code=TOO_LONG),
        Case(chat([{"role": "user", "content": LONG_TEXT}]), "8192 tokens", param="messages", code=TOO_LONG, path=CHAT),
        Case(chat(MANY_MESSAGES), "8192 tokens", param="messages", code=TOO_LONG, path=CHAT),
        Case(prompt(["Hi"] * 129), "at most 128", param="prompt"),
        Case(prompt(["Hi"] * 128, n=128), "128 answers", param="n"),
    ],
    "token ids out of range": [
        Case(prompt([1, VOCAB_SIZE]), "49152", "prompt[1]", param="prompt"),
        Case(prompt([-1]), "prompt[0]", param="prompt"),
        Case(prompt([[1], [2, 10**30]]), "prompt[1]", param="prompt[1]"),
        Case(prompt(stop_token_ids=[VOCAB_SIZE]), "49152", param="stop_token_ids"),
        Case(prompt(allowed_token_ids=[0, VOCAB_SIZE]), "49152", param="allowed_token_ids"),
        Case(prompt(logit_bias={str(VOCAB_SIZE): 1}), "49152", param="logit_bias"),
        Case({"tokens": [VOCAB_SIZE]}, "49152", param="tokens", path="/detokenize"),
    ],
    "max_tokens": [
        Case(chat(max_tokens=0), "at least 1", param="max_tokens", path=CHAT),
        Case(prompt(max_tokens=-5), "at least 0", param="max_tokens"),
        Case(prompt(max_tokens=MAX_MODEL_LEN), "8192", ": 1 too many", param="max_tokens", code=TOO_LONG),
        Case(prompt(max_tokens=2**31 - 1), "8192", param="max_tokens", code=TOO_LONG),
        Case(prompt(max_tokens=2**31), "at most", param="max_tokens"),
        Case(prompt(max_tokens=10**40), "max_tokens", param="max_tokens"),
        Case(chat(max_completion_tokens=0), "at least 1", param="max_completion_tokens", path=CHAT),
        Case(chat(max_completion_tokens=1, max_tokens=2), "differ", param="max_tokens", path=CHAT),
        Case(prompt(max_tokens=4, min_tokens=5), "'min_tokens'", param="min_tokens"),
    ],
    "body over the limit": [
        Case(prompt("a" * MAX_BODY_BYTES), "4194304", "--max-body-size", code="request_too_large", status=413),
        Case(b"\0" * 3 * MAX_BODY_BYTES, "4194304", code="request_too_large", status=413, path=CHAT),
    ],
    "wrong content type": [
        Case(prompt(), "content type 'text/plain'", JSON, content_type="text/plain"),
        Case(b"prompt=Hi", "content type 'application/x-www-form-url", JSON, content_type="application/x-www-form-urlencoded"),
        Case(chat(), "content type 'multipart/form-data", JSON, content_type="multipart/form-data; boundary=x", path=CHAT),
    ],
}


@pytest.mark.parametrize("kind", CASES)
def test_bad_requests_are_explained_and_disturb_nobody(server: RealServer, good: Answer, kind: str) -> None:
    with undisturbed(server, good), httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        for case in CASES[kind]:
            case.check(client)
        assert client.get("/ready").status_code == 200
    assert server.metric("request_success_total", finish_reason="error") == 0


def test_headers_that_make_no_sense_are_named(server: RealServer, good: Answer) -> None:
    headers = [
        ("X-Request-Id", "two words"),
        ("X-Request-Id", "a" * 129),
        ("X-Request-Id", b"\xe2\x80\xae"),
        ("X-Tenant", "a/b c"),
        ("X-Tenant", b"\xf0\x9f\xa6\x86"),
        ("X-Priority", "high"),
        ("X-Deadline-Ms", "0"),
        ("X-Deadline-Ms", b"\xd9\xa1"),
        ("X-Deadline-Ms", "9" * 5_000),
        ("X-SLO-TTFT-Ms", "fast"),
    ]
    with undisturbed(server, good), httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        for name, value in headers:
            response = client.post(COMPLETIONS, json=prompt(), headers={name: value})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, BAD, name), (name, value)
            assert name in error["message"]


def test_unicode_ids_never_reach_a_header(server: RealServer) -> None:
    for request_id in ("a\r\nX-Evil: 1", "\u202eabc", "\x00", "é", " "):
        response = httpx.post(server.url + COMPLETIONS, json=prompt(request_id=request_id), timeout=TIMEOUT_S)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "request_id"
        assert "x-evil" not in response.headers


def test_a_missed_deadline_is_408(server: RealServer, good: Answer) -> None:
    body = prompt([1] * 5_000, max_tokens=3_000, ignore_eos=True)
    with undisturbed(server, good):
        response = httpx.post(server.url + COMPLETIONS, json=body, headers={"X-Deadline-Ms": "30"}, timeout=TIMEOUT_S)
    assert response.status_code == 408
    error = response.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "can't be met" in error["message"]  # the server has measured by now how long its steps take
    assert server.metric("requests_rejected_total", reason="deadline") >= 1


def test_enormous_but_legal_parameters_are_obeyed(server: RealServer, good: Answer) -> None:
    """As much as the limits allow: they cost the client, and not the stream beside it."""
    bodies = [
        prompt(logit_bias={str(token_id): -0.5 for token_id in range(1024)}),
        prompt(allowed_token_ids=list(range(8192))),
        prompt(stop=["x" * 256] * 16),
        prompt(bad_words=[f"{i:03} words".rjust(32) for i in range(256)]),
        prompt(n=128, temperature=1),
        prompt(["Hi"] * 128),
        prompt(LONG_TEXT, truncate_prompt_tokens=5),
        prompt(metadata={str(i): "x" * 512 for i in range(16)}),
    ]
    with undisturbed(server, good), httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        for body in bodies:
            response = client.post(COMPLETIONS, json={**body, "max_tokens": 2})
            assert response.status_code == 200, response.text[:300]
            assert len(response.json()["choices"]) in (1, 128)
