"""Charts of the HTA compatibility layer, drawn with Altair.

What the methods draw by default (``visualize=True``) appears in notebooks that have Altair, and nowhere else: a script
should neither open a browser nor fail for lack of a display.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.paths import expand_home
from etloom.formats.io.atomic_file import replacing

if TYPE_CHECKING:
    import pandas as pd

_TOTAL = "_total_duration"
_BINS = 50


def show_bars(
    values: pd.DataFrame, title: str, *, x: str, y: str, color: str | None = None, rows: str | None = None
) -> None:
    """Show a bar chart in a notebook, stacked by the column ``color``; one chart per value of the column ``rows``."""
    if (altair := _find_altair()) is None or values.empty:
        return
    channels: dict[str, Any] = {
        "x": altair.X(field=x, type="nominal", sort=None),
        "y": altair.Y(field=y, type="quantitative", title=y),
        "tooltip": [altair.Tooltip(field=column) for column in (x, y, color, rows) if column],
    }
    if color:
        channels["color"] = altair.Color(field=color, type="nominal", sort=None)
    if rows:
        channels["row"] = altair.Row(field=rows, type="nominal")
    with altair.data_transformers.enable("default", max_rows=None):
        importlib.import_module("IPython.display").display(
            altair.Chart(values, title=title).mark_bar().encode(**channels)
        )


def show_shares(values: pd.DataFrame, title: str, *, x: str, parts: Sequence[str], y: str) -> None:
    """Show a stacked bar per row in a notebook, with a section for each of the columns ``parts``."""
    if _find_altair() is not None and not values.empty:
        long = values.melt(id_vars=x, value_vars=list(parts), var_name="part", value_name=y)
        show_bars(long, title, x=x, y=y, color="part")


def show_histogram(values: pd.DataFrame, title: str, *, column: str, above: float) -> None:
    """Show a histogram of the values above a limit in a notebook, with intervals of equal width."""
    if _find_altair() is None:
        return
    import pandas

    large = values.loc[values[column] > above, column]
    counts, edges = np.histogram(large, bins=_BINS)
    bins = pandas.DataFrame({column: edges[:-1].round(1), "count": counts})
    show_bars(bins[counts > 0], title, x=column, y="count")


def _find_altair() -> Any:
    """Return the module Altair; None outside notebooks or if it is not installed."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return None
    try:
        import altair
    except ImportError:
        return None
    return altair


def draw_diff(df: pd.DataFrame, quantity: str, title: str, show: bool, path: str | None) -> None:
    """Draw three bars per operator name: the values of two traces, and their difference.

    Args:
        df: The result of TraceDiff.compare_traces.
        quantity: "counts" or "duration" (us).
        title: The title of the chart.
        show: Whether to display it.
        path: File to write, or None.

    Raises:
        EtloomError: Altair is not installed, the frame is not of compare_traces, or the file cannot be written.
    """
    altair = _import_altair()
    labels = [column.removesuffix(_TOTAL) for column in df.columns if column.endswith(_TOTAL)]
    if len(labels) != 2 or f"diff_{quantity}" not in df:
        raise InvalidValue(
            "the frame has no columns of two traces", remedy="pass the result of compare_traces"
        )
    suffix = "counts" if quantity == "counts" else _TOTAL[1:]
    columns = {**{f"{label}_{suffix}": label for label in labels}, f"diff_{quantity}": "Difference"}
    values = df[list(columns)].rename(columns=columns).rename_axis("name").reset_index()
    bars = values.melt(id_vars="name", var_name="trace", value_name="value")
    unit = "count" if quantity == "counts" else "total duration (us)"
    with altair.data_transformers.enable("default", max_rows=None):
        chart = (
            altair.Chart(bars, title=title)
            .mark_bar()
            .encode(
                x=altair.X("name:N", sort=None, title=None),
                xOffset=altair.XOffset("trace:N", sort=None),
                y=altair.Y("value:Q", title=unit),
                color=altair.Color("trace:N", sort=None, title=None),
                tooltip=["name", "trace", "value"],
            )
        )
        if path:
            _save(chart, path)
        if show:
            chart.show()


def draw_timeline(
    values: pd.DataFrame,
    title: str,
    *,
    x: tuple[str, str],
    y: str,
    color: str,
    show: bool,
    as_html: bool,
    path: str | None,
) -> str | None:
    """Draw a bar per row between two columns (us), on the line of its ``y``; return it as HTML if ``as_html``.

    Args:
        values: the rows; all columns appear next to the pointer.
        title: The title of the chart.
        x: The columns of the starts and ends.
        y: The column of the lines.
        color: The column of the colors.
        show: Whether to show it in a notebook that has Altair.
        as_html: Whether to return the text of a page.
        path: File to write, or None.

    Raises:
        EtloomError: Altair is not installed, or the file cannot be written.
    """
    if values.empty or not (path or as_html or (show and _find_altair() is not None)):
        return None
    altair = _import_altair()
    with altair.data_transformers.enable("default", max_rows=None):
        chart = (
            altair.Chart(values, title=title)
            .mark_bar()
            .encode(
                x=altair.X(field=x[0], type="quantitative", title="us"),
                x2=altair.X2(field=x[1]),
                y=altair.Y(field=y, type="nominal", title=None),
                color=altair.Color(field=color, type="nominal", sort=None, legend=None),
                tooltip=[altair.Tooltip(field=column) for column in values.columns],
            )
            .interactive()
        )
        if path:
            _save(chart, path)
        if show and _find_altair() is not None:
            importlib.import_module("IPython.display").display(chart)
        return str(chart.to_html()) if as_html else None


def _import_altair() -> Any:
    """Return the module Altair. Raises EtloomError if it is not installed."""
    try:
        import altair
    except ImportError:
        raise EtloomError("Altair is not installed", remedy='pip install "etloom[plot]"') from None
    return altair


def _save(chart: Any, path: str) -> None:
    """Write a chart to a file in the format of its suffix. Raises EtloomError if it cannot be written."""
    target = expand_home(path)
    try:
        with replacing(target) as partial:
            chart.save(str(partial), format=target.suffix[1:].lower())
    except (OSError, ValueError, ImportError) as error:
        raise EtloomError(f"cannot be written: {error}", where=path) from None
