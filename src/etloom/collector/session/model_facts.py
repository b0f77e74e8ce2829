"""Collects facts about the job's model, data set and parallelism from the live Python objects of the process."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection
from itertools import chain, starmap
from typing import Any

from ..workload_card import PARALLELISM_NAMES

_PARALLELISM_BY_NAME = {name: kind for kind, names in PARALLELISM_NAMES.items() for name in names}
_INSPECTED_CLASSES = {
    "DataLoader": "torch.utils.data.dataloader",
    "DeviceMesh": "torch.distributed.device_mesh",
    "_PipelineStageBase": "torch.distributed.pipelining.stage",
    "Module": "torch.nn.modules.module",
    "DistributedDataParallel": "torch.nn.parallel.distributed",
}
_EXPERTS = re.compile(r"\bexperts?\b|Experts?\b|MoE|MOE|Moe[A-Z]|\bmoe\b|MixtureOfExperts")
_MAX_SUBSETS = 16  # a Subset may contain itself


def collect_model_facts() -> dict[str, Any]:
    """Return the facts of the process's model, batch size, data set and parallelism.

    The model is the largest module that no other module contains, with the parameters of this rank; sharded
    parameters count in full. A fact that is unknown, or on which objects disagree, is left out.
    """
    modules: list[Any] = []
    batch_sizes: set[int] = set()
    datasets: set[str | None] = set()
    meshes: list[Any] = []
    parallelism: dict[str, int] = {}
    classes = _inspected_subclasses()
    for instance in list_instances(classes):
        base = classes[type(instance)]
        if base == "DataLoader":
            batch_size = _instance_attribute(instance, "batch_size")
            if isinstance(batch_size, int) and batch_size:
                batch_sizes.add(batch_size)
            datasets.add(_dataset_name(instance))
        elif base == "DeviceMesh":
            meshes.append(instance)
        elif base == "_PipelineStageBase":
            parallelism["pp"] = int(instance.group_size)
        elif "_modules" in instance.__dict__:
            modules.append(instance)
            if base == "DistributedDataParallel" and hasattr(instance, "process_group"):
                parallelism["dp_replicate"] = int(instance.process_group.size())
    facts = _largest_model(modules)
    parallelism |= _parallelism_from_meshes(meshes) or _parallelism_from_placements(modules)
    if parallelism:
        facts["parallel"] = parallelism
    if len(batch_sizes) == 1:
        facts["batch_of_rank"] = batch_sizes.pop()
    if len(datasets) == 1 and (dataset := datasets.pop()) is not None:
        facts["dataset"] = dataset
    return facts


def _parallelism_from_meshes(meshes: list[Any]) -> dict[str, int]:
    """Return the number of ranks by kind of parallelism (tp, pp, ...), from the dimension names of device meshes."""
    sizes = {}
    for mesh in meshes:
        for dimension, name in enumerate(mesh.mesh_dim_names or ()):
            if name in _PARALLELISM_BY_NAME:
                sizes[_PARALLELISM_BY_NAME[name]] = int(mesh.shape[dimension])
    return sizes


def _dataset_name(loader: Any) -> str | None:
    """Return the name of a data loader's data set: the Hugging Face name, else the name of the job's class."""
    from torch.utils.data import Subset

    dataset = _instance_attribute(loader, "dataset")
    for _ in range(_MAX_SUBSETS):
        if not issubclass(type(dataset), Subset):
            break
        dataset = _instance_attribute(dataset, "dataset")
    info = _instance_attribute(dataset, "_info")  # behind their property `info`
    name = _instance_attribute(info, "dataset_name")
    if isinstance(name, str) and name:
        return name
    is_jobs_class = type(dataset).__module__.partition(".")[0] not in ("torch", "builtins", "datasets")
    return type(dataset).__name__ if is_jobs_class else None


def _instance_attribute(instance: Any, name: str) -> Any:
    """Return an attribute in an object's __dict__, else None; properties are not run, as they may have side effects."""
    return getattr(instance, "__dict__", {}).get(name)


def _inspected_subclasses() -> dict[type, str]:
    """Map each torch class in `_INSPECTED_CLASSES`, and each of its subclasses, to the name of the torch class.

    Enumerating subclasses is faster than isinstance: a process has a million objects.
    """
    bases: dict[type, str] = {}
    for name, module in _INSPECTED_CLASSES.items():
        base = getattr(sys.modules.get(module), name, None)
        if base is not None:
            bases |= dict.fromkeys(list_subclasses(base), name)
    return bases


def _largest_model(modules: list[Any]) -> dict[str, Any]:
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    largest: dict[str, Any] = {}
    for module in modules:
        if id(module) in children:
            continue
        parameters = list({id(parameter): parameter for parameter in module.parameters()}.values())
        count = sum(_parameter_size(parameter) for parameter in parameters)
        if count <= largest.get("parameters", 0):
            continue
        embeddings = [part for part in module.modules() if type(part).__name__ == "Embedding"]
        largest = {
            "parameters": count,
            "embedding_parameters": sum(
                _parameter_size(parameter) for part in embeddings for parameter in part.parameters()
            ),
            "class": _unwrapped_class(module),
            "dtype": _single_value({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
            "layers": _count_layers(module),
            "heads": _common_attribute(module, "num_heads"),
            "head_dim": _common_attribute(module, "head_dim"),
            "training": module.training,
            "moe": _has_experts(module),
        }
    return largest


def _common_attribute(module: Any, name: str) -> Any:
    """Return an attribute's value if it is equal in all submodules that have the attribute `name`, else None."""
    return _single_value({part.__dict__[name] for part in module.modules() if name in part.__dict__})


def _count_layers(module: Any) -> int | None:
    """Return the number of layers of a model: the length of its longest ModuleList, without lists of experts."""
    lengths = [
        len(part)
        for name, part in module.named_modules()
        if type(part).__name__ == "ModuleList" and not _EXPERTS.search(name.rpartition(".")[2])
    ]
    return max(lengths, default=None)


def _has_experts(module: Any) -> bool | None:
    """Return True if the name or class of a submodule contains "expert" or "MoE"; None (unknown) otherwise."""
    names = ((name.rpartition(".")[2], type(part).__name__) for name, part in module.named_modules())
    return True if any(_EXPERTS.search(f"{name} {cls}") for name, cls in names) else None


def _unwrapped_class(module: Any) -> str:
    """Return the class name of the model inside DDP, FSDP or torch.compile."""
    while type(module).__name__ in ("DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel"):
        (module,) = list(module._modules.values())[:1]
    return type(module).__name__.removeprefix("FSDP")


def _parallelism_from_placements(modules: list[Any]) -> dict[str, int]:
    """Infer the number of ranks of FSDP2 or tensor parallelism from a parameter on a one-dimensional device mesh."""
    is_fsdp = any("FSDPModule" in {cls.__name__ for cls in type(module).__mro__} for module in modules)
    for module in modules:
        for parameter in module._parameters.values():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.ndim == 1:
                return {"dp_shard" if is_fsdp else "tp": int(mesh.size())}
    return {}


def _parameter_size(parameter: Any) -> int:
    try:
        return int(parameter.numel())
    except (RuntimeError, ValueError):  # of a lazy module, before its first call
        return 0


def _single_value(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else None


# Lists the live instances of classes while threads of the job run.


def list_subclasses(base: type) -> list[type]:
    """Return the class `base` and all classes derived from it; a class with several bases may be repeated."""
    return [base, *chain.from_iterable(map(list_subclasses, type.__subclasses__(base)))]


def list_instances(classes: Collection[type]) -> list[Any]:
    """Return the live objects whose type is one of `classes`, subclasses not included.

    The collector must not refer to a tuple that another thread is building: `tuple(generator)`, and an import that
    runs it, would end there with a SystemError (https://github.com/python/cpython/issues/39117). `gc.get_objects` lists
    those tuples too, so its list is created, read and freed inside one call, by functions in C, between which the
    interpreter does not switch threads. `id` is not among them: it calls the audit hooks of the job. `gc.get_referrers`
    returns only what refers to the classes, as every instance does to its class; it compares each reference with all of
    them, so those without instances are left out.
    """
    types = list(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    live_types = set(map(id, types))
    live_classes = [cls for cls in classes if id(cls) in live_types]
    identifiers = set(map(id, live_classes))  # hashing a class may run code of its metaclass
    return [instance for instance in gc.get_referrers(*live_classes) if id(type(instance)) in identifiers]
