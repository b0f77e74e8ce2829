"""The tools of the MCP server: each runs a command of etloom and returns text with units and event ids."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli.mcp.bounded_text import Answer, answer_error, bound_answer
from etloom.cli.mcp.opened_runs import OpenedRuns
from etloom.core.errors import AnalysisError, EtloomError, InvalidValue
from etloom.core.text import unknown_rank_error

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job, Trace

_FINDING_COLUMNS = (
    "pattern",
    "title",
    "job_gain",
    "job_gain_pct",
    "cost",
    "rank",
    "ranks",
    "event",
    "advice",
)
_RUN_ARGUMENTS = ("run", "before", "after")
_FILE_OPTIONS = ("device_peaks", "ncu")
"""Options of analyses that are files, which agents may name below the roots only."""
_FACTS_SHOWN_OTHERWISE = ("details", "stats", "by_rank", "path")
_NEIGHBOURS = 5
_MAX_OPERATORS = 16
_MAX_DEPTH = 64
_MAX_PREDICTED_RANKS = 4096
MAX_QUERY_SECONDS = 20.0
MAX_PREDICTION_SECONDS = 60.0
_MAX_ROWS = 400
"""Rows of a table that are looked at: far more than an answer can hold."""
_EVENT_COLUMNS = ("id", "cat", "name", "ts", "dur", "tid", "stream", "depth")


def _answer(method: Callable[..., dict[str, Any]], is_cached: bool = True) -> Callable[..., Answer]:
    """Convert a method that returns parts of an answer to a tool that returns an `Answer`; so do its errors.

    Args:
        method: Returns the parts of the answer by name, as `bound_answer` takes them.
        is_cached: Answer the same question once; the runs that it is about stay as they were opened.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: RunTools, *arguments: Any, **keywords: Any) -> Answer:
        question = signature.bind(self, *arguments, **keywords)
        question.apply_defaults()

        def compute() -> Answer:
            try:
                return bound_answer(method(*question.args, **question.kwargs))
            except AnalysisError as error:  # an answer, too: the run stays as it is
                return answer_error(error)

        with self.runs.turns.answering():
            try:
                _check_integers(question.arguments)
                if not is_cached:
                    return compute()
                return self.runs.answer_once(
                    self._name_question(method.__name__, question.arguments), compute
                )
            except EtloomError as error:
                return answer_error(error)

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

    def list_tools(self) -> list[Callable[..., Answer]]:
        """Return the tools in the order in which agents see them."""
        return [
            self.open_run, self.summary, self.findings, self.explain, self.compare, self.what_if, self.predict,
            self.plan, self.hangs, self.analyze, self.query, self.timeline, self.schema,
        ]  # fmt: skip

    def _name_question(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return a cache key that is equal for all spellings of a tool call. Raises EtloomError for a refused path."""
        values = {name: value for name, value in arguments.items() if name != "self"}
        paths = {name: str(self.runs.resolve(values[name])) for name in _RUN_ARGUMENTS if name in values}
        return f"{tool} {sorted((values | paths).items())!r}"

    @_answer
    def open_run(self, run: str = "") -> dict[str, Any]:
        """Open a run (a path below the roots; empty: the first root): its ranks, formats, devices and data loss.

        If the first root holds several runs, list them.
        """
        import polars as pl

        import etloom

        roots = list(map(str, self.runs.roots))
        try:
            job = self.runs.get_job(run)
        except EtloomError as error:
            if run or not (runs := self.runs.list_folders()):
                raise
            return {"note": f"open one of the runs below the root ({error})", "roots": roots, "runs": runs}
        facts = etloom.info(job)
        parts: dict[str, Any] = {"roots": roots, "opened": f"opened {self.runs.resolve(run)}"}
        parts |= {
            name: value for name, value in facts.items() if value and name not in _FACTS_SHOWN_OTHERWISE
        }
        parts["data_quality"] = job.stats.filter(_is_problem())
        return parts | {"by_rank": pl.DataFrame(facts["by_rank"])}

    @_answer
    def summary(self, run: str = "") -> dict[str, Any]:
        """Summarize a run: step time, breakdown of time, top finding, critical path, data quality, and its ranks."""
        from etloom.reports.summary import summarize_run

        summary = summarize_run(self.runs.get_job(run))
        lines = [f"{line.topic}: {line.figure} {line.text}" for line in summary.lines]
        return {"summary": lines, "units": "times in ns", "ranks": summary.tables["overview"]}

    @_answer
    def findings(self, run: str = "", top: int = 8) -> dict[str, Any]:
        """List performance problems, largest job gain (ns) first. Pass the number of a row to the tool explain."""
        table, unit = self._list_findings(run)
        return {
            "note": f"cost and job_gain are upper bounds in {unit}; event is an id of the rank's table events",
            "findings": table.head(max(top, 1)).select(_FINDING_COLUMNS).with_row_index("number", 1),
        }

    @_answer
    def explain(self, run: str = "", number: int = 1) -> dict[str, Any]:
        """Show the evidence of a finding: cost, gain, its operators, and the events around the one that it cites."""
        import polars as pl

        table, unit = self._list_findings(run)
        if not 1 <= number <= table.height:
            raise InvalidValue(f"unknown finding {number}", remedy=f"expected 1 to {table.height}")
        row = {name: value for name, value in table.row(number - 1, named=True).items() if value is not None}
        places = json.loads(row.pop("parts", "[]"))
        parts: dict[str, Any] = {"units": f"cost and job_gain in {unit}"}
        parts |= {name: f"{name}: {value}" for name, value in row.items()}
        if places:
            total = sum(place["cost_ns"] for place in places) or 1
            share = 100 * pl.col("cost_ns") / total
            parts["places"] = pl.DataFrame(places).select("place", "count", cost_pct=share.round(1))
        trace = self.runs.get_job(run)[row["rank"]]
        operators = _list_named_operators(trace, row, [place["place"] for place in places])
        if operators.height:
            parts["operators"] = operators
        if "event" not in row:
            return parts | {"note": "no single event shows it"}
        path = _list_ancestors(trace, row["event"])
        first = path[0]
        near = (
            trace.events.filter(*(pl.col(name).eq_missing(first[name]) for name in ("tid", "stream", "depth")))
            .with_columns((pl.col("ts") - first["ts"]).abs().alias("distance_ns"))
            .sort("distance_ns").head(2 * _NEIGHBOURS + 1).sort("ts")
        )  # fmt: skip
        parts["path (innermost first; ts and dur in ns)"] = pl.DataFrame(path)
        return parts | {f"neighbours on thread {first['tid']} (ns)": near.select(_EVENT_COLUMNS)}

    @_answer
    def compare(self, before: str, after: str, by: str = "category") -> dict[str, Any]:
        """Is the second run slower, and why: by category, family, operator, kernel, collective, rank or step."""
        difference = self.runs.get_difference(before, after)
        sentences = (difference.verdict, difference.explanation, difference.source_changes)
        lines = list(filter(None, (*sentences, *difference.notes)))
        return {"verdict": lines, f"by {by}": difference.table(by, _MAX_ROWS)}

    @_answer
    def what_if(self, changes: list[str], run: str = "") -> dict[str, Any]:
        """Predict times with all changes applied: "kernel:*gemm* x0.5", "comm x0", "op:aten::copy_ x0", "launch x0"."""
        reasons, table = self.ask_process(run, _simulate, changes)
        return {"units": "times in ns", "times": table, "reasons": reasons}

    @_answer
    def predict(
        self,
        run: str = "",
        network: str = "",
        recorded_network: str = "",
        ranks: int = 0,
        parallel: str = "",
        device: str = "",
        top: int = 8,
    ) -> dict[str, Any]:
        """Predict the step time on another network, number of ranks, process mesh or GPU, with 90 % intervals.

        network and recorded_network: a factor of the recorded bandwidth ("x0.2"), a rate ("200Mbit/s"), a preset
        ("dgx-h100") or a YAML file below the roots; ranks: 1 to 4096; parallel: "tp=4,dp=16"; device: "b200";
        top: rows shown, the step time first.
        """
        if not 0 <= ranks <= _MAX_PREDICTED_RANKS:
            raise InvalidValue(f"expected 1 to {_MAX_PREDICTED_RANKS:,} ranks, got {ranks:,}")
        networks = self._resolve_network(network), self._resolve_network(recorded_network)
        arguments = (*networks, ranks or None, parallel, device or None)
        reasons, table = self.ask_process(run, _predict, *arguments)
        units = "times in ns; bounds: 90 % interval"
        return {"reasons": reasons, "units": units} | _list_first(table, top)

    @functools.partial(_answer, is_cached=False)  # files may change
    def plan(
        self, job: str, cluster: str = "dgx-h100", gpus: int = 0, parallel: str = "", top: int = 8
    ) -> dict[str, Any]:
        """Rank the layouts of a training job on a cluster by predicted step time, with memory; needs no run.

        job: an example ("llama3-8b") or a YAML file below the roots, of sizes such as layers, hidden, heads; cluster:
        nodes ("dgx-h100") or a YAML file; gpus: 0: those of the cluster; parallel: fixed sizes of axes ("tp=8,pp=16").
        """
        from etloom.simulator.planning import plan
        from etloom.simulator.resizing import parse_parallel
        from etloom.simulator.training_jobs import MAX_GPUS, list_clusters, list_jobs, read_cluster, read_job

        if not 0 <= gpus <= MAX_GPUS:
            raise InvalidValue(f"expected up to {MAX_GPUS:,} GPUs, got {gpus:,}", option="gpus")
        job_file = job if job in list_jobs() else self.runs.resolve(job)
        cluster_file = cluster if cluster in list_clusters() else self.runs.resolve(cluster)
        ranking = plan(
            read_job(job_file),
            read_cluster(cluster_file, gpus or None, lambda path: self.runs.resolve(str(path))),
            parse_parallel(parallel) if parallel else None,
        )
        table = ranking.table.drop(f"{kind}_bytes" for kind in ranking.memory)
        return {"reasons": ranking.reasons, "units": "times in ns"} | _list_first(table, top)

    def ask_process(self, run: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function about predictions of a run, whose time and memory are limited."""
        from etloom.core.machine import available_memory

        memory = available_memory() // 2  # of the graph of a large run
        return self.runs.get_process(run).call(
            function, *arguments, seconds=MAX_PREDICTION_SECONDS, topic="prediction", memory=memory
        )

    def _resolve_network(self, network: str) -> str | None:
        """Return the network option, with the path of a YAML file resolved below the roots; None if it is empty."""
        if Path(network).suffix in (".yaml", ".yml"):
            return str(self.runs.resolve(network))
        return network or None

    @functools.partial(_answer, is_cached=False)  # the dumps of a running job change
    def hangs(self, run: str = "", top: int = 8) -> dict[str, Any]:
        """Name the ranks that caused a hang or crash, from Flight Recorder dumps, and who waits for them."""
        import etloom

        report = etloom.hangs(self.runs.resolve(run))
        evidence = {} if report.cause is None else _list_first(report.cause.evidence, top, "evidence")
        return {"cause": report.sentence} | evidence | _list_first(report.table, top, "divergences")

    @_answer
    def analyze(
        self,
        name: str = "",
        run: str = "",
        top: int = 0,
        rank: int | None = None,
        step: int | None = None,
        by: str = "",
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run an analysis and return its table; without a name, list the analyses and their options.

        top: number of rows; rank, step: only these; by: what to group by, if the analysis has it; options: further
        options of the analysis, and the filters time (as 10ms:1.5s), name (glob) and category.
        """
        from etloom.analyses.answers import answer_first_rows
        from etloom.core import registry
        from etloom.reports.summary import answer_once

        if not name:
            return {"analyses": list(map(_describe_analysis, registry.list_plugins("analyses")))}
        job = self.runs.get_job(run)
        parts = {"units": "times in ns, sizes in bytes, unless the name of the column states another unit"}
        chosen = {"top": top or None, "rank": rank, "step": step, "by": by or None} | (options or {})
        chosen = {option: value for option, value in chosen.items() if value is not None}
        chosen |= {name: str(self.runs.resolve(chosen[name])) for name in _FILE_OPTIONS if name in chosen}
        if chosen:
            return parts | _list_first(_answer_with_options(job, name, chosen), top or _MAX_ROWS)
        if name == "findings":
            return parts | {"rows": answer_once(job, "findings").table.head(_MAX_ROWS)}
        return parts | {"rows": answer_first_rows(job, name, _MAX_ROWS, self.runs.turns.give_way)}

    @_answer
    def query(self, sql: str, run: str = "") -> dict[str, Any]:
        """Run an SQL SELECT over the tables of a run (see schema); each has a column rank. Times: ns. Add a LIMIT."""
        from etloom.core.trace import Job

        function = functools.partial(Job.query, max_rows=_MAX_ROWS)
        table = self.runs.get_process(run).call(function, sql, seconds=MAX_QUERY_SECONDS, topic="query")
        count = f"{table.height:,} rows" if table.height < _MAX_ROWS else f"the first {_MAX_ROWS:,} rows"
        return {"count": count, "units": "times in ns, sizes in bytes", "rows": table}

    @_answer
    def timeline(
        self, rank: int, start_ns: int, end_ns: int, run: str = "", min_dur_ns: int = 0
    ) -> dict[str, Any]:
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
        if part.is_empty() and events.height:
            first, last = events.select(pl.col("ts").min(), (pl.col("ts") + dur).max().alias("end")).row(0)
            return {"note": f"0 events; the events of rank {rank} lie from {first} to {last} ns"}
        rows = part.select(_EVENT_COLUMNS).head(_MAX_ROWS).iter_rows(named=True)
        header = f"{part.height:,} events; event id, start after start_ns, duration, thread or stream, category, name"
        return {"note": header, "events": [_format_event(row, start_ns) for row in rows]}

    @_answer
    def schema(self, table: str = "") -> dict[str, Any]:
        """List the tables, or the columns of one table with type, unit and meaning."""
        from etloom.core.errors import UnknownName
        from etloom.core.schema import TABLES

        if not table:
            return {"tables": [f"{item.name}: {item.meaning}" for item in TABLES.values()]}
        if table not in TABLES:
            raise UnknownName("table", table, TABLES)
        columns = [
            f"{column.name} ({column.dtype}{', ' + column.unit if column.unit else ''}): {column.meaning}"
            for column in TABLES[table].columns
        ]
        return {"columns": columns}

    def _list_findings(self, run: str) -> tuple[pl.DataFrame, str]:
        """Return the findings with cost and job_gain in one unit, and the unit."""
        from etloom.reports.summary import answer_once

        return _use_one_unit(answer_once(self.runs.get_job(run), "findings").table)


def _use_one_unit(findings: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Return findings with the columns cost and job_gain, in ns per step if all are known per step, and their unit."""
    import polars as pl

    gain = pl.col("job_gain_ns").is_null() | pl.col("step_gain_ns").is_not_null()
    per_step = bool(findings.select((pl.col("step_cost_ns").is_not_null() & gain).all()).item())
    cost, job_gain = ("step_cost_ns", "step_gain_ns") if per_step else ("cost_ns", "job_gain_ns")
    dropped = ("cost_ns", "step_cost_ns", "job_gain_ns", "step_gain_ns", "pct" if per_step else "step_pct")
    table = findings.with_columns(cost=cost, job_gain=job_gain).drop(dropped)
    return table, "ns per step" if per_step else "ns per recording"


def _simulate(job: Job, changes: list[str]) -> tuple[list[str], pl.DataFrame]:
    """Return the reasons and the table of a what-if, which a process can hand over."""
    import etloom

    simulated = etloom.simulate(job, *changes)
    return list(map(str, simulated.reasons)), simulated.table


def _predict(
    job: Job,
    network: str | None,
    recorded_network: str | None,
    ranks: int | None,
    parallel: str,
    device: str | None,
) -> tuple[list[str], pl.DataFrame]:
    """Return the reasons and the table of a prediction, which a process can hand over."""
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
    return list(prediction.reasons), prediction.table


def _list_first(table: pl.DataFrame, top: int, name: str = "rows") -> dict[str, Any]:
    """Return the first rows of a table as a part of an answer, and a note on how many there are, if more."""
    count = max(min(top, _MAX_ROWS), 1)
    more = {f"{name}_note": f"{count:,} of {table.height:,} {name}; top shows more"}
    return (more if count < table.height else {}) | {name: table.head(count)}


def _describe_analysis(name: str) -> str:
    from etloom.core import registry

    options = ", ".join(option.name for option in registry.list_options("analyses", name))
    return f"{name}({options}): {registry.get_summary('analyses', name)}"


def _answer_with_options(job: Job, name: str, chosen: Mapping[str, Any]) -> pl.DataFrame:
    """Run an analysis with options and filters; `top` of an analysis without that option is left to the caller."""
    from etloom.cli.analyze import FILTERS, Question, answer_part
    from etloom.core import registry

    declared = {option.name for option in registry.list_options("analyses", name)}
    filters = {flag: value for flag, value in chosen.items() if flag in FILTERS and flag not in declared}
    if "rank" in filters and not isinstance(filters["rank"], list):
        filters["rank"] = [filters["rank"]]
    other_flags = {*filters, "top"} - declared
    options = {option: value for option, value in chosen.items() if option not in other_flags}
    return answer_part(job, Question(name, options, filters)).table


def _list_named_operators(trace: Trace, finding: Mapping[str, Any], places: list[str | None]) -> pl.DataFrame:
    """Return the operators of a rank that a finding names or that run in its example, with the longest event of each.

    Args:
        trace: the rank of the example.
        finding: the finding, without null values.
        places: the names of the finding's parts.
    """
    import polars as pl

    text = f"{finding.get('title')} {finding.get('advice')}"
    named = {finding.get("operator"), *places}
    operators = trace.events.filter(pl.col("cat") == "cpu_op").with_columns(pl.col("name").cast(pl.String))
    start, end = finding.get("start_ns"), finding.get("end_ns")
    is_within = (
        pl.lit(False)
        if start is None or end is None
        else (pl.col("ts") < end) & (pl.col("ts") + pl.col("dur").fill_null(0) > start)
    )
    return (
        operators.with_columns(is_within.alias("is_within"))
        .group_by("name")
        .agg(
            pl.len().alias("count"),
            pl.col("is_within").sum().alias("in_example"),
            pl.col("dur").sum().alias("total_ns"),
            pl.col("id").sort_by("dur", descending=True, nulls_last=True).first().alias("longest_event"),
        )
        .filter(
            (pl.col("in_example") > 0)
            | pl.col("name").is_in([name for name in named if name])
            | (
                pl.col("name").str.contains("::", literal=True)
                & pl.lit(text).str.contains(pl.col("name"), literal=True)
            )
        )
        .sort("in_example", "total_ns", "name", descending=[True, True, False])
        .head(_MAX_OPERATORS)
    )


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
