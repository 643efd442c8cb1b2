"""What `penstock top` knows of a server: asks its routes for operators. Called by the command; changes nothing there."""

from __future__ import annotations

import json
import ssl
import time
from collections import defaultdict
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from penstock.cli.top_view import Snapshot
from penstock.types.errors import PenstockError

_TIMEOUT_S = 10.0
_NO_SERVER = "Is `penstock serve` running there?"
_NOT_TRUSTED = "Name the file of its certificate in the environment variable SSL_CERT_FILE."
_OTHER_SERVER = "Is it a Penstock server, and of this version?"


class Reader:
    """Asks one server. Raises PenstockError, with a remedy, if it does not answer, or says what no Penstock says."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises PenstockError also for a URL or a key that can't be sent."""
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {_checked(api_key)}"}
        try:
            self._model = str(self._json("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise PenstockError(f"{self._url}/v1/models names no model.", remedy=_OTHER_SERVER) from error

    def read(self) -> Snapshot:
        """The server as it is now."""
        try:
            return Snapshot(
                url=self._url,
                model=self._model,
                at_s=time.monotonic(),
                load=self._json("/load"),
                pool=self._json("/kv"),
                requests=self._json("/v1/requests")["data"],
                totals=counters(self._get("/metrics").decode()),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise PenstockError(f"{self._url} says what can't be shown: {error!r}.", remedy=_OTHER_SERVER) from error

    def _json(self, path: str) -> Any:
        body = self._get(path)
        try:
            return json.loads(body)
        except ValueError as error:
            raise PenstockError(f"{self._url}{path} is no JSON.", remedy=_OTHER_SERVER) from error

    def _get(self, path: str) -> bytes:
        try:
            with urlopen(Request(self._url + path, headers=self._headers), timeout=_TIMEOUT_S) as answer:  # noqa: S310  # checked
                body: bytes = answer.read()
                return body
        except HTTPError as error:
            error.close()
            remedy = "Give --api-key." if error.code == 401 else _OTHER_SERVER
            raise PenstockError(f"{self._url}{path} answered {error.code}.", remedy=remedy) from error
        except OSError as error:
            reason = getattr(error, "reason", error)  # of a URLError, without Python's name for it
            remedy = _NOT_TRUSTED if isinstance(reason, ssl.SSLCertVerificationError) else _NO_SERVER
            raise PenstockError(f"{self._url} does not answer: {reason}.", remedy=remedy) from error
        except HTTPException as error:
            raise PenstockError(f"{self._url} does not speak HTTP: {error!r}.", remedy=_NO_SERVER) from error
        except ValueError as error:
            raise PenstockError(f"{self._url} can't be asked: {error}.", remedy="Check the URL.") from error


def counters(text: str) -> dict[str, float]:
    """Prometheus' text: series that end in _total, summed over their labels. Raises ValueError for what is none."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name.endswith("_total"):
            totals[name] += float(line.rpartition(" ")[2])
    return dict(totals)


def _checked(api_key: str) -> str:
    """Without what surrounds it: a header can carry neither spaces nor all of Unicode."""
    key = api_key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise PenstockError("The API key is empty or has characters that no key can have.", remedy="Check --api-key.")
    return key
