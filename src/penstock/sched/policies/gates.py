"""Gate policies: when a batch may start or grow."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

from penstock.sched.policies.base import BucketView, Gate, GateDecision, GateView
from penstock.types.errors import ConfigError, counted
from penstock.types.plan import Capacity
from penstock.types.request import Request


class Continuous(Gate):
    """Requests join whenever a batch row is free (Orca, OSDI 2022)."""

    is_continuous: ClassVar[bool] = True
    may_plan_ahead: ClassVar[bool] = True

    def decide(self, view: GateView) -> GateDecision:
        return GateDecision(max_admissions=view.max_rows)


@dataclass(frozen=True, slots=True)
class Static(Gate):
    """`max_batch_size` requests start together, padded to the longest prompt. None joins until all have finished."""

    max_batch_size: int = 0
    """0: as many as the executor has rows for."""
    max_queue_delay_ns: int = 2_000_000_000
    """An incomplete batch starts after this; 0 never waits."""

    def max_running(self, capacity: Capacity) -> int:
        return _max_batch_size(self.max_batch_size, capacity)

    def decide(self, view: GateView) -> GateDecision:
        if view.num_running or view.num_joining:
            return GateDecision(0)
        (bucket,) = view.buckets
        wakeup_ns = bucket.oldest_ns + self.max_queue_delay_ns
        if bucket.num_waiting < view.max_rows and view.now_ns < wakeup_ns:
            return GateDecision(0, wakeup_ns)
        return GateDecision(view.max_rows, is_batch=True)


@dataclass(frozen=True, slots=True)
class Dynamic(Gate):
    """A batch starts at `max_batch_size`, at a preferred size, or when the oldest request has waited `max_queue_delay_ns`,
    as in Triton Inference Server's dynamic batcher. Prompts are padded to the upper end of their bucket."""

    max_batch_size: int = 0
    """0: as many as the executor has rows for."""
    preferred_batch_sizes: tuple[int, ...] = ()
    """The largest that can be filled starts at once."""
    max_queue_delay_ns: int = 20_000_000
    length_buckets: tuple[int, ...] = (128, 512, 1024, 2048)
    """Longest prompt of each bucket, ascending. Longer prompts share a last bucket."""

    def __post_init__(self) -> None:
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ConfigError(
                f"The length buckets {self.length_buckets} do not ascend.", remedy="Name each once, the shortest first."
            )
        if self.max_batch_size and max(self.preferred_batch_sizes, default=0) > self.max_batch_size:
            raise ConfigError(
                f"The preferred batch sizes {self.preferred_batch_sizes} are not all within {self.max_batch_size}.",
                remedy="Raise --max-batch-size, or lower --preferred-batch-size.",
            )

    def max_running(self, capacity: Capacity) -> int:
        return _max_batch_size(self.max_batch_size, capacity)

    def bucket_of(self, request: Request) -> int:
        return bisect_left(self.length_buckets, request.num_prompt_tokens)

    def decide(self, view: GateView) -> GateDecision:
        if view.num_running or view.num_joining:
            return GateDecision(0)
        sizes = [self._batch_size(bucket, view) for bucket in view.buckets]
        ready = [(bucket.oldest_ns, bucket.bucket, size) for bucket, size in zip(view.buckets, sizes, strict=True) if size]
        if not ready:
            return GateDecision(0, min(bucket.oldest_ns for bucket in view.buckets) + self.max_queue_delay_ns)
        # The longest wait first, so that a bucket which is always full does not starve others.
        _, bucket, size = min(ready)
        pad_to = self.length_buckets[bucket] if bucket < len(self.length_buckets) else 0
        return GateDecision(size, bucket=bucket, is_batch=True, pad_to_tokens=pad_to)

    def _batch_size(self, bucket: BucketView, view: GateView) -> int:
        num_waiting = min(bucket.num_waiting, view.max_rows)
        if num_waiting == view.max_rows or view.now_ns >= bucket.oldest_ns + self.max_queue_delay_ns:
            return num_waiting
        return max((size for size in self.preferred_batch_sizes if size <= num_waiting), default=0)


def _max_batch_size(wanted: int, capacity: Capacity) -> int:
    """Return the batch size, limited to half of the executor's rows: each request may need another row for padding."""
    possible = min(capacity.max_rows // 2, capacity.max_step_tokens)
    if max(wanted, 1) > possible:
        rows, tokens = counted(capacity.max_rows, "row"), counted(capacity.max_step_tokens, "token")
        raise ConfigError(
            f"A batch of {max(wanted, 1)} needs {2 * max(wanted, 1)} rows, half of them for its padding, and as many tokens in "
            f"a step as it has requests; the server has {rows} and {tokens}.",
            remedy=f"Set --max-num-seqs to {2 * max(wanted, 1)} or more, or --max-batch-size to {possible} or less."
            if possible
            else "Set --max-num-seqs to 2 or more.",
        )
    return wanted or possible


GATES = {
    "continuous": "penstock.sched.policies.gates:Continuous",
    "static": "penstock.sched.policies.gates:Static",
    "dynamic": "penstock.sched.policies.gates:Dynamic",
}
