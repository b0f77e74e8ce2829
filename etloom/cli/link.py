"""etloom link: join the traces of each rank and save what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.cli._input import CacheOption, JobsOption, RankPatternOption, StrictOption, open_job
from etloom.errors import EtloomError


@guarded()
def link(
    path: Annotated[
        Path | None, typer.Argument(help="A folder of traces of a run.", show_default=False, metavar="[PATH]")
    ] = None,
    host: Annotated[Path | None, typer.Option(help="The execution trace of one rank.")] = None,
    device: Annotated[Path | None, typer.Option(help="The Kineto or Nsight trace of that rank.")] = None,
    rank: Annotated[int | None, typer.Option(help="The rank the two are of; by default they say.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to save: a folder, or a name of an export's kind."),
    ] = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Join operators, launches and device work, and save the linked traces (as Parquet unless --out says).

    Prints how far the linking reached. Give either a folder, or --host and --device.

    Examples:

    \b
      etloom link run/ --out linked/
      etloom link --host torch_et_0.json --device kineto_trace_0.json.gz --out rank0.parquet
    """
    if (path is None) == (host is None and device is None):
        raise typer.BadParameter("give either a folder, or --host and --device")
    if out is None:
        raise typer.BadParameter("say where to save: --out")
    import etloom
    from etloom import registry
    from etloom.cli._output import Format, emit
    from etloom.trace import Job, Trace

    what: Trace | Job
    if path is not None:
        what = open_job(path, rank_pattern, strict, jobs, cache)
    else:
        parts = [etloom.read(file) for file in (host, device) if file is not None]
        if several := next((part for part in parts if isinstance(part, Job)), None):
            raise EtloomError(
                f"one of the two holds {len(several)} ranks", remedy="link it as a folder or alone"
            )
        what = etloom.link(*(part for part in parts if isinstance(part, Trace)))
        what = what if rank is None else what.replace(meta={"rank": rank})
        if strict:
            what.check_lossless()
    emit(etloom.analyze(what, "link-quality"), Format.table, None)
    known = any(
        out.name.endswith(end)
        for name in registry.names("exports")
        for end in registry.suffixes("exports", name)
    )
    etloom.export(what, out, format=None if known else "parquet")
    say(f"saved {out}")
