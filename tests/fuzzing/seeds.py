"""Seed traces: for each format a small run, with every argument that its reader knows."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl

import etloom
from support import observer_files, perfetto_packets, rocm_recordings, small_traces
from support.ascend_traces import (
    write_cluster_communication,
    write_database,
    write_kernel_table,
    write_trace_view,
)
from support.chrome_timelines import write_mpi, write_ray_timeline, write_unitrace
from support.nccl_profiles import inspector_line, write_lines, write_profile
from support.paths import ROOT
from support.ras_reports import Communicator, Member, make_world, write_json, write_text
from support.xspaces import write_gpus

OWN = ROOT / "tests" / "data"
CARD = """version: 1
workload:
  model: {phase: training, precision: bf16, model_arch: {num_params: 8000, num_layers: 2}}
  data: {batch_size: 4, seq_len: 16}
  hardware: {xpu_spec: {type: gpu, model: h100, total_count: 2, count_per_node: 2}}
Model-executor:
  framework: {name: torch}
  model_plan_parallelization: {dp_replicate: 2, tp: 1, pp: 1}
  communication_library: {name: NCCL, version: 2.21.5}
metric_source: {traces: [json]}
"""
METRICS = """timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W]
2023/11/14 22:13:20.000, 0, NVIDIA H100 80GB HBM3, 45 %, 1234 MiB, 310.25 W
2023/11/14 22:13:20.003, 1, NVIDIA H100 80GB HBM3, 99 %, 2000 MiB, [N/A]
"""


@dataclass(frozen=True)
class Seed:
    """A run of one format.

    Attributes:
        write: Writes its files to a folder.
        files: The files of these that are mutated, or patterns of them.
        root: The run, if it is a folder among them.
    """

    write: Callable[[Path], None]
    files: tuple[str, ...]
    root: str = ""


def gpu_events(rank: int) -> list[dict[str, Any]]:
    """Return the events of two training steps on one GPU, with every category and argument of Kineto."""
    event = small_traces.complete_event
    host, late = (10, 11), (10, 12)
    events = [
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "ts": 0, "args": {"name": "main"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 7, "ts": 0, "args": {"sort_index": 7}},
        event("Trace", "PyTorch Profiler (0)", 0, 5000, "Spans", "PyTorch Profiler"),
        {
            "ph": "i",
            "s": "g",
            "name": "Iteration Start: PyTorch Profiler",
            "pid": "Traces",
            "tid": "Trace",
            "ts": 0,
        },
    ]
    correlation = 100
    for step in range(2):
        at, flow = 100 + 2000 * step, 50 + step
        ids = {
            "External id": 10 + step,
            "Record function id": 10 * (step + 1),
            "Sequence number": step,
            "Ev Idx": 3,
        }
        shapes = {"Input Dims": [[4, 8], [8, 8], []], "Input type": ["float", "float", "Scalar"],
                  "Input Strides": [[8, 1], [8, 1], []], "Concrete Inputs": ["", "", "1"]}  # fmt: skip
        geometry = {"grid": [2, 1, 1], "block": [64, 1, 1], "registers per thread": 32, "shared memory": 1024,
                    "blocks per SM": 0.5, "warps per SM": 4.0, "est. achieved occupancy %": 50, "context": 1, "queued": 0,
                    "graph id": 0, "graph node id": 0}  # fmt: skip
        comm = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Description": "default_pg",
                "Process Group Ranks": "[0, 1]", "Group size": 2, "Seq": step, "dtype": "Float", "In msg nelems": 1000,
                "Out msg nelems": 1000, "In split size": "[]", "Out split size": "[]", "Src Rank": 0, "Dst Rank": 1,
                "Is asynchronized op": 1, "Comms Id": 12345}  # fmt: skip
        gpu: dict[str, Any] = {"device": 0, "stream": 7}
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 1900, *host, **{"Record function id": 5 + step}),
            event("python_function", "train.py(3): step", at + 1, 1800, *host, **{"Python id": 1, "Python parent id": 0}),
            event("python_function", "nn.Module: Linear_0", at + 2, 900, *host,
                  **{"Python id": 2, "Python parent id": 1, "Python module id": 0}),
            event("cpu_op", "aten::linear", at + 10, 400, *host, **ids, **shapes),
            event("cpu_op", "aten::addmm", at + 20, 300, *host, **{**ids, **shapes, "Record function id": 10 * step + 11}),
            event("cuda_runtime", "cudaLaunchKernel", at + 30, 20, *host, correlation=correlation),
            event("kernel", "sm90_gemm_f32", at + 60, 500, 0, 7, **gpu, **geometry, correlation=correlation),
            event("gpu_user_annotation", f"ProfilerStep#{step}", at + 60, 1500, 0, 7, **gpu),
            event("cuda_runtime", "cudaMemcpyAsync", at + 100, 10, *host, correlation=correlation + 1),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 600, 50, 0, 7, **gpu, bytes=4096,
                  correlation=correlation + 1, **{"memory bandwidth (GB/s)": 12.5}),
            event("cpu_op", "c10d::allreduce_", at + 450, 60, *host, **{**ids, "Record function id": 10 * step + 13}),
            event("cpu_op", "record_param_comms", at + 455, 50, *host, **comm, **{"Record function id": 10 * step + 14}),
            event("cuda_runtime", "cudaLaunchKernelExC", at + 460, 10, *host, correlation=correlation + 2),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 700 + 30 * rank, 300, 0, 20, **comm,
                  device=0, stream=20, correlation=correlation + 2),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 600, 300, *late,
                  **{**ids, **shapes, "Fwd thread id": 1, "Record function id": 10 * step + 15}),
            event("cuda_runtime", "cudaMemsetAsync", at + 650, 10, *late, correlation=correlation + 3),
            event("gpu_memset", "Memset (Device)", at + 1100, 10, 0, 7, **gpu, bytes=512, correlation=correlation + 3),
            event("cuda_runtime", "cudaStreamSynchronize", at + 1200, 300, *host, correlation=correlation + 4),
            event("cuda_sync", "Stream Sync", at + 1201, 298, 0, 7, **gpu, cuda_sync_kind="Stream Sync", wait_on_stream=7,
                  wait_on_cuda_event_id=3, wait_on_cuda_event_record_corr_id=correlation, correlation=correlation + 4),
            event("cuda_profiler_range", "gemm", at + 60, 100, 0, 7, smsp__inst_executed=100.0),
            {"ph": "i", "name": "[memory]", "s": "t", "pid": 10, "tid": 11, "ts": at + 25, "cat": "cpu_instant_event", "args": {
                "Addr": 140000 + step, "Bytes": 512, "Total Allocated": 2048, "Total Reserved": 4096, "Device Type": 1,
                "Device Id": 0}},
            {"ph": "s", "id": flow, "pid": 10, "tid": 11, "ts": at + 30, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": flow, "pid": 0, "tid": 7, "ts": at + 60, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            {"ph": "C", "name": "GPU 0 utilization", "pid": 0, "ts": at, "args": {"a": 1, "b": 2.5}},
            {"ph": "B", "name": "range", "cat": "cpu_op", "pid": 10, "tid": 13, "ts": at},
            {"ph": "E", "name": "range", "cat": "cpu_op", "pid": 10, "tid": 13, "ts": at + 5},
        ]  # fmt: skip
        correlation += 10
    return events


def gpu_document(rank: int) -> dict[str, Any]:
    """Return the Kineto trace of one of two ranks."""
    groups = [
        {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": "cuda:nccl",
            "pg_size": 2,
            "ranks": [0, 1],
        }
    ]
    properties = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84_942_979_072, "computeMajor": 9,
                  "computeMinor": 0, "maxThreadsPerBlock": 1024, "regsPerBlock": 65536, "warpSize": 32,
                  "sharedMemPerBlock": 49152, "numSms": 132, "sharedMemPerMultiprocessor": 233472}  # fmt: skip
    distributed = {
        "backend": "nccl",
        "rank": rank,
        "world_size": 2,
        "pg_count": 1,
        "pg_config": groups,
        "nccl_version": "2",
    }
    header = {"schemaVersion": 1, "deviceProperties": [properties], "distributedInfo": distributed,
              "host_name": f"host{rank}", "displayTimeUnit": "ms", "with_stack": 1, "record_shapes": 1,
              "cuda_runtime_version": 12080, "baseTimeNanoseconds": small_traces.BASE_NS}  # fmt: skip
    return {**header, "traceEvents": gpu_events(rank), "traceName": f"kineto_trace_{rank}.json"}


def execution_trace(rank: int) -> dict[str, Any]:
    """Return the execution trace of the same rank."""
    tensor = [1, 2, 0, 32, 4, "cuda:0"]
    inputs = {"values": [tensor, [tensor, tensor], 1.5, "text", True, None],
              "shapes": [[4, 8], [[4, 8], [4, 8]], [], [], [], []], "strides": [[8, 1], [[8, 1], [8, 1]], [], [], [], []],
              "types": ["Tensor(float)", "GenericList[Tensor(float),Tensor(float)]", "Double", "String", "Bool", "None"]}  # fmt: skip
    outputs = {"values": [tensor], "shapes": [[4, 8]], "strides": [[8, 1]], "types": ["Tensor(float)"]}
    comm_inputs = {"values": [[tensor], 0, ["0", "default_pg"], rank, "allreduce", [], [], 0, 1, 2],
                   "shapes": [[[4, 8]], *[[] for _ in range(9)]], "strides": [[[8, 1]], *[[] for _ in range(9)]],
                   "types": ["GenericList[Tensor(float)]", "Int", "Tuple[String,String]", "Int", "String", "GenericList[]",
                             "GenericList[]", "Int", "Int", "Int"]}  # fmt: skip
    document = small_traces.execution_trace()
    process = next(node for node in document["nodes"] if node["id"] == 1)
    thread = {**process, "id": 2, "name": "[pytorch|profiler|execution_trace|thread]", "ctrl_deps": 1}
    nodes = [process, thread]

    def add(parent: int, name: str, rf_id: int, scope: int = 0, **more: Any) -> int:
        number = len(nodes) + 1
        attrs: dict[str, tuple[str, Any]] = {
            "rf_id": ("uint64", rf_id), "fw_parent": ("uint64", 0), "seq_id": ("int64", -1), "scope": ("uint64", scope),
            "tid": ("uint64", 1), "fw_tid": ("uint64", 0), "op_schema": ("string", f"{name}(Tensor a) -> Tensor"),
            "kernel_backend": ("string", ""), "kernel_file": ("string", ""), **more.pop("attrs", {}),
        }  # fmt: skip
        listed = [{"name": key, "type": kind, "value": value} for key, (kind, value) in attrs.items()]
        node = {
            "id": number,
            "name": name,
            "ctrl_deps": parent,
            "inputs": inputs,
            "outputs": outputs,
            "attrs": listed,
        }
        nodes.append({**node, **more})
        return number

    comm = {"collective_name": ("string", "allreduce"), "dtype": ("string", "Float"), "in_msg_nelems": ("uint64", 1000),
            "out_msg_nelems": ("uint64", 1000), "in_split_size": ("string", "[]"), "out_split_size": ("string", "[]"),
            "pg_name": ("string", "0"), "pg_desc": ("string", "default_pg"), "pg_size": ("uint64", 2)}  # fmt: skip
    config = json.dumps(
        [
            {
                "pg_name": "0",
                "pg_desc": "default_pg",
                "backend_config": "cuda:nccl",
                "ranks": [],
                "group_size": 2,
            }
        ]
    )
    add(
        2,
        "## process_group:init ##",
        1,
        7,
        inputs={"values": [config], "shapes": [[]], "types": ["String"], "strides": [[]]},
    )
    for step in range(2):
        mark = add(2, f"ProfilerStep#{step}", 5 + step, 7)
        linear = add(mark, "aten::linear", 10 * (step + 1))
        add(linear, "aten::addmm", 10 * step + 11)
        reduce = add(mark, "c10d::allreduce_", 10 * step + 13)
        add(reduce, "record_param_comms", 10 * step + 14, inputs=comm_inputs, attrs=comm)
        add(2, "autograd::engine::evaluate_function: AddmmBackward0", 10 * step + 15, 1)
    return {**document, "nodes": nodes}


def _write_gpu_run(folder: Path) -> None:
    for rank in range(2):
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(gpu_document(rank)))
        (folder / f"torch_et_{rank}.json").write_text(json.dumps(execution_trace(rank)))


def _write_cpu_run(folder: Path) -> None:
    shutil.copytree(OWN / "ddp_2", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))


def _write_exported(format: str, name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        source = folder / "source"
        source.mkdir()
        _write_gpu_run(source)
        job = etloom.open(source, use_cache=False)
        if format == "etplus":
            for rank in job.ranks:
                etloom.export(job[rank], folder / name.format(rank=rank), format)
        else:
            etloom.export(job, folder / name, format)
        shutil.rmtree(source)

    return write


def _write_nsys(folder: Path) -> None:
    _load_maker("nsys").build(folder / "run.sqlite")


def _make_recordings() -> list[rocm_recordings.Recording]:
    return [rocm_recordings.make_recording(4, rank, pid=100 + rank, rank=rank) for rank in range(2)]


def _write_rocpd(folder: Path) -> None:
    rocm_recordings.write_rocpd(folder / "run_results.db", *_make_recordings())


def _write_rocpd_early(folder: Path) -> None:
    rocm_recordings.write_rocpd(folder / "run_results.db", *_make_recordings(), early=True)


def _write_rpd(folder: Path) -> None:
    rocm_recordings.write_rpd(folder / "run.rpd", *_make_recordings(), version=3)


def _write_rocprof_json(folder: Path) -> None:
    rocm_recordings.write_json(folder / "run_results.json", *_make_recordings())


def _write_rocprof_csv(folder: Path) -> None:
    rocm_recordings.write_csv(folder, *_make_recordings())


def _write_flight_recorder(folder: Path) -> None:
    dump = _load_maker("flight_recorder").dump()
    for rank in range(2):
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
        (folder / f"dump_rank_{rank + 2}.pickle").write_bytes(pickle.dumps(dump, protocol=2))


def _write_watched_job(folder: Path) -> None:
    """The state that `etloom collect --watch` keeps of two ranks, of which one stopped."""
    (folder / ".watch").mkdir()
    for rank in range(2):
        calls = 4 - rank
        entries = [
            {"collective_seq_id": number, "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce",
             "input_dtypes": ["Float"], "input_sizes": [[10]], "output_sizes": [[10]], "state": "scheduled",
             "retired": number < 4, "is_p2p": False, "time_created_ns": small_traces.BASE_NS + number * 10**8}
            for number in range(1, calls + 1)
        ]  # fmt: skip
        process = {"pid": 1, "host": f"host{rank}", "written_ns": small_traces.BASE_NS + 5 * 10**8, "interval_s": 0.5,
                   "world_size": 2, "steps": calls, "finished": False, "frames": ["train.py:7 step", "train.py:3 main"],
                   "step_ends_ns": [small_traces.BASE_NS + number * 10**8 for number in range(calls)],
                   "addresses": ["10.0.0.1:29500"], "unacknowledged": ["10.0.0.1:29500"], "error": None}  # fmt: skip
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        dump = {"entries": entries, "pg_config": config, "pg_status": {}, "process": process}
        (folder / ".watch" / f"fr_trace_{rank}.json").write_text(json.dumps(dump))


def _write_stored(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as source:
        _write_gpu_run(Path(source))
        etloom.store_add(source, to=folder, name="job", jobs=1)


def _write_ascend(folder: Path) -> None:
    write_trace_view(folder)


def _write_ascend_database(folder: Path) -> None:
    write_database(folder / "ascend_pytorch_profiler_0.db")


def _write_ascend_communication(folder: Path) -> None:
    write_cluster_communication(folder / "cluster_communication.json")


def _write_ascend_kernels(folder: Path) -> None:
    write_kernel_table(folder / "kernel_details.csv")


def _write_mpi(folder: Path) -> None:
    write_mpi(folder / "mpi.json")


def _write_unitrace(folder: Path) -> None:
    write_unitrace(folder / "app.1.json", 0)


def _write_ray(folder: Path) -> None:
    write_ray_timeline(folder / "timeline.json")


def _write_nsys_tables(folder: Path) -> None:
    """The export of Nsight Systems as a folder of Parquet files."""
    source, tables = folder / "run.sqlite", folder / "run_pqtdir"
    _load_maker("nsys").build(source)
    tables.mkdir()
    with closing(sqlite3.connect(source)) as connection:
        for (name,) in connection.execute("select name from sqlite_master where type = 'table'").fetchall():
            rows = connection.execute(f'select * from "{name}"')
            columns = [column[0] for column in rows.description]
            frame = pl.DataFrame(rows.fetchall(), schema=columns, orient="row", infer_schema_length=None)
            frame.write_parquet(tables / f"{name}.parquet")
    source.unlink()


def _write_memory_snapshot(folder: Path) -> None:
    frames = [{"name": "forward", "filename": "/home/me/model.py", "line": 12}]

    def entry(action: str, us: int, size: int, addr: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": addr,
            "size": size,
            "stream": 0,
            "time_us": 1_795_235_217_000_000 + us,
            "frames": frames,
        }

    history = [
        entry("segment_alloc", 5, 2 << 20, 0x2000), entry("alloc", 10, 1000, 0x1000), entry("alloc", 30, 300, 0x2000),
        entry("free_requested", 40, 1000, 0x1000), entry("free_completed", 45, 1000, 0x1000), entry("oom", 50, 1 << 40, 0),
        entry("snapshot", 70, 0, 0),
    ]  # fmt: skip
    block = {
        "size": 512,
        "requested_size": 300,
        "address": 0x2000,
        "state": "active_allocated",
        "frames": frames,
    }
    segment = {
        "device": 0,
        "address": 0x500,
        "total_size": 20 << 20,
        "stream": 0,
        "segment_type": "large",
        "blocks": [block],
    }
    snapshot = {
        "segments": [segment],
        "device_traces": [history],
        "allocator_settings": {"expandable_segments": False},
    }
    (folder / "rank0_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    (folder / "rank1_snapshot.json").write_text(json.dumps(snapshot))


def _write_observer(folder: Path) -> None:
    for rank in range(2):
        chunks = (
            observer_files.chunk(2, 0, observer_files.DICTIONARY, closed=False),
            observer_files.chunk(1, 1, observer_files.EVENTS, closed=False),
        )
        (folder / f"observer_{rank}.etob").write_bytes(observer_files.whole(*chunks))


def _write_param(folder: Path) -> None:
    for rank in range(2):
        calls = [
            {"comms": "init", "pg_id": 0, "global_ranks": [0, 1], "world_size": 2},
            {"comms": "all_reduce", "req": 1, "in_msg_size": 100, "out_msg_size": 100, "dtype": "float", "pg_id": 0,
             "world_size": 2, "startTime_ns": 100},
            {"comms": "all_to_allv", "req": 2, "in_msg_size": 100, "out_msg_size": 100, "dtype": "float", "pg_id": 0,
             "in_split": [50, 50], "out_split": [50, 50], "world_size": 2, "startTime_ns": 200},
            {"comms": "send", "req": 3, "in_msg_size": 8, "dtype": "int", "src_rank": 0, "dst_rank": 1, "startTime_ns": 300},
            {"comms": "broadcast", "req": 4, "in_msg_size": 8, "dtype": "half", "root": 0, "startTime_ns": 400},
            {"comms": "wait", "req": 1, "startTime_ns": 500},
            {"compute": "gemm", "mm_dim": 8, "count": 2},
        ]  # fmt: skip
        (folder / f"comms_rank{rank}.json").write_text(json.dumps(calls))


def _write_neighbours(folder: Path) -> None:
    """A run with the files that lie next to traces."""
    _write_cpu_run(folder)
    (folder / "card.yaml").write_text(CARD)
    (folder / "metrics_0.csv").write_text(METRICS)
    lines = ({"timestamp": 1_700_000_000 + second, "gpu_util": 40.5, "power": 300} for second in range(3))
    (folder / "samples_1.json").write_text("\n".join(map(json.dumps, lines)))


def _load_maker(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"make_{name}", OWN / name / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_nccl_profiles(folder: Path) -> None:
    for rank in range(2):
        write_profile(folder, rank)


def _write_nccl_inspector(folder: Path) -> None:
    write_lines(folder, [inspector_line(0, i, verbose=True) for i in range(3)], "host-pid1.log")


def _write_xplane(folder: Path) -> None:
    write_gpus(folder)


def _write_perfetto_recording(folder: Path) -> None:
    recording = perfetto_packets.Trace()
    perfetto_packets.write_sequence(recording, 1)
    recording.packet.add(compressed_packets=zlib.compress(recording.SerializeToString()))
    (folder / "sdk.pftrace").write_bytes(recording.SerializeToString())


def _write_pipeline_operations(folder: Path) -> None:
    types = ("forward-compute", "forward-send", "forward-recv", "backward-compute", "grads-reduce-scatter")
    rows = [
        {"rank": rank, "dp_rank": 0, "stage": rank, "step": step, "optype": name, "start_ts": 0.01 * place}
        | {"duration": 0.005, "seq_id": 0, "mb_id": 0}
        for rank in range(2)
        for step in range(2)
        for place, name in enumerate(types)
    ]
    pl.DataFrame(rows).write_parquet(folder / "operations.parquet")


def _write_nccl_ras(folder: Path) -> None:
    world = make_world(8)
    world.members[1].counts["AllReduce"] = 60
    for rank, status in ((2, "dead"), (3, "unresponsive"), (4, "FINALIZE")):
        world.members[rank].status = status
    world.members[5].async_error = 2
    pair = Communicator(0xABC, [Member(0, {"AllGather": 5}), Member(1, {"AllGather": 4})])
    (folder / "ras.json").write_text(write_json([world, pair]))
    (folder / "ras.txt").write_text(write_text([world, pair], verbose=True))
    (folder / "ras_old.txt").write_text(write_text([world, pair], old=True))


SEEDS: dict[str, Seed] = {
    "kineto": Seed(_write_gpu_run, ("kineto_trace_0.json", "kineto_trace_0.json", "kineto_trace_1.json")),
    "kineto-cpu": Seed(_write_cpu_run, ("kineto_trace_0.json.gz",)),
    "execution-trace": Seed(_write_gpu_run, ("torch_et_0.json",)),
    "execution-trace-cpu": Seed(_write_cpu_run, ("torch_et_0.json.gz", "torch_et_1.json.gz")),
    "etplus": Seed(_write_exported("etplus", "etplus_rank{rank}.json"), ("etplus_rank0.json",)),
    "chakra": Seed(_write_exported("chakra", "job.et"), ("job.0.et",)),
    "nsys": Seed(_write_nsys, ("run.sqlite",)),
    "rocprof": Seed(_write_rocpd, ("run_results.db",)),
    "rocprof-early": Seed(_write_rocpd_early, ("run_results.db",)),
    "rocprof-json": Seed(_write_rocprof_json, ("run_results.json",)),
    "rocprof-csv": Seed(_write_rocprof_csv, ("100_*.csv",)),
    "rocprof-rpd": Seed(_write_rpd, ("run.rpd",)),
    "flight-recorder": Seed(_write_flight_recorder, ("nccl_trace_rank_0.json", "dump_rank_2.pickle")),
    "watched-job": Seed(_write_watched_job, (".watch/fr_trace_0.json", ".watch/fr_trace_1.json")),
    "stored-run": Seed(_write_stored, ("run=job/**/*.json", "run=job/**/*.parquet"), root="run=job"),
    "nsys-tables": Seed(_write_nsys_tables, ("run_pqtdir/*.parquet",)),
    "ascend": Seed(_write_ascend, ("trace_view.json",)),
    "ascend-database": Seed(_write_ascend_database, ("ascend_pytorch_profiler_0.db",)),
    "ascend-communication": Seed(_write_ascend_communication, ("cluster_communication.json",)),
    "ascend-kernels": Seed(_write_ascend_kernels, ("kernel_details.csv",)),
    "mpi-trace": Seed(_write_mpi, ("mpi.json",)),
    "unitrace": Seed(_write_unitrace, ("app.1.json",)),
    "ray": Seed(_write_ray, ("timeline.json",)),
    "memory-snapshot": Seed(_write_memory_snapshot, ("rank0_snapshot.pickle", "rank1_snapshot.json")),
    "observer": Seed(_write_observer, ("observer_0.etob",)),
    "nccl-profiler": Seed(_write_nccl_profiles, ("nccl-12276093370021447385-0.json",)),
    "nccl-inspector": Seed(_write_nccl_inspector, ("host-pid1.log",)),
    "nccl-ras": Seed(_write_nccl_ras, ("ras.json", "ras.json", "ras.txt", "ras_old.txt")),
    "xplane": Seed(_write_xplane, ("host.xplane.pb",)),
    "perfetto": Seed(_write_exported("perfetto", "ranks.pftrace"), ("ranks.pftrace",)),
    "perfetto-sdk": Seed(_write_perfetto_recording, ("sdk.pftrace",)),
    "pipeline-operations": Seed(_write_pipeline_operations, ("operations.parquet",)),
    "param-basic": Seed(_write_param, ("comms_rank0.json",)),
    "parquet": Seed(
        _write_exported("parquet", "saved"),
        tuple(f"saved/{name}" for name in (
            "meta.json", "rank=0/meta.json",
            *(f"rank=0/{table}.parquet" for table in ("events", "nodes", "comms", "launches", "tensors", "links", "arguments")),
        )),
    ),
    "metrics": Seed(_write_neighbours, ("metrics_0.csv", "samples_1.json")),
    "card": Seed(_write_neighbours, ("card.yaml", "run.json", "rank_0.json", "steps.json")),
}  # fmt: skip
"""Name of the format -> its seed. Every reader of etloom has one."""
