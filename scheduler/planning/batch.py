"""Batch formation: which sequences run in the next step, and for how many tokens.

`form_batch` is pure: it computes one `StepPlan` from the engine's view, the request table and the controller's budgets.
It reads no clock and changes nothing. Requests whose grammars are not compiled yet do not start.

Tiers whose min share is due are served first, and then all other tiers from the highest priority to the lowest. In a
tier, decodes go before prefills, and prefills are sorted by deadline. Interactive prefills that can still be in time go
before late ones. Lower tiers may add work as long as the predicted step time stays inside their limit. A bulk sequence
that does not fit is left out of the step and keeps its KV, and no other bulk takes the time for which it waits. While a
higher tier waits for KV blocks, bulk that holds blocks and may not be preempted runs on. A bulk request does not start
beside one that computes the same beginning of a prompt: in the next step, it finds that beginning in the prefix cache.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from engine.interface import StepPlan
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.step_limit import beside_min_shares_s, first_limit_s
from scheduler.deadlines import split_prefills
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.batching_delay import is_waiting
from scheduler.planning.draft import MIN_CHUNK, Draft
from scheduler.planning.kv_budget import EngineView
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.request_state import RequestState

MAX_SORTED = 64  # prefills of an interactive tier that one plan looks at; further prefills wait for a later plan


def form_batch(
    step_id: int,
    view: EngineView,
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    now: float,
    barred: Container[str],
    prefixes: PromptPrefixes,
) -> StepPlan:
    """Return the plan of the next step.

    `tiers` are sorted from the highest priority to the lowest. `table` holds all requests that have not ended. Requests
    in `barred` may not run in this step. `prefixes` tells what the engine's prefix cache is likely to hold. The time
    taken is in proportion to the planned work, and not to the number of waiting requests.
    """
    draft = _Batch(view, budgets, table, now, barred, prefixes)
    for tier, boosted_to in _turns(tiers, table, budgets):
        budget = budgets.tiers[tier.name]
        if not tier.is_interactive:
            draft.add_bulk(tier, budget, boosted_to)
            continue
        draft.add_interactive(tier, budget)
        if budgets.yielding:
            draft.add_bulk(tier, budgets.yielding[tier.name])
    return draft.plan(step_id)


def _turns(tiers: Sequence[Tier], table: RequestTable, budgets: Budgets) -> list[tuple[Tier, float | None]]:
    """Return the tiers in the order in which they add work; those of a boosted priority have a turn of their own."""
    turns: list[tuple[Tier, float | None]] = []
    for tier in tiers:
        turns += [(tier, priority) for priority in {state.boosted_to for state in table.boosted(tier.name)}]
        turns += [(tier, None)] if tier.is_interactive or table.count(tier.name) else []

    def place(turn: tuple[Tier, float | None]) -> tuple[bool, float]:
        tier, boosted_to = turn
        return not budgets.tiers[tier.name].min_share_due, -(tier.priority if boosted_to is None else boosted_to)

    return sorted(turns, key=place)


class _Batch(Draft):
    """A draft that is filled in order of importance."""

    def __init__(
        self,
        view: EngineView,
        budgets: Budgets,
        table: RequestTable,
        now: float,
        barred: Container[str],
        prefixes: PromptPrefixes,
    ) -> None:
        super().__init__(view, budgets, table, barred, prefixes)
        self._now = now
        self.interactive_s = 0.0  # predicted time of the step before bulk adds to it; 0: it holds nothing
        self._min_share = 0.0  # sum of the min shares that this step serves
        self._min_share_s = 0.0  # predicted time of the runs that serve them
        self._are_blocked = False  # interactive requests wait for blocks
        self._paced_s = NEVER_S  # limit of the step beside requests with deadlines of their own
        self._is_full = False  # a bulk sequence waits for time, so that no other bulk may take the time that is left

    def add_interactive(self, tier: Tier, budget: TierBudget) -> None:
        """Add the requests of an interactive tier that yield to nobody.

        Neither the limit of the step nor the batch size stops a sequence that has begun to answer: it would only be
        later. Both limit what else runs, and what starts.
        """
        self._yielding, self._boosted_to = False, None
        self.add_decodes(tier.name, budget, NEVER_S, self._table.num_resident(tier.name))
        self.add_prefills(tier, budget)
        self._are_blocked = self._lacks_blocks
        if self.has_work:
            self.interactive_s = self.step_s()

    def add_bulk(self, tier: Tier, budget: TierBudget, boosted_to: float | None = None) -> None:
        """Add the requests of a bulk tier, or those of an interactive tier that yield, as far as they may.

        Only those with the priority `boosted_to` are added; None: those with that of the tier. While interactive
        requests wait for blocks, decodes that may not be preempted have their priority: they go on until they end,
        whatever bulk may add to the step.
        """
        self._yielding, self._boosted_to = tier.is_interactive, boosted_to
        is_beside = self.has_work
        budget = replace(budget, limit=budget.limit.at_most(self._paced_s))
        hard_s = budget.limit.base_s
        if self._are_blocked:
            self._add_blocking(tier.name, hard_s)
        decode_s = next((self._decode_s(state) for state in self._decodes(tier.name)), None)
        next_s = self._first_chunk_s(tier.name) if decode_s is None else decode_s
        budget = budget.beside(self.interactive_s, next_s + 1e-9)  # rounded up
        if not self._is_full:
            slots = budget.max_num_seqs - self._num_run[tier.name]
            self.add_decodes(tier.name, budget, budget.limit.base_s, slots, hard_s)
        if not self._is_full:
            self.add_prefills(tier, budget, hard_s)
        if boosted_to is not None:
            self._pace(tier.name)
        elif is_beside and not self._num_run[tier.name]:
            self.pause(tier.name)
        if budget.min_share_due:
            self._min_share += budget.min_share if boosted_to is None else 0.0  # once, of a tier with several turns
            self._min_share_s = self._runs_s  # all work so far

    def _pace(self, tier: str) -> None:
        """Limit what the rest of bulk adds, so that requests with deadlines of their own get their tokens in time.

        It may always double the step: `max_tokens` are more than an answer mostly has.
        """
        paces_s = [
            (state.deadline_s - self._now) / max(1, state.request.sampling.max_tokens - len(state.output_token_ids))
            for state in self._table.boosted(tier)
            if state.id in self._run and not state.request.urgent_ms
        ]
        if paces_s:
            self._paced_s = min(self._paced_s, max(min(paces_s), 2 * self.step_s()))

    def _add_blocking(self, tier: str, limit_s: float) -> None:
        """Add decodes of the tier that may not be preempted, as long as the step takes at most `limit_s` seconds."""
        for state in self._table.preemption_exhausted(tier):
            fits = state.is_decode and self._may_run(state) and self.step_s(self._decode_s(state)) <= limit_s
            if fits and self._get_blocks(state, 1, 0):
                self._add_run(state, 1, state.num_computed_tokens)

    def _decodes(self, tier: str) -> Iterator[RequestState]:
        """Return the tier's decodes that may be added now. The longest ago run comes first."""
        return (s for s in self._table.decodes(tier) if self._has_turn(s) and self._may_run(s))

    def add_decodes(
        self, tier: str, budget: TierBudget, limit_s: float, slots: int, longest_s: float = NEVER_S
    ) -> None:
        """Add a token for each decode of a tier that fits.

        A decode that would make the step longer than `longest_s` is left out. One that only exceeds `limit_s` has to
        wait until there is time for it, and no other bulk takes that time.
        """
        for state in self._decodes(tier):
            if slots <= 0 or self._tokens_left_of(tier, budget) < 1:
                break
            step_s = self.step_s(self._decode_s(state))
            if self._run and step_s > longest_s:
                continue
            if self._run and step_s > limit_s:
                self._is_full = True
                break
            if self._get_blocks(state, 1, 0):
                self._add_run(state, 1, state.num_computed_tokens)
                slots -= 1
            else:
                self._lacks_blocks = True

    def add_prefills(self, tier: Tier, budget: TierBudget, longest_s: float = NEVER_S) -> None:
        """Add prefill chunks of the tier.

        In a bulk tier, prefills that have begun go first, then preempted sequences, then newcomers. Each of these
        groups is sorted by deadline. Beside interactive work, one that has begun waits until there is time for its next
        chunk, as decodes do, unless the step would then be longer than `longest_s`. In an interactive tier, prefills
        that can still be in time go before late prefills, but leave a share of the time to the late ones. If the tier
        is overloaded, all prefills go in order, but prompts that are too long for the SLO in any case count as late. So
        one huge prompt neither makes all other requests late nor waits for ever.
        """
        limit_s = budget.limit.total_s(self.step_s())
        if not budget.min_share_due:
            limit_s = min(limit_s, beside_min_shares_s(self._min_share_s, self._min_share, self._cost))
        pending = self._pending(tier, budget)
        if self._yielding or not tier.is_interactive:
            self._fill(tier.name, pending, budget, limit_s, longest_s, in_order=True)
            return
        pending = islice((state for state in pending if not state.yields), MAX_SORTED)
        first, last = split_prefills(pending, self._budgets.cost, self._now, is_overload=budget.overloaded)
        first_s = first_limit_s(limit_s, self.step_s()) if last else limit_s
        is_open = self._fill(tier.name, first, budget, first_s)
        self._fill(tier.name, last, budget, limit_s, is_open=is_open)

    def _fill(
        self,
        tier: str,
        pending: Iterable[RequestState],
        budget: TierBudget,
        limit_s: float,
        longest_s: float = NEVER_S,
        *,
        in_order: bool = False,
        is_open: bool = True,
    ) -> bool:
        """Add chunks of `pending` in this order until slots, blocks or time run out.

        A sequence that is not resident may start or come back only if `is_open`. After the first such sequence that
        does not fit, no other sequence may start. Return whether further sequences may start. With `in_order`, all
        resident sequences come first in `pending`, so the loop stops at the first sequence that may not start.
        """
        slots = budget.max_num_seqs - self._num_run[tier]
        for state in pending:
            if state.awaits_grammar or state.id in self._preempt or state.id in self._barred:
                continue
            if not self._has_turn(state):
                continue
            if not state.is_resident and not (is_open and self._may_start(tier, budget)):
                is_open = False
                if in_order:
                    break
                continue
            if slots <= 0:
                break
            num_cached, waits = self._cached(state)
            if waits:
                continue
            if self._add_chunk(state, budget, limit_s, num_cached):
                slots -= 1
            elif not state.is_resident:
                is_open = False
            elif in_order and self.interactive_s and limit_s < self._with_chunk_s(state) <= longest_s:
                self._is_full = True
                break
        return is_open

    def _first_chunk_s(self, tier: str) -> float:
        """Return the time that the smallest chunk of the tier's first prefill adds to the step; 0 without one."""
        states = (s for s in self._table.prefills(tier) if self._has_turn(s) and self._may_run(s))
        return next((self._with_chunk_s(state) - self.step_s() for state in states), 0.0)

    def _with_chunk_s(self, state: RequestState) -> float:
        """Return the predicted length of the step with the smallest chunk of a prefill added to it."""
        cost = self._budgets.cost
        chunk_s = cost.run(min(state.num_uncomputed, MIN_CHUNK), state.num_computed_tokens)
        return cost.step(cost.runs(self._work) + chunk_s) + self._blocks.swap_s

    def _pending(self, tier: Tier, budget: TierBudget) -> Iterable[RequestState]:
        """Return the tier's prefills, then its preempted sequences, then its newcomers unless they must still wait."""
        table, name = self._table, tier.name
        slots = self._free_slots(name, budget)
        waits = is_waiting(tier, table, budget, slots, self._cost.step_s, self.has_work, self._now)
        newcomers = () if waits and self._boosted_to is None else table.waiting(name)
        return chain(table.prefills(name), table.preempted(name), newcomers)

    def _may_start(self, tier: str, budget: TierBudget) -> bool:
        return self._free_slots(tier, budget) > 0 and not self._lacks_blocks
