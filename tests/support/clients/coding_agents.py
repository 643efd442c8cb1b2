"""Coding agents against a real server whose model says what a script tells it to say. `with_claude_code.py` and others call it.

An agent's script has `TASKS`: what is asked, what the model answers to each request (texts and calls of tools), and the files
that the agent must have made of it. `run_agent` starts the server, hands each task to the agent, and checks that every call
reached the agent, every result came back, no request was refused, and the files are right.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from recorder import Message, Recording, record

from penstock.testing import HashExecutor, HashModel
from support.clients.checks import run
from support.server.harness import CAPACITY, END_ID, VOCAB_SIZE, make_tokenizer, running

MODEL = "smollm2:135m"
"""The name that recorded requests ask for."""
ROOMY = replace(CAPACITY, max_model_len=2**18, block_size=256, num_blocks=2**11, max_step_tokens=2**13)
"""Agents begin with up to 100,000 characters, each of them a token here. The fake device checks each block in each step."""
TASK_TIMEOUT_S = 300
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "<|turn|>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
"""Calls have the format of Qwen and Hermes."""


class Call(NamedTuple):
    """A call of a tool, as the model writes it."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        said = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{said}\n</tool_call>"


@dataclass(frozen=True)
class Task:
    asked: str
    answers: Sequence[Sequence[str | Call]]
    """One for each request: texts and calls. The last one has no call."""
    wants: Mapping[str, str | None]
    """Files afterwards, and their texts; None: the file is gone."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files before."""

    @property
    def num_calls(self) -> int:
        return sum(isinstance(part, Call) for answer in self.answers for part in answer)


class Script:
    """The texts that the model says, one for each request."""

    def __init__(self) -> None:
        self._texts: Iterator[str] = iter(())
        self._said: list[int] = []

    def begin(self, task: Task, folder: Path) -> None:
        """`FOLDER` in arguments becomes the folder in which the agent works."""
        texts = ["\n".join(map(str, answer)) for answer in task.answers]
        self._texts = iter([text.replace("FOLDER", str(folder)) for text in texts])

    def token(self, num_generated: int) -> int:
        if num_generated == 0:
            self._said = make_tokenizer().encode(next(self._texts, "There is nothing left to say."), add_special_tokens=False)
        return [*self._said, END_ID][min(num_generated, len(self._said))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedModel(HashModel):
    script: Script
    vocab_size: int = VOCAB_SIZE

    def sample(self, _value, _sampling, num_generated, mask=None):
        """Return what the script says. A token that the grammar of calls forbids becomes another, so the task fails."""
        wanted = (self.script.token(num_generated), *range(VOCAB_SIZE))
        return next(each for each in wanted if mask is None or mask[each // 8] >> each % 8 & 1)


class Counted(Recording):
    """Counts requests by status, and the calls whose results came back. Records requests where a file is given."""

    def __init__(self, path: Path | None, results_of: Callable[[Any], Iterable[str]]) -> None:
        if path is not None:
            super().__init__(path)
        self._is_recorded = path is not None
        self._results_of = results_of
        self.statuses: list[int] = []
        self.results: set[str] = set()
        """Ids of calls."""

    def add(self, request: Message, answer: Message) -> None:
        self.statuses.append(answer.status)
        if request.body:
            self.results |= set(self._results_of(json.loads(request.body)))
        if self._is_recorded:
            super().add(request, answer)


@dataclass(frozen=True, slots=True)
class Agent:
    """A program that edits files."""

    name: str
    do: Callable[[Task, Path, str], None]
    """Runs it on a task, in a folder, with the server's URL. Raises if the program says that something went wrong."""
    results_of: Callable[[Any], Iterable[str]]
    """The ids of calls that a request's body has results of."""


class Bench:
    """An agent, the server that it asks, and what was counted on the way between them."""

    def __init__(self, agent: Agent, url: str, script: Script, counted: Counted, folder: Path) -> None:
        self._agent = agent
        self._url = url
        self._script = script
        self._counted = counted
        self._folder = folder
        self.num_steps = 0

    def do(self, name: str, task: Task) -> None:
        work = self._folder / name
        work.mkdir()
        for file, text in task.files.items():
            (work / file).write_text(text)
        self._script.begin(task, work)
        num_before, had = len(self._counted.statuses), set(self._counted.results)
        self._agent.do(task, work, self._url)
        statuses = self._counted.statuses[num_before:]
        assert statuses == [200] * len(task.answers), statuses
        num_calls = len(self._counted.results - had)
        assert num_calls == task.num_calls, f"{num_calls} of {task.num_calls} calls have a result"
        for file, text in task.wants.items():
            path = work / file
            found = path.read_text() if path.exists() else None
            assert found == text, f"{file}: {found!r}"
        self.num_steps += num_calls


def run_agent(agent: Agent, tasks: Mapping[str, Task], recording: Path | None = None) -> int:
    """The exit code: 1 if a task fails. Prints a line for each task, and the number of steps."""
    script, counted = Script(), Counted(recording, agent.results_of)
    listener = socket.create_server(("127.0.0.1", 0))
    executor = HashExecutor(ROOMY, model=ScriptedModel(script=script))
    with (
        tempfile.TemporaryDirectory(prefix=f"{agent.name}-") as folder,
        running(executor, served_names=(MODEL,), chat_template=CHAT_TEMPLATE) as server,
    ):
        between = record(listener, f"127.0.0.1:{server.port}", counted)
        threading.Thread(target=asyncio.run, args=(between,), daemon=True).start()
        bench = Bench(agent, f"http://127.0.0.1:{listener.getsockname()[1]}", script, counted, Path(folder))

        def check(name: str, task: Task) -> Callable[[Bench], None]:
            def with_task(bench: Bench) -> None:
                bench.do(name, task)

            with_task.__name__ = name
            return with_task

        failed = run(agent.name, [check(name, task) for name, task in tasks.items()], lambda _name: bench)
    num_calls = sum(task.num_calls for task in tasks.values())
    num_refused = sum(status != 200 for status in counted.statuses)
    told = f"{bench.num_steps} of {num_calls} steps, {len(counted.statuses)} requests, {num_refused} refused"
    print(f"     {agent.name} {told}")
    return failed
