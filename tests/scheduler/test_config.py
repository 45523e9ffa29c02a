"""tiers.yaml: the shipped one works, and an error names the key."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from scheduler.config import TierConfigError, TierSet, load_tiers, parse_tiers
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


@pytest.mark.parametrize(
    ("admission", "limit_s"),
    [({}, 10.0), ({"patience_ms": 2500}, 2.5), ({"patience_ms": None}, None), ({"predict": True}, 0.5)],
)
def test_a_request_may_wait_for_the_patience_or_in_the_strict_form_for_the_slo(
    admission: dict[str, Any], limit_s: float | None
) -> None:
    strict = parse_tiers(tier(slo={"ttft_p99_ms": 500}, admission=admission))
    assert strict["t"].ttft_limit_s == limit_s


def tier(**changes: Any) -> dict[str, Any]:
    return {"default_tier": "t", "batch_tier": "t", "tiers": {"t": {"priority": 1, **changes}}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tier(batch_size={"min": 1, "start": "many", "max": 9}), "tiers.t.batch_size.start: "),
        (tier(batch_size={"min": 5, "start": 1, "max": 9}), "tiers.t.batch_size: must satisfy min <= start <= max"),
        (tier(max_wait_ms={"min": -1, "start": 0, "max": 9}), "tiers.t.max_wait_ms.min: "),
        (tier(slo={"ttft_p99": 3}), "tiers.t.slo.ttft_p99: Extra inputs are not permitted"),
        (tier(floor=0.5), "tiers.t.floor: "),
        (tier(slo={"tpot_ms": 50}), "tiers.t.slo: tpot_ms counts from ttft_p99_ms, which is missing"),
        (tier(slo={"itl_p99_ms": 50}, floor=0.1), "tiers.t: floor is for tiers without a latency SLO"),
        (tier(slo={"itl_p99_ms": 50}, urgent_ms=9), "tiers.t: urgent_ms is for tiers without a latency SLO"),
        (tier(admission={"reopen_at": 0.5}), "tiers.t: admission.reopen_at is for tiers with a latency SLO"),
        (tier(admission={"patience_ms": 9}), "tiers.t: admission.patience_ms is for tiers with a latency SLO"),
        (tier(admission={"predict": True}), "tiers.t: admission.predict is for tiers with a latency SLO"),
        (
            tier(slo={"itl_p99_ms": 50}, admission={"predict": True}),
            "tiers.t: admission.predict refuses by slo.ttft_p99_ms, which is missing",
        ),
        (tier(prioritiy=1), "tiers.t.prioritiy: Extra inputs are not permitted"),
        ({**tier(), "default_tier": "x"}, "default_tier: there is no tier 'x'"),
        ({**tier(), "batch_tier": "x"}, "batch_tier: there is no tier 'x'"),
        ({**tier(), "extra": 1}, "extra: Extra inputs are not permitted"),
        ({**tier(), "tiers": [1]}, "tiers: "),
        ({**tier(), "tiers": {"t": {"priority": 1}, "Big Tier": {"priority": 2}}}, "tiers.Big Tier: "),
        ([], "expected a mapping"),
    ],
)
def test_an_error_names_source_and_key(data: object, message: str) -> None:
    with pytest.raises(TierConfigError) as caught:
        parse_tiers(data, "mine.yaml")
    text = str(caught.value)
    assert text.startswith("mine.yaml: ")
    assert message in text


def test_a_service_tier_has_one_owner() -> None:
    with pytest.raises(TierConfigError, match="service_tiers: 'flex' belongs to 'bulk' already"):
        make_tiers(other={"priority": 1, "service_tiers": ["flex"]})


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match="No such file"):
        load_tiers(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("tiers: [")
    with pytest.raises(TierConfigError, match="not YAML"):
        load_tiers(path)
    path.write_bytes("# Größe".encode("latin-1"))
    with pytest.raises(TierConfigError, match=r"bad.yaml: not UTF-8"):
        load_tiers(path)


# -- the shipped file as documentation -----------------------------------------------------------------------------


def keys_of(model: type[BaseModel]) -> set[str]:
    """All keys that a file may have, at any depth; not the names of tiers."""
    keys = {field.alias or name for name, field in model.model_fields.items()} - {"name"}
    kinds = {kind for field in model.model_fields.values() for kind in _models_in(field.annotation)}
    return keys.union(*(keys_of(kind) for kind in kinds))


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for part in get_args(annotation) for model in _models_in(part)}


def test_every_key_is_in_the_shipped_file() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    keys = keys_of(TierSet)
    assert {"default_tier", "priority", "min", "dry_run", "demote_to", "max_preemptions"} <= keys
    assert {key for key in keys if not re.search(rf"\b{key}:(\s|$)", text, re.MULTILINE)} == set()


def test_the_keys_that_are_only_comments_are_valid_too() -> None:
    shown, count = re.subn(r"^( *)# (?=\w+: )", r"\1", SHIPPED.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tiers = parse_tiers(yaml.safe_load(shown))
    assert count >= 5
    assert tiers["realtime"].pinned.batch_size == 64
    assert tiers["realtime"].admission.demote_to == "bulk"
    assert tiers["bulk"].aging_ms == 300_000


@pytest.mark.parametrize("defaults", [False, True])
def test_a_document_reads_back_as_the_same_tiers(defaults: bool) -> None:
    tiers = load_tiers(SHIPPED)
    document = tiers.document(defaults=defaults)
    assert parse_tiers(json.loads(json.dumps(document))) == tiers
    assert ("urgent_ms" in document["tiers"]["bulk"]) is defaults


def test_an_error_holds_the_first_wrong_key() -> None:
    with pytest.raises(TierConfigError, match=r"tiers\.t\.floor") as refusal:
        parse_tiers(tier(floor=2, priority="high"))
    assert refusal.value.key == "tiers.t.priority", "though every wrong key is named"
    with pytest.raises(TierConfigError) as refusal:
        parse_tiers({**tier(), "batch_tier": "none"})
    assert refusal.value.key == "batch_tier"
    with pytest.raises(TierConfigError) as refusal:
        parse_tiers([])
    assert refusal.value.key is None


@pytest.mark.parametrize(("changes", "key"), [({"name": "u"}, "tiers.t.name"), ({"deadline_ms": 1.5}, "deadline_ms")])
def test_a_tier_is_named_by_its_key_and_numbers_are_finite(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(TierConfigError, match=key):
        parse_tiers(tier(**changes))
    with pytest.raises(TierConfigError, match=r"tiers\.t\.max_wait_ms\.max"):
        parse_tiers(tier(max_wait_ms={"min": 0, "start": 0, "max": float("inf")}))
