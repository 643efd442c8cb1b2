"""A policy of a user's own, from a file beside the settings to the server that schedules by it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.cli.serve import Served

Penstock = Callable[..., subprocess.CompletedProcess[str]]
Serving = Callable[..., AbstractContextManager[Served]]
POLICY = '''
from penstock.sched.policies.base import Order, Victim


class Noted(Order):
    """By arrival; notes which request it was asked for."""

    def __init__(self, *, path: str, tenants: dict):
        self.path, self.tenants = path, tenants

    def key(self, request, now_ns):
        return (self.tenants.get(request.tenant, 9), request.arrival_ns)

    def admitted(self, request):
        with open(self.path, "a") as file:
            file.write(f"{request.num_prompt_tokens} tokens\\n")


class Broken(Order):
    def key(self, request, now_ns):
        return (request.arrival_ns // (request.num_prompt_tokens - request.num_prompt_tokens),)


class Oldest(Victim):
    def choose(self, view):
        return view.candidates[0]
'''
BODY = {"prompt": "in the", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which commands run."""
    (tmp_path / "my_policy.py").write_text(POLICY)
    return tmp_path


def test_a_file_of_settings_names_a_class_and_its_arguments(serving: Serving, tiny_model: Path, folder: Path) -> None:
    (folder / "penstock.toml").write_text(
        f'model = "{tiny_model}"\npreset = "vllm"\npolicy = "./my_policy.py:Noted"\nvictim = "./my_policy.py:Oldest"\n'
        '[policy_args]\npath = "noted"\ntenants = {quick = 1}\n'
    )
    with serving("--config", "penstock.toml") as served:
        usage = served.post("/v1/completions", BODY)["usage"]
        assert usage["completion_tokens"] == 3
        code, error = served.end()
    assert code == 0, error
    assert (folder / "noted").read_text() == f"{usage['prompt_tokens']} tokens\n"


def test_one_that_fails_while_it_runs_is_named_in_the_log(serving: Serving, tiny_model: Path, folder: Path) -> None:
    with serving(tiny_model, "--policy", "./my_policy.py:Broken") as served:
        assert served.refusal("/v1/completions", BODY)[0] in (500, 503)
        _, error = served.end()
    assert "The order './my_policy.py:Broken' failed in key: ZeroDivisionError" in error
    _, traceback = error.split("Traceback")
    assert traceback.count("my_policy.py") == 1, "one traceback, which ends at the line that failed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "./absent.py:Noted"], "--policy: The order './absent.py:Noted' was not found: there is no file /"),
        (["--policy", "absent_module:Noted"], "there is no module absent_module where Python looks for modules."),
        (["--victim", "./my_policy.py:Oldst"], "--victim: The victim './my_policy.py:Oldst' was not found"),
        (["--policy", "./my_policy.py:Noted"], "needs the argument path, which is not given. It takes: path, tenants."),
        (["--budget", "./my_policy.py:Oldest"], "is of another kind: its class inherits from Victim. Use --victim;"),
        (["--policy-args", "{weight = 2}"], "--policy: The order 'fcfs' takes no argument weight. It takes: no arguments."),
        (["--policy-args", "{weight = 2}"], "Arguments are those of --policy-args, or a table of the file: leave weight out."),
    ],
)
def test_a_start_that_can_not_succeed_says_why(
    penstock_here: Penstock, tiny_model: Path, folder: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.serve.set_up_logging", lambda config: None)  # it would replace pytest's handlers
    result = penstock_here("serve", tiny_model, "--backend", "reference", *arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: --")
    assert says in result.stderr


def test_a_table_of_arguments_is_one_of_toml(penstock: Penstock) -> None:
    result = penstock("serve", "--policy-args", "weight: 2")
    assert result.returncode == 2
    assert "is not an inline table of TOML, such as {weight = 2}" in " ".join(result.stderr.split())
