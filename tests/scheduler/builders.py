"""Builders for the scheduler's tests: functions with defaults, and a core that checks the laws at every step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.interface import EngineInfo, SamplingParams, StepPlan, StepResult, blocks_for
from engine.modeled.engine import modeled_token
from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel
from scheduler.config import Retry, TierSet, parse_tiers
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.holdings.report import Report
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.kv_budget import EngineView
from scheduler.request import USUAL_VERSION, Delivery, Request
from scheduler.request_state import RequestState, Status
from scheduler.virtual_time import EPOCH_MS

VOCAB = 1000
NO_PERIOD = 1 << 60  # of a modeled output
MAX_PREEMPTIONS = Retry().max_preemptions
FAST = StepCost(step_s=0.01, prefill_token_s=0.0002, attend_s=0.0, context_token_s=1e-6, decode_s=0.0005)

_TIERS: dict[str, dict[str, Any]] = {
    "realtime": {
        "priority": 100,
        "service_tiers": ["default"],
        "slo": {"ttft_p99_ms": 500, "itl_p99_ms": 100},
        "max_slowdown": 1.25,
        "max_wait_ms": {"min": 0, "start": 0, "max": 20},
        "batch_size": {"min": 4, "start": 64, "max": 256},
        "queue_limit": 100,
    },
    "bulk": {
        "priority": 10,
        "service_tiers": ["flex"],
        "max_wait_ms": {"min": 0, "start": 0, "max": 1000},
        "batch_size": {"min": 1, "start": 64, "max": 256},
        "floor": 0.02,
        "deadline_ms": 600_000,
    },
    "batch": {
        "priority": 0,
        "max_wait_ms": {"min": 0, "start": 0, "max": 2000},
        "batch_size": {"min": 1, "start": 64, "max": 256},
        "floor": 0.01,
        "deadline_ms": 86_400_000,
    },
}


def tiers_document(
    usual: Mapping[str, dict[str, Any]], changes: Mapping[str, dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Return the contents of a tiers.yaml: the `usual` tiers with `changes` to single keys, and new tiers. `more` are
    other keys of the document."""
    tiers = {name: {**usual.get(name, {}), **changes.get(name, {})} for name in {**usual, **changes}}
    return {"default_tier": "realtime", "batch_tier": "batch", **more, "tiers": tiers}


def make_tiers(**changes: dict[str, Any]) -> TierSet:
    """Return the three usual tiers; `bulk={"floor": 0}` changes a key, `gold={…}` adds a tier. Interactive tiers have
    endless patience unless a change says otherwise, so that floods reach the scheduler."""
    document = tiers_document(_TIERS, changes)
    for keys in document["tiers"].values():
        if keys.get("slo"):
            keys.setdefault("admission", {"patience_ms": None})
        else:
            keys.pop("max_slowdown", None)
    return parse_tiers(document)


def fixed(start: float) -> dict[str, float]:
    """Return the bounds of a knob that cannot move."""
    return {"min": start, "start": start, "max": start}


def make_info(**changes: Any) -> EngineInfo:
    values = {"max_model_len": 512, "vocab_size": VOCAB, "block_size": 16, "num_blocks": 400, "max_step_tokens": 1024}
    return EngineInfo("model", **{**values, **changes})


def make_request(
    request_id: str = "r",
    tier: str = "realtime",
    prompt: int | Iterable[int] = 32,
    max_tokens: int = 8,
    *,
    arrival_ms: int = EPOCH_MS,
    deadline_ms: int | None = None,
    reply_to: str = "gateway",
    delivery: Delivery = Delivery.EACH_STEP,
    cache_salt: str = "",
    wants_receipt: bool = False,
    urgent_ms: int = 0,
    job_part: str = "",
    version: int = USUAL_VERSION,
    owner: str = "",
    weight: int = 1,
    order_ms: int = 0,
    vocabulary: str = "",
    chat: str = "",
    is_whole: bool = False,
    **sampling: Any,
) -> Request:
    """`prompt` is the token ids, or their number."""
    token_ids = tuple(range(3, 3 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    sampling.setdefault("seed", sum(request_id.encode()))
    return Request(
        id=request_id,
        tier=tier,
        prompt_token_ids=tuple(t % VOCAB if isinstance(prompt, int) else t for t in token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_ms=arrival_ms,
        deadline_ms=arrival_ms + 10_000 if deadline_ms is None else deadline_ms,
        reply_to=reply_to,
        delivery=delivery,
        cache_salt=cache_salt,
        wants_receipt=wants_receipt,
        urgent_ms=urgent_ms,
        job_part=job_part,
        version=version,
        owner=owner,
        weight=weight,
        order_ms=order_ms,
        vocabulary=vocabulary,
        chat=chat,
        is_whole=is_whole,
    )


_STATUSES_TO: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (),
    Status.RUNNING: (Status.RUNNING,),
    Status.PAUSED: (Status.RUNNING, Status.PAUSED),
    Status.SWAPPED: (Status.RUNNING, Status.SWAPPED),
    Status.PREEMPTED: (Status.RUNNING, Status.PREEMPTED),
    Status.FINISHED: (Status.RUNNING, Status.FINISHED),
    Status.FAILED: (Status.FAILED,),
    Status.CANCELLED: (Status.CANCELLED,),
}


def make_state(
    request_id: str = "r",
    tier: str = "realtime",
    status: Status = Status.WAITING,
    *,
    tiers: TierSet | None = None,
    computed: int = 0,
    output: int = 0,
    claimed_s: float = 0.0,
    last_token_s: float | None = None,
    last_step: int = -1,
    preempted: int = 0,
    shared: int = 0,
    **request: Any,
) -> RequestState:
    """`output`: tokens generated so far; `computed`: tokens in the KV cache."""
    state = RequestState(
        request=make_request(request_id, tier, **request),
        tier=(tiers or make_tiers())[tier],
        fence=1,
        arrived_s=claimed_s,
        claimed_s=claimed_s,
        num_computed_tokens=computed,
        output_token_ids=[7] * output,
        last_step=last_step,
        num_preemptions=preempted,
        num_shared_blocks=shared,
    )
    if output:
        state.first_token_s = claimed_s
        state.last_token_s = claimed_s if last_token_s is None else last_token_s
    for step in _STATUSES_TO[status]:
        state.move(step)
    return state


def make_decode(request_id: str, tier: str = "bulk", *, prompt: int = 32, output: int = 1, **more: Any) -> RequestState:
    """Return a running sequence whose next run is one token."""
    computed = prompt + output - 1
    status = more.pop("status", Status.RUNNING)
    more.setdefault("max_tokens", 100)
    return make_state(request_id, tier, status, prompt=prompt, output=output, computed=computed, **more)


def make_view(**changes: Any) -> EngineView:
    values = {"num_blocks": 100, "free_blocks": 100, "block_size": 16, "max_step_tokens": 1024, "max_model_len": 4096}
    return EngineView(**{**values, **changes})


def make_table(tiers: TierSet, states: Iterable[RequestState]) -> RequestTable:
    """Return a table of `states`, updated in the order in which they would have come into being."""
    table = RequestTable(tiers.by_priority)
    for state in sorted(states, key=lambda s: (s.last_step, s.edf_key)):
        table.update(state)
    newest = max((s.last_step for s in table), default=-1)
    table.note_run([s.id for s in table if s.last_step == newest])
    table.boost({s.id: s.boosted_to for s in table if s.boosted_to is not None})
    return table


class KnownStepTime(StepTimeModel):
    """Knows the coefficients from the start and learns nothing, so that steps take round numbers of seconds."""

    is_warm = True

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        pass


class CheckedCore(StepCore):
    """The shipped core; asserts the laws after every call, and keeps all plans, results and states."""

    def __init__(
        self, tiers: TierSet, engine: EngineInfo, controller: SLAController, step_time: StepTimeModel | None = None
    ) -> None:
        super().__init__(tiers, engine, controller, step_time)
        self.lives: list[RequestState] = []
        self.plans: list[tuple[float, StepPlan]] = []
        self.results: list[StepResult] = []

    def _begin(self, state: RequestState) -> None:
        super()._begin(state)
        self.lives.append(state)

    def _drop(self, state: RequestState) -> None:
        super()._drop(state)
        assert state.id not in self._states

    def plan(self, now: float) -> StepPlan:
        runnable = [
            i for i, s in self._states.items() if not self._engine_state.is_abandoned(i) and not s.awaits_grammar
        ]
        # Blocks that several aborted sequences share count as free only one step later.
        abort_together = sum(a.num_shared > 0 for a in self._engine_state._abandoned.values()) > 1
        self.check()
        plan = super().plan(now)
        if drafted := {run.seq_id for run in plan.run if run.draft}:
            protected = {state.id for state in self._states.values() if state.is_protected}
            assert drafted <= protected, "neither bulk nor what yields has drafts"
            assert protected <= ran(plan).keys(), (
                "drafts take no time that an interactive request that waits could have"
            )
        assert (
            plan.run or plan.is_of_suspended or abort_together or not runnable or self._is_batching_delay(runnable, now)
        ), f"work conserving: {runnable} could run"
        self.check()
        if not plan.is_empty:
            self.plans.append((now, plan))
        return plan

    def apply(self, result: StepResult, now: float, overhead_s: float = 0.0) -> Report:
        report = super().apply(result, now, overhead_s)
        self.results.append(result)
        self.check()
        self._check_blocks(result)
        assert all(s.num_preemptions <= s.tier.retry.max_preemptions for s in self.held.table), (
            "preemptions are bounded"
        )
        return report

    def check(self) -> None:
        """Assert the laws that hold at every instant."""
        ends = sum(self.held.counts[k] for k in ("finished", "failed", "cancelled", "released"))
        assert self.held.counts["accepted"] == ends + len(self.held) + self.held.num_refused, "conservation"
        own = [s.own_blocks(self._engine.block_size) for s in self.held.table]
        assert min(own, default=0) >= 0 and sum(own) <= self._engine.num_blocks, "blocks"
        need = [blocks_for(s.num_computed_tokens, self._engine.block_size) for s in self.held.table]
        assert all(n <= self._engine.num_blocks for n in need)

    def _is_batching_delay(self, runnable: Sequence[str], now: float) -> bool:
        """Return whether only newcomers wait, and none of them longer than max-wait."""
        states = [self._states[request_id] for request_id in runnable if request_id in self._states]
        waits_s = {name: output.max_wait_s for name, output in self.controller.outputs(now).items()}
        ends_s = min((s.claimed_s + waits_s[s.tier.name] for s in states), default=float("inf"))
        return now < self.planner.idle_until_s <= ends_s < float("inf") and all(
            s.status is Status.WAITING for s in states
        )

    def _check_blocks(self, result: StepResult) -> None:
        """Assert free + used = total. A shared block counts once, but states count it once each or not at all: `used`
        lies between the sums."""
        # A step that was planned ahead, or is suspended, has its blocks already.
        if self.running.is_any or self.running.suspended is not None:
            return
        size, used = self._engine.block_size, self._engine.num_blocks - result.free_blocks
        states = [s for s in self.held.table if not self._engine_state.is_abandoned(s.id)]
        assert sum(s.own_blocks(size) for s in states) <= used
        if not self._engine_state.num_abandoned:
            held = sum(s.blocks_held(size) for s in states)
            assert used <= held, "blocks: free + used = total"
            assert used == held or any(s.num_shared_blocks for s in states)

    def trace(self) -> str:
        """Return all plans, one per line."""
        return "\n".join(f"{now:.6f} {plan}" for now, plan in self.plans)

    def life(self, request_id: str) -> RequestState:
        """Return the newest state of a request; it has several if it was claimed again."""
        return next(s for s in reversed(self.lives) if s.id == request_id)


def make_core(
    tiers: TierSet | None = None,
    info: EngineInfo | None = None,
    cost: StepCost | None = FAST,
    step_time: StepTimeModel | None = None,
) -> CheckedCore:
    """`cost=None`: the core must learn the step times, with `step_time` if given."""
    tiers = tiers or make_tiers()
    info = info or make_info()
    if cost is not None and step_time is None:
        step_time = KnownStepTime(cost)
    return CheckedCore(
        tiers, info, SLAController(tiers, info.num_layers, suspends_steps=info.suspends_steps), step_time
    )


def ran(plan: StepPlan) -> dict[str, int]:
    return {run.seq_id: run.num_tokens for run in plan.run}


def preempted(plan: StepPlan) -> dict[str, str]:
    return {p.seq_id: p.mode.value for p in plan.preempt}


def expected_tokens(request: Request, period: int = NO_PERIOD) -> list[int]:
    return [modeled_token(request.sampling.seed, i % period, VOCAB) for i in range(request.sampling.max_tokens)]
