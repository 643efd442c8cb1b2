"""`GET /props` and `/slots`, as llama.cpp's server tells of itself, and what is not there. Changes nothing.

A slot is a row of the engine's steps. Rows of other owners are told by their number alone, and of nobody a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.calls.in_flight import InFlight
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.deploy.served import ModelCard
from penstock.serve.asking import find_allowed, find_model, read_owner
from penstock.serve.cards import ModelCards
from penstock.serve.errors import ApiError, shorten, unavailable
from penstock.serve.llama_cpp.write import generation_settings
from penstock.serve.openai.read import read_sampling
from penstock.serve.openai.schemas import GenerationBody
from penstock.text.dialects import Dialect, find_dialect
from penstock.types.errors import ModelAway
from penstock.types.request import Request, RequestStatus

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "/lora-adapters": "Ask for an adapter by 'model', with its name: GET /v1/models lists them.",
        "/slots/{slot_id}": "No slot is saved or erased: prefixes are shared by all requests, and kept by themselves.",
    }
)
ABSENT: tuple[tuple[str, str], ...] = tuple([(method, path) for path in _INSTEAD for method in ("GET", "POST")])
"""Methods and paths of llama.cpp's server that are not there."""


async def tell_absent(http: HttpRequest) -> Response:
    """Refused: adapters have names here, and there are no slots."""
    instead = _INSTEAD["/slots/{slot_id}" if "slot_id" in http.path_params else "/lora-adapters"]
    raise ApiError(404, f"There is nothing at {http.method} {shorten(http.url.path)}. {instead}", code="not_found")


class LlamaStatus:
    def __init__(self, deployment: Deployment, in_flight: InFlight, cards: ModelCards) -> None:
        self._deployment = deployment
        self._cards = cards
        self._in_flight = in_flight

    async def props(self, http: HttpRequest) -> dict[str, Any]:
        """Tell what a model is, and how it samples by default. `model_path` is its name: paths are not told.

        A model that is not loaded is asleep: it is described by its files, as far as these say something.
        """
        served, _ = find_allowed(http.query_params.get("model"), self._deployment, http.scope)
        try:
            running = served.answerer()
        except ModelAway:
            return _props(served.name, is_sleeping=True) | _of_files(await self._cards.of(served))
        model, template, special = running.model, running.chat_template, running.tokenizer.special_tokens
        settings = {} if model.encoder else generation_settings(read_sampling(GenerationBody(), None, running), n_predict=-1)
        return _props(model.name, is_sleeping=False) | {
            "default_generation_settings": {"params": settings, "n_ctx": model.max_model_len},
            "total_slots": _num_slots(running)[0],
            "chat_template": "" if template is None else template.source,
            "chat_template_caps": _caps(running.dialect, has_template=template is not None),
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
        }

    async def slots(self, http: HttpRequest) -> list[dict[str, Any]]:
        """The requests that run, a slot for each, and the slots that are free. With `fail_on_no_slot` 503 if none is."""
        running = self._find(http)
        owner = read_owner(http.scope, self._in_flight.config)
        total, num_running = _num_slots(running)
        if http.query_params.get("fail_on_no_slot") and num_running >= total:
            raise unavailable("No slot is free.")
        own = [one for one in self._in_flight.requests_of(owner, running) if one.status is RequestStatus.RUNNING][:total]
        num_busy = max(num_running, len(own))
        return [
            {"id": index, "n_ctx": running.model.max_model_len, "is_processing": index < num_busy}
            | (_told(own[index]) if index < len(own) else {})
            for index in range(total)
        ]

    def _find(self, http: HttpRequest) -> RunningModel:
        return find_model(http.query_params.get("model"), self._deployment, http.scope)


def _props(name: str, *, is_sleeping: bool) -> dict[str, Any]:
    """The fields of `/props` that need no loaded model."""
    return {
        "model_alias": name,
        "model_path": name,
        "modalities": {"vision": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "build_info": f"penstock-{penstock.__version__}",
        "is_sleeping": is_sleeping,
    }


def _of_files(card: ModelCard) -> dict[str, Any]:
    """The fields of `/props` that a model's files tell."""
    template = card.chat_template
    return {
        "default_generation_settings": {"params": {}, "n_ctx": card.max_model_len or 0},
        "total_slots": 0,
        "chat_template": template,
        "chat_template_caps": _caps(find_dialect(template), has_template=bool(template)),
        "bos_token": "",
        "eos_token": "",
    }


def _caps(dialect: Dialect, *, has_template: bool) -> dict[str, bool]:
    """Return what chats can have. Tools work with every template: where one knows none, the system message has them."""
    return {
        "supports_tools": has_template,
        "supports_tool_calls": has_template,
        "supports_parallel_tool_calls": has_template and dialect.tools.ways[0].between is not None,
        "supports_system_role": has_template and dialect.takes_system,
        "supports_string_content": has_template,
        "supports_typed_content": False,  # parts of a message are joined to a text before the template sees them
        "supports_object_arguments": has_template and not dialect.takes_text_arguments,
        "supports_preserve_reasoning": has_template and dialect.reasoning is not None,
    }


def _num_slots(running: RunningModel) -> tuple[int, int]:
    """Rows of a step, and those that requests have."""
    load = running.engine.load()
    return load.num_running + load.num_rows_free, load.num_running


def _told(request: Request) -> dict[str, Any]:
    """How far a request of the one who asks has come, and its settings: numbers, booleans and the names of samplers.

    Where there are no keys, whoever asks may be another client. So stop strings are not told, nor biases, of which a request of
    OpenAI's routes may have one for each token of the vocabulary."""
    sampling, num_decoded = replace(request.sampling, logit_bias=()), len(request.output_token_ids)
    settings = generation_settings(sampling, n_predict=sampling.max_tokens)
    del settings["logit_bias"], settings["stop"]
    return {
        "params": {"seed": sampling.seed, **settings},
        "next_token": {"has_next_token": True, "n_remain": sampling.max_tokens - num_decoded, "n_decoded": num_decoded},
    }
