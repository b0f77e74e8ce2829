"""Tracks recorded storages: distinguishes reuses of an id, and determines which steps create, fill and last use each.

Ids of storages are addresses, which are reused: a storage that an operator returns without having read it is a new
version of its id. It is freed after its last reader.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program_steps import ProgramStep, TensorView, tensor_views

INPUT, OUTPUT = 0, 1  # values of the column io of the table tensors
_MAX_BYTES = 1 << 50
_EMPTY_OPERATOR = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?")


class StorageVersions:
    """Numbers recorded storages: a storage id that is reused for new memory gets a new number (version).

    Attributes:
        bytes: Storage version -> required size.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self._current: dict[int, int] = {}

    def view(self, row: dict[str, Any], new: bool) -> TensorView:
        """Convert a row of the table `tensors` to a `TensorView` on the current version of its storage.

        Args:
            new: It does not share its storage with an earlier tensor of the same storage id.

        Raises:
            ValueError: It cannot be replayed; the message is the reason.
        """
        if row["dtype"] not in DTYPES:
            raise ValueError(f"unknown dtype {row['dtype']}")
        shape, stride = _parse_sizes(row["shape"]), _parse_sizes(row["stride"])
        has_strides = len(stride) == len(shape)
        if not has_strides:  # not recorded before schema 1.1.1
            stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        if min((0, row["offset"] or 0, *shape, *stride)) < 0:
            raise ValueError("a negative size of a tensor was recorded")
        storage_id = row["storage_id"]
        if new or storage_id not in self._current:
            self._current[storage_id] = len(self.bytes)
            self.bytes[len(self.bytes)] = 0
        storage = self._current[storage_id]
        view = TensorView(
            storage,
            row["dtype"],
            row["offset"] or 0,
            shape,
            stride,
            row["device"] == "cpu",
            None if has_strides else row["tensor_id"],
        )
        if view.bytes > _MAX_BYTES:
            raise ValueError("a recorded tensor is larger than any memory")
        self.bytes[storage] = max(self.bytes[storage], view.bytes)
        return view

    def forget(self, storage_ids: set[int]) -> None:
        """Forget the versions of storage ids whose memory was reused, so that later reads do not get old data."""
        for storage_id in storage_ids:
            self._current.pop(storage_id, None)

    def forget_results(self, rows: list[dict[str, Any]]) -> None:
        """Forget the storage ids of an omitted operator's results, so that later reads do not get old data."""
        read = {row["storage_id"] for row in rows if row["io"] == INPUT}
        self.forget({row["storage_id"] for row in rows if row["io"] == OUTPUT} - read)


def _parse_sizes(text: str | None) -> tuple[int, ...]:
    sizes = json.loads(text or "[]")
    if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
        raise ValueError("the recorded sizes of a tensor are not a list of integers")
    return tuple(sizes)


def mark_freed_storages(steps: list[ProgramStep]) -> tuple[set[int], set[int]]:
    """Set `ProgramStep.frees` of each step: the storages created by the program whose last use is that step.

    Returns:
        The storages that steps create, and those that steps write or return.
    """
    last_use: dict[int, int] = {}
    created: set[int] = set()
    filled: set[int] = set()
    for index, step in enumerate(steps):
        read = {view.storage for view in tensor_views(step.values)}
        results = {view.storage for view in step.results}
        created |= results - read - last_use.keys()
        filled |= results | step.written()
        last_use |= dict.fromkeys(read | results, index)
    freed: dict[int, list[int]] = {}
    for storage in created:
        freed.setdefault(last_use[storage], []).append(storage)
    for index, storages in freed.items():
        steps[index].frees = tuple(storages)
    return created, filled


def find_unfilled_storages(steps: list[ProgramStep]) -> frozenset[int]:
    """Return the storages that a step reads although no step wrote to them after ``aten::empty`` created them.

    They were filled by code that was not recorded, such as Python in ``torch.tensor([1, 2])``, or by operators that are
    not replayed.
    """
    empty: set[int] = set()
    unfilled: set[int] = set()
    for step in steps:
        results = {view.storage for view in step.results}
        read = {view.storage for view in tensor_views(step.values)}
        written = step.written()
        unfilled |= (read - written - results) & empty
        empty -= written | unfilled
        if _EMPTY_OPERATOR.fullmatch(step.operator.name):
            empty |= results - read
    return frozenset(unfilled)
