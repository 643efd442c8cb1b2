"""`GET /props` and `/slots`, in the shapes of llama.cpp's server.

A slot is a place for one running request. Slots show no text. Slots of other owners show only that they are busy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NotRequired

from starlette.requests import Request as HttpRequest
from typing_extensions import TypedDict

import penstock
from penstock.calls.call import CompletionRequest
from penstock.calls.check import check_sampling
from penstock.deploy.running import ModelFacts, RunningModel
from penstock.serve.api import Parts
from penstock.serve.asking import find_allowed, find_model
from penstock.serve.errors import unavailable
from penstock.serve.llama_cpp.read import generation_settings
from penstock.serve.shapes import Count, Object
from penstock.serve.terms import read_owner
from penstock.text.dialects import Dialect, find_dialect
from penstock.types.errors import ModelAway
from penstock.types.request import Request, RequestStatus

LlamaDefaults = TypedDict("LlamaDefaults", {"params": Object, "n_ctx": Count})


class PropsHead(TypedDict):
    """Fields of `/props` that need no loaded model."""

    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    build_info: str
    is_sleeping: bool


class LlamaProps(PropsHead):
    default_generation_settings: LlamaDefaults
    total_slots: Count
    chat_template: str
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str


NextToken = TypedDict("NextToken", {"has_next_token": bool, "n_remain": int, "n_decoded": Count})


class LlamaSlot(TypedDict):
    id: Count
    n_ctx: Count
    is_processing: bool
    params: NotRequired[Object]
    next_token: NotRequired[NextToken]


class LlamaStatus:
    def __init__(self, parts: Parts) -> None:
        self._deployment = parts.deployment
        self._facts = parts.facts
        self._in_flight = parts.in_flight

    async def props(self, http: HttpRequest) -> LlamaProps:
        """Describe a model and its sampling defaults. `model_path` is its name: paths are not shown.

        A model that is not loaded is shown as sleeping, with the facts in its files.
        """
        served, _ = find_allowed(http.query_params.get("model"), self._deployment, http.scope)
        try:
            running = served.answerer()
        except ModelAway:
            return _of_files(served.name, await self._facts.of(served))
        model, template, special = running.model, running.chat_template, running.tokenizer.special_tokens
        settings: dict[str, Any] = {}
        if not model.encoder:
            settings = generation_settings(check_sampling(CompletionRequest(prompts=()), running), n_predict=-1)
        return {
            **_props(model.name, is_sleeping=False),
            "default_generation_settings": {"params": settings, "n_ctx": model.capacity.max_model_len},
            "total_slots": _num_slots(running)[0],
            "chat_template": "" if template is None else template.source,
            "chat_template_caps": _caps(running.dialect, has_template=template is not None),
            "bos_token": str(special.get("bos_token", "")),
            "eos_token": str(special.get("eos_token", "")),
        }

    async def slots(self, http: HttpRequest) -> list[LlamaSlot]:
        """List a slot for each running request, and the free slots. With `fail_on_no_slot`, 503 if no slot is free."""
        running = find_model(http.query_params.get("model"), self._deployment, http.scope)
        owner = read_owner(http.scope)
        total, num_running = _num_slots(running)
        if http.query_params.get("fail_on_no_slot") and num_running >= total:
            raise unavailable("No slot is free.")
        own = [one for one in self._in_flight.requests_of(owner, running) if one.status is RequestStatus.RUNNING][:total]
        num_busy = max(num_running, len(own))
        slots: list[LlamaSlot] = [
            {"id": index, "n_ctx": running.model.capacity.max_model_len, "is_processing": index < num_busy}
            for index in range(total)
        ]
        for slot, request in zip(slots, own, strict=False):
            slot["params"], slot["next_token"] = _slot_state(request)
        return slots


def _props(name: str, *, is_sleeping: bool) -> PropsHead:
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


def _of_files(name: str, facts: ModelFacts) -> LlamaProps:
    """Return the answer of `/props` for a model that is not loaded."""
    template = facts.chat_template
    return {
        **_props(name, is_sleeping=True),
        "default_generation_settings": {"params": {}, "n_ctx": facts.max_model_len or 0},
        "total_slots": 0,
        "chat_template": template,
        "chat_template_caps": _caps(find_dialect(template), has_template=bool(template)),
        "bos_token": "",
        "eos_token": "",
    }


def _caps(dialect: Dialect, *, has_template: bool) -> dict[str, bool]:
    """Return the capabilities of chats. Tools work with every template: a system message describes them if necessary."""
    return {
        "supports_tools": has_template,
        "supports_tool_calls": has_template,
        "supports_parallel_tool_calls": has_template and dialect.tools.ways[0].between is not None,
        "supports_system_role": has_template and dialect.takes_system,
        "supports_string_content": has_template,
        "supports_typed_content": False,  # the template gets the parts of a message as one text
        "supports_object_arguments": has_template and not dialect.takes_text_arguments,
        "supports_preserve_reasoning": has_template and dialect.reasoning is not None,
    }


def _num_slots(running: RunningModel) -> tuple[int, int]:
    """Return the number of slots, and the number of busy slots."""
    load = running.engine.load()
    return load.num_running + load.num_rows_free, load.num_running


def _slot_state(request: Request) -> tuple[dict[str, Any], NextToken]:
    """Return a request's settings and progress, as its slot shows them.

    Without API keys, the caller may be another client, so stop strings are left out. Biases are left out because of their
    number.
    """
    sampling, num_decoded = replace(request.sampling, logit_bias=()), len(request.output_token_ids)
    settings = generation_settings(sampling, n_predict=sampling.max_tokens)
    del settings["logit_bias"], settings["stop"]
    next_token: NextToken = {
        "has_next_token": True,
        "n_remain": sampling.max_tokens - num_decoded,
        "n_decoded": num_decoded,
    }
    return {"seed": sampling.seed, **settings}, next_token
