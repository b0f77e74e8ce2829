"""PARAM's communication replay by its own flags: ``etloom-comms-replay --trace-path RUN --trace-type et``.

Flags that mean something here do the same as there; those that cannot are named on stderr and change nothing; those
that are not PARAM's are errors. docs/coming-from-param.md holds what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.compat._command import told
from etloom.opening import Opening
from etloom.replayer.choice import chosen
from etloom.replayer.plan import Plan, table
from etloom.replayer.world import Place
from etloom.reports import text

_IDLE = {
    "nw-stack": "torch.distributed is the only one",
    "dtype": "types are those of the recording",
    "num-tpu-cores": "there are no TPUs here",
    "init-device": "tensors are made on --device",
    "bitwidth": "nothing is quantised",
    "quant-a2a-embedding-dim": "nothing is quantised",
    "quant-threshold": "nothing is quantised",
    "init-method": "ranks meet at --master-ip and --master-port",
    "profiler-num-replays-start": "every replay is timed; --output-path holds the last",
    "profiler-num-replays": "every replay is timed; --output-path holds the last",
    "savemodepath": "results are computed, not compared with a saved run",
    "checkmodepath": "results are computed, not compared with a saved run",
    "uploadpath": "nothing is uploaded",
    "rtol": "results are compared bit by bit",
    "atol": "results are compared bit by bit",
    "numelems": "all elements are compared",
    "log": "there is one level",
}
_IDLE_SWITCHES = {
    "use-ext-dist": "torch.distributed is used",
    "enable-local-report": "rank 0 reports for all",
    "enable-profiler": "every replay is timed; --output-path holds a trace of the last",
    "use-perf-logger": "results are files",
    "disable-parallel-read": "rank 0 reads for all",
    "reuse-tensors": "nothing is ever allocated while the clock runs",
}


def parser() -> argparse.ArgumentParser:
    """PARAM's flags."""
    made = argparse.ArgumentParser("etloom-comms-replay", description=__doc__, allow_abbrev=False)
    add = made.add_argument
    add("--trace-path", required=True, help="folder of rank-N files, or one file")
    add("--trace-type", default="et", choices=["et", "basic", "kineto"])
    add("--use-one-trace", action="store_true", help="play one rank's trace on all processes")
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--auto-shrink", action="store_true", help="play the first ranks on fewer processes")
    add("--max-msg-cnt", type=int, default=0, help="only the first N calls; 0: all")
    add("--num-replays", type=int, default=5)
    add("--warmup-iter", type=int, default=2)
    add("--do-warm-up", action="store_true", help="the old name: --warmup-iter 1")
    add("--allow-ops", "--allow-list", default="all", help="comma list of collectives")
    add("--blocking", "-b", action="store_true", help="wait for each call before the next")
    add("--z", type=int, choices=[0, 1], default=0, help="the old name of --blocking")
    add("--colls-per-batch", type=int, default=-1, help="also say how long N calls take")
    add("--use-timestamp", action="store_true", help="keep the recorded gaps")
    add("--rebalance-policy", default="", choices=["", "equal"], help="equal shares in all-to-alls")
    add("--output-path", default="", help="folder for replayedCommsPerf.rank-N.json and replay.parquet")
    add("--output-ranks", default="all", help="comma list of ranks that get a file")
    add("--backend", default="gloo", help="nccl, gloo, mpi, ucc, or another that torch has registered")
    add("--device", default=None, help="cpu or cuda; by default what the backend is for")
    add("--master-ip", default=None)
    add("--master-port", type=int, default=None)
    add("--c", type=int, choices=[0, 1], default=0, help="check every result once")
    add("--data-accuracy-mode", choices=["none", "save", "check"], default="none", help="check: as --c 1")
    add("--init-only", action="store_true", help="only start the process group")
    for name, why in _IDLE.items():
        add(f"--{name}", default=None, help=f"no effect: {why}")
    for name, why in _IDLE_SWITCHES.items():
        add(f"--{name}", action="store_true", default=None, help=f"no effect: {why}")
    return made


def replay(args: argparse.Namespace) -> None:
    """Replay as PARAM's flags say. Raises EtloomError."""
    place = Place.here()
    if place.rank == 0:
        for name, why in {**_IDLE, **_IDLE_SWITCHES}.items():
            if getattr(args, name.replace("-", "_")) is not None:
                sys.stderr.write(f"etloom-comms-replay: --{name} has no effect: {why}\n")
    only = () if args.allow_ops == "all" else tuple(one for one in _names(args.allow_ops) if one != "wait")

    def make(world: int) -> Plan:
        path = Path(args.trace_path)
        job = Opening().folder(path) if path.is_dir() else Opening().file(path)
        return chosen(
            job, world, trace_type=args.trace_type, one_for_all=args.use_one_trace, shrink=args.auto_shrink,
            only=only, first=args.max_msg_cnt or None, balance=args.rebalance_policy == "equal",
        )  # fmt: skip

    if args.dry_run:
        if place.rank == 0:
            _show(table(make(place.world)))
        return
    # torch tells a lost connection in pages of its own.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from etloom.replayer.comms import Options
    from etloom.replayer.session import Replayed, replay

    options = Options(
        args.backend,
        args.device or ("cuda" if args.backend in ("nccl", "ucc") else "cpu"),
        "recorded" if args.use_timestamp else "fast",
        blocking=args.blocking or bool(args.z),
        repeats=1 if args.init_only else max(1, args.num_replays),
        warmup=0 if args.init_only else (max(args.warmup_iter, int(args.do_warm_up))),
        verify=bool(args.c) or args.data_accuracy_mode == "check",
    )
    done: Replayed | None = replay(
        make, options, place=place, address=args.master_ip, port=args.master_port, end=_end
    )
    if done is None:
        return
    for one in done.plan.skipped:
        sys.stderr.write(f"not replayed, {one.count} times on rank {one.rank}: {one.name}: {one.reason}\n")
    _show(done.sums)
    if args.colls_per_batch > 0:
        _show(batches(done.calls, args.colls_per_batch))
    if args.output_path:
        wanted = None if args.output_ranks == "all" else [int(one) for one in _names(args.output_ranks)]
        _write(done, Path(args.output_path), wanted, args.backend)


def batches(calls: pl.DataFrame, size: int) -> pl.DataFrame:
    """How long each ``size`` calls in a row took on a rank, from the first call to the last completion, in ms."""
    took = (
        calls.group_by("rank", "repeat", batch=pl.col("call") // size)
        .agg(pl.len(), took=(pl.col("done_ns").max() - pl.col("made_ns").min()) / 1e6)
        .filter(pl.col("len") == size)
    )
    return took.select(
        pl.len().alias("batches"),
        *(pl.col("took").quantile(q / 100, "linear").alias(f"p{q}_ms") for q in (50, 95)),
        pl.col("took").mean().alias("mean_ms"),
        pl.col("took").min().alias("min_ms"),
        pl.col("took").max().alias("max_ms"),
        pl.col("took").sum().alias("total_ms"),
    )


def rows(plan: Plan, calls: pl.DataFrame, rank: int) -> list[dict[str, Any]]:
    """What PARAM writes of a rank: a row a call and replay. Sizes in elements, latency from the call to its end."""
    from etloom.kinds import itemsize

    own = plan.calls[rank]
    return [
        {
            "comms": (call := own[row["call"]]).collective, "seqnum": row["call"], "req": call.seq,
            "in_msg_size": sum(call.inputs), "out_msg_size": sum(call.outputs), "dtype": call.dtype,
            "dtype_size": itemsize(call.dtype), "in_split": list(call.in_split), "out_split": list(call.out_split),
            "root": call.root, "peer": call.peer, "global_ranks": list(call.group), "world_size": plan.world,
            "replay": row["repeat"], "latency_us": row["latency_ns"] / 1e3,
        }
        for row in calls.filter(pl.col("rank") == rank).iter_rows(named=True)
    ]  # fmt: skip


def _write(done: Any, folder: Path, ranks: list[int] | None, backend: str) -> None:
    from etloom.exports import parquet
    from etloom.replayer.results import job

    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(done.plan.world):
        if ranks is None or rank in ranks:
            file = folder / f"replayedCommsPerf.rank-{rank}.json"
            file.write_text(json.dumps(rows(done.plan, done.calls, rank), indent=1))
    parquet.write(job(done.plan, done.calls, backend), folder / "replay.parquet")
    sys.stderr.write(f"wrote {folder}\n")


def _names(given: str) -> list[str]:
    return [one.strip() for one in given.split(",") if one.strip()]


def _show(frame: pl.DataFrame) -> None:
    columns = [text.shown(frame, name) for name in frame.columns]
    cells = [
        [column.text(value) or "-" for column, value in zip(columns, row, strict=True)]
        for row in frame.rows()
    ]
    lines = [[column.header for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        said = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(f"{said.rstrip()}\n")


def _end(reason: Any) -> None:
    """Another process is gone: say so and end, since torch would wait for it."""
    sys.stderr.write(f"etloom-comms-replay: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """The console command."""
    args = parser().parse_args(argv)
    return told("etloom-comms-replay", lambda: replay(args))


if __name__ == "__main__":
    raise SystemExit(main())
