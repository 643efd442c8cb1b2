"""Helpers that `server/test_errors.py` shares with other tests."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def check(response, status, code, param=None):
    """The response is an OpenAI error object, and says this."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    assert response.headers["x-request-id"]
    return error
