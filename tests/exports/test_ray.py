"""A Ray cluster of several nodes on this host; needs Ray (`make test-ray` installs it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.core.errors import EtloomWarning
from etloom.loading import engines
from support.fleets import write_fleet

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytestmark = pytest.mark.slow
NODES, RANKS = 4, 20
OBJECT_STORE_BYTES = 80_000_000
"""The least that Ray accepts; tasks pass short texts only, so a spilling store changes nothing."""
QUESTIONS = ("temporal-breakdown", "stragglers", "collectives", "arrivals", "top-ops", "findings")
START_SECONDS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def connected(cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return cluster


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fleet(tmp_path_factory.mktemp("runs") / "monday", RANKS, slow=(5, 8, 9))


def test_all_nodes_work(connected: str, tmp_path: Path) -> None:
    def note_node(folder: str) -> None:
        import ray

        (Path(folder) / ray.get_runtime_context().get_node_id()).touch()
        time.sleep(1)  # so that the tasks of one node do not do all the work

    engines.run_on_ray(note_node, [str(tmp_path)] * 4 * NODES)
    assert engines.count_cpus("ray") == NODES
    assert 1 < len(list(tmp_path.iterdir())) <= NODES


def test_a_lost_worker_costs_its_task_only(connected: str, tmp_path: Path) -> None:
    def work(name: str) -> None:
        folder = Path(name)
        with (folder / "attempts").open("a") as file:
            file.write("x")
        if folder.name in "13" and len((folder / "attempts").read_text()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "done").touch()

    folders = [tmp_path / str(index) for index in range(6)]
    for folder in folders:
        folder.mkdir()
    ended: list[int] = []
    engines.run_on_ray(work, list(map(str, folders)), ended.append)
    assert sorted(ended) == list(range(6)) and all((folder / "done").exists() for folder in folders)
    assert [len((folder / "attempts").read_text()) for folder in folders] == [1, 2, 1, 2, 1, 1]


def test_a_task_that_fails_is_left_to_the_caller(connected: str, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise ValueError(name)

    ended: list[int] = []
    with pytest.warns(EtloomWarning, match="2 tasks of 2 failed on the Ray cluster.*ValueError: [ab]"):
        engines.run_on_ray(fail, ["a", "b"], ended.append)
    assert sorted(ended) == [0, 1]


def test_answers_are_those_of_this_host(connected: str, run: Path, tmp_path: Path) -> None:
    local, remote = etloom.open(run, use_cache=False), etloom.open(run, engine="ray")
    (added,) = etloom.store_add(run, to=tmp_path / "store", engine="ray")
    for question in QUESTIONS:
        expected = etloom.analyze(local, question)
        for job in (remote, etloom.open(added.path)):
            assert_frame_equal(etloom.analyze(job, question), expected, check_exact=True)


def test_an_addition_whose_driver_was_killed_continues(connected: str, run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [
        sys.executable,
        "-m",
        "etloom",
        "store",
        "add",
        str(run),
        "--to",
        str(store),
        "--engine",
        "ray",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_SECONDS
    while not list(store.glob(".adding/*/rank=*")) and process.poll() is None:
        assert time.monotonic() < deadline, "no rank was read"
        time.sleep(0.05)
    process.kill()
    process.wait()
    # The tasks of a driver that was killed end; a rank that one of them was writing is complete or not there.
    (added,) = etloom.store_add(run, to=store, engine="ray")
    assert added.ranks == tuple(range(RANKS))
    expected = etloom.analyze(etloom.open(run, use_cache=False), "stragglers")
    assert_frame_equal(etloom.analyze(added.path, "stragglers"), expected, check_exact=True)
