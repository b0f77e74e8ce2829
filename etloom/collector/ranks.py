"""Which rank this process is, by torch.distributed or by what launchers put into the environment."""

from __future__ import annotations

import os
import sys

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # torchrun and its like, Open MPI, MPICH
_WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def rank_hint(*more: str) -> int | None:
    """The rank that the launcher of the job put into the environment, under one of its names or of `more`."""
    return environment_int(*_RANKS, *more)


def current_rank() -> tuple[int, int]:
    """Rank and world size by torch.distributed, else by the environment, else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return rank_hint() or 0, environment_int(*_WORLDS) or 1


def environment_int(*names: str) -> int | None:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdigit()), None)
