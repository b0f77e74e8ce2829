"""Perfetto traces: they read back to the same events, links and ranks, and have tracks for what was computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import _native
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from support import perfetto_packets as packets
from support import random_traces, small_traces
from support.examples import examples
from support.real_runs import open_run

TABLES = ("events", "arguments", "kernels", "syncs", "frames", "memory", "counters", "comms", "flows")
NOT_KEPT = {"position", "node"}
"""The index in the file, and the link to an execution trace, which is a file of its own."""
REAL = [
    "cpu/coll_4/kineto_trace_1.json.gz", "critical_path/alexnet.json.gz", "nccl_ddp/kineto_trace_0.json.gz",
    "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz", "tracelens/b200_eager.json.gz",
    "tracelens/mi300_vllm_graph_execution.json.gz", "tracelens/mi210_gpu_only.json.gz",
]  # fmt: skip


def content(trace: Trace, name: str) -> pl.DataFrame:
    """Return a table with the names of processes and threads that the file identifies by text."""
    ids = trace.threads.select(pl.coalesce("tid", "pid"), "name").rows()
    texts = {str(id): name for id, name in ids if id < -(1 << 31)}
    table = trace.table(name).cast({pl.Categorical: pl.String}).drop(NOT_KEPT, strict=False)
    if name == "flows":
        table = table.filter(pl.col("cat").fill_null("") != "ac2g").drop("id").sort(pl.all(), nulls_last=True)
    if name == "kernels":  # a row whose only value was out of range is not written
        table = table.filter(pl.any_horizontal(pl.exclude("event").is_not_null()))
    if "args" in table.columns:  # of equal texts, some are written with escapes and some without
        args = [text if text is None else json.dumps(json.loads(text)) for text in table["args"]]
        table = table.with_columns(args=pl.Series(args, dtype=pl.String))
    columns = [column for column in ("pid", "tid") if column in table.columns]
    return table.with_columns(pl.col(column).cast(pl.String).replace(texts) for column in columns)


def read_back(trace: Trace | Job, folder: Path, **options: Any) -> Trace | Job:
    etloom.export(trace, folder / "out.pftrace", **options)
    return etloom.read(folder / "out.pftrace")


def assert_same(trace: Trace, back: Trace) -> None:
    for name in TABLES:
        expected, found = content(trace, name), content(back, name)
        assert expected.equals(found), (name, expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("file", REAL)
def test_a_real_trace_reads_back_the_same(data: Path, file: str, tmp_path: Path) -> None:
    read = etloom.read(data / file)
    assert isinstance(read, Trace)
    trace = etloom.link(read)
    back = read_back(trace, tmp_path)
    assert isinstance(back, Trace)
    relinked = etloom.link(back)
    assert_same(trace, relinked)
    for key in ("clock", "rank", "world_size", "device_properties", "distributed"):
        assert back.meta.get(key) == trace.meta.get(key), key
    assert relinked.launches.equals(trace.launches)
    question = "kernel-breakdown" if "gpu_only" in file else "top-ops"
    assert etloom.analyze(relinked, question).equals(etloom.analyze(trace, question))
    assert set(back.stats["severity"]) <= set(read.stats["severity"])


# Of larger numbers, the same one may be written with or without an exponent.
VALUES = random_traces.JSON.filter(
    lambda value: (
        not isinstance(value, int | float) or abs(value) < (1e15 if isinstance(value, float) else 2**63)
    )
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "ph": st.sampled_from(["X", "X", "X", "i", "I", "b", "e"]),
            "name": random_traces.TEXT,
            "cat": st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "x,y", "ä"]),
            "ts": st.integers(1, 10**7).map(lambda ns: ns / 1000),
            "dur": st.integers(0, 10**5).map(lambda ns: ns / 1000),
            "pid": st.sampled_from([0, 5, "Spans"]),
            "tid": st.sampled_from([-1, 7, 2**40, "lane", ""]),
            "id": st.integers(-(2**60), 2**60),
            "args": st.dictionaries(
                st.sampled_from(["stream", "device", "correlation", "a", 'k"', "ß", "bytes"]),
                VALUES,
                max_size=4,
            ),
        }
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(EVENTS, st.sampled_from([0, small_traces.BASE_NS]))
def test_any_events_read_back(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], base: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for event in events:
        event |= {} if event["ph"] in "be" else {"id": None}
        # A kernel without a stream gets the number of its track, which depends on the order of texts.
        # So does one of an invalid stream, which reading reports as lost.
        if event["cat"] == "kernel":
            event["tid"] = 7
            stream = event["args"].get("stream")
            event["args"] |= {"stream": abs(stream)} if type(stream) is int else {}
        if event["ph"] != "X":
            del event["dur"]
    lines = [{key: value for key, value in event.items() if value is not None} for event in events]
    lines += [
        {"ph": "C", "name": "loss", "pid": 5, "ts": 1, "args": {"value": 0.1, "a b": 3}},
        {"ph": "s", "cat": "fwdbwd", "name": "f", "id": 4, "pid": 5, "tid": 7, "ts": 2, "args": {"w": 1}},
        {"ph": "f", "cat": "fwdbwd", "name": "f", "id": 4, "pid": 0, "tid": "lane", "ts": 3.5, "bp": "e"},
    ]
    document = {"schemaVersion": 1, "traceEvents": lines} | ({"baseTimeNanoseconds": base} if base else {})
    (folder / "t.json").write_text(json.dumps(document))
    trace = etloom.read(folder / "t.json")
    assert isinstance(trace, Trace)
    back = read_back(trace, folder)
    assert isinstance(back, Trace) and back.meta["clock"] == trace.meta["clock"]
    assert_same(trace, back)


@pytest.mark.slow
def test_ranks_read_back_as_a_job(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    back = read_back(job, tmp_path)
    assert isinstance(back, Job) and back.ranks == job.ranks == [0, 1]
    for rank in job:
        assert_same(job[rank], etloom.link(back[rank]))
        assert (
            back[rank].meta["rank"] == rank
            and back[rank].meta["distributed"] == job[rank].meta["distributed"]
        )
    opened = etloom.open(tmp_path / "out.pftrace", use_cache=False)
    assert etloom.analyze(opened, "top-ops").equals(etloom.analyze(job, "top-ops"))
    written = packets.Trace.FromString((tmp_path / "out.pftrace").read_bytes())
    processes = [
        packet.track_descriptor.process
        for packet in written.packet
        if packet.track_descriptor.HasField("process")
    ]
    names = [
        process.process_name for process in sorted(processes, key=lambda process: process.legacy_sort_index)
    ]
    assert names == ["rank 0: GPU 0", "rank 0: python", "rank 1: GPU 0", "rank 1: python"]
    flows = [flow for packet in written.packet for flow in packet.track_event.flow_ids]
    assert len(flows) == len(set(flows)) == 4


@pytest.mark.slow
def test_ranks_are_on_the_clock_of_the_reference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    chance = random.Random(5)
    ends = [1000 * (number + 1) + chance.randrange(200) for number in range(40)]
    for rank, offset in enumerate((0, 5000)):
        document = small_traces.kineto(rank)
        document["traceEvents"] = [
            small_traces.complete_event(
                "kernel", "ncclDevKernel_AllReduce_Sum_f32", end + offset - length, length, 0, 7, stream=7, device=0,
                **{"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
                   "Group size": 2, "Seq": number, "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000},
            )
            for number, end in enumerate(ends)
            for length in (chance.randrange(50, 300),)
        ]  # fmt: skip
        (run / f"trace_rank{rank}.json").write_text(json.dumps(document | {"host_name": f"host{rank}"}))
    job = etloom.open(run, use_cache=False)
    back = read_back(job, tmp_path)
    assert isinstance(back, Job)
    apart = {
        name: (
            (run[1].events["ts"] + run[1].events["dur"]) - (run[0].events["ts"] + run[0].events["dur"])
        ).to_list()
        for name, run in (("recorded", job), ("written", back))
    }
    assert set(apart["recorded"]) == {5_000_000} and max(map(abs, apart["written"])) < 20_000


def test_overlapping_slices_get_a_track_below_their_own(tmp_path: Path) -> None:
    document = small_traces.kineto()
    document["traceEvents"] += [
        small_traces.complete_event("kernel", f"k{n}", 100 * n, 150, 0, 7, stream=7) for n in range(3)
    ]
    (tmp_path / "t.json").write_text(json.dumps(document))
    trace = etloom.read(tmp_path / "t.json")
    assert isinstance(trace, Trace)
    back = read_back(trace, tmp_path)
    assert isinstance(back, Trace)
    assert_same(trace, back)
    sums = packets.count_events(packets.Trace.FromString((tmp_path / "out.pftrace").read_bytes()))
    assert (sums["slices"], sums["unclosed"]) == (trace.events.filter(ph="X").height, 0)
    assert sum(ns for _, ns in sums["durations"]) == trace.events["dur"].sum()


def overlay_slices(path: Path, root: str) -> dict[str, list[tuple[str, int]]]:
    """Return the slices (name, time in ns) below the track ``root``, by track."""
    written = packets.Trace.FromString(path.read_bytes())
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in written.packet
        if packet.track_descriptor.uuid
    }
    names = {entry.iid: entry.name for packet in written.packet for entry in packet.interned_data.event_names}
    slices: dict[str, list[tuple[str, int]]] = {}
    begun: dict[int, tuple[str, int]] = {}
    for packet in written.packet:
        event, track = packet.track_event, tracks.get(packet.track_event.track_uuid)
        if track is None or track.parent_uuid not in tracks or tracks[track.parent_uuid].name != root:
            continue
        if event.type == 1:
            begun[track.uuid] = names[event.name_iid], packet.timestamp
        elif event.type == 2:
            name, start = begun[track.uuid]
            slices.setdefault(track.name, []).append((name, packet.timestamp - start))
    return slices


@pytest.mark.slow
def test_the_critical_path_and_findings_are_tracks(data: Path, tmp_path: Path) -> None:
    job = open_run(data / "critical_path" / "alexnet.json.gz")
    etloom.export(job, tmp_path / "plain.pftrace")
    etloom.export(job, tmp_path / "out.pftrace", overlay="critical-path", findings=True)
    assert overlay_slices(tmp_path / "plain.pftrace", "critical path") == {}
    path = overlay_slices(tmp_path / "out.pftrace", "critical path")
    (rank,) = path
    assert rank.startswith("rank ") and len(path[rank]) > 20
    (trace,) = job.values()
    assert {name for name, _ in path[rank]} <= set(trace.events["name"].cast(pl.String))
    findings = etloom.analyze(job, "findings").drop_nulls(["start_ns", "end_ns"])
    drawn = [
        name for slices in overlay_slices(tmp_path / "out.pftrace", "findings").values() for name, _ in slices
    ]
    assert sorted(drawn) == sorted(findings["title"])
    plain, back = (etloom.read(tmp_path / f"{name}.pftrace") for name in ("plain", "out"))
    assert isinstance(plain, Trace) and isinstance(back, Trace)
    for name in TABLES:  # the numbers of processes that have a text only are free
        tables = [content(each, name).drop("pid", "tid", strict=False) for each in (plain, back)]
        assert tables[0].equals(tables[1]), name


def test_an_unknown_overlay_and_an_empty_trace_are_errors(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run", (0,)), use_cache=False)
    with pytest.raises(EtloomError, match="unknown overlay 'slack'"):
        etloom.export(job, tmp_path / "x.pftrace", overlay="slack")
    with pytest.raises(EtloomError, match="no timed events"):
        etloom.export(Trace({}, {"rank": 0}), tmp_path / "x.pftrace")


def test_parents_of_any_depth_are_written() -> None:
    names = [
        f'{{"ph":"M","name":"thread_name","pid":1,"tid":{i},"args":{{"name":"t","parent":{i + 1}}}}}'
        for i in range(50_000)
    ]
    writer = _native.PerfettoWriter()
    assert len(writer.add(",".join(names).encode())) > 50_000 and writer.damaged == 0


def test_the_rank_that_another_file_stated_is_written(tmp_path: Path) -> None:
    """Also if the rank comes from a file that has no distributedInfo."""
    trace = small_traces.matrix_product(0).open(tmp_path)[0].replace(meta={"rank": 3})
    for name in ("x.pftrace", "x.json"):
        etloom.export(trace, tmp_path / name)
        assert etloom.open(tmp_path / name).ranks == [3]
