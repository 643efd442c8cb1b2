"""`penstock bench`, as a process: against a server of canned answers, and with a tiny model in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import bench
from penstock.types.errors import PenstockError
from support.cli.serve import Served
from support.lab.canned import DONE, CannedServer, event, plain, stream, token, usage

Penstock = Callable[..., subprocess.CompletedProcess[str]]
Serving = Callable[..., AbstractContextManager[Served]]
FEW = ("--requests", "6", "--input-tokens", "4-8", "--output-tokens", "2-3")


def answer(request):
    """As a server would that has no tokenizer, and takes all fields."""
    path = request.line.split()[1]
    if path == "/v1/models":
        return [plain({"data": [{"id": "canned", "owned_by": "nobody"}]})]
    if path == "/version":
        return [plain({"version": "1.2"})]
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return [plain({"error": {"message": "no such route"}}, "404 Not Found")]
    count = request.json["max_tokens"]
    if path == "/v1/completions":
        return [stream(*[token(" a")] * count, usage(count), DONE)]
    return [stream(*[event({"choices": [{"delta": {"content": " a"}}]})] * count, usage(count), DONE)]


@pytest.fixture
def serve() -> Iterator[Callable[..., CannedServer]]:
    servers: list[CannedServer] = []

    def start(respond=answer) -> CannedServer:
        servers.append(CannedServer(respond))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def completions(server: CannedServer) -> list[dict]:
    return [request.json for request in server.requests if request.line.startswith("POST /v1/")]


def test_a_run_is_shown_and_written(penstock: Penstock, serve, tmp_path: Path) -> None:
    server = serve()
    done = penstock("bench", "--url", server.url, *FEW, "--slo", "ttft=10s", "--json", "a.json", "--html", "a.html")
    assert done.returncode == 0, done.stderr
    for word in ("TTFT", "TPOT", "canned", "nobody 1.2", server.url):
        assert word in done.stdout
    assert "prefix cache" not in done.stdout, "the server reports no cached tokens"
    assert "Lengths of prompts are estimated" in done.stdout
    assert "Lengths of prompts are estimated" in done.stderr
    asked = completions(server)
    assert len(asked) == 1 + 6, "one token is asked for before the run"
    assert {body["model"] for body in asked} == {"canned"}
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert run["figures"]["num_by_end"]["ok"] == 6
    assert run["load"] == {"kind": "concurrency", "value": 8}
    assert run["how"] == "http"
    assert "<html" in (tmp_path / "a.html").read_text()


def test_a_sweep_is_one_result(penstock: Penstock, serve, tmp_path: Path) -> None:
    server = serve()
    done = penstock("bench", "--url", server.url, *FEW, "--concurrency", "1,2", "--repeat", "2", "--json", "a.json")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [run["load"]["value"] for run in runs] == [1, 2, 1, 2]
    assert len({run["workload"] for run in runs}) == 1
    prompts = [body["prompt"] for body in completions(server)[1:]]
    assert len(set(prompts)) == 24, "no run finds the prompts of another in the prefix cache"
    again = penstock("bench", "--url", server.url, *FEW, "--concurrency", "2", "--seed", "1")
    assert again.returncode == 0, again.stderr
    assert not set(prompts) & {body["prompt"] for body in completions(server)[26:]}, "nor of another seed"
    done = penstock("bench", "--url", server.url, *FEW, "--rate", "100,200", "--speed", "1.1", "--json", "b.json")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert [run["load"] for run in runs] == [{"kind": "rate", "value": 110}, {"kind": "rate", "value": 220}]
    compared = penstock("bench", "compare", "a.json", "a.json")
    assert compared.returncode == 0, compared.stderr
    assert "Comparison" in compared.stdout
    assert penstock("bench", "compare", "a.json", "b.json").returncode == 1


def test_texts_are_new_unless_a_seed_is_given(penstock: Penstock, serve) -> None:
    sent = []
    for words in ((), (), ("--seed", "0"), ("--seed", "0")):
        server = serve()
        done = penstock("bench", "--url", server.url, *FEW, *words)
        assert done.returncode == 0, done.stderr
        sent.append([(len(body["prompt"].split()), body["prompt"], body["max_tokens"]) for body in completions(server)[1:]])
    first, second, seeded, again = ({prompt for _, prompt, _ in run} for run in sent)
    assert not first & second, "the second command finds no prompt in the prefix cache"
    assert seeded == again
    lengths = [sorted((num_words, max_tokens) for num_words, _, max_tokens in run) for run in sent]
    assert lengths == lengths[:1] * 4, "only the texts are new"


def test_a_chat_is_asked_with_messages_and_more_fields(penstock: Penstock, serve) -> None:
    server = serve()
    words = ("--endpoint", "chat", "--extra-body", '{"top_p": 0.5, "temperature": null}', "--api-key", "k")
    done = penstock("bench", "theirs", "--url", f"{server.url}/v1", *FEW, *words)
    assert done.returncode == 0, done.stderr
    body = completions(server)[-1]
    assert (body["model"], body["messages"][0]["role"], body["top_p"]) == ("theirs", "user", 0.5)
    assert "temperature" not in body
    assert server.requests[-1].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("url", "is_typed", "key"),
    [
        ("http://127.0.0.1:8000", False, "a"),
        ("http://localhost:8000/v1", False, "a"),
        ("https://[::1]", False, "a"),
        ("http://10.0.0.7:8000", False, None),
        ("https://localhost.example.com", False, None),
        ("http://127.0.0.1.example.com", False, None),
        ("https://example.com", True, "b"),
    ],
)
def test_the_keys_of_serve_are_for_this_machine(url: str, is_typed: bool, key: str | None) -> None:
    assert bench._key_for(url, ("a", "b"), is_typed=is_typed) == key


@pytest.mark.parametrize(
    "env", [{"PENSTOCK_API_KEY": "a b"}, {"PENSTOCK_CONFIG": "p.toml"}, {"PENSTOCK_API_KEY": "a", "PENSTOCK_CONFIG": "p.toml"}]
)
def test_a_server_on_this_machine_gets_the_first_key_of_its_settings(
    env: dict[str, str], penstock: Penstock, serve, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text('api_key = ["a", "b"]\n')
    server = serve()
    done = penstock("bench", "--url", server.url, *FEW, env=env)
    assert done.returncode == 0, done.stderr
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer a"}


def test_the_status_is_1_if_everything_failed_and_0_if_something_did_not(penstock: Penstock, serve) -> None:
    def fail(request):
        if request.line.startswith("POST /v1/") and request.json["max_tokens"] > 1 and len(completions(servers[0])) > 2:
            return [plain({"error": {"message": "out of memory"}}, "500 Internal Server Error")]
        return answer(request)

    def fail_always(request):
        if request.line.startswith("POST /v1/") and request.json["max_tokens"] > 1:
            return [plain({"error": {"message": "out of memory"}}, "500 Internal Server Error")]
        return answer(request)

    servers = [serve(fail), serve(fail_always)]
    some = penstock("bench", "--url", servers[0].url, *FEW, "--concurrency", "1")
    assert some.returncode == 0, some.stderr
    assert "out of memory" in some.stdout
    every = penstock("bench", "--url", servers[1].url, *FEW)
    assert every.returncode == 1
    assert "out of memory" in every.stdout


def test_an_error_in_a_run_does_not_lose_those_before_it(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one = bench._run

    def fail_third(*args, **options):
        if args[-1] >> 32 == 2:
            raise PenstockError("The third run failed.")
        return run_one(*args, **options)

    monkeypatch.setattr(bench, "_run", fail_third)
    monkeypatch.setattr("penstock.lab.plots.is_installed", lambda: False)  # to draw takes most of the time
    files = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    done = CliRunner().invoke(bench.bench, ["--url", serve().url, *FEW, "--repeat", "3", *files])
    assert str(done.exception) == "The third run failed."
    assert "TTFT" in done.stdout
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [run["figures"]["num_by_end"]["ok"] for run in runs] == [6, 6]
    assert "<html" in (tmp_path / "a.html").read_text()


def test_a_result_that_can_not_be_written_is_shown(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise PenstockError("The disk is full.")

    monkeypatch.setattr("penstock.lab.results.write_result", fail)
    done = CliRunner().invoke(bench.bench, ["--url", serve().url, *FEW, "--json", str(tmp_path / "a.json")])
    assert str(done.exception) == "The disk is full."
    assert "TTFT" in done.stdout


def test_a_warm_up_of_everything_is_told(penstock: Penstock, serve) -> None:
    done = penstock("bench", "--url", serve().url, *FEW, "--warmup", "6")
    assert done.returncode == 1
    assert "error: All requests were in the warm-up." in done.stderr
    assert penstock("bench", "--url", serve().url, *FEW, "--warmup", "5").returncode == 0


def test_a_server_that_is_not_there_is_one_line(penstock: Penstock) -> None:
    done = penstock("bench", "--url", "http://127.0.0.1:1", *FEW)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: http://127.0.0.1:1 can't be reached: Connection refused.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--concurrency", "0"), "must be a number above 0"),
        (("--concurrency", "1,x"), "must be a number above 0"),
        (("--concurrency", "2", "--rate", "3"), "--concurrency is a closed loop"),
        (("--concurrency", "2", "--stages", "2x60"), "Leave it out, or --rate, --arrivals, --stages"),
        (("--concurrency", "2", "--max-concurrency", "3"), "leave it out"),
        (("--extra-body", "[1]"), "not a JSON object"),
        (("--extra-body", "{"), "not JSON"),
        (("--warmup", "some"), "must be requests"),
        (("--slo", "ttft=1x"), "ttft=1x"),
        (("--block-size", "16"), "is for --in-process"),
        (("--in-process", "--url", "http://x"), "is for a server"),
        (("--in-process", "--endpoint", "embeddings"), "needs a server"),
        (("--in-process", "--tenants", "a=7,b=1"), "--tenants is for a server"),
        (("--no-stream", "--cancel-share", "0.5"), "--cancel-share is for streams"),
        (("--endpoint", "embeddings", "--cancel-share", "0.5"), "--cancel-share is for streams"),
        (("--json", "missing/a.json"), "can't be written"),
        (("--url", "nonsense"), "not the address"),
        (("--workload", "missing.csv"), "missing.csv is neither a file nor the name of a workload"),
        (("--timeout", "0s"), "must be greater than 0"),
        (("--api-key", "a\nb"), "not printable ASCII"),
        (("--api-key", "a b"), "has a space"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(penstock_here: Penstock, words: tuple[str, ...], told: str) -> None:
    done = penstock_here("bench", *words)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_that_were_sent_before_are_noted(penstock: Penstock, serve) -> None:
    used = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}

    def cached(request):
        if not request.line.startswith("POST /v1/") or request.json["max_tokens"] == 1:
            return answer(request)
        return [stream(token("a"), event({"choices": [], "usage": used}), DONE)]

    few = ("--requests", "3", "--input-tokens", "10", "--output-tokens", "2")
    server = serve(cached)
    assert "80% of the prompt tokens were in the server's" in " ".join(
        penstock("bench", "--url", server.url, *few).stdout.split()
    )
    shared = penstock("bench", "--url", server.url, *few, "--prefix-tokens", "8")
    assert "were in the server's" not in shared.stdout


def test_ctrl_c_shows_what_there_is(environment: dict[str, str], tmp_path: Path, serve) -> None:
    held: list[subprocess.Popen[str]] = []

    def interrupt(request):
        if request.line.startswith("POST /v1/") and len(completions(server)) == 4:
            held[0].send_signal(signal.SIGINT)
            held[0].wait(60)
        return answer(request)

    server = serve(interrupt)
    words = [sys.executable, "-m", "penstock", "bench", "--url", server.url, *FEW, "--concurrency", "1", "--json", "a.json"]
    with subprocess.Popen(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    ) as run:
        held.append(run)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 130, err
    assert "Interrupted: 1 requests were under way and 3 not sent" in out
    assert "TTFT" in out
    (written,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert written["figures"]["num_requests"] == 2


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_model_in_this_process_is_asked_without_http(penstock: Penstock, tiny_model: Path, tmp_path: Path, endpoint) -> None:
    if endpoint == "chat":
        (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    more = ("--chat-template", "template") if endpoint == "chat" else ()
    words = ("--in-process", tiny_model, "--backend", "reference", "--endpoint", endpoint, "--json", "a.json", *more)
    done = penstock("bench", *words, *FEW, "--sessions", "2", "--concurrency", "3")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert run["how"] == "in process"
    assert run["figures"]["num_by_end"]["ok"] == 6
    assert run["requests"]["columns"]["num_output_tokens"] != [0] * 6
    assert "estimated" not in run["workload"]


def test_a_server_of_our_own_is_measured_with_exact_lengths(
    penstock: Penstock, serving: Serving, tiny_model: Path, tmp_path: Path
) -> None:
    """End to end: what the client asks for is what the server counts."""
    with serving(tiny_model) as server:
        words = ("--url", server.url, *FEW, "--tokenizer", tiny_model, "--cache", tmp_path)
        done = penstock("bench", *words, "--json", "a.json")
    assert done.returncode == 0, done.stderr
    assert "estimated" not in done.stderr
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    columns = run["requests"]["columns"]
    assert run["figures"]["num_by_end"]["ok"] == 6
    assert all(4 <= count <= 9 for count in columns["num_prompt_tokens"]), "the server may add a token at the begin"
    assert all(queue_ns is not None for queue_ns in columns["queue_ns"])
    assert "penstock" in run["target"]["server"]
