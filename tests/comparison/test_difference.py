"""Two runs compared: intervals that hold, tables that add up, a gate that fails what is slow and passes noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.cli import main
from etloom.comparison.change_estimate import estimate_shift
from etloom.comparison.difference_tables import (
    assign_steps,
    common_operator_shares,
    find_changed_ranks,
    join_sides,
)
from etloom.comparison.measures import compare_measures
from etloom.core.trace import Job
from support import small_traces
from support.fleets import LATE_US, write_fleet
from support.real_runs import open_run
from support.small_traces import write_stepped_run

BASE = 100.0


def test_a_shift_is_the_ratio_of_medians() -> None:
    found = estimate_shift([[100, 101, 102, 103]], [[200, 202, 204, 210]])
    assert found is not None and found.low is not None and found.high is not None and found.is_clear
    assert found.percent == pytest.approx(100)
    assert 90 < found.low < 100 < found.high < 110
    several = estimate_shift([[100, 101, 102], [90]], [[200, 202, 204, 206], [203], []])
    assert several is not None and several.percent == pytest.approx(100 * (203 / 95.5 - 1))


def test_the_interval_of_several_runs_is_students() -> None:
    """The half width is t * s * sqrt(1/3 + 1/3), with 2.776 for 4 degrees of freedom."""
    rng = np.random.default_rng(2)
    widths, expected = [], []
    for _ in range(300):
        levels = rng.normal(BASE, 1, (2, 3))
        found = estimate_shift(*levels[:, :, np.newaxis])
        assert found is not None and found.low is not None and found.high is not None
        widths.append((found.high - found.low) / 2)
        expected.append(2.776 * np.sqrt(levels.var(axis=1, ddof=1).mean() * 2 / 3))
    assert np.mean(widths) == pytest.approx(np.mean(expected), rel=0.1)


def test_too_few_values_are_inconclusive() -> None:
    found = estimate_shift([[100, 100.1, 100.2]], [[200, 201, 202]])
    assert found is not None and not found.is_known and not found.is_clear
    assert estimate_shift([[]], [[1]]) is None
    assert estimate_shift([[0, 0, 0, 0]], [[0, 0, 0, 1]]) is None


@pytest.mark.slow
def test_long_runs_are_resampled_in_parts() -> None:
    rng = np.random.default_rng(2)
    found = estimate_shift([rng.normal(BASE, 1, 12_000)], [rng.normal(BASE, 1, 12_000)])
    assert found is not None and found.low is not None and found.high is not None
    assert found.low < 0 < found.high and found.high - found.low < 0.15


def test_an_outlier_does_not_move_it() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(BASE, 1, 20), rng.normal(BASE, 1, 20)
    second[3] = 100 * BASE
    found = estimate_shift([first], [second])
    assert found is not None and abs(found.percent) < 1.5 and not found.is_clear


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 12, 30])
def test_the_interval_contains_the_truth_as_often_as_stated(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = 600
    held = 0
    for _ in range(draws):
        found = estimate_shift([BASE * rng.lognormal(0, 0.05, n)], [1.1 * BASE * rng.lognormal(0, 0.05, n)])
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 10 <= found.high
    assert held / draws > 0.925


def rate_of_failures(slowdown: float, noise: float, autocorrelation: float = 0.0, steps: int = 30) -> float:
    """How often the gate of 3 % fails, with steps of this noise (log-normal, one slow step of thirty)."""
    rng = np.random.default_rng(7)

    def run(factor: float) -> np.ndarray:
        drift = rng.normal(0, noise, steps)
        for at in range(1, steps):
            drift[at] = autocorrelation * drift[at - 1] + np.sqrt(1 - autocorrelation**2) * drift[at]
        times = factor * BASE * np.exp(drift)
        times[rng.random(steps) < 1 / 30] *= 3
        return times

    draws = 1000
    found = (estimate_shift([run(1)], [run(1 + slowdown)]) for _ in range(draws))
    return sum(one is not None and one.low is not None and one.low > 3 for one in found) / draws


@pytest.mark.slow
def test_five_percent_slower_fails_and_none_slower_passes() -> None:
    assert rate_of_failures(0.05, 0.015) > 0.9
    assert rate_of_failures(0.0, 0.02) == 0
    assert rate_of_failures(0.0, 0.05) < 0.005
    assert rate_of_failures(0.0, 0.05, autocorrelation=0.6) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "most"), [(8, 0.215), (60, 0.1)])
def test_correlated_neighbours_widen_the_interval(steps: int, most: float) -> None:
    rng = np.random.default_rng(1)
    level = np.zeros((400, 2, 50 + steps))
    for at in range(1, 50 + steps):
        level[..., at] = 0.6 * level[..., at - 1] + rng.normal(0, 0.02, (400, 2))
    shifts = (estimate_shift([first], [second]) for first, second in np.exp(level[..., 50:]))
    assert np.mean([found is not None and found.is_clear for found in shifts]) < most  # 0.05 if independent


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [(6, "slower: a step takes 13 times as long (9"), (2, "a step takes 13 times as long on average, but")],
)
def test_a_run_that_takes_many_times_as_long_is_described_so(
    tmp_path: Path, steps: int, verdict: str
) -> None:
    before, after = (write_stepped_run(tmp_path / f"{time}", [time] * steps) for time in (1000, 13000))
    assert etloom.diff(before, after).verdict.startswith(verdict)


def test_categories_add_up_to_the_change(runs: tuple[Path, Path, Path]) -> None:
    found = etloom.diff(*(etloom.open(runs[at]) for at in (0, 2)))
    assert found.verdict.startswith("slower by 5.0 % per step")
    # Half of each step of 1004 us in the median is one operator's.
    assert (
        found.explanation
        == "of +50.2 µs per step: compute +25.1 µs, idle +25.1 µs; exclusive time that changed most: aten::mm +25.1 µs"
    )
    assert etloom.diff(*(etloom.open(runs[at]) for at in (0, 1))).explanation is None  # nothing beyond noise
    rows = {row["category"]: row for row in found.table().iter_rows(named=True)}
    assert rows["compute"]["share_pct"] == pytest.approx(50, abs=0.1)
    assert rows["compute"]["share_pct"] + rows["idle"]["share_pct"] == pytest.approx(100, abs=0.1)
    assert found.table("operator").row(0, named=True)["change_pct"] == pytest.approx(5, abs=0.01)


@pytest.mark.slow
def test_a_run_against_itself_has_not_changed(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(own / "ddp_2")
    assert main(["diff", run, run, "--by", "operator"]) == 0
    assert capfd.readouterr().out.startswith("no change: the steps take the same time\n")
    job = open_run(own / "ddp_2")
    for by in ("category", "operator", "collective"):
        table = etloom.diff(job, job).table(by)
        assert table.height and table["change_ns"].unique().to_list() == [0]


def test_two_devices_share_operators_and_no_gemm(data: Path) -> None:
    jobs = [open_run(data / "tracelens" / f"{name}_qwen.json.gz") for name in ("mi300", "h100")]
    found = etloom.diff(*jobs)
    marks = dict(found.table("operator").select("operator", "in").iter_rows())
    assert marks["aten::mm"] == marks["aten::linear"] == "both"
    kernels = dict(found.table("kernel").select("kernel", "in").iter_rows())
    assert kernels["attn_fwd"] == "removed"
    assert "too few steps" in found.verdict
    assert found.explanation == (
        "of +4.41 ms per step: compute +4.35 ms, exposed memory +202.3 µs, idle -140.9 µs; "
        "GPU time that changed most: aten::mul +2.21 ms, aten::mm -1.99 ms, aten::copy_ +1.91 ms; "
        "host time that changed most: aten::addmm +474.7 µs"
    )
    families = found.table("family")
    assert {row["family"]: row["in"] for row in families.iter_rows(named=True)}["gemm"] == "both"
    for side in ("before", "after"):
        assert families[f"{side}_ns"].sum() == pytest.approx(
            found.table("kernel")[f"{side}_ns"].sum(), abs=200
        )
    assert found.table("category")["share_pct"].sum() == pytest.approx(100, abs=0.01)


def test_activity_launched_before_the_recording_is_not_of_the_step(data: Path) -> None:
    """The step begins by waiting for the one before it: 168 matrix products are its own, of 239 that run in it."""
    found = etloom.diff(
        *[open_run(data / "tracelens" / f"{name}_qwen.json.gz") for name in ("h100", "mi300")]
    )
    kernels, category = found.table("kernel"), found.table("category")
    gemm = kernels.filter(pl.col("kernel").str.starts_with("sm90_xmma_gemm_bf16"))
    assert gemm["count_before"].to_list() == [168.0]
    (note,) = (line for line in found.notes if "outside the recorded steps" in line)
    assert "13.48 ms (before) and 13.13 ms (after)" in note
    busy = sum(ns for name, ns in category.select("category", "before_ns").rows() if name != "idle")
    # What was launched in the step and runs on after it counts in kernels, and not in busy.
    assert kernels["before_ns"].sum() + 13_480_000 == pytest.approx(busy, rel=0.06)


def test_work_that_no_call_launched_is_of_the_innermost_step_around_it(tmp_path: Path) -> None:
    """Behind a step within a step it is the outer one's again, not of none."""
    host, device = (10, 11), (0, 7)
    nested = [
        small_traces.complete_event("user_annotation", "ProfilerStep#1", 0, 1000, *host),
        small_traces.complete_event("user_annotation", "ProfilerStep#2", 200, 300, *host),
        small_traces.complete_event("cuda_runtime", "cudaLaunchKernel", 20, 5, *host, correlation=5),
    ]
    starts = {"launched": 40, "ahead": 100, "inside": 300, "behind": 700, "after": 1100}
    nested += [
        small_traces.complete_event(
            "kernel", name, ts, 50, *device, device=0, stream=7, correlation=5 if ts == 40 else ts
        )
        for name, ts in starts.items()
    ]
    file = tmp_path / "kineto_trace_0.json"
    file.write_text(json.dumps(small_traces.kineto() | {"traceEvents": nested}))
    (trace,) = etloom.open(file, use_cache=False).values()
    found = assign_steps(trace)
    assert dict(zip(found["name"], found["step"], strict=True)) == {
        "launched": 1, "ahead": 1, "inside": 2, "behind": 1, "after": None,
    }  # fmt: skip


def test_exclusive_times_sum_to_the_whole(data: Path) -> None:
    """No parent claims what its child does: operators' device time is that of all kernels, and shares sum to 100 %."""
    jobs = [open_run(data / "tracelens" / f"{name}_qwen.json.gz") for name in ("mi300", "h100")]
    found = etloom.diff(*jobs)
    operators, kernels = found.table("operator"), found.table("kernel")
    for side in ("before", "after"):
        assert operators[f"device_{side}_ns"].sum() == pytest.approx(
            kernels[f"{side}_ns"].sum(), abs=len(kernels)
        )
    assert operators["share_pct"].sum() == pytest.approx(100, abs=0.01)
    # Kernels of two vendors come and go for tens of ms, and the sum moves by two.
    assert kernels["share_pct"].null_count() == len(kernels)
    copies = found.table("category").row(by_predicate=pl.col("category") == "exposed_memory", named=True)
    assert copies["change_pct"] is None and copies["change_ns"] == 202289


def test_a_change_and_its_percentage_are_of_one_estimate(tmp_path: Path) -> None:
    """The median falls from one kind of steps to the other: a few steps more or less decide, as the interval shows."""
    before = etloom.open(write_stepped_run(tmp_path / "before", [100.0, 100, 100, 200, 200, 200, 200]))
    after = etloom.open(write_stepped_run(tmp_path / "after", [110.0, 110, 110, 110, 220, 220, 230]))
    (row,) = compare_measures([before], [after]).filter(pl.col("measure") == "step time").to_dicts()
    assert (row["before"], row["after"]) == (200_000, 110_000)
    assert (row["change_pct"], row["change"]) == (pytest.approx(-45), pytest.approx(-90_000))
    assert row["low_pct"] <= -45 and row["high_pct"] > 0


@pytest.mark.slow
def test_two_programs_have_little_in_common(data: Path) -> None:
    """Of two models on two devices, as against one model on two."""

    def told(before: str, after: str) -> list[str]:
        found = etloom.diff(open_run(data / before), open_run(data / after))
        return [line for line in found.notes if "in common" in line]

    assert told("dlrm", "critical_path/alexnet.json.gz") == [
        "little in common: operators of both runs take 3 % of the time before and 90 % after; "
        "for two different programs, the change is not meaningful"
    ]
    assert told("tracelens/mi300_qwen.json.gz", "tracelens/h100_qwen.json.gz") == []


def test_other_operators_inside_one_are_the_same_program(data: Path) -> None:
    before, after = (
        etloom.open(data / f"cases/turn3/attention_{kind}.json") for kind in ("unfused", "fused")
    )
    difference = etloom.diff(before, after)
    row = difference.table("operator").row(by_predicate=pl.col("operator") == "my_attention", named=True)
    assert [row[f"device_total_{side}_ns"] for side in ("before", "after", "change")] == [
        780_000,
        350_000,
        -430_000,
    ]
    assert difference.notes[0].startswith("my_attention runs other operators inside (-430.0 µs of GPU time)")


def test_programs_in_the_same_wrapper_or_on_the_cpu_have_little_in_common(data: Path, tmp_path: Path) -> None:
    def compare(keeps: Callable[[str], bool]) -> list[str]:
        runs = []
        for kind in ("unfused", "fused"):
            content = json.loads((data / f"cases/turn3/attention_{kind}.json").read_text())
            content["traceEvents"] = [row for row in content["traceEvents"] if keeps(row.get("cat", ""))]
            text = json.dumps(content).replace("my_attention", "CompiledFunction")
            (tmp_path / f"{kind}.json").write_text(text)
            runs.append(etloom.open(tmp_path / f"{kind}.json"))
        return etloom.diff(*runs).notes

    assert compare(lambda cat: True)[0].startswith("little in common")
    assert not any(
        "runs other operators" in line for line in compare(lambda cat: cat not in ("kernel", "cuda_runtime"))
    )


@pytest.mark.parametrize(
    ("before", "after", "shares"),
    [
        ([("mm", 3), ("add", 1)], [("mm", 1), ("mul", 4)], (0.75, 0.2)),
        ([("mm", 3), (None, 1)], [("mm", 1), (None, 0)], (1.0, 1.0)),
        ([("mm", 1), (None, 3)], [("mm", 1)], None),  # of most of its time no operator is known
    ],
)
def test_share_of_operators_in_both_runs(
    before: list[tuple[str | None, int]],
    after: list[tuple[str | None, int]],
    shares: tuple[float, float] | None,
) -> None:
    sides = (
        pl.DataFrame(
            [(name, 1.0, 5.0, 1000.0 * us) for name, us in side],
            schema={"operator": pl.String, "count": pl.Float64, "ns": pl.Float64, "device_ns": pl.Float64},
            orient="row",
        )
        for side in (before, after)
    )
    assert common_operator_shares(join_sides(*sides)) == shares


@pytest.mark.slow
def test_a_run_without_steps_is_compared_as_a_whole(own: Path, tmp_path: Path) -> None:
    """The sentence and the table refer to the same times: those of the whole runs."""
    stepped = open_run(own / "ddp_2")
    names = pl.col("name").cast(pl.String)
    events = {
        rank: trace.events.filter(~names.str.starts_with("ProfilerStep")) for rank, trace in stepped.items()
    }
    plain = Job({rank: stepped[rank].replace(events=rows) for rank, rows in events.items()})
    for runs in ((stepped, plain), (plain, stepped)):
        difference = etloom.diff(*runs)
        before, after = (sum(times) for times in difference.step_times)
        table = difference.table("category")
        assert table["change_ns"].sum() == pytest.approx(after - before, rel=1e-6, abs=10)
        assert abs(after / before - 1) < 0.02


@pytest.mark.slow
def test_ranks_that_changed_unlike_the_others_are_named(tmp_path: Path) -> None:
    before, after = write_fleet(tmp_path / "a", slow=()), write_fleet(tmp_path / "b", slow=(2,))
    difference = etloom.diff(before, after)
    assert difference.table("rank").select("rank", "change_ns").row(0) == (2, LATE_US * 1000)
    (note,) = (note for note in difference.notes if "rank 2" in note)
    assert note == (
        "rank 2 changed by +300.0 µs per step outside of communication, the usual rank by +0.0 µs; see --by rank"
    )
    assert not [note for note in etloom.diff(before, before).notes if "outside of communication" in note]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [((0, 30), [1]), ((30, 30, 30, 30), None), ((0, 1, 0, -1, 30, 0), [4]), ((0, 1), None)],
)
def test_a_rank_differs_from_the_usual_change(changes: tuple[int, ...], ranks: list[int] | None) -> None:
    before, after = (
        pl.DataFrame({"rank": range(len(changes)), "ns": [1000.0 + by * add for by in changes]})
        for add in (0, 1)
    )
    changed = find_changed_ranks(join_sides(before, after))
    assert (None if changed is None else changed[0]["rank"].to_list()) == ranks
