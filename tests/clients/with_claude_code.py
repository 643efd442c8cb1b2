"""Claude Code, through ten tasks that edit files, against a real server of a scripted model (`coding_agents.py`).

    PYTHONPATH=tests/server .venv/bin/python tests/clients/with_claude_code.py CLAUDE [RECORDING]      # run.sh installs it

CLAUDE is the program. Exits with 1 if a task fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.clients.coding_agents import MODEL, TASK_TIMEOUT_S, Agent, Call, Task, run_agent


def write(file: str, text: str) -> Call:
    return Call("Write", {"file_path": f"FOLDER/{file}", "content": text})


def read(file: str) -> Call:
    return Call("Read", {"file_path": f"FOLDER/{file}"})


def edit(file: str, old: str, new: str, **fields: Any) -> Call:
    return Call("Edit", {"file_path": f"FOLDER/{file}", "old_string": old, "new_string": new, **fields})


def bash(command: str) -> Call:
    return Call("Bash", {"command": command, "description": "Run a command"})


TASKS = {
    "write": Task("Write hello.py.", [[write("hello.py", "print(1)\n")], ["Done."]], {"hello.py": "print(1)\n"}),
    "edit": Task(
        "Rename the function.",
        [[read("a.py")], [edit("a.py", "def old():", "def new():")], ["The function is called new."]],
        {"a.py": "def new():\n    return 1\n"},
        {"a.py": "def old():\n    return 1\n"},
    ),
    "replace_all": Task(
        "Rename x to y everywhere.",
        [[read("b.py")], [edit("b.py", "x", "y", replace_all=True)], ["Renamed."]],
        {"b.py": "y = 1\nprint(y)\n"},
        {"b.py": "x = 1\nprint(x)\n"},
    ),
    "two_at_once": Task(
        "Write two files.",
        [["Both at once.", write("a.txt", "a\n"), write("b.txt", "b\n")], ["Done."]],
        {"a.txt": "a\n", "b.txt": "b\n"},
    ),
    "shell": Task(
        "Change the port.",
        [[bash("sed -i 's/8000/9000/' app.toml")], [bash("cat app.toml")], ["The port is 9000."]],
        {"app.toml": "port = 9000\n"},
        {"app.toml": "port = 8000\n"},
    ),
    "move": Task(
        "Move old.txt to docs/new.txt.",
        [[bash("mkdir docs && mv old.txt docs/new.txt")], [bash("ls -R")], ["Moved."]],
        {"old.txt": None, "docs/new.txt": "text\n"},
        {"old.txt": "text\n"},
    ),
    "after_a_failure": Task(
        "Run the check and mend it.",
        [
            [bash("python3 check.py")],
            [read("check.py")],
            [edit("check.py", "False", "True")],
            [bash("python3 check.py")],
            ["It passes."],
        ],
        {"check.py": "assert True\n"},
        {"check.py": "assert False\n"},
    ),
    "unicode": Task(
        "Write a greeting in Japanese.",
        [[write("greeting.txt", 'こんにちは 🌊 \\n "x"\n')], ["書きました。"]],
        {"greeting.txt": 'こんにちは 🌊 \\n "x"\n'},
    ),
    "edit_that_fails": Task(
        "Change the colour.",
        [
            [read("c.css")],
            [edit("c.css", "color: blue", "color: red")],
            [edit("c.css", "color: green", "color: red")],
            ["It is red."],
        ],
        {"c.css": "p { color: red }\n"},
        {"c.css": "p { color: green }\n"},
    ),
    "many_steps": Task(
        "Count from 1 to 8, a line for each step.",
        [*([bash(f"echo {number} >> numbers.txt")] for number in range(1, 9)), ["Counted."]],
        {"numbers.txt": "".join(f"{number}\n" for number in range(1, 9))},
    ),
}


def results_of(body: Any) -> Iterator[str]:
    """The ids of calls whose results the body has."""
    for message in body.get("messages", ()):
        blocks = message["content"] if isinstance(message["content"], list) else ()
        yield from [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]


class ClaudeCode:
    def __init__(self, program: str) -> None:
        self._program = program

    def do(self, task: Task, folder: Path, url: str) -> None:
        home = folder.parent / "home"
        home.mkdir(exist_ok=True)
        of_model = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL}
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1", "HOME": str(home)}
        done = subprocess.run(
            [self._program, "-p", task.asked, "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"],
            cwd=folder,
            env=os.environ | of_model | {"ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL} | quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_TIMEOUT_S,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert events, done.stderr
        assert not events[-1]["is_error"], events[-1]
        assert events[-1]["result"] == task.answers[-1][0], events[-1]


if __name__ == "__main__":
    agent = Agent("claude-code", ClaudeCode(sys.argv[1]).do, results_of)
    sys.exit(run_agent(agent, TASKS, *map(Path, sys.argv[2:])))
