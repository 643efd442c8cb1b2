"""The loop over a client's checks, which every script of this folder runs, and what several of them ask."""

from __future__ import annotations

import json
import time
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from typing import TypeVar

Given = TypeVar("Given")


def run(client: str, checks: Sequence[Callable[[Given], object]], given: Callable[[str], Given]) -> int:
    """The exit code: 1 if a check raises. Each gets what `given` makes of its name. Prints a line for each."""
    failed = 0
    for check in checks:
        name = check.__name__.removeprefix("with_")
        try:
            check(given(name))
            print(f"ok   {client} {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL {client} {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


def num_running(url: str, key: str) -> int:
    request = urllib.request.Request(f"{url}/load", headers={"X-Api-Key": key})
    with urllib.request.urlopen(request) as answer:
        return int(json.load(answer)["requests_running"])


def wait_until_none_runs(url: str, key: str) -> None:
    for _ in range(100):
        if num_running(url, key) == 0:
            return
        time.sleep(0.1)
    raise AssertionError("the request goes on")
