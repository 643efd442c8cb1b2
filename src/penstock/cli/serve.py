"""`penstock serve`: binds the port, starts the models, and answers requests until a signal."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, NoReturn

import click

from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    models_argument,
    printable,
    routing_of_file,
    warn_of_unknown_variables,
)
from penstock.config import LogConfig, LogFormat, ServerConfig
from penstock.config.several import config_of_found, configs_of
from penstock.config.upstreams import UpstreamConfig
from penstock.machine import (
    address_space,
    has_gil,
    has_terminal,
    is_free_threaded,
    return_large_blocks_when_freed,
    share_one_arena,
)
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)
_STARTING_OBJECTS = 1_000_000
"""Garbage collector threshold during startup, whose objects stay. With the default, 700, collections took 0.1 of 0.8 s."""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@models_argument
@config_options("model", "kv", "lora", "scheduler", "admission", "backend", "server", "sharing", "log")
def serve(words: tuple[str, ...], tables: Sequence[Mapping[str, object]], **values: Any) -> None:
    """Answer HTTP requests for one MODEL or several: the OpenAI API, until Ctrl-C or SIGTERM."""
    outlive_hangups()
    configs = configs_of(values, words=words, tables=tables, folder=models_in(values["models_dir"]))
    config = configs[0]
    from penstock.models import catalog
    from penstock.models.cache import cache_dir
    from penstock.serve.http.listener import bind_socket, connection_limit, raise_open_files_limit

    set_up_logging(config.log)
    # Before NumPy: its threads spin after each product, on cores that the models' steps need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return_large_blocks_when_freed()
    if address_space() is not None:
        share_one_arena()  # before the first thread
    routing = routing_of_file()
    check_access(config.server, os.environ, routing.upstreams)
    raise_open_files_limit()
    connection_limit(config.server)  # raises before the model is loaded
    for one in configs:
        catalog.resolve(one.model.model, cache_dir(one.model.cache_dir))  # raises before the imports below, a second of work
    with (
        _hardly_collecting(),
        bind_socket(config.server.host, config.server.port) as listener,
        ThreadPoolExecutor(max_workers=1) as side,
    ):
        server = side.submit(import_module, "penstock.serve.server")  # importing takes as long as loading a small model
        from penstock.deploy.factory import start_deployment

        warn_of_unknown_variables()
        deployment = start_deployment(configs, partial(config_of_found, values), routing)
        warn_of_gil()
        try:
            code = server.result().run_server(deployment, config.server, listener=listener)
        finally:
            deployment.close()
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """Exit without the wait for threads that still compile a grammar or tokenize, although no request needs them."""
    with suppress(OSError):
        sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def outlive_hangups() -> None:
    """Without a terminal, do nothing at SIGHUP until the server runs: it reads the files of TLS and keys only then."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and not has_terminal():  # `nohup`
        signal.signal(signal.SIGHUP, lambda *_: None)


def warn_of_gil() -> None:
    """Warn if a free-threaded Python has its GIL on."""
    if is_free_threaded() and has_gil():
        _log.warning("this Python is free-threaded, but its GIL is on: `penstock env` says why")


@contextmanager
def _hardly_collecting() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(_STARTING_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def models_in(folder: str | None) -> list[tuple[str, str]]:
    """Return (name, path) of the models in a folder. Raises ConfigError if it has no models."""
    from penstock.models.cache import expand_home
    from penstock.models.catalog import list_folder

    if folder is None:
        return []
    try:
        found = list_folder(expand_home(folder))
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be read: {error.strerror}.", remedy="Check --models-dir.") from None
    if not found:
        remedy = "Put .gguf files or Hugging Face directories there, or leave out --models-dir."
        raise ConfigError(f"There is no model in the folder {folder}.", remedy=remedy)
    return [(source.name, str(source.path)) for source in found]


def check_access(config: ServerConfig, environ: Mapping[str, str], upstreams: Sequence[UpstreamConfig] = ()) -> None:
    """Raise ConfigError for wrong API keys, origins, certificates, hours or webhooks, before loading a model takes minutes."""
    from penstock.config.keys import api_keys, check_never_keys
    from penstock.serve.http.cors import Cors

    Cors(config.allowed_origins)
    keys = api_keys(config)
    has_keys = bool(keys)
    check_never_keys(upstreams, keys)
    for variable, is_given, effect, remedy in (
        ("PENSTOCK_API_KEY", has_keys, "would be open to everyone", "Give a key"),
        ("PENSTOCK_API_KEY_FILE", has_keys, "would be open to everyone", "Name a file"),
        ("PENSTOCK_API_KEYS_FILE", has_keys, "would be open to everyone", "Name a file"),
        ("PENSTOCK_ADMIN_API_KEY", bool(config.admin_api_keys), "would have no admin key", "Give a key"),
        ("PENSTOCK_SSL_CERTFILE", bool(config.ssl_certfile), "would speak plain HTTP", "Name a file"),
    ):
        if not is_given and variable in environ:
            raise ConfigError(f"{variable} is set, but empty: the server {effect}.", remedy=f"{remedy}, or unset it.")
    if config.ssl_keyfile and not config.ssl_certfile:
        raise ConfigError("--ssl-keyfile is set, but --ssl-certfile is not.", remedy="Set --ssl-certfile as well.")
    config.check_jobs()
    if config.jobs_dir is not None:
        from penstock.serve.jobs.runner import read_hours
        from penstock.serve.jobs.webhooks import key_of

        if config.batch_hours is not None:
            read_hours(config.batch_hours)
        if config.webhook_url is not None:
            key_of(config.webhook_url, config.webhook_secret or "")
    if config.otlp_endpoint:
        from penstock.serve.tracing import sender_of

        sender_of(config)
    if config.ssl_certfile:
        from penstock.serve.http.tls import server_context

        server_context(config.ssl_certfile, config.ssl_keyfile)


# The log: lines on stderr, as text or as one JSON object each


class JsonFormatter(logging.Formatter):
    """Formatter of log lines as JSON objects: time (ISO 8601, local with offset), level, logger, message, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        if (fields := getattr(record, "fields", None)) is not None:  # of a request
            entry |= {"message": "request"} | fields
        # Printable ASCII: clients' text can't control a terminal. `json` leaves DEL.
        return json.dumps(entry).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Formatter of log lines as text, without control characters.

    Further lines of a record, such as a traceback's, are indented: an upstream's text can't look like a record of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n  ")


MAX_LOG_LINES = 10_000
"""Most lines that wait for the reader of the log."""
_FLUSH_TIMEOUT_S = 2.0


class StderrHandler(logging.Handler):
    """Writes the log to stderr on a thread of its own: a paused reader must not block threads that log.

    Beyond `MAX_LOG_LINES`, lines are dropped and counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._thread.is_alive():  # started late, because `share_one_arena` must precede the first thread
            self._thread.start()
        if self._lines.qsize() >= MAX_LOG_LINES:
            self._num_dropped += 1
            return
        if self._num_dropped:
            message, number, self._num_dropped = "lines of the log that its reader was too slow for: %d", self._num_dropped, 0
            self._lines.put(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, (number,), None)))
        self._lines.put(self.format(record))

    def flush(self) -> None:
        """Wait briefly until earlier lines are written. Called at exit."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(_FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            data = f"{line}\n".encode(errors="backslashreplace")
            with suppress(OSError):
                while data:  # not by `sys.stderr`: its lock would be held at exit
                    data = data[os.write(2, data) :]


def set_up_logging(config: LogConfig) -> None:
    """Send all log messages of the process to stderr."""
    handler = StderrHandler()
    if config.log_format == LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root.setLevel(level)
