"""etloom replay compute: run the recorded operators again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._output import Format, emit
from etloom.cli.replay import app


@app.command(short_help="The recorded operators, on this machine.")
@guarded()
def compute(
    path: Annotated[Path, typer.Argument(help="A folder of traces, or one file.", metavar="PATH")],
    device: Annotated[str, typer.Option(help="cpu, cuda, or meta: shapes only.")] = "cpu",
    rank: Annotated[int | None, typer.Option(help="By default the lowest.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Only ProfilerStep#N.", show_default=False)] = None,
    allow_namespace: Annotated[
        list[str] | None, typer.Option(help="Run operators of this namespace too.", show_default=False)
    ] = None,
    max_memory: Annotated[float, typer.Option(min=0, help="Of what lives at once, GiB.")] = 4.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the replay as a trace.", show_default=False)
    ] = None,
    format: Annotated[Format | None, typer.Option("--format", help="Of what is printed.")] = None,
) -> None:
    """Run the recorded operators again, in order, and say which could not be.

    Only operators of aten, and of namespaces that are allowed by name, are run; each gets what its producers gave.

    Examples:

    \b
      etloom replay compute run/ --device cpu
      etloom replay compute run/ --device meta --format csv
    """
    import etloom
    from etloom.errors import EtloomError

    if device not in ("cpu", "cuda", "meta"):
        raise EtloomError(f"--device {device!r} is not known", remedy="one of cpu, cuda, meta")
    job = etloom.open(path)
    wanted = min(job) if rank is None else rank
    if wanted not in job:
        raise EtloomError(f"no rank {wanted} in {path}", remedy=f"one of {', '.join(map(str, job))}")
    from etloom.replayer.compute import replay

    namespaces = frozenset({"aten", *(allow_namespace or [])})
    done = replay(job[wanted], device, namespaces, step, int(max_memory * (1 << 30)))
    emit(done.coverage, format, None)
    for name, part in done.coverage.group_by("result", maintain_order=True):
        say(f"{name[0]}: {part['share_of_count'].sum():.1%} of operators")
    if out:
        etloom.export(done.trace, out)
        say(f"wrote {out}")
