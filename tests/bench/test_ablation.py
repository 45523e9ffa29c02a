"""The ablation: each switch of the controller makes a variant, and a table shows what the load loses without it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from bench.__main__ import main
from bench.ablation import ARMS, usual_variants, variant_of
from loadtest.simulation.experiment import find_tiers
from scheduler.config import ControllerSwitches, TierConfigError
from tests.loadtest.simulation.builders import make_tiers


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command quietens the log of its own process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_every_switch_of_the_controller_that_is_on_is_switched_off_once() -> None:
    tiers = make_tiers({"feedback": False})
    names = usual_variants(tiers)
    assert {"controller.feed_forward=false", "controller.shed=false", *ARMS} <= set(names)
    assert "controller.feedback=false" not in names and "controller.dry_run=false" not in names
    assert set(names) - set(ARMS) <= {f"controller.{key}=false" for key in ControllerSwitches.model_fields}


def test_a_variant_changes_one_key_and_leaves_the_others() -> None:
    tiers = make_tiers()
    without = variant_of(tiers, "controller.shed=false")
    assert not without.controller.shed and without.controller.feedback and without.tiers == tiers.tiers
    slower = variant_of(tiers, "tiers.realtime.slo.itl_p99_ms=999")
    assert slower["realtime"].slo.itl_p99_ms == 999
    assert slower["realtime"].slo.ttft_p99_ms == tiers["realtime"].slo.ttft_p99_ms and slower["bulk"] == tiers["bulk"]
    assert variant_of(tiers, "fixed-64") == find_tiers("fixed-64")
    with pytest.raises(TierConfigError, match=r"controller\.shad"):
        variant_of(tiers, "controller.shad=false")


@pytest.mark.full
def test_each_variant_is_a_row_beside_the_whole_controller(tmp_path: Path) -> None:
    """Chats beside bulk are slower than alone where they come first, and slower still where they do not."""
    out = tmp_path / "ablation.json"
    variants = ["controller.feedback=false", "a2-first-come"]
    flags = ["--loads", "chat-and-bulk", "--loads", "saturation=0.25", "--duration", "20", "--json", str(out)]
    main(["ablation", *flags, "--variants", ",".join(variants)])
    beside_bulk, closed_loop = json.loads(out.read_text(encoding="utf-8")).values()
    assert [row["variant"] for row in beside_bulk][1:] == [row["variant"] for row in closed_loop][1:] == variants
    whole, _, first_come = beside_bulk
    assert first_come["ttft_p50"] > whole["ttft_p50"] > 0.8 and first_come["in_time"] < whole["in_time"]
    assert min(row["bulk_per_s"] for row in beside_bulk) > 0
    assert closed_loop[0]["ttft_p50"] == closed_loop[0]["e2e_p50"] == 1.0 and closed_loop[0]["bulk_per_s"] == 0


def test_a_load_without_a_rate_that_is_a_number_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ablation", "--loads", "saturation=much"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said == "ablation: saturation=much: the rate is not a number\n"
