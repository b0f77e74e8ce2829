"""HTA's ``hta.common.trace_call_graph.CallGraph``: call stacks of threads, as columns of the frames of a Trace.

Nesting and launches are computed by etloom. One difference: HTA makes all events of a backward thread children of the
last backward annotation of the main thread; here an outermost event is a child of the annotation in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etloom.compat.hta.frames import HtaTrace, frame_indices, import_pandas

if TYPE_CHECKING:
    import pandas as pd

HOST = -1
"""The stream of events of the host, and the parent of events without one."""
BACKWARD, STEP = "## backward ##", "ProfilerStep#"
STACK_COLUMNS = (
    "parent",
    "depth",
    "height",
    "first_kernel_start",
    "last_kernel_end",
    "num_kernels",
    "kernel_dur_sum",
    "kernel_span",
)


class CallStackIdentity(NamedTuple):
    """A thread of a rank."""

    rank: int
    pid: int
    tid: int


@dataclass
class CallStack:
    """The events of a thread: ``df`` in order of time; ``full_df`` the frame of the rank."""

    identity: CallStackIdentity
    df: pd.DataFrame
    full_df: pd.DataFrame

    def get_descendants(self, index: int) -> list[int]:
        """Return the index of an event and those of all below it, also on the GPU."""
        parents = self.full_df["parent"].to_numpy()
        found, level = [index], [index]
        while level:
            level = self.full_df["index"].to_numpy()[np.isin(parents, level)].tolist()
            found += level
        return found

    def get_path_to_root(self, index: int) -> list[int]:
        """Return the index of an event and those of the events around it, innermost first."""
        path = []
        while index != HOST:
            path.append(index)
            index = int(self.full_df.at[index, "parent"])
        return path


class CallGraph:
    """Adds `STACK_COLUMNS` to the frames of a trace, and answers questions about its call stacks.

    The parent of GPU activity is its launch call. height: levels below an event. Of the GPU activity that it and all
    below it launched: num_kernels, kernel_dur_sum, first_kernel_start, last_kernel_end, kernel_span (us).

    Args:
        trace: a Trace that was read.
        ranks: only these; default all.

    Attributes:
        mapping: a row per call stack: rank, pid, tid, label ("main", "bwd", or the name of the first event),
            stack_index, the position in ``call_stacks``.

    Raises:
        ValueError: the trace has none of the ranks.
    """

    def __init__(self, trace: HtaTrace, ranks: Sequence[int] | None = None) -> None:
        self.trace_data = trace
        self.ranks = [rank for rank in ranks or trace.get_ranks() if rank in trace.get_ranks()]
        if not self.ranks:
            raise ValueError(f"the trace has none of the ranks {ranks}")
        self.call_stacks: list[CallStack] = []
        rows = [row for rank in self.ranks for row in self._add_rank(rank)]
        self.mapping = import_pandas().DataFrame(rows, columns=["rank", "pid", "tid", "label", "stack_index"])

    def get_call_stacks(
        self,
        rank: int | None = None,
        pid: int | None = None,
        tid: int | None = None,
        stack_index: int | None = None,
    ) -> Iterator[CallStack]:
        """Yield the call stacks of a rank, process, thread or position; None: of all."""
        chosen = {"rank": rank, "pid": pid, "tid": tid, "stack_index": stack_index}
        for row in self.mapping.to_dict("records"):
            if all(value is None or row[name] == value for name, value in chosen.items()):
                yield self.call_stacks[row["stack_index"]]

    def get_node_attributes(self, index: int, rank: int | None = None) -> pd.Series:
        """Return the row of an event. Raises ValueError if there is none with this index."""
        frame = self._frame(rank)
        if index not in frame.index:
            raise ValueError(f"no event has the index {index}")
        return frame.loc[index]

    def get_csg_of_node(self, index: int, rank: int | None = None) -> CallStack:
        """Return the call stack of an event, of GPU activity that of its launch.

        Raises:
            ValueError: no event has the index, or it is GPU activity of an unknown launch.
        """
        node = self.get_node_attributes(index, rank)
        if node["stream"] != HOST:
            node = self.get_node_attributes(int(node["parent"]), rank)
        place = {"rank": self._rank(rank), "pid": node["pid"], "tid": node["tid"]}
        return next(self.get_call_stacks(**place))

    def get_stack_of_node(
        self, index: int, rank: int | None = None, skip_ancestors: bool = False
    ) -> pd.DataFrame:
        """Return the rows of an event, all below it and, unless ``skip_ancestors``, those around it, by time.

        Raises:
            ValueError: no event has the index, or it is GPU activity of an unknown launch.
        """
        stack = self.get_csg_of_node(index, rank)
        indices = set(stack.get_descendants(index))
        if not skip_ancestors:
            indices |= set(stack.get_path_to_root(index))
        return stack.full_df.loc[sorted(indices)].sort_values("ts", kind="stable")

    def get_gpu_kernels(self, rank: int | None = None) -> pd.DataFrame:
        """Return the rows of all GPU activity of a rank (default: the first)."""
        frame = self._frame(rank)
        return frame.loc[frame["stream"] != HOST]

    def _rank(self, rank: int | None) -> int:
        return self.ranks[0] if rank is None else rank

    def _frame(self, rank: int | None) -> pd.DataFrame:
        return self.trace_data.get_trace(self._rank(rank))

    def _add_rank(self, rank: int) -> Iterator[tuple[object, ...]]:
        """Add the columns to the frame of a rank, and its call stacks; yield their rows of the mapping."""
        frame = self.trace_data.get_trace(rank)
        texts, names = self.trace_data.symbol_table.sym_table, frame["name"].to_numpy()
        is_step, is_backward = (
            np.array([text.startswith(label) for text in texts])[names] for label in (STEP, BACKWARD)
        )
        is_autograd = np.array(["autograd::" in text for text in texts])[names]
        parent = _find_parents(self.trace_data, rank, frame)
        host = (frame["stream"] == HOST).to_numpy()
        threads = frame[host].sort_values("ts", kind="stable").groupby(["pid", "tid"], sort=False)
        rows: dict[tuple[int, int], NDArray[np.int64]] = {
            thread: np.searchsorted(frame["index"].to_numpy(), part["index"].to_numpy())
            for thread, part in threads
        }
        labels = {
            thread: "main" if is_step[at].any() else "bwd" if is_autograd[at].any() else texts[names[at[0]]]
            for thread, at in rows.items()
        }
        for thread, at in rows.items():
            if labels[thread] == "bwd":
                main = np.concatenate([rows[t] for t in rows if labels[t] == "main"] or [at[:0]])
                for is_annotation in (is_backward, is_step):
                    _hang_backward(frame, parent, at, main[is_annotation[main]])
        for name, values in _summarize(frame, parent, host).items():
            frame[name] = values
        for (pid, tid), at in rows.items():
            identity = CallStackIdentity(rank, pid, tid)
            self.call_stacks.append(CallStack(identity, frame.iloc[at], frame))
            yield (*identity, labels[pid, tid], len(self.call_stacks) - 1)


def _find_parents(trace: HtaTrace, rank: int, frame: pd.DataFrame) -> NDArray[np.int64]:
    """Return the parent of each row: the row of the event around it, for GPU activity of its launch; -1 for none."""
    tables = trace.job[rank]
    index = dict(frame_indices(tables).select("id", "index").iter_rows())
    row = {number: place for place, number in enumerate(frame["index"].tolist())}
    around = dict(tables.events.select("id", "parent").drop_nulls().iter_rows())
    launch = dict(tables.launches.select("device_event", "launch").drop_nulls().iter_rows())
    parent = np.full(len(frame), -1)
    for event, number in index.items():
        if number in row:
            above = launch.get(event, around.get(event))
            while above is not None and index.get(above) not in row:  # without a time
                above = around.get(above)
            parent[row[number]] = -1 if above is None else row[index[above]]
    return parent


def _hang_backward(
    frame: pd.DataFrame, parent: NDArray[np.int64], thread: NDArray[np.int64], annotations: NDArray[np.int64]
) -> None:
    """Give the outermost events of a backward thread the annotation (rows) around their begin as parent, in place."""
    start, end = frame["ts"].to_numpy(), frame["end"].to_numpy()
    for row in thread[parent[thread] < 0]:
        inside = annotations[(start[annotations] <= start[row]) & (start[row] < end[annotations])]
        if inside.size:
            parent[row] = inside[-1]


def _summarize(
    frame: pd.DataFrame, parent: NDArray[np.int64], host: NDArray[np.bool_]
) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
    """Return the values of `STACK_COLUMNS` for each row, from the rows of the parents."""
    start, end, dur = (frame[name].to_numpy(dtype=float) for name in ("ts", "end", "dur"))
    depth, above = np.zeros(len(frame), dtype=int), parent.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    height = np.zeros(len(frame), dtype=int)
    count, total = (~host).astype(int), np.where(host, 0.0, dur)
    first, last = np.where(host, np.inf, start), np.where(host, -np.inf, end)
    for level in range(int(depth.max(initial=0)), 0, -1):
        rows = np.flatnonzero(depth == level)
        np.maximum.at(height, parent[rows], height[rows] + 1)
        np.add.at(count, parent[rows], count[rows])
        np.add.at(total, parent[rows], total[rows])
        np.minimum.at(first, parent[rows], first[rows])
        np.maximum.at(last, parent[rows], last[rows])
    has_kernels = count > 0
    index = frame["index"].to_numpy()
    return {
        "parent": np.where(parent >= 0, index[parent], HOST),
        "depth": depth,
        "height": height,
        "first_kernel_start": np.where(has_kernels, first, -1),
        "last_kernel_end": np.where(has_kernels, last, -1),
        "num_kernels": count,
        "kernel_dur_sum": total,
        "kernel_span": np.where(has_kernels, last - first, 0),
    }
