"""Answers on real traces, computed a second time from the files themselves (support/reference_trace.py)."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace
from support.paths import DATA
from support.reference_trace import Event, Raw, Work, covered, load, together

FILES = {
    "a100": "nccl_ddp/kineto_trace_0.json.gz",
    "mi300": "tracelens/mi300_qwen.json.gz",
    "mi250": "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "v100": "dlrm/kineto_trace_0.json.gz",
    "h100": "tracelens/h100_qwen.json.gz",
    "queue": "hta_misc/negative_queue_a100.json.gz",
}


@cache
def raw(file: str) -> Raw:
    return load(DATA / FILES[file])


@cache
def trace(file: str) -> Trace:
    (one,) = etloom.open(DATA / FILES[file]).values()
    return one


def asked(file: str, name: str, **options: Any) -> pl.DataFrame:
    return etloom.analyze(trace(file), name, **options)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name == "queue" else ()) for name in FILES]
)
def file(request: pytest.FixtureRequest, data: Path) -> str:
    return str(request.param)


def stretches(run: Raw) -> dict[int | None, tuple[int, int]]:
    """Of each step, and (None) from the first device work to the last."""
    whole = (min(one.event.start for one in run.work), max(one.event.end for one in run.work))
    return {**{number: (mark.start, mark.end) for number, mark in run.steps.items()}, None: whole}


def step_of(run: Raw, event: Event | None) -> int | None:
    if event is None:
        return None
    return next((n for n, mark in run.steps.items() if mark.start <= event.start < mark.end), None)


def rounded(value: float) -> int:
    return math.floor(value + 0.5)


@pytest.mark.slow
def test_the_temporal_breakdown(file: str) -> None:
    rows = {row["step"]: row for row in asked(file, "temporal-breakdown").rows(named=True)}
    overlap = {row["step"]: row for row in asked(file, "comm-overlap").rows(named=True)}
    assert set(rows) == set(stretches(raw(file)))
    for step, (start, end) in stretches(raw(file)).items():
        time = together(raw(file).work, start, end)
        comp = sum(ns for kinds, ns in time.items() if "computation" in kinds)
        comm = sum(ns for kinds, ns in time.items() if "communication" in kinds)
        shown = sum(
            ns for kinds, ns in time.items() if kinds in ({"communication"}, {"communication", "memory"})
        )
        row = rows[step]
        assert row["span_ns"] == end - start
        assert row["idle_ns"] == time[frozenset()]
        assert row["compute_ns"] == comp
        assert row["exposed_communication_ns"] == overlap[step]["exposed_ns"] == shown
        assert row["exposed_memory_ns"] == time[frozenset({"memory"})]
        assert overlap[step]["communication_ns"] == comm
        assert overlap[step]["overlapped_ns"] == comm - shown


def test_overlap_of_kernels(file: str) -> None:
    time = together(raw(file).work, *stretches(raw(file))[None])
    assert {
        frozenset(kinds.split(" + ")): ns
        for kinds, ns in asked(file, "kernel-overlap").select("kinds", "time_ns").rows()
    } == {kinds: ns for kinds, ns in time.items() if kinds and ns}


def test_kernels_by_name(file: str) -> None:
    lasted = defaultdict(list)
    for one in raw(file).work:
        lasted[one.kind, one.event.name].append(one.event.dur)
    whole = sum(map(sum, lasted.values()))
    rows = asked(file, "kernel-breakdown").rows(named=True)
    assert len(rows) == len(lasted)
    for row in rows:
        own = lasted[row["kind"], row["name"]]
        assert (row["count"], row["total_ns"], row["min_ns"], row["max_ns"]) == (
            len(own),
            sum(own),
            min(own),
            max(own),
        )
        assert abs(row["mean_ns"] - statistics.mean(own)) <= 0.5
        assert row["std_ns"] is None if len(own) == 1 else abs(row["std_ns"] - statistics.stdev(own)) <= 0.51
        assert row["total_pct"] == pytest.approx(100 * sum(own) / whole)


def test_gaps_of_streams(file: str) -> None:
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    free: dict[Any, int] = {}
    for one in raw(file).work:
        until = free.get(one.stream, one.event.start)
        gap = one.event.start - until
        if gap > 0:
            late = one.call is not None and one.call.start > until
            cause = "host_wait" if late else "kernel_wait" if gap < 30_000 else "other"
            for step in {None, step_of(raw(file), one.call)}:
                found[(step, *one.stream, cause)].append(gap)
        free[one.stream] = max(until, one.event.end)
    table = asked(file, "idle-time").filter(pl.col("gaps") > 0)
    keys = ("step", "device", "stream", "cause")
    ours = {tuple(row[key] for key in keys): row for row in table.rows(named=True)}
    assert set(ours) == set(found)
    for key, gaps in found.items():
        row = ours[key]
        assert (row["gaps"], row["idle_ns"], row["max_ns"]) == (len(gaps), sum(gaps), max(gaps))
        assert abs(row["median_ns"] - statistics.median(gaps)) <= 0.5


def test_calls_that_launch(file: str) -> None:
    works = defaultdict(list)
    for one in raw(file).work:
        if one.call:
            works[id(one.call)].append(one)
    calls = defaultdict(list)
    for own in works.values():
        calls[own[0].call.name].append(own)  # type: ignore[union-attr]
    rows = asked(file, "launch-stats").rows(named=True)
    assert {row["call"] for row in rows} == set(calls)
    for row in rows:
        own = calls[row["call"]]
        delays = [max(0, min(one.event.start for one in each) - each[0].call.end) for each in own]  # type: ignore[union-attr]
        lasted = [each[0].call.dur for each in own]  # type: ignore[union-attr]
        assert (row["launches"], row["activities"]) == (len(own), sum(map(len, own)))
        assert (row["call_total_ns"], row["call_max_ns"]) == (sum(lasted), max(lasted))
        assert row["launch_delay_max_ns"] == max(delays)
        assert abs(row["launch_delay_mean_ns"] - statistics.mean(delays)) <= 0.5
        assert abs(row["launch_delay_median_ns"] - statistics.median(delays)) <= 0.5
        assert row["late_activities"] == sum(delay > 100_000 for delay in delays)
        short = [each for each in own if sum(one.event.dur for one in each) < each[0].call.dur]  # type: ignore[union-attr]
        assert row["short_activities"] == sum(map(len, short))


def test_queues(file: str) -> None:
    changes = defaultdict(list)
    for one in raw(file).work:
        if one.call:
            changes[one.stream] += [(one.call.start, 1), (one.event.start, -1)]
    table = asked(file, "queue-summary").filter(pl.col("step").is_null())
    assert sorted(table.select("device", "stream").rows()) == sorted(changes)
    for row in table.rows(named=True):
        own = sorted(changes[row["device"], row["stream"]], key=lambda change: change[0])
        length, now, area, empty, most = 0, own[0][0], 0, 0, 0
        for time, change in own:
            if time > now:
                area, most = area + length * (time - now), max(most, length)
                empty += (time - now) * (length == 0)
            length, now = length + change, time
        span = own[-1][0] - own[0][0]
        assert (row["span_ns"], row["max"], row["empty_ns"]) == (span, most, empty)
        assert row["mean"] == pytest.approx(area / span)


def test_copies(file: str) -> None:
    copies = defaultdict(list)
    for one in raw(file).work:
        if one.kind == "memory":
            copies[one.event.name.partition("(")[0].strip()].append(one.event)
    rows = asked(file, "memory-bandwidth-summary").rows(named=True)
    assert {row["name"] for row in rows} == set(copies)
    for row in rows:
        own = copies[row["name"]]
        assert (row["count"], row["time_ns"]) == (len(own), sum(one.dur for one in own))
        busy = covered((one.start, one.end) for one in own)
        assert row["busy_ns"] == busy
        sized = [one for one in own if "bytes" in one.args]
        size = sum(int(one.args["bytes"]) for one in sized) if sized else None
        assert row["bytes"] == size
        rates = [
            float(one.args["memory bandwidth (GB/s)"]) for one in own if "memory bandwidth (GB/s)" in one.args
        ]
        if len(sized) == len(own) == len(rates):
            assert row["mean_gb_per_s"] == pytest.approx(size / busy)
            assert row["median_gb_per_s"] == pytest.approx(statistics.median(rates))


def test_steps(file: str) -> None:
    run = raw(file)
    rows = {row["step"]: row for row in asked(file, "steps").rows(named=True)}
    assert set(rows) == set(run.steps)
    for number, mark in run.steps.items():
        own = [one.event for one in run.work if step_of(run, one.call) == number]
        row = rows[number]
        assert (row["start_ns"], row["dur_ns"]) == (mark.start, mark.dur)
        assert row["kernels"] == len(own)
        assert row["device_busy_ns"] == (covered((one.start, one.end) for one in own) if own else None)
        assert row["operators"] == sum(
            one.cat == "cpu_op" and step_of(run, one) == number for one in run.host
        )


@cache
def below(run: Raw) -> Counter[int]:
    """id of a host event -> time of the device work launched in it or below it."""
    time: Counter[int] = Counter()
    for one in run.work:
        for outer in one.call.around() if one.call else ():
            time[id(outer)] += one.event.dur
    return time


def test_operators(file: str) -> None:
    run, device = raw(file), below(raw(file))
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for one in run.host:
        if one.cat in ("cuda_runtime", "cuda_driver"):
            operator = next((outer for outer in one.around() if outer.cat == "cpu_op"), None)
            inside = covered((max(c.start, one.start), min(c.end, one.end)) for c in one.children)
            if operator is not None:
                sums[operator.name][4] += one.dur - inside
        if one.cat == "cpu_op":
            own = sums[one.name]
            outermost = all(outer.name != one.name for outer in list(one.around())[1:])
            own[0] += 1
            own[1] += one.dur - covered((max(c.start, one.start), min(c.end, one.end)) for c in one.children)
            own[2] += one.dur * outermost
            own[3] += device[id(one)] * outermost
    table = asked(file, "top-ops", top=10**6)
    columns = table.select("name", "count", "self_ns", "total_ns", "device_ns", "runtime_ns")
    assert {name: list(rest) for name, *rest in columns.rows()} == sums
    assert table.select((pl.col("exclusive_ns") == pl.col("self_ns") + pl.col("runtime_ns")).all()).item()
    assert table["exclusive_ns"].is_sorted(descending=True)


def test_operators_by_arguments(file: str) -> None:
    device = below(raw(file))
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for one in raw(file).host:
        if one.cat == "cpu_op":
            shapes = [one.args.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs")]
            own = sums[one.name, json.dumps(shapes)]
            own[0] += 1
            own[1] += one.dur
            own[2] += device[id(one)]
    if all("null, null, null" in shapes for _, shapes in sums):
        pytest.skip("the trace holds no shapes")
    table = asked(file, "unique-args", top=10**6)
    ours = {}
    for row in table.rows(named=True):
        said = [None if row[key] is None else json.loads(row[key]) for key in ("shapes", "types", "values")]
        ours[row["name"], json.dumps(said)] = [row["count"], row["total_ns"], row["device_ns"]]
    assert ours == sums


def test_delays_of_operators(file: str) -> None:
    launched: dict[int, list[Work]] = defaultdict(list)
    around: dict[int, Event] = {}
    for one in raw(file).work:
        marks = (m for m in (one.call.around() if one.call else ()) if m.cat == "user_annotation")
        mark = next((m for m in marks if not m.name.startswith(("ProfilerStep#", "nccl:"))), None)
        if operator := one.nearest("cpu_op") or mark:
            launched[id(operator)].append(one)
            around[id(operator)] = operator
    found: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for key, works in launched.items():
        works.sort(key=lambda one: (one.call.start, one.event.start))  # type: ignore[union-attr]
        first, operator = works[0], around[key]
        names = " -> ".join(one.event.name for one in works)
        delays = (first.call.start - operator.start, first.event.start - first.call.start)  # type: ignore[union-attr]
        found[operator.name, names].append((*delays, sum(one.event.dur for one in works)))
    rows = asked(file, "operator-delays").rows(named=True)
    assert {(row["operator"], row["kernels"]) for row in rows} == set(found)
    for row in rows:
        calls = found[row["operator"], row["kernels"]]
        assert (row["count"], row["device_ns"]) == (len(calls), sum(one[2] for one in calls))
        assert row["launch_delay_ns"] == pytest.approx(statistics.mean(one[0] for one in calls))
        assert row["runtime_delay_ns"] == pytest.approx(statistics.mean(one[1] for one in calls))


def test_kernels_of_annotations(file: str) -> None:
    found: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for one in raw(file).work:
        marks = (m for m in (one.call.around() if one.call else ()) if m.cat == "user_annotation")
        mark = next((m.name for m in marks if not m.name.startswith(("ProfilerStep#", "nccl:"))), None)
        found[mark, one.event.name][0] += 1
        found[mark, one.event.name][1] += one.event.dur
    table = asked(file, "annotated-kernels").select("annotation", "name", "count", "total_ns")
    assert {(mark, name): rest for mark, name, *rest in table.rows()} == found


def test_short_kernels(file: str) -> None:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    free: dict[Any, int] = {}
    for one in raw(file).work:
        until = free.get(one.stream, one.event.start)
        if one.kind != "memory" and one.event.dur < 10_000:
            own = found[one.event.name]
            own[:] = own[0] + 1, own[1] + one.event.dur, own[2] + max(0, one.event.start - until)
        free[one.stream] = max(until, one.event.end)
    table = asked(file, "short-kernels").select("name", "count", "total_ns", "gap_ns")
    assert {name: rest for name, *rest in table.rows()} == found


def test_flops_of_matrix_products(file: str) -> None:
    sizes = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2)}
    found: dict[str, int] = defaultdict(int)
    for one in raw(file).host:
        dims = one.args.get("Input Dims")
        if one.cat == "cpu_op" and one.name in sizes and dims and below(raw(file))[id(one)]:
            a, b = (dims[at] for at in sizes[one.name])
            found[one.name] += 2 * math.prod(a) * b[-1]
    if not found:
        pytest.skip("the trace holds no matrix products with shapes")
    table = asked(file, "flops", top=10**6).filter(pl.col("name").is_in(list(sizes)))
    assert dict(table.select("name", "flops").rows()) == found


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mi300", "h100"])
def test_peaks_of_memory(file: str, data: Path) -> None:
    run = raw(file)
    devices = {(one.args["Device Type"], one.args["Device Id"]) for one in run.memory}
    rows = asked(file, "memory-timeline").filter(pl.col("step").is_null()).rows(named=True)
    assert len(rows) == len(devices) > 0
    for row in rows:
        number = -1 if row["device"] is None else row["device"]
        own = [
            one
            for one in run.memory
            if (one.args["Device Type"], one.args["Device Id"]) == (row["device_type"], number)
        ]
        top = max(own, key=lambda one: one.args["Total Allocated"])
        assert (row["peak_bytes"], row["peak_at_ns"]) == (top.args["Total Allocated"], top.start)
        assert row["allocations"] == sum(one.args["Bytes"] > 0 for one in own)
        assert row["peak_reserved_bytes"] == max(one.args["Total Reserved"] for one in own)
        live: dict[int, Event] = {}
        for one in own[: own.index(top) + 1]:
            live.pop(one.args["Addr"], None)
            if one.args["Bytes"] > 0:
                live[one.args["Addr"]] = one
        held: Counter[str] = Counter()
        for one in live.values():
            around = [
                op
                for op in run.host
                if op.cat == "cpu_op" and op.lane == one.lane and op.start <= one.start <= op.end
            ]
            if around:
                held[max(around, key=lambda op: (op.start, -op.end)).name] += one.args["Bytes"]
        assert row["operator_bytes"] == (max(held.values()) if held else None)
        assert row["operator"] is None or held[row["operator"]] == max(held.values())
        assert row["unknown_bytes"] == top.args["Total Allocated"] - sum(
            one.args["Bytes"] for one in live.values()
        )


@pytest.mark.parametrize("file", ["mi300", "h100"])
def test_modules(file: str, data: Path) -> None:
    run = raw(file)
    found: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    device = below(run)
    counted = Counter(id(outer) for one in run.work if one.call for outer in one.call.around())
    for one in run.host:
        if one.name.startswith("nn.Module: "):
            path = [outer.name for outer in one.around() if outer.name.startswith("nn.Module: ")]
            own = found["/".join(re.sub(r"^nn.Module: |_\d+$", "", name) for name in reversed(path))]
            own[:] = own[0] + 1, own[1] + one.dur, own[2] + device[id(one)], own[3] + counted[id(one)]
    table = asked(file, "module-view").select("path", "count", "host_ns", "device_ns", "kernels")
    assert {path: rest for path, *rest in table.rows()} == found


KINETO_PADS = {"a100": 1_500, "mi250": 2, "mi300": 2, "h100": 2}  # ns


@pytest.mark.parametrize("file", KINETO_PADS)
def test_annotations_on_the_device_are_kinetos(file: str, data: Path) -> None:
    """What Kineto drew (gpu_user_annotation) lies around what was launched, by at most what it pads."""
    with gzip.open(DATA / FILES[file]) as opened:
        drawn = [one for one in json.load(opened)["traceEvents"] if one.get("cat") == "gpu_user_annotation"]
    lasted = defaultdict(list)
    for one in drawn:
        lasted[one["name"]].append(round(one["dur"] * 1000))
    rows = asked(file, "annotations", where="device").rows(named=True)
    assert {row["name"]: row["count"] for row in rows} == {name: len(own) for name, own in lasted.items()}
    for row in rows:
        for ours, theirs in ((row["max_ns"], max), (row["min_ns"], min)):
            assert 0 < theirs(lasted[row["name"]]) - ours <= KINETO_PADS[file]
