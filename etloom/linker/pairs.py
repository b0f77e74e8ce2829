"""Nodes of the execution trace paired with profiler events."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.linker.ids import Join, joins, linkable
from etloom.linker.lanes import ids
from etloom.trace import Trace


def pair(trace: Trace) -> Trace:
    """The Trace with `links`; ``meta["link"]`` says how. Raises LinkError where the two do not match."""
    nodes, events = trace.nodes, trace.events
    trace = trace.replace(links=trace.table("links").clear(), meta={"link": {}})
    if not nodes.height or not events.height:
        return trace
    offered = joins(nodes, events, trace.meta.get("formats", []))
    join = next((join for join in offered if join.accepted), None)
    rejected = [join for join in offered if join.joined and not join.accepted]
    stats: list[tuple[str, str, int, str | None]] = [
        (
            f"link.rejected_{other.how}",
            "info",
            other.joined,
            f"{other.agreed} of {other.joined} names agree: ids of another run ({other.example})",
        )
        for other in rejected
    ]
    if join is None:
        return trace.with_stats([*stats, *_unlinked(nodes, np.zeros(0, np.int64))])
    return _by_ids(trace.with_stats(stats), join)


def _by_ids(trace: Trace, join: Join) -> Trace:
    nodes, events = trace.nodes, trace.events
    links = pl.DataFrame({"node": ids(nodes, join.node), "event": ids(events, join.event)}).with_columns(
        pl.lit(join.how, dtype=pl.Categorical).alias("how"), pl.lit(1.0).alias("score")
    )
    disagreed = join.joined - join.agreed
    return trace.replace(links=links, meta={"link": {"how": join.how, "score": 1.0}}).with_stats(
        [
            ("link.name_disagreements", "info", disagreed, join.example),
            ("link.repeated_ids", "info", join.repeated, f"{join.how} that one side holds twice"),
            *_unlinked(nodes, join.node),
        ]
    )


def _unlinked(nodes: pl.DataFrame, linked: np.ndarray) -> list[tuple[str, str, int, str | None]]:
    """Stats of the nodes without an event: of threads that the profiler did not see, and others."""
    able = linkable(nodes)
    has = np.zeros(nodes.height, bool)
    has[linked] = True
    threads = (
        nodes.select("tid", pl.Series("able", able), pl.Series("has", has))
        .group_by("tid")
        .agg(pl.col("able").sum(), pl.col("has").sum())
        .filter((pl.col("able") > 0) & (pl.col("has") == 0))
        .sort("tid")
    )
    lost = able & ~has
    elsewhere = lost & nodes["tid"].is_in(threads["tid"].implode()).fill_null(False).to_numpy()
    rest = np.flatnonzero(lost & ~elsewhere)
    named = ", ".join(f"thread {tid} ({count})" for tid, count, _ in threads.rows())
    init = nodes["name"].cast(pl.String).str.contains("process_group:init").sum()
    return [
        ("link.missing_threads", "info", int(elsewhere.sum()), f"operators of {named}: not in the profile"),
        (
            "link.unlinked_operators",
            "info",
            rest.size,
            None if not rest.size else str(nodes["name"][int(rest[0])]),
        ),
        ("link.process_group_records", "info", int(init), "only the execution trace holds them"),
    ]
