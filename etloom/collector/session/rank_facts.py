"""What a process of the job knows of itself, its model and its communication, for rank_<r>.json and the card."""

from __future__ import annotations

import gc
import os
import platform
import re
import socket
import sys
from typing import Any

from ..job_identity import describe_job
from ..options import Options
from ..rank_environment import read_int_variable

# The part that a mesh's dimension plays, by the names in use (torchtitan, Megatron, accelerate, FSDP's tutorials).
PARALLELISM_NAMES = {
    "dp_replicate": ("dp", "ddp", "data", "replicate", "dp_replicate", "data_parallel"),
    "dp_shard": ("fsdp", "shard", "dp_shard", "dp_shard_cp", "sharded"),
    "tp": ("tp", "tensor", "tensor_parallel", "model", "mp"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "cp": ("cp", "context", "context_parallel", "sp", "sequence"),
    "ep": ("ep", "expert", "expert_parallel"),
}
_COMMUNICATION_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_ROLES = {
    "DataLoader": "torch.utils.data.dataloader",
    "DeviceMesh": "torch.distributed.device_mesh",
    "_PipelineStageBase": "torch.distributed.pipelining.stage",
    "Module": "torch.nn.modules.module",
    "DistributedDataParallel": "torch.nn.parallel.distributed",
}
_EXPERTS = re.compile(r"\bexperts?\b|Experts?\b|MoE|MOE|Moe[A-Z]|\bmoe\b|MixtureOfExperts")
_MAX_SUBSETS = 16  # of subsets that are looked through: one may hold itself
_PARALLELISM_OF = {name: part for part, names in PARALLELISM_NAMES.items() for name in names}


def is_cuda_in_use() -> bool:
    """The job has work on a CUDA device; asking must not make it have a context there."""
    from torch import cuda

    return bool(cuda.is_available() and cuda.is_initialized())  # type: ignore[no-untyped-call]


def rank_facts(options: Options, rank: int, world_size: int) -> dict[str, Any]:
    """What one process knows of itself. Times are ns since the Unix epoch; what is unknown is null."""
    import torch

    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    cuda = is_cuda_in_use()
    return {
        "rank": rank,
        "local_rank": read_int_variable("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "local_world_size": read_int_variable("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "world_size": world_size,
        "backend": distributed.get_backend() if together else None,
        "groups": process_groups(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_COMMUNICATION_PREFIXES)
        },
        "restart": read_int_variable("TORCHELASTIC_RESTART_COUNT") or 0,
        "job": describe_job(options),
        "ended": None,  # the launcher knows, later: see ends.py
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"cuda:{torch.cuda.current_device()}" if cuda else "cpu",
        "device_name": torch.cuda.get_device_name() if cuda else None,
        "steps_asked": options.steps,
        "sources": [name for name in ("kineto", "et", "flight_recorder", "nsys") if getattr(options, name)],
        "shapes": options.shapes,
        "stack": options.stack,
        "memory": options.memory,
        "versions": {
            "etloom": options.etloom,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": _nccl_version() if cuda else None,
            "driver": _driver_version(),
            "platform": platform.platform(),
        },
    }


def process_groups() -> list[dict[str, Any]]:
    """The process groups of this process: pg_name, pg_desc, backend_config, ranks (all of them), group_size."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        {**group, "ranks": group["ranks"] or list(range(group["group_size"]))}
        for group in dist.distributed_c10d._world.pg_config_info
    ]


def model_facts() -> dict[str, Any]:
    """Of the living objects of the process: its model, the size of its batches, how it is cut across ranks.

    The model is the largest module that no other holds, with the parameters of this rank, of sharded ones in full.
    A fact that several objects contradict, or none tells, is left out.
    """
    modules: list[Any] = []
    loaders, datasets, parts, meshes = [], set(), {}, []
    roles = _role_classes()
    for thing in [thing for thing in gc.get_objects() if type(thing) in roles]:
        role = roles[type(thing)]
        if role == "DataLoader":
            loaders += (
                [size] if isinstance(size := _instance_attribute(thing, "batch_size"), int) and size else []
            )
            datasets.add(_dataset_name(thing))
        elif role == "DeviceMesh":
            meshes.append(thing)
        elif role == "_PipelineStageBase":
            parts["pp"] = int(thing.group_size)
        elif "_modules" in thing.__dict__:
            modules.append(thing)
            if role == "DistributedDataParallel" and hasattr(thing, "process_group"):
                parts["dp_replicate"] = int(thing.process_group.size())
    found = _largest_model(modules)
    named = {}
    for mesh in meshes:
        for place, name in enumerate(mesh.mesh_dim_names or ()):
            if name in _PARALLELISM_OF:
                named[_PARALLELISM_OF[name]] = int(mesh.shape[place])
    parts |= named or _parallelism_from_placements(modules)
    if parts:
        found["parallel"] = parts
    if len(set(loaders)) == 1:
        found["batch_of_rank"] = loaders[0]
    if len(datasets) == 1 and (dataset := datasets.pop()) is not None:
        found["dataset"] = dataset
    return found


def _dataset_name(loader: Any) -> str | None:
    """What a loader reads: the name that Hugging Face's datasets give themselves, else that of a class of the job's."""
    from torch.utils.data import Subset

    dataset = _instance_attribute(loader, "dataset")
    for _ in range(_MAX_SUBSETS):
        if not issubclass(type(dataset), Subset):
            break
        dataset = _instance_attribute(dataset, "dataset")
    name = _instance_attribute(
        _instance_attribute(dataset, "_info"), "dataset_name"
    )  # what their property `info` gives
    if isinstance(name, str) and name:
        return name
    own = type(dataset).__module__.partition(".")[0] not in ("torch", "builtins", "datasets")
    return type(dataset).__name__ if own else None


def _instance_attribute(thing: Any, name: str) -> Any:
    """An attribute that the object itself holds, else null: a property of the job's may raise or change things."""
    return getattr(thing, "__dict__", {}).get(name)


def _role_classes() -> dict[type, str]:
    """The classes that are asked, with what they are: found by descent, for a process has a million objects."""
    found: dict[type, str] = {}
    for role, home in _ROLES.items():
        base = getattr(sys.modules.get(home), role, None)
        waiting = [] if base is None else [base]
        while waiting:
            kind = waiting.pop()
            found[kind] = role
            waiting += type.__subclasses__(kind)
    return found


def _largest_model(modules: list[Any]) -> dict[str, Any]:
    held = {id(child) for module in modules for child in module._modules.values() if child is not None}
    largest: dict[str, Any] = {}
    for module in modules:
        if id(module) in held:
            continue
        parameters = list({id(p): p for p in module.parameters()}.values())
        count = sum(_parameter_size(p) for p in parameters)
        if count <= largest.get("parameters", 0):
            continue
        inside = [part for part in module.modules() if type(part).__name__ == "Embedding"]
        largest = {
            "parameters": count,
            "embedding_parameters": sum(_parameter_size(p) for part in inside for p in part.parameters()),
            "class": _unwrapped_class(module),
            "dtype": _single_value(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            "layers": _count_layers(module),
            "heads": _single_value(
                sorted({m.num_heads for m in module.modules() if "num_heads" in m.__dict__})
            ),
            "head_dim": _single_value(
                sorted({m.head_dim for m in module.modules() if "head_dim" in m.__dict__})
            ),
            "training": module.training,
            "moe": _has_experts(module),
        }
    return largest


def _count_layers(module: Any) -> int | None:
    """The length of the longest ModuleList: a transformer's blocks."""
    lists = [
        len(part)
        for name, part in module.named_modules()
        if type(part).__name__ == "ModuleList" and not _EXPERTS.search(name.rpartition(".")[2])
    ]
    return max(lists, default=None)


def _has_experts(module: Any) -> bool | None:
    """True where a part is called so; that none is proves nothing."""
    parts = ((name.rpartition(".")[2], type(part).__name__) for name, part in module.named_modules())
    return True if any(_EXPERTS.search(f"{name} {kind}") for name, kind in parts) else None


def _unwrapped_class(module: Any) -> str:
    while type(module).__name__ in ("DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel"):
        (module,) = list(module._modules.values())[:1]
    return type(module).__name__.removeprefix("FSDP")


def _parallelism_from_placements(modules: list[Any]) -> dict[str, int]:
    """Of meshes without names: what FSDP2 or tensor parallelism cut parameters by."""
    sharded = any("FSDPModule" in {kind.__name__ for kind in type(m).__mro__} for m in modules)
    for module in modules:
        for parameter in module._parameters.values():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.ndim == 1 and not sharded:
                return {"tp": int(mesh.size())}
            if mesh is not None and mesh.ndim == 1:
                return {"dp_shard": int(mesh.size())}
    return {}


def _parameter_size(parameter: Any) -> int:
    try:
        return int(parameter.numel())
    except (RuntimeError, ValueError):  # a lazy module's, before its first call
        return 0


def _single_value(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else None


def _nccl_version() -> str | None:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None


def _driver_version() -> str | None:
    """Of NVIDIA's driver, where there is one."""
    try:
        with open("/sys/module/nvidia/version") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return None
