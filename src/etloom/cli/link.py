"""etloom link: link the traces of each rank and save the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from etloom.cli.command import FiniteFloat, Flag, Positional, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.run_arguments import RunOptions, open_job
from etloom.core.errors import EtloomError
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    from etloom.core.trace import Job, Trace


@dataclass(frozen=True)
class SourceOptions:
    """The traces to link: a folder, or the host and device trace of one rank."""

    path: Annotated[Path | None, "A folder with the traces of a run.", Positional("[PATH]")] = None
    host: Annotated[Path | None, "The execution trace of one rank."] = None
    device: Annotated[Path | None, "The Kineto or Nsight trace of that rank."] = None
    rank: Annotated[int | None, "Only this rank; with --host and --device the rank that they belong to."] = (
        None
    )


@dataclass(frozen=True)
class LinkOptions:
    """Linking options: profile iteration to use if ids are missing, and thread pause (us) that implies a dependency."""

    iterations: Annotated[
        str,
        "The profile iteration to which the execution trace is linked if ids are missing: best, all, or a "
        "number from 0.",
    ] = "best"
    inter_thread_threshold: Annotated[
        float,
        "Pause of a thread in us after which it is assumed to depend on another thread.",
        Flag(type=FiniteFloat(min=0)),
    ] = 1000.0

    def to_keywords(self) -> dict[str, Any]:
        """Return the options as keywords of `etloom.link`."""
        return {"iterations": self.iterations, "inter_thread_threshold_us": self.inter_thread_threshold}


@command()
def link(
    *,
    source: SourceOptions,
    out: Annotated[
        Path | None, "Where to save; the ending of the name selects the format.", Flag("-o")
    ] = None,
    to: Annotated[str | None, "The format: etplus, chakra, chrome, parquet."] = None,
    linking: LinkOptions,
    run: RunOptions,
) -> None:
    """Link operators, launches and GPU activity, and save the linked traces (as Parquet by default).

    Prints which share could be linked. Give either a folder, or --host and --device. If --out is not a file name, it is
    a folder; formats that hold one rank get one file per rank in it.

    Examples:

    \b
      etloom link run/ --out linked/
      etloom link run/ --out et_plus/ --to etplus
      etloom link --host torch_et_0.json --device kineto_trace_0.json.gz --out rank0.etplus.json
      etloom link --host one_step.json --device forty_steps.json --iterations all --out steps.parquet
    """
    if (source.path is None) == (source.host is None and source.device is None):
        raise click.UsageError("expected either a folder, or --host and --device")
    if out is None:
        raise click.UsageError("missing the path to save to: --out PATH")
    import etloom
    from etloom.cli.output import Format, write_table
    from etloom.core import registry

    format = to or _infer_format(out) or "parquet"
    with as_usage_error("to" if to else "out"):
        registry.get("exports", format)
    linked = _link(source, linking.to_keywords(), run)
    if run.strict:
        linked.check_lossless()
    for name, severity, count, example in linked.stats.select("name", "severity", "count", "example").rows():
        if severity != "info":
            print_message(f"{name}: {count} ({example})")
    write_table(etloom.analyze(linked, "link-quality"), Format.table, None)
    _save(linked, out, format)
    print_message(f"saved {out}")


def _link(source: SourceOptions, linking: dict[str, Any], run: RunOptions) -> Trace | Job:
    """Open and link the run at the path, or the host and device trace of one rank."""
    import etloom
    from etloom.core.text import unknown_rank_error
    from etloom.core.trace import Job

    if source.path is not None:
        options = replace(run, strict=False)
        job = open_job(source.path, options, warn=False, **linking)
        if source.rank is None:
            return job
        if source.rank not in job:
            raise unknown_rank_error(source.rank, job)
        return Job({source.rank: job[source.rank]}, job.meta)
    files = [file for file in (source.host, source.device) if file is not None]
    return etloom.link(*files, rank=source.rank, **linking)


def _save(linked: Trace | Job, out: Path, format: str) -> None:
    """Write a trace or job to the file ``out``, or a job into the folder ``out`` if that is not a file name."""
    import etloom
    from etloom.cli.output_files import check_outputs
    from etloom.core import registry
    from etloom.core.trace import Job

    if not isinstance(linked, Job) or format == "parquet" or _infer_format(out) is not None:
        etloom.export(linked, out, format)
        return
    suffix = registry.get_suffixes("exports", format)[0]
    if clean_url(out) is not None:
        raise EtloomError(
            "a format of one file per rank cannot be written to an object store",
            where=out,
            remedy="write --out NAME.parquet, or a local folder",
        )
    # An ET+ file holds one rank.
    parts = (
        {out / f"rank_{rank}{suffix}": trace for rank, trace in linked.items()}
        if format == "etplus"
        else {out / f"run{suffix}": linked}
    )
    check_outputs([Path(file) for trace in linked.values() for file in trace.meta.get("files", ())], parts)
    out.mkdir(parents=True, exist_ok=True)
    for file, run in parts.items():
        etloom.export(run, file, format)


def _infer_format(out: Path) -> str | None:
    """Return the export format whose suffix ends the file name; None for the name of a folder."""
    from etloom.core import registry

    try:
        return registry.find_by_suffix("exports", out)
    except EtloomError:
        return None
