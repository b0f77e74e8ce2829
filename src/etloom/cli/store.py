"""etloom store: manages a store, a folder of runs that are read and linked once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from etloom.cli.command import CONTEXT_SETTINGS, FiniteFloat, Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.cli.output import TableOptions, choose_format, show_progress, write_table
from etloom.cli.run_arguments import Engine, RankPattern
from etloom.core.text import count_noun

StorePath = Annotated[Path, "The folder of the store.", Positional("STORE")]
ProcessCount = Annotated[
    int | None, "Number of processes; default: number of CPUs.", Flag(type=click.IntRange(min=1))
]


@command()
def add(
    *,
    runs: Annotated[tuple[Path, ...], "Runs to add: folders or files.", Positional("RUN...")],
    to: Annotated[Path, "The store; created if necessary.", Flag(metavar="STORE")],
    name: Annotated[str | None, "Name of the run in the store; default: that of its folder or file."] = None,
    jobs: ProcessCount = None,
    engine: Engine = "local",
    rank_pattern: RankPattern = None,
) -> None:
    """Add runs to a store: read and link each run once, and store its tables and the results of common analyses.

    Every verb opens STORE/run=NAME like any other run, without reading the traces again, and so do polars, DuckDB and
    Spark. A run that the store holds already is skipped, unless its files changed. An addition that was interrupted
    goes on where it stopped. If a run cannot be added, the others are still added, and the exit status is 1.

    Examples:

    \b
      etloom store add run/ --to store/
      etloom store add runs/2026-11-* --to store/
      etloom store add s3://bucket/run --to s3://bucket/store
      etloom store add /shared/runs/* --to /shared/store --engine ray
      etloom store add run/ --to store/ --name monday && etloom analyze stragglers store/run=monday
    """
    from etloom.core.errors import EtloomError, InvalidValue

    if name is not None and len(runs) > 1:
        raise InvalidValue(f"{len(runs)} runs cannot all be named {name!r}", option="name")
    options = {"name": name, "jobs": jobs, "engine": engine, "rank_pattern": rank_pattern}
    failed = 0
    for run in runs:
        try:
            _add_run(run, to, **options)
        except EtloomError as error:
            if len(runs) == 1 or isinstance(error, InvalidValue):
                raise
            print_message(str(error))
            failed += 1
    if failed:
        raise EtloomError(
            f"{failed} of {count_noun(len(runs), 'run')} could not be added", where=to, remedy="see above"
        )


def _add_run(run: Path, store: Path, **options: Any) -> None:
    """Add a run to a store and print the result."""
    import etloom

    with show_progress(f"adding {run}") as update:
        (added,) = etloom.store_add(run, to=store, progress=update, **options)
    ranks = count_noun(len(added.ranks), "rank")
    action = f"replaced the stored run by {ranks}" if added.has_replaced else f"added {ranks}"
    state = f"{action}; next: etloom report {added.path}" if added.is_new else f"unchanged, {ranks}"
    print_message(f"{added.path}: {state}")


@command(name="list")
def list_(*, store: StorePath, table: TableOptions) -> None:
    """List the runs of a store, the oldest first.

    Examples:

    \b
      etloom store list store/
      etloom store list store/ --format json
    """
    import etloom

    choose_format(table.format, table.out)
    write_table(etloom.store_list(store), table.format, table.out)


@command()
def refresh(*, store: StorePath, jobs: ProcessCount = None) -> None:
    """Rewrite the runs that another version of etloom stored, from their stored tables.

    Until then their answers are computed from the tables.

    Examples:

    \b
      etloom store refresh store/
    """
    import etloom

    refreshed = etloom.store_refresh(store, jobs=jobs)
    for run in refreshed:
        print_message(f"{run.path}: refreshed {count_noun(len(run.ranks), 'rank')}")
    if not refreshed:
        print_message(f"{store}: every run was stored by this version of etloom")


@command()
def stragglers(
    *,
    store: StorePath,
    by: Annotated[str, "host, rank or rack (from the names of hosts)."] = "host",
    last: Annotated[int | None, "Only the last N runs.", Flag(type=click.IntRange(min=1))] = None,
    min_pct: Annotated[
        float,
        "Smallest delay of a slow host, in percent of the time of the run.",
        Flag(type=FiniteFloat(min=0)),
    ] = 1.0,
    rack_pattern: Annotated[
        str | None,
        "Regular expression over names of hosts with one group, the rack; default: rack07 or r07.",
        Flag(metavar="REGEX"),
    ] = None,
    table: TableOptions,
) -> None:
    """Compare how much each host (or rank or rack) delays the others, over the runs of a store.

    A host delays a communication from the last arrival of a rank of another host to the last one of its own. It is
    slow in a run if it delays others by at least --min-pct of the time, by more than the uncertainty of the clocks, and
    three times as much as the median of the other hosts. Delays of concurrent communications are each counted in full.
    Why a rank is late: etloom analyze stragglers STORE/run=NAME.

    Examples:

    \b
      etloom store stragglers store/ --last 30
      etloom store stragglers store/ --by rack --rack-pattern '^(rack[0-9]+)-'
    """
    import etloom

    choose_format(table.format, table.out)
    result = etloom.store_stragglers(store, by, last=last, min_pct=min_pct, rack_pattern=rack_pattern)
    write_table(result, table.format, table.out)


@click.group(
    context_settings=CONTEXT_SETTINGS,
    commands={"add": add, "list": list_, "refresh": refresh, "stragglers": stragglers},
)
def store() -> None:
    """Keep runs in a store: each run is read and linked only once, and every command opens it as STORE/run=NAME.

    Examples:

    \b
      etloom store add run/ --to store/
      etloom store list store/
      etloom report store/run=run
      etloom store stragglers store/ --last 30
    """
