"""Requests wait here for their model to be loaded, and are read again when it is there. Nothing of them was sent before.

`app` puts `when_loaded` around every endpoint that takes a body. A request of a loaded model passes at no cost.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.deploy.served import ServedModel
from penstock.serve.http.checks import JsonEndpoint
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.read import ARRIVAL_KEY, read_terms
from penstock.types.errors import ModelAway, Rejected, RejectReason

MAX_WAITING_BYTES = 64 << 20
"""Bodies of the requests that wait for one model: sixteen of the largest."""


def when_loaded(deployment: Deployment, config: ServerConfig, answer: JsonEndpoint) -> JsonEndpoint:
    """An endpoint that answers as `answer` does, after its model was loaded if it is away."""

    async def answer_when_loaded(data: bytes, http: HttpRequest) -> Response:
        while True:
            try:
                return await answer(data, http)
            except ModelAway as away:
                served = deployment.find(away.name)
            assert served is not None, "a model that is away is one of the deployment's"
            arrival_ns = http.scope.setdefault(ARRIVAL_KEY, deployment.clock.now_ns())
            limit_ns = _limit_ns(http.scope, arrival_ns, config)
            await unless_gone(http, _loaded(deployment, served, limit_ns, len(data)))

    return answer_when_loaded


async def _loaded(deployment: Deployment, served: ServedModel, limit_ns: int, num_bytes: int) -> RunningModel:
    """The model when it is there. Raises `Rejected`: too many wait for it, or it takes longer than the request may wait.

    `num_bytes`: of the body, which waits, too.
    """
    if served.num_waiting >= served.max_waiting or served.num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
        detail = f"{served.num_waiting} requests wait for {served.name} to be loaded already"
        raise _refused(served, RejectReason.QUEUE_FULL, detail, deployment.expected_wait_s(served))
    patience_s = (limit_ns - deployment.clock.now_ns()) / 1e9
    future = deployment.want(served)  # loaded also if this request does not wait so long: others will ask
    expected_s = 0.0 if future.done() else deployment.expected_wait_s(served)
    if expected_s > patience_s:
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s)
    served.num_waiting += 1
    served.num_waiting_bytes += num_bytes
    try:
        async with asyncio.timeout(max(0.0, patience_s)):
            return await asyncio.shield(asyncio.wrap_future(future))
    except TimeoutError:
        expected_s = deployment.expected_wait_s(served)
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s) from None
    finally:
        served.num_waiting -= 1
        served.num_waiting_bytes -= num_bytes


def _limit_ns(scope: Scope, arrival_ns: int, config: ServerConfig) -> int:
    """The instant up to which a request may wait: a limit of its own, or the server's. Raises 400 for a malformed one."""
    terms = read_terms(scope, arrival_ns, config, is_priority_scheduled=True)
    limits_ns = (terms.deadline_ns, terms.queue_deadline_ns, terms.first_token_deadline_ns)
    return min([arrival_ns + int(config.load_timeout_s * 1e9), *(at_ns for at_ns in limits_ns if at_ns is not None)])


def _refused(served: ServedModel, reason: RejectReason, detail: str, retry_after_s: float) -> Rejected:
    served.metrics.count_rejected(reason)
    return Rejected(reason, detail, retry_after_s=retry_after_s)
