"""HolisticTraceAnalysis' checked tables that no other test looks at: first step, sync trace, shares, and its diff.

The files hold whole microseconds, so that HTA's cutting of times moves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job
from etloom.linker import selection
from etloom.timeline.activity import compute_activity, to_intervals
from support.hta import drop_last_step
from support.real_runs import open_run

US = 1000
FOLDERS = ["sampled_all_steps", "sampled_first_step", "simple_add_cp"]


def opened(data: Path, folder: str) -> Job:
    """The job that HTA was asked about; by default it drops the last step."""
    if folder == "simple_add_cp":
        return open_run(data / "critical_path" / "simple_add.json.gz")
    job = open_run(data / "hta_multirank")
    return job.map(drop_last_step) if folder == "sampled_first_step" else job


def table(golden: Path, folder: str, name: str) -> pl.DataFrame:
    return pl.read_csv(golden / "hta" / folder / f"{name}.csv")


def summary(golden: Path, folder: str, name: str) -> list[tuple[int, str, list[float]]]:
    """Rank, stream or name, and count, mean, std, min, 25%, 50%, 75%, max of a table with three lines of header."""
    lines = (golden / "hta" / folder / f"{name}.csv").read_text().splitlines()[3:]
    cells = (line.split(",") for line in lines)
    return sorted((int(rank), key, [float(cell or "nan") for cell in rest]) for rank, key, *rest in cells)


@pytest.mark.parametrize("folder", FOLDERS)
def test_launches(data: Path, golden: Path, folder: str) -> None:
    theirs = table(golden, folder, "get_cuda_kernel_launch_stats.0")
    job = opened(data, folder)
    ours = etloom.analyze(job[job.ranks[0]], "launches")
    assert sorted(ours.select("call_ns", "device_ns", "launch_delay_ns").rows()) == sorted(
        (theirs.select("cpu_duration", "gpu_duration", "launch_delay") * US).cast(pl.Int64).rows()
    )
    assert (
        theirs.height == {"sampled_all_steps": 1204, "sampled_first_step": 602, "simple_add_cp": 98}[folder]
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_idle_time_and_its_shares(data: Path, golden: Path, folder: str) -> None:
    ours = etloom.analyze(opened(data, folder), "idle-time").filter(pl.col("step").is_null())
    found = {
        row[:3]: row[3:] for row in ours.select("rank", "stream", "cause", "idle_ns", "idle_pct").iter_rows()
    }
    theirs = table(golden, folder, "get_idle_time_breakdown.0")
    for rank, stream, cause, idle, ratio in theirs.select(
        "rank", "stream", "idle_category", "idle_time", "idle_time_ratio"
    ).iter_rows():
        our_idle, our_share = found.pop((rank, stream, cause))
        assert our_idle == round(idle * US)
        # It is written with two decimals of 1, and left out where a stream had no idle time.
        assert our_share == (None if ratio is None else pytest.approx(100 * ratio, abs=0.5))
    # HTA lists a cause of no gap for some streams only.
    assert all(idle == 0 for idle, _ in found.values())


@pytest.mark.parametrize("folder", FOLDERS)
def test_bandwidths(data: Path, golden: Path, folder: str) -> None:
    ours = etloom.analyze(opened(data, folder), "memory-bandwidth-summary").sort("rank", "name")
    theirs = summary(golden, folder, "get_memory_bw_summary")
    assert ours.select("rank", "name", "count").rows() == [(rank, name, row[0]) for rank, name, row in theirs]
    for our, place in (("min_gb_per_s", 3), ("median_gb_per_s", 5), ("max_gb_per_s", 7)):
        assert ours[our].to_list() == pytest.approx([row[place] for _, _, row in theirs])


@pytest.mark.parametrize("folder", FOLDERS)
def test_queues(data: Path, golden: Path, folder: str) -> None:
    """HTA sums up changes, not time; of changes at one time ours is one row, and HTA's are several in any order."""
    length = pl.col("queue_length")
    series = etloom.analyze(opened(data, folder), "queue-length")
    ours = {
        (rank, str(stream)): rest
        for rank, stream, *rest in series.group_by("rank", "stream")
        .agg(length.len().alias("n"), length.mean().alias("mean"), length.max())
        .rows()
    }
    theirs = summary(golden, folder, "get_queue_length_summary")
    assert len(ours) == len(theirs)
    for rank, stream, (count, mean, _, low, *_, high) in theirs:
        our_count, our_mean, our_high = ours[rank, stream]
        assert 0 <= count - our_count <= 0.02 * count
        assert our_mean == pytest.approx(mean, abs=0.05)
        assert abs(our_high - high) <= 1 and low == 0


@pytest.mark.parametrize("folder", ["sampled_all_steps", "sampled_first_step"])
def test_shares_of_time(data: Path, golden: Path, folder: str) -> None:
    job = opened(data, folder)
    ours = etloom.analyze(job, "temporal-breakdown").filter(pl.col("step").is_null())
    theirs = table(golden, folder, "get_temporal_breakdown")
    other = 100 - ours["idle_pct"] - ours["compute_pct"]
    for our, their in (
        (ours["idle_pct"], "idle_time_pctg"),
        (ours["compute_pct"], "compute_time_pctg"),
        (other, "non_compute_time_pctg"),
    ):
        assert our.round(2).to_list() == pytest.approx(theirs[their].to_list(), abs=0.011)
    # HTA's shares by kind are of the busy time of all ranks together.
    kinds = etloom.analyze(job, "kernel-overlap").group_by("kinds").agg(pl.col("time_ns").sum())
    shares = dict(kinds.select("kinds", (100 * pl.col("time_ns") / pl.col("time_ns").sum()).round(1)).rows())
    expected = dict(
        table(golden, folder, "get_gpu_kernel_breakdown.0").select("kernel_type", "percentage").rows()
    )
    assert {kind.upper().replace(" + ", " overlapping "): share for kind, share in shares.items()} == expected


def test_overlap_without_communication_is_unknown(data: Path, golden: Path) -> None:
    assert table(golden, "simple_add_cp", "get_comm_comp_overlap")["comp_comm_overlap_pctg"].to_list() == [
        None
    ]
    ours = etloom.analyze(opened(data, "simple_add_cp"), "comm-overlap")
    assert ours["overlap_pct"].to_list() == [None] * ours.height and ours.height


def test_synchronisations_in_htas_busy_time(data: Path, golden: Path) -> None:
    """HTA counts cuda_sync as work: its busy time is longer by the synchronisations while nothing else ran.

    Without them it is 39,088 us of copies and 10,670 us of computation, which never run at one time.
    """
    theirs = table(golden, "simple_add_cp", "get_temporal_breakdown").row(0, named=True)
    (trace,) = opened(data, "simple_add_cp").values()
    (row,) = etloom.analyze(trace, "temporal-breakdown").filter(pl.col("step").is_null()).rows(named=True)
    assert row["busy_ns"] == row["span_ns"] - row["idle_ns"] == (39_088 + 10_670) * US
    alone = to_intervals(trace.events.filter(pl.col("cat") == "cuda_sync")) - compute_activity(trace).busy
    assert theirs["kernel_time(us)"] - theirs["idle_time(us)"] == row["busy_ns"] // US + alone.total // US
    assert alone.total == 205 * US


@pytest.mark.parametrize("side", ["ALL", "CPU", "GPU"])
def test_the_diff_of_a_step(data: Path, golden: Path, side: str) -> None:
    """TraceDiff compares the first step by default, and there the runs do not differ; in the second they do."""
    theirs = table(golden, "compare", f"cmp.compare_traces.{side}")
    where = {"ALL": "true", "CPU": "stream is null", "GPU": "stream is not null"}[side]
    for file, label in (("compare_base", "Control"), ("compare_test", "Test")):
        job = selection.select_part(open_run(data / "hta_misc" / f"{file}.json.gz"), step=1009)
        ours = etloom.query(
            job, f"select name, count(*) n, sum(dur) ns from events where {where} group by name order by name"
        )
        expected = theirs.select("name", f"{label}_counts", f"{label}_total_duration").sort("name")
        assert ours.select("name", "n", pl.col("ns") // US).rows() == expected.rows()


def test_unchanged_names_equal_those_of_hta(data: Path, golden: Path) -> None:
    theirs = json.loads((golden / "hta" / "compare" / "cmp.ops_diff.json").read_text())
    assert not any(theirs[kind] for kind in ("added", "deleted", "increased", "decreased"))
    whole = [open_run(data / "hta_misc" / f"compare_{which}.json.gz") for which in ("base", "test")]
    first = etloom.diff(*(selection.select_part(job, step=1009) for job in whole))
    for by, names in (("operator", {"aten::as_strided", "aten::empty"}), ("kernel", None)):
        table = first.table(by).drop_nulls(by)
        assert set(table["in"]) == {"both"}
        assert (table["count_before"] == table["count_after"]).all()
        assert set(table[by]) <= set(theirs["unchanged"]) and (names is None or set(table[by]) == names)
    added = etloom.diff(*whole).table("operator").filter(pl.col("in") == "added")["operator"]
    assert sorted(added) == ["AddmmBackward0", "All2All_Pooled_Req", "CatBackward0"]
