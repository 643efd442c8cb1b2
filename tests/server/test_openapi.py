"""The document tells what is there: every operation with its answers, its errors and its keys."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from support.answers import AnswerCheck
from support.server.harness import make_client, make_runtime, wait_until
from support.server.jobs import COMPLETIONS, file_of, impatient, line, serving


@pytest.fixture(scope="module")
def document():
    """Made once, which takes a quarter of a second."""

    async def read():
        async with make_client(runtime) as client:
            return (await client.get("/openapi.json")).json()

    runtime = make_runtime()
    try:
        return asyncio.run(read())
    finally:
        runtime.close()


def operations(document):
    return {
        f"{method.upper()} {path}": told
        for path, operations in document["paths"].items()
        for method, told in operations.items()
    }


async def test_every_operation_tells_what_it_answers(document):
    for name, told in operations(document).items():
        content = told["responses"]["200"]["content"]
        assert content, name
        assert all(described["schema"] for described in content.values()), name


async def test_every_reference_leads_somewhere(document):
    def refs(value):
        if isinstance(value, dict):
            return [value["$ref"]] if "$ref" in value else [ref for inner in value.values() for ref in refs(inner)]
        return [ref for inner in value for ref in refs(inner)] if isinstance(value, list) else []

    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(refs(document)) <= names
    assert len(refs(document)) > 300


@pytest.mark.parametrize(
    ("operation", "own"),
    [
        ("POST /v1/completions", None),
        ("POST /v1/messages", "AnthropicError"),
        ("POST /api/chat", "OllamaError"),
        ("POST /embed", "TeiError"),
        ("POST /infill", "LlamaError"),
        ("POST /v1/embeddings", None),
    ],
)
async def test_errors_have_the_shapes_of_their_apis(document, operation, own):
    responses = operations(document)[operation]["responses"]
    for status in ("400", "401", "500", "503"):
        schema = responses[status]["content"]["application/json"]["schema"]
        names = [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])]
        assert names == ([] if own is None else [own]) + ["Error"]
    assert "Retry-After" in responses["429"]["headers"]


async def test_streams_are_told_by_their_types(document):
    told = operations(document)
    assert set(told["POST /v1/chat/completions"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(told["POST /api/chat"]["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}


async def test_what_is_always_refused_is_not_offered(client, document):
    assert (await client.post("/api/push", json={"model": "a"})).status_code == 501
    assert "/api/push" not in document["paths"]


async def test_keys_are_told_where_they_are_asked_for(document):
    assert "security" not in document
    runtime = make_runtime()
    async with make_client(runtime, api_keys=("a-key",)) as client:
        guarded = (await client.get("/openapi.json", headers={"Authorization": "Bearer a-key"})).json()
    runtime.close()
    schemes = guarded["components"]["securitySchemes"]
    assert [one for entry in guarded["security"] for one in entry] == list(schemes)
    opened = [name for name, told in operations(guarded).items() if told.get("security") == []]
    assert opened == ["GET /health", "GET /ready"]


@pytest.mark.parametrize("path", ["/embed", "/predict"])
async def test_errors_before_a_body_is_read_are_in_the_words_of_the_api_too(client, path):
    answer = await client.post(path, content=b"x", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert set(answer.json()) == {"error", "error_type"}


async def test_null_is_the_same_as_absent_in_the_document_too(document):
    fields = [
        (f"{name}.{field}", told)
        for name, schema in document["components"]["schemas"].items()
        for field, told in schema.get("properties", {}).items()
        if told.get("default", ...) is None
    ]
    assert len(fields) > 200
    typed = [(name, told.get("anyOf", [told])) for name, told in fields if told.keys() & {"anyOf", "type", "$ref"}]
    assert [name for name, kinds in typed if all(kind.get("type") != "null" for kind in kinds)] == []


async def test_what_a_response_must_have_is_required(document):
    assert document["components"]["schemas"]["ResponsesBody"]["required"] == ["input"]


async def test_an_explanation_has_the_fields_of_its_schema(client, document):
    answer = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).json()
    [choice] = (await client.get(f"/v1/requests/{answer['id']}")).json()["choices"]
    schemas = document["components"]["schemas"]
    fields = schemas["RequestChoice"]["properties"]
    for name in ("prefill", "resume", "decode", "sat_out", "batch", "waited"):
        assert set(choice[name]) == set(schemas[fields[name]["$ref"].rpartition("/")[2]]["properties"]), name
    assert set(choice) == set(fields) - {"route"}, "a route is in those of a cluster"


async def test_schemas_have_short_names(document):
    assert [name for name in document["components"]["schemas"] if not name.isalnum()] == []


async def test_files_and_batches_answer_as_described(tmp_path, monkeypatch, gate):
    impatient(monkeypatch)
    with serving(tmp_path, gate) as server:
        hooks = {"response": [AnswerCheck(server.server._app)]}
        async with httpx.AsyncClient(base_url=server.url, event_hooks=hooks, timeout=30) as http:
            document = (await http.get("/openapi.json")).json()

            async def ask(method, path, status=200, template=None, **fields):
                answer = await http.request(method, path, **fields)
                assert answer.status_code == status, answer.text
                assert str(status) in document["paths"][template or path][method.lower()]["responses"]
                return answer

            upload = {"files": {"file": file_of([line("a", COMPLETIONS)])}, "data": {"purpose": "batch"}}
            file_id = (await ask("POST", "/v1/files", **upload)).json()["id"]
            await ask("GET", "/v1/files")
            await ask("GET", f"/v1/files/{file_id}/content", template="/v1/files/{file_id}/content")
            body = {"input_file_id": file_id, "endpoint": COMPLETIONS}
            batch_id = (await ask("POST", "/v1/batches", json=body)).json()["id"]
            message = {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi."}]}
            body = {"requests": [{"custom_id": "a", "params": message}]}
            results = (await ask("POST", "/v1/messages/batches", json=body)).json()["id"]
            await ask("DELETE", f"/v1/files/{file_id}", 409, "/v1/files/{file_id}")
            gate.open()
            with server.client() as client:
                wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", timeout_s=30)
                wait_until(
                    lambda: httpx.get(f"{server.url}/v1/messages/batches/{results}").json()["processing_status"] == "ended"
                )
            await ask("POST", f"/v1/batches/{batch_id}/cancel", 409, "/v1/batches/{batch_id}/cancel")
            template = "/v1/messages/batches/{batch_id}/results"
            answer = await ask("GET", f"/v1/messages/batches/{results}/results", template=template)
            assert json.loads(answer.text)["custom_id"] == "a"
    [(kind, content)] = document["paths"]["/v1/files"]["post"]["requestBody"]["content"].items()
    form = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert (kind, form["required"]) == ("multipart/form-data", ["file", "purpose"])


@pytest.mark.parametrize(
    ("operation", "name", "schema"),
    [
        ("GET /v1/requests", "ended", {"type": "integer", "minimum": 0, "maximum": 100, "default": 0}),
        ("GET /debug/trace", "seconds", {"type": "number", "exclusiveMinimum": 0, "maximum": 60, "default": 5}),
        (
            "GET /v1/responses/{response_id}/input_items",
            "order",
            {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        ),
    ],
)
async def test_parameters_are_described_with_their_types_and_limits(document, operation, name, schema):
    told = operations(document)[operation]
    assert [one["schema"] for one in told["parameters"] if one["name"] == name] == [schema]


async def test_refusals_of_traces_are_described(document):
    assert {"403", "409"} <= set(operations(document)["GET /debug/trace"]["responses"])
