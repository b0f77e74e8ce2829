"""Describes a recorded collective or message."""

from __future__ import annotations

import re
from typing import Any

import polars as pl
import torch

from etloom.core import categories
from etloom.core.schema import TABLES
from etloom.core.text import count_noun
from etloom.core.trace import Job, Trace
from etloom.replayer.comms.distributed_calls import torch_dtype
from etloom.replayer.plan import COLLECTIVES, MESSAGES
from etloom.replayer.recorded_calls import RecordedCall, extract_calls, matched_instances
from etloom.replayer.repro.described_call import DescribedCall, format_ns, measure_recorded_time


def find_collective(trace: Trace, event: int) -> dict[str, Any] | None:
    """Return the row of comms of the call that an event is, contains, or directly belongs to; None for others."""
    comms = trace.comms.drop_nulls(["event", "collective"]).with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    events = trace.events.select("id", "parent", pl.col("name", "cat").cast(pl.String))
    row = events.filter(pl.col("id") == event)
    near = pl.col("id") == event
    if re.search(categories.COMMUNICATION_CALL, row["name"][0] or ""):
        near |= (pl.col("parent") == event) | pl.col("id").is_in(row["parent"].drop_nulls().implode())
    hosts = ~pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)).fill_null(False)
    ids = events.filter(near, hosts)["id"]
    matches = comms.filter(pl.col("event").is_in(ids.implode())).sort(pl.col("event") != event, "id")
    return None if matches.is_empty() else matches.row(0, named=True)


def describe_collective(job: Job, rank: int, row: dict[str, Any]) -> DescribedCall:
    """Return the script of a communication call. Raises ValueError with the reason why there is none."""
    trace = job[rank]
    reduced = trace.replace(comms=TABLES["comms"].conform(trace.comms.filter(pl.col("id") == row["id"])))
    calls, skipped = extract_calls(reduced, job.ranks, matched_instances(job).get(rank, {}))
    if not calls:
        reason = skipped[0][1] if skipped else "it is the wait for another call"
        raise ValueError(f"{row['collective']}: {reason}")
    call = calls[0]
    if call.collective not in COLLECTIVES | MESSAGES:
        raise ValueError(f"{call.collective} is not a collective that can be run again")
    ranks = len(call.group) if call.group else row["group_size"]
    recorded_ns, recorded_on = measure_recorded_time(trace, row["event"])
    if recorded_on == "host" and call.start is not None and call.end is not None:
        recorded_ns = call.end - call.start
    elements, is_list, assumptions = _size_part(call, ranks)
    dtype = torch_dtype(call.dtype) if call.dtype else torch.float32
    root = call.group.index(call.root) if call.group and call.root in call.group else 0
    operation = call.reduce_op if call.reduce_op in ("sum", "min", "max", "avg", "product") else "sum"
    if call.reduce_op is None and "reduce" in call.collective:
        assumptions.append("the reduce operation was not recorded: it is sum")
    elif call.reduce_op not in (None, operation):
        assumptions.append(f"the reduce operation {call.reduce_op} runs as sum")
    if ranks is None:
        assumptions.append("the size of the group was not recorded")
    code = (
        f"COLLECTIVE = {call.collective!r}\nRECORDED_NS: int | None = {recorded_ns!r}\n"
        f"RECORDED_RANKS: int | None = {ranks!r}\nRECORDED_ON = {recorded_on!r}\nDTYPE = {dtype}\n"
        f"ELEMENTS = {elements!r}  # of the part of one rank\nREDUCE_OP = {operation!r}\nROOT = {root!r}\n"
        f"IS_LIST = {is_list!r}  # whether it takes a list of tensors where torch also takes one tensor\n"
    )
    facts = [
        f"{elements:,} elements of {dtype} as the part of one rank, on {ranks or 'an unknown number of'} ranks",
        f"Recorded time: {format_ns(recorded_ns)} ({recorded_on}; it includes waiting for other ranks).",
    ]
    processes = 2 if call.collective in MESSAGES else ranks or 2
    start = f"torchrun --nproc-per-node {processes} repro.py"
    return DescribedCall("collective_script.py", call.collective, code, facts, assumptions, start)


def _size_part(call: RecordedCall, ranks: int | None) -> tuple[int, bool, list[str]]:
    """Return the elements of one rank's part, whether the call takes a list of tensors, and what is assumed."""
    inputs, outputs, assumptions = sum(call.inputs), sum(call.outputs), []
    if call.coalesced and max(len(call.inputs), len(call.outputs)) > 1:
        assumptions.append(
            f"{count_noun(len(call.inputs) or len(call.outputs), 'coalesced tensor')} run as one"
        )
    if len(set(call.in_split)) > 1 or len(set(call.out_split)) > 1:
        assumptions.append("uneven splits run as even ones of the same total")
    size = max(ranks or 1, 1)
    match call.collective:
        case "barrier":
            return 0, False, assumptions
        case "all_gather" | "gather":
            part = inputs or outputs // size
        case "reduce_scatter" | "scatter":
            part = outputs or inputs // size
        case "all_to_all":
            part = (inputs or outputs) // size
        case _:
            part = inputs or outputs
    is_list = not call.coalesced and max(len(call.inputs), len(call.outputs)) > 1
    return part, is_list, assumptions
