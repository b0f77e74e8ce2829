"""DOT, for Graphviz: a part of the dependency graph, a node an event, an edge a reason to wait.

Device work is a box, host events are ellipses, and what ranks or streams wait for is dashed. Each edge says why and,
where the recording took longer than anything explains, how much.

Format: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from etloom.core.trace import Job, Trace
from etloom.exports._part import LIMIT, part, text
from etloom.formats.io.atomic_file import open_atomic

SUFFIX = (".dot", ".gv")

_WAITS = ("stream wait", "sync", "handoff", "return", "arrival", "transfer", "message")


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    step: int | None = None,
    rank: int | None = None,
    around: str | None = None,
    depth: int = 2,
    limit: int = LIMIT,
) -> None:
    """Write a part of the graph. Raises AnalysisError for a part that is empty, EtloomError for one that is too large.

    step: only the events of this step. rank: only those of this rank. around: only what is at most ``depth`` edges
    away, either way, from events of this name. depth: of ``around``. limit: the most nodes that are written.
    """
    found = part(trace, step, rank, around, depth, limit)
    with open_atomic(Path(path)) as file:
        file.write(b"digraph etloom {\n  rankdir=LR;\n  node [shape=ellipse];\n")
        for node in found.nodes.iter_rows(named=True):
            label = f"{node['name']}\n{node['duration_ns'] / 1000:.3f} us"
            shape = "" if node["stream"] is None else ", shape=box"
            file.write(f"  n{node['number']} [label={_quoted(label)}{shape}];\n".encode())
        for edge in found.edges.iter_rows(named=True):
            why = edge["why"] + (f" +{edge['excess_ns'] / 1000:.3f} us" if edge["excess_ns"] else "")
            style = ", style=dashed" if edge["why"] in _WAITS else ""
            line = f"  n{edge['source']} -> n{edge['target']} [label={_quoted(why)}{style}];\n"
            file.write(line.encode())
        file.write(b"}\n")


def _quoted(label: str) -> str:
    lines = [text(line).replace("\\", "\\\\").replace('"', '\\"') for line in label.split("\n")]
    return '"' + "\\n".join(lines) + '"'
