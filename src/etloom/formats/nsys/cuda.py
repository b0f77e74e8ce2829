"""Converts the CUDA activities of an Nsight Systems export to events with Kineto's categories and names."""

from __future__ import annotations

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.nsys.containers import I64, TEXT, ExportFile, int_columns
from etloom.formats.nsys.event_tables import (
    CUPTI,
    EventTables,
    extract_pid,
    extract_process,
    extract_tid,
    resolve_names,
    select_event_columns,
)

NONE32 = 0xFFFFFFFF
"""CUPTI's id for no stream and no event."""

MEMCPY_KINDS = dict(
    enumerate(["Unknown", *("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")])
)
MEMORY_KINDS = dict(
    enumerate(
        ["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"]
    )
)
SYNC_KINDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}


def read_labels(source: ExportFile, table: str, fallback: dict[int, str]) -> dict[int, str]:
    """Read the labels of an enumeration from the file, by number; the numbers may change between Nsight versions."""
    rows = source.read_table(table, {"id": I64, "name": TEXT}).drop_nulls().rows()
    short = {name.upper().replace(" ", "_"): name for name in fallback.values()}
    labels = {
        number: short.get(
            next((s for s in sorted(short, key=len, reverse=True) if name.endswith("_" + s)), "")
        )
        for number, name in rows
    }
    return fallback | {number: label for number, label in labels.items() if label}


def map_codes(column: str, names: dict[int, str], default: str = "Unknown") -> pl.Expr:
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default=default, return_dtype=pl.String
    )


def null_if_none(column: str) -> pl.Expr:
    """Return a polars expression for a column of CUPTI ids, with null for the id that means no stream or event."""
    return pl.when(pl.col(column) != NONE32).then(pl.col(column))


def build_device_columns() -> dict[str, pl.Expr]:
    """Return the event columns of GPU activities as in Kineto: pid is the device, tid is the stream."""
    return {
        "ph": pl.lit("X"),
        "pid": pl.col("deviceId"),
        "tid": pl.col("streamId"),
        "device": pl.col("deviceId"),
        "stream": pl.col("streamId"),
        "correlation": pl.col("correlationId"),
        "process": extract_process("globalPid"),
    }


_WORK = int_columns("start end deviceId streamId contextId correlationId globalPid graphId graphNodeId")


def read_kernels(source: ExportFile) -> EventTables:
    axes = {f"{shape}{axis}": I64 for shape in ("grid", "block", "cluster") for axis in "XYZ"}
    names = int_columns("demangledName shortName mangledName")
    more = int_columns(
        "registersPerThread staticSharedMemory dynamicSharedMemory localMemoryPerThread launchType"
    )
    frame = source.read_table(CUPTI + "KERNEL", _WORK | names | axes | more)
    frame = resolve_names(source, frame, *names)
    clustered = pl.col("clusterX") > 0
    args = pl.struct(
        *(pl.col(f"cluster{axis}").alias(f"cluster_{axis.lower()}") for axis in "XYZ"),
        pl.col("localMemoryPerThread").alias("local memory per thread"),
        pl.col("launchType").alias("launch type"),
    ).struct.json_encode()
    unusual = clustered | (pl.col("localMemoryPerThread") > 0) | (pl.col("launchType") > 1)
    events = select_event_columns(
        frame,
        cat=pl.lit("kernel"),
        name=pl.coalesce(*names),
        args=pl.when(unusual).then(args),
        **build_device_columns(),
    )
    blocks = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
    threads = pl.col("blockX") * pl.col("blockY") * pl.col("blockZ")
    processors = read_sm_counts(source)
    per_device = map_numbers("deviceId", processors)
    side = frame.with_row_index("row").select(
        "row",
        *(
            pl.col(f"{shape}{axis}").alias(f"{shape}_{axis.lower()}")
            for shape in ("grid", "block")
            for axis in "XYZ"
        ),
        pl.col("registersPerThread").alias("registers"),
        # Some versions lack one of the two; if both are absent, the value is unknown, not zero.
        shared_mem=pl.when(
            pl.any_horizontal(pl.col("staticSharedMemory", "dynamicSharedMemory").is_not_null())
        ).then(pl.sum_horizontal("staticSharedMemory", "dynamicSharedMemory")),
        blocks_per_sm=blocks / per_device,
        warps_per_sm=blocks * (threads / 32) / per_device,
        context="contextId",
        graph_id="graphId",
        graph_node_id="graphNodeId",
    )
    return EventTables(events, {"kernels": side})


def read_sm_counts(source: ExportFile) -> dict[int, int]:
    """Return CUDA device index -> number of streaming multiprocessors."""
    devices = source.read_table(
        "TARGET_INFO_CUDA_DEVICE", {"cudaId": I64, "numMultiprocessors": I64}
    ).drop_nulls()
    gpus = source.read_table("TARGET_INFO_GPU", {"id": I64, "smCount": I64}).drop_nulls()
    return dict(gpus.rows()) | dict(devices.rows())


def map_numbers(column: str, numbers: dict[int, int]) -> pl.Expr:
    if not numbers:
        return pl.lit(None, dtype=pl.Float64)
    return pl.col(column).replace_strict(
        list(numbers), list(numbers.values()), default=None, return_dtype=pl.Float64
    )


def read_graphs(source: ExportFile) -> EventTables:
    """Read CUDA graph launches of --cuda-graph-trace=graph as events; each event represents all kernels of a graph."""
    frame = source.read_table(CUPTI + "GRAPH_TRACE", _WORK)
    events = select_event_columns(
        frame,
        cat=pl.lit("kernel"),
        name=pl.format("CUDA graph {}", pl.col("graphId").cast(pl.String).fill_null("")),
        **build_device_columns(),
    )
    side = frame.with_row_index("row").select("row", context="contextId", graph_id="graphId")
    note = "each represents all kernels of its graph; profile with --cuda-graph-trace=node to record them"
    return EventTables(
        events, {"kernels": side}, [Stat("read.nsys_graph_launch", "info", events.height, note)]
    )


def read_memcpys(source: ExportFile) -> EventTables:
    frame = source.read_table(CUPTI + "MEMCPY", _WORK | int_columns("bytes copyKind srcKind dstKind"))
    memory = read_labels(source, "ENUM_CUDA_MEM_KIND", MEMORY_KINDS)
    name = pl.format(
        "Memcpy {} ({} -> {})",
        map_codes("copyKind", read_labels(source, "ENUM_CUDA_MEMCPY_OPER", MEMCPY_KINDS)),
        map_codes("srcKind", memory),
        map_codes("dstKind", memory),
    )
    events = select_event_columns(frame, cat=pl.lit("gpu_memcpy"), name=name, **build_device_columns())
    return EventTables(events, {"kernels": _transfer(frame)})


def read_memsets(source: ExportFile) -> EventTables:
    frame = source.read_table(CUPTI + "MEMSET", _WORK | int_columns("bytes memKind value"))
    kind = map_codes("memKind", read_labels(source, "ENUM_CUDA_MEM_KIND", MEMORY_KINDS))
    args = pl.struct("value").struct.json_encode()
    events = select_event_columns(
        frame,
        cat=pl.lit("gpu_memset"),
        name=pl.format("Memset ({})", kind),
        args=args,
        **build_device_columns(),
    )
    return EventTables(events, {"kernels": _transfer(frame)})


def _transfer(frame: pl.DataFrame) -> pl.DataFrame:
    duration = pl.col("end") - pl.col("start")
    return frame.with_row_index("row").select(
        "row",
        "bytes",
        # Bytes a nanosecond are GB/s.
        bandwidth=pl.when(duration > 0).then(pl.col("bytes") / duration),
        context="contextId",
        graph_id="graphId",
        graph_node_id="graphNodeId",
    )


def read_syncs(source: ExportFile) -> EventTables:
    """Read synchronizations as cuda_sync events, with the stream and call that recorded each awaited CUDA event.

    Nsight Systems writes device 0 for all synchronizations, so the device is inferred from the GPU activities of the
    same context.
    """
    key = ["globalPid", "eventId", "eventSyncId"]
    frame = source.read_table(CUPTI + "SYNCHRONIZATION", _WORK | dict.fromkeys(("syncType", *key), I64))
    stats: list[Stat] = []
    if frame.height:
        resolved = frame.join(
            _find_context_devices(source),
            on=["globalPid", "contextId"],
            how="left",
            nulls_equal=True,
            maintain_order="left",
        ).with_columns(pl.coalesce("used", "deviceId").alias("deviceId"))
        moved = int((resolved["deviceId"] != frame["deviceId"]).sum())
        stats = [
            Stat(
                "read.nsys_device_of_sync",
                "info",
                moved,
                "the device is inferred from the activities of its context",
            )
        ]
        frame = resolved.drop("used")
    records = (
        source.read_table(CUPTI + "CUDA_EVENT", dict.fromkeys((*key, "streamId", "correlationId"), I64))
        .drop_nulls(key[1:])
        .unique(key, keep="last")
        .rename({"streamId": "wait_stream", "correlationId": "record_correlation"})
    )
    frame = frame.join(records, on=key, how="left", nulls_equal=True, maintain_order="left")
    kind = map_codes("syncType", SYNC_KINDS)
    columns = build_device_columns() | {"stream": null_if_none("streamId"), "tid": null_if_none("streamId")}
    events = select_event_columns(frame, cat=pl.lit("cuda_sync"), name=kind, **columns)
    side = frame.with_row_index("row").select(
        "row",
        kind.alias("kind"),
        "wait_stream",
        "record_correlation",
        wait_event=null_if_none("eventId"),
    )
    return EventTables(events, {"syncs": side}, stats=stats)


def _find_context_devices(source: ExportFile) -> pl.DataFrame:
    """Return the CUDA contexts with GPU activities on a single device: globalPid, contextId, ``used`` (the device)."""
    columns = int_columns("globalPid contextId deviceId")
    tables = (source.read_table(CUPTI + table, columns).unique() for table in ("KERNEL", "MEMCPY", "MEMSET"))
    used = pl.concat(tables).drop_nulls(["contextId", "deviceId"]).unique()
    return used.unique(["globalPid", "contextId"], keep="none").rename({"deviceId": "used"})


def read_calls(source: ExportFile) -> EventTables:
    """Read CUDA runtime and driver calls as events, and remove the version suffix (_v7000) from their names."""
    frame = source.read_table(
        CUPTI + "RUNTIME",
        int_columns("start end globalTid correlationId nameId returnValue"),
    )
    frame = resolve_names(source, frame, "nameId")
    events = select_event_columns(
        frame,
        ph=pl.lit("X"),
        # cuLaunchKernel is a driver call, cudaLaunchKernel a runtime call.
        cat=pl.when(pl.col("nameId").str.contains("^cu[A-Z]"))
        .then(pl.lit("cuda_driver"))
        .otherwise(pl.lit("cuda_runtime")),
        # Only versions of four digits and more: cuMemAlloc_v2 is a different function.
        name=pl.col("nameId").str.replace(r"_v\d{4,}$", ""),
        correlation=pl.col("correlationId"),
        args=pl.when(pl.col("returnValue") != 0).then(
            pl.concat_str(pl.lit('{"return value":'), pl.col("returnValue"), pl.lit("}"))
        ),
        **_build_host_columns("globalTid"),
    )
    failed = frame.filter(pl.col("returnValue") != 0)["nameId"]
    stats: list[Stat] = [
        Stat("read.nsys_failed_call", "info", failed.len(), failed[0] if failed.len() else None)
    ]
    return EventTables(events, stats=stats)


def read_overheads(source: ExportFile) -> EventTables:
    frame = source.read_table(
        CUPTI + "OVERHEAD",
        int_columns("start end globalTid correlationId nameId overheadType"),
    )
    frame = resolve_names(source, frame, "nameId")
    events = select_event_columns(
        frame,
        ph=pl.lit("X"),
        cat=pl.lit("overhead"),
        name=pl.col("nameId"),
        correlation=None,  # the correlation of the call it delayed would pair it with the kernel
        **_build_host_columns("globalTid"),
    )
    return EventTables(events)


def _build_host_columns(column: str) -> dict[str, pl.Expr]:
    return {"process": extract_process(column), "pid": extract_pid(column), "tid": extract_tid(column)}


def read_memory(source: ExportFile) -> pl.DataFrame:
    """Read GPU allocations and releases (--cuda-memory-usage=true) as rows of memory, plus the column ``process``."""
    columns = int_columns("start globalPid globalTid deviceId address bytes memoryOperationType")
    frame = source.read_table("CUDA_GPU_MEMORY_USAGE_EVENTS", columns)
    freed = pl.col("memoryOperationType") == 1
    return frame.select(
        process=extract_process("globalPid"),
        ts="start",
        pid=extract_pid("globalPid"),
        tid=extract_tid("globalTid"),
        addr=pl.col("address").cast(pl.UInt64, strict=False),
        bytes=pl.when(freed).then(-pl.col("bytes")).otherwise(pl.col("bytes")),
        device_type=pl.lit(1),
        device="deviceId",
    )


def read_gpu_metrics(source: ExportFile) -> pl.DataFrame:
    """Read the table GPU_METRICS as rows of counters, plus a column ``gpu``, the index of the GPU in the machine."""
    key = {"typeId": I64, "metricId": I64}
    frame = source.read_table("GPU_METRICS", {"timestamp": I64, "value": pl.Float64} | key)
    names = source.read_table("TARGET_INFO_GPU_METRICS", key | {"metricName": TEXT}).unique(
        list(key), keep="first"
    )
    # The low byte of typeId numbers the GPU.
    gpu = pl.col("typeId") & 0xFF
    return frame.join(names, on=list(key), how="left", maintain_order="left").select(
        gpu=gpu, ts="timestamp", name="metricName", series=pl.format("GPU {}", gpu), value="value"
    )
