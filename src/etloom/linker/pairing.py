"""Pair nodes of the execution trace with profiler events: by a recorded id, else by name and order."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import InvalidValue, LinkError
from etloom.core.schema import Stat, parse_distinct
from etloom.core.trace import Trace
from etloom.linker.alignment import (
    MIN_SCORE,
    Iteration,
    drop_overlapping,
    find_iterations,
    measure_resemblance,
    pair_backend_ranges,
)
from etloom.linker.id_join import IdJoin, is_linkable, join_by_id
from etloom.linker.placement import get_ids


def pair_operators(trace: Trace, *, iterations: str = "best") -> Trace:
    """Return the Trace with the table `links`: pairs of execution-trace nodes and profiler events.

    ``meta["link"]`` has the key (how they were paired), the score, and the number of equally good iterations.

    Args:
        trace: A merged Trace with depths and launches.
        iterations: The iteration to link if the profile holds several that match: "best", the best match (of equally
            good ones the middle); "all"; or a number, counted from 0 in order of time.

    Raises:
        LinkError: The operators do not match, or the iteration does not exist.
    """
    nodes, events, stated = trace.nodes, trace.events, trace.links
    trace = trace.replace(links=stated.clear(), meta={"link": {}})
    if iterations not in ("best", "all") and not iterations.isdecimal():
        raise InvalidValue(
            f"unknown iterations {iterations!r}",
            remedy="expected best, all or a number",
            option="iterations",
        )
    if stated.height:
        linked = trace.replace(links=stated, meta={"link": {"how": "file", "score": 1.0}})
        return linked.with_stats(_count_unlinked(nodes, rows_of_ids(nodes, stated["node"])))
    if not nodes.height or not events.height:
        return trace
    if not categories.mask_events(events, nesting.RECORD_FUNCTION_CATEGORIES).any():
        return trace.with_stats(
            [
                Stat(
                    "link.no_operators",
                    "info",
                    int(is_linkable(nodes).sum()),
                    "the profile contains GPU activity only",
                )
            ]
        )
    join = join_by_id(nodes, events, trace.meta.get("formats", []))
    if join.accepted:
        return _link_by_ids(trace, join)
    return _link_by_order(trace, join, iterations)


def _link_by_ids(trace: Trace, join: IdJoin) -> Trace:
    disagreed = join.joined - join.agreed
    return _add_links(trace, [(join.node, join.event, 1.0)], join.how).with_stats(
        [
            Stat("link.name_disagreements", "info", disagreed, join.example),
            Stat(
                "link.repeated_ids",
                "info",
                join.repeated,
                f"values of {join.how} that one of the two files contains twice",
            ),
            *_count_unlinked(trace.nodes, join.node),
        ]
    )


def _link_by_order(trace: Trace, join: IdJoin, iterations: str) -> Trace:
    iterations_in_order = find_iterations(trace.nodes, trace.events)
    good = [iteration for iteration in iterations_in_order if iteration.score >= MIN_SCORE]
    if not good:
        raise _mismatch_error(trace, join, iterations_in_order)
    best = _best_iterations(trace, good)
    ties = len(best)
    good, best = drop_overlapping(good), drop_overlapping(best)
    if iterations == "best":
        selected = [best[len(best) // 2]]
    elif iterations == "all":
        selected = good
    elif int(iterations) < len(good):
        selected = [good[int(iterations)]]
    else:
        raise LinkError(
            f"unknown iteration {iterations}",
            where=_list_files(trace),
            remedy=f"the execution trace matches {len(good)} iterations of the profile: 0 to {len(good) - 1}",
        )
    pairs = [(*_add_backend_ranges(trace, iteration), iteration.score) for iteration in selected]
    figures = {
        "ties": ties,
        "iterations": len(good),
        "iteration": None if iterations == "all" else _iteration_number(good, selected[0]),
    }
    ambiguous = ties if iterations == "best" and ties > 1 else 0
    return _add_links(trace, pairs, "align", **figures).with_stats(
        [
            Stat(
                f"link.rejected_{join.how}",
                "info",
                join.joined,
                f"only {join.agreed:,} of {join.joined:,} operators with the same {join.how} have the same name in "
                f"both files ({join.example}): they are paired by name and order instead",
            ),
            Stat(
                "link.identical_iterations",
                "info",
                ambiguous,
                "that many iterations match equally well; the middle one is linked",
            ),
            *_count_unlinked(trace.nodes, np.concatenate([node for node, _, _ in pairs])),
        ]
    )


def _add_backend_ranges(trace: Trace, iteration: Iteration) -> tuple[np.ndarray, np.ndarray]:
    node, event = iteration.node, iteration.event
    ranges = pair_backend_ranges(trace.nodes, trace.events, node, event)
    return np.concatenate([node, ranges[0]]), np.concatenate([event, ranges[1]])


def _best_iterations(trace: Trace, good: list[Iteration]) -> list[Iteration]:
    """Return the best matching iterations: with the most equal operator names, then the most equal shapes; by time."""
    most = max(iteration.matched for iteration in good)
    best = [iteration for iteration in good if iteration.matched == most]
    if len(best) > 1:
        shapes = [count_equal_shapes(trace, iteration.node, iteration.event) for iteration in best]
        best = [iteration for iteration, count in zip(best, shapes, strict=True) if count == max(shapes)]
    return best


def _iteration_number(good: list[Iteration], selected: Iteration) -> int:
    """Return the index of the iteration in ``good`` that starts nearest to the selected iteration."""
    begin = selected.windows[0].start
    return min(range(len(good)), key=lambda at: abs(good[at].windows[0].start - begin))


def _add_links(
    trace: Trace, pairs: list[tuple[np.ndarray, np.ndarray, float]], key: str, **figures: int | None
) -> Trace:
    frames = [
        pl.DataFrame(
            {"node": get_ids(trace.nodes, node), "event": get_ids(trace.events, event)}
        ).with_columns(pl.lit(key, dtype=pl.Categorical).alias("how"), pl.lit(score).alias("score"))
        for node, event, score in pairs
    ]
    score = float(np.mean([score for _, _, score in pairs]))
    link = {"how": key, "score": score, **figures}
    return trace.replace(links=pl.concat(frames).sort("node", "event"), meta={"link": link})


def _mismatch_error(trace: Trace, join: IdJoin, candidates: list[Iteration]) -> LinkError:
    best = max(candidates, key=lambda iteration: iteration.score, default=None)
    if best is not None:
        order = f"at best {best.matched} of {best.longer} operators match in order ({best.score:.2f})"
    else:
        equal, total = measure_resemblance(trace.nodes, trace.events)
        order = f"at best {equal} of {total} names of its longest thread agree ({equal / max(total, 1):.2f})"
    by_id = f", by {join.how} {join.agreed} of {join.joined}" if join.joined else ""
    return LinkError(
        f"the execution trace and the profile are not of one program: {order}{by_id}",
        where=_list_files(trace),
        remedy=f"pass traces of one run; a match of at least {MIN_SCORE:.2f} is required",
    )


def _list_files(trace: Trace) -> str:
    return ", ".join(map(str, trace.meta.get("files", ())))


def _count_unlinked(nodes: pl.DataFrame, linked: np.ndarray) -> list[Stat]:
    """Return stats of the nodes without an event, by reason: thread not recorded, outside the recording, other."""
    able = is_linkable(nodes)
    has = np.zeros(nodes.height, bool)
    has[linked] = True
    threads = (
        nodes.select("tid", arrays.to_series(able, "able"), arrays.to_series(has, "has"))
        .group_by("tid")
        .agg(pl.col("able").sum(), pl.col("has").sum())
        .filter((pl.col("able") > 0) & (pl.col("has") == 0))
        .sort("tid", nulls_last=True)
    )
    lost = able & ~has
    elsewhere = lost & nodes["tid"].is_in(threads["tid"].implode(), nulls_equal=True).to_numpy()
    rest = np.flatnonzero(lost & ~elsewhere)
    # Node ids count up as operators begin.
    outside = (rest < linked.min()) | (rest > linked.max()) if linked.size else np.zeros(rest.size, bool)
    outer, rest = rest[outside], rest[~outside]
    named = ", ".join(
        f"{'no thread' if tid is None else f'thread {tid}'} ({count})" for tid, count, _ in threads.rows()
    )
    groups = np.flatnonzero(arrays.match_text(nodes["name"], "process_group:init"))

    def example(rows: np.ndarray) -> str | None:
        return f"{nodes['name'][int(rows[0])]}, node {nodes['et_id'][int(rows[0])]}" if rows.size else None

    return [
        Stat(
            "link.missing_threads",
            "info",
            int(elsewhere.sum()),
            f"operators of {named}, of which the profile contains no event",
        ),
        Stat("link.outside_recording", "info", outer.size, example(outer)),
        Stat("link.unlinked_operators", "info", rest.size, example(rest)),
        Stat("link.process_group_nodes", "info", groups.size, example(groups)),
    ]


# Compare the input shapes that both files recorded, to distinguish iterations that call the same operators.


def count_equal_shapes(trace: Trace, node: np.ndarray, event: np.ndarray) -> int:
    """Return the number of (node, event) pairs with equal input shapes; 0 if a file has no shapes.

    ``node``, ``event``: rows of the pairs.

    Scalars are ignored: Kineto writes one shape, [], for a number and for a tensor without dimensions.
    """
    pairs = pl.DataFrame({"node": get_ids(trace.nodes, node), "event": get_ids(trace.events, event)})
    node_shapes = (
        trace.tensors.filter((pl.col("io") == 0) & pl.col("shape").is_not_null())
        .join(pairs.select("node"), on="node", how="semi")
        .sort("node", "index", "item", maintain_order=True)
        .with_columns(pl.col("shape").cast(pl.String).str.replace_all(" ", ""))
        .filter(pl.col("shape") != "[]")
        .group_by("node")
        .agg(pl.col("shape").str.join(";"))
    )
    event_shapes = parse_distinct(
        trace.arguments.select("event", "dims").join(pairs.select("event"), on="event", how="semi"),
        "dims",
        lambda dims: ";".join(_flatten_shapes(dims)),
        pl.String,
    ).filter(pl.col("dims") != "")
    both = pairs.join(node_shapes, on="node").join(event_shapes, on="event")
    return int((both["shape"] == both["dims"]).sum())


def _flatten_shapes(dims: Any) -> list[str]:
    """Return the shapes in nested lists as a flat list of texts such as "[2,3]", without empty shapes."""
    if not isinstance(dims, list) or not dims:
        return []
    if all(isinstance(size, int) for size in dims):
        return ["[" + ",".join(map(str, dims)) + "]"]
    return [shape for part in dims for shape in _flatten_shapes(part)]
