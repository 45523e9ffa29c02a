"""The step log can be read back, also when it was cut short or rotated; other files are refused."""

from itertools import pairwise
from pathlib import Path

import pytest

from engine.interface import EngineInfo
from engine.step_time.cost import StepWork
from loadtest.calibration.step_records import read_step_log
from scheduler.drivers.steps.step_log import StepEntry, StepLog, StepLogError, open_step_log
from tests.scheduler.world import run_world

ENGINE = EngineInfo("models/m", 128, 512, 16, 64, 256, eos_token_ids=(2,), suspends_steps=True)


def make_entry(number: int = 0) -> StepEntry:
    work = StepWork(prefill_tokens=48, attended=1152.0, context_tokens=number, decodes=3, prefills=1)
    return StepEntry.of(work, 0.0125, 7.5 + number, 0.011, {"realtime": 1, "bulk": 3})


def write(path: Path, *entries: StepEntry, engine: EngineInfo = ENGINE, limit_bytes: int = 1 << 20) -> None:
    log = StepLog(path, engine, limit_bytes)
    for entry in entries:
        log.record(entry)
    log.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    entries = (make_entry(1), make_entry(2))
    write(tmp_path / "steps", *entries)
    records = read_step_log(tmp_path / "steps")
    assert records.engine == ENGINE
    assert records.entries == entries
    assert records.entries[0].work == StepWork(48, 1152.0, 1, 3, 1)


def test_only_the_steps_of_the_last_engine_are_read(tmp_path: Path) -> None:
    other = EngineInfo("models/other", 128, 512, 16, 64, 256)
    write(tmp_path / "steps", make_entry(1))
    write(tmp_path / "steps", make_entry(2), engine=other)
    records = read_step_log(tmp_path / "steps")
    assert records.engine == other
    assert [e.context_tokens for e in records.entries] == [2]


def test_the_log_is_bounded_and_loses_its_oldest_steps(tmp_path: Path) -> None:
    path, limit = tmp_path / "steps", 40_000
    write(path, *(make_entry(i) for i in range(1000)), limit_bytes=limit)
    assert {file.name for file in tmp_path.iterdir()} == {"steps", "steps.1"}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1.05 * limit
    kept = [e.context_tokens for e in read_step_log(path).entries]
    assert kept == list(range(1000 - len(kept), 1000)), "the newest, in order, over both files"
    assert len(kept) > 80


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    write(path, make_entry(1), make_entry(2))
    path.write_bytes(path.read_bytes()[:-20])
    assert [e.context_tokens for e in read_step_log(path).entries] == [1]


@pytest.mark.parametrize("text", ["words\n", '{"t": 1}\n', "[1, 2]\n", '{"engine": {"model_path": "m"}}\n'])
def test_a_line_of_something_else_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "steps"
    write(path, make_entry(1))
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    with pytest.raises(ValueError, match="steps:3"):
        read_step_log(path)


def test_a_disk_that_fills_up_ends_the_log_and_not_the_loop() -> None:
    log = StepLog(Path("/dev/full"), ENGINE)
    for number in range(2000):
        log.record(make_entry(number))
    log.close()


def test_a_file_that_cannot_be_written_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StepLogError, match="nowhere/steps cannot be written: No such file"):
        open_step_log(tmp_path / "nowhere" / "steps", ENGINE)


def test_the_loop_records_what_each_step_did_and_took(tmp_path: Path) -> None:
    with open_step_log(tmp_path / "steps", ENGINE) as log:
        run_world(lambda world: world.ask("r", prompt=40, max_tokens=5), step_log=log)
    entries = read_step_log(tmp_path / "steps").entries
    assert [(e.prefill_tokens, e.decodes, e.context_tokens) for e in entries] == [
        (40, 0, 0),
        *((0, 1, context) for context in (40, 41, 42, 43)),
    ]
    assert all(e.tiers == {"realtime": 1} and e.elapsed_s > 0 and e.predicted_s > 0 for e in entries)
    assert all(a.t + b.elapsed_s <= b.t + 1e-9 for a, b in pairwise(entries))
