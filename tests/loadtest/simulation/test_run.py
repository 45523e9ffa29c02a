"""Whole runs: to the byte the same for a seed, nothing lost, and what the clients see is what the parts did."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.interface import PlanError, StepResult
from loadtest.reporting.writers import render_text, write_json
from loadtest.simulation.clients import TIMED_OUT
from loadtest.simulation.experiment import Experiment
from loadtest.simulation.observation import Observation
from loadtest.simulation.report import simulation_record
from loadtest.simulation.traffic import TraceRow
from loadtest.simulation.watched import WatchedEngine
from tests.loadtest.simulation.builders import COEFFICIENTS, make_card, make_scenario, make_tiers, run_scenario


def make_trace(
    count: int, gap_s: float, *, tier: str = "default", prompt: int = 64, output: int = 4
) -> Sequence[TraceRow]:
    row = {"tier": tier, "prompt_tokens": prompt, "output_tokens": output}
    return tuple(TraceRow.model_validate({"arrival_s": i * gap_s, **row}) for i in range(count))


def make_experiment(trace: Sequence[TraceRow], duration_s: float = 20.0, **more: object) -> Experiment:
    known: dict[str, object] = {"tiers": make_tiers(), "card": make_card(), "duration_s": duration_s}
    return Experiment(trace=tuple(trace), **{**known, **more})  # type: ignore[arg-type]


def report(tmp_path: Path, seed: int) -> tuple[str, bytes]:
    experiment = Experiment(make_tiers(), make_card(), 6.0, scenario="chat-and-bulk", seed=seed)
    summary, observation = experiment.run()
    record = simulation_record("run", summary, experiment.card, observation, {"seed": seed})
    write_json(tmp_path / f"{seed}.json", record)
    return render_text(record), (tmp_path / f"{seed}.json").read_bytes()


def test_the_same_seed_is_the_same_report_and_another_is_another(tmp_path: Path) -> None:
    first, again, other = report(tmp_path, 1), report(tmp_path, 1), report(tmp_path, 2)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_an_idle_engine_answers_in_the_time_of_its_steps() -> None:
    card = make_card(noise=0.0)
    summary, observation = make_experiment(make_trace(10, 1.0), card=card).run()
    first_s = 0.02 + 64 * 0.0005 + 1e-8 * 64 * 32  # one prefill step
    for record in observation.requests:
        assert record.ttft_s == pytest.approx(first_s, abs=1e-4)
    assert summary.classes[0].done == 10
    assert summary.engines.busy_share == pytest.approx(10 * (first_s + 3 * 0.0211) / 20, rel=0.01)


def test_the_hosts_time_between_steps_is_not_the_engines() -> None:
    slow, fast = (
        make_experiment(make_trace(8, 2.0), card=make_card(noise=0.0, host_overhead_s=s)) for s in (0.05, 0.0)
    )
    (slow_summary, _), (fast_summary, _) = slow.run(), fast.run()
    assert slow_summary.engines.busy_share == pytest.approx(fast_summary.engines.busy_share, rel=1e-6)
    slow_s, fast_s = slow_summary.classes[0].e2e.p50, fast_summary.classes[0].e2e.p50
    assert slow_s is not None and fast_s is not None
    assert slow_s - fast_s == pytest.approx(4 * 0.05, abs=1e-4), "once a step"


def test_the_hosts_time_is_hidden_where_steps_are_planned_ahead() -> None:
    """Each answer of 4 tokens ends with a step after which there is nothing to plan."""
    cards = [make_card(noise=0.0, host_overhead_s=s, steps_ahead=1, suspends_steps=False) for s in (0.05, 0.0)]
    (slow, _), (fast, _) = (make_experiment(make_trace(8, 2.0), card=card).run() for card in cards)
    slow_s, fast_s = slow.classes[0].e2e.p50, fast.classes[0].e2e.p50
    assert slow_s is not None and fast_s is not None
    assert slow_s - fast_s == pytest.approx(0.05, abs=1e-4)


def test_two_workers_share_one_queue() -> None:
    """Work for one worker and a third: one falls further and further behind, two have time left."""
    trace = make_trace(160, 0.125, prompt=256, output=2)
    tiers = make_tiers(realtime={"admission": {"patience_ms": None}})  # all shall wait, however long
    one, two = (make_experiment(trace, workers=n, tiers=tiers).run()[0] for n in (1, 2))
    assert one.engines.busy_share > 0.95 and 0.6 < two.engines.busy_share < 0.9
    assert two.classes[0].done == 160
    one_s, two_s = one.classes[0].ttft.p50, two.classes[0].ttft.p50
    assert one_s is not None and two_s is not None and two_s < one_s / 4


def test_batches_of_an_engine_that_takes_fixed_ones_are_full_under_a_flood() -> None:
    """A call takes the same time with one request as with sixteen, so the next batch must be there when it ends."""
    fixed = {**dict.fromkeys(COEFFICIENTS, 0.0), "step_s": 0.1}
    card = make_card(decode=fixed, mixed=fixed, max_step_tokens=16 * 32)
    size = {"min": 16, "start": 16, "max": 16}
    tokens = {"min": 512, "start": 512, "max": 512}
    tiers = make_tiers(realtime={"batch_size": size, "batch_tokens": tokens, "queue_limit": 10_000})
    trace = make_trace(1500, 1 / 300, prompt=32, output=1)  # 94 % of what two engines carry
    summary, _ = make_experiment(trace, 5.0, card=card, tiers=tiers, workers=2).run()
    assert summary.classes[0].done == 1500
    assert summary.engines.sequences_per_step > 13


def test_a_full_queue_refuses_and_the_refused_are_counted() -> None:
    tiers = make_tiers(realtime={"queue_limit": 5, "admission": {"patience_ms": None}})
    summary, _ = make_experiment(make_trace(300, 0.01, prompt=512), tiers=tiers).run()
    (chat,) = summary.classes
    assert set(chat.rejected) == {"queue_full"} and chat.done > 5
    assert chat.offered == 300 == chat.done + sum(chat.rejected.values())


def test_what_no_tier_takes_is_refused_as_its_own_tier_says() -> None:
    """As the gateway does: nobody is demoted twice, and whoever comes back asks for the tier that was asked for."""
    admission = {"predict": True, "demote_to": "bulk"}
    tiers = make_tiers(realtime={"admission": admission}, bulk={"queue_limit": 1})
    summary, observation = make_experiment(make_trace(300, 0.01, prompt=512), tiers=tiers).run()
    (chat,) = summary.classes
    assert set(chat.rejected) == {"overloaded"} and chat.demoted > 0
    assert {r.served_tier for r in observation.requests if r.rejected} == {"realtime"}


def test_patience_ends_where_the_tier_says() -> None:
    tiers = make_tiers(realtime={"timeout_ms": 2000, "admission": {"patience_ms": None}})
    summary, observation = make_experiment(make_trace(200, 0.01, prompt=512), tiers=tiers).run()
    timed_out = [r for r in observation.requests if r.failed == TIMED_OUT]
    answered = [r.ttft_s for r in observation.requests if r.is_done and r.ttft_s is not None]
    assert summary.classes[0].failed == {TIMED_OUT: len(timed_out)} == {TIMED_OUT: 200 - len(answered)}
    assert all(r.first_token_s is None or r.output_tokens < 4 for r in timed_out)
    assert answered and max(answered) <= 2.0


def test_prompts_that_share_a_prefix_are_computed_once() -> None:
    plain = make_trace(20, 0.5, prompt=512, output=2)
    shared = [row.model_copy(update={"prefix_id": "system", "prefix_tokens": 480}) for row in plain]
    without, with_prefix = (make_experiment(rows).run()[0] for rows in (plain, shared))
    assert with_prefix.engines.busy_share < 0.6 * without.engines.busy_share


def test_a_drift_slows_the_second_half_down() -> None:
    experiment = make_experiment(make_trace(40, 0.5, prompt=48), card=make_card(noise=0.0))
    even, drifted = experiment.run()[1], replace(experiment, drift=2.0).run()[1]

    def busy(observation: Observation, half: int) -> float:
        return sum(m.busy_share for m in observation.moments[10 * half : 10 * half + 10])

    assert busy(drifted, 0) == pytest.approx(busy(even, 0), rel=0.05)
    assert busy(drifted, 1) == pytest.approx(2 * busy(even, 1), rel=0.1)


def test_a_closed_loop_of_chats_keeps_its_streams_in_flight_and_finishes_its_last_requests() -> None:
    tiers = make_tiers(realtime={"admission": {"predict": False}})
    experiment = Experiment(tiers, make_card(), 20.0, scenario="saturation", rate=0.25)
    summary, observation = experiment.run()
    (chat,) = summary.classes
    assert chat.done == chat.offered > 40
    last_s = max(r.arrived_s for r in observation.requests)
    ended_s = sorted(r.ended_s for r in observation.requests if r.ended_s is not None)
    assert last_s <= 20.0 < ended_s[-8], "those in flight at the end of the load are answered"
    assert all(m.tiers["realtime"].held + m.tiers["realtime"].queued <= 8 for m in observation.moments)
    assert {r.tier for r in replace(experiment, service_tier="flex").run()[1].requests} == {"bulk"}


def test_arrivals_gathered_into_one_put_are_as_old_as_they_are() -> None:
    """Two or three a tenth of a second: 60 ms in the middle, and then a step of all of them."""
    trace, card = make_trace(100, 0.04, prompt=16, output=1), make_card(noise=0.0)
    alone, gathered = (make_experiment(trace, card=card, gather_s=s).run()[0] for s in (0.0, 0.1))
    assert (alone.classes[0].done, alone.engines.steps) == (100, 100)
    assert (gathered.classes[0].done, gathered.engines.steps) == (100, 40)
    alone_s, gathered_s = alone.classes[0].ttft.p50, gathered.classes[0].ttft.p50
    assert alone_s is not None and gathered_s is not None
    assert gathered_s - alone_s == pytest.approx(0.06 + 1.5 * 16 * 0.0005, abs=0.005), "they wait for each other"


def test_a_worker_that_dies_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = WatchedEngine.collect
    steps = iter(range(400))

    async def breaks(engine: WatchedEngine) -> StepResult:
        if next(steps) == 300:
            raise PlanError("broken on purpose")
        return await collect(engine)

    monkeypatch.setattr(WatchedEngine, "collect", breaks)
    with pytest.raises(PlanError, match="on purpose"):
        run_scenario(make_scenario(), 30.0)
