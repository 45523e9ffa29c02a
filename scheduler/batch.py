"""Batch formation: which sequences run in the next step, and for how many tokens. The heart of the scheduler.

`form_batch` is pure: from the engine's view, the request states and the controller's budgets it makes one `StepPlan`.
It reads no clock and changes nothing. Tiers are served from the highest priority down; inside a tier, decodes before
prefills, and prefills by earliest deadline. Lower tiers fill what is left, as long as the predicted step time stays
inside their budget: a resident bulk sequence that does not fit sits the step out with its KV kept. Only a tier that is
owed its floor goes before its betters, with as little.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.interface import NewSequence, Preempt, PreemptionMode, Run, StepPlan
from engine.latency_model import StepCost
from scheduler.block_budget import BlockBudget, EngineView
from scheduler.config import Tier
from scheduler.roster import Roster
from scheduler.states import RequestState, Status

MIN_CHUNK = 16  # tokens; a smaller prefill chunk is not worth a step's overhead


@dataclass(frozen=True, slots=True)
class TierBudget:
    """The controller's word on one tier for this step."""

    max_num_seqs: int
    max_wait_s: float = 0.0
    step_time_s: float = float("inf")  # the step may be predicted to last this long with work of this tier
    paused: bool = False  # its sequences leave the batch, KV resident, if anything above them runs
    owed: bool = False  # its floor is due: it goes first in this step


@dataclass(frozen=True, slots=True)
class Budgets:
    tiers: Mapping[str, TierBudget]
    cost: StepCost


def form_batch(
    step_id: int,
    view: EngineView,
    tiers: Sequence[Tier],
    roster: Roster,
    budgets: Budgets,
    now: float,
    barred: Container[str] = frozenset(),
) -> StepPlan:
    """The next step's plan. `tiers` from the highest priority down; `roster` holds all states that have not ended, of
    which those `barred` may not start yet. Its cost grows with what is planned, not with what waits or rests."""
    draft = _Draft(view, budgets, roster, barred)
    for tier in sorted(tiers, key=lambda t: not budgets.tiers[t.name].owed):
        budget = budgets.tiers[tier.name]
        if budget.paused and draft.has_work:
            draft.pause(tier.name)
            continue
        draft.add_decodes(tier.name, budget)
        draft.add_prefills(tier.name, budget, now)
    return draft.plan(step_id)


class _Draft:
    """A plan being made: what it holds so far, and what is left of blocks, tokens and time."""

    def __init__(self, view: EngineView, budgets: Budgets, roster: Roster, barred: Container[str]) -> None:
        self._view = view
        self._cost = budgets.cost
        self._roster = roster
        self._barred = barred
        self._blocks = BlockBudget(view, budgets.cost, roster.promised(), roster.any_resident)
        self._tokens_left = view.max_step_tokens
        self._compute_s = budgets.cost.step_s
        self._preempt: dict[str, PreemptionMode] = {}
        self._num_preempted: Counter[str] = Counter()  # by tier
        self._num_run: Counter[str] = Counter()
        self._resume: list[str] = []
        self._start: list[NewSequence] = []
        self._run: dict[str, int] = {}
        self._short_of_blocks = False  # somebody waits for blocks: what gets free is not for newcomers below

    @property
    def has_work(self) -> bool:
        return bool(self._run)

    def plan(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            preempt=tuple(Preempt(seq_id, mode) for seq_id, mode in self._preempt.items()),
            resume=tuple(self._resume),
            start=tuple(self._start),
            run=tuple(Run(seq_id, n) for seq_id, n in self._run.items()),
        )

    @property
    def _time_s(self) -> float:
        """How long the step is predicted to take so far."""
        return self._compute_s + self._blocks.swap_s

    def pause(self, tier: str) -> None:
        """Those that were in the batch leave it; those that sat the last step out have left it already."""
        for state in self._roster.last_run(tier):
            if state.status is Status.RUNNING and state.id not in self._preempt:
                self._preempt[state.id] = PreemptionMode.PAUSE

    def add_decodes(self, tier: str, budget: TierBudget) -> None:
        """One token for each sequence that decodes; who sat out longest goes first."""
        room = budget.max_num_seqs
        for state in self._roster.decodes(tier):
            if room <= 0 or self._tokens_left < 1:
                return
            if state.id in self._preempt:
                continue
            seconds = self._cost.decode(state.num_computed_tokens)
            if not self._fits_time(seconds, budget):
                return
            if self._get_blocks(state, 1):
                self._take(state, 1, seconds)
                room -= 1
            else:
                self._short_of_blocks = True

    def add_prefills(self, tier: str, budget: TierBudget, now: float) -> None:
        """Chunks of what has tokens to catch up with: sequences under way first, then by deadline."""
        slots = budget.max_num_seqs - self._roster.num_resident(tier) + self._num_preempted[tier]
        room = budget.max_num_seqs - self._num_run[tier]
        for state in self._pending(tier, slots, budget, now):
            if state.id in self._preempt or state.id in self._barred:
                continue
            if room <= 0 or not (state.is_resident or self._may_start(slots)):
                return
            slots -= not state.is_resident
            if self._add_chunk(state, budget):
                room -= 1
            elif not state.is_resident:
                return

    def _pending(self, tier: str, slots: int, budget: TierBudget, now: float) -> Iterable[RequestState]:
        roster = self._roster
        newcomers = () if self._worth_waiting(tier, slots, budget, now) else roster.waiting(tier)
        return chain(roster.prefills(tier), roster.evicted(tier), newcomers)

    def _may_start(self, slots: int) -> bool:
        return slots > 0 and not self._short_of_blocks

    def _worth_waiting(self, tier: str, slots: int, budget: TierBudget, now: float) -> bool:
        """Wait-or-full: newcomers wait for company while the step has other work, the batch is not full, and the
        oldest has waited less than max-wait. An idle engine never waits."""
        if not budget.max_wait_s or not self._run or not 0 < self._roster.num_waiting(tier) < slots:
            return False
        oldest_s = min(state.claimed_s for state in self._roster.waiting(tier))
        return now - oldest_s < budget.max_wait_s

    def _add_chunk(self, state: RequestState, budget: TierBudget) -> bool:
        """Run as much of the prefill as fits; False when nothing of it does."""
        wanted = min(state.num_uncomputed, self._tokens_left)
        num_tokens = self._chunk_in_time(wanted, state.num_computed_tokens, budget)
        if num_tokens < 1:
            return False
        if not self._get_blocks(state, num_tokens):
            self._short_of_blocks = True
            return False
        if state.status is Status.WAITING:
            request = state.request
            new = (request.id, request.prompt_token_ids, request.sampling, request.cache_salt)
            self._start.append(NewSequence(*new, retention=state.tier.priority))
        self._take(state, num_tokens, self._cost.run(num_tokens, state.num_computed_tokens))
        return True

    def _chunk_in_time(self, wanted: int, context: int, budget: TierBudget) -> int:
        """The largest prefill of at most `wanted` tokens inside the time budget."""
        left_s = budget.step_time_s - self._time_s
        if wanted < 1 or self._cost.run(wanted, context) <= left_s:
            return wanted
        if left_s > 0 and self._cost.prefill(MIN_CHUNK, context) <= left_s:
            low, high = MIN_CHUNK, wanted
            while low < high:  # prefill() grows with its tokens
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self._cost.prefill(middle, context) <= left_s else (low, middle - 1)
            return min(low, wanted)
        # Something always runs: a step that would be empty takes one small chunk, whatever it costs.
        return min(wanted, MIN_CHUNK) if not self._run else 0

    def _fits_time(self, seconds: float, budget: TierBudget) -> bool:
        return not self._run or self._time_s + seconds <= budget.step_time_s

    def _take(self, state: RequestState, num_tokens: int, seconds: float) -> None:
        if state.status in (Status.PAUSED, Status.SWAPPED, Status.PREEMPTED):
            self._resume.append(state.id)
        self._run[state.id] = num_tokens
        self._num_run[state.tier.name] += 1
        self._tokens_left -= num_tokens
        self._compute_s += seconds

    def _get_blocks(self, state: RequestState, num_tokens: int) -> bool:
        """Reserve the blocks of a run, evicting if that is allowed and enough; else change nothing."""
        evicted = self._blocks.take(state, num_tokens, self._evictable)
        if evicted is None:
            return False
        for victim, mode in evicted:
            self._preempt[victim.id] = mode
            self._num_preempted[victim.tier.name] += 1
        return True

    def _evictable(self) -> list[RequestState]:
        """Who holds blocks and neither runs in this step nor loses them in it already."""
        return [
            s
            for s in self._roster.residents()
            if s.id not in self._run and self._preempt.get(s.id) in (None, PreemptionMode.PAUSE)
        ]
