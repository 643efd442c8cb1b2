"""Files: OpenAI's API, quotas and owners, and forms of every kind of brokenness, after which nothing is left on the disk."""

import asyncio
import errno
import json
import os
import socket
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import StreamingResponse

from penstock.jobs import store
from penstock.serve.errors import ApiError
from penstock.serve.jobs import files as module
from penstock.serve.jobs.form import Form
from penstock.types.request import Owner
from support.failing_disk import open_files
from support.server.harness import make_client, make_runtime, wait_until
from support.server.jobs import begun, impatient, line, serving
from support.work_time import thread_s

FILES = "/v1/files"
BOUNDARY = "XyZ"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("jobs"), jobs_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def client(jobs):
    with jobs.client() as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
        assert left(jobs) == []


def left(server) -> list[str]:
    return [path.name for path in (Path(server.config.jobs_dir) / "files").iterdir()]


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes, end=True) -> bytes:
    return b"".join(parts) + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


PURPOSE, FILE = part("purpose", b"batch"), part("file", b"{}", '; filename="a.jsonl"')


def test_a_file_is_uploaded_described_read_and_deleted(client):
    file = client.files.create(file=("in.jsonl", b"hello\n\xff"), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (7, "in.jsonl", "batch", "file")
    assert (file.expires_at, file.status) == (None, "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"hello\n\xff"
    assert client.files.delete(file.id).deleted
    for again in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            again(file.id)


def test_files_are_listed_by_pages_in_both_orders_and_by_purpose(client):
    made = [client.files.create(file=(f"{nth}", b"x"), purpose="batch") for nth in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in made[::-1]]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == [file.id for file in made]
    page = client.files.list(limit=2, after=made[3].id)
    assert ([file.id for file in page.data], page.has_more) == ([made[2].id, made[1].id], True)
    assert client.files.list(purpose="batch_output").data == []
    assert len(client.files.list(purpose="batch").data) == 5
    for wrong in ({"order": "up"}, *({"limit": limit} for limit in (0, 10_001, "x", "1.0", "1_0", " 5"))):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-nothing")


def test_a_file_expires(jobs, client, monkeypatch):
    file = client.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    jobs.batches.store.expire(file.expires_at - 1)
    assert client.files.retrieve(file.id) == file
    jobs.batches.store.expire(file.expires_at)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    for seconds in (3599, 2592001, -1, "1e4"):
        with pytest.raises(openai.BadRequestError, match="seconds"):
            client.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds})
    with pytest.raises(openai.BadRequestError, match="anchor"):
        client.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "now", "seconds": 3600})


def test_other_purposes_are_refused(client):
    for purpose in ("fine-tune", "assistants", ""):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a", b"x"), purpose=purpose)


def test_a_key_has_a_quota(client):
    first = client.files.create(file=("a", b"x" * 900_000), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="Delete files") as refused:
        client.files.create(file=("b", b"x" * 200_000), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="--jobs-bytes") as refused:
        client.files.create(file=("b", b"x" * 2_000_000), purpose="batch")
    assert refused.value.status_code == 413
    client.files.delete(first.id)
    client.files.create(file=("b", b"x" * 900_000), purpose="batch")


def test_a_batch_for_whose_answers_there_is_no_room_is_not_to_be_tried_again(client, monkeypatch):
    monkeypatch.setattr(store, "MAX_FILES", 1)
    file = client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="1 files already") as refused:
        client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    headers = refused.value.response.headers
    assert ("retry-after" in headers, headers["x-should-retry"]) == (False, "false")


def test_a_large_file_is_written_as_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WRITTEN_AT_ONCE", 10_000)
    with serving(tmp_path) as server, server.client() as client:
        data = bytes(range(256)) * 4000
        file = client.files.create(file=("a", data), purpose="batch")
        assert client.files.content(file.id).read() == data


async def test_without_a_folder_there_are_no_files():
    runtime = make_runtime()
    async with make_client(runtime) as client:
        for path in (FILES, "/v1/batches", f"{FILES}/x", f"{FILES}/x/content", "/v1/batches/x"):
            answer = await client.get(path)
            assert (answer.status_code, "--jobs-dir" in answer.text) == (501, True)
            assert answer.headers["x-should-retry"] == "false"  # OpenAI's client would send a file again
        assert (await client.post(FILES, content=form(PURPOSE, FILE), headers=FORM)).status_code == 501
    runtime.close()


def test_keys_see_only_their_own(tmp_path):
    with serving(tmp_path, api_keys=("ann", "bob"), admin_api_keys=("root",)) as server:
        with server.client("ann") as ann, server.client("bob") as bob, server.client("root") as root:
            file = ann.files.create(file=("a", b"x"), purpose="batch")
            for other in (bob, root):
                assert other.files.list().data == []
                for ask in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        ask(file.id)
                with pytest.raises(openai.NotFoundError):
                    other.files.list(after=file.id)
                with pytest.raises(openai.NotFoundError):
                    other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            assert ann.files.list().data == [file]
        with server.client("eve") as eve, pytest.raises(openai.AuthenticationError):
            eve.files.list()


def test_tenants_without_keys_see_only_their_own_and_share_a_quota(tmp_path):
    with serving(tmp_path, jobs_bytes=2000) as server:
        clients = [server.client(default_headers={"X-Tenant": name}) for name in ("ann", "bob")]
        file = clients[0].files.create(file=("a", b"x" * 1000), purpose="batch")
        assert [len(client.files.list().data) for client in clients] == [1, 0]
        with pytest.raises(openai.APIStatusError, match="--jobs-bytes"):
            clients[1].files.create(file=("a", b"x" * 1500), purpose="batch")
        assert clients[0].files.retrieve(file.id) == file
        for client in clients:
            client.close()


def test_a_file_that_a_batch_reads_is_kept(tmp_path, gate, monkeypatch):
    impatient(monkeypatch)
    with serving(tmp_path, gate) as server, server.client() as client:
        batch = begun(client, [line("a")])
        with pytest.raises(openai.ConflictError, match="Cancel that first") as refused:
            client.files.delete(batch.input_file_id)
        assert refused.value.response.headers["x-should-retry"] == "false"
        client.batches.cancel(batch.id)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        assert client.files.delete(batch.input_file_id).deleted


async def test_a_file_that_vanishes_while_it_is_asked_for_is_not_found(tmp_path):
    with serving(tmp_path) as server, server.client() as client:
        file = client.files.create(file=("a", b"x"), purpose="batch")
        server.batches.store.content(file.id).unlink()
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


BROKEN = {
    "nothing": b"",
    "no boundary": b"hello",
    "another boundary": form(PURPOSE, FILE).replace(b"XyZ", b"AbC"),
    "no end": form(PURPOSE, FILE, end=False),
    "cut in a header": form(PURPOSE, FILE)[:-60],
    "cut in the end": form(PURPOSE, FILE)[:-3],
    "no file": form(PURPOSE),
    "no purpose": form(FILE),
    "no parts": form(),
    "two files": form(PURPOSE, FILE, FILE),
    "a part without a head": form(PURPOSE, FILE, f"--{BOUNDARY}\r\n\r\nx\r\n".encode()),
    "a part without a name": form(PURPOSE, FILE, part("", b"x")),
    "an unknown field": form(PURPOSE, FILE, part("colour", b"red")),
    "a huge field": form(part("purpose", b"x" * 5000), FILE),
    "many fields": form(*[part(f"f{nth}", b"x") for nth in range(50)], FILE),
    "many parts of one name": form(*[PURPOSE] * 50, FILE),
    "many headers": form(PURPOSE, f"--{BOUNDARY}\r\n".encode() + b"X-A: b\r\n" * 50 + b"\r\nx\r\n", FILE),
    "a huge header": form(PURPOSE, part("file", b"x", f'; filename="{"a" * 10_000}"')),
    "a parameter twice": form(PURPOSE, part("file", b"x", "; filename*=a; filename*0=b")),
    "a header that is none": form(PURPOSE, f"--{BOUNDARY}\r\nhello\r\n\r\nx\r\n".encode()),
    "an expiry that is none": form(
        PURPOSE, FILE, part("expires_after[seconds]", b"\xff"), part("expires_after[anchor]", b"created_at")
    ),
    "half an expiry": form(PURPOSE, FILE, part("expires_after[seconds]", b"3600")),
    "a boundary within the file": form(PURPOSE, part("file", f"x\r\n--{BOUNDARY}\r\ny".encode(), '; filename="a"')),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("at_once", [1 << 20, 1])
def test_a_broken_form_is_refused_and_leaves_nothing(jobs, client, data, at_once):
    pieces = (data[nth : nth + at_once] for nth in range(0, len(data), at_once)) if len(data) < 600 else data
    answer = httpx.post(f"{jobs.url}{FILES}", content=pieces, headers=FORM, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    wait_until(lambda: left(jobs) == [])
    assert client.files.list().data == []


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data;boundary",
        f"multipart/form-data; boundary={'x' * 300}",
        "multipart/mixed; boundary=XyZ",
        "multipart/form-data; boundary*=XyZ; boundary*0=a",
        "\xff",
    ],
)
def test_another_type_of_body_is_refused(jobs, client, kind):
    answer = httpx.post(f"{jobs.url}{FILES}", content=form(PURPOSE, FILE), headers={"Content-Type": kind.encode("latin-1")})
    assert (answer.status_code, "form" in answer.text) == (400, True)


def test_a_long_content_type_takes_no_long_time():
    """Within the limit for headers. The standard library takes seconds for all of it."""

    def read():
        with pytest.raises(ApiError):
            Form('multipart/form-data; boundary="' + 60_000 * ";")

    assert thread_s(read) < 0.5


@pytest.mark.parametrize(
    "name",
    ["a\\\\b", "../../etc/passwd", "%00", "a\nb", "%0d%0aX-A: b", "ü".encode().decode("latin-1"), "\xff", "", "x" * 3000],
)
def test_any_name_is_only_a_name(jobs, client, name):
    data = form(PURPOSE, part("file", b"x", "; filename=@").replace(b"@", b'"' + name.encode("latin-1") + b'"'))
    answer = httpx.post(f"{jobs.url}{FILES}", content=data, headers=FORM)
    assert answer.status_code == 200, answer.text
    file = client.files.retrieve(answer.json()["id"])
    assert len(file.filename) <= 255
    content = httpx.get(f"{jobs.url}{FILES}/{file.id}/content")
    assert (content.content, "x-a" in content.headers, "content-disposition" in content.headers) == (b"x", False, False)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("UTF-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("UTF-8''na%EFve.jsonl", "na\ufffdve.jsonl"),
        ("unicode-escape''%5Cud800", "\\ud800"),
        ("a%00b''a", "a"),
    ],
)
def test_a_percent_encoded_name_is_read_as_utf_8(client, jobs, word, name):
    data = form(PURPOSE, part("file", b"x", f"; filename*={word}"))
    assert httpx.post(f"{jobs.url}{FILES}", content=data, headers=FORM).json()["filename"] == name


@pytest.mark.parametrize("wanted", ["bytes=abc", "bytes=9999999-", "bytes=1-2", "lines=1-2"])
def test_a_content_is_returned_whole_whatever_range_is_asked_for(client, jobs, wanted):
    file = client.files.create(file=("a", b"hello"), purpose="batch")
    answer = httpx.get(f"{jobs.url}{FILES}/{file.id}/content", headers={"Range": wanted})
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"hello", "5")


def test_the_size_of_a_content_is_told_without_reading_it(client, jobs):
    file = client.files.create(file=("a", b"hello"), purpose="batch")
    os.truncate(Path(jobs.config.jobs_dir) / "files" / file.id, 1 << 40)
    with httpx.Client(base_url=jobs.url, timeout=5) as http:
        head = http.head(f"{FILES}/{file.id}/content")
        assert (head.content, head.headers["content-length"]) == (b"", str(1 << 40))
        assert http.get(f"{FILES}/{file.id}").status_code == 200  # on the same connection


def test_a_file_that_is_deleted_while_it_is_read_is_returned_whole(client, jobs, monkeypatch):
    file = client.files.create(file=("a", b"hello"), purpose="batch")

    def deleting(*given, **fields):
        (Path(jobs.config.jobs_dir) / "files" / file.id).unlink()
        return StreamingResponse(*given, **fields)

    monkeypatch.setattr(module, "StreamingResponse", deleting)
    assert client.files.content(file.id).content == b"hello"


@pytest.mark.parametrize(
    "wrong", ["..", "%2e%2e%2fjobs.db", "%00", "%ff", "%ed%a0%80", "file-" + "0" * 32, "x" * 5000, "a%0d%0aX-A:%20b"]
)
def test_any_id_is_only_an_id(jobs, client, wrong):
    for method, path in [
        ("GET", f"{FILES}/{wrong}"),
        ("GET", f"{FILES}/{wrong}/content"),
        ("DELETE", f"{FILES}/{wrong}"),
        ("GET", f"{FILES}?after={wrong}"),
        ("GET", f"{FILES}?purpose={wrong}&limit=1"),
        ("GET", f"/v1/batches/{wrong}"),
        ("POST", f"/v1/batches/{wrong}/cancel"),
        ("GET", f"/v1/batches?after={wrong}"),
    ]:
        answer = httpx.request(method, f"{jobs.url}{path}")
        assert answer.status_code in (200, 404, 405), (method, path, answer.text)
        assert "x-a" not in answer.headers


TOKENS = [
    b"\r\n",
    b"--",
    BOUNDARY.encode(),
    PURPOSE,
    FILE,
    b"--XyZ--\r\n",
    b"--XyZ\r\n",
    b"\r\n\r\n",
    b"Content-Disposition: form-data; ",
]
TOKENS += [b'name="file"', b'name="purpose"', b'; filename="a"', b"batch", b"\x00\xff", b"\n", b":", b'"', b";", b"="]


@given(st.lists(st.sampled_from(TOKENS) | st.binary(max_size=6), max_size=14), st.integers(1, 64))
@settings(suppress_health_check=list(HealthCheck))
def test_no_form_breaks_the_server(jobs, tokens, at_once):
    data = b"".join(tokens)
    pieces = (data[nth : nth + at_once] for nth in range(0, len(data), at_once))
    answer = httpx.post(f"{jobs.url}{FILES}", content=pieces, headers=FORM, timeout=30)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        assert httpx.delete(f"{jobs.url}{FILES}/{answer.json()['id']}").status_code == 200
    wait_until(lambda: left(jobs) == [])


@pytest.mark.parametrize("how", ["length", "chunks"])
def test_a_client_that_leaves_in_the_middle_leaves_nothing(jobs, client, how, monkeypatch):
    monkeypatch.setattr(module, "WRITTEN_AT_ONCE", 1000)
    head = f"POST {FILES} HTTP/1.1\r\nHost: a\r\nContent-Type: {FORM['Content-Type']}\r\n"
    body = form(PURPOSE, part("file", b"x" * 50_000, '; filename="a"'), end=False)
    with socket.create_connection(("127.0.0.1", jobs.port)) as connection:
        if how == "length":
            connection.sendall(f"{head}Content-Length: 900000\r\n\r\n".encode() + body)
        else:
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body)
        wait_until(lambda: jobs.batches.store.num_bytes(Owner()) >= 49_000)
        assert len(left(jobs)) == 1
    wait_until(lambda: left(jobs) == [])
    wait_until(lambda: jobs.batches.store.num_bytes(Owner()) == 0)


def test_uploads_that_do_not_end_keep_others_out_only_while_they_last(jobs, client, monkeypatch):
    monkeypatch.setattr(store, "MAX_UPLOADS", 1)
    head = f"POST {FILES} HTTP/1.1\r\nHost: a\r\nContent-Type: {FORM['Content-Type']}\r\nContent-Length: 900000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", jobs.port)) as connection:
        connection.sendall(head.encode() + part("file", b"x" * 70_000, '; filename="a"'))
        wait_until(lambda: jobs.batches.store.num_bytes(Owner()) >= 65_536)  # these are in the file already
        answer = httpx.post(f"{jobs.url}{FILES}", content=form(PURPOSE, FILE), headers=FORM)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "uploads have not ended yet. Try again in 1 s." in answer.text
        assert len(left(jobs)) == 1
    wait_until(lambda: left(jobs) == [])
    client.files.create(file=("a", b"x"), purpose="batch")


def test_a_disk_that_fails_is_a_503_that_leaves_nothing(jobs, client, monkeypatch):
    from penstock.jobs.store import Upload

    def refuse(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for method in ("write", "keep"):
        with monkeypatch.context() as patch:
            patch.setattr(Upload, method, refuse)
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=("a", b"x"), purpose="batch")
            assert refused.value.status_code == 503
        assert left(jobs) == []
        assert jobs.batches.store.num_bytes(Owner()) == 0
    client.files.create(file=("a", b"x"), purpose="batch")


def test_a_database_that_fails_is_a_503(tmp_path):
    with serving(tmp_path) as server, server.client() as client:
        server.batches.store._base.execute("DROP TABLE files")
        for ask in (
            client.files.list,
            lambda: client.files.retrieve("a"),
            lambda: client.files.create(file=b"", purpose="batch"),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                ask()
            assert refused.value.status_code == 503


def test_uploads_leave_no_file_open(jobs, client):
    client.files.create(file=("a", b"x"), purpose="batch")
    before = open_files()
    for _ in range(3):
        client.files.create(file=("a", b"x"), purpose="batch")
        httpx.post(f"{jobs.url}{FILES}", content=form(FILE), headers=FORM)
        for file in client.files.list():
            client.files.content(file.id)
    wait_until(lambda: open_files() == before)


async def test_many_uploads_at_once(jobs):
    async with httpx.AsyncClient(base_url=jobs.url, timeout=60) as http:
        data = [form(PURPOSE, part("file", json.dumps([nth] * 1000).encode(), '; filename="a"')) for nth in range(30)]
        made = await asyncio.gather(*[http.post(FILES, content=one, headers=FORM) for one in data])
        ids = [answer.json()["id"] for answer in made]
        assert len({*ids}) == 30
        found = await asyncio.gather(*[http.get(f"{FILES}/{one}/content") for one in ids])
        assert [answer.json() for answer in found] == [[nth] * 1000 for nth in range(30)]
        gone = await asyncio.gather(*[http.delete(f"{FILES}/{one}") for one in ids])
        assert {answer.status_code for answer in gone} == {200}
    assert left(jobs) == []
