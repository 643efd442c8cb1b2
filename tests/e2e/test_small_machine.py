"""A machine of one core and little memory, as a Raspberry Pi has: the server finds settings that fit by itself.

The kernel enforces the limits (a control group) and counts what came of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.e2e.cgroup import ControlGroup, control_group
from support.e2e.process import COMPLETIONS, TIMEOUT_S, serving

pytestmark = pytest.mark.model

MIB = 1 << 20
NUM_CLIENTS = 8


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[ControlGroup]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(control_group(request.param * MIB, num_cpus=1))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield made


def ask(url: str, number: int, num_prompt_tokens: int, num_answer_tokens: int) -> int:
    """Returns how many tokens were answered. Prompts of different clients have nothing in common."""
    prompt = [10 + (number * num_prompt_tokens + position) % 40_000 for position in range(num_prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": num_answer_tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(url + COMPLETIONS, json=body, timeout=5 * TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("group", "most_prompt_tokens"), [(512, 700), (1024, 150)], indirect=["group"], ids=["512MiB", "1024MiB"]
)
def test_eight_clients_at_once_on_one_core(weights: None, group: ControlGroup, most_prompt_tokens: int, tmp_path: Path) -> None:
    """With 512 MiB the prompts fill the KV cache, so that all of its memory is used."""
    with serving(tmp_path, prefix=group.prefix) as server:
        assert "1 thread" in server.log.read_text()
        assert server.metric("memory_bytes") < group.limit_bytes, "the KV cache may grow beyond the limit"
        num_tokens = int(server.metric("kv_blocks")) * 16
        num_prompt_tokens = min(most_prompt_tokens, num_tokens // NUM_CLIENTS)
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            answers = [clients.submit(ask, server.url, number, num_prompt_tokens, 20) for number in range(NUM_CLIENTS)]
            assert [answer.result() for answer in answers] == [20] * NUM_CLIENTS
        assert server.end()[0] == 0
    print(f"\npeak {group.peak_bytes / MIB:.0f} MiB of {group.limit_bytes // MIB}, KV cache of {num_tokens} tokens")
    assert group.num_killed == 0
    assert group.num_at_limit == 0
    assert group.peak_bytes < group.limit_bytes
