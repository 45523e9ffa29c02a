"""An experiment's result as tables for the terminal. Knows their order; needs no plotting library."""

from bench.isolation import tables
from bench.isolation.page import Table
from bench.isolation.record import Result
from loadtest.report import table


def render_text(result: Result) -> str:
    """For the terminal."""
    parts = [result.experiment.title, f"load: {tables.load_line(result)}"]
    if result.goodput is not None:
        parts.append(f"solo goodput: {tables.goodput_line(result.goodput)}")
    parts += ["", "times in ms", _plain(tables.arms_table(result.arms))]
    versus = tables.versus_table(result)
    if versus.rows:
        parts += ["", "mixed ÷ alone (95 % interval)", _plain(versus)]
    if result.has_jobs:
        parts += ["", "jobs with deadlines", _plain(tables.jobs_table(result))]
    parts += ["", _plain(tables.engine_table(result.arms)), ""]
    if result.goals:
        parts += [_plain(tables.goals_table(result.goals)), ""]
    if result.controls:
        parts += [_plain(tables.controls_table(result.controls)), ""]
    parts += [f"WARNING: {warning}" for warning in result.warnings]
    return "\n".join(parts).rstrip()


def _plain(shown: Table) -> str:
    return table(shown.header, [row.cells for row in shown.rows])
