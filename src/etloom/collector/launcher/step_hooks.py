"""Hooks that count the steps of a job whose code is unchanged. Loaded by bootstrap/sitecustomize.py.

A step is one return of `.step()` of the first optimizer that steps; other optimizers, and steps that a GradScaler
skips, do not count. `Optimizer.profile_hook_step` is wrapped from outside its record_function: a window that opened
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

from .. import fork_hold
from ..observer.native_build import BuildError
from ..observer.profiler_gate import open_gate
from ..options import RecordingOptions
from ..session import active_recorders, on_demand
from ..session.live_state import start_live_state
from ..session.profiler_guard import ProfilerGuard
from ..session.recorder import Recorder
from ..text import describe_error


def attach(module: ModuleType) -> None:
    """Install the hooks that count steps in this process as the recording options require.

    Args:
        module: torch.optim.optimizer, just imported; the job has no optimizer yet.
    """
    options = RecordingOptions.from_environment()
    recorder = Recorder(options)
    recorder.report_status()  # lets the launcher distinguish a job without torch from one without steps
    atexit.register(_report_end_without_steps, recorder)
    if options.watch:
        start_live_state(Path(options.out), module)
    if options.step_name is not None:
        _count_scopes(recorder, re.compile(options.step_name), options.job_marks_steps)
    elif options.step_ns is not None:
        _count_intervals(recorder, module.torch, options.step_ns)
    else:
        _count_optimizer_steps(recorder, module)


def _report_end_without_steps(recorder: Recorder) -> None:
    """Write to the status file that the process has ended, if the process counted no step."""
    if "began" not in recorder.status.facts:
        recorder.report_status(ended=True)


class _StepCounter:
    """Counts the steps of a single optimizer: the first that calls step(), or the next after that object is freed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stepping = False
        self._optimizer: Callable[[], Any] = lambda: None

    def is_counted(self, optimizer: Any) -> bool:
        return self._optimizer() is optimizer

    def enter_step(self, optimizer: Any) -> bool:
        """Return whether this call of `.step()` counts as a training step, and if so mark the step as running."""
        # `stepping`: a subclass whose step calls its parent's step makes one step, not two.
        if self.recorder.finished or self.stepping:
            return False
        counted_optimizer = self._optimizer()
        if counted_optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted_optimizer is not optimizer:
            name = type(counted_optimizer).__name__
            self.recorder.remark(f"several optimizers step: only steps of the first one, {name}, are counted")
            return False
        self.stepping = True
        return True


def _count_optimizer_steps(recorder: Recorder, module: ModuleType) -> None:
    counter = _StepCounter(recorder)
    original = module.Optimizer.profile_hook_step
    first = threading.Lock()  # held forever by the first caller

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        if first.acquire(
            blocking=False
        ):  # the first optimizer of the process is being created: training begins
            recorder.report_status(optimizer=step.__qualname__.partition(".")[0])
            _watch_scaler(counter, module.torch.amp.GradScaler)
            recorder.begin()
        profiled_step = original(step)
        is_compiling = module.torch.compiler.is_compiling

        @functools.wraps(step)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not counter.enter_step(self):
                return profiled_step(self, *args, **kwargs)
            try:
                result = profiled_step(self, *args, **kwargs)
            finally:
                counter.stepping = False
            recorder.end_step()
            return result

        return wrapper

    module.Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _watch_scaler(counter: _StepCounter, scaler: Any) -> None:
    """Patch GradScaler.step to report steps that it skips after an overflow, because these are not counted."""
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        previous_count = counter.recorder.count
        result = original(self, optimizer, *args, **kwargs)
        if counter.is_counted(optimizer) and counter.recorder.count == previous_count:
            counter.recorder.remark("GradScaler skipped a step: the next counted step includes it")
        return result

    scaler.step = step


def _count_scopes(recorder: Recorder, name: re.Pattern[str], job_marks_steps: bool) -> None:
    """Count each record_function whose name matches the pattern `name` as a step, for loops without an optimizer.

    A step ends, and the next one begins, when a scope has been left; a scope inside another one does not count.
    `job_marks_steps`: the scopes are the job's own ProfilerStep#N, and the recorder makes none.
    """
    from torch.autograd.profiler import record_function

    enter: Any = record_function.__enter__
    leave: Any = record_function.__exit__
    state: dict[str, Any] = {"begun": False, "scope": None}

    def __enter__(self: Any) -> Any:
        is_recorders = not job_marks_steps and self.name.startswith(("ProfilerStep#", "etloom:"))
        if not (is_recorders or state["begun"]):
            recorder.status.count_name(self.name)
        if not is_recorders and state["scope"] is None and name.search(self.name):
            if not state["begun"]:
                state["begun"] = True
                recorder.begin()
            state["scope"] = self
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if state["scope"] is self:
            state["scope"] = None
            recorder.end_step()
        return result

    record_function.__enter__ = __enter__  # type: ignore[method-assign]
    record_function.__exit__ = __exit__  # type: ignore[method-assign]


def _count_intervals(recorder: Recorder, torch: Any, step_ns: int) -> None:
    """Count time intervals of `step_ns` ns, common to all ranks, as steps, for jobs whose steps cannot be detected.

    A separate thread counts them, starting with the first nn.Module of the first rank; a launcher's process creates no
    module.
    """
    module = torch.nn.Module
    initialize = module.__init__
    first = threading.Lock()  # held forever by the first caller

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if first.acquire(blocking=False):
            module.__init__ = initialize
            try:
                if recorder.options.kineto:
                    if open_gate() is None:
                        raise BuildError("the native observer is not built for the torch of this process")
                    _warm_up(recorder, torch)
                clock = threading.Thread(
                    target=_run_clock, args=(recorder, step_ns), name="etloom-clock", daemon=True
                )
                clock.start()
            except Exception as error:
                recorder.messages.warn(f"nothing is recorded, the job continues: {describe_error(error)}")
        initialize(self, *args, **kwargs)

    module.__init__ = __init__


def _warm_up(recorder: Recorder, torch: Any) -> None:
    """Run an empty Kineto session, because the first session must run on the thread that loaded Kineto.

    Skipped while the job has a session: a second one would take its events and crash the process.
    """
    with fork_hold.profiler_lock:
        guard = ProfilerGuard(lambda _profiler: None, recorder.options)
        try:
            if guard.active_profiler() or torch.autograd._profiler_enabled():
                return
            active_recorders.mark_profiled()
            with torch.autograd.profiler.profile(use_kineto=True):
                pass
        finally:
            guard.remove()


def _run_clock(recorder: Recorder, step_ns: int) -> None:
    try:
        origin_ns = on_demand.agree_on_start_ns(Path(recorder.options.out))
    except (OSError, ValueError) as error:
        recorder.messages.warn(f"nothing is recorded: the ranks cannot agree on a start time: {error}")
        return
    recorder.count = (time.time_ns() - origin_ns) // step_ns
    recorder.begin()
    while not recorder.finished:
        now_ns = time.time_ns() - origin_ns  # may be far into the step if marking its begin took long
        time.sleep((step_ns - now_ns % step_ns) / 1e9)
        count = (time.time_ns() - origin_ns) // step_ns
        if count > recorder.count:  # a clock that is set back makes no steps
            recorder.end_step(count)
