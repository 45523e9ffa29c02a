"""The draft of a step's plan: the runs added so far, and the time, the tokens and the KV blocks that are left.

Adds what it is told to, as far as it fits. Which sequences are added, in which order and within which limits is the
matter of `batch`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container

from engine.interface import NewSequence, Preempt, PreemptionMode, Run, StepPlan
from engine.step_time.cost import StepCost, StepWork
from scheduler.control.budget import Budgets, TierBudget
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.kv_budget import BlockBudget, EngineView
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.request_state import RequestState, Status

MIN_CHUNK = 16  # tokens; a smaller prefill chunk is not worth a step's overhead


class Draft:
    """An unfinished plan: the work added so far, and the blocks and tokens that are left."""

    def __init__(
        self,
        view: EngineView,
        budgets: Budgets,
        table: RequestTable,
        barred: Container[str],
        prefixes: PromptPrefixes,
    ) -> None:
        self._view = view
        self._budgets = budgets
        self._table = table
        self._barred = barred
        self._prefixes = prefixes
        self._prefill_blocks: set[int] = set()  # digests of the prompts' blocks that bulk prefills of this step compute
        self._blocks = BlockBudget(view, budgets.cost, table.reserved(), table.any_resident)
        self._work = StepWork()  # of all runs
        # Which requests are added now: those that yield or do not, and those with this higher priority than their tier.
        self._yielding = False
        self._boosted_to: float | None = None
        self._preempt: dict[str, PreemptionMode] = {}
        self._resume: list[str] = []
        self._start: list[NewSequence] = []
        self._run: dict[str, int] = {}  # sequence id → number of tokens
        self._tokens_left = view.max_step_tokens
        # The next four counters are by tier.
        self._num_tokens: defaultdict[str, int] = defaultdict(int)
        self._num_run: defaultdict[str, int] = defaultdict(int)
        self._num_started: defaultdict[str, int] = defaultdict(int)
        self._num_preempted: defaultdict[str, int] = defaultdict(int)
        self._lacks_blocks = False  # a sequence waits for blocks, so that newcomers after it may not take free blocks

    @property
    def has_work(self) -> bool:
        return bool(self._run)

    @property
    def _cost(self) -> StepCost:
        """The costs of a step of this kind: a step without prefills has its own."""
        return self._budgets.cost if self._work.is_mixed else self._budgets.decode_cost

    @property
    def _runs_s(self) -> float:
        """The predicted time of all runs, without the step's fixed cost."""
        return self._cost.runs(self._work)

    def step_s(self, added_s: float = 0.0) -> float:
        """Return the predicted length in seconds of the step with the work added so far, and `added_s` seconds more."""
        return self._cost.step(self._runs_s + added_s) + self._blocks.swap_s

    def plan(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            preempt=tuple(Preempt(seq_id, mode) for seq_id, mode in self._preempt.items()),
            resume=tuple(self._resume),
            start=tuple(self._start),
            run=tuple(Run(seq_id, n) for seq_id, n in self._run.items()),
        )

    def pause(self, tier: str) -> None:
        """Pause the tier's sequences that ran in the last step. Its other sequences keep their status."""
        for state in self._table.last_run(tier):
            if state.status is Status.RUNNING and state.id not in self._preempt:
                self._preempt[state.id] = PreemptionMode.PAUSE

    def _may_run(self, state: RequestState) -> bool:
        return not (state.id in self._run or state.id in self._preempt or state.id in self._barred)

    def _has_turn(self, state: RequestState) -> bool:
        """Return whether the request is one of those that are added now."""
        return state.yields == self._yielding and state.boosted_to == self._boosted_to

    def _decode_s(self, state: RequestState) -> float:
        return self._cost.decode(state.num_computed_tokens)

    def _free_slots(self, tier: str, budget: TierBudget) -> int:
        """Return how many sequences of the tier may still start or come back.

        Those that yield keep their slots from each other only: they make room for all others. So do those of bulk for
        the ones that go before them.
        """
        residents = self._table.num_resident(tier)
        held = residents + self._num_started[tier] - self._num_preempted[tier]
        if self._boosted_to is not None:
            held -= residents - sum(state.is_resident for state in self._table.boosted(tier))
        return budget.max_num_seqs - held + (0 if self._yielding else self._table.num_yielding(tier))

    def _tokens_left_of(self, tier: str, budget: TierBudget) -> int:
        return min(self._tokens_left, budget.max_tokens - self._num_tokens[tier])

    def _cached(self, state: RequestState) -> tuple[int, bool]:
        """Return how many tokens a bulk request without KV will find in the prefix cache, and whether it should wait.

        It should wait if a prefill of this step computes more of what it will find.
        """
        return (0, False) if state.tier.is_interactive else self._prefixes.lookup(state, self._prefill_blocks)

    def _add_chunk(self, state: RequestState, budget: TierBudget, limit_s: float, num_cached: int) -> bool:
        """Add as many tokens of the prefill as fit, after `num_cached` cached ones; return False if none fits."""
        left = state.num_uncomputed - num_cached
        wanted = min(left, self._tokens_left_of(state.tier.name, budget))
        context = state.num_computed_tokens + num_cached
        num_tokens = self._chunk(wanted, context, limit_s)
        if self._view.whole_prompts and num_tokens < left:
            num_tokens = 0 if self._run else left
        if num_tokens < 1:
            return False
        reserve = budget.kv_reserve if state.boosted_to is None else 0.0
        if not self._get_blocks(state, num_tokens, self._view.reserve_blocks(reserve)):
            self._lacks_blocks = True
            return False
        if state.status is Status.WAITING:
            request, output = state.request, tuple(state.output_token_ids)
            new = (request.id, request.prompt_token_ids, request.sampling, request.cache_salt)
            self._start.append(
                NewSequence(*new, state.tier.priority, state.compiled_grammar, output, request.second_from)
            )
        if not state.tier.is_interactive:
            self._prefill_blocks.update(self._prefixes.after(state, num_tokens))
        self._add_run(state, num_tokens, context)
        return True

    def _chunk(self, wanted: int, context: int, limit_s: float) -> int:
        """Return how many of `wanted` tokens fit into the step.

        An empty step always gets at least a small chunk, even beyond the limit, so that the engine always has work.
        """
        cost = self._budgets.cost
        left_s = limit_s - self._blocks.swap_s - cost.step_s - cost.runs(self._work)
        return largest_chunk(wanted, context, left_s, cost) or (0 if self._run else min(wanted, MIN_CHUNK))

    def _add_run(self, state: RequestState, num_tokens: int, context: int) -> None:
        tier = state.tier.name
        if state.status in (Status.PAUSED, Status.SWAPPED, Status.PREEMPTED):
            self._resume.append(state.id)
        self._run[state.id] = num_tokens
        self._work.add(num_tokens, context)
        self._tokens_left -= num_tokens
        self._num_tokens[tier] += num_tokens
        self._num_run[tier] += 1
        self._num_started[tier] += not state.is_resident

    def _get_blocks(self, state: RequestState, num_tokens: int, reserve_blocks: int) -> bool:
        """Allocate the blocks for a run, if necessary with preemptions. Return False if there are not enough."""
        preempted = self._blocks.allocate(state, num_tokens, self._preemptible, reserve_blocks)
        if preempted is None:
            return False
        for victim, mode in preempted:
            self._preempt[victim.id] = mode
            self._num_preempted[victim.tier.name] += 1
        return True

    def _preemptible(self) -> list[RequestState]:
        """Return the sequences that hold blocks, do not run in this step, and do not lose their blocks in this step."""
        idle = (state for state in self._table.residents() if state.id not in self._run)
        return [state for state in idle if self._preempt.get(state.id) in (None, PreemptionMode.PAUSE)]


def largest_chunk(wanted: int, context: int, left_s: float, cost: StepCost) -> int:
    """Return how many of `wanted` tokens, after `context` computed ones, can be computed in `left_s` seconds.

    Return 0 if fewer than `MIN_CHUNK` of them fit.
    """
    if wanted < 1 or cost.run(wanted, context) <= left_s:
        return max(0, wanted)
    fitting = bisect_right(range(MIN_CHUNK, wanted + 1), left_s, key=lambda n: cost.prefill(n, context))
    return MIN_CHUNK - 1 + fitting if fitting and left_s > 0 else 0
