"""Perfetto's traces: what protobuf's own library wrote reads back, and what is damaged or not read is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom import formats
from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.core.trace import Job, Trace
from etloom.formats import perfetto
from support import perfetto_packets as packets
from support.paths import ROOT

BASE = 1_700_000_000_000_000_000


def read(trace: Any, folder: Path) -> Trace:
    path = folder / "run.pftrace"
    path.write_bytes(trace if isinstance(trace, bytes) else trace.SerializeToString())
    content = formats.read(path)
    assert isinstance(content, Trace)
    return content


def counts(trace: Trace) -> dict[str, int]:
    return dict(trace.stats.select("name", "count").iter_rows())


def events(trace: Trace) -> list[dict[str, Any]]:
    return trace.events.drop("id", "position", "parent", "depth", "step").rows(named=True)


def make_thread(trace: Any, uuid: int = 1, pid: int = 10, tid: int = 11) -> Any:
    thread = trace.packet.add(trusted_packet_sequence_id=1).track_descriptor
    thread.uuid = uuid
    thread.thread.pid, thread.thread.tid = pid, tid
    return thread


def add(trace: Any, type: int, ts: int, name: str = "", track: int = 1, **fields: Any) -> Any:
    event = trace.packet.add(trusted_packet_sequence_id=1, timestamp=ts).track_event
    event.type, event.track_uuid = type, track
    if name:
        event.name = name
    for key, value in fields.items():
        getattr(event, key).extend(value) if isinstance(value, list) else setattr(event, key, value)
    return event


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_a_recording_of_the_sdk_is_read(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("sdk")
    written = packets.Trace()
    sums = packets.write_sequence(written, seed)
    trace = etloom.link(read(written, folder))
    slices = trace.events.filter(ph="X")
    durations = slices.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum()).sort("name").rows()
    assert (slices.height, durations) == (sums["slices"], [tuple(pair) for pair in sums["durations"]])
    assert (trace.events["ts"].min(), trace.meta["clock"]) >= (sums["first"], "epoch")
    assert trace.launches.drop_nulls(["launch", "device_event"]).height == sums["launches"]
    assert trace.flows["cat"].cast(pl.String).to_list() == ["ac2g"] * 2 * sums["launches"]
    assert trace.counters.select("name", "value").rows() == [
        ("memory", 512.0 * n) for n in range(1, sums["counters"] + 1)
    ]
    assert trace.threads.filter(tid=43)["name"].item() == "main"
    assert set(trace.stats["severity"]) <= {"info"}


def test_arguments_of_every_type(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    event = add(written, 3, 5, 'quoted "name"\n', categories=["cpu_op", "b"])
    for name, field, value in (
        ("bool", "bool_value", True), ("External id", "int_value", 7), ("uint", "uint_value", 2**64 - 1),
        ("double", "double_value", 0.1), ("text", "string_value", 'a"b'), ("pointer", "pointer_value", 4096),
        ("Input Dims", "legacy_json_value", "[[4, 8], []]"), ("no JSON", "legacy_json_value", '1,"stream":5'),
        ("whole", "double_value", 3.0), ("nan", "double_value", float("nan")), ("none", "name", "none"),
    ):  # fmt: skip
        setattr(event.debug_annotations.add(name=name), field, value)
    items = event.debug_annotations.add(name="items").array_values
    items.add(int_value=1)
    items.add(dict_entries=[{"name": "k", "string_value": "v"}, {"name": "empty"}])
    old = event.debug_annotations.add(name="old").nested_value
    old.nested_type = 1
    old.dict_keys.append("list")
    old.dict_values.add(nested_type=2, array_values=[{"int_value": -1}, {"bool_value": False}])
    (row,) = events(trace := read(written, tmp_path))
    assert (row["ph"], row["cat"], row["name"], row["pid"], row["tid"]) == (
        "i",
        "cpu_op,b",
        'quoted "name"\n',
        10,
        11,
    )
    assert row["external_id"] == 7 and trace.arguments["dims"].to_list() == ["[[4, 8], []]"]
    assert json.loads(row["args"]) == {
        "bool": True, "uint": 2**64 - 1, "double": 0.1, "text": 'a"b', "pointer": 4096, "no JSON": '1,"stream":5',
        "whole": 3.0, "nan": "nan", "none": None, "items": [1, {"k": "v", "empty": None}], "old": {"list": [-1, False]},
    }  # fmt: skip


def test_interned_names_hold_until_the_state_is_cleared(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    for generation in range(2):
        packet = written.packet.add(trusted_packet_sequence_id=1, sequence_flags=1)
        packet.interned_data.event_names.add(iid=1, name=f"name {generation}")
        packet.interned_data.event_categories.add(iid=3, name="cpu_op")
        packet.interned_data.debug_annotation_names.add(iid=4, name="key")
        packet.interned_data.debug_annotation_string_values.add(iid=9, name=f"value {generation}")
        event = add(written, 3, 5 + generation, name_iid=1, category_iids=[3])
        event.debug_annotations.add(name_iid=4, string_value_iid=9)
    written.packet.add(trusted_packet_sequence_id=1, previous_packet_dropped=1)
    add(written, 3, 9, name_iid=1)
    written.packet[-1].sequence_flags = 2
    trace = read(written, tmp_path)
    assert [(row["name"], row["args"]) for row in events(trace)] == [
        ("name 0", '{"key": "value 0"}'), ("name 1", '{"key": "value 1"}'),
    ]  # fmt: skip
    assert (counts(trace)["read.pftrace_lost"], counts(trace)["read.pftrace_no_state"]) == (1, 1)


def test_tracks_without_a_thread_are_named(tmp_path: Path) -> None:
    written = packets.Trace()
    process = written.packet.add().track_descriptor
    process.uuid = 1
    process.process.pid, process.process.legacy_sort_index = 7, 3
    process.process.cmdline.append("serve")
    process.process.process_labels.append("GPU 0")
    for uuid, parent, name in ((2, 1, "queue"), (3, 1, "queue"), (4, 0, "job"), (5, 4, "part")):
        written.packet.add().track_descriptor.MergeFrom(
            type(process)(uuid=uuid, parent_uuid=parent or None, name=name)
        )
    for ts, track in enumerate((1, 2, 3, 4, 5, 6), 1):
        add(written, 3, ts, "x", track)
    trace = read(written, tmp_path)
    names = {(pid, tid): name for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()}
    texts = {pid: name for (pid, tid), name in names.items() if tid is None}
    places = [
        (texts.get(row["pid"]), names.get((row["pid"], row["tid"])) or texts.get(row["tid"]))
        for row in events(trace)
    ]
    assert places == [
        ("serve", "events of the process"), ("serve", "queue"), ("serve", "queue (3)"), ("job", "job"), ("job", "part"),
        ("track 6", "track 6"),
    ]  # fmt: skip
    assert trace.threads.filter(pid=7).row(0, named=True) == {
        "pid": 7, "tid": None, "name": "serve", "labels": "GPU 0", "sort_index": 3,
    }  # fmt: skip


def test_slices_are_paired_in_the_order_of_time(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    add(written, 1, 0, "outer")
    add(written, 2, 100).debug_annotations.add(name="result", int_value=5)
    add(written, 1, 10, "inner")
    add(written, 2, 20)
    add(written, 1, 200, "open")
    add(written, 2, -5 + 2**64)
    trace = read(written, tmp_path)
    rows = [(row["ph"], row["name"], row["ts"], row["dur"], row["args"]) for row in events(trace)]
    assert rows == [
        ("X", "outer", 0, 100, '{"result": 5}'), ("X", "inner", 10, 10, None), ("B", "open", 200, None, None),
    ]  # fmt: skip
    assert counts(trace)["read.begin_without_end"] == counts(trace)["read.end_without_begin"] == 1


def test_counters_add_up_and_stand_next_to_events(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    for uuid, fields in (
        (2, {"is_incremental": True, "unit_multiplier": 1000}), (3, {}), (4, {"y_axis_share_key": "memory"}),
    ):  # fmt: skip
        track = written.packet.add().track_descriptor
        track.uuid, track.parent_uuid, track.name = (
            uuid,
            1,
            {2: "time", 3: "loss", 4: "memory reserved"}[uuid],
        )
        track.counter.SetInParent()
        for key, value in fields.items():
            setattr(track.counter, key, value)
    defaults = written.packet.add(trusted_packet_sequence_id=1).trace_packet_defaults.track_event_defaults
    defaults.extra_counter_track_uuids.append(2)
    for ts in (1, 2):
        others = {"extra_double_counter_track_uuids": [3], "extra_double_counter_values": [0.5 * ts]}
        add(written, 1, ts, "x", extra_counter_values=[5], **others)
        add(written, 2, ts + 10)
    add(written, 4, 7, track=4, double_counter_value=2.5)
    add(written, 4, 8, track=4)
    trace = read(written, tmp_path)
    assert trace.counters.select("ts", "pid", "name", "series", "value").rows() == [
        (1, 10, "time", "value", 5000.0), (1, 10, "loss", "value", 0.5), (2, 10, "time", "value", 10000.0),
        (2, 10, "loss", "value", 1.0), (7, 10, "memory", "reserved", 2.5),
    ]  # fmt: skip
    assert counts(trace)["read.pftrace_no_type"] == 1


def test_flows_begin_step_and_end(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    add(written, 3, 1, "a", flow_ids=[2**63 + 5])
    add(written, 3, 2, "b", flow_ids=[2**63 + 5])
    add(written, 3, 3, "c", terminating_flow_ids=[2**63 + 5])
    add(written, 3, 4, "d", flow_ids=[2**63 + 5])
    trace = read(written, tmp_path)
    assert trace.flows.select("ph", "ts", "flow", "cat").rows() == [
        ("s", 1, 5, None), ("t", 2, 5, None), ("f", 3, 5, None), ("s", 4, 5, None),
    ]  # fmt: skip


def test_phases_of_the_trace_event_format(tmp_path: Path) -> None:
    written = packets.Trace()
    thread = written.packet.add(trusted_packet_sequence_id=3).thread_descriptor
    thread.pid, thread.tid, thread.thread_name, thread.reference_timestamp_us = 10, 11, "main", 1000
    for phase, fields, times in (
        ("X", {"duration_us": 5}, {"timestamp_delta_us": 1}), ("B", {}, {"timestamp_delta_us": 10}),
        ("E", {}, {"timestamp_delta_us": 2}), ("I", {}, {"timestamp_absolute_us": 2000}),
        ("b", {"unscoped_id": 5}, {"timestamp_absolute_us": 2001}), ("M", {}, {"timestamp_absolute_us": 2001}),
        ("s", {"unscoped_id": 9}, {"timestamp_absolute_us": 2002}),
        ("f", {"unscoped_id": 9, "pid_override": 1, "tid_override": 2}, {"timestamp_absolute_us": 2003}),
        ("i", {"bind_id": 4, "flow_direction": 2}, {"timestamp_absolute_us": 2004}),
        ("i", {"bind_id": 4, "flow_direction": 1}, {"timestamp_absolute_us": 2005}),
    ):  # fmt: skip
        event = written.packet.add(trusted_packet_sequence_id=3).track_event
        event.name = phase
        event.legacy_event.phase = ord(phase)
        for target, values in ((event.legacy_event, fields), (event, times)):
            for key, value in values.items():
                setattr(target, key, value)
    trace = read(written, tmp_path)
    rows = [
        (row["ph"], row["name"], row["ts"] // 1000, row["dur"], row["pid"], row["tid"], row["args"])
        for row in events(trace)
    ]
    assert rows == [
        ("X", "X", 1001, 5000, 10, 11, None), ("X", "B", 1011, 2000, 10, 11, None),
        ("I", "I", 2000, None, 10, 11, None),
        ("b", "b", 2001, None, 10, 11, '{".id": 5}'), ("i", "i", 2004, None, 10, 11, None),
        ("i", "i", 2005, None, 10, 11, None),
    ]  # fmt: skip
    assert trace.flows.select("ph", "name", "flow", "pid", "tid").rows() == [
        ("s", "s", 9, 10, 11), ("f", "f", 9, 1, 2), ("s", None, 4, 10, 11), ("f", None, 4, 10, 11),
    ]  # fmt: skip
    assert counts(trace)["read.pftrace_no_type"] == 1


def test_clocks_are_related_by_snapshots(tmp_path: Path) -> None:
    written = packets.Trace()
    for clocks in (((6, 1000, 1), (1, BASE, 1), (3, 50, 1), (70, 7, 100)), ((6, 2000, 1), (3, 1150, 1))):
        snapshot = written.packet.add(trusted_packet_sequence_id=1).clock_snapshot
        for clock, time, unit in clocks:
            snapshot.clocks.add(clock_id=clock, timestamp=time, unit_multiplier_ns=unit)
    make_thread(written)
    for ts, clock in ((1500, 0), (60, 3), (1160, 3), (8, 70), (5, 9)):
        add(written, 3, ts, str(clock))
        if clock:
            written.packet[-1].timestamp_clock_id = clock
    trace = read(written, tmp_path)
    times = sorted((row["name"], row["ts"] - BASE + 1000) for row in events(trace))
    assert times == [("0", 1500), ("3", 1010), ("3", 2010), ("70", 1100), ("9", 5)]
    assert counts(trace)["read.pftrace_clock"] == 1


@pytest.mark.slow
def test_compressed_packets_stand_for_their_content(tmp_path: Path) -> None:
    plain = packets.Trace()
    packets.write_sequence(plain, 1)
    expected = read(plain, tmp_path)
    content = plain.SerializeToString()
    written = packets.Trace()
    half = packets.Trace(packet=plain.packet[: len(plain.packet) // 2]).SerializeToString()
    written.packet.add(compressed_packets=zlib.compress(half))
    written.packet.add(zstd_compressed_packets=zstandard.compress(content[len(half) :]))
    trace = read(written, tmp_path)
    assert trace.events.equals(expected.events) and trace.counters.equals(expected.counters)
    written.packet[1].zstd_compressed_packets = b"\0" * 9
    damaged = read(written, tmp_path)
    assert damaged.events.height < expected.events.height and counts(damaged)["read.corrupt_compression"] == 1
    written.packet[0].compressed_packets = zlib.compress(bytes(1 << 26))
    with pytest.raises(LimitError, match="times as many"):
        read(written, tmp_path)


@pytest.mark.parametrize(
    ("field", "compress"),
    [("compressed_packets", zlib.compress), ("zstd_compressed_packets", zstandard.compress)],
)
def test_a_cut_compressed_packet_loses_no_other(tmp_path: Path, field: str, compress: Any) -> None:
    inner, written = packets.Trace(), packets.Trace()
    for ts in range(300):
        add(inner, 3, ts, f"inner {ts * 7919}")
    written.packet.add(**{field: compress(inner.SerializeToString())[:-40]})
    make_thread(written)
    add(written, 3, 1000, "last")
    trace = read(written, tmp_path)
    assert events(trace)[-1]["name"] == "last" and counts(trace)["read.corrupt_compression"] == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sparse_interned_names_need_little_memory(tmp_path: Path) -> None:
    content = b"\x0a\x0c\x50\x01\x68\x01\x62\x06\x12\x04\x08\xff\xff\x03" * 2_000
    written = packets.Trace()
    make_thread(written)
    add(written, 3, 5, "x")
    (tmp_path / "large.pftrace").write_bytes(written.SerializeToString() + content)
    # VmHWM is of this process alone; ru_maxrss of a child begins at the size of its parent, here of pytest.
    program = "import etloom, sys; etloom.open(sys.argv[1], use_cache=False); print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", program, str(tmp_path / "large.pftrace")]
    status = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kilobytes = int(status.partition("VmHWM:")[2].split()[0])
    assert kilobytes < 1 << 20  # 2 GB, if each state had room for the numbers before


@pytest.mark.parametrize("own", [10**30, [1], {"a": 1}, None, 1.5])
def test_invalid_processes_leave_no_rank(tmp_path: Path, own: Any) -> None:
    written = packets.Trace()
    make_thread(written)
    add(written, 3, 5, "x")
    (pid,) = {row["pid"] for row in events(read(written, tmp_path))}
    ranks = {"0": {"processes": {str(pid): own}}, "1": {"processes": {"9" * 30: 1}}, "2": {"processes": {}}}
    metadata = written.packet.add().chrome_events.metadata.add(name="etloom_ranks")
    metadata.json_value = json.dumps(ranks)
    assert len(events(read(written, tmp_path))) == 1


@pytest.mark.slow
def test_a_truncated_file_is_read_up_to_there(tmp_path: Path) -> None:
    written = packets.Trace()
    packets.write_sequence(written, 5, size=6)
    content = written.SerializeToString()
    ends = [
        packets.Trace(packet=written.packet[:count]).ByteSize() for count in range(1, len(written.packet))
    ]
    path = tmp_path / "run.pftrace"
    rows = []
    for end in ends:
        for cut in (end, end + 3):
            path.write_bytes(content[:cut])
            try:
                trace = formats.read(path)
            except ReadError as error:
                assert "has no track event" in str(error) and not rows
                continue
            assert isinstance(trace, Trace)
            rows.append(trace.events.height + trace.counters.height)
            assert counts(trace).get("read.truncated", 0) == (cut != end)
    assert rows == sorted(rows) and len(rows) > 40
    assert rows[::2] == rows[1::2], "of a packet that is cut off, nothing is read"


def test_other_packets_and_fields_are_counted(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    written.packet.add(trace_config=b"")
    for _ in range(3):
        written.packet.add(cpu_info=b"")
    written.packet.add().chrome_events.legacy_json_trace.append(b"{}")
    with pytest.raises(ReadError, match=r"has no track event, only CPU information \(3\)"):
        read(written, tmp_path)
    event = add(written, 3, 5, "x", source_location_iid=1)
    event.debug_annotations.add(name="p", proto_value=b"")
    trace = read(written, tmp_path)
    stats = counts(trace)
    assert (
        stats["read.pftrace_other_packet"],
        stats["read.pftrace_description"],
        stats["read.pftrace_field"],
    ) == (4, 1, 2)


def test_limits_on_rows_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = packets.Trace()
    make_thread(written)
    annotation = add(written, 3, 5, "x").debug_annotations.add(name="deep")
    for _ in range(90):
        annotation = annotation.array_values.add()
    annotation.int_value = 1
    (row,) = events(read(written, tmp_path))
    assert 20 < row["args"].count("[") < 40
    for ts in range(20):
        add(written, 3, ts, "x")
    monkeypatch.setenv("ETLOOM_MAX_ROWS", "21")
    assert len(events(read(written, tmp_path))) == 21
    monkeypatch.setenv("ETLOOM_MAX_ROWS", "10")
    with pytest.raises(LimitError, match="more than 10 rows"):
        read(written, tmp_path)


@pytest.mark.slow
@given(st.binary(max_size=200), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_damaged_bytes_never_fail_otherwise(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, seed: int, chance: Any
) -> None:
    written = packets.Trace()
    packets.write_sequence(written, seed % 50, size=4)
    content = bytearray(written.SerializeToString())
    for byte in noise:
        content[chance.randrange(len(content))] = byte
    path = tmp_path_factory.mktemp("damaged") / "run.pftrace"
    path.write_bytes(content)
    try:
        formats.read(path, "perfetto")
    except EtloomError as error:
        assert "\n" not in str(error)


def test_categories_of_rocprofv3_become_those_of_kineto(tmp_path: Path) -> None:
    written = packets.Trace()
    make_thread(written)
    for uuid, name in ((2, "COMPUTE AGENT [4] QUEUE [0] (GPU)"), (3, "COMPUTE AGENT [5] QUEUE [0] (GPU)")):
        written.packet.add(track_descriptor={"uuid": uuid, "name": name})
    for ts, track, cat, name, arguments in (
        (1, 1, "hip_api", "hipLaunchKernel", {"corr_id": 8}),
        (20, 2, "kernel_dispatch", "gemm", {"corr_id": 8, "agent": 4}),
        (40, 1, "hip_api", "hipMemcpyAsync", {"corr_id": 9}), (50, 1, "marker_api", "step", {"corr_id": 10}),
        (60, 3, "memory_copy", "MEMORY_COPY_HOST_TO_DEVICE", {"corr_id": 9, "agent": 5}),
    ):  # fmt: skip
        event = add(written, 1, ts, name, track, categories=[cat])
        for key, value in arguments.items():
            event.debug_annotations.add(name=key, uint_value=value)
        add(written, 2, ts + 5, track=track)
    trace = etloom.link(read(written, tmp_path))
    columns = ("cat", "name", "device", "stream", "correlation")
    assert trace.events.select(columns).rows() == [
        ("cuda_runtime", "hipLaunchKernel", None, None, 8), ("kernel", "gemm", 0, 0, 8),
        ("cuda_runtime", "hipMemcpyAsync", None, None, 9), ("user_annotation", "step", None, None, None),
        ("gpu_memcpy", "Memcpy HtoD (Host -> Device)", 1, 1, 9),
    ]  # fmt: skip
    assert trace.launches.drop_nulls(["launch", "device_event"]).height == 2


def test_sniffing_by_content() -> None:
    written = packets.Trace()
    packets.write_sequence(written, 1)
    content = written.SerializeToString()
    assert perfetto.sniff(content) and perfetto.sniff(content[:20])
    assert perfetto.sniff(
        packets.Trace(packet=[{"compressed_packets": bytes(1 << 17)}]).SerializeToString()[: 1 << 16]
    )
    for other in (
        b"",
        b"\n",
        b"\n{\n" + b" " * 200,
        b"\x0a\x0c\x12\x09/host:CPU",
        b'\n{"traceEvents": []}',
        b"\x0a\x00" * 9,
    ):
        assert not perfetto.sniff(other), other


def google_protos() -> str:
    """An interpreter with the wheel ``perfetto``: that of $ETLOOM_PERFETTO_PYTHON, else this one."""
    python = os.environ.get("ETLOOM_PERFETTO_PYTHON", sys.executable)
    command = [python, "-c", "import perfetto.protos.perfetto.trace.perfetto_trace_pb2"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs Google's protos: pip install perfetto protobuf, and ETLOOM_PERFETTO_PYTHON")
    return python


def run_protos(python: str, *arguments: str) -> dict[str, Any]:
    script = ROOT / "tests" / "support" / "perfetto_packets.py"
    done = subprocess.run([python, script, *arguments], capture_output=True, check=True, text=True)
    sums: dict[str, Any] = json.loads(done.stdout)
    return sums


@pytest.mark.parametrize("seed", range(3))
def test_files_of_googles_protos_have_the_same_sums(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "google.pftrace"
    sums = run_protos(google_protos(), "write", str(path), str(seed))
    trace = formats.read(path)
    assert isinstance(trace, Trace)
    slices = trace.events.filter(ph="X")
    durations = slices.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum()).sort("name").rows()
    assert durations == [tuple(pair) for pair in sums["durations"]]
    assert (slices.height, trace.counters.height) == (sums["slices"], sums["counters"])
    assert trace.flows.height == 2 * sums["launches"]


def test_exports_have_the_same_sums_by_googles_protos(data: Path, tmp_path: Path) -> None:
    python = google_protos()
    job = etloom.open(data / "nccl_ddp" / "kineto_trace_0.json.gz")
    etloom.export(job, tmp_path / "run.pftrace")
    sums = run_protos(python, "count", str(tmp_path / "run.pftrace"))
    (trace,) = job.values() if isinstance(job, Job) else (job,)
    slices = trace.events.filter(ph="X")
    durations = slices.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum()).sort("name").rows()
    assert [tuple(pair) for pair in sums["durations"]] == durations
    launches = trace.launches.drop_nulls(["launch", "device_event"]).height
    assert (sums["slices"], sums["flows"], sums["flow_ends"]) == (slices.height, launches, 2 * launches)
    assert sums["unclosed"] == 0
