"""Scenarios on a contracted graph: the same times, durations and network as on the whole graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core.trace import Job
from etloom.graphs import algorithms
from etloom.simulator.chains import contract_scenario
from etloom.simulator.network import apply_network, try_fit
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.scenario import Basis, Scenario
from support.real_runs import open_run
from support.simulated_jobs import job_of, programs, simulate

seeds = st.integers(0, 1 << 30)


def vary(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario with other lags and bases on some of its edges."""
    choices = np.random.default_rng(seed)
    edges = choices.random(len(scenario.lag)) < choices.random()
    lag = choices.integers(0, 1_000_000, edges.sum())
    return scenario.with_lags(edges, lag, Basis.ROOFLINE)


def slow_spans(scenario: Scenario, time: np.ndarray) -> dict[tuple[int, int], int]:
    """The time from the first to the last point of each step of each rank, of points of the whole graph."""
    graph, spans = scenario.graph, {}
    steps = {
        rank: dict(trace.events.select("id", "step").iter_rows()) for rank, trace in scenario.recorded.items()
    }
    for rank, event, at in zip(graph.rank.tolist(), graph.event.tolist(), time.tolist(), strict=True):
        step = steps[rank].get(event) if rank >= 0 and event >= 0 else None
        if step is not None:
            low, high = spans.get((rank, step), (at, at))
            spans[rank, step] = min(low, at), max(high, at)
    return {key: high - low for key, (low, high) in spans.items()}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_points_and_lags_are_those_of_the_whole_graph(seed: int) -> None:
    job = job_of(simulate(programs(seed, 30)))
    scenario = vary(describe_recording(job), seed)
    chains = contract_scenario(scenario)
    small, contraction = chains.scenario, chains.contraction
    assert (small.basis[contraction.chain] == scenario.basis).all()
    assert (small.compute_times() == scenario.compute_times()[contraction.points]).all()
    assert (chains.expand(small).lag == scenario.lag).all()
    whole, kept = scenario.communications.participations, small.communications.participations
    for name in ("begin", "finish"):
        assert (contraction.points[kept[name].to_numpy()] == whole[name].to_numpy()).all()
    for name in ("own_edge", "transfer_edge"):
        edges = whole[name].to_numpy()
        exists = edges >= 0
        assert (contraction.last[kept[name].to_numpy()[exists]] == edges[exists]).all()
        assert np.isin(np.flatnonzero(~exists), np.flatnonzero(kept[name].to_numpy() < 0)).all()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=seeds, factor=st.floats(0, 1000), basis=st.sampled_from([Basis.RECORDED, Basis.ROOFLINE]))
def test_scaled_times_are_those_of_scaled_lags(seed: int, factor: float, basis: Basis) -> None:
    scenario = vary(describe_recording(job_of(simulate(programs(seed, 20)))), seed)
    scaled = (scenario.basis == basis) & (scenario.lag > 0)
    lag = np.where(scaled, np.rint(scenario.lag * factor), scenario.lag).astype(np.int64)
    expected = algorithms.compute_times(scenario.graph, lag, scenario.start)
    assert (scenario.compute_scaled_times(basis, factor) == expected).all()


def runs(own: Path) -> list[Job]:
    return [open_run(own / name) for name in ("ddp_2", "gpu_small")]


def test_durations_are_those_of_all_points(own: Path) -> None:
    for job in runs(own):
        scenario = vary(describe_recording(job), 1)
        chains = contract_scenario(scenario)
        rows = chains.durations.rows.with_columns(
            ns=pl.Series(chains.durations.measure(chains.scenario.compute_times()))
        )
        time = scenario.compute_times()
        by_step = {(rank, step): ns for _, rank, step, ns in rows.filter(scope="step").iter_rows()}
        assert by_step and by_step == slow_spans(scenario, time)
        assert rows.row(0)[-1] == time.max() - time.min()


def test_a_network_changes_the_same_lags(own: Path) -> None:
    scenario = describe_recording(open_run(own / "ddp_2"))
    fit, chains = try_fit(scenario), contract_scenario(scenario)
    assert fit is not None
    expected, small = (apply_network(each, fit.model, Basis.FITTED) for each in (scenario, chains.scenario))
    for each in (expected, small):
        assert (each.compute_times() == algorithms.compute_times(each.graph, each.lag, each.start)).all()
        longer = each.with_lags(np.ones(len(each.lag), bool), each.lag + 1, Basis.GUESSED)
        assert (longer.compute_times() != each.compute_times()).any()
    expanded = chains.expand(small)
    assert (expected.lag != scenario.lag).any()
    assert (expanded.lag == expected.lag).all() and (expanded.basis == expected.basis).all()
