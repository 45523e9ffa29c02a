"""Claims: how many requests a worker takes from each tier's queue, and which of them it can never serve.

Pure. The engine's own queue stays shallow and the store's deep: policy can only reorder what still waits there, and
other workers may be free sooner.
"""

from collections.abc import Mapping, Sequence

from engine.interface import EngineInfo
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.planning.request_table import RequestTable
from scheduler.request import Claimed

PREFETCH = 4  # claimed beyond the free slots, so that a slot freed in a step is filled in the next
KNOWN_WAITING = 2  # of a paused tier that looks at deadlines: its most urgent ones must be known here to be told


def claim_limits(
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    max_step_tokens: int,
    ending: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Without the tiers of which nothing is wanted. `ending`: by tier, the sequences that end with the step that runs,
    for certain: whoever takes their slots must be here by then."""
    limits = {}
    for tier in tiers:
        num_ending = ending.get(tier.name, 0) if ending else 0
        room = _room(tier, table, budgets.tiers[tier.name], max_step_tokens, num_ending)
        if room > 0:
            limits[tier.name] = room
    return limits


def _room(tier: Tier, table: RequestTable, budget: TierBudget, max_step_tokens: int, num_ending: int) -> int:
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
    """A sentence for the user; empty where nothing speaks against it. `max_attempts`: claims that nobody finished or
    gave back."""
    if claimed.attempt > max_attempts:  # one that ends its worker each time would otherwise go round for ever
        return f"The request was given up: {max_attempts} attempts at it ended without a result."
    request = claimed.request
    capacity = engine.num_blocks * engine.block_size
    room = min(engine.max_model_len, capacity)
    prompt = request.prompt_token_ids
    if not prompt or len(prompt) >= room:
        return f"A prompt of {len(prompt)} tokens does not fit: the engine holds 1 to {room - 1}."
    if min(prompt) < 0 or max(prompt) >= engine.vocab_size:
        return f"The prompt has token ids outside the vocabulary of {engine.vocab_size}."
    if request.sampling.max_tokens < 1:
        return "There is nothing to generate: max_tokens is below 1."
    if min(request.max_total_tokens, engine.max_model_len) > capacity:
        return f"Prompt and output together may outgrow the {capacity} tokens that the engine holds."
    return ""
