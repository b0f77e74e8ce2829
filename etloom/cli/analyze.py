"""etloom analyze: every analysis of the registry is a sub-command, its options are flags."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from etloom.cli.error_handling import as_usage_error, check_finite, handle_errors, print_message
from etloom.cli.output import Format, FormatOption, OutOption, choose_format, write_table
from etloom.cli.run_arguments import (
    CacheOption,
    JobsOption,
    PathArgument,
    RankPatternOption,
    StrictOption,
    open_job,
)

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job

FILTERS: dict[str, Any] = {
    "rank": Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")],
    "step": Annotated[int | None, typer.Option(help="Only this ProfilerStep.")],
    "time": Annotated[
        str | None,
        typer.Option(
            help="Only what begins in START:END after the first work recorded, as 10ms:1.5s.",
            metavar="START:END",
        ),
    ],
    "name": Annotated[
        list[str] | None,
        typer.Option(
            help="Only events whose name fits this, and what they enclose and launch.", metavar="GLOB"
        ),
    ],
    "category": Annotated[
        list[str] | None,
        typer.Option(
            help="Only this category (cpu_op, kernel, ...) or kind of device work (communication, ...)."
        ),
    ],
}
"""What every analysis can be asked of, unless it has an option of that name: see `etloom.select`."""

ALL_ROWS = 10**9


class AnalysisGroup(TyperGroup):
    """The group of all analyses, looked up when it is asked for one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, _, works in _list_analyses() if works]

    @handle_errors()
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from etloom.core import registry

        with as_usage_error():
            registry.find_package(
                "analyses", cmd_name
            )  # an unknown name is answered with the nearest known one
        return _make_command(cmd_name.replace("_", "-"))


app = typer.Typer(
    cls=AnalysisGroup, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
)


@app.callback(invoke_without_command=True)
@handle_errors()
def analyze(
    ctx: typer.Context,
    list_all: Annotated[bool, typer.Option("--list", help="List the analyses as a table and exit.")] = False,
    format: FormatOption = None,
) -> None:
    """Answer a question about a run with a table; for several ranks their rows follow each other.

    Examples:

    \b
      etloom analyze --list
      etloom analyze temporal-breakdown run/
      etloom analyze top-ops run/ --top 5 --format csv --out top.csv
      etloom analyze kernel-breakdown run/ --rank 0 --step 3 --name 'aten::*attention*'

    Exit status: 0, also where nothing of the kind was found; 1 where the run cannot answer the question; 2 for a wrong
    command line.
    """
    if ctx.invoked_subcommand is not None:
        return
    import polars as pl

    rows = [(name, summary) for name, summary, _ in _list_analyses()]
    write_table(pl.DataFrame(rows, schema=["analysis", "summary"], orient="row"), format, None)


def _list_analyses() -> list[tuple[str, str, bool]]:
    """(name, what it says of itself, whether it can be used): one that another package broke says why not."""
    from etloom.core import registry
    from etloom.core.errors import EtloomError

    rows = []
    for name in registry.list_plugins("analyses"):
        try:
            rows.append((name, registry.get_summary("analyses", name), True))
        except EtloomError as error:
            rows.append((name, f"cannot be used: {error}", False))
    return rows


def _make_command(name: str) -> Any:
    """The click command of one analysis."""
    from etloom.core import registry
    from etloom.linker.selection import parse_time_range

    module = registry.get("analyses", name)
    options = registry.list_options("analyses", name)
    own = {option.name for option in options}

    @handle_errors()
    def run(
        path: Path,
        format: Format | None,
        out: Path | None,
        rank_pattern: str | None,
        strict: bool,
        jobs: int | None,
        cache: bool,
        **chosen: Any,
    ) -> None:
        choose_format(format, out)
        if isinstance(time := chosen.get("time"), str) and "time" not in own:
            parse_time_range(time)  # before all is read
        filters = {flag: chosen.pop(flag) for flag in FILTERS if flag not in own}
        top = chosen.get("top") if registry.find_package("analyses", name) is None else None
        if top is not None and top >= 1:
            chosen["top"] = ALL_ROWS  # so that it can be said how many are left out
        part, answer = _analyze_part(open_job(path, rank_pattern, strict, jobs, cache), filters, name, chosen)
        shown, left_out = _limit_rows(answer, top, each_rank=module.SCOPE == "rank")
        write_table(shown, format, out)
        if left_out:
            print_message(left_out)
        if module.SCOPE == "rank":
            _report_refusals(part, answer, name, chosen)
        if answer.is_empty():
            of = f" (of the run, only {_format_filters(filters)})" if any(filters.values()) else ""
            print_message(getattr(module, "NOTHING", "nothing of the kind is in this run") + of)
        for line in getattr(module, "remarks", lambda table: ())(answer):
            print_message(line)

    flags = {option.name: (_make_flag(option.type, option.help), option.default) for option in options}
    arguments = {
        "path": (PathArgument, inspect.Parameter.empty),
        **flags,
        **{flag: (annotation, None) for flag, annotation in FILTERS.items() if flag not in own},
        "format": (FormatOption, None),
        "out": (OutOption, None),
        "rank_pattern": (RankPatternOption, None),
        "strict": (StrictOption, False),
        "jobs": (JobsOption, None),
        "cache": (CacheOption, True),
    }
    # Typer reads the flags from the signature.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for flag, (annotation, default) in arguments.items()
        ]
    )
    run.__annotations__ = {flag: annotation for flag, (annotation, _) in arguments.items()}
    example = f"Example:\n\n\b\n  etloom analyze {name} run/" + "".join(
        f" --{option.name.replace('_', '-')} {option.default}" for option in options[:1] if option.default
    )
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(name, help=f"{_split_list_items(inspect.cleandoc(module.__doc__ or ''))}\n\n{example}")(run)
    return typer.main.get_command(app)


def _analyze_part(
    job: Job, filters: dict[str, Any], name: str, options: dict[str, Any]
) -> tuple[Job, pl.DataFrame]:
    """The part of the job that filters keep, and the answer about it. AnalysisError says where they are to blame."""
    import etloom
    from etloom.core.errors import AnalysisError

    part = etloom.select(job, **filters)
    try:
        return part, etloom.analyze(part, name, **options)
    except AnalysisError as error:
        if part is job:
            raise
        try:
            etloom.analyze(job, name, **options)
        except AnalysisError:
            raise error from None  # the whole run has no answer either
        raise AnalysisError(
            f"of what {_format_filters(filters)} leaves of the run: {error.what}",
            remedy="the whole run has an answer",
        ) from None


def _limit_rows(answer: pl.DataFrame, top: int | None, each_rank: bool) -> tuple[pl.DataFrame, str]:
    """The first rows, of each rank or of all, and what to say of those left out: nothing where there are none."""
    import polars as pl

    if top is None or answer.is_empty():
        return answer, ""
    most = max(answer["rank"].value_counts()["count"]) if each_rank else answer.height
    if most <= top:
        return answer, ""
    shown = answer.filter(pl.int_range(pl.len()).over("rank") < top) if each_rank else answer.head(top)
    of_each = f", {top:,} of each rank" if each_rank and answer["rank"].n_unique() > 1 else ""
    return shown, f"{shown.height:,} of {answer.height:,} rows{of_each}; --top {most} shows all"


def _format_filters(filters: dict[str, Any]) -> str:
    """The filters as they were written."""
    values = ((flag, value if isinstance(value, list) else [value]) for flag, value in filters.items())
    return " ".join(f"--{flag} {one}" for flag, given in values for one in given if one is not None)


def _report_refusals(job: Job, answer: pl.DataFrame, name: str, options: dict[str, Any]) -> None:
    """Say why ranks are not in the answer, those of one reason in one line."""
    import etloom
    from etloom.core.errors import AnalysisError
    from etloom.core.text import format_ranks

    reasons: dict[str, list[int]] = {}
    answered = set(answer["rank"]) if answer.width else set()
    for rank in sorted(set(job) - answered):
        try:
            etloom.analyze(job[rank], name, **options)
        except AnalysisError as error:
            reasons.setdefault(error.what, []).append(rank)
    for reason, ranks in reasons.items():
        print_message(f"without {format_ranks(ranks)}: {reason}")


def _split_list_items(text: str) -> str:
    """The text with each item of a list as a paragraph, which a terminal's width may break anew."""
    return re.sub(r"\n  (?=\S)", " ", re.sub(r"\n(?=- )", "\n\n", text))


def _make_flag(type: Any, help: str) -> Any:
    number = float in (get_args(type) or (type,))
    return Annotated[type, typer.Option(help=help, callback=check_finite if number else None)]
