"""OpenAI's newer API, `/v1/responses`: answers are stored, so that a later request can continue one."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Refused, Route
from penstock.serve.paging import LIMIT, ORDER
from penstock.serve.responses.answers import Response, ResponseEvent, ResponseForgotten, ResponseItems
from penstock.serve.responses.endpoint import ResponsesEndpoint
from penstock.serve.responses.read import NO_COMPACTION
from penstock.serve.responses.schemas import ResponsesBody
from penstock.serve.responses.store import MemoryStore


def _routes(parts: Parts) -> Sequence[Route]:
    """Return the routes with responses that are kept in memory, and in the folder of jobs if the server has one.

    A store of no bytes deletes what earlier processes kept in the folder.
    """
    config, disk = parts.config, None
    if parts.batches is not None:
        from penstock.serve.responses.durable import ResponseDisk  # with a database, which few servers need

        disk = ResponseDisk(parts.batches.store)
        parts.lifetime.closes.append(disk.close)
    store = MemoryStore(config.response_store_bytes, config.response_ttl_s, parts.deployment.clock, disk=disk)
    responses, one = ResponsesEndpoint(parts, store), "/v1/responses/{response_id}"
    parts.lifetime.starts.append(responses.go_on)
    parts.lifetime.stops.append(responses.stop)
    return [
        Route(
            "POST /v1/responses /responses",
            "Respond",
            responses.create,
            ResponsesBody,
            Response,
            ResponseEvent,
            more_statuses={409: "The response that this one follows has not ended"},
        ),
        Route(f"GET {one}", "Get a response", responses.get, returns=Response),
        Route(f"DELETE {one}", "Forget a response", responses.delete, returns=ResponseForgotten),
        Route(f"POST {one}/cancel", "Cancel a response", responses.cancel, returns=Response),
        Route(
            f"GET {one}/input_items",
            "List a question",
            responses.input_items,
            returns=ResponseItems,
            query=["after", LIMIT, ORDER],
        ),
    ]


API = Api("OpenAI", _routes, refused=[Refused("POST /v1/responses/compact", NO_COMPACTION, code="not_supported")])
