"""Public functions for stores: folders of runs that were read and linked once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etloom.api.arguments import OwnPath, StrPath, name_uploaded, verb
from etloom.core.errors import warn
from etloom.core.text import count_noun
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    import polars as pl

    from etloom.exports.store import AddedRun
    from etloom.loading.file_reading import Progress


@verb
def store_add(
    *runs: OwnPath,
    to: OwnPath,
    name: str | None = None,
    jobs: int | None = None,
    engine: str = "local",
    rank_pattern: str | None = None,
    progress: Progress | None = None,
) -> list[AddedRun]:
    """Add runs to a store: read and link them once, and store their tables and the answers to the usual questions.

    Every verb opens ``STORE/run=NAME`` like any other run, without reading the traces again. A run that the store holds
    already is skipped, unless its files changed; an addition that was killed goes on where it stopped. The answers are
    those of the same functions without a store.

    Args:
        runs: folders or files.
        to: the store; created if it does not exist.
        name: name of the run in the store; default: that of its folder or file.
        jobs: processes that read ranks; default: number of CPUs.
        engine: "local", or "ray": ranks are read on a Ray cluster, whose hosts see runs and store under the same paths.
        rank_pattern: see `open`.
        progress: see `open`.

    Returns:
        For each run its name, folder and ranks, whether it is new, and whether it replaced a stored run.

    Raises:
        ReadError, LimitError, LinkError: a run cannot be read.
        EtloomError: the store cannot be written, or holds another run of this name.

    Example:
        >>> (added,) = etloom.store_add("run/", to="store/", name="monday")
        >>> etloom.analyze(added.path, "stragglers").columns[:2]
        ['rank', 'communications']
    """
    from etloom.core.errors import InvalidValue
    from etloom.exports.store import AddOptions, add_run
    from etloom.formats.io import mirror
    from etloom.loading.engines import is_remote

    if name is not None and len(runs) > 1:
        raise InvalidValue(f"{len(runs)} runs cannot all be named {name!r}", option="name")
    urls = [str(url) for url in map(clean_url, (*runs, to)) if url is not None]
    if is_remote(engine) and urls:
        raise InvalidValue(
            f"{urls[0]} is copied to this host, and other hosts cannot read the copy",
            remedy="with the engine ray, use a file system that all hosts mount",
            option="engine",
        )
    options = AddOptions(name, jobs, rank_pattern, progress, engine)
    folders = [_fetch_run(run) for run in runs]
    url = clean_url(to)
    if url is None:
        return [add_run(folder, Path(to), options) for folder in folders]
    store = mirror.fetch_store(url)
    return _publish([add_run(folder, store, options) for folder in folders], store, url)


@verb
def store_list(store: StrPath) -> pl.DataFrame:
    """List the runs of a store, the oldest first.

    Args:
        store: the folder.

    Returns:
        run, ranks, hosts, events, step_ns (mean duration of a step), added (time, UTC), etloom (the version that
        stored it), is_current, source. A run that is not current was stored by another version: its answers are
        computed from its tables until `store_refresh`.

    Raises:
        ReadError: it is not a store, or of a newer version.

    Example:
        >>> etloom.store_list("store/")["run"].to_list()  # doctest: +SKIP
        ['monday']
    """
    from etloom.exports.store import describe_runs

    return describe_runs(Path(store))


@verb
def store_refresh(store: OwnPath, *, jobs: int | None = None) -> list[AddedRun]:
    """Rewrite the runs of a store that another version of etloom stored, from their stored tables.

    Args:
        store: the folder.
        jobs: processes; default: number of CPUs.

    Returns:
        The runs that were written.

    Raises:
        ReadError: it is not a store, or a run cannot be read.
        EtloomError: it cannot be written.

    Example:
        >>> etloom.store_refresh("store/")  # doctest: +SKIP
        []
    """
    from etloom.exports.store import AddOptions, refresh_runs
    from etloom.formats.io import mirror

    url = clean_url(store)
    if url is None:
        return refresh_runs(Path(store), AddOptions(jobs=jobs))
    local = mirror.fetch(url, complete=True)
    return _publish(refresh_runs(local, AddOptions(jobs=jobs)), local, url)


@verb
def store_stragglers(
    store: StrPath,
    by: str = "host",
    *,
    last: int | None = None,
    min_pct: float = 1.0,
    rack_pattern: str | None = None,
) -> pl.DataFrame:
    """Compare how much hosts, ranks or racks delay others over the runs of a store.

    A host delays a communication from the last arrival of a rank of another host to the last one of its own. It is
    slow in a run if it delays others by at least ``min_pct`` of the time, by more than the uncertainty of the clocks,
    and three times as much as the median of the other hosts.

    Args:
        store: the folder.
        by: "host", "rank" or "rack".
        last: only the last so many runs.
        min_pct: smallest delay of a slow host, in percent of the time of the run.
        rack_pattern: regular expression over names of hosts with one group, the rack; default: rack07 or r07.

    Returns:
        One row per host, the slowest first: runs, slow_runs, ranks, late and late_confirmed (communications that it
        delayed, by more than the uncertainty of the clocks), delay_ns, mean_pct, worst_pct, worst_run. Runs without an
        answer are named by one `EtloomWarning`.

    Raises:
        AnalysisError: no run has an answer, or no rank names its host.

    Example:
        >>> etloom.store_stragglers("store/", by="rank").columns[:3]  # doctest: +SKIP
        ['rank', 'runs', 'slow_runs']
    """
    from etloom.exports.store import compare_hosts

    options = {} if rack_pattern is None else {"rack_pattern": rack_pattern}
    table, skipped = compare_hosts(Path(store), by, last=last, min_pct=min_pct, **options)
    if skipped:
        listed = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        unit = "" if by == "rank" else f", or no known {by}"
        warn(
            f"{count_noun(len(skipped), 'run')} without matched communications of several ranks{unit}: {listed}"
        )
    return table


def _fetch_run(run: OwnPath) -> Path:
    """Return the local path of a run; a run at a URL is downloaded with all its tables."""
    from etloom.formats.io import mirror

    return Path(run) if (url := clean_url(run)) is None else mirror.fetch(url, complete=True)


def _publish(runs: list[AddedRun], store: Path, url: str) -> list[AddedRun]:
    """Upload runs from the local copy of a store to ``url``, and return them with URLs instead of local paths."""
    from etloom.formats.io import mirror

    mirror.upload_runs(store, url, [run.path for run in runs])
    renamed: list[AddedRun] = name_uploaded(runs, store, url)
    return renamed
