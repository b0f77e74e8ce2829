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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl

from etloom.compat._command import run_command
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.paths import expand_home
from etloom.core.trace import Job
from etloom.loading import LoadOptions, load_path
from etloom.replayer.comms.comms_options import Callbacks, CommsOptions, Rendezvous, check_backend
from etloom.replayer.comms.plan_builder import PlanOptions, plan_replay
from etloom.replayer.comms.replay import replay_comms
from etloom.replayer.comms.results import TOTAL_HEADERS
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import COLLECTIVES, MESSAGES, Plan, plan_notes, plan_table
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
        for line in describe_ignored_flags(args):
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
    args = make_parser().parse_args(argv)
    return run_command("etloom-comms-replay", lambda: replay(args))


# The flags of PARAM's communication replay: of comm_replay, and of commsTraceReplay, its predecessor.
#
# Names, aliases and defaults are PARAM's. `IGNORED_FLAGS` and `IGNORED_SWITCHES` list those without an effect here,
# with the reason.

_NOT_QUANTIZED = "nothing is quantised"
_ALWAYS_TIMED = "every replay is timed; --output-path holds a trace of the last"
_CHECKED_BY_COMPUTATION = "results are compared with computed ones, not with a saved run"
IGNORED_FLAGS = {
    ("--nw-stack",): "communication runs on torch.distributed",
    ("--dtype",): "types are those of the recording",
    ("--num-tpu-cores",): "TPUs are not supported",
    ("--init-device",): "tensors are created on --device",
    ("--init-method", "--pg-init-method"): "processes meet at --master-ip and --master-port",
    ("--bitwidth",): _NOT_QUANTIZED,
    ("--quant-a2a-embedding-dim",): _NOT_QUANTIZED,
    ("--quant-threshold",): _NOT_QUANTIZED,
    ("--log", "--log-level"): "there is one log level",
    ("--profiler-num-replays-start",): _ALWAYS_TIMED,
    ("--profiler-num-replays",): _ALWAYS_TIMED,
    ("--data-accuracy-savemodepath",): _CHECKED_BY_COMPUTATION,
    ("--data-accuracy-checkmodepath",): _CHECKED_BY_COMPUTATION,
    ("--data-accuracy-uploadpath",): "nothing is uploaded",
    ("--data-accuracy-rtol",): "results are compared bit by bit",
    ("--data-accuracy-atol",): "results are compared bit by bit",
    ("--data-accuracy-dtype",): "results are compared in their own type",
    ("--data-accuracy-numelems",): "all elements are compared",
    ("--use-perf-logger", "--use-custom-perf-logger"): "results are files",
    ("--ibv-devices",): "the backend chooses its devices; for NCCL set NCCL_IB_HCA",
}
"""Flags with a value, or with several."""
IGNORED_SWITCHES = {
    ("--init-only",): "PARAM's replay does not read it either; --dry-run starts nothing",
    ("--use-ext-dist", "--use-ext-pg"): "torch.distributed is used",
    ("--enable-local-report",): "rank 0 reports for all",
    ("--enable-profiler",): _ALWAYS_TIMED,
    ("--disable-parallel-read",): "rank 0 reads for all",
    ("--reuse-tensors",): "nothing is allocated during timed passes",
    ("--use-nvshmem",): "communication runs on torch.distributed",
    ("--eager-init",): "groups are created before the timed passes",
    ("--enable-torch-nccl-timing",): "the replay measures times itself",
}
WITHOUT_EFFECT = {**IGNORED_FLAGS, **IGNORED_SWITCHES}

_SUFFIXES = ("", "v", "base", "single", "coalesced", "intotensorcoalesced", "tensorcoalesced")
_SPELLINGS: dict[str, tuple[str, ...]] = {
    **{f"{name.replace('_', '')}{end}": (name,) for name in COLLECTIVES | MESSAGES for end in _SUFFIXES},
    **dict.fromkeys(("isend",), ("send",)),
    **dict.fromkeys(("irecv", "recvanysource"), ("recv",)),
    **dict.fromkeys(("batchisendirecv", "pt2pt"), ("send", "recv")),
    **dict.fromkeys(("wait", "init", "noop"), ()),
}
"""PARAM's names of calls, without underscores -> etloom's names. Waits are replayed with the calls they wait for."""


class _Parser(argparse.ArgumentParser):
    """A command-line parser that reports an error in a single line, because the process of every rank prints it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")


def make_parser() -> argparse.ArgumentParser:
    """Return a command-line parser for the flags of PARAM's communication replay."""
    parser = _Parser(
        "etloom-comms-replay",
        usage="%(prog)s --trace-path RUN [flags]",
        description="Replay recorded communication, with PARAM's flags.",
        epilog="example: mpirun -np 8 etloom-comms-replay --trace-path run/ --trace-type et --num-replays 10",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--trace-path",
        default="./",
        help="folder of rank-N files, or one file; if several are listed (a,b), the first that exists",
    )
    add(
        "--trace-type",
        default="et",
        choices=["et", "basic", "kineto"],
        help="fail if there is no trace of this type",
    )
    add("--use-one-trace", action="store_true", help="replay one rank's trace on all processes")
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--auto-shrink", action="store_true", help="replay the first ranks on fewer processes")
    add(
        "--max-msg-cnt",
        type=_integer_from(0),
        default=0,
        help="only the first N of the calls to replay; 0: all",
    )
    add("--num-replays", type=_integer_from(1), default=5, help="replays that are timed")
    add("--warmup-iter", type=_integer_from(0), default=2, help="untimed replays before the timed replays")
    add(
        "--do-warm-up",
        dest="warmup_iter",
        action="store_const",
        const=1,
        help="the old name of --warmup-iter 1",
    )
    add(
        "--allow-ops",
        "--allow-list",
        type=_parse_collectives,
        default="all",
        help="comma list of collectives",
    )
    add("--blocking", "-b", "--z", nargs="?", type=int, const=1, choices=[0, 1], default=0,
        help="wait for each call before the next")  # fmt: skip
    add("--colls-per-batch", type=int, default=-1, help="also report the time of N consecutive calls")
    add("--use-timestamp", action="store_true", help="keep the recorded gaps between calls")
    add("--rebalance-policy", default="", choices=["", "equal"], help="equal shares in all-to-alls")
    add("--output-path", default="", nargs="?", const="", help="folder for replayedCommsPerf.rank-N.json")
    add(
        "--output-ranks",
        type=_parse_ranks,
        default=None,
        help="1,3 or 1:3: ranks that get a file; by default all",
    )
    add(
        "--backend",
        type=_parse_backend,
        default=None,
        help="nccl, gloo, or any other backend of torch; default: the usual one of --device",
    )
    add(
        "--device", default=None, choices=["cpu", "cuda", "rocm"], help="by default cuda where there is a GPU"
    )
    add("--master-ip", default=None, help="by default MASTER_ADDR, or Slurm's first node, or 127.0.0.1")
    add(
        "--master-port",
        type=_integer_from(0),
        default=None,
        help="by default the one after MASTER_PORT, or from 29501 on",
    )
    add("--c", type=int, choices=[0, 1], default=0, help="check every result once, before the timed replays")
    add("--data-accuracy-mode", choices=["none", "save", "check"], default="none", help="check: as --c 1")
    _add_ignored_flags(parser)
    return parser


def _add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    for flags, reason in IGNORED_FLAGS.items():
        parser.add_argument(*flags, default=None, nargs="+", metavar="VALUE", help=f"no effect: {reason}")
    for flags, reason in IGNORED_SWITCHES.items():
        parser.add_argument(*flags, default=None, action="store_true", help=f"no effect: {reason}")


def describe_ignored_flags(args: argparse.Namespace) -> list[str]:
    """Return a line with the reason for each flag on the command line that has no effect."""
    lines = [
        f"{flags[0]} has no effect: {reason}"
        for flags, reason in WITHOUT_EFFECT.items()
        if getattr(args, flags[0].lstrip("-").replace("-", "_")) is not None
    ]
    if args.data_accuracy_mode == "save":
        lines.append(f"--data-accuracy-mode save has no effect: {_CHECKED_BY_COMPUTATION}")
    return lines


def _parse_backend(text: str) -> str:
    try:
        check_backend(text)
    except UnknownName as error:
        raise argparse.ArgumentTypeError(f"{error.what}; {error.remedy}") from None
    return text


def _integer_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return number


def _parse_ranks(text: str) -> list[int] | None:
    """Parse 1,3 or 1:3 (both ends included) as a list of ranks; None for all ranks."""
    if text in ("", "all"):
        return None
    if span := re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text):
        return list(range(int(span[1]), int(span[2]) + 1))
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise argparse.ArgumentTypeError(f"expected a list of ranks such as 1,3 or 1:3, got {text!r}")
    return [int(rank) for rank in text.split(",")]


def _parse_collectives(text: str) -> tuple[str, ...]:
    """Convert a comma-separated list of PARAM's collective names to etloom's names; an empty result selects all."""
    if text == "all":
        return ()
    collectives: set[str] = set()
    for spelling in filter(None, (spelling.strip() for spelling in text.split(","))):
        names = _SPELLINGS.get(spelling.lower().replace("_", ""))
        if names is None:
            raise argparse.ArgumentTypeError(
                f"{spelling!r} is not a collective; expected one of {', '.join(sorted(COLLECTIVES | MESSAGES))}"
            )
        collectives.update(names)
    if not collectives:
        raise argparse.ArgumentTypeError(f"{text!r} selects nothing to replay")
    return tuple(sorted(collectives))


if __name__ == "__main__":
    raise SystemExit(main())
