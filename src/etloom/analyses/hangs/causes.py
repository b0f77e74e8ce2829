"""Cause of a hang: which ranks, in which state, and who waits for them; in one sentence with evidence.

The rules, in order; the first that applies names the cause:

1. A call that differs (collective, size, dtype) and is unfinished, or after which a process failed.
2. A process that failed or ended by itself, or has no dump.
3. Ranks for which others wait and which wait for nobody: stopped, unresponsive, in data loading or a checkpoint, or
   not arrived for another reason. If ranks wait for each other only, the order of their calls is the cause.
4. Everybody called, and it does not finish: a stopped process, a connection without acknowledgement, or the device or
   link of the ranks that have not finished.
5. In a job that a watcher saw stall, nobody is in communication: the host of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.analyses.hangs.processes import ProcessState, find_cut_off_ranks
from etloom.analyses.hangs.waits import build_waits, find_roots, find_waiting
from etloom.core.text import count_noun, format_ranks

EVIDENCE_COLUMNS = {"rank": pl.Int64, "evidence": pl.String}
_MISMATCHES = {
    "collective mismatch": "other collective",
    "size mismatch": "other size",
    "dtype mismatch": "other dtype",
}
_KINDS_BY_CONDITION = {
    "stopped": "stopped",
    "unresponsive": "unresponsive",
    "ended": "crashed",
    "failed": "crashed",
}
_MAX_EVIDENCE = 16


@dataclass(frozen=True)
class HangCause:
    """The cause of a hang: its kind, the ranks concerned, a sentence for the user, and the evidence.

    Attributes:
        kind: "other collective", "other size", "other dtype", "crashed", "stopped", "unresponsive", "data loading",
            "a checkpoint", "not arrived", "wait for each other", "device", "link", "host" or "slow".
        ranks: the ranks it is about; empty if unknown.
        sentence: one sentence: ranks, collective, group, who waits.
        evidence: columns rank and evidence.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    evidence: pl.DataFrame


@dataclass(frozen=True)
class _Scene:
    """The inputs of the rules that infer the cause of a hang: the table of hangs and the states of the processes."""

    table: pl.DataFrame
    processes: Mapping[int, ProcessState]
    has_stalled: bool

    def select_ranks(self, test: Callable[[ProcessState], bool]) -> set[int]:
        """Return the ranks whose process state satisfies ``test``."""
        return {rank for rank, state in self.processes.items() if test(state)}


def find_cause(
    table: pl.DataFrame, processes: Mapping[int, ProcessState] | None = None, has_stalled: bool = False
) -> HangCause | None:
    """Return the cause of a hang, None if no rank waits for another.

    Args:
        table: the divergences of `compare_calls`.
        processes: states of the processes, if they are known.
        has_stalled: a watcher saw that no rank makes progress.
    """
    scene = _Scene(table, processes or {}, has_stalled)
    rules = (_find_mismatch, _find_crash, _find_late_ranks, _find_unfinished, _find_host_stall)
    return next((cause for rule in rules if (cause := rule(scene))), None)


def _find_mismatch(scene: _Scene) -> HangCause | None:
    is_unfinished = pl.col("finding") == "not finished"
    unfinished = set(scene.table.filter(is_unfinished).select("group", "seq").iter_rows())
    broken = scene.select_ranks(lambda state: state.condition in ("ended", "failed", "lost peer"))
    mismatches = [
        row
        for row in scene.table.filter(pl.col("finding").is_in(list(_MISMATCHES))).iter_rows(named=True)
        if (row["group"], row["seq"]) in unfinished or broken.intersection(row["ranks"] + row["others"])
    ]
    if not mismatches:
        return None
    # The first of the last calls that differ: of finished ones only the last can have stopped the job.
    row = min(mismatches, key=lambda row: (row["group"], row["seq"]) not in unfinished)
    kind = _MISMATCHES[row["finding"]]
    call = _name_call(row if kind != "other collective" else row | {"collective": "call"})
    text = f"{format_ranks(row['ranks'])} diverged with an{kind} in {call}: {row['detail']}"
    return _make_cause(
        scene, kind, row["ranks"], text + ("" if row["others"] else "; no side has a majority")
    )


def _find_crash(scene: _Scene) -> HangCause | None:
    crashed = scene.select_ranks(lambda state: state.condition in ("ended", "failed"))
    if crashed:
        reasons = Counter(scene.processes[rank].detail for rank in sorted(crashed))
        (reason, _), *_rest = reasons.most_common(1)
        return _make_cause(scene, "crashed", crashed, f"{format_ranks(crashed)} crashed: {reason}")
    absent = scene.table.filter((pl.col("finding") == "missing") & pl.col("seq").is_null())
    unfinished = scene.table.filter(pl.col("finding") == "not finished")
    waiting = set(unfinished["ranks"].explode().drop_nulls())
    ranks = {
        rank
        for row in absent.iter_rows(named=True)
        if row["collective"] is not None
        or waiting.intersection(row["others"])  # a message is unfinished itself
        for rank in row["ranks"]
    }
    if not ranks:
        return None
    return _make_cause(scene, "crashed", ranks, f"{format_ranks(ranks)} crashed or left no readable dump")


def _find_late_ranks(scene: _Scene) -> HangCause | None:
    waits = build_waits(scene.table)
    roots = find_roots(waits)
    late = {rank for root in roots if len(root) == 1 for rank in root}
    if late:
        kind, text = _describe_absence(scene, late)
        return _make_cause(scene, kind, late, f"{format_ranks(late)} {text}")
    if not roots:
        return None
    ranks = min(roots, key=len)
    return _make_cause(
        scene,
        "wait for each other",
        ranks,
        f"{format_ranks(ranks)} wait for each other: compare the order of their calls",
    )


def _describe_absence(scene: _Scene, ranks: set[int]) -> tuple[str, str]:
    """Return the kind and text of a hang's cause, for ranks that have not called the collective that other ranks wait
    for."""
    states = [scene.processes[rank] for rank in sorted(ranks) if rank in scene.processes]
    broken = [state for state in states if state.is_broken]
    if broken:
        return _KINDS_BY_CONDITION[broken[0].condition], f"did not arrive: {broken[0].detail}"
    places = Counter(state.place for state in states if state.place not in (None, "communication"))
    if places:
        place = str(places.most_common(1)[0][0])
        return place, f"did not arrive: the main thread is in {place}"
    for row in _select_unfinished(scene.table, ranks):
        if _is_behind_in_own_call(row, scene.table):
            text = f"did not finish {_name_call(row)}, which the others have finished: suspect their device or link"
            return "device", text
    frames = [state.frame for state in states if state.frame]
    return "not arrived", "stopped or diverged" + (f": the main thread is in {frames[0]}" if frames else "")


def _select_unfinished(table: pl.DataFrame, ranks: set[int]) -> list[dict[str, Any]]:
    """Return the rows of calls that only ranks of ``ranks`` have not finished."""
    rows = table.filter(pl.col("finding") == "not finished").iter_rows(named=True)
    return [row for row in rows if ranks.issuperset(row["ranks"])]


def _is_behind_in_own_call(row: dict[str, Any], table: pl.DataFrame) -> bool:
    """Return whether other ranks are already beyond the call of ``row``, which the ranks of that row have not
    finished."""
    later = table.filter(
        (pl.col("group") == row["group"]) & (pl.col("seq") > row["seq"]) & (pl.col("finding") == "missing")
    )
    return bool(row["others"]) or any(set(row["ranks"]) <= set(ranks) for ranks in later["ranks"])


def _find_unfinished(scene: _Scene) -> HangCause | None:
    rows = list(scene.table.filter(pl.col("finding") == "not finished").iter_rows(named=True))
    if not rows:
        return None
    broken = scene.select_ranks(lambda state: state.is_broken)
    if broken and scene.has_stalled:
        state = scene.processes[min(broken)]
        text = f"{format_ranks(broken)} stopped taking part: {state.detail}"
        return _make_cause(scene, _KINDS_BY_CONDITION[state.condition], broken, text)
    cut_off = find_cut_off_ranks(scene.processes)
    if cut_off and scene.has_stalled:
        reason = next(iter(cut_off.values()))
        return _make_cause(scene, "link", cut_off, f"the link of {format_ranks(cut_off)} is broken: {reason}")
    others_finished = [row for row in rows if row["others"]]
    ranks = {rank for row in others_finished for rank in row["ranks"]}
    if others_finished:
        call = _name_call(others_finished[0])
        text = f"{format_ranks(ranks)} did not finish {call}, which others have finished: suspect their device or link"
        return _make_cause(scene, "device", ranks, text)
    if not scene.has_stalled:
        return None  # a healthy job also has calls in flight
    row = rows[0]
    members = format_ranks(row["ranks"])
    text = f"{members} called {_name_call(row)}, and none finishes it: suspect a link or device between them"
    return _make_cause(scene, "link", (), text)


def _find_host_stall(scene: _Scene) -> HangCause | None:
    if not scene.has_stalled:
        return None
    places = Counter(
        state.detail if state.is_broken else f"the main thread is in {_name_host_place(state)}"
        for state in scene.processes.values()
    )
    if not places:
        return None
    ranks = scene.select_ranks(lambda state: state.is_broken) or set(scene.processes)
    reason = places.most_common(1)[0][0]
    text = f"{format_ranks(ranks)} wait on the host, none in communication: {reason}"
    return _make_cause(scene, "host", ranks, text)


def _name_host_place(state: ProcessState) -> str:
    """Return the place of a process's main thread (such as data loading), or its Python frame if it has no known
    place."""
    if state.place is None or state.place == "communication":  # such as a barrier of the store
        return state.frame or "unknown code"
    return state.place


def _make_cause(scene: _Scene, kind: str, ranks: Iterable[int], text: str) -> HangCause:
    """Return the cause of a hang, with the ranks that wait, the call in which they wait, and the evidence."""
    companions = _find_companions(scene, set(ranks))
    named = set(ranks).union(*companions.values())
    direct, indirect = find_waiting(build_waits(scene.table), named)
    parts = [text, *(f"{format_ranks(others)} {fault}" for fault, others in companions.items())]
    is_missing = (pl.col("finding") == "missing") & pl.col("seq").is_not_null()
    # The first of the calls that most of these ranks have not made, in the sentence and in the evidence.
    missing = sorted(
        (
            row
            for row in scene.table.filter(is_missing).iter_rows(named=True)
            if named.intersection(row["ranks"])
        ),
        key=lambda row: (-len(named.intersection(row["ranks"])), row["called_ns"] or 0),
    )
    if direct or indirect:
        parts.append(describe_waiting(direct, indirect, len(named)))
    if missing:
        parts.append(f"only {format_ranks(missing[0]['others'])} called {_name_call(missing[0])}")
    return HangCause(kind, tuple(sorted(named)), "; ".join(parts), _list_evidence(scene, named, missing))


def _find_companions(scene: _Scene, named: set[int]) -> dict[str, set[int]]:
    """Return what other ranks did wrong in the calls in which the ranks ``named`` failed: fault -> ranks.

    Several ranks of a group may fail at once, each in its own way.
    """
    faults = [*_MISMATCHES, "missing"]
    rows = list(scene.table.filter(pl.col("finding").is_in(faults)).iter_rows(named=True))
    failed = [row for row in rows if named.intersection(row["ranks"])]
    # What the ranks did not call after a call that differs is a consequence.
    failed = [row for row in failed if row["finding"] in _MISMATCHES] or failed
    groups = {row["group"] for row in failed if row["seq"] is None}
    is_stuck = (pl.col("finding") == "not finished") & pl.col("group").is_in(groups)
    calls = {(row["group"], row["seq"]) for row in failed if row["seq"] is not None}
    calls |= set(scene.table.filter(is_stuck).select("group", "seq").iter_rows())
    waiting = scene.table.filter(pl.col("finding") == "not finished")["ranks"].explode().drop_nulls()
    late = {rank for root in find_roots(build_waits(scene.table)) for rank in root} - set(waiting)
    companions: dict[str, set[int]] = {}
    for row in rows:
        if (row["group"], row["seq"]) not in calls | {(group, None) for group, _ in calls}:
            continue
        if row["finding"] in _MISMATCHES:
            fault, ranks = f"diverged with an{_MISMATCHES[row['finding']]} in it", set(row["ranks"])
            ranks = ranks if row["others"] else set()  # without a majority nobody is known to be wrong
        elif row["seq"] is None:
            fault, ranks = "left no readable dump", set(row["ranks"]) if row["others"] else set()
        else:
            fault, ranks = "did not call it", late.intersection(row["ranks"])
        if others := ranks - named - set().union(*companions.values()):
            companions.setdefault(fault, set()).update(others)
    return companions


def describe_waiting(direct: set[int], indirect: set[int], awaited: int) -> str:
    """Return how many ranks wait for ``awaited`` ranks, directly and through others, as part of a sentence."""
    target = "it" if awaited == 1 else "them"
    through_others = f", {len(indirect):,} through other ranks" if indirect else ""
    verb = "waits" if len(direct) == 1 else "wait"
    return f"{count_noun(len(direct), 'rank')} {verb} for {target} directly{through_others}"


def _name_call(row: Mapping[str, Any]) -> str:
    axis = f" ({row['axis']})" if row.get("axis") else ""
    return f"{row['collective']} {row['seq']:,} of group {row['group']}{axis}"


def _list_evidence(scene: _Scene, ranks: set[int], missing: list[dict[str, Any]]) -> pl.DataFrame:
    """Return the evidence on each rank that causes the hang (process state, missing call), at most `_MAX_EVIDENCE`
    rows."""
    rows: list[tuple[int, str]] = []
    for rank in sorted(ranks):
        state = scene.processes.get(rank)
        if state is not None:
            frame = f"; main thread: {state.frame}" if state.frame else ""
            rows.append((rank, f"process {state.condition}: {state.detail}{frame}"))
        first = next((row for row in missing if rank in row["ranks"]), None)
        if first is not None:
            called_at = f" (called at {first['called_at']})" if first["called_at"] else ""
            rows.append((rank, f"has not called {_name_call(first)}{called_at}"))
        for row in (
            scene.table.filter((pl.col("finding") != "missing") & pl.col("ranks").list.contains(rank))
            .head(1)
            .iter_rows(named=True)
        ):
            rows.append((rank, f"{row['finding']}: {_name_call(row)}: {row['detail']}"))
    return pl.DataFrame(rows[:_MAX_EVIDENCE], schema=EVIDENCE_COLUMNS, orient="row")
