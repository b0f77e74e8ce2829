"""Writes a folder with a script that runs one recorded operator or collective with torch alone.

The scripts are operator_script.py and collective_script.py of this folder, with the recorded call in place of theirs.
Of the trace they contain numbers, names of types of torch, and the name of an operator of torch's registry; each is
written as a literal of a checked type.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import polars as pl

from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.formats.parquet.writer import create_atomically
from etloom.replayer.repro.collectives import describe_collective, find_collective
from etloom.replayer.repro.described_call import DescribedCall, name_operator
from etloom.replayer.repro.operators import describe_operator

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
        "median of repeated calls, whose data may be in a cache; in the recording they may not have been, and the "
        "profiler added its own time."
        if is_operator
        else "Each rank contributes 1 or 2, and the result is compared with the computed one. With another number of "
        "ranks than recorded, each rank's part keeps its size. ncu repeats kernels, which cannot work for collectives: "
        "use nsys or rocprofv3."
    )
    return "\n".join([*lines, text, ""])
