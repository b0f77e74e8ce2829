"""etloom replay compute: run the recorded operators again."""

from __future__ import annotations

import enum
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from etloom.cli.error_handling import handle_errors
from etloom.cli.output import Format
from etloom.cli.output_checks import check_export
from etloom.cli.replay.options import AllowNamespace
from etloom.cli.replay.typer_options import PathArgument, check_finite
from etloom.core.errors import EtloomError


class Device(str, enum.Enum):
    cpu = "cpu"
    cuda = "cuda"
    meta = "meta"


@handle_errors()
def compute(
    path: PathArgument,
    device: Annotated[Device, typer.Option(help="meta: shapes and types only.")] = Device.cpu,
    rank: Annotated[int | None, typer.Option(help="By default the lowest.", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(help="Only ProfilerStep#N; by default all.", show_default=False)
    ] = None,
    allow_namespace: AllowNamespace = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often all of it is run and timed.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="How often it is run before that.")] = 1,
    max_memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=check_finite,
            help="GB that it may take; by default 80 % of what is free, on a CPU shared by the ranks of a host. "
            "Operators that do not fit are left out.",
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=check_finite,
            help="Seconds after which no operator is tried and no repeat begun any more.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of an operator on a CPU; by default torch's. Recordings do not tell theirs.",
            show_default=False,
        ),
    ] = None,
    min_coverage: Annotated[
        float,
        typer.Option(
            min=0, max=100, callback=check_finite, help="Fail where less than this % of operators is covered."
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the replay as a trace, by its end.", show_default=False),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option("--format", help="Of what is printed; by default a table.", show_default=False),
    ] = None,
) -> None:
    """Run the recorded operators again, in order, and say by operator what could not be.

    Each operator gets what the operators before it gave; what comes from elsewhere is made up. Only operators of
    torch's own registry are run, of aten and of the namespaces that are allowed; nothing of the trace is executed as
    code. With --out, etloom diff compares the replay with the recording. Where it is interrupted
    (Ctrl-C, --max-time), what ran until then is told and written, and the trace's stats say that it is not whole.

    Examples:

    \b
      etloom replay compute run/
      etloom replay compute run/ --device meta --min-coverage 95
      etloom replay compute run/ --step 3 --out replay.parquet && etloom diff run/ replay.parquet
    """
    if out:
        check_export(out)
        if device is Device.meta:
            raise EtloomError(
                "on meta nothing takes time, so there is no trace to write", remedy="--device cpu"
            )
    asked = {
        "path": str(path),
        "device": device.value,
        "rank": rank,
        "step": step,
        "namespaces": sorted({"aten", *(allow_namespace or ())}),
        "repeats": repeats,
        "warmup": warmup,
        "max_bytes": None if max_memory is None else int(max_memory * 1e9),
        "until": None if max_time is None else time.monotonic() + max_time,
        "threads": threads,
        "min_coverage": min_coverage,
        "out": None if out is None else str(out),
        "format": None if format is None else format.value,
    }
    from etloom.replayer.compute import isolation

    status, _ = isolation.run_isolated(["etloom.cli.replay.compute_worker", json.dumps(asked)])
    if status:
        raise SystemExit(status)
