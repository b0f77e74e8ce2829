"""`record`: the collector inside a training loop that one can edit."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .. import option_rules, run_folder
from ..option_parsing import expand_folder_name, parse_steps
from ..options import Options, loaded_version, new_scratch_name
from ..rank_environment import current_rank
from .recorder import Recorder

if TYPE_CHECKING:
    from types import TracebackType


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
        self._recorder.wait()
        self._recorder.retire()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._recorder.words.said)


def record(
    out: str | os.PathLike[str],
    *,
    steps: str | None = None,
    shapes: bool | None = None,
    stack: bool = False,
    memory: bool = False,
    all_threads: bool = True,
    what: str | None = None,
    observer: str = "native",
    max_bytes: int | None = None,
    ring: bool = False,
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
    profile_memory; `all_threads` lets it see threads that Python code starts. `what` names all that is recorded
    instead, as --with does: "kineto,et,shapes". `observer` "native" is our own, built here before the loop where
    it was not for this torch (some 20 s, once; torch's records where it cannot be); `max_bytes` and `ring` bound
    its file. Every rank calls it with the same folder; {host}, {rank} and {time} in its name are filled in.

    Raises CollectError, before the loop, for a `steps` that is no range, for a `ring` where our observer cannot be
    built, and for a folder that already holds traces of this rank (unless `overwrite`). After that nothing raises: a
    failure is a line on stderr and in `warnings`.
    """
    from ..launcher.collection import choose_observer

    first, last = parse_steps(steps)
    found = option_rules.resolve_sources(what, shapes=shapes, stack=stack, memory=memory, ring=ring)
    option_rules.check_observer(found, observer, ring=ring, max_bytes=max_bytes)
    folder = os.path.abspath(expand_folder_name(os.fspath(out)))  # noqa: PTH100
    usable, unbuilt = choose_observer(found, observer, ring=ring, max_bytes=max_bytes)
    run_folder.claim_folder(folder, overwrite, *current_rank())
    options = Options(
        folder,
        new_scratch_name(folder),
        first,
        last,
        all_threads=all_threads,
        observer=usable,
        max_bytes=max_bytes,
        ring=ring,
        etloom=loaded_version(),
        command=tuple(sys.orig_argv),
        **found,
    )
    recorder = Recorder(options)
    if ring and what is None:
        unbuilt.append(option_rules.RING_WITHOUT_KINETO)
    for line in unbuilt:
        recorder.words.warn(line)
    return Recording(recorder)
