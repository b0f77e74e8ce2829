"""Check Chakra files for errors that stop a simulator such as ASTRA-sim or make its result wrong.

file_rules        rules for one file
cross_rank_rules  rules between the files of several ranks
message_ends      by what sends and receives match
lint_codes        severity, meaning and remedy of each finding
list_schedule     runs the nodes of a file with their recorded durations
joint_run         runs the files of all ranks together, to find what never ends
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from etloom.exports.chakra_lint.cross_rank_rules import check_across_ranks, check_joint_run, check_members
from etloom.exports.chakra_lint.file_rules import READ_ATTRIBUTES, check_dependencies, check_file, read_groups
from etloom.exports.chakra_lint.joint_run import run_together
from etloom.exports.chakra_lint.lint_codes import (
    LOAD_ABORT_CODES,
    REPLAY_ABORT_CODES,
    FindingCollector,
    LintResult,
)
from etloom.exports.chakra_lint.list_schedule import RankGraph
from etloom.formats.chakra.et_files import ChakraFile, combine_rank_files, load_file


def lint(*paths: str | PathLike[str], groups: str | PathLike[str] | None = None) -> LintResult:
    """Check the Chakra files (NAME.RANK.et) of a job, and simulate them together by ASTRA-sim's rules.

    Args:
        paths: Files, or a folder with the files of one job.
        groups: File with the ranks of process groups; default: NAME.comm_groups.json next to the files, and the nodes
            that describe groups.

    Returns:
        The findings; none where a simulator can run the files.

    Raises:
        ReadError: A file is not a Chakra trace, the folder contains none, or the groups cannot be read.

    Example:
        >>> lint("sim/").table  # doctest: +SKIP
    """
    findings = FindingCollector()
    path_by_rank = combine_rank_files([Path(path) for path in paths])
    files = {rank: load_file(file, names=READ_ATTRIBUTES) for rank, file in path_by_rank.items()}
    group_file = None if groups is None else Path(groups)
    rank_groups = {rank: read_groups(file, group_file) for rank, file in files.items()}
    graphs = {rank: RankGraph(file.nodes) for rank, file in files.items()}
    simulated_ns, is_stuck = 0, False
    for rank, file in files.items():
        check_file(findings, rank, file, rank_groups[rank])
        starts, ends = graphs[rank].replay()
        stuck = [place for place, start in enumerate(starts) if start < 0]
        check_dependencies(findings, rank, graphs[rank], stuck)
        simulated_ns, is_stuck = max([simulated_ns, *ends]), is_stuck or bool(stuck)
    check_across_ranks(findings, files, rank_groups)
    check_members(findings, files, rank_groups)
    run = run_together(graphs, rank_groups, findings.effects)
    if not findings.has_errors():  # otherwise it only shows their consequences
        check_joint_run(findings, files, run)
    lacks_files = max(files) >= len(files) > 1  # ASTRA-sim reads the files of ranks 0, 1, 2, ...
    aborts = lacks_files or run.aborted or findings.has_code(LOAD_ABORT_CODES | {"message-last"})
    replay_aborts = lacks_files or findings.has_code(REPLAY_ABORT_CODES)
    return LintResult(
        path_by_rank,
        findings.sorted_findings(),
        verdict="abort" if aborts else "hang" if run.unfinished else "finish",
        replay_verdict="abort" if replay_aborts else "hang" if is_stuck else "finish",
        simulated_ns=simulated_ns,
        recorded_ns=max(filter(None, map(_measure_recorded_time, files.values())), default=None),
        ideal_ns=max(run.end_ns.values(), default=0),
    )


def _measure_recorded_time(file: ChakraFile) -> int | None:
    """Return the recorded time from the first start to the last end of a file's nodes, ns; None if not recorded."""
    spans: list[tuple[int, int]] = []
    for node in file.nodes:
        start, duration = node.attributes.get("start_ns"), node.attributes.get("duration_ns")
        if isinstance(start, int) and isinstance(duration, int):
            spans.append((start, start + duration))
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else None
