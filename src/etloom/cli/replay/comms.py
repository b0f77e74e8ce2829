"""etloom replay comms: re-run the recorded communication."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from etloom.cli.command import FieldFlags, FiniteFloat, Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import to_json, write_table, write_text
from etloom.cli.output_files import check_export, check_writable, write_run
from etloom.cli.replay.options import AT_LEAST_0, AT_LEAST_1, ProcessOptions, TableFormat
from etloom.cli.replay.printing import (
    contention_warning,
    end_on_failure,
    end_process,
    load_average,
    print_passes,
    print_summary,
)
from etloom.cli.run_arguments import RankPattern, report_loss
from etloom.replayer.comms.comms_options import Callbacks, CommsOptions, check_backend
from etloom.replayer.launch_environment import Process

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job
    from etloom.replayer.comms.plan_builder import PlanOptions
    from etloom.replayer.comms.session import CommsReplay
    from etloom.replayer.plan import Plan


@dataclass(frozen=True)
class SourceOptions:
    """The path of the run, and options that select the ranks and calls to replay."""

    path: Annotated[Path | None, "A folder of traces, or one file.", Positional("PATH")] = None
    trace_path: Annotated[Path | None, "The same as PATH."] = None
    trace_type: Annotated[
        Literal["et", "kineto", "basic"] | None,
        "Fail unless there is a trace of this type; basic is PARAM's.",
    ] = None
    rank_pattern: RankPattern = None
    use_one_trace: Annotated[bool, "Replay the lowest recorded rank on all processes."] = False
    ranks: Annotated[str | None, "The recorded ranks to replay, such as 0,8-15."] = None
    shrink: Annotated[
        bool,
        "Replay only the first recorded ranks, one per process. Groups shrink to these ranks, tensors that are split "
        "among ranks shrink in proportion, and calls that are left with one rank are skipped.",
    ] = False
    only: Annotated[str | None, "Only these collectives, such as all_reduce,send,recv."] = None
    first: Annotated[int | None, "Only the first N calls of each rank.", Flag(type=click.IntRange(min=1))] = (
        None
    )
    scale: Annotated[float, "Factor for all tensor sizes.", Flag(type=FiniteFloat(min=0.0))] = 1.0

    def run_path(self) -> Path:
        """Return the path of the run to replay, from the positional argument or else the option."""
        path = self.path or self.trace_path
        if path is None or (self.path and self.trace_path):
            raise click.BadParameter("specify the run once: etloom replay comms PATH")
        return path

    def plan_options(self) -> PlanOptions:
        from etloom.replayer.comms.plan_builder import PlanOptions, parse_ranks

        return PlanOptions(
            trace_type=self.trace_type,
            one_for_all=self.use_one_trace,
            ranks=None if self.ranks is None else parse_ranks(self.ranks),
            shrink=self.shrink,
            only=[name.strip() for name in self.only.split(",")] if self.only else (),
            first=self.first,
            scale=self.scale,
        )


@dataclass(frozen=True)
class OutputOptions:
    """Options of a communication replay's results: output files, grouping of table rows, and table format."""

    out: Annotated[Path | None, "Write the replay as a trace: .parquet or .json.gz.", Flag("-o")] = None
    per: Annotated[
        Literal["group", "all", "call"],
        "group: one row per collective, group and size; all: groups of the same size together; call: one row "
        "per call.",
    ] = "group"
    json_file: Annotated[
        Path | None, "Write the table, the repeats and the skipped calls as JSON.", Flag("--json")
    ] = None
    format: TableFormat = None

    def check(self) -> None:
        """Check that the files can be written, before the work starts."""
        if self.out:
            check_export(self.out)
        if self.json_file:
            check_writable(self.json_file, "--json")


_RUN_FLAGS = FieldFlags(repeats=AT_LEAST_1, warmup=AT_LEAST_0)


@command()
def comms(
    *,
    source: SourceOptions,
    processes: ProcessOptions,
    dry_run: Annotated[bool, "Print the plan without running it."] = False,
    run: Annotated[CommsOptions, _RUN_FLAGS],
    output: OutputOptions,
) -> None:
    """Re-run the recorded communication with one process per rank, and measure it.

    Every process runs this command; torchrun, mpirun or srun sets its rank. Rank 0 makes the plan, prints the result
    and writes the files. Sizes, types, groups, roots, peers, reduce operations and the calls in flight at the same time
    are as recorded; calls that cannot be replayed are listed with the reason. Latencies are from a call to its
    completion on each rank; count and total are over all repeats and ranks. Bytes are defined as in etloom analyze
    collectives: the whole result of an all-gather, the whole input of a reduce-scatter, otherwise the contribution of a
    rank; the largest value over the ranks. --dry-run prints the contribution of each rank.

    Examples:

    \b
      etloom replay comms run/ --dry-run
      torchrun --nproc-per-node 2 -m etloom replay comms run/ --backend gloo
      mpirun -np 8 etloom replay comms --trace-path run/ --trace-type et
      srun -n 16 etloom replay comms run/ --backend nccl --timing recorded --out replay.parquet
      torchrun --nproc-per-node 4 -m etloom replay comms run/ --shrink --verify
    """
    path = source.run_path()
    check_backend(processes.backend)
    output.check()
    import etloom

    process = Process.current()

    def open_run() -> Job:
        job = etloom.open(path, rank_pattern=source.rank_pattern)
        report_loss(job, path)
        return job

    plan_options = source.plan_options()
    if dry_run:
        if process.rank == 0:
            from etloom.replayer.comms.plan_builder import plan_replay

            _print_plan(plan_replay(open_run(), process.world_size, plan_options), output)
        return
    from etloom.replayer.comms.replay import replay_comms

    load = load_average()
    with end_on_failure(process):
        replay = replay_comms(
            open_run,
            plan_options,
            processes.comms_options(run),
            Callbacks(end_process, print_message),
            path=path,
            process=process,
            rendezvous=processes.rendezvous(),
        )
    if replay is not None:
        _print_replay(replay, output, load)


def _print_plan(plan: Plan, output: OutputOptions) -> None:
    from etloom.replayer.plan import plan_caveats, plan_table

    table = plan_table(plan)
    if output.json_file:
        write_text(to_json(table), output.json_file)
    write_table(table, output.format, None)
    for line in plan_caveats(plan):
        print_message(line)


def _print_replay(replay: CommsReplay, output: OutputOptions, load: float | None) -> None:
    from etloom.replayer.plan import plan_notes

    for line in plan_notes(replay.plan):
        print_message(line)
    summary = replay.summarize(output.per)
    print_summary(summary, output.format)
    print_passes(replay.passes)
    if warning := contention_warning(load, replay.options.device, 1):
        print_message(warning)
    if replay.options.verify:
        print_message(
            "verified: before the repeats every call was made once and returned the expected result"
        )
    if output.json_file:
        write_text(json.dumps(_json_report(replay, summary), indent=1), output.json_file)
    if output.out:
        write_run(replay.job, output.out)


def _json_report(replay: CommsReplay, summary: pl.DataFrame) -> dict[str, Any]:
    """Return the data for the JSON file: options, summary, times of each repeat and rank, and skipped calls."""
    return {
        "options": asdict(replay.options),
        "recorded_ranks": replay.plan.recorded_ranks,
        "table": summary.to_dicts(),
        "repeats": replay.passes.to_dicts(),
        "skipped": [asdict(entry) for entry in replay.plan.skipped],
    }
