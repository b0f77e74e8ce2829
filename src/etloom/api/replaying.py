"""The public functions `replay`, which executes recorded communication and operators again, and `repro`, which writes a
script that runs one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl

from etloom.api.arguments import OutPath, Run, as_job, verb, writing
from etloom.core.errors import UnknownName, warn
from etloom.core.registry import unknown_options_error
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job

if TYPE_CHECKING:
    from etloom.replayer.comms.session import CommsReplay
    from etloom.replayer.compute.operator_replay import ComputeReplay
    from etloom.replayer.full import FullReplay

_KINDS = ("comms", "compute", "full")


@verb
def replay(
    run: Run,
    what: str = "comms",
    *,
    rank: int | None = None,
    dry_run: bool = False,
    notify: Callable[[str], None] | None = None,
    **options: Any,
) -> CommsReplay | ComputeReplay | FullReplay | pl.DataFrame | None:
    """Execute the recorded communication or operators of a run again, and measure them.

    Communication needs one process per rank: start the script with torchrun, mpirun or srun; every process calls this
    function. A single process can plan all ranks (``dry_run``). The operators of "compute" run in a child process: one
    that crashes it is skipped and listed. Those of "full" run in this process, after a trial in a child.

    Args:
        run: a Trace, a Job, or a path.
        what: "comms" (recorded collectives and messages), "compute" (recorded operators of a rank) or "full" (both, in
            the recorded order).
        rank: "compute": the rank; default: the lowest.
        dry_run: "comms": return the plan, one row per call, and run nothing.
        notify: called with messages for the user, one line each; of "compute" at the end.
        options: "comms": fields of `etloom.replayer.comms.plan_builder.PlanOptions` and
            `etloom.replayer.comms.comms_options.CommsOptions`; "compute": of
            `etloom.replayer.compute.compute_options.ComputeOptions`; "full": of CommsOptions, and ``namespaces``.

    Returns:
        The measurements; for "comms" and "full" on rank 0, None on other ranks. With ``dry_run``, the plan as a table.

    Raises:
        UnknownName: ``what`` is none of the three.
        EtloomError: An option is unknown, the recording cannot be replayed, or the replay fails.

    Example:
        >>> calls = etloom.replay("run/", dry_run=True)
    """
    if what not in _KINDS:
        raise UnknownName("replay", what, _KINDS, option="what")
    path = Path(run) if isinstance(run, (str, os.PathLike)) else None
    if what == "compute":
        return _replay_compute(as_job(run), rank, path, notify, options)
    if what == "full":
        return _replay_full(run, path, notify, options)
    return _replay_comms(run, path, notify, options, dry_run)


@verb
def repro(run: Run, event: int, out: OutPath, *, rank: int | None = None) -> Path:
    """Write a folder with a script that runs one recorded operator or collective with torch alone.

    The script checks the result, measures the time next to the recorded one, and prints how to profile it.

    Args:
        run: a Trace, a Job, or a path.
        event: the id of the event (column id of the table events), such as one that the analysis tasks lists.
        out: the folder; an earlier one is replaced.
        rank: the rank of the event; default: the lowest.

    Returns:
        The folder, with repro.py and README.md.

    Raises:
        EtloomError: The event is neither an operator of torch nor a collective, its shapes or values were not
            recorded, or the folder cannot be written.

    Example:
        >>> etloom.repro("run/", 1234, "mm/")  # doctest: +SKIP
    """
    from etloom.replayer.repro import write_repro

    job = as_job(run)
    rank = min(job) if rank is None else rank
    if rank not in job:
        raise unknown_rank_error(rank, job)
    with writing(Path(out)):
        return write_repro(job, rank, event, Path(out))


def _replay_comms(
    run: Run,
    path: Path | None,
    notify: Callable[[str], None] | None,
    options: Mapping[str, Any],
    dry_run: bool,
) -> CommsReplay | pl.DataFrame | None:
    from etloom.replayer.comms.comms_options import CommsOptions
    from etloom.replayer.comms.plan_builder import PlanOptions, plan_replay
    from etloom.replayer.comms.replay import replay_comms
    from etloom.replayer.launch_environment import Process
    from etloom.replayer.plan import plan_table

    plan_values, comms_values = _split_options(options, PlanOptions, CommsOptions)
    plan_options = PlanOptions(**plan_values)
    if dry_run:
        return plan_table(plan_replay(as_job(run), Process.current().world_size, plan_options))
    return replay_comms(
        partial(as_job, run), plan_options, CommsOptions(**comms_values), _make_callbacks(notify), path=path
    )


def _replay_compute(
    job: Job,
    rank: int | None,
    path: Path | None,
    notify: Callable[[str], None] | None,
    options: Mapping[str, Any],
) -> ComputeReplay:
    from etloom.replayer.compute.compute_options import ComputeOptions
    from etloom.replayer.compute.isolated_replay import replay_isolated
    from etloom.replayer.compute.saved_tensors import resources_folder

    (values,) = _split_options(options, ComputeOptions)
    if "namespaces" in values:
        values["namespaces"] = frozenset(values["namespaces"])
    rank = min(job) if rank is None else rank
    if rank not in job:
        raise unknown_rank_error(rank, job)
    resources = None if path is None else resources_folder(path, job[rank])
    return replay_isolated(job[rank], ComputeOptions(**values), notify or (lambda line: None), resources)


def _replay_full(
    run: Run, path: Path | None, notify: Callable[[str], None] | None, options: Mapping[str, Any]
) -> FullReplay | None:
    from etloom.replayer.comms.comms_options import CommsOptions
    from etloom.replayer.full import replay_full

    namespaces = frozenset(options.get("namespaces", {"aten"}))
    others = {name: value for name, value in options.items() if name != "namespaces"}
    (values,) = _split_options(others, CommsOptions)
    return replay_full(
        partial(as_job, run),
        CommsOptions(**values),
        _make_callbacks(notify),
        path=path,
        namespaces=namespaces,
    )


def _split_options(options: Mapping[str, Any], *classes: type[Any]) -> list[dict[str, Any]]:
    """Split keyword options by the dataclass that has a field of that name; raise EtloomError for an unknown option."""
    names = [[field.name for field in fields(options_class)] for options_class in classes]
    known = [name for of_class in names for name in of_class]
    if unknown := sorted(options.keys() - set(known)):
        raise unknown_options_error("etloom.replay", unknown, known)
    return [{name: options[name] for name in of_class if name in options} for of_class in names]


def _make_callbacks(notify: Callable[[str], None] | None) -> Any:
    from etloom.replayer.comms.comms_options import Callbacks

    return Callbacks(_end_process) if notify is None else Callbacks(_end_process, notify)


def _end_process(reason: str) -> NoReturn:
    """End this process with SIGTERM because another rank has ended; torch would wait for that rank forever."""
    warn(reason)
    signal.raise_signal(signal.SIGTERM)
    raise SystemExit(1)
