"""`GET /v1/models` and `/v1/models/{id}`: what is served, in OpenAI's shape with vLLM's `max_model_len` and `root`."""

from __future__ import annotations

from typing import Any

from penstock.deploy.running import ModelInfo
from penstock.serve.openai.read import check_model


class ModelsEndpoint:
    def __init__(self, model: ModelInfo) -> None:
        self._model = model

    async def list(self) -> dict[str, Any]:
        """The names under which the model is served."""
        return {"object": "list", "data": [self._card(name) for name in self._model.served_names]}

    async def get(self, model_id: str) -> dict[str, Any]:
        """One of them."""
        return self._card(check_model(model_id, self._model))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created_unix_s,
            "owned_by": "penstock",
            "root": self._model.root,
            "parent": None,
            "max_model_len": self._model.max_model_len,
        }
