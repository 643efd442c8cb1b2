"""How much memory does an idle connection take, plain and with TLS? Growth of the server's resident memory, in kB each.

    python benchmarks/idle_connections.py --connections 900

Starts `penstock serve` twice and opens the connections; the first 100 do not count, since they pay for what all share.
Needs the default model (`penstock pull`) and the command `openssl`. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from usage import resident_bytes

NUM_WARM_UP = 100
SETTLE_S = 5.0
"""Time for the engine to finish its start-up work."""
PENSTOCK = Path(sys.executable).with_name("penstock")
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def opened(port: int, context: ssl.SSLContext | None) -> socket.socket:
    """Return a connection that has had an answer. Waits for the server to start."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    if context is not None:
        connection = context.wrap_socket(connection)
    connection.sendall(ASK)
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    return connection


def bytes_each(num_connections: int, options: list[str], context: ssl.SSLContext | None) -> float:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [PENSTOCK, "serve", "smollm2:135m", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        connections = [opened(port, context) for _ in range(NUM_WARM_UP)]
        time.sleep(SETTLE_S)
        before = resident_bytes(process.pid)
        connections += [opened(port, context) for _ in range(num_connections - NUM_WARM_UP)]
        return (resident_bytes(process.pid) - before) / (num_connections - NUM_WARM_UP)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=900, help="open at the end (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="servers of each kind (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "9"]
        words += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
        subprocess.run(words, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is our own
        tls = ["--ssl-keyfile", key, "--ssl-certfile", certificate]
        for name, options, used in (("plain", [], None), ("TLS", tls, context)):
            sizes = [bytes_each(args.connections, options, used) / 1000 for _ in range(args.repeat)]
            print(f"{name}: {', '.join(f'{size:.1f}' for size in sorted(sizes))} kB for each idle connection")


if __name__ == "__main__":
    main()
