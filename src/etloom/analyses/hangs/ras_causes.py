"""Cause of a hang from a report of NCCL's RAS: ranks that are dead, silent, behind, ahead or in another state.

RAS counts the collectives that each rank has launched. It knows neither whether they finish nor the line of code, so
that one report of a busy job looks like one of a job that hangs. An earlier report decides: in a communicator whose
counts have changed since, the job makes progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import polars as pl

from etloom.analyses.hangs.causes import EVIDENCE_COLUMNS, HangCause, describe_waiting
from etloom.analyses.hangs.ras_gaps import (
    CountGap,
    JobRanks,
    build_gap_table,
    join_ranks,
    list_gaps,
    name_communicator,
)
from etloom.analyses.hangs.waits import build_waits, find_roots, find_waiting
from etloom.core.communicators import (
    ASYNC_ERROR,
    DEAD,
    INIT_ERROR,
    NO_ANSWER,
    STATUS,
    UNRESPONSIVE,
    CommunicatorState,
    RankGroup,
    RasReport,
)
from etloom.core.text import count_noun, format_ranks

_REMOTE_ERROR = "Remote process error"
_MAX_EVIDENCE = 16
_UNCERTAIN = (
    "one report does not show whether it hangs, make a second one; the line of code is unknown to RAS"
)
_CERTAIN = "unchanged since the earlier report; the line of code is unknown to RAS"


@dataclass(frozen=True)
class _Scene:
    """The inputs of the rules: a report, the names of ranks, and the communicators without progress."""

    report: RasReport
    names: JobRanks
    stuck: tuple[CommunicatorState, ...]
    caveat: str


def find_ras_cause(report: RasReport, earlier: RasReport | None = None) -> HangCause | None:
    """Return the cause of a hang according to a report, None if no rank differs from the others.

    Args:
        report: the latest report.
        earlier: one of the same job, made some seconds before.
    """
    is_same = {state.id: state.groups for state in earlier.communicators} if earlier is not None else None
    stuck = tuple(
        state for state in report.communicators if is_same is None or is_same.get(state.id) == state.groups
    )
    scene = _Scene(report, JobRanks(report), stuck, _UNCERTAIN if earlier is None else _CERTAIN)
    rules = (
        _find_dead,
        partial(_find_error, is_remote=False),
        _find_silent,
        partial(_find_error, is_remote=True),
        _find_other_collective,
        _find_behind,
        _find_ahead,
        _find_other_status,
    )
    return next((cause for rule in rules if (cause := rule(scene)) is not None), None)


def describe_no_cause(report: RasReport, earlier: RasReport | None = None) -> str:
    """Return the sentence for a report in which no rank differs from the others, or in which the job makes progress."""
    unread = sum(state.unread for state in report.communicators)
    is_cut = any(row.name == "read.truncated" for row in report.stats)
    damage = f"; the file ends early, {count_noun(unread, 'rank')} are unknown" if unread else ""
    damage = "; the file ends early, so that more is unknown" if is_cut and not unread else damage
    if not report.total:
        return f"NCCL's RAS reports no communicator: whether the job hangs is unknown{damage}"
    if list_gaps(report.communicators) and earlier is not None:
        return f"no hang: the counts of NCCL's RAS have changed since the earlier report{damage}"
    communicators = count_noun(report.total, "communicator")
    return (
        f"no rank differs from the others in NCCL's RAS report of {communicators}: "
        f"whether their collectives finish is unknown{damage}"
    )


def _find_dead(scene: _Scene) -> HangCause | None:
    text = "considered dead by NCCL's RAS (unreachable for 60 s)"
    cause = _find_missing(scene, (DEAD,), "crashed", text)
    if cause is not None or not scene.report.dead_processes:
        return cause
    processes = scene.report.dead_processes
    candidates = (
        (state, groups) for state in scene.report.communicators if (groups := state.find_status(NO_ANSWER))
    )
    text_of_ranks = next(
        (f"are among {scene.names.name(state, groups)}" for state, groups in candidates),
        "are unknown",
    )
    subject = f"{count_noun(len(processes), 'process', 'processes')} {_is_are(len(processes))}"
    sentence = f"{subject} {text}, whose ranks {text_of_ranks}: {'; '.join(processes[:_MAX_EVIDENCE])}"
    return HangCause("crashed", (), sentence, pl.DataFrame(schema=EVIDENCE_COLUMNS))


def _find_silent(scene: _Scene) -> HangCause | None:
    return _find_missing(
        scene,
        (UNRESPONSIVE, NO_ANSWER),
        "unresponsive",
        "without an answer to NCCL's RAS: stopped, killed or cut off",
    )


def _find_missing(scene: _Scene, statuses: tuple[str, ...], kind: str, text: str) -> HangCause | None:
    """Return the cause for the ranks that did not answer, of all communicators or else of the largest one."""
    affected = [
        (state, groups) for state in scene.report.communicators if (groups := state.find_status(*statuses))
    ]
    if not affected:
        return None
    ranks: set[int] = set()
    for state, groups in affected:
        ranks.update(scene.names.convert(state, join_ranks(groups)) or ())
    state, groups = affected[0]
    count = sum(group.count for group in groups)
    others = (
        f"; also ranks of {count_noun(len(affected) - 1, 'other communicator')}" if len(affected) > 1 else ""
    )
    if ranks:
        name, count, others = format_ranks(ranks), len(ranks), ""
    else:
        name = scene.names.name(state, groups)
    hint = "" if join_ranks(groups) is not None else "; ncclras -v or -f json names them"
    verb = _is_are(count)
    return _make_cause(scene, kind, affected, ranks, f"{name} {verb} {text}{others}{hint}")


def _find_error(scene: _Scene, is_remote: bool) -> HangCause | None:
    """Return the cause for ranks that report an error of their own, or of another process."""
    for state in scene.report.communicators:
        for name in (ASYNC_ERROR, INIT_ERROR):
            groups = [
                group for group in state.groups.get(name, ()) if (group.value == _REMOTE_ERROR) == is_remote
            ]
            if groups:
                ranks = scene.names.convert(state, join_ranks(groups)) or ()
                errors = ", ".join(dict.fromkeys(str(group.value) for group in groups))
                verb = "reports" if sum(group.count for group in groups) == 1 else "report"
                text = f"{scene.names.name(state, groups)} {verb} an {name} of NCCL: {errors}"
                text += "; another process failed, which one is unknown" if is_remote else ""
                return _make_cause(scene, "nccl error", [(state, groups)], ranks, text)
    return None


def _find_other_collective(scene: _Scene) -> HangCause | None:
    """Return the cause for ranks that launched fewer of one collective than the others, and more of another one."""
    for state in scene.stuck:
        gaps = list_gaps([state])
        behind = {rank for gap in gaps for group in gap.behind for rank in group.ranks or ()}
        ahead = {rank for gap in gaps for group in gap.ahead for rank in group.ranks or ()}
        ranks = tuple(sorted(behind & ahead))
        if ranks:
            group = RankGroup("", len(ranks), ranks)
            counts = "; ".join(gap.describe(scene.names) for gap in gaps)
            text = (
                f"{scene.names.name(state, [group])} diverged with another collective in {name_communicator(state)}: "
                f"{counts}; the line of code is unknown to RAS"
            )
            job_ranks = scene.names.convert(state, ranks) or ()
            return _make_cause(scene, "other collective", [(state, [group])], job_ranks, text)
    return None


def _find_behind(scene: _Scene) -> HangCause | None:
    """Return the cause for ranks that launched fewer collectives, and for which others wait."""
    gaps = [gap for gap in list_gaps(scene.stuck) if gap.behind]
    if not gaps:
        return None
    mapped = [gap for gap in gaps if scene.names.convert(gap.state, join_ranks(gap.behind)) is not None]
    if not mapped:
        gap = gaps[0]
        text = _describe_gap(scene, gap, gap.behind, "behind")
        return _make_cause(scene, "not arrived", [(gap.state, gap.behind)], (), text)
    waits = build_waits(build_gap_table(mapped, scene.names))
    roots = find_roots(waits)
    late = {rank for root in roots if len(root) == 1 for rank in root}
    if not roots:  # the ranks with more launches are not named
        late = {
            rank
            for gap in mapped[:1]
            for rank in scene.names.convert(gap.state, join_ranks(gap.behind)) or ()
        }
    elif not late:
        ranks = min(roots, key=len)
        text = (
            f"{format_ranks(ranks)} wait for each other: compare the order of their calls; "
            f"{mapped[0].describe(scene.names)}; {scene.caveat}"
        )
        affected = [(gap.state, gap.behind) for gap in mapped]
        return _make_cause(scene, "wait for each other", affected, ranks, text)
    gap = max(mapped, key=lambda gap: len(late.intersection(_convert(scene, gap))))
    direct, indirect = find_waiting(waits, late)
    waiting = f"; {describe_waiting(direct, indirect, len(late))}" if direct or indirect else ""
    text = (
        f"{format_ranks(late)} {_is_are(len(late))} behind in {name_communicator(gap.state)}: "
        f"{gap.describe(scene.names)}{waiting}; {scene.caveat}"
    )
    return _make_cause(scene, "not arrived", [(gap.state, gap.behind) for gap in mapped], late, text)


def _convert(scene: _Scene, gap: CountGap) -> tuple[int, ...]:
    return scene.names.convert(gap.state, join_ranks(gap.behind)) or ()


def _find_ahead(scene: _Scene) -> HangCause | None:
    gap = next((gap for gap in list_gaps(scene.stuck) if gap.ahead), None)
    if gap is None:
        return None
    ranks = scene.names.convert(gap.state, join_ranks(gap.ahead)) or ()
    text = _describe_gap(scene, gap, gap.ahead, "ahead")
    return _make_cause(scene, "ahead", [(gap.state, gap.ahead)], ranks, text)


def _describe_gap(scene: _Scene, gap: CountGap, groups: list[RankGroup], side: str) -> str:
    """Return that ranks are behind or ahead in a collective, as a sentence."""
    name = scene.names.name(gap.state, groups)
    place = "" if " of communicator " in name else f" in {name_communicator(gap.state)}"
    verb = _is_are(sum(group.count for group in groups))
    return f"{name} {verb} {side}{place}: {gap.describe(scene.names)}; {scene.caveat}"


def _find_other_status(scene: _Scene) -> HangCause | None:
    """Return the cause for ranks whose status (RUNNING, FINALIZE, NOCOMM, ...) differs from that of most others."""
    for state in scene.stuck:
        common, *rest = state.groups.get(STATUS, ()) or (None,)
        if common is None or not rest:
            continue
        ranks = scene.names.convert(state, join_ranks(rest)) or ()
        name = scene.names.name(state, rest)
        statuses = ", ".join(str(group.value) for group in rest)
        verb = "has" if sum(group.count for group in rest) == 1 else "have"
        text = (
            f"{name} {verb} another status ({statuses}) than {count_noun(common.count, 'rank')} ({common.value}), "
            f"as while communicators are created or destroyed; {scene.caveat}"
        )
        return _make_cause(scene, "other status", [(state, rest)], ranks, text)
    return None


def _is_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _make_cause(
    scene: _Scene,
    kind: str,
    affected: Iterable[tuple[CommunicatorState, Iterable[RankGroup]]],
    job_ranks: Iterable[int],
    sentence: str,
) -> HangCause:
    """Return a cause with the process and device of each of its ranks as evidence, at most `_MAX_EVIDENCE` rows."""
    ranks = tuple(sorted(set(job_ranks)))
    rows: dict[int, str] = {}
    for state, groups in affected:
        for rank in join_ranks(groups) or ():
            if len(rows) >= _MAX_EVIDENCE:
                break
            place = state.places.get(rank)
            job_rank = scene.names.convert(state, (rank,))
            if place is None or (ranks and (job_rank is None or job_rank[0] not in ranks)):
                continue
            if job_rank is not None:
                rows.setdefault(job_rank[0], place.text)
            elif not ranks:
                rows.setdefault(rank, f"of communicator {state.name}: {place.text}")
    evidence = pl.DataFrame(sorted(rows.items()), schema=EVIDENCE_COLUMNS, orient="row")
    return HangCause(kind, ranks, sentence, evidence)


# The state of ranks without a Flight Recorder dump.


def describe_undumped(report: RasReport, dumped: Iterable[int]) -> list[str]:
    """Return what a report states about the ranks of the job that left no Flight Recorder dump, one line per state."""
    names = JobRanks(report)
    if not names.is_known or report.gpus is None:
        return [
            "NCCL's RAS numbers ranks by communicator, and its report has no communicator of all GPUs: "
            "not joined with the dumps"
        ]
    states = dict.fromkeys(set(range(report.gpus)).difference(dumped), "answers, like the others")
    for state in reversed(report.communicators):  # the largest last, so that its facts stay
        facts = [(f"{side} in {gap.collective}", groups)
                 for gap in list_gaps([state])
                 for side, groups in (("ahead", gap.ahead), ("behind", gap.behind))]  # fmt: skip
        facts += [(str(group.value), [group]) for group in state.find_status(UNRESPONSIVE, NO_ANSWER, DEAD)]
        for fact, groups in facts:
            for rank in names.convert(state, join_ranks(groups)) or ():
                if rank in states and states[rank] not in (DEAD, UNRESPONSIVE, NO_ANSWER):
                    states[rank] = fact
    by_state: dict[str, list[int]] = {}
    for rank, fact in states.items():
        by_state.setdefault(fact, []).append(rank)
    return [
        f"{format_ranks(ranks)} left no dump; NCCL's RAS: {fact}" for fact, ranks in sorted(by_state.items())
    ]
