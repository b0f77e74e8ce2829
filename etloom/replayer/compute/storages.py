"""The storages of a recording: versions of their ids, who fills them, and which step is the last to need one.

Ids of storages are addresses, which are used again: a storage that an operator gives and did not take is a new version
of its id. What a version's last reader leaves behind is freed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program_steps import ProgramStep, TensorView, tensor_views

INPUT, OUTPUT = 0, 1  # of the column io of tensors
_MAX_BYTES = 1 << 50
_EMPTY_OPERATOR = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?")


class StorageVersions:
    """Numbers for the storages of a recording, of which ids are used again."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self._now: dict[int, int] = {}

    def view(self, row: dict[str, Any], new: bool) -> TensorView:
        """The tensor of a row. new: no earlier tensor of its id shares its storage."""
        if row["dtype"] not in DTYPES:
            raise ValueError(f"dtype {row['dtype']} is not known")
        shape, stride = _parse_sizes(row["shape"]), _parse_sizes(row["stride"])
        told = len(stride) == len(shape)
        if not told:  # not recorded before schema 1.1.1
            stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        if min((0, row["offset"] or 0, *shape, *stride)) < 0:
            raise ValueError("a negative size was recorded")
        name = row["storage_id"]
        if new or name not in self._now:
            self._now[name] = len(self.bytes)
            self.bytes[len(self.bytes)] = 0
        storage = self._now[name]
        on_host = row["device"] == "cpu"
        view = TensorView(
            storage,
            row["dtype"],
            row["offset"] or 0,
            shape,
            stride,
            on_host,
            None if told else row["tensor_id"],
        )
        if view.bytes > _MAX_BYTES:
            raise ValueError("a size beyond all memory was recorded")
        self.bytes[storage] = max(self.bytes[storage], view.bytes)
        return view

    def forget(self, names: set[int]) -> None:
        """Ids that were given to other storages, of which no step tells: who reads them must not get older ones."""
        for name in names:
            self._now.pop(name, None)

    def replaced(self, rows: list[dict[str, Any]]) -> None:
        """Tensors that something gave which is not run: who reads them must not get what had their ids before."""
        taken = {row["storage_id"] for row in rows if row["io"] == INPUT}
        for row in rows:
            if row["io"] == OUTPUT and row["storage_id"] not in taken:
                self._now.pop(row["storage_id"], None)


def _parse_sizes(text: str | None) -> tuple[int, ...]:
    sizes = json.loads(text or "[]")
    if not isinstance(sizes, list) or any(type(one) is not int for one in sizes):
        raise ValueError("sizes were recorded that are none")
    return tuple(sizes)


def mark_freed_storages(steps: list[ProgramStep]) -> tuple[set[int], set[int]]:
    """Say at each step which storages end there; the storages that steps make, and those that they give."""
    last: dict[int, int] = {}
    made: set[int] = set()
    given: set[int] = set()
    for at, step in enumerate(steps):
        taken = {view.storage for view in tensor_views(step.values)}
        results = {view.storage for view in step.results}
        made |= results - taken - last.keys()
        given |= results | step.written()
        last |= dict.fromkeys(taken | results, at)
    ends: dict[int, list[int]] = {}
    for storage in made:
        ends.setdefault(last[storage], []).append(storage)
    for at, storages in ends.items():
        steps[at].frees = tuple(storages)
    return made, given


def find_unfilled_storages(steps: list[ProgramStep]) -> frozenset[int]:
    """Storages that are read as ``aten::empty`` left them: something filled them that was not recorded, as Python does
    in ``torch.tensor([1, 2])``, or that is not run."""
    empty: set[int] = set()
    found: set[int] = set()
    for step in steps:
        given = {view.storage for view in step.results}
        taken = {view.storage for view in tensor_views(step.values)}
        written = step.written()
        found |= (taken - written - given) & empty
        empty -= written | found
        if _EMPTY_OPERATOR.fullmatch(step.operator.name):
            empty |= given - taken
    return frozenset(found)
