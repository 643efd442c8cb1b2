"""Start and end of a server: the socket, the ready line, draining, signals."""

import gc
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import Server, ready_text, run_server, warn_if_open
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError
from support.deployments import deployment_of
from support.failing_executor import FailingExecutor
from support.server.harness import CAPACITY, GatedExecutor, LiveServer, make_runtime, running, until, wait_until

LONG = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "stream": True}


def test_a_taken_port_is_told_with_a_remedy():
    with bind_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} .* already in use, perhaps by another Penstock\..*--port"):
            bind_socket("127.0.0.1", port)


def test_an_unknown_address_is_told():
    with pytest.raises(ConfigError, match="--host"):
        bind_socket("no-such-host.invalid", 0)


def test_ipv6_works_where_it_exists():
    try:
        listener = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        assert listener.family == socket.AF_INET6


async def test_the_printed_curl_command_works():
    with running() as server:
        command = shlex.split(server.ready_text.splitlines()[-1])
        assert command[0] == "curl"
        url, body = command[1], command[command.index("-d") + 1]
        header = command[command.index("-H") + 1].split(": ")
        async with httpx.AsyncClient(timeout=20) as client:
            response = await client.post(url, content=body, headers=dict([header]))
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"]


def test_ready_text_suits_the_settings():
    runtime = make_runtime(chat_template=None)
    with bind_socket("127.0.0.1", 0) as listener:
        text = ready_text(deployment_of(runtime), ServerConfig(host="0.0.0.0", api_keys=("secret",)), listener)
    runtime.close()
    assert "http://127.0.0.1:" in text
    assert "every network" not in text
    assert '"temperature":0' in text
    assert "Authorization: Bearer" in text
    assert "secret" not in text
    assert "/v1/completions" in text


class FakeListener:
    """Says that it listens somewhere: no test opens a port to the network."""

    def __init__(self, address):
        self._address = address

    def getsockname(self):
        return (self._address, 8000)


@pytest.mark.parametrize(
    ("address", "settings", "warning"),
    [
        ("127.0.0.1", {}, ""),
        ("::1", {}, ""),
        ("127.0.0.1", {"api_keys": ("secret",)}, ""),
        ("0.0.0.0", {"api_keys": ("secret",), "ssl_certfile": "c.pem"}, ""),
        ("0.0.0.0", {"api_keys": ("secret",)}, "unencrypted: set --ssl-certfile"),
        ("0.0.0.0", {}, "requires no key: set --api-key"),
        ("::", {"ssl_certfile": "c.pem"}, "requires no key: set --api-key"),
        ("192.0.2.1", {}, "requires no key: set --api-key"),
        ("127.0.0.1", {"allowed_origins": ("*",)}, "any web page"),
        ("127.0.0.1", {"allowed_origins": ("*",), "api_keys": ("secret",)}, ""),
        ("127.0.0.1", {"allowed_origins": ("https://a",)}, ""),
    ],
)
def test_a_server_that_others_can_use_or_overhear_warns(address, settings, warning, caplog):
    warn_if_open(ServerConfig(**settings), FakeListener(address))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(warning)
    assert warning in caplog.text


def test_keys_that_every_user_may_read_are_told(tmp_path, caplog):
    paths = [tmp_path / name for name in ("keys", "named.toml", "digests.toml")]
    for path, text in zip(paths, ("secret", 'key = "secret2"', f'sha256 = "{"0" * 64}"'), strict=True):
        path.write_text(text if path.suffix == "" else f'[[keys]]\nname = "a"\n{text}\n')
    for mode, told in ((0o600, []), (0o640, []), (0o644, paths[:2])):
        caplog.clear()
        for path in paths:
            path.chmod(mode)
        warn_if_open(ServerConfig(api_key_file=str(paths[0]), api_keys_file=str(paths[1])), FakeListener("127.0.0.1"))
        warn_if_open(ServerConfig(api_keys_file=str(paths[2])), FakeListener("127.0.0.1"))
        assert [record.args for record in caplog.records] == [(str(path),) for path in told]


def test_ready_text_names_the_address_that_is_listened_on(runtime):
    text = ready_text(deployment_of(runtime), ServerConfig(host="0.0.0.0"), FakeListener("0.0.0.0"))
    assert "at http://127.0.0.1:8000 and on every network (0.0.0.0:8000)" in text
    assert "curl http://127.0.0.1:8000/v1/" in text


async def test_draining_finishes_what_runs_and_refuses_what_comes():
    gate = GatedExecutor()
    runtime = make_runtime(gate)
    with LiveServer(runtime, ServerConfig(port=0, shutdown_timeout_s=30.0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            gate.allow()
            async with client.stream("POST", "/v1/completions", json=LONG) as response:
                server.server.request_shutdown()
                await until(lambda: runtime.engine.state == "draining")
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 503
                refused = await client.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
                gate.open()
                text = "".join([part async for part in response.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert server.server.ended_cleanly
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
        pass


async def test_what_outlasts_the_timeout_is_told_its_end(caplog):
    caplog.set_level("INFO", logger="penstock")
    gate = GatedExecutor()
    runtime = make_runtime(gate)
    with LiveServer(runtime, ServerConfig(port=0, shutdown_timeout_s=0.01)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            gate.allow()
            async with client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 2000}) as response:
                server.server.request_shutdown()
                await until(lambda: runtime.engine._was_cut_short)
                gate.open()
                text = "".join([part async for part in response.aiter_text()])
        assert '"unavailable"' in text.rstrip().splitlines()[-1]
        assert "the server is shutting down" in text
        assert "unloaded" not in text
        assert "[DONE]" not in text
        server.stop()
        assert not server.server.ended_cleanly
    assert "shutting down: 1 request may take up to 0.01 s" in caplog.text
    assert "some requests failed, or were aborted after 0.01 s (--shutdown-timeout)" in caplog.text


async def test_an_end_without_requests_promises_no_wait(caplog):
    caplog.set_level("INFO", logger="penstock")
    with LiveServer(make_runtime(), ServerConfig(port=0)) as server:
        server.stop()
    assert [record.getMessage() for record in caplog.records if "shutting" in record.message] == ["shutting down"]


async def test_the_end_of_a_server_whose_engine_failed_before_aborts_nothing(caplog):
    runtime = make_runtime(FailingExecutor(HashExecutor(CAPACITY), fail_at_step=0))
    with LiveServer(runtime, ServerConfig(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        await until(lambda: runtime.engine.state == "failed")
    assert server.server.ended_cleanly
    assert "aborted" not in caplog.text


@pytest.mark.parametrize("when", ["stops", "closes"])
def test_a_part_that_can_not_be_closed_is_an_unclean_end(when, caplog):
    async def fail():
        raise OSError("disk full")

    with LiveServer(make_runtime(), ServerConfig(port=0)) as server:
        getattr(server.server._app.state.parts.lifetime, when).append(fail)
    assert not server.server.ended_cleanly
    assert "a part of the server failed to close cleanly" in caplog.text
    assert "were aborted" not in caplog.text


def test_run_server_returns_the_exit_code():
    runtime = make_runtime()
    ready = threading.Event()
    listener = bind_socket("127.0.0.1", 0)
    codes = []
    servers = []

    def serve():
        import penstock.serve.server as module

        class Spy(module.Server):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                servers.append(self)

        original, module.Server = module.Server, Spy
        try:
            codes.append(
                run_server(deployment_of(runtime), ServerConfig(port=0), listener=listener, announce=lambda _: ready.set())
            )
        finally:
            module.Server = original

    thresholds = gc.get_threshold()
    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(20)
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] > thresholds[0]
    servers[0].request_shutdown()
    thread.join(20)
    assert codes == [0]
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


PROGRAM = """
import asyncio, ctypes, sys
sys.path[:] = {path!r}
from support.server import harness
from penstock.config import ServerConfig
from support.deployments import deployment_of
from penstock.serve import server
from penstock.serve.server import run_server

server.has_terminal = lambda: True

def lock_twice(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    library.pthread_mutex_lock(mutex)

def loop_for_ever():
    print("stuck", flush=True)
    while True:
        pass

KINDS = {{
    "a loop in Python": loop_for_ever,
    "a call that gives up the lock": lambda: lock_twice(ctypes.CDLL(None)),
    "a call that keeps the lock": lambda: lock_twice(ctypes.PyDLL(None)),
}}

def announce(text):
    print(text, flush=True)
    if len(sys.argv) > 2:
        asyncio.get_running_loop().call_soon(KINDS[sys.argv[2]])

gate = harness.GatedExecutor()
runtime = harness.make_runtime(gate, chat_template=None)
gate.allow(int(sys.argv[1]))
code = run_server(deployment_of(runtime), ServerConfig(port=0, shutdown_timeout_s=30.0), announce=announce)
print("ended", flush=True)
sys.exit(code)
"""


@pytest.fixture
def process():
    """Starts the program with so many steps allowed, behind a prefix, and then stuck in something; kills what is left."""
    started = []

    def start(num_steps, *stuck_in, prefix=()):
        program = PROGRAM.format(path=sys.path)
        command = [*prefix, sys.executable, "-c", program, str(num_steps), *stuck_in]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        url = started[-1].stdout.readline().split(" at ")[1].split(" ")[0]
        started[-1].stdout.readline()
        return started[-1], url

    yield start
    for child in started:
        child.kill()
        child.wait(20)
        child.stdout.close()


def test_a_signal_drains_and_ends_with_0(process):
    child, url = process(10_000)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"max_tokens": 1000}, timeout=20) as response:
        child.send_signal(signal.SIGINT)
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert child.wait(20) == 0
    assert child.stdout.read() == "ended\n"


def test_a_second_signal_ends_at_once(process):
    child, url = process(1)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=20) as response:
        assert response.status_code == 200
        child.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=url, timeout=20) as client:
            while client.get("/ready").status_code == 200:
                pass
        assert end_by_another_signal(child) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("stuck_in", "first"),
    [
        ("a loop in Python", signal.SIGTERM),
        ("a call that gives up the lock", signal.SIGINT),
        ("a call that keeps the lock", signal.SIGTERM),
        ("a call that keeps the lock", signal.SIGINT),  # both, since here no Python can run that would make up for a mistake
    ],
)
def test_a_second_signal_ends_a_process_that_is_stuck(process, stuck_in, first):
    child, _ = process(1, stuck_in)
    assert child.stdout.readline() == "stuck\n"
    child.send_signal(first)
    wait_until(lambda: is_delivered(child.pid))
    assert child.poll() is None
    assert end_by_another_signal(child) == 128 + signal.SIGTERM


TWO_AT_ONCE = """
import os, signal
from penstock.serve._stop_signals import end_at_second

received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
end_at_second(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print(len(received), flush=True)
while True:
    signal.pause()
"""


def test_two_signals_at_once_are_one():
    def still_runs():
        child = subprocess.Popen([sys.executable, "-c", TWO_AT_ONCE], stdout=subprocess.PIPE, text=True)
        with child:
            said = child.stdout.readline()
            code = end_by_another_signal(child)
        assert code == 128 + signal.SIGTERM
        return said == "1\n"

    assert any(still_runs() for _ in range(5))  # a busy machine may leave a tenth of a second between the two


def end_by_another_signal(child):
    """Send SIGTERM until the process ends, since one that comes at once after the first isn't counted."""

    def has_ended():
        child.send_signal(signal.SIGTERM)
        return child.poll() is not None

    wait_until(has_ended)
    return child.returncode


def is_delivered(pid):
    """No signal that was sent to the process waits."""
    return not signals(pid, "ShdPnd")


def signals(pid, name):
    """A set of signals in the kernel's table of the process (proc(5)), as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith(name))


def test_a_hangup_drains_however_often_it_comes(process):
    child, url = process(10_000)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"max_tokens": 1000}, timeout=20) as response:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
            wait_until(lambda: is_delivered(child.pid))
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert child.wait(20) == 0
    assert child.stdout.read() == "ended\n"


def test_a_hangup_that_is_ignored_stays_so(process):
    child, url = process(10_000, prefix=("nohup",))
    assert signals(child.pid, "SigIgn") >> (signal.SIGHUP - 1) & 1
    child.send_signal(signal.SIGHUP)
    assert httpx.get(f"{url}/ready", timeout=20).status_code == 200
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0


def test_a_hangup_without_a_terminal_before_the_server_runs_does_nothing(monkeypatch):
    with bind_socket("127.0.0.1", 0) as listener, LiveServer(make_runtime(), ServerConfig(port=0)) as live:
        monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
        server = Server(live.server._deployment, ServerConfig(port=0), listener, announce=print)
        server._has_terminal = False
        server.handle_signal(signal.SIGHUP, None)


@pytest.mark.parametrize(
    "files", [{"ssl_keyfile": "key.pem"}, {"ssl_certfile": "no-such.pem"}, {"ssl_certfile": __file__, "ssl_keyfile": __file__}]
)
def test_useless_tls_files_are_refused_with_a_remedy(runtime, files):
    with bind_socket("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="--ssl-certfile"):
        run_server(deployment_of(runtime), ServerConfig(port=0, **files), listener=listener)


@pytest.mark.parametrize("kind", ["a full disk", "a closed pipe"])
def test_a_server_runs_on_and_ends_well_though_nobody_can_read_its_ready_line(kind):
    script = """
from penstock.cli.serve import exit_at_once
from penstock.serve.server import print_line
print_line("ready")
exit_at_once(0)
"""
    if kind == "a full disk":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(stdout)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("the ready message could not be written to stdout: [Errno ")


def test_importing_the_server_stays_light():
    code = "import sys, penstock.serve.server; print(sorted({name.split('.')[0] for name in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("openai", "httpx", "rich", "jinja2", "prometheus_client", "numpy", "torch"):
        assert f"'{heavy}'" not in modules, heavy
