"""The sampler on the device does what the specification does, for all rows at once, and carries nothing from one to another."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.backends.cuda import sampling
from penstock.backends.cuda.sampling import SampledWords, Sampler
from penstock.backends.cuda.tables import Patches, RowTables
from penstock.backends.reference.sampling import (
    NoCandidateError,
    add_bias,
    draw,
    narrow,
    penalize,
    restrict,
    sample,
    uniform,
)
from penstock.types.plan import AdmitRow, Capacity
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS, SamplingParams
from support.interpreted import DEVICE

EDGE = 1e-6
"""How near to a boundary two ways to round may fall on its two sides."""
MAX_ROWS = 6
MAX_TOKENS = 24
CAPACITY = Capacity(num_blocks=9, block_size=4, max_rows=MAX_ROWS, max_step_tokens=64, max_model_len=MAX_TOKENS)
INF = float("inf")
PHASES = (Phase.explicit, Phase.generate)
"""To make an example smaller takes minutes in the interpreter."""


@dataclass(frozen=True)
class Case:
    """One row."""

    logits: np.ndarray
    params: SamplingParams
    tokens: list[int]
    num_prompt_tokens: int = 1
    mask: bytes | None = None
    """Mask of a row that follows a grammar."""


@dataclass(frozen=True)
class Chosen:
    token_id: int
    logprobs: TokenLogprobs | None
    appended: int
    """The number that stands in the table after it."""


def choose(cases: list[Case], slots: list[int] | None = None, *, tables: RowTables | None = None) -> list[Chosen]:
    """Admit the rows to `slots`, and sample them in one step."""
    vocab_size = len(cases[0].logits)
    slots = slots or list(range(len(cases)))
    device = torch.device(DEVICE)
    tables = tables or RowTables(CAPACITY, vocab_size=vocab_size, device=device)
    sampler, patches = Sampler(tables, vocab_size=vocab_size), Patches()
    for slot, case in zip(slots, cases, strict=True):
        row = AdmitRow(str(slot), tuple(case.tokens), case.num_prompt_tokens, (1,), 0, case.params)
        patches.add(tables.at(tables.tokens, slot), np.array(case.tokens, np.int32))
        sampler.admit(slot, row, patches)
    tables.apply(*(torch.from_numpy(array).to(device) for array in patches.arrays()))
    row_slots = np.array(slots, np.int32)
    positions = np.array([len(case.tokens) for case in cases], np.int32)
    plan = sampler.prepare(row_slots, positions)
    assert plan.followers.tolist() == [i for i, case in enumerate(cases) if case.params.follows_grammar]
    plan = plan.masked_by({i: case.mask for i, case in enumerate(cases) if case.mask is not None})
    logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(device)
    before = logits.clone()
    results = torch.zeros(SampledWords(MAX_ROWS, MAX_ROWS).end, dtype=torch.int32, device=device)
    sent = {name: torch.from_numpy(array.copy()).to(device) for name, array in plan.arrays().items()}
    where = sampler.choose(logits, plan, sent, results)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits are left alone"
    words = results.cpu().numpy()
    tokens = where.tokens(words).tolist()
    numbers, ids = where.logprobs(words)
    found: dict[int, TokenLogprobs] = {}
    for line, i in enumerate(plan.logprob_samples.tolist()):
        num_top = plan.num_tops[line]
        top = [(int(j), float(x)) for j, x in zip(ids[line, 1:], numbers[line, 1:], strict=True)][:num_top]
        top = [(j, x) for j, x in top if j >= 0]
        found[i] = TokenLogprobs(tokens[i], float(numbers[line, 0]), int(ids[line, 0]), tuple(top))
    table = tables.tokens.cpu().numpy()
    return [
        Chosen(tokens[i], found.get(i), int(table[slot, len(case.tokens)]))
        for i, (slot, case) in enumerate(zip(slots, cases, strict=True))
    ]


def possible_tokens(case: Case) -> set[int]:
    """The tokens that the specification draws if its boundaries are moved by `EDGE`."""
    params, history = case.params, case.tokens
    changed = np.where(np.isnan(case.logits), np.float32(-np.inf), case.logits)
    num_output_tokens = len(history) - case.num_prompt_tokens
    changed = add_bias(restrict(changed, params, history, num_output_tokens, mask=case.mask), params)
    changed = penalize(changed, params, history, case.num_prompt_tokens)
    if params.temperature == 0.0:
        return {int(np.argmax(changed))}
    result = set()
    for d in (-EDGE, 0.0, EDGE):
        top_p = min(1.0, params.top_p * (1 + d)) if params.top_p < 1 else 1.0
        moved = replace(params, top_p=top_p, min_p=params.min_p * (1 - abs(d)))
        u = uniform(params.seed, len(history))
        result |= {draw(*narrow(changed, moved), min(max(u + e, 0.0), 1.0)) for e in (-EDGE, 0.0, EDGE)}
    return result


def assert_as_specified(case: Case, chosen: Chosen) -> None:
    try:
        expected = sample(case.logits, case.params, case.tokens, case.num_prompt_tokens, mask=case.mask)
    except NoCandidateError:
        assert chosen.token_id == -1
        assert chosen.appended == 0
        return
    assert chosen.appended == chosen.token_id
    assert chosen.token_id == expected.token_id or chosen.token_id in possible_tokens(case)
    if chosen.token_id != expected.token_id:
        return
    if expected.logprobs is None:
        assert chosen.logprobs is None
        return
    assert chosen.logprobs is not None
    assert chosen.logprobs.rank == expected.logprobs.rank
    assert chosen.logprobs.logprob == pytest.approx(expected.logprobs.logprob, rel=1e-6, abs=1e-6)
    assert [i for i, _ in chosen.logprobs.top] == [i for i, _ in expected.logprobs.top]
    assert [x for _, x in chosen.logprobs.top] == pytest.approx([x for _, x in expected.logprobs.top], rel=1e-6, abs=1e-6)


@st.composite
def logit_arrays(draw: st.DrawFn, size: int) -> np.ndarray:
    """Peaked, flat, with ties, with banned, broken and infinite entries."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(0, draw(st.sampled_from([0.01, 1.0, 4.0, 30.0])), size)
    logits = np.round(logits, draw(st.sampled_from([0, 1, 9]))).astype(np.float32)
    holes = rng.random(size) < draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    logits[holes] = draw(st.sampled_from([-np.inf, np.nan]))
    if draw(st.sampled_from([True, False, False, False])):
        logits[rng.integers(size)] = np.inf
    return logits


@st.composite
def masks(draw: st.DrawFn, size: int) -> bytes:
    """Masks of few tokens or of many; bits that are no token's are set."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.random(-(-size // 32) * 32) < draw(st.sampled_from([0.02, 0.5, 0.98, 1.0]))
    bits[draw(st.integers(0, size - 1))] = True
    bits[size:] = True
    return np.packbits(bits, bitorder="little").tobytes()


def mask_of(*token_ids: int, size: int) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(-(-size // 32) * 4, "little")


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    logits = draw(logit_arrays(size))
    ids = st.integers(0, size - 1)
    history = draw(st.lists(ids, min_size=1, max_size=12))
    some_ids = draw(st.lists(ids, min_size=1, max_size=6, unique=True).map(sorted))
    restriction = draw(st.sampled_from(["none", "list", "grammar", "grammar", "grammar without a mask"]))
    is_listed = restriction == "list"
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-300, 0.2, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 40, 30000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.95, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5, 1e-40])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.2, -1.1])),
        penalty_window=draw(st.sampled_from([None, None, 1, 3, 100])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, None, 0, 3, MAX_LOGPROBS])),
        logit_bias=tuple((i, draw(st.floats(-9, 9, width=32))) for i in some_ids) if draw(st.booleans()) else (),
        allowed_token_ids=tuple(draw(st.lists(ids, min_size=1, unique=True).map(sorted))) if is_listed else None,
        follows_grammar=restriction.startswith("grammar"),
        banned_token_sequences=draw(st.sampled_from([(), ((*history[-2:], some_ids[0]), (some_ids[-1],))])),
        stop_token_ids=tuple(some_ids),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
    )
    mask = draw(masks(size)) if restriction == "grammar" else None
    return Case(logits, params, history, draw(st.integers(1, len(history))), mask)


batches = st.sampled_from([1, 2, 16, 63, 65, 200]).flatmap(lambda size: st.lists(cases(size), min_size=1, max_size=3))


@settings(max_examples=40, phases=PHASES)
@given(batch=batches)
def test_all_rows_of_a_step_are_sampled_as_specified(batch: list[Case]) -> None:
    for case, chosen in zip(batch, choose(batch, [5, 0, 3][: len(batch)]), strict=True):
        assert_as_specified(case, chosen)


@settings(max_examples=10, phases=PHASES)
@given(batch=st.sampled_from([2, 65]).flatmap(lambda size: st.lists(cases(size), min_size=3, max_size=3)))
def test_a_row_samples_in_company_what_it_samples_alone(batch: list[Case]) -> None:
    assert choose(batch) == [choose([case])[0] for case in batch]


@pytest.mark.parametrize("vocab_size", [4096, 5001])
def test_a_row_longer_than_a_block_of_the_kernel(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = np.round(rng.normal(0, 2, vocab_size), 1).astype(np.float32)  # many equals, also across the blocks
    params = [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(seed=4, top_k=300, top_p=0.9),
        SamplingParams(seed=7, top_p=0.99, min_p=0.001, temperature=1.4),
        SamplingParams(seed=11, temperature=0.8),
    ]
    rows = [Case(logits, each, [1, 2]) for each in params]
    for case, chosen in zip(rows, choose(rows), strict=True):
        assert_as_specified(case, chosen)


@pytest.mark.parametrize("vocab_size", [4064, 4096, 4097, 5001, 8192])
def test_masks_longer_than_a_block_of_the_kernel(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.permutation(vocab_size).astype(np.float32)
    bits = rng.random(-(-vocab_size // 32) * 32) < 0.5
    masks = [bits, ~bits, np.arange(len(bits)) >= vocab_size - 1, np.arange(len(bits)) < 1]
    grammar = SamplingParams(temperature=0.0, follows_grammar=True, logprobs=3)
    rows = [Case(logits, grammar, [1, 2], mask=np.packbits(mask, bitorder="little").tobytes()) for mask in masks]
    listed = SamplingParams(temperature=0.0, allowed_token_ids=tuple(np.flatnonzero(bits[:vocab_size]).tolist()))
    rows += [Case(logits, listed, [1, 2]), Case(logits, SamplingParams(temperature=0.0), [1, 2])]
    found = choose(rows)
    for case, chosen in zip(rows, found, strict=True):
        assert_as_specified(case, chosen)
    assert [chosen.token_id for chosen in found[2:4]] == [vocab_size - 1, 0]
    assert {found[0].token_id, found[1].token_id} > {int(logits.argmax())}
    assert found[4].token_id == found[0].token_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_logit_is_no_answer_unless_it_may_not_be_drawn(temperature: float) -> None:
    logits = np.array([np.inf, 1, 2, 0], np.float32)
    params = SamplingParams(temperature=temperature, logprobs=2)
    rows = [Case(logits, params, [0]), Case(logits, replace(params, allowed_token_ids=(1, 2)), [0])]
    for case, chosen in zip(rows, choose(rows), strict=True):
        assert_as_specified(case, chosen)


def test_the_tokens_near_a_boundary_are_those_of_the_specification() -> None:
    case = Case(np.arange(9, dtype=np.float32), SamplingParams(frequency_penalty=0.2, top_p=0.9, seed=1), [8, 3, 8], 2)
    assert sample(case.logits, case.params, case.tokens, case.num_prompt_tokens).token_id in possible_tokens(case)


def test_bans_are_lifted_where_a_mask_leaves_nothing_else() -> None:
    logits = np.arange(40, dtype=np.float32)
    params = SamplingParams(
        temperature=0.0, follows_grammar=True, stop_token_ids=(7, 9), min_tokens=5, banned_token_sequences=((3,), (1, 2))
    )
    rows = [
        Case(logits, params, [1, 1], mask=mask_of(*allowed, size=40))
        for allowed in ((7, 9), (3, 4, 9), (2, 3, 7), (1, 2, 3, 7, 9))
    ]
    assert [chosen.token_id for chosen in choose(rows)] == [9, 4, 7, 1]


def test_a_slot_forgets_that_its_row_followed_a_grammar() -> None:
    tables = RowTables(CAPACITY, vocab_size=40, device=torch.device(DEVICE))
    sampler = Sampler(tables, vocab_size=40)
    for params, followers in ((SamplingParams(follows_grammar=True), [0]), (SamplingParams(), []), (SamplingParams(), [])):
        sampler.admit(2, AdmitRow("r", (1,), 1, (1,), 0, params), Patches())
        assert sampler.prepare(np.array([2], np.int32), np.array([1], np.int32)).followers.tolist() == followers
        sampler.release(2)


@pytest.mark.parametrize(
    ("logits", "params", "expected"),
    [
        ([1, 3, 3, 2], {"temperature": 0.0}, {1}),
        ([-0.0, 0.0], {"top_k": 1}, {0}),
        ([0.0, -0.0], {"top_k": 1}, {0}),
        ([1, 2, 2, 2], {"top_k": 2}, {1, 2}),
        ([5, 5, 5, 5], {"top_p": 0.5}, {0, 1}),
        ([5, 5, 5, 5], {"top_p": 0.51}, {0, 1, 2}),
        ([5, 5, 5, 5], {"top_k": 3, "top_p": 0.5}, {0, 1}),
        ([0, 1, 1], {"temperature": 1e-320}, {1, 2}),
        ([-INF, 4, -INF], {"top_p": 0.9}, {1}),
        ([3e38, -3e38, 1.0], {}, {0}),
        ([2, 1, 0], {"min_p": 1.0}, {0}),
        ([INF * 0, 1, INF * 0], {}, {1}),
    ],
)
def test_the_candidates(logits: list[float], params: dict[str, float], expected: set[int]) -> None:
    """One of them is drawn with every seed, and each by some seed."""
    row = np.array(logits, np.float32)
    batch = [Case(row, SamplingParams(seed=seed, **params), [0]) for seed in range(12)]
    found = [chosen.token_id for i in range(0, 12, MAX_ROWS) for chosen in choose(batch[i : i + MAX_ROWS])]
    assert set(found) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_uniform_numbers_are_those_of_the_specification(seed: int) -> None:
    """A flat row of 2^16 tokens tells the first 16 bits of the number; position and both halves of the seed matter."""
    logits = np.zeros(2**16, np.float32)
    for num_tokens in (1, 23):
        (chosen,) = choose([Case(logits, SamplingParams(seed=seed), [0] * num_tokens)])
        assert chosen.token_id == int(uniform(seed, num_tokens) * 2**16)


def test_a_slot_forgets_who_had_it() -> None:
    """Parameters, lists and tokens of the row before have no say."""
    tables = RowTables(CAPACITY, vocab_size=8, device=torch.device(DEVICE))
    logits = np.arange(8, dtype=np.float32)
    old = SamplingParams(
        temperature=0.0, allowed_token_ids=(1,), repetition_penalty=9.0, logit_bias=((0, 50.0),), logprobs=1, min_tokens=9
    )
    (first,) = choose([Case(logits, old, [7, 7, 7, 7])], [2], tables=tables)
    assert first.token_id == 1
    new = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    (second,) = choose([Case(logits, new, [3, 4], 1)], [2], tables=tables)
    assert (second.token_id, second.logprobs) == (7, None)


NUM_DRAWS = 240


@pytest.mark.parametrize("params", [{}, {"min_p": 0.2, "temperature": 1.7}])
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    """Chi-square, with fixed seeds."""
    logits = np.random.default_rng(5).normal(0, 1.2, 12).astype(np.float32)
    tokens: list[int] = []
    for first in range(0, NUM_DRAWS, MAX_ROWS):
        batch = [Case(logits, SamplingParams(seed=first + i, **params), [1]) for i in range(MAX_ROWS)]
        tokens += [chosen.token_id for chosen in choose(batch)]
    ids, weights = narrow(logits, SamplingParams(**params))
    expected = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    counts = Counter(tokens)
    assert set(counts) <= set(expected)
    chi_square = sum((counts[i] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for i, p in expected.items())
    degrees = max(1, len(expected) - 1)
    # What chance exceeds once in 10,000 times. Source: Wilson and Hilferty, 1931.
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


class Waits(TorchDispatchMode):
    """Notes what would let the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        waits = name in {"_local_scalar_dense", "nonzero", "masked_select"}
        # torch looks whether the indices of one that adds up are in range.
        waits |= name.startswith("index_put") and ((len(args) > 3 and args[3]) or (kwargs or {}).get("accumulate", False))
        if waits:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


class Gathered(TorchDispatchMode):
    """Counts the tokens that are added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "scatter_add_":
            self.counts.append(args[2].numel())
        return function(*args, **(kwargs or {}))


def test_penalties_of_long_texts_take_no_more_memory_than_those_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_COUNTED_TOKENS", 9)
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, logprobs=5)
    rows = [Case(rng.normal(0, 1, 8).astype(np.float32), params, rng.integers(0, 8, length).tolist()) for length in (22, 5)]
    rows[1] = replace(rows[1], params=replace(params, penalty_window=3))
    with Gathered() as gathered:
        found = choose(rows)
    assert (max(gathered.counts), sum(gathered.counts)) == (8, 2 * 2 * 22)
    for case, chosen in zip(rows, found, strict=True):
        assert_as_specified(case, chosen)


def test_changing_logits_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    change, waits = Sampler._change, Waits()

    def watched(*args):
        with waits:
            return change(*args)

    monkeypatch.setattr(Sampler, "_change", watched)
    params = SamplingParams(
        min_tokens=3,
        stop_token_ids=(4,),
        logit_bias=((1, 0.5), (3, -2.0)),
        allowed_token_ids=(0, 1, 2, 3, 4),
        banned_token_sequences=((2,), (1, 3)),
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.1,
    )
    logits = np.linspace(0, 1, 8, dtype=np.float32)
    grammar = replace(params, allowed_token_ids=None, follows_grammar=True)
    rows = [Case(logits, params, [1, 2, 1]), Case(logits, grammar, [1], mask=mask_of(3, 4, size=8))]
    choose([*rows, Case(logits, SamplingParams(), [1])])
    assert waits.found == []
