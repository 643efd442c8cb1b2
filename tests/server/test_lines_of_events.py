"""Each event is one line, also for clients that divide lines as Unicode does."""

from penstock import fast_json
from penstock.serve.streams import whole_lines

LINE_ENDS = "a\x85b\u2028c\u2029d\n\r\x0b\x0c\x1c\x1d\x1ee"


def test_no_text_divides_an_event():
    text = f"ä{LINE_ENDS}€🧅"
    event = whole_lines(b"data: " + fast_json.dumps({"text": text}) + b"\n\n")
    assert [line for line in event.decode().splitlines() if line] == [event.decode().rstrip("\n")]
    assert fast_json.loads(event.removeprefix(b"data: ")) == {"text": text}
    assert "ä" in event.decode()


async def test_a_stream_is_read_line_by_line(client):
    body = {"prompt": LINE_ENDS, "echo": True, "max_tokens": 2, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        *events, last = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    assert last == "[DONE]"
    assert "".join(fast_json.loads(event)["choices"][0]["text"] for event in events).startswith(LINE_ENDS)
