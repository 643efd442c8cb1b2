"""The terminal's progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from penstock.models.progress import TerminalProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal():
    stream = Terminal()
    progress = TerminalProgress(stream)
    progress.begin("Fetching toy", 1000)
    progress.update(1500)
    progress.begin("Unpacking toy", 0)
    progress.update(10)
    progress.end()
    assert "Fetching toy" in stream.getvalue()
    assert "Unpacking toy" in stream.getvalue()


def test_one_line_per_stage_elsewhere():
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    progress.begin("Fetching toy", 3 << 20)
    progress.update(5)
    progress.note("waiting")
    progress.end()
    assert stream.getvalue() == "Fetching toy (3 MiB)\nwaiting\n"
