"""Random traces: any values (`traces`, `jobs`), and realistic ones with known links (`LinkedTraceGenerator`).

`traces` and `jobs` are hypothesis strategies: any table of the schema, with any values its columns may hold.

`LinkedTraceGenerator` builds one rank. Threads run trees of operators. Operators launch work on streams, some start a
range that ends on another thread and may be recorded there, some backward operators follow forward ones, and calls wait
for streams. The expected links are kept under the ``position`` of each event, which survives sorting, shuffling and
shifting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from hypothesis import strategies as st

from etloom.core.schema import SEVERITIES, TABLES, Column
from etloom.core.trace import Job, Trace

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _values(dtype: Any) -> st.SearchStrategy[Any]:
    if dtype in (pl.Categorical, pl.String):
        return TEXT
    if dtype == pl.Boolean:
        return st.booleans()
    if dtype == pl.Float64:
        return st.floats()
    low, high = (pl.select(bound(dtype)).item() for bound in (lambda t: t().min(), lambda t: t().max()))
    return st.integers(low, high)


def _of(column: Column) -> st.SearchStrategy[Any]:
    return st.integers(0, 2**31 - 1) if column.name == "id" else _values(column.dtype)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, pl.DataFrame]:
    found = {}
    for name in draw(st.lists(st.sampled_from(sorted(TABLES)), unique=True, max_size=4)):
        height = draw(st.integers(0, 4))
        columns = {
            column.name: pl.Series(
                draw(st.lists(st.none() | _of(column), min_size=height, max_size=height)),
                dtype=pl.String if column.dtype == pl.Categorical else column.dtype,
            )
            for column in TABLES[name].columns
        }
        if name == "stats":
            columns["severity"] = pl.Series([SEVERITIES[row % 3] for row in range(height)], dtype=pl.String)
        found[name] = pl.DataFrame(columns)
    return found


traces = st.builds(Trace, tables(), st.dictionaries(TEXT, JSON, max_size=3))
jobs = st.builds(
    Job,
    st.dictionaries(st.integers(0, 10**6), traces, max_size=3),
    st.dictionaries(TEXT, JSON, max_size=3),
    st.lists(st.tuples(TEXT, st.sampled_from(SEVERITIES), st.integers(1, 9), st.none() | TEXT), max_size=2),
)


DEVICE_STREAMS = (7, 20)


@dataclass
class LinkedTrace:
    """Random events, and the links between them that the linker has to find, by position."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    parent: dict[int, int | None] = field(default_factory=dict)
    launch: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)  # device -> call, operator
    waits: set[tuple[int, int]] = field(default_factory=set)  # call, device event
    forward: dict[int, int] = field(default_factory=dict)
    step: dict[int, int | None] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> int:
        position = len(self.rows)
        self.rows.append({"ph": "X", "pid": 100, "position": position} | row)
        return position

    def host(self, order: random.Random | None = None, shift: int = 0) -> Trace:
        """The profiler's trace; ``order`` shuffles the file, ``shift`` moves all times."""
        rows = list(self.rows)
        if order is not None:
            order.shuffle(rows)
        frame = pl.DataFrame(
            [{"file": at, **row, "ts": row["ts"] + shift} for at, row in enumerate(rows)],
            infer_schema_length=None,
        )
        frame = frame.sort(pl.col("ts"), -pl.col("dur"), "file").drop("file")
        events = TABLES["events"].conform(frame.with_row_index("id"))
        ids = dict(zip(events["position"].to_list(), events["id"].to_list(), strict=True))
        tables = {"events": events}
        if self.syncs:
            syncs = pl.DataFrame([{**row, "event": ids[row["event"]]} for row in self.syncs])
            tables["syncs"] = TABLES["syncs"].conform(syncs)
        return Trace(tables, {"rank": 0, "files": ["profile"], "formats": ["kineto"]})

    def execution_trace(self) -> Trace:
        roots = [{"et_id": 1, "name": "[pytorch|profiler|execution_trace|process]", "tid": 0, "parent": None}]
        nodes = roots + sorted(self.nodes, key=lambda node: node["et_id"])
        rows = {node["et_id"]: at for at, node in enumerate(nodes)}
        frame = pl.DataFrame(
            [
                {**node, "id": at, "parent": rows.get(node["parent"], 0) if at else None}
                for at, node in enumerate(nodes)
            ],
            infer_schema_length=None,
        )
        return Trace({"nodes": TABLES["nodes"].conform(frame)}, {"files": ["et"], "formats": ["et"]})


class LinkedTraceGenerator:
    """Makes one `LinkedTrace`; every boundary on a thread or stream has its own time, so the truth is one."""

    def __init__(self, draw: random.Random, *, threads: int = 3, trees: int = 4) -> None:
        self.draw, self.linked = draw, LinkedTrace()
        self.correlation = self.rf_id = self.seq = 0
        self.free = dict.fromkeys(DEVICE_STREAMS, 0)
        self.sent: dict[int, tuple[int, int]] = {}  # stream -> (time of launch, device event) of the last one
        self.forwards: dict[int, int] = {}  # sequence number -> innermost forward operator
        now = 0
        # Threads run one after the other, so that what was launched last is known.
        for tid in range(1, threads + 1):
            number = draw.choice((None, tid))
            start = now
            step = (
                self.operator(tid, f"ProfilerStep#{number}", start, None, cat="user_annotation")
                if number
                else None
            )
            at = start + 1
            for _ in range(draw.randint(1, trees)):
                at = self.tree(tid, at, step, depth=3, outer=None) + draw.choice((0, 1, 2000, 2_000_000))
            now = at + 1
            if step is not None:
                self.linked.rows[step]["dur"] = now - start
            for row in self.linked.rows:
                if row["tid"] == tid and row["pid"] == 100 and row["ts"] >= start:
                    self.linked.step[row["position"]] = number
        for device, (call, _) in self.linked.launch.items():
            self.linked.step[device] = None if call is None else self.linked.step[call]

    def operator(
        self, tid: int, name: str, ts: int, parent: int | None, cat: str = "cpu_op", **row: Any
    ) -> int:
        self.rf_id += 1
        position = self.linked.add(cat=cat, name=name, ts=ts, dur=0, tid=tid, rf_id=self.rf_id, **row)
        self.linked.parent[position] = parent
        above = None if parent is None else self.linked.rows[parent].get("rf_id")
        self.linked.nodes.append(
            {
                "et_id": 10 + self.rf_id,
                "rf_id": self.rf_id,
                "name": name,
                "tid": tid,
                "parent": 1 if above is None else 10 + above,
            }
        )
        return position

    def tree(self, tid: int, start: int, parent: int | None, depth: int, outer: int | None) -> int:
        """An operator from ``start`` on with all that it does; the time of its end."""
        draw, linked = self.draw, self.linked
        numbers: dict[str, int] = {}
        forward = None
        if draw.random() < 0.3:
            self.seq += 1
            numbers = {"seq_id": self.seq}
        elif tid > 1 and self.forwards and draw.random() < 0.5:
            seq = draw.choice(sorted(self.forwards))
            numbers, forward = {"seq_id": seq, "fwd_tid": 1}, self.forwards[seq]
        me = self.operator(tid, f"aten::{draw.choice('abc')}{tid}", start, parent, **numbers)
        if forward is not None:
            linked.forward[me] = forward
        elif numbers and tid == 1:
            self.forwards[numbers["seq_id"]] = me
        at = start + draw.choice((0, 1, 7))
        for _ in range(draw.randint(0, 3)):
            act = draw.random()
            if depth and act < 0.5:
                at = self.tree(tid, at, me, depth - 1, me) + draw.choice((0, 3))
            elif act < 0.75:
                at = self.launch(tid, at + 1, me)
            elif act < 0.85:
                late = self.operator(tid, "gloo:send", at, None, cat="user_annotation")
                linked.rows[late]["dur"] = 5_000_000
                if draw.random() < 0.5:  # drawn on the thread on which it ended
                    linked.rows[late]["tid"] = 900 + tid
                at += 1
            elif self.sent:
                at = self.synchronise(tid, at + 1, me)
        end = at + draw.randint(1, 9)
        linked.rows[me]["dur"] = end - start
        return end

    def launch(self, tid: int, at: int, operator: int) -> int:
        draw, linked = self.draw, self.linked
        self.correlation += 1
        known = draw.random() < 0.9
        call = None
        if known:
            call = linked.add(
                cat=draw.choice(("cuda_runtime", "cuda_driver")),
                name="anyLaunch",
                ts=at,
                dur=4,
                tid=tid,
                correlation=self.correlation,
            )
            linked.parent[call] = operator
        stream = draw.choice(DEVICE_STREAMS)
        for _ in range(draw.choice((1, 1, 1, 3))):
            begin = max(self.free[stream], at + draw.randint(1, 50))
            device = linked.add(
                cat=draw.choice(("kernel", "gpu_memset")),
                name="work",
                ts=begin,
                dur=draw.randint(0, 30),
                pid=0,
                tid=stream,
                stream=stream,
                device=0,
                correlation=self.correlation,
            )
            self.free[stream] = begin + linked.rows[device]["dur"] + 1
            linked.launch[device] = (call, operator if known else None)
            self.sent[stream] = (at if known else begin, device)
        return at + 5

    def synchronise(self, tid: int, at: int, operator: int) -> int:
        """A recorded wait for one stream, after all that was launched on it."""
        stream = self.draw.choice(sorted(self.sent))
        at = max(at, self.sent[stream][0] + 1)
        end = max(at + 2, self.free[stream] + 1)
        self.correlation += 1
        call = self.linked.add(
            cat="cuda_runtime",
            name="cudaStreamSynchronize",
            ts=at,
            dur=end - at,
            tid=tid,
            correlation=self.correlation,
        )
        self.linked.parent[call] = operator
        seen = self.linked.add(
            cat="cuda_sync",
            name="Stream Sync",
            ts=at + 1,
            dur=end - at - 1,
            pid=0,
            tid=stream,
            stream=stream,
            device=0,
            correlation=self.correlation,
        )
        self.linked.syncs.append({"event": seen, "kind": "Stream Sync", "wait_stream": None})
        self.linked.waits.add((call, self.sent[stream][1]))
        return end
