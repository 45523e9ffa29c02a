"""Speculative decoding without a draft model: which decodes of a step get a draft, and of how many tokens.

A draft is what came after the newest tokens of a sequence where they last occurred in its prompt or output. Summaries
and edits repeat much of their prompts, so the draft is often right, and one step yields several tokens.

Only interactive requests that yield to nobody have drafts, and only in a step in which all of them decode. Bulk makes
no difference: an answer that is faster with drafts when alone would be slowed down if it had none beside bulk. A token
of a draft is added if it is expected to make the step worth more than longer, by the acceptance that is learned for its
sequence and the costs of steps that are learned for the engine. Worth is the product of all these streams' speeds, so
that one that repeats itself does not slow down many that do not.

Knows tokens, plans and costs; the engine verifies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from weakref import WeakKeyDictionary

from engine.interface import Run, StepPlan, blocks_for
from engine.step_time.cost import StepCost
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.kv_budget import BlockBudget, EngineView
from scheduler.request_state import RequestState

LONGEST_DRAFT = 15  # tokens
LOOKUPS = (8, 2)  # numbers of newest tokens that are looked up, the second if the first are nowhere else
USUAL_RATE = 0.5  # acceptance of a drafted token, as it is believed of a sequence without drafts
RATE_WEIGHT = 0.1  # weight of the newest drafted token in the acceptance of its sequence
RETRY_WEIGHT = 0.01  # weight of the usual acceptance at each step without a draft, so that drafts are tried again


class Repetition:
    """The text of one sequence, and how often drafts from it were right."""

    __slots__ = ("_text", "rate")

    def __init__(self) -> None:
        self._text = ""  # a character for each token (ids are below 0x110000), since strings are searched fast
        self.rate = USUAL_RATE  # that a token is accepted if those before it in its draft are

    def draft(self, state: RequestState, longest: int) -> tuple[int, ...]:
        """Return the tokens that came after the newest ones the last time. A text that ends before goes round."""
        if not self._text:
            self._text = "".join(map(chr, state.request.prompt_token_ids))
        num_seen = len(self._text) - len(state.request.prompt_token_ids)
        self._text += "".join(map(chr, state.output_token_ids[num_seen:]))
        for count in LOOKUPS:
            found = self._text.rfind(self._text[-count:], 0, -1) if count < len(self._text) else -1
            if found >= 0:
                after = self._text[found + count : found + count + longest]
                return tuple(map(ord, after * -(-longest // len(after))))[:longest]
        return ()

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft. Without one, what was learned fades."""
        for accepted in [True] * num_accepted + [False] * (num_accepted < num_drafted):
            self.rate += RATE_WEIGHT * (accepted - self.rate)
        if not num_drafted:
            self.rate += RETRY_WEIGHT * (USUAL_RATE - self.rate)


class Speculation:
    """What is known of the texts of sequences that have had drafts. Owned by the planner."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[RequestState, Repetition] = WeakKeyDictionary()

    def note(self, state: RequestState, num_drafted: int, num_accepted: int) -> None:
        """Record how many tokens of a draft the engine has accepted."""
        self._known[state].note(num_drafted, num_accepted)

    def with_drafts(
        self,
        plan: StepPlan,
        table: RequestTable,
        view: EngineView,
        cost: StepCost,
        mixed_cost: StepCost,
        limits_s: Mapping[str, float],
    ) -> StepPlan:
        """Return the plan with drafts, if all interactive requests that yield to nobody decode in it.

        `cost` is that of steps without prefills, `mixed_cost` that of steps with them, and `limits_s` the longest time
        of a step, by tier.
        """
        running = {run.seq_id for run in plan.run}
        states = [state for state in table.interactive() if state.is_protected]
        if not states or not all(state.is_decode and state.id in running for state in states):
            return plan
        offers = [self._offer(state, view) for state in states]
        if any(offer.longest > 0 for offer in offers):
            free_blocks = BlockBudget(view, cost, table.reserved(), table.any_resident).unreserved
            limit_s = min(limits_s[state.tier.name] for state in states)
            plan_cost = mixed_cost if any(run.num_tokens > 1 for run in plan.run) else cost
            choice = _Choice(states, plan, table, replace(view, free_blocks=free_blocks), cost, plan_cost, limit_s)
            choice.take(offers)
        for offer in offers:
            if not offer.length:
                offer.known.note(0, 0)
        drafts = {offer.state.id: offer.text[: offer.length] for offer in offers if offer.length}
        if not drafts:
            return plan
        return replace(plan, run=tuple(Run(r.seq_id, r.num_tokens, drafts.get(r.seq_id, ())) for r in plan.run))

    def _offer(self, state: RequestState, view: EngineView) -> "_Offer":
        known = self._known.get(state) or self._known.setdefault(state, Repetition())
        return _Offer(state, known, _longest(state, view), gain=known.rate)


def _longest(state: RequestState, view: EngineView) -> int:
    """Return the length of the longest draft that a sequence may have. One token comes after it."""
    sampling = state.request.sampling
    left = min(sampling.max_tokens - len(state.output_token_ids), view.max_model_len - state.num_tokens)
    return 0 if sampling.alters_logits else min(left - 1, LONGEST_DRAFT)


@dataclass(slots=True)
class _Offer:
    """A draft of a sequence, at most `longest` tokens, of which the first `length` tokens are taken so far."""

    state: RequestState
    known: Repetition
    longest: int
    text: tuple[int, ...] = ()
    length: int = 0
    gain: float = 0.0  # number of tokens that the next one of the draft is expected to add
    num_expected: float = 1.0  # number of tokens that the sequence is expected to get in the step

    def take(self) -> None:
        self.length += 1
        self.num_expected += self.gain
        self.gain *= self.known.rate


class _Choice:
    """The step while the lengths of its drafts are chosen: what is left, and what it costs so far.

    What drafts are worth follows from the decodes of `states` alone, and how many fit from all runs of the plan.
    """

    def __init__(
        self,
        states: Sequence[RequestState],
        plan: StepPlan,
        table: RequestTable,
        view: EngineView,
        cost: StepCost,
        plan_cost: StepCost,
        limit_s: float,
    ) -> None:
        size = view.block_size
        self._plan_s, needs = 0.0, 0
        for run in plan.run:
            state = table.states[run.seq_id]
            self._plan_s += plan_cost.run(run.num_tokens, state.num_computed_tokens)
            needs += blocks_for(state.num_computed_tokens + run.num_tokens, size) - state.blocks_held(size)
        self._cost, self._plan_cost = cost, plan_cost
        self._limit_s = limit_s
        self._num_sequences = len(states)
        self._runs_s = sum(cost.decode(state.num_computed_tokens) for state in states)
        self._tokens_left = view.max_step_tokens - plan.num_tokens
        self._block_size = size
        self._blocks_left = view.free_blocks - needs

    def pays(self, offer: _Offer) -> bool:
        """Return whether the next token of a draft makes one sequence faster by more than it makes all slower."""
        step_s, longer_s = (self._cost.step(s) for s in (self._runs_s, self._runs_s + self._token_s(offer)))
        planned_s = self._plan_cost.step(self._plan_s + self._plan_cost.decode(offer.state.num_computed_tokens))
        if planned_s > self._limit_s or not step_s or self._tokens_left < 1:
            return False  # also while no cost is known
        return 1 + offer.gain / offer.num_expected > (longer_s / step_s) ** self._num_sequences

    def take(self, offers: Sequence[_Offer]) -> None:
        """Take tokens of the offers for as long as they pay and have KV blocks, the most useful first."""
        for offer in offers:
            if offer.longest > 0 and self.pays(offer):
                offer.text = offer.known.draft(offer.state, offer.longest)
        heap = [(-offer.gain, place) for place, offer in enumerate(offers) if offer.text]
        heapify(heap)
        while heap:
            place = heappop(heap)[1]
            offer = offers[place]
            needs_block = (offer.state.num_computed_tokens + 1 + offer.length) % self._block_size == 0
            if not self.pays(offer) or self._blocks_left < needs_block:
                continue
            self._blocks_left -= needs_block
            self._tokens_left -= 1
            self._runs_s += self._token_s(offer)
            self._plan_s += self._plan_cost.decode(offer.state.num_computed_tokens)
            offer.take()
            if offer.length < len(offer.text):
                heappush(heap, (-offer.gain / offer.num_expected, place))

    def _token_s(self, offer: _Offer) -> float:
        return self._cost.decode(offer.state.num_computed_tokens)
