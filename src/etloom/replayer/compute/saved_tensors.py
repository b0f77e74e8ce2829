"""Reads values of integer tensors that PyTorch saved next to an execution trace, in the folder ``<name>_resources``.

With ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA=aten::embedding,... torch writes the contents of integer
inputs of these operators to raw files ``nid_<node>_tid_<place>.dat``; place counts the tensors among the inputs.
etloom's observer writes ``rf_<record function id>_tid_<place>.dat``. File
names are built from two numbers, never from text of a trace, and links are not followed. In torch 2.13 the bytes are
the tensor's elements only if it fills the beginning of its storage (its offset is taken as bytes, its strides are
ignored) or was copied from a GPU; all others are ignored.
"""

from __future__ import annotations

import stat
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from etloom.core.trace import Trace
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import DTYPES, TensorView
from etloom.replayer.compute.tensor_initialization import IntegerBounds

_INTEGERS = {
    torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64,
    torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64,
}  # fmt: skip


class SavedTensors:
    """Copies the integer tensor values that PyTorch saved next to the recording into the tensors of a replay.

    Attributes:
        used: Number of tensors that got saved values.
        refused: Reason -> number of saved tensors that were not used.
    """

    def __init__(self, program: Program, bounds: IntegerBounds, folder: Path | None) -> None:
        self.used = 0
        self.refused: Counter[str] = Counter()
        self._bounds = bounds
        self._folder = folder
        self._files = _first_uses(program, {path.name for path in folder.iterdir()}) if folder else {}

    def fill(self, tensor: torch.Tensor, storage: int) -> None:
        """Copy the values saved for a storage (before any step wrote to it) into the flat tensor that represents it."""
        for view, name in self._files.get(storage, ()) if not tensor.is_meta else ():
            try:
                values = torch.from_numpy(self._read_values(view, name))
            except (OSError, ValueError) as error:
                self.refused[str(error) if isinstance(error, ValueError) else "it cannot be opened"] += 1
                continue
            size = tensor.dtype.itemsize
            start, count = view.offset * values.itemsize, values.numel() * values.itemsize
            if start % size or count % size:
                self.refused["another tensor on its storage has wider elements"] += 1
                continue
            target = tensor[start // size : (start + count) // size]
            target.view(torch.uint8).copy_(values.view(torch.uint8))
            self.used += 1

    def _read_values(self, view: TensorView, name: str) -> np.ndarray:
        """Read the saved elements of a tensor, and clip indices to the range that the operators reading them accept.

        Raises:
            ValueError: With the reason why they are not used.
        """
        dtype = _INTEGERS.get(DTYPES[view.dtype])
        if dtype is None:
            raise ValueError("the saved tensor does not contain integers")
        count = np.prod(view.shape, dtype=np.int64)
        last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
        is_torchs = name.startswith("nid_")
        if last + 1 != count or (is_torchs and view.on_host and view.offset):
            raise ValueError("torch saves wrong bytes for a tensor that has an offset or gaps in its storage")
        assert self._folder is not None
        values = np.frombuffer(
            _read_exactly(self._folder / name, int(count) * np.dtype(dtype).itemsize), dtype
        )
        storage, bounds = view.storage, self._bounds
        if storage in bounds.trusted:
            raise ValueError("an operator that reads the saved tensor may not check its values")
        if storage in bounds.mixed:
            raise ValueError("operators read the saved tensor as integers of several sizes")
        if storage in bounds.bag_offsets:
            offsets = values.astype(np.int64)
            exceeds_limit = (offsets[-1:] >= bounds.bag_offsets[storage]).any()
            if offsets[:1].any() or (np.diff(offsets) < 0).any() or exceeds_limit:
                raise ValueError("the saved offsets of embedding bags are invalid")
        elif storage in bounds.limits:
            # A padding label such as -100, or a manipulated index: clip it to what readers accept.
            low, high = bounds.minimums.get(storage, 0), bounds.limits[storage] - 1
            values = np.clip(values.astype(np.int64), low, high).astype(dtype)
        return values.copy()


def resources_folder(run: Path, trace: Trace) -> Path | None:
    """Return the folder with the tensor values that were saved next to the file of a trace; None if there is none.

    It is searched inside of the run only, whatever path the trace was recorded under.

    Args:
        run: The folder or file that the trace was read from.
    """
    root = run if run.is_dir() else run.parent
    resolved_root = root.resolve()
    for file in map(Path, trace.meta.get("files", ())):
        parent = file.parent if file.parent.resolve().is_relative_to(resolved_root) else root
        plain = file.name.removesuffix(".gz").removesuffix(".zst")
        for name in (plain.removesuffix(".json").removesuffix(".etob"), plain):
            folder = parent / f"{name}_resources"
            # No link may lead outside, not even that of a folder above it.
            is_inside = folder.resolve().is_relative_to(resolved_root)
            if name and is_inside and not folder.is_symlink() and folder.is_dir():
                return folder
    return None


def _first_uses(program: Program, names: set[str]) -> dict[int, list[tuple[TensorView, str]]]:
    """Return storage -> [(tensor, file name)] for tensors that were saved before any step wrote to their storage."""
    written: set[int] = set()
    files: dict[int, list[tuple[TensorView, str]]] = {}
    for step in program.steps:
        for place, view in step.inputs.items():
            for name in (f"{start}_tid_{place}.dat" for start in step.saved_under):
                if name in names and view.storage not in written:
                    files.setdefault(view.storage, []).append((view, name))
        written |= step.written()
    return files


def _read_exactly(path: Path, size: int) -> bytes:
    """Read a regular file of exactly ``size`` bytes.

    Raises:
        ValueError: It has another size, or is not a regular file.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the file of the tensor is not a regular file")
    if status.st_size != size:
        raise ValueError("the size of the file does not match the tensor that was saved in it")
    return path.read_bytes()
