"""Counts steps, and opens and closes recording windows; used by `record` and by the hooks of `collect`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .. import fork_hold
from ..diagnosis import explain_unrecorded_process
from ..options import RecordingOptions
from ..rank_environment import current_rank
from ..text import count_noun, describe_error
from . import active_recorders, signal_errors
from .messages import MessageLog, ProcessStatus
from .profiler_guard import ProfilerGuard
from .rank_facts import choose_actor_folder
from .schedule import StepTimer, WindowSchedule
from .trace_packing import BackgroundWriter
from .window import Window

_LATER_STEPS = "choose later steps"
_OTHER_STEPS = "choose other steps or turn it off"
_MAX_MISSED_REASONS = 10
_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_raises(method: _Method) -> _Method:
    """Decorate a Recorder method to catch every exception, so that a failure of the collector does not reach the job.

    An exception that a signal handler of the job raises meanwhile, such as a timeout, belongs to the job and is passed
    on.
    """

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: Any) -> None:
        with fork_hold.profiler_lock:  # steps by time end on a thread of the collector
            if self.finished:
                return
            try:
                method(self, *args)
            except Exception as error:
                self._handle_error(error)
                if signal_errors.is_raised_by_handler(error):
                    raise

    return wrapper  # type: ignore[return-value]


class Recorder:
    """Counts the steps of one process, and records the scheduled windows of steps one after the other.

    Its methods never raise; failures are reported in `messages`.

    Attributes:
        count: Number of steps that have ended.
        finished: Nothing more will be recorded.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self.options = options
        self.count = 0
        self.finished = False
        self.messages = MessageLog()
        self.status = ProcessStatus(options.scratch)
        self._schedule = WindowSchedule(options)
        self._pid = os.getpid()
        self._place: str | None = None
        self._ending = False
        self._window: Window | None = None
        self._guard: ProfilerGuard | None = None
        self._writer = BackgroundWriter()
        self._timer = StepTimer()

    def remark(self, line: str) -> None:
        """Store a message about the open recording window; it is printed once, when the window closes."""
        if self._window is not None and self._window.started:
            self.messages.remark(line)

    def report_status(self, **facts: Any) -> bool:
        """Update the process's status file, which the launcher reads; return False if there is no launcher."""
        self.status.facts.update(facts)
        return self.options.supervised and self.status.write()

    @_never_raises
    def begin(self) -> None:
        """Begin to count steps and to watch the job's profilers; called when training begins."""
        self.report_status(began=True, rank=current_rank()[0])
        self._guard = ProfilerGuard(self._yield_to_job, self.options)
        active_recorders.add_recorder(self)
        self._time_step()
        if self.count > self._schedule.first and not self._schedule.is_waiting:
            self._skip_window(f"training began in step {self.count}", _LATER_STEPS)
        else:
            self._advance()

    @_never_raises
    def end_step(self, count: int | None = None) -> None:
        """End the current step and begin the next.

        Args:
            count: Number of the step that begins, if steps have passed that could not be marked.
        """
        passed = 1 if count is None else count - self.count
        self.count += passed
        if passed > 1:
            self.remark(
                "the process was too busy to mark the begin of every step by time: missing step numbers are "
                "included in the step before them, which is longer; choose a longer --step-by"
            )
        schedule = self._schedule
        if schedule.accepts_requests and schedule.poll_requests(self.count):
            self.report_status(requested=[schedule.first, schedule.last])
            if schedule.is_waiting:
                self._report_missed(
                    f"nothing recorded: this rank read the request for step {schedule.first} too late"
                )
        self._time_step()
        if self._window is not None or schedule.is_due(self.count):
            self._advance()

    def _time_step(self) -> None:
        """Record the end time of the current step, unless a profiler runs or traces are being written."""
        if self.options.step_ns is not None or self._window is not None or self._writer.busy:
            return
        if self._guard is None or not self._guard.active_profiler():
            self._timer.mark(self.count)

    @_never_raises
    def finish(self) -> None:
        """End the recording when the job or its recorded part ends; save or discard the open window."""
        self._ending = True
        # A forked helper of the job, which never trained, reports nothing.
        is_helper = os.getpid() != self._pid and not self.count
        error = _uncaught_exception()
        if error is not None and self._schedule.is_unrequested_ring:
            self.remark(f"this window was not requested; it is kept because the job ended with {error}")
        if self._window is not None and self._is_worth_keeping(self._window, error):
            if not self._window.wait_for_device():
                raise RuntimeError("the device did not finish its work within 30 s")
            self._close_window("the job ended", in_background=False)
        elif self._window is not None:
            self._abandon_window()
        if not is_helper:
            self._report_end()
        self.finished = True
        self._remove_guard()

    def _is_worth_keeping(self, window: Window, error: str | None) -> bool:
        if not window.started or (self._schedule.is_unrequested_ring and error is None):
            return False
        return bool(window.steps) or not self.options.has_several_windows

    def _report_end(self) -> None:
        facts = self.status.facts
        if facts.get("recorded") and self._schedule.is_requested:
            self._report_missed(
                f"nothing recorded: the job ended before requested step {self._schedule.first} began"
            )
        if self._schedule.take_late_request(current_rank()[0]):
            self.messages.warn("the last request for a window came too late: no step ended after it")
        is_reported = self.report_status(rank=current_rank()[0], steps=self.count, ended=True)
        is_explained = facts.get("recorded") or facts.get("missed") or self.options.has_several_windows
        if not (is_reported or is_explained):
            self.messages.warn(f"nothing recorded: {explain_unrecorded_process(self.options, facts)}")
        if not self.options.supervised:
            with suppress(OSError):  # created by --print-command; other ranks may still use it
                Path(self.options.scratch).rmdir()

    def finish_process(self) -> None:
        """End the recording at the end of the process: wait until traces are written, and write the final status."""
        self.finish()
        self.wait()
        self.messages.report_total_missed()
        self.report_status(ended=True, raised=_uncaught_exception())

    def retire(self) -> None:
        """Unregister this finished recorder from the handlers at process exit, unless its traces are still written."""
        if not self._writer.busy:
            active_recorders.remove_recorder(self)

    @property
    def is_writing(self) -> bool:
        """True while traces are being written in the background."""
        return self._writer.busy

    def wait(self) -> None:
        """Wait until the traces of recorded windows are written; print a warning if that takes too long."""
        if not self._writer.wait():
            self.messages.warn("the disk is too slow: the traces of the previous window are dropped")

    def continue_in_child(self) -> bool:
        """Adapt this recorder to a forked child; return whether it still has work there.

        A rank that trains counts for itself if no step was counted before the fork. Everything else, such as a
        DataLoader worker, records nothing and writes nothing.
        """
        self.messages = MessageLog()
        self._writer.reset_after_fork()
        if not (self.count or self._window is not None or self.options.step_ns is not None):
            return True
        self.finished = True
        if self._window is not None:
            with suppress(
                Exception
            ):  # of another version of torch; the child goes on with a profiler that runs
                self._window.release_in_child()
        if self._guard is not None:
            self._guard.remove()
        return False

    def _is_excluded(self) -> bool:
        ranks = self.options.ranks
        return ranks is not None and current_rank()[0] not in ranks

    def _advance(self) -> None:
        if self._window is None and not self._open_if_due():
            return
        window = self._window
        assert window is not None
        is_over = self._schedule.is_over(self.count)
        if window.started:
            window.end_step()
            if is_over:
                self._close_window("the window was over", in_background=True)
            else:
                window.begin_step(self.count)
        elif is_over:
            self._abandon_window()
            self._skip_window(f"the profilers were ready only in step {self.count}", _LATER_STEPS)
        elif self.count >= self._schedule.first:
            window.start()
            window.begin_step(self.count)

    def _open_if_due(self) -> bool:
        """Prepare the profilers of the next recording window if it is due; return whether they were prepared."""
        if not self._schedule.is_due(self.count):
            return False
        if self._is_excluded():
            self.report_status(excluded=True, rank=current_rank()[0])
            self.finished = True
            self._remove_guard()
            return False
        if self.count > self._schedule.first:
            reason = f"step {self._schedule.first} was over before its begin could be marked"
            self._skip_window(reason, _LATER_STEPS)
            return False
        return self._prepare_window()

    def _prepare_window(self) -> bool:
        guard = self._guard
        assert guard is not None
        active = guard.active_profiler()
        if active:
            self._skip_window(f"{active} is in use by the job itself")
            return False
        if self._writer.busy:
            self._skip_window(
                None if self._schedule.uses_ring else "the previous window is still being written"
            )
            return False
        if self._place is None:
            self._place = str(choose_actor_folder(Path(self.options.out)))
        options = replace(self.options, out=self._place)
        options = options.for_window(self._schedule.first, self._schedule.last)
        window = Window(options)
        window.timer = self._timer
        if not window.can_start():
            self._skip_window("an operator or a record_function of the previous window has not ended")
            return False
        self._window = window
        active_recorders.mark_profiled()
        with guard.allow_profilers():
            self._window.prepare()
        return True

    def _abandon_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.abandon()

    def _skip_window(self, reason: str | None = None, remedy: str = _OTHER_STEPS) -> None:
        """Schedule the next recording window, or end the recording; report `reason` for the skipped window."""
        if reason:
            suffix = "" if self.options.has_several_windows else f"; {remedy}"
            line = f"nothing recorded of steps {self._schedule}: {reason}{suffix}"
            self._report_missed(line, reason + suffix)
        if not self._schedule.advance(self.count):
            self.finished = True
            self._remove_guard()

    def _report_missed(self, line: str, reason: str | None = None) -> None:
        self.messages.report_missed(line, sparingly=self.options.has_several_windows)
        self._add_missed_reason(reason or line)

    def _add_missed_reason(self, reason: str) -> None:
        reasons = [*self.status.facts.get("missed", ()), reason]
        self.report_status(missed=reasons[-_MAX_MISSED_REASONS:])

    def _close_window(self, reason: str, *, in_background: bool) -> None:
        window, self._window = self._window, None
        assert window is not None
        window.stop()
        steps, length = str(self._schedule), self._schedule.window_length
        if length is not None and len(window.steps) < length and not window.ring_overwrote:
            self.messages.warn(
                f"{reason} in step {self.count}: recorded {count_noun(len(window.steps), 'complete step')} "
                f"of the requested steps {steps}"
            )
        recorded_messages = self.messages.take_for_record(
            has_several_windows=self.options.has_several_windows
        )
        for line in window.warnings:  # the window adds them to its record itself
            self.messages.warn_once(line)

        def write() -> None:
            try:
                for line in window.write(recorded_messages):
                    self.messages.warn_once(line)
                self.report_status(recorded=True)
            except Exception as error:
                self._report_missed(f"the traces of steps {steps} are dropped: {describe_error(error)}")
            if self.finished and self._guard is not None:
                self._guard.remove()

        if in_background:
            self._writer.start(write)
        else:
            self.wait()
            write()
        self._skip_window()

    def _yield_to_job(self, profiler: str) -> None:
        """End the current recording window, and wait for its files, because the job starts the profiler `profiler`."""
        with fork_hold.profiler_lock:
            self.wait()
            if self.finished or self._window is None:
                return
            try:
                if self._window.started:
                    self._close_window(f"the job started {profiler}", in_background=False)
                    return
                self._abandon_window()
                self._skip_window(f"the job started {profiler} before step {self._schedule.first}")
            except Exception as error:
                self._handle_error(error)

    def _handle_error(self, error: Exception) -> None:
        """On a disk error, discard only the current window if others may follow; on other errors, end the recording."""
        is_disk_error = isinstance(error, OSError) and self.options.has_several_windows
        if not is_disk_error or self._guard is None or self._ending:
            self._give_up(error)
            return
        try:
            self._abandon_window()
            self._skip_window(describe_error(error))
        except Exception as second_error:
            self._give_up(second_error)

    def _give_up(self, error: Exception) -> None:
        self.finished = True
        self.messages.report_total_missed()
        reason = (
            f"recording failed in step {self.count}, the job continues without it: {describe_error(error)}"
        )
        self.messages.warn(reason)
        self._add_missed_reason(reason)
        try:
            self._abandon_window()
            self._remove_guard()
        except Exception as second_error:
            self.messages.warn(f"the recording could not be cleaned up: {second_error!r}")

    def _remove_guard(self) -> None:
        if self._guard is not None and not self._writer.busy:
            self._guard.remove()


def _uncaught_exception() -> str | None:
    """Return the class name of the uncaught exception that ends Python, or None."""
    error = getattr(sys, "last_value", None)
    return None if error is None else type(error).__name__
