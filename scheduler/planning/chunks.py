"""How many tokens of a prefill run in one step, by the time that is left in the step."""

from engine.step_time.cost import StepCost

MIN_CHUNK = 16  # tokens; a smaller prefill chunk is not worth a step's overhead
# Share of a step's fixed cost. If the rest of a prompt takes no longer than this, it is added to the chunk even if the
# step then exceeds its limit. Otherwise the rest would need a step of its own.
REST_SHARE = 0.25


def largest_chunk(wanted: int, context: int, left_s: float, cost: StepCost) -> int:
    """Return how many of `wanted` tokens, after `context` computed ones, can be computed in `left_s` seconds.

    Return 0 if fewer than `MIN_CHUNK` of them fit. Return `wanted` also if the tokens that do not fit are only a short
    rest (`REST_SHARE`).
    """
    if wanted < 1 or cost.run(wanted, context) <= left_s:
        return max(0, wanted)
    if left_s <= 0 or cost.prefill(MIN_CHUNK, context) > left_s:
        return 0
    low, high = MIN_CHUNK, wanted
    while low < high:  # a binary search: prefill() grows with the number of tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.prefill(middle, context) <= left_s else (low, middle - 1)
    rest_s = cost.prefill(wanted - low, context + low)
    return wanted if wanted - low < MIN_CHUNK and rest_s <= REST_SHARE * cost.step_s else low
