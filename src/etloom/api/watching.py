"""Observes a running job through the state files that its ranks write to the run's folder."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.core.errors import ReadError
from etloom.formats.io.atomic_file import naming_output
from etloom.loading.hang_recordings import WATCH_FOLDER, read_dumps

if TYPE_CHECKING:
    from etloom.analyses.hangs.progress import Observation

INCIDENTS_FOLDER = "incidents"


class JobWatcher:
    """Observes a running job from the state files of its ranks; call `observe` repeatedly.

    Args:
        run: the folder of ``etloom collect --watch``.
        stall_s: seconds without progress after which the job has stalled; default: three steps, at least
            2 s; 60 s while step times are unknown, while all ranks are outside of communication, or wait for a data
            loader; 300 s in a checkpoint.
        settle_s: seconds after a crash in which the other ranks may write their last states.
    """

    def __init__(self, run: Path, stall_s: float | None = None, settle_s: float = 1.5) -> None:
        from etloom.analyses.hangs.progress import JobProgress

        self.run = run
        self._progress = JobProgress(stall_s, settle_s, time.time_ns())

    def observe(self) -> Observation | None:
        """Return the current state of the job (progress, stall or crash); None if no rank has written its state yet."""
        if not (self.run / WATCH_FOLDER).is_dir():
            return None
        try:
            dumps, _ = read_dumps(self.run)
        except ReadError:
            return None
        return self._progress.observe(dumps, time.time_ns())

    def check_is_watched(self) -> None:
        """Raise ReadError if the job has ended and no rank wrote its state: it ran without ``--watch``."""
        from etloom.collector import run_folder

        if (self.run / WATCH_FOLDER).is_dir():
            return
        folders = (self.run, *run_folder.list_windows(self.run))
        if any(run_folder.read_run(folder).get("returncode") is not None for folder in folders):
            raise ReadError(
                "the job has ended and was recorded without --watch",
                where=self.run,
                remedy="record it again with: etloom collect --watch --overwrite "
                f"--out {shlex.quote(str(self.run))} -- COMMAND",
            )

    def keep_incident(self, observation: Observation) -> Path:
        """Save the state of all ranks and the cause of a stall or crash to incidents/TIME in the run's folder.

        Raises OSError.
        """
        folder = self.run / INCIDENTS_FOLDER / time.strftime("%Y%m%d-%H%M%S")
        while folder.exists():
            folder = folder.with_name(f"{folder.name}-2")
        unfinished = shutil.ignore_patterns(".*")
        cause = describe_cause(observation)
        folder.parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            with naming_output(folder):
                shutil.copytree(self.run / WATCH_FOLDER, new, dirs_exist_ok=True, ignore=unfinished)
                (new / "cause.json").write_text(json.dumps(cause, indent=1) + "\n", encoding="utf-8")
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return folder


def describe_cause(observation: Observation) -> dict[str, Any]:
    """Convert the cause of a stall or crash, with its evidence and stalled time, to JSON for webhooks and files."""
    cause = observation.cause
    return {
        "kind": cause.kind if cause else None,
        "ranks": list(cause.ranks) if cause else [],
        "sentence": cause.sentence if cause else None,
        "evidence": cause.evidence.to_dicts() if cause else [],
        "steps": observation.steps,
        "stalled_s": round(observation.stalled_s, 3),
    }
