"""One rank for the finding patterns: tables derived from its trace, each computed on first access."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from etloom.analyses.findings.gaps import CAUSES, LONG_PAUSE_NS, MIN_COMPUTE_NS, find_gaps
from etloom.analyses.findings.host_calls import find_compiles, find_tokenizer_calls, select_outermost
from etloom.analyses.iterations import measure_iterations
from etloom.core import arrays, categories, nesting, registry
from etloom.core.arrays import take_rows
from etloom.core.intervals import EMPTY, Intervals
from etloom.core.iterations import find_iterations
from etloom.core.machine import run_paired, shared_property
from etloom.core.nesting import find_innermost
from etloom.core.text_codes import CodedColumn
from etloom.core.trace import Trace
from etloom.timeline.activity import (
    Activity,
    compute_activity,
    find_steps,
    find_window,
    is_launched_before_recording,
    select_launched_events,
)

if TYPE_CHECKING:
    from etloom.analyses.findings.finding import Finding

_MODULE = r"^nn\.Module: (.*)$"
FRAME = r"^.*\(\d+\): "
# Modules of the standard library that share their name with many scripts.
_COMMON_NAMES = {
    "calendar",
    "cmd",
    "code",
    "profile",
    "queue",
    "select",
    "statistics",
    "test",
    "token",
    "trace",
}
LIBRARY = (
    r"(?:^|/)(?:torch|site-packages/torch)(?:/|\.|$|\()|^<frozen"
    rf"|^(?:{'|'.join(sorted(sys.stdlib_module_names - _COMMON_NAMES))})(?:/|\.py\(|\()"
    r"|/lib/python\d[^/]*/[^/]+\.py\("
)
"""Matches frames of torch and of the standard library, unless a program's own file may well have such a name."""
LOADS_DATA = r"^enumerate\(DataLoader\)|DataLoader.*__next__|dataloader\.py\(\d+\): __next__"
SAVES = r"torch[/.]serialization\.py\(\d+\): save$|torch/distributed/checkpoint/.*\(\d+\): (?:async_)?save$"
"""Matches frames of torch.save and of distributed checkpoints."""
_GPU_ONLY = r"^nccl:|^aten::record_stream$|^(?:cuda|hip)[A-Z]|^cuLaunch"
"""Matches operators and calls of jobs on GPUs."""
_ALLOCATING_OPERATORS = rf"^aten::(?:(?:empty|new_empty|resize_){categories.WORD}*|set_)$"
"""Matches operators that only allocate: if one takes long, it initializes the device or waits for the allocator."""
_METADATA_OPERATORS = (
    r"^aten::(?:(?:_?unsafe_)?(?:view|split|chunk|unbind|unflatten|flatten|reshape|narrow|select|slice|unfold|t|expand"
    r"|permute|transpose|squeeze|unsqueeze|movedim|swapaxes|diagonal|tensor_split)(?:_as|_dtype|_with_sizes|_copy_to)?_?"
    r"|(?:_?reshape_alias|as_strided_?|alias|detach_?|to|lift_fresh|type_as|contiguous|unflatten_dense_tensors"
    r"|numpy_T|mT|mH|real|imag|view_as_(?:real|complex)|is_nonzero|size|stride|dim|numel|result_type|set_data))$"
)
"""Matches operators that make views or read facts of tensors: they have nothing to compute or move."""
_BLOCKS = r"(?i)synchronize|memcpy|wait|query"
"""Matches calls of the runtime that may wait for the device."""
_COPIES = r"(?i)memcpy"
_LAUNCHES = r"(?i)launch"
_OVERHEAD = r"^(?:Activity Buffer|Buffer Flush|Instrumentation|CUPTI|Resource$)"
_PROFILER = (
    r"torch/(?:autograd/)?profiler(?:/profiler)?\.py\(\d+\): "
    r"(?:__enter__|__exit__|start|stop|step|prepare_trace|start_trace|stop_trace)$"
)
PLUMBING = (
    r"^aten::(?:copy_|_to_copy|to|contiguous|clone|_reshape_copy|fill_|zero_|zeros|zeros_like|new_zeros"
    rf"|empty{categories.WORD}*"
    r"|as_strided|_local_scalar_dense)$"
)
"""Operators that are building blocks of others: naming one of them does not help to locate a problem."""


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RankFindings:
    """Results of finding patterns that need the trace of one rank only.

    Attributes:
        findings: pattern -> its findings; patterns that compare the rank with others are missing.
        tables: key of a function of a `RankView` (see `find_table_key`) -> its result.
    """

    findings: Mapping[str, Sequence[Finding]]
    tables: Mapping[str, pl.DataFrame]

    def find_table(self, function: Callable[[RankView], Any]) -> pl.DataFrame | None:
        """Return the stored result of a function; None if it has to be computed."""
        key = find_table_key(function)
        return None if key is None else self.tables.get(key)


def find_table_key(function: Callable[..., Any]) -> str | None:
    """Return ``module:qualified name`` of a function; None if that does not identify it, as for a nested function."""
    module, name = (getattr(function, attribute, None) for attribute in ("__module__", "__qualname__"))
    if module is None or name is None:
        return None
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is function else None


class RankView:
    """A linked rank with tables that the finding patterns derive from it, each computed on first access.

    Args:
        trace: the rank.
        find_waits: returns the times at which it was blocked in communications waiting for others.
        find_delays: returns the times by which it arrived late at communications.
        stored: results that need not be computed.
    """

    def __init__(
        self,
        trace: Trace,
        find_waits: Callable[[], Intervals] = lambda: EMPTY,
        find_delays: Callable[[], Intervals] = lambda: EMPTY,
        stored: RankFindings | None = None,
    ) -> None:
        self.trace = trace
        self._find_waits = find_waits
        self._find_delays = find_delays
        self._stored = stored
        self._results: dict[Callable[[RankView], Any], Any] = {}
        self.locks: dict[Any, Any] = {}

    def compute_once(self, function: Callable[[RankView], _Result]) -> _Result:
        """Return ``function(view)``, computed on first use, for data that several patterns need."""
        with self.locks.setdefault(function, threading.RLock()):
            if function not in self._results:
                stored = None if self._stored is None else self._stored.find_table(function)
                self._results[function] = function(self) if stored is None else stored
        result: _Result = self._results[function]
        return result

    def map_patterns(self, function: Callable[[str], _Result], names: Sequence[str]) -> dict[str, _Result]:
        """Return {name: function(name)} for the patterns ``names``; two patterns run at a time if the rank is large."""
        return run_paired(function, names, self.trace.rows("events"))

    def find(self, pattern: str) -> Sequence[Finding]:
        """Return the findings of a pattern that examines one rank at a time."""
        if self._stored is not None and pattern in self._stored.findings:
            return self._stored.findings[pattern]
        return self.apply(registry.get("patterns", pattern))

    def apply(self, pattern: Any) -> list[Finding]:
        """Return the findings of a pattern (a module).

        All of them are estimates if the file is a sample of the recording, and if the GPU activity of a job on GPUs is
        not recorded: operators then launch work, and their times on the host are not those of the work.
        """
        findings = list(map(self.doubt, pattern.find(self)))
        if findings and self.activity.basis == "host" and self._uses_gpu:
            note = " (host times only: the GPU activity is not recorded)"
            return [replace(item, title=item.title + note, confidence="low") for item in findings]
        return findings

    def doubt(self, finding: Finding) -> Finding:
        """Return the finding, with low confidence if the file is a sample of the recording."""
        return replace(finding, confidence="low") if self._is_sample else finding

    @shared_property
    def _is_sample(self) -> bool:
        return bool(self.trace.stats.filter(name="read.missing_operators").height)

    @shared_property
    def _uses_gpu(self) -> bool:
        """True if the rank communicates by NCCL, or calls what exists for GPUs only."""
        return bool((self.match_categories(categories.HOST_CATEGORIES) & self.match_events(_GPU_ONLY)).any())

    @shared_property
    def activity(self) -> Activity:
        return compute_activity(self.trace)

    @shared_property
    def busy(self) -> Intervals:
        """Times at which any GPU activity (without a GPU: any operator) of the rank ran."""
        return self.activity.busy

    @property
    def busy_computing(self) -> Intervals:
        """Times of computation or communication on the rank, during which other activity costs no time."""
        return self.activity.times["computation"] | self.activity.times["communication"]

    @property
    def window(self) -> tuple[int, int] | None:
        """Start and end of the rank's active time, in which gaps count as idle, ns; None without activity."""
        return find_window(self.trace)

    @shared_property
    def waiting_for_ranks(self) -> Intervals:
        """Times at which the rank was blocked in a communication because another rank had not arrived yet."""
        return self._find_waits()

    @shared_property
    def delaying_ranks(self) -> Intervals:
        """Times by which the rank arrived late at communications, without delays that it inherited from other ranks."""
        return self._find_delays()

    @shared_property
    def span_ns(self) -> int:
        """Time from the first to the last timed event of the host or device."""
        times, limit = self.trace.events["ts"], np.iinfo(np.int64)
        is_timed = self.match_categories(_TIMED_CATEGORIES) & self._is_timed & arrays.is_present(times)
        starts = arrays.to_array(times, 0)
        start = starts.min(where=is_timed, initial=limit.max)
        end = (starts + self._durations).max(where=is_timed, initial=limit.min)
        return int(end - start) if is_timed.any() else 0

    @shared_property
    def steps(self) -> pl.DataFrame:
        """The annotated steps: step, start, end."""
        return find_steps(self.trace)

    @shared_property
    def iterations(self) -> pl.DataFrame:
        """The iterations of an inference engine with GPU activity, see `measure_iterations`."""
        has_engine = find_iterations(self.trace.events)[0].size > 0
        return _measure_engine_iterations(self.trace) if has_engine else _make_empty_iterations()

    @shared_property
    def step_intervals(self) -> Intervals:
        """Times at which an annotated step ran on the host."""
        return Intervals.of(self.steps["start"], self.steps["end"])

    @shared_property
    def steps_cover_work(self) -> bool:
        """True if at least a tenth of the device time of the activities launched in the steps lies within the steps.

        Otherwise the host runs far ahead, as in inference, and losses of the device cannot be related to the steps.
        """
        launched = self.activities
        if launched["launch"].null_count() or launched["step"].null_count():
            launched = launched.filter(pl.col("launch").is_not_null() & pl.col("step").is_not_null())
        inside = self.step_intervals.covered(launched["ts"], launched["end"]).sum()
        return bool(10 * inside >= launched["dur"].sum())

    @property
    def steady_start(self) -> int | None:
        """End of the first of several annotated steps, which may be warm-up; None if fewer than two are annotated."""
        return self.steps["end"][0] if self.steps.height > 1 else None

    @property
    def warmup_caveat(self) -> str:
        """Reason why the end of warm-up is unknown; empty if it is known."""
        if self.steps.height == 0:
            return "no step is annotated"
        return "only one step is annotated" if self.steps.height == 1 else ""

    def steps_at(self, times: pl.Series) -> pl.Series:
        """Return the innermost annotated step at each time of ``times`` (ns), null for none."""
        return take_rows(self.steps["step"], find_innermost(self.steps["start"], self.steps["end"], times))

    @shared_property
    def activities(self) -> pl.DataFrame:
        """GPU activities by start: id, cat, name, kind, ts, end, dur, stream, launch (id, ts, end of the call), step.

        The step is that of the launch, or, if the launch was not recorded, the one in which the activity starts, unless
        it was launched before the recording.
        """
        work = select_launched_events(
            self.trace,
            *("id", "cat", "kind", "name", "ts", "end", "dur", "device", "stream", "step"),
            *("launch", "launch_ts", "launch_end"),
        )
        if not work["step"].null_count():
            return work
        work = work.with_columns(launched=pl.col("launch").is_not_null())
        inferred = ~pl.col("launched") & ~is_launched_before_recording()
        during = pl.when(inferred).then(self.steps_at(work["ts"]))
        return work.with_columns(step=pl.coalesce("step", during)).drop("launched")

    def match_events(self, pattern: str) -> np.ndarray:
        """Return a mask of the events whose name matches a regular expression."""
        return self._event_names.match_pattern(pattern)

    @shared_property
    def _event_names(self) -> CodedColumn:
        return CodedColumn(self.trace.events["name"])

    def match_categories(self, values: Collection[str]) -> np.ndarray:
        """Return a mask of the events whose category is one of ``values``."""
        return self._event_categories.match_values(tuple(values))

    @shared_property
    def _event_categories(self) -> CodedColumn:
        return CodedColumn(self.trace.events["cat"])

    def match_activities(self, work: pl.DataFrame, pattern: str) -> pl.Series:
        """Return a mask of the rows of `activities` whose name matches a regular expression."""
        if work is not self.activities:
            return pl.Series(arrays.match_text(work["name"], pattern))
        return pl.Series(self._activity_names.match_pattern(pattern))

    @shared_property
    def _activity_names(self) -> CodedColumn:
        return CodedColumn(self.activities["name"])

    @shared_property
    def activity_step_count(self) -> int:
        """The number of steps that have GPU activities."""
        return self.activities["step"].drop_nulls().n_unique()

    @shared_property
    def _ids_are_rows(self) -> bool:
        """True if the event ids are 0, 1, 2, ..., so that each id is also its row number."""
        ids = self.trace.events["id"].to_numpy()
        return bool(ids.size and ids[0] == 0 and ids[-1] == ids.size - 1 and (ids[1:] > ids[:-1]).all())

    def find_rows(self, ids: pl.Series) -> np.ndarray:
        """Return the row number in the events table of each event id, -1 for null and for missing events."""
        if not self._ids_are_rows:
            return arrays.rows_of_ids(self.trace.events, ids)
        rows = arrays.to_array(ids, -1).astype(np.int64)
        rows[rows >= self.trace.events.height] = -1
        return rows

    @shared_property
    def threads(self) -> np.ndarray:
        """Number of the thread of each event."""
        return nesting.track_codes(self.trace.events, ("pid", "tid"))

    @shared_property
    def parents(self) -> np.ndarray:
        """Row number of the event that encloses each event, -1 for none."""
        rows = self.find_rows(self.trace.events["parent"])
        return rows.astype(np.int32) if len(rows) < np.iinfo(np.int32).max else rows

    @shared_property
    def kernels(self) -> pl.DataFrame:
        """The kernels of `activities`: step, device, stream, launch, name, ts, end, dur."""
        columns = ("step", "device", "stream", "launch", "name", "ts", "end", "dur")
        return self.activities.select(columns).filter(self.is_kernel)

    @shared_property
    def is_kernel(self) -> pl.Series:
        """Mask of the kernels among `activities`."""
        return pl.Series(categories.mask_events(self.activities, ("kernel", "Kernel")))

    @shared_property
    def step_computation(self) -> pl.DataFrame:
        """The computation kernels that belong to an annotated step, with all columns of `activities`."""
        is_kernel = pl.col("cat").is_in(["kernel", "Kernel"])
        return self.activities.filter(
            is_kernel & (pl.col("kind") == "computation") & pl.col("step").is_not_null()
        )

    def find_host_events(
        self, names: str = "", categories: Collection[str] = categories.HOST_CATEGORIES
    ) -> pl.DataFrame:
        """Return timed host events whose name matches a regular expression, by start.

        Columns: id, parent, cat, name (text), ts, end, dur, pid, tid, step.
        """
        mask = self._mask_host_events(categories)
        if names:
            mask &= self.match_events(names)
        return self._take_host_events(np.flatnonzero(mask))

    def _mask_host_events(self, categories: Collection[str]) -> np.ndarray:
        """Return a mask of the events with a duration whose category is one of ``categories``."""
        mask: np.ndarray = self.match_categories(categories) & self._is_timed
        return mask

    @shared_property
    def _no_host_events(self) -> pl.DataFrame:
        return self._read_host_events(np.empty(0, np.int64))

    def _take_host_events(self, rows: np.ndarray) -> pl.DataFrame:
        """Return the host events at the row numbers ``rows``, with the columns of `find_host_events`."""
        return self._read_host_events(rows) if rows.size else self._no_host_events.clone()

    def _read_host_events(self, rows: np.ndarray) -> pl.DataFrame:
        columns = ["id", "parent", "cat", "ts", "dur", "pid", "tid", "step", "name"]
        matches = take_rows(self.trace.events[columns], rows)
        return matches.with_columns(
            matches["name"].cast(pl.String), (matches["ts"] + matches["dur"]).alias("end")
        )

    @shared_property
    def _durations(self) -> np.ndarray:
        """The duration of each event in ns, 0 for events without duration."""
        return arrays.to_array(self.trace.events["dur"], 0)

    @shared_property
    def _is_timed(self) -> np.ndarray:
        return arrays.is_present(self.trace.events["dur"])

    @shared_property
    def sync_calls(self) -> pl.DataFrame:
        """Host calls that waited for the device: id, ts, end, in order of end."""
        events = self.trace.events
        rows = np.unique(arrays.rows_of_ids(events, self.trace.sync_dependencies["event"]))
        rows = rows[rows >= 0]
        rows = rows[self._mask_host_events(categories.RUNTIME_CATEGORIES)[rows]]
        starts = events["ts"].to_numpy()[rows]
        ends = starts + self._durations[rows]
        by_end = np.argsort(ends, kind="stable")
        columns = {"id": events["id"].to_numpy()[rows], "ts": starts, "end": ends}
        return arrays.make_frame({name: values[by_end] for name, values in columns.items()})

    @shared_property
    def blocking_copies(self) -> pl.DataFrame:
        """Calls of `LONG_PAUSE_NS` or more that copy, by start; columns as in `find_host_events`."""
        is_long = self._durations >= LONG_PAUSE_NS
        rows = np.flatnonzero(self._mask_host_events(categories.RUNTIME_CATEGORIES) & is_long)
        calls = self._take_host_events(rows)
        return calls.filter(pl.col("name").str.contains(_COPIES)).sort("ts")

    @shared_property
    def unlinked_launches(self) -> np.ndarray:
        """The starts of the launch calls without a recorded GPU activity, ascending."""
        rows = np.flatnonzero(
            self._mask_host_events(categories.RUNTIME_CATEGORIES) & self.match_events(_LAUNCHES)
        )
        linked = np.zeros(self.trace.events.height + 1, np.bool_)
        linked[self.find_rows(self.trace.launches["launch"])] = True
        starts: np.ndarray = self.trace.events["ts"].to_numpy()[rows[~linked[rows]]]
        return np.sort(starts)

    @shared_property
    def data_loads(self) -> pl.DataFrame:
        """Host events that wait for the data loader (of nested events the outermost), columns as in
        `find_host_events`."""
        return select_outermost(self.find_host_events(LOADS_DATA))

    @shared_property
    def data_loading(self) -> Intervals:
        """Times at which some thread waited for the data loader."""
        return Intervals.of(self.data_loads["ts"], self.data_loads["end"])

    @shared_property
    def tokenizer_calls(self) -> pl.DataFrame:
        """Calls of tokenizers; see `host_calls.find_tokenizer_calls`."""
        return find_tokenizer_calls(self)

    @shared_property
    def gaps(self) -> pl.DataFrame:
        """Times without activity on any stream; see `gaps.find_gaps`."""
        return find_gaps(self)

    def select_gaps(self, cause: str) -> pl.DataFrame:
        """Return the rows of `gaps` whose cause is ``cause``, with their lengths (ns) also as the column
        ``cost_ns``."""
        rows = np.flatnonzero(self._gap_causes == CAUSES.index(cause))
        if not rows.size:
            return self._no_gaps.clone()
        gaps = take_rows(self.gaps, rows)
        return gaps.hstack([gaps["gap_ns"].alias("cost_ns")])

    @shared_property
    def _no_gaps(self) -> pl.DataFrame:
        gaps = self.gaps.clear()
        return gaps.hstack([gaps["gap_ns"].alias("cost_ns")])

    @shared_property
    def _gap_causes(self) -> np.ndarray:
        return self.gaps["cause"].to_physical().to_numpy()

    @shared_property
    def saves(self) -> pl.DataFrame:
        """Calls that save a checkpoint (of nested calls the outermost), columns as in `find_host_events`."""
        return select_outermost(self.find_host_events(SAVES))

    @shared_property
    def saving(self) -> Intervals:
        """Times at which some thread saved a checkpoint; known only if Python was recorded."""
        return Intervals.of(self.saves["ts"], self.saves["end"])

    @shared_property
    def allocations(self) -> pl.DataFrame:
        """Calls that allocate device memory from the driver or release it, in order of end."""
        calls = self.find_host_events(ALLOCATES, categories.RUNTIME_CATEGORIES)
        return calls.sort("end") if calls.height > 1 else calls

    @shared_property
    def allocating(self) -> Intervals:
        """Times at which some thread allocated device memory from the driver or released it."""
        return Intervals.of(self.allocations["ts"], self.allocations["end"])

    @shared_property
    def compiles(self) -> pl.DataFrame:
        """Compilations and captures; see `host_calls.find_compiles`."""
        return find_compiles(self)

    @shared_property
    def compiling(self) -> Intervals:
        """Times at which some thread compiled or captured."""
        return Intervals.of(self.compiles["ts"], self.compiles["end"])

    @shared_property
    def profiler_work(self) -> pl.DataFrame:
        """Events in which the profiler itself works, columns as in `find_host_events`, by start."""
        ranges, frames = self.find_host_events(_OVERHEAD, ("overhead",)), self.find_host_events(_PROFILER)
        return pl.concat([ranges, frames]).sort("ts") if ranges.height or frames.height else ranges

    @shared_property
    def profiling(self) -> Intervals:
        """Times at which the profiler itself works."""
        return Intervals.of(self.profiler_work["ts"], self.profiler_work["end"])

    @shared_property
    def pausing(self) -> Intervals:
        """Times of `LONG_PAUSE_NS` or more at which no host thread runs an operator or a call of the runtime.

        From the first to the last annotated step; without annotations in the whole active time.
        """
        span = self.step_intervals.span or self.window
        if span is None:
            return EMPTY
        names = categories.OPERATOR_CATEGORIES | categories.RUNTIME_CATEGORIES | {"overhead"}
        rows = np.flatnonzero(self._mask_host_events(names))
        starts = self.trace.events["ts"].to_numpy()[rows]
        idle = Intervals.of(starts, starts + self._durations[rows]).gaps(*span)
        is_long = idle.ends - idle.starts >= LONG_PAUSE_NS
        return Intervals.of(idle.starts[is_long], idle.ends[is_long])

    @shared_property
    def long_calls(self) -> pl.DataFrame:
        """Runtime or driver calls that take `LONG_PAUSE_NS` or more and neither wait for the device nor allocate.

        Columns as in `find_host_events`.
        """
        is_long = self._durations >= LONG_PAUSE_NS
        calls = self._take_host_events(
            np.flatnonzero(self._mask_host_events(categories.RUNTIME_CATEGORIES) & is_long)
        )
        if calls.is_empty():
            return calls
        other = pl.concat([self.sync_calls["id"], self.allocations["id"]])
        return calls.filter(~pl.col("id").is_in(other.implode()) & ~pl.col("name").str.contains(_BLOCKS))

    @shared_property
    def long_calling(self) -> Intervals:
        """Times at which some thread was in one of `long_calls`."""
        return Intervals.of(self.long_calls["ts"], self.long_calls["end"])

    @shared_property
    def host_operators(self) -> pl.DataFrame:
        """Operators that compute on the host: they launch nothing and take `MIN_COMPUTE_NS` or more themselves.

        Columns as in `find_host_events`.
        """
        is_long = self._mask_host_events(categories.OPERATOR_CATEGORIES) & (self._durations >= MIN_COMPUTE_NS)
        rows = np.flatnonzero(is_long & ~self._calls_the_runtime)
        names = CodedColumn(take_rows(self.trace.events["name"], rows))
        is_excluded = names.match_pattern(
            f"{_ALLOCATING_OPERATORS}|{_METADATA_OPERATORS}|{categories.COMMUNICATION_CALL}"
        )
        rows = rows[names.match_pattern("^aten::") & ~is_excluded]
        # The last entry is for events without a parent.
        is_candidate = np.zeros(len(self.parents) + 1, np.bool_)
        is_candidate[rows] = True
        children = np.flatnonzero(is_candidate[self.parents])
        inside = np.zeros(len(self.parents), np.int64)
        np.add.at(inside, self.parents[children], self._durations[children])
        return self._take_host_events(rows[self._durations[rows] - inside[rows] >= MIN_COMPUTE_NS])

    @shared_property
    def _calls_the_runtime(self) -> np.ndarray:
        """A mask of the events inside of which a call of the runtime or driver was recorded."""
        mask = np.zeros(len(self.parents), np.bool_)
        rows = self.parents[self.match_categories(categories.RUNTIME_CATEGORIES)]
        while (rows := rows[rows >= 0]).size:
            rows = rows[np.append(True, rows[1:] != rows[:-1])]  # calls of one operator follow each other
            rows = rows[~mask[rows]]
            mask[rows] = True
            rows = self.parents[rows]
        return mask

    @shared_property
    def host_computing(self) -> Intervals:
        """Times at which an operator computes on the host."""
        return Intervals.of(self.host_operators["ts"], self.host_operators["end"])

    def locate(
        self, events: pl.Series, places: Collection[str] = ("operator", "module", "frame")
    ) -> pl.DataFrame:
        """Return the innermost operator, module and Python frame around each host event of ``events`` (ids, may be
        null).

        Only these places are looked up. operator: not one of PLUMBING if possible; if all are, the outermost. frame: of
        code outside of libraries, if Python was recorded.
        """
        rows = self.find_rows(events)
        names = self.trace.events["name"]
        labels = {}
        for place in places:
            around = self._locations[place]
            at = np.where(rows < 0, -1, around[rows]) if around.size else np.full_like(rows, -1)
            labels[place] = take_rows(names, self._fill_outermost(rows, at) if place == "operator" else at)
        if "module" in labels and self._locations["module"].size:
            labels["module"] = arrays.map_text(labels["module"], lambda name: name.str.extract(_MODULE))
        return arrays.make_frame(labels)

    @shared_property
    def _locations(self) -> dict[str, np.ndarray]:
        """Row of the innermost operator (except PLUMBING), module and frame around each event, -1 for none; empty if
        the trace has none.
        """
        empty = np.zeros(0, np.int32)
        return {
            place: nesting.find_nearest_ancestor(self.parents, mask) if mask.any() else empty
            for place, mask in self._location_masks.items()
        }

    def _fill_outermost(self, rows: np.ndarray, operators: np.ndarray) -> np.ndarray:
        """Replace each missing operator (-1) by the outermost operator around the event at the same index in
        ``rows``."""
        filled = operators.copy()
        missing = np.flatnonzero((operators < 0) & (rows >= 0))
        at = rows[missing]
        # At most as many iterations as nesting levels: parents in a file of another tool may form a cycle.
        for _ in range(1 + int(self.trace.events["depth"].max() or 0)):  # type: ignore[arg-type]
            if not missing.size:
                break
            is_operator = self._is_operator[at]
            filled[missing[is_operator]] = at[is_operator]
            at = self.parents[at]
            missing, at = missing[at >= 0], at[at >= 0]
        return filled

    @shared_property
    def _is_operator(self) -> np.ndarray:
        return self.match_categories(categories.OPERATOR_CATEGORIES)

    @shared_property
    def _location_masks(self) -> dict[str, np.ndarray]:
        python = self.match_categories(categories.PYTHON_CATEGORIES)
        nests = {"operator": self._is_operator & ~self.match_events(PLUMBING)}
        if not python.any():
            return nests | dict.fromkeys(("module", "frame"), python)
        is_user_frame = self.match_events(FRAME) & ~self.match_events(LIBRARY)
        return nests | {
            "module": python & self.match_events(_MODULE),
            "frame": python & is_user_frame,
        }


def _measure_engine_iterations(trace: Trace) -> pl.DataFrame:
    return measure_iterations(trace).filter(
        pl.col("engine").is_not_null() & pl.col("device_start").is_not_null()
    )


@cache
def _make_empty_iterations() -> pl.DataFrame:
    return _measure_engine_iterations(Trace(meta={"linked": True}))


ALLOCATES = r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree)|^cuMem(?:Alloc|Free|Create|Map|Unmap|Release)"
_TIMED_CATEGORIES = [*categories.HOST_CATEGORIES, *categories.DEVICE_CATEGORIES]
