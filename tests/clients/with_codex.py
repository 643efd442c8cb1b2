"""Codex CLI, through ten tasks that edit files, against a real server of a scripted model (`coding_agents.py`).

    PYTHONPATH=tests/server .venv/bin/python tests/clients/with_codex.py CODEX [RECORDING]      # run.sh installs Codex

CODEX is the program. Exits with 1 if a task fails.
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

CONFIG = """
model = "{model}"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
wire_api = "responses"
"""


def shell(command: str) -> Call:
    return Call("exec_command", {"cmd": command})


def patch(*lines: str) -> Call:
    return shell("\n".join(["apply_patch <<'EOF'", "*** Begin Patch", *lines, "*** End Patch", "EOF"]))


TASKS = {
    "write": Task(
        "Write hello.py.", [["I write it.", shell("printf 'print(1)\\n' > hello.py")], ["Done."]], {"hello.py": "print(1)\n"}
    ),
    "patch_add": Task(
        "Add notes.md by a patch.",
        [[patch("*** Add File: notes.md", "+# Notes", '+one <two> & "three"')], ["Done."]],
        {"notes.md": '# Notes\none <two> & "three"\n'},
    ),
    "patch_update": Task(
        "Rename the function.",
        [
            [shell("cat a.py")],
            [patch("*** Update File: a.py", "@@", "-def old():", "+def new():", "     return 1")],
            ["The function is called new."],
        ],
        {"a.py": "def new():\n    return 1\n"},
        {"a.py": "def old():\n    return 1\n"},
    ),
    "replace": Task(
        "Change the port.",
        [[shell("sed -i 's/8000/9000/' app.toml")], [shell("cat app.toml")], ["The port is 9000."]],
        {"app.toml": "port = 9000\n"},
        {"app.toml": "port = 8000\n"},
    ),
    "two_at_once": Task(
        "Write two files.",
        [["Both at once.", shell("echo a > a.txt"), shell("echo b > b.txt")], ["Done."]],
        {"a.txt": "a\n", "b.txt": "b\n"},
    ),
    "move": Task(
        "Move old.txt to docs/new.txt.",
        [[shell("mkdir docs")], [shell("mv old.txt docs/new.txt")], [shell("ls -R")], ["Moved."]],
        {"old.txt": None, "docs/new.txt": "text\n"},
        {"old.txt": "text\n"},
    ),
    "after_a_failure": Task(
        "Run the check and mend it.",
        [[shell("python3 check.py")], [shell("echo 'assert True' > check.py")], [shell("python3 check.py")], ["It passes."]],
        {"check.py": "assert True\n"},
        {"check.py": "assert False\n"},
    ),
    "unicode": Task(
        "Write a greeting in Japanese.",
        [[shell("printf '%s\\n' 'こんにちは 🌊 \\\\n \"x\"' > greeting.txt")], ["書きました。"]],
        {"greeting.txt": 'こんにちは 🌊 \\\\n "x"\n'},
    ),
    "namespace": Task(
        "Close the other agent, and say so in a file.",
        [
            [Call("multi_agent_v1__close_agent", {"target": "00000000-0000-0000-0000-000000000000"})],
            [Call("get_goal", {})],
            [shell("echo closed > log.txt")],
            ["Done."],
        ],
        {"log.txt": "closed\n"},
    ),
    "many_steps": Task(
        "Count from 1 to 8, a line for each step.",
        [*([shell(f"echo {number} >> numbers.txt")] for number in range(1, 9)), ["Counted."]],
        {"numbers.txt": "".join(f"{number}\n" for number in range(1, 9))},
    ),
}


def results_of(body: Any) -> Iterator[str]:
    """The ids of calls that a request has results of."""
    return (item["call_id"] for item in body["input"] if item.get("type") == "function_call_output")


def main(program: str, recording: Path | None = None) -> int:
    def do(task: Task, work: Path, url: str) -> None:
        home = work.with_name(f"{work.name}-home")
        home.mkdir()
        (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=url))
        flags = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"]
        done = subprocess.run(
            [program, "exec", *flags, task.asked],
            cwd=work,
            env=os.environ | {"CODEX_HOME": str(home), "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = [event for event in events if event["type"] in ("error", "turn.failed")]
        assert not wrong, wrong
        said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
        assert said[-1] == task.answers[-1][-1], said

    return run_agent(Agent("codex", do, results_of), TASKS, recording)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))
