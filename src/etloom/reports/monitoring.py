"""Metrics of a run and of a check for monitoring systems: Prometheus text, and OpenTelemetry (OTLP) as JSON.

Units are those of both systems: seconds, bytes, ratios. The number of series does not grow with the number of ranks:
figures of ranks are given as minimum, median and maximum. Names do not change within version 1 of `SCHEMA`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etloom.core.version import __version__

SCHEMA = 1
VERDICTS = ("passed", "failed", "undecided")
_UNITS = {"ns": ("seconds", 1e-9, "s"), "B": ("bytes", 1.0, "By")}
"""Unit of a measure -> ending of the name, factor, unit of OTLP."""
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """A metric of type gauge: name, help text, unit, and one value per set of labels.

    Attributes:
        name: with its unit as ending.
        help: one line.
        unit: of OTLP (UCUM): s, By, 1.
        samples: labels and value of each series.
    """

    name: str
    help: str
    unit: str
    samples: Sequence[tuple[Labels, float]]


def measure_run(facts: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a run: ranks, steps, span, step time, linked share and data loss.

    Args:
        facts: of `etloom.info`.
    """
    ranks = facts["by_rank"]
    losses: Counter[tuple[str, str]] = Counter()
    for row in facts["stats"]:
        losses[row["name"], row["severity"]] += row["count"]
    span = facts["span_ns"]
    metrics = [
        Metric("etloom_schema", "Version of the names of these metrics.", "1", [({}, SCHEMA)]),
        Metric("etloom_run_ranks", "Ranks that were recorded.", "1", [({}, len(ranks))]),
        Metric("etloom_run_world_size", "Ranks of the job.", "1", _known({}, facts["world_size"])),
        Metric("etloom_run_hosts", "Hosts that were recorded.", "1", [({}, len(facts["hosts"]))]),
        Metric("etloom_run_steps", "Annotated steps.", "1", [({}, len(facts["steps"]))]),
        Metric(
            "etloom_run_span_seconds",
            "Time from the first to the last event of all ranks.",
            "s",
            _known({}, span and span * 1e-9),
        ),
        Metric(
            "etloom_rank_step_seconds",
            "Mean step time of a rank.",
            "s",
            _spread(ranks, "mean_step_ns", 1e-9),
        ),
        Metric("etloom_rank_events", "Events of a rank.", "1", _spread(ranks, "events", 1)),
        Metric(
            "etloom_rank_linked_ratio",
            "Share of the operators of a rank that are linked to events.",
            "1",
            _spread(ranks, "linked_pct", 0.01),
        ),
        Metric(
            "etloom_stats_rows",
            "Rows that were skipped, repaired or inferred, by name and severity (docs/reference/stats.md).",
            "1",
            [
                ({"name": name, "severity": severity}, count)
                for (name, severity), count in sorted(losses.items())
            ],
        ),
    ]
    return [metric for metric in metrics if metric.samples]


def measure_check(table: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the metrics of a regression check: verdict, values before and after, and relative change of each measure.

    Args:
        table: the rows of `etloom.check(...).table`.
    """
    verdicts = [
        ({"measure": row["measure"], "verdict": verdict}, float(row["verdict"] == verdict))
        for row in table
        for verdict in VERDICTS
    ]
    metrics = [
        Metric("etloom_schema", "Version of the names of these metrics.", "1", [({}, SCHEMA)]),
        Metric("etloom_check_verdict", "1 for the verdict of the measure, else 0.", "1", verdicts),
    ]
    for side in ("before", "after"):
        for unit, (ending, factor, otlp_unit) in _UNITS.items():
            samples = [
                ({"measure": row["measure"]}, row[side] * factor)
                for row in table
                if row["unit"] == unit and _is_finite(row[side])
            ]
            text = f"The measure {side} the change."
            metrics.append(Metric(f"etloom_check_{side}_{ending}", text, otlp_unit, samples))
    for column, text in (
        ("change", "Change relative to before."),
        ("low", "Lower end of the interval of the change."),
        ("high", "Upper end of the interval of the change."),
        ("limit", "Allowed change."),
    ):
        samples = [
            ({"measure": row["measure"]}, row[f"{column}_pct"] / 100)
            for row in table
            if _is_finite(row[f"{column}_pct"])
        ]
        metrics.append(Metric(f"etloom_check_{column}_ratio", text, "1", samples))
    return [metric for metric in metrics if metric.samples]


def _known(labels: Labels, value: float | None) -> list[tuple[Labels, float]]:
    return [(labels, value)] if value is not None and _is_finite(value) else []


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _spread(ranks: Sequence[Mapping[str, Any]], column: str, factor: float) -> list[tuple[Labels, float]]:
    """Return minimum, median and maximum of a column over the ranks, times ``factor``; empty without values."""
    values = [row[column] * factor for row in ranks if _is_finite(row[column])]
    if not values:
        return []
    figures = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return [({"over_ranks": name}, value) for name, value in figures.items()]


def format_prometheus(metrics: Sequence[Metric], run: str) -> str:
    """Format metrics as Prometheus text (version 0.0.4); each series has the label ``run``."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
        for labels, value in metric.samples:
            text = ",".join(f'{name}="{_escape(label)}"' for name, label in {"run": run, **labels}.items())
            lines.append(f"{metric.name}{{{text}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    """Escape backslashes, line breaks and quotes in the value of a Prometheus label."""
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def format_otlp(metrics: Sequence[Metric], run: str, time_ns: int) -> str:
    """Format metrics as the JSON of an OTLP/HTTP request (ExportMetricsServiceRequest).

    Args:
        metrics: the metrics.
        run: the run, an attribute of the resource.
        time_ns: time of the values, ns since the epoch.
    """
    points = [
        {
            "name": metric.name,
            "description": metric.help,
            "unit": metric.unit,
            "gauge": {
                "dataPoints": [
                    {
                        "attributes": _attributes(labels),
                        "timeUnixNano": str(time_ns),
                        "asDouble": float(value),
                    }
                    for labels, value in metric.samples
                ]
            },
        }
        for metric in metrics
    ]
    resource = {"attributes": _attributes({"service.name": "etloom", "etloom.run": run})}
    scope = {"scope": {"name": "etloom", "version": __version__}, "metrics": points}
    return json.dumps({"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}, indent=1) + "\n"


def _attributes(labels: Labels) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in labels.items()]
