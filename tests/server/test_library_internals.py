"""Attributes of uvicorn and asyncio that no documentation promises, and that `serve/http` reads or overrides.

Without them bounds on clients would be missing that no other test may notice on every platform: a new version of a library
fails here first. The remedy is to read `serve/http/connection.py` and `serve/server.py` beside the new version.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import inspect
import socket
import ssl

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.serve.http import connection
from penstock.serve.http.connection import HttpConnection
from penstock.serve.server import Server

REMEDY = "read serve/http/connection.py and serve/server.py beside the new version, or hold the library back in pyproject.toml"

PROTOCOL = ("app", "cycle", "flow", "headers", "loop", "parser", "pipeline", "server_state", "scope", "transport")
PROTOCOL += ("timeout_keep_alive", "timeout_keep_alive_task")
CYCLE = ("default_headers", "disconnected", "keep_alive", "message_event", "on_response", "response_complete")
CYCLE += ("response_started", "scope", "transport", "chunked_encoding", "flow")
FLOW = ("read_paused", "write_paused", "pause_reading", "resume_reading")


async def nothing(_scope: object, _receive: object, _send: object) -> None: ...


def named(owner: object, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"{type(owner).__qualname__} has no {', '.join(missing)} any more: {REMEDY}"


class Transport(asyncio.Transport):
    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


async def test_uvicorn_has_the_attributes_that_connections_read() -> None:
    protocol = HttpToolsProtocol(uvicorn.Config(nothing, http=HttpToolsProtocol), ServerState(), {})
    protocol.connection_made(Transport())
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
    named(protocol, (*PROTOCOL, "url"))
    named(protocol.cycle, CYCLE)
    named(protocol.flow, FLOW)
    assert isinstance(protocol.flow, FlowControl)
    named(ServerState(), ("connections", "default_headers", "tasks"))
    for task in protocol.tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(HttpConnection, HttpToolsProtocol), (Server, uvicorn.Server)], ids=["connection", "server"]
)
def test_methods_that_are_overridden_are_still_called_so(ours: type, theirs: type) -> None:
    """Methods of both classes take the same arguments, and uvicorn has none with the name of one of ours."""
    own = {"leave", "cut_off", "request_shutdown", "_begin_shutdown", "_end"}
    for name, method in vars(ours).items():
        overridden = vars(theirs).get(name)
        if inspect.isfunction(method) and overridden is not None and name != "__init__":
            given, known = inspect.signature(method).parameters, inspect.signature(overridden).parameters
            assert list(given) == list(known), f"{name} takes {list(known)} now: {REMEDY}"
            assert name not in own, f"{theirs.__qualname__} has a method {name} of its own now: rename ours"


@pytest.mark.parametrize(
    "name",
    [
        "_start_asgi_task",
        "_unset_keepalive_if_required",
        "connection_lost",
        "connection_made",
        "on_body",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "pause_writing",
        "resume_writing",
        "shutdown",
        "timeout_keep_alive_handler",
    ],
)
def test_uvicorn_has_the_methods_that_connections_extend(name: str) -> None:
    assert hasattr(HttpToolsProtocol, name), f"uvicorn's protocol has no {name} any more: {REMEDY}"


def test_uvicorn_lets_its_server_be_told_to_end_and_to_accept_nothing() -> None:
    named(uvicorn.Server(uvicorn.Config(nothing)), ("should_exit", "server_state", "handle_exit", "capture_signals"))
    assert list(inspect.signature(uvicorn.Server.startup).parameters) == ["self", "sockets"], REMEDY


def test_a_request_is_still_one_cycle_whose_app_is_started_by_one_method() -> None:
    """`HttpConnection._start_asgi_task` notes which request the app works on, to tell it that its client has left."""
    source = inspect.getsource(HttpToolsProtocol)
    assert source.count("self._start_asgi_task(") == 2, f"on a request's head, and on the end of the one before: {REMEDY}"
    assert source.count("create_task(") == inspect.getsource(HttpToolsProtocol._start_asgi_task).count("create_task("), REMEDY


async def test_the_transport_below_tls_is_found() -> None:
    """Without it, a client that does not read would never be cut off, and its bytes would not be counted."""
    protocol = asyncio.sslproto.SSLProtocol(
        asyncio.get_running_loop(), asyncio.Protocol(), ssl.create_default_context(), waiter=None, server_side=False
    )
    below = Transport()
    protocol._transport = below  # type: ignore[assignment]
    above = protocol._get_app_transport()
    above._closed = True  # else it warns that nobody has closed it
    assert connection._below_tls(above) is below, f"asyncio's TLS has other names: {REMEDY}"


async def test_a_lost_connection_is_untied_from_its_transport() -> None:
    """asyncio's transport of a socket holds a method of its own under this name. `test_no_garbage` shows what that costs."""
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        assert hasattr(transport, "_read_ready_cb"), f"asyncio's transports have other names: {REMEDY}"
        transport.close()
