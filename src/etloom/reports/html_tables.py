"""Renders tables as HTML. All text in them is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

import polars as pl

from etloom.reports.formatting import ColumnFormat, choose_column_format
from etloom.reports.kernel_labels import shorten_labels

MAX_ROWS = 2000
MAX_UNSCROLLED_ROWS = 40
"""Number of rows above which a table is higher than the box it scrolls in."""
BREAKABLE_COLUMNS = frozenset({"name", "note", "example", "kernel", "shapes"})
"""Columns of text that may break anywhere, so that the name of a kernel does not push the numbers out of view. Kernel
names are shortened in them; the tooltip shows the full name, and the filter uses it."""


def render_table(
    frame: pl.DataFrame,
    name: str,
    title: str,
    note: str = "",
    *,
    absent: Mapping[str, str] | None = None,
    limit: int = MAX_ROWS,
    bar: str | None = None,
    links: Mapping[str, str] | None = None,
    calls: Sequence[str] = (),
) -> str:
    """Render a sortable table as HTML: its first ``limit`` rows, with a note if there are more.

    Args:
        note: plain text next to the title.
        absent: text for null by column; default: "none".
        bar: a column of changes that are drawn next to their numbers, increases to the right.
        links: address by text of the first column.
        calls: for each row the call that its button shows on the timeline (`encode_call`); empty for none.
    """
    columns = [choose_column_format(frame, column) for column in frame.columns]
    if frame.height > limit:
        note = f"{note} The first {limit:,} of {frame.height:,} rows.".strip()
    heads = "".join(
        f'<th scope="col"{_class_attribute(column)}><button type="button">{escape(column.header)}</button></th>'
        for column in columns
    )
    shown = frame.head(limit)
    largest = 0.0 if bar is None else float(shown[bar].abs().max() or 0)  # type: ignore[arg-type]
    cells = [
        _render_cells(column, shown[name], (absent or {}).get(name, "none"), largest if name == bar else 0.0)
        for column, name in zip(columns, frame.columns, strict=True)
    ]
    if links:
        cells[0] = [
            f'<td><a href="{escape(links[text])}">{escape(text)}</a></td>' for text in shown.to_series(0)
        ]
    if any(calls):
        heads += '<th scope="col"><button type="button">timeline</button></th>'
        cells.append([_render_call(call) for call in calls[: shown.height]])
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    return (
        f'<div class="table"><div class="table-head"><h3 id="{name}-title">{escape(title)}</h3>'
        f"<p>{escape(note)}</p>"
        f'<input type="search" data-table="{name}" placeholder="Filter rows" '
        f'aria-label="Filter the rows of {escape(title)}"></div>'
        f'<div class="{_wrapper_classes(frame)}" tabindex="0" role="region" aria-labelledby="{name}-title">'
        f'<table id="{name}" class="sortable" aria-labelledby="{name}-title">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _render_call(call: str) -> str:
    """Render the cell with the button that shows a call on the timeline; empty for none."""
    if not call:
        return "<td data-empty></td>"
    return f'<td><button type="button" class="call" data-call="{escape(call)}">longest</button></td>'


def _wrapper_classes(frame: pl.DataFrame) -> str:
    """Return the CSS classes of the scrolling box around a table; ``many`` defers the layout of a long table."""
    return "wrap many" if frame.height > MAX_UNSCROLLED_ROWS else "wrap"


def _shortened_texts(texts: pl.Series) -> dict[str, str]:
    """Return {text: shortened text} for the kernel names in a column that can be shortened."""
    if texts.dtype != pl.String and texts.dtype != pl.Categorical:
        return {}
    distinct = texts.drop_nulls().cast(pl.String).unique().to_list()
    pairs = zip(distinct, shorten_labels(distinct), strict=True)
    return {text: short_text for text, short_text in pairs if short_text is not None and short_text != text}


def _class_attribute(column: ColumnFormat, *more: str) -> str:
    classes = [*(["number"] if column.number else []), *more]
    return f' class="{" ".join(classes)}"' if classes else ""


def _render_cells(column: ColumnFormat, values: pl.Series, absent: str, top: float) -> list[str]:
    """Render the cells of a column as HTML; equal values are rendered only once."""
    is_long, states_severity = values.name in BREAKABLE_COLUMNS, values.name == "severity"
    short = _shortened_texts(values) if is_long else {}
    empty = f"<td{_class_attribute(column, 'null')} data-empty>{escape(absent)}</td>"
    classes = ["long"] if is_long else []
    usual = _class_attribute(column, *classes)

    def render(value: Any) -> str:
        text = column.text(value)
        if text == "" and value != "":
            return empty
        attributes = usual
        if states_severity and value in ("data_loss", "error"):
            attributes = _class_attribute(column, *classes, f"severity-{value}")
        if column.number and not isinstance(value, bool):
            attributes += f' data-value="{value}"'
        if text in short:
            attributes += f' title="{escape(text)}"'
            text = short[text]
        content = f"<div>{escape(text)}</div>" if is_long else escape(text)
        if top:
            content = _render_change_bar(value / top) + content
        return f"<td{attributes}>{content}</td>"

    # A list cannot be looked up.
    return list(map(render if values.dtype.is_nested() else cache(render), values.to_list()))


def _render_change_bar(share: float) -> str:
    """Render a bar for a change, as a share (-1 to 1) of the largest one: right if worse, left if better."""
    side, size = "worse" if share > 0 else "better", 40 * abs(share)
    x = 40.0 if share > 0 else 40 - size
    return (
        '<svg class="change" viewBox="0 0 80 8" aria-hidden="true"><rect class="axis" x="39.5" width="1" height="8"/>'
        f'<rect class="{side}" x="{x:.1f}" width="{size:.1f}" height="8"/></svg>'
    )
