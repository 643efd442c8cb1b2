"""Keys that open the server, and sizes of the bodies that it takes."""

import asyncio
import http.client

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from penstock.config import ServerConfig
from penstock.config.keys import isolates_tenants, read_key_file
from penstock.serve.errors import ApiError
from penstock.serve.http.checks import KeyRing, RequestChecks, require_admin
from penstock.types.errors import ConfigError
from support.server.errors import check
from support.server.harness import make_client, running

COMPLETIONS = "/v1/completions"
ASK = {"prompt": "a", "max_tokens": 1}
BEARER = {"Authorization": "Bearer key-two"}


@pytest.fixture
async def locked(runtime):
    async with make_client(runtime, api_keys=("key-one", "key-two")) as client:
        yield client


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", ["key-one", "key-two"])
async def test_any_known_key_opens(locked, scheme, key):
    assert (await locked.post(COMPLETIONS, json=ASK, headers={"Authorization": f"{scheme} {key}"})).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer nope", "key-one", "Basic key-one", "Bearer key-on", "Bearer key-one2"]
)
async def test_others_do_not(locked, header):
    headers = {} if header is None else {"Authorization": header}
    response = await locked.post(COMPLETIONS, json=ASK, headers=headers)
    error = check(response, 401, "invalid_api_key")
    assert "key-one" not in error["message"]
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/nope", "/health/", "http://toy//health"]
)
async def test_every_route_but_health_needs_a_key(locked, path):
    assert (await locked.get(path)).status_code == 401
    assert (await locked.get(path, headers=BEARER)).status_code in (200, 404)


async def test_health_and_readiness_need_none(locked):
    assert (await locked.get("/health")).status_code == 200
    assert (await locked.get("/ready")).status_code == 200


async def test_without_keys_everything_is_open(client):
    assert (await client.post(COMPLETIONS, json=ASK)).status_code == 200


async def test_one_keys_requests_cannot_be_cancelled_with_another():
    from support.server import harness

    gate = harness.GatedExecutor()
    config = ServerConfig(port=0, api_keys=("one", "two"), shutdown_timeout_s=0.0)
    with running(gate, config=config) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            one = {"Authorization": "Bearer one", "X-Request-Id": "r", "X-Tenant": "t"}
            two = {"Authorization": "Bearer two", "X-Tenant": "t"}
            ask = asyncio.create_task(client.post(COMPLETIONS, json=ASK, headers=one))
            await harness.until(lambda: server.runtime.engine.load().num_running == 1)
            assert (await client.delete("/v1/requests/r", headers=two)).status_code == 404
            assert (await client.delete("/v1/requests/r", headers=one)).status_code == 200
            gate.open()
            check(await ask, 499, "request_cancelled")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_a_tenant_that_does_not_count_may_have_any_form(runtime):
    for trusts, status in ((False, 200), (True, 400)):
        async with make_client(runtime, api_keys=("one",), trust_tenant_header=trusts) as client:
            for sent in (["Acme Corp"], ["a", "b"]):
                headers = [("Authorization", "Bearer one"), *(("X-Tenant", name) for name in sent)]
                assert (await client.post(COMPLETIONS, json=ASK, headers=headers)).status_code == status, (trusts, sent)


@pytest.mark.parametrize(
    ("keys", "admin_keys", "headers", "status"),
    [
        ((), (), {}, 204),
        ((), (), bearer("any"), 204),
        (("user",), (), bearer("user"), 403),
        (("user",), ("admin",), {}, 401),
        (("user",), ("admin",), bearer("wrong"), 401),
        (("user",), ("admin",), bearer("user"), 403),
        (("user",), ("admin",), bearer("admin"), 204),
        (("both",), ("both",), bearer("both"), 204),
        ((), ("admin",), {}, 401),
        ((), ("admin",), bearer("wrong"), 401),
        ((), ("admin",), bearer("admin"), 204),
    ],
)
async def test_what_is_served_is_changed_by_admins_alone(keys, admin_keys, headers, status):
    async def change(request):
        require_admin(request.scope)
        return Response(status_code=204)

    async def refuse(request, error):
        return error.response()

    app = RequestChecks(
        Starlette(routes=[Route("/change", change, methods=["POST"])], exception_handlers={ApiError: refuse}),
        new_request_id=lambda: "id",
        keys=KeyRing(keys) if keys else None,
        admin_keys=KeyRing(admin_keys) if admin_keys else None,
        max_body_bytes=1024,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as client:
        response = await client.post("/change", headers=headers)
    assert response.status_code == status
    if status == 403:
        assert "--admin-api-key" in check(response, 403, "admin_key_required")["message"]


@pytest.mark.parametrize(("keys", "headers"), [(("user",), bearer("admin")), ((), {}), ((), bearer("wrong"))])
async def test_an_admins_key_opens_everything_and_closes_nothing_else(runtime, keys, headers):
    async with make_client(runtime, api_keys=keys, admin_api_keys=("admin",)) as client:
        assert (await client.post(COMPLETIONS, json=ASK, headers=headers)).status_code == 200


async def test_pages_of_other_sites_are_kept_out_beside_admin_keys(runtime):
    headers = {"Origin": "http://evil", "Content-Type": "text/plain"}
    async with make_client(runtime, admin_api_keys=("admin",)) as client:
        check(await client.post(COMPLETIONS, content=b"{}", headers=headers), 403, "cross_site_request")


def test_key_names_are_stable_and_say_nothing_about_the_key():
    first, second = KeyRing(["alpha", "beta"]), KeyRing(["beta", "alpha"])
    assert first.find(b"alpha").name == second.find(b"alpha").name != first.find(b"beta").name
    assert "alpha" not in first.find(b"alpha").name
    assert first.find(b"gamma") is None
    assert first.find("ä\x00".encode()) is None


@pytest.mark.parametrize("key", ["", " ", "\t"])
def test_a_blank_key_is_no_key(key):
    with pytest.raises(ConfigError, match="empty"):
        KeyRing(["alpha", key])


@pytest.mark.parametrize("key", [" secret", "secret\n"])
def test_a_key_that_no_client_can_send_is_refused(key):
    with pytest.raises(ConfigError, match="white space"):
        KeyRing([key])


def test_key_files_have_one_key_per_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nalpha\n\n  beta  \n")
    assert read_key_file(path) == ("alpha", "beta")


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_useless_key_files_are_refused(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_key_file(path)


async def test_body_limit_is_exact(runtime):
    body = b'{"prompt": "a"}'.ljust(2000)
    async with make_client(runtime, max_body_bytes=2000) as client:
        assert (await client.post(COMPLETIONS, content=body)).status_code == 200
        check(await client.post(COMPLETIONS, content=body + b" "), 413, "request_too_large")


async def test_bodies_without_a_length_are_counted_too(runtime):
    async def pieces():
        for _ in range(30):
            yield b" " * 100

    async with make_client(runtime, max_body_bytes=2000) as client:
        check(await client.post(COMPLETIONS, content=pieces()), 413, "request_too_large")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_is_still_sending_gets_to_read_the_refusal(is_chunked):
    body = b" " * 20_000_000
    with running(config=ServerConfig(port=0, max_body_bytes=2000, shutdown_timeout_s=0.0)) as server:
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request("POST", COMPLETIONS, iter([body]) if is_chunked else body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 413
            assert answer.headers["Connection"] == "close"
            assert b"request_too_large" in answer.read()
            connection.close()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_real_connection_is_told_and_closed(is_chunked):
    with running(config=ServerConfig(port=0, max_body_bytes=2000, shutdown_timeout_s=0.0)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 100000"
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n")
        if is_chunked:
            writer.write((b"3e8\r\n" + b" " * 1000 + b"\r\n") * 3)
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert b" 413 " in answer.split(b"\r\n")[0]
        assert b'"request_too_large"' in answer
        writer.close()


@pytest.mark.parametrize(
    "length",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
        b"Content-Length: 3\r\nContent-Length: 3000",
        b"Content-Length: 3, 3000",
        b"Content-Length: +3",
    ],
)
async def test_no_body_is_longer_than_announced(live, length):
    """The layer of the limit relies on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n"
    writer.write(head + b"bb8\r\n" + b" " * 3000 + b"\r\n0\r\n\r\n")
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_request_ids_are_told_back_in_every_answer(client):
    for method, path in [("GET", "/health"), ("GET", "/nope"), ("POST", COMPLETIONS), ("GET", COMPLETIONS)]:
        response = await client.request(method, path, headers={"X-Request-Id": "my-id"})
        assert response.headers["x-request-id"] == "my-id"
        assert (await client.request(method, path)).headers["x-request-id"].startswith("id")


async def test_an_id_that_is_sent_twice_is_told_as_that(client):
    response = await client.post(COMPLETIONS, json=ASK, headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert "was sent more than once" in check(response, 400, "invalid_request_error", "X-Request-Id")["message"]


async def test_the_bodys_request_id_is_the_answers(client):
    response = await client.post(COMPLETIONS, json=ASK | {"request_id": "mine"})
    assert response.json()["id"] == "cmpl-mine"
    assert response.headers["x-request-id"] == "mine"


async def test_two_keys_are_no_key(locked):
    """A proxy that passes the request on may look at the one, and the server at the other."""
    headers = [("Authorization", "Bearer key-one"), ("Authorization", "Bearer key-two")]
    for both in (headers, [headers[0]] * 2):
        error = check(await locked.post(COMPLETIONS, json=ASK, headers=both), 401, "invalid_api_key")
        assert "more than once" in error["message"]


@pytest.mark.parametrize("header", ["key-one", "Basic key-one", "Bearer", "Bearer ", ""])
async def test_a_header_without_a_bearers_key_is_told_how_it_should_be(locked, header):
    error = check(await locked.post(COMPLETIONS, json=ASK, headers={"Authorization": header}), 401, "invalid_api_key")
    assert "'Authorization: Bearer <key>'" in error["message"]


CROSS = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://toy:3000"},
    {"Origin": "https://example.org"},
    {"Origin": "http://toy:81"},
    {"Origin": "null"},
]
OWN = [{}, {"Sec-Fetch-Site": "same-origin", "Origin": "http://toy"}, {"Sec-Fetch-Site": "none"}, {"Origin": "http://toy"}]


async def post_typed(client, headers, content_type):
    types = {"Content-Type": content_type} if content_type else {}
    return await client.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1}', headers={**headers, **types})


@pytest.mark.parametrize("headers", CROSS)
async def test_pages_of_other_sites_cannot_post_what_needs_no_preflight(client, headers):
    for content_type in (None, "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded"):
        check(await post_typed(client, headers, content_type), 403, "cross_site_request")
    assert (await post_typed(client, headers, "Application/JSON; charset=utf-8")).status_code == 200
    assert (await client.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", OWN)
async def test_others_may_leave_the_content_type_out(client, headers):
    assert (await post_typed(client, headers, None)).status_code == 200


async def test_with_keys_other_sites_have_none(locked):
    assert (await post_typed(locked, CROSS[0] | BEARER, None)).status_code == 200
    check(await post_typed(locked, CROSS[0], None), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("sharing", "server", "expected"),
    [
        (None, ServerConfig(), False),
        (None, ServerConfig(api_keys=("a",)), False),
        (None, ServerConfig(api_keys=("a", "a")), False),
        (None, ServerConfig(api_keys=("a", "b")), True),
        (None, ServerConfig(api_keys=("a",), trust_tenant_header=True), True),
        (None, ServerConfig(api_keys=("a",), admin_api_keys=("b",)), True),
        (None, ServerConfig(admin_api_keys=("b",)), True),
        ("all", ServerConfig(api_keys=("a", "b")), False),
        ("tenant", ServerConfig(), True),
    ],
)
def test_tenants_share_no_prefixes_where_keys_tell_them_apart(sharing, server, expected):
    assert isolates_tenants(server, sharing) is expected


@pytest.mark.parametrize("origins", [("https://example.org",), ("*",)])
async def test_a_page_of_an_allowed_origin_may_post_any_type(runtime, origins):
    async with make_client(runtime, allowed_origins=origins) as client:
        headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://example.org"}
        assert (await post_typed(client, headers, None)).status_code == 200
        unnamed = headers | {"Origin": "https://evil.example"}
        assert (await post_typed(client, unnamed, None)).status_code == (200 if origins == ("*",) else 403)
