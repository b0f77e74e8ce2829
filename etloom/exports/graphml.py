"""GraphML, for NetworkX, Gephi and yEd: a part of the dependency graph, a node an event, an edge a reason to wait.

Format: http://graphml.graphdrawing.org/specification.html
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from xml.sax.saxutils import escape

import polars as pl

from etloom.core.trace import Job, Trace
from etloom.exports._part import LIMIT, part, text
from etloom.formats.io.atomic_file import open_atomic

SUFFIX = (".graphml", ".graphml.gz")


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
        file.write(
            b'<?xml version="1.0" encoding="UTF-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n'
        )
        for what, table in (
            ("node", found.nodes.drop("number")),
            ("edge", found.edges.drop("source", "target")),
        ):
            for name, dtype in table.schema.items():
                kind = "string" if dtype == pl.String else "long"
                file.write(
                    f'<key id="{name}" for="{what}" attr.name="{name}" attr.type="{kind}"/>\n'.encode()
                )
        file.write(b'<graph id="etloom" edgedefault="directed">\n')
        for node in found.nodes.iter_rows(named=True):
            number = node.pop("number")
            file.write(f'<node id="n{number}">{_data(node)}</node>\n'.encode())
        for edge in found.edges.iter_rows(named=True):
            source, target = edge.pop("source"), edge.pop("target")
            file.write(f'<edge source="n{source}" target="n{target}">{_data(edge)}</edge>\n'.encode())
        file.write(b"</graph>\n</graphml>\n")


def _data(row: dict[str, object]) -> str:
    return "".join(
        f'<data key="{name}">{escape(text(value))}</data>' for name, value in row.items() if value is not None
    )
