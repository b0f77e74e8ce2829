"""The cause of a hang from the stacks that torch.distributed's debug server writes of all ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import etloom
from etloom.cli import main
from etloom.core.errors import ReadError
from etloom.loading.hang_recordings import parse_stacks
from support.ras_reports import make_world, write_json

TORCH = "/v/lib/python3.11/site-packages/torch"
WAIT = f"""  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/job/train.py", line 13 in step
  File "/job/train.py", line 16 in <module>
"""
LOAD = """  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/job/data.py", line 8 in load_batch
  File "/job/train.py", line 12 in step
  File "/job/train.py", line 16 in <module>
"""
OTHER_CALL = WAIT.replace("in all_reduce", "in broadcast").replace("line 13 in step", "line 14 in step")
BACKWARD = f"""  File "{TORCH}/autograd/graph.py", line 829 in _engine_run_backward
  File "{TORCH}/_tensor.py", line 648 in backward
  File "/job/train.py", line 10 in step
  File "/job/train.py", line 16 in <module>
"""
SAVE = f"""  File "/job/disk.py", line 3 in write
  File "{TORCH}/serialization.py", line 970 in save
  File "/job/train.py", line 16 in <module>
"""


def write(folder: Path, *stacks: str, time: str = "20261130_120000", kind: str = "stacks") -> Path:
    """Write a file of stacks: one stack, or an error, per rank."""
    folder.mkdir(exist_ok=True)
    parts = []
    for rank, stack in enumerate(stacks):
        head = (
            "Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nThread 0x2 (most recent):\n"
        )
        parts += [
            f"=== Rank {rank}: http://vm:4629{rank}/handler/dump_traceback? ===",
            stack if stack.startswith("Error") else head + stack,
        ]
    (folder / f"{kind}_{time}.txt").write_text("\n".join(parts))
    return folder


def write_twice(folder: Path, *stacks: str) -> Path:
    write(folder, *stacks, time="20261130_115900")
    return write(folder, *stacks)


def test_the_rank_that_does_not_wait_is_named_with_its_own_line(tmp_path: Path) -> None:
    report = etloom.hangs(write_twice(tmp_path / "dumps", WAIT, LOAD, WAIT, WAIT))
    assert report.cause is not None
    assert (report.cause.kind, report.cause.ranks) == ("not arrived", (1,))
    assert "load_batch (/job/data.py:8)" in report.sentence
    assert "3 ranks wait for it in all_reduce, called at step (/job/train.py:13)" in report.sentence
    assert "the same in stacks_20261130_115900.txt" in report.sentence
    assert report.cause.evidence.rows() == [(1, "main thread: load_batch (/job/data.py:8)")]


@pytest.mark.parametrize(
    ("stacks", "kind", "ranks"),
    [
        ((WAIT, SAVE, WAIT), "a checkpoint", (1,)),
        ((WAIT, LOAD.replace("/job/data.py", f"{TORCH}/utils/data/dataloader.py")), "data loading", (1,)),
        ((WAIT, OTHER_CALL, WAIT, WAIT), "other collective", (1,)),
        ((WAIT, OTHER_CALL), "other collective", (0, 1)),
        ((WAIT, WAIT), "link", ()),
        ((WAIT, "Error: 408", LOAD), "unresponsive", (1,)),
        ((WAIT, "Error: 503"), "crashed", (1,)),
        ((BACKWARD, LOAD, BACKWARD), "not arrived", (1,)),
        ((LOAD, LOAD, SAVE.replace("serialization", "optim")), "not arrived", (2,)),
    ],
)  # fmt: skip
def test_the_kinds(stacks: tuple[str, ...], kind: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    report = etloom.hangs(write_twice(tmp_path / "dumps", *stacks))
    assert report.cause is not None
    assert (report.cause.kind, report.cause.ranks) == (kind, ranks)


@pytest.mark.parametrize(
    "stacks", [(WAIT, WAIT), (LOAD, LOAD), (BACKWARD, LOAD), (LOAD, SAVE, WAIT[:0] + SAVE)]
)
def test_one_file_without_ranks_in_communication_shows_no_hang(
    stacks: tuple[str, ...], tmp_path: Path
) -> None:
    report = etloom.hangs(write(tmp_path / "dumps", *stacks))
    assert report.cause is None
    assert "two files show whether the job moves" in report.sentence


def test_ranks_that_have_moved_do_not_hang(tmp_path: Path) -> None:
    write(tmp_path / "dumps", OTHER_CALL, LOAD, time="20261130_115900")
    report = etloom.hangs(write(tmp_path / "dumps", WAIT, LOAD))
    assert report.cause is None
    assert "have changed since stacks_20261130_115900.txt" in report.sentence


def test_a_silent_rank_is_named_with_the_line_of_the_earlier_file(tmp_path: Path) -> None:
    write(tmp_path / "dumps", WAIT, LOAD, WAIT, time="20261130_115900")
    report = etloom.hangs(write(tmp_path / "dumps", WAIT, "Error: 408", WAIT))
    assert report.cause is not None
    assert report.cause.ranks == (1,)
    assert "no answer in time" in report.sentence
    assert "the main thread was in load_batch (/job/data.py:8)" in report.sentence


def test_the_form_of_py_spy(tmp_path: Path) -> None:
    text = """PARTIAL DATA: 1/2 workers responded
  Rank 1: Timeout

=== Rank 0: http://vm:1/handler/pyspy_dump?nonblocking=1 ===
Process 21557: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 21560 (idle): "other"
    run (threading.py:982)

Thread 21557 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    step (train.py:13)
    <module> (train.py:16)

=== Rank 1: http://vm:2/handler/pyspy_dump?nonblocking=1 ===
Error: 408"""
    stacks = parse_stacks(text)
    assert stacks.frames[0][0] == "all_reduce (torch/distributed/distributed_c10d.py:3252)"
    assert set(stacks.errors) == {1}
    (tmp_path / "pyspy_dump_20261130_120000.txt").write_text(text)
    assert (
        "1 rank waits for it in all_reduce, called at step (train.py:13)" in etloom.hangs(tmp_path).sentence
    )


def test_next_to_a_report_of_ras_the_lines_of_its_ranks_are_remarks(tmp_path: Path) -> None:
    world = [make_world(2)]
    world[0].members[1].counts["AllReduce"] = 3
    folder = write(tmp_path / "dumps", WAIT, LOAD)
    (folder / "ras.json").write_text(write_json(world))
    report = etloom.hangs(folder)
    assert report.cause is not None
    assert report.cause.ranks == (1,)
    assert report.remarks == ("rank 1: load_batch (/job/data.py:8)",)


def test_next_to_dumps_the_line_is_in_the_answer(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", WAIT, LOAD)
    for rank, calls in enumerate((4, 3)):
        entries = [
            {"profiling_name": "nccl:all_reduce", "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
             "time_created_ns": number, "process_group": ["0", "default_pg"],
             "state": "completed" if number < 4 else "started",
             "input_sizes": [[4]], "output_sizes": [[4]], "frames": []}
            for number in range(1, calls + 1)
        ]  # fmt: skip
        dump = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "entries": entries,
        }
        (folder / f"_dump_{rank}").write_text(json.dumps(dump))
    report = etloom.hangs(folder)
    assert report.cause is not None
    assert report.cause.ranks == (1,)
    assert "load_batch (/job/data.py:8)" in report.sentence
    assert "called all_reduce 4 of group" in report.sentence


def test_a_file_may_end_after_any_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_twice(tmp_path / "dumps", WAIT, "Error: 408", LOAD)
    file = folder / "stacks_20261130_120000.txt"
    lines = file.read_text().splitlines(keepends=True)
    for end in range(len(lines)):
        file.write_text("".join(lines[:end]))
        assert main(["hangs", str(folder)]) in (0, 1)
        assert main(["hangs", str(file), "--format", "json"]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_rank_in_whose_stack_the_file_ends_is_not_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", WAIT, WAIT, WAIT, WAIT)
    file = folder / "stacks_20261130_120000.txt"
    text = file.read_text()
    side = (
        "=== Rank 2: http://vm:1/x? ===\nThread 0x9 (most recent call first):\n"
        + LOAD.rpartition('  File "/job/data')[0]
    )
    file.write_text(text[: text.index("=== Rank 2")] + side)
    report = etloom.hangs(folder)
    assert report.cause is None
    assert "the file ends in the stack of rank 2" in report.sentence
    assert any("read.truncated" in problem for problem in report.problems)
    file.write_text(text.replace(WAIT, LOAD, 1)[: -len(WAIT)] + WAIT[:40])
    assert "rank 0 stopped or diverged" in etloom.hangs(folder).sentence


def test_a_folder_without_stacks_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "stacks_20261130_120000.txt").write_text("nothing\n")
    with pytest.raises(ReadError, match="no Flight Recorder dump"):
        etloom.hangs(tmp_path)


def test_long_lines_and_many_ranks_take_little_time(tmp_path: Path) -> None:
    text = (
        "=== Rank 0: x ===\nThread 1\n    " + "a (" * 100_000 + "\n" + '  File "' + '", line 1 in ' * 100_000
    )
    text += "".join(f"\n=== Rank {rank}: x ===\nThread 1\n{WAIT}" for rank in range(1, 10_000))
    text += "\n" + ("    a" + " (:" * 600 + "\n") * 1_000 + "=== Rank 1: a" * 30_000
    before = time.process_time()
    assert len(parse_stacks(text).frames) == 9_999
    assert time.process_time() - before < 5


def test_a_process_that_ended_since_the_earlier_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, LOAD, LOAD, LOAD, time="20261130_115900")
    report = etloom.hangs(write(tmp_path, WAIT, WAIT, "Error: 503"))
    assert report.cause is not None and (report.cause.kind, report.cause.ranks) == ("crashed", (2,))
    assert "the main thread was in load_batch (/job/data.py:8)" in report.sentence
    assert "one file" not in report.sentence


def test_the_sentence_without_a_cause_is_true(tmp_path: Path) -> None:
    single = etloom.hangs(write(tmp_path / "one", WAIT, WAIT))
    assert "no rank differs; two files show" in single.sentence
    ended = etloom.hangs(write(tmp_path / "ended", "Error: 503", "Error: 503"))
    assert "ranks 0, 1 did not answer" in ended.sentence


def test_info_names_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "dumps", WAIT)
    assert main(["info", str(folder / "stacks_20261130_120000.txt")]) == 1
    assert "etloom hangs FOLDER" in capsys.readouterr().err
