"""The socket that the server listens on. Made by `cli serve` before the model is loaded; speaks no HTTP."""

from __future__ import annotations

import errno
import socket

from penstock.types.errors import ConfigError

BACKLOG = 2048
"""Connections that wait for the server."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Before the model is loaded, so that a taken port is told at once; whoever connects early, waits.

    Raises `ConfigError`.
    """
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


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        remedy = "Stop that program, or choose another with --port (0 takes a free one)."
        return ConfigError(f"Port {port} on {host} is in use by another program.", remedy=remedy)
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {port} may not be opened by this user.", remedy="Choose one above 1023 with --port.")
    return ConfigError(f"The address {host}:{port} cannot be opened: {error.strerror}.", remedy="Check --host and --port.")
