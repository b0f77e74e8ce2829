"""Where the processes of a replay meet, by the variables of their launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etloom.cli.replay.printing import contention_warning
from etloom.core.errors import EtloomError
from etloom.replayer.comms.session import FIRST_PORT, rendezvous_address
from etloom.replayer.launch_environment import Process
from support.paths import ROOT

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "4"}


def resolved(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> str:
    monkeypatch.setattr("socket.getaddrinfo", lambda *of: [])
    return rendezvous_address(None, None, environment)[0]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("node[07-12,20],other", "node07"),
        ("node[3,5-6]", "node3"),
        ("rack[1-2]n[01-04]-ib", "rack1n01-ib"),
        ("gpu1,gpu[2-3]", "gpu1"),
    ],
)
def test_on_the_first_node_of_the_step(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, {**STEP, "SLURM_STEP_NODELIST": nodes}) == first


def test_open_mpi_in_slurm_begins_on_the_first_node_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[2-4]", "OMPI_COMM_WORLD_RANK": "3"}
    assert resolved(monkeypatch, {**STEP, **nodes}) == "n1"


def test_stated_values_take_precedence_over_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {**STEP, "SLURM_STEP_NODELIST": "n[1-2]", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "5000"}
    assert rendezvous_address(None, None, told) == ("127.0.0.2", 5001)
    assert rendezvous_address("127.0.0.3", 6, told) == ("127.0.0.3", 6)
    for port, beside in (("65535", 65_534), ("65536", FIRST_PORT), ("0", FIRST_PORT), ("²", FIRST_PORT)):
        assert rendezvous_address(None, None, {"MASTER_PORT": port}) == ("127.0.0.1", beside)
    assert rendezvous_address(None, None, {}) == ("127.0.0.1", FIRST_PORT)
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "no-such-host"}
    assert rendezvous_address(None, None, alone)[0] == "127.0.0.1"


def test_runs_on_one_host_have_different_ports() -> None:
    runs = [
        *({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step} for step in "012"),
        {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"},
        *({"OMPI_MCA_ess_base_jobid": job} for job in ("821166081", "4000000001")),
        {"PMIX_NAMESPACE": "prterun-vm-4242@1"},
    ]
    ports = [rendezvous_address(None, None, run)[1] for run in runs]
    assert len(set(ports)) == len(runs)
    assert all(FIRST_PORT <= port < 32_768 for port in ports)
    assert ports[0] == rendezvous_address(None, None, {**runs[0], "SLURM_PROCID": "5"})[1]


def test_an_unknown_host_is_reported_at_once() -> None:
    with pytest.raises(EtloomError, match=r"^master_addr: cannot resolve host 'no such host': "):
        rendezvous_address("no such host", None, {})
    with pytest.raises(EtloomError, match=r"^cannot resolve host 'no such host': "):
        rendezvous_address(None, None, {"MASTER_ADDR": "no such host"})


def test_a_batch_script_of_slurm_is_a_single_process() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert Process.current(batch) == Process(0, 1, 0)
    assert Process.current({**batch, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}) == Process(1, 2, 0)


def test_the_rank_on_its_host_under_pmi2_is_slurms() -> None:
    step = {"PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_LOCALID": "2"}
    assert Process.current(step) == Process(5, 8, 2)


def test_an_oversubscribed_host_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert contention_warning(3.9, "cpu", 2) is None
    said = "latencies include waiting for a CPU and cannot be compared with the recording or with other replays: "
    ranks, busy = "2 ranks with 3 threads each share 4 CPUs", "the load before the replay was 4.5 on 4 CPUs"
    assert contention_warning(None, "cpu", 3) == said + ranks
    assert contention_warning(4.5, "cpu", 3) == f"{said}{ranks}, and {busy}"
    assert contention_warning(4.5, "cuda", 3) == said + busy
    assert contention_warning(4.5, "cpu", 1, "times") == said.replace("latencies", "times") + busy
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert contention_warning(0.0, "cpu", 1) == f"{said}5 ranks share 4 CPUs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["replay", "compute", "cpu/ddp_2/kineto_trace_0.json.gz"], "has no execution trace"),
        (["replay", "compute", "cpu/ddp_2", "--rank", "5"], "unknown rank 5"),
        (
            ["replay", "compute", "cpu/ddp_2", "--step", "9"],
            "the execution trace has no step 9; its steps are: 0, 1",
        ),
        (["replay", "comms", "cpu/ddp_2"], "2 ranks to replay, but 1 process"),
        (["replay", "full", "nothere"], "no such file or folder"),
        (["--trace-path", "nothere"], "no such file or folder"),
    ],
)
def test_input_is_looked_at_before_torch_is_imported(
    data: Path, tmp_path: Path, command: list[str], said: str
) -> None:
    """Which takes seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    module = "etloom" if command[0] == "replay" else "etloom.compat.comms_replay"
    ended = subprocess.run(
        [sys.executable, "-m", module, *command], cwd=data,
        env={**plain, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert said in ended.stderr
