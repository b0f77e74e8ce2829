"""The options of `etloom link` on real recordings, with bad input too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.cli import main, output
from etloom.core.trace import Trace
from support.examples import examples

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        status = main(["link", *map(str, arguments)])
        return (status, *capsys.readouterr())

    return run


def pair(data: Path, name: str, other: str | None = None) -> list[str]:
    return [
        *("--host", str(data / name / "torch_et_0.json.gz")),
        *("--device", str(data / (other or name) / "kineto_trace_0.json.gz")),
    ]


@pytest.mark.slow
def test_a_file_for_each_rank_if_out_is_a_folder(data: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "linked"
    assert call(data / "cpu" / "ddp_2", "--out", out, "--to", "etplus", "--no-cache")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["rank_0.etplus.json", "rank_1.etplus.json"]
    nodes = json.loads((out / "rank_1.etplus.json").read_text())["nodes"]
    assert sum("inclusive_dur" in node for node in nodes) == 7050


@pytest.mark.slow
def test_one_file_in_a_folder_if_the_format_contains_all_ranks(
    data: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "linked"
    assert call(data / "cpu" / "coll_4", "--out", out, "--to", "chrome", "--no-cache")[0] == 0
    assert [path.name for path in out.iterdir()] == ["run.json"]
    (tmp_path / "taken").write_text("")
    status, _, err = call(
        data / "cpu" / "coll_4", "--out", tmp_path / "taken", "--to", "chrome", "--no-cache"
    )
    assert status == 1 and "taken: File exists" in err


@pytest.mark.slow
def test_one_rank_of_a_folder(data: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "one.etplus.json.gz"
    assert call(data / "cpu" / "ddp_2", "--rank", 1, "--out", out, "--no-cache")[0] == 0
    one = etloom.read(out)
    assert isinstance(one, Trace) and one.nodes.height == 7053
    status, _, err = call(data / "cpu" / "ddp_2", "--rank", 9, "--out", out, "--no-cache")
    assert (status, err) == (1, "etloom: unknown rank 9; the run holds ranks 0, 1\n")
    status, _, err = call(data / "cpu" / "ddp_2", "--out", tmp_path / "all.etplus.json", "--no-cache")
    assert status == 1 and "a file contains one rank, not 2" in err


@pytest.mark.slow
@pytest.mark.parametrize("folder", [False, True])
def test_iterations(data: Path, tmp_path: Path, call: Call, folder: bool) -> None:
    given = [data / "linear", "--no-cache"] if folder else pair(data, "linear")
    out = tmp_path / "all.parquet"
    status, said, _ = call(*given, "--iterations", "all", "--out", out)
    assert status == 0 and "39 equal iterations: all are joined" in said
    saved = etloom.read(out)
    linked = saved if isinstance(saved, Trace) else saved[0]
    assert linked.links.height == 39 * 928
    status, said, _ = call(*given, "--out", out)
    assert status == 0 and "39 equal iterations: number 19, counted from 0, is joined" in said
    status, _, err = call(*given, "--iterations", 39, "--out", out)
    assert (
        status == 1
        and "unknown iteration 39; the execution trace matches 39 iterations of the profile: 0 to 38" in err
    )
    status, _, err = call(*given, "--iterations", "some", "--out", out)
    assert (status, err) == (
        2,
        "etloom: --iterations: unknown iterations 'some'; expected best, all or a number; "
        "see etloom link --help\n",
    )


@pytest.mark.slow
def test_the_pause_after_which_a_thread_follows_another(data: Path, tmp_path: Path, call: Call) -> None:
    def handoffs(*more: object) -> int:
        out = tmp_path / "x.parquet"
        assert call(*pair(data, "nccl_ddp"), *more, "--out", out)[0] == 0
        trace = etloom.read(out)
        assert isinstance(trace, Trace)
        return trace.thread_dependencies.filter(trace.thread_dependencies["kind"] == "thread").height

    usual = handoffs()
    assert handoffs("--inter-thread-threshold", 1000) == usual
    assert handoffs("--inter-thread-threshold", 50) > usual > handoffs("--inter-thread-threshold", 1e9) - 1
    assert call(*pair(data, "nccl_ddp"), "--inter-thread-threshold", -1, "--out", tmp_path / "x")[0] == 2


@pytest.mark.slow
def test_strict_fails_on_data_loss(data: Path, tmp_path: Path, call: Call) -> None:
    out, cut = tmp_path / "x.etplus.json", tmp_path / "kineto.json.gz"
    whole = (data / "dlrm" / "kineto_trace_0.json.gz").read_bytes()
    cut.write_bytes(whole[:-2000])
    given = ["--host", data / "dlrm" / "torch_et_0.json.gz", "--device", cut, "--out", out]
    status, _, err = call(*given)
    assert status == 0 and out.exists() and "read.truncated: " in err
    out.unlink()
    status, _, err = call(*given, "--strict")
    assert status == 1 and err.count("\n") == 1 and "omit --strict" in err and not out.exists()
    assert call(*pair(data, "dlrm"), "--strict", "--out", out)[0] == 0


@pytest.mark.slow
def test_files_that_cannot_be_linked_are_one_line(data: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "x.etplus.json"
    nsys = data / "nsys" / "h100_2gpu_1s.sqlite.gz"
    host = data / "nccl_ddp" / "torch_et_0.json.gz"
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    for arguments, words in (
        ([*pair(data, "linear", "resnet_mismatch"), "--out", out], "not of one program: at best "),
        (["--host", host, "--device", nsys, "--out", out], "contains the ranks 0, 1; select one with --rank"),
        (
            ["--host", host, "--device", nsys, "--rank", 5, "--out", out],
            "unknown rank 5; the run holds ranks 0, 1",
        ),
        (["--host", host, "--device", nsys, "--rank", 1, "--out", out], "not of one program"),
        (["--host", host, "--device", tmp_path / "none", "--out", out], "no such file or folder"),
        (["--host", host, "--device", mine, "--out", mine], "is the trace to read, and would be overwritten"),
        (
            ["--device", data / "linear" / "kineto_trace_0.json.gz", "--out", out],
            "the trace has no execution trace",
        ),
    ):
        status, _, err = call(*arguments)
        assert status == 1 and err.count("\n") == 1 and words in err, err
        assert not out.exists()
    status, _, err = call(*pair(data, "linear"), "--to", "nothing", "--out", out)
    assert (
        status == 2
        and err.startswith("etloom: --to: unknown export 'nothing'; expected one of ")
        and not out.exists()
    )
    assert mine.read_text() == "{}"


CELL = st.none() | st.text("ab é漢🙂\n\t[x]", max_size=9)


@settings(max_examples=examples(40))
@given(rows=st.lists(st.tuples(CELL, st.none() | st.integers(-(10**12), 10**12), CELL), max_size=4))
def test_the_lines_of_a_table_are_those_that_rich_draws(
    rows: list[tuple[str | None, int | None, str | None]],
) -> None:
    schema = {"name": pl.String, "dur_ns": pl.Int64, "note": pl.String}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    assert output.format_lines(frame) == output.render_text(output.build_table(frame))
