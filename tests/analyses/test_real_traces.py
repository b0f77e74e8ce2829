"""Every analysis on every real trace: an answer that can be true, or one sentence; parts that sum to their whole."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import etloom
from etloom import cli
from etloom.core import registry
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job
from support.paths import DATA, skip_without_data

RUNS = ("simple_add", "nccl_ddp", "dlrm", "linear", "hta_multirank", "cpu/*", "chakra/astra/*")
FILES = (
    "critical_path/*",
    "hta_misc/*",
    "tracelens/*",
    "nsys/*",
    "et_schemas/*",
    "resnet_mismatch/*",
    "chakra/*.gz",
)
REAL = sorted(path.relative_to(DATA).as_posix() for glob in (*RUNS, *FILES) for path in DATA.glob(glob))
SIGNED = {
    "explained_pct",  # of slowdown: without an item that is faster than its peers
    *("offset_ns", "lower_bound_ns", "upper_bound_ns", "drift_ppm"),  # of clocks
    *("shortfall_ns", "shortfall_pct", "max_shortfall_ns"),  # of graph-quality: less than the makespan
    *(
        "delay_ns",
        "longer_compute_ns",
        "other_work_ns",
        "late_launch_ns",
        "inherited_delay_ns",
    ),  # of stragglers
}
SUMS = {
    *(
        ("stragglers", "pct"),
        ("graph-quality", "residual_pct"),
    ),  # delays that are under way at one time each count
    ("imbalance", "imbalance_pct"),  # most over mean
    ("slowdown", "explained_pct"),  # items faster than their peers are slower in the ideal job
    ("roofline", "roofline_pct"),  # of a peak that a boosted clock exceeds
}
"""Shares that may exceed the whole."""
KEYS = {"rank", "stream", "device", "step", "start_ns", "ts_ns", "time_ns", "call_start_ns", "value"}


@pytest.fixture(scope="module", params=skip_without_data(REAL))
def name(request: pytest.FixtureRequest) -> str:
    """One trace after the other: all tests of a trace share its answers."""
    return str(request.param)


@lru_cache(maxsize=1)
def opened(name: str) -> Job:
    return etloom.open(DATA / name)


@lru_cache(maxsize=256)
def asked(name: str, analysis: str, **options: object) -> pl.DataFrame | None:
    try:
        return etloom.analyze(opened(name), analysis, **options)
    except AnalysisError as refusal:
        assert refusal.remedy, analysis
        assert "\n" not in str(refusal)
        return None


@pytest.mark.slow
def test_answers_can_be_true(name: str) -> None:
    for analysis in registry.list_plugins("analyses"):
        table = asked(name, analysis)
        if table is None:
            continue
        module = registry.get("analyses", analysis)
        rank = {"rank": pl.Int64} if module.SCOPE == "rank" else {}
        assert dict(table.schema) == {**rank, **module.COLUMNS}, analysis
        assert table.height == table.unique().height or analysis == "launches", (
            f"{analysis}: a row stands twice"
        )
        for column, values in zip(table.columns, table, strict=True):
            if values.dtype.is_float():
                assert values.drop_nulls().is_finite().all(), (analysis, column)
            if values.dtype.is_numeric() and column not in KEYS | SIGNED:
                assert values.drop_nulls().is_empty() or values.min() >= 0, (analysis, column)
            if values.dtype.is_numeric() and column in ("rank", "stream", "device", "step"):
                assert values.drop_nulls().is_empty() or values.min() >= 0, (analysis, column)
            if column.endswith("pct") and (analysis, column) not in SUMS:
                assert values.drop_nulls().is_empty() or values.max() < 100.001, (analysis, column)
            if values.dtype == pl.String:
                assert not values.is_in(["", "null", "None", "nan", "-1"]).any(), (analysis, column)


def sums(table: pl.DataFrame, *by: str) -> dict[object, int]:
    """The sum of the last of these columns for each value of the others."""
    return dict(table.group_by(pl.struct(by[:-1]).struct.json_encode()).agg(pl.col(by[-1]).sum()).rows())


@pytest.mark.slow
def test_parts_sum_to_the_whole(name: str) -> None:
    times = asked(name, "temporal-breakdown")
    if times is None:
        return
    exposed = [f"exposed_{kind}_ns" for kind in ("communication", "memory", "other")]
    assert times.select((pl.sum_horizontal("compute_ns", *exposed) == pl.col("busy_ns")).all()).item()
    assert times.select((pl.col("busy_ns") + pl.col("idle_ns") == pl.col("span_ns")).all()).item()
    overlap = asked(name, "comm-overlap")
    assert overlap is not None
    assert overlap.select(
        (pl.col("overlapped_ns") + pl.col("exposed_ns") == pl.col("communication_ns")).all()
    ).item()
    assert overlap["exposed_ns"].to_list() == times["exposed_communication_ns"].to_list()
    whole = times.filter(pl.col("step").is_null())
    together = asked(name, "kernel-overlap")
    assert together is not None
    assert sums(together, "rank", "time_ns") == {k: v for k, v in sums(whole, "rank", "busy_ns").items() if v}
    by_name, by_kind = asked(name, "kernel-breakdown"), asked(name, "kernel-breakdown", by="kind")
    assert by_name is not None
    assert by_kind is not None
    for column in ("count", "total_ns"):
        assert sums(by_name, "rank", "kind", column) == sums(by_kind, "rank", "kind", column)
    operators = asked(name, "top-ops", top=10**9)
    if operators is not None:
        assert operators.select((pl.col("self_ns") <= pl.col("total_ns")).all()).item()
        assert operators.group_by("rank").agg(pl.col("self_pct").sum())[
            "self_pct"
        ].to_list() == pytest.approx([100.0] * operators["rank"].n_unique())


@pytest.mark.slow
def test_gpu_activity_is_equal_in_all_analyses(name: str) -> None:
    idle, times = asked(name, "idle-time"), asked(name, "temporal-breakdown")
    if idle is None or times is None:
        return
    # A stream's gaps and its work are its span; the device is busy when some stream is.
    lanes = ["rank", "step", "device", "stream"]
    streams = idle.group_by(lanes).agg(pl.col("idle_ns").sum(), pl.col("busy_ns", "span_ns").first())
    assert streams.select((pl.col("idle_ns") + pl.col("busy_ns") == pl.col("span_ns")).all()).item()
    devices = (
        streams.filter(pl.col("step").is_null())
        .group_by("rank")
        .agg(pl.col("busy_ns").sum().alias("all"), pl.col("busy_ns").max().alias("one"))
        .join(times.filter(pl.col("step").is_null()), on="rank")
    )
    assert devices.select(pl.col("busy_ns").is_between("one", "all").all()).item()
    kernels = asked(name, "kernel-breakdown")
    assert kernels is not None
    for other, options in (("annotated-kernels", {}), ("annotated-kernels", {"by": "annotation"})):
        table = asked(name, other, **options)
        assert table is not None
        for column in ("count", "total_ns"):
            assert sums(table, "rank", column) == sums(kernels, "rank", column), (other, column)
    short = asked(name, "short-kernels", threshold_ns=2**62)
    assert short is not None
    assert sums(short, "rank", "count") == sums(kernels.filter(pl.col("kind") != "memory"), "rank", "count")
    launches, stats = asked(name, "launches"), asked(name, "launch-stats")
    if launches is not None and stats is not None:
        assert sums(stats, "rank", "activities") == sums(launches.with_columns(one=1), "rank", "one")
        total = sums(kernels, "rank", "total_ns")
        assert all(part <= total[rank] for rank, part in sums(launches, "rank", "device_ns").items())
    queue, blocked = asked(name, "queue-length"), asked(name, "queue-summary")
    if queue is not None and blocked is not None:
        ends = queue.group_by(["rank", "device", "stream"], maintain_order=True).last()
        assert ends["queue_length"].unique().to_list() == [0], "all that was launched has run"
        longest = blocked.filter(pl.col("step").is_null())
        assert (longest["max"] <= queue["queue_length"].max()).all()
    copies = asked(name, "memory-bandwidth-summary")
    if copies is not None:
        memory = kernels.filter(pl.col("kind") == "memory")
        assert sums(copies, "rank", "time_ns") == sums(memory, "rank", "total_ns")
        assert copies.select((pl.col("busy_ns") <= pl.col("time_ns")).all()).item()


@pytest.mark.slow
def test_operators_are_the_same_whichever_way_they_are_counted(name: str) -> None:
    operators, arguments = asked(name, "top-ops", top=10**9), asked(name, "unique-args", top=10**9)
    if operators is not None and arguments is not None:
        for column in ("count", "self_ns"):
            assert sums(arguments, "rank", "name", column) == sums(operators, "rank", "name", column), column
    kernels, families = asked(name, "kernel-breakdown"), asked(name, "kernel-families")
    if kernels is not None and families is not None:
        assert sums(families, "rank", "total_ns") == sums(kernels, "rank", "total_ns")
        assert sums(families, "rank", "kernels") == sums(kernels, "rank", "count")
        alike = (
            families.filter(pl.col("family") == "communication"),
            kernels.filter(pl.col("kind") == "communication"),
        )
        assert sums(alike[0], "rank", "total_ns") == sums(alike[1], "rank", "total_ns")
    flops = [asked(name, "flops", by=by, top=10**9) for by in ("operator", "family", "all")]
    if flops[0] is not None:
        for column in ("calls", "counted", "kernels", "flops", "bytes", "time_ns"):
            one, *others = (sums(table, "rank", column) for table in flops if table is not None)
            assert others == [one, one], column
    modules = asked(name, "module-view")
    if modules is not None:
        outermost = modules.filter(pl.col("depth") == 0)
        assert sums(outermost, "rank", "device_ns") == sums(modules, "rank", "self_device_ns")
    again = asked(name, "recompute")
    if again is not None and again.height:
        assert max(sums(again, "rank", "host_pct").values()) < 100.001


@pytest.mark.slow
def test_steps_are_parts_of_the_run(name: str) -> None:
    """What was launched in a step is what the whole holds of it, and no more."""
    steps, kernels = asked(name, "steps"), asked(name, "kernel-breakdown")
    if (
        steps is None
        or kernels is None
        or steps["rank"].n_unique() != 1
        or (kernels["basis"] != "device").any()
    ):
        return
    parts = []
    for number, count, operators in steps.select("step", "kernels", "operators").rows():
        part = asked(name, "kernel-breakdown", step=number)
        assert part is not None and part["count"].sum() == count
        parts.append(part)
        ops = asked(name, "top-ops", step=number, top=10**9)
        assert (0 if ops is None else ops["count"].sum()) <= operators
    if parts:
        together = pl.concat(parts).group_by("kind", "name").agg(pl.col("count", "total_ns").sum())
        both = together.join(kernels, on=["kind", "name"])
        assert both.height == together.height
        assert both.select((pl.col("count") <= pl.col("count_right")).all()).item()
        assert both.select((pl.col("total_ns") <= pl.col("total_ns_right")).all()).item()


@pytest.mark.slow
def test_an_empty_list_is_explained(data: Path) -> None:
    """Through the command line: an answer without rows, and a question that cannot be answered, in a sentence each."""
    empty = CliRunner().invoke(cli.app, ["analyze", "steps", str(data / "simple_add")])
    assert empty.exit_code == 1, "as where a question cannot be answered"
    none = CliRunner().invoke(cli.app, ["analyze", "kernel-sequences", str(data / "simple_add")])
    assert (none.exit_code, none.stderr) == (
        0,
        "etloom: no operator launched at least --min-length kernels\n",
    ), "nothing of the kind is an answer"
    assert (
        empty.stderr
        == "etloom: rank 0: no step is annotated with ProfilerStep; call torch.profiler's step() after each step "
        "(JAX: StepTraceAnnotation), or name the events that are steps: --step-name REGEX\n"
    )
    for name in ("steps", "iterations"):
        arguments = ["analyze", name, str(data / "simple_add"), "--step-name", "no such step"]
        unmatched = CliRunner().invoke(cli.app, arguments)
        assert unmatched.exit_code == 1
        assert "no host event matches --step-name 'no such step'" in unmatched.stderr
    refused = CliRunner().invoke(cli.app, ["analyze", "queue-length", str(data / "cpu" / "ddp_2")])
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    assert "the trace contains no GPU activity; record with the profiler's CUDA activity" in refused.stderr


opened_by_command = lru_cache(maxsize=3)(etloom.open)


@pytest.mark.slow
@pytest.mark.parametrize("analysis", registry.list_plugins("analyses"))
def test_the_command_line_answers(analysis: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etloom, "open", lambda path, **options: opened_by_command(path))
    for run in ("hta_multirank", "cpu/mt_bwd", "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz"):
        asked = CliRunner().invoke(cli.app, ["analyze", analysis, str(data / run), "--format", "json"])
        if asked.exit_code == 0:
            rows = json.loads(asked.stdout)
            assert rows or asked.stderr.startswith("etloom: ")
        else:
            assert asked.exit_code == 1
            assert asked.stderr.startswith("etloom: ")
            lines = [line for line in asked.stderr.splitlines() if "data lost or doubtful" not in line]
            assert len(lines) == 1


def test_the_kernels_of_a_graph_are_compared_with_the_call_together(data: Path) -> None:
    """421 kernels of some us each, and one call of 507 us that launched them all: the device waits for none."""
    trace = etloom.read(data / "tracelens" / "mi300_vllm_graph_execution.json.gz")
    rows = (
        etloom.analyze(trace, "launch-stats")
        .select("call", "launches", "activities", "short_activities")
        .rows()
    )
    assert ("hipGraphLaunch", 1, 421, 0) in rows and ("hipLaunchKernel", 3, 3, 3) in rows
