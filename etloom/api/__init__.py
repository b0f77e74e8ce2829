"""The public verbs; `etloom` forwards to them by name.

runs        opens, links, selects from and describes runs
questions   answers questions about runs
files       writes, converts, checks, repairs and records files
replaying   re-runs a recording

Each verb accepts a Trace, a Job, or a path wherever it needs a run.
"""

from __future__ import annotations

from etloom.api.files import collect, convert, export, gather, lint, salvage
from etloom.api.questions import analyze, check, diff, graph, plot, report, simulate
from etloom.api.replaying import replay
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
    "plot",
    "query",
    "read",
    "replay",
    "report",
    "salvage",
    "select",
    "simulate",
]
