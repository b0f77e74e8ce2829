"""Builds events from the tables of an Ascend database, with the tracks and arguments of trace_view.json.

Names and types are numbers of STRING_IDS or of tables of enumerations. A connection number joins a call of CANN to its
tasks, and, through CONNECTION_IDS, an operator of PyTorch to both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io.sqlite_file import I64, TEXT, SqliteFile, int_columns
from etloom.formats.kineto.ascend import COLLECTIVES, HARDWARE, categorize
from etloom.formats.tables.building import build_trace, sort_events

TABLES = frozenset({"STRING_IDS", "TASK"})
_LATEST = 1 << 61
DEVICE_PID, COLLECTIVE_PID = 1 << 40, 1 << 41
"""Process numbers of device 0 and of its collectives; device n has the n-th number after them."""
_FIRST_OPERATOR = 1 << 40
"""The lowest External id of an operator; connection numbers are below."""
_FIRST_PLANE = 1 << 20
"""The lowest track number of tasks of collectives; the tracks of the collectives themselves have lower numbers."""
_READ = frozenset(
    [
        "STRING_IDS",
        "PYTORCH_API",
        "CONNECTION_IDS",
        "CANN_API",
        "TASK",
        "COMPUTE_TASK_INFO",
        "COMMUNICATION_OP",
        "COMMUNICATION_TASK_INFO",
        "MEMCPY_INFO",
        "MSTX_EVENTS",
        "STEP_TIME",
        "NPU_INFO",
        "RANK_DEVICE_MAP",
        "HOST_INFO",
        "META_DATA",
        "SESSION_TIME_INFO",
        "ENUM_API_TYPE",
        "ENUM_HCCL_DATA_TYPE",
    ]
)
_API_CATEGORIES = {"queue": "npu_queue", "trace": "python_function", "python_trace": "python_function"}
"""Type of a call of PyTorch -> its category; mstx is a range, all others are operators."""
_STEP = "ProfilerStep#"
_EVENT = {"cat": TEXT, "name": TEXT, "start": I64, "end": I64, "pid": I64, "tid": I64}
_HOST = {
    **_EVENT,
    "seq_id": I64,
    "fwd_tid": I64,
    "correlation": I64,
    "connection": I64,
    "dims": TEXT,
    "types": TEXT,
}
_DEVICE = {
    **_EVENT,
    "type": TEXT,
    "connection": I64,
    "stream": I64,
    "count": I64,
    "data_type": TEXT,
    "task": I64,
    "bytes": I64,
}
_COLUMNS = (
    "id",
    "ph",
    "cat",
    "name",
    "ts",
    "dur",
    "pid",
    "tid",
    "seq_id",
    "fwd_tid",
    "correlation",
    "external_id",
    "args",
    "position",
)


def read(source: SqliteFile, path: Path) -> Trace:
    """Read a database; a Trace without events if it has none."""
    texts = _read_names(source, "STRING_IDS", "value")
    tasks = _read_tasks(source, texts)
    host = pl.concat(
        [_read_operators(source, texts), _read_calls(source, texts), _read_ranges(source, texts)]
    )
    steps = _read_steps(source, host)
    device = pl.concat([tasks, _read_collectives(source, texts)])
    events = pl.concat([host, steps, device], how="diagonal")
    stats = [*source.stats, _count_unread(source)]
    events = _number_operators(source, _check_times(events, stats)).with_row_index("position")
    events = sort_events(events).with_row_index("id")
    tables = {
        "events": events.select(_COLUMNS),
        "threads": _list_tracks(events),
        "arguments": events.drop_nulls("dims").select("dims", "types", event="id"),
        "kernels": events.drop_nulls("bytes").select("bytes", event="id"),
    }  # fmt: skip
    trace = build_trace(tables, _read_meta(source, path, texts), stats)
    return categorize(trace, facts=_select_facts(events))


def _read_names(source: SqliteFile, table: str, column: str) -> pl.DataFrame:
    return (
        source.read_table(table, {"id": I64, column: TEXT})
        .drop_nulls("id")
        .unique("id")
        .rename({column: "text"})
    )


def _look_up(rows: pl.DataFrame, names: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """Replace numbers in columns by their texts; text, which some versions store instead, stays."""
    for column in columns:
        named = rows.join(names, left_on=column, right_on="id", how="left", maintain_order="left")["text"]
        rows = rows.with_columns(named.alias(column))
    return rows


def _read_operators(source: SqliteFile, texts: pl.DataFrame) -> pl.DataFrame:
    columns = (
        "startNs endNs globalTid connectionId name sequenceNumber fwdThreadId inputDtypes inputShapes type"
    )
    rows = source.read_table("PYTORCH_API", int_columns(columns))
    rows = _look_up(rows, texts, "name", "inputDtypes", "inputShapes")
    rows = _look_up(rows, _read_names(source, "ENUM_API_TYPE", "name"), "type")
    kind = pl.col("type").replace_strict(_API_CATEGORIES, default="cpu_op", return_dtype=TEXT)
    is_range = (pl.col("type") == "mstx") | pl.col("name").str.starts_with(_STEP)
    shapes, types = (
        _format_lists(rows[name], number) for name, number in (("inputShapes", True), ("inputDtypes", False))
    )
    rows = rows.with_columns(shapes.alias("dims"), types.alias("types"))
    return _select(
        rows,
        _HOST,
        cat=pl.when(is_range.fill_null(False)).then(pl.lit("user_annotation")).otherwise(kind),
        seq_id=pl.col("sequenceNumber"),
        fwd_tid=pl.col("fwdThreadId"),
        connection=pl.col("connectionId"),
    )


def _format_lists(texts: pl.Series, numbers: bool) -> pl.Series:
    """Return JSON lists of texts whose items are separated by semicolons, those of shapes by commas."""
    distinct = texts.unique().drop_nulls()
    lists = []
    for text in distinct:
        items = text.strip('"').split(";")
        if numbers:
            shapes = [re.findall(r"\d{1,18}", item) for item in items]
            lists.append(
                f"[{', '.join('[' + ', '.join(str(int(size)) for size in shape) + ']' for shape in shapes)}]"
            )
        else:
            words = [re.sub(r"[^\w .:<>]", "", item) for item in items]
            lists.append(f"[{', '.join(chr(34) + word + chr(34) for word in words)}]")
    table = pl.DataFrame({"text": distinct, "list": pl.Series(lists, dtype=TEXT)})
    return texts.to_frame("text").join(table, on="text", how="left", maintain_order="left")["list"]


def _read_calls(source: SqliteFile, texts: pl.DataFrame) -> pl.DataFrame:
    rows = source.read_table("CANN_API", int_columns("startNs endNs type globalTid connectionId name"))
    kinds = _read_names(source, "ENUM_API_TYPE", "name")
    rows = _look_up(_look_up(rows, texts, "name"), kinds, "type")
    return _select(
        rows,
        _HOST,
        name=pl.format("{}@{}", pl.col("type").fill_null("CANN"), "name"),
        cat=pl.lit("privateuse1_runtime"),
        correlation=pl.col("connectionId"),
    )


def _read_ranges(source: SqliteFile, texts: pl.DataFrame) -> pl.DataFrame:
    rows = source.read_table("MSTX_EVENTS", int_columns("startNs endNs message globalTid"))
    return _select(
        _look_up(rows, texts, "message"), _HOST, name=pl.col("message"), cat=pl.lit("user_annotation")
    )


def _read_steps(source: SqliteFile, host: pl.DataFrame) -> pl.DataFrame:
    """Return the steps as annotations of the first thread of an operator, unless operators contain them."""
    rows = source.read_table("STEP_TIME", int_columns("id startNs endNs"))
    threads = host.filter(pl.col("cat") == "cpu_op").sort("start").select("pid", "tid").head(1)
    if threads.is_empty() or host["name"].str.starts_with(_STEP).any():
        return pl.DataFrame(schema=_HOST)
    pid, tid = threads.row(0)
    name = pl.format(f"{_STEP}{{}}", "id")
    return _select(rows, _HOST, name=name, cat=pl.lit("user_annotation"), pid=pl.lit(pid), tid=pl.lit(tid))


def _read_tasks(source: SqliteFile, texts: pl.DataFrame) -> pl.DataFrame:
    """Return the tasks of NPUs: those of collectives on tracks of their own, by the plane."""
    columns = "startNs endNs deviceId connectionId globalTaskId taskType streamId"
    rows = source.read_table("TASK", int_columns(columns)).rename({"taskType": "type"})
    work = source.read_table("COMPUTE_TASK_INFO", int_columns("globalTaskId name taskType"))
    parts = source.read_table("COMMUNICATION_TASK_INFO", int_columns("globalTaskId name planeId"))
    copies = source.read_table("MEMCPY_INFO", int_columns("globalTaskId size"))
    for table in (
        work.rename({"name": "work_name", "taskType": "work_type"}),
        parts.rename({"name": "part_name"}).with_columns(is_part=True),
        copies,
    ):
        described = table.drop_nulls("globalTaskId").unique("globalTaskId", keep="first")
        rows = rows.join(described, on="globalTaskId", how="left", maintain_order="left")
    rows = _look_up(rows, texts, "type", "work_name", "part_name", "work_type")
    device = pl.col("deviceId").fill_null(0)
    is_part = pl.col("is_part").fill_null(False)
    return _select(
        rows,
        _DEVICE,
        name=pl.coalesce("work_name", "part_name", "type"),
        type=pl.coalesce("work_type", "type"),
        pid=device + pl.when(is_part).then(COLLECTIVE_PID).otherwise(DEVICE_PID),
        tid=pl.when(is_part).then(pl.col("planeId").fill_null(0) + _FIRST_PLANE).otherwise("streamId"),
        connection=pl.col("connectionId"),
        stream=pl.col("streamId"),
        bytes=pl.col("size"),
    )


def _read_collectives(source: SqliteFile, texts: pl.DataFrame) -> pl.DataFrame:
    columns = "opName startNs endNs connectionId groupName dataType count deviceId"
    rows = source.read_table("COMMUNICATION_OP", int_columns(columns))
    rows = _look_up(rows, texts, "opName", "groupName")
    rows = _look_up(rows, _read_names(source, "ENUM_HCCL_DATA_TYPE", "name"), "dataType")
    groups = rows["groupName"].unique().drop_nulls().sort()
    tracks = pl.DataFrame(
        {"groupName": groups, "track": range(groups.len())}, schema={"groupName": TEXT, "track": I64}
    )
    rows = rows.join(tracks, on="groupName", how="left", maintain_order="left")
    return _select(
        rows,
        _DEVICE,
        name=pl.col("opName"),
        pid=pl.col("deviceId").fill_null(0) + COLLECTIVE_PID,
        tid=pl.col("track").fill_null(0),
        connection=pl.col("connectionId"),
        data_type=pl.col("dataType"),
    )


def _select(rows: pl.DataFrame, schema: dict[str, Any], **more: pl.Expr) -> pl.DataFrame:
    """Return rows with the columns of ``schema``: those in ``more``, times and the thread, else as they are or null."""
    times = {"start": pl.col("startNs"), "end": pl.col("endNs")}
    thread = {"pid": pl.col("globalTid") // (1 << 32), "tid": pl.col("globalTid") % (1 << 32)}
    expressions = {**times, **(thread if "globalTid" in rows.columns else {}), **more}
    return rows.select(
        (expressions[name] if name in expressions else pl.col(name) if name in rows.columns else pl.lit(None))
        .cast(dtype)
        .alias(name)
        for name, dtype in schema.items()
    )


def _check_times(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Return the events with a valid start, with ts, dur, ph and args; a duration below zero becomes null."""
    valid = events.filter(pl.col("start").is_between(0, _LATEST).fill_null(False))
    stats.append(
        Stat("read.no_time", "data_loss", events.height - valid.height, "events without a valid start")
    )
    end = pl.when(pl.col("end").is_between(0, _LATEST)).then("end")
    valid = valid.with_columns(ts="start", dur=end - pl.col("start"))
    negative = int((valid["dur"] < 0).sum())
    stats.append(Stat("read.negative_dur", "data_loss", negative, "end before start: the duration is null"))
    valid = valid.with_columns(dur=pl.when(pl.col("dur") >= 0).then("dur"), ph=pl.lit("X"))
    facts = {"Task Type": "type", "connection_id": "connection", "Stream Id": "stream", "count": "count"}
    facts["data_type"] = "data_type"
    is_device = pl.col("pid") >= DEVICE_PID
    members = [
        pl.format(f'"{key}": "{{}}"', _clean(column) if _DEVICE[column] == TEXT else column)
        for key, column in facts.items()
    ]
    joined = pl.concat_str(members, separator=", ", ignore_nulls=True)
    return valid.with_columns(args=pl.when(is_device).then(pl.lit("{") + joined + pl.lit("}")))


def _clean(column: str) -> pl.Expr:
    """Return texts without what would end a text of JSON."""
    return pl.col(column).str.replace_all(r'[\\"\x00-\x1f]', "")


def _select_facts(events: pl.DataFrame) -> pl.DataFrame:
    """Return what `categorize` asks about each event: that of devices."""
    on_device = pl.when(pl.col("pid") >= DEVICE_PID)
    return events.select(
        connection=on_device.then(pl.when(pl.col("connection") >= 0).then("connection")),
        queue=on_device.then(pl.when(pl.col("stream") >= 0).then("stream")),
        task=on_device.then(_clean("type")),
    )


def _list_tracks(events: pl.DataFrame) -> pl.DataFrame:
    """Return rows of threads that name the processes of devices as trace_view.json does."""
    pids = events.filter(pl.col("pid") >= DEVICE_PID)["pid"].unique().sort().to_list()
    rows = [
        {
            "pid": pid,
            "name": COLLECTIVES if pid >= COLLECTIVE_PID else HARDWARE,
            "labels": f"NPU {(pid - DEVICE_PID) % DEVICE_PID}",
        }
        for pid in pids
    ]
    schema = {"pid": I64, "tid": I64, "name": TEXT, "labels": TEXT}
    return pl.DataFrame(rows, schema=schema)


def _number_operators(source: SqliteFile, events: pl.DataFrame) -> pl.DataFrame:
    """Return the events with the External id of operators and of the tasks that their calls launched."""
    links = source.read_table("CONNECTION_IDS", int_columns("id connectionId")).drop_nulls()
    is_device = pl.col("pid") >= DEVICE_PID
    number = _FIRST_OPERATOR + pl.int_range(pl.len())
    events = events.with_columns(number=pl.when(~is_device & pl.col("connection").is_not_null()).then(number))
    operators = events.drop_nulls("number").select("connection", "number")
    # Unique first: equal connections of many operators would be as many rows for each of their links.
    operators = operators.unique("connection", keep="first")
    launched = links.join(operators, left_on="id", right_on="connection").select("number", "connectionId")
    launched = launched.sort("number")
    events = events.join(
        launched.unique("connectionId", keep="first", maintain_order=True).rename({"number": "launcher"}),
        left_on=pl.when(is_device).then("connection"),
        right_on="connectionId",
        how="left",
        maintain_order="left",
    )
    return events.with_columns(external_id=pl.coalesce("number", "launcher"))


def _count_unread(source: SqliteFile) -> Stat:
    counts = {
        name: source.count_rows(name) for name in sorted(source.tables.keys() - _READ) if name.isupper()
    }
    counts = {name: count for name, count in counts.items() if count and not name.startswith("ENUM_")}
    example = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return Stat("read.ascend_not_read", "info", sum(counts.values()), f"rows in {example}")


def _read_meta(source: SqliteFile, path: Path, texts: pl.DataFrame) -> dict[str, Any]:
    devices = source.read_table("NPU_INFO", {"id": I64, "name": TEXT}).drop_nulls()
    ranks = source.read_table("RANK_DEVICE_MAP", int_columns("rankId deviceId"))["rankId"].drop_nulls()
    hosts = source.read_table("HOST_INFO", {"hostName": TEXT})["hostName"].drop_nulls()
    rank = int(ranks[0]) if ranks.len() == 1 and 0 <= ranks[0] < 1 << 30 else None
    return {
        "formats": ["ascend"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "rank": rank,
        "host": hosts[0] if hosts.len() else None,
        "device_properties": [{"id": number, "name": name} for number, name in devices.iter_rows()],
    }
