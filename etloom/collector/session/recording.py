"""`record`: records steps of a training loop whose code can be edited."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..observer.choice import choose_observer
from ..option_parsing import expand_folder_name, parse_steps
from ..option_rules import RING_WITHOUT_KINETO, check_observer, resolve_sources
from ..options import CollectOptions, RecordingOptions, loaded_version, new_scratch_name
from ..rank_environment import current_rank
from ..run_folder import claim_folder
from .recorder import Recorder

if TYPE_CHECKING:
    from types import TracebackType


class Recording:
    """The context manager that `record` returns."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> Recording:
        self._recorder.begin()
        return self

    def step(self) -> None:
        """Mark the end of a step; call it at the end of every iteration."""
        self._recorder.end_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.finish()
        self._recorder.wait()
        self._recorder.retire()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages that were printed on stderr."""
        return tuple(self._recorder.messages.messages)


def record(
    out: str | os.PathLike[str],
    *,
    steps: str | None = None,
    shapes: bool | None = None,
    stack: bool = False,
    memory: bool = False,
    all_threads: bool = True,
    sources: str | None = None,
    observer: str = "native",
    max_bytes: int | None = None,
    ring: bool = False,
    overwrite: bool = False,
) -> Recording:
    """Record steps of a training loop into the folder `out`.

    Every rank calls it with the same folder.

    Args:
        out: Folder for the traces; {host}, {rank} and {time} are replaced.
        steps: Steps to record: "3:5" is steps 3 and 4, counted from 0. The window opens when the third `rec.step()`
            returns and closes in the fifth; the profilers are prepared in the step before. Default: everything from
            enter to exit.
        shapes: Record input shapes, as torch.profiler's record_shapes (default: true).
        stack: Record Python stacks, as torch.profiler's with_stack.
        memory: Record allocations, as torch.profiler's profile_memory.
        all_threads: Also profile threads that Python code starts.
        sources: Everything to record, such as "kineto,et,shapes"; replaces `shapes`, `stack` and `memory`.
        observer: "native" is etloom's own, compiled before the loop (some 20 s, once per torch version), with torch's
            as the fallback; "stock" is torch's.
        max_bytes: Size limit of the native observer's file, in bytes.
        ring: At `max_bytes`, overwrite the oldest operators instead of stopping.
        overwrite: Replace the traces of an earlier run.

    Returns:
        A context manager with a method `step()` and the messages as `warnings`.

    Raises:
        CollectError: Before the loop: an option is invalid, `ring` is requested where the native observer cannot be
            built, or the folder holds earlier traces of this rank. Later failures do not raise: they are printed on
            stderr and listed in `warnings`.

    Example:
        >>> with etloom.record("run/") as rec:  # doctest: +SKIP
        ...     for batch in loader:
        ...         train(batch)
        ...         rec.step()
    """
    first, last = parse_steps(steps)
    options = CollectOptions(
        sources=sources,
        shapes=shapes,
        stack=stack,
        memory=memory,
        observer=observer,
        max_bytes=max_bytes,
        ring=ring,
    )
    source_fields = resolve_sources(options)
    check_observer(options, records_et=source_fields["et"])
    folder = os.path.abspath(expand_folder_name(os.fspath(out)))  # noqa: PTH100
    usable_observer, warnings = choose_observer(options, records_et=source_fields["et"])
    claim_folder(folder, overwrite, *current_rank())
    recorder = Recorder(
        RecordingOptions(
            folder,
            new_scratch_name(folder),
            first,
            last,
            all_threads=all_threads,
            observer=usable_observer,
            max_bytes=max_bytes,
            ring=ring,
            etloom_version=loaded_version(),
            command=tuple(sys.orig_argv),
            **source_fields,
        )
    )
    if ring and sources is None:
        warnings.append(RING_WITHOUT_KINETO)
    for warning in warnings:
        recorder.messages.warn(warning)
    return Recording(recorder)
