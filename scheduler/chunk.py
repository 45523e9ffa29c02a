"""How much of a prefill fits into the time that a step has left?

Pure: tokens and predicted seconds in, tokens out.
"""

from engine.step_time.model import StepCost

MIN_CHUNK = 16  # tokens; a smaller prefill chunk is not worth a step's overhead
CRUMB_SHARE = (
    0.25  # of a step's fixed cost: a rest that takes no longer comes along, or it would cost a step of its own
)


def largest_chunk(wanted: int, context: int, left_s: float, cost: StepCost) -> int:
    """Of `wanted` tokens behind `context` cached ones, as many as take at most `left_s`; 0 where that are too few to be
    worth it."""
    if wanted < 1 or cost.run(wanted, context) <= left_s:
        return max(0, wanted)
    if left_s <= 0 or cost.prefill(MIN_CHUNK, context) > left_s:
        return 0
    low, high = MIN_CHUNK, wanted
    while low < high:  # prefill() grows with its tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.prefill(middle, context) <= left_s else (low, middle - 1)
    crumb_s = cost.prefill(wanted - low, context + low)
    return wanted if wanted - low < MIN_CHUNK and crumb_s <= CRUMB_SHARE * cost.step_s else low
