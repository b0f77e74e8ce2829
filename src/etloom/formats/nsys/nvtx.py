"""Converts the NVTX ranges and marks of an Nsight Systems export: PyTorch operators, user ranges, NCCL payloads."""

from __future__ import annotations

import json
import struct
from typing import Any

import polars as pl

from etloom.core.categories import parse_collective
from etloom.core.schema import Stat
from etloom.core.steps import STEP_PREFIX
from etloom.formats.nsys.containers import I64, TEXT, ExportFile, int_columns
from etloom.formats.nsys.event_tables import (
    EventTables,
    extract_pid,
    extract_process,
    extract_tid,
    select_event_columns,
)
from etloom.formats.tables.building import build_frame

MARKS, DOMAINS, THREAD_NAMES = (34, 65), (75,), (39, 72)
RANGES = (59, 70, 60, 71, 35, 37, 66, 68)
"""Event types of ranges: push/pop and start/end, also without their end; of Nvtxt and of Nvtx."""
START_END = (60, 71, 37, 68)

# The text of torch.autograd.profiler.emit_nvtx and `nsys --pytorch`, in this order; each part is optional:
# aten::mul, seq = 45328, op_id = 990726, sizes = [[2, 3], [3]], input_op_ids = [(990725,0)]
_TORCH = (
    r"^(?P<name>.+?)(?:, seq = (?P<seq>\d+))?(?:, op_id = (?P<op>\d+))?"
    r"(?:, sizes = (?P<sizes>\[.*?\]))?(?:, input_op_ids = (?P<inputs>\[.*\]))?$"
)
# RecordFunctions of user scope, which Kineto calls user_annotation; NVTX text does not contain the scope.
_ANNOTATION = rf"^({STEP_PREFIX}|Optimizer\.|nccl:|gloo:|DistributedDataParallel\.|FSDP::)"


_PAYLOAD_VALUES = ("uint64Value", "int64Value", "uint32Value", "int32Value")


def read_ranges(source: ExportFile) -> EventTables:
    """Read NVTX ranges and marks as events, NCCL payloads as rows of comms, and input sizes as rows of arguments."""
    records, frame = _read_events(source)
    mark = pl.col("eventType").is_in(MARKS)
    operator = pl.any_horizontal(pl.col("op", "seq").is_not_null()) & ~pl.col("name").str.contains(
        _ANNOTATION
    )
    payload = pl.coalesce(*_PAYLOAD_VALUES)
    args = {
        "domain": pl.col("domain"),
        "category": pl.col("category"),
        "payload": payload,
        "payload_float": pl.col("doubleValue"),
        "payload_json": pl.col("jsonText"),
        "input_op_ids": pl.col("inputs"),
        "range": pl.when(pl.col("eventType").is_in(START_END)).then(pl.lit("start_end")),
    }
    events = select_event_columns(
        frame,
        ph=pl.when(mark).then(pl.lit("i")).otherwise(pl.lit("X")),
        cat=pl.when(operator).then(pl.lit("cpu_op")).otherwise(pl.lit("user_annotation")),
        end=pl.when(~mark).then(pl.col("end")),
        pid=extract_pid("globalTid"),
        tid=extract_tid("globalTid"),
        rf_id=pl.col("op"),
        seq_id=pl.col("seq"),
        args=_encode_fields(frame, args),
    )
    sizes = frame.with_row_index("row").filter(pl.col("sizes").is_not_null()).select("row", dims="sizes")
    comms, ranks, payload_stats = _read_payloads(source, frame)
    open_ranges = frame.filter(~mark & pl.col("end").is_null())
    unnamed = frame["text"].null_count()
    stats: list[Stat] = [
        Stat("read.nsys_open_range", "info", open_ranges.height, "range not closed: the duration is null"),
        Stat("read.nsys_no_text", "info", unnamed, "NVTX ranges without a text"),
        *payload_stats,
        Stat(
            "read.nsys_nvtx_kind",
            "info",
            records.filter(~pl.col("eventType").is_in([*RANGES, *MARKS, *DOMAINS, *THREAD_NAMES])).height,
            "NVTX records other than ranges and marks: categories, resource names",
        ),
    ]
    return EventTables(events, {"arguments": sizes, "comms": comms}, stats, ranks)


def _read_events(source: ExportFile) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return all NVTX records with text, and the ranges and marks with domain and fields parsed from PyTorch's text."""
    columns = dict.fromkeys(
        ["start", "end", "eventType", "category", "globalTid", "textId", "domainId", *_PAYLOAD_VALUES], I64
    )
    more = {"text": TEXT, "jsonText": TEXT, "binaryData": pl.Binary, "doubleValue": pl.Float64}
    records = source.read_table("NVTX_EVENTS", columns | more)
    texts = source.read_strings(records["textId"].unique().drop_nulls().sort()).unique("id", keep="first")
    records = (
        records.join(texts, left_on="textId", right_on="id", how="left", maintain_order="left")
        .with_columns(text=pl.coalesce("text", "value"), process=extract_process("globalTid"))
        .drop("value", "textId")
    )
    domains = (
        records.filter(pl.col("eventType").is_in(DOMAINS))
        .select("process", "domainId", domain="text")
        .drop_nulls()
        .unique(["process", "domainId"], keep="last")
    )
    frame = records.filter(pl.col("eventType").is_in([*RANGES, *MARKS])).join(
        domains, on=["process", "domainId"], how="left", maintain_order="left"
    )
    frame = pl.concat([frame, _parse_torch_texts(frame["text"])], how="horizontal")
    return records, frame


def _parse_torch_texts(text: pl.Series) -> pl.DataFrame:
    """Parse PyTorch's NVTX texts to columns name, seq, op, sizes and inputs; any other text becomes the name."""
    frame = text.unique().to_frame("text")
    # The pattern takes a microsecond per text, so only texts that can match are tried.
    candidate = pl.any_horizontal(
        pl.col("text").str.contains(p, literal=True) for p in (", seq = ", ", op_id = ")
    )
    fields = pl.when(candidate).then(pl.col("text")).str.extract_groups(_TORCH)
    parsed = (
        frame.select(fields.alias("fields"), "text")
        .unnest("fields")
        .select(
            "text",
            pl.coalesce("name", "text").alias("name"),
            pl.col("seq", "op").cast(I64, strict=False),
            pl.col("sizes", "inputs"),
        )
    )
    return (
        text.to_frame("text")
        .join(parsed, on="text", how="left", nulls_equal=True, maintain_order="left")
        .drop("text")
    )


def _encode_fields(frame: pl.DataFrame, fields: dict[str, pl.Expr]) -> pl.Series:
    """Return, per row, a JSON object of the non-null fields; null if all fields are null."""
    values = frame.select(**fields)
    distinct = values.unique().filter(pl.any_horizontal(pl.all().is_not_null()))
    texts = [
        json.dumps({key: value for key, value in row.items() if value is not None})
        for row in distinct.iter_rows(named=True)
    ]
    encoded = distinct.with_columns(pl.Series("\0", texts, dtype=pl.String))
    return values.join(encoded, on=list(fields), how="left", nulls_equal=True, maintain_order="left")["\0"]


# The payload entry types of NVTX (nvToolsExtPayload.h) that NCCL uses, and their layout.
_ENTRY = {
    3: "<h", 4: "<H", 5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 11: "<b", 12: "<B", 13: "<h",
    14: "<H", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 19: "<f", 20: "<d", 22: "<Q", 23: "<Q",
}  # fmt: skip
_FIRST_SCHEMA_ID = 1 << 24
"""Entry types from here on are ids of other schemas or of enumerations, stored as an int."""
_HEADER = struct.Struct("<IIIIQQ")  # domain, -, schema, -, payload size, size of both
_REDUCTIONS: dict[Any, str] = dict(enumerate(("sum", "prod", "max", "min", "avg")))  # ncclRedOp_t


def read_schemas(source: ExportFile) -> dict[tuple[int, int], list[tuple[str, str, int]]]:
    """Return the fields (name, struct format, byte offset) of NVTX payload schemas, by (domain id, schema id)."""
    columns = int_columns("domainId schemaId idx type offset") | {"name": TEXT}
    rows = source.read_table("NVTX_PAYLOAD_SCHEMA_ENTRIES", columns).unique(["domainId", "schemaId", "idx"])
    schemas: dict[tuple[int, int], list[tuple[str, str, int]]] = {}
    for domain, schema, _, kind, offset, name in rows.sort("domainId", "schemaId", "idx").iter_rows():
        layout = "<i" if (kind or 0) >= _FIRST_SCHEMA_ID else _ENTRY.get(kind)
        if layout and name:
            schemas.setdefault((domain, schema), []).append((name, layout, offset or 0))
    return schemas


def decode_payload(data: bytes, schemas: dict[tuple[int, int], list[tuple[str, str, int]]]) -> dict[str, Any]:
    """Decode an NVTX payload to values by field name. Raises ValueError if the bytes do not match a known schema."""
    if len(data) < _HEADER.size:
        raise ValueError("the payload is shorter than its header")
    domain, _, schema, _, size, _ = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if size > len(body) or (domain, schema) not in schemas:
        raise ValueError("the schema of the payload is unknown, or the payload is cut off")
    try:
        return {name: struct.unpack_from(layout, body, at)[0] for name, layout, at in schemas[domain, schema]}
    except struct.error as error:
        raise ValueError(str(error)) from None


def _read_payloads(
    source: ExportFile, frame: pl.DataFrame
) -> tuple[pl.DataFrame, dict[int, tuple[int, int]], list[Stat]]:
    """Decode NCCL's NVTX payloads to rows of comms and to the NCCL rank of each process.

    NCCL records the communicator and the bytes with each call, and the size of the communicator at its creation.

    Returns:
        Rows of the comms table; process -> (rank, number of ranks) in its largest communicator; stats.
    """
    schemas = read_schemas(source)
    rows = frame.with_row_index("row").filter(pl.col("binaryData").is_not_null())
    undecoded = 0
    comm_rows: list[dict[str, Any]] = []
    communicator_sizes: dict[tuple[int, int], int] = {}
    ranks: dict[int, tuple[int, int]] = {}
    for row, process, name, data in rows.select("row", "process", "name", "binaryData").iter_rows():
        try:
            values = decode_payload(data, schemas)
        except ValueError:
            undecoded += 1
            continue
        communicator, size = values.get("NCCL communicator ID"), values.get("No. of ranks")
        if isinstance(size, int):
            rank = values.get("Rank")
            communicator_sizes[process, communicator or 0] = size
            if isinstance(rank, int) and 0 <= rank < size > ranks.get(process, (0, 0))[1]:
                ranks[process] = rank, size
        if "Message size [bytes]" in values:
            reduction = values.get("Reduction operation")
            comm_rows.append(
                {
                    "row": row,
                    "process": process,
                    "collective": parse_collective(name or ""),
                    "comms_id": communicator,
                    "bytes": values["Message size [bytes]"],
                    "peer": values.get("Peer rank"),
                    "root": values.get("Root"),
                    "reduce_op": _REDUCTIONS.get(reduction),
                    "is_p2p": "Peer rank" in values,
                }
            )
    for comm in comm_rows:
        comm["group_size"] = communicator_sizes.get((comm.pop("process"), comm["comms_id"] or 0))
    stats: list[Stat] = [
        Stat("read.nsys_payload", "data_loss", undecoded, "an NVTX payload that does not match its schema")
    ]
    row_numbers = pl.Series("row", [comm["row"] for comm in comm_rows], dtype=pl.UInt32)
    comms = build_frame("comms", comm_rows, stats).drop("id", "node", "event").with_columns(row_numbers)
    return comms, ranks, stats
