"""The index of the request table follows each state, and a plan does not cost more when more requests are idle."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from engine.interface import EngineInfo
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.holdings.request_table import RequestTable
from scheduler.request import Claimed
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import make_decode, make_request, make_state, make_table, make_tiers

TIERS = make_tiers()


def ids(states: Any) -> list[str]:
    return [state.id for state in states]


def test_each_state_is_indexed_by_its_status() -> None:
    table = RequestTable(TIERS.by_priority)
    states = [
        make_state("waits", deadline_ms=5),
        make_state("waits less", deadline_ms=4),
        make_state("preempted", status=Status.PREEMPTED, deadline_ms=9),
        make_state("half done", status=Status.RUNNING, prompt=40, computed=16),
        make_decode("decodes", "realtime"),
    ]
    for state in states:
        table.update(state)
    assert ids(table.waiting("realtime")) == ["waits less", "waits"]
    assert ids(table.preempted("realtime")) == ["preempted"]
    assert ids(table.prefills("realtime")) == ids(table.reserved()) == ["half done"]
    assert ids(table.decodes("realtime")) == ["decodes"]
    assert (table.count("realtime"), table.num_resident("realtime"), table.num_waiting("realtime")) == (5, 2, 2)
    assert table.count("bulk") == 0


def test_decodes_that_ran_go_behind_decodes_that_sat_out() -> None:
    table = make_table(TIERS, [make_decode(name, "realtime") for name in "abcd"])
    table.note_run(["a", "c"])
    assert ids(table.decodes("realtime")) == ["b", "d", "a", "c"]
    table.note_run(["b"])
    assert ids(table.decodes("realtime")) == ["d", "a", "c", "b"]
    assert ids(table.last_run("realtime")) == ["b"]


def test_a_reload_recomputes_whose_preemptions_are_exhausted() -> None:
    """Without this, a sequence that must keep its blocks has no room to grow, or another reserves room in vain."""
    once = make_decode("once")
    once.num_preemptions = 1
    table = make_table(TIERS, [once])
    for most, exhausted in ((1, ["once"]), (2, [])):
        table.reconfigure(make_tiers(bulk={"retry": {"max_preemptions": most}}).tiers)
        assert ids(table.reserved()) == exhausted
        assert once.tier.retry.max_preemptions == most


@pytest.mark.parametrize("seed", range(5))
def test_many_updates_give_the_same_index_as_one(seed: int) -> None:
    """After any changes the table equals a new one of the same states, except for the order of the decodes' turns."""
    rng = random.Random(seed)
    states = [make_state(f"s{i}", rng.choice(["realtime", "bulk"]), prompt=20, deadline_ms=i % 7) for i in range(30)]
    table, held = RequestTable(TIERS.by_priority), dict[str, RequestState]()
    for _ in range(400):
        state = rng.choice(states)
        if state.id in held and rng.random() < 0.1:
            table.remove(held.pop(state.id))
        else:
            _change(state, rng)
            held[state.id] = state
            table.update(state)
        fresh = make_table(TIERS, held.values())
        for tier in ("realtime", "bulk"):
            assert sorted(ids(table.decodes(tier))) == sorted(ids(fresh.decodes(tier)))
            for look in ("prefills", "preempted", "waiting"):
                assert ids(getattr(table, look)(tier)) == ids(getattr(fresh, look)(tier))
        assert sorted(ids(table.reserved())) == sorted(ids(fresh.reserved()))


def _change(state: RequestState, rng: random.Random) -> None:
    if state.status is Status.WAITING:
        state.move(Status.RUNNING)
    elif state.is_resident and rng.random() < 0.3:
        state.lose_blocks(Status.PREEMPTED)
    elif state.is_resident:
        state.num_computed_tokens = state.num_tokens
        state.output_token_ids.append(1)
    else:
        state.move(Status.RUNNING)


def test_a_plan_costs_the_same_beside_ten_and_ten_thousand_idle_requests() -> None:
    few, many = (_calls_of_a_plan(num_idle) for num_idle in (10, 10_000))
    assert many < 1.3 * few


def _calls_of_a_plan(num_idle: int) -> int:
    """Count the function calls that planning an interactive prefill takes beside `num_idle` waiting bulk requests."""
    info = EngineInfo("m", 512, 100, block_size=16, num_blocks=50_000, max_step_tokens=512)
    core = StepCore(TIERS, info, SLAController(TIERS, info.num_layers, suspends_steps=info.suspends_steps))
    idle = [make_request(f"b{i}", "bulk", prompt=32) for i in range(num_idle)]
    chat = [make_request(f"c{i}", "realtime", prompt=32) for i in range(4)]
    core.held.accept([Claimed(request, 1) for request in (*idle, *chat)], 0.0, 0)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        core.claim_limits(1.0)
        plan = core.plan(1.0)
    finally:
        sys.setprofile(None)
    assert {run.seq_id for run in plan.run} == {request.id for request in chat}
    return calls
