"""Write PyTorch execution trace JSON 1.1.1, as ExecutionTraceObserver does.

Any trace with nodes can be written. Nodes are in the order in which operators ended, with their original ids and the
repaired parents. The format has no times.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.formats.execution_trace.node_json import NodeTexts, select_host_nodes
from etloom.formats.execution_trace.writer import write_document

SUFFIX = (".et.json", ".et.json.gz")

_SCHEMA = "1.1.1-chakra.0.0.4"
_HEADER = {"schema": _SCHEMA, "pid": 0, "time": "", "start_ts": 0}


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the nodes of one rank as execution trace JSON; compressed if the name ends in .gz.

    Raises:
        EtloomError: For several ranks in one file, and for a trace without nodes.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                f"an execution trace has one rank, not {len(trace)}",
                where=path,
                remedy="export them one by one",
            )
        trace = next(iter(trace.values()))
    if not trace.nodes.height:
        raise EtloomError("the trace has no operators of an execution trace", where=path)
    trace = select_host_nodes(trace)
    header = {**_HEADER, **(trace.meta.get("header", {}).get("execution_trace") or {}), "schema": _SCHEMA}
    if header.get("finish_ts") is None:
        header.pop("finish_ts", None)
    nodes = trace.nodes
    above = take_rows(nodes["et_id"], rows_of_ids(nodes, nodes["parent"])).alias("above")
    nodes = nodes.with_columns(above.fill_null(nodes["recorded_parent"]).fill_null(1))
    nodes = nodes.sort("file_order", "et_id")
    write_document(Path(path), header, NodeTexts(trace).format_nodes(nodes))
