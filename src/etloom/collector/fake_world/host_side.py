"""Replaces what a script does on the host and what fake tensors or a torch without CUDA refuse."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .fake_reducer import Ignored


def install(torch: Any) -> None:
    """Replace workers of data loaders, pinned memory, NVTX, generators, swaps and addresses of tensors, ..."""
    _load_in_this_process(torch)
    _allow_foreach()
    _number_addresses(torch)
    _follow_devices(torch)
    _copy_with_data(torch)
    torch.Generator = _make_generator(torch)
    torch.utils.swap_tensors = _swap_tensors
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # it is a copy on the host, which needs CUDA
    torch.cuda.nvtx._nvtx = Ignored()  # ranges are not recorded
    torch.cuda.profiler.start = torch.cuda.profiler.stop = lambda: None


def _allow_foreach() -> None:
    """Let optimizers and gradient clipping use operators of many tensors by default, as they do on a device."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        kinds = getattr(module, "_foreach_supported_types", None)
        if kinds is not None and FakeTensor not in kinds:
            kinds.append(FakeTensor)


def _number_addresses(torch: Any) -> None:
    """Give each storage without data an address, by which FSDP and others ask whether two tensors share memory."""
    from torch._subclasses import fake_tensor

    fake: Any = fake_tensor.FakeTensor
    find = torch.UntypedStorage.data_ptr
    torch.UntypedStorage.data_ptr = lambda storage: (
        storage._cdata if storage.device.type == "meta" and storage.nbytes() else find(storage)
    )
    fake.data_ptr = lambda _: 0  # by which deepcopy knows to clone it; torch's own also warns


def _follow_devices(torch: Any) -> None:
    """Let `parameter.data = other` also take the device of a fake tensor, which is not part of its data."""
    from torch._subclasses import fake_tensor

    fake: Any = fake_tensor.FakeTensor
    data = torch._C.TensorBase.data

    def set_data(tensor: Any, value: Any) -> None:
        data.__set__(tensor, value)
        if isinstance(value, fake):
            tensor.fake_device = value.fake_device

    fake.data = property(data.__get__, set_data)


def _copy_with_data(torch: Any) -> None:
    """Let deepcopy give a tensor that has data a copy that has data too."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    copy = torch.Tensor.__deepcopy__

    def copy_tensor(tensor: Any, memo: dict[int, Any]) -> Any:
        if isinstance(tensor, FakeTensor):
            return copy(tensor, memo)
        with unset_fake_temporarily():
            return copy(tensor, memo)

    torch.Tensor.__deepcopy__ = copy_tensor


def _make_generator(torch: Any) -> Any:
    """Return a class of random generators that exist on the device too, and whose states need no data."""

    class Generator(torch.Generator):  # type: ignore[misc, name-defined]
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls)

        def set_state(self, _state: Any) -> Any:
            return self

    return Generator


def _load_in_this_process(torch: Any) -> None:
    """Let data loaders have no workers: fake tensors cannot pass from one process to another."""
    loader = torch.utils.data.DataLoader
    initialize = loader.__init__
    signature = inspect.signature(initialize)
    replaced = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
    replaced |= {"multiprocessing_context": None, "timeout": 0}

    @functools.wraps(initialize)
    def initialize_here(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        bound.arguments.update(replaced)
        initialize(*bound.args, **bound.kwargs)

    loader.__init__ = initialize_here


def _swap_tensors(first: Any, second: Any) -> None:
    """Swap two tensors like torch.utils.swap_tensors, which refuses fake tensors because they have weak references."""
    import copyreg

    import torch

    slots = copyreg._slotnames(type(first))  # type: ignore[attr-defined]
    names = [name for name in slots if hasattr(first, name) and hasattr(second, name)]
    for name in ("__class__", "__dict__", *names):  # a DTensor has its shard in a slot
        value = getattr(first, name)
        setattr(first, name, getattr(second, name))
        setattr(second, name, value)
    torch._C._swap_tensor_impl(first, second)
