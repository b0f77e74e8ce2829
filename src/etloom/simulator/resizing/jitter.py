"""Draws the arrival times of new ranks at collectives from the recorded distribution.

A recorded rank arrives earlier or later than the mean of the ranks of its instance. A new rank repeats the deviations
of a recorded rank with the same program in a random step, all collectives of a step together, since a rank that is late
at one of them is late at the next. So the last of more ranks arrives later, as it does in reality. The deviations of n
ranks from their mean are smaller than those from the true mean; they are scaled by sqrt(n / (n - 1)).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.collectives.process_mesh import infer_mesh
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind
from etloom.graphs.peers import find_peers
from etloom.simulator.scenario import Scenario

NO_STEP = -(1 << 62)


def draw_arrivals(
    recorded: Scenario, grown: Scenario, template: np.ndarray, copy: np.ndarray, axis: str, seed: int
) -> Scenario:
    """Return the resized scenario with random arrivals at collectives for every copy of a rank but the first.

    Args:
        recorded: the scenario of the recorded ranks.
        grown: the scenario of the new ranks, as `replication.replicate` returns it.
        template: new rank -> recorded rank.
        copy: new rank -> number of this copy; the first copy keeps the recorded arrivals.
        axis: the axis whose size changes; ranks along it do the same work for the sizes of cp, ep and dp.
        seed: of the random numbers.
    """
    deviations = _measure_deviations(recorded, axis)
    further = np.flatnonzero(copy > 0)
    if not deviations.height or not len(further) or not deviations["deviation"].ne(0).any():
        return grown
    generator = np.random.default_rng(seed)
    donors = _draw_donors(deviations, template[further], further, generator)
    drawn = donors.join(
        deviations.select("rank", "step", "place", drawn="deviation"),
        left_on=("donor", "donor_step"),
        right_on=("rank", "step"),
    )
    own = deviations.select("step", "place", "event", pl.col("rank").alias("template"), own="deviation")
    of_rank = pl.DataFrame({"rank": further, "template": template[further]})
    changes = (
        own.join(of_rank, on="template")
        .join(drawn, on=("rank", "step", "place"))
        .select("rank", "event", change=(pl.col("drawn") - pl.col("own")).round().cast(pl.Int64))
    )
    edges = np.flatnonzero(grown.graph.kind == EdgeKind.ARRIVAL)
    arrivals = pl.DataFrame(
        {
            "edge": edges,
            "rank": grown.graph.rank[grown.graph.source[edges]].astype(np.int64),
            "event": grown.graph.owner[edges].astype(np.int64),
        }
    ).join(changes, on=("rank", "event"))
    lag = grown.lag.copy()
    lag[arrivals["edge"].to_numpy()] += arrivals["change"].to_numpy()
    spread = deviations["deviation"].std() or 0.0
    note = f"arrivals of new ranks vary like the recorded ones, with a standard deviation of {spread / 1e6:,.3f} ms"
    return grown.replace(lag=lag, notes=(*grown.notes, note))


def _measure_deviations(scenario: Scenario, axis: str) -> pl.DataFrame:
    """Return the time of each recorded arrival at a collective minus the mean of ranks of the same role, in ns, scaled
    for their number.

    Columns: rank, role, event, step, place (of the collective in the step of the rank), deviation.
    """
    graph = scenario.graph
    edges = np.flatnonzero(graph.kind == EdgeKind.ARRIVAL)
    source = graph.source[edges]
    table = pl.DataFrame(
        {
            "instance": graph.target[edges].astype(np.int64),
            "rank": graph.rank[source].astype(np.int64),
            "event": graph.owner[edges].astype(np.int64),
            "time": graph.time[source],
        }
    ).join(_find_roles(scenario, axis), on="rank")
    # Only ranks of one role do the same work before they arrive.
    count = pl.len().over("instance", "role")
    table = table.filter(count > 1).with_columns(
        deviation=(pl.col("time") - pl.col("time").mean().over("instance", "role"))
        * (count / (count - 1)).sqrt()
    )
    steps = [
        pl.DataFrame(
            {"rank": rank, "event": rows["event"], "step": _steps_of_events(scenario, rank, rows["event"])},
            schema={"rank": pl.Int64, "event": pl.Int64, "step": pl.Int64},
        )
        for (rank,), rows in table.partition_by("rank", as_dict=True).items()
    ]
    if not steps:
        return (
            table.select("rank", "event")
            .head(0)
            .with_columns(
                role=pl.lit(0, pl.Int64),
                step=pl.lit(0, pl.Int64),
                place=pl.lit(0, pl.Int64),
                deviation=pl.lit(0.0),
            )
        )
    table = table.join(pl.concat(steps), on=("rank", "event")).sort("rank", "time", "event")
    return table.with_columns(place=pl.int_range(pl.len()).over("rank", "step")).select(
        "rank", "role", "event", "step", "place", "deviation"
    )


def _find_roles(scenario: Scenario, axis: str) -> pl.DataFrame:
    """Return a role number for each recorded rank, equal for ranks that run the same program on different data."""
    equal = {"dp": 0, "cp": 0} if axis == "cp" else {"dp": 0}
    mesh, programs = infer_mesh(scenario.recorded), find_peers(scenario.recorded)
    places = [mesh.rank_at({**mesh.coordinates(rank), **equal}) for rank in scenario.recorded]
    roles = [
        place + mesh.world_size * programs[rank]
        for place, rank in zip(places, scenario.recorded, strict=True)
    ]
    return pl.DataFrame(
        {"rank": list(scenario.recorded), "role": roles}, schema={"rank": pl.Int64, "role": pl.Int64}
    )


def _steps_of_events(scenario: Scenario, rank: int, events: pl.Series) -> pl.Series:
    """Return the step number of each event (id) of a rank; `NO_STEP` outside of steps."""
    table = scenario.recorded[rank].events
    return table["step"].fill_null(NO_STEP)[rows_of_ids(table, events)]


def _draw_donors(
    deviations: pl.DataFrame, templates: np.ndarray, ranks: np.ndarray, generator: np.random.Generator
) -> pl.DataFrame:
    """Draw at random for each new rank and step a recorded rank and step of the same role with as many collectives.

    Columns: rank, step, donor, donor_step.
    """
    sizes = deviations.group_by("rank", "role", "step", maintain_order=True).agg(size=pl.len())
    frames = []
    for recorded, role, step, size in sizes.iter_rows():
        new = ranks[templates == recorded]
        in_step = (pl.col("step") != NO_STEP) == (step != NO_STEP)
        pool = sizes.filter((pl.col("role") == role) & (pl.col("size") == size) & in_step)
        choice = generator.integers(0, pool.height, len(new))
        frames.append(
            pl.DataFrame(
                {"rank": new, "step": np.full(len(new), step), "donor": pool["rank"].to_numpy()[choice]},
            ).with_columns(donor_step=pl.Series(pool["step"].to_numpy()[choice]))
        )
    return pl.concat(frames)
