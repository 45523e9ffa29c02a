"""The store's measurement, in small, against a real store."""

from typing import Any

import pytest

from bench import store


async def test_every_figure_is_measured_and_every_request_ends(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEASES", 2 * store.LEASES_EACH)
    monkeypatch.setattr(store, "STEP_S", 0.0002)
    record: Any = await store.Store(workers=2, seconds=0.4, rate=100)._measure(valkey_url)
    figures = [float(row.cells[1].split()[0]) for row in record.sections[0].table.rows]
    assert len(figures) == 5 and all(figure >= 0 for figure in figures) and min(figures[1:3]) > 0
