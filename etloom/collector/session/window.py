"""One window of steps under what the options name, and the files it leaves.

The order is torch.profiler's own (execution trace on, Kineto on; execution trace off, Kineto off), so both
see the same operators; only the record of the process groups, which the observer makes as it starts, stands
in the execution trace alone.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import diagnosis, process_endings, run_folder
from ..atomic_file import write_atomically
from ..launcher.nsys_command import NsysMarkers
from ..options import Options
from ..rank_environment import current_rank
from . import fork_safety, profilers, rank_facts, trace_packing
from .messages import format_ranges


class Window:
    """prepare, start, begin_step and end_step in turn, stop, write; or abandon at any point."""

    def __init__(self, options: Options) -> None:
        self.started = False
        self.steps: deque[int] = deque()  # those that are whole
        self.overwrote = False  # what the ring held of the first ones
        self._begins: deque[int] = deque()  # of the steps, by the monotonic clock
        self.warnings: list[str] = []
        self._options = options
        # By chance too: ranks in containers of their own may all be process 1.
        self._folder = Path(options.scratch) / f"{os.getpid()}-{os.urandom(6).hex()}"
        self._step: Any = None
        self._open_step: int | None = None
        self._observer: Any = None
        self._profile: Any = None
        self._markers: NsysMarkers | None = None
        self._running = self._native = False
        self._rank = (0, 1)
        self._lost = 0  # operators that found no room
        self._groups = 0
        self._marks = 0  # records of ours among the operators
        self._facts: dict[str, Any] = {}

    def prepare(self) -> None:
        """What takes long (about a second, the first time), so that the window itself opens at once."""
        self._folder.mkdir(parents=True)
        options = self._options
        if options.et:
            self._observer, self._native = profilers.open_observer(options, self._folder, self.warnings)
        if options.kineto:
            self._profile = profilers.create_profiler(options, self._observer, self.warnings)
            self._profile.prepare_trace()
        if options.nsys:
            self._markers = NsysMarkers(options.shapes)

    def start(self) -> None:
        self._groups = profilers.count_process_groups()
        self._marks += self._groups > 0
        self._rank = current_rank()
        (self._folder / process_endings.STARTED_FILE).touch()
        if self._native:  # what the launcher needs where this process is killed
            known = rank_facts.rank_facts(self._options, *self._rank)
            self._leave_note(known | {"observer": "native", "start_ns": time.time_ns()})
        self.started = self._running = (
            True  # not before: what is prepared and not started ends in another way
        )
        if self._profile is not None:
            self._profile.start_trace()
        elif self._observer is not None:
            self._observer.start()
        if self._markers is not None:
            self._markers.start()
        self.start_ns = time.time_ns()

    def _leave_note(self, known: dict[str, Any]) -> None:
        window = os.path.relpath(self._options.out, Path(self._options.scratch).parent)
        more = {"window": window, "command": self._options.command}
        write_atomically(self._folder / process_endings.KILLED_NOTE, json.dumps(known | more), self._folder)

    def begin_step(self, number: int) -> None:
        self._open_step = number
        self._begins.append(time.monotonic_ns())
        if self._options.marked:
            return
        from torch.profiler import record_function

        self._marks += 1
        self._step = record_function(f"ProfilerStep#{number}")
        self._step.__enter__()

    def end_step(self) -> None:
        """The step that is open is whole."""
        self._leave_step()
        if self._open_step is not None:
            self.steps.append(self._open_step)
        self._open_step = None
        self._forget_overwritten()

    def _forget_overwritten(self) -> None:
        """A ring runs for days, and what it holds of a step may be its end alone."""
        until = self._observer.overwritten_ns() if self._native and self._options.ring else None
        if until is None:
            return
        self.overwrote = True
        while self.steps and self._begins[0] <= until:
            self.steps.popleft()
            self._begins.popleft()

    def stop(self) -> None:
        """All off; the step that is open, if one is, stays unfinished."""
        if self._native and self._open_step is not None and not self._options.marked:
            self._observer.note(unfinished_step=self._open_step)
        self._leave_step()
        self.end_ns = time.time_ns()
        if self._markers is not None:
            self._markers.stop()
        if profilers.count_process_groups() != self._groups:
            self._note_groups()
            self._marks += 1
        if not self._groups:  # else the job may have left its process group since, and with it its rank
            self._rank = current_rank()
        if self._profile is not None:
            self._profile.stop_trace()
        elif self._observer is not None:
            self._observer.stop()
        self._running = False
        held = self._held() if self._native else {}
        if self._observer is not None:
            self._observer.unregister_callback()
        self._facts = rank_facts.rank_facts(self._options, *self._rank) | {
            "observer": ("native" if self._native else "stock") if self._observer is not None else None,
            "steps": list(self.steps),
            "unfinished_step": self._open_step,
            **held,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "model": self._model_facts(),  # now: at the job's end its objects are gone
        }
        if self._native:
            with suppress(OSError):  # whether the disk takes the files themselves is seen as they are written
                self._leave_note(self._facts)

    def _held(self) -> dict[str, Any]:
        """What our observer's file holds, before it is closed."""
        self._forget_overwritten()
        counters = self._observer.counters()
        if counters["no_space"]:
            self._lost = counters["no_space"]
            self.warnings.append(f"{self._lost} operators are left out, --max-size or the disk is full")
        overwritten = counters["overwritten_operators"]
        marks = self._marks if not overwritten else 0 if self._options.marked else len(self._begins)
        held: dict[str, Any] = {"operators": max(0, counters["operators"] - overwritten - marks)}
        if self._options.ring:
            since_ns = self.start_ns
            if (until := self._observer.overwritten_ns()) is not None:
                since_ns = until + time.time_ns() - time.monotonic_ns()
            held["ring"] = {"overwritten_operators": overwritten, "whole_since_ns": since_ns}
        return held

    def _model_facts(self) -> dict[str, Any]:
        """The job's objects may be of any make: what cannot be told of them must not cost the window."""
        try:
            return rank_facts.model_facts()
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.warnings.append(f"nothing is known of the model: {why[:300]}")
            return {}

    def write(self, warnings: list[str]) -> list[str]:
        """Write the files and seal them; what is worth a warning is returned. Needs nothing of the job's thread."""
        unfinished = None if self._options.marked else self._open_step
        try:
            if self._profile is not None:
                from ..observer.chrome_export import export_chrome_trace

                export_chrome_trace(self._profile, self._folder / "kineto.json")
                operators = trace_packing.pack_kineto(self._folder / "kineto.json", unfinished)
                self._facts.setdefault("operators", operators)
            with_et = self._observer is not None
            self._profile = self._observer = None
            if with_et and not self._native:
                trace_packing.pack_execution_trace(self._folder / "et.json", unfinished)
            if self._options.flight_recorder:
                profilers.dump_flight_recorder(self._folder / "flight_recorder.json", self.warnings)
            if self._facts.get("operators") == 0 and not self._lost:
                self.warnings.append(
                    f"no operator ran in the window, {_steps(self.steps)}: its traces are empty"
                )
            if not self._options.supervised and (ring := diagnosis.describe_ring([self._facts])):
                self.warnings.append(ring)
            sealed = self._facts | {"warnings": [*warnings, *self.warnings]}
            own, self.warnings = self.warnings, []
            said = run_folder.publish_rank(self._folder, Path(self._options.out), sealed, self._options)
            return [*own, *said, *self._prune()]
        finally:
            self._clean()

    def _prune(self) -> list[str]:
        options = self._options
        out, rank, keep = Path(options.out).parent, self._rank[0], options.max_windows
        if not (options.repeats and run_folder.prune_windows(out, rank, keep)) or rank:
            return []
        return [f"only the newest {keep} windows are kept (--max-windows)"]

    def abandon(self) -> None:
        """Leave the process as it was before; nothing is kept."""
        profile, observer = self._profile, self._observer
        self._profile = self._observer = None
        try:
            self._leave_step()
            if self._markers is not None:
                self._markers.stop()
            if (
                profile is not None
                and profile.profiler is not None
                and profile.profiler.kineto_results is None
            ):
                # A prepared session is ended the way torch ends one: started and stopped.
                if not self._running:
                    if observer is not None:
                        observer.unregister_callback()
                    profile.start_trace()
                profile.stop_trace()
        finally:
            self._running = False
            if observer is not None:
                observer.unregister_callback()
            self._clean()

    def forget(self) -> None:
        """In a child of fork: the open file and both profilers are the parent's; let go, write nothing."""
        from torch._C._autograd import _enable_record_function

        _enable_record_function(False)
        if self._observer is not None and not self._native:
            self._observer._registered = self._observer._execution_trace_running = False
            fork_safety.redirect_to_null(self._folder / "et.json")

    def device_is_done(self, timeout_s: float = 30.0) -> bool:
        """False where the device hangs, as in a collective that lost a rank: a stop would hang too."""
        import torch

        if not rank_facts.is_cuda_in_use():
            return True
        waiter = threading.Thread(target=torch.cuda.synchronize, daemon=True)
        try:
            waiter.start()
        except RuntimeError:  # Python is ending: no threads any more
            return True
        waiter.join(timeout_s)
        return not waiter.is_alive()

    def _leave_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _note_groups(self) -> None:
        """Process groups made inside the window: both observers noted groups only as they started."""
        try:
            if self._observer is not None and not self._native:  # ours looks again as it stops
                self._observer._record_pg_config()
            if not self._groups and self._profile is not None:
                self._profile.add_metadata_json(
                    "distributedInfo", json.dumps(self._profile._get_distributed_info())
                )
        except (AttributeError, TypeError, ValueError) as error:
            self.warnings.append(f"process groups made inside the window are not noted: {error}")

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._options.repeats:
            return
        try:
            self._folder.parent.rmdir()
        except OSError:
            return  # other ranks of the run still use it


def _steps(steps: Sequence[int]) -> str:
    return f"steps {format_ranges(list(steps))}" if steps else "in which no step ended"
