"""What was lost is said by every verb that opens a run; a cut GPU trace is no CPU trace; two ranks are no pair."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.linker import merging
from etloom.loading import consistency
from etloom.loading.file_names import find_rank_in_name
from support import small_traces

Outcome = tuple[int, str, str]


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A run of which rank 0 ends before its kernels, rank 1 is whole and rank 2 no trace."""
    run = small_traces.write_run(tmp_path / "run")
    whole = json.dumps(small_traces.kineto(0))
    at = whole.index('{"ph": "X", "cat": "kernel"')
    (run / "kineto_trace_0.json").write_text(whole[: at + 30])
    (run / "kineto_trace_2.json").write_text("hello")
    return run


LINE = (
    "etloom: {run}: data lost or doubtful: job.unreadable_file 1; "
    "read.truncated 1, read.invalid_event 1, read.missing_gpu_events 1 (rank 0); etloom info {run} shows details\n"
)


@pytest.mark.parametrize(
    "verb",
    [
        ["analyze", "steps", "RUN"],
        ["query", "RUN", "select name from events"],
        ["simulate", "RUN", "--set", "op x0.5"],
        ["export", "RUN", "--out", "OUT.json"],
        ["diff", "RUN", "WHOLE"],
        ["check", "RUN", "--baseline", "WHOLE"],
        ["replay", "comms", "RUN", "--dry-run"],
    ],
    ids=lambda verb: verb[0],
)
@pytest.mark.slow
def test_every_verb_reports_data_loss_once(
    verb: list[str], cut: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    whole = small_traces.write_run(tmp_path / "whole")
    paths = {"RUN": cut, "WHOLE": whole, "OUT.json": tmp_path / "out.json"}
    _, _, err = call(*(paths.get(word, word) for word in verb))
    assert err.count(LINE.format(run=cut)) == 1, err
    assert err.count("data lost or doubtful") == 1
    assert "in doubt" not in call(*(whole if word == "RUN" else paths.get(word, word) for word in verb))[2]


@pytest.mark.slow
def test_verbs_that_list_data_loss_do_not_repeat_it(
    cut: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    _, out, err = call("info", cut)
    assert "in doubt" not in err and "read.truncated" in out and "job.unreadable_file" in out
    _, out, err = call("report", cut, "--out", tmp_path / "r.html")
    assert "in doubt" not in err and "read.truncated" in out
    _, _, err = call("link", cut, "--out", tmp_path / "linked.parquet")
    assert "in doubt" not in err and err.count("read.truncated: 1 ") == 1


@pytest.mark.slow
def test_a_cut_trace_of_a_gpu_is_not_one_of_a_cpu(cut: Path, call: Callable[..., Outcome]) -> None:
    told = json.loads(call("info", cut, "--format", "json")[1])
    assert told["devices"] == {"GPU of the test (the file ends before its work)": 1, "GPU of the test": 1}
    rows = (
        etloom.open(cut)[0]
        .stats.filter(name=merging.GPU_CUT_OFF)
        .select("severity", "count", "example")
        .rows()
    )
    assert rows == [
        ("error", 1, "the file ends before the GPU events of GPU of the test: times cover the host only")
    ]


def test_a_complete_cpu_trace_and_a_truncated_gpu_trace_are_distinguished(tmp_path: Path) -> None:
    document = small_traces.kineto(0, world=1)
    document["traceEvents"] = [one for one in document["traceEvents"] if one.get("cat") != "kernel"]
    (tmp_path / "host.json").write_text(json.dumps(document))
    whole = json.dumps(small_traces.kineto(0, world=1))
    (tmp_path / "late.json").write_text(whole[: whole.index("ncclDevKernel")])
    for name in ("host.json", "late.json"):
        stats = etloom.open(tmp_path / name)[0].stats["name"].to_list()
        assert merging.GPU_CUT_OFF not in stats
    assert "read.truncated" in stats


def test_host_times_are_not_compared_with_device_times(cut: Path) -> None:
    job = etloom.open(cut)
    with pytest.raises(AnalysisError) as raised:
        etloom.analyze(job, "imbalance")
    assert str(raised.value) == (
        "host times of rank 0 cannot be compared with device times of rank 1; exclude rank 0 with --rank"
    )


@pytest.mark.parametrize("folder", ["dlrm", "cpu/ddp_2"])
@pytest.mark.slow
def test_files_of_two_ranks_are_linked_with_a_row_in_stats(
    folder: str, data: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    host, device = data / folder / "torch_et_0.json.gz", data / folder / "kineto_trace_1.json.gz"
    trace = etloom.link(etloom.read(host), etloom.read(device))  # type: ignore[arg-type]
    assert trace.stats.filter(name="link.ranks_differ").select("severity", "count", "example").rows() == [
        (
            "error",
            1,
            "torch_et_0.json.gz is of rank 0 by its name; kineto_trace_1.json.gz is of rank 1 by its contents: "
            "their ids may match, but their times are unrelated",
        )
    ]
    out = tmp_path / "x.parquet"
    status, _, err = call("link", "--host", host, "--device", device, "--out", out)
    assert status == 0 and err.count("link.ranks_differ: 1 (torch_et_0.json.gz is of rank 0") == 1
    status, _, err = call("link", "--host", host, "--device", device, "--out", out, "--strict")
    assert status == 1 and "link.ranks_differ" in err
    same = data / folder / "kineto_trace_0.json.gz"
    assert "ranks_differ" not in call("link", "--host", host, "--device", same, "--out", out)[2]
    # Who says of which rank both are has been asked.
    err = call("link", "--host", host, "--device", device, "--rank", 0, "--out", out)[2]
    assert "link.ranks_differ" not in err and "job.rank_mismatch: 1 " in err


def test_names_without_a_rank_give_no_warning(tmp_path: Path) -> None:
    def of(name: str, rank: int | None) -> Trace:
        return Trace({}, {"files": [str(tmp_path / name)], **({} if rank is None else {"rank": rank})})

    assert consistency.check_file_ranks([of("host.json", None), of("step_7.json", 1)]) == []
    assert consistency.check_file_ranks([of("torch_et_3.json", None), of("x.json", 3)]) == []
    assert consistency.check_file_ranks([of("torch_et_3.json", 1), of("kineto_trace_2.json", 1)]) == []
    (row,) = consistency.check_file_ranks([of("et_3.json", None), of("rank2.pt.trace.json", None)])
    assert row[:3] == ("link.ranks_differ", "error", 1)
    beyond = of("kineto_trace_0.json", 0).replace(meta={"world_size": 8})
    assert consistency.check_file_ranks([of("et_40.json", None), beyond]) == [], "40 is no rank of 8"
    assert consistency.check_file_ranks([of("et_4.json", None), beyond])[0][1] == "error"
    # The linker itself tells where both say it.
    assert consistency.check_file_ranks([of("a.json", 1), of("b.json", 2)]) == []


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("kineto_trace_3.json.gz", 3), ("torch_et_0.json", 0), ("rank-12.x.pt.trace.json", 12), ("worker7.json", 7),
        ("job.5.et", 5), ("trace.json", None), ("step_4.json", None),
    ],
)  # fmt: skip
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert find_rank_in_name(Path(name)) == rank


def test_a_truncated_compressed_file(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "kineto_trace_0.json.gz"
    file.write_bytes((data / "dlrm" / file.name).read_bytes()[:20_000])
    with pytest.raises(EOFError):
        gzip.decompress(file.read_bytes())
    (trace,) = etloom.open(file).values()
    assert "Tesla V100-SXM2-32GB" in trace.stats.filter(name=merging.GPU_CUT_OFF)["example"].item()


DIFFER = (
    "the execution trace is of process 3233936, recorded 2024-04-17 16:29:57, the Kineto trace of process 2910249, "
    "recorded 2024-05-23 00:15:22 UTC: operators, shapes and sizes belong to one run and times to another"
)


@pytest.mark.slow
def test_an_execution_trace_of_another_process_is_reported(data: Path, call: Callable[..., Outcome]) -> None:
    job = etloom.open(data / "nccl_ddp", use_cache=False)
    rows = (
        job.stats.filter(name="link.processes_differ").select("rank", "severity", "count", "example").rows()
    )
    assert rows == [(0, "error", 1, DIFFER)]
    status, _, err = call("analyze", "steps", data / "nccl_ddp", "--no-cache")
    assert status == 0 and "data lost or doubtful: link.processes_differ 1 (rank 0)" in err


@pytest.mark.parametrize(
    "folder",
    [
        "simple_add",
        "dlrm",
        "linear",
        *(f"cpu/{name}" for name in ("coll_4", "compile", "ddp_2", "mt_bwd", "pp_4")),
    ],
)
@pytest.mark.slow
def test_pairs_of_one_process_raise_no_doubt(folder: str, data: Path) -> None:
    assert etloom.open(data / folder, use_cache=False).stats.filter(name="link.processes_differ").is_empty()


@pytest.mark.slow
def test_a_process_is_compared_only_if_both_files_name_it(tmp_path: Path) -> None:
    def doubted(pid: object) -> list[str]:
        run = small_traces.write_run(tmp_path / "run", (0,))
        whole = small_traces.execution_trace() | {"pid": pid, "time": "then"}
        (run / "torch_et_0.json").write_text(json.dumps(whole))
        stats = etloom.open(run, use_cache=False).stats.filter(name="link.processes_differ")
        return stats["example"].to_list()

    assert doubted(10) == doubted(None) == doubted("11") == doubted(True) == []
    (told,) = doubted(11)
    assert told.startswith(
        "the execution trace is of process 11, recorded then, the Kineto trace of process 10,"
    )
