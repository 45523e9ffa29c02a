"""From outcomes and metrics to the numbers of an arm, and from these to goals: against parts whose truth is known."""

import pytest

from bench.isolation.arms import BULK_ALONE, FIRST_COME, OURS, OURS_ALONE, STRICT, Arm, ArmBuilder, read_shipped_tiers
from bench.isolation.controls import Evidence, controls_of
from bench.isolation.experiments import EXPERIMENTS, ExperimentName
from bench.isolation.goals import Goal, judge
from bench.isolation.results.result import requests_of
from bench.isolation.rounds import Part, Rounds
from bench.isolation.summary import ArmSummary, summarize_arms
from loadtest.estimates import Estimate
from loadtest.traffic.scenario import Targets
from tests.bench.isolation.builders import SCENARIO, answered, make_part

SLOS = {"chat": Targets(ttft_ms=100, itl_ms=50)}
BUILDER = ArmBuilder(read_shipped_tiers(), Targets())
SCRAPES = [
    'tidegate_step_seconds_sum {busy}\ntidegate_reaction_steps_bucket{{tier="realtime",le="1.0"}} 0\n'
    'tidegate_reaction_steps_bucket{{tier="realtime",le="+Inf"}} 0\ntidegate_dropped_step_seconds_total 0',
    'tidegate_step_seconds_sum {busy}\ntidegate_reaction_steps_bucket{{tier="realtime",le="1.0"}} {calls}\n'
    'tidegate_reaction_steps_bucket{{tier="realtime",le="+Inf"}} {calls}\ntidegate_dropped_step_seconds_total 0.05\n'
    'tidegate_num_preemptions_total{{tier="bulk",mode="pause"}} 4\ntidegate_step_time_error_ratio 0.03\n'
    'tidegate_engine_seconds_total{{tier="bulk"}} 2.45\ntidegate_engine_seconds_total{{tier="realtime"}} 7',
]


def arm(name: str) -> Arm:
    return BUILDER.build(name)


def part_of(name: str, ttft_s: float, bulk_tokens: int, busy_s: float, missing: int = 0) -> Part:
    """20 chats, `missing` of which come too late, beside bulk that gets `bulk_tokens` within the part."""
    chat = [answered("chat", 0.4 * i, 1.0 if i < missing else ttft_s + 0.0001 * i, (0.02, 0.03)) for i in range(20)]
    bulk = [answered("backlog", 0.0, 5.0, tokens=bulk_tokens)]
    scrapes = [SCRAPES[0].format(busy=0.0), SCRAPES[1].format(busy=busy_s, calls=100)]
    return make_part(arm(name), chat, bulk, scrapes)


def make_arms() -> dict[str, ArmSummary]:
    rounds = Rounds()
    for part in (
        part_of(OURS_ALONE, 0.040, 0, 2.0),
        part_of(BULK_ALONE, 0.0, 1000, 10.0),
        part_of(FIRST_COME, 0.090, 900, 9.0, missing=15),
        part_of(STRICT, 0.060, 850, 9.0, missing=10),
        part_of(OURS, 0.042, 720, 9.5),
    ):
        rounds.add(part)
    return summarize_arms(rounds, SCENARIO, SLOS)


def test_an_arm_is_summed_up_over_its_classes_and_from_the_servers_metrics() -> None:
    ours = make_arms()[OURS]
    assert (ours.total.offered, ours.total.met, ours.met_per_s) == (20, 20, 2.0)
    assert ours.bulk_tokens_per_s == 72.0 and ours.ttft.samples.min() == pytest.approx(0.042)
    engine = ours.engine
    assert engine.busy_share == pytest.approx(0.95)
    assert engine.wasted_share == pytest.approx(0.05 / (2.45 + 0.05))  # of what bulk had, not of all
    assert engine.preemptions == {"pause": 4, "swap": 0, "recompute": 0} and engine.step_time_error == 0.03
    assert engine.reaction_p99 == pytest.approx(0.99) and engine.moves is None


@pytest.mark.parametrize("experiment", list(EXPERIMENTS))
def test_every_experiment_shows_all_goals_and_says_where_the_others_are_measured(experiment: ExperimentName) -> None:
    goals, _ = judge(Evidence(experiment, {}))
    assert len(goals) == len({g.name for g in goals}) == 17
    assert {g.verdict for g in goals} == {"not measured"}
    elsewhere = {g.name: g.note for g in goals if g.note.startswith("--experiment")}
    assert not any(experiment in note for note in elsewhere.values())
    expected = {"isolation": 4, "overload": 2, "deadlines": 1, "frontier": 5}
    assert len(elsewhere) == sum(expected.values()) - expected[experiment]
    assert "bench simulator-accuracy" in goals[-1].note


def test_what_the_load_was_is_said_beside_the_goals() -> None:
    given = judge(Evidence("isolation", make_arms()))[0]
    assert "was not measured" in given[0].note
    heavier = judge(Evidence("isolation", make_arms(), solo_load=0.8))[0]
    assert "at 0.8 of the solo goodput" in heavier[0].note


@pytest.mark.parametrize(
    ("measured", "higher", "verdict"),
    [
        (1.0, False, "goal"),
        (1.2, False, "target"),
        (1.4, False, "missed"),
        (Estimate(1.2, 0.9, 2.0), False, "target"),
        (None, False, "not measured"),
    ],
)
def test_a_goal_is_judged_in_its_direction(measured: Estimate | float | None, higher: bool, verdict: str) -> None:
    assert Goal("x", 1.3, 1.15, measured, higher).verdict == verdict
    if isinstance(measured, float):
        assert Goal("x", -1.3, -1.15, -measured, True).verdict == verdict


def test_the_negative_control_must_fail() -> None:
    arms = make_arms()
    assert [c.failed for c in controls_of(Evidence("isolation", arms))] == [True]
    # an arm alone in the place of the mixed one: there is nothing to compare
    assert [c.failed for c in controls_of(Evidence("isolation", {**arms, FIRST_COME: arms[OURS_ALONE]}))] == [None]
    assert [c.failed for c in controls_of(Evidence("isolation", {}))] == [None]
    assert controls_of(Evidence("overload", arms)) == []


def test_a_goal_does_not_count_where_its_control_did_not_fail() -> None:
    arms = make_arms()
    harmless = summarize_arms(Rounds({FIRST_COME: [part_of(FIRST_COME, 0.041, 900, 9.0)]}), SCENARIO, SLOS)
    goals, controls = judge(Evidence("isolation", {**arms, **harmless}, solo_load=0.5))
    assert [c.failed for c in controls] == [False]
    verdicts = {g.name: g.verdict for g in goals}
    assert verdicts["isolation: TTFT p50, mixed ÷ alone"] == "does not count"
    assert verdicts["interactive SLO attainment, mixed"] == "goal"


def test_overload_has_goals_of_its_own() -> None:
    overload = {g.name: g for g in judge(Evidence("overload", make_arms(), 0.5, 3.0, 60.0, top_class="chat"))[0]}
    top, everyone = (g for name, g in overload.items() if name.startswith("1.5× overload"))
    assert (top.value, top.verdict, everyone.value, everyone.verdict) == (0.0, "goal", 0.0, "goal")
    assert "at 1.5 × the solo goodput for 60 s" in top.note
    absent = [g for g in judge(Evidence("overload", make_arms(), top_class="absent"))[0] if "top tier" in g.name]
    assert [g.verdict for g in absent] == ["not measured"]


def test_the_list_of_requests_says_of_each_what_a_simulation_needs() -> None:
    rounds = Rounds()
    rounds.add(part_of(OURS, 0.042, 720, 9.5, missing=1))
    requests = requests_of(rounds, SLOS)
    assert len(requests) == 21
    chats = [r for r in requests if r["class"] == "chat"]
    assert [r["met"] for r in chats] == [False] + [True] * 19
    last = chats[-1]
    assert last["arrival_s"] == pytest.approx(7.6) and last["ttft_s"] == pytest.approx(0.0439)
    assert last["gaps_s"]["max"] == pytest.approx(0.03) and last["output_tokens"] == 3
    assert (last["arm"], last["round"], last["tier"]) == (OURS, 0, "default")
