"""Pair the ranges of a communication backend (gloo:all_reduce) in both traces by the operators around their start.

Such a range begins on the caller's thread and often ends on a worker's. One of the two traces may list it on a thread
where the other one does not, so alignment ignores these ranges, and each is searched here between the events of the
operators that began before and after it on its thread.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting


def find_backend_ranges(table: pl.DataFrame) -> np.ndarray:
    """Return a mask of the rows that are ranges of a communication backend (such as gloo:all_reduce).

    ``table``: nodes or events.
    """
    return categories.match_names(table, categories.BACKEND_RANGE)


def pair_backend_ranges(
    nodes: pl.DataFrame, events: pl.DataFrame, node: np.ndarray, event: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pair backend ranges (gloo:*) of the execution trace with those of the profile; return the rows of both.

    ``node`` and ``event`` are the rows of the operators that are paired already.

    Ranges of one name between the starts of the same two operators of their thread are paired in order. A range
    before the first operator, or after all have ended, is not paired.
    """
    range_nodes = np.flatnonzero(find_backend_ranges(nodes))
    offered = np.flatnonzero(
        find_backend_ranges(events) & categories.mask_events(events, nesting.RECORD_FUNCTION_CATEGORIES)
    )
    tids, starts = arrays.to_array(nodes["tid"], -1), events["ts"].to_numpy()
    ends = starts + arrays.to_array(events["dur"], 0)
    pairs: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for tid in np.unique(tids[range_nodes]):
        pair_rows = np.flatnonzero(tids[node] == tid)
        pair_rows = pair_rows[np.argsort(node[pair_rows], kind="stable")]
        if not pair_rows.size:
            continue
        rows = range_nodes[tids[range_nodes] == tid]
        near = offered[starts[offered] <= ends[event[pair_rows]].max()]
        sides = [
            pl.DataFrame({"row": side, "name": table["name"][side].cast(pl.String), "place": place})
            .filter(pl.col("place") > 0)
            .with_columns(pl.int_range(pl.len()).over("name", "place").alias("number"))
            for table, side, place in (
                (nodes, rows, np.searchsorted(node[pair_rows], rows)),
                (events, near, np.searchsorted(starts[event[pair_rows]], starts[near], side="right")),
            )
        ]
        both = sides[0].join(sides[1], on=["name", "place", "number"], maintain_order="left")
        pairs.append((both["row"].to_numpy(), both["row_right"].to_numpy()))
        offered = np.setdiff1d(offered, pairs[-1][1])
    return np.concatenate([node_rows for node_rows, _ in pairs]), np.concatenate(
        [event_rows for _, event_rows in pairs]
    )
