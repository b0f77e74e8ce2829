"""Pipeline operation traces: detection by columns, tables, and files that are incomplete or hostile."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.schema import Stat
from etloom.formats import detect_format, pipeline_operations
from etloom.formats.io.parquet_input import read_columns

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mb_id", "mc")
ROWS = [
    (0, 0, 0, 7, "params-all-gather", 0.0, 0.5, 0, -1, 0),
    (0, 0, 0, 7, "forward-compute", 0.5, 1.0, 0, 0, 0),
    (0, 0, 0, 7, "forward-send", 1.5, 0.25, 0, -1, -1),
    (0, 1, 4, 7, "forward-recv", 0.25, 1.5, 0, -1, -1),
    (0, 1, 4, 7, "forward-compute", 1.75, 1.0, 0, 0, 0),
    (0, 0, 0, 9, "forward-compute", 0.0, 1.0, 0, 0, 0),
]


def write_rows(path: Path, rows: list[tuple[object, ...]] = ROWS, **changes: pl.Expr) -> Path:
    frame = pl.DataFrame(rows, schema=COLUMNS, orient="row", strict=False).with_columns(**changes)
    frame.write_parquet(path)
    return path


def test_operations_become_events_and_communications(tmp_path: Path) -> None:
    job = etloom.open(write_rows(tmp_path / "job.parquet"), use_cache=False)
    assert list(job.ranks) == [0, 4]
    first = job[0].events
    assert first["name"].to_list() == [
        "params-all-gather",
        "forward-compute",
        "forward-send",
        "forward-compute",
    ]
    assert first["ts"].to_list() == [0, 500_000_000, 1_500_000_000, 2_750_000_000]
    assert first["dur"].to_list() == [500_000_000, 1_000_000_000, 250_000_000, 1_000_000_000]
    assert first["args"][1] == '{"step":7,"sequence":0,"micro_batch":0,"chunk":0}'
    assert (job[4].meta["stage"], job[4].meta["data_parallel_rank"]) == (1, 0)
    send = job[0].comms.row(1, named=True)
    assert (send["collective"], send["peer"], send["event"]) == ("send", 4, 2)
    gather = job[0].comms.row(0, named=True)
    assert (gather["collective"], gather["ranks"], gather["group_size"]) == ("all_gather", "[0]", 1)
    assert dict(job.stats.select("name", "count").iter_rows()) == {"read.steps_joined": 2}


def test_only_parquet_with_these_columns_is_taken(tmp_path: Path) -> None:
    assert detect_format(write_rows(tmp_path / "job.parquet")) == "pipeline-operations"
    pl.DataFrame({"timestamp": [1, 2], "power": [3.0, 4.0]}).write_parquet(tmp_path / "metrics.parquet")
    assert detect_format(tmp_path / "metrics.parquet") == "metrics"


def test_the_footer_of_a_long_file_is_read(tmp_path: Path) -> None:
    rows = [
        (0, 0, 0, step, "forward-compute", step * 0.37, 1 / (step + 1), 0, 0, 0) for step in range(20_000)
    ]
    path = write_rows(tmp_path / "long.parquet", rows)
    assert path.stat().st_size > 1 << 17
    assert detect_format(path) == "pipeline-operations"


@pytest.mark.slow
def test_invalid_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [
        (0, 0, 0, 7, "gc", float("nan"), 1.0, 0, 0, 0),
        (0, 0, 0, 7, "gc", 1.0, float("inf"), 0, 0, 0),
        (0, 0, 0, 7, "gc", 1.0, -1.0, 0, 0, 0),
        (0, 0, -3, 7, "gc", 1.0, 1.0, 0, 0, 0),
        (0, 0, 0, 7, None, 1.0, 1.0, 0, 0, 0),
        (0, 0, 0, 7, "gc", 1e300, 1.0, 0, 0, 0),
    ]
    job = etloom.open(write_rows(tmp_path / "bad.parquet", ROWS + bad), use_cache=False)
    assert dict(job.stats.select("name", "count").iter_rows())["read.incomplete_rows"] == len(bad)
    assert sum(trace.events.height for trace in job.values()) == len(ROWS)


@pytest.mark.parametrize("cut", [200, 8, 1])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, cut: int) -> None:
    path = write_rows(tmp_path / "cut.parquet")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(EtloomError) as raised:
        pipeline_operations.read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [pl.exceptions.ComputeError, pl.exceptions.PanicException])
def test_any_failure_of_polars_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = write_rows(tmp_path / "job.parquet")

    def fail(*_: object, **__: object) -> None:
        raise error("the sizes differ\nat some line")

    monkeypatch.setattr(pl, "read_parquet", fail)
    with pytest.raises(EtloomError, match=r"is not a readable Parquet file: the sizes differ$"):
        pipeline_operations.read(path)


def test_columns_and_sizes_are_checked(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "job.parquet")
    with pytest.raises(EtloomError, match="more than 3 rows"):
        pipeline_operations.read(path, limit=3)
    pl.read_parquet(path).drop("stage").write_parquet(path)
    with pytest.raises(EtloomError, match="'stage'"):
        pipeline_operations.read(path)
    write_rows(path, optype=pl.lit(None, pl.String))
    with pytest.raises(EtloomError, match="no operation"):
        pipeline_operations.read(path)


def test_uncastable_columns_become_null(tmp_path: Path) -> None:
    path = tmp_path / "operations[1].parquet"  # not a pattern
    texts = pl.Series("text", ["a", None], dtype=pl.Categorical)
    pl.DataFrame([texts, pl.Series("list", [[1], [2]]), pl.Series("whole", [3, 4])]).write_parquet(path)
    stats: list[Stat] = []
    wanted = {"text": pl.Int64, "list": pl.Int64, "whole": pl.Float64, "absent": pl.String}
    table = read_columns(path, wanted, "read.wrong_type", stats)
    assert table.rows() == [(None, None, 3.0, None), (None, None, 4.0, None)]
    assert [stat.count for stat in stats] == [1, 2]


def test_steps_that_exceed_an_integer_of_nanoseconds_are_refused(tmp_path: Path) -> None:
    rows = [(0, 0, 0, step, "forward-compute", 0.0, 1e7, 0, 0, 0) for step in range(1000)]
    with pytest.raises(EtloomError, match="more than 9e"):
        pipeline_operations.read(write_rows(tmp_path / "long.parquet", rows))
