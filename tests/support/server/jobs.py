"""A server with a folder of jobs, and OpenAI's client for it. For tests of files and batches."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import openai

from penstock.config import ServerConfig
from penstock.serve.jobs import runner
from penstock.serve.jobs.runner import BatchRunner
from support.server.harness import GatedExecutor, LiveServer, make_runtime, wait_until

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
ENDED = ("completed", "failed", "expired", "cancelled")
BODIES = {
    CHAT: {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"model": "toy", "max_tokens": 3, "prompt": "hello"},
    EMBEDDINGS: {"model": "toy", "input": "hello"},
    RESPONSES: {"model": "toy", "max_output_tokens": 3, "input": "hello", "store": False},
}


def line(custom_id: str, url: str = CHAT, **fields) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES[url] | fields}


def file_of(lines: Iterable[dict]) -> tuple[str, bytes]:
    return "in.jsonl", "\n".join(map(json.dumps, lines)).encode()


def impatient(patch) -> None:
    """Let a runner wait as little as it can."""
    patch.setattr(runner, "GATHERED_S", 0.01)
    patch.setattr(runner, "TRIED_AGAIN_S", 0.02)
    patch.setattr(runner, "LOOKED_EACH_S", 0.02)


class JobsServer(LiveServer):
    @property
    def batches(self) -> BatchRunner:
        return self.server._app.state.parts.batches

    def client(self, key: str = "unused", **fields) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **fields)


@contextlib.contextmanager
def serving(folder: Path, executor=None, *, runtime=None, more=None, **config):
    """A live server over a fresh runtime, with its folder of jobs. `more`: as in `LiveServer`."""
    runtime = runtime or make_runtime(executor)
    fields = {"port": 0, "shutdown_timeout_s": 0.0, "jobs_dir": str(folder)} | config
    try:
        with JobsServer(runtime, ServerConfig(**fields), more=more or {}) as server:
            yield server
            if isinstance(executor, GatedExecutor):  # lines are given up first, and then a step that waits may end
                server.server.request_shutdown()
                wait_until(server.batches._closing.is_set)
                executor.open()
    finally:
        runtime.close()


def begun(client: openai.OpenAI, lines: Iterable[dict], url: str = CHAT, **fields):
    """Upload lines, and begin a batch of them."""
    file = client.files.create(file=file_of(lines), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, **{"completion_window": "24h", **fields})


def ended(client: openai.OpenAI, batch):
    """Wait for the end of a batch."""
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, timeout_s=60)
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, file_id: str | None) -> list[dict]:
    return [] if file_id is None else [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def counted(client: openai.OpenAI, batch) -> Counter[str]:
    """How often each line of an ended batch was answered, with an output or an error."""
    both = answers(client, batch.output_file_id) + answers(client, batch.error_file_id)
    return Counter(one["custom_id"] for one in both)
