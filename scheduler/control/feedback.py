"""The outer loop of the SLA controller: twice a second it moves batch size and max-wait by what was observed.

A p99 over a window is slow and noisy: it moves nothing without enough data, inside a dead band, or twice for the same
evidence. Bulk's batch size shrinks fast and grows slowly; it also shrinks when an interactive request waits for its
first step, or KV blocks run out, which show at once.

Knows one tier's knobs and statistics and the load; decides nothing about single steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.config import Tier
from scheduler.control import max_wait
from scheduler.control.knobs import Decision, Knob, TierKnobs
from scheduler.control.tier_stats import MISS_TARGET, TierStats

UPDATE_S = 0.5  # between two rounds of the outer loop
KV_HIGH, KV_LOW = 0.85, 0.70  # of all KV blocks: above the first bulk shrinks, below the second it may grow
AGE_HIGH = 0.5  # of the TTFT SLO: bulk shrinks when an interactive request has waited this long for its first step
ITL_LOW = 0.7  # of the ITL SLO: the interactive batch grows while the observed p99 is below it
GROWTH = 2  # sequences that a batch grows by at a time
BULK_CUT, BULK_KV_CUT, INTERACTIVE_CUT = 0.5, 0.8, 0.8  # what a batch size is multiplied with when it shrinks
DEAD_BAND = 0.1  # of max-wait's upper bound: a goal nearer than this moves nothing


@dataclass(frozen=True, slots=True)
class Load:
    """What the outer loop sees of the present, by tier."""

    kv_usage: float  # share of all KV blocks
    held: Mapping[str, int]  # requests claimed and not ended
    waiting: Mapping[str, int]  # requests in the queue
    age_share: float = 0.0  # the longest wait for a first step among interactive requests, as a share of the TTFT SLO
    step_s: float = 0.01  # fixed cost of a step
    decodes_s: Mapping[str, float] = field(default_factory=dict)  # a step of an interactive tier's decodes alone


@dataclass(frozen=True, slots=True)
class InteractiveLoad:
    """What a bulk tier's moves depend on besides the tier itself."""

    is_absent: bool  # no interactive request anywhere
    miss_share: float | None  # worst share of misses that bulk took part in, among the tiers; None: too little data
    bulk_took_part: bool  # bulk ran lately


def move_interactive(tier: Tier, knobs: TierKnobs, stats: TierStats, load: Load, now: float) -> list[Decision]:
    itl_ratio = stats.p99_ratio("itl", now, stats.answered_s)
    size = knobs.batch_size
    wants_more = load.waiting.get(tier.name, 0) > 0 or load.held.get(tier.name, 0) >= size.chosen
    moves: list[Decision | None] = []
    if itl_ratio is not None and itl_ratio > 1 and _decodes_alone_are_late(tier, load):
        stats.answered_s = now
        reason = "tokens come too slowly: fewer sequences a step"
        moves.append(size.move(size.chosen * INTERACTIVE_CUT, "itl_p99", reason))
    elif wants_more and (tier.slo.itl_p99_ms is None or _below(itl_ratio, ITL_LOW)):
        reason = "requests wait and tokens come in time: more sequences a step"
        moves.append(size.move(size.chosen + GROWTH, "queue", reason))
    moves.append(_move_wait(tier, knobs.max_wait_ms, size.value, stats, load, now))
    return [move for move in moves if move is not None]


def _decodes_alone_are_late(tier: Tier, load: Load) -> bool:
    """Return whether fewer sequences would help: else long gaps come from prefills, and the margin shortens those."""
    return 1000 * load.decodes_s.get(tier.name, 0.0) > (tier.slo.itl_p99_ms or 0)


def _move_wait(tier: Tier, knob: Knob, slots: float, stats: TierStats, load: Load, now: float) -> Decision | None:
    """Move max-wait, which holds only on an idle engine, to what another arrival is worth."""
    ttft_ratio = stats.p99_ratio("ttft", now)
    has_slots = not load.waiting.get(tier.name, 0) and load.held.get(tier.name, 0) < slots
    if ttft_ratio is not None and ttft_ratio > 1 and has_slots:  # without free slots, max-wait is not the cause
        return knob.move(knob.chosen / 2 - 0.5, "ttft_p99", "first tokens are late: wait less")
    if stats.rate_per_s <= 0:
        return None
    bounds = knob.bounds
    goal_ms = bounds.min
    if max_wait.is_worth_it(1 / stats.rate_per_s, load.step_s):
        goal_ms = max_wait.longest_wait_ms(tier.slo.ttft_p99_ms, load.step_s, bounds.min, bounds.max)
    return _towards(knob, goal_ms, "how often another arrival comes within the fixed cost of a step")


def move_bulk(
    tier: Tier, knobs: TierKnobs, stats: TierStats, load: Load, interactive: InteractiveLoad, now: float
) -> list[Decision]:
    """Move bulk's batch size by additive increase and multiplicative decrease, and max-wait to the time a batch takes
    to fill."""
    bounds = knobs.max_wait_ms.bounds
    moves = _move_bulk_size(tier, knobs, stats, load, interactive, now)
    goal_ms = max_wait.fill_ms(knobs.batch_size.value, stats.rate_per_s, bounds.min, bounds.max)
    if goal_ms is not None:
        moves.append(_towards(knobs.max_wait_ms, goal_ms, "the time a batch takes to fill"))
    return [move for move in moves if move is not None]


def _move_bulk_size(
    tier: Tier, knobs: TierKnobs, stats: TierStats, load: Load, interactive: InteractiveLoad, now: float
) -> list[Decision | None]:
    held, size = load.held.get(tier.name, 0), knobs.batch_size.chosen
    cut = _bulk_cut(held, size, stats, load, interactive, now)
    if cut is not None:
        stats.answered_s = now
        return _resize(knobs, *cut)
    wants_more = load.waiting.get(tier.name, 0) > 0 or held >= size
    harms_none = interactive.is_absent or _below(interactive.miss_share, MISS_TARGET / 2)
    if wants_more and load.kv_usage < KV_LOW and harms_none:
        return _resize(knobs, size + GROWTH, "queue", "work waits and nobody above is harmed")
    return []


def _bulk_cut(
    held: int, size: float, stats: TierStats, load: Load, interactive: InteractiveLoad, now: float
) -> tuple[float, str, str] | None:
    """Return a smaller batch size, and the signal and reason for it; None where there is none."""
    if not 0 < held <= size:  # the tier holds nothing, or the last cut has not had its effect yet
        return None
    many_missed = interactive.miss_share is not None and interactive.miss_share > 2 * MISS_TARGET
    if many_missed and not interactive.is_absent:
        return size * BULK_CUT, "slo_misses", "interactive tiers miss their targets"
    if interactive.bulk_took_part and load.age_share > AGE_HIGH and now - stats.answered_s > UPDATE_S:
        return size * BULK_CUT, "queue_age", "interactive requests wait for their first step"
    if load.kv_usage > KV_HIGH:
        return min(size, held) * BULK_KV_CUT, "kv_usage", "KV blocks run out"
    return None


def _resize(knobs: TierKnobs, size: float, signal: str, reason: str) -> list[Decision | None]:
    """Move both ceilings: slots, and tokens in proportion to them."""
    slots, tokens = knobs.batch_size, knobs.batch_tokens
    move = slots.move(size, signal, reason)
    return [move, tokens.move(tokens.bounds.start * slots.chosen / slots.bounds.start, signal, reason)]


def _towards(knob: Knob, goal_ms: float, reason: str) -> Decision | None:
    """Move the knob half the way to its goal (slew limit), unless the goal is near (hysteresis)."""
    if abs(goal_ms - knob.chosen) < DEAD_BAND * max(knob.bounds.max, 1.0):
        return None
    return knob.move((knob.chosen + goal_ms) / 2, "arrival_rate", reason)


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit
