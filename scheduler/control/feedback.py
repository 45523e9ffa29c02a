"""The outer loop of the SLA controller: twice a second, it moves batch size and max-wait according to observations.

A p99 over a window is slow and noisy. So a p99 moves a knob only if there is enough data, if the value is outside a
dead band, and if the same data has not moved the knob before. Bulk's batch size shrinks fast and grows slowly. It also
shrinks when KV blocks run out, which shows a problem without delay.

Knows the knobs and statistics of one tier and the load; decides nothing about single steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.config import Tier
from scheduler.control import max_wait
from scheduler.control.budget import KV_RESERVE
from scheduler.control.knobs import Decision, Knob, TierKnobs
from scheduler.control.tier_stats import MISS_TARGET, TierStats

GROWTH = 2  # number of sequences by which a batch size grows at a time
BULK_CUT = 0.5  # factor that a batch size is multiplied by when it shrinks
DEAD_BAND = 0.1  # share of max-wait's upper bound: max-wait does not move if its goal is nearer than this


@dataclass(frozen=True, slots=True)
class Load:
    """The present load of a worker. The mappings are by tier."""

    kv_usage: float  # share of all KV blocks in use
    held: Mapping[str, int]  # number of requests that are claimed and have not ended
    waiting: Mapping[str, int]  # number of requests in the queue
    step_s: float = 0.01  # fixed cost of a step
    # Predicted length of a step that holds only the decodes of an interactive tier.
    decodes_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InteractiveLoad:
    """The state of all interactive tiers, as far as the knobs of a bulk tier depend on it."""

    is_absent: bool  # no interactive request is held or queued
    was_absent: bool  # nor has any ended in the last `WINDOW_S`
    miss_share: float | None  # share of misses caused by bulk, in the worst interactive tier; None: too little data


def move_interactive(
    tier: Tier, knobs: TierKnobs, stats: TierStats, load: Load, is_overloaded: bool, now: float
) -> list[Decision]:
    """Move the batch size and max-wait of an interactive tier, and return the moves.

    If tokens come too slowly, the batch size shrinks to the number of requests that the tier holds: no more come in. If
    first tokens are late, too, it does not shrink: requests that wait for a slot would only be later.
    """
    itl_ratio = stats.p99_ratio("itl", now, stats.last_cut_s)
    starts_late = (stats.p99_ratio("ttft", now) or 0.0) > 1
    size = knobs.batch_size
    wants_more = load.waiting.get(tier.name, 0) > 0 or load.held.get(tier.name, 0) >= size.chosen
    moves: list[Decision | None] = []
    if is_overloaded:
        stats.last_cut_s = now
    elif (
        itl_ratio is not None and itl_ratio > 1 and not starts_late and _decodes_alone_are_late(tier, size.chosen, load)
    ):
        stats.last_cut_s = now
        reason = "tokens come too slowly: no more sequences a step"
        moves.append(size.move(load.held.get(tier.name, 0), "itl_p99", reason))
    elif wants_more and (starts_late or tier.slo.itl_p99_ms is None or _below(itl_ratio, 1.0)):
        late = "first tokens are late" if starts_late else "tokens come in time"
        reason = f"requests wait and {late}: more sequences a step"
        moves.append(size.move(size.chosen + GROWTH, "queue", reason))
    moves.append(_move_wait(tier, knobs.max_wait_ms, size.value, stats, load, now))
    return [move for move in moves if move is not None]


def _decodes_alone_are_late(tier: Tier, size: float, load: Load) -> bool:
    """Return whether a step with only the tier's decodes takes longer than the ITL SLO.

    If so, more sequences do harm. If not, long gaps between tokens come from other work in the steps.
    """
    too_long = 1000 * load.decodes_s.get(tier.name, 0.0) > (tier.slo.itl_p99_ms or 0)
    return too_long and load.held.get(tier.name, 0) <= size


def _move_wait(tier: Tier, knob: Knob, slots: float, stats: TierStats, load: Load, now: float) -> Decision | None:
    """Move the max-wait of an interactive tier, and return the move; None if it stays the same.

    Max-wait applies only on an idle engine. It shrinks if first tokens are late although slots are free. Otherwise, if
    waiting for further arrivals pays, it goes to the longest wait that the SLO permits. If waiting does not pay, it
    goes to its lower bound.
    """
    ttft_ratio = stats.p99_ratio("ttft", now)
    has_slots = not load.waiting.get(tier.name, 0) and load.held.get(tier.name, 0) < slots
    if ttft_ratio is not None and ttft_ratio > 1 and has_slots:  # if no slot is free, max-wait is not the cause
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
    """Move the batch size and max-wait of a bulk tier, and return the moves.

    The batch size has additive increase and multiplicative decrease. Max-wait goes to the time that a batch takes to
    fill.
    """
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
    cut = _bulk_cut(held, size, load, interactive)
    if cut is not None:
        stats.last_cut_s = now
        return _resize(knobs, *cut)
    wants_more = load.waiting.get(tier.name, 0) > 0 or held >= size
    harms_none = interactive.is_absent or _below(interactive.miss_share, MISS_TARGET / 2)
    if wants_more and not _uses_kv_reserve(load, interactive) and harms_none:
        return _resize(knobs, size + GROWTH, "queue", "work waits and bulk harms nobody above")
    return []


def _bulk_cut(held: int, size: float, load: Load, interactive: InteractiveLoad) -> tuple[float, str, str] | None:
    """Return a smaller batch size with its signal and its reason; None if there is no reason for a cut."""
    if not 0 < held <= size:  # the tier holds no request, or the last cut has not taken effect yet
        return None
    many_missed = interactive.miss_share is not None and interactive.miss_share > 2 * MISS_TARGET
    if many_missed and not interactive.is_absent:
        return size * BULK_CUT, "slo_misses", "interactive tiers miss their targets"
    if _uses_kv_reserve(load, interactive):
        return min(size, held) * BULK_CUT, "kv_usage", "KV blocks run out"
    return None


def _uses_kv_reserve(load: Load, interactive: InteractiveLoad) -> bool:
    return load.kv_usage > 1 - KV_RESERVE and not interactive.was_absent


def _resize(knobs: TierKnobs, size: float, signal: str, reason: str) -> list[Decision | None]:
    """Move the batch size to `size` sequences and the batch tokens in proportion; return both moves."""
    slots, tokens = knobs.batch_size, knobs.batch_tokens
    move = slots.move(size, signal, reason)
    return [move, tokens.move(tokens.bounds.start * slots.chosen / slots.bounds.start, signal, reason)]


def _towards(knob: Knob, goal_ms: float, reason: str) -> Decision | None:
    """Move the knob half of the way to its goal (a slew limit). Return None if the goal is near (hysteresis)."""
    if abs(goal_ms - knob.chosen) < DEAD_BAND * max(knob.bounds.max, 1.0):
        return None
    return knob.move((knob.chosen + goal_ms) / 2, "arrival_rate", reason)


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit
