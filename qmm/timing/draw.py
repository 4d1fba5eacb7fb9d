"""Pictures of times against the number of rows: needs matplotlib, and no display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]  # (rows of A, value), by rows
INSTALL = "pip install matplotlib"
# Contestants keep their colours from picture to picture; the eight of Okabe and Ito, told apart by every eye.
_STYLES: dict[str, dict[str, Any]] = {
    "qmm": {"color": "#D55E00", "linewidth": 2.2, "marker": "o", "markersize": 4, "zorder": 5},
    "qmm-dependent": {"color": "#D55E00", "linestyle": ":", "marker": "o", "markersize": 3, "zorder": 4},
    "torch.mm": {"color": "#0072B2", "marker": "s", "markersize": 3, "zorder": 3},
    "humming": {"color": "#009E73"},
    "machete": {"color": "#CC79A7"},
    "marlin": {"color": "#E69F00"},
    "tinygemm": {"color": "#56B4E9"},
    "roof": {"color": "#555555", "linestyle": "--", "linewidth": 1},
}
_LABELS = {
    "torch.mm": "dense (torch.mm)",
    "qmm-dependent": "qmm, dependent launch",
    "roof": "roof (least time)",
}
Draw = Callable[["Axes", str], None]


def times(curves: Mapping[str, Mapping[str, Curve]], path: Path, title: str) -> None:
    """One panel a shape: microseconds against rows, both logarithmic.

    Args:
        curves: ``{shape: {contestant: curve}}``; the name ``"roof"`` is the least time.
        path: a .png (or what else matplotlib writes).
        title: above all panels.
    """

    def panel(axes: Axes, shape: str) -> None:
        for name, curve in curves[shape].items():
            _plot(axes, name, curve)
        _microseconds(axes)

    _panels(list(curves), panel, path, title)


def ratios(curves: Mapping[str, Curve], path: Path, title: str, ylabel: str, level: float) -> None:
    """One panel, one line a shape, against rows; ``level`` is where two things are equal."""
    figure, axes = _figure(1, 1, 7.2, 4.2)
    for shape, curve in curves.items():
        axes[0].plot([m for m, _ in curve], [v for _, v in curve], marker="o", markersize=3, label=shape)
    axes[0].axhline(level, color="#555555", linestyle="--", linewidth=1)
    axes[0].set_ylabel(ylabel)
    _rows_axis(axes[0], [m for curve in curves.values() for m, _ in curve])
    axes[0].legend(fontsize=8, title="K x N", title_fontsize=8)
    _save(figure, path, title)


def two(curves: Mapping[str, Mapping[str, Curve]], path: Path, title: str) -> None:
    """Two panels a shape, one above the other: time, and the share of the roof that it is."""
    names = list(curves)
    figure, axes = _figure(2, len(names), 4.2 * len(names), 5.6)
    for i, shape in enumerate(names):
        upper, lower = axes[i], axes[len(names) + i]
        roof = dict(curves[shape].get("roof", ()))
        for name, curve in curves[shape].items():
            _plot(upper, name, curve)
            if name != "roof":
                _plot(lower, name, [(m, 100 * roof[m] / us) for m, us in curve if m in roof])
        upper.set_title(f"K x N = {shape}", fontsize=10)
        _microseconds(upper)
        lower.axhline(100, color="#555555", linestyle="--", linewidth=1)
        lower.set_ylim(bottom=0)
        lower.set_ylabel("% of the roof")
        for one in (upper, lower):
            _rows_axis(one, [m for curve in curves[shape].values() for m, _ in curve])
        upper.legend(fontsize=8)
    _save(figure, path, title)


def _panels(names: Sequence[str], draw: Draw, path: Path, title: str) -> None:
    columns = min(3, len(names)) or 1
    rows = -(-len(names) // columns) or 1
    figure, axes = _figure(rows, columns, 4.2 * columns, 3.1 * rows + 0.5)
    handles: dict[str, Any] = {}
    for one, name in zip(axes, names, strict=False):
        draw(one, name)
        one.set_title(f"K x N = {name}", fontsize=10)
        _rows_axis(one, [int(x) for line in one.get_lines() for x in np.asarray(line.get_xdata())])
        handles |= {str(line.get_label()): line for line in one.get_lines()}
    spare = axes[len(names) :]
    for one in spare:
        one.axis("off")
    place = spare[0] if spare else axes[0]
    place.legend(
        handles.values(), handles.keys(), loc="center" if spare else "best", fontsize=9 if spare else 7
    )
    _save(figure, path, title)


def _plot(axes: Axes, name: str, curve: Curve) -> None:
    style = {"marker": ".", **_STYLES.get(name, {})}
    if name == "roof":
        style["marker"] = ""
    axes.plot([m for m, _ in curve], [v for _, v in curve], label=_LABELS.get(name, name), **style)


def _microseconds(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("microseconds")


def _rows_axis(axes: Axes, rows: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    if rows:
        powers = range(min(rows).bit_length() - 1, max(rows).bit_length())
        axes.set_xticks([1 << p for p in powers][:: 1 if len(powers) < 8 else 2])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows of A (tokens)")
    axes.grid(True, which="both", linewidth=0.3)
    axes.tick_params(labelsize=8)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
