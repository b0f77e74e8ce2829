"""Formats rows of tables as JSON objects with Kineto's argument names, column by column."""

from __future__ import annotations

import json

import polars as pl

from etloom.formats.io.json_text import format_microseconds, quote_texts

# Table -> column -> Kineto's name of the argument. native/parse/kineto_fields.hpp has the same names (tested).
ARGUMENT_NAMES: dict[str, dict[str, str]] = {
    "events": {
        "device": "device", "stream": "stream", "correlation": "correlation", "external_id": "External id",
        "rf_id": "Record function id", "seq_id": "Sequence number", "fwd_tid": "Fwd thread id",
    },
    "arguments": {
        "dims": "Input Dims", "types": "Input type", "strides": "Input Strides",
        "concrete_inputs": "Concrete Inputs",
    },
    "kernels": {
        "grid": "grid", "block": "block", "registers": "registers per thread", "shared_mem": "shared memory",
        "blocks_per_sm": "blocks per SM", "warps_per_sm": "warps per SM", "occupancy": "est. achieved occupancy %",
        "bytes": "bytes", "bandwidth": "memory bandwidth (GB/s)", "context": "context", "queued": "queued",
        "graph_id": "graph id", "graph_node_id": "graph node id",
    },
    "syncs": {
        "kind": "cuda_sync_kind", "wait_stream": "wait_on_stream", "wait_event": "wait_on_cuda_event_id",
        "record_correlation": "wait_on_cuda_event_record_corr_id",
    },
    "frames": {
        "python_id": "Python id", "python_parent_id": "Python parent id", "module_id": "Python module id",
    },
    "comms": {
        "collective": "Collective name", "pg_name": "Process Group Name", "pg_desc": "Process Group Description",
        "ranks": "Process Group Ranks", "group_size": "Group size", "seq": "Seq", "dtype": "dtype",
        "in_nelems": "In msg nelems", "out_nelems": "Out msg nelems", "in_split": "In split size",
        "out_split": "Out split size", "root": "Src Rank", "peer": "Dst Rank", "is_async": "Is asynchronized op",
        "comms_id": "Comms Id",
    },
}  # fmt: skip
MEMORY_ARGUMENT_NAMES = {
    "addr": "Addr", "bytes": "Bytes", "total_allocated": "Total Allocated", "total_reserved": "Total Reserved",
    "device_type": "Device Type", "device": "Device Id",
}  # fmt: skip
_TRIPLES = ("grid", "block")


def format_arguments(frame: pl.DataFrame, names: dict[str, str], table: str = "") -> pl.Series:
    """Format the non-null values of each row as JSON members, each after a comma: ``,"name":value``."""
    parts = []
    for column, name in names.items():
        if column in _TRIPLES:
            axes = [pl.col(f"{column}_{axis}").cast(pl.String) for axis in "xyz"]
            value = pl.concat_str(pl.lit("["), pl.concat_str(axes, separator=","), pl.lit("]"))
        elif frame.schema[column] == pl.Categorical and table != "arguments":
            value = pl.lit(quote_texts(frame[column]))
        else:
            value = pl.col(column).cast(pl.String)
        parts.append(pl.concat_str(pl.lit(f",{json.dumps(name)}:"), value))
    return frame.select(pl.concat_str(parts, ignore_nulls=True).alias("")).to_series()


def format_objects(frame: pl.DataFrame, base: int = 0) -> pl.Series:
    """Format each row (an event) as a JSON object of a Chrome trace; absent columns and nulls are left out.

    Args:
        frame: Columns ph, name and cat as text; pid_text and tid_text as JSON; ts and dur in ns, written as
            microseconds; flow, the id of a flow event; args and extra (members next to args) as from
            `format_arguments`.
        base: Subtracted from ts.
    """
    texts = {name: quote_texts(frame[name]) for name in ("ph", "cat", "name") if name in frame.columns}
    frame = frame.with_columns(pl.col("ts") - base).with_columns(**texts)
    parts = [pl.concat_str(pl.lit('{"ph":'), "ph")]
    for column in ("cat", "name", "pid_text", "tid_text", "ts", "dur", "flow"):
        if column in frame.columns:
            value = format_microseconds(column) if column in ("ts", "dur") else pl.col(column).cast(pl.String)
            name = "id" if column == "flow" else column.removesuffix("_text")
            parts.append(pl.concat_str(pl.lit(f',"{name}":'), value))
    parts += [pl.col("extra")] if "extra" in frame.columns else []
    if "args" in frame.columns:
        body = pl.col("args").str.strip_prefix(",")
        parts.append(pl.when(body != "").then(pl.concat_str(pl.lit(',"args":{'), body, pl.lit("}"))))
    parts.append(pl.lit("}"))
    return frame.select(pl.concat_str(parts, ignore_nulls=True).alias("")).to_series()


def split_extra_args(rest: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Split events.args into JSON members of ``args`` and members of the event itself (names with a leading dot).

    Both are as from `format_arguments`.
    """
    texts = rest.cast(pl.String).fill_null("{}")
    inside = texts.str.slice(1, texts.str.len_chars() - 2)
    inside = pl.select(
        pl.when(inside != "").then(pl.concat_str(pl.lit(","), inside)).otherwise(pl.lit(""))
    ).to_series()
    outside = pl.Series([""], dtype=pl.String).new_from_index(0, texts.len())
    has_outside = texts.str.contains('".', literal=True)
    if has_outside.any():
        parts = {text: _split_text(text) for text in texts.filter(has_outside).unique()}
        frame = pl.DataFrame({"text": texts, "inside": inside})
        frame = frame.with_columns(
            pl.col("text")
            .replace_strict({t: a for t, (a, _) in parts.items()}, default=pl.col("inside"))
            .alias("inside"),
            pl.col("text").replace_strict({t: b for t, (_, b) in parts.items()}, default="").alias("outside"),
        )
        inside, outside = frame["inside"], frame["outside"]
    return inside, outside


def _split_text(text: str) -> tuple[str, str]:
    """Split the JSON text of one event's args as `split_extra_args` does."""
    args, outside = "", ""
    for key, value in json.loads(text).items():
        member = f",{json.dumps(key.removeprefix('.'))}:{json.dumps(value)}"
        if key.startswith("."):
            outside += member
        else:
            args += member
    return args, outside
