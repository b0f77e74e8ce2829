"""The chart of the step times of several runs: by step number on one axis, with the change of each matched step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean, median

import polars as pl

from etloom.analyses.answers import answer
from etloom.comparison import Difference
from etloom.core.text import count_noun, format_duration
from etloom.core.trace import Job
from etloom.reports.html_charts import render_legend

MAX_STEPS = 500
"""Steps in the chart, the first ones."""
MAX_MARKED_STEPS = 120
"""Up to this number of steps, each time is a point."""
COLORS = 6
"""Colors of runs in report.css; further runs have the same ones again."""
_WIDTH, _LEFT, _HEIGHT, _STRIP = 1000, 70, 170, 46

Steps = list[tuple[str, list[float | None]]]
"""Label and the time of each run, ns, of each place on the axis; None where a run lacks the step."""


def list_step_times(job: Job) -> dict[int, float]:
    """Return step number -> mean step time over the ranks, ns, ascending: the values of `Difference.step_times`."""
    table = answer(job, "temporal-breakdown").table.drop_nulls("step")
    means = table.group_by("step").agg(pl.col("span_ns").mean()).sort("step").drop_nulls()
    return dict(means.iter_rows())


def match_steps(runs: Sequence[Mapping[int, float]]) -> tuple[Steps, bool]:
    """Return the places of the axis, and whether they are step numbers.

    Steps with the same number are matched. If no number is common to all runs, steps are matched in their order.
    """
    if set.intersection(*(set(run) for run in runs)):
        numbers = sorted(set().union(*runs))
        return [(str(number), [run.get(number) for run in runs]) for number in numbers], True
    ordered = [list(run.items()) for run in runs]
    places: Steps = []
    for place in range(max(map(len, ordered))):
        steps = [run[place] if place < len(run) else None for run in ordered]
        labels = dict.fromkeys(str(step[0]) for step in steps if step)
        places.append((" and ".join(labels), [step and step[1] for step in steps]))
    return places, False


def render_steps(differences: Sequence[Difference], names: Sequence[str]) -> str:
    """Draw the step times of all runs as lines on one axis; of two runs, with the change of each matched step.

    The script of the page shows the timelines of a step that is clicked.
    """
    jobs = [differences[0].before, *(difference.after for difference in differences)]
    runs = [list_step_times(job) for job in jobs]
    if max(map(len, runs)) < 2:
        return '<p class="soft">Each run has at most one step: nothing to draw.</p>'
    steps, are_numbers = match_steps(runs)
    parts = [_describe_matches(steps, are_numbers, is_pair=len(runs) == 2)]
    if len(steps) > MAX_STEPS:
        parts.append(f"The first {MAX_STEPS:,} of {len(steps):,} steps.")
        steps = steps[:MAX_STEPS]
    low, high, is_cut = _choose_range([time for _, times in steps for time in times if time is not None])
    if low:
        parts.append(f"The axis begins at {format_duration(low)}.")
    if is_cut:
        cut = sum(any(time is not None and time > high for time in times) for _, times in steps)
        parts.append(f"{count_noun(cut, 'step')} longer than {format_duration(high)} cut off.")
    parts.append("The dashed lines are the medians.")

    def at_x(place: int) -> float:
        return _LEFT + (place + 0.5) * (_WIDTH - _LEFT) / len(steps)

    def at_y(time: float) -> float:
        return 8 + (_HEIGHT - 8) * (1 - (min(time, high) - low) / (high - low))

    drawn = [_draw_axis(steps, low, high, at_x, at_y)]
    for run in range(len(runs)):
        drawn.append(_draw_run(run, [times[run] for _, times in steps], at_x, at_y))
    height = _HEIGHT + 22
    if len(runs) == 2:
        drawn.append(_draw_changes(steps, at_x, height))
        height += _STRIP + 4
    drawn.append(_draw_hits(steps, names, height))
    legend = render_legend({f"run-{run % COLORS}": name for run, name in enumerate(names)})
    return (
        f'<div class="bars-head"><p class="soft">{escape(" ".join(parts))}</p><ul class="legend">{legend}</ul></div>'
        f'<div class="bars-wrap"><svg class="step-chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Step times of all runs">{"".join(drawn)}</svg></div>'
    )


def _describe_matches(steps: Steps, are_numbers: bool, *, is_pair: bool) -> str:
    how = (
        "of the same number are" if are_numbers else "have no common numbers and are matched in their order,"
    )
    text = f"Step time, mean over the ranks; steps {how} above each other."
    changes = list(_list_changes(steps)) if is_pair else []
    if changes:
        slower = sum(change > 0 for _, change in changes)
        mean = fmean(change for _, change in changes)
        sign = "+" if mean > 0 else "-"
        text += (
            f" The second run is slower in {slower:,} of {count_noun(len(changes), 'matched step')}; "
            f"mean change {sign}{format_duration(abs(mean))}."
        )
    return text


def _list_changes(steps: Steps) -> Iterator[tuple[int, float]]:
    """Yield the place and the change, ns, of each step that both runs have."""
    for place, (_, times) in enumerate(steps):
        before, after = times[0], times[1]
        if before is not None and after is not None:
            yield place, after - before


def _choose_range(times: list[float]) -> tuple[float, float, bool]:
    """Return the bounds of the axis of times, and whether some are above it.

    A step of a hundred times the others must not flatten them, and a change of a few percent must be visible.
    """
    top = min(max(times), 4 * median(times)) or 1
    low = min(times)
    spread = top - low
    low = 0.0 if spread > 0.5 * top else max(0.0, low - max(0.1 * spread, 0.01 * top))
    return low, top, max(times) > top


def _draw_axis(
    steps: Steps, low: float, high: float, at_x: Callable[[int], float], at_y: Callable[[float], float]
) -> str:
    lines = []
    for time in (low, (low + high) / 2, high):
        y, label = at_y(time), format_duration(time) if time else "0"
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(label)}</text>'
        )
    stride = -(-len(steps) // 12)
    labels = [
        f'<text class="middle" x="{at_x(place):.1f}" y="{_HEIGHT + 14}">{escape(steps[place][0])}</text>'
        for place in range(0, len(steps), stride)
    ]
    return "".join([*lines, *labels])


def _draw_run(
    run: int,
    times: Sequence[float | None],
    at_x: Callable[[int], float],
    at_y: Callable[[float], float],
) -> str:
    """Draw the times of a run as a line, interrupted where it lacks a step, and their median."""
    points = {place: (at_x(place), at_y(time)) for place, time in enumerate(times) if time is not None}
    if not points:
        return ""
    color = f"run-{run % COLORS}"
    moves = [f"M{x:.1f} {y:.1f}" for x, y in list(points.values())[:1]]
    for (place, _), (following, (x, y)) in pairwise(points.items()):
        moves.append(f"{'L' if following == place + 1 else 'M'}{x:.1f} {y:.1f}")
    y = at_y(median(time for time in times if time is not None))
    marks = points.values() if len(times) <= MAX_MARKED_STEPS else ()
    circles = "".join(f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in marks)
    return (
        f'<path class="{color}" d="{"".join(moves)}"/>{circles}'
        f'<line class="{color} median" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    )


def _draw_changes(steps: Steps, at_x: Callable[[int], float], top: float) -> str:
    """Draw the change of each matched step as a bar, slower steps upwards."""
    changes = list(_list_changes(steps))
    largest = max((abs(change) for _, change in changes), default=0) or 1
    axis, width = top + _STRIP / 2, min(0.8 * (_WIDTH - _LEFT) / len(steps), 24)
    bars = [
        f'<rect class="{"worse" if change > 0 else "better"}" x="{at_x(place) - width / 2:.1f}" '
        f'y="{axis - max(change, 0) / largest * _STRIP / 2:.1f}" width="{width:.1f}" '
        f'height="{abs(change) / largest * _STRIP / 2:.1f}"/>'
        for place, change in changes
    ]
    return (
        f'<text class="end" x="{_LEFT - 6}" y="{top + 9:.1f}">+{escape(format_duration(largest))}</text>'
        f'<text class="end" x="{_LEFT - 6}" y="{axis + 4:.1f}">change</text>'
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{axis}" y2="{axis}"/>{"".join(bars)}'
    )


def _draw_hits(steps: Steps, names: Sequence[str], height: float) -> str:
    """Draw what shows the times of a step under the pointer; a click shows its timelines."""
    width = (_WIDTH - _LEFT) / len(steps)
    hits = []
    for place, (label, times) in enumerate(steps):
        texts = [
            f"{name} {'absent' if time is None else format_duration(time)}"
            for name, time in zip(names, times, strict=True)
        ]
        before, after = times[0], times[1]
        if len(times) == 2 and before and after is not None:
            texts.append(f"change {100 * (after / before - 1):+.1f} %")
        title = escape(f"step {label}: {', '.join(texts)}")
        hits.append(
            f'<g class="hit" data-step="{escape(label)}"><title>{title}</title>'
            f'<rect x="{_LEFT + place * width:.1f}" y="0" width="{width:.1f}" height="{height}"/></g>'
        )
    return "".join(hits)
