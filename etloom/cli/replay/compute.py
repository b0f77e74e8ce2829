"""etloom replay compute: run the recorded operators again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import PathArgument
from etloom.cli._output import Format, emit

if TYPE_CHECKING:
    from etloom.replayer.program import Step

PROGRESS_S = 5.0


@guarded()
def compute(
    path: PathArgument,
    device: Annotated[str, typer.Option(help="cpu, cuda, or meta: shapes and types only.")] = "cpu",
    rank: Annotated[int | None, typer.Option(help="By default the lowest.", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(help="Only ProfilerStep#N; by default all.", show_default=False)
    ] = None,
    allow_namespace: Annotated[
        list[str] | None,
        typer.Option(
            help="Run the operators of this namespace too, such as torchvision.", show_default=False
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often all of it is run and timed.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="How often it is run before that.")] = 1,
    max_memory: Annotated[
        float | None,
        typer.Option(min=0, help="GB that tensors may take on a CPU; by default 80 % of what is free."),
    ] = None,
    min_coverage: Annotated[
        float, typer.Option(min=0, max=100, help="Fail where less than this % of operators is covered.")
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
    code. With --out, etloom diff compares the replay with the recording.

    Examples:

    \b
      etloom replay compute run/
      etloom replay compute run/ --device meta --min-coverage 95
      etloom replay compute run/ --step 3 --out replay.parquet && etloom diff run/ replay.parquet
    """
    asked = {
        "path": str(path),
        "device": device,
        "rank": rank,
        "step": step,
        "namespaces": sorted({"aten", *(allow_namespace or ())}),
        "repeats": repeats,
        "warmup": warmup,
        "max_bytes": None if max_memory is None else int(max_memory * 1e9),
        "min_coverage": min_coverage,
        "out": None if out is None else str(out),
        "format": None if format is None else format.value,
    }
    from etloom.replayer import apart

    if status := apart.run([__name__, json.dumps(asked)]):
        raise SystemExit(status)


@guarded()
def work(asked: dict[str, Any]) -> None:
    """The command, in the process that may die of it."""
    import etloom
    from etloom.errors import EtloomError, UnknownName
    from etloom.replayer import apart
    from etloom.replayer.compute import replay

    job = etloom.open(asked["path"])
    chosen = min(job) if asked["rank"] is None else asked["rank"]
    if chosen not in job:
        raise UnknownName("rank", str(chosen), map(str, job))
    told, leave_out = apart.here()
    done = replay(
        job[chosen],
        asked["device"],
        namespaces=frozenset(asked["namespaces"]),
        step=asked["step"],
        repeats=asked["repeats"],
        warmup=asked["warmup"],
        max_bytes=asked["max_bytes"],
        progress=_progress(told),
        leave_out=leave_out,
    )
    out = None if asked["out"] is None else Path(asked["out"])
    emit(done.coverage, None if asked["format"] is None else Format(asked["format"]), None)
    covered = done.covered() or 0.0
    of_time = done.covered("recorded_ns")
    time = "" if of_time is None else f", {of_time:.2%} of their recorded time"
    say(f"covered: {covered:.2%} of operators{time}; at most {done.peak_bytes / 1e6:,.1f} MB at a time")
    if done.repeats_ns:
        best = min(done.repeats_ns)
        against = f", recorded {done.recorded_ns / 1e6:,.3f} ms" if done.recorded_ns else ""
        say(f"took {best / 1e6:,.3f} ms at best of {len(done.repeats_ns)}{against}")
    if out and done.trace is None:
        raise EtloomError("on meta nothing takes time, so there is no trace to write", remedy="--device cpu")
    if out and done.trace is not None:
        etloom.export(done.trace, out)
        say(f"wrote {out}")
    if covered * 100 < (least := asked["min_coverage"]):
        raise EtloomError(f"{covered:.2%} of operators are covered, {least:g} % were asked for")


def _progress(told: Callable[[int], None]) -> Callable[[Step], None]:
    """Tells what is tried; the user only every few seconds, of a rehearsal that takes long."""
    tried = 0
    last = time.monotonic()

    def tell(step: Step) -> None:
        nonlocal tried, last
        told(step.node)
        tried += 1
        if time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            say(f"rehearsing: {tried:,} operators tried, now {step.name}")

    return tell


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
