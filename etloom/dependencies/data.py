"""Which operator needs whose data: by the storage that its tensors lie in.

These are kept apart from the graph of points: they say what may be reordered, not what was waited for. Storage ids are
addresses and are used again, so what counts is who touched a storage last in the order of the program. Only operators
that call no other one with tensors are looked at: theirs are the accesses. An operator that gives a view counts as a
writer, as what follows needs what it gives.
"""

from __future__ import annotations

import polars as pl

from etloom.trace import Trace

READ, WRITE = 0, 1

COLUMNS = {"node": pl.UInt32, "on": pl.UInt32, "kind": pl.String, "bytes": pl.Int64}


def data_dependencies(trace: Trace) -> pl.DataFrame:
    """node, on, kind, bytes (`COLUMNS`): node may not begin before ``on``, an earlier one, has ended.

    kind: read (of what ``on`` wrote, the bytes are of the greatest tensor read), overwrite (of what ``on`` wrote or
    read). One row a pair and kind, in order of node. No rows for a trace without an execution trace.
    """
    callers = (
        trace.nodes.filter(pl.col("id").is_in(trace.tensors["node"].unique().implode()))["parent"]
        .drop_nulls()
        .unique()
    )
    touches = (
        trace.tensors.filter(~pl.col("node").is_in(callers.implode()))
        .select(
            "node",
            "io",
            pl.coalesce("storage_id", "tensor_id").alias("storage"),
            (pl.col("numel") * pl.col("itemsize")).alias("bytes"),
        )
        .filter(pl.col("storage") > 0)
        .group_by("storage", "node", "io")
        .agg(pl.col("bytes").max())
        .sort("storage", "node", "io")
    )
    own = pl.col("node")
    wrote = pl.when(pl.col("io") == WRITE).then(own)
    touches = touches.with_columns(
        wrote.forward_fill().shift(1).over("storage").alias("writer"),
        wrote.backward_fill().over("storage").alias("overwriter"),
    )
    reads = touches.filter(pl.col("io") == READ)
    pairs = pl.concat(
        [
            reads.select("node", on="writer", kind=pl.lit("read"), bytes="bytes"),
            reads.select(node="overwriter", on="node", kind=pl.lit("overwrite"), bytes=pl.lit(None)),
            touches.filter(pl.col("io") == WRITE).select(
                "node", on="writer", kind=pl.lit("overwrite"), bytes=pl.lit(None)
            ),
        ],
        how="vertical_relaxed",
    )
    return (
        pairs.drop_nulls(["node", "on"])
        .filter(pl.col("node") > pl.col("on"))
        .group_by("node", "on", "kind")
        .agg(pl.col("bytes").max())
        .select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items())
        .sort("node", "on", "kind")
    )
