"""Other numbers of ranks, compared with the same program run on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom import linker
from etloom.collectives.process_mesh import infer_mesh
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.graph import PointRole
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.resizing import parse_parallel, replication, resize, synthesize_job
from etloom.simulator.scenario import Scenario
from support import simulated_jobs
from support.simulated_jobs import FLOORS, World, event_times, job_of, programs


def ring_factor(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def whole_sizes(program: list[simulated_jobs.Do]) -> list[simulated_jobs.Do]:
    """The program with transfers whose times stay whole when they are multiplied by a ring factor."""
    return [replace(do, sizes=(do.sizes[0] // 8 * 8,)) if do.what == "collective" else do for do in program]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "recorded", "ranks"), [(0, 2, 4), (1, 4, 8), (2, 4, 2)])
def test_other_numbers_of_ranks_are_predicted_to_the_nanosecond(seed: int, recorded: int, ranks: int) -> None:
    program = whole_sizes(programs(seed, 30)[0])
    small = simulated_jobs.simulate([program] * recorded, World(transfer=ring_factor(recorded)))
    truth = simulated_jobs.simulate([program] * ranks, World(transfer=ring_factor(ranks)))
    job = job_of(small)
    grown = resize(describe_recording(job, build_graph(job, FLOORS)), ranks)
    predicted = event_times(grown.graph, grown.compute_times())
    for rank in range(ranks):
        for number, i in enumerate(small[rank % recorded].order()):
            event = truth[rank].events[i]
            if event["cat"] != "cuda_sync":
                times = (predicted[rank, number, int(role)] for role in (PointRole.START, PointRole.END))
                assert tuple(times) == (event["ts"], event["end"])
    assert dict(grown.template) == {rank: rank % recorded for rank in range(ranks)}
    sizes = grown.communications.instances["group_size"].unique().to_list()
    assert sizes == [ranks]


GROUPS = {"tp": ([0, 1], [2, 3]), "dp": ([0, 2], [1, 3])}


def make_rank(rank: int, arrivals: dict[int, int] | None = None, world: int = 4) -> Trace:
    """Kernels of two steps: compute, all-reduce among tp, compute, all-reduce among dp. arrivals: delays of ranks."""
    delay = (arrivals or {}).get(rank, 0)
    events: list[dict[str, Any]] = []
    comms = []
    for step in (0, 1):
        base = step * 100_000
        late = max((arrivals or {0: 0}).values())
        for name, start, end in (
            ("gemm", base, base + 10_000 + delay),
            ("tp", base + 10_000 + delay, base + 20_000 + late),
            ("gemm", base + 30_000 + late, base + 40_000 + late),
            ("dp", base + 40_000 + late, base + 60_000 + late),
        ):
            is_comm = name in GROUPS
            stream = 20 if is_comm else 10
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if is_comm else "gemm"
            events.append(
                {
                    "id": len(events),
                    "ph": "X",
                    "cat": "kernel",
                    "name": kernel,
                    "ts": start,
                    "dur": end - start,
                }
                | {"pid": 0, "tid": stream, "device": 0, "stream": stream, "step": step}
            )
            if is_comm:
                members = next(ranks for ranks in GROUPS[name] if rank in ranks)
                comms.append(
                    {"id": len(comms), "event": events[-1]["id"], "collective": "all_reduce", "pg_name": name}
                    | {"pg_desc": f"mesh_{name}", "ranks": str(members), "group_size": 2, "seq": step}
                )
    groups = [
        {"pg_name": name, "pg_desc": f"mesh_{name}", "ranks": str(ranks), "size": 2}
        for name, lists in GROUPS.items()
        for ranks in lists
        if rank in ranks
    ]
    tables = {"events": pl.DataFrame(events), "comms": pl.DataFrame(comms), "groups": pl.DataFrame(groups)}
    return linker.link(Trace(tables, {"rank": rank, "clock": "relative", "world_size": world}))


@pytest.fixture(scope="module")
def mesh_job() -> Job:
    return Job({rank: make_rank(rank) for rank in range(4)})


@pytest.fixture(scope="module")
def mesh_scenario(mesh_job: Job) -> Scenario:
    return describe_recording(mesh_job)


def test_groups_within_a_replica_are_copied_and_others_grow(mesh_scenario: Scenario) -> None:
    assert infer_mesh(mesh_scenario.recorded).sizes == {"tp": 2, "dp": 2}
    grown = resize(mesh_scenario, 8)
    members = {
        (group, tuple(ranks))
        for group, ranks in grown.communications.instances.select("group", "ranks").iter_rows()
    }
    pairs = {("tp", (2 * i, 2 * i + 1)) for i in range(4)}
    assert members == pairs | {("dp", (0, 2, 4, 6)), ("dp", (1, 3, 5, 7))}
    counts = grown.communications.participations.group_by("instance").len()["len"].unique().sort()
    assert counts.to_list() == [2, 4]
    # The copies keep every time; only the growing group takes longer: 2 * 3/4 instead of 2 * 1/2.
    ends = event_times(grown.graph, grown.compute_times())
    assert ends[5, 1, 1] == ends[1, 1, 1] == 20_000
    assert ends[5, 3, 1] == 40_000 + 30_000
    assert grown.graph.rank.max() == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::etloom.core.errors.EtloomWarning")
def test_the_traces_of_new_ranks_name_their_groups(mesh_scenario: Scenario, tmp_path: Path) -> None:
    job = synthesize_job(resize(mesh_scenario, 8))
    assert list(job) == list(range(8))
    ranks = job[5].groups.sort("pg_name")["ranks"].cast(pl.String).to_list()
    assert ranks == ["[1, 3, 5, 7]", "[4, 5]"]
    assert job[5].meta["world_size"] == 8
    etloom.export(job, tmp_path / "run.et")
    assert sorted(file.name for file in tmp_path.glob("run.*.et")) == [f"run.{rank}.et" for rank in range(8)]
    matched = etloom.analyze(job, "collectives")
    assert matched["recorded"].unique().sort().to_list() == [2, 4]


@pytest.mark.slow
def test_arrivals_of_more_ranks_are_later_as_their_maximum_is() -> None:
    delays = {0: 0, 1: 0, 2: 3_000, 3: 3_000}
    scenario = describe_recording(Job({rank: make_rank(rank, delays) for rank in range(4)}))
    spread = []
    for ranks in (4, 8, 64):
        grown = resize(scenario, ranks, seed=1)
        times = grown.compute_times()
        spread.append(int(times.max() - times.min()))
        again = resize(scenario, ranks, seed=1).compute_times()
        assert np.array_equal(times, again)
    assert spread[0] < spread[1] <= spread[2]


def test_missing_data_of_the_recording_is_one_line(mesh_scenario: Scenario) -> None:
    for arguments, message in (
        ({"ranks": 7}, "expected a multiple of 2"),
        ({"parallel": {"tp": 4}}, "from a run with tp=2: the sizes of its messages are not recorded"),
        ({"parallel": {"pp": 2}}, "its stages then contain different layers"),
        (
            {"ranks": 8, "parallel": {"dp": 2}},
            "--ranks 8 does not match the sizes tp=2, dp=2, which multiply to 4",
        ),
    ):
        with pytest.raises(EtloomError, match=message):
            resize(mesh_scenario, **arguments)
    with pytest.raises(EtloomError, match="1 of 4 were not recorded, such as rank 3"):
        resize(describe_recording(Job({rank: make_rank(rank) for rank in range(3)})), 8)


def test_too_large_graphs_are_refused(mesh_scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "MAX_POINTS", 100)
    with pytest.raises(EtloomError, match="cannot predict 512 ranks: their graph would have"):
        resize(mesh_scenario, 512)


def test_sizes_are_parsed() -> None:
    assert parse_parallel("tp=4, pp=8,dp=16") == {"tp": 4, "pp": 8, "dp": 16}
    for text in ("tp", "tp=0", "xp=2", "tp=2,tp=4", ""):
        with pytest.raises(EtloomError, match="expected sizes of"):
            parse_parallel(text)
