"""`penstock doctor` beside a real server: it names what is wrong with its settings, or with what clients send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.e2e.process import COMPLETIONS, TIMEOUT_S, RealServer, penstock, serving

STORY = "The lighthouse keeper wrote in his diary what the sea had brought, from which ships, and for whom. " * 8


def ask(server: RealServer, prompts: Sequence[str], max_tokens: int, *, at_once: int = 1) -> None:
    def send(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=TIMEOUT_S).status_code

    with ThreadPoolExecutor(at_once) as clients:
        assert set(clients.map(send, prompts)) == {200}


def found(server: RealServer) -> list[str]:
    ended = penstock("doctor", server.url, "--seconds", "0.2", "--json")
    told = json.loads(ended.stdout)
    assert ended.returncode == (told["verdict"] == "ill")
    return [one["name"] for one in told["findings"]]


@pytest.mark.usefixtures("weights")
def test_a_window_that_is_too_long(tmp_path: Path) -> None:
    with serving(tmp_path, "--preset", "dynamic", "--batch-window", "200ms") as server:
        ask(server, [f"{nth} is" for nth in range(6)], 3)
        assert found(server)[0] == "batch window"


@pytest.mark.usefixtures("weights")
def test_one_row_for_eight_clients(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "1") as server:
        ask(server, [f"{nth} is" for nth in range(16)], 8, at_once=8)
        assert found(server)[0] == "few rows"


@pytest.mark.usefixtures("weights")
def test_the_time_of_the_day_before_a_long_prompt(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        ask(server, [f"It is 10:{nth:02}. {STORY}" for nth in range(11, 19)], 2)
        assert found(server)[0] == "prompts differ early"
