"""Analyses on small traces: what they refuse, what they promise, and properties on random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from etloom.core import categories, registry
from etloom.core.errors import AnalysisError, EtloomError, UnknownName
from etloom.core.trace import Trace

ALL = [
    "steps",
    "temporal-breakdown",
    "comm-overlap",
    "kernel-overlap",
    "kernel-breakdown",
    "top-ops",
    "link-quality",
]
WINDOWED = ["temporal-breakdown", "comm-overlap", "kernel-overlap"]


def analyze(trace: Trace, name: str, **options: Any) -> pl.DataFrame:
    return registry.get("analyses", name).analyze(trace, **options)


def linked(events: list[dict[str, Any]]) -> Trace:
    """A linked trace of events given by cat, name, ts, dur and what else matters."""
    frame = pl.DataFrame(events).sort("ts", -pl.col("dur"), maintain_order=True).with_row_index("id")
    return Trace({"events": frame}, {"rank": 0, "linked": True})


KERNEL = {
    "computation": "gemm",
    "communication": "ncclDevKernel_AllReduce",
    "other": "job_exe",
    "memory": "dma",
}

DEVICE_WORK = st.lists(
    st.tuples(st.sampled_from(sorted(KERNEL)), st.integers(0, 30), st.integers(1, 12)),
    min_size=1,
    max_size=10,
)


def on_device(work: list[tuple[str, int, int]], shift: int = 0, step: tuple[int, int] | None = None) -> Trace:
    events = [
        {"cat": "mtia_ccp_events", "name": KERNEL[kind], "ts": ts + shift, "dur": dur}
        for kind, ts, dur in work
    ]
    if step:
        mark = {"cat": "user_annotation", "name": "ProfilerStep#3", "ts": step[0] + shift, "dur": step[1]}
        events.append(mark)
    return linked(events)


def ticks(work: list[tuple[str, int, int]], kind: str) -> set[int]:
    return {t for which, ts, dur in work if which == kind for t in range(ts, ts + dur)}


@pytest.mark.slow
@given(DEVICE_WORK, st.integers(0, 30), st.integers(1, 20))
def test_temporal_breakdown_is_that_of_ticks(
    work: list[tuple[str, int, int]], start: int, length: int
) -> None:
    answer = analyze(on_device(work, step=(start, length)), "temporal-breakdown")
    by_kind = {kind: ticks(work, kind) for kind in categories.KERNEL_TYPES}
    busy = set().union(*by_kind.values())
    whole = set(range(min(busy), max(busy) + 1))
    for row, window in zip(
        answer.iter_rows(named=True), (set(range(start, start + length)), whole), strict=True
    ):
        seen: set[int] = set()
        for part, kind in (
            ("compute_ns", "computation"),
            ("exposed_communication_ns", "communication"),
            ("exposed_memory_ns", "memory"),
            ("exposed_other_ns", "other"),
        ):
            assert row[part] == len((by_kind[kind] - seen) & window)
            seen |= by_kind[kind]
        assert row["span_ns"] == len(window)
        assert row["idle_ns"] == len(window - busy)
        assert row["busy_ns"] == len(window & busy)
        assert sum(row[part] for part in row if part.endswith("_pct")) == pytest.approx(100)


@pytest.mark.slow
@given(DEVICE_WORK)
def test_overlaps_exclude_each_other_and_sum_to_the_busy_time(work: list[tuple[str, int, int]]) -> None:
    answer = analyze(on_device(work), "kernel-overlap")
    by_kind = {kind: ticks(work, kind) for kind in categories.KERNEL_TYPES}
    busy = set().union(*by_kind.values())
    expected: dict[str, int] = {}
    for tick in busy:
        together = " + ".join(kind for kind in categories.KERNEL_TYPES if tick in by_kind[kind])
        expected[together] = expected.get(together, 0) + 1
    assert dict(answer.select("kinds", "time_ns").rows()) == expected
    assert answer["time_pct"].sum() == pytest.approx(100)


@pytest.mark.slow
@given(DEVICE_WORK)
def test_overlapped_and_exposed_communication_are_all_of_it(work: list[tuple[str, int, int]]) -> None:
    row = analyze(on_device(work), "comm-overlap").row(0, named=True)
    communication, computation = ticks(work, "communication"), ticks(work, "computation")
    assert row["communication_ns"] == len(communication)
    assert row["overlapped_ns"] == len(communication & computation)
    assert row["exposed_ns"] == len(communication - computation)
    if communication:
        assert row["overlap_pct"] == pytest.approx(
            100 * len(communication & computation) / len(communication)
        )
    else:
        assert row["overlap_pct"] is None


@pytest.mark.slow
@given(DEVICE_WORK, st.sampled_from(WINDOWED), st.integers(-(10**6), 2 * 10**18))
def test_when_a_run_happened_does_not_matter(work: list[tuple[str, int, int]], name: str, shift: int) -> None:
    here, there = (analyze(on_device(work, by, step=(2, 20)), name) for by in (0, shift))
    assert_frame_equal(*(answer.select(pl.exclude("start_ns")) for answer in (here, there)))


@pytest.mark.slow
@given(DEVICE_WORK, st.sampled_from(WINDOWED), st.data())
def test_work_may_be_cut_in_two(work: list[tuple[str, int, int]], name: str, data: st.DataObject) -> None:
    kind, ts, dur = work[0]
    cut = data.draw(st.integers(0, dur - 1))
    pieces = [(kind, ts, cut), (kind, ts + cut, dur - cut), *work[1:]]
    assert_frame_equal(analyze(on_device(pieces), name), analyze(on_device(work), name))


HOST_WORK = st.lists(
    st.tuples(
        st.sampled_from(["aten::mm", "c10d::send", "gloo:send"]),
        st.integers(1, 3),
        st.integers(0, 30),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@given(HOST_WORK)
def test_the_host_computes_while_a_thread_is_not_in_a_communication_call(
    work: list[tuple[str, int, int, int]],
) -> None:
    events = [
        {
            "cat": "user_annotation" if name == "gloo:send" else "cpu_op",
            "name": name,
            "tid": tid,
            "ts": ts,
            "dur": dur,
        }
        for name, tid, ts, dur in work
    ]

    def on(thread: int, called: str) -> set[int]:
        return {
            t for name, tid, ts, dur in work if (name, tid) == (called, thread) for t in range(ts, ts + dur)
        }

    computes: set[int] = set().union(*(on(tid, "aten::mm") - on(tid, "c10d::send") for tid in (1, 2, 3)))
    speaks: set[int] = set().union(
        *(on(tid, name) for tid in (1, 2, 3) for name in ("c10d::send", "gloo:send"))
    )
    row = analyze(linked(events), "temporal-breakdown").row(0, named=True)
    assert row["basis"] == "host"
    assert row["compute_ns"] == len(computes)
    assert row["exposed_communication_ns"] == len(speaks - computes)
    assert row["busy_ns"] == len(speaks | computes)
    assert row["idle_ns"] == row["span_ns"] - row["busy_ns"]


NESTS = st.recursive(
    st.tuples(st.sampled_from("ab"), st.just(())),
    lambda inner: st.tuples(st.sampled_from("ab"), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.lists(NESTS, min_size=1, max_size=3))
def test_operators_share_out_their_threads_time(nests: list[Any]) -> None:
    """Each operator takes 1 ns before, between and after what it calls; every second one launches a kernel."""
    events: list[dict[str, Any]] = []
    launches: list[dict[str, int]] = []
    expected: dict[str, dict[str, int]] = {}

    def enter(
        nest: Any, parent: int | None, depth: int, now: int, around: tuple[str, ...]
    ) -> tuple[int, int]:
        name, inner = nest
        mine = len(events)
        events.append({"cat": "cpu_op", "name": name, "ts": now, "parent": parent, "depth": depth})
        figures = expected.setdefault(name, {"count": 0, "self": 0, "total": 0, "device": 0})
        device = 100 if mine % 2 else 0
        if device:
            launches.append({"operator": mine, "device_event": 1000 + mine})
        end, causes = now + 1, device
        for nest_inside in inner:
            end, caused = enter(nest_inside, mine, depth + 1, end, (*around, name))
            end, causes = end + 1, causes + caused
        events[mine]["dur"] = end - now
        figures["count"] += 1
        figures["self"] += len(inner) + 1
        if name not in around:
            figures["total"] += end - now
            figures["device"] += causes
        return end, causes

    now = 0
    for nest in nests:
        now, _ = enter(nest, None, 0, now + 1, ())
    for launch in launches:
        events.append({"cat": "kernel", "name": "k", "ts": 2000, "dur": 100, "id": launch["device_event"]})
    frame = pl.DataFrame(
        [{"id": row, **event} for row, event in enumerate(events)],
        infer_schema_length=None,
        schema_overrides={"parent": pl.UInt32, "depth": pl.Int16},
    )
    trace = Trace(
        {"events": frame, **({"launches": pl.DataFrame(launches)} if launches else {})}, {"linked": True}
    )
    answer = analyze(trace, "top-ops")
    assert {row["name"] for row in answer.iter_rows(named=True)} == set(expected)
    for row in answer.iter_rows(named=True):
        figures = expected[row["name"]]
        assert (row["count"], row["self_ns"], row["total_ns"]) == (
            figures["count"],
            figures["self"],
            figures["total"],
        )
        assert row["device_ns"] == (figures["device"] if launches else None)
    assert answer["self_ns"].sum() == sum(
        e["dur"] for e in events if e["cat"] == "cpu_op" and e["depth"] == 0
    )


def test_statistics_are_right_for_any_number_of_names() -> None:
    events = [
        {"cat": "kernel", "name": f"k{number}", "ts": 100 * number + 10 * call, "dur": number + call}
        for number in range(1, 301)
        for call in range(3)
    ]
    answer = analyze(linked(events), "kernel-breakdown")
    assert answer.height == 300
    for row in answer.iter_rows(named=True):
        number = int(row["name"][1:])
        assert (row["total_ns"], row["mean_ns"], row["min_ns"], row["max_ns"]) == (
            *(3 * number + 3, number + 1),
            *(number, number + 2),
        )
        assert (row["count"], row["std_ns"], row["kind"]) == (3, 1, "computation")
    assert answer["total_ns"].is_sorted(descending=True)


def test_a_wait_in_a_communication_call_is_not_computation_but_a_backends_range_may_be() -> None:
    """The thread that waits does not compute; one that has started an asynchronous all-reduce may."""
    base = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100, "pid": 1, "tid": 1},
    ]
    for name, cat, exposed in (("c10d::allreduce_", "cpu_op", 30), ("gloo:all_reduce", "user_annotation", 0)):
        trace = linked([*base, {"cat": cat, "name": name, "ts": 20, "dur": 30, "pid": 1, "tid": 1}])
        row = analyze(trace, "comm-overlap").row(0, named=True)
        assert (row["basis"], row["communication_ns"], row["exposed_ns"]) == ("host", 30, exposed)


def test_gpu_activity_determines_the_basis() -> None:
    host = {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 0, "dur": 100, "pid": 1, "tid": 1}
    kernel = {"cat": "kernel", "name": "gemm", "ts": 500, "dur": 7, "pid": 0, "tid": 7}
    row = analyze(linked([host, kernel]), "temporal-breakdown").row(0, named=True)
    assert (row["basis"], row["span_ns"], row["compute_ns"]) == ("device", 7, 7)


def test_ranges_without_end_are_not_work() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 10, "dur": 7},
        {"cat": "kernel", "name": "gemm", "ts": 90, "dur": None},
    ]
    assert analyze(linked(events), "kernel-breakdown").select("count", "total_ns").row(0) == (1, 7)
    assert analyze(linked(events), "temporal-breakdown")["span_ns"].to_list() == [7]


EMPTY = Trace({}, {"rank": 5, "linked": True})


@pytest.mark.parametrize("name", [*WINDOWED, "kernel-breakdown"])
def test_a_trace_without_work_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(AnalysisError, match="rank 5: the trace contains no events; record it again") as said:
        analyze(EMPTY, name)
    assert "\n" not in str(said.value)
    with pytest.raises(
        AnalysisError, match="the trace contains no GPU activity and no operators; record it with"
    ):
        analyze(linked([{"cat": "python_function", "name": "f", "ts": 0, "dur": 9}]), name)


def test_traces_without_steps_or_operators_are_refused_with_a_reason() -> None:
    alone = linked([{"cat": "kernel", "name": "gemm", "ts": 0, "dur": 9}])
    with pytest.raises(AnalysisError, match="no step is annotated with ProfilerStep"):
        analyze(alone, "steps")
    with pytest.raises(AnalysisError, match="the trace contains no operators; see kernel-breakdown"):
        analyze(alone, "top-ops")
    for name in ("steps", "top-ops"):
        with pytest.raises(AnalysisError, match="rank 5: the trace contains no events"):
            analyze(EMPTY, name)


@pytest.mark.parametrize("name", [name for name in ALL if name != "link-quality"])
def test_a_step_that_is_not_there_is_refused(name: str) -> None:
    step = {"cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 5}
    call = {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}
    trace = linked([step, call])
    with pytest.raises(AnalysisError, match=r"the trace contains no step 4; available steps: 3$"):
        analyze(trace, name, step=4)
    with pytest.raises(AnalysisError, match="no step is annotated with ProfilerStep"):
        analyze(linked([call]), name, step=4)


@pytest.mark.parametrize("name", ["steps", "top-ops", "link-quality"])
def test_a_trace_that_is_not_linked_is_refused(name: str) -> None:
    with pytest.raises(AnalysisError, match="not linked"):
        analyze(Trace(), name)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        UnknownName, match=r"^by: .*; did you mean 'self'\? \(expected one of exclusive, self, "
    ):
        analyze(EMPTY, "top-ops", by="sell")
    with pytest.raises(UnknownName, match="expected one of name, kind"):
        analyze(EMPTY, "kernel-breakdown", by="kin")
    with pytest.raises(EtloomError, match=r"^top: expected at least 1 row, got 0; specify 1 or more"):
        analyze(EMPTY, "top-ops", top=0)


@pytest.mark.parametrize("name", ALL)
def test_every_analysis_has_a_description(name: str) -> None:
    module = registry.get("analyses", name)
    assert module.SCOPE == "rank"
    assert registry.get_summary("analyses", name).endswith(".")
    assert len(Path(module.__file__).read_text().splitlines()) <= 120
    for option in registry.list_options("analyses", name):
        assert option.help, option
    for column, dtype in module.COLUMNS.items():
        assert dtype == pl.Int64 if column.endswith("_ns") else True
        assert dtype == pl.Float64 if column.endswith("_pct") else True
