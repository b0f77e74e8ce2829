"""Reads the rocpd databases of rocprofv3 (ROCm 7): tables with the UUID of a recording in their names.

A merged database holds several recordings. Kernels and copies join the call that launched them by ``stack_id``, the
internal correlation id. In an early layout, times and tracks are tables of their own.
Layout: source/share/rocprofiler-sdk-rocpd of ROCm/rocprofiler-sdk.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.io.json_text import load_json
from etloom.formats.io.sqlite_file import I64, TEXT, SqliteFile, int_columns
from etloom.formats.rocprof.activities import (
    ACTIVITY_COLUMNS,
    CALL_COLUMNS,
    Process,
    count_unread,
    describe_device,
    name_copy,
    number_agents,
)
from etloom.formats.tables.building import select_columns
from etloom.formats.tables.processes import find_rank

_STRINGS = "rocpd_string"
_ACTIVITY = "kernel_dispatch"
_READ = ("kernel_dispatch", "memory_copy", "region", "sample", "event", "string", "timestamp", "track")
_NOT_ACTIVITY = ("metadata", "info_", *_READ)
_TRACK = int_columns("pid tid agent_id queue_id stream_id")


def list_recordings(source: SqliteFile) -> list[str]:
    """Return the endings of the tables of each recording: an underscore and a UUID, or nothing."""
    endings = (name.removeprefix(_STRINGS) for name in source.tables if name.startswith(_STRINGS))
    return sorted(
        ending
        for ending in endings
        if ending[:1] in ("", "_")
        and any(f"rocpd_{kind}{ending}" in source.tables for kind in ("info_process", _ACTIVITY, "region"))
    )


def read_processes(source: SqliteFile) -> tuple[list[Process], list[Stat]]:
    """Read the processes of all recordings of a database, and what concerns the file as a whole."""
    processes = [
        process
        for ending in list_recordings(source)
        for process in _Recording(source, ending).read_processes()
    ]
    unread = [name for name in source.tables if not name.removeprefix("rocpd_").startswith(_NOT_ACTIVITY)]
    return processes, [*source.stats, count_unread(source, unread)]


def find_rank_of(source: SqliteFile) -> int | None:
    """Return the rank in the environment of the only process of a database, or None."""
    ranks = {
        rank for ending in list_recordings(source) for _, rank in _Recording(source, ending).list_processes()
    }
    return ranks.pop() if len(ranks) == 1 else None


def read_version(source: SqliteFile) -> str | None:
    """Return the version of the schema, as the database states it."""
    for ending in list_recordings(source):
        rows = source.read_table("rocpd_metadata" + ending, {"tag": TEXT, "value": TEXT}).drop_nulls()
        for tag, value in rows.iter_rows():
            if tag == "schema_version":
                return str(value)
    return None


class _Recording:
    """The tables of one recording."""

    def __init__(self, source: SqliteFile, ending: str) -> None:
        self._source = source
        self._ending = ending

    def _read(self, kind: str, columns: dict[str, Any]) -> pl.DataFrame:
        return self._source.read_table(f"rocpd_{kind}{self._ending}", columns)

    def list_processes(self) -> list[tuple[int, int | None]]:
        """Return the pid and the rank, if its environment states it, of each process."""
        rows = self._read("info_process", {"pid": I64, "environment": TEXT}).drop_nulls("pid")
        return [
            (pid, find_rank(_parse_object(text)))
            for pid, text in rows.unique("pid", keep="first").iter_rows()
        ]

    def read_processes(self) -> list[Process]:
        agents = self._read_agents()
        events = self._read("event", int_columns("id stack_id category_id")).drop_nulls("id").unique("id")
        strings = self._read("string", {"id": I64, "string": TEXT}).drop_nulls("id").unique("id")
        activities = pl.concat(
            [self._read_kernels(agents, events), self._read_copies(agents, events, strings)]
        )
        calls = self._read_calls(events, strings)
        pids = dict(self._read("info_process", int_columns("id pid")).drop_nulls().iter_rows())
        ranks = dict(self.list_processes())
        numbers = pl.concat([activities["process"], calls["process"]]).unique().drop_nulls().sort().to_list()
        devices = [agent["properties"] for agent in agents.values() if agent["properties"]]
        default = numbers[0] if numbers else 0
        processes = []
        for number in numbers or [0]:
            of_process = pl.col("process").fill_null(default) == number
            pid = pids.get(number, number)
            parts = [frame.filter(of_process).drop("process") for frame in (calls, activities)]
            processes.append(Process(pid, parts[0], parts[1], ranks.get(pid), devices))
        return processes

    def _read_agents(self) -> dict[int, dict[str, Any]]:
        """Return id of an agent -> is it a GPU, its number among the GPUs, and its properties with Kineto's keys."""
        columns = int_columns("id absolute_index type_index") | dict.fromkeys(
            ("type", "name", "product_name", "extdata"), TEXT
        )
        agents: dict[int, dict[str, Any]] = {}
        for row in self._read("info_agent", columns).drop_nulls("id").iter_rows(named=True):
            is_gpu = row["type"] == "GPU"
            number = row["absolute_index"] if row["type_index"] is None else row["type_index"]
            more = _parse_object(row["extdata"])
            properties = describe_device(number, row["product_name"] or row["name"], more) if is_gpu else None
            agents[row["id"]] = {"is_gpu": is_gpu, "number": number, "properties": properties}
        return agents

    def _read_timed(self, kind: str, columns: dict[str, Any]) -> pl.DataFrame:
        """Read rows with their start and end, process, thread, agent, queue and stream, in either layout."""
        present = self._source.tables.get(f"rocpd_{kind}{self._ending}", frozenset())
        times = [name for name in ("start", "end", "timestamp") if f"{name}_id" in present]
        rows = self._read(kind, _TRACK | int_columns("start end timestamp event_id track_id") | columns
                          | dict.fromkeys((f"{name}_id" for name in times), I64))  # fmt: skip
        if times:
            stamps = self._read("timestamp", int_columns("id value")).drop_nulls("id").unique("id")
            for name in times:
                values = stamps.select(pl.col("id").alias(f"{name}_id"), pl.col("value").alias(name))
                rows = rows.drop(name).join(values, on=f"{name}_id", how="left", maintain_order="left")
        if "track_id" in present:
            tracks = self._read("track", _TRACK | {"id": I64}).drop_nulls("id").unique("id")
            rows = rows.join(
                tracks, left_on="track_id", right_on="id", how="left", maintain_order="left", suffix="_"
            )
            rows = rows.with_columns(pl.coalesce(name, f"{name}_").alias(name) for name in _TRACK)
        selected = [*_TRACK, "start", "end", "timestamp", "event_id", *columns]
        return rows.select(selected).rename({"pid": "process"})

    def _read_kernels(self, agents: dict[int, dict[str, Any]], events: pl.DataFrame) -> pl.DataFrame:
        sizes = {f"{shape}_size_{axis}": I64 for shape in ("grid", "workgroup") for axis in "xyz"}
        rows = self._read_timed("kernel_dispatch", {"kernel_id": I64, "group_segment_size": I64} | sizes)
        names = dict.fromkeys(("display_name", "kernel_name"), TEXT)
        symbols = self._read("info_kernel_symbol", {"id": I64} | names).drop_nulls("id").unique("id")
        rows = _join(_join(rows, "kernel_id", symbols), "event_id", events)
        return select_columns(
            rows,
            {"process": I64} | ACTIVITY_COLUMNS,
            cat=pl.lit("kernel"),
            name=pl.coalesce("display_name", pl.col("kernel_name").str.strip_suffix(".kd")),
            device=number_agents(agents, "agent_id"),
            stream=pl.col("stream_id"),
            queue=pl.col("queue_id"),
            correlation=pl.col("stack_id"),
            shared_mem=pl.col("group_segment_size"),
            **{f"work_{axis}": pl.col(f"grid_size_{axis}") for axis in "xyz"},
            **{f"block_{axis}": pl.col(f"workgroup_size_{axis}") for axis in "xyz"},
        )

    def _read_copies(
        self, agents: dict[int, dict[str, Any]], events: pl.DataFrame, strings: pl.DataFrame
    ) -> pl.DataFrame:
        rows = self._read_timed("memory_copy", int_columns("name_id dst_agent_id src_agent_id size"))
        rows = _join(_join(rows, "name_id", strings), "event_id", events)
        return select_columns(
            rows,
            {"process": I64} | ACTIVITY_COLUMNS,
            cat=pl.lit("gpu_memcpy"),
            name=name_copy(pl.col("string")),
            device=pl.coalesce(number_agents(agents, "src_agent_id"), number_agents(agents, "dst_agent_id")),
            stream=pl.col("stream_id"),
            queue=pl.col("queue_id"),
            correlation=pl.col("stack_id"),
            bytes=pl.col("size"),
        )

    def _read_calls(self, events: pl.DataFrame, strings: pl.DataFrame) -> pl.DataFrame:
        """Read calls and ranges, and marks, which are samples: the text of a marker is in the data of its event."""
        regions = self._read_timed("region", {"name_id": I64})
        samples = self._read_timed("sample", {"name_id": I64})
        samples = samples.with_columns(start="timestamp", end="timestamp")
        threads = self._read("info_thread", int_columns("id tid")).drop_nulls("id").unique("id")
        rows = pl.concat([regions, samples.select(regions.columns)])
        events = events.join(self._read_messages(), on="id", how="left", maintain_order="left")
        rows = _join(rows, "event_id", events)
        rows = _join(rows, "name_id", strings.rename({"string": "name"}))
        rows = _join(rows, "category_id", strings.rename({"string": "domain"}))
        rows = _join(rows, "tid", threads.rename({"tid": "thread"}))
        return select_columns(
            rows,
            {"process": I64} | CALL_COLUMNS,
            name=pl.coalesce("message", "name", "domain"),
            tid=pl.coalesce("thread", "tid"),
            correlation=pl.col("stack_id"),
        )

    def _read_messages(self) -> pl.DataFrame:
        """Return the texts of markers by the id of their event."""
        rows = self._read("event", {"id": I64, "extdata": TEXT}).filter(pl.col("extdata") != "{}")
        texts = rows.drop_nulls("id").unique("id")
        return texts.select("id", message=pl.col("extdata").str.json_path_match("$.message"))


def _join(rows: pl.DataFrame, key: str, table: pl.DataFrame) -> pl.DataFrame:
    return rows.join(table, left_on=key, right_on="id", how="left", maintain_order="left")


def _parse_object(text: str | None) -> dict[str, Any]:
    try:
        value = load_json(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
