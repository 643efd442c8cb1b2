"""The least work of a step, and of all requests of a workload, on a GPU: operations and bytes. The GPU benchmarks
compare it with measured peaks; nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_shapes import Shape, format_of
from step_shape import StepShape

from penstock.models.formats import WeightFormat, stored_bytes

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Unavoidable work with these number formats."""

    operations: float
    """Operations of products; a multiply-add is two."""
    num_bytes: float
    """Bytes read and written."""


class ModelWork:
    """The work of a model with weights of one format and a KV cache of `kv_bytes` per value.

    Ignores norms, rotation, sampling and writes.
    """

    def __init__(self, shape: Shape, fmt: WeightFormat, *, kv_bytes: float = BF16_BYTES) -> None:
        self._shape = shape
        table = shape.vocab_size * shape.hidden_size
        self._num_sample_weights = table
        self._num_token_weights = shape.num_weights - table
        self._weight_bytes = sum(
            stored_bytes(format_of(name, fmt), rows, cols)
            for name, rows, cols in shape.matrices()
            if name != "embed" or shape.is_tied
        )
        self.kv_bytes_per_token = int(2 * kv_bytes * shape.num_layers * shape.num_kv_heads * shape.head_dim)

    def of_step(self, step: StepShape) -> Work:
        """All weights and the KV of all rows are read once, whatever the batch."""
        num_read = step.rows * (step.context_len + step.query_len)
        seen = step.rows * (step.context_len * step.query_len + step.query_len * (step.query_len + 1) / 2)
        operations = self._operations(step.num_tokens, step.rows, seen)
        return Work(operations, self._weight_bytes + num_read * self.kv_bytes_per_token)

    def of_requests(self, lengths: Sequence[tuple[int, int]], max_rows: int) -> Work:
        """The work of replies to prompts, (prompt, reply) in tokens, at most `max_rows` at a time and nothing shared.

        However they are scheduled, a step reads all weights and samples at most one token for each of `max_rows` rows, a
        prompt's KV is read when its last token is computed, and a reply's token reads what came before it.
        """
        replies = [reply for _, reply in lengths]
        num_steps = max(*replies, -(-sum(replies) // max_rows))
        # The last token of a reply is sampled and never computed.
        computed = [prompt + reply - 1 for prompt, reply in lengths]
        num_read = sum(prompt + sum(range(prompt + 1, last + 1)) for (prompt, _), last in zip(lengths, computed, strict=True))
        operations = self._operations(sum(computed), sum(replies), sum(last * (last + 1) / 2 for last in computed))
        return Work(operations, num_steps * self._weight_bytes + num_read * self.kv_bytes_per_token)

    def _operations(self, num_tokens: int, num_samples: int, num_seen: float) -> float:
        """`num_seen`: positions that the tokens attend to, added up."""
        shape = self._shape
        attention = 4.0 * num_seen * shape.num_layers * shape.num_heads * shape.head_dim
        return 2.0 * (self._num_token_weights * num_tokens + self._num_sample_weights * num_samples) + attention
