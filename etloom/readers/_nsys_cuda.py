"""CUDA activity of an Nsight Systems export as events in Kineto's categories and spelling."""

from __future__ import annotations

import polars as pl

from etloom.readers._nsys_part import CUPTI, Part, named, part, pid_of, process_of, tid_of
from etloom.readers._nsys_source import I64, TEXT, Source, integers
from etloom.readers._tables import Stat

NONE32 = 0xFFFFFFFF
"""CUPTI's 'no stream' and 'no event'."""

COPY_KINDS = dict(
    enumerate(["Unknown", *("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")])
)
MEMORY_KINDS = dict(
    enumerate(
        ["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"]
    )
)
SYNC_KINDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}


def labels(source: Source, table: str, fallback: dict[int, str]) -> dict[int, str]:
    """The file's own enumeration: its numbers may change with the version, its names do not."""
    rows = source.frame(table, {"id": I64, "name": TEXT}).drop_nulls().rows()
    short = {name.upper().replace(" ", "_"): name for name in fallback.values()}
    known = {
        number: short.get(
            next((s for s in sorted(short, key=len, reverse=True) if name.endswith("_" + s)), "")
        )
        for number, name in rows
    }
    return fallback | {number: label for number, label in known.items() if label}


def mapped(column: str, names: dict[int, str], default: str = "Unknown") -> pl.Expr:
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default=default, return_dtype=pl.String
    )


def present(column: str) -> pl.Expr:
    """A CUPTI id, null where it says 'none'."""
    return pl.when(pl.col(column) != NONE32).then(pl.col(column))


def device_columns() -> dict[str, pl.Expr]:
    """Device work lies on Kineto's lanes: the device is its process, the stream its thread."""
    return {
        "ph": pl.lit("X"),
        "pid": pl.col("deviceId"),
        "tid": pl.col("streamId"),
        "device": pl.col("deviceId"),
        "stream": pl.col("streamId"),
        "correlation": pl.col("correlationId"),
        "process": process_of("globalPid"),
    }


_WORK = integers("start end deviceId streamId contextId correlationId globalPid graphId graphNodeId")


def kernels(source: Source) -> Part:
    axes = {f"{what}{axis}": I64 for what in ("grid", "block", "cluster") for axis in "XYZ"}
    names = integers("demangledName shortName mangledName")
    more = integers(
        "registersPerThread staticSharedMemory dynamicSharedMemory localMemoryPerThread launchType"
    )
    frame = source.frame(CUPTI + "KERNEL", _WORK | names | axes | more)
    frame = named(source, frame, *names)
    clustered = pl.col("clusterX") > 0
    args = pl.struct(
        *(pl.col(f"cluster{axis}").alias(f"cluster_{axis.lower()}") for axis in "XYZ"),
        pl.col("localMemoryPerThread").alias("local memory per thread"),
        pl.col("launchType").alias("launch type"),
    ).struct.json_encode()
    unusual = clustered | (pl.col("localMemoryPerThread") > 0) | (pl.col("launchType") > 1)
    events = part(
        frame,
        cat=pl.lit("kernel"),
        name=pl.coalesce(*names),
        args=pl.when(unusual).then(args),
        **device_columns(),
    )
    blocks = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
    threads = pl.col("blockX") * pl.col("blockY") * pl.col("blockZ")
    processors = multiprocessors(source)
    per_device = mapped_number("deviceId", processors)
    side = frame.with_row_index("row").select(
        "row",
        *(
            pl.col(f"{what}{axis}").alias(f"{what}_{axis.lower()}")
            for what in ("grid", "block")
            for axis in "XYZ"
        ),
        pl.col("registersPerThread").alias("registers"),
        # One of the two is absent in some versions; both absent is unknown, not zero.
        shared_mem=pl.when(
            pl.any_horizontal(pl.col("staticSharedMemory", "dynamicSharedMemory").is_not_null())
        ).then(pl.sum_horizontal("staticSharedMemory", "dynamicSharedMemory")),
        blocks_per_sm=blocks / per_device,
        warps_per_sm=blocks * (threads / 32) / per_device,
        context="contextId",
        graph_id="graphId",
        graph_node_id="graphNodeId",
    )
    return Part(events, {"kernels": side})


def multiprocessors(source: Source) -> dict[int, int]:
    """Streaming multiprocessors by CUDA device index."""
    devices = source.frame("TARGET_INFO_CUDA_DEVICE", {"cudaId": I64, "numMultiprocessors": I64}).drop_nulls()
    gpus = source.frame("TARGET_INFO_GPU", {"id": I64, "smCount": I64}).drop_nulls()
    return dict(gpus.rows()) | dict(devices.rows())


def mapped_number(column: str, numbers: dict[int, int]) -> pl.Expr:
    if not numbers:
        return pl.lit(None, dtype=pl.Float64)
    return pl.col(column).replace_strict(
        list(numbers), list(numbers.values()), default=None, return_dtype=pl.Float64
    )


def graphs(source: Source) -> Part:
    """Graphs launched with --cuda-graph-trace=graph: one row stands for all the kernels inside."""
    frame = source.frame(CUPTI + "GRAPH_TRACE", _WORK)
    events = part(
        frame,
        cat=pl.lit("kernel"),
        name=pl.format("CUDA graph {}", pl.col("graphId").cast(pl.String).fill_null("")),
        **device_columns(),
    )
    side = frame.with_row_index("row").select("row", context="contextId", graph_id="graphId")
    note = "each stands for all the kernels of its graph; profile with --cuda-graph-trace=node to see them"
    return Part(events, {"kernels": side}, [("read.nsys_whole_graph", "info", events.height, note)])


def copies(source: Source) -> Part:
    frame = source.frame(CUPTI + "MEMCPY", _WORK | integers("bytes copyKind srcKind dstKind"))
    memory = labels(source, "ENUM_CUDA_MEM_KIND", MEMORY_KINDS)
    name = pl.format(
        "Memcpy {} ({} -> {})",
        mapped("copyKind", labels(source, "ENUM_CUDA_MEMCPY_OPER", COPY_KINDS)),
        mapped("srcKind", memory),
        mapped("dstKind", memory),
    )
    events = part(frame, cat=pl.lit("gpu_memcpy"), name=name, **device_columns())
    return Part(events, {"kernels": _transfer(frame)})


def sets(source: Source) -> Part:
    frame = source.frame(CUPTI + "MEMSET", _WORK | integers("bytes memKind value"))
    kind = mapped("memKind", labels(source, "ENUM_CUDA_MEM_KIND", MEMORY_KINDS))
    args = pl.struct("value").struct.json_encode()
    events = part(
        frame, cat=pl.lit("gpu_memset"), name=pl.format("Memset ({})", kind), args=args, **device_columns()
    )
    return Part(events, {"kernels": _transfer(frame)})


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


def syncs(source: Source) -> Part:
    """cuda_sync rows; the stream and call that recorded an awaited event come from the CUDA_EVENT table.

    Nsight Systems writes device 0 for all of them: the device is that of the work in their context.
    """
    key = ["globalPid", "eventId", "eventSyncId"]
    frame = source.frame(CUPTI + "SYNCHRONIZATION", _WORK | dict.fromkeys(("syncType", *key), I64))
    stats: list[Stat] = []
    if frame.height:
        told = frame.join(
            _devices(source), on=["globalPid", "contextId"], how="left", maintain_order="left"
        ).with_columns(pl.coalesce("used", "deviceId").alias("deviceId"))
        moved = int((told["deviceId"] != frame["deviceId"]).sum())
        stats = [("read.nsys_device_of_sync", "info", moved, "the device is that of the work in its context")]
        frame = told.drop("used")
    records = (
        source.frame(CUPTI + "CUDA_EVENT", dict.fromkeys((*key, "streamId", "correlationId"), I64))
        .drop_nulls(key)
        .unique(key, keep="last")
        .rename({"streamId": "wait_stream", "correlationId": "record_correlation"})
    )
    frame = frame.join(records, on=key, how="left", maintain_order="left")
    kind = mapped("syncType", SYNC_KINDS)
    lane = device_columns() | {"stream": present("streamId"), "tid": present("streamId")}
    events = part(frame, cat=pl.lit("cuda_sync"), name=kind, **lane)
    side = frame.with_row_index("row").select(
        "row",
        kind.alias("kind"),
        "wait_stream",
        "record_correlation",
        wait_event=present("eventId"),
    )
    return Part(events, {"syncs": side}, stats=stats)


def _devices(source: Source) -> pl.DataFrame:
    """globalPid, contextId, used: the device on which a context has work."""
    columns = integers("globalPid contextId deviceId")
    tables = (source.frame(CUPTI + table, columns).unique() for table in ("KERNEL", "MEMCPY", "MEMSET"))
    used = pl.concat(tables).drop_nulls().unique()
    return used.unique(["globalPid", "contextId"], keep="none").rename({"deviceId": "used"})


def calls(source: Source) -> Part:
    """Runtime and driver calls. Nsight puts both in one table and a version behind the name: _v7000."""
    frame = source.frame(
        CUPTI + "RUNTIME",
        integers("start end globalTid correlationId nameId returnValue"),
    )
    frame = named(source, frame, "nameId")
    events = part(
        frame,
        ph=pl.lit("X"),
        # cuLaunchKernel is the driver's, cudaLaunchKernel the runtime's.
        cat=pl.when(pl.col("nameId").str.contains("^cu[A-Z]"))
        .then(pl.lit("cuda_driver"))
        .otherwise(pl.lit("cuda_runtime")),
        # Four digits and more: cuMemAlloc_v2 is a name of its own.
        name=pl.col("nameId").str.replace(r"_v\d{4,}$", ""),
        correlation=pl.col("correlationId"),
        args=pl.when(pl.col("returnValue") != 0).then(
            pl.concat_str(pl.lit('{"return value":'), pl.col("returnValue"), pl.lit("}"))
        ),
        **_host("globalTid"),
    )
    failed = frame.filter(pl.col("returnValue") != 0)["nameId"]
    stats: list[Stat] = [("read.nsys_failed_call", "info", failed.len(), failed[0] if failed.len() else None)]
    return Part(events, stats=stats)


def overheads(source: Source) -> Part:
    frame = source.frame(
        CUPTI + "OVERHEAD",
        integers("start end globalTid correlationId nameId overheadType"),
    )
    frame = named(source, frame, "nameId")
    events = part(
        frame,
        ph=pl.lit("X"),
        cat=pl.lit("overhead"),
        name=pl.col("nameId"),
        correlation=None,  # the correlation of the call it delayed would pair it with the kernel
        **_host("globalTid"),
    )
    return Part(events)


def _host(column: str) -> dict[str, pl.Expr]:
    return {"process": process_of(column), "pid": pid_of(column), "tid": tid_of(column)}


def memory(source: Source) -> pl.DataFrame:
    """Rows of the memory table, with ``process``: device allocations (--cuda-memory-usage=true)."""
    columns = integers("start globalPid globalTid deviceId address bytes memoryOperationType")
    frame = source.frame("CUDA_GPU_MEMORY_USAGE_EVENTS", columns)
    freed = pl.col("memoryOperationType") == 1
    return frame.select(
        process=process_of("globalPid"),
        ts="start",
        pid=pid_of("globalPid"),
        tid=tid_of("globalTid"),
        addr=pl.col("address").cast(pl.UInt64, strict=False),
        bytes=pl.when(freed).then(-pl.col("bytes")).otherwise(pl.col("bytes")),
        device_type=pl.lit(1),
        device="deviceId",
    )


def metrics(source: Source) -> pl.DataFrame:
    """GPU_METRICS as rows of the counters table, with ``gpu``, the index of the GPU in the machine."""
    key = {"typeId": I64, "metricId": I64}
    frame = source.frame("GPU_METRICS", {"timestamp": I64, "value": pl.Float64} | key)
    about = source.frame("TARGET_INFO_GPU_METRICS", key | {"metricName": TEXT}).unique(
        list(key), keep="first"
    )
    # The low byte of typeId numbers the GPU.
    gpu = pl.col("typeId") & 0xFF
    return frame.join(about, on=list(key), how="left", maintain_order="left").select(
        gpu=gpu, ts="timestamp", name="metricName", series=pl.format("GPU {}", gpu), value="value"
    )
