"""CCL-Bench metrics that need the workload card: model, data and hardware of the run."""

from __future__ import annotations

import sys
from typing import Any

from etloom.analyses.ccl_bench.rank_data import MetricUnavailable
from etloom.analyses.ccl_bench.run_data import Answer, Metric, RunData, collect_values, mean_over_ranks
from etloom.analyses.ccl_bench.trace_metrics import compute_counted_mfu, mean_step_seconds
from etloom.analyses.flops.peaks import find_peaks
from etloom.core.errors import EtloomError

_MODEL, _ARCH, _DATA = ("workload", "model"), ("workload", "model", "model_arch"), ("workload", "data")
_DEVICE = ("workload", "hardware", "xpu_spec")


def _card_value(run: RunData, path: tuple[str, ...], *names: str) -> Any:
    """Return the workload card's value under the first of the alternative names ``names`` that it contains; raise
    MetricUnavailable if it contains none."""
    part: Any = run.card
    for key in path:
        part = part.get(key) if isinstance(part, dict) else None
    for name in names:
        if isinstance(part, dict) and part.get(name) not in (None, ""):
            return part[name]
    raise MetricUnavailable(f"the workload card lacks {'.'.join((*path, names[0]))}")


def _card_number(run: RunData, path: tuple[str, ...], *names: str) -> float:
    """Return a positive number of the workload card; raise MetricUnavailable if it is missing or invalid."""
    value = _card_value(run, path, *names)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise MetricUnavailable(
            f"{'.'.join((*path, names[0]))} of the workload card is {value!r}; expected a positive number"
        )
    return float(value)


def _throughput(run: RunData) -> Answer:
    """Return the throughput of the whole run in tokens/s: the tokens of a global batch divided by the step time."""
    if _card_value(run, _MODEL, "phase") != "training":
        raise MetricUnavailable("the card does not contain the number of tokens per inference pass")
    tokens = _card_number(run, _DATA, "batch_size") * _card_number(run, _DATA, "seq_len")
    times = collect_values(run.ranks, mean_step_seconds)
    return tokens * len(times) / sum(times), len(times)


def _world(run: RunData) -> float:
    try:
        return _card_number(run, _DEVICE, "total_count")
    except MetricUnavailable:
        worlds = [size for rank in run.ranks if (size := rank.trace.meta.get("world_size"))]
        if not worlds:
            raise
        return float(max(worlds))


def _peak(run: RunData) -> float:
    """Return the peak FLOP/s of one device in the precision that the workload card states."""
    model, precision = (
        str(_card_value(run, _DEVICE, "model")),
        str(_card_value(run, _MODEL, "precision")).lower(),
    )
    named = run.ranks[0].trace.replace(
        meta={"device_properties": [{"id": 0, "name": model.replace("_", " ")}]}
    )
    try:
        rate = find_peaks(named, [0]).tflops(precision)
    except EtloomError as error:
        raise MetricUnavailable(error.what) from None
    if rate is None:
        raise MetricUnavailable(f"the peak of {model} in {precision} is unknown")
    return rate * 1e12


def _card_mfu(run: RunData) -> Answer:
    """Return the MFU from 6 FLOPs per parameter and token, plus 12 L H Q S FLOPs of attention (sizes of the workload
    card).

    Only for training, because the card of an inference run has no tokens/s.
    """
    rate, ranks = _throughput(run)
    weights = _card_number(run, _ARCH, "num_params_active", "num_params") - _embedding(run)
    attention = 12.0 * _card_number(run, _DATA, "seq_len")
    for name in ("num_layers", "num_heads", "head_dim"):
        attention *= _card_number(run, _ARCH, name)
    return 100 * (6 * weights + attention) * rate / (_world(run) * _peak(run)), ranks


def _embedding(run: RunData) -> float:
    try:
        return _card_number(run, _ARCH, "num_params_embedding")
    except MetricUnavailable:
        return 0.0


METRICS: tuple[Metric, ...] = (
    ("mfu", "%", "card", _card_mfu),
    ("mfu_counted", "%", "trace", mean_over_ranks(compute_counted_mfu)),
    ("throughput", "tokens/s", "card", _throughput),
)
