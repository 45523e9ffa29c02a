"""Requests that find no worker where workers are started on demand."""

import asyncio

import pytest

from scheduler.client.client import REFRESH_S
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.registry.worker_status import WorkerStart
from scheduler.request import EventKind, Request
from tests.scheduler.builders import make_request
from tests.scheduler.client.stage import PATIENCE_S, Stage, play


def now(stage: Stage, tier: str = "realtime") -> Request:
    arrival_ms = stage.clock.wall_ms()
    return make_request("r", tier, arrival_ms=arrival_ms, deadline_ms=arrival_ms + 10_000)


def wanted(stage: Stage) -> int:
    return stage.client.scale_signal([], has_more=False).wanted


def test_a_chat_waits_for_a_worker_that_is_started_for_it() -> None:
    async def story(stage: Stage) -> None:
        assert wanted(stage) == 0
        asked = asyncio.create_task(stage.client.submit([now(stage)]))
        await stage.clock.sleep(PATIENCE_S - 3)
        assert not asked.done() and wanted(stage) == 1
        await stage.announce()
        assert isinstance(await asked, TokenStream) and await stage.depth() == 1

    play(story, worker=False, scales_from_zero=True)


@pytest.mark.parametrize(("scales_from_zero", "waits_s"), [(True, PATIENCE_S), (False, 0)])
def test_a_chat_waits_no_longer_than_its_patience_and_not_without_hope(scales_from_zero: bool, waits_s: float) -> None:
    async def story(stage: Stage) -> None:
        asked_s = stage.clock.now()
        outcome = await stage.client.submit([now(stage)])
        assert isinstance(outcome, Rejected) and outcome.reason is RejectReason.NO_ENGINE
        assert stage.clock.now() - asked_s == pytest.approx(waits_s, abs=1.0)
        assert wanted(stage) == 1, "its client will come back"

    play(story, worker=False, scales_from_zero=scales_from_zero)


@pytest.mark.parametrize("scales_from_zero", [True, False])
def test_bulk_waits_in_the_store_for_the_first_worker(scales_from_zero: bool) -> None:
    async def story(stage: Stage) -> None:
        outcome = await stage.client.submit([now(stage, "bulk")])
        assert isinstance(outcome, TokenStream) is scales_from_zero

    play(story, worker=False, scales_from_zero=scales_from_zero)


def test_workers_that_start_beside_others_are_known() -> None:
    async def story(stage: Stage) -> None:
        await stage.registry.announce_start(WorkerStart("next", "loading the model", 1.0))
        await stage.clock.sleep(REFRESH_S + 0.5)
        assert [w.worker_id for w in stage.client.live.engines] == ["w"]
        assert [w.worker_id for w in stage.client.live.starting] == ["next"]

    play(story)


def test_chats_whose_last_worker_goes_wait_for_the_next_one_within_their_patience() -> None:
    async def story(stage: Stage) -> None:
        stream = await stage.submit(now(stage))
        stage.beating.cancel()
        await stage.registry.withdraw("w")
        await stage.clock.sleep(PATIENCE_S - 3)
        assert stage.client.num_open == 1 and wanted(stage) == 1
        await stage.clock.sleep(8)
        assert [event.kind async for event in stream] == [EventKind.UNAVAILABLE]

    play(story, scales_from_zero=True)
