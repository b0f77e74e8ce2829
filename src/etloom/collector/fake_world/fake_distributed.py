"""Replaces torch.distributed in a single process: groups report their full size, collectives transfer no data."""

from __future__ import annotations

import functools
import pickle
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

from . import fake_reducer


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


# Objects that one rank sends to another, such as the shapes of activations between the stages of a pipeline.
#
# Ranks run one after another: what an earlier one has sent is in a file of a folder that the launcher has created for
# this recording, with a random name, so that no other object is ever unpickled. A later one, or one that is not
# recorded, cannot be asked: then an object like the last one that this rank has sent itself is received.

_NOTHING = object()


class ObjectExchange:
    """Replaces send_object_list and recv_object_list."""

    def __init__(self, torch: Any, folder: Path, rank: int) -> None:
        self._torch, self._folder, self._rank = torch, folder, rank
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._last: Any = _NOTHING

    def send(
        self,
        objects: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        """Keep objects for a rank that runs later."""
        target = self._global_rank(dst, group, group_dst)
        for each in objects:
            self._path(self._rank, target).write_bytes(pickle.dumps(each))
            self._last = each

    def receive(
        self,
        objects: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> int:
        """Fill in what a rank that has run before has sent, else what this rank has sent last."""
        source = self._global_rank(src, group, group_src)
        for index in range(len(objects)):
            path = self._path(source, self._rank)
            if path.exists():
                objects[index] = pickle.loads(path.read_bytes())  # noqa: S301
            elif self._last is not _NOTHING:
                objects[index] = self._last
            else:
                raise RuntimeError(
                    f"rank {self._rank} needs an object of rank {source}, such as the shapes of a pipeline's "
                    f"activations: record the ranks before it too (--ranks 0-{self._rank}), or give each "
                    "PipelineStage input_args and output_args"
                )
        return source

    def derive_gradients_of_pipelines(self) -> None:
        """Let a stage of a pipeline take the shapes of gradients from its outputs: the next stage has not run.

        Whether all stages know their shapes is a vote by messages; here it is that of this rank.
        """
        try:
            from torch.distributed.pipelining import stage
            from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta
        except ImportError:  # before torch 2.12 there is nothing to derive
            return
        kind: Any = stage.PipelineStage
        receive, vote, hear = kind._recv_meta, kind._warmup_forward_vote, kind._warmup_backward_result

        def receive_or_derive(self: Any, source_stage: int) -> Any:
            if source_stage > self.stage_index:
                return _StageBackwardMeta(backward_metas=_derive_grad_metas(self._stage_meta.outputs))
            return receive(self, source_stage)

        def decide_vote(self: Any, *arguments: Any, **options: Any) -> Any:
            self._etloom_vote = vote(self, *arguments, **options)
            return self._etloom_vote

        def combine_votes(self: Any, *arguments: Any, **options: Any) -> Any:
            return hear(self, *arguments, **options) * self._etloom_vote

        kind._recv_meta = receive_or_derive
        kind._warmup_forward_vote = decide_vote
        kind._warmup_backward_result = combine_votes

    def _path(self, source: int, target: int) -> Path:
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        return self._folder / f"{source}_{target}_{number}.pickle"

    def _global_rank(self, rank: int | None, group: Any, group_rank: int | None) -> int:
        if rank is not None or group_rank is None:
            return rank or 0
        distributed = self._torch.distributed
        return int(distributed.get_global_rank(group or distributed.group.WORLD, group_rank))
