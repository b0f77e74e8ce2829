"""Reads rank, world size and local rank of this process from the environment variables that its launcher set.

torchrun, Open MPI, MPICH's Hydra and Slurm set them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from etloom.core.errors import EtloomError

RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # Not SLURM_NTASKS: a batch script has it too, with rank 0, before any step runs.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables of rank, world size and rank on the host, by launcher."""

_LOCAL_SIZE_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "PMIX_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
"""Variables of the number of processes on the host, by launcher."""


@dataclass(frozen=True)
class Process:
    """Rank of this process, number of processes (world size), and index of this process on its host (local rank)."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Process:
        """Read rank, world size and local rank from the launcher's environment variables; default: the only process.

        Raises:
            EtloomError: The variables do not hold a rank and a world size.
        """
        for rank_name, size_name, local_name in RANK_VARIABLES:
            if rank_name in environment and size_name in environment:
                with contextlib.suppress(ValueError):
                    rank, size = int(environment[rank_name]), int(environment[size_name])
                    if 0 <= rank < size:
                        # Slurm with --mpi=pmi2 sets MPICH's variables but its own for the rank on the host.
                        local = environment.get(local_name, environment.get("SLURM_LOCALID", rank))
                        return cls(rank, size, int(local))
                raise EtloomError(
                    f"{rank_name}={environment[rank_name]!r}, {size_name}={environment[size_name]!r} are not a rank "
                    "and a world size",
                    remedy="start with torchrun, mpirun or srun",
                )
        return cls(0, 1, 0)


def ranks_on_host(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes the launcher started on this host, including this one; 1 if it is not known."""
    for name in _LOCAL_SIZE_VARIABLES:
        # Slurm writes 4(x2),3 for two hosts with four processes each and one with three: take the maximum.
        counts = [int(count) for count in re.findall(r"(?:^|,)(\d{1,6})", environment.get(name, ""))]
        if counts:
            return max(1, *counts)
    return 1
