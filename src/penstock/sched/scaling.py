"""How many replicas a group should have. A plain class that knows no cluster: the simulation runs the same objects."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.replicas import DOWN_S, UP_S, Replicas, num_needed
from penstock.types.errors import counted

SPEED_S = 60
"""A replica's speed is averaged over about this many seconds in which all were full. Long prompts distort a shorter mean."""
_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """The load of a group at one moment. Numbers of tokens count prompts, less what is cached, and answers."""

    num_replicas: int
    is_full: bool
    """Whether requests wait on every replica."""
    num_sent_tokens: int
    """Total since the start, with the expected lengths of answers."""
    num_done_tokens: int
    """Total since the start."""
    num_waiting_tokens: int
    """Tokens of requests without a first token."""
    num_unsent: int = 0
    """Requests that wait for a first replica."""


@dataclass(frozen=True, slots=True)
class Wanted:
    num: int
    reason: str


class Scaler:
    """Wants as many replicas as the arriving tokens keep 80 % busy, and one more for each half minute of work that waits.

    The speed of a replica is measured while requests wait on every replica. `Replicas` smooths the number.
    """

    def __init__(self, least: int, most: int, num: int) -> None:
        """`num`: how many replicas there are now."""
        self._least, self._most = least, most
        self._replicas = Replicas(num)
        self._speed = 0.0
        """Tokens per second that a full replica computes; 0: none was full yet."""
        self._full_ns = 0
        self._before: tuple[int, GroupLoad] | None = None
        self._sent: deque[tuple[int, int]] = deque()
        """(instant, tokens sent since the start), ascending, for the last `UP_S`."""

    def decide(self, now_ns: int, load: GroupLoad) -> Wanted:
        """Return the wanted number of replicas. Call this each second, and when a request finds no replica."""
        before_ns, before = self._before or (now_ns, load)
        self._before = now_ns, load
        self._learn_speed(now_ns - before_ns, before, load)
        rate = self._rate(now_ns, load.num_sent_tokens)
        replicas = self._replicas
        if load.num_unsent:
            asked, reason = max(1, replicas.desired), f"{counted(load.num_unsent, 'request')} without a replica"
            replicas.desired = asked
        elif not load.num_waiting_tokens and load.num_done_tokens == before.num_done_tokens:
            asked, reason = 0, "Nothing runs or waits"
        elif not self._speed:
            asked, reason = max(1, replicas.desired), "The replicas' speed is unknown until requests wait on all"
        else:
            asked = max(1, num_needed(rate / self._speed, load.num_waiting_tokens / self._speed))
            reason = (
                f"{rate:,.0f} tokens/s come, {load.num_waiting_tokens:,} wait, and a full replica computes "
                f"{self._speed:,.0f}/s: that needs {asked}"
            )
        replicas.add(now_ns // _S, asked)
        num = min(self._most, max(self._least, replicas.desired))
        return Wanted(num, reason + self._why_not(asked, num))

    def _learn_speed(self, num_ns: int, before: GroupLoad, load: GroupLoad) -> None:
        if num_ns and before.is_full and load.is_full and before.num_replicas == load.num_replicas:
            num_tokens = load.num_done_tokens - before.num_done_tokens
            self._full_ns = min(SPEED_S * _S, self._full_ns + num_ns)
            weight = min(1.0, num_ns / self._full_ns)
            self._speed += weight * (num_tokens * _S / num_ns / load.num_replicas - self._speed)

    def _rate(self, now_ns: int, num_sent_tokens: int) -> float:
        """Return the tokens that came per second of the last `UP_S`."""
        sent = self._sent
        sent.append((now_ns, num_sent_tokens))
        while len(sent) > 2 and sent[1][0] <= now_ns - UP_S * _S:
            sent.popleft()
        since_ns, num_before = sent[0]
        return (num_sent_tokens - num_before) * _S / max(_S, now_ns - since_ns)

    def _why_not(self, asked: int, num: int) -> str:
        if num == asked:
            return "."
        if num < asked:
            return f"; {num} is the most." if num == self._most else f", but not for {UP_S} s yet."
        return f"; {num} is the least." if num == self._least else f"; the last {counted(DOWN_S, 'second')} needed {num}."
