"""CCL-Bench's metrics that its workload card is asked for: what was run, and on how much."""

from __future__ import annotations

from typing import Any

from etloom.analyses.ccl_bench.rank_data import MetricUnavailable
from etloom.analyses.ccl_bench.run_data import Answer, Metric, RunData, collect_known, mean_over_ranks
from etloom.analyses.ccl_bench.trace_metrics import compute_counted_mfu, mean_step_seconds
from etloom.analyses.flops.peaks import find_peaks
from etloom.core.errors import EtloomError

_MODEL, _ARCH, _DATA = ("workload", "model"), ("workload", "model", "model_arch"), ("workload", "data")
_DEVICE = ("workload", "hardware", "xpu_spec")


def _card_value(run: RunData, where: tuple[str, ...], *names: str) -> Any:
    """What the card says under the first of these names. Raises Unknown."""
    part: Any = run.card
    for key in where:
        part = part.get(key) if isinstance(part, dict) else None
    for name in names:
        if isinstance(part, dict) and part.get(name) not in (None, ""):
            return part[name]
    raise MetricUnavailable(f"the workload card does not say {'.'.join((*where, names[0]))}")


def _card_number(run: RunData, where: tuple[str, ...], *names: str) -> float:
    value = _card_value(run, where, *names)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise MetricUnavailable(
            f"{'.'.join((*where, names[0]))} of the workload card is {value!r}, no number above 0"
        )
    return float(value)


def _throughput(run: RunData) -> Answer:
    """Tokens/s of the whole run: a global batch a step."""
    if _card_value(run, _MODEL, "phase") != "training":
        raise MetricUnavailable("how many tokens a pass of inference makes is not in the card")
    tokens = _card_number(run, _DATA, "batch_size") * _card_number(run, _DATA, "seq_len")
    times = collect_known(run.ranks, mean_step_seconds)
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
    """FLOP/s of one device in the card's precision."""
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
        raise MetricUnavailable(f"the peak of {model} in {precision} is not known")
    return rate * 1e12


def _card_mfu(run: RunData) -> Answer:
    """6 FLOP a parameter and token and 12 L H Q S of attention; training alone, since a card of inference says no
    tokens/s."""
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
