"""The report without a browser: what is packed, what is said, and that nothing of a trace becomes markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.analyses.findings import COLUMNS
from etloom.core.text import format_duration, format_number
from etloom.core.trace import Job, Trace
from etloom.reports import html_report, html_sections, timeline_waits, what_if
from etloom.reports.colors import COLORS, list_color_codes
from etloom.reports.formatting import choose_column_format
from etloom.reports.html_charts import render_bars
from etloom.reports.html_tables import render_table
from etloom.reports.packed_columns import encode_column, frame_columns
from etloom.reports.summary import summarize_run
from etloom.reports.timeline_selection import find_first_work, find_origins, pack_timeline
from etloom.reports.timeline_tracks import MAX_ROWS
from support.examples import examples
from support.random_traces import traces
from support.reports import HOSTILE, PageElements, host_row, hostile_job, kernel_row, link_events
from support.small_traces import write_run


def unpack(data: bytes) -> dict[str, Any]:
    """What data.js makes of a packed rank: the header, and columns by name, times absolute."""
    raw = gzip.decompress(data)
    length = int.from_bytes(raw[:4], "little")
    found = json.loads(raw[4 : 4 + length])
    at = 4 + length
    for name, form, n, width, is_difference in found["columns"]:
        planes = np.frombuffer(raw, "u1", n * width, at).reshape(width, n)
        naturals = [sum(int(byte) << (8 * i) for i, byte in enumerate(parts)) for parts in planes.T] or [
            0
        ] * n
        values = [-(natural + 1) // 2 if natural % 2 else natural // 2 for natural in naturals]
        values = list(itertools.accumulate(values)) if is_difference else values
        found[name] = [None if form == "wide" and value == -1 else value for value in values]
        at += n * width
    assert at == len(raw)
    for track in found["tracks"]:
        for first, last in zip(track["rows"], track["rows"][1:], strict=False):
            found["start"][first:last] = np.cumsum(found["start"][first:last]).tolist()
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(write_run(tmp_path_factory.mktemp("run")))


def test_the_encoded_columns_equal_the_trace(job: Job) -> None:
    trace = job[0]
    origin = int(trace.events["ts"].min())  # type: ignore[arg-type]
    found = unpack(pack_timeline(trace, rank=0, origin=origin, max_events=100).data)
    names = [found["strings"][name - 1] for name in found["name"]]
    packed = dict(zip(names, zip(found["start"], found["dur"], found["color"], strict=True), strict=True))
    assert packed["aten::mm"] == (150_000, 250_000, 3)
    assert packed["gemm"] == (300_000, 600_000, 0)
    assert packed["ncclDevKernel_AllReduce_Sum"] == (700_000, 250_000, 1)
    gemm = names.index("gemm")
    assert names[found["launch"][gemm] - 1] == "cudaLaunchKernel"
    assert names[found["operator"][gemm] - 1] == "aten::mm"
    assert found["correlation"][gemm] == 5
    assert found["correlation"][names.index("aten::mm")] is None
    assert found["strings"][found["geometry"][gemm] - 1] == "grid 2 x 1 x 1, block 64 x 1 x 1"
    assert json.loads(found["strings"][found["shapes"][names.index("aten::linear")] - 1]) == [[4, 8], [8, 8]]
    assert found["steps"] == [[3, 0, 1_000_000]]
    assert found["step"][gemm] == 1
    assert [track["name"] for track in found["tracks"]] == ["stream 7", "stream 13", "main"]


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(-(2**53), 2**53) | st.integers(-3, 300) | st.none(), max_size=40),
    st.sampled_from(("signed", "wide")),
    st.booleans(),
)
def test_a_column_keeps_each_integer(values: list[int | None], form: str, by_difference: bool) -> None:
    column = encode_column("values", form, pl.Series(values, dtype=pl.Int64), by_difference=by_difference)
    unpacked = unpack(frame_columns({"tracks": []}, [column]))["values"]
    if form == "wide":
        assert unpacked == [None if value is None else max(value, 0) for value in values]
    else:
        assert unpacked == [value or 0 for value in values]


def test_ranks_of_a_broadcast_wait_for_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is the root and begins at 5; rank 2 arrives last, and nobody waits for it."""
    arrivals = pl.DataFrame(
        {"rank": [0, 1, 2], "event": [10, 11, 12], "instance": 0, "start": [5, 0, 20], "awaited": [None, 5, None],
         "wait": [0, 5, 0], "order": [1, 0, 2], "size": 3}
    )  # fmt: skip
    monkeypatch.setattr(timeline_waits, "ARRIVAL_ORDER", SimpleNamespace(read=lambda job: arrivals))
    waits = {rank: rows.rows() for rank, rows in timeline_waits.find_waits(Job({})).items()}
    assert waits == {0: [(10, 0, 10, 5)], 1: [(11, 0, 10, 5)]}


def test_gpu_tracks_are_on_top_and_python_frames_apart() -> None:
    events = [
        host_row("python_function", "train.py(1): main", 0, 100, 0),
        host_row("python_function", "model.py(7): forward", 10, 60, 1),
        host_row("cpu_op", "aten::linear", 20, 40, 2),
        host_row("cpu_op", "aten::mm", 30, 20, 3),
        {**kernel_row("gemm", 50, 30), "depth": None},
    ]
    found = unpack(pack_timeline(link_events(events), rank=0, origin=0, max_events=100).data)
    assert [(track["name"], track["folded"], track["host"], track["rows"]) for track in found["tracks"]] == [
        ("stream 7", False, False, [0, 1]),
        ("thread 1, Python", True, False, [1, 2, 3]),
        ("thread 1", False, True, [3, 4, 5]),
    ]
    alone = unpack(pack_timeline(link_events(events[:2]), rank=0, origin=0, max_events=100).data)
    assert [(track["name"], track["folded"]) for track in alone["tracks"]] == [("thread 1, Python", False)]


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 60), st.none() | st.integers(0, 25)), min_size=1, max_size=60))
def test_no_event_hides_another(times: list[tuple[int, int | None]]) -> None:
    trace = link_events([{**kernel_row("k", ts, 0), "dur": dur} for ts, dur in times])
    packed = pack_timeline(trace, rank=0, origin=0, max_events=1000)
    assert packed.sharing_last_row == 0
    assert packed.plotted == len(times)
    found = unpack(packed.data)
    assert sorted(zip(found["start"], [d or 0 for d in found["dur"]], strict=True)) == sorted(
        (ts, dur or 0) for ts, dur in times
    )
    (track,) = found["tracks"]
    busy = np.zeros(200, int)
    for ts, dur in times:
        busy[ts : ts + max(dur or 0, 1)] += 1
    assert len(track["rows"]) - 1 == busy.max()  # no more rows than needed
    for first, last in zip(track["rows"], track["rows"][1:], strict=False):
        end = 0
        for start, dur in zip(found["start"][first:last], found["dur"][first:last], strict=True):
            assert start >= end
            end = start + max(dur or 0, 1)


def test_a_track_has_a_last_row_and_lists_who_shares_it() -> None:
    trace = link_events([kernel_row("k", ts, 1000) for ts in range(MAX_ROWS + 5)])
    packed = pack_timeline(trace, rank=0, origin=0, max_events=1000)
    assert packed.sharing_last_row == 5
    assert len(unpack(packed.data)["tracks"][0]["rows"]) == MAX_ROWS + 1


def test_of_too_many_events_the_longest_of_each_time_are_kept() -> None:
    events = [
        kernel_row("k", ts, 9 if ts % 4 == 1 else 2) for ts in range(8000)
    ]  # four in each piece of time
    packed = pack_timeline(link_events(events), rank=0, origin=0, max_events=2000)
    assert (packed.total, packed.plotted, packed.omitted) == (8000, 2000, 6000)
    assert set(unpack(packed.data)["dur"]) == {9}
    bursts = [kernel_row("long", ts, 1000, stream=1) for ts in range(0, 200_000, 1000)]
    bursts += [kernel_row("short", 2_000_000 + ts, 1, stream=2) for ts in range(200)]
    kept = unpack(pack_timeline(link_events(bursts), rank=0, origin=0, max_events=250).data)
    short = [track for track in kept["tracks"] if track["name"] == "stream 2"]
    assert short, "a track of short events does not vanish"
    assert sum(track["omitted"] for track in kept["tracks"]) == 150


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(traces)
def test_any_trace_is_encoded(trace: Trace) -> None:
    packed = pack_timeline(trace, rank=0, origin=0, max_events=3)
    found = unpack(packed.data)
    assert found["events"] == packed.plotted <= 3
    assert packed.total == trace.events.height


def test_colors() -> None:
    events = pl.DataFrame(
        [
            ("kernel", "gemm", "compute"),
            ("kernel", "ncclDevKernel_SendRecv", "communication"),
            ("gpu_memcpy", "Memcpy DtoH", "memory"),
            ("cpu_op", "aten::mm", "operator"),
            ("cpu_op", "c10d::allreduce_", "communication"),
            ("user_annotation", "gloo:all_reduce", "communication"),
            ("user_annotation", "ProfilerStep#1", "annotation"),
            ("cuda_runtime", "cudaLaunchKernel", "runtime"),
            ("python_function", "train.py(3): f", "python"),
            (None, "Iteration Start", "other"),
        ],
        schema=["cat", "name", "expected"],
        orient="row",
    ).cast({"cat": pl.Categorical, "name": pl.Categorical})
    assert [COLORS[code][0] for code in list_color_codes(events)] == events["expected"].to_list()


@pytest.mark.slow
def test_the_summary_states_what_the_run_shows(job: Job) -> None:
    found = summarize_run(job)
    said = {sentence.topic: sentence for sentence in found.lines}
    # The step from 100 to 1100 us; device work from 400 to 1050: gemm 600, the all-reduce alone from 1000 on.
    assert said["Step time"].figure == "1.000 ms"
    assert said["Step time"].text == "the only step, mean over 2 ranks; annotations on the host"
    assert said["Compute"].figure == "85.7 %"  # of 700: 300 before the first kernel are unknown
    assert said["Exposed communication"].figure == "7.1 %"
    assert "80.0 % of it overlaps computation" in said["Exposed communication"].text
    assert said["Idle"].figure == "7.1 %"
    # mm: 250 us less its launch call of 20, on 2 ranks
    assert said["Top operator"].figure == "aten::mm"
    assert (
        said["Top operator"].text.endswith("460 µs in 2 calls") or "in 2 calls" in said["Top operator"].text
    )
    assert said["Linked operators"].figure == "100 % linked"
    assert said["Data loss"].figure == "nothing lost"
    assert said["Read"].figure == "2 ranks"
    assert found.basis == "device"
    assert found.tables["overview"]["exposed_communication_pct"].to_list() == pytest.approx(
        [100 * 50 / 700] * 2
    )


@pytest.mark.slow
def test_the_summary_counts_data_loss(job: Job) -> None:
    bad = Job({0: job[0].with_stats([("read.broken", "data_loss", 2, "x"), ("read.wrong", "error", 1, "y")])})
    trouble = next(sentence for sentence in summarize_run(bad).lines if sentence.topic == "Data loss")
    assert (trouble.figure, trouble.tone) == ("1 error, 1 lost", "bad")


def test_a_rank_without_an_answer_is_named() -> None:
    found = summarize_run(Job({0: Trace({}, {"rank": 0, "linked": True})}))
    assert "(rank 0)" in found.unanswered["temporal-breakdown"]
    page = html_report.render_page(Job({0: Trace({}, {"rank": 0, "linked": True})}))
    assert "No profiler events were read for rank 0" in page
    assert "<canvas" not in page


def test_text_of_a_trace_is_escaped() -> None:
    page = html_report.render_page(hostile_job())
    elements = PageElements(page)
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert [set(attributes) for attributes in scripts] == [
        {"type", "id"},
        {"type", "id"},
        {"type", "data-rank"},
        {"type"},
    ]
    assert "\u2028" not in "".join(elements.content["script"])
    shown = "".join(elements.text)
    assert all(name in shown for name in HOSTILE)
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert not [attributes for _, attributes in elements.found if "style" in attributes]


def test_the_policy_allows_only_content_of_the_page(job: Job) -> None:
    page = html_report.render_page(job)
    elements = PageElements(page)
    (policy,) = [
        a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    for kind, content in (
        ("script", elements.content["script"][-1]),
        ("style", elements.content["style"][0]),
    ):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [a for _, a in elements.found if "src" in a or str(a.get("href", "#"))[:1] != "#"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert {a["href"][1:] for tag, a in elements.found if tag == "a"} <= {
        a.get("id") for _, a in elements.found
    }  # type: ignore[index]


def test_the_page_lists_omissions(job: Job) -> None:
    page = html_report.render_page(job, max_events=4, max_ranks=1)
    assert "The timelines of 1 rank (1) are omitted; the tables cover them." in page
    assert f"Rank 0: {job[0].events.height - 4} of {job[0].events.height} events are omitted" in page
    assert page.count("data-rank=") == 1
    whole = html_report.render_page(job)
    assert "are omitted" not in "".join(PageElements(whole).text)
    assert whole.count("data-rank=") == 2


def test_ranks_share_a_time_zero_only_if_they_share_a_clock() -> None:
    early, late = link_events([kernel_row("a", 100, 50)]), link_events([kernel_row("a", 120, 50)])
    apart = link_events([kernel_row("a", 10_000, 50)])
    assert find_origins({0: early, 1: late}) == {0: 100, 1: 120}  # one event each: they do not overlap
    longer = link_events([kernel_row("a", 100, 50), kernel_row("b", 500, 50)])
    assert find_origins({0: longer, 1: late}) == {0: 100, 1: 100}
    both = link_events([kernel_row("a", 120, 50), kernel_row("b", 480, 50)])
    assert find_origins({0: longer, 1: both}) == {0: 100, 1: 100}
    assert find_origins({0: longer, 1: apart}) == {0: 100, 1: 10_000}
    relative = both.replace(meta={"clock": "relative"})
    assert find_origins({0: longer, 1: relative}) == {0: 100, 1: 120}


def test_tables_carry_numbers_and_units() -> None:
    frame = pl.DataFrame(
        {"rank": [1000], "mean_ns": [1_500_000], "total_ns": [25_000_000], "note": ["<b>"], "n": [None]}
    )
    text = render_table(frame, "t", "T & t")
    assert "mean (ms)" in text
    assert "total (ms)" in text
    assert '<td class="number" data-value="1500000">1.500</td>' in text
    assert '<td class="number" data-value="1000">1000</td>' in text
    assert "&lt;b&gt;" in text
    assert "data-empty>none</td>" in text
    assert "T &amp; t" in text
    many = pl.DataFrame({"x": range(50)})
    assert "The first 10 of 50 rows." in render_table(many, "t", "t", limit=10)
    assert "rows." not in render_table(many, "t", "t")


def test_a_kernel_name_is_short_in_a_table_and_complete_in_its_title() -> None:
    add = "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
    name = f"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, {add}"
    short = "vectorized_elementwise_kernel&lt;4, CUDAFunctor_add&lt;float&gt;, array&lt;char*, 3ul&gt;&gt;"
    frame = pl.DataFrame({"name": [name, "gemm", None], "label": [name, "gemm", None]})
    row, plain, _ = re.findall("<tr><td.*?</tr>", render_table(frame, "t", "T"))
    assert f'title="{escape(name)}"><div>{short}</div></td>' in row
    assert f"<td>{escape(name)}</td>" in row  # of a column that is no name it stays
    assert "title=" not in plain


def test_bars_fill_their_row() -> None:
    text = render_bars(
        [("rank 0", {"a": 0.25, "b": 0.75})], {"a": "compute", "b": "idle"}, {"a": "A", "b": "B"}
    )
    assert [float(width) for width in re.findall(r'<rect .*?width="([\d.]+)%"', text)] == [25, 75]
    assert 'aria-label="rank 0: A 25.0 %, B 75.0 %"' in text


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (999, "999.0 ns"), (1500, "1.500 µs"), (123_456_789, "123.5 ms"), (2e12, "2,000 s")],
)
def test_durations(ns: float, text: str) -> None:
    assert format_duration(ns) == text


def test_numbers() -> None:
    assert [format_number(value) for value in (0.0, 0.012345, 12.345, 12345.6)] == [
        "0",
        "0.01235",
        "12.35",
        "12,346",
    ]
    assert format_number(10.4, 2) == "10"
    assert choose_column_format(pl.DataFrame({"idle_pct": [1.5]}), "idle_pct").header == "idle (%)"
    for name, header in (
        ("bus_p50_gb_per_s", "bus p50 (GB/s)"),
        ("bandwidth", "bandwidth (GB/s)"),
        ("mean_gb_per_s", "mean (GB/s)"),
        ("attainable_tflops_per_s", "attainable (TFLOP/s)"),
        ("tb_per_s", "TB/s"),
        ("drift_ppm", "drift (ppm)"),
        ("model_flops", "model flops (FLOP)"),
        ("pct", "%"),
        ("mean", "mean"),
    ):
        assert choose_column_format(pl.DataFrame({name: [1.5]}), name).header == header


@pytest.mark.slow
def test_write_is_repeatable(job: Job, tmp_path: Path) -> None:
    html_report.write_page(job, tmp_path / "a.html")
    html_report.write_page(job, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_times_of_the_epoch_count_from_the_first_of_the_table() -> None:
    from etloom.reports.formatting import choose_column_format

    frame = pl.DataFrame(
        {"start_ns": [EPOCH, EPOCH + 10**9], "end_ns": [EPOCH + 10**6, None], "dur_ns": [5, 6]}
    )
    ends = choose_column_format(frame, "end_ns")
    assert (ends.header, ends.text(EPOCH + 10**6)) == ("end since the first (ms)", "1.000")
    assert choose_column_format(frame, "start_ns").text(EPOCH) == "0"
    assert choose_column_format(frame, "dur_ns").header == "dur (ns)"


EPOCH = 1_700_000_000_000_000_000


@pytest.mark.slow
def test_step_time_is_of_steps_each_the_mean_over_its_ranks_as_diff_and_check_have_it(data: Path) -> None:
    job = etloom.open(data / "hta_multirank", use_cache=False)
    # By hand: 607.3 and 622.9 ms on rank 0, 607.9 and 630.6 ms on rank 1.
    steps = etloom.analyze(job, "steps")["dur_ns"].to_list()
    first, second = (steps[0] + steps[2]) / 2, (steps[1] + steps[3]) / 2
    mean, spread = (first + second) / 2, abs(second - first) / 2**0.5
    said = {sentence.topic: sentence for sentence in summarize_run(job).lines}["Step time"]
    assert said.figure == f"{mean / 1e6:.1f} ms ± {100 * spread / mean:.1f} %" == "617.2 ms ± 2.2 %"
    assert said.text == (
        "mean and standard deviation of 2 steps, each the mean over 2 ranks; "
        f"median {mean / 1e6:.1f} ms, shortest {first / 1e6:.1f} ms, longest {second / 1e6:.1f} ms; "
        "annotations on the host"
    )
    (row,) = etloom.diff(job, job).table("step").filter(measure="step time").iter_rows(named=True)
    assert (row["before"], row["values_before"]) == (pytest.approx(mean), 2)


@pytest.mark.slow
def test_time_zero_is_the_first_work_and_the_recorder_has_one_track(data: Path) -> None:
    job = etloom.open(data / "hta_multirank", use_cache=False)
    starts = find_origins(job)
    zeros = find_first_work(job, starts)
    assert [zeros[rank] - starts[rank] for rank in job] == [852_545_000] * 2
    found = unpack(pack_timeline(job[0], rank=0, origin=starts[0], zero=zeros[0], max_events=10_000).data)
    assert found["zero"] == 852_545_000
    track = found["tracks"][-1]
    names = [found["strings"][name - 1] for name in found["name"][track["rows"][0] : track["rows"][-1]]]
    assert (track["name"], track["work"]) == ("recorder", False)
    assert names == ["PyTorch Profiler (0)"]
    marks = unpack(pack_timeline(etloom.open(data / "dlrm")[0], rank=0, origin=0, max_events=9_000).data)[
        "tracks"
    ]
    assert [(one["name"], one["rows"][-1] - one["rows"][0]) for one in marks if not one["work"]] == [
        ("recorder", 3)
    ]


def test_a_rank_without_work_counts_from_its_first_event() -> None:
    only = link_events(
        [
            {
                "ph": "X",
                "cat": "Trace",
                "name": "PyTorch Profiler (0)",
                "ts": 5,
                "dur": 9,
                "pid": 1,
                "tid": 1,
            }
        ]
    )
    starts = find_origins({0: only})
    assert find_first_work({0: only}, starts) == starts


def test_no_line_breaks_between_a_number_and_its_unit_and_backticks_are_code() -> None:
    assert (
        html_report._escape_unbroken("takes 0.4 % of 12 ms; 5 steps <")
        == "takes 0.4\u00a0% of 12\u00a0ms; 5 steps &lt;"
    )
    row = dict.fromkeys(COLUMNS) | {"rank": 0, "ranks": 1}
    row |= {"cost_ns": 5, "title": "a<b", "advice": "ask `etloom x`", "confidence": "low", "pattern": "p"}
    told = html_sections.render_findings(pl.DataFrame([row], schema=COLUMNS), 1, 5)
    assert "a&lt;b" in told and "ask <code>etloom x</code>" in told


@pytest.mark.slow
def test_a_graph_that_is_too_large_leaves_a_command(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'id="what-if-data"' in html_report.render_page(job)
    for name in ("MAX_EVENTS", "MAX_CHAINS", "MAX_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(what_if, name, 1)
            page = html_report.render_page(job)
        assert 'id="what-if-data"' not in page
        assert "too large for a page; etloom simulate " in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "basis", "times"),
    [
        ("hta_misc/negative_queue_a100.json.gz", "from the end of the GPU activity of the step before", 1),
        ("hta_multirank", "from the start to the end of its annotation on the host", 0),
    ],
)
def test_a_step_time_of_the_page_is_that_of_the_summary_and_states_its_base(
    data: Path, run: str, basis: str, times: int
) -> None:
    job = etloom.open(data / run, use_cache=False)
    page = html_report.render_page(job)
    section = page[page.index('<section id="steps-section"') :].split("</section>")[0]
    table = section.split('<table id="steps"')[1]
    heads = re.findall(r'<button type="button">([^<]+)</button>', table)
    assert heads.count("step time (ms)") == times and heads.count("annotation (ms)") == 1
    assert f"Step time, as in the summary: {basis}" in section
    assert f"Step time, as in the summary: {basis}" in page.split('id="overview"')[0]
    column = heads.index("step time (ms)" if times else "annotation (ms)")
    rows = [re.findall(r"<td([^>]*)>", row) for row in table.split("<tbody>")[1].split("</tr>")[:-1]]
    values = [float(match[1]) for row in rows if (match := re.search(r'data-value="(\d+)"', row[column]))]
    mean = {line.topic: line.figure for line in summarize_run(job).lines}["Step time"].split(" ")[0]
    assert f"{sum(values) / len(values) / 1e6:.1f}" == mean
