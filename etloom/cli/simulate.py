"""etloom simulate: what a run would have taken, had something been different."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import as_usage_error, handle_errors, print_message
from etloom.cli.output import Format, write_table
from etloom.cli.run_arguments import (
    CacheOption,
    JobsOption,
    PathArgument,
    RankPatternOption,
    StrictOption,
    open_job,
)
from etloom.core.errors import UnknownName

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help='A change, such as "kernel:*gemm* x0.5"; may be repeated.', show_default=False
    ),
]
RemoveSyncOption = Annotated[
    list[str] | None,
    typer.Option(
        help="No longer wait for the device in operators or calls of this name.", show_default=False
    ),
]
BandwidthOption = Annotated[
    str | None, typer.Option(help="A faster or slower network: 2x, 0.5x. Latency stays.", show_default=False)
]
LatencyOption = Annotated[
    str | None,
    typer.Option(help="The network's latency: 20us; by default the least that was seen.", show_default=False),
]
StragglerOption = Annotated[
    str | None, typer.Option(help="none: no rank waits for a later one.", show_default=False)
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="How to write the table on stdout.", show_default=False),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the simulated run: .parquet, .json.gz.", show_default=False),
]


@handle_errors()
def simulate(
    path: PathArgument,
    set_: SetOption = None,
    remove_sync: RemoveSyncOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    straggler: StragglerOption = None,
    out: OutOption = None,
    format: FormatOption = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Say what a run would have taken with other times, from its dependency graph.

    A change is WHAT[:NAME] [KEY=VALUE ...] CHANGE.

    \b
      WHAT    kernel, copy, comm, op, host, python, launch, stream, sync
      NAME    a pattern for the name: *gemm*, aten::mm, all_reduce
      KEY     rank, step, stream, group
      CHANGE  x0.5 (times), =20us (to), +3us, -3us

    "before" is what was recorded. A step lasts until the device has ended all that the step launched: where the device
    lags behind, longer than its mark on the host, whose duration `etloom analyze steps` gives.

    The answer is an interval: "after" keeps every delay that the graph does not explain, "at best" lets it go with its
    cause as far as that is usual (the 95 % quantile of its kind). `etloom analyze graph-quality` says how far to
    believe it.

    Examples:

    \b
      etloom simulate run/ --set "kernel:*gemm* x0.5"
      etloom simulate run/ --set "comm x0"                  # communication for free
      etloom simulate run/ --set "op:aten::item =0us" --remove-sync "aten::item"
      etloom simulate run/ --bandwidth 2x --straggler none
      etloom simulate run/ --set "launch x0" --out faster.json.gz
    """
    import etloom
    from etloom.core import registry
    from etloom.simulator import Network, NoStraggler, RemoveSync, parse_change, retime_job
    from etloom.simulator.changes import AnyChange, parse_duration_ns, parse_factor

    with as_usage_error("set_"):
        changes: list[AnyChange] = [parse_change(text) for text in set_ or []]
    changes += [RemoveSync(name) for name in remove_sync or []]
    if bandwidth is not None or latency is not None:
        with as_usage_error("bandwidth"):
            faster = parse_factor(bandwidth or "1")
        with as_usage_error("latency"):
            changes.append(Network(faster, None if latency is None else parse_duration_ns(latency)))
    if out is not None:
        with as_usage_error("out"):
            registry.find_by_suffix("exports", out)
    if straggler is not None:
        if straggler != "none":
            raise UnknownName("straggler", straggler, ["none"], option="straggler")
        changes.append(NoStraggler())
    if not changes:
        raise typer.BadParameter('nothing is to be changed; say what, such as --set "comm x0"')
    job = open_job(path, rank_pattern, strict, jobs, cache)
    done = etloom.simulate(job, *changes)
    write_table(done.table, format, None)
    for line in done.reasons:
        print_message(line)
    if out is not None:
        etloom.export(retime_job(job, done.found.graph, done.upper_bound), out)
        print_message(f"wrote {out}")
