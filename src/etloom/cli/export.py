"""etloom export: writes the traces of a run in another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output_files import describe_files
from etloom.cli.run_arguments import RunOptions, RunPath, open_job
from etloom.core.errors import EtloomError, InvalidValue

if TYPE_CHECKING:
    from etloom.core.trace import Job

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@command()
def export(
    *,
    path: RunPath,
    out: Annotated[Path, "The file or folder to write.", Flag("-o")],
    to: Annotated[str | None, "The format; default: from the ending of --out."] = None,
    rank: Annotated[int | None, "Only this rank."] = None,
    option: Annotated[
        tuple[str, ...], "An option of the format; may be repeated.", Flag("-O", metavar="NAME=VALUE")
    ] = (),
    overlay: Annotated[
        str | None,
        "For perfetto and chrome: critical-path, drawn as a track or as arrows. The same as -O overlay=.",
    ] = None,
    run: RunOptions,
) -> None:
    """Write the linked traces of a run in another format: perfetto (its own), chrome (JSON), parquet, chakra (for
    ASTRA-sim, one file per rank), etplus, folded (call stacks for flame graphs), pprof, ccl-bench (traces, card).

    Examples:

    \b
      etloom export run/ --out run.pftrace       # open it at https://ui.perfetto.dev
      etloom export run/ --out run.pftrace --overlay critical-path -O findings=true
      etloom export run/ --out run.json.gz       # chrome://tracing, HTA
      etloom export run/ --out run.folded        # flamegraph.pl, https://speedscope.app; -O time=device
      etloom export run/ --out run.parquet       # read it with polars, DuckDB, Spark
      etloom export run/ --rank 0 --to chrome --out rank0.json
      etloom export run/ --out sim/job.et        # check it with: etloom lint sim/
    """
    from etloom.core import registry
    from etloom.core.registry import check_options
    from etloom.core.text import unknown_rank_error

    with as_usage_error("to" if to else "out"):
        name = to or registry.find_by_suffix("exports", out)
        registry.get("exports", name)
    options = _parse_options(name, option)
    if overlay is not None:
        options["overlay"] = overlay
    with as_usage_error("option"):
        check_options("exports", name, options)
    job = open_job(path, run)
    if rank is not None and rank not in job:
        raise unknown_rank_error(rank, job)
    _export(job, rank, out, name, options)


def _export(job: Job, rank: int | None, out: Path, name: str, options: dict[str, Any]) -> None:
    """Export the job, or only the rank `rank`, and print the names of the written files."""
    import etloom

    try:
        run = job if rank is None else job[rank]
        first = etloom.export(run, out, name, **options)
    except EtloomError as error:
        if error.option in options and error.option != "overlay":
            error.option = "option"
        raise
    print_message(describe_files(first, out, run))


def _parse_options(format_name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Convert NAME=VALUE texts to a dict with the types of the format's options; unknown names are not checked here."""
    from etloom.core import registry

    types = {option.name: option.type for option in registry.list_options("exports", format_name)}
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise InvalidValue(f"expected NAME=VALUE, got {text!r}", option="option")
        kinds = [kind for kind in get_args(types.get(name)) or (types.get(name),) if kind is not NoneType]
        try:
            options[name] = int(value) if int in kinds else _BOOLEANS[value] if bool in kinds else value
        except (ValueError, KeyError):
            expected = "a number" if int in kinds else "true or false"
            raise InvalidValue(f"{name}: expected {expected}, got {value!r}", option="option") from None
    return options
