"""etloom replay full: the recorded computation and communication together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli.error_handling import handle_errors, print_message
from etloom.cli.output import Format
from etloom.cli.replay.comms import Device
from etloom.cli.replay.options import AllowNamespace, Backend, MasterAddr, MasterPort, Timeout
from etloom.cli.replay.printing import (
    contention_warning,
    end_process,
    ending_together,
    load_average,
    print_passes,
    print_summary,
)
from etloom.cli.replay.typer_options import PathArgument
from etloom.cli.run_arguments import report_loss

if TYPE_CHECKING:
    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.plan import Plan


@handle_errors()
def full(
    path: PathArgument,
    backend: Backend = "gloo",
    device: Annotated[
        Device | None, typer.Option(help="By default what the backend is for.", show_default=False)
    ] = None,
    allow_namespace: AllowNamespace = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often all of it is run and timed.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="How often it is run before that.")] = 1,
    timeout: Timeout = 60.0,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the communication as a trace, by its end.", show_default=False
        ),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option("--format", help="Of what is printed; by default a table.", show_default=False),
    ] = None,
) -> None:
    """Run the recorded operators and the recorded communication again, in the order in which each rank began them.

    Every process runs this command; torchrun, mpirun or srun says which rank it is. Communication moves buffers of its
    own, of the recorded sizes. Each rank first tries its operators in a process apart: one that ends that process is
    left out and told. Printed are the sums of the communication, how long a repeat took on each rank, and how much of
    that it waited for others (exposed). A latency holds the wait for ranks whose operators take longer here than they
    did, and on a CPU, where they share it, the work of these operators: compare such with another full replay alone.

    Examples:

    \b
      torchrun --nproc-per-node 2 -m etloom replay full run/
      srun -n 16 etloom replay full run/ --backend nccl
    """
    # torch tells a lost connection in pages of its own; one line of ours says it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import etloom
    from etloom.core.errors import EtloomError
    from etloom.replayer.comms.backends import check_backend
    from etloom.replayer.comms.plan_options import plan_early, plan_replay
    from etloom.replayer.comms.watchdog import Process
    from etloom.replayer.compute import isolation
    from etloom.replayer.compute.node_selection import select_nodes
    from etloom.replayer.plan import plan_notes

    place = Process.here()
    check_backend(backend)
    on = device.value if device else ("cuda" if backend in ("nccl", "ucc") else "cpu")
    namespaces = frozenset({"aten", *(allow_namespace or ())})
    opened = cache(lambda: etloom.open(path))
    machines: list[Executor] = []

    def make(world: int) -> Plan:
        if len(opened()) != world:
            raise EtloomError(
                f"{world} processes for {len(opened())} recorded ranks", remedy=f"start {len(opened())}"
            )
        report_loss(opened(), path)
        for trace in opened().values():
            select_nodes(trace)
        return plan_replay(opened(), world, operators=True)

    known = plan_early(make, place.world, path)
    from etloom.replayer.comms.runner import CommsOptions, torch_thread_count
    from etloom.replayer.comms.session import RankWork, run_session
    from etloom.replayer.compute.operator_replay import prepare_executor
    from etloom.replayer.compute.saved_tensors import resources_folder

    def prepare(tell: Callable[[str], None]) -> RankWork:
        rank = sorted(opened())[place.rank]
        trace = opened()[rank]
        asked = {
            "path": str(path),
            "rank": rank,
            "device": on,
            "namespaces": [*namespaces],
            "gpu": place.local,
        }
        tell("trying its operators")
        # A kernel that ends the process must not end a rank, for which the others wait.
        _, lost = isolation.run_isolated(
            ["etloom.cli.replay.trial_run_worker", json.dumps(asked)], quiet=True
        )
        machine = prepare_executor(
            trace,
            on,
            namespaces=namespaces,
            progress=lambda step: tell(f"trying {step.name} (node {step.node})"),
            note=print_message if place.rank == 0 else lambda line: None,
            leave_out=lost,
            resources=resources_folder(path, trace),
            gpu=place.local,
        )
        machines.append(machine)
        _print_left_out(machine, place.rank, set(lost.values()))
        return RankWork(machine.advance, machine.where)

    options = CommsOptions(backend, on, repeats=repeats, warmup=warmup, timeout_s=timeout)
    busy = load_average()
    with ending_together(place):
        done = run_session(
            known,
            options,
            place=place,
            address=master_addr,
            port=master_port,
            prepare=prepare,
            end=end_process,
        )
    if done is None:
        return
    for line in plan_notes(done.plan):
        print_message(line)
    print_summary(done.sums, format)
    outcomes = machines[0].outcomes
    ran = sum(one.result != "skipped" for one in outcomes)
    print_message(
        f"operators of rank {done.plan.recorded[0]} that run: {ran:,} of {len(outcomes):,} (etloom replay compute)"
    )
    print_passes(done.passes)
    if why := contention_warning(busy, on, torch_thread_count()):
        print_message(why)
    if out:
        from etloom.replayer.comms.results import build_job as measured

        etloom.export(measured(done.plan, done.calls, backend), out)
        print_message(f"wrote {out}")


def _print_left_out(machine: Executor, rank: int, deadly: set[str]) -> None:
    """What this rank does not run; of others than the first rank only what ended a process."""
    from etloom.replayer.compute.operator_replay import coverage_table

    for row in coverage_table(machine).iter_rows(named=True):
        if row["result"] == "skipped" and (rank == 0 or row["reason"] in deadly):
            print_message(f"not run, {row['count']} times on rank {rank}: {row['name']}: {row['reason']}")
