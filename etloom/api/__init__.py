"""The public verbs; `etloom` forwards to them by name.

`runs` has the verbs that open and describe runs, `questions` those that answer questions about them, `files` those that
write, convert, check and record files. Each verb accepts a Trace, a Job, or a path wherever it needs a run.
"""

from __future__ import annotations

from etloom.api.files import collect, convert, export, gather, lint, salvage
from etloom.api.questions import analyze, check, diff, graph, report, simulate
from etloom.api.runs import info, link, open, query, read, select

__all__ = [
    "analyze",
    "check",
    "collect",
    "convert",
    "diff",
    "export",
    "gather",
    "graph",
    "info",
    "link",
    "lint",
    "open",
    "query",
    "read",
    "report",
    "salvage",
    "select",
    "simulate",
]
