"""Standard input and output of the processes of a chaos test: one command a line, one line of JSON for each answer."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

Commands = Mapping[str, Callable[..., dict[str, Any]]]


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def listen(commands: Commands) -> None:
    """Answer commands from a thread. The process ends with its standard input, so that none outlives the test."""
    threading.Thread(target=_answer, args=(commands,), daemon=True).start()


def _answer(commands: Commands) -> None:
    for line in sys.stdin:
        name, *values = line.split()
        try:
            say(**commands[name](*map(float, values)))
        except RuntimeError:  # another thread has changed what was read
            say(again=True)
    os._exit(0)
