"""Tables and bars as HTML and SVG. Every text is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import polars as pl

from etloom.reports.formatting import ColumnFormat, choose_column_format
from etloom.reports.kernel_labels import shorten_labels

MAX_ROWS = 2000
MAX_UNSCROLLED_ROWS = 40
"""Rows that are higher than the box they scroll in."""
BREAKABLE_COLUMNS = frozenset({"name", "note", "example", "kernel"})
"""Columns of text that may break anywhere, so that a kernel's name does not push the numbers out of sight. Names of
kernels are made short in them, and are whole where the pointer rests, and for the filter."""


def render_table(
    frame: pl.DataFrame,
    name: str,
    title: str,
    note: str = "",
    *,
    absent: Mapping[str, str] | None = None,
    limit: int = MAX_ROWS,
    bar: str | None = None,
) -> str:
    """A sortable table as HTML, its first ``limit`` rows; what is left out is said.

    note: plain text beside the title. absent: what null means in a column, "none" where not said. bar: a column of
    changes that are drawn beside their numbers, to the right where there is more.
    """
    columns = [choose_column_format(frame, column) for column in frame.columns]
    if frame.height > limit:
        note = f"{note} The first {limit:,} of {frame.height:,} rows.".strip()
    heads = "".join(
        f'<th scope="col"{_class_attribute(column)}><button type="button">{escape(column.header)}</button></th>'
        for column in columns
    )
    nulls = [(absent or {}).get(column, "none") for column in frame.columns]
    most = 0.0 if bar is None else float(frame.head(limit)[bar].abs().max() or 0)  # type: ignore[arg-type]
    tops = [most if column == bar else 0.0 for column in frame.columns]
    short = [
        _shortened_texts(frame[column].head(limit)) if column in BREAKABLE_COLUMNS else {}
        for column in frame.columns
    ]
    rows = "".join(
        f"<tr>{''.join(map(_render_cell, columns, frame.columns, row, nulls, short, tops))}</tr>"
        for row in frame.head(limit).iter_rows()
    )
    return (
        f'<div class="table"><div class="table-head"><h3 id="{name}-title">{escape(title)}</h3>'
        f"<p>{escape(note)}</p>"
        f'<input type="search" data-table="{name}" placeholder="Filter rows" '
        f'aria-label="Filter the rows of {escape(title)}"></div>'
        f'<div class="{_wrapper_classes(frame)}" tabindex="0" role="region" aria-labelledby="{name}-title">'
        f'<table id="{name}" class="sortable" aria-labelledby="{name}-title">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _wrapper_classes(frame: pl.DataFrame) -> str:
    """The classes of the box around a table: what is surely higher than the box need not be laid out out of sight."""
    return "wrap many" if frame.height > MAX_UNSCROLLED_ROWS else "wrap"


def _shortened_texts(texts: pl.Series) -> dict[str, str]:
    """Text -> what is shown in place of it, of those texts of a column that are not shown whole."""
    if texts.dtype != pl.String and texts.dtype != pl.Categorical:
        return {}
    distinct = texts.drop_nulls().cast(pl.String).unique().to_list()
    pairs = zip(distinct, shorten_labels(distinct), strict=True)
    return {text: said for text, said in pairs if said is not None and said != text}


def _class_attribute(column: ColumnFormat, *more: str) -> str:
    classes = [*(["number"] if column.number else []), *more]
    return f' class="{" ".join(classes)}"' if classes else ""


def _render_cell(
    column: ColumnFormat, name: str, value: Any, absent: str, short: Mapping[str, str], top: float = 0
) -> str:
    text = column.text(value)
    if text == "" and value != "":
        return f"<td{_class_attribute(column, 'null')} data-empty>{escape(absent)}</td>"
    attribute = f' data-value="{value}"' if column.number and not isinstance(value, bool) else ""
    classes = ["long"] if name in BREAKABLE_COLUMNS else []
    if name == "severity" and value in ("data_loss", "error"):
        classes.append(f"severity-{value}")
    if text in short:
        attribute += f' title="{escape(text)}"'
    text = short.get(text, text)
    inside = f"<div>{escape(text)}</div>" if name in BREAKABLE_COLUMNS else escape(text)
    if top:
        inside = _render_change_bar(value / top) + inside
    return f"<td{_class_attribute(column, *classes)}{attribute}>{inside}</td>"


def _render_change_bar(share: float) -> str:
    """A bar from the middle: to the right, and worse, where the share (-1 to 1) is positive."""
    side, size = "worse" if share > 0 else "better", 40 * abs(share)
    x = 40.0 if share > 0 else 40 - size
    return (
        '<svg class="change" viewBox="0 0 80 8" aria-hidden="true"><rect class="axis" x="39.5" width="1" height="8"/>'
        f'<rect class="{side}" x="{x:.1f}" width="{size:.1f}" height="8"/></svg>'
    )


def render_bars(
    rows: list[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    texts: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """Stacked bars as SVG: per row a label and the share (0 to 1) of each part; ``colours`` gives a part's class.

    texts: what a bar says, by row and part; its share where not given. Sizes are attributes, since the page's policy
    allows no inline style.
    """
    width, height, left = 1000, 24, 90
    room = width - left
    parts = []
    for i, (label, shares) in enumerate(rows):
        y, x = i * (height + 6), float(left)
        parts.append(f'<text x="0" y="{y + 16}">{escape(label)}</text>')
        for part, share in shares.items():
            size = max(0.0, share) * room
            text = texts[label, part] if texts else f"{100 * share:.1f} %"
            title = f"{label}, {labels[part]}: {text}"
            parts.append(
                f'<g><title>{escape(title)}</title><rect class="{colours[part]}" x="{x:.2f}" y="{y}" '
                f'width="{size:.2f}" height="{height}"/>'
            )
            if size > 44:
                parts.append(
                    f'<text class="inside on-{colours[part]}" x="{x + 6:.2f}" y="{y + 16}">'
                    f"{escape(text)}</text>"
                )
            parts.append("</g>")
            x += size
    bottom = max(1, len(rows) * (height + 6))
    return (
        f'<div class="bars-wrap"><svg class="bars" viewBox="0 0 {width} {bottom}" role="img" aria-label="Stacked bars">'
        f"{''.join(parts)}</svg></div>"
    )
