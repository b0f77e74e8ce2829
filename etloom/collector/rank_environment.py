"""Which rank this process is, by torch.distributed or by what launchers put into the environment."""

from __future__ import annotations

import os
import sys

# Rank and world size by each launcher, the innermost first: SLURM starts a torchrun a node, and torchrun the ranks.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun and its like
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


def rank_from_environment() -> int | None:
    """The rank that the launcher of the job put into the environment; null where none did."""
    return _rank_and_world_size()[0]


def current_rank() -> tuple[int, int]:
    """Rank and world size by torch.distributed, else by the environment, else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = _rank_and_world_size()
    return rank or 0, world or 1


def read_int_variable(*names: str) -> int | None:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal() and text.isascii()), None)


def _rank_and_world_size() -> tuple[int | None, int | None]:
    for rank_name, world_name in _LAUNCHERS:
        rank, world = read_int_variable(rank_name), read_int_variable(world_name)
        # SLURM numbers one task too, as the script of a batch job: what that starts may have ranks of its own.
        if rank is not None and (rank_name != "SLURM_PROCID" or (world or 1) > 1):
            return rank, world
    return None, None
