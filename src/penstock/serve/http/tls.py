"""TLS: the server's certificate and key as a context, and one connection's encryption.

The server makes a new context when the files change. Open connections keep theirs.
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from penstock.types.errors import ConfigError

_FLAGS = "--ssl-certfile and --ssl-keyfile"


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later. `key`: None if the certificate's file contains the key. Raises `ConfigError`."""
    for path in filter(None, (certificate, key)):
        if not Path(path).is_file():
            raise ConfigError(f"There is no file {path}.", remedy=f"Check {_FLAGS}.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except OSError as error:  # ssl.SSLError is a subclass
        remedy = f"Check {_FLAGS}: PEM files that belong together."
        raise ConfigError(f"The TLS files cannot be used: {error}.", remedy=remedy) from error
    return context


def _refuse_password() -> str:
    """Raise `ConfigError`. OpenSSL calls this for a key with a password, instead of asking on the terminal."""
    remedy = "Take the password off (`openssl pkey -in key.pem -out plain.pem`) and let only the server's user read the file."
    raise ConfigError("The TLS key has a password, which nobody could type while the server runs.", remedy=remedy)


class Encryption:
    """The server's side of one TLS connection, in memory. The caller reads and writes the socket.

    After each `decrypt`, the caller must send the result of `encrypt(b"")`: a part of the handshake, or an alert.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._is_ready = False
        self.is_over = False
        """Whether the client has closed TLS, or broken the protocol."""

    def decrypt(self, data: bytes) -> bytes:
        """Return the decrypted bytes, which may be empty until a record is complete."""
        self._received.write(data)
        pieces = []
        try:
            if not self._is_ready:
                self._tls.do_handshake()
                self._is_ready = True
            while piece := self._tls.read(1 << 16):
                pieces.append(piece)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.is_over = True
        return b"".join(pieces)

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send: pending ones of the protocol, then `data` encrypted."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        return self._to_send.read()

    def farewell(self) -> bytes:
        """Return the bytes that end the connection. Nothing can be encrypted afterwards."""
        with contextlib.suppress(ssl.SSLError):  # It wants the client's farewell, or the handshake was not complete.
            self._tls.unwrap()
        return self._to_send.read()
