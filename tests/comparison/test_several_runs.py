"""More than two runs: the table has the sums of each run as `Difference.table` has them for two."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("by", ["category", "family", "operator", "kernel", "collective", "rank"])
def test_the_columns_are_those_of_differences(runs: tuple[Path, Path, Path], by: str) -> None:
    first, *others = runs
    table = etloom.compare({str(number): run for number, run in enumerate(runs)}, by=by)
    for number, other in enumerate(others, 1):
        expected = etloom.diff(first, other).table(by)
        stem = (
            "device_" if "device_before_ns" in expected.columns and expected["device_before_ns"].sum() else ""
        )
        keys = [name for name in table.columns if not name.endswith("_ns")]
        columns = pl.col("0_ns").fill_null(0), pl.col(f"{number}_ns").fill_null(0)
        pair = table.filter(pl.any_horizontal(pl.col("0_ns", f"{number}_ns").is_not_null())).select(
            *keys, *columns
        )
        wanted = expected.select(*keys, f"{stem}before_ns", f"{stem}after_ns").rows()
        assert sorted(pair.rows(), key=repr) == sorted(wanted, key=repr)


@pytest.mark.slow
def test_each_run_is_judged_against_the_first(
    runs: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, runs), "--by", "operator", "--top", "1", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert [line.split(": ")[1] for line in err.splitlines() if "per step" in line] == [
        run.name for run in runs[1:]
    ]
    (row,) = json.loads(out)
    assert row["slow_ns"] == pytest.approx(1.05 * row["a_ns"], rel=1e-5)


def test_runs_of_one_name_have_columns_of_their_own(
    runs: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(runs[0])
    assert main(["diff", path, path, path, "--format", "csv"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header == "category," + ",".join(f"{path} ({number})_ns" for number in (1, 2, 3))


@pytest.mark.parametrize("option", [["--by", "tree"], ["--by", "step"]])
def test_what_compares_two_runs_says_so(
    runs: tuple[Path, Path, Path], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *map(str, runs), *option]) == 2
    assert "compares two runs, not 3" in capsys.readouterr().err


def test_no_run_is_one_line() -> None:
    with pytest.raises(etloom.EtloomError, match="runs is empty"):
        etloom.compare({})
