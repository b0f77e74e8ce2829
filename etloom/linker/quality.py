"""How far linking reached, as a table and as the few figures that stand in ``meta["link"]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom import kinds, stacks
from etloom.linker.comms import device_communication
from etloom.linker.ids import linkable
from etloom.trace import Trace

COLUMNS = {
    "subject": pl.String,
    "how": pl.String,
    "total": pl.Int64,
    "linked": pl.Int64,
    "unlinked": pl.Int64,
    "share_pct": pl.Float64,
    "note": pl.String,
}
"""Of `summary`: what was to be linked, by which key, how many, and the reasons of the rest."""

_REASONS = {
    "host operators": (
        "missing_threads",
        "unlinked_operators",
        "name_disagreements",
        "repeated_ids",
        "process_group_records",
    ),
    "device work": ("launch_missing", "repeated_correlations"),
    "launches": ("launch_without_operator", "graph_launches"),
    "collectives": ("comms_without_event",),
    "steps": (),
}


def summary(trace: Trace) -> pl.DataFrame:
    """One row a subject (`COLUMNS`) of a linked trace; share_pct is null where there is nothing to link.

    host operators: nodes of the execution trace with an event. device work: kernels, copies and sets with
    their launch call. launches: calls with an operator around them. collectives: device work that is
    communication by name, with a row in comms. steps: host and device events that belong to a ProfilerStep.
    """
    events, launches = trace.events, trace.launches
    link = trace.meta.get("link", {})
    operators = linkable(trace.nodes) if trace.nodes.height else np.zeros(0, bool)
    calls = launches.drop_nulls("launch").unique("launch")
    communication = device_communication(trace) if launches.height else None
    staged = events["step"].filter(pl.Series(stacks.among(events["cat"], kinds.HOST | kinds.DEVICE)))
    steps = staged.n_unique() - (staged.null_count() > 0)
    rows = [
        ("host operators", link.get("how"), int(operators.sum()), trace.links["node"].n_unique()),
        ("device work", "correlation", launches.height, launches.height - launches["launch"].null_count()),
        ("launches", "time", calls.height, calls.height - calls["operator"].null_count()),
        (
            "collectives",
            "operator",
            0 if communication is None else communication.height,
            0 if communication is None else int(communication["known"].sum()),
        ),
        (
            "steps",
            "ProfilerStep",
            len(staged) if steps else 0,
            len(staged) - staged.null_count() if steps else 0,
        ),
    ]
    counts = {
        name.removeprefix("link."): (count, example)
        for name, count, example in trace.stats.select("name", "count", "example").rows()
        if name.startswith("link.")
    }
    return pl.DataFrame(
        [
            (
                subject,
                how,
                total,
                linked,
                total - linked,
                100 * linked / total if total else None,
                _note(subject, link, counts, steps),
            )
            for subject, how, total, linked in rows
        ],
        schema=COLUMNS,
        orient="row",
    )


def figures(trace: Trace) -> dict[str, Any]:
    """What ``meta["link"]`` holds: how, score, ties and the like of the pairing, and the counts of `summary`.

    host_operators, linked and coverage (linked / host_operators, null where either file is missing) of the
    execution trace; device_work and launched of the profiler's.
    """
    table = {row["subject"]: row for row in summary(trace).iter_rows(named=True)}
    operators, work = table["host operators"], table["device work"]
    return {
        **trace.meta.get("link", {}),
        "host_operators": operators["total"],
        "linked": operators["linked"],
        "coverage": operators["linked"] / operators["total"]
        if operators["total"] and trace.events.height
        else None,
        "device_work": work["total"],
        "launched": work["linked"],
    }


def _note(
    subject: str, link: dict[str, Any], counts: dict[str, tuple[int, str | None]], steps: int
) -> str | None:
    parts = [
        f"{reason.replace('_', ' ')}: {counts[reason][0]}"
        + (f" ({counts[reason][1]})" if counts[reason][1] else "")
        for reason in _REASONS[subject]
        if reason in counts
    ]
    if subject == "host operators" and link.get("ties", 1) > 1:
        parts.insert(0, f"{link['ties']} equal iterations: one of them")
    if subject == "steps":
        parts.append(f"{steps} steps" if steps else "no ProfilerStep")
    return "; ".join(parts) or None
