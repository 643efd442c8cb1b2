"""Tags in free text by the default model, over HTTP: free between the tags, and in their form inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.e2e.process import MODEL, RealServer

pytestmark = pytest.mark.model

STRUCTURES = [
    {
        "begin": "<add>",
        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "end": "</add>",
    },
    {"begin": "<mood>", "schema": {"enum": ["glad", "sad"]}, "end": "</mood>"},
]
TAGS: dict[str, Any] = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<add>", "<mood>"]}
WHITE = r"\s*"
TAG = rf"<add>\[{WHITE}-?\d+{WHITE},{WHITE}-?\d+{WHITE}\]</add>|<mood>\"(?:glad|sad)\"</mood>"
PROMPT = 'To add is written <add>[1, 2]</add>, a mood <mood>"glad"</mood>.\nI add 3 and 4: <add>[3, 4]</add>. I add 5 and 6: '


@pytest.fixture
def client(server: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        yield client


def answers(client: httpx.Client, **fields: Any) -> list[tuple[str, str]]:
    """Texts and finish reasons of some answers by chance."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "temperature": 0.9, "top_p": 1, "n": 6, "seed": 2, **fields}
    response = client.post("/completions", json=asked)
    assert response.status_code == 200, response.text
    return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]


def test_what_stands_in_a_tag_has_its_form(client: httpx.Client) -> None:
    num_tags = 0
    told = [answer for seed in range(4) for answer in answers(client, seed=seed, temperature=0.5, response_format=TAGS)]
    for text, reason in told:
        tags = re.findall(TAG, text)
        num_tags += len(tags)
        rest = re.sub(TAG, "", text)
        if reason == "length":  # the last tag may have no end
            rest = re.sub(r"<(add|mood)>[^<]*(</?\w*)?$", "", rest)
        assert "<add>" not in rest, text
        assert "<mood>" not in rest, text
    assert num_tags > 1, "too few tags to show anything"


def test_an_answer_that_is_one_tag_is_that(client: httpx.Client) -> None:
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in STRUCTURES
    ]
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": True, "stop_after_first": True}
    outputs = {"structural_tag": {"type": "structural_tag", "format": form}}
    told = answers(client, structured_outputs=outputs)
    assert {reason for _, reason in told} <= {"stop", "length"}
    whole = [text for text, reason in told if reason == "stop"]
    assert whole, "all are cut off"
    assert all(re.fullmatch(TAG, text) for text in whole)
