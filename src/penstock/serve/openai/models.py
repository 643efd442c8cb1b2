"""`GET /v1/models` and `/v1/models/{id}`: what is served, in OpenAI's shape with vLLM's `max_model_len` and `root`."""

from __future__ import annotations

from typing import Any

from penstock.deploy.running import Deployment, RunningModel
from penstock.serve.errors import model_not_found


def find_model(name: str | None, deployment: Deployment) -> RunningModel:
    """The model that a request names; without a name the default one. Raises 404."""
    running = deployment.find(name)
    if running is None:
        raise model_not_found(name or "", deployment.served_names)
    return running


class ModelsEndpoint:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def list(self) -> dict[str, Any]:
        """The names under which models are served."""
        cards = [_card(name, running) for running in self._deployment.models for name in running.model.served_names]
        return {"object": "list", "data": cards}

    async def get(self, model_id: str) -> dict[str, Any]:
        """The model with this name."""
        return _card(model_id, find_model(model_id, self._deployment))


def _card(name: str, running: RunningModel) -> dict[str, Any]:
    model = running.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "penstock",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
