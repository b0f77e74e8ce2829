"""Counts steps and opens and closes windows: the same for `record` and for the hooks of `launch`."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import demand, forking
from .options import Options
from .ranks import current_rank, rank_hint
from .writing import Writer

if TYPE_CHECKING:
    from .guard import Guard
    from .window import Window

_F = TypeVar("_F", bound=Callable[..., None])


def _never_raises(method: _F) -> _F:
    """A failure here is ours, not the job's: say so once and record no more."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: Any) -> None:
        with self._lock:
            if self.finished:
                return
            try:
                method(self, *args)
            except Exception as error:
                self._give_up(error)

    return wrapper  # type: ignore[return-value]


class Recorder:
    """The windows of one process, one after the other. Nothing it does raises, whatever fails: see `warnings`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.count = 0
        self.finished = False
        self.warnings: list[str] = []
        # What a ring holds is wanted from before the question on, so its window opens at once.
        self._looks_back = options.ring and options.on_demand is not None
        self._first, self._last = options.first, None if self._looks_back else options.last
        self._pid = os.getpid()
        self._lock = threading.RLock()  # steps by time end on a thread of ours, the job on its own
        self._profiled = False
        self._waits = options.on_demand is not None and not self._looks_back
        self._demand = demand.Demand(Path(options.out))
        self._window: Window | None = None
        self._guard: Guard | None = None
        self._writer = Writer()
        self._remarks: dict[str, bool] = {}  # and whether they were said
        self._told: set[str] = set()

    def remark(self, line: str) -> None:
        """What the reader of a window ought to know of its steps; said once, as the window closes."""
        if self._window is not None and self._window.started:
            self._remarks.setdefault(line, False)

    def warn(self, message: str) -> None:
        """One line on stderr; `stderr` may be closed or full, which is no reason to stop a job."""
        rank = rank_hint()
        line = " ".join(f"rank {rank}: {message}".split()) if rank is not None else " ".join(message.split())
        self.warnings.append(line)
        try:
            sys.stderr.write(f"etloom: {line}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self.warnings.append("stderr could not be written")

    def _warn_once(self, line: str) -> None:
        """What every window may find anew."""
        if line not in self._told:
            self._told.add(line)
            self.warn(line)

    @_never_raises
    def begin(self) -> None:
        """The first sign of training: the current step, 0 if none was told, starts here."""
        from .guard import Guard

        self._guard = Guard(self._yield_to, self.options)
        atexit.register(self.leave)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        # A process forked by multiprocessing leaves through os._exit, past atexit, but runs its finalizers.
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.leave, exitpriority=100)
        if self.count > self._first and not self._waits:
            self._next(f"training began in step {self.count}")
        else:
            self._advance()

    @_never_raises
    def step_done(self) -> None:
        """A step ended: the next one begins."""
        self.count += 1
        if self._waits and not self._asked():
            return
        if self._looks_back and self._last is None and (asked := self._agreed()) is not None:
            self._last = max(asked[1], self.count)
        if self._window is not None or self._first - self.options.lead <= self.count <= self._first:
            self._advance()

    @_never_raises
    def finish(self) -> None:
        """The job, or its recorded part, ends: keep what there is."""
        repeats = self.options.repeats
        if self._window is not None and self._window.started and (self._window.steps or not repeats):
            if not self._window.device_is_done():
                raise RuntimeError("the device did not finish its work within 30 s")
            self._close("the job ended", in_background=False)
        elif self._window is not None and repeats:
            window, self._window = self._window, None
            window.abandon()
        elif not (repeats or self._left_out() or (os.getpid() != self._pid and not self.count)):
            # A forked helper of the job, which never trained, says nothing either.
            self.warn(
                f"the job ended after {self.count} steps, before step {self._first} began (steps "
                f"{self.options.steps}): nothing recorded; ask for earlier steps"
            )
        self.finished = True
        self._dismiss()

    def leave(self) -> None:
        """The end of the process."""
        self.finish()
        self.wait()

    def wait(self) -> None:
        """Until what was recorded is written."""
        if not self._writer.wait():
            self.warn("the disk is too slow: the traces of the window before are dropped")

    def _asked(self) -> bool:
        """Whether somebody has asked for the window; from then on it is as one of given steps."""
        window = self._agreed()
        if window is None:
            return False
        self._first, self._last = window
        if self.count > self._first:
            self.warn(f"this rank saw too late that step {self._first} was agreed on: nothing recorded")
            return False
        self._waits = False
        return True

    def _agreed(self) -> tuple[int, int] | None:
        options = self.options
        return self._demand.agreed(self.count, options.on_demand or 1, ahead=max(3, options.lead + 1))

    def _left_out(self) -> bool:
        ranks = self.options.ranks
        return ranks is not None and current_rank()[0] not in ranks

    def _advance(self) -> None:
        if self._window is None:
            if self._waits or self.count < self._first - self.options.lead:
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
            if self.count == self._last:
                self._close("", in_background=True)
            else:
                window.begin_step(self.count)
        elif self.count >= self._first:
            window.start()
            window.begin_step(self.count)

    def _prepare(self) -> bool:
        from .window import Window

        guard = self._guard
        assert guard is not None
        taken = guard.taken()
        if taken:
            self._next(f"{taken} is in use by the job itself")
            return False
        if self._writer.busy:
            self._next(None if self._looks_back else "the window before is still being written")
            return False
        self._window = Window(self.options.of_window(self._first, self._last))
        self._profiled = True
        with guard.ours():
            self._window.prepare()
        return True

    def _next(self, missed: str | None = None) -> None:
        """On to the next window, if there is one; `missed` says why this one is not recorded."""
        every = self.options.every
        if missed:
            remedy = "" if self.options.repeats else "; choose other steps or turn it off"
            self.warn(f"{missed}: nothing recorded of steps {self._first}:{self._last}{remedy}")
        if every is not None and self._last is not None:
            windows = max(1, -(-(self.count + 1 - self._first) // every))
            self._first, self._last = self._first + windows * every, self._last + windows * every
        elif self._looks_back:
            self._first, self._last = self.count + self.options.lead, None
        elif self.options.on_demand is not None:
            self._waits = True
        else:
            self.finished = True
            self._dismiss()

    def _close(self, because: str, *, in_background: bool) -> None:
        window, self._window = self._window, None
        assert window is not None
        window.stop()
        first, last = self._first, self._last
        if last is not None and not self._looks_back and len(window.steps) < last - first:
            self.warn(
                f"{because} in step {self.count}: {len(window.steps)} whole steps recorded, of steps "
                f"{first}:{last} asked for"
            )
        for line in [line for line, told in self._remarks.items() if not told]:
            self.warn(line)
            self._remarks[line] = True
        said = list(self.warnings)
        if self.options.repeats:  # each window's seal has what was said since the one before
            self.warnings.clear()
        for line in window.warnings:  # which it seals itself
            self._warn_once(line)

        def write() -> None:
            try:
                for line in window.write(said):
                    self._warn_once(line)
            except Exception as error:
                self.warn(f"the traces of steps {first}:{last} are dropped: {_in_words(error)}")
            if self.finished and self._guard is not None:
                self._guard.remove()

        if in_background:
            self._writer.start(write)
        else:
            self.wait()
            write()
        self._next()

    def _yield_to(self, what: str) -> None:
        """The job starts a profiler of its own: a window that is prepared or open, or being written, ends first."""
        with self._lock:
            self.wait()
            if self.finished or self._window is None:
                return
            try:
                if self._window.started:
                    self._close(f"the job started {what}", in_background=False)
                    return
                window, self._window = self._window, None
                window.abandon()
                self._next(f"the job started {what} before step {self._first}")
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.finished = True
        self.warn(f"recording failed in step {self.count}, the job goes on without: {_in_words(error)}")
        window, self._window = self._window, None
        try:
            if window is not None:
                window.abandon()
            self._dismiss()
        except Exception as second:
            self.warn(f"and left something behind: {second!r}")

    def _dismiss(self) -> None:
        if self._guard is not None and not self._writer.busy:
            self._guard.remove()

    def _forked(self) -> None:
        """In a child of fork: a loader's worker must not write, a rank that trains must count for itself."""
        self._lock = threading.RLock()
        self._writer.forget()
        if self.count or self._window is not None:
            self.finished = True
        if self._profiled:
            forking.leave_without_destructors()
        if self._window is not None:
            self._window.forget()


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
