"""Small recordings of AMD's profilers with random times: the same events as rocpd, .rpd, JSON and CSV of rocprofv3."""

from __future__ import annotations

import csv
import json
import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 683_000_000_000_000
UUID = "00000f1a_5b3c_7d2e_8f10_2a3b4c5d6e7f"
KERNELS = ("void gemm<float>(float*, int)", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)")
DIRECTIONS = ("MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_HOST")
DOMAINS = ("HIP_RUNTIME_API", "HSA_CORE_API", "MARKER_CORE_RANGE_API")
OPERATIONS = {
    "HIP_RUNTIME_API": ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize"],
    "HSA_CORE_API": ["hsa_signal_wait_scacquire"],
    "MARKER_CORE_RANGE_API": ["roctxMarkA", "roctxThreadRangeA"],
    "KERNEL_DISPATCH": ["KERNEL_DISPATCH_COMPLETE"],
    "MEMORY_COPY": list(DIRECTIONS),
}
KINDS = list(OPERATIONS)
MODEL = "AMD Instinct MI300X"
CPU, GPUS = 0, (1, 2)
"""Ids of agents: one CPU and two GPUs."""


@dataclass
class Recording:
    """The events of one process; ``id`` is the correlation."""

    pid: int = 4100
    environment: dict[str, str] = field(default_factory=lambda: {"RANK": "3", "HOME": "/root"})
    calls: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)


def make_recording(count: int = 6, seed: int = 1, pid: int = 4100, rank: int | None = 3) -> Recording:
    """Make a recording of ``count`` kernels and as many copies, with their calls, ranges, marks and HSA calls."""
    rng = random.Random(seed)
    recording = Recording(pid, {"HOME": "/root"} | ({} if rank is None else {"RANK": str(rank)}))
    at, number = START, 0

    def call(domain: str, name: str, duration: int, text: str = "") -> int:
        nonlocal at, number
        at, number = at + rng.randrange(50, 500), number + 1
        row = {"domain": domain, "name": name, "start": at, "end": at + duration, "tid": pid}
        recording.calls.append(row | {"id": number, "text": text})
        at += 0 if text else duration
        return number

    for index in range(count):
        device = index % 2
        call(DOMAINS[2], "roctxThreadRangeA", 320_000, f"step {index}")
        call(DOMAINS[2], "roctxMarkA", 0, f"mark {index}")
        call(DOMAINS[1], "hsa_signal_wait_scacquire", 700)
        launch = call(DOMAINS[0], "hipLaunchKernel", 4000)
        begin = at + rng.randrange(5000, 9000)
        shape = {"grid": [1000, 3, 1], "block": [256, 1, 1], "shared": 1024}
        times = {"start": begin, "end": begin + rng.randrange(10_000, 90_000), "agent": GPUS[device]}
        recording.kernels.append(
            {"id": launch, "kernel": index % 2, "queue": 1 + device, "stream": device + 1} | times | shape
        )
        copy = call(DOMAINS[0], "hipMemcpyAsync", 3000)
        begin = at + rng.randrange(100_000, 200_000)
        agents = [CPU, GPUS[device]][:: 1 if index % 2 == 0 else -1]
        times = {"start": begin, "end": begin + rng.randrange(5_000, 50_000)}
        recording.copies.append(
            {"id": copy, "name": DIRECTIONS[index % 2], "agents": agents, "bytes": 4096, "stream": 0} | times
        )
        call(DOMAINS[0], "hipDeviceSynchronize", 300_000)
    return recording


def _insert(db: sqlite3.Connection, table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    names = columns.split()
    listed = ", ".join(f'"{name}"' for name in names)
    db.execute(f'CREATE TABLE IF NOT EXISTS "{table}" ({listed})')
    db.executemany(f'INSERT INTO "{table}" VALUES ({",".join("?" * len(names))})', rows)


class _Texts:
    """A table of strings: text -> id."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"": 1}

    def __getitem__(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids) + 1)


def write_rocpd(path: Path, *recordings: Recording, early: bool = False) -> Path:
    """Write a database of rocprofv3, merged from several recordings; ``early``: times and tracks are tables."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db, db:
        for index, recording in enumerate(recordings or (make_recording(),)):
            _write_rocpd(db, recording, f"_{UUID[:-1]}{index}", early)
    return path


def _write_rocpd(db: sqlite3.Connection, recording: Recording, ending: str, early: bool) -> None:
    texts, events, stamps, tracks = _Texts(), [], _Texts(), _Texts()

    def event(domain: str, stack: int, text: str = "") -> int:
        data = json.dumps({"message": text}) if text else "{}"
        events.append((len(events) + 1, texts[domain], stack, 0, data))
        return len(events)

    def timed(
        row: dict[str, Any], tid: int, agent: int | None, queue: int | None, stream: int | None
    ) -> tuple[Any, ...]:
        if early:
            key = json.dumps([recording.pid, tid, agent, queue, stream])
            return (tracks[key], stamps[str(row["start"])], stamps[str(row["end"])])
        return (recording.pid, tid, agent, queue, stream, row["start"], row["end"])

    place = "track_id start_id end_id" if early else "pid tid agent_id queue_id stream_id start end"
    shape = "workgroup_size_x workgroup_size_y workgroup_size_z grid_size_x grid_size_y grid_size_z"
    _insert(db, f"rocpd_metadata{ending}", "id tag value", [(1, "schema_version", "3")])
    _insert(db, f"rocpd_info_process{ending}", "id nid pid command environment",
            [(recording.pid, 1, recording.pid, "python train.py", json.dumps(recording.environment))])  # fmt: skip
    _insert(
        db,
        f"rocpd_info_thread{ending}",
        "id pid tid",
        [(recording.pid + i, recording.pid, recording.pid + i) for i in (0, 1)],
    )
    facts = json.dumps({"cu_count": 304, "wave_front_size": 64})
    _insert(db, f"rocpd_info_agent{ending}", "id type absolute_index type_index name product_name extdata",
            [(CPU, "CPU", 0, 0, "EPYC", "AMD EPYC", "{}"),
             *((gpu, "GPU", gpu, gpu - 1, "gfx942", MODEL, facts) for gpu in GPUS)])  # fmt: skip
    _insert(db, f"rocpd_info_kernel_symbol{ending}", "id kernel_name display_name",
            [(number, f"{name}.kd", name) for number, name in enumerate(KERNELS)])  # fmt: skip
    _insert(db, f"rocpd_kernel_dispatch{ending}",
            f"id kernel_id dispatch_id group_segment_size {shape} event_id {place}", (
        (row["id"], row["kernel"], row["id"], row["shared"], *row["block"], *row["grid"],
         event("KERNEL_DISPATCH", row["id"]), *timed(row, recording.pid, row["agent"], row["queue"], row["stream"]))
        for row in recording.kernels
    ))  # fmt: skip
    _insert(db, f"rocpd_memory_copy{ending}", f"id name_id src_agent_id dst_agent_id size event_id {place}", (
        (row["id"], texts[row["name"]], *row["agents"], row["bytes"], event("MEMORY_COPY", row["id"]),
         *timed(row, recording.pid, None, None, row["stream"])) for row in recording.copies
    ))  # fmt: skip
    ranges = [row for row in recording.calls if row["end"] > row["start"]]
    _insert(db, f"rocpd_region{ending}", f"id name_id event_id {place}", (
        (row["id"], texts[row["name"]], event(row["domain"], row["id"], row["text"]),
         *timed(row, row["tid"], None, None, None))
        for row in ranges
    ))  # fmt: skip
    marks = [row for row in recording.calls if row["end"] == row["start"]]
    track = [tracks[json.dumps([recording.pid, row["tid"], None, None, None])] for row in marks]
    time = "timestamp_id" if early else "timestamp"
    _insert(db, f"rocpd_sample{ending}", f"id track_id event_id {time}", (
        (row["id"], number, event(row["domain"], row["id"], row["text"]),
         stamps[str(row["start"])] if early else row["start"])
        for number, row in zip(track, marks, strict=True)
    ))  # fmt: skip
    if early:
        _insert(
            db,
            f"rocpd_timestamp{ending}",
            "id value",
            [(i, int(text)) for text, i in stamps.ids.items() if text],
        )
    _insert(db, f"rocpd_track{ending}", "id pid tid agent_id queue_id stream_id",
            [(i, *json.loads(text)) for text, i in tracks.ids.items() if text])  # fmt: skip
    _insert(db, f"rocpd_event{ending}", "id category_id stack_id correlation_id extdata", events)
    _insert(db, f"rocpd_pmc_event{ending}", "id event_id pmc_id value", [(1, 1, 1, 2.5)])
    _insert(db, f"rocpd_string{ending}", "id string", [(number, text) for text, number in texts.ids.items()])


def write_rpd(path: Path, *recordings: Recording, version: int = 2) -> Path:
    """Write a database of rocmProfileData, of one process or several."""
    path.unlink(missing_ok=True)
    texts = _Texts()
    ids = {(index, row["id"]): 0 for index, recording in enumerate(recordings) for row in recording.calls}
    ids = {key: number for number, key in enumerate(ids, 1)}
    calls, operations, links, sizes = [], [], [], []
    for index, recording in enumerate(recordings):
        for row in recording.calls:
            is_marker = row["domain"].startswith("MARKER")
            name, text = ("UserMarker", row["text"]) if is_marker else (row["name"], "stream=0x0")
            domain = (texts["roctx" if is_marker else "hip"],) if version == 3 else ()
            place = (recording.pid, row["tid"], row["start"], row["end"], texts[name], texts[text])
            calls.append((ids[index, row["id"]], *place, *domain))
        for row in [*recording.kernels, *recording.copies]:
            is_kernel = "kernel" in row
            gpu = row["agent"] if is_kernel else next(agent for agent in row["agents"] if agent in GPUS)
            description = KERNELS[row["kernel"]] if is_kernel else ""
            kind = "KernelExecution" if is_kernel else row["name"]
            queue = row["queue"] if is_kernel else 0
            operations.append(
                (
                    len(operations) + 1,
                    gpu - 1,
                    queue,
                    row["start"],
                    row["end"],
                    texts[description],
                    texts[kind],
                )
            )
            links.append((len(links) + 1, ids[index, row["id"]], len(operations)))
            sizes += [] if is_kernel else [(ids[index, row["id"]], "0x0", row["bytes"])]
    operations.append((len(operations) + 1, 0, 1, START, START + 5, texts[""], texts["BarrierPacket"]))
    with closing(sqlite3.connect(path)) as db, db:
        _insert(db, "rocpd_metadata", "id tag value", [(1, "schema_version", str(version))])
        _insert(db, "rocpd_string", "id string", [(number, text) for text, number in texts.ids.items()])
        if version == 3:
            _insert(db, "rocpd_ustring", "id string", [(number, text) for text, number in texts.ids.items()])
        _insert(db, "rocpd_op", "id gpuId queueId start end description_id opType_id", operations)
        more = " domain_id" if version == 3 else ""
        _insert(db, "rocpd_api", "id pid tid start end apiName_id args_id" + more, calls)
        _insert(db, "rocpd_api_ops", "id api_id op_id", links)
        _insert(db, "rocpd_copyapi", "api_ptr_id stream size", sizes)
    return path


def _number_names(row: dict[str, Any], domain: str, name: str) -> dict[str, Any]:
    times = {"start_timestamp": row["start"], "end_timestamp": row["end"]}
    correlation = {"internal": row["id"], "external": 0}
    return {
        "kind": KINDS.index(domain),
        "operation": OPERATIONS[domain].index(name),
        "correlation_id": correlation,
    } | times


def write_json(path: Path, *recordings: Recording) -> Path:
    """Write the JSON of rocprofv3."""
    path.write_text(
        json.dumps({"rocprofiler-sdk-tool": [_build_object(recording) for recording in recordings]})
    )
    return path


def _build_object(recording: Recording) -> dict[str, Any]:
    gpus = [
        {"id": {"handle": 70 + gpu}, "type": 2, "node_id": gpu, "logical_node_type_id": gpu - 1, "name": "gfx942",
         "product_name": MODEL, "cu_count": 304, "wave_front_size": 64}
        for gpu in GPUS
    ]  # fmt: skip
    handles = {CPU: {"handle": 70}, **{gpu: {"handle": 70 + gpu} for gpu in GPUS}}
    kernels = [
        _number_names(row, "KERNEL_DISPATCH", "KERNEL_DISPATCH_COMPLETE")
        | {"thread_id": recording.pid, "stream_id": {"handle": row["stream"]}}
        | {"dispatch_info": {"agent_id": handles[row["agent"]], "queue_id": {"handle": row["queue"]},
                             "kernel_id": row["kernel"], "group_segment_size": row["shared"],
                             "workgroup_size": dict(zip("xyz", row["block"], strict=True)),
                             "grid_size": dict(zip("xyz", row["grid"], strict=True))}}
        for row in recording.kernels
    ]  # fmt: skip
    copies = [
        _number_names(row, "MEMORY_COPY", row["name"])
        | {"thread_id": recording.pid, "stream_id": {"handle": row["stream"]}, "bytes": row["bytes"]}
        | {"src_agent_id": handles[row["agents"][0]], "dst_agent_id": handles[row["agents"][1]]}
        for row in recording.copies
    ]
    records: dict[str, list[dict[str, Any]]] = {"kernel_dispatch": kernels, "memory_copy": copies}
    for name, domain in zip(("hip_api", "hsa_api", "marker_api"), DOMAINS, strict=True):
        rows = [row for row in recording.calls if row["domain"] == domain]
        records[name] = [_number_names(row, domain, row["name"]) | {"thread_id": row["tid"]} for row in rows]
    return {
        "metadata": {"pid": recording.pid, "init_time": START, "fini_time": START, "command": ["train.py"]},
        "agents": [{"id": handles[CPU], "type": 1, "node_id": 0, "logical_node_type_id": 0}, *gpus],
        "strings": {
            "buffer_records": [{"kind": kind, "operations": names} for kind, names in OPERATIONS.items()],
            "marker_api": [
                {"key": row["id"], "value": row["text"]} for row in recording.calls if row["text"]
            ],
        },
        "kernel_symbols": [
            {"kernel_id": number, "kernel_name": f"{name}.kd", "formatted_kernel_name": name}
            for number, name in enumerate(KERNELS)
        ],
        "buffer_records": records | {"scratch_memory": [{}]},
    }


def write_csv(folder: Path, *recordings: Recording, agents: bool = True) -> Path:
    """Write the CSV files of rocprofv3; without ``agents``, other tables name GPUs by their number."""
    folder.mkdir(exist_ok=True)
    calls = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
    shape = ",".join(f"{name}_Size_{axis}" for name in ("Workgroup", "Grid") for axis in "XYZ")
    times = "Correlation_Id,Start_Timestamp,End_Timestamp"
    kernels = f"Kind,Agent_Id,Queue_Id,Stream_Id,Kernel_Name,{times},LDS_Block_Size,"
    copies = f"Kind,Direction,Stream_Id,Source_Agent_Id,Destination_Agent_Id,{times}"
    names = {
        agent: f"Agent {agent}" if agents else f"GPU {agent - 1}" if agent else "CPU 0"
        for agent in (CPU, *GPUS)
    }

    def write(recording: Recording, name: str, header: str, rows: Iterable[Iterable[Any]]) -> None:
        with (folder / f"{recording.pid}_{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerows([header.split(","), *rows])

    for recording in recordings:
        if agents:
            facts = [[CPU, CPU, "CPU", 0, 0, "EPYC"], *([gpu, gpu, "GPU", 304, 64, MODEL] for gpu in GPUS)]
            header = "Node_Id,Logical_Node_Id,Agent_Type,Cu_Count,Wave_Front_Size,Product_Name"
            write(recording, "agent_info", header, facts)
        for kind, domain in zip(("hip", "hsa", "marker"), DOMAINS, strict=True):
            rows = (
                [
                    domain,
                    row["text"] or row["name"],
                    recording.pid,
                    row["tid"],
                    row["id"],
                    row["start"],
                    row["end"],
                ]
                for row in recording.calls
                if row["domain"] == domain
            )
            write(recording, f"{kind}_api_trace", calls, rows)
        write(recording, "kernel_trace", kernels + shape, (
            ["KERNEL_DISPATCH", names[row["agent"]], row["queue"], row["stream"], KERNELS[row["kernel"]], row["id"],
             row["start"], row["end"], row["shared"], *row["block"], *row["grid"]] for row in recording.kernels
        ))  # fmt: skip
        write(recording, "memory_copy_trace", copies, (
            ["MEMORY_COPY", row["name"], row["stream"], *(names[agent] for agent in row["agents"]), row["id"],
             row["start"], row["end"]] for row in recording.copies
        ))  # fmt: skip
    return folder
