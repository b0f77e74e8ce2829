"""Renders stacked bars and columns as HTML and SVG. All text in them is escaped here.

Sizes are attributes in percent, since the policy of the page does not allow inline styles: charts are as wide as the
page, and text in them keeps its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from etloom.core.text import format_duration

MIN_LABELED_SHARE = 0.05
"""Share of the width from which a part of a bar has a label."""
MIN_LABELED_SHARE_ON_PHONE = 0.2
MAX_COLUMN_PERCENT = 4
"""Width of a column, in percent of the page, unless there are too many."""


def render_legend(labels: Mapping[str, str]) -> str:
    """Render the legend of a chart as HTML. labels: color class in report.css -> text."""
    return "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{escape(label)}</li>"
        for name, label in labels.items()
    )


def render_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colors: Mapping[str, str],
    labels: Mapping[str, str],
    texts: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """Render horizontal stacked bars, one per row; ``rows`` has the label and the share (0 to 1) of each part.

    Args:
        colors: class of each part in report.css.
        labels: label of each part.
        texts: text of a bar by row and part; default: its share.
    """
    bars = []
    for label, shares in rows:
        left, parts, spoken = 0.0, [], []
        for part, share in shares.items():
            width = 100 * max(0.0, share)
            text = texts[label, part] if texts else f"{100 * share:.1f} %"
            spoken.append(f"{labels[part]} {text}")
            parts.append(
                f"<g><title>{escape(f'{label}, {labels[part]}: {text}')}</title>"
                f'<rect class="{colors[part]}" x="{left:.2f}%" width="{width:.2f}%" height="24"/></g>'
            )
            if share >= MIN_LABELED_SHARE:
                narrow = "" if share >= MIN_LABELED_SHARE_ON_PHONE else " wide-only"
                classes = f"inside on-{colors[part]}{narrow}"
                parts.append(f'<text class="{classes}" x="{left:.2f}%" dx="6" y="16">{escape(text)}</text>')
            left += width
        description = escape(f"{label}: {', '.join(spoken)}")
        bars.append(
            f'<li><span>{escape(label)}</span><svg role="img" height="24" aria-label="{description}">'
            f"{''.join(parts)}</svg></li>"
        )
    return f'<ul class="bars">{"".join(bars)}</ul>'


def render_columns(
    columns: Sequence[tuple[str, Mapping[str, float]]],
    colors: Mapping[str, str],
    labels: Mapping[str, str],
    title: str,
    steps: Sequence[int] | None = None,
) -> str:
    """Render vertical stacked columns on one scale; ``columns`` has the label and the time (ns) of each part.

    Args:
        colors: class of each part in report.css.
        labels: label of each part.
        title: text for screen readers.
        steps: the step of each column, which a click on it shows on the timeline.
    """
    top = max((sum(parts.values()) for _, parts in columns), default=0) or 1
    groups = []
    for i, (label, parts) in enumerate(columns):
        texts = [f"{labels[part]} {format_duration(ns)}" for part, ns in parts.items() if ns]
        total = format_duration(sum(parts.values()))
        y, rects = 100.0, []
        for part, ns in parts.items():
            height = 100 * max(0.0, ns) / top
            y -= height
            rects.append(
                f'<rect class="{colors[part]}" x="{i + 0.04}" y="{y:.2f}" width="0.92" height="{height:.2f}"/>'
            )
        text = escape(f"{label}: {total} ({', '.join(texts)})")
        step = "" if steps is None else f' data-step="{steps[i]}"'
        groups.append(f"<g{step}><title>{text}</title>{''.join(rects)}</g>")
    width = min(100, MAX_COLUMN_PERCENT * len(columns))
    range_text = " to ".join(dict.fromkeys((columns[0][0], columns[-1][0])))
    return (
        f'<figure class="columns"><span class="soft">{escape(format_duration(top))}</span>'
        f'<svg role="img" aria-label="{escape(title)}" width="{width}%" '
        f'viewBox="0 0 {len(columns)} 100" preserveAspectRatio="none">'
        f"{''.join(groups)}</svg>"
        f'<figcaption class="soft">{escape(range_text)}</figcaption></figure>'
    )
