"""One simulated minute as text: chat in two waves over endless bulk. Any change of policy shows as a diff to read.

`TIDEGATE_UPDATE_GOLDEN=1 pytest tests/scheduler/test_golden_minute.py` writes the file anew. The engine's noise is off
and the step times are known, so that the text is the same on every machine. The two limits of a bulk tier, slots and
tokens, move together: the text shows the slots.
"""

import asyncio
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from engine.step_time.cost import StepCost
from scheduler.control.controller import SLAController
from scheduler.control.feedback import Load
from scheduler.control.knobs import Decision
from tests.scheduler.builders import make_tiers
from tests.scheduler.world import Answer, World, run_world

GOLDEN = Path(__file__).with_name("golden_minute.txt")
COST = StepCost(step_s=0.02, prefill_token_s=0.0004, attend_s=0.0, context_token_s=1e-6, decode_s=0.0006)
SLICE_S = 5
WAVES = {(10, 20): 250, (35, 50): 100}  # seconds: ms between two arrivals


def test_a_minute_goes_as_it_went() -> None:
    text = run_world(
        _minute, tiers=make_tiers(bulk={"batch_size": {"min": 1, "start": 24, "max": 64}}), cost=COST, known=COST
    )
    if os.environ.get("TIDEGATE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


async def _minute(world: World) -> str:
    decisions = _log_decisions(world.core.controller)
    bulk = [asyncio.create_task(_endless_bulk(world, i)) for i in range(48)]
    chat = asyncio.create_task(_waves(world))
    await world.clock.sleep(60)
    await chat
    lines = list(_slices(world, decisions))
    for task in bulk:
        task.cancel()
    await asyncio.gather(*bulk, return_exceptions=True)
    return "\n".join(lines) + "\n"


def _log_decisions(controller: SLAController) -> list[tuple[float, Decision]]:
    log: list[tuple[float, Decision]] = []
    update = controller.update

    def logged(load: Load, now: float) -> list[Decision]:
        made = update(load, now)
        log.extend((now, d) for d in made)
        return made

    controller.update = logged  # type: ignore[method-assign]
    return log


async def _endless_bulk(world: World, client: int) -> None:
    for i in range(1000):
        await world.ask(f"bulk-{client}-{i}", "bulk", 64 + 16 * (client % 8), 100 + client)


async def _waves(world: World) -> None:
    answers: list[asyncio.Task[Answer]] = []
    for (begin_s, end_s), gap_ms in WAVES.items():
        await world.clock.sleep(begin_s - world.clock.now())
        while world.clock.now() < end_s:
            i = len(answers)
            answers.append(asyncio.create_task(world.ask(f"chat-{i}", "realtime", 32 + 37 * i % 96, 16 + 11 * i % 32)))
            await world.clock.sleep(gap_ms / 1000)
    await asyncio.gather(*answers)


def _slices(world: World, decisions: list[tuple[float, Decision]]) -> Iterator[str]:
    yield "seconds | steps  chat tok  bulk tok  pauses | chat: first tokens, ms to them (median, worst)"
    for begin_s in range(0, 60, SLICE_S):
        end_s = begin_s + SLICE_S
        plans = [plan for now, plan in world.core.plans if begin_s <= now < end_s]
        sequences = [run.seq_id for plan in plans for run in plan.run if run.num_tokens == 1]
        chat, bulk = (sum(s.startswith(kind) for s in sequences) for kind in ("chat", "bulk"))
        pauses = sum(len(plan.preempt) for plan in plans)
        waits = sorted(
            round(1000 * a.ttft_s)
            for a in world.answers.values()
            if a.request.tier == "realtime" and a.first_token_s is not None and begin_s <= a.first_token_s < end_s
        )
        first = f"{len(waits)}, {waits[len(waits) // 2]} {waits[-1]}" if waits else "-"
        yield f"{begin_s:3}-{end_s:3} | {len(plans):5}  {chat:8}  {bulk:8}  {pauses:6} | {first}"
        made = [(now, d) for now, d in decisions if begin_s <= now < end_s and d.knob != "batch_tokens"]
        for _, run in groupby(made, key=lambda m: (m[1].tier, m[1].knob, m[1].signal)):
            moves = list(run)
            (now, first_move), last_move = moves[0], moves[-1][1]
            knob = f"{last_move.tier} {last_move.knob}"
            yield f"        {now:4.1f} {knob} {first_move.old:g} -> {last_move.new:g} ({last_move.signal})"
