"""The lines of a batch: errors that name line and cause, and exactly one answer for each, whatever fails."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import tracemalloc
from collections import Counter
from contextlib import closing, nullcontext, suppress
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import fast_json
from penstock.jobs import lines as module
from penstock.jobs.lines import ALONE_AFTER, MAX_ERRORS, Answer, BadLines, Line, Lines, Stopped, prepare, read_line
from penstock.jobs.store import Store
from support.failing_disk import FailingDisk, open_files

URL = "/v1/chat/completions"
MOST = 4096


def line(custom_id="a", **fields) -> bytes:
    told = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"messages": []}}
    return json.dumps(told | fields).encode()


def prepared(folder, data: bytes, most=MOST) -> int:
    (folder / "in").write_bytes(data)
    prepare(folder / "base", folder / "in", (URL,), most, lambda: False)
    with closing(sqlite3.connect(folder / "base")) as base:
        return base.execute("SELECT num_lines FROM progress").fetchone()[0]


def errors_of(folder, data: bytes, most=MOST) -> list[tuple[int | None, str]]:
    with pytest.raises(BadLines) as raised:
        prepared(folder, data, most)
    assert sorted(path.name for path in folder.iterdir()) == ["in"]
    assert all(error["message"].endswith(".") for error in raised.value.errors)
    return [(error["line"], error["code"]) for error in raised.value.errors]


def opened(folder) -> Lines:
    return Lines(folder / "base", folder / "in", folder / "out", folder / "err")


def all_lines(lines: Lines, at_once=7):
    found, after = [], 0
    while taken := lines.take(after, at_once, 1 << 20):
        found += taken
        after = taken[-1].place
    return found


def answer_to(one, is_error=False) -> Answer:
    return Answer(one.place, read_line(one.data).custom_id.encode() + b"\n", is_error, {} if is_error else {"input_tokens": 2})


def answered(folder) -> Counter[str]:
    return Counter((folder / "out").read_text().splitlines() + (folder / "err").read_text().splitlines())


# the check


@pytest.mark.parametrize("end", [b"\n", b"", b"\r\n", b"\n\n", b"\n \t\r\n"])
def test_lines_end_as_they_like(tmp_path, end):
    text = (b"\r\n" if b"\r" in end else b"\n").join([line("a"), b"", line("b")]) + end
    assert prepared(tmp_path, text) == 2
    lines = opened(tmp_path)
    assert sorted(read_line(one.data).custom_id for one in all_lines(lines)) == ["a", "b"]
    lines.close()


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (b"{", "invalid_json_line", "unexpected end"),
        (b"hello", "invalid_json_line", "invalid character"),
        (b"\xef\xbb\xbf" + line(), "invalid_json_line", "byte order mark"),
        (line().decode().encode("utf-16"), "invalid_json_line", "JSON"),
        (line("\u00fc").replace(b"\\u00fc", b"\xff"), "invalid_json_line", "byte 0xff is not UTF-8"),
        (line().replace(b"[]", b'"\xff"'), "invalid_json_line", "byte 0xff is not UTF-8"),
        (line().replace(b'"a"', b'"\\ud800"'), "invalid_json_line", "surrogate"),
        (line().replace(b"[]", b'"\\ud800"'), "invalid_json_line", "surrogate"),
        (line().replace(b"[]", b"NaN"), "invalid_json_line", "invalid character"),
        (line().replace(b"[]", b"[" * 50_000 + b"]" * 50_000), "invalid_json_line", "deeply"),
        (line().replace(b"[]", b"[" * 90_000), "invalid_json_line", "deeply"),
        (b"[" * 100_000, "invalid_json_line", "deeply"),
        (b"\0", "invalid_json_line", "invalid character"),
        (b'{"custom_id": "a",', "invalid_json_line", "(column 19)"),
        (b"[]", "invalid_request", "object"),
        (b"null", "invalid_request", "object"),
        (b"{}", "invalid_request", "custom_id"),
        (line(custom_id=3), "invalid_request", "custom_id"),
        (line(priority=9), "invalid_request", "unknown field `priority`"),
        (line(more=None, priority=9), "invalid_request", "unknown field `priority`"),
        (line(3, more=None), "invalid_request", "custom_id"),
        (line(""), "invalid_custom_id", "1 to 512"),
        (line("x" * 513), "invalid_custom_id", "1 to 512"),
        (line(method="GET"), "invalid_method", "POST"),
        (line(url="/v1/embeddings"), "invalid_url", URL),
        (line(body=[]), "invalid_request", "object"),
        (line().replace(b"[]", b"[" + b"[]," * 100_000 + b"0]"), "invalid_request", "objects and lists"),
        (line().replace(b"[]", b"[" + b"0," * 2**18 + b"0,0]"), "invalid_request", "elements"),
        (line(custom_id=3, body=[[]] * 100_000), "invalid_request", "objects and lists"),
        (line(body={"stream": True}), "invalid_request", "can't be used in a batch"),
        (line("first"), "duplicate_custom_id", "'first'"),
    ],
)
def test_an_error_names_its_line_and_the_cause(tmp_path, bad, code, words):
    (tmp_path / "in").write_bytes(line("first") + b"\n\n" + bad + b"\n" + line("last") + b"\n")
    with pytest.raises(BadLines, match=words) as raised:
        prepare(tmp_path / "base", tmp_path / "in", (URL,), 1 << 20, lambda: False)
    assert [(error["line"], error["code"]) for error in raised.value.errors] == [(3, code)]
    assert len(raised.value.errors[0]["message"]) < 400


def test_what_is_allowed(tmp_path):
    text = [line("x" * 512), line("\U0001f600"), line("s", body={"stream": False}), line(" "), line(body={}, more=None)]
    assert prepared(tmp_path, b"\n".join(text)) == 5


def test_a_line_that_an_earlier_release_accepted_is_still_read():
    assert read_line(line("a", priority=9)).custom_id == "a"


def test_a_line_has_at_most_as_many_elements_as_a_request(tmp_path):
    """Those of its envelope do not count."""
    most = {"a": [0] * (fast_json.MAX_ELEMENTS + 1)}
    assert not fast_json.excess(json.dumps(most).encode())
    assert prepared(tmp_path, line(body=most), 1 << 20) == 1
    (tmp_path / "base").unlink()
    assert errors_of(tmp_path, line(body={**most, "b": 0}), 1 << 20) == [(1, "invalid_request")]


@pytest.mark.parametrize("text", [b"", b"\n", b" \r\n\n"])
def test_an_empty_file_is_an_error(tmp_path, text):
    assert errors_of(tmp_path, text) == [(None, "empty_file")]


def test_a_file_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(BadLines, match="gone"):
        prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, lambda: False)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_has_at_most_as_many_bytes_as_a_request(tmp_path, end):
    whole = line("a") + b" " * (MOST - len(line("a")))
    assert prepared(tmp_path, whole + end) == 1
    (tmp_path / "base").unlink()
    assert errors_of(tmp_path, line("b") + b"\n" + whole + b" " + end) == [(2, "line_too_long")]
    assert errors_of(tmp_path, b"x" * (1 << 20)) == [(1, "line_too_long")]


def test_not_all_errors_are_listed(tmp_path):
    assert errors_of(tmp_path, b"{\n" * (MAX_ERRORS + 9)) == [(nth + 1, "invalid_json_line") for nth in range(MAX_ERRORS)]
    same = (line("same") + b"\n") * (MAX_ERRORS + 9)
    assert errors_of(tmp_path, same) == [(nth + 2, "duplicate_custom_id") for nth in range(MAX_ERRORS)]


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=12).filter(any))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_repeated_id_is_found(tmp_path, ids):
    """None: an empty line."""
    text = b"\n".join(b"" if one is None else line(one) for one in ids)
    repeated = [nth + 1 for nth, one in enumerate(ids) if one is not None and one in ids[:nth]]
    with pytest.raises(BadLines) if repeated else nullcontext() as raised:
        assert prepared(tmp_path, text) == sum(one is not None for one in ids)
    if repeated:
        assert [error["line"] for error in raised.value.errors] == repeated


def test_a_check_takes_no_memory_for_each_line(tmp_path):
    held = []
    for num in (2_000, 20_000):
        (tmp_path / "in").write_bytes(b"\n".join(line(str(nth % (num // 2 + 1))) for nth in range(num)))
        tracemalloc.start()
        try:
            with pytest.raises(BadLines):
                prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, lambda: False)
            held.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert held[1] < held[0] + 100_000  # SQLite's cache does not count, and has its own limit


def test_lines_are_sorted_in_the_folder_of_the_store(tmp_path, monkeypatch):
    """The temporary folder of a container is in memory, and small."""
    monkeypatch.setattr(module, "CACHE_KIB", 64)
    monkeypatch.setattr(module, "_STOP_CHECK_INSTRUCTIONS", 1000)
    monkeypatch.delenv("SQLITE_TMPDIR", raising=False)
    (tmp_path / "in").write_bytes(b"\n".join(line(str(nth), body={"prompt": f"{nth:05}" * 400}) for nth in range(10_000)))
    seen = set()
    is_read, twice, calls = threading.Event(), module._duplicates, count()
    monkeypatch.setattr(module, "_duplicates", lambda *given: (is_read.set(), twice(*given))[1])

    def look() -> bool:
        if not is_read.is_set() or next(calls) % 10:
            return False
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing's own
                seen.update({link.readlink().parent} if link.readlink().name.startswith("etilqs_") else ())
        return False

    with closing(Store(tmp_path / "it's", max_bytes=1)):
        prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, look)
    assert seen == {tmp_path / "it's" / "lines"}


def test_a_store_keeps_the_temporary_folder_that_a_user_names(tmp_path, monkeypatch):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    with closing(Store(tmp_path / "jobs", max_bytes=1)), closing(sqlite3.connect(":memory:")) as base:
        assert base.execute("PRAGMA temp_store_directory").fetchone() != (str(tmp_path / "jobs" / "lines"),)


def test_a_file_has_not_too_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 2)
    text = [line("a"), b"", line("b"), b"", line("c")]
    assert prepared(tmp_path, b"\n".join(text[:4])) == 2
    (tmp_path / "base").unlink()
    assert errors_of(tmp_path, b"\n".join(text)) == [(5, "too_many_lines")]


def test_lines_run_in_the_order_of_their_prefixes(tmp_path):
    texts = [f"{'ab'[nth % 2] * 300} {nth}" for nth in range(40)]
    prepared(tmp_path, b"\n".join(line(text, body={"messages": [text]}) for text in texts))
    lines = opened(tmp_path)
    firsts = [read_line(one.data).custom_id[0] for one in all_lines(lines)]
    assert sum(one != other for one, other in pairwise(firsts)) == 1
    lines.close()


@pytest.mark.parametrize("nth", [1, 50, 99])
def test_a_check_that_is_stopped_leaves_nothing(tmp_path, nth):
    (tmp_path / "in").write_bytes(b"\n".join(line(str(one)) for one in range(100)))
    calls = iter(range(1, 10_000))
    before = open_files()
    with pytest.raises(Stopped):
        prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, lambda: next(calls) >= nth)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert open_files() == before


def test_also_the_sorting_can_be_stopped(tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(b"\n".join(line(str(one)) for one in range(3000)))
    monkeypatch.setattr(module, "_STOP_CHECK_INSTRUCTIONS", 100)
    is_read, twice = threading.Event(), module._duplicates
    monkeypatch.setattr(module, "_duplicates", lambda *given: (is_read.set(), twice(*given))[1])
    with pytest.raises(Stopped):
        prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, is_read.is_set)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_check_lets_other_threads_run(tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    data = b"\n".join(line(str(nth)) for nth in range(5000))
    prepared(tmp_path, data)
    assert len(data) / 5000 < len(pauses) < len(data) / 4000


def test_a_check_that_was_killed_begins_anew(tmp_path):
    for name in ("base-new", "base-unsorted", "base-new-journal", "base"):
        (tmp_path / name).write_bytes(b"half of a database")
    assert prepared(tmp_path, line()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "in"]


# answers


def test_lines_are_taken_up_to_a_number_and_a_size(tmp_path):
    prepared(tmp_path, b"\n".join(line(str(nth), body={"x": "y" * 1000}) for nth in range(10)))
    lines = opened(tmp_path)
    assert [len(lines.take(0, 10, size)) for size in (1, 1100, 5000, 1 << 20)] == [1, 1, 4, 10]
    assert [len(lines.take(after, 4, 1 << 20)) for after in (0, 6, 8, 10)] == [4, 4, 2, 0]
    lines.close()


def test_a_file_that_is_written_meanwhile_is_noticed(tmp_path):
    """`penstock batch run` reads the user's own file."""
    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(3)))
    lines = opened(tmp_path)
    assert len(lines.take(0, 1, 1 << 20)) == 1
    with (tmp_path / "in").open("r+b") as file:
        file.write(b"# a comment\n")
    os.utime(tmp_path / "in", ns=(0, 0))  # the clock of files may be coarse
    with pytest.raises(BadLines, match="changed while its lines"):
        lines.take(0, 1, 1 << 20)
    lines.close()


def test_failures_of_the_server_are_counted_for_the_lines_that_were_under_way(tmp_path):
    def failures(lines) -> list[int]:
        return [one.num_failures for one in lines.take(0, 10, 1 << 20)]

    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(5)))
    with closing(opened(tmp_path)) as killed:
        first, second, *_ = killed.take_to_ask(0, 3, 1 << 20)
        killed.write([answer_to(first)])
        with closing(opened(tmp_path)) as lines:  # as the next process does
            assert failures(lines) == [1, 1, 0, 0]
        with closing(opened(tmp_path)) as lines:
            assert failures(lines) == [1, 1, 0, 0], "nothing was asked since"
            lines.take_to_ask(0, 2, 1 << 20)
            lines.note_refusal(second.place, has_failed=True)  # the engine failed, and is started again
            assert failures(lines) == [2, 1, 0, 0]
    with closing(opened(tmp_path)) as lines:
        assert failures(lines) == [2, 1, 0, 0], "a server that is stopped has not failed"
        lines.take_to_ask(0, 2, 1 << 20)
        lines.note_refusal(second.place, has_failed=False)
        with closing(opened(tmp_path)) as after_kill:
            assert failures(after_kill) == [2, 2, 0, 0], "the first was refused, and waited"


def test_a_line_that_is_asked_alone_fails_alone(tmp_path):
    """Others of its kind wait for their turn, or have an answer that is not written yet."""

    def taken() -> list[Line]:
        with closing(opened(tmp_path)) as lines:
            return lines.take(0, 9, 1 << 20)

    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(4)))
    for _ in range(ALONE_AFTER):
        with closing(opened(tmp_path)) as killed:
            first, second, third = killed.take_to_ask(0, 3, 1 << 20)
            assert len(taken()) == 4
    with closing(opened(tmp_path)) as killed:
        assert killed.take_to_ask(0, 3, 1 << 20) == [one._replace(num_failures=2) for one in (first, second, third)]
        killed.note_alone(first.place)  # and it is answered
        killed.note_alone(second.place)
        assert [one.num_failures for one in taken()] == [2, 3, 2, 0]


def test_a_line_that_is_answered_twice_is_noticed(tmp_path):
    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(3)))
    lines = opened(tmp_path)
    first, *_ = taken = all_lines(lines)
    lines.write([answer_to(first)])
    with pytest.raises(AssertionError):
        lines.write([answer_to(one) for one in taken])
    lines.write([answer_to(one) for one in taken[1:]])
    assert set(answered(tmp_path).values()) == {1}
    assert lines.progress.num_left == 0
    lines.close()


def test_a_reader_and_a_writer_may_be_different_threads(tmp_path):
    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(2000)))
    lines, stop = opened(tmp_path), threading.Event()

    def read():
        while not stop.is_set():
            all_lines(lines)

    reader = threading.Thread(target=read)
    reader.start()
    taken = all_lines(lines)
    for nth in range(0, len(taken), 50):
        lines.write([answer_to(one) for one in taken[nth : nth + 50]])
    stop.set()
    reader.join()
    lines.close()
    assert len(answered(tmp_path)) == 2000


def test_lines_that_can_not_be_opened_leave_nothing_open(tmp_path):
    prepared(tmp_path, line())
    (tmp_path / "out").mkdir()
    before = open_files()
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)
    assert open_files() == before
    (tmp_path / "base").write_bytes(b"no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        opened(tmp_path)
    assert open_files() == before


@pytest.mark.parametrize("name", ["out", "err"])
def test_answers_that_are_lost_are_noticed(tmp_path, name):
    prepared(tmp_path, line("a") + b"\n" + line("b"))
    lines = opened(tmp_path)
    lines.write([answer_to(one, is_error=index == 1) for index, one in enumerate(all_lines(lines))])
    lines.close()
    (tmp_path / name).write_bytes(b"")  # as of a backup that was made before
    with pytest.raises(BadLines, match="shorter than what was written"):
        opened(tmp_path)


@pytest.mark.parametrize("table", ["progress", "lines"])
def test_a_database_without_a_table_is_noticed(tmp_path, table):
    prepared(tmp_path, line())
    with closing(sqlite3.connect(tmp_path / "base")) as base:
        base.execute(f"DROP TABLE {table}")
    before = open_files()
    with pytest.raises(BadLines, match=f"is damaged: no such table: {table}"):
        opened(tmp_path)
    assert open_files() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_loses_nothing(tmp_path, code):
    """The disk fails at each of the writes, one after another; then the answers are written again."""
    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(6)))
    disk, nth, num_failed = FailingDisk(), 0, 0
    while not num_failed or disk.has_failed:
        for name in ("out", "err"):
            (tmp_path / name).unlink(missing_ok=True)
        prepare(tmp_path / "base", tmp_path / "in", (URL,), MOST, lambda: False)
        with disk.failing(1 << 30, code):
            lines = opened(tmp_path)
            first, *rest = [answer_to(one, is_error=one.place % 2 == 0) for one in all_lines(lines)]
            lines.write([first])
            disk._left, before = nth, lines.progress
            try:
                lines.write(rest)
            except OSError:
                assert lines.progress == before
                assert len(lines.take(0, 9, 1 << 20)) == 5
                lines.write(rest)
            num_failed += disk.has_failed
        lines.close()
        assert answered(tmp_path) == Counter(map(str, range(6)))
        sizes = [(tmp_path / name).stat().st_size for name in ("out", "err")]
        assert sizes == [lines.progress.num_output_bytes, lines.progress.num_error_bytes]
        nth += 1
    assert num_failed == 6  # two cuts, two writes, two syncs


def test_a_full_database_loses_nothing(tmp_path):
    prepared(tmp_path, b"\n".join(line(str(nth)) for nth in range(200)))
    lines = opened(tmp_path)
    base = lines._base
    taken = [answer_to(one)._replace(usage={f"{one.place}" * 100: 1}) for one in all_lines(lines)]
    base.execute(f"PRAGMA max_page_count = {base.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        lines.write(taken)
    assert lines.progress.num_answered == 0
    assert (tmp_path / "out").read_bytes() == b""
    base.execute("PRAGMA max_page_count = 1000000")
    lines.write(taken)
    lines.close()
    assert sum(answered(tmp_path).values()) == len(answered(tmp_path)) == 200


class Batch(RuleBasedStateMachine):
    """Answers in any order, disks that fail and processes that are killed at any point."""

    @initialize(num=st.integers(1, 30))
    def begin(self, num):
        self._temporary, self.num = TemporaryDirectory(), num
        self.folder = Path(self._temporary.name)
        prepared(self.folder, b"\n".join(line(str(nth)) for nth in range(num)))
        self.disk = FailingDisk()
        self.lines = opened(self.folder)
        self.under_way = {one.place: one for one in all_lines(self.lines)}
        self.done: Counter[str] = Counter()

    def _write(self, picked, errors):
        answers = [answer_to(self.under_way[place], is_error=is_error) for place, is_error in zip(picked, errors, strict=False)]
        self.lines.write(answers)
        for one in answers:
            del self.under_way[one.place]
            self.done[one.data.decode().strip()] += 1

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), errors=st.lists(st.booleans(), min_size=1, max_size=5))
    def write(self, data, errors):
        self._write(data.draw(st.permutations(sorted(self.under_way))), errors)

    @precondition(lambda self: self.under_way)
    @rule(nth=st.integers(0, 7), data=st.data(), errors=st.lists(st.booleans(), min_size=1, max_size=5))
    def write_to_a_failing_disk(self, nth, data, errors):
        picked = data.draw(st.permutations(sorted(self.under_way)))
        self.lines.close()
        with self.disk.failing(1 << 30, errno.ENOSPC):
            self.lines = opened(self.folder)
            self.disk._left = nth
            try:
                self._write(picked, errors)
            except OSError:
                assert self.disk.has_failed

    @rule(junk=st.binary(max_size=20), is_closed=st.booleans())
    def be_killed(self, junk, is_closed):
        """The next process finds bytes of answers that were not noted yet."""
        for name in ("out", "err"):
            with (self.folder / name).open("ab") as file:
                file.write(junk)
        if is_closed:
            self.lines.close()
        before, self.lines = self.lines, opened(self.folder)
        before.close()
        self.under_way = {one.place: one for one in all_lines(self.lines)}

    @invariant()
    def each_line_is_answered_once_or_left(self):
        if not hasattr(self, "done"):
            return
        assert answered(self.folder) == self.done
        assert len(self.under_way) == self.lines.progress.num_left == self.num - len(self.done)
        assert {one.place for one in all_lines(self.lines)} == set(self.under_way)

    def teardown(self):
        if hasattr(self, "done"):
            self.lines.close()
            self._temporary.cleanup()


TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=40, stateful_step_count=15, suppress_health_check=list(HealthCheck))
