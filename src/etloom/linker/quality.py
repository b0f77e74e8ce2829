"""Measure linking: shares of linked operators, GPU activity and collectives, as a table and in ``meta["link"]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.meta import LinkMeta
from etloom.core.text import count_noun
from etloom.core.trace import Trace
from etloom.linker.id_join import is_linkable
from etloom.linker.launches import find_device_communication
from etloom.linker.placement import format_example

COLUMNS = {
    "subject": pl.String,
    "how": pl.String,
    "total": pl.Int64,
    "linked": pl.Int64,
    "unlinked": pl.Int64,
    "share_pct": pl.Float64,
    "note": pl.String,
}
"""Columns of the summary: the subject, the key by which it is linked, counts, and why the rest is not linked."""

_REASONS = {
    "host operators": {
        "link.missing_threads": "on threads that the profile lacks",
        "link.outside_recording": "before or after the profile's time",
        "link.unlinked_operators": "not in the profile",
        "link.name_disagreements": "under another name in the profile",
        "link.repeated_ids": "ids that are not unique",
        "link.process_group_nodes": "process-group records, which only the execution trace contains",
        "read.repaired_parent": "recorded parents repaired",
    },
    "device work": {
        "link.launched_before_recording": "launched before the recording began",
        "link.launched_after_recording": "with a correlation above the last recorded call",
        "link.launch_not_recorded": "of calls that were not recorded",
        "link.without_correlation": "without a correlation",
        "link.no_calls_recorded": "in a recording without runtime calls",
        "link.repeated_correlations": "calls repeat a correlation",
        "link.activity_outside_nodes": "outside the time of the linked operators, left out of an ET+",
    },
    "launches": {
        "link.launch_without_operator": "outside any operator",
        "link.graph_launches": "launched several at once (graphs)",
        "link.activity_after_recording": "more whose GPU activity ran after the recording ended",
        "link.launches_without_activity": "more without visible GPU activity",
    },
    "collectives": {"link.comms_without_event": "calls that only the execution trace contains"},
}
"""Subject -> names of stats that explain why rows are not linked, and their text."""

_CATEGORIES = {
    "kernels": frozenset({"kernel", "Kernel"}),
    "copies": categories.MEMCPY_CATEGORIES,
    "sets": categories.MEMSET_CATEGORIES,
}


def summarize_links(trace: Trace) -> pl.DataFrame:
    """Return counts and share of linked rows of a linked trace, one row per subject (`COLUMNS`).

    share_pct is null if there is nothing to link.

    host operators: nodes of the execution trace with an event. device work: kernels, memcpys and memsets with their
    launch call, or the operator that the file names; each of these separately if the trace holds several. launches:
    calls with an operator around them. collectives: GPU activity that is communication by name, with a row in comms.
    steps: host and device events that belong to a step.
    """
    events, launches = trace.events, trace.launches
    link = trace.meta.get("link", {})
    launched = _mask_launched(launches)
    by = "file" if launches.height and not launches["launch"].count() and launched.any() else "correlation"
    calls = launches.drop_nulls("launch").unique("launch")
    communication = find_device_communication(trace) if launches.height else None
    staged = events["step"].filter(
        arrays.to_series(
            categories.mask_events(events, categories.HOST_CATEGORIES | categories.DEVICE_CATEGORIES)
        )
    )
    steps = staged.n_unique() - (staged.null_count() > 0)
    rows: list[tuple[Any, ...]] = [
        (
            "host operators",
            link.get("how"),
            *_count_operators(trace),
        ),
        ("device work", by, launches.height, int(launched.sum())),
        *_count_by_category(events, launches, launched.to_numpy(), by),
        ("launches", "time", calls.height, calls.height - calls["operator"].null_count()),
        (
            "collectives",
            "operator",
            0 if communication is None else communication.height,
            0 if communication is None else int(communication["known"].sum()),
        ),
        (
            "steps",
            "ProfilerStep",
            len(staged) if steps else 0,
            len(staged) - staged.null_count() if steps else 0,
        ),
    ]
    return _make_table(trace, rows, steps)


def _make_table(trace: Trace, rows: list[tuple[Any, ...]], steps: int) -> pl.DataFrame:
    """Complete rows (subject, key, total, linked) with shares and notes, and return them as a table (`COLUMNS`)."""
    link = trace.meta.get("link", {})
    # Two files may count the same.
    totals = trace.stats.group_by("name").agg(pl.col("count").sum(), pl.col("example").drop_nulls().first())
    counts = {name: (count, example) for name, count, example in totals.rows()}
    return pl.DataFrame(
        [
            (
                subject,
                key,
                total,
                linked,
                total - linked,
                100 * linked / total if total else None,
                _format_note(subject, link, counts, steps, total - linked),
            )
            for subject, key, total, linked in rows
        ],
        schema=COLUMNS,
        orient="row",
    )


def _count_by_category(
    events: pl.DataFrame, launches: pl.DataFrame, launched: np.ndarray, by: str
) -> list[tuple[str, str, int, int]]:
    """Count GPU activity, total and linked, for kernels, memcpys and memsets.

    Rows as in `summarize_links`; empty if all activity is of one category.
    """
    cats = launches.join(
        events.select("id", "cat"), left_on="device_event", right_on="id", how="left", maintain_order="left"
    )["cat"]
    rows = []
    for subject, names in _CATEGORIES.items():
        is_category = arrays.is_in(cats, names)
        if is_category.any():
            rows.append((subject, by, int(is_category.sum()), int((is_category & launched).sum())))
    return rows if len(rows) > 1 else []


def count_links(trace: Trace) -> LinkMeta:
    """Return the values of ``meta["link"]``: how operators were paired, and counts of linked rows.

    coverage is linked / host_operators of the execution trace, None if either file is missing; device_work and
    launched are of the profiler trace.
    """
    operators, linked = _count_operators(trace)
    return {
        **trace.meta.get("link", {}),
        "host_operators": operators,
        "linked": linked,
        "coverage": linked / operators if operators and trace.events.height else None,
        "device_work": trace.launches.height,
        "launched": int(_mask_launched(trace.launches).sum()),
    }


def _count_operators(trace: Trace) -> tuple[int, int]:
    """Return the number of operators of the execution trace that can be linked, and the number that are linked."""
    if not trace.nodes.height and not trace.links.height:
        return 0, 0
    operators = is_linkable(trace.nodes) if trace.nodes.height else np.zeros(0, bool)
    # A file that holds nodes and events as one has nodes of the device, too.
    device = trace.launches.select(event="device_event")
    device_nodes = trace.links.join(device, on="event", how="semi")["node"]
    operators &= ~trace.nodes["id"].is_in(device_nodes.implode()).to_numpy()
    return int(operators.sum()), trace.links["node"].n_unique() - device_nodes.n_unique()


def _mask_launched(launches: pl.DataFrame) -> pl.Series:
    """Return a mask of the GPU activity that has a launch call, or an operator that the file states."""
    return launches.select(pl.coalesce("launch", "operator").is_not_null()).to_series()


def _format_note(
    subject: str,
    link: LinkMeta,
    counts: dict[str, tuple[int, str | None]],
    steps: int,
    unlinked: int,
) -> str | None:
    parts = [
        f"{counts[stat][0]:,} {words}" + (f" ({counts[stat][1]})" if counts[stat][1] else "")
        for stat, words in _REASONS.get(subject, {}).items()
        if stat in counts
    ]
    if subject == "host operators" and link.get("ties", 1) > 1:
        parts.insert(0, f"{link['ties']} equal iterations: {_describe_iteration(link)}")
    if subject == "host operators" and unlinked and not link.get("how"):
        parts.insert(0, "no profile of operators")
    if subject == "collectives" and unlinked:
        parts.insert(0, f"{unlinked:,} in no operator that describes a communication")
    if subject == "steps":
        parts.append(count_noun(steps, "step") if steps else "no ProfilerStep")
    return "; ".join(parts) or None


def _describe_iteration(link: LinkMeta) -> str:
    iteration = link.get("iteration")
    return "all are joined" if iteration is None else f"number {iteration}, counted from 0, is joined"


def count_unscoped_work(trace: Trace) -> Trace:
    """Return the Trace with stats that count GPU activity launched outside the time of the linked operators."""
    if not trace.links.height:
        return trace
    unscoped = np.flatnonzero(~is_in_scope(trace, find_launching_nodes(trace)))
    rows = rows_of_ids(trace.events, trace.launches["device_event"][unscoped])
    return trace.count(
        "link.activity_outside_nodes", len(unscoped), format_example(trace.events, np.sort(rows))
    )


def find_launching_nodes(trace: Trace) -> pl.Series:
    """Return the execution-trace node (id) that launched each row of `launches`; null if there is none.

    That is the node of the operator around the call, else of the nearest linked event around it.
    """
    return find_enclosing_nodes(trace, trace.launches.select(pl.coalesce("operator", "launch")).to_series())


def is_in_scope(trace: Trace, node: pl.Series) -> np.ndarray:
    """Return a mask of launches that have an execution-trace node or lie between the first and last linked operator.

    GPU activity without a known launch counts by its own start. If nothing is linked, all are in scope.
    """
    events, launches = trace.events, trace.launches
    linked = rows_of_ids(events, trace.links["event"])
    linked = linked[linked >= 0]  # a damaged table may refer to events that are lost
    if not linked.size:
        return np.ones(launches.height, bool)
    starts = events["ts"].to_numpy()
    launch = rows_of_ids(events, launches["launch"])
    row = np.where(launch >= 0, launch, rows_of_ids(events, launches["device_event"]))
    when = starts[row]
    # What was never closed may last to the end.
    durations = arrays.take_rows(events["dur"], linked)
    last = starts.max() if durations.null_count() else (starts[linked] + durations.to_numpy()).max()
    within = (row >= 0) & (when >= starts[linked].min()) & (when <= last)
    in_scope: np.ndarray = within | node.is_not_null().to_numpy()
    return in_scope


def find_enclosing_nodes(trace: Trace, events: pl.Series) -> pl.Series:
    """Return the execution-trace node (id) linked to each event or to its nearest linked ancestor; null for none."""
    linked = rows_of_ids(trace.events, trace.links["event"])
    node = np.zeros(trace.events.height + 1, np.uint32)  # the last for -1
    node[linked] = trace.links["node"].to_numpy()
    has = np.zeros(trace.events.height, bool)
    has[linked[linked >= 0]] = True
    linked_rows = nesting.find_nearest_ancestor(
        rows_of_ids(trace.events, trace.events["parent"]), has, rows_of_ids(trace.events, events)
    )
    column = arrays.to_series(node[linked_rows], "node")
    return column.set(arrays.to_series(linked_rows < 0), None)
