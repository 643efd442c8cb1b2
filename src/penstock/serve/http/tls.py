"""The server's certificate and key, as a context for new connections. Read at the start, and again when the files change.

A context is made anew each time and never changed, so connections that are open keep theirs.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.types.errors import ConfigError

_FLAGS = "--ssl-certfile and --ssl-keyfile"


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """A context for TLS 1.2 and later. `key`: None if it is in the certificate's file. Raises `ConfigError`."""
    for path in filter(None, (certificate, key)):
        if not Path(path).is_file():
            raise ConfigError(f"There is no file {path}.", remedy=f"Check {_FLAGS}.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except OSError as error:  # ssl.SSLError is one, too.
        remedy = f"Check {_FLAGS}: PEM files that belong together."
        raise ConfigError(f"The TLS files cannot be used: {error}.", remedy=remedy) from error
    return context


def _refuse_password() -> str:
    """Called for a key that has a password, which OpenSSL would ask for on the terminal, also when the file changes."""
    remedy = "Take the password off (`openssl pkey -in key.pem -out plain.pem`) and let only the server's user read the file."
    raise ConfigError("The TLS key has a password, which nobody could type while the server runs.", remedy=remedy)
