"""The what-if control of the report: the contracted dependency graph of the run, which the page re-times.

A change is one of the language of `etloom simulate` by a factor. For each change the data hold how much of the time of
which edges it scales, so the page predicts what that verb does, except that the verb rounds each edge of the whole
graph to ns and the page the sum of a chain of edges.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
import polars as pl

from etloom.analyses.kernel_families import classify_kernels
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.graphs.critical_paths import KIND_LABELS
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.reports.packed_columns import Column, encode_column, frame_columns
from etloom.reports.page import fill_template, read_asset
from etloom.simulator import parse_change
from etloom.simulator.recorded_run import RecordedRun, get_recorded_run
from etloom.simulator.reproduction import describe_models, require_models
from etloom.timeline.activity import has_device_events

MAX_BYTES = 2_000_000
"""Size of the data in the page, as base64."""
MAX_EVENTS, MAX_CHAINS = 1_000_000, 200_000
"""Events of a run, and edges of its contracted graph, from which the data would be larger."""
MAX_GRAPH_RANKS = 1_000
"""Ranks of a run, whose tables must all be read for its graph."""
MAX_OPERATORS, MAX_FAMILIES, MAX_RANKS = 20, 12, 16
"""Changes of each kind that the page offers, the costliest first."""
MAX_NAME = 150
PARTS = ("kernels", "memcpy and memset", *dict.fromkeys(KIND_LABELS.values()))
"""Parts of the critical path, as `etloom simulate` names them."""


def render_simulation(job: Job, name: str, operators: Sequence[str]) -> tuple[str, str]:
    """Return the control and the element with its data as HTML; without data, a sentence instead of the control.

    Args:
        name: the run, for commands.
        operators: names of operators to offer, the costliest first.
    """
    command = f"etloom simulate {shlex.quote(name or 'RUN')}"
    too_large = EtloomError(
        "the dependency graph is too large for a page",
        remedy=f"{command} --set 'host x0.5' predicts a change",
    )
    try:
        if job.rank_facts["events"].sum() > MAX_EVENTS or len(job) > MAX_GRAPH_RANKS:
            raise too_large
        recording = get_recorded_run(job)
        require_models(recording, needs_network=False)
        if len(recording.contraction.last) > MAX_CHAINS:
            raise too_large
        options, data = pack_graph(recording, operators, command)
        if len(data) > MAX_BYTES:
            raise too_large
    except EtloomError as error:
        return f'<p class="soft">{escape(f"No what-if control: {error}.")}</p>', ""
    groups = "".join(
        f'<optgroup label="{escape(group)}">'
        + "".join(f"<option>{escape(label)}</option>" for kind, label, _ in options if kind == group)
        + "</optgroup>"
        for group in dict.fromkeys(kind for kind, _, _ in options)
    )
    doubts = "".join(
        f'<p class="note">{escape(line[:1].upper() + line[1:])}.</p>'
        for line in describe_models(recording, needs_network=False)
    )
    return (
        doubts + fill_template(read_asset("what_if.html"), options=groups),
        f'<script type="text/plain" id="what-if-data">{data}</script>',
    )


def pack_graph(
    recording: RecordedRun, operators: Sequence[str], command: str
) -> tuple[list[tuple[str, str, list[str]]], str]:
    """Return (kind, label, changes without their factor) of each change to offer, and the data of the page (base64).

    A cell is the edges of a chain that belong to one part of the critical path.
    """
    graph, contraction = recording.graph.graph, recording.contraction
    numbers = contraction.chain.astype(np.int64) * len(PARTS) + _find_parts(recording)
    cells, cell_of_edge = np.unique(numbers, return_inverse=True)
    removable = np.minimum(graph.unexplained, recording.usual_delays[graph.kind])

    def sum_cells(lags: Int64Array, edges: Int64Array | slice = slice(None)) -> Int64Array:
        sums = np.bincount(cell_of_edge[edges], weights=lags[edges], minlength=len(cells))
        return sums.astype(np.int64)  # exact below 2**53 ns

    options, columns, counts = [], [], []
    for kind, label, changes in _list_options(recording, operators):
        selected = {change: edges for change in changes if (edges := _select(recording, change)).size}
        if not selected:
            continue
        edges = np.concatenate(list(selected.values()))
        scaled, delay = (sum_cells(lags, edges) for lags in (graph.min_latency, removable))
        changed = np.flatnonzero((scaled > 0) | (delay > 0))
        options.append((kind, label, list(selected)))
        columns.append((np.diff(changed, prepend=0), scaled[changed], delay[changed]))
        counts.append(len(changed))
    spans = recording.spans[1]
    start = recording.kept_starts - graph.time.min()
    degree = np.diff(contraction.first)
    target = np.repeat(np.arange(len(degree)), degree)
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)] or [np.zeros(0, np.int64)] * 3
    names = ("changed", "scaled", "delay")
    header = {"parts": PARTS, "counts": counts, "steps": spans.keys, "command": command}
    header["changes"] = [changes for *_, changes in options]
    data = frame_columns(
        header,
        [
            _encode_integers("degree", degree),
            _encode_integers("distance", target - contraction.source),
            _encode_integers("start", np.where(degree == 0, start, 0), "wide"),
            _encode_integers("cell_chain", np.diff(cells // len(PARTS), prepend=0)),
            _encode_integers("cell_part", cells % len(PARTS), "u8"),
            _encode_integers("lag", sum_cells(graph.lag), "wide"),
            *(_encode_integers(name, values, "wide") for name, values in zip(names, joined, strict=True)),
            _encode_integers("step_points", spans.points),
            _encode_integers("step_firsts", spans.firsts if spans.keys else np.zeros(0, np.int64)),
        ],
    )
    return options, base64.b64encode(data).decode()


def _encode_integers(name: str, values: np.ndarray, form: str = "u32") -> Column:
    return encode_column(name, form, pl.Series(values.astype(np.int64)))


def _find_parts(recording: RecordedRun) -> Int64Array:
    """Return for each edge of the graph the number of its part of the critical path."""
    by_kind = np.zeros(len(EdgeKind), np.int64)
    for kind in EdgeKind:
        by_kind[kind] = PARTS.index(KIND_LABELS[kind.label]) if kind != EdgeKind.KERNEL else 0
    parts = by_kind[recording.graph.graph.kind]
    parts[recording.edges.select_target("copy")] = PARTS.index("memcpy and memset")
    return parts


def _select(recording: RecordedRun, change: str) -> Int64Array:
    try:
        return recording.edges.select(parse_change(f"{change} x1")).edges.astype(np.int64)
    except EtloomError:  # nothing in this run
        return np.zeros(0, np.int64)


def _list_options(recording: RecordedRun, operators: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, label, changes without their factor) of what a page may change; some match nothing in the run."""
    yield "All", "all kernels", ["kernel"]
    yield "All", "network: all communication", ["comm"]
    yield "All", "host threads", ["host"]
    yield "All", "launch latency", ["launch"]
    for collective in recording.edges.list_collectives():
        yield "Network", collective, [f"comm:{collective}"]
    kernels = [
        trace.compute_once(classify_kernels).filter(kind="computation")
        for trace in recording.job.values()
        if has_device_events(trace)
    ]
    if kernels:
        totals = pl.concat(frame.select("family", "dur") for frame in kernels).group_by("family").sum()
        for family in totals.sort("dur", "family", descending=[True, False])["family"].head(MAX_FAMILIES):
            yield "Kernel families", family, [f"kernel family={family}"]
    if len(recording.job) > 1:
        for rank in recording.job.ranks[:MAX_RANKS]:
            parts = ("kernel", "copy", "host")
            yield (
                "Ranks",
                f"rank {rank}: its kernels, copies and host",
                [f"{part} rank={rank}" for part in parts],
            )
    named = [name for name in operators if len(name) <= MAX_NAME]
    for name in named[:MAX_OPERATORS]:
        yield "Operators (host)", name, ["op:" + re.sub(r"\s", "?", name)]
