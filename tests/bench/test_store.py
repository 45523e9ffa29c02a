"""The store's measurement, in small, against a real store."""

from typing import Any

import pytest

from bench.store import command, load


def test_every_figure_is_measured_and_every_request_ends(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEASES", 2 * command.LEASES_EACH)
    monkeypatch.setattr(load, "STEP_S", 0.002)
    monkeypatch.setattr(command, "GOAL_PER_S", 500.0)
    record: Any = command.Store(workers=2, seconds=0.4, rate=100).measure(valkey_url)
    figures = [float(row.cells[1].split()[0]) for row in record.sections[0].table.rows]
    assert len(figures) == 7 and all(figure >= 0 for figure in figures) and min(figures[1:5]) > 0
