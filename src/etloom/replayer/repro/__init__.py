"""Writes a folder with a script that runs one recorded operator or collective with torch alone.

The scripts are operator_script.py and collective_script.py of this folder, with the recorded call in place of theirs.
Of the trace they contain numbers, names of types of torch, and the name of an operator of torch's registry; each is
written as a literal of a checked type.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import polars as pl
import torch

from etloom.collectives import match_collectives
from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.core.schema import TABLES
from etloom.core.text import count_noun
from etloom.core.trace import Job, Trace
from etloom.formats.parquet.writer import create_atomically
from etloom.replayer.comms.distributed_calls import torch_dtype
from etloom.replayer.plan import COLLECTIVES, MESSAGES
from etloom.replayer.recorded_calls import RecordedCall, extract_calls, matched_instances
from etloom.replayer.repro.operators import (
    DescribedCall,
    describe_operator,
    format_ns,
    measure_recorded_time,
    name_operator,
)

FILES = ("repro.py", "README.md")
_TEMPLATE = re.compile(r"(?s)(?<=# BEGIN recorded call\n).*(?=# END recorded call)")


def write_repro(job: Job, rank: int, event: int, out: Path) -> Path:
    """Write a folder with repro.py and README.md that run a recorded operator or collective again.

    Args:
        job: The linked run.
        rank: The rank of the event.
        event: The id of the event (column id of the table events).
        out: The folder; an earlier one of this function is replaced.

    Returns:
        The folder.

    Raises:
        EtloomError: The event is neither, its shapes or values were not recorded, the operator is not torch's, or the
            folder cannot be written.
    """
    trace = job[rank]
    rows = trace.events.filter(pl.col("id") == event).select(pl.col("name", "cat").cast(pl.String), "parent")
    place = f"event {event}{f' of rank {rank}' if len(job) > 1 else ''}"
    if rows.is_empty():
        raise EtloomError(
            "the trace has no such event",
            where=place,
            remedy="etloom analyze tasks lists events of slow operators",
        )
    name, category, _ = rows.row(0)
    try:
        collective = find_collective(trace, event)
        if collective is not None:
            call = describe_collective(job, rank, collective)
        elif category in categories.OPERATOR_CATEGORIES or category == categories.CAPTURED_OPERATOR:
            call = describe_operator(trace, event, name or "")
        else:
            raise ValueError(
                f"{name!r} ({category}) is not an operator or collective{name_operator(trace, event)}"
            )
    except (ValueError, IndexError) as error:
        raise EtloomError(str(error), where=place) from error
    source = resources.files(__name__).joinpath(call.template).read_text(encoding="utf-8")
    with create_atomically(out, files=FILES) as folder:
        Path(folder, "repro.py").write_text(_TEMPLATE.sub(lambda _: call.code, source), encoding="utf-8")
        Path(folder, "README.md").write_text(_describe_folder(call, place), encoding="utf-8")
    return out


def _describe_folder(call: DescribedCall, place: str) -> str:
    """Return the README of a folder."""
    is_operator = call.template == "operator_script.py"
    lines = [f"# {call.name}", "", f"One recorded call ({place} of its trace), for torch alone.", ""]
    lines += [*(f"- {fact}" for fact in call.facts), ""]
    if call.assumptions:
        lines += ["Assumed:", "", *(f"- {note}" for note in call.assumptions), ""]
    lines += ["```sh", call.start]
    if is_operator:
        lines += [
            "python repro.py --device cuda --cold   # caches cleared before each call",
            "ncu --profile-from-start off --set full --csv --page raw python repro.py --profile > report.csv",
            "rocprof-compute profile -n repro -- python repro.py --profile",
        ]
    else:
        lines += [f"nsys profile -t cuda,nvtx {call.start}", f"rocprofv3 --kernel-trace -- {call.start}"]
    lines += ["```", ""]
    text = (
        "The contents of tensors are synthetic: random numbers, and integers that are valid indices. The result is "
        "compared with the same operator in float64 on the CPU, on a GPU also with the CPU's. The measured time is the "
        "median of repeated calls, on the host as PyTorch's profiler records them, with other operators between them. "
        "Their data may be in a cache; in the recording they may not have been. Compare on an idle machine, with the "
        "recorded number of threads (--threads)."
        if is_operator
        else "Each rank contributes 1 or 2, and the result is compared with the computed one. With another number of "
        "ranks than recorded, each rank's part keeps its size. ncu repeats kernels, which cannot work for collectives: "
        "use nsys or rocprofv3."
    )
    return "\n".join([*lines, text, ""])


# Describes a recorded collective or message.


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
    ranks = len(call.group or ()) or row["group_size"] or _find_group_size(job, rank, row["event"])
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


def _find_group_size(job: Job, rank: int, event: int) -> int | None:
    """Return the number of ranks of the collective that an event, or its operator, issued; None if it is unknown."""
    events = job[rank].events
    issuers = [event, *events.filter(pl.col("id") == event)["parent"].drop_nulls()]
    parts = match_collectives(job).parts.filter(pl.col("rank") == rank, pl.col("issuer").is_in(issuers))
    sizes = parts["group_size"].drop_nulls().unique()
    return int(sizes[0]) if len(sizes) == 1 else None


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
