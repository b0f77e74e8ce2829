"""Metrics for Prometheus and OpenTelemetry: names, units, escapes, and what both systems parse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import etloom
from etloom.reports.monitoring import Metric, format_otlp, format_prometheus, measure_check, measure_run
from support.fleets import write_fleet
from support.small_traces import write_stepped_run

Call = Callable[..., tuple[int, str, str]]
SERIES = re.compile(
    r'([a-z_]+)\{run="((?:[^"\\\n]|\\["\\n])*)"((?:,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*)\} (\S+)'
)


def parse_prometheus(text: str) -> dict[tuple[str, str], float]:
    """Return (name, labels after run) -> value; every line must be a series, or the HELP or TYPE of the next ones."""
    assert text.endswith("\n")
    values, declared = {}, set()
    for line in text.splitlines():
        if line.startswith("# "):
            declared.add(line.split()[2])
            continue
        match = SERIES.fullmatch(line)
        assert match, line
        assert match[1] in declared
        values[match[1], match[3].removeprefix(",")] = float(match[4])
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fleet(tmp_path_factory.mktemp("runs") / "run", 3)


def test_metrics_of_a_run_are_in_base_units(run: Path, call: Call) -> None:
    facts = etloom.info(run)
    status, text, _ = call("info", run, "--format", "prometheus")
    values = parse_prometheus(text)
    assert status == 0
    assert values["etloom_run_ranks", ""] == 3
    assert values["etloom_run_hosts", ""] == 2
    assert values["etloom_run_span_seconds", ""] == pytest.approx(facts["span_ns"] / 1e9)
    assert values["etloom_rank_step_seconds", 'over_ranks="max"'] == pytest.approx(990e-6)
    assert values["etloom_schema", ""] == facts["schema"] == 1
    assert ("etloom_rank_linked_ratio", 'over_ranks="min"') not in values  # no execution trace
    assert values["etloom_stats_rows", 'name="read.events",severity="info"'] > 0


@pytest.mark.slow
def test_otlp_has_the_same_values_as_prometheus(run: Path, call: Call) -> None:
    values = parse_prometheus(call("info", run, "--format", "prometheus")[1])
    (resource,) = json.loads(call("info", run, "--format", "otlp")[1])["resourceMetrics"]
    attributes = {item["key"]: item["value"]["stringValue"] for item in resource["resource"]["attributes"]}
    assert attributes == {"service.name": "etloom", "etloom.run": str(run)}
    sent = {}
    for metric in resource["scopeMetrics"][0]["metrics"]:
        assert metric["unit"] in ("s", "By", "1")
        for point in metric["gauge"]["dataPoints"]:
            assert int(point["timeUnixNano"]) > 1_600_000_000_000_000_000
            labels = ",".join(
                f'{item["key"]}="{item["value"]["stringValue"]}"' for item in point["attributes"]
            )
            sent[metric["name"], labels] = point["asDouble"]
    assert sent == values


def test_metrics_of_a_check(tmp_path: Path, call: Call) -> None:
    before, after = (
        write_stepped_run(tmp_path / name, [time + number % 3 for number in range(12)])
        for name, time in (("before", 100), ("after", 150))
    )
    status, text, _ = call(
        "check", after, "--baseline", before, "--metric", "step-time", "--format", "prometheus"
    )
    values = parse_prometheus(text)
    assert status == 1
    assert values["etloom_check_verdict", 'measure="step time",verdict="failed"'] == 1
    assert values["etloom_check_verdict", 'measure="step time",verdict="passed"'] == 0
    assert values["etloom_check_after_seconds", 'measure="step time"'] == pytest.approx(151e-6)
    assert values["etloom_check_change_ratio", 'measure="step time"'] == pytest.approx(0.5, abs=0.02)
    assert values["etloom_check_limit_ratio", 'measure="step time"'] == 0.03


def test_the_json_of_a_check_states_its_version(tmp_path: Path, call: Call) -> None:
    before = write_stepped_run(tmp_path / "before", [100 + number % 3 for number in range(12)])
    status, text, _ = call("check", before, "--baseline", before, "--format", "json")
    content = json.loads(text)
    assert list(content) == ["schema", "verdict", "measures"]
    assert content["schema"] == 1
    assert (status, content["verdict"]) == (
        {"passed": 0, "undecided": 3}[content["verdict"]],
        content["verdict"],
    )
    assert {row["measure"] for row in content["measures"]} == {"step time"}


def test_unknown_and_infinite_values_are_left_out() -> None:
    row = dict.fromkeys(("before", "change_pct", "low_pct", "limit_pct")) | {
        "after": 1.0,
        "high_pct": float("inf"),
    }
    metrics = measure_check([{**row, "measure": "step time", "unit": "ns", "verdict": "undecided"}])
    assert [metric.name for metric in metrics] == [
        "etloom_schema",
        "etloom_check_verdict",
        "etloom_check_after_seconds",
    ]
    facts = {"by_rank": [], "stats": [], "span_ns": None, "world_size": None, "hosts": [], "steps": []}
    names = {metric.name for metric in measure_run(facts)}
    assert names == {"etloom_schema", "etloom_run_ranks", "etloom_run_hosts", "etloom_run_steps"}


def test_names_from_outside_are_escaped() -> None:
    metric = Metric("etloom_x", "Text.", "1", [({"name": 'a"b\\c\nd'}, 1)])
    text = format_prometheus([metric], 'run "1"\n')
    assert text.splitlines()[-1] == r'etloom_x{run="run \"1\"\n",name="a\"b\\c\nd"} 1'
    parse_prometheus(text)
    point = json.loads(format_otlp([metric], "run", 5))["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]
    assert point["gauge"]["dataPoints"][0]["attributes"][0]["value"]["stringValue"] == 'a"b\\c\nd'
