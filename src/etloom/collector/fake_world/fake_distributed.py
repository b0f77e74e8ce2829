"""Replaces torch.distributed in a single process: groups report their full size, collectives transfer no data."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

from . import fake_reducer
from .fake_objects import ObjectExchange


class _Finished:
    """The handle of an asynchronous communication; that of the backend "fake" has no result for a hook."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait

    def get_future(self) -> Any:
        import torch

        future: Any = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def _gather_objects(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
    objects[:] = [value] * len(objects)


def _gather_object(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        objects[:] = [value] * len(objects)


def _scatter_objects(output: list[Any], values: list[Any] | None = None, *_: Any, **__: Any) -> None:
    output[0] = values[0] if values else None


def install(torch: Any, rank: int, world_size: int, folder: Path) -> None:
    """Make init_process_group use the backend "fake", and make object collectives return the objects of this rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    initialize = dist.distributed_c10d.init_process_group

    def init_process_group(*_: Any, **options: Any) -> None:
        device_id = options.get("device_id")
        initialize(
            backend="fake",
            store=FakeStore(),
            rank=rank,
            world_size=world_size,
            timeout=options.get("timeout"),
        )
        if device_id is not None:
            torch.cuda.set_device(device_id)

    reduce = dist.distributed_c10d.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, **options: Any) -> _Finished | None:
        return None if reduce(tensor, *arguments, **options) is None else _Finished(tensor)

    nothing = lambda *_, **__: None  # noqa: E731
    new_group = dist.distributed_c10d.new_group

    def create_group(*arguments: Any, **options: Any) -> Any:
        options.pop("backend", None)  # a script may ask for gloo or nccl
        ranks = arguments[0] if arguments else options.pop("ranks", None)
        return new_group(ranks, **{key: options[key] for key in ("group_desc",) if key in options})

    exchange = ObjectExchange(torch, folder, rank)
    exchange.derive_gradients_of_pipelines()
    replacements = {
        "send_object_list": exchange.send,
        "recv_object_list": exchange.receive,
        "init_process_group": init_process_group,
        "new_group": create_group,
        "all_reduce": all_reduce,
        "all_gather_object": _gather_objects,
        "gather_object": _gather_object,
        "scatter_object_list": _scatter_objects,
        **dict.fromkeys(("broadcast_object_list", "barrier", "monitored_barrier"), nothing),
    }
    for name, replacement in replacements.items():
        setattr(dist, name, replacement)
        setattr(dist.distributed_c10d, name, replacement)
    _keep_data_of_meshes(dist)
    fake_reducer.install(torch)


def _keep_data_of_meshes(dist: Any) -> None:
    """Let device meshes compute with data: which ranks they contain is in tensors, which are not fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def keep_data(function: Any) -> Any:
        @functools.wraps(function)
        def compute(*arguments: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*arguments, **options)

        return compute

    module, mesh_class = dist.device_mesh, dist.device_mesh.DeviceMesh
    original = module.init_device_mesh
    for user in list(sys.modules.values()):
        if getattr(user, "init_device_mesh", None) is original:
            vars(user)["init_device_mesh"] = keep_data(original)
    for name, member in list(vars(mesh_class).items()):
        if isinstance(member, FunctionType):
            setattr(mesh_class, name, keep_data(member))
        elif isinstance(member, staticmethod):
            setattr(mesh_class, name, staticmethod(keep_data(member.__func__)))
        elif isinstance(member, property) and isinstance(member.fget, FunctionType):
            setattr(mesh_class, name, property(keep_data(member.fget), member.fset))
