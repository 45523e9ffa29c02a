"""One line of a batch: which outcomes are its answer, and which are tried again."""

import pytest
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as StoreUnreachable

from gateway.jobs.batches.forecast.forecasts import BatchForecasts, BatchModel
from gateway.jobs.batches.forecast.line_statistics import LineStatistics
from gateway.jobs.batches.input.lines import BatchLine
from gateway.jobs.batches.lines.line import MAX_FAILURES, LineRunner
from gateway.jobs.batches.model import Batch, BatchStatus, LineResult
from gateway.jobs.batches.store import BatchStore
from scheduler.store.connection import connect
from tests.gateway.offline import TIERS, ScriptedCompletions, ShiftedClock

# Lines are answered, whether the store knows how long they took or not.
UNREACHABLE = connect("redis://127.0.0.1:1")
UNREACHABLE.set_retry(Retry(NoBackoff(), 0))


class InstantClock(ShiftedClock):
    """Sleeps take no time and are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def run(statuses: list[int | Exception]) -> tuple[LineResult, ScriptedCompletions, InstantClock]:
    completions, clock = ScriptedCompletions(), InstantClock()
    completions.statuses["q"] = list(statuses)
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    tier = TIERS[TIERS.batch_tier]
    statistics = LineStatistics(UNREACHABLE, clock)
    model = BatchModel("m", tier, [])
    forecasts = BatchForecasts(BatchStore(UNREACHABLE), statistics, lambda _: model, clock)
    runner = LineRunner(completions, lambda _: model, clock, statistics, forecasts)
    batch = Batch(
        "batch_1", "/v1/chat/completions", "file-1", "24h", BatchStatus.IN_PROGRESS, 1, 2, owner="alice", model="m"
    )
    return await runner.begin(batch).run(BatchLine(7, "q", body)), completions, clock


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_refusal_is_the_answer(status: int) -> None:
    result, completions, _ = await run([status])
    assert (result.number, result.succeeded, result.output_tokens) == (7, False, 0)
    assert completions.calls["q"] == 1


@pytest.mark.parametrize("busy", [429, 503, StoreUnreachable("away")])
async def test_a_busy_server_is_tried_again_with_growing_pauses(busy: int | Exception) -> None:
    result, completions, clock = await run([busy] * 30)
    assert result.succeeded and result.input_tokens == 3
    assert completions.calls["q"] == 31 and len(set(completions.request_ids)) == 31
    assert clock.pauses[0] <= 0.1 and all(7.5 <= pause <= 10 for pause in clock.pauses[8:])


async def test_a_lasting_fault_is_the_answer() -> None:
    result, completions, _ = await run([500, 429, 500, 500, ValueError("bug"), 500])
    assert not result.succeeded and b'"status_code":500' in result.text and b"bug" not in result.text
    assert completions.answered["q"] == 0 and completions.calls["q"] == MAX_FAILURES + 1


async def test_an_attempt_continues_the_one_before_it_but_not_one_that_has_failed() -> None:
    _, completions, _ = await run([503, 429, 500, 503])
    assert completions.parts == ["batch_1/7/0"] * 3 + ["batch_1/7/1"] * 2
