"""Records the operators that reach the device, and the memory of their results, while a script runs on fake tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import data_defaults, failures
from .request_history import MemoryKinds, RequestHistory

_OMITTED = ("aten::detach", "aten::lift_fresh", "aten::alias")
"""Operators without work, which autograd calls all the time."""
_OMITTED_NAMESPACES = ("profiler::", "prim::")
_COMMUNICATION = ("c10d::", "_c10d_functional::")


@dataclass
class OperatorRecord:
    """A recorded operator call: name, schema, arguments, results and, for communication, process group and sizes."""

    name: str
    schema: str
    inputs: list[Any]
    outputs: list[Any]
    communication: dict[str, Any] | None = None


@dataclass
class MemoryUse:
    """Tracks the bytes of live tensor storages on the fake device: current (`live_bytes`) and peak (`peak_bytes`)."""

    live_bytes: int = 0
    peak_bytes: int = 0
    storages: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Live storage -> its bytes and its device."""
    history: RequestHistory = field(default_factory=RequestHistory)

    def add(self, tensor: Any, operator: str) -> None:
        """Add the storage of a tensor to the live bytes until it is freed; a storage is counted only once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return
        size, device = int(storage.nbytes()), tensor.device.index or 0
        self._count(key, size, device)
        self.history.request(key, size, device, operator)
        weakref.finalize(storage, self._release, key).atexit = False

    def follow_resizes(self, torch: Any) -> None:
        """Let storages report their resizes, with which FSDP frees parameters and gathers them again."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            key = storage._cdata
            if key in self.storages:
                device = self.storages[key][1]
                self._count(key, int(size), device)
                self.history.resize(key, int(size), device)
            return result

        torch.UntypedStorage.resize_ = resize_

    def _count(self, key: int, size: int, device: int) -> None:
        self.live_bytes += size - self.storages.get(key, (0, 0))[0]
        self.storages[key] = size, device
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self.storages.pop(key, (0, 0))[0]
        self.history.release(key)


class DispatchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operator calls while ``recording`` is true, and tracks the device memory.

    While ``paused`` is true it does neither.
    """

    supports_higher_order_operators = True
    """An operator of functions, such as flex attention, is one operator."""

    def __init__(self, torch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._torch = torch
        self.recording = False
        self.paused = False
        self.operators: list[OperatorRecord] = []
        self.memory = MemoryUse()
        self.memory.follow_resizes(torch)
        self.kinds = MemoryKinds(self.memory.history)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # a DTensor calls the operators of its shard, which are recorded then
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None and func.name() == "run_dtensor_rng_op":  # a random operator after two numbers
            with self:
                return args[2](*args[3:], **kwargs)
        name = f"higher_order::{func.name()}" if schema is None else schema.name
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            failures.note_operator(error, name)
            raise
        if self.paused or name == "prim::device":  # asked for with each operator
            return result
        outputs = tree_leaves(result)
        if schema is not None:
            data_defaults.follow(func, args, kwargs, outputs)
        for output in outputs:
            if self._is_on_device(output):
                self.memory.add(output, name)
                self.kinds.add_workspace(name, output.device.index or 0)
        if name.startswith(_COMMUNICATION):
            for value in (*tree_leaves((args, kwargs)), *outputs):
                if self._is_on_device(value):
                    key = value.untyped_storage()._cdata
                    self.memory.history.mark(key, "communication", is_certain=False)
        if self.recording and name not in _OMITTED and not name.startswith(_OMITTED_NAMESPACES):
            self._keep(func, name, args, kwargs, outputs)
        return result

    def ignore_inferred_shapes(self) -> None:
        """Record nothing while DTensor runs an operator on whole tensors, only to know the shape of its result."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        name = "_propagate_tensor_meta_non_cached"
        infer = getattr(ShardingPropagator, name, None)
        if infer is None:  # before torch 2.5
            return

        def infer_unrecorded(*arguments: Any, **options: Any) -> Any:
            self.paused, before = True, self.paused
            try:
                return infer(*arguments, **options)
            finally:
                self.paused = before

        setattr(ShardingPropagator, name, infer_unrecorded)

    def _keep(self, func: Any, name: str, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        values = [*args, *kwargs.values()]
        communication = None
        if name.startswith(_COMMUNICATION) and not name.endswith("::wait_tensor"):
            communication = self._describe_communication(name, values, outputs)
        inputs = [self._describe(value) for value in values]
        described = [self._describe(value) for value in outputs]
        self.operators.append(
            OperatorRecord(name, str(getattr(func, "_schema", "")), inputs, described, communication)
        )

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor) and value.device.type == "cuda"

    def _describe(self, value: Any) -> Any:
        """Convert a value to plain data that does not keep tensors alive: a tensor becomes a TensorRecord."""
        torch = self._torch
        if isinstance(value, torch.Tensor):
            return TensorRecord(
                id(value),
                value.untyped_storage()._cdata,
                int(value.storage_offset()),
                tuple(int(size) for size in value.shape),
                tuple(int(stride) for stride in value.stride()) if value.layout is torch.strided else (),
                str(value.dtype).removeprefix("torch."),
                int(value.element_size()),
                str(value.device),
            )
        if isinstance(value, (list, tuple)):
            return [self._describe(item) for item in value]
        return value if isinstance(value, (bool, int, float, str)) else None if value is None else str(value)

    def _describe_communication(self, name: str, values: list[Any], outputs: list[Any]) -> dict[str, Any]:
        """Return the process group, peer or root rank, dtype and numbers of elements of a communication call."""
        torch = self._torch
        dist = torch.distributed
        group_name, peer = "", -1
        tensors: list[list[Any]] = []
        for value in values:
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if leaves:
                tensors.append(leaves)
            elif isinstance(value, torch.ScriptObject) and not group_name:
                try:
                    group_name = dist.ProcessGroup.unbox(value).group_name
                except (RuntimeError, TypeError):
                    continue
            elif isinstance(value, str) and name.startswith("_c10d_functional"):
                group_name = value
            elif isinstance(value, int) and not isinstance(value, bool) and peer < 0:
                peer = value
        sizes = [sum(leaf.numel() for leaf in leaves) for leaves in tensors] or [0]
        # c10d states the result first, then the input; one list is both. Functional collectives return the result.
        into, out = sizes[-1], sizes[0]
        if name.startswith("_c10d_functional"):
            into, out = sizes[0], sum(leaf.numel() for leaf in outputs if isinstance(leaf, torch.Tensor))
        dtype = str(tensors[0][0].dtype).removeprefix("torch.") if tensors else ""
        return {"group_name": group_name, "peer": peer, "in_nelems": into, "out_nelems": out, "dtype": dtype}


def _is_wrapper(kind: type) -> bool:
    """Return whether a class of tensors is DTensor, which has no storage itself."""
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


@dataclass(frozen=True)
class TensorRecord:
    """Metadata of a tensor argument or result: ids, storage offset, shape, strides, dtype, element size, device."""

    tensor_id: int
    storage_id: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str
