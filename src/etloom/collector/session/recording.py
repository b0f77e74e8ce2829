"""`record`: records steps of a training loop whose code can be edited."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, get_type_hints

from ..observer.native_build import choose_observer
from ..options import (
    RING_WITHOUT_KINETO,
    CollectOptions,
    RecordingOptions,
    RecordKeywords,
    check_keywords,
    check_observer,
    check_types,
    loaded_version,
    local_folder,
    new_scratch_name,
    parse_steps,
    resolve_sources,
)
from ..rank_environment import current_rank
from ..run_folder import claim_folder
from .recorder import Recorder

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack


class Recording:
    """Context manager that records the steps of a training loop; `record` returns it."""

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
        """The messages of the recording that were printed on stderr."""
        return tuple(self._recorder.messages.messages)


def record(
    out: str | os.PathLike[str],
    *,
    steps: str | None = None,
    overwrite: bool = False,
    **options: Unpack[RecordKeywords],
) -> Recording:
    """Record steps of a training loop into the folder `out`.

    Every rank calls it with the same folder.

    Args:
        out: Folder for the traces; {host}, {rank} and {time} are replaced.
        steps: Steps to record: "3:5" is steps 3 and 4, counted from 0. The window opens when the third `rec.step()`
            returns and closes in the fifth; the profilers are prepared in the step before. Default: everything from
            enter to exit.
        overwrite: Replace the traces of an earlier run.
        options: What to record, as in `CollectOptions`: sources, shapes, stack, memory, all_threads, observer,
            max_bytes, ring. The native observer is compiled before the loop (some 20 s, once per torch version); if
            that fails, torch's observer is used.

    Returns:
        A context manager with a method `step()` and the messages as `warnings`.

    Raises:
        CollectError: Before the loop: an option is unknown or invalid, `ring` is requested where the native observer
            cannot be built, or the folder holds earlier traces of this rank. Later failures do not raise: they are
            printed on stderr and listed in `warnings`.

    Example:
        >>> with etloom.record("run/") as rec:  # doctest: +SKIP
        ...     for batch in loader:
        ...         train(batch)
        ...         rec.step()
    """
    check_keywords("record", options, RecordKeywords.__annotations__)
    types = {"steps": str | None, "overwrite": bool, **get_type_hints(RecordKeywords)}
    check_types({"steps": steps, "overwrite": overwrite, **options}, types)
    first, last = parse_steps(steps)
    requested = CollectOptions(**options)
    sources = resolve_sources(requested)
    check_observer(requested, records_et=sources["et"])
    folder = local_folder(os.fspath(out))
    observer, warnings = choose_observer(requested, records_et=sources["et"])
    if requested.ring and requested.sources is None:
        warnings.append(RING_WITHOUT_KINETO)
    claim_folder(folder, overwrite, *current_rank())
    recorder = Recorder(
        RecordingOptions(
            folder,
            new_scratch_name(folder),
            first,
            last,
            all_threads=requested.all_threads,
            observer=observer,
            max_bytes=requested.max_bytes,
            ring=requested.ring,
            etloom_version=loaded_version(),
            command=tuple(sys.orig_argv),
            **sources,
        )
    )
    for warning in warnings:
        recorder.messages.warn(warning)
    return Recording(recorder)
