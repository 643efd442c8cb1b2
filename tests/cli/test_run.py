"""`penstock run`, as a process, with a tiny model in the reference backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from penstock.cli.run import split_words
from penstock.cli.talk import stats_line
from penstock.inprocess import CompletionOutput, RequestMetrics, RequestOutput

Penstock = Callable[..., subprocess.CompletedProcess[str]]
FAST = ("--backend", "reference", "--temperature", "0")


def test_one_word_is_the_prompt_unless_it_names_a_model(tiny_model: Path) -> None:
    assert split_words(("hello",)) == (None, "hello")
    assert split_words(("smollm2:135m",)) == ("smollm2:135m", "")
    assert split_words((str(tiny_model),)) == (str(tiny_model), "")
    assert split_words(("a model", "a prompt")) == ("a model", "a prompt")
    assert split_words(()) == (None, "")
    assert split_words(("x" * 10_000 + "\0",)) == (None, "x" * 10_000 + "\0")
    assert split_words(("~100 words about rivers",)) == (None, "~100 words about rivers")
    with pytest.raises(click.UsageError, match="quotes"):
        split_words(("name", "three", "rivers"))


def test_a_model_that_is_named_twice_is_wrong_usage(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", "-m", "qwen2.5-coder:1.5b", tiny_model, "hello", *FAST)
    assert result.returncode == 2
    assert "The model is given twice" in result.stderr


def test_a_model_alone_is_no_prompt(penstock: Penstock) -> None:
    result = penstock("run", "smollm2:135m")
    assert result.returncode == 2
    assert "Missing prompt: smollm2:135m names a model" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--system", "Be brief."), ("--chat-template", "{{ messages }}")])
def test_what_only_a_chat_has_is_not_passed_over(penstock: Penstock, tiny_model: Path, option: str, value: str) -> None:
    result = penstock("run", tiny_model, "a", "--raw", option, value, *FAST)
    assert result.returncode == 2
    assert f"{option} has no effect with --raw" in result.stderr


def test_a_chat_template_of_the_environment_is_for_chats(penstock: Penstock, tiny_model: Path) -> None:
    template = {"PENSTOCK_CHAT_TEMPLATE": "{{ messages }}"}
    words = ("run", tiny_model, "a", "--raw", "--max-tokens", "1", *FAST)
    results = [penstock(*words, env=env) for env in (template, {})]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert results[0].stdout == results[1].stdout != ""


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--top-k", "99999999999"),
        ("--stop", ""),
        ("--temperature", "nan"),
        ("--top-p", "nan"),
        ("--min-p", "nan"),
    ],
)
def test_a_value_that_makes_no_sense_is_wrong_usage(penstock: Penstock, tiny_model: Path, option: str, value: str) -> None:
    result = penstock("run", tiny_model, "a", "--backend", "reference", option, value)
    assert result.returncode == 2
    assert option in result.stderr
    assert "Traceback" not in result.stderr


def test_bytes_that_are_not_text_are_told(environment: dict[str, str], tiny_model: Path) -> None:
    for command, locale in (("run", "C"), ("run", "C.UTF-8"), ("chat", "C")):
        result = subprocess.run(
            [sys.executable, "-m", "penstock", command, str(tiny_model), *FAST],
            input=b"abc\x95\n",
            capture_output=True,
            timeout=100,
            check=False,
            env={**environment, "LC_ALL": locale},
        )
        assert result.returncode == 1
        assert b"came through the pipe is not UTF-8 text" in result.stderr
        assert b"Traceback" not in result.stderr


def test_an_argument_that_is_not_text_is_told(penstock: Penstock, tiny_model: Path) -> None:
    for what, words in (
        ("The prompt", ("run", tiny_model, "caf\udce9")),
        ("--system", ("run", tiny_model, "--system", "caf\udce9", "hi")),
        ("--system", ("chat", tiny_model, "--system", "caf\udce9")),
    ):
        result = penstock(*words, *FAST)
        assert result.returncode == 1
        assert f"error: {what} is not text in the encoding of this locale (utf-8). Use UTF-8 in the term" in result.stderr


def test_an_answer_follows_a_schema(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"is_river": {"type": "boolean"}}, "required": ["is_river"]}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema | {"additionalProperties": False}))
    result = penstock("run", tiny_model, "in the", *FAST, "--json-schema", path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["is_river"] in (True, False)
    assert "[cut off" not in result.stderr


def test_an_answer_matches_a_regex(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, "in the", *FAST, "--raw", "--regex", "(yes|no)!")
    assert result.returncode == 0, result.stderr
    assert result.stdout in ("yes!\n", "no!\n")


def test_half_an_answer_to_a_regex_is_a_failure(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, "in the", *FAST, "--raw", "--regex", "[a-z]{200}", "--max-tokens", "3")
    assert result.returncode == 1
    assert "[cut off: --max-tokens" in result.stderr


def test_what_no_answer_can_follow_is_told(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "wrong").write_text("{")
    for option, value, status, word in (
        ("--regex", "(a", 1, "regex"),
        ("--regex", "", 2, "--regex"),
        ("--json-schema", "wrong", 1, "not JSON"),
        ("--json-schema", "latin", 1, "can't be read"),
        ("--json-schema", "nowhere", 1, "can't be read"),
    ):
        result = penstock("run", tiny_model, "in the", *FAST, option, value)
        assert result.returncode == status, result.stderr
        assert word in result.stderr
        assert "Traceback" not in result.stderr
    result = penstock("run", tiny_model, "a", "--regex", "a", "--json-schema", "wrong")
    assert result.returncode == 2
    assert "--json-schema and --regex" in result.stderr


def test_an_answer_that_was_cut_off_says_so(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, "in the", *FAST, "--max-tokens", "2")
    assert "[cut off: --max-tokens" in result.stderr


def test_an_answer_that_the_limit_in_the_files_ends_says_so(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 2}')
    result = penstock("run", tiny_model, "in the", *FAST, "--generation-config", tmp_path)
    assert "the limit in the model's files or its context is used up]" in result.stderr, result.stderr


def test_argument_and_pipe_are_the_same_prompt(penstock: Penstock, tiny_model: Path) -> None:
    by_argument = penstock("run", tiny_model, "in the", *FAST, "--max-tokens", "8")
    by_pipe = penstock("run", tiny_model, *FAST, "--max-tokens", "8", stdin="in the\n")
    assert by_argument.returncode == 0, by_argument.stderr
    assert by_argument.stdout.strip()
    assert by_argument.stdout.endswith("\n")
    assert by_pipe.stdout == by_argument.stdout


def test_a_pipe_is_added_below_the_argument(penstock: Penstock, tiny_model: Path) -> None:
    raw = (*FAST, "--max-tokens", "4", "--raw")
    joined = penstock("run", tiny_model, "in\n\nthe", *raw)
    both = penstock("run", tiny_model, "in", *raw, stdin="the\n")
    assert both.returncode == 0, both.stderr
    assert both.stdout == joined.stdout


def test_the_same_seed_gives_the_same_answer(penstock: Penstock, tiny_model: Path) -> None:
    arguments = ("run", tiny_model, "a", "--backend", "reference", "--temperature", "1.5", "--max-tokens", "12", "--seed")
    first, again, other = (penstock(*arguments, seed) for seed in ("7", "7", "8"))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout


def test_statistics_go_to_stderr(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, "a", *FAST, "--max-tokens", "5", "--stats")
    assert "tokens; the first after" in result.stderr
    assert "tokens; the first" not in result.stdout


def test_an_answer_of_one_token_is_told_in_the_singular() -> None:
    one = CompletionOutput(index=0, text="x", new_text="x", token_ids=[1], cumulative_logprob=None, logprobs=None)
    times = RequestMetrics(arrival_time_s=1.0, first_token_time_s=1.005, last_token_time_s=1.005)
    answer = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[one], finished=True, num_cached_tokens=0, metrics=times
    )
    assert stats_line(answer) == "1 token; the first after 5 ms"


def test_no_prompt_is_wrong_usage(penstock: Penstock) -> None:
    result = penstock("run")
    assert result.returncode == 2
    assert "Missing prompt" in result.stderr


def test_a_prompt_that_is_too_long_is_told_with_the_numbers(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, *FAST, stdin="x" * 600)
    assert result.returncode == 1
    assert "tiny takes 512" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_longer_than_asked_for_is_refused(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("run", tiny_model, "a", *FAST, "--max-model-len", "1k")
    assert result.returncode == 1
    assert "max_model_len 1000 is longer than the model's own 512" in result.stderr


def test_an_input_that_can_not_be_read_is_no_pipe(environment: dict[str, str], tiny_model: Path) -> None:
    """`nohup` opens it for writing only."""
    with Path(os.devnull).open("wb") as writable:
        command = [sys.executable, "-m", "penstock", "run", str(tiny_model), "in the", *FAST, "--max-tokens", "4"]
        result = subprocess.run(command, stdin=writable, capture_output=True, env=environment, timeout=60)
    assert (result.returncode, bool(result.stdout.strip())) == (0, True), result.stderr


def test_a_broken_file_is_one_line(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(8))
    result = penstock("run", tmp_path / "broken.gguf", "a")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def _start(environment: dict[str, str], *arguments: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without sampling it goes round in circles, for minutes."""
    from support.tiny_models import TinyLlama, write_gguf

    return write_gguf(tmp_path_factory.mktemp("models") / "endless.gguf", TinyLlama(max_model_len=100_000))


def test_ctrl_c_stops_the_generation_and_exits_130(environment: dict[str, str], endless_model: Path) -> None:
    with _start(environment, "run", endless_model, "a", *FAST, "--raw") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_reader_that_leaves_ends_it_quietly(environment: dict[str, str], endless_model: Path) -> None:
    with _start(environment, "run", endless_model, "a", *FAST, "--raw") as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert error == b""
