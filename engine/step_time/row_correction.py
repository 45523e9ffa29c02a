"""A correction of the linear step-time model by the number of rows (tokens) in a step, for where the line fits poorly.

Kernels work in tiles, use other code for other sizes, and have a minimum time: on a CPU four decodes cost as much as
one. The table keeps one ratio of measured ÷ linear for each number of rows, and for ranges of large numbers. It is used
only while its errors are smaller than those of the line alone. Knows numbers only.
"""

import math

from engine.step_time.ewma import Ewma

EXACT_ROWS = 32  # an own cell for each number up to here; then a quarter of an octave wide, and less
CELLS_AN_OCTAVE = 8
TRUST = 2.0  # steps; after n steps a cell corrects by the share n ÷ (n + this) of its ratio
MEMORY = 100  # steps that a cell averages over, about
LEAST, MOST = 0.5, 2.0  # bounds of a step's ratio
ERROR_WEIGHT = 0.02  # weight of a new error in the moving averages
BETTER = 0.95  # the table is used while its error is below this share of the line's


class RowTable:
    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, Ewma]] = {}  # cell → (steps, mean of measured ÷ linear)
        self._line_error = Ewma(ERROR_WEIGHT)
        self._table_error = Ewma(ERROR_WEIGHT)
        self.is_used = False

    def ratio(self, rows: int) -> float:
        """Return the factor for the linear prediction of a step with `rows`; 1 while the table is not used."""
        return self._ratio(_cell(rows)) if self.is_used else 1.0

    def observe(self, rows: int, ratio: float) -> None:
        """A step with `rows` took `ratio` times the linear prediction."""
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
        """Measured ÷ predicted, by the line alone and by the table."""
        line_error = self._line_error.add(min(abs(1.0 / of_line - 1.0), 1.0))
        table_error = self._table_error.add(min(abs(1.0 / of_table - 1.0), 1.0))
        self.is_used = table_error < BETTER * line_error


def _cell(rows: int) -> int:
    return rows if rows <= EXACT_ROWS else EXACT_ROWS + int(CELLS_AN_OCTAVE * math.log2(rows / EXACT_ROWS))
