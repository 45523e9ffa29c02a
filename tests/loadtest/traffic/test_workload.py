"""The laws of the generated load: lengths, shared beginnings, scaling, and the same bytes for the same seed."""

import msgspec
import numpy as np
import pytest

from loadtest.traffic.prompts import END_PROMPT_TOKEN_ID, draw_nonces, token_prompt, word_prompt
from loadtest.traffic.scenario import Lengths, Sessions, SharedPrefixes, TrafficClass, load_scenario, shipped_scenarios
from loadtest.traffic.scenario_arrivals import ClosedLoop, OpenLoop
from loadtest.traffic.workload import PlannedRequest, generator, plan_closed_loop, plan_open_loop, sample_lengths


def make_class(name: str = "chat", **changes: object) -> TrafficClass:
    fields: dict[str, object] = {
        "name": name,
        "role": "interactive",
        "arrivals": OpenLoop(rate_per_s=50),
        "prompt_tokens": Lengths(min=4, max=40, median=12, sigma=0.8),
        "output_tokens": Lengths(min=1, max=9),
    }
    return TrafficClass.model_validate(fields | changes)


SESSIONS = Sessions(
    turns_mean=5, think_s=2.0, max_tokens=4000, documents=0.05, document_tokens=Lengths(min=600, max=600)
)
EIGHT = SharedPrefixes(count=8, tokens=Lengths(min=50, max=90))


def make_agents() -> TrafficClass:
    return make_class("agents", arrivals=OpenLoop(rate_per_s=4), sessions=SESSIONS, prefixes=EIGHT)


def test_lognormal_lengths_have_their_median_and_sigma() -> None:
    drawn = sample_lengths(Lengths(min=1, max=10**6, median=760, sigma=0.99), 20_000, generator(1))
    assert np.median(drawn) == pytest.approx(760, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.99, rel=0.03)


def test_the_same_seed_plans_the_same_bytes() -> None:
    def plan(seed: int, round_: int) -> bytes:
        return msgspec.json.encode(plan_open_loop(make_class(), 5.0, seed, round_))

    assert plan(1, 0) == plan(1, 0)
    assert len({plan(1, 0), plan(2, 0), plan(1, 1)}) == 3


def test_classes_draw_independently() -> None:
    first = plan_open_loop(make_class("a"), 5.0, 1, 0)
    second = plan_open_loop(make_class("b"), 5.0, 1, 0)
    assert [p.at_s for p in first] != [p.at_s for p in second]


def test_a_closed_loop_never_ends_and_never_repeats_a_request() -> None:
    plan = plan_closed_loop(make_class(arrivals=ClosedLoop(streams=2)), seed=1, round_=0)
    drawn = [next(plan) for _ in range(600)]
    assert [p.index for p in drawn] == list(range(600))
    assert len({p.prompt_seed for p in drawn}) > 590


def test_a_closed_loop_has_no_arrival_times() -> None:
    with pytest.raises(TypeError, match="closed loop"):
        plan_open_loop(make_class(arrivals=ClosedLoop(streams=2)), 5.0, 1, 0)


def test_prompts_have_their_length_and_small_ids() -> None:
    for planned in plan_open_loop(make_class(), 1.0, 1, 0):
        ids = token_prompt(planned)
        assert len(ids) == planned.prompt_tokens == len(word_prompt(planned).split())
        assert min(ids) > 0 and max(ids) < END_PROMPT_TOKEN_ID
        assert ids == token_prompt(planned)


def test_nonces_differ_from_each_other_and_between_seeds() -> None:
    nonces = draw_nonces(500, seed=1)
    assert len(set(nonces)) == 500
    assert not set(nonces) & set(draw_nonces(500, seed=2))


@pytest.mark.parametrize("factor", [0.3, 1.7, 3.0])
def test_load_is_scaled_by_thinning_and_by_adding_clients(factor: float) -> None:
    """Common requests: what a smaller load sends, a larger one sends too, at the same times."""
    one = plan_open_loop(make_class(), 40.0, 1, 0)
    scaled = plan_open_loop(make_class().with_load_scaled(factor), 40.0, 1, 0)
    assert len(scaled) == pytest.approx(factor * len(one), rel=0.1)
    seeds = {p.prompt_seed: p.at_s for p in scaled}
    common = [p for p in one if p.prompt_seed in seeds]
    assert len(common) == pytest.approx(min(factor, 1.0) * len(one), rel=0.1)
    assert all(seeds[p.prompt_seed] == p.at_s for p in common)


def test_each_prompt_begins_with_one_of_the_shared_prefixes() -> None:
    traffic = make_class(prefixes=SharedPrefixes(count=57, tokens=Lengths(min=20, max=60)))
    planned = plan_open_loop(traffic, 20.0, 1, 0)
    by_prefix: dict[int | None, list[PlannedRequest]] = {}
    for p in planned:
        by_prefix.setdefault(p.prefix_id, []).append(p)
    assert len(by_prefix) == 57 and None not in by_prefix
    for group in by_prefix.values():
        length = group[0].prefix_tokens
        prompts = [token_prompt(p) for p in group]
        assert 20 <= length <= 60 and len({tuple(ids[:length]) for ids in prompts}) == 1
        assert len({tuple(ids[length:]) for ids in prompts}) == len(prompts)


def sessions_of(planned: list[PlannedRequest]) -> list[list[PlannedRequest]]:
    """Turns by session: a turn's prefix goes on where the prompt of the turn before ended."""
    ends: dict[tuple[object, ...], list[PlannedRequest]] = {}
    for p in planned:
        session = ends.pop(p.prefix[:-1], [])  # all but the answer
        ends[p.segments] = [*session, p]
    return list(ends.values())


def test_a_session_keeps_its_history_and_has_geometric_turns() -> None:
    sessions = sessions_of(plan_open_loop(make_agents(), 400.0, 1, 0))
    assert len(sessions) == pytest.approx(1600, rel=0.1)
    assert {s[0].prefix_id for s in sessions} == {p.prefix_id for s in sessions for p in s if len(p.prefix) == 1}
    whole = [s for s in sessions if s[0].at_s < 340]  # not cut by the end
    turns = np.array([len(s) for s in whole])
    assert turns.mean() == pytest.approx(5, rel=0.1)
    assert (turns == 1).mean() == pytest.approx(0.2, abs=0.04)
    longest = max(whole, key=len)
    for before, after in zip(longest, longest[1:], strict=False):
        ids = token_prompt(before)
        assert token_prompt(after)[: len(ids)] == ids and after.at_s > before.at_s
        assert after.prefix_tokens == before.prompt_tokens + before.output_tokens


@pytest.mark.parametrize("name", [n for n in shipped_scenarios() if load_scenario(n, needed=()).context])
def test_lengths_scaled_to_a_model_fit_its_context(name: str) -> None:
    scenario = load_scenario(name, needed=())
    scaled = scenario.with_lengths_scaled(scenario.scale_for(1024))
    assert scenario.context and scaled.context == min(1024, scenario.context)
    for traffic in scaled.classes.values():
        if isinstance(traffic.arrivals, OpenLoop):
            planned = plan_open_loop(traffic, min(200.0, 2000 / traffic.arrivals.mean_rate_per_s), 1, 0)
        else:
            plan = plan_closed_loop(traffic, 1, 0)
            planned = [next(plan) for _ in range(500)]
        assert max(p.prompt_tokens + p.output_tokens for p in planned) <= 1024
