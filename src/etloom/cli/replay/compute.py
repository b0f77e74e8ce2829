"""etloom replay compute: re-run the recorded operators of a rank."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from etloom.cli.command import FiniteFloat, Flag, command
from etloom.cli.output_files import check_export
from etloom.cli.replay.options import AT_LEAST_0, AT_LEAST_1, AllowedNamespaces, TableFormat
from etloom.cli.run_arguments import RunPath
from etloom.core.errors import EtloomError
from etloom.replayer.comms.comms_options import Repeats, Warmup


@dataclass(frozen=True)
class ReplayOptions:
    """Options that select the device, the operators, the repeats and the limits of a replay."""

    device: Annotated[Literal["cpu", "cuda", "meta"], "meta: shapes and types only."] = "cpu"
    rank: Annotated[int | None, "Default: the lowest rank."] = None
    step: Annotated[int | None, "Only ProfilerStep#N; default: all steps."] = None
    subgraph: Annotated[
        str | None,
        "Only operators and annotations of this name, with what they contain.",
        Flag(metavar="NAME"),
    ] = None
    allow_namespace: AllowedNamespaces = ()
    repeats: Annotated[Repeats, AT_LEAST_1] = 3
    warmup: Annotated[Warmup, AT_LEAST_0] = 1
    max_memory: Annotated[
        float | None,
        "Memory limit in GB; default: 80 % of the free memory, which the ranks of a host share on a CPU. "
        "Operators that do not fit are skipped.",
        Flag(type=FiniteFloat(min=0)),
    ] = None
    max_time: Annotated[
        float | None,
        "Seconds after which no further operator is tried and no further repeat is started.",
        Flag(type=FiniteFloat(min=0)),
    ] = None
    operator_timeout: Annotated[
        float | None,
        "An operator that takes longer is skipped, and a second one ends the replay; default: 5.",
        Flag(type=FiniteFloat(min=0, min_open=True), metavar="SECONDS"),
    ] = None
    threads: Annotated[
        int | None,
        "Threads of an operator on a CPU; default: torch's. A recording does not state its number of threads.",
        Flag(type=click.IntRange(min=1)),
    ] = None


@command()
def compute(
    *,
    path: RunPath,
    options: ReplayOptions,
    min_coverage: Annotated[
        float,
        "Fail if less than this percentage of the operators is covered.",
        Flag(type=FiniteFloat(min=0, max=100)),
    ] = 0,
    out: Annotated[Path | None, "Write the replay as a trace: .parquet or .json.gz.", Flag("-o")] = None,
    format: TableFormat = None,
) -> None:
    """Re-run the recorded operators in order, and list those that cannot run.

    Each operator gets the results of the operators before it; other tensors are synthetic. Only operators of torch's
    registry run, from aten and the allowed namespaces; nothing of the trace is executed as code. With --out, etloom
    diff compares the replay with the recording. If the replay is interrupted (Ctrl-C, --max-time), the results until
    then are printed and written, and the trace's stats say that it is incomplete.

    Examples:

    \b
      etloom replay compute run/
      etloom replay compute run/ --device meta --min-coverage 95
      etloom replay compute run/ --step 3 --out replay.parquet && etloom diff run/ replay.parquet
    """
    if out:
        check_export(out)
        if options.device == "meta":
            raise EtloomError(
                "--out requires a device that computes: a replay on meta has no trace",
                remedy="use --device cpu",
            )
    request = {
        "path": str(path),
        "device": options.device,
        "rank": options.rank,
        "step": options.step,
        "subgraph": options.subgraph,
        "namespaces": sorted({"aten", *options.allow_namespace}),
        "repeats": options.repeats,
        "warmup": options.warmup,
        "max_bytes": None if options.max_memory is None else int(options.max_memory * 1e9),
        "deadline": None if options.max_time is None else time.monotonic() + options.max_time,
        "threads": options.threads,
        "min_coverage": min_coverage,
        "out": None if out is None else str(out),
        "format": None if format is None else format.value,
    }
    from etloom.replayer.compute.isolation import run_isolated

    status, _ = run_isolated(
        ["etloom.cli.replay.compute_worker", json.dumps(request)],
        operator_timeout_s=options.operator_timeout,
    )
    if status:
        raise SystemExit(status)
