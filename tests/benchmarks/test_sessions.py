"""Contenders started, loaded and stopped for real; what they are is canned."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import sessions
from processes import Contender, ContenderError
from sessions import LoadError, running
from usage import family, size_bytes

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
        assert session.ready_s > 0
        assert session.resident_mb() > 1
    assert not is_alive(pid)


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


def test_worker_gets_token_ids_where_a_job_has_them(tmp_path):
    with running(worker(), tmp_path / "log") as session:
        sent = session.replay([replace(job("a text", 2), prompt_token_ids=(5, 6, 7)), job("b", 2)], 1)
    assert [record.text for record in sent.records] == [[5, 6, 7], "b"]


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
