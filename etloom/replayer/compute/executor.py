"""The recorded computation on a device: a rehearsal finds out what can run, then it is repeated without a question."""

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
from etloom.replayer.compute.argument_values import DTYPES, convert_value
from etloom.replayer.compute.prepared_operator import ArgumentKey, PreparedOperator, make_view
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import ProgramStep, TensorView
from etloom.replayer.compute.progress import INTERRUPTED, NOT_TRIED, Stopped
from etloom.replayer.compute.saved_tensors import SavedTensors

_RETURNS_NUMBER = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_MAX_FILLED_BYTES = 1 << 16
_PLAIN_NUMBERS = {"double": 0.5, "long int": 1, "long": 1}
"""A number that Python gave an operator is recorded as a tensor on the host; as such it would raise result types."""


@dataclass(frozen=True)
class Outcome:
    """Of one step. result: replayed, skipped, or substituted: another operator did it, or its readers get tensors made
    as recorded. began_ns, took_ns: of the operator alone, by time.perf_counter_ns; 0 where it was skipped."""

    result: str
    reason: str | None = None
    began_ns: int = field(default=0, compare=False)
    took_ns: int = field(default=0, compare=False)


class Executor:
    """The program on a device. `rehearse` it once; then `run` repeats what could be run, with the same tensors.

    outcomes: of each step. stopped: why the rehearsal ended before its end. peak_bytes: the most that storages held
    between steps. resources: the folder with what was recorded beside the trace. saved: what came from there.
    """

    def __init__(self, program: Program, device: torch.device, resources: Path | None = None) -> None:
        self.program = program
        self.device = device
        self.outcomes: list[Outcome] = []
        self.stopped: str | None = None
        self.peak_bytes = 0
        bounds = tensor_initialization.infer_bounds(program)
        self._bounds = bounds
        self.saved = SavedTensors(program, bounds, resources)
        self._numbers = _RETURNS_NUMBER if device.type == "meta" else frozenset[str]()
        self._slots: list[torch.Tensor | None] = []
        self._slot_of: dict[TensorView, int] = {}
        self._on: dict[int, list[int]] = {}  # storage -> the slots with tensors on it; the first is whole
        self._kept: set[int] = set()  # storages that stay: no step makes them, or none could
        self._held: dict[int, int] = {}
        self._ready: list[PreparedOperator] = []
        self._next = 0
        self._busy = False
        self._first: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # integers that steps write, and what they held

    @torch.no_grad()
    def trial_run(
        self,
        tell: Callable[[ProgramStep], None] = lambda step: None,
        leave_out: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Run every step once. What an operator raises is the outcome of its step; the others still run.

        tell: called with each step before it is tried; where it raises Stopped, or the user interrupts, the steps from
        there on are skipped. leave_out: node -> why it is not to be tried. Raises EtloomError where the device itself
        fails.
        """
        try:
            for step in self.program.steps:
                tell(step)
                ready = PreparedOperator(step.node, step.name, step.operator.call)
                why = leave_out.get(step.node)
                outcome = self._attempt(step, ready) if why is None else Outcome("skipped", why)
                self.outcomes.append(outcome)
                self._keep(step, ready, outcome)
                for storage in step.frees:
                    self._free(storage)
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        except Stopped as error:
            self.stopped = str(error)
        if self.stopped:
            left = len(self.program.steps) - len(self.outcomes)
            self.outcomes += [Outcome("skipped", f"{NOT_TRIED}: {self.stopped}")] * left
            for storage in list(self._on):
                self._free(storage)

    def _keep(self, step: ProgramStep, ready: PreparedOperator, outcome: Outcome) -> None:
        """Repeat what could be run."""
        if outcome.result != "skipped" and step.name not in self._numbers:
            self._ready.append(ready)
            return
        # A view that only this step would make again is no view for later ones.
        for slot, view, _ in ready.views:
            self._slots[slot] = None
            self._on[view.storage].remove(slot)

    def _free(self, storage: int) -> None:
        if storage in self._kept:
            return
        self._held.pop(storage, None)
        freed = self._on.pop(storage, [])
        if self._ready:
            self._ready[-1].frees += freed
        for slot in freed:
            self._slots[slot] = None

    def run(self) -> None:
        """All that can run, once more, to its end."""
        self.advance(None)
        self._synchronize()

    def where(self) -> str | None:
        """The operator that is running, in words; None where none is."""
        if not self._busy or not 0 < self._next <= len(self._ready):
            return None
        ready = self._ready[self._next - 1]
        return f"{ready.name} (node {ready.node})"

    @torch.no_grad()
    def advance(self, node: int | None) -> None:
        """What comes before a node and was not run in this pass yet; with None what is left, which ends the pass.

        Raises EtloomError where an operator fails that ran in the rehearsal.
        """
        slots = self._slots
        self._busy = True
        if self._next == 0:
            for tensor, first in self._first:
                tensor.copy_(first)
        while self._next < len(self._ready) and (node is None or self._ready[self._next].node < node):
            ready = self._ready[self._next]
            self._next += 1
            try:
                given = ready(slots)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise EtloomError(
                    f"{ready.name} ran once and then failed: {_first_line(error)}", where=f"node {ready.node}"
                ) from error
            if ready.takes:
                leaves = (given,) if isinstance(given, torch.Tensor) else tree_leaves(given)
                for at, slot in ready.takes:
                    slots[slot] = leaves[at]
            for slot in ready.frees:
                slots[slot] = None
        self._busy = False
        if node is None:
            self._next = 0

    def _attempt(self, step: ProgramStep, ready: PreparedOperator) -> Outcome:
        if step.name in self._numbers:
            return Outcome("substituted", "gives a number, and meta tensors hold none")
        reason = step.operator.instead
        try:
            self._lay_out(step, ready)
            self._fill(step, ready)
            began = time.perf_counter_ns()
            try:
                given = ready(self._slots)
            except NotImplementedError:  # how torch says that a device has no kernel of an operator
                if (stand_in := operators.portable_substitute(step.name)) is None:
                    raise
                name, ready.call = stand_in
                given = ready(self._slots)
                reason = f"by {name}"
            self._synchronize()
            took = time.perf_counter_ns() - began
        except Exception as error:  # whatever an operator raises is its step's reason
            self._check_device(step)
            return Outcome("skipped", _first_line(error))
        outcome = replace(self._take(step, ready, given), began_ns=began, took_ns=took)
        if reason and outcome.result == "replayed":
            return replace(outcome, result="substituted", reason=reason)
        return outcome

    def _fill(self, step: ProgramStep, ready: PreparedOperator) -> None:
        """Where nobody fills what a step gives, put in at each pass what is made up for it: integers of chance would
        be indices of chance. Floating point that is large stays as it comes, which costs nothing."""
        made = {view.storage: view for view in step.results if view.storage in self.program.unfilled_storages}
        for view in step.inputs.values():
            made.pop(view.storage, None)
        if len(made) != 1 or self.device.type == "meta":
            return
        (view,) = made.values()
        if view.bytes <= _MAX_FILLED_BYTES or not DTYPES[view.dtype].is_floating_point:
            empty, first = ready.call, make_view(self._make(view), view)
            ready.call = lambda *given, **named: empty(*given, **named).copy_(first)

    def _lay_out(self, step: ProgramStep, ready: PreparedOperator) -> None:
        """Put the recorded values where this torch wants them, and name the slots of tensors."""
        recorded = dict(zip((one.name for one in step.operator.arguments), step.values, strict=False))
        for argument in step.operator.order:
            given = recorded.get(argument.name, argument.default)
            laid: Any
            place: ArgumentKey = argument.name if argument.keyword else len(ready.positional)
            if isinstance(given, TensorView):
                laid = self._number(given)
                if laid is None:
                    ready.slots.append((place, self._slot(given, ready)))
            elif isinstance(given, list) and "Tensor" in argument.kind:
                items = [
                    (at, self._slot(one, ready))
                    for at, one in enumerate(given)
                    if isinstance(one, TensorView)
                ]
                ready.lists.append((place, items))
                laid = [None] * len(given)
            elif argument.name in recorded:
                laid = convert_value(given, argument, self.device)
            else:
                laid = given
            if argument.keyword:
                ready.named[argument.name] = laid
            else:
                ready.positional.append(laid)

    def _number(self, view: TensorView) -> float | int | None:
        plain = not view.shape and view.on_host and view.storage in self.program.constant
        return _PLAIN_NUMBERS.get(view.dtype) if plain else None

    def _slot(self, view: TensorView, ready: PreparedOperator) -> int:
        """The slot with that tensor, filled."""
        slot = self._slot_of.get(view)
        if slot is not None and self._slots[slot] is not None:
            return slot
        slot = self._new_slot(view)
        base = self._on.get(view.storage)
        if base is not None and _holds_view(self._slots[base[0]], view):
            self._slots[slot] = make_view(self._slots[base[0]], view)
            if view.storage not in self._kept:
                ready.views.append((slot, view, base[0]))
            self._on[view.storage].append(slot)
            return slot
        self._kept.add(view.storage)
        whole = self._make(view)
        number = whole.is_floating_point() or whole.is_complex() or whole.is_meta
        if not number and view.storage not in self.program.constant:
            self._first.append((whole, whole.clone()))
        self._held[view.storage] = whole.untyped_storage().nbytes()
        self._slots[slot] = make_view(whole, view)
        self._on.setdefault(view.storage, []).insert(0, slot)
        return slot

    def _new_slot(self, view: TensorView) -> int:
        slot = self._slot_of.setdefault(view, len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        return slot

    def _make(self, view: TensorView) -> torch.Tensor:
        count = math.ceil(self.program.bytes[view.storage] / DTYPES[view.dtype].itemsize)
        device = torch.device("cpu") if view.on_host and self.device.type == "cuda" else self.device
        made = tensor_initialization.make_initial_tensor(view, count, device, self._bounds)
        self.saved.fill(made, view.storage)
        return made

    def _take(self, step: ProgramStep, ready: PreparedOperator, given: Any) -> Outcome:
        """Give the results their slots, if they are as recorded; else their readers get tensors made so."""
        leaves = tree_leaves(given)
        found = [(at, one) for at, one in enumerate(leaves) if isinstance(one, torch.Tensor)]
        if len(found) != len(step.results):
            return Outcome("substituted", f"gave {len(found)} tensors, recorded {len(step.results)}")
        for (_, tensor), view in zip(found, step.results, strict=True):
            if (
                tensor.layout is not torch.strided
            ):  # it has no storage, and recordings do not tell what it holds
                layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
                return Outcome("substituted", f"gave a {layout} tensor, and its readers get a plain one")
            if tuple(tensor.shape) != view.shape:
                return Outcome("substituted", f"gave shape {list(tensor.shape)}, recorded {list(view.shape)}")
            if tensor.dtype != DTYPES[view.dtype]:
                return Outcome("substituted", f"gave {tensor.dtype}, recorded {DTYPES[view.dtype]}")
        for (at, tensor), view in zip(found, step.results, strict=True):
            slot = self._new_slot(view)
            self._slots[slot] = tensor
            ready.takes.append((at, slot))
            slots = self._on.setdefault(view.storage, [])
            if slot not in slots:
                slots.append(slot)
            if view.storage not in self._kept:
                self._held[view.storage] = tensor.untyped_storage().nbytes()
        self._measure()
        return Outcome("replayed")

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _check_device(self, step: ProgramStep) -> None:
        """A GPU that one operator has broken raises at all that follow."""
        try:
            self._synchronize()
        except RuntimeError as error:
            raise EtloomError(f"{step.name} left the GPU unusable: {_first_line(error)}") from error


def _holds_view(base: torch.Tensor | None, view: TensorView) -> bool:
    return base is not None and base.untyped_storage().nbytes() >= view.bytes


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__
