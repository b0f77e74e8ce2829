"""Which job a process belongs to, so that traces of two jobs are not put together as one.

The ranks of a job share the store they met in, and agree there on a token that chance made: two ranks with one token
are of one job, and with two tokens of two (a job that its launcher restarted meets anew, and counts as another).
Without a process group there is none. Ids of a batch system or of torchrun prove only that two jobs are two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .options import Options

_KEY = "etloom/job"
# Of the whole job; a part of it, as a step of SLURM's, may have others.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_NO_ID = ("", "none")  # what torchrun says where it was given none


class Token:
    """What the ranks of this job have agreed on, and no other job has: `value`, null without a process group."""

    def __init__(self) -> None:
        self.value: str | None = None
        self._asked = False

    def ask(self) -> str | None:
        """Once, as soon as there is a process group; as a step begins, when the other ranks are there too."""
        distributed = sys.modules.get("torch.distributed")
        there = distributed is not None and distributed.is_available() and distributed.is_initialized()
        if self._asked or distributed is None or not there:
            return self.value
        self._asked = True
        try:
            store = distributed.distributed_c10d._get_default_store()
            self.value = str(store.compare_set(_KEY, "", os.urandom(8).hex()).decode())
        except Exception:  # a store of any make, or one whose host has left: the job must not notice
            self.value = None
        return self.value


def job_facts(options: Options, token: str | None) -> dict[str, Any]:
    """Of a process, for rank_<r>.json: `Token.value`; name and id of the batch system's job; torchrun's id; and the
    `launch`, or the process that called `record`, by host, process and chance; supervised: it is a `launch`."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return {
        "token": token,
        "batch": next((f"{name}={os.environ[name]}" for name in _BATCH if os.environ.get(name)), None),
        "rendezvous": None if run in _NO_ID else run,
        "launch": launch_of(options),
        "supervised": options.supervised,
    }


def launch_of(options: Options) -> str:
    return Path(options.scratch).name.removeprefix(".etloom-")


def common(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the ranks of a run say of their job where none contradicts; null where none says anything."""
    told = [rank["job"] for rank in ranks if isinstance(rank.get("job"), dict)]
    if not told:
        return None
    return {
        name: found.pop() if len(found := {job.get(name) for job in told} - {None}) == 1 else None
        for name in ("token", "batch", "rendezvous", "launch")
    }


def contradiction(ranks: list[dict[str, Any]]) -> str | None:
    """Why ranks of one window, by their facts, are of several jobs; null where nothing says so."""
    worlds = sorted({rank["world_size"] for rank in ranks})
    if len(worlds) > 1:
        return f"they are of worlds of {worlds[0]} and of {worlds[1]} ranks"
    told = [rank.get("job") or {} for rank in ranks]
    tokens: dict[str, dict[str, Any]] = {}
    for rank, job in zip(ranks, told, strict=True):
        if job.get("token"):
            tokens.setdefault(job["token"], rank)
    if len(tokens) > 1:
        one, other, *_ = tokens.values()
        return f"rank {one['rank']} on {one['host']} and rank {other['rank']} on {other['host']} never met"
    if tokens and all(job.get("token") for job in told):
        return None
    for name, what in (("batch", "jobs of the batch system"), ("rendezvous", "meetings of torchrun")):
        found = sorted({job[name] for job in told if job.get(name)})
        if len(found) > 1:
            return f"they are of different {what}, {found[0]} and {found[1]}"
    return None


def proven(ranks: list[dict[str, Any]]) -> bool:
    """Whether ranks, by their facts, are surely of one job."""
    told = [rank.get("job") or {} for rank in ranks]
    return any(
        all(job.get(name) and job[name] == told[0].get(name) for job in told) for name in ("token", "launch")
    )
