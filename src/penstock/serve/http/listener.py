"""Opens the socket that the server listens on, and computes the limit of connections.

`cli serve` uses this before it loads the model. It imports no web library, because those take time.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from pathlib import Path

from penstock.config import ServerConfig
from penstock.types.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted."""
NUM_EXTRA_CONNECTIONS = 32
"""Open connections beyond the limit, for health probes, for 503s, and while others are closing."""

_NUM_SPARE_FILES = 32
"""Files that the server may open later: weights and the disk tier, when the engine is rebuilt."""
_MAX_CONNECTIONS = 8192
"""Default of `--max-connections`. An idle connection takes 2 kB of memory, with TLS 18 kB."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients can connect and wait from now on. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"The address {host!r} is unknown: {error.strerror}.", remedy="Check --host.") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Only this claims the port: Linux lets several sockets with SO_REUSEADDR bind it until one listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard one. The usual 1024 only protects programs that call select(2)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a hard limit that it does not grant.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(config: ServerConfig) -> int:
    """Return how many connections may be busy at once. Raises `ConfigError` if the limit of open files is too low."""
    asked = config.max_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_taken = sum(1 for _ in Path("/dev/fd").iterdir()) + _NUM_SPARE_FILES + NUM_EXTRA_CONNECTIONS
    wanted = asked or 1
    if num_files != resource.RLIM_INFINITY and wanted > num_files - num_taken:
        raise ConfigError(
            f"{wanted} connections need {wanted + num_taken} open files, but the process may open only {num_files}.",
            remedy="Raise that limit (`ulimit -Hn`; LimitNOFILE= of a systemd unit), or lower --max-connections.",
        )
    if asked is not None:
        return asked
    return _MAX_CONNECTIONS if num_files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, num_files - num_taken)


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        remedy = "Stop it, or choose another port with --port (0 takes a free one)."
        return ConfigError(f"Port {port} on {host} is already in use, perhaps by another Penstock.", remedy=remedy)
    if error.errno == errno.EACCES:
        return ConfigError(f"This user is not allowed to listen on port {port}.", remedy="Choose one above 1023 with --port.")
    return ConfigError(f"The address {host}:{port} cannot be opened: {error.strerror}.", remedy="Check --host and --port.")
