"""Who gives way. Pure choices over request states; no clock, no I/O.

The rules, each paid for by somebody's incident: a newcomer only takes from a strictly higher distance (its tier's
priority above the victim's); inside a tier only an older sequence that must grow may take from a newer one, so that
two equals never evict each other in turn; lowest tier first, then the newest (least sunk cost), sparing what is nearly
done; nobody loses its KV more than `MAX_PREEMPTIONS` times to newcomers.
"""

from collections.abc import Iterable

from scheduler.states import RequestState

MAX_PREEMPTIONS = 3
NEARLY_DONE = 0.9  # of its max_tokens


def newcomer_victims(newcomer: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Whom `newcomer` may evict to start, best victim first."""
    return sorted((s for s in resident if _may_yield(newcomer, s)), key=_victim_key)


def growth_victims(needy: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Whom the running `needy` may evict to get its next block: lower tiers, and newer ones of its own."""
    return sorted((s for s in resident if _below(s, needy)), key=_victim_key)


def _may_yield(newcomer: RequestState, victim: RequestState) -> bool:
    lower = victim.tier.priority < newcomer.tier.priority
    return lower and victim.num_preemptions < MAX_PREEMPTIONS


def _below(victim: RequestState, needy: RequestState) -> bool:
    if victim.tier.priority != needy.tier.priority:
        return victim.tier.priority < needy.tier.priority
    return victim.edf_key > needy.edf_key


def _victim_key(state: RequestState) -> tuple[int, bool, float, str]:
    return (state.tier.priority, _is_nearly_done(state), -state.claimed_s, state.id)


def _is_nearly_done(state: RequestState) -> bool:
    return len(state.output_token_ids) >= NEARLY_DONE * state.request.sampling.max_tokens
