"""Ray actors: a folder for each class, on clusters that the job starts and on those that run already."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import etloom
from etloom.collector import gather, run_folder
from etloom.collector.launcher import ray_hook
from etloom.collector.options import VARIABLE, RecordingOptions
from etloom.collector.session import rank_facts

JOB = """
import os
import sys

import ray


@ray.remote
class Learner:
    def __init__(self, rank, address):
        import torch

        torch.distributed.init_process_group("gloo", f"file://{address}", rank=rank, world_size=2)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def train(self):
        import torch

        for _ in range(12):
            self.model(torch.ones(32, 64)).mean().backward()
            self.optimizer.step()


@ray.remote
class Critic:
    def __init__(self):
        import torch

        self.model = torch.nn.Linear(64, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self):
        import torch

        for _ in range(12):
            self.model(torch.ones(32, 64)).mean().backward()
            self.optimizer.step()


@ray.remote
class Value(Critic.__ray_metadata__.modified_class):
    pass


address = os.environ.get("CLUSTER")
ray.init(address, include_dashboard=False, log_to_driver=False, **({} if address else {"num_cpus": 5}))
actors = [Learner.remote(rank, sys.argv[1]) for rank in range(2)]
actors += [Critic.remote(), Critic.remote(), Value.remote()]
print(ray.get([actor.train.remote() for actor in actors]))
sys.exit(3)
"""


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs an actor of the class `Roll_out`."""
    instance = type("Roll_out", (), {})()
    worker = SimpleNamespace(global_worker=SimpleNamespace(actors={1: instance}))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(_private=SimpleNamespace(worker=worker)))  # type: ignore[arg-type]


def test_an_actor_of_a_process_group_shares_the_folder_of_its_class(
    actor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [rank_facts.choose_actor_folder(tmp_path).name for _ in range(2)] == [
        "actor_Roll-out_0", "actor_Roll-out_1",
    ]  # fmt: skip
    monkeypatch.setenv("RANK", "1")  # of a launcher that started the cluster's nodes
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_facts.choose_actor_folder(tmp_path).name == "actor_Roll-out_2"
    monkeypatch.setattr(rank_facts, "is_distributed", lambda: True)
    monkeypatch.setattr(rank_facts, "current_rank", lambda: (1, 2))
    assert {rank_facts.choose_actor_folder(tmp_path).name for _ in range(2)} == {"actor_Roll-out"}


@pytest.mark.parametrize("ray", [None, SimpleNamespace(), SimpleNamespace(_private=SimpleNamespace())])
def test_a_process_without_an_actor_has_no_folder_of_its_own(
    ray: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    assert rank_facts.choose_actor_folder(tmp_path) == tmp_path


def test_a_new_run_begins_with_free_names(tmp_path: Path) -> None:
    for place in ("actor_Critic_0/step_3", "actor_Critic_1", "actor_notes"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("actor_Critic_0/step_3", "actor_Critic_1"):
        (tmp_path / place / "rank_0.json").write_text("{}")
    (tmp_path / "actor_notes/mine.txt").write_text("")
    run_folder.claim_folder(str(tmp_path), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["actor_notes"]


@pytest.mark.parametrize("given", [None, {"env_vars": {"PYTHONPATH": "mine", "A": "1"}, "pip": ["x"]}])
def test_the_runtime_environment_is_added_to(
    given: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RecordingOptions("out", "out/.etloom-host-1-abcdef")
    monkeypatch.setenv(VARIABLE, options.to_environment())
    environment = ray_hook.add_recording(given)
    variables = environment.pop("env_vars")
    bootstrap, _, rest = variables.pop("PYTHONPATH").partition(os.pathsep)
    assert Path(bootstrap, "sitecustomize.py").is_file()
    assert json.loads(variables.pop(VARIABLE))["out"] == "out"
    if given is None:
        assert (rest, variables, environment) == ("${PYTHONPATH}", {}, {})
    else:
        assert (rest, variables, environment) == ("mine", {"A": "1"}, {"pip": ["x"]})


@pytest.mark.parametrize("own", [None, "mine.hook"])
def test_the_hook_is_set_while_ray_starts_unless_the_job_has_its_own(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ray_hook.HOOK_VARIABLE, raising=False)
    if own:
        monkeypatch.setenv(ray_hook.HOOK_VARIABLE, own)
    ray = SimpleNamespace(init=lambda *_, **__: os.environ[ray_hook.HOOK_VARIABLE])
    ray_hook.attach(ray)
    assert ray.init("auto") == (own or f"{ray_hook.__name__}.add_recording")
    assert os.environ.get(ray_hook.HOOK_VARIABLE) == own


def test_links_to_other_folders_are_no_actors(tmp_path: Path) -> None:
    (tmp_path / "actor_A/actor_B").mkdir(parents=True)
    (tmp_path / "actor_A/step_3").mkdir()
    (tmp_path / "actor_C").symlink_to(tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in run_folder.list_windows(tmp_path)]
    assert names == ["actor_A", "actor_A/step_3"]


def test_actors_of_several_sizes_are_gathered(tmp_path: Path) -> None:
    for place, rank, world_size in (("actor_A", 0, 2), ("actor_A", 1, 2), ("actor_B_0", 0, 1)):
        folder = tmp_path / f"host{rank}" / place
        folder.mkdir(parents=True)
        facts = {
            "rank": rank, "world_size": world_size, "host": f"host{rank}", "pid": 7, "start_ns": 10, "end_ns": 20,
            "restart": 0, "job": {"launch": "one"}, "warnings": [], "steps": [3], "files": [],
        }  # fmt: skip
        (folder / f"rank_{rank}.json").write_text(json.dumps(facts))
        (folder / f"torch_et_{rank}.json").write_text("{}")
    result = gather([tmp_path / "host0", tmp_path / "host1"], tmp_path / "all")
    assert {path.name: ranks for path, ranks in result.windows.items()} == {
        "actor_A": (0, 1),
        "actor_B_0": (0,),
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that runs before the job starts; it is used by jobs with the variable CLUSTER."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    assert ray
    start = [ray, "start", "--head", "--num-cpus=5", "--include-dashboard=false", "--port=6397"]
    subprocess.run(start, check=True, capture_output=True, timeout=300)
    monkeypatch.setenv("CLUSTER", "127.0.0.1:6397")
    yield
    subprocess.run([ray, "stop", "--force"], check=True, capture_output=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("is_running", [False, True])
def test_every_actor_is_recorded(is_running: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    if is_running:
        request.getfixturevalue("cluster")
    (tmp_path / "job.py").write_text(JOB)
    job = [sys.executable, tmp_path / "job.py"]
    collect = [
        sys.executable,
        "-m",
        "etloom",
        "collect",
        "--out",
        tmp_path / "run",
        "--",
        *job,
        tmp_path / "b",
    ]
    alone, recorded = (
        subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
        for command in ([*job, tmp_path / "a"], collect)
    )
    assert (
        (recorded.returncode, recorded.stdout) == (alone.returncode, alone.stdout) == (3, f"{[None] * 5}\n")
    )
    assert "Ray actors Critic_0, Critic_1, Learner, Value_0 in" in recorded.stderr
    ranks = {path.parent.name: [] for path in sorted(tmp_path.glob("run/*/run.json"))}
    for name, numbers in ranks.items():
        run = etloom.open(tmp_path / "run" / name)
        assert all((trace.events["name"] == "aten::addmm").any() for trace in run.values())
        numbers += list(run)
    assert ranks == {
        "actor_Critic_0": [0], "actor_Critic_1": [0], "actor_Learner": [0, 1], "actor_Value_0": [0],
    }  # fmt: skip
