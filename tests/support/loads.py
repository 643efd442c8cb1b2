"""A builder of engine loads with defaults that suit tests."""

from __future__ import annotations

from penstock.types.stats import EngineLoad


def make_load(
    num_running: int = 0,
    num_waiting: int = 0,
    num_rows_free: int = 8,
    *,
    num_blocks_total: int = 100,
    num_blocks_free: int = 100,
) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_rows_free=num_rows_free,
        num_blocks_total=num_blocks_total,
        num_blocks_free=num_blocks_free,
    )
