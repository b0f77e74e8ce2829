"""Determines the host and port at which the processes of a replay connect, and opens the key-value store there.

Unless the user specifies them, every process derives the same address from what its launcher sets.
"""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from etloom.core.errors import EtloomError, InvalidValue
from etloom.replayer.launch_environment import Process

FIRST_PORT = 29_501
_PORT_COUNT = 3_000
"""Ports from the first one on; all are below those that Linux assigns automatically."""
_RUN_ID_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("OMPI_MCA_ess_base_jobid",),  # Open MPI 4
    ("PMIX_NAMESPACE",),  # Open MPI 5
)
"""Variables that distinguish one run of a launcher from others on the same hosts."""
_RETRY_S = 0.1


def rendezvous_address(
    address: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Return host and port of the key-value store through which the processes of a replay communicate.

    By default the host is torchrun's, else the first node of Slurm's step, else this host; the port is next to
    torchrun's, else derived from the launcher's run id.

    Raises:
        EtloomError: The host cannot be resolved.
    """
    host = address or environment.get("MASTER_ADDR") or _first_node(environment) or "127.0.0.1"
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        # torch would retry for two minutes.
        raise InvalidValue(
            f"cannot resolve host {host!r}: {error.strerror}",
            remedy="specify one that all processes reach (--master-addr)",
            option="master_addr" if address else None,
        ) from error
    return host, port or _port_next_to(environment.get("MASTER_PORT", "")) or _run_port(environment)


def _port_next_to(used: str) -> int | None:
    if not re.fullmatch(r"\d{1,5}", used, re.ASCII) or not 0 < int(used) < 1 << 16:
        return None
    return int(used) + 1 if int(used) + 1 < 1 << 16 else int(used) - 1


def _run_port(environment: Mapping[str, str]) -> int:
    """Return a port derived from the launcher's run id, so that runs on the same host use different ports."""
    for names in _RUN_ID_VARIABLES:
        if all(name in environment for name in names):
            run_id = ".".join(environment[name] for name in names)
            return FIRST_PORT + zlib.crc32(run_id.encode()) % _PORT_COUNT
    return FIRST_PORT


def _first_node(environment: Mapping[str, str]) -> str | None:
    """Return the first node in Slurm's node list, such as node07 of node[07-12],other; None for a single node."""
    # The step that Open MPI starts consists of its helpers on the other nodes.
    scope = "JOB" if "OMPI_COMM_WORLD_RANK" in environment else "STEP"
    if environment.get(f"SLURM_{scope}_NUM_NODES", "1") == "1":
        return None
    nodes = environment.get(f"SLURM_{scope}_NODELIST", "")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0] or None


def connect_store(process: Process, address: str, port: int, timeout_s: float) -> Any:
    """Connect to the key-value store of all processes, which rank 0 hosts.

    Raises:
        EtloomError: The store cannot be reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    remedy = "specify a host that all processes reach and a free port there (--master-addr, --master-port)"
    if process.rank and not _is_listening(address, port, timeout_s):
        raise EtloomError(
            f"rank {process.rank} could not reach rank 0 at {address}:{port} within {timeout_s:g} s",
            remedy=remedy,
        )
    try:
        # torchrun has a store of its own on its port; this one belongs to the replay.
        return TCPStore(
            address,
            port,
            process.world_size,
            process.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=True,
        )
    except (RuntimeError, ValueError) as error:
        raise EtloomError(
            f"the {process.world_size} processes could not connect at {address}:{port}: {str(error).splitlines()[0]}",
            remedy=remedy,
        ) from error


def _is_listening(address: str, port: int, seconds: float) -> bool:
    """Return whether a server at ``address`` and ``port`` accepts a connection within ``seconds``.

    torch itself would wait twice as long, and print pages of messages.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False
