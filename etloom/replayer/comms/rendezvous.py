"""Where the processes of a replay meet, when nobody says it: of what their launcher tells each of them alike."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping

from etloom.core.errors import EtloomError

FIRST_PORT = 29_501
_PORT_COUNT = 3_000
"""Ports from the first on, all below those that Linux hands out by itself."""
_RUN_ID_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("OMPI_MCA_ess_base_jobid",),  # Open MPI 4
    ("PMIX_NAMESPACE",),  # Open MPI 5
)
"""Variables that tell one run of a launcher from others on the same hosts."""


def rendezvous_address(
    address: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Host and port of the store: as told, else beside torchrun's own; else on the first node of Slurm's step, or on
    this host, at a port of this run. Raises EtloomError for a host that is not known here."""
    host = address or environment.get("MASTER_ADDR") or _first_node(environment) or "127.0.0.1"
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        # torch tries for two minutes.
        raise EtloomError(
            f"the host {host!r} is not known here: {error.strerror}",
            remedy="name one that all processes reach (--master-addr)",
            option="master_addr" if address else None,
        ) from error
    return host, port or _port_next_to(environment.get("MASTER_PORT", "")) or _port_of_run(environment)


def _port_next_to(taken: str) -> int | None:
    if not re.fullmatch(r"\d{1,5}", taken, re.ASCII) or not 0 < int(taken) < 1 << 16:
        return None
    return int(taken) + 1 if int(taken) + 1 < 1 << 16 else int(taken) - 1


def _port_of_run(environment: Mapping[str, str]) -> int:
    """So that two runs on one host do not meet each other."""
    for names in _RUN_ID_VARIABLES:
        if all(name in environment for name in names):
            run = ".".join(environment[name] for name in names)
            return FIRST_PORT + zlib.crc32(run.encode()) % _PORT_COUNT
    return FIRST_PORT


def _first_node(environment: Mapping[str, str]) -> str | None:
    """The node of rank 0 where Slurm runs the processes on several: node[07-12],other is node07."""
    # What Open MPI runs as a step are its helpers on the other nodes.
    of = "JOB" if "OMPI_COMM_WORLD_RANK" in environment else "STEP"
    if environment.get(f"SLURM_{of}_NUM_NODES", "1") == "1":
        return None
    nodes = environment.get(f"SLURM_{of}_NODELIST", "")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0] or None
