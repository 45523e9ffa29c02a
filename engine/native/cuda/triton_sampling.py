"""A Triton kernel that samples a token for each row of logits, without sorting and without waiting for the host.

Knows logits and sampling parameters; does not know sequences. The lowest logit that top_k and top_p keep is found by
bisection over the ordered bit patterns of the logits (as in FlashInfer, which bisects over probabilities): a pass over
the row tells how many logits are above a pattern, and how much probability they have. Then the cumulative distribution,
in token order, is inverted at the row's uniform number, as `engine.sampling.sampler.sample_ids` does.
"""

# mypy: ignore-errors
# Triton's language has types of its own.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The columns of the rules.
TEMPERATURE, UNIFORM, TOP_P, TOP_K, LOG_MIN_P, NUM_COLUMNS = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 6))


@triton.jit
def _load(row, start, vocab, TILE: tl.constexpr):
    """Return a tile of a row's logits, float32: -inf past the end, and NaN where the model has computed NaN."""
    ids = start + tl.arange(0, TILE)
    return tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _keys(logits, SHIFT: tl.constexpr):
    """Return integers in the order of `logits`, without the `SHIFT` bits that are always 0 in their dtype."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _above(row, vocab, key, best, scale, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return how many logits have a key above `key`, and the sum of their weights 2^((logit - best) · scale)."""
    counts = tl.zeros([TILE], tl.int32)
    weights = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        logits = _load(row, start, vocab, TILE)
        is_above = _keys(logits, SHIFT) > key
        counts += is_above.to(tl.int32)
        weights += tl.where(is_above, tl.exp2((logits - best) * scale), 0.0)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)


@triton.jit
def _kept_weights(row, start, vocab, lowest, best, temperature, log_min_p, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the weights of a tile: 0 for tokens below the key `lowest`, or below min_p."""
    logits = _load(row, start, vocab, TILE)
    is_kept = (_keys(logits, SHIFT) >= lowest) & (logits / temperature >= best / temperature + log_min_p)
    return tl.where(is_kept, tl.exp2((logits - best) * (LOG2_E / temperature)), 0.0)


@triton.jit(do_not_specialize=["vocab", "row_stride"])
def sample_kernel(
    all_logits,  # (rows, vocab), strided
    rules,  # (rows, NUM_COLUMNS), float32; temperature 0: greedy; top_k 0: no limit
    out,  # (rows,), int64: the token ids; -1 if the row's maximum is not finite
    vocab,
    row_stride,
    SHIFT: tl.constexpr,  # low bits of a float32 that are always 0 in the logits' dtype
    TILE: tl.constexpr,
):
    """Sample a token for each row. Grid: (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    row = all_logits + index * row_stride
    rule = rules + index * NUM_COLUMNS
    best, best_id, num_nan = float("-inf"), 0, 0
    for start in range(0, vocab, TILE):
        logits = _load(row, start, vocab, TILE)
        num_nan += tl.sum((logits != logits).to(tl.int32), axis=0)
        logits = tl.where(logits != logits, float("-inf"), logits)
        highest, place = tl.max(logits, axis=0), tl.argmax(logits, axis=0)
        best_id = tl.where(highest > best, start + place, best_id)
        best = tl.maximum(best, highest)
    chosen = best_id
    temperature = tl.load(rule + TEMPERATURE)
    is_broken = (num_nan > 0) | (best == float("-inf")) | (best == float("inf"))
    if (temperature > 0) & (not is_broken):
        scale = LOG2_E / temperature
        highest_key = tl.max(_keys(tl.full([2], 0.0, tl.float32) + best, SHIFT), axis=0).to(tl.int64)
        lowest = tl.min(_keys(tl.full([2], float("-inf"), tl.float32), SHIFT), axis=0).to(tl.int64)
        top_k = tl.load(rule + TOP_K).to(tl.int32)
        top_p = tl.load(rule + TOP_P)
        num_all, total = _above(row, vocab, lowest - 1, best, scale, SHIFT, TILE)
        if (top_k > 0) & (top_k < vocab):
            upper = highest_key
            while lowest < upper:  # the lowest key with fewer than top_k logits above it
                middle = (lowest + upper) >> 1
                count, above = _above(row, vocab, middle, best, scale, SHIFT, TILE)
                upper = tl.where(count < top_k, middle, upper)
                lowest = tl.where(count < top_k, lowest, middle + 1)
            # Of several logits with this key, as many count as top_k has room for.
            count, above = _above(row, vocab, lowest, best, scale, SHIFT, TILE)
            count_with, above_with = _above(row, vocab, lowest - 1, best, scale, SHIFT, TILE)
            total = above + (above_with - above) * (top_k - count) / (count_with - count)
        if top_p < 1:
            upper = highest_key
            while lowest < upper:  # the lowest key with less than top_p above it
                middle = (lowest + upper) >> 1
                count, above = _above(row, vocab, middle, best, scale, SHIFT, TILE)
                upper = tl.where(above < top_p * total, middle, upper)
                lowest = tl.where(above < top_p * total, lowest, middle + 1)
        log_min_p = tl.load(rule + LOG_MIN_P)
        total = 0.0
        for start in range(0, vocab, TILE):
            weights = _kept_weights(row, start, vocab, lowest, best, temperature, log_min_p, SHIFT, TILE)
            total += tl.sum(weights, axis=0)
        # Rounding must not raise the target to the total itself.
        target = tl.minimum(tl.load(rule + UNIFORM) * total, total * (1 - 2.0**-22))
        before = 0.0
        for start in range(0, vocab, TILE):
            weights = _kept_weights(row, start, vocab, lowest, best, temperature, log_min_p, SHIFT, TILE)
            after = before + tl.sum(weights, axis=0)
            places = tl.arange(0, TILE)
            is_past = (weights > 0) & (before + tl.cumsum(weights, axis=0) > target)
            first = tl.min(tl.where(is_past, places, TILE), axis=0)
            last = tl.max(tl.where(weights > 0, places, -1), axis=0)  # the sums of a scan round in another order
            is_here = (before <= target) & (target < after)
            chosen = tl.where(is_here, start + tl.minimum(first, last), chosen)
            before = after
    tl.store(out + index, tl.where(is_broken, -1, chosen).to(tl.int64))
