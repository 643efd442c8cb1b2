"""Helpers that `server/test_responses.py` shares with other tests."""

from support.server.tools import NOW, WEATHER

PATH = "/v1/responses"

ASK = {"input": "hi", "temperature": 0, "max_output_tokens": 12}

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]

ROME = {"place": "Rome", "days": 3}


async def ask(client, expects=200, **body):
    response = await client.post(PATH, json=ASK | body)
    assert response.status_code == expects, response.text
    return response.json()
