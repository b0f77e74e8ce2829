"""Counts the steps of a job that knows nothing of us, at its optimizer. Loaded by bootstrap/sitecustomize.py.

A step is one return of `.step()` of the first optimizer that steps; others (and a GradScaler's skipped step)
do not count. `Optimizer.profile_hook_step` is wrapped from outside its record_function: a window that opened
or closed inside it would lose that operator and leave its children without a parent.
"""

from __future__ import annotations

import atexit
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..options import Options
from ..session import on_demand
from ..session.messages import describe_error
from ..session.recorder import Recorder


def _note_without_steps(recorder: Recorder) -> None:
    """A process that ends and never counted one."""
    if "began" not in recorder.seen.facts:
        recorder.note(ended=True)


class _StepCounter:
    """The optimizer whose steps count; when it is gone the next one that steps takes its place."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stepping = False
        self._optimizer: Callable[[], Any] = lambda: None

    def leads(self, optimizer: Any) -> bool:
        return self._optimizer() is optimizer

    def enters(self, optimizer: Any) -> bool:
        # `stepping`: a subclass whose step calls its parent's makes one step, not two.
        if self.recorder.finished or self.stepping:
            return False
        leader = self._optimizer()
        if leader is None:
            self._optimizer = weakref.ref(optimizer)
        elif leader is not optimizer:
            self.recorder.remark(
                f"several optimizers step: the steps of the first, a {type(leader).__name__}, are counted"
            )
            return False
        self.stepping = True
        return True


def attach(module: ModuleType) -> None:
    """`module` is torch.optim.optimizer, just imported. Nothing of the job has an optimizer yet."""
    options = Options.from_environment()
    recorder = Recorder(options)
    recorder.note()  # for the launcher to tell a job without torch from one in which nothing steps
    atexit.register(_note_without_steps, recorder)
    if options.step_name is not None:
        _count_scopes(recorder, re.compile(options.step_name), options.marked)
        return
    if options.step_ns is not None:
        _count_time(recorder, module.torch, options.step_ns)
        return
    leader = _StepCounter(recorder)
    original = module.Optimizer.profile_hook_step
    begun = False

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        nonlocal begun
        if not begun:  # the first optimizer of the process is being made: here training begins
            begun = True
            recorder.note(optimizer=step.__qualname__.partition(".")[0])
            _watch_scaler(leader, module.torch.amp.GradScaler)
            recorder.begin()
        profiled = original(step)
        is_compiling = module.torch.compiler.is_compiling

        @functools.wraps(step)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not leader.enters(self):
                return profiled(self, *args, **kwargs)
            try:
                result = profiled(self, *args, **kwargs)
            finally:
                leader.stepping = False
            recorder.step_done()
            return result

        return wrapper

    module.Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _watch_scaler(leader: _StepCounter, scaler: Any) -> None:
    """A GradScaler that met an infinity does not call the optimizer, so there is no step to count."""
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = leader.recorder.count
        result = original(self, optimizer, *args, **kwargs)
        if leader.leads(optimizer) and leader.recorder.count == before:
            leader.recorder.remark("GradScaler left out a step: the one that is counted next spans it")
        return result

    scaler.step = step


def _count_scopes(recorder: Recorder, name: re.Pattern[str], marked: bool) -> None:
    """A step is one record_function of the job whose name is found by `name`: for loops without an optimizer.

    The next step begins where it is left, outside of it; one within another of them does not count. `marked`: they
    are the job's own ProfilerStep#N, and we make none.
    """
    from torch.autograd.profiler import record_function

    enter: Any = record_function.__enter__
    leave: Any = record_function.__exit__
    state: dict[str, Any] = {"begun": False, "outer": None}

    def __enter__(self: Any) -> Any:
        ours = not marked and self.name.startswith(("ProfilerStep#", "etloom:"))
        if not (ours or state["begun"]):
            recorder.seen.enters(self.name)
        if not ours and state["outer"] is None and name.search(self.name):
            if not state["begun"]:
                state["begun"] = True
                recorder.begin()
            state["outer"] = self
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if state["outer"] is self:
            state["outer"] = None
            recorder.step_done()
        return result

    record_function.__enter__ = __enter__  # type: ignore[method-assign]
    record_function.__exit__ = __exit__  # type: ignore[method-assign]


def _count_time(recorder: Recorder, torch: Any, step_ns: int) -> None:
    """A step is so much time, the same one on all ranks: for jobs without any sign of a step.

    Counted on a thread of its own from the first nn.Module of the first rank on; a launcher's process makes none.
    """
    module = torch.nn.Module
    initialize = module.__init__
    first = threading.Lock()  # held for ever by the first

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if first.acquire(blocking=False):
            module.__init__ = initialize
            try:
                if recorder.options.kineto:
                    _warm_up(recorder, torch)
                threading.Thread(target=_run_clock, args=(recorder, step_ns), daemon=True).start()
            except Exception as error:
                recorder.words.warn(f"nothing recorded, the job goes on: {describe_error(error)}")
        initialize(self, *args, **kwargs)

    module.__init__ = __init__


def _warm_up(recorder: Recorder, torch: Any) -> None:
    """Kineto wants its first session on the thread that loaded it; where the job has one there already, that is it.

    Another one inside of the job's would take its events, and end the process.
    """
    from ..session.profiler_guard import Guard

    guard = Guard(lambda _what: None, recorder.options)
    try:
        if guard.taken() or torch.autograd._profiler_enabled():
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass
    finally:
        guard.remove()


def _run_clock(recorder: Recorder, step_ns: int) -> None:
    try:
        zero_ns = on_demand.agree_on_start_ns(Path(recorder.options.out))
    except (OSError, ValueError) as error:
        recorder.words.warn(f"the ranks cannot agree on a time, nothing recorded: {error}")
        return
    recorder.count = (time.time_ns() - zero_ns) // step_ns
    recorder.begin()
    while not recorder.finished:
        now = time.time_ns() - zero_ns  # later than in the step before, where that took long to mark
        time.sleep((step_ns - now % step_ns) / 1e9)
        count = (time.time_ns() - zero_ns) // step_ns
        if count > recorder.count:  # a clock that is set back makes no steps
            recorder.step_done(count)
