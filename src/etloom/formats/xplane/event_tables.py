"""Builds event tables from the planes of an XSpace: category, time (ns), device, stream, correlation, args.

Categories: streams and TPU cores hold kernels and copies; lines that summarize others (XLA Modules, Framework Ops, ...)
have separate categories, so that no time counts twice. On the host, calls into CUDA and HIP launch, names that
begin with $ are Python frames, ranges with a step number are step annotations, and everything else is an operator.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from etloom.core.schema import Stat
from etloom.formats.xplane.planes import Plane
from etloom.formats.xplane.programs import Estimate, to_values

HOST_PID = 701
"""Process number of the host, as xprof's trace viewer has it; the process number of a device is the device's number."""
_MAX_REGISTERS = 1 << 16
"""No thread has more; XLA writes numbers out of uninitialised memory on ROCm."""
_DEVICE_PLANE = re.compile(r"^/device:(GPU|TPU):(\d{1,6})(?:\D|$)")
_HOST_PLANE = "/host:"
_STREAM_LINE = r"^Stream #"
_OP_LINES, _ASYNC_LINES, _STEP_LINE = ("XLA Ops",), ("Async XLA Ops",), "Steps"
_SUMMARY_CATEGORIES = {
    "XLA Modules": "xla_module",
    "XLA Ops": "xla_op",
    "Async XLA Ops": "xla_op",
    "XLA TraceMe": "xla_traceme",
    "Framework Ops": "framework_op",
    "TensorFlow Ops": "framework_op",
    "Framework Name Scope": "name_scope",
    "TensorFlow Name Scope": "name_scope",
    "Source code": "source_code",
    _STEP_LINE: "gpu_user_annotation",
}
"""Lines of a device that summarize others. An annotation on a device has the category that Kineto gives it."""
_OTHER_LINE = "xla_line"
ENCLOSING_OP = "xla_region"
"""Category of an operation (while, conditional) whose time is that of the operations within."""
_LIBRARY_CALLS = ("custom-call", "convolution", "dot", "sort", "scatter")
"""Operations that may run as several kernels; all others run as one."""
_MAX_TRACK = 1 << 30
_RUNTIME_NAME = r"^(?:cu|cuda|hip|hsa_|hsaKmt)[A-Z_]\w*$"
_COLUMN_KEYS = ("correlation_id", "kernel_details", "memcpy_details", "memset_details")
"""Values that columns hold."""


@dataclass
class EventTables:
    """Events of one or more planes and their side tables; times are in ns relative to the file's time zero.

    Attributes:
        events: Columns of the table ``events`` and ``position``.
        kernels: Columns of the table ``kernels`` with ``position`` in place of ``event``.
        threads: Rows of the table ``threads``.
        stats: Rows of ``stats``.
    """

    events: pl.DataFrame
    kernels: pl.DataFrame
    threads: pl.DataFrame
    stats: list[Stat] = field(default_factory=list)


def parse_device(plane: Plane) -> tuple[str, int] | None:
    """Return the kind (GPU or TPU) and the number of a plane's device; None if the plane is not a device."""
    match = _DEVICE_PLANE.match(plane.name)
    return (match[1], int(match[2])) if match else None


def is_host(plane: Plane) -> bool:
    """Return whether a plane holds threads of the host."""
    return plane.name.startswith(_HOST_PLANE)


def build_tables(planes: list[Plane], programs: Mapping[int, Mapping[str, Estimate]]) -> EventTables:
    """Build the tables of all device and host planes; other planes are only counted in stats.

    Args:
        planes: The decoded planes.
        programs: Number of a program -> its operations, by name; they are added to the values of a GPU's kernels.
    """
    parts: list[EventTables] = []
    stats: list[Stat] = []
    for plane in planes:
        if parse_device(plane) is None and not is_host(plane):
            stats.append(Stat("read.xplane_plane_not_read", "info", plane.events.height, plane.name))
            continue
        stats += [
            Stat("read.xplane_no_time", "info", plane.untimed, f"{plane.name}: events without a time"),
            Stat("read.no_time", "data_loss", plane.invalid, f"{plane.name}: time out of range"),
        ]
        if plane.events.height:
            parts.append(_PlaneTables(plane, _find_free_stream(parts, plane), programs).build())
    if not parts:
        empty = pl.DataFrame()
        return EventTables(empty, empty, empty, stats)
    sizes = [part.events.height for part in parts]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()

    def concat(name: str) -> pl.DataFrame:
        frames: list[pl.DataFrame] = [getattr(part, name) for part in parts]
        shifted = [
            frame.with_columns(pl.col("position") + offset) if "position" in frame.columns else frame
            for frame, offset in zip(frames, offsets, strict=True)
        ]
        return pl.concat(shifted, how="diagonal_relaxed")

    stats += [stat for part in parts for stat in part.stats]
    return EventTables(concat("events"), concat("kernels"), concat("threads"), stats)


def _find_free_stream(parts: list[EventTables], plane: Plane) -> int:
    """Return the first track number that earlier planes of the same device (such as a sparse core) do not use."""
    device = parse_device(plane)
    if device is None:
        return 0
    tracks = [part.threads.filter(pl.col("pid") == device[1])["tid"].max() for part in parts]
    return max((int(track) + 1 for track in tracks if isinstance(track, int)), default=0)


class _PlaneTables:
    """Builds the tables of one plane."""

    def __init__(
        self, plane: Plane, first_track: int, programs: Mapping[int, Mapping[str, Estimate]]
    ) -> None:
        self.plane = plane
        self.programs = programs
        self.device = parse_device(plane)
        self.first_track = first_track

    def build(self) -> EventTables:
        """Build the tables of the plane; ``position``, the row number of an event, counts from 0."""
        start = pl.col("start_ps") // 1000
        events = self.plane.events.select(
            "event",
            "line",
            "metadata",
            "full_name",
            pl.col("name"),
            ts=start + pl.col("base_ns"),
            # Both ends are rounded down, so that what is nested remains so.
            dur=(pl.col("start_ps") + pl.col("duration_ps")) // 1000 - start,
        ).with_columns(dur=pl.when(pl.col("dur") >= 0).then("dur"))
        stats = [
            Stat("read.negative_dur", "data_loss", events["dur"].null_count(), "the duration is null"),
            Stat("read.xplane_no_name", "data_loss", events["name"].null_count(), "events without a name"),
        ]
        tracks = pl.Series(
            "tid", _number_tracks(self.plane.lines["id"].to_list(), self.first_track), pl.Int64
        )
        lines = self.plane.lines.select("line", tracks, line_name="name")
        events = events.join(lines, on="line", how="left", maintain_order="left")
        events = self._add_values(events)
        events = self._name_steps(events)
        events = self._categorize(events).with_row_index("position")
        pid = HOST_PID if self.device is None else self.device[1]
        enclosing = int((events["cat"] == ENCLOSING_OP).sum())
        example = f"{self.plane.name}: operations that contain others, such as while"
        stats.append(Stat("read.xplane_enclosing_ops", "info", enclosing, example))
        device = pl.lit(None if self.device is None else self.device[1], dtype=pl.Int64)
        is_stream = pl.col("cat").is_in(["kernel", "gpu_memcpy", "gpu_memset"])
        return EventTables(
            events.select(
                pl.lit("X").alias("ph"),
                "cat",
                "name",
                "ts",
                "dur",
                pl.lit(pid).alias("pid"),
                "tid",
                device.alias("device"),
                pl.when(is_stream).then("tid").alias("stream"),
                "correlation",
                "args",
                "position",
            ),
            self._build_kernels(events.filter(is_stream)),
            pl.concat(
                [
                    pl.DataFrame({"pid": [pid], "tid": [None], "name": [self.plane.name]}),
                    lines.select(pl.lit(pid).alias("pid"), "tid", name="line_name"),
                ],
                how="vertical_relaxed",
            ),
            stats,
        )

    def _add_values(self, events: pl.DataFrame) -> pl.DataFrame:
        """Add events' values as columns (`_COLUMN_KEYS`, ``step_num``), and those not in `_COLUMN_KEYS` as JSON."""
        values = self.plane.values
        keyed = values.filter(pl.col("key").is_in([*_COLUMN_KEYS, "step_num"]))
        integers = {
            name: keyed.filter(pl.col("key") == key)
            .unique("event", keep="last")
            .select("event", **{name: "integer"})
            for name, key in (("correlation", "correlation_id"), ("step_num", "step_num"))
        }
        texts = {
            key: keyed.filter(pl.col("key") == key)
            .unique("event", keep="last")
            .select("event", **{key: pl.col("text").str.strip_chars('"')})
            for key in _COLUMN_KEYS[1:]
        }
        for frame in (*integers.values(), *texts.values()):
            events = events.join(frame, on="event", how="left", maintain_order="left")
        return self._add_args(events)

    def _add_args(self, events: pl.DataFrame) -> pl.DataFrame:
        values = self.plane.values.filter(~pl.col("key").is_in(_COLUMN_KEYS)).unique(
            ["event", "key"], keep="last", maintain_order=True
        )
        values = pl.concat([values.select("event", "key", "text"), self._estimate_operations()])
        shared = self.plane.shared_values.unique(["metadata", "key"], keep="last", maintain_order=True)
        values, shared = _separate_replaced(values, shared, events.select("event", "metadata"))
        events = events.join(
            _join_members(values, "event", "values"), on="event", how="left", maintain_order="left"
        )
        events = events.join(
            _join_members(shared, "metadata", "shared"), on="metadata", how="left", maintain_order="left"
        )
        names = events["full_name"].unique().drop_nulls()
        full_names = pl.DataFrame(
            {"full_name": names, "full": [f'"hlo": {json.dumps(name)}' for name in names]},
            schema={"full_name": pl.String, "full": pl.String},
        )
        events = events.join(full_names, on="full_name", how="left", maintain_order="left")
        members = pl.concat_str("values", "shared", "full", separator=", ", ignore_nulls=True)
        return events.with_columns(
            args=pl.when(pl.any_horizontal(pl.col("values", "shared", "full").is_not_null())).then(
                pl.lit("{") + members + pl.lit("}")
            )
        )

    def _estimate_operations(self) -> pl.DataFrame:
        """Return values (event, key, text) with the cost of the operation of each kernel of a GPU.

        If a call of a library is several kernels one after the other, the first one has its cost, the others have 0;
        another call begins when the first kernel's name comes again.
        """
        rows: list[tuple[int, str, str]] = []
        schema = {"event": pl.Int64, "key": pl.String, "text": pl.String}
        if self.device is None or self.device[0] != "GPU" or not self.programs:
            return pl.DataFrame(rows, schema=schema)
        stated = self.plane.values.filter(pl.col("key").is_in(["hlo_op", "program_id"]))
        names, numbers = (
            stated.filter(key=key).unique("event", keep="last") for key in ("hlo_op", "program_id")
        )
        events = self.plane.events.select("event", "line", "base_ns", "start_ps", kernel="name")
        events = events.join(
            names.select("event", name=pl.col("text").str.strip_chars('"')), on="event", how="left"
        )
        events = events.join(numbers.select("event", program="integer"), on="event", how="left")
        before: tuple[object, ...] = ()
        first = None
        columns = ("event", "line", "kernel", "name", "program")
        for event, line, kernel, name, program in (
            events.sort("line", "base_ns", "start_ps").select(columns).iter_rows()
        ):
            estimate = self.programs.get(program, {}).get(name)
            operation = (line, name, program)
            is_continued = operation == before and kernel != first
            first = first if is_continued else kernel
            if estimate is not None:
                values = to_values(estimate)
                if is_continued and estimate.opcode in _LIBRARY_CALLS:
                    values |= {"flops": 0, "bytes_accessed": 0}
                rows += [(event, key, json.dumps(value)) for key, value in values.items()]
            before = operation
        return pl.DataFrame(rows, schema=schema, orient="row")

    def _name_steps(self, events: pl.DataFrame) -> pl.DataFrame:
        """Rename step annotations to NAME#step_num=N; on a device NAME is ``step`` and N the recorded number."""
        name = pl.col("name").fill_null("step")
        if self.device is None:
            number = pl.col("step_num").cast(pl.String)
        else:
            is_step = pl.col("line_name") == _STEP_LINE
            number = pl.when(is_step).then(pl.coalesce(pl.col("step_num").cast(pl.String), name))
            name = pl.lit("step")
        step_name = pl.format("{}#step_num={}", name, number)
        return events.with_columns(name=pl.when(number.is_not_null()).then(step_name).otherwise("name"))

    def _categorize(self, events: pl.DataFrame) -> pl.DataFrame:
        if self.device is None:
            is_call = pl.col("name").str.contains(_RUNTIME_NAME) | pl.col("correlation").is_not_null()
            category = (
                pl.when(pl.col("step_num").is_not_null())
                .then(pl.lit("user_annotation"))
                .when(is_call.fill_null(False))
                .then(pl.lit("cuda_runtime"))
                .when(pl.col("name").str.starts_with("$"))
                .then(pl.lit("python_function"))
                .otherwise(pl.lit("cpu_op"))
            )
            return events.with_columns(cat=category)
        line = pl.col("line_name")
        summary = line.replace_strict(_SUMMARY_CATEGORIES, default=_OTHER_LINE, return_dtype=pl.String)
        if self.device[0] == "GPU":
            is_copy = pl.col("memcpy_details").is_not_null() | pl.col("name").str.contains("^(?i:memcpy)")
            is_set = pl.col("memset_details").is_not_null() | pl.col("name").str.contains("^(?i:memset)")
            work = (
                pl.when(is_copy).then(pl.lit("gpu_memcpy")).when(is_set).then(pl.lit("gpu_memset"))
            ).otherwise(pl.lit("kernel"))
            return events.with_columns(
                cat=pl.when(line.str.contains(_STREAM_LINE)).then(work).otherwise(summary)
            )
        # A core of a TPU runs one operation at a time, and copies and collectives next to it.
        work = pl.when(pl.col("encloses")).then(pl.lit(ENCLOSING_OP)).otherwise(pl.lit("kernel"))
        return _mark_enclosing(events).with_columns(
            cat=pl.when(line.is_in(_OP_LINES))
            .then(work)
            .when(line.is_in(_ASYNC_LINES))
            .then(pl.lit("kernel"))
            .otherwise(summary)
        )

    def _build_kernels(self, work: pl.DataFrame) -> pl.DataFrame:
        """Parse launch details ("regs:32 grid:8,1,1 ...") and copy sizes ("... size:4") to rows of kernels.

        Launch details: "regs:32 static_shared:0 dynamic_shared:0 grid:8,1,1 block:512,1,1 occ_pct:50".
        """
        details = pl.col("kernel_details")

        def number(name: str, text: pl.Expr = details) -> pl.Expr:
            return text.str.extract(rf"\b{name}:(\d{{1,18}})\b").cast(pl.Int64)

        shape = r"\b{}:(\d{{1,9}}),(\d{{1,9}}),(\d{{1,9}})\b"
        dimensions = {
            f"{kind}_{axis}": details.str.extract(shape.format(kind), i).cast(pl.Int64)
            for kind in ("grid", "block")
            for i, axis in enumerate("xyz", 1)
        }
        shared = pl.sum_horizontal(number("static_shared"), number("dynamic_shared"), ignore_nulls=False)
        occupancy = details.str.extract(r"\bocc_pct:([\d.]{1,9})").cast(pl.Float64, strict=False)
        copied = pl.coalesce(
            number("size", pl.col("memcpy_details")), number("size", pl.col("memset_details"))
        )
        return work.select(
            "position",
            registers=pl.when(number("regs") <= _MAX_REGISTERS).then(number("regs")),
            shared_mem=pl.coalesce(shared, number("group_mem")),
            occupancy=pl.when(occupancy > 0).then(occupancy),  # ROCm writes 0
            bytes=copied,
            **dimensions,
        )


def _separate_replaced(
    values: pl.DataFrame, shared: pl.DataFrame, events: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Separate values of single events from values shared by all events of a name; no event has a key in both.

    A value of an event replaces the value with this key of its metadata, which becomes a value of the other events of
    the metadata.
    """
    stated = values.select("event", "key").join(events, on="event")
    replaced = shared.join(stated, on=["metadata", "key"], how="semi", maintain_order="left")
    others = events.join(replaced, on="metadata", maintain_order="left").join(
        values, on=["event", "key"], how="anti", maintain_order="left"
    )
    return (
        pl.concat([values, others.select("event", "key", "text")]),
        shared.join(replaced, on=["metadata", "key"], how="anti", maintain_order="left"),
    )


def _join_members(values: pl.DataFrame, owner: str, alias: str) -> pl.DataFrame:
    """Join the values of each owner (event or metadata) to a text of JSON members: ``"key": value, ...``."""
    keys = values["key"].unique().drop_nulls()
    quoted = pl.DataFrame(
        {"key": keys, "quoted": [json.dumps(key) for key in keys]},
        schema={"key": pl.String, "quoted": pl.String},
    )
    members = values.join(quoted, on="key", how="left", maintain_order="left")
    return members.group_by(owner, maintain_order=True).agg(
        pl.concat_str("quoted", pl.lit(": "), "text").str.join(", ").alias(alias)
    )


def _number_tracks(ids: list[int], first: int) -> list[int]:
    """Return a track number per line: ``first`` + line id, or a free number for repeated, negative and large ids."""
    tracks = [first + line if 0 <= line < _MAX_TRACK else None for line in ids]
    used = {track for track in tracks if track is not None}
    following = itertools.count(max(used, default=first) + 1)
    free = set(used)
    numbers = []
    for track in tracks:
        if track is None or track not in free:
            track = next(following)
        free.discard(track)
        numbers.append(track)
    return numbers


def _mark_enclosing(events: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``encloses``: whether another event of the same line lies within the event."""
    ordered = events.select("event", "line", "ts", "dur", end=pl.col("ts") + pl.col("dur")).sort(
        "line", "ts", "dur", descending=[False, False, True]
    )
    # An event of no duration at the end of another one does not lie within it.
    last = pl.when(pl.col("dur") > 0).then("end").when(pl.col("dur") == 0).then(pl.col("end") + 1)
    least = last.fill_null(pl.Int64.max()).cum_min(reverse=True).shift(-1).over("line")
    marks = ordered.select("event", encloses=(least <= pl.col("end")).fill_null(False))
    return events.join(marks, on="event", how="left", maintain_order="left")
