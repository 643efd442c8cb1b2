"""A server of completions without a model, as a program: streams as many tokens as asked for, when it was told to.

    python stub_server.py [FIRST_MS GAP_MS]

The first line printed is its port. Each event is one token; without delays a whole answer is one piece.
"""

import asyncio
import re
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = (
    b'data: {"id":"x","object":"text_completion","model":"m","choices":[{"index":0,"text":" tok","finish_reason":null}]}\n\n'
)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
MAX_TOKENS = re.compile(rb'"max_tokens": ?([0-9]+)')
LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]+)", re.IGNORECASE)


def chunk(payload):
    return b"%x\r\n%s\r\n" % (len(payload), payload)


class Stub(asyncio.Protocol):
    def __init__(self, first_s, gap_s):
        self.first_s, self.gap_s = first_s, gap_s
        self.received = b""
        self.answers = {}

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end or len(body) < int(LENGTH.search(head)[1]):
            return
        self.received = b""
        num_tokens = int(MAX_TOKENS.search(body)[1])
        if not self.first_s:
            self.transport.write(self.whole(num_tokens))
            return
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self.first_s, self.send, loop.time() + self.first_s, num_tokens, num_tokens)

    def whole(self, num_tokens):
        if num_tokens not in self.answers:
            events = [TOKEN] * num_tokens + [USAGE % num_tokens, DONE]
            self.answers[num_tokens] = HEAD + b"".join(map(chunk, events)) + END
        return self.answers[num_tokens]

    def send(self, due_s, num_left, num_tokens):
        loop = asyncio.get_running_loop()
        head = HEAD if num_left == num_tokens else b""
        if num_left > 1:
            self.transport.write(head + chunk(TOKEN))
            loop.call_at(due_s + self.gap_s, self.send, due_s + self.gap_s, num_left - 1, num_tokens)
        else:
            self.transport.write(head + chunk(TOKEN) + chunk(USAGE % num_tokens) + chunk(DONE) + END)


async def main(first_ms=0.0, gap_ms=0.0):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(first_ms / 1e3, gap_ms / 1e3), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
