"""Files of profilers that etloom does not read, with the tool that wrote them and the export that is read.

`OTHER_FORMATS` is the only list; readers and `etloom.formats` ask `identify` when they refuse a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_ROCPROFV3 = "record with rocprofv3 --runtime-trace --output-format rocpd -- COMMAND"
_TORCH = "record with torch.profiler or etloom collect"
_ASCEND = "open the ascend_pytorch_profiler_<rank>.db, trace_view.json or kernel_details.csv of the recording"
_UNITRACE = "record with torch.profiler (ProfilerActivity.XPU), or unitrace --chrome-kernel-logging COMMAND"


@dataclass(frozen=True)
class OtherFormat:
    """A format that is not read. A file has it if it matches one of the last five attributes."""

    name: str
    """The kind of file, with the tool that writes it."""
    remedy: str
    """The export of the same recording, or another recording, that is read."""
    magic: bytes = b""
    """The first bytes."""
    inside: bytes = b""
    """Bytes among the first 512."""
    tables: frozenset[str] = frozenset()
    """Tables that a SQLite file must have; a name that ends in an asterisk stands for any table with that prefix."""
    columns: frozenset[str] = frozenset()
    """Columns that the header of a CSV file must have, in lower case."""
    suffixes: tuple[str, ...] = ()
    """Ends of the name, in lower case."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OTHER_FORMATS = (
    *(
        OtherFormat(
            "a file of torch.distributed's debug server",
            "etloom hangs FOLDER answers from its stacks",
            magic=magic,
        )
        for magic in (b"=== Rank 0: http", b"PARTIAL DATA: ", b"=== FR Trace ===")
    ),
    OtherFormat(
        "a report of Nsight Compute (ncu)",
        "ncu --import FILE --csv --page raw > report.csv, which etloom analyze tasks RUN --ncu report.csv reads",
        magic=b"NVR\0",
    ),
    OtherFormat(
        "a table of Nsight Compute (ncu --csv)",
        "read it with a trace: etloom analyze tasks RUN --ncu FILE",
        columns=frozenset({"id", "process id", "kernel name", "metric name"}),
    ),
    OtherFormat(
        "a database of nvprof",
        "record with nsys profile -t cuda,nvtx -- COMMAND",
        tables=_names("StringTable CUPTI_ACTIVITY_KIND_*"),
    ),
    OtherFormat(
        "a summary of Nsight Systems (nsys stats), without times",
        "open the .nsys-rep, or its export: nsys export --type sqlite FILE",
        columns=frozenset({"time (%)", "total time (ns)", "avg (ns)", "name"}),
    ),
    *(
        OtherFormat(f"{what} of Ascend's profiler (torch_npu)", _ASCEND, columns=columns)
        for what, columns in (
            ("a summary of operators", frozenset({"op type", "core type", "total time(us)"})),
            ("a summary of calls", frozenset({"level", "api name", "variance"})),
            ("a summary of steps", frozenset({"computing", "communication(not overlapped)", "free"})),
            ("times of operators", frozenset({"name", "host self duration(us)", "device self duration(us)"})),
            ("memory of operators", frozenset({"name", "size(kb)", "allocation time(us)"})),
            ("a curve of memory", frozenset({"component", "timestamp(us)", "total allocated(mb)"})),
        )
    ),
    *(
        OtherFormat("a summary of Ascend's msprof-analyze", _ASCEND, tables=_names(table))
        for table in ("StepTraceTime", "ClusterStepTraceTime", "ClusterCommunicationTime")
    ),
    *(
        OtherFormat("a summary of Intel's unitrace, without times", _UNITRACE, inside=title)
        for title in (
            b"=== Device Timing Summary ===",
            b"=== API Timing Summary ===",
            b"=== Kernel Properties ===",
        )
    ),
    OtherFormat(
        "a table of hardware counters of Intel's unitrace",
        _UNITRACE,
        columns=frozenset({"kernel", "subdeviceid", "gputime[ns]"}),
    ),
    OtherFormat("a project of Intel VTune", _UNITRACE, suffixes=(".vtune",)),
    OtherFormat(
        "a table of counters of rocprof-compute", _ROCPROFV3, columns=_names("dispatch_id gpu_id kernel_name")
    ),
    OtherFormat(
        "counters of rocprofv3",
        _ROCPROFV3,
        columns=_names("counter_name counter_value dispatch_id"),
    ),
    OtherFormat(
        "calls or copies of rocprofv3",
        "open the _kernel_trace.csv next to it, or the folder of both",
        columns=_names("correlation_id start_timestamp end_timestamp"),
    ),
    OtherFormat(
        "a summary of rocprofv3, without times",
        _ROCPROFV3,
        columns=_names("name calls totaldurationns"),
    ),
    OtherFormat(
        "the devices of a recording of rocprofv3",
        "open the _kernel_trace.csv next to it, or the folder of both",
        columns=_names("node_id agent_type cu_count"),
    ),
    OtherFormat(
        "a table of rocprof (before rocprofv3)",
        _ROCPROFV3,
        columns=_names("kernelname gpu-id queue-id beginns"),
    ),
    OtherFormat("an OTF2 archive (of rocprofv3, Score-P)", _ROCPROFV3, suffixes=(".otf2",)),
    OtherFormat("samples of Linux perf", _TORCH, magic=b"PERFILE2"),
    OtherFormat(
        "a recording of memray", "record with torch.cuda.memory._record_memory_history", magic=b"memray\0"
    ),
    OtherFormat(
        "a profile for speedscope (py-spy, ...)", _TORCH, inside=b"speedscope.app/file-format-schema"
    ),
    OtherFormat(
        "an event file of TensorBoard",
        "open the .pt.trace.json or .xplane.pb of the profiler, which is next to it",
        inside=b"brain.Event:",
    ),
    OtherFormat(
        "a profile of TensorRT (trtexec)",
        "record with nsys profile -t cuda,nvtx -- trtexec ...",
        inside=b'"averageMs"',
    ),
    OtherFormat(
        "a program of XLA as text",
        "record with jax.profiler.trace; its .xplane.pb contains the programs that ran",
        magic=b"HloModule ",
    ),
)
"""The first match names a file, so a table with more columns comes before one with fewer."""


def identify(head: bytes = b"", tables: Collection[str] = (), name: str = "") -> OtherFormat | None:
    """Return the format of a file that is not read, or None.

    Args:
        head: The first bytes of the file.
        tables: The tables of a SQLite file.
        name: The name of the file.
    """
    columns = read_header(head)
    for other in OTHER_FORMATS:
        if (
            (other.magic and head.startswith(other.magic))
            or (other.inside and other.inside in head[:512])
            or (other.tables and all(_has_table(tables, table) for table in other.tables))
            or (other.columns and other.columns <= columns)
            or (other.suffixes and name.lower().removesuffix(".gz").endswith(other.suffixes))
        ):
            return other
    return None


def _has_table(tables: Collection[str], name: str) -> bool:
    if name.endswith("*"):
        return any(table.startswith(name[:-1]) for table in tables)
    return name in tables


def read_header(head: bytes) -> frozenset[str]:
    """Return the names in the first line of a CSV file, in lower case, from its first bytes ``head``."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0][: 1 << 14]
    return frozenset(
        re.sub(r'^[\s"]+|[\s"]+$', "", part).lower() for part in line.decode("utf-8", "replace").split(",")
    )
