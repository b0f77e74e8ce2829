"""The command ``etloom-comms-replay``: replays recorded communication with the flags of PARAM's replay.

Flags (`comms_flags`) keep PARAM's meaning. Flags without an effect here are named on stderr; unknown flags are
errors. docs/coming-from-param.md lists all flags and the differences.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom.compat import comms_flags
from etloom.compat._command import run_command
from etloom.core.errors import EtloomError
from etloom.core.paths import expand_home
from etloom.core.trace import Job
from etloom.loading import LoadOptions, load_path
from etloom.replayer.comms.callbacks import Callbacks
from etloom.replayer.comms.comms_options import CommsOptions, Rendezvous
from etloom.replayer.comms.plan_builder import PlanOptions, plan_replay
from etloom.replayer.comms.replay import replay_comms
from etloom.replayer.comms.results import TOTAL_HEADERS
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Plan, plan_notes, plan_table
from etloom.reports import formatting

if TYPE_CHECKING:
    from etloom.replayer.comms.session import CommsReplay


def replay(args: argparse.Namespace) -> None:
    """Replay recorded communication as PARAM's flags specify, print times, and write result files.

    Raises:
        EtloomError: The run cannot be replayed like this.
    """
    process = Process.current()
    if process.rank == 0:
        for line in comms_flags.describe_ignored_flags(args):
            sys.stderr.write(f"etloom-comms-replay: {line}\n")
    run = _first_existing_path(args.trace_path)
    plan_options = PlanOptions(
        trace_type=args.trace_type,
        one_for_all=args.use_one_trace,
        shrink=args.auto_shrink,
        only=args.allow_ops,
        first=args.max_msg_cnt or None,
        balance=args.rebalance_policy == "equal",
    )

    def open_run() -> Job:
        return load_path(run, LoadOptions(), _rank_pattern(run) if run.is_dir() else None)

    if args.dry_run:
        if process.rank == 0:
            print_table(plan_table(plan_replay(open_run(), process.world_size, plan_options)))
        return
    output_ranks = _output_ranks(args, process.world_size)
    result = replay_comms(
        open_run,
        plan_options,
        _comms_options(args),
        Callbacks(_exit_process),
        path=run,
        process=process,
        rendezvous=Rendezvous(args.master_ip, args.master_port),
    )
    if result is None:
        return
    for line in plan_notes(result.plan):
        sys.stderr.write(f"etloom-comms-replay: {line}\n")
    print_table(result.summary.rename(TOTAL_HEADERS))
    if args.colls_per_batch > 0:
        print_table(summarize_batches(result.calls, args.colls_per_batch))
    if args.output_path:
        _write_results(result, expand_home(args.output_path), output_ranks)


def _output_ranks(args: argparse.Namespace, world_size: int) -> Iterable[int]:
    if args.output_ranks is None:
        return range(world_size)
    if not args.output_path:
        raise EtloomError("--output-ranks requires --output-path", remedy="add --output-path FOLDER")
    if missing := [rank for rank in args.output_ranks if rank >= world_size]:
        raise EtloomError(f"--output-ranks: unknown rank {missing[0]} of {world_size}")
    ranks: Iterable[int] = args.output_ranks
    return ranks


def _comms_options(args: argparse.Namespace) -> CommsOptions:
    # torch calls AMD's GPUs by the name of NVIDIA's.
    device = "cuda" if args.device == "rocm" else args.device
    return CommsOptions(
        args.backend or "auto",
        device or "auto",
        "recorded" if args.use_timestamp else "fast",
        blocking=bool(args.blocking),
        repeats=args.num_replays,
        warmup=args.warmup_iter,
        verify=bool(args.c) or args.data_accuracy_mode == "check",
    )


def _first_existing_path(text: str) -> Path:
    """Return the first of the comma-separated paths that exists, or the whole text if none does.

    Raises:
        EtloomError: for an address with a scheme.
    """
    if "://" in text:
        raise EtloomError(
            "traces are read from files", where=text, remedy="download them and pass their path"
        )
    paths = [expand_home(text), *(expand_home(path.strip()) for path in text.split(",") if path.strip())]
    return next((path for path in paths if path.exists()), paths[0])


def _rank_pattern(run: Path) -> str | None:
    """Return a regular expression for traces named RANK.json, as commsTraceReplay expects; None without such files."""
    ranks = r"(\d+)\.json"
    return ranks if any(re.fullmatch(ranks, file.name) for file in run.iterdir()) else None


def summarize_batches(calls: pl.DataFrame, size: int) -> pl.DataFrame:
    """Return statistics (ms) of the time that ``size`` consecutive communication calls of a rank take together.

    The time lasts from the first call to the last completion.
    """
    batches = (
        calls.group_by("rank", "repeat", batch=pl.col("call") // size)
        .agg(pl.len(), took=(pl.col("completed_ns").max() - pl.col("issued_ns").min()) / 1e6)
        .filter(pl.col("len") == size)
    )
    return batches.select(
        pl.len().alias("batches"),
        *(pl.col("took").quantile(q / 100, "linear").alias(f"p{q}_ms") for q in (50, 95)),
        pl.col("took").mean().alias("mean_ms"),
        pl.col("took").min().alias("min_ms"),
        pl.col("took").max().alias("max_ms"),
        pl.col("took").sum().alias("total_ms"),
    )


def call_rows(plan: Plan, calls: pl.DataFrame, rank: int) -> list[dict[str, Any]]:
    """Return the rows of a rank's result file in PARAM's format, a row per communication call and replay.

    Sizes are in elements. Latency lasts from the call to its end on this rank, global latency to its end on all ranks
    of the group."""
    from etloom.core.categories import itemsize

    rank_calls, groups = plan.calls[rank], plan.groups
    ended = calls.with_columns(last=pl.col("completed_ns").max().over("instance")).filter(
        pl.col("rank") == rank
    )
    return [
        {
            "comms": (call := rank_calls[row["call"]]).collective, "seqnum": row["call"], "req": call.seq,
            "in_msg_size": sum(call.inputs), "out_msg_size": sum(call.outputs), "dtype": call.dtype,
            "dtype_size": itemsize(call.dtype), "in_split": list(call.in_split), "out_split": list(call.out_split),
            "root": call.root, "peer": call.peer, "global_ranks": list(call.group), "world_size": len(call.group),
            "pg_id": groups.index(call.group) if call.peer is None else None, "replay": row["repeat"],
            "latency_us": row["latency_ns"] / 1e3, "global_latency_us": (row["last"] - row["issued_ns"]) / 1e3,
        }
        for row in ended.iter_rows(named=True)
    ]  # fmt: skip


def _write_results(result: CommsReplay, folder: Path, ranks: Iterable[int]) -> None:
    from etloom.formats.io.atomic_file import write_atomically
    from etloom.formats.parquet import writer

    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        file = folder / f"replayedCommsPerf.rank-{rank}.json"
        write_atomically(file, json.dumps(call_rows(result.plan, result.calls, rank), indent=1))
    writer.write(result.job, folder / "replay.parquet")
    sys.stderr.write(f"wrote {folder}\n")


def print_table(frame: pl.DataFrame) -> None:
    """Print a table to stdout, with headers and aligned columns."""
    columns = [formatting.choose_column_format(frame, name) for name in frame.columns]
    cells = [
        [column.text(value) or "-" for column, value in zip(columns, row, strict=True)]
        for row in frame.rows()
    ]
    lines = [[column.header for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(f"{text.rstrip()}\n")


def _exit_process(reason: Any) -> None:
    """Report that another process has ended, and end this process, because torch would wait for it forever."""
    sys.stderr.write(f"etloom-comms-replay: {reason}\n")
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if ": interrupted at " in str(reason) else 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``etloom-comms-replay``, and return its exit status."""
    args = comms_flags.make_parser().parse_args(argv)
    return run_command("etloom-comms-replay", lambda: replay(args))


if __name__ == "__main__":
    raise SystemExit(main())
