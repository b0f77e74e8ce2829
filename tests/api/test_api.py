"""The verbs, on a run small enough to know every answer by heart and on real ones."""

from __future__ import annotations

import gzip
import inspect
import json
import os
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import api
from etloom.core.errors import AnalysisError, EtloomError, LinkError, ReadError, UnknownName
from etloom.core.trace import Job, Trace
from support import small_traces


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traces.write_run(tmp_path_factory.mktemp("api") / "run")


@pytest.fixture(scope="module")
def job(run: Path) -> Job:
    return etloom.open(run, use_cache=False)


def test_all_is_exact() -> None:
    assert sorted(etloom.__all__) == etloom.__all__
    verbs = {name for name, value in vars(api).items() if inspect.isfunction(value)}
    assert verbs == set(api.__all__)
    assert verbs | {"EtloomError", "EtloomWarning", "Job", "Trace", "record"} == set(etloom.__all__)
    for name in etloom.__all__:
        assert getattr(etloom, name) is not None
        assert name in dir(etloom)
        assert (getattr(etloom, name).__doc__ or "").strip(), f"{name} has no docstring"
    assert etloom.analyze is api.analyze
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        _ = etloom.analyse  # type: ignore[attr-defined]


def test_read_returns_the_content_of_one_file(run: Path) -> None:
    trace = etloom.read(run / "kineto_trace_0.json")
    assert isinstance(trace, Trace)
    assert trace.events["name"].cast(pl.String).to_list()[:2] == ["ProfilerStep#3", "aten::linear"]
    assert trace.events["ts"][0] == small_traces.BASE_NS + 100 * small_traces.US
    assert "linked" not in trace.meta
    assert etloom.read(run / "torch_et_0.json", "execution-trace").nodes["name"].len() == 4
    with pytest.raises(UnknownName, match="unknown reader 'kinet'; did you mean 'kineto'"):
        etloom.read(run / "kineto_trace_0.json", "kinet")


def test_open_reads_and_links_every_rank(job: Job, run: Path) -> None:
    assert job.ranks == [0, 1]
    assert job.meta["path"] == str(run)
    for rank, trace in job.items():
        assert trace.rank == rank
        assert trace.meta["linked"] is True
        assert trace.meta["world_size"] == 2
        names = trace.query(
            "select n.name a, e.name b from links l join nodes n on l.node = n.id "
            "join events e on l.event = e.id order by n.id"
        )
        assert names.rows() == [(name, name) for name in ("ProfilerStep#3", "aten::linear", "aten::mm")]
        launched = trace.query(
            "select d.name work, o.name op from launches l join events d on l.device_event = d.id "
            "left join events o on l.operator = o.id order by d.ts"
        )
        assert launched.rows() == [("gemm", "aten::mm"), ("ncclDevKernel_AllReduce_Sum", None)]


def test_open_takes_a_folder_a_file_or_a_mapping(run: Path, tmp_path: Path) -> None:
    alone = etloom.open(run / "kineto_trace_1.json", use_cache=False)
    assert alone.ranks == [1]
    assert alone[1].events.height == 7
    assert alone[1].nodes.height == 0
    files = {5: [run / "kineto_trace_1.json", run / "torch_et_1.json"], 3: str(run / "kineto_trace_0.json")}
    mapped = etloom.open(files, use_cache=False)
    assert mapped.ranks == [3, 5]
    assert mapped[5].rank == 5
    assert mapped[5].links.height == 3
    assert mapped.stats.filter(pl.col("name") == "job.rank_mismatch")["count"].to_list() == [2]
    for rank in (4, 6):
        (tmp_path / f"of-host-{rank}-today.json").write_text((run / "kineto_trace_0.json").read_text())
    by_pattern = etloom.open(tmp_path, rank_pattern=r"host-(\d+)", use_cache=False)
    assert by_pattern.ranks == [4, 6]


def test_the_rank_of_a_single_file_is_that_of_its_name(tmp_path: Path) -> None:
    document = small_traces.kineto()
    del document["distributedInfo"]
    (tmp_path / "kineto_trace_6.json").write_text(json.dumps(document))
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [6]
    assert job[6].rank == 6


def test_open_reports_its_progress_in_bytes(run: Path) -> None:
    seen: dict[str, int] = {}

    def progress(file: Path, count: int) -> None:
        seen[file.name] = seen.get(file.name, 0) + count

    etloom.open(run, progress=progress, use_cache=False, jobs=1)
    assert seen == {file.name: file.stat().st_size for file in run.iterdir() if file.suffix == ".json"}


def test_link_joins_two_traces_in_either_order(run: Path) -> None:
    host, device = etloom.read(run / "torch_et_0.json"), etloom.read(run / "kineto_trace_0.json")
    assert isinstance(host, Trace)
    assert isinstance(device, Trace)
    one, other = etloom.link(host, device), etloom.link(device, host)
    assert one.links.sort("node").equals(other.links.sort("node"))
    assert one.links.height == 3
    assert etloom.link(device).launches.height == 2
    assert "linked" not in device.meta
    with pytest.raises(LinkError):
        etloom.link(device, device)
    with pytest.raises(EtloomError, match="cannot link a Job"):
        etloom.link(etloom.Job({0: one}))


def test_analyze_answers_for_a_trace_and_for_every_rank_of_a_job(job: Job) -> None:
    alone = etloom.analyze(job[0], "temporal-breakdown", step=3)
    assert alone.select("compute_ns", "exposed_communication_ns", "idle_ns").rows() == [
        (600_000, 50_000, 350_000)
    ]
    both = etloom.analyze(job, "temporal_breakdown", step=3)
    assert both.columns == ["rank", *alone.columns]
    assert both["rank"].to_list() == [0, 1]
    assert both.drop("rank")[0].equals(alone)


def test_analyze_links_unlinked_traces(run: Path) -> None:
    trace = etloom.read(run / "kineto_trace_0.json")
    assert etloom.analyze(trace, "comm-overlap", step=3)["overlap_pct"].to_list() == [80.0]
    assert etloom.analyze(trace, "top-ops", by="total")["name"][0] in ("ProfilerStep#3", "aten::linear")


def test_analyze_names_the_options_it_has(job: Job) -> None:
    with pytest.raises(EtloomError, match="the analysis 'top-ops' has no option 'topp'; did you mean 'top'"):
        etloom.analyze(job, "top-ops", topp=3)
    with pytest.raises(
        EtloomError, match="the analysis 'top-ops' has no option 'x'; its options: top, by, step"
    ):
        etloom.analyze(job, "top-ops", x=3)
    with pytest.raises(EtloomError, match="has no options 'a', 'b'; it has no options"):
        etloom.analyze(job, "link-quality", b=1, a=2)
    with pytest.raises(UnknownName, match="did you mean 'top-ops'"):
        etloom.analyze(job, "topops")


def test_query_is_that_of_the_trace_or_job(job: Job) -> None:
    sql = "select count(*) n from events where cat = 'kernel'"
    assert etloom.query(job[0], sql).item() == 2
    assert etloom.query(job, sql).item() == 4


def test_export_goes_by_the_suffix_or_the_name(job: Job, tmp_path: Path) -> None:
    packed = etloom.export(job, tmp_path / "run.json.gz")
    assert (
        json.loads(gzip.decompress(packed.read_bytes()))["baseTimeNanoseconds"]
        == small_traces.BASE_NS + 100 * small_traces.US
    )
    assert (etloom.export(job, tmp_path / "saved", "parquet") / "rank=1" / "events.parquet").is_file()
    assert etloom.open(tmp_path / "saved").ranks == [0, 1]
    with pytest.raises(EtloomError, match=r"run\.xyz: no export writes files with this suffix"):
        etloom.export(job, tmp_path / "run.xyz")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_output_is_one_line(job: Job, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for name in ("a.json", "a.parquet"):
        with pytest.raises(
            EtloomError, match=f"{name}: cannot be written: Permission denied; choose another path"
        ):
            etloom.export(job, tmp_path / name)


def test_export_into_a_folder_that_is_a_file_is_one_line(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("a.json", "a.parquet"):
        with pytest.raises(
            EtloomError, match=r"cannot be written: (Not a directory|File exists); choose another path"
        ):
            etloom.export(job, tmp_path / "file" / name)


def test_convert_writes_a_file_as_it_is(run: Path, tmp_path: Path) -> None:
    out = etloom.convert(run / "torch_et_0.json", tmp_path / "et.parquet")
    back = etloom.read(out)
    assert isinstance(back, Trace)
    assert back.nodes.equals(etloom.read(run / "torch_et_0.json").nodes)
    assert "linked" not in back.meta


@pytest.mark.slow
def test_report_writes_one_page(job: Job, tmp_path: Path) -> None:
    page = etloom.report(job, tmp_path / "report.html")
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert "aten::linear" in page.read_text()
    assert etloom.report(job[0], tmp_path / "one.html").stat().st_size > 1000


@pytest.mark.parametrize("verb", [etloom.read, etloom.open])
def test_bad_input_is_one_line(verb: object, tmp_path: Path) -> None:
    for name, content in {"a.png": b"\x89PNG\r\n\x1a\n", "empty": b"", "no.json": b'{"a": 1}'}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ReadError) as raised:
            verb(tmp_path / name)  # type: ignore[operator]
        assert str(tmp_path / name) in str(raised.value)
    with pytest.raises(ReadError, match="no such file"):
        verb(tmp_path / "absent")  # type: ignore[operator]
    with pytest.raises(ReadError):
        verb(tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("folder", "ranks", "steps"),
    [("cpu/coll_4", [0, 1, 2, 3], 0), ("nccl_ddp", [0], 3), ("simple_add", [0], 0)],
)
def test_real_runs(data: Path, folder: str, ranks: list[int], steps: int) -> None:
    job = etloom.open(data / folder)
    assert job.ranks == ranks
    if steps:
        assert etloom.analyze(job, "steps").height == steps * len(ranks)
    else:
        with pytest.raises(AnalysisError, match="no step is annotated with ProfilerStep"):
            etloom.analyze(job, "steps")
    quality = etloom.analyze(job, "link-quality").filter(pl.col("subject") == "host operators")
    assert quality["share_pct"].to_list() == [100.0] * len(ranks)
