"""etloom simulate: predicts the times of a run under changed conditions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output import Format, write_table
from etloom.cli.output_files import check_export, write_run
from etloom.cli.run_arguments import RunOptions, RunPath, open_job
from etloom.core.errors import InvalidValue

if TYPE_CHECKING:
    from etloom.simulator.changes import AnyChange


@dataclass(frozen=True)
class ChangeOptions:
    """The changes to simulate, as the user wrote them."""

    set_: Annotated[
        tuple[str, ...], 'A change, such as "kernel:*gemm* x0.5"; may be repeated.', Flag("--set")
    ] = ()
    remove_sync: Annotated[
        tuple[str, ...], "Do not wait for the GPU in operators or calls of this name."
    ] = ()
    bandwidth: Annotated[
        str | None,
        "Another network: a factor of the fitted bandwidth (2x), or each rank's rate (400GB/s, 400Gbit/s).",
    ] = None
    latency: Annotated[
        str | None, "The network's latency of one message: 20us; default: as fitted to the run."
    ] = None
    straggler: Annotated[
        str | None, "none: every rank works like the median of the ranks that run the same program."
    ] = None
    like_peers: Annotated[
        tuple[int, ...],
        "This rank works like the median of the others that run the same program; may be repeated.",
        Flag(metavar="RANK"),
    ] = ()
    memory: Annotated[
        tuple[str, ...],
        'Other settings of the caching allocator, such as "expandable_segments:True", "capacity=40GiB", '
        '"checkpoint=model.py:12" or "batch=x2"; may be repeated: each is compared with the recording.',
        Flag(metavar="SETTINGS"),
    ] = ()
    other_batch: Annotated[
        Path | None,
        "A memory snapshot of the same program with another batch: batch=x2 finds there which sizes grow with it.",
    ] = None


@command()
def simulate(
    *,
    path: RunPath,
    conditions: ChangeOptions,
    out: Annotated[Path | None, "Write the simulated run: .parquet, .pftrace, .json.gz.", Flag("-o")] = None,
    format: Annotated[Format | None, "Format of the table on stdout.", Flag("-f")] = None,
    run: RunOptions,
) -> None:
    """Predict how long a run would take under changed conditions, from its dependency graph.

    A change is WHAT[:NAME] [KEY=VALUE ...] CHANGE.

    \b
      WHAT    kernel, copy, comm, op, host, python, launch, stream, sync
      NAME    a pattern for the name: *gemm*, aten::mm, all_reduce
              (kernels are named differently on each GPU, nvjet_* on Hopper: etloom analyze kernel-breakdown lists them)
      KEY     rank, step, stream, group, family (of kernels: gemm, attention, ...)
      CHANGE  x0.5 (times), =20us (to), +3us, -3us; the latter three of each call as a whole

    The column "before" is the recorded run. A step lasts until the GPU has finished everything that the step launched:
    longer than its annotation on the host (the duration of etloom analyze steps) if the GPU lags behind.

    The result is an interval: the upper bound keeps every delay that the graph does not explain; in the lower bound
    such a delay shrinks with the work that it follows, up to what is usual (the 95 % quantile of its kind). etloom
    analyze graph-quality shows how reliable the graph is.

    With --memory, the requests of a memory snapshot run through PyTorch's caching allocator with other settings (in the
    form of PYTORCH_CUDA_ALLOC_CONF), another capacity, empty_cache at a moment, checkpointing of the module that a line
    calls, or another batch: docs/memory.md.

    Examples:

    \b
      etloom simulate snapshot.pickle --memory "expandable_segments:True" --memory "capacity=40GiB"
      etloom simulate run/ --set "kernel:*gemm* x0.5"
      etloom simulate run/ --set "comm x0"                  # communication takes no time
      etloom simulate run/ --set "op:aten::item =0us" --remove-sync "aten::item"
      etloom simulate run/ --bandwidth 400GB/s              # bytes, decimal; 400Gbit/s for bits
      etloom simulate run/ --like-peers 3                   # rank 3 works like the median of its peers
      etloom simulate run/ --set "launch x0" --out faster.pftrace
    """
    import etloom

    changes = _parse_changes(conditions)
    if conditions.memory:
        from etloom.analyses.helpers.memory_changes import check_changes, describe_fit

        check_changes(conditions.memory, has_other_batch=conditions.other_batch is not None)
        if changes or out is not None:
            raise click.UsageError("--memory is mutually exclusive with --out and changes of times")
        other = None if conditions.other_batch is None else open_job(conditions.other_batch, run)
        job = open_job(path, run)
        table = etloom.simulate_memory(job, *conditions.memory, other_batch=other)
        write_table(table, format, None)
        for line in describe_fit(job, conditions.memory, table):
            print_message(line)
        return
    if conditions.other_batch is not None:
        raise click.UsageError("--other-batch requires --memory")
    if out is not None:
        check_export(out)
    if not changes:
        raise click.UsageError('expected at least one change, such as --set "comm x0"')
    simulated = etloom.simulate(open_job(path, run), *changes)
    write_table(simulated.table, format, None)
    for line in simulated.reasons:
        print_message(line)
    if out is not None:
        write_run(simulated.job, out)


def _parse_changes(conditions: ChangeOptions) -> list[AnyChange]:
    from etloom.simulator import LikePeers, NoStraggler, RemoveSync, parse_change
    from etloom.simulator.changes import parse_duration_ns, parse_network

    with as_usage_error("set_"):
        changes: list[AnyChange] = [parse_change(text) for text in conditions.set_]
    changes += [RemoveSync(name) for name in conditions.remove_sync]
    if conditions.bandwidth is not None or conditions.latency is not None:
        with as_usage_error("latency"):
            latency_ns = None if conditions.latency is None else parse_duration_ns(conditions.latency)
        with as_usage_error("bandwidth"):
            changes.append(parse_network(conditions.bandwidth, latency_ns))
    if conditions.straggler is not None:
        if conditions.straggler != "none":
            raise InvalidValue(
                f"expected the word none, got {conditions.straggler!r}",
                remedy="--like-peers RANK makes one rank as fast as the others",
                option="straggler",
            )
        changes.append(NoStraggler())
    if conditions.like_peers:
        changes.append(LikePeers(tuple(conditions.like_peers)))
    return changes
