"""Perfetto's traces by protobuf's own library: an implementation independent of `native/parse/perfetto.cpp`.

With Google's protos (the wheel ``perfetto``) the same functions run as a script in an environment of its own:
``python tests/support/perfetto_packets.py count FILE`` and ``... write FILE SEED``; both print sums as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

MESSAGES = {
    "Trace": "packet=1*TracePacket",
    "TracePacket": "chrome_events=5:ChromeEventBundle clock_snapshot=6:ClockSnapshot timestamp=8:uint64 "
    "trusted_packet_sequence_id=10:uint32 track_event=11:TrackEvent interned_data=12:InternedData "
    "sequence_flags=13:uint32 trace_config=33:bytes incremental_state_cleared=41:bool "
    "previous_packet_dropped=42:uint32 thread_descriptor=44:ThreadDescriptor "
    "compressed_packets=50:bytes timestamp_clock_id=58:uint32 "
    "trace_packet_defaults=59:TracePacketDefaults track_descriptor=60:TrackDescriptor cpu_info=67:bytes "
    "zstd_compressed_packets=133:bytes",
    "ChromeEventBundle": "metadata=2*ChromeMetadata legacy_json_trace=5*bytes",
    "ChromeMetadata": "name=1:string string_value=2:string bool_value=3:bool int_value=4:int64 json_value=5:string",
    "ClockSnapshot": "clocks=1*Clock primary_trace_clock=2:int32",
    "Clock": "clock_id=1:uint32 timestamp=2:uint64 is_incremental=3:bool unit_multiplier_ns=4:uint64",
    "TracePacketDefaults": "track_event_defaults=11:TrackEventDefaults timestamp_clock_id=58:uint32",
    "TrackEventDefaults": "track_uuid=11:uint64 extra_counter_track_uuids=31*uint64 "
    "extra_double_counter_track_uuids=45*uint64",
    "TrackDescriptor": "uuid=1:uint64 name=2:string process=3:ProcessDescriptor thread=4:ThreadDescriptor "
    "parent_uuid=5:uint64 counter=8:CounterDescriptor sibling_order_rank=12:int32 description=14:string",
    "ProcessDescriptor": "pid=1:int32 cmdline=2*string legacy_sort_index=3:int32 process_name=6:string "
    "process_labels=8*string",
    "ThreadDescriptor": "pid=1:int32 tid=2:int64 legacy_sort_index=3:int32 thread_name=5:string "
    "reference_timestamp_us=6:int64",
    "CounterDescriptor": "unit_multiplier=4:int64 is_incremental=5:bool y_axis_share_key=7:string",
    "TrackEvent": "timestamp_delta_us=1:int64 category_iids=3*uint64 debug_annotations=4*DebugAnnotation "
    "legacy_event=6:LegacyEvent type=9:int32 name_iid=10:uint64 track_uuid=11:uint64 extra_counter_values=12*int64 "
    "timestamp_absolute_us=16:int64 categories=22*string name=23:string counter_value=30:int64 "
    "extra_counter_track_uuids=31*uint64 source_location_iid=34:uint64 double_counter_value=44:double "
    "extra_double_counter_track_uuids=45*uint64 extra_double_counter_values=46*double flow_ids=47*fixed64 "
    "terminating_flow_ids=48*fixed64",
    "LegacyEvent": "name_iid=1:uint64 phase=2:int32 duration_us=3:int64 unscoped_id=6:uint64 bind_id=8:uint64 "
    "bind_to_enclosing=12:bool flow_direction=13:int32 pid_override=18:int32 tid_override=19:int32",
    "DebugAnnotation": "name_iid=1:uint64 bool_value=2:bool uint_value=3:uint64 int_value=4:int64 "
    "double_value=5:double string_value=6:string "
    "pointer_value=7:uint64 nested_value=8:NestedValue legacy_json_value=9:string name=10:string "
    "dict_entries=11*DebugAnnotation array_values=12*DebugAnnotation proto_value=14:bytes string_value_iid=17:uint64",
    "NestedValue": "nested_type=1:int32 dict_keys=2*string dict_values=3*NestedValue array_values=4*NestedValue "
    "int_value=5:int64 double_value=6:double bool_value=7:bool string_value=8:string",
    "InternedData": "event_categories=1*InternedText event_names=2*InternedText debug_annotation_names=3*InternedText "
    "debug_annotation_string_values=29*InternedText",
    "InternedText": "iid=1:uint64 name=2:string",
}
"""Fields of the messages of protos/perfetto/trace/perfetto_trace.proto; a star marks a repeated field."""


def count_events(trace: Any) -> dict[str, Any]:
    """Count what a trace that `etloom export` or `write_sequence` wrote holds, by pairing slices on their tracks."""
    names: dict[int, str] = {}
    threads: dict[int, tuple[int, int]] = {}
    totals: Counter[str] = Counter(packets=len(trace.packet))
    durations: Counter[str] = Counter()
    marks = defaultdict(list)
    flows: Counter[int] = Counter()
    for packet in trace.packet:
        descriptor, event = packet.track_descriptor, packet.track_event
        names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
        if descriptor.HasField("thread"):
            threads[descriptor.uuid] = (descriptor.thread.pid, descriptor.thread.tid)
        if not packet.HasField("track_event"):
            continue
        flows.update([*event.flow_ids, *event.terminating_flow_ids])
        totals["instants"] += event.type == 3
        totals["counters"] += event.type == 4
        totals["legacy"] += event.HasField("legacy_event")
        if event.type in (1, 2):
            marks[event.track_uuid].append((packet.timestamp, event.type, event.name_iid))
    for track in marks.values():
        stack = []
        for time, type, name in sorted(track, key=lambda mark: mark[0]):
            if type == 1:
                stack.append((time, names[name]))
                continue
            start, text = stack.pop()
            totals["slices"] += 1
            durations[text] += time - start
        totals["unclosed"] += len(stack)
    digest = sorted(durations.items())
    return {
        **totals,
        "flows": len(flows),
        "flow_ends": sum(flows.values()),
        "threads": len(threads),
        "durations": digest,
    }


def write_sequence(trace: Any, seed: int, size: int = 40) -> dict[str, Any]:
    """Fill a trace as the Perfetto SDK does (incremental clock, interned names, defaults); return its sums."""
    chance = random.Random(seed)
    first = trace.packet.add(
        trusted_packet_sequence_id=2, sequence_flags=1, timestamp_clock_id=6, timestamp=5000
    )
    first.trace_packet_defaults.timestamp_clock_id = 64
    first.trace_packet_defaults.track_event_defaults.track_uuid = 77
    for clock, time in ((6, 5000), (1, 1_700_000_000_000_005_000), (64, 5000)):
        first.clock_snapshot.clocks.add(clock_id=clock, timestamp=time, is_incremental=clock == 64)

    def describe(uuid: int, **fields: Any) -> Any:
        packet = trace.packet.add(trusted_packet_sequence_id=2)
        packet.track_descriptor.uuid = uuid
        for key, value in fields.items():
            setattr(packet.track_descriptor, key, value)
        return packet.track_descriptor

    process = describe(5).process
    process.pid, process.process_name = 42, "train"
    thread = describe(77, parent_uuid=5).thread
    thread.pid, thread.tid, thread.thread_name = 42, 43, "main"
    describe(99, parent_uuid=5, name="stream 7")
    describe(98, parent_uuid=5, name="memory").counter.unit_multiplier = 1
    interned: dict[str, dict[str, int]] = defaultdict(dict)
    now, launches, durations = 5000, 0, Counter()
    open_slices: dict[int, list[tuple[int, str]]] = {77: [], 99: []}

    def add(type: int, track: int, name: str = "", cat: str = "", flow: int = 0, **arguments: int) -> None:
        nonlocal now
        delta = chance.randrange(1, 2000)
        now += delta
        packet = trace.packet.add(trusted_packet_sequence_id=2, sequence_flags=2, timestamp=delta)
        event = packet.track_event
        event.type = type
        if track != 77:
            event.track_uuid = track
        for kind, text in (("event_names", name), ("event_categories", cat)):
            if text and text not in interned[kind]:
                interned[kind][text] = len(interned[kind]) + 1
                getattr(packet.interned_data, kind).add(iid=interned[kind][text], name=text)
        if name:
            event.name_iid = interned["event_names"][name]
            event.category_iids.append(interned["event_categories"][cat])
        for key, value in arguments.items():
            event.debug_annotations.add(name=key.replace("_", " "), int_value=value)
        if flow:
            event.flow_ids.append(flow)
        if type == 1:
            open_slices[track].append((now, name))
        elif type == 2:
            start, begun = open_slices[track].pop()
            durations[begun] += now - start

    for number in range(1, size + 1):
        add(1, 77, f"aten::op{chance.randrange(5)}", "cpu_op", External_id=number)
        if chance.random() < 0.6:
            launches += 1
            add(
                1, 77, "cudaLaunchKernel", "cuda_runtime", flow=number, correlation=number, External_id=number
            )
            add(2, 77)
            add(
                1,
                99,
                f"kernel_{chance.randrange(3)}",
                "kernel",
                flow=number,
                correlation=number,
                stream=7,
                device=0,
            )
            add(2, 99)
        add(2, 77)
        counter = trace.packet.add(trusted_packet_sequence_id=2, timestamp=0).track_event
        counter.type, counter.track_uuid, counter.counter_value = 4, 98, number * 512
    return {
        "slices": size + 2 * launches, "launches": launches, "counters": size, "first": 1_700_000_000_000_005_000,
        "durations": sorted(durations.items()),
    }  # fmt: skip


def main() -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as GoogleTrace  # type: ignore[import-not-found]

    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "count":
        print(json.dumps(count_events(GoogleTrace.FromString(path.read_bytes()))))
        return
    trace = GoogleTrace()
    sums = write_sequence(trace, int(sys.argv[3]))
    path.write_bytes(trace.SerializeToString())
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
else:
    from support.protobuf_messages import declare

    Trace = declare("perfetto_test", MESSAGES, "Trace")
