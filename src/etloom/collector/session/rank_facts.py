"""Facts about a process of the job, for rank_<r>.json and the workload card: rank, device, groups, versions."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

from ..job_identity import describe_job
from ..options import RecordingOptions
from ..rank_environment import current_rank, is_distributed, read_int_variable

_COMMUNICATION_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_DRIVER_VERSION_FILE = "/sys/module/nvidia/version"


def is_cuda_in_use() -> bool:
    """Return whether this process has initialized CUDA; does not create a CUDA context."""
    from torch import cuda

    return bool(cuda.is_available() and cuda.is_initialized())  # type: ignore[no-untyped-call]


def collect_rank_facts(options: RecordingOptions, rank: int, world_size: int) -> dict[str, Any]:
    """Return the facts for the record of this rank: host, device, groups, versions, options; None for unknown facts."""
    import torch

    distributed = torch.distributed
    is_distributed = distributed.is_available() and distributed.is_initialized()
    uses_cuda = is_cuda_in_use()
    return {
        "rank": rank,
        "local_rank": read_int_variable("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "local_world_size": read_int_variable("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "world_size": world_size,
        "backend": distributed.get_backend() if is_distributed else None,
        "groups": process_groups(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_COMMUNICATION_PREFIXES)
        },
        "restart": read_int_variable("TORCHELASTIC_RESTART_COUNT") or 0,
        "job": describe_job(options),
        "ended": None,  # the launcher adds it later (process_endings.py)
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"cuda:{torch.cuda.current_device()}" if uses_cuda else "cpu",
        "device_name": torch.cuda.get_device_name() if uses_cuda else None,
        "steps_asked": options.step_range,
        "sources": [name for name in ("kineto", "et", "flight_recorder", "nsys") if getattr(options, name)],
        "shapes": options.shapes,
        "stack": options.stack,
        "memory": options.memory,
        "versions": {
            "etloom": options.etloom_version,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": _nccl_version() if uses_cuda else None,
            "driver": _driver_version(),
            "platform": _platform(),
        },
    }


def process_groups() -> list[dict[str, Any]]:
    """Return the process groups of this process: pg_name, pg_desc, backend_config, ranks (all of them), group_size."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        {**group, "ranks": group["ranks"] or list(range(group["group_size"]))}
        for group in dist.distributed_c10d._world.pg_config_info
    ]


def _nccl_version() -> str | None:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None


def _platform() -> str:
    """Return the text of platform.platform(), but without starting a process, which could disturb the job."""
    system = os.uname()
    return "-".join([system.sysname, system.release, system.machine, "with", "".join(platform.libc_ver())])


def _driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none."""
    try:
        with open(_DRIVER_VERSION_FILE) as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return None


# Chooses the folder of a Ray actor's traces: the ranks of one actor class are not those of another.
#
# Learners may be the ranks of a process group while each rollout worker is a process of its own. So the actors of a
# class that have joined a process group share `actor_<class>`, and each other actor has `actor_<class>_<number>`.


def choose_actor_folder(out: Path) -> Path:
    """Return the folder for the traces of this process: `out`, or for a Ray actor one in it, which is created.

    Raises OSError.
    """
    name = _find_actor_class()
    if name is None:
        return out
    folder = out / f"actor_{re.sub(r'[^A-Za-z0-9]+', '-', name)}"
    if is_distributed() and current_rank()[1] > 1:
        folder.mkdir(exist_ok=True)
        return folder
    number = 0
    while True:
        numbered = folder.with_name(f"{folder.name}_{number}")
        try:
            numbered.mkdir()
        except FileExistsError:
            number += 1
        else:
            return numbered


def _find_actor_class() -> str | None:
    """Return the class of the Ray actor that runs in this process, None if there is none."""
    ray = sys.modules.get("ray")
    try:
        # The name of the running task is that of a method, and unknown on other threads.
        actors = ray._private.worker.global_worker.actors if ray is not None else {}
        return next((type(actor).__name__ for actor in actors.values()), None)
    except AttributeError:  # of another version of Ray
        return None
