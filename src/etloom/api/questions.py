"""Public functions that answer questions about runs: analyses, graphs, predictions, comparisons, reports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import linker
from etloom.api.arguments import OutPath, Run, StrPath, as_job, as_run, verb, writing
from etloom.api.verdicts import CheckResult, HangReport
from etloom.core import registry
from etloom.core.errors import EtloomError, InvalidValue, warn
from etloom.core.registry import check_options
from etloom.core.text import format_ranks
from etloom.core.trace import Job, Trace

if TYPE_CHECKING:
    import altair

    from etloom.comparison import Difference as Difference
    from etloom.core.calls import RankStacks
    from etloom.core.communicators import RasReport
    from etloom.graphs import DependencyGraph
    from etloom.reports.page import NotebookPage
    from etloom.simulator import Simulated
    from etloom.simulator.changes import AnyChange
    from etloom.simulator.pipelines import RelaidPipeline
    from etloom.simulator.planning import Plan
    from etloom.simulator.prediction import Prediction
    from etloom.simulator.training_jobs import JobValue, TrainingJob
    from etloom.simulator.untimed import UntimedPrediction


@verb
def analyze(run: Run, name: str, **options: Any) -> pl.DataFrame:
    """Run the analysis ``name`` on a run, and return its table.

    Traces that are not linked are linked first. Ranks whose trace cannot answer (for example because only another rank
    recorded memory) are missing in the table and named by one `EtloomWarning`; `etloom.analyses.answers.answer`
    returns them with their errors.

    Args:
        run: a Trace, a Job, or a path.
        name: of the analysis, as in ``etloom analyze --list``.
        options: of the analysis, as in ``etloom analyze NAME --help``.

    Returns:
        The table of the analysis; for a Job the tables of all ranks, with ``rank`` as first column.

    Raises:
        UnknownName: The analysis does not exist.
        EtloomError: it has no such option.
        AnalysisError: no rank can answer.

    Example:
        >>> etloom.analyze("run/", "top-ops", top=1).columns[:2]
        ['rank', 'name']
    """
    from etloom.analyses.answers import answer

    registry.get("analyses", name)
    check_options("analyses", name, options)
    result = answer(as_run(run, for_report=name == "findings"), name, **options)
    if result.refused:
        warn(f"{name}: {'; '.join(result.explain_refusals())}")
    return result.table


@verb
def graph(run: Run) -> DependencyGraph:
    """Build the dependency graph of a rank, or of all ranks of a job together.

    Args:
        run: a Trace, a Job, or a path; linked first if necessary.

    Returns:
        The graph: which work waits for which other work, and for how long. ``.graph`` is an
        `etloom.graphs.Graph`; the functions of that package compute its schedule, critical path and slack.

    Example:
        >>> dependencies = etloom.graph("run/")
    """
    from etloom.graphs import build_graph

    opened = as_run(run)
    return build_graph(linker.linked_ranks(opened) if isinstance(opened, Job) else linker.linked(opened))


@verb
def simulate(run: Run, *changes: str | AnyChange) -> Simulated:
    """Predict how long a run would take under changed conditions, from its dependency graph.

    Args:
        run: a Trace, a Job, or a path.
        changes: lines such as "kernel:*gemm* x0.5" or "comm x0" (`etloom.simulator.changes` defines the language), or
            RemoveSync, Network, NoStraggler, LikePeers of `etloom.simulator`.

    Returns:
        The prediction: ``.table`` has one row for the job, each rank and each step, ``.reasons`` explains what it is
        based on.

    Raises:
        EtloomError: a change has a syntax error or applies to nothing.

    Example:
        >>> etloom.simulate("run/", "comm x0").table.columns[:3]
        ['scope', 'rank', 'step']
    """
    from etloom import simulator
    from etloom.simulator.changes import AnyChange

    job = as_job(run)
    parsed = [simulator.parse_change(change) if isinstance(change, str) else change for change in changes]
    for change in parsed:
        if not isinstance(change, AnyChange):
            raise InvalidValue(
                f"expected a change, got {type(change).__name__}",
                remedy='simulate(run, "comm x0", "op x0.5")',
            )
    return simulator.simulate(linker.linked_ranks(job), parsed)


@verb
def simulate_memory(run: Run, *changes: str, other_batch: Run | None = None) -> pl.DataFrame:
    """Predict the memory that a recorded program needs under other settings of PyTorch's caching allocator.

    Args:
        run: a Trace, a Job, or a path, with memory snapshots.
        changes: settings in the form of PYTORCH_CUDA_ALLOC_CONF ("expandable_segments:True,max_split_size_mb:128"),
            with "capacity=40GiB" for another device, "empty_cache=peak" for a call of empty_cache at a moment,
            "checkpoint=model.py:12" for checkpointing of the module that a line calls, and "batch=x2".
        other_batch: snapshots of the same program with another batch; "batch=x2" finds there which sizes grow with it.

    Returns:
        One row per rank and device for the recording, and one per change: rank, device, change, fits (no request
        fails), capacity_bytes, peak_reserved_bytes, peak_allocated_bytes, needed_bytes (the smallest capacity that
        suffices), retries, failed_bytes and failed_after_ns (the first request that fails), repeated_requests and
        repeated_ns (what checkpointing computes again, and its recorded time on the host).

    Raises:
        InvalidValue: A change names an unknown setting or module, or has an invalid value.
        AnalysisError: no rank has a history of its allocator, or it lacks what a change needs.

    Example:
        >>> etloom.simulate_memory("snapshot.pickle", "capacity=40GiB")["fits"].to_list()  # doctest: +SKIP
        [True, False]
    """
    from etloom.analyses.helpers import memory_changes

    others = None if other_batch is None else as_job(other_batch)
    return memory_changes.simulate_memory(as_job(run), changes, others)


@verb
def plan(
    job: Run,
    cluster: StrPath = "dgx-h100",
    *,
    gpus: int | None = None,
    parallel: Mapping[str, int] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Plan:
    """Rank the layouts of a training job on a cluster by their predicted step time, with 90 % intervals.

    Args:
        job: a path of a YAML file, an example such as "llama3-8b" (docs/plan.md), or a recording of a transformer with
            shapes, real or of a fake world.
        cluster: a path of a YAML file, or nodes such as "dgx-h100".
        gpus: the number of GPUs; default: that of the cluster.
        parallel: sizes of axes that are fixed, such as {"tp": 8}; vp: model chunks per stage, mb: micro-batches.
        changes: values of the job by key, such as {"batch": 512}, instead of those of the file or the recording.

    Returns:
        The plan: ``.table`` has one row for each mesh that fits, from the fastest; ``.reasons`` states assumptions, the
        basis of the intervals, and the layouts that do not fit; ``.inferred`` what a recording shows of the job.

    Raises:
        UnknownName: no job or cluster has this name.
        EtloomError: a file describes no job or cluster, or a recording no transformer.
        AnalysisError: no layout exists, or none fits into the memory.

    Example:
        >>> etloom.plan("llama3-8b", gpus=64).table.columns[:3]
        ['tp', 'cp', 'pp']
    """
    from etloom.simulator.planning import plan as plan_job
    from etloom.simulator.training_jobs import MAX_GPUS, read_cluster

    if gpus is not None and not (isinstance(gpus, int) and 1 <= gpus <= MAX_GPUS):
        raise InvalidValue(f"expected 1 to {MAX_GPUS:,} GPUs, got {gpus!r}", option="gpus")
    if not isinstance(changes, Mapping | None):
        raise InvalidValue(f"expected values by key, got {type(changes).__name__}", option="changes")
    described, values = describe_job(job, changes)
    return plan_job(described, read_cluster(cluster, gpus), parallel, values)


def describe_job(
    job: Run, changes: Mapping[str, Any] | None = None
) -> tuple[TrainingJob, tuple[JobValue, ...]]:
    """Return the training job of a recording, a YAML file or an example, and how recorded values are known.

    Raises:
        EtloomError: a file describes no job, or a recording no transformer.
    """
    from etloom.simulator.recorded_jobs import describe_recorded_job
    from etloom.simulator.training_jobs import JobValue, names_recording, parse_job, read_job

    changes = changes or {}
    if not (isinstance(job, (Trace, Job)) or names_recording(job)):
        return read_job(job, changes), ()
    name = "recording" if isinstance(job, (Trace, Job)) else Path(job).name
    document, values = describe_recorded_job(linker.linked_ranks(_open_recording(job)))
    replaced = [JobValue(key, value, "set", "--set") for key, value in changes.items()]
    values = (*(value for value in values if value.key not in changes), *replaced)
    return parse_job(document, name, changes), values


def _open_recording(job: Run) -> Job:
    """Open the run of a recorded job; the error for another file names everything that a plan accepts."""
    from etloom.formats import UNKNOWN_FORMAT
    from etloom.simulator.training_jobs import list_jobs

    try:
        return as_job(job)
    except EtloomError as error:
        if UNKNOWN_FORMAT not in error.what:
            raise
        raise EtloomError(
            f"{job}: neither the description of a job nor a recording",
            remedy=f"expected a YAML file (docs/plan.md), one of {', '.join(list_jobs())}, or the trace of a job",
        ) from None


@verb
def predict(
    run: Run,
    *,
    network: str | None = None,
    recorded_network: str | None = None,
    ranks: int | None = None,
    parallel: Mapping[str, int] | None = None,
    device: str | None = None,
    host: float | None = None,
    learn_from: StrPath | None = None,
) -> Prediction | RelaidPipeline | UntimedPrediction:
    """Predict how long a run takes on another network, number of ranks, or device, with 90 % intervals.

    Args:
        run: a Trace, a Job, or a path.
        network: a factor of the recorded bandwidth ("x0.2"), a rate ("200Mbit/s"), a preset ("dgx-h100"), or a path
            of a YAML file.
        recorded_network: the nominal network of the recording; transfers reach the same share of the new one.
        ranks: the number of ranks.
        parallel: sizes of the process mesh by axis, such as {"dp": 16}; vp: model chunks per stage, mb: micro-batches.
        device: a GPU of docs/flops.md, such as "h100": kernels change, host time stays.
        host: factor of the times of work on the host (0.5: a host that is twice as fast).
        learn_from: a store or a run, whose calls on the device show the times of a run without times.

    Returns:
        The prediction: ``.table`` has one row for the job, the step time, each rank and each step; ``.reasons`` begins
        with the error of reproducing the recording; ``.job`` is a Job that every verb takes (of another pipeline: a
        pipeline operation trace). A run without times (`collect --fake-world`) needs a device and a network; its table
        has one row per step of each rank, and no ``.job``.

    Raises:
        AnalysisError: the run has no timed event.
        EtloomError: the network or device is unknown, or the recording does not hold what the number of ranks needs.

    Example:
        >>> etloom.predict("run/", network="x0.5").table.columns[:3]
        ['scope', 'rank', 'step']
    """
    from etloom.simulator.prediction import predict as predict_job
    from etloom.simulator.untimed import has_times, predict_untimed

    job = linker.linked_ranks(as_job(run))
    if not has_times(job):
        for option, value in (("ranks", ranks), ("parallel", parallel), ("host", host)):
            if value is not None:
                remedy = "add Kineto traces of the run, or record a run of the size that you ask about"
                text = f"{option} needs a run with times, but its execution traces have none"
                raise InvalidValue(text, remedy=remedy, option=option)
        return predict_untimed(job, device, network, _open_runs(learn_from))
    _refuse_recordings(learn_from)
    return predict_job(
        job,
        network=network,
        recorded_network=recorded_network,
        ranks=ranks,
        parallel=parallel,
        device=device,
        host=host,
    )


@verb
def diff(before: Run, after: Run) -> Difference:
    """Compare two runs: whether the second is slower beyond noise, and what changed.

    Args:
        before: a Trace, a Job, or a path.
        after: likewise.

    Returns:
        The difference: ``.verdict`` says whether the second run is slower beyond noise, ``.table(by)`` what changed
        by "category", "operator", "kernel", "collective", "rank" or "step".

    Example:
        >>> difference = etloom.diff("run/", "run/")
    """
    from etloom.comparison import Difference

    return Difference(*(linker.linked_ranks(as_job(run)) for run in (before, after)))


@verb
def compare(runs: Mapping[str, Run], *, by: str = "category") -> pl.DataFrame:
    """Compare the times of several runs in one table.

    Args:
        runs: name -> a Trace, a Job or a path.
        by: category, family, operator, kernel, collective or rank.

    Returns:
        One row per group, largest spread first: the group's columns, then for each run NAME_ns, its time per step
        (without steps, of the run), averaged over ranks; null where a run has no such row.

    Raises:
        UnknownName: The grouping does not exist.
        InvalidValue: ``runs`` is empty.

    Example:
        >>> etloom.compare({"eager": "run/", "compiled": "run/"}).columns
        ['category', 'eager_ns', 'compiled_ns']
    """
    from etloom.comparison import tabulate_runs

    if not runs:
        raise InvalidValue("runs is empty", remedy="pass a name and a run for each, as in {'eager': 'run/'}")
    return tabulate_runs({name: linker.linked_ranks(as_job(run)) for name, run in runs.items()}, by)


@verb
def diff_memory(before: Run, after: Run) -> pl.DataFrame:
    """Compare what each place in the program holds at the peak of two memory snapshots.

    Args:
        before: a Trace, a Job, or a path, with memory snapshots.
        after: likewise.

    Returns:
        One row per place, largest change first: place, before_blocks, after_blocks, before_bytes, after_bytes,
        change_bytes. The first row, "(peak of reserved memory)", is the peak of reserved memory.

    Raises:
        AnalysisError: a run has no history of its allocator.

    Example:
        >>> etloom.diff_memory("before.pickle", "after.pickle")["change_bytes"][0]  # doctest: +SKIP
        25165824
    """
    from etloom.comparison.difference_tables import compare_memory

    return compare_memory(*(as_job(run) for run in (before, after)))


def _refuse_recordings(path: StrPath | None) -> None:
    """Raise InvalidValue if there are recordings to learn from for a run with times."""
    if path is not None:
        text = "recordings are for a run without times (collect --fake-world), and this run has times"
        raise InvalidValue(text, option="learn_from")


def _open_runs(path: StrPath | None) -> Iterator[Job]:
    """Yield the linked runs of a store, or a single run; none without a path."""
    from etloom.formats.parquet.store_layout import is_store, list_runs, run_folder

    if path is None:
        return
    source = Path(path)
    runs = [run_folder(source, name) for name in list_runs(source)] if is_store(source) else [source]
    yield from (linker.linked_ranks(as_job(run)) for run in runs)


@verb
def check(
    runs: Run | Sequence[Run],
    baselines: Run | Sequence[Run],
    *,
    max_regression_pct: float = 3.0,
    metrics: Sequence[str] = ("step-time",),
) -> CheckResult:
    """Check whether a run is slower than a baseline by more than a limit, beyond noise.

    Args:
        runs: the run to judge, or several recordings of it.
        baselines: the run to compare with, or several recordings of it.
        max_regression_pct: allowed slowdown in percent.
        metrics: of `etloom.comparison.gate.METRICS`.

    Returns:
        The result: ``.verdict`` is "passed", "failed" or "undecided", ``.table`` has one row per measure.

    Raises:
        UnknownName: The metric does not exist.
        AnalysisError: a run lacks what a metric measures.

    Example:
        >>> etloom.check("run/", "run/").verdict
        'undecided'
    """
    from etloom.comparison.gate import explain_row, judge_regression

    sides = [[linker.linked_ranks(as_job(run)) for run in _as_runs(side)] for side in (runs, baselines)]
    table = judge_regression(sides[0], sides[1], max_regression_pct, metrics)
    return CheckResult(table, tuple(tuple(explain_row(table, row)) for row in range(table.height)))


@verb
def hangs(path: StrPath, *, rank_pattern: str | None = None) -> HangReport:
    """Find the cause of a hang or crash in Flight Recorder dumps, a report of NCCL's RAS, or stacks of all ranks.

    Args:
        path: a folder with a dump of each rank, a run of ``etloom collect --watch``, or a stored run of dumps; or a
            report of ``ncclras``, of two the later one; or the folder of torch.distributed's debug server. Next to
            dumps, a report states what happened to ranks without one, and stacks the lines where ranks are.
        rank_pattern: regular expression for the names of dumps with one group, the rank.

    Returns:
        The result: ``.sentence`` names the ranks, the collective and who waits, ``.cause`` holds the evidence,
        ``.table`` the divergences.

    Raises:
        ReadError: neither dumps, a report nor stacks are found, or they cannot be read.
        AnalysisError: no recorded call has a sequence number.

    Example:
        >>> report = etloom.hangs("dumps/")  # doctest: +SKIP
        >>> report.cause.ranks  # doctest: +SKIP
        (9, 14)
    """
    from etloom.analyses.hangs import calls_of_job, combine_calls
    from etloom.api.verdicts import judge_dumps, judge_reports, judge_stacks
    from etloom.formats.parquet.store_layout import is_store, is_stored_run
    from etloom.loading.file_names import choose_patterns
    from etloom.loading.hang_recordings import read_dumps, read_reports, read_stacks

    choose_patterns(rank_pattern)  # a wrong pattern is an error whatever the path contains
    source = Path(path)
    problems: tuple[str, ...] = ()
    reports: list[RasReport] = []
    stacks: list[RankStacks] = []
    if is_store(source) or is_stored_run(source):
        calls = calls_of_job(as_job(source)).require_dumps()
    else:
        stacks, missing = read_stacks(source)
        reports, damage = read_reports(source) if not (stacks and source.is_file()) else ([], [])
        dumps, stats = read_dumps(source, rank_pattern, may_be_empty=bool(reports or stacks))
        problems = tuple(f"{row.name}: {row.example}" for row in dict.fromkeys([*missing, *damage, *stats]))
        if not dumps:
            return judge_reports(reports, stacks, problems) if reports else judge_stacks(stacks, problems)
        calls = combine_calls(dumps)
    calls.require_numbers()
    if source.is_file() and calls.absent:
        problems += (
            f"{source}: the only dump that is read; {format_ranks(calls.absent)} count as ranks without a dump; "
            "open the folder to read all dumps",
        )
    return judge_dumps(calls, reports, stacks, problems)


@verb
def report(run: Run | Difference | list[Difference], path: OutPath) -> Path:
    """Write a self-contained HTML report of a run, or of the difference between two runs.

    Args:
        run: a Trace, a Job or a path; or the difference of two runs (see `diff`), or several from the same first run.
        path: the file to write.

    Returns:
        The path of the file.

    Raises:
        InvalidValue: ``run`` is a list without differences.
        EtloomError: it cannot be written.

    Example:
        >>> etloom.report("run/", "report.html").name
        'report.html'
    """
    from etloom.comparison import Difference
    from etloom.reports import difference_page, html_report

    target = Path(path)
    differences = [run] if isinstance(run, Difference) else run
    if (
        isinstance(differences, list)
        and differences
        and all(isinstance(each, Difference) for each in differences)
    ):
        with writing(target):
            difference_page.write_page(differences, target)
        return target
    job = linker.linked_ranks(as_job(run, for_report=True))  # type: ignore[arg-type]
    with writing(target):
        html_report.write_page(job, target)
    return target


@verb
def show(run: Run, *, height: int = 900) -> NotebookPage:
    """Return the page of a run for the output of a notebook: what `report` writes, in a frame.

    Args:
        run: a Trace, a Job or a path; linked first if necessary.
        height: of the frame, in pixels.

    Returns:
        An object that notebooks display; its ``html`` is the page. For larger runs than a page holds: ``etloom ui``.

    Example:
        >>> etloom.show("run/").height
        900
    """
    from etloom.reports import html_report
    from etloom.reports.page import NotebookPage

    return NotebookPage(html_report.render_page(linker.linked_ranks(as_job(run, for_report=True))), height)


@verb
def metrics(run: Run, *, prefix: str = "etloom/") -> dict[str, float]:
    """Return the main figures of a run as numbers for experiment trackers, which take a dictionary of them.

    Args:
        run: a Trace, a Job or a path; linked first if necessary.
        prefix: of the names.

    Returns:
        ranks; the means over the ranks of step_ms (ms), compute_pct, exposed_communication_pct, idle_pct and
        overlap_pct (percent of the time, and of the communication); and for each pattern of findings with a known
        gain finding/PATTERN_pct, the largest gain in percent of the job. What is unknown is left out.

    Example:
        >>> sorted(etloom.metrics("run/"))[:2]
        ['etloom/compute_pct', 'etloom/exposed_communication_pct']
    """
    from etloom.reports.summary import summarize_run

    job = as_job(run, for_report=True)
    overview = summarize_run(job).tables["overview"]
    names = ("compute_pct", "exposed_communication_pct", "idle_pct", "overlap_pct")
    values: dict[str, Any] = {"ranks": len(job), **{name: overview[name].mean() for name in names}}
    step_ns: Any = overview["step_mean_ns"].mean()
    values["step_ms"] = None if step_ns is None else step_ns / 1e6
    for pattern, gain in analyze(job, "findings").select("pattern", "job_gain_pct").drop_nulls().iter_rows():
        values.setdefault(f"finding/{pattern}_pct", gain)
    return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


@verb
def plot(run: Run, what: str, **options: Any) -> altair.Chart:
    """Draw a chart of the report with Altair, for notebooks; needs ``pip install altair``.

    Args:
        run: a Trace, a Job or a path; linked first if necessary.
        what: ``breakdown``, ``roofline``, ``memory``, ``arrival-skew`` or ``critical-path``.
        options: of the analysis that the chart shows.

    Returns:
        An `altair.Chart`, which notebooks display.

    Raises:
        UnknownName: The chart does not exist.
        EtloomError: Altair is not installed.
        AnalysisError: the traces have no data for it.

    Example:
        >>> chart = etloom.plot("run/", "breakdown")  # doctest: +SKIP
    """
    from etloom.reports.plot import plot as draw

    return draw(linker.linked_ranks(as_job(run)), what, **options)


def _as_runs(runs: Run | Sequence[Run]) -> Sequence[Run]:
    return [runs] if isinstance(runs, (Trace, Job, str, os.PathLike)) else runs
