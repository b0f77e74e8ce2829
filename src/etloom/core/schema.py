"""The tables of a Trace, declared once: column, type, unit, foreign key, meaning.

All code that fills, checks, saves or documents a table reads these declarations. Conventions:

- Times are int64 nanoseconds since the Unix epoch if the file states its base, otherwise since a zero of its own;
  ``meta["clock"]`` is "epoch" or "relative".
- An absent value is null, never -1; only ``pid`` and ``tid`` are -1 where the file states none, so that every row has
  a track.
- ``id`` numbers the rows of a table from 0 when it is read and stays with the row when rows are filtered.
  Foreign keys name the table whose ``id`` they hold.
- Repeated text is ``Categorical``: text to the user, 32-bit codes in memory. Repeated lists (shapes, strides,
argument
  values) are kept as the JSON text of the file, so a column of them costs 4 bytes per row; `parse_distinct` parses
  such a column at the cost of its distinct values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

from etloom.core.arrays import join_columns

SEVERITIES = ("info", "data_loss", "error")
"""Severities of a row of stats: nothing is lost (repaired, defaulted) | input was skipped | results may be wrong."""


class Stat(NamedTuple):
    """One row of the table ``stats``: a count of lost, repaired or unlinked data."""

    name: str
    """The thing that is counted, as area.name: ``read.truncated``."""
    severity: str
    """One of `SEVERITIES`."""
    count: int  # type: ignore[assignment]  # shadows tuple.count
    example: str | None
    """One of the things counted, or an explanation."""


Form = Literal["shape", "shapes", "integers", "strides", "ranks", "texts", "values", "object"]
"""The form of JSON text: a list of what it names. A ``shape`` is a list of sizes, and in ``shapes`` (and ``strides``) a
list of tensors has a list of shapes; ``values`` is a list of anything, ``object`` one object."""

INTEGER_LIMIT = 1 << 62
"""Integers of a column lie between this and its negative, so that the sum and the difference of two are integers."""
FLOAT_LIMIT = 1e100
"""As `INTEGER_LIMIT`, for numbers with a fraction; none is infinite or not a number."""
TIME_LIMIT = 4 * 10**18
"""Times lie between this (in the year 2096) and its negative, so that differences and ends are 64-bit integers."""
DURATION_LIMIT = 1 << 55
"""The longest duration: more than a year in nanoseconds."""
SIZE_LIMIT = 1 << 50
"""The largest number of bytes or elements of one thing: a pebibyte."""


@dataclass(frozen=True)
class Column:
    """A table column's declaration: type, meaning, unit, and valid values; readers replace other values by null."""

    name: str
    dtype: Any  # a polars data type
    meaning: str
    unit: str | None = None
    refers: str | None = None  # the table whose id this column holds
    minimum: int | None = None
    maximum: int | None = None
    form: Form | None = None  # of JSON text
    default: int | None = None  # in place of an absent value
    required: bool = False  # a row without it is left out


@dataclass(frozen=True)
class Table:
    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> dict[str, Any]:
        return {column.name: column.dtype for column in self.columns}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The required columns: readers leave out a row in which one of them is null."""
        return tuple(column.name for column in self.columns if column.required)

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @cached_property
    def _empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.schema)

    def empty(self) -> pl.DataFrame:
        return self._empty.clone()

    def conform(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the frame with exactly the declared columns in order and type; missing columns become null.

        Raises:
            ValueError: A column is not declared, or of another kind of type.
            polars.exceptions.PolarsError: A cast would lose values.
        """
        if frame.columns == self._empty.columns and frame.dtypes == self._empty.dtypes:
            return frame
        unknown = set(frame.columns) - set(self.schema)
        if unknown:
            raise ValueError(f"table {self.name} has no column {sorted(unknown)}")
        for name, dtype in frame.schema.items():
            if not _is_castable(dtype, self.schema[name]):
                raise ValueError(f"column {name} has the type {dtype}; expected {self.schema[name]}")
        if frame.is_empty():
            return self.empty()
        frame = join_columns(_cast(column, self.schema[column.name]) for column in frame.get_columns())
        absent = set(self.schema) - set(frame.columns)
        if not absent:
            return frame[list(self.schema)]
        return frame.select(
            # A literal takes no memory per row.
            pl.lit(None, dtype=dtype).alias(name) if name in absent else name
            for name, dtype in self.schema.items()
        )


def _is_castable(source: pl.DataType, dtype: Any) -> bool:
    """Return whether values of a type can become those of another: numbers from numbers, text from text."""
    return source in (dtype, pl.Null) or any(
        source in kind and dtype in kind
        for kind in ((*pl.datatypes.group.NUMERIC_DTYPES, pl.Boolean), _TEXTS)
    )


_TEXTS = (pl.String, pl.Categorical, pl.Enum)


def _cast(column: pl.Series, dtype: pl.DataType | type[pl.DataType]) -> pl.Series:
    return column if column.dtype == dtype else column.cast(dtype)


def _declare(name: str, meaning: str, *columns: Column) -> Table:
    return Table(name, meaning, columns)


I8, I16, I32, I64, U32, U64, F64 = pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt32, pl.UInt64, pl.Float64
TEXT, BOOL = pl.Categorical, pl.Boolean

_ID = Column("id", U32, "row number when read; stays with the row", required=True)
_EVENT = Column("event", U32, "the event this row describes", refers="events", required=True)
_NODE = Column("node", U32, "the node this row describes", refers="nodes", required=True)

_TABLES = (
    _declare(
        "events",
        "One row per event that the profiler recorded. Sorted by ts, then longest first, then file order.",
        _ID,
        Column("ph", TEXT, "phase: X complete, i instant, b/n/e asynchronous, other Chrome phases"),
        Column(
            "cat", TEXT, "Kineto category: cpu_op, user_annotation, cuda_runtime, kernel, gpu_memcpy, ..."
        ),
        Column("name", TEXT, "operator, kernel, call or annotation"),
        Column("ts", I64, "start", unit="ns", minimum=-TIME_LIMIT, maximum=TIME_LIMIT),
        Column(
            "dur",
            I64,
            "duration; null for an instant and for a range that was never closed",
            unit="ns",
            minimum=0,
            maximum=DURATION_LIMIT,
        ),
        Column(
            "pid",
            I64,
            "process; a name instead of a number is mapped to a negative id, see threads",
            default=-1,
        ),
        Column("tid", I64, "thread, or the stream of a device event; as pid", default=-1),
        Column("device", I32, "device index of a device event", minimum=0),
        Column("stream", I64, "stream of a device event", minimum=0),
        Column("correlation", I64, "joins a launch call to the GPU activity that it caused"),
        Column("external_id", I64, "Kineto's External id"),
        Column("rf_id", I64, "Record function id: equals nodes.rf_id of the same run"),
        Column("seq_id", I64, "autograd sequence number: joins backward to forward"),
        Column("fwd_tid", I64, "of a backward operator: the thread that ran its forward operator"),
        Column(
            "step",
            I64,
            "step (ProfilerStep#N, else iteration) this event belongs to (GPU activity: the step of its launch)",
        ),
        Column(
            "parent", U32, "innermost host event of the same thread that encloses this one", refers="events"
        ),
        Column(
            "depth",
            I16,
            "nesting depth on its thread, 0 at the top; null for events that are not on a host thread",
        ),
        Column("args", TEXT, "JSON object of the args that no column or table holds", form="object"),
        Column("position", U32, "index in the file's traceEvents"),
    ),
    _declare(
        "arguments",
        "One row per operator whose shapes or values Kineto recorded.",
        _EVENT,
        Column("dims", TEXT, "Input Dims, JSON", form="shapes"),
        Column("types", TEXT, "Input type, JSON", form="texts"),
        Column("strides", TEXT, "Input Strides, JSON", form="strides"),
        Column("concrete_inputs", TEXT, "Concrete Inputs, JSON", form="texts"),
    ),
    _declare(
        "kernels",
        "One row per device event with its launch geometry or memory facts.",
        _EVENT,
        *(Column(f"grid_{axis}", I32, "blocks in the grid", minimum=0) for axis in "xyz"),
        *(Column(f"block_{axis}", I32, "threads in a block", minimum=0, maximum=1 << 16) for axis in "xyz"),
        Column("registers", I32, "registers per thread", minimum=0),
        Column("shared_mem", I64, "shared memory of a block", unit="B", minimum=0),
        Column("blocks_per_sm", F64, "blocks per SM", minimum=0),
        Column("warps_per_sm", F64, "warps per SM", minimum=0),
        Column("occupancy", F64, "estimated achieved occupancy", unit="%", minimum=0),
        Column("bytes", I64, "bytes copied or set", unit="B", minimum=0, maximum=SIZE_LIMIT),
        Column("bandwidth", F64, "memory bandwidth as Kineto states it", unit="GB/s", minimum=0),
        Column("context", I64, "device context"),
        Column("queued", I64, "Kineto's queued field", unit="us", minimum=0),
        Column("graph_id", I64, "device graph that launched it"),
        Column("graph_node_id", I64, "node of that graph"),
    ),
    _declare(
        "syncs",
        "One row per synchronization that the device tracer recorded (cuda_sync).",
        _EVENT,
        Column("kind", TEXT, "Stream Wait Event | Event Sync | Stream Sync | Context Sync"),
        Column("wait_stream", I64, "stream waited for"),
        Column("wait_event", I64, "event waited for"),
        Column("record_correlation", I64, "correlation of the call that recorded the event"),
    ),
    _declare(
        "frames",
        "One row per call of a Python function or module (with_stack).",
        _EVENT,
        Column("python_id", I64, "Python id"),
        Column("python_parent_id", I64, "python_id of the caller"),
        Column("module_id", I64, "instance of the nn.Module"),
    ),
    _declare(
        "memory",
        "One row per allocation (bytes > 0) or free (bytes < 0).",
        _ID,
        Column("ts", I64, "time", unit="ns", minimum=-TIME_LIMIT, maximum=TIME_LIMIT),
        Column("pid", I64, "process", default=-1),
        Column("tid", I64, "thread", default=-1),
        Column("addr", U64, "address"),
        Column(
            "bytes",
            I64,
            "bytes allocated, negative for freed",
            unit="B",
            minimum=-SIZE_LIMIT,
            maximum=SIZE_LIMIT,
        ),
        Column(
            "total_allocated",
            I64,
            "bytes allocated on the device after it",
            unit="B",
            minimum=0,
            maximum=SIZE_LIMIT,
        ),
        Column(
            "total_reserved",
            I64,
            "bytes reserved on the device after it",
            unit="B",
            minimum=0,
            maximum=SIZE_LIMIT,
        ),
        Column(
            "total_rounded",
            I64,
            "bytes of the allocator's blocks on the device after it, as a snapshot shows them",
            unit="B",
            minimum=0,
            maximum=SIZE_LIMIT,
        ),
        Column("device_type", I32, "c10::DeviceType: 0 cpu, 1 cuda, 20 privateuse1"),
        Column("device", I32, "device index"),
        Column("args", TEXT, "JSON object of the args that no column holds", form="object"),
        Column("stream", I64, "stream it was allocated for, as the allocator calls it"),
        Column(
            "stack", TEXT, "JSON list of frames, innermost first, of a snapshot with stacks", form="texts"
        ),
    ),
    _declare(
        "allocator",
        "One row per entry of a caching allocator's history in a memory snapshot, in its order, then one per segment "
        "and per block at the snapshot.",
        _ID,
        Column("ts", I64, "time", unit="ns", minimum=-TIME_LIMIT, maximum=TIME_LIMIT),
        Column("device", I32, "device index", minimum=0),
        Column(
            "action",
            TEXT,
            "alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom, "
            "snapshot; segment and block at the snapshot",
        ),
        Column("addr", U64, "address; of oom the free bytes of the device"),
        Column(
            "bytes",
            I64,
            "requested bytes; of a segment its size",
            unit="B",
            minimum=0,
            maximum=SIZE_LIMIT,
        ),
        Column("rounded", I64, "bytes of a block at the snapshot", unit="B", minimum=0, maximum=SIZE_LIMIT),
        Column("stream", I64, "stream it was allocated for"),
        Column(
            "pool",
            TEXT,
            "private pool of a segment or request, JSON; null for the default pool, and where none is stated",
            form="values",
        ),
        Column(
            "kind",
            TEXT,
            "of a segment small or large, followed by expandable if it can grow; of a block its state",
        ),
        Column(
            "stack", TEXT, "JSON list of frames, innermost first, of a snapshot with stacks", form="texts"
        ),
        Column("annotation", TEXT, "user_metadata that the program had set"),
    ),
    _declare(
        "counters",
        "One row per sample of a counter track.",
        _ID,
        Column("ts", I64, "time", unit="ns", minimum=-TIME_LIMIT, maximum=TIME_LIMIT),
        Column("pid", I64, "process", default=-1),
        Column("name", TEXT, "counter"),
        Column("series", TEXT, "series of the counter"),
        Column("value", F64, "value, in the unit the name states"),
    ),
    _declare(
        "flows",
        "One row per end of an arrow (flow event) that the file draws.",
        _ID,
        Column("ph", TEXT, "s start, t step, f end"),
        Column("cat", TEXT, "ac2g, fwdbwd, ..."),
        Column("name", TEXT, "name"),
        Column("ts", I64, "time", unit="ns", minimum=-TIME_LIMIT, maximum=TIME_LIMIT),
        Column("pid", I64, "process", default=-1),
        Column("tid", I64, "thread or stream", default=-1),
        Column("flow", I64, "id that the ends of one arrow share, within cat"),
        Column("args", TEXT, "JSON object of the args", form="object"),
    ),
    _declare(
        "threads",
        "One row per process, thread or stream (a track of the file), with its name.",
        Column("pid", I64, "process"),
        Column("tid", I64, "thread or stream; null for the process itself"),
        Column("name", TEXT, "name"),
        Column("labels", TEXT, "labels"),
        Column("sort_index", I64, "order that the file requests"),
    ),
    _declare(
        "nodes",
        "One row per operator of the execution trace. Sorted by id, which is the order in which operators began.",
        _ID,
        Column("et_id", I64, "node id in the file"),
        Column("name", TEXT, "operator"),
        Column("parent", U32, "enclosing node, by nesting (repaired)", refers="nodes"),
        Column("recorded_parent", I64, "et_id of the parent as recorded (ctrl_deps, or parent)"),
        Column("file_order", U32, "position in the file, which is the order in which operators ended"),
        Column("scope", I8, "at::RecordScope: 0 function, 1 backward function, 7 user scope"),
        Column("tid", I64, "at::RecordFunction thread number (not the OS thread)"),
        Column("fw_tid", I64, "thread of the forward operator"),
        Column("fw_parent", I64, "et_id on the forward thread as recorded"),
        Column("seq_id", I64, "autograd sequence number"),
        Column("rf_id", I64, "record function id: equals events.rf_id of the same run"),
        Column("op_schema", TEXT, "operator schema"),
        Column("kernel_backend", TEXT, "triton, ..."),
        Column("kernel_file", TEXT, "file of a compiled kernel"),
        Column(
            "inputs",
            TEXT,
            "JSON list of the input values, null in place of each tensor (see tensors)",
            form="values",
        ),
        Column("input_types", TEXT, "JSON list of the input types", form="values"),
        Column("outputs", TEXT, "as inputs", form="values"),
        Column("output_types", TEXT, "as input_types", form="values"),
        Column("attrs", TEXT, "JSON object of the attributes that no column or table holds", form="object"),
    ),
    _declare(
        "tensors",
        "One row per tensor argument or result of a node.",
        _NODE,
        Column("io", I8, "0 input, 1 output", required=True),
        Column("index", I16, "which argument or result", required=True),
        Column("item", I32, "place in a (nested, flattened) list of tensors; null for a plain tensor"),
        Column("tensor_id", I64, "address-based id, reused together with the memory"),
        Column("storage_id", I64, "address-based id of the storage, like tensor_id"),
        Column("version", I32, "version of the tensor, if the recorder knows it"),
        Column("offset", I64, "storage offset", unit="elements", minimum=0, maximum=SIZE_LIMIT),
        Column("numel", I64, "elements", minimum=0, maximum=SIZE_LIMIT),
        Column("itemsize", I32, "size of an element", unit="B", minimum=0),
        Column("device", TEXT, "cpu, cuda:0, ..."),
        Column("dtype", TEXT, "c10 type: float, c10::BFloat16, long int, ..."),
        Column("shape", TEXT, "JSON list", form="shape"),
        Column("stride", TEXT, "JSON list; null where the schema has none", form="integers"),
    ),
    _declare(
        "comms",
        "One row per communication call, or device event of one.",
        _ID,
        Column("node", U32, "the node that recorded it", refers="nodes"),
        Column("event", U32, "the event that recorded it", refers="events"),
        Column("collective", TEXT, "normalized name: all_reduce, all_gather, reduce_scatter, send, ..."),
        Column("pg_name", TEXT, "process group"),
        Column("pg_desc", TEXT, "description of the process group"),
        Column(
            "ranks", TEXT, "JSON list of global ranks; null if the file does not state them", form="ranks"
        ),
        Column("group_size", I64, "ranks in the group", minimum=1, maximum=1 << 31),
        Column("seq", I64, "sequence number in the group"),
        Column("dtype", TEXT, "element type, as recorded"),
        Column("in_nelems", I64, "elements in", unit="elements", minimum=0, maximum=SIZE_LIMIT),
        Column("out_nelems", I64, "elements out", unit="elements", minimum=0, maximum=SIZE_LIMIT),
        Column("in_split", TEXT, "JSON list", form="integers"),
        Column("out_split", TEXT, "JSON list", form="integers"),
        Column("root", I64, "root (source) rank", minimum=0, maximum=1 << 31),
        Column("peer", I64, "peer (destination) rank of a point-to-point call", minimum=0, maximum=1 << 31),
        Column("reduce_op", TEXT, "sum, avg, max, ..."),
        Column("is_async", BOOL, "asynchronous call"),
        Column("is_p2p", BOOL, "point-to-point"),
        Column("comms_id", U64, "NCCL communicator hash"),
        Column(
            "bytes",
            I64,
            "message size by the convention of PARAM and Kineto: in_nelems * itemsize",
            unit="B",
            minimum=0,
            maximum=SIZE_LIMIT,
        ),
    ),
    _declare(
        "groups",
        "One row per process group.",
        Column("pg_name", TEXT, "name, as comms.pg_name"),
        Column("pg_desc", TEXT, "description"),
        Column("backend", TEXT, "backend configuration"),
        Column("ranks", TEXT, "JSON list of global ranks", form="ranks"),
        Column("size", I64, "ranks in the group", minimum=1, maximum=1 << 31),
        Column(
            "axis",
            TEXT,
            "axis of parallelism: dp, tp, pp, cp, ep; several joined by +; expert-dp, expert-tp, embedding, world",
        ),
        Column("axis_from", TEXT, "name (of the group) | use (the collectives that use it)"),
    ),
    _declare(
        "links",
        "One row per ET node and profiler event that are the same operator.",
        _NODE,
        _EVENT,
        Column("how", TEXT, "rf_id | external_id | op_id | align | file (the file states both as one)"),
        Column(
            "score",
            F64,
            "1 for ids and file; for align, paired operators divided by all operators of the longer sequence",
            unit="ratio",
        ),
    ),
    _declare(
        "launches",
        "One row per launch call and device event that it caused.",
        Column("launch", U32, "runtime or driver call; null when it lies outside the trace", refers="events"),
        Column("device_event", U32, "kernel, copy or set", refers="events"),
        Column(
            "operator",
            U32,
            "innermost operator around the launch call, or around the captured call if there is one",
            refers="events",
        ),
        Column(
            "captured",
            U32,
            "captured call that made the node of the device graph, if the launch replayed one",
            refers="events",
        ),
    ),
    _declare(
        "thread_dependencies",
        "One row per operator that depends on an operator of another thread.",
        Column("event", U32, "the operator that started", refers="events"),
        Column("after", U32, "the operator of another thread that it depends on", refers="events"),
        Column("kind", TEXT, "fwd_bwd (backward of a forward operator) | thread (first after a gap)"),
    ),
    _declare(
        "sync_dependencies",
        "One row per host call or device event that waited, and device event that it waited for.",
        Column(
            "event", U32, "blocking host call, or device event that could not start before", refers="events"
        ),
        Column("on", U32, "device event waited for", refers="events"),
        Column(
            "kind",
            TEXT,
            "Stream Sync | Event Sync | Context Sync | Stream Wait Event | Blocking Copy | Blocking Launch",
        ),
        Column("sync", U32, "the cuda_sync event, or the host call that ordered the wait", refers="events"),
        Column("how", TEXT, "recorded (cuda_sync) | inferred (from calls and times)"),
    ),
    _declare(
        "dependencies",
        "One row per dependency in the file (Chakra, ET+): a node that may not start before another one ends.",
        Column("node", U32, "the node that waits", refers="nodes"),
        Column("on", U32, "the node it waits for", refers="nodes"),
        Column("kind", TEXT, "data | ctrl (the enclosing operator) | sync | thread (work of another thread)"),
    ),
    _declare(
        "stats",
        "One row per problem: the count of what could not be read, was repaired, or could not be linked.",
        Column("name", pl.String, "what is counted, as area.name: read.truncated"),
        Column("severity", pl.String, "info | data_loss | error"),
        Column("count", I64, "how many"),
        Column("example", pl.String, "one of them, or an explanation"),
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}

UNITS = {
    "ns": "ns",
    "pct": "%",
    "ppm": "ppm",
    "bytes": "B",
    "flops": "FLOP",
    "intensity": "FLOP/B",
    "bandwidth": "GB/s",
    "gb_per_s": "GB/s",
    "tb_per_s": "TB/s",
    "tflops_per_s": "TFLOP/s",
}
"""What the name of an answer's column ends in -> its unit (GB, TB: 1e9, 1e12 B). Other numbers count or name things."""


def find_unit(column: str) -> str | None:
    """Return the unit of a result column by its name, such as ``mean_gb_per_s`` or ``transfer_p95_ns``; None if it
    has none.
    """
    return next((unit for end, unit in UNITS.items() if f"_{column}".endswith(f"_{end}")), None)


def parse_distinct(
    frame: pl.DataFrame, column: str, parse: Callable[[Any], Any], dtype: Any, *, alias: str | None = None
) -> pl.DataFrame:
    """Parse a column of JSON text; each distinct text is parsed once.

    Args:
        frame: A table with the column.
        column: The column of JSON text.
        parse: Converts a JSON value into a value of ``dtype``.
        dtype: The polars type of the result.
        alias: Name of the result column (default: replace ``column``).

    Returns:
        The frame with the parsed column; null for text that is not JSON, and if parse raises ValueError, TypeError or
        KeyError.
    """

    def value(text: str) -> Any:
        try:
            return parse(json.loads(text))
        except (ValueError, TypeError, KeyError):
            return None

    texts = frame[column].unique().drop_nulls()
    values = pl.Series([value(text) for text in texts.cast(pl.String)], dtype=dtype)
    # A join, since polars' replace does not take nested values.
    mapping = pl.DataFrame({"": texts.cast(frame[column].dtype), alias or column: values})
    source = frame if alias else frame.rename({column: "\0"})
    joined = source.join(
        mapping, left_on=column if alias else "\0", right_on="", how="left", maintain_order="left"
    )
    return joined if alias else joined.select(frame.columns)
