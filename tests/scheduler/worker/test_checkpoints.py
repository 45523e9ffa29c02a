"""Checkpoints are few and small: by time, by tokens gained, and by the bytes of one write."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from scheduler.queue.memory import MemoryQueue
from scheduler.request import Checkpoint, Delivery
from scheduler.request_state import RequestState
from scheduler.store.errors import StoreRefused
from scheduler.store.outage import StoreOutage
from scheduler.virtual_time import VirtualClock
from scheduler.worker import checkpoints
from scheduler.worker.checkpoints import CHECKPOINT_S, MIN_TOKENS, Checkpointer
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.world import played_by, run_bounded

TIERS = make_tiers()


class Rig:
    """A checkpointer with a core that only has states, and a queue that keeps what is written."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.states: list[RequestState] = []
        self.writes: list[dict[str, tuple[int, int]]] = []  # of each write: index and number of tokens, by request
        self.refuses = False
        self._queue = MemoryQueue(self.clock, "w")
        queue: Any = self
        core: Any = self
        self.checkpointer = Checkpointer(core, queue, StoreOutage(), self.clock)

    def can_continue(self, state: RequestState) -> bool:
        return state.can_continue

    async def checkpoint(self, written: Sequence[Checkpoint]) -> list[int]:
        if self.refuses:
            raise StoreRefused("its disk is full")
        if written:
            self.writes.append({c.lease.request_id: (c.index, len(c.token_ids)) for c in written})
        return await self._queue.checkpoint(written)

    async def hold(self, request_id: str, tier: str = "batch", output: int = 0, **more: Any) -> RequestState:
        more.setdefault("delivery", Delivery.AT_END)
        await self._queue.put([make_request(request_id, tier, **more)])
        [claimed] = await self._queue.claim({tier: 1}, 60.0)
        state = RequestState(claimed.request, TIERS[tier], claimed.fence, 0.0, 0.0)
        state.output_token_ids += [7] * output
        self.states.append(state)
        return state

    def stored(self, state: RequestState) -> tuple[int, ...]:
        return self._queue._shared.outputs[state.id].token_ids

    def forget(self, state: RequestState) -> None:
        del self._queue._shared.outputs[state.id]


def play(story: Any) -> None:
    async def main() -> None:
        rig = Rig()
        running = asyncio.create_task(rig.checkpointer.run())
        await story(rig)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_bounded(main())


@played_by(play)
async def test_only_the_new_tokens_are_written_and_never_more_often_than_the_period(rig: Rig) -> None:
    state = await rig.hold("r")
    await rig.clock.sleep(CHECKPOINT_S / 40)  # so that no token comes at the same time as a write
    for _ in range(50):
        state.output_token_ids += [5] * 10
        await rig.clock.sleep(CHECKPOINT_S / 20)
    assert rig.writes == [{"r": (0, 200)}, {"r": (200, 200)}]


@played_by(play)
async def test_a_request_with_few_new_tokens_is_left_out(rig: Rig) -> None:
    await rig.hold("few", output=MIN_TOKENS - 1)
    await rig.hold("many", output=MIN_TOKENS)
    await rig.clock.sleep(3 * CHECKPOINT_S)
    assert rig.writes == [{"many": (0, MIN_TOKENS)}]


@played_by(play)
async def test_interactive_requests_streams_and_requests_with_log_probabilities_are_left_out(rig: Rig) -> None:
    await rig.hold("chat", "realtime", output=99)
    await rig.hold("scored", output=99, logprobs=1)
    await rig.hold("scored-prompt", output=99, prompt_logprobs=0)
    await rig.clock.sleep(3 * CHECKPOINT_S)
    await rig.hold("stream", output=99, delivery=Delivery.EACH_STEP)
    await rig.clock.sleep(3 * CHECKPOINT_S)
    assert rig.writes == []
    await rig.checkpointer.save_all()
    assert rig.writes == [{"chat": (0, 99), "stream": (0, 99)}], "a worker that ends gives them back, too"


@played_by(play)
async def test_one_write_has_a_bounded_size_and_the_longest_waiting_go_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MAX_TOKENS", 250)
    for name, output in (("a", 100), ("b", 140), ("c", 120)):
        await rig.hold(name, output=output)
    await rig.clock.sleep(1.5 * CHECKPOINT_S)
    assert rig.writes == [{"b": (0, 140), "a": (0, 100)}]
    await rig.clock.sleep(CHECKPOINT_S)
    assert rig.writes[1:] == [{"c": (0, 120)}]


@played_by(play)
async def test_what_the_store_has_lost_is_written_again_from_the_beginning(rig: Rig) -> None:
    state = await rig.hold("r", output=100)
    await rig.clock.sleep(1.5 * CHECKPOINT_S)
    rig.forget(state)
    for _ in range(2):
        state.output_token_ids += [5] * 50
        await rig.clock.sleep(CHECKPOINT_S)
    assert rig.writes == [{"r": (0, 100)}, {"r": (100, 50)}, {"r": (0, 200)}]
    assert rig.stored(state) == (7,) * 100 + (5,) * 100


@played_by(play)
async def test_what_the_store_refuses_is_written_later(rig: Rig) -> None:
    state = await rig.hold("r", output=100)
    rig.refuses = True
    await rig.clock.sleep(1.5 * CHECKPOINT_S)
    rig.refuses = False
    await rig.clock.sleep(CHECKPOINT_S)
    assert rig.stored(state) == (7,) * 100
