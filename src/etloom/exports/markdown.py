"""Write the largest findings of a run as Markdown, for the comments of a review and the summary of a CI job.

One item per finding: what costs time, where, how much, with which confidence, and what to do.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Annotated

from etloom.analyses.answers import answer
from etloom.core.errors import InvalidValue
from etloom.core.trace import Job, Trace
from etloom.exports.sarif import format_finding
from etloom.formats.io.atomic_file import write_atomically

SUFFIX = ".md"


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    top: Annotated[int, "Number of findings, largest first."] = 3,
) -> None:
    """Write the findings of a Trace or a Job as a Markdown list.

    Raises:
        AnalysisError: no rank has times.
        InvalidValue: ``top`` is below 1.
    """
    write_atomically(Path(path), format_findings(trace, top))


def format_findings(trace: Trace | Job, top: int = 3) -> str:
    """Return the largest findings as a Markdown list, or a line that there is none. Raises as `write`."""
    if top < 1:
        raise InvalidValue(f"expected 1 or more, got {top}", option="top")
    findings = answer(trace, "findings").table.head(top).to_dicts()
    lines = [f"- **{row['pattern']}**: {escape(format_finding(row))}\n" for row in findings]
    return "".join(lines) or "No cause of lost time was found.\n"


def escape(text: str) -> str:
    """Escape what Markdown would format, mentions of users, and addresses: names come from the trace."""
    escaped = re.sub(r"([\\`*_\[\]|<>#~])", r"\\\1", " ".join(text.split())).replace("@", "&#64;")
    return re.sub(r"((?:https?|ftp):(?=//)|www(?=\.))", r"\1<!-- -->", escaped, flags=re.IGNORECASE)
