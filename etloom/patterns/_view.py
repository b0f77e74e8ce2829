"""A rank as the patterns see it. Each part is worked out when it is first asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from etloom import kinds, stacks
from etloom.activity import Activity, activity, device_work, steps
from etloom.intervals import Intervals
from etloom.trace import Trace

_MODULE = r"^nn\.Module: (.*)$"
_FRAME = r"^.*\(\d+\): "
_LIBRARY = r"(?:^|/)(?:torch|importlib|contextlib|threading|runpy|_weakrefset|<frozen|site-packages/torch)(?:/|\.|$|\()"
LOADS_DATA = r"^enumerate\(DataLoader\)|DataLoader.*__next__|dataloader\.py\(\d+\): __next__"
CAUSES = ("data", "sync", "allocator", "launch", "device")
"""Of a gap: the host was loading data, was released from a wait after the device had run dry, allocated device
memory, or was late for another reason; or the work was there in time and the device took it late (a stream that
waited, the delay of a launch)."""


class View:
    """One linked rank. The tables are described at the properties."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def activity(self) -> Activity:
        return activity(self.trace)

    @cached_property
    def span_ns(self) -> int:
        """From the first to the last thing that the trace times, host or device."""
        timed = self.trace.events.filter(pl.col("dur").is_not_null() & pl.col("cat").is_in(_TIMED))
        return timed.select((pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()).item() or 0

    @cached_property
    def first_step(self) -> int | None:
        marked = steps(self.trace)
        return marked["step"][0] if marked.height > 1 else None

    @cached_property
    def work(self) -> pl.DataFrame:
        """Device work by start: id, cat, name, kind, ts, end, dur, stream, step, launch (id, ts, end of the call)."""
        events = self.trace.events
        call = self.trace.launches.unique("device_event", keep="first").join(
            events.select("id", launch_ts="ts", launch_end=pl.col("ts") + pl.col("dur").fill_null(0)),
            left_on="launch",
            right_on="id",
            how="left",
        )
        return (
            device_work(self.trace)
            .join(call, left_on="id", right_on="device_event", how="left")
            .select(
                *("id", "cat", "kind", "ts", "dur", "device", "stream", "step"),
                *("launch", "launch_ts", "launch_end"),
                pl.col("name").cast(pl.String),
                end=pl.col("ts") + pl.col("dur"),
            )
            .sort("ts", "id")
        )

    @cached_property
    def host(self) -> pl.DataFrame:
        """Timed host events by start: id, cat, name, ts, end, dur, pid, tid, step, depth."""
        timed = pl.col("cat").is_in(list(kinds.HOST)) & pl.col("dur").is_not_null()
        return self.trace.events.filter(timed).select(
            *("id", "cat", "ts", "dur", "pid", "tid", "step", "depth"),
            pl.col("name").cast(pl.String),
            end=pl.col("ts") + pl.col("dur"),
        )

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Host calls that waited for the device: id, ts, end, kind, in order of end."""
        waits = self.trace.waits.select("event", kind=pl.col("kind").cast(pl.String)).unique("event")
        calls = self.host.filter(pl.col("cat").is_in(list(kinds.RUNTIME)))
        return calls.join(waits, left_on="id", right_on="event").select("id", "ts", "end", "kind").sort("end")

    @cached_property
    def loading(self) -> Intervals:
        """When some thread waited for the data loader."""
        loads = self.host.filter(pl.col("name").str.contains(LOADS_DATA))
        return Intervals.of(loads["ts"], loads["end"])

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """When no stream had work: start, end, gap_ns, cause (CAUSES), event (the host call to blame: the one that
        waited, or that launched what ended the gap), step, stream and name of that work, inside (the last call that
        allocated)."""
        work, busy = self.work, self.activity.busy
        if self.activity.basis != "device" or len(busy) < 2:
            return pl.DataFrame(schema=_GAP)
        starts, ends = busy.ends[:-1], busy.starts[1:]
        first = np.searchsorted(work["ts"].to_numpy(), ends)
        after = work[first]
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
                "cause": pl.Series(np.array(CAUSES)[cause], dtype=pl.String),
                "event": pl.Series(blamed).replace(-1, None),
                **{name: after[name] for name in ("step", "stream", "name")},
            }
        ).select(pl.col(name).cast(dtype) for name, dtype in _GAP.items())

    @cached_property
    def allocations(self) -> pl.DataFrame:
        """Calls that take device memory from the driver or give it back, in order of end."""
        return self.host.filter(
            pl.col("cat").is_in(list(kinds.RUNTIME)) & pl.col("name").str.contains(ALLOCATES)
        ).sort("end")

    def where(self, events: pl.Series) -> pl.DataFrame:
        """operator, module, frame around each of these host events (ids, null allowed): innermost; frame: of code
        that is no library's, where Python was recorded."""
        rows = self._rows(events)
        found = {}
        for name, wanted in self._nests.items():
            at = stacks.nearest(self._parent, wanted, rows) if len(self._parent) else rows
            texts = (
                self.trace.events["name"][np.maximum(at, 0)].cast(pl.String)
                if len(at)
                else pl.Series([], dtype=pl.String)
            )
            found[name] = texts.set(pl.Series(at < 0), None) if len(at) else texts
        return pl.DataFrame(found, schema=dict.fromkeys(found, pl.String)).with_columns(
            pl.col("module").str.extract(_MODULE)
        )

    def _rows(self, ids: pl.Series) -> np.ndarray:
        known = self.trace.events["id"].to_numpy()
        wanted = ids.cast(pl.Int64).fill_null(-1).to_numpy()
        row = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        return np.where((wanted >= 0) & (known[row] == wanted), row, -1) if len(known) else row

    @cached_property
    def _parent(self) -> np.ndarray:
        return self._rows(self.trace.events["parent"])

    @cached_property
    def _nests(self) -> dict[str, np.ndarray]:
        events = self.trace.events
        python = stacks.among(events["cat"], kinds.PYTHON)
        own = stacks.asked(
            events["name"], lambda name: name.str.contains(_FRAME) & ~name.str.contains(_LIBRARY)
        )
        return {
            "operator": stacks.among(events["cat"], kinds.OPERATORS),
            "module": python & stacks.asked(events["name"], lambda name: name.str.contains(_MODULE)),
            "frame": python & own,
        }

    @staticmethod
    def _last(calls: pl.DataFrame, until: np.ndarray) -> np.ndarray:
        """The call (by end) that ended last before each time, -1 for none."""
        return np.searchsorted(calls["end"].to_numpy(), until, side="right") - 1


ALLOCATES = r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree)|^cuMem(?:Alloc|Free|Create|Map|Unmap|Release)"
_JUST_BEFORE = 5_000
"""A call that waits comes back a little after what it waited for, ns."""
_TIMED = [*kinds.HOST, *kinds.DEVICE]
_GAP = {
    "start": pl.Int64,
    "end": pl.Int64,
    "gap_ns": pl.Int64,
    "cause": pl.String,
    "event": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "name": pl.String,
}
