"""Asks the server in the same container for its health. Exit code 0: it is well; 1: it is not, or does not answer.

Reads the settings that name its port and its certificate from the environment, as the server does.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    scheme = "https" if os.environ.get("PENSTOCK_SSL_CERTFILE") else "http"
    port = os.environ.get("PENSTOCK_PORT", "")
    if not port or port.startswith("tcp://"):  # Kubernetes' variable of a Service called penstock
        port = "8000"
    url = f"{scheme}://127.0.0.1:{port}/health"
    context = ssl.create_default_context()
    context.check_hostname = False  # nobody is in between, and the certificate names the host that others ask
    context.verify_mode = ssl.CERT_NONE
    # Without the proxies of the environment: none of them knows this address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=TIMEOUT_S):  # the scheme is ours
            return 0
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
