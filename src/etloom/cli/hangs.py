"""etloom hangs: prints the cause of a hang in one sentence, then the evidence and the divergences between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import make_printable, print_message
from etloom.cli.output import Format, write_table, write_text
from etloom.cli.run_arguments import RankPattern

if TYPE_CHECKING:
    import polars as pl

    from etloom.api.verdicts import HangReport

_MAX_PROBLEMS = 5


@command()
def hangs(
    *,
    path: Annotated[
        Path,
        "A folder with the Flight Recorder dump of each rank, a run of etloom collect --watch, a report of ncclras, or "
        "the folder of torch.distributed's debug server.",
        Positional("PATH"),
    ],
    rank_pattern: RankPattern = None,
    top: Annotated[
        int, "Number of divergences shown after the answer.", Flag(type=click.IntRange(min=0))
    ] = 20,
    format: Annotated[Literal["text", "json"], "Output format.", Flag("-f")] = "text",
) -> None:
    """Find which ranks stopped or diverged, in which collective, and who waits for them.

    The first line is the answer; evidence and the divergences between ranks follow. Kinds: not arrived, crashed,
    stopped, unresponsive (the GIL is held), data loading, a checkpoint, other collective, other size, other dtype, wait
    for each other, device, link, host. etloom analyze hangs prints the whole table in any format.

    A report of NCCL's RAS (ncclras, text or -f json) names the ranks that are dead, silent, behind, ahead or in another
    status (also: nccl error); two reports show whether the job makes progress. In a folder with dumps, it states what
    happened to ranks without one. Stacks of torch.distributed's debug server name the line where a rank is.

    Examples:

    \b
      etloom hangs dumps/
      etloom hangs run/ --format json
      ncclras -f json > ras.json; etloom hangs ras.json

    Exit status: 0, whether or not there is a hang; 1 if neither dumps, a report nor stacks are found.
    """
    import etloom

    report = etloom.hangs(path, rank_pattern=rank_pattern)
    for problem in report.problems[:_MAX_PROBLEMS]:
        print_message(problem)
    if len(report.problems) > _MAX_PROBLEMS:
        print_message(f"{len(report.problems) - _MAX_PROBLEMS:,} more problems")
    if format == "json":
        write_text(_format_json(report), None)
        return
    lines = [report.sentence]
    if report.cause is not None:
        lines += [f"  rank {rank}: {text}" for rank, text in report.cause.evidence.iter_rows()]
    lines += report.remarks
    write_text("\n".join(map(make_printable, lines)) + "\n", None)
    table = _shorten_ranks(report.table if report.communicators is None else report.communicators)
    if top and not table.is_empty():
        write_text("\n", None)
        write_table(table.head(top), Format.table, None)
        if table.height > top:
            print_message(f"{top:,} of {table.height:,} rows; --top {table.height} shows all")


def _format_json(report: HangReport) -> str:
    import json

    cause = report.cause
    answer: dict[str, Any] = {
        "sentence": report.sentence,
        "kind": cause.kind if cause else None,
        "ranks": cause.ranks if cause else [],
        "evidence": cause.evidence.to_dicts() if cause else [],
        "divergences": report.table.to_dicts(),
    }
    if report.remarks:
        answer["remarks"] = report.remarks
    if report.communicators is not None:
        answer["communicators"] = report.communicators.to_dicts()
    return json.dumps(answer, ensure_ascii=False, indent=1) + "\n"


def _shorten_ranks(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table with lists of ranks as text, such as 0-3, 7, and without the column ``called_ns``.

    Ranks that are unknown stay null.
    """
    import polars as pl

    from etloom.core.text import format_ranges

    return table.with_columns(
        pl.Series(
            name,
            [None if ranks is None else format_ranges(ranks) for ranks in table[name].to_list()],
            dtype=pl.String,
        )
        for name in ("ranks", "others")
        if name in table.columns
    ).drop("called_ns", strict=False)
