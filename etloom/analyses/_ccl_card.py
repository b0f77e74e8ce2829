"""CCL-Bench's metrics that its workload card is asked for: what was run, and on how much."""

from __future__ import annotations

from typing import Any

from etloom.analyses._ccl_metrics import counted_mfu, step_time
from etloom.analyses._ccl_ranks import Unknown
from etloom.analyses._ccl_run import Answer, Metric, Run, known, of_ranks
from etloom.analyses._peaks import peaks
from etloom.errors import EtloomError

_MODEL, _ARCH, _DATA = ("workload", "model"), ("workload", "model", "model_arch"), ("workload", "data")
_DEVICE = ("workload", "hardware", "xpu_spec")


def _said(run: Run, where: tuple[str, ...], *names: str) -> Any:
    """What the card says under the first of these names. Raises Unknown."""
    part: Any = run.card
    for key in where:
        part = part.get(key) if isinstance(part, dict) else None
    for name in names:
        if isinstance(part, dict) and part.get(name) not in (None, ""):
            return part[name]
    raise Unknown(f"the workload card does not say {'.'.join((*where, names[0]))}")


def _number(run: Run, where: tuple[str, ...], *names: str) -> float:
    value = _said(run, where, *names)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise Unknown(f"{'.'.join((*where, names[0]))} of the workload card is {value!r}, no number above 0")
    return float(value)


def _throughput(run: Run) -> Answer:
    """Tokens/s of the whole run: a global batch a step."""
    if _said(run, _MODEL, "phase") != "training":
        raise Unknown("how many tokens a pass of inference makes is not in the card")
    tokens = _number(run, _DATA, "batch_size") * _number(run, _DATA, "seq_len")
    times = known(run.ranks, step_time)
    return tokens * len(times) / sum(times), len(times)


def _world(run: Run) -> float:
    try:
        return _number(run, _DEVICE, "total_count")
    except Unknown:
        worlds = [size for rank in run.ranks if (size := rank.trace.meta.get("world_size"))]
        if not worlds:
            raise
        return float(max(worlds))


def _peak(run: Run) -> float:
    """FLOP/s of one device in the card's precision."""
    model, precision = str(_said(run, _DEVICE, "model")), str(_said(run, _MODEL, "precision")).lower()
    named = run.ranks[0].trace.replace(
        meta={"device_properties": [{"id": 0, "name": model.replace("_", " ")}]}
    )
    try:
        rate = peaks(named, [0]).tflops(precision)
    except EtloomError as error:
        raise Unknown(error.what) from None
    if rate is None:
        raise Unknown(f"the peak of {model} in {precision} is not known")
    return rate * 1e12


def _card_mfu(run: Run) -> Answer:
    """6 FLOP a parameter and token and 12 L H Q S of attention; training alone, since a card of inference says no
    tokens/s."""
    rate, ranks = _throughput(run)
    weights = _number(run, _ARCH, "num_params_active", "num_params") - _embedding(run)
    attention = 12.0 * _number(run, _DATA, "seq_len")
    for name in ("num_layers", "num_heads", "head_dim"):
        attention *= _number(run, _ARCH, name)
    return 100 * (6 * weights + attention) * rate / (_world(run) * _peak(run)), ranks


def _embedding(run: Run) -> float:
    try:
        return _number(run, _ARCH, "num_params_embedding")
    except Unknown:
        return 0.0


METRICS: tuple[Metric, ...] = (
    ("mfu", "%", "card", _card_mfu),
    ("mfu_counted", "%", "trace", of_ranks(counted_mfu)),
    ("throughput", "tokens/s", "card", _throughput),
)
