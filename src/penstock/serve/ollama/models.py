"""`GET /api/tags`, `/api/ps`, `/api/version`, `POST /api/show` and `/api/pull`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.deploy.running import ModelFacts, ModelState, ServedModel
from penstock.serve.api import Parts
from penstock.serve.asking import find_allowed, visible_models
from penstock.serve.bodies import Body, Unread, has_unread
from penstock.serve.errors import ApiError, invalid
from penstock.serve.ollama.read import name_of
from penstock.serve.ollama.write import FOREVER
from penstock.serve.shapes import Count, Object, Version, utc
from penstock.text.dialects import find_dialect
from penstock.text.fim import find_fim
from penstock.types.encoder import Task

API_VERSION = "0.14.0"
"""The version of Ollama with this API. Some clients, such as Copilot Chat and Codex, refuse older versions."""


class OllamaNameBody(Body):
    """The body of a request about one model. Ollama's own client sends the other name as an empty text."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""


@has_unread("system template options")
class OllamaShowBody(OllamaNameBody):
    verbose: Unread = None
    """No effect: lists of tokens are never included."""


class OllamaPullBody(OllamaNameBody):
    stream: bool | None = None
    """True by default."""
    insecure: Unread = None
    username: Unread = None
    password: Unread = None
    """No effect, like `insecure` and `username`: nothing is fetched."""


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


OllamaModel = TypedDict("OllamaModel", {"name": str, "model": str, "digest": str, "details": OllamaDetails})


class ModelOnDisk(OllamaModel):
    modified_at: str
    size: Count


class ModelInMemory(OllamaModel):
    size: Count
    expires_at: str
    size_vram: Count
    context_length: Count


OllamaModelList = TypedDict("OllamaModelList", {"models": list[ModelOnDisk]})
OllamaRunning = TypedDict("OllamaRunning", {"models": list[ModelInMemory]})


class OllamaShow(TypedDict):
    modelfile: str
    parameters: str
    template: str
    license: str
    details: OllamaDetails
    model_info: Object
    capabilities: list[str]
    modified_at: str


class OllamaModels:
    def __init__(self, parts: Parts) -> None:
        self._deployment = parts.deployment
        self._folder = parts.folder
        self._facts = parts.facts
        self._reader = parts.reader

    async def version(self, _http: HttpRequest) -> Version:
        """Return the version of Ollama whose API this is. `GET /version` returns Penstock's."""
        return {"version": API_VERSION}

    async def tags(self, http: HttpRequest) -> OllamaModelList:
        """List the served models that the client's key may use."""
        await self._folder.look()
        models: list[ModelOnDisk] = []
        for name, served in visible_models(self._deployment, http.scope):
            facts = await self._facts.of(served)
            models.append(
                {**_named(served, name, facts), "modified_at": utc(facts.modified_unix_s), "size": facts.num_file_bytes}
            )
        return {"models": models}

    async def ps(self, http: HttpRequest) -> OllamaRunning:
        """List the loaded models that the client's key may use, with their memory and the time of their unloading."""
        models: list[ModelInMemory] = []
        for name, served in visible_models(self._deployment, http.scope):
            running = served.running
            if running is None or served.state is not ModelState.LOADED:
                continue
            num_bytes = sum(served.held_bytes.values())
            after_ns = served.unload_after_ns
            expires_at = FOREVER
            if after_ns is not None:
                idle_ns = 0 if running.uses.num_users else self._deployment.clock.now_ns() - running.uses.used_ns
                expires_at = utc(running.sources.unix_time_s() + (after_ns - idle_ns) // 10**9)
            models.append(
                {
                    **_named(served, name, await self._facts.of(served)),
                    "size": num_bytes,
                    "expires_at": expires_at,
                    "size_vram": num_bytes if served.is_fixed else 0,
                    "context_length": running.model.capacity.max_model_len,
                }
            )
        return {"models": models}

    async def show(self, data: bytes, http: HttpRequest) -> OllamaShow:
        """Describe a model without loading it."""
        served = self._find(await self._reader.body(data, OllamaShowBody, http.scope), http)
        return _show(served, await self._facts.of(served))

    async def pull(self, data: bytes, http: HttpRequest) -> Response:
        """Confirm that a model is served, since clients pull models before use. Nothing is fetched: 501 for other models."""
        body = await self._reader.body(data, OllamaPullBody, http.scope)
        try:
            self._find(body, http)
        except ApiError as error:
            if error.status_code != 404:
                raise
            remedy = "Fetch it with `penstock pull MODEL` where the server runs, and name it to `penstock serve`."
            raise ApiError(501, f"{error.message} {remedy}", code="not_implemented") from None
        steps = ["success"] if body.stream is False else ["pulling manifest", "success"]
        lines = b"".join([fast_json.dumps({"status": step}) + b"\n" for step in steps])
        return Response(lines, media_type="application/json" if body.stream is False else "application/x-ndjson")

    def _find(self, body: OllamaNameBody, http: HttpRequest) -> ServedModel:
        name = body.model or body.name
        if not name:
            raise invalid("Missing required parameter: 'model'.", "model")
        served, _ = find_allowed(name_of(name, self._deployment), self._deployment, http.scope)
        return served


def _named(served: ServedModel, name: str, facts: ModelFacts) -> OllamaModel:
    """Return the fields that describe a model in all lists.

    The digest covers the model's facts without its path, and needs no reading of weights.
    """
    digest = hashlib.sha256(f"{served.name} {replace(facts, path=Path())}".encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest, "details": _details(facts)}


def _details(facts: ModelFacts) -> OllamaDetails:
    return {
        "parent_model": "",
        "format": _container(facts),
        "family": facts.architecture,
        "families": [facts.architecture] if facts.architecture else [],
        "parameter_size": "" if facts.num_parameters is None else _short(facts.num_parameters),
        "quantization_level": facts.weight_format,
    }


def _container(facts: ModelFacts) -> str:
    if not facts.container:
        return ""
    return "gguf" if facts.path.suffix == ".gguf" else "safetensors"


def _show(served: ServedModel, facts: ModelFacts) -> OllamaShow:
    info = served.info
    context_len = facts.max_model_len if info is None else info.capacity.max_model_len
    model_info = {
        "general.architecture": facts.architecture,
        "general.basename": facts.title or served.name,
        "general.parameter_count": facts.num_parameters,
        f"{facts.architecture}.block_count": facts.num_layers,
        f"{facts.architecture}.context_length": context_len,
    }
    return {
        "modelfile": "",
        "parameters": _parameters(served),
        "template": facts.chat_template,
        "license": facts.license,
        "details": _details(facts),
        "model_info": {name: value for name, value in model_info.items() if value is not None},
        "capabilities": _capabilities(served, facts),
        "modified_at": utc(facts.modified_unix_s),
    }


def _capabilities(served: ServedModel, facts: ModelFacts) -> list[str]:
    """Return the model's capabilities in Ollama's words. The template decides for a model that is not loaded."""
    running = served.running
    encoder = None if served.info is None else served.info.encoder
    if encoder is not None:
        return ["embedding"] if encoder.task is Task.EMBED else []
    has_template = bool(facts.chat_template) if running is None else running.chat_template is not None
    dialect = find_dialect(facts.chat_template) if running is None else running.dialect
    inserts = running is not None and find_fim(running.tokenizer) is not None
    words = {"completion": True, "tools": has_template, "thinking": dialect.reasoning is not None, "insert": inserts}
    return [word for word, can in words.items() if can]


def _parameters(served: ServedModel) -> str:
    """Return the sampling defaults of a loaded model's files, one per line."""
    if served.running is None:
        return ""
    defaults = served.running.defaults
    named = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "num_predict": defaults.max_tokens,
    }
    return "\n".join(f"{name:<30} {value}" for name, value in named.items() if value is not None)


def _short(number: int) -> str:
    """Return a count of parameters as Ollama writes it: `134.5M`."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.1f}{letter}"
    return str(number)
