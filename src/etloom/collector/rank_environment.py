"""Determines this process's rank and world size from torch.distributed or the launcher's environment variables."""

from __future__ import annotations

import os
import sys

# The variables of rank and world size of each launcher, innermost first: SLURM starts one torchrun per node, and
# torchrun starts the ranks.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun and compatible launchers
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


def rank_from_environment() -> int | None:
    """Return the rank from the environment variables that the job's launcher sets, or None if none is set."""
    return _rank_and_world_size()[0]


def current_rank() -> tuple[int, int]:
    """Return rank and world size from torch.distributed, else from the environment, else (0, 1)."""
    if is_distributed():
        distributed = sys.modules["torch.distributed"]
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world_size = _rank_and_world_size()
    return rank or 0, world_size or 1


def is_distributed() -> bool:
    """Return whether this process has joined a process group of torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def read_int_variable(*names: str) -> int | None:
    """Return the value of the first of the environment variables `names` that holds a non-negative integer, or None."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal() and value.isascii()), None)


def _rank_and_world_size() -> tuple[int | None, int | None]:
    for rank_name, world_name in _LAUNCHERS:
        rank, world_size = read_int_variable(rank_name), read_int_variable(world_name)
        # SLURM also numbers a single task, such as a batch script, whose children may have ranks of their own.
        if rank is not None and (rank_name != "SLURM_PROCID" or (world_size or 1) > 1):
            return rank, world_size
    return None, None
