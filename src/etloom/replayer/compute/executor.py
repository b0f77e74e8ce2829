"""Runs the operators of a program on a device: each once in a trial run, then repeatedly those that succeeded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from etloom.core.errors import EtloomError
from etloom.replayer.compute import operators, tensor_initialization
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import DTYPES, ProgramStep, TensorView, convert_value
from etloom.replayer.compute.progress import INTERRUPTED, NOT_TRIED, Stopped
from etloom.replayer.compute.saved_tensors import SavedTensors

_RETURNS_NUMBER = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_MAX_FILLED_BYTES = 1 << 16
_PLAIN_NUMBERS = {"double": 0.5, "long int": 1, "long": 1}
"""Values for numbers that Python passed to an operator. They are recorded as tensors on the host, and would change the
result type if they were passed as such."""


@dataclass(frozen=True)
class Outcome:
    """Result of an operator call in the trial run: replayed, skipped or substituted, with reason and duration (ns).

    Attributes:
        result: "replayed"; "skipped"; or "substituted": another operator ran, or its readers get tensors that were
            initialized as recorded.
        started_ns, duration_ns: Of the operator alone, by time.perf_counter_ns; 0 if it was skipped.
    """

    result: str
    reason: str | None = None
    started_ns: int = field(default=0, compare=False)
    duration_ns: int = field(default=0, compare=False)


class Executor:
    """Runs a program on a device: `trial_run` tries each operator once, then `run` repeats those that succeeded.

    Attributes:
        outcomes: Outcome of each step in the trial run.
        stopped: Why the trial run ended early.
        peak_bytes: Maximum that storages held between steps.
        saved: Tensors that were saved next to the trace.

    Args:
        resources: Folder with the tensors saved next to the trace.
    """

    def __init__(self, program: Program, device: torch.device, resources: Path | None = None) -> None:
        self.program = program
        self.device = device
        self.outcomes: list[Outcome] = []
        self.stopped: str | None = None
        self.peak_bytes = 0
        self._bounds = tensor_initialization.infer_bounds(program)
        self.saved = SavedTensors(program, self._bounds, resources)
        self._not_on_device = _RETURNS_NUMBER if device.type == "meta" else frozenset[str]()
        self._slots: list[torch.Tensor | None] = []
        self._slot_of: dict[TensorView, int] = {}
        self._storage_slots: dict[
            int, list[int]
        ] = {}  # slots with tensors on a storage; the first covers all of it
        self._kept_storages: set[int] = set()  # no step creates them, or none could
        self._allocated: dict[int, int] = {}
        self._prepared: list[PreparedOperator] = []
        self._next = 0
        self._is_running = False
        self._initial_integers: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # (tensor that steps write, contents)

    @torch.no_grad()
    def trial_run(
        self,
        on_step: Callable[[ProgramStep], None] = lambda step: None,
        skip: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Run every operator of the program once; an exception becomes that operator's outcome, and the run continues.

        Args:
            on_step: Called with each step before it is tried. If it raises Stopped, or the user interrupts, the
                remaining steps are skipped.
            skip: Node -> reason why it is not tried.

        Raises:
            EtloomError: The device itself fails.
        """
        try:
            for step in self.program.steps:
                on_step(step)
                prepared = PreparedOperator(step.node, step.name, step.operator.call)
                reason = skip.get(step.node)
                outcome = self._try_step(step, prepared) if reason is None else Outcome("skipped", reason)
                self.outcomes.append(outcome)
                self._keep(step, prepared, outcome)
                for storage in step.frees:
                    self._free(storage)
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        except Stopped as error:
            self.stopped = str(error)
        if self.stopped:
            remaining = len(self.program.steps) - len(self.outcomes)
            self.outcomes += [Outcome("skipped", f"{NOT_TRIED}: {self.stopped}")] * remaining
            for storage in list(self._storage_slots):
                self._free(storage)

    def _keep(self, step: ProgramStep, prepared: PreparedOperator, outcome: Outcome) -> None:
        """Add an operator that ran to the later passes; if it was skipped, drop the tensor views created for it."""
        if outcome.result != "skipped" and step.name not in self._not_on_device:
            self._prepared.append(prepared)
            return
        # Later steps cannot use a view that only this step would create.
        for slot, view, _ in prepared.views:
            self._slots[slot] = None
            self._storage_slots[view.storage].remove(slot)

    def _free(self, storage: int) -> None:
        if storage in self._kept_storages:
            return
        self._allocated.pop(storage, None)
        slots = self._storage_slots.pop(storage, [])
        if self._prepared:
            self._prepared[-1].frees += slots
        for slot in slots:
            self._slots[slot] = None

    def run(self) -> None:
        """Run all operators that succeeded in the trial run once more, and wait until the device has finished."""
        self.advance(None)
        self._synchronize()

    def describe_position(self) -> str | None:
        """Return a description of the operator that is running; None if there is none."""
        if not self._is_running or not 0 < self._next <= len(self._prepared):
            return None
        prepared = self._prepared[self._next - 1]
        return f"{prepared.name} (node {prepared.node})"

    @torch.no_grad()
    def advance(self, node: int | None) -> None:
        """Run the remaining operators of this pass that precede ``node``; None: run all remaining and end the pass.

        Raises:
            EtloomError: An operator fails that succeeded in the trial run.
        """
        slots = self._slots
        self._is_running = True
        if self._next == 0:
            for tensor, contents in self._initial_integers:
                tensor.copy_(contents)
        while self._next < len(self._prepared) and (node is None or self._prepared[self._next].node < node):
            prepared = self._prepared[self._next]
            self._next += 1
            try:
                result = prepared(slots)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise EtloomError(
                    f"{prepared.name} failed after it had run before: {_first_line(error)}",
                    where=f"node {prepared.node}",
                ) from error
            if prepared.takes:
                leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
                for index, slot in prepared.takes:
                    slots[slot] = leaves[index]
            for slot in prepared.frees:
                slots[slot] = None
        self._is_running = False
        if node is None:
            self._next = 0

    def _try_step(self, step: ProgramStep, prepared: PreparedOperator) -> Outcome:
        if step.name in self._not_on_device:
            return Outcome("substituted", "returns a number, and meta tensors have no values")
        reason = None
        try:
            self._bind_arguments(step, prepared)
            self._fill_results(step, prepared)
            started = time.perf_counter_ns()
            try:
                result = self._call(step, prepared)
            except NotImplementedError:  # torch has no kernel of the operator for this device
                if (substitute := operators.portable_substitute(step.name)) is None:
                    raise
                name, prepared.call = substitute
                result = prepared(self._slots)
                reason = f"by {name}"
            self._synchronize()
            duration = time.perf_counter_ns() - started
        except Exception as error:  # whatever an operator raises is the reason of its step
            self._check_device(step)
            return Outcome("skipped", _first_line(error))
        outcome = replace(
            self._store_results(step, prepared, result), started_ns=started, duration_ns=duration
        )
        if reason and outcome.result == "replayed":
            return replace(outcome, result="substituted", reason=reason)
        return outcome

    def _call(self, step: ProgramStep, prepared: PreparedOperator) -> Any:
        """Call an operator; if it fails or returns other dtypes than recorded, try again under autocast."""
        dtype = find_type(step, self.device.type)
        plain = prepared.call
        for call in () if dtype is None else (plain, wrap(plain, self.device.type, dtype)):
            prepared.call = call
            try:
                result = prepared(self._slots)
            except NotImplementedError:  # a subclass of RuntimeError; the caller has a substitute
                raise
            except RuntimeError:
                continue
            if not has_other_types(result, step):
                return result
            del result  # not two of them in memory
        prepared.call = plain
        return prepared(self._slots)

    def _fill_results(self, step: ProgramStep, prepared: PreparedOperator) -> None:
        """Let a step that only allocates a result also write initial values, if no replayed operator fills the result.

        Otherwise arbitrary integers would be used as indices. Large floating point tensors stay as they are, at no
        cost.
        """
        unfilled = {view.storage: view for view in step.results if view.storage in self.program.unfilled}
        for view in step.inputs.values():
            unfilled.pop(view.storage, None)
        if len(unfilled) != 1 or self.device.type == "meta":
            return
        (view,) = unfilled.values()
        if view.bytes <= _MAX_FILLED_BYTES or not DTYPES[view.dtype].is_floating_point:
            allocate, contents = prepared.call, make_view(self._allocate(view), view)
            prepared.call = lambda *args, **kwargs: allocate(*args, **kwargs).copy_(contents)

    def _bind_arguments(self, step: ProgramStep, prepared: PreparedOperator) -> None:
        """Bind recorded argument values to the parameters of the installed operator; tensors get slot numbers."""
        arguments = step.operator.arguments
        recorded = dict(zip((argument.name for argument in arguments), step.values, strict=False))
        for argument in step.operator.order:
            value = recorded.get(argument.name, argument.default)
            bound: Any
            key: ArgumentKey = argument.name if argument.keyword else len(prepared.positional)
            if isinstance(value, TensorView):
                bound = self._plain_number(value)
                if bound is None:
                    prepared.slots.append((key, self._slot(value, prepared)))
            elif isinstance(value, list) and "Tensor" in argument.kind:
                items = [
                    (index, self._slot(item, prepared))
                    for index, item in enumerate(value)
                    if isinstance(item, TensorView)
                ]
                prepared.lists.append((key, items))
                bound = [None] * len(value)
            elif argument.name in recorded:
                bound = convert_value(value, argument, self.device)
            else:
                bound = value
            if argument.keyword:
                prepared.named[argument.name] = bound
            else:
                prepared.positional.append(bound)

    def _plain_number(self, view: TensorView) -> float | int | None:
        is_number = not view.shape and view.on_host and view.storage in self.program.constant
        return _PLAIN_NUMBERS.get(view.dtype) if is_number else None

    def _slot(self, view: TensorView, prepared: PreparedOperator) -> int:
        """Return the slot number of a recorded tensor; if the slot is empty, fill it with a view or initial values."""
        slot = self._slot_of.get(view)
        if slot is not None and self._slots[slot] is not None:
            return slot
        slot = self._new_slot(view)
        base_slots = self._storage_slots.get(view.storage)
        if base_slots is not None and _holds_view(self._slots[base_slots[0]], view):
            self._slots[slot] = make_view(self._slots[base_slots[0]], view)
            if view.storage not in self._kept_storages:
                prepared.views.append((slot, view, base_slots[0]))
            self._storage_slots[view.storage].append(slot)
            return slot
        self._kept_storages.add(view.storage)
        tensor = self._allocate(view)
        is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
        if is_integer and view.storage not in self.program.constant:
            self._initial_integers.append((tensor, tensor.clone()))
        self._allocated[view.storage] = tensor.untyped_storage().nbytes()
        self._slots[slot] = make_view(tensor, view)
        self._storage_slots.setdefault(view.storage, []).insert(0, slot)
        return slot

    def _new_slot(self, view: TensorView) -> int:
        slot = self._slot_of.setdefault(view, len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        return slot

    def _allocate(self, view: TensorView) -> torch.Tensor:
        """Allocate a flat tensor as large as the recorded storage of ``view``, with saved or else initial values."""
        count = math.ceil(self.program.bytes[view.storage] / DTYPES[view.dtype].itemsize)
        device = torch.device("cpu") if view.on_host and self.device.type == "cuda" else self.device
        tensor = tensor_initialization.make_initial_tensor(view, count, device, self._bounds)
        self.saved.fill(tensor, view.storage)
        return tensor

    def _store_results(self, step: ProgramStep, prepared: PreparedOperator, result: Any) -> Outcome:
        """Store an operator's results in slots if number, shapes and dtypes are as recorded; return the outcome."""
        tensors = [
            (index, leaf) for index, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, torch.Tensor)
        ]
        if len(tensors) != len(step.results):
            return Outcome("substituted", f"returned {len(tensors)} tensors, recorded {len(step.results)}")
        for (_, tensor), view in zip(tensors, step.results, strict=True):
            if difference := _describe_difference(tensor, view):
                return Outcome("substituted", difference)
        for (index, tensor), view in zip(tensors, step.results, strict=True):
            slot = self._new_slot(view)
            self._slots[slot] = tensor
            prepared.takes.append((index, slot))
            slots = self._storage_slots.setdefault(view.storage, [])
            if slot not in slots:
                slots.append(slot)
            if view.storage not in self._kept_storages:
                self._allocated[view.storage] = tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._allocated.values()))
        return Outcome("replayed")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _check_device(self, step: ProgramStep) -> None:
        """Raise EtloomError if the GPU does not work any more after an operator has failed."""
        try:
            self._synchronize()
        except RuntimeError as error:
            raise EtloomError(f"{step.name} left the GPU unusable: {_first_line(error)}") from error


def _describe_difference(tensor: torch.Tensor, view: TensorView) -> str | None:
    """Describe how layout, shape or dtype of a result differs from the recorded tensor; None if they are equal."""
    if tensor.layout is not torch.strided:  # it has no storage, and its contents are not recorded
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        return f"returned a {layout} tensor; its readers get a dense one"
    if tuple(tensor.shape) != view.shape:
        return f"returned shape {list(tensor.shape)}, recorded {list(view.shape)}"
    if tensor.dtype != DTYPES[view.dtype]:
        return f"returned {tensor.dtype}, recorded {DTYPES[view.dtype]}"
    return None


def _holds_view(base: torch.Tensor | None, view: TensorView) -> bool:
    return base is not None and base.untyped_storage().nbytes() >= view.bytes


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


# A prepared operator call: bound arguments, executable repeatedly without lookups.

ArgumentKey = int | str
"""Position of an argument, or its name."""


@dataclass
class PreparedOperator:
    """A callable operator call that takes its tensors from numbered slots, the entries of a list of tensors.

    Attributes:
        slots: (argument, slot) of tensors.
        lists: (argument, [(index, slot)]) of lists of tensors.
        views: (slot, view, slot of another tensor on the same storage): views to create before the call.
        takes: (index of a result, slot) of tensors to keep.
        frees: Slots to clear after the call.
    """

    node: int
    name: str
    call: Callable[..., Any]
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    slots: list[tuple[ArgumentKey, int]] = field(default_factory=list)
    lists: list[tuple[ArgumentKey, list[tuple[int, int]]]] = field(default_factory=list)
    views: list[tuple[int, TensorView, int]] = field(default_factory=list)
    takes: list[tuple[int, int]] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)

    def __call__(self, slots: list[Any]) -> Any:
        for slot, view, base in self.views:
            slots[slot] = make_view(slots[base], view)
        # Copies: arguments that were stored here would keep their memory allocated.
        positional = self.positional.copy()
        named = self.named.copy() if self.named else self.named
        for key, slot in self.slots:
            (named if isinstance(key, str) else positional)[key] = slots[slot]  # type: ignore[index,call-overload]
        for key, items in self.lists:
            arguments: Any = named if isinstance(key, str) else positional
            arguments[key] = tensors = arguments[key].copy()
            for index, slot in items:
                tensors[index] = slots[slot]
        return self.call(*positional, **named)


def make_view(base: Any, view: TensorView) -> torch.Tensor:
    """Return a tensor on the storage of ``base`` with the dtype, offset, shape and strides of a recorded tensor."""
    tensor = torch.empty(0, dtype=DTYPES[view.dtype], device=base.device)
    return tensor.set_(base.untyped_storage(), view.offset, view.shape, view.stride)  # type: ignore[call-overload,no-any-return]


# Replays operators that ran under autocast: recordings hold their inputs before the cast and results after it.

_NARROW = {torch.bfloat16, torch.float16}


def find_type(step: ProgramStep, device: str) -> torch.dtype | None:
    """Return the 16-bit dtype to which autocast may have cast an operator's inputs; None if it probably did not."""
    types = {DTYPES[view.dtype] for view in (*step.results, *step.inputs.values())}
    narrow = types & _NARROW
    return next(iter(narrow)) if len(narrow) == 1 and len(types) > 1 and device != "meta" else None


def wrap(call: Callable[..., Any], device: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a function that runs ``call`` under autocast to ``dtype``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype, cache_enabled=False):
            return call(*args, **kwargs)

    return run


def has_other_types(result: Any, step: ProgramStep) -> bool:
    """Return whether an operator's result has as many tensors as were recorded, but with dtypes that differ."""
    types = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    recorded = [DTYPES[view.dtype] for view in step.results]
    return len(types) == len(recorded) and types != recorded
