"""Makes a small Nsight Systems export by hand: two processes of one job, every table that the reader knows.

    python tests/data/nsys/make.py FILE.sqlite

The columns are those of export schema 3.25; the rows are invented. `build` returns nothing: what the file holds is
said below, and the tests assert it.
"""

from __future__ import annotations

import sqlite3
import struct
import sys
from pathlib import Path

VM = 1 << 48
EPOCH = 1_779_630_014_975_716_426
COMMUNICATOR = 0xFEDC_BA98_7654_3210
NO_STREAM = 0xFFFFFFFF

STRINGS = {
    1: "void gemm<float>(float*)",
    2: "gemm",
    3: "cudaLaunchKernel_v7000",
    4: "cuLaunchKernel",
    5: "cudaMemcpyAsync_v3020",
    6: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
    7: "cudaGraphLaunch_v10000",
    8: "python3",
    9: "ncclAllReduce",
    10: "Command Buffer Full",
    11: "pt_main_thread",
    12: "cudaStreamWaitEvent_v3020",
    13: "ncclSend",
}


def process(pid: int) -> int:
    return VM | pid << 24


def thread(pid: int, tid: int) -> int:
    return process(pid) | tid


def _payload(schema: int, body: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(body), 32 + len(body)) + body


INIT, COLLECTIVE, P2P = (1 << 24) + 2, (1 << 24) + 4, (1 << 24) + 10
SCHEMA_ENTRIES = [
    (1, INIT, 0, 18, "NCCL communicator ID", None),
    (1, INIT, 1, 5, "No. of ranks", 8),
    (1, INIT, 2, 5, "Rank", 12),
    (1, COLLECTIVE, 0, 18, "NCCL communicator ID", None),
    (1, COLLECTIVE, 1, 22, "Message size [bytes]", 8),
    (1, COLLECTIVE, 2, (1 << 24) + 99, "Reduction operation", 16),
    (1, P2P, 0, 18, "NCCL communicator ID", None),
    (1, P2P, 1, 22, "Message size [bytes]", 8),
    (1, P2P, 2, 5, "Peer rank", 16),
]


def _insert(db: sqlite3.Connection, table: str, columns: str, rows: list[tuple[object, ...]]) -> None:
    names = columns.split()
    db.execute(f"CREATE TABLE {table} ({', '.join(names)})")
    db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(names))})", rows)


def build(path: Path, *, ranks: bool = True) -> None:
    """Write the export to path; with ranks, NCCL says pid 200 is rank 1 and pid 300 rank 0."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        _about(db)
        _device(db)
        _host(db, ranks)
    db.close()


def _about(db: sqlite3.Connection) -> None:
    _insert(db, "StringIds", "id value", list(STRINGS.items()))
    _insert(db, "META_DATA_EXPORT", "name value", [("EXPORT_SCHEMA_VERSION", "3.25.0")])
    _insert(db, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs systemClockNs", [(EPOCH, 5)])
    _insert(
        db,
        "TARGET_INFO_GPU",
        "id name totalMemory computeMajor computeMinor threadsPerWarp smCount",
        [
            (0, "NVIDIA H100", 85_000_000_000, 9, 0, 32, 132),
            (1, "NVIDIA H100", 85_000_000_000, 9, 0, 32, 132),
        ],
    )
    _insert(
        db,
        "PROCESSES",
        "globalPid pid name",
        [(process(200), 200, "python3"), (process(300), 300, "python3"), (process(100), 100, "torchrun")],
    )
    _insert(db, "ThreadNames", "nameId priority globalTid", [(11, 20, thread(200, 201))])
    _insert(
        db,
        "TARGET_INFO_GPU_METRICS",
        "typeId metricId metricName",
        [(0, 7, "SMs Active [%]"), (1, 7, "SMs Active [%]")],
    )
    _insert(
        db,
        "GPU_METRICS",
        "timestamp typeId metricId value",
        [(100, 0, 7, 50), (100, 1, 7, 75), (200, 0, 7, 60)],
    )
    _insert(
        db,
        "ENUM_CUDA_MEM_KIND",
        "id name label",
        [
            (0, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "Pageable"),
            (2, "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "Device"),
        ],
    )
    _insert(db, "SCHED_EVENTS", "start cpu", [(1, 0), (2, 0), (3, 0)])


def _device(db: sqlite3.Connection) -> None:
    kernel = "start end deviceId contextId streamId correlationId globalPid demangledName shortName registersPerThread "
    kernel += (
        "gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory graphId graphNodeId"
    )
    # Both processes use correlation 1: only (pid, correlation) tells the kernels apart.
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        kernel,
        [
            (1000, 1500, 0, 1, 7, 1, process(200), 1, 2, 32, 132, 2, 1, 64, 2, 1, 100, 28, None, None),
            (1100, 1900, 1, 2, 7, 1, process(300), 1, 2, 32, 1, 1, 1, 32, 1, 1, 0, 0, None, None),
            (2000, 2600, 0, 1, 20, 2, process(200), 6, 6, 96, 16, 1, 1, 512, 1, 1, 0, 0, 5, 51),
        ],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "start end deviceId graphId graphExecId contextId streamId correlationId globalPid",
        [(5000, 6000, 0, 9, 10, 1, 7, 4, process(200))],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "start end deviceId contextId streamId correlationId globalPid bytes copyKind srcKind dstKind",
        [(800, 900, 0, 1, 7, 3, process(200), 5000, 1, 0, 2)],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "start end deviceId contextId streamId correlationId globalPid value bytes memKind",
        [(920, 930, 0, 1, 7, 5, process(200), 0, 4, 2), (940, 935, 0, 1, 7, 6, process(200), 255, 4, 2)],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "start end deviceId contextId streamId correlationId globalPid syncType eventId eventSyncId",
        [
            (1950, 1960, 0, 1, 20, 8, process(200), 2, 33, 333),
            (7000, 7100, 0, 1, NO_STREAM, 9, process(200), 4, NO_STREAM, 0),
            # On device 1, where the kernels of this context are, though Nsight says 0.
            (1850, 1950, 0, 2, 7, 10, process(300), 3, NO_STREAM, 0),
        ],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        "deviceId contextId streamId correlationId globalPid eventId eventSyncId",
        [(0, 1, 7, 77, process(200), 33, 333), (1, 2, 8, 78, process(300), 33, 333)],
    )
    _insert(
        db,
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        "start globalPid globalTid deviceId address bytes memoryOperationType",
        [
            (10, process(200), thread(200, 201), 0, 4096, 512, 0),
            (20, process(200), thread(200, 201), 0, 4096, 512, 1),
        ],
    )


def _host(db: sqlite3.Connection, ranks: bool) -> None:
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "start end eventClass globalTid correlationId nameId returnValue",
        [
            (500, 520, 0, thread(200, 201), 3, 5, 0),
            (600, 620, 0, thread(200, 201), 1, 3, 0),
            (650, 660, 1, thread(200, 201), 2, 4, 0),
            (700, 720, 0, thread(200, 201), 4, 7, 700),
            (610, 630, 0, thread(300, 301), 1, 3, 0),
            (1, 2, 0, thread(100, 100), 1, 12, 0),
        ],
    )
    _insert(
        db,
        "CUPTI_ACTIVITY_KIND_OVERHEAD",
        "start end globalTid correlationId nameId overheadType",
        [(505, 515, thread(200, 201), 3, 10, 8)],
    )
    _insert(db, "NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId schemaId idx type name offset", list(SCHEMA_ENTRIES))
    init = [
        _payload(INIT, struct.pack("<QiiQ", COMMUNICATOR, 2, rank, 0)) if ranks else None for rank in (1, 0)
    ]
    reduce = _payload(COLLECTIVE, struct.pack("<QQiI", COMMUNICATOR, 4096, 2, 0))
    send = _payload(P2P, struct.pack("<QQiI", COMMUNICATOR, 64, 0, 0))
    main, other = thread(200, 201), thread(300, 301)
    rows: list[tuple[object, ...]] = [
        (0, None, 75, "NCCL", None, main, 1, None, None),
        (590, 640, 59, "aten::mul, seq = 45328, op_id = 990726", None, main, 0, None, None),
        (
            580,
            645,
            59,
            "AddmmBackward0, seq = 7, op_id = 12, sizes = [[2, 3], [3]], input_op_ids = [(11,0)]",
            None,
            main,
            0,
            None,
            None,
        ),
        (100, 101, 59, "begins with its step", None, main, 0, None, None),
        (100, 7000, 59, "ProfilerStep#3, op_id = 5", None, main, 0, None, None),
        (110, None, 59, "never closed", None, main, 0, None, None),
        (120, 130, 60, "a, seq of words", None, main, 0, None, 42),
        (125, None, 34, "checkpoint", None, main, 0, None, None),
        (40, 50, 59, "ncclCommInitRank", None, main, 1, init[0], None),
        (640, 700, 59, None, 9, main, 1, reduce, None),
        (710, 715, 59, None, 13, main, 1, send, None),
        (720, 725, 59, None, 9, main, 1, b"short", None),
        (41, 51, 59, "ncclCommInitRank", None, other, 1, init[1], None),
        (605, 635, 59, "aten::add, op_id = 990726", None, other, 0, None, None),
    ]
    _insert(
        db,
        "NVTX_EVENTS",
        "start end eventType text textId globalTid domainId binaryData uint64Value",
        rows,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
