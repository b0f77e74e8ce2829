"""Questions of a reviewer who computes the answer from the raw events: which time a figure is of, what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom import cli
from etloom.collectives.participations import _complete_row
from etloom.core.errors import InvalidValue, UnknownName
from etloom.core.trace import Job, Trace
from etloom.formats.io.salvage import salvage
from etloom.reports.summary import summarize_run
from support.small_traces import OperatorTraceBuilder, complete_event, kineto


def test_a_salvaged_gpu_trace_is_not_one_of_the_cpu(tmp_path: Path) -> None:
    document = {**kineto(), "deviceProperties": [{"id": 0, "name": "H100"}]}
    text = json.dumps(document)
    cut, out = tmp_path / "cut.json", tmp_path / "out.json"
    cut.write_text(text[: text.index('"kernel"') - 20])
    salvage(cut, out)
    for file in (cut, out):
        job = etloom.open(file, use_cache=False)
        assert list(etloom.info(job)["devices"]) == ["H100 (the file ends before its work)"]
        assert {"read.truncated", "read.missing_gpu_events"} <= set(job.stats["name"])
    assert salvage(out, tmp_path / "again.json").is_intact


def step_behind(folder: Path, kernel_ns: int) -> Job:
    """Two steps of 100 us on the host; each launches one kernel, and the device works through them from 10 us on."""
    folder.mkdir()
    run = OperatorTraceBuilder()
    for number in range(2):
        run.step(number, 100 * number, 100)
        run.kernel("gemm", 100 * number + 5, 10 + kernel_ns * number, kernel_ns)
    return run.open(folder)


@pytest.mark.parametrize(
    ("kernel_at", "time", "extent"),
    [(50, "450.0", "until its GPU activity ends"), (200, "400.0", "from its first to its last GPU activity")],
)
def test_the_time_of_a_single_step_covers_its_gpu_activity(
    kernel_at: int, time: str, extent: str, tmp_path: Path
) -> None:
    run = OperatorTraceBuilder().step(0, 0, 100).kernel("gemm", 5, kernel_at, 400)
    summary = summarize_run(run.open(tmp_path))
    line = {line.topic: line for line in summary.lines}["Step time"]
    assert line.figure.startswith(time) and extent in line.text and "takes 100.0" in line.text
    assert summary.tables["overview"]["step_mean_ns"].to_list() == [float(time) * 1000]


@pytest.mark.slow
def test_the_step_time_is_that_of_a_device_that_lags_behind(tmp_path: Path) -> None:
    short, long = step_behind(tmp_path / "a", 50), step_behind(tmp_path / "b", 400)
    line = {line.topic: line for line in summarize_run(long).lines}["Step time"]
    assert line.figure.startswith("400")
    assert line.text == "mean; from end to end on the device, which lags behind the host"
    host = {line.topic: line for line in summarize_run(short).lines}["Step time"]
    assert host.figure.startswith("100") and "device" not in host.text
    before = long.replace(meta={"run": {"ranks": [{"unrecorded": {"step_ns": 390_000, "steps": 4}}]}})
    line = {line.topic: line for line in summarize_run(before).lines}["Step time"]
    assert line.text.endswith("; 390.0 µs before the recording")
    difference = etloom.diff(short, long)
    assert [
        note for note in difference.notes if "0.00 ms (before) and 0.61 ms (after) after the last" in note
    ]
    assert not [note for note in etloom.diff(short, short).notes if "after the last" in note]


def all_to_all(
    rank: int, sizes: tuple[int, int], splits: tuple[list[int], list[int]] | None
) -> list[dict[str, Any]]:
    """An all-to-all of two ranks in which this one sends and receives so many elements."""
    row: dict[str, Any] = {"In msg nelems": sizes[0], "Out msg nelems": sizes[1], "dtype": "Float"}
    if splits is not None:
        row |= {"In split size": str(splits[0]), "Out split size": str(splits[1])}
    args = {
        "device": 0, "stream": 7, "Collective name": "all_to_allv", "Group size": 2, "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]", "Seq": 1,
    }  # fmt: skip
    return [complete_event("kernel", "ncclDevKernel_SendRecv", 100, 50, 0, 7, **args, **row)]


@pytest.mark.parametrize(
    ("splits", "bandwidth"),
    [
        (None, None),
        # Rank 0 sends 900 of its 1,000 elements to rank 1, which is more than either receives.
        ((([100, 900], [100, 200]), ([200, 300], [900, 300])), 900 * 4 / 50_000),
    ],
)
def test_the_bus_bandwidth_of_an_uneven_all_to_all(
    tmp_path: Path, splits: Any, bandwidth: float | None
) -> None:
    for rank, sizes in enumerate(((1000, 300), (500, 1200))):
        events = all_to_all(rank, sizes, splits and splits[rank])
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": 2},
            "traceEvents": events,
        }
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(document))
    table = etloom.analyze(etloom.open(tmp_path, use_cache=False), "collectives")
    row = table.row(0, named=True)
    assert (table.height, row["bytes"], row["algo_gb_per_s"]) == (1, 4000, pytest.approx(4000 / 50_000))
    assert row["bus_gb_per_s"] == (bandwidth and pytest.approx(bandwidth))


def test_an_even_all_to_all_has_a_bus_bandwidth_without_splits() -> None:
    row = {
        "in_split": None,
        "out_split": None,
        "ranks": "[0, 1]",
        "group_size": 2,
        "peer": None,
        "dtype": "Float",
    }
    even = _complete_row({**row, "collective": "all_to_all", "in_nelems": 8, "out_nelems": 8}, 0)
    uneven = _complete_row({**row, "collective": "all_to_all", "in_nelems": 8, "out_nelems": 9}, 0)
    gathered = _complete_row({**row, "collective": "all_gather", "in_nelems": 8, "out_nelems": 16}, 0)
    assert (even["uneven"], uneven["uneven"], gathered["uneven"]) == (False, True, False)


@pytest.mark.slow
def test_info_and_report_fail_if_nothing_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kineto_trace_0.json"
    file.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": "x", "dur": 1, "pid": 1, "tid": 1}]}')
    for arguments in ([], ["--format", "json"], ["--format", "csv"]):
        assert cli.main(["info", str(file), *arguments]) == 1
        assert "no event or operator could be read: read.no_time 1" in capsys.readouterr().err
    text = file.read_text()
    name = '{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}, '
    file.write_text(text.replace("[{", "[" + name + "{"))
    assert cli.main(["report", str(file), "--out", str(tmp_path / "of-names.html")]) == 1
    assert "no event or operator could be read: read.no_time 1" in capsys.readouterr().err
    file.write_text(text)
    page = tmp_path / "report.html"
    assert cli.main(["report", str(file), "--out", str(page)]) == 1
    assert "no event or operator could be read: read.no_time 1" in capsys.readouterr().err
    assert not page.exists()
    assert cli.main(["info", str(file), "--strict"]) == 1
    assert "rank 0: read.no_time" in capsys.readouterr().err
    file.write_text('{"traceEvents": []}')  # nothing lost
    assert cli.main(["info", str(file)]) == 0
    assert cli.main(["report", str(file), "--out", str(page)]) == 1
    assert "contains no event or operator" in capsys.readouterr().err


@pytest.mark.parametrize("value", [-1.0, 100.5, float("nan")])
@pytest.mark.parametrize("analysis", ["findings", "call-stacks"])
def test_percentages_beyond_100_are_refused(tmp_path: Path, analysis: str, value: float) -> None:
    job = step_behind(tmp_path / "a", 50)
    with pytest.raises(InvalidValue, match="expected a percentage from 0 to 100"):
        etloom.analyze(job, analysis, min_pct=value)


def test_names_of_other_tools_lead_to_the_analysis() -> None:
    for name, analysis in (
        ("top-kernels", "kernel-breakdown"),
        ("top_ops_", "top-ops"),
        ("operators", "top-ops"),
    ):
        with pytest.raises(UnknownName) as caught:
            etloom.analyze(Trace({}), name)
        assert caught.value.remedy == f"did you mean {analysis!r}?"


@pytest.mark.parametrize(("ids", "shared"), [((0, 0), 2), ((5, 6), 0)])
def test_two_processes_in_one_file_that_share_correlations(
    tmp_path: Path, ids: tuple[int, int], shared: int
) -> None:
    events = []
    for process, external in enumerate(ids):
        args = {"correlation": 7, **({"External id": external} if external else {})}
        events.append(
            complete_event("cuda_runtime", "cudaLaunchKernel", 10 + process, 5, 50 + process, 1, **args)
        )
        device = {"device": process, "stream": 7, **args}
        events.append(complete_event("kernel", "gemm", 100 + process, 50, process, 7, **device))
    file = tmp_path / "kineto_trace_0.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    stats = etloom.open(file, use_cache=False).stats
    assert stats.filter(name="link.shared_correlations", severity="error")["count"].sum() == shared


def test_launch_calls_without_numbers_are_not_missing(tmp_path: Path) -> None:
    events = [
        complete_event("cuda_runtime", "cudaLaunchKernel", 10, 5, 50, 1),
        complete_event("kernel", "gemm", 100, 50, 0, 7, device=0, stream=7),
    ]
    file = tmp_path / "kineto_trace_0.json"
    for recorded, reason in ((events, "launches_by_order"), (events[1:], "no_calls_recorded")):
        file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": recorded}))
        names = set(etloom.open(file, use_cache=False).stats["name"])
        others = {"link.launches_by_order", "link.without_correlation", "link.no_calls_recorded"}
        assert names & others == {f"link.{reason}"}


def two_ranks(folder: Path, missing: int | None) -> Job:
    """Six steps of 100 ms on two ranks; rank 1 computes for 30 instead of 10 ms before each all-reduce, and the
    profiler missed one of its steps."""
    folder.mkdir()
    for rank in range(2):
        events = []
        for step in range(6):
            if rank and step == missing:
                continue
            begin, compute = 100_000 * step, 30_000 if rank else 10_000
            group = {
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1]",
                "Group size": 2,
                "Seq": step + 1,
            }
            device = {"device": 0, "stream": 7}
            events += [
                complete_event("user_annotation", f"ProfilerStep#{step}", begin, 90_000, 10, 11),
                complete_event("kernel", "gemm", begin + 300, compute, 0, 7, **device),
                complete_event(
                    "kernel", "ncclDevKernel_AllReduce_Sum_f32", begin + 300 + compute, 35_000 - compute, 0, 20,
                    **{"device": 0, "stream": 20, "Collective name": "allreduce", "In msg nelems": 10, **group},
                ),
                complete_event("kernel", "adam", begin + 35_300, 30_000, 0, 7, **device),
            ]  # fmt: skip
        document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "host_name": "a"}
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps({**document, "traceEvents": events}))
    return etloom.open(folder, use_cache=False)


@pytest.mark.slow
def test_a_step_that_a_rank_did_not_record_is_not_compared(tmp_path: Path) -> None:
    complete = etloom.analyze(two_ranks(tmp_path / "a", None), "stragglers").row(0, named=True)
    assert (complete["rank"], complete["delay_ns"], complete["longer_compute_ns"]) == (
        1,
        120_000_000,
        100_000_000,
    )
    row = etloom.analyze(two_ranks(tmp_path / "b", 3), "stragglers").row(0, named=True)
    # Of the five all-reduces in common, the first and the one after the gap have no previous one to compare with.
    assert (row["rank"], row["delay_ns"], row["longer_compute_ns"]) == (1, 100_000_000, 60_000_000)
    assert (row["late_launch_ns"], row["other_work_ns"], row["inherited_delay_ns"]) == (0, 0, 40_000_000)
    assert row["cause"] == "longer compute"


def test_groups_with_the_same_members_share_their_previous_communication(tmp_path: Path) -> None:
    """Rank 1 computes 200 us longer before each all-reduce of group 0; group 1, of the same ranks, follows at once."""
    for rank in range(2):
        events = []
        for step in range(4):
            begin, compute = 1000 * step, 300 if rank else 100
            events.append(complete_event("kernel", "gemm", begin, compute, 0, 7, device=0, stream=7))
            for group, (start, end) in enumerate(
                ((begin + compute, begin + 350), (begin + 360 + rank, begin + 400))
            ):
                args = {
                    "Process Group Name": str(group), "Process Group Ranks": "[0, 1]", "Group size": 2,
                    "Seq": step + 1, "Collective name": "allreduce", "In msg nelems": 10, "device": 0, "stream": 20,
                }  # fmt: skip
                name = "ncclDevKernel_AllReduce_Sum_f32"
                events.append(complete_event("kernel", name, start, end - start, 0, 20, **args))
        document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "host_name": "a"}
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps({**document, "traceEvents": events}))
    row = etloom.analyze(etloom.open(tmp_path, use_cache=False), "stragglers").row(0, named=True)
    assert (row["rank"], row["delay_ns"], row["longer_compute_ns"]) == (1, 804_000, 600_000)
    # The first delay has no previous communication; four arrivals 1 us late in group 1 are late launches.
    assert (row["other_work_ns"], row["late_launch_ns"], row["inherited_delay_ns"]) == (0, 4_000, 200_000)
