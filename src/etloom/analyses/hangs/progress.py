"""Progress of a running job: step times, stalls, crashes and slow ranks, from successive dumps of its ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.analyses.hangs.causes import EVIDENCE_COLUMNS, HangCause, find_cause
from etloom.analyses.hangs.divergences import compare_calls
from etloom.analyses.hangs.job_calls import JobCalls, combine_calls
from etloom.analyses.hangs.processes import describe_processes, read_system_state
from etloom.core.calls import DumpedCalls

MIN_STALL_S = 2.0
STARTUP_STALL_S = 60.0
"""Seconds without progress that are usual before there are step times, as for compilation."""
PATIENCE_S = {"a checkpoint": 300.0, "data loading": 60.0, "host": 60.0}
"""Kind of cause -> seconds without progress that are usual for it in a healthy job."""
_STALL_STEPS = 3
_RECENT_STEPS = 5
_CHANGE = 1.3


@dataclass(frozen=True)
class Observation:
    """The state of a running job at one time: steps, step time, lateness of ranks, and the cause of a stall.

    Attributes:
        steps: steps that all ranks have ended.
        step_ns: median time of the recent steps over all ranks, ns; None before there are two.
        lateness_ns: rank -> mean lateness in the recent collectives, ns.
        step_change: recent step time as a multiple of the earlier one, if it changed; else None.
        cause: of a stall, crash or slowdown, None in a healthy job.
        has_stalled: no rank makes progress.
        has_ended: all ranks ended normally.
        stalled_s: seconds since the last progress.
    """

    steps: int
    step_ns: float | None
    lateness_ns: Mapping[int, float]
    step_change: float | None
    cause: HangCause | None
    has_stalled: bool
    has_ended: bool
    stalled_s: float


class JobProgress:
    """Follows a job through successive dumps of its ranks.

    Args:
        stall_s: seconds without progress after which the job has stalled; default: three steps, at least `MIN_STALL_S`;
            `STARTUP_STALL_S` while step times are unknown; and the time of the cause in `PATIENCE_S` if no process is
            broken.
        settle_s: seconds after a crash in which the other ranks may write their last states.
        now_ns: the present time.
    """

    def __init__(self, stall_s: float | None, settle_s: float, now_ns: int) -> None:
        self.settle_s = settle_s
        self._stall_s = stall_s
        self._progress: Any = None
        self._last_progress_ns = now_ns
        self._crash_seen_ns: int | None = None

    def observe(self, dumps: Mapping[int, DumpedCalls], now_ns: int) -> Observation:
        """Return the state of the job (progress, stall, crash, slow rank) according to Flight Recorder dumps of its
        ranks."""
        calls = combine_calls(dumps)
        processes = describe_processes(calls.processes, now_ns, read_system_state)
        step_ns, change = measure_steps(calls.processes)
        stalled_s = self._measure_pause(calls, now_ns)
        conditions = {state.condition for state in processes.values()}
        has_ended = conditions == {"finished"}
        usual_s = STARTUP_STALL_S if step_ns is None else max(MIN_STALL_S, _STALL_STEPS * step_ns / 1e9)
        limit_s = self._stall_s or usual_s
        is_broken = bool(conditions & {"ended", "failed"})
        has_crashed = self._has_crashed(is_broken, now_ns)
        has_stalled = not has_ended and (stalled_s >= limit_s or has_crashed)
        cause = find_cause(compare_calls(calls), processes, has_stalled=True) if has_stalled else None
        if cause is not None and not any(state.is_broken for state in processes.values()):
            usual_s = PATIENCE_S.get(cause.kind, 0)
            has_stalled = stalled_s >= (self._stall_s or usual_s) and self._is_current(calls, now_ns)
        if not (has_stalled or is_broken):  # a slow rank, or none
            cause = find_slow_rank(calls)
        steps = min((int(facts.get("steps") or 0) for facts in calls.processes.values()), default=0)
        lateness = measure_mean_lateness(calls)
        return Observation(steps, step_ns, lateness, change, cause, has_stalled, has_ended, stalled_s)

    def _is_current(self, calls: JobCalls, now_ns: int) -> bool:
        """Return whether all ranks have written a dump since the last progress of the job.

        An earlier state may show calls that have ended since, and its rank may be the one that is stuck.
        """
        if self._stall_s is not None:  # then states are as old as the user allows
            return True
        written = (int(facts.get("written_ns") or now_ns) for facts in calls.processes.values())
        return min(written, default=now_ns) >= self._last_progress_ns

    def _has_crashed(self, is_broken: bool, now_ns: int) -> bool:
        """Return whether a process has been broken for ``settle_s`` seconds, in which the others write their last
        states."""
        if not is_broken:
            self._crash_seen_ns = None
        elif self._crash_seen_ns is None:
            self._crash_seen_ns = now_ns
        return self._crash_seen_ns is not None and now_ns - self._crash_seen_ns >= self.settle_s * 1e9

    def _measure_pause(self, calls: JobCalls, now_ns: int) -> float:
        """Return seconds since any rank called or finished a collective or ended a step."""
        is_finished = pl.col("state").fill_null("completed") == "completed"
        newest = calls.table.group_by("rank", "group").agg(
            pl.col("created_ns").max(), pl.col("seq").filter(is_finished).max().alias("finished")
        )
        steps = sorted((rank, facts.get("steps")) for rank, facts in calls.processes.items())
        progress = (steps, newest.sort("rank", "group").rows())
        if progress != self._progress:
            self._progress, self._last_progress_ns = progress, now_ns
        return (now_ns - self._last_progress_ns) / 1e9


def measure_steps(processes: Mapping[int, Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return the median time of the recent steps (ns), and the ratio of that time to the median of earlier steps.

    The ratio is None if the step time did not change much, or if there are too few earlier steps.

    Args:
        processes: rank -> facts about its process, with the ends of its last steps.
    """
    ends = [list(facts.get("step_ends_ns") or ()) for facts in processes.values()]
    durations = [[after - before for before, after in itertools.pairwise(times)] for times in ends]
    recent = [duration for rank in durations for duration in rank[-_RECENT_STEPS:]]
    earlier = [duration for rank in durations for duration in rank[: -2 * _RECENT_STEPS]]
    if not recent:
        return None, None
    step_ns = float(statistics.median(recent))
    if len(earlier) < 2 * _RECENT_STEPS:
        return step_ns, None
    ratio = step_ns / max(statistics.median(earlier), 1)
    return step_ns, ratio if ratio > _CHANGE or ratio < 1 / _CHANGE else None


def measure_mean_lateness(calls: JobCalls) -> dict[int, float]:
    """Return, by rank, the mean time (ns) by which the rank called collectives later than the first rank."""
    called = calls.table.filter(~pl.col("is_p2p")).with_columns(
        (pl.col("created_ns") - pl.col("created_ns").min().over("group", "seq")).alias("late_ns"),
        pl.col("rank").n_unique().over("group", "seq").alias("callers"),
    )
    complete = called.filter(pl.col("callers") == len(calls.dumped))
    return dict(complete.group_by("rank").agg(pl.col("late_ns").mean()).sort("rank").iter_rows())


# Slow ranks of a job that makes progress: one rank arrives last in nearly every collective.

_MIN_CALLS = 10
_MIN_LAST_SHARE = 0.9
_MIN_PERIOD_SHARE = 0.3
_MIN_LATENESS_NS = 10_000_000


def measure_lateness(calls: JobCalls) -> pl.DataFrame:
    """Return how much later the last rank called each collective than the second last rank, ns.

    Clocks of hosts are compared as they are.

    Returns:
        A row per collective that all ranks with a dump called: group, seq, called_ns (last call), rank (the last one),
        lateness_ns.
    """
    called = (
        calls.table.filter(~pl.col("is_p2p"))
        .group_by("group", "seq")
        .agg(
            callers=pl.col("rank").n_unique(),
            called_ns=pl.col("created_ns").max(),
            rank=pl.col("rank").sort_by("created_ns").last(),
            lateness_ns=pl.col("created_ns").max() - pl.col("created_ns").sort().slice(-2, 1).first(),
        )
    )
    return called.filter(pl.col("callers") == len(calls.dumped)).drop("callers").sort("called_ns")


def find_slow_rank(calls: JobCalls) -> HangCause | None:
    """Return the rank that arrives last in nearly all late collectives, as a cause; None if no rank does.

    A job with too few collectives has no slow rank.
    """
    lateness = measure_lateness(calls) if len(calls.dumped) > 1 else pl.DataFrame()
    if lateness.height < _MIN_CALLS:
        return None
    # Collectives that follow each other at once start together: only those after computation count.
    typical_ns = lateness["lateness_ns"].quantile(0.5)
    late = lateness.filter(pl.col("lateness_ns") >= max(_MIN_LATENESS_NS, typical_ns or 0))
    if late.height < _MIN_CALLS:
        return None
    (rank, last_count), *_rest = late["rank"].value_counts(sort=True).iter_rows()
    mine = late.filter(pl.col("rank") == rank)
    median_ns = int(mine["lateness_ns"].median() or 0)  # type: ignore[arg-type]
    times_ns = lateness["called_ns"].to_list()
    is_often_last = last_count >= _MIN_LAST_SHARE * late.height
    if not is_often_last or mine["lateness_ns"].sum() < _MIN_PERIOD_SHARE * (times_ns[-1] - times_ns[0]):
        return None
    text = (
        f"rank {rank} is slow: it arrived last in {last_count:,} of {late.height:,} late collectives, "
        f"{median_ns / 1e6:,.1f} ms after the others (median)"
    )
    evidence = pl.DataFrame([(rank, text)], schema=EVIDENCE_COLUMNS, orient="row")
    return HangCause("slow", (rank,), text, evidence)
