"""The id of every HTTP request: taken from `X-Request-Id` or made up, told back in every answer, errors included.

The outermost of our layers: it also turns what nobody else caught into a 500, with the cause in the log only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.headers import values_of
from penstock.serve.openai.errors import internal, invalid

_log = logging.getLogger(__name__)

ID_HEADER = b"x-request-id"
_SCOPE_KEY = "penstock.request_identity"
_VALID = re.compile(r"[\x21-\x7e]{1,128}")
_RULE = "1 to 128 printable ASCII characters without spaces"


@dataclass(slots=True)
class RequestIdentity:
    request_id: str
    is_from_header: bool

    def adopt(self, request_id: str) -> None:
        """Use the id that the body gives. Raises 400 if it is malformed, or if the header said another."""
        if not _VALID.fullmatch(request_id):
            raise invalid(f"'request_id' must be {_RULE}.", "request_id")
        if self.is_from_header and request_id != self.request_id:
            raise invalid("'request_id' and the header X-Request-Id differ; give one of them.", "request_id")
        self.request_id = request_id


def identity_of(scope: Scope) -> RequestIdentity:
    identity = scope[_SCOPE_KEY]
    assert isinstance(identity, RequestIdentity)
    return identity


class RequestIdLayer:
    def __init__(self, app: ASGIApp, new_request_id: Callable[[], str]) -> None:
        self._app = app
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value.decode("latin-1") for value in values_of(scope, ID_HEADER)]
        is_valid = len(given) == 1 and _VALID.fullmatch(given[0]) is not None
        identity = RequestIdentity(given[0] if is_valid else self._new_request_id(), is_valid)
        scope[_SCOPE_KEY] = identity
        tagged = _TaggedSend(send, identity)
        if given and not is_valid:
            rule = "was sent more than once" if len(given) > 1 else f"must be {_RULE}"
            await invalid(f"The header X-Request-Id {rule}.", "X-Request-Id").response()(scope, receive, tagged)
            return
        try:
            await self._app(scope, receive, tagged)
        except Exception:
            request_id = identity.request_id
            # Quoted: a line break in an address would begin a line of the log.
            _log.exception("request %s failed: %s %s", request_id, scope["method"], quote(scope["path"]))
            if tagged.is_started:
                raise
            await internal(request_id).response()(scope, receive, tagged)


class _TaggedSend:
    """Adds the header to the response's start; everything else passes through."""

    def __init__(self, send: Send, identity: RequestIdentity) -> None:
        self._send = send
        self._identity = identity
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            message["headers"] = [*message.get("headers", ()), (ID_HEADER, self._identity.request_id.encode())]
        await self._send(message)
