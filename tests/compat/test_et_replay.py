"""The command line of PARAM's et_replay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etloom.compat import et_replay
from support.processes import ended, forked

pytest.importorskip("torch")

# The flags of et_replay in PARAM's HEAD, and of its predecessor.
FLAGS = """
    --input --trace-path --trace_path --replay-mode --replay-config --warmup-iter --iter --profile-replay
    --profile-memory --et --cuda --cpu --debug -g --generator --dump --dump-path -c --compute --subgraph --delay --tf32
    --skip-node-file --update-skip-node-file --enable-lazy-tensor-allocation --device-memory-threshold --batch-size
    --rows --pooling-factor --alpha -s --separate --regenerate_tensors
"""


def test_all_flags_are_taken_and_no_other() -> None:
    parser = et_replay.make_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    assert flags == set(FLAGS.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [["--input"], ["--compute", "--trace-path"], ["--replay-mode", "comp", "--trace_path"]]
)
def test_the_operators_of_a_file_are_replayed(
    data: Path, capfd: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    trace = str(data / "linear/torch_et_0.json.gz")
    flags = ["--cpu", "--iter", "2", "--warmup-iter", "1", "--delay", "3", "--profile-memory"]
    assert et_replay.main([*mode, trace, *flags]) == 0
    out, err = capfd.readouterr()
    assert "aten::linear" in out and "Replay time per iteration" in out and "Operator coverage" in out
    assert "--delay has no effect" in err and "--profile-memory has no effect" in err


@pytest.mark.slow
def test_all_ranks_are_replayed_with_their_communication(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for rank in (0, 1):
        shutil.copy(data / f"cpu/ddp_2/torch_et_{rank}.json.gz", run)
    flags = ["--trace-path", str(run), "--cpu", "--iter", "1", "--warmup-iter", "0"]
    results = ended(forked(2, flags, main="etloom.compat.et_replay"))
    assert [status for status, *_ in results] == [0, 0], results
    assert all(text in results[0][1] for text in ("all_reduce", "aten::copy_")), results[0][1]
    assert results[1][1] == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-g"], "no code is generated"),
        (["--subgraph", "x", "--replay-mode", "full"], "--subgraph requires"),
        (["--compute", "--replay-mode", "comm"], "mutually exclusive"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert et_replay.main(["--input", str(tmp_path / "x.json"), *flags]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
