"""Fits latency and bandwidth of a network to recorded sizes and times of communications that may share links."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from etloom.core.errors import AnalysisError
from etloom.simulator.network.model import RING_DIRECTIONS, NetworkModel, TransferTimes
from etloom.simulator.network.topology import Level, Topology
from etloom.simulator.scenario import Scenario

DEFAULT_LATENCY_NS = {"host": 25_000.0, "device": 5_000.0}
"""Latency of a message if the recording has no small communications."""

_QUANTILE = 0.25
"""The quantile of the ratios of measured to modelled time that is fitted: disturbances only make transfers longer."""

_SMALL_BYTES = 16_384
"""Communications up to this size show the latency."""


_SLOW_SHARING = 1.02
"""Ratio of measured to modelled times above which overlapping transfers do not reach all of the rate together."""

OPPOSITE_RINGS = 0.8
"""Share of a link's rate that all-gathers and reductions of gloo reach together on three and more ranks, for recordings
that do not show it: benchmarks/predict/lab/ring_directions.py."""

_MIN_COUNT = 5
"""Fewer communications of a kind fit nothing."""


@dataclass(frozen=True)
class NetworkFit:
    """A network model fitted to a recording, and the deviation of measured times from modelled times.

    Attributes:
        model: one level that joins all ranks.
        deviation: relative spread of measured around modelled times.
        count: communications that it was fitted to.
        is_latency_fitted: else it is `DEFAULT_LATENCY_NS`.
    """

    model: NetworkModel
    deviation: float
    count: int
    is_latency_fitted: bool

    @property
    def level(self) -> Level:
        """The only level of the fitted network, with the fitted bandwidth and latency."""
        return self.model.topology.levels[0]


def fit_network(scenario: Scenario) -> NetworkFit:
    """Fit latency (ns) and bandwidth (bytes/s) of a network to the communications of a recorded scenario.

    Raises:
        AnalysisError: no communication between recorded ranks states its size and its group.
    """
    measured = _measure(scenario)
    if not measured.is_empty():
        modelled = TransferTimes(scenario.communications, _build_model(scenario, 0.0, 1.0)).instances
        measured = measured.filter(pl.col("instance").is_in(modelled.tolist()))
    if measured.is_empty():
        raise AnalysisError(
            "no communication states its size and is matched across the recorded ranks, so no network can be fitted",
            remedy="record all ranks, with an execution trace (etloom collect --with et)",
        )
    side = measured["where"].mode().sort()[0]
    small = measured.filter(pl.col("bytes") <= _SMALL_BYTES)
    large = measured.filter(pl.col("bytes") > _SMALL_BYTES)
    separate = large.filter(~pl.col("overlaps"))
    basis = next((table for table in (separate, large) if table.height >= _MIN_COUNT), measured)
    latency, rate = DEFAULT_LATENCY_NS[side], 1e9
    is_fitted = small.height >= _MIN_COUNT
    for _ in range(3 if is_fitted else 1):
        if is_fitted:
            latency *= _find_ratio(scenario, small, _build_model(scenario, latency, rate))
        rate = _fit_rate(scenario, basis, latency, rate)
    model = replace(_build_model(scenario, latency, rate), buffer_bytes=_find_buffer(scenario, measured))
    if basis is separate:
        model = _fit_sharing(scenario, large.filter("overlaps"), model)
    return NetworkFit(model, _find_spread(scenario, large, model), measured.height, is_fitted)


def try_fit(scenario: Scenario) -> NetworkFit | None:
    """Return the network fitted to a recorded scenario; None if it has no communication to fit."""
    try:
        return fit_network(scenario)
    except AnalysisError:
        return None


def _build_model(scenario: Scenario, latency_ns: float, bytes_per_second: float) -> NetworkModel:
    size = 1 + max(rank for ranks in scenario.communications.instances["ranks"] for rank in ranks)
    return NetworkModel(Topology("fitted", (Level("network", size, "switch", bytes_per_second, latency_ns),)))


def _find_buffer(scenario: Scenario, measured: pl.DataFrame) -> float:
    """Return the bytes of a message that are left when its sender continues: the most over the sizes of messages."""
    messages = measured.filter(pl.col("collective") == "message", pl.col("ranks").list.len() == 2)
    parts = scenario.communications.participations
    ends = parts.select(
        "instance", sender="rank", sent=pl.Series(scenario.graph.time[parts["finish"].to_numpy()])
    )
    senders = messages.with_columns(sender=pl.col("ranks").list.first()).join(ends, on=("instance", "sender"))
    remaining = pl.col("bytes") * ((pl.col("end") - pl.col("sent")) / pl.col("measured")).clip(0.0, 1.0)
    largest = senders.group_by("bytes").agg(remaining=remaining.median())["remaining"].max()
    return float(largest or 0.0)  # type: ignore[arg-type]


def _fit_sharing(scenario: Scenario, shared: pl.DataFrame, model: NetworkModel) -> NetworkModel:
    """Fit the efficiency of shared links, so that modelled times of overlapping transfers match the measured median.

    If rings of gloo in both directions were recorded, and overlapped in none of the measured transfers, it is
    `OPPOSITE_RINGS`, for all transfers that share a link.
    """
    if shared.height < _MIN_COUNT:
        return model
    low, high = 0.3, 1.0
    ratio = _find_ratio(scenario, shared, model, quantile=0.5)
    rings = shared.filter(pl.col("where") == "host")["collective"].replace_strict(
        RING_DIRECTIONS, default=None
    )
    is_shown = ratio != _find_ratio(scenario, shared, replace(model, sharing_efficiency=low), quantile=0.5)
    if rings.drop_nulls().n_unique() > 1 and not is_shown:
        return replace(model, sharing_efficiency=OPPOSITE_RINGS)
    if ratio < _SLOW_SHARING:
        return model
    # Queues make modelled times grow steeply as the efficiency falls, so bisect.
    while high - low > 0.005:
        fitted = replace(model, sharing_efficiency=(low + high) / 2)
        ratio = _find_ratio(scenario, shared, fitted, quantile=0.5)
        low, high = (low, fitted.sharing_efficiency) if ratio > 1 else (fitted.sharing_efficiency, high)
    return fitted if ratio < _SLOW_SHARING else model


def _measure(scenario: Scenario) -> pl.DataFrame:
    """Return the matched communications of known size with their time (ns) from the last rank's begin to the end.

    Those of which all ranks were recorded; if there are none, those of which some ranks were, with their waits for the
    others.
    """
    time = scenario.graph.time
    parts = scenario.communications.participations
    times = parts.with_columns(
        begin=pl.Series(time[parts["begin"].to_numpy()]), end=pl.Series(time[parts["finish"].to_numpy()])
    )
    instances = scenario.communications.instances
    receiver = pl.when(pl.col("collective") == "message").then(pl.col("ranks").list.last())
    times = times.join(instances.select("instance", receiver=receiver), on="instance")
    # The end of a send is when the host waits for it.
    received = pl.col("end").filter(pl.col("rank") == pl.col("receiver").fill_null(pl.col("rank")))
    spans = times.group_by("instance").agg(
        begin=pl.col("begin").max(),
        end=pl.coalesce(received.max(), pl.col("end").max()),
        members=pl.col("rank").n_unique(),
    )
    matched = instances.join(spans, on="instance", maintain_order="left")
    matched = matched.filter(
        (pl.col("bytes") > 0) & (pl.col("members") > 1) & (pl.col("end") > pl.col("begin"))
    ).with_columns(measured=(pl.col("end") - pl.col("begin")).cast(pl.Float64))
    complete = matched.filter(pl.col("members") == pl.col("group_size"))
    matched = (complete if complete.height else matched).sort("begin", "instance", maintain_order=True)
    before = pl.col("end").shift(1).cum_max() > pl.col("begin")
    after = pl.col("begin").shift(-1) < pl.col("end")
    return matched.with_columns(overlaps=before.fill_null(False) | after.fill_null(False))


def _model_times(
    scenario: Scenario, measured: pl.DataFrame, model: NetworkModel
) -> tuple[np.ndarray, np.ndarray]:
    """Return measured and modelled times (ns) of communications, from the recorded begin of the last rank.

    Those that overlapped no other one in the recording are modelled alone: a modelled time a little longer than the
    recorded one would delay the next transfer, and that one all others.
    """
    times = TransferTimes(scenario.communications, model)
    parts = scenario.communications.participations
    begins = scenario.graph.time[parts["begin"].to_numpy()[times.parts]]
    modelled = pl.DataFrame(
        {"instance": times.instances, "finish": times.finish(begins), "solo": times.solo_ns}
    )
    both = measured.join(modelled, on="instance", maintain_order="left")
    expected = pl.when("overlaps").then(pl.col("finish") - pl.col("begin")).otherwise("solo")
    return both["measured"].to_numpy(), both.select(expected).to_series().to_numpy()


def _find_ratio(
    scenario: Scenario, measured: pl.DataFrame, model: NetworkModel, quantile: float = _QUANTILE
) -> float:
    """Return a quantile (default: 0.25) of the ratios of measured to modelled times of communications."""
    actual, modelled = _model_times(scenario, measured, model)
    if not len(actual):
        return 1.0
    return float(np.quantile(actual / np.maximum(modelled, 1.0), quantile))


def _fit_rate(scenario: Scenario, measured: pl.DataFrame, latency_ns: float, rate: float) -> float:
    """Return the bandwidth (bytes/s) at which the 0.25 quantile of measured over modelled times is 1."""
    low, high = 1e3, 1e15
    for _ in range(16):
        ratio = _find_ratio(scenario, measured, _build_model(scenario, latency_ns, rate))
        low, high = (low, rate) if ratio > 1 else (rate, high)
        if abs(ratio - 1) < 1e-3:
            break
        # Queues make modelled times grow steeply as the rate falls, so a step may pass what is known.
        rate = rate / ratio if low < rate / ratio < high else math.sqrt(low * high)
    return rate


def _find_spread(scenario: Scenario, measured: pl.DataFrame, model: NetworkModel) -> float:
    """Return the spread of measured around modelled times: half the central 68 % range of the log of their ratio."""
    actual, modelled = _model_times(scenario, measured, model)
    if len(actual) < 3:
        return 0.3
    low, high = np.quantile(np.log(actual / np.maximum(modelled, 1.0)), [0.16, 0.84])
    return float(max(high - low, 0.0) / 2)
