"""Values of integer tensors that PyTorch saved beside an execution trace, in the folder ``<name>_resources``.

With ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA=aten::embedding,... torch writes what integer inputs of
these operators held as ``nid_<node>_tid_<place>.dat``, raw; place counts the tensors among the inputs. A file's name is
made of two numbers, never of text of a trace, and no link is followed. As of torch 2.13 the bytes are the elements
only where a tensor fills the front of its storage (its offset counts as bytes, its strides not at all), or came from a
GPU whole: others are left alone.
"""

from __future__ import annotations

import stat
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from etloom.core.trace import Trace
from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import TensorView
from etloom.replayer.compute.tensor_initialization import IntegerBounds

_INTEGERS = {
    torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64,
    torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64,
}  # fmt: skip


class SavedTensors:
    """used: how many tensors got values that were saved. refused: why others did not, and how many."""

    def __init__(self, program: Program, bounds: IntegerBounds, folder: Path | None) -> None:
        self.used = 0
        self.refused: Counter[str] = Counter()
        self._bounds = bounds
        self._folder = folder
        self._first = _first_uses(program, {one.name for one in folder.iterdir()}) if folder else {}

    def fill(self, whole: torch.Tensor, storage: int) -> None:
        """Put what was saved of a storage, before any step wrote it, into the flat tensor that is made for it."""
        for view, name in self._first.get(storage, ()) if not whole.is_meta else ():
            try:
                values = torch.from_numpy(self._values(view, name))
            except (OSError, ValueError) as error:
                self.refused[str(error) if isinstance(error, ValueError) else "it cannot be opened"] += 1
                continue
            size = whole.dtype.itemsize
            start, count = view.offset * values.itemsize, values.numel() * values.itemsize
            if start % size or count % size:
                self.refused["another tensor on its storage has wider elements"] += 1
                continue
            place = whole[start // size : (start + count) // size]
            place.view(torch.uint8).copy_(values.view(torch.uint8))
            self.used += 1

    def _values(self, view: TensorView, name: str) -> np.ndarray:
        """Elements of a view, as its readers take them. Raises ValueError with the reason where there are none."""
        kind = _INTEGERS.get(DTYPES[view.dtype])
        if kind is None:
            raise ValueError("it is of no integers")
        count = np.prod(view.shape, dtype=np.int64)
        reach = sum((size - 1) * by for size, by in zip(view.shape, view.stride, strict=True))
        if reach + 1 != count or (view.on_host and view.offset):
            raise ValueError("torch saves other bytes of tensors with an offset or gaps")
        assert self._folder is not None
        values = np.frombuffer(_read_exactly(self._folder / name, int(count) * np.dtype(kind).itemsize), kind)
        storage, bounds = view.storage, self._bounds
        if storage in bounds.trusting:
            raise ValueError("an operator that reads it would trust what it holds")
        if storage in bounds.mixed:
            raise ValueError("it is read as integers of several sizes")
        if storage in bounds.bags:
            whole = values.astype(np.int64)
            if whole[:1].any() or (np.diff(whole) < 0).any() or (whole[-1:] >= bounds.bags[storage]).any():
                raise ValueError("bags begin where no indices are")
        elif storage in bounds.reach:
            # A padding label such as -100, or a stranger's index: brought to what readers take.
            low, high = bounds.least.get(storage, 0), bounds.reach[storage] - 1
            values = np.clip(values.astype(np.int64), low, high).astype(kind)
        return values.copy()


def resources_folder(run: Path, trace: Trace) -> Path | None:
    """The resources of a trace that was read from a run (a folder or a file): the folder beside its file, which is
    looked for in the run alone, whatever path the trace was recorded under."""
    root = run if run.is_dir() else run.parent
    inner = root.resolve()
    for file in map(Path, trace.meta.get("files", ())):
        beside = file.parent if file.parent.resolve().is_relative_to(inner) else root
        plain = file.name.removesuffix(".gz").removesuffix(".zst")
        for name in (plain.removesuffix(".json"), plain):
            found = beside / f"{name}_resources"
            # Through no link, also of a folder above it.
            inside = found.resolve().is_relative_to(inner)
            if name and inside and not found.is_symlink() and found.is_dir():
                return found
    return None


def _first_uses(program: Program, names: set[str]) -> dict[int, list[tuple[TensorView, str]]]:
    """Storage -> what was saved of it before a step wrote it."""
    written: set[int] = set()
    found: dict[int, list[tuple[TensorView, str]]] = {}
    for step in program.steps:
        for place, view in step.inputs.items():
            name = f"nid_{step.et_id}_tid_{place}.dat"
            if name in names and view.storage not in written:
                found.setdefault(view.storage, []).append((view, name))
        written |= step.written()
    return found


def _read_exactly(path: Path, size: int) -> bytes:
    """A file of just that size. Raises ValueError where it has another or is no plain file, OSError."""
    known = path.lstat()
    if not stat.S_ISREG(known.st_mode):
        raise ValueError("it is no plain file")
    if known.st_size != size:
        raise ValueError("its file is not as large as the tensor")
    return path.read_bytes()
