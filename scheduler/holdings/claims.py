"""Claims: how many requests a worker takes from each tier's queue, and which requests it can never serve.

The worker holds few waiting requests and leaves all others in the store. In the store, they stay sorted together with
requests that arrive later, and another worker that is free sooner can claim them. All functions are pure.
"""

from collections.abc import Mapping, Sequence

from engine.interface import EngineInfo
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.holdings.request_table import RequestTable
from scheduler.queue.base import DueLimit
from scheduler.request import Claimed, Request

# Number of interactive requests that are claimed in addition to the free slots. If a sequence ends in one step, a
# request that is claimed already fills its slot in the next step.
PREFETCH = 4


def due_limits(tiers: Sequence[Tier], table: RequestTable, wall_ms: int) -> dict[str, DueLimit]:
    """Return how many requests to claim beyond the limits, by interactive tier, and until which score.

    They are those of keys with fewer requests than the one whose requests wait here, which makes room for them, and
    those that have waited so long that they are due all the same (`scheduler.client.admission`).
    """
    limits = {}
    for tier in tiers:
        if tier.is_interactive:
            until_ms = wall_ms + tier.deadline_ms
            scores_ms = [state.request.score_ms for state in table.waiting(tier.name)]
            num_due = sum(score_ms <= until_ms for score_ms in scores_ms)
            until_ms = max([until_ms, *(score_ms - 1 for score_ms in scores_ms[:1])])  # what goes before all that wait
            limits[tier.name] = DueLimit(max(0, PREFETCH - num_due), until_ms)
    return limits


def early_limits(tiers: Sequence[Tier], table: RequestTable) -> dict[str, DueLimit]:
    """Return how many requests to claim from bulk tiers although no slot is free, and until which score.

    They are those that go before what runs, because they have a deadline of their own, or their key has few requests.
    """
    limits = {}
    for tier in tiers:
        scores_ms = [state.request.score_ms for state in table.of_tier(tier.name) if state.is_resident]
        if not tier.is_interactive and scores_ms:
            newest_ms = max(scores_ms)
            num_early = sum(state.boosted_to is not None for state in table.waiting(tier.name))
            limits[tier.name] = DueLimit(max(0, PREFETCH - num_early), newest_ms - 1)
    return limits


def claim_limits(
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    ending: Mapping[str, int] | None = None,
    held_back: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return how many requests to claim, by tier. Bulk tiers that need no requests are left out.

    Of an interactive tier with 0, only those are claimed that are due (`due_limits`).

    `ending` is the number of sequences, by tier, that are certain to end with the running step. Requests for their
    slots are claimed before the step ends. `held_back` is the number of held requests, by tier, that may not run now,
    so that others are claimed for their slots.
    """
    limits = {}
    for tier in tiers:
        num_ending = ending.get(tier.name, 0) if ending else 0
        budget = budgets.tiers[tier.name]
        num_held_back = min(held_back.get(tier.name, 0), budget.max_num_seqs) if held_back else 0
        limit = _claim_limit(tier, table, budget, num_ending, num_held_back)
        if limit > 0 or tier.is_interactive:
            limits[tier.name] = max(0, limit)
    return limits


def _claim_limit(tier: Tier, table: RequestTable, budget: TierBudget, num_ending: int, num_held_back: int) -> int:
    free = budget.max_num_seqs - table.count(tier.name) + num_ending + num_held_back
    num_waiting = max(0, table.num_waiting(tier.name) - num_held_back)
    if tier.is_interactive:
        # A few are always claimed, so that the worker notices when they are late.
        return PREFETCH + max(free, -num_waiting)
    return free


def reason_to_give_up(claimed: Claimed, max_attempts: int) -> str:
    """Return why there is no further attempt at a request, as a sentence for the user; empty if there is one.

    `max_attempts` is the number of attempts that may end with their workers.
    """
    if claimed.unreadable:
        return f"The worker cannot read the request: {claimed.unreadable}."
    if claimed.attempt <= max_attempts:
        return ""
    times = "once" if max_attempts == 1 else f"in all of {max_attempts} attempts"
    return f"The request was given up, because its worker died {times}."


def restored_tokens(claimed: Claimed, engine: EngineInfo) -> tuple[int, ...]:
    """Return the checkpointed output from which the engine can continue; empty if it must begin with the prompt."""
    request, output = claimed.request, claimed.output_token_ids
    fits = len(output) < request.sampling.max_tokens
    fits = fits and len(request.prompt_token_ids) + len(output) < engine.max_model_len
    return output if output and fits and max(output) < engine.vocab_size else ()


def reason_against(request: Request, engine: EngineInfo) -> str:
    """Return the reason why the engine can never serve the request, as a sentence for the user; empty if it can."""
    capacity = engine.num_blocks * engine.block_size
    max_tokens = min(engine.max_model_len, capacity)
    prompt = request.prompt_token_ids
    if not prompt or len(prompt) >= max_tokens:
        return f"A prompt of {len(prompt)} tokens does not fit: the engine holds 1 to {max_tokens - 1}."
    if min(prompt) < 0 or max(prompt) >= engine.vocab_size:
        return f"The prompt has token ids outside the vocabulary of {engine.vocab_size}."
    if request.sampling.max_tokens < 1:
        return "There is nothing to generate: max_tokens is below 1."
    if request.sampling.adapter not in (None, *engine.adapters):
        return f"The worker's engine has no adapter {request.sampling.adapter!r}."
    if request.chat and not engine.takes_images:
        return "The worker's engine takes no images."
    if min(request.max_total_tokens, engine.max_model_len) > capacity:
        return f"Prompt and output together may outgrow the {capacity} tokens that the engine holds."
    return ""
