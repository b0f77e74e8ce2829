"""The joint run of all ranks, compared with a slow reference of ASTRA-sim's rules, and with `simulate`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.exports.chakra_lint import LintResult, lint
from etloom.exports.chakra_lint.joint_run import run_together
from etloom.exports.chakra_lint.list_schedule import RankGraph
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import ChakraNode, load_file, write_messages
from etloom.simulator.pipelines import relay
from support.mesh_jobs import context_calls, context_groups, open_job
from support.pipelines import one_f_one_b
from support.real_runs import open_run

COMP, SEND, RECV, COLL = 4, 5, 6, 7
ALL_REDUCE, BROADCAST = 0, 5


class ReferenceRun:
    """Every rank looks at all its nodes again and again: what may start, starts; what has ended, is removed."""

    def __init__(self, jobs: dict[int, list[ChakraNode]], groups: dict[str, list[int]]) -> None:
        self.jobs, self.groups = jobs, groups
        self.ends: dict[tuple[int, int], float] = {}
        self.started: dict[tuple[int, int], float] = {}
        self.tags: dict[tuple[int, int], Any] = {}
        self.arrivals: dict[int, int] = dict.fromkeys(jobs, 0)

    def resource(self, node: ChakraNode) -> str | None:
        if node.type == RECV:
            return None
        return "cpu" if node.runs_on_host else "comm" if node.type in (SEND, COLL) else "gpu"

    def is_timed(self, node: ChakraNode) -> bool:
        return node.type == COMP or node.attributes.get("comm_type") == BROADCAST

    def start(self, rank: int, node: ChakraNode, now: int) -> None:
        self.started[rank, node.id] = now
        if self.is_timed(node):
            self.ends[rank, node.id] = now + max(1, 1000 * node.message.duration_micros)
        elif node.type == SEND:
            self.ends[rank, node.id] = now + 1
        elif node.type == COLL:
            group = node.attributes["pg_name"]
            earlier = [key for key, tag in self.tags.items() if key[0] == rank and tag[0] == group]
            self.tags[rank, node.id] = (group, len(earlier))

    def end_communications(self, now: int) -> None:
        """Let collectives end that all ranks of the group run, and receives whose message was sent."""
        waiting = {key for key in self.started if key not in self.ends}
        for rank, node_id in waiting:
            node = next(node for node in self.jobs[rank] if node.id == node_id)
            if node.type == RECV:
                sent = [
                    other
                    for other in self.jobs[node.attributes["comm_src"]]
                    if other.type == SEND and other.attributes["comm_tag"] == node.attributes["comm_tag"]
                ]
                if sent and (node.attributes["comm_src"], sent[0].id) in self.started:
                    self.ends[rank, node_id] = now + 1
            else:
                tag = self.tags[rank, node_id]
                same = {key[0] for key, other in self.tags.items() if other == tag and key in self.started}
                if same == set(self.groups[tag[0]]):
                    self.ends[rank, node_id] = now + 1

    def run(self) -> tuple[dict[int, float], dict[int, int]]:
        """Return the last end of each rank, and how many of its nodes never end."""
        now = 0
        while True:
            for rank, nodes in self.jobs.items():
                ended = {key[1] for key, end in self.ends.items() if key[0] == rank and end <= now}
                running = [n for n in nodes if (rank, n.id) in self.started and n.id not in ended]
                busy = {self.resource(node) for node in running}
                for node in sorted(nodes, key=lambda node: node.id):
                    ready = (rank, node.id) not in self.started and node.dependencies <= ended
                    resource = self.resource(node)
                    if ready and (resource is None or resource not in busy):
                        busy.add(resource)
                        self.start(rank, node, now)
            self.end_communications(now)
            later = [end for end in self.ends.values() if end > now]
            if not later:
                break
            now = int(min(later))
        last = {rank: max(e for (r, _), e in self.ends.items() if r == rank) for rank in self.jobs}
        missing = {
            rank: sum((rank, node.id) not in self.ends for node in nodes) for rank, nodes in self.jobs.items()
        }
        return last, {rank: count for rank, count in missing.items() if count}


def add_node(nodes: list[Any], node_type: int, on: list[int], micros: int = 0, **attributes: Any) -> None:
    data, control = on[::2], on[1::2]
    message = pb.Node(
        id=len(nodes) + 1,
        name="node",
        type=node_type,
        data_deps=data,
        ctrl_deps=control,
        duration_micros=micros,
    )
    for name, value in {"is_cpu_op": False, **attributes}.items():
        field = (
            "bool_val" if isinstance(value, bool) else "string_val" if isinstance(value, str) else "int64_val"
        )
        setattr(message.attr.add(name=name), field, value)
    nodes.append(message)


def make_job(seed: int) -> tuple[dict[int, list[Any]], dict[str, list[int]]]:
    """Three ranks with host work, kernels, messages and collectives of two groups, in an order that may deadlock."""
    numbers = random.Random(seed)
    groups = {"1": [0, 1, 2], "2": [0, 1]}
    jobs: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for tag in range(12):
        kind = numbers.choice(["host", "gpu", "broadcast", "all", "pair", "message"])
        ranks = {"pair": [0, 1], "message": numbers.sample([0, 1, 2], 2)}.get(kind, [0, 1, 2])
        for rank in ranks:
            nodes = jobs[rank]
            on = [node for node in range(1, len(nodes) + 1) if numbers.random() < 0.4]
            if kind in ("host", "gpu"):
                add_node(nodes, COMP, on, numbers.randrange(1, 9), is_cpu_op=kind == "host")
            elif kind == "message":
                ends = {"comm_src": ranks[0], "comm_dst": ranks[1], "comm_tag": tag, "comm_size": 8}
                add_node(nodes, SEND if rank == ranks[0] else RECV, on, **ends)
            else:
                comm_type = BROADCAST if kind == "broadcast" else ALL_REDUCE
                group = "2" if kind == "pair" else "1"
                add_node(
                    nodes, COLL, on, numbers.randrange(1, 9), comm_type=comm_type, comm_size=8, pg_name=group
                )
    return jobs, groups


@pytest.mark.slow
def test_random_jobs_run_as_in_the_reference(tmp_path: Path) -> None:
    verdicts = set()
    for seed in range(60):
        jobs, groups = make_job(seed)
        for rank, messages in jobs.items():
            write_messages(tmp_path / f"{rank}.et", pb.GlobalMetadata(version="0.0.4"), messages)
        nodes = {rank: load_file(tmp_path / f"{rank}.et").nodes for rank in jobs}
        graphs = {rank: RankGraph(rank_nodes) for rank, rank_nodes in nodes.items()}
        run = run_together(graphs, dict.fromkeys(jobs, groups))
        assert (run.end_ns, run.unfinished) == ReferenceRun(nodes, groups).run(), seed
        verdicts.add(bool(run.unfinished))
    assert verdicts == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(("cpu/ddp_2", 0.005), ("cpu/pp_4", 0.005), ("dlrm", 0.005)),
        ("cpu/coll_4", 0.025),  # collectives that ASTRA-sim does not have take their recorded time
    ],
)
def test_a_network_without_delay_equals_simulate(name: str, error: float, data: Path, tmp_path: Path) -> None:
    job = etloom.open(data / name)
    etloom.export(job, tmp_path / "job.et")
    result = lint(tmp_path)
    predicted = etloom.simulate(job, "comm x0").table.row(0, named=True)
    assert result.verdict == "finish"
    assert result.ideal_ns == pytest.approx(predicted["upper_bound_ns"], rel=error)
    assert result.simulated_ns == pytest.approx(predicted["before_ns"], rel=0.0005)


def check_replay(job: Job, folder: Path, **changes: Any) -> LintResult:
    """The files of a predicted job finish, and their replay takes the predicted time."""
    folder.mkdir(exist_ok=True)
    prediction = etloom.predict(job, **changes)
    etloom.export(prediction.job, folder / "job.et")
    result = lint(folder)
    predicted = prediction.table.filter(scope="job")["predicted_ns"][0]
    assert result.verdict == "finish"
    assert result.simulated_ns == pytest.approx(predicted, rel=1e-4, abs=2_000)
    return result


def forget_ranks(job: Job) -> Job:
    """The job without the ranks of groups next to its communications: only the declared groups have them."""
    return job.map(
        lambda trace: trace.replace(
            comms=trace.comms.with_columns(ranks=pl.lit(None, trace.comms.schema["ranks"]))
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"parallel": {"dp": 4}}, {"ranks": 8}, {}])
def test_new_replicas_of_sub_groups_have_their_own_groups(tmp_path: Path, changes: dict[str, Any]) -> None:
    """All ranks call their groups cp and dp, so that only the ranks of a group tell one from another."""
    calls, groups = context_calls(2, "all_gather"), context_groups(2)
    job = forget_ranks(open_job(tmp_path / "run", calls, groups))
    result = check_replay(job, tmp_path / "sim", **changes)
    if len(result.files) > 2:
        listed = json.loads((tmp_path / "sim" / "job.comm_groups.json").read_text())
        used = {
            (rank, node.attributes["pg_name"])
            for rank, file in result.files.items()
            for node in load_file(file).nodes
            if node.type == COLL and not node.attributes.get("replayed")
        }
        assert all(rank in listed[number] for rank, number in used)
        pairs = sorted(ranks for ranks in listed.values() if len(ranks) == 2)
        assert pairs[: len(result.files) // 2] == [
            [rank, rank + 1] for rank in range(0, len(result.files), 2)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"ranks": 4}, {"network": "x0.1"}])
def test_the_replay_of_a_prediction_takes_the_predicted_time(
    own: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    check_replay(open_run(own / "ddp_2"), tmp_path / "sim", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"pp": 8}, {"pp": 2, "mb": 3}, {"mb": 9}])
def test_the_replay_of_a_pipeline_waits_for_its_messages(tmp_path: Path, changes: dict[str, Any]) -> None:
    job = replace(one_f_one_b(4, 6), elements=1 << 18)
    relaid = relay(job.job(), changes)
    etloom.export(relaid.job, tmp_path / "job.et")
    predicted = relaid.table.filter(scope="job")["predicted_ns"][0]
    assert lint(tmp_path).simulated_ns == pytest.approx(predicted, abs=2_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((f"cpu/{name}", {"network": "x0.1"}) for name in ("ddp_2", "coll_4", "pp_4")),
        *((f"cpu/{name}", {"ranks": 8}) for name in ("ddp_2", "coll_4")),
        *(("cpu/pp_4", {"parallel": sizes}) for sizes in ({"pp": 8}, {"pp": 2, "mb": 2}, {"mb": 8})),
    ],
)
def test_the_replay_of_predictions_of_recordings(
    name: str, changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    check_replay(open_run(data / name), tmp_path / "sim", **changes)


@pytest.mark.slow
def test_an_export_that_cannot_be_simulated_fails(tmp_path: Path) -> None:
    """Of four ranks three are written, but all-reduces of all four."""
    job = open_job(tmp_path / "run", context_calls(2, "all_gather"), context_groups(2))
    with pytest.raises(
        EtloomError, match=r"ASTRA-sim aborts with the written files: rank 0: .* rank 3: .* no file"
    ):
        etloom.export(Job({rank: job[rank] for rank in (0, 1, 2)}), tmp_path / "job.et")
    etloom.export(job[0], tmp_path / "alone.et")
