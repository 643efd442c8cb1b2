"""Samples tokens and computes log-probabilities as `backends/reference/sampling.py` specifies. A program computes one row, so
draws do not depend on the batch. Weights are float32, added as float64.

Nothing is sorted: top_k and top_p search for a threshold. A key is a logit's bits as an integer in the same order. Each pass
tries several keys. Among equal logits, lower ids come first.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, SIM108  # kernels: Triton reads their text, and names constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import jit

NEG_INF_KEY = tl.constexpr(-2139095041)
"""The key of -inf, below the key of any token that can be drawn."""
NO_ID = tl.constexpr(2147483647)
PARAM_WORDS = tl.constexpr(16)
"""32-bit words of a row's parameters: `tables.PARAM_WORDS`."""


@triton.jit
def _load(row, start, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load token ids and logits from `start` on: -inf for NaN and past the end."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    return ids, tl.where(x == x, x, float("-inf"))


@triton.jit
def _keys(x):
    """Return int32 keys that sort like the logits. 0 and -0 have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(x, largest, inverse_temperature):
    scaled = (x.to(tl.float64) - largest.to(tl.float64)) * inverse_temperature
    return tl.exp(tl.maximum(scaled, -1e4).to(tl.float32)).to(tl.float64)


@triton.jit
def _largest(row, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    best, best_ids = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        ids, x = _load(row, start, VOCAB_SIZE, BLOCK)
        best_ids = tl.where(x > best, ids, best_ids)
        best = tl.maximum(x, best)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, best_ids, NO_ID), 0)


@triton.jit
def _above(
    row,
    keys,
    largest,
    inverse_temperature,
    COUNTS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Return a float64 for each of N keys: the number of tokens in the row with a larger key if `COUNTS`, else the sum of their
    weights."""
    sums = tl.zeros((N, BLOCK), tl.float64)
    for start in range(0, VOCAB_SIZE, BLOCK):
        _, x = _load(row, start, VOCAB_SIZE, BLOCK)
        if COUNTS:
            addends = tl.full((BLOCK,), 1.0, tl.float64)
        else:
            addends = _weights(x, largest, inverse_temperature)
        sums += tl.where(_keys(x)[None, :] > keys[:, None], addends[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _threshold(
    row, low, high, wanted, largest, inverse_temperature,
    COUNTS: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the least key above `low` such that tokens above it count (or weigh) less than `wanted`, and that sum."""
    above = tl.zeros((), tl.float64)
    while high > low + 1:
        keys = low + (high.to(tl.int64) - low) * (1 + tl.arange(0, N)) // (N + 1)
        keys = tl.maximum(keys.to(tl.int32), low + 1)
        sums = _above(row, keys, largest, inverse_temperature, COUNTS, VOCAB_SIZE, BLOCK, N)
        is_enough = sums >= wanted
        low = tl.max(tl.where(is_enough, keys, low), 0)
        high = tl.min(tl.where(is_enough, high, keys), 0)
        above = tl.maximum(above, tl.max(tl.where(is_enough, 0.0, sums), 0))  # the sum of the lowest key, which is the largest
    return high, above


@triton.jit
def _num_equal(row, key, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        _, x = _load(row, start, VOCAB_SIZE, BLOCK)
        count += (_keys(x) == key).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weight_of_key(key, largest, inverse_temperature):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return _weights(bits.to(tl.float32, bitcast=True), largest, inverse_temperature)


@triton.jit
def _top_k(row, top_k, largest, inverse_temperature, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """Return the key of the k-th largest logit, and how many tokens with it are among the k largest."""
    low, high = tl.full((), NEG_INF_KEY, tl.int32), _keys(largest)
    key, above = _threshold(
        row, low, high, top_k.to(tl.float64), largest, inverse_temperature, True, VOCAB_SIZE, BLOCK, NUM_PIVOTS
    )
    return key, top_k - above.to(tl.int32)


@triton.jit
def _top_p(
    row, top_p, threshold, num_equal, largest, inverse_temperature,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_PIVOTS: tl.constexpr,
):  # fmt: skip
    """Like `_top_k`, for the fewest most likely tokens that together have the share top_p of the weight."""
    above = _above(row, threshold + tl.zeros((1,), tl.int32), largest, inverse_temperature, False, VOCAB_SIZE, BLOCK, 1)
    if num_equal > 0:
        num_equal = tl.minimum(num_equal, _num_equal(row, threshold, VOCAB_SIZE, BLOCK))
    whole = tl.sum(above, 0) + num_equal * _weight_of_key(threshold, largest, inverse_temperature)
    wanted = top_p * whole
    key, above_key = _threshold(
        row, threshold - 1, _keys(largest), wanted, largest, inverse_temperature,
        False, VOCAB_SIZE, BLOCK, NUM_PIVOTS,
    )  # fmt: skip
    num_needed = tl.ceil((wanted - above_key) / _weight_of_key(key, largest, inverse_temperature))
    num_needed = tl.maximum(tl.minimum(num_needed, 2147483647.0), 1.0).to(tl.int32)
    return key, tl.where(key == threshold, tl.minimum(num_needed, num_equal), num_needed)


@triton.jit
def _kept_weights(x, threshold, num_equal, num_seen, min_p, largest, inverse_temperature):
    """Return weights, 0 for tokens that are filtered out. Earlier blocks had `num_seen` tokens with the threshold's key."""
    keys = _keys(x)
    weights = _weights(x, largest, inverse_temperature)
    is_kept = (keys >= threshold) & (weights >= min_p)
    is_equal = (keys == threshold).to(tl.int32)
    num_here = tl.sum(is_equal, 0)
    if (num_here > 0) & (num_seen + num_here > num_equal):
        is_kept = is_kept & ((is_equal == 0) | (num_seen + tl.cumsum(is_equal, 0) <= num_equal))
    return tl.where(is_kept, weights, 0.0), num_seen + num_here


@triton.jit
def _uniform(seed_low, seed_high, position):
    """Return a random number in (0, 1) by Philox 4x32 with 10 rounds: 53 bits, centred in their interval."""
    zero = tl.zeros((), tl.uint32)
    key_low, key_high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    first, second, _, _ = tl.philox_impl(position.to(tl.uint32), zero, zero, zero, key_low, key_high, 10)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _draw(row, threshold, num_equal, min_p, u, largest, inverse_temperature, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    whole = tl.zeros((), tl.float64)
    num_seen = tl.zeros((), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        _, x = _load(row, start, VOCAB_SIZE, BLOCK)
        weights, num_seen = _kept_weights(x, threshold, num_equal, num_seen, min_p, largest, inverse_temperature)
        whole += tl.sum(weights, 0)
    target = u * whole
    reached = tl.zeros((), tl.float64)
    num_seen = tl.zeros((), tl.int32)
    found = tl.full((), NO_ID, tl.int32)
    last = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        ids, x = _load(row, start, VOCAB_SIZE, BLOCK)
        weights, num_seen = _kept_weights(x, threshold, num_equal, num_seen, min_p, largest, inverse_temperature)
        mass = tl.sum(weights, 0)
        if (found == NO_ID) & (reached + mass > target):
            is_past = (weights > 0.0) & (reached + tl.cumsum(weights, 0) > target)
            found = tl.min(tl.where(is_past, ids, NO_ID), 0)
        last = tl.where(weights > 0.0, ids, last)
        reached += mass
    # The sums differ in rounding, so the target may never be reached.
    return tl.where(found == NO_ID, tl.max(last, 0), found)


@jit(do_not_specialize=["bits"])
def restrict(
    logits,  # float32 [S, vocab_size], changed in place
    row_stride,
    samples,  # [M] indices into S
    lines,  # [M] line of each sample in `bits`
    bits,  # int32 [., vocab_size / 32, rounded up]: bit i % 32 of word i / 32 says whether token i may be sampled
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the logits of tokens that a grammar's mask forbids to -inf: step 2 of `types/sampling.py`, without bans."""
    place = tl.program_id(0)
    row = logits + tl.load(samples + place).to(tl.int64) * row_stride
    line = bits + tl.load(lines + place).to(tl.int64) * ((VOCAB_SIZE + 31) // 32)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < VOCAB_SIZE
    is_allowed = (tl.load(line + (ids >> 5), mask=is_token, other=0) >> (ids & 31)) & 1
    tl.store(row + ids, float("-inf"), mask=is_token & (is_allowed == 0))


@jit()
def choose(
    logits,  # float32 [S, vocab_size]
    row_stride,
    sample_slots,  # [S]
    sample_positions,  # [S] tokens before the new one
    param_words,  # RowTables.params; Triton reserves the name `params`
    params_f64,
    tokens,  # RowTables.tokens: the new one is appended
    table_width,
    out,  # int32 [S]: the token, or -1 where no logit is a number or one is +inf
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Sample a token from its row's logits: steps 5 and 6 of `types/sampling.py`."""
    sample = tl.program_id(0)
    slot = tl.load(sample_slots + sample).to(tl.int64)
    position = tl.load(sample_positions + sample)
    row = logits + sample.to(tl.int64) * row_stride
    floats = params_f64 + slot * (PARAM_WORDS // 2)
    ints = param_words + slot * PARAM_WORDS
    inverse_temperature = tl.load(floats)
    largest, token = _largest(row, VOCAB_SIZE, BLOCK)
    has_answer = (largest > float("-inf")) & (largest < float("inf"))
    if (inverse_temperature > 0.0) & has_answer:
        top_p, min_p = tl.load(floats + 1), tl.load(floats + 2)
        top_k = tl.load(ints + 6)
        threshold = tl.full((), NEG_INF_KEY, tl.int32)
        num_equal = tl.zeros((), tl.int32)
        if (top_k > 0) & (top_k < VOCAB_SIZE):
            threshold, num_equal = _top_k(row, top_k, largest, inverse_temperature, VOCAB_SIZE, BLOCK, NUM_PIVOTS)
        if top_p < 1.0:
            threshold, num_equal = _top_p(
                row, top_p, threshold, num_equal, largest, inverse_temperature, VOCAB_SIZE, BLOCK, NUM_PIVOTS
            )
        u = _uniform(tl.load(ints + 7), tl.load(ints + 8), position)
        token = _draw(row, threshold, num_equal, min_p, u, largest, inverse_temperature, VOCAB_SIZE, BLOCK)
    token = tl.where(has_answer, token, -1)
    tl.store(out + sample, token)
    # A failed row's token does not matter, but a step planned already may look it up, so it must be valid.
    tl.store(tokens + slot * table_width + position, tl.maximum(token, 0))


@jit()
def logprobs(
    logits,  # float32 [S, vocab_size], the model's own
    row_stride,
    samples,  # [L] indices into S
    num_tops,  # [L]
    tokens,  # int32 [S], the sampled ones
    out_logprobs,  # float64 [L, 1 + MAX_TOP]: the sampled token's, then the most likely tokens'
    out_ids,  # int32 [L, 1 + MAX_TOP]: the sampled token's rank, then ids of the most likely; -1: none
    VOCAB_SIZE: tl.constexpr,
    MAX_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute log-probabilities of sampled and most likely tokens: step 1 of `types/sampling.py`, though after choosing.

    Skips failed rows. Beside a +inf, which may not be drawn, nothing has a probability.
    """
    line = tl.program_id(0)
    sample = tl.load(samples + line).to(tl.int64)
    row = logits + sample * row_stride
    token = tl.load(tokens + sample)
    if token >= 0:
        out_logprobs += line * (1 + MAX_TOP)
        out_ids += line * (1 + MAX_TOP)
        norm = _tell_token(row, tl.load(row + token), out_logprobs, out_ids, VOCAB_SIZE, BLOCK)
        _tell_top(row, norm, tl.load(num_tops + line), out_logprobs, out_ids, VOCAB_SIZE, BLOCK)


@triton.jit
def _tell_token(row, own, out_logprobs, out_ids, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    largest, _best_id = _largest(row, VOCAB_SIZE, BLOCK)
    mass, num_larger = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        _, x = _load(row, start, VOCAB_SIZE, BLOCK)
        mass += tl.exp(x.to(tl.float64) - largest.to(tl.float64))
        num_larger += (x > own).to(tl.int32)
    is_finite = largest < float("inf")
    norm = tl.where(is_finite, largest.to(tl.float64) + tl.log(tl.sum(mass, 0)), float("inf"))
    tl.store(out_logprobs, own.to(tl.float64) - norm)
    tl.store(out_ids, tl.where(is_finite, 1 + tl.sum(num_larger, 0), 1))
    return norm


@triton.jit
def _tell_top(row, norm, num_top, out_logprobs, out_ids, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    place = tl.full((), 1, tl.int32)
    while place <= num_top:
        best = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, VOCAB_SIZE, BLOCK):
            ids, x = _load(row, start, VOCAB_SIZE, BLOCK)
            packed = (_keys(x).to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where(packed < last, packed, -0x7FFFFFFFFFFFFFFF), 0))
        last = best
        is_there = ((best >> 32) > NEG_INF_KEY) & (norm < float("inf"))
        best_id = tl.where(is_there, 2147483647 - (best & 0x7FFFFFFF).to(tl.int32), -1)
        logit = tl.load(row + tl.maximum(best_id, 0)).to(tl.float64)
        tl.store(out_ids + place, best_id)
        tl.store(out_logprobs + place, tl.where(is_there, logit - norm, float("-inf")))
        place += 1
