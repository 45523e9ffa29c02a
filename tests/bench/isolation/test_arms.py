"""The arms' files are valid tiers, lack the mechanism that they should lack, and follow the command's flags."""

from importlib.resources import files

import pytest

from bench.isolation.arms import (
    BULK_ALONE,
    FIRST_COME,
    OURS,
    OURS_ALONE,
    OWN_ARMS,
    PEER,
    PEER_ALONE,
    PEER_BULK,
    STRICT,
    TITLES,
    ArmBuilder,
    read_arm_file,
    read_shipped_tiers,
)
from bench.isolation.slos import premium_ttft_ms, slos_by_class, targets_of
from loadtest.traffic.scenario import Targets, load_scenario
from scheduler.config import TierSet, parse_tiers

ARM_FILES = sorted(f.name.removesuffix(".yaml") for f in (files("bench") / "isolation" / "arms").iterdir())
BUILDER = ArmBuilder(read_shipped_tiers(), Targets(ttft_ms=123, itl_ms=45))


def tiers_of(name: str, builder: ArmBuilder = BUILDER) -> TierSet:
    return parse_tiers(builder.build(name).tiers)


@pytest.mark.parametrize("name", ARM_FILES)
def test_every_arms_file_has_the_tiers_of_the_product(name: str) -> None:
    """Otherwise a switch of arms would strand waiting requests."""
    tiers, ours = parse_tiers(read_arm_file(name), name), parse_tiers(read_shipped_tiers())
    assert set(tiers.tiers) == set(ours.tiers)
    asked = {s for tier in ours.tiers.values() for s in tier.service_tiers}
    assert {s for tier in tiers.tiers.values() for s in tier.service_tiers} == asked


@pytest.mark.parametrize("name", [BULK_ALONE, FIRST_COME, STRICT])
def test_arms_without_a_controller_have_it_switched_off_and_slos_that_never_bind(name: str) -> None:
    tiers = tiers_of(name)
    switches = tiers.controller
    assert not (switches.feed_forward or switches.feedback or switches.suspend)
    assert all(t.slo.ttft_p99_ms in (None, 3_600_000) and t.slo.itl_p99_ms is None for t in tiers.tiers.values())
    realtime = tiers.for_service_tier("default")
    assert realtime is not None and realtime.pinned.batch_size == realtime.batch_size.max


@pytest.mark.parametrize("name", [OURS, OURS_ALONE])
def test_ours_is_the_shipped_file_with_the_commands_slo(name: str) -> None:
    tiers, shipped = tiers_of(name), parse_tiers(read_shipped_tiers())
    assert tiers["realtime"].slo.ttft_p99_ms == 123
    assert tiers["realtime"].model_copy(update={"slo": shipped["realtime"].slo}) == shipped["realtime"]
    assert tiers["bulk"] == shipped["bulk"] and tiers.controller == shipped.controller


def test_arms_come_in_the_order_of_the_report_with_their_traffic() -> None:
    arms = BUILDER.build_all([PEER, OURS, PEER_BULK, *OWN_ARMS, PEER_ALONE])
    assert [arm.name for arm in arms] == list(TITLES)
    roles = {arm.name: arm.roles for arm in arms}
    assert roles[OURS_ALONE] == roles[PEER_ALONE] == ("interactive",)
    assert roles[BULK_ALONE] == roles[PEER_BULK] == ("bulk",)
    assert [arm.name for arm in arms if arm.is_peer] == [PEER_ALONE, PEER_BULK, PEER]
    assert {arm.alone for arm in arms if arm.is_peer} == {PEER_ALONE}


def test_the_flags_slo_goes_before_the_scenarios_and_that_before_the_tiers() -> None:
    tiers, chat = tiers_of(OURS, ArmBuilder(read_shipped_tiers(), Targets())), load_scenario("w1-chat").classes["chat"]
    slo = tiers["realtime"].slo
    assert targets_of(chat, tiers, Targets()).ttft_ms == slo.ttft_p99_ms
    own = chat.model_copy(update={"targets": Targets(ttft_ms=77, e2e_ms=999)})
    assert targets_of(own, tiers, Targets()) == Targets(ttft_ms=77, itl_ms=slo.itl_p99_ms, e2e_ms=999)
    assert targets_of(own, tiers, Targets(ttft_ms=5)).ttft_ms == 5


def test_a_premium_tier_is_told_what_its_classes_are_judged_by() -> None:
    """The SLO may come from the command, the scenario, or the tiers."""
    ours, named = read_shipped_tiers(), load_scenario("w3-square")
    classes = {n: c.model_copy(update={"targets": Targets()}) for n, c in named.classes.items()}
    unnamed = named.model_copy(update={"classes": classes})
    base_ms = parse_tiers(ours)["realtime"].slo.ttft_p99_ms
    assert base_ms is not None
    for scenario, slo, expected_ms in (
        (named, Targets(ttft_ms=1000), 600),
        (named, Targets(), 300),
        (unnamed, Targets(), 0.6 * base_ms),
    ):
        ttft_ms = premium_ttft_ms(scenario, ours, slo)
        assert ttft_ms == pytest.approx(expected_ms)
        tiers = tiers_of(OURS, ArmBuilder(ours, slo, premium={"ttft_p99_ms": ttft_ms or 0.0}))
        assert tiers["premium"].slo.ttft_p99_ms == ttft_ms
        judged = slos_by_class(scenario, tiers, slo, ttft_ms)
        assert judged["typing"].ttft_ms == ttft_ms and judged["chat"].ttft_ms != ttft_ms


def test_without_any_slo_a_premium_tier_is_a_priority_alone() -> None:
    ours, scenario = read_shipped_tiers(), load_scenario("w1-chat")
    for tier in ours["tiers"].values():
        tier.pop("slo", None)
        tier.pop("max_slowdown", None)
    assert premium_ttft_ms(scenario, ours, Targets()) is None
    tiers = tiers_of(OURS, ArmBuilder(ours, Targets(), premium={}))
    assert tiers["premium"].slo == tiers["realtime"].slo and tiers.by_priority[0] is tiers["premium"]
    assert slos_by_class(scenario, tiers, Targets(), None) == {"chat": Targets()}
