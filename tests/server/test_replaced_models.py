"""Requests that found a model which an update has replaced since: they look again, and never go round in circles."""

from __future__ import annotations

import pytest
from starlette.requests import Request as HttpRequest

from penstock.deploy.running import ServedModel
from penstock.obs.metrics import Metrics
from penstock.serve.asking import _find_unchecked
from penstock.serve.course import COURSE_KEY, Course
from penstock.serve.errors import MODEL_NOT_FOUND, ApiError
from penstock.types.adapter import AdapterRef
from penstock.types.errors import ModelAway
from support.deployments import deployment_of
from support.server.harness import make_client, make_runtime

ASK = {"prompt": "a", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def model():
    made = make_runtime()
    yield made
    made.close()


async def test_a_model_that_is_not_served_any_more_is_looked_up_anew(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a canary leaves between a request's choice of it and its first step."""
    client = make_client(model)
    answerer, calls = ServedModel.answerer, list[str]()

    def first_time_away(served: ServedModel):
        calls.append(served.name)
        if len(calls) == 1:
            raise ModelAway("a canary that has left")
        return answerer(served)

    monkeypatch.setattr(ServedModel, "answerer", first_time_away)
    async with client:
        answer = await client.post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["model"]) == (200, model.name), answer.text
    assert len(calls) >= 2


def test_an_adapter_that_was_found_for_a_replaced_model_is_looked_up_anew(model) -> None:
    deployment = deployment_of(model)
    replaced = ServedModel(names=(model.name,), metrics=Metrics(model.name), load=lambda: model, plan=lambda: None)
    course = Course(looked_up=("red", (replaced, AdapterRef(1))))
    scope = HttpRequest({"type": "http", "headers": [], COURSE_KEY: course}).scope
    with pytest.raises(ApiError) as raised:
        _find_unchecked("red", deployment, scope)
    assert raised.value.code == MODEL_NOT_FOUND
