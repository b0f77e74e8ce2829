"""etloom link: join the traces of each rank and save what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etloom.cli.error_handling import as_usage_error, check_finite, handle_errors, print_message
from etloom.cli.run_arguments import CacheOption, JobsOption, RankPatternOption, StrictOption, open_job
from etloom.core.errors import EtloomError
from etloom.core.text import unknown_rank_error

if TYPE_CHECKING:
    from etloom.core.trace import Job, Trace

_DEFAULTS: dict[str, Any] = {"iterations": "best", "inter_thread_threshold_us": 1000.0}


@handle_errors()
def link(
    path: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A folder of traces of a run.", show_default=False, metavar="[PATH]"
        ),
    ] = None,
    host: Annotated[Path | None, typer.Option(help="The execution trace of one rank.")] = None,
    device: Annotated[Path | None, typer.Option(help="The Kineto or Nsight trace of that rank.")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank; of --host and --device the rank they are of.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to save; the end of the name chooses the format."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format: etplus, chakra, chrome, parquet.", show_default=False),
    ] = None,
    iterations: Annotated[
        str,
        typer.Option(
            help="Which iteration of the profile the execution trace is joined to, where ids are missing: best, "
            "all, or a number from 0."
        ),
    ] = _DEFAULTS["iterations"],
    inter_thread_threshold: Annotated[
        float,
        typer.Option(
            min=0,
            callback=check_finite,
            help="Pause of a thread in us after which it is taken to follow another one.",
        ),
    ] = _DEFAULTS["inter_thread_threshold_us"],
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Join operators, launches and device work, and save the linked traces (as Parquet unless told otherwise).

    Prints how far the linking reached. Give either a folder, or --host and --device. Where --out is no name of a file,
    it is a folder; each rank gets a file of its own in it, if the format holds one rank.

    Examples:

    \b
      etloom link run/ --out linked/
      etloom link run/ --out et_plus/ --to etplus
      etloom link --host torch_et_0.json --device kineto_trace_0.json.gz --out rank0.etplus.json
      etloom link --host one_step.json --device forty_steps.json --iterations all --out steps.parquet
    """
    if (path is None) == (host is None and device is None):
        raise typer.BadParameter("give either a folder, or --host and --device")
    if out is None:
        raise typer.BadParameter("say where to save: --out")
    import etloom
    from etloom.cli.output import Format, write_table
    from etloom.core import registry
    from etloom.core.trace import Job
    from etloom.linker.merging import select_rank

    format = to or _infer_format(out)
    with as_usage_error("to" if to else "out"):
        registry.get("exports", format)
    # Only what differs from the defaults: what was linked with those is in the cache, or saved so.
    chosen: dict[str, Any] = {"iterations": iterations, "inter_thread_threshold_us": inter_thread_threshold}
    linking = {name: value for name, value in chosen.items() if value != _DEFAULTS[name]}
    what: Trace | Job
    if path is not None:
        what = open_job(path, rank_pattern, False, jobs, cache, tell=False, **linking)
        what = what if rank is None else Job({rank: _select_rank(what, rank, path)}, what.meta)
    else:
        files = [file for file in (host, device) if file is not None]
        if any(out.exists() and file.exists() and out.samefile(file) for file in files):
            raise EtloomError("is one of the two to be linked", where=out, remedy="name another --out")
        what = etloom.link(*(select_rank(etloom.read(file), rank, file) for file in files), **linking)
    if strict:
        what.check_lossless()
    for name, severity, count, example in what.stats.select("name", "severity", "count", "example").rows():
        if severity != "info":
            print_message(f"{name}: {count} ({example})")
    write_table(etloom.analyze(what, "link-quality"), Format.table, None)
    _save(what, out, format)
    print_message(f"saved {out}")


def _save(what: Trace | Job, out: Path, format: str) -> None:
    """Write to ``out``, or of the ranks of a folder, where that is no name of a file, into it."""
    import etloom
    from etloom.core import registry
    from etloom.core.trace import Job

    if not isinstance(what, Job) or format == "parquet" or _is_file_name(out):
        etloom.export(what, out, format)
        return
    suffix = registry.get_suffixes("exports", format)[0]
    out.mkdir(parents=True, exist_ok=True)
    if format != "etplus":
        etloom.export(what, out / f"run{suffix}", format)
        return
    for number, trace in what.items():  # an ET+ holds one rank
        etloom.export(trace, out / f"rank_{number}{suffix}", format)


def _infer_format(out: Path) -> str:
    """The export whose suffix ends the name; Parquet where there is none."""
    from etloom.core import registry

    try:
        return registry.find_by_suffix("exports", out)
    except EtloomError:
        return "parquet"


def _is_file_name(out: Path) -> bool:
    """Whether the name ends as that of a file of some export."""
    from etloom.core import registry

    known = (
        end for name in registry.list_plugins("exports") for end in registry.get_suffixes("exports", name)
    )
    return out.name.endswith(tuple(known))


def _select_rank(job: Job, rank: int, file: Path) -> Trace:
    if rank not in job:
        raise unknown_rank_error(rank, job)
    return job[rank]
