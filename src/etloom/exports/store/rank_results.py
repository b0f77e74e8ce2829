"""Store intermediate results of each rank, so that analyses of all ranks need not load the ranks again.

Each is a table of all ranks of a batch next to their answers. A result that is missing is computed from the tables.
"""

from __future__ import annotations

import dataclasses
import io
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import Finding, Part
from etloom.analyses.findings.rank_findings import find_in_rank
from etloom.analyses.findings.rank_view import RankFindings
from etloom.analyses.run_info import find_annotated_steps, list_devices
from etloom.analyses.temporal_breakdown import measure_parts
from etloom.collectives import list_participations
from etloom.comparison.difference_tables import (
    find_communication_steps,
    measure_unattributed,
    sum_families,
    sum_kernels,
    sum_operators,
)
from etloom.comparison.measures import measure_peak_memory
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.intervals import Intervals
from etloom.core.trace import Job, Trace
from etloom.formats.parquet.writer import write_tables
from etloom.graphs.peers import count_work_names
from etloom.loading.consistency import list_first_calls
from etloom.timeline.activity import (
    Activity,
    build_activity,
    compute_steps,
    compute_window,
    has_device_events,
)

MAX_OPEN_FILES = 16
"""Tables of results in memory: what a question needs of a rank, of one or two batches."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """A function of a trace whose result is stored for each rank, and how that result is converted to and from a table.

    Attributes:
        name: of its file.
        function: a function of a trace.
        arguments: its further arguments, given the rank.
        encode: returns the result as a table.
        decode: returns the result of a table.
        is_compared: only comparisons of runs need it.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]] = lambda rank: ()
    encode: Callable[[Any], pl.DataFrame] = lambda result: result
    decode: Callable[[pl.DataFrame], Any] = lambda table: table
    is_compared: bool = False

    def key(self, rank: int) -> tuple[Any, ...]:
        """Return the key of a rank's result in `Trace.with_stored_results`: the function and its arguments."""
        return (self.function, *self.arguments(rank))


def _encode_activity(activity: Activity) -> pl.DataFrame:
    """Return the busy intervals of a rank as a table: kind, start, end (ns), basis.

    The first row is empty and stands for a rank without intervals.
    """
    sets = [activity.times[kind] for kind in categories.KERNEL_TYPES]
    kinds = np.repeat(np.arange(len(sets), dtype=np.uint8), list(map(len, sets)))
    first = np.zeros(1, np.int64)
    return pl.DataFrame(
        {
            "kind": np.concatenate((first.astype(np.uint8), kinds)),
            "start": np.concatenate((first, *(times.starts for times in sets))),
            "end": np.concatenate((first, *(times.ends for times in sets))),
            "basis": activity.basis,
        }
    )


def _decode_activity(table: pl.DataFrame) -> Activity:
    kinds, starts, ends = (table[name].to_numpy()[1:] for name in ("kind", "start", "end"))
    bounds = np.searchsorted(kinds, np.arange(len(categories.KERNEL_TYPES) + 1))
    times = {
        kind: Intervals(starts[first:end], ends[first:end])
        for kind, first, end in zip(categories.KERNEL_TYPES, bounds, bounds[1:], strict=False)
    }
    return Activity(table["basis"][0], times)


def _encode_values(*names: str) -> Callable[[Any], pl.DataFrame]:
    def encode(result: Any) -> pl.DataFrame:
        values = result if isinstance(result, tuple) else (result,) * len(names)
        return pl.DataFrame([values], schema=dict.fromkeys(names, pl.Int64), orient="row")

    return encode


def _decode_window(table: pl.DataFrame) -> tuple[int, int] | None:
    start, end = table.row(0)
    return None if start is None else (start, end)


def _encode_flag(flag: bool) -> pl.DataFrame:
    return pl.DataFrame({"flag": [flag]})


def _encode_devices(names: list[str]) -> pl.DataFrame:
    return pl.DataFrame({"names": [names]}, schema={"names": pl.List(pl.String)})


def _encode_findings(result: RankFindings) -> pl.DataFrame:
    """Encode a rank's findings as a table: a row per finding pattern (JSON), and a row per detail table (Arrow IPC)."""
    rows: list[tuple[str, bool, bytes]] = []
    for pattern, findings in result.findings.items():
        text = json.dumps(
            [_pack_finding(finding) for finding in findings], default=lambda value: value.item()
        )
        rows.append((pattern, False, text.encode()))
    for name, table in result.tables.items():
        table.write_ipc_stream(stream := io.BytesIO())
        rows.append((name, True, stream.getvalue()))
    schema = {"name": pl.String, "is_table": pl.Boolean, "content": pl.Binary}
    return pl.DataFrame(rows, schema=schema, orient="row")


class _Decoded(Mapping[str, Any]):
    """A mapping from name to value that holds the values as encoded bytes and decodes them at each access.

    Args:
        rows: name and content.
        decode: returns the value of a content.
    """

    def __init__(self, rows: pl.DataFrame, decode: Callable[[bytes], Any]) -> None:
        self._places = {name: place for place, name in enumerate(rows["name"])}
        self._contents, self._decode = rows["content"], decode

    def __getitem__(self, name: str) -> Any:
        return self._decode(self._contents[self._places[name]])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _decode_findings(table: pl.DataFrame) -> RankFindings:
    findings, tables = table.filter(~table["is_table"]), table.filter("is_table")
    return RankFindings(_Decoded(findings, _unpack_findings), _Decoded(tables, pl.read_ipc_stream))


def _unpack_findings(text: bytes) -> list[Finding]:
    return [_unpack_finding(values) for values in json.loads(text)]


def _pack_finding(finding: Finding) -> dict[str, Any]:
    values = dict(vars(finding))
    values["lost"] = [
        b64encode(times.tobytes()).decode() for times in (finding.lost.starts, finding.lost.ends)
    ]
    values["parts"] = [list(vars(part).values()) for part in finding.parts]
    values["components"] = list(map(_pack_finding, finding.components))
    return values


def _unpack_finding(values: dict[str, Any]) -> Finding:
    starts, ends = (np.frombuffer(b64decode(text), np.int64) for text in values["lost"])
    values["lost"] = Intervals(starts, ends)
    values["parts"] = tuple(Part(*part) for part in values["parts"])
    values["components"] = tuple(map(_unpack_finding, values["components"]))
    return Finding(**values)


def _for_own_steps(rank: int) -> tuple[None]:
    """Return the arguments ``(None,)``, with which comparisons divide a rank's sums by that rank's number of steps."""
    return (None,)


RESULTS = (
    RankResult("participations", list_participations, lambda rank: (rank,)),
    RankResult("activity", build_activity, encode=_encode_activity, decode=_decode_activity),
    RankResult("parts-of-time", measure_parts, lambda rank: (None,)),
    RankResult("step-times", compute_steps),
    RankResult("window", compute_window, encode=_encode_values("start", "end"), decode=_decode_window),
    RankResult("first-calls", list_first_calls),
    RankResult("event-counts", categories.count_events),
    RankResult("work-names", count_work_names),
    RankResult("annotated-steps", find_annotated_steps),
    RankResult("devices", list_devices, encode=_encode_devices, decode=lambda table: table.item().to_list()),
    RankResult("on-device", has_device_events, encode=_encode_flag, decode=lambda table: table.item()),
    RankResult("operators", sum_operators, _for_own_steps, is_compared=True),
    RankResult("families", sum_families, _for_own_steps, is_compared=True),
    RankResult("kernels", sum_kernels, _for_own_steps, is_compared=True),
    RankResult("communication-steps", find_communication_steps, lambda rank: (rank,), is_compared=True),
    RankResult(
        "unattributed",
        measure_unattributed,
        encode=_encode_values("ns"),
        decode=lambda table: table.item(),
        is_compared=True,
    ),
    RankResult("peak-memory", measure_peak_memory, _for_own_steps, is_compared=True),
    RankResult("rank-findings", find_in_rank, encode=_encode_findings, decode=_decode_findings),
)


class KeptResults:
    """Collects the intermediate results (`RESULTS`) of the ranks of a batch, and writes a file per kind of result.

    ``for_report``: without results that only comparisons of runs need.
    """

    def __init__(self, for_report: bool = False) -> None:
        self._results = [result for result in RESULTS if not (for_report and result.is_compared)]
        self._tables: dict[str, list[pl.DataFrame]] = {result.name: [] for result in self._results}
        self._rows: dict[str, dict[int, int]] = {result.name: {} for result in self._results}

    def add(self, trace: Trace, rank: int) -> None:
        """Compute and collect the results of a rank; skip results for which the rank's trace lacks the data."""
        for result in self._results:
            try:
                value = trace.compute_once(result.function, *result.arguments(rank))
            except AnalysisError:
                continue
            table = result.encode(value)
            self._tables[result.name].append(table)
            self._rows[result.name][rank] = table.height

    def write(self, folder: Path) -> dict[str, list[list[int]]]:
        """Write one file per kind of result; return result name -> list of [rank, number of rows] in file order."""
        tables_by_file = {_file_of(folder, name): tables for name, tables in self._tables.items() if tables}
        write_tables({file: pl.concat(tables) for file, tables in tables_by_file.items()})
        return {name: [list(pair) for pair in rows.items()] for name, rows in self._rows.items()}


def _file_of(folder: Path, name: str) -> Path:
    return folder / f"result-{name}.parquet"


class _StoredResults(Mapping[tuple[Any, ...], Any]):
    """A mapping from key (function and arguments) to stored result of a rank; results are read from files on access."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        places: Mapping[str, tuple[int, int]],
        read: Callable[[Path], pl.DataFrame],
    ) -> None:
        self._folder, self._read = folder, read
        self._places = {
            result.key(rank): (result, *places[result.name]) for result in RESULTS if result.name in places
        }

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        result, start, rows = self._places[key]
        return result.decode(self._read(_file_of(self._folder, result.name)).slice(start, rows))

    def __contains__(self, key: object) -> bool:
        return key in self._places  # without reading the result

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _read_table(file: Path) -> pl.DataFrame:
    return pl.read_parquet(file, glob=False, hive_partitioning=False)


def open_results(parts: Iterable[Path]) -> dict[int, Mapping[tuple[Any, ...], Any]]:
    """Return rank -> stored results from the ``parts`` folders of batches; each result is read on access."""
    places: dict[int, dict[str, tuple[int, int]]] = {}
    folders: dict[int, Path] = {}
    read = lru_cache(MAX_OPEN_FILES)(_read_table)
    for part in parts:
        for name, rows in json.loads((part / "part.json").read_text(encoding="ascii"))["results"].items():
            start = 0
            for rank, height in rows:
                places.setdefault(rank, {})[name] = start, height
                folders[rank] = part
                start += height
    return {rank: _StoredResults(rank, folders[rank], places[rank], read) for rank in places}


def attach_results(job: Job, parts: Iterable[Path]) -> Job:
    """Return the job with the stored results of its ranks, from the ``parts`` folders of batches."""
    results = open_results(parts)
    traces = {
        rank: trace.with_stored_results(results[rank]) if rank in results else trace
        for rank, trace in job.items()
    }
    return Job(traces, job.meta, job.run_stats)
