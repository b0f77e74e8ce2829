"""Replaces the reducer of DistributedDataParallel, which in C++ needs the data of tensors, by one of operators.

The order is that of torch's: the first step reduces the parameters in the buckets that DistributedDataParallel has
assigned, later ones in buckets by the order in which the gradients of the first were ready. A bucket is reduced when
all its gradients are ready and all buckets before it are reduced, so communication overlaps with the backward pass as
on devices. A static graph is reduced after the first step's backward pass, so the order is that of the second step.
Buckets stay as they are where unused parameters are searched for. See torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from typing import Any

_MIB = 1 << 20


def install(torch: Any) -> None:
    """Let DistributedDataParallel use `Reducer`."""
    dist = torch.distributed
    ddp = torch.nn.parallel.distributed
    dist.Reducer, dist.Logger = Reducer, _Logger
    dist._register_comm_hook = lambda reducer, state, hook: reducer.use_hook(state, hook)
    dist._register_builtin_comm_hook = lambda *_: None
    dist._broadcast_coalesced = _broadcast_coalesced
    ddp._verify_param_shape_across_processes = lambda *_: None


class Ignored:
    """An object whose methods do nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Logger(Ignored):
    """Has the tables of facts that are read from a logger, empty."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]

    def __init__(self, *_: Any) -> None:
        self.strs_map, self.ints_map = {}, {}

    def _get_ddp_logging_data(self) -> _Logger:
        return self


class _Bucket:
    """Parameters whose gradients are reduced at once; also what a communication hook of the job gets."""

    def __init__(self, number: int, parameters: list[Any], is_last: bool) -> None:
        import torch

        self._number, self._parameters, self._is_last = number, parameters, is_last
        self._buffer = torch.empty(
            sum(each.numel() for each in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._views: list[Any] = []
        self.waiting = len(parameters)

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Any:
        return self._buffer

    def set_buffer(self, buffer: Any) -> None:
        self._buffer = buffer
        self._views = []

    def parameters(self) -> list[Any]:
        return self._parameters

    def gradients(self) -> list[Any]:
        start = sum(view.numel() for view in self._views)
        for parameter in self._parameters[len(self._views) :]:
            self._views.append(self._buffer.narrow(0, start, parameter.numel()).view(parameter.shape))
            start += parameter.numel()
        return self._views


class Reducer(Ignored):
    """Reduces the gradients of parameters in buckets; takes the arguments of torch's own reducer."""

    def __init__(self, parameters: list[Any], bucket_indices: list[list[int]], *arguments: Any) -> None:
        names = ("limits", "group", "sparse", "bytes", "find_unused", "is_view", "names", "first_bytes")
        options = dict(zip(names, arguments, strict=False))
        self._parameters = parameters
        self._group = options["group"]
        self._keeps_gradients_in_buckets = bool(options.get("is_view"))
        self._limits = [options.get("first_bytes") or _MIB, options["bytes"]]
        self._hook: Any = None
        self._finds_unused = bool(options.get("find_unused"))
        self._is_static = self._is_first_of_static = False
        self._order: list[int] | None = None if self._finds_unused else []
        self._unused: set[int] = set()
        self._is_expecting = self._is_queued = False
        self._assign(bucket_indices)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._mark_ready(index))

    def use_hook(self, state: Any, hook: Any) -> None:
        """Reduce with a communication hook of the job."""
        self._hook = lambda bucket: hook(state, bucket)

    def _set_static_graph(self) -> None:
        """Reduce all gradients at the end of the first step."""
        self._is_static = self._is_first_of_static = True
        self._finds_unused, self._order = False, []
        self._unused = set(self._place)

    def prepare_for_backward(self, outputs: list[Any]) -> None:
        """Expect the gradients of a backward pass; without this call they are accumulated only (`no_sync`)."""
        self._is_expecting, self._is_queued = True, False
        self._ready: set[int] = set()
        self._reduced: list[Any] = []
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters())
        if self._is_static and not self._is_first_of_static:
            for index in sorted(self._unused):
                self._add(index)
        if self._finds_unused:
            used = _find_used(outputs)
            for index, parameter in enumerate(self._parameters):
                if id(parameter) not in used:
                    self._add(index)

    def _rebuild_buckets(self) -> bool:
        """Assign buckets in the order in which the gradients of the first step were ready; return whether it was."""
        if not self._order:
            return False
        import torch

        order, self._order = self._order, None
        tensors = [self._parameters[index] for index in order]
        distributed: Any = torch.distributed
        indices, _ = distributed._compute_bucket_assignment_by_size(tensors, self._limits, [], order)
        self._assign(indices)
        with torch.no_grad():  # rank 0 tells the others its buckets
            for count in (len(order) + 1, len(indices)):
                numbers = torch.empty(count, dtype=torch.int32, device=self._parameters[0].device)
                distributed.broadcast(numbers, distributed.get_global_rank(self._group, 0), group=self._group)
        return True

    def _assign(self, bucket_indices: list[list[int]]) -> None:
        self._buckets: list[_Bucket] = []  # not before the new ones are needed: both would count as memory
        self._place = {}
        for number, indices in enumerate(bucket_indices):
            parameters = [self._parameters[index] for index in indices]
            self._buckets.append(_Bucket(number, parameters, number == len(bucket_indices) - 1))
            self._place.update({index: (number, place) for place, index in enumerate(indices)})

    def _mark_ready(self, index: int) -> None:
        import torch

        if not self._is_expecting or index in self._ready or index not in self._place:
            return
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._is_first_of_static:
            self._unused.discard(index)
            return
        if self._order is not None:
            self._order.append(index)
        self._add(index)

    def _add(self, index: int) -> None:
        """Put a gradient (zeros for a parameter without one) into its bucket, and reduce the buckets that are ready."""
        import torch

        self._ready.add(index)
        number, place = self._place[index]
        bucket, parameter = self._buckets[number], self._parameters[index]
        with torch.no_grad():
            view = bucket.gradients()[place]
            if parameter.grad is None:
                view.zero_()
            elif self._hook is not None:
                view.copy_(parameter.grad)
            else:
                torch.mul(parameter.grad, 1 / self._group.size(), out=view)
            bucket.waiting -= 1
            while len(self._reduced) < len(self._buckets) and not self._buckets[len(self._reduced)].waiting:
                self._reduced.append(self._reduce(self._buckets[len(self._reduced)]))
                if self._finds_unused and len(self._reduced) == len(self._buckets):
                    self._reduce_use()

    def _reduce(self, bucket: _Bucket) -> Any:
        import torch

        if self._hook is not None:
            return self._hook(bucket)
        return torch.distributed.all_reduce(bucket.buffer(), group=self._group, async_op=True)

    def _reduce_use(self) -> None:
        """Reduce which parameters the ranks have used."""
        import torch

        device = self._parameters[0].device
        used = torch.zeros(len(self._parameters), dtype=torch.int32, device=device)
        torch.distributed.all_reduce(used, group=self._group)

    def _finish(self) -> None:
        """At the end of a backward pass: reduce what is missing, wait, and hand the reduced gradients to parameters."""
        import torch

        for index in self._place:
            if index not in self._ready:
                self._add(index)
        if self._is_first_of_static:
            self._reduce_use()
        elif self._is_static and self._order is not None:
            self._order += sorted(self._unused)
        self._is_expecting = self._is_first_of_static = False
        with torch.no_grad():
            for work, bucket in zip(self._reduced, self._buckets, strict=True):
                work.wait()
                for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    if self._keeps_gradients_in_buckets:
                        parameter.grad = view
                    elif parameter.grad is not None:
                        parameter.grad.copy_(view)


def _find_used(outputs: list[Any]) -> set[int]:
    """Return the ids of the parameters from which outputs are computed."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    visited = set(waiting)
    used: set[int] = set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            used.add(id(node.variable))
        new = {each for each, _ in node.next_functions if each is not None} - visited
        visited |= new
        waiting += new
    return used


def _broadcast_coalesced(group: Any, tensors: list[Any], _bytes: int, rank: int = 0) -> None:
    """Broadcast tensors as torch does: those of one type as one buffer."""
    import torch

    by_type: dict[Any, list[Any]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    source = torch.distributed.get_global_rank(group, rank)
    for same in by_type.values():
        flat = torch._C._nn.flatten_dense_tensors(same)
        torch.distributed.broadcast(flat, source, group=group)
        for tensor, part in zip(same, torch._C._nn.unflatten_dense_tensors(flat, same), strict=True):
            tensor.copy_(part)
