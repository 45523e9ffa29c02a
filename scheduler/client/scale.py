"""How many workers the load needs: a signal for what starts and stops them, such as KEDA.

The need has three parts, in workers of the mean speed of those that serve:

- interactive traffic: the engine time that it takes, and a reserve for its bursts. Bulk uses the reserve meanwhile;
- what waits for a first token longer than a moment: it is to be caught up with in `CATCH_UP_S`;
- bulk that is due: of all work due by any time, as much as must be done each second until then.

Pure: it reads no clock. It starts nothing, and it remembers nothing, so every gateway says the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scheduler.config import Tier
from scheduler.queue.base import Backlog
from scheduler.registry.worker_status import TierCapacity, WorkerStatus

# Share of the workers' time that interactive traffic may take. With more, first tokens are late in its bursts.
INTERACTIVE_SHARE = 0.6
CATCH_UP_S = 10.0  # seconds in which interactive requests that wait are to be served
LEAST_LEFT_S = 60.0  # seconds that late bulk still gets: a worker needs some of them to start
# Workers are given back once the rest can do this multiple of what is needed: noise must not stop and start them.
DOWN_MARGIN = 1.25
IDLE_SHARE = 0.001  # of a worker's time; less is no load


@dataclass(frozen=True, slots=True)
class DueWork:
    """Bulk work that is due: the seconds until then, and those that it takes if all workers do nothing else."""

    left_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class ScaleSignal:
    """How many workers are wanted, and why. The three parts are numbers of workers."""

    wanted: int
    serving: int
    interactive: float = 0.0
    waiting: float = 0.0
    bulk: float = 0.0
    reason: str = ""


def scale_signal(
    tiers: Iterable[Tier],
    workers: Sequence[WorkerStatus],
    starting: int,
    backlogs: Mapping[str, Backlog],
    output_shares: Mapping[str, float],
    due: Sequence[DueWork],
    *,
    has_more: bool,
) -> ScaleSignal:
    """Return the number of workers that the load needs.

    `workers` are those that serve, and `starting` the number of those that start. `backlogs` is what waits in the
    store, and `output_shares` the part of `max_tokens` that answers usually take, by tier. `due` is the work of
    batches. With `has_more` there is other work, such as a request that has found no worker.
    """
    present = len(workers) + starting
    has_work = has_more or bool(due) or any(backlog.requests for backlog in backlogs.values()) or _is_busy(workers)
    if not has_work:
        return ScaleSignal(0, len(workers), reason="there is nothing to do")
    if not workers:
        return ScaleSignal(max(1, starting), 0, reason="work waits, and no worker serves")
    speeds = {tier.name: _mean_speed(tier.name, workers) for tier in tiers}
    if None in speeds.values():
        return ScaleSignal(max(1, present), len(workers), reason="the workers' speed is not known yet")

    waiting, bulk = 0.0, [DueWork(w.left_s, w.work_s * len(workers)) for w in due]
    for tier in tiers:
        speed, backlog = speeds[tier.name], backlogs.get(tier.name, Backlog())
        assert speed is not None
        work_s = speed.seconds(backlog, output_shares.get(tier.name, 0.0))
        if tier.is_interactive:
            waiting += work_s / CATCH_UP_S
        elif work_s:
            bulk.append(DueWork(tier.deadline_ms / 1000, work_s))
    names = [tier.name for tier in tiers if tier.is_interactive]
    interactive = sum(_interactive_share(worker, names) for worker in workers)
    waiting += _claimed_s([tier for tier in tiers if tier.is_interactive], workers) / CATCH_UP_S
    parts = interactive, waiting, _needed_by_deadlines(bulk)
    need = max(interactive / INTERACTIVE_SHARE + waiting, sum(parts))
    wanted = max(1, math.ceil(need - 1e-9))
    if wanted < present:
        wanted = min(present, max(1, math.ceil(DOWN_MARGIN * need)))
    return ScaleSignal(wanted, len(workers), *parts, reason=_reason(wanted, present, parts))


@dataclass(frozen=True, slots=True)
class _Speed:
    """Tokens a second of one worker that does nothing else."""

    prompt_per_s: float
    output_per_s: float

    def seconds(self, backlog: Backlog, output_share: float) -> float:
        return backlog.prompt_tokens / self.prompt_per_s + output_share * backlog.output_tokens / self.output_per_s


def _mean_speed(tier: str, workers: Iterable[WorkerStatus]) -> _Speed | None:
    """Return the mean speed of the workers that know theirs; None if none does."""
    found = [c for worker in workers if (c := _capacity(worker, tier)) is not None]
    known = [
        c for c in found if c.prefill_tokens_per_s and c.whole_prefill_tokens_per_s and c.whole_output_tokens_per_s
    ]
    if not known:
        return None
    return _Speed(fmean(c.whole_prefill_tokens_per_s for c in known), fmean(c.whole_output_tokens_per_s for c in known))


def _claimed_s(interactive: Sequence[Tier], workers: Iterable[WorkerStatus]) -> float:
    """Return the time of the prompts that workers hold and have not computed yet.

    The capacity of a tier counts the prompts of all tiers above, too, so that of the lowest interactive tier has all.
    """
    if not interactive:
        return 0.0
    lowest = min(interactive, key=lambda tier: tier.priority).name
    held = [c for worker in workers if (c := _capacity(worker, lowest)) is not None and c.whole_prefill_tokens_per_s]
    return sum(c.prompt_tokens / c.whole_prefill_tokens_per_s for c in held)


def _needed_by_deadlines(bulk: Iterable[DueWork]) -> float:
    """Return how many workers must do bulk all the time, so that what is due by any time is done by then."""
    needed = before_s = 0.0
    for work in sorted(bulk, key=lambda work: work.left_s):
        before_s += work.work_s
        needed = max(needed, before_s / max(work.left_s, LEAST_LEFT_S))
    return needed


def _is_busy(workers: Iterable[WorkerStatus]) -> bool:
    return any(
        status.running or status.queued or _used_share(worker, name) > IDLE_SHARE
        for worker in workers
        for name, status in worker.tiers.items()
    )


def _capacity(worker: WorkerStatus, tier: str) -> TierCapacity | None:
    status = worker.tiers.get(tier)
    return None if status is None else status.capacity


def _interactive_share(worker: WorkerStatus, tiers: Sequence[str]) -> float:
    """Return the share of the worker that the interactive tiers need.

    It is not all the time that they take: with few requests, steps are nearly empty, and a further worker would make
    the steps of all emptier, and seem to be needed, too.
    """
    used = sum(_used_share(worker, tier) for tier in tiers)
    return used if worker.interactive_share is None else min(used, worker.interactive_share)


def _used_share(worker: WorkerStatus, tier: str) -> float:
    capacity = _capacity(worker, tier)
    return 0.0 if capacity is None else capacity.used_share


def _reason(wanted: int, present: int, parts: tuple[float, float, float]) -> str:
    interactive, waiting, bulk = parts
    if wanted == present:
        return "the workers suffice"
    if wanted < present:
        return f"{wanted} would do {DOWN_MARGIN} times what is needed"
    most = max(
        (interactive / INTERACTIVE_SHARE, "interactive traffic keeps the workers busy"),
        (waiting, "interactive requests wait"),
        (bulk, "bulk would be late"),
    )
    return most[1]
