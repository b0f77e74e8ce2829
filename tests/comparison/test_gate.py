"""The gate: it fails what is slower, passes what is not on a machine that others use, and says where it cannot tell."""

from __future__ import annotations

import xml.etree.ElementTree as tree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.cli import main
from etloom.cli.check import escape_for_github
from etloom.comparison.best_case import estimate_best_case_shift
from etloom.comparison.gate import BEST_CASE, explain_row, judge_regression
from etloom.comparison.student_t import student_t_quantile
from etloom.core import registry
from etloom.core.trace import Job, Trace
from support.paths import ROOT
from support.small_traces import write_stepped_run


def test_quantiles_of_t() -> None:
    """From printed tables."""
    wanted = {1: 6.314, 2: 2.920, 3: 2.353, 5: 2.015, 9: 1.833, 30: 1.697}
    assert {n: student_t_quantile(0.95, n) for n in wanted} == pytest.approx(wanted, rel=1e-3)


def busy_run(rng: np.random.Generator, pieces: int, steps: int = 60, busy: float = 0.6) -> Job:
    """A run of one rank, of equal operators, on a machine that is busy in bursts: twice as slow for most of the time.

    A burst lasts some 20 operators; each operator is noisy by 3 % besides; 1 % of speed differs from run to run.
    """
    count = steps * pieces
    burst = np.empty(count, dtype=bool)
    state = rng.random() < busy
    for at, draw in enumerate(rng.random(count)):
        state = (draw < 1 - 0.05 * (1 - busy)) if state else (draw < 0.05 * busy)
        burst[at] = state
    times = 100_000 * rng.lognormal(0, 0.003) * (1 + rng.gamma(2, 0.03, count)) * np.where(burst, 2, 1)
    gaps = np.where(np.arange(count) % pieces == 0, 2000, 1000)  # a step begins with its own overhead
    starts = np.cumsum(gaps + np.append(0, times[:-1])).astype(np.int64)
    ends = starts + times.astype(np.int64)
    first = starts.reshape(steps, pieces)[:, 0] - 1000
    last = ends.reshape(steps, pieces)[:, -1]
    events = pl.DataFrame(
        {
            "cat": ["user_annotation"] * steps + ["cpu_op"] * count,
            "name": [f"ProfilerStep#{number}" for number in range(steps)] + ["aten::mm"] * count,
            "ts": np.append(first, starts),
            "dur": np.append(last - first, ends - starts),
            "depth": [0] * steps + [1] * count,
        }
    ).with_columns(pid=pl.lit(1), tid=pl.lit(1))
    events = events.sort("ts", "depth").with_row_index("id")
    return Job({0: Trace({"events": events}, {"rank": 0, "linked": True, "clock": "epoch"})})


def verdicts(slowed: bool, draws: int, runs: int) -> list[str]:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(draws):
        sides = [
            [busy_run(rng, pieces) for _ in range(number)]
            for number, pieces in ((3, 20), (runs, 21 if slowed else 20))
        ]
        found.append(judge_regression(sides[1], sides[0], 3.0)["verdict"][0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 3])
def test_five_percent_more_work_fails_and_equal_work_passes_on_a_busy_machine(runs: int) -> None:
    slow, same = (verdicts(slowed, 24 // runs, runs) for slowed in (True, False))
    assert slow.count("passed") == 0
    assert slow.count("failed") / len(slow) > (0.6 if runs == 1 else 0.85)
    assert same.count("failed") == 0
    assert same.count("passed") / len(same) > 0.9


@pytest.mark.slow
def test_one_run_against_one_on_a_host_cannot_fail_by_little() -> None:
    """Whole runs of one program differed by a quarter and more, beside other work; no step of theirs shows it."""
    rng = np.random.default_rng(11)
    for pieces in (21, 23):
        table = judge_regression([busy_run(rng, pieces)], [busy_run(rng, 20)], 3.0)
        row = table.row(0, named=True)
        assert (row["verdict"], row["more_steps"], row["more_runs"]) == ("undecided", None, 2)
        assert "needs about 2 more runs on each side" in explain_row(table, 0)[0]
    assert judge_regression([busy_run(rng, 40)], [busy_run(rng, 20)], 3.0)["verdict"][0] == "failed"
    alike = [judge_regression([busy_run(rng, 20)], [busy_run(rng, 20)], 3.0)["verdict"][0] for _ in range(12)]
    assert alike.count("passed") > 9


@pytest.mark.slow
def test_the_interval_of_the_best_case_step_contains_the_truth() -> None:
    """Nine times of ten it says; 21 pieces of 20, beside the overhead, are 4.95 % more."""
    rng = np.random.default_rng(5)
    held = []
    for _ in range(40):
        found = estimate_best_case_shift([busy_run(rng, 20, 40)], [busy_run(rng, 21, 40)])
        assert found is not None
        held.append(found.low <= 4.95 <= found.high)
    assert np.mean(held) > 0.85


def test_a_small_change_on_a_busier_machine_is_undecided() -> None:
    """Its steps take some three times as long; none of it is its own, and its best-case step is 4 % too long."""
    rng = np.random.default_rng(17)
    base = [busy_run(rng, 20, busy=0.0) for _ in range(3)]

    def strained(job: Job) -> Job:
        (trace,) = job.values()
        # Whatever else runs: every piece 4 % slower, and each step with a long stop in one of its pieces, now this one.
        stop, each = 6_000_000, trace.events.height // 60
        step, place = pl.int_range(pl.len()) // each, pl.int_range(pl.len()) % each - 1
        here = step % (each - 1)
        events = trace.events.with_columns(pl.col("ts", "dur") * 104 // 100).with_columns(
            ts=pl.col("ts") + (step + (place > here)) * stop,
            dur=pl.col("dur") + pl.when((place == here) | (place == -1)).then(stop).otherwise(0),
        )
        return Job({0: Trace({"events": events}, trace.meta)})

    calm = busy_run(rng, 20, busy=0.0)
    assert judge_regression([calm], base, 3.0)["verdict"][0] == "passed"
    table = judge_regression([strained(calm)], base, 3.0)
    row = table.row(0, named=True)
    assert row["measure"] == BEST_CASE and 3 < row["change_pct"] < 5
    assert row["verdict"] == "undecided"
    # On a machine as busy as that the same 4 % are more than 3.
    assert judge_regression([strained(calm)], base, 1.0)["verdict"][0] == "undecided"
    alike = [busy_run(rng, 20, busy=0.0) for _ in range(3)]
    assert (
        judge_regression([strained(busy_run(rng, 21, busy=0.0))], [strained(job) for job in alike], 3.0)[
            "verdict"
        ][0]
        == "failed"
    )


def test_a_noisy_baseline_has_little_weight() -> None:
    """One of three baselines is undisturbed in a few of its pieces only, and seems longer: the others know better."""
    rng = np.random.default_rng(23)
    base = [busy_run(rng, 20, busy=busy) for busy in (0.2, 0.2, 0.95)]
    calm, _, busy = (found.before for one in base if (found := estimate_best_case_shift([one], [one])))
    assert busy > 1.1 * calm
    found = estimate_best_case_shift([busy_run(rng, 20, busy=0.2)], base)
    assert found is not None and found.percent < 1.5


@pytest.mark.slow
def test_runs_of_different_length_are_compared_over_equal_lengths() -> None:
    """The shortest of 200 steps is shorter than that of 10: compared as they are, the long run would seem faster."""
    rng = np.random.default_rng(11)
    shifts = [
        estimate_best_case_shift([busy_run(rng, 1, 200, 0)], [busy_run(rng, 1, 10, 0)]) for _ in range(60)
    ]
    assert abs(np.mean([found.percent for found in shifts if found])) < 0.5


def test_waits_are_of_a_kind_with_those_at_the_same_place() -> None:
    """A step that hangs on the device: a long wait at its end and a short one at its beginning."""

    def run(wait: int) -> Job:
        rows = []
        for step in range(8):
            at = step * 10_000_000
            rows += [
                ("user_annotation", f"ProfilerStep#{step}", at, 9_000_000 + wait, 0),
                ("cuda_runtime", "cudaStreamSynchronize", at + 100, 1000, 1),
                ("cuda_runtime", "cudaStreamSynchronize", at + 5000, 8_990_000 + wait, 1),
            ]
        frame = pl.DataFrame(rows, schema=["cat", "name", "ts", "dur", "depth"], orient="row")
        frame = frame.with_columns(pid=pl.lit(1), tid=pl.lit(1)).sort("ts", "depth").with_row_index("id")
        return Job({0: Trace({"events": frame}, {"rank": 0, "linked": True})})

    found = estimate_best_case_shift([run(0)], [run(450_000)])
    assert found is not None and found.before == pytest.approx(9_000_000)
    assert found.percent == pytest.approx(5, abs=0.01)


def uneven_work(
    seed: int, big: int, plan: Callable[[int, np.random.Generator], list[int]], dims: bool = False
) -> Job:
    """A run of 30 steps of matrix products of these sizes: 0 takes 300 us, 1 takes ``big`` us. Nothing disturbs it."""
    rng = np.random.default_rng(seed)
    rows, at = [], 0
    for step in range(30):
        begin, at, products = at, at + 5_000, []
        for size in plan(step, rng):
            time = int((big if size else 300) * 1000 * rng.uniform(1, 1.01))
            products.append(("cpu_op", "aten::mm", at, time, 1, f"[[{size}]]"))
            at += time + 10_000
        rows += [("user_annotation", f"ProfilerStep#{step}", begin, at - begin, 0, None), *products]
        at += 1_000
    schema = ["cat", "name", "ts", "dur", "depth", "dims"]
    frame = pl.DataFrame(rows, schema=schema, orient="row").with_row_index("id")
    shapes = (
        frame.drop_nulls("dims").select(event="id", dims="dims")
        if dims
        else frame.head(0).select(event="id", dims="dims")
    )
    tables = {"events": frame.drop("dims").with_columns(pid=pl.lit(1), tid=pl.lit(1))}
    tables["arguments"] = etloom.core.schema.TABLES["arguments"].conform(shapes)
    return Job({0: Trace(tables, {"rank": 0, "linked": True})})


def sides(
    plan: Callable[[int, np.random.Generator], list[int]], dims: bool = False
) -> tuple[list[Job], list[Job]]:
    """Three runs and three more, of which every large product takes half as long again."""
    return tuple([uneven_work(10 * us + n, us, plan, dims) for n in range(3)] for us in (1000, 1500))


def in_line(step: int, rng: np.random.Generator) -> list[int]:
    return [0] + 9 * [1]


def by_turns(step: int, rng: np.random.Generator) -> list[int]:
    """Of every other step one more."""
    return [0, 1] * 5 + [0] * (step % 2)


def shuffled(step: int, rng: np.random.Generator) -> list[int]:
    return rng.permutation(5 * [0] + 5 * [1]).tolist()


def uneven(step: int, rng: np.random.Generator) -> list[int]:
    """Of ten lengths."""
    return rng.permutation(5 * [0] + (5 + step % 10) * [1]).tolist()


@pytest.mark.parametrize("plan", [in_line, by_turns])
def test_a_large_product_is_not_measured_by_a_small_one(
    plan: Callable[[int, np.random.Generator], list[int]],
) -> None:
    """Of one name they are, and no shapes are recorded: each is measured at its own place."""
    before, after = sides(plan)
    one = lambda us: np.mean([sum(1.0 * us if size else 300 for size in plan(n, np.random)) for n in (0, 1)])  # noqa: E731
    wanted = 100 * (one(1500) / one(1000) - 1)
    for runs, base in ((after, before), (after[:1], before[:1])):
        row = judge_regression(runs, base, 5.0).row(0, named=True)
        assert (row["measure"], row["verdict"]) == (BEST_CASE, "failed")
        assert row["change_pct"] == pytest.approx(wanted, abs=1)
    assert judge_regression(before[:1], before[1:], 5.0)["verdict"][0] == "passed"


def test_shapes_distinguish_operators_in_changing_order() -> None:
    before, after = sides(shuffled, dims=True)
    row = judge_regression(after, before, 5.0).row(0, named=True)
    assert row["verdict"] == "failed" and row["change_pct"] == pytest.approx(38.5, abs=1)


@pytest.mark.parametrize("plan", [shuffled, uneven])
def test_an_unmeasurable_best_case_does_not_pass_against_the_steps(
    plan: Callable[[int, np.random.Generator], list[int]],
) -> None:
    """Without shapes, in another order in each step, the pieces show nothing of it; the steps do."""
    before, after = sides(plan)
    table = judge_regression(after, before, 20.0)
    assert table["measure"][0] == BEST_CASE and table["verdict"].to_list() == ["undecided", "noted"]
    assert abs(table["change_pct"][0]) < 20
    (line,) = explain_row(table, 0)
    assert line.endswith(
        "the steps took longer than that, and their segments do not show why; --metric wall-step-time judges it"
    )
    assert judge_regression(after, before, 20.0, ["wall-step-time"])["verdict"].to_list() == ["failed"]
    assert judge_regression(before[:1], before[1:], 20.0)["verdict"][0] == "passed"


@pytest.mark.slow
def test_the_gate(runs: tuple[Path, Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b, slow = map(str, runs)
    junit = tmp_path / "out.xml"
    assert main(["check", b, "--baseline", a, "--junit", str(junit)]) == 0
    assert (
        tree.parse(junit).getroot().attrib.items() >= {"tests": "1", "failures": "0", "errors": "0"}.items()
    )
    assert main(["check", slow, "--baseline", a, "--baseline", b, "--junit", str(junit), "--github"]) == 1
    suite = tree.parse(junit).getroot()
    assert suite.get("failures") == "1" and suite.find("testcase/failure") is not None
    assert "::error title=etloom check::best-case step time: +5.0 %25 (" in capfd.readouterr().err
    assert main(["check", slow, "--baseline", a, "--max-regression", "8%"]) == 0
    for wrong, said in (
        (
            ["--baseline", a, "--max-regression", "x"],
            "--max-regression: expected a percentage of 0 or more, got 'x'; write it as 3%; see etloom check --help",
        ),
        (
            ["--baseline", a, "--max-regression", "-3%"],
            "--max-regression: expected a percentage of 0 or more, got '-3%'",
        ),
        (
            ["--baseline", a, "--max-regression", "0.03"],
            "--max-regression: '0.03' may be a fraction or a percentage; write it as 3% or as 0.03%",
        ),
        (["--baseline", a, "--metric", "speed"], "--metric: unknown metric 'speed'"),
        ([], f"missing the run to compare with: etloom check {slow} --baseline MAIN"),
        ([b], f"missing the run to compare with: etloom check {b} --baseline {slow}"),
    ):
        capfd.readouterr()
        assert main(["check", slow, *wrong]) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1) and said in err
    deep = tmp_path / "not" / "there" / "out.xml"
    assert main(["check", b, "--baseline", a, "--junit", str(deep)]) == 0 and deep.exists()
    assert main(["check", slow, "--baseline", a, "--metric", "peak-memory"]) == 1
    assert main(["check", slow, "--baseline", a, "--metric", "wall-step-time"]) == 1


def test_an_undecided_gate_does_not_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = [str(write_stepped_run(tmp_path / name, [1000.0, 1001])) for name in "ab"]
    junit = tmp_path / "out.xml"
    assert main(["check", few[0], "--baseline", few[1], "--junit", str(junit), "--github"]) == 3
    assert tree.parse(junit).getroot().get("errors") == "1"
    said = capfd.readouterr().err
    assert "::warning title=etloom check::step time: undecided, +0.0 %25 with 3 %25 allowed" in said
    assert "needs about 3 more steps on each side" in said


def test_near_the_limit_it_reports_how_many_more_steps_are_needed() -> None:
    rng = np.random.default_rng(3)
    before, after = [busy_run(rng, 40) for _ in range(2)], [busy_run(rng, 41)]
    table = judge_regression(after, before, 1.8)
    (line,) = explain_row(table, 0)
    assert table["verdict"][0] == "undecided" and "undecided" in line and "more run" in line
    assert judge_regression(after, before, 6.0)["verdict"][0] == "passed"


def even_run(times: list[int]) -> Job:
    """Steps of these times, of one piece of work each and a wait that takes up what it is short of."""
    rows, at = [], 0
    for number, time in enumerate(times):
        work = 200_000 + 110_000 * number
        rows += [
            ("user_annotation", f"ProfilerStep#{number}", at, time, 0),
            ("cpu_op", "aten::mm", at, work, 1),
            ("cuda_runtime", "cudaStreamSynchronize", at + work, time - work, 1),
        ]
        at += time
    frame = pl.DataFrame(rows, schema=["cat", "name", "ts", "dur", "depth"], orient="row")
    frame = frame.with_columns(pid=pl.lit(1), tid=pl.lit(1)).sort("ts", "depth").with_row_index("id")
    return Job({0: Trace({"events": frame}, {"rank": 0, "linked": True})})


def test_even_steps_decide_if_the_best_case_step_cannot() -> None:
    """The host's jitter is in the wait for the device, and the step takes none of it."""
    times = [1_000_000, 1_001_000, 1_000_500, 1_000_200, 1_001_100, 1_000_700]
    before, after, slow = (
        even_run(times),
        even_run(times[::-1]),
        even_run([time * 11 // 10 for time in times]),
    )
    found = judge_regression([after], [before], 3.0)
    assert dict(found.select("measure", "verdict").rows()) == {"step time": "passed", BEST_CASE: "noted"}
    found = judge_regression([slow], [before], 3.0)
    assert found["verdict"].to_list() == ["undecided", "noted"]
    assert "--metric wall-step-time judges it" in explain_row(found, 1)[0]
    assert judge_regression([slow], [before], 3.0, ["wall-step-time"])["verdict"].to_list() == ["failed"]


def test_changes_from_nearly_zero_have_no_percentage(tmp_path: Path) -> None:
    """0.2 us of communication in a step of 1 ms became 0.9 us, and then a tenth of the step."""
    job = {
        us: etloom.open(write_stepped_run(tmp_path / f"{us}", [1000.0] * 6, communication=us))
        for us in (0.2, 0.9, 100)
    }
    for us, verdict in ((0.9, "passed"), (100, "failed")):
        row = judge_regression([job[us]], [job[0.2]], 3.0, ["exposed-communication"]).row(0, named=True)
        assert (row["verdict"], row["change_pct"]) == (verdict, None)
        assert row["change"] == pytest.approx(1000 * (us - 0.2))
    table = judge_regression([job[100]], [job[0.2]], 3.0, ["exposed-communication"])
    assert explain_row(table, 0) == ["exposed communication: negligible in the baseline, now 0.10 ms"]


def test_a_message_for_github_is_one_line() -> None:
    assert escape_for_github("5 %\nnext") == "5 %25%0Anext"


def test_the_keys_of_json_are_documented() -> None:
    from etloom.analyses.findings import COLUMNS as findings
    from etloom.comparison.gate import COLUMNS as judged

    docs = ROOT / "docs"
    told = (docs / "findings.md").read_text()
    assert [line.split("`")[1] for line in told.splitlines() if line.startswith("| `")] == list(findings)
    listed = told.split("## Patterns")[1].partition("\n## ")[0].splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in listed if line.startswith("| ")]
    assert rows == ["pattern", *registry.list_plugins("patterns")]
    table = (docs / "comparing.md").read_text().split("Keys of `--format json`; ")[1].splitlines()
    keys = [line.split(" | ")[0] for line in table if line.startswith("| `")]
    assert [name for cell in keys for name in cell.split("`")[1::2]] == list(judged)
