"""Plot a calibration: measured against predicted step times. Knows matplotlib; fits nothing."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.calibration.fit import Calibration, KindFit


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draw the held-out steps into one image with two plots, and write it to `path`.

    The left plot shows measured against predicted times. The right plot shows the relative error of the prediction
    against the number of rows in the step.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    against, left_over = figure.subplots(1, 2)
    for fit in calibration.kinds:
        _plot_kind(fit, against, left_over)
    times = [1e3 * p.entry.elapsed_s for fit in calibration.kinds for p in fit.predictions]
    against.plot([min(times), max(times)], [min(times), max(times)], color="grey", linewidth=1)
    for axes in (against, left_over):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    against.set_yscale("log")
    against.set_xlabel("predicted ms")
    against.set_ylabel("measured ms")
    left_over.axhline(0.0, color="grey", linewidth=1)
    left_over.set_xlabel("rows in the step (prefill tokens and decodes)")
    left_over.set_ylabel("predicted ÷ measured − 1, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_kind(fit: KindFit, against: Axes, left_over: Axes) -> None:
    measured, predicted = _columns(fit)
    label = f"{fit.kind}, MAPE {fit.held_out.mape:.1%}"
    against.scatter([1e3 * s for s in predicted], [1e3 * s for s in measured], s=8, alpha=0.6, label=label)
    off = [100 * (p / m - 1.0) for p, m in zip(predicted, measured, strict=True)]
    left_over.scatter([p.entry.work.rows for p in fit.predictions], off, s=8, alpha=0.6, label=fit.kind)


def _columns(fit: KindFit) -> tuple[Sequence[float], Sequence[float]]:
    return [p.entry.elapsed_s for p in fit.predictions], [p.predicted_s for p in fit.predictions]
