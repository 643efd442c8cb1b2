"""The step that goes to the executor, and the capacity that the executor reports.

A `StepPlan` is a diff: a row is sent in full once, when admitted, and later only what changed. When a step fails, the log has
its `repr`, which leaves out the contents of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types.adapter import BASE
from penstock.types.sampling import SamplingParams


class PaddingId(str):
    """The id of a padding row, which never equals a request's id.

    A padding row is computed like any other and its result is dropped. Its blocks are all null blocks.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaddingId) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(slots=True)
class AdmitRow:
    """A request in full, for an executor that does not know it: new, or back from preemption.

    Treat as frozen (see `RowPlan`).
    """

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)  # prompt and what was generated before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    """In order of position. Null blocks stand for those that no layer reads any more, and for all blocks of padding."""
    num_computed_tokens: int  # positions whose KV those blocks hold
    sampling: SamplingParams = field(repr=False)
    second_at: int = 0  # position of the second text's first token in a pair; 0: one text
    adapter: int = BASE  # its adapter, placed before this step and kept until the row is released
    num_scored: int = 0
    """With `sampling.prompt_logprobs`: prompt tokens, after the first, that already have log-probabilities."""
    state_block_ids: tuple[int, ...] = ()
    """With `Capacity.num_state_blocks`: where the row's recurrent state is kept from this step on. Nothing else uses these
    blocks until the row is released."""
    state_source: tuple[int, ...] = ()
    """Blocks with the state after `num_computed_tokens`, which this step only reads; empty: the state before a first token."""


@dataclass(slots=True)
class RowPlan:
    """One row of a step: compute `query_len` tokens after the `context_len` that are cached.

    Treat as frozen. A frozen dataclass takes four times as long to make, and every step makes one per row.
    """

    request_id: str
    context_len: int
    query_len: int
    new_block_ids: tuple[int, ...]  # appended to the row's block table before this step
    samples: int
    """Tokens to sample: 0 in the middle of a prompt, else 1, and 1 more for each guess. With `Capacity.is_one_pass`, 1 requests
    the answer to the row's text."""


@dataclass(slots=True)
class StateSave:
    """A copy of a row's recurrent state after `position` tokens. The step computes the last of them."""

    request_id: str
    position: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """Everything the executor needs for one step. Treat as frozen (see `RowPlan`)."""

    step_id: int
    now_ns: int
    admits: tuple[AdmitRow, ...]
    rows: tuple[RowPlan, ...]
    releases: tuple[str, ...]  # requests to forget before anything else: finished, aborted or preempted
    saves: tuple[StateSave, ...] = ()  # of one row in order of position
    guesses: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """Request id -> tokens that may follow its last known one; with `Capacity.checks_guesses`.

    They are the last tokens of the row's query. The row samples after its last known token and after each guess, and keeps
    these tokens up to the first that is not the next guess. The others, and KV after them, count for nothing.
    """
    num_repeated: int = 0
    """KV positions that several requests hold, counted for each but one. For cost models: reading them again is cheaper."""
    features: bytes | memoryview = field(default=b"", repr=False)
    """The content for `Program.given`: float32 [num_tokens, width], in order of the rows."""

    @property
    def num_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepShape:
    rows: tuple[tuple[int, int], ...]  # (query_len, context_len) of each row
    num_samples: int
    num_repeated: int = 0  # as in `StepPlan`


@dataclass(frozen=True, slots=True)
class Capacity:
    """The executor's limits, which the scheduler keeps to."""

    num_blocks: int  # including the null block 0
    block_size: int
    max_rows: int
    max_step_tokens: int
    max_model_len: int  # longest prompt + output of one request
    has_state: bool = False
    """Blocks also hold the recurrent state after their last computed position: a prefix can be continued only from there."""
    num_state_blocks: int = 0
    """Blocks for each row's recurrent state, if it is separate from keys and values. 0: there is none."""
    window: int = 0
    """Every layer sees at most this many last positions, the computed one included; 0: some layer sees all.

    The executor may read older positions, whatever is there, if no bit of an answer depends on them.
    """
    max_scored: int = 0  # positions with logits per step, besides one per row: scored prompt tokens and guesses
    checks_guesses: bool = False
    """Rows may have guesses (`StepPlan.guesses`)."""
    is_one_pass: bool = False
    """Each request is a text that is computed whole in one step and answered by `StepResult.states`. Nothing is cached."""

    vocab_size: int = 1 << 31
    """Guesses are below it."""
    unsupported_parameters: frozenset[str] = frozenset()
    """Names of `types.sampling.PARAMETERS` that the executor does not compute."""

    def __post_init__(self) -> None:
        if self.has_state and self.num_state_blocks:
            raise ValueError("a state is in the blocks of its position or in blocks of its own")
        if self.checks_guesses and (self.has_state or self.num_state_blocks or self.is_one_pass):
            raise ValueError("a recurrent state can't go back to the last guess that held")
        if self.is_one_pass and self.max_model_len > min(self.max_step_tokens, self.block_size):
            raise ValueError(
                f"texts of {self.max_model_len} tokens need a step and a block of as many, not of {self.max_step_tokens} and "
                f"{self.block_size}"
            )

    def most_blocks(self, num_positions: int) -> int:
        """Return the most blocks that a request holds at one time until `num_positions` are computed."""
        num_blocks = most_blocks(num_positions, self.block_size, window=self.window, max_step_tokens=self.max_step_tokens)
        return num_blocks + self.num_state_blocks


def num_unread_blocks(num_computed_tokens: int, block_size: int, window: int) -> int:
    """Return how many of a row's first blocks no layer reads any more once `num_computed_tokens` are computed."""
    return max(0, num_computed_tokens + 1 - window) // block_size if window else 0


def most_blocks(num_positions: int, block_size: int, *, window: int, max_step_tokens: int) -> int:
    """Return the most blocks that a request holds: for all positions, or for a window plus what one step computes after it."""
    num_blocks = -(-num_positions // block_size)
    return min(num_blocks, 1 - (2 - window - max_step_tokens) // block_size) if window else num_blocks


def scored_positions(context_len: int, query_len: int, num_prompt_tokens: int, num_scored: int) -> range:
    """Return the positions of a row whose logits give the log-probability of the next prompt token.

    `num_scored`: tokens already reported. The prompt's last position is excluded: the token after it is sampled.
    """
    return range(max(context_len, num_scored), min(context_len + query_len, num_prompt_tokens - 1))


@dataclass(slots=True)
class Ticket:
    """A handle of a step that was submitted and not yet collected. Treat as frozen (see `RowPlan`)."""

    step_id: int
    ready_ns: int | None = None  # when it will be done, if known beforehand (simulation)
