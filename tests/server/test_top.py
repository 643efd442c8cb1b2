"""`penstock top`: what it shows of a live server, and of one that does not answer."""

from __future__ import annotations

import asyncio
import http.server
import io
import re
import signal
import socket
import ssl
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.cli.top import _LEAVE, Look, Snapshot, _show_live, counters, render
from penstock.config import ServerConfig
from penstock.types.errors import PenstockError
from support.server.harness import CAPACITY, GatedExecutor, make_runtime, running, until

LOAD = {
    "requests_running": 2,
    "requests_waiting": 3,
    "waiting_for": "memory",
    "sustained": {"utilisation": 0.5, "window_s": 30, "queue_delay_s": 1.25},
}
POOL = {
    "block_size": 16,
    "blocks": 41,
    "states": {"free": 10, "cached": 10, "held": 15, "shared": 5, "null": 1},
    "waste_ratio": 0.02,
    "map": [["null", 1], ["held", 10, 0], ["held", 5, 1], ["shared", 5], ["cached", 10], ["free", 10]],
    "owners": [{"request": None, "blocks": 15}, {"request": "mine", "choice": 0, "blocks": 10}],
}
CHOICE = {
    "index": 0,
    "state": "decode",
    "time_ms": {"total": 2500, "queue": 1200},
    "waited": {"for_ms": {"memory": 900.0, "rows": 300.0}},
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "prefix": {"hit_tokens": 48},
}


def snapshot(at_s: float = 0.0, **fields: object) -> Snapshot:
    known = {"load": LOAD, "pool": POOL, "requests": [{"id": "mine", "choices": [CHOICE]}], "totals": {}}
    return Snapshot(url="http://host", model="toy", at_s=at_s, **{**known, **fields})


def test_the_map_shows_each_block_while_there_is_room() -> None:
    lines = render(snapshot(), snapshot(1.0), Look(width=100))
    assert "a" * 10 + "b" * 5 + "+" * 5 + ":" * 10 + "." * 10 in lines[5]
    assert "held 38%   + shared 12%   : cached 25%   . free 25%   waste 2.0%" in lines[4]
    assert lines[1].startswith("running 2   waiting 3 for memory   50% full over the last 30 s   queue delay 1.2 s")


def test_a_cell_of_many_blocks_shows_what_is_not_free() -> None:
    pool = {**POOL, "blocks": 5001, "map": [["null", 1], ["free", 3000], ["held", 1, 0], ["free", 1999]]}
    lines = render(snapshot(), snapshot(1.0, pool=pool), Look(width=50))
    drawn = "".join(lines[5:13])
    assert len(drawn) == 400
    assert drawn.count("a") == 1


def test_rates_are_those_between_two_looks() -> None:
    before = snapshot(0.0, totals={"toy": {"penstock_generation_tokens_total": 100.0}})
    grown = {"penstock_generation_tokens_total": 300.0, "penstock_preemptions_total": 1.0}
    after = snapshot(2.0, totals={"toy": grown, "other": {"penstock_generation_tokens_total": 9000.0}})
    line = render(before, after, Look(width=100))[2]
    assert line == "per second: 100 tokens out   0 in   0.0 requests   0.5 preempted"


def test_the_share_from_the_cache_is_told_where_prompts_were_looked_up() -> None:
    looked_up = {"penstock_prefix_cache_queries_total": 200.0, "penstock_prefix_cache_hits_total": 50.0}
    line = render(snapshot(), snapshot(1.0, totals={"toy": looked_up}), Look(width=100))[2]
    assert "0 in (25% from the cache)   " in line


def test_a_model_with_adapters_has_a_line_of_them() -> None:
    load = {**LOAD, "adapters": {"running": 3, "kv_cache": 7, "memory": 12}}
    after = snapshot(2.0, load=load, totals={"toy": {"penstock_adapter_loads_total": 5.0}})
    line = render(snapshot(load=load), after, Look(width=120))[3]
    assert line == "adapters: 3 run   7 in the KV cache   12 in memory   per second: 2.5 read   0.0 put into the cache"
    assert "adapters" not in "".join(render(snapshot(), snapshot(1.0), Look(width=120)))


def test_a_request_is_marked_as_its_blocks_are() -> None:
    *_, row = render(snapshot(), snapshot(1.0), Look(width=120))
    assert " ".join(row.split()) == "b mine decode 2.5 s 1.2 s 100 48 7 memory 0.9 s, rows 0.3 s"


def test_a_row_that_is_cut_says_so() -> None:
    reasons = {"memory": 900.0, "rows": 300.0, "budget": 200.0, "fairness": 100.0}
    choice = CHOICE | {"waited": {"for_ms": reasons}}
    now = snapshot(1.0, requests=[{"id": "mine", "choices": [choice]}])
    *_, whole = render(snapshot(), now, Look(width=140))
    assert whole.endswith("memory 0.9 s, rows 0.3 s, budget 0.2 s, fairness 0.1 s")
    *_, cut = render(snapshot(), now, Look(width=90))
    assert len(cut) == 90
    assert cut.endswith("…")


def test_each_choice_is_marked_as_its_own_blocks_are() -> None:
    owners = [{"request": "mine", "choice": choice, "blocks": 10} for choice in (1, 0)]
    requests = [{"id": "mine", "choices": [CHOICE, CHOICE | {"index": 1}, CHOICE | {"index": 2}]}]
    now = snapshot(1.0, requests=requests, pool={**POOL, "owners": owners})
    assert [row[:6] for row in render(snapshot(), now, Look(width=120))[-3:]] == ["b mine", "a mine", "  mine"]


def test_who_has_requests_that_are_not_explained_is_not_told_that_there_are_none() -> None:
    lines = render(snapshot(), snapshot(1.0, requests=[]), Look(width=120))  # a block is held by one of the caller's
    assert "--explained-requests 0" in lines[-1]
    others = {**POOL, "owners": [{"request": None, "blocks": 25}]}
    assert render(snapshot(), snapshot(1.0, requests=[], pool=others), Look())[-1] == "You have no requests in flight."


@pytest.mark.parametrize("height", [8, 12, 24])
def test_it_fits_the_terminal(height: int) -> None:
    requests = [{"id": f"request-{idx}", "choices": [CHOICE]} for idx in range(50)]
    for has_colour in (False, True):
        look = Look(width=60, height=height, has_colour=has_colour)
        lines = render(snapshot(), snapshot(1.0, requests=requests), look)
        assert len(lines) <= max(height, 10)
        shown = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines]
        assert all(len(line) <= 60 for line in shown if not line.startswith("KV"))
        assert (shown[5].count("█"), "\x1b" in "".join(shown)) == ((20, False) if has_colour else (0, False))
        assert "more" in lines[-1]


def test_colour_is_for_terminals_that_have_it() -> None:
    assert "\x1b" not in "".join(render(snapshot(), snapshot(1.0), Look()))
    assert "\x1b[38;5;" in "".join(render(snapshot(), snapshot(1.0), Look(has_colour=True)))


def test_counters_are_summed_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="2 }"} 3.5\nb_count 7\nc_total 1.0\n'
    text += 'a_total{model="m",x="1"} 1.0\na_total{x="2 }",model="m"} 2.0\na_total{model="a \\"b\\" {c",x="1"} 4.0\n'
    assert counters(text) == {"": {"a_total": 5.5, "c_total": 1.0}, "m": {"a_total": 3.0}, 'a "b" {c': {"a_total": 4.0}}


def line_of(name: str, **fields: object) -> dict[str, object]:
    line = {"name": name, "state": "loaded", "requests_running": 1, "requests_waiting": 0, "requests_waiting_for_load": 0}
    return line | {"memory_bytes": {"weights": 3 << 30, "kv": 1 << 30, "tier": 0}} | fields


def test_of_several_models_each_has_a_line() -> None:
    away = line_of("a-model-with-a-name-that-is-long", state="loading", requests_waiting_for_load=3, memory_bytes={})
    fields = {"models": [line_of("toy"), away], "memory": {"limit_bytes": 8 << 30, "free_bytes": 4 << 30}}
    before = snapshot(0.0, totals={"toy": {"penstock_machine_seconds_total": 1.0}}, **fields)
    after = {"penstock_machine_seconds_total": 2.0, "penstock_generation_tokens_total": 300.0}
    lines = render(before, snapshot(2.0, totals={"toy": after}, **fields), Look(width=120))
    assert lines[4].endswith("CPU  memory, 4 GiB of 8 GiB free")
    assert lines[5].split(maxsplit=6) == ["toy", "loaded", "1", "0", "150", "50%", "4 GiB (weights 3 GiB, kv 1 GiB)"]
    assert lines[6].split() == ["a-model-with-a-name…", "loading", "1", "3", "0", "-", "-"], "no step of it took a turn"


def test_a_model_that_is_not_loaded_has_no_map() -> None:
    lines = render(snapshot(pool=None), snapshot(1.0, pool=None), Look(width=100))
    assert lines[4] == "The model is not loaded."
    assert "mine" in lines[-1]


async def test_it_shows_the_model_that_is_named() -> None:
    other = make_runtime(served_names=("org/other",), aliases=())
    try:
        with running(others=(other,)) as server:
            arguments = ["top", server.url, "--once", "--interval", "100ms", "--model"]
            shown = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "org/other"])
            assert shown.exit_code == 0, shown.exception
            assert shown.output.startswith("org/other at http")
            absent = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "absent"])
            assert "serves no absent. It serves: toy, org/other." in str(absent.exception)
    finally:
        other.close()


async def test_it_shows_a_live_server() -> None:
    gate = GatedExecutor(replace(CAPACITY, max_rows=1))
    with running(gate, config=ServerConfig(port=0, api_keys=("one",), shutdown_timeout_s=0.0)) as server:
        headers = {"Authorization": "Bearer one"}
        async with httpx.AsyncClient(base_url=server.url, timeout=20, headers=headers) as client:
            ask = {"prompt": "x" * 40, "max_tokens": 3}
            task = asyncio.create_task(client.post("/v1/completions", json=ask, headers={"X-Request-Id": "mine"}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            arguments = ["top", server.url, "--once", "--interval", "100ms"]
            shown = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--api-key", "one"])
            assert shown.exit_code == 0, shown.output
            assert "running 1   waiting 0" in shown.output
            assert "a mine                 prefill" in shown.output
            refused = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
            assert isinstance(refused.exception, PenstockError)
            assert "answered 401. Give --api-key." in str(refused.exception)
            gate.open()
            assert (await task).status_code == 200


async def test_of_several_keys_in_the_environment_it_sends_the_first() -> None:
    with running(config=ServerConfig(port=0, api_keys=("one",), shutdown_timeout_s=0.0)) as server:
        arguments = ["top", server.url, "--once", "--interval", "100ms"]
        shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments, env={"PENSTOCK_API_KEY": "one two"})
        assert shown.exit_code == 0, shown.exception


async def test_a_port_stands_for_a_server_on_this_machine() -> None:
    with running() as server:
        port = server.url.rpartition(":")[2]
        shown = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--port", port, "--once", "--interval", "100ms"])
        assert shown.exit_code == 0, shown.output
        assert f"toy at http://127.0.0.1:{port}" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "does not begin with http"),
        (["--interval", "soon"], "'soon'"),
        (["--interval", "1ms"], "less than 100ms"),
        (["http://127.0.0.1:8000", "--port", "8000"], "Give the URL or --port"),
        (["--port", "0"], "0"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["top", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_server_that_is_not_there_is_told() -> None:
    result = CliRunner().invoke(cli, ["top", "http://127.0.0.1:9", "--once"])
    assert isinstance(result.exception, PenstockError)
    assert "Is a server running there?" in str(result.exception)


def test_a_certificate_that_is_not_known_is_told_where_to_name(monkeypatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise ssl.SSLCertVerificationError(1, "self-signed certificate")

    monkeypatch.setattr("http.client.HTTPSConnection.connect", refuse)
    result = CliRunner().invoke(cli, ["top", "https://127.0.0.1:9", "--once"])
    assert isinstance(result.exception, PenstockError)
    assert "self-signed certificate" in str(result.exception)
    assert "--cafile" in str(result.exception)


class Other(http.server.BaseHTTPRequestHandler):
    """A server that is no Penstock."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def other():
    """Starts a server that answers everything alike; gives its URL."""
    servers: list[http.server.HTTPServer] = []

    def start(body: bytes) -> str:
        servers.append(http.server.HTTPServer(("127.0.0.1", 0), type("Handler", (Other,), {"body": body})))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>hello</html>", "is not JSON"),
        (b'{"data":[]}', "names no model"),
        (b"[]", "names no model"),
    ],
)
def test_a_server_that_is_no_penstock_is_told(other, body: bytes, message: str) -> None:
    result = CliRunner().invoke(cli, ["top", other(body), "--once", "--interval", "100ms"])
    assert isinstance(result.exception, PenstockError)
    assert message in str(result.exception)
    assert "Is it a Penstock server" in str(result.exception)


def test_a_server_of_another_version_is_told(monkeypatch) -> None:
    reader = SimpleNamespace(read=lambda: snapshot(load={}))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(PenstockError, match=r"can't be shown.*of this version"):
        _show_live(reader, 1.0)
    assert sys.stdout.getvalue().endswith(_LEAVE)


@pytest.mark.parametrize("key", ["", "  ", "two words", "€", "a\nb"])
def test_a_key_that_no_header_can_carry_is_told(other, key: str) -> None:
    result = CliRunner().invoke(cli, ["top", other(b"{}"), "--once", "--api-key", key])
    assert isinstance(result.exception, PenstockError)
    assert "Check --api-key" in str(result.exception)


def test_a_url_that_is_none_is_told() -> None:
    result = CliRunner().invoke(cli, ["top", "http://[", "--once"])
    assert isinstance(result.exception, PenstockError)
    assert "Write it as http://" in str(result.exception)


def test_a_port_that_speaks_no_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _address = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        result = CliRunner().invoke(cli, ["top", f"http://127.0.0.1:{listener.getsockname()[1]}", "--once"])
        thread.join(10)
    assert isinstance(result.exception, PenstockError)
    assert "can't be reached: 220 mail.example" in str(result.exception)


def test_a_termination_gives_the_terminal_back(monkeypatch) -> None:
    written = io.StringIO()
    reader = SimpleNamespace(read=snapshot)
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(time, "sleep", lambda _seconds: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        _show_live(reader, 1.0)
    assert ended.value.code == 128 + signal.SIGTERM
    assert written.getvalue().endswith(_LEAVE)
    assert signal.getsignal(signal.SIGTERM) is before
