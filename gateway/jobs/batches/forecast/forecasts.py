"""What a gateway says of the future of batches: the object `tidegate` of a batch, and whether a window is feasible.

Collects what gateway/jobs/batches/forecast/estimate.py computes with: batches that are not over, lengths and paces, and
the workers' rates. Nothing here holds a batch up: where something is not known, the answer is None.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gateway.jobs.batches.completion_window import window_text
from gateway.jobs.batches.forecast import estimate as estimates
from gateway.jobs.batches.forecast.estimate import Estimate, Lengths, Pace, Range, Rates, Work
from gateway.jobs.batches.forecast.line_deadlines import URGENT_SHARE, LineTimes
from gateway.jobs.batches.forecast.line_statistics import LineStatistics
from gateway.jobs.batches.forecast.promises import Commitment, earliest_promise_s
from gateway.jobs.batches.input.size import InputSize
from gateway.jobs.batches.model import Batch, BatchStatus, NewBatch
from gateway.jobs.batches.store import BatchStore
from scheduler.client.scale import DueWork
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.registry.worker_status import WorkerStatus

RUNNING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
FRESH_S = 1.0  # seconds for which the list of unfinished batches is used again
READ_AT_ONCE = 100  # records of batches that are read from the store together
ROOM = 1.1  # the window that a refusal names is this much longer than the least one, so that it still fits later


@dataclass(frozen=True, slots=True)
class BatchModel:
    """The model that answers a batch: its name, its batch tier, and the workers that serve it."""

    name: str
    tier: Tier
    workers: Sequence[WorkerStatus]


FindModel = Callable[[str | None], BatchModel]  # from a name in a request; None: the main model


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A window in which a batch cannot be promised to end, and the shortest that can be promised; None: none can."""

    window: str
    earliest_window: str | None


class BatchForecasts:
    def __init__(
        self,
        store: BatchStore,
        statistics: LineStatistics,
        find_model: FindModel,
        clock: Clock,
    ) -> None:
        self._store = store
        self._statistics = statistics
        self._find_model = find_model
        self._clock = clock
        self.num_late = 0  # batches without `best_effort` that are expected to end after their window
        self._unfinished: tuple[float, list[tuple[Batch, Work]]] | None = None  # when they were read

    async def describe(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """Return the object `tidegate` of each batch."""
        running = [batch for batch in batches if batch.status in RUNNING]
        paces = await self._statistics.paces([batch.id for batch in running]) if running else {}
        return [await self._describe(batch, paces.get(batch.id)) for batch in batches]

    async def infeasible(self, batch: Batch) -> Infeasible | None:
        """Return why a new batch cannot be promised its window; None if it can, or if that is not known."""
        if batch.best_effort:
            return None
        earliest_s = await self._earliest_window_s(batch)
        if earliest_s is None or earliest_s <= batch.window_s:
            return None
        return Infeasible(batch.completion_window, window_text(ROOM * earliest_s))

    async def preview(self, new: NewBatch, size: InputSize) -> dict[str, Any]:
        """Return what a batch with an input of this size would take."""
        batch = new.to_batch("", self._clock.wall_ms() // 1000, size)
        lengths, model = await self._statistics.lengths(size.model, batch.endpoint), self._model_of(batch)
        estimate = await self._estimate(batch, None)
        earliest_s = await self._earliest_window_s(batch)
        urgent_s = min(URGENT_SHARE * batch.window_s, model.tier.urgent_ms / 1000)
        return {
            "lines": size.lines,
            "prompt_tokens": _range_json(estimates.prompt_tokens(batch, size, lengths)),
            "output_tokens": _range_json(
                estimates.output_tokens(batch, size, lengths, estimates.context_of(model.workers))
            ),
            "estimate": self._estimate_json(estimate),
            "earliest_window": None if earliest_s is None else window_text(ROOM * earliest_s),
            "feasible": None if earliest_s is None else earliest_s <= batch.window_s,
            "becomes_urgent": None if estimate is None else estimate.finish_s > batch.window_s - urgent_s,
        }

    async def line_times(self, batch: Batch) -> LineTimes:
        """Return how long the lines of a running batch take at present; no time at all if that is not known."""
        rates, running = self._rates(batch), await self._beside(batch)
        work = next((own for other, own in running if other.id == batch.id), None)
        if rates is None or work is None:
            return LineTimes()
        sooner = [
            other_work
            for other, other_work in running
            if other.id != batch.id and not other.best_effort and other.expires_at <= batch.expires_at
        ]
        return estimates.line_times(work, sooner, rates)

    async def due_work(self, model: str | None = None) -> tuple[list[DueWork], int]:
        """Return the work of the batches of `model` that are promised to end in time, and the number of all unfinished.

        The work is not known while the workers' rates are not.
        """
        found, now_s = self._find_model(model), self._now_s()
        rates = estimates.rates_of(found.workers, found.tier.name)
        entries = [entry for entry in await self._running() if self._model_of(entry[0]).name == found.name]
        promised = [] if rates is None else [entry for entry in entries if not entry[0].best_effort]
        expected = attrgetter("expected")
        return [DueWork(b.lines_due_s - now_s, rates.whole_s(w, expected)) for b, w in promised if rates], len(entries)

    async def _describe(self, batch: Batch, pace: Pace | None) -> dict[str, Any]:
        estimate = await self._estimate(batch, pace) if batch.status in RUNNING else None
        return {
            "best_effort": batch.best_effort,
            "estimate": self._estimate_json(estimate),
            "progress": _progress_json(pace, estimate),
            "usage": {"engine_s": round(batch.engine_us / 1e6, 3)},
        }

    async def _estimate(self, batch: Batch, pace: Pace | None) -> Estimate | None:
        work = await self._work(batch)
        if work is None:
            return None
        ahead = [other_work for _, other_work in await self._others(batch)]
        return estimates.estimate(work, ahead, self._rates(batch), pace)

    async def _earliest_window_s(self, batch: Batch) -> float | None:
        rates, work = self._rates(batch), await self._work(batch)
        if rates is None or work is None:
            return None
        promised = [
            Commitment(other.lines_due_s - self._now_s(), rates.whole_s(other_work, attrgetter("expected")))
            for other, other_work in await self._others(batch)
            if not other.best_effort
        ]
        writing_s = batch.expires_at - batch.lines_due_s
        return earliest_promise_s(work, promised, rates) + writing_s

    async def _work(self, batch: Batch) -> Work | None:
        lengths = await self._statistics.lengths(_name_of_model(batch), batch.endpoint)
        return estimates.work_left(batch, lengths, self._context(batch))

    async def _others(self, batch: Batch) -> list[tuple[Batch, Work]]:
        """Return the other batches of the same model that are not over, with what is left of them."""
        return [entry for entry in await self._beside(batch) if entry[0].id != batch.id]

    async def _beside(self, batch: Batch) -> list[tuple[Batch, Work]]:
        """Return the batches that are not over of the model of `batch`, also itself, with what is left of them."""
        name = self._model_of(batch).name
        return [entry for entry in await self._running() if self._model_of(entry[0]).name == name]

    async def _running(self) -> list[tuple[Batch, Work]]:
        """Return the batches that are not over, with what is left of them, as of at most `FRESH_S` ago."""
        if self._unfinished is None or self._clock.now() - self._unfinished[0] >= FRESH_S:
            self._unfinished = self._clock.now(), await self._read_unfinished()
        return self._unfinished[1]

    async def _read_unfinished(self) -> list[tuple[Batch, Work]]:
        """Return the batches that are not over, of all gateways, with what is left of them.

        They are read some at a time, and the lengths of each model and endpoint once.
        """
        ids = await self._store.unfinished()
        lengths: dict[tuple[str | None, str], Lengths] = {}
        entries: list[tuple[Batch, Work]] = []
        for first in range(0, len(ids), READ_AT_ONCE):
            for batch in await self._store.get_all(ids[first : first + READ_AT_ONCE]):
                if batch.status not in RUNNING:
                    continue
                kind = _name_of_model(batch), batch.endpoint
                if kind not in lengths:
                    lengths[kind] = await self._statistics.lengths(*kind)
                work = estimates.work_left(batch, lengths[kind], self._context(batch))
                if work is not None:
                    entries.append((batch, work))
        return entries

    async def count_late(self) -> None:
        """Count the batches of all gateways that are expected to end after their window: see `num_late`."""
        by_model: dict[str, list[tuple[Batch, Work]]] = {}
        for entry in await self._read_unfinished():
            by_model.setdefault(self._model_of(entry[0]).name, []).append(entry)
        self.num_late = sum([await self._num_late(entries) for entries in by_model.values()])

    async def _num_late(self, entries: Sequence[tuple[Batch, Work]]) -> int:
        """Return how many of these batches of one model are expected to end after their window."""
        found = await self._statistics.paces([batch.id for batch, _ in entries])
        works, paces = [work for _, work in entries], [found.get(batch.id) for batch, _ in entries]
        left_s = await asyncio.to_thread(estimates.finish_times_s, works, paces, self._rates(entries[0][0]))
        ends = [(batch, s) for (batch, _), s in zip(entries, left_s, strict=True) if s is not None]
        now_s = self._now_s()
        return sum(not batch.best_effort and now_s + s > batch.lines_due_s for batch, s in ends)

    def on_created(self) -> None:
        """Read the list again for the next question, because a batch was created."""
        self._unfinished = None

    def _model_of(self, batch: Batch) -> BatchModel:
        return self._find_model(_name_of_model(batch))

    def _rates(self, batch: Batch) -> Rates | None:
        model = self._model_of(batch)
        return estimates.rates_of(model.workers, model.tier.name)

    def _context(self, batch: Batch) -> int:
        return estimates.context_of(self._model_of(batch).workers)

    def _estimate_json(self, estimate: Estimate | None) -> dict[str, Any] | None:
        if estimate is None:
            return None
        now_s = self._now_s()
        return {
            "finish_at": int(now_s + estimate.finish_s),
            "earliest": int(now_s + estimate.earliest_s),
            "latest": int(now_s + estimate.latest_s),
            "basis": estimate.basis,
        }

    def _now_s(self) -> float:
        return self._clock.wall_ms() / 1000


def _name_of_model(batch: Batch) -> str | None:
    return batch.size.model if batch.size is not None else batch.model


def _progress_json(pace: Pace | None, estimate: Estimate | None) -> dict[str, Any] | None:
    if pace is None:
        return None
    return {
        "lines_per_s": round(pace.lines_per_s, 3),
        "tokens_per_s": round(pace.tokens_per_s, 1),
        "eta_s": None if estimate is None else int(estimate.finish_s),
    }


def _range_json(tokens: Range) -> dict[str, int]:
    return {"low": int(tokens.low), "expected": int(tokens.expected), "high": int(tokens.high)}
