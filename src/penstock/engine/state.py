"""The states of an engine: one in this process, or the replicas of a cluster."""

from __future__ import annotations

from enum import StrEnum

from penstock.types.errors import RejectReason

SHUTTING_DOWN = "the server is shutting down"
UNLOADED = "its model was unloaded"
"""Why `close` cut requests short, which the clients read."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def refuses_with(self) -> RejectReason | None:
        """Why a new request would be refused, or None."""
        if self is EngineState.READY:
            return None
        return RejectReason.DRAINING if self is EngineState.DRAINING else RejectReason.UNAVAILABLE
