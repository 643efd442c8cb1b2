"""An API is a folder and one line: what it exports is mounted, described, and spelled in its own way."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from penstock.config import ServerConfig
from penstock.serve.api import Api, Refused, Route, has_header
from penstock.serve.app import APIS, create_app
from penstock.serve.bodies import Body, parse_body
from penstock.serve.errors import ApiError, invalid
from penstock.serve.http.checks import Wording
from support.answers import AnswerCheck, find_operation
from support.deployments import deployment_of
from support.server.harness import make_runtime


class EchoBody(Body):
    say: str


class Echo(TypedDict):
    said: str
    how: Literal["softly", "loudly"]


class EchoError(TypedDict):
    oh_no: str


def echo_words(error: ApiError) -> EchoError:
    return {"oh_no": error.message}


async def echo(http) -> Echo:
    """Say something."""
    if http.query_params.get("say") is None:
        raise invalid("Nothing was said.", "say")
    return {"said": http.query_params["say"], "how": "softly"}


async def shout(data, _http):
    return JSONResponse({"said": parse_body(data, EchoBody).say.upper(), "how": "loudly"})


def routes(parts):
    return [
        Route("GET /echo", "Echo", echo, returns=Echo, query=["say"]),
        Route("GET /v1/models/{name}/echo /v1/{name}", "Echo", echo, returns=Echo, query=["say"]),
        Route("POST /echo", "Echo loudly", shout, EchoBody, Echo),
        Route("GET /version", "Echo", echo, returns=Echo, when=has_header(b"x-echo")),
        Route("POST /tokenize", "Echo loudly", shout, EchoBody, Echo, when=parts.has_field("say")),
    ]


ECHO = Api(
    "Echo",
    routes,
    Wording(echo_words, paths="/echo", client_header=b"x-echo", id_header=b"x-echo-id"),
    takes_any_type=True,
    refused=[Refused("DELETE /echo", "An echo ends by itself.")],
)


@pytest.fixture
async def client():
    runtime = make_runtime()
    app = create_app(deployment_of(runtime), ServerConfig(), apis=[*APIS, ECHO])
    hooks = {"response": [AnswerCheck(app)]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy", event_hooks=hooks) as client:
        yield client
    runtime.close()


async def test_its_routes_are_answered(client):
    assert (await client.get("/echo?say=hello")).json() == {"said": "hello", "how": "softly"}
    assert (await client.post("/echo", content=b'{"say": "hello"}')).json() == {"said": "HELLO", "how": "loudly"}


async def test_its_paths_below_another_api_s_wildcard_are_its_own(client):
    assert (await client.get("/v1/models/toy/echo?say=hello")).json() == {"said": "hello", "how": "softly"}
    assert (await client.get("/v1/models/toy")).json()["id"] == "toy"
    assert (await client.get("/v1/models")).json()["object"] == "list", "although /v1/{name} has this form, too"


def test_query_parameters_are_a_list():
    with pytest.raises(AssertionError, match="query is 'say'"):
        Route("GET /echo", "Echo", echo, query="say")


async def test_its_errors_are_spelled_as_it_says(client):
    assert (await client.get("/echo")).json() == {"oh_no": "Nothing was said."}
    assert (await client.post("/echo", json={"shout": 1})).json() == {"oh_no": "Unknown parameter: 'shout'."}
    assert (await client.put("/echo")).json()["oh_no"].startswith("PUT is not allowed")
    assert (await client.get("/nothing")).json()["error"]["code"] == "not_found"
    lost = await client.get("/nothing", headers={"X-Echo": "1"})
    assert set(lost.json()) == {"oh_no"}
    assert lost.headers["x-echo-id"] == lost.headers["x-request-id"]


async def test_it_shares_paths_by_conditions(client):
    assert set((await client.get("/version")).json()) == {"version"}
    assert (await client.get("/version?say=hi", headers={"X-Echo": "1"})).json()["said"] == "hi"
    assert (await client.post("/tokenize", json={"say": "hi"})).json()["said"] == "HI"
    assert (await client.post("/tokenize", json={"say": 1})).json() == {"oh_no": "'say' must be a string."}
    assert (await client.post("/tokenize", json={"prompt": "hi"})).json()["count"] == 2


async def test_what_it_does_not_have_is_refused_with_a_reason(client):
    refused = await client.delete("/echo")
    assert (refused.status_code, refused.json()["oh_no"]) == (
        501,
        "DELETE /echo is not supported here. An echo ends by itself.",
    )


async def test_it_is_described(client):
    document = (await client.get("/openapi.json")).json()
    told = find_operation(document, "GET", "/echo")
    assert (told["summary"], told["description"]) == ("Echo (Echo)", "Say something.")
    assert told["responses"]["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Echo"}
    errors = told["responses"]["400"]["content"]["application/json"]["schema"]["anyOf"]
    assert [one["$ref"].rpartition("/")[2] for one in errors] == ["EchoError", "Error"]
    assert set(document["components"]["schemas"]["Echo"]["required"]) == {"said", "how"}
    shared = find_operation(document, "POST", "/tokenize")
    bodies = shared["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert {"$ref": "#/components/schemas/EchoBody"} in bodies
    assert "/echo" in (await client.get("/docs")).text
