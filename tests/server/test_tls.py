"""TLS: files that change are read again without a connection being lost, and clients can be told what to believe."""

import asyncio
import contextlib
import http.client
import shutil
import signal
import socket
import ssl
import subprocess
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.config import ServerConfig
from penstock.lab.target import Questions, Target
from penstock.serve.http.acceptor import Acceptor
from penstock.serve.http.connection import HttpConnection
from penstock.serve.http.listener import bind_socket
from penstock.serve.http.tls import server_context
from penstock.serve.http.watch import Watched
from penstock.types.errors import ConfigError, PenstockError
from support.server.files import put
from support.server.harness import running, wait_until
from support.server.waits import set_waits


def make_certificate(folder, name="localhost", *, password=None):
    """Writes the files of a key and of its certificate, and returns their paths."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, paper = folder / "key.pem", folder / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}"]
    words += ["-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1", "-days", "9", "-keyout", key, "-out", paper]
    words += ["-noenc"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(words, check=True, capture_output=True)
    return str(key), str(paper)


@pytest.fixture
def quick(monkeypatch):
    """A server that looks at its files all the time."""
    set_waits(monkeypatch, watch_every_s=0.02)


@contextlib.contextmanager
def serving(key, paper, **more):
    config = ServerConfig(port=0, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0, **more)
    with running(config=config) as server:
        yield server


def presented(server):
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", server.port))


def text_of(path):
    return Path(path).read_text()


def test_a_new_certificate_is_for_new_connections_and_old_ones_go_on(tmp_path, quick, caplog):
    key, paper = make_certificate(tmp_path)
    with serving(key, paper) as server:
        old = text_of(paper)
        assert presented(server) == old
        trust = ssl.create_default_context(cafile=paper)
        kept = http.client.HTTPSConnection("127.0.0.1", server.port, context=trust, timeout=20)
        kept.request("GET", "/version")
        assert kept.getresponse().read()
        make_certificate(tmp_path)
        assert text_of(paper) != old
        wait_until(lambda: presented(server) == text_of(paper))
        socket = kept.sock
        kept.request("GET", "/version")
        assert kept.getresponse().read()
        assert kept.sock is socket
        kept.close()


def test_files_that_do_not_belong_together_leave_the_old_ones_in_force(tmp_path, quick, caplog):
    key, paper = make_certificate(tmp_path)
    with serving(key, paper) as server:
        old = text_of(paper)
        put(Path(paper), "no certificate\n")
        wait_until(lambda: "stays in force" in caplog.text)
        assert presented(server) == old
        assert caplog.text.count("stays in force") == 1
        make_certificate(tmp_path)
        wait_until(lambda: presented(server) == text_of(paper))


async def test_a_file_that_could_not_be_read_is_read_again_and_the_log_says_it_once(tmp_path, caplog):
    path, used = tmp_path / "keys", []
    path.write_text("old")
    cause = ["Permission denied"]

    def read():
        if cause:
            raise ConfigError(cause[0])
        return path.read_text()

    watched = Watched("the file", [str(path)], read=read, use=used.append)
    put(path, "new one")
    for _ in range(4):
        await watched.look(at_once=False)
    assert caplog.text.count("Permission denied") == 1
    await watched.look(at_once=True)
    assert caplog.text.count("Permission denied") == 2
    put(path, "newest")
    for _ in range(4):
        await watched.look(at_once=False)
    assert caplog.text.count("Permission denied") == 3
    cause[0] = "Input/output error"
    for _ in range(2):
        await watched.look(at_once=False)
    assert caplog.text.count("Input/output error") == 1
    assert not used
    cause.clear()
    for _ in range(3):
        await watched.look(at_once=False)
    assert used == ["newest"]


def test_a_hangup_without_a_terminal_reads_the_files_at_once(tmp_path, monkeypatch):
    set_waits(monkeypatch, watch_every_s=3600.0)
    key, paper = make_certificate(tmp_path)
    with serving(key, paper) as server:
        make_certificate(tmp_path)
        server.server._has_terminal = False
        server.server.handle_signal(signal.SIGHUP, None)
        wait_until(lambda: presented(server) == text_of(paper))
        assert server.runtime.engine.state.value == "ready"


def test_a_hangup_without_a_terminal_and_without_files_changes_nothing(caplog):
    caplog.set_level("INFO")
    with serving(None, None) as server:
        server.server._has_terminal = False
        server.server.handle_signal(signal.SIGHUP, None)
        wait_until(lambda: "no TLS or key files" in caplog.text)
        assert server.runtime.engine.state.value == "ready"


def test_a_hangup_drains_if_a_terminal_is_gone(tmp_path):
    with serving(*make_certificate(tmp_path)) as server:
        server.server._has_terminal = True
        server.server.handle_signal(signal.SIGHUP, None)
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path):
    key, paper = make_certificate(tmp_path, password="hidden")
    with pytest.raises(ConfigError, match="has a password"):
        server_context(paper, key)


def test_clients_believe_the_file_that_they_are_told(tmp_path):
    key, paper = make_certificate(tmp_path)
    with serving(key, paper) as server:
        url = f"https://127.0.0.1:{server.port}"
        port = str(server.port)
        for words in ([url, "--cafile", paper], [url, "--insecure"], ["--port", port, "--insecure"]):
            result = CliRunner().invoke(cli, ["top", "--once", "--interval", "100ms", *words])
            assert result.exit_code == 0, result.output
            assert "toy" in result.output
        result = CliRunner().invoke(cli, ["top", url, "--once"])
        assert "--cafile" in str(result.exception)
        with Questions(Target(url=url, tls=ssl.create_default_context(cafile=paper))) as questions:
            assert questions.model() == "toy"
        with Questions(Target(url=url)) as questions, pytest.raises(PenstockError, match="--cafile"):
            questions.model()


@pytest.mark.parametrize(("command", "answer"), [("status", "This is a single server"), ("update", "is not a cluster")])
def test_commands_of_a_cluster_take_keys_and_believe_the_file_that_they_are_told(tmp_path, command, answer):
    key, paper = make_certificate(tmp_path)
    with serving(key, paper, api_keys=("secret",), admin_api_keys=("secret",)) as server:
        words = ["cluster", command, f"https://127.0.0.1:{server.port}"]
        for more, told in (
            (["--api-key", "secret", "--insecure"], answer),
            (["--api-key", "secret", "--cafile", paper], answer),
            (["--insecure"], "401"),
            (["--api-key", "secret"], "--cafile"),
        ):
            assert told in str(CliRunner().invoke(cli, [*words, *more]).exception)


@pytest.mark.parametrize("words", [["--cafile", "CA", "--insecure"], ["--cafile", "EMPTY"]])
def test_what_nobody_can_believe_is_told(tmp_path, words):
    _, paper = make_certificate(tmp_path)
    (tmp_path / "empty").touch()
    words = [{"CA": paper, "EMPTY": str(tmp_path / "empty")}.get(word, word) for word in words]
    result = CliRunner().invoke(cli, ["top", "https://127.0.0.1:9", "--once", *words])
    assert result.exit_code in (1, 2)
    assert "--cafile" in result.output + str(result.exception)


async def test_a_half_answered_http_1_0_client_that_says_goodbye_is_reset(tmp_path):
    """A goodbye of the server would tell it that the answer is whole."""
    key, paper = make_certificate(tmp_path)

    async def half(_scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    def ask(address):
        trust = ssl.create_default_context(cafile=paper)
        with (
            socket.create_connection(address, timeout=20) as plain,
            trust.wrap_socket(plain, server_hostname="localhost") as kept,
        ):
            kept.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b""
            while not answer.endswith(b"half"):
                piece = kept.recv(1000)
                assert piece, "the server ended the connection"
                answer += piece
            with pytest.raises((ConnectionResetError, ssl.SSLSyscallError)):
                kept.unwrap()

    with bind_socket("127.0.0.1", 0) as listener:
        make_connection = partial(HttpConnection, half, max_body_bytes=1)
        acceptor = Acceptor(listener, make_connection, max_connections=1, ssl_context=server_context(paper, key))
        try:
            await asyncio.to_thread(ask, listener.getsockname())
        finally:
            acceptor.close()
