"""A correction of the linear step-time model by the number of rows (tokens) in a step.

The linear model fits some steps poorly: kernels work in tiles, use different code for different sizes, and have a
minimum time. For example, four decodes on a CPU cost as much as one. The table keeps one ratio of measured ÷ linear
prediction for each small number of rows, and one for each range of large numbers. The table is used only while its
error is smaller than the error of the linear model alone. Knows numbers only.
"""

import math

from engine.step_time.ewma import Ewma

EXACT_ROWS = 32  # each number of rows up to this has its own cell; larger numbers share cells
CELLS_AN_OCTAVE = 8  # number of cells for each doubling of the rows above `EXACT_ROWS`
TRUST = 2.0  # steps; after n steps, a cell applies the share n ÷ (n + `TRUST`) of its correction
MEMORY = 100  # a cell averages over about this many steps
LEAST, MOST = 0.5, 2.0  # bounds of the ratio of one step
ERROR_WEIGHT = 0.02  # weight of a new error in the moving averages
BETTER = 0.95  # the table is used while its error is below this share of the linear model's error


class RowTable:
    """A table of ratios by number of rows: measured ÷ linearly predicted time. Large numbers share a cell."""

    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, Ewma]] = {}  # cell: (number of steps, mean ratio)
        self._line_error = Ewma(ERROR_WEIGHT)
        self._table_error = Ewma(ERROR_WEIGHT)
        self.is_used = False

    def ratio(self, rows: int) -> float:
        """Return the factor on the linear prediction of a step with `rows` rows; 1 while the table is not used."""
        return self._ratio(_cell(rows)) if self.is_used else 1.0

    def has_seen(self, rows: int) -> bool:
        """Return whether a step has been observed in the cell of `rows`."""
        return _cell(rows) in self._cells

    def observe(self, rows: int, ratio: float) -> None:
        """Learn from a step with `rows` rows that took `ratio` times the linear prediction."""
        cell = _cell(rows)
        self._compare(ratio, ratio / self._ratio(cell))
        steps, mean = self._cells.get(cell, (0.0, Ewma(1.0, 1.0)))
        steps = min(steps + 1.0, MEMORY)
        mean.add(min(max(ratio, LEAST), MOST), weight=1 / steps)
        self._cells[cell] = (steps, mean)

    def _ratio(self, cell: int) -> float:
        if cell not in self._cells:
            return 1.0
        steps, mean = self._cells[cell]
        return 1.0 + (mean.value - 1.0) * steps / (steps + TRUST)

    def _compare(self, of_line: float, of_table: float) -> None:
        """Update the errors of the linear model and of the table, and choose whether to use the table.

        `of_line` is measured ÷ predicted by the linear model alone; `of_table` is measured ÷ predicted by the table.
        """
        line_error = self._line_error.add(min(abs(1.0 / of_line - 1.0), 1.0))
        table_error = self._table_error.add(min(abs(1.0 / of_table - 1.0), 1.0))
        self.is_used = table_error < BETTER * line_error


def _cell(rows: int) -> int:
    return rows if rows <= EXACT_ROWS else EXACT_ROWS + int(CELLS_AN_OCTAVE * math.log2(rows / EXACT_ROWS))
