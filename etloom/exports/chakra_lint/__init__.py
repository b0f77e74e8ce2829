"""Checks Chakra files for what stops a simulator such as ASTRA-sim, or makes its result wrong.

file_rules        rules for one file
cross_rank_rules  rules between the files of several ranks
lint_codes        severity, meaning and remedy of each finding
list_schedule     runs the nodes of a file the way ASTRA-sim does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import polars as pl

from etloom.exports.chakra_lint.cross_rank_rules import check_across_ranks
from etloom.exports.chakra_lint.file_rules import check_file, read_groups
from etloom.exports.chakra_lint.lint_codes import ERROR, FindingCollector, LintFinding
from etloom.formats.chakra.et_files import find_rank_files, load_file

_COLUMNS = {
    "severity": pl.String,
    "rank": pl.Int64,
    "code": pl.String,
    "count": pl.Int64,
    "node": pl.UInt64,
    "example": pl.String,
    "meaning": pl.String,
    "remedy": pl.String,
}


@dataclass(frozen=True)
class LintResult:
    """The result of `lint`.

    Attributes:
        files: The file of each rank.
        findings: Errors first; one for each rank and code.
    """

    files: Mapping[int, Path]
    findings: list[LintFinding]

    @property
    def has_errors(self) -> bool:
        """True if a simulator would refuse the files, wait forever or simulate something else."""
        return any(finding.severity == ERROR for finding in self.findings)

    @property
    def table(self) -> pl.DataFrame:
        """One row per finding: severity, rank, code, count, node, example, meaning, remedy."""
        rows = [{name: getattr(finding, name) for name in _COLUMNS} for finding in self.findings]
        return pl.DataFrame(rows, schema=_COLUMNS)


def lint(path: str | PathLike[str]) -> LintResult:
    """Check a Chakra file, or the files NAME.RANK.et of a job in a folder.

    Process groups are read from NAME.comm_groups.json next to the files, and from the nodes that describe them.

    Args:
        path: A file, or a folder with the files of one job.

    Returns:
        The findings; none where a simulator can run the files.

    Raises:
        ReadError: A file is not a Chakra trace, the folder contains none, or the groups cannot be read.

    Example:
        >>> lint("sim/").table  # doctest: +SKIP
    """
    findings = FindingCollector()
    paths = find_rank_files(Path(path))
    files = {rank: load_file(file) for rank, file in paths.items()}
    groups = {rank: read_groups(file) for rank, file in files.items()}
    for rank, file in files.items():
        check_file(findings, rank, file, groups[rank])
    check_across_ranks(findings, files, groups)
    return LintResult(paths, findings.sorted_findings())
