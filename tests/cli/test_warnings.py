"""Warnings of the library: one line each on the command line, at the user's line in Python."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import etloom
from etloom import cli
from etloom.cli.error_handling import handle_errors
from etloom.core.errors import EtloomWarning, warn

BROKEN = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2},'


def test_a_warning_is_a_line_like_other_messages(capsys: pytest.CaptureFixture[str]) -> None:
    with handle_errors():
        warn("half of it is missing")
        warn("half of it is missing")
    assert capsys.readouterr().err == "etloom: warning: half of it is missing\n" * 2


def test_warnings_of_other_packages_are_unchanged() -> None:
    with pytest.warns(RuntimeWarning, match="overflow"), handle_errors():
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)


def test_a_warning_names_the_line_of_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.json"
    path.write_text(BROKEN)
    with pytest.warns(
        EtloomWarning, match=r"rank_0\.json: data lost or doubtful: read\.truncated 1"
    ) as raised:
        etloom.convert(path, tmp_path / "rank_0.parquet")
    assert raised[0].filename == __file__


def test_convert_prints_the_file_that_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank_0.json"
    path.write_text(BROKEN[:-1] + "]}")
    cli.main(["convert", str(path), str(tmp_path / "job.et")])
    assert capsys.readouterr().err.endswith(f"wrote {tmp_path / 'job.0.et'}\n")
    assert (tmp_path / "job.0.et").is_file()
