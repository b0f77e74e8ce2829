"""Write the simulated history of a caching allocator as PyTorch's memory snapshot, for pytorch.org/memory_viz.

The requests of a memory snapshot run through the simulated allocator, with its own settings or others. The file has the
form of torch.cuda.memory._snapshot(): the entries of each device's history with their stacks, and the segments and
blocks at the end.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.formats.io.atomic_file import open_atomic
from etloom.timeline.memory.program import ALLOC, FREE, NO_OWNER, Program, Simulation, find_programs
from etloom.timeline.memory.what_if import apply_change, start_within

SUFFIX = ".pickle"


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    settings: Annotated[
        str,
        "Settings of the allocator, in the form of etloom simulate --memory, such as expandable_segments:True.",
    ] = "",
) -> None:
    """Write the simulated history of a rank as a memory snapshot.

    Raises:
        EtloomError: The run has several ranks.
        AnalysisError: The trace has no history of an allocator.
        InvalidValue: A setting is unknown.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                "a memory snapshot contains one rank", where=path, remedy="select one with --rank"
            )
        (trace,) = trace.values()
    segments: list[dict[str, Any]] = []
    histories: list[list[dict[str, Any]]] = []
    chosen: dict[str, Any] = {}
    for program in find_programs(trace):
        changed, values = apply_change(program, settings) if settings else (program, program.settings)
        changed = start_within(changed, values.capacity)
        simulation = changed.run(values)
        frames = _FramesOfEntries(trace)
        histories += [[] for _ in range(program.device + 1 - len(histories))]
        histories[program.device] += _list_entries(changed, simulation, frames)
        segments += _list_segments(changed, simulation, frames)
        chosen = {
            "PYTORCH_CUDA_ALLOC_CONF": values.describe(),
            "expandable_segments": values.expandable_segments,
        }
    content = {
        "segments": segments,
        "device_traces": histories,
        "allocator_settings": chosen,
        "external_annotations": [],
    }
    with open_atomic(Path(path)) as file:
        file.write(pickle.dumps(content, protocol=4))


class _FramesOfEntries:
    """The frames of entries of the table allocator; equal stacks are one list, which a pickle contains once."""

    def __init__(self, trace: Trace) -> None:
        self._stacks = trace.allocator["stack"].cast(pl.String)
        self._frames: dict[str | None, list[dict[str, Any]]] = {None: []}

    def __getitem__(self, entry: int) -> list[dict[str, Any]]:
        text = self._stacks[entry] if entry >= 0 else None
        if text is not None and text not in self._frames:
            self._frames[text] = [_parse_frame(frame) for frame in json.loads(text)]
        return self._frames[text]


def _parse_frame(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"(.*) \((.*):(\d+)\)", text, re.DOTALL)
    name, file, line = match.groups() if match else (text, "", "0")
    return {"name": name, "filename": file, "line": int(line)}


def _list_entries(
    program: Program, simulation: Simulation, frames: _FramesOfEntries
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a device's history in PyTorch's order: what the driver did, then the request itself."""
    events = simulation.events.filter(pl.col("kind") != "retry")
    by_operation = events.group_by("operation", maintain_order=True).agg("kind", "addr", "bytes")
    driver = {row["operation"]: row for row in by_operation.iter_rows(named=True)}
    times = program.time.fill_null(0).to_list()
    requested = program.value.tolist()
    for operation, (action, address) in enumerate(
        zip(program.action.tolist(), simulation.address.tolist(), strict=True)
    ):
        common = {
            "stream": int(program.stream[operation]),
            "time_us": times[operation] // 1000,
            "frames": frames[int(program.entry[operation])],
        }
        row = driver.get(operation, {"kind": [], "addr": [], "bytes": []})
        for kind, addr, size in zip(row["kind"], row["addr"], row["bytes"], strict=True):
            yield {"action": kind, "addr": addr, "size": size, **common}
        if address >= 0 and action == ALLOC:
            yield {"action": "alloc", "addr": address, "size": requested[operation], **common}
        elif address >= 0 and action == FREE:
            owner = requested[operation]
            size = requested[owner] if owner >= 0 else int(program.blocks.requested[-1 - owner])
            for name in ("free_requested", "free_completed"):
                yield {"action": name, "addr": address, "size": size, **common}


def _list_segments(
    program: Program, simulation: Simulation, frames: _FramesOfEntries
) -> Iterator[dict[str, Any]]:
    """Yield the segments at the end with their blocks; each mapped range of an expandable segment is one."""
    end = (pl.col("addr") + pl.col("bytes")).shift(1)
    starts = (pl.col("segment") != pl.col("segment").shift(1)) | (pl.col("addr") != end)
    blocks = simulation.blocks.with_columns(range=starts.fill_null(True).cum_sum())
    for _, rows in blocks.group_by("range", maintain_order=True):
        in_use = rows.filter(pl.col("owner") != NO_OWNER)
        yield {
            "device": program.device,
            "address": rows["addr"][0],
            "total_size": int(rows["bytes"].sum()),
            "allocated_size": int(in_use["bytes"].sum()),
            "active_size": int(in_use["bytes"].sum()),
            "requested_size": int(in_use["requested"].sum()),
            "stream": rows["stream"][0],
            "segment_type": "small" if rows["is_small"][0] else "large",
            "segment_pool_id": (0, rows["pool"][0]),
            "is_expandable": bool(rows["is_expandable"][0]),
            "frames": [],
            "blocks": [
                {
                    "address": row["addr"],
                    "size": row["bytes"],
                    "requested_size": row["requested"],
                    "state": "inactive" if row["owner"] == NO_OWNER else "active_allocated",
                    "frames": frames[int(program.entry[row["owner"]])] if row["owner"] >= 0 else [],
                }
                for row in rows.iter_rows(named=True)
            ],
        }
