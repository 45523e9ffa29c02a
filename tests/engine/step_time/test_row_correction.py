"""The correction by rows: used where the line has the same error again and again, and nowhere else."""

import random
from collections.abc import Callable

import pytest

from engine.step_time.row_correction import RowTable


def tiles(rows: int) -> float:
    """Return measured ÷ linear of an engine that computes four rows in the time of one."""
    return -(-rows // 4) * 4 / (rows + 1.5)


def linear(rows: int) -> float:
    return 1.0


def taught(count: int, ratio_of: Callable[[int], float] = tiles, noise: float = 0.03) -> RowTable:
    rng, table = random.Random(4), RowTable()
    for _ in range(count):
        rows = rng.randint(1, 64)
        table.observe(rows, ratio_of(rows) * max(0.1, rng.gauss(1.0, noise)))
    return table


def test_it_learns_the_errors_of_the_line() -> None:
    table = taught(3000)
    assert table.is_used
    for rows in (1, 4, 5, 8, 9, 12, 32):
        assert table.ratio(rows) == pytest.approx(tiles(rows), rel=0.08)


def test_where_the_line_fits_it_is_not_used() -> None:
    table = taught(3000, ratio_of=linear)
    assert not table.is_used
    assert table.ratio(7) == 1.0


def test_the_line_holds_where_no_step_was_seen() -> None:
    assert RowTable().ratio(3) == 1.0
    assert taught(3000).ratio(5000) == 1.0


def test_one_step_corrects_little() -> None:
    table = taught(3000)
    table.observe(2000, 2.0)
    assert 1.0 < table.ratio(2000) < 1.5


def test_large_numbers_of_rows_share_a_cell_and_small_ones_do_not() -> None:
    table = taught(3000)
    for _ in range(50):
        table.observe(1000, 1.5)
    assert table.ratio(1010) == table.ratio(1000) > 1.4
    assert table.ratio(4) != table.ratio(5)


def test_it_has_seen_the_numbers_of_rows_that_share_a_cell() -> None:
    table = RowTable()
    table.observe(4, 1.0)
    table.observe(1000, 1.0)
    assert [rows for rows in (3, 4, 5, 500, 1000, 1010) if table.has_seen(rows)] == [4, 1000, 1010]


def test_it_forgets() -> None:
    table = taught(3000)
    for _ in range(600):
        table.observe(8, 1.8)
    assert table.ratio(8) == pytest.approx(1.8, rel=0.03)
