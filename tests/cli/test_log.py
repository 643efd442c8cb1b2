"""The log is written by a thread of its own, so that a reader that pauses stops nobody."""

from __future__ import annotations

import os
import re
import subprocess
import sys

CODE = """
import logging, sys
from penstock.cli import serve
from penstock.config import LogConfig

serve.MAX_LOG_LINES, serve._FLUSH_TIMEOUT_S = 1000, float(sys.argv[1])
serve.set_up_logging(LogConfig(log_format="json"))
log = logging.getLogger("penstock")
for number in range(3000):
    log.warning("line %d %s", number, "x" * 100)
print("went on", flush=True)
if sys.argv[1] != "0":
    sys.stdin.read()
    log.warning("the last line")
logging.shutdown()
"""


def started(timeout_s: int) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", CODE, str(timeout_s)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_reader_that_pauses_stops_nobody_and_is_told_what_it_missed():
    with started(60) as process:
        assert process.stdout.readline() == "went on\n"
        lines = [process.stderr.readline() for _ in range(500)]
        process.stdin.close()
        lines += process.stderr.readlines()
    assert '"line 0 xxx' in lines[0]
    assert '"the last line"' in lines[-1]
    missed = [int(found[1]) for line in lines if (found := re.search(r"too slow for: (\d+)", line))]
    assert sum(missed) > 1000  # what the pipe and the queue hold is less than 2,000 lines
    assert sum(missed) + sum('"line ' in line for line in lines) == 3000


def test_a_reader_that_never_reads_does_not_keep_a_process():
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-c", CODE, "0"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, text=True, timeout=60, check=True)
    finally:
        os.close(reading)
        os.close(writing)
    assert ended.stdout == "went on\n"
