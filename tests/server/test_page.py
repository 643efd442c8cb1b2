"""The page at `/`: its files, without a browser. tests/page has one."""

import hashlib
import re
from pathlib import Path

import pytest

import penstock.serve
from penstock.config import ServerConfig
from penstock.serve.ops.page import PAGE_PATHS, POLICY
from penstock.serve.server import ready_text
from support.server import harness

KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
MAX_BYTES = 100_000
FOLDER = Path(penstock.serve.__file__).parent / "page"
VENDOR = "/page/vendor/"


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
async def test_each_file_has_its_type_and_its_policy(client, path):
    response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == KINDS.get(path.rpartition(".")[2], "text/html; charset=utf-8")
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert int(response.headers["content-length"]) == len(response.content) > 100


async def test_the_page_is_small_and_names_only_files_that_are_there(client):
    html = (await client.get("/")).text
    own = {path for path in PAGE_PATHS if not path.startswith(VENDOR)}
    scripts = {path: (await client.get(path)).text for path in own if path.endswith(".js")}
    named = {f"/{name}" for name in re.findall(r'(?:href|src)="([^"#]+)"', html)}
    named |= {f"/page/{name}" for text in scripts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named == own - {"/"}
    assert "<noscript>" in html
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", html)
    assert not any(re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text) for text in scripts.values())
    assert sum(len(text) for text in scripts.values()) < MAX_BYTES


def test_the_libraries_are_those_that_were_fetched():
    """`packaging/page_libraries.sh` writes them and their checksums, and keeps their licences beside them."""
    lines = (FOLDER / "vendor/checksums.txt").read_text().splitlines()
    listed = {name.removeprefix("./"): checksum for checksum, name in (line.split() for line in lines)}
    files = {str(path.relative_to(FOLDER / "vendor")): path for path in (FOLDER / "vendor").rglob("*") if path.is_file()}
    assert files.keys() == listed.keys() | {"checksums.txt"}
    assert {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in listed} == listed
    served = {path.removeprefix(VENDOR) for path in PAGE_PATHS if path.startswith(VENDOR)}
    assert served == listed.keys() - {"highlight/LICENSE", "temml/LICENSE"}
    assert sum(path.stat().st_size for path in files.values()) < 250_000


async def test_a_file_that_the_browser_has_is_not_sent_again(client):
    first = await client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await client.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await client.get("/", headers={"If-None-Match": '"other"'})).status_code == 200
    assert (await client.get("/page/chat.js")).headers["etag"] != etag


async def test_head_is_answered_and_put_is_not(client):
    assert (await client.head("/")).content == b""
    response = await client.put("/", json={})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/index.html", "/page/nope.js", "/page/../app.py", "/page/%2e%2e/app.py"]
)
async def test_no_other_path_is_a_file(client, path):
    assert (await client.get(path)).status_code == 404


async def test_the_page_needs_no_key_and_its_data_does(runtime):
    async with harness.make_client(runtime, api_keys=("secret",)) as client:
        assert {(await client.get(path)).status_code for path in PAGE_PATHS} == {200}
        for path in ("/v1/models", "/load", "/metrics", "/kv", "/v1/requests", "/page/nope.js", "http://toy//"):
            assert (await client.get(path)).status_code == 401


@pytest.mark.parametrize(("keys", "status"), [((), 404), (("secret",), 401)])
async def test_it_can_be_switched_off(runtime, keys, status):
    async with harness.make_client(runtime, page=False, api_keys=keys) as client:
        assert {(await client.get(path)).status_code for path in PAGE_PATHS} == {status}


def test_the_ready_line_names_it(live):
    assert f"{live.url} (open it in a browser" in live.ready_text
    off = ready_text(live.server._deployment, ServerConfig(page=False), live.listener)
    assert "browser" not in off


async def test_ended_requests_are_listed_on_demand(client):
    ids = [f"r{number}" for number in range(3)]
    for request_id in ids:
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": request_id})
    assert (await client.get("/v1/requests")).json()["data"] == []
    listed = (await client.get("/v1/requests?ended=2")).json()["data"]
    assert [told["id"] for told in listed] == ["r2", "r1"]
    for told in listed:
        assert told["age_ms"] >= told["choices"][0]["time_ms"]["total"] > 0
    others = await client.get("/v1/requests?ended=9", headers={"X-Tenant": "another"})
    assert others.json()["data"] == []


@pytest.mark.parametrize("number", ["-1", "x", "101", "1e1", "٣", ""])
async def test_a_wrong_number_of_ended_requests_is_told(client, number):
    response = await client.get("/v1/requests", params={"ended": number})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ended")
