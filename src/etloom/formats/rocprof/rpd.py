"""Reads the databases of rocmProfileData (.rpd): operations of GPUs, calls, and which call caused which operation.

An operation states neither its process nor a correlation, so the id of its call serves as both. Sizes of grids are not
read: depending on the tracer they count work-items or workgroups. Schema versions 1 to 3.
Layout: rocpd_python/rocpd/schema_data of ROCm/rocmProfileData.
"""

from __future__ import annotations

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.io.sqlite_file import I64, TEXT, SqliteFile, int_columns
from etloom.formats.rocprof.activities import ACTIVITY_COLUMNS, CALL_COLUMNS, Process, count_unread, name_copy
from etloom.formats.tables.building import select_columns

TABLES = frozenset({"rocpd_op", "rocpd_api"})
_READ = ("op", "api", "api_ops", "string", "ustring", "kernelapi", "copyapi", "copyop", "metadata")
_MARKER = "UserMarker"
_HOST_DOMAINS = ("HIP", "HSA")
_CATEGORIES = {
    r"(?i)mem_?cpy|copy": "gpu_memcpy",
    r"(?i)mem_?set|fill": "gpu_memset",
    r"(?i)barrier|marker|signal": "",
}
"""Pattern of the type of an operation -> its category, or nothing if it is not an activity; all others are kernels."""


def read_processes(source: SqliteFile) -> tuple[list[Process], list[Stat]]:
    """Read the processes of a database, and what concerns the file as a whole."""
    strings = source.read_table("rocpd_string", {"id": I64, "string": TEXT}).drop_nulls("id").unique("id")
    calls = _read_calls(source, strings)
    operations, other = _read_operations(source, strings, calls.select("api", process="pid"))
    lost = operations["process"].null_count() + calls["pid"].null_count()
    devices = [{"id": device} for device in operations["device"].unique().drop_nulls().sort()]
    stats = [
        *source.stats,
        count_unread(source, source.tables.keys() - {f"rocpd_{name}" for name in _READ}),
        Stat("read.rocprof_not_read", "info", other, "operations that are barriers and signals"),
        Stat(
            "read.rocprof_no_process",
            "data_loss",
            lost,
            "GPU activities without a call, or calls without a process",
        ),
    ]
    pids = calls["pid"].unique().drop_nulls().sort().to_list() or [0]
    processes = [
        Process(
            pid,
            select_columns(calls.filter(pl.col("pid") == pid), CALL_COLUMNS, correlation=pl.col("api")),
            select_columns(operations.filter(pl.col("process") == pid), ACTIVITY_COLUMNS),
        )
        for pid in pids
    ]
    for process in processes:
        used = process.activities["device"].unique().to_list()
        process.devices = [device for device in devices if device["id"] in used]
    return processes, stats


def read_version(source: SqliteFile) -> str | None:
    """Return the version of the schema, as the database states it."""
    rows = source.read_table("rocpd_metadata", {"tag": TEXT, "value": TEXT}).drop_nulls()
    versions = rows.filter(pl.col("tag") == "schema_version")["value"]
    return str(versions[0]) if versions.len() else None


def _read_calls(source: SqliteFile, strings: pl.DataFrame) -> pl.DataFrame:
    """Read calls and markers; the text of a marker is its argument."""
    columns = int_columns("id pid tid start end apiName_id domain_id args_id")
    rows = source.read_table("rocpd_api", columns).rename({"id": "api"})
    rows = _look_up(_look_up(rows, strings, "apiName_id", "name"), strings, "domain_id", "domain")
    mark = (pl.col("name") == _MARKER).fill_null(False)
    texts = strings
    if "rocpd_ustring" in source.tables:
        texts = source.read_table("rocpd_ustring", {"id": I64, "string": TEXT}).drop_nulls("id").unique("id")
    rows = _look_up(rows.with_columns(args_id=pl.when(mark).then("args_id")), texts, "args_id", "text")
    domain = pl.col("domain").str.to_uppercase()
    is_host = (
        domain.is_null() | domain.str.starts_with(_HOST_DOMAINS[0]) | domain.str.starts_with(_HOST_DOMAINS[1])
    )
    hsa = pl.col("name").str.starts_with("hsa_")
    return rows.with_columns(
        name=pl.coalesce(pl.when(pl.col("text") != "").then("text"), "name"),
        domain=pl.when(mark | ~is_host)
        .then(pl.lit("MARKER"))
        .when(hsa)
        .then(pl.lit(_HOST_DOMAINS[1]))
        .otherwise(pl.lit(_HOST_DOMAINS[0])),
    )


def _read_operations(
    source: SqliteFile, strings: pl.DataFrame, calls: pl.DataFrame
) -> tuple[pl.DataFrame, int]:
    """Read the activities with their process (null if unknown), and the number of other operations."""
    columns = int_columns("id gpuId queueId start end description_id opType_id")
    rows = source.read_table("rocpd_op", columns)
    links = source.read_table("rocpd_api_ops", int_columns("api_id op_id")).drop_nulls()
    rows = rows.join(
        links.unique("op_id", keep="first"), left_on="id", right_on="op_id", how="left", maintain_order="left"
    ).join(
        calls.drop_nulls().unique("api"), left_on="api_id", right_on="api", how="left", maintain_order="left"
    )
    pids = calls["process"].unique().drop_nulls()
    if pids.len() < 2:  # then also operations without a call are of the only process
        rows = rows.with_columns(pl.col("process").fill_null(pids[0] if pids.len() else 0))
    rows = _look_up(_look_up(rows, strings, "description_id", "description"), strings, "opType_id", "type")
    category = pl.lit("kernel")
    for pattern, name in reversed(_CATEGORIES.items()):
        category = pl.when(pl.col("type").str.contains(pattern)).then(pl.lit(name)).otherwise(category)
    rows = rows.with_columns(cat=category)
    activities = rows.filter(pl.col("cat") != "")
    text = pl.coalesce(pl.when(pl.col("description") != "").then("description"), "type")
    is_copy = pl.col("cat") == "gpu_memcpy"
    selected = select_columns(
        _join_sizes(source, activities),
        {"process": I64} | ACTIVITY_COLUMNS,
        name=pl.when(is_copy).then(name_copy(pl.col("type"))).otherwise(text),
        device=pl.col("gpuId"),
        queue=pl.col("queueId"),
        correlation=pl.col("api_id"),
    )
    return selected, rows.height - activities.height


def _join_sizes(source: SqliteFile, activities: pl.DataFrame) -> pl.DataFrame:
    """Add the bytes of copies: of the operation, or of its call, if that caused one operation only."""
    of_operations = (
        source.read_table("rocpd_copyop", int_columns("op_ptr_id size")).drop_nulls().unique("op_ptr_id")
    )
    of_calls = source.read_table("rocpd_copyapi", int_columns("api_ptr_id size")).drop_nulls()
    of_calls = of_calls.unique("api_ptr_id", keep="none").rename({"size": "call_size"})
    single = pl.len().over("api_id") == 1
    return (
        activities.join(of_operations, left_on="id", right_on="op_ptr_id", how="left", maintain_order="left")
        .join(of_calls, left_on="api_id", right_on="api_ptr_id", how="left", maintain_order="left")
        .with_columns(bytes=pl.coalesce("size", pl.when(single).then("call_size")))
    )


def _look_up(rows: pl.DataFrame, strings: pl.DataFrame, key: str, name: str) -> pl.DataFrame:
    texts = strings.select(pl.col("id").alias(key), pl.col("string").alias(name))
    return rows.join(texts, on=key, how="left", maintain_order="left")
