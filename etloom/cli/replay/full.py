"""etloom replay full: the recorded computation and communication together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import PathArgument, tell_loss
from etloom.cli._output import Format
from etloom.cli.replay._options import AllowCode, AllowNamespace, Backend, MasterAddr, MasterPort, Timeout
from etloom.cli.replay._telling import crowded, end, ending, load, tell_passes, tell_sums
from etloom.cli.replay.comms import Device

if TYPE_CHECKING:
    from etloom.replayer.machine import Machine
    from etloom.replayer.plan import Plan


@guarded()
def full(
    path: PathArgument,
    backend: Backend = "gloo",
    device: Annotated[
        Device | None, typer.Option(help="By default what the backend is for.", show_default=False)
    ] = None,
    allow_namespace: AllowNamespace = None,
    allow_code: AllowCode = False,
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
    from etloom.errors import EtloomError
    from etloom.replayer import apart
    from etloom.replayer.backends import check_backend
    from etloom.replayer.choice import chosen, early
    from etloom.replayer.nodes import nodes_of
    from etloom.replayer.plan import notes
    from etloom.replayer.world import Place

    place = Place.here()
    check_backend(backend)
    on = device.value if device else ("cuda" if backend in ("nccl", "ucc") else "cpu")
    namespaces = frozenset({"aten", *(allow_namespace or ())})
    opened = cache(lambda: etloom.open(path))
    machines: list[Machine] = []

    def make(world: int) -> Plan:
        if len(opened()) != world:
            raise EtloomError(
                f"{world} processes for {len(opened())} recorded ranks", remedy=f"start {len(opened())}"
            )
        tell_loss(opened(), path)
        for trace in opened().values():
            nodes_of(trace)
        return chosen(opened(), world, operators=True)

    known = early(make, place.world, path)
    from etloom.replayer.comms import Options, threads_of_an_operator
    from etloom.replayer.compute import prepared
    from etloom.replayer.saved import folder_of
    from etloom.replayer.session import Work, replay

    def prepare(tell: Callable[[str], None]) -> Work:
        rank = sorted(opened())[place.rank]
        trace = opened()[rank]
        asked = {
            "path": str(path),
            "rank": rank,
            "device": on,
            "namespaces": [*namespaces],
            "allow_code": allow_code,
            "gpu": place.local,
        }
        tell("trying its operators")
        # A kernel that ends the process must not end a rank, for which the others wait.
        _, lost = apart.run(["etloom.cli.replay._rehearsing", json.dumps(asked)], quiet=True)
        machine = prepared(
            trace,
            on,
            namespaces=namespaces,
            progress=lambda step: tell(f"trying {step.name} (node {step.node})"),
            note=say if place.rank == 0 else lambda line: None,
            leave_out=lost,
            resources=folder_of(path, trace),
            allow_code=allow_code,
            gpu=place.local,
        )
        machines.append(machine)
        _tell_left_out(machine, place.rank, set(lost.values()))
        return Work(machine.advance, machine.where)

    options = Options(backend, on, repeats=repeats, warmup=warmup, timeout_s=timeout)
    busy = load()
    with ending(place):
        done = replay(
            known, options, place=place, address=master_addr, port=master_port, prepare=prepare, end=end
        )
    if done is None:
        return
    for line in notes(done.plan):
        say(line)
    tell_sums(done.sums, format)
    outcomes = machines[0].outcomes
    ran = sum(one.result != "skipped" for one in outcomes)
    say(
        f"operators of rank {done.plan.recorded[0]} that run: {ran:,} of {len(outcomes):,} (etloom replay compute)"
    )
    tell_passes(done.passes)
    if why := crowded(busy, on, threads_of_an_operator()):
        say(why)
    if out:
        from etloom.replayer.results import job as measured

        etloom.export(measured(done.plan, done.calls, backend), out)
        say(f"wrote {out}")


def _tell_left_out(machine: Machine, rank: int, deadly: set[str]) -> None:
    """What this rank does not run; of others than the first rank only what ended a process."""
    from etloom.replayer.compute import coverage

    for row in coverage(machine).iter_rows(named=True):
        if row["result"] == "skipped" and (rank == 0 or row["reason"] in deadly):
            say(f"not run, {row['count']} times on rank {rank}: {row['name']}: {row['reason']}")
