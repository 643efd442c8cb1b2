"""The load generator against a socket that answers with canned bytes."""

import json
import socket
import threading

import load
import pytest
from load import Exchange, Job, LoadError, read_reply, replay, summarise

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JOB = Job("Once upon", 2, 3)


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text):
    return event({"choices": [{"text": text}]})


def usage(completion_tokens=3):
    return event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": completion_tokens}})


def chunk(payload):
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def stream(*payloads):
    return HEAD + b"".join(map(chunk, payloads)) + b"0\r\n\r\n"


GOOD = (token("a"), token('"error"'), token("é\r\n\r\n"), usage(), event(b"[DONE]"))


def exchange_of(pieces):
    """The recording as if the pieces had come one second apart."""
    exchange = Exchange.__new__(Exchange)
    exchange.start_s, exchange.pieces, exchange.times_s = 0.0, list(pieces), [float(k) for k in range(1, len(pieces) + 1)]
    return exchange


class CannedServer:
    """Answers each connection with the same bytes, `together` at a time; counts how many are open at once."""

    def __init__(self, answer, together=1):
        self.answer = answer
        self.barrier = threading.Barrier(together, timeout=30)
        self.num_open = self.max_open = 0
        self.requests = []
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            head, _, body = received.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(1 << 16)
            with self.lock:
                self.num_open += 1
                self.max_open = max(self.max_open, self.num_open)
                self.requests.append((head, json.loads(body)))
            self.barrier.wait()
            with self.lock:
                self.num_open -= 1
            connection.sendall(self.answer)


@pytest.fixture
def serve():
    servers = []

    def start(answer, together=1):
        servers.append(CannedServer(answer, together))
        return servers[-1]

    yield start
    for server in servers:
        server.listener.close()


def test_stream_is_read_wherever_the_network_cuts_it():
    answer = stream(*GOOD)
    for size in range(1, len(answer)):
        pieces = [answer[k : k + size] for k in range(0, len(answer), size)]
        reply = read_reply(exchange_of(pieces), JOB)
        assert (reply.num_tokens, reply.num_prompt_tokens) == (3, 2)
        assert reply.text == 'a"error"é\r\n\r\n'
        assert list(reply.token_times_s) == sorted(reply.token_times_s)


def test_event_has_the_time_of_the_piece_that_completed_it():
    pieces = [HEAD + chunk(GOOD[0]), chunk(GOOD[1])[:-9], chunk(GOOD[1])[-9:], b"".join(map(chunk, GOOD[2:])) + b"0\r\n\r\n"]
    assert read_reply(exchange_of(pieces), JOB).token_times_s == (1.0, 3.0, 4.0)


def test_events_may_span_chunks_and_share_them():
    text = b"".join(GOOD)
    assert read_reply(exchange_of([stream(text)]), JOB).num_tokens == 3
    assert read_reply(exchange_of([stream(*(text[k : k + 7] for k in range(0, len(text), 7)))]), JOB).num_tokens == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (stream(token("a"), usage(1), event(b"[DONE]")), "1 tokens instead of 3"),
        (stream(token("a"), event(b"[DONE]")), "None tokens"),
        (stream(token("a"), event({"error": {"message": "out of memory"}})), "out of memory"),
        (stream(*GOOD[:-1]), "broke off after 3 events"),
        (stream(*GOOD)[:-60], "broke off"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "429 Too Many"),
        (b"", "no answer"),
    ],
)
def test_reply_that_is_not_whole_is_an_error(answer, message):
    with pytest.raises(LoadError, match=message):
        read_reply(exchange_of([answer]), JOB)


def test_closed_loop_asks_every_job_once_and_in_order(serve):
    server = serve(stream(*GOOD))
    jobs = [Job(f"prompt {k}", 2, 3) for k in range(20)]
    run = replay(server.url, "m", jobs, 1)
    assert [body["prompt"] for _, body in server.requests] == [job.prompt for job in jobs]
    assert all(b"POST /v1/completions HTTP/1.1" in head for head, _ in server.requests)
    assert server.requests[0][1]["max_tokens"] == 3
    assert len(run.replies) == 20
    assert summarise(run)["output_tokens"] == 60


def test_as_many_streams_as_the_concurrency_and_no_more(serve):
    server = serve(stream(*GOOD), together=4)
    assert len(replay(server.url, "m", [JOB] * 40, 4).replies) == 40
    assert server.max_open == 4


def test_large_prompt_is_sent_whole(serve):
    server = serve(stream(*GOOD))
    prompt = "word " * 1_000_000
    replay(server.url, "m", [Job(prompt, 2, 3)], 1)
    assert server.requests[0][1]["prompt"] == prompt


def test_server_that_is_not_there_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(LoadError, match="cannot reach"):
        replay(url, "m", [JOB], 1)


def test_silent_server_is_an_error(monkeypatch):
    monkeypatch.setattr(load, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(LoadError, match="no byte"):
        replay(f"http://127.0.0.1:{listener.getsockname()[1]}", "m", [JOB], 1)


def test_figures_of_a_run_are_those_of_its_times():
    replies = [load.Reply(0.0, (1.0, 1.5, 2.5), 3, 2, "abc"), load.Reply(1.0, (2.0, 2.1, 2.2), 3, 2, "abc")]
    figures = summarise(load.Run(replies, 3.0, 0.1))
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_p50_ms"] == 1000.0
    assert figures["tpot_p99_ms"] == 750.0
    assert figures["itl_p99_ms"] == 1000.0
    assert figures["e2e_p99_ms"] == 2500.0
