"""Pages of other origins: who may read answers, and what a browser is told when it asks beforehand."""

import asyncio

import pytest

from penstock.config import ServerConfig
from penstock.serve.http.cors import Cors
from penstock.types.errors import ConfigError
from support.server.harness import make_client, running

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def told(response):
    """The headers of CORS that an answer has."""
    return {name[15:]: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_without_the_setting_no_origin_is_told_anything(client):
    assert told(await client.post(CHAT, json=ASK, headers={"Origin": PAGE})) == {}
    response = await client.options(CHAT, headers=PREFLIGHT)
    assert (response.status_code, told(response)) == (405, {})
    assert "vary" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_allowed_page_reads_answers_and_the_headers_that_tell_of_them(runtime, stream):
    async with make_client(runtime, allowed_origins=("https://other.example", PAGE)) as client:
        response = await client.post(CHAT, json=ASK | {"stream": stream}, headers={"Origin": PAGE})
    assert response.status_code == 200
    assert told(response) == {
        "allow-origin": PAGE,
        "allow-credentials": "true",
        "expose-headers": "X-Request-Id, Request-Id, Server-Timing, Retry-After, Retry-After-Ms, X-Should-Retry, "
        "X-Tools-Left-Out, X-Route, X-Sources, X-Check",
    }
    assert response.headers["vary"] == "Origin"


async def test_the_question_beforehand_needs_no_key_and_allows_the_headers_that_clients_have(runtime):
    async with make_client(runtime, allowed_origins=(PAGE,), api_keys=("secret",)) as client:
        response = await client.options(CHAT, headers=PREFLIGHT)
        assert (response.status_code, response.headers["content-length"]) == (200, "0")
        assert response.content == b""
        allowed = told(response)
        assert allowed["allow-origin"] == PAGE
        assert allowed["allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert set(allowed["allow-methods"].split(", ")) == {"GET", "POST", "DELETE"}
        assert response.headers["x-request-id"]
        # It opens nothing else: other questions by OPTIONS, and the request itself, need the key.
        assert (await client.options(CHAT, headers={"Origin": PAGE})).status_code == 401
        response = await client.post(CHAT, json=ASK, headers={"Origin": PAGE})
        assert response.status_code == 401
        assert told(response)["allow-origin"] == PAGE


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://page.example", "https://page.example:444", "null", PAGE + ".evil"]
)
async def test_another_origin_is_told_nothing(runtime, origin):
    async with make_client(runtime, allowed_origins=(PAGE,), api_keys=("secret",)) as client:
        for response in (
            await client.options(CHAT, headers=PREFLIGHT | {"Origin": origin}),
            await client.post(CHAT, json=ASK, headers={"Origin": origin, "Authorization": "Bearer secret"}),
            await client.get("/nope", headers={"Origin": origin}),
        ):
            assert told(response) == {}
            assert response.headers["vary"] == "Origin"


async def test_any_origin_is_without_credentials(runtime):
    async with make_client(runtime, allowed_origins=("*",)) as client:
        response = await client.post(CHAT, json=ASK, headers={"Origin": PAGE})
        assert told(response)["allow-origin"] == "*"
        assert "allow-credentials" not in told(response)
        assert "allow-credentials" not in told(await client.options(CHAT, headers=PREFLIGHT))


async def test_errors_and_refusals_are_told_to_the_page(runtime):
    async with make_client(runtime, allowed_origins=(PAGE,), max_body_bytes=1024) as client:
        for response, status in (
            (await client.get("/nope", headers={"Origin": PAGE}), 404),
            (await client.post(CHAT, json={}, headers={"Origin": PAGE}), 400),
            (await client.post(CHAT, json=ASK | {"user": "u" * 2000}, headers={"Origin": PAGE}), 413),
            (await client.get(CHAT, headers={"Origin": PAGE}), 405),
        ):
            assert (response.status_code, told(response)["allow-origin"]) == (status, PAGE)


@pytest.mark.parametrize(
    ("rest", "status"),
    [(b"X: " + b"x" * 70_000 + b"\r\n\r\n", b"431"), (b"Host: two\r\n\r\n", b"400"), (b"A: b\r\nbad header\r\n\r\n", b"400")],
)
async def test_what_the_connection_refuses_is_told_to_the_page_too(rest, status):
    config = ServerConfig(port=0, allowed_origins=(PAGE,), shutdown_timeout_s=0.0)
    with running(config=config) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nOrigin: " + PAGE.encode() + b"\r\n" + rest)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"access-control-allow-origin: " + PAGE.encode() in answer


def test_a_malformed_list_of_headers_is_not_told_back():
    asked = {b"origin": PAGE.encode(), b"access-control-request-method": b"POST", b"access-control-request-headers": b"a\x00b"}
    head = Cors([PAGE]).preflight("OPTIONS", asked)
    assert head is not None
    assert not [value for name, value in head["headers"] if name == b"access-control-allow-headers"]


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("https://Page.Example/", b"https://page.example"),
        ("http://localhost:3000", b"http://localhost:3000"),
        ("https://page.example:443", b"https://page.example"),
        ("http://[::1]:8080", b"http://[::1]:8080"),
        ("app://obsidian.md", b"app://obsidian.md"),
        ("tauri://localhost", b"tauri://localhost"),
        ("vscode-webview://1a2b", b"vscode-webview://1a2b"),
        ("chrome-extension://abcdefgh/", b"chrome-extension://abcdefgh"),
        ("safari-web-extension://0A-BC", b"safari-web-extension://0A-BC"),
    ],
)
def test_origins_are_what_browsers_make_of_them(origin, sent):
    assert (b"access-control-allow-origin", sent) in Cors([origin]).headers({b"origin": sent})


@pytest.mark.parametrize(
    ("entry", "allowed", "others"),
    [
        (
            "Page.example",
            ["https://page.example", "http://page.example", "http://page.example:3000"],
            ["https://a.page.example", "https://page.example.evil", "https://page.example@evil", "ftp://page.example", "null"],
        ),
        ("localhost:3000", ["http://localhost:3000", "https://localhost:3000"], ["http://localhost", "http://localhost:30000"]),
        ("[::1]", ["http://[::1]:8080"], ["http://[::2]"]),
    ],
)
def test_a_host_stands_for_its_origins_of_both_schemes_and_without_a_port_of_all_ports(entry, allowed, others):
    cors = Cors([entry])
    for origin in allowed:
        assert (b"access-control-allow-origin", origin.encode()) in cors.headers({b"origin": origin.encode()})
    for origin in others:
        assert cors.headers({b"origin": origin.encode()}) == [(b"vary", b"Origin")]


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "a b",
        "localhost:",
        "localhost:x",
        "*.page.example",
        "ftp://a",
        "file:///a",
        "file://a",
        "data:a",
        "a+b://",
        "https://a/b",
        "https://*.a",
        '["https://a"]',
        "https://u@a",
        "https://a:x",
    ],
)
def test_what_no_browser_sends_is_refused_with_a_remedy(origin):
    with pytest.raises(ConfigError, match="--allowed-origins"):
        Cors([origin])
