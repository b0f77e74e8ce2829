"""Nsight Systems around a command: its command line, and the marks that a window makes for it.

nsys and Kineto both take CUPTI for themselves, so a window is of one or the other. The report covers what lies between
cudaProfilerStart and cudaProfilerStop, which the window calls; operators are NVTX ranges by torch's emit_nvtx.
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..session.messages import format_ranges

_SWITCHES = (
    "profile",
    "--trace=cuda,nvtx,osrt",
    "--sample=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
    "--kill=none",
)
# Launchers that start a Python themselves for each rank: what tells them not to, and that the program is what follows.
_NO_PYTHON = {"torchrun": "--no-python", "accelerate": "--no_python", "deepspeed": "--no_python"}
_NO_PYTHON_MODULES = {"torch.distributed.run": "--no-python", "torch.distributed.launch": "--no-python"}
_RANK_VARIABLES = {"mpirun": "OMPI_COMM_WORLD_RANK", "mpiexec": "PMI_RANK", "srun": "SLURM_PROCID"}
_PYTHON = re.compile(r"python[\d.]*")


def wrap_command(command: Sequence[str], out: str) -> list[str] | None:
    """`command` with nsys around the program of each rank, whose report is `out`/nsys_<rank>.nsys-rep.

    None where the place of the rank's program cannot be told.
    """
    words = list(command)
    name = PurePath(words[0]).name
    if name in _NO_PYTHON:
        return _without_python(words, 1, _NO_PYTHON[name], out)
    start = next((i for i, word in enumerate(words) if _PYTHON.fullmatch(PurePath(word).name)), None)
    if start is None:
        return None
    module = next(
        (words[i + 1] for i in range(start, len(words) - 1) if words[i] == "-m" and i <= start + 4), ""
    )
    if module in _NO_PYTHON_MODULES:
        return _without_python(words, words.index(module) + 1, _NO_PYTHON_MODULES[module], out)
    variable = _RANK_VARIABLES.get(name, "" if start == 0 else "RANK")
    return [*words[:start], *_nsys_words(out, f"%q{{{variable}}}" if variable else "0"), *words[start:]]


def _without_python(words: list[str], begin: int, switch: str, out: str) -> list[str] | None:
    """The launcher is told to start nsys, and nsys to start Python with the script."""
    for i in range(begin, len(words)):
        if words[i] in ("-m", "--module"):
            launcher, program = words[:i], ["-m", *words[i + 1 :]]
        elif words[i].endswith(".py"):
            launcher, program = words[:i], words[i:]
        else:
            continue
        return [*launcher, switch, *_nsys_words(out, "%q{RANK}"), "python", "-u", *program]
    return None


def _nsys_words(out: str, rank: str) -> list[str]:
    return ["nsys", *_SWITCHES, f"--output={out}/nsys_{rank}"]


def missing_reports(out: Path, ranks: Iterable[int]) -> str | None:
    """Which of these ranks nsys wrote no report of, and why that may be; null where it did of all."""
    missing = [rank for rank in ranks if not (out / f"nsys_{rank}.nsys-rep").exists()]
    if not missing:
        return None
    of = f"rank {format_ranges(missing)}" if len(missing) == 1 else f"ranks {format_ranges(missing)}"
    return (
        f"nsys wrote no report of {of}: it records between cudaProfilerStart and cudaProfilerStop, which a window of a "
        "process without CUDA does not call; or it said why, above"
    )


class NsysMarkers:
    """The capture range of a window, and its operators as NVTX ranges. Does nothing in a process without CUDA."""

    def __init__(self, shapes: bool) -> None:
        self._shapes = shapes
        self._ranges: Any = None
        self._capturing = False

    def start(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._capturing = True
        emit_nvtx: Any = torch.autograd.profiler.emit_nvtx
        self._ranges = emit_nvtx(record_shapes=self._shapes)
        self._ranges.__enter__()

    def stop(self) -> None:
        import torch

        ranges, self._ranges = self._ranges, None
        if ranges is not None:
            ranges.__exit__(None, None, None)
        if self._capturing:
            self._capturing = False
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
