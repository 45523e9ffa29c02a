"""Which requests to send to the server, and whose streams to hang up. Pure: a view of the present and `now` go in.

A server that plans its own steps cannot be told to leave a sequence out of a step. What is left:

- Interactive requests are sent at once, the earliest deadline first, as long as the server has places. Those that yield
  (`scheduler.drivers.streams.precedence`) are sent and hung up as bulk is, before all bulk tiers.
- Bulk is sent only while no interactive request awaits its first token, and as many streams as may lengthen each step
  of an interactive answer: by `max_slowdown`, and inside of the SLO. While answers are under way, a prefill must also
  fit into what their delay accounts have left. Where the server keeps prefixes, a long prompt is sent in parts:
  growing beginnings, each computed from where the one before ended.
- Between interactive requests, more streams of bulk run: as many as can be hung up for the next one, and a step with
  them and with prefills is no longer than one of bulk alone may be. After a silence, prompts are sent whole, and only
  the tier's batch size, the server's places and, after the worker's start, the slow start limit bulk.
- When an interactive request is sent, prompts of bulk that the server has not begun are hung up, and as many streams as
  may not run beside it, the youngest first, within a budget of recomputed tokens. So it is if an answer is delayed too
  much, or if a first token is at risk.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.step_limit import FIRST_STEP_SHARE
from scheduler.deadlines import deadline_s
from scheduler.drivers.streams.in_flight_limit import free_places
from scheduler.holdings.request_table import RequestTable
from scheduler.request_state import RequestState

# Share of the TTFT SLO: a first token that is predicted to come later than the rest of the SLO is at risk.
RISK_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class View:
    """The present, as far as the policy depends on it."""

    tiers: Sequence[Tier]  # from the highest priority to the lowest
    table: RequestTable
    budgets: Budgets
    max_in_flight: float
    max_prefill_tokens: int  # prompt tokens that the server computes in one step
    evictable: Sequence[RequestState]  # streams that may be hung up: the lowest tier first, the youngest first in it
    recompute_tokens: float  # tokens that may be recomputed at present
    has_traffic: bool = True  # whether interactive requests are here, or are expected
    hang_up_from_s: float = -NEVER_S  # no stream is hung up before this time, because the last ones take effect first
    held_back: Collection[str] = ()  # ids of requests that are not sent now
    kept: Callable[[RequestState], int] = lambda state: 0  # tokens that are likely to be in a prefix cache
    # Tokens of a stream that would be computed again if it were hung up now.
    lost: Callable[[RequestState], int] = lambda state: state.num_tokens
    sent: Callable[[RequestState], int] = lambda state: state.num_tokens  # tokens that its stream has at the server
    # Whether its stream was sent since the server began its newest step, which does not have it.
    is_unbegun: Callable[[RequestState], bool] = lambda state: False
    may_cut: Callable[[RequestState], bool] = lambda state: False  # whether its prompt may be sent in parts
    # Tokens that are lost on average if its stream is hung up later; NEVER_S: it cannot be hung up.
    loss: Callable[[RequestState], float] = lambda state: NEVER_S
    block_size: int = 16  # tokens of a KV block of the server: parts of prompts are whole blocks
    slow_start: float = NEVER_S  # streams up to which bulk may start more
    left_s: float = NEVER_S  # what bulk may add by the delay accounts of the answers that are under way


@dataclass(frozen=True, slots=True)
class Decisions:
    start: tuple[RequestState, ...] = ()
    hang_up: tuple[RequestState, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)  # by id: tokens that are sent now, if these are not all


def decide(view: View, now: float) -> Decisions:
    """Return what to do now. Requests that were hung up before count as requests to start."""
    draft, budgets = _Draft(view, now), view.budgets
    for tier in view.tiers:
        if budgets.tiers[tier.name].is_starved:
            draft.start_starved(tier)
    for tier in view.tiers:
        if tier.is_interactive:
            draft.start_interactive(tier)
        else:
            draft.find_place(tier, budgets.tiers[tier.name])
    hang_up = draft.victims()
    if not hang_up:  # what is hung up now must not come back in the same moment
        for tier in sorted(view.tiers, key=lambda t: not budgets.tiers[t.name].min_share_due):
            if not tier.is_interactive:
                draft.start_bulk(tier, budgets.tiers[tier.name])
            elif budgets.yielding:
                draft.start_bulk(tier, budgets.yielding[tier.name])
    return Decisions(tuple(draft.started), tuple(hang_up), draft.parts)


class _Draft:
    """The decisions so far, and what the server would hold after them."""

    def __init__(self, view: View, now: float) -> None:
        self._view = view
        self._now = now
        self._cost = view.budgets.cost
        self.started: list[RequestState] = []
        self.parts: dict[str, int] = {}
        residents = list(view.table.residents())
        self._num_in_flight = len(residents)
        self._num_of = {tier.name: view.table.num_resident(tier.name) for tier in view.tiers}
        self._streams_s = sum(self._cost.decode(s.num_tokens) for s in residents)
        prefills = [s for s in residents if not s.is_decode]
        self._prefill_tokens = sum(self._num_uncached(s) for s in prefills)
        self._interactive_prefill_tokens = sum(self._num_uncached(s) for s in prefills if s.is_protected)
        bulk_prefills = [(s, self._prefill_s(s)) for s in prefills if not s.is_protected]
        self._bulk_prefills_s = sum(prefill_s for _, prefill_s in bulk_prefills)
        self._unbegun_s = sum(prefill_s for s, prefill_s in bulk_prefills if view.is_unbegun(s))
        self._has_bulk = not all(s.is_protected for s in residents)
        self._interactive = [s for s in view.table.interactive() if not s.yields]
        self._is_between = view.has_traffic and not self._interactive
        self._alone_s = min(budget.alone_s for budget in view.budgets.tiers.values())
        self._window_s = self._bulk_window_s() if view.has_traffic else NEVER_S
        self._unplaced: list[RequestState] = []  # requests for which the server has no place, though others would go

    def _bulk_window_s(self) -> float:
        """Return the longest step that bulk may cause beside the decodes of interactive requests.

        It keeps the smallest `max_slowdown`, and the SLO: a request that arrives waits for the rest of the step.
        """
        decodes = [s for s in self._interactive if not s.awaits_first_token]
        alone_s = self._cost.step(sum(self._cost.decode(s.num_tokens) for s in decodes))
        tiers = [t for t in self._view.tiers if t.is_interactive]
        slowdown = min((t.max_slowdown for t in tiers if t.max_slowdown is not None), default=NEVER_S)
        itl_s = min(t.slo.itl_p99_ms or NEVER_S for t in tiers) / 1000
        ttft_s = min(t.slo.ttft_p99_ms or NEVER_S for t in tiers) / 1000
        return max(min(slowdown * alone_s, itl_s, FIRST_STEP_SHARE * ttft_s), alone_s)

    def _longest_s(self, state: RequestState) -> float:
        """Return how long a step may become with the stream of a bulk request.

        Between interactive requests, it is the longest step of bulk alone, if the budget allows to hang up all streams
        that may not run beside the next one.
        """
        if not self._is_between:
            return self._window_s
        num_more = max(0.0, self._view.recompute_tokens) / self._view.loss(state)
        return max(self._window_s, min(self._alone_s, self._window_s + num_more * self._cost.decode(state.num_tokens)))

    def _startable(self, tier: Tier, *, protected: bool) -> Iterator[RequestState]:
        """Return the requests of a tier without a stream that yield, or do not, in the order in which they are sent."""
        table = self._view.table
        states = chain(table.preempted(tier.name), table.waiting(tier.name))
        for state in sorted(states, key=lambda s: s.boosted_to is None):
            if state.id not in self._view.held_back and state.is_protected == protected:
                yield state

    def _num_uncached(self, state: RequestState) -> int:
        """Return how many tokens the server computes before the next one of the request."""
        return self.parts.get(state.id, self._view.sent(state)) - self._view.kept(state)

    def _prefill_s(self, state: RequestState) -> float:
        return self._cost.prefill(self._num_uncached(state), self._view.kept(state))

    def _start(self, state: RequestState) -> None:
        self.started.append(state)
        self._num_in_flight += 1
        self._num_of[state.tier.name] += 1
        self._streams_s += self._cost.decode(state.num_tokens)
        self._prefill_tokens += self._num_uncached(state)
        if state.is_protected:
            self._interactive_prefill_tokens += self._num_uncached(state)
            return
        self._has_bulk = True
        self._unbegun_s += self._prefill_s(state)
        self._bulk_prefills_s += self._prefill_s(state)

    def _fits_step(self, state: RequestState) -> bool:
        """Return whether the server computes the prompt in its next step, and not in one after it.

        An interactive request does not wait for prompts of bulk, which the server has already.
        """
        before = self._interactive_prefill_tokens if state.is_protected else self._prefill_tokens
        return before == 0 or before + self._num_uncached(state) <= self._view.max_prefill_tokens

    # -- interactive tiers -----------------------------------------------------------------------------------------

    def start_interactive(self, tier: Tier) -> None:
        slots = self._view.budgets.tiers[tier.name].max_num_seqs + self._view.table.num_yielding(tier.name)
        for state in self._startable(tier, protected=True):
            if self._num_of[tier.name] >= slots or not self._fits_step(state):
                return
            if self._num_in_flight >= self._view.max_in_flight:
                self._unplaced.append(state)
            else:
                self._start(state)

    # -- hanging up ------------------------------------------------------------------------------------------------

    def victims(self) -> list[RequestState]:
        """Return the streams to hang up: as many as interactive requests need, within the budget, but no min share."""
        view, chosen = self._view, self._recalled()
        lowest = min((s.priority for s in (*self._unplaced, *self._at_risk(), *self._overdrawn())), default=None)
        if lowest is None or self._now < view.hang_up_from_s:
            return chosen
        num_hung_up, tokens_left, streams_s = 0, view.recompute_tokens, self._streams_s
        due = {name for name, budget in view.budgets.tiers.items() if budget.min_share_due}
        for state in (s for s in view.evictable if s.priority < lowest and s.tier.name not in due):
            enough = num_hung_up >= len(self._unplaced) and self._cost.step(streams_s) <= self._window_s
            if num_hung_up and enough:
                break
            num_lost = view.lost(state)
            if num_lost <= tokens_left:
                chosen.append(state)
                num_hung_up += 1
                tokens_left -= num_lost
                streams_s -= self._cost.decode(state.num_tokens)
        return chosen

    def _recalled(self) -> list[RequestState]:
        """Return the prompts of bulk that would be computed in one step with those that are sent now."""
        lowest = min((s.priority for s in self.started if s.is_protected), default=-NEVER_S)
        unbegun = (s for s in self._view.table.residents() if self._view.is_unbegun(s))
        return [s for s in unbegun if s.priority < lowest and not s.is_protected and not s.is_preemption_exhausted]

    def _at_risk(self) -> list[RequestState]:
        """Return the requests in flight whose first tokens are predicted to be late, if they are computed now."""
        step_s = self._cost.step(self._streams_s)
        return [
            state
            for state in self._interactive
            if state.is_resident
            and state.awaits_first_token
            and state.tier.slo.ttft_p99_ms is not None
            and self._now + step_s + self._prefill_s(state)
            > deadline_s(state) - RISK_SHARE * state.tier.slo.ttft_p99_ms / 1000
        ]

    def _overdrawn(self) -> list[RequestState]:
        """Return the requests in flight, if bulk has more streams than it may, and may not delay one of them more."""
        if self._view.left_s > 0 or self._cost.step(self._streams_s) <= self._window_s:
            return []
        return [state for state in self._interactive if state.is_resident or state in self.started]

    # -- bulk tiers ------------------------------------------------------------------------------------------------

    def find_place(self, tier: Tier, budget: TierBudget) -> None:
        """Note which requests that go before others of their bulk tier have no place."""
        waiting = (s for s in self._view.table.boosted(tier.name) if not s.is_resident)
        self._unplaced += [s for s in waiting if self._num_in_flight and not self._has_place(s, budget)]

    def start_starved(self, tier: Tier) -> None:
        """Start one request of a bulk tier that has none in flight, because interactive requests take all places."""
        state = next(self._startable(tier, protected=False), None)
        if state is not None and not self._num_of[tier.name] and self._num_in_flight < self._view.max_in_flight:
            self._start(state)

    def start_bulk(self, tier: Tier, budget: TierBudget) -> None:
        """Start requests of a bulk tier, or those of an interactive tier that yield."""
        for state in self._startable(tier, protected=False):
            self._cut(state, budget)
            if not self._may_start(state, budget):
                self.parts.pop(state.id, None)
                return
            self._start(state)

    def _cut(self, state: RequestState, budget: TierBudget) -> None:
        """Send only the beginning of a prompt, of whole KV blocks, if all of it would delay a chat for too long."""
        token_s, size = self._cost.prefill_token_s, self._view.block_size
        if not (self._view.has_traffic and token_s and self._view.may_cut(state)):
            return
        num_uncached = self._num_uncached(state)
        left_s = min(self._prompts_s(budget) - self._unbegun_s, self._view.left_s - self._bulk_prefills_s)
        num_tokens = max(size, int(min(num_uncached, max(0.0, left_s) / token_s)) // size * size)
        if num_tokens < num_uncached - size:
            self.parts[state.id] = self._view.kept(state) + num_tokens

    def _prompts_s(self, budget: TierBudget) -> float:
        """Return how long the server's next step may compute prompts of bulk: a chat that arrives waits for them."""
        if budget.min_share_due:
            return self._cost.step(0.0)
        if self._is_between:
            return self._alone_s - self._cost.step(self._streams_s)
        if self._view.has_traffic:
            return budget.beside_s - self._cost.step_s
        slos_ms = [t.slo.ttft_p99_ms for t in self._view.tiers if t.slo.ttft_p99_ms is not None]
        return max(self._cost.step(0.0), FIRST_STEP_SHARE * min(slos_ms) / 1000) if slos_ms else NEVER_S

    def _may_start(self, state: RequestState, budget: TierBudget) -> bool:
        if self._num_in_flight == 0:
            return self._view.max_in_flight >= 1  # the server never stands idle while there is work
        if not self._has_place(state, budget):
            return False
        prefill_s = self._prefill_s(state)
        if self._unbegun_s and self._unbegun_s + prefill_s > self._prompts_s(budget):
            return False
        left_s = self._view.left_s - self._bulk_prefills_s
        if not budget.min_share_due and (self._is_awaited_above(state) or prefill_s > left_s):
            return False
        step_s = self._cost.step(self._streams_s + self._cost.decode(state.num_tokens))
        return step_s <= self._longest_s(state) or not self._has_bulk

    def _has_place(self, state: RequestState, budget: TierBudget) -> bool:
        """Return whether the tier, the server and the slow start leave a place for a request of bulk."""
        gives_way = self._view.loss(state) <= self._view.block_size  # so the first chat finds a place
        reserved = 0 if gives_way and not self._view.has_traffic else free_places(self._view.max_in_flight)
        if self._num_of[state.tier.name] >= budget.max_num_seqs or not self._fits_step(state):
            return False
        if self._num_in_flight >= self._view.max_in_flight - reserved:
            return False
        return self._num_in_flight < self._view.slow_start or state.request.sampling.max_tokens == 1  # shows no decodes

    def _is_awaited_above(self, state: RequestState) -> bool:
        """Return whether a request of a higher priority that yields to nobody awaits its first token."""
        return any(s.awaits_first_token and s.priority > state.priority for s in self._interactive)
