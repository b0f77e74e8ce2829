"""Folders as the field's launchers and engines write them: each opens as one run, or the error names the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom import cli
from etloom.core.errors import ReadError
from etloom.loading.file_names import find_rank_in_name
from support import small_traces


def write_trace(path: Path, rank: int | None = None, device: int = 0) -> None:
    """Write a Kineto trace with one launch and its kernel, to any folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    call = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": 1,
        "dur": 2,
        "pid": 9,
        "tid": 9,
    }
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": f"k{path.parent.name}",
        "ts": 4,
        "dur": 5,
        "pid": device,
        "tid": 7,
    }
    arguments: dict[str, Any] = {"correlation": 1}
    document: dict[str, Any] = {
        "traceEvents": [
            call | {"args": arguments},
            kernel | {"args": {"device": device, "context": 1, "stream": 7, **arguments}},
        ]
    }
    if rank is not None:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
    path.write_text(json.dumps(document))


TIME = 1716200000000000000
ONE_RUN = {
    "verl": [f"actor_rank{rank}_step_1.json" for rank in range(2)],
    "vllm": [f"dp0_pp0_tp{rank}_dcp0_ep{rank}_rank{rank}.{TIME + rank}.pt.trace.json" for rank in range(2)],
    "sglang tp": [f"1716200000.{rank}-TP-{rank}.trace.json" for rank in range(2)],
    "sglang all groups": [f"1716200000.1-TP-{rank}-DP-0-PP-0-EP-{rank}.trace.json" for rank in range(2)],
    "sglang pipeline": [
        f"1716200000-TP-{tp}-DP-{tp}-PP-{pp}-EP-{tp}.trace.json" for pp in range(2) for tp in range(2)
    ],
    "trt-llm": [f"trace-rank-{rank}.json" for rank in range(2)],
    "composer": [f"rank{rank}.{TIME}.pt.trace.json" for rank in range(2)],
    "slime": [f"train_overall_rank{rank}.{TIME + rank}.pt.trace.json" for rank in range(2)],
    "torchtitan, one iteration": [f"iteration_10/rank{rank}_trace.json" for rank in range(2)],
    "torch_npu": [
        f"worker_{4111 + 7 * rank}_20240105102233{rank}_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"
        for rank in range(2)
    ],
    "ray": [f"worker-{rank}/trace.json" for rank in range(2)],
    "kubernetes": [f"train-pod-{rank}/profile/trace.json" for rank in range(2)],
    "node and local rank": [f"node{node}/local_rank_{rank}/trace.json" for node in range(2) for rank in range(2)],
    "named node and local rank": [f"{node}/local_rank_{rank}/t.json" for node in ("anna", "bert") for rank in range(2)],
    "rank of a node": [f"node{node}/rank{rank}.json" for node in range(2) for rank in range(2)],
    "lightning": [f"fit-host_{4111 + rank}.{TIME + rank}[rank{rank}].pt.trace.json" for rank in range(2)],
    "accelerate": [f"profile_{rank}.json" for rank in range(2)],
    "node and gpu": [f"node{node}_gpu{gpu}_trace.json" for node in range(2) for gpu in range(2)],
    "proc": [f"trace.proc{rank}.json" for rank in range(12)],
    "dynolog": [f"libkineto_activities_{pid}.json" for pid in (5222, 4111)],
    "dynolog of hosts": [f"{host}/libkineto_activities_{pid}.json" for host, pid in (("anna", 5222), ("bert", 4111))],
    "rank folders": [f"rank_{rank}/kineto.json" for rank in range(2, 4)],
}  # fmt: skip


@pytest.mark.parametrize("files", ONE_RUN.values(), ids=ONE_RUN)
def test_a_layout_opens_with_its_ranks_in_order(tmp_path: Path, files: list[str]) -> None:
    first = 2 if "rank_2" in files[0] else 0
    for rank, name in enumerate(files, first):
        write_trace(tmp_path / name, device=0 if "/lib" in name else rank)
        if "ascend_pt" in name:
            small = tmp_path / name.partition("/")[0]
            (small / f"profiler_info_{rank}.json").write_text("{}")
            write_trace(small / "PROF_1" / "mindstudio_profiler_output" / "msprof_1.json")
    job = etloom.open(tmp_path, use_cache=False)
    read = {rank: [Path(file) for file in trace.meta["files"]] for rank, trace in job.items()}
    assert read == {rank: [tmp_path / name] for rank, name in enumerate(files, first)}
    losses = job.stats.filter(job.stats["severity"] != "info")
    assert losses.is_empty(), losses.rows()


def test_what_was_inferred_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write_trace(tmp_path / f"trace.proc{rank}.json")
    assert cli.main(["info", str(tmp_path), "--no-cache"]) == 0
    line = "the ranks of 2 traces are inferred from the number after 'proc': trace.proc0.json is rank 0"
    assert capsys.readouterr().err.count(line) == 1
    assert etloom.open(tmp_path, use_cache=False).run_stats["name"].to_list() == ["job.ranks_inferred"]


def test_the_rank_in_the_content_comes_before_folders_and_numbers(tmp_path: Path) -> None:
    for rank, name in enumerate(["rank5/trace.json", "rank4/trace.json"]):
        write_trace(tmp_path / "tree" / name, rank)
        write_trace(tmp_path / "flat" / f"profile_{1 - rank}.json", rank)
    for folder, name in (("tree", "rank5/trace.json"), ("flat", "profile_1.json")):
        job = etloom.open(tmp_path / folder, use_cache=False)
        assert job.ranks == [0, 1]
        assert job[0].meta["files"] == [str(tmp_path / folder / name)]


def test_host_and_device_traces_of_a_tree_go_together(tmp_path: Path) -> None:
    run = small_traces.write_run(tmp_path / "run")
    for rank in range(2):
        folder = tmp_path / "tree" / f"pod-{rank}"
        folder.mkdir(parents=True)
        (run / f"torch_et_{rank}.json").rename(folder / "et.json")
        (run / f"kineto_trace_{rank}.json").rename(folder / "kineto.json")
        (folder / "gpu.csv").write_text(
            "timestamp, index, power.draw [W]\n2026/11/21 02:25:35.100, 0, 50.5 W\n"
        )
    job = etloom.open(tmp_path / "tree", use_cache=False)
    assert {
        rank: (trace.links.height > 0, trace.counters.height) for rank, trace in job.items()
    } == dict.fromkeys(range(2), (True, 1))


@pytest.mark.parametrize(
    ("files", "runs"),
    [
        ([f"iteration_{step}/rank{rank}.json" for step in (10, 20) for rank in range(2)],
         ["iteration_10", "iteration_20"]),
        ([f"iteration_{step}/trace.json" for step in (9, 10)], ["iteration_9", "iteration_10"]),
        ([f"{name}/rank{rank}.json" for name in ("before", "after") for rank in range(2)], ["after", "before"]),
        ([f"trace_step{step}.json" for step in (1, 2)], ["trace_step1.json", "trace_step2.json"]),
        ([f"host_77.{TIME + number}.pt.trace.json" for number in (1, 2)],
         [f"host_77.{TIME + number}.pt.trace.json" for number in (1, 2)]),
    ],
)  # fmt: skip
def test_recordings_of_the_same_processes_are_runs_of_their_own(
    tmp_path: Path, files: list[str], runs: list[str]
) -> None:
    for name in files:
        write_trace(tmp_path / name)
    with pytest.raises(ReadError, match="several runs; open one: etloom info") as raised:
        etloom.open(tmp_path, use_cache=False)
    commands = str(raised.value).partition("open one: ")[2].split("; ")
    assert commands == [f"etloom info {tmp_path / run}" for run in runs]
    for run in runs:
        etloom.open(tmp_path / run, use_cache=False)


@pytest.mark.parametrize(
    "files",
    [
        ["before/trace.json", "after/trace.json"],
        ["libkineto_activities_5222.json", "libkineto_activities_4111.json"],
        ["100/trace.json", "300/trace.json"],
    ],
)
def test_traces_that_nothing_orders_are_ambiguous(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        write_trace(tmp_path / name)
    with pytest.raises(ReadError, match=f"the rank of 2 traces is unknown: .*{files[0]}"):
        etloom.open(tmp_path, use_cache=False)
    pattern = "(0|1|2)/?" if "/" in files[0] else r"_\d(\d)"
    if "before" not in files[0]:
        assert len(etloom.open(tmp_path, rank_pattern=pattern, use_cache=False)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("2024_01_05_10_22_33/h{}", "2024_01_05_10_22_3{}/h{}"), ("same/h{}",) * 2]
)
def test_profiles_of_jax_hosts_are_one_run(tmp_path: Path, data: Path, names: tuple[str, str]) -> None:
    profile = next((data / "xplane").rglob("*.xplane.pb"), None)
    if profile is None:
        pytest.skip("no profile")
    for host, name in enumerate(names):
        path = tmp_path / "plugins" / "profile" / f"{name.format(host, host)}.xplane.pb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(profile.read_bytes())
    job = etloom.open(tmp_path, use_cache=False)
    alone = etloom.open(path, use_cache=False)
    assert len(job) == 2 * len(alone)


def test_a_companion_states_the_rank_of_a_single_folder(tmp_path: Path) -> None:
    folder = tmp_path / "worker_4111_20240105102233_ascend_pt"
    write_trace(folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json")
    (folder / "profiler_info_3.json").write_text("{}")
    for path in (
        tmp_path,
        folder,
        folder / "ASCEND_PROFILER_OUTPUT",
        folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json",
    ):
        assert etloom.open(path, use_cache=False).ranks == [3]


@pytest.mark.slow
def test_dumps_whose_names_hold_the_host_and_the_rank(data: Path, tmp_path: Path) -> None:
    source = next(
        path for path in (data / "flight_recorder").rglob("*") if path.is_dir() and list(path.glob("*0*"))
    )
    expected = etloom.hangs(source)
    for name, pattern in (("nccl_trace_rank_node-7_{}", None), ("r{}of", r"r(\d+)of")):
        folder = tmp_path / name[:2]
        folder.mkdir()
        for rank in expected.ranks:
            (dump,) = [path for path in source.iterdir() if find_rank_in_name(path) == rank]
            (folder / name.format(rank)).write_bytes(dump.read_bytes())
        assert etloom.hangs(folder, rank_pattern=pattern).sentence == expected.sentence
    with pytest.raises(ReadError, match="the rank of the dump is unknown; specify it with --rank-pattern"):
        etloom.hangs(folder)
