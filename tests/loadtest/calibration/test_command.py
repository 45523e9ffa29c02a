"""`loadtest calibrate` as a user runs it: from a step log, and from an engine."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.interface import EngineInfo
from engine.step_time.cost import StepWork
from loadtest.__main__ import main
from loadtest.calibration import command
from loadtest.calibration.sweep import Sweep
from loadtest.model_shapes import write_shape
from loadtest.random_weights import write_weights
from loadtest.simulation.cost_card import load_cost_card
from scheduler.drivers.steps.step_log import StepLog
from tests.loadtest.calibration.test_fit import DECODE, MIXED, make_steps
from tests.loadtest.calibration.test_sweep import ticking
from tests.loadtest.modeled_stepper import ModeledStepper

ENGINE = EngineInfo("models/m", 4096, 512, 16, 900, 1024, dtype="bfloat16", suspends_steps=True, num_layers=12)


def test_a_card_from_a_step_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = StepLog(tmp_path / "steps", ENGINE)
    for step in make_steps(1200):
        log.record(step)
    log.close()
    out, plot, result = tmp_path / "cards" / "mine.json", tmp_path / "fit.png", tmp_path / "result.json"
    flags = ["--step-log", str(tmp_path / "steps"), "--out", str(out), "--plot", str(plot), "--json", str(result)]
    main(["calibrate", *flags, "--name", "mine", "--price-per-hour", "2.5"])

    card = load_cost_card(str(out))
    assert (card.name, card.price_per_hour, card.num_blocks, card.suspends_steps) == ("mine", 2.5, 900, True)
    assert card.num_layers == card.engine_info().num_layers == 12
    assert card.decode.decode_s == pytest.approx(DECODE.decode_s, rel=0.2)
    assert card.mixed.prefill_token_s == pytest.approx(MIXED.prefill_token_s, rel=0.2)
    assert "m, bfloat16 on cpu" in card.measured_on
    assert plot.read_bytes().startswith(b"\x89PNG")
    measured = json.loads(result.read_text(encoding="utf-8"))
    assert measured["mixed"]["held_out"]["mape"] < 0.04
    assert measured["repeated_steps_mape"] is None
    assert "the online model" in capsys.readouterr().out


@pytest.fixture
def counted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep has as many steps as its seconds say, however long they take on this machine."""
    monkeypatch.setattr(command, "Sweep", partial(Sweep, clock=ticking()))


@pytest.mark.usefixtures("counted_steps")
def test_a_sweep_finds_what_the_engines_steps_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = ModeledStepper(MIXED, DECODE, max_model_len=600, num_blocks=400, max_step_tokens=256)
    monkeypatch.setattr(command, "build_torch_engine", lambda config, progress: stepper)
    out = tmp_path / "card.json"
    main(["calibrate", "--model", str(tmp_path), "--out", str(out), "--seconds", "12", "--max-context", "500"])
    card = load_cost_card(str(out))
    assert card.mixed.prefill_token_s == pytest.approx(MIXED.prefill_token_s, rel=0.2)
    assert card.decode.decode_s == pytest.approx(DECODE.decode_s, rel=0.2)
    assert card.host_overhead_s == 0.0, "no scheduler ran between the steps"


@pytest.mark.usefixtures("counted_steps")
def test_a_card_from_an_engine(tmp_path: Path) -> None:
    model = write_shape(tmp_path / "tiny", "tiny", max_position_embeddings=256)
    write_weights(model, torch.bfloat16, torch.device("cpu"), seed=1)
    out, result = tmp_path / "card.json", tmp_path / "result.json"
    sizes = ["--seconds", "4", "--max-decodes", "8", "--max-context", "200", "--kv-mib", "8", "--threads", "1"]
    main(["calibrate", "--model", str(model), "--out", str(out), "--json", str(result), *sizes])
    card = load_cost_card(str(out))
    assert card.name == "tiny"
    one = StepWork()
    one.add(1, 16)
    assert all(card.step_cost(mixed).of(one) >= card.floor_s > 0 for mixed in (False, True))
    assert json.loads(result.read_text(encoding="utf-8"))["repeated_steps_mape"] > 0


@pytest.mark.parametrize("text", ["", "nonsense\n"])
def test_what_is_no_step_log_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "steps").write_text(text, encoding="utf-8")
    for path in (tmp_path / "steps", tmp_path / "absent"):
        with pytest.raises(SystemExit) as exit_info:
            main(["calibrate", "--step-log", str(path), "--out", str(tmp_path / "card.json")])
        assert exit_info.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("loadtest: ") and "Traceback" not in said
    assert not (tmp_path / "card.json").exists()
