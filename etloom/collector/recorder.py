"""Counts steps and opens and closes the window: the same for `record` and for the hook of `launch`."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import demand, files, forking
from .options import Options, new_scratch, own_version, parse_steps

if TYPE_CHECKING:
    from types import TracebackType

    from .guard import Guard
    from .window import Window

_F = TypeVar("_F", bound=Callable[..., None])


def _never_raises(method: _F) -> _F:
    """A failure here is ours, not the job's: say so once and record no more."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: Any) -> None:
        if self.finished:
            return
        try:
            method(self, *args)
        except Exception as error:
            self._give_up(error)

    return wrapper  # type: ignore[return-value]


class Recorder:
    """One window of one process. Nothing it does raises, whatever fails: see `warnings`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.count = 0
        self.finished = False
        self.warnings: list[str] = []
        self._pid = os.getpid()
        self._profiled = False
        self._waits = options.on_demand is not None
        self._window: Window | None = None
        self._guard: Guard | None = None

    def warn(self, message: str) -> None:
        """One line on stderr; `stderr` may be closed or full, which is no reason to stop a job."""
        rank = files.rank_hint()
        line = " ".join(f"rank {rank}: {message}".split()) if rank is not None else " ".join(message.split())
        self.warnings.append(line)
        try:
            sys.stderr.write(f"etloom: {line}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self.warnings.append("stderr could not be written")

    @_never_raises
    def begin(self) -> None:
        """The first sign of training: step 0 starts here."""
        from .guard import Guard

        self._guard = Guard(self._yield_to)
        atexit.register(self.finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        # A process forked by multiprocessing leaves through os._exit, past atexit, but runs its finalizers.
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.finish, exitpriority=100)
        self._advance()

    @_never_raises
    def step_done(self) -> None:
        """A step ended: the next one begins."""
        self.count += 1
        if self._waits and not self._asked():
            return
        options = self.options
        if self._window is not None or options.first - 1 <= self.count <= options.first:
            self._advance()

    @_never_raises
    def finish(self) -> None:
        """The job, or its recorded part, ends: keep what there is."""
        if self._window is not None and self._window.started:
            if not self._window.device_is_done():
                raise RuntimeError("the device did not finish its work within 30 s")
            self._close()
            return
        self.finished = True
        self._dismiss()
        if self._waits or self._left_out() or (os.getpid() != self._pid and not self.count):
            return  # a forked helper of the job, which never trained
        self.warn(
            f"the job ended after {self.count} steps, before step {self.options.first} began (steps "
            f"{self.options.steps}): nothing recorded; ask for earlier steps"
        )

    def _asked(self) -> bool:
        """Whether somebody has asked for the window; from then on it is as one of given steps."""
        window = demand.agreed(Path(self.options.out), self.count, self.options.on_demand or 1)
        if window is None:
            return False
        self._waits = False
        self.options = replace(self.options, first=window[0], last=window[1])
        if self.count > window[0]:
            raise RuntimeError(f"this rank saw too late that step {window[0]} was agreed on")
        return True

    def _left_out(self) -> bool:
        ranks = self.options.ranks
        return ranks is not None and files.current_rank()[0] not in ranks

    def _advance(self) -> None:
        first, last = self.options.first, self.options.last
        if self._window is None:
            if self._waits or self.count < first - 1:
                return
            if self._left_out():
                self.finished = True
                self._dismiss()
                return
            if not self._prepare():
                return
        window = self._window
        assert window is not None
        if window.started:
            window.end_step(self.count)
            if self.count == last:
                self._close()
            else:
                window.begin_step(self.count)
        elif self.count == first:
            window.start()
            window.begin_step(self.count)

    def _prepare(self) -> bool:
        from .window import Window

        guard = self._guard
        assert guard is not None
        taken = guard.taken()
        if taken:
            self.finished = True
            self._dismiss()
            self.warn(
                f"{taken} is in use by the job itself: nothing recorded; choose other steps or turn it off"
            )
            return False
        self._window = Window(self.options)
        self._profiled = True
        with guard.ours():
            self._window.prepare()
        return True

    def _close(self, because: str = "the job ended") -> None:
        window, options = self._window, self.options
        assert window is not None
        self.finished = True
        window.stop()
        self._dismiss()
        missing = options.last is not None and len(window.steps) < options.last - options.first
        if missing:
            self.warn(
                f"{because} in step {self.count}: {len(window.steps)} whole steps recorded, of steps "
                f"{options.steps} asked for"
            )
        self.warnings += window.warnings
        for line in window.write(self.warnings):
            self.warn(line)
        self._window = None

    def _yield_to(self, what: str) -> None:
        """The job starts a profiler of its own while our window is prepared or open: it goes first."""
        if self.finished or self._window is None:
            return
        try:
            if self._window.started:
                self._close(f"the job started {what}")
                return
            self.finished = True
            self._window.abandon()
            self._dismiss()
            self.warn(
                f"the job started {what} before step {self.options.first}: nothing recorded; turn it off"
            )
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.finished = True
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        self.warn(f"recording failed in step {self.count}, the job goes on without: {text}")
        window, self._window = self._window, None
        try:
            if window is not None:
                window.abandon()
            self._dismiss()
        except Exception as second:
            self.warn(f"and left something behind: {second!r}")

    def _dismiss(self) -> None:
        if self._guard is not None:
            self._guard.remove()

    def _forked(self) -> None:
        """In a child of fork: a loader's worker must not write, a rank that trains must count for itself."""
        if self.count or self._window is not None:
            self.finished = True
        if self._profiled:
            forking.leave_without_destructors()
        if self._window is not None:
            self._window.forget()


class Recording:
    """What `record` returns; `warnings` is what was said on stderr."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> Recording:
        self._recorder.begin()
        return self

    def step(self) -> None:
        """Call at the end of every iteration."""
        self._recorder.step_done()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.finish()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._recorder.warnings)


def record(
    out: str | os.PathLike[str],
    *,
    steps: str | None = None,
    shapes: bool = True,
    stack: bool = False,
    memory: bool = False,
    all_threads: bool = True,
    overwrite: bool = False,
) -> Recording:
    """Record the steps of a training loop into the folder `out`, as this package's docstring describes.

        with etloom.record("run/") as rec:
            for batch in loader:
                train(batch)
                rec.step()

    `steps` "3:5" records steps 3 and 4, counted from 0: the window opens when the third `rec.step()` returns
    and closes in the fifth; the profilers warm up in the step before. Without it all from enter to exit is
    recorded. `shapes`, `stack` and `memory` are torch.profiler's record_shapes, with_stack and
    profile_memory; `all_threads` lets it see threads that Python code starts. Every rank calls it with the
    same folder.

    Raises CollectError, before the loop, for a `steps` that is no range and for a folder that already holds
    traces of this rank (unless `overwrite`). After that nothing raises: a failure is a line on stderr and in
    `warnings`.
    """
    first, last = parse_steps(steps)
    folder = str(Path(out).absolute())
    files.claim(folder, overwrite, *files.current_rank())
    options = Options(
        folder,
        new_scratch(folder),
        first,
        last,
        shapes,
        stack,
        memory,
        all_threads,
        etloom=own_version(),
        command=tuple(sys.orig_argv),
    )
    return Recording(Recorder(options))
