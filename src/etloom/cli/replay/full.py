"""etloom replay full: re-run the recorded computation and communication together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import Format
from etloom.cli.output_files import check_export, write_run
from etloom.cli.replay.options import AT_LEAST_0, AT_LEAST_1, AllowedNamespaces, ProcessOptions, TableFormat
from etloom.cli.replay.printing import (
    contention_warning,
    end_on_failure,
    end_process,
    load_average,
    print_passes,
    print_summary,
)
from etloom.cli.run_arguments import RunPath, report_loss
from etloom.replayer.comms.comms_options import Callbacks, CommsOptions, Repeats, Warmup
from etloom.replayer.launch_environment import Process

if TYPE_CHECKING:
    from etloom.core.trace import Job
    from etloom.replayer.full import FullReplay


@command()
def full(
    *,
    path: RunPath,
    processes: ProcessOptions,
    allow_namespace: AllowedNamespaces = (),
    repeats: Annotated[Repeats, AT_LEAST_1] = 3,
    warmup: Annotated[Warmup, AT_LEAST_0] = 1,
    out: Annotated[Path | None, "Write the communication as a trace.", Flag("-o")] = None,
    format: TableFormat = None,
) -> None:
    """Re-run the recorded operators and the recorded communication, in the order in which each rank started them.

    Every process runs this command; torchrun, mpirun or srun sets its rank. Communication uses buffers of its own, of
    the recorded sizes. Each rank first tries its operators in a child process: operators that crash it are skipped and
    reported. The output is a summary of the communication, the duration of a repeat on each rank, and how much of it
    the rank waited for others (exposed). Latencies include waiting for ranks whose operators take longer here than in
    the recording, and on a CPU, which they share with operators, the work of these: compare them with other full
    replays only.

    Examples:

    \b
      torchrun --nproc-per-node 2 -m etloom replay full run/
      srun -n 16 etloom replay full run/ --backend nccl
    """
    import etloom
    from etloom.replayer.full import replay_full

    if out is not None:
        check_export(out)
    process = Process.current()

    def open_run() -> Job:
        job = etloom.open(path)
        if process.rank == 0:
            report_loss(job, path)
        return job

    load = load_average()
    with end_on_failure(process):
        replay = replay_full(
            open_run,
            processes.comms_options(CommsOptions(repeats=repeats, warmup=warmup)),
            Callbacks(end_process, print_message),
            path=path,
            namespaces=frozenset({"aten", *allow_namespace}),
            process=process,
            rendezvous=processes.rendezvous(),
        )
    if replay is not None:
        _print_replay(replay, format, load)
        if out is not None:
            write_run(replay.comms.job, out)


def _print_replay(replay: FullReplay, format: Format | None, load: float | None) -> None:
    from etloom.replayer.plan import plan_notes

    for line in plan_notes(replay.comms.plan):
        print_message(line)
    print_summary(replay.comms.summary, format)
    running = sum(outcome != "skipped" for outcome in replay.outcomes)
    print_message(
        f"{running:,} of {len(replay.outcomes):,} operators of rank {replay.comms.plan.recorded_ranks[0]} run; etloom "
        "replay compute lists them"
    )
    print_passes(replay.comms.passes)
    if warning := contention_warning(load, replay.comms.options.device, replay.threads):
        print_message(warning)
