"""etloom replay compute: run the recorded operators again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import PathArgument
from etloom.cli._output import Format, emit


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
    import etloom
    from etloom.errors import EtloomError, UnknownName
    from etloom.replayer.compute import replay

    job = etloom.open(path)
    chosen = min(job) if rank is None else rank
    if chosen not in job:
        raise UnknownName("rank", str(rank), map(str, job))
    done = replay(
        job[chosen],
        device,
        namespaces=frozenset({"aten", *(allow_namespace or ())}),
        step=step,
        repeats=repeats,
        warmup=warmup,
        max_bytes=None if max_memory is None else int(max_memory * 1e9),
    )
    emit(done.coverage, format, None)
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
    if covered * 100 < min_coverage:
        raise EtloomError(f"{covered:.2%} of operators are covered, {min_coverage:g} % were asked for")
