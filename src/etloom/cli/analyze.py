"""etloom analyze: every registered analysis is a sub-command, its options are flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from etloom.cli.command import CONTEXT_SETTINGS, Flag, command, read_parameters
from etloom.cli.error_handling import as_usage_error, handle_errors, print_message
from etloom.cli.output import Format, TableOptions, choose_format, write_table
from etloom.cli.run_arguments import RunOptions, RunPath, open_job

if TYPE_CHECKING:
    import polars as pl

    from etloom.analyses.answers import Answer
    from etloom.core.registry import Option
    from etloom.core.trace import Job

FILTERS: dict[str, click.Option] = {
    "rank": click.Option(["--rank"], type=int, multiple=True, help="Only this rank; may be repeated."),
    "step": click.Option(["--step"], type=int, help="Only this ProfilerStep."),
    "time": click.Option(
        ["--time"],
        metavar="START:END",
        help="Only events that begin in START:END after the first recorded event, such as 10ms:1.5s.",
    ),
    "name": click.Option(
        ["--name"],
        multiple=True,
        metavar="GLOB",
        help="Only events whose name matches, and everything they enclose and launch.",
    ),
    "category": click.Option(
        ["--category"],
        multiple=True,
        help="Only this event category (cpu_op, kernel, ...) or kernel type (communication, ...).",
    ),
}
"""Filters that apply before every analysis that has no option of that name: see `etloom.select`."""

ALL_ROWS = 10**9


class AnalysisGroup(click.Group):
    """The command group of all analyses; the module of an analysis is imported only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, _, is_usable in _list_analyses() if is_usable]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Analyses"):
            formatter.write_dl(
                [(name, summary) for name, summary, is_usable in _list_analyses() if is_usable]
            )

    @handle_errors()
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        from etloom.core import registry

        if cmd_name.replace("_", "-") not in registry.list_plugins("analyses") and Path(cmd_name).exists():
            raise click.UsageError(f"{cmd_name} is a path; the name of the analysis comes before it", ctx)
        with as_usage_error():
            registry.find_package("analyses", cmd_name)  # an unknown name raises with the nearest known one
        return make_analysis_command(cmd_name.replace("_", "-"))


@click.group(cls=AnalysisGroup, invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.option("--list", "list_all", is_flag=True, help="List the analyses as a table and exit.")
@click.option("--format", "-f", type=click.Choice(Format), help="Format of --list.  [default: table]")
@click.pass_context
@handle_errors()
def analyze(ctx: click.Context, list_all: bool, format: Format | None) -> None:
    """Run an analysis and print its table; for a run of several ranks the table contains the rows of all ranks.

    etloom analyze NAME --help explains the columns and options of one analysis.

    Examples:

    \b
      etloom analyze --list
      etloom analyze temporal-breakdown run/
      etloom analyze top-ops run/ --top 5 --format csv --out top.csv
      etloom analyze kernel-breakdown run/ --rank 0 --step 3 --name 'aten::*attention*'

    Exit status: 0, also for an empty table; 1 if the run cannot answer the question; 2 for a wrong command line.
    """
    if ctx.invoked_subcommand is not None:
        return
    import polars as pl

    rows = [(name, summary) for name, summary, _ in _list_analyses()]
    write_table(pl.DataFrame(rows, schema=["analysis", "summary"], orient="row"), format, None)


@dataclass(frozen=True)
class Question:
    """An analysis to run: its name, the values of its options, and the values of the filters."""

    name: str
    options: Mapping[str, Any]
    filters: Mapping[str, Any]


def make_analysis_command(name: str) -> click.Command:
    """Build the click command of an analysis: its options, the filters it does not define, and the shared options."""
    from etloom.core import registry

    module = registry.get("analyses", name)
    options = registry.list_options("analyses", name)
    own_names = {option.name for option in options}
    filters = {flag: option for flag, option in FILTERS.items() if flag not in own_names}

    def run_analysis(path: RunPath, table: TableOptions, run: RunOptions, **values: Any) -> None:
        choose_format(table.format, table.out)
        filter_values = {flag: _list_or_none(values.pop(flag)) for flag in filters}
        _check_time(filter_values.get("time"))
        _run(path, Question(name, values, filter_values), table, run)

    example = f"Example:\n\n\b\n  etloom analyze {name} run/" + "".join(
        f" --{option.name.replace('_', '-')} {option.default}" for option in options[:1] if option.default
    )
    text = _split_list_items(inspect.cleandoc(module.__doc__ or ""))
    path, *shared = read_parameters(run_analysis)
    declare = command(
        path, *map(make_option, options), *filters.values(), *shared, name=name, help=f"{text}\n\n{example}"
    )
    return declare(run_analysis)


def make_option(option: Option) -> click.Parameter:
    """Build the click option for an option of a plugin; a bool can be switched on and off."""
    if bool in (option.type, *get_args(option.type)):
        flag = option.name.replace("_", "-")
        return click.Option([f"--{flag}/--no-{flag}"], default=option.default, help=option.help)
    return Flag().make_param(option.name, option.type, option.default, option.help)


def _run(path: Path, question: Question, table: TableOptions, run: RunOptions) -> None:
    """Open a run, run an analysis on it, and print the table and messages about omitted rows and missing results."""
    from etloom.core import registry

    module = registry.get("analyses", question.name)
    each_rank = module.SCOPE == "rank"
    options = dict(question.options)
    top = options.get("top") if registry.find_package("analyses", question.name) is None else None
    if top is not None and top >= 1:
        options["top"] = ALL_ROWS  # to be able to report how many rows are left out
    job = open_job(path, run, for_report=question.name == "findings")
    result = answer_part(job, Question(question.name, options, question.filters))
    shown, omission = _limit_rows(result.table, top, each_rank)
    write_table(shown, table.format, table.out)
    if omission:
        print_message(omission)
    for line in result.explain_refusals():
        print_message(line)
    if result.table.is_empty():
        scope = f" (within {_format_filters(question.filters)})" if any(question.filters.values()) else ""
        print_message(getattr(module, "EMPTY_MESSAGE", "no matching data in this run") + scope)
    for line in getattr(module, "remarks", lambda table: ())(result.table):
        print_message(line)


def answer_part(job: Job, question: Question) -> Answer:
    """Run an analysis on the part of the job that the filters select.

    Raises:
        AnalysisError: no rank can answer; the message says if the filters are the reason.
    """
    import etloom
    from etloom.analyses.answers import answer
    from etloom.core.errors import AnalysisError

    is_part = any(value is not None for value in question.filters.values())
    part = etloom.select(job, **question.filters) if is_part else job
    try:
        return answer(part, question.name, **question.options)
    except AnalysisError as error:
        if part is job:
            raise
        try:
            answer(job, question.name, **question.options)
        except AnalysisError:
            raise error from None  # the whole run has no answer either
        raise AnalysisError(
            f"{error.what} (within {_format_filters(question.filters)})",
            remedy="the analysis works without these filters",
        ) from None


def _limit_rows(table: pl.DataFrame, top: int | None, each_rank: bool) -> tuple[pl.DataFrame, str]:
    """Return the first `top` rows of a table (per rank if `each_rank`), and a message about omitted rows, or ''."""
    import polars as pl

    if top is None or table.is_empty():
        return table, ""
    available = max(table["rank"].value_counts()["count"]) if each_rank else table.height
    if available <= top:
        return table, ""
    shown = table.filter(pl.int_range(pl.len()).over("rank") < top) if each_rank else table.head(top)
    per_rank = f", {top:,} of each rank" if each_rank and table["rank"].n_unique() > 1 else ""
    return shown, f"{shown.height:,} of {table.height:,} rows{per_rank}; --top {available} shows all"


def _format_filters(filters: Mapping[str, Any]) -> str:
    """Return the filters as flags of the command line, such as `--rank 0 --step 3`."""
    values = ((flag, value if isinstance(value, list) else [value]) for flag, value in filters.items())
    return " ".join(f"--{flag} {item}" for flag, items in values for item in items if item is not None)


def _list_or_none(value: Any) -> Any:
    """Convert the tuple of a repeatable option to a list, None if it is empty; return any other value unchanged."""
    return (list(value) or None) if isinstance(value, tuple) else value


def _check_time(text: str | None) -> None:
    """Check the syntax of --time before the run is opened."""
    from etloom.core.text import parse_time_range

    if text is not None:
        parse_time_range(text)


def _list_analyses() -> list[tuple[str, str, bool]]:
    """List each analysis as (name, summary, is usable); the summary of an unusable analysis states the reason."""
    from etloom.core import registry
    from etloom.core.errors import EtloomError

    rows = []
    for name in registry.list_plugins("analyses"):
        try:
            rows.append((name, registry.get_summary("analyses", name), True))
        except EtloomError as error:
            rows.append((name, f"unusable: {error}", False))
    return rows


def _split_list_items(text: str) -> str:
    """Insert empty lines between list items ("- ...") of a help text, so that click wraps each item separately."""
    return re.sub(r"\n  (?=\S)", " ", re.sub(r"\n(?=- )", "\n\n", text))
