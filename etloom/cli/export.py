"""etloom export: write traces in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from etloom.cli.error_handling import as_usage_error, handle_errors, print_message
from etloom.cli.run_arguments import (
    CacheOption,
    JobsOption,
    PathArgument,
    RankPatternOption,
    StrictOption,
    open_job,
)
from etloom.core.errors import EtloomError
from etloom.core.text import unknown_rank_error


@handle_errors()
def export(
    path: PathArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file or folder to write.", show_default=False)
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format; by default the end of --out says.", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", help="An option of the format, NAME=VALUE; may be repeated."),
    ] = None,
    overlay: Annotated[
        str | None,
        typer.Option(
            help="Of chrome: critical-path, drawn as arrows. The same as -O overlay=.", show_default=False
        ),
    ] = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Write the linked traces of a run in another format: chrome (for Perfetto), parquet, chakra (for ASTRA-sim,
    one file per rank), etplus or folded (call stacks, for flame graphs).

    Examples:

    \b
      etloom export run/ --out run.json.gz       # open it at https://ui.perfetto.dev
      etloom export run/ --out run.json.gz --overlay critical-path
      etloom export run/ --out run.folded        # flamegraph.pl, https://speedscope.app; -O time=device
      etloom export run/ --out run.parquet       # read it with polars, DuckDB, Spark
      etloom export run/ --rank 0 --to chrome --out rank0.json
      etloom export run/ --out sim/job.et        # check it with: etloom lint sim/
    """
    import etloom
    from etloom.api.arguments import check_options
    from etloom.core import registry

    with as_usage_error("to" if to else "out"):
        name = to or registry.find_by_suffix("exports", out)
        registry.get("exports", name)
    chosen = _parse_options(name, option or [])
    if overlay is not None:
        chosen["overlay"] = overlay
    with as_usage_error("option"):
        check_options("exports", name, chosen)

    job = open_job(path, rank_pattern, strict, jobs, cache)
    if rank is not None and rank not in job:
        raise unknown_rank_error(rank, job)
    try:
        etloom.export(job if rank is None else job[rank], out, name, **chosen)
    except EtloomError as error:
        if error.option in chosen and error.option != "overlay":
            error.option = "option"
        raise
    if name == "chakra" and rank is None and len(job) > 1:
        from etloom.formats.chakra.et_files import path_of_rank

        print_message(
            f"wrote {path_of_rank(out, job.ranks[0])} to {path_of_rank(out, job.ranks[-1]).name}, a file a rank"
        )
    else:
        print_message(f"wrote {out}")


def _parse_options(name: str, given: list[str]) -> dict[str, Any]:
    """NAME=VALUE as the types of the format's options; what it does not have is left to `etloom.export`."""
    from etloom.core import registry

    types = {one.name: one.type for one in registry.list_options("exports", name)}
    chosen: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise EtloomError(f"{text!r} is not NAME=VALUE", option="option")
        kinds = get_args(types.get(key)) or (types.get(key),)
        try:
            chosen[key] = int(value) if int in kinds else _BOOLEANS[value] if bool in kinds else value
        except (ValueError, KeyError):
            wanted = "a number" if int in kinds else "true or false"
            raise EtloomError(f"{key} is {wanted}, not {value!r}", option="option") from None
    return chosen


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
