"""CCL-Bench's metrics that compare two networks, which need a prediction."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job

_NETWORKS = ("x1", "x2")
_METRIC = "scale_up_bw_utility"


def predict_network_metrics(job: Job) -> dict[str, dict[str, Any]]:
    """Return the rows of CCL-Bench's metrics.json that need a prediction: a value, or the reason why it is unknown.

    scale_up_bw_utility: 100 * (T - T2) / T, where T is the predicted time of the run on the network that is fitted to
    the recording, and T2 on one whose bandwidth within a host is twice as high. If the ranks are on several hosts, the
    recording does not tell the links within a host from those between hosts. The basis states the error with which
    the network reproduces the recording.

    Args:
        job: A linked job.
    """
    row: dict[str, Any] = {"unit": "%"}
    try:
        value, error = _predict_scale_up(job)
        basis = f"prediction, which reproduces the recording with an error of {error:.0%}"
        row |= {"value": value, "ranks": len(job), "basis": basis}
    except EtloomError as problem:
        row["reason"] = problem.what
    return {_METRIC: row}


def _predict_scale_up(job: Job) -> tuple[float, float]:
    """Return the metric, and the relative error with which the network reproduces the recording."""
    from etloom.simulator.prediction import Prediction, predict
    from etloom.simulator.untimed import has_times

    if len(job) < 2:
        raise EtloomError("one rank has no link to another one")
    if not has_times(job):
        raise EtloomError("the traces have no times")
    hosts = {trace.meta.get("host") for trace in job.values()}
    if None in hosts or len(hosts) > 1:
        where = "are on several hosts" if len(hosts - {None}) > 1 else "do not state their host"
        raise EtloomError(
            f"the ranks {where}: use etloom predict --network FILE.yaml with the links of both levels"
        )
    predictions = [predict(job, network=network) for network in _NETWORKS]
    times = []
    for prediction in predictions:
        if not isinstance(prediction, Prediction) or prediction.reproduction_error is None:
            raise EtloomError("no network can be fitted to the recording")
        times.append(float(prediction.table.filter(pl.col("scope") == "job")["predicted_ns"][0]))
        error = prediction.reproduction_error
    return 100 * (times[0] - times[1]) / times[0], error
