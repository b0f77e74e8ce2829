"""What ends a replay: a rank that stops, ranks that wait for each other, a launcher that lost one; and who says so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from etloom.core.errors import EtloomError
from etloom.replayer.comms.session import Watchdog
from etloom.replayer.launch_environment import Process
from support.processes import ended, free_port, processes, wait_for_calls
from support.replays import all_reduce_call, write_calls

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("0", "0"), ("", "2"), ("1.0", "2")])
def test_ranks_that_cannot_be(rank: str, world: str) -> None:
    with pytest.raises(EtloomError, match="are not a rank and a world size"):
        Process.current({"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": world})


def test_the_most_specific_launcher_is_tried_first() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
    assert Process.current({**slurm, **hydra}) == Process(3, 4, 1)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert Process.current({**slurm, **hydra, **torchrun}) == Process(1, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--use-one-trace",)])
def test_one_process_for_several_ranks_is_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = write_calls(tmp_path, {rank: [all_reduce_call(8)] for rank in range(2)})
    ((status, out, err),) = ended(processes(1, run, *options))
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert "2 ranks to replay, but 1 process; start 2 (torchrun --nproc-per-node 2" in err


@pytest.mark.slow
def test_the_store_outlives_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has gathered all; rank 1 takes a second more to say that it is done."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    monkeypatch.setattr("etloom.replayer.comms.session.SILENCE_LIMIT_S", 120)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ended: list[str] = []
    late = threading.Timer(1.0, lambda: TCPStore("127.0.0.1", store.port, None, False).set("beat/1", "done"))
    with Watchdog(store, Process(0, 2, 0), ended.append):
        store.set("beat/1", "1 gathering")
        late.start()
        since = time.monotonic()
    assert 0.9 < time.monotonic() - since < 300
    assert store.get("beat/1") == b"done"
    late.join()
    assert ended == []


def test_a_thousand_ranks_ask_the_store_a_few_things_a_beat() -> None:
    class Counted:
        """What is asked, of a store where all are alive."""

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def check(self, keys: list[str]) -> bool:
            self.asked.append(keys)
            return keys != ["gave_up"]

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.asked.append(keys)
            return [b"1 call 0" for _ in keys]

    for rank in (0, 1, 999):
        watch = object.__new__(Watchdog)
        watch._process, watch._store = Process(rank, 1000, 0), Counted()
        watch._start_watching()
        assert watch._find_reason() is None
        assert len(watch._store.asked) == 3
        assert sum(map(len, watch._store.asked)) == (1 + 2 * 999 if rank == 0 else 3)


class Kept(dict[str, str]):
    """A store in this process."""

    set = dict.__setitem__

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [*map(self.get, keys)]

    def wait(self, keys: list[str], timeout: Any) -> None:
        assert all(map(self.check, ([key] for key in keys)))

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_gets_its_own_calls_and_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from etloom.replayer.comms import session
    from etloom.replayer.plan import Call, Plan, RankPlan

    monkeypatch.setattr(session, "_CALLS_PER_KEY", 2)
    own = [
        tuple(Call(at, "all_reduce", (rank, 2), "float", (rank,), ()) for at in range(5 * rank))
        for rank in range(3)
    ]
    made, store = Plan(tuple(own)), Kept()
    parts = [session._share_plan(store, Process(rank, 3, 0), lambda world: made) for rank in range(3)]
    groups = ((1, 2), (2, 2))
    assert parts == [(made if rank == 0 else None, RankPlan(own[rank], groups, 3)) for rank in range(3)]
    assert {key for key in store if key.startswith("plan/1")} == {
        "plan/1",
        *(f"plan/1/{at}" for at in range(3)),
    }


@pytest.mark.parametrize(
    ("rank", "doing", "gone"), [(0, "the plan", False), (0, "gathering", True), (1, "the plan", True)]
)
def test_rank_0_may_plan_in_silence(rank: int, doing: str, gone: bool) -> None:
    watch = object.__new__(Watchdog)
    watch._process, watch._store = Process(1 - rank, 2, 0), Kept({f"beat/{rank}": f"3 {doing}"})
    watch._start_watching()
    watch._last_beats = {rank: (f"3 {doing}", time.monotonic() - 100)}
    assert watch._find_reason() == (f"rank {rank} is gone; it was at {doing}" if gone else None)


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from etloom.replayer.comms.runner import gpu_index

    for seen, gpu in ((8, 3), (2, 1), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        assert gpu_index(Process(11, 16, 3)) == gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "end", "said"),
    [
        ("warp", 2, "--backend: unknown backend 'warp'; expected one of gloo, nccl"),
        ("fake", 2, "--backend: unknown backend 'fake'; expected one of "),
        ("mpi", 1, "did not start"),
    ],
)
def test_a_backend_that_is_not_there_is_one_line(tmp_path: Path, backend: str, end: int, said: str) -> None:
    from torch.distributed import is_mpi_available

    if backend == "mpi" and is_mpi_available():
        pytest.skip("this torch has MPI")
    run = write_calls(tmp_path, {0: [all_reduce_call(8)]})
    ((status, _, err),) = ended(processes(1, run, "--backend", backend))
    assert (status, said in err, err.count("\n")) == (end, True, 1), err


def crossed(rank: int) -> list[dict[str, Any]]:
    """Ranks 0 and 1 make the calls of two groups in opposite orders: each waits for the other."""
    both, pair = all_reduce_call(8), {**all_reduce_call(4), "pg_name": "1", "pg_size": 2}
    return {0: [both, pair], 1: [pair, both], 2: [both]}[rank]


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_end_with_a_list_of_waits(tmp_path: Path) -> None:
    run = write_calls(tmp_path, {rank: crossed(rank) for rank in range(3)})
    options = ("--repeats", "1", "--warmup", "0", "--timeout", "3", "--blocking")
    found = ended(processes(3, run, *options), timeout=400)
    assert [status for status, _, _ in found] == [1, 1, 1]
    assert all(err.count("\n") == 1 for _, _, err in found), found
    whole, pair = "all_reduce, 32 B, with ranks 0-2", "all_reduce, 16 B, with ranks 0, 1"
    for rank, waits in ((0, whole), (1, pair), (2, whole)):
        said = f"rank {rank}: stopped at call 0 ({waits})"
        assert f"{said}: Timed out" in found[rank][2] or f"{said}: rank " in found[rank][2]
    # One of them names what the others wait for.
    assert any(f"rank 1 is at call 0 ({pair})" in err and f"({whole})" in err for _, _, err in found)


@pytest.mark.slow
def test_a_stalled_rank_ends_all_ranks(data: Path) -> None:
    running = processes(2, data / "cpu" / "ddp_2", "--repeats", "100000")
    try:
        wait_for_calls(running)
        running[1].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        _, err = running[0].communicate(timeout=400)
        assert time.monotonic() - since < 300
    finally:
        running[1].kill()
        running[1].communicate()
    assert running[0].returncode == 1
    assert "rank 1 is gone; it was at call" in err and err.strip().count("\n") == 0, err


@pytest.mark.slow
def test_no_process_outlives_its_launcher(data: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    port = str(free_port())
    replay = [
        "etloom",
        "replay",
        "comms",
        str(data / "cpu" / "ddp_2"),
        "--repeats",
        "100000",
        "--master-port",
        port,
    ]
    launcher = subprocess.Popen(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m", *replay],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    launcher.args = replay
    wait_for_calls([launcher] * 2)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    since = time.monotonic()
    said, _ = launcher.communicate(timeout=400)
    while any(alive(one) for one in ranks):
        assert time.monotonic() - since < 300
        time.sleep(0.1)
    assert launcher.returncode != 0
    assert "signal 9" in said or "rank 1 is gone" in said, said


def children(process: int) -> list[int]:
    """In the order in which they were started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def alive(process: int) -> bool:
    """Whether it runs; what has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
