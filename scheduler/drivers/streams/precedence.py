"""Which interactive requests yield in front of a server, and how much others may still delay those that do not.

The server cannot leave a sequence out of a step, so who yields is not decided for each step alone. A key or a tier
whose newest request came a short time ago counts as there: a flood that filled the server between two chats would be
in the way of the next one. And a lower tier keeps a few requests that do not yield, since its whole prompts would
seldom fit into what the higher one's answers have left.

Knows request states and steps that were seen; does not know how streams of requests that yield are treated.
"""

from collections import defaultdict
from collections.abc import Sequence

from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.config import Tier
from scheduler.control.delay_account import DelayAccounts
from scheduler.drivers.streams.step_times import SeenStep
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.yielding import Yielding
from scheduler.request import OWN_REQUESTS
from scheduler.request_state import RequestState

QUIET_S = 30.0  # seconds after the newest request of a key or tier until no other one is expected


class Precedence:
    """Decides which interactive requests yield, and keeps the delay accounts of all of them.

    It remembers how much of the server each key has used.
    """

    def __init__(self, table: RequestTable, step_time: StepTimeModel) -> None:
        self._table = table
        self._yielding = Yielding(spared=OWN_REQUESTS)
        self._accounts = DelayAccounts(step_time)
        self._claimed_s: dict[tuple[str, str], float] = {}  # when the newest request came, by tier and key

    def begin(self, state: RequestState) -> None:
        """Note a request that was claimed, and open its delay account."""
        self._accounts.open(state, 0.0, 0.0)
        if state.tier.is_interactive:
            self._claimed_s[state.share] = state.claimed_s

    def update(self, tiers: Sequence[Tier], now: float) -> None:
        """Decide who yields now. The delay accounts of those that yield no longer begin anew."""
        self._claimed_s = {share: at_s for share, at_s in self._claimed_s.items() if now - at_s < QUIET_S}
        expected = defaultdict[str, list[str]](list)
        for tier, owner in self._claimed_s:
            expected[tier].append(owner)
        for state in self._table.set_yielding(self._yielding.find(tiers, self._table, expected)):
            self._accounts.open(state, 0.0, 0.0)

    @property
    def has_traffic(self) -> bool:
        """Whether interactive requests are here, or were a short time ago."""
        return bool(self._claimed_s) or any(True for _ in self._table.interactive())

    def left_s(self) -> float:
        """Return what bulk and requests that yield may add to a step. It is not owed to keys of which some yield."""
        states = list(self._table.interactive())
        yielding = {state.share for state in states if state.yields}
        return self._accounts.left_s(state for state in states if state.share not in yielding)

    def note_step(self, seen: SeenStep, interactive_s: float, cost: StepCost) -> None:
        """Charge the keys for a step of the server, of which interactive requests used `interactive_s` seconds.

        Also enter it into the delay accounts: bulk and what yields are a delay for all others.
        """
        runs_s = [cost.run(num_tokens, context) for _, num_tokens, context in seen.runs]
        for (state, _, _), run_s in zip(seen.runs, runs_s, strict=True):
            self._yielding.charge(state, interactive_s * run_s / (sum(runs_s) or 1.0))
        protected = [run for run in seen.runs if run[0].is_protected]
        if sum(seen.sequences.values()) > len(protected):
            self._accounts.add_shared_step(protected, seen.elapsed_s, 0.0)
        else:
            self._accounts.add_step(protected, seen.elapsed_s, 0.0, is_typical=False)
