"""Counts steps and opens and closes windows: the same for `record` and for the hooks of `launch`."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..diagnosis import explain_unrecorded_process
from ..options import Options
from ..rank_environment import current_rank
from . import active_recorders
from .background_writer import BackgroundWriter
from .messages import MessageLog, count_noun, describe_error
from .process_status import ProcessStatus
from .schedule import WindowSchedule

if TYPE_CHECKING:
    from .profiler_guard import Guard
    from .window import Window

_LATER_STEPS = "ask for later steps"
_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_raises(method: _Method) -> _Method:
    """A failure here is ours, not the job's."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: Any) -> None:
        with self._lock:
            if self.finished:
                return
            try:
                method(self, *args)
            except Exception as error:
                self._mishap(error)

    return wrapper  # type: ignore[return-value]


class Recorder:
    """The windows of one process, one after the other. Nothing it does raises, whatever fails: see `words`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.count = 0
        self.finished = False
        self.words = MessageLog()
        self.seen = ProcessStatus(options.scratch)
        self._plan = WindowSchedule(options)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # steps by time end on a thread of ours, the job on its own
        self._ending = False
        self._window: Window | None = None
        self._guard: Guard | None = None
        self._writer = BackgroundWriter()

    def remark(self, line: str) -> None:
        """What the reader of a window ought to know of its steps; said once, as the window closes."""
        if self._window is not None and self._window.started:
            self.words.remark(line)

    def note(self, **facts: Any) -> bool:
        """Tell the launcher, if there is one, what it may have to explain; False where it does not hear."""
        self.seen.facts.update(facts)
        return self.options.supervised and self.seen.leave()

    @_never_raises
    def begin(self) -> None:
        """The first sign of training: the current step, 0 if none was told, starts here."""
        from .profiler_guard import Guard

        self.note(began=True, rank=current_rank()[0])
        self._guard = Guard(self._yield_to, self.options)
        active_recorders.add_recorder(self)
        if self.count > self._plan.first and not self._plan.waits:
            self._next(f"training began in step {self.count}", _LATER_STEPS)
        else:
            self._advance()

    @_never_raises
    def step_done(self, count: int | None = None) -> None:
        """A step ended: the next one begins, or step `count`, where steps went by that nobody could mark."""
        passed = 1 if count is None else count - self.count
        self.count += passed
        if passed > 1:
            self.remark(
                "the process was too busy to mark the begin of every step of time: the numbers that are missing count "
                "to the step before them, which is longer; choose a longer --step-by"
            )
        if self._plan.listens and self._plan.hear(self.count):
            self.note(asked=[self._plan.first, self._plan.last])
            if self._plan.waits:
                line = f"this rank saw too late that step {self._plan.first} was agreed on: nothing recorded"
                self._miss(line)
        if self._window is not None or self._plan.due(self.count):
            self._advance()

    @_never_raises
    def finish(self) -> None:
        """The job, or its recorded part, ends: keep what there is."""
        self._ending = True
        repeats = self.options.repeats
        # A forked helper of the job, which never trained, says nothing.
        helper = os.getpid() != self._pid and not self.count
        error = _uncaught_exception()
        if error is not None and self._plan.unasked:
            self.remark(f"nobody asked for this window: it is kept because the job ended by {error}")
        wanted = error is not None or not self._plan.unasked
        if (
            self._window is not None
            and self._window.started
            and wanted
            and (self._window.steps or not repeats)
        ):
            if not self._window.device_is_done():
                raise RuntimeError("the device did not finish its work within 30 s")
            self._close("the job ended", in_background=False)
        elif self._window is not None:
            window, self._window = self._window, None
            window.abandon()
        if not helper:
            self._tell_of_the_end()
        self.finished = True
        self._dismiss()

    def _tell_of_the_end(self) -> None:
        facts = self.seen.facts
        if facts.get("sealed") and self._plan.agreed_on:
            self._miss(f"the job ended before step {self._plan.first}, asked for, began: nothing recorded")
        if self._plan.asked_too_late(current_rank()[0]):
            self.words.warn("asked for a window too late: no step ended after that")
        told = self.note(rank=current_rank()[0], steps=self.count, ended=True)
        if not (told or facts.get("sealed") or facts.get("missed") or self.options.repeats):
            self.words.warn(f"nothing recorded: {explain_unrecorded_process(self.options, facts)}")
        if not self.options.supervised:
            with suppress(OSError):  # as --print-command makes it; other ranks may still use it
                Path(self.options.scratch).rmdir()

    def leave(self) -> None:
        """The end of the process."""
        self.finish()
        self.wait()
        self.words.sum_up()
        self.note(ended=True, raised=_uncaught_exception())

    def retire(self) -> None:
        """It is finished, and nobody waits for it at the end of the process, unless for its files."""
        if not self._writer.busy:
            active_recorders.remove_recorder(self)

    def wait(self) -> None:
        """Until what was recorded is written."""
        if not self._writer.wait():
            self.words.warn("the disk is too slow: the traces of the window before are dropped")

    def _left_out(self) -> bool:
        ranks = self.options.ranks
        return ranks is not None and current_rank()[0] not in ranks

    def _advance(self) -> None:
        if self._window is None:
            if not self._plan.due(self.count):
                return
            if self._left_out():
                self.note(left_out=True, rank=current_rank()[0])
                self.finished = True
                self._dismiss()
                return
            if self.count > self._plan.first:
                self._next(f"step {self._plan.first} was over before its begin could be marked", _LATER_STEPS)
                return
            if not self._prepare():
                return
        window = self._window
        assert window is not None
        over = self._plan.over(self.count)
        if window.started:
            window.end_step()
            if over:
                self._close("the window was over", in_background=True)
            else:
                window.begin_step(self.count)
        elif over:
            self._window = None
            window.abandon()
            self._next(f"the profilers were ready only in step {self.count}", _LATER_STEPS)
        elif self.count >= self._plan.first:
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
            self._next(None if self._plan.looks_back else "the window before is still being written")
            return False
        self._window = Window(self.options.of_window(self._plan.first, self._plan.last))
        active_recorders.mark_profiled()
        with guard.ours():
            self._window.prepare()
        return True

    def _next(self, missed: str | None = None, remedy: str = "choose other steps or turn it off") -> None:
        """On to the next window, if there is one; `missed` says why this one is not recorded."""
        if missed:
            remedy = "" if self.options.repeats else f"; {remedy}"
            self._miss(f"{missed}: nothing recorded of steps {self._plan}{remedy}", missed + remedy)
        if not self._plan.go_on(self.count):
            self.finished = True
            self._dismiss()

    def _miss(self, line: str, why: str | None = None) -> None:
        self.words.miss(line, sparingly=self.options.repeats)
        self._note_missed(why or line)

    def _note_missed(self, why: str) -> None:
        self.note(missed=[*self.seen.facts.get("missed", ()), why][-10:])

    def _close(self, because: str, *, in_background: bool) -> None:
        window, self._window = self._window, None
        assert window is not None
        window.stop()
        steps, asked = str(self._plan), self._plan.asked
        if asked is not None and len(window.steps) < asked and not window.overwrote:
            self.words.warn(
                f"{because} in step {self.count}: {count_noun(len(window.steps), 'whole step')} recorded, of steps "
                f"{steps} asked for"
            )
        said = self.words.seal(repeats=self.options.repeats)
        for line in window.warnings:  # which it seals itself
            self.words.warn_once(line)

        def write() -> None:
            try:
                for line in window.write(said):
                    self.words.warn_once(line)
                self.note(sealed=True)
            except Exception as error:
                self._miss(f"the traces of steps {steps} are dropped: {describe_error(error)}")
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
                self._next(f"the job started {what} before step {self._plan.first}")
            except Exception as error:
                self._mishap(error)

    def _mishap(self, error: Exception) -> None:
        """Of several windows a disk that is full for a moment costs one; what else fails ends the recording."""
        if not isinstance(error, OSError) or not self.options.repeats or self._guard is None or self._ending:
            self._give_up(error)
            return
        window, self._window = self._window, None
        try:
            if window is not None:
                window.abandon()
            self._next(describe_error(error))
        except Exception as second:
            self._give_up(second)

    def _give_up(self, error: Exception) -> None:
        self.finished = True
        self.words.sum_up()
        why = f"recording failed in step {self.count}, the job goes on without: {describe_error(error)}"
        self.words.warn(why)
        self._note_missed(why)
        window, self._window = self._window, None
        try:
            if window is not None:
                window.abandon()
            self._dismiss()
        except Exception as second:
            self.words.warn(f"and left something behind: {second!r}")

    def _dismiss(self) -> None:
        if self._guard is not None and not self._writer.busy:
            self._guard.remove()

    def forked(self) -> None:
        """In a child of fork: a loader's worker must not write, a rank that trains must count for itself."""
        self._lock = threading.RLock()
        self.seen.forked()
        self.words = MessageLog()
        self._writer.forget()
        if self.count or self._window is not None:
            self.finished = True
        if self._window is not None:
            self._window.forget()


def _uncaught_exception() -> str | None:
    """The class of what Python ends with, where nothing caught it; null before its end."""
    error = getattr(sys, "last_value", None)
    return None if error is None else type(error).__name__
