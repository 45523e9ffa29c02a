"""Claims: how many requests a worker takes from each tier's queue, and which of them it can never serve. Pure.

The worker holds few waiting requests and leaves the others in the store: only there are they in order with later ones,
and other workers may be free sooner.
"""

from collections.abc import Mapping, Sequence

from engine.interface import EngineInfo
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.planning.request_table import RequestTable
from scheduler.request import Claimed

PREFETCH = 4  # interactive requests claimed beyond the free slots: a slot freed in a step is filled in the next
KNOWN_WAITING = 2  # requests claimed from a paused tier that can be urgent: only a claimed request can be found urgent


def claim_limits(
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    max_step_tokens: int,
    ending: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return how many requests to claim from each tier, without the tiers that need none. `ending`: by tier, how many
    sequences are certain to end with the running step; the requests that follow them must be claimed by then."""
    limits = {}
    for tier in tiers:
        num_ending = ending.get(tier.name, 0) if ending else 0
        limit = _claim_limit(tier, table, budgets.tiers[tier.name], max_step_tokens, num_ending)
        if limit > 0:
            limits[tier.name] = limit
    return limits


def _claim_limit(tier: Tier, table: RequestTable, budget: TierBudget, max_step_tokens: int, num_ending: int) -> int:
    free = budget.max_num_seqs - table.count(tier.name) + num_ending
    num_waiting = table.num_waiting(tier.name)
    if tier.is_interactive:
        if num_waiting <= PREFETCH + num_ending:
            return free + PREFETCH
        return min(free + PREFETCH, PREFETCH) if _waiting_tokens(table, tier.name) < max_step_tokens else 0
    if budget.decodes_only:
        return min(free, KNOWN_WAITING - num_waiting) if tier.can_be_urgent else 0
    return free


def _waiting_tokens(table: RequestTable, tier: str) -> int:
    return sum(state.num_uncomputed for state in table.waiting(tier))


def reason_against(claimed: Claimed, engine: EngineInfo, max_attempts: int) -> str:
    """Return why the engine can never serve the request, as a sentence for the user; empty if it can. `max_attempts`:
    claims that may end without a result."""
    if claimed.attempt > max_attempts:  # a request that ends its worker each time would otherwise be retried for ever
        return f"The request was given up: {max_attempts} attempts at it ended without a result."
    request = claimed.request
    capacity = engine.num_blocks * engine.block_size
    max_tokens = min(engine.max_model_len, capacity)
    prompt = request.prompt_token_ids
    if not prompt or len(prompt) >= max_tokens:
        return f"A prompt of {len(prompt)} tokens does not fit: the engine holds 1 to {max_tokens - 1}."
    if min(prompt) < 0 or max(prompt) >= engine.vocab_size:
        return f"The prompt has token ids outside the vocabulary of {engine.vocab_size}."
    if request.sampling.max_tokens < 1:
        return "There is nothing to generate: max_tokens is below 1."
    if min(request.max_total_tokens, engine.max_model_len) > capacity:
        return f"Prompt and output together may outgrow the {capacity} tokens that the engine holds."
    return ""
