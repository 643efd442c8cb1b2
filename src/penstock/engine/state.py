"""What an engine is doing, as whoever wants something of it sees it. Written by the engine and its supervisor."""

from __future__ import annotations

from enum import StrEnum

from penstock.types.errors import RejectReason


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Told by the supervisor, between two engines."""
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def refuses_with(self) -> RejectReason | None:
        """Why a new request would be refused; None if it would be taken."""
        if self is EngineState.READY:
            return None
        return RejectReason.DRAINING if self is EngineState.DRAINING else RejectReason.UNAVAILABLE
