"""Runs the app: the socket, the ready message, signals and graceful shutdown. `cli serve` calls it.

- The first SIGTERM or SIGINT drains: new requests get a 503, running ones have the shutdown timeout to finish.
- A second one, a tenth of a second later or more, ends the process at once, whatever it is doing:
  `native/stop_signals.cpp`.
- SIGHUP reloads the TLS and key files. If the process has a terminal, SIGHUP means that the terminal was closed, and drains.
  It never counts as the second signal, because it may arrive twice, or after systemd's SIGTERM. Under `nohup` it stays
  ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import penstock
from penstock import fast_json
from penstock.config import ServerConfig
from penstock.config.keys import ApiKey, api_keys, check_never_keys, exposed_paths, key_paths, missing_never_keys
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import in_daemon
from penstock.deploy.running import RunningModel
from penstock.machine import has_terminal
from penstock.serve._stop_signals import end_at_second
from penstock.serve.api import Parts
from penstock.serve.app import create_app, key_ring
from penstock.serve.http.acceptor import Acceptor
from penstock.serve.http.connection import HttpConnection
from penstock.serve.http.cors import Cors
from penstock.serve.http.listener import bind_socket, connection_limit
from penstock.serve.http.request_log import RequestLog
from penstock.serve.http.tls import server_context
from penstock.serve.http.watch import FileWatch, Watched
from penstock.serve.tracing import Tracer, sender_of
from penstock.types.encoder import Task
from penstock.types.errors import ConfigError, counted

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FLUSH_TIMEOUT_S = 5
"""Time for the last bytes to reach clients after the engine has ended."""
READY, STOPPING = "READY=1", "STOPPING=1"
_NOTIFY_TIMEOUT_S = 1.0
_NEW_OBJECTS = 10_000
"""The garbage collector's first threshold: objects made minus objects freed. A running request has some two hundred. At 700,
Python's default, every third or fourth request of a burst triggered a useless run."""


def print_line(text: str) -> None:
    try:
        sys.stdout.write(f"{text}\n")  # `print` may write the line's end by itself, behind a line of the log
        sys.stdout.flush()
    except OSError as error:
        _log.warning("the ready message could not be written to stdout: %s", error)


def run_server(
    deployment: Deployment,
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    announce: Callable[[str], None] = print_line,
) -> int:
    """Serve until a signal comes, and close the deployment. Return the exit code: 0, or 1 if requests had to be aborted."""
    server = Server(deployment, config, listener or bind_socket(config.host, config.port), announce=announce)
    with _little_collecting():
        server.run()
    return 0 if server.ended_cleanly else 1


@contextlib.contextmanager
def _little_collecting() -> Iterator[None]:
    # All objects so far live until the end. Scanning them (above all, the default model's vocabulary) takes 30 ms, and found
    # a thousand of 150,000 to be garbage.
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Server:
    """Serves one deployment. `request_shutdown` may be called from any thread."""

    def __init__(
        self, deployment: Deployment, config: ServerConfig, listener: socket.socket, *, announce: Callable[[str], None]
    ) -> None:
        if config.ssl_keyfile and not config.ssl_certfile:
            raise ConfigError("--ssl-keyfile is set, but --ssl-certfile is not.", remedy="Set --ssl-certfile as well.")
        self._config = config
        self._watched = self._watched_files()  # before the files are read: a later change is seen
        logs = config.log_requests or config.slow_request_s is not None
        self._request_log = RequestLog(config.log_requests, config.slow_request_s) if logs else None
        sender = sender_of(config)
        self._tracer = None if sender is None else Tracer(sender, share=config.trace_sample, clock=deployment.clock)
        self._keys = key_ring(config)
        self._app = create_app(deployment, config, self._request_log, self._keys, tracer=self._tracer)
        parts: Parts = self._app.state.parts
        self._lifetime, self._upstreams = parts.lifetime, [*parts.upstreams.values()]
        self._max_connections = connection_limit(config)
        self._deployment = deployment
        self._listener = listener
        self._announce = announce
        self._has_terminal = has_terminal()
        self._tls = server_context(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
        self._watch: FileWatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()
        self.acceptor: Acceptor
        self.ended_cleanly = True

    def run(self) -> None:
        try:
            with self._handled_signals():
                # docs/notes/2026-11-20-threads.md says why the event loop is asyncio's own.
                asyncio.run(self._serve())
        finally:
            for part in (self._request_log, self._tracer):
                if part is not None:
                    part.close()

    async def _serve(self) -> None:
        self._loop, config = asyncio.get_running_loop(), self._config
        make_connection = partial(
            HttpConnection,
            self._app,
            max_body_bytes=config.max_body_bytes,
            request_log=self._request_log,
            cors=Cors(config.allowed_origins) if config.allowed_origins else None,
        )
        with self._listener:
            self.acceptor = Acceptor(
                self._listener, make_connection, max_connections=self._max_connections, ssl_context=self._tls
            )
            self._apply_key_names()
            if self._keys is not None:
                await in_daemon(partial(self._warn_of_unknown_models, self._keys.keys))
            if self._watched:
                self._watch = FileWatch(self._watched)
            warn_if_open(config, self._listener)
            self._announce(ready_text(self._deployment, config, self._listener))
            notify(READY)
            for start in self._lifetime.starts:
                start()
            await self._has_ended.wait()
            self.acceptor.close()
        if self._watch is not None:
            self._watch.close()
        await self.acceptor.drain(_FLUSH_TIMEOUT_S)
        for upstream in self._upstreams:
            await upstream.close()

    def _watched_files(self) -> list[Watched[Any]]:
        config = self._config
        found: list[Watched[Any]] = []
        if config.ssl_certfile:
            paths = [path for path in (config.ssl_certfile, config.ssl_keyfile) if path]
            read = partial(server_context, config.ssl_certfile, config.ssl_keyfile)
            found.append(Watched("the TLS certificate", paths, read=read, use=self._use_tls))
        if paths := key_paths(config):
            found.append(Watched("the file of API keys", paths, read=self._read_keys, use=self._use_keys))
        return found

    def _use_tls(self, context: ssl.SSLContext) -> None:
        self.acceptor.use_tls(context)

    def _read_keys(self) -> Sequence[ApiKey]:
        assert self._keys is not None  # a server without keys has no file of them
        keys = api_keys(self._config)
        check_never_keys(self._deployment.upstreams.values(), keys, self._keys.keys)
        self._warn_of_unknown_models(keys)
        return keys

    def _warn_of_unknown_models(self, keys: Iterable[ApiKey]) -> None:
        """Warn of names in the keys' lists that nothing has. May read the disk."""
        for key in keys:
            for name in key.models or ():
                if not self._deployment.knows(name):
                    _log.warning("the API key %s may use %r, but no model has that name yet", key.name, name)

    def _use_keys(self, keys: Sequence[ApiKey]) -> None:
        assert self._keys is not None
        for name, upstream in missing_never_keys(self._deployment.upstreams.values(), keys).items():
            words = "never_keys of the upstream %s names the API key %r, which is gone: remove the name before the next start"
            _log.warning(words, upstream, name)
        self._keys.use(keys)
        self._apply_key_names()

    def _apply_key_names(self) -> None:
        """Give the metrics the names of the API keys, and warn if the keys' priorities have no effect."""
        if not self._config.api_keys_file or self._keys is None:
            return
        for served in self._deployment.served:
            served.metrics.tenants = frozenset(key.name for key in self._keys.keys)
        # A model that is not loaded may use that policy, so without any loaded model nothing is said.
        looks = [running.model.is_priority_scheduled for running in self._deployment.running]
        if any(key.priority for key in self._keys.keys) and looks and not any(looks):
            _log.warning("the priorities of API keys have no effect on the loaded models without --policy priority")

    def reload(self) -> None:
        """Reload the TLS and key files. Thread-safe."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        if self._watch is None:
            _log.info("nothing to reload: the server uses no TLS or key files")
        else:
            self._watch.ask()

    def request_shutdown(self) -> None:
        """Begin to drain. Thread-safe and idempotent."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_shutdown)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Python calls this on the main thread between two bytecodes, so it only informs the event loop."""
        del frame
        if number == signal.SIGHUP and not self._has_terminal:
            self.reload()
        elif self._loop is None:
            os._exit(128 + number)
        else:
            self.request_shutdown()

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        handlers = {}
        if threading.current_thread() is threading.main_thread():  # Elsewhere the owner calls `request_shutdown`.
            is_hangup_heard = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            heard = (*_STOP_SIGNALS, signal.SIGHUP) if is_hangup_heard else _STOP_SIGNALS
            handlers = {number: signal.signal(number, self.handle_signal) for number in heard}
            end_at_second(*_STOP_SIGNALS)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _begin_shutdown(self) -> None:
        if self._ending is None:
            self._deployment.drain()
            for upstream in self._upstreams:
                upstream.refuse()
            notify(STOPPING)
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _call(self, ends: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Call each of these, also if one fails."""
        for end in ends:
            try:
                await end()
            except Exception:
                self.ended_cleanly = False
                _log.exception("a part of the server failed to close cleanly")

    async def _end(self) -> None:
        timeout_s = self._config.shutdown_timeout_s
        loads = [running.engine.load() for running in self._deployment.running]
        if num_requests := sum(load.num_running + load.num_waiting + load.num_background for load in loads):
            told = counted(num_requests, "request")
            _log.info("shutting down: %s may take up to %g s; a second signal ends at once", told, timeout_s)
        else:
            _log.info("shutting down")
        try:
            await self._call(self._lifetime.stops)
            # In a thread, because it blocks until the engine has ended, and answers go out meanwhile.
            ends = await asyncio.gather(
                asyncio.to_thread(self._deployment.close, timeout_s),
                *(upstream.drain(timeout_s) for upstream in self._upstreams),
            )
            if not all(ends):
                self.ended_cleanly = False
                _log.warning("some requests failed, or were aborted after %g s (--shutdown-timeout)", timeout_s)
        except Exception:
            self.ended_cleanly = False
            _log.exception("the engine failed to close cleanly")
        finally:
            await self._call(self._lifetime.closes)
            self._has_ended.set()


def notify(state: str) -> None:
    """Tell the service manager, if there is one, how far the process is: a datagram of sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_NOTIFY_TIMEOUT_S)
            sender.connect("\0" + address[1:] if address.startswith("@") else address)  # `@`: an abstract name, unix(7)
            sender.send(state.encode())
    except OSError as error:
        _log.warning("the service manager could not be notified of %s: %s", state, error)


def warn_if_open(config: ServerConfig, listener: socket.socket) -> None:
    """Log a warning if others can use the server without a key, read its traffic, or read its keys."""
    address, port = listener.getsockname()[:2]
    has_keys, is_reachable = bool(api_keys(config)), not ipaddress.ip_address(address).is_loopback
    if is_reachable and not has_keys:
        _log.warning("%s:%d can be reached from other machines and requires no key: set --api-key", address, port)
    if is_reachable and has_keys and not config.ssl_certfile:
        _log.warning(
            "%s:%d can be reached from other machines, and sends keys and texts unencrypted: set --ssl-certfile, unless a "
            "proxy in front of it terminates TLS",
            address,
            port,
        )
    for path in exposed_paths(config):
        _log.warning("every user of this machine can read the keys in %s: run `chmod o-r` on it", path)
    if "*" in config.allowed_origins and not has_keys:
        _log.warning(
            "any web page opened in a browser that can reach this server may use it: set --api-key, or list the pages' origins "
            "instead of --allowed-origins '*'"
        )


def ready_text(deployment: Deployment, config: ServerConfig, listener: socket.socket) -> str:
    """Return the text to print when the server is ready: its address, and an example command."""
    url = _base_url(config, listener)
    default = deployment.default
    name = default.name
    names = ", ".join([*[served.name for served in deployment.served], *deployment.routes, *deployment.pipelines])
    path, body = _first_request(default.running)
    prompt = fast_json.dumps({"model": name, **body}).decode()
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if api_keys(config) else ""
    page = "open it in a browser to chat and to watch; " if config.page else ""
    insecure = " -k" if config.ssl_certfile else ""
    return (
        f"Penstock {penstock.__version__} serves {names} at {url}{_reach(listener)} ({page}documentation: {url}/docs). Try:\n"
        f"  curl{insecure} {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(prompt)}"
    )


def _first_request(running: RunningModel | None) -> tuple[str, dict[str, object]]:
    """Return an example for the model: a path, and a body without `model`. Assumes chat for a model that is not loaded."""
    encoder = None if running is None else running.model.encoder
    if encoder is not None and encoder.task is Task.RERANK:
        return "/v1/rerank", {"query": "Hello!", "documents": ["Good morning.", "Goodbye."]}
    if encoder is not None:
        return "/v1/embeddings" if encoder.task is Task.EMBED else "/classify", {"input": "Hello!"}
    # At the default temperature, a small model's text looks like a bug of ours.
    if running is not None and running.chat_template is None:
        return "/v1/completions", {"prompt": "Once upon a time", "temperature": 0}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


def _reach(listener: socket.socket) -> str:
    """Return a note on the address if the server listens on all addresses of the machine, else an empty text."""
    address, port = listener.getsockname()[:2]
    return f" and on every network ({address}:{port})" if ipaddress.ip_address(address).is_unspecified else ""


def _base_url(config: ServerConfig, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}"
