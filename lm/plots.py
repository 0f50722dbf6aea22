"""Pictures for papers: one column wide, the colours of Okabe and Ito, each with its own dashes and marker, and legends
where no data can be. Needs the extra [report]."""

import dataclasses
import functools
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from lm.errors import require
from lm.text import format_digits, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec('P')

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES = ('-', (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1.2, 1.2)), (0, (7, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (2, 2)))
MARKERS = ('o', 's', '^', 'D', 'v', 'p', 'h')
BANDS = 6
"""More curves than these are drawn without the range of their seeds, which would hide them."""

NEAR, RING, RINGS = 2.5, 3.0, 4
"""Points (1/72 inch): markers closer than this hide each other; the growth of further rings; how many grow."""
LEVELS = (0.0, 0.16, -0.16, 0.32, -0.32)
"""Heights within a row of dots."""

WIDTH = 3.4
"""Inches: a column of a two-column page."""
SMALLEST = 0.85
"""Inches: the least side of one matrix of many."""
DOT_LABEL, LEGEND_LABEL, AXIS_LABEL = 26, 48, 28
"""Characters of a label in a line: beside dots, below curves, along the vertical axis."""
STYLE: dict[Any, Any] = {
    'font.family': 'sans-serif',
    'font.size': 7.5,
    'axes.labelsize': 8,
    'axes.linewidth': 0.6,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#dddddd',
    'grid.linewidth': 0.5,
    'xtick.labelsize': 7.5,
    'ytick.labelsize': 7.5,
    'xtick.major.width': 0.6,
    'ytick.major.width': 0.6,
    'legend.fontsize': 7.5,
    'lines.linewidth': 1.2,
    'lines.markersize': 4.5,
    'figure.dpi': 300,
    'figure.autolayout': False,  # figures have an engine of their own, then none
    'figure.constrained_layout.use': False,
    'savefig.dpi': 300,
    'pdf.fonttype': 42,
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line, or a row of dots, of a picture.

    Attributes:
        style: which colour, line style and marker; the same in all pictures of a report.
        x, y: points [n].
        low, high: the band around them [n], such as the extremes over seeds; None: no band.
        tokens: behind each point [n]; None: not counted.
        smoothed: some points are means of several measurements.
        joined: a line joins the points; else the band is a bar at each.
        marked: the points have markers where the picture has any.
    """

    label: str
    style: int
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    tokens: np.ndarray | None = None
    smoothed: bool = False
    joined: bool = True
    marked: bool = True

    @property
    def colour(self) -> str:
        return COLOURS[self.style % len(COLOURS)]

    @property
    def line(self) -> str | tuple:
        """Dashes, through which a curve below can be seen; shifted where colours are used again."""
        return DASHES[(self.style + self.style // len(COLOURS)) % len(DASHES)]

    @property
    def marker(self) -> str:
        return MARKERS[(self.style + self.style // len(COLOURS)) % len(MARKERS)]


def _in_style(draw: Callable[P, None]) -> Callable[P, None]:
    """Draws with STYLE, and leaves matplotlib's settings as they were."""

    @functools.wraps(draw)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> None:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            draw(*arguments, **options)

    return wrapped


def check_matplotlib(remark: str = '') -> None:
    """Raises MissingPackageError where matplotlib is missing; `remark` says what to do without it."""
    require('matplotlib', 'pictures', 'report', remark)


@_in_style
def draw_lines(
    path: os.PathLike | str,
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    x_scale: str = 'linear',
    y_scale: str = 'linear',
    markers: bool = False,
    ticks: Sequence[float] | None = None,
    y_limits: tuple[float, float] | None = None,
    right: tuple[str, Callable] | None = None,
    title: str = '',
) -> None:
    """Writes path.png and path.pdf.

    Args:
        x_scale, y_scale: 'linear' or 'log'.
        markers: draw few measured points rather than a curve.
        ticks: positions on the horizontal axis, printed as 512, 1k, 2k, …
        right: label of a second vertical axis, and the function from the first to it, its own inverse.
        title: a line above the axes, such as where the figures were measured.
    """
    # A name at the right end belongs to a line.
    direct = len(curves) <= 6 and max(len(c.label) for c in curves) <= 14 and right is None
    direct = direct and all(curve.joined for curve in curves)
    figure, axes = _make_figure(0 if direct else _count_legend_rows(curves))
    for curve in curves:
        line = ('-' if markers else curve.line) if curve.joined else 'none'
        axes.plot(curve.x, curve.y, linestyle=line, color=curve.colour)
        if curve.low is None or curve.high is None:
            continue
        if not curve.joined:
            axes.vlines(curve.x, curve.low, curve.high, color=curve.colour, linewidth=0.8)
        elif len(curves) <= BANDS:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.2, linewidth=0)
    axes.set(xlabel=x_label, ylabel=_balance_lines(y_label, AXIS_LABEL), xscale=x_scale, yscale=y_scale)
    if title:
        axes.set_title(title, fontsize=7, loc='left')
    if y_limits:
        axes.set_ylim(*y_limits)
    if markers:
        _draw_markers(axes, [curve for curve in curves if curve.marked])
    if ticks is not None:
        axes.set_xticks(list(ticks), [shorten(tick) for tick in ticks])
        axes.minorticks_off()
    elif x_scale == 'log':
        _format_log_axis(axes.xaxis)
    else:
        _limit_ticks(axes.xaxis)
    if y_scale == 'log':
        _format_log_axis(axes.yaxis)
    if right:
        second = axes.secondary_yaxis('right', functions=(right[1], right[1]))
        second.set_ylabel(right[0])
        second.spines['right'].set_linewidth(0.6)
        if y_scale == 'log':
            _format_log_axis(second.yaxis)
        else:
            second.yaxis.set_major_formatter(lambda value, _: shorten(value))
    if direct:
        _lay_out(figure)
        _label_ends(axes, curves)
    else:
        _draw_legend(figure, curves, markers)
    _save(figure, path)


def _draw_markers(axes: 'Axes', curves: Sequence[Curve]) -> None:
    """Markers at the points. One that would hide another is a ring around it, wider for each below."""
    placed: list[np.ndarray] = []
    for curve in curves:
        points = axes.transData.transform(np.column_stack([curve.x, curve.y])) * 72 / axes.figure.dpi
        for x, y, point in zip(curve.x, curve.y, points, strict=True):
            below = sum(np.hypot(*(point - other)) < NEAR for other in placed)
            look = {'markeredgecolor': 'white', 'markeredgewidth': 0.4}
            if below:
                look = {'markerfacecolor': 'none', 'markeredgecolor': curve.colour, 'markeredgewidth': 0.9}
                look |= {'markersize': RING * min(below, RINGS) + STYLE['lines.markersize']}
            axes.plot([x], [y], linestyle='none', marker=curve.marker, color=curve.colour, clip_on=False, **look)
            placed.append(point)


def _stack_dots(x: np.ndarray, span: float) -> np.ndarray:
    """Heights [n] at which dots at x [n] do not hide each other, within a third of a row; `span`: of the axis."""
    heights = np.zeros(len(x))
    for i in range(len(x)):
        taken = {heights[j] for j in range(i) if abs(x[j] - x[i]) <= 0.02 * span}
        heights[i] = next((height for height in LEVELS if height not in taken), 0.0)
    return heights


@_in_style
def draw_dots(path: os.PathLike | str, rows: Sequence[Curve], x_label: str) -> None:
    """Draws one row per curve: its x as dots, stacked where they would coincide, a thin line from low to high, and a
    bar at their mean. Writes path.png and path.pdf."""
    labels = [_wrap_label(row.label, DOT_LABEL) for row in rows]
    sizes = np.array([0.06 + 0.13 * (label.count('\n') + 1) for label in labels])  # inches
    middles = np.cumsum(sizes) - sizes / 2
    figure, axes = _make_figure(0, height=0.55 + sizes.sum())
    everything = np.concatenate([row.x for row in rows])
    for row, size, middle in zip(rows, sizes, middles, strict=True):
        heights = middle - size * _stack_dots(row.x, np.ptp(everything))
        axes.plot(row.x, heights, row.marker, color=row.colour, markersize=4, alpha=0.75, markeredgewidth=0)
        if row.low is not None and row.high is not None:
            axes.hlines(heights, row.low, row.high, color=row.colour, linewidth=0.8)
        if len(row.x) > 1:
            axes.plot([row.x.mean()], [middle], '|', color=row.colour, markersize=11, markeredgewidth=1.4)
    axes.set(xlabel=x_label)
    axes.set_yticks(middles, labels)
    axes.set_ylim(sizes.sum(), 0)
    axes.tick_params(axis='y', length=0)
    axes.spines['left'].set_visible(False)
    axes.margins(x=0.08)
    _limit_ticks(axes.xaxis)
    _save(figure, path)


@_in_style
def draw_bars(
    path: os.PathLike | str, labels: Sequence[str], pieces: dict[str, np.ndarray], x_label: str, title: str = ''
) -> None:
    """Draws one horizontal bar per label, made of pieces [labels], one behind the other. Writes path.png and path.pdf.

    Args:
        pieces: name → lengths; those that are 0 everywhere are left out. Colours repeat with hatches.
    """
    shown = {name: lengths for name, lengths in pieces.items() if np.any(lengths)}
    curves = [Curve(name, style, lengths, lengths) for style, (name, lengths) in enumerate(shown.items())]
    figure, axes = _make_figure(_count_legend_rows(curves), height=0.6 + 0.3 * len(labels))
    start = np.zeros(len(labels))
    for curve in curves:
        hatch = '' if curve.style < len(COLOURS) else '////'
        look = {'color': curve.colour, 'edgecolor': 'white', 'linewidth': 0.4, 'hatch': hatch, 'height': 0.7}
        axes.barh(range(len(labels)), curve.x, left=start, label=curve.label, **look)
        start = start + curve.x
    for row, length in enumerate(start):
        axes.annotate(format_digits(length), (length, row), (3, 0), textcoords='offset points', va='center')
    axes.set(xlabel=x_label)
    axes.set_yticks(range(len(labels)), [_wrap_label(label, DOT_LABEL) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis='y', length=0)
    axes.grid(visible=False, axis='y')
    axes.margins(x=0.12)
    if title:
        axes.set_title(title, fontsize=7, loc='left')
    _limit_ticks(axes.xaxis)
    columns = _count_legend_columns(curves)
    figure.legend(loc='outside lower center', ncols=columns, frameon=False, handlelength=1.2, columnspacing=1.2)
    _save(figure, path)


@_in_style
def draw_parallel(
    path: os.PathLike | str,
    lines: Sequence[np.ndarray],
    *,
    labels: Sequence[str],
    ticks: Sequence[Sequence[tuple[float, str]]],
    colours: Sequence[float],
    colour_label: str,
) -> None:
    """Draws lines over vertical axes side by side. Writes path.png and path.pdf.

    Args:
        lines: [axes] each, heights from 0 to 1; NaN leaves an axis out.
        ticks: (height, text) on each axis.
        colours: a number per line, which decides its colour.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = _make_figure(0)
    shades = ScalarMappable(Normalize(min(colours), max(colours)), 'viridis')
    for line, colour in zip(lines, shades.to_rgba(np.asarray(colours)), strict=True):
        axes.plot(range(len(labels)), line, color=colour, linewidth=0.9, marker='.', markersize=3)
    axes.grid(False)
    for i, marks in enumerate(ticks):
        axes.axvline(i, color='#bbbbbb', linewidth=0.6, zorder=0)
        for height, text in marks:
            axes.annotate(_wrap_label(text, 12), (i, height), (2, 2), textcoords='offset points', fontsize=6)
    names = [_wrap_label(re.sub('[_.]', ' ', label), 12) for label in labels]
    axes.set_xticks(range(len(labels)), names, fontsize=6.5)
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.1)
    axes.spines['left'].set_visible(False)
    figure.colorbar(shades, ax=axes, label=colour_label)
    _save(figure, path)


@_in_style
def draw_matrices(
    path: os.PathLike | str,
    matrices: Sequence[tuple[str, np.ndarray]],
    columns: int,
    labels: Sequence[str] | None = None,
    title: str = '',
) -> None:
    """Draws matrices as a grid of colours, row by row. Writes path.png and path.pdf.

    The colour is the root of a number's share of the largest one in its matrix: faint numbers can be seen. Positive
    numbers are blue, negative ones orange.

    Args:
        matrices: pairs of a title and numbers [n, m].
        columns: matrices beside each other.
        labels: of the rows and columns, where all matrices have the same; None: their numbers.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    columns = min(columns, len(matrices))
    rows = -(-len(matrices) // columns)
    side = max(SMALLEST, min(WIDTH, 2 * WIDTH / columns))
    figure = Figure(figsize=(max(WIDTH, side * columns), (side + 0.2) * rows + 0.3), layout='constrained')
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    colours = LinearSegmentedColormap.from_list('signed', [COLOURS[1], '#ffffff', COLOURS[0]])
    for axes, (name, matrix) in zip(grid, matrices, strict=False):
        largest = np.abs(matrix).max(initial=0) or 1.0
        axes.imshow(np.sign(matrix) * np.sqrt(np.abs(matrix) / largest), cmap=colours, vmin=-1, vmax=1)
        axes.set_title(name, fontsize=6 if side < 1.5 else 7.5, pad=2)
        axes.grid(visible=False)
        if labels is None:
            axes.tick_params(labelsize=5 if side < 1.5 else 7, length=1.5, pad=1)
        else:
            size = min(7.5, 55 * side / max(len(labels), 1))
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=size)
            axes.set_yticks(range(len(labels)), labels, fontsize=size)
            axes.tick_params(length=0, pad=1)
    for axes in grid[len(matrices) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title, fontsize=7)
    _save(figure, path)


def _make_figure(legend_rows: int, height: float = 2.15) -> tuple['Figure', 'Axes']:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height + 0.155 * legend_rows), layout='constrained')
    return figure, figure.add_subplot()


def _lay_out(figure: 'Figure') -> None:
    """Finds the places of all parts, which takes as long as drawing them."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)


def _save(figure: 'Figure', path: os.PathLike | str) -> None:
    """Writes each file beside its place first: a reader, or an interruption, finds the old picture or the new one."""
    _lay_out(figure)
    figure.set_layout_engine(None)  # while a figure has one, matplotlib draws it twice per file
    for suffix in ('png', 'pdf'):
        target = Path(f'{path}.{suffix}')
        temporary = target.with_name(f'.{target.stem}.tmp.{suffix}')
        try:
            figure.savefig(temporary, metadata={'CreationDate': None} if suffix == 'pdf' else None)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _count_legend_columns(curves: Sequence[Curve]) -> int:
    longest = max(len(curve.label) for curve in curves)
    return 1 if longest > 24 else 2 if longest > 13 else 3


def _count_legend_rows(curves: Sequence[Curve]) -> int:
    lines = [_wrap_label(curve.label, LEGEND_LABEL).count('\n') + 1 for curve in curves]
    return -(-sum(lines) // _count_legend_columns(curves))


def _draw_legend(figure: 'Figure', curves: Sequence[Curve], markers: bool) -> None:
    """Below the axes, where no data can be."""
    from matplotlib.lines import Line2D

    edge = {'markeredgecolor': 'white', 'markeredgewidth': 0.4}
    handles = []
    for curve in curves:
        look: dict[str, Any] = {'linestyle': '-' if markers else curve.line}
        if markers and curve.marked:
            look = {'marker': curve.marker, **edge} | ({} if curve.joined else {'linestyle': 'none'})
        handles.append(Line2D([], [], color=curve.colour, label=_wrap_label(curve.label, LEGEND_LABEL), **look))
    figure.legend(
        handles=handles,
        loc='outside lower center',
        ncols=_count_legend_columns(curves),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        labelspacing=0.3,
        borderaxespad=0.2,
    )


def _label_ends(axes: 'Axes', curves: Sequence[Curve]) -> None:
    """Writes the name of each curve at its right end. Names of close ends are shifted."""
    bounds, points = axes.get_window_extent(), axes.figure.dpi / 72
    ends = []
    for curve in curves:
        finite = np.flatnonzero(np.isfinite(curve.y))
        if len(finite):
            last = finite[-1]
            ends.append((axes.transData.transform((curve.x[last], curve.y[last]))[1], curve))
    ends.sort(key=lambda end: end[0])
    gap, places = 9.0 * points, []
    for height, _ in ends:
        places.append(max(height, places[-1] + gap) if places else height)
    if places and (excess := places[-1] - bounds.y1) > 0:  # too high: push down again
        places[-1] -= excess
        for i in reversed(range(len(places) - 1)):
            places[i] = min(places[i], places[i + 1] - gap)
    for place, (_, curve) in zip(places, ends, strict=True):
        fraction = (place - bounds.y0) / bounds.height
        axes.annotate(
            curve.label,
            (1.0, fraction),
            xycoords='axes fraction',
            xytext=(3, 0),
            textcoords='offset points',
            color=curve.colour,
            va='center',
            fontsize=7.5,
        )


def _format_log_axis(axis: 'Axis') -> None:
    """Ticks at 1, 2 and 5 times powers of ten, or at powers alone over many decades, printed as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = np.log10(high / low)
    subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 2 else (1.0, 2.0, 5.0)
    if decades < 0.7:
        subs = tuple(float(n) for n in range(1, 10))
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shorten(value)))
    axis.set_minor_formatter(NullFormatter())


def _wrap_label(label: str, width: int) -> str:
    """The label on lines of at most `width` characters; an equation stays on one line."""
    return textwrap.fill(label.replace(' = ', '\u00a0=\u00a0'), width)


def _balance_lines(label: str, width: int) -> str:
    """The label on as few lines of at most `width` characters, about equally long; a unit in brackets is not torn."""
    whole = re.sub(r'\([^)]*\)', lambda unit: unit[0].replace(' ', '\u00a0'), label)
    found = [textwrap.fill(whole, n, break_long_words=False) for n in range(1, width + 1)]
    shown = next(text for text in found if text.count('\n') == found[-1].count('\n'))
    return shown.replace('\u00a0', ' ')


def _limit_ticks(axis: 'Axis') -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    if max(axis.get_view_interval()) >= 10_000:
        axis.set_major_formatter(FuncFormatter(lambda value, _: shorten(value)))
