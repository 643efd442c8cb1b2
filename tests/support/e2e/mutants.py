"""Requests that go wrong in every way that a seed can draw: fields, bytes, lengths, chunks, connections that are cut.

The routes, and what their bodies are made of, come from a server's own /openapi.json. A mutant is a body that its schema
allows, and then something is changed in it, or in the way it is sent. It depends on the seed and its number alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BOUND_S = 60.0
"""Time for one answer, of which most take milliseconds."""
MAX_TOKENS = 4
_READ_BYTES = 1 << 22
JSON = "application/json"


class Raw(str):
    """JSON text that is written as it stands, whatever it says."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    bodies: list[dict[str, Any]]
    """The schemas that a body may have; empty: it takes none."""
    query: list[str]
    statuses: frozenset[int]
    """Those that the document names."""


def routes_of(document: Mapping[str, Any]) -> list[Route]:
    """All operations of an OpenAPI document."""
    found = []
    for path, operations in document["paths"].items():
        for method, told in operations.items():
            schema = told.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
            bodies = [] if schema is None else schema.get("anyOf", [schema])
            query = [one["name"] for one in told.get("parameters", ()) if one["in"] == "query"]
            found.append(Route(method.upper(), path, bodies, query, frozenset(map(int, told["responses"]))))
    return found


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
"""Fields that say how long an answer may be."""
LIKELY: Mapping[str, list[Any]] = {
    **{name: [MAX_TOKENS] for name in LIMITS},
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}],
    ],
    "prompt": ["Once upon a time", ["One", "Two"], [1, 2, 3]],
    "input": ["Hi", [{"role": "user", "content": "Hi"}]],
    "inputs": ["Hi", ["Hi", "there"]],
    "texts": [["one", "two"]],
    "text_1": ["one"],
    "text_2": [["one", "two"]],
    "query": ["Which?"],
    "documents": [["one", "two"]],
    "tokens": [[1, 2, 3]],
    "lora_path": ["/nowhere"],
    "n": [1, 2],
    "best_of": [1],
    "logprobs": [True, 2],
    "top_logprobs": [2],
    "stream": [True, False],
    "stop": ["\n", ["a", "b"]],
    "system": ["Be brief."],
    "suffix": [""],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
    ],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[ab]{2}"}],
    "format": ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}],
    "options": [{"num_predict": MAX_TOKENS, "temperature": 0.5}],
    "tools": [
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        [{"name": "f", "input_schema": {"type": "object"}}],
    ],
    "tool_choice": ["none", "auto", {"type": "auto"}],
    "logit_bias": [{"5": 1.5}],
    "metadata": [{"a": "b"}],
    "background": [False, True],
    "keep_alive": ["5m", -1],
    "wait": [True, False],
}
"""Values of fields, by their names, of which a server makes something."""
NOT_YET = "Not supported yet"
"""Words of the document about fields that have to ask for nothing."""


class Bodies:
    """Makes bodies that a schema allows."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self.names = sorted({name for schema in self._schemas.values() for name in schema.get("properties", ())})
        """The fields of all bodies and answers."""

    def make(self, route: Route, model: str, rng: random.Random, *, most_others: int = 3) -> dict[str, Any]:
        """The fields that it must have, those that keep the answer short, and some others."""
        schema = self._schema(rng.choice(route.bodies))
        required, fields = schema.get("required", ()), schema.get("properties", {})
        kept = [name for name in fields if name in required or name == "model" or (name in LIMITS and rng.random() < 0.9)]
        others = [name for name, told in fields.items() if name not in kept and not _is_not_yet(told)]
        kept += rng.sample(others, min(len(others), rng.randint(0, most_others)))
        body = {name: self._value(name, fields[name], rng) for name in kept}
        if "model" in body:
            body["model"] = model
        if "options" in fields:  # Ollama's bodies have their limit there
            body.setdefault("options", {"num_predict": MAX_TOKENS})
        return body

    def _value(self, name: str, schema: Mapping[str, Any], rng: random.Random, depth: int = 0) -> Any:
        likely = [value for value in LIKELY.get(name, ()) if depth == 0 and self._may_be(value, schema)]
        if likely:
            return rng.choice(likely)
        schema = self._schema(schema)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(name, rng.choice(options), rng, depth)
        kind = schema.get("type") if depth < 5 else "null"
        least, most = schema.get("minimum", schema.get("exclusiveMinimum", -1)), schema.get("maximum", 5)
        if kind == "integer":
            least = max(-5, least)
            return rng.randint(least, max(least, min(most, least + 5)))
        if kind == "number":
            return rng.uniform(least + 0.01, most)
        if kind == "array":
            return [self._value("", schema.get("items", {}), rng, depth + 1) for _ in range(rng.randint(0, 2))]
        if kind == "object":
            inner, required = schema.get("properties", {}), schema.get("required", ())
            kept = [key for key, told in inner.items() if key in required or (rng.random() < 0.3 and not _is_not_yet(told))]
            return {key: self._value(key, inner[key], rng, depth + 1) for key in kept}
        simple: dict[Any, Any] = {"string": "text", "boolean": True, "null": None}
        return simple.get(kind, "anything")

    def _may_be(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """True if a value has a type that the schema allows."""
        schema = self._schema(schema)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return any(self._may_be(value, option) for option in options)
        if "properties" in schema and isinstance(value, dict) and schema.get("additionalProperties") is False:
            return value.keys() <= schema["properties"].keys()
        if "items" in schema and isinstance(value, list):
            return all(self._may_be(item, schema["items"]) for item in value)
        wanted = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
        kind = wanted.get(schema.get("type", ""))
        return kind is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool))

    def _schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        if "$ref" in schema:
            found: Mapping[str, Any] = self._schemas[schema["$ref"].rpartition("/")[2]]
            return found
        return schema


def _is_not_yet(told: Mapping[str, Any]) -> bool:
    return NOT_YET in told.get("description", "")


# Changes of a body's JSON

ODD_TEXTS = [
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\u202e",
    "e\u0301" * 50,
    "👩‍👩‍👧",
    "\ufeff",
    "\u2028",
    "null",
    "../../etc/passwd",
    "a" * 200_000,
    "𝔘" * 9_000,
]
_ODD_NUMBERS = """0 -0 -1 -0.0 0.1 1e-400 1e308 1e999 -1e999 2147483647 2147483648 9223372036854775807 9223372036854775808
18446744073709551616 NaN Infinity -Infinity 01 0x10"""
ODD_NUMBERS = [*map(Raw, _ODD_NUMBERS.split()), Raw("9" * 400)]


def odd_value(rng: random.Random) -> Any:
    deep = rng.choice((3, 100, 1500, 90_000))
    choices: list[Callable[[], Any]] = [
        lambda: rng.choice(ODD_TEXTS),
        lambda: rng.choice(ODD_NUMBERS),
        lambda: rng.choice((None, True, False, [], {}, [[]], [None], {"": ""}, [{}])),
        lambda: Raw("[" * deep + "]" * deep),
        lambda: Raw('{"a":' * deep + "1" + "}" * deep),
        lambda: [rng.choice((0, "a", None, [], 1.5))] * rng.choice((1, 17, 300, 5000)),
        lambda: {f"k{index}": index for index in range(rng.choice((1, 20, 400)))},
    ]
    return rng.choice(choices)()


def places_in(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values within one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in ((*place, key), *places_in(item, (*place, key)))]


def change(body: dict[str, Any], names: list[str], rng: random.Random) -> str:
    """The text of a body in which one to three things are other than they were."""
    body = json.loads(json.dumps(body))
    doubles: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = places_in(body)
        what = rng.choice(("value", "value", "value", "drop", "add", "add", "rename", "double", "wrap"))
        if what == "add" or not places:
            body[rng.choice((*names, rng.choice(ODD_TEXTS)))] = odd_value(rng)
            continue
        *way, key = rng.choice(places)
        holder: Any = body
        for step in way:
            holder = holder[step]
        if what == "value":
            holder[key] = odd_value(rng)
        elif what == "drop":
            del holder[key]
        elif what == "wrap":
            holder[key] = rng.choice(([holder[key]], {"value": holder[key]}, [holder[key]] * 3))
        elif isinstance(holder, dict):
            if what == "rename":
                holder[rng.choice((str(key).upper(), f"{key} ", f"{key}\0", str(key)[:-1]))] = holder.pop(key)
            else:
                doubles.append(f"{written(key)}:{written(odd_value(rng))}")
    text = written(body)
    return text if not doubles else "{" + ",".join([*doubles, text[1:-1]]).rstrip(",") + "}"


def written(value: Any) -> str:
    """JSON text, and what only looks like it."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are mostly no JSON any more."""
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    choices: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[: min(at, other)] + data[max(at, other) :],
        lambda: b"".join(bytes([byte ^ (1 << rng.randrange(8))]) if rng.random() < 0.02 else bytes([byte]) for byte in data),
        lambda: data[:at] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\0")) + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode().encode(rng.choice(("utf-16", "utf-32"))),
        lambda: rng.randbytes(rng.choice((1, 30, 4000))),
        lambda: data + rng.choice((b"}", b"{}", b" " * 100_000, b"\n\n", b",")),
        lambda: b" " * 100_000 + data,
        lambda: b"",
        lambda: data * 2,
    ]
    return rng.choice(choices)()


# The way in which it is sent


@dataclass
class Mutant:
    """A request as it goes over the wire."""

    kind: str
    route: Route
    pieces: list[bytes]
    is_whole: bool = True
    """It is one request of HTTP, so it must be answered, by a status that the document has."""
    ends: str = "reads"
    """`reads` the answer; `shuts` its side before that; `leaves` without it; `resets` in the middle of it."""

    def shown(self) -> str:
        data = b"".join(self.pieces)
        return f"{self.kind} {data[:1500]!r}{'...' if len(data) > 1500 else ''}"


def head(route: Route, target: str, length: int | None, *more: str, kind: str | None = JSON) -> bytes:
    lines = [f"{route.method} {target} HTTP/1.1", "Host: x"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    lines += [] if kind is None else [f"Content-Type: {kind}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def in_pieces(data: bytes, rng: random.Random, most: int = 6) -> list[bytes]:
    ends = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, most)))
    return [piece for begin, end in zip([0, *ends], [*ends, len(data)], strict=True) if (piece := data[begin:end])]


ODD_TYPES = (None, "text/plain", "multipart/form-data; boundary=x", "application/json; charset=utf-16", "é/ü", "," * 500)
ODD_HEADERS = """X-Request-Id: a b
X-Deadline-Ms: 1
X-Priority: z
X-Tenant: é
Accept: x/y
anthropic-version: 1
Expect: 100-continue
Connection: close
Range: bytes=0-1
Origin: http://evil
Content-Encoding: gzip
Content-Encoding: identity"""
BAD_CHUNKS = (b"zz\r\n", b"-1\r\nab\r\n", b"ffffffffffffffffff\r\n")


def send_oddly(route: Route, target: str, data: bytes, rng: random.Random) -> Mutant:
    """A good body in a way that is rare or wrong."""

    def begin(length: int | None, *more: str, kind: str | None = JSON) -> bytes:
        return head(route, target, length, *more, kind=kind)

    size, plain = len(data), begin(len(data))
    cut, chunked = rng.randrange(size + 1), begin(None, "Transfer-Encoding: chunked")
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in in_pieces(data, rng)]
    whole = {
        "pieces": in_pieces(plain + data, rng),
        "chunks": [chunked, *chunks, b"0\r\n\r\n"],
        "trailers": [chunked, *chunks, b"0\r\nX-Evil: 1\r\n\r\n"],
        "type": [begin(size, kind=rng.choice(ODD_TYPES)), data],
        "header": [begin(size, rng.choice(ODD_HEADERS.splitlines())), data],
        "long header": [begin(size, "X: " + "y" * 9000), data],
        "two at once": [plain + data + plain + data],
    }
    wrong = {
        "bad chunk": [chunked, rng.choice(BAD_CHUNKS), data],
        "short length": [begin(cut), data],
        "two lengths": [begin(size, f"Content-Length: {size + 1}"), data],
        "bad length": [begin(None, "Content-Length: -1"), data],
        "no header": [begin(size, "no colon here"), data],
        "large head": [begin(size, "X-Long: " + "y" * 100_000), data],
    }
    shuts = {
        "long length": [begin(size + 9), data],
        "length and chunks": [begin(size, "Transfer-Encoding: chunked"), data],
        "huge length": [begin(10 ** rng.choice((8, 18, 30)))],
        "no length": [begin(None), data],
        "shuts": [plain, data],
    }
    leaves = {
        "leaves in head": [plain[: rng.randrange(len(plain))]],
        "leaves in body": [plain, data[:cut]],
        "leaves": [plain, data],
    }
    ways = [
        *(Mutant(kind, route, pieces) for kind, pieces in whole.items()),
        *(Mutant(kind, route, pieces, is_whole=False) for kind, pieces in wrong.items()),
        *(Mutant(kind, route, pieces, is_whole=False, ends="shuts") for kind, pieces in shuts.items()),
        *(Mutant(kind, route, pieces, is_whole=False, ends="leaves") for kind, pieces in leaves.items()),
        Mutant("resets", route, [plain, data], is_whole=False, ends="resets"),
    ]
    return rng.choice(ways)


ODD_WORDS = ["x", "%00", "%ff%fe", "..%2f..%2fetc", "a/b/c", "%F0%9F%A6%86", "%", "resp_1", "r1", "cmpl-r2", "*", "%0d%0aX:1"]
ODD_COUNTS = ("", "-1", "1", "9" * 40, "NaN", "y" * 3000)


def odd_target(route: Route, rng: random.Random) -> str:
    """The path with something in its parameters' places, and a query."""
    target = re.sub(r"\{\w+\}", lambda _: rng.choice((*ODD_WORDS, "y" * 3000)), route.path)
    names = [rng.choice((*route.query, "zz")) for _ in range(rng.randint(0, 3))]
    return "?".join([target, *["&".join(f"{name}={rng.choice((*ODD_WORDS, *ODD_COUNTS))}" for name in names)] * bool(names)])


class Mutants:
    """All mutants of a seed."""

    def __init__(self, document: Mapping[str, Any], seed: int, *, rare: Mapping[str, float] | None = None) -> None:
        """`rare`: paths that get only so large a share of what the others get."""
        self._bodies = Bodies(document)
        self.routes = routes_of(document)
        self._weights = [(rare or {}).get(route.path, 1.0) * (1.0 if route.bodies else 0.3) for route in self.routes]
        self._seed = seed
        self.models: dict[str, list[str]] = {}
        """By path: the models that answer there."""

    def plain(self, route: Route, model: str, number: int) -> Mutant:
        """A good request with little more than what it must have."""
        rng = random.Random(f"{self._seed}/{route.path}/{number}")
        body = self._bodies.make(route, model, rng, most_others=0)
        return self._whole("plain", route, route.path, written(body).encode())

    def make(self, index: int) -> Mutant:
        rng = random.Random(f"{self._seed}/{index}")
        [route] = rng.choices(self.routes, self._weights)
        target = odd_target(route, rng) if "{" in route.path or rng.random() < 0.1 else route.path
        if not route.bodies:
            data = rng.choice((b"", b"", b"{}", rng.randbytes(50)))
            return Mutant("question", route, [head(route, target, len(data) if data else None) + data])
        body = self._bodies.make(route, rng.choice(self.models[route.path]), rng)
        way = rng.random()
        if way < 0.1:
            return self._whole("valid", route, target, written(body).encode(), f"X-Request-Id: r{rng.randrange(3)}")
        if way < 0.65:
            return self._whole("json", route, target, change(body, self._bodies.names, rng).encode("utf-8", "surrogatepass"))
        if way < 0.8:
            return self._whole("bytes", route, target, spoil(written(body).encode(), rng))
        return send_oddly(route, target, written(body).encode(), rng)

    def _whole(self, kind: str, route: Route, target: str, data: bytes, *more: str) -> Mutant:
        return Mutant(kind, route, [head(route, target, len(data), *more), data])


# Sending


@dataclass
class Fate:
    """The end that a mutant came to."""

    status: int | None = None
    """None: the connection was closed without an answer, or the client left."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def send(port: int, mutant: Mutant) -> Fate:
    """Raises TimeoutError if there is neither an answer nor an end within `BOUND_S`."""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_READ_BYTES)
        try:
            try:
                for piece in mutant.pieces:
                    writer.write(piece)
                    await writer.drain()
                if mutant.ends == "shuts":
                    writer.write_eof()
            except ConnectionError:
                pass  # it was answered before it was all there
            if mutant.ends == "leaves":
                return Fate()
            try:
                if mutant.ends == "resets":
                    await reader.read(1)
                    return Fate()
                return await _answer(reader)
            except (ConnectionError, asyncio.IncompleteReadError):
                return Fate()
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> Fate:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split()[1])
    if status < 200:
        return await _answer(reader)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Fate(status, headers, body)


def fault_of(mutant: Mutant, fate: Fate) -> str | None:
    """Why what became of a mutant is wrong; None: it is as it should be."""
    status = fate.status
    if status is None:
        return "no answer" if mutant.is_whole and mutant.ends == "reads" else None
    is_meant = status in mutant.route.statuses and (status == 501 or (status == 503 and "retry-after" in fate.headers))
    if status >= 500 and not is_meant:
        return f"a {status}"
    if mutant.is_whole and status not in mutant.route.statuses and mutant.route.bodies:
        return f"a {status}, which is not in the document"
    kind = fate.headers.get("content-type", "")
    if kind.startswith(JSON):
        try:
            json.loads(fate.body)
        except ValueError:
            return "an answer that is no JSON"
    elif kind.startswith("text/event-stream") and not fate.body.endswith(b"\n\n"):
        return "a stream whose last event is not whole"
    return None
