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
- bandwidth_utilization_*_group_6 is the median bus bandwidth (see collectives) of the transfer time, without waits, if
  at least two ranks were recorded; else of the whole kernel. collective_vol_*_gb uses the message sizes of nccl-tests,
  and counts a collective in the step in which the host issued it;
- avg_comm_bandwidth_GBps is the mean bus bandwidth of all communications of known size;
- total_compute_time_s and total_comm_time_s are sums over kernels; compute_utilization_proxy is
  total_compute_time_s / wall_time_s; straggler_metrics is the slowdown: the largest over the smallest time of the
  communication kernels of a rank;
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
    ("scale_up_bw_utility", "%", "needs a prediction: etloom export --to ccl-bench"),
    ("gpu_step_score", "ratio", "compares this run with a baseline: use etloom diff"),
    ("traffic_window", "s", "depends on the event names of one framework"),
    ("break_down_steps", "s", "a table: use etloom analyze temporal-breakdown"),
    ("communication_overhead", "ratio", "see communication_fraction"),
    ("bandwidth_utilization", "%", "see bandwidth_utilization_*_group_6"),
    ("achieved_flops_from_trace_json", "FLOP/s", "use etloom analyze flops, or mfu_counted"),
    ("total_model_flops_from_args", "FLOP", "use etloom analyze flops"),
    ("flops_per_token_used", "FLOP", "an argument of that tool, --model_params: see mfu and throughput"),
    ("estimated_total_tokens", "tokens", "depends on --model_params of that tool: see throughput"),
    (
        "estimated_throughput_tokens_per_s",
        "tokens/s",
        "depends on --model_params of that tool: see throughput",
    ),
    ("estimated_bandwidth", "GB/s", "of TPU traces"),
    ("comm_kernel_breakdown_tpu", "s", "of TPU traces"),
    ("ttft_group_6", "ms", "read from a benchmark's JSONL file: see ttft"),
    ("tpot_group_6", "ms", "read from a benchmark's JSONL file: see tpot"),
    ("throughput_group_6", "tokens/s", "read from a benchmark's JSONL file: see throughput"),
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
