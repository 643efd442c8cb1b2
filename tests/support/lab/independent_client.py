"""A second client, to check the first: raw asyncio streams, a line at a time, and nothing of Penstock's."""

import asyncio
import json
import time
from statistics import median
from urllib.parse import urlsplit


async def ask(url, model, prompt, num_tokens):
    """(seconds to the first token, to the end, from the first token to the last over the others, tokens) of one completion."""
    parts = urlsplit(url)
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first = last = counted = None
    while (line := await reader.readline()) and line != b"data: [DONE]\n":
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        counted = (event.get("usage") or {}).get("completion_tokens", counted)
        if event["choices"] and event["choices"][0]["text"]:
            first, last = first or now, now
    end = time.perf_counter()
    writer.close()
    assert counted == num_tokens, f"{counted} tokens instead of {num_tokens}"
    return first - begin, end - begin, (last - first) / max(1, num_tokens - 1), counted


async def run(url, model, asked, concurrency):
    """All of `asked`, pairs of a prompt and a number of tokens, in a closed loop."""
    left = iter(asked)
    answers = []

    async def user():
        for prompt, num_tokens in left:
            answers.append(await ask(url, model, prompt, num_tokens))

    begin = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    seconds = time.perf_counter() - begin
    ttft, e2e, tpot, tokens = zip(*answers, strict=True)
    return {
        "ttft": median(ttft),
        "e2e": median(e2e),
        "tpot": median(tpot),
        "tokens_per_s": sum(tokens) / seconds,
    }


def measure(url, model, asked, concurrency):
    return asyncio.run(run(url, model, asked, concurrency))
