"""The public functions of etloom, such as `etloom.open` and `etloom.analyze`.

runs        opens, links, selects from and describes runs
questions   answers questions about runs
files       writes, converts, checks, repairs and records files
replaying   re-runs a recording
stores      keeps runs in a store, and compares them

Each verb accepts a Trace, a Job, or a path wherever it needs a run.
"""

from __future__ import annotations

from etloom.api.files import collect, convert, export, gather, lint, salvage
from etloom.api.questions import (
    analyze,
    check,
    compare,
    diff,
    diff_memory,
    graph,
    hangs,
    metrics,
    plan,
    plot,
    predict,
    report,
    show,
    simulate,
    simulate_memory,
)
from etloom.api.replaying import replay, repro
from etloom.api.runs import info, link, open, query, read, select
from etloom.api.stores import store_add, store_list, store_refresh, store_stragglers

__all__ = [
    "analyze",
    "check",
    "collect",
    "convert",
    "compare",
    "diff",
    "diff_memory",
    "export",
    "gather",
    "graph",
    "hangs",
    "info",
    "link",
    "lint",
    "metrics",
    "open",
    "plan",
    "plot",
    "predict",
    "query",
    "read",
    "replay",
    "report",
    "repro",
    "salvage",
    "select",
    "show",
    "simulate",
    "simulate_memory",
    "store_add",
    "store_list",
    "store_refresh",
    "store_stragglers",
]
