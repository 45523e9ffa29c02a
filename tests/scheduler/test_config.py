"""tiers.yaml: the shipped one works, and an error names the key."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.config import TierConfigError, load_tiers, parse_tiers
from tests.scheduler.builders import make_tiers

SHIPPED = Path(__file__).parents[2] / "tiers.yaml"


def test_the_shipped_tiers() -> None:
    tiers = load_tiers(SHIPPED)
    assert [t.name for t in tiers.by_priority] == ["realtime", "bulk", "batch"]
    assert [t.is_interactive for t in tiers.by_priority] == [True, False, False]
    assert (tiers.default_tier, tiers.batch_tier) == ("realtime", "batch")
    mapped = {name: tiers.for_service_tier(name) for name in ("default", "priority", "flex", "unknown")}
    assert {k: t and t.name for k, t in mapped.items()} == {
        "default": "realtime",
        "priority": "realtime",
        "flex": "bulk",
        "unknown": None,
    }


def test_any_number_of_tiers_under_any_names() -> None:
    gold = make_tiers(gold={"priority": 200}, **{f"t{i}": {"priority": i} for i in range(20)})
    assert gold.by_priority[0].name == "gold"
    assert len(gold.tiers) == 24


def test_equal_priorities_are_in_a_total_order() -> None:
    names = [t.name for t in make_tiers(b={"priority": 5}, a={"priority": 5}).by_priority]
    assert names.index("a") < names.index("b")


def tier(**changes: Any) -> dict[str, Any]:
    return {"default_tier": "t", "batch_tier": "t", "tiers": {"t": {"priority": 1, **changes}}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tier(batch_size={"min": 1, "start": "many", "max": 9}), "tiers.t.batch_size.start: "),
        (tier(batch_size={"min": 5, "start": 1, "max": 9}), "tiers.t.batch_size: must satisfy min <= start <= max"),
        (tier(batch_size={"min": 0, "start": 1, "max": 9}), "tiers.t.batch_size.min: "),
        (tier(batch_size={"min": 1, "start": 1}), "tiers.t.batch_size.max: Field required"),
        (tier(max_wait_ms={"min": -1, "start": 0, "max": 9}), "tiers.t.max_wait_ms.min: "),
        (tier(slo={"ttft_p99": 3}), "tiers.t.slo.ttft_p99: Extra inputs are not permitted"),
        (tier(slo={"ttft_p99_ms": 0}), "tiers.t.slo.ttft_p99_ms: "),
        (tier(floor=0.5), "tiers.t.floor: "),
        (tier(prioritiy=1), "tiers.t.prioritiy: Extra inputs are not permitted"),
        (tier(answers_as="bulk"), "tiers.t.answers_as: "),
        ({**tier(), "default_tier": "x"}, "default_tier: there is no tier 'x'"),
        ({**tier(), "batch_tier": "x"}, "batch_tier: there is no tier 'x'"),
        ({**tier(), "extra": 1}, "extra: Extra inputs are not permitted"),
        ({**tier(), "tiers": {}}, "tiers: "),
        ({**tier(), "tiers": {"t": {}}}, "tiers.t.priority: Field required"),
        ({**tier(), "tiers": {"t": None}}, "tiers.t: "),
        ({**tier(), "tiers": [1]}, "tiers: "),
        ({**tier(), "tiers": {"t": {"priority": 1}, "Big Tier": {"priority": 2}}}, "tiers.Big Tier: "),
        ({"tiers": {"t": {"priority": 1}}}, "default_tier: Field required"),
        ([], "expected a mapping"),
        (None, "expected a mapping"),
    ],
)
def test_an_error_names_source_and_key(data: object, message: str) -> None:
    with pytest.raises(TierConfigError) as caught:
        parse_tiers(data, "mine.yaml")
    text = str(caught.value)
    assert text.startswith("mine.yaml: ")
    assert message in text


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(TierConfigError) as caught:
        parse_tiers(tier(floor=2, queue_limit=0))
    assert "tiers.t.floor" in str(caught.value) and "tiers.t.queue_limit" in str(caught.value)


def test_a_service_tier_has_one_owner() -> None:
    with pytest.raises(TierConfigError, match="service_tiers: 'flex' belongs to 'bulk' already"):
        make_tiers(other={"priority": 1, "service_tiers": ["flex"]})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match="No such file"):
        load_tiers(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("tiers: [")
    with pytest.raises(TierConfigError, match="not YAML"):
        load_tiers(path)
