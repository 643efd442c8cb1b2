"""Which files of `src` does one streamed chat request enter? Run `python tests/server/trace_request.py` from the root; with
`schema` behind it, the request asks for an answer that follows a JSON schema, and `chat schema` traces both.

A live server over the hash executor answers one request to warm up and three that are traced, each with a profile function in
every thread until all work for it is done. Prints the files in the order in which a request enters them, with the number of
their functions that ran: of the request that enters the fewest, since others may meet what the server does every second.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

import penstock
from support.server.harness import LiveServer, make_runtime, wait_until

ROOT = str(Path(penstock.__file__).parent) + "/"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello there"}], "stream": True, "max_tokens": 8}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
BODIES: dict[str, dict[str, object]] = {"chat": CHAT, "schema": CHAT | {"response_format": FORMAT}}


class Trace:
    """Calls of functions of the package, by file and name, in the order of the first call."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[tuple[str, str]] = Counter()

    def profile(self, frame: FrameType, event: str, _arg: object) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(ROOT):
            self.calls[name[len(ROOT) :], frame.f_code.co_qualname] += 1

    def files(self) -> dict[str, int]:
        """File -> number of its functions that ran, in the order of entry."""
        return dict(Counter(file for file, _ in self.calls))


def trace(body: dict[str, object]) -> Trace:
    found, traced = Trace(), list[Counter[tuple[str, str]]]()
    threading.setprofile(found.profile)
    runtime = make_runtime()
    try:
        with LiveServer(runtime) as server:
            for found.is_on in (False, True, True, True):
                found.calls = Counter()
                with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
                    assert any(line == "data: [DONE]" for line in answer.iter_lines())
                # Some of the work comes after the last byte has left.
                wait_until(lambda: runtime.bridge.num_open_requests == 0 and not server.server.acceptor.tasks)
                wait_until(lambda: runtime.engine.load().num_running == 0)
                if found.is_on:
                    traced.append(found.calls)
            found.is_on = False
    finally:
        runtime.close()
    found.calls = min(traced, key=lambda calls: len({file for file, _ in calls}))
    return found


def show(found: Trace) -> str:
    files = found.files()
    lines = [f"{number:3} {file:48} {num:3} functions" for number, (file, num) in enumerate(files.items(), 1)]
    return "\n".join([*lines, f"{len(files)} files, {len(found.calls)} functions, {found.calls.total()} calls"])


def main() -> None:
    print("\n\n".join([show(trace(BODIES[name])) for name in sys.argv[1:] or ["chat"]]))


if __name__ == "__main__":
    main()
