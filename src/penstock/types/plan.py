"""The step that crosses to the executor, and the capacity that it tells.

A `StepPlan` is a difference: rows are described in full once, when admitted, and by what changed after
that. Five fields, for good; a new subsystem brings its own message.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.adapter import BASE
from penstock.types.sampling import SamplingParams


class PaddingId(str):
    """The id of a row of padding, which equals no request's id, whatever text users take for theirs.

    Such a row is computed like all others and answered to nobody. Each of its blocks is the null block, which no other row
    reads; what it computes has no meaning.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaddingId) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(slots=True)
class AdmitRow:
    """A request that the executor does not know (new, or back from preemption), in full.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Prompt, and what was generated before a preemption. [num_tokens]"""
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    """Blocks held now, in order; those of a prefix hit already contain KV. Null blocks stand for the first ones if no layer
    reads them any more (`num_unread_blocks`). The blocks of padding are null blocks, all of them."""
    num_computed_tokens: int
    """KV present in those blocks: the first row of this request has this `context_len`."""
    sampling: SamplingParams
    second_at: int = 0
    """Position of the first token of a pair's second text; 0: it is one text."""
    adapter: int = BASE
    """Number of its adapter, which was placed before this step and is not dropped before the row is released."""
    num_scored: int = 0
    """With `sampling.prompt_logprobs`: so many tokens of the prompt, after its first, have their log-probabilities. Each step
    tells those of `scored_positions`."""


@dataclass(slots=True)
class RowPlan:
    """One row of one step: compute `query_len` tokens after `context_len` that are in the cache.

    Nobody writes to one after it was made. Not frozen because there is one per row and step, and
    making a frozen dataclass costs four times as much; what is made once per step is not either, since between two
    steps that is code and memory that no cache has.
    """

    request_id: str
    context_len: int
    query_len: int
    new_block_ids: tuple[int, ...]
    """Appended to the row's block table before this step."""
    samples: int
    """Tokens that the executor samples after the row's last one, and appends to the row by itself: 0 of a chunk of a prompt,
    else 1 as a rule. If it is more, the executor may guess tokens and check them in the same step: it samples 1 to `samples`,
    each of them the token that a step of its own would have sampled. The row has blocks for all of them.
    With `Capacity.is_one_pass` it is 1, which asks for the answer to the row's text; nothing is appended."""

    @property
    def num_positions(self) -> int:
        """Positions that the row may compute and write, from `context_len` on."""
        return self.query_len + max(0, self.samples - 1)


@dataclass(slots=True)
class StepPlan:
    """Nobody writes to one after it was made; not frozen for the reason in `RowPlan`."""

    step_id: int
    now_ns: int
    admits: tuple[AdmitRow, ...]
    rows: tuple[RowPlan, ...]
    releases: tuple[str, ...]
    """Request ids to forget, before anything else in this step: finished, aborted and preempted alike."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_positions for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a cost model sees of a step."""

    rows: tuple[tuple[int, int], ...]
    """(query_len, context_len) of each row."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Told by the executor, obeyed by the scheduler."""

    num_blocks: int
    """Blocks in the pool, the null block 0 included."""
    block_size: int
    """KV positions per block."""
    max_rows: int
    max_step_tokens: int
    max_model_len: int
    """Longest prompt + output of one request."""
    has_state: bool = False
    """Blocks hold recurrent state, too, as it is after their last computed position: nobody can go on inside one but behind
    that."""
    window: int = 0
    """No layer sees other positions of a row than the last so many, the one that it computes included; 0: some layer sees all.
    The executor may read others, whatever is there by then, if no bit of an answer depends on it."""
    max_scored: int = 0
    """Positions of prompts of which one step tells log-probabilities, at most (`SamplingParams.prompt_logprobs`): their logits
    take memory and time. 0: the executor tells none."""
    is_one_pass: bool = False
    """Each request is a text that is computed whole, in one step, and its answer is `StepResult.states`. Nothing is kept of it:
    its block, of which each is long enough for any text, is no more than its place in the step."""

    def __post_init__(self) -> None:
        if self.is_one_pass and self.max_model_len > min(self.max_step_tokens, self.block_size):
            raise ValueError(
                f"texts of {self.max_model_len} tokens need a step and a block of as many, not of {self.max_step_tokens} and "
                f"{self.block_size}"
            )

    def most_blocks(self, num_positions: int) -> int:
        """Blocks that a request holds at one time at most, until so many positions are computed."""
        return most_blocks(num_positions, self.block_size, window=self.window, max_step_tokens=self.max_step_tokens)


def num_unread_blocks(num_computed_tokens: int, block_size: int, window: int) -> int:
    """The first blocks of a row that no layer reads any more, once so many positions are computed."""
    return max(0, num_computed_tokens + 1 - window) // block_size if window else 0


def most_blocks(num_positions: int, block_size: int, *, window: int, max_step_tokens: int) -> int:
    """Blocks that a request holds at most: those of all positions, or of a window and of what one step computes behind it."""
    num_blocks = -(-num_positions // block_size)
    return min(num_blocks, 1 - (2 - window - max_step_tokens) // block_size) if window else num_blocks


def scored_positions(context_len: int, query_len: int, num_prompt_tokens: int, num_scored: int) -> range:
    """Positions of a row's step whose logits say how likely the next token of the prompt was, of a request that wants to know.

    `num_scored`: tokens told already. The last position of a prompt is none of them: what follows it is sampled.
    """
    return range(max(context_len, num_scored), min(context_len + query_len, num_prompt_tokens - 1))


@dataclass(slots=True)
class Ticket:
    """A step in flight. Nobody writes to one after it was made; not frozen for the reason in `RowPlan`."""

    step_id: int
    ready_ns: int | None = None
    """When it will be done, if that is known beforehand (simulation); None in reality."""
