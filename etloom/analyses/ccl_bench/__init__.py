"""CCL-Bench's metrics of a run, each with its unit or with the reason why it is not known.

A row is a metric, by CCL-Bench's name where it has one. value is null where the trace or the workload card does not say
what it needs, and reason says what that is. ranks: how many the value is of. basis: what it was taken from: steps (the
mean over the steps without the first and the last, where there are over two, then over ranks), trace (all that was
recorded), or card (the workload card beside the traces). Steps are ProfilerStep#N, else vLLM's execute_context_*, else
SGLang's run_batch; where none is marked, what is of steps is of the whole trace.

Where CCL-Bench's tools disagree with each other or with the name, this is what is counted:

- communication is told by kernel names as everywhere here, never by "send" or "p2p" anywhere in a name;
- what runs at one time on several streams counts once, but in communication_fraction, communication_ratio, straggler
  and dominant_kernel_concentration, which are of sums;
- bandwidth_utilization_* is the median bus bandwidth (see collectives) of the time without waits, where two ranks were
  recorded; else of the whole kernel. collective_vol_* is of message sizes as nccl-tests counts them;
- mean_sm_coverage is weighted by time, and average_memory_bandwidth is of copies;
- mfu is of the card's model (6 FLOP a parameter and token, and attention), mfu_counted of shapes (see mfu);
  memory_bound_fraction and compute_bound_fraction are of the time of operators whose bound is known (see roofline);
- hockney_* are fitted to all-reduces of a ring: T / (2(n-1)) = alpha + bytes / n / bandwidth.

Units: in the column unit; GB is 1e9 B. Definitions: CCL-Bench (Cornell), tools/*.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.ccl_bench import card_metrics, collective_metrics, trace_metrics
from etloom.analyses.ccl_bench.rank_data import MetricUnavailable, build_rank_data
from etloom.analyses.ccl_bench.run_data import Metric, RunData
from etloom.analyses.helpers import conform_columns, require_linked
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "metric": pl.String,
    "value": pl.Float64,
    "unit": pl.String,
    "ranks": pl.Int64,
    "basis": pl.String,
    "reason": pl.String,
}
_METRICS: tuple[Metric, ...] = (*trace_metrics.METRICS, *collective_metrics.METRICS, *card_metrics.METRICS)
_OUTSIDE = (
    ("scale_up_bw_utility", "%", "it compares two simulated networks: etloom simulate --set 'comm x0.5'"),
    ("gpu_step_score", "ratio", "it weighs this run against a baseline: etloom diff"),
    ("traffic_window", "s", "it takes the framework's phases from names of one framework"),
)


def analyze(job: Job) -> pl.DataFrame:
    for trace in job.values():
        require_linked(trace)
    run = RunData(job, [build_rank_data(rank, trace) for rank, trace in job.items()])
    marked = any(rank.marks for rank in run.ranks)
    rows: list[tuple[str, float | None, int | None, str, str | None, str | None]] = []
    for name, unit, basis, question in _METRICS:
        try:
            value, ranks = question(run)
            rows.append(
                (name, value, ranks, unit, basis if marked else basis.replace("steps", "trace"), None)
            )
        except MetricUnavailable as unknown:
            rows.append((name, None, None, unit, None, str(unknown)))
    rows += ((name, None, None, unit, None, reason) for name, unit, reason in _OUTSIDE)
    table = pl.DataFrame(rows, schema=["metric", "value", "ranks", "unit", "basis", "reason"], orient="row")
    return conform_columns(table, COLUMNS)
