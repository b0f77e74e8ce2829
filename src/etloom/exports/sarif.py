"""Write the findings of a run as SARIF, which code scanning (GitHub, GitLab) and editors (VS Code) show at the code.

A rule per pattern and a result per finding, the largest first. The message has the title, the gain, the confidence and
the advice; ``rank`` is the gain in percent of the job. The location is the line of Python of a finding, if stacks were
recorded (``etloom collect --with kineto,et,stacks``), else the script, if one is named.

Format: SARIF 2.1.0, https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from etloom.analyses.answers import answer
from etloom.core.registry import get_summary
from etloom.core.trace import Job, Trace
from etloom.core.version import __version__
from etloom.formats.io.atomic_file import write_atomically

SUFFIX = ".sarif"

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_FRAME = re.compile(r"(?P<file>.+\.py)\((?P<line>\d{1,9})\): (?P<function>.*)")
_MIN_WARNING_PCT = 5.0
"""Gain of the job from which a finding is a warning, unless its confidence is low; others are notes."""


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    script: Annotated[str | None, "The file to which findings without a Python line are attached."] = None,
    root: Annotated[str | None, "The folder of the sources: files below it are named relative to it."] = None,
) -> None:
    """Write the findings of a Trace or a Job as SARIF.

    Raises:
        AnalysisError: no rank has times.
    """
    findings = answer(trace, "findings").table.to_dicts()
    patterns = list(dict.fromkeys(row["pattern"] for row in findings))
    results = [_describe_result(row, patterns, script, root) for row in findings]
    rules = [{"id": name, "shortDescription": {"text": get_summary("patterns", name)}} for name in patterns]
    driver = {"name": "etloom", "version": __version__, "rules": rules}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}],
    }
    write_atomically(Path(path), json.dumps(log, indent=1, ensure_ascii=False) + "\n")


def _describe_result(
    row: Mapping[str, Any], patterns: list[str], script: str | None, root: str | None
) -> dict[str, Any]:
    """Return the SARIF result of a row of the analysis findings."""
    gain = row["job_gain_pct"]
    # The share of a rank without a span is unknown, too.
    share = row["pct"] if gain is None else gain
    is_warning = row["confidence"] != "low" and share is not None and share >= _MIN_WARNING_PCT
    places = [row[key] for key in ("pattern", "operator", "module", "frame", "name") if row[key]]
    result: dict[str, Any] = {
        "ruleId": row["pattern"],
        "ruleIndex": patterns.index(row["pattern"]),
        "level": "warning" if is_warning else "note",
        "message": {"text": _escape(format_finding(row))},
        "partialFingerprints": {"finding/v1": hashlib.sha256("\n".join(places).encode()).hexdigest()[:32]},
        "properties": {
            key: row[key] for key in ("confidence", "job_gain_ns", "cost_ns", "rank", "step", "count")
        },
    }
    if gain is not None:
        result["rank"] = min(gain, 100.0)
    location: dict[str, Any] = {}
    if (physical := _locate(row["frame"], script, root)) is not None:
        location["physicalLocation"] = physical
    logical = [{"name": row[key], "kind": kind} for key, kind in _LOGICAL.items() if row[key]]
    if logical:
        location["logicalLocations"] = logical
    if location:
        result["locations"] = [location]
    return result


_LOGICAL = {"operator": "function", "module": "module"}
"""Column of the findings -> kind of a logical location."""


def _locate(frame: str | None, script: str | None, root: str | None) -> dict[str, Any] | None:
    """Return the physical location of a Python frame, such as ``train.py(12): main``, or of the script."""
    match = _FRAME.fullmatch(frame or "")
    file, line = (match["file"], max(int(match["line"]), 1)) if match else (script, 1)
    if file is None or ".." in Path(file).parts:
        return None
    if root is not None and Path(file).is_relative_to(root):
        file = str(Path(file).relative_to(root))
    uri = Path(file).as_uri() if Path(file).is_absolute() else quote(file)
    return {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}


def _escape(text: str) -> str:
    """Escape what stands for arguments and links in a message (sections 3.11.5, 3.11.6): names come from the trace."""
    return re.sub(r"([\[\]])", r"\\\1", re.sub(r"([{}])", r"\1\1", text))


def format_finding(row: Mapping[str, Any]) -> str:
    """Return a finding as a sentence: what costs time, how much, with which confidence, and what to do."""
    time, share, subject = row["job_gain_ns"], row["job_gain_pct"], "of the job"
    step = row["step_gain_ns"]
    if time is None:
        time, share, step, subject = row["cost_ns"], row["pct"], row["step_cost_ns"], f"of rank {row['rank']}"
    percent = "" if share is None else f", {share:.1f} % {subject}"
    cost = f"{step / 1e6:,.4g} ms per step" if step else f"{time / 1e6:,.4g} ms in total"
    return f"{row['title']}: up to {cost}{percent} ({row['confidence']} confidence). To do: {row['advice']}."
