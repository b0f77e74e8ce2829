"""A rank as the patterns see it. Each part is worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.arrays import take_rows
from etloom.core.intervals import EMPTY, Intervals, find_innermost
from etloom.core.trace import Trace
from etloom.timeline.activity import Activity, compute_activity, find_steps, select_launched_events

_MODULE = r"^nn\.Module: (.*)$"
_FRAME = r"^.*\(\d+\): "
_LIBRARY = r"(?:^|/)(?:torch|importlib|contextlib|threading|runpy|_weakrefset|<frozen|site-packages/torch)(?:/|\.|$|\()"
LOADS_DATA = r"^enumerate\(DataLoader\)|DataLoader.*__next__|dataloader\.py\(\d+\): __next__"
PLUMBING = (
    r"^aten::(?:copy_|_to_copy|to|contiguous|clone|_reshape_copy|fill_|zero_|empty\w*|as_strided"
    r"|_local_scalar_dense)$"
)
"""Operators that others are made of: that one of them is slow does not say where."""
CAUSES = ("data", "sync", "allocator", "launch", "device")
"""Of a gap: the host was loading data, was released from a wait after the device had run dry, allocated device
memory, or was late for another reason; or the work was there in time and the device took it late (a stream that
waited, the delay of a launch)."""


class View:
    """One linked rank. The tables are described at the properties."""

    def __init__(self, trace: Trace, awaiting: Callable[[], Intervals] = lambda: EMPTY) -> None:
        self.trace = trace
        self._awaiting = awaiting

    @cached_property
    def activity(self) -> Activity:
        return compute_activity(self.trace)

    @cached_property
    def busy(self) -> Intervals:
        """When anything of its activity ran."""
        return self.activity.busy

    @cached_property
    def awaiting(self) -> Intervals:
        """When it stood in a communication to which another rank had yet to come."""
        return self._awaiting()

    @cached_property
    def span_ns(self) -> int:
        """From the first to the last thing that the trace times, host or device."""
        timed = self.trace.events.lazy().filter(pl.col("dur").is_not_null() & pl.col("cat").is_in(_TIMED))
        span = (pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()
        return timed.select(span).collect().item() or 0

    @cached_property
    def marked(self) -> pl.DataFrame:
        """step, start, end of the marked steps."""
        return find_steps(self.trace)

    @cached_property
    def stepped(self) -> Intervals:
        """When a marked step ran on the host."""
        return Intervals.of(self.marked["start"], self.marked["end"])

    @property
    def steady_from(self) -> int | None:
        """When the first of several marked steps has ended, which may warm up; null where no others are marked."""
        return self.marked["end"][0] if self.marked.height > 1 else None

    @property
    def unsure(self) -> str:
        """Why nothing tells where warm-up ends; empty where it is told."""
        return ("no step is marked", "only one step is marked", "")[min(self.marked.height, 2)]

    def steps_at(self, times: pl.Series) -> pl.Series:
        """The marked step in which each of these lies, the innermost of several; null for none."""
        return take_rows(self.marked["step"], find_innermost(self.marked["start"], self.marked["end"], times))

    def step_at(self, time: int) -> int | None:
        step: int | None = self.steps_at(pl.Series([time]))[0]
        return step

    @cached_property
    def work(self) -> pl.DataFrame:
        """Device work by start: id, cat, name, kind, ts, end, dur, stream, launch (id, ts, end of the call), and its
        step: that of its launch, and of what no recorded call launched the one in which it starts."""
        work = select_launched_events(
            self.trace,
            *("id", "cat", "kind", "name", "ts", "end", "dur", "device", "stream", "step"),
            *("launch", "launch_ts", "launch_end"),
        )
        during = pl.when(pl.col("launch").is_null()).then(self.steps_at(work["ts"]))
        return work.with_columns(step=pl.coalesce("step", during))

    @cached_property
    def _texts(self) -> pl.Series:
        return self.trace.events["name"].unique()

    @cached_property
    def _work_texts(self) -> pl.Series:
        return self.work["name"].unique()

    def asked(self, question: Callable[[pl.Expr], pl.Expr]) -> np.ndarray:
        """Of which events the name answers a question with yes."""
        return arrays.match_text(self.trace.events["name"], question, texts=self._texts)

    def named(self, work: pl.DataFrame, pattern: str) -> pl.Series:
        """Whether the name of each of these rows of `work` fits a regular expression."""
        found = arrays.match_text(
            work["name"], lambda name: name.str.contains(pattern), texts=self._work_texts
        )
        return pl.Series(found)

    @cached_property
    def _ids_are_rows(self) -> bool:
        """As of a table that was read whole."""
        ids = self.trace.events["id"].to_numpy()
        return bool(ids.size and ids[0] == 0 and ids[-1] == ids.size - 1 and (ids[1:] > ids[:-1]).all())

    def rows_of(self, ids: pl.Series) -> np.ndarray:
        """The row of each of these events, -1 for null and for one that is not there."""
        if not self._ids_are_rows:
            return arrays.rows_of_ids(self.trace.events, ids)
        rows = arrays.to_array(ids, -1).astype(np.int64)
        rows[rows >= self.trace.events.height] = -1
        return rows

    @cached_property
    def parents(self) -> np.ndarray:
        """The row of the event around each event, -1 for none."""
        rows = self.rows_of(self.trace.events["parent"])
        return rows.astype(np.int32) if len(rows) < np.iinfo(np.int32).max else rows

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """The kernels of `work`: step, device, stream, launch, name, ts, end, dur."""
        columns = ("step", "device", "stream", "launch", "name", "ts", "end", "dur")
        return self.work.select(columns).filter(self.work["cat"].is_in(["kernel", "Kernel"]))

    def host(self, names: str = "", categories: Collection[str] = categories.HOST_CATEGORIES) -> pl.DataFrame:
        """Timed host events by start whose name fits a regular expression: id, parent, cat, name (text), ts, end, dur,
        pid, tid, step."""
        events = self.trace.events
        chosen = events.select(
            pl.col("cat").is_in(list(categories)) & pl.col("dur").is_not_null()
        ).to_series()
        if names:
            chosen &= pl.Series(self.asked(lambda name: name.str.contains(names)))
        columns = ("id", "parent", "cat", "ts", "dur", "pid", "tid", "step", "name")
        return (
            events.select(columns)
            .filter(chosen)
            .with_columns(pl.col("name").cast(pl.String), end=pl.col("ts") + pl.col("dur"))
        )

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Host calls that waited for the device: id, ts, end, in order of end."""
        events = self.trace.events
        rows = np.unique(arrays.rows_of_ids(events, self.trace.sync_dependencies["event"]))
        calls = events.select("id", "ts", "cat", "dur")[rows[rows >= 0]]
        calls = calls.filter(
            pl.col("cat").is_in(list(categories.RUNTIME_CATEGORIES)) & pl.col("dur").is_not_null()
        )
        return calls.select("id", "ts", end=pl.col("ts") + pl.col("dur")).sort("end", maintain_order=True)

    @cached_property
    def loads(self) -> pl.DataFrame:
        """The host's waits for the data loader, as `host`: of a frame of Python and a range in it the outer one."""
        return select_outermost(self.host(LOADS_DATA))

    @cached_property
    def loading(self) -> Intervals:
        """When some thread waited for the data loader."""
        return Intervals.of(self.loads["ts"], self.loads["end"])

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """When no stream had work: start, end, gap_ns, cause (CAUSES), event (the host call to blame: the one that
        waited, or that launched what ended the gap), step, stream and name of that work, inside (the last call that
        allocated)."""
        work, busy = self.work, self.busy
        if self.activity.basis != "device" or len(busy) < 2:
            return pl.DataFrame(schema=_GAP)
        starts, ends = busy.ends[:-1], busy.starts[1:]
        first = np.searchsorted(work["ts"].to_numpy(), ends)
        after = work.select("launch", "launch_ts", "step", "stream", "name")[first]
        called = after["launch_ts"].fill_null(0).to_numpy()
        known = after["launch"].is_not_null().to_numpy()
        # The host is late where its call came after the device had run dry.
        late = known & (called > starts)
        until = np.where(late, called, starts)
        loaded = self.loading.covered(starts, until) * 2 > np.maximum(until - starts, 1)
        wait = self._last(self.waits, until)
        released = self.waits["end"].to_numpy()[wait] if self.waits.height else np.zeros(len(until), np.int64)
        synced = late & (wait >= 0) & (released >= starts - _JUST_BEFORE)
        allocation = self._last(self.allocations, until)
        allocated = late & (allocation >= 0)
        if self.allocations.height:
            allocated &= self.allocations["dur"].to_numpy()[allocation] * 2 > until - starts
            allocated &= self.allocations["end"].to_numpy()[allocation] > starts
        cause = np.select([late & loaded, synced, allocated, late], [0, 1, 2, 3], 4)
        blamed = after["launch"].to_physical().cast(pl.Int64).fill_null(-1).to_numpy().copy()
        for at, calls, index in ((1, self.waits, wait), (2, self.allocations, allocation)):
            chosen = cause == at
            if chosen.any():
                blamed[chosen] = calls["id"].to_numpy()[index[chosen]]
        return pl.DataFrame(
            {
                "start": starts,
                "end": ends,
                "gap_ns": ends - starts,
                "cause": pl.Series(CAUSES, dtype=_CAUSE)[cause],
                "event": pl.Series(blamed).replace(-1, None),
                **{name: after[name] for name in ("step", "stream", "name")},
            }
        ).select(pl.col(name).cast(dtype) for name, dtype in _GAP.items())

    @cached_property
    def allocations(self) -> pl.DataFrame:
        """Calls that take device memory from the driver or give it back, in order of end."""
        return self.host(ALLOCATES, categories.RUNTIME_CATEGORIES).sort("end")

    def where(self, events: pl.Series) -> pl.DataFrame:
        """operator, module, frame around each of these host events (ids, null allowed): innermost. operator: not one
        that only serves another (PLUMBING), and where all do, the outermost; frame: of code that is no library's, where
        Python was recorded."""
        rows = self.rows_of(events)
        names = self.trace.events["name"]
        found = {}
        for place, around in self._around.items():
            at = np.where(rows < 0, -1, around[rows]) if around.size else np.full_like(rows, -1)
            found[place] = take_rows(names, self._outermost(rows, at) if place == "operator" else at)
        found["module"] = arrays.map_text(found["module"], lambda name: name.str.extract(_MODULE))
        return pl.DataFrame(found)

    @cached_property
    def _around(self) -> dict[str, np.ndarray]:
        """Of each event the row of the innermost operator (but PLUMBING), module, frame around it, -1 for none; empty
        where there is none at all."""
        nothing = np.zeros(0, np.int32)
        return {
            place: arrays.find_nearest_ancestor(self.parents, wanted) if wanted.any() else nothing
            for place, wanted in self._nests.items()
        }

    def _outermost(self, rows: np.ndarray, found: np.ndarray) -> np.ndarray:
        """The operators found for these rows, and where none was found the outermost around them."""
        filled = found.copy()
        asked = np.flatnonzero((found < 0) & (rows >= 0))
        at = rows[asked]
        # No more often than events are nested: parents of a file from elsewhere may lead around in a circle.
        for _ in range(1 + int(self.trace.events["depth"].max() or 0)):  # type: ignore[arg-type]
            if not asked.size:
                break
            is_one = self._operators[at]
            filled[asked[is_one]] = at[is_one]
            at = self.parents[at]
            asked, at = asked[at >= 0], at[at >= 0]
        return filled

    @cached_property
    def _operators(self) -> np.ndarray:
        return arrays.is_in(self.trace.events["cat"], categories.OPERATOR_CATEGORIES)

    @cached_property
    def _nests(self) -> dict[str, np.ndarray]:
        events = self.trace.events
        python = arrays.is_in(events["cat"], categories.PYTHON_CATEGORIES)
        nests = {"operator": self._operators & ~self.asked(lambda name: name.str.contains(PLUMBING))}
        if not python.any():
            return nests | dict.fromkeys(("module", "frame"), python)
        own = self.asked(lambda name: name.str.contains(_FRAME) & ~name.str.contains(_LIBRARY))
        return nests | {
            "module": python & self.asked(lambda name: name.str.contains(_MODULE)),
            "frame": python & own,
        }

    @staticmethod
    def _last(calls: pl.DataFrame, until: np.ndarray) -> np.ndarray:
        """The call (by end) that ended last before each time, -1 for none."""
        return np.searchsorted(calls["end"].to_numpy(), until, side="right") - 1


def select_outermost(events: pl.DataFrame) -> pl.DataFrame:
    """Of host events (pid, tid, ts, end) those that begin in no other of their thread, by start."""
    ordered = events.sort("ts", "end", descending=(False, True), maintain_order=True)
    before = pl.col("end").cum_max().shift(1).over("pid", "tid")
    return ordered.filter((before <= pl.col("ts")).fill_null(True))


ALLOCATES = r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree)|^cuMem(?:Alloc|Free|Create|Map|Unmap|Release)"
_JUST_BEFORE = 5_000
"""A call that waits comes back a little after what it waited for, ns."""
_TIMED = [*categories.HOST_CATEGORIES, *categories.DEVICE_CATEGORIES]
_CAUSE = pl.Enum(CAUSES)
_GAP: dict[str, pl.DataType | type[pl.DataType]] = {
    "start": pl.Int64,
    "end": pl.Int64,
    "gap_ns": pl.Int64,
    "cause": _CAUSE,
    "event": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "name": pl.Categorical,
}
