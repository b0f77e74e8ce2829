"""Predicts a recorded job on another network, device or pipeline, or on another number of ranks.

The recording is the first scenario; each change is a step from a scenario to a scenario. Before anything is changed,
the models reproduce the recording, and the error is the first line of the answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

import numpy as np
import polars as pl

from etloom.analyses.helpers.pipeline_schedule import has_operations
from etloom.collectives.process_mesh import infer_mesh
from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph
from etloom.graphs.graph import Int64Array
from etloom.simulator.chains import ChainScenario
from etloom.simulator.devices import change_collectives, change_device, changes_vendor
from etloom.simulator.durations import TABLE_SCHEMA, Z_90
from etloom.simulator.interval_classes import combine_errors, explain_interval
from etloom.simulator.network import (
    TargetNetwork,
    Topology,
    apply_network,
    parse_target,
    resolve_network,
)
from etloom.simulator.pipelines import PIPELINE_AXES, RelaidPipeline, relay
from etloom.simulator.recorded_run import RecordedRun, get_recorded_run
from etloom.simulator.reproduction import describe_models, require_models
from etloom.simulator.resizing import resize, synthesize_job
from etloom.simulator.scenario import Basis, Scenario

_NO_NETWORK = ["no network could be fitted: no communication between recorded ranks has a known size"]
_MAX_HOST = 1000.0
_HOST_BOUND = 0.5
"""Share of the critical path above which a run is called host-bound."""
_MAX_NS = float(1 << 60)
"""Limit of the sum of all lags at the upper end of their interval, so that times remain 64-bit integers."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The result of `predict`: the predicted times of a job under other conditions.

    Attributes:
        recorded_job: the input.
        scenario: the predicted scenario, on a contracted graph.
        chains: the same without its network.
        recording: what all predictions of the job share.
        classes: what it extrapolates, as in `ERRORS`.
    """

    recorded_job: Job
    scenario: Scenario
    chains: ChainScenario
    recording: RecordedRun
    classes: tuple[str, ...] = ()

    @property
    def recorded(self) -> Scenario:
        """The recorded job as a scenario on a contracted graph."""
        return self.recording.chains.scenario

    @property
    def reproduced(self) -> Scenario | None:
        """The recorded scenario with transfer times from the fitted network model; None if no network could be
        fitted."""
        return self.recording.reproduced

    @cached_property
    def times(self) -> Int64Array:
        """The predicted time of each point of the predicted scenario's graph, int64 ns."""
        return self.scenario.compute_times()

    @cached_property
    def job(self) -> Job:
        """The predicted job as linked traces, which all analyses and exports accept; computed on first access."""
        return synthesize_job(self.chains.expand(self.scenario))

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row for the job, the median step time, each rank and each step, with recorded and predicted durations.

        Columns: scope, rank, step, before_ns (recorded; null for ranks and steps that were not), predicted_ns,
        lower_bound_ns and upper_bound_ns (90 % interval), change_pct.
        """
        durations = self.chains.durations
        predicted = durations.measure(self.times).astype(float)
        below, above = np.zeros(len(predicted)), np.zeros(len(predicted))
        further = Z_90 * float(combine_errors(dict.fromkeys(self.classes, True))[0])
        below += np.square(predicted * -math.expm1(-further))
        above += np.square(predicted * math.expm1(further))
        for faster, slower in self._vary_lags():
            below += np.square(np.maximum(predicted - durations.measure(faster), 0.0))
            above += np.square(np.maximum(durations.measure(slower) - predicted, 0.0))
        before = self.recording.chains.durations
        recorded = before.rows.with_columns(before_ns=pl.Series(before.measure(self.recorded.graph.time)))
        table = durations.rows.with_columns(
            predicted_ns=pl.Series(predicted),
            lower_bound_ns=pl.Series(predicted - np.sqrt(below)),
            upper_bound_ns=pl.Series(predicted + np.sqrt(above)),
        ).join(recorded, on=("scope", "rank", "step"), how="left", nulls_equal=True, maintain_order="left")
        change = 100.0 * (pl.col("predicted_ns") - pl.col("before_ns")) / pl.col("before_ns")
        table = table.with_columns(change_pct=pl.when(pl.col("before_ns") > 0).then(change))
        return table.with_columns(pl.col(r"^.*_ns$").round()).select(
            pl.col(name).cast(dtype) for name, dtype in TABLE_SCHEMA.items()
        )

    def _vary_lags(self) -> list[tuple[Int64Array, Int64Array]]:
        """Return for each `Basis` the point times with its lags at the lower and at the upper end of their interval."""
        ends = [(basis, sign) for basis in self.scenario.lag_sums for sign in (-1, 1)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            times = list(pool.map(self._compute_varied_times, ends))
        return list(zip(times[::2], times[1::2], strict=True))

    def _compute_varied_times(self, end: tuple[Basis, int]) -> Int64Array:
        """Return the point times with the lags of a `Basis` at the lower (-1) or upper end (1) of their interval."""
        basis, sign = end
        largest = math.log(_MAX_NS / max(1.0, self.scenario.lag_sums[basis]))
        exponent = min(sign * Z_90 * self.scenario.deviations[basis], max(0.0, largest))
        return self.scenario.compute_scaled_times(basis, math.exp(exponent))

    @property
    def reproduction_error(self) -> float | None:
        """The relative error with which the fitted network reproduces the step (or run) time; None if unknown."""
        return self.recording.reproduction_error

    @cached_property
    def reasons(self) -> list[str]:
        """Sentences on the error of reproducing the recording, on each change, and on the sources of the predicted
        times."""
        interval = [explain_interval(self.classes)] if self.classes else []
        share = self.recording.host_share if "another host" in self.classes else 0.0
        if share > _HOST_BOUND:
            interval.insert(
                0, f"host-bound: {100 * share:.0f} % of the recorded critical path is work of the host"
            )
        return [*self._explain_reproduction(), *self.scenario.notes, *self._explain_bases(), *interval]

    def _explain_reproduction(self) -> list[str]:
        lines = describe_models(self.recording)
        return lines + (_NO_NETWORK if self.reproduction_error is None and len(self.recorded_job) > 1 else [])

    def _explain_bases(self) -> list[str]:
        """Return a sentence per `Basis` (source of times): its share of all lags, and its standard deviation."""
        scenario = self.scenario
        total = max(sum(scenario.lag_sums.values()), 1.0)
        lines = []
        for basis, sum_ns in scenario.lag_sums.items():
            share = sum_ns / total
            deviation = 100 * scenario.deviations[basis]
            lines.append(
                f"{100 * share:.0f} % of all times: {basis.source}, with a standard deviation of {deviation:.1f} %"
            )
        return lines

    def _summarize(self) -> str:
        """Return the step time, or the run time, and its interval as text."""
        rows = self.table.filter(pl.col("scope").is_in(["job", "step time"]))
        row = rows.row(-1, named=True)
        values = (row["predicted_ns"], row["lower_bound_ns"], row["upper_bound_ns"])
        predicted, lower, upper = (f"{value / 1e6:,.3f}" for value in values)
        is_calibrated = combine_errors(dict.fromkeys(self.classes, True))[1]
        coverage = "in 9 of 10 cases" if is_calibrated else "(not calibrated)"
        return f"{row['scope']} {predicted} ms predicted, {lower} to {upper} ms {coverage}"

    def __repr__(self) -> str:
        return f"<Prediction: {self._summarize()}; see .table, .reasons, .job>"

    def _repr_html_(self) -> str:
        """Return the table and the reasons as HTML for notebooks."""
        lines = "".join(f"<li>{escape(line)}</li>" for line in self.reasons)
        return f"<p><b>{escape(self._summarize())}</b></p>{self.table._repr_html_()}<ul>{lines}</ul>"


def predict(
    job: Job,
    *,
    network: str | None = None,
    recorded_network: str | None = None,
    ranks: int | None = None,
    parallel: Mapping[str, int] | None = None,
    device: str | None = None,
    host: float | None = None,
    graph: DependencyGraph | None = None,
) -> Prediction | RelaidPipeline:
    """Predict a job on another network, another number of ranks, another pipeline, or another device.

    Args:
        job: linked traces.
        network: a factor of the recorded bandwidth (x0.2), a rate (200Mbit/s), a preset, or a YAML file.
        recorded_network: the nominal rate of the recorded network (or preset, or file).
        ranks: the number of ranks.
        parallel: sizes of the process mesh by axis (tp, pp, dp, ...), vp: model chunks per stage, mb: micro-batches.
        device: name of a GPU with known peaks (h100).
        host: factor of the times of work on the host.
        graph: the graph of the job, if already built.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event, or no communication to fit a network to.
        EtloomError: the network or the device is unknown, or the recording does not hold what other ranks need.
    """
    laid_out, ranks, parallel = _split_parallel(job, ranks, parallel)
    changes_pipeline_only = (
        network is None and device is None and host is None and ranks is None and not parallel
    )
    if laid_out and changes_pipeline_only:
        return relay(job, laid_out)
    if has_operations(job):
        raise EtloomError(
            "a pipeline operation trace has neither sizes of messages nor kernels: only its pipeline can change",
            remedy="specify pipeline sizes only, such as --parallel pp=8,mb=32",
        )
    recording = get_recorded_run(job, graph)
    if (
        not changes_pipeline_only
    ):  # else the recording itself is predicted, to show how accurate the models are
        require_models(recording)
    prediction = _predict_times(
        job, recording, (network, recorded_network), (ranks, parallel or None), (device, host)
    )
    if not laid_out:
        return prediction
    row = prediction.table.row(0, named=True)
    deviation = float(np.log(row["upper_bound_ns"] / max(row["lower_bound_ns"], 1)) / (2 * Z_90))
    notes = tuple(prediction.reasons)
    return relay(job, laid_out, changed=prediction.job, deviation=deviation, notes=notes)


def _split_parallel(
    job: Job, ranks: int | None, parallel: Mapping[str, int] | None
) -> tuple[dict[str, int], int | None, dict[str, int]]:
    """Split requested sizes into pipeline sizes (pp, vp, mb), and the number of ranks and other sizes for `resize`."""
    others = dict(parallel or {})
    sizes = {axis: others.pop(axis) for axis in PIPELINE_AXES if axis in others}
    if not sizes:
        return {}, ranks, others
    if has_operations(job) and ranks is None and not others:
        return sizes, None, {}
    mesh = infer_mesh(job)
    recorded = {**mesh.sizes, **others}
    stages = recorded.pop("pp", 1)
    recorded.pop("ep", None)  # divides the data-parallel ranks
    if sizes == {"pp": stages}:
        return {}, ranks, others
    if ranks is not None:
        sizes.setdefault("pp", stages)
        product = math.prod(recorded.values()) // (1 if "dp" in others else recorded.get("dp", 1))
        product *= sizes["pp"]
        if ranks % product or ("dp" in others and ranks != product):
            raise EtloomError(
                f"cannot predict {ranks} ranks: expected a multiple of {product}, the product of the sizes of "
                "the other kinds of parallelism",
                remedy=f"specify, for example, --ranks {max(ranks // product, 1) * product}",
            )
        others.setdefault("dp", ranks // product)
    return sizes, None, others


def _predict_times(
    job: Job,
    recording: RecordedRun,
    networks: tuple[str | None, str | None],
    sizes: tuple[int | None, Mapping[str, int] | None],
    machine: tuple[str | None, float | None],
) -> Prediction:
    """Predict a job without changes of its pipeline.

    ``networks``: the new and the recorded network; ``machine``: the device, and the factor of times of the host.
    """
    network, recorded_network = networks
    ranks, parallel = sizes
    device, host = machine
    recorded, fit = recording.scenario, recording.network_fit
    target = resolve_network(_parse_network(network), fit, _parse_network(recorded_network))
    scenario = recorded if host is None else _scale_host(recorded, recording, host)
    deviations = {**scenario.deviations, Basis.RECORDED: recording.variation}
    if ranks is not None or parallel is not None:
        scenario = resize(scenario, ranks, parallel)
        growth = abs(np.log2(len(scenario.template) / len(recorded.template)))
        deviations[Basis.RECORDED] = float(np.hypot(deviations[Basis.RECORDED], 0.015 * growth))
    if device is not None:
        scenario = change_device(scenario, device)
        deviations[Basis.ROOFLINE] = scenario.deviations[Basis.ROOFLINE]
    chains = recording.chains if scenario is recorded else recording.contract(scenario)
    scenario = chains.scenario
    scenario = apply_network(scenario, target.model, target.basis) if target.model else scenario
    if device is not None and network is None:
        scenario = change_collectives(scenario, device)
    deviations[target.basis] = max(target.deviation, deviations[target.basis] if not target.model else 0.0)
    scenario = scenario.replace(deviations=deviations, notes=(*scenario.notes, *target.notes))
    classes = [] if network is None else _list_network_classes(scenario, target)
    classes += ["another number of ranks"] * (ranks is not None or parallel is not None)
    sides = scenario.communications.instances["where"]
    classes += ["communication of GPUs"] * bool(classes and (sides == "device").any())
    if device is not None:
        classes += ["another device", *["another vendor"] * changes_vendor(recorded, device)]
    classes += ["another host"] * (device is not None or host is not None)
    return _widen_by_error(Prediction(job, scenario, chains, recording, tuple(classes)))


def _scale_host(scenario: Scenario, recording: RecordedRun, factor: float) -> Scenario:
    """Return the recorded scenario with the times of work on the host multiplied by a factor. Raises InvalidValue."""
    if not (isinstance(factor, (int, float)) and 0 < factor <= _MAX_HOST):
        raise InvalidValue(
            f"expected a factor above 0 and up to {_MAX_HOST:g}, got {factor!r}", option="host"
        )
    edges = recording.edges.select_target("host")
    lag = np.rint(scenario.lag[edges] * factor).astype(np.int64)
    return scenario.with_lags(edges, lag, Basis.GUESSED, f"work of the host takes {factor:g} times as long")


def _list_network_classes(scenario: Scenario, target: TargetNetwork) -> list[str]:
    """Return what a prediction on another network extrapolates: kinds of communication with a tenth of all bytes."""
    kinds = {"message": "another rate, messages", "all_to_all": "another rate, all-to-all"}
    sizes = scenario.communications.instances.group_by(
        kind=pl.col("collective").replace_strict(kinds, default="another rate, collectives")
    ).agg(pl.col("bytes").sum())
    large = sizes.filter(pl.col("bytes") * 10 >= pl.col("bytes").sum())
    is_deep = target.model is not None and len(target.model.topology.levels) > 1
    return [*sorted(large["kind"]), *["several levels of the network"] * is_deep]


def _parse_network(text: str | None) -> float | Topology | None:
    return None if text is None else parse_target(text)


def _widen_by_error(prediction: Prediction) -> Prediction:
    """Return the prediction with standard deviations widened by the error of reproducing the recording."""
    scenario, error = prediction.scenario, prediction.reproduction_error or 0.0
    deviations = {basis: float(np.hypot(value, error)) for basis, value in scenario.deviations.items()}
    return replace(prediction, scenario=scenario.replace(deviations=deviations))
