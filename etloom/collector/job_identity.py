"""Which job a process belongs to, so that traces of two jobs are not put together as one.

Processes of one launch are of one job. Ids of a batch system or of torchrun prove only that two jobs are two. Ranks
could agree on more through the store in which they met, but that is the job's: to ask it may wait behind a thread of
the job, or for a file that is gone, as long as its timeout is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .options import Options

# Of the whole job; a part of it, as a step of SLURM's, may have others.
_BATCH_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_MISSING_IDS = ("", "none")  # what torchrun says where it was given none


def describe_job(options: Options) -> dict[str, Any]:
    """Of a process, for rank_<r>.json: name and id of the batch system's job; torchrun's id; and the `launch`, or the
    process that called `record`, by host, process and chance; supervised: it is a `launch`."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return {
        "batch": next(
            (f"{name}={os.environ[name]}" for name in _BATCH_VARIABLES if os.environ.get(name)), None
        ),
        "rendezvous": None if run in _MISSING_IDS else run,
        "launch": launch_id(options),
        "supervised": options.supervised,
    }


def launch_id(options: Options) -> str:
    return Path(options.scratch).name.removeprefix(".etloom-")


def merge_job_facts(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the ranks of a run say of their job where none contradicts; null where none says anything."""
    told = [rank["job"] for rank in ranks if isinstance(rank.get("job"), dict)]
    if not told:
        return None
    return {
        name: found.pop() if len(found := {job.get(name) for job in told} - {None}) == 1 else None
        for name in ("batch", "rendezvous", "launch")
    }


def find_contradiction(ranks: list[dict[str, Any]]) -> str | None:
    """Why ranks of one window, by their facts, are of several jobs; null where nothing says so."""
    worlds = sorted({rank["world_size"] for rank in ranks})
    if len(worlds) > 1:
        return f"they are of worlds of {worlds[0]} and of {worlds[1]} ranks"
    told = [rank.get("job") or {} for rank in ranks]
    if is_same_launch(ranks):
        return None
    for name, what in (("batch", "jobs of the batch system"), ("rendezvous", "meetings of torchrun")):
        found = sorted({job[name] for job in told if job.get(name)})
        if len(found) > 1:
            return f"they are of different {what}, {found[0]} and {found[1]}"
    return None


def is_same_launch(ranks: list[dict[str, Any]]) -> bool:
    """Whether ranks, by their facts, are surely of one job."""
    launches = {(rank.get("job") or {}).get("launch") for rank in ranks}
    return len(launches) == 1 and None not in launches
