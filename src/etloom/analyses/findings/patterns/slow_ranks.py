"""Find ranks that take longer than ranks of the same program, in a job whose recording shows no communication.

Ranks of a job without recorded communication whose steps (without steps: whose work) take at least 10 %
longer than the median of three or more ranks of the same program and role. Also on runs without a GPU.

Where ranks communicate, the pattern stragglers tells which of them makes others wait.

Cost: the additional time.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.helpers.rank_kinds import KINDS

SCOPE = "job"
SPLIT_BY_RANK = True
MIN_EXCESS = 0.1
"""Least excess of the time of a rank over the median of its kind, as share."""
MIN_PEERS = 3
"""Least number of ranks of a kind: of two ranks either may be the unusual one."""
MAX_SPREADS = 5
"""The excess is also larger than so many median absolute deviations of the kind."""


def describe_others(count: int) -> str:
    """Return the end of a title: how many more ranks the finding is about."""
    return f"; {count} more {'rank does' if count == 1 else 'ranks do'} so" if count else ""


def find(views: JobView) -> Iterator[tuple[int, Finding]]:
    """Yield a finding for each rank whose steps (without steps: whose work) take longer than those of its kind."""
    if len(views) < MIN_PEERS or views.participations.height:
        return
    rows = [views[rank].compute_once(measure_work).with_columns(rank=pl.lit(rank)) for rank in views]
    table = pl.concat(rows)
    if table["communicates"].any():
        return
    has_steps = (table["steps"] > 0).all()
    time = pl.col("in_steps") / pl.col("steps") if has_steps else pl.col("busy").cast(pl.Float64)
    kinds = KINDS.read(views.job)
    if kinds["kind"].n_unique() > 1:  # ranks without peers are compared with nobody
        kinds = kinds.drop_nulls("kind")
    table = table.join(kinds, on="rank", how="inner", maintain_order="left").with_columns(time=time)
    median = pl.col("time").median().over("kind")
    spread = (pl.col("time") - median).abs().median().over("kind")
    table = table.with_columns(median=median, peers=pl.len().over("kind"), excess=pl.col("time") - median)
    late = table.filter(
        pl.col("peers") >= MIN_PEERS,
        pl.col("median") > 0,
        pl.col("excess") > MIN_EXCESS * pl.col("median"),
        pl.col("excess") > MAX_SPREADS * spread,
    )
    for row in late.iter_rows(named=True):
        yield row["rank"], _describe_rank(views[row["rank"]], row, has_steps)


def _describe_rank(view: RankView, row: dict[str, float], has_steps: bool) -> Finding:
    share = 100 * row["excess"] / row["median"]
    lost = view.step_intervals if has_steps else view.busy
    cost = round(row["excess"] * (row["steps"] if has_steps else 1))
    return Finding(
        f"rank {view.trace.rank} takes {share:.1f} % longer than the median of {row['peers']} ranks of its program",
        min(cost, lost.total),
        "medium",
        "compare the rank with the others: its share of the data, its device's clock and temperature, its host's load; "
        "`etloom analyze imbalance` shows the parts of its time; no communication is recorded, so whether other ranks "
        "wait for it is unknown",
        lost,
        BOTH,
        int(row["steps"]) or 1,
        name=f"rank {view.trace.rank}",
        in_steps_ns=cost if has_steps else 0,
    )


def measure_work(view: RankView) -> pl.DataFrame:
    """Return a row: time in steps, number of steps, time of work (ns), and whether the rank communicates."""
    return pl.DataFrame(
        {
            "in_steps": view.step_intervals.total,
            "steps": view.steps.height,
            "busy": view.busy.total,
            "communicates": view.trace.rows("comms") > 0 or view.activity.times["communication"].total > 0,
        }
    )


RANK_TABLES = (measure_work,)
"""Tables of a rank that do not depend on others."""
