"""Records one window of steps with the selected profilers and writes its files.

The profilers start and stop in the order of torch.profiler (execution trace on, Kineto on; execution trace off,
Kineto off), so both see the same operators; only the record of the process groups, which the observer writes when it
starts, is in the execution trace alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ..atomic_file import write_atomically
from ..diagnosis import describe_ring
from ..observer.profiler_gate import GateError, export_chrome_trace, open_gate
from ..options import RecordingOptions
from ..process_endings import KILLED_NOTE, STARTED_FILE
from ..rank_environment import current_rank
from ..run_folder import prune_windows, publish_rank
from ..text import format_ranges
from . import fork_safety, model_facts, profilers, trace_packing
from .profilers import NsysCapture
from .rank_facts import collect_rank_facts, is_cuda_in_use
from .schedule import StepTimer
from .source_lines import read_source_lines
from .work_waits import WorkWaits

_MAX_ERROR_LENGTH = 300


class Window:
    """Records one window of steps: call prepare, start, begin_step and end_step in turn, stop, write; or abandon.

    Attributes:
        started: Recording has begun.
        steps: Numbers of the complete steps.
        ring_overwrote: The ring has overwritten the first steps.
        warnings: Messages about what could not be recorded.
        timer: Has the step time before the window.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self.started = False
        self.steps: deque[int] = deque()
        self.ring_overwrote = False
        self.warnings: list[str] = []
        self._step_begins_ns: deque[int] = (
            deque()
        )  # of complete steps and the open one, by the monotonic clock
        self._options = options
        # The random part: ranks in containers of their own may all be process 1.
        self._folder = Path(options.scratch) / f"{os.getpid()}-{os.urandom(6).hex()}"
        self._step_scope: Any = None
        self._open_step: int | None = None
        self._observer: Any = None
        self._profile: Any = None
        self._gate = open_gate() if options.kineto and options.all_threads else None
        self._nsys: NsysCapture | None = None
        self._running = self._is_native = False
        self._rank = (0, 1)
        self._dropped_operators = 0
        self._group_count = 0
        self._marker_records = 0  # records of the collector among the operators
        self._facts: dict[str, Any] = {}
        self._work_waits = WorkWaits()
        self.timer = StepTimer()

    def can_start(self) -> bool:
        """Return False while an operator of an earlier window still runs: torch would write its end to freed memory."""
        return self._gate is None or self._gate.is_clear()

    def prepare(self) -> None:
        """Open the observer and prepare the profilers before the window (1 s the first time), so `start` is fast."""
        self._folder.mkdir(parents=True)
        options = self._options
        if options.et:
            self._observer, self._is_native = profilers.open_observer(options, self._folder, self.warnings)
        if options.kineto:
            self._profile = profilers.create_profiler(options, self._observer, self.warnings)
            self._profile.prepare_trace()
        if options.nsys:
            self._nsys = NsysCapture(options.shapes)

    def start(self) -> None:
        """Start the profilers of the recording window."""
        self._group_count = profilers.count_process_groups()
        self._marker_records += self._group_count > 0
        self._rank = current_rank()
        (self._folder / STARTED_FILE).touch()
        if self._is_native:
            facts = collect_rank_facts(self._options, *self._rank)
            self._write_killed_note(facts | {"observer": "native", "start_ns": time.time_ns()})
        # Not earlier: a window that is prepared and not started ends in another way.
        self.started = self._running = True
        self._start_profilers()
        if self._options.et:
            self._work_waits.start()
        if self._nsys is not None:
            self._nsys.start()
        self.start_ns = time.time_ns()

    def _start_profilers(self) -> None:
        if self._profile is not None:
            with nullcontext() if self._gate is None else self._gate.starting():
                self._profile.start_trace()
        elif self._observer is not None:
            self._observer.start()

    def _stop_profilers(self) -> None:
        if self._profile is not None:
            try:
                with nullcontext() if self._gate is None else self._gate.stopping():
                    self._profile.stop_trace()
            except GateError:
                fork_safety.remove_callbacks(kineto=True, stock_observer=False)
                self._profile = None  # its session stays open
                raise
        elif self._observer is not None:
            self._observer.stop()

    def _write_killed_note(self, facts: dict[str, Any]) -> None:
        """Write killed.json: facts from which the launcher recovers this window if the process is killed."""
        window = os.path.relpath(self._options.out, Path(self._options.scratch).parent)
        note = facts | {"window": window, "command": self._options.command}
        write_atomically(self._folder / KILLED_NOTE, json.dumps(note), self._folder)

    def begin_step(self, number: int) -> None:
        """Mark the beginning of the step `number` in the traces."""
        self._open_step = number
        self._step_begins_ns.append(time.monotonic_ns())
        if self._options.job_marks_steps:
            return
        from torch.profiler import record_function

        self._marker_records += 1
        self._step_scope = record_function(f"ProfilerStep#{number}")
        self._step_scope.__enter__()

    def end_step(self) -> None:
        """Mark the end of the open step in the traces, and count the step as complete."""
        self._leave_step_scope()
        if self._open_step is not None:
            self.steps.append(self._open_step)
        self._open_step = None
        self._drop_overwritten_steps()

    def _drop_overwritten_steps(self) -> None:
        """Remove from `steps` the steps whose beginning has been overwritten in the ring buffer."""
        overwritten_ns = None
        if self._is_native and self._options.ring:
            overwritten_ns = self._observer.overwritten_ns()
        if overwritten_ns is None:
            return
        self.ring_overwrote = True
        while self.steps and self._step_begins_ns[0] <= overwritten_ns:
            self.steps.popleft()
            self._step_begins_ns.popleft()

    def stop(self) -> None:
        """Stop the profilers; a step that is open stays unfinished."""
        if self._is_native and self._open_step is not None and not self._options.job_marks_steps:
            self._observer.note(unfinished_step=self._open_step)
        self._leave_step_scope()
        self._work_waits.stop()
        self.end_ns = time.time_ns()
        if self._nsys is not None:
            self._nsys.stop()
        if profilers.count_process_groups() != self._group_count:
            self._record_new_groups()
            self._marker_records += 1
        if not self._group_count:  # otherwise the job may have left its process group, and with it its rank
            self._rank = current_rank()
        self._stop_profilers()
        self._running = False
        contents = self._observer_contents() if self._is_native else {}
        if self._observer is not None:
            self._observer.unregister_callback()
        self._facts = collect_rank_facts(self._options, *self._rank) | {
            "observer": ("native" if self._is_native else "stock") if self._observer is not None else None,
            "steps": list(self.steps),
            "unfinished_step": self._open_step,
            "unrecorded": self.timer.measure(),
            **contents,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "model": self._model_facts(),  # now: at the job's end its objects are gone
        }
        if self._is_native:
            with suppress(OSError):  # a full disk is reported when the files themselves are written
                self._write_killed_note(self._facts)

    def _observer_contents(self) -> dict[str, Any]:
        """Return the number of operators in the observer's file and, for a ring buffer, of overwritten operators."""
        self._drop_overwritten_steps()
        counters = self._observer.counters()
        if counters["no_space"]:
            self._dropped_operators = counters["no_space"]
            self.warnings.append(
                f"{self._dropped_operators} operators are not recorded: --max-size is reached or the disk is full"
            )
        overwritten = counters["overwritten_operators"]
        marker_records = self._marker_records + self._work_waits.count
        if overwritten:
            marker_records = 0 if self._options.job_marks_steps else len(self._step_begins_ns)
        contents: dict[str, Any] = {"operators": max(0, counters["operators"] - overwritten - marker_records)}
        if self._options.ring:
            since_ns = self.start_ns
            if (overwritten_ns := self._observer.overwritten_ns()) is not None:
                since_ns = overwritten_ns + time.time_ns() - time.monotonic_ns()
            contents["ring"] = {"overwritten_operators": overwritten, "whole_since_ns": since_ns}
        return contents

    def _model_facts(self) -> dict[str, Any]:
        """Return facts about the job's model; on an error, add a warning, so that the recording window is not lost."""
        try:
            return model_facts.collect_model_facts()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.warnings.append(f"the model could not be inspected: {reason[:_MAX_ERROR_LENGTH]}")
            return {}

    def write(self, messages: list[str]) -> list[str]:
        """Compress the traces and move them to their final names, with a record of the rank; may run on any thread.

        Args:
            messages: Messages to store in the record of the rank, in addition to `warnings`.

        Returns:
            Warnings.
        """
        try:
            self._pack_traces()
            if self._facts.get("operators") == 0 and not self._dropped_operators:
                steps = _describe_steps(self.steps)
                rest = (
                    "; the Kineto trace has what else ran, such as device graphs"
                    if self._options.kineto
                    else ""
                )
                self.warnings.append(f"no operator ran in the window, {steps}{rest}")
            if not self._options.supervised and (ring := describe_ring([self._facts])):
                self.warnings.append(ring)
            facts = self._facts | {"warnings": [*messages, *self.warnings]}
            window_warnings, self.warnings = self.warnings, []
            warnings = publish_rank(self._folder, Path(self._options.out), facts, self._options)
            return [*window_warnings, *warnings, *self._prune()]
        finally:
            self._remove_scratch()

    def _pack_traces(self) -> None:
        unfinished_step = None if self._options.job_marks_steps else self._open_step
        if self._profile is not None:
            export_chrome_trace(self._profile, self._folder / "kineto.json")
            # Ranks run the same code.
            frames: set[bytes] | None = set() if self._options.source_lines and not self._rank[0] else None
            operators = trace_packing.pack_kineto(self._folder / "kineto.json", unfinished_step, frames)
            self._facts.setdefault("operators", operators)
            if frames:
                self._facts["source_lines"] = read_source_lines(
                    name.decode("utf-8", "replace") for name in frames
                )
        uses_stock_observer = self._observer is not None and not self._is_native
        self._profile = self._observer = None
        if uses_stock_observer:
            trace_packing.pack_execution_trace(self._folder / "et.json", unfinished_step)
        if self._options.flight_recorder:
            profilers.dump_flight_recorder(self._folder / "flight_recorder.json", self.warnings)

    def _prune(self) -> list[str]:
        options = self._options
        if not options.has_several_windows:
            return []
        rank, keep = self._rank[0], options.max_windows
        if not prune_windows(Path(options.out).parent, rank, keep) or rank:
            return []
        return [f"only the newest {keep} windows are kept (--max-windows)"]

    def abandon(self) -> None:
        """Stop the profilers, delete the unfinished files of the window and publish nothing."""
        observer = self._observer
        self._work_waits.stop()
        try:
            self._leave_step_scope()
            if self._nsys is not None:
                self._nsys.stop()
            profiler = None if self._profile is None else self._profile.profiler
            if profiler is not None and profiler.kineto_results is None:
                # torch ends a prepared session by starting and stopping it.
                if not self._running:
                    if observer is not None:
                        observer.unregister_callback()
                    self._start_profilers()
                self._stop_profilers()
        finally:
            self._profile = self._observer = None
            self._running = False
            try:
                if observer is not None:
                    observer.unregister_callback()
            finally:
                self._remove_scratch()

    def release_in_child(self) -> None:
        """In a forked child, release the parent's trace file and profilers without writing to the file.

        The native observer does the same itself (pthread_atfork), also in children that Python does not know of.
        """
        self._work_waits.stop()
        records_stock = self._observer is not None and not self._is_native
        if records_stock:
            self._observer._registered = self._observer._execution_trace_running = False
            fork_safety.redirect_to_null(self._folder / "et.json")
        if self._running:
            fork_safety.remove_callbacks_in_child(
                kineto=self._profile is not None, stock_observer=records_stock
            )
            if self._gate is not None:
                self._gate.remove()
            if self._options.stack and self._profile is not None:
                sys.setprofile(None)

    def wait_for_device(self, timeout_s: float = 30.0) -> bool:
        """Wait until the GPU has finished all work; return False if that takes longer than ``timeout_s`` seconds.

        A collective that waits for a lost rank never ends, and stopping the profiler would then hang too.
        """
        import torch

        if not is_cuda_in_use():
            return True
        waiter = threading.Thread(target=torch.cuda.synchronize, name="etloom-device", daemon=True)
        try:
            waiter.start()
        except RuntimeError:  # Python is ending and starts no more threads
            return True
        waiter.join(timeout_s)
        return not waiter.is_alive()

    def _leave_step_scope(self) -> None:
        scope, self._step_scope = self._step_scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def _record_new_groups(self) -> None:
        """Record process groups that were created during the window; torch's observer and profiler miss them."""
        try:
            if (
                self._observer is not None and not self._is_native
            ):  # the native one checks again when it stops
                self._observer._record_pg_config()
            if not self._group_count and self._profile is not None:
                self._profile.add_metadata_json(
                    "distributedInfo", json.dumps(self._profile._get_distributed_info())
                )
        except (AttributeError, TypeError, ValueError) as error:
            self.warnings.append(f"process groups created in the window are not recorded: {error}")

    def _remove_scratch(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._options.has_several_windows:
            return
        try:
            self._folder.parent.rmdir()
        except OSError:
            return  # other ranks of the run still use it


def _describe_steps(steps: Sequence[int]) -> str:
    return f"steps {format_ranges(list(steps))}" if steps else "in which no step ended"
