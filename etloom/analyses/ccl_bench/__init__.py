"""CCL-Bench metrics of a run; each has a value and unit, or the reason why it is unavailable.

One row per metric, with CCL-Bench's name if it has one. value is null if the trace or the workload card lacks required
data, which reason describes. ranks: number of ranks the value covers. basis: the source of the value: steps (mean over
the steps, without the first and the last if there are more than two, then over the ranks), trace (everything that was
recorded) or card (the workload card in the folder of the traces). Steps are ProfilerStep#N annotations, else vLLM's
execute_context_*, else SGLang's run_batch; without step annotations, metrics of steps cover the whole trace.

Definitions used where CCL-Bench's tools contradict each other or the name of the metric:

- communication is recognized by kernel names as in all analyses, never by "send" or "p2p" anywhere in a name;
- concurrent activities on several streams are counted once, except in communication_fraction, communication_ratio,
  straggler and dominant_kernel_concentration, which are defined on sums;
- bandwidth_utilization_* is the median bus bandwidth (see collectives) of the transfer time, without waits, if at least
  two ranks were recorded; else of the whole kernel. collective_vol_* uses the message sizes of nccl-tests;
- mean_sm_coverage is weighted by time, and average_memory_bandwidth covers memcpys;
- mfu uses the model on the card (6 FLOP per parameter and token, plus attention), mfu_counted the recorded shapes
  (see mfu); memory_bound_fraction and compute_bound_fraction are shares of the time of the operators whose bound is
  known (see roofline);
- hockney_* are fitted to ring all-reduces: T / (2(n-1)) = alpha + bytes / n / bandwidth.

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
    ("scale_up_bw_utility", "%", "compares two simulated networks: use etloom simulate --set 'comm x0.5'"),
    ("gpu_step_score", "ratio", "compares this run with a baseline: use etloom diff"),
    ("traffic_window", "s", "depends on the event names of one framework"),
)


def analyze(job: Job) -> pl.DataFrame:
    for trace in job.values():
        require_linked(trace)
    run = RunData(job, [build_rank_data(rank, trace) for rank, trace in job.items()])
    marked = any(rank.step_annotation for rank in run.ranks)
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
