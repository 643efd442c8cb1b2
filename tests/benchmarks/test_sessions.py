"""Contenders started, loaded and stopped for real; what they are is canned."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import sessions
from processes import Contender, ContenderError
from sessions import LoadError, running, summarise
from usage import ProcessGroup, family, size_bytes

from penstock.lab.records import Record, Sent
from penstock.lab.workload import Job

HERE = Path(__file__).parent


def job(prompt, num_output_tokens):
    return Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=num_output_tokens, prompt=prompt)


JOBS = [job("a", 3), job("b", 2)]


def server(*words):
    return Contender("canned", [sys.executable, HERE / "canned_server.py", "{port}", *words])


def worker():
    return Contender("canned", [sys.executable, HERE / "canned_worker.py"])


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("contender", [server(), worker()], ids=["server", "worker"])
def test_contender_serves_while_the_block_runs_and_is_gone_after_it(contender, tmp_path):
    with running(contender, tmp_path / "log") as session:
        pid = session.process.pid
        sent = session.replay(JOBS, 2)
        assert [record.num_output_tokens for record in sent.records] == [3, 2]
        assert [record.text.split()[0] for record in sent.records] == ["a", "b"]
        assert summarise(sent)["output_tokens"] == 5
        assert session.ready_s > 0
        assert session.resident_mb() > 1
    assert not is_alive(pid)


def test_cpu_time_is_what_the_processes_have_used():
    used_s = time.process_time()
    assert ProcessGroup(SimpleNamespace(pid=os.getpid()), 0.0).cpu_s() >= used_s - 0.1


def test_contender_is_stopped_when_the_block_fails(tmp_path):
    with pytest.raises(KeyError), running(server(), tmp_path / "log") as session:
        raise KeyError
    assert not is_alive(session.process.pid)


def test_children_are_counted_and_stopped(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, *sys.argv[1:]]); p.wait()"
    contender = Contender("nested", [sys.executable, "-c", child, HERE / "canned_server.py", "{port}"])
    with running(contender, tmp_path / "log") as session:
        members = family(session.process.pid)
        assert len(members) == 2
        assert session.replay(JOBS, 1).records[0].num_output_tokens == 3
    assert not is_alive(members[0])
    with pytest.raises(LoadError, match="refused"):
        session.replay(JOBS, 1)


def test_server_that_ends_early_is_an_error_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ContenderError, match=r"before it was ready.*out of memory"), running(server("fail"), tmp_path / "log"):
        pass


def test_program_that_is_missing_is_an_error(tmp_path):
    with (
        pytest.raises(OSError, match="no-such-program"),
        running(Contender("x", ["no-such-program", "{port}"]), tmp_path / "log"),
    ):
        pass


def test_worker_that_answers_with_fewer_tokens_is_an_error(tmp_path):
    with running(worker(), tmp_path / "log") as session, pytest.raises(LoadError, match="2 tokens instead of 3"):
        session.replay([job("short", 3)], 1)


def test_worker_that_does_not_answer_in_time_is_an_error_and_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(ContenderError, match="no answer from the worker"), running(worker(), tmp_path / "log") as session:
        session.replay([job("silent", 3)], 1)
    assert not is_alive(session.process.pid)


def test_worker_that_ends_is_an_error(tmp_path):
    with pytest.raises(ContenderError, match="the worker ended"), running(worker(), tmp_path / "log") as session:
        session.replay([job("end", 3)], 1)


def test_worker_that_is_never_ready_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "READY_TIMEOUT_S", 0.2)
    waiting = Contender("waiting", [sys.executable, "-c", "import sys; sys.stdin.read()"])
    with pytest.raises(ContenderError, match="no answer from the worker"), running(waiting, tmp_path / "log"):
        pass


def test_size_is_that_of_the_files_without_links_and_byte_code(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"x" * 500)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b").write_bytes(b"x" * 20)
    assert size_bytes(tmp_path) == 1020
    assert size_bytes(tmp_path / "nothing") == 0


def test_figures_of_a_run_are_those_of_its_times():
    times = {"num_prompt_tokens": 2, "num_output_tokens": 3}
    first = Record(index=0, intended_ns=0, sent_ns=0, first_ns=10**9, ended_ns=25 * 10**8, gaps_ns=(5 * 10**8, 10**9), **times)
    second = Record(
        index=1, intended_ns=10**9, sent_ns=10**9, first_ns=2 * 10**9, ended_ns=22 * 10**8, gaps_ns=(10**8, 10**8), **times
    )
    figures = summarise(Sent(records=[first, second], duration_ns=3 * 10**9, client_cpu_s=0.1))
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 2.5)
    assert figures["ttft_p50_ms"] == pytest.approx(1000.0)
    assert figures["tpot_p90_ms"] == pytest.approx(100 + 0.9 * 650)
    assert figures["itl_p99_ms"] == pytest.approx(1000.0, rel=0.03)
    assert figures["e2e_p50_ms"] == pytest.approx((2500 + 1200) / 2)
