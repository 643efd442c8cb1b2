"""Memory is told apart by what it holds, and threads may end while they are looked at."""

from pathlib import Path

import startup
import usage

SMAPS = """\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:            1048576 kB
Rss:                3000 kB
7f1000000000-7f1040000000 r--p 00000000 08:01 12                         /models/a b.gguf
Size:            1048576 kB
Rss:                 500 kB
7f2000000000-7f2000002000 rw-p 00000000 00:00 0                          [heap]
Size:                  8 kB
Rss:                   8 kB
"""


def test_memory_is_told_apart_by_its_mapping():
    figures = startup.resident_mb(SMAPS, Path("/models/a b.gguf"))
    assert figures == {"resident": 3508 * 1024 / 1e6, "KV touched": 3000 * 1024 / 1e6, "file mapped": 500 * 1024 / 1e6}


def test_a_thread_that_ends_meanwhile_has_no_time(monkeypatch):
    class Ended:
        def read_text(self) -> str:
            raise ProcessLookupError

    monkeypatch.setattr(Path, "glob", lambda *_: [Ended(), Path("/proc/self/schedstat")])
    assert usage.threads_cpu_s(0) > 0
