"""A finding (a cause of lost time on one rank), and how rows of a table are summed into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.rank_view import FRAME, LIBRARY, RankView
from etloom.core import categories
from etloom.core.arrays import encode_texts, map_text, take_rows
from etloom.core.intervals import EMPTY, Intervals, union
from etloom.core.text import count_noun

_LOCATION = ("step", "stream", "name", "operator", "module", "frame", "event")
MAX_PLACES = 5
"""Maximum number of places by which a finding is split; the others are one more part."""
LONGEST_COUNT = 3
_MIN_SHARE = 0.5
"""Share of the lost time in a function that is named."""
_ADDRESS = r" at 0x[0-9a-f]+"
LONG_GAP_NS, LONG_SINGLE_GAP_NS = 5_000_000, 1_000_000
"""Gap length in ns: a launch takes a few us, so in a gap this long the host, or the device, did something else."""
HOST, DEVICE, BOTH = "host", "device", "both"


@dataclass(frozen=True)
class Part:
    """Cost and number of occurrences of a finding at one place (operator, module, kind of copy, or rank)."""

    place: str | None
    cost_ns: int
    count: int
    job_gain_ns: int | None = None
    """The time that the job would save without this part alone, ns, where that is simulated."""
    more: int = 0
    """The number of places that it sums, if it stands for those that are not listed."""


@dataclass(frozen=True)
class Finding:
    """A cause of lost time on one rank, with its cost, place and advice.

    Attributes:
        title: The problem, in one sentence.
        cost_ns: Upper bound of the time that the rank would save without it.
        confidence: high (measured), medium (measured, but part of it is unavoidable) or low (estimated).
        advice: The remedy.
        lost: When the time is lost; the cost is spread evenly over it.
        tracks: The tracks that would be shorter without it: HOST (threads, and delays between host and device),
            DEVICE (kernels, copies, communication) or BOTH.
        event: Id of the host event to look at.
        start_ns: Start of the costliest occurrence, on the rank's clock.
        end_ns: End of the costliest occurrence.
        in_steps_ns: The part of the cost inside annotated steps.
        kind: Distinguishes findings of one pattern; the same on all ranks.
        parts: The cost by place, largest first, if there are several places.
        components: The findings that this one sums, whose times and tracks differ.
        is_artifact: It may exist in the recording only, and comes after all that promises a gain.
    """

    title: str
    cost_ns: int
    confidence: str
    advice: str
    lost: Intervals
    tracks: str
    count: int = 1
    step: int | None = None
    stream: int | None = None
    name: str | None = None
    operator: str | None = None
    module: str | None = None
    frame: str | None = None
    event: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    in_steps_ns: int = 0
    kind: str | None = None
    parts: tuple[Part, ...] = ()
    components: tuple[Finding, ...] = ()
    is_artifact: bool = False


def find_function(view: RankView, finding: Finding) -> tuple[str, str, float] | None:
    """Return the Python function of the user's code in which most of a finding's time is, if stacks were recorded.

    Returns:
        The function, what runs in it for most of the time (the same, if that is nothing else), and the share of the
        time in the function. Of functions that call each other, the innermost.
    """
    calls = view.find_host_events("", categories.PYTHON_CATEGORIES)
    if calls.is_empty():
        return None
    if finding.event is not None:
        place = view.trace.events.filter(id=finding.event).select("pid", "tid")
        calls = calls.join(place, on=("pid", "tid"), maintain_order="left")
    calls = calls.with_columns(
        name=pl.col("name").str.replace(_ADDRESS, ""),
        lost=pl.Series(finding.lost.covered(calls["ts"], calls["end"]), dtype=pl.Int64),
    ).filter(pl.col("lost") > 0)
    names = calls.group_by("name").agg(pl.col("lost").sum(), pl.col("dur").mean())
    most = names.filter(pl.col("lost") >= _MIN_SHARE * finding.lost.total).sort("dur", "name")
    by_user = most.filter(pl.col("name").str.contains(FRAME) & ~pl.col("name").str.contains(LIBRARY))
    if by_user.is_empty():
        return None
    return by_user["name"][0], most["name"][0], by_user["lost"][0] / finding.lost.total


def describe_function(function: str, innermost: str, share: float) -> str:
    """Return "90 % of it in FUNCTION, which runs INNERMOST", of the answer of `find_function`."""
    inner = "" if innermost == function else f", which runs {innermost}"
    return f"{min(100 * share, 100):.0f} % of it in {function}{inner}"


def sum_places(
    view: RankView,
    rows: pl.DataFrame,
    title: Callable[[dict[str, Any]], str],
    *,
    confidence: str,
    advice: str | Callable[[dict[str, Any]], str],
    tracks: str,
    by: str = "operator",
    kind: str | None = None,
    min_rows: int = 1,
    hidden: Intervals = EMPTY,
) -> Iterator[Finding]:
    """Yield a single Finding that sums rows of lost time, with its cost by place (``by``); none if no time is lost.

    It is located at the most expensive row of the most expensive place.

    Args:
        view: The rank.
        rows: event (the responsible host event, or null), cost_ns, start and end of the time it covers, and, if known,
            step, stream and name.
        title: Returns the title, given that row with ``cost_ns`` and ``count`` of all, ``places`` (their number) and
            ``longest``, the LONGEST_COUNT highest costs.
        confidence: high, medium or low.
        advice: The advice, or a function like ``title``.
        tracks: See `Finding`.
        by: operator, name, call (the operator, else the event's own name), or block (the class of the module, else the
            operator). By name and call, rows of one event count once.
        kind: Distinguishes findings of one pattern.
        min_rows: Minimum number of rows of a place.
        hidden: Times at which nothing is lost.
    """
    costly = np.flatnonzero(rows["cost_ns"].to_numpy() > 0)
    if costly.size < max(min_rows, 1):
        return
    rows = take_rows(rows, costly) if costly.size < rows.height else rows
    labels = _label_places(view, rows, by)
    if min_rows > 1:
        place = encode_texts(labels)
        kept = np.flatnonzero(np.bincount(place)[place] >= min_rows)
        rows, labels = take_rows(rows, kept), take_rows(labels, kept)
    if rows.is_empty():
        return
    costs = rows["cost_ns"].to_numpy()
    # A call that waits delays several launches after it.
    is_new = np.ones(rows.height, np.bool_)
    if by in ("call", "name"):
        is_new = (rows["event"].is_first_distinct() | rows["event"].is_null()).to_numpy()
    places, place_costs, counts = _rank_places(encode_texts(labels), costs, is_new)
    first = int(places[0])
    row = rows.row(first, named=True) | view.locate(rows["event"][first : first + 1]).row(0, named=True)
    row[by] = labels[first]
    row["longest"] = np.sort(costs)[::-1][:LONGEST_COUNT].tolist()
    lost = Intervals.of(rows["start"], rows["end"]) - hidden
    row["cost_ns"], row["in_steps_ns"] = _sum_cost(view, rows, lost)
    row |= {"count": int(is_new.sum()), "places": places.size}
    location: dict[str, Any] = {name: row.get(name) for name in _LOCATION}
    yield Finding(
        title(row),
        row["cost_ns"],
        confidence,
        advice if isinstance(advice, str) else advice(row),
        lost,
        tracks,
        row["count"],
        **location,
        start_ns=row["start"],
        end_ns=row["end"],
        in_steps_ns=row["in_steps_ns"],
        kind=kind,
        parts=_limit_parts(list(map(Part, labels[places].to_list(), place_costs, counts)))
        if places.size > 1
        else (),
    )


def _rank_places(
    place: np.ndarray, costs: np.ndarray, is_new: np.ndarray
) -> tuple[np.ndarray, list[int], list[int]]:
    """Return the costliest row, total cost (ns) and occurrences (new rows) of each place, by descending total."""
    by_place = np.lexsort((-costs, place))
    firsts = np.flatnonzero(np.diff(place[by_place], prepend=-1))
    rows, sums = by_place[firsts], np.add.reduceat(costs[by_place], firsts)
    order = np.lexsort((rows, -costs[rows], -sums))
    return (
        rows[order],
        sums[order].tolist(),
        np.add.reduceat(is_new[by_place], firsts, dtype=int)[order].tolist(),
    )


def _label_places(view: RankView, rows: pl.DataFrame, by: str) -> pl.Series:
    """Return the place of each row of lost time as text; ``by``: as in `sum_places`."""
    if by == "name":
        return rows["name"]
    if by == "call":
        operators = view.locate(rows["event"], ["operator"])["operator"]
        calls = take_rows(view.trace.events["name"], view.find_rows(rows["event"]))
        return operators.zip_with(operators.is_not_null(), calls)
    if by != "block":
        return view.locate(rows["event"], [by])[by]
    located = view.locate(rows["event"], ["operator", "module"])
    return _name_blocks(located["module"], located["operator"])


def _name_blocks(modules: pl.Series, operators: pl.Series) -> pl.Series:
    """Return the block of each row of lost time: its module's class (all layers of a class are one block), else its
    operator."""
    if modules.null_count() == len(modules):
        return operators
    classes = map_text(modules, lambda name: name.str.replace(r"_\d+$", ""))
    return classes.zip_with(classes.is_not_null(), operators)


def sum_findings(findings: Sequence[Finding], title: str, by: str = "operator") -> Finding:
    """Combine several findings of a rank into a single finding, with the place of the most expensive.

    Args:
        findings: At least one.
        title: The problem that they share.
        by: Names the place of a finding that has one place only: operator or name.
    """
    if len(findings) == 1:
        return findings[0]
    ordered = sorted(findings, key=lambda finding: -finding.cost_ns)
    lost = union(finding.lost for finding in ordered)
    by_place: dict[str, Part] = {}
    for finding in ordered:
        for part in finding.parts or (Part(getattr(finding, by), finding.cost_ns, finding.count),):
            place = " ".join(filter(None, (finding.kind, part.place)))
            same = by_place.get(place, Part(place, 0, 0))
            by_place[place] = _sum_parts(place, (same, part))
    parts = list(by_place.values())
    return replace(
        ordered[0],
        title=title,
        cost_ns=min(sum(finding.cost_ns for finding in ordered), lost.total),
        lost=lost,
        count=sum(finding.count for finding in ordered),
        in_steps_ns=min(sum(finding.in_steps_ns for finding in ordered), lost.total),
        kind=None,
        parts=_limit_parts(sorted(parts, key=lambda part: -part.cost_ns)),
        components=tuple(ordered),
    )


def _limit_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the first `MAX_PLACES` parts of a finding's cost, and one more part with the sum of the others."""
    listed = [part for part in parts if not part.more][:MAX_PLACES]
    rest = [part for part in parts if part not in listed]
    if not rest:
        return tuple(parts)
    more = sum(part.more or 1 for part in rest)
    return (*listed, replace(_sum_parts(f"{more:,} more", rest), more=more))


def _sum_parts(place: str, parts: Sequence[Part]) -> Part:
    """Sum the costs and counts of several parts of a finding's cost into one part for ``place``."""
    cost_ns, count, more = (
        sum(getattr(part, name) for part in parts) for name in ("cost_ns", "count", "more")
    )
    return Part(place, cost_ns, count, more=more)


def compute_cost(view: RankView, rows: pl.DataFrame) -> tuple[int, int]:
    """Return the total time lost in rows (ns), and the part of it inside annotated steps.

    Concurrent losses of several streams or threads are counted once.

    Args:
        view: The rank.
        rows: cost_ns, and the start and end of the time over which it is spread evenly.
    """
    return _sum_cost(view, rows, Intervals.of(rows["start"], rows["end"]))


def _sum_cost(view: RankView, rows: pl.DataFrame, lost: Intervals) -> tuple[int, int]:
    """Return the total lost time of rows and its part inside annotated steps (ns), each limited to the time in
    ``lost``."""
    start, end, each = (rows[name].to_numpy() for name in ("start", "end", "cost_ns"))
    inside = view.step_intervals.covered(start, end) / np.maximum(end - start, 1) * each
    in_steps = min(round(float(inside.sum())), (lost & view.step_intervals).total)
    return min(round(float(each.sum())), lost.total), in_steps


def format_times(count: int) -> str:
    """Format a number of occurrences: "once", "2 times", "1,390 times"."""
    return "once" if count == 1 else f"{count:,} times"


def describe_place(row: dict[str, Any], name: str = "operator", before: str = " in ") -> str:
    """Return " in OPERATOR" (or " in BLOCK"); an empty string if the place is unknown or there are several."""
    return f"{before}{row[name]}" if row["places"] == 1 and row.get(name) else ""


def find_long_gaps(row: dict[str, Any]) -> list[int]:
    """Return the lengths (ns) of the longest idle gaps of a finding if they make up most of its cost, else an empty
    list. One gap that makes up most of it is long from `LONG_SINGLE_GAP_NS` on.

    ``row``: as in `sum_places`.
    """
    least = LONG_SINGLE_GAP_NS if 2 * row["longest"][0] > row["cost_ns"] else LONG_GAP_NS
    long = [gap for gap in row["longest"] if gap >= least]
    return long if 2 * sum(long) > row["cost_ns"] else []


def describe_long_gaps(row: dict[str, Any]) -> str:
    """Return text such as ", most of it in 2 gaps of up to 26 ms"; empty if a few long gaps do not dominate."""
    long = find_long_gaps(row)
    if not long:
        return ""
    up_to = "up to " if len(long) > 1 else ""
    part = "" if len(long) == row["count"] else f", most of it in {count_noun(len(long), 'gap')}"
    return f"{part} of {up_to}{long[0] / 1e6:,.0f} ms"
