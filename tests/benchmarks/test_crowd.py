"""The open loop: who is sent away comes back as told, and what is judged is what happened."""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from crowd import Client, Crowd, arrivals, own_jobs
from load import Job
from overload import judge

EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'


class Handler(BaseHTTPRequestHandler):
    """Sends every prompt away once; then one event."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if prompt not in self.server.known:
            self.server.known.add(prompt)
            self.send_response(429)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "2")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"{}")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(self.server.thinks_s)
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENT), EVENT))


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.known, server.thinks_s = set(), 0.0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address(server):
    return server.server_address


def run(address, *, returns: bool) -> tuple[list[Client], float]:
    clients = [Client(job, 0.0) for job in own_jobs([Job("hello", 1, 1)], 6)]
    crowd = Crowd("http://127.0.0.1", address, "m", returns=returns)
    return clients, crowd.run(clients, until_s=20.0)


def test_who_is_sent_away_comes_back_after_the_announced_time(address):
    clients, _ = run(address, returns=True)
    for client in clients:
        assert client.status == 200
        assert client.waits_s == [1.0]
        assert client.called_s >= client.refusals_s[0] + 1.0
        assert client.ttft_s is not None
        assert client.ttft_s < 1.0


def test_who_does_not_return_is_not_served(address):
    clients, seconds = run(address, returns=False)
    assert [client.status for client in clients] == [429] * 6
    assert all(client.first_token_s is None for client in clients)
    assert seconds < 10


def test_a_closed_loop_leaves_the_cores_to_the_server_while_it_waits(server):
    server.thinks_s = 0.2
    clients = [Client(job, 0.0) for job in own_jobs([Job("hello", 1, 1)], 4)]
    server.known.update(client.job.prompt for client in clients)
    crowd = Crowd("http://127.0.0.1", server.server_address, "m", returns=False, closed=1)
    cpu_s = time.thread_time()
    seconds = crowd.run(clients, until_s=20.0)
    assert [client.status for client in clients] == [200] * 4
    assert seconds > 0.8
    assert time.thread_time() - cpu_s < 0.05


def test_the_prompts_are_all_different():
    jobs = own_jobs([Job("a", 1, 1), Job("b", 1, 1)], 10)
    assert len({job.prompt for job in jobs}) == 10


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_arrivals_come_at_the_rate_and_as_irregularly_as_asked(cv):
    times = list(arrivals(3, 50.0, 400.0, cv))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert len(times) / 400 == pytest.approx(50, rel=0.1)
    assert variance**0.5 / mean == pytest.approx(cv, rel=0.15)


def client(*, first_token_s=None, ended_s=None, called_s=1.0, status=200, refusals=(), due_s=0.0) -> Client:
    made = Client(Job("a", 1, 1), due_s, list(refusals), [2.0] * len(refusals), called_s, first_token_s, ended_s, status)
    return made


def test_a_verdict_counts_answers_in_time_and_those_who_got_in_when_they_came_back():
    clients = [
        client(first_token_s=2.0, ended_s=8.0),
        client(first_token_s=5.0, ended_s=9.0),  # too late
        client(first_token_s=2.0, ended_s=3.0),  # while the rows were filling
        client(status=0),  # cut off after 9 s
        client(called_s=4.0, first_token_s=4.5, ended_s=8.0, refusals=[1.0], due_s=3.0),
        client(called_s=6.0, first_token_s=6.5, ended_s=8.0, refusals=[1.0, 3.5], due_s=5.5),
    ]
    args = argparse.Namespace(seconds=10.0, slo_ttft=2.0)
    verdict = judge("poisson", "door", (clients, 10.0), 1.2, args)
    assert verdict.goodput == pytest.approx(3 / 5)
    assert verdict.goodput_share == pytest.approx(0.5)
    assert verdict.ttft_p99_s == 9.0
    assert (verdict.refused, verdict.returned, verdict.returned_admitted_share) == (2, 2, 0.5)
