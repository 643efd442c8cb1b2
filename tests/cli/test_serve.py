"""`penstock serve` as a process: from the command line to an answer and to an orderly end."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from penstock.cli.serve import TextFormatter, check_access
from penstock.config import ServerConfig
from penstock.types.errors import ConfigError
from support.cli import serve as anew
from support.cli.serve import Served

Penstock = Callable[..., subprocess.CompletedProcess[str]]
Serving = Callable[..., AbstractContextManager[Served]]


def test_it_answers_and_ends_in_order(serving: Serving, tiny_model: Path) -> None:
    with serving(tiny_model, "--served-model-name", "small", "--served-model-name", "other") as served:
        assert served.get("/ready")
        assert json.loads(served.get("/v1/models"))["data"][0]["id"] == "small"
        body = {"model": "other", "prompt": "in the", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert served.post("/v1/completions", body)["usage"]["completion_tokens"] == 3
        assert b"penstock_generation_tokens_total" in served.get("/metrics")
        code, error = served.end()
    assert code == 0
    assert "Traceback" not in error
    assert "KV cache" in error
    assert "backend reference" in error


def test_it_ends_though_a_grammar_is_still_being_compiled(environment: dict[str, str], tiny_model: Path) -> None:
    program = (
        "import threading; from penstock.cli.main import main; from penstock.text.grammar import Grammars\n"
        "Grammars.prepare = lambda *_: print('compiling', flush=True) or threading.Event().wait()\n"
        "main()"
    )
    body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": "[ab]{3}"}}
    with (
        anew.serving(environment, tiny_model, "--shutdown-timeout", "10ms", start=("-c", program)) as served,
        ThreadPoolExecutor(1) as client,
    ):
        asking = client.submit(served.refusal, "/v1/completions", body)
        assert served.process.stdout is not None
        assert served.process.stdout.readline() == "compiling\n"
        code, error = served.end()
        status, refusal = asking.result()
    assert status == 503
    assert refusal["code"] == "unavailable"
    assert code in (0, 1)
    assert "Traceback" not in error


def test_the_model_answers_to_what_was_given(serving: Serving, tiny_model: Path) -> None:
    with serving(tiny_model) as served:
        assert [card["id"] for card in json.loads(served.get("/v1/models"))["data"]] == ["tiny"]
        for name in ("tiny", str(tiny_model)):
            assert served.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})["model"] == name


def test_several_models_are_served_each_with_its_settings(serving: Serving, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("one", "two", "third"):
        (folder / f"{name}.gguf").symlink_to(tiny_model)
    settings = tmp_path / "penstock.toml"
    settings.write_text(
        f'models_dir = "{folder}"\n[[models]]\nmodel = "{folder}/third.gguf"\nserved_model_name = "late"\nalias = ["later"]\n'
        'load_on = "request"\nmax_model_len = 32\n'
    )
    with serving(tiny_model, "two", "--config", settings, "--memory", "4GiB") as served:
        assert "serves tiny, two, late, one at" in served.ready_text
        cards = {card["id"]: card for card in json.loads(served.get("/v1/models"))["data"]}
        assert {name: card["max_model_len"] is not None for name, card in cards.items()} == {
            "tiny": True,
            "two": True,
            "late": False,
            "one": False,
        }
        for name in ("tiny", "two", "later", "one"):
            assert served.post("/v1/completions", {"model": name, "prompt": "in", "max_tokens": 1})["model"] == name
        assert json.loads(served.get("/v1/models/late"))["max_model_len"] == 32
        (folder / "four.gguf").symlink_to(tiny_model)  # while the server runs
        assert served.post("/v1/completions", {"model": "four", "prompt": "in", "max_tokens": 1})["model"] == "four"
        (folder / "five.gguf").symlink_to(tiny_model)
        assert [card["id"] for card in json.loads(served.get("/v1/models"))["data"]][-2:] == ["four", "five"]
        (folder / "five.gguf").unlink()
        (tmp_path / "outside.gguf").symlink_to(tiny_model)
        for name in ("five", "../outside", "../outside.gguf", str(tmp_path / "outside.gguf"), "four.gguf", "folder/four"):
            assert served.refusal("/v1/completions", {"model": name, "prompt": "in", "max_tokens": 1})[0] == 404
        code, error = served.end()
    assert code == 0
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("a", "b", "--served-model-name", "x"), r"--served-model-name is of one model, and 2 are served\."),
        (("--models-dir", "empty"), "There is no model in the folder empty"),
        (("--models-dir", "absent"), "The folder absent cannot be read: No such file"),
        (("a", "--model", "b"), "The model is given twice"),
    ],
)
def test_models_that_can_not_be_served_together_are_told_at_once(
    penstock: Penstock, arguments: tuple[str, ...], cause: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    result = penstock("serve", *(str(tmp_path / word) if word in ("empty", "absent") else word for word in arguments))
    assert result.returncode
    assert re.search(cause.replace("folder ", rf"folder {re.escape(str(tmp_path))}/"), result.stderr)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_command_that_it_prints_works(serving: Serving, tiny_model: Path) -> None:
    with serving(tiny_model) as served:
        words = shlex.split(served.ready_text.splitlines()[1])
        assert words[0] == "curl"
        answer = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(answer.stdout)["object"] == "chat.completion"


def test_settings_reach_the_server(serving: Serving, tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "p.toml"
    config.write_text(f'model = "{tiny_model}"\nmax_model_len = 64\nlog_format = "json"\nmax_body_size = "2KiB"\n')
    with serving("--config", config) as served:
        assert json.loads(served.get("/v1/models"))["data"][0]["max_model_len"] == 64
        assert served.refusal("/v1/completions", {"prompt": "x" * 3000})[0] == 413
        _, error = served.end()
    messages = [json.loads(line)["message"] for line in error.splitlines()]
    assert any("longest request 64" in message for message in messages)
    assert any("requests of 64 tokens (prompt and answer) at once" in message for message in messages)


def test_one_seed_makes_a_server_repeatable(serving: Serving, environment: dict[str, str], tiny_model: Path) -> None:
    """The first two were started anew: their hashes of strings differ."""
    texts = []
    starts = [anew.serving(environment, tiny_model, "--seed", "1") for _ in range(2)]
    for start in (*starts, serving(tiny_model, "--seed", "2")):
        with start as served:
            body = {"prompt": "a", "max_tokens": 8, "temperature": 2.0, "return_token_ids": True}
            texts.append([served.post("/v1/completions", body)["choices"][0]["text"] for _ in range(2)])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_a_wrong_name_is_told_before_the_server_is_imported(penstock: Penstock) -> None:
    told = penstock("serve", "no-such-model", "--port", "0", env={"PYTHONPROFILEIMPORTTIME": "1"}).stderr
    assert "error: There is no model called 'no-such-model'" in told
    assert "penstock.serve.http.listener" in told, "imports are listed"
    assert "penstock.serve.answering" not in told


def test_a_taken_port_is_told_at_once(penstock: Penstock, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = penstock("serve", tiny_model, "--port", taken.getsockname()[1])
    assert result.returncode == 1
    assert result.stderr.startswith("error: Port")
    assert "--port" in result.stderr


def test_a_bad_chat_template_is_told(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("serve", tiny_model, "--backend", "reference", "--port", "0", "--chat-template", "{% if %}")
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--api-key-file", "nowhere"], "nowhere"),
        (["--api-key-file", "blank"], "contains no key"),
        (["--ssl-certfile", "nowhere"], "There is no file nowhere."),
        (["--ssl-certfile", "blank"], "The TLS files cannot be used"),
        (["--ssl-keyfile", "blank"], "--ssl-certfile is not"),
        (["--config", "far.toml"], "names the API key 'hr'"),
        (["--webhook-url", "https://example.org/hook"], "--webhook-url needs --jobs-dir"),
    ],
)
def test_keys_and_certificates_are_checked_before_anything_is_fetched(
    penstock: Penstock, tmp_path: Path, arguments: list[str], cause: str
) -> None:
    (tmp_path / "blank").write_text("\n")
    (tmp_path / "far.toml").write_text('[[upstreams]]\nname = "far"\nurl = "http://x"\nnever_keys = ["hr"]\n')
    result = penstock("serve", "--port", "0", *arguments, env={"PIP_NO_INDEX": "1"})
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert cause in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("value", ["", "  "])
def test_a_variable_for_keys_that_is_empty_does_not_open_the_server(penstock: Penstock, value: str) -> None:
    result = penstock("serve", "--port", "0", env={"PENSTOCK_API_KEY": value})
    assert result.returncode == 1
    assert "PENSTOCK_API_KEY is set, but empty" in result.stderr


@pytest.mark.parametrize(
    "name", ["PENSTOCK_API_KEY_FILE", "PENSTOCK_API_KEYS_FILE", "PENSTOCK_ADMIN_API_KEY", "PENSTOCK_SSL_CERTFILE"]
)
def test_a_variable_for_a_file_of_keys_or_a_certificate_is_not_empty(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, but empty"):
        check_access(ServerConfig(), {name: ""})
    check_access(ServerConfig(), {})


def test_a_server_that_fails_closes_the_engine(environment: dict[str, str], tiny_model: Path) -> None:
    program = (
        "import penstock.serve.server as server; from penstock.cli.main import main\n"
        "def fail(*args, **kwargs):\n    raise server.ConfigError('It broke.')\n"
        "server.run_server = fail\n"
        "main()"
    )
    words = ["serve", str(tiny_model), "--backend", "reference", "--port", "0", "--log-level", "warning"]
    result = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, timeout=200
    )
    assert (result.returncode, result.stderr) == (1, "error: It broke.\n")


@pytest.mark.parametrize(("has_terminal", "code"), [(False, 0), (True, -signal.SIGHUP)])
def test_a_hangup_during_the_load_ends_a_server_with_a_terminal_alone(has_terminal: bool, code: int) -> None:
    script = (
        "import os, signal\n"
        "from penstock.cli import serve\n"
        f"serve.has_terminal = lambda: {has_terminal}\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "serve.models_in = lambda _: os.kill(os.getpid(), signal.SIGHUP) or os._exit(0)\n"
        "serve.serve.main([], standalone_mode=False)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == code


def test_the_garbage_collector_rests_during_a_start(environment: dict[str, str], tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import gc, sys\n"
        "import penstock.deploy.factory as factory\n"
        "start = factory.start_deployment\n"
        "def runs():\n    return sum(generation['collections'] for generation in gc.get_stats())\n"
        "def count(*args, **kwargs):\n"
        "    before, deployment = runs(), start(*args, **kwargs)\n"
        "    print('collected', runs() - before, 'times', file=sys.stderr)\n"
        "    return deployment\n"
        "factory.start_deployment = count\n"
    )
    with anew.serving({**environment, "PYTHONPATH": str(tmp_path)}, tiny_model) as served:
        _, error = served.end()
    assert "collected 0 times" in error


def test_unknown_variables_are_warned_of_and_quiet_logs_are_quiet(serving: Serving, tiny_model: Path) -> None:
    with serving(tiny_model, "--log-level", "warning", env={"PENSTOCK_MAX_NUM_SEQ": "32"}) as served:
        _, error = served.end()
    assert "WARNING The environment variable PENSTOCK_MAX_NUM_SEQ is unknown" in error
    assert error.rstrip().endswith("Did you mean PENSTOCK_MAX_NUM_SEQS?")
    assert len(error.splitlines()) == 1


def test_a_line_of_the_log_does_nothing_to_a_terminal() -> None:
    """A model's file may bring any character, such as in the name of a chat template."""
    line = TextFormatter("%(levelname)s %(message)s").format(logging.makeLogRecord({"msg": "red\x1b[31m", "levelname": "INFO"}))
    assert line == "INFO red [31m"


def test_a_text_from_elsewhere_begins_no_line_of_the_log() -> None:
    """An upstream's error and a traceback may have any lines."""
    forged = "\n12:00:00 ERROR forged"
    try:
        raise ValueError(forged)
    except ValueError:
        record = logging.makeLogRecord({"msg": f"it failed: {forged}", "exc_info": sys.exc_info()})
    first, *others = TextFormatter("%(message)s").format(record).splitlines()
    assert first == "it failed: "
    assert len(others) > 3
    assert all(line.startswith("  ") for line in others)
