"""etloom replay compute: re-run the recorded operators of a rank."""

from __future__ import annotations

import enum
import json
import time
from dataclasses import dataclass
from pathlib import Path

import click

from etloom.cli.command import PATH_TYPE, FiniteFloat, OptionGroup, command
from etloom.cli.output import Format
from etloom.cli.output_files import check_export
from etloom.cli.replay.options import ALLOW_NAMESPACE, FORMAT, repeat_options
from etloom.cli.run_arguments import PATH
from etloom.core.errors import EtloomError


class Device(str, enum.Enum):
    """Devices on which operators can be replayed."""

    cpu = "cpu"
    cuda = "cuda"
    meta = "meta"


@dataclass(frozen=True)
class ReplayOptions:
    """Options that select the device, the operators, the repeats and the limits of a replay."""

    device: Device
    rank: int | None
    step: int | None
    subgraph: str | None
    allow_namespace: tuple[str, ...]
    repeats: int
    warmup: int
    max_memory: float | None
    max_time: float | None
    operator_timeout: float | None
    threads: int | None


_REPLAY_OPTIONS = OptionGroup(
    "options",
    ReplayOptions,
    [
        click.Option(
            ["--device"],
            type=click.Choice(Device),
            default=Device.cpu,
            help="meta: shapes and types only.",
        ),
        click.Option(["--rank"], type=int, help="Default: the lowest rank."),
        click.Option(["--step"], type=int, help="Only ProfilerStep#N; default: all steps."),
        click.Option(
            ["--subgraph"],
            metavar="NAME",
            help="Only operators and annotations of this name, with what they contain.",
        ),
        ALLOW_NAMESPACE,
        *repeat_options(3),
        click.Option(
            ["--max-memory"],
            type=FiniteFloat(min=0),
            help="Memory limit in GB; default: 80 % of the free memory, which the ranks of a host share on a CPU. "
            "Operators that do not fit are skipped.",
        ),
        click.Option(
            ["--max-time"],
            type=FiniteFloat(min=0),
            help="Seconds after which no further operator is tried and no further repeat is started.",
        ),
        click.Option(
            ["--operator-timeout"],
            type=FiniteFloat(min=0, min_open=True),
            metavar="SECONDS",
            help="An operator that takes longer is skipped, and a second one ends the replay; default: 5.",
        ),
        click.Option(
            ["--threads"],
            type=click.IntRange(min=1),
            help="Threads of an operator on a CPU; default: torch's. A recording does not state its number of threads.",
        ),
    ],
)


@command(
    PATH,
    _REPLAY_OPTIONS,
    click.Option(
        ["--min-coverage"],
        type=FiniteFloat(min=0, max=100),
        default=0,
        help="Fail if less than this percentage of the operators is covered.",
    ),
    click.Option(["--out", "-o"], type=PATH_TYPE, help="Write the replay as a trace: .parquet or .json.gz."),
    FORMAT,
)
def compute(
    path: Path, options: ReplayOptions, min_coverage: float, out: Path | None, format: Format | None
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
        if options.device is Device.meta:
            raise EtloomError(
                "--out requires a device that computes: a replay on meta has no trace",
                remedy="use --device cpu",
            )
    request = {
        "path": str(path),
        "device": options.device.value,
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
