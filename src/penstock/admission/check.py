"""The contract of the door's checks: what each is shown and what it answers. `door` calls them; none of them queues anything.

A check sees values and returns a value, so a new one is a class of a few lines in a file of its own and a line in `door`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.admission.ask import Ask
from penstock.types.errors import RejectReason


@dataclass(slots=True, kw_only=True)
class DoorView:
    """One call at the door, and what is expected of it. Nothing in it counts on `max_tokens`.

    Nobody writes to one after it was made; not frozen, as that doubles the time to make one.
    """

    ask: Ask
    now_ns: int
    is_expected: bool
    """It comes back as it was told to: its place has been kept for it, and it may use the room that others must leave."""
    is_idle: bool
    """Nobody runs, waits or is on the way in."""
    starts_at_once: bool
    """Nobody waits for a row or for a first token, and a row is free."""
    num_waiting: int
    """Those who wait and whom the next step can't take, and places kept for others who were told to come back."""
    target_ttft_ns: int | None
    """The stricter one of the call's own target and the server's; None: the call may wait as long as it takes."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Of one choice, predicted."""
    ttft_ns: int
    """Expected time from now to the first token; 0 if nothing was measured yet."""
    own_prefill_ns: int
    """What of that is the call's own prompt."""
    step_ns: int
    """Expected time from one token to the next."""
    ns_per_request: int | None
    """Expected time from one end to the next while others wait; None if nothing was measured yet."""
    num_blocks_demanded: int
    """KV blocks of all that runs and of this call at their predicted lengths, or what is held already if that is more; and what
    is kept for others who were told to come back."""
    num_blocks_own: int
    num_blocks_freed: int
    """By the end of one that runs, mean; >= 1."""
    num_blocks_total: int


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RejectReason
    detail: str
    """With the numbers, in words for the user."""
    wait_ns: int | None = None
    """Until the check would pass if nobody else came; None if that can't be said."""


class Check(Protocol):
    def refusal(self, view: DoorView) -> Refusal | None:
        """Why the call may not come in; None if it may as far as this check is concerned."""
        ...
