"""`penstock serve --device cuda` with the default model, and one request: does it answer as the CPU does?

    PYTHONPATH=tests .venv/bin/python tests/backends/cuda/serve_default_model.py [--max-tokens 1] [--profile]

After `make test-cuda`, which brings what it needs. No test: Triton's interpreter takes three to nine minutes for a step of this
model. The GPU computes in float32, and is emulated if there is none. There are no graphs, each of which takes two steps, and no
profile run, which takes some six, unless asked for. Ends with an error if the text differs from the native backend's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request

import pytest

from penstock.backends.cuda import memory
from penstock.cli.main import main as penstock
from support.backends.cuda.emulated_gpu import emulate_gpu

PROMPT = "The capital of France is"
ANSWER_S = 4 * 3600.0


def ask(url: str, max_tokens: int) -> str:
    body = json.dumps({"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def wait_until_ready(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
            return
        except OSError:
            time.sleep(1)


def serve(max_tokens: int, *settings: str) -> str:
    """The answer of `penstock serve` in this process; then it is ended as by Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[str] = []

    def client(url: str) -> None:
        try:
            wait_until_ready(url)
            begin = time.monotonic()
            answers.append(ask(url, max_tokens))
            print(f"{' '.join(settings)}: {answers[0]!r} after {time.monotonic() - begin:.0f} s", flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=client, args=[f"http://127.0.0.1:{port}"], daemon=True).start()
    try:
        penstock(["serve", "--port", str(port), *settings])
    except SystemExit as ended:  # it ends its process
        if not answers:
            raise SystemExit(f"penstock serve {' '.join(settings)} did not answer and ended with {ended.code}") from None
    return answers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="with the profile run at the start")
    args = parser.parse_args()
    expected = serve(args.max_tokens, "--device", "cpu")
    small = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--no-cuda-graphs", "--step-timeout", "4h")
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate_gpu(monkeypatch)
        if not args.profile:
            monkeypatch.setattr(memory, "run_largest_steps", lambda *_: None)
            monkeypatch.setattr(memory, "run_small_steps", lambda *_: None)
        found = serve(args.max_tokens, "--device", "cuda", *small)
    if found != expected:
        sys.exit(f"{found!r} on the GPU, {expected!r} on the CPU")


if __name__ == "__main__":
    main()
