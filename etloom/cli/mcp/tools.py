"""The tools of the MCP server: each runs a command of etloom and returns text with units and event ids."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli.mcp.bounded_text import bound_lines, list_rows
from etloom.cli.mcp.opened_runs import OpenedRuns
from etloom.core.errors import AnalysisError, EtloomError, InvalidValue
from etloom.core.text import unknown_rank_error

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job, Trace

_FINDING_COLUMNS = (
    "pattern",
    "title",
    "job_gain_ns",
    "job_gain_pct",
    "cost_ns",
    "rank",
    "ranks",
    "event",
    "advice",
)
_RUN_ARGUMENTS = ("run", "before", "after")
_NEIGHBOURS = 5
_MAX_DEPTH = 64
_MAX_PREDICTED_RANKS = 4096
MAX_QUERY_SECONDS = 20.0
MAX_PREDICTION_SECONDS = 60.0
_MAX_ROWS = 400
"""Rows of a table that are looked at: far more than an answer can hold."""
_EVENT_COLUMNS = ("id", "cat", "name", "ts", "dur", "tid", "stream", "depth")


def _answer(method: Callable[..., list[str]], is_cached: bool = True) -> Callable[..., str]:
    """Convert a method that returns lines to a tool that returns text of bounded length; errors become a line of text.

    Args:
        method: Returns the lines of the answer.
        is_cached: Answer the same question once; the runs that it is about stay as they were opened.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: RunTools, *arguments: Any, **keywords: Any) -> str:
        question = signature.bind(self, *arguments, **keywords)
        question.apply_defaults()

        def compute() -> str:
            try:
                return bound_lines(method(*question.args, **question.kwargs))
            except AnalysisError as error:  # an answer, too: the run stays as it is
                return bound_lines([f"error: {error}"])

        with self.runs.turns.answering():
            try:
                _check_integers(question.arguments)
                if not is_cached:
                    return compute()
                return self.runs.answer_once(
                    self._name_question(method.__name__, question.arguments), compute
                )
            except EtloomError as error:
                return bound_lines([f"error: {error}"])

    return call


def _check_integers(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidValue for an integer that no column holds: agents may pass any."""
    from etloom.core.schema import INTEGER_LIMIT

    for name, value in arguments.items():
        if isinstance(value, int) and abs(value) > INTEGER_LIMIT:
            raise InvalidValue("expected an integer from -2^62 to 2^62", option=name)


class RunTools:
    """The tools that agents can call on the opened runs; their docstrings are the descriptions that agents read."""

    def __init__(self, runs: OpenedRuns) -> None:
        self.runs = runs

    def list_tools(self) -> list[Callable[..., str]]:
        """Return the tools in the order in which agents see them."""
        return [
            self.open_run, self.summary, self.findings, self.explain, self.compare, self.what_if, self.predict,
            self.hangs, self.analyze, self.query, self.timeline, self.schema,
        ]  # fmt: skip

    def _name_question(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return a cache key that is equal for all spellings of a tool call. Raises EtloomError for a refused path."""
        values = {name: value for name, value in arguments.items() if name != "self"}
        paths = {name: str(self.runs.resolve(values[name])) for name in _RUN_ARGUMENTS if name in values}
        return f"{tool} {sorted((values | paths).items())!r}"

    @_answer
    def open_run(self, run: str = "") -> list[str]:
        """Open a run (a path below the roots; empty: the first root): its ranks, formats, devices and data loss."""
        import etloom

        job = self.runs.get_job(run)
        facts = etloom.info(job)
        lines = [self.runs.describe_roots(), f"opened {self.runs.resolve(run)}"]
        lines += [f"{name}: {value}" for name, value in facts.items() if name != "details" and value]
        return [*lines, "data quality:", *list_rows(job.stats.filter(_is_problem()))]

    @_answer
    def summary(self, run: str = "") -> list[str]:
        """Summarize a run: step time, breakdown of time, top finding, critical path, data quality, and its ranks."""
        from etloom.reports.summary import summarize_run

        summary = summarize_run(self.runs.get_job(run))
        lines = [f"{line.topic}: {line.figure} {line.text}" for line in summary.lines]
        return [*lines, "ranks (times in ns):", *list_rows(summary.tables["overview"])]

    @_answer
    def findings(self, run: str = "", top: int = 8) -> list[str]:
        """List performance problems, largest job gain (ns) first. Pass the number of a row to the tool explain."""
        table = (
            self._list_findings(run).head(max(top, 1)).select(_FINDING_COLUMNS).with_row_index("number", 1)
        )
        return list_rows(table, "cost and gain are upper bounds; event is an id of the rank's table events")

    @_answer
    def explain(self, run: str = "", number: int = 1) -> list[str]:
        """Show the evidence of a finding: its cost and gain, the events that enclose it, and neighbouring events."""
        import polars as pl

        table = self._list_findings(run)
        if not 1 <= number <= table.height:
            raise InvalidValue(f"unknown finding {number}", remedy=f"expected 1 to {table.height}")
        row = table.row(number - 1, named=True)
        lines = [f"{name}: {value}" for name, value in row.items() if value is not None]
        if row["event"] is None:
            return [*lines, "no single event shows it"]
        trace = self.runs.get_job(run)[row["rank"]]
        path = _list_ancestors(trace, row["event"])
        first = path[0]
        near = (
            trace.events.filter(*(pl.col(name).eq_missing(first[name]) for name in ("tid", "stream", "depth")))
            .with_columns((pl.col("ts") - first["ts"]).abs().alias("distance_ns"))
            .sort("distance_ns").head(2 * _NEIGHBOURS + 1).sort("ts")
        )  # fmt: skip
        lines += ["path (innermost first; ts and dur in ns):", *list_rows(pl.DataFrame(path))]
        return [*lines, f"neighbours on thread {first['tid']} (ns):", *list_rows(near.select(_EVENT_COLUMNS))]

    @_answer
    def compare(self, before: str, after: str, by: str = "category") -> list[str]:
        """Compare two runs by category, family, operator, kernel, collective or step: is the second slower, and why."""
        difference = self.runs.get_difference(before, after)
        lines = list(filter(None, (difference.verdict, difference.explanation, *difference.notes)))
        return [*lines, *list_rows(difference.table(by, _MAX_ROWS))]

    @_answer
    def what_if(self, changes: list[str], run: str = "") -> list[str]:
        """Predict times with all changes applied: "kernel:*gemm* x0.5", "comm x0", "op:aten::copy_ x0", "launch x0"."""
        import etloom

        simulated = etloom.simulate(self.runs.get_job(run), *changes)
        return [*list_rows(simulated.table, "times in ns"), *map(str, simulated.reasons)]

    @_answer
    def predict(
        self,
        run: str = "",
        network: str = "",
        recorded_network: str = "",
        ranks: int = 0,
        parallel: str = "",
        device: str = "",
    ) -> list[str]:
        """Predict the step time on another network, number of ranks, process mesh or GPU, with 90 % intervals.

        network and recorded_network: a factor of the recorded bandwidth ("x0.2"), a rate ("200Mbit/s"), a preset
        ("dgx-h100") or a YAML file below the roots; ranks: 1 to 4096; parallel: "tp=4,dp=16"; device: "b200".
        """
        if not 0 <= ranks <= _MAX_PREDICTED_RANKS:
            raise InvalidValue(f"expected 1 to {_MAX_PREDICTED_RANKS:,} ranks, got {ranks:,}")
        networks = self._resolve_network(network), self._resolve_network(recorded_network)
        arguments = (*networks, ranks or None, parallel, device or None)
        if not (ranks or parallel):  # as large as the run
            return _predict(self.runs.get_job(run), *arguments)
        process = self.runs.get_process(run)
        lines: list[str] = process.call(
            _predict, *arguments, seconds=MAX_PREDICTION_SECONDS, topic="prediction"
        )
        return lines

    def _resolve_network(self, network: str) -> str | None:
        """Return the network option, with the path of a YAML file resolved below the roots; None if it is empty."""
        if Path(network).suffix in (".yaml", ".yml"):
            return str(self.runs.resolve(network))
        return network or None

    @functools.partial(_answer, is_cached=False)  # the dumps of a running job change
    def hangs(self, run: str = "") -> list[str]:
        """Name the ranks that caused a hang or crash, from Flight Recorder dumps, and who waits for them."""
        import etloom

        report = etloom.hangs(self.runs.resolve(run))
        evidence = [] if report.cause is None else list_rows(report.cause.evidence)
        return [report.sentence, *evidence, "divergences:", *list_rows(report.table.head(_MAX_ROWS))]

    @_answer
    def analyze(self, name: str = "", run: str = "") -> list[str]:
        """Run an analysis and return its table; without a name, list the analyses."""
        from etloom.analyses.answers import answer_first_rows
        from etloom.core import registry

        if not name:
            names = registry.list_plugins("analyses")
            return [f"{item}: {registry.get_summary('analyses', item)}" for item in names]
        units = "times in ns, sizes in bytes, unless the name of the column states another unit"
        job = self.runs.get_job(run)
        if name == "findings":
            return list_rows(self._list_findings(run).head(_MAX_ROWS), units)
        return list_rows(answer_first_rows(job, name, _MAX_ROWS, self.runs.turns.give_way), units)

    @_answer
    def query(self, sql: str, run: str = "") -> list[str]:
        """Run an SQL SELECT over the tables of a run (see schema); each has a column rank. Times: ns. Add a LIMIT."""
        from etloom.core.trace import Job

        function = functools.partial(Job.query, max_rows=_MAX_ROWS)
        table = self.runs.get_process(run).call(function, sql, seconds=MAX_QUERY_SECONDS, topic="query")
        count = f"{table.height:,} rows" if table.height < _MAX_ROWS else f"the first {_MAX_ROWS:,} rows"
        return [count, *list_rows(table, "times in ns, sizes in bytes")]

    @_answer
    def timeline(
        self, rank: int, start_ns: int, end_ns: int, run: str = "", min_dur_ns: int = 0
    ) -> list[str]:
        """List the events of a rank that overlap a time range in ns (as events.ts), indented by nesting depth."""
        import polars as pl

        if end_ns <= start_ns:
            raise InvalidValue(f"expected end_ns after start_ns, got {start_ns} and {end_ns}")
        job = self.runs.get_job(run)
        if rank not in job:
            raise unknown_rank_error(rank, job.ranks)
        events = job[rank].events
        dur = pl.col("dur").fill_null(0)
        part = events.filter(
            pl.col("ts") < end_ns, pl.col("ts") + dur >= start_ns, dur >= min_dur_ns
        )  # fmt: skip
        rows = part.select(_EVENT_COLUMNS).head(_MAX_ROWS).iter_rows(named=True)
        header = f"{part.height:,} events; event id, start after start_ns, duration, thread or stream, category, name"
        return [header, *(_format_event(row, start_ns) for row in rows)]

    @_answer
    def schema(self, table: str = "") -> list[str]:
        """List the tables, or the columns of one table with type, unit and meaning."""
        from etloom.core.errors import UnknownName
        from etloom.core.schema import TABLES

        if not table:
            return [f"{item.name}: {item.meaning}" for item in TABLES.values()]
        if table not in TABLES:
            raise UnknownName("table", table, TABLES)
        return [
            f"{column.name} ({column.dtype}{', ' + column.unit if column.unit else ''}): {column.meaning}"
            for column in TABLES[table].columns
        ]

    def _list_findings(self, run: str) -> pl.DataFrame:
        from etloom.reports.summary import answer_once

        return answer_once(self.runs.get_job(run), "findings").table


def _predict(
    job: Job,
    network: str | None,
    recorded_network: str | None,
    ranks: int | None,
    parallel: str,
    device: str | None,
) -> list[str]:
    import etloom
    from etloom.simulator.resizing import parse_parallel

    prediction = etloom.predict(
        job,
        network=network,
        recorded_network=recorded_network,
        ranks=ranks,
        parallel=parse_parallel(parallel) if parallel else None,
        device=device,
    )
    rows = list_rows(prediction.table.head(_MAX_ROWS), "times in ns; bounds: 90 % interval")
    return [*prediction.reasons, *rows]


def _is_problem() -> pl.Expr:
    import polars as pl

    return pl.col("severity") != "info"


def _list_ancestors(trace: Trace, event: int) -> list[dict[str, Any]]:
    """Return the rows of an event and of the events that enclose it, innermost first."""
    import polars as pl

    path: list[dict[str, Any]] = []
    current: int | None = event
    while current is not None and len(path) < _MAX_DEPTH:
        row = (
            trace.events.filter(pl.col("id") == current).select(*_EVENT_COLUMNS, "parent").row(0, named=True)
        )
        path.append(row)
        current = row["parent"]
    return path


def _format_event(row: dict[str, Any], start_ns: int) -> str:
    place = f"stream {row['stream']}" if row["stream"] is not None else f"thread {row['tid']}"
    indent = "  " * min(row["depth"] or 0, _MAX_DEPTH)
    duration = "instant" if row["dur"] is None else f"{row['dur']:,} ns"
    return f"{row['id']} {row['ts'] - start_ns:+,} ns {duration} {place} {indent}{row['cat']} {row['name']}"
