"""Batch formation: which sequences run in the next step, and for how many tokens.

`form_batch` is pure: from the engine's view, the request table and the controller's budgets it makes one `StepPlan`.
It reads no clock and changes nothing. Tiers are served from the highest priority down, after those whose min share is
due. In a tier, decodes go before prefills, and prefills by deadline; of interactive prefills, those that can still be
in time go first. Lower tiers fill what is left, as long as the predicted step time stays inside their limit: a bulk
sequence that does not fit sits the step out and keeps its KV.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain, islice

from engine.interface import NewSequence, Preempt, PreemptionMode, Run, StepPlan
from engine.step_time.cost import StepCost
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.step_limit import in_time_limit_s
from scheduler.deadlines import split_by_deadline
from scheduler.planning import batching_delay
from scheduler.planning.kv_budget import BlockBudget, EngineView
from scheduler.planning.request_table import RequestTable
from scheduler.request_state import RequestState, Status

MAX_SORTED = 64  # prefills of an interactive tier that are sorted by deadline; those behind them wait for a later step
MIN_CHUNK = 16  # tokens; a smaller prefill chunk is not worth a step's overhead
REST_SHARE = 0.25  # of a step's fixed cost: the rest of a prompt that takes less joins, or it would need its own step


def form_batch(
    step_id: int,
    view: EngineView,
    tiers: Sequence[Tier],
    table: RequestTable,
    budgets: Budgets,
    now: float,
    barred: Container[str] = frozenset(),
) -> StepPlan:
    """Return the plan of the next step. `tiers` come from the highest priority down; `table` holds all requests that
    have not ended; those in `barred` may not run yet. Its cost grows with the work planned, not with the work that
    waits."""
    draft = _Draft(view, budgets, table, now, barred)
    for tier in sorted(tiers, key=lambda t: not budgets.tiers[t.name].guaranteed):
        budget = budgets.tiers[tier.name]
        if budget.decodes_only and draft.has_work:  # without work above, the tier runs as usual: an engine never idles
            if not draft.add_decodes(tier.name, budget, budget.limit.extra_only_s(draft.planned_s)):
                draft.pause(tier.name)
            continue
        draft.add_decodes(tier.name, budget, budget.limit.total_s(draft.planned_s))
        draft.add_prefills(tier, budget)
        if budget.guaranteed:
            draft.note_guaranteed()
    return draft.plan(step_id)


class _Draft:
    """A plan being made: what it holds so far, and what is left of blocks and tokens."""

    def __init__(
        self, view: EngineView, budgets: Budgets, table: RequestTable, now: float, barred: Container[str]
    ) -> None:
        self._view = view
        self._now = now
        self._cost = budgets.cost
        self._table = table
        self._barred = barred
        self._blocks = BlockBudget(view, budgets.cost, table.reserved(), table.any_resident)
        self._work_s = 0.0  # of all runs, without the step's fixed cost
        self._guaranteed_s = 0.0  # the part of it that serves min shares
        self._preempt: dict[str, PreemptionMode] = {}
        self._resume: list[str] = []
        self._start: list[NewSequence] = []
        self._run: dict[str, int] = {}  # sequence → tokens
        self._tokens_left = view.max_step_tokens
        self._num_tokens: Counter[str] = Counter()  # these four by tier
        self._num_run: Counter[str] = Counter()
        self._num_started: Counter[str] = Counter()
        self._num_preempted: Counter[str] = Counter()
        self._lacks_blocks = False  # a sequence waits for blocks: newcomers behind it may not take those that get free

    @property
    def has_work(self) -> bool:
        return bool(self._run)

    @property
    def planned_s(self) -> float:
        """How long the step is predicted to take so far."""
        return self._step_s(0.0)

    def _step_s(self, added_s: float) -> float:
        """How long the step would take with `added_s` more work."""
        return self._cost.step(self._work_s + added_s) + self._blocks.swap_s

    def plan(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            preempt=tuple(Preempt(seq_id, mode) for seq_id, mode in self._preempt.items()),
            resume=tuple(self._resume),
            start=tuple(self._start),
            run=tuple(Run(seq_id, n) for seq_id, n in self._run.items()),
        )

    def note_guaranteed(self) -> None:
        """All work added so far serves min shares."""
        self._guaranteed_s = self._work_s

    def pause(self, tier: str) -> None:
        """Pause the sequences that ran in the last step; those that sat it out are paused or swapped already."""
        for state in self._table.last_run(tier):
            if state.status is Status.RUNNING and state.id not in self._preempt:
                self._preempt[state.id] = PreemptionMode.PAUSE

    def add_decodes(self, tier: str, budget: TierBudget, limit_s: float) -> int:
        """Add one token for each sequence that decodes and fits, the one that sat out longest first; return how many
        run in the step."""
        slots = budget.max_num_seqs
        for state in self._table.decodes(tier):
            if slots <= 0 or self._tokens_left_of(tier, budget) < 1:
                break
            if state.id in self._preempt:
                continue
            seconds = self._cost.decode(state.num_computed_tokens)
            if self._run and self._step_s(seconds) > limit_s:
                break
            if self._get_blocks(state, 1, 0):
                self._take(state, 1, seconds)
                slots -= 1
            else:
                self._lacks_blocks = True
        return self._num_run[tier]

    def add_prefills(self, tier: Tier, budget: TierBudget) -> None:
        """Add chunks of prefills: sequences under way first, then by deadline. Interactive ones that can still be in
        time go first, but leave a share of the time to those that cannot: one huge prompt must neither make all others
        late nor wait for ever."""
        limit_s = budget.limit.prefills_s(self.planned_s, 0.0 if budget.guaranteed else self._guaranteed_s)
        pending = self._pending(tier, budget)
        if not tier.is_interactive:
            self._fill(tier.name, pending, budget, limit_s, in_order=True)
            return
        in_time, late = split_by_deadline(islice(pending, MAX_SORTED), self._cost, self._now)
        in_time_s = in_time_limit_s(limit_s, self.planned_s) if late else limit_s
        is_open = self._fill(tier.name, in_time, budget, in_time_s)
        self._fill(tier.name, late, budget, limit_s, is_open=is_open)

    def _fill(
        self,
        tier: str,
        pending: Iterable[RequestState],
        budget: TierBudget,
        limit_s: float,
        *,
        in_order: bool = False,
        is_open: bool = True,
    ) -> bool:
        """Add chunks of `pending`, in this order, as far as slots, blocks and time go. Newcomers may start only if
        `is_open`, and none after one that could not: return whether more may start. `in_order`: no resident sequence
        comes behind a newcomer."""
        slots = budget.max_num_seqs - self._num_run[tier]
        for state in pending:
            if state.id in self._preempt or state.id in self._barred:
                continue
            if not state.is_resident and not (is_open and self._may_start(tier, budget)):
                is_open = False
                if in_order:
                    break
                continue
            if slots <= 0:
                break
            if self._add_chunk(state, budget, limit_s):
                slots -= 1
            elif not state.is_resident:
                is_open = False
        return is_open

    def _pending(self, tier: Tier, budget: TierBudget) -> Iterable[RequestState]:
        table, name = self._table, tier.name
        batch = batching_delay.BatchSoFar(self._free_slots(name, budget), self._cost.step_s, self.has_work)
        newcomers = () if batching_delay.is_waiting(tier, table, budget, batch, self._now) else table.waiting(name)
        return chain(table.prefills(name), table.preempted(name), newcomers)

    def _may_start(self, tier: str, budget: TierBudget) -> bool:
        return self._free_slots(tier, budget) > 0 and not self._lacks_blocks

    def _free_slots(self, tier: str, budget: TierBudget) -> int:
        """Return how many sequences may still start or come back."""
        held = self._table.num_resident(tier) + self._num_started[tier] - self._num_preempted[tier]
        return budget.max_num_seqs - held

    def _tokens_left_of(self, tier: str, budget: TierBudget) -> int:
        return min(self._tokens_left, budget.max_tokens - self._num_tokens[tier])

    def _add_chunk(self, state: RequestState, budget: TierBudget, limit_s: float) -> bool:
        """Run as much of the prefill as fits; return False if nothing does."""
        wanted = min(state.num_uncomputed, self._tokens_left_of(state.tier.name, budget))
        num_tokens = self._chunk(wanted, state.num_computed_tokens, limit_s)
        if num_tokens < 1:
            return False
        if not self._get_blocks(state, num_tokens, budget.reserve_blocks):
            self._lacks_blocks = True
            return False
        if state.status is Status.WAITING:
            request = state.request
            new = (request.id, request.prompt_token_ids, request.sampling, request.cache_salt)
            self._start.append(NewSequence(*new, retention=state.tier.priority))
        self._take(state, num_tokens, self._cost.run(num_tokens, state.num_computed_tokens))
        return True

    def _chunk(self, wanted: int, context: int, limit_s: float) -> int:
        """Return how many tokens of a prefill fit. A step that would be empty takes one small chunk whatever it costs,
        so that something always runs."""
        left_s = limit_s - self._blocks.swap_s - self._cost.step_s - self._work_s
        return largest_chunk(wanted, context, left_s, self._cost) or (0 if self._run else min(wanted, MIN_CHUNK))

    def _take(self, state: RequestState, num_tokens: int, seconds: float) -> None:
        tier = state.tier.name
        if state.status in (Status.PAUSED, Status.SWAPPED, Status.PREEMPTED):
            self._resume.append(state.id)
        self._run[state.id] = num_tokens
        self._work_s += seconds
        self._tokens_left -= num_tokens
        self._num_tokens[tier] += num_tokens
        self._num_run[tier] += 1
        self._num_started[tier] += not state.is_resident

    def _get_blocks(self, state: RequestState, num_tokens: int, reserve_blocks: int) -> bool:
        """Reserve the blocks of a run, with preemptions where these are allowed and enough; else change nothing."""
        preempted = self._blocks.take(state, num_tokens, self._preemptible, reserve_blocks)
        if preempted is None:
            return False
        for victim, mode in preempted:
            self._preempt[victim.id] = mode
            self._num_preempted[victim.tier.name] += 1
        return True

    def _preemptible(self) -> list[RequestState]:
        """Return the sequences that hold blocks, and neither run in this step nor lose their blocks in it."""
        return [
            s
            for s in self._table.residents()
            if s.id not in self._run and self._preempt.get(s.id) in (None, PreemptionMode.PAUSE)
        ]


def largest_chunk(wanted: int, context: int, left_s: float, cost: StepCost) -> int:
    """Return how many of `wanted` tokens behind `context` cached ones fit into `left_s` seconds; 0 if they are too few
    to be worth it."""
    if wanted < 1 or cost.run(wanted, context) <= left_s:
        return max(0, wanted)
    if left_s <= 0 or cost.prefill(MIN_CHUNK, context) > left_s:
        return 0
    low, high = MIN_CHUNK, wanted
    while low < high:  # prefill() grows with its tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.prefill(middle, context) <= left_s else (low, middle - 1)
    rest_s = cost.prefill(wanted - low, context + low)
    return wanted if wanted - low < MIN_CHUNK and rest_s <= REST_SHARE * cost.step_s else low
