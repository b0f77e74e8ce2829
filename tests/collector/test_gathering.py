"""Joining the folders of several hosts: one job only, each rank once, nothing overwritten."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.cli import main
from etloom.collector.launcher import finalization
from etloom.collector.options import RecordingOptions
from etloom.collector.recovery.gathering import gather
from etloom.core.errors import CollectError
from support.paths import ROOT
from support.processes import free_port

SECOND = 10**9


def host(
    folder: Path,
    ranks: range,
    steps: list[int],
    window: str = "",
    *,
    job: dict[str, Any] | None = None,
    start_ns: int = 10**18,
    **facts: Any,
) -> Path:
    """A folder as `etloom collect` leaves it on the host of that name; the ranks ran for a second."""
    place = folder / window
    place.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (place / f"observer_{rank}.etob").write_text(f"{folder.name} {rank}")
        seal = {"rank": rank, "world_size": 4, "start_ns": start_ns, "end_ns": start_ns + SECOND}
        seal |= {"host": folder.name, "pid": 100 + rank, "steps": steps, "versions": {}, "restart": 0}
        seal |= {"files": [f"observer_{rank}.etob"], "job": job} | facts
        (place / f"rank_{rank}.json").write_text(json.dumps(seal))
    run = {"command": ["train"], "host": folder.name, "returncode": ranks[0]}
    (place / "run.json").write_text(json.dumps(run))
    return folder


def of(**more: Any) -> dict[str, Any]:
    return {"batch": None, "rendezvous": None, "launch": None} | more


def test_gather_folders_of_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = host(tmp_path / "a", range(2), [3, 4]), host(tmp_path / "b", range(2, 4), [3, 4])
    out = tmp_path / "run"
    assert main(["gather", str(one), str(two), "--out", str(out)]) == 0
    assert capsys.readouterr().err == f"etloom: {out}: 4 ranks; next: etloom report {out}\n"
    run = json.loads((out / "run.json").read_text())
    assert [(rank["rank"], rank["host"]) for rank in run["ranks"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert (run["command"], run["host"], run["returncode"]) == (["train"], "a, b", 2)
    assert (out / "observer_3.etob").read_text() == "b 3" and (one / "observer_0.etob").exists()
    names = [*(f"observer_{r}.etob" for r in range(4)), *(f"rank_{r}.json" for r in range(4))]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "run.json", "run.yaml"])
    # Again: not over the first.
    assert main(["gather", str(one), "--out", str(out)]) == 1
    assert "of an earlier run" in capsys.readouterr().err
    assert main(["gather", str(one), "--out", str(out), "--overwrite"]) == 0
    assert "no traces of rank 2-3 of 4" in capsys.readouterr().err


def test_gather_windows_of_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, ranks in (("a", range(2)), ("b", range(2, 4))):
        for window in ("step_5", "step_10"):
            host(tmp_path / folder, ranks, [5] if folder == "a" else [6], window)
    assert main(["gather", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "step_10" / "observer_2.etob").exists()
    assert "different steps" in capsys.readouterr().err


def test_windows_of_one_job_are_recognized(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number, window in enumerate(("step_5", "step_10")):
        host(run, range(1), [5], window, job={"launch": "a-1-abc"}, start_ns=(10 + number) * SECOND)
    with pytest.raises(CollectError) as raised:
        gather([run / "step_5", run / "step_10"], tmp_path / "out")
    assert str(raised.value) == (
        f"{run / 'step_10'}: is another window of the job in {run / 'step_5'}; "
        f"gather whole runs, such as {run}, with all their windows, not single windows"
    )


def test_gather_refuses_different_recordings(tmp_path: Path) -> None:
    one, two = host(tmp_path / "a", range(2), [3]), host(tmp_path / "b", range(1, 3), [3])
    words = r"rank 1 is also in .*/a, of process 101 on a; here of process 101 on b; gather one job"
    with pytest.raises(CollectError, match=words):
        gather([one, two], tmp_path / "run", same_job=True)
    with pytest.raises(CollectError, match="is the --out folder itself"):
        gather([one], one)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CollectError, match="no traces of etloom collect; check the path"):
        gather([tmp_path / "empty"], tmp_path / "run")
    (tmp_path / "empty" / ".etloom-a-1-00" / "7").mkdir(parents=True)
    with pytest.raises(CollectError, match="no traces of etloom collect; etloom salvage "):
        gather([tmp_path / "empty"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("source", "out"),
    [("run/step_3", "run"), ("run", "run/step_3"), ("run", "run/all"), ("run/node0", "run")],
)
def test_gather_refuses_an_overlapping_target(tmp_path: Path, source: str, out: str, linked: bool) -> None:
    host(tmp_path / "run", range(2), [3], "step_3")
    host(tmp_path / "run" / "node0", range(2), [3])
    if linked:
        (tmp_path / "link").symlink_to(tmp_path / "run")
        out = out.replace("run", "link")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CollectError, match=r"(is the --out folder itself|one contains the other); choose"):
        gather([tmp_path / source], tmp_path / out, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_gather_refuses_a_target_linked_to_a_source(tmp_path: Path) -> None:
    host(tmp_path / "a", range(2), [3], "step_3")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_3").symlink_to(tmp_path / "a" / "step_3")
    with pytest.raises(CollectError, match="one contains the other"):
        gather([tmp_path / "a"], tmp_path / "run", overwrite=True)
    assert (tmp_path / "a" / "step_3" / "observer_0.etob").exists()


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        # Who launched them knows better than what a job is called.
        ({"job": of(launch="l", batch="X=1")}, {"job": of(launch="l", batch="X=2")}, None),
        ({"job": of(batch="X=1")}, {"job": of(batch="X=2")}, "batch system jobs differ, X=1 and X=2"),
        ({"job": of(rendezvous="q")}, {"job": of(rendezvous="r")}, "torchrun ids differ, q and r"),
        ({}, {"world_size": 6}, "world sizes differ, 4 and 6"),
        ({"job": of(launch="l")}, {"job": of(launch="l"), "world_size": 6}, "world sizes differ, 4 and 6"),
        # Seconds may lie between clocks, days between jobs.
        ({}, {"start_ns": 10**18 + 40 * SECOND}, None),
        ({}, {"start_ns": 10**18 + 61 * SECOND}, None),
        (
            {},
            {"start_ns": 10**18 + 62 * SECOND},
            "rank 2 on b began 61 s after that of rank 0 on a had ended",
        ),
        ({}, {"start_ns": 10**18 + 3 * 86400 * SECOND}, "rank 2 on b began 3 days after that of rank 0 on a"),
        ({"job": of(launch="l")}, {"job": of(launch="l"), "start_ns": 2 * 10**18}, None),
        ({"job": of(launch="l")}, {"job": of(launch="k"), "start_ns": 2 * 10**18}, "years|days"),
    ],
)
def test_traces_of_different_jobs_are_refused(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: str | None
) -> None:
    folders = [host(tmp_path / "a", range(2), [3], **one), host(tmp_path / "b", range(2, 4), [3], **other)]
    if words is None:
        assert list(gather(folders, tmp_path / "run").windows.values()) == [(0, 1, 2, 3)]
        return
    with pytest.raises(CollectError, match=f"traces belong to several jobs: .*{words}.*--same-job"):
        gather(folders, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    said = gather(folders, tmp_path / "run", same_job=True).warnings
    assert said[0].startswith("joined because of --same-job, although ")


def test_restarts_of_a_job_are_gathered_by_window(tmp_path: Path) -> None:
    for name, ranks in (("a", range(2)), ("b", range(2, 4))):
        host(tmp_path / name, ranks, [5], "step_5", job=of(rendezvous="first"))
        host(tmp_path / name, ranks, [9], "step_9", job=of(rendezvous="second"), restart=1)
    assert len(gather([tmp_path / "a", tmp_path / "b"], tmp_path / "run").windows) == 2
    host(tmp_path / "b", range(2, 4), [9], "step_9", job=of(rendezvous="third"), restart=2)
    with pytest.raises(CollectError, match="torchrun ids differ"):
        gather([tmp_path / "a", tmp_path / "b"], tmp_path / "again")
    # Windows that no two folders share: of the same life, so of two jobs.
    shutil.rmtree(tmp_path / "a" / "step_9")
    shutil.rmtree(tmp_path / "b" / "step_5")
    host(tmp_path / "b", range(2, 4), [9], "step_9", job=of(rendezvous="third"))
    with pytest.raises(CollectError, match="torchrun ids differ"):
        gather([tmp_path / "a", tmp_path / "b"], tmp_path / "again")


def test_duplicates_are_gathered_once(tmp_path: Path) -> None:
    one, two = host(tmp_path / "a", range(2), [3]), host(tmp_path / "b", range(2, 4), [3])
    shutil.copytree(one, tmp_path / "copy")
    (tmp_path / "copy" / "torch_et_1.json.gz").write_text("made later, of the same recording")
    (tmp_path / "link").symlink_to(two)
    found = gather([one, one, two, tmp_path / "link", tmp_path / "copy"], tmp_path / "run")
    assert found.warnings == (
        f"{one}: duplicate argument; used once",
        f"{tmp_path / 'link'}: duplicate argument, also as {two}; used once",
        f"{tmp_path / 'copy'}: rank 0-1 is in another folder too; used once",
    )
    assert found.windows == {tmp_path / "run": (0, 1, 2, 3)}
    assert (tmp_path / "run" / "torch_et_1.json.gz").exists()


def test_traces_without_a_record_are_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "observer_0.etob").write_text("as it was")
    (unsealed,) = [
        line for line in gather([tmp_path / "a"], tmp_path / "one").warnings if "rank_<r>.json" in line
    ]
    assert unsealed == f"{tmp_path / 'a'}: the job of traces without rank_<r>.json is unknown"
    assert gather([tmp_path / "a", tmp_path / "b"], tmp_path / "two").windows == {tmp_path / "two": (0,)}
    (tmp_path / "b" / "observer_0.etob").write_text("as it is!")
    with pytest.raises(CollectError, match=r"rank 0 is also in .*/a, with different contents; gather"):
        gather([tmp_path / "a", tmp_path / "b"], tmp_path / "three")
    (tmp_path / "b" / "observer_0.etob").rename(tmp_path / "b" / "kineto_trace_0.json")
    with pytest.raises(CollectError, match="/a, in other files that cannot be compared; "):
        gather([tmp_path / "a", tmp_path / "b"], tmp_path / "three")


def test_clock_differences_are_reported(tmp_path: Path) -> None:
    one = host(tmp_path / "a", range(2), [3], job=of(launch="l"))
    two = host(tmp_path / "b", range(2, 4), [3], job=of(launch="l"), start_ns=10**18 + 300 * SECOND)
    (line,) = gather([one, two], tmp_path / "run").warnings
    assert line == (
        "the clocks of the hosts differ: the window of rank 2 on b began 5 minutes after that of rank 0 on a "
        "had ended"
    )


def test_a_full_disk_leaves_no_partial_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = host(tmp_path / "a", range(2), [3]), host(tmp_path / "b", range(2, 4), [3])
    copy = shutil.copy2

    def full(path: Path, target: Path) -> Any:
        if path.name == "observer_3.etob":
            raise OSError(28, "No space left on device", str(target))
        return copy(path, target)

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(CollectError, match="cannot be written: No space left on device"):
        gather([one, two], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # Nor is what was there before lost.
    run = tmp_path / "run"
    gather([one], run)
    before = {path.name: path.read_text() for path in run.iterdir()}
    with pytest.raises(CollectError, match="No space left on device"):
        gather([one, two], run, overwrite=True)
    assert {path.name: path.read_text() for path in run.iterdir()} == before
    monkeypatch.undo()
    gather([two], run, overwrite=True)
    assert not (run / "observer_0.etob").exists() and (run / "observer_3.etob").read_text() == "b 3"


@pytest.mark.parametrize("seal", [{}, [], None, {"rank": 0}, "x", {"rank": 7, "world_size": 9}])
def test_invalid_records_are_left_out(tmp_path: Path, seal: Any) -> None:
    one = host(tmp_path / "a", range(2), [3])
    (one / "rank_0.json").write_text(json.dumps(seal))
    (one / "torch_et_1.json.gz").mkdir()
    found = gather([one], tmp_path / "run")
    assert found.windows == {tmp_path / "run": (0, 1)}
    assert found.warnings[:2] == (
        f"{one / 'rank_0.json'}: invalid rank, world size, host or start; left out",
        f"{one / 'torch_et_1.json.gz'}: not a regular file; left out",
    )
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "observer_0.etob" in names and not {"rank_0.json", "torch_et_1.json.gz"} & names
    (one / "observer_0.etob").unlink()
    for name in ("observer_1.etob", "rank_1.json"):
        (one / name).unlink()
    with pytest.raises(CollectError, match="contains no traces of etloom collect"):
        gather([one], tmp_path / "again")


def test_ranks_of_other_hosts_are_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every rank of this host is there, the others are another folder's."""
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    folder = host(tmp_path / "a", range(2), [3], local_world_size=2)
    (tmp_path / "s").mkdir()
    warnings: list[str] = []
    options = RecordingOptions(str(folder), str(tmp_path / "s"), command=("train",))
    assert finalization._finalize_window(options, folder, 0, [], warnings) == [0, 1]
    assert warnings == [
        f"{folder}: 2 ranks of 4, those of this host; etloom gather joins the folders of several hosts"
    ]


# Two hosts: processes with host names of their own

JOB = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests" / "collector" / "scripts")!r}); import light
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(6):
    net(torch.ones(1, 8)).sum().backward()
    dist.all_reduce(net.weight.grad)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def _host_names_are_free() -> bool:
    try:
        named = subprocess.run(
            ["unshare", "--uts", "sh", "-c", "hostname node0; hostname"], capture_output=True
        )
    except OSError:
        return False
    return named.stdout == b"node0\n"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("out", ["{host}", "shared"])
def test_two_hosts(tmp_path: Path, out: str) -> None:
    """Each host runs its own collector, into a disk of its own or a shared one."""
    pytest.importorskip("torch")
    if not _host_names_are_free():
        pytest.skip("no host names of its own for a process here (unshare --uts)")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "etloom", "collect", "--out", str(tmp_path / out), "--steps", "2:5"]
    command += ["--with", "et,shapes", "--observer", "stock", "--", sys.executable, str(tmp_path / "job.py")]
    name_it = 'hostname node$RANK && exec "$0" "$@"'
    hosts = [
        subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", name_it, *command],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_WORLD_SIZE": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [host.communicate(timeout=300)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    run = tmp_path / out
    if out == "{host}":
        for rank in (0, 1):
            place = tmp_path / f"node{rank}"
            assert [path.name for path in sorted(place.glob("torch_et*"))] == [f"torch_et_{rank}.json.gz"]
            assert "1 rank of 2, those of this host; etloom gather joins" in said[rank]
        run = tmp_path / "run"
        found = gather([tmp_path / "node0", tmp_path / "node1"], run)
        assert (found.windows, found.warnings) == ({run: (0, 1)}, ())
    facts = json.loads((run / "run.json").read_text())
    assert (facts["hosts"], facts["world_size"], facts["returncode"]) == (["node0", "node1"], 2, 0)
    assert facts["job"]["launch"] is None  # two launches, of one job
    ranks = [(rank["rank"], rank["host"], rank["steps"], rank["ended"]["how"]) for rank in facts["ranks"]]
    assert ranks == [(0, "node0", [2, 3, 4], "exited"), (1, "node1", [2, 3, 4], "exited")]
    assert not list(run.glob(".etloom-*"))
    job = etloom.open(run)
    assert sorted(job) == [0, 1] and all(trace.nodes.height for trace in job.values())


def test_a_wrong_clock_is_reported(tmp_path: Path) -> None:
    """Of two ranks, by the clocks of their hosts, one had ended before the other began."""

    def events(rank: int, at_us: int) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "pid": 1,
            "tid": 1,
            "ts": at_us,
            "dur": 1000,
        }
        info = {"distributedInfo": {"rank": rank, "world_size": 2}, "host_name": f"node{rank}"}
        return {"schemaVersion": 1, **info, "baseTimeNanoseconds": 10**18, "traceEvents": [event]}

    for at_us in (900, 7_001_000):
        for rank in (0, 1):
            trace = events(rank, at_us * rank)
            (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(trace))
        stats = etloom.open(tmp_path).stats.filter(name="job.no_common_time")
        if at_us == 900:
            assert stats.is_empty()
    (row,) = stats.select("severity", "example").rows()
    assert row[0] == "error"
    assert row[1].startswith("rank 1 on node1 began 7.000 s after rank 0 on node0 ended: their clocks differ")
