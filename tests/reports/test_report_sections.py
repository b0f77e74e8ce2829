"""Sections of the report, and where it may be written: told before the work begins."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import cli
from etloom.analyses.findings import COLUMNS
from etloom.core.schema import TABLES
from etloom.core.text import format_duration
from etloom.core.trace import Job, Trace
from etloom.reports import html_report
from etloom.reports.formatting import choose_column_format
from etloom.reports.html_sections import OPEN_FINDINGS, render_findings, render_rank_tables
from etloom.reports.summary import summarize_run
from support import small_traces
from support.fleets import write_fleet
from support.real_runs import open_run
from support.reports import HOSTILE, PageElements
from support.small_traces import RankBuilder


def of_findings(number: int) -> pl.DataFrame:
    rows = [
        dict.fromkeys(COLUMNS)
        | {
            "rank": 0, "ranks": 1, "title": f"finding {at}", "advice": "mend <it>", "pattern": "p",
            "cost_ns": 1000 * (number - at), "pct": 1.0, "confidence": "low",
        }
        for at in range(number)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=COLUMNS)


def titles(page: str) -> list[str]:
    return re.findall(r'<p class="what">(.*?)</p>', page)


@pytest.mark.parametrize(
    ("number", "open_"),
    [
        (0, 0),
        (3, 3),
        (OPEN_FINDINGS + 1, OPEN_FINDINGS + 1),
        (OPEN_FINDINGS + 2, OPEN_FINDINGS),
        (15, OPEN_FINDINGS),
    ],
)
def test_the_costliest_findings_are_open_and_the_rest_a_click_away(number: int, open_: int) -> None:
    page = render_findings(of_findings(number) if number else pl.DataFrame(), 1, 12)
    before, _, folded = page.partition("<details>")
    assert titles(before) == [f"finding {at}" for at in range(open_)]
    assert titles(folded) == [f"finding {at}" for at in range(open_, min(number, 12))]
    if folded:
        most = f"up to {number - OPEN_FINDINGS:.3f} µs in total, 1.0 % of rank 0"
        assert f"<summary>{min(number, 12) - OPEN_FINDINGS} more, {most}</summary>" in folded
    assert ("3 smaller findings in <code>etloom analyze findings</code>" in page) == (number == 15)
    assert "<it>" not in page


def test_each_collective_has_its_wait_and_transfer(data: Path) -> None:
    tables = summarize_run(open_run(data / "dlrm")).tables
    rows = re.findall(r'<table id="collectives".*?</table>', render_rank_tables(tables, 4), re.DOTALL)[0]
    heads = [re.sub(r" \(.*", "", one) for one in re.findall(r'<button type="button">(.*?)</button>', rows)]
    assert heads[0].startswith("start") and heads[1] == "collective"
    first = re.findall(r"<tr>(.*?)</tr>", rows)[1]
    values = [
        number or text
        for number, text in re.findall(r'<td(?:[^>]*data-value="([^"]*)")?[^>]*>(.*?)</td>', first)
    ]
    cells = dict(zip(heads, values, strict=True))
    # The costliest one is the first all-to-all, whose ranks came 7.1 ms apart.
    assert (cells["collective"], cells["wait"], cells["transfer"]) == ("all_to_all", "7116000", "518000")
    assert (cells["first rank"], cells["last rank"]) == ("1", "2")
    assert rows.count("<tr>") == 1 + tables["collectives"].height == 9


@pytest.mark.slow
def test_one_rank_states_what_is_unknown(data: Path) -> None:
    page = html_report.render_page(open_run(data / "tracelens" / "b200_eager.json.gz"))
    assert "Collectives of this rank" in page and "Between ranks" not in page
    assert "A single rank does not show which rank waited" in page


@pytest.mark.slow
def test_an_execution_trace_alone_is_reported_without_times(data: Path, tmp_path: Path) -> None:
    job = open_run(data / "et_schemas" / "1.1.0-chakra.0.0.4_resnet_2gpu.json.gz")
    found = summarize_run(job)
    said = {one.topic: (one.figure, one.text) for one in found.lines}
    assert list(said) == ["Operators", "Communication", "Times", "Data loss", "Read"]
    assert said["Operators"] == ("14,392", "with 103 names; most frequent: aten::empty, 1,590 times")
    assert said["Communication"] == ("21", "calls: all_reduce 15, broadcast 6; 307.3 MB in total")
    assert said["Times"][0] == "not recorded" and found.unanswered == {}
    page = html_report.render_page(job)
    assert re.findall(r'<a href="#([\w-]+)"', page) == ["recorded-section", "quality"]
    assert re.findall(r'<table id="([\w-]+)"', page) == ["recorded", "link-quality", "stats"]


def test_hostile_names_of_nodes_are_text() -> None:
    names = [*HOSTILE, "{{sections}}"]
    nodes = TABLES["nodes"].conform(pl.DataFrame({"id": range(len(names)), "name": names}))
    page = html_report.render_page(
        Job({0: Trace({"nodes": nodes}, {"rank": 0, "linked": True})}, {"path": HOSTILE[0]})
    )
    elements = PageElements(page)
    assert len([tag for tag, _ in elements.found if tag == "script"]) == 2
    shown = "".join(elements.text)
    assert all(name in shown for name in names)


@pytest.mark.slow
def test_durations_of_chakra_nodes_are_shown(data: Path) -> None:
    job = open_run(data / "chakra" / "chakra.0.et.gz")
    (times,) = [one for one in summarize_run(job).lines if one.topic == "Times"]
    stated = sum(json.loads(text).get("duration_micros", 0) for text in job[0].nodes["attrs"].drop_nulls())
    assert stated > 0 and times.figure == format_duration(1000 * stated)
    recorded = summarize_run(job).tables["recorded"]
    assert recorded["total_ns"].sum() == 1000 * stated and recorded["count"].sum() == job[0].nodes.height


@pytest.mark.slow
def test_a_file_of_several_ranks_gives_its_name(data: Path) -> None:
    page = html_report.render_page(open_run(data / "nsys" / "h100_2gpu_1s.sqlite.gz"))
    assert re.search(r"<h1[^>]*>h100_2gpu_1s\.sqlite\.gz</h1>", page)


@pytest.mark.slow
def test_links_of_a_page_have_targets_in_it(data: Path, tmp_path: Path) -> None:
    def links(page: str) -> list[str]:
        names = re.findall(r'<a href="#([\w-]+)"', page)
        assert all(f'id="{name}"' in page for name in names)
        return names

    several = links(html_report.render_page(open_run(data / "dlrm")))
    assert {"findings", "critical-path-section", "ranks-section", "comm-overlap-section"} <= set(several)
    one = links(html_report.render_page(open_run(data / "tracelens" / "h100_qwen.json.gz")))
    assert set(several) - set(one) == {"ranks-section", "comm-overlap-section"}


def test_compared_values_have_one_unit() -> None:
    table = pl.DataFrame(
        {"before_ns": [9_098_000], "after_ns": [0], "change_ns": [-9_098_000], "device_after_ns": [7]}
    )
    larger = table.with_columns(after_ns=pl.lit(126_200_000))
    assert [choose_column_format(table, name).header for name in table.columns] == [
        *("before (µs)", "after (µs)", "change (µs)", "device after (ns)")
    ]
    assert [choose_column_format(larger, name).header for name in table.columns[:3]] == [
        "before (ms)",
        "after (ms)",
        "change (ms)",
    ]


@pytest.mark.slow
def test_notes_of_many_ranks_are_one(tmp_path: Path) -> None:
    one = etloom.open(small_traces.write_run(tmp_path / "run"))[0]
    few, many = (Job(dict.fromkeys(range(number), one)) for number in (2, 6))
    size = one.events.height
    assert html_report.render_page(few, max_events=4).count("events are omitted from the timeline") == 2
    page = html_report.render_page(many, max_events=4)
    said = re.findall(r"([^>]*) events are omitted from the timeline", page)
    assert said == [f"All 6 ranks together: {6 * (size - 4)} of {6 * size}"]


@pytest.mark.slow
def test_of_many_rows_the_costliest_of_all_ranks_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"))
    operators = summarize_run(job).tables["top-ops"]
    assert operators.height > 2
    monkeypatch.setattr(html_report, "MAX_COST_ROWS", 2)
    rows = re.findall(r'<table id="top-ops".*?</table>', html_report.render_page(job), re.DOTALL)[0].split(
        "<tr>"
    )[2:]
    shown = [re.findall(r'data-value="([^"]*)"', row)[2] for row in rows]
    assert shown == [str(ns) for ns in operators["exclusive_ns"].sort(descending=True).head(2)]


@pytest.mark.slow
def test_the_top_operator_is_of_all_operators_of_all_ranks(tmp_path: Path) -> None:
    """aten::common is the first operator of rank 0 and of rank 1 the 21st, which its table does not hold."""
    for rank in (0, 1):
        us = [100 if rank else 10] * 20 + [30 if rank else 300] * 3
        names = [f"op{rank}_{at}" for at in range(20)] + ["aten::common"] * 3
        events = [
            small_traces.complete_event("cpu_op", name, 1000 * at, took, 1, 1)
            for at, (name, took) in enumerate(zip(names, us, strict=True))
        ]
        head = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(head | {"traceEvents": events}))
    job = etloom.open(tmp_path)
    (said,) = [one for one in summarize_run(job).lines if one.topic == "Top operator"]
    # Own times: rank 0 200 + 900 us, rank 1 2,000 + 90 us.
    assert (said.figure, said.text) == (
        "aten::common",
        "31.0 % of the operators' exclusive time, 990.0 µs in 6 calls",
    )
    assert summarize_run(job).tables["top-ops"].group_by("rank").len().sort("rank")["len"].to_list() == [
        20,
        20,
    ]
    assert "The first 20 of each rank by exclusive time, and by device time." in html_report.render_page(job)
    assert "The first 20 of each rank by exclusive time, and by device time." not in html_report.render_page(
        etloom.open(small_traces.write_run(tmp_path / "run"))
    )


@pytest.mark.slow
def test_a_rank_of_several_devices_reports_when_it_is_idle(tmp_path: Path) -> None:
    def idle(*ranks: int) -> str:
        """Of ranks of so many devices."""
        folder = tmp_path / "-".join(map(str, ranks))
        folder.mkdir()
        for rank, devices in enumerate(ranks):
            run = RankBuilder().op("aten::mm", 0, 40)
            for device in range(devices):
                run.kernel(device + 1, 10, 100, device=device)
            head = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": len(ranks)}}
            (folder / f"rank{rank}.json").write_text(json.dumps(head | {"traceEvents": run.events}))
        (said,) = [one for one in summarize_run(etloom.open(folder)).lines if one.topic == "Idle"]
        return said.text

    assert idle(1) == "no GPU activity runs"
    assert idle(2) == "no GPU activity runs; rank 0 has 2, and is idle when all of them are"
    assert idle(2, 1, 3) == "no GPU activity runs; ranks 0, 2 have up to 3, and are idle when all of them are"


@pytest.mark.slow
def test_an_omitted_path_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"))
    monkeypatch.setattr("etloom.reports.summary.MAX_GRAPH_EVENTS", 1)
    (said,) = [one for one in summarize_run(job).lines if one.topic == "Critical path"]
    assert (said.figure, said.text) == (
        *("unknown", "more than 1 events: run `etloom analyze critical-path`"),
    )


def no_work(*_: object, **__: object) -> None:
    raise AssertionError("the work has begun")


@pytest.mark.parametrize("verb", ["report", "diff"])
def test_an_unwritable_output_is_reported_before_the_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etloom.cli.report.open_job", no_work)
    monkeypatch.setattr("etloom.cli.diff.open_job", no_work)
    run = small_traces.write_run(tmp_path / "run")
    (tmp_path / "file").write_text("kept")
    places = {
        tmp_path: "is a folder; expected a file to write",
        tmp_path / "file" / "report.html": "cannot be written: Not a directory",
        Path("/proc/nowhere/report.html"): "cannot be written: ",
    }
    option = {"report": "--out", "diff": "--html"}[verb]
    runs = [str(run)] * (1 if verb == "report" else 2)
    for place, why in places.items():
        assert cli.main([verb, *runs, option, str(place)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"etloom: {place}: {why}") and said.endswith(
            f"choose another path with {option}\n"
        )
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_with_other_content_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    run.chmod(0o555)
    assert cli.main(["report", str(run)]) == 1
    assert "Permission denied; choose another path with --out" in capsys.readouterr().err
    run.chmod(0o755)


@pytest.mark.slow
def test_missing_folders_are_created_only_with_the_report(tmp_path: Path) -> None:
    run = small_traces.write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty"), "--out", str(tmp_path / "a" / "r.html")]) == 1
    assert not (tmp_path / "a").exists()
    assert cli.main(["report", str(run), "--out", str(tmp_path / "a" / "b" / "r.html")]) == 0
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["r.html"]


@pytest.mark.slow
def test_shares_leave_out_ranks_without_gpu_activity_if_others_have_some(tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "run", 3, slow=())
    expected = {line.topic: line.figure for line in summarize_run(etloom.select(run, rank=[0, 2])).lines}
    file = run / "kineto_trace_1.json"
    content = json.loads(file.read_text())
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("cat") != "kernel"]
    file.write_text(json.dumps(content))
    lines = {line.topic: line for line in summarize_run(etloom.open(run)).lines}
    for topic in ("Compute", "Exposed communication", "Idle"):
        assert lines[topic].figure == expected[topic]
    assert lines["Compute"].text.endswith("per rank in total; rank 1 has no GPU activity and is left out")


@pytest.mark.slow
def test_steps_whose_gpu_activity_is_missing_are_counted(own: Path, tmp_path: Path) -> None:
    content = json.loads(gzip.decompress((own / "gpu_small" / "kineto_trace_0.json.gz").read_bytes()))
    events = content["traceEvents"]
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    begin = max(event["ts"] for event in annotations if event["name"].startswith("ProfilerStep#"))
    of_last_step = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["ts"] >= begin
    }
    note = "no GPU activity was recorded for 1 of 2 steps, which count as idle"
    for missing, expected in ((set(), False), (of_last_step, True)):
        content["traceEvents"] = [
            event
            for event in events
            if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset")
            or event["args"]["correlation"] not in missing
        ]
        (tmp_path / "kineto_trace_0.json").write_text(json.dumps(content))
        lines = {line.topic: line for line in summarize_run(etloom.open(tmp_path, use_cache=False)).lines}
        assert (note in lines["Idle"].text) == expected


def test_time_before_the_first_recorded_activity_is_not_idle(data: Path) -> None:
    trace = etloom.open(data / "cases/turn3/device_behind_at_start.json")
    lines = {line.topic: line for line in summarize_run(trace).lines}
    assert (lines["Compute"].figure, lines["Idle"].figure) == ("99.9 %", "0.1 %")
    assert "20.00 ms are left out: it is unknown whether the GPU worked" in lines["Compute"].text
    assert lines["Critical path"].figure == "66.6 % late starts after a launch"
