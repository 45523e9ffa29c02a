"""Plots as SVG elements of a page: the common style of all plots, and the conversion of a figure into an element.

Lines and text in `INK` take the colour of the page's text, so that one drawing suits a light and a dark page. The other
colours are legible on both. Knows matplotlib; does not know what is drawn.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK = "#010203"  # placeholder colour, replaced by currentColor in the SVG
ACCENT, MUTED, WARM, GREEN, VIOLET = "#2f81d6", "#8a8f98", "#d9622b", "#2d9d6b", "#9b6bd6"
CYCLE = (ACCENT, WARM, GREEN, VIOLET, MUTED)
WIDTH_IN = 9.2  # width of a figure in inches; the page scales it
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 9,
}


def draw_svg(name: str, height_in: float, draw: Callable[[Figure], None], width_in: float = WIDTH_IN) -> str:
    """Return an `<svg>` element that fills its place on the page; its sizes are in inches, where text has 10 pt.

    `draw` draws into the empty figure. `name` must be unique on a page: it makes the ids in the element unique.
    """
    style: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=160)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # Fixed sizes and fonts are removed, since the page sets both.
    svg = re.sub(r'<svg ([^>]*?)height="[\d.]+pt"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)width="[\d.]+pt"', r"<svg \1", svg, count=1)
    return re.sub(r"(font: [^;\"']*?)'?(?:DejaVu Sans|sans-serif)[^;\"]*", r"\1inherit-sans, sans-serif", svg)


def log_ms(axis: Any, set_scale: Callable[[str], None]) -> None:
    """Make an axis logarithmic, with plain numbers as labels: 100 instead of 10²."""
    set_scale("log")
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
