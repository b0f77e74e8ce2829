"""etloom replay comms: run the recorded communication again."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli.error_handling import handle_errors, print_message
from etloom.cli.output import Format, to_json, write_table
from etloom.cli.output_checks import check_export, check_writable
from etloom.cli.replay.options import Backend, MasterAddr, MasterPort, Timeout
from etloom.cli.replay.printing import (
    contention_warning,
    end_process,
    ending_together,
    load_average,
    print_passes,
    print_summary,
)
from etloom.cli.replay.typer_options import RankPatternOption, check_finite
from etloom.cli.run_arguments import report_loss

if TYPE_CHECKING:
    import polars as pl

    from etloom.replayer.comms.runner import CommsOptions
    from etloom.replayer.comms.session import CommsReplay
    from etloom.replayer.plan import Plan


_LONG_REPLAY_S = 60.0
"""A replay that is known to take longer says so beforehand."""


class TraceType(str, enum.Enum):
    et = "et"
    kineto = "kineto"
    basic = "basic"


class Device(str, enum.Enum):
    cpu = "cpu"
    cuda = "cuda"


class Timing(str, enum.Enum):
    fast = "fast"
    recorded = "recorded"


class Gap(str, enum.Enum):
    spin = "spin"
    load = "load"


class Per(str, enum.Enum):
    group = "group"
    all = "all"
    call = "call"


@handle_errors()
def comms(
    path: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A folder of traces, or one file.", metavar="PATH", show_default=False
        ),
    ] = None,
    trace_path: Annotated[
        Path | None, typer.Option("--trace-path", help="The same as PATH.", show_default=False)
    ] = None,
    trace_type: Annotated[
        TraceType | None,
        typer.Option(
            "--trace-type",
            help="Fail where there is no such trace; basic is PARAM's.",
            show_default=False,
        ),
    ] = None,
    rank_pattern: RankPatternOption = None,
    use_one_trace: Annotated[
        bool, typer.Option("--use-one-trace", help="Play the lowest recorded rank on all processes.")
    ] = False,
    backend: Backend = "gloo",
    device: Annotated[
        Device | None, typer.Option(help="By default what the backend is for.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    ranks: Annotated[
        str | None, typer.Option(help="The recorded ranks to play, such as 0,8-15.", show_default=False)
    ] = None,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Play the first recorded ranks on fewer processes: groups keep the members that are played, what is "
            "shared among them shrinks with them, and calls without another member are left out.",
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Only these collectives, such as all_reduce,send,recv.", show_default=False),
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Only the first N calls of each rank.", show_default=False)
    ] = None,
    scale: Annotated[float, typer.Option(min=0.0, callback=check_finite, help="Multiply the sizes.")] = 1.0,
    timing: Annotated[
        Timing, typer.Option(help="recorded: keep the recorded gaps between calls.")
    ] = Timing.fast,
    gap: Annotated[Gap, typer.Option(help="What fills a gap; load: matrix products.")] = Gap.spin,
    blocking: Annotated[bool, typer.Option("--blocking", help="Wait for each call before the next.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How often all calls are run and timed.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="How often they are run before that.")] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every result once, before the timed runs.")
    ] = False,
    timeout: Timeout = 60.0,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write the replay as a trace, by its end (.parquet, .json.gz).",
            show_default=False,
        ),
    ] = None,
    per: Annotated[
        Per,
        typer.Option(
            help="group: a row a collective, group and size; all: groups of a size together; call: a row a call."
        ),
    ] = Per.group,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write table, repeats and what was skipped as JSON.", show_default=False),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option("--format", help="Of what is printed; by default a table.", show_default=False),
    ] = None,
) -> None:
    """Run the recorded communication again on as many processes, and measure it.

    Every process runs this command; torchrun, mpirun or srun says which rank it is. Rank 0 makes the plan, prints the
    result and writes the files. Sizes, types, groups, roots, peers, reduce operations and what is in flight together
    are those of the recording; what cannot be replayed is listed with its reason. Latencies are from a call to its
    completion, on each rank; count and total are over all repeats and ranks. Bytes are those of etloom analyze
    collectives: the whole result of an all-gather, the whole input of a reduce-scatter, else what a rank puts in, the
    most of any rank. --dry-run says what each rank puts in.

    Examples:

    \b
      etloom replay comms run/ --dry-run
      torchrun --nproc-per-node 2 -m etloom replay comms run/ --backend gloo
      mpirun -np 8 etloom replay comms --trace-path run/ --trace-type et
      srun -n 16 etloom replay comms run/ --backend nccl --timing recorded --out replay.parquet
      torchrun --nproc-per-node 4 -m etloom replay comms run/ --shrink --verify
    """
    given = path or trace_path
    if given is None or (path and trace_path):
        raise typer.BadParameter("say once what to replay: etloom replay comms PATH")
    from etloom.replayer.comms.backends import check_backend

    check_backend(backend)
    if out:
        check_export(out)
    if json_file:
        check_writable(json_file, "--json")
    import etloom
    from etloom.replayer.comms.plan_options import parse_ranks, plan_early, plan_replay
    from etloom.replayer.comms.watchdog import Process

    place = Process.here()
    asked: dict[str, Any] = {
        "trace_type": trace_type and trace_type.value,
        "one_for_all": use_one_trace,
        "ranks": None if ranks is None else parse_ranks(ranks),
        "shrink": shrink,
        "only": [one.strip() for one in only.split(",")] if only else (),
        "first": first,
        "scale": scale,
    }

    def make(world: int) -> Plan:
        job = etloom.open(given, rank_pattern=rank_pattern)
        report_loss(job, given)
        made = plan_replay(job, world, **asked)
        passes = repeats + warmup
        paced_s = passes * max((sum(call.gap_ns or 0 for call in own) for own in made.calls), default=0) / 1e9
        if timing is Timing.recorded and paced_s > _LONG_REPLAY_S:
            print_message(
                f"calls begin as far apart as recorded, which takes {paced_s:,.0f} s for {passes} passes"
            )
        return made

    if dry_run:
        if place.rank == 0:
            from etloom.replayer.plan import plan_caveats, plan_table

            made = make(place.world)
            if json_file:
                json_file.write_text(to_json(plan_table(made)))
            write_table(plan_table(made), format, None)
            for line in plan_caveats(made):
                print_message(line)
        return
    known = plan_early(make, place.world, given)
    # torch tells a lost connection in pages of its own; one line of ours says it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from etloom.replayer.comms.results import build_job, summarize_calls
    from etloom.replayer.comms.runner import CommsOptions, resolve_backend_and_device
    from etloom.replayer.comms.session import run_session
    from etloom.replayer.plan import plan_notes

    on = resolve_backend_and_device(backend, device and device.value)
    options = CommsOptions(*on, timing.value, gap.value, blocking, repeats, warmup, verify, timeout)
    busy = load_average()
    with ending_together(place):
        done = run_session(
            known, options, place=place, address=master_addr, port=master_port, end=end_process
        )
    if done is None:
        return
    for line in plan_notes(done.plan):
        print_message(line)
    merged = summarize_calls(done.calls, per.value)
    print_summary(merged, format)
    print_passes(done.passes)
    if why := contention_warning(busy, on[1], 1):
        print_message(why)
    if verify:
        print_message(
            "verified: before the repeats every call was made once, and its result on each rank was as computed"
        )
    if json_file:
        json_file.write_text(json.dumps(_json_report(done, merged, options), indent=1))
    if out:
        etloom.export(build_job(done.plan, done.calls, backend), out)
        print_message(f"wrote {out}")


def _json_report(done: CommsReplay, merged: pl.DataFrame, options: CommsOptions) -> dict[str, Any]:
    """The table, how long each repeat took and waited on each rank, and what was not replayed."""
    return {
        "options": asdict(options),
        "recorded_ranks": done.plan.recorded,
        "table": merged.to_dicts(),
        "repeats": done.passes.to_dicts(),
        "skipped": [asdict(one) for one in done.plan.skipped],
    }
