"""Identifies the job of a process, so that traces of two jobs are not joined.

Processes of one launch belong to one job. Ids of a batch system or of torchrun only prove that two jobs differ. Ranks
could agree on more through the store of their process group, but that belongs to the job: a query may wait behind a
thread of the job, or for a deleted file, until its timeout.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .options import RecordingOptions

# Ids of the whole job; parts of it, such as steps of SLURM, may have ids of their own.
_BATCH_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_MISSING_IDS = ("", "none")  # torchrun's value if it was started without an id


def describe_job(options: RecordingOptions) -> dict[str, Any]:
    """Return the ids of the job to which this process belongs, for its record rank_<r>.json.

    Its keys: batch (variable and id of the batch system's job), rendezvous (torchrun's id), launch (the `collect`, or
    the process that called `record`, by host, pid and a random id), supervised (whether it is a `collect`).
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    batch_ids = (f"{name}={os.environ[name]}" for name in _BATCH_VARIABLES if os.environ.get(name))
    return {
        "batch": next(batch_ids, None),
        "rendezvous": None if run_id in _MISSING_IDS else run_id,
        "launch": launch_id(options),
        "supervised": options.supervised,
    }


def launch_id(options: RecordingOptions) -> str:
    return Path(options.scratch).name.removeprefix(".etloom-")


def merge_job_facts(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Merge the ranks' batch, rendezvous and launch ids; an id that differs is None. None if no rank recorded ids."""
    jobs = [rank["job"] for rank in ranks if isinstance(rank.get("job"), dict)]
    if not jobs:
        return None
    merged: dict[str, Any] = {}
    for name in ("batch", "rendezvous", "launch"):
        values = {job.get(name) for job in jobs} - {None}
        merged[name] = values.pop() if len(values) == 1 else None
    return merged


def find_contradiction(ranks: list[dict[str, Any]]) -> str | None:
    """Return the reason why the ranks of a recording window cannot belong to the same job; None if they can."""
    world_sizes = sorted({rank["world_size"] for rank in ranks})
    if len(world_sizes) > 1:
        return f"their world sizes differ, {world_sizes[0]} and {world_sizes[1]}"
    if is_same_launch(ranks):
        return None
    jobs = [rank.get("job") or {} for rank in ranks]
    for name, description in (("batch", "batch system jobs"), ("rendezvous", "torchrun ids")):
        ids = sorted({job[name] for job in jobs if job.get(name)})
        if len(ids) > 1:
            return f"their {description} differ, {ids[0]} and {ids[1]}"
    return None


def is_same_launch(ranks: list[dict[str, Any]]) -> bool:
    """Return whether all ranks have the same launch id, which proves that they belong to one job."""
    launches = {(rank.get("job") or {}).get("launch") for rank in ranks}
    return len(launches) == 1 and None not in launches
