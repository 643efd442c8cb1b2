"""A limit of the address space (`ulimit -v`): refused at the start, or enough for everything."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from support.e2e.process import CHAT, MODEL, TIMEOUT_S, penstock, serving

pytestmark = pytest.mark.model

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def limited(kib: int) -> tuple[str, ...]:
    return ("bash", "-c", f'ulimit -v {kib}; exec "$@"', "limited")


def test_a_start_is_refused_with_the_limit_that_suffices(weights: None, tmp_path: Path) -> None:
    refused = penstock("serve", MODEL, "--port", "0", prefix=limited(600_000))
    assert refused.returncode == 1
    assert "limited to 600000 KiB" in refused.stderr
    found = re.search(r"`ulimit -v (\d+)`", refused.stderr)
    assert found is not None, refused.stderr
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How old are you?"}],
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA}},
    }
    with serving(tmp_path, prefix=limited(int(found[1]))) as server:
        answer = httpx.post(server.url + CHAT, json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        assert server.end()[0] == 0
        assert "Traceback" not in server.log.read_text()
