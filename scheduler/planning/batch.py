"""Batch formation: which sequences run in the next step, and for how many tokens. The heart of the scheduler.

`form_batch` is pure: from the engine's view, the request states and the controller's budgets it makes one `StepPlan`.
It reads no clock and changes nothing. Tiers are served from the highest priority down; inside a tier, decodes before
prefills; prefills by deadline, of interactive tiers those first that can still be in time. Lower tiers fill what is
left, as long as the predicted step time stays inside their budget: a resident bulk sequence that does not fit sits the
step out with its KV kept. Only a tier that is owed its floor goes before its betters, with as little; and prefills do
not make that step much longer, or the floor would be a small share of long steps.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain, islice

from engine.interface import NewSequence, Preempt, PreemptionMode, Run, StepPlan
from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.deadlines import by_due
from scheduler.planning import batching_delay
from scheduler.planning.kv_budget import BlockBudget, EngineView
from scheduler.planning.request_table import RequestTable
from scheduler.request_state import RequestState, Status

LATE_SHARE = 0.2  # of a step's time for prefills, kept for those that cannot be in time any more
MAX_SORTED = 64  # prefills of an interactive tier that are weighed against each other


def form_batch(
    step_id: int,
    view: EngineView,
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    now: float,
    barred: Container[str] = frozenset(),
) -> StepPlan:
    """The next step's plan. `tiers` from the highest priority down; `table` holds all states that have not ended, of
    which those `barred` may not start yet. Its cost grows with what is planned, not with what waits or rests."""
    draft = _Draft(view, budgets, table, now, barred)
    for tier in sorted(tiers, key=lambda t: not budgets.tiers[t.name].guaranteed):
        budget = budgets.tiers[tier.name]
        draft.set_limit(budget)
        if budget.decodes_only and draft.has_work:
            if not (budget.extra_share and draft.add_decodes(tier.name, budget)):
                draft.pause(tier.name)
            continue
        draft.add_decodes(tier.name, budget)
        draft.add_prefills(tier, budget)
        if budget.guaranteed:
            draft.note_guaranteed()
    return draft.plan(step_id)


class _Draft:
    """A plan being made: what it holds so far, and what is left of blocks, tokens and time."""

    def __init__(
        self, view: EngineView, budgets: Budgets, table: RequestTable, now: float, barred: Container[str]
    ) -> None:
        self._view = view
        self._now = now
        self._cost = budgets.cost
        self._table = table
        self._barred = barred
        self._blocks = BlockBudget(view, budgets.cost, table.reserved(), table.any_resident)
        self._tokens_left = view.max_step_tokens
        self._tier_tokens_left = 0
        self._limit_s = NEVER_S  # of the step, with work of the tier at hand
        self._work_s = 0.0  # of all runs, beside the step's fixed cost
        self._guaranteed_s = 0.0  # of these, for tiers that were owed it
        self._preempt: dict[str, PreemptionMode] = {}
        self._num_preempted: Counter[str] = Counter()  # by tier
        self._num_run: Counter[str] = Counter()
        self._num_started: Counter[str] = Counter()
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
        return self._cost.step(self._work_s) + self._blocks.swap_s

    def note_guaranteed(self) -> None:
        """What was added so far was owed."""
        self._guaranteed_s = self._work_s

    def pause(self, tier: str) -> None:
        """Those that were in the batch leave it; those that sat the last step out have left it already."""
        for state in self._table.last_run(tier):
            if state.status is Status.RUNNING and state.id not in self._preempt:
                self._preempt[state.id] = PreemptionMode.PAUSE

    def set_limit(self, budget: TierBudget) -> None:
        """From now on a tier with this budget adds its work."""
        rides = budget.decodes_only and self.has_work
        self._limit_s = self._stretched_s(budget)
        if not rides:
            self._limit_s = max(budget.step_time_s, self._limit_s)
        self._tier_tokens_left = budget.max_tokens

    def _stretched_s(self, budget: TierBudget) -> float:
        """How long the step may last in any case, from what is in it already."""
        return min((1 + budget.extra_share) * self._time_s, budget.hard_limit_s)

    def add_decodes(self, tier: str, budget: TierBudget) -> int:
        """One token for each sequence that decodes; who sat out longest goes first. How many there are in the step."""
        room = budget.max_num_seqs
        for state in self._table.decodes(tier):
            if room <= 0 or self._tokens_left < 1 or self._tier_tokens_left < 1:
                break
            if state.id in self._preempt:
                continue
            seconds = self._cost.decode(state.num_computed_tokens)
            if not self._fits_time(seconds):
                break
            if self._get_blocks(state, 1, 0):
                self._take(state, 1, seconds)
                room -= 1
            else:
                self._short_of_blocks = True
        return self._num_run[tier]

    def add_prefills(self, tier: Tier, budget: TierBudget) -> None:
        """Chunks of what has tokens to catch up with: sequences under way first, then by deadline. Of interactive ones
        those go first that can still be in time, but for a share of the time that is kept for those that cannot: one
        huge prompt must not make all others late, nor wait for ever."""
        self._limit_s = max(self._limit_s, self._stretched_s(budget))
        if self._guaranteed_s and not budget.guaranteed:
            self._limit_s = min(self._limit_s, self._time_s + self._guaranteed_s)
        pending = self._pending(tier, budget)
        if not tier.is_interactive:
            self._fill(tier.name, pending, budget, in_order=True)
            return
        in_time, late = by_due(islice(pending, MAX_SORTED), self._cost, self._now)
        full_s = self._limit_s
        if late and full_s < NEVER_S:
            self._limit_s -= LATE_SHARE * max(0.0, full_s - self._time_s)
        is_open = self._fill(tier.name, in_time, budget)
        self._limit_s = full_s
        self._fill(tier.name, late, budget, is_open=is_open)

    def _fill(
        self,
        tier: str,
        pending: Iterable[RequestState],
        budget: TierBudget,
        *,
        in_order: bool = False,
        is_open: bool = True,
    ) -> bool:
        """As many of `pending`, in this order, as there are slots, blocks and time for. False: a newcomer could not
        start, and no other one goes before it. `in_order`: residents come first, so that this is the end. `is_open`:
        newcomers may start at all."""
        room = budget.max_num_seqs - self._num_run[tier]
        for state in pending:
            if state.id in self._preempt or state.id in self._barred:
                continue
            if not state.is_resident and not (is_open and self._may_start(tier, budget)):
                is_open = False
                if in_order:
                    break
                continue
            if room <= 0:
                break
            if self._add_chunk(state, budget):
                room -= 1
            elif not state.is_resident:
                is_open = False
        return is_open

    def _pending(self, tier: Tier, budget: TierBudget) -> Iterable[RequestState]:
        table, name = self._table, tier.name
        shape = batching_delay.BatchSoFar(self._slots(name, budget), self._cost.step_s, bool(self._run))
        newcomers = () if batching_delay.is_waiting(tier, table, budget, shape, self._now) else table.waiting(name)
        return chain(table.prefills(name), table.preempted(name), newcomers)

    def _may_start(self, tier: str, budget: TierBudget) -> bool:
        return self._slots(tier, budget) > 0 and not self._short_of_blocks

    def _slots(self, tier: str, budget: TierBudget) -> int:
        """Sequences that may still start or come back."""
        held = self._table.num_resident(tier) + self._num_started[tier] - self._num_preempted[tier]
        return budget.max_num_seqs - held

    def _add_chunk(self, state: RequestState, budget: TierBudget) -> bool:
        """Run as much of the prefill as fits; False when nothing of it does."""
        wanted = min(state.num_uncomputed, self._tokens_left, self._tier_tokens_left)
        num_tokens = self._chunk(wanted, state.num_computed_tokens)
        if num_tokens < 1:
            return False
        if not self._get_blocks(state, num_tokens, budget.reserve_blocks):
            self._short_of_blocks = True
            return False
        if state.status is Status.WAITING:
            request = state.request
            new = (request.id, request.prompt_token_ids, request.sampling, request.cache_salt)
            self._start.append(NewSequence(*new, retention=state.tier.priority))
        self._take(state, num_tokens, self._cost.run(num_tokens, state.num_computed_tokens))
        return True

    def _chunk(self, wanted: int, context: int) -> int:
        """What fits of a prefill. Something always runs: a step that would be empty takes one small chunk, whatever it
        costs."""
        left_s = self._limit_s - self._blocks.swap_s - self._cost.step_s - self._work_s
        return largest_chunk(wanted, context, left_s, self._cost) or (0 if self._run else min(wanted, MIN_CHUNK))

    def _fits_time(self, seconds: float) -> bool:
        return not self._run or self._cost.step(self._work_s + seconds) + self._blocks.swap_s <= self._limit_s

    def _take(self, state: RequestState, num_tokens: int, seconds: float) -> None:
        if state.status in (Status.PAUSED, Status.SWAPPED, Status.PREEMPTED):
            self._resume.append(state.id)
        self._num_started[state.tier.name] += not state.is_resident
        self._run[state.id] = num_tokens
        self._num_run[state.tier.name] += 1
        self._tokens_left -= num_tokens
        self._tier_tokens_left -= num_tokens
        self._work_s += seconds

    def _get_blocks(self, state: RequestState, num_tokens: int, reserve_blocks: int) -> bool:
        """Reserve the blocks of a run, evicting if that is allowed and enough; else change nothing."""
        evicted = self._blocks.take(state, num_tokens, self._evictable, reserve_blocks)
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
            for s in self._table.residents()
            if s.id not in self._run and self._preempt.get(s.id) in (None, PreemptionMode.PAUSE)
        ]


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
